"""What linear attention keeps of the keys: per feature a mass and a sum of values. Their size does not grow.

With log-features a of a query and b_j of the keys,

    output = Σ_i e^{a_i} values_i / Σ_i e^{a_i} mass_i        mass_i = Σ_j e^{b_ji}        values_i = Σ_j e^{b_ji} v_j

Each feature's sums are divided by e^{top_i}, top_i the largest b_ji so far; a query's features are multiplied by it
again and divided by the row's largest. So every exponential is at most 1, the denominator at least 1, and the result is
the same whatever the tops are: they are not differentiated.

This file does not know where log-features come from, and nothing of layers.

Axis letters: B batch, H key/value heads, n keys, R rows (queries, of all heads that share a key head), m features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FeatureSums", "Rows", "add_keys", "by_group", "no_keys", "read_rows", "walk"]

# A row of a chunk is divided by what the whole chunk holds. Where that is more than e^30 times what the row sees, the
# chunk is halved. fp32 goes down to e^-87, so what is lost is below e^-57 of the row.
SAFE = 30.0


class FeatureSums(NamedTuple):
    """Sums over the keys so far."""

    top: Tensor  # (B, H, m), −∞ before any key; never differentiated
    mass: Tensor  # (B, H, m)
    values: Tensor  # (B, H, m, Dv)


class Rows(NamedTuple):
    """What queries read: the outputs, and ln Σ_j e^(a·b_j) of each row, −∞ where it sees nothing."""

    output: Tensor  # (B, H, R, Dv)
    lse: Tensor  # (B, H, R)


def no_keys(batch: int, heads: int, features: int, width: int, like: Tensor) -> FeatureSums:
    """The sums over nothing.

    >>> no_keys(1, 2, 3, 5, torch.zeros(())).values.shape
    torch.Size([1, 2, 3, 5])

    width: of a value.  like: has the dtype and the device.
    """
    top = like.new_full((batch, heads, features), -torch.inf)
    return FeatureSums(top, like.new_zeros(batch, heads, features), like.new_zeros(batch, heads, features, width))


def add_keys(sums: FeatureSums, b: Tensor, v: Tensor) -> FeatureSums:
    """The sums with further keys.

    >>> sums = add_keys(no_keys(1, 1, 2, 1, torch.zeros(())), torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 1))
    >>> sums.mass.tolist()
    [[[3.0, 3.0]]]

    b: (B, H, n, m), −∞ for a key that does not count.  v: (B, H, n, Dv).
    """
    if b.shape[-2] == 0:
        return sums
    carried, features = _on_one_scale(sums, b, torch.maximum(sums.top, b.detach().amax(-2)))
    return _added(carried, features, v)


def read_rows(sums: FeatureSums, a: Tensor) -> Rows:
    """What queries read from the sums.

    >>> sums = add_keys(no_keys(1, 1, 2, 1, torch.zeros(())), torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3, 1), 7.0))
    >>> read_rows(sums, torch.zeros(1, 1, 1, 2)).output.item()
    7.0

    a: log-features (B, H, R, m). A row that sees nothing gives 0.
    """
    weights, peak = _weights(a, sums.top)
    return _divided(weights @ sums.values, (weights @ sums.mass.unsqueeze(-1)).squeeze(-1), peak)


def walk(sums: FeatureSums, a: Tensor, b: Tensor, v: Tensor) -> tuple[Rows, FeatureSums]:
    """Queries and keys of a few positions in order: each query reads what is before it and its own; and the sums after.

    >>> zero = torch.zeros(1, 1, 2, 1)
    >>> rows, _ = walk(no_keys(1, 1, 1, 1, zero), zero.unsqueeze(2), zero, torch.tensor([2.0, 4.0]).view(1, 1, 2, 1))
    >>> rows.output.flatten().tolist()
    [2.0, 3.0]

    a: log-features of the queries (B, H, G, n, m), G query heads for each key head.
    b, v: of the keys, (B, H, n, m) and (B, H, n, Dv).
    """
    half, top = b.shape[-2] // 2, torch.maximum(sums.top, b.detach().amax(-2))
    if half and not _safe(sums, a, b, top):
        first, sums = walk(sums, a[..., :half, :], b[:, :, :half], v[:, :, :half])
        second, sums = walk(sums, a[..., half:, :], b[:, :, half:], v[:, :, half:])
        return _one_after_another(first, second, a.shape[2]), sums
    carried, features = _on_one_scale(sums, b, top)
    weights, peak = _weights(a.flatten(2, 3), top)  # (B, H, G·n, m)
    pairs = by_group(weights @ features.transpose(-1, -2), a.shape[2]).tril().flatten(2, 3)  # (B, H, G·n, n)
    mass = (weights @ carried.mass.unsqueeze(-1)).squeeze(-1) + pairs.sum(-1)
    return _divided(weights @ carried.values + pairs @ v, mass, peak), _added(carried, features, v)


def _safe(sums: FeatureSums, a: Tensor, b: Tensor, top: Tensor) -> bool:
    """Does no row see so little of what the chunk holds that its own part would vanish beside it?"""
    with torch.no_grad():
        first = torch.maximum(sums.top, b[:, :, 0])  # what every row sees at least
        if bool((top - first <= SAFE).all()):  # then no row's gap can be larger; this is cheap, what follows is not
            return True
        tops = torch.maximum(sums.top.unsqueeze(-2), b.cummax(-2).values).unsqueeze(2)  # (B, H, 1, n, m)
        own = (a + _finite(tops)).amax(-1)  # (B, H, G, n)
        gap = (a + _finite(top)[:, :, None, None]).amax(-1) - own
        blind = (tops == -torch.inf).all(-1)  # a row that sees nothing has nothing to lose
        return not bool((gap.masked_fill(blind, 0.0) > SAFE).any())


def _on_one_scale(sums: FeatureSums, b: Tensor, top: Tensor) -> tuple[FeatureSums, Tensor]:
    """The sums so far and the features of new keys (B, H, n, m), both divided by e^top."""
    base = _finite(top)
    factor = torch.exp(sums.top - base)  # (B, H, m); e^−∞ = 0 where there was nothing
    carried = FeatureSums(top, sums.mass * factor, sums.values * factor.unsqueeze(-1))
    return carried, torch.exp(b - base.unsqueeze(-2))


def _added(carried: FeatureSums, features: Tensor, v: Tensor) -> FeatureSums:
    values = carried.values + features.transpose(-1, -2) @ v
    return FeatureSums(carried.top, carried.mass + features.sum(-2), values)


def _weights(a: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """e^(a + top − the row's largest), (B, H, R, m), and the row's largest (B, H, R)."""
    a = a + _finite(top).unsqueeze(-2)
    peak = a.detach().amax(-1, keepdim=True)
    return torch.exp(a - peak), peak.squeeze(-1)


def _divided(values: Tensor, mass: Tensor, peak: Tensor) -> Rows:
    some = mass > 0
    mass = torch.where(some, mass, 1.0)
    lse = torch.where(some, peak + mass.log(), -torch.inf)
    return Rows(torch.where(some.unsqueeze(-1), values / mass.unsqueeze(-1), 0.0), lse)


def _one_after_another(first: Rows, second: Rows, groups: int) -> Rows:
    """Join two runs of positions whose rows are (G·n): position follows position within each group."""
    pairs = zip(first, second, strict=True)
    return Rows(*(torch.cat([by_group(x, groups) for x in both], 3).flatten(2, 3) for both in pairs))


def by_group(x: Tensor, groups: int) -> Tensor:
    """(B, H, G·n, …) → (B, H, G, n, …): the rows of each query head apart.

    >>> by_group(torch.zeros(1, 2, 6, 5), 3).shape
    torch.Size([1, 2, 3, 2, 5])
    """
    return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])


def _finite(top: Tensor) -> Tensor:
    return torch.where(top == -torch.inf, 0.0, top)
