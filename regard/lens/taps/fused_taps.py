"""Taps on torch's fused attention kernels, put over the originals in torch's own dispatcher.

Whoever calls `scaled_dot_product_attention`, in Python, in C++ or from compiled code, ends in one of a handful of aten
operations. Over each lies a tap that calls the kernel it covers with the very arguments it got, reports what went in
and out, and returns what came back: so watched and unwatched results are the same bits.

This file does not know softmax written out by hand, FlexAttention or flash_attn, nor who is told.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.taps.callers import deliver, find
from regard.lens.taps.reading import read_call, trusted_lse
from regard.lens.taps.sightings import HERE, Lent, Sighting
from regard.masks import causal
from regard.rules import four_axes

__all__ = ["CPU_KERNELS", "CUDA_KERNELS", "FusedTap"]

MATH = "_scaled_dot_product_attention_math"
FLASH = "_scaled_dot_product_flash_attention"

# The unfused path is made of other operations, on which autograd acts one by one: it has to be covered above autograd
# too, where a call without inference mode arrives.
CPU_KERNELS = (("_scaled_dot_product_flash_attention_for_cpu", "CPU"), (MATH, "CPU"), (MATH, "AutogradCPU"))
CUDA_KERNELS = (
    (FLASH, "CUDA"),
    ("_scaled_dot_product_efficient_attention", "CUDA"),
    ("_scaled_dot_product_cudnn_attention", "CUDA"),
    (MATH, "CUDA"),
    (MATH, "AutogradCUDA"),
)
"""(operation, dispatch key) of what is covered."""


class FusedTap:
    """One covered kernel: called by torch's dispatcher in its place."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.kernel = torch.library.get_kernel(f"aten::{name}", key)
        self.arguments = getattr(torch.ops.aten, name).default._schema.arguments
        self.wants_lse = next((i for i, a in enumerate(self.arguments) if a.name == "compute_log_sumexp"), None)

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel; report the call if a watched module made it."""
        callers = find(sys._getframe(1), args[0])
        if not callers:
            return self.kernel.call_boxed(keyset, *args, **kwargs)
        HERE.quiet += 1
        try:
            out = self.kernel.call_boxed(keyset, *self._asking_for_lse(args), **kwargs)
        finally:
            HERE.quiet -= 1
        if HERE.inside or callers[0].inside_op:
            HERE.lent = Lent(self.name, self._lse(args, out))
        else:
            deliver(callers, lambda: self._sighting(args, kwargs, out))
        return self._as_asked(args, out)

    # Two CUDA kernels compute lse on request only. It is a by-product: the output does not depend on it.

    def _asking_for_lse(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        at = self.wants_lse
        return args if at is None else (*args[:at], True, *args[at + 1 :])

    def _as_asked(self, args: tuple[Any, ...], out: Any) -> Any:
        if self.wants_lse is None or args[self.wants_lse]:
            return out
        empty = None if "cudnn" in self.name else out[1].new_empty((*out[1].shape[:2], 0))
        return (out[0], empty, *out[2:])

    # -------------------------------------------------------------------------------------------------- what was seen

    def _sighting(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sighting:
        given = {a.name: a.default_value for a in self.arguments if a.has_default_value()}
        given |= dict(zip((a.name for a in self.arguments), args, strict=False)) | kwargs
        output = four_axes(out[0].detach())
        try:
            call = self._call(given)
        except Exception as problem:
            return Sighting(source="sdpa", kernel=self.name, output=output, trouble=str(problem))
        lse = trusted_lse(self._lse(args, out), call)
        return Sighting(source="sdpa", kernel=self.name, call=call, lse=lse, output=output)

    def _call(self, given: dict[str, Any]) -> Call:
        # SDPA's is_causal is upper-left. CUDA's flash kernel is lower-right; SDPA gives it equal lengths only, where
        # both are one, and torch's lower-right bias gives it others.
        order = causal() if self.name == FLASH else causal(offset=0)
        return read_call(
            given["query"],
            given["key"],
            given["value"],
            cells=given.get("attn_mask", given.get("attn_bias")),
            mask=order if given["is_causal"] else None,
            scale=given["scale"],
            dropout=given["dropout_p"],
        )

    def _lse(self, args: tuple[Any, ...], out: Any) -> Tensor | None:
        """The kernel's lse as (B, H, Nq), or None where its form is another than the known ones."""
        if self.name == MATH or not isinstance(out[1], Tensor) or args[0].ndim != 4:
            return None
        rows = args[0].shape[:3]
        lse = out[1].detach()
        if lse.ndim == 4 and lse.shape[3] == 1:
            lse = lse[..., 0]
        if lse.ndim == 3 and "efficient" in self.name:  # padded to a multiple of 32 queries
            lse = lse[..., : rows[2]]
        return lse if lse.shape == rows and lse.dtype in (torch.float32, torch.float64) else None
