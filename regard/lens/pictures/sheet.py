"""The sheet: panels in a grid with their words and legend, placed and composed into one matplotlib figure.

Places are computed in inches from measured text, so nothing is clipped.

This file does not know where the numbers come from, nor what they mean. It imports matplotlib only inside functions.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.lens.pictures.colours import HIDDEN_SIGNS, Array, Key, Scale, Theme, readable_on
from regard.lens.pictures.letters import drawable, font, measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

__all__ = [
    "CAPTION",
    "DPI",
    "MARGIN",
    "TITLE",
    "Labels",
    "Pair",
    "Panel",
    "Shape",
    "Sheet",
    "Ticks",
    "cell_signs",
    "compose",
    "flow",
    "grid_columns",
    "key_width",
    "panel_inches",
    "room_for",
    "sign_size",
    "ticks_of",
    "wrapped",
]

Pair = tuple[float, float]
Shape = tuple[int, int]
Labels = tuple[str, ...] | None  # None: positions are numbered

PAGE, CELL, MARGIN, GAP = 20.0, 0.56, 0.3, 0.3  # inches; a page and a cell are never larger
TITLE, HEADING, CAPTION = 12.0, 10.0, 8.5  # points
DPI = 200
FROM, AT = "looks from ↓", "looks at →"


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


# ----------------------------------------------------------------------------------------------------------------- room


def grid_columns(heads: int) -> int:
    """Columns of a full grid, not much wider than high, where the number of heads allows one.

    >>> [grid_columns(heads) for heads in (1, 5, 12)]
    [1, 3, 4]
    """
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
    """(R, C) numbers as text where they are asked for, or by default where they are few and readable.

    force: write them (True), do not (False), or decide (None). Raises ValueError if forced where nobody could read it.
    """
    if force is False or (force is None and max(values.shape) > 16):
        return None
    if sign_size({"0.00"}, values.shape, inches) >= 3:  # before millions of numbers are written
        signs = np.array([[scale.sign(value) for value in row] for row in values.tolist()], dtype=object)
        if sign_size(set(signs.flat), values.shape, inches) >= (3 if force else 5):
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


# -------------------------------------------------------------------------------------------------------------- drawing


class Sheet:
    """A figure addressed in inches from its upper left corner."""

    def __init__(self, width: float, height: float, theme: Theme) -> None:
        from matplotlib.figure import Figure

        self.width, self.height, self.theme = width, height, theme
        self.figure = Figure((width, height), DPI, facecolor=theme.paper, edgecolor=theme.paper)
        self.figure.set_layout_engine("none")

    def letters(self, size: float, colour: str, bold: bool = False) -> dict[str, Any]:
        """How text is drawn: a label is never read as mathematics, whatever dollar signs it holds."""
        return {"fontproperties": font(size, bold), "color": colour, "parse_math": False, "usetex": False}

    def write(self, x: float, y: float, string: str, size: float, *, bold: bool = False, muted: bool = False) -> Text:
        """Draw text that begins at x with its baseline at y."""
        letters = self.letters(size, self.theme.muted if muted else self.theme.ink, bold)
        return self.figure.text(x / self.width, 1 - y / self.height, string, ha="left", va="baseline", **letters)

    def cells(self, x: float, y: float, inches: Pair, cells: Array, reach: Pair, gap: float) -> Axes:
        """Draw (R, C, 3) colours in a frame that shows the first `reach` rows and columns."""
        from matplotlib.patches import Rectangle

        height, width = inches[0] / self.height, inches[1] / self.width
        axes = self.figure.add_axes((x / self.width, 1 - y / self.height - height, width, height))
        axes.set_axis_off()
        rows, cols = cells.shape[:2]
        if rows * cols <= 4096:  # outlines, sharp at any size; with more of them an SVG grows to megabytes
            axes.pcolormesh(cells, edgecolors=self.theme.paper if gap else "face", linewidth=gap or 0.2, shading="flat")
        else:
            axes.imshow(cells, extent=(0, cols, rows, 0), aspect="auto", interpolation="nearest", origin="upper")
        axes.set(xlim=(0, reach[1]), ylim=(reach[0], 0))
        frame = Rectangle((0, 0), reach[1], reach[0], fill=False, edgecolor=self.theme.line, lw=0.8, clip_on=False)
        axes.add_patch(frame)
        return axes

    def panel(self, x: float, y: float, panel: Panel, size: float) -> None:
        """Draw a map and the numbers in its cells, these in a size given in points."""
        shape, inches = panel.cells.shape[:2], panel.inches
        reach = (panel.shape[0] / panel.tile[0], panel.shape[1] / panel.tile[1])
        gap = min(1.2, 2.9 * min(inches[0] / shape[0], inches[1] / shape[1]))  # points: 4% of a cell
        axes = self.cells(x, y, inches, panel.cells, reach, gap)
        for (r, c), sign in np.ndenumerate(panel.signs) if panel.signs is not None else ():
            colour = self.theme.muted if sign in HIDDEN_SIGNS else readable_on(panel.cells[r, c])
            axes.text(c + 0.5, r + 0.5, sign, ha="center", va="center", **self.letters(size, colour))

    def key(self, x: float, y: float, key: Key) -> None:
        """Draw an entry of the legend with its baseline at y."""
        for part in key:
            if isinstance(part, str):
                self.write(x, y, part, CAPTION, muted=True)
            else:  # (K, 3)
                self.cells(x, y - 0.11, (0.13, _part_width(part)), part[None], (1, len(part)), 0.0)
            x += _part_width(part) + 0.07

    def labels(self, x: float, y: float, ticks: Ticks, *, side_by_side: bool) -> None:
        """Draw labels above (x, y) and to the right of it, or to its left and downwards."""
        for place, label in ticks.places:
            at = (x + place, y - 0.06) if side_by_side else (x - 0.08, y + place)
            text = self.write(*at, label, ticks.size)
            if ticks.lean:
                text.set(rotation=45, rotation_mode="anchor", va="bottom")
            else:
                text.set(ha="center") if side_by_side else text.set(ha="right", va="center")


# ------------------------------------------------------------------------------------------------------------ composing


def _part_width(part: str | Array) -> float:
    return measure(part, CAPTION) if isinstance(part, str) else 0.14 if len(part) == 1 else 1.1


def key_width(key: Key) -> float:
    """How many inches an entry of the legend takes."""
    return sum(_part_width(part) + 0.07 for part in key) + 0.2


def flow(keys: list[Key], room: float) -> list[list[tuple[float, Key]]]:
    """Entries of the legend in lines no wider than `room`, each with its distance from the left."""
    lines: list[list[tuple[float, Key]]] = [[]]
    x = 0.0
    for key in keys:
        if lines[-1] and x + key_width(key) > room:
            lines.append([])
            x = 0.0
        lines[-1].append((x, key))
        x += key_width(key)
    return lines


def wrapped(title: str, room: float) -> list[str]:
    """The title in at most four lines no wider than `room`."""
    likely = ceil(len(title) * room / max(measure(title, TITLE, bold=True), room))
    for columns in range(min(len(title), likely + 20), 7, -1):
        lines = textwrap.wrap(title, columns, max_lines=4, placeholder=" …")
        if all(measure(line, TITLE, bold=True) <= room for line in lines):
            return lines
    return [title] if title else []


def _across(panels: list[Panel], tops: list[Ticks], start: float) -> tuple[list[float], float]:
    """Where the panels of a row begin, and where the last one ends with all its words."""
    xs, x = [], start
    for n, (panel, top) in enumerate(zip(panels, tops, strict=True)):
        xs.append(x)
        runs_on = n + 1 < len(tops) and tops[n + 1].lean  # leaning labels pass above the next ones, which lean too
        words = max(measure(panel.heading, HEADING, bold=True), measure(panel.formula, CAPTION))
        x += max(panel.inches[1] + (0.0 if runs_on else top.over), words) + GAP
    return xs, x - GAP


def compose(panels: list[Panel], columns: int, title: str, keys: list[Key], theme: Theme) -> Figure:
    """Panels in a grid, row by row: labels to the left of the first column and above the first row."""
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    high = panels[0].inches[0]
    side = ticks_of(panels[0].rows, panels[0].shape[0], high, side_by_side=False)
    tops = [ticks_of(panel.cols, panel.shape[1], panel.inches[1], side_by_side=True) for panel in grid[0]]
    xs, end = _across(grid[0], tops, MARGIN + max(side.depth, measure(FROM, CAPTION)) + 0.1)
    title = drawable(title)
    room = max(end - MARGIN, min(6.0, max(measure(title, TITLE, bold=True), sum(map(key_width, keys)))))
    lines, legend = wrapped(title, room), flow(keys, room)
    words = 0.22 * bool(panels[0].heading) + 0.17 * bool(panels[0].formula)
    depth = max(0.32, *(top.depth for top in tops))  # at least the two captions in the corner
    ys = [MARGIN + 0.28 * len(lines) + words + 0.1 + depth]
    ys += [ys[0] + row * (high + words + GAP) for row in range(1, len(grid))]
    foot = ys[-1] + high + 0.4
    printed = [(set(panel.signs.flat), panel.signs.shape, panel.inches) for panel in panels if panel.signs is not None]
    size = min((sign_size(*signs) for signs in printed), default=0.0)  # one for all panels
    sheet = Sheet(room + 2 * MARGIN, foot + 0.24 * (len(legend) - 1) + MARGIN, theme)

    for n, line in enumerate(lines):
        sheet.write(MARGIN, MARGIN + 0.14 + 0.25 * n, line, TITLE, bold=True)
    for line, y in ((AT, ys[0] - 0.27), (FROM, ys[0] - 0.11)):
        sheet.write(xs[0] - 0.08, y, line, CAPTION, muted=True).set(ha="right")
    for y, row in zip(ys, grid, strict=True):
        sheet.labels(xs[0], y, side, side_by_side=False)
        top = y - 0.08 - (0.04 + depth if row is grid[0] else 0.0)
        for x, panel in zip(xs, row, strict=False):
            sheet.write(x, top - 0.17 * bool(panel.formula), panel.heading, HEADING, bold=True)
            sheet.write(x, top, panel.formula, CAPTION, muted=True)
            sheet.panel(x, y, panel, size)
    for x, panel, ticks in zip(xs, grid[0], tops, strict=True):
        sheet.labels(x, ys[0], ticks, side_by_side=True)
        sheet.write(x, ys[0] - ticks.depth - 0.14, panel.across, CAPTION, muted=True)
    for n, entries in enumerate(legend):
        for x, key in entries:
            sheet.key(MARGIN + x, foot + 0.24 * n, key)
    return sheet.figure
