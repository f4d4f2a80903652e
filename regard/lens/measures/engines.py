"""Selects the engine that measures a call: Triton on CUDA where it can, else torch."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from functools import cache
from math import inf, isqrt, nan, prod
from typing import Self, TypeVar

import torch
from torch import Tensor

from regard.backends import choose, sdpa
from regard.backends.call import Call
from regard.devices import no_triton
from regard.lens.measures.measures import MEASURES, MeasureOptions, Pool, Sizes, WeightTile
from regard.lens.measures.weights import (
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
from regard.masks.rules import IndexRule

T = TypeVar("T")


def available() -> int:
    """How many threads a pass on this thread may use: as many as torch would.

    >>> available() <= torch.get_num_threads()
    True
    """
    return torch.get_num_threads() if _by_openmp() else 1


@cache
def _by_openmp() -> bool:
    """Does torch keep the number of its threads for each thread apart? Where it has a pool of its own it does not."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


def share_out(units: Iterable[T], begin: Callable[[], Callable[[T], None]], threads: int) -> None:
    """Work off all units on so many threads, each of which takes the next one that is left.

    >>> found: list[int] = []
    >>> share_out([3, 1, 2], lambda: found.append, threads=2)
    >>> sorted(found)
    [1, 2, 3]

    begin: called once on each thread; gives what is called with each of its units. Both run without gradient, in
        inference mode if the caller is.
    Raises what one of them raises, when all threads have stopped.
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

    running = _THREADS.start(work, threads)
    try:
        for each in running:
            each.result()
    except BaseException:
        left.clear()
        wait(running)
        raise


class _Threads:
    """The threads there are. They are kept: a new one costs as much as a small tile does."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked process must, which has none of them."""
        self.lock, self.setting, self.count = threading.Lock(), threading.Lock(), 0
        self.pool: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[], None], count: int) -> list[Future[None]]:
        """Run `work` on so many threads."""
        with self.lock:
            if self.count < count:
                if self.pool is not None:
                    self.pool.shutdown(wait=False)  # its threads end when they have done what they were given
                self.pool, self.count = ThreadPoolExecutor(count, "regard", _run_on_one_core), count
            assert self.pool is not None
            return [self.pool.submit(work) for _ in range(count)]


_THREADS = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_THREADS.forget)


def _run_on_one_core() -> None:
    """Let the operations of this thread, which is new, not be split.

    torch keeps the number for each thread and, beside it, the last number that was set, with which new threads begin:
    another thread puts that back at once.
    """
    with _THREADS.setting:
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


TILE_CELLS = 1 << 19  # of all the heads in a tile together: 2 MiB in fp32, two heads' 512×512
GPU_TILE_CELLS = 1 << 25  # a GPU wants work by the launch, not what fits a cache
SHARED_CELLS = 1 << 20  # of a pass that several threads share: less takes them as long to begin as to do

S = TypeVar("S", bound="_Source")


def measure_in_torch(call: Call, lse: Tensor, wanted: MeasureOptions) -> dict[str, Tensor]:
    """Everything that `wanted` names: name → tensor, see regard.lens.measures.measures; and "lse".

    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> call = prepare(x, x, x)
    >>> measure(call, lse_of(call), MeasureOptions(frozenset(["effective"])))["effective"]
    tensor([[[2., 2.]]])

    call: on torch tensors.
    lse: (B, H, Nq), −∞ where a row sees nothing. Where it is large one of fp64 scores takes its place, in fp64, unless
        it is in fp64 already; what "lse" gives is the one that weights were made with.
    """
    with as_they_are(call.device):
        if call.wide == torch.float64 or not is_large(lse):
            lse = lse.to(call.wide)
            return {"lse": lse} | _measure(_FromCall(call, lse), lse, call.sinks, wanted)
        lse = lse if lse.dtype == torch.float64 else lse_of(call, torch.float64)
        return {"lse": lse} | _rounded(_measure(_FromCall(call, lse), lse, call.sinks, wanted), call.wide)


def measure_given(weights: StoredWeights, wanted: MeasureOptions) -> dict[str, Tensor]:
    """The same measures of weights that a model made itself; scores that hold one key more have a sink's there.

    >>> scores = torch.zeros(1, 1, 1, 4)
    >>> measure_given(StoredWeights(scores.softmax(-1), scores), MeasureOptions(frozenset(["max_logit"])))
    {'lse': tensor([[[1.3863]]]), 'max_logit': tensor([[[0.]]])}

    lse is among them where the scores are known; "max_logit" cannot be told without.
    """
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
    """The same measures of any exact weights, for which scores are not known: all but "max_logit".

    >>> measure_tiles(StoredWeights(torch.full((1, 1, 3, 2), 0.5)), MeasureOptions(frozenset(["received"])))
    {'received': tensor([[[1.5000, 1.5000]]])}
    """
    like = weights.tile(slice(0, 0), slice(0, 0))
    with as_they_are(like.device):
        found = _measure(_FromTiles(weights), like.new_zeros(weights.sizes[:3]), None, wanted)
        if any(isinstance(source, StoredWeights) and source.edited for source in sources(weights)):
            _correct_edited(found, weights)
        return found


def _correct_edited(found: dict[str, Tensor], weights: Weights) -> None:
    """Measures of weights that were edited: NaN where a row is no distribution, and links with their own sign."""
    batch, heads, nq, nk = weights.sizes
    if {"entropy", "effective"} & found.keys() and 0 not in weights.sizes:
        rounding = max(source.rounding for source in sources(weights))
        for rows in _cut(nq, max(1, TILE_CELLS // (batch * heads * nk))):
            p = weights.tile(rows, slice(None))
            empty = (p == 0).all(-1)
            wrong = (p < 0).any(-1) | ~(empty | ((p.sum(-1) - 1).abs() <= rounding))
            for name in {"entropy", "effective"} & found.keys():
                found[name][:, :, rows].masked_fill_(wrong, nan)
    if "top_key" in found:
        links = [weights.pairs(key) for key in found["top_key"].unbind(-1)]
        found["top_weight"] = torch.stack(links, -1).to(found["top_weight"].dtype)


def lse_of(call: Call, wide: torch.dtype | None = None) -> Tensor:
    """Each row's lse (B, H, Nq) by a pass of its own, for calls whose kernel does not say; −∞ where nothing is seen.

    >>> from regard import masks
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> lse_of(prepare(x, x, x, mask=masks.causal(offset=-1)))
    tensor([[[  -inf, 0.0000, 0.6931]]])

    wide: the dtype to compute in; default that of the call's scores.
    """
    with as_they_are(call.device):
        peak = torch.full(call.sizes[:3], -inf, dtype=wide or call.wide, device=call.device)
        total = torch.zeros_like(peak)
        if call.sinks is not None:  # a key seen before all others
            sinks = call.sinks.detach().to(peak)
            peak.copy_(sinks if sinks.ndim == 3 else sinks[:, None])
            total.fill_(1.0)

        def add(source: _FromCall, at: _Place) -> None:
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


def _rounded(found: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers in the dtype that the call's measures have, whatever they were computed in."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in found.items()}


def _measure(source: _Source, lse: Tensor, sinks: Tensor | None, wanted: MeasureOptions) -> dict[str, Tensor]:
    found = [MEASURES[name](source.sizes, lse, wanted) for name in sorted(wanted.names)]
    pools = _Pools(source.sizes, wanted.size, lse) if "map" in wanted.names else None

    def add(source: _Source, at: _Place) -> None:
        tile = source.tile(at)
        if pools is not None:
            tile.row_pool, tile.col_pool = pools.of(at.rows, 2), pools.of(at.cols, 3)
        for each in found:
            each.add(tile)

    if 0 not in source.sizes:
        _walk(source, add)
    return {k: v for each in found for k, v in each.found(lse, sinks).items()}


def _walk(source: S, add: Callable[[S, _Place], None]) -> None:
    """Add all tiles: on several threads where there are heads enough for them, whose sums do not meet."""
    groups = source.groups()
    threads = min(source.threads, len(groups))
    if threads == 1:
        for at in source.places():
            add(source, at)
        return

    def begin() -> Callable[[tuple[slice, slice]], None]:
        own = source.apart()

        def step(group: tuple[slice, slice]) -> None:
            for at in own.tiles(*group):
                add(own, at)

        return step

    share_out(groups, begin, threads)


class _Pools:
    """How the rows and columns of tiles meet the map's cells: found once for each stretch of either."""

    def __init__(self, sizes: Sizes, size: int, like: Tensor) -> None:
        self.sizes, self.size, self.like = sizes, size, like
        self.known: dict[tuple[int, int], Pool] = {}

    def of(self, part: slice, axis: int) -> Pool:
        """The pool of a tile's rows (axis 2) or columns (axis 3)."""
        key = axis, part.start
        if key not in self.known:
            self.known[key] = Pool(part, self.sizes[axis], self.size, self.like)
        return self.known[key]


class _Place:
    """Where a tile lies, and whether its cells must be masked one by one."""

    def __init__(self, batch: slice, heads: slice, rows: slice, cols: slice, masked: bool) -> None:
        self.batch, self.heads, self.rows, self.cols, self.masked = batch, heads, rows, cols, masked
        self.queries = batch, heads, rows

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, i, j, shaped to broadcast to the tile."""
        b, h, i, j = (_range(x, device) for x in (self.batch, self.heads, self.rows, self.cols))
        return b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), j

    def part(self, x: Tensor) -> Tensor:
        """The tile of (B or 1, H or 1, Nq or 1, Nk or 1); an axis of 1 is there for all."""
        every = slice(None)
        at = (self.batch, self.heads, self.rows, self.cols)
        return x[tuple(every if n == 1 else s for n, s in zip(x.shape, at, strict=True))]

    def tile(self, s: Tensor, t: Tensor, p: Tensor, scratch: Tensor, unit: float = 1.0) -> WeightTile:
        """What the measures are handed."""
        return WeightTile(self.batch, self.heads, self.rows, self.cols, s, t, p, scratch, unit=unit)


class _Source(ABC):
    """A call cut into tiles: which there are, and which are walked together.

    divisible: may several threads ask for tiles at the same time?
    """

    divisible = True

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
    def tile(self, at: _Place) -> WeightTile:
        """The tile with its weights."""

    def apart(self) -> Self:
        """The same source for another thread: with memory of its own for a tile's numbers, where it has some."""
        return self

    def groups(self) -> list[tuple[slice, slice]]:
        """Batch rows and heads that are walked together."""
        batch, heads, _, _ = self.sizes
        return [(b, h) for b in _cut(batch, self.rows_at_once) for h in _cut(heads, self.heads_at_once)]

    def places(self) -> Iterator[_Place]:
        """The tiles that somebody can see."""
        for batch, heads in self.groups():
            yield from self.tiles(batch, heads)

    def tiles(self, batch: slice, heads: slice) -> Iterator[_Place]:
        """Those of some batch rows and heads."""
        kinds = self._kinds(batch, heads)
        for r, rows in enumerate(_cut(self.sizes[2], self.size[0])):
            for c, cols in enumerate(_cut(self.sizes[3], self.size[1])):
                low, high = (FULL, FULL) if kinds is None else kinds[r][c]
                if high != EMPTY:
                    yield _Place(batch, heads, rows, cols, masked=low != FULL)

    def _kinds(self, batch: slice, heads: slice) -> list[list[list[int]]] | None:
        """The least and the most visible kind of each tile among these batch rows and heads."""
        if self.kinds is None:
            return None
        every = slice(None)
        part = self.kinds[every if self.kinds.shape[0] == 1 else batch, every if self.kinds.shape[1] == 1 else heads]
        both: list[list[list[int]]] = torch.stack([part.amin((0, 1)), part.amax((0, 1))], -1).tolist()
        return both


class _FromCall(_Source):
    """Weights recomputed from q, k and lse, in the dtype of lse.

    unit: scores are in units of it. Where nothing is added to them they stay as products of q and k, and the scale is
    applied together with what comes next, at no cost; a negative one, or none, is in q.
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
        self._make_room()

    def _make_room(self) -> None:
        cells = prod(self.size) * self.heads_at_once * self.rows_at_once
        self.space = torch.empty(4, cells, dtype=self.wide, device=self.device)
        self.rooms: dict[tuple[int, ...], Sequence[Tensor]] = {}

    def apart(self) -> Self:
        """With memory of its own."""
        other = copy(self)
        other._make_room()
        return other

    def tile(self, at: _Place) -> WeightTile:
        """s, t = s − lse and p = e^t."""
        s = self.scores(at)
        _, t, p, scratch = self._rooms(s.shape)
        torch.add(self.minus_lse[at.queries], s, alpha=self.unit, out=t)
        if at.masked or self.term is not None:  # a bias, too, may hold −∞
            t.clamp_(min=torch.finfo(t.dtype).min)
        return at.tile(s, t, exponentials(t, out=p), scratch, self.unit)

    def scores(self, at: _Place) -> Tensor:
        """The scores as the softmax gets them (b, h, r, c), in units of `unit`, −∞ where hidden.

        They are gone when the next ones are asked for.
        """
        call = self.call
        q, k = self.q[at.queries].to(self.wide), self._keys(at).to(self.wide)
        rest = call.scale / self.unit
        if rest <= 0:
            q, rest = q * rest, 1.0
        s = torch.matmul(q, k.mT, out=self._rooms((*q.shape[:3], k.shape[2]))[0])
        if call.softcap is not None:
            s.mul_(rest / call.softcap).tanh_().mul_(call.softcap)
            rest = 1.0
        if call.bias is not None and self.term is not None:
            torch.add(self._read(call.bias, self.term, at), s, alpha=rest, out=s)
        if at.masked and call.mask is not None and self.see is not None:
            s.masked_fill_(~self._read(call.mask, self.see, at), -inf)
        return s

    def _rooms(self, shape: tuple[int, ...]) -> Sequence[Tensor]:
        """Four tensors for a tile's numbers, of the same memory for every tile: fresh memory would cost page faults."""
        if shape not in self.rooms:
            self.rooms[shape] = self.space[:, : prod(shape)].view(4, *shape).unbind()
        return self.rooms[shape]

    def _keys(self, at: _Place) -> Tensor:
        """The keys these heads read: (b, 1 or h, c, D)."""
        first, last = at.heads.start // self.group, (at.heads.stop - 1) // self.group
        k = self.k[at.batch, first : last + 1, at.cols]
        if first == last or self.group == 1:
            return k
        return k[:, _range(at.heads, self.device) // self.group - first]

    def _read(self, rule: Mask | Bias, bound: IndexRule, at: _Place) -> Tensor:
        """A mask's or a bias's cells in a tile: a view where they are all there, else computed."""
        if isinstance(rule, DenseMask):
            return at.part(rule.cells.to(self.device))
        if isinstance(rule, DenseBias):
            return at.part(rule.cells.to(self.device)).to(self.wide)
        cells: Tensor = bound(*at.indices(self.device))
        return cells


class _FromScores(_Source):
    """Weights that are there already, with their scores."""

    def __init__(self, scores: Tensor, weights: Tensor, wide: torch.dtype) -> None:
        batch, heads, nq, nk = weights.shape
        super().__init__((batch, heads, nq, nk), weights.device, None)
        self.s, self.p, self.wide = scores, weights, wide

    def tile(self, at: _Place) -> WeightTile:
        """The scores, ln p and p."""
        part = (*at.queries, at.cols)
        s, p = self.s[part].to(self.wide), self.p[part].to(self.wide)
        t = p.log().clamp_(min=torch.finfo(self.wide).min)
        return at.tile(s, t, p, torch.empty_like(t))


class _FromTiles(_Source):
    """Exact weights that come from somewhere, all batch rows and heads at once; ln p stands for the scores."""

    divisible = False

    def __init__(self, weights: Weights) -> None:
        self.source = weights
        batch, heads, _, _ = weights.sizes
        super().__init__(weights.sizes, weights.tile(slice(0, 0), slice(0, 0)).device, None)
        together = self.heads_at_once * self.rows_at_once
        rows = max(1, self.size[0] * together // max(1, heads * batch))
        self.size, self.heads_at_once, self.rows_at_once = (rows, self.size[1]), max(1, heads), max(1, batch)

    def tile(self, at: _Place) -> WeightTile:
        """ln p twice, −∞ where p is 0 and finite there, and p."""
        p = self.source.tile(at.rows, at.cols)
        s = p.abs().log()  # edited weights may be negative
        t = s.clamp(min=torch.finfo(s.dtype).min)
        return at.tile(s, t, p, torch.empty_like(t))


def _threads_for(sizes: Sizes) -> int:
    """On how many threads a pass is made: all, or one where there is little to do or there are too few heads for most.

    One leaves it to torch to split each operation.
    """
    batch, heads, nq, nk = sizes
    threads = available()
    return threads if batch * heads * nq * nk >= SHARED_CELLS and 2 * batch * heads >= threads else 1


def _cut(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, max(1, size))]


def _range(part: slice, device: torch.device) -> Tensor:
    return torch.arange(part.start, part.stop, device=device)


def forward(call: Call, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The output (B, H, Nq, Dv) as `regard.attention` gives it, and lse (B, H, Nq) in fp32 or wider, without gradient.

    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> forward(prepare(x, x, x))[1]
    tensor([[[1.0986, 1.0986, 1.0986]]])

    call: with queries, keys and values, of each at least one; NumPy's arrays become tensors.
    backend: "auto" or a name, as for `regard.attention`; raises as that does.
    """
    chosen = choose(call, backend)
    with torch.autocast(call.device.type, enabled=False):  # as attention does: in the dtype that came in
        output, lse = chosen.forward_with_lse(call)
        if chosen is sdpa:
            return output, exact_lse(call.in_torch(), lse)
        return torch.as_tensor(output), torch.as_tensor(lse).detach()


def exact_lse(call: Call, lse: Tensor | None) -> Tensor:
    """The lse that a kernel of torch gave for a call, or one by a pass of our own where it is not there or too rough.

    On a CPU, in half precision, torch's kernel takes a quick exponential: its output does not show it, but its lse is
    off by 5e-5, and all the weights of a row with it.

    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 1, 2)
    >>> exact_lse(prepare(x, x, x), None)
    tensor([[[0.]]])

    call: on torch tensors.  lse: (B, H, Nq), None where the kernel keeps it to itself.
    """
    rough = call.device.type == "cpu" and call.q.dtype.itemsize < 4
    return lse_of(call) if lse is None or rough else lse


def why_not_triton(call: Call, wanted: MeasureOptions) -> str | None:
    """Why the Triton engine does not make this pass, or None.

    >>> import torch
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> why_not_triton(prepare(x, x, x), MeasureOptions(frozenset(["entropy"])))
    'q is on cpu'
    """
    if call.device.type != "cuda":
        return f"q is on {call.device.type}"
    if (missing := no_triton()) is not None:
        return missing
    from regard.lens.measures import gpu

    return gpu.unsupported_reason(call, wanted)


def measure(call: Call, lse: Tensor, wanted: MeasureOptions) -> tuple[dict[str, Tensor], str]:
    """What `wanted` names of this call's weights, "lse", and the engine that measured it: "triton", or "torch (why)".

    >>> import torch
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> lse, wanted = torch.full((1, 1, 2), 2.0).log(), MeasureOptions(frozenset(["effective"]))
    >>> found, engine = measure(prepare(x, x, x), lse, wanted)
    >>> found["effective"], engine
    (tensor([[[2., 2.]]]), 'torch')

    call: on torch tensors.  lse: (B, H, Nq).
    "lse" is what the weights were made with: the given one, or, where that is large, one of fp64 scores and in fp64,
    for `ComputedWeights`.
    """
    why = why_not_triton(call, wanted)
    if why is not None:
        return measure(call, lse, wanted), "torch" if call.device.type == "cpu" else f"torch ({why})"
    from regard.lens.measures import gpu

    return gpu.measure(call, lse, wanted), "triton"


def measure_weights(weights: Weights, wanted: MeasureOptions) -> dict[str, Tensor]:
    """The same from any source of exact weights.

    >>> import torch
    >>> measure_weights(StoredWeights(torch.eye(2).view(1, 1, 2, 2)), MeasureOptions(frozenset(["received"])))
    {'received': tensor([[[1., 1.]]])}

    Raises LookupError for "max_logit" where the scores are not known.
    """
    if isinstance(weights, ComputedWeights):
        found, _ = measure(weights.call, weights.lse, wanted)
        del found["lse"]  # a view has one already, which may be of other scores: see `raise_rows`
        return found
    if "max_logit" in wanted.names and not (isinstance(weights, StoredWeights) and weights.scores is not None):
        raise LookupError("max_logit needs the scores, which were not kept")
    if isinstance(weights, StoredWeights):
        return measure_given(weights, wanted)
    return measure_tiles(weights, wanted)
