"""Links: who looks at whom, as curves between words; the heavier the weight, the thicker and deeper the curve.

    >>> figure = links(["the", "cat", "sat"], [2, 2], [1, 0], [0.7, 0.2])
    >>> [text.get_text() for text in figure.texts if "links" in text.get_text()]
    ['2 links']

Axis letters: M links among Nq queries and Nk keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from regard.viz.colors import DARK, LIGHT, Array, Key, Scale, Theme
from regard.viz.sheet import (
    CAPTION,
    MARGIN,
    Pair,
    Sheet,
    canvas,
    clip,
    drawable,
    measure,
    open_page,
    read_indices,
    read_tokens,
    read_weights,
    register_fonts,
)
from regard.viz.text_heat import readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Kind", "links"]

Kind = Literal["columns", "arcs"]
"""Queries left and keys right, or arcs over one line of words."""

MOST_WORDS = 100  # a column or a line
WORD = 9.5  # points
BETWEEN = 2.8  # inches between the columns
GAP = "⋮"


def links(
    tokens: Sequence[str],
    sources: Any,
    targets: Any,
    weights: Any,
    *,
    key_tokens: Sequence[str] | None = None,
    kind: Kind = "columns",
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """Links between words: from each source, which looks, to its target, which is looked at.

    >>> figure = links(["나는", "고양이를", "보았다"], [2, 0], [1, 1], [0.7, 0.4], kind="arcs")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['나는', '고양이를', '보았다']

    Every given link is drawn. Of more than 100 words only those with links are written, with their positions, and ⋮ for
    what lies between.

    Args:
        tokens: Nq strings, the queries'; the keys' too unless key_tokens are given.
        sources: (M,) index of the query of each link.
        targets: (M,) index of its key.
        weights: (M,) finite, at least 0.
        key_tokens: Nk strings, if the keys are other words; for columns only.
        kind: "columns", queries left and keys right; or "arcs" over one line, above it those that look back or at
            themselves, below it those that look ahead.
        title: above the figure.
        dark: for dark paper.

    Raises:
        TypeError: for arguments of a wrong kind.
        ValueError: for wrong sizes or values, no links, or links among more than 100 words.
    """
    register_fonts()
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(map(repr, get_args(Kind)))}; got {kind!r}")
    if kind == "arcs" and key_tokens is not None:
        raise ValueError('kind="arcs" is drawn over one line of words, but key_tokens are others; use kind="columns"')
    queries = read_tokens("tokens", tokens)
    keys = queries if key_tokens is None else read_tokens("key_tokens", key_tokens)
    weights = read_weights("weights", weights, "(links,)")
    sources = read_indices("sources", sources, len(queries), "tokens")
    targets = read_indices("targets", targets, len(keys), "tokens" if key_tokens is None else "key_tokens")
    if not len(sources) == len(targets) == len(weights):
        counts = f"{len(sources)} sources, {len(targets)} targets and {len(weights)} weights"
        raise ValueError(f"every link has one source, one target and one weight; got {counts}")
    theme = DARK if dark else LIGHT
    drawing = _columns(queries, keys, sources, targets) if kind == "columns" else _arcs(queries, sources, targets)
    scale = Scale("weight", theme.weight[2:], 0.0, float(weights.max()), hidden=nan)
    count = f"{len(weights):,} link{'s' * (len(weights) > 1)}"
    entries: list[Key] = [scale.key(), (count,), *((note,) for note in drawing.notes)]
    page = open_page(drawing.inches, title, entries, theme)
    _draw(page.sheet, drawing, weights, scale, page.top, theme)
    return page.finish()


@dataclass(frozen=True)
class _Entry:
    """A word of a column or a line; without index, what is left out."""

    index: int | None
    text: str
    linked: bool


def _entries(tokens: tuple[str, ...], linked: Array) -> list[_Entry]:
    """All words, or of too many only those with links."""
    pieces, touched = readable(tokens), {int(index) for index in linked}
    texts = [clip(drawable(piece.text), 24) for piece in pieces]
    if len(tokens) <= MOST_WORDS:
        return [_Entry(n, text, n in touched) for n, text in enumerate(texts)]
    entries: list[_Entry] = []
    expected = 0
    for n in sorted(touched):
        entries += [_Entry(None, GAP, False)] if n > expected else []
        entries.append(_Entry(n, f"{texts[n]} {n}", True))
        expected = n + 1
    entries += [_Entry(None, GAP, False)] if expected < len(tokens) else []
    if len(entries) > MOST_WORDS:
        raise ValueError(
            f"links are drawn among at most {MOST_WORDS} words, but these {len(linked)} touch {len(touched)} of "
            f"{len(tokens)}; give fewer, such as those of one query or the heaviest"
        )
    return entries


# -------------------------------------------------------------------------------------------------------------- placing


@dataclass(frozen=True)
class _Label:
    """A word in its place, in inches from the drawing's upper left corner."""

    text: str
    x: float
    y: float
    ha: str
    linked: bool
    turned: bool = False


@dataclass(frozen=True)
class _LinkDrawing:
    """A drawing: its words and its curves, each from its source to its target, by four points of a Bézier curve."""

    inches: Pair
    words: list[_Label]
    curves: list[list[Pair]]  # M of 4
    heads: list[tuple[str, float]]  # captions over the columns: text, where it ends or begins
    notes: list[str]


def _columns(queries: tuple[str, ...], keys: tuple[str, ...], sources: Array, targets: Array) -> _LinkDrawing:
    sides = [_entries(queries, sources), _entries(keys, targets)]
    most = max(map(len, sides))
    pitch, top = min(0.26, 17.0 / most), 0.3
    widths = [max(measure(entry.text, WORD) for entry in side) + 0.14 for side in sides]
    left, right = max(widths[0], 0.75), max(widths[0], 0.75) + BETWEEN
    words, places = [], []
    for side, x, ha in zip(sides, (left - 0.1, right + 0.1), ("right", "left"), strict=True):
        start = top + (most - len(side)) * pitch / 2 if len(side) < most else top
        heights = [start + (n + 0.5) * pitch for n in range(len(side))]
        words += [_Label(e.text, x, y, ha, e.linked) for e, y in zip(side, heights, strict=True)]
        places.append({e.index: y for e, y in zip(side, heights, strict=True)})
    curves = []
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        a, b = places[0][source], places[1][target]
        curves.append([(left, a), (left + 0.45 * BETWEEN, a), (right - 0.45 * BETWEEN, b), (right, b)])
    heads = [("looks from", left - 0.1), ("looks at", right + 0.1)]
    return _LinkDrawing((top + most * pitch, right + max(widths[1], 0.75)), words, curves, heads, [])


def _arcs(tokens: tuple[str, ...], sources: Array, targets: Array) -> _LinkDrawing:
    entries = _entries(tokens, np.concatenate([sources, targets]))
    widths = [measure(entry.text, WORD) for entry in entries]
    turned = sum(widths) + 0.16 * len(widths) > 15.0
    steps = [0.18] * len(widths) if turned else [width + 0.16 for width in widths]
    ends = np.cumsum(steps)
    middles = (ends - np.array(steps) / 2).tolist()
    at = {entry.index: x for entry, x in zip(entries, middles, strict=True)}
    pairs = [(at[s], at[t]) for s, t in zip(sources.tolist(), targets.tolist(), strict=True)]
    farthest = max(abs(a - b) for a, b in pairs)
    tall = min(2.6, 0.5 * farthest)
    rises = [0.32 + (tall - 0.32) * abs(a - b) / farthest if tall > 0.32 else 0.32 for a, b in pairs]
    above = max((rise for rise, (a, b) in zip(rises, pairs, strict=True) if b <= a), default=0.0)
    below = max((rise for rise, (a, b) in zip(rises, pairs, strict=True) if b > a), default=0.0)
    band = max(widths) + 0.12 if turned else 0.26
    words = [
        _Label(entry.text, x, above + band / 2, "center", entry.linked, turned)
        for entry, x in zip(entries, middles, strict=True)
    ]
    curves = [_arc(a, b, above if b <= a else above + band, rise) for (a, b), rise in zip(pairs, rises, strict=True)]
    notes = (["above: looks back, or at itself"] if above else []) + (["below: looks ahead"] if below else [])
    return _LinkDrawing(
        (above + band + below, float(ends[-1])), words, curves, [], [*notes, "a dot: what is looked at"]
    )


def _arc(a: float, b: float, base: float, rise: float) -> list[Pair]:
    """From a to b, as high as `rise`: a Bézier curve's middle lies at three quarters of its points' height."""
    if a == b:
        return [(a + 0.06, base), (a + 0.22, base - rise * 4 / 3), (a - 0.22, base - rise * 4 / 3), (a - 0.06, base)]
    y = base - rise * 4 / 3 if b < a else base + rise * 4 / 3
    return [(a, base), (a, y), (b, y), (b, base)]


# -------------------------------------------------------------------------------------------------------------- drawing


def _draw(sheet: Sheet, drawing: _LinkDrawing, weights: Array, scale: Scale, top: float, theme: Theme) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    axes = canvas(sheet, MARGIN, top, drawing.inches)
    order = np.argsort(weights, kind="stable").tolist()  # the heaviest on top
    share = weights / (scale.high or 1.0)
    colours = scale.paint(weights, theme)  # (M, 3)
    step = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    paths = [Path(drawing.curves[n], step) for n in order]
    looks: dict[str, Any] = {"linewidths": [0.6 + 3.2 * share[n] for n in order], "edgecolors": colours[order]}
    axes.add_collection(
        PathCollection(paths, facecolors="none", capstyle="round", clip_on=False, **looks), autolim=False
    )
    ends = np.array([drawing.curves[n][-1] for n in order])
    looks = {"s": [6 + 20 * share[n] for n in order], "c": colours[order], "linewidths": 0, "marker": "o"}
    axes.scatter(*ends.T, clip_on=False, zorder=3, **looks)
    for word in drawing.words:
        letters = sheet.letters(WORD, theme.ink if word.linked else theme.muted)
        text = axes.text(word.x, word.y, word.text, ha=word.ha, va="center", **letters)
        text.set_rotation(90 if word.turned else 0)
    for n, (head, x) in enumerate(drawing.heads):
        sheet.write(MARGIN + x, top + 0.14, head, CAPTION, muted=True).set(ha=("right", "left")[n])
