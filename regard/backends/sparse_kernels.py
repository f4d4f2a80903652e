"""Attention over listed tiles as Triton kernels: a program walks the tiles that one tile of queries, or keys, sees.

Tiles that hide nothing come first and need no mask. Then come the mixed ones, whose cells are stored, or follow from
three numbers where the mask is a band. Backward recomputes the weights from lse: one kernel walks by queries and gives
d_q, the other by keys and gives d_k and d_v, so nothing is added atomically and a second run gives the same bits.

Numbers are fp32, scores in units of log₂. The kernels know pointers and sizes: neither torch, nor masks.
"""
# ruff: noqa: N803
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["attend", "differentiate_keys", "differentiate_queries"]

LOG2E = tl.constexpr(1.4426950408889634)

# FULL_AT, MIXED_AT: where the list of each row of tiles begins in FULL and MIXED, which hold the tiles' columns.
# FULL_ADDED, MIXED_ADDED: what is added to the scores of each tile, where ADDED, in units of log₂.
# CELLS: (mixed tiles, BLOCK_Q, BLOCK_K) of 0 and 1, where the mask is no BAND.
# lead_b, lead_h: the step from one batch row's lists to the next one's, and from one head's; 0 where they are shared.


@triton.jit
def _tile(At, first, n, step, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Rows first … first + BLOCK of n, (BLOCK, WIDTH), SIZE of whose columns are there; 0 elsewhere."""
    row, col = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    at = At + tl.cast(first, tl.int64) * step + row[:, None] * step + col[None, :]
    if EVEN and WIDTH == SIZE:
        return tl.load(at)
    return tl.load(at, mask=(first + row[:, None] < n) & (col[None, :] < SIZE), other=0.0)


@triton.jit
def _dot(a, b, IEEE: tl.constexpr):
    if IEEE:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _scores(
    q, k, i, j, number, added, CELLS, nk, scale, offset, before, after,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, IEEE: tl.constexpr,
    IS_MIXED: tl.constexpr, BAND: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The scores of one tile, −∞ where hidden. number: which of the stored tiles it is, where IS_MIXED."""
    s = _dot(q, tl.trans(k), IEEE) * scale
    if ADDED:
        s += added
    if IS_MIXED:
        if BAND:
            away = i[:, None] + offset - j[None, :]  # how far behind the query the key lies
            s = tl.where((away <= before) & (away >= -after), s, float("-inf"))
        else:
            within = tl.arange(0, BLOCK_Q)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            seen = tl.load(CELLS + tl.cast(number, tl.int64) * (BLOCK_Q * BLOCK_K) + within)
            s = tl.where(seen != 0, s, float("-inf"))
    if not EVEN_K:
        s = tl.where(j[None, :] < nk, s, float("-inf"))
    return s


@triton.jit(do_not_specialize=["offset", "before", "after"])
def attend(
    Q, K, V, OUT, LSE, ORDER, FULL_AT, FULL, FULL_ADDED, MIXED_AT, MIXED, MIXED_ADDED, CELLS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n, lead_b, lead_h,
    heads, group, nq, nk, scale, offset, before, after,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    IEEE: tl.constexpr, BAND: tl.constexpr, ADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUT and LSE of one tile of queries of one head: grid (query tiles, heads of all batch rows).

    ORDER: in which the tiles of each list are worked off, those that see most first.
    """
    which = tl.program_id(1)
    b, h = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    rows = (b * lead_b + h * lead_h) * tl.num_programs(0)
    tile = tl.load(ORDER + rows + tl.program_id(0))
    first = tile * BLOCK_Q
    i, d = first + tl.arange(0, BLOCK_Q), tl.arange(0, WIDTH_V)
    q = _tile(Q + b * q_b + h * q_h, first, nq, q_n, WIDTH, D, BLOCK_Q, EVEN_Q)
    k_at, v_at = K + b * k_b + (h // group) * k_h, V + b * v_b + (h // group) * v_h
    most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    sums = tl.zeros([BLOCK_Q, WIDTH_V], tl.float32)
    for phase in tl.static_range(2):
        lists_at = (FULL_AT if phase == 0 else MIXED_AT) + rows + tile
        columns = FULL if phase == 0 else MIXED
        added_at = FULL_ADDED if phase == 0 else MIXED_ADDED
        for at in tl.range(tl.load(lists_at), tl.load(lists_at + 1), num_stages=STAGES):
            start = tl.load(columns + at) * BLOCK_K
            k = _tile(k_at, start, nk, k_n, WIDTH, D, BLOCK_K, EVEN_K)
            v = _tile(v_at, start, nk, v_n, WIDTH_V, DV, BLOCK_K, EVEN_K)
            added = tl.load(added_at + at) if ADDED else 0.0
            s = _scores(
                q, k, i, start + tl.arange(0, BLOCK_K), at, added, CELLS, nk, scale, offset, before, after,
                BLOCK_Q, BLOCK_K, EVEN_K, IEEE, phase == 1, BAND, ADDED,
            )  # fmt: skip
            higher = tl.maximum(most, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
            shrink = tl.exp2(most - base)
            p = tl.exp2(s - base[:, None])
            total = total * shrink + tl.sum(p, 1)
            sums = sums * shrink[:, None] + _dot(p.to(v.dtype), v, IEEE)
            most = higher
    out = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = OUT + b * out_b + h * out_h + tl.cast(first, tl.int64) * out_n
    out_at += tl.arange(0, BLOCK_Q)[:, None] * out_n + d[None, :]
    tl.store(out_at, out.to(OUT.dtype.element_ty), mask=(i[:, None] < nq) & (d[None, :] < DV))
    lse = tl.where(total == 0.0, float("-inf"), (most + tl.log2(total)) / LOG2E)
    tl.store(LSE + which.to(tl.int64) * nq + i, lse, mask=i < nq)


@triton.jit(do_not_specialize=["offset", "before", "after"])
def differentiate_queries(
    Q, K, V, OUT, GRAD, LSE, DELTA, D_Q,
    ORDER, FULL_AT, FULL, FULL_ADDED, MIXED_AT, MIXED, MIXED_ADDED, CELLS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n, grad_b, grad_h, grad_n, lead_b, lead_h,
    heads, group, nq, nk, scale, plain_scale, offset, before, after,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    IEEE: tl.constexpr, BAND: tl.constexpr, ADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """D_Q (B, H, Nq, D) of one tile of queries, and DELTA (B, H, Nq) = Σ grad · out, which the keys' kernel reads."""
    which = tl.program_id(1)
    b, h = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    rows = (b * lead_b + h * lead_h) * tl.num_programs(0)
    tile = tl.load(ORDER + rows + tl.program_id(0))
    first = tile * BLOCK_Q
    i, d = first + tl.arange(0, BLOCK_Q), tl.arange(0, WIDTH)
    q = _tile(Q + b * q_b + h * q_h, first, nq, q_n, WIDTH, D, BLOCK_Q, EVEN_Q)
    grad = _tile(GRAD + b * grad_b + h * grad_h, first, nq, grad_n, WIDTH_V, DV, BLOCK_Q, EVEN_Q)
    out = _tile(OUT + b * out_b + h * out_h, first, nq, out_n, WIDTH_V, DV, BLOCK_Q, EVEN_Q)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    row_at = which.to(tl.int64) * nq + i
    tl.store(DELTA + row_at, delta, mask=i < nq)
    lse = tl.load(LSE + row_at, mask=i < nq, other=float("-inf"))
    shift = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # every weight is 0 where nothing is seen
    k_at, v_at = K + b * k_b + (h // group) * k_h, V + b * v_b + (h // group) * v_h
    sums = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    for phase in tl.static_range(2):
        lists_at = (FULL_AT if phase == 0 else MIXED_AT) + rows + tile
        columns = FULL if phase == 0 else MIXED
        added_at = FULL_ADDED if phase == 0 else MIXED_ADDED
        for at in tl.range(tl.load(lists_at), tl.load(lists_at + 1), num_stages=STAGES):
            start = tl.load(columns + at) * BLOCK_K
            k = _tile(k_at, start, nk, k_n, WIDTH, D, BLOCK_K, EVEN_K)
            v = _tile(v_at, start, nk, v_n, WIDTH_V, DV, BLOCK_K, EVEN_K)
            added = tl.load(added_at + at) if ADDED else 0.0
            s = _scores(
                q, k, i, start + tl.arange(0, BLOCK_K), at, added, CELLS, nk, scale, offset, before, after,
                BLOCK_Q, BLOCK_K, EVEN_K, IEEE, phase == 1, BAND, ADDED,
            )  # fmt: skip
            p = tl.exp2(s - shift[:, None])
            d_s = p * (_dot(grad, tl.trans(v), IEEE) - delta[:, None])
            sums += _dot(d_s.to(k.dtype), k, IEEE)
    d_q_at = D_Q + row_at[:, None] * D + d[None, :]
    tl.store(d_q_at, (sums * plain_scale).to(D_Q.dtype.element_ty), mask=(i[:, None] < nq) & (d[None, :] < D))


@triton.jit(do_not_specialize=["offset", "before", "after"])
def differentiate_keys(
    Q, K, V, GRAD, LSE, DELTA, D_K, D_V,
    ORDER, FULL_AT, FULL, FULL_ADDED, MIXED_AT, MIXED, MIXED_ADDED, NUMBERS, CELLS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, grad_b, grad_h, grad_n, lead_b, lead_h,
    heads, group, nq, nk, scale, plain_scale, offset, before, after,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    IEEE: tl.constexpr, BAND: tl.constexpr, ADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """D_K (B, Hkv, Nk, D) and D_V of one tile of keys, summed over the heads that read it: grid (key tiles, B · Hkv).

    The lists are by column here: FULL and MIXED hold rows of tiles, NUMBERS which stored tile each mixed one is.
    """
    which = tl.program_id(1)
    kv_heads = heads // group
    b, kv = (which // kv_heads).to(tl.int64), which % kv_heads
    place = tl.program_id(0)
    # Heads of one key head may have lists of their own; the first one's order serves them all.
    tile = tl.load(ORDER + (b * lead_b + (kv * group).to(tl.int64) * lead_h) * tl.num_programs(0) + place)
    start = tile * BLOCK_K
    j, d, d_v = start + tl.arange(0, BLOCK_K), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    k = _tile(K + b * k_b + kv.to(tl.int64) * k_h, start, nk, k_n, WIDTH, D, BLOCK_K, EVEN_K)
    v = _tile(V + b * v_b + kv.to(tl.int64) * v_h, start, nk, v_n, WIDTH_V, DV, BLOCK_K, EVEN_K)
    sums_k = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    sums_v = tl.zeros([BLOCK_K, WIDTH_V], tl.float32)
    for member in range(group):
        h = (kv * group + member).to(tl.int64)
        lists = (b * lead_b + h * lead_h) * tl.num_programs(0) + tile
        q_at, grad_at = Q + b * q_b + h * q_h, GRAD + b * grad_b + h * grad_h
        row_base = (b * heads + h) * nq
        for phase in tl.static_range(2):
            lists_at = (FULL_AT if phase == 0 else MIXED_AT) + lists
            tiles = FULL if phase == 0 else MIXED
            added_at = FULL_ADDED if phase == 0 else MIXED_ADDED
            for at in tl.range(tl.load(lists_at), tl.load(lists_at + 1), num_stages=STAGES):
                first = tl.load(tiles + at) * BLOCK_Q
                i = first + tl.arange(0, BLOCK_Q)
                q = _tile(q_at, first, nq, q_n, WIDTH, D, BLOCK_Q, EVEN_Q)
                grad = _tile(grad_at, first, nq, grad_n, WIDTH_V, DV, BLOCK_Q, EVEN_Q)
                lse = tl.load(LSE + row_base + i, mask=i < nq, other=float("-inf"))
                delta = tl.load(DELTA + row_base + i, mask=i < nq, other=0.0)
                shift = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                added = tl.load(added_at + at) if ADDED else 0.0
                number = tl.load(NUMBERS + at) if phase == 1 and not BAND else 0
                s = _scores(
                    q, k, i, j, number, added, CELLS, nk, scale, offset, before, after,
                    BLOCK_Q, BLOCK_K, EVEN_K, IEEE, phase == 1, BAND, ADDED,
                )  # fmt: skip
                p = tl.exp2(s - shift[:, None])
                sums_v += _dot(tl.trans(p).to(grad.dtype), grad, IEEE)
                d_s = p * (_dot(grad, tl.trans(v), IEEE) - delta[:, None])
                sums_k += _dot(tl.trans(d_s).to(q.dtype), q, IEEE)
    key_at = which.to(tl.int64) * nk + j
    d_k_at = D_K + key_at[:, None] * D + d[None, :]
    tl.store(d_k_at, (sums_k * plain_scale).to(D_K.dtype.element_ty), mask=(j[:, None] < nk) & (d[None, :] < D))
    d_v_at = D_V + key_at[:, None] * DV + d_v[None, :]
    tl.store(d_v_at, sums_v.to(D_V.dtype.element_ty), mask=(j[:, None] < nk) & (d_v[None, :] < DV))
