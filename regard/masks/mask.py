"""What a mask is: a function of (b, h, i, j) with bounds per tile, combined by `&`, `|`, `~`; and the dense mask."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from operator import and_, or_
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.masks.rules import IndexRule, Number, Rule, cell_of, fit_cells, numbers, size_or_one

EMPTY, PARTIAL, FULL = 0, 1, 2
"""The values of `Mask.tiles`."""

CPU = torch.device("cpu")
Bounds = tuple[Tensor, Tensor]


class TileGrid:
    """The tiles of one call: turns a value per query or per key into its smallest and largest value per tile.

    queries: which queries make the rows of tiles, in this order; default all Nq.
    keys: the order in which all Nk make the columns; default their own.
    """

    def __init__(
        self,
        nq: int,
        nk: int,
        size: tuple[int, int],
        device: torch.device,
        queries: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> None:
        self.nq, self.nk, self.size, self.device, self.keys = nq, nk, size, device, keys
        self.i = torch.arange(nq, device=device) if queries is None else queries  # (Nq,)
        self.j = torch.arange(nk, device=device)  # (Nk,)

    def rows(self, values: Tensor) -> Bounds:
        """(…, Nq) → smallest and largest per tile, (…, Tq, 1)."""
        low, high = _extremes(values, self.size[0])
        return low.unsqueeze(-1), high.unsqueeze(-1)

    def cols(self, values: Tensor) -> Bounds:
        """(…, Nk) → smallest and largest per tile, (…, 1, Tk)."""
        low, high = _extremes(values if self.keys is None else values[..., self.keys], self.size[1])
        return low.unsqueeze(-2), high.unsqueeze(-2)

    def positions(self, offset: Number | None) -> Tensor:
        """The positions of the queries: (Nq,), or (B, H, Nq) where offsets differ."""
        if offset is None or isinstance(offset, int):
            return self.i + (self.nk - self.nq if offset is None else offset)
        return self.i + offset.to(self.device).unsqueeze(-1)


def _extremes(values: Tensor, size: int) -> Bounds:
    """(…, N) → smallest and largest of each run of `size`, (…, T); the last run may be short."""
    short = -values.shape[-1] % size
    if short:
        values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], short)], -1)
    runs = values.reshape(*values.shape[:-1], -1, size)  # (…, T, size)
    if values.dtype == torch.bool:
        return runs.all(-1), runs.any(-1)
    return runs.amin(-1), runs.amax(-1)


class Mask(Rule):
    """Which query may look at which key: a frozen value, made by the functions of `regard.masks` and by `&`, `|`, `~`.

    >>> from regard.masks import causal, window
    >>> causal() & ~window(0, 0)
    causal() & ~window(0, 0)
    """

    @abstractmethod
    def bounds(self, grid: TileGrid) -> Bounds:
        """For each tile: may some cell be visible, and is every cell visible for certain."""

    def band(self, nq: int, nk: int) -> tuple[int, int, int] | None:
        """(offset, before, after) if the mask is −before ≤ j − i − offset ≤ after for all, else None."""
        return None

    def stride(self) -> int:
        """The distance between keys that are seen side by side: 1, unless the mask is dilated."""
        return 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "_leading", self.varies())  # read in every call

    _leading: tuple[int, int]

    @property
    def leading(self) -> tuple[int, int]:
        """(B, H) over which the mask varies; 1 where it is the same for all."""
        return self._leading

    def varies(self) -> tuple[int, int]:
        """Compute `leading`: the first two axes of every tensor field."""
        shapes = [v.shape for v in vars(self).values() if isinstance(v, Tensor)]
        if len(shapes) <= 1:
            return (shapes[0][0], shapes[0][1]) if shapes else (1, 1)
        return size_or_one("batch", [s[0] for s in shapes]), size_or_one("heads", [s[1] for s in shapes])

    def __and__(self, other: Mask) -> Mask:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return self.inner if isinstance(self, _Not) else _Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: &, | and ~ combine masks, not and, or and not")

    def dense(self, nq: int, nk: int | None = None, device: torch.device = CPU) -> Tensor:
        """The whole matrix: (Nq, Nk), or (B or 1, H or 1, Nq, Nk) where it differs by batch row or head.

        >>> from regard.masks import causal
        >>> causal().dense(2).tolist()
        [[True, False], [True, True]]

        Args:
            nq: number of queries.
            nk: number of keys; default nq.
            device: of the matrix.

        Raises:
            ValueError: the mask does not fit these lengths.
        """
        nk = nq if nk is None else nk
        batch, heads = self.leading
        self.fit(batch, heads, nq, nk)
        if nq == 0 or nk == 0:
            return torch.zeros(*((batch, heads) if batch * heads > 1 else ()), nq, nk, dtype=torch.bool, device=device)
        return self._matrix(nq, nk, device, torch.float32)

    def tiles(
        self, nq: int, nk: int | None = None, size: int | tuple[int, int] = 128, device: torch.device = CPU
    ) -> Tensor:
        """EMPTY, PARTIAL or FULL for each tile, (B or 1, H or 1, Tq, Tk), without building N×N.

        EMPTY and FULL are certain. A combination (`&`, `|`) may be PARTIAL although its cells are all alike.

        >>> from regard.masks import causal
        >>> causal().tiles(4, size=2)[0, 0].tolist()
        [[1, 0], [2, 1]]

        Args:
            nq: number of queries.
            nk: number of keys; default nq.
            size: rows and columns of a tile, at least 1, or one number for both.
            device: of the result.

        Raises:
            ValueError: a size below 1, or a mask that does not fit these lengths.
        """
        nk = nq if nk is None else nk
        size = (size, size) if isinstance(size, int) else size
        if not (isinstance(size, tuple) and len(size) == 2 and all(isinstance(n, int) and n >= 1 for n in size)):
            raise ValueError(f"tile size must be an integer ≥ 1, or (rows, columns) of them; got {size!r}")
        batch, heads = self.leading
        self.fit(batch, heads, nq, nk)
        if nq == 0 or nk == 0:
            return torch.zeros(batch, heads, -(-nq // size[0]), -(-nk // size[1]), dtype=torch.int8, device=device)
        return self.kinds(TileGrid(nq, nk, size, device))

    def kinds(self, grid: TileGrid) -> Tensor:
        """EMPTY, PARTIAL or FULL for each tile of a grid, (B or 1, H or 1, Tq, Tk)."""
        some, every = self.bounds(grid)
        down, across = -(-len(grid.i) // grid.size[0]), -(-grid.nk // grid.size[1])
        return (some.to(torch.int8) + (some & every).to(torch.int8)).expand(*self.leading, down, across)

    def draw(self, nq: int, nk: int | None = None, *, batch: int = 0, head: int = 0, limit: int = 48) -> str:
        """The mask as text: ■ visible, · hidden; beyond `limit` positions a sign is a tile and ▒ means partly.

        >>> from regard.masks import window
        >>> print(window(1, 1).draw(4))
        ■ ■ · ·
        ■ ■ ■ ·
        · ■ ■ ■
        · · ■ ■

        Args:
            nq: number of queries.
            nk: number of keys; default nq.
            batch: which batch row to draw, if the mask differs between them; a negative one counts from the end.
            head: likewise.
            limit: most signs in a row and in a column.

        Raises:
            ValueError: a limit below 1, or lengths that do not fit.
            IndexError: no such batch row or head.
        """
        nk = nq if nk is None else nk
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        kinds = self.tiles(nq, nk, -(-max(nq, nk, 1) // limit))
        for name, index, count in (("batch", batch, kinds.shape[0]), ("head", head, kinds.shape[1])):
            if not -count <= index < count:
                raise IndexError(f"{name} {index} is out of range: this mask has {count}")
        return "\n".join(" ".join("·▒■"[kind] for kind in row) for row in kinds[batch, head].tolist())


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    """Two masks, combined cell by cell and bound by bound."""

    left: Mask
    right: Mask
    sign: ClassVar[str]
    combine: ClassVar[Any]  # and_ or or_

    def varies(self) -> tuple[int, int]:
        (b1, h1), (b2, h2) = self.left.leading, self.right.leading
        return size_or_one("batch", [b1, b2]), size_or_one("heads", [h1, h2])

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        self.left.fit(batch, heads, nq, nk)
        self.right.fit(batch, heads, nq, nk)

    def stride(self) -> int:
        return max(self.left.stride(), self.right.stride())

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        left, right = self.left.bind(nq, nk, device, dtype), self.right.bind(nq, nk, device, dtype)
        combine = self.combine
        return lambda b, h, i, j: combine(left(b, h, i, j), right(b, h, i, j))

    def bounds(self, grid: TileGrid) -> Bounds:
        (some1, every1), (some2, every2) = self.left.bounds(grid), self.right.bounds(grid)
        return self.combine(some1, some2), self.combine(every1, every2)

    def __repr__(self) -> str:
        either = isinstance(self, _Or)  # & binds more tightly than |
        left = repr(self.left) if either or not isinstance(self.left, _Or) else f"({self.left!r})"
        right = repr(self.right) if either and isinstance(self.right, And) else _in_brackets(self.right)
        return f"{left} {self.sign} {right}"


class And(_Pair):
    """The result of `&`; public, because readers of masks take it apart."""

    sign, combine = "&", and_


class _Or(_Pair):
    sign, combine = "|", or_


@dataclass(frozen=True, eq=False, repr=False)
class _Not(Mask):
    inner: Mask

    def varies(self) -> tuple[int, int]:
        return self.inner.leading

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        self.inner.fit(batch, heads, nq, nk)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        inner = self.inner.bind(nq, nk, device, dtype)
        return lambda b, h, i, j: ~inner(b, h, i, j)

    def bounds(self, grid: TileGrid) -> Bounds:
        some, every = self.inner.bounds(grid)
        return ~every, ~some

    def stride(self) -> int:
        return self.inner.stride()

    def __repr__(self) -> str:
        return f"~{_in_brackets(self.inner)}"


def _in_brackets(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, _Pair) else repr(mask)


# --------------------------------------------------------------------------------------------------------------- dense


@dataclass(frozen=True, eq=False, repr=False)
class DenseMask(Mask):
    """The mask of `dense()`; public, because backends take its cells as they are."""

    cells: Tensor  # (B or 1, H or 1, Nq or 1, Nk or 1)

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
        return per_tile(cells, grid.size, "any"), per_tile(cells, grid.size, "all")

    def __repr__(self) -> str:
        return f"dense({booleans(self.cells)})"


def dense(cells: object) -> Mask:
    """A mask from booleans: (Nq, Nk), (H, Nq, Nk) or (B or 1, H or 1, Nq, Nk). Indices, not positions.

    >>> print(dense([[True, False, True]]).draw(1, 3))
    ■ · ■

    Args:
        cells: True = may look; an axis of 1 stands for all.

    Raises:
        TypeError: cells are not boolean.
        ValueError: cells have another number of axes.
    """
    return DenseMask(read_cells("cells", cells))


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


def read_cells(name: str, value: object) -> Tensor:
    """Read booleans of 2 to 4 axes as (B or 1, H or 1, R, C)."""
    cells = numbers(name, value)
    if cells.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean (True = may look), got {cells.dtype}")
    if not 2 <= cells.ndim <= 4:
        raise ValueError(f"{name} must have 2 to 4 axes, got shape {tuple(cells.shape)}")
    return cells[(None,) * (4 - cells.ndim)]


def per_tile(cells: Tensor, size: tuple[int, int], reduce: Literal["all", "any"]) -> Tensor:
    """(B, H, Nq, Nk) → (B, H, Tq, Tk)."""
    short_k, short_q = -cells.shape[3] % size[1], -cells.shape[2] % size[0]
    cells = pad(cells, (0, short_k, 0, short_q), value=reduce == "all")
    b, h, nq, nk = cells.shape
    tiles = cells.reshape(b, h, nq // size[0], size[0], nk // size[1], size[1])
    return tiles.all(5).all(3) if reduce == "all" else tiles.any(5).any(3)


def booleans(value: Tensor) -> str:
    """Booleans in a repr: their shape, and how many are True."""
    shape = "×".join(str(n) for n in value.shape if n != 1) or "1"
    return f"<{shape} booleans, {int(value.sum())} True>"
