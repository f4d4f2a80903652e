"""Attention of short sequences as a Triton kernel: a program holds all keys and values of a head at once.

Numbers are fp32. The kernel knows pointers and sizes: neither torch, nor masks.
"""
# ruff: noqa: N803
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["attend"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(At, row, rows, step, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Those rows of a matrix, (len(row), WIDTH), SIZE of whose columns are there; 0 elsewhere."""
    col = tl.arange(0, WIDTH)
    here = (row[:, None] < rows) & (col[None, :] < SIZE)
    return tl.load(At + row[:, None] * step + col[None, :], mask=here, other=0.0)


@triton.jit
def _dot(a, b, IEEE: tl.constexpr):
    if IEEE:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def attend(
    Q, K, V, OUT, LSE, BIAS, CELLS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n,
    bias_b, bias_h, bias_i, bias_j, cells_b, cells_h, cells_i, cells_j,
    heads, group, nq, nk, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, WANT_LSE: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """OUT (B, H, Nq, Dv), and LSE (B, H, Nq) if wanted, of BLOCK_Q queries of one head: grid (B · H, query blocks).

    BIAS is added to the scores, CELLS is 0 where a key is hidden; their strides are 0 along axes that are shared.
    """
    which = tl.program_id(0).to(tl.int64)
    b, h = which // heads, which % heads
    # In 64 bits: a row times its stride may not fit into 32.
    i = tl.program_id(1).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    j = tl.arange(0, BLOCK_K).to(tl.int64)
    kv_head = h // group
    q = _rows(Q + b * q_b + h * q_h, i, nq, q_n, WIDTH, D)
    k = _rows(K + b * k_b + kv_head * k_h, j, nk, k_n, WIDTH, D)
    v = _rows(V + b * v_b + kv_head * v_h, j, nk, v_n, WIDTH_V, DV)
    there = (i[:, None] < nq) & (j[None, :] < nk)
    seen = there
    if HAS_MASK:
        cells = CELLS + b * cells_b + h * cells_h + i[:, None] * cells_i + j[None, :] * cells_j
        seen = tl.load(cells, mask=there, other=0) != 0
    s = _dot(q, tl.trans(k), IEEE) * tl.cast(scale, tl.float32)  # torch.compile gives the scale in fp64
    if HAS_BIAS:
        added = BIAS + b * bias_b + h * bias_h + i[:, None] * bias_i + j[None, :] * bias_j
        s += tl.load(added, mask=there, other=0.0).to(tl.float32)
    s = tl.where(seen, s, float("-inf"))
    most = tl.max(s, 1)
    base = tl.where(most == float("-inf"), 0.0, most)  # a row that sees nothing
    p = tl.exp2((s - base[:, None]) * LOG2E)  # of differences: scores near fp32's limit would overflow in units of log₂
    total = tl.sum(p, 1)
    out = _dot(p.to(v.dtype), v, IEEE) / tl.where(total == 0.0, 1.0, total)[:, None]
    d = tl.arange(0, WIDTH_V)
    out_at = OUT + b * out_b + h * out_h + i[:, None] * out_n + d[None, :]
    tl.store(out_at, out.to(OUT.dtype.element_ty), mask=(i[:, None] < nq) & (d[None, :] < DV))
    if WANT_LSE:
        lse = tl.where(total == 0.0, float("-inf"), base + tl.log2(total) / LOG2E)
        tl.store(LSE + which * nq + i, lse, mask=i < nq)
