"""Attention on the photograph: one exact row, or what all queries look at, as numbers of the picture's own pixels.

    >>> import torch, regard
    >>> from regard.layouts import Frame
    >>> from regard.layouts import Sides
    >>> x = torch.zeros(1, 2, 5, 4)
    >>> view = regard.look(x, x, x)                                          # of 1 cls and 2 × 2 patches
    >>> frame = Frame.whole(30, 60).resized(15, 30).cropped(0, 7, 15, 15)
    >>> view.placed = Placed(sides=(Sides.patches(frame, patch=7),))
    >>> seen = overlay_of(view, token="cls")
    >>> seen
    Overlay(mean of 2 heads: cls → the picture; patch 0.800, cls 0.200)
    >>> seen.boxes[0].tolist(), seen.heat.shape                              # in the photograph
    ([0.0, 14.0, 14.0, 28.0], (30, 60))

A row is computed when it is asked for; N×N never is.

Axis letters: E batch entries of W sequences each, H heads, N positions, P patches of one picture.

It does not know how weights are computed, nor how a picture is drawn.
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
from regard.lens.placement import ImagePatches, Token, TokenIndex, TokenPlacement, beyond, find_token, name_token
from regard.lens.validity import index_among
from regard.lens.view import View
from regard.viz.overlay import Floats, box_heat, overlay, read_photograph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Overlay", "overlay_of", "received_from"]

AT_ONCE = 1 << 24  # weights that are held at once while rows are summed up


@dataclass(frozen=True, eq=False, repr=False)
class Overlay:
    """What a token looks at (or is looked at from) on a photograph.

    title: whose attention it is, and of what; "padding included" where rows of padding could not be left out.
    weights: (N,) the exact row over the keys, in their order; of a column, over the queries; of what all queries look
        at, the mean row of those that are no padding, (W·N,) where these are cut into windows.
    shares: what they sum up to, by kind of token; "other pictures" has the patches of those, "beyond the picture" those
        that lie wholly on what was padded around the photograph, "sink" a learned sink.
    boxes: (P, 4) the picture's patches in the photograph: top, left, bottom, right.
    mass: (P,) the weight of each; exactly 0 outside the token's window.
    cells: (P, 2) the row and the column of each in the grid of patches.  tokens: (P, 2) its window and index there.
    asked: (4,) the box of the token itself in the photograph; None for what is no patch of this picture.
    picture: height and width of the photograph.  image: (height, width) its grey values from 0 to 1; None without.
    """

    title: str
    weights: Floats
    shares: dict[str, float]
    boxes: Floats
    mass: Floats
    cells: NDArray[np.int64]
    tokens: NDArray[np.int64]
    asked: Floats | None
    picture: tuple[int, int]
    image: NDArray[np.float32] | None

    @cached_property
    def heat(self) -> NDArray[np.float32]:
        """(height, width) of the photograph: the weight of the patch that a pixel lies in, the same for all of them.

        By areas where a border of patches crosses the pixel; NaN where the model did not see the photograph.
        """
        return box_heat(self.boxes, self.mass, self.picture)

    def figure(self, *, dark: bool = False) -> Figure:
        """The photograph in grey under the heat. dark: for dark paper. Raises ImportError without matplotlib."""
        return overlay(
            *(self.boxes, self.mass, self.picture),
            image=self.image,
            asked=None if self.asked is None or beyond(self.asked, self.picture) else self.asked,
            note=f"weight in all: {self._sums}",
            title=self.title,
            dark=dark,
        )

    def save(self, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
        """Write the figure as .png, .svg or .pdf. Raises as `regard.figures.save` does."""
        from regard.viz.figures import save

        return save(self.figure(dark=dark), Path(path))

    def _repr_png_(self) -> bytes | None:
        if find_spec("matplotlib") is None:  # a notebook then writes the text
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
    picture: int = 0,
    column: bool = False,
) -> Overlay:
    """The overlay of a view, of which `view.placed` says where its tokens lie; all else as `View.overlay` says it."""
    placed = view.placed
    _check_asked(placed, token, at, column)
    entry = index_among("batch", batch, view.sizes[0] // placed.windows, "batch entries")
    sides, words = placed.entry(entry)
    picture = index_among("picture", picture, len(sides.frames), "pictures")
    queries, keys = (ImagePatches(side, sides.frames[picture], picture) for side in (sides.queries, sides.keys))
    asker, shown = (keys, queries) if column else (queries, keys)
    turned = "leave column=True out to see its row" if column else "column=True shows who looks at a patch"
    _check_patches(shown, asker, "query" if column else "key", turned)
    found = None
    if at is not None:
        _check_patches(asker, shown, "key" if column else "query", turned)
        found = asker.at(*at)
    elif token is not None:
        found = find_token(asker.layout, token, words, "key" if column else "query")
    flat, real = replace(view, lead=None, numpy=False), sides.queries.kind != "padding"  # (W, Nq)
    weights = (
        _all_queries(flat, entry, head, real) if found is None else _line(flat, entry, found, head, len(real), column)
    )
    number = None if found is None else asker.number(found)
    target = "the picture" if len(sides.frames) == 1 else f"picture {picture}"
    every = "all queries" if real.all() or view.weights is not None else "all queries (padding included)"
    who = every if found is None else name_token(asker, found, words)
    return Overlay(
        title=_title(placed.path, head, view.sizes[1], f"{target} → {who}" if column else f"{who} → {target}"),
        weights=weights.ravel() if found is None else weights[found[0]],
        shares=_shares(weights, shown) | _sink(view, weights, column),
        boxes=shown.boxes,
        mass=weights[tuple(shown.tokens.T)],
        cells=shown.cells,
        tokens=shown.tokens,
        asked=None if number is None else asker.boxes[number],
        picture=shown.frame.picture,
        image=None if image is None else read_photograph(image, shown.frame.picture),
    )


def _check_asked(placed: TokenPlacement, token: Token, at: object, column: bool) -> None:
    if not placed.sides:
        raise LookupError(placed.lacking)
    if token is not None and at is not None:
        raise ValueError(f"either token= or at=, not both: got {token!r} and {at!r}")
    if at is not None and not (isinstance(at, (tuple, list)) and len(at) == 2):
        raise TypeError(f"at must be a place (y, x) in the photograph's pixels, got {at!r}")
    if column and token is None and at is None:
        raise ValueError("column=True shows who looks at a token: name it with token= or at=")


def _check_patches(side: ImagePatches, other: ImagePatches, name: str, hint: str) -> None:
    """Raise LookupError where a side has no patch of the picture, and say so if the other has."""
    if not len(side.tokens):
        advice = f"; {hint}" if len(other.tokens) else ""
        raise LookupError(f"no {name} of this attention is a patch of picture {side.picture}: {side.layout}{advice}")


def _line(view: View, entry: int, found: TokenIndex, head: int | None, windows: int, column: bool) -> Floats:
    """(W, N) a token's row or column, of one head or the mean of all; 0 in the windows that are not its own."""
    window, i = found
    line = (view.column(i) if column else view.row(i))[entry * windows + window, _heads(view, head)]  # (H, N)
    weights = np.zeros((windows, line.shape[-1]))
    weights[window] = line.double().mean(0).cpu().numpy()
    return weights


def _all_queries(view: View, entry: int, head: int | None, real: NDArray[np.bool_]) -> Floats:
    """(W, Nk) the mean row of a batch entry's queries, of one head or the mean of all.

    real: (W, Nq) which queries are no padding; they alone count where rows are at hand, else all do.
    """
    windows, nq = real.shape
    if real.all() or view.weights is None:
        received, count = view.received, windows * nq
        if received.shape[-1] != view.sizes[3]:
            raise LookupError(
                "what each key receives was pooled, as an overview is: save the capture without overview=True"
            )
        received = received[entry * windows : (entry + 1) * windows]  # (W, H, Nk)
    else:
        received, count = received_from(view, entry, real), int(real.sum())
    return np.asarray((received[:, _heads(view, head)].double().mean(1) / max(count, 1)).cpu().numpy())


def _heads(view: View, head: int | None) -> slice | list[int]:
    return slice(None) if head is None else [index_among("head", head, view.sizes[1], "heads")]


def received_from(view: View, entry: int, real: NDArray[np.bool_]) -> Tensor:
    """(W, H, Nk) fp64: what each key of a batch entry gets from some of its queries.

    >>> import regard
    >>> x = torch.zeros(1, 1, 4, 3)
    >>> received_from(regard.look(x, x, x), 0, np.array([[True, True, False, False]]))
    tensor([[[0.5000, 0.5000, 0.5000, 0.5000]]], dtype=torch.float64)

    view: on torch, with axes (B, H, …).  real: (W, Nq) which queries. Raises LookupError where q and k were not kept.
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


def _shares(weights: Floats, shown: ImagePatches) -> dict[str, float]:
    """What the weights sum up to, by kind, for the kinds that there are."""
    layout = shown.layout
    others = (layout.kind == "patch") & (layout.picture != shown.picture)
    outside = np.zeros(layout.shape, bool)
    outside[tuple(shown.tokens[shown.beyond].T)] = True
    groups = {kind: (layout.kind == kind) & ~others & ~outside for kind in KINDS}
    groups |= {"other pictures": others, "beyond the picture": outside}
    return {name: float(weights[where].sum()) for name, where in groups.items() if where.any()}


def _sink(view: View, weights: Floats, column: bool) -> dict[str, float]:
    """What a learned sink takes of a row: all that is not on the keys."""
    if column or view.weights is None or not any(source.has_sink for source in sources(view.weights)):
        return {}
    return {"sink": 1.0 - float(weights.sum())}


def _title(path: str, head: int | None, heads: int, what: str) -> str:
    whose = f"mean of {heads} heads" if head is None and heads > 1 else f"head {(head or 0) % heads}"
    return f"{path}, {whose}: {what}" if path else f"{whose}: {what}"
