"""One call of attention in tables: a line per head, the strongest links, one query's row; and the same as plain values.

It does not know where the call comes from. `regard.lens.describing` says what is said of a head.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from regard import tables
from regard.cli.language import Lang, Say, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.lens.describing import Linked
    from regard.lens.view import View

__all__ = ["LINKS", "as_plain", "print_call"]

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
    >>> from regard.lens.looking import look
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> said = as_plain(look(x, x, x), SimpleNamespace(batch=None, head=1, row=0, top=None), None)
    >>> said["sizes"], [line["head"] for line in said["heads"]], len(said["row"]["weights"])
    ({'batch': 1, 'heads': 2, 'queries': 3, 'keys': 3}, [1], 1)

    view: with axes (B, H, …), on torch.  tokens: labels per batch row.
    Raises IndexError for a batch row, head or query that is not there; LookupError for a row or links that need q and
    k where they were not kept.
    """
    from regard.lens.describing import describe_heads

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
    from regard.lens.describing import strongest_links

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
    >>> from regard.lens.looking import look
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
    from regard.lens.diagnosing.diagnosis import SAID

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
    from regard.lens.diagnosing.patterns import CALLED

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
