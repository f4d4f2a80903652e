"""The measuring pass of heads with large logits as Triton kernels: scores and lse in fp64, and the rest as ever.

A rounding step of a score or of lse becomes an error of the weight e^(s − lse), and it grows with them: in fp32 it is
0.06 at scores of a million. `read_lse` marks the heads where |lse| is above a limit, `measure_large` measures those,
and its programs of all other heads return at once, as those of the ordinary kernel do here: which heads are large is
known on the device alone, and nobody waits for it.

A program of `measure_large` has a tile of queries. It walks the keys that they may see twice: for their lse, and for
the measures. From t = s − lse on, which is small where it counts, numbers are fp32.
"""
# ruff: noqa: N803
# mypy: ignore-errors

import triton
import triton.language as tl

from regard.lens.measuring.kernels import finish_scores

__all__ = ["log_weights", "measure_large", "read_lse", "scores_in_double"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def read_lse(LSE, SHIFT, EXACT, LARGE, nq, limit, BLOCK: tl.constexpr):
    """What the other kernels read of lse (heads, nq): grid (heads,).

    SHIFT: (heads, nq) in units of log₂, 0 for a row that sees nothing.  EXACT: the same numbers as lse, in fp64.
    LARGE: (heads) 1 where a finite |lse| is above the limit, else 0.
    """
    head = tl.program_id(0)
    base = head.to(tl.int64) * nq
    large = tl.zeros([BLOCK], tl.int32)
    for at in range(0, nq, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(LSE + base + i, mask=i < nq, other=0.0)
        tl.store(EXACT + base + i, x.to(tl.float64), mask=i < nq)
        x = x.to(tl.float32)
        tl.store(SHIFT + base + i, tl.where(x == float("-inf"), 0.0, x * LOG2E), mask=i < nq)
        size = tl.abs(x)
        large = tl.maximum(large, ((size > limit) & (size < float("inf"))).to(tl.int32))
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
    return (s - shift[:, None]).to(tl.float32) * LOG2E


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
            grown = tl.exp2((s - floor[:, None]).to(tl.float32) * LOG2E)
            shrunk = tl.exp2((peak - floor).to(tl.float32) * LOG2E)
            total = total * shrunk.to(tl.float64) + tl.sum(grown.to(tl.float64), 1)
            peak = higher
    lse = tl.where(total == 0.0, float("-inf"), peak + tl.log(total))
    tl.store(EXACT + row_base + i, lse, mask=inside)
    best = tl.where(lse == lse, best, lse)  # NaN for a row of NaN
    highest = (best * LOG2E).to(tl.float32)
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
        tl.store(ENTROPY + row_base + i, surprise, mask=inside)
    if WANT_SQUARES:
        tl.store(SQUARES + row_base + i, square, mask=inside)
