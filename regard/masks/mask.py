"""Rules, functions of (batch row, head, query index, key index) that masks and biases are; and the class `Mask`.

A rule is a frozen value that does not depend on any length until it is bound. `rule.bind(nq, nk, device, dtype)` is
a function `f(b, h, i, j)` of integer index tensors that broadcast against each other. That one function serves a dense
matrix, a single tile and FlexAttention's `mask_mod`. A mask is a rule of booleans with bounds per tile; masks combine
by `&`, `|` and `~`.

Axis letters here and everywhere: B batch, H heads, N positions (Nq queries, Nk keys), D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from operator import and_, or_
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.checks import Number, is_tracing, number, numbers

IndexRule = Callable[[Any, Any, Any, Any], Any]
"""A bound rule: f(b, h, i, j) on broadcasting integer index tensors."""

EMPTY, PARTIAL, FULL = 0, 1, 2
"""The values of `Mask.tiles`."""

CPU = torch.device("cpu")
Bounds = tuple[Tensor, Tensor]

Kept = TypeVar("Kept")
MOST_KEPT = 64  # results that `keep` holds for rules without tensors
_KEPT: dict[object, Any] = {}


class Rule(ABC):
    """A frozen value that can be evaluated at any (b, h, i, j) once lengths are known."""

    @abstractmethod
    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j) for Nq queries and Nk keys; `dtype` is that of the scores."""

    @property
    @abstractmethod
    def leading(self) -> tuple[int, int]:
        """(B, H) over which the rule varies; 1 where it is the same for all."""

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError if the rule cannot apply to a call of these sizes."""
        own_batch, own_heads = self.leading
        if own_batch not in (1, batch):
            raise ValueError(f"{self!r} is for {own_batch} batch rows, but the call has {batch}")
        if own_heads not in (1, heads):
            raise ValueError(f"{self!r} is for {own_heads} heads, but the call has {heads}")

    def everywhere(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The bound function at every (b, h, i, j), as (B or 1, H or 1, Nq or 1, Nk or 1): O(N²) where both matter."""
        i, j = torch.arange(nq, device=device), torch.arange(nk, device=device)
        cells: Tensor = self.bind(nq, nk, device, dtype)(*indices(*self.leading, i, j, device))
        return cells[(None,) * (4 - cells.ndim)]

    def _matrix(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(Nq, Nk), or (B or 1, H or 1, Nq, Nk) where the rule differs by batch row or head."""
        batch, heads = self.leading
        i, j = torch.arange(nq, device=device), torch.arange(nk, device=device)
        cells = self.bind(nq, nk, device, dtype)(*indices(batch, heads, i, j, device))
        cells = torch.as_tensor(cells, device=device).expand(batch, heads, nq, nk)
        return cells if batch * heads > 1 else cells[0, 0]

    @cached_property
    def form(self) -> str:
        """The rule without its numbers: two rules of one form can run through one compiled kernel.

        A "?" marks what the form does not pin down: a class from elsewhere, or a field that is not plain data.
        """
        kind = type(self)
        name = kind.__name__ if kind.__module__.startswith("regard.") else f"?{kind.__module__}.{kind.__qualname__}"
        return f"{name}({', '.join(_form(value) for value in _values(self))})"

    @cached_property
    def holds_tensors(self) -> bool:
        """Whether comparing it with another rule reads tensors, which on a GPU waits for everything before."""
        return any(isinstance(v, Tensor) for v in leaves(self))

    @property
    def kept(self) -> dict[object, Any]:
        """What backends keep with this rule, for as long as it lives and until one of its tensors is written to."""
        if not torch.compiler.is_compiling():
            versions = [t._version for t in self._counting]
            if versions != self._versions:
                self._kept.clear()
                self._versions[:] = versions
        return self._kept

    @cached_property
    def _kept(self) -> dict[object, Any]:
        return {}

    @cached_property
    def _versions(self) -> list[int]:
        return [t._version for t in self._counting]

    @cached_property
    def _counting(self) -> tuple[Tensor, ...]:
        return tuple(v for v in leaves(self) if isinstance(v, Tensor) and not v.is_inference())

    @cached_property
    def never_stale(self) -> bool:
        """Whether it can be a key, and all of its tensors count writes: those made in inference mode do not."""
        try:
            hash(self)
            return not any(isinstance(v, Tensor) and v.is_inference() for v in leaves(self))
        except TypeError:  # a rule from elsewhere that is no frozen dataclass
            return False

    @cached_property
    def constants(self) -> tuple[int | float, ...]:
        """The numbers that are not in tensors: a compiled kernel may hold them fixed."""
        return tuple(v for v in leaves(self) if isinstance(v, (int, float)))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return False
        return all(_same(a, b) for a, b in zip(_values(self), _values(other), strict=True))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Cached values stay behind: a hash holds in one process only.
        cached = ("_hash", "form", "constants", "holds_tensors", "_kept", "_versions", "_counting", "never_stale")
        return {name: value for name, value in vars(self).items() if name not in cached}

    @cached_property
    def _hash(self) -> int:
        # A tensor enters by its shape only: equal rules hash alike, and hashing never reads a device.
        return hash((type(self).__name__, *(tuple(v.shape) if isinstance(v, Tensor) else v for v in _values(self))))


def keep(rule: Rule, key: tuple[Any, ...], make: Callable[[], Kept]) -> Kept:
    """The result of `make()`, computed once for a rule and a key.

    >>> from regard.masks import causal
    >>> keep(causal(), ("rows", 3), lambda: [1, 2, 3]) is keep(causal(), ("rows", 3), lambda: [1, 2, 3])
    True

    Kept with the rule if that holds tensors, and freed with it; else in a table for equal rules, oldest removed first.
    key: hashable values: the owner's name, then what the result depends on.  make: returns anything but None.
    """
    if is_tracing():
        return make()
    kept, place = (rule.kept, key) if rule.holds_tensors else (_KEPT, (rule, *key))
    result = kept.get(place)  # one lookup: another thread may remove it at any time
    if result is None:
        with torch.inference_mode(False):  # a later call may differentiate with what is kept here
            result = make()
        while len(kept) >= MOST_KEPT:
            kept.pop(next(iter(kept)), None)
        kept[place] = result
    return cast(Kept, result)


def _values(rule: object) -> list[Any]:
    return [getattr(rule, f.name) for f in fields(rule)]  # type: ignore[arg-type]


def leaves(rule: Rule) -> list[Any]:
    """The fields of a rule and of the rules inside it."""
    return [leaf for v in _values(rule) for leaf in (leaves(v) if isinstance(v, Rule) else [v])]


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device)))
    return type(a) is type(b) and a == b


def _form(value: object) -> str:
    if isinstance(value, Rule):
        return value.form
    if isinstance(value, Tensor):  # which axes are shared decides how it is indexed
        return f"{value.dtype}{[n == 1 for n in value.shape]}"
    if isinstance(value, str):
        return value
    known = value is None or isinstance(value, (int, float, tuple))
    return type(value).__name__ if known else f"?{type(value).__name__}"


# ----------------------------------------------------------------------------------------- arguments and their shapes


def read_offset(value: object) -> Number | None:
    """Read an `offset=` argument, the position of query 0; None means Nk − Nq, so that the queries are the last."""
    return None if value is None else number("offset", value)


def fit_cells(name: str, cells: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Check that (…, Nq, Nk) cells broadcast to the weights' shape; return them with 4 axes (B, H, Nq, Nk)."""
    padded = (1,) * (len(shape) - cells.ndim) + tuple(cells.shape)
    if len(padded) != len(shape) or any(n not in (1, m) for n, m in zip(padded, shape, strict=True)):
        hint = ""
        if name == "mask" and cells.ndim == 2 and len(shape) > 2 and tuple(cells.shape) == (shape[0], shape[-1]):
            hint = ". It looks like one row of keys per batch row: use regard.masks.padding(mask)"
        raise ValueError(f"{name} of shape {tuple(cells.shape)} does not broadcast to the weights' shape {shape}{hint}")
    cells = cells.reshape(padded)
    if len(shape) <= 4:
        return cells if len(shape) == 4 else cast(Tensor, four_axes(cells))
    lead = shape[:-3]  # several batch axes become one
    return cells.expand(*lead, *cells.shape[-3:]).reshape(prod(lead), *cells.shape[-3:])


def size_or_one(name: str, sizes: Sequence[int]) -> int:
    """The common size of axes that broadcast.

    >>> size_or_one("batch", [1, 3, 1])
    3
    """
    size = 1
    for n in sizes:  # compared, not put into a set: a size that torch.compile leaves open would be fixed by its hash
        if n != 1 and size not in (1, n):
            raise ValueError(f"parts of one mask or bias disagree on {name}: {sorted((size, n))}")
        size = size if n == 1 else n
    return size


def leading_of(offset: Number | None) -> tuple[int, int]:
    """(B, H) over which an offset varies."""
    return (offset.shape[0], offset.shape[1]) if isinstance(offset, Tensor) else (1, 1)


# ------------------------------------------------------------------------------------------------- tables as functions


def at(value: Number, device: torch.device) -> Callable[[Any, Any], Any]:
    """A number as a function of (b, h)."""
    if isinstance(value, int):
        whole = value
        return lambda b, h: whole
    table = value.to(device)  # (B or 1, H or 1)
    return {
        (True, True): lambda b, h: table[0, 0],
        (False, True): lambda b, h: table[b, 0],
        (True, False): lambda b, h: table[0, h],
        (False, False): lambda b, h: table[b, h],
    }[(table.shape[0] == 1, table.shape[1] == 1)]


def place(offset: Number | None, nq: int, nk: int, device: torch.device) -> Callable[[Any, Any], Any]:
    """The position of query 0 as a function of (b, h)."""
    return at(nk - nq if offset is None else offset, device)


def row_of(table: Tensor) -> Callable[[Any, Any], Any]:
    """(B or 1, N) as a function of (b, n)."""
    return (lambda b, n: table[0, n]) if table.shape[0] == 1 else (lambda b, n: table[b, n])


def cell_of(table: Tensor) -> IndexRule:
    """(B or 1, H or 1, R or 1, C or 1) as a function of (b, h, r, c)."""
    ones = [n == 1 for n in table.shape]

    def cell(b: Any, h: Any, r: Any, c: Any) -> Any:
        zero = c * 0  # an index tensor on c's device, for axes that are shared
        return table[zero if ones[0] else b, zero if ones[1] else h, zero if ones[2] else r, zero if ones[3] else c]

    return cell


def part_of(table: Tensor, rows: slice, cols: slice) -> Tensor:
    """A tile of (B or 1, H or 1, R or 1, C or 1), as a view; an axis of 1 stays."""
    every = slice(None)
    return table[:, :, every if table.shape[2] == 1 else rows, every if table.shape[3] == 1 else cols]


def four_axes(x: Any) -> Any:
    """(N, D), (B, N, D) or (…, H, N, D) → (B, H, N, D), of a NumPy array or a tensor.

    >>> four_axes(np.zeros((3, 5, 7))).shape
    (3, 1, 5, 7)
    """
    if x.ndim < 4:
        return x[None, None] if x.ndim == 2 else x[:, None]
    return x.reshape(prod(x.shape[:-3]), *x.shape[-3:])


def indices(
    batch: int, heads: int, rows: Tensor, cols: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, i, j, shaped to broadcast to (B, H, rows, cols)."""
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(-1, 1, 1)
    return b, h, rows.view(-1, 1), cols


# ---------------------------------------------------------------------------------------------------------------- masks


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
        # Not vars(self), which torch.compile cannot read before torch 2.13.
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        shapes = [v.shape for v in values if isinstance(v, Tensor)]
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
