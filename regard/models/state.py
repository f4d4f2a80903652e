"""Where a generation stands: the keys and values of every layer, who is padding, and an encoder's memory.

It knows towers, and neither heads nor how tokens are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.cache import FixedCache
from regard.layers import ContextKeys
from regard.models.parts import Tower

__all__ = ["State"]


@dataclass(eq=False)
class State:
    """Room for a number of positions, taken once.

    caches: one for each depth.  mask: (B, positions so far), True = token, or None where nothing is padding.
    memory, memory_mask: keys of an encoder's memory for each depth, and which of them are tokens.
    """

    caches: list[FixedCache]
    mask: Tensor | None
    memory: list[ContextKeys] | None = None
    memory_mask: Tensor | None = None

    @classmethod
    def room(
        cls, tower: Tower, batch: int, length: int, mask: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> State:
        """Room for `length` positions of `batch` texts."""
        sizes = [(block.attention.kv_heads, block.attention.head_dim) for block in tower.depth]
        caches = [FixedCache(batch, heads, length, d, dtype=dtype, device=device) for heads, d in sizes]
        return cls(caches, mask)

    def __len__(self) -> int:
        return len(self.caches[0])

    def see(self, batch: int) -> None:
        """One more token in every row."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(batch, 1)], 1)

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; the number of rows may change."""
        for cache in self.caches:
            cache.keep(rows)
        self.mask = None if self.mask is None else self.mask[rows]
        if self.memory is not None:
            self.memory = [ContextKeys(k[rows], v[rows]) for k, v in self.memory]
        self.memory_mask = None if self.memory_mask is None else self.memory_mask[rows]
