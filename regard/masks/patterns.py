"""The masks by name: causal, window, dilated, prefix, padding, documents, globals, queries, blocks.

Each is a frozen dataclass: its numbers, the function f(b, h, i, j) they make (`bind`), and bounds per tile (`bounds`).
Per-position tensors are stored as (B or 1, 1, N), unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.checks import Number, are_integers, check_int, number, numbers
from regard.masks.mask import (
    Bounds,
    IndexRule,
    Mask,
    TileGrid,
    at,
    booleans,
    cell_of,
    place,
    read_cells,
    read_offset,
    row_of,
)

NO_LIMIT = 1 << 29
"""Farther than any sequence reaches, and small enough to add positions to in 32 bits."""

Places = tuple[int, ...] | Tensor
"""Some positions: their indices in order, or (B or 1, 1, N) booleans."""


@dataclass(frozen=True, eq=False, repr=False)
class OffsetMask(Mask):
    """A mask that compares positions: key j at j, query i at i + offset."""

    offset: Number | None

    def on_keys(self, nq: int, nk: int) -> bool:
        """Whether every query certainly stands at the position of a key, so that a rule need not check each cell."""
        if isinstance(self.offset, Tensor):
            return False
        return 0 <= (nk - nq if self.offset is None else self.offset) <= nk - nq

    def _text(self, name: str, *arguments: Number | str) -> str:
        """The call that makes this mask."""
        shown = [argument if isinstance(argument, str) else _text(argument) for argument in arguments]
        shown += [] if self.offset is None else [f"offset={_text(self.offset)}"]
        return f"{name}({', '.join(shown)})"


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
        return self._text("causal")


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
        near, far = _distances(grid, self.offset)
        before, after = _spread(self.before, grid.device), _spread(self.after, grid.device)
        return (far >= -before) & (near <= after), (near >= -before) & (far <= after)

    def band(self, nq: int, nk: int) -> tuple[int, int, int] | None:
        offset = nk - nq if self.offset is None else self.offset
        one_for_all = isinstance(offset, int) and isinstance(self.before, int) and isinstance(self.after, int)
        return (offset, min(self.before, NO_LIMIT), min(self.after, NO_LIMIT)) if one_for_all else None  # type: ignore

    def __repr__(self) -> str:
        return self._text("window", self.before, self.after)


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
        near, far = _distances(grid, self.offset)
        step = _spread(self.dilation, grid.device)
        low = torch.maximum(near, -_spread(self.before, grid.device) * step)
        high = torch.minimum(far, _spread(self.after, grid.device) * step)
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
        return self._text("dilated", self.before, self.after, self.dilation)


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
    before, after = number("before", before, 0), number("after", after, 0)
    return _Dilated(read_offset(offset), before, after, number("dilation", dilation, 1))


@dataclass(frozen=True, eq=False, repr=False)
class _Prefix(OffsetMask):
    length: Number

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, length = place(self.offset, nq, nk, device), at(self.length, device)
        return lambda b, h, i, j: (j < length(b, h)) | (j <= i + offset(b, h))

    def bounds(self, grid: TileGrid) -> Bounds:
        (p0, p1), (j0, j1) = grid.rows(grid.positions(self.offset)), grid.cols(grid.j)
        length = _spread(self.length, grid.device)
        return (j0 < length) | (j0 <= p1), (j1 < length) | (j1 <= p0)

    def __repr__(self) -> str:
        return self._text("prefix", self.length)


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


# ------------------------------------------------------------------------------------------------- values per position


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
        (j0, j1), length = grid.cols(grid.j), _spread(self.lengths, grid.device)
        if self.side == "right":
            return j0 < length, j1 < length
        return j1 >= grid.nk - length, j0 >= grid.nk - length

    def __repr__(self) -> str:
        return f"padding({_text(self.lengths)}{'' if self.side == 'right' else ', side=' + repr(self.side)})"


@dataclass(frozen=True, eq=False, repr=False)
class _Tokens(Mask):
    tokens: Tensor  # (B, Nk), True = a token; without the axis of heads, since every padded call makes one

    def varies(self) -> tuple[int, int]:
        return self.tokens.shape[0], 1

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        fit_length("padding", self.tokens, nk)

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
            raise ValueError("side= is for lengths; booleans already mark the padding")
        return _Tokens(values)
    if side not in ("right", "left"):
        raise ValueError(f"side must be 'right' or 'left', got {side!r}")
    if values.ndim != 1 or not are_integers(values):
        raise ValueError(
            "padding takes integer lengths (B,) or booleans (B, Nk) with True = a real token; "
            f"got {values.dtype} of shape {tuple(values.shape)}"
        )
    lengths = number("lengths", values, 0)
    assert isinstance(lengths, Tensor)
    return _Lengths(lengths, side)


@dataclass(frozen=True, eq=False, repr=False)
class _Documents(OffsetMask):
    ids: Tensor  # (B, 1, Nk)

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        fit_length("documents", self.ids, nk)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, ids = place(self.offset, nq, nk, device), self.ids.squeeze(1).to(device)
        # A position without a document has one number as a query and another as a key, so that the two never match.
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
        mine = at_positions(ids[:, 0], grid.positions(self.offset), outside=-1)  # (B, 1, Nq)
        (q0, q1), (k0, k1) = grid.rows(mine), grid.cols(ids)
        some = (q0 <= k1) & (k0 <= q1) & (q1 >= 0) & (k1 >= 0)
        return some, (q0 == q1) & (k0 == k1) & (q0 == k0) & (q0 >= 0)

    def __repr__(self) -> str:
        counts = {len(row[row >= 0].unique()) for row in self.ids}
        many = str(*counts) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        return self._text("documents", f"<{len(self.ids)}×{self.ids.shape[-1]} ids, {many} documents>")


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
    if values.ndim not in (1, 2) or not are_integers(values):
        raise ValueError(
            f"document ids must be integers (N,) or (B, N), got {values.dtype} of shape {tuple(values.shape)}"
        )
    return _Documents(read_offset(offset), values.long().reshape(-1 if values.numel() else 1, 1, values.shape[-1]))


@dataclass(frozen=True, eq=False, repr=False)
class _Globals(OffsetMask):
    positions: Places

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        if isinstance(self.positions, Tensor):
            fit_length("globals", self.positions, nk)
        elif self.positions and self.positions[-1] >= nk:
            raise ValueError(f"global position {self.positions[-1]} is out of range: there are {nk} keys")

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        offset, chosen = place(self.offset, nq, nk, device), row_of(_marked(self.positions, nk, device)[:, 0])
        if self.on_keys(nq, nk):
            return lambda b, h, i, j: chosen(b, j) | chosen(b, i + offset(b, h))

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            position = i + offset(b, h)
            inside = (position >= 0) & (position < nk)
            return chosen(b, j) | (chosen(b, position.clamp(0, nk - 1)) & inside)

        return see

    def bounds(self, grid: TileGrid) -> Bounds:
        chosen = _marked(self.positions, grid.nk, grid.device)
        mine = at_positions(chosen[:, 0], grid.positions(self.offset), outside=False)
        (q_all, q_any), (k_all, k_any) = grid.rows(mine), grid.cols(chosen)
        return q_any | k_any, q_all | k_all

    def __repr__(self) -> str:
        return self._text("globals", _places_text(self.positions))


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
    return _Globals(read_offset(offset), _read_places("global positions", positions))


@dataclass(frozen=True, eq=False, repr=False)
class Queries(Mask):
    """The mask of `queries()`; public, because the doctor does not report rows that it empties."""

    looking: Places

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError for another number of queries, or a query that is out of range."""
        super().fit(batch, heads, nq, nk)
        if isinstance(self.looking, Tensor):
            if self.looking.shape[-1] != nq:
                raise ValueError(f"queries is for {self.looking.shape[-1]} queries, but there are {nq}")
        elif self.looking and self.looking[-1] >= nq:
            raise ValueError(f"query {self.looking[-1]} is out of range: there are {nq} queries")

    def looks(self, nq: int, device: torch.device) -> Tensor:
        """(B or 1, Nq) booleans."""
        return _marked(self.looking, nq, device)[:, 0]

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j): does query i look."""
        looks = row_of(self.looks(nq, device))
        return lambda b, h, i, j: looks(b, i)

    def bounds(self, grid: TileGrid) -> Bounds:
        """Exact: a tile is as its rows are."""
        every, some = grid.rows(_marked(self.looking, grid.nq, grid.device)[..., grid.i])
        return some, every

    def __repr__(self) -> str:
        return f"queries({_places_text(self.looking)})"


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
    return Queries(_read_places("queries", looking))


# --------------------------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True, eq=False, repr=False)
class _Blocks(OffsetMask):
    layout: Tensor  # (B or 1, H or 1, R, C)
    size: int

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        super().fit(batch, heads, nq, nk)
        last = nk - nq if self.offset is None else int(torch.as_tensor(self.offset).max())
        for name, count, n in (("query", self.layout.shape[2], nq + last), ("key", self.layout.shape[3], nk)):
            if n > count * self.size:
                raise ValueError(
                    f"the layout has {count} {name} blocks of {self.size} = {count * self.size} positions, "
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
        counts = pad(self.layout.to(grid.device).long(), (1, 0, 1, 0)).cumsum(-1).cumsum(-2)
        b, h = (torch.arange(n, device=grid.device) for n in counts.shape[:2])
        b, h, count = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), cell_of(counts)
        seen = count(b, h, r1 + 1, c1 + 1) - count(b, h, r0, c1 + 1) - count(b, h, r1 + 1, c0) + count(b, h, r0, c0)
        return (seen > 0) & (p1 >= 0), (seen == (r1 - r0 + 1) * (c1 - c0 + 1)) & (p0 >= 0)

    def __repr__(self) -> str:
        return self._text("blocks", booleans(self.layout), f"size={self.size}")


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
    cells = read_cells("layout", layout)
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


# --------------------------------------------------------------------------------------------------------------- pieces


def _spread(value: Number, device: torch.device) -> Tensor:
    """A number shaped to broadcast against tiles (B, H, Tq, Tk)."""
    if isinstance(value, int):
        return torch.full((), value, device=device)  # as_tensor would copy it there, and wait
    return value.to(device)[..., None, None]


def _distances(grid: TileGrid, offset: Number | None) -> Bounds:
    """Smallest and largest key position minus query position, per tile; all integers between occur."""
    (p0, p1), (j0, j1) = grid.rows(grid.positions(offset)), grid.cols(grid.j)
    return j0 - p1, j1 - p0


def at_positions(table: Tensor, positions: Tensor, outside: int) -> Tensor:
    """table (B or 1, Nk) read at positions (Nq,) or (B, H, Nq) → (B or 1, H or 1, Nq)."""
    nk = table.shape[1]
    positions = positions.expand(1, 1, -1) if positions.ndim == 1 else positions
    rows = torch.arange(table.shape[0], device=table.device).view(-1, 1, 1)
    values = table[rows, positions.clamp(0, nk - 1)]
    return torch.where((positions >= 0) & (positions < nk), values, torch.full_like(values, outside))


def _read_places(name: str, value: object) -> Places:
    values = numbers(name, value)
    if values.dtype == torch.bool and values.ndim == 2:
        return values.unsqueeze(1)
    if values.ndim != 1 or (values.numel() and not are_integers(values)):
        raise ValueError(
            f"{name} must be indices [i, …] or booleans (B, N); got {values.dtype} of shape {tuple(values.shape)}"
        )
    places = tuple(sorted({int(i) for i in values}))
    if places and places[0] < 0:
        raise ValueError(f"{name} must be at least 0, got {places[0]}")
    return places


def _marked(places: Places, n: int, device: torch.device) -> Tensor:
    """(B or 1, 1, N) booleans."""
    if isinstance(places, Tensor):
        return places.to(device)
    marked = torch.zeros(1, 1, n, dtype=torch.bool, device=device)
    marked[..., list(places)] = True
    return marked


def _places_text(places: Places) -> str:
    return booleans(places) if isinstance(places, Tensor) else str(list(places))


def fit_length(name: str, values: Tensor, nk: int) -> None:
    """Raise ValueError unless there is a value for each of Nk keys."""
    if values.shape[-1] != nk:
        raise ValueError(f"{name} is for {values.shape[-1]} positions, but there are {nk} keys")


def _text(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    return str(value[:, 0].tolist() if value.shape[1] == 1 else value.tolist())
