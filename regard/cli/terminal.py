"""Terminal output: width, colours, matrices, tables of heads, the atlas."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.text import Text

from regard import tables
from regard.cli.options import Lang, Say, speaker
from regard.tables import number, pad, width

if TYPE_CHECKING:
    from regard.lens.display import Linked
    from regard.lens.view import View

Part = str | tuple[str, str]
"""A piece of a line: a text, or a text and its style in rich's words, such as ("Scores", "bold")."""


class _Console(Console):
    """A console that says that its reader left, instead of ending the process with 1, which is an answer here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Terminal:
    """Standard output, and the room there is on a line of it.

    >>> Terminal().print(("1", "bold"), "  Scores")       # bold on a terminal only
    1  Scores
    """

    def __init__(self) -> None:
        self._console = _Console(highlight=False, markup=False, emoji=False)

    @property
    def room(self) -> int | None:
        """Cells on a line; None where nobody sees a margin: in a pipe or a file."""
        return self._console.width if self._console.is_terminal else None

    @property
    def coloured(self) -> bool:
        """Are colours seen? Not in a pipe, nor where NO_COLOR or the terminal's kind says so."""
        return self._console.color_system is not None and not self._console.no_color

    def print(self, *parts: Part) -> None:
        """Print a line; on a terminal, what is longer than the room goes on below, broken between words."""
        line = Text.assemble(*parts)
        if self.room is None:
            line.rstrip()
        self._console.print(line, soft_wrap=self.room is None)

    def write(self, *parts: Part) -> None:
        """Print parts of a line that goes on; a terminal breaks it where it must."""
        self._console.print(Text.assemble(*parts), soft_wrap=True, end="")


def shade(place: float, environment: Mapping[str, str] = os.environ) -> str:
    """The style of a cell in rich's words; "" where there is nothing to show.

    >>> shade(1.0, {}), shade(1.0, {"COLORFGBG": "0;15"}), shade(0.0, {})
    ('#000000 on #cbfaf0', '#ffffff on #182052', '')

    place: from 0 to 1.  environment: may say that the terminal is light; then more is darker, else lighter.
    """
    import numpy as np

    from regard.viz.colors import DARK, LIGHT, Scale, readable_on

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


INDENT = "   "
MOST_SHOWN = 12  # rows and columns
DECIMALS = 4
LARGE = 10_000.0  # from here on, each number in its own form: 1.48e+12
# Paper to ink in equal steps of lightness, as regard.viz.figures draws weights; black or white reads on each.
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


LINKS = 8  # unless asked otherwise
MOST_HEADS = 64  # lines of a table


class Choice(Protocol):
    """What of a view is wanted; None where nothing was said."""

    @property
    def batch(self) -> int | None:
        """Which batch row: by default all in values, the first in tables."""

    @property
    def head(self) -> int | None:
        """Which head; by default all."""

    @property
    def row(self) -> int | None:
        """Which query's exact weights; by default none."""

    @property
    def top(self) -> int | None:
        """How many links; by default 8, where they are there."""


def as_plain(view: View, chosen: Choice, tokens: list[list[str]] | None) -> dict[str, Any]:
    """What is said of a view, in values that JSON holds.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from regard.lens.look import look
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> said = as_plain(look(x, x, x), SimpleNamespace(batch=None, head=1, row=0, top=None), None)
    >>> said["sizes"], [line["head"] for line in said["heads"]], len(said["row"]["weights"])
    ({'batch': 1, 'heads': 2, 'queries': 3, 'keys': 3}, [1], 1)

    view: with axes (B, H, …), on torch.  tokens: labels per batch row.
    Raises IndexError for a batch row, head or query that is not there; LookupError for a row or links that need q and
    k where they were not kept.
    """
    from regard.lens.display import describe_heads

    batch, heads, nq, nk = view.sizes
    for name, index, count in (("--batch", chosen.batch, batch), ("--head", chosen.head, heads)):
        if index is not None and not 0 <= index < count:
            raise IndexError(f"{name} {index} is out of range: there are {count}, counted from 0")
    b = chosen.batch or 0
    lines = [line for n in (range(batch) if chosen.batch is None else [b]) for line in describe_heads(view, n)]
    words = _words(tokens, view.sizes, b)
    return {
        "sizes": {"batch": batch, "heads": heads, "queries": nq, "keys": nk},
        "kind": view.kind,
        "first_position": _first_position(view),
        "engine": view.engine,
        "exact": view.weights is not None,
        "pooled": list(view.pooled),
        "batch": b,
        "tokens": words,
        "heads": [_of_head(asdict(line)) for line in lines if chosen.head in (None, line.head)],
        "links": _links(view, chosen, b),
        "row": None if chosen.row is None else _row(view, chosen.row, b, chosen.head),
    }


def _first_position(view: View) -> int | None:
    """Where query 0 stands among the keys; None in cross-attention, and where that differs by batch row."""
    offset = view.place.offset
    if view.kind == "cross" or not (offset is None or isinstance(offset, int)):
        return None
    return view.sizes[3] - view.sizes[2] if offset is None else offset


def _of_head(line: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in line.items()}


def _words(tokens: list[list[str]] | None, sizes: tuple[int, ...], batch: int) -> list[str] | None:
    """The labels of the keys, where there are as many."""
    if tokens is None or len(tokens) not in (1, sizes[0]):
        return None
    words = tokens[batch if len(tokens) > 1 else 0]
    return words if len(words) == sizes[3] else None


def _links(view: View, chosen: Choice, batch: int) -> list[dict[str, Any]] | None:
    """The strongest links; None where nobody asked for them and they are not there."""
    from regard.lens.display import strongest_links

    count = LINKS if chosen.top is None else chosen.top
    try:
        found: list[Linked] = strongest_links(view, batch=batch, head=chosen.head, count=count)
    except LookupError:
        if chosen.top is not None:
            raise
        return None
    return [link._asdict() for link in found]


def _row(view: View, row: int, batch: int, head: int | None) -> dict[str, Any]:
    weights = view.row(row)[batch].tolist()  # (H, Nk)
    chosen = range(len(weights)) if head is None else [head]
    return {"query": row % view.sizes[2], "heads": list(chosen), "weights": [weights[h] for h in chosen]}


# ------------------------------------------------------------------------------------------------------------ printing


def print_call(said: dict[str, Any], chosen: Choice, lang: Lang) -> None:
    """Print what `as_plain` said, under a title and a mask: a table of heads, the strongest links, a row if asked for.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from regard.lens.look import look
    >>> x, chosen = torch.eye(2).view(1, 1, 2, 2), SimpleNamespace(batch=None, head=None, row=None, top=1)
    >>> print_call({"title": "eye.npy", "mask": "none"} | as_plain(look(x, x, x), chosen, None), chosen, "en")
    eye.npy
    1 heads, 2 queries × 2 keys, mask: none
    <BLANKLINE>
    head  entropy  effective keys (1/Σw²)  most received  share  patterns
    ────  ───────  ──────────────────────  ─────────────  ─────  ───────────────────
       0    0.634                   1.793  0              0.500  uniform, own, first
    <BLANKLINE>
    Strongest links
    head  query  key  weight
    ────  ─────  ───  ──────
       0  0      0    0.6698
    """
    from regard.lens.doctor.report import SAID

    say, out, sizes = speaker(lang), Terminal(), said["sizes"]
    out.print((said["title"], "bold"))
    batch, mask = f"{sizes['batch']} × " if sizes["batch"] > 1 else "", said["mask"]
    out.print(
        say(
            f"{batch}{sizes['heads']} heads, {sizes['queries']:,} queries × {sizes['keys']:,} keys, mask: {mask}",
            f"{batch}헤드 {sizes['heads']}개, 쿼리 {sizes['queries']:,}개 × 키 {sizes['keys']:,}개, "
            f"마스크: {SAID['ko'].get(mask, mask)}",
        )
    )
    b = chosen.batch or 0
    if sizes["batch"] > 1:
        out.print(say(f"shown: batch row {b}", f"배치 {b}행"))
    out.print()
    _print_heads([line for line in said["heads"] if line["batch"] == b], said, lang, out)
    _print_links(said, say, out)
    if said["row"] is not None:
        _print_row(said, LINKS if chosen.top is None else chosen.top, say, out)


def _print_heads(lines: list[dict[str, Any]], said: dict[str, Any], lang: Lang, out: Terminal) -> None:
    from regard.lens.patterns import CALLED

    say = speaker(lang)
    headers = say(
        "head|entropy|effective keys (1/Σw²)|most received|share|patterns",
        "헤드|엔트로피|유효 키(1/Σw²)|가장 많이 받은 키|비율|패턴",
    )
    rows = []
    for line in lines[:MOST_HEADS]:
        numbers = [_number(line[name]) for name in ("entropy", "effective", "share")]
        key = "–" if line["keys"] is None else _keys(line["keys"], said["tokens"])
        labels = ", ".join(CALLED[lang][label] for label in line["labels"])
        if line["rest"] is not None:
            labels += say(" (rest: {})", " (나머지: {})").format(CALLED[lang][line["rest"]])
        rows.append([str(line["head"]), numbers[0], numbers[1], key, numbers[2], labels or "–"])
    out.print(tables.text(headers.split("|"), rows, right=[0, 1, 2, 4]))
    if len(lines) > MOST_HEADS:
        more = f"{MOST_HEADS} / {len(lines)}"
        out.print((say(f"… {more} heads; --json has all", f"… 헤드 {more}, 전체는 --json"), "dim"))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _keys(keys: list[int], words: list[str] | None) -> str:
    first, last = keys
    return f"{first}–{last}" if last > first else _named(first, words)


def _named(place: int, words: list[str] | None) -> str:
    return str(place) if words is None or not 0 <= place < len(words) else f"{place} {words[place]}"


def _print_links(said: dict[str, Any], say: Say, out: Terminal) -> None:
    out.print()
    links = said["links"]
    if links is None:
        why = say(
            "Links need q and k: watch(model, keep='qk')", "연결을 보려면 q와 k가 필요합니다: watch(model, keep='qk')"
        )
        out.print((why, "dim"))
        return
    out.print((say("Strongest links", "가장 강한 연결"), "bold"))
    words, start = said["tokens"], said["first_position"]
    rows = []
    for link in links:
        at = None if start is None or words is None else start + link["query"]
        word = f" {words[at]}" if at is not None and 0 <= at < len(words) else ""
        rows.append(
            [str(link["head"]), f"{link['query']}{word}", _named(link["key"], words), tables.number(link["weight"])]
        )
    headers = say("head|query|key|weight", "헤드|쿼리|키|가중치").split("|")
    out.print(tables.text(headers, rows, right=[0, 3]) if rows else say("none", "없음"))


def _print_row(said: dict[str, Any], count: int, say: Say, out: Terminal) -> None:
    row, words = said["row"], said["tokens"]
    out.print()
    title = say(
        f"Query {row['query']}, exact: its strongest keys", f"쿼리 {row['query']}의 정확한 가중치: 가장 강한 키"
    )
    out.print((title, "bold"))
    rows = []
    for head, weights in zip(row["heads"], row["weights"], strict=True):
        best = sorted(range(len(weights)), key=lambda j: (-weights[j], j))[:count]
        rows.append(
            [str(head), ", ".join(f"{_named(j, words)}: {tables.number(weights[j])}" for j in best if weights[j] > 0)]
        )
    out.print(tables.text(say("head|keys", "헤드|키").split("|"), rows, right=[0]))


LETTERS = {
    "own": "o",
    "previous": "p",
    "next": "n",
    "first": "f",
    "neighbours": "b",
    "uniform": "u",
    "delimiter": "d",
    "same token": "s",
    "induction": "i",
}
MEASURES: dict[Lang, dict[str, str]] = {
    "en": {"effective": "effective keys (1/Σw²)"},
    "ko": {"entropy": "엔트로피", "effective": "유효 키 수(1/Σw²)", "received_max": "가장 많이 받은 키의 비율"},
}
PIPE = 100  # cells on a line where there is no terminal
CELL = 3
NOISE = 1e-5  # differences below it are rounding


def print_atlas(said: dict[str, Any], lang: Lang, out: Terminal) -> None:
    """Print the atlas and what its letters mean.

    >>> layers = [{"index": 0}]
    >>> said = {"measure": "entropy", "layers": layers, "atlas": [[0.5, 2.5]], "patterns": [[["first"], []]]}
    >>> print_atlas(said | {"rest": [["previous", None]]}, "en", Terminal())
    Heads by entropy: 0 is 0.5, 9 is 2.5
    head       0  1
    layer 0   0f 9·
    <BLANKLINE>
    f first ×1   rests on the first token, such as [CLS]; what goes elsewhere: previous ×1
    · no single pattern ×1
    A letter is the pattern that gets half of a head's attention or more; u: 90% of the largest entropy.

    A head whose weights are NaN is marked !!.

    said: "measure", "layers", "atlas" (layers, heads) with None where nothing is known, "patterns" names per head,
        "rest" the pattern beside the first token per head, or None.
    """
    say = speaker(lang)
    low, high = _range(said)
    scale = say(f": 0 is {low:.3g}, 9 is {high:.3g}", f": 0은 {low:.3g}, 9는 {high:.3g}")
    if isnan(low):
        scale = say(": no numbers", ": 값 없음")
    elif low == high:
        scale = say(f": {low:.3g} in every head", f": 모든 헤드에서 {low:.3g}")
    measure = _called(said["measure"], lang)
    out.print((say(f"Heads by {measure}", f"헤드별 {measure}"), "bold"), scale)
    names = [say(f"layer {layer['index']}", f"레이어 {layer['index']}") for layer in said["layers"]]
    label = max(width(name) for name in [*names, say("head", "헤드")]) + 2
    heads = max(map(len, said["atlas"]), default=0)
    block = max(1, ((out.room or PIPE) - label) // CELL)
    for first in range(0, heads, block):
        shown = range(first, min(first + block, heads))
        head = pad(say("head", "헤드"), label) + "".join(f"{h:>{CELL}}" for h in shown)
        out.print((head, "dim"))
        for name, values, patterns in zip(names, said["atlas"], said["patterns"], strict=True):
            parts: list[Part] = [(pad(name, label), "dim")]
            for h in shown:
                parts += _atlas_cell(values[h] if h < len(values) else None, patterns, h, (low, high), out)
            out.print(*parts)
    out.print()
    sound = [
        [names for names, value in zip(patterns, values, strict=False) if value is None or not isnan(value)]
        for patterns, values in zip(said["patterns"], said["atlas"], strict=True)
    ]
    broken = sum(value is not None and isnan(value) for values in said["atlas"] for value in values)
    if broken:
        told = say("!! weights are NaN: see regard doctor", "!! 가중치가 NaN입니다. regard doctor로 확인하세요.")
        out.print((f"{told} ×{broken}", "bold red"))
    _print_patterns(sound, Counter(name for row in said["rest"] for name in row if name), lang, out)


def _called(measure: str, lang: Lang) -> str:
    """As the columns of the tables are called, and the patterns in them."""
    from regard.lens.patterns import CALLED

    return MEASURES[lang].get(measure) or CALLED[lang].get(measure, measure)


def _range(said: dict[str, Any]) -> tuple[float, float]:
    """From 0 to 1 for a pattern, which has that scale; else from the least to the most there is, NaN if nothing is."""
    if said["measure"] in LETTERS or said["measure"] == "received_max":
        return 0.0, 1.0
    known = [v for row in said["atlas"] for v in row if v is not None and isfinite(v)]
    low, high = (min(known), max(known)) if known else (nan, nan)
    return (low, low) if f"{low:.3g}" == f"{high:.3g}" or high - low < NOISE else (low, high)


def _atlas_cell(
    value: float | None, patterns: list[list[str]], head: int, ends: tuple[float, float], out: Terminal
) -> list[Part]:
    if head >= len(patterns):
        return [" " * CELL]
    letter = LETTERS[patterns[head][0]] if patterns[head] else "·"
    if value is not None and isnan(value):
        return [" ", ("!!", "bold red")]
    if value is None or not isfinite(value):
        return [f" –{letter}"]
    low, high = ends
    place = (value - low) / (high - low) if high > low else 0.0
    digit = min(9, int(10 * max(0.0, place)))
    style = shade(max(place, 1e-6)) if out.coloured else ""
    return [" ", (f"{digit}{letter}", style)]


def _print_patterns(patterns: list[list[list[str]]], rests: Counter[str], lang: Lang, out: Terminal) -> None:
    """A line for each pattern that names a head, with how many it names first.

    rests: how often each pattern gets half of what heads do not give to the first token.
    """
    from regard.lens.patterns import CALLED, MEANING

    say = speaker(lang)
    meanings = dict(MEANING[lang])
    if rests:
        named = ", ".join(f"{CALLED[lang][name]} ×{rests[name]}" for name in LETTERS if rests[name])
        meanings["first"] += say(f"; what goes elsewhere: {named}", f". 그 밖으로 가는 곳: {named}")
    count = Counter(names[0] if names else "" for row in patterns for names in row)
    known = [(name, letter) for name, letter in LETTERS.items() if count[name]]
    heading = {name: f"{letter} {CALLED[lang][name]} ×{count[name]}" for name, letter in known}
    wide = max(map(width, heading.values()), default=0)
    for name, _ in known:
        meaning = fit([[(word, "")] for word in meanings[name].split()], max(16, (out.room or PIPE) - wide - 3))
        for n, line in enumerate(meaning):
            out.print((pad("" if n else heading[name], wide) + "   ", "bold"), *line)
    if count[""]:
        out.print((say(f"· no single pattern ×{count['']}", f"· 뚜렷한 패턴 없음 ×{count['']}"), "dim"))
    how = say(
        "A letter is the pattern that gets half of a head's attention or more; u: 90% of the largest entropy.",
        "글자는 헤드 어텐션의 절반 이상을 받는 패턴입니다. u는 최대 엔트로피의 90% 이상입니다.",
    )
    if known:
        out.print((how, "dim"))
