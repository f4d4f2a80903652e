"""What a block asks of its attention, whichever it is: to attend, and to say what a decoder keeps of it.

`regard.layers.MultiHeadAttention` and what derives from it, `PerformerAttention` and `LinformerAttention` offer it.
This file knows none of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from regard.cache import Cache
from regard.layers import ContextKeys
from regard.rotary import Angles

__all__ = ["AttentionLayer"]


class AttentionLayer(Protocol):
    """A module that attends within x, or to a context.

    d_model: width of x and of the result.  heads: query heads.
    dropout: on the weights, in training only; 0 for a layer that makes none.
    """

    d_model: int
    heads: int
    dropout: float

    def __call__(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None = None,
        *,
        mask: object = None,
        cache: Cache | None = None,
        positions: Tensor | Angles | None = None,
    ) -> Tensor:
        """x (B, N, d_model) looks at itself, or at a context; the result is (B, N, d_model).

        cache: one of the layer's own `new_cache`, which x continues.
        """

    def keys(self, context: Tensor) -> ContextKeys:
        """Keys and values of context (B, M, ·), made once for many calls to look at."""

    def new_cache(self, batch: int, length: int, *, dtype: torch.dtype, device: torch.device | str) -> Cache:
        """What a decoder keeps of this layer for `length` positions of `batch` texts, still empty.

        dtype, device: of the keys. Raises ValueError for a layer that cannot go on step by step.
        """
