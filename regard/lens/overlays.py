"""Attention drawn on an image: one exact row, or the mean of all queries, in the image's own pixels.

    >>> import torch, regard
    >>> from regard.layouts import Frame, Sides
    >>> from regard.lens.placement import TokenPlacement
    >>> x = torch.zeros(1, 2, 5, 4)
    >>> view = regard.look(x, x, x)                                          # of 1 cls and 2 × 2 patches
    >>> frame = Frame.whole(30, 60).resized(15, 30).cropped(0, 7, 15, 15)
    >>> view.placed = TokenPlacement(sides=(Sides.patches(frame, patch=7),))
    >>> seen = view.overlay(token="cls")
    >>> seen
    Overlay(mean of 2 heads: cls → the image; patch 0.800, cls 0.200)
    >>> seen.boxes[0].tolist(), seen.heat.shape                              # in the image
    ([0.0, 14.0, 14.0, 28.0], (30, 60))

Axis letters: W windows of a batch entry, H heads, N positions, P patches of one image.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.layouts import KINDS
from regard.lens.measures.weights import sources
from regard.lens.placement import ImagePatches, Token, beyond, find_token, name_token
from regard.lens.validity import index_among
from regard.viz import figures
from regard.viz.overlay import Floats, box_heat, overlay, read_photograph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.lens.view import View

__all__ = ["Overlay", "make_overlay", "received_from"]

AT_ONCE = 1 << 24  # weights held at once while rows are summed


@dataclass(frozen=True, eq=False, repr=False)
class Overlay:
    """The weights of a token on an image: what `View.overlay` returns.

    Attributes:
        title: whose attention it is; "padding included" if rows of padding could not be left out.
        weights: (N,) the exact row over the keys, in their order; of a column, over the queries; of all queries, the
            mean row of those that are no padding, (W·N,) where these are cut into windows.
        shares: sums of the weights by kind of token; "other images" has the patches of those, "beyond the image" those
            that lie wholly on padding around the image, "sink" a learned sink.
        boxes: (P, 4) the patches in the image: top, left, bottom, right.
        mass: (P,) the weight of each patch; exactly 0 outside the token's window.
        cells: (P, 2) row and column of each in the grid of patches.
        tokens: (P, 2) window and index of each.
        asked: (4,) the box of the token itself; None if it is no patch of this image.
        image_size: height and width of the image.
        image: (height, width) its grey values from 0 to 1, or None.
    """

    title: str
    weights: Floats
    shares: dict[str, float]
    boxes: Floats
    mass: Floats
    cells: NDArray[np.int64]
    tokens: NDArray[np.int64]
    asked: Floats | None
    image_size: tuple[int, int]
    image: NDArray[np.float32] | None

    @cached_property
    def heat(self) -> NDArray[np.float32]:
        """(height, width) the weight of the patch that each pixel lies in; NaN where the model did not see the image.

        A pixel on the border of patches has their mean by area.
        """
        return box_heat(self.boxes, self.mass, self.image_size)

    def figure(self, *, dark: bool = False) -> Figure:
        """The image in grey under the heat. dark: draw on a dark background. Raises ImportError without matplotlib."""
        return overlay(
            *(self.boxes, self.mass, self.image_size),
            image=self.image,
            asked=None if self.asked is None or beyond(self.asked, self.image_size) else self.asked,
            note=f"weight in all: {self._sums}",
            title=self.title,
            dark=dark,
        )

    def save(self, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
        """Write the figure as .png, .svg or .pdf. Raises as `regard.figures.save` does."""
        return figures.save(self.figure(dark=dark), Path(path))

    def _repr_png_(self) -> bytes | None:
        if find_spec("matplotlib") is None:  # a notebook then shows the text
            return None
        buffer = BytesIO()
        self.figure().savefig(buffer, format="png")
        return buffer.getvalue()

    @property
    def _sums(self) -> str:
        order = sorted(self.shares.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {'<0.001' if 0 < share < 0.001 else f'{share:.3f}'}" for name, share in order)

    def __repr__(self) -> str:
        return f"Overlay({self.title}; {self._sums})"


def make_overlay(
    view: View,
    image: object = None,
    token: Token = None,
    *,
    at: tuple[float, float] | None = None,
    head: int | None = None,
    batch: int = 0,
    image_index: int = 0,
    column: bool = False,
) -> Overlay:
    """The overlay of a view whose `placed` says where its tokens lie. See `View.overlay` for the arguments."""
    # 1. Check the arguments.
    placed = view.placed
    if not placed.sides:
        raise LookupError(placed.lacking)
    if token is not None and at is not None:
        raise ValueError(f"either token= or at=, not both: got {token!r} and {at!r}")
    if at is not None and not (isinstance(at, (tuple, list)) and len(at) == 2):
        raise TypeError(f"at must be a place (y, x) in the image's pixels, got {at!r}")
    if column and token is None and at is None:
        raise ValueError("column=True shows who looks at a token: name it with token= or at=")
    entry = index_among("batch", batch, view.sizes[0] // placed.windows, "batch entries")
    heads = slice(None) if head is None else [index_among("head", head, view.sizes[1], "heads")]
    sides, words = placed.entry(entry)
    image_index = index_among("image_index", image_index, len(sides.frames), "images")

    # 2. Find the token among the queries (of a column: the keys), and the patches on the other side.
    queries, keys = (ImagePatches(side, sides.frames[image_index], image_index) for side in (sides.queries, sides.keys))
    asker, shown = (keys, queries) if column else (queries, keys)
    asker_name, shown_name = ("key", "query") if column else ("query", "key")
    turned = "leave column=True out to see its row" if column else "column=True shows who looks at a patch"
    _require_patches(shown, asker, shown_name, turned)
    found = None
    if at is not None:
        _require_patches(asker, shown, asker_name, turned)
        found = asker.at(*at)
    elif token is not None:
        found = find_token(asker.layout, token, words, asker_name)

    # 3. Its weights (W, N), 0 in the windows that are not its own; or the mean row of all queries.
    flat, real = replace(view, lead=None, numpy=False), sides.queries.kind != "padding"  # (W, Nq)
    windows, nq = real.shape
    own = slice(entry * windows, (entry + 1) * windows)
    if found is not None:
        line = (flat.column(found[1]) if column else flat.row(found[1]))[own][found[0], heads]  # (H, N)
        weights = np.zeros((windows, line.shape[-1]))
        weights[found[0]] = line.double().mean(0).cpu().numpy()
    else:
        if real.all() or view.weights is None:
            received, count = flat.received[own], windows * nq  # (W, H, Nk)
            if received.shape[-1] != view.sizes[3]:
                raise LookupError(
                    "the weights that keys receive were pooled in an overview: save the capture without overview=True"
                )
        else:
            received, count = received_from(flat, entry, real), int(real.sum())
        weights = np.asarray((received[:, heads].double().mean(1) / max(count, 1)).cpu().numpy())

    # 4. Sums by kind of token.
    layout = shown.layout
    others = (layout.kind == "patch") & (layout.image != image_index)
    outside = np.zeros(layout.shape, bool)
    outside[tuple(shown.tokens[shown.beyond].T)] = True
    groups = {kind: (layout.kind == kind) & ~others & ~outside for kind in KINDS}
    groups |= {"other images": others, "beyond the image": outside}
    shares = {name: float(weights[where].sum()) for name, where in groups.items() if where.any()}
    if not column and view.weights is not None and any(source.has_sink for source in sources(view.weights)):
        shares["sink"] = 1.0 - float(weights.sum())  # what does not go to the keys

    # 5. The title.
    target = "the image" if len(sides.frames) == 1 else f"image {image_index}"
    if found is not None:
        who = name_token(asker, found, words)
    else:
        who = "all queries" if real.all() or view.weights is not None else "all queries (padding included)"
    count = view.sizes[1]
    whose = f"mean of {count} heads" if head is None and count > 1 else f"head {(head or 0) % count}"
    title = f"{whose}: {target} → {who}" if column else f"{whose}: {who} → {target}"
    number = None if found is None else asker.number(found)
    return Overlay(
        title=f"{placed.path}, {title}" if placed.path else title,
        weights=weights.ravel() if found is None else weights[found[0]],
        shares=shares,
        boxes=shown.boxes,
        mass=weights[tuple(shown.tokens.T)],
        cells=shown.cells,
        tokens=shown.tokens,
        asked=None if number is None else asker.boxes[number],
        image_size=shown.frame.image_size,
        image=None if image is None else read_photograph(image, shown.frame.image_size),
    )


def _require_patches(side: ImagePatches, other: ImagePatches, name: str, hint: str) -> None:
    if not len(side.tokens):
        advice = f"; {hint}" if len(other.tokens) else ""
        raise LookupError(f"no {name} of this attention is a patch of image {side.picture}: {side.layout}{advice}")


def received_from(view: View, entry: int, real: NDArray[np.bool_]) -> Tensor:
    """(W, H, Nk) fp64: the weight that each key of a batch entry gets from some of its queries.

    Args:
        view: on torch, with axes (B, H, …).
        entry: which batch entry.
        real: (W, Nq) which queries.

    Raises:
        LookupError: if q and k were not kept.

    >>> import regard
    >>> x = torch.zeros(1, 1, 4, 3)
    >>> received_from(regard.look(x, x, x), 0, np.array([[True, True, False, False]]))
    tensor([[[0.5000, 0.5000, 0.5000, 0.5000]]], dtype=torch.float64)
    """
    (batch, heads, _, nk), (windows, _) = view.sizes, real.shape
    total = torch.zeros(windows, heads, nk, dtype=torch.float64)
    rows = np.flatnonzero(real.any(0))
    at_once = max(1, AT_ONCE // max(1, batch * heads * nk))
    for i in range(0, len(rows), at_once):
        part = rows[i : i + at_once]
        tile = view.tile(part.tolist(), slice(None))[entry * windows : (entry + 1) * windows]  # (W, H, rows, Nk)
        counted = torch.from_numpy(real[:, part])[:, None, :, None].to(tile.device)
        total += torch.where(counted, tile, 0.0).sum(2, dtype=torch.float64).cpu()
    return total
