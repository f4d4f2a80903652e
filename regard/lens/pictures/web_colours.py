"""The colours of the figures for HTML in a notebook: every element carries the light paper's, a style sheet the dark's.

Colours are inline, `var(--…, light)`: where a page strips style sheets the picture is still there, in light. On dark
paper the sheet sets the variables: by the reader's system, or by the theme that Jupyter, VS Code or Colab has chosen.

This file does not know what is drawn. It imports neither matplotlib nor anything of the web.
"""

from __future__ import annotations

from html import escape

from regard.lens.pictures.colours import DARK, LIGHT, Theme, readable_on, rgb

__all__ = ["ALARM", "INK", "MUTED", "frame", "level", "ramp", "shade"]

ALARM = f"var(--regard-alarm,{LIGHT.alarm})"
INK = f"var(--regard-ink,{LIGHT.ink})"
MUTED = f"var(--regard-muted,{LIGHT.muted})"
FONT = "font-family:system-ui,'Noto Sans KR','Malgun Gothic','Apple SD Gothic Neo',sans-serif;font-size:13px"
_DARK_PAGES = ("[data-jp-theme-light=false]", ".vscode-dark", "html[theme=dark]", "html[data-theme=dark]")
_LIGHT_PAGES = ("[data-jp-theme-light=true]", ".vscode-light", "html[theme=light]", "html[data-theme=light]")


def level(place: float) -> int:
    """The one of the nine colours of a ramp that is nearest to a place along it, 0 to 1.

    >>> level(0.0), level(0.5), level(1.0)
    (0, 4, 8)
    """
    return round(max(0.0, min(1.0, place)) * (len(LIGHT.weight) - 1))


def shade(kind: str, number: int) -> str:
    """The style of an element in colour `number` of a ramp, "weight" or "signed", with letters that can be read on it.

    >>> shade("weight", 8)
    'background:var(--regard-w8,#182052);color:var(--regard-w8i,#ffffff)'
    """
    colour = getattr(LIGHT, kind)[number]
    name = f"--regard-{kind[0]}{number}"
    return f"background:var({name},{colour});color:var({name}i,{readable_on(rgb(colour)[0])})"


def ramp(kind: str, name: str, low: str, high: str) -> str:
    """The legend of a ramp: its name, the lowest number, the colours, the highest."""
    swatches = "".join(
        f'<span style="display:inline-block;width:12px;height:10px;{shade(kind, n)}"></span>'
        for n in range(len(LIGHT.weight))
    )
    return f"<span>{escape(name)} {escape(low)} {swatches} {escape(high)}</span>"


def frame(body: str, foot: list[str], title: str | None, says: str) -> str:
    """A picture in HTML, whole in itself: title, body, legend, and what it shows for those who cannot see it.

    body, foot: HTML.  title, says: plain text.
    """
    heading = f'<div style="font-weight:600;margin-bottom:6px">{escape(title)}</div>' if title else ""
    legend = f'<div style="margin-top:8px;font-size:11px;color:{MUTED}">{" &emsp; ".join(foot)}</div>'
    inside = f'<div role="img" aria-label="{escape(says)}">{body}</div>'
    return f'<div class="regard-picture" style="{FONT}"><style>{_sheet()}</style>{heading}{inside}{legend}</div>'


def _sheet() -> str:
    dark, light = _variables(DARK), _variables(LIGHT)
    picture = ".regard-picture"
    return (
        f"@media(prefers-color-scheme:dark){{{picture}{{{dark}}}}}"
        f"{','.join(f'{page} {picture}' for page in _LIGHT_PAGES)}{{{light}}}"
        f"{','.join(f'{page} {picture}' for page in _DARK_PAGES)}{{{dark}}}"
    )


def _variables(theme: Theme) -> str:
    pairs = [("alarm", theme.alarm), ("ink", theme.ink), ("muted", theme.muted)]
    for letter, colours in (("w", theme.weight), ("s", theme.signed)):
        for n, colour in enumerate(colours):
            pairs += [(f"{letter}{n}", colour), (f"{letter}{n}i", readable_on(rgb(colour)[0]))]
    return ";".join(f"--regard-{name}:{value}" for name, value in pairs)
