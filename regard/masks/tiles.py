"""The visible tiles of a mask, listed for the sparse backends.

A mask is read in stretches: R queries, and the stretches of keys that some of them see. `visible_tiles` lists them in
groups that see equally many keys (`Group`), and `pieces` joins neighbours into runs (`TileRun`):

    keys →    0 1 2 3 4 5
    stretch 1 ■ ■ ■ · · ·      each sees as many keys as the one before it, at a constant step:
    stretch 2 · ■ ■ ■ · ·      one strided view of the keys serves all of them, and nothing is copied.
    stretch 3 · · ■ ■ ■ ·

Where the keys of a stretch lie apart (a window and a global token) they are gathered, all heads of a token at once.
The terms added to the scores are computed once for tiles that are alike, and kept with their group (`Terms`).
`TileLists` are the lists that the GPU kernels read.

Axis letters: B batch, H heads, N positions, U stretches, R queries of a stretch, n keys that it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.masks.mask import EMPTY, FULL, PARTIAL, IndexRule, Mask, Rule, TileGrid, keep

ROWS = (64, 128, 256)  # queries in a tile: the one that costs least is taken
COLS = 32  # keys in a tile: a global key or a window's ragged edge costs as many
MOST_TILES = 1 << 22  # in the table of one batch row and head; longer calls get larger tiles
MOST_LOOKED_AT = 1 << 25  # of single queries against tiles of keys, in search of global tokens
OVERHEAD = 20  # a tile of r queries costs as if it had so many more: measured, windows of 512, tiles of 64 to 256
MOST_PATTERN_CELLS = 1 << 23  # bytes that a mask keeps for the cells of one group
CELLS_AT_ONCE = 1 << 20  # of a mask, evaluated together
FEW_COUNTS = 8  # different numbers of visible tiles per stretch, up to which nothing is filled up
TILES_AT_ONCE = 1024  # mixed tiles whose cells are computed together: 8 Mi cells of 64 × 128
MOST_ADDED_CELLS = 1 << 21  # numbers that a group keeps of the terms added to its scores: 8 MiB in fp32
MOST_KEPT = 2  # kinds of terms (a bias, a dtype) that a group keeps


# -------------------------------------------------------------------------------------------------------- visible tiles


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
            units = self.cut(CELLS_AT_ONCE // max(1, self.queries.shape[1] * self.width))
            return _distinct((self.evaluate(part) for part in units), MOST_PATTERN_CELLS, self.cols.device)

    def cut(self, units: int) -> Iterator[slice]:
        """The stretches, `units` at a time, but at least one."""
        step = max(1, units)
        return (slice(u, u + step) for u in range(0, len(self.row), step))


def _distinct(parts: Iterable[Tensor], most: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The different tiles among (U, R, n) parts, (P, R, n), and which each is, (U,); None beyond `most` numbers."""
    known: dict[bytes, int] = {}
    kept: list[Tensor] = []
    which: list[int] = []
    for part in parts:
        for tile in part.cpu():
            number = known.setdefault(tile.contiguous().numpy().tobytes(), len(known))
            if number == len(kept):
                kept.append(tile.clone(memory_format=torch.contiguous_format))
            which.append(number)
            if len(kept) * tile.numel() > most:
                return None
    return torch.stack(kept).to(device), torch.tensor(which, device=device)


@dataclass(frozen=True, eq=False)
class QueryPanel:
    """Queries in stretches, and the groups of stretches."""

    queries: Tensor  # (T, R) index of the query in each place; the last stretch is filled up with its last query
    count: int  # queries without the fillers
    groups: tuple[Group, ...]

    @property
    def chosen(self) -> Tensor:
        """The queries in order, without the fillers: (count,)."""
        return self.queries.flatten()[: self.count]


@dataclass(frozen=True, eq=False)
class VisibleTiles:
    """What a mask shows: all queries in stretches, and apart from them those that see nearly everything."""

    everyone: QueryPanel  # all queries; its results for the wide ones are not used
    wide: QueryPanel | None  # those that see nearly everything
    order: Tensor | None  # (Nk,) of the keys; None where keys and queries stand in their own order
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
    """The visible tiles of a mask, in the size that costs least; computed once for each mask and size of call.

    >>> from regard.masks import globals, window
    >>> found = visible_tiles(window(256, 256) | globals([0]), 4096, 4096, torch.device("cpu"))
    >>> found.rows, found.cols, found.wide.count, round(found.share, 3)
    (128, 32, 1, 0.158)

    mask: None where everything is visible.  nq, nk: at least 1.  Raises ValueError if the mask does not fit.
    """

    def make() -> VisibleTiles:
        if mask is not None:
            mask.fit(*mask.leading, nq, nk)
        times = 1
        while -(-nq // (ROWS[0] * times)) * -(-nk // (COLS * times)) > MOST_TILES:
            times *= 2
        heights, cols = sorted({min(rows * times, nq) for rows in ROWS}), min(COLS * times, nk)
        strides = sorted({1, 1 if mask is None else min(mask.stride(), nk)})
        tables = [_Table(mask, nq, nk, (rows, cols), stride, device) for rows in heights for stride in strides]
        # Comparable between sizes: small tiles compute fewer cells, each at a higher price.
        return min(tables, key=lambda table: table.cells * (1 + OVERHEAD / table.size[0])).listed()

    return make() if mask is None else keep(mask, ("tiles", nq, nk, device), make)


class _Table:
    """Empty, partial or full for each tile of one size, and how many cells the visible ones have."""

    def __init__(
        self, mask: Mask | None, nq: int, nk: int, size: tuple[int, int], stride: int, device: torch.device
    ) -> None:
        self.mask, self.nq, self.nk, self.size, self.device = mask, nq, nk, size, device
        self.queries = _ordered(nq, stride, device)
        self.order = None if stride == 1 else _ordered(nk, stride, device)
        self.leading = (1, 1) if mask is None else mask.leading
        self.see = None if mask is None else mask.bind(nq, nk, device, torch.float32)
        self.kinds = self.kinds_of(self.queries, size[0])
        self.wide = self.wide_queries()
        if len(self.wide):
            # For bounds without them, each wide query is replaced by a neighbour in its tile that is not wide.
            is_wide = torch.zeros(nq, dtype=torch.bool, device=device).index_fill(0, self.wide, True)
            first = (~is_wide[self.stretches]).int().argmax(-1)  # the usual ones of a tile are not wide
            other = self.stretches.gather(1, first.unsqueeze(-1)).expand_as(self.stretches).flatten()[:nq]
            self.kinds = self.kinds_of(torch.where(is_wide[self.queries], other, self.queries), size[0])
        # Cells that are computed, over the mask's batch rows and heads.
        self.cells = int((self.kinds != EMPTY).sum()) * size[0] * size[1] + len(self.wide) * nk * self.kinds.shape[0]

    @cached_property
    def stretches(self) -> Tensor:
        return self.stretches_of(torch.arange(-(-self.nq // self.size[0]), device=self.device))

    def stretches_of(self, tiles: Tensor) -> Tensor:
        """The queries of some rows of tiles: (T, rows)."""
        queries = tiles.unsqueeze(-1) * self.size[0] + torch.arange(self.size[0], device=self.device)
        return self.queries[queries.clamp(max=self.nq - 1)]

    def kinds_of(self, queries: Tensor, rows: int) -> Tensor:
        """What each tile of these queries shows: (L, T, Tk), L over the mask's batch rows and heads."""
        down, across = -(-len(queries) // rows), -(-self.nk // self.size[1])
        if self.mask is None:
            kinds = torch.full((1, down, across), FULL, dtype=torch.int8, device=self.device)
        else:
            grid = TileGrid(self.nq, self.nk, (rows, self.size[1]), self.device, queries, self.order)
            kinds = self.mask.kinds(grid).reshape(-1, down, across)
        if self.nk % self.size[1]:  # the last tile is filled up with keys that no query sees
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
            part = self.stretches_of(tiles[start : start + step])
            seen = (self.kinds_of(part.flatten(), 1) != EMPTY).sum(-1).amax(0).view(part.shape)  # (T', rows)
            is_wide[part[(seen * 2 > across) & (seen > 2 * seen.median(-1, keepdim=True).values)]] = True
        return is_wide.nonzero().flatten()

    def listed(self) -> VisibleTiles:
        everyone = QueryPanel(self.stretches, self.nq, self.groups(self.kinds, self.stretches))
        wide = None
        if len(self.wide):
            height = min(self.size[0], len(self.wide))
            short = -len(self.wide) % height
            queries = torch.cat([self.wide, self.wide[-1:].expand(short)]).view(-1, height)
            kinds = self.kinds_of(queries.flatten(), height)
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
        groups = []
        for count, masked in sorted(set(zip(counts.flatten().tolist(), partial.flatten().tolist(), strict=True))):
            if count == 0:
                continue
            lead, row = ((counts == count) & (partial == masked)).nonzero().unbind(-1)
            seen = shown[lead, row]  # (U, Tk)
            cols = torch.argsort(seen.int(), dim=-1, descending=True, stable=True)[:, :count]
            cols = torch.where(seen.gather(1, cols), cols, -1)
            heads, size = self.leading[1], self.size[1]
            groups.append(Group(lead, row, cols, masked, heads, queries, size, self.order, self.nk, self.see))
        return tuple(groups)


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


# ---------------------------------------------------------------------------------------------------- runs of stretches


@dataclass(frozen=True)
class TileRun:
    """Stretches of one group, one after another."""

    group: Group
    units: slice  # of the group's stretches
    lead: int  # which batch row of the mask
    rows: int  # R, queries of each: the last stretch of all may have fewer than the others
    query: int | None  # the first one, where all follow on it; None where they stand apart
    key: int | None  # the first one of the first stretch, where a stretch's keys follow one on another
    step: int = 0  # keys from one stretch's first to the next one's

    @property
    def count(self) -> int:
        """U."""
        return len(range(self.units.start, self.units.stop))

    @property
    def tokens(self) -> Tensor:
        """The queries: (U · R,)."""
        return self.group.queries[self.group.row[self.units], : self.rows].flatten()

    def cut(self, most: int) -> Iterator[TileRun]:
        """The same in runs of at most `most` stretches, but at least one."""
        most = max(1, most)
        for first in range(0, self.count, most):
            yield replace(
                self,
                units=slice(self.units.start + first, min(self.units.start + first + most, self.units.stop)),
                query=None if self.query is None else self.query + first * self.rows,
                key=None if self.key is None else self.key + first * self.step,
            )

    def queries(self, x: Tensor) -> Tensor:
        """x (H, N, D) → (U, H, R, D), a view where the queries follow one on another."""
        if self.query is None:
            return gathered(x, self.tokens.view(self.count, self.rows))
        part = x[:, self.query : self.query + self.count * self.rows]  # (H, U · R, D)
        return part.view(len(x), self.count, self.rows, -1).transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """x (H, N, D) → (U, H, n, D), an overlapping view where a stretch's keys follow one on another."""
        width = self.group.width
        if self.key is None:
            return gathered(x, self.group.keys(self.units)[0])
        part = x[:, self.key : self.key + (self.count - 1) * self.step + width]
        if self.step == 0 or self.count == 1:
            return part.expand(self.count, -1, -1, -1)
        return part.unfold(1, width, self.step).permute(1, 0, 3, 2)

    def put(self, total: Tensor, part: Tensor) -> None:
        """Write part (U, H, R, D) where its queries stand in total (N, H, D)."""
        part = part.transpose(1, 2)  # (U, R, H, D)
        if self.query is None:
            total.index_copy_(0, self.tokens, part.flatten(0, 1))
        else:
            total[self.query : self.query + self.count * self.rows].view(part.shape).copy_(part)

    def longer(self, lead: int, rows: int, query: int | None, key: int | None) -> TileRun | None:
        """The run with one more stretch; None where that makes no run."""
        if (self.lead, self.rows) != (lead, rows):
            return None
        run = replace(self, units=slice(self.units.start, self.units.stop + 1))
        follows = self.query is not None and query == self.query + self.count * self.rows
        if self.key is None and key is None:  # keys are gathered: then the queries may be too, they are fewer
            return run if follows else replace(run, query=None)
        if self.key is None or key is None or not follows:
            return None
        step = key - self.key if self.count == 1 else self.step
        fits = step >= 0 and key == self.key + self.count * step
        return replace(run, step=step) if fits else None


def gathered(x: Tensor, at: Tensor) -> Tensor:
    """The tokens `at` (U, n) of x (H, N, D), copied: (U, H, n, D).

    >>> gathered(torch.arange(3.0).view(1, 3, 1), torch.tensor([[2, 0]])).flatten().tolist()
    [2.0, 0.0]
    """
    if x.stride(1) > x.stride(0):  # a token's heads lie side by side, as projections leave them: one copy for all
        tokens = x.transpose(0, 1).index_select(0, at.flatten())  # (U · n, H, D)
        return tokens.view(*at.shape, *tokens.shape[1:]).transpose(1, 2)
    tokens = x.index_select(1, at.flatten())  # (H, U · n, D)
    return tokens.view(len(x), *at.shape, -1).transpose(0, 1)


def runs(panel: QueryPanel) -> Iterator[TileRun]:
    """A panel's stretches in runs, each as long as it can be. Computed once and kept with the groups.

    >>> from regard.masks import window
    >>> tiles = visible_tiles(window(256, 256), 4096, 4096, torch.device("cpu"))
    >>> [(run.count, run.query, run.key, run.step) for run in runs(tiles.everyone)][-1]
    (28, 256, 0, 128)
    """
    for group in panel.groups:
        if "runs" not in group.kept:
            group.kept["runs"] = _runs(group, panel.count)
        yield from group.kept["runs"]


def _runs(group: Group, count: int) -> list[TileRun]:
    rows = group.queries.shape[1]
    height = (count - group.row * rows).clamp(max=rows)  # (U,) without the fillers
    queries = group.queries[group.row]  # (U, R)
    past = torch.arange(1, rows, device=queries.device) >= height.unsqueeze(1)
    together = ((queries.diff(dim=1) == 1) | past).all(1)
    first, last = group.cols[:, 0], group.cols[:, -1]
    inside = (first >= 0) & ((last + 1) * group.size <= group.nk)
    adjoin = inside & (group.cols.diff(dim=1) == 1).all(1) & (group.order is None)
    query = torch.where(together, queries[:, 0], -1)
    key = torch.where(adjoin, first * group.size, -1)
    runs: list[TileRun] = []
    for u, numbers in enumerate(zip(*(x.tolist() for x in (group.lead, height, query, key)), strict=True)):
        stretch = (*numbers[:2], *(None if at < 0 else at for at in numbers[2:]))
        longer = runs[-1].longer(*stretch) if runs else None
        if longer is None:
            runs.append(TileRun(group, slice(u, u + 1), *stretch))
        else:
            runs[-1] = longer
    return runs


class Added(NamedTuple):
    """The terms added to the scores of a group's stretches, −∞ where a key is hidden: the different tiles there are."""

    cells: Tensor  # (P, R, n)
    which: Tensor  # (U,) which of them each stretch has
    blank: Tensor  # (P,) has it a row that sees nothing?


@dataclass(frozen=True)
class Terms:
    """What a call adds to its scores: its bias, and −∞ where the mask hides a key."""

    name: object  # what the term is known by, the bias itself
    rule: IndexRule | None  # the bias as a function of b, h, i and j; None for none
    fixed: bool  # is the rule the same in every call, batch row and head?
    dtype: torch.dtype

    def kept(self, group: Group) -> bool:
        """Whether it takes no memory of its own: nothing is added to the scores of a group, or it is kept with it."""
        return (self.rule is None and not group.masked) or self._added(group) is not None

    def of(self, run: TileRun, b: int, heads: Tensor) -> tuple[Tensor | None, bool]:
        """The term of a run, (U, H or 1, R, n), None for nothing, and whether a row may see nothing."""
        if self.rule is None and not run.group.masked:
            return None, False
        added = self._added(run.group)
        if added is not None:
            chosen = added.which[run.units]
            blank = bool(added.blank[chosen].any())
            if bool((chosen == chosen[0]).all()):  # a view
                return added.cells[chosen[:1], None, : run.rows].expand(run.count, -1, -1, -1), blank
            return added.cells[chosen, None, : run.rows], blank
        i = run.tokens.view(run.count, 1, -1, 1)
        cells = self._cells(run.group, run.units, torch.tensor(b), heads.view(1, -1, 1, 1), i)
        return cells.expand(run.count, -1, run.rows, run.group.width), run.group.masked

    def _cells(self, group: Group, units: slice, b: Tensor, h: Tensor, i: Tensor) -> Tensor:
        """The term, −∞ where hidden, for queries i (U, 1, R, 1): broadcasts to (U, H, R, n)."""
        j = group.keys(units)[0][:, None, None]  # (U, 1, 1, n)
        term = torch.zeros((), dtype=self.dtype, device=j.device) if self.rule is None else self.rule(b, h, i, j)
        shown = group.cells(units)[:, None, : i.shape[2]] if group.masked else torch.ones_like(j, dtype=torch.bool)
        return torch.where(shown, term, -inf)

    def _added(self, group: Group) -> Added | None:
        """The different tiles of a group, computed once for each bias and dtype; None if they are too many to keep."""
        if not self.fixed:
            return None
        key = ("added", id(self.name), self.dtype)  # the name is kept too, so that no other gets its id
        if key not in group.kept:
            old = [k for k in group.kept if isinstance(k, tuple)]
            if len(old) >= MOST_KEPT:
                del group.kept[old[0]]
            with torch.inference_mode(False), torch.no_grad():  # a later call may differentiate with what is kept here
                group.kept[key] = (self.name, self._different(group))
        _, added = group.kept[key]
        assert added is None or isinstance(added, Added)
        return added

    def _different(self, group: Group) -> Added | None:
        rows, width, device = group.queries.shape[1], group.width, group.cols.device
        zero = torch.zeros((), dtype=torch.long, device=device)  # the rule reads neither batch row nor head

        def parts() -> Iterator[Tensor]:
            for units in group.cut(MOST_ADDED_CELLS // (rows * width)):
                i = group.queries[group.row[units]][:, None, :, None]  # (U, 1, R, 1)
                yield self._cells(group, units, zero, zero, i).expand(len(i), 1, rows, width)[:, 0]

        distinct = _distinct(parts(), MOST_ADDED_CELLS, device)
        return None if distinct is None else Added(*distinct, (distinct[0].amax(-1) == -inf).any(-1))


def pieces(panel: QueryPanel, terms: Terms, most: int, width: int) -> Iterator[TileRun]:
    """A panel's runs: whole where nothing is copied or computed, else cut so that each holds at most `most` numbers.

    most: of the keys and values that are gathered and of the terms added to the scores, by head.
    width: numbers of a head in a key, and as many in a value.
    """
    for run in runs(panel):
        held = 2 * width if run.key is None or run.query is None else 0
        held += 0 if terms.kept(run.group) else run.rows
        yield from run.cut(most // (held * run.group.width) if held else run.count)


# --------------------------------------------------------------------------------------------------- lists for kernels


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

    leading: (B, H) over which there are separate lists, to which the mask's broadcasts; default the mask's.

    `cells` is what the mixed tiles show, (n, rows, columns) of 0 and 1, at least one; one 0 where the mask is a `band`.
    The mask itself is not stored: it holds the lists, and a reference cycle would keep both until garbage collection.
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
        """The batch row, head, row and column of each tile, (n,) each; 0 for an axis that `rule` does not vary over."""
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
        """(L, Tk): the columns of tiles, those with most visible tiles first."""
        return self._order(by_columns=True)

    @cached_property  # read in every call
    def share(self) -> float:
        """The share of visible tiles."""
        return (len(self.full.index) + len(self.mixed.index)) / self._kinds.numel()

    @property
    def steps(self) -> tuple[int, int]:
        """The stride in rows of L from one batch row to the next, and from one head to the next."""
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


def pool(values: Tensor, bins: int) -> Tensor:
    """Means of neighbours: (…, N) → (…, min(N, bins)) in fp32. Bin i of m covers ⌊i·N/m⌋ up to ⌊(i + 1)·N/m⌋.

    −∞ (the lse of a row that sees nothing) does not count in its bin's mean; a bin of nothing else is −∞. NaN and +∞
    show in their own bin only.

    >>> pool(torch.tensor([1.0, 3.0, -torch.inf, 5.0, -torch.inf, -torch.inf]), 3)
    tensor([2., 5., -inf])
    """
    n, device = values.shape[-1], values.device
    if n <= bins:
        return values.float()
    values = values if values.is_floating_point() else values.double()
    edges = torch.arange(bins + 1, device=device) * n // bins
    at = edges[:-1, None] + torch.arange(-(-n // bins), device=device)  # (bins, widest bin)
    cells = values.reshape(*values.shape[:-1], bins, n // bins) if n % bins == 0 else values[..., at.clamp(max=n - 1)]
    counted = at < edges[1:, None]
    if values.numel() > 0 and not bool(values.amin() > -inf):  # most have no −∞
        counted = counted & (cells != -inf)
    total = torch.where(counted, cells, 0.0).sum(-1, dtype=torch.float64)  # sums of fp32 cannot overflow there
    means = total / counted.sum(-1)  # 0 / 0 is NaN, replaced below
    return torch.where(counted.any(-1), means, -inf).float()
