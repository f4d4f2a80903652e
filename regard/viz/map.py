"""Maps of weights: of one head with its marginals, received mass and entropy; and of patches over their image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import nan
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard.checks import numbers
from regard.locale import Lang
from regard.masks.tiles import cell_edges
from regard.viz.colors import Array, Key, Scale, Style, Theme, legend, rgb
from regard.viz.sheet import (
    AT,
    CAPTION,
    DPI,
    FROM,
    MARGIN,
    Labels,
    Pair,
    Sheet,
    Ticks,
    cell_signs,
    clip,
    drawable,
    measure,
    panel_inches,
    read_numbers,
    read_style,
    read_tokens,
    ruler,
    sign_size,
    ticks_of,
)
from regard.viz.text import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS = 640  # of a strip at most: two dots each
WORDS = 96  # positions that are named by their tokens at most
STRIP, GAP = 0.62, 0.07  # inches: how far a strip reaches, and how far it stands from the map
MOST = 1024  # cells of a side: each has a dot of its own

Colouring = Literal["linear", "log", "rank"]
"""How weights become colours: by their size, by its logarithm, or by their rank among the cells."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Axis:
    """The queries or the keys of a map: their positions and tokens, a number of each, and the one that is marked.

    Args:
        positions: that the cells cover: how many, for cells of equal size from position 0; a `range`, for a part; or
            the edges of the cells, one more than there are cells. Default: as many as tokens.
        tokens: one per position; written if a cell is one token and there are at most 96.
        marginal: one number per position or per cell, drawn as bars beside the map: the entropy of each query in nats,
            or the mass that each key receives.
        marked: a position whose row, or column, is outlined.
    """

    positions: int | range | Sequence[int] | None = None
    tokens: Sequence[str] | None = None
    marginal: Any = None
    marked: int | None = None


BARE = Axis()


def map_with_marginals(
    cells: Any,
    queries: Axis = BARE,
    keys: Axis = BARE,
    *,
    sink: bool = True,
    scale: Colouring = "linear",
    title: str | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """One head's weights as a map, with the mass each key receives above it and each query's entropy beside it.

    >>> words = Axis(tokens=["나는", "cat", "sat"], marked=2)
    >>> figure = map_with_marginals(np.eye(3), words, Axis(marginal=np.ones(3)))
    >>> [text.get_text() for text in figure.texts if text.get_text() in ("나는", "received")]
    ['received', '나는', '나는']

    Args:
        cells: (R, C) weights, pooled or exact; NumPy or torch, at most 1024 a side. Exactly 0 is bare paper, NaN red.
        queries: of the rows; without positions and tokens the cells are numbered.
        keys: of the columns; default the positions and tokens of the queries, if there are as many cells.
        sink: False leaves the first column, with key 0, out of the colours and of the strip: it is hatched instead. A
            key that takes most of the weight otherwise leaves all others pale.
        scale: "linear" from 0 to the largest weight, "log" down to a millionth of it, or "rank" among the cells.
        title: above the figure.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".

    Raises:
        TypeError: for arguments of a wrong kind.
        ValueError: for wrong sizes, negative weights, a marked position outside the cells, and sink=False if key 0 is
            missing or alone.
    """
    # 1. The arguments, the colours and the legend.
    style = read_style(title, dark, lang)
    if scale not in get_args(Colouring):
        raise ValueError(f"scale must be one of {', '.join(map(repr, get_args(Colouring)))}; got {scale!r}")
    cells = read_numbers("cells", cells, "(R, C)")
    if max(cells.shape) > MOST:
        raise ValueError(f"cells are drawn up to {MOST} × {MOST}, got {cells.shape}; pool them, as View.map does")
    if (cells < 0).any():
        raise ValueError(f"cells must not be negative, got {np.nanmin(cells):.3g}; they are attention weights")
    down, across = _read_sides(cells.shape, queries, keys)
    if not sink and (across.first != 0 or across.cells == 1):
        why = f"the cells begin at key {across.first}" if across.first else "there is no other column"
        raise ValueError(f"sink=False leaves the column of key 0 out of the colours, but {why}; leave it at True")
    hidden = 0 if sink else 1
    strips = _read_strip("received", keys.marginal, across, hidden), _read_strip("entropy", queries.marginal, down)
    single = down.single and across.single
    name = style.say("weight") if single else style.say("weight per cell")
    painted, entries = _painted(cells, scale, hidden, name, style)
    entries += _notes(down, across, hidden, strips, style)

    # 2. The page: room for the strips and for the words around them.
    high, wide = inches = panel_inches((down.count, across.count), 1, 1, 6.4)
    side, top = down.ticks(high, side_by_side=False), across.ticks(wide, side_by_side=True)
    above, beside = (STRIP + GAP if strip else 0.0 for strip in strips)
    above_words, beside_words = (("", "") if strip is None else strip.captions(style) for strip in strips)
    captions = style.say(AT), style.say(FROM)
    left = max(side.depth, *(measure(word, CAPTION) for word in (*captions, *above_words))) + 0.12
    right = max(top.over, beside, *(measure(word, CAPTION) - STRIP + beside for word in beside_words))
    depth = max(0.38, top.depth)  # at least the two captions in the corner
    below = 0.3 if beside and not above else 0.0
    sheet = Sheet((depth + 0.1 + above + high + below, left + wide + right), entries, style)
    x, y = MARGIN + left, sheet.top + depth + 0.1 + above

    # 3. The map, and the weights in its cells where they are exact and few.
    axes = sheet.canvas(x, y, inches)
    gap = min(1.2, 2.9 * min(high / cells.shape[0], wide / cells.shape[1]))  # points: 4% of a cell
    if cells.size <= 4096:  # outlines, sharp at any size; with more of them an SVG grows to megabytes
        axes.pcolormesh(across.edges, down.edges, painted, edgecolors=style.theme.paper, linewidth=gap)
    else:
        axes.pcolorfast(across.edges, down.edges, painted)
    axes.set(xlim=across.edges[[0, -1]], ylim=down.edges[[-1, 0]])
    sheet.frame(axes)
    signs = cell_signs(cells, Scale("", (), 0.0, 1.0, hidden=0.0), inches, None) if single else None
    if signs is not None:
        size = sign_size(set(signs.flat), signs.shape, inches)
        signs[:, :hidden] = ""
        sheet.numbers(axes, signs, painted, size, (down.first, across.first))

    # 4. The strips and the words.
    if strips[0]:
        _draw_strip(sheet, strips[0], x, y - above, (STRIP, wide))
        sheet.captions(x - 0.08, y - above + 0.26, above_words)
    if strips[1]:
        _draw_strip(sheet, strips[1], x + wide + GAP, y, (high, STRIP))
        # Below, where leaning labels of the keys may pass above.
        sheet.captions(x + wide + GAP, y + high + 0.17 if below else y - 0.26, beside_words, ha="left")
    if hidden:
        share = (across.edges[hidden] - across.first) / across.count
        sheet.hatch(x, y - above, (high + above, wide * float(share)))
    _mark(sheet.canvas(x, y, inches), down, across, style.theme)  # over the hatching
    sheet.labels(x, y, side, side_by_side=False)
    sheet.labels(x, y - above, top, side_by_side=True)
    sheet.captions(x - 0.08, y - above - 0.31, captions)
    return sheet.finish()


def _draw_strip(sheet: Sheet, strip: _Strip, x: float, y: float, inches: Pair) -> None:
    axes, most, finite = sheet.canvas(x, y, inches), strip.most or 1.0, np.isfinite(strip.values)
    beside = strip.name == "entropy"
    way: Any = "horizontal" if beside else "vertical"
    bars = np.where(finite, strip.values, 0.0)
    axes.stairs(bars, strip.edges, fill=True, orientation=way, color=sheet.theme.weight[4], linewidth=0)
    if not finite.all():
        broken = np.where(finite, 0.0, most)
        axes.stairs(broken, strip.edges, fill=True, orientation=way, color=sheet.theme.alarm, linewidth=0)
    if beside:
        axes.set(xlim=(0, most), ylim=strip.edges[[-1, 0]])
    else:
        axes.set(xlim=strip.edges[[0, -1]], ylim=(0, most))
    sheet.frame(axes)


# -------------------------------------------------------------------------------------------------- sides and strips


@dataclass(frozen=True, eq=False)
class _Side:
    """One side of the map: where its cells begin and end, in positions, and the positions' names."""

    edges: Array  # (R + 1,)
    known: bool  # edges are positions, not cells
    names: Labels
    marked: int | None

    @property
    def first(self) -> int:
        return int(self.edges[0])

    @property
    def count(self) -> int:
        return int(self.edges[-1]) - self.first

    @property
    def cells(self) -> int:
        return len(self.edges) - 1

    @property
    def single(self) -> bool:
        """Whether each cell is one position."""
        return self.known and self.count == self.cells

    @property
    def per_cell(self) -> str:
        fewest, most = np.diff(self.edges).min(), np.diff(self.edges).max()
        return f"{most:g}" if fewest == most else f"{fewest:g}–{most:g}"

    @property
    def span(self) -> Pair:
        """Where the cell of the marked position begins and ends."""
        assert self.marked is not None
        cell = int(np.searchsorted(self.edges, self.marked, side="right")) - 1
        return float(self.edges[cell]), float(self.edges[cell + 1])

    @property
    def marked_name(self) -> str:
        return "" if self.names is None or self.marked is None else self.names[self.marked - self.first]

    def ticks(self, inches: float, *, side_by_side: bool) -> Ticks:
        if self.names is not None:
            return ticks_of(self.names, self.count, inches, side_by_side=side_by_side)
        return ruler(self.first, self.first + self.count, inches, side_by_side=side_by_side)


def _read_sides(shape: tuple[int, ...], queries: Axis, keys: Axis) -> tuple[_Side, _Side]:
    def side(name: str, axis: Axis, positions: Any, cells: int) -> _Side:
        if positions is None and axis.tokens is not None:
            positions = len(axis.tokens)
        edges, names = _edges(name, positions, cells), None
        count = int(edges[-1] - edges[0])
        if axis.tokens is not None:
            pieces = readable(read_tokens(f"tokens of the {name}", axis.tokens, count, name))
            if count == cells <= WORDS:
                names = tuple(clip(drawable(piece.text), 24) for piece in pieces)
        if axis.marked is not None and not edges[0] <= axis.marked < edges[-1]:
            raise ValueError(f"marked {axis.marked} is not among the {name}, {edges[0]:g} to {edges[-1] - 1:g}")
        return _Side(edges, positions is not None, names, axis.marked)

    for name, axis in (("queries", queries), ("keys", keys)):
        if not isinstance(axis, Axis):
            raise TypeError(f"{name} must be an Axis, such as Axis(tokens=…), got {type(axis).__name__}")
    positions: Any = keys.positions
    down = side("queries", queries, queries.positions, shape[0])
    if positions is None and keys.tokens is None and down.known and shape[0] == shape[1]:
        positions = down.edges
    across = side("keys", keys, positions, shape[1])
    if keys.tokens is None and np.array_equal(down.edges, across.edges):
        across = replace(across, names=down.names)
    return down, across


def _edges(name: str, positions: Any, cells: int) -> Array:
    """Where `cells` cells begin and end: (cells + 1,) rising positions."""
    if positions is None or isinstance(positions, int | np.integer):
        positions = range(cells if positions is None else int(positions))
    if isinstance(positions, range):
        if positions.step != 1 or positions.start < 0 or len(positions) < cells:
            raise ValueError(
                f"{name} must be at least as many positions as the {cells} cells, in steps of 1; got {positions}"
            )
        return positions.start + np.array(cell_edges(len(positions), cells), dtype=float)
    edges = numbers(name, positions).cpu().double().numpy()
    if edges.shape != (cells + 1,) or edges[0] < 0 or (np.diff(edges) < 1).any() or (edges % 1).any():
        raise ValueError(
            f"{name} must be a number of positions, a range, or the {cells + 1} rising whole edges of {cells} cells; "
            f"got {edges.size} from {edges.min(initial=np.inf):g} to {edges.max(initial=-np.inf):g}"
        )
    return np.asarray(edges)


def _mark(axes: Axes, down: _Side, across: _Side, theme: Theme) -> None:
    """Frames around the row of cells that the marked query is in, and, dashed, around the column of the marked key."""
    from matplotlib.patches import Rectangle

    axes.set(xlim=across.edges[[0, -1]], ylim=down.edges[[-1, 0]])
    for side, colour, line in ((across, theme.key, (0, (3, 2))), (down, theme.query, "solid")):
        if side.marked is not None:
            (left, right), (top, bottom) = (s.span if s is side else s.edges[[0, -1]] for s in (across, down))
            box = Rectangle((left, top), right - left, bottom - top, fill=False, ec=colour, ls=line, lw=1.6, zorder=5)
            axes.add_patch(box).set_clip_on(False)


@dataclass(frozen=True, eq=False)
class _Strip:
    """Bars beside the map: one for each position or cell, or for several where there are more than dots."""

    name: str
    values: Array  # (K,)
    edges: Array  # (K + 1,)
    each: int  # how many values a bar stands for
    most: float  # the largest value that counts for the bars' length

    def captions(self, style: Style) -> tuple[str, str]:
        name = style.say(self.name)
        if not np.isfinite(self.values).any():
            return name, style.say("not finite")
        if self.name == "entropy":
            return name, style.say("0 to {most:.3g} nats", most=self.most)
        return name, style.say("0 to {most:.3g}", most=self.most)


def _read_strip(name: str, values: Any, side: _Side, hidden: int = 0) -> _Strip | None:
    """Bars of one value per position or per cell: of several, the highest received mass or the mean entropy.

    hidden: the number of first cells that do not count for the bars' length.
    """
    if values is None:
        return None
    values = read_numbers(name, values, "(positions,)")
    if len(values) not in (side.cells, side.count):
        raise ValueError(
            f"{name} has {len(values)} entries, but there are {side.count} positions in {side.cells} cells"
        )
    if (values < -1e-3).any():
        raise ValueError(f"{name} must not be negative, got {np.nanmin(values):.3g}")
    values = np.maximum(values, 0.0)  # an entropy of 0 may have been rounded to just below
    edges = side.edges if len(values) == side.cells else side.first + np.arange(side.count + 1.0)
    each = -(-len(values) // BARS)
    starts = np.arange(0, len(values), each)
    if name == "received":  # a lone key that many look at must not vanish
        bars = np.maximum.reduceat(values, starts)
    else:
        bars = np.add.reduceat(values, starts) / np.diff([*starts, len(values)])
    counted = bars[edges[starts] >= side.edges[hidden]]
    most = float(np.max(counted, initial=0.0, where=np.isfinite(counted)))
    return _Strip(name, bars, np.append(edges[starts], edges[-1]), each, most)


# -------------------------------------------------------------------------------------------------------------- colours


def _painted(cells: Array, kind: str, hidden: int, name: str, style: Style) -> tuple[Array, list[Key]]:
    """(R, C) weights → (R, C, 3) colours and their legend; the first `hidden` columns do not count."""
    counted, theme = cells[:, hidden:], style.theme
    positive = np.sort(counted[np.isfinite(counted) & (counted > 0)])
    high = float(positive[-1]) if positive.size else 0.0
    linear = kind == "linear" or not positive.size  # only there the ramp begins at 0
    scale = Scale(name, theme.heat if linear else theme.weight, 0.0, high, hidden=0.0)
    first, *others = legend([scale], [counted], style)
    if linear:
        return scale.paint(cells, theme), [first, *others]
    if kind == "log":  # down to a millionth of the largest
        how, low = style.say("log scale"), max(float(positive[0]), high * 1e-6)
        places = np.interp(np.log(np.where(cells > 0, cells, low)), np.log([low, high]), [0.0, 1.0])
        lowest = f"{low:.2g}" if low == positive[0] else style.say("{low:.2g} and less", low=low)
    else:  # equal weights in the middle of their ranks
        how, (values, amount) = style.say("by rank"), np.unique(positive, return_counts=True)
        middle = np.cumsum(amount) - amount / 2
        ranks = (middle - middle[0]) / (middle[-1] - middle[0]) if len(values) > 1 else np.ones(1)
        places, lowest = np.interp(cells, values, ranks), f"{values[0]:.2g}"
        median = float(np.median(positive))
        others.insert(0, (style.say("half of those above 0 are below {median:.2g}", median=median),))
    painted = Scale(name, theme.weight, 0.0, 1.0, hidden=nan).paint(places, theme)
    painted[~np.isfinite(cells)] = rgb(theme.alarm)
    painted[cells == 0] = rgb(theme.paper)
    return painted, [(f"{name},", how, lowest, *first[2:]), *others]


def _notes(down: _Side, across: _Side, hidden: int, strips: tuple[_Strip | None, ...], style: Style) -> list[Key]:
    """Legend entries: exact or pooled, what is marked, what is hatched, what a bar stands for."""
    if down.single and across.single:
        notes = [style.say("exact: a cell is one weight")]
    elif down.known and across.known:
        notes = [style.say("pooled, {rows} × {columns} tokens per cell", rows=down.per_cell, columns=across.per_cell)]
    else:
        notes = [style.say("pooled cells")]
    if (index := down.marked) is not None:
        query, word = style.say("outlined: query {index}", index=index), down.marked_name
        notes.append(style.say("outlined: the query “{word}” ({index})", word=word, index=index) if word else query)
    if (index := across.marked) is not None:
        key, word = style.say("dashed: key {index}", index=index), across.marked_name
        notes.append(style.say("dashed: the key “{word}” ({index})", word=word, index=index) if word else key)
    if hidden:
        last = int(across.edges[1]) - 1
        if not across.known:
            notes.append(style.say("hatched: the first column, left out of the colours"))
        elif last:
            notes.append(style.say("hatched: keys 0 to {last}, left out of the colours", last=last))
        else:
            notes.append(style.say("hatched: key 0, left out of the colours"))
    received, entropy = strips
    if received is not None and received.each > 1:
        notes.append(style.say("a bar of received: the highest of {each} keys", each=received.each))
    if entropy is not None and entropy.each > 1:
        notes.append(style.say("a bar of entropy: mean of {each} queries", each=entropy.each))
    return [(note,) for note in notes]


# ------------------------------------------------------------------------------------------------------ over an image

Floats = NDArray[np.float64]

SLIVER = 1e-6  # of a pixel: an edge that misses the pixel's own by less is rounding
CELLS = 1 << 22  # pixels that are painted at once
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue, as television weighed them
LONGER, SHORTER = 6.0, 0.3  # inches of the image's sides: the longer one is so long, the shorter one not shorter
SOFT, COVER = 0.6, 0.92  # how much is seen of the photograph where it is bare, and of the colour of the largest weight
OUTLINE = 1.8  # points
STRIPE = 16  # dots from line to line of the hatching


def box_heat(boxes: Floats, numbers: Floats, shape: tuple[int, int]) -> NDArray[np.float32]:
    """(height, width) the number of each pixel, NaN where no box lies.

    boxes: (P, 4).  numbers: (P,), of which a NaN shows in its own box alone.  shape: height and width.

    A product of three matrices: rows of pixels × rows of boxes, rows × columns of boxes, columns of boxes × of pixels.
    Boxes of a grid share their rows and columns, so that this costs height · width · columns.
    """
    height, width = shape
    rows, row = np.unique(boxes[:, [0, 2]], axis=0, return_inverse=True)  # (R, 2) top and bottom
    columns, column = np.unique(boxes[:, [1, 3]], axis=0, return_inverse=True)  # (C, 2) left and right
    broken = ~np.isfinite(numbers)
    parts = (np.where(broken, 0.0, numbers), np.ones(len(numbers)), broken.astype(float))
    total, count, wrong = sums = np.zeros((3, len(rows), len(columns)))
    for part, cells in zip(parts, sums, strict=True):
        np.add.at(cells, (row.ravel(), column.ravel()), part)
    across = _overlap(columns, width).T  # (C, width)
    heat = np.empty(shape, np.float32)
    step = max(1, CELLS // max(1, width))
    for y in range(0, height, step):
        down = _overlap(rows - y, min(step, height - y))  # (h, R)
        area = down @ count @ across
        with np.errstate(invalid="ignore"):
            part = (down @ total @ across) / area  # 0 / 0 is NaN
        if broken.any():
            part[down @ wrong @ across > 0] = np.nan
        heat[y : y + step] = part
    return heat


def _overlap(spans: Floats, n: int) -> Floats:
    """(n, S) how much of pixel 0 … n − 1 each span (S, 2) covers."""
    pixel = np.arange(n)[:, None]
    covered = np.minimum(spans[:, 1], pixel + 1) - np.maximum(spans[:, 0], pixel)
    return np.where(covered > SLIVER, covered, 0.0)


def read_photograph(image: object, shape: tuple[int, int] | None = None) -> NDArray[np.float32]:
    """(height, width) grey values from 0 to 1.

    image: a Pillow image, which is turned upright; or an array (height, width), or with 3 or 4 channels last, of
    uint8, or of floats from 0 to 1.  shape: the expected height and width; default any.

    Raises TypeError for anything else, ValueError for another size and for floats beyond 0 to 1.
    """
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if find_spec("PIL") is not None:
        from PIL import Image, ImageOps

        if isinstance(image, Image.Image):
            if image.mode[0] in "IF":  # Pillow would cut off what is above 255
                raise TypeError(f"an image of mode {image.mode} has its own scale: give an array of floats from 0 to 1")
            array = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"image must be a Pillow image or an array, got {type(image).__name__}: PIL.Image.open opens files"
        )
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ValueError(f"image must be (height, width) or (height, width, 3), got {array.shape}")
    if shape is not None and array.shape[:2] != shape:
        sizes = f"{array.shape[0]} × {array.shape[1]}, but the model was given one of {shape[0]} × {shape[1]}"
        raise ValueError(f"the image is {sizes} (height × width): give it upright, as it was before any resizing")
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise TypeError(f"image must be of uint8, or of floats from 0 to 1; got {array.dtype}")
    values = np.asarray(array, np.float32) / np.float32(255 if array.dtype == np.uint8 else 1)
    if not (values.min(initial=0) >= 0 and values.max(initial=1) <= 1):  # written so that NaN is refused too
        raise ValueError(f"floats of an image must lie between 0 and 1, got {values.min():.3g} to {values.max():.3g}")
    if values.ndim == 2:
        return values
    return np.asarray(values[..., 0] if values.shape[2] == 1 else values[..., :3] @ LUMA, np.float32)


def shrink(grey: NDArray[np.float32], by: int) -> NDArray[np.float32]:
    """The means of by × by pixels; at the bottom and right, of as many as there are."""
    if by == 1:
        return grey
    starts = [np.arange(0, n, by) for n in grey.shape]
    high, wide = (np.diff(np.append(s, n)) for s, n in zip(starts, grey.shape, strict=True))
    sums = np.add.reduceat(np.add.reduceat(grey, starts[0], 0), starts[1], 1)
    return np.asarray(sums / np.multiply.outer(high, wide), np.float32)


def overlay(
    boxes: Any,
    weights: Any,
    image: Any,
    *,
    outline: Any = None,
    note: str | None = None,
    title: str | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """Weights of patches, each where its patch lies in the image.

    >>> figure = overlay([[0, 0, 8, 8], [0, 8, 8, 16]], [0.75, 0.25], (8, 16), title="cls")
    >>> figure.texts[0].get_text()
    'cls'

    Colours run from 0, where the image is bare, to the largest weight. NaN and infinity are red.

    Args:
        boxes: (P, 4) top, left, bottom, right in the image's pixels.
        weights: (P,), from 0 up.
        image: a Pillow image or an array, as `view.overlay` takes it; or its height and width, to draw on bare paper.
        outline: (4,) a box to outline.
        note: one more entry of the legend.
        title: above the figure.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".

    Raises:
        TypeError: for arguments of a wrong kind.
        ValueError: for arguments of a wrong size, and for negative weights.
    """
    style = read_style(title, dark, lang)
    boxes, weights = read_numbers("boxes", boxes, "(patches, 4)"), read_numbers("weights", weights, "(patches,)")
    if boxes.shape != (len(weights), 4):
        raise ValueError(f"boxes must be ({len(weights)}, 4), one for each weight; got {boxes.shape}")
    if (weights < 0).any():
        raise ValueError(f"weights must not be negative, got {np.nanmin(weights):.3g}")
    bare = isinstance(image, tuple) and len(image) == 2
    grey = None if bare else read_photograph(image)
    box = None if outline is None else read_numbers("outline", outline, "(4,)")
    theme, (high, wide) = style.theme, image if grey is None else grey.shape
    longer = max(high, wide)
    inches = (max(LONGER * high / longer, SHORTER), max(LONGER * wide / longer, SHORTER))
    dots = (round(inches[0] * DPI), round(inches[1] * DPI))
    finite = np.isfinite(weights)
    scale = Scale(style.say("weight"), theme.weight, 0.0, float(np.max(weights, initial=0.0, where=finite)), 0.0)

    # 1. Below the colours: the image, softened towards the paper, (dots high, dots wide, 3).
    paper = rgb(theme.paper)
    under = np.broadcast_to(paper, (*dots, 3))
    if grey is not None:
        small = shrink(grey, max(1, min(grey.shape[0] // dots[0], grey.shape[1] // dots[1])))
        rows, columns = (np.arange(n) * length // n for n, length in zip(dots, small.shape, strict=True))
        under = SOFT * small[rows][:, columns, None] + (1 - SOFT) * paper
    # 2. Colours over it, hatching where the model saw nothing.
    zoom = np.array([dots[0] / high, dots[1] / wide] * 2)
    heat, covered = (box_heat(boxes * zoom, numbers, dots) for numbers in (weights, np.ones(len(weights))))
    unseen = np.isnan(covered)
    cells = _covered(np.where(np.isfinite(heat), heat, 0.0) / (scale.high or 1.0), under, scale)
    cells[~unseen & ~np.isfinite(heat)] = rgb(theme.alarm)
    down, across = np.indices(heat.shape, np.int32)
    stripes = np.asarray((down + across) % STRIPE < 2)[..., None]
    cells[unseen] = np.where(stripes, rgb(theme.line), 0.4 * under + 0.6 * paper)[unseen]
    # 3. The legend and the page.
    name, low, ramp, top = scale.key()
    keys: list[Key] = [(name, low, _covered(np.linspace(0.0, 1.0, len(ramp)), under.mean((0, 1)), scale), top)]
    keys += [(rgb(theme.query), style.say("the patch itself"))] if box is not None else []
    keys += [(rgb(theme.alarm), style.say("NaN or infinite"))] if not finite.all() else []
    keys += [(style.say("hatched: the model did not see it"),)] if unseen.any() else []
    keys += [(drawable(note),)] if note else []
    sheet = Sheet(inches, keys, style)
    axes = sheet.canvas(MARGIN, sheet.top, inches)
    painted = cells.clip(0, 1)
    axes.imshow(painted, extent=(0, wide, high, 0), aspect="auto", interpolation="nearest", origin="upper")
    axes.set(xlim=(0, wide), ylim=(high, 0))
    sheet.frame(axes)
    if box is not None:
        around = box + np.array([-1, -1, 1, 1]) * OUTLINE / 72 * longer / LONGER  # beside the patch: its colour counts
        _outline(axes, around, theme.paper, 2 * OUTLINE)
        _outline(axes, around, theme.query, OUTLINE)
    return sheet.finish()


def _covered(place: Array, under: Array, scale: Scale) -> Array:
    """Colours by place along the ramp, 0 to 1, over what is below; at 0 the photograph is bare."""
    cover = COVER * np.sqrt(place)[..., None]
    return np.asarray((1 - cover) * under + cover * scale.colours(place))


def _outline(axes: Axes, box: Array, colour: str, width: float) -> None:
    from matplotlib.patches import Rectangle

    top, left, bottom, right = map(float, box)
    frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, lw=width, clip_on=False)
    axes.add_patch(frame)
