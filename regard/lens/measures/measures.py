"""The measures of one pass over the weights, each fed tile by tile.

A pass gives every visible tile to every measure; a measure adds it to its sum and finally returns its result. A new
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

__all__ = [
    "DEFAULT",
    "MAP_SIZE",
    "MEASURES",
    "NAMES",
    "TOP",
    "Measure",
    "MeasureOptions",
    "Pool",
    "Sizes",
    "WeightTile",
    "at_least_one",
    "cell_of_positions",
    "finish_effective",
    "finish_entropy",
    "finish_map",
    "finish_top",
    "read_measures",
]

NAMES = ("entropy", "received", "max_logit", "effective", "map", "top")
DEFAULT = ("entropy", "received", "max_logit", "map")
MAP_SIZE = 64
TOP = 8


@dataclass(frozen=True)
class MeasureOptions:
    """Which measures a pass makes, the map's size and how many links per row."""

    names: frozenset[str]
    size: int = MAP_SIZE
    top: int = TOP


def read_measures(measures: object, size: object = MAP_SIZE, top: object = TOP) -> MeasureOptions:
    """Check a `measures=` argument: one name or several from `NAMES`; None means `DEFAULT`.

    >>> sorted(read_measures(["map", "entropy"]).names)
    ['entropy', 'map']

    Raises:
        ValueError: there is no such measure, or size or top is below 1.
        TypeError: a name is not a str, or size or top not an integer.
    """
    given = DEFAULT if measures is None else (measures,) if isinstance(measures, str) else measures
    if not isinstance(given, Iterable):
        raise TypeError(f"measures must be names such as {', '.join(NAMES)}; got {type(measures).__name__}")
    names = list(given)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"no measure {unknown[0]!r}; there are {', '.join(NAMES)}")
    return MeasureOptions(frozenset(names), at_least_one("size", size), at_least_one("top", top))


def at_least_one(name: str, value: object) -> int:
    """Read a number of things.

    >>> at_least_one("size", 8)
    8

    Raises TypeError for what is no integer, ValueError for one below 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer of at least 1, got {type(value).__name__}: {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value}")
    return int(value)


def cell_of_positions(positions: Tensor, n: int, size: int) -> Tensor:
    """The map cell of each position: the inverse of `cell_edges`.

    >>> cell_of_positions(torch.arange(7), 7, 3).tolist()
    [0, 0, 1, 1, 2, 2, 2]
    """
    return ((positions + 1) * min(size, n) - 1) // n


class Pool:
    """Sums over the map cells that a stretch of positions touches."""

    def __init__(self, part: slice, n: int, size: int, like: Tensor) -> None:
        """part: which of n positions, at least one.  like: has the dtype and device of what will be summed."""
        cells = min(size, n)
        self.first, last = (((i + 1) * cells - 1) // n for i in (part.start, part.stop - 1))
        self.count = last + 1 - self.first
        edges = [part.start, *(c * n // cells for c in range(self.first + 1, last + 1)), part.stop]
        self.even = len({b - a for a, b in pairwise(edges)}) == 1
        self.member = like.new_zeros(0 if self.even else self.count, part.stop - part.start)  # (cells, positions)
        if not self.even:
            at = cell_of_positions(torch.arange(part.start, part.stop, device=like.device), n, size)
            self.member.scatter_(0, (at - self.first)[None], 1.0)

    @property
    def cells(self) -> slice:
        """Which map cells they are."""
        return slice(self.first, self.first + self.count)

    def rows(self, x: Tensor) -> Tensor:
        """(b, h, positions, c) → (b, h, cells, c)."""
        return x.view(*x.shape[:2], self.count, -1, x.shape[3]).sum(3) if self.even else self.member @ x

    def columns(self, x: Tensor) -> Tensor:
        """(b, h, r, positions) → (b, h, r, cells)."""
        return x.view(*x.shape[:3], self.count, -1).sum(4) if self.even else x @ self.member.mT


@dataclass
class WeightTile:
    """One visible tile of some batch rows and heads. Measures read it; they may write to `scratch` alone."""

    batch: slice
    heads: slice
    rows: slice
    cols: slice
    s: Tensor  # (b, h, r, c) the scores in units of `unit`, −∞ where hidden
    t: Tensor  # (b, h, r, c) s − lse = ln p, finite where hidden: so that p·t is 0 there
    p: Tensor  # (b, h, r, c) the weights
    scratch: Tensor  # (b, h, r, c) of nothing in particular
    row_pool: Pool | None = None  # where a map is wanted
    col_pool: Pool | None = None
    unit: float = 1.0  # above 0

    @cached_property
    def by_cell(self) -> Tensor:
        """Sums over the rows of each map cell, (b, h, cells, c): what the map and the received mass share."""
        assert self.row_pool is not None
        return self.row_pool.rows(self.p)

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Where this tile's rows are in a (B, H, Nq) tensor."""
        return self.batch, self.heads, self.rows

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        """Where its columns are in a (B, H, Nk) tensor."""
        return self.batch, self.heads, self.cols


class Measure(Protocol):
    """One measure: made for a call, fed tiles, asked once."""

    def add(self, tile: WeightTile) -> None:
        """Take a tile in."""

    def found(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """Name → tensor, when all visible tiles were added."""


Sizes = tuple[int, int, int, int]


def _add(total: Tensor, part: Tensor) -> None:
    """In place, on a view: `self.sum[at] += part` would write the sum back once more."""
    total += part


class Entropy:
    """−Σ p ln p of each row: with t = s − lse = ln p, −Σ p·t. A sink is one more outcome."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.sum = like.new_zeros(sizes[:3])

    def add(self, tile: WeightTile) -> None:
        """Add Σ p·t."""
        _add(self.sum[tile.queries], torch.mul(tile.p, tile.t, out=tile.scratch).sum(-1))

    def found(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """(B, H, Nq) in nats."""
        return {"entropy": finish_entropy(-self.sum, lse, sinks)}


def finish_entropy(entropy: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Add the sink's own term, and keep rounding from making a certain row's entropy −0 or less."""
    if sinks is not None:
        t = _log_share(lse, sinks).to(entropy.dtype)
        entropy = entropy - torch.where(t == -inf, 0.0, t.exp() * t)
    return entropy.clamp(min=0.0) + 0.0  # −0 + 0 is 0


def _log_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """ln of what the sink took of each row, (B, H, Nq), from one logit per head (H,) or per row (B, H, Nq)."""
    logit = sinks.detach().to(lse.dtype)
    return torch.where(lse == -inf, -inf, (logit if logit.ndim == 3 else logit[:, None]) - lse)


class Received:
    """What each key gets from all queries together: the column sums."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.sum = like.new_zeros(sizes[0], sizes[1], sizes[3])

    def add(self, tile: WeightTile) -> None:
        """Add the tile's column sums."""
        _add(self.sum[tile.keys], (tile.p if tile.row_pool is None else tile.by_cell).sum(-2))

    def found(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """(B, H, Nk)."""
        return {"received": self.sum}


class MaxLogit:
    """The largest visible score of each row."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.max_positions = like.new_full(sizes[:3], -inf)

    def add(self, tile: WeightTile) -> None:
        """Compare with the tile's row maxima."""
        part = self.max_positions[tile.queries]
        torch.maximum(part, tile.s.amax(-1) * tile.unit, out=part)

    def found(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """(B, H, Nq); −∞ where a row sees nothing."""
        return {"max_logit": self.max_positions}


class Effective:
    """How many keys a row looks at, as 1/Σp²: N for a row that spreads evenly over N keys. A sink is one more key."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.sum = like.new_zeros(sizes[:3])

    def add(self, tile: WeightTile) -> None:
        """Add Σ p²."""
        _add(self.sum[tile.queries], torch.mul(tile.p, tile.p, out=tile.scratch).sum(-1))

    def found(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """(B, H, Nq); 0 where a row sees nothing."""
        return {"effective": finish_effective(self.sum, lse, sinks)}


def finish_effective(squares: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """1/Σp², the sink's share among them, and 0 for a row that sees nothing."""
    if sinks is not None:
        squares = squares + (2 * _log_share(lse, sinks).to(squares.dtype)).exp()
    return torch.where(squares == 0, 0.0, 1 / squares)


class Map:
    """Weights pooled over map cells: Σ p over a cell's queries and keys, divided by its number of queries."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.nq = sizes[2]
        self.sum = like.new_zeros(*sizes[:2], *(min(wanted.size, n) for n in sizes[2:]))

    def add(self, tile: WeightTile) -> None:
        """Add the tile's part of each cell it touches."""
        assert tile.row_pool is not None
        assert tile.col_pool is not None
        part = self.sum[tile.batch, tile.heads, tile.row_pool.cells, tile.col_pool.cells]
        _add(part, tile.col_pool.columns(tile.by_cell))

    def found(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """(B, H, cells, cells)."""
        return {"map": finish_map(self.sum, self.nq)}


def finish_map(sums: Tensor, nq: int) -> Tensor:
    """Sums per cell → means over the cell's queries; counted on the device, so that nothing waits for it."""
    cells = sums.shape[-2]
    edges = torch.arange(cells + 1, device=sums.device) * nq // max(1, cells)
    return sums / edges.diff().to(sums.dtype).unsqueeze(-1)


class TopKeys:
    """The largest weights of each row with their keys, the lower key first among equals."""

    def __init__(self, sizes: Sizes, like: Tensor, wanted: MeasureOptions) -> None:
        self.k, self.short = min(wanted.top, sizes[3]), max(0, wanted.top - sizes[3])
        shape = (*sizes[:3], self.k + 1)  # one more: a row is tied if the next one is as good as the last
        self.score, self.key = like.new_full(shape, -inf), torch.full(shape, -1, device=like.device)

    def add(self, tile: WeightTile) -> None:
        """Keep the best of those so far and the tile's own."""
        # 1. The best of the tile; among equals at the end, the first ones.
        count, columns = self.k + 1, tile.s.shape[-1]
        best, at = tile.s.topk(min(count, columns), dim=-1)
        if count < columns:
            unsettled = (best[..., -1] == best[..., -2]) & (best[..., -1] > -inf)  # topk takes any of the equal ones
            if bool(unsettled.any()):
                first, where = tile.s[unsettled].sort(dim=-1, descending=True, stable=True)
                best[unsettled], at[unsettled] = first[:, :count], where[:, :count]
        # 2. Sorted with those so far, the lower key first among equals; places still empty have −1, before hidden keys.
        score = torch.cat([self.score[tile.queries], best * tile.unit], -1)
        key, order = torch.cat([self.key[tile.queries], at + tile.cols.start], -1).sort(dim=-1, stable=True)
        score, by_score = score.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        key = key.gather(-1, by_score)
        self.score[tile.queries], self.key[tile.queries] = score[..., :count], key[..., :count]

    def found(self, lse: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """Keys and weights (B, H, Nq, k), and whether a key left out is as strong as the last one taken."""
        score, key, next_ = self.score[..., : self.k], self.key[..., : self.k], self.score[..., self.k]
        tied = (self.score[..., self.k - 1] == next_) & (next_ > -inf)
        return finish_top(score, key, tied, lse, self.short)


def finish_top(score: Tensor, key: Tensor, tied: Tensor, lse: Tensor, short: int) -> dict[str, Tensor]:
    """Scores to weights; `short` columns of key −1 and weight 0 where k is more than there are keys."""
    weight = torch.where(key < 0, 0.0, (score - torch.where(lse == -inf, 0.0, lse).unsqueeze(-1)).exp())
    pad = torch.nn.functional.pad
    return {"top_key": pad(key, (0, short), value=-1), "top_weight": pad(weight, (0, short)), "top_tied": tied}


MEASURES: dict[str, Callable[[Sizes, Tensor, MeasureOptions], Measure]] = {
    "entropy": Entropy,
    "received": Received,
    "max_logit": MaxLogit,
    "effective": Effective,
    "map": Map,
    "top": TopKeys,
}
