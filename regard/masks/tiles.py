"""The visible tiles of a mask, listed for backends and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.masks.mask import EMPTY, FULL, PARTIAL, Mask, TileGrid
from regard.masks.rules import IndexRule, Rule, keep

ROWS = (64, 128, 256)  # queries in a tile: the one that costs least is taken
COLS = 32  # keys in a tile: a global key or a window's ragged edge costs as many
MOST_TILES = 1 << 22  # in the table of one batch row and head; longer calls get larger tiles
MOST_LOOKED_AT = 1 << 25  # of single queries against tiles of keys, in search of global tokens
OVERHEAD = 20  # a tile of r queries costs as if it had so many more: measured, windows of 512, tiles of 64 to 256
MOST_PATTERN_CELLS = 1 << 23  # bytes that a mask keeps for the cells of one group
CELLS_AT_ONCE = 1 << 20  # of a mask, evaluated together
FEW_COUNTS = 8  # of tiles that stretches see: up to so many groups nothing is filled up
TILES_AT_ONCE = 1024  # mixed tiles whose cells are computed together: 8 Mi cells of 64 × 128


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
        """What callers keep with the group."""
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
class QueryPanel:
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

    everyone: QueryPanel
    wide: QueryPanel | None
    order: Tensor | None
    cols: int  # keys in a stretch
    share: float  # cells that are computed, of all Nq · Nk

    @property
    def panels(self) -> tuple[QueryPanel, ...]:
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
    times = 1
    while -(-nq // (ROWS[0] * times)) * -(-nk // (COLS * times)) > MOST_TILES:
        times *= 2
    heights, cols = sorted({min(rows * times, nq) for rows in ROWS}), min(COLS * times, nk)
    strides = sorted({1, 1 if mask is None else min(mask.stride(), nk)})
    tables = [_Table(mask, nq, nk, (rows, cols), stride, device) for rows in heights for stride in strides]
    return min(tables, key=lambda table: table.cost).listed()


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
            grid = TileGrid(self.nq, self.nk, (rows, self.size[1]), self.device, queries, self.order)
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
        everyone = QueryPanel(queries, self.nq, self.groups(self.kinds, queries))
        wide = None
        if len(self.wide):
            height = self.full_height
            short = -len(self.wide) % height
            queries = torch.cat([self.wide, self.wide[-1:].expand(short)]).view(-1, height)
            kinds = self.of(queries.flatten(), height)
            wide = QueryPanel(queries, len(self.wide), self.groups(kinds, queries))
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
    """The positions 0 to n − 1, those `stride` apart side by side.

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


@dataclass(frozen=True, eq=False)
class Tiles:
    """Some of the tiles, row after row of each batch row and head: `index[begin[r] : begin[r + 1]]` are row r's."""

    begin: Tensor  # (L · T + 1,) int32
    index: Tensor  # (n,) int32, a tile's column, or its row where the lists are by columns
    place: Tensor  # (n,) which of all tiles of the table, by rows, it is


class TileLists:
    """The lists of one mask for one size of call and tile.

    >>> from regard.masks import window
    >>> lists = TileLists(window(2, 2), 8, 8, (2, 2), torch.device("cpu"))
    >>> lists.mixed.begin.tolist(), lists.mixed.index.tolist(), lists.full.index.tolist()
    ([0, 1, 3, 5, 6], [1, 0, 2, 1, 3, 2], [0, 1, 2, 3])

    leading: (B, H) over which there are lists of their own, to which the mask's broadcasts; default the mask's.

    `cells` is what the mixed tiles show, (n, rows, columns) of 0 and 1, at least one; one 0 where the mask is a `band`.
    The mask itself is not held: it holds the lists, and a circle would outlive the call until somebody collects it.
    """

    def __init__(
        self,
        mask: Mask,
        nq: int,
        nk: int,
        size: tuple[int, int],
        device: torch.device,
        leading: tuple[int, int] | None = None,
    ) -> None:
        self.leading = mask.leading if leading is None else leading
        self.band = mask.band(nq, nk)
        kinds = mask.tiles(nq, nk, size, device)
        self._kinds = kinds.expand(*self.leading, *kinds.shape[2:])  # (B', H', Tq, Tk)
        self.full, self.mixed = self._listed(FULL, by_columns=False), self._listed(PARTIAL, by_columns=False)
        self.order = self._order(by_columns=False)
        if self.band is None:
            self.cells = mixed_cells(mask, torch.stack(self.where(self.mixed, mask), 1), size, nq, nk)
        else:
            self.cells = torch.zeros(1, dtype=torch.uint8, device=device)

    def where(self, tiles: Tiles, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The batch row, head, row and column of each of these tiles, (n,) each; 0 for a batch row or head that `rule`
        is the same for.
        """
        (_, heads), (down, across) = self.leading, self._kinds.shape[2:]
        lead, place = tiles.place // (down * across), tiles.place
        b, h = (at if n > 1 else at * 0 for at, n in zip((lead // heads, lead % heads), rule.leading, strict=True))
        return b, h, place // across % down, place % across

    @cached_property
    def full_by_columns(self) -> Tiles:
        """The tiles that hide nothing, column after column."""
        return self._listed(FULL, by_columns=True)

    @cached_property
    def mixed_by_columns(self) -> Tiles:
        """The mixed ones likewise."""
        return self._listed(PARTIAL, by_columns=True)

    @cached_property
    def numbers_by_columns(self) -> Tensor:
        """Which of the stored tiles each of `mixed_by_columns` is."""
        return torch.searchsorted(self.mixed.place, self.mixed_by_columns.place).to(torch.int32)

    @cached_property
    def order_by_columns(self) -> Tensor:
        """(L, Tk): the columns of tiles, those that most see first."""
        return self._order(by_columns=True)

    @cached_property  # asked for in every call
    def share(self) -> float:
        """How many of all tiles are visible."""
        return (len(self.full.index) + len(self.mixed.index)) / self._kinds.numel()

    @property
    def steps(self) -> tuple[int, int]:
        """From the lists of one batch row to those of the next, and of one head, in rows of L."""
        batch, heads = self.leading
        return (heads if batch > 1 else 0), (1 if heads > 1 else 0)

    def _listed(self, kind: int, *, by_columns: bool) -> Tiles:
        chosen = self._kinds == kind
        chosen = (chosen.mT if by_columns else chosen).flatten(0, 2)  # (L · T, T')
        begin = pad(chosen.sum(-1).cumsum(0), (1, 0)).to(torch.int32)
        row, other = chosen.nonzero().unbind(-1)
        place = row * chosen.shape[1] + other
        if by_columns:
            across, down = self._kinds.shape[3], self._kinds.shape[2]
            place = ((row // across) * down + other) * across + row % across
        return Tiles(begin, other.to(torch.int32), place)

    def _order(self, *, by_columns: bool) -> Tensor:
        counts = (self._kinds != 0).sum(-2 if by_columns else -1).flatten(0, 1)  # (L, T)
        return counts.argsort(dim=-1, descending=True, stable=True).to(torch.int32).contiguous()


def mixed_cells(mask: Mask, at: Tensor, size: tuple[int, int], nq: int, nk: int) -> Tensor:
    """The cells of some tiles, (n, rows, columns) of 0 and 1, at least one; 0 beyond the last query or key.

    >>> from regard.masks import causal
    >>> mixed_cells(causal(), torch.tensor([[0, 0, 1, 1]]), (2, 2), 3, 3).tolist()
    [[[1, 0], [0, 0]]]

    at: (n, 4), each tile's batch row, head, row and column.
    """
    device = at.device
    see = mask.bind(nq, nk, device, torch.float32)
    cells = torch.zeros(max(1, len(at)), *size, dtype=torch.uint8, device=device)
    rows, cols = torch.arange(size[0], device=device).view(-1, 1), torch.arange(size[1], device=device)
    for part in range(0, len(at), TILES_AT_ONCE):
        b, h, r, c = (x.view(-1, 1, 1) for x in at[part : part + TILES_AT_ONCE].T)
        i, j = r * size[0] + rows, c * size[1] + cols
        inside = (i < nq) & (j < nk)
        cells[part : part + TILES_AT_ONCE] = see(b, h, i.clamp(max=nq - 1), j.clamp(max=nk - 1)) & inside
    return cells


def cell_edges(n: int, size: int) -> list[int]:
    """Edges of min(size, n) cells over n positions, as even as integers allow.

    >>> cell_edges(7, 3), cell_edges(2, 64)
    ([0, 2, 4, 7], [0, 1, 2])
    """
    cells = min(size, n)
    return [c * n // cells for c in range(cells + 1)] if cells else [0]
