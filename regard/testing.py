"""The numeric rule, and the conformance suite that every backend passes. Import it to test an attention of your own.

The rule. truth = the definition in fp64; baseline = the definition in the dtype at hand. An implementation may err
    err(ours) ≤ 2 · (err(baseline) + one rounding step at the output's scale)        (3 · for gradients)
with err the largest absolute error, and everything finite. No table of tolerances.

- The scale is the largest entry of truth; for gradients, of all gradients of the call together: terms of that size
  cancel in each of them, and cancel to nothing in q's and k's where a row sees one key only.
- In fp64 truth and baseline would be one computation. There the baseline walks every axis backwards and takes its
  weights from lse, so that the two differ by fp64's own rounding.

The suite. `cases()` is the grid arguments × masks × shapes, every axis a different size, Nq ≠ Nk both ways, rows that
see nothing, hidden tiles; `conform(attention, case, dtype)` tests one cell of it, forward and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard.backends import reference
from regard.backends.call import Call, cells_of_bias, cells_of_mask, prepare
from regard.masks import DenseMask, Mask
from regard.masks.biases import DenseBias
from regard.positions import alibi

__all__ = ["ARGUMENTS", "MASKS", "SHAPES", "Case", "Shape", "assert_rule", "cases", "conform", "largest_error"]


def largest_error(ours: Tensor, truth: Tensor) -> tuple[float, tuple[int, ...]]:
    """The largest absolute difference, and where it is.

    >>> largest_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    (0.5, (1,))
    """
    if truth.numel() == 0:
        return 0.0, ()
    gap = (ours.detach().double() - truth.detach().double()).abs().nan_to_num(nan=inf)
    worst = int(gap.argmax())
    return float(gap.reshape(-1)[worst]), tuple(int(n) for n in torch.unravel_index(torch.tensor(worst), gap.shape))


def assert_rule(
    ours: Tensor,
    baseline: Tensor,
    truth: Tensor,
    *,
    gradient: bool = False,
    scale: float | None = None,
    what: str = "output",
) -> None:
    """Raise AssertionError unless `ours` obeys the numeric rule; the message has the three errors and the worst index.

    >>> exact = torch.tensor([0.2, 0.1], dtype=torch.float64)
    >>> assert_rule(exact.float(), exact.float(), exact)
    >>> assert_rule(exact.float() + 1, exact.float(), exact)
    Traceback (most recent call last):
    AssertionError: output errs by 1 at (0,); allowed 5.36e-08 = 2 · (baseline 2.98e-09 + one rounding step 2.38e-08)

    Args:
        ours: the tensor under test.
        baseline: the definition in the same dtype.
        truth: the definition in fp64.
        gradient: allow 3 instead of 2.
        scale: what a rounding step is a step of; default the largest entry of truth.
        what: its name in the message.
    """
    if ours.shape != truth.shape:
        raise AssertionError(f"{what} has shape {tuple(ours.shape)}, expected {tuple(truth.shape)}")
    if ours.dtype != baseline.dtype:
        raise AssertionError(f"{what} has dtype {ours.dtype}, expected {baseline.dtype}")
    err, where = largest_error(ours, truth)
    base, _ = largest_error(baseline, truth)
    step = torch.finfo(ours.dtype).eps * (_largest(truth) if scale is None else scale)
    times = 3 if gradient else 2
    if not (bool(ours.isfinite().all()) and err <= times * (base + step)):
        raise AssertionError(
            f"{what} errs by {err:.3g} at {where}; allowed {times * (base + step):.3g} = "
            f"{times} · (baseline {base:.3g} + one rounding step {step:.3g})"
        )


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


# ---------------------------------------------------------------------------------------------------------- the suite


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    batch: int
    num_heads: int
    num_kv_heads: int
    nq: int
    nk: int
    d: int
    dv: int


SHAPES: dict[str, Shape] = {
    "square": Shape(2, 3, 3, 7, 7, 5, 5),
    "fewer queries, grouped, narrow v": Shape(3, 4, 2, 5, 11, 7, 3),
    "more queries than keys, wide v": Shape(2, 6, 2, 13, 5, 3, 11),
    "one query": Shape(7, 3, 1, 1, 17, 8, 8),
    "several tiles": Shape(1, 2, 1, 139, 271, 24, 17),
}


def _rows_without_keys(s: Shape) -> Mask:
    """Random cells, with whole rows hidden, a different one for each batch row."""
    cells = torch.rand(s.batch, 1, s.nq, s.nk, generator=torch.Generator().manual_seed(5)) < 0.4
    for b in range(s.batch):
        cells[b, 0, b % s.nq] = False
    return masks.dense(cells)


def _lengths(s: Shape) -> Tensor:
    return torch.tensor([s.nk - 2 * b for b in range(s.batch)]).clamp(min=0)


MASKS: dict[str, Callable[[Shape], Mask | None]] = {
    "none": lambda s: None,
    "causal": lambda s: masks.causal(),
    "causal from the first key": lambda s: masks.causal(offset=0),
    "causal, an offset per batch row": lambda s: masks.causal(offset=[b - 1 for b in range(s.batch)]),
    "window": lambda s: masks.window(2, 1),
    "window per head": lambda s: masks.window([list(range(s.num_heads))], 0),
    "dilated": lambda s: masks.dilated(2, 1, 3),
    "prefix": lambda s: masks.prefix(3),
    "padding right": lambda s: masks.padding(_lengths(s)),
    "padding left": lambda s: masks.padding(_lengths(s), side="left"),
    "padding booleans": lambda s: masks.padding(torch.arange(s.nk) % 3 != torch.arange(s.batch)[:, None] % 3),
    "documents": lambda s: masks.documents(
        torch.arange(s.nk).expand(s.batch, s.nk) // (3 + torch.arange(s.batch)[:, None])
    ),
    "globals": lambda s: masks.globals([0, s.nk // 2]),
    "queries": lambda s: masks.queries(torch.arange(s.nq) % 3 != torch.arange(s.batch)[:, None] % 3),
    "blocks": lambda s: masks.random_blocks(max(s.nq, s.nk), 4, count=1, seed=3, num_heads=s.num_heads),
    "rows without keys": _rows_without_keys,
    "nothing visible": lambda s: masks.causal() & ~masks.causal(),
    "causal and padding": lambda s: masks.causal() & masks.padding(_lengths(s)),
    "window or globals": lambda s: masks.window(1, 0) | masks.globals([1]),
    "window, but for one query": lambda s: masks.window(2, 1) & ~masks.queries([s.nq // 2]),
    "not window": lambda s: ~masks.window(3, 0),
}


FINER = 1 + 2**-30  # makes fp64 inputs that fp32 cannot hold, so that rounding to fp32 on the way shows


def _bias(s: Shape, dtype: torch.dtype) -> Tensor:
    return (torch.randn(s.num_heads, s.nq, s.nk, generator=torch.Generator().manual_seed(7)).double() * FINER).to(dtype)


def _sinks(s: Shape, dtype: torch.dtype) -> Tensor:
    return (torch.linspace(-1, 2, s.num_heads).double() * FINER).to(dtype)


ARGUMENTS: dict[str, Callable[[Shape, torch.dtype], dict[str, Any]]] = {
    "plain": lambda s, t: {},
    "scale": lambda s, t: {"scale": 0.3},
    "negative scale": lambda s, t: {"scale": -0.3},
    "zero scale": lambda s, t: {"scale": 0.0},
    "softcap": lambda s, t: {"softcap": 1.5},
    "bias": lambda s, t: {"bias": _bias(s, t)},
    "bias with −∞": lambda s, t: {"bias": _bias(s, t).masked_fill(_bias(s, t) > 1, -inf)},
    "ALiBi": lambda s, t: {"bias": alibi(s.num_heads)},
    "sinks": lambda s, t: {"sinks": _sinks(s, t)},
    "all together": lambda s, t: {"scale": 0.9, "softcap": 3.0, "bias": _bias(s, t), "sinks": _sinks(s, t)},
}


@dataclass(frozen=True)
class Case:
    """One cell of the grid, by the names of its parts."""

    shape: str
    mask: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.shape} × {self.mask} × {self.arguments}"

    def build(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q, k, v and the other arguments, the same for every dtype but for rounding."""
        s = SHAPES[self.shape]
        random = torch.Generator().manual_seed(11)
        q = torch.randn(s.batch, s.num_heads, s.nq, s.d, generator=random, dtype=torch.float64)
        k = torch.randn(s.batch, s.num_kv_heads, s.nk, s.d, generator=random, dtype=torch.float64)
        v = torch.randn(s.batch, s.num_kv_heads, s.nk, s.dv, generator=random, dtype=torch.float64)
        extra = ARGUMENTS[self.arguments](s, dtype)
        moved = {n: a.to(device) if isinstance(a, Tensor) else a for n, a in extra.items()}
        mask = MASKS[self.mask](s)
        q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
        return q, k, v, {"mask": mask, **moved}


def cases() -> Iterator[Case]:
    """Every cell of the grid."""
    for shape in SHAPES:
        for mask in MASKS:
            for arguments in ARGUMENTS:
                yield Case(shape, mask, arguments)


def conform(
    attention: Callable[..., Tensor],
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    gradient: bool = True,
) -> None:
    """Raise AssertionError unless `attention(q, k, v, mask=…, …)` obeys the numeric rule on this case.

    >>> import regard
    >>> conform(regard.attention, Case("square", "causal", "plain"))
    """
    q, k, v, extra = case.build(dtype, device)
    ours = _differentiate(attention, q, k, v, extra, gradient)
    baseline = _differentiate(_backwards if dtype == torch.float64 else _definition, q, k, v, extra, gradient)
    q, k, v = (x.double() for x in (q, k, v))
    wide = {n: a.double() if isinstance(a, Tensor) else a for n, a in extra.items()}
    truth = _differentiate(_definition, q, k, v, wide, gradient)
    slope = max((_largest(t) for name, t in truth.items() if name != "output"), default=0.0)
    for name, value in ours.items():
        what, is_slope = f"{case}, {dtype}: {name}", name != "output"
        scale = slope if is_slope else None
        assert_rule(value, baseline[name], truth[name], gradient=is_slope, scale=scale, what=what)


def _definition(q: Tensor, k: Tensor, v: Tensor, **extra: Any) -> Tensor:
    out = reference.run(prepare(q, k, v, **extra))
    assert isinstance(out, Tensor)
    return out


def _backwards(q: Tensor, k: Tensor, v: Tensor, **extra: Any) -> Tensor:
    """The definition with queries, keys and columns in reverse and weights e^(s − lse), as fused backward passes do."""
    stages = reference.stages(reversed_call(prepare(q, k, v, **extra)))
    lse = torch.where(stages.lse == -inf, 0.0, stages.lse).unsqueeze(-1)
    values = v.flip(-1, -2).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (torch.exp(stages.masked - lse) @ values).flip(-1, -2)


def reversed_call(call: Call) -> Call:
    """The call with queries, keys and columns in reverse order."""
    visible, bias = cells_of_mask(call), cells_of_bias(call)
    return replace(
        call,
        q=call.q.flip(-1, -2),
        k=call.k.flip(-1, -2),
        v=call.v.flip(-1, -2),
        mask=None if visible is None else DenseMask(visible.flip(-1, -2)),
        bias=None if bias is None else DenseBias(bias.flip(-1, -2)),
    )


def _differentiate(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any], gradient: bool
) -> dict[str, Tensor]:
    """The output, and the gradient of a fixed random projection of it towards every tensor that went in."""
    if not gradient:
        with torch.no_grad():
            return {"output": attention(q, k, v, **extra)}
    leaves = {"q": q, "k": k, "v": v, **{n: a for n, a in extra.items() if isinstance(a, Tensor)}}
    leaves = {n: a.detach().clone().requires_grad_() for n, a in leaves.items()}
    out = attention(**{**extra, **leaves})
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(13), dtype=torch.float64)
    towards = towards.to(torch.bfloat16).to(out)  # representable in every dtype, so that all differentiate one function
    grads = torch.autograd.grad(out, list(leaves.values()), towards)
    return {"output": out.detach(), **{f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}}
