"""Curves of what attention costs as the sequence grows: both axes logarithmic, a line for each way to attend.

This file does not know what is counted or measured, nor any way by name. It imports matplotlib only to make a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from regard.viz.colors import DARK, LIGHT, Theme
from regard.viz.sheet import font, register_fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curves", "growth_curves"]

SIGNS = ("o", "s", "^", "D")  # so that lines are told apart without colours, too
WIDTH, HEIGHT, DPI = 4.6, 3.7, 150


class Curves(NamedTuple):
    """One panel: its title, the unit along its side, and name → a value for each length, None where there is none."""

    title: str
    unit: str
    lines: Mapping[str, Sequence[float | None]]


def growth_curves(lengths: Sequence[int], panels: Sequence[Curves], *, title: str = "", dark: bool = False) -> Figure:
    """A panel for each quantity, two side by side; each line ends in its name.

    >>> picture = growth_curves([1, 2, 4], [Curves("time", "s", {"full": [1.0, 4.0, None], "kernel": [1.0, 2.0, 4.0]})])
    >>> [text.get_text() for text in picture.axes[0].texts]
    ['full', 'kernel']

    lengths: along the x axis.  panels: at least one, with at most four lines each.  dark: for dark paper.
    Raises ValueError for no length, no panel, too many lines, or a line of another length.
    """
    _check(lengths, panels)
    register_fonts()
    from matplotlib.figure import Figure

    theme = DARK if dark else LIGHT
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), dpi=DPI, facecolor=theme.paper, layout="constrained")
    for place, panel in enumerate(panels):
        _draw(figure.add_subplot(rows, columns, place + 1), lengths, panel, theme)
    if title:
        figure.suptitle(title, fontproperties=font(11, bold=True), color=theme.ink)
    return figure


def _draw(axes: Axes, lengths: Sequence[int], panel: Curves, theme: Theme) -> None:
    axes.set_facecolor(theme.paper)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    colours = (theme.ink, theme.weight[3], theme.signed[2], theme.weight[6])
    ends = []
    for (name, values), sign, colour in zip(panel.lines.items(), SIGNS, colours, strict=False):
        points = [(n, value) for n, value in zip(lengths, values, strict=True) if value]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), marker=sign, markersize=4, linewidth=1.6, color=colour)
        ends.append((points[-1], name, colour))
    # Names that would stand on each other move apart: upwards, by a fifteenth of the height.
    low, high = axes.get_ylim()
    room = (high / low) ** 0.065
    floor = 0.0
    for (n, value), name, colour in sorted(ends):
        height = max(value, floor) if n == lengths[-1] else value
        floor = height * room if n == lengths[-1] else floor
        axes.annotate(
            name,
            (n, height),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontproperties=font(9, bold=True),
            annotation_clip=False,
        )
    _dress(axes, lengths, panel, theme)


def _dress(axes: Axes, lengths: Sequence[int], panel: Curves, theme: Theme) -> None:
    """Title, ticks and lines in the colours of the paper."""
    from matplotlib.ticker import EngFormatter

    axes.set_title(panel.title, fontproperties=font(10), color=theme.ink, loc="left")
    axes.set_xticks(list(lengths), [_short(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("n", fontproperties=font(9), color=theme.muted)
    axes.yaxis.set_major_formatter(EngFormatter(panel.unit))  # 10 ms, 1 GFLOP: powers of ten lack a sign in our font
    axes.grid(True, color=theme.line, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.muted, length=0)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontproperties(font(8))
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.line)


def _short(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}"


def _check(lengths: Sequence[int], panels: Sequence[Curves]) -> None:
    if not lengths or not panels:
        raise ValueError(f"curves need lengths and panels, got {len(lengths)} and {len(panels)}")
    for panel in panels:
        if len(panel.lines) > len(SIGNS):
            raise ValueError(f"a panel has at most {len(SIGNS)} lines, got {len(panel.lines)}")
        for name, values in panel.lines.items():
            if len(values) != len(lengths):
                raise ValueError(f"line {name!r} has {len(values)} values, but there are {len(lengths)} lengths")
