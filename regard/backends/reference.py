"""The definition of attention, which every other backend is tested against.

It runs on NumPy arrays and torch tensors (any array-API library), is differentiable in torch, and builds every N×N
intermediate.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from array_api_compat import array_namespace

from regard.backends.call import Call, cells_of_bias, cells_of_mask

__all__ = ["Stages", "forward_with_lse", "how", "run", "stages", "unsupported_reason"]


class Stages(NamedTuple):
    """Every intermediate of one attention, in order; `lse` is the log of each row's sum of exponentials."""

    scores: Any  # (B, H, Nq, Nk)  q·kᵀ
    scaled: Any  # (B, H, Nq, Nk)  scores · scale
    capped: Any  # (B, H, Nq, Nk)  softcap · tanh(scaled / softcap)
    biased: Any  # (B, H, Nq, Nk)  capped + bias
    masked: Any  # (B, H, Nq, Nk)  −∞ where hidden
    weights: Any  # (B, H, Nq, Nk)  softmax over the keys
    output: Any  # (B, H, Nq, Dv)  weights · v
    lse: Any  # (B, H, Nq)


def stages(call: Call, lead: tuple[int, ...] | None = None) -> Stages:
    """All intermediates of a prepared call, with the leading axes `lead` instead of (B, H) if given.

    Each stage is computed from the returned one before it, so that gradients with respect to any of them exist.
    """
    kept: dict[str, Any] = {}

    def stage(name: str, a: Any) -> Any:
        kept[name] = a if lead is None else a.reshape(*lead, *a.shape[-2:])
        return kept[name].reshape(a.shape)

    q, k, v, scale, softcap, sinks = call.q, call.k, call.v, call.scale, call.softcap, call.sinks
    visible, bias = call.native(cells_of_mask(call)), call.native(cells_of_bias(call))
    xp = array_namespace(q, k, v)
    wide = xp.result_type(q.dtype, xp.float32)  # scores and softmax in fp32 or wider
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (xp.repeat(x, group, axis=1) for x in (k, v))  # (B, H, Nk, ·): query head h reads key head h // group

    scores = stage("scores", xp.astype(q, wide) @ xp.matrix_transpose(xp.astype(k, wide)))
    scaled = stage("scaled", scores * scale)
    capped = stage("capped", scaled if softcap is None else softcap * xp.tanh(scaled / softcap))
    biased = stage("biased", capped if bias is None else capped + bias)
    masked = stage("masked", biased if visible is None else xp.where(visible, biased, -inf))

    logits = masked
    if sinks is not None:  # one logit per head as a further key of every row: (B, H, Nq, 1)
        column = xp.broadcast_to(xp.astype(sinks, masked.dtype)[:, None, None], (*masked.shape[:-1], 1))
        logits = xp.concat([masked, column], axis=-1)
    peak = xp.max(logits, axis=-1, keepdims=True)
    peak = xp.where(peak == -inf, 0.0, peak)  # a row that sees nothing: all exponentials are 0, not NaN
    total = xp.sum(xp.exp(logits - peak), axis=-1, keepdims=True)
    weights = stage("weights", xp.exp(masked - peak) / xp.where(total == 0, 1.0, total))
    if call.dropout:
        keep = torch.rand(call.sizes, device=call.device, dtype=call.wide) >= call.dropout
        weights = weights * call.native(keep.to(call.wide) / (1 - call.dropout))
    stage("output", xp.astype(weights @ xp.astype(v, wide), q.dtype))
    lse = xp.where(total == 0, -inf, peak + xp.log(xp.where(total == 0, 1.0, total)))
    return Stages(**kept, lse=lse[..., 0])


def unsupported_reason(call: Call) -> str | None:
    """Why this backend cannot do the call: it always can."""
    return None


def how(call: Call) -> str:
    """How it does the call, in a few words."""
    return f"the definition, in {'NumPy' if call.numpy else 'torch'}; builds N×N"


def run(call: Call) -> Any:
    """The output (B, H, Nq, Dv)."""
    return stages(call).output


def forward_with_lse(call: Call) -> tuple[Any, Any]:
    """The output, and each row's lse (B, H, Nq), −∞ where it sees nothing."""
    every = stages(call)
    return every.output, every.lse
