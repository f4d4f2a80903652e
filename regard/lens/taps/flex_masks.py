"""A FlexAttention `BlockMask` as one of our masks: its `mask_mod` asked cell by cell, its blocks for the tiles.

It does not know how a call of FlexAttention was caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from regard.masks.cells import per_tile
from regard.masks.mask import Bounds, Grid, Mask
from regard.rules import IndexRule, cell_of, indices

__all__ = ["FlexMask", "flex_mask"]

ASKED = 1 << 20
"""Up to how many cells a mask is asked whole, to know its tiles exactly."""

LISTED = 1 << 12
"""How many cells of a list are asked at once."""


@dataclass(frozen=True, eq=False, repr=False)
class FlexMask(Mask):
    """What `flex_mask()` makes."""

    mod: Callable[..., Any]
    rows: tuple[int, int]  # (B, H) over which the function varies
    partial: Tensor | None  # (B or 1, H or 1, blocks of queries, blocks of keys): the function decides
    full: Tensor | None  # likewise: visible without asking
    block: tuple[int, int]

    def varies(self) -> tuple[int, int]:
        """What was found out when it was made."""
        return self.rows

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j), by blocks where there are any."""
        if self.partial is None or self.full is None:
            return self._ask
        (bq, bk), partial, full = self.block, cell_of(self.partial.to(device)), cell_of(self.full.to(device))

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            return full(b, h, i // bq, j // bk) | (partial(b, h, i // bq, j // bk) & self._ask(b, h, i, j))

        return see

    def _ask(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        """`mask_mod` is written for one cell, so `vmap` gives it one at a time.

        Over a grid axis by axis, as FlexAttention itself does: a table that is looked up one index after the other is
        then cut down with each of them. Other cells come as a list, a part at a time.
        """
        shape = torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)  # type: ignore[no-untyped-call]
        if 0 in shape:
            return torch.zeros(shape, dtype=torch.bool, device=i.device)
        mod = self.mod
        if len(shape) == 4 and all(_runs_along(axis, x) for axis, x in enumerate((b, h, i, j))):
            for axis in (3, 2, 1, 0):
                mod = torch.vmap(mod, in_dims=tuple(0 if n == axis else None for n in range(4)))
            grid: Tensor = mod(*(x.reshape(-1) for x in (b, h, i, j)))
            return grid
        cells: Tensor = torch.vmap(mod, chunk_size=LISTED)(*(x.expand(shape).reshape(-1) for x in (b, h, i, j)))
        return cells.view(shape)

    def bounds(self, grid: Grid) -> Bounds:
        """Exact up to `ASKED` cells; beyond as far as blocks say it, and else: maybe, not for certain."""
        if prod(self.rows) * grid.nq * grid.nk <= ASKED:
            see = self.bind(grid.nq, grid.nk, grid.device, torch.float32)
            cells = see(*indices(*self.rows, grid.i, grid.j, grid.device))  # (B, H, Nq, Nk)
            return per_tile(cells, grid.size, "any"), per_tile(cells, grid.size, "all")
        (i0, i1), (j0, j1) = grid.rows(grid.i), grid.cols(grid.j)
        if self.partial is None or self.full is None:
            some = (i0 >= 0) & (j0 >= 0)
            return some, ~some
        bq, bk = self.block
        r0, r1, c0, c1 = i0 // bq, i1 // bq, j0 // bk, j1 // bk

        def count(table: Tensor) -> Any:
            """How many blocks that a tile touches are in a table."""
            sums = pad(table.to(grid.device).long(), (1, 0, 1, 0)).cumsum(-1).cumsum(-2)
            b, h, _, _ = indices(table.shape[0], table.shape[1], grid.i, grid.j, grid.device)
            at = cell_of(sums)
            return at(b, h, r1 + 1, c1 + 1) - at(b, h, r0, c1 + 1) - at(b, h, r1 + 1, c0) + at(b, h, r0, c0)

        return count(self.partial | self.full) > 0, count(self.full) == (r1 - r0 + 1) * (c1 - c0 + 1)

    def __repr__(self) -> str:
        return f"flex_mask({getattr(self.mod, '__name__', type(self.mod).__name__)})"


def flex_mask(blocks: BlockMask | None, batch: int, heads: int, *, compiled: bool) -> Mask | None:
    """The mask that FlexAttention applies, or None where it applies none.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> theirs = create_block_mask(lambda b, h, i, j: j <= i, None, None, 3, 3, device="cpu")
    >>> ours = flex_mask(theirs, batch=2, heads=5, compiled=True)
    >>> print(ours.draw(3))
    ■ · ·
    ■ ■ ·
    ■ ■ ■
    >>> ours.leading
    (1, 1)

    blocks: what the call was given as block_mask.  batch, heads: of the call.
    compiled: the compiled kernel skips blocks and trusts full ones; the other asks `mask_mod` for every cell.
    """
    if blocks is None:
        return None
    device = blocks.kv_indices.device
    own = [n if _depends_on(blocks.mask_mod, axis, device) else 1 for axis, n in ((0, batch), (1, heads))]
    if not compiled:
        return FlexMask(blocks.mask_mod, (own[0], own[1]), None, None, blocks.BLOCK_SIZE)
    partial = _table(blocks.kv_num_blocks, blocks.kv_indices)
    if blocks.full_kv_num_blocks is None or blocks.full_kv_indices is None:
        full = torch.zeros_like(partial)
    else:
        full = _table(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    rows = (max(own[0], partial.shape[0]), max(own[1], partial.shape[1]))
    return FlexMask(blocks.mask_mod, rows, partial, full, blocks.BLOCK_SIZE)


def _runs_along(axis: int, x: Tensor) -> bool:
    """Does an index of a grid (B, H, Nq, Nk) vary along its own axis at most?"""
    return all(n == 1 or at == axis for at, n in enumerate(x.shape, 4 - x.ndim))


def _table(counts: Tensor, columns: Tensor) -> Tensor:
    """How many of each row's columns are meant (B, H, R), and which (B, H, R, C) → booleans (B, H, R, C)."""
    order = torch.arange(columns.shape[-1], device=columns.device)
    listed = order < counts.unsqueeze(-1)
    return torch.zeros_like(listed).scatter(-1, columns.long(), listed)


class _Untouchable:
    """Raises in whatever is done with it: also in a comparison, where Python would fall back on identity."""

    def _refuse(self, *_: object) -> Any:
        raise TypeError("touched")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse


def _depends_on(mod: Callable[..., Any], axis: int, device: torch.device) -> bool:
    """Does a mask_mod touch this argument (0: batch row, 1: head)? If it fails for another reason: perhaps it does."""
    given: list[Any] = [torch.tensor(0, device=device)] * 4
    given[axis] = _Untouchable()
    try:
        mod(*given)
    except Exception:
        return True
    return False
