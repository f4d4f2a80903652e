"""The measures of one pass over the weights.

A pass gives every visible tile to every measure; a measure adds it to its sums and finally returns its result. A new
measure is one class here and one line in `MEASURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

NAMES = ("entropy", "received", "map", "max_logit", "effective", "top")
DEFAULT = ("entropy", "received", "map")
MAP_SIZE = 64
TOP = 8
LEAST = -1e30  # below any logarithm of a weight that is not 0, above what stands for a hidden one

Sizes = tuple[int, int, int, int]
"""B, H, Nq, Nk."""


@dataclass(frozen=True)
class MeasureOptions:
    """Which measures a pass computes, the map's size and the number of links per row."""

    names: frozenset[str]
    size: int = MAP_SIZE
    top: int = TOP


def read_measures(measures: object, size: object = MAP_SIZE, top: object = TOP) -> MeasureOptions:
    """Check the arguments `measures=` (one name or several; None means `DEFAULT`), `size=` and `top=`.

    Raises:
        ValueError: for an unknown measure, or a size or top below 1.
        TypeError: for a name that is not a str, or a size or top that is not an integer.
    """
    chosen = DEFAULT if measures is None else (measures,) if isinstance(measures, str) else measures
    if not isinstance(chosen, Iterable):
        raise TypeError(f"measures must be names such as {', '.join(NAMES)}; got {type(measures).__name__}")
    names = list(chosen)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"no measure {unknown[0]!r}; there are {', '.join(NAMES)}")
    return MeasureOptions(frozenset(names), at_least_one("size", size), at_least_one("top", top))


def at_least_one(name: str, value: object) -> int:
    """Check a count. Raises TypeError if it is not an integer, ValueError if it is below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer of at least 1, got {type(value).__name__}: {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value}")
    return int(value)


# -------------------------------------------------------------------------------------------------------------- tiles


def cell_of_positions(positions: Tensor, n: int, size: int) -> Tensor:
    """The map cell of each position: the inverse of `cell_edges`.

    >>> cell_of_positions(torch.arange(7), 7, 3).tolist()
    [0, 0, 1, 1, 2, 2, 2]
    """
    return ((positions + 1) * min(size, n) - 1) // n


class Pool:
    """Sums over the map cells that a slice of n positions touches; `like` has the dtype and device of the sums."""

    def __init__(self, part: slice, n: int, size: int, like: Tensor) -> None:
        cells = min(size, n)
        first, last = (((i + 1) * cells - 1) // n for i in (part.start, part.stop - 1))
        self.cells, self.count = slice(first, last + 1), last + 1 - first
        edges = [part.start, *(c * n // cells for c in range(first + 1, last + 1)), part.stop]
        self.even = len({b - a for a, b in pairwise(edges)}) == 1
        self.member = like.new_zeros(0 if self.even else self.count, part.stop - part.start)  # (cells, positions)
        if not self.even:
            at = cell_of_positions(torch.arange(part.start, part.stop, device=like.device), n, size)
            self.member.scatter_(0, (at - first)[None], 1.0)

    def rows(self, x: Tensor) -> Tensor:
        """(b, h, positions, c) → (b, h, cells, c)."""
        return x.view(*x.shape[:2], self.count, -1, x.shape[3]).sum(3) if self.even else self.member @ x

    def columns(self, x: Tensor) -> Tensor:
        """(b, h, r, positions) → (b, h, r, cells)."""
        return x.view(*x.shape[:3], self.count, -1).sum(4) if self.even else x @ self.member.mT


@dataclass(frozen=True)
class TilePlace:
    """Where a tile lies, and whether its cells must be masked one by one."""

    batch: slice
    heads: slice
    rows: slice
    cols: slice
    masked: bool = False

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Where its rows are in a (B, H, Nq) tensor."""
        return self.batch, self.heads, self.rows


@dataclass
class WeightTile:
    """One visible tile of some batch rows and heads. Measures read it; they may write to `scratch` alone."""

    at: TilePlace
    s: Tensor | None  # (b, h, r, c) the scores in units of `unit`, −∞ where hidden; None: they are t + lse
    t: Tensor  # (b, h, r, c) s − lse = ln p in units of `t_unit`, finite where hidden: so that p·t is 0 there
    p: Tensor  # (b, h, r, c) the weights
    scratch: Tensor  # (b, h, r, c) with any contents
    row_pool: Pool | None = None  # for the map
    col_pool: Pool | None = None
    unit: float = 1.0  # above 0
    t_unit: float = 1.0  # above 0

    @cached_property
    def by_cell(self) -> Tensor:
        """Sums over the rows of each map cell, (b, h, cells, c): what the map and the received mass share."""
        assert self.row_pool is not None
        return self.row_pool.rows(self.p)


# ----------------------------------------------------------------------------------------------------------- measures


class Measure(Protocol):
    """One measure of a call."""

    def add(self, tile: WeightTile) -> None:
        """Add a visible tile."""

    def result(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """Name → tensor, when all visible tiles were added."""


def _add(total: Tensor, part: Tensor) -> None:
    """In place, on a view: `self.sum[at] += part` would write the sum back once more."""
    total += part


class _Entropy:
    """−Σ p ln p of each row in nats, (B, H, Nq): with t = s − lse = ln p, −Σ p·t. A sink is one more outcome."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.sum = like.new_zeros(sizes[:3])

    def add(self, tile: WeightTile) -> None:
        self.sum[tile.at.queries].add_(torch.mul(tile.p, tile.t, out=tile.scratch).sum(-1), alpha=tile.t_unit)

    def result(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        return {"entropy": finish_entropy(-self.sum, lse, sinks)}


def finish_entropy(entropy: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Add the sink's own term, and keep rounding from making a certain row's entropy −0 or less."""
    if sinks is not None:
        t = _log_share(lse, sinks).to(entropy.dtype)
        entropy = entropy - torch.where(t == -inf, 0.0, t.exp() * t)
    return entropy.clamp(min=0.0) + 0.0  # −0 + 0 is 0


def _log_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """ln of the sink's share of each row, (B, H, Nq), from one logit per head (H,) or per row (B, H, Nq)."""
    logit = sinks.detach().to(lse.dtype)
    return torch.where(lse == -inf, -inf, (logit if logit.ndim == 3 else logit[:, None]) - lse)


class _Received:
    """The total weight that each key gets, (B, H, Nk): the column sums."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.sum = like.new_zeros(sizes[0], sizes[1], sizes[3])

    def add(self, tile: WeightTile) -> None:
        keys = tile.at.batch, tile.at.heads, tile.at.cols
        _add(self.sum[keys], (tile.p if tile.row_pool is None else tile.by_cell).sum(-2))

    def result(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        return {"received": self.sum}


class _MaxLogit:
    """The largest visible score of each row, (B, H, Nq); −∞ where a row sees nothing."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.lse, self.largest = like, like.new_full(sizes[:3], -inf)

    def add(self, tile: WeightTile) -> None:
        part = self.largest[tile.at.queries]
        if tile.s is not None:
            largest = tile.s.amax(-1) * tile.unit
        else:
            largest = tile.t.amax(-1)
            hidden = largest < LEAST
            largest = largest.mul_(tile.t_unit).add_(self.lse[tile.at.queries]).masked_fill_(hidden, -inf)
        torch.maximum(part, largest, out=part)

    def result(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        return {"max_logit": self.largest}


class _Effective:
    """The effective number of keys of a row, 1/Σp², (B, H, Nq): N for a row spread evenly over N. A sink is a key."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.sum = like.new_zeros(sizes[:3])

    def add(self, tile: WeightTile) -> None:
        _add(self.sum[tile.at.queries], torch.mul(tile.p, tile.p, out=tile.scratch).sum(-1))

    def result(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        return {"effective": finish_effective(self.sum, lse, sinks)}


def finish_effective(squares: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """1/Σp², the sink's share among them, and 0 for a row that sees nothing."""
    if sinks is not None:
        squares = squares + (2 * _log_share(lse, sinks).to(squares.dtype)).exp()
    return torch.where(squares == 0, 0.0, 1 / squares)


class _Map:
    """Weights pooled over map cells: Σ p over a cell's queries and keys, divided by its number of queries."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.nq = sizes[2]
        self.sum = like.new_zeros(*sizes[:2], *(min(wanted.size, n) for n in sizes[2:]))

    def add(self, tile: WeightTile) -> None:
        assert tile.row_pool is not None
        assert tile.col_pool is not None
        part = self.sum[tile.at.batch, tile.at.heads, tile.row_pool.cells, tile.col_pool.cells]
        _add(part, tile.col_pool.columns(tile.by_cell))

    def result(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        return {"map": finish_map(self.sum, self.nq)}


def finish_map(sums: Tensor, nq: int) -> Tensor:
    """Sums per cell → means over the cell's queries; counted on the device, so that nothing waits for it."""
    cells = sums.shape[-2]
    if cells and nq % cells == 0:
        return sums / (nq // cells)
    edges = torch.arange(cells + 1, device=sums.device) * nq // max(1, cells)
    return sums / edges.diff().to(sums.dtype).unsqueeze(-1)


class _TopKeys:
    """The largest weights of each row with their keys, the lower key first among equals."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.k, self.short = min(wanted.top, sizes[3]), max(0, wanted.top - sizes[3])
        shape = (*sizes[:3], self.k + 1)  # one more: a row is tied if the next one is as good as the last
        self.score, self.key = like.new_full(shape, -inf), torch.full(shape, -1, device=like.device)

    def add(self, tile: WeightTile) -> None:
        assert tile.s is not None
        # 1. The best of the tile; among equals at the end, the first ones.
        count, columns = self.k + 1, tile.s.shape[-1]
        best, at = tile.s.topk(min(count, columns), dim=-1)
        if count < columns:
            unsettled = (best[..., -1] == best[..., -2]) & (best[..., -1] > -inf)  # topk takes any of the equal ones
            if bool(unsettled.any()):
                first, where = tile.s[unsettled].sort(dim=-1, descending=True, stable=True)
                best[unsettled], at[unsettled] = first[:, :count], where[:, :count]
        # 2. Sorted with those so far, the lower key first among equals; places still empty have −1, before hidden keys.
        score = torch.cat([self.score[tile.at.queries], best * tile.unit], -1)
        key, order = torch.cat([self.key[tile.at.queries], at + tile.at.cols.start], -1).sort(dim=-1, stable=True)
        score, by_score = score.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        key = key.gather(-1, by_score)
        self.score[tile.at.queries], self.key[tile.at.queries] = score[..., :count], key[..., :count]

    def result(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        score, key, next_ = self.score[..., : self.k], self.key[..., : self.k], self.score[..., self.k]
        tied = (self.score[..., self.k - 1] == next_) & (next_ > -inf)
        return finish_top(score, key, tied, lse, self.short)


def finish_top(score: Tensor, key: Tensor, tied: Tensor, lse: Tensor, short: int) -> dict[str, Tensor]:
    """Scores → weights (B, H, Nq, k); `short` columns of key −1 and weight 0 where k is more than there are keys."""
    weight = torch.where(key < 0, 0.0, (score - torch.where(lse == -inf, 0.0, lse).unsqueeze(-1)).exp())
    pad = torch.nn.functional.pad
    return {"top_key": pad(key, (0, short), value=-1), "top_weight": pad(weight, (0, short)), "top_tied": tied}


MEASURES: dict[str, Callable[[Sizes, Tensor, MeasureOptions], Measure]] = {
    "entropy": _Entropy,
    "received": _Received,
    "map": _Map,
    "max_logit": _MaxLogit,
    "effective": _Effective,
    "top": _TopKeys,
}
