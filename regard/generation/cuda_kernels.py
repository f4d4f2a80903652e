"""Triton kernels for one token per text: a matrix times a vector; positions, cache and attention, in pieces.

A decoding step reads every weight once and computes almost nothing with it, so what counts is that memory never waits:
norms, biases, activations and residual sums ride along with the matrix they belong to, and where the GPU can (OVERLAP)
a kernel begins while those before it still run, and fetches what none of them writes. Numbers are fp32 inside.
"""
# ruff: noqa: N803
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["attend", "combine", "project"]

# NORM: 1 root mean square, 2 mean and variance.  ACT: 1 relu, 2 silu, 3 gelu, 4 gelu by tanh.  0 is none, for both.
LOG2E = tl.constexpr(1.4426950408889634)
ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_2_BY_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def take_over(OVERLAP: tl.constexpr):
    """Let the next kernel begin, then wait for all that the ones before have written. Every program must come by here.

    Several kernels may be under way at a time: before this, a program reads only what no kernel of the step writes
    (weights, places, older keys and values), and writes nothing. One that ended without waiting would tell the next
    that its forerunners have ended, too.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def activate(y, ACT: tl.constexpr):
    """The activation of that number."""
    if ACT == 1:
        y = tl.maximum(y, 0.0)
    if ACT == 2:
        y = y / (1.0 + tl.exp(-y))
    if ACT == 3:
        y = 0.5 * y * (1.0 + tl.erf(y * ROOT_HALF))
    if ACT == 4:
        inner = ROOT_2_BY_PI * (y + 0.044715 * y * y * y)
        y = y / (1.0 + tl.exp(-2.0 * inner))  # 0.5·(1 + tanh(z)) = 1/(1 + e^(−2z))
    return y


@triton.jit
def tile(ROWS, inside, column, inputs):
    """The weights of these rows and columns, (BLOCK_ROWS, BLOCK_INPUTS). Read once: no cache need keep them."""
    here = inside[:, None] & (column < inputs)[None, :]
    return tl.load(ROWS + column[None, :], mask=here, other=0.0, eviction_policy="evict_first")


@triton.jit
def inputs_at(X, GAIN, SHIFT, column, inputs, mean, rate, NORM: tl.constexpr):
    """Two of X at these columns: as it is, and as W shall see it, normed but for what is divided in the end."""
    here = column < inputs
    x = tl.load(X + column, mask=here, other=0.0).to(tl.float32)
    seen = x
    if NORM == 1:
        seen = x * tl.load(GAIN + column, mask=here, other=0.0).to(tl.float32)
    if NORM == 2:
        seen = (x - mean) * rate * tl.load(GAIN + column, mask=here, other=0.0).to(tl.float32)
        seen += tl.load(SHIFT + column, mask=here, other=0.0).to(tl.float32)
    return x, seen


@triton.jit
def project(
    X, W, BIAS, GAIN, SHIFT, RESIDUAL, OUT, rows, inputs, eps,
    NORM: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """OUT (rows) = RESIDUAL + act(W · norm(X) + BIAS), W (rows, inputs); gated: act(W₁·x) · (W₂·x), W (2·rows, inputs).

    A program has BLOCK_ROWS rows; its first weights are on their way before X is there. The mean square of X divides
    what was summed, at the end; a mean has to be known first: WHOLE is a power of two that holds all of X.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < rows
    weights = W + row.to(tl.int64)[:, None] * inputs
    beside = W + (row + rows).to(tl.int64)[:, None] * inputs
    column = tl.arange(0, BLOCK_INPUTS)
    w = tile(weights, inside, column, inputs)
    u = tile(beside, inside, column, inputs) if GATED else w
    take_over(OVERLAP)
    mean = 0.0
    rate = 1.0
    if NORM == 2:
        every = tl.arange(0, WHOLE)
        whole = tl.load(X + every, mask=every < inputs, other=0.0).to(tl.float32)
        mean = tl.sum(whole, 0) / inputs
        whole = tl.where(every < inputs, whole - mean, 0.0)
        rate = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / inputs + eps)
    x, seen = inputs_at(X, GAIN, SHIFT, column, inputs, mean, rate, NORM)
    squares = x * x
    sums = w.to(tl.float32) * seen[None, :]
    sums_beside = u.to(tl.float32) * seen[None, :] if GATED else sums
    for start in range(BLOCK_INPUTS, inputs, BLOCK_INPUTS):
        column = start + tl.arange(0, BLOCK_INPUTS)
        w = tile(weights, inside, column, inputs)
        x, seen = inputs_at(X, GAIN, SHIFT, column, inputs, mean, rate, NORM)
        squares += x * x
        sums += w.to(tl.float32) * seen[None, :]
        if GATED:
            sums_beside += tile(beside, inside, column, inputs).to(tl.float32) * seen[None, :]
    rate = 1.0 / tl.sqrt(tl.sum(squares, 0) / inputs + eps) if NORM == 1 else 1.0
    y = tl.sum(sums, 1) * rate
    if HAS_BIAS:
        y += tl.load(BIAS + row, mask=inside, other=0.0).to(tl.float32)
    y = activate(y, ACT)
    if GATED:
        up = tl.sum(sums_beside, 1) * rate
        if HAS_BIAS:
            up += tl.load(BIAS + rows + row, mask=inside, other=0.0).to(tl.float32)
        y *= up
    if HAS_RESIDUAL:
        y += tl.load(RESIDUAL + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row, y, mask=inside)


@triton.jit
def turned(HEADS, COS, SIN, d, inside, width, TURN: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Heads turned to their position, (M, BLOCK) in fp32. HEADS: (M, 1), where each begins.  d: (1, BLOCK).

    Of a head, the first `width` dimensions turn in pairs. COS, SIN: (width/2), of this text.
    """
    x = tl.load(HEADS + d, mask=inside, other=0.0).to(tl.float32)
    if TURN:
        half = width // 2
        if INTERLEAVED:
            pair, partner, first = d // 2, d ^ 1, d % 2 == 0
        else:
            pair, partner, first = d % half, tl.where(d < half, d + half, d - half), d < half
        other = tl.load(HEADS + partner, mask=inside & (d < width), other=0.0).to(tl.float32)
        cos = tl.load(COS + pair, mask=d < width, other=1.0)
        sin = tl.load(SIN + pair, mask=d < width, other=0.0)
        x = x * cos + tl.where(first, -other, other) * sin
    return x


@triton.jit
def older(CACHE, cells, start, first, end, d, head_dim, TILE: tl.constexpr):
    """Keys or values of the TILE tokens from `start` on, (TILE, BLOCK); 0 before `first` and from `end` on."""
    j = start + tl.arange(0, TILE)[:, None]
    here = (j >= first) & (j < end) & (d < head_dim)
    return tl.load(CACHE + cells + j.to(tl.int64) * head_dim, mask=here, other=0.0)


@triton.jit
def attend(
    QKV, COS, SIN, K, V, START, AT, SUMS, MOST, TOTAL, FINISHED, OUT,
    q_heads, kv_heads, head_dim, width, room, pieces, scale,
    TURN: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of one new token per text over one chunk of its keys, from START of the text to AT, its own.

    QKV: (B, (H + 2·Hkv)·D), the token's queries, then keys, then values.  COS, SIN: (B, width/2).
    K, V: (B, Hkv, room, D), the caches; its own key and value are written to them at AT.
    A program has the GROUP query heads of one key head and CHUNK keys, TILE at a time. It leaves Σ e^(s − most)·v in
    SUMS (B·H, pieces, D), and most and Σ e^(s − most) in MOST and TOTAL (B·H, pieces), in units of log₂. Of few keys,
    the first tile is read before the kernels before this one have ended; of many, STAGES tiles are on their way.

    FEW: 0, or a power of two of at least `pieces`: then the last program of a key head to finish makes OUT (B·H, D) of
    what all have left, and `combine` is not launched. FINISHED (B·Hkv) counts them, and is 0 between kernels.
    """
    pair, piece = tl.program_id(0), tl.program_id(1)  # pair: text and key head
    text, kv_head = pair // kv_heads, pair % kv_heads
    first, last = tl.load(START + text), tl.load(AT)
    begin = piece * CHUNK
    end = tl.minimum(begin + CHUNK, last)  # of the older keys, which no kernel of this step writes
    d, g = tl.arange(0, BLOCK)[None, :], tl.arange(0, PADDED)
    cells = pair.to(tl.int64) * room * head_dim + d
    if STAGES == 1:
        k = older(K, cells, begin, first, end, d, head_dim, TILE)
        v = older(V, cells, begin, first, end, d, head_dim, TILE)
    take_over(OVERLAP)
    if (begin > last) | (begin + CHUNK <= first):
        return
    token = QKV + text * (q_heads + 2 * kv_heads) * head_dim
    cos, sin = COS + text * (width // 2), SIN + text * (width // 2)
    inside = (g < GROUP)[:, None] & (d < head_dim)
    queries = token + (kv_head * GROUP + g)[:, None] * head_dim
    q = turned(queries, cos, sin, d, inside, width, TURN, INTERLEAVED).to(K.dtype.element_ty)
    most = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    sums = tl.zeros([PADDED, BLOCK], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        if STAGES > 1:
            k = older(K, cells, start, first, end, d, head_dim, TILE)
            v = older(V, cells, start, first, end, d, head_dim, TILE)
        j = start + tl.arange(0, TILE)
        seen = (j >= first) & (j < end)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)  # (PADDED, TILE)
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(most, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of padding alone
        shrink = tl.exp2(most - base)
        p = tl.exp2(s - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = higher
        if STAGES == 1:
            k = older(K, cells, start + TILE, first, end, d, head_dim, TILE)
            v = older(V, cells, start + TILE, first, end, d, head_dim, TILE)
    if last < begin + CHUNK:
        own = token + (q_heads + kv_head + tl.arange(0, 1)[:, None]) * head_dim
        new_k = turned(own, cos, sin, d, d < head_dim, width, TURN, INTERLEAVED).to(K.dtype.element_ty)  # (1, BLOCK)
        new_v = tl.load(own + kv_heads * head_dim + d, mask=d < head_dim, other=0.0)
        tl.store(K + cells + last.to(tl.int64) * head_dim, new_k, mask=d < head_dim)
        tl.store(V + cells + last.to(tl.int64) * head_dim, new_v, mask=d < head_dim)
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * (scale * LOG2E)  # (PADDED)
        peak = tl.maximum(most, score)
        weight = tl.exp2(score - peak)
        total = total * tl.exp2(most - peak) + weight
        sums = sums * tl.exp2(most - peak)[:, None] + weight[:, None] * new_v.to(tl.float32)
        most = peak
    slot = (text * q_heads + kv_head * GROUP + g).to(tl.int64) * pieces + piece
    tl.store(SUMS + slot[:, None] * head_dim + d, sums, mask=inside)
    tl.store(MOST + slot, most, mask=g < GROUP)
    tl.store(TOTAL + slot, total, mask=g < GROUP)
    if FEW > 0:
        ran = last // CHUNK - first // CHUNK + 1
        tl.debug_barrier()  # all threads have stored theirs
        if tl.atomic_add(FINISHED + pair, 1, sem="acq_rel") == ran - 1:
            tl.store(FINISHED + pair, 0)
            head = text * q_heads + kv_head * GROUP + g
            out = combined(SUMS, MOST, TOTAL, head, g < GROUP, first // CHUNK, ran, pieces, d, head_dim, FEW)
            tl.store(OUT + head[:, None] * head_dim + d, out, mask=inside)


@triton.jit
def combined(SUMS, MOST, TOTAL, head, inside, begin, ran, pieces, d, head_dim, FEW: tl.constexpr):
    """What was left of `ran` pieces from `begin` on, of at most FEW, into one result for each head, (PADDED, BLOCK)."""
    slot = head.to(tl.int64) * pieces + begin
    n = tl.arange(0, FEW)[None, :]
    here = inside[:, None] & (n < ran)
    m = tl.load(MOST + slot[:, None] + n, mask=here, other=float("-inf"))  # (PADDED, FEW)
    most = tl.max(m, 1)
    most = tl.where(inside, most, 0.0)
    total = tl.sum(tl.load(TOTAL + slot[:, None] + n, mask=here, other=0.0) * tl.exp2(m - most[:, None]), 1)
    sums = tl.zeros([head.shape[0], d.shape[1]], tl.float32)
    for piece in tl.static_range(FEW):
        there = tl.where(inside, piece, FEW) < ran
        share = tl.exp2(tl.load(MOST + slot + piece, mask=there, other=float("-inf")) - most)
        part = tl.load(SUMS + (slot + piece)[:, None] * head_dim + d, mask=there[:, None] & (d < head_dim), other=0.0)
        sums += part * share[:, None]
    return sums / tl.where(inside, total, 1.0)[:, None]


@triton.jit
def combine(
    SUMS, MOST, TOTAL, START, AT, OUT, q_heads, head_dim, pieces,
    CHUNK: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What `attend` left of each chunk into one result, OUT (B·H, D). A program has one head; SOME chunks at a time."""
    head = tl.program_id(0).to(tl.int64)
    text = head // q_heads
    take_over(OVERLAP)
    first, last = tl.load(START + text) // CHUNK, tl.load(AT) // CHUNK
    d = tl.arange(0, BLOCK)
    most = float("-inf")
    total = 0.0
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(first, last + 1, SOME):
        piece = start + tl.arange(0, SOME)
        here = piece <= last
        m = tl.load(MOST + head * pieces + piece, mask=here, other=float("-inf"))
        t = tl.load(TOTAL + head * pieces + piece, mask=here, other=0.0)
        rows = (head * pieces + piece)[:, None] * head_dim + d[None, :]
        part = tl.load(SUMS + rows, mask=here[:, None] & (d < head_dim)[None, :], other=0.0)
        higher = tl.maximum(most, tl.max(m, 0))
        shrink, share = tl.exp2(most - higher), tl.exp2(m - higher)
        total = total * shrink + tl.sum(t * share, 0)
        sums = sums * shrink + tl.sum(part * share[:, None], 0)
        most = higher
    tl.store(OUT + head * head_dim + d, sums / total, mask=d < head_dim)
