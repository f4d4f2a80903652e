"""Keys and values kept between calls, so that a decoder computes each position once.

    >>> cache = GrowingCache()
    >>> k, v = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    >>> k, v = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    >>> k.shape, len(cache)
    (torch.Size([1, 2, 4, 4]), 4)

`append` returns everything that was put in, in order. The new queries are the last positions, as `masks.causal()`
assumes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Cache", "FixedCache", "GrowingCache", "KeyValueCache"]


class Cache(Protocol):
    """What an attention layer keeps of earlier positions: keys and values, or sums over them.

    holds_padding: whether hidden positions stay in it, so that every later call must hide them again.
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
        self._kv: tuple[Tensor, Tensor] | None = None  # (B, Hkv, N, D) and (B, Hkv, N, Dv)

    def __len__(self) -> int:
        return 0 if self._kv is None else self._kv[0].shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that it holds."""
        return 0 if self._kv is None else sum(x.nbytes for x in self._kv)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep further keys (B, Hkv, n, D) and values (B, Hkv, n, Dv); return all of them, oldest first.

        Raises:
            ValueError: they do not continue what is kept.
        """
        _check_append(self._kv, k, v)
        if self._kv is None:
            self._kv = k.clone(), v.clone()  # ours: later changes to k by the caller do not reach them
        else:
            self._kv = torch.cat([self._kv[0], k], -2), torch.cat([self._kv[1], v], -2)
        return self._kv

    def crop(self, length: int) -> None:
        """Forget all but the first `length` positions."""
        _check_crop(length, len(self))
        if self._kv is not None:
            self._kv = (self._kv[0][:, :, :length], self._kv[1][:, :, :length]) if length else None

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i], as beams branch and finished texts leave.

        Raises:
            TypeError: rows are not integers.
        """
        _check_rows(rows)
        if self._kv is not None:
            self._kv = self._kv[0][rows], self._kv[1][rows]

    def clear(self) -> None:
        """Forget everything."""
        self.crop(0)

    def __repr__(self) -> str:
        return f"GrowingCache({len(self)} positions)"


class FixedCache:
    """Room for `length` positions allocated once: no copying, constant addresses, inference only.

    >>> cache = FixedCache(batch=1, num_kv_heads=2, length=8, head_dim=4)
    >>> k, v = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    >>> k.shape, cache.nbytes
    (torch.Size([1, 2, 3, 4]), 512)

    Args:
        batch: rows of the batch.
        num_kv_heads: key/value heads.
        length: positions there is room for.
        head_dim: width of the keys.
        value_dim: width of the values; default head_dim.
        dtype: of keys and values.
        device: of keys and values.

    Raises:
        ValueError: a size below 1.
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
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "length": length}
        for name, n in (sizes | {"head_dim": head_dim, "value_dim": value_dim}).items():
            if n < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")
        self._k = torch.empty(batch, num_kv_heads, length, head_dim, dtype=dtype, device=device)
        self._v = torch.empty(batch, num_kv_heads, length, value_dim, dtype=dtype, device=device)
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

    @property
    def room(self) -> tuple[Tensor, Tensor]:
        """The whole buffers (B, Hkv, length, D), used or not: for a kernel that writes by itself."""
        return self._k, self._v

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep further keys (B, Hkv, n, D) and values (B, Hkv, n, Dv); return all of them, oldest first, as views.

        Raises:
            ValueError: they do not fit or there is no room left; nothing is written then.
        """
        _check_append(self.room, k, v)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "FixedCache writes in place, which autograd cannot follow: use torch.no_grad(), or a GrowingCache"
            )
        start = self._used
        self.advance(k.shape[-2])
        self._k[:, :, start : self._used], self._v[:, :, start : self._used] = k, v
        return self._k[:, :, : self._used], self._v[:, :, : self._used]

    def advance(self, count: int) -> None:
        """Count positions as used that a kernel wrote by itself.

        Raises:
            ValueError: there is not so much room.
        """
        if not 0 <= count <= self.length - self._used:
            raise ValueError(f"no room: {self._used} of {self.length} positions are used and {count} more came")
        self._used += count

    def crop(self, length: int) -> None:
        """Forget all but the first `length` positions, and keep the room."""
        _check_crop(length, self._used)
        self._used = length

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i], as beams branch and finished texts leave. Their number may change.

        With as many rows as before the addresses stay, and only what is used is copied.

        Raises:
            TypeError: rows are not integers.
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
"""The caches of `MultiHeadAttention`."""


def _check_rows(rows: Tensor) -> None:
    if rows.dtype not in (torch.int64, torch.int32):  # of a mask as long as the batch, the number of rows is unclear
        raise TypeError(
            f"rows must be integers, int64 or int32, the old row of each new one; got {rows.dtype}"
            + ("; of a mask, mask.nonzero()[:, 0] gives them" if rows.dtype == torch.bool else "")
        )


def _check_crop(length: int, used: int) -> None:
    if not 0 <= length <= used:
        raise ValueError(f"cannot keep the first {length} positions: the cache holds {used}")


def _check_append(kept: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor) -> None:
    if k.ndim != 4 or v.ndim != 4 or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            "a cache takes keys (B, Hkv, n, D) and values (B, Hkv, n, Dv) of the same B, Hkv and n; "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    for name, old, new in () if kept is None else (("keys", kept[0], k), ("values", kept[1], v)):
        for what, axis in (("batch", 0), ("heads", 1), ("width", 3)):
            if old.shape[axis] != new.shape[axis]:
                raise ValueError(f"{name} have {what} {new.shape[axis]}, but the cache has {old.shape[axis]}")
        if old.dtype != new.dtype or old.device != new.device:
            kind, hint = new.device.type, ""
            autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
            if autocast and torch.get_autocast_dtype(kind) == new.dtype:
                hint = f": autocast is on, so make the cache in {new.dtype}, and fill it under autocast from the start"
            raise ValueError(
                f"{name} are {new.dtype} on {new.device}, but the cache is {old.dtype} on {old.device}{hint}"
            )
