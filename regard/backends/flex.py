"""Attention through FlexAttention: masks and biases compiled into torch's fused kernel, hidden blocks skipped.

The mask's own rule becomes `mask_mod`, its tile classification the block mask (never N×N), bias and softcap become
`score_mod`, and sinks a factor computed from lse. On CUDA the kernel is compiled once per form of call. On the CPU the
same translation runs unfused and forward only: good for checking, not for speed.

It does not know dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from regard.backends.call import Call
from regard.masks import FULL, PARTIAL, Mask
from regard.rules import IndexRule

__all__ = ["how", "refuse", "run"]

BLOCK = 128
LEAST_HEAD_SIZE = 16  # what the Triton product of two tiles needs


def refuse(call: Call) -> str | None:
    """Why this backend cannot do the call, or None."""
    kind = call.device.type
    if call.dropout:
        return "FlexAttention has no dropout"
    if call.numpy and call.q.dtype.itemsize > 8:
        return f"{call.q.dtype} exists in NumPy only"
    if kind == "cpu":
        return "FlexAttention has no backward on the CPU" if call.wants_gradient else None
    if kind != "cuda":
        return f"FlexAttention is compiled for CUDA here, not for {kind}"
    if call.q.dtype == torch.float64:
        return "FlexAttention's kernel has no float64"
    least = min(call.q.shape[-1], call.v.shape[-1])
    if least < LEAST_HEAD_SIZE:
        return f"FlexAttention's kernel needs a head size of at least {LEAST_HEAD_SIZE}, got {least}"
    return None


def how(call: Call) -> str:
    """How it does the call, in a few words."""
    if call.device.type == "cpu":
        return "FlexAttention, unfused on the CPU: builds N×N"
    return "FlexAttention, compiled; blocks of 128, skips hidden blocks"


def run(call: Call) -> Tensor:
    """The output (B, H, Nq, Dv)."""
    call = call.in_torch()
    _, _, nq, nk = call.sizes
    form = (
        None if call.mask is None else call.mask.form,
        None if call.bias is None else call.bias.form,
        call.softcap is None,
        call.sinks is None,
    )
    kernel = _compiled(form, call.device.type)
    blocks = None if call.mask is None else _block_mask(call.mask, nq, nk, call.device)
    grouped = call.k.shape[1] != call.q.shape[1]
    out = kernel(call.q, call.k, call.v, _score_mod(call), blocks, call.scale, grouped, call.sinks)
    assert isinstance(out, Tensor)
    return out


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, blocks: Any, scale: float, grouped: bool, sinks: Tensor | None
) -> Any:
    """One FlexAttention call; the function that is compiled."""
    aux = None if sinks is None else AuxRequest(lse=True)
    result = flex_attention(
        q, k, v, score_mod=score_mod, block_mask=blocks, scale=scale, enable_gqa=grouped, return_aux=aux
    )
    if sinks is None:
        return result
    out, stats = result
    assert stats.lse is not None
    # The sink adds e^sink to each row's sum: the output shrinks by e^lse / (e^lse + e^sink).
    gate = torch.sigmoid(stats.lse - sinks[:, None].to(stats.lse.dtype))
    return (out * gate.unsqueeze(-1)).to(q.dtype)


@lru_cache(maxsize=256)
def _compiled(form: object, device: str) -> Callable[..., Any]:
    """A compiled kernel per form of call, each from its own code object.

    torch.compile counts recompilations per code object and beyond eight runs the unfused path instead, in silence; a
    code object for each form keeps one form's recompilations (new lengths, new head sizes) from using up another's, and
    fullgraph makes the limit an error.
    """
    code = _kernel.__code__.replace(co_name=f"_kernel_{abs(hash((form, device)))}")
    fresh = FunctionType(code, _kernel.__globals__, code.co_name)
    return torch.compile(fresh, fullgraph=True, backend="inductor" if device == "cuda" else "eager")


def _score_mod(call: Call) -> Callable[..., Any] | None:
    """Softcap and bias as FlexAttention wants them: a function of the scaled score and its indices."""
    _, _, nq, nk = call.sizes
    term = None if call.bias is None else call.bias.bind(nq, nk, call.device, call.wide)
    cap = call.softcap
    if cap is None:
        return None if term is None else _add(term)
    return _bend(cap) if term is None else _bend_and_add(cap, term)


def _add(term: IndexRule) -> Callable[..., Any]:
    return lambda score, b, h, i, j: score + term(b, h, i, j)


def _bend(cap: float) -> Callable[..., Any]:
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap)


def _bend_and_add(cap: float, term: IndexRule) -> Callable[..., Any]:
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap) + term(b, h, i, j)


@lru_cache(maxsize=32)
def _block_mask(mask: Mask, nq: int, nk: int, device: torch.device) -> BlockMask:
    """FlexAttention's block mask from our tile classes: (N / 128)² numbers, never N×N."""
    kinds = mask.tiles(nq, nk, BLOCK, device)  # (B, H, Tq, Tk)
    partial, full = _listed(kinds == PARTIAL), _listed(kinds == FULL)
    see = mask.bind(nq, nk, device, torch.float32)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=see, seq_lengths=(nq, nk))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Booleans (B, H, Tq, Tk) → how many are True in each row, and their columns first."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)
