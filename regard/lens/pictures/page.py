"""The page of a lens figure: title above, legend below, and between them free room, measured in inches.

It builds on `sheet.py`, whose letters, margins and legend every figure shares.

This file does not know what is drawn in the room. It imports matplotlib only inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from regard.lens.pictures.colours import Key, Theme
from regard.lens.pictures.letters import drawable, measure
from regard.lens.pictures.sheet import (
    CAPTION,
    MARGIN,
    TITLE,
    Pair,
    Sheet,
    Ticks,
    flow,
    key_width,
    sign_size,
    ticks_of,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "CAPTION",
    "MARGIN",
    "Page",
    "Sheet",
    "Ticks",
    "canvas",
    "hatch",
    "open_page",
    "ruler",
    "sign_size",
    "ticks_of",
]


@dataclass(frozen=True)
class Page:
    """A page with its title written and free room below it; the legend follows when the drawing is there."""

    sheet: Sheet
    top: float  # inches: where the free room begins, MARGIN from the left
    foot: float  # the legend's first baseline
    legend: list[list[tuple[float, Key]]]  # lines of entries, each with its distance from the left

    def finish(self) -> Figure:
        """Write the legend, and hand over the figure."""
        for n, entries in enumerate(self.legend):
            for x, key in entries:
                self.sheet.key(MARGIN + x, self.foot + 0.24 * n, key)
        return self.sheet.figure


def open_page(inches: Pair, title: str | None, keys: list[Key], theme: Theme) -> Page:
    """A page with free room of (height, width) inches; as wide as asked for, or as the legend's widest entry."""
    words = drawable(title or "")
    widest = max(map(key_width, keys), default=0.0)
    room = max(inches[1], widest, min(6.0, max(measure(words, TITLE, bold=True), sum(map(key_width, keys)))))
    lines, legend = wrapped(words, room), flow(keys, room)
    top = MARGIN + 0.28 * len(lines) + 0.1 * bool(lines)
    foot = top + inches[0] + 0.4
    sheet = Sheet(room + 2 * MARGIN, foot + 0.24 * (len(legend) - 1) + MARGIN, theme)
    for n, line in enumerate(lines):
        sheet.write(MARGIN, MARGIN + 0.14 + 0.25 * n, line, TITLE, bold=True)
    return Page(sheet, top, foot, legend)


def canvas(sheet: Sheet, x: float, y: float, inches: Pair) -> Axes:
    """Bare axes of (height, width) inches whose units are inches, rightwards and downwards from (x, y)."""
    height, width = inches
    place = (x / sheet.width, 1 - (y + height) / sheet.height, width / sheet.width, height / sheet.height)
    axes = sheet.figure.add_axes(place)
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0))
    return axes


def hatch(sheet: Sheet, x: float, y: float, inches: Pair) -> None:
    """Cover a rectangle with bare paper and slanted lines: what is left out of the colours.

    The lines are our own: the width of matplotlib's is a setting of the whole program.
    """
    from matplotlib.collections import LineCollection

    axes, (height, width) = canvas(sheet, x, y, inches), inches
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[], facecolor=sheet.theme.paper)
    axes.spines[:].set_visible(False)
    starts = np.arange(0.03, height + width, 0.06)
    lines = [[(0.0, start), (start, 0.0)] for start in starts]
    axes.add_collection(LineCollection(lines, colors=sheet.theme.line, linewidths=0.8), autolim=False)


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
