"""Shades of a terminal: numbers from 0 to 1 as background colours that text stays readable on, and lines that fit.

It does not know what the numbers mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from regard.cli.terminal import Part
from regard.tables import width

__all__ = ["fit", "light_paper", "shade"]


def shade(place: float, environment: Mapping[str, str] = os.environ) -> str:
    """The style of a cell in rich's words; "" where there is nothing to show.

    >>> shade(1.0, {}), shade(1.0, {"COLORFGBG": "0;15"}), shade(0.0, {})
    ('#000000 on #cbfaf0', '#ffffff on #182052', '')

    place: from 0 to 1.  environment: may say that the terminal is light; then more is darker, else lighter.
    """
    import numpy as np

    from regard.lens.pictures.colours import DARK, LIGHT, Scale, readable_on

    if not place > 0.0:
        return ""
    theme = LIGHT if light_paper(environment) else DARK
    cell = Scale("", theme.weight, 0.0, 1.0, hidden=-1.0).colours(np.array(min(place, 1.0)))
    colour = "".join(f"{round(255 * channel):02x}" for channel in cell.tolist())
    return f"{readable_on(cell)} on #{colour}"


def light_paper(environment: Mapping[str, str]) -> bool:
    """Does the terminal say that its background is light? Few do; most are dark.

    >>> light_paper({"COLORFGBG": "0;15"}), light_paper({"COLORFGBG": "15;0"}), light_paper({})
    (True, False, False)
    """
    return environment.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")


def fit(items: Sequence[Sequence[tuple[str, str]]], room: int, indent: str = "", gap: str = " ") -> list[list[Part]]:
    """Items, each of styled parts that stay together, on as many lines as they need.

    >>> fit([[("고양이", "")], [("sat", "bold")]], room=9)
    [[('고양이', '')], [('sat', 'bold')]]
    """
    lines: list[list[Part]] = []
    used = room
    for item in items:
        cells = sum(width(text) for text, _ in item)
        if not lines or used + len(gap) + cells > room:
            lines.append([indent] if indent else [])
            used = len(indent)
        else:
            lines[-1].append(gap)
            used += len(gap)
        lines[-1] += item
        used += cells
    return lines
