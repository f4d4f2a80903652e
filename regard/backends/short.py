"""Attention of many short sequences with a mask or bias on CUDA, as the windows of Swin: one kernel, forward only.

torch's fused kernels read a mask or bias as a dense tensor with a row of its own for every head and batch row, and are
cut for long sequences. Here a program has all keys of a head, and mask and bias stay as small as they are.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import inf, prod

import torch
from torch import Tensor

from regard.backends.call import (
    Call,
    cells_of_bias,
    cells_of_mask,
    custom_kernel_unsupported_reason,
    rows_together,
)
from regard.checks import is_tracing, is_transforming
from regard.devices import ROUNDED_ONCE, current, no_triton

__all__ = ["forward_with_lse", "how", "pays", "run", "unsupported_reason"]

SIZES = (16, 32, 64, 128, 256)  # of the axes of a tile; a product of two tiles needs 16
MOST_KEYS, WIDEST = SIZES[-1], 128  # of a head
MOST_BYTES = 1 << 16  # of the keys and values of a head; the kernel takes up to 96 KiB of shared memory for them
LEAST_MAJOR = 8  # compute capability of NVIDIA's GPUs with that much; AMD's report 9 and more
BLOCK_Q = 64  # queries of a program
MOST_BLOCKS = 65535  # CUDA's limit for the second axis of a grid
MANY_CELLS = 1 << 22  # of all heads; on an H200 fewer take less time than a launch


def unsupported_reason(call: Call) -> str | None:
    """Why this backend cannot do the call, or None."""
    if call.device.type != "cuda":
        return f"its kernel runs on cuda, and q is on {call.device.type}"
    traced = torch.compiler.is_dynamo_compiling()
    if not traced and (is_tracing() or torch.jit.is_tracing()):  # type: ignore[attr-defined, no-untyped-call]
        return "operations are being traced, and the launch of its kernel is none"
    if not traced and (missing := no_triton()) is not None:
        return missing
    if _major(call.device) < LEAST_MAJOR:
        return "its kernel is made for GPUs of compute capability 8 and later"
    return kernel_unsupported_reason(call)


def kernel_unsupported_reason(call: Call) -> str | None:
    """Why the kernel cannot do a call on any machine, Triton's interpreter included, or None."""
    if call.softcap is not None or call.sinks is not None or call.dropout:
        return "its kernel has no softcap, no sinks and no dropout"
    if call.q.dtype == torch.float64:
        return "the Triton kernel has no float64"
    if call.wants_gradient:
        return "its kernel has no backward"
    if is_transforming():  # also while torch.compile traces one
        return "it has no rules for the transforms of torch.func (vmap, grad, jvp)"
    d, dv, nq, nk = call.q.shape[-1], call.v.shape[-1], *call.sizes[2:]
    if nk > MOST_KEYS or max(d, dv) > WIDEST or nq > BLOCK_Q * MOST_BLOCKS:
        return f"its kernel holds up to {MOST_KEYS} keys, and head sizes up to {WIDEST}"
    if _tile_size(nk) * (_tile_size(d) + _tile_size(dv)) * call.q.dtype.itemsize > MOST_BYTES:
        return f"keys and values of a head take more than the {MOST_BYTES >> 10} KiB that its kernel holds"
    return custom_kernel_unsupported_reason(call)


def pays(call: Call) -> bool:
    """Whether the kernel is expected to be faster than torch's with a dense mask, for a call that it supports.

    Measured on an H200, bf16: windows of Swin 311 µs against 2,806, 64 texts of 128 positions with padding 32 against
    67, of 256 positions 110 against 142.
    """
    return (call.mask is not None or call.bias is not None) and prod(call.sizes) >= MANY_CELLS


def how(call: Call) -> str:
    """How it does the call, in a few words."""
    return "a Triton kernel with all keys of a head in one tile, compiled at the first call (seconds)"


def run(call: Call) -> Tensor:
    """The output (B, H, Nq, Dv)."""
    return _run(call, with_lse=False)[0]


def forward_with_lse(call: Call) -> tuple[Tensor, Tensor]:
    """The output, and each row's lse (B, H, Nq) in fp32, −∞ where it sees nothing."""
    return _run(call, with_lse=True)


def _run(call: Call, with_lse: bool) -> tuple[Tensor, Tensor]:
    from regard.backends.short_kernels import attend

    q, k, v = (rows_together(x.detach()) for x in (call.q, call.k, call.v))
    batch, heads, nq, nk = call.sizes
    tokens = q.new_empty(batch, nq, heads, v.shape[-1])  # as the layer after it reads it
    out = tokens.transpose(1, 2)
    lse = q.new_empty((batch, heads, nq) if with_lse else 1, dtype=torch.float32)
    if 0 in call.sizes or 0 in out.shape:
        return out.zero_(), lse.fill_(-inf)
    bias, mask, traced = cells_of_bias(call), cells_of_mask(call), torch.compiler.is_compiling()
    if bias is not None:
        bias = bias.detach() if traced else bias.detach().resolve_neg()
    if mask is not None:
        mask = mask.to(torch.uint8) if traced else mask.view(torch.uint8)  # torch.compile has no such view
    block_q = BLOCK_Q if nq > BLOCK_Q else _tile_size(nq)
    with nullcontext() if traced else current(call.device):
        attend[(batch * heads, -(-nq // block_q))](
            q, k, v, tokens, lse, lse if bias is None else bias, lse if mask is None else mask,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *_strides(bias), *_strides(mask),
            heads, heads // k.shape[1], nq, nk, call.scale,
            D=q.shape[-1], DV=v.shape[-1], WIDTH=_tile_size(q.shape[-1]), WIDTH_V=_tile_size(v.shape[-1]),
            BLOCK_Q=block_q, BLOCK_K=_tile_size(nk), HAS_BIAS=bias is not None, HAS_MASK=mask is not None,
            WANT_LSE=with_lse, IEEE=q.dtype == torch.float32, num_warps=4,
            **({} if traced else ROUNDED_ONCE),  # torch.compile does not take it; it is Triton's default
        )  # fmt: skip
    return out, lse


def _major(device: torch.device) -> int:
    """The first number of a GPU's compute capability, in a way that torch.compile traces."""
    major: int = torch.cuda.get_device_properties(device).major
    return major


def _tile_size(n: int) -> int:
    """The smallest of `SIZES` that holds n. By comparisons, which torch.compile keeps for a range of sizes."""
    return next(size for size in SIZES if n <= size)


def _strides(cells: Tensor | None) -> tuple[int, ...]:
    """The strides of four axes, 0 along those that are shared."""
    if cells is None:
        return (0, 0, 0, 0)
    return tuple(0 if n == 1 else step for n, step in zip(cells.shape, cells.stride(), strict=True))
