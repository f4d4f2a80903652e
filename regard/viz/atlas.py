"""The head atlas: a square for each head of a model, rows of layers, coloured by one measure; as figure and as HTML.

    >>> import numpy as np
    >>> figure = atlas(np.array([[0.5, 1.5], [2.0, np.nan]]), layers=["encoder.layer.0.self", "encoder.layer.1.self"])
    >>> [text.get_text() for text in figure.texts if " " in text.get_text()]
    ['head →', 'layer ↓', 'no such head', '0 is encoder.layer.0.self']

Axis letters: L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.locale import Lang, catalogue, check_lang, translate
from regard.viz import colors
from regard.viz.colors import LIGHT, Array, Key, Scale, Style, rgb
from regard.viz.sheet import (
    CAPTION,
    MARGIN,
    Pair,
    Panel,
    Sheet,
    cell_signs,
    clip,
    drawable,
    panel_inches,
    read_numbers,
    read_style,
    read_tokens,
    sign_size,
    ticks_of,
)
from regard.viz.sheet import measure as width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["UNITS", "Quantity", "atlas", "atlas_html", "short_names"]

UNITS = {"entropy": "nats", "effective": "keys, 1/Σp²"}
"""The unit of each measure of regard's that has one; the others are shares, or scores without."""

MOST = 256


@dataclass(frozen=True)
class Quantity:
    """What the colours of an atlas mean.

    >>> Quantity("entropy", unit="bits", limits=(0, 8))
    Quantity(name='entropy', unit='bits', limits=(0, 8))

    Args:
        name: of the measure.
        unit: None for that of regard's own measure of this name; "" leaves it out.
        limits: where the colours begin and end, to compare two atlases; default from 0 to the largest value, evenly
            around 0 if some are negative.
    """

    name: str
    unit: str | None = None
    limits: tuple[float, float] | None = None


def atlas(
    values: Any,
    *,
    layers: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    measure: str | Quantity = "entropy",
    labels: Sequence[Sequence[str]] | None = None,
    title: str | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """All heads of a model at once: a row of squares per layer, coloured by one measure.

    >>> figure = atlas(np.array([[0.1, 0.9, 0.3]]), measure="induction", labels=[["", "induction", ""]])
    >>> [text.get_text() for text in figure.axes[0].texts if text.get_text()]
    ['induction']

    Args:
        values: (L, H), at most 256 of each; NaN where a layer has no such head. Infinite ones are red.
        layers: the name of each row, such as module paths; what all of them share is cut off, and the legend says how.
        heads: number of heads of each layer, 0 if its values are unknown: NaN among these is a value, and red; NaN
            beyond them is no head. Default: every NaN is no head.
        measure: what the colours mean: a name, or a `Quantity` with unit and limits.
        labels: L × H words, "" for none; written into the squares, or their beginnings with a key.
        title: above the figure.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".
            A measure of regard's is named in that language too; layers and labels are drawn as they come.

    Raises:
        TypeError: for arguments of a wrong kind.
        ValueError: for arguments of a wrong size.
    """
    style = read_style(title, dark, lang)
    theme = style.theme
    grid = _read(values, layers, heads, labels, measure, lang)
    values, there, unit = grid.values, grid.there, grid.unit
    scale = grid.scale(theme.signed, theme.weight)
    high, wide = inches = panel_inches(values.shape, 1, 1, 9.6 if grid.words is None else 12.0)

    # 1. The legend.
    _, *ramp = scale.key()
    keys: list[Key] = [(drawable(scale.name), *((drawable(f"({unit})"),) if unit else ()), *ramp)]
    if not there.all():
        known = there.any(1).all()
        absent = style.say("no such head") if known else style.say("no such head, or not known")
        keys.append((rgb(theme.paper), absent))
    kinds = {"NaN": np.isnan(values) & there, "infinite": np.isinf(values)}
    if broken := [name for name, cells in kinds.items() if cells.any()]:
        keys.append((rgb(theme.alarm), style.say(" or ".join(broken))))
    rows = None
    if grid.names is not None:
        short = [drawable(name) for name in short_names(grid.names)]
        rows = tuple(clip(name, 28) for name in short)
        if short[0] != drawable(grid.names[0]):
            path = clip(drawable(grid.names[0]), 60)
            keys.append((style.say("{short} is {path}", short=short[0], path=path),))
    # 2. The squares: colours, and numbers or labels in them.
    if grid.words is not None:
        signs, meanings = _labelled(grid.words, inches, style)
        keys += meanings
    else:
        signs = cell_signs(values, scale, inches, None)
        signs = None if signs is None else np.where(there, np.where(np.isnan(values), "NaN", signs), "")
    cells = scale.paint(values, theme)
    cells[~there] = rgb(theme.paper)
    panel = Panel(cells, values.shape, inches, rows, None, signs=signs)
    # 3. The page around them.
    side = ticks_of(rows, values.shape[0], high, side_by_side=False)
    top = ticks_of(None, values.shape[1], wide, side_by_side=True)
    captions = style.say("head →"), style.say("layer ↓")
    left = max(side.depth, *(width(caption, CAPTION) for caption in captions)) + 0.1
    depth = max(0.32, top.depth)  # at least the two captions in the corner
    sheet = Sheet((depth + 0.1 + high, left + wide + top.over), keys, style)
    x, y = MARGIN + left, sheet.top + depth + 0.1
    sheet.captions(x - 0.08, y - 0.27, captions)
    sheet.labels(x, y, side, side_by_side=False)
    sheet.labels(x, y, top, side_by_side=True)
    written = set() if signs is None else set(signs.flat) - {""}
    sheet.panel(x, y, panel, sign_size(written, panel.shape, inches) if written else 0.0)
    return sheet.finish()


@dataclass(frozen=True, eq=False)
class _Grid:
    values: Array  # (L, H)
    there: Array  # (L, H) booleans: which heads exist
    names: tuple[str, ...] | None  # of the layers
    words: Array | None  # (L, H) labels
    measure: Quantity
    lang: Lang

    @property
    def name(self) -> str:
        return catalogue(self.lang).get(self.measure.name, self.measure.name)

    @property
    def unit(self) -> str:
        if self.measure.unit is not None:
            return self.measure.unit
        return translate(UNITS[self.measure.name], self.lang) if self.measure.name in UNITS else ""

    def scale(self, signed: tuple[str, ...], weight: tuple[str, ...]) -> Scale:
        """The colours of the finite values: from 0 up, or around 0."""
        limits: Any = self.measure.limits
        finite = self.values[np.isfinite(self.values)]
        if limits is None:
            far = float(np.abs(finite).max(initial=0.0))
            low, high = (-far, far) if (finite < 0).any() else (0.0, far)
        else:
            try:
                low, high = (float(limit) for limit in limits)
            except (TypeError, ValueError):
                raise TypeError(f"limits must be two numbers, the lowest and the highest; got {limits!r}") from None
            if not low < high:
                raise ValueError(f"limits must rise from the lowest to the highest value; got {limits!r}")
            if finite.size and (finite.min() < low or finite.max() > high):
                span = f"{finite.min():g} to {finite.max():g}"
                raise ValueError(f"limits {low:g} to {high:g} leave out values, which are {span}")
        return Scale(clip(self.name, 40), signed if low < 0 else weight, low, high, hidden=nan)


def _read(values: Any, layers: Any, heads: Any, labels: Any, measure: str | Quantity, lang: Lang) -> _Grid:
    check_lang(lang)
    values = read_numbers("values", values, "(layers, heads)")
    if max(values.shape) > MOST:
        raise ValueError(f"an atlas has at most {MOST} layers and {MOST} heads, got {values.shape}; draw some of them")
    count, most = values.shape
    names = None if layers is None else read_tokens("layers", layers, count, "rows of values")
    words = None
    if labels is not None:
        if isinstance(labels, str) or len(labels) != count:
            amount = repr(labels) if isinstance(labels, str) else f"{len(labels)} rows"
            raise ValueError(f"labels must be {count} rows of {most} words, as values are; got {amount}")
        rows = [read_tokens(f"labels[{n}]", row, most, "heads") for n, row in enumerate(labels)]
        words = np.array(rows, dtype=object)
    there = ~np.isnan(values)
    if heads is None:
        if not there.any():
            raise ValueError("values are all NaN, which means that no head is there; heads= says how many there are")
    elif isinstance(heads, str) or len(heads) != count or not all(isinstance(n, int) and 0 <= n <= most for n in heads):
        raise ValueError(f"heads must be {count} integers from 0 to {most}, one for each row of values; got {heads!r}")
    else:
        there = np.arange(most) < np.array(heads).reshape(-1, 1)
    return _Grid(values, there, names, words, Quantity(measure) if isinstance(measure, str) else measure, lang)


# ------------------------------------------------------------------------------------------------------ names of layers


def short_names(names: Sequence[str]) -> list[str]:
    """Module paths without what all of them share.

    >>> short_names(["encoder.layer.0.attention.self", "encoder.layer.11.attention.self"])
    ['0', '11']
    >>> short_names(["encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention"])
    ['encoder.0.0.SelfAttention', 'decoder.0.1.EncDecAttention']

    The parts at the start and at the end are cut first, then words between that stand in every path; names stay
    different from each other, and one alone stays whole.
    """
    if len(set(names)) < 2:
        return list(names)
    calls = all(", call " in name for name in names)  # of one module that runs several times
    paths = [(name.replace(", call ", ".") if calls else name).split(".") for name in names]
    spare = min(map(len, paths)) - 1  # at least one part of every path stays
    head = _shared(paths, spare)
    tail = _shared([path[::-1] for path in paths], spare - head)
    paths = [path[head : len(path) - tail] for path in paths]
    common = {part for part in paths[0] if not part.isdigit() and all(path.count(part) == 1 for path in paths)}
    thinned = [".".join(part for part in path if part not in common) for path in paths]
    kept = all(thinned) and len(set(thinned)) == len(set(names))
    return thinned if kept else [".".join(path) for path in paths]


def _shared(paths: list[list[str]], most: int) -> int:
    return next((n for n in range(most) if len({path[n] for path in paths}) > 1), most)


def _labelled(words: Array, inches: Pair, style: Style) -> tuple[Array | None, list[Key]]:
    """(L, H) words, or their beginnings, in a size that can be read; and what the beginnings stand for."""
    drawn = np.array([[clip(drawable(word), 24) for word in row] for row in words], dtype=object)
    labels = sorted(set(drawn.flat) - {""})
    if not labels:
        return None, []
    if sign_size(set(drawn.flat), drawn.shape, inches) >= 5:
        return drawn, []
    begins = {"": ""}  # word → the shortest beginning that no other word has
    for word in labels:
        others = [other for other in labels if other != word]
        unique = (n for n in range(1, len(word)) if not any(other.startswith(word[:n]) for other in others))
        begins[word] = word[: next(unique, len(word))]
    if sign_size(set(begins.values()), drawn.shape, inches) >= 4:
        signs = np.array([[begins[word] for word in row] for row in drawn], dtype=object)
        return signs, [(f"{begins[word]} = {word}",) for word in labels if begins[word] != word]
    return None, [(style.say("the labels do not fit into squares so small"),)]


# ----------------------------------------------------------------------------------------------------------------- HTML


def atlas_html(
    values: Any,
    *,
    layers: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    measure: str | Quantity = "entropy",
    labels: Sequence[Sequence[str]] | None = None,
    title: str | None = None,
    lang: Lang = "en",
) -> str:
    """The atlas as HTML for a notebook: self-contained, light or dark as the page is; a square's value on hover.

    >>> "layer 0, head 1: 1.5 nats" in atlas_html(np.array([[0.5, 1.5]]))
    True

    The arguments and errors are those of `atlas`; it needs no matplotlib. Labels are shown on hover.
    """
    grid = _read(values, layers, heads, labels, measure, lang)
    values, unit, scale = grid.values, grid.unit, grid.scale(LIGHT.signed, LIGHT.weight)
    kind = "signed" if scale.low < 0 else "weight"
    rows = short_names(grid.names) if grid.names is not None else [str(n) for n in range(len(values))]
    side = 22 if values.shape[1] <= 16 else 15 if values.shape[1] <= 40 else 10  # pixels
    parts = []
    for n, (name, row) in enumerate(zip(rows, values.tolist(), strict=True)):
        parts.append(f'<span style="text-align:right;padding-right:6px">{escape(clip(name, 28))}</span>')
        for h, value in enumerate(row):
            label = "" if grid.words is None else str(grid.words[n, h])
            number = "NaN" if np.isnan(value) else f"{value:.4g} {unit}".rstrip()
            place = translate("layer {layer}, head {head}", lang, layer=name, head=h)
            tooltip = f"{place}: {number}" + (f", {label}" if label else "")
            style = f"background:{colors.ALARM}"
            if np.isfinite(value):
                share = (value - scale.low) / ((scale.high - scale.low) or 1.0)
                style = colors.shade(kind, colors.level(share)).partition(";")[0]
            square = f'<span title="{escape(tooltip)}" style="{style}"></span>'
            parts.append(square if grid.there[n, h] else "<span></span>")
    style = f"display:grid;grid-template-columns:max-content repeat({values.shape[1]},{side}px);grid-auto-rows:{side}px"
    body = f'<div style="{style};gap:1px;font-size:{min(11, side)}px;line-height:{side}px">{"".join(parts)}</div>'
    name = f"{grid.name} ({unit})" if unit else grid.name
    foot = [
        colors.ramp(kind, name, f"{scale.low:.3g}", f"{scale.high:.3g}"),
        translate("rows: layers, columns: heads", lang),
    ]
    size = {"layers": values.shape[0], "heads": values.shape[1]}
    return colors.frame(body, foot, title, translate("{name} of {layers} × {heads} heads", lang, name=name, **size))
