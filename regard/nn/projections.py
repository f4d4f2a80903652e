"""Projections to and from heads, shared by Linformer and Performer."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.masks.dense import as_mask
from regard.masks.mask import And, Mask
from regard.masks.positional import Causal
from regard.masks.rules import indices
from regard.nn.attention import ContextKeys, MultiHeadAttention, check_head_sizes, split
from regard.nn.linear import Joined, Linear, part, whole_output


class HeadProjections(nn.Module):
    """The projections of a layer that is not softmax attention: base class of Linformer and Performer.

    >>> import torch
    >>> maps = HeadProjections(6, 2, num_kv_heads=1, head_dim=None, bias=True, out_bias=True)
    >>> q, (k, v) = maps.queries(torch.zeros(1, 5, 6)), maps.keys(torch.zeros(1, 7, 6))
    >>> q.shape, k.shape
    (torch.Size([1, 2, 5, 3]), torch.Size([1, 1, 7, 3]))

    d_model, num_heads, num_kv_heads, head_dim, bias, out_bias, fused, head_norms: as in `MultiHeadAttention`.
    values_are_keys: one map for both, and no W_V (the linformer package's share_kv).

    Raises TypeError for sizes that are not integers, ValueError for sizes below 1 or that do not divide, and for
    fused projections where values are keys.
    """

    w_v: Linear | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None,
        head_dim: int | None,
        bias: bool,
        out_bias: bool | None,
        fused: bool = False,
        head_norms: tuple[nn.Module, nn.Module] | None = None,
        values_are_keys: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_head_sizes(d_model, num_heads, num_kv_heads, head_dim)
        if fused and values_are_keys:
            raise ValueError("fused projections have a W_V: leave out fused=, or values_are_keys=")
        self.d_model, self.num_heads, self.num_kv_heads, self.fused = d_model, num_heads, num_kv_heads, fused
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        wide, narrow = num_heads * self.head_dim, num_kv_heads * self.head_dim
        if fused:
            self.w_qkv = Joined(d_model, (wide, narrow, narrow), bias=bias)
        else:
            self.w_q, self.w_k = Linear(d_model, wide, bias), Linear(d_model, narrow, bias)
            self.w_v = None if values_are_keys else Linear(d_model, narrow, bias)
        self.w_o = Linear(wide, d_model, bias if out_bias is None else out_bias)
        self.q_norm, self.k_norm = (None, None) if head_norms is None else head_norms

    def take_over(self, layer: MultiHeadAttention) -> None:
        """Use the very projections and norms of a layer of the same sizes: its parameters are shared, not copied."""
        for name in ("w_qkv",) if self.fused else ("w_q", "w_k", "w_v"):
            setattr(self, name, getattr(layer, name))
        self.w_o, self.q_norm, self.k_norm = layer.w_o, layer.q_norm, layer.k_norm

    def queries(self, x: Tensor) -> Tensor:
        """q (B, H, N, D) of x (B, N, d_model). Raises ValueError for another width."""
        self._check_x(x)
        q = part(self.w_qkv, self._rows, x, 0, self.num_heads * self.head_dim) if self.fused else self.w_q(x)
        return self._split(q, self.num_heads, self.q_norm)

    def keys(self, context: Tensor) -> ContextKeys:
        """Keys and values (B, Hkv, M, D) of a context (B, M, d_model), made once for many calls to look at."""
        if context.ndim != 3 or context.shape[-1] != self.d_model:
            raise ValueError(f"context must be (B, M, {self.d_model}), got {tuple(context.shape)}")
        if self.fused:
            wide, narrow, _ = self._rows
            return self._pair(*part(self.w_qkv, self._rows, context, wide, wide + 2 * narrow).chunk(2, -1))
        return self._pair(self.w_k(context), None if self.w_v is None else self.w_v(context))

    def looked_at(self, x: Tensor, context: Tensor | ContextKeys | None) -> ContextKeys:
        """The keys and values that x (B, N, d_model) looks at: its own, a context's, or those that come ready."""
        kv = context if isinstance(context, ContextKeys) else self.keys(x if context is None else context)
        if len(kv.k) != len(x):
            raise ValueError(f"x has {len(x)} batch rows, but the context has {len(kv.k)}")
        return kv

    def projected(self, x: Tensor, context: Tensor | ContextKeys | None) -> tuple[Tensor, ContextKeys]:
        """The queries (B, H, N, D) of x, and the keys and values it looks at: one product where maps are fused."""
        if not self.fused or context is not None:
            return self.queries(x), self.looked_at(x, context)
        self._check_x(x)
        q, k, v = torch.split(whole_output(self.w_qkv, x, sum(self._rows)), list(self._rows), -1)
        return self._split(q, self.num_heads, self.q_norm), self._pair(k, v)

    def joined(self, out: Tensor) -> Tensor:
        """Heads (B, H, N, D) side by side through W_O, (B, N, d_model)."""
        return cast(Tensor, self.w_o(out.transpose(1, 2).flatten(2)))

    def _pair(self, k: Tensor, v: Tensor | None) -> ContextKeys:
        """(B, M, Hkv·D) each → (B, Hkv, M, D); without values they are the keys, before any norm."""
        values = k if v is None else v
        return ContextKeys(self._split(k, self.num_kv_heads, self.k_norm), self._split(values, self.num_kv_heads))

    def _split(self, y: Tensor, num_heads: int, norm: nn.Module | None = None) -> Tensor:
        """(B, N, h·D) → (B, h, N, D). Raises ValueError for some of the heads: they share learnt and kept numbers."""
        if y.shape[-1] != num_heads * self.head_dim:
            raise ValueError(
                f"a projection of a {type(self).__name__} gave {y.shape[-1]} features and not {num_heads} heads of "
                f"{self.head_dim}: its heads cannot be split over processes"
            )
        return split(y, self.head_dim, norm)

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of query, key and value in w_qkv."""
        narrow = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, narrow, narrow

    def _check_x(self, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must be (B, N, {self.d_model}) or (N, {self.d_model}), got {tuple(x.shape)}")


class KeyMask(NamedTuple):
    """Which keys are seen: `real` (B or 1, Nk) booleans or None for all; `causal`: none that lies ahead."""

    real: Tensor | None
    causal: bool


def read_key_mask(mask: object, batch: int, num_heads: int, nq: int, nk: int, device: torch.device) -> KeyMask:
    """Read a mask as padding, causal, or both.

    >>> from regard.masks import causal, padding
    >>> read_key_mask(causal() & padding([2]), 1, 1, 3, 3, torch.device("cpu"))
    KeyMask(real=tensor([[ True,  True, False]]), causal=True)

    mask: a mask, booleans that broadcast to (B, H, Nq, Nk), or None.
    batch, num_heads, nq, nk: the sizes of the call.

    Raises ValueError for a mask that hides different keys from different queries otherwise than causally.
    """
    given = as_mask(mask, (batch, num_heads, nq, nk))
    if given is None:
        return KeyMask(None, False)
    given.fit(batch, num_heads, nq, nk)
    causal, real = False, None
    for mask_part in _parts(given):
        if isinstance(mask_part, Causal):
            last = mask_part.offset is None or mask_part.offset == nk - nq  # a tensor for offsets (B, 1 or H)
            if not (bool(last.all()) if isinstance(last, Tensor) else last):
                raise ValueError(
                    f"{mask_part!r} is not for linear attention: its queries are always the last {nq} of {nk} "
                    "positions. Use masks.causal() without an offset"
                )
            causal = True
        else:
            row = _one_row(mask_part, nq, nk, device)  # (B or 1, Nk)
            real = row if real is None else real & row
    return KeyMask(real, causal)


def _parts(mask: Mask) -> list[Mask]:
    return [*_parts(mask.left), *_parts(mask.right)] if isinstance(mask, And) else [mask]


def _one_row(mask: Mask, nq: int, nk: int, device: torch.device) -> Tensor:
    """(B or 1, Nk): the keys of a mask that is the same for every query and head."""
    if nq == 0 or nk == 0:
        return torch.ones(1, nk, dtype=torch.bool, device=device)
    # The first query, twice: a rule that reads the query's index answers with two rows, any other with one.
    twice, keys = torch.zeros(2, dtype=torch.long, device=device), torch.arange(nk, device=device)
    see = mask.bind(nq, nk, device, torch.float32)
    cells: Tensor = see(*indices(*mask.leading, twice, keys, device))
    cells = cells[(None,) * (4 - cells.ndim)]  # (B or 1, H or 1, 1 or 2, Nk or 1)
    if cells.shape[2] != 1 or cells.shape[1] != 1:
        raise ValueError(
            f"{mask!r} hides different keys from different queries or heads, which linear attention cannot: it sums "
            "over the keys before it meets a query. It takes masks.padding(…), and Performer masks.causal() as well"
        )
    return cells[:, 0, 0].expand(-1, nk)
