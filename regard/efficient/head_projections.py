"""W_Q, W_K, W_V and W_O around an attention: x (B, N, d_model) to heads and back.

The names and shapes are those of `regard.layers.MultiHeadAttention` with separate projections, so that its weights load
here. This file does not know what happens between the heads' queries and keys.

Axis letters: B batch, H heads (Hkv of keys and values), N positions (M of a context), D head size.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from regard.layers import ContextKeys, Linear

__all__ = ["HeadProjections"]


class HeadProjections(nn.Module):
    """The linear maps of a layer that attends in its own way; the layer itself says how, in its `forward`.

    >>> import torch
    >>> maps = HeadProjections(6, 2, kv_heads=1, head_dim=None, bias=True, out_bias=True, values_are_keys=False)
    >>> q, (k, v) = maps.queries(torch.zeros(1, 5, 6)), maps.keys(torch.zeros(1, 7, 6))
    >>> q.shape, k.shape
    (torch.Size([1, 2, 5, 3]), torch.Size([1, 1, 7, 3]))

    d_model, heads, kv_heads, head_dim, bias, out_bias: as in `MultiHeadAttention`.
    values_are_keys: one map for both, and no W_V (the linformer package's share_kv).

    Raises ValueError for sizes below 1 or that do not divide.
    """

    w_v: Linear | None

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None,
        head_dim: int | None,
        bias: bool,
        out_bias: bool | None,
        values_are_keys: bool,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        _check_sizes(d_model, heads, kv_heads, head_dim)
        self.d_model, self.heads, self.kv_heads = d_model, heads, kv_heads
        self.head_dim = d_model // heads if head_dim is None else head_dim
        wide, narrow = heads * self.head_dim, kv_heads * self.head_dim
        self.w_q, self.w_k = Linear(d_model, wide, bias), Linear(d_model, narrow, bias)
        self.w_v = None if values_are_keys else Linear(d_model, narrow, bias)
        self.w_o = Linear(wide, d_model, bias if out_bias is None else out_bias)

    def queries(self, x: Tensor) -> Tensor:
        """q (B, H, N, D) of x (B, N, d_model). Raises ValueError for another width."""
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must be (B, N, {self.d_model}) or (N, {self.d_model}), got {tuple(x.shape)}")
        return self._split(self.w_q(x), self.heads)

    def keys(self, context: Tensor) -> ContextKeys:
        """Keys and values (B, Hkv, M, D) of a context (B, M, d_model), made once for many calls to look at."""
        if context.ndim != 3 or context.shape[-1] != self.d_model:
            raise ValueError(f"context must be (B, M, {self.d_model}), got {tuple(context.shape)}")
        k = self._split(self.w_k(context), self.kv_heads)
        return ContextKeys(k, k if self.w_v is None else self._split(self.w_v(context), self.kv_heads))

    def looked_at(self, x: Tensor, context: Tensor | ContextKeys | None) -> ContextKeys:
        """The keys and values that x (B, N, d_model) looks at: its own, a context's, or those that come ready."""
        kv = context if isinstance(context, ContextKeys) else self.keys(x if context is None else context)
        if len(kv.k) != len(x):
            raise ValueError(f"x has {len(x)} batch rows, but the context has {len(kv.k)}")
        return kv

    def joined(self, out: Tensor) -> Tensor:
        """Heads (B, H, N, D) side by side through W_O, (B, N, d_model)."""
        return cast(Tensor, self.w_o(out.transpose(1, 2).flatten(2)))

    def _split(self, y: Tensor, heads: int) -> Tensor:
        """(B, N, h·D) → (B, h, N, D)."""
        return y.reshape(*y.shape[:-1], heads, self.head_dim).transpose(1, 2)


def _check_sizes(d_model: int, heads: int, kv_heads: int, head_dim: int | None) -> None:
    for name, n in (("d_model", d_model), ("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if n is not None and n < 1:
            raise ValueError(f"{name} must be at least 1, got {n}")
    if head_dim is None and d_model % heads:
        raise ValueError(f"d_model {d_model} does not divide by {heads} heads; give head_dim= to choose another size")
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads: {heads} heads, {kv_heads} kv_heads")
