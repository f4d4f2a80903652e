"""Masks from a value per position (padding, documents, globals) or per query (queries)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from regard.masks.mask import Bounds, Mask, TileGrid
from regard.masks.positional import OffsetMask, call_text, spread, text
from regard.masks.rules import IndexRule, at, leading_of, number, numbers, place, read_offset, row_of, size_or_one

__all__ = ["Queries", "documents", "globals", "padding", "queries"]


@dataclass(frozen=True, eq=False, repr=False)
class _Lengths(Mask):
    lengths: Tensor  # (B, 1)
    side: Literal["right", "left"]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_longest", int(self.lengths.max()))  # read once: on a GPU, reading waits

    _longest: ClassVar[int]  # per mask; ClassVar keeps it from becoming a dataclass field

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        if self._longest > nk:
            raise ValueError(f"padding has a length of {self._longest}, but there are {nk} keys")

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        length = at(self.lengths, device)
        if self.side == "right":
            return lambda b, h, i, j: j < length(b, h)
        return lambda b, h, i, j: j >= nk - length(b, h)

    def bounds(self, grid: TileGrid) -> Bounds:
        (j0, j1), length = grid.cols(grid.j), spread(self.lengths, grid.device)
        if self.side == "right":
            return j0 < length, j1 < length
        return j1 >= grid.nk - length, j0 >= grid.nk - length

    def __repr__(self) -> str:
        return call_text("padding", text(self.lengths), "" if self.side == "right" else "side='left'")


@dataclass(frozen=True, eq=False, repr=False)
class _Tokens(Mask):
    tokens: Tensor  # (B, Nk), True = a token

    def varies(self) -> tuple[int, int]:
        return self.tokens.shape[0], 1

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        fit_length("padding", self.tokens.shape[1], nk)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        token = row_of(self.tokens.to(device))
        return lambda b, h, i, j: token(b, j)

    def bounds(self, grid: TileGrid) -> Bounds:
        low, high = grid.cols(self.tokens.to(grid.device).unsqueeze(1))
        return high, low

    def __repr__(self) -> str:
        return f"padding({booleans(self.tokens)})"


def padding(real: object, *, side: Literal["right", "left"] = "right") -> Mask:
    """Hide padded keys. `real` is one length per batch row (B,), or booleans (B, Nk) with True = a real token.

    >>> print(padding([2, 3]).draw(1, 4, batch=1))
    ■ ■ ■ ·
    >>> padding([[True, False], [True, True]])
    padding(<2×2 booleans, 3 True>)

    Args:
        real: lengths or booleans: a list, an array or a tensor.
        side: where the padding stands when lengths are given; "right" (after the tokens) or "left".

    Raises:
        TypeError: not a list, an array or a tensor.
        ValueError: numbers of another kind or shape, a negative length, another side, or a side beside booleans.
    """
    values = numbers("padding", real)
    if values.dtype == torch.bool:
        if values.ndim != 2:
            raise ValueError(f"padding booleans must be (B, Nk), got shape {tuple(values.shape)}")
        if side != "right":
            raise ValueError("side= goes with lengths; booleans say already where the padding is")
        return _Tokens(values)
    if side not in ("right", "left"):
        raise ValueError(f"side must be 'right' or 'left', got {side!r}")
    if values.ndim != 1 or not _are_integers(values):
        raise ValueError(
            "padding takes integer lengths (B,) or booleans (B, Nk) with True = a real token; "
            f"got {values.dtype} of shape {tuple(values.shape)}"
        )
    lengths = number("lengths", values, 0)
    assert isinstance(lengths, Tensor)
    return _Lengths(lengths, side)


@dataclass(frozen=True, eq=False, repr=False)
class _Documents(OffsetMask):
    ids: Tensor  # (B, Nk)

    def varies(self) -> tuple[int, int]:
        batch, heads = leading_of(self.offset)
        return size_or_one("batch", [self.ids.shape[0], batch]), heads

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        fit_length("documents", self.ids.shape[1], nk)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, ids = place(self.offset, nq, nk, device), self.ids.to(device)
        # Who belongs to no document gets one number as a query and another as a key, so that the two never meet.
        mine, theirs = row_of(torch.where(ids < 0, -1, ids)), row_of(torch.where(ids < 0, -2, ids))
        if self.on_keys(nq, nk):
            return lambda b, h, i, j: mine(b, i + offset(b, h)) == theirs(b, j)

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            position = i + offset(b, h)
            same = mine(b, position.clamp(0, nk - 1)) == theirs(b, j)
            return same & (position >= 0) & (position < nk)

        return see

    def bounds(self, grid: TileGrid) -> Bounds:
        ids = self.ids.to(grid.device)
        mine = at_positions(ids, grid.positions(self.offset), outside=-1)  # (B, 1, Nq)
        (q0, q1), (k0, k1) = grid.rows(mine), grid.cols(ids.unsqueeze(1))
        some = (q0 <= k1) & (k0 <= q1) & (q1 >= 0) & (k1 >= 0)
        return some, (q0 == q1) & (k0 == k1) & (q0 == k0) & (q0 >= 0)

    def __repr__(self) -> str:
        b, n = self.ids.shape
        counts = {len(row[row >= 0].unique()) for row in self.ids}
        many = str(*counts) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        return call_text("documents", f"<{b}×{n} ids, {many} documents>", self._offset_text())


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

    Args:
        ids: integers. A position with a negative id belongs to no document: it sees nothing and is not seen.
        lengths: instead of ids, the lengths of consecutive documents in one batch row.
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.

    Raises:
        TypeError: not a list, an array or a tensor.
        ValueError: both or neither of ids and lengths, or numbers of another kind or shape.
    """
    if (ids is None) == (lengths is None):
        raise ValueError("documents takes ids per position, or lengths=…; exactly one of them")
    if lengths is not None:
        sizes = number("lengths", lengths, 0)
        if isinstance(sizes, int) or sizes.shape[1] != 1:
            raise ValueError("documents' lengths must be one list of integers; give ids (B, N) for several batch rows")
        values = torch.repeat_interleave(torch.arange(len(sizes)), sizes[:, 0].cpu())
    else:
        values = numbers("documents' ids", ids)
    if values.ndim not in (1, 2) or not _are_integers(values):
        raise ValueError(
            f"document ids must be integers (N,) or (B, N), got {values.dtype} of shape {tuple(values.shape)}"
        )
    return _Documents(read_offset(offset), values.long().reshape(-1 if values.numel() else 1, values.shape[-1]))


@dataclass(frozen=True, eq=False, repr=False)
class _Globals(OffsetMask):
    positions: tuple[int, ...] | Tensor  # or (B, Nk) booleans

    def varies(self) -> tuple[int, int]:
        own = self.positions.shape[0] if isinstance(self.positions, Tensor) else 1
        batch, heads = leading_of(self.offset)
        return size_or_one("batch", [own, batch]), heads

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        if isinstance(self.positions, Tensor):
            fit_length("globals", self.positions.shape[1], nk)
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
        offset, chosen = place(self.offset, nq, nk, device), row_of(self.chosen(nk, device))
        if self.on_keys(nq, nk):
            return lambda b, h, i, j: chosen(b, j) | chosen(b, i + offset(b, h))

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            position = i + offset(b, h)
            inside = (position >= 0) & (position < nk)
            return chosen(b, j) | (chosen(b, position.clamp(0, nk - 1)) & inside)

        return see

    def bounds(self, grid: TileGrid) -> Bounds:
        chosen = self.chosen(grid.nk, grid.device)
        mine = at_positions(chosen, grid.positions(self.offset), outside=False)
        (q_all, q_any), (k_all, k_any) = grid.rows(mine), grid.cols(chosen.unsqueeze(1))
        return q_any | k_any, q_all | k_all

    def __repr__(self) -> str:
        which = booleans(self.positions) if isinstance(self.positions, Tensor) else str(list(self.positions))
        return call_text("globals", which, self._offset_text())


def globals(positions: object, *, offset: object = None) -> Mask:
    """Chosen positions see all and are seen by all. A list of positions, or booleans (B, N).

    >>> print(globals([1]).draw(3))
    · ■ ·
    ■ ■ ■
    · ■ ·

    Args:
        positions: integers ≥ 0, or booleans (B, N).
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.

    Raises:
        TypeError: not a list, an array or a tensor.
        ValueError: numbers of another kind or shape, or negative ones.
    """
    values = numbers("global positions", positions)
    if values.dtype == torch.bool and values.ndim == 2:
        return _Globals(read_offset(offset), values)
    if values.ndim != 1 or (values.numel() and not _are_integers(values)):
        raise ValueError(
            f"globals takes positions [p, …] or booleans (B, N); got {values.dtype} of shape {tuple(values.shape)}"
        )
    chosen = tuple(sorted({int(p) for p in values}))
    if chosen and chosen[0] < 0:
        raise ValueError(f"global positions must be at least 0, got {chosen[0]}")
    return _Globals(read_offset(offset), chosen)


@dataclass(frozen=True, eq=False, repr=False)
class Queries(Mask):
    """The mask of `queries()`; public, because the doctor does not report rows that it empties."""

    looking: tuple[int, ...] | Tensor  # or (B or 1, Nq) booleans

    def varies(self) -> tuple[int, int]:
        """By batch row where it came as booleans, the same for all heads."""
        return (self.looking.shape[0] if isinstance(self.looking, Tensor) else 1), 1

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError for another number of queries, or a query that is not there."""
        super().fit(batch, heads, nq, nk)
        if isinstance(self.looking, Tensor):
            if self.looking.shape[1] != nq:
                raise ValueError(f"queries is given for {self.looking.shape[1]} queries, but there are {nq}")
        elif self.looking and self.looking[-1] >= nq:
            raise ValueError(f"query {self.looking[-1]} is out of range: there are {nq} queries")

    def looks(self, nq: int, device: torch.device) -> Tensor:
        """(B or 1, Nq) booleans."""
        if isinstance(self.looking, Tensor):
            return self.looking.to(device)
        looks = torch.zeros(1, nq, dtype=torch.bool, device=device)
        looks[:, list(self.looking)] = True
        return looks

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j): does query i look."""
        looks = row_of(self.looks(nq, device))
        return lambda b, h, i, j: looks(b, i)

    def bounds(self, grid: TileGrid) -> Bounds:
        """Exact: a tile is as its rows are."""
        every, some = grid.rows(self.looks(grid.nq, grid.device)[:, grid.i].unsqueeze(1))
        return some, every

    def __repr__(self) -> str:
        which = booleans(self.looking) if isinstance(self.looking, Tensor) else str(list(self.looking))
        return f"queries({which})"


def queries(looking: object) -> Mask:
    """Only these queries look at anything; the other rows are empty. A list of queries, or booleans (B or 1, Nq).

    >>> print(queries([0, 2]).draw(3, 4))
    ■ ■ ■ ■
    · · · ·
    ■ ■ ■ ■
    >>> from regard.masks import window
    >>> print((window(1, 1) & ~queries([0])).draw(4))      # all but query 0
    · · · ·
    ■ ■ ■ ·
    · ■ ■ ■
    · · ■ ■

    Args:
        looking: indices of queries, counted from 0 wherever the queries stand among the keys; or booleans.

    Raises:
        TypeError: not a list, an array or a tensor.
        ValueError: numbers of another kind or shape, or negative ones.
    """
    values = numbers("queries", looking)
    if values.dtype == torch.bool and values.ndim == 2:
        return Queries(values)
    if values.ndim != 1 or (values.numel() and not _are_integers(values)):
        raise ValueError(
            f"queries takes indices [i, …] or booleans (B, Nq); got {values.dtype} of shape {tuple(values.shape)}"
        )
    chosen = tuple(sorted({int(i) for i in values}))
    if chosen and chosen[0] < 0:
        raise ValueError(f"queries must be at least 0, got {chosen[0]}")
    return Queries(chosen)


# --------------------------------------------------------------------------------------------------------------- pieces


def at_positions(table: Tensor, positions: Tensor, outside: int) -> Tensor:
    """table (B or 1, Nk) read at positions (Nq,) or (B, H, Nq) → (B or 1, H or 1, Nq)."""
    nk = table.shape[1]
    positions = positions.expand(1, 1, -1) if positions.ndim == 1 else positions
    rows = torch.arange(table.shape[0], device=table.device).view(-1, 1, 1)
    found = table[rows, positions.clamp(0, nk - 1)]
    return torch.where((positions >= 0) & (positions < nk), found, torch.full_like(found, outside))


def _are_integers(values: Tensor) -> bool:
    return not (values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool)


def fit_length(name: str, have: int, nk: int) -> None:
    if have != nk:
        raise ValueError(f"{name} is given for {have} positions, but there are {nk} keys")


def booleans(value: Tensor) -> str:
    shape = "×".join(str(n) for n in value.shape if n != 1) or "1"
    return f"<{shape} booleans, {int(value.sum())} True>"
