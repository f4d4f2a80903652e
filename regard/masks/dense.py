"""Masks from a value per cell or per block of cells: blocks, random_blocks, dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from regard.checks import check_int
from regard.masks.mask import Bounds, Mask, TileGrid
from regard.masks.positional import OffsetMask, call_text
from regard.masks.rules import (
    IndexRule,
    cell_of,
    fit_cells,
    leading_of,
    numbers,
    place,
    read_offset,
    size_or_one,
)
from regard.masks.token_masks import booleans

__all__ = ["DenseMask", "as_mask", "blocks", "dense", "random_blocks"]


@dataclass(frozen=True, eq=False, repr=False)
class _Blocks(OffsetMask):
    layout: Tensor  # (B or 1, H or 1, R, C)
    size: int

    def varies(self) -> tuple[int, int]:
        batch, heads = leading_of(self.offset)
        return (
            size_or_one("batch", [self.layout.shape[0], batch]),
            size_or_one("heads", [self.layout.shape[1], heads]),
        )

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        last = nk - nq if self.offset is None else int(torch.as_tensor(self.offset).max())
        for name, blocks_, n in (("query", self.layout.shape[2], nq + last), ("key", self.layout.shape[3], nk)):
            if n > blocks_ * self.size:
                raise ValueError(
                    f"the layout has {blocks_} {name} blocks of {self.size} = {blocks_ * self.size} positions, "
                    f"but the call has {n}"
                )

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, layout, size = place(self.offset, nq, nk, device), cell_of(self.layout.to(device)), self.size
        if self.on_keys(nq, nk):
            return lambda b, h, i, j: layout(b, h, (i + offset(b, h)) // size, j // size)

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            position = i + offset(b, h)
            return layout(b, h, position.clamp(min=0) // size, j // size) & (position >= 0)

        return see

    def bounds(self, grid: TileGrid) -> Bounds:
        (p0, p1), (j0, j1) = grid.rows(grid.positions(self.offset)), grid.cols(grid.j)
        r0, r1 = p0.clamp(min=0) // self.size, p1.clamp(min=0) // self.size
        c0, c1 = j0 // self.size, j1 // self.size
        counts = torch.nn.functional.pad(self.layout.to(grid.device).long(), (1, 0, 1, 0)).cumsum(-1).cumsum(-2)
        b, h = (torch.arange(n, device=grid.device) for n in counts.shape[:2])
        b, h, count = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), cell_of(counts)
        seen = count(b, h, r1 + 1, c1 + 1) - count(b, h, r0, c1 + 1) - count(b, h, r1 + 1, c0) + count(b, h, r0, c0)
        return (seen > 0) & (p1 >= 0), (seen == (r1 - r0 + 1) * (c1 - c0 + 1)) & (p0 >= 0)

    def __repr__(self) -> str:
        return call_text("blocks", booleans(self.layout), f"size={self.size}", self._offset_text())


def blocks(layout: object, size: int, *, offset: object = None) -> Mask:
    """Any block layout: block (r, c) of `size` × `size` positions is visible where layout[…, r, c] is True.

    >>> print(blocks([[True, False], [True, True]], size=2).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ■
    ■ ■ ■ ■

    Args:
        layout: booleans (R, C), (H, R, C) or (B or 1, H or 1, R, C).
        size: positions on a block's side, at least 1.
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.

    Raises:
        TypeError: a layout that is not boolean.
        ValueError: a layout of another shape, or a size below 1.
    """
    cells = _cells("layout", layout)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"block size must be an integer ≥ 1, got {size!r}")
    return _Blocks(read_offset(offset), cells, size)


def random_blocks(
    positions: int, size: int, *, count: int, seed: int, num_heads: int = 1, offset: object = None
) -> Mask:
    """Each block of queries sees `count` blocks of keys, drawn without repetition from `seed`, per head.

    >>> random_blocks(8, 2, count=1, seed=0) == random_blocks(8, 2, count=1, seed=0)
    True

    Args:
        positions: number of queries and of keys.
        size: positions on a block's side.
        count: blocks drawn for each block of queries.
        seed: of the draw.
        num_heads: heads with a draw of their own; 1 is one draw for all.
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.

    Raises:
        TypeError: not an integer.
        ValueError: a number that is too small, or more blocks than there are.
    """
    for name, value in {"positions": positions, "size": size, "num_heads": num_heads}.items():
        check_int(name, value)
    for name, value in {"count": count, "seed": seed}.items():
        check_int(name, value, least=0)
    across = -(-positions // size)
    if count > across:
        raise ValueError(f"cannot draw {count} different blocks: {positions} positions make {across} of size {size}")
    order = torch.rand(num_heads, across, across, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    layout = torch.zeros(num_heads, across, across, dtype=torch.bool).scatter(-1, order[..., :count], True)
    return blocks(layout, size, offset=offset)


@dataclass(frozen=True, eq=False, repr=False)
class DenseMask(Mask):
    """The mask of `dense()`; public, because backends take its cells as they are."""

    cells: Tensor  # (B or 1, H or 1, Nq or 1, Nk or 1)

    def varies(self) -> tuple[int, int]:
        """The first two axes of the cells."""
        return self.cells.shape[0], self.cells.shape[1]

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError if the cells do not broadcast to (B, H, Nq, Nk)."""
        super().fit(batch, heads, nq, nk)
        if self.cells.shape[2] not in (1, nq) or self.cells.shape[3] not in (1, nk):
            raise ValueError(f"{self!r} does not fit {nq} queries × {nk} keys")

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j) that reads one cell."""
        return cell_of(self.cells.to(device))

    def bounds(self, grid: TileGrid) -> Bounds:
        """Exact: every cell is looked at."""
        cells = self.cells.to(grid.device).expand(-1, -1, grid.nq, grid.nk)[:, :, grid.i]
        cells = cells if grid.keys is None else cells[..., grid.keys]
        low, high = (per_tile(cells, grid.size, reduce) for reduce in ("all", "any"))
        return high, low

    def __repr__(self) -> str:
        return f"dense({booleans(self.cells)})"


def dense(cells: object) -> Mask:
    """Any booleans you bring: (Nq, Nk), (H, Nq, Nk) or (B or 1, H or 1, Nq, Nk). Indices, not positions.

    >>> print(dense([[True, False, True]]).draw(1, 3))
    ■ · ■

    Args:
        cells: True = may look; an axis of 1 stands for all.

    Raises:
        TypeError: cells are not boolean.
        ValueError: cells have another number of axes.
    """
    return DenseMask(_cells("cells", cells))


def as_mask(mask: object, shape: tuple[int, ...]) -> Mask | None:
    """Read the `mask=` argument of a call whose weights have `shape` (…, Nq, Nk): None, a Mask, or booleans.

    >>> as_mask(np.array([[True, False]]), (1, 2))
    dense(<2 booleans, 1 True>)

    Raises:
        TypeError: anything else.
        ValueError: the booleans do not broadcast to the shape.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, (np.ndarray, Tensor)):
        raise TypeError(f"mask must be a regard mask, booleans (True = may look) or None; got {type(mask).__name__}")
    cells = mask if isinstance(mask, Tensor) else numbers("mask", mask)  # not copied: it serves this call alone
    if cells.dtype != torch.bool:
        convert = "mask.bool()" if isinstance(mask, Tensor) else "mask.astype(bool)"
        raise TypeError(
            f"mask must be boolean (True = may look), got {cells.dtype}. "
            "Numbers that are added to the scores are a bias: pass bias=… instead"
            + ("" if cells.dtype.is_floating_point else f", or {convert} if they are 0 and 1")
        )
    return DenseMask(fit_cells("mask", cells, shape))


# --------------------------------------------------------------------------------------------------------------- pieces


def per_tile(cells: Tensor, size: tuple[int, int], reduce: Literal["all", "any"]) -> Tensor:
    """(B, H, Nq, Nk) → (B, H, Tq, Tk)."""
    filler = reduce == "all"
    short_k, short_q = -cells.shape[3] % size[1], -cells.shape[2] % size[0]
    cells = torch.nn.functional.pad(cells, (0, short_k, 0, short_q), value=filler)
    b, h, nq, nk = cells.shape
    tiles = cells.reshape(b, h, nq // size[0], size[0], nk // size[1], size[1])
    return tiles.all(5).all(3) if reduce == "all" else tiles.any(5).any(3)


def _cells(name: str, value: object) -> Tensor:
    cells = numbers(name, value)
    if cells.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean (True = may look), got {cells.dtype}")
    if not 2 <= cells.ndim <= 4:
        raise ValueError(f"{name} must have 2 to 4 axes, got shape {tuple(cells.shape)}")
    return cells[(None,) * (4 - cells.ndim)]
