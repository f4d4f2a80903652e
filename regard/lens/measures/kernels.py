"""The measuring pass as Triton kernels, in fp32 and, for large logits, in fp64."""

import triton
import triton.language as tl

# ruff: noqa: N803, SIM108
# mypy: ignore-errors

# MASK: 1 keys within (before, after) of the query's position, 2 a kind per tile (0 hidden, 1 visible, else mixed).
# BIAS: 1 a number per j − i, 2 a number per cell.
# MAP, how its sums are kept: 1 some per cell, 2 one per query and column of cells; see gpu.py.
# 0 is none, for each of them.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# How the tensor cores leave the scores: a warp has 16 rows of a tile, each of its threads two of these, 8 apart. Sums
# over such rows need no other thread or warp.
WARP_ROWS = tl.constexpr(16)


@triton.jit
def scores(
    q, k, i, j, within,
    BIAS_AT, KIND_AT, CELLS, bias_i, bias_j, cells_i, cells_j, nq, nk, scale, cap, offset, before, after,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, IEEE: tl.constexpr,
    MASK: tl.constexpr, EDGE: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The scores of queries i and one tile of keys j as the softmax gets them, times log₂e; −∞ where hidden.

    within: which row of their tile i are.  KIND_AT: where the tile's kind is, one or (BLOCK_Q, 1).
    BIAS_AT, CELLS: where the batch row and head begin.  EDGE: may the band of MASK 1 hide some of these cells?
    """
    if IEEE:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k))
    s = s * scale  # with log₂e in it where nothing is added to the scores
    return finish_scores(
        s, i, j, within,
        BIAS_AT, KIND_AT, CELLS, bias_i, bias_j, cells_i, cells_j, nq, nk, cap, offset, before, after,
        BLOCK_Q, BLOCK_K, EVEN_K, MASK, EDGE, PACKED, BIAS, SOFTCAP, True,
    )  # fmt: skip


@triton.jit
def finish_scores(
    s, i, j, within,
    BIAS_AT, KIND_AT, CELLS, bias_i, bias_j, cells_i, cells_j, nq, nk, cap, offset, before, after,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    MASK: tl.constexpr, EDGE: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    TO_LOG2: tl.constexpr,
):  # fmt: skip
    """Scaled products as the softmax gets them: capped, biased, −∞ where hidden; arguments as those of `scores`.

    TO_LOG2: multiply by log₂e where the scale did not.
    """
    if SOFTCAP:
        x = s.to(tl.float32) / cap  # of scores in fp64, too: capped, they are not large
        square = x * x  # near 0 the other form would cancel
        series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
        bent = tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(x, 20.0)) + 1.0))
        s = (cap * bent).to(s.dtype)
    if BIAS == 1:
        bias_at = BIAS_AT + (j[None, :] - i[:, None] + nq - 1)
        s += tl.load(bias_at, mask=(i[:, None] < nq) & (j[None, :] < nk), other=0.0)
    if BIAS == 2:
        bias_at = BIAS_AT + i[:, None].to(tl.int64) * bias_i + j[None, :].to(tl.int64) * bias_j
        s += tl.load(bias_at, mask=(i[:, None] < nq) & (j[None, :] < nk), other=0.0).to(s.dtype)
    if TO_LOG2 and (SOFTCAP or BIAS != 0):
        s = s * LOG2E
    if MASK == 1 and EDGE:
        away = i[:, None] + offset - j[None, :]  # how far behind the query the key lies
        s = tl.where((away <= before) & (away >= -after), s, float("-inf"))
    if MASK == 2:
        kind = tl.load(KIND_AT)
        if PACKED:  # kinds 2, 3, … number the tiles that are stored
            cell = tl.maximum(kind - 2, 0).to(tl.int64) * (BLOCK_Q * BLOCK_K)
            cells_at = CELLS + cell + within[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        else:
            cells_at = CELLS + i[:, None].to(tl.int64) * cells_i + j[None, :].to(tl.int64) * cells_j
        mixed = (i[:, None] < nq) & (j[None, :] < nk) & (kind + tl.zeros_like(i)[:, None] >= 2)
        seen = tl.load(cells_at, mask=mixed, other=0) + (kind == 1)
        s = tl.where(seen != 0, s, float("-inf"))
    if not EVEN_K:
        s = tl.where(j[None, :] < nk, s, float("-inf"))
    return s


@triton.jit
def _add(at, x, inside, ALL: tl.constexpr):
    """Add to memory atomically, where `inside`; ALL: everywhere."""
    if ALL:
        tl.atomic_add(at, x, sem="relaxed")
    else:
        tl.atomic_add(at, x, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["head_from"])
def measure(
    Q, K, LSE, LARGE, BIAS_AT, KINDS, CELLS,
    RECEIVED, ENTROPY, SQUARES, MAXIMUM, MAXIMA, MAP_AT,
    q_b, q_h, q_n, k_b, k_h, k_n, bias_b, bias_h, bias_i, bias_j,
    kinds_b, kinds_h, kinds_i, cells_b, cells_h, cells_i, cells_j,
    heads, group, nq, nk, map_q, map_k, map_parts,
    scale, cap, offset, before, after,
    head_from, row_from, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, IEEE: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, MAP: tl.constexpr,
    ALIGNED: tl.constexpr, SOME_ROWS: tl.constexpr, GROUP: tl.constexpr,
    WANT_RECEIVED: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_SQUARES: tl.constexpr,
    WANT_MAXIMUM: tl.constexpr, WANT_MAXIMA: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one head: grid (key tiles, heads of all batch rows).

    LARGE: (all heads) 1 where lse is too large for this kernel.
    head_from: what the grid's heads are counted from.
    row_from, rows: the queries to walk, where SOME_ROWS; from a multiple of BLOCK_Q on.
    """
    tile, which = tl.program_id(0), tl.program_id(1) + head_from
    if tl.load(LARGE + which) != 0:
        return
    b, h = which // heads, (which % heads).to(tl.int64)
    first = tile * BLOCK_K
    j = first + tl.arange(0, BLOCK_K)
    within, d = tl.arange(0, BLOCK_Q), tl.arange(0, WIDTH)
    row_base = which.to(tl.int64) * nq
    first_group = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile) * (BLOCK_K // GROUP)

    row_step = tl.zeros([], tl.int64) + q_n
    q_at = Q + b.to(tl.int64) * q_b + h * q_h
    k_at = K + b.to(tl.int64) * k_b + (h // group) * k_h + j[:, None].to(tl.int64) * k_n + d[None, :]
    bias_at = BIAS_AT + b.to(tl.int64) * bias_b + h * bias_h
    kinds_at = KINDS + b.to(tl.int64) * kinds_b + h * kinds_h + tile
    cells_at = CELLS if PACKED else CELLS + b.to(tl.int64) * cells_b + h * cells_h
    if EVEN_K and WIDTH == D:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(j[:, None] < nk) & (d[None, :] < D), other=0.0)

    # Which queries may see these keys, and which of them see all of them: the tiles between need no mask.
    if MASK == 1:
        start = tl.maximum(first - offset - after, 0) // BLOCK_Q * BLOCK_Q
        stop = tl.minimum(first + BLOCK_K - offset + before, nq)
        inner = tl.maximum(tl.cdiv(first + BLOCK_K - 1 - offset - after, BLOCK_Q) * BLOCK_Q, start)
        outer = tl.minimum((first - offset + before + 1) // BLOCK_Q * BLOCK_Q, stop)
        inner = tl.minimum(inner, stop)
        outer = tl.maximum(outer, inner)
    else:
        start, stop, inner, outer = 0, nq, 0, nq
    if SOME_ROWS:
        start, stop = tl.maximum(start, row_from), tl.minimum(stop, row_from + rows)
        inner = tl.minimum(tl.maximum(inner, start), stop)
        outer = tl.minimum(tl.maximum(outer, inner), stop)

    received = tl.zeros([BLOCK_Q // WARP_ROWS, WARP_ROWS // 2, BLOCK_K], tl.float32)
    if MAP == 1:
        column = ((first + 1) * map_k - 1) // nk
        edge_k = ((column + 1) * nk) // map_k  # the first key of the next map cell
        straddles = edge_k < tl.minimum(first + BLOCK_K, nk)
        map_at = MAP_AT + (which.to(tl.int64) * (map_q * map_k) + column) * map_parts
        if ALIGNED:  # programs of one map cell, which run at the same time, each add to sums of their own
            warps: tl.constexpr = BLOCK_Q // WARP_ROWS
            map_at += tile % (map_parts // warps) * warps

    for phase in tl.static_range(3 if MASK == 1 else 1):
        if MASK == 1:
            begin = start if phase == 0 else inner if phase == 1 else outer
            end = inner if phase == 0 else outer if phase == 1 else stop
        else:
            begin, end = start, stop
        # The few tiles at the band's edges are not worth buffers of their own, which would halve what fits on a core.
        for at in tl.range(begin, end, BLOCK_Q, num_stages=STAGES if MASK != 1 or phase == 1 else 1):
            i = at + within
            if MASK == 2:
                visible = tl.load(kinds_at + (at // BLOCK_Q) * kinds_i) != 0
            else:
                visible = True  # known when compiling: no branch
            if visible:
                if EVEN_Q and WIDTH == D:
                    q = tl.load((q_at + at * row_step) + (within[:, None] * q_n + d[None, :]))
                    shift = tl.load((LSE + row_base + at) + within)
                else:
                    inside = (i[:, None] < end) & (d[None, :] < D)
                    q = tl.load(q_at + i[:, None].to(tl.int64) * q_n + d[None, :], mask=inside, other=0.0)
                    shift = tl.load(LSE + row_base + i, mask=i < end, other=float("inf"))  # p = 0 beyond the last query
                s = scores(
                    q, k, i, j, within,
                    bias_at, kinds_at + (at // BLOCK_Q) * kinds_i, cells_at, bias_i, bias_j, cells_i, cells_j,
                    nq, nk, scale, cap, offset, before, after,
                    BLOCK_Q, BLOCK_K, EVEN_K, IEEE, MASK, phase != 1, PACKED, BIAS, SOFTCAP,
                )  # fmt: skip

                inside_rows = i < end
                if WANT_MAXIMA:
                    maxima_at = MAXIMA + first_group * rows + (i - row_from)
                    if GROUP == BLOCK_K:
                        tl.store(maxima_at, tl.max(s, 1), mask=inside_rows)
                    else:
                        best = tl.max(tl.reshape(s, [BLOCK_Q, BLOCK_K // GROUP, GROUP]), 2)
                        spot = maxima_at[:, None] + tl.arange(0, BLOCK_K // GROUP)[None, :].to(tl.int64) * rows
                        tl.store(spot, best, mask=inside_rows[:, None])
                t = s - shift[:, None]
                p = tl.exp2(t)
                # All sums come before all writes: the other way round, t and p stay in registers and these spill.
                if WANT_RECEIVED:
                    received += tl.sum(tl.reshape(p, [BLOCK_Q // WARP_ROWS, 2, WARP_ROWS // 2, BLOCK_K]), 1)
                if WANT_ENTROPY:
                    if (MASK == 1 and phase != 1) or MASK == 2 or not EVEN_K or not EVEN_Q:
                        surprise = tl.sum(tl.where(p == 0.0, 0.0, p * t), 1)  # not 0 · −∞; NaN stays
                    else:
                        surprise = tl.sum(p * t, 1)
                if WANT_MAXIMUM:
                    peak = tl.max(t, 1)
                if WANT_SQUARES:
                    square = tl.sum(p * p, 1)
                if MAP == 1 and ALIGNED:
                    mass = tl.sum(tl.reshape(tl.sum(p, 1), [BLOCK_Q // WARP_ROWS, WARP_ROWS]), 1)
                row_at = row_base + at
                if WANT_ENTROPY:
                    _add((ENTROPY + row_at) + within, surprise * -LN2, inside_rows, EVEN_Q)
                if WANT_SQUARES:
                    _add((SQUARES + row_at) + within, square, inside_rows, EVEN_Q)
                if WANT_MAXIMUM:  # integers in the order of the floats: one integer atomic, where floats need two
                    bits = (peak + shift).to(tl.int32, bitcast=True)
                    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
                    tl.atomic_max((MAXIMUM + row_at) + within, bits, mask=inside_rows, sem="relaxed")
                if MAP == 1:
                    # A number per warp, or row of the tile, and map cell: the same of every tile in a cell adds to it.
                    if ALIGNED:
                        spot = map_at + (at * map_q // nq) * (map_k * map_parts) + tl.arange(0, warps)
                        tl.atomic_add(spot, mass, sem="relaxed")
                    else:
                        spot = map_at + (((i + 1) * map_q - 1) // nq) * (map_k * map_parts) + within
                        low = tl.where(j[None, :] < edge_k, p, 0.0)
                        tl.atomic_add(spot, tl.sum(low, 1), mask=inside_rows, sem="relaxed")
                        if straddles:
                            tl.atomic_add(spot + BLOCK_Q, tl.sum(p - low, 1), mask=inside_rows, sem="relaxed")
                if MAP == 2:
                    last = tl.minimum(first + BLOCK_K, nk)  # one beyond
                    for c in range(((first + 1) * map_k - 1) // nk, (last * map_k - 1) // nk + 1):
                        own = (j >= (c * nk) // map_k) & (j < ((c + 1) * nk) // map_k)
                        share = tl.sum(tl.where(own[None, :], p, 0.0), 1)
                        tl.atomic_add(MAP_AT + (row_base + i) * map_k + c, share, mask=inside_rows, sem="relaxed")

    if WANT_RECEIVED:
        columns = tl.sum(tl.sum(received, 0), 0)  # (BLOCK_K,)
        received_at = RECEIVED + which.to(tl.int64) * nk + j
        if SOME_ROWS:  # other launches add to these keys, too
            tl.atomic_add(received_at, columns, mask=j < nk, sem="relaxed")
        else:
            tl.store(received_at, columns, mask=j < nk)


LOG2E_DOUBLE = tl.constexpr(1.4426950408889634)


@triton.jit
def read_lse(LSE, SHIFT, EXACT, LARGE, nq, limit, FINITE: tl.constexpr, BLOCK: tl.constexpr):
    """What the other kernels read of lse (heads, nq): grid (heads,).

    SHIFT: (heads, nq) in units of log₂, 0 for a row that sees nothing.  EXACT: the same numbers as lse, in fp64.
    LARGE: (heads) 1 where a finite |lse| is above the limit, else 0; FINITE: 1 where one is NaN or ∞, too.
    """
    head = tl.program_id(0)
    base = head.to(tl.int64) * nq
    large = tl.zeros([BLOCK], tl.int32)
    for at in range(0, nq, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(LSE + base + i, mask=i < nq, other=0.0)
        tl.store(EXACT + base + i, x.to(tl.float64), mask=i < nq)
        x = x.to(tl.float32)
        tl.store(SHIFT + base + i, tl.where(x == float("-inf"), 0.0, x * LOG2E_DOUBLE), mask=i < nq)
        size = tl.abs(x)
        large = tl.maximum(large, ((size > limit) & (size < float("inf"))).to(tl.int32))
        if FINITE:
            large = tl.maximum(large, ((x == float("inf")) | (x != x)).to(tl.int32))
    tl.store(LARGE + head, tl.max(large, 0))


@triton.jit
def scores_in_double(
    q_at, k_at, i, j, within,
    BIAS_AT, KIND_AT, CELLS, bias_i, bias_j, cells_i, cells_j, q_n, k_n, nq, nk, offset, before, after,
    scale, scale_rest, cap,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The scores of queries i and one tile of keys j in fp64, in units of e; other arguments as those of `scores`.

    scale_rest: what fp32, in which kernels are given numbers, does not hold of the scale.
    """
    s = tl.zeros([BLOCK_Q, BLOCK_K], tl.float64)
    for column in range(D):  # not tl.dot, which Triton 3.6 does not compile for halves widened to fp64
        q = tl.load(q_at + i.to(tl.int64) * q_n + column, mask=i < nq, other=0.0).to(tl.float64)
        k = tl.load(k_at + j.to(tl.int64) * k_n + column, mask=j < nk, other=0.0).to(tl.float64)
        s += q[:, None] * k[None, :]
    s = s * (tl.zeros([1, 1], tl.float64) + scale + scale_rest)
    return finish_scores(
        s, i, j, within, BIAS_AT, KIND_AT, CELLS, bias_i, bias_j, cells_i, cells_j, nq, nk,
        cap, offset, before, after,
        BLOCK_Q, BLOCK_K, EVEN_K, MASK, True, PACKED, BIAS, SOFTCAP, False,
    )  # fmt: skip


@triton.jit
def log_weights(s, lse):
    """The log₂ of each weight, in fp32, from scores and lse in fp64."""
    shift = tl.where(lse == float("-inf"), 0.0, lse)  # so that a row that sees nothing has −∞, not NaN
    return (s - shift[:, None]).to(tl.float32) * LOG2E_DOUBLE


@triton.jit(do_not_specialize=["head_from"])
def measure_large(
    Q, K, EXACT, LARGE, SINKS, BIAS_AT, KINDS, CELLS,
    RECEIVED, ENTROPY, SQUARES, MAXIMUM, HIGHEST, MAXIMA, MAP_AT,
    q_b, q_h, q_n, k_b, k_h, k_n, bias_b, bias_h, bias_i, bias_j,
    kinds_b, kinds_h, kinds_i, cells_b, cells_h, cells_i, cells_j, sinks_b, sinks_h, sinks_i,
    heads, group, nq, nk, map_q, map_k, map_parts,
    scale, scale_rest, cap, offset, before, after,
    head_from, row_from, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, IEEE: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, MAP: tl.constexpr,
    GROUP: tl.constexpr, HAS_SINKS: tl.constexpr,
    WANT_RECEIVED: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_SQUARES: tl.constexpr,
    WANT_MAXIMUM: tl.constexpr, WANT_HIGHEST: tl.constexpr, WANT_MAXIMA: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: grid (query tiles, heads of all batch rows). Results where `measure` has them.

    EXACT: (all heads, nq) lse, written here.  SINKS: a logit per row, where HAS_SINKS, in any strides.
    HIGHEST: (all heads, nq) largest scores in units of log₂, which `top_kernels.select` writes for other heads.
    MAXIMA: of log₂ weights, not of scores: fp32 tells them apart where it does not tell large scores apart.
    """
    which = tl.program_id(1) + head_from
    if tl.load(LARGE + which) == 0:
        return
    b, h = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    at = row_from + tl.program_id(0) * BLOCK_Q
    within = tl.arange(0, BLOCK_Q)
    i = at + within
    inside = i < row_from + rows
    row_base = which.to(tl.int64) * nq
    q_at = Q + b * q_b + h * q_h
    k_at = K + b * k_b + (h // group) * k_h
    bias_at = BIAS_AT + b * bias_b + h * bias_h
    kinds_at = KINDS + b * kinds_b + h * kinds_h + (at // BLOCK_Q) * kinds_i
    cells_at = CELLS if PACKED else CELLS + b * cells_b + h * cells_h
    start, stop = 0, nk
    if MASK == 1:
        start = tl.maximum(at + offset - before, 0) // BLOCK_K * BLOCK_K
        stop = tl.minimum(at + BLOCK_Q + offset + after, nk)

    # 1. The rows' lse, with a running maximum.
    best = tl.full([BLOCK_Q], float("-inf"), tl.float64)
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float64)
    total = tl.zeros([BLOCK_Q], tl.float64)
    if HAS_SINKS:  # a key seen before all others
        peak = tl.load(SINKS + b * sinks_b + h * sinks_h + i * sinks_i, mask=inside, other=0.0).to(tl.float64)
        total += 1.0
    for first in range(start, stop, BLOCK_K):
        visible = True
        if MASK == 2:
            visible = tl.load(kinds_at + first // BLOCK_K) != 0
        if visible:
            j = first + tl.arange(0, BLOCK_K)
            s = scores_in_double(
                q_at, k_at, i, j, within, bias_at, kinds_at + first // BLOCK_K, cells_at,
                bias_i, bias_j, cells_i, cells_j, q_n, k_n, nq, nk, offset, before, after,
                scale, scale_rest, cap, D, BLOCK_Q, BLOCK_K, EVEN_K, MASK, PACKED, BIAS, SOFTCAP,
            )  # fmt: skip
            best = tl.maximum(best, tl.max(s, 1))
            higher = tl.maximum(peak, best)
            floor = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: every exponential is 0
            grown = tl.exp2((s - floor[:, None]).to(tl.float32) * LOG2E_DOUBLE)
            shrunk = tl.exp2((peak - floor).to(tl.float32) * LOG2E_DOUBLE)
            total = total * shrunk.to(tl.float64) + tl.sum(grown.to(tl.float64), 1)
            peak = higher
    lse = tl.where(total == 0.0, float("-inf"), peak + tl.log(total))
    tl.store(EXACT + row_base + i, lse, mask=inside)
    best = tl.where(lse == lse, best, lse)  # NaN for a row of NaN
    highest = (best * LOG2E_DOUBLE).to(tl.float32)
    if WANT_HIGHEST:
        tl.store(HIGHEST + row_base + i, highest, mask=inside)
    if WANT_MAXIMUM:
        bits = highest.to(tl.int32, bitcast=True)
        tl.store(MAXIMUM + row_base + i, bits ^ ((bits >> 31) & 0x7FFFFFFF), mask=inside)

    # 2. The measures.
    surprise = tl.zeros([BLOCK_Q], tl.float32)
    square = tl.zeros([BLOCK_Q], tl.float32)
    for first in range(start, stop, BLOCK_K):
        visible = True
        if MASK == 2:
            visible = tl.load(kinds_at + first // BLOCK_K) != 0
        if visible:
            j = first + tl.arange(0, BLOCK_K)
            s = scores_in_double(
                q_at, k_at, i, j, within, bias_at, kinds_at + first // BLOCK_K, cells_at,
                bias_i, bias_j, cells_i, cells_j, q_n, k_n, nq, nk, offset, before, after,
                scale, scale_rest, cap, D, BLOCK_Q, BLOCK_K, EVEN_K, MASK, PACKED, BIAS, SOFTCAP,
            )  # fmt: skip
            t = log_weights(s, lse)
            t = tl.where(inside[:, None], t, float("-inf"))
            p = tl.exp2(t)
            if WANT_MAXIMA:
                tiles = tl.cdiv(nk, BLOCK_K)
                groups: tl.constexpr = BLOCK_K // GROUP
                number = (tl.program_id(1).to(tl.int64) * tiles + first // BLOCK_K) * groups + tl.arange(0, groups)
                maxima_at = MAXIMA + number[None, :] * rows + (i - row_from)[:, None]
                tl.store(maxima_at, tl.max(tl.reshape(t, [BLOCK_Q, groups, GROUP]), 2), mask=inside[:, None])
            if WANT_RECEIVED:
                tl.atomic_add(RECEIVED + which.to(tl.int64) * nk + j, tl.sum(p, 0), mask=j < nk, sem="relaxed")
            if WANT_ENTROPY:
                surprise += tl.sum(tl.where(p == 0.0, 0.0, p * t), 1)  # not 0 · −∞; NaN stays
            if WANT_SQUARES:
                square += tl.sum(p * p, 1)
            if MAP != 0:
                last = tl.minimum(first + BLOCK_K, nk)  # one beyond
                for c in range(((first + 1) * map_k - 1) // nk, (last * map_k - 1) // nk + 1):
                    own = (j >= (c * nk) // map_k) & (j < ((c + 1) * nk) // map_k)
                    share = tl.sum(tl.where(own[None, :], p, 0.0), 1)
                    if MAP == 1:  # any of a cell's sums
                        cell = (which.to(tl.int64) * map_q + ((i + 1) * map_q - 1) // nq) * map_k + c
                        spot = MAP_AT + cell * map_parts + within % map_parts
                    else:
                        spot = MAP_AT + (row_base + i) * map_k + c
                    tl.atomic_add(spot, share, mask=inside, sem="relaxed")
    if WANT_ENTROPY:
        tl.store(ENTROPY + row_base + i, surprise * -LN2, mask=inside)
    if WANT_SQUARES:
        tl.store(SQUARES + row_base + i, square, mask=inside)
