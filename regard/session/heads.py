"""The heads of a capture: their layers, exact weights and numbers; small maps of all of them, and one link in each.

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
from regard.lens.measures.weights import ComputedWeights, Part, StoredWeights, Weights, as_they_are, exponentials
from regard.lens.overlays import ImagePatches, received_from
from regard.lens.patterns import Patterns, label, label_rest, measure
from regard.lens.view import View
from regard.masks.tiles import cell_edges

if TYPE_CHECKING:
    from regard.session.session import Session

CELLS = 24  # of a thumbnail, each way
FEW = 1 << 24  # weights of a layer of which a thumbnail is made where no map was measured
LITTLE = 1 << 21  # weights of a call that are computed without a request
TILE_AT_ONCE = 1 << 21  # weights in memory while a tile is pooled

Span = tuple[int, int]
Side = Literal["queries", "keys"]


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
        view = run.view.in_torch()
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
        self.weights, self.call, self.head, self.batch = weights, weights.call, head, batch
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
        device, (nq, nk) = self.call.device, self.sizes
        with as_they_are(device):
            i, j = torch.arange(nq, device=device)[rows], torch.arange(nk, device=device)[cols]
            b, h = (torch.full((1, 1, 1, 1), n, device=device) for n in (self.batch, self.head))
            return self.weights.finish(scaled[None, None], (b, h, i.view(-1, 1), j.view(1, -1)))[0, 0]


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

    @property
    def measures(self) -> dict[str, Tensor]:
        """What is known, by name: entropy, effective, received_max (the share) and the patterns."""
        means = {"entropy": self.entropy, "effective": self.effective, "received_max": self.share}
        return {name: values for name, values in means.items() if values is not None} | self.patterns

    def nan(self, head: int) -> bool:
        """Whether one of a head's numbers is NaN, as they are if one of its weights is."""
        return any(bool(values[head].isnan()) for values in self.measures.values())


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


# ---------------------------------------------------------------------------------------------------------------- sinks


class Sink(NamedTuple):
    """Where a head rests.

    pattern: "first" or "delimiter", or None for another key.  key: which one; None for several.
    share: the part of its attention that goes there.
    rest: pattern → its part of the attention that goes elsewhere; empty if unknown.
    """

    pattern: str | None
    key: int | None
    share: float
    rest: dict[str, float]


class WithoutKeys:
    """Weights in which some keys of each head get nothing. out: (H, Nk)."""

    def __init__(self, weights: Weights, out: Tensor) -> None:
        self.weights, self.sizes, self.out = weights, weights.sizes, out

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (B, H, rows, cols)."""
        tile = self.weights.tile(rows, cols)
        return tile.masked_fill(self.out.to(tile.device)[:, None, cols], 0.0)

    def pairs(self, keys: Tensor) -> Tensor:
        """The weight of one key per query, (B, H, Nq)."""
        weights = self.weights.pairs(keys)
        at = keys.to(weights.device).expand_as(weights)
        out = self.out.to(weights.device).expand(len(weights), -1, -1).gather(-1, at.clamp(min=0)) & (at >= 0)
        return weights.masked_fill(out, 0.0)


def sinks_of(layer: Layer, numbers: HeadNumbers) -> tuple[Sink | None, ...]:
    """Where each head of a layer rests: a key, or the delimiters, with at least half of its attention; or None.

    What it does beside that needs exact weights, or is known of the first token alone.
    """
    view, padding = layer.view, layer.view.place.padding
    first = 0 if padding is None else int((~padding[0]).long().argmax())
    whole = layer.windows == 1 and (padding is None or not bool(padding[0].any()))  # column sums count padding too
    sinks: list[Sink | None] = []
    for head, names in enumerate(numbers.names):
        name = names[0] if names else None
        sinks.append(None)
        if name == "first":
            rest = {other: float(values[head]) for other, values in numbers.beside.items()}
            sinks[-1] = Sink(name, first if layer.windows == 1 else None, float(numbers.shares[name][head]), rest)
        elif name in (None, "delimiter") and whole and numbers.shares:
            share = 0.0 if numbers.share is None else float(numbers.share[head])
            if share >= 0.5 and len(set(numbers.keys[head])) == 1:
                sinks[-1] = Sink(None, numbers.keys[head][0], share, {})
            elif name == "delimiter":
                sinks[-1] = Sink(name, None, float(numbers.shares[name][head]), {})
    if whole and view.weights is not None and any(sinks):
        beside = _beside(view, sinks, first)
        rests = [{name: float(values[head]) for name, values in beside.items()} for head in range(len(sinks))]
        sinks = [None if sink is None else sink._replace(rest=rest) for sink, rest in zip(sinks, rests, strict=True)]
    left = [1.0 if sink is None else max(1 - sink.share, 1e-9) for sink in sinks]
    return tuple(
        sink and sink._replace(rest={name: min(1.0, part / other) for name, part in sink.rest.items()})
        for sink, other in zip(sinks, left, strict=True)
    )


def _beside(view: View, sinks: Sequence[Sink | None], first: int) -> dict[str, Tensor]:
    """Pattern → (H,) the share of all attention that goes to its keys, but for those where the head rests."""
    assert view.weights is not None
    out = torch.zeros(view.sizes[1], view.sizes[3], dtype=torch.bool)
    for head, sink in enumerate(sinks):
        if sink is not None and sink.key is not None:
            out[head, sink.key] = True
        elif sink is not None and view.tokens.delimiters is not None:
            out[head] = view.tokens.delimiters[0].cpu()
            out[head, first] = False
    received = view.received.masked_fill(out.to(view.received.device), 0.0) if "received" in view.held else None
    received = None if "received" in view.pooled or view.tokens.delimiters is None else received
    shares = measure(WithoutKeys(view.weights, out), view.place, view.tokens, kind=view.kind, received=received).shares
    return {name: _plain(values[0]) for name, values in shares.items()}


# ---------------------------------------------------------------------------------------------- small maps of all heads


@dataclass(frozen=True, eq=False)
class Thumbnails:
    """The small maps of a layer's heads, (H, ≤ 24, ≤ 24): a cell is the sum of its weights by its number of queries.

    rows, cols: edges of the cells in queries and keys.  exact: whether a cell is one weight.
    With windows they are those of the first one.
    """

    cells: Tensor
    rows: list[int]
    cols: list[int]
    exact: bool


def thumbnails_of(layer: Layer) -> Thumbnails | None:
    """The thumbnails of a layer, from its measured map or its weights; None without either."""
    view = layer.view
    batch, heads, nq, nk = view.sizes
    if 0 in (nq, nk):
        return None
    if "map" in view.held:
        cells = view.map()[0]
    elif view.weights is not None and batch * heads * nq * nk <= FEW:
        cells = view.map(CELLS)[0]
    else:
        return None
    cells = cells.double().cpu()  # (H, r, c)
    rows, cols = (cell_edges(n, m) for n, m in zip((nq, nk), cells.shape[1:], strict=True))
    # Cells are joined, so that each edge is one of the map's: sums stay exact, and 64 cells make 24 of 2 or 3.
    down, across = (cell_edges(len(edges) - 1, CELLS) for edges in (rows, cols))
    queries = torch.tensor(rows).diff().double()
    joined = _summed(cells * queries[:, None], down, 1) / _summed(queries, down, 0)[:, None]
    rows, cols = [rows[edge] for edge in down], [cols[edge] for edge in across]
    return Thumbnails(_summed(joined, across, 2).float(), rows, cols, max(nq, nk) <= CELLS)


def _summed(values: Tensor, edges: list[int], axis: int) -> Tensor:
    parts = torch.tensor(edges).diff()
    sums = values.new_zeros(*values.shape[:axis], len(parts), *values.shape[axis + 1 :])
    return sums.index_add_(axis, torch.arange(len(parts)).repeat_interleave(parts), values)


# --------------------------------------------------------------------------------------------------- grids of an image


@dataclass(frozen=True, eq=False)
class PatchCells:
    """The patches of one image in at most 24 × 24 cells.

    rows, columns: (r, 2) and (c, 2) first and last edge of each in the image, as fractions of its sides.
    tokens: (P, 2) window and index of each patch.  cell: (P,) which cell, row · columns + column, it is in.
    """

    image: int
    rows: NDArray[np.float64]
    columns: NDArray[np.float64]
    tokens: NDArray[np.int64]
    cell: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """(W, H, Nk) → (H, r, c) the sum of the patches of each cell."""
        patches = values[self.tokens[:, 0], :, self.tokens[:, 1]]  # (P, H)
        sums = patches.new_zeros(len(self.rows) * len(self.columns), patches.shape[1]).index_add_(0, self.cell, patches)
        return sums.T.reshape(-1, len(self.rows), len(self.columns))


def patch_cells(layer: Layer) -> Iterator[PatchCells]:
    """The patches among a layer's keys, in cells, image by image."""
    for number, frame in enumerate(() if layer.sides is None else layer.sides.frames):
        assert layer.sides is not None
        patches = ImagePatches(layer.sides.keys, frame, number)
        if not len(patches.tokens):
            continue
        size, sides, cell = frame.image_size, [], torch.zeros(len(patches.tokens), dtype=torch.int64)
        for axis in (0, 1):
            rank = patches.cells[:, axis]
            edges = cell_edges(int(rank.max()) + 1, CELLS)
            group = np.searchsorted(edges, rank, side="right") - 1  # (P,)
            first, last = patches.boxes[:, axis] / size[axis], patches.boxes[:, axis + 2] / size[axis]
            groups = [group == n for n in range(len(edges) - 1)]
            sides.append(np.array([[first[mine].min(), last[mine].max()] for mine in groups]))
            cell = cell * len(groups) + torch.from_numpy(group)
        yield PatchCells(number, sides[0], sides[1], patches.tokens, cell)


def received_in_image(layer: Layer) -> list[tuple[PatchCells, Tensor]]:
    """By image: what each cell of patches receives of a query on average, (H, r, c); [] if that is unknown."""
    view = layer.view
    if "received" not in view.held or "received" in view.pooled or layer.sides is None:
        return []
    share = view.received[: layer.windows].float().cpu() / max(1, view.sizes[2])  # (W, H, Nk)
    return [(cells, cells.sums(share)) for cells in patch_cells(layer)]


# ------------------------------------------------------------------------------------------------- one query, all heads


def place_in(layer: Layer, other: Layer, token: int, side: Side) -> int | None:
    """The number in `other` of a query or key of `layer`: the same token, or the patch at the same place; or None."""
    axis = 0 if side == "queries" else 1
    if layer.sides is not None and other.sides is not None:
        ours: Layout = getattr(layer.sides, side)
        theirs: Layout = getattr(other.sides, side)
        if ours == theirs:
            return token
        window, index = divmod(token, ours.shape[1])
        kind, image = str(ours.kind[window, index]), int(ours.image[window, index])
        if kind != "patch":
            alike = np.argwhere((theirs.kind == kind) & (theirs.image == image))
            return int(alike[0] @ (theirs.shape[1], 1)) if kind == "cls" and len(alike) == 1 else None
        if layer.sides.frames != other.sides.frames:
            return None
        top, left, bottom, right = ours.box[window, index]
        try:
            w, i = theirs.at((top + bottom) / 2, (left + right) / 2, image)
        except LookupError:
            return None
        return int(w * theirs.shape[1] + i)
    if layer.sides is not None or other.sides is not None:
        return None
    if layer.start is not None and other.start is not None:
        token += layer.start - other.start if side == "queries" else 0
        return token if 0 <= token < other.sizes[axis] else None
    return token if (layer.view.kind, layer.sizes) == (other.view.kind, other.sizes) else None


def layer_row(layer: Layer, token: int) -> Tensor | None:
    """The row of a query in all heads of a layer, (W, H, Nk), 0 in other windows; None without exact weights."""
    view = layer.view
    window, i = divmod(token, max(1, view.sizes[2]))
    if view.weights is not None:
        row = view.row(i)
    elif "map" in view.held and view.how("map") == "exact":
        row = view.map()[:, :, i]
    else:
        return None
    rows: Tensor = row[: layer.windows].float().cpu()
    return rows if layer.windows == 1 else rows * (torch.arange(layer.windows) == window).view(-1, 1, 1)


def link_weights(session: Session, token: int, key: int, layer: int) -> Tensor:
    """The weight of a link in every head, (layers, most heads); NaN where a layer has no such link, or it is unknown.

    layer: the one that token and key are counted in.
    """
    source, most = session.layers[layer], max(one.view.sizes[1] for one in session.layers)
    weights = torch.full((len(session.layers), most), float("nan"))
    for other in session.layers:
        query, to = place_in(source, other, token, "queries"), place_in(source, other, key, "keys")
        row = None if query is None or to is None else layer_row(other, query)
        if row is not None:
            window, j = divmod(to or 0, other.view.sizes[3])
            weights[other.index, : row.shape[1]] = row[window, :, j]
    return weights
