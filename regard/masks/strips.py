"""Runs of visible tiles: stretches of queries one after another, whose keys lie in a tensor as overlapping views.

    keys →    0 1 2 3 4 5
    stretch 1 ■ ■ ■ · · ·      each sees as many keys as the one before it, and so many further on:
    stretch 2 · ■ ■ ■ · ·      one view of the keys with a stride serves them all, and nothing is copied.
    stretch 3 · · ■ ■ ■ ·

Where the keys of a stretch lie apart (a window and a global token) they are gathered, all heads of a token at once.
What is added to the scores is made once for tiles that look alike, and kept with them.

Axis letters: B batch, H heads, N positions, U stretches of a run, R queries of a stretch, n keys that it sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks.rules import IndexRule
from regard.masks.tiles import Group, QueryPanel

__all__ = ["Terms", "TileRun", "gathered", "pieces", "runs"]

MOST_ADDED_CELLS = 1 << 21  # numbers that a group keeps of what is added to its scores: 8 MiB in fp32
MOST_KEPT = 2  # kinds of terms (a bias, a dtype) that a group keeps


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
        """The same in runs of at most so many stretches, but at least one."""
        most = max(1, most)
        for first in range(0, self.count, most):
            units = slice(self.units.start + first, min(self.units.start + first + most, self.units.stop))
            query = None if self.query is None else self.query + first * self.rows
            yield replace(
                self, units=units, query=query, key=None if self.key is None else self.key + first * self.step
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


def gathered(x: Tensor, at: Tensor) -> Tensor:
    """The tokens `at` (U, n) of x (H, N, D), copied: (U, H, n, D).

    >>> gathered(torch.arange(3.0).view(1, 3, 1), torch.tensor([[2, 0]])).flatten().tolist()
    [2.0, 0.0]
    """
    if x.stride(1) > x.stride(0):  # a token's heads lie side by side, as projections leave them: one copy for all
        found = x.transpose(0, 1).index_select(0, at.flatten())  # (U · n, H, D)
        return found.view(*at.shape, *found.shape[1:]).transpose(1, 2)
    found = x.index_select(1, at.flatten())  # (H, U · n, D)
    return found.view(len(x), *at.shape, -1).transpose(0, 1)


def runs(panel: QueryPanel) -> Iterator[TileRun]:
    """A panel's stretches in runs, each as long as it can be. Found once and kept with the groups.

    >>> from regard.masks import window
    >>> from regard.masks.tiles import visible_tiles
    >>> tiles = visible_tiles(window(256, 256), 4096, 4096, torch.device("cpu"))
    >>> [(run.count, run.query, run.key, run.step) for run in runs(tiles.everyone)][-1]
    (28, 256, 0, 128)
    """
    for group in panel.groups:
        if "runs" not in group.kept:
            found: list[TileRun] = []
            for u, stretch in enumerate(_stretches(group, panel)):
                longer = _longer(found[-1], stretch) if found else None
                if longer is None:
                    found.append(TileRun(group, slice(u, u + 1), *stretch))
                else:
                    found[-1] = longer
            group.kept["runs"] = found
        yield from group.kept["runs"]


class _Stretch(NamedTuple):
    """One stretch of queries as numbers."""

    lead: int
    rows: int
    query: int | None
    key: int | None


def _stretches(group: Group, panel: QueryPanel) -> Iterator[_Stretch]:
    rows = group.queries.shape[1]
    height = (panel.count - group.row * rows).clamp(max=rows)  # (U,) without what fills up
    queries = group.queries[group.row]  # (U, R)
    past = torch.arange(1, rows, device=queries.device) >= height.unsqueeze(1)
    together = ((queries.diff(dim=1) == 1) | past).all(1)
    first, last = group.cols[:, 0], group.cols[:, -1]
    inside = (first >= 0) & ((last + 1) * group.size <= group.nk)
    adjoin = inside & (group.cols.diff(dim=1) == 1).all(1) & (group.order is None)
    query = torch.where(together, queries[:, 0], -1)
    key = torch.where(adjoin, first * group.size, -1)
    for each in zip(*(x.tolist() for x in (group.lead, height, query, key)), strict=True):
        yield _Stretch(each[0], each[1], *(None if at < 0 else at for at in each[2:]))


def _longer(run: TileRun, now: _Stretch) -> TileRun | None:
    """The run with one more stretch; None where that makes no run."""
    if (run.lead, run.rows) != now[:2]:
        return None
    longer = replace(run, units=slice(run.units.start, run.units.stop + 1))
    follows = run.query is not None and now.query == run.query + run.count * run.rows
    if run.key is None and now.key is None:  # keys are gathered: then the queries may be too, they are fewer
        return longer if follows else replace(longer, query=None)
    if run.key is None or now.key is None or not follows:
        return None
    step = now.key - run.key if run.count == 1 else run.step
    fits = step >= 0 and now.key == run.key + run.count * step
    return replace(longer, step=step) if fits else None


class Added(NamedTuple):
    """What is added to the scores of a group's stretches, −∞ where a key is hidden: the different tiles there are."""

    cells: Tensor  # (P, R, n)
    which: Tensor  # (U,) which of them each stretch has
    blank: Tensor  # (P,) has it a row that sees nothing?

    def of(self, run: TileRun) -> tuple[Tensor, bool]:
        """(U, 1, R, n) for a run, a view where its stretches look alike, and whether a row sees nothing."""
        chosen = self.which[run.units]
        blank = bool(self.blank[chosen].any())
        if bool((chosen == chosen[0]).all()):
            return self.cells[chosen[:1], None, : run.rows].expand(run.count, -1, -1, -1), blank
        return self.cells[chosen, None, : run.rows], blank


@dataclass(frozen=True)
class Terms:
    """What a call adds to its scores: its bias, and −∞ where the mask hides a key."""

    name: object  # what the term is known by, the bias itself
    rule: IndexRule | None  # the bias as a function of b, h, i and j; None for none
    fixed: bool  # is the rule the same in every call, batch row and head?
    dtype: torch.dtype

    def kept(self, group: Group) -> bool:
        """Does it take no memory of its own: is nothing added to the scores of a group, or is it kept with it?"""
        return (self.rule is None and not group.masked) or self._added(group) is not None

    def of(self, run: TileRun, b: int, heads: Tensor) -> tuple[Tensor | None, bool]:
        """What is added to the scores of a run, (U, H or 1, R, n), None for nothing, and may a row see nothing?"""
        if self.rule is None and not run.group.masked:
            return None, False
        added = self._added(run.group)
        if added is not None:
            return added.of(run)
        i = run.tokens.view(run.count, 1, -1, 1)
        cells = _cells(run.group, run.units, self.rule, self.dtype, (torch.tensor(b), heads.view(1, -1, 1, 1), i))
        return cells.expand(run.count, -1, run.rows, run.group.width), run.group.masked

    def _added(self, group: Group) -> Added | None:
        """The different tiles of a group, made once for each bias and dtype; None if they are too many to keep."""
        if not self.fixed:
            return None
        key = ("added", id(self.name), self.dtype)  # the name is kept too, so that no other gets its id
        if key not in group.kept:
            old = [k for k in group.kept if isinstance(k, tuple)]
            if len(old) >= MOST_KEPT:
                del group.kept[old[0]]
            with torch.inference_mode(False), torch.no_grad():  # a later call may differentiate with what is kept here
                group.kept[key] = (self.name, _added(group, self.rule, self.dtype))
        _, found = group.kept[key]
        assert found is None or isinstance(found, Added)
        return found


def pieces(panel: QueryPanel, terms: Terms, most: int, width: int) -> Iterator[TileRun]:
    """A panel's runs: whole where nothing is copied or made, else as much of them as holds so many numbers.

    most: of the keys and values that are gathered and of what is added to the scores, by head.
    width: numbers of a head in a key, and as many in a value.
    """
    for run in runs(panel):
        held = 2 * width if run.key is None or run.query is None else 0
        held += 0 if terms.kept(run.group) else run.rows
        yield from run.cut(most // (held * run.group.width) if held else run.count)


def _cells(
    group: Group, units: slice, rule: IndexRule | None, dtype: torch.dtype, at: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """What is added, −∞ where hidden: broadcasts to (U, H, R, n). at: b, h and the queries (U, 1, R, 1)."""
    j = group.keys(units)[0][:, None, None]  # (U, 1, 1, n)
    made = torch.zeros((), dtype=dtype, device=j.device) if rule is None else rule(*at, j)
    shown = group.cells(units)[:, None, : at[2].shape[2]] if group.masked else torch.ones_like(j, dtype=torch.bool)
    return torch.where(shown, made, -inf)


def _added(group: Group, rule: IndexRule | None, dtype: torch.dtype) -> Added | None:
    known: dict[bytes, int] = {}
    kept: list[Tensor] = []
    which: list[int] = []
    rows, size = group.queries.shape[1], group.queries.shape[1] * group.width
    zero = torch.zeros((), dtype=torch.long, device=group.cols.device)  # the rule reads neither batch row nor head
    for units in group.cut(MOST_ADDED_CELLS // size):
        i = group.queries[group.row[units]][:, None, :, None]  # (U, 1, R, 1)
        cells = _cells(group, units, rule, dtype, (zero, zero, i)).expand(len(i), 1, rows, group.width)
        for each in cells[:, 0].cpu():
            number = known.setdefault(each.contiguous().numpy().tobytes(), len(known))
            if number == len(kept):
                kept.append(each.clone(memory_format=torch.contiguous_format))
            which.append(number)
            if len(kept) * size > MOST_ADDED_CELLS:
                return None
    together = torch.stack(kept).to(group.cols.device)
    blank = (together.amax(-1) == -inf).any(-1)
    return Added(together, torch.tensor(which, device=group.cols.device), blank)
