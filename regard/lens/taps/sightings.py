"""What the taps report: one attention call of a watched model, as plain values; and the guard under which we measure.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys), D head size.

This file does not know how a call is caught, nor what is computed from it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.backends.call import Call

__all__ = ["HERE", "Kind", "Lent", "Sighting", "Source", "measuring"]

Source = Literal["sdpa", "softmax", "flex", "flash_attn", "regard"]
"""What was tapped: torch's fused kernels, a softmax by hand, FlexAttention, the flash_attn package, our operation."""

Kind = Literal["self", "cross"]
"""Do the queries look at their own sequence, or at another."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Sighting:
    """One attention call of a watched model. Tensors are detached, and are the model's own memory: never write to them.

    >>> Sighting(path="encoder.0.attn", source="softmax", kernel="softmax", kind="self").path
    'encoder.0.attn'

    path: the module that made the call, as `named_modules()` of the watched model names it; "" is the model itself.
    source, kernel: what was tapped, and what really ran, for example "_scaled_dot_product_flash_attention_for_cpu".
    kind: "self" or "cross", judged by the caller's arguments and name.
    call: q, k, v as the kernel got them, with mask, bias, scale, softcap and sinks; None for a plain softmax, and where
      `trouble` says why. What a later step of the model overwrites (a cache of fixed size) has to be copied in time.
    lse: (B, H, Nq) natural log of each row's sum of exponentials, −inf for a row that sees nothing; fp32 or fp64; None
      where the kernel did not give one that can be trusted.
    output: (B, H, Nq, Dv), or None where it cannot be told apart.
    scores, weights: of a plain softmax, before and after, (B, H, Nq, Nk). With a sink, `scores` has its column last,
      Nk + 1 in all, and `weights` has dropped it. One of them may be None where the model wrote over it.
    edited: the weights of a plain softmax were changed before they met the values. `weights` are those applied: rows
      need not sum to 1, and some may be negative. `scores` are those before the change, and say what was hidden.
    marks: of a plain softmax, (B, Nk) a number per key by which it is known again in a later call; None where unknown.
    compiled: seen inside compiled code, of which only the module that was compiled is known: `path` is that one.
    order: inside compiled code, which of the calls of one run of that code it is, from 0; else None.
    trouble: why the call could not be read, in words; None where all is well.
    """

    path: str = ""
    source: Source
    kernel: str
    kind: Kind = "self"
    call: Call | None = None
    lse: Tensor | None = None
    output: Tensor | None = None
    scores: Tensor | None = None
    weights: Tensor | None = None
    marks: Tensor | None = None
    edited: bool = False
    compiled: bool = False
    order: int | None = None
    trouble: str | None = None


@dataclass(frozen=True, eq=False)
class Lent:
    """What a kernel inside a larger call (FlexAttention, our operation) lends to the report of that call."""

    kernel: str
    lse: Tensor | None


class _Here(threading.local):
    """Where this thread stands."""

    quiet: int = 0  # depth of `measuring`, and of kernels that are already being reported
    inside: int = 0  # depth of larger calls that are being recorded
    lent: Lent | None = None


HERE = _Here()


@contextmanager
def measuring() -> Iterator[None]:
    """What runs under it is ours: in this thread taps report nothing, no graph is recorded, autocast is off.

    >>> with measuring():
    ...     torch.is_grad_enabled()
    False
    """
    HERE.quiet += 1
    try:
        with torch.no_grad(), ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        HERE.quiet -= 1
