"""The measuring pass as a Triton kernel: one program keeps a tile of keys and walks the queries that may see it.

In every tile the kernel has the scores s and, lse being known, the exact weights p = 2^(s·log₂e − lse·log₂e). What is
summed over queries (received) grows cell by cell in registers and is reduced once, at the end. What is summed over keys
(entropy, squares, maximum) is reduced within the tile and added to memory atomically. A maximum per row and tile, for
top-k, is written as it is. The map comes from the rows' sums, or, where one program walks one line of the map, from
what its keys received.

Numbers are fp32, in units of log₂. The kernel does not know torch, masks or measures: only pointers and sizes.
"""
# ruff: noqa: N803
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["measure"]

BAND, TABLE = 1, 2  # MASK: keys within (before, after) of the query's position; a kind per tile. 0 is none
DISTANCE, DENSE = 1, 2  # BIAS: a number per j − i; a number per cell. 0 is none
BY_TILE, BY_ROW, BY_LINE = 1, 2, 3  # MAP: how its sums are kept, see gpu.py. 0 is none
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def measure(
    Q, K, LSE, BIAS_AT, KINDS, CELLS,
    RECEIVED, ENTROPY, SQUARES, MAXIMUM, TILE_MAXIMUM, MAP_AT,
    q_b, q_h, q_n, k_b, k_h, k_n, bias_b, bias_h, bias_i, bias_j,
    kinds_b, kinds_h, kinds_i, cells_b, cells_h, cells_i, cells_j,
    heads, group, nq, nk, key_tiles, map_q, map_k,
    scale, cap, offset, before, after,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, IEEE: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, MAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    WANT_RECEIVED: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_SQUARES: tl.constexpr,
    WANT_MAXIMUM: tl.constexpr, WANT_TILES: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one head: grid (key tiles, batch · heads, lines of the map or 1)."""
    tile, which = tl.program_id(0), tl.program_id(1)
    b, h = which // heads, which % heads
    first = tile * BLOCK_K
    j = first + tl.arange(0, BLOCK_K)
    rows, d = tl.arange(0, BLOCK_Q), tl.arange(0, WIDTH)
    row_base = which.to(tl.int64) * nq

    q_at = Q + b.to(tl.int64) * q_b + h * q_h
    k_at = K + b.to(tl.int64) * k_b + (h // group) * k_h + j[:, None].to(tl.int64) * k_n + d[None, :]
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
    if MAP == 3:  # only those in one line of the map
        line = tl.program_id(2)
        start = tl.maximum(start, (line * nq) // map_q)
        stop = tl.minimum(stop, ((line + 1) * nq) // map_q)
        inner = tl.minimum(tl.maximum(inner, start), stop)
        outer = tl.minimum(tl.maximum(outer, inner), stop)

    received = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    if MAP == 1 or MAP == 3:
        column = ((first + 1) * map_k - 1) // nk
        edge_k = ((column + 1) * nk) // map_k  # the first key of the next map cell
        straddles = edge_k < tl.minimum(first + BLOCK_K, nk)
        cell_at = which.to(tl.int64) * (map_q * map_k) + column
        map_at = MAP_AT + (cell_at * BLOCK_Q if MAP == 1 else cell_at + line * map_k)

    for phase in tl.static_range(3 if MASK == 1 else 1):
        if MASK == 1:
            begin = start if phase == 0 else inner if phase == 1 else outer
            end = inner if phase == 0 else outer if phase == 1 else stop
        else:
            begin, end = start, stop
        for at in tl.range(begin, end, BLOCK_Q, num_stages=STAGES):
            i = at + rows
            if EVEN_Q and WIDTH == D:
                q = tl.load(q_at + i[:, None].to(tl.int64) * q_n + d[None, :])
                shift = tl.load(LSE + row_base + i)
            else:
                inside = (i[:, None] < end) & (d[None, :] < D)
                q = tl.load(q_at + i[:, None].to(tl.int64) * q_n + d[None, :], mask=inside, other=0.0)
                shift = tl.load(LSE + row_base + i, mask=i < end, other=float("inf"))  # p = 0 beyond the last query
            if IEEE:
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
            else:
                s = tl.dot(q, tl.trans(k))
            s = s * scale  # with log₂e in it where nothing is added to the scores
            if SOFTCAP:
                x = s / cap
                square = x * x  # near 0 the other form would cancel
                series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
                s = cap * tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(x, 20.0)) + 1.0))
            if BIAS == 1:
                at_bias = BIAS_AT + b.to(tl.int64) * bias_b + h * bias_h + (j[None, :] - i[:, None] + nq - 1)
                s += tl.load(at_bias, mask=(i[:, None] < nq) & (j[None, :] < nk), other=0.0)
            if BIAS == 2:
                at_bias = BIAS_AT + b.to(tl.int64) * bias_b + h * bias_h + i[:, None].to(tl.int64) * bias_i
                s += tl.load(at_bias + j[None, :] * bias_j, mask=(i[:, None] < nq) & (j[None, :] < nk), other=0.0)
            if SOFTCAP or BIAS != 0:
                s = s * LOG2E
            if MASK == 1 and phase != 1:
                away = i[:, None] + offset - j[None, :]  # how far behind the query the key lies
                s = tl.where((away <= before) & (away >= -after), s, float("-inf"))
            if MASK == 2:
                kind = tl.load(KINDS + b.to(tl.int64) * kinds_b + h * kinds_h + (at // BLOCK_Q) * kinds_i + tile)
                if PACKED:  # kinds 2, 3, … number the tiles that are stored
                    cell = tl.maximum(kind - 2, 0).to(tl.int64) * (BLOCK_Q * BLOCK_K)
                    cells_at = CELLS + cell + rows[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
                else:
                    cells_at = CELLS + b.to(tl.int64) * cells_b + h * cells_h
                    cells_at += i[:, None].to(tl.int64) * cells_i + j[None, :] * cells_j
                inside = (i[:, None] < nq) & (j[None, :] < nk)
                seen = tl.load(cells_at, mask=inside & (kind + tl.zeros_like(i)[:, None] >= 2), other=0) + (kind == 1)
                s = tl.where(seen != 0, s, float("-inf"))
            if not EVEN_K:
                s = tl.where(j[None, :] < nk, s, float("-inf"))

            inside_rows = i < end
            if WANT_TILES:
                at_tile = TILE_MAXIMUM + (which.to(tl.int64) * key_tiles + tile) * nq + i
                tl.store(at_tile, tl.max(s, 1), mask=inside_rows)
            t = s - shift[:, None]
            p = tl.exp2(t)
            if WANT_MAXIMUM:  # integers in the order of the floats: one integer atomic, where floats need two
                bits = (tl.max(t, 1) + shift).to(tl.int32, bitcast=True)
                bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
                tl.atomic_max(MAXIMUM + row_base + i, bits, mask=inside_rows, sem="relaxed")
            if WANT_ENTROPY:
                if (MASK == 1 and phase != 1) or MASK == 2 or not EVEN_K or not EVEN_Q:
                    total = tl.sum(tl.where(p > 0.0, p * t, 0.0), 1)  # 0 · −∞
                else:
                    total = tl.sum(p * t, 1)
                tl.atomic_add(ENTROPY + row_base + i, total, mask=inside_rows, sem="relaxed")
            if WANT_SQUARES:
                tl.atomic_add(SQUARES + row_base + i, tl.sum(p * p, 1), mask=inside_rows, sem="relaxed")
            if WANT_RECEIVED or MAP == 3:
                received += p
            if MAP == 1:
                # One number per row of the tile and map cell: the same row of every tile in a cell adds to it.
                line = ((i + 1) * map_q - 1) // nq if not ALIGNED else at * map_q // nq
                spot = map_at + line * (map_k * BLOCK_Q) + rows
                if ALIGNED:
                    tl.atomic_add(spot, tl.sum(p, 1), sem="relaxed")
                else:
                    low = tl.where(j[None, :] < edge_k, p, 0.0)
                    tl.atomic_add(spot, tl.sum(low, 1), mask=inside_rows, sem="relaxed")
                    if straddles:
                        tl.atomic_add(spot + BLOCK_Q, tl.sum(p - low, 1), mask=inside_rows, sem="relaxed")
            if MAP == 2:
                for c in range(((first + 1) * map_k - 1) // nk, (tl.minimum(first + BLOCK_K, nk) * map_k - 1) // nk + 1):
                    own = (j >= (c * nk) // map_k) & (j < ((c + 1) * nk) // map_k)
                    share = tl.sum(tl.where(own[None, :], p, 0.0), 1)
                    tl.atomic_add(MAP_AT + (row_base + i) * map_k + c, share, mask=inside_rows, sem="relaxed")

    if WANT_RECEIVED or MAP == 3:
        columns = tl.sum(received, 0)  # (BLOCK_K,)
    if MAP == 3:
        if start < stop:
            tl.atomic_add(map_at, tl.sum(tl.where(j < edge_k, columns, 0.0), 0), sem="relaxed")
            if straddles:
                tl.atomic_add(map_at + 1, tl.sum(tl.where(j < edge_k, 0.0, columns), 0), sem="relaxed")
            if WANT_RECEIVED:
                tl.atomic_add(RECEIVED + which.to(tl.int64) * nk + j, columns, mask=j < nk, sem="relaxed")
    elif WANT_RECEIVED:
        tl.store(RECEIVED + which.to(tl.int64) * nk + j, columns, mask=j < nk)
