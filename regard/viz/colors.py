"""Colour scales, themes and legends for figures and HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.locale import Lang, translate

Array = NDArray[Any]
Key = tuple[str | Array, ...]  # an entry of the legend: words, and colours (K, 3) as a swatch or a ramp

FAINT_SIGNS = ("·", "−∞", "<.01")  # of hidden cells, and of weights that hardly count


@dataclass(frozen=True)
class Theme:
    """The colours of one paper, as '#rrggbb': `LIGHT` and `DARK` are the two there are."""

    paper: str
    ink: str
    muted: str
    line: str
    alarm: str
    weight: tuple[str, ...]  # smallest to largest
    signed: tuple[str, ...]  # most negative, zero in the middle, most positive
    heat: tuple[str, ...]  # of maps of weights: 0 is the paper
    query: str  # what marks a query, and what a key, as on the page
    key: str


# Equal steps of OKLab lightness. Orange against blue, never red against green, for colour-blind readers.
LIGHT = Theme(
    *("#ffffff", "#1b1f26", "#68707d", "#c3c9d2", "#d81b60"),
    ("#c6f2f1", "#9adae1", "#6ec1d4", "#46a6cc", "#2388c3", "#246bae", "#274d98", "#213674", "#182052"),
    ("#824121", "#ab6230", "#d5863e", "#deba91", "#e8e8e8", "#a1c1e2", "#5c98d5", "#376db3", "#194292"),
    ("#ffffff", "#bbeced", "#8ad1dc", "#5bb4d0", "#3395c7", "#2474b5", "#27539c", "#223877", "#182052"),
    *("#b8430a", "#b0186b"),
)
DARK = Theme(
    *("#14171c", "#e8ebf0", "#949dab", "#454d59", "#ff5c93"),
    ("#293363", "#324886", "#365eaa", "#357abf", "#3696d2", "#49b3d9", "#6ccedf", "#9ce5e4", "#cbfaf0"),
    ("#e7b369", "#c78c49", "#a6662b", "#6f4f34", "#38383a", "#425979", "#437eb9", "#60a6da", "#81cffc"),
    ("#14171c", "#222a4c", "#2f417a", "#365ba5", "#357dc1", "#3ca0d4", "#5dc2dc", "#91e0e3", "#cbfaf0"),
    *("#ffab5e", "#ff8ac2"),
)


@dataclass(frozen=True)
class Style:
    """What every figure is drawn with: its title, its colours, and the language of its own words."""

    title: str
    theme: Theme
    lang: Lang

    def say(self, text: str, **values: object) -> str:
        """A text in the figure's language."""
        return translate(text, self.lang, **values)


@dataclass(frozen=True)
class Scale:
    """What a colour means: numbers from low to high along a ramp, and the one number that means hidden."""

    name: str
    ramp: tuple[str, ...]
    low: float
    high: float
    hidden: float

    def colours(self, place: Array) -> Array:
        """Places along the ramp, 0 to 1 → colours (…, 3)."""
        stops = np.linspace(0.0, 1.0, len(self.ramp))
        return np.stack([np.interp(place, stops, channel) for channel in rgb(*self.ramp).T], -1)

    def paint(self, values: Array, theme: Theme) -> Array:
        """(R, C) numbers → (R, C, 3) colours."""
        finite = np.isfinite(values)
        cells = self.colours((np.where(finite, values, 0.0) - self.low) / ((self.high - self.low) or 1.0))
        cells[~finite] = rgb(theme.alarm)
        cells[values == self.hidden] = rgb(theme.paper)
        return cells

    def sign(self, value: float) -> str:
        """A number in the few signs that a cell has room for."""
        if value == self.hidden:
            return "·" if value == 0 else "−∞"
        if self.hidden == 0 and value < 0.005:
            return "<.01"
        digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
        return (f"{value:z.{digits}f}" if abs(value) < 9999.5 else f"{value:.0e}").replace("-", "−")

    def key(self) -> Key:
        """The scale as an entry of the legend."""
        low, high = (f"{value:.3g}".replace("-", "−") for value in (self.low, self.high))
        return self.name, low, self.colours(np.linspace(0.0, 1.0, 60)), high


def rgb(*colours: str) -> Array:
    """'#rrggbb' → (K, 3) in 0..1."""
    return np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])


def readable_on(cell: Array) -> str:
    """Black or white, whichever contrasts more (WCAG 2 relative luminance): at least 4.5 to 1 on any colour (3,)."""
    linear = np.where(cell <= 0.04045, cell / 12.92, ((cell + 0.055) / 1.055) ** 2.4)
    return "#000000" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "#ffffff"


def legend(scales: list[Scale], maps: list[Array], style: Style) -> list[Key]:
    """The legend: each scale, and hidden or broken cells where there are any in the maps (R, C)."""
    keys, hidden = [scale.key() for scale in scales], scales[0].hidden
    if scales[0].ramp[0] != style.theme.paper and any((values == hidden).any() for values in maps):
        keys.append((rgb(style.theme.paper), style.say("exactly 0") if hidden == 0 else style.say("hidden")))
    if any((np.isnan(values) | (values == inf)).any() for values in maps):
        keys.append((rgb(style.theme.alarm), style.say("NaN or infinite")))
    return keys


ALARM = f"var(--regard-alarm,{LIGHT.alarm})"
INK = f"var(--regard-ink,{LIGHT.ink})"
MUTED = f"var(--regard-muted,{LIGHT.muted})"
FONT = "font-family:system-ui,'Noto Sans KR','Malgun Gothic','Apple SD Gothic Neo',sans-serif;font-size:13px"
_DARK_PAGES = ("[data-jp-theme-light=false]", ".vscode-dark", "html[theme=dark]", "html[data-theme=dark]")
_LIGHT_PAGES = ("[data-jp-theme-light=true]", ".vscode-light", "html[theme=light]", "html[data-theme=light]")


def level(place: float) -> int:
    """The one of the nine colours of a ramp that is nearest to a place along it, 0 to 1."""
    return round(max(0.0, min(1.0, place)) * (len(LIGHT.weight) - 1))


def shade(kind: str, number: int) -> str:
    """The style of an element in colour `number` of a ramp ("weight" or "signed"), with letters readable on it."""
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
    """A self-contained figure in HTML: title, body, legend, and a description for screen readers.

    body, foot: HTML.  title, says: plain text.
    """
    dark, light = _variables(DARK), _variables(LIGHT)
    sheet = (
        f"@media(prefers-color-scheme:dark){{.regard-figure{{{dark}}}}}"
        f"{','.join(f'{page} .regard-figure' for page in _LIGHT_PAGES)}{{{light}}}"
        f"{','.join(f'{page} .regard-figure' for page in _DARK_PAGES)}{{{dark}}}"
    )
    heading = f'<div style="font-weight:600;margin-bottom:6px">{escape(title)}</div>' if title else ""
    legend = f'<div style="margin-top:8px;font-size:11px;color:{MUTED}">{" &emsp; ".join(foot)}</div>'
    inside = f'<div role="img" aria-label="{escape(says)}">{body}</div>'
    return f'<div class="regard-figure" style="{FONT}"><style>{sheet}</style>{heading}{inside}{legend}</div>'


def _variables(theme: Theme) -> str:
    pairs = [("alarm", theme.alarm), ("ink", theme.ink), ("muted", theme.muted)]
    for letter, colours in (("w", theme.weight), ("s", theme.signed)):
        for n, colour in enumerate(colours):
            pairs += [(f"{letter}{n}", colour), (f"{letter}{n}i", readable_on(rgb(colour)[0]))]
    return ";".join(f"--regard-{name}:{value}" for name, value in pairs)
