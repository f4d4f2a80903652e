"""The heads of a capture: their layers, exact weights, numbers, and strongest links.

Axis letters: B batch rows, W windows, H heads, N positions (Nq queries, Nk keys), D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.layouts import Layout, Sides
from regard.lens.assembly import AssembledWeights
from regard.lens.capture import Capture
from regard.lens.display import plain
from regard.lens.measures.weights import ComputedWeights, Part, StoredWeights, Weights, as_they_are, exponentials
from regard.lens.overlays import received_from
from regard.lens.patterns import Patterns, label, label_rest
from regard.lens.view import View
from regard.masks.rules import Rule
from regard.masks.tiles import cell_edges
from regard.session.labels import is_word, word_numbers
from regard.session.protocol import Opening

if TYPE_CHECKING:
    from regard.session.session import Session

LITTLE = 1 << 21  # weights of a call that are computed without a request
AT_ONCE = 1 << 23  # weights in memory while links are ranked
TILE_AT_ONCE = 1 << 21  # weights in memory while a tile is pooled
MOST = 1 << 30  # weights searched for one answer: some seconds
FIRST_LOOK = 1 << 25  # weights searched before a page opens: half a second

Span = tuple[int, int]


# --------------------------------------------------------------------------------------------------------------- layers


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer of a capture.

    index: its number in the session.  path: of its module.  view: on torch, with axes (B, H, …).
    start: the position of query 0 among the session's tokens; None if its queries or keys are other tokens.
    call: number of its first call if the module ran several times, else None.
    records: numbers of its calls in the capture.
    sides: what the tokens of the first batch entry are and where they lie in an image, or None.
    """

    index: int
    path: str
    view: View
    start: int | None
    call: int | None = None
    records: tuple[int, ...] = ()
    sides: Sides | None = None

    @property
    def windows(self) -> int:
        """W, the number of batch rows that the first batch entry is cut into."""
        return 1 if self.sides is None else self.sides.queries.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys of all windows."""
        return self.windows * self.view.sizes[2], self.windows * self.view.sizes[3]

    @property
    def rankable(self) -> bool:
        """Whether its exact weights and its tokens are known."""
        return self.start is not None and self.view.weights is not None


def layers_of(capture: Capture, tokens: int) -> tuple[Layer, ...]:
    """The layers of a capture in the order of their first calls. tokens: how many the session has."""
    number = {id(record): n for n, record in enumerate(capture.records)}
    layers: list[Layer] = []
    for run in capture.runs():
        sides = None
        if run.path in capture.layouts and (run.call is None or len(run.records) == 1):
            placed = (capture[run.path] if run.call is None else capture[run.path, run.call]).placed
            sides = placed.entry(0)[0] if placed.sides else None
        view = plain(run.view)
        _, _, nq, nk = view.sizes
        start: int | Tensor | None = nk - nq if view.place.offset is None else view.place.offset
        if not isinstance(start, int) or not 0 <= start <= tokens - nq or view.kind != "self" or nk != tokens:
            start = None  # other tokens, or an offset per batch row
        records = tuple(number[id(record)] for record in run.records)
        layers.append(Layer(len(layers), run.path, view, start, run.call, records, sides))
    return tuple(layers)


# -------------------------------------------------------------------------------------------------------- exact weights


class ComputedHead:
    """Exact weights of one head from q, k and lse: e^(score − lse)."""

    def __init__(self, weights: ComputedWeights, head: int, batch: int = 0) -> None:
        self.call, self.head, self.batch = weights.call, head, batch
        self.sizes: Span = (self.call.sizes[2], self.call.sizes[3])
        group = self.call.sizes[1] // self.call.k.shape[1]
        self.q, self.k = self.call.q[batch, head], self.call.k[batch, head // group]  # (Nq, D), (Nk, D)
        self.lse = weights.exact_lse(slice(None))[batch, head]  # (Nq,), in fp64 where logits are large

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols)."""
        lse = self.lse[rows, None]
        t = self._scores(rows, cols).sub_(torch.where(lse == -inf, 0.0, lse))  # e^(−∞ − 0) = 0 where all is masked
        return exponentials(t, out=t)

    def row(self, i: int) -> Tensor:
        """The weights of query i, (Nk,).

        The whole row is at hand, and its own sum is nearer the truth than lse, whose rounding grows with the scores: at
        scores near 30 e^(score − lse) errs by 6e-6, this by 8e-7.
        """
        s = self._scores(slice(i, i + 1), slice(None))[0]
        if bool((s == -inf).all()):
            return torch.zeros_like(s)
        sinks: Tensor | None = self.call.sinks  # (H,) or (B, H, Nq): a logit that joins the softmax
        if sinks is None:
            return s.softmax(-1)
        sink = sinks[self.head] if sinks.ndim == 1 else sinks[self.batch, self.head, i]
        return torch.cat([s, sink.to(s).view(1)]).softmax(-1)[:-1]

    def masked(self, rows: Part) -> Tensor:
        """Which keys are masked for these queries, (rows, Nk): their score is −∞, whatever q·k is."""
        return self._scores(rows, slice(None)) == -inf

    def dots(self, rows: Part, cols: Part) -> Tensor:
        """q·k of these queries and keys, (rows, cols)."""
        with as_they_are(self.call.device):
            products: Tensor = self.q[rows].to(self.lse.dtype) @ self.k[cols].to(self.lse.dtype).mT
            return products

    def _scores(self, rows: Part, cols: Part) -> Tensor:
        return self.scores(self.dots(rows, cols).mul_(self.call.scale), rows, cols)

    def scores(self, scaled: Tensor, rows: Part, cols: Part) -> Tensor:
        """The softmax's input from scaled products, which are written over: capped, biased, −∞ where masked."""
        call, (nq, nk) = self.call, self.sizes
        with as_they_are(call.device):
            i = torch.arange(nq, device=call.device)[rows].view(-1, 1)
            j = torch.arange(nk, device=call.device)[cols].view(1, -1)
            b, h = (torch.full((1, 1, 1, 1), n, device=call.device) for n in (self.batch, self.head))

            def cells(rule: Rule) -> Tensor:
                values: Tensor = rule.bind(nq, nk, call.device, self.lse.dtype)(b, h, i, j)
                return values.reshape(values.shape[-2:])

            s = scaled
            if call.softcap is not None:
                s = s.div_(call.softcap).tanh_().mul_(call.softcap)
            if call.bias is not None:
                s = s + cells(call.bias)
            if call.mask is not None:
                s = s.masked_fill(~cells(call.mask), -inf)
            return s


class StoredHead:
    """Weights of one head that the model computed itself, (Nq, Nk)."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.sizes: Span = (weights.shape[0], weights.shape[1])

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols), in fp32 or wider."""
        part = self.weights[rows][:, cols]
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)

    def row(self, i: int) -> Tensor:
        """The weights of query i, (Nk,)."""
        return self.tile(slice(i, i + 1), slice(None))[0]


class BlockWeights:
    """Weights of several calls as one matrix: their queries one below the other, 0 for keys that a call does not have.

    parts: of each call of a generation, or of each window.  first: number of each part's first key.
    """

    def __init__(self, parts: Sequence[HeadWeights], first: Sequence[int]) -> None:
        self.parts, self.first = parts, first
        *self.starts, nq = accumulate((part.sizes[0] for part in parts), initial=0)
        self.sizes: Span = (nq, max(start + part.sizes[1] for start, part in zip(first, parts, strict=True)))

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols)."""
        queries, keys = torch.arange(self.sizes[0])[rows], torch.arange(self.sizes[1])[cols]
        owner = torch.bucketize(queries, torch.tensor(self.starts), right=True) - 1  # which part a query is of
        whole = torch.zeros(len(queries), len(keys))
        for n in sorted(set(owner.tolist())):
            part, mine = self.parts[n], owner == n
            there = (keys >= self.first[n]) & (keys < self.first[n] + part.sizes[1])
            if bool(there.any()):
                tile = part.tile(queries[mine] - self.starts[n], keys[there] - self.first[n]).cpu()
                whole = whole.to(torch.promote_types(whole.dtype, tile.dtype))  # fp64 where logits are large
                whole[mine.nonzero(), there.nonzero().view(1, -1)] = tile.to(whole.dtype)
        return whole

    def row(self, i: int) -> Tensor:
        """The weights of query i, (Nk,)."""
        n = bisect_right(self.starts, i) - 1
        row = self.parts[n].row(i - self.starts[n]).cpu()
        whole = row.new_zeros(self.sizes[1])
        whole[self.first[n] : self.first[n] + len(row)] = row
        return whole


HeadWeights: TypeAlias = ComputedHead | StoredHead | BlockWeights


def one_head(weights: Weights, head: int, batch: int = 0) -> HeadWeights:
    """The exact weights of one head of one batch row."""
    if isinstance(weights, ComputedWeights):
        return ComputedHead(weights, head, batch)
    if isinstance(weights, StoredWeights):
        return StoredHead(weights.weights[batch, head])
    assert isinstance(weights, AssembledWeights)
    rows = [batch if moved is None else moved[batch] for moved in weights.rows]
    parts = [one_head(p, head, min(b, p.sizes[0] - 1)) for p, b in zip(weights.parts, rows, strict=True)]
    return BlockWeights(parts, weights.first)


def head_of(layer: Layer, head: int) -> HeadWeights:
    """The exact weights of one head of a layer that has them; windows lie along the diagonal."""
    weights, windows = layer.view.weights, range(layer.windows)
    assert weights is not None
    if layer.windows == 1:
        return one_head(weights, head)
    return BlockWeights([one_head(weights, head, w) for w in windows], [w * layer.view.sizes[3] for w in windows])


def pooled_tile(weights: HeadWeights, rows: Span, cols: Span, size: int) -> Tensor:
    """(≤ size, ≤ size) cells: the sum of a cell's weights divided by its number of queries, as in `View.map`.

    rows, cols: [first, end), in range.  size: the most cells each way; a cell is one weight where that is enough.
    """
    (a, b), (c, d) = rows, cols
    heights, widths = (torch.tensor(cell_edges(n, size)).diff() for n in (b - a, d - c))
    cells = torch.zeros(len(heights), len(widths), dtype=torch.float64)
    cell_of_row, cell_of_column = (torch.arange(len(n)).repeat_interleave(n) for n in (heights, widths))
    at_once = max(1, TILE_AT_ONCE // max(1, d - c))
    for i in range(a, b, at_once):
        tile = weights.tile(slice(i, min(i + at_once, b)), slice(c, d)).cpu()  # (r, d − c)
        if tile.shape[1] == len(widths):
            sums = tile.double()
        elif tile.shape[1] % len(widths) == 0:  # equal cells: quicker
            sums = tile.view(len(tile), len(widths), -1).sum(-1, dtype=torch.float64)
        else:
            sums = torch.zeros(len(tile), len(widths), dtype=torch.float64).index_add_(1, cell_of_column, tile.double())
        cells.index_add_(0, cell_of_row[i - a : i - a + len(tile)], sums)
    return (cells / heights[:, None].clamp(min=1)).float()


# -------------------------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, eq=False)
class HeadNumbers:
    """The heads of the first batch entry in numbers, (H,) fp32 on the CPU; None if unknown.

    entropy, effective (1/Σp²): means over the queries that are not padding, of all windows.
    share: the mean weight per query of its window of the key that receives most.
    keys: the first and last of those keys: one, or a bin of them.
    patterns, shares, beside: name → as `regard.lens.patterns.measure` returns them, means over the windows.
    names: the patterns that get at least half of each head's attention, the strongest first.
    rest: for a head that rests on the first token, the pattern that gets half of the remaining attention, or None.
    """

    entropy: Tensor | None
    effective: Tensor | None
    share: Tensor | None
    keys: tuple[Span, ...]
    patterns: dict[str, Tensor]
    shares: dict[str, Tensor]
    beside: dict[str, Tensor]
    names: tuple[tuple[str, ...], ...]
    rest: tuple[str | None, ...]

    def nan(self, head: int) -> bool:
        """Whether one of a head's numbers is NaN, as they are if one of its weights is."""
        known = (self.entropy, self.effective, self.share, *self.patterns.values())
        return any(bool(values[head].isnan()) for values in known if values is not None)


def head_numbers(view: View, windows: int = 1, queries: Layout | None = None) -> HeadNumbers:
    """The numbers of every head of a view on torch with axes (B, H, …).

    windows: the number of first batch rows that belong together, as Swin cuts an image.
    queries: their layout, if known. Padding is left out of means and of received mass; not out of patterns, nor where
    an overview holds only means or the call is large.
    """
    real = None if queries is None or not (queries.kind == "padding").any() else queries.kind != "padding"  # (W, Nq)
    heads = view.sizes[1]
    little = view.weights is not None and view.sizes[0] * heads * view.sizes[2] * view.sizes[3] <= LITTLE
    measured = any(name.startswith("pattern ") for name in view.held)
    tables = view.head_patterns() if measured or little else Patterns({}, {}, {})
    patterns, own, beside = ({name: _plain(values[:windows].mean(0)) for name, values in t.items()} for t in tables)
    shares, others = ({name: values[None] for name, values in t.items()} for t in (own, beside))
    names = label(shares)[0] if shares else [[]] * heads
    rest = label_rest(shares, others)[0] if shares else [None] * heads
    share, keys = _received(view, windows, little, real)
    entropy, effective = (_mean(view, name, windows, little, real) for name in ("entropy", "effective"))
    labels = tuple(tuple(of_head) for of_head in names)
    return HeadNumbers(entropy, effective, share, keys, patterns, own, beside, labels, tuple(rest))


def _mean(view: View, name: str, windows: int, little: bool, real: NDArray[np.bool_] | None) -> Tensor | None:
    by_query = name not in view.pooled and (name in view.held or little)
    if real is not None and by_query:
        values = getattr(view, name)[:windows]  # (W, H, Nq)
        counted = torch.from_numpy(real)[:, None].to(values.device).expand_as(values)
        if "lse" in view.held and "lse" not in view.pooled:  # a row that sees nothing has no entropy
            counted = counted & (view.lse[:windows] != -torch.inf)
        return _plain(torch.where(counted, values, 0.0).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1))
    known = f"mean {name}" in view.held or (name in view.held and name not in view.pooled)
    return _plain(view.mean(name)[:windows].mean(0)) if known or (little and name not in view.held) else None


def _received(
    view: View, windows: int, little: bool, real: NDArray[np.bool_] | None
) -> tuple[Tensor | None, tuple[Span, ...]]:
    _, _, nq, nk = view.sizes
    if 0 in (nq, nk) or not ("received" in view.held or little):
        return None, ()
    counts = torch.full((windows,), nq)
    if real is not None and little:
        received, counts = received_from(view, 0, real), torch.from_numpy(real.sum(1)).clamp(min=1)
    else:
        received = view.received[:windows]  # (W, H, keys), or (W, H, bins) of means where they are pooled
    bins = received.shape[-1]
    edges = cell_edges(nk, bins)
    best, at = received.transpose(0, 1).flatten(1).max(-1)  # (H,)
    places = [divmod(place, bins) for place in at.tolist()]
    shares = _plain(best) / counts[[w for w, _ in places]]
    return shares, tuple((w * nk + edges[c], w * nk + edges[c + 1] - 1) for w, c in places)


def _plain(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32)


# --------------------------------------------------------------------------------------------------------- ranked links


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

    Args:
        session: for its tokens.
        layers: of the session, if they have no `obstacle`.
        count: the most links to return.
        head: rank this head only.
        queries: positions of the queries; default all.
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


# ------------------------------------------------------------------------------------------------- where a page opens


def opening_of(session: Session) -> Opening | None:
    """Where a page of the session opens: its own `opening`, or else the strongest link; None if nothing is known.

    With images it is the last layer that looks at one, and cls or the last word, in the head where that token gives a
    patch most beyond the patch's mean.
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
