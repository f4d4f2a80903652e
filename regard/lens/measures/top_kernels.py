"""The k largest weights of each row, exactly, as four Triton kernels that follow the measuring pass.

The measuring kernel leaves, for each row, its largest score in every group of keys. Let t be the k-th largest of these
maxima: k keys of the row reach t, so none of its k largest scores is below t, and all of them lie in groups whose
maximum reaches t. `select` finds t; `enlist` writes, for each tile of keys, the list of the rows that must look into
it; `collect` computes those scores once more, as the measuring kernel did, and keeps what reaches t; `finish` sorts the
few that are left.

How many are left is bounded, whatever the scores. Among groups whose maximum is t itself only the first are chosen, so
that k + 1 groups are chosen at most; and k + 1 scores are kept of a tile at most, the lower key first among equals. One
more than k, because the row is tied if the next score equals the last one taken. Where k is large, groups are narrower
than tiles, and a tile may hold scores t in groups that were not chosen: keys beyond `cut` are then kept only above t.

Scores are in units of log₂; in heads with large logits, log₂ weights stand for them. A part is some heads of all batch
rows and some of their queries, see gpu.py.
"""
# ruff: noqa: N803, SIM102
# mypy: ignore-errors

import triton
import triton.language as tl

from regard.lens.measures.kernels import log_weights, scores, scores_in_double

__all__ = ["collect", "enlist", "finish", "select"]

NO_KEY = tl.constexpr(2147483647)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["head_from", "k"])
def select(
    MAXIMA, THRESHOLD, CUT, HIGHEST, LARGE,
    head_from, row_from, rows, nq, tiles, k,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PER_TILE: tl.constexpr, ROWS: tl.constexpr, WANT_MAXIMUM: tl.constexpr,
):  # fmt: skip
    """Each row's t: grid (blocks of rows, heads).

    MAXIMA: (heads, groups, rows), −∞ afterwards where a group reaches t and is not chosen.
    THRESHOLD, CUT: (heads, rows).  HIGHEST: (all heads, nq), each row's largest score, but for heads in LARGE.
    """
    head = tl.program_id(1).to(tl.int64)
    row, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, GROUPS)
    at = MAXIMA + head * tiles * PER_TILE * rows + (group[:, None] * rows + row[None, :])
    inside = (group[:, None] < tiles * PER_TILE) & (row[None, :] < rows)
    x = tl.load(at, mask=inside, other=float("-inf"))  # (GROUPS, ROWS)

    t = tl.max(x, 0)
    if WANT_MAXIMUM:
        if tl.load(LARGE + head + head_from) == 0:
            tl.store(HIGHEST + (head + head_from) * nq + row_from + row, t, mask=row < rows)
    highest = t
    for _ in range(k - 1):  # to the next lower value
        t = tl.max(tl.where(x < t[None, :], x, float("-inf")), 0)
    if tl.max(tl.sum(((x >= t[None, :]) & (x > float("-inf"))).to(tl.int32), 0), 0) > k:
        t = highest  # some are equal: once more, until k groups reach it, and equal ones count each
        for _ in range(k - 1):
            reach = tl.sum((x >= t[None, :]).to(tl.int32), 0)
            t = tl.where(reach >= k, t, tl.max(tl.where(x < t[None, :], x, float("-inf")), 0))
    tl.store(THRESHOLD + head * rows + row, t, mask=row < rows)

    cut = tl.full([ROWS], NO_KEY, tl.int32)
    reach = tl.sum(((x >= t[None, :]) & (x > float("-inf"))).to(tl.int32), 0)
    if tl.max(reach, 0) > k + 1:
        above = tl.sum((x > t[None, :]).to(tl.int32), 0)
        equal = (x == t[None, :]) & (x > float("-inf"))
        chosen = equal & (tl.cumsum(equal.to(tl.int32), 0) <= k + 1 - above[None, :])
        tl.store(at, tl.full([GROUPS, ROWS], float("-inf"), tl.float32), mask=inside & equal & ~chosen)
        last = tl.max(tl.where(chosen, group[:, None], 0), 0)
        cut = tl.where(reach > k + 1, (last + 1) * GROUP, cut)
    if PER_TILE > 1:
        tl.store(CUT + head * rows + row, cut, mask=row < rows)


@triton.jit
def enlist(MAXIMA, THRESHOLD, LISTS, LENGTHS, rows, PER_TILE: tl.constexpr, STEP: tl.constexpr):
    """The rows that must look into a tile, in order, and how many they are: grid (key tiles, heads).

    LISTS: (heads, tiles, rows).  LENGTHS: (heads, tiles).
    """
    head = tl.program_id(1).to(tl.int64)
    in_lists = head * tl.num_programs(0) + tl.program_id(0)
    length = tl.zeros([], tl.int32)
    for at in range(0, rows, STEP):
        row = at + tl.arange(0, STEP)
        t = tl.load(THRESHOLD + head * rows + row, mask=row < rows, other=float("inf"))
        best = tl.full([STEP], float("-inf"), tl.float32)
        for group in range(PER_TILE):
            x = tl.load(MAXIMA + (in_lists * PER_TILE + group) * rows + row, mask=row < rows, other=float("-inf"))
            best = tl.maximum(best, x)
        listed = ((best >= t) & (best > float("-inf"))).to(tl.int32)
        tl.store(LISTS + in_lists * rows + length + tl.cumsum(listed, 0) - listed, row, mask=listed != 0)
        length += tl.sum(listed, 0)
    tl.store(LENGTHS + in_lists, length)


@triton.jit(do_not_specialize=["head_from", "k"])
def collect(
    Q, K, EXACT, LARGE, BIAS_AT, KINDS, CELLS,
    THRESHOLD, CUT, LISTS, LENGTHS, COUNTS, SCORES, KEYS,
    q_b, q_h, q_n, k_b, k_h, k_n, bias_b, bias_h, bias_i, bias_j,
    kinds_b, kinds_h, kinds_i, cells_b, cells_h, cells_i, cells_j,
    heads, group, nq, nk,
    scale, scale_rest, cap, offset, before, after,
    head_from, row_from, rows, k,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, IEEE: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    ROOM: tl.constexpr, PER_TILE: tl.constexpr, IN_DOUBLE: tl.constexpr,
):  # fmt: skip
    """What reaches t in one tile of keys, of the rows on its list: grid (key tiles, heads, shares of the list).

    IN_DOUBLE: of the heads in LARGE, with their lse from EXACT; else of all other heads.
    SCORES, KEYS: (heads, rows, ROOM) what was found of each row, in any order.  COUNTS: (heads, rows) how many, from 0.
    """
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    in_lists = head * tl.num_programs(0) + tile
    length = tl.load(LENGTHS + in_lists)
    if tl.program_id(2) * BLOCK_Q >= length:
        return
    which = tl.program_id(1) + head_from
    if (tl.load(LARGE + which) != 0) != IN_DOUBLE:
        return
    b, h = which // heads, (which % heads).to(tl.int64)
    j = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, WIDTH)
    q_at = Q + b.to(tl.int64) * q_b + h * q_h
    k_at = K + b.to(tl.int64) * k_b + (h // group) * k_h + j[:, None].to(tl.int64) * k_n + d[None, :]
    bias_at = BIAS_AT + b.to(tl.int64) * bias_b + h * bias_h
    kinds_at = KINDS + b.to(tl.int64) * kinds_b + h * kinds_h + tile
    cells_at = CELLS if PACKED else CELLS + b.to(tl.int64) * cells_b + h * cells_h
    if not IN_DOUBLE:
        keys = tl.load(k_at, mask=(j[:, None] < nk) & (d[None, :] < D), other=0.0)

    for at in range(tl.program_id(2) * BLOCK_Q, length, tl.num_programs(2) * BLOCK_Q):
        place = at + tl.arange(0, BLOCK_Q)
        listed = place < length
        row = tl.load(LISTS + in_lists * rows + place, mask=listed, other=0)
        i = row_from + row
        kind_at = kinds_at + (i // BLOCK_Q)[:, None] * kinds_i
        if IN_DOUBLE:
            s = scores_in_double(
                q_at, K + b.to(tl.int64) * k_b + (h // group) * k_h, i, j, i % BLOCK_Q, bias_at, kind_at, cells_at,
                bias_i, bias_j, cells_i, cells_j, q_n, k_n, nq, nk, offset, before, after,
                scale, scale_rest, cap, D, BLOCK_Q, BLOCK_K, EVEN_K, MASK, PACKED, BIAS, SOFTCAP,
            )  # fmt: skip
            s = log_weights(s, tl.load(EXACT + which.to(tl.int64) * nq + i))
        else:
            q = tl.load(q_at + i[:, None].to(tl.int64) * q_n + d[None, :], mask=d[None, :] < D, other=0.0)
            s = scores(
                q, keys, i, j, i % BLOCK_Q, bias_at, kind_at, cells_at, bias_i, bias_j, cells_i, cells_j,
                nq, nk, scale, cap, offset, before, after,
                BLOCK_Q, BLOCK_K, EVEN_K, IEEE, MASK, True, PACKED, BIAS, SOFTCAP,
            )  # fmt: skip
        spot = head * rows + row
        t = tl.load(THRESHOLD + spot)
        kept = s >= t[:, None]
        if PER_TILE > 1:
            kept = kept & ((s > t[:, None]) | (j[None, :] < tl.load(CUT + spot)[:, None]))
        s = tl.where(kept & listed[:, None], s, float("-inf"))
        many = tl.minimum(tl.sum((s > float("-inf")).to(tl.int32), 1), k + 1)
        begin = tl.atomic_add(COUNTS + spot, many, mask=many > 0, sem="relaxed")
        for n in range(tl.max(many, 0)):
            best = tl.max(s, 1)
            key = tl.min(tl.where(s == best[:, None], j[None, :], NO_KEY), 1)
            fits = (n < many) & (begin + n < ROOM)
            tl.store(SCORES + spot * ROOM + begin + n, best, mask=fits)
            tl.store(KEYS + spot * ROOM + begin + n, key, mask=fits)
            s = tl.where(j[None, :] == key[:, None], float("-inf"), s)


@triton.jit(do_not_specialize=["head_from", "k"])
def finish(
    SCORES, KEYS, COUNTS, THRESHOLD, TOP_SCORE, TOP_KEY, TIED,
    head_from, row_from, rows, nq, k,
    ROWS: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The k best of what was found of each row: grid (blocks of rows, heads).

    TOP_SCORE, TOP_KEY: (all heads, nq, k) descending, −∞ and −1 beyond what is visible; these scores are in units of e.
    TIED: (all heads, nq) is a key left out as good as the last one taken?
    A row that was not collected whole gets NaN: it would be a mistake of ours, and must not look like a result.
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.load(COUNTS + head * rows + row, mask=row < rows, other=0)
    t = tl.load(THRESHOLD + head * rows + row, mask=row < rows, other=float("-inf"))
    lost = (count > ROOM) | ((count < k) & (t > float("-inf")))
    found_at, out_at = head * rows + row, (head + head_from) * nq + row_from + row
    if tl.max(count, 0) <= FEW:  # most often: a narrow block sorts faster
        _sort(SCORES, KEYS, TOP_SCORE, TOP_KEY, TIED, found_at, out_at, row < rows, count, lost, k, ROOM, FEW)
    else:
        _sort(SCORES, KEYS, TOP_SCORE, TOP_KEY, TIED, found_at, out_at, row < rows, count, lost, k, ROOM, WIDE)


@triton.jit
def _sort(
    SCORES, KEYS, TOP_SCORE, TOP_KEY, TIED, found_at, out_at, inside, count, lost, k,
    ROOM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """k times the best that is left, the lower key first among equals; then, is the next one as good?"""
    c = tl.arange(0, WIDTH)
    there = c[None, :] < tl.minimum(count, ROOM)[:, None]
    s = tl.load(SCORES + found_at[:, None] * ROOM + c[None, :], mask=there, other=float("-inf"))
    key = tl.load(KEYS + found_at[:, None] * ROOM + c[None, :], mask=there, other=NO_KEY)  # (ROWS, WIDTH)
    best = tl.max(s, 1)
    last = best
    for n in range(k):
        lowest = tl.min(tl.where(s == best[:, None], key, NO_KEY), 1)
        tl.store(TOP_SCORE + out_at * k + n, tl.where(lost, float("nan"), best * LN2), mask=inside)
        tl.store(TOP_KEY + out_at * k + n, tl.where(lost, 0, tl.where(best > float("-inf"), lowest, -1)), mask=inside)
        s = tl.where(key == lowest[:, None], float("-inf"), s)
        last = best
        best = tl.max(s, 1)
    tl.store(TIED + out_at, (best == last) & (best > float("-inf")), mask=inside)
