"""Weights of patches in the terminal: a small picture of half blocks, or of digits without colours, and the strongest.

It does not know where the numbers come from.
"""

from __future__ import annotations

import os
from typing import Any

from regard.cli.language import Lang, speaker
from regard.cli.terminal import Part, Terminal
from regard.cli.terminal_shades import light_paper

__all__ = ["print_patches", "print_strongest"]

WIDEST, HIGHEST = 64, 24  # cells of the picture
PIPE = 100  # cells on a line where there is no terminal


def print_patches(grid: list[list[float]], lang: Lang, out: Terminal) -> None:
    """Print the weights of a grid of patches where they lie: 0 to 9 in tenths of the largest, or colours.

    >>> print_patches([[0.0, 0.03], [0.01, 0.2]], "en", Terminal())
    Patches by weight: 9 is 0.200, · is under a tenth of that
      · 1
      · 9

    grid: (rows, columns), from 0 up.
    """
    say, high = speaker(lang), max((weight for row in grid for weight in row), default=0.0)
    if not out.coloured:
        title = say("Patches by weight", "패치별 가중치")
        hint = say(f": 9 is {high:.3f}, · is under a tenth of that", f": 9는 {high:.3f}, ·는 그 1/10 미만")
        out.print((title, "bold"), hint)
        for row in grid:
            out.print("  " + " ".join(_digit(weight / high if high else 0.0) for weight in row))
        return
    out.print((say("Patches by weight", "패치별 가중치"), "bold"), say(f": up to {high:.3f}", f": 최대 {high:.3f}"))
    for line in _blocks(grid, high, (out.room or PIPE) - 2):
        out.print("  ", *line)


def _digit(place: float) -> str:
    return "·" if place < 0.1 else str(min(9, int(10 * place)))


def _blocks(grid: list[list[float]], high: float, room: int) -> list[list[Part]]:
    """Lines of half blocks: the upper half in the colour of its letter, the lower in that of its ground."""
    scale = max(1, min(room // len(grid[0]), WIDEST // len(grid[0]), 2 * HIGHEST // len(grid)))
    tall = [
        [weight / high if high else 0.0 for weight in row for _ in range(scale)] for row in grid for _ in range(scale)
    ]
    colours = [[_colour(place) for place in row[:room]] for row in tall]
    lines: list[list[Part]] = []
    for n in range(0, len(colours), 2):
        above = colours[n]
        below = colours[n + 1] if n + 1 < len(colours) else None
        pairs = zip(above, below, strict=True) if below else ((colour, None) for colour in above)
        lines.append([("▀", upper if lower is None else f"{upper} on {lower}") for upper, lower in pairs])
    return lines


def _colour(place: float) -> str:
    """A place from 0 to 1 in the house's colours for this terminal's paper, as #rrggbb."""
    import numpy as np

    from regard.lens.pictures.colours import DARK, LIGHT, Scale

    theme = LIGHT if light_paper(os.environ) else DARK
    cell = Scale("", theme.weight, 0.0, 1.0, hidden=-1.0).colours(np.array(min(max(place, 0.0), 1.0)))
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in cell.tolist())


def print_strongest(patches: list[dict[str, Any]], lang: Lang, out: Terminal) -> None:
    """Print the strongest patches, one a line: row and column, weight, and where it lies in the picture.

    >>> print_strongest([{"row": 1, "column": 0, "box": [16.0, 0.0, 32.0, 16.5], "weight": 0.25}], "en", Terminal())
    Strongest patches
      (1, 0)  0.2500  rows 16 to 32, columns 0 to 16.5
    """
    say = speaker(lang)
    out.print((say("Strongest patches", "가중치가 큰 패치"), "bold"))
    names = [f"({patch['row']}, {patch['column']})" for patch in patches]
    wide = max(map(len, names), default=0)
    for name, patch in zip(names, patches, strict=True):
        top, left, bottom, right = patch["box"]
        place = say(
            f"rows {top:.4g} to {bottom:.4g}, columns {left:.4g} to {right:.4g}",
            f"세로 {top:.4g}~{bottom:.4g}, 가로 {left:.4g}~{right:.4g}",
        )
        out.print(f"  {name:<{wide}}  {patch['weight']:.4f}  ", (place, "dim"))
    if not patches:
        out.print("  ", say("none", "없음"))
