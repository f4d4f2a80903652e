"""A matrix of numbers with a label on each row and column, printed; weights as a heat map where there is colour.

It does not know what the numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from regard.cli.language import Say
from regard.cli.terminal import Part, Terminal
from regard.tables import number, pad, width

__all__ = ["INDENT", "print_matrix"]

INDENT = "   "
MOST_SHOWN = 12  # rows and columns
DECIMALS = 4
LARGE = 10_000.0  # from here on, each number in its own form: 1.48e+12
# Paper to ink in equal steps of lightness, as regard.lens.figures draws weights; black or white reads on each.
HEAT = ("black on #c6f2f1", "black on #9adae1", "black on #6ec1d4", "black on #46a6cc", "white on #246bae")


def print_matrix(
    values: Sequence[Sequence[float]],
    labels: Sequence[str] | None,
    headers: Sequence[str] | None,
    *,
    heat: bool,
    say: Say,
    out: Terminal,
) -> None:
    """Print a matrix: at most 12 rows and 12 columns, fewer columns where there is no room, and how many are left out.

    >>> say = lambda english, korean: english
    >>> print_matrix([[0.5, 0.0], [0.25, 1.0]], ["The", "고양이"], None, heat=True, say=say, out=Terminal())
                  0     1
       The     0.50     0
       고양이  0.25  1.00

    values: (N, M).  labels: one per row.  headers: one per column. Without them rows and columns are numbered.
    heat: colour a cell by its share of the largest number; 0 stays bare.
    """
    n, m = len(values), len(values[0])
    rows = list(labels or map(str, range(n)))[:MOST_SHOWN]
    columns = list(headers or map(str, range(m)))[:MOST_SHOWN]
    cells = _aligned([row[:MOST_SHOWN] for row in values[:MOST_SHOWN]])
    widths = [max(map(width, column)) for column in zip(columns, *cells, strict=True)]
    side = max(map(width, rows))
    shown = len(columns) if out.room is None else _fitting(widths, out.room - len(INDENT) - side)
    out.print(f"{INDENT}{pad('', side)} ", *((_cell(columns[c], widths[c]), "dim") for c in range(shown)))
    largest = max((value for row in values for value in row if isfinite(value)), default=0.0)
    for label, numbers, texts in zip(rows, values, cells, strict=False):
        styles = [_heat(value, largest) if heat else "" for value in numbers[:shown]]
        parts: list[Part] = [(_cell(texts[c], widths[c]), style) for c, style in enumerate(styles)]
        out.print(f"{INDENT}{pad(label, side)} ", *parts)
    if (len(rows), shown) != (n, m):
        part, whole = f"{len(rows)} × {shown}", f"{n} × {m}"
        out.print((INDENT + say(f"… {part} of {whole}; --json has all", f"… {whole} 중 {part}, 전체는 --json"), "dim"))


def _cell(text: str, cells: int) -> str:
    return f" {pad(text, cells, right=True)} "


def _fitting(widths: list[int], room: int) -> int:
    """How many columns fit, each with a space on both sides; at least one."""
    shown = len(widths)
    while shown > 1 and sum(w + 2 for w in widths[:shown]) > room:
        shown -= 1
    return shown


def _aligned(rows: Sequence[Sequence[float]]) -> list[list[str]]:
    """Numbers with as many decimals as the one that needs most, up to four: the points stand below each other.

    >>> _aligned([[0.5, 0.0, 0.00002], [1.25, -inf, 0.61838]])
    [['0.5000', '0', '2e-05'], ['1.2500', '−∞', '0.6184']]

    Exactly 0 is 0, and nothing else looks like it.
    """
    finite = [value for row in rows for value in row if isfinite(value)]
    large = any(abs(value) >= LARGE for value in finite)
    decimals = max((len(f"{value:.{DECIMALS}f}".rstrip("0").partition(".")[2]) for value in finite), default=0)

    def written(value: float) -> str:
        if not isfinite(value):
            return {inf: "∞", -inf: "−∞"}.get(value, "NaN")
        fixed = f"{value:.{decimals}f}"
        return number(value) if large or float(fixed) == 0 else fixed

    return [[written(value) for value in row] for row in rows]


def _heat(value: float, largest: float) -> str:
    """The style of a number; what is not above 0 (NaN too) is bare."""
    if not value > 0 or not isfinite(value):
        return ""
    return HEAT[min(int(value / largest * len(HEAT)), len(HEAT) - 1)]
