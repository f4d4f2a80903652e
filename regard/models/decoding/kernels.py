"""Triton kernels for one query per text: a matrix times a vector, positions and cache in one, attention in pieces.

A decoding step reads every weight once and computes almost nothing with it, so what counts is that memory never waits:
norms, biases, activations and residual sums ride along with the matrix they belong to. Numbers are fp32 inside.

The kernels know pointers and sizes: neither torch, nor models, nor masks.
"""
# ruff: noqa: N803
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["attend", "combine", "place", "project"]

# NORM: 1 root mean square, 2 mean and variance.  ACT: 1 relu, 2 silu, 3 gelu, 4 gelu by tanh.  0 is none, for both.
LOG2E = tl.constexpr(1.4426950408889634)
ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_2_BY_PI = tl.constexpr(0.7978845608028654)


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
def project(
    X, W, BIAS, GAIN, SHIFT, RESIDUAL, OUT, rows, inputs, eps,
    NORM: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """OUT (rows) = RESIDUAL + act(W · norm(X) + BIAS), W (rows, inputs); gated: act(W₁·x) · (W₂·x), W (2·rows, inputs).

    A program has BLOCK_ROWS rows. The mean square of X divides what was summed, at the end; a mean has to be known
    first: WHOLE is a power of two that holds all of X.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < rows
    weights = W + row.to(tl.int64)[:, None] * inputs
    beside = W + (row + rows).to(tl.int64)[:, None] * inputs
    sums = tl.zeros([BLOCK_ROWS, BLOCK_INPUTS], tl.float32)
    sums_beside = tl.zeros([BLOCK_ROWS, BLOCK_INPUTS], tl.float32)
    squares = tl.zeros([BLOCK_INPUTS], tl.float32)
    mean = 0.0
    rate = 1.0
    if NORM == 2:
        every = tl.arange(0, WHOLE)
        whole = tl.load(X + every, mask=every < inputs, other=0.0).to(tl.float32)
        mean = tl.sum(whole, 0) / inputs
        whole = tl.where(every < inputs, whole - mean, 0.0)
        rate = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / inputs + eps)
    for start in range(0, inputs, BLOCK_INPUTS):
        column = start + tl.arange(0, BLOCK_INPUTS)
        here = column < inputs
        w = tl.load(weights + column[None, :], mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
        x = tl.load(X + column, mask=here, other=0.0).to(tl.float32)
        if NORM == 1:
            squares += x * x
            x *= tl.load(GAIN + column, mask=here, other=0.0).to(tl.float32)
        if NORM == 2:
            x = (x - mean) * rate * tl.load(GAIN + column, mask=here, other=0.0).to(tl.float32)
            x += tl.load(SHIFT + column, mask=here, other=0.0).to(tl.float32)
        sums += w * x[None, :]
        if GATED:
            w = tl.load(beside + column[None, :], mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
            sums_beside += w * x[None, :]
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
def place(
    QKV, COS, SIN, Q, K, V, AT, q_heads, kv_heads, head_dim, width, room,
    TURN: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn queries and keys to their positions; write queries to Q (B, H, D), keys and values into the caches at AT.

    QKV: (B, (H + 2·Hkv)·D), queries, then keys, then values.  COS, SIN: (B, width/2).  K, V: (B, Hkv, room, D).
    A program has one head of one text.
    """
    text, head = tl.program_id(0), tl.program_id(1)
    heads = q_heads + 2 * kv_heads
    d = tl.arange(0, BLOCK)
    inside = d < head_dim
    source = QKV + (text * heads + head) * head_dim
    x = tl.load(source + d, mask=inside, other=0.0)
    y = x.to(tl.float32)
    if TURN:
        half = width // 2
        if INTERLEAVED:
            pair, partner, first = d // 2, d ^ 1, d % 2 == 0
        else:
            pair, partner, first = d % half, tl.where(d < half, d + half, d - half), d < half
        turned = tl.where(head < q_heads + kv_heads, width, 0)  # values are not
        turning = d < turned
        other = tl.load(source + partner, mask=turning, other=0.0).to(tl.float32)
        cos = tl.load(COS + text * half + pair, mask=turning, other=1.0)
        sin = tl.load(SIN + text * half + pair, mask=turning, other=0.0)
        y = y * cos + tl.where(first, -other, other) * sin
    at = tl.load(AT)
    if head < q_heads:
        tl.store(Q + (text * q_heads + head) * head_dim + d, y, mask=inside)
    elif head < q_heads + kv_heads:
        cell = (text * kv_heads + head - q_heads).to(tl.int64) * room + at
        tl.store(K + cell * head_dim + d, y, mask=inside)
    else:
        cell = (text * kv_heads + head - q_heads - kv_heads).to(tl.int64) * room + at
        tl.store(V + cell * head_dim + d, x, mask=inside)


@triton.jit
def attend(
    Q, K, V, START, AT, SUMS, MOST, TOTAL, q_heads, kv_heads, head_dim, room, pieces, scale,
    GROUP: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one query per text over one chunk of its keys, from START of the text to AT.

    A program has the GROUP query heads of one key head and CHUNK keys, TILE at a time. It leaves Σ e^(s − most)·v in
    SUMS (B·H, pieces, D), and most and Σ e^(s − most) in MOST and TOTAL (B·H, pieces), in units of log₂.
    """
    pair, piece = tl.program_id(0), tl.program_id(1)  # pair: text and key head
    text, kv_head = pair // kv_heads, pair % kv_heads
    first, last = tl.load(START + text), tl.load(AT)
    begin = piece * CHUNK
    if (begin > last) | (begin + CHUNK <= first):
        return
    d, g = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    head = text * q_heads + kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < head_dim)[None, :]
    q = tl.load(Q + head[:, None] * head_dim + d[None, :], mask=inside, other=0.0)
    most = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    sums = tl.zeros([PADDED, BLOCK], tl.float32)
    cells = pair.to(tl.int64) * room * head_dim
    for start in range(begin, tl.minimum(begin + CHUNK, last + 1), TILE):
        j = start + tl.arange(0, TILE)
        seen = (j >= first) & (j <= last)
        at = cells + j.to(tl.int64)[:, None] * head_dim + d[None, :]
        here = seen[:, None] & (d < head_dim)[None, :]
        k = tl.load(K + at, mask=here, other=0.0)
        v = tl.load(V + at, mask=here, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)  # (PADDED, TILE)
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(most, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of padding alone
        shrink = tl.exp2(most - base)
        p = tl.exp2(s - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = higher
    slot = head.to(tl.int64) * pieces + piece
    tl.store(SUMS + slot[:, None] * head_dim + d[None, :], sums, mask=inside)
    tl.store(MOST + slot, most, mask=g < GROUP)
    tl.store(TOTAL + slot, total, mask=g < GROUP)


@triton.jit
def combine(
    SUMS, MOST, TOTAL, START, AT, OUT, q_heads, head_dim, pieces,
    CHUNK: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `attend` left of each chunk into one result, OUT (B·H, D). A program has one head; SOME chunks at a time."""
    head = tl.program_id(0).to(tl.int64)
    text = head // q_heads
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
