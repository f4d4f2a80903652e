"""Attention patterns: one score per head and pattern, the mean weight on the keys that the pattern names. No N×N.

A pattern names one key for each query, or a few: its own position, the position before, the first key. Its score is
the mean weight there, O(N·D) from `Weights.pairs`; "uniform" and "delimiter" come from sums that a view has already.

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
from functools import reduce
from types import MappingProxyType
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from regard.lens.measures.weights import Weights
from regard.locale import Lang, translate
from regard.masks.mask import TileGrid
from regard.masks.patterns import at_positions
from regard.masks.rules import read_offset
from regard.stages import Lang

__all__ = ["CALLED", "KEYS", "MEANING", "NAMES", "THRESHOLDS", "Patterns", "label", "label_rest", "measure"]

NAMES = ("own", "previous", "next", "first", "neighbours", "uniform", "delimiter", "same token", "induction")

THRESHOLDS: Mapping[str, float] = MappingProxyType(dict.fromkeys(NAMES, 0.5) | {"uniform": 0.9})
"""The least share for a label. "uniform" is a share of entropy, which half of all heads reach at 0.5."""

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
    *,
    kind: str = "self",
    entropy: Tensor | None = None,
    visible: Tensor | None = None,
    received: Tensor | None = None,
    rows: Tensor | int | None = None,
    offset: Tensor | int | None = None,
    padding: Tensor | None = None,
    ids: Tensor | None = None,
    delimiters: Tensor | None = None,
) -> Patterns:
    """Score every pattern that the arguments allow.

    Args:
        weights: exact weights on demand; only pairs are computed.
        kind: "self", or "cross", where only first, uniform and delimiter have a meaning.
        entropy: (B, H, Nq) in nats, for "uniform".
        visible: (B or 1, H or 1, Nq) number of keys each query sees, one more if a sink takes part in the entropy, for
            "uniform"; queries that see one key or none do not count.
        received: (B, H, Nk) column sums of the weights, for "delimiter".
        rows: number of queries that `received` sums over, one or one per batch row; default Nq, with padding.
        offset: position of query 0: an integer, one per batch row, or (B or 1, H or 1).
        padding: (B or 1, Nk) True for padding. A query is padding if its own position is.
        ids: (B or 1, Nk) token numbers, for "same token" and "induction".
        delimiters: (B or 1, Nk) booleans, for "delimiter". The first token never counts as one.

    Raises:
        ValueError: for an unknown kind, a tensor of another shape, and offset or ids with cross-attention.
        TypeError: for padding or delimiters that are not booleans, and ids that are not integers.

    Example:
        >>> from regard.lens.measures.weights import StoredWeights
        >>> causal = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 0.7, 0.3]])
        >>> found = measure(StoredWeights(causal.view(1, 1, 3, 3)))
        >>> {name: round(s.item(), 2) for name, s in found.scores.items()}
        {'own': 0.47, 'previous': 0.8, 'next': 0.0, 'first': 0.63, 'neighbours': 0.53}
        >>> round(found.shares["previous"].item(), 2), round(found.beside["previous"].item(), 2)
        (0.53, 0.23)
    """
    if kind not in ("self", "cross"):
        raise ValueError(f"kind must be 'self' or 'cross', got {kind!r}")
    if kind == "cross" and (offset is not None or ids is not None):
        raise ValueError("offset and ids place queries among the keys, which cross-attention does not; leave them out")
    layout = _Positions(weights, offset, padding, kind)
    looks: dict[str, tuple[KeyWeights, ...]] = {"first": (layout.look(layout.first()),)}
    if kind == "self":
        back2, back, own, ahead, ahead2 = (layout.look(layout.position + step) for step in (-2, -1, 0, 1, 2))
        near = (back2, back, ahead, ahead2)
        looks |= {"own": (own,), "previous": (back,), "next": (ahead,), "neighbours": near}
    if ids is not None:
        looks |= _by_token(layout, ids)
    scores = {name: _mean(*found) for name, found in looks.items()}
    shares = {name: layout.share(*found) for name, found in looks.items()}
    beside = {name: layout.share(*found, first=False) for name, found in looks.items() if name != "first"}
    if entropy is not None and visible is not None:
        scores["uniform"] = shares["uniform"] = _uniform(layout, entropy, visible)
    if received is not None and delimiters is not None:
        part = _delimiter(layout, received, delimiters, rows)
        scores["delimiter"] = shares["delimiter"] = beside["delimiter"] = part
    return Patterns(*({name: t[name].clamp(0, 1) for name in NAMES if name in t} for t in (scores, shares, beside)))


def label(shares: Mapping[str, Tensor], threshold: float | Mapping[str, float] = THRESHOLDS) -> list[list[list[str]]]:
    """The labels of each head, [batch row][head], strongest first: the patterns that reach their threshold.

    "neighbours" is no label of a head that is "previous" or "next", which it contains.

    Args:
        shares: as `measure` gives them.
        threshold: one for all patterns, or one per name.

    Raises:
        ValueError: for no shares at all, a threshold outside [0, 1], or one that is missing.

    Example:
        >>> label({"own": torch.tensor([[0.2, 0.6]]), "first": torch.tensor([[0.3, 0.9]])})
        [[[], ['first', 'own']]]
    """
    if not shares:
        raise ValueError("there are no shares to take labels from")
    least = dict.fromkeys(shares, threshold) if isinstance(threshold, (int, float)) else dict(threshold)
    for name in shares:
        if name not in least:
            raise ValueError(f"no threshold for {name!r}; there are thresholds for {', '.join(least) or 'none'}")
        if not 0 <= least[name] <= 1:
            raise ValueError(f"a threshold must be in [0, 1], got {least[name]} for {name!r}")
    table = {name: values.tolist() for name, values in shares.items()}
    batch, heads = next(iter(shares.values())).shape

    def labels(b: int, h: int) -> list[str]:
        names = [name for name in table if table[name][b][h] >= least[name]]  # NaN reaches nothing
        if "previous" in names or "next" in names:
            names = [name for name in names if name != "neighbours"]
        return sorted(names, key=lambda name: -table[name][b][h])

    return [[labels(b, h) for h in range(heads)] for b in range(batch)]


def label_rest(shares: Mapping[str, Tensor], beside: Mapping[str, Tensor]) -> list[list[str | None]]:
    """For heads that rest on the first token, the pattern that gets half of the rest, [batch row][head], or None.

    Args:
        shares: as `measure` gives them.
        beside: as `measure` gives them.

    Example:
        >>> shares = {"first": torch.tensor([[0.8, 0.8, 0.3]])}
        >>> label_rest(shares, {"previous": torch.tensor([[0.15, 0.05, 0.7]])})
        [['previous', None, None]]
    """
    resting = [[names[:1] == ["first"] for names in row] for row in label(shares)]
    if not any(map(any, resting)):
        return [[None] * len(row) for row in resting]
    rest = 1 - shares["first"]  # (B, H)
    parts = {name: torch.where(rest >= REST, part / rest.clamp(min=REST), 0.0) for name, part in beside.items()}
    found = label(parts) if parts else [[[]] * len(row) for row in resting]
    return [
        [names[0] if names and rests else None for names, rests in zip(*rows, strict=True)]
        for rows in zip(found, resting, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------ who looks where


class KeyWeights(NamedTuple):
    """Weight of one key per query, (B, H, Nq); which queries count; and whether the key is the first token."""

    weight: Tensor
    counts: Tensor
    at_first: Tensor


class _Positions:
    """Where the queries of one call stand among its keys, and which of either are padding."""

    def __init__(self, weights: Weights, offset: Tensor | int | None, padding: Tensor | None, kind: str) -> None:
        self.weights = weights
        self.batch, self.heads, self.nq, self.nk = weights.sizes
        device = torch.device("cpu") if padding is None else padding.device
        grid = TileGrid(self.nq, self.nk, (1, 1), device)
        place = read_offset(offset)
        lead = (self.batch, self.heads)
        if isinstance(place, Tensor) and any(n not in (1, m) for n, m in zip(place.shape, lead, strict=True)):
            raise ValueError(f"offset of shape {tuple(place.shape)} does not fit {lead[0]} batch rows, {lead[1]} heads")
        positions = grid.positions(place)
        self.position = positions if positions.ndim == 3 else positions.view(1, 1, -1)  # (B or 1, H or 1, Nq)
        self.padding = torch.zeros(1, self.nk, dtype=torch.bool, device=device)  # (B or 1, Nk)
        if padding is not None:
            self.padding = _marks("padding", padding, self.batch, self.nk)
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

    def share(self, *looks: KeyWeights, first: bool = True) -> Tensor:
        """What several looks find together of all attention of real queries, (B, H); first: the first token counts."""
        device = looks[0].weight.device
        parts = [x.weight if first else x.weight.masked_fill(x.at_first.to(device), 0) for x in looks]
        found = sum(parts[1:], parts[0])  # (B, H, Nq)
        real = self.real.to(device).expand_as(found)
        return torch.where(real, found, 0).sum(-1) / real.sum(-1).clamp(min=1)


def _uniform(layout: _Positions, entropy: Tensor, visible: Tensor) -> Tensor:
    """The mean of H_i / ln(number of keys), over queries that see two keys or more."""
    _shaped("entropy", entropy, (layout.batch, layout.heads, layout.nq), shared=False)
    _shaped("visible", visible, (layout.batch, layout.heads, layout.nq))
    visible = visible.to(entropy.device)
    share = entropy / visible.clamp(min=2).to(entropy.dtype).log()
    return _mean_over(share.clamp(max=1), layout.real.to(entropy.device) & (visible >= 2))


def _delimiter(layout: _Positions, received: Tensor, delimiters: Tensor, rows: Tensor | int | None) -> Tensor:
    """The part of all attention that delimiters receive, the first token left out."""
    _shaped("received", received, (layout.batch, layout.heads, layout.nk), shared=False)
    chosen = _marks("delimiters", delimiters, layout.batch, layout.nk).to(received.device)
    chosen = chosen & ~layout.padding.to(received.device)  # (B or 1, Nk)
    if layout.nq and layout.nk:
        first = layout.first()[:, 0, :1].to(received.device)  # (B or 1, 1)
        chosen = chosen & (torch.arange(layout.nk, device=received.device) != first)
    total = torch.where(chosen.unsqueeze(1), received, 0).sum(-1)  # (B, H)
    count = torch.as_tensor(layout.nq if rows is None else rows, device=received.device).reshape(-1, 1)
    if count.shape[0] not in (1, layout.batch):
        raise ValueError(f"rows must be one number or one per batch row ({layout.batch}), got {count.shape[0]}")
    return total / count.clamp(min=1)


def _by_token(layout: _Positions, ids: Tensor) -> dict[str, tuple[KeyWeights, ...]]:
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    _shaped("ids", ids, (layout.batch, layout.nk))
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
    """The latest earlier position with the same number, or −1: (B, N) → (B, N), by one sort.

    >>> _earlier(torch.tensor([[7, 5, 7, 7, 5]])).tolist()
    [[-1, -1, 0, 2, 1]]
    """
    value, at = group.sort(dim=1, stable=True)
    linked = torch.where(value[:, 1:] == value[:, :-1], at[:, :-1], -1)
    return torch.full_like(at, -1).scatter(1, at[:, 1:], linked)


# --------------------------------------------------------------------------------------------------------------- pieces


def _mean(*looks: KeyWeights) -> Tensor:
    """The mean of what several looks find together, over the queries that count for one of them; 0 where none does."""
    found = sum((look.weight for look in looks[1:]), looks[0].weight)  # (B, H, Nq)
    return _mean_over(found, reduce(torch.logical_or, (look.counts for look in looks)).to(found.device))


def _mean_over(values: Tensor, counted: Tensor) -> Tensor:
    counted = counted.expand_as(values)
    return torch.where(counted, values, 0).sum(-1) / counted.sum(-1).clamp(min=1)


def _marks(name: str, marks: Tensor, batch: int, nk: int) -> Tensor:
    if marks.dtype != torch.bool:
        raise TypeError(f"{name} must be booleans, got {marks.dtype}")
    return _shaped(name, marks, (batch, nk))


def _shaped(name: str, values: Tensor, shape: tuple[int, ...], shared: bool = True) -> Tensor:
    """Check a shape, whose axes but the last may be 1 where they are shared."""
    fits = values.ndim == len(shape) and values.shape[-1] == shape[-1]
    if not fits or any(n != m and not (shared and n == 1) for n, m in zip(values.shape[:-1], shape[:-1], strict=True)):
        wanted = ", ".join([*(f"{n} or 1" if shared and n != 1 else str(n) for n in shape[:-1]), str(shape[-1])])
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(values.shape)}")
    return values
