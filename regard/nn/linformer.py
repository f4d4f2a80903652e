"""Linformer (Wang et al. 2020): the n keys and values are mixed into k slots, and queries attend to the slots.

    k (B, H, n, D) ─ Eᵀ → (B, H, slots, D)        v ─ Fᵀ → (B, H, slots, D)        softmax(q·(Eᵀk)ᵀ·scale)·(Fᵀv)

E and F are learnt, (positions, slots). Time and memory are O(n·slots). A slot holds something of every position, so
there is no causal Linformer. The attention over slots is `regard.attention`: `regard.watch` sees it, over slots.

Axis letters: B batch, H heads (Hkv of keys and values), N positions (M of a context), D head size.
"""

from __future__ import annotations

from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor, nn

from regard.checks import check_int
from regard.nn.attention import MultiHeadAttention, check_weights
from regard.nn.feature_maps import read_key_mask
from regard.nn.projections import ContextKeys, HeadOptions, LinearAttention
from regard.op import attention

NO_CACHE = (
    "Linformer keeps no cache: a slot mixes all positions, later ones too. PerformerAttention decodes step by step"
)


class SlotProjection(nn.Module):
    """The matrices E and F that mix positions into slots; several layers may share one of these.

    >>> SlotProjection(4096, 256).keys.shape
    torch.Size([4096, 256])

    Args:
        positions: the longest sequence; shorter ones use the first rows.
        slots: how many keys remain.
        num_heads: 1 for one pair of matrices for all heads (the paper's "headwise" sharing), or the layer's
            num_kv_heads for a pair each.
        key_value: one matrix for keys and values (the paper's "key-value" sharing; with one module for all layers its
            "layerwise").

    Raises:
        TypeError: a size that is not an integer.
        ValueError: a size below 1.
    """

    values: nn.Parameter | None

    def __init__(self, positions: int, slots: int, *, num_heads: int = 1, key_value: bool = False) -> None:
        super().__init__()
        for name, n in (("positions", positions), ("slots", slots), ("num_heads", num_heads)):
            check_int(name, n)
        self.positions, self.slots, self.num_heads, self.key_value = positions, slots, num_heads, key_value
        shape = (positions, slots) if num_heads == 1 else (num_heads, positions, slots)
        self.keys = nn.Parameter(torch.empty(shape))
        self.values = None if key_value else nn.Parameter(torch.empty(shape))
        for matrix in (self.keys, self.values):
            if matrix is not None and not matrix.is_meta:
                nn.init.uniform_(matrix, -(slots**-0.5), slots**-0.5)

    def forward(self, kv: ContextKeys, real: Tensor | None = None) -> ContextKeys:
        """Keys and values (B, Hkv, M, D) → (B, Hkv, slots, D).

        Args:
            kv: keys and values.
            real: (B or 1, M), True where a key counts; others enter every slot as 0.

        Raises:
            ValueError: more positions than the matrices have.
        """
        length = kv.k.shape[-2]
        if length > self.positions:
            raise ValueError(
                f"{length} positions came, but this projection has {self.positions}: cut the sequence, or make a "
                "SlotProjection for longer ones"
            )
        k, v = kv
        if real is not None:
            hidden = ~real[:, None, :, None]  # (B or 1, 1, M, 1)
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        e, f = self.keys, self.keys if self.values is None else self.values  # (positions, slots) or one for each head
        k = e[..., :length, :].to(k.dtype).transpose(-1, -2) @ k
        v = f[..., :length, :].to(v.dtype).transpose(-1, -2) @ v
        return ContextKeys(k, v)

    def extra_repr(self) -> str:
        """The arguments shown by `print(module)`."""
        return f"{self.positions} → {self.slots}, num_heads={self.num_heads}, key_value={self.key_value}"


class LinformerAttention(LinearAttention):
    """Multi-head attention over slots, in the place of `MultiHeadAttention` in an encoder.

    >>> layer = LinformerAttention(6, 2, projection=SlotProjection(positions=100, slots=4))
    >>> layer(torch.zeros(1, 50, 6)).shape
    torch.Size([1, 50, 6])

    Args:
        d_model: width of x and of the result.
        num_heads: query heads.
        projection: how positions become slots. The same module may be given to several layers, which then share it.
        values_are_keys: the values are the keys, and there is no W_V.
        dropout: on the weights, in training only.
        backend: as in `regard.attention`.
        options: num_kv_heads, head_dim, bias, out_bias, fused, head_norms and scale, as in `MultiHeadAttention`.

    Raises:
        TypeError: sizes that are not integers.
        ValueError: sizes that do not fit each other.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        projection: SlotProjection,
        values_are_keys: bool = False,
        dropout: float = 0.0,
        backend: str = "auto",
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(d_model, num_heads, values_are_keys=values_are_keys, **options)
        if projection.num_heads not in (1, self.num_kv_heads):
            raise ValueError(
                f"the projection is for {projection.num_heads} key/value heads, but the layer has {self.num_kv_heads}"
            )
        check_weights(dropout, backend)
        self.projection, self.dropout, self.backend = projection, dropout, backend

    def forward(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None = None,
        *,
        mask: object = None,
        cache: None = None,
        positions: None = None,
    ) -> Tensor:
        """x (B, N, d_model) attends to the slots of itself or of a context; the result is (B, N, d_model).

        Args:
            x: (B, N, d_model) or (N, d_model).
            context: (B, M, d_model), or `keys(context)`.
            mask: padding alone; padded keys enter the slots as 0.
            cache: must be None.
            positions: must be None.

        Raises:
            ValueError: a causal mask, more positions than the projection has, a cache or positions.
        """
        if x.ndim == 2:
            context = context[None] if isinstance(context, Tensor) else context
            return self.forward(x[None], context, mask=mask, cache=cache, positions=positions)[0]
        if cache is not None:
            raise ValueError(NO_CACHE)
        if positions is not None:
            raise ValueError("positions are read by Rotary only, and Linformer has none")
        q, slots = self.slots(x, context, mask=mask)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, *slots, scale=self.scale, dropout=dropout, backend=self.backend)  # (B, H, N, D)
        return self.joined(out)

    def slots(
        self, x: Tensor, context: Tensor | ContextKeys | None = None, *, mask: object = None
    ) -> tuple[Tensor, ContextKeys]:
        """The queries (B, H, N, D), and the slots' keys and values (B, Hkv, slots, D): the inputs of the softmax.

        >>> layer = LinformerAttention(6, 2, projection=SlotProjection(positions=100, slots=4))
        >>> q, (k, v) = layer.slots(torch.zeros(1, 50, 6))
        >>> q.shape, k.shape
        (torch.Size([1, 2, 50, 3]), torch.Size([1, 2, 4, 3]))

        Arguments and exceptions are those of `forward`.
        """
        q, kv = self.projected(x, context)
        seen = read_key_mask(mask, len(q), self.num_heads, q.shape[-2], kv.k.shape[-2], q.device)
        if seen.causal:
            raise ValueError(
                "Linformer cannot be causal: a slot mixes all positions, so a query that sees any slot sees what is "
                "ahead of it. Use MultiHeadAttention or PerformerAttention"
            )
        return q, self.projection(kv, seen.real)

    def new_cache(self, batch: int, length: int, *, dtype: torch.dtype, device: torch.device | str) -> NoReturn:
        """Raises ValueError: a Linformer cannot decode step by step."""
        raise ValueError(NO_CACHE)

    @classmethod
    def in_place_of(cls, layer: MultiHeadAttention, *, projection: SlotProjection) -> LinformerAttention:
        """A Linformer with the projections of a layer: its parameters are shared, not copied.

        >>> softmax = MultiHeadAttention(6, 2)
        >>> LinformerAttention.in_place_of(softmax, projection=SlotProjection(100, 4)).w_q is softmax.w_q
        True

        Args:
            layer: the layer to replace.
            projection: how positions become slots; it keeps its device and dtype.

        Raises:
            ValueError: the attention of the layer cannot be over slots; the message gives the reason.
        """
        return cls._sharing(layer, projection=projection, dropout=layer.dropout, backend=layer.backend)

    @classmethod
    def unsupported_reason(cls, layer: MultiHeadAttention) -> str | None:
        """Why a Linformer cannot take the place of a layer, or None."""
        if layer.position is not None:
            return f"it has positions ({type(layer.position).__name__}), and a slot mixes all of them"
        return super().unsupported_reason(layer)

    @classmethod
    def from_package(cls, module: Any, *, projection: SlotProjection | None = None) -> LinformerAttention:
        """The same layer with the weights of a `linformer.LinformerSelfAttention`, copied.

        Args:
            module: of the linformer package.
            projection: use this one instead of a copy of the module's own.

        Raises:
            TypeError: another object.
        """
        if type(module).__name__ != "LinformerSelfAttention":
            raise TypeError(f"from_package takes a linformer.LinformerSelfAttention, got {type(module).__name__}")
        own = SlotProjection(module.seq_len, module.k, key_value=module.share_kv)
        layer = cls(
            module.to_q.in_features,
            module.heads,
            projection=own if projection is None else projection,
            num_kv_heads=module.to_k.out_features // module.dim_head,
            head_dim=module.dim_head,
            bias=False,
            out_bias=True,
            values_are_keys=module.share_kv,
            dropout=module.dropout.p,
        ).to(module.to_q.weight)
        names = {"w_q.weight": module.to_q.weight, "w_k.weight": module.to_k.weight}
        names |= {"w_o.weight": module.to_out.weight, "w_o.bias": module.to_out.bias}
        names |= {} if module.share_kv else {"w_v.weight": module.to_v.weight}
        if projection is None:
            names |= {"projection.keys": module.proj_k}
            names |= {} if module.share_kv else {"projection.values": module.proj_v}
        else:
            names |= {f"projection.{name}": value for name, value in projection.state_dict().items()}
        layer.load_state_dict({name: value.detach() for name, value in names.items()})
        return layer.train(module.training)
