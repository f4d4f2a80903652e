"""Which links of a text are worth a person's look: exact weights of every head, ranked.

A plain ranking by weight shows what every text shows: tokens that look at [SEP], at themselves, at their neighbours. So
a link of words is ranked by

    (weight − what its key gets from a query on the mean) × (1 − 1/distance)

which is 0 for neighbours, and small for a key that everything looks at. Special tokens, punctuation, a token's own
position and pieces of one word are left out. `every=True` ranks all tokens but the own position by weight alone.

A page opens on the first link of this ranking; of a picture, on the head in which cls singles out a patch.

Axis letters: H heads, N positions (Nq queries, Nk keys), W windows; batch row 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from regard.explorer.answer_types import Opening
from regard.explorer.seen_layers import SeenLayer
from regard.explorer.token_words import is_word, word_numbers
from regard.lens.view import View

if TYPE_CHECKING:
    from regard.explorer.sessions import Session

__all__ = [
    "Layer",
    "Link",
    "head_for",
    "last_that_looks",
    "layers_of",
    "obstacle",
    "opening_of",
    "rank_heads",
    "strongest",
]

AT_ONCE = 2**23  # weights held at a time
MOST = 2**30  # weights looked at for one answer: some seconds
FIRST_LOOK = 2**25  # weights looked at before a page opens: half a second


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

    >>> from regard.explorer.sessions import Session
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
    >>> from regard.explorer.sessions import Session
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


def rank_heads(session: Session) -> dict[tuple[int, int], tuple[float, Link]]:
    """(layer, head) → the first link of words in that head, and what it is ranked by; heads without one are not there.

    >>> from regard.explorer.sessions import Session
    >>> from regard.lens.capture import Capture
    >>> rank_heads(Session("nothing", Capture(), ()))
    {}

    Of more than 2²⁵ weights, tokens at even distances are looked at, as many as that allows; of pictures none.
    """
    layers = [layer for layer in layers_of(session) if _rankable(layer) and session.layers[layer.index].sides is None]
    each = sum(heads * nk for _, heads, _, nk in (layer.view.sizes for layer in layers))  # weights of one token
    affordable = FIRST_LOOK // max(1, each)
    if not layers or affordable == 0:
        return {}
    step = -(-len(session.tokens) // affordable)
    words = torch.tensor([is_word(label) for label in session.tokens])  # (N,)
    numbers = torch.tensor(word_numbers(session.tokens))  # (N,)
    best: dict[tuple[int, int], tuple[float, Link]] = {}
    for layer in layers:
        for rows, weights in _tiles(layer, None, range(0, len(session.tokens), step)):
            score = _score(layer, None, rows, weights, (words, numbers))  # (H, r, Nk)
            for head, (value, place) in enumerate(zip(*(t.tolist() for t in score.flatten(1).max(1)), strict=True)):
                i, key = divmod(place, score.shape[-1])
                if value > best.get((layer.index, head), (0.0,))[0]:
                    weight = float(weights[head, i, key])
                    best[layer.index, head] = value, Link(layer.index, head, int(rows[i]), key, weight)
    return best


def opening_of(session: Session) -> Opening | None:
    """Where a page of the session opens: what was chosen for it, or else the strongest link; None if nothing is known.

    Of a picture it is the last layer that looks at one, and cls or the last word, in the head where that token gives a
    patch most beyond what the patch gets from all queries on the mean.
    """
    if session.opening is not None:
        return session.opening
    if session.frames:
        layer = last_that_looks(session)
        head, token = (None if layer is None else head_for(session.layers[layer])) or (0, None)
        return None if layer is None else {"layer": layer, "head": head, "token": token, "key": None}
    if not session.ranked:
        return None
    _, link = min(session.ranked.values(), key=lambda one: (-one[0], one[1]))
    return {"layer": link.layer, "head": link.head, "token": _query(session, link), "key": link.key}


def _query(session: Session, link: Link) -> int:
    """Which query of its layer a link begins at."""
    start = layers_of(session)[link.layer].start
    assert start is not None
    return link.query - start


def last_that_looks(session: Session) -> int | None:
    """The last layer whose keys are patches, where heads have found what is in the picture; None without one."""
    sides = [(n, layer.sides.keys) for n, layer in enumerate(session.layers) if layer.sides is not None]
    return next((n for n, keys in reversed(sides) if len(keys.indices("patch"))), None)


def head_for(layer: SeenLayer, token: int | None = None, head: int | None = None) -> tuple[int, int] | None:
    """The head and the query of a picture's layer in which a patch gets most beyond what it gets on the mean.

    token: the query; default cls or the last word, or any where there is neither.  head: that one alone.
    None where weights are not known.
    """
    view, windows, (nq, nk) = layer.view, layer.windows, layer.view.sizes[2:]
    if view.weights is None or layer.sides is None or 0 in (nq, nk):
        return None
    queries, keys = layer.sides.queries, layer.sides.keys
    if token is None:
        asking = next((at for at in (queries.indices("cls"), queries.indices("text")[-1:]) if len(at) == 1), None)
        token = None if asking is None else int(asking[0, 0]) * nq + int(asking[0, 1])
    step = 1 + windows * view.sizes[1] * nq * nk // FIRST_LOOK
    rows = list(range(0, nq, step)) if token is None else [token % nq]
    weights = view.tile(rows, slice(None))[:windows].float().cpu()  # (W, H, rows, Nk)
    score = weights - (view.received[:windows].float().cpu() / nq).unsqueeze(2)
    hidden = torch.from_numpy(keys.kind != "patch")[:, None, None].expand_as(score).clone()
    if view.kind == "self":
        hidden |= torch.arange(nk) == torch.tensor(rows)[:, None]
    if token is not None:
        hidden |= (torch.arange(windows) != token // nq).view(-1, 1, 1, 1)
    if head is not None:
        hidden |= (torch.arange(score.shape[1]) != head).view(1, -1, 1, 1)
    best = int(score.nan_to_num(-inf).masked_fill(hidden, -inf).argmax())
    window, found, row, _ = (int(n) for n in torch.unravel_index(torch.tensor(best), score.shape))
    return found, window * nq + rows[row]


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
