"""Attention patterns: one score per head and pattern, the mean weight on the keys that the pattern names.

A pattern names one key for each query, or a few: its own position, the position before, the first key. Its score is
the mean weight there, O(N·D) from `Weights.pairs`; "uniform" and "delimiter" come from sums that a view has already
("delimiter" in a batch with padding: from the columns of the delimiters).

A head is labelled by shares, not by scores: the part of all its attention that goes to the keys of a pattern. A score
is a mean over the queries that the pattern names a key for, and those may be few (a token that stands twice in a text).
Many heads rest on the first token, so there is also the share that goes to a pattern's keys beside it.

Key j stands at position j, query i at i + offset, with offset Nk − Nq by default, as in `regard.masks`. A query counts
if the key of its pattern exists and neither of the two is padding; with no such query the score is 0. A hidden key
counts with weight 0. Sinks, which take a part of each row, lower the scores.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from regard import tables
from regard.lens.measures.weights import StoredWeights, Weights
from regard.lens.validity import check
from regard.lens.visibility import MaskSummary
from regard.locale import Lang, check_lang, translate
from regard.masks import as_mask
from regard.masks.mask import TileGrid, read_offset
from regard.masks.patterns import at_positions

NAMES = ("own", "previous", "next", "first", "neighbours", "uniform", "delimiter", "same token", "induction")

THRESHOLDS: Mapping[str, float] = MappingProxyType(dict.fromkeys(NAMES, 0.5) | {"uniform": 0.9})
"""The least share for a label. "uniform" is a share of entropy, which half of all heads reach at 0.5."""

AT_ONCE = 1 << 24  # weights held at once
REST = 0.05  # the least share beside the first token for a label of the rest

_KEYS = {
    "own": "its own position",
    "previous": "the position before",
    "next": "the position after",
    "first": "the first token",
    "neighbours": "the two positions on either side",
    "delimiter": "delimiters such as [SEP] or full stops",
    "same token": "the nearest other places where the same token stands",
    "induction": "what followed the same token the last time it came",
}
_MEANING = {
    "own": "looks at its own position",
    "previous": "looks at the position before",
    "next": "looks at the position after",
    "first": "rests on the first token, such as [CLS]",
    "neighbours": "looks at the two positions before and the two after, its own left out",
    "uniform": "looks at everything it sees about equally: its entropy as a share of the largest possible",
    "delimiter": "looks at delimiters, such as [SEP] or full stops; the first token is none",
    "same token": "looks at the nearest other places where the same token stands",
    "induction": "looks at what followed the same token the last time it came",
}

KEYS, MEANING, CALLED = (
    {lang: {name: translate(text, lang) for name, text in texts.items()} for lang in get_args(Lang)}
    for texts in (_KEYS, _MEANING, {name: name for name in NAMES})
)
"""By language and pattern: the keys that it names ("uniform" names none), what it means, and its name in a table."""


@dataclass(frozen=True)
class KnownVisibility:
    """What the mask of a call leaves visible: the parts of a `MaskSummary` that a view reads, as kept in a file."""

    visible: Tensor | None = None  # (B or 1, H or 1, Nq) number of keys each query sees
    padding: Tensor | None = None  # (B or 1, Nk) True for padding
    offset: Tensor | int | None = None  # position of query 0, where it is not Nk − Nq


@dataclass(frozen=True)
class KeyTokens:
    """The tokens that a call's keys stand for."""

    ids: Tensor | None = None  # (B or 1, Nk) token numbers
    delimiters: Tensor | None = None  # (B or 1, Nk) True for full stops, [SEP] and the like


class Patterns(NamedTuple):
    """How far each head follows the patterns: name → (B, H) in [0, 1].

    Attributes:
        scores: mean weight on the keys that a pattern names, over the queries that it names one for.
        shares: part of all attention of real queries that goes to those keys; "uniform" as in scores.
        beside: shares without what goes to the first token; has no "first" and "uniform".
    """

    scores: dict[str, Tensor]
    shares: dict[str, Tensor]
    beside: dict[str, Tensor]


def measure(
    weights: Weights,
    place: KnownVisibility | MaskSummary,
    tokens: KeyTokens,
    *,
    kind: str = "self",
    entropy: Tensor | None = None,
    visible: Tensor | None = None,
    received: Tensor | None = None,
) -> Patterns:
    """Score every pattern that the arguments allow.

    Args:
        weights: exact weights; only pairs are computed, and columns for "delimiter" where queries are padding.
        place: padding and the position of query 0. A query is padding if its own position is.
        tokens: ids for "same token" and "induction"; delimiters for "delimiter", but never the first token.
        kind: "self", or "cross", where only first, uniform and delimiter have a meaning.
        entropy: (B, H, Nq) in nats, for "uniform".
        visible: (B or 1, H or 1, Nq) number of keys in that entropy, a sink among them; queries with one key or none do
            not count.
        received: (B, H, Nk) column sums of the weights, for "delimiter".
    """
    layout = Positions(weights, place, kind)
    looks: dict[str, tuple[KeyWeights, ...]] = {"first": (layout.look(layout.first()),)}
    if kind == "self":
        back2, back, own, ahead, ahead2 = (layout.look(layout.position + step) for step in (-2, -1, 0, 1, 2))
        near = (back2, back, ahead, ahead2)
        looks |= {"own": (own,), "previous": (back,), "next": (ahead,), "neighbours": near}
        if tokens.ids is not None:
            looks |= _by_token(layout, tokens.ids)
    scores, shares, beside = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    for name, several in looks.items():
        total = sum((look.weight for look in several[1:]), several[0].weight)  # (B, H, Nq)
        scores[name] = _mean_over(total, reduce(torch.logical_or, (look.counts for look in several)))
        shares[name] = layout.share(*several)
        if name != "first":
            beside[name] = layout.share(*several, first=False)
    if entropy is not None and visible is not None:  # the mean of H_i / ln(number of keys)
        visible = visible.to(entropy.device)
        evenness = entropy / visible.clamp(min=2).to(entropy.dtype).log()
        counted = layout.real.to(entropy.device) & (visible >= 2)
        scores["uniform"] = shares["uniform"] = _mean_over(evenness.clamp(max=1), counted)
    if received is not None and tokens.delimiters is not None:  # their part of all attention, without the first token's
        chosen = tokens.delimiters.to(received.device) & ~layout.padding.to(received.device)  # (B or 1, Nk)
        if layout.nq and layout.nk:
            first = layout.first()[:, 0, :1].to(received.device)  # (B or 1, 1)
            chosen = chosen & (torch.arange(layout.nk, device=received.device) != first)
        if bool(layout.real.all()):
            part = torch.where(chosen.unsqueeze(1), received, 0).sum(-1) / max(1, layout.nq)  # (B, H)
        else:  # column sums count the queries of padding too
            part = _mean_over(layout.on_keys(chosen), layout.real)
        scores["delimiter"] = shares["delimiter"] = beside["delimiter"] = part
    return Patterns(*({name: t[name].clamp(0, 1) for name in NAMES if name in t} for t in (scores, shares, beside)))


def label(shares: Mapping[str, Tensor]) -> list[list[list[str]]]:
    """The labels of each head, [batch row][head], strongest first: the patterns that reach their threshold.

    "neighbours" is no label of a head that is "previous" or "next", which it contains.

    >>> label({"own": torch.tensor([[0.2, 0.6]]), "first": torch.tensor([[0.3, 0.9]])})
    [[[], ['first', 'own']]]
    """
    table = {name: values.tolist() for name, values in shares.items()}
    batch, heads = next(iter(shares.values())).shape

    def labels(b: int, h: int) -> list[str]:
        names = [name for name in table if table[name][b][h] >= THRESHOLDS[name]]  # NaN reaches nothing
        if "previous" in names or "next" in names:
            names = [name for name in names if name != "neighbours"]
        return sorted(names, key=lambda name: -table[name][b][h])

    return [[labels(b, h) for h in range(heads)] for b in range(batch)]


def label_rest(shares: Mapping[str, Tensor], beside: Mapping[str, Tensor]) -> list[list[str | None]]:
    """For heads that rest on the first token, the pattern that gets half of the rest, [batch row][head], or None."""
    resting = [[names[:1] == ["first"] for names in row] for row in label(shares)]
    if not any(map(any, resting)):
        return [[None] * len(row) for row in resting]
    rest = 1 - shares["first"]  # (B, H)
    parts = {name: torch.where(rest >= REST, part / rest.clamp(min=REST), 0.0) for name, part in beside.items()}
    labels = label(parts) if parts else [[[]] * len(row) for row in resting]
    return [
        [names[0] if names and rests else None for names, rests in zip(*rows, strict=True)]
        for rows in zip(labels, resting, strict=True)
    ]


class KeyWeights(NamedTuple):
    """Weight of one key per query, (B, H, Nq); which queries count; and whether the key is the first token."""

    weight: Tensor
    counts: Tensor
    at_first: Tensor


class Positions:
    """Where the queries of one call stand among its keys, and which of either are padding."""

    def __init__(self, weights: Weights, place: KnownVisibility | MaskSummary, kind: str) -> None:
        self.weights = weights
        _, _, self.nq, self.nk = weights.sizes
        padding = place.padding
        device = torch.device("cpu") if padding is None else padding.device
        positions = TileGrid(self.nq, self.nk, (1, 1), device).positions(
            read_offset(place.offset) if kind == "self" else None
        )
        self.position = positions if positions.ndim == 3 else positions.view(1, 1, -1)  # (B or 1, H or 1, Nq)
        self.padding = torch.zeros(1, self.nk, dtype=torch.bool, device=device) if padding is None else padding
        self.real = torch.ones_like(self.position, dtype=torch.bool)  # (B or 1, H or 1, Nq): the query is no padding
        if kind == "self" and self.nk:
            self.real = ~at_positions(self.padding, self.position, outside=False)

    def first(self) -> Tensor:
        """The first key that is not padding, for every query: (B or 1, 1, Nq); −1 where there is none."""
        if self.nk == 0:
            return self.position.new_full((1, 1, self.nq), -1)
        where = torch.where(self.padding.all(1), -1, (~self.padding).long().argmax(1))
        return where.view(-1, 1, 1).expand(-1, -1, self.nq)

    def look(self, keys: Tensor) -> KeyWeights:
        """The weight of one key per query, −1 for none; a query counts if it and its key are there and no padding."""
        if self.nk == 0:
            there = torch.zeros_like(keys, dtype=torch.bool)
        else:
            there = self.real & ~at_positions(self.padding, keys, outside=True)
        return KeyWeights(self.weights.pairs(torch.where(there, keys, -1)), there, there & (keys == self.first()))

    def on_keys(self, chosen: Tensor) -> Tensor:
        """The weight of each query on chosen keys together, (B, H, Nq); chosen (B or 1, Nk). Some keys at a time."""
        batch, heads, nq, _ = self.weights.sizes
        columns = chosen.any(0).nonzero().view(-1)
        total = torch.zeros(batch, heads, nq, device=chosen.device)
        for part in torch.split(columns, max(1, AT_ONCE // (batch * heads * nq))) if len(columns) else ():
            tile = self.weights.tile(slice(None), part)
            total = total.to(tile.dtype) + torch.where(chosen[:, None, None, part], tile, 0).sum(-1)
        return total

    def share(self, *looks: KeyWeights, first: bool = True) -> Tensor:
        """Their part of all attention of real queries, (B, H); first: the first token counts."""
        device = looks[0].weight.device
        parts = [x.weight if first else x.weight.masked_fill(x.at_first.to(device), 0) for x in looks]
        return _mean_over(sum(parts[1:], parts[0]), self.real)


def _by_token(layout: Positions, ids: Tensor) -> dict[str, tuple[KeyWeights, ...]]:
    if layout.nk == 0:
        nothing = (layout.look(layout.first()),)
        return {"same token": nothing, "induction": nothing}
    padding = layout.padding
    _, number = torch.unique(ids.to(padding.device), return_inverse=True)
    alone = number.numel() + torch.arange(layout.nk, device=padding.device)
    group = torch.where(padding, alone, number)  # equal where the tokens are; padding equals nothing
    before, mirrored = _earlier(group), _earlier(group.flip(1)).flip(1)
    after = torch.where(mirrored < 0, -1, layout.nk - 1 - mirrored)
    followed = torch.where(before < 0, -1, before + 1)
    tables = (before, after, followed)
    back, ahead, next_to = (layout.look(at_positions(t, layout.position, outside=-1)) for t in tables)
    return {"same token": (back, ahead), "induction": (next_to,)}


def _earlier(group: Tensor) -> Tensor:
    """The latest earlier position with the same number, or −1: (B, N) → (B, N), by one sort."""
    value, at = group.sort(dim=1, stable=True)
    linked = torch.where(value[:, 1:] == value[:, :-1], at[:, :-1], -1)
    return torch.full_like(at, -1).scatter(1, at[:, 1:], linked)


def _mean_over(values: Tensor, counted: Tensor) -> Tensor:
    """(B, H, Nq) → the mean over the queries that count, 0 where none does."""
    counted = counted.to(values.device).expand_as(values)
    return torch.where(counted, values, 0).sum(-1) / counted.sum(-1).clamp(min=1)


# ----------------------------------------------------------------------------------------------- weights from elsewhere

Kind = Literal["self", "cross"]


@dataclass(frozen=True, repr=False)
class PatternShares:
    """The result of `patterns`. Prints as a table in the terminal and in a notebook; `text(lang="ko")` in Korean.

    Attributes:
        shares: pattern → its share in [0, 1]: a float for one matrix, an array (H,) of the weights' kind for several.
        labels: of each head, the patterns that reach their threshold (0.5; 0.9 for "uniform"), strongest first.
    """

    shares: dict[str, Any]
    labels: tuple[tuple[str, ...], ...]

    def __getitem__(self, name: str) -> Any:
        return self.shares[name]

    def __repr__(self) -> str:
        return self.text()

    def text(self, lang: Lang = "en") -> str:
        """The table as text, in English ("en") or Korean ("ko"). Raises ValueError for another language."""
        return tables.text(*self._table(lang))

    def _repr_html_(self) -> str:
        return tables.html(*self._table("en"))

    def _table(self, lang: Lang) -> tuple[list[str], list[list[str]], list[int]]:
        """A row per pattern with its meaning for one matrix; a row per head for several."""
        check_lang(lang)
        called, meaning = CALLED[lang], MEANING[lang]
        first = next(iter(self.shares.values()))
        if isinstance(first, float):
            headers = translate("pattern|share|meaning", lang).split("|")
            return headers, [[called[n], f"{share:.3f}", meaning[n]] for n, share in self.shares.items()], [1]
        columns = [called[name] for name in self.shares]
        headers = [translate("head", lang), *columns, translate("labels", lang)]
        rows = [
            [str(h), *(f"{float(share[h]):.3f}" for share in self.shares.values()), ", ".join(called[n] for n in names)]
            for h, names in enumerate(self.labels)
        ]
        return headers, rows, list(range(1, len(columns) + 1))


def patterns(weights: Any, *, mask: object = None, kind: Kind = "self") -> PatternShares:
    """The share of all attention that follows each known pattern: own position, neighbours, first token and others.

    >>> import numpy as np
    >>> from regard.masks import causal
    >>> found = patterns(np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.1, 0.1, 0.8]]), mask=causal())
    >>> found
    pattern     share  meaning
    ──────────  ─────  ─────────────────────────────────────────────────────────────────────────────────────────
    own         0.767  looks at its own position
    previous    0.200  looks at the position before
    next        0.000  looks at the position after
    first       0.533  rests on the first token, such as [CLS]
    neighbours  0.233  looks at the two positions before and the two after, its own left out
    uniform     0.791  looks at everything it sees about equally: its entropy as a share of the largest possible
    >>> found["own"], found.labels
    (0.7666666666666666, (('own', 'first'),))

    A weight counts for every pattern that it fits: for query 0, the first token is its own position. These are the
    measures by which `regard.watch` labels the heads of a model; `regard.look(q, k, v)` has them without the matrix.

    Args:
        weights: (N, M), or (H, N, M) for several heads; floats, NumPy or torch, each row 0 or summing to 1.
        mask: the mask that they were computed with, as in `regard.attention`: "uniform" compares with the keys that a
            query sees. Default: it sees all.
        kind: "self", where the queries are the last N of the M positions; or "cross", where queries and keys are two
            sequences, and only "first" and "uniform" mean anything.

    Returns:
        The shares, by pattern; prints as a table.

    Raises:
        TypeError: weights that are not floats, or a mask of another kind.
        ValueError: another number of axes, no query or no key, rows that are no attention weights, a weight on a key
            that the mask hides, another kind, or more queries than keys in self-attention.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be 'self' or 'cross', got {kind!r}")
    report = check(weights)
    if weights.ndim not in (2, 3) or 0 in weights.shape:
        hint = "; choose a batch row with weights[b]" if weights.ndim == 4 else ""
        raise ValueError(f"weights must be (N, M) or (H, N, M), not empty; got {tuple(weights.shape)}{hint}")
    report.raise_if_bad()
    nq, nk = weights.shape[-2:]
    if kind == "self" and nq > nk:
        raise ValueError(f"self-attention has no more queries than keys, got {nq} × {nk}; kind='cross' takes any")
    tensor = weights.detach() if isinstance(weights, Tensor) else torch.from_numpy(np.array(weights, dtype=np.float64))
    heads = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).reshape(1, -1, nq, nk)
    hiding, visible = as_mask(mask, tuple(heads.shape)), torch.full((1, 1, nq), nk)
    if hiding is not None:
        hiding.fit(*heads.shape)
        cells = hiding.dense(nq, nk).reshape(*hiding.leading, nq, nk).to(heads.device)
        if (heads.masked_fill(cells, 0) != 0).any():
            raise ValueError(
                f"{hiding!r} hides keys that have weight: give the mask that the weights were computed with"
            )
        visible = cells.sum(-1)
    shares = measure(
        StoredWeights(heads),
        KnownVisibility(),
        KeyTokens(),
        kind=kind,
        entropy=torch.special.entr(heads).sum(-1),
        visible=visible,
    ).shares
    if weights.ndim == 2:
        values: dict[str, Any] = {name: float(share) for name, share in shares.items()}
    else:
        values = {name: share[0] if isinstance(weights, Tensor) else share[0].numpy() for name, share in shares.items()}
    return PatternShares(values, tuple(tuple(names) for names in label(shares)[0]))
