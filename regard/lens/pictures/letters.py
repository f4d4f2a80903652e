"""Letters: the fonts, the signs they can draw, and how much room a text takes.

This file does not know what is written, nor where. It imports matplotlib only inside functions.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from regard.tables import width as terminal_width

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties

__all__ = ["clip", "drawable", "font", "measure", "register_fonts"]

FAMILY = "regard NanumGothic"  # a name of our own: registering it changes no font that anybody else asks for
INSTALL = "pip install 'regard[figures]'"
_REGISTERING = Lock()


def register_fonts() -> None:
    """See that matplotlib and the Korean font are there, and the font known under our own name.

    Called before anything is measured or drawn. Raises ImportError, with what to install, if something is missing.
    """
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
    r"""Hangul composed, and what has no glyph (a newline, Thai) as its code, never as an empty box.

    >>> register_fonts()
    >>> drawable("고양이\n")
    '고양이∖n'
    """
    composed = unicodedata.normalize("NFC", string)
    drawn = (sign if sign in _glyphs() and sign.isprintable() else ascii(sign)[1:-1] for sign in composed)
    return "".join(drawn).replace("\\", "∖")  # Korean fonts draw a Won in the backslash's place


def measure(string: str, size: float, bold: bool = False) -> float:
    """Width in inches of a text of so many points.

    >>> register_fonts()
    >>> measure("고양이", 12.0) > measure("고양", 12.0) > 0
    True
    """
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
