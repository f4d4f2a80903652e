"""One call of attention, checked and with four axes, and what several backends do with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.checks import check_dense, has_numbers
from regard.masks import DenseMask, Mask, as_mask
from regard.masks.biases import Bias, DenseBias, as_bias
from regard.masks.mask import four_axes

__all__ = [
    "BiasGradient",
    "Call",
    "CallOptions",
    "Launch",
    "TileDropout",
    "as_given",
    "cells_of_bias",
    "cells_of_mask",
    "custom_kernel_unsupported_reason",
    "forward_mode_unsupported_reason",
    "prepare",
    "rows_together",
]

Launch = Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor]
"""A call that was checked and prepared before, for other q, k and v; mask and bias are read if they are tensors."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(eq=False, slots=True)  # not frozen, which would cost 2 µs a call; nobody writes to it
class Call:
    """The checked arguments of one attention. Arrays are NumPy or torch, always with batch and heads."""

    q: Any  # (B, H, Nq, D)
    k: Any  # (B, Hkv, Nk, D)
    v: Any  # (B, Hkv, Nk, Dv)
    mask: Mask | None
    bias: Bias | None
    scale: float
    softcap: float | None
    sinks: Any  # (H,) or None
    dropout: float
    numpy: bool
    sizes: tuple[int, int, int, int]  # B, H, Nq, Nk
    chunk: int | None = None  # queries whose whole rows of scores `tiled` computes at once; None: it chooses its tiles

    @property
    def device(self) -> torch.device:
        """Where the arrays are; NumPy's are on the CPU."""
        return torch.device("cpu") if self.numpy else self.q.device

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scores and softmax: fp32, or fp64 for what is wider."""
        return torch.float32 if self.q.dtype.itemsize <= 4 else torch.float64

    @property
    def extras(self) -> tuple[Tensor, ...]:
        """The tensors beside q, k and v that a gradient may flow to: sinks, and what the bias is made from."""
        sinks = () if self.sinks is None else (self.sinks,)
        return sinks if self.bias is None else (*sinks, *self.bias.tensors)

    @property
    def wants_gradient(self) -> bool:
        """Whether a backward pass may follow."""
        if self.numpy or not torch.is_grad_enabled():
            return False
        return any(t.requires_grad for t in (self.q, self.k, self.v, *self.extras))

    def native(self, cells: Tensor | None) -> Any:
        """A dense tensor as the call's own kind of array."""
        return cells.detach().numpy() if self.numpy and cells is not None else cells

    def in_torch(self) -> Call:
        """The same call on torch tensors; NumPy arrays are shared, not copied, where torch can."""
        if not self.numpy:
            return self
        q, k, v = (_from_numpy(x) for x in (self.q, self.k, self.v))
        sinks = None if self.sinks is None else _from_numpy(self.sinks)
        return replace(self, q=q, k=k, v=v, sinks=sinks, numpy=False)


class CallOptions(TypedDict, total=False):
    """Options of `regard.attention` beside mask and bias, which explains them."""

    scale: float | None
    softcap: float | None
    sinks: Any
    dropout: float


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: object = None,
    bias: object = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
) -> Call:
    """Check the arguments of `regard.attention` and bring them to four axes. Raises TypeError or ValueError."""
    numpy = _check_kind(q, k, v)
    _check_dtype(q, k, v, numpy)
    q_shape, k_shape = tuple(q.shape), tuple(k.shape)  # torch.Size is slow to slice
    _check_shape(q_shape, k_shape, tuple(v.shape))
    scale = q_shape[-1] ** -0.5 if scale is None else _number("scale", scale)
    if softcap is not None and not _number("softcap", softcap) > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}; None means no cap")
    if dropout != 0.0 and not 0 <= _number("dropout", dropout) < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    weights = (*q_shape[:-1], k_shape[-2])
    if isinstance(mask, Tensor):
        check_dense("mask", mask, numbers=numpy or not q.is_meta)
    if isinstance(bias, Tensor):
        check_dense("bias", bias, numbers=numpy or not q.is_meta)
    mask, bias = as_mask(mask, weights), None if bias is None else as_bias(bias, weights)
    if sinks is not None:
        sinks = _check_sinks(sinks, q, numpy)
    if q.ndim != 4:
        q, k, v = (four_axes(x) for x in (q, k, v))
    if numpy and not q.dtype.isnative:
        q, k, v = (x.astype(x.dtype.newbyteorder("=")) for x in (q, k, v))
    sizes = weights if len(weights) == 4 else (*q.shape[:3], k.shape[2])
    if mask is not None:
        mask.fit(*sizes)
    if bias is not None:
        bias.fit(*sizes)
    return Call(q, k, v, mask, bias, scale, softcap, sinks, dropout, numpy, sizes)


def cells_of_mask(call: Call) -> Tensor | None:
    """The mask as a tensor (B or 1, H or 1, Nq or 1, Nk or 1): O(N²) memory where both Nq and Nk matter."""
    return None if call.mask is None else _dense(call, call.mask)


def cells_of_bias(call: Call) -> Tensor | None:
    """The bias likewise, in the scores' dtype."""
    return None if call.bias is None else _dense(call, call.bias).to(call.wide)


def _dense(call: Call, rule: Mask | Bias) -> Tensor:
    if isinstance(rule, (DenseMask, DenseBias)):
        return rule.cells.to(call.device)
    return rule.everywhere(*call.sizes[2:], call.device, call.wide)


def custom_kernel_unsupported_reason(call: Call) -> str | None:
    """Why a backend with its own kernels and backward cannot do a call (NumPy-only dtypes, torch.func), or None."""
    if call.numpy and call.q.dtype.itemsize > 8:
        return f"{call.q.dtype} exists in NumPy only"
    if not call.numpy and not torch.compiler.is_compiling() and not has_numbers(call.q):
        return f"q is a {type(call.q).__name__} on {call.device} without numbers, and tiles are found by numbers"
    # Where torch cannot be asked, it raises itself: an autograd function without rules does not pass a transform.
    transforming = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    if not torch.compiler.is_compiling() and transforming():
        return "it has no rules for the transforms of torch.func (vmap, grad, jvp)"
    return forward_mode_unsupported_reason()


def forward_mode_unsupported_reason() -> str | None:
    """Why a backend without forward-mode derivatives cannot do a call now, or None."""
    level = getattr(forward_ad, "_current_level", -1)  # where it cannot be asked, torch itself raises
    return "it has no forward-mode derivative" if level >= 0 else None


def as_given(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast, which would take the scores down to half precision."""
    kind = device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # which has none
    return torch.autocast(kind, enabled=False) if on else nullcontext()


class TileDropout(NamedTuple):  # torch.compile before 2.13 loses the attributes of a frozen dataclass
    """Dropout of weights that are computed tile by tile, forward and again backward: the same for a tile each time."""

    rate: float
    seed: int

    @classmethod
    def of(cls, call: Call) -> TileDropout:
        """With a seed drawn from torch's generator."""
        return cls(call.dropout, int(torch.randint(1 << 62, ())) if call.dropout else 0)

    def __call__(self, p: Tensor, number: int) -> Tensor:
        """The weights p of a tile, by its number, after dropout."""
        if not self.rate:
            return p
        generator = torch.Generator(p.device).manual_seed(self.seed + number)
        kept = torch.rand(p.shape, device=p.device, generator=generator) >= self.rate
        return p * kept / (1 - self.rate)


class BiasGradient:
    """The gradients towards the tensors that a bias was computed from, summed over tiles."""

    def __init__(self, bias: Bias | None, tensors: list[Tensor], wanted: tuple[bool, ...], dtype: torch.dtype) -> None:
        self.tensors, pairs = tensors, list(zip(tensors, wanted, strict=True))
        self.leaves = tuple(t.detach().requires_grad_(want) for t, want in pairs)
        self.totals = [torch.zeros_like(t, dtype=dtype) if want else None for t, want in pairs]
        self.bias = None if bias is None else bias.with_tensors(self.leaves)
        self.wanted = any(wanted)

    def add(self, cells: Callable[[Bias], Tensor], d_s: Tensor) -> None:
        """Add what the gradient d_s of the scores gives; `cells` evaluates the bias where d_s is."""
        assert self.bias is not None
        pairs = [(leaf, total) for leaf, total in zip(self.leaves, self.totals, strict=True) if total is not None]
        with torch.enable_grad():  # around binding, too: it may change the dtype, which the gradient passes through
            values = cells(self.bias)
        parts = torch.autograd.grad(values, [leaf for leaf, _ in pairs], d_s.sum_to_size(values.shape))
        for (_, total), part in zip(pairs, parts, strict=True):
            total.add_(part)

    def result(self) -> list[Tensor | None]:
        """One gradient per tensor, in its dtype; None where none was wanted."""
        return [None if g is None else g.to(t.dtype) for g, t in zip(self.totals, self.tensors, strict=True)]


def rows_together(x: Tensor) -> Tensor:
    """x, copied only where the numbers of a token are not as kernels read them: contiguous, and no negated view."""
    if not torch.compiler.is_compiling() and x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_kind(q: Any, k: Any, v: Any) -> bool:
    """True for NumPy arrays, False for torch tensors."""
    arrays = (q, k, v)
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        dense = q.layout is k.layout is v.layout is torch.strided
        if not dense or q.is_nested or k.is_nested or v.is_nested:
            for name, x in zip("qkv", arrays, strict=True):
                check_dense(name, x, numbers=False)  # shapes alone may be asked for
        return False
    if all(isinstance(x, np.ndarray) for x in arrays):
        if any(isinstance(x, np.ma.MaskedArray) for x in arrays):
            raise TypeError("a masked array's own mask would be ignored: pass plain arrays, and mask=… for attention")
        return True
    kinds = ", ".join(f"{n} is {_kind(x)}" for n, x in zip("qkv", arrays, strict=True))
    raise TypeError(f"q, k and v must all be NumPy arrays or all torch tensors, but {kinds}")


def _kind(x: object) -> str:
    return {np.ndarray: "a NumPy array", Tensor: "a torch tensor"}.get(
        type(x), f"{type(x).__module__}.{type(x).__name__}"
    )


def _check_dtype(q: Any, k: Any, v: Any, numpy: bool) -> None:
    dtype = q.dtype
    if not (dtype.kind == "f" if numpy else dtype in FLOATS):
        raise TypeError(
            f"q holds {dtype}; attention needs floating point: float16, bfloat16, float32 or float64. "
            f"Convert it first, for example {'q.astype(np.float32)' if numpy else 'q.float()'}"
        )
    if k.dtype != dtype or v.dtype != dtype:
        raise TypeError(f"q, k and v must have one dtype, but q is {dtype}, k is {k.dtype}, v is {v.dtype}")
    if not numpy and not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, but q is on {q.device}, k on {k.device}, v on {v.device}")


def _check_shape(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    if len(q) == len(k) == len(v) >= 2 and q[-1] == k[-1] > 0 and k[:-1] == v[:-1] and q[:-2] == k[:-2]:
        return  # the common case, at one comparison's cost
    if not len(q) == len(k) == len(v) >= 2:
        raise ValueError(
            "q, k and v must have the same number of axes: (N, D), (B, N, D) or (…, H, N, D); "
            f"got {tuple(q)}, {tuple(k)}, {tuple(v)}"
        )

    def equal(what: str, a: str, n: int, b: str, m: int, axis: int) -> None:
        if n != m:
            raise ValueError(f"{what} differs: {a} has {n}, {b} has {m} (axis {axis})")

    equal("head size", "q", q[-1], "k", k[-1], -1)
    if q[-1] == 0:
        raise ValueError(f"q and k have head size 0 (axis -1): {tuple(q)}, {tuple(k)}")
    equal("number of keys", "k", k[-2], "v", v[-2], -2)
    heads_at = len(q) - 3 if len(q) >= 4 else len(q)
    for axis in range(len(q) - 2):
        if axis != heads_at:
            equal("batch", "q", q[axis], "k", k[axis], axis)
        equal("heads" if axis == heads_at else "batch", "k", k[axis], "v", v[axis], axis)
    if len(q) >= 4 and (k[-3] == 0 or q[-3] % k[-3]):
        raise ValueError(
            f"q has {q[-3]} heads and k has {k[-3]} (axis -3): the heads of q must be a multiple of the heads of k"
        )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: {value!r}")
    if not torch.compiler.is_compiling() and not isfinite(value):  # a trace may hold it open, and would break here
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def _check_sinks(sinks: Any, q: Any, numpy: bool) -> Any:
    heads = q.shape[-3] if q.ndim >= 4 else 1
    if not isinstance(sinks, np.ndarray if numpy else Tensor):
        raise TypeError(f"sinks must be {'a NumPy array' if numpy else 'a torch tensor'} like q, got {_kind(sinks)}")
    if isinstance(sinks, Tensor):
        check_dense("sinks", sinks, numbers=False)
    dtype: Any = sinks.dtype
    if not (dtype.kind == "f" if numpy else dtype.is_floating_point):
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}")
    if sinks.shape not in ((heads,), ()):
        raise ValueError(f"sinks must be one number per query head, ({heads},), got shape {tuple(sinks.shape)}")
    if not numpy and sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device: sinks are on {sinks.device}, q is on {q.device}")
    if numpy and not dtype.isnative:
        sinks = np.asarray(sinks, dtype.newbyteorder("="))
    return sinks if sinks.shape else sinks.reshape(1).repeat(heads)


def _from_numpy(x: np.ndarray[Any, Any]) -> Tensor:
    strides_fit = all(s > 0 and s % x.itemsize == 0 for s in x.strides)
    return torch.from_numpy(x if strides_fit and x.flags.writeable else x.copy())
