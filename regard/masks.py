"""Masks as values: who may look at whom.  True = may look.

    >>> print(causal().draw(3, 5))          # 3 queries are the last 3 of 5 positions
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    >>> print(causal().draw(5, 3))          # the first two rows see nothing
    · · ·
    · · ·
    ■ · ·
    ■ ■ ·
    ■ ■ ■
    >>> print((window(1, 0) | globals([0])).draw(5))
    ■ ■ ■ ■ ■
    ■ ■ · · ·
    ■ ■ ■ · ·
    ■ · ■ ■ ·
    ■ · · ■ ■

Positions: key j stands at position j; query i at position i + offset. Unless an offset is given it is Nk − Nq: the
queries are the last Nq positions (lower-right). Masks combine with `&`, `|` and `~`; numbers may differ per batch row
(B,) or per row and head (B or 1, H or 1). A mask never builds N×N unless `.dense()` is asked for: `tiles` classifies
tiles from bounds, in O(N + number of tiles).

This file does not know about scores, backends or speed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from regard.rules import IndexRule, Number, Rule, at, cell_of, fit_cells, indices, number, row_of, size_or_one

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Mask",
    "as_mask",
    "blocks",
    "causal",
    "dense",
    "dilated",
    "documents",
    "globals",
    "padding",
    "prefix",
    "random_blocks",
    "window",
]

EMPTY, PARTIAL, FULL = 0, 1, 2
"""What `Mask.tiles` says of a tile."""

CPU = torch.device("cpu")
Bounds = tuple[Tensor, Tensor]


class Grid:
    """The tiles of one call: turns a value per query or per key into its smallest and largest value per tile."""

    def __init__(self, nq: int, nk: int, size: tuple[int, int], device: torch.device) -> None:
        self.nq, self.nk, self.size, self.device = nq, nk, size, device
        self.i = torch.arange(nq, device=device)  # (Nq,)
        self.j = torch.arange(nk, device=device)  # (Nk,)

    def rows(self, values: Tensor) -> Bounds:
        """(…, Nq) → smallest and largest per tile, (…, Tq, 1)."""
        low, high = _extremes(values, self.size[0])
        return low.unsqueeze(-1), high.unsqueeze(-1)

    def cols(self, values: Tensor) -> Bounds:
        """(…, Nk) → smallest and largest per tile, (…, 1, Tk)."""
        low, high = _extremes(values, self.size[1])
        return low.unsqueeze(-2), high.unsqueeze(-2)

    def positions(self, offset: Number | None) -> Tensor:
        """The positions of the queries: (Nq,), or (B, H, Nq) where offsets differ."""
        if offset is None or isinstance(offset, int):
            return self.i + (self.nk - self.nq if offset is None else offset)
        return self.i + offset.to(self.device).unsqueeze(-1)


class Mask(Rule):
    """Who may look at whom: a frozen value. Make one with the functions of this module."""

    @abstractmethod
    def bounds(self, grid: Grid) -> Bounds:
        """For each tile: may some cell be visible, and is every cell visible for certain."""

    @property
    def leading(self) -> tuple[int, int]:
        """(B, H) over which the mask varies; 1 where it is the same for all."""
        shapes = [v.shape for v in vars(self).values() if isinstance(v, Tensor) and v.ndim == 2]
        return size_or_one("batch", [s[0] for s in shapes]), size_or_one("heads", [s[1] for s in shapes])

    def __and__(self, other: Mask) -> Mask:
        return _And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return self.inner if isinstance(self, _Not) else _Not(self)

    def dense(self, nq: int, nk: int | None = None, device: torch.device = CPU) -> Tensor:
        """The whole matrix: (Nq, Nk), or (B or 1, H or 1, Nq, Nk) where it differs by batch row or head.

        >>> causal().dense(2).tolist()
        [[True, False], [True, True]]
        """
        nk = nq if nk is None else nk
        batch, heads = self.leading
        self.fit(batch, heads, nq, nk)
        see = self.bind(nq, nk, device, torch.float32)
        cells = see(*indices(batch, heads, torch.arange(nq, device=device), torch.arange(nk, device=device), device))
        whole = torch.as_tensor(cells, device=device).expand(batch, heads, nq, nk)
        return whole if batch * heads > 1 else whole[0, 0]

    def tiles(
        self, nq: int, nk: int | None = None, size: int | tuple[int, int] = 128, device: torch.device = CPU
    ) -> Tensor:
        """EMPTY, PARTIAL or FULL for each tile, (B or 1, H or 1, Tq, Tk), without building N×N.

        EMPTY and FULL are certain. A combination (`&`, `|`) may call PARTIAL what a cell-by-cell look would settle.

        >>> causal().tiles(4, size=2)[0, 0].tolist()
        [[1, 0], [2, 1]]
        """
        nk = nq if nk is None else nk
        size = (size, size) if isinstance(size, int) else size
        if min(size) < 1:
            raise ValueError(f"tile size must be at least 1, got {size}")
        batch, heads = self.leading
        self.fit(batch, heads, nq, nk)
        if nq == 0 or nk == 0:
            return torch.zeros(batch, heads, -(-nq // size[0]), -(-nk // size[1]), dtype=torch.int8, device=device)
        some, every = self.bounds(Grid(nq, nk, size, device))
        kinds = some.to(torch.int8) + (some & every).to(torch.int8)
        return kinds.expand(batch, heads, -(-nq // size[0]), -(-nk // size[1]))

    def draw(self, nq: int, nk: int | None = None, *, batch: int = 0, head: int = 0, limit: int = 48) -> str:
        """The mask as text: ■ visible, · hidden; beyond `limit` positions a sign is a tile and ▒ means partly.

        >>> print(window(1, 1).draw(4))
        ■ ■ · ·
        ■ ■ ■ ·
        · ■ ■ ■
        · · ■ ■
        """
        nk = nq if nk is None else nk
        size = -(-max(nq, nk, 1) // limit)
        kinds = self.tiles(nq, nk, size)
        for name, index, count in (("batch", batch, kinds.shape[0]), ("head", head, kinds.shape[1])):
            if not -count <= index < count:
                raise IndexError(f"{name} {index} is out of range: this mask has {count}")
        return "\n".join(" ".join("·▒■"[kind] for kind in row) for row in kinds[batch, head].tolist())


def as_mask(mask: object, shape: tuple[int, ...]) -> Mask | None:
    """Read the `mask=` argument of a call whose weights have `shape` (…, Nq, Nk): None, a Mask, or booleans."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, (np.ndarray, Tensor)):
        raise TypeError(f"mask must be a regard mask, booleans (True = may look) or None; got {type(mask).__name__}")
    cells = torch.as_tensor(mask)
    if cells.dtype != torch.bool:
        raise TypeError(
            f"mask must be boolean (True = may look), got {cells.dtype}. "
            "Numbers that are added to the scores are a bias: pass bias=… instead"
            + ("" if cells.dtype.is_floating_point else ", or mask.astype(bool) if they are 0 and 1")
        )
    return dense(fit_cells("mask", cells, shape))


# ---------------------------------------------------------------------------------------------------------- positions


@dataclass(frozen=True, eq=False, repr=False)
class _Placed(Mask):
    """A mask that compares positions: key j at j, query i at i + offset."""

    offset: Number | None

    def place(self, nq: int, nk: int, device: torch.device) -> Any:
        return at(nk - nq if self.offset is None else self.offset, device)

    def _offset_text(self) -> str:
        return "" if self.offset is None else f"offset={_text(self.offset)}"


@dataclass(frozen=True, eq=False, repr=False)
class _Causal(_Placed):
    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset = self.place(nq, nk, device)
        return lambda b, h, i, j: j <= i + offset(b, h)

    def bounds(self, grid: Grid) -> Bounds:
        (p0, p1), (j0, j1) = grid.rows(grid.positions(self.offset)), grid.cols(grid.j)
        return j0 <= p1, j1 <= p0

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

    offset: position of query 0; default Nk − Nq. One integer, or one per batch row.
    """
    return _Causal(_offset(offset))


@dataclass(frozen=True, eq=False, repr=False)
class _Window(_Placed):
    before: Number
    after: Number

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset = self.place(nq, nk, device)
        before, after = at(self.before, device), at(self.after, device)

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            distance = j - i - offset(b, h)
            return (distance >= -before(b, h)) & (distance <= after(b, h))

        return see

    def bounds(self, grid: Grid) -> Bounds:
        near, far = _distances(grid, self.offset)
        before, after = _spread(self.before, grid.device), _spread(self.after, grid.device)
        return (far >= -before) & (near <= after), (near >= -before) & (far <= after)

    def __repr__(self) -> str:
        return _call("window", _text(self.before), _text(self.after), self._offset_text())


def window(before: object, after: object, *, offset: object = None) -> Mask:
    """Each query sees `before` positions before it, itself, and `after` positions after it.

    >>> print(window(2, 0).draw(4))
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■

    before, after: integers ≥ 0, or one per batch row, or per row and head. Raises ValueError if negative.
    """
    return _Window(_offset(offset), number("before", before, 0), number("after", after, 0))


@dataclass(frozen=True, eq=False, repr=False)
class _Dilated(_Placed):
    before: Number
    after: Number
    dilation: Number

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset = self.place(nq, nk, device)
        before, after, dilation = at(self.before, device), at(self.after, device), at(self.dilation, device)

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            distance, step = j - i - offset(b, h), dilation(b, h)
            inside = (distance >= -before(b, h) * step) & (distance <= after(b, h) * step)
            return inside & (distance % step == 0)

        return see

    def bounds(self, grid: Grid) -> Bounds:
        near, far = _distances(grid, self.offset)
        step = _spread(self.dilation, grid.device)
        low = torch.maximum(near, -_spread(self.before, grid.device) * step)
        high = torch.minimum(far, _spread(self.after, grid.device) * step)
        some = (low <= high) & (high - high % step >= low)  # a multiple of the step lies in [low, high]
        every = (low == near) & (high == far) & ((step == 1) | ((near == far) & (near % step == 0)))
        return some, every

    def __repr__(self) -> str:
        return _call("dilated", _text(self.before), _text(self.after), _text(self.dilation), self._offset_text())


def dilated(before: object, after: object, dilation: object, *, offset: object = None) -> Mask:
    """A window with gaps: each query sees every `dilation`-th position, `before` of them back and `after` ahead.

    >>> print(dilated(2, 0, 2).draw(5))
    ■ · · · ·
    · ■ · · ·
    ■ · ■ · ·
    · ■ · ■ ·
    ■ · ■ · ■
    """
    return _Dilated(
        _offset(offset), number("before", before, 0), number("after", after, 0), number("dilation", dilation, 1)
    )


@dataclass(frozen=True, eq=False, repr=False)
class _Prefix(_Placed):
    length: Number

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, length = self.place(nq, nk, device), at(self.length, device)
        return lambda b, h, i, j: (j < length(b, h)) | (j <= i + offset(b, h))

    def bounds(self, grid: Grid) -> Bounds:
        (p0, p1), (j0, j1) = grid.rows(grid.positions(self.offset)), grid.cols(grid.j)
        length = _spread(self.length, grid.device)
        return (j0 < length) | (j0 <= p1), (j1 < length) | (j1 <= p0)

    def __repr__(self) -> str:
        return _call("prefix", _text(self.length), self._offset_text())


def prefix(length: object, *, offset: object = None) -> Mask:
    """The first `length` keys are seen by all, the rest causally (a prefix language model).

    >>> print(prefix(2).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    return _Prefix(_offset(offset), number("length", length, 0))


# --------------------------------------------------------------------------------------------- a value per position


@dataclass(frozen=True, eq=False, repr=False)
class _Lengths(Mask):
    lengths: Tensor  # (B, 1)
    side: Literal["right", "left"]

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        if int(self.lengths.max()) > nk:
            raise ValueError(f"padding has a length of {int(self.lengths.max())}, but there are {nk} keys")

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        length = at(self.lengths, device)
        if self.side == "right":
            return lambda b, h, i, j: j < length(b, h)
        return lambda b, h, i, j: j >= nk - length(b, h)

    def bounds(self, grid: Grid) -> Bounds:
        (j0, j1), length = grid.cols(grid.j), _spread(self.lengths, grid.device)
        if self.side == "right":
            return j0 < length, j1 < length
        return j1 >= grid.nk - length, j0 >= grid.nk - length

    def __repr__(self) -> str:
        return _call("padding", _text(self.lengths), "" if self.side == "right" else "side='left'")


@dataclass(frozen=True, eq=False, repr=False)
class _Tokens(Mask):
    tokens: Tensor  # (B, Nk), True = a token

    @property
    def leading(self) -> tuple[int, int]:
        return self.tokens.shape[0], 1

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        _fit_length("padding", self.tokens.shape[1], nk)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        token = row_of(self.tokens.to(device))
        return lambda b, h, i, j: token(b, j)

    def bounds(self, grid: Grid) -> Bounds:
        low, high = grid.cols(self.tokens.to(grid.device).unsqueeze(1))
        return high, low

    def __repr__(self) -> str:
        return f"padding({_booleans(self.tokens)})"


def padding(real: object, *, side: Literal["right", "left"] = "right") -> Mask:
    """Hide padded keys. `real` is one length per batch row (B,), or booleans (B, Nk) with True = a real token.

    >>> print(padding([2, 3]).draw(1, 4, batch=1))
    ■ ■ ■ ·
    >>> padding([[True, False], [True, True]])
    padding(<2×2 booleans, 3 True>)

    side: where the padding stands when lengths are given; "right" (after the tokens) or "left".
    """
    values = torch.as_tensor(real).detach().clone()  # type: ignore[arg-type]
    if values.dtype == torch.bool:
        if values.ndim != 2:
            raise ValueError(f"padding booleans must be (B, Nk), got shape {tuple(values.shape)}")
        if side != "right":
            raise ValueError("side= goes with lengths; booleans say already where the padding is")
        return _Tokens(values)
    if side not in ("right", "left"):
        raise ValueError(f"side must be 'right' or 'left', got {side!r}")
    if values.ndim != 1 or values.dtype.is_floating_point:
        raise ValueError(
            "padding takes integer lengths (B,) or booleans (B, Nk) with True = a real token; "
            f"got {values.dtype} of shape {tuple(values.shape)}"
        )
    lengths = number("lengths", values, 0)
    assert isinstance(lengths, Tensor)
    return _Lengths(lengths, side)


@dataclass(frozen=True, eq=False, repr=False)
class _Documents(_Placed):
    ids: Tensor  # (B, Nk)

    @property
    def leading(self) -> tuple[int, int]:
        return size_or_one("batch", [self.ids.shape[0], _batch(self.offset)]), 1

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        _fit_length("documents", self.ids.shape[1], nk)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, document = self.place(nq, nk, device), row_of(self.ids.to(device))

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            position = i + offset(b, h)
            mine = document(b, position.clamp(0, nk - 1))
            return (mine == document(b, j)) & (mine >= 0) & (position >= 0) & (position < nk)

        return see

    def bounds(self, grid: Grid) -> Bounds:
        ids = self.ids.to(grid.device)
        mine = _at_positions(ids, grid.positions(self.offset), outside=-1)  # (B, 1, Nq)
        (q0, q1), (k0, k1) = grid.rows(mine), grid.cols(ids.unsqueeze(1))
        some = (q0 <= k1) & (k0 <= q1) & (q1 >= 0) & (k1 >= 0)
        return some, (q0 == q1) & (k0 == k1) & (q0 == k0) & (q0 >= 0)

    def __repr__(self) -> str:
        b, n = self.ids.shape
        counts = sorted({len(row.unique()) for row in self.ids})
        return _call("documents", f"<{b}×{n} ids, {'–'.join(map(str, counts))} documents>", self._offset_text())


def documents(ids: object = None, *, lengths: object = None, offset: object = None) -> Mask:
    """Packed sequences: a query sees only its own document. Ids per position (N,) or (B, N), or the documents' lengths.

    >>> print(documents([0, 0, 1, 1, 1]).draw(5))
    ■ ■ · · ·
    ■ ■ · · ·
    · · ■ ■ ■
    · · ■ ■ ■
    · · ■ ■ ■
    >>> documents([0, 0, 1]) == documents(lengths=[2, 1])
    True

    A negative id belongs to no document: it sees nothing and nobody sees it.
    """
    if (ids is None) == (lengths is None):
        raise ValueError("documents takes ids per position, or lengths=…; exactly one of them")
    if lengths is not None:
        sizes = number("lengths", lengths, 0)
        if isinstance(sizes, int) or sizes.shape[1] != 1:
            raise ValueError("documents' lengths must be one list of integers; give ids (B, N) for several batch rows")
        values = torch.repeat_interleave(torch.arange(len(sizes)), sizes[:, 0].cpu())
    else:
        values = torch.as_tensor(ids).detach().clone()  # type: ignore[arg-type]
    if values.ndim not in (1, 2) or values.dtype.is_floating_point or values.dtype == torch.bool:
        raise ValueError(
            f"document ids must be integers (N,) or (B, N), got {values.dtype} of shape {tuple(values.shape)}"
        )
    return _Documents(_offset(offset), torch.atleast_2d(values).long())


@dataclass(frozen=True, eq=False, repr=False)
class _Globals(_Placed):
    positions: tuple[int, ...] | Tensor  # or (B, Nk) booleans

    @property
    def leading(self) -> tuple[int, int]:
        own = self.positions.shape[0] if isinstance(self.positions, Tensor) else 1
        return size_or_one("batch", [own, _batch(self.offset)]), 1

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        if isinstance(self.positions, Tensor):
            _fit_length("globals", self.positions.shape[1], nk)
        elif self.positions and max(self.positions) >= nk:
            raise ValueError(f"global position {max(self.positions)} is out of range: there are {nk} keys")

    def chosen(self, nk: int, device: torch.device) -> Tensor:
        """(B or 1, Nk) booleans."""
        if isinstance(self.positions, Tensor):
            return self.positions.to(device)
        chosen = torch.zeros(1, nk, dtype=torch.bool, device=device)
        chosen[:, list(self.positions)] = True
        return chosen

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, chosen = self.place(nq, nk, device), row_of(self.chosen(nk, device))

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            position = i + offset(b, h)
            inside = (position >= 0) & (position < nk)
            return chosen(b, j) | (chosen(b, position.clamp(0, nk - 1)) & inside)

        return see

    def bounds(self, grid: Grid) -> Bounds:
        chosen = self.chosen(grid.nk, grid.device)
        mine = _at_positions(chosen, grid.positions(self.offset), outside=False)
        (q_all, q_any), (k_all, k_any) = grid.rows(mine), grid.cols(chosen.unsqueeze(1))
        return q_any | k_any, q_all | k_all

    def __repr__(self) -> str:
        which = _booleans(self.positions) if isinstance(self.positions, Tensor) else str(list(self.positions))
        return _call("globals", which, self._offset_text())


def globals(positions: object, *, offset: object = None) -> Mask:
    """Chosen positions see all and are seen by all. A list of positions, or booleans (B, N).

    >>> print(globals([1]).draw(3))
    · ■ ·
    ■ ■ ■
    · ■ ·
    """
    values = torch.as_tensor(positions).detach().clone()  # type: ignore[arg-type]
    if values.dtype == torch.bool and values.ndim == 2:
        return _Globals(_offset(offset), values)
    if values.ndim != 1 or (values.numel() and (values.dtype.is_floating_point or values.dtype == torch.bool)):
        raise ValueError(
            f"globals takes positions [p, …] or booleans (B, N); got {values.dtype} of shape {tuple(values.shape)}"
        )
    chosen = tuple(sorted({int(p) for p in values}))
    if chosen and chosen[0] < 0:
        raise ValueError(f"global positions must be at least 0, got {chosen[0]}")
    return _Globals(_offset(offset), chosen)


# ------------------------------------------------------------------------------------------------- a value per cell


@dataclass(frozen=True, eq=False, repr=False)
class _Blocks(_Placed):
    layout: Tensor  # (B or 1, H or 1, R, C)
    size: int

    @property
    def leading(self) -> tuple[int, int]:
        batch = size_or_one("batch", [self.layout.shape[0], _batch(self.offset)])
        return batch, self.layout.shape[1]

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
        offset, layout, size = self.place(nq, nk, device), cell_of(self.layout.to(device)), self.size

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            position = i + offset(b, h)
            return layout(b, h, position.clamp(min=0) // size, j // size) & (position >= 0)

        return see

    def bounds(self, grid: Grid) -> Bounds:
        (p0, p1), (j0, j1) = grid.rows(grid.positions(self.offset)), grid.cols(grid.j)
        r0, r1 = p0.clamp(min=0) // self.size, p1.clamp(min=0) // self.size
        c0, c1 = j0 // self.size, j1 // self.size
        counts = torch.nn.functional.pad(self.layout.to(grid.device).long(), (1, 0, 1, 0)).cumsum(-1).cumsum(-2)
        batch, heads = self.leading
        b, h = (torch.arange(n, device=grid.device) for n in (counts.shape[0], counts.shape[1]))
        count = cell_of(counts)
        b, h = b.view(-1, 1, 1, 1), h.view(-1, 1, 1)
        seen = count(b, h, r1 + 1, c1 + 1) - count(b, h, r0, c1 + 1) - count(b, h, r1 + 1, c0) + count(b, h, r0, c0)
        return (seen > 0) & (p1 >= 0), (seen == (r1 - r0 + 1) * (c1 - c0 + 1)) & (p0 >= 0)

    def __repr__(self) -> str:
        return _call("blocks", _booleans(self.layout), f"size={self.size}", self._offset_text())


def blocks(layout: object, size: int, *, offset: object = None) -> Mask:
    """Any block layout: block (r, c) of `size` × `size` positions is visible where layout[…, r, c] is True.

    >>> print(blocks([[True, False], [True, True]], size=2).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ■
    ■ ■ ■ ■

    layout: booleans (R, C), (H, R, C) or (B or 1, H or 1, R, C).
    """
    cells = _cells("layout", layout)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"block size must be an integer ≥ 1, got {size!r}")
    return _Blocks(_offset(offset), cells, size)


def random_blocks(positions: int, size: int, *, count: int, seed: int, heads: int = 1, offset: object = None) -> Mask:
    """Each block of queries sees `count` blocks of keys, drawn without repetition from `seed`, per head.

    >>> random_blocks(8, 2, count=1, seed=0) == random_blocks(8, 2, count=1, seed=0)
    True
    """
    for name, value in (("positions", positions), ("size", size), ("count", count), ("heads", heads)):
        number(name, value, 0 if name == "count" else 1)
    across = -(-positions // size)
    if count > across:
        raise ValueError(f"cannot draw {count} different blocks: {positions} positions make {across} of size {size}")
    order = torch.rand(heads, across, across, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return blocks(
        torch.zeros(heads, across, across, dtype=torch.bool).scatter(-1, order[..., :count], True), size, offset=offset
    )


@dataclass(frozen=True, eq=False, repr=False)
class _Dense(Mask):
    cells: Tensor  # (B or 1, H or 1, Nq or 1, Nk or 1)

    @property
    def leading(self) -> tuple[int, int]:
        return self.cells.shape[0], self.cells.shape[1]

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        if self.cells.shape[2] not in (1, nq) or self.cells.shape[3] not in (1, nk):
            raise ValueError(f"{self!r} does not fit {nq} queries × {nk} keys")

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        return cell_of(self.cells.to(device))

    def bounds(self, grid: Grid) -> Bounds:
        cells = self.cells.to(grid.device).expand(-1, -1, grid.nq, grid.nk)
        low, high = (_per_tile(cells, grid.size, reduce) for reduce in ("all", "any"))
        return high, low

    def __repr__(self) -> str:
        return f"dense({_booleans(self.cells)})"


def dense(cells: object) -> Mask:
    """Any booleans you bring: (Nq, Nk), (H, Nq, Nk) or (B or 1, H or 1, Nq, Nk). Indices, not positions.

    >>> print(dense([[True, False, True]]).draw(1, 3))
    ■ · ■
    """
    return _Dense(_cells("cells", cells))


# ------------------------------------------------------------------------------------------------------ combinations


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    left: Mask
    right: Mask

    @cached_property
    def leading(self) -> tuple[int, int]:  # type: ignore[override]
        (b1, h1), (b2, h2) = self.left.leading, self.right.leading
        return size_or_one("batch", [b1, b2]), size_or_one("heads", [h1, h2])

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        self.left.fit(batch, heads, nq, nk)
        self.right.fit(batch, heads, nq, nk)


class _And(_Pair):
    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        left, right = self.left.bind(nq, nk, device, dtype), self.right.bind(nq, nk, device, dtype)
        return lambda b, h, i, j: left(b, h, i, j) & right(b, h, i, j)

    def bounds(self, grid: Grid) -> Bounds:
        (some1, every1), (some2, every2) = self.left.bounds(grid), self.right.bounds(grid)
        return some1 & some2, every1 & every2

    def __repr__(self) -> str:
        return " & ".join(f"({m!r})" if isinstance(m, _Or) else repr(m) for m in (self.left, self.right))


class _Or(_Pair):
    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        left, right = self.left.bind(nq, nk, device, dtype), self.right.bind(nq, nk, device, dtype)
        return lambda b, h, i, j: left(b, h, i, j) | right(b, h, i, j)

    def bounds(self, grid: Grid) -> Bounds:
        (some1, every1), (some2, every2) = self.left.bounds(grid), self.right.bounds(grid)
        return some1 | some2, every1 | every2

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@dataclass(frozen=True, eq=False, repr=False)
class _Not(Mask):
    inner: Mask

    @property
    def leading(self) -> tuple[int, int]:
        return self.inner.leading

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        self.inner.fit(batch, heads, nq, nk)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        inner = self.inner.bind(nq, nk, device, dtype)
        return lambda b, h, i, j: ~inner(b, h, i, j)

    def bounds(self, grid: Grid) -> Bounds:
        some, every = self.inner.bounds(grid)
        return ~every, ~some

    def __repr__(self) -> str:
        return f"~({self.inner!r})" if isinstance(self.inner, _Pair) else f"~{self.inner!r}"


# ------------------------------------------------------------------------------------------------------------- pieces


def _offset(value: object) -> Number | None:
    return None if value is None else number("offset", value)


def _batch(value: Number | None) -> int:
    return value.shape[0] if isinstance(value, Tensor) else 1


def _spread(value: Number, device: torch.device) -> Tensor:
    """A number shaped to broadcast against tiles (B, H, Tq, Tk)."""
    return torch.as_tensor(value, device=device) if isinstance(value, int) else value.to(device)[..., None, None]


def _distances(grid: Grid, offset: Number | None) -> Bounds:
    """Smallest and largest key position minus query position, per tile; all integers between occur."""
    (p0, p1), (j0, j1) = grid.rows(grid.positions(offset)), grid.cols(grid.j)
    return j0 - p1, j1 - p0


def _extremes(values: Tensor, size: int) -> Bounds:
    """(…, N) → smallest and largest of each run of `size`, (…, T); the last run may be short."""
    short = -values.shape[-1] % size
    values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], short)], -1)
    runs = values.unflatten(-1, (-1, size))  # (…, T, size)
    if values.dtype == torch.bool:
        return runs.all(-1), runs.any(-1)
    return runs.amin(-1), runs.amax(-1)


def _per_tile(cells: Tensor, size: tuple[int, int], reduce: Literal["all", "any"]) -> Tensor:
    """(B, H, Nq, Nk) → (B, H, Tq, Tk)."""
    filler = reduce == "all"
    short_k, short_q = -cells.shape[3] % size[1], -cells.shape[2] % size[0]
    cells = torch.nn.functional.pad(cells, (0, short_k, 0, short_q), value=filler)
    tiles = cells.unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0]))  # (B, H, Tq, size, Tk, size)
    return getattr(getattr(tiles, reduce)(5), reduce)(3)


def _at_positions(table: Tensor, positions: Tensor, outside: int) -> Tensor:
    """table (B or 1, Nk) read at positions (Nq,) or (B, H, Nq) → (B or 1, H or 1, Nq)."""
    nk = table.shape[1]
    positions = positions.expand(1, 1, -1) if positions.ndim == 1 else positions
    rows = torch.arange(table.shape[0], device=table.device).view(-1, 1, 1)
    found = table[rows, positions.clamp(0, nk - 1)]
    return torch.where((positions >= 0) & (positions < nk), found, torch.full_like(found, outside))


def _cells(name: str, value: object) -> Tensor:
    cells = torch.as_tensor(value).detach().clone()  # type: ignore[arg-type]
    if cells.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean (True = may look), got {cells.dtype}")
    if not 2 <= cells.ndim <= 4:
        raise ValueError(f"{name} must have 2 to 4 axes, got shape {tuple(cells.shape)}")
    return cells[(None,) * (4 - cells.ndim)]


def _fit_length(name: str, have: int, nk: int) -> None:
    if have != nk:
        raise ValueError(f"{name} is given for {have} positions, but there are {nk} keys")


def _text(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    return str(value[:, 0].tolist() if value.shape[1] == 1 else value.tolist())


def _booleans(value: Tensor) -> str:
    shape = "×".join(str(n) for n in value.shape if n != 1) or "1"
    return f"<{shape} booleans, {int(value.sum())} True>"


def _call(name: str, *arguments: str) -> str:
    return f"{name}({', '.join(a for a in arguments if a)})"
