"""The visible tiles of a mask, listed: for each stretch of queries the stretches of keys that it sees, without N×N.

    keys →  0 1 2 3 4 5
    queries ■ ■ ▒ · · ·      stretch 0 sees 0 1 2
            ■ ■ ■ ▒ · ·      stretch 1 sees 0 1 2 3
            ▒ ■ ■ ■ ▒ ·      stretch 2 sees 0 1 2 3 4

Stretches that see equally many are a group, so that a group is one array. Queries that see nearly everything beside
others that do not (global tokens) stand in a panel of their own, or their neighbours would be computed as if they saw
everything too. What a group's cells look like is found out once and kept where it repeats, as it does along a window.
Under a dilated mask every so manyth position stands side by side, which makes it a window again.

It does not know scores, values or backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from regard.masks.mask import EMPTY, FULL, PARTIAL, Grid, Mask
from regard.rules import IndexRule, keep

__all__ = ["Group", "Panel", "VisibleTiles", "visible_tiles"]

ROWS = (64, 128, 256)  # queries in a tile: the one that costs least is taken
COLS = 32  # keys in a tile: a global key or a window's ragged edge costs as many
MOST_TILES = 1 << 22  # in the table of one batch row and head; longer calls get larger tiles
MOST_LOOKED_AT = 1 << 25  # of single queries against tiles of keys, in search of global tokens
OVERHEAD = 20  # a tile of r queries costs as if it had so many more: measured, windows of 512, tiles of 64 to 256
MOST_PATTERN_CELLS = 1 << 23  # bytes that a mask keeps for the cells of one group
CELLS_AT_ONCE = 1 << 20  # of a mask, evaluated together
FEW_COUNTS = 8  # of tiles that stretches see: up to so many groups nothing is filled up


@dataclass(frozen=True, eq=False)
class Group:
    """Stretches of queries that see equally many stretches of keys: U of them, each seeing C."""

    lead: Tensor  # (U,) which batch row and head of the mask, b · heads + h
    row: Tensor  # (U,) which stretch of queries
    cols: Tensor  # (U, C) which stretches of keys, ascending; −1 fills up
    masked: bool  # must cells be looked at?
    heads: int  # over which the mask varies
    queries: Tensor  # (T, R) the panel's
    size: int  # keys in a stretch
    order: Tensor | None  # (Nk,) of the keys; None: their own
    nk: int
    see: IndexRule | None

    @property
    def width(self) -> int:
        """Keys that a stretch of queries is compared with."""
        return self.cols.shape[1] * self.size

    def keys(self, units: slice) -> tuple[Tensor, Tensor]:
        """Which key stands in each column, (U, width), and which columns hold a key."""
        cols = self.cols[units]
        j = (cols * self.size).unsqueeze(-1) + torch.arange(self.size, device=cols.device)  # (U, C, size)
        real = (j >= 0) & (j < self.nk)
        j = j.clamp(0, self.nk - 1).flatten(1)
        return j if self.order is None else self.order[j], real.flatten(1)

    def cells(self, units: slice) -> Tensor:
        """What these stretches see: (U, R, width), or (1, R, width) where all see alike."""
        if self.patterns is None:
            return self.evaluate(units)
        kept, which = self.patterns
        chosen = which[units]
        return kept[chosen[:1]] if bool((chosen == chosen[0]).all()) else kept[chosen]

    def evaluate(self, units: slice) -> Tensor:
        """The same, from the mask's rule."""
        j, real = self.keys(units)
        lead, i = self.lead[units], self.queries[self.row[units]]
        shown = real.unsqueeze(1)  # (U, 1, width)
        if self.see is not None:
            b, h = (x.view(-1, 1, 1) for x in (lead // self.heads, lead % self.heads))
            shown = self.see(b, h, i.unsqueeze(-1), j.unsqueeze(1)) & shown
        return shown.expand(len(lead), i.shape[1], j.shape[1])

    @cached_property
    def kept(self) -> dict[object, Any]:
        """What others found out about the group once and for all."""
        return {}

    @cached_property
    def patterns(self) -> tuple[Tensor, Tensor] | None:
        """The different cells there are (P, R, width), and which each stretch has; None if they are too many."""
        with torch.inference_mode(False):  # a later call may differentiate with what is kept here
            return self._different_cells()

    def _different_cells(self) -> tuple[Tensor, Tensor] | None:
        known: dict[bytes, int] = {}
        kept: list[Tensor] = []
        which: list[int] = []
        for units in self.cut(CELLS_AT_ONCE // max(1, self.queries.shape[1] * self.width)):
            for cells in self.evaluate(units).cpu():
                number = known.setdefault(cells.numpy().tobytes(), len(known))
                if number == len(kept):
                    kept.append(cells.clone())
                which.append(number)
                if len(kept) * cells.numel() > MOST_PATTERN_CELLS:
                    return None
        return torch.stack(kept).to(self.cols.device), torch.tensor(which, device=self.cols.device)

    def cut(self, units: int) -> Iterator[slice]:
        """The stretches, so many at a time, but at least one."""
        step = max(1, units)
        return (slice(u, u + step) for u in range(0, len(self.row), step))


@dataclass(frozen=True, eq=False)
class Panel:
    """Queries in stretches, and the groups of stretches."""

    queries: Tensor  # (T, R) index of the query in each place; the last stretch is filled up with its last query
    count: int  # queries without what fills up
    groups: tuple[Group, ...]

    @property
    def chosen(self) -> Tensor:
        """The queries in order, without what fills up: (count,)."""
        return self.queries.flatten()[: self.count]


@dataclass(frozen=True, eq=False)
class VisibleTiles:
    """What a mask shows: all queries in stretches, and beside them those that see nearly everything.

    everyone: a panel of all queries; what it says of the wide ones counts for nothing.
    wide: a panel of those that see nearly everything, or None.
    order: of the keys, (Nk,); None where keys and queries stand in their own order.
    """

    everyone: Panel
    wide: Panel | None
    order: Tensor | None
    cols: int  # keys in a stretch
    share: float  # cells that are computed, of all Nq · Nk

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The one or the two."""
        return (self.everyone,) if self.wide is None else (self.everyone, self.wide)

    @property
    def rows(self) -> int:
        """Queries in a stretch."""
        return self.everyone.queries.shape[1]


def visible_tiles(mask: Mask | None, nq: int, nk: int, device: torch.device) -> VisibleTiles:
    """The visible tiles of a mask, in the size that costs least; found once for each mask and size of call.

    >>> from regard.masks import globals, window
    >>> found = visible_tiles(window(256, 256) | globals([0]), 4096, 4096, torch.device("cpu"))
    >>> found.rows, found.cols, found.wide.count, round(found.share, 3)
    (128, 32, 1, 0.158)

    mask: None where everything is visible.  nq, nk: at least 1.  Raises ValueError if the mask does not fit.
    """
    if mask is None:
        return _list(None, nq, nk, device)
    return keep(mask, ("tiles", nq, nk, device), lambda: _list(mask, nq, nk, device))


def _list(mask: Mask | None, nq: int, nk: int, device: torch.device) -> VisibleTiles:
    if mask is not None:
        mask.fit(*mask.leading, nq, nk)
    strides = {1, 1 if mask is None else min(mask.stride(), nk)}
    tables = [_Table(mask, nq, nk, size, stride, device) for size in _sizes(nq, nk) for stride in sorted(strides)]
    return min(tables, key=lambda table: table.cost).listed()


def _sizes(nq: int, nk: int) -> list[tuple[int, int]]:
    """The sizes of tiles to compare."""
    times = 1
    while -(-nq // (ROWS[0] * times)) * -(-nk // (COLS * times)) > MOST_TILES:
        times *= 2
    rows = sorted({min(rows * times, nq) for rows in ROWS})
    return [(n, min(COLS * times, nk)) for n in rows]


class _Table:
    """Empty, partial or full for each tile of one size, and what computing the visible ones costs."""

    def __init__(
        self, mask: Mask | None, nq: int, nk: int, size: tuple[int, int], stride: int, device: torch.device
    ) -> None:
        self.mask, self.nq, self.nk, self.size, self.device = mask, nq, nk, size, device
        self.queries = _ordered(nq, stride, device)
        self.order = None if stride == 1 else _ordered(nk, stride, device)
        self.leading = (1, 1) if mask is None else mask.leading
        self.see = None if mask is None else mask.bind(nq, nk, device, torch.float32)
        self.kinds = self.of(self.queries, size[0])
        self.wide = self.wide_queries()
        if len(self.wide):
            self.kinds = self.of(self.without(self.queries), size[0])
        self.full_height = min(size[0], max(1, len(self.wide)))

    def of(self, queries: Tensor, rows: int) -> Tensor:
        """What each tile of these queries shows: (L, T, Tk), L over the mask's batch rows and heads."""
        down, across = -(-len(queries) // rows), -(-self.nk // self.size[1])
        if self.mask is None:
            kinds = torch.full((1, down, across), FULL, dtype=torch.int8, device=self.device)
        else:
            grid = Grid(self.nq, self.nk, (rows, self.size[1]), self.device, queries, self.order)
            some, every = self.mask.bounds(grid)
            both = some.to(torch.int8) + (some & every).to(torch.int8)
            kinds = both.expand(*self.leading, down, across).reshape(-1, down, across)
        if self.nk % self.size[1]:  # the last tile is filled up with keys that nobody sees
            kinds = torch.cat([kinds[..., :-1], kinds[..., -1:].clamp(max=PARTIAL)], -1)
        return kinds

    def wide_queries(self) -> Tensor:
        """The queries that see more than half of all tiles, and more than twice what is usual in their tile."""
        across = self.kinds.shape[2]
        tiles = ((self.kinds != EMPTY).sum(-1) * 2 > across).any(0).nonzero().flatten()  # (T',)
        each = across * self.size[0] * prod(self.leading)  # what is looked at for one of them
        few = 0 < len(tiles) * 4 <= self.kinds.shape[1]  # or most of it is visible: nothing to be gained
        if not few or len(tiles) * each > MOST_LOOKED_AT:
            return tiles[:0]
        is_wide = torch.zeros(self.nq, dtype=torch.bool, device=self.device)
        step = max(1, MOST_TILES // each)
        for start in range(0, len(tiles), step):
            part = self.stretches(tiles[start : start + step])
            seen = (self.of(part.flatten(), 1) != EMPTY).sum(-1).amax(0).view(part.shape)  # (T', rows)
            is_wide[part[(seen * 2 > across) & (seen > 2 * seen.median(-1, keepdim=True).values)]] = True
        return is_wide.nonzero().flatten()

    def stretches(self, tiles: Tensor | None = None) -> Tensor:
        """The queries of some tiles, or of all: (T, rows)."""
        at = torch.arange(-(-self.nq // self.size[0]), device=self.device) if tiles is None else tiles
        queries = at.unsqueeze(-1) * self.size[0] + torch.arange(self.size[0], device=self.device)
        return self.queries[queries.clamp(max=self.nq - 1)]

    def without(self, queries: Tensor) -> Tensor:
        """Each wide query replaced by a neighbour in its tile that is not: for bounds as if it were not there."""
        is_wide = torch.zeros(self.nq, dtype=torch.bool, device=self.device)
        is_wide[self.wide] = True
        stretches = self.stretches()
        first = (~is_wide[stretches]).int().argmax(-1)  # the usual ones of a tile are not wide
        other = stretches.gather(1, first.unsqueeze(-1)).expand_as(stretches).flatten()[: self.nq]
        return torch.where(is_wide[queries], other, queries)

    @property
    def cells(self) -> int:
        """Cells that are computed, over the mask's batch rows and heads."""
        shown = int((self.kinds != EMPTY).sum()) * self.size[0] * self.size[1]
        return shown + len(self.wide) * self.nk * self.kinds.shape[0]

    @property
    def cost(self) -> float:
        """Comparable between sizes: small tiles compute fewer cells, each at a higher price."""
        return self.cells * (1 + OVERHEAD / self.size[0])

    def listed(self) -> VisibleTiles:
        """The groups."""
        queries = self.stretches()
        everyone = Panel(queries, self.nq, self.groups(self.kinds, queries))
        wide = None
        if len(self.wide):
            height = self.full_height
            short = -len(self.wide) % height
            queries = torch.cat([self.wide, self.wide[-1:].expand(short)]).view(-1, height)
            kinds = self.of(queries.flatten(), height)
            wide = Panel(queries, len(self.wide), self.groups(kinds, queries))
        share = self.cells / (self.kinds.shape[0] * self.nq * self.nk)
        return VisibleTiles(everyone, wide, self.order, self.size[1], share)

    def groups(self, kinds: Tensor, queries: Tensor) -> tuple[Group, ...]:
        """Stretches of one count, and with cells to look at or without, together."""
        shown = kinds != EMPTY
        counts = shown.sum(-1)  # (L, T)
        if len(set(counts.flatten().tolist())) > FEW_COUNTS:
            counts = _rounded(counts).clamp(max=shown.shape[2])
        partial = (kinds == PARTIAL).any(-1) | (counts != shown.sum(-1))
        made = []
        for count, masked in sorted(set(zip(counts.flatten().tolist(), partial.flatten().tolist(), strict=True))):
            if count == 0:
                continue
            lead, row = ((counts == count) & (partial == masked)).nonzero().unbind(-1)
            seen = shown[lead, row]  # (U, Tk)
            cols = torch.argsort(seen.int(), dim=-1, descending=True, stable=True)[:, :count]
            cols = torch.where(seen.gather(1, cols), cols, -1)
            heads, size = self.leading[1], self.size[1]
            made.append(Group(lead, row, cols, masked, heads, queries, size, self.order, self.nk, self.see))
        return tuple(made)


def _ordered(n: int, stride: int, device: torch.device) -> Tensor:
    """Positions such that every so manyth stand side by side.

    >>> _ordered(7, 3, torch.device("cpu")).tolist()
    [0, 3, 6, 1, 4, 2, 5]
    """
    return torch.cat([torch.arange(first, n, stride, device=device) for first in range(min(stride, n))])


def _rounded(counts: Tensor) -> Tensor:
    """Counts rounded up by at most an eighth, so that there are few different ones: the fillers are computed too.

    >>> _rounded(torch.tensor([0, 1, 7, 16, 17, 33, 100])).tolist()
    [0, 1, 7, 16, 18, 36, 104]
    """
    step = 2 ** (counts.clamp(min=8).double().log2().floor().long() - 3)  # 8 to 15 → 1, 16 to 31 → 2, …
    return (counts + step - 1) // step * step
