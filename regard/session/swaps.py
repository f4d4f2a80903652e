"""One word of a text exchanged for another, and the heads whose attention moves most between two sessions.

Axis letters: H heads, N positions, G groups of aligned tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from regard.models.text import TextModel
from regard.session.heads import Layer
from regard.session.labels import is_word, word_numbers
from regard.session.ranking import AT_ONCE, FIRST_LOOK
from regard.session.session import Session, look_at

LONGEST_WORD = 200  # characters


def swapped_text(session: Session, token: int, word: str) -> str:
    """The text of a session with another word in place of the one that a token belongs to.

    Raises:
        IndexError: a token that is not there.
        ValueError: no text or model, a special token, or a word that is empty or longer than 200 characters.
    """
    if session.text is None or session.model is None or session.frames:
        raise ValueError("a word can be exchanged where a model reads a text: open one with `regard serve --model`")
    if not 0 <= token < len(session.tokens):
        raise IndexError(f"token {token} is out of range: there are {len(session.tokens)} tokens, counted from 0")
    if not word.strip() or len(word) > LONGEST_WORD:
        raise ValueError(f"the new word must have 1 to {LONGEST_WORD} characters, got {len(word.strip())}")
    numbers = word_numbers(session.tokens)
    pieces = [at for at, number in enumerate(numbers) if number == numbers[token]]
    offsets = session.model.tokenizer.encode(session.text).offsets
    spans = [span for at in pieces if (span := offsets[at]) is not None and span[0] < span[1]]
    if not spans:
        raise ValueError(f"token {token}, {session.tokens[token]!r}, is no word of the text: choose another")
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    old = session.text[start:end]
    start, end = start + len(old) - len(old.lstrip()), end - len(old) + len(old.rstrip())
    return session.text[:start] + word.strip() + session.text[end:]


def swap_word(session: Session, token: int, word: str) -> Session:
    """A new session of the same model on the changed text, cut where the model's positions end. Raises as above."""
    text = swapped_text(session, token, word)
    assert session.model is not None
    most = session.model.max_positions if isinstance(session.model, TextModel) else None
    return look_at(text, session.model, truncate=most is not None and len(session.tokens) == most)


# -------------------------------------------------------------------------------------------------------------- changes


class ChangedHead(NamedTuple):
    """How much of a head's attention moved, and the link between two words that changed most.

    moved: ½ Σ |w − w'| of a query's row, the mean over the queries: the share of attention that goes elsewhere.
    query, key: of the link, in the first and in the second session.  before, after: its weight there.
    """

    layer: int
    head: int
    moved: float
    query: tuple[int, int]
    key: tuple[int, int]
    before: float
    after: float


@dataclass(frozen=True)
class Alignment:
    """Which tokens of two texts are the same: all if there are as many, else those before and after what differs.

    before, after: tokens alike at the beginning and at the end.  What is between them is one group.
    """

    counts: tuple[int, int]
    before: int
    after: int

    @property
    def groups(self) -> int:
        """G, of tokens that are compared with each other."""
        return self.before + self.after + (self.counts[0] != self.counts[1])

    def numbers(self, side: int) -> Tensor:
        """(N,) the group of each token."""
        count = self.counts[side]
        at = torch.arange(count)
        return torch.where(at < self.before, at, (at - count + self.groups).clamp(min=self.before))

    def first(self, group: int, side: int) -> int:
        """The first token of a group."""
        return group if group <= self.before else group - self.groups + self.counts[side]


def align(a: Session, b: Session) -> Alignment:
    """Align the tokens of two sessions."""
    counts = len(a.tokens), len(b.tokens)
    if counts[0] == counts[1]:
        return Alignment(counts, counts[0], 0)
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    before = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    ends = list(zip(reversed(a.tokens), reversed(b.tokens), strict=False))[: min(counts) - before]
    after = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    if before + after == min(counts):  # a token was added or taken: it is compared together with a neighbour
        before, after = (before - 1, after) if before else (before, after - 1)
    return Alignment(counts, before, after)


def changed_heads(a: Session, b: Session) -> tuple[list[ChangedHead], bool]:
    """The heads of two sessions of one model, those whose attention moved most first; and whether all rows were read.

    Layers are those with the same path in both, whose queries and keys are the tokens. Of more than 2²⁵ weights, rows
    at even distances are compared. Pieces of a word that there are more or fewer of count as one token: their weights
    are added as keys, and averaged as queries.

    Raises LookupError if no layer can be compared.
    """
    layers = [
        (one, other)
        for one, other in zip(a.layers, b.layers, strict=False)
        if (one.path, one.call, one.view.sizes[1]) == (other.path, other.call, other.view.sizes[1])
        and all(layer.rankable and layer.start == 0 and layer.windows == 1 for layer in (one, other))
        and all(layer.sizes == (len(s.tokens),) * 2 for layer, s in ((one, a), (other, b)))
    ]
    if not layers:
        raise LookupError("the sessions cannot be compared: they need exact rows of the same layers of one model")
    aligned = align(a, b)
    total = sum(layer.view.sizes[1] * max(aligned.counts) ** 2 for layer, _ in layers)
    step = 1 + (total - 1) // FIRST_LOOK
    groups = torch.arange(0, aligned.groups, step)
    words = torch.tensor([is_word(a.tokens[aligned.first(group, 0)]) for group in range(aligned.groups)])
    changes = [change for pair in layers for change in _layer_changes(*pair, aligned, groups, words)]
    return sorted(changes, key=lambda change: (-change.moved, change)), step == 1


def _layer_changes(one: Layer, other: Layer, aligned: Alignment, groups: Tensor, words: Tensor) -> list[ChangedHead]:
    """The changes of each head. groups: those whose rows are read.  words: (G,) which are words."""
    heads = one.view.sizes[1]
    moved = torch.zeros(heads, dtype=torch.float64)
    best = [(-1.0, 0, 0, 0.0, 0.0)] * heads  # change, query group, key group, before, after
    every = torch.arange(aligned.groups)
    at_once = max(1, AT_ONCE // (heads * max(aligned.counts)))
    for part in torch.split(groups, at_once):
        old, new = (_grouped(layer, aligned, side, part) for side, layer in enumerate((one, other)))  # (H, g, G)
        gap = (new - old).abs()
        moved += gap.sum((1, 2)) / 2
        values, places = gap.masked_fill(~words | ~words[part, None] | (part[:, None] == every), 0.0).flatten(1).max(1)
        for head, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            if value > best[head][0]:
                i, j = divmod(place, aligned.groups)
                best[head] = value, int(part[i]), j, float(old[head, i, j]), float(new[head, i, j])
    changes = []
    for head, (_, query, key, before, after) in enumerate(best):
        pairs = [(aligned.first(group, 0), aligned.first(group, 1)) for group in (query, key)]
        share = float(moved[head]) / len(groups)
        changes.append(ChangedHead(one.index, head, share, pairs[0], pairs[1], before, after))
    return changes


def _grouped(layer: Layer, aligned: Alignment, side: int, groups: Tensor) -> Tensor:
    """(H, g, G) the weights of some groups of queries, averaged, on all groups of keys, summed; fp64."""
    numbers = aligned.numbers(side)  # (N,)
    rows = torch.isin(numbers, groups).nonzero().view(-1)
    weights = layer.view.tile(rows.tolist(), slice(None))[0].double().cpu()  # (H, r, N)
    into = torch.searchsorted(groups, numbers[rows])  # (r,)
    summed = weights.new_zeros(len(weights), len(rows), aligned.groups).index_add_(2, numbers, weights)
    sums = weights.new_zeros(len(weights), len(groups), aligned.groups).index_add_(1, into, summed)
    counts = torch.bincount(into, minlength=len(groups)).clamp(min=1)
    averaged: Tensor = sums / counts[:, None]
    return averaged
