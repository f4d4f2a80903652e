"""Masks that compare positions: causal, window, dilated, prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.masks.mask import Bounds, Mask, TileGrid
from regard.masks.rules import IndexRule, Number, at, number, place, read_offset

__all__ = ["NO_LIMIT", "Causal", "OffsetMask", "causal", "dilated", "prefix", "window"]

NO_LIMIT = 1 << 29
"""Farther than any sequence reaches, and small enough to add positions to in 32 bits."""


@dataclass(frozen=True, eq=False, repr=False)
class OffsetMask(Mask):
    """A mask that compares positions: key j at j, query i at i + offset."""

    offset: Number | None

    def on_keys(self, nq: int, nk: int) -> bool:
        """Whether every query certainly stands at the position of a key, so that a rule need not check each cell."""
        if isinstance(self.offset, Tensor):
            return False
        return 0 <= (nk - nq if self.offset is None else self.offset) <= nk - nq

    def _offset_text(self) -> str:
        return "" if self.offset is None else f"offset={text(self.offset)}"


@dataclass(frozen=True, eq=False, repr=False)
class Causal(OffsetMask):
    """The mask of `causal()`; public, because fused kernels have this mask built in."""

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j) of this mask."""
        offset = place(self.offset, nq, nk, device)
        return lambda b, h, i, j: j <= i + offset(b, h)

    def bounds(self, grid: TileGrid) -> Bounds:
        """Exact: a tile's lower left corner decides whether it is empty, its upper right whether it is full."""
        (p0, p1), (j0, j1) = grid.rows(grid.positions(self.offset)), grid.cols(grid.j)
        return j0 <= p1, j1 <= p0

    def band(self, nq: int, nk: int) -> tuple[int, int, int] | None:
        """Everything before, nothing after."""
        offset = nk - nq if self.offset is None else self.offset
        return (offset, NO_LIMIT, 0) if isinstance(offset, int) else None

    def __repr__(self) -> str:
        return f"causal({self._offset_text()})"


def causal(offset: object = None) -> Mask:
    """Each query sees its own position and all before it.

    >>> print(causal().draw(3))
    ■ · ·
    ■ ■ ·
    ■ ■ ■
    >>> print(causal(offset=0).draw(2, 4))      # the queries are the first positions, not the last
    ■ · · ·
    ■ ■ · ·

    Args:
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.

    Raises:
        TypeError: an offset that is not an integer or integers.
        ValueError: an offset of another shape.
    """
    return Causal(read_offset(offset))


@dataclass(frozen=True, eq=False, repr=False)
class _Window(OffsetMask):
    before: Number
    after: Number

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset = place(self.offset, nq, nk, device)
        before, after = at(self.before, device), at(self.after, device)

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            distance = j - i - offset(b, h)
            return (distance >= -before(b, h)) & (distance <= after(b, h))

        return see

    def bounds(self, grid: TileGrid) -> Bounds:
        near, far = distances(grid, self.offset)
        before, after = spread(self.before, grid.device), spread(self.after, grid.device)
        return (far >= -before) & (near <= after), (near >= -before) & (far <= after)

    def band(self, nq: int, nk: int) -> tuple[int, int, int] | None:
        offset = nk - nq if self.offset is None else self.offset
        one_for_all = isinstance(offset, int) and isinstance(self.before, int) and isinstance(self.after, int)
        return (offset, min(self.before, NO_LIMIT), min(self.after, NO_LIMIT)) if one_for_all else None  # type: ignore

    def __repr__(self) -> str:
        return call_text("window", text(self.before), text(self.after), self._offset_text())


def window(before: object, after: object, *, offset: object = None) -> Mask:
    """Each query sees `before` positions before it, itself, and `after` positions after it.

    >>> print(window(2, 0).draw(4))
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■

    Args:
        before: an integer ≥ 0, or one per batch row, or per row and head.
        after: likewise.
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.

    Raises:
        TypeError: not integers.
        ValueError: a negative number, or numbers of another shape.
    """
    return _Window(read_offset(offset), number("before", before, 0), number("after", after, 0))


@dataclass(frozen=True, eq=False, repr=False)
class _Dilated(OffsetMask):
    before: Number
    after: Number
    dilation: Number

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset = place(self.offset, nq, nk, device)
        before, after, dilation = at(self.before, device), at(self.after, device), at(self.dilation, device)

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            distance, step = j - i - offset(b, h), dilation(b, h)
            inside = (distance >= -before(b, h) * step) & (distance <= after(b, h) * step)
            return inside & (distance % step == 0)

        return see

    def bounds(self, grid: TileGrid) -> Bounds:
        near, far = distances(grid, self.offset)
        step = spread(self.dilation, grid.device)
        low = torch.maximum(near, -spread(self.before, grid.device) * step)
        high = torch.minimum(far, spread(self.after, grid.device) * step)
        some = (low <= high) & (high - high % step >= low)  # a multiple of the step lies in [low, high]
        every = (low == near) & (high == far) & ((step == 1) | ((near == far) & (near % step == 0)))
        if isinstance(self.dilation, int) and self.dilation > 1:  # a tile may hold positions of one residue only
            (p0, p1), (j0, j1) = grid.rows(grid.positions(self.offset) % step), grid.cols(grid.j % step)
            one = (p0 == p1) & (j0 == j1)
            some = some & (~one | (p0 == j0))
            every = every | (one & (p0 == j0) & (low == near) & (high == far))
        return some, every

    def stride(self) -> int:
        return self.dilation if isinstance(self.dilation, int) else 1

    def __repr__(self) -> str:
        return call_text("dilated", text(self.before), text(self.after), text(self.dilation), self._offset_text())


def dilated(before: object, after: object, dilation: object, *, offset: object = None) -> Mask:
    """A window with gaps: each query sees every `dilation`-th position, `before` of them back and `after` ahead.

    >>> print(dilated(2, 0, 2).draw(5))
    ■ · · · ·
    · ■ · · ·
    ■ · ■ · ·
    · ■ · ■ ·
    ■ · ■ · ■

    Args:
        before: an integer ≥ 0, or one per batch row, or per row and head.
        after: likewise.
        dilation: likewise, at least 1.
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.

    Raises:
        TypeError: not integers.
        ValueError: a number that is too small, or numbers of another shape.
    """
    return _Dilated(
        read_offset(offset), number("before", before, 0), number("after", after, 0), number("dilation", dilation, 1)
    )


@dataclass(frozen=True, eq=False, repr=False)
class _Prefix(OffsetMask):
    length: Number

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, length = place(self.offset, nq, nk, device), at(self.length, device)
        return lambda b, h, i, j: (j < length(b, h)) | (j <= i + offset(b, h))

    def bounds(self, grid: TileGrid) -> Bounds:
        (p0, p1), (j0, j1) = grid.rows(grid.positions(self.offset)), grid.cols(grid.j)
        length = spread(self.length, grid.device)
        return (j0 < length) | (j0 <= p1), (j1 < length) | (j1 <= p0)

    def __repr__(self) -> str:
        return call_text("prefix", text(self.length), self._offset_text())


def prefix(length: object, *, offset: object = None) -> Mask:
    """The first `length` keys are seen by all, the rest causally (a prefix language model).

    >>> print(prefix(2).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■

    Args:
        length: an integer ≥ 0, or one per batch row, or per row and head.
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.

    Raises:
        TypeError: not integers.
        ValueError: a negative length, or numbers of another shape.
    """
    return _Prefix(read_offset(offset), number("length", length, 0))


# --------------------------------------------------------------------------------------------------------------- pieces


def spread(value: Number, device: torch.device) -> Tensor:
    """A number shaped to broadcast against tiles (B, H, Tq, Tk)."""
    if isinstance(value, int):
        return torch.full((), value, device=device)  # as_tensor would copy it there, and wait
    return value.to(device)[..., None, None]


def distances(grid: TileGrid, offset: Number | None) -> Bounds:
    """Smallest and largest key position minus query position, per tile; all integers between occur."""
    (p0, p1), (j0, j1) = grid.rows(grid.positions(offset)), grid.cols(grid.j)
    return j0 - p1, j1 - p0


def text(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    return str(value[:, 0].tolist() if value.shape[1] == 1 else value.tolist())


def call_text(name: str, *arguments: str) -> str:
    return f"{name}({', '.join(a for a in arguments if a)})"
