"""Which links of a text are worth a person's look: exact weights of every head, ranked.

A plain ranking by weight shows what every text shows: tokens that look at [SEP], at themselves, at their neighbours. So
a link of words is ranked by

    (weight − what its key gets from a query on the mean) × (1 − 1/distance)

which is 0 for neighbours, and small for a key that everything looks at. Special tokens, punctuation, a token's own
position and pieces of one word are left out. `every=True` ranks all tokens but the own position by weight alone.

Axis letters: H heads, N positions (Nq queries, Nk keys); batch row 0.

It does not know how links are printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.explorer.sessions import Session
from regard.explorer.token_words import is_word, word_numbers
from regard.lens.view import View

__all__ = ["Layer", "Link", "layers_of", "obstacle", "strongest"]

AT_ONCE = 2**23  # weights held at a time
MOST = 2**30  # weights looked at for one answer: some seconds


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a session.

    index: its number among the layers.  path: of its module.  view: what it did, with axes (B, H, …).
    start: the position of query 0 among the tokens; None where its queries or keys are other tokens.
    """

    index: int
    path: str
    view: View
    start: int | None


class Link(NamedTuple):
    """How much of one token's attention goes to another, in one head. Positions count tokens."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


def layers_of(session: Session) -> list[Layer]:
    """The layers of a session, numbered as everywhere in the explorer.

    >>> from regard.lens.capture import Capture
    >>> layers_of(Session("nothing", Capture(), ()))
    []
    """
    seen = enumerate(session.layers)
    return [Layer(n, layer.path, layer.view, _start(layer.view, len(session.tokens))) for n, layer in seen]


def _start(view: View, length: int) -> int | None:
    _, _, nq, nk = view.sizes
    offset = view.place.offset
    start = nk - nq if offset is None else offset
    if view.kind != "self" or nk != length or not isinstance(start, int) or not 0 <= start <= length - nq:
        return None
    return start


def obstacle(layers: Sequence[Layer], queries: Sequence[int] | None = None) -> Literal["weights", "length"] | None:
    """Why the links of these layers cannot be ranked: no weights are known ("weights"), or too many ("length").

    >>> obstacle([])
    'weights'
    """
    there = [layer.view for layer in layers if _rankable(layer)]
    if not there:
        return "weights"
    cells = sum(heads * (nq if queries is None else len(queries)) * nk for _, heads, nq, nk in (v.sizes for v in there))
    return "length" if cells > MOST else None


def _rankable(layer: Layer) -> bool:
    return layer.start is not None and layer.view.weights is not None


def strongest(
    session: Session,
    layers: Sequence[Layer],
    *,
    count: int = 8,
    head: int | None = None,
    queries: Sequence[int] | None = None,
    every: bool = False,
) -> list[Link]:
    """The first links of the ranking, each pair of tokens once, by the head where it ranks highest.

    >>> import torch, regard
    >>> from regard.lens.capture import Capture
    >>> x = torch.eye(4)[[0, 1, 2, 0]].view(1, 1, 4, 4) * 3
    >>> layer = Layer(0, "attn", regard.look(x, x, x), 0)
    >>> strongest(Session("a", Capture(), ("one", "two", "three", "one")), [layer], count=1)[0][:4]
    (0, 0, 0, 3)

    layers: those to look into, as `layers_of` gives them; where `obstacle` says none.
    count: how many at most.  head: one head alone.  queries: positions of tokens that look; default all.
    every: all tokens but the own position, by weight alone.
    """
    words = torch.tensor([every or is_word(label) for label in session.tokens])  # (N,)
    numbers = torch.tensor(word_numbers(session.tokens))  # (N,)
    best: dict[tuple[int, int], tuple[float, Link]] = {}
    for layer in filter(_rankable, layers):
        for rows, weights in _tiles(layer, head, queries):
            score = _score(layer, head, rows, weights, None if every else (words, numbers))
            for value, link in _first(layer, head, rows, weights, score, count):
                pair = link.query, link.key
                if value > best.get(pair, (0.0, None))[0]:
                    best[pair] = value, link
    ranked = sorted(best.values(), key=lambda one: (-one[0], one[1]))
    return [link for _, link in ranked[:count]]


def _tiles(layer: Layer, head: int | None, queries: Sequence[int] | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows at a time: their positions (r,), and their exact weights (H, r, Nk)."""
    _, heads, nq, nk = layer.view.sizes
    assert layer.start is not None
    wanted = range(nq) if queries is None else [i - layer.start for i in queries if 0 <= i - layer.start < nq]
    step = max(1, AT_ONCE // max(1, heads * nk))
    for at in range(0, len(wanted), step):
        rows = list(wanted[at : at + step])
        weights = layer.view.tile(rows, slice(None))[0].float().cpu()
        yield torch.tensor(rows) + layer.start, weights if head is None else weights[head : head + 1]


def _score(
    layer: Layer, head: int | None, rows: Tensor, weights: Tensor, words: tuple[Tensor, Tensor] | None
) -> Tensor:
    """(H, r, Nk) what a link is ranked by; −∞ for one that is left out."""
    keys = torch.arange(weights.shape[-1])
    distance = (rows[:, None] - keys).abs()  # (r, Nk)
    out = distance == 0
    score = weights
    if words is not None:
        share = layer.view.received[0].float().cpu() / layer.view.sizes[2]  # (H, Nk)
        share = share if head is None else share[head : head + 1]
        score = (weights - share[:, None]) * (1 - 1 / distance.clamp(min=1))
        known, number = words
        out = out | ~known | ~known[rows, None] | (number == number[rows, None])
    return score.nan_to_num(-inf).masked_fill(out, -inf)


def _first(
    layer: Layer, head: int | None, rows: Tensor, weights: Tensor, score: Tensor, count: int
) -> list[tuple[float, Link]]:
    high, at_head = score.max(0)  # (r, Nk)
    value, place = high.flatten().topk(min(count, high.numel()))
    found = []
    for v, p in zip(value.tolist(), place.tolist(), strict=True):
        i, key = divmod(p, high.shape[1])
        h = int(at_head[i, key])
        found.append((v, Link(layer.index, h if head is None else head, int(rows[i]), key, float(weights[h, i, key]))))
    return [(v, link) for v, link in found if v > 0]
