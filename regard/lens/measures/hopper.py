"""The measuring pass on Hopper GPUs, in Gluon: received mass, entropy and map of full and causal attention.

It computes what `kernels.measure` does, with copies, matrix products and registers placed by hand: a tile of keys rests
in shared memory, tiles of 64 queries stream past it through TMA, and one warpgroup measures each product in eight
chunks of columns, so that few of its exponentials are in registers at a time. Programs that share a core cover for each
other's waits; a pipeline inside a program was slower, and so was a warp that only copies.
"""

from dataclasses import dataclass
from math import e, log2
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from regard.backends.call import Call
from regard.devices import ROUNDED_ONCE, power_of_two
from regard.lens.measures.measures import MeasureOptions
from regard.masks.patterns import NO_LIMIT

# ruff: noqa: N803, N806, SIM108
# mypy: ignore-errors

__all__ = ["Cut", "cut_for", "launch", "measure"]

MEASURES = {"entropy", "received", "map"}
TESTED = ("3.6.",)  # releases of Triton that ran this; Gluon is experimental, and what works may change with the next
PADDING = 1.15  # computed cells ÷ cells, at most: beyond that `kernels.measure` is as fast

# -------------------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Cut:
    """How the kernel is cut for a call.

    Args:
        keys: keys of a tile.
        cells: rows and columns of the map; (1, 1) without one.
        tiles: tiles of queries and of keys in a map cell. Each begins where its cell does, so that none lies in two.
        paired: whether instead a tile of keys is two whole cells.
        stages: tiles of queries in shared memory.
        registers: of a thread, at most.
    """

    keys: int
    cells: tuple[int, int]
    tiles: tuple[int, int]
    paired: bool
    stages: int
    registers: int | None


def cut_for(call: Call, wanted: MeasureOptions) -> Cut | None:
    """The fastest on an H200, see benchmarks/results/lens-cuda.md; None for a call that this kernel cannot do."""
    (_, _, nq, nk), width = call.sizes, call.q.shape[-1]
    band = None if call.mask is None else call.mask.band(nq, nk)
    if (
        0 in call.sizes
        or not triton.__version__.startswith(TESTED)
        or torch.cuda.get_device_capability(call.device) != (9, 0)
        or not wanted.names <= MEASURES
        or call.q.dtype not in (torch.bfloat16, torch.float16)
        or width > 128
        or call.bias is not None
        or call.softcap is not None
        or call.scale <= 0
        or (call.mask is not None and (band is None or band[1] < NO_LIMIT or band[2] != 0))
        or not (_can_be_copied(call.q) and _can_be_copied(call.k))
    ):
        return None
    cells = (min(wanted.size, nq), min(wanted.size, nk)) if "map" in wanted.names else (1, 1)
    tall = _parts(nq, cells[0], 64)
    for keys in (256, 128) if call.mask is None and width > 64 else (128,):
        paired = nk == cells[1] * keys // 2 and cells[1] % 2 == 0
        wide = 1 if paired else _parts(nk, cells[1], keys)
        computed = cells[0] * tall * 64 * (nk if paired else cells[1] * wide * keys)
        if computed <= PADDING * nq * nk:
            # 128 registers a thread let four programs share a core, 168 three. Wide tiles leave memory for two.
            registers = None if keys == 256 else 128 if width <= 64 and call.mask is None else 168
            stages = 2 if keys == 128 and width > 64 else 3
            return Cut(keys, cells, (tall, wide), paired, stages, registers)
    return None


def _parts(n: int, cells: int, size: int) -> int:
    """Tiles of `size` that cover each of the cells that n positions are cut into."""
    longest = -(-n // cells)
    return -(-longest // size)


def _can_be_copied(x: Tensor) -> bool:
    """TMA copies blocks whose rows begin on 16 bytes."""
    steps = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    aligned = all(s > 0 and s * x.element_size() % 16 == 0 for s in steps)
    return aligned and x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and x.shape[-1] * x.element_size() % 16 == 0


def launch(
    call: Call,
    cut: Cut,
    names: frozenset[str],
    shift: Tensor,
    skipped: Tensor,
    received: Tensor,
    entropy: Tensor,
    map_sums: Tensor,
) -> None:
    """Measure all heads that are not to be skipped.

    Args:
        call: one that `cut_for` has a cut for.
        cut: how the kernel is cut.
        names: the measures.
        shift: (B, H, Nq) fp32, lse in units of log₂, finite.
        skipped: (B·H) int32, not 0 where a head is measured by another kernel; its received mass becomes 0.
        received: (B, H, Nk), written.
        entropy: (B, H, Nq) in nats, added to.
        map_sums: (B, H, *cells), added to.
    """
    batch, heads, nq, nk = call.sizes
    width = max(64, power_of_two(call.q.shape[-1]))
    q, k = call.q.detach(), call.k.detach()
    (tall, wide), paired = cut.tiles, cut.paired
    columns = cut.cells[1] // 2 if paired else cut.cells[1] * wide
    options = {} if cut.registers is None else {"maxnreg": cut.registers}
    measure[(columns, batch * heads)](
        _descriptor(q, 64, width), _descriptor(k, cut.keys, width), shift, skipped, received, entropy, map_sums,
        heads, heads // k.shape[1], nq, nk, tall, wide, call.scale * log2(e),
        0 if call.mask is None else call.mask.band(nq, nk)[0],
        CELLS_Q=cut.cells[0], CELLS_K=cut.cells[1], BLOCK_K=cut.keys, WIDTH=width, STAGES=cut.stages,
        CAUSAL=call.mask is not None, EVEN_Q=nq == cut.cells[0] * tall * 64,
        EVEN_K=paired or nk == cut.cells[1] * wide * cut.keys, PAIRED=paired,
        WANT_RECEIVED="received" in names, WANT_ENTROPY="entropy" in names, WANT_MAP="map" in names,
        num_warps=4, **options, **ROUNDED_ONCE,
    )  # fmt: skip


def _descriptor(x: Tensor, rows: int, width: int) -> Any:
    """x (B, H, N, D) for TMA, in blocks of one head's rows; columns beyond D are read as 0."""
    block = [1, 1, rows, width]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    strides = [s if n > 1 else max(8, x.shape[-1]) for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


# -------------------------------------------------------------------------------------------------------------- kernel

ROWS = gl.constexpr(64)  # queries in a tile: what one product of a warpgroup takes
CHUNKS = gl.constexpr(8)  # of the columns of a tile
LN2 = gl.constexpr(0.6931471805599453)
NEVER = gl.constexpr(1e30)  # of a weight's −log₂: the weight is 0, and 0 times this is 0


# By their names in one release of Triton or another.
copy_rows = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
meet = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def exp2(t):
    """2^t: the instruction alone, without the steps that keep results below 2^−126 exact."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def halves(x):
    """The left and the right columns of a tile. Registers get other names; nothing moves."""
    half: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, 16])
    left, right = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, half]), (0, 2, 1)))
    return (
        gl.convert_layout(left, layout, assert_trivial=True),
        gl.convert_layout(right, layout, assert_trivial=True),
    )


@gluon.jit
def folded(x):
    """(64, c) → (4, 8, c): rows r and r + 8, which one thread holds, are added; a warp has 8 of these rows."""
    return gl.sum(gl.reshape(x, [4, 2, 8, x.shape[1]]), 1)


@gluon.jit
def measure_chunk(s, shift, scale, received, mass, surprise, WANT_ENTROPY: gl.constexpr, WANT_MAP: gl.constexpr):
    """Add a chunk of products s to the sums of its keys, of its map cell, and of its rows."""
    layout: gl.constexpr = s.type.layout
    t = s * scale - gl.convert_layout(shift, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
    p = exp2(t)
    if WANT_ENTROPY:
        surprise += p * t
    p = folded(p)
    if WANT_MAP:
        mass += p
    return received + p, mass, surprise


@gluon.jit
def measure_pair(s, shift, scale, left, right, mass, surprise, WANT_ENTROPY: gl.constexpr, WANT_MAP: gl.constexpr):
    a, b = halves(s)
    left, mass, surprise = measure_chunk(a, shift, scale, left, mass, surprise, WANT_ENTROPY, WANT_MAP)
    right, mass, surprise = measure_chunk(b, shift, scale, right, mass, surprise, WANT_ENTROPY, WANT_MAP)
    return left, right, mass, surprise


@gluon.jit
def measure_tile(
    s, shift, scale, received, low, high, surprise,
    PAIRED: gl.constexpr, WANT_ENTROPY: gl.constexpr, WANT_MAP: gl.constexpr,
):  # fmt: skip
    """Add a tile of products: `low` is its mass; PAIRED: in its left columns, and `high` in the right ones."""
    a, b, c, d, e, f, g, h = received
    left, right = halves(s)
    x, y = halves(left)
    a, b, low, surprise = measure_pair(x, shift, scale, a, b, low, surprise, WANT_ENTROPY, WANT_MAP)
    c, d, low, surprise = measure_pair(y, shift, scale, c, d, low, surprise, WANT_ENTROPY, WANT_MAP)
    x, y = halves(right)
    if PAIRED:
        e, f, high, surprise = measure_pair(x, shift, scale, e, f, high, surprise, WANT_ENTROPY, WANT_MAP)
        g, h, high, surprise = measure_pair(y, shift, scale, g, h, high, surprise, WANT_ENTROPY, WANT_MAP)
    else:
        e, f, low, surprise = measure_pair(x, shift, scale, e, f, low, surprise, WANT_ENTROPY, WANT_MAP)
        g, h, low, surprise = measure_pair(y, shift, scale, g, h, low, surprise, WANT_ENTROPY, WANT_MAP)
    return (a, b, c, d, e, f, g, h), low, high, surprise


@gluon.jit
def fetch(q, tiles, arrived, stage, b, h, row, wanted):
    """Start to copy a tile of queries to its place in shared memory, if it is wanted."""
    mbarrier.expect(arrived.index(stage), q.block_type.nbytes, pred=wanted)
    copy_rows(q, [b, h, row, 0], arrived.index(stage), tiles.index(stage), pred=wanted)


@gluon.jit
def measure(
    q, k, SHIFT, LARGE, RECEIVED, ENTROPY, MAP_AT,
    heads, group, nq, nk, tall, wide, scale, offset,
    CELLS_Q: gl.constexpr, CELLS_K: gl.constexpr, BLOCK_K: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, EVEN_Q: gl.constexpr, EVEN_K: gl.constexpr, PAIRED: gl.constexpr,
    WANT_RECEIVED: gl.constexpr, WANT_ENTROPY: gl.constexpr, WANT_MAP: gl.constexpr,
):  # fmt: skip
    """One tile of keys of one head: grid (key tiles, heads of all batch rows).

    q, k: descriptors of (B, H, N, D), in blocks of (1, 1, 64, WIDTH) and (1, 1, BLOCK_K, WIDTH).
    SHIFT: (all heads, nq) lse in units of log₂.  LARGE: (all heads) 1 where this kernel must not measure.
    RECEIVED: (all heads, nk) is written.  ENTROPY: (all heads, nq) and MAP_AT: (all heads, CELLS_Q, CELLS_K) are added
    to: entropy in nats, and sums of weights.
    tall, wide: tiles of queries in a map cell, and of keys. Each begins where the cell does, so that no tile lies in
    two cells. PAIRED: a tile of keys is two whole cells.
    CAUSAL: key j is hidden from queries i < j − offset.
    """
    which, tile = gl.program_id(1), gl.program_id(0)
    b, h = which // heads, which % heads
    column, place = tile // wide, tile % wide
    if PAIRED:
        column = tile * 2
    key = column * nk // CELLS_K + place * BLOCK_K
    keys = nk // CELLS_K * 2 if PAIRED else (column + 1) * nk // CELLS_K - key  # from here to the end of the cell
    SHIFT += which.to(gl.int64) * nq
    ENTROPY += which.to(gl.int64) * nq
    RECEIVED += which.to(gl.int64) * nk + key
    MAP_AT += which.to(gl.int64) * (CELLS_Q * CELLS_K) + column

    products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K // CHUNKS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, products)
    within = gl.arange(0, ROWS, layout=by_row)
    no_surprise = gl.zeros([ROWS, BLOCK_K // CHUNKS], gl.float32, chunk)
    none = folded(no_surprise)
    received = (none, none, none, none, none, none, none, none)
    if keys <= 0:
        return
    if gl.load(LARGE + which) != 0:
        if WANT_RECEIVED:
            store_received(RECEIVED, received, keys, BLOCK_K, EVEN_K)
        return

    # 1. Steps over tiles of queries, from the first that sees a key; from `whole` on they see all keys of this tile.
    steps = CELLS_Q * tall
    cell, at, whole = 0, 0, 0
    if CAUSAL:
        first = gl.minimum(gl.maximum(key - offset, 0), nq - 1)
        cell = ((first + 1) * CELLS_Q - 1) // nq
        at = (first - cell * nq // CELLS_Q) // ROWS
        sees_all = gl.minimum(gl.maximum(key + BLOCK_K - 1 - offset, 0), nq)
        in_cell = ((gl.minimum(sees_all, nq - 1) + 1) * CELLS_Q - 1) // nq
        whole = in_cell * tall + (sees_all - in_cell * nq // CELLS_Q + ROWS - 1) // ROWS
    start = cell * tall + at
    if not EVEN_K:
        whole = gl.where(keys < BLOCK_K, steps, whole)
    whole = gl.minimum(gl.maximum(whole, start), steps)

    # 2. The keys, and the first tiles of queries, are on their way.
    tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    resting = gl.allocate_shared_memory(k.dtype, [1, 1, BLOCK_K, WIDTH], k.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    mbarrier.init(ready, count=1)
    fence_async_shared()
    mbarrier.expect(ready, k.block_type.nbytes)
    copy_rows(k, [b, h // group, key, 0], ready, resting)
    next_cell, next_at = cell, at  # of the tile that is fetched next
    for stage in gl.static_range(STAGES):
        row = next_cell * nq // CELLS_Q + next_at * ROWS
        fetch(q, tiles, arrived, stage, b, h, row, start + stage < steps)
        wraps = next_at + 1 == tall
        next_cell, next_at = gl.where(wraps, next_cell + 1, next_cell), gl.where(wraps, 0, next_at + 1)
    row = cell * nq // CELLS_Q + at * ROWS
    shift = load_shift(SHIFT, row, within, (cell + 1) * nq // CELLS_Q, EVEN_Q)
    transposed = resting.reshape([BLOCK_K, WIDTH]).permute((1, 0))
    low, high = none, none
    nothing = gl.zeros([ROWS, BLOCK_K], gl.float32, products)
    stage, last, phase = 0, STAGES - 1, 0
    mbarrier.wait(ready, 0)

    # 3. Measure. A mask under a branch in the one loop would spill all over it: tiles that need one have their own.
    for masked in gl.static_range(1 if CAUSAL or not EVEN_K else 0, -1, -1):
        begin = start if masked or not (CAUSAL or not EVEN_K) else whole
        end = whole if masked else steps
        for step in range(begin, end):
            mbarrier.wait(arrived.index(stage), phase)
            s = warpgroup_mma(
                tiles.index(stage).reshape([ROWS, WIDTH]), transposed, nothing, use_acc=False, is_async=True
            )
            wraps = at + 1 == tall
            after_cell, after_at = gl.where(wraps, cell + 1, cell), gl.where(wraps, 0, at + 1)
            after_row = after_cell * nq // CELLS_Q + after_at * ROWS
            after = load_shift(
                SHIFT, gl.minimum(after_row, nq - ROWS) if EVEN_Q else after_row, within,
                gl.minimum((after_cell + 1) * nq // CELLS_Q, nq), EVEN_Q,
            )  # fmt: skip
            meet()  # every warp has read the tile before this one: its place is free
            fetch_row = next_cell * nq // CELLS_Q + next_at * ROWS
            wanted = (step > start) & (step - 1 + STAGES < steps)
            fetch(q, tiles, arrived, last, b, h, fetch_row, wanted)
            fetch_wraps = wanted & (next_at + 1 == tall)
            next_cell = gl.where(fetch_wraps, next_cell + 1, next_cell)
            next_at = gl.where(fetch_wraps, 0, gl.where(wanted, next_at + 1, next_at))
            s = warpgroup_mma_wait(0, deps=(s,))
            if masked:
                s = hide(s, row, key, keys, offset, CAUSAL)
            received, low, high, surprise = measure_tile(
                s, shift, scale, received, low, high, no_surprise, PAIRED, WANT_ENTROPY, WANT_MAP
            )
            if WANT_ENTROPY:
                entropy = gl.convert_layout(gl.sum(surprise, 1), by_row) * -LN2
                here = within < (cell + 1) * nq // CELLS_Q - row
                if EVEN_Q:
                    gl.atomic_add(ENTROPY + row + within, entropy, sem="relaxed")
                else:
                    gl.atomic_add(ENTROPY + row + within, entropy, mask=here, sem="relaxed")
            if WANT_MAP:
                if wraps:
                    add_mass(MAP_AT + cell * CELLS_K, low)
                    if PAIRED:
                        add_mass(MAP_AT + cell * CELLS_K + 1, high)
                low = gl.where(wraps, 0.0, low)
                if PAIRED:
                    high = gl.where(wraps, 0.0, high)
            cell, at, row, shift = after_cell, after_at, after_row, after
            last = stage
            phase = phase ^ (stage == STAGES - 1).to(gl.int32)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    if WANT_RECEIVED:
        store_received(RECEIVED, received, keys, BLOCK_K, EVEN_K)


@gluon.jit
def load_shift(SHIFT, row, within, end, EVEN_Q: gl.constexpr):
    """What is subtracted from the scores of a tile of queries; rows beyond the cell get the weight 0."""
    if EVEN_Q:
        return gl.load(SHIFT + row + within)
    return gl.load(SHIFT + row + within, mask=within < end - row, other=NEVER)


@gluon.jit
def hide(s, row, key, keys, offset, CAUSAL: gl.constexpr):
    """Products of hidden keys, and of those beyond the cell, become so low that their weight is 0."""
    layout: gl.constexpr = s.type.layout
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    # Both sides move with the row: sums that stay the same would be kept in registers through the loop, one per column.
    moved = key - offset - row
    last = keys - 1 + moved
    if CAUSAL:
        last = gl.minimum(i, last)
    else:
        last = last + i * 0
    return gl.where((j + moved)[None, :] <= last[:, None], s, -NEVER)


@gluon.jit
def add_mass(spot, mass):
    """Add to a map cell, a number per warp."""
    by_warp = gl.sum(gl.sum(mass, 2), 1)  # (4,)
    gl.atomic_add(spot + gl.zeros_like(by_warp).to(gl.int32), by_warp, sem="relaxed")


@gluon.jit
def store_received(RECEIVED, received, keys, BLOCK_K: gl.constexpr, EVEN_K: gl.constexpr):
    width: gl.constexpr = BLOCK_K // CHUNKS
    layout: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16]))
    for n in gl.static_range(CHUNKS):
        j = n * width + gl.arange(0, width, layout=layout)
        sums = gl.convert_layout(gl.sum(gl.sum(received[n], 0), 0), layout)
        if EVEN_K:
            gl.store(RECEIVED + j, sums)
        else:
            gl.store(RECEIVED + j, sums, mask=j < keys)
