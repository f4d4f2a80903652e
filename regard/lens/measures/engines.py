"""The measuring pass: the torch engine for any device, mask, bias or dtype, and the choice of Triton where it can.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys); b, h, r, c are those of one tile.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from functools import cache
from math import inf, isqrt, nan, prod
from typing import Self, TypeVar

import torch
from torch import Tensor

from regard.backends import choose, sdpa
from regard.backends.call import Call
from regard.devices import no_triton
from regard.lens.measures.measures import MEASURES, MeasureOptions, Pool, Sizes, TilePlace, WeightTile
from regard.lens.measures.weights import (
    LOG2E,
    ComputedWeights,
    StoredWeights,
    Weights,
    as_they_are,
    exponentials,
    is_large,
    sources,
)
from regard.masks import EMPTY, FULL, DenseMask, Mask
from regard.masks.biases import Bias, DenseBias
from regard.masks.mask import IndexRule

TILE_CELLS = 1 << 19  # of all the heads in a tile together: 2 MiB in fp32, two heads' 512×512
GPU_TILE_CELLS = 1 << 25  # a GPU wants work by the launch, not what fits a cache
SHARED_CELLS = 1 << 20  # of a pass that several threads share: less takes them as long to begin as to do

NEVER = -1e38
"""log₂ of the weight of a hidden key: 2 to this is 0, and 0 times it is 0."""

T = TypeVar("T")
S = TypeVar("S", bound="_Source")


# ---------------------------------------------------------------------------------------------------------- entrances


def forward(call: Call, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The output (B, H, Nq, Dv) of `regard.attention` for a call without empty axes, and lse (B, H, Nq), detached."""
    chosen = choose(call, backend)
    with torch.autocast(call.device.type, enabled=False):  # as attention does: in the dtype that came in
        output, lse = chosen.forward_with_lse(call)
        if chosen is sdpa:
            return output, exact_lse(call.in_torch(), lse)
        return torch.as_tensor(output), torch.as_tensor(lse).detach()


def exact_lse(call: Call, lse: Tensor | None) -> Tensor:
    """The lse that a torch kernel returned, or one from a pass of our own where it returned none or is too coarse.

    On a CPU, in half precision, torch's kernel takes a quick exponential: its output does not show it, but its lse is
    off by 5e-5, and all the weights of a row with it.
    """
    coarse = call.device.type == "cpu" and call.q.dtype.itemsize < 4
    return lse_of(call) if lse is None or coarse else lse


def measure(call: Call, lse: Tensor, wanted: MeasureOptions) -> tuple[dict[str, Tensor], str]:
    """The measures of a call on torch tensors, "lse", and the engine that ran: "triton" or "torch (why)".

    "lse" is the one that the weights were computed with: the argument (B, H, Nq), or, where that is large, an fp64 lse
    of fp64 scores, for `ComputedWeights`.
    """
    if call.device.type == "cpu":
        return measure_in_torch(call, lse, wanted), "torch"
    reason = no_triton() if call.device.type == "cuda" else f"q is on {call.device.type}"
    if reason is None:
        from regard.lens.measures import gpu  # needs triton

        if (reason := gpu.unsupported_reason(call, wanted)) is None:
            return gpu.measure(call, lse, wanted), "triton"
    return measure_in_torch(call, lse, wanted), f"torch ({reason})"


def measure_weights(weights: Weights, wanted: MeasureOptions) -> dict[str, Tensor]:
    """The measures of any exact weights. Raises LookupError for "max_logit" if the scores were not kept."""
    if isinstance(weights, ComputedWeights):
        results, _ = measure(weights.call, weights.lse, wanted)
        del results["lse"]  # a view has one already, which may be of other scores: see `raise_rows`
        return results
    if "max_logit" in wanted.names and not (isinstance(weights, StoredWeights) and weights.scores is not None):
        raise LookupError("max_logit needs the scores, which were not kept")
    if isinstance(weights, StoredWeights):
        return measure_given(weights, wanted)
    return measure_tiles(weights, wanted)


# ------------------------------------------------------------------------------------------------------- torch engine


def measure_in_torch(call: Call, lse: Tensor, wanted: MeasureOptions) -> dict[str, Tensor]:
    """The measures of a call and "lse", as `measure`; lse is −∞ where a row sees nothing."""
    with as_they_are(call.device):
        if call.wide == torch.float64 or not is_large(lse):
            lse = lse.to(call.wide)
            return {"lse": lse} | _measure(_of_call(call, lse, wanted), lse, call.sinks, wanted)
        lse = lse if lse.dtype == torch.float64 else lse_of(call, torch.float64)
        return {"lse": lse} | _rounded(_measure(_FromCall(call, lse), lse, call.sinks, wanted), call.wide)


def measure_given(weights: StoredWeights, wanted: MeasureOptions) -> dict[str, Tensor]:
    """The measures of weights that a model computed itself, and "lse" where the scores are known."""
    scores, wide = weights.scores, torch.promote_types(weights.weights.dtype, torch.float32)
    if scores is None:
        return measure_tiles(weights, wanted)
    with as_they_are(scores.device):
        lse = scores.to(wide).logsumexp(-1)
        if is_large(lse):
            lse = scores.double().logsumexp(-1)
        sinks = scores[..., -1] if scores.shape[-1] > weights.sizes[3] else None
        source = _FromScores(scores, weights.weights, lse.dtype)
        return _rounded({"lse": lse} | _measure(source, lse, sinks, wanted), wide)


def measure_tiles(weights: Weights, wanted: MeasureOptions) -> dict[str, Tensor]:
    """The measures, except "max_logit", of exact weights whose scores are not known."""
    like = weights.tile(slice(0, 0), slice(0, 0))
    with as_they_are(like.device):
        results = _measure(_FromTiles(weights), like.new_zeros(weights.sizes[:3]), None, wanted)
        if not any(isinstance(source, StoredWeights) and source.edited for source in sources(weights)):
            return results
        # Edited weights: NaN where a row is no distribution, and links with their own sign.
        batch, heads, nq, nk = weights.sizes
        per_row = {"entropy", "effective"} & results.keys()
        if per_row and 0 not in weights.sizes:
            rounding = max(source.rounding for source in sources(weights))
            for rows in _cut(nq, max(1, TILE_CELLS // (batch * heads * nk))):
                p = weights.tile(rows, slice(None))
                empty = (p == 0).all(-1)
                wrong = (p < 0).any(-1) | ~(empty | ((p.sum(-1) - 1).abs() <= rounding))
                for name in per_row:
                    results[name][:, :, rows].masked_fill_(wrong, nan)
        if "top_key" in results:
            links = [weights.pairs(key) for key in results["top_key"].unbind(-1)]
            results["top_weight"] = torch.stack(links, -1).to(results["top_weight"].dtype)
        return results


def lse_of(call: Call, wide: torch.dtype | None = None) -> Tensor:
    """Each row's lse (B, H, Nq) by a pass of its own, in the dtype `wide`; −∞ where nothing is seen."""
    with as_they_are(call.device):
        peak = torch.full(call.sizes[:3], -inf, dtype=wide or call.wide, device=call.device)
        total = torch.zeros_like(peak)
        if call.sinks is not None:  # a key seen before all others
            sinks = call.sinks.detach().to(peak)
            peak.copy_(sinks if sinks.ndim == 3 else sinks[:, None])
            total.fill_(1.0)

        def add(source: _FromCall, at: TilePlace) -> None:
            s = source.scores(at)
            before, sum_before = peak[at.queries], total[at.queries]
            higher = torch.maximum(before, s.amax(-1) * source.unit)
            floor = torch.where(higher == -inf, 0.0, higher)  # nothing seen so far: every exponential is 0
            torch.add(-floor.unsqueeze(-1), s, alpha=source.unit, out=s)
            grown = exponentials(s, out=s).sum(-1)
            sum_before.mul_(torch.exp(before - floor)).add_(grown)
            before.copy_(higher)

        if 0 not in call.sizes:
            _walk(_FromCall(call, total), add)
        return torch.where(peak == -inf, -inf, peak + total.log())


def _rounded(results: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in results.items()}


def _measure(source: _Source, lse: Tensor, sinks: Tensor | None, wanted: MeasureOptions) -> dict[str, Tensor]:
    measures = [MEASURES[name](source.sizes, lse, wanted) for name in sorted(wanted.names)]
    pools: dict[tuple[int, int], Pool] = {}  # by axis and first position: tiles share them

    def pool(part: slice, axis: int) -> Pool:
        if (axis, part.start) not in pools:
            pools[axis, part.start] = Pool(part, source.sizes[axis], wanted.size, lse)
        return pools[axis, part.start]

    def add(source: _Source, at: TilePlace) -> None:
        tile = source.tile(at)
        if "map" in wanted.names:
            tile.row_pool, tile.col_pool = pool(at.rows, 2), pool(at.cols, 3)
        for each in measures:
            each.add(tile)

    if 0 not in source.sizes:
        _walk(source, add)
    return {k: v for each in measures for k, v in each.result(lse, sinks).items()}


def _walk(source: S, add: Callable[[S, TilePlace], None]) -> None:
    """Add all visible tiles, on several threads where there are heads enough: their sums do not overlap."""
    groups = source.groups()
    threads = min(source.threads, len(groups))

    def begin() -> Callable[[tuple[slice, slice]], None]:
        own = source if threads == 1 else source.apart()

        def step(group: tuple[slice, slice]) -> None:
            for at in own.tiles(*group):
                add(own, at)

        return step

    if threads > 1:
        share_out(groups, begin, threads)
        return
    step = begin()
    for group in groups:
        step(group)


# -------------------------------------------------------------------------------------------------------------- tiles


class _Source(ABC):
    """A call cut into tiles, and which of its batch rows and heads are walked together."""

    divisible = True  # several threads may ask for tiles at the same time

    def __init__(self, sizes: Sizes, device: torch.device, mask: Mask | None) -> None:
        self.sizes, self.device = sizes, device
        batch, heads, nq, nk = sizes
        self.threads = _threads_for(sizes) if device.type == "cpu" and self.divisible else 1
        cells = TILE_CELLS if device.type == "cpu" else GPU_TILE_CELLS
        of_one = max(1, cells // 2)  # two heads' tiles in one product are quicker than one head's of twice the size
        cols = min(nk, of_one // max(1, min(nq, isqrt(of_one))))
        rows = min(nq, of_one // max(1, cols))
        together = cells // max(1, rows * cols)
        self.size = rows, cols
        if self.threads > 1:  # small enough for each thread to get several
            together = max(1, min(together, batch * heads // (4 * self.threads)))
        self.heads_at_once, self.rows_at_once = min(heads, together), min(batch, max(1, together // max(1, heads)))
        self.kinds = None if mask is None or 0 in sizes else mask.tiles(nq, nk, self.size, device).cpu()

    @abstractmethod
    def tile(self, at: TilePlace) -> WeightTile:
        """The tile with its weights."""

    def apart(self) -> Self:
        """The same source for another thread, with tile memory of its own where it has some."""
        return self

    def groups(self) -> list[tuple[slice, slice]]:
        """Batch rows and heads that are walked together."""
        batch, heads, _, _ = self.sizes
        return [(b, h) for b in _cut(batch, self.rows_at_once) for h in _cut(heads, self.heads_at_once)]

    def tiles(self, batch: slice, heads: slice) -> Iterator[TilePlace]:
        """The visible tiles of some batch rows and heads."""
        kinds: list[list[list[int]]] | None = None  # the least and the most visible kind of each tile
        if self.kinds is not None:
            part = _part(self.kinds, (batch, heads))
            kinds = torch.stack([part.amin((0, 1)), part.amax((0, 1))], -1).tolist()
        for r, rows in enumerate(_cut(self.sizes[2], self.size[0])):
            for c, cols in enumerate(_cut(self.sizes[3], self.size[1])):
                low, high = (FULL, FULL) if kinds is None else kinds[r][c]
                if high != EMPTY:
                    yield TilePlace(batch, heads, rows, cols, masked=low != FULL)


class _FromCall(_Source):
    """Weights computed from q, k and lse, in the dtype of lse.

    Scores are in units of `unit`: where nothing is added to them they stay products of q and k, and the scale is
    applied together with what comes next, at no cost. A scale that is not positive goes into q.
    """

    def __init__(self, call: Call, lse: Tensor) -> None:
        super().__init__(call.sizes, call.device, call.mask)
        _, _, nq, nk = call.sizes
        self.call, self.group = call, call.sizes[1] // max(1, call.k.shape[1])
        self.wide = torch.promote_types(call.wide, lse.dtype)
        self.unit = call.scale if call.scale > 0 and call.softcap is None and call.bias is None else 1.0
        self.q: Tensor = call.q.detach()
        self.k: Tensor = call.k.detach()
        # e^(−∞ − 0) = 0 where nothing is seen
        self.minus_lse = torch.where(lse == -inf, 0.0, -lse).to(self.wide).unsqueeze(-1)
        self.see = None if call.mask is None else call.mask.bind(nq, nk, call.device, self.wide)
        self.term = None if call.bias is None else call.bias.bind(nq, nk, call.device, self.wide)
        self._allocate()

    def _allocate(self) -> None:
        cells = prod(self.size) * self.heads_at_once * self.rows_at_once
        self.space = torch.empty(4, cells, dtype=self.wide, device=self.device)
        self.buffers: dict[tuple[int, ...], Sequence[Tensor]] = {}

    def apart(self) -> Self:
        other = copy(self)
        other._allocate()
        return other

    def tile(self, at: TilePlace) -> WeightTile:
        """s, t = s − lse and p = e^t."""
        s = self.scores(at)
        _, t, p, scratch = self._tile_buffers(s.shape)
        torch.add(self.minus_lse[at.queries], s, alpha=self.unit, out=t)
        if at.masked or self.term is not None:  # a bias, too, may hold −∞
            t.clamp_(min=torch.finfo(t.dtype).min)
        return WeightTile(at, s, t, exponentials(t, out=p), scratch, unit=self.unit)

    def scores(self, at: TilePlace) -> Tensor:
        """The scores (b, h, r, c) in units of `unit`, −∞ where hidden; the next call overwrites them."""
        call = self.call
        q, k = self.q[at.queries].to(self.wide), self._keys(at).to(self.wide)
        rest = call.scale / self.unit
        if rest <= 0:
            q, rest = q * rest, 1.0
        s = torch.matmul(q, k.mT, out=self._tile_buffers((*q.shape[:3], k.shape[2]))[0])
        if call.softcap is not None:
            s.mul_(rest / call.softcap).tanh_().mul_(call.softcap)
            rest = 1.0
        if call.bias is not None and self.term is not None:
            torch.add(self._read(call.bias, self.term, at), s, alpha=rest, out=s)
        if at.masked and call.mask is not None and self.see is not None:
            s.masked_fill_(~self._read(call.mask, self.see, at), -inf)
        return s

    def _keys(self, at: TilePlace) -> Tensor:
        """The keys that these heads read, (b, 1 or h, c, D)."""
        first, last = at.heads.start // self.group, (at.heads.stop - 1) // self.group
        k = self.k[at.batch, first : last + 1, at.cols]
        return k if first == last or self.group == 1 else k[:, _range(at.heads, self.device) // self.group - first]

    def _tile_buffers(self, shape: tuple[int, ...]) -> Sequence[Tensor]:
        """Four tensors in the same memory for every tile: fresh memory would cost page faults."""
        if shape not in self.buffers:
            self.buffers[shape] = self.space[:, : prod(shape)].view(4, *shape).unbind()
        return self.buffers[shape]

    def _read(self, rule: Mask | Bias, bound: IndexRule, at: TilePlace) -> Tensor:
        """The cells of a mask or bias in a tile: a view of dense ones, else computed."""
        place = (*at.queries, at.cols)
        if isinstance(rule, DenseMask):
            return _part(rule.cells.to(self.device), place)
        if isinstance(rule, DenseBias):
            return _part(rule.cells.to(self.device), place).to(self.wide)
        b, h, i, j = (_range(x, self.device) for x in place)
        cells: Tensor = bound(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), j)
        return cells


def _of_call(call: Call, lse: Tensor, wanted: MeasureOptions) -> _FromCall:
    """The source with the fewest passes over a tile that has what is wanted; lse is not large."""
    plain = call.softcap is None and call.bias is None and call.scale > 0 and lse.dtype == torch.float32
    # "top" tells equal scores from others, and a product with the scale in it rounds them apart.
    if plain and "top" not in wanted.names and call.device.type == "cpu":
        return _FromProducts(call, lse)
    return _FromCall(call, lse)


class _FromProducts(_FromCall):
    """Weights whose logarithms are products: (q·scale·log₂e, −lse·log₂e)·(k, 1) = log₂ p, with no pass over the tile.

    −lse is added last, as it would be after a product of q and k alone. For fp32 and rows that are not large.
    """

    def __init__(self, call: Call, lse: Tensor) -> None:
        super().__init__(call, lse)
        self.band = None if call.mask is None else call.mask.band(*call.sizes[2:])
        self.bits: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # alike for the tiles along a diagonal

    def _allocate(self) -> None:
        super()._allocate()
        self.rows: tuple[tuple[slice, slice, slice] | None, Tensor] = None, self.q

    def tile(self, at: TilePlace) -> WeightTile:
        """t = log₂ p, and p = 2^t."""
        q, k = self._with_lse(at), self._keys(at).to(self.wide)
        t, p, scratch, _ = self._tile_buffers((*q.shape[:3], k.shape[2]))
        torch.matmul(q, torch.cat([k, k.new_ones(*k.shape[:3], 1)], -1).mT, out=t)
        if at.masked and self.call.mask is not None and self.see is not None:
            if self.band is None:
                t.masked_fill_(~self._read(self.call.mask, self.see, at), NEVER)
            else:
                kept, never = self._bits(at)  # a seventh of what masked_fill_ takes, and no NaN of a hidden key stays
                t.view(torch.int32).bitwise_and_(kept).bitwise_or_(never)
        return WeightTile(at, None, t, torch.exp2(t, out=p), scratch, t_unit=1 / LOG2E)

    def _bits(self, at: TilePlace) -> tuple[Tensor, Tensor]:
        """All bits where visible, and those of `NEVER` where hidden, (r, c), of a mask that depends on j − i alone."""
        assert self.call.mask is not None
        assert self.see is not None
        place = at.cols.start - at.rows.start, at.rows.stop - at.rows.start, at.cols.stop - at.cols.start
        if place not in self.bits:
            seen = self._read(self.call.mask, self.see, at)
            seen = seen.reshape(seen.shape[-2:])
            never = torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, NEVER).view(torch.int32)
            self.bits[place] = -seen.to(torch.int32), never
        return self.bits[place]

    def _with_lse(self, at: TilePlace) -> Tensor:
        """A tile's queries, scaled, with −lse as one more column: (b, h, r, D + 1), kept for the tiles beside it."""
        if self.rows[0] != at.queries:
            q = self.q[at.queries].to(self.wide) * (self.call.scale * LOG2E)
            self.rows = at.queries, torch.cat([q, self.minus_lse[at.queries] * LOG2E], -1)
        return self.rows[1]


class _FromScores(_Source):
    """Stored weights with their scores."""

    def __init__(self, scores: Tensor, weights: Tensor, wide: torch.dtype) -> None:
        batch, heads, nq, nk = weights.shape
        super().__init__((batch, heads, nq, nk), weights.device, None)
        self.s, self.p, self.wide = scores, weights, wide

    def tile(self, at: TilePlace) -> WeightTile:
        part = (*at.queries, at.cols)
        s, p = self.s[part].to(self.wide), self.p[part].to(self.wide)
        t = p.log().clamp_(min=torch.finfo(self.wide).min)
        return WeightTile(at, s, t, p, torch.empty_like(t))


class _FromTiles(_Source):
    """Any exact weights, all batch rows and heads at once; ln p stands for the scores."""

    divisible = False

    def __init__(self, weights: Weights) -> None:
        self.source = weights
        batch, heads, _, _ = weights.sizes
        super().__init__(weights.sizes, weights.tile(slice(0, 0), slice(0, 0)).device, None)
        together = self.heads_at_once * self.rows_at_once
        rows = max(1, self.size[0] * together // max(1, heads * batch))
        self.size, self.heads_at_once, self.rows_at_once = (rows, self.size[1]), max(1, heads), max(1, batch)

    def tile(self, at: TilePlace) -> WeightTile:
        p = self.source.tile(at.rows, at.cols)
        s = p.abs().log()  # edited weights may be negative
        t = s.clamp(min=torch.finfo(s.dtype).min)
        return WeightTile(at, s, t, p, torch.empty_like(t))


def _part(x: Tensor, place: tuple[slice, ...]) -> Tensor:
    """The part of a tensor at `place`; its axes of size 1 are shared and stay."""
    every = slice(None)
    return x[tuple(every if n == 1 else s for n, s in zip(x.shape, place, strict=False))]


def _cut(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, max(1, size))]


def _range(part: slice, device: torch.device) -> Tensor:
    return torch.arange(part.start, part.stop, device=device)


# ------------------------------------------------------------------------------------------------------------ threads


def _threads_for(sizes: Sizes) -> int:
    """All threads; or one, with torch splitting each operation, where cells or heads are too few to share."""
    batch, heads, nq, nk = sizes
    threads = available()
    return threads if batch * heads * nq * nk >= SHARED_CELLS and 2 * batch * heads >= threads else 1


@cache
def _by_openmp() -> bool:
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


def available() -> int:
    """How many threads a pass may use: torch's, if it counts them per thread, as with OpenMP; else 1."""
    return torch.get_num_threads() if _by_openmp() else 1


def share_out(units: Iterable[T], begin: Callable[[], Callable[[T], None]], threads: int) -> None:
    """Process all units on several threads, each of which takes the next one that is left.

    `begin` is called once per thread and returns what is called with each of its units. Both run without gradient, in
    inference mode if the caller is. An error of either is raised once all threads have stopped.
    """
    left, inference = deque(units), torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            step = begin()
            while left:
                try:
                    unit = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                step(unit)

    pool = _pool(max(threads, available()))
    running = [pool.submit(work) for _ in range(threads)]
    try:
        for each in running:
            each.result()
    except BaseException:
        left.clear()
        wait(running)
        raise


_setting = threading.Lock()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that are kept: a new one costs as much as a small tile does."""
    return ThreadPoolExecutor(threads, "regard", _run_on_one_core)


def _run_on_one_core() -> None:
    """Keep torch from splitting the operations of this new thread.

    torch keeps the number for each thread and, beside it, the last number that was set, with which new threads begin:
    another thread puts that back at once.
    """
    with _setting:
        before = torch.get_num_threads()
        ready, done = threading.Event(), threading.Event()

        def put_back() -> None:
            ready.set()
            done.wait()
            torch.set_num_threads(before)

        other = threading.Thread(target=put_back)
        other.start()
        ready.wait()
        torch.set_num_threads(1)
        done.set()
        other.join()


def _after_fork_in_child() -> None:
    """The child has none of the threads."""
    global _setting
    _setting = threading.Lock()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
