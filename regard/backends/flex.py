"""Attention through FlexAttention: masks and biases compiled into torch's fused kernel, hidden blocks skipped.

The mask's own rule becomes `mask_mod`, its tile classification the block mask (never N×N), bias and softcap become
`score_mod`, and sinks a factor computed from lse. On CUDA the kernel is compiled once per form of call, which takes up
to half a minute; another text of that form, with other global tokens or more padding, runs through the same. On the CPU
the same translation runs unfused and forward only: good for checking, not for speed. Dropout is not supported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from math import inf
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from regard.backends.call import Call, Launch, custom_kernel_unsupported_reason
from regard.masks import FULL, PARTIAL, Mask
from regard.masks.mask import IndexRule, keep

__all__ = ["forward_with_lse", "how", "launcher", "run", "unsupported_reason"]

BLOCK = 128
OWN_KERNELS = 4  # of one form, before further sizes share one
LEAST_HEAD_SIZE = 16  # what the Triton product of two tiles needs


def unsupported_reason(call: Call) -> str | None:
    """Why this backend cannot do the call, or None."""
    kind = call.device.type
    if call.dropout:
        return "FlexAttention has no dropout"
    if (reason := custom_kernel_unsupported_reason(call)) is not None:
        return reason
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
    return "FlexAttention, compiled at the first call (up to half a minute); blocks of 128, skips hidden blocks"


def run(call: Call) -> Tensor:
    """The output (B, H, Nq, Dv)."""
    return _run(call, with_lse=False)[0]


def forward_with_lse(call: Call) -> tuple[Tensor, Tensor]:
    """The output, and each row's lse (B, H, Nq), −∞ where it sees nothing."""
    out, lse = _run(call, with_lse=True)
    assert lse is not None
    return out, lse.detach()


def launcher(call: Call, reads: bool) -> Launch | None:
    """The call for other q, k and v, without its checks; None where mask or bias came as a tensor (`reads`)."""
    if reads:
        return None
    kernel, arguments = _kernel_for(call, with_lse=False), _arguments(call, with_lse=False, traced=False)
    return lambda q, k, v, mask, bias: kernel(q, k, v, *arguments)[0]


def _run(call: Call, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    call = call.in_torch()
    traced = torch.compiler.is_compiling()  # compiled from outside: no compilation or cache of our own
    kernel = _kernel if traced else _kernel_for(call, with_lse)
    arguments = (call.q, call.k, call.v, *_arguments(call, with_lse, traced))
    if any(t.requires_grad and not t.is_leaf for t in call.extras):  # torch.compile warns that it reads their .grad
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)
            out, lse = kernel(*arguments)
    else:
        out, lse = kernel(*arguments)
    assert isinstance(out, Tensor)
    return out, lse


def _arguments(call: Call, with_lse: bool, traced: bool) -> tuple[Any, ...]:
    """The kernel's arguments after q, k and v."""
    mask, (_, _, nq, nk), device = call.mask, call.sizes, call.q.device
    if mask is None:
        blocks = None
    elif traced:
        blocks = _block_mask(mask, nq, nk, device)
    else:
        blocks = _kept_block_mask(mask, nq, nk, device)
    grouped = call.k.shape[1] != call.sizes[1]
    # A bias that is looked up is loaded ahead like keys and values: three loads in flight would not fit into a core.
    tables = call.bias is not None and call.bias.holds_tensors and device.type == "cuda"
    options = {"num_stages": 2} if tables else None
    return _score_mod(call), blocks, call.scale, grouped, call.sinks, with_lse, options


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any,
    blocks: Any,
    scale: float,
    grouped: bool,
    sinks: Tensor | None,
    with_lse: bool,
    options: Any,
) -> tuple[Tensor, Tensor | None]:
    """One FlexAttention call; the function that is compiled."""
    aux = AuxRequest(lse=True) if with_lse or sinks is not None else None
    result = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=blocks,
        scale=scale,
        enable_gqa=grouped,
        return_aux=aux,
        kernel_options=options,
    )
    if aux is None:
        assert isinstance(result, Tensor)
        return result, None
    out, stats = result
    lse = stats.lse
    assert isinstance(out, Tensor)
    assert isinstance(lse, Tensor)
    if sinks is None:
        return out, lse
    # The sink adds e^sink to each row's sum: the output shrinks by e^lse / (e^lse + e^sink).
    # Not lse's own dtype: while the call is traced, FlexAttention says fp32 also where it computes in fp64.
    sink = sinks[:, None].to(torch.promote_types(q.dtype, torch.float32))
    gate = torch.sigmoid(lse - sink)
    gate = torch.where(lse == -inf, 0.0, gate)  # a sink of −∞ before a row that sees nothing
    return (out * gate.unsqueeze(-1)).to(q.dtype), torch.logaddexp(lse, sink) if with_lse else None


def _kernel_for(call: Call, with_lse: bool) -> Callable[..., Any]:
    """The first few sizes and numbers of a form get a kernel each, the fastest; further ones share one for all."""
    mask, bias = call.mask, call.bias
    form = (
        call.device.type,
        None if mask is None else mask.form,
        None if bias is None else bias.form,
        call.softcap,
        call.scale,
        call.sinks is None,
        with_lse,
        call.q.dtype,
        call.q.shape[1::2],  # heads and head size, which FlexAttention holds fixed
        call.v.shape[1::2],
    )
    numbers = (() if mask is None else mask.constants) + (() if bias is None else bias.constants)
    sizes = (call.sizes, numbers)
    known = _KNOWN.setdefault(form, set())
    if sizes not in known and len(known) >= OWN_KERNELS:
        return _compiled(form, None)
    known.add(sizes)
    return _compiled(form, sizes)


_KNOWN: dict[object, set[object]] = {}


@cache
def _compiled(form: tuple[Any, ...], sizes: object) -> Callable[..., Any]:
    """A compiled kernel, made from its own code object.

    torch.compile counts recompilations per code object and beyond eight runs the unfused path instead, in silence; a
    code object each keeps one form's recompilations from using up another's, and fullgraph makes the limit an error.
    """
    code = _kernel.__code__.replace(co_name=f"_kernel_{abs(hash((form, sizes)))}")
    fresh = FunctionType(code, _kernel.__globals__, code.co_name)
    backend = "inductor" if form[0] == "cuda" else "eager"  # the CPU differs in nothing else: it checks the rest
    if sizes is None:
        return torch.compile(fresh, fullgraph=True, backend=backend)
    pinned = "?" not in f"{form[1]}{form[2]}"
    options: dict[str, Any] | None = {"guard_filter_fn": _needed} if pinned else None
    return torch.compile(fresh, fullgraph=True, dynamic=False, backend=backend, options=options)


def _needed(guards: Any) -> list[bool]:
    """Which guards torch.compile must check in each call of a kernel with sizes of its own.

    Not those on the functions themselves: of our own rules, form, sizes and constants together decide which closures
    they are bound to, and checking closures in closures costs as much as the kernel of a short sequence takes.
    """
    pinned = {"BUILTIN_MATCH", "CLOSURE_MATCH", "DICT_CONTAINS", "FUNCTION_MATCH", "MODULE_MATCH"}
    return [guard.guard_type not in pinned for guard in guards]


def _score_mod(call: Call) -> Callable[..., Any] | None:
    """Softcap and bias as FlexAttention takes them: a function of the scaled score and its indices."""
    _, _, nq, nk = call.sizes
    term = None if call.bias is None else call.bias.bind(nq, nk, call.device, call.wide)
    cap = call.softcap
    # A function each, so that a closure holds what its kind of call needs and nothing else: torch.compile guards on it.
    if cap is None:
        return None if term is None else _add_bias(term)
    return _cap_score(cap) if term is None else _cap_and_add_bias(cap, term)


def _add_bias(term: IndexRule) -> Callable[..., Any]:
    return lambda score, b, h, i, j: score + term(b, h, i, j)


def _cap_score(cap: float) -> Callable[..., Any]:
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap)


def _cap_and_add_bias(cap: float, term: IndexRule) -> Callable[..., Any]:
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap) + term(b, h, i, j)


def _kept_block_mask(mask: Mask, nq: int, nk: int, device: torch.device) -> BlockMask:
    return keep(mask, ("flex", nq, nk, device), lambda: _block_mask(mask, nq, nk, device))


def _block_mask(mask: Mask, nq: int, nk: int, device: torch.device) -> BlockMask:
    """FlexAttention's block mask from our tile classes: (N / 128)² numbers, never N×N; 1 MiB a table at N = 65,536.

    The lists by column, which the backward pass reads, are made here too: `from_kv_blocks` would make them from those
    by row with three times as many small kernels, and a mask of global tokens is new with each text.
    """
    with torch.inference_mode(False):  # a later call may differentiate with what is kept here
        kinds = mask.tiles(nq, nk, BLOCK, device)  # (B, H, Tq, Tk)
        partial, full = kinds == PARTIAL, kinds == FULL
        by_row, by_column = (*_listed(partial), *_listed(full)), (*_listed(partial.mT), *_listed(full.mT))
        see = mask.bind(nq, nk, device, torch.float32)
        return BlockMask((nq, nk), *by_row, *by_column, (BLOCK, BLOCK), see)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Booleans (B, H, T, T') → how many are True in each row, (B, H, T), and all columns, theirs first."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    # Contiguous: the kernel indexes them by their sizes, and a sort keeps the strides of its input.
    return chosen.sum(-1, dtype=torch.int32).contiguous(), order.to(torch.int32).contiguous()
