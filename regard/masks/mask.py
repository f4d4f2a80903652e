"""The base class of masks: a rule, bounds per tile, `&`, `|`, `~`, and a drawing."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.masks.rules import IndexRule, Number, Rule, indices, size_or_one

__all__ = ["EMPTY", "FULL", "PARTIAL", "And", "Bounds", "Mask", "TileGrid"]

EMPTY, PARTIAL, FULL = 0, 1, 2
"""What `Mask.tiles` says of a tile."""

CPU = torch.device("cpu")
Bounds = tuple[Tensor, Tensor]


class TileGrid:
    """The tiles of one call: turns a value per query or per key into its smallest and largest value per tile.

    queries: those that the rows of tiles are made of, in this order; default all Nq.
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
        low, high = extremes(values, self.size[0])
        return low.unsqueeze(-1), high.unsqueeze(-1)

    def cols(self, values: Tensor) -> Bounds:
        """(…, Nk) → smallest and largest per tile, (…, 1, Tk)."""
        low, high = extremes(values if self.keys is None else values[..., self.keys], self.size[1])
        return low.unsqueeze(-2), high.unsqueeze(-2)

    def positions(self, offset: Number | None) -> Tensor:
        """The positions of the queries: (Nq,), or (B, H, Nq) where offsets differ."""
        if offset is None or isinstance(offset, int):
            return self.i + (self.nk - self.nq if offset is None else offset)
        return self.i + offset.to(self.device).unsqueeze(-1)


class Mask(Rule):
    """Who may look at whom: a frozen value, made by the functions of `regard.masks` and by `&`, `|`, `~`.

    >>> from regard.masks import causal, window
    >>> causal() & ~window(0, 0)
    causal() & ~window(0, 0)
    """

    @abstractmethod
    def bounds(self, grid: TileGrid) -> Bounds:
        """For each tile: may some cell be visible, and is every cell visible for certain."""

    def band(self, nq: int, nk: int) -> tuple[int, int, int] | None:
        """(offset, before, after) if the mask is no more than |before| and |after| of one offset for all, else None."""
        return None

    def stride(self) -> int:
        """The distance between keys that are seen side by side: 1, unless the mask is dilated."""
        return 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "_leading", self.varies())  # asked for in every call

    @property
    def leading(self) -> tuple[int, int]:
        """(B, H) over which the mask varies; 1 where it is the same for all."""
        return self._leading

    _leading: tuple[int, int]

    def varies(self) -> tuple[int, int]:
        """Computes `leading`, once."""
        shapes = [v.shape for v in vars(self).values() if isinstance(v, Tensor) and v.ndim == 2]
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
            device: where the matrix is made.

        Raises:
            ValueError: the mask does not fit these lengths.
        """
        nk = nq if nk is None else nk
        batch, heads = self.leading
        self.fit(batch, heads, nq, nk)
        if nq == 0 or nk == 0:
            return torch.zeros(*((batch, heads) if batch * heads > 1 else ()), nq, nk, dtype=torch.bool, device=device)
        see = self.bind(nq, nk, device, torch.float32)
        cells = see(*indices(batch, heads, torch.arange(nq, device=device), torch.arange(nk, device=device), device))
        whole = torch.as_tensor(cells, device=device).expand(batch, heads, nq, nk)
        return whole if batch * heads > 1 else whole[0, 0]

    def tiles(
        self, nq: int, nk: int | None = None, size: int | tuple[int, int] = 128, device: torch.device = CPU
    ) -> Tensor:
        """EMPTY, PARTIAL or FULL for each tile, (B or 1, H or 1, Tq, Tk), without building N×N.

        EMPTY and FULL are certain. A combination (`&`, `|`) may call PARTIAL what a cell-by-cell look would settle.

        >>> from regard.masks import causal
        >>> causal().tiles(4, size=2)[0, 0].tolist()
        [[1, 0], [2, 1]]

        Args:
            nq: number of queries.
            nk: number of keys; default nq.
            size: rows and columns of a tile, at least 1, or one number for both.
            device: where the result is made.

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
        some, every = self.bounds(TileGrid(nq, nk, size, device))
        kinds = some.to(torch.int8) + (some & every).to(torch.int8)
        return kinds.expand(batch, heads, -(-nq // size[0]), -(-nk // size[1]))

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
        size = -(-max(nq, nk, 1) // limit)
        kinds = self.tiles(nq, nk, size)
        for name, index, count in (("batch", batch, kinds.shape[0]), ("head", head, kinds.shape[1])):
            if not -count <= index < count:
                raise IndexError(f"{name} {index} is out of range: this mask has {count}")
        return "\n".join(" ".join("·▒■"[kind] for kind in row) for row in kinds[batch, head].tolist())


# --------------------------------------------------------------------------------------------------------- combinations


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    left: Mask
    right: Mask

    def varies(self) -> tuple[int, int]:
        (b1, h1), (b2, h2) = self.left.leading, self.right.leading
        return size_or_one("batch", [b1, b2]), size_or_one("heads", [h1, h2])

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        self.left.fit(batch, heads, nq, nk)
        self.right.fit(batch, heads, nq, nk)

    def stride(self) -> int:
        return max(self.left.stride(), self.right.stride())


@dataclass(frozen=True, eq=False, repr=False)
class And(_Pair):
    """What `&` makes; named, because a reader of masks takes it apart."""

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j): both."""
        left, right = self.left.bind(nq, nk, device, dtype), self.right.bind(nq, nk, device, dtype)
        return lambda b, h, i, j: left(b, h, i, j) & right(b, h, i, j)

    def bounds(self, grid: TileGrid) -> Bounds:
        """What both may show; full for certain where both are."""
        (some1, every1), (some2, every2) = self.left.bounds(grid), self.right.bounds(grid)
        return some1 & some2, every1 & every2

    def __repr__(self) -> str:
        left = f"({self.left!r})" if isinstance(self.left, _Or) else repr(self.left)
        return f"{left} & {_in_brackets(self.right)}"


@dataclass(frozen=True, eq=False, repr=False)
class _Or(_Pair):
    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        left, right = self.left.bind(nq, nk, device, dtype), self.right.bind(nq, nk, device, dtype)
        return lambda b, h, i, j: left(b, h, i, j) | right(b, h, i, j)

    def bounds(self, grid: TileGrid) -> Bounds:
        (some1, every1), (some2, every2) = self.left.bounds(grid), self.right.bounds(grid)
        return some1 | some2, every1 | every2

    def __repr__(self) -> str:
        right = repr(self.right) if isinstance(self.right, And) else _in_brackets(self.right)
        return f"{self.left!r} | {right}"


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


def extremes(values: Tensor, size: int) -> Bounds:
    """(…, N) → smallest and largest of each run of `size`, (…, T); the last run may be short."""
    short = -values.shape[-1] % size
    values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], short)], -1)
    runs = values.reshape(*values.shape[:-1], -1, size)  # (…, T, size)
    if values.dtype == torch.bool:
        return runs.all(-1), runs.any(-1)
    return runs.amin(-1), runs.amax(-1)
