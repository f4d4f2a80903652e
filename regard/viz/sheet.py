"""Shared by all figures: arguments, fonts, labels along a side, and pages with title and legend."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.checks import numbers
from regard.locale import Lang, check_lang
from regard.tables import width as terminal_width
from regard.viz.colors import DARK, FAINT_SIGNS, LIGHT, Array, Key, Scale, Style, readable_on, rgb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.text import Text

Pair = tuple[float, float]
Shape = tuple[int, int]
Labels = tuple[str, ...] | None  # None: positions are numbered

FAMILY = "regard NanumGothic"  # a name of our own: registering it changes no other program's fonts
INSTALL = "pip install 'regard[figures]'"
PAGE, CELL, MARGIN, GAP = 20.0, 0.56, 0.3, 0.3  # inches; a page and a cell are never larger
TITLE, HEADING, CAPTION = 12.0, 10.0, 8.5  # points
DPI = 200
FROM, AT = "looks from ↓", "looks at →"
_REGISTERING = Lock()


# ------------------------------------------------------------------------------------------------------------ arguments


def read_style(title: str | None, dark: bool, lang: Lang) -> Style:
    """The arguments that all figures share; called before anything is measured or drawn, for it readies the fonts.

    Raises ImportError, with what to install, without matplotlib or the Korean font, and ValueError for a language that
    there is not.
    """
    register_fonts()
    check_lang(lang)
    return Style(drawable(title or ""), DARK if dark else LIGHT, lang)


def read_numbers(name: str, value: object, axes: str) -> Array:
    """Real numbers as float64, from a list, a NumPy array or a tensor of any precision and device.

    axes: such as "(layers, heads)"; there must be as many, and none of them empty.
    Raises TypeError for other kinds, ValueError for another number of axes or an empty one.
    """
    tensor = numbers(name, value)
    if tensor.dtype.is_complex:
        raise TypeError(f"{name} must be real numbers, got {tensor.dtype}")
    if tensor.ndim != axes.count(",") + (not axes.endswith(",)")) or 0 in tensor.shape:
        raise ValueError(f"{name} must be {axes}, not empty; got {tuple(tensor.shape)}")
    return np.asarray(tensor.cpu().double().numpy())


def read_weights(name: str, value: object, axes: str) -> Array:
    """As `read_numbers`, for weights of which each must be finite and at least 0."""
    weights = read_numbers(name, value, axes)
    broken = np.argwhere(~np.isfinite(weights))
    if len(broken):
        at = tuple(int(i) for i in broken[0])
        where = at[0] if len(at) == 1 else at
        raise ValueError(
            f"{name} must be finite, got {weights[at]} at {where} and {len(broken)} such in all; "
            "regard.check(weights) says which rows are broken"
        )
    if (weights < 0).any():
        raise ValueError(f"{name} must not be negative, got {weights.min():.3g}; attention weights are in [0, 1]")
    return weights


def read_tokens(name: str, tokens: Any, count: int | None = None, what: str = "") -> tuple[str, ...]:
    """Tokens as strings. Raises TypeError if they are no list of strings, ValueError for none or a wrong number."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence | np.ndarray):
        raise TypeError(f"{name} must be a list of strings, got {tokens!r}; a sentence has to be split first")
    other = [token for token in tokens if not isinstance(token, str)]
    if other:
        raise TypeError(f"{name} must be strings, got {other[0]!r}; ids are turned into tokens by the tokenizer")
    if count is not None and len(tokens) != count:
        raise ValueError(f"{name} has {len(tokens)} entries, but there are {count} {what}")
    if len(tokens) == 0:
        raise ValueError(f"{name} must not be empty")
    return tuple(str(token) for token in tokens)


# ---------------------------------------------------------------------------------------------------------------- fonts


def register_fonts() -> None:
    """See that matplotlib and the Korean font are there, and the font known under our own name. Raises ImportError."""
    try:
        from matplotlib.font_manager import FontEntry, fontManager
    except ImportError as error:
        raise ImportError(f"figures need matplotlib: {INSTALL}") from error
    # Only the files are wanted: importing koreanize_matplotlib would change the fonts of the whole program.
    carrier = find_spec("koreanize_matplotlib")
    folders = (carrier.submodule_search_locations if carrier else None) or []
    for name, weight in (("NanumGothic.ttf", 400), ("NanumGothicBold.ttf", 700)):
        files = [file for folder in folders if (file := Path(folder, "fonts", name)).is_file()]
        if not files:
            raise ImportError(f"figures need the font {name} of koreanize-matplotlib: {INSTALL}")
        entry = FontEntry(str(files[0]), name=FAMILY, weight=weight, stretch="normal", size="scalable")
        with _REGISTERING:
            if entry not in fontManager.ttflist:
                fontManager.ttflist.append(entry)


def font(size: float, bold: bool = False) -> FontProperties:
    """NanumGothic, and DejaVu Sans (part of matplotlib) for the signs it lacks, such as ▁ and Ġ of tokenizers."""
    from matplotlib.font_manager import FontProperties

    plain: dict[str, Any] = {"style": "normal", "variant": "normal", "stretch": "normal"}  # not as the program has set
    return FontProperties(family=[FAMILY, "DejaVu Sans"], weight=700 if bold else 400, size=size, **plain)


@cache
def _glyphs() -> frozenset[str]:
    """The signs that can be drawn, in both weights."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    def drawn(weight: int) -> set[str]:
        files = [findfont(FontProperties(family=family, weight=weight)) for family in (FAMILY, "DejaVu Sans")]
        return {chr(code) for file in files for code in get_font(file).get_charmap()}

    return frozenset(drawn(400) & drawn(700))


def drawable(string: str) -> str:
    """Hangul composed, and what has no glyph (a newline, Thai) as its code, never as an empty box."""
    composed = unicodedata.normalize("NFC", string)
    drawn = (sign if sign in _glyphs() and sign.isprintable() else ascii(sign)[1:-1] for sign in composed)
    return "".join(drawn).replace("\\", "∖")  # Korean fonts draw a Won in the backslash's place


def measure(string: str, size: float, bold: bool = False) -> float:
    """Width in inches of a text of so many points."""
    from matplotlib.textpath import text_to_path

    return float(text_to_path.get_text_width_height_descent(string, font(size, bold), False)[0]) / 72


def clip(label: str, most: int) -> str:
    """At most so many terminal cells, the cut marked.

    >>> clip("고양이", 6), clip("고양이", 5)
    ('고양이', '고양…')
    """
    if terminal_width(label) <= most:
        return label
    while terminal_width(label) >= most:
        label = label[:-1]
    return label + "…"


# ----------------------------------------------------------------------------------------------------------------- room


def grid_columns(heads: int) -> int:
    """Columns of a full grid, not much wider than high, where the number of heads allows one: 4 of 12, 3 of 5."""
    full = [columns for columns in range(1, heads + 1) if heads % columns == 0 and heads <= columns**2 <= 4 * heads]
    return full[0] if full else ceil(heads**0.5)


def room_for(count: int) -> float:
    """Inches for each of `count` panels in a row, on a page that also holds labels, title and legend."""
    return (PAGE - 5.0) / count - 0.4


def panel_inches(shape: Shape, columns: int, rows: int, most: float) -> Pair:
    """(height, width) of a panel: square cells, except that a short side is drawn up to an inch long."""
    (nq, nk), high, wide = shape, min(most, room_for(rows)), min(most, room_for(columns))
    cell = min(CELL, high / nq, wide / nk)
    return max(cell * nq, min(CELL * nq, high, 1.0)), max(cell * nk, min(CELL * nk, wide, 1.0))


def cell_signs(values: Array, scale: Scale, inches: Pair, force: bool | None) -> Array | None:
    """(R, C) numbers as text if they are requested, or by default if they are few and readable.

    force: write them (True), do not (False), or decide (None). Raises ValueError if forced where they are unreadable.
    """
    if force is False or (force is None and max(values.shape) > 16):
        return None
    if sign_size({"0.00"}, values.shape, inches) >= 3:  # before millions of numbers are written
        signs = np.array([[scale.sign(value) for value in row] for row in values.tolist()], dtype=object)
        if sign_size(set(signs.flat), values.shape, inches) >= (3 if force else 6):
            return signs
    if force:
        raise ValueError(f"values=True: numbers in {values.shape[0]} × {values.shape[1]} cells are too small to read")
    return None


def sign_size(signs: set[str], shape: tuple[int, ...], inches: Pair) -> float:
    """Points at which all of the signs fit a cell."""
    height, width = inches[0] / shape[0], inches[1] / shape[1]
    return min(9.5, 43 * height, 0.84 * width / max(measure(sign, 1.0) for sign in signs))


# -------------------------------------------------------------------------------------------------- labels along a side


@dataclass(frozen=True)
class Ticks:
    """The labels along one side of a panel, thinned until they fit."""

    places: list[tuple[float, str]]  # inches from the panel's start, text
    size: float  # points
    lean: bool
    depth: float  # inches away from the panel
    over: float  # inches past the panel's end


def ticks_of(labels: Labels, count: int, inches: float, *, side_by_side: bool) -> Ticks:
    """Labels of the columns stand side by side, and lean where they must; those of the rows stand in a pile."""
    cell = inches / count
    size = min(9.5, max(7.0, 44 * cell))
    names, line = labels or tuple(map(str, range(count))), size / 72
    widest = max(measure(name, size) for name in labels or names[-1:])
    lean = side_by_side and labels is not None and widest + 0.06 > cell
    pitch = 1.35 * line if lean else widest + 0.06 if side_by_side else 1.15 * line
    if labels is None and cell < pitch:
        pitch = 0.45  # numbers are read as a ruler
    step = 1 if cell >= pitch else min(s for e in range(7) for m in (1, 2, 5) if (s := m * 10**e) * cell >= pitch)
    places = [((i + 0.5) * cell, names[i]) for i in range(0, count, step)]
    slanted = 0.71 * (widest + line)
    depth = slanted if lean else line if side_by_side else widest
    return Ticks(places, size, lean, depth, max(0.0, places[-1][0] + (slanted if lean else widest / 2) - inches))


def ruler(first: int, last: int, inches: float, *, side_by_side: bool) -> Ticks:
    """Round positions from `first` up to, not including, `last`, along a side of so many inches."""
    size, per = 8.0, inches / (last - first)
    widest = measure(str(last - 1), size)
    pitch = max(0.45, widest + 0.12) if side_by_side else 0.3
    step = next(s for e in range(12) for m in (1, 2, 5) if (s := m * 10**e) * per >= pitch or s >= last)
    marks = range(-(-first // step) * step, last, step) or [first]
    places = [((mark - first + 0.5) * per, str(mark)) for mark in marks]
    depth = size / 72 if side_by_side else widest
    return Ticks(places, size, False, depth, max(0.0, places[-1][0] + widest / 2 - inches))


# ---------------------------------------------------------------------------------------------------------------- pages


@dataclass(frozen=True)
class Panel:
    """One map and the words around it. A cell stands for `tile` positions."""

    cells: Array  # (R, C, 3)
    shape: Shape  # positions, (Nq, Nk)
    inches: Pair  # (height, width)
    rows: Labels
    cols: Labels
    tile: Shape = (1, 1)
    signs: Array | None = None  # (R, C) of str
    heading: str = ""
    formula: str = ""
    across: str = ""  # what the columns are, where they are not keys


class Sheet:
    """A page with its title and, below free room, its legend; addressed in inches from its upper left corner.

    The room is (height, width) inches, from `top` down and from MARGIN to the right; the page is wider if the title or
    the legend is.
    """

    def __init__(self, room: Pair, keys: list[Key], style: Style) -> None:
        from matplotlib.figure import Figure

        self.theme = theme = style.theme
        widths = [sum(_part_width(part) + 0.07 for part in key) + 0.2 for key in keys]
        wanted = max(measure(style.title, TITLE, bold=True), sum(widths))
        inside = max(room[1], max(widths, default=0.0), min(6.0, wanted))
        lines = _wrapped(style.title, inside)
        self.top = MARGIN + 0.28 * len(lines) + 0.1 * bool(lines)
        places: list[Pair] = []  # of the legend's entries
        x, y = 0.0, self.top + room[0] + 0.4
        for width in widths:
            if x > 0 and x + width > inside:
                x, y = 0.0, y + 0.24
            places.append((MARGIN + x, y))
            x += width
        self.width, self.height = inside + 2 * MARGIN, y + MARGIN
        self.figure = Figure((self.width, self.height), DPI, facecolor=theme.paper, edgecolor=theme.paper)
        self.figure.set_layout_engine("none")
        for n, line in enumerate(lines):
            self.write(MARGIN, MARGIN + 0.14 + 0.25 * n, line, TITLE, bold=True)
        self._legend = list(zip(places, keys, strict=True))

    def finish(self) -> Figure:
        """Draw the legend, after all else, and return the figure."""
        for (x, y), key in self._legend:
            for part in key:
                if isinstance(part, str):
                    self.write(x, y, part, CAPTION, muted=True)
                else:  # (K, 3)
                    self.cells(x, y - 0.11, (0.13, _part_width(part)), part[None], (1, len(part)), 0.0)
                x += _part_width(part) + 0.07
        return self.figure

    def letters(self, size: float, colour: str, bold: bool = False) -> dict[str, Any]:
        """How text is drawn: a label is never read as mathematics, whatever dollar signs it holds."""
        return {"fontproperties": font(size, bold), "color": colour, "parse_math": False, "usetex": False}

    def write(self, x: float, y: float, string: str, size: float, *, bold: bool = False, muted: bool = False) -> Text:
        """Draw text that begins at x with its baseline at y."""
        letters = self.letters(size, self.theme.muted if muted else self.theme.ink, bold)
        return self.figure.text(x / self.width, 1 - y / self.height, string, ha="left", va="baseline", **letters)

    def canvas(self, x: float, y: float, inches: Pair) -> Axes:
        """Bare axes of (height, width) inches whose units are inches, rightwards and downwards from (x, y)."""
        height, width = inches
        place = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(place)
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        return axes

    def cells(self, x: float, y: float, inches: Pair, cells: Array, reach: Pair, gap: float) -> Axes:
        """Draw (R, C, 3) colours in a frame that shows the first `reach` rows and columns."""
        axes = self.canvas(x, y, inches)
        rows, cols = cells.shape[:2]
        if rows * cols <= 4096:  # outlines, sharp at any size; with more of them an SVG grows to megabytes
            axes.pcolormesh(cells, edgecolors=self.theme.paper if gap else "face", linewidth=gap or 0.2, shading="flat")
        else:
            axes.imshow(cells, extent=(0, cols, rows, 0), aspect="auto", interpolation="nearest", origin="upper")
        axes.set(xlim=(0, reach[1]), ylim=(reach[0], 0))
        self.frame(axes)
        return axes

    def frame(self, axes: Axes) -> None:
        """Draw a thin line around axes."""
        from matplotlib.patches import Rectangle

        looks: dict[str, Any] = {"fill": False, "edgecolor": self.theme.line, "lw": 0.8, "clip_on": False}
        axes.add_patch(Rectangle((0, 0), 1, 1, transform=axes.transAxes, **looks))

    def panel(self, x: float, y: float, panel: Panel, size: float) -> None:
        """Draw a map and the numbers in its cells, these in a size given in points."""
        shape, inches = panel.cells.shape[:2], panel.inches
        reach = (panel.shape[0] / panel.tile[0], panel.shape[1] / panel.tile[1])
        gap = min(1.2, 2.9 * min(inches[0] / shape[0], inches[1] / shape[1]))  # points: 4% of a cell
        axes = self.cells(x, y, inches, panel.cells, reach, gap)
        if panel.signs is not None:
            self.numbers(axes, panel.signs, panel.cells, size)

    def numbers(self, axes: Axes, signs: Array, cells: Array, size: float, first: Pair = (0.0, 0.0)) -> None:
        """Write (R, C) signs into cells of one unit each, (R, C, 3) colours, of which the first begins at `first`."""
        bare = np.abs(cells - rgb(self.theme.paper)).max(-1) < 0.15  # (R, C)
        for (r, c), sign in np.ndenumerate(signs):
            faint = bare[r, c] and sign in FAINT_SIGNS
            letters = self.letters(size, self.theme.muted if faint else readable_on(cells[r, c]))
            axes.text(first[1] + c + 0.5, first[0] + r + 0.5, sign, ha="center", va="center", **letters)

    def labels(self, x: float, y: float, ticks: Ticks, *, side_by_side: bool) -> None:
        """Draw labels above (x, y) and to the right of it, or to its left and downwards."""
        for place, label in ticks.places:
            at = (x + place, y - 0.06) if side_by_side else (x - 0.08, y + place)
            text = self.write(*at, label, ticks.size)
            if ticks.lean:
                text.set(rotation=45, rotation_mode="anchor", va="bottom")
            else:
                text.set(ha="center") if side_by_side else text.set(ha="right", va="center")

    def captions(self, x: float, y: float, lines: Sequence[str], ha: str = "right") -> None:
        """Draw small lines below each other, the first with its baseline at y."""
        for n, line in enumerate(lines):
            self.write(x, y + 0.16 * n, line, CAPTION, muted=True).set(ha=ha)

    def hatch(self, x: float, y: float, inches: Pair) -> None:
        """Cover a rectangle with bare paper and slanted lines: what is left out of the colours.

        The lines are our own: the width of matplotlib's is a setting of the whole program.
        """
        from matplotlib.collections import LineCollection

        axes, (height, width) = self.canvas(x, y, inches), inches
        axes.set_axis_on()
        axes.set(xticks=[], yticks=[], facecolor=self.theme.paper)
        axes.spines[:].set_visible(False)
        starts = np.arange(0.03, height + width, 0.06)
        lines = [[(0.0, start), (start, 0.0)] for start in starts]
        axes.add_collection(LineCollection(lines, colors=self.theme.line, linewidths=0.8), autolim=False)


def _part_width(part: str | Array) -> float:
    return measure(part, CAPTION) if isinstance(part, str) else 0.14 if len(part) == 1 else 1.1


def _wrapped(title: str, room: float) -> list[str]:
    """The title in at most four lines no wider than `room`."""
    likely = ceil(len(title) * room / max(measure(title, TITLE, bold=True), room))
    for columns in range(min(len(title), likely + 20), 7, -1):
        lines = textwrap.wrap(title, columns, max_lines=4, placeholder=" …")
        if all(measure(line, TITLE, bold=True) <= room for line in lines):
            return lines
    return [title] if title else []


def compose(panels: list[Panel], columns: int, keys: list[Key], style: Style) -> Figure:
    """Panels in a grid, row by row: labels to the left of the first column and above the first row."""
    at, from_ = style.say(AT), style.say(FROM)
    # 1. How much room the panels take with their labels.
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    high = panels[0].inches[0]
    side = ticks_of(panels[0].rows, panels[0].shape[0], high, side_by_side=False)
    tops = [ticks_of(panel.cols, panel.shape[1], panel.inches[1], side_by_side=True) for panel in grid[0]]
    xs, x = [], MARGIN + max(side.depth, measure(at, CAPTION), measure(from_, CAPTION)) + 0.1
    for n, (panel, top) in enumerate(zip(grid[0], tops, strict=True)):
        xs.append(x)
        runs_on = n + 1 < len(tops) and tops[n + 1].lean  # leaning labels pass above the next ones, which lean too
        words = max(measure(panel.heading, HEADING, bold=True), measure(panel.formula, CAPTION))
        x += max(panel.inches[1] + (0.0 if runs_on else top.over), words) + GAP
    heading = 0.22 * bool(panels[0].heading) + 0.17 * bool(panels[0].formula)
    depth = max(0.38, *(top.depth for top in tops))  # at least the two captions in the corner
    above = heading + depth + (0.0 if style.title else 0.1)
    height = above + high + (len(grid) - 1) * (high + heading + GAP)
    printed = [(set(panel.signs.flat), panel.signs.shape, panel.inches) for panel in panels if panel.signs is not None]
    size = min((sign_size(*signs) for signs in printed), default=0.0)  # one for all panels
    # 2. Draw them; in a grid the axes are named beside the headings too, where there is room.
    sheet = Sheet((height, x - GAP - MARGIN), keys, style)
    ys = [sheet.top + above + row * (high + heading + GAP) for row in range(len(grid))]
    sheet.captions(xs[0] - 0.08, ys[0] - 0.31, (at, from_))
    for y, row in zip(ys, grid, strict=True):
        sheet.labels(xs[0], y, side, side_by_side=False)
        baseline = y - 0.08 - (0.04 + depth if row is grid[0] else 0.0)
        if row is not grid[0]:
            sheet.captions(xs[0] - 0.08, y - 0.08, (from_,))
        for x, panel in zip(xs, row, strict=False):
            sheet.write(x, baseline - 0.17 * bool(panel.formula), panel.heading, HEADING, bold=True)
            sheet.write(x, baseline, panel.formula, CAPTION, muted=True)
            sheet.panel(x, y, panel, size)
    for x, panel, ticks in zip(xs, grid[0], tops, strict=True):
        sheet.labels(x, ys[0], ticks, side_by_side=True)
        sheet.write(x, ys[0] - ticks.depth - 0.14, panel.across, CAPTION, muted=True)
        words = measure(panel.heading, HEADING, bold=True) + measure(at, CAPTION) + 0.1
        if x > xs[0] and not panel.across and words <= panel.inches[1]:
            line = ys[0] - 0.12 - depth - 0.17 * bool(panel.formula)
            sheet.captions(x + panel.inches[1], line, (at,))
    return sheet.finish()
