"""Keys and values kept between calls, so that a decoder computes each position once.

    >>> cache = GrowingCache()
    >>> k, v = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    >>> k, v = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    >>> k.shape, len(cache)
    (torch.Size([1, 2, 4, 4]), 4)

What comes back holds exactly what was put in, in order. The new queries are the last positions, which is what
`masks.causal()` assumes. `Cache` is the protocol of anything that a layer keeps; these two keep keys and values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Cache", "FixedCache", "GrowingCache", "KeyValueCache"]


class Cache(Protocol):
    """What an attention layer keeps of earlier positions, in its own form: keys and values, or sums over them.

    holds_padding: do hidden positions stay in it, so that every later call must hide them again?
    """

    holds_padding: bool

    def __len__(self) -> int:
        """Positions so far."""

    @property
    def nbytes(self) -> int:
        """Bytes taken."""

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; their number may change."""


class GrowingCache:
    """Grows by concatenation: any length, differentiable, one copy of everything per step.

    >>> cache = GrowingCache()
    >>> k, v = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    >>> cache.crop(2)
    >>> cache, cache.nbytes
    (GrowingCache(2 positions), 128)
    """

    holds_padding = True

    def __init__(self) -> None:
        self._k: Tensor | None = None  # (B, Hkv, N, D)
        self._v: Tensor | None = None  # (B, Hkv, N, Dv)

    def __len__(self) -> int:
        return 0 if self._k is None else self._k.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that it holds."""
        return 0 if self._k is None or self._v is None else self._k.nbytes + self._v.nbytes

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep further keys (B, Hkv, n, D) and values (B, Hkv, n, Dv); return all of them, oldest first.

        Raises ValueError where they do not continue what is kept.
        """
        _check_pair(k, v)
        if self._k is not None and self._v is not None:
            for name, old, new in (("keys", self._k, k), ("values", self._v, v)):
                _check_continues(name, old, new)
            self._k, self._v = torch.cat([self._k, k], -2), torch.cat([self._v, v], -2)
        else:
            self._k, self._v = k.clone(), v.clone()  # ours: what the caller does to k later does not reach us
        return self._k, self._v

    def crop(self, length: int) -> None:
        """Forget all but the first `length` positions."""
        _check_crop(length, len(self))
        if self._k is not None and self._v is not None:
            self._k, self._v = (self._k[:, :, :length], self._v[:, :, :length]) if length else (None, None)

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]: beams that branch, finished texts that leave.

        Raises TypeError unless rows are whole numbers.
        """
        _check_rows(rows)
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k[rows], self._v[rows]

    def clear(self) -> None:
        """Forget everything."""
        self.crop(0)

    def __repr__(self) -> str:
        return f"GrowingCache({len(self)} positions)"


class FixedCache:
    """Room for `length` positions taken once: no copying, constant addresses, inference only.

    >>> cache = FixedCache(batch=1, num_kv_heads=2, length=8, head_dim=4)
    >>> k, v = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    >>> k.shape, cache.nbytes
    (torch.Size([1, 2, 3, 4]), 512)

    num_kv_heads: key/value heads.  value_dim: width of the values, default head_dim.
    """

    holds_padding = True

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        length: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        wide = head_dim if value_dim is None else value_dim
        for name, n in (
            ("batch", batch),
            ("num_kv_heads", num_kv_heads),
            ("length", length),
            ("head_dim", head_dim),
            ("value_dim", wide),
        ):
            if n < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")
        self._k = torch.empty(batch, num_kv_heads, length, head_dim, dtype=dtype, device=device)
        self._v = torch.empty(batch, num_kv_heads, length, wide, dtype=dtype, device=device)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def length(self) -> int:
        """Positions there is room for."""
        return self._k.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return self._k.nbytes + self._v.nbytes

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep further keys (B, Hkv, n, D) and values (B, Hkv, n, Dv); return all of them, oldest first, as views.

        Raises ValueError where they do not fit or there is no room left, before anything is written.
        """
        _check_pair(k, v)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "FixedCache writes in place, which autograd cannot follow: use torch.no_grad(), or a GrowingCache"
            )
        for name, room, new in (("keys", self._k, k), ("values", self._v, v)):
            _check_continues(name, room, new)
        end = self._used + k.shape[-2]
        if end > self.length:
            raise ValueError(f"no room: {self._used} of {self.length} positions are used and {k.shape[-2]} more came")
        self._k[:, :, self._used : end], self._v[:, :, self._used : end] = k, v
        self._used = end
        return self._k[:, :, :end], self._v[:, :, :end]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` positions, and keep the room."""
        _check_crop(length, self._used)
        self._used = length

    @property
    def room(self) -> tuple[Tensor, Tensor]:
        """All of it, keys and values (B, Hkv, length, D), used or not: for a kernel that writes by itself."""
        return self._k, self._v

    def advance(self, count: int) -> None:
        """Count positions as used that a kernel wrote by itself. Raises ValueError if there is no such room."""
        if not 0 <= count <= self.length - self._used:
            raise ValueError(f"no room: {self._used} of {self.length} positions are used and {count} more came")
        self._used += count

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]: beams that branch, finished texts that leave. Their number may change.

        With as many rows as before the addresses stay, and only what is used is copied.
        Raises TypeError unless rows are whole numbers.
        """
        _check_rows(rows)
        if len(rows) != len(self._k):
            self._k, self._v = self._k[rows], self._v[rows]
            return
        for room in (self._k, self._v):
            room[:, :, : self._used] = room[:, :, : self._used][rows]

    def clear(self) -> None:
        """Forget everything and keep the room."""
        self.crop(0)

    def __repr__(self) -> str:
        return f"FixedCache({self._used} of {self.length} positions, {self.nbytes} bytes)"


KeyValueCache = GrowingCache | FixedCache
"""What `MultiHeadAttention` keeps."""


def _check_pair(k: Tensor, v: Tensor) -> None:
    if k.ndim != 4 or v.ndim != 4 or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            "a cache takes keys (B, Hkv, n, D) and values (B, Hkv, n, Dv) of the same B, Hkv and n; "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )


def _check_rows(rows: Tensor) -> None:
    """Refuse a mask of rows: where one is as long as the batch, its number of rows is not its length."""
    if rows.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"rows must be whole numbers, int64 or int32, which say what each row becomes; got {rows.dtype}"
            + ("; of a mask, mask.nonzero()[:, 0] gives them" if rows.dtype == torch.bool else "")
        )


def _check_crop(length: int, used: int) -> None:
    if not 0 <= length <= used:
        raise ValueError(f"cannot keep the first {length} positions: the cache holds {used}")


def _check_continues(name: str, old: Tensor, new: Tensor) -> None:
    for what, axis in (("batch", 0), ("heads", 1), ("width", 3)):
        if old.shape[axis] != new.shape[axis]:
            raise ValueError(f"{name} have {what} {new.shape[axis]}, but the cache has {old.shape[axis]}")
    if old.dtype != new.dtype or old.device != new.device:
        raise ValueError(
            f"{name} are {new.dtype} on {new.device}, but the cache is {old.dtype} on {old.device}{_remedy(new)}"
        )


def _remedy(new: Tensor) -> str:
    """What to do where autocast chose the dtype of what came; else nothing."""
    kind = new.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return ""
    if torch.get_autocast_dtype(kind) != new.dtype:
        return ""
    return f": autocast is on, so make the cache in {new.dtype}, and fill it under autocast from the beginning"
