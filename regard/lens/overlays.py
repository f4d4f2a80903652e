"""Attention drawn on an image: layouts of tokens and the calls they fit, which token is meant, its weights in pixels.

Axis letters: W windows of a batch entry, H heads, N positions, P patches of one image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.checks import index_among
from regard.layouts import KINDS, Frame, Layout, Sides
from regard.lens.display import png
from regard.lens.measures.measures import Sizes
from regard.lens.measures.weights import sources
from regard.locale import Lang, catalogue, check_lang, translate
from regard.viz import figures
from regard.viz.map import Floats, box_heat, overlay, read_photograph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.lens.view import View

ROUNDING = 1e-6  # of an image's longer side
AT_ONCE = 1 << 24  # weights held at once while rows are summed

Token = int | str | tuple[int, int] | None
"""A token by its index, its kind or word where there is one such, or its window and its index there."""

TokenIndex = tuple[int, int]
"""Window and index of a token."""


# ------------------------------------------------------------------------------------------------- where the tokens lie

LayoutsByPath = dict[str | None, tuple[Sides, ...]]
"""Layouts by path, or under None those for all paths."""

HOW = (
    "say what its tokens are, with regard.layouts: seen.layouts = Sides.patches(224, patch=16) for a ViT, "
    "or {path: Sides(queries, keys, frames)}; watch(model, layouts=…) takes the same"
)


@dataclass(frozen=True)
class TokenPlacement:
    """Layouts and words of a view's tokens."""

    path: str = ""  # of the module
    sides: tuple[Sides, ...] = ()  # one for all batch entries, or one each; empty if unknown or if they do not fit
    words: Sequence[Sequence[str]] | None = None  # a row for each batch entry, or one for all
    lacking: str = f"it is not known where the tokens of this attention lie: {HOW}"  # the reason for empty sides
    model: str = ""  # its name
    layer: int | None = None  # the module's number in its capture

    def name(self, lang: Lang, head: int | None = None) -> str:
        """Model, layer and head, as far as they are known."""
        layer = "" if self.layer is None else translate("layer {layer}", lang, layer=self.layer)
        which = "" if head is None else translate("head {head}", lang, head=head)
        return ", ".join(part for part in (self.model, layer, which) if part)

    @property
    def windows(self) -> int:
        """Number of windows per batch entry."""
        return self.sides[0].queries.shape[0]

    def entry(self, batch: int) -> tuple[Sides, Sequence[str] | None]:
        """The layouts and words of a batch entry."""
        words = None if not self.words else self.words[batch if batch < len(self.words) else 0]
        return self.sides[batch if len(self.sides) > 1 else 0], words


@dataclass(frozen=True)
class RunSizes:
    """Sizes of the calls of one run of a module; more than one call in generation."""

    kind: str  # "self" or "cross"
    sizes: tuple[Sizes, ...]  # of each call
    first: tuple[int, ...]  # position of each call's first key among those of the run

    @property
    def whole(self) -> Sizes:
        """The sizes of all calls together."""
        batch, heads, _, _ = self.sizes[0]
        ends = (first + sizes[3] for first, sizes in zip(self.first, self.sizes, strict=True))
        return batch, heads, sum(sizes[2] for sizes in self.sizes), max(ends)

    def misfit(self, sides: tuple[Sides, ...]) -> str | None:
        """Why layouts do not fit this run, or None."""
        (batch, _, nq, nk), whole = self.sizes[0], self.whole
        counts = {side.queries.shape[0] for side in sides}
        if len(counts) != 1 or batch % max(counts) or len(sides) not in (1, batch // max(counts)):
            return f"{len(sides)} layouts of {_some(counts)} sequences do not make the {batch} batch rows of the call"
        fitting = {"queries": {nq, whole[2]}, "keys": {nk, whole[3]}}
        if self.kind == "self" and len(self.sizes) > 1:
            fitting["keys"].add(nq)  # a cache of fixed size has room for more than the prompt
        for side in sides:
            for name, wanted in fitting.items():
                layout: Layout = getattr(side, name)
                if layout.shape[1] not in wanted:
                    return f"the call has {_some(wanted)} {name}, but their layout has {layout.shape[1]}: {layout}"
        return None

    def cut(self, sides: tuple[Sides, ...], n: int | None) -> tuple[Sides, ...]:
        """The layouts of call n, or of the whole run; tokens added after the first call are text."""
        begin, first, (_, _, nq, nk) = 0, 0, self.whole
        if n is not None:
            begin, first, (_, _, nq, nk) = sum(s[2] for s in self.sizes[:n]), self.first[n], self.sizes[n]
        if len(self.sizes) == 1 and all(s.queries.shape[1] == nq and s.keys.shape[1] == nk for s in sides):
            return sides

        def part(layout: Layout, begin: int, n: int) -> Layout:
            """n tokens from `begin`, text beyond the layout's end."""
            chosen = slice(begin, begin + n)
            kept = Layout(layout.kind[:, chosen], layout.image[:, chosen], layout.box[:, chosen])
            short = n - kept.shape[1]
            return kept + Layout.text(short) if short else kept

        return tuple(Sides(part(s.queries, begin, nq), part(s.keys, first, nk), s.frames) for s in sides)


def read_layouts(layouts: object) -> LayoutsByPath:
    """Normalise layouts: {path: Sides}, or one Sides for all paths; or a list of either, one per batch entry.

    A mapping may also have a list of Sides under a path, one per batch entry. Raises TypeError for anything else,
    ValueError for a list of mappings whose paths differ.
    """
    if isinstance(layouts, (list, tuple)) and layouts and all(isinstance(item, Mapping) for item in layouts):
        first = list(layouts[0])
        for number, entry in enumerate(layouts):
            if set(entry) != set(first):
                odd = listed(sorted(set(entry) ^ set(first), key=str))
                raise ValueError(
                    f"batch entries must have layouts of the same paths: only one of entries 0 and {number} has {odd}"
                )
        joined: LayoutsByPath = {}
        for path in first:
            several = [_read_sides(entry[path]) for entry in layouts]
            if wrong := [len(sides) for sides in several if len(sides) != 1]:
                raise ValueError(f"each batch entry must have one Sides under a path, got {wrong[0]} of {path!r}")
            joined[path] = tuple(sides[0] for sides in several)
        return joined
    if isinstance(layouts, Mapping):
        return {path: _read_sides(sides) for path, sides in layouts.items()}
    return {None: _read_sides(layouts)}


def _read_sides(layouts: object) -> tuple[Sides, ...]:
    several = layouts if isinstance(layouts, (list, tuple)) else [layouts]
    read = tuple(item for item in several if isinstance(item, Sides))
    if len(read) < len(several) or not read:
        got = next((type(item).__name__ for item in several if not isinstance(item, Sides)), "an empty list")
        raise TypeError(
            f"layouts must be regard.layouts.Sides, one or one per batch entry, or {{path: Sides}}; got {got}"
        )
    return read


def fit_layouts(layouts: LayoutsByPath, runs: Mapping[str, Sequence[RunSizes]]) -> dict[str, tuple[Sides, ...]]:
    """Path → layouts for the modules that were seen, each checked against the runs of its module.

    Layouts of other modules are left out; layouts for all paths are kept where they fit. Raises ValueError if none of
    the paths was seen, or layouts fit no run of their module.
    """
    if None in layouts:
        sides = layouts[None]
        fitting = {path: sides for path, of_path in runs.items() if any(run.misfit(sides) is None for run in of_path)}
        if not fitting:
            path, of_path = next(iter(runs.items()))
            raise ValueError(f"these layouts fit no module; of {path!r}, {of_path[0].misfit(sides)}")
        return fitting
    seen = {path: sides for path, sides in layouts.items() if path is not None and path in runs}
    if not seen:
        raise ValueError(
            f"layouts are of {listed(list(layouts))}, none of which was seen; seen are {listed(list(runs))}"
        )
    for path, sides in seen.items():
        reasons = [run.misfit(sides) for run in runs[path]]
        if None not in reasons:
            raise ValueError(f"layouts of {path!r} do not fit: {reasons[0]}")
    return seen


def _some(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def listed(names: Sequence[object], most: int = 4) -> str:
    """Names in quotes, the first of many."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


# ------------------------------------------------------------------------------------------------- patches and overlays


@dataclass(frozen=True)
class ImagePatches:
    """The patches of one image: `image` is its number in the layout."""

    layout: Layout
    frame: Frame
    image: int

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """(P, 2) window and index of each."""
        return np.argwhere((self.layout.kind == "patch") & (self.layout.image == self.image))

    @cached_property
    def boxes(self) -> NDArray[np.float64]:
        """(P, 4) top, left, bottom, right of each in the image."""
        return self.frame.boxes(self._pixels)

    @cached_property
    def beyond(self) -> NDArray[np.bool_]:
        """(P,) which lie wholly on padding around the image."""
        return beyond(self.boxes, self.frame.image_size)

    @cached_property
    def cells(self) -> NDArray[np.int64]:
        """(P, 2) row and column of each in the grid of patches."""
        top, left = self._pixels[:, 0], self._pixels[:, 1]
        ranks = [np.unique(edge, return_inverse=True)[1].ravel() for edge in (top, left)]
        return np.stack(ranks, -1).astype(np.int64)

    def number(self, place: TokenIndex) -> int | None:
        """The number of the patch that a token is, or None."""
        numbers = np.flatnonzero((self.tokens == place).all(-1))
        return int(numbers[0]) if len(numbers) else None

    def at(self, y: float, x: float) -> TokenIndex:
        """The patch at a place in the image. Raises LookupError if the model did not see it, TypeError if no number."""
        if any(isinstance(n, bool) or not isinstance(n, (int, float, np.integer, np.floating)) for n in (y, x)):
            raise TypeError(f"at must be two numbers, (y, x) in the image's pixels; got ({y!r}, {x!r})")
        (height, width), where = self.frame.image_size, f"at=({y:g}, {x:g})"
        if not (0 <= y < height and 0 <= x < width):
            raise LookupError(f"{where} is outside the image, which is {height} pixels high and {width} wide")
        try:
            return self.layout.at(*self.frame.pixel(y, x), self.image)
        except LookupError:
            (top, left), (bottom, right) = self.boxes[:, :2].min(0), self.boxes[:, 2:].max(0)
            raise LookupError(
                f"{where} is a place that the model did not see: it saw rows {max(top, 0):.4g} to "
                f"{min(bottom, height):.4g} and columns {max(left, 0):.4g} to {min(right, width):.4g} of the image"
            ) from None

    @property
    def _pixels(self) -> NDArray[np.float64]:
        return np.asarray(self.layout.box[tuple(self.tokens.T)])


def beyond(boxes: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Which boxes, (…, 4), lie outside an image of this height and width."""
    near = ROUNDING * max(size)
    top, left, bottom, right = np.moveaxis(boxes, -1, 0)
    height, width = size
    return np.asarray((bottom <= near) | (right <= near) | (top >= height - near) | (left >= width - near))


def find_token(layout: Layout, token: Token, words: Sequence[str] | None, name: str) -> TokenIndex:
    """Window and index of a token among queries or keys (`name`), by index or as `_find_by_name`.

    Raises LookupError for a kind or word of which there is none, or several; IndexError for an index out of range;
    TypeError for anything else.
    """
    windows, n = layout.shape
    if isinstance(token, str):
        return _find_by_name(layout, token, words, name)
    window, index = token if isinstance(token, tuple) and len(token) == 2 else (0, token)
    if index is token and windows > 1:
        raise LookupError(
            f"token {token!r} is in each of {windows} windows: say which with token=(window, index), or at=(y, x)"
        )
    window = index_among("window", window, windows, "windows")
    try:
        return window, index_among("token", index, n, {"query": "queries", "key": "keys"}[name])
    except IndexError as error:
        raise IndexError(f"no {name} of this attention: {error}") from None


def _find_by_name(layout: Layout, token: str, words: Sequence[str] | None, name: str) -> TokenIndex:
    """A token by its kind, or else by its word: an exact match, else without surrounding space, else without case."""
    matches = [(int(w), int(i)) for w, i in layout.indices(token)] if token in KINDS else []
    known = list(words) if words is not None and layout.shape == (1, len(words)) else None
    spellings: list[Callable[[str], str]] = [str, str.strip, lambda word: word.strip().casefold()]
    for spelling in spellings:
        wanted = spelling(token)
        matches = matches or [(0, i) for i, word in enumerate(known or []) if wanted and spelling(word) == wanted]
    if len(matches) == 1:
        return matches[0]
    if matches:
        some = ", ".join(str(i if layout.shape[0] == 1 else (w, i)) for w, i in matches[:4])
        more = ", …" if len(matches) > 4 else ""
        raise LookupError(f"{len(matches)} tokens are {token!r} ({some}{more}): name an index")
    hint = ""
    if token not in KINDS and known is None:
        hint = "; its words are not known: watch(model, tokens=…) keeps them"
    elif token not in KINDS and (there := list(dict.fromkeys(word.strip() for word in known or [] if word.strip()))):
        hint = f"; its words are {', '.join(map(repr, there[:6]))}{', …' if len(there) > 6 else ''}"
    raise LookupError(f"no {name} of this attention is {token!r}: {layout}{hint}")


def name_kind(layout: Layout, place: TokenIndex, lang: Lang = "en") -> str:
    """A token by its kind, numbered among those of its kind in its image if there are several: "latent 0"."""
    kind, image = str(layout.kind[place]), int(layout.image[place])
    alike = np.argwhere((layout.kind == kind) & (layout.image == image))
    several = (layout.kind == kind).sum() > len(alike)
    called = catalogue(lang).get(kind, kind)  # "cls" is the same in every language
    name = called if len(alike) == 1 else f"{called} {int((alike == place).all(-1).argmax())}"
    return translate("{token} of image {image}", lang, token=name, image=image) if several and image >= 0 else name


def name_token(patches: ImagePatches, place: TokenIndex, words: Sequence[str] | None, lang: Lang = "en") -> str:
    """A patch by its row and column, text by its word, any other token by its kind."""
    layout = patches.layout
    kind, image = str(layout.kind[place]), int(layout.image[place])
    if kind == "patch":
        own = patches if image == patches.image else ImagePatches(layout, patches.frame, image)
        number = own.number(place)
        assert number is not None
        name = f"{catalogue(lang).get(kind, kind)} ({own.cells[number, 0]}, {own.cells[number, 1]})"
        return name if own is patches else translate("{token} of image {image}", lang, token=name, image=image)
    if words is not None and layout.shape == (1, len(words)):
        return f"“{words[place[1]].strip() or words[place[1]]}” ({place[1]})"
    return name_kind(layout, place, lang)


@dataclass(frozen=True, eq=False, repr=False)
class Overlay:
    """The weights of a token on an image: what `View.overlay` returns.

    Attributes:
        titles: whose attention it is, by language; "padding included" if rows of padding could not be left out.
        weights: (N,) the exact row over the keys, in their order; of a column, over the queries; of all queries, the
            mean row of those that are no padding, (W·N,) where these are cut into windows.
        shares: sums of the weights by kind of token; "other images" has the patches of those, "beyond the image" those
            that lie wholly on padding around the image, "sink" a learned sink.
        boxes: (P, 4) the patches in the image: top, left, bottom, right.
        mass: (P,) the weight of each patch; exactly 0 outside the token's window.
        cells: (P, 2) row and column of each in the grid of patches.
        tokens: (P, 2) window and index of each.
        token_box: (4,) the box of the token itself; None if it is no patch of this image.
        image_size: height and width of the image.
        image: (height, width) its grey values from 0 to 1, or None.
        quantity: what the numbers are, "weight" or the "score" of `rollout` and `relevance`.
    """

    titles: Mapping[Lang, str]
    weights: Floats
    shares: dict[str, float]
    boxes: Floats
    mass: Floats
    cells: NDArray[np.int64]
    tokens: NDArray[np.int64]
    token_box: Floats | None
    image_size: tuple[int, int]
    image: NDArray[np.float32] | None
    quantity: str = "weight"

    @cached_property
    def heat(self) -> NDArray[np.float32]:
        """(height, width) the weight of the patch that each pixel lies in; NaN where the model did not see the image.

        A pixel on the border of patches has their mean by area.
        """
        return box_heat(self.boxes, self.mass, self.image_size)

    @property
    def title(self) -> str:
        """Whose attention it is, in English."""
        return self.titles["en"]

    def figure(self, *, dark: bool = False, lang: Lang = "en") -> Figure:
        """The image in grey under the heat.

        Args:
            dark: draw on a dark background.
            lang: of the figure's words, "en" or "ko".

        Raises:
            ImportError: without matplotlib.
        """
        check_lang(lang)
        total = {"quantity": translate(self.quantity, lang), "sums": self._sums(lang)}
        return overlay(
            *(self.boxes, self.mass, self.image_size if self.image is None else self.image),
            outline=None if self.token_box is None or beyond(self.token_box, self.image_size) else self.token_box,
            note=translate("{quantity} in all: {sums}", lang, **total),
            title=self.titles[lang],
            dark=dark,
            lang=lang,
        )

    def save(self, path: str | os.PathLike[str], *, dark: bool = False, lang: Lang = "en") -> Path:
        """Write the figure as .png, .svg or .pdf. Raises as `regard.figures.save` does."""
        return figures.save(self.figure(dark=dark, lang=lang), Path(path))

    def _repr_png_(self) -> bytes | None:
        return None if find_spec("matplotlib") is None else png(self.figure())  # a notebook then shows the text

    def _sums(self, lang: Lang = "en") -> str:
        order = sorted(self.shares.items(), key=lambda item: -item[1])
        named = [(catalogue(lang).get(name, name), "<0.001" if 0 < n < 0.001 else f"{n:.3f}") for name, n in order]
        return ", ".join(f"{name} {share}" for name, share in named)

    def __repr__(self) -> str:
        return f"Overlay({self.title}; {self._sums()})"


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
    chosen = None
    if at is not None:
        _require_patches(asker, shown, asker_name, turned)
        chosen = asker.at(*at)
    elif token is not None:
        chosen = find_token(asker.layout, token, words, asker_name)

    # 3. Its weights (W, N), 0 in the windows that are not its own; or the mean row of all queries.
    flat, real = replace(view, lead=None, numpy=False), sides.queries.kind != "padding"  # (W, Nq)
    windows, nq = real.shape
    own = slice(entry * windows, (entry + 1) * windows)
    if chosen is not None:
        line = (flat.column(chosen[1]) if column else flat.row(chosen[1]))[own][chosen[0], heads]  # (H, N)
        weights = np.zeros((windows, line.shape[-1]))
        weights[chosen[0]] = line.double().mean(0).cpu().numpy()
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
    def title(lang: Lang) -> str:
        one = len(sides.frames) == 1
        target = translate("the image", lang) if one else translate("image {image}", lang, image=image_index)
        who = translate("all queries", lang)
        if chosen is not None:
            who = name_token(asker, chosen, words, lang)
        elif not real.all() and view.weights is None:
            who = f"{who} {translate('(padding included)', lang)}"
        count = view.sizes[1]
        whose = translate("head {head}", lang, head=(head or 0) % count)
        if head is None and count > 1:
            whose = translate("mean of {count} heads", lang, count=count)
        looks = f"{whose}: {target} → {who}" if column else f"{whose}: {who} → {target}"
        return ", ".join(part for part in (placed.name(lang), looks) if part)

    number = None if chosen is None else asker.number(chosen)
    return Overlay(
        titles={lang: title(lang) for lang in get_args(Lang)},
        weights=weights.ravel() if chosen is None else weights[chosen[0]],
        shares=shares,
        boxes=shown.boxes,
        mass=weights[tuple(shown.tokens.T)],
        cells=shown.cells,
        tokens=shown.tokens,
        token_box=None if number is None else asker.boxes[number],
        image_size=shown.frame.image_size,
        image=None if image is None else read_photograph(image, shown.frame.image_size),
    )


def _require_patches(side: ImagePatches, other: ImagePatches, name: str, hint: str) -> None:
    if not len(side.tokens):
        advice = f"; {hint}" if len(other.tokens) else ""
        raise LookupError(f"no {name} of this attention is a patch of image {side.image}: {side.layout}{advice}")


def received_from(view: View, entry: int, real: NDArray[np.bool_]) -> Tensor:
    """(W, H, Nk) fp64: the weight that each key of a batch entry gets from the queries in `real`, (W, Nq).

    The view is on torch, with axes (B, H, …). Raises LookupError if q and k were not kept.
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
