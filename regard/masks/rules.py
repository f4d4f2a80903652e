"""Rules: functions of (batch row, head, query index, key index), the common base of masks and biases.

A rule is a frozen value that does not depend on any length until it is bound. `rule.bind(nq, nk, device, dtype)` is
a function `f(b, h, i, j)` of integer index tensors that broadcast against each other. That one function serves a dense
matrix, a single tile and FlexAttention's `mask_mod`.

Axis letters here and everywhere: B batch, H heads, N positions (Nq queries, Nk keys), D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from math import prod
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from regard.checks import followed

IndexRule = Callable[[Any, Any, Any, Any], Any]
"""A bound rule: f(b, h, i, j) on broadcasting integer index tensors."""

Number = int | Tensor
"""One integer for all, or a (B or 1, H or 1) tensor of them."""

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
    if followed():
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


# ------------------------------------------------------------------------------------------------------------ arguments


def numbers(name: str, value: object) -> Tensor:
    """Copy numbers or booleans from a list, a NumPy array or a tensor into a tensor of our own.

    >>> numbers("lengths", np.array([3, 2, 1])[::-1]).tolist()
    [1, 2, 3]
    """
    if isinstance(value, Tensor):
        return value.detach().clone() if value.requires_grad else value.clone()
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str):
        raise TypeError(f"{name} must be a list, a NumPy array or a tensor, got {type(value).__name__}: {value!r}")
    try:
        array = np.array(value)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as problem:  # ragged lists, lists of tensors or of strings
        raise TypeError(f"{name} must hold numbers or booleans in a regular shape: {problem}") from None


def are_integers(values: Tensor) -> bool:
    """Whether the dtype is an integer one."""
    return not (values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool)


def number(name: str, value: object, least: int | None = None) -> Number:
    """Read an integer argument: one for all, one per batch row (B,), or one per row and head (B or 1, H or 1).

    >>> number("before", 3)
    3
    >>> number("offset", [0, 4]).shape
    torch.Size([2, 1])
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        result: Number = int(value)
    elif isinstance(value, (Sequence, np.ndarray, Tensor)) and not isinstance(value, str):
        result = numbers(name, value)
        if result.ndim not in (1, 2) or result.numel() == 0:
            raise ValueError(
                f"{name} must be one integer, one per batch row (B,), or one per row and head (B or 1, H or 1); "
                f"got shape {tuple(result.shape)}"
            )
        if not are_integers(result):
            raise TypeError(f"{name} must hold integers, got {result.dtype}")
        result = result.long().reshape(result.shape[0], -1)  # (B, 1) or (B, H)
    else:
        raise TypeError(f"{name} must be an integer or integers, got {type(value).__name__}: {value!r}")
    if least is not None and (result if isinstance(result, int) else int(result.min())) < least:
        shown = result if isinstance(result, int) else result.tolist()
        raise ValueError(f"{name} must be at least {least}, got {shown}")
    return result


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
