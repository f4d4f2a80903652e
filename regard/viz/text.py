"""Figures over words: one row of weights as colours behind the text, and links as curves between words.

Axis letters: N tokens, M links among Nq queries and Nk keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from math import nan
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from regard.locale import Lang, check_lang, translate
from regard.viz import colors
from regard.viz.colors import Array, Key, Scale, Style, readable_on
from regard.viz.sheet import (
    CAPTION,
    MARGIN,
    Pair,
    Sheet,
    clip,
    drawable,
    measure,
    read_numbers,
    read_style,
    read_tokens,
    read_weights,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORD, NUMBER = 10.0, 6.5  # points
LINE, BOX, PAD, SPACE = 0.32, 0.2, 0.03, 0.035  # inches: a line with the numbers above it, a box of colour, its sides
MOST_TOKENS, MOST_LINES, WIDEST = 2000, 54, 18.5  # of a page: tokens, lines, and a line's inches
REACH = 12  # tokens of a window on each side of its strongest word

MOST_LINKED = 100  # words of a column or a line that links are drawn among
LINKED_WORD = 9.5  # points
BETWEEN = 2.8  # inches between the columns
GAP = "⋮"

LinksKind = Literal["columns", "arcs"]
"""Queries left and keys right, or arcs over one line of words."""


# --------------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class TextPiece:
    """A token to read: its text, whether a space stands before it, and whether a line ends with it."""

    text: str
    space: bool
    ends: bool = False


def readable(tokens: Sequence[str]) -> list[TextPiece]:
    """Tokens as people read them, one piece for each.

    What is not a whole letter stays as its bytes, a line end is ↵, a tab ⇥, and a token of nothing but spaces ␣.
    """
    marks = {name: sum(map(marked, tokens)) for name, (marked, _) in _STYLES.items()}
    style = max(marks, key=lambda name: marks[name]) if any(marks.values()) else "words"
    texts = [_STYLES[style][1](token) if style != "words" else " " + token.removeprefix(" ") for token in tokens]
    spaces = [text.startswith(" ") for text in texts]
    if style == "ends":
        spaces = [False, *(token.endswith("</w>") for token in tokens[:-1])]
    return [
        TextPiece(visible(text.removeprefix(" ")), space and n > 0, text.endswith("\n"))
        for n, (text, space) in enumerate(zip(texts, spaces, strict=True))
    ]


def visible(text: str) -> str:
    """A text with signs for what would not be seen: ↵ for a line's end, ⇥ for a tab, ␣ for nothing but spaces."""
    if not text.strip(" "):
        return "␣" * max(1, len(text))
    return text.replace("\r", "").replace("\n", "↵").replace("\t", "⇥") or "↵"


# The sign by which GPT-2's tokenizer, and all after it, write each byte: itself, or the next from Ā on.
_OWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE = {chr(byte): byte for byte in _OWN}
_BYTE |= {chr(0x100 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _OWN)}


def _of_bytes(token: str) -> str:
    if not all(sign in _BYTE for sign in token):  # a special token with signs of its own
        return token
    return bytes(_BYTE[sign] for sign in token).decode("utf-8", errors="backslashreplace")


def _in_wordpiece(token: str) -> bool:
    return token.startswith("##") and len(token) > 2


_STYLES: dict[str, tuple[Callable[[str], bool], Callable[[str], str]]] = {  # is it marked so; as text with its space
    "bytes": (lambda token: token.startswith(("Ġ", "Ċ")), _of_bytes),
    "sentencepiece": (lambda token: token.startswith("▁"), lambda token: token.replace("▁", " ")),
    "wordpiece": (_in_wordpiece, lambda token: token[2:] if _in_wordpiece(token) else " " + token),
    "ends": (lambda token: token.endswith("</w>"), lambda token: token.removesuffix("</w>")),
    "spaces": (lambda token: token.startswith(" "), lambda token: token),
}


# ------------------------------------------------------------------------------------------------------- heat of a text


def text_heat(
    tokens: Sequence[str],
    weights: Any,
    *,
    query: int | str | None = None,
    strongest: int = 8,
    sink: bool = True,
    title: str | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """One row of attention as text: the more a word is looked at, the deeper the colour behind it.

    >>> figure = text_heat(["나는", "고양이를", "보았다"], [0.2, 0.7, 0.1], query=2, title="보았다")
    >>> [text.get_text() for text in figure.texts if "query" in text.get_text()]
    ['outlined: the query “보았다” (2)']

    A line ends where the text's does (↵), unless there are too many. Up to about 2000 tokens fit; beyond, windows
    around the strongest are shown, and what lies between says what it holds.

    Args:
        tokens: N strings; the marks of tokenizers (##ing, Ġword, ▁word, word</w>) are read as spaces.
        weights: (N,), NumPy or torch or a list; finite, at least 0. A weight of 0 is bare paper.
        query: a token's index, which is outlined; or its word, if it is not among these tokens.
        strongest: how many words have their weight printed above them.
        sink: False leaves token 0 out of the colours, hatched: it often takes nearly all, and leaves the others pale.
        title: above the figure.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".

    Raises:
        TypeError: for arguments of a wrong kind.
        ValueError: for wrong sizes or values, and for NaN weights.
    """
    style = read_style(title, dark, lang)
    row = _read(tokens, weights, query, sink, lang)
    if strongest < 0:
        raise ValueError(f"strongest must be at least 0, got {strongest}: so many words have their weight printed")
    # From bare paper on, unlike a map: text in which every word is coloured is not read as text.
    scale = Scale(style.say("weight"), (style.theme.paper, *style.theme.weight), 0.0, row.high, hidden=0.0)
    layout = _fitted(row, strongest)
    sheet = Sheet((layout.height, layout.left + layout.width), [scale.key(), *_notes(row, layout)], style)
    _draw_text(sheet, layout, row, scale)
    return sheet.finish()


def text_heat_html(
    tokens: Sequence[str],
    weights: Any,
    query: int | str | None = None,
    *,
    sink: bool = True,
    title: str | None = None,
    lang: Lang = "en",
) -> str:
    """The same as HTML for a notebook: whole in itself, light or dark as the page is; a word says its weight on hover.

    >>> text_heat_html(["a", "<b>"], [0.25, 0.75]).count("&lt;b&gt;")
    1

    The arguments and errors are those of `text_heat`; it needs no matplotlib.
    """
    row = _read(tokens, weights, query, sink, lang)
    runs, _ = next(_choices(row))
    parts, before = [], 0
    for run in [*runs, range(len(row.weights), len(row.weights))]:
        gap = row.gap(range(before, run.start))
        parts += [f'<div style="font-size:11px;color:{colors.MUTED}">{escape(gap)}</div>'] if gap else []
        parts += [_span(row, n) for n in run]
        before = run.stop
    body = f'<div style="line-height:2.1;max-width:72em;overflow-wrap:anywhere">{"".join(parts)}</div>'
    foot = [colors.ramp("weight", translate("weight", lang), "0", f"{row.high:.3g}")]
    foot += [escape(str(part)) for key in _notes(row, None) for part in key]
    says = translate("attention weights of {count} tokens", lang, count=len(row.weights))
    return colors.frame(body, foot, title, says)


@dataclass(frozen=True, eq=False)
class _TextRow:
    pieces: list[TextPiece]
    weights: Array  # (N,)
    query: int | None
    word: str  # of the query
    sink: bool
    lang: Lang

    @property
    def high(self) -> float:
        return float((self.weights if self.sink else self.weights[1:]).max())

    def ranked(self) -> list[int]:
        """The tokens that are coloured, the strongest first."""
        order = np.argsort(-self.weights, kind="stable").tolist()
        return [n for n in order if self.weights[n] > 0 and (n > 0 or self.sink)]

    def gap(self, hidden: range) -> str:
        """The note on tokens that are left out; empty if there are none."""
        if not hidden:
            return ""
        held = self.weights[hidden.start : hidden.stop].sum()
        if len(hidden) == 1:
            return translate("… 1 token, {held:.2g} …", self.lang, held=held)
        return translate("… {count:,} tokens, together {held:.2g} …", self.lang, count=len(hidden), held=held)


def _read(tokens: Any, weights: Any, query: Any, sink: bool, lang: Lang) -> _TextRow:
    check_lang(lang)
    weights = read_weights("weights", weights, "(keys,)")
    pieces = readable(read_tokens("tokens", tokens, len(weights), "weights"))
    if not sink and len(weights) == 1:
        raise ValueError("sink=False leaves token 0 out of the colours, but there is no other; leave it at True")
    if query is None or isinstance(query, str):
        word = "" if query is None else readable([query])[0].text
        return _TextRow(pieces, weights, None, word, sink, lang)
    if isinstance(query, bool) or not isinstance(query, int | np.integer):
        raise TypeError(f"query must be an integer, got {type(query).__name__}: {query!r}")
    if not 0 <= query < len(weights):
        raise ValueError(f"query must be in 0…{len(weights) - 1}, as there are {len(weights)} tokens; got {query}")
    query = int(query)
    return _TextRow(pieces, weights, query, pieces[query].text, sink, lang)


def _choices(row: _TextRow) -> Iterator[tuple[list[range], bool]]:
    """What may be shown, and whether lines end where the text's do, in the order of preference.

    Everything, or ever fewer windows around the strongest words and the query.
    """
    count = len(row.weights)
    if count <= MOST_TOKENS:
        yield [range(count)], True
        yield [range(count)], False
    for windows in (48, 24, 12, 6, 3, 1):
        centres = {*row.ranked()[:windows], *([] if row.query is None else [row.query])} or {0}
        runs: list[range] = []
        for centre in sorted(centres):
            start, stop = max(0, centre - REACH), min(count, centre + REACH + 1)
            if runs and start <= runs[-1].stop + 3:
                runs[-1] = range(runs[-1].start, stop)
            else:
                runs.append(range(start, stop))
        yield runs, False


def _notes(row: _TextRow, layout: _TextLayout | None) -> list[Key]:
    keys: list[Key] = []
    word = clip(row.word if layout is None else drawable(row.word), 24)
    if row.query is not None:
        text = "outlined: the query “{word}” ({index})"
        keys.append((translate(text, row.lang, word=word, index=row.query),))
    elif word:
        keys.append((translate("the query: “{word}”", row.lang, word=word),))
    if not row.sink:
        text = "left out of the colours, hatched: token 0, of weight {weight:.2g}"
        keys.append((translate(text, row.lang, weight=float(row.weights[0])),))
    if layout is not None and len(layout.words) < len(row.weights):
        text = "{shown:,} of {count:,} tokens, around the strongest"
        keys.append((translate(text, row.lang, shown=len(layout.words), count=len(row.weights)),))
    return keys


@dataclass(frozen=True)
class _PlacedToken:
    """A token in its place: inches from the left, which line, how wide its box, and the number above it."""

    index: int
    text: str
    number: str
    x: float
    line: int
    width: float


@dataclass(frozen=True)
class _TextLayout:
    """Words wrapped into lines; what is left out stands on lines of its own."""

    words: list[_PlacedToken]
    gaps: list[tuple[int, str]]  # line, text
    lines: int

    @property
    def height(self) -> float:
        return LINE * self.lines

    @property
    def width(self) -> float:
        words = max(word.x + word.width for word in self.words)
        return max([words, *(measure(text, CAPTION) for _, text in self.gaps)])

    @property
    def left(self) -> float:
        """Room for the positions before the lines, where there are several lines."""
        return measure(str(self.words[-1].index), NUMBER) + 0.14 if self.lines > 1 else 0.0


@lru_cache(4096)
def _width(text: str, size: float) -> float:
    return measure(text, size) if text else 0.0


def _fitted(row: _TextRow, strongest: int) -> _TextLayout:
    numbers = {n: f"{row.weights[n]:.2g}" for n in row.ranked()[:strongest]}
    for runs, breaks in _choices(row):
        # Of a short text seven inches, of a long one such that the page is wider than high.
        pieces = [row.pieces[n] for run in runs for n in run]
        inches = sum(_width(clip(drawable(p.text), 24), WORD) + 2 * PAD + SPACE * p.space for p in pieces)
        room = float(np.clip((1.6 * inches * LINE) ** 0.5, 7.0, WIDEST))
        words, gaps = list[_PlacedToken](), list[tuple[int, str]]()
        line, x, before = 0, 0.0, 0
        for run in [*runs, range(len(row.weights), len(row.weights))]:
            if gap := row.gap(range(before, run.start)):
                line += x > 0
                gaps.append((line, gap))
                line, x = line + 1, 0.0
            for n in run:
                piece, number = row.pieces[n], numbers.get(n, "")
                text = clip(drawable(piece.text), 24)
                width = max(_width(text, WORD), _width(number, NUMBER)) + 2 * PAD
                space = SPACE if piece.space and x else 0.0
                if x > 0 and x + space + width > room:
                    line, x, space = line + 1, 0.0, 0.0
                words.append(_PlacedToken(n, text, number, x + space, line, width))
                x += space + width
                if breaks and piece.ends:
                    line, x = line + 1, 0.0
            before = run.stop
        lines = line + (x > 0)
        if lines <= MOST_LINES:
            return _TextLayout(words, gaps, lines)
    raise AssertionError("one window of short words fits any page")


def _draw_text(sheet: Sheet, layout: _TextLayout, row: _TextRow, scale: Scale) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    x, y = MARGIN + layout.left, sheet.top
    down = LINE - BOX  # from a line's top to its boxes; the numbers stand above
    for word in layout.words:
        if word.index == 0 and not row.sink:
            sheet.hatch(x + word.x, y + word.line * LINE + down, (BOX, word.width))
    axes = sheet.canvas(x, y, (layout.height, layout.width))
    colours = scale.paint(row.weights, sheet.theme)  # (N, 3)
    boxes = [(word.x + 0.006, word.line * LINE + down, word.width - 0.012, BOX) for word in layout.words]
    shown = [
        (box, colours[word.index]) for box, word in zip(boxes, layout.words, strict=True) if word.index or row.sink
    ]
    corners = [[(a, b), (a + w, b), (a + w, b + h), (a, b + h)] for (a, b, w, h), _ in shown]
    axes.add_collection(PolyCollection(corners, facecolors=[colour for _, colour in shown], lw=0), autolim=False)
    for (a, b, w, h), word in zip(boxes, layout.words, strict=True):
        bare = row.weights[word.index] == 0 or (word.index == 0 and not row.sink)
        letters = sheet.letters(WORD, sheet.theme.ink if bare else readable_on(colours[word.index]))
        axes.text(a + w / 2, b + h - 0.055, word.text, ha="center", va="baseline", **letters)
        if word.number:
            axes.text(a + w / 2, b - 0.035, word.number, ha="center", **sheet.letters(NUMBER, sheet.theme.muted))
        if word.index == row.query:
            axes.add_patch(Rectangle((a, b), w, h, fill=False, ec=sheet.theme.ink, lw=1.6, clip_on=False))
    # In the margin the position of each line's first word; what is left out on lines of its own.
    first, baseline = {word.line: word.index for word in reversed(layout.words)}, y + LINE - 0.055
    for line, index in first.items() if layout.lines > 1 else ():
        sheet.write(x - 0.08, baseline + line * LINE, str(index), NUMBER, muted=True).set(ha="right")
    for line, text in layout.gaps:
        sheet.write(x, baseline + line * LINE, text, CAPTION, muted=True)


def _span(row: _TextRow, n: int) -> str:
    piece, weight = row.pieces[n], float(row.weights[n])
    style = "border-radius:2px;padding:1px 2px"
    if n == 0 and not row.sink:
        style += f";background:repeating-linear-gradient(135deg,transparent 0 3px,{colors.MUTED} 3px 4px)"
    elif tenth := round(9 * weight / (row.high or 1.0)):  # 0 is bare paper, 9 the last of the nine colours
        style += ";" + colors.shade("weight", tenth - 1)
    if n == row.query:
        style += f";outline:2px solid {colors.INK}"
    tooltip = translate("token {n}: {weight:.3g}", row.lang, n=n, weight=weight)
    text = f'<span title="{tooltip}" style="{style}">{escape(piece.text)}</span>'
    return f"{' ' * piece.space}{text}{'<br>' * piece.ends}"


# ---------------------------------------------------------------------------------------------------------------- links


def links(
    tokens: Sequence[str],
    links: Any,
    *,
    key_tokens: Sequence[str] | None = None,
    kind: LinksKind = "columns",
    title: str | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """Links between words: from each query, which looks, to the key that it looks at.

    >>> figure = links(["나는", "고양이를", "보았다"], [(2, 1, 0.7), (0, 1, 0.4)], kind="arcs")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['나는', '고양이를', '보았다']

    Every given link is drawn, one of weight 0 in the colour of the paper. Of more than 100 words only those with links
    are written, with their positions, and ⋮ for what lies between.

    Args:
        tokens: Nq strings, the queries'; the keys' too unless key_tokens are given.
        links: M triples (query, key, weight): two indices, and a finite number from 0 up; a list, or an array (M, 3).
        key_tokens: Nk strings, if the keys are other words; for columns only.
        kind: "columns", queries left and keys right; or "arcs" over one line, above it those that look back or at
            themselves, below it those that look ahead.
        title: above the figure.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".

    Raises:
        TypeError: for arguments of a wrong kind.
        ValueError: for wrong sizes or values, no links, or links among more than 100 words.
    """
    style = read_style(title, dark, lang)
    if kind not in get_args(LinksKind):
        raise ValueError(f"kind must be one of {', '.join(map(repr, get_args(LinksKind)))}; got {kind!r}")
    if kind == "arcs" and key_tokens is not None:
        raise ValueError('kind="arcs" is drawn over one line of words, but key_tokens are others; use kind="columns"')
    queries = read_tokens("tokens", tokens)
    keys = queries if key_tokens is None else read_tokens("key_tokens", key_tokens)
    table = read_numbers("links", links, "(links, 3)")
    if table.shape[1] != 3:
        raise ValueError(f"links must be (query, key, weight), three numbers each; got {table.shape[1]}")
    sources = _indices("query", table[:, 0], len(queries))
    targets = _indices("key", table[:, 1], len(keys))
    weights = read_weights("weights of links", table[:, 2], "(links,)")
    in_columns = kind == "columns"
    drawing = (
        _columns(queries, keys, sources, targets, style) if in_columns else _arcs(queries, sources, targets, style)
    )
    theme = style.theme
    scale = Scale(style.say("weight"), (theme.paper, *theme.weight[2:]), 0.0, float(weights.max()), hidden=nan)
    count = style.say("1 link") if len(weights) == 1 else style.say("{n:,} links", n=len(weights))
    sheet = Sheet(drawing.inches, [scale.key(), (count,), *((note,) for note in drawing.notes)], style)
    _draw_links(sheet, drawing, weights, scale)
    return sheet.finish()


def _indices(name: str, values: Array, count: int) -> Array:
    bad = [value for value in values.tolist() if value not in range(count)]
    if bad:
        hint = "; −1 marks what View.top did not find: leave those links out" if -1 in bad else ""
        raise ValueError(f"{name} of a link must be an index in 0…{count - 1}, got {bad[0]:g}{hint}")
    return values.astype(int)


class _Entry(NamedTuple):
    """A word of a column or a line; without position, what is left out."""

    position: int | None
    text: str
    linked: bool


def _entries(tokens: tuple[str, ...], linked: Array) -> list[_Entry]:
    """All words, or of too many only those with links."""
    pieces, touched = readable(tokens), {int(index) for index in linked}
    texts = [clip(drawable(piece.text), 24) for piece in pieces]
    if len(tokens) <= MOST_LINKED:
        return [_Entry(n, text, n in touched) for n, text in enumerate(texts)]
    entries: list[_Entry] = []
    expected = 0
    for n in [*sorted(touched), len(tokens)]:
        if n > expected:
            entries.append(_Entry(None, GAP, False))
        if n < len(tokens):
            entries.append(_Entry(n, f"{texts[n]} {n}", True))
        expected = n + 1
    if len(entries) > MOST_LINKED:
        raise ValueError(
            f"links are drawn among at most {MOST_LINKED} words, but these {len(linked)} touch {len(touched)} of "
            f"{len(tokens)}; give fewer, such as those of one query or the heaviest"
        )
    return entries


@dataclass(frozen=True)
class _LinkDrawing:
    """A drawing: its words and its curves, in inches from its upper left corner.

    words: each with x, y and its alignment.  curves: from source to target, the four points of a Bézier curve.
    heads: captions over the columns, each with where it ends or begins.  turned: whether words are written upwards.
    """

    inches: Pair
    words: list[tuple[_Entry, float, float, str]]
    curves: list[list[Pair]]
    heads: list[tuple[str, float]]
    notes: list[str]
    turned: bool = False


def _columns(
    queries: tuple[str, ...], keys: tuple[str, ...], sources: Array, targets: Array, style: Style
) -> _LinkDrawing:
    sides = [_entries(queries, sources), _entries(keys, targets)]
    most = max(map(len, sides))
    pitch, top = min(0.26, 17.0 / most), 0.3
    widths = [max(measure(entry.text, LINKED_WORD) for entry in side) + 0.14 for side in sides]
    left, right = max(widths[0], 0.75), max(widths[0], 0.75) + BETWEEN
    words, places = [], []
    for side, x, ha in zip(sides, (left - 0.1, right + 0.1), ("right", "left"), strict=True):
        start = top + (most - len(side)) * pitch / 2 if len(side) < most else top
        heights = [start + (n + 0.5) * pitch for n in range(len(side))]
        words += [(entry, x, y, ha) for entry, y in zip(side, heights, strict=True)]
        places.append({entry.position: y for entry, y in zip(side, heights, strict=True)})
    curves = []
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        a, b = places[0][source], places[1][target]
        curves.append([(left, a), (left + 0.45 * BETWEEN, a), (right - 0.45 * BETWEEN, b), (right, b)])
    heads = [(style.say("looks from"), left - 0.1), (style.say("looks at"), right + 0.1)]
    return _LinkDrawing((top + most * pitch, right + max(widths[1], 0.75)), words, curves, heads, [])


def _arcs(tokens: tuple[str, ...], sources: Array, targets: Array, style: Style) -> _LinkDrawing:
    entries = _entries(tokens, np.concatenate([sources, targets]))
    widths = [measure(entry.text, LINKED_WORD) for entry in entries]
    turned = sum(widths) + 0.16 * len(widths) > 15.0
    steps = [0.18] * len(widths) if turned else [width + 0.16 for width in widths]
    ends = np.cumsum(steps)
    middles = (ends - np.array(steps) / 2).tolist()
    at = {entry.position: x for entry, x in zip(entries, middles, strict=True)}
    pairs = [(at[s], at[t]) for s, t in zip(sources.tolist(), targets.tolist(), strict=True)]
    farthest = max(abs(a - b) for a, b in pairs)
    tall = min(2.6, 0.5 * farthest)
    rises = [0.32 + (tall - 0.32) * abs(a - b) / farthest if tall > 0.32 else 0.32 for a, b in pairs]
    above = max((rise for rise, (a, b) in zip(rises, pairs, strict=True) if b <= a), default=0.0)
    below = max((rise for rise, (a, b) in zip(rises, pairs, strict=True) if b > a), default=0.0)
    band = max(widths) + 0.12 if turned else 0.26
    words = [(entry, x, above + band / 2, "center") for entry, x in zip(entries, middles, strict=True)]
    curves = []
    for (a, b), rise in zip(pairs, rises, strict=True):
        base = above if b <= a else above + band
        height = rise * 4 / 3  # a Bézier curve rises to three quarters of its points
        if a == b:
            curves.append([(a + 0.06, base), (a + 0.22, base - height), (a - 0.22, base - height), (a - 0.06, base)])
        else:
            y = base - height if b < a else base + height
            curves.append([(a, base), (a, y), (b, y), (b, base)])
    notes = [style.say("above: looks back, or at itself")] if above else []
    notes += [style.say("below: looks ahead")] if below else []
    notes.append(style.say("a dot: what is looked at"))
    return _LinkDrawing((above + band + below, float(ends[-1])), words, curves, [], notes, turned)


def _draw_links(sheet: Sheet, drawing: _LinkDrawing, weights: Array, scale: Scale) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    theme, axes = sheet.theme, sheet.canvas(MARGIN, sheet.top, drawing.inches)
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
    for entry, x, y, ha in drawing.words:
        letters = sheet.letters(LINKED_WORD, theme.ink if entry.linked else theme.muted)
        text = axes.text(x, y, entry.text, ha=ha, va="center", **letters)
        text.set_rotation(90 if drawing.turned else 0)
    for n, (head, x) in enumerate(drawing.heads):
        sheet.write(MARGIN + x, sheet.top + 0.14, head, CAPTION, muted=True).set(ha=("right", "left")[n])
