"""Small tables as plain text and as HTML; columns line up also where characters are two cells wide, as Hangul is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from unicodedata import combining, east_asian_width, normalize

__all__ = ["html", "number", "pad", "text", "width"]


def width(string: str) -> int:
    """Terminal cells that a string takes.

    >>> width("cat"), width("고양이")
    (3, 6)
    """
    whole = normalize("NFC", string)  # Hangul typed as separate jamo is drawn as syllables
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in whole)


def pad(string: str, cells: int, right: bool = False) -> str:
    """The string padded with spaces to a width in terminal cells, on the left if `right`."""
    space = " " * max(0, cells - width(string))
    return space + string if right else string + space


def number(value: float) -> str:
    """A float with few digits.

    >>> number(0.25), number(0.0), number(1234567.0), number(float("-inf")), number(0.00002)
    ('0.25', '0', '1.23e+06', '-inf', '2e-05')
    """
    if value == 0:
        return "0"
    return f"{value:.4g}" if 1e-4 <= abs(value) < 1e5 else f"{value:.3g}"


def text(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """An aligned text table; columns listed in `right` are set flush right.

    >>> print(text(["word", "weight"], [["고양이", "0.5"], ["sat", "0.25"]], right=[1]))
    word    weight
    ──────  ──────
    고양이     0.5
    sat       0.25
    """
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(width(line[c]) for line in lines) for c in range(len(headers))]
    lines.insert(1, ["─" * w for w in widths])

    def line(cells: list[str]) -> str:
        return "  ".join(pad(x, w, c in right) for c, (x, w) in enumerate(zip(cells, widths, strict=True))).rstrip()

    return "\n".join(map(line, lines))


def html(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """The same table as HTML; every cell is escaped.

    >>> html(["a"], [["<b>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        styled = (f'<{tag} style="text-align:right">' if c in right else f"<{tag}>" for c in range(len(cells)))
        return "<tr>" + "".join(f"{open_}{escape(x)}</{tag}>" for open_, x in zip(styled, cells, strict=True)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', headers)}</thead><tbody>{body}</tbody></table>"
