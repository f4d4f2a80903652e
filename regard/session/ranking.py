"""Which links of a session are worth a look: ranked, and where a page opens.

Axis letters: B batch rows, W windows, H heads, N positions (Nq queries, Nk keys).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.layouts import Layout
from regard.lens.overlays import ImagePatches
from regard.session.heads import Layer
from regard.session.labels import is_word, word_numbers
from regard.session.protocol import Opening

if TYPE_CHECKING:
    from regard.session.session import Session

AT_ONCE = 1 << 23  # weights in memory while links are ranked
MOST = 1 << 30  # weights searched for one answer: some seconds
FIRST_LOOK = 1 << 25  # weights searched before a page opens: half a second


# ------------------------------------------------------------------------------------------------------ links of a text


class RankedLink(NamedTuple):
    """The weight of one token on another, in one head. Positions count tokens."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


def obstacle(layers: Sequence[Layer], queries: Sequence[int] | None = None) -> Literal["weights", "length"] | None:
    """Why the links of these layers cannot be ranked: no weights are known ("weights"), or too many ("length")."""
    sizes = [layer.view.sizes for layer in layers if layer.rankable]
    if not sizes:
        return "weights"
    cells = sum(heads * (nq if queries is None else len(queries)) * nk for _, heads, nq, nk in sizes)
    return "length" if cells > MOST else None


def strongest(
    session: Session,
    layers: Sequence[Layer],
    *,
    count: int = 8,
    head: int | None = None,
    queries: Sequence[int] | None = None,
    every: bool = False,
) -> list[RankedLink]:
    """The strongest links, each pair of words once, in the head where it ranks highest.

    layers: of the session, if they have no `obstacle`.  head: rank this head only.  queries: positions; default all.
    every: rank all tokens except a token's own position, by weight alone, each pair of tokens once.
    """
    words = None if every else _words(session)
    number = torch.arange(len(session.tokens)) if words is None else words[1]  # (N,)
    best: dict[tuple[int, int], tuple[float, RankedLink]] = {}
    for layer in layers:
        for rows, weights in _tiles(layer, head, queries) if layer.rankable else ():
            high, heads = _score(layer, head, rows, weights, words).max(0)  # (r, Nk)
            high = high if words is None else _highest_of_words(high, number[rows], number)
            values, places = high.flatten().topk(min(count, high.numel()))
            for value, place in zip(values.tolist(), places.tolist(), strict=True):
                i, key = divmod(place, high.shape[1])
                query, h = int(rows[i]), int(heads[i, key])
                pair = int(number[query]), int(number[key])
                if value > best.get(pair, (0.0, None))[0]:
                    weight = float(weights[h, i, key])
                    best[pair] = value, RankedLink(layer.index, h if head is None else head, query, key, weight)
    ranked = sorted(best.values(), key=lambda one: (-one[0], one[1]))
    return [link for _, link in ranked[:count]]


def rank_heads(session: Session) -> dict[tuple[int, int], tuple[float, RankedLink]]:
    """(layer, head) → the strongest link between words in that head, with its score; heads without one are left out.

    Of more than 2²⁵ weights, tokens at even distances are searched, as many as that allows; of images none.
    """
    layers = [layer for layer in session.layers if layer.rankable and layer.sides is None]
    each = sum(heads * nk for _, heads, _, nk in (layer.view.sizes for layer in layers))  # weights of one token
    affordable = FIRST_LOOK // max(1, each)
    if not layers or affordable == 0:
        return {}
    step = -(-len(session.tokens) // affordable)
    words = _words(session)
    best: dict[tuple[int, int], tuple[float, RankedLink]] = {}
    for layer in layers:
        for rows, weights in _tiles(layer, None, range(0, len(session.tokens), step)):
            score = _score(layer, None, rows, weights, words)  # (H, r, Nk)
            for head, (value, place) in enumerate(zip(*(t.tolist() for t in score.flatten(1).max(1)), strict=True)):
                i, key = divmod(place, score.shape[-1])
                if value > best.get((layer.index, head), (0.0,))[0]:
                    weight = float(weights[head, i, key])
                    best[layer.index, head] = value, RankedLink(layer.index, head, int(rows[i]), key, weight)
    return best


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


def _words(session: Session) -> tuple[Tensor, Tensor]:
    """(N,) which tokens are words, and the number of the word that each belongs to."""
    known = torch.tensor([is_word(label) for label in session.tokens])
    return known, torch.tensor(word_numbers(session.tokens))


def _score(
    layer: Layer, head: int | None, rows: Tensor, weights: Tensor, words: tuple[Tensor, Tensor] | None
) -> Tensor:
    """(H, r, Nk) what a link is ranked by; −∞ if it is left out. words: as `_words` returns them, or None for all."""
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


def _highest_of_words(high: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Scores (r, Nk), −∞ but for the highest of each pair of words. queries: (r,), keys: (Nk,) numbers of the words."""
    _, queries = torch.unique(queries, return_inverse=True)
    count = int(queries.max()) + 1, int(keys.max()) + 1
    by_key = high.new_full((len(high), count[1]), -inf).scatter_reduce_(1, keys.expand_as(high), high, "amax")
    index = queries[:, None].expand_as(by_key)
    highest = high.new_full(count, -inf).scatter_reduce_(0, index, by_key, "amax")  # (query words, key words)
    return high.masked_fill(high < highest[queries][:, keys], -inf)


# ------------------------------------------------------------------------------------------------- links of a session


def ranked_links(session: Session, count: int = 8) -> tuple[list[RankedLink], bool]:
    """The strongest links of a whole session, best first, and whether every link was searched.

    Of a text they are those of `strongest`; of images, links to patches. Of more than 2²⁵ weights, queries at even
    distances are searched.
    """
    if session.frames:
        links, complete = session.patch_links
        return links[:count], complete
    sizes = [layer.view.sizes for layer in session.layers if layer.rankable]
    if sum(heads * nq * nk for _, heads, nq, nk in sizes) <= FIRST_LOOK:
        return strongest(session, session.layers, count=count), True
    best: dict[tuple[int, int], RankedLink] = {}
    for _, link in sorted(session.ranked.values(), key=lambda one: (-one[0], one[1])):
        best.setdefault((link.query, link.key), link)
    return list(best.values())[:count], False


def patch_links(session: Session, count: int = 64) -> tuple[list[RankedLink], bool]:
    """The strongest links to patches, from patches, cls and words; ranked as words are, by distance in the grid."""
    layers = [layer for layer in session.layers if layer.sides is not None and layer.view.weights is not None]
    layers = [layer for layer in layers if layer.sides is not None and len(layer.sides.keys.indices("patch"))]
    total = sum(layer.windows * layer.view.sizes[1] * layer.view.sizes[2] * layer.view.sizes[3] for layer in layers)
    step = 1 + (total - 1) // FIRST_LOOK
    best: dict[tuple[Layout, Layout, int, int], tuple[float, RankedLink]] = {}
    for layer in layers:
        assert layer.sides is not None
        queries, keys, (_, heads, nq, nk) = layer.sides.queries, layer.sides.keys, layer.view.sizes
        grids = [_grid_cells(layer, layout) for layout in (queries, keys)]  # (W, N, 3) each
        share = layer.view.received[: layer.windows].float().cpu().unsqueeze(2) / nq  # (W, H, 1, Nk)
        asking = torch.from_numpy(np.isin(queries.kind, ("patch", "cls", "text")))
        at_once = max(1, AT_ONCE // max(1, layer.windows * heads * nk))
        sampled = list(range(0, nq, step))
        for rows in (sampled[at : at + at_once] for at in range(0, len(sampled), at_once)):
            weights = layer.view.tile(rows, slice(None))[: layer.windows].float().cpu()  # (W, H, r, Nk)
            ours, theirs = grids[0][:, rows, None], grids[1][:, None]  # (W, r, 1, 3), (W, 1, Nk, 3)
            apart = (ours - theirs)[..., 1:].abs().amax(-1).clamp(min=1)  # (W, r, Nk)
            near = torch.where(ours[..., 0] == theirs[..., 0], 1 - 1 / apart, 1.0)  # of another image: far
            out = ~asking[:, rows, None] | (theirs[..., 0] < 0)  # (W, r, Nk)
            score = ((weights - share) * near[:, None]).nan_to_num(-inf).masked_fill(out[:, None], -inf)
            high, which = score.max(1)  # (W, r, Nk)
            for value, place in zip(*(t.tolist() for t in high.flatten().topk(min(count, high.numel()))), strict=True):
                window, i, key = (int(n) for n in np.unravel_index(place, high.shape))
                head = int(which[window, i, key])
                at = queries, keys, window * nq + rows[i], window * nk + key
                if value > best.get(at, (0.0, None))[0]:
                    weight = float(weights[window, head, i, key])
                    best[at] = value, RankedLink(layer.index, head, at[2], at[3], weight)
    ranked = sorted(best.values(), key=lambda one: (-one[0], one[1]))
    return [link for _, link in ranked[:count]], step == 1


def _grid_cells(layer: Layer, layout: Layout) -> Tensor:
    """(W, N, 3) the image, row and column of each patch; the image is −1 for what is none, or lies on padding."""
    assert layer.sides is not None
    cells = np.full((*layout.shape, 3), -1)
    for image, frame in enumerate(layer.sides.frames):
        patches = ImagePatches(layout, frame, image)
        if len(patches.tokens):
            numbers = np.where(patches.beyond, -1, image)
            cells[tuple(patches.tokens.T)] = np.concatenate([numbers[:, None], patches.cells], 1)
    return torch.from_numpy(cells)


# ------------------------------------------------------------------------------------------------- where a page opens


def opening_of(session: Session) -> Opening | None:
    """Where a page of the session opens: its own `opening`, or else the strongest link; None if nothing is known.

    With images it is the strongest link to a patch. Where none stands out, it is the last layer that looks at one, and
    cls or the last word, in the head where that token gives a patch most beyond the patch's mean.
    """
    if session.opening is not None:
        return session.opening
    if session.frames:
        if session.patch_links[0]:
            best = session.patch_links[0][0]
            return {"layer": best.layer, "head": best.head, "token": best.query, "key": best.key}
        layer = last_that_looks(session)
        head, token = (None if layer is None else head_for(session.layers[layer])) or (0, None)
        return None if layer is None else {"layer": layer, "head": head, "token": token, "key": None}
    if not session.ranked:
        return None
    _, link = min(session.ranked.values(), key=lambda one: (-one[0], one[1]))
    start = session.layers[link.layer].start
    assert start is not None
    return {"layer": link.layer, "head": link.head, "token": link.query - start, "key": link.key}


def last_that_looks(session: Session) -> int | None:
    """The last layer whose keys are patches, or None."""
    sides = [(n, layer.sides.keys) for n, layer in enumerate(session.layers) if layer.sides is not None]
    return next((n for n, keys in reversed(sides) if len(keys.indices("patch"))), None)


def head_for(layer: Layer, token: int | None = None, head: int | None = None) -> tuple[int, int] | None:
    """The head and the query of an image's layer in which a patch gets most beyond its mean; None without weights.

    token: the query; default cls or the last word, or any if there is neither.  head: search this head only.
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
    window, best_head, row, _ = (int(n) for n in torch.unravel_index(torch.tensor(best), score.shape))
    return best_head, window * nq + rows[row]
