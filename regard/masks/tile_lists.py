"""The visible tiles of a mask as lists that a kernel walks: by rows of tiles, and by columns for gradients.

    keys →  0 1 2 3          tiles that hide nothing (■) and mixed ones (▒) have a list each, one row after the other:
    queries ■ ▒ · ·          full   0 | 0 1 | 1 2 | 2      mixed   1 | 2 | 3 | 3
            ■ ■ ▒ ·
            · ■ ■ ▒          The cells of mixed tiles are stored in the order of their list. A mask of one band has none
            · · ■ ▒          stored: three numbers say which cells of a tile it shows.

Memory is that of the visible tiles, beside a table with a number per tile while they are listed; never N×N. It does not
know scores, values or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.masks.mask import FULL, PARTIAL, Mask
from regard.rules import Rule

__all__ = ["TileLists", "Tiles", "mixed_cells"]

TILES_AT_ONCE = 1024  # mixed tiles whose cells are computed together: 8 Mi cells of 64 × 128


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
