"""The lens's measures straight from their definitions, on the whole matrix of weights: what the engines are held to."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from regard.backends import reference
from regard.backends.call import Call, prepare
from regard.masks.tiles import cell_edges
from regard.testing import Case, assert_rule, reversed_call


def dense_measures(weights: Tensor, masked: Tensor, lse: Tensor, sinks: Tensor | None, size: int) -> dict[str, Tensor]:
    """Every measure of weights (B, H, Nq, Nk) with their scores and lse, in their dtype."""
    outcomes = weights
    if sinks is not None:
        outcomes = torch.cat([weights, (sinks.to(lse)[:, None] - lse).exp().unsqueeze(-1)], -1)
    squares = outcomes.square().sum(-1)
    entropy = -torch.where(outcomes > 0, outcomes * outcomes.log(), 0.0).sum(-1)
    return {
        "weights": weights,
        "seen": masked > -inf,
        "lse": lse,
        "entropy": entropy,
        "received": weights.sum(-2),
        "max_logit": masked.amax(-1) if masked.shape[-1] else masked.new_full(masked.shape[:-1], -inf),
        "effective": torch.where(squares > 0, 1 / squares, 0.0),
        "map": _pooled(weights, size),
    }


def _summed(weights: Tensor) -> Tensor:
    """Σ over the rows of (B, H, Nq, Nk), rounded once: what each addition loses is kept and added at the end."""
    total = lost = torch.zeros_like(weights.sum(-2))
    for row in weights.unbind(-2):
        longer = total + row
        kept = longer - total
        lost = lost + ((total - (longer - kept)) + (row - kept))
        total = longer
    return total + lost


def _pooled(weights: Tensor, size: int) -> Tensor:
    rows, cols = (cell_edges(n, size) for n in weights.shape[-2:])
    bands = [weights[..., a:b, :].sum(-2) / (b - a) for a, b in pairwise(rows)]
    return torch.stack([torch.stack([band[..., a:b].sum(-1) for a, b in pairwise(cols)], -1) for band in bands], -2)


def truth_and_baseline(case: Case, dtype: torch.dtype, size: int) -> tuple[Call, dict[str, Tensor], dict[str, Tensor]]:
    """The call, its measures in fp64, and in the dtype of the scores by the definition."""
    q, k, v, extra = case.build(dtype)
    call = prepare(q, k, v, **extra)
    wide = {n: a.double() if isinstance(a, Tensor) else a for n, a in extra.items()}
    truth = measures_of(prepare(q.double(), k.double(), v.double(), **wide), size)
    if dtype == torch.float64:  # no wider than what is judged, so that the longest sum is made as if it were
        truth["received"] = _summed(truth["weights"])
    return call, truth, measures_from_lse(call, size, backwards=dtype == torch.float64)


def measures_of(call: Call, size: int) -> dict[str, Tensor]:
    """Every measure of a call by the definition, in the dtype of its scores."""
    made: Any = reference.stages(call)
    return dense_measures(made.weights, made.masked, made.lse, call.sinks, size)


def measures_from_lse(call: Call, size: int, backwards: bool) -> dict[str, Tensor]:
    """By the lens's definition, weights e^(s − lse), in the call's own precision.

    lse is rounded once, and with it all weights of a row: that is part of what a kernel hands over. In fp64 the axes
    are reversed, since truth and baseline would otherwise be one computation.
    """
    flip = (lambda x, *axes: x.flip(axes)) if backwards else (lambda x, *axes: x)
    made = reference.stages(reversed_call(call) if backwards else call)
    weights = torch.exp(made.masked - torch.where(made.lse == -inf, 0.0, made.lse).unsqueeze(-1))
    weights, masked, lse = flip(weights, -1, -2), flip(made.masked, -1, -2), flip(made.lse, -1)
    return dense_measures(weights, masked, lse, call.sinks, size)


def assert_measures(
    ours: dict[str, Tensor],
    baseline: dict[str, Tensor],
    truth: dict[str, Tensor],
    what: str,
    step: float | None = None,
) -> None:
    """Every measure obeys the numeric rule; −∞ (rows that see nothing) must be there exactly.

    The step of a weight is one step of lse, which is rounded before the weights are made from it: a relative step of
    |lse|, and twice that for Σp². An entropy has it once more, whatever its size, since ln p itself is off by as much.
    lse and the largest score are judged at the scale of the scores.

    step: instead of |lse|; 1 where weights are not made from a rounded lse.
    """
    scores, step = _step(truth), _step(truth) if step is None else step
    for name in sorted(ours.keys() & truth.keys()):
        mine, base, true = ours[name].cpu(), baseline[name], truth[name]
        nothing = true == -inf
        assert torch.equal(mine == -inf, nothing), f"{what}: {name}: −∞ elsewhere than where a row sees nothing"
        mine, base, true = (x.masked_fill(nothing, 0.0) for x in (mine, base, true))
        largest = float(true.abs().max()) if true.numel() else 0.0
        scale = step * {"entropy": max(1, largest), "effective": 2 * largest}.get(name, largest)
        scale = scores if name in ("lse", "max_logit") else scale
        assert_rule(mine, base, true, scale=scale, what=f"{what}: {name}")


def assert_top(
    found: dict[str, Tensor],
    baseline: dict[str, Tensor],
    truth: dict[str, Tensor],
    what: str,
    step: float | None = None,
) -> None:
    """The k keys of each row are its heaviest as far as rounding can tell, with their weights, descending.

    By how much rounding can err is the numeric rule's for weights: a key that was left out may be heavier than one that
    was taken by twice that, and by no more. Where the truth's gap is wider, this means that the sets are equal.
    """
    key, weight, weights = found["top_key"].cpu(), found["top_weight"].cpu(), truth["weights"]
    k, nk = key.shape[-1], weights.shape[-1]
    visible = truth["seen"].sum(-1, keepdim=True)
    assert torch.equal(key >= 0, torch.arange(k) < visible), f"{what}: keys taken are not as many as are visible"
    assert bool((weight[key < 0] == 0).all()), f"{what}: a weight where there is no key"
    assert bool((weight[..., 1:] <= weight[..., :-1]).all()), f"{what}: not descending"
    taken = torch.zeros(*key.shape[:-1], nk + 1, dtype=torch.long).scatter_add_(
        -1, key % (nk + 1), torch.ones_like(key)
    )
    assert int(taken[..., :nk].max()) <= 1, f"{what}: a key twice"
    assert not bool((taken[..., :nk].bool() & ~truth["seen"]).any()), f"{what}: a hidden key"
    picked = weights.gather(-1, key.clamp(min=0)).masked_fill(key < 0, 0.0)
    base = baseline["weights"].gather(-1, key.clamp(min=0)).masked_fill(key < 0, 0.0)
    largest = float(weights.max()) * (_step(truth) if step is None else step)
    assert_rule(weight, base, picked, scale=largest, what=f"{what}: weights of the strongest links")
    best = torch.nn.functional.pad(weights.topk(min(k, nk), -1).values, (0, max(0, k - nk)))
    error = float((baseline["weights"].double() - weights).abs().max())
    short = float((best.masked_fill(key < 0, 0.0) - picked).abs().max())
    allowed = 4 * (error + torch.finfo(weight.dtype).eps * largest)
    assert short <= allowed, (
        f"{what}: a link heavier by {short:.3g} was left out, {allowed:.3g} is what rounding may do"
    )


def _step(truth: dict[str, Tensor]) -> float:
    """How many steps of its own a weight is off when lse is off by one: |lse|, at least 1."""
    lse = truth["lse"][truth["lse"] > -inf]
    return max(1.0, float(lse.abs().max())) if lse.numel() else 1.0
