"""Multi-head attention, and the projections to and from heads that all attention layers share."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, Protocol, Self, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from regard.backends import load, reference
from regard.backends.call import CallOptions, as_given, prepare
from regard.checks import check_int, is_distributed
from regard.nn.cache import Cache, FixedCache, GrowingCache, KeyValueCache
from regard.nn.linear import Joined, Linear, apart, part, separate, whole_output
from regard.op import attention
from regard.positions import Bias, Rotary
from regard.rotary import Angles

MOST_WEIGHTS = 1 << 26  # numbers that return_weights=True gives: 256 MiB in fp32


class ScorePosition(Protocol):
    """A position that acts on the scores: a bias value, or a layer that makes one from the queries."""

    def bias(self, q: Tensor, scale: float) -> Bias:
        """The term to add to the scores of q (B, H, Nq, D)."""


class ContextKeys(NamedTuple):
    """Keys and values of a context, computed once by a layer's `keys` for many calls."""

    k: Tensor  # (B, Hkv, M, D)
    v: Tensor  # (B, Hkv, M, D)


class AttentionLayer(Protocol):
    """A module that attends within x, or to a context.

    dropout: on the weights, in training only; 0 for a layer that has no weights.
    """

    d_model: int
    num_heads: int
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
        """x (B, N, d_model) attends to itself, or to a context → (B, N, d_model). cache: from `new_cache`."""

    def keys(self, context: Tensor) -> ContextKeys:
        """Keys and values of context (B, M, ·), computed once for many calls."""

    def new_cache(self, batch: int, length: int, *, dtype: torch.dtype, device: torch.device | str) -> Cache:
        """An empty cache for `length` positions. Raises ValueError for a layer that cannot decode step by step."""


def split(y: Tensor, head_dim: int, norm: nn.Module | None = None) -> Tensor:
    """(B, N, h·D) → (B, h, N, D), each head normed if there is a norm.

    >>> split(torch.zeros(1, 5, 6), 3).shape
    torch.Size([1, 2, 5, 3])

    h follows from the width: under tensor parallelism a process has some of the heads, all of them D wide.
    Raises ValueError for a width that is no multiple of D, TypeError for a DTensor.
    """
    if is_distributed(y):
        raise TypeError("a projection gave a DTensor; attention needs local tensors: leave use_local_output=True")
    if y.shape[-1] % head_dim:
        raise ValueError(
            f"a projection gave {y.shape[-1]} features, which are no whole heads of {head_dim}: the number of heads "
            "must divide by the number of processes"
        )
    y = y.reshape(*y.shape[:-1], y.shape[-1] // head_dim, head_dim)
    if norm is not None:  # in its own dtype: under autocast y is narrower, and keys must stay of the values' dtype
        y = norm(y.to(cast(Tensor, norm.weight).dtype)).to(y.dtype)
    return y.transpose(1, 2)


def dense_weights(
    q: Tensor, k: Tensor, v: Tensor, *, mask: object, bias: object, **options: Unpack[CallOptions]
) -> Tensor:
    """The weights (B, H, N, M) of a call by the definition, in fp32 or wider, with their gradient.

    Raises ValueError above MOST_WEIGHTS numbers, before they are computed.
    """
    call = prepare(q, k, v, mask=mask, bias=bias, **options)
    if prod(call.sizes) > MOST_WEIGHTS:
        raise ValueError(
            f"weights of {call.sizes} are {prod(call.sizes):,} numbers, and a layer returns at most {MOST_WEIGHTS:,}; "
            "regard.look(q, k, v), or `with regard.watch(layer, keep='qk') as seen: layer(x)`, has their rows, tiles "
            "and measures at any length"
        )
    with as_given(call.device):
        return q.new_zeros(call.sizes, dtype=call.wide) if 0 in call.sizes else reference.stages(call).weights


class HeadOptions(TypedDict, total=False):
    """Options of the projections that every attention layer takes; `MultiHeadAttention` explains them."""

    num_kv_heads: int | None
    head_dim: int | None
    bias: bool
    out_bias: bool | None
    fused: bool
    head_norms: tuple[nn.Module, nn.Module] | None
    scale: float | None


class HeadProjections(nn.Module):
    """W_Q, W_K, W_V and W_O: the base class of all attention layers.

    >>> maps = HeadProjections(6, 2, num_kv_heads=1)
    >>> q, (k, v) = maps.queries(torch.zeros(1, 5, 6)), maps.keys(torch.zeros(1, 7, 6))
    >>> q.shape, k.shape
    (torch.Size([1, 2, 5, 3]), torch.Size([1, 1, 7, 3]))

    values_are_keys: one map for both, and no W_V (the linformer package's share_kv).
    """

    w_v: Linear | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        position: Rotary | ScorePosition | None = None,
        d_context: int | None = None,
        values_are_keys: bool = False,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        unknown = options.keys() - HeadOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no argument {', '.join(sorted(unknown))}")
        num_kv_heads, head_dim = options.get("num_kv_heads"), options.get("head_dim")
        bias, out_bias, fused = options.get("bias", True), options.get("out_bias"), options.get("fused", False)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        d_context = d_model if d_context is None else d_context
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "d_context": d_context}
        for name, size in (sizes if head_dim is None else sizes | {"head_dim": head_dim}).items():
            check_int(name, size)
        if head_dim is None and d_model % num_heads:
            raise ValueError(
                f"d_model {d_model} does not divide by {num_heads} heads; give head_dim= to choose another size"
            )
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if fused and d_context != d_model:
            raise ValueError(f"fused projections need d_context = d_model, got {d_context} and {d_model}")
        if fused and values_are_keys:
            raise ValueError("fused projections have a W_V: leave out fused=, or values_are_keys=")

        self.d_model, self.num_heads, self.num_kv_heads, self.d_context = d_model, num_heads, num_kv_heads, d_context
        self.head_dim, self.fused = d_model // num_heads if head_dim is None else head_dim, fused
        self.position = position  # before the weights: state dicts list it first
        scale = options.get("scale")
        self.scale = self.head_dim**-0.5 if scale is None else scale
        wide, narrow, _ = self._rows
        if fused:
            self.w_qkv = Joined(d_model, self._rows, bias=bias)
        else:
            self.w_q, self.w_k = Linear(d_model, wide, bias), Linear(d_context, narrow, bias)
            self.w_v = None if values_are_keys else Linear(d_context, narrow, bias)
        self.w_o = Linear(wide, d_model, bias if out_bias is None else out_bias)
        self.q_norm, self.k_norm = options.get("head_norms") or (None, None)

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of query, key and value in w_qkv: its own, whatever layer an adapter has put in its place."""
        narrow = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, narrow, narrow

    def queries(self, x: Tensor) -> Tensor:
        """q (B, H, N, D) of x (B, N, d_model)."""
        q = part(self.w_qkv, self._rows, x, 0, self.num_heads * self.head_dim) if self.fused else self.w_q(x)
        return split(q, self.head_dim, self.q_norm)

    def keys(self, context: Tensor) -> ContextKeys:
        """Keys and values of context (B, M, d_context), computed once for many calls.

        >>> layer, context = MultiHeadAttention(6, 2), torch.randn(1, 5, 6)
        >>> torch.equal(layer(context[:, :1], layer.keys(context)), layer(context[:, :1], context))
        True
        """
        if context.ndim != 3 or context.shape[-1] != self.d_context:
            raise ValueError(f"context must be (B, M, {self.d_context}), got {tuple(context.shape)}")
        if self.fused:
            wide, narrow, _ = self._rows
            k, v = part(self.w_qkv, self._rows, context, wide, wide + 2 * narrow).chunk(2, -1)
        else:
            k = self.w_k(context)
            v = k if self.w_v is None else self.w_v(context)
        return ContextKeys(split(k, self.head_dim, self.k_norm), split(v, self.head_dim))

    def joined(self, out: Tensor) -> Tensor:
        """Heads (B, H, N, D) side by side through W_O, (B, N, d_model)."""
        return cast(Tensor, self.w_o(out.transpose(1, 2).flatten(2)))

    def _check_x(self, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must be (B, N, {self.d_model}) or (N, {self.d_model}), got {tuple(x.shape)}")

    def _check_all_heads(self, q: Tensor, k: Tensor) -> None:
        """Raise ValueError if a process has only some of the heads, which this layer cannot attend with."""
        if (q.shape[1], k.shape[1]) != (self.num_heads, self.num_kv_heads):
            raise ValueError(
                f"a {type(self).__name__} attends with all of its {self.num_heads} query and {self.num_kv_heads} "
                f"key/value heads, and the projections gave {q.shape[1]} and {k.shape[1]}: its heads cannot be split "
                "over processes"
            )


class LinearAttention(HeadProjections):
    """Attention in O(N), which sums over the keys before it meets a query: base class of Linformer and Performer."""

    @classmethod
    def unsupported_reason(cls, layer: MultiHeadAttention) -> str | None:
        """Why this kind of layer cannot take the place of a layer, or None."""
        if layer.softcap is not None:
            return f"its scores have a softcap ({layer.softcap}), which a {cls.__name__} does not have"
        if layer.d_context != layer.d_model:
            return f"it looks at a context of width {layer.d_context}, and a {cls.__name__} at one as wide as x"
        return None

    @classmethod
    def _sharing(cls, layer: MultiHeadAttention, **own: Any) -> Self:
        """A layer with the projections and norms of another: its parameters are shared, not copied."""
        why = cls.unsupported_reason(layer)
        if why is not None:
            raise ValueError(f"no {cls.__name__} can take the place of this layer: {why}")
        with torch.device("meta"):  # its own projections would be thrown away
            shared = cls(layer.d_model, layer.num_heads, **own, **layer.head_options)
        for name in ("w_qkv",) if layer.fused else ("w_q", "w_k", "w_v"):
            setattr(shared, name, getattr(layer, name))
        shared.w_o, shared.q_norm, shared.k_norm = layer.w_o, layer.q_norm, layer.k_norm
        return shared.train(layer.training)

    def projected(self, x: Tensor, context: Tensor | ContextKeys | None) -> tuple[Tensor, ContextKeys]:
        """The queries (B, H, N, D) of x, and keys and values of x or the context: one product where maps are fused."""
        self._check_x(x)
        if self.fused and context is None:
            q, k, v = torch.split(whole_output(self.w_qkv, x, sum(self._rows)), list(self._rows), -1)
            q = split(q, self.head_dim, self.q_norm)
            kv = ContextKeys(split(k, self.head_dim, self.k_norm), split(v, self.head_dim))
        else:
            q = self.queries(x)
            kv = context if isinstance(context, ContextKeys) else self.keys(x if context is None else context)
        if len(kv.k) != len(x):
            raise ValueError(f"x has {len(x)} batch rows, but the context has {len(kv.k)}")
        self._check_all_heads(q, kv.k)
        return q, kv

    def extra_repr(self) -> str:
        """The arguments shown by `print(layer)`."""
        return f"{self.d_model}, num_heads={self.num_heads}, head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}"


class MultiHeadAttention(HeadProjections):
    """Multi-head attention: self or cross, grouped heads, separate or fused projections, cached or not.

    >>> layer = MultiHeadAttention(512, 8)
    >>> sum(p.numel() for p in layer.parameters())
    1050624
    >>> layer(torch.zeros(2, 5, 512)).shape
    torch.Size([2, 5, 512])

    Args:
        d_model: width of x and of the result.
        num_heads: query heads; must divide d_model unless head_dim is given.
        num_kv_heads: key/value heads (grouped-query attention); default num_heads.
        head_dim: D, the width of a head; default d_model / num_heads.
        d_context: width of `context`; default d_model.
        bias: whether the projections have a bias.
        out_bias: whether W_O has one; default as `bias`.
        fused: one matrix for [Q|K|V] instead of three; the same numbers, one product. 12 heads in 768 have a
            Linear(768, 2304): (B, N, 2304) → (B, N, 3, 12, 64) → q, k, v, each (B, 12, N, 64).
        position: a regard.positions.Rotary, a bias (alibi(…)) or a layer that makes one (T5, Shaw, Swin), or None.
            Rotary with DynamicNTK or LongRope depends on the length of a call, so cached steps differ from one pass,
            as they do in the models that use it.
        head_norms: norms of each head's queries and keys, (…, D) → (…, D), before any position; or None.
        dropout: on the weights, in training only.
        scale: of the scores; default 1/√D.
        softcap: cap of the scores, or None.
        backend: as in `regard.attention`.

    Attributes:
        local_heads: the query heads that this process computes: all, unless under tensor parallelism
            (`regard.models.tensor_parallel`); `num_heads` and `num_kv_heads` count those of all processes.

    Raises:
        TypeError: a position of another kind.
        ValueError: sizes that do not fit each other, dropout outside [0, 1), or an unknown backend.
    """

    w_v: Linear

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_context: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        fused: bool = False,
        position: Rotary | ScorePosition | None = None,
        head_norms: tuple[nn.Module, nn.Module] | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        backend: str = "auto",
    ) -> None:
        makes_bias = not isinstance(position, type) and callable(getattr(position, "bias", None))
        if not (position is None or isinstance(position, Rotary) or makes_bias):
            raise TypeError(
                "position must be a regard.positions.Rotary, a bias, a layer with bias(q, scale), or None; "
                f"got {type(position).__name__}"
            )
        super().__init__(
            d_model,
            num_heads,
            position=position,
            d_context=d_context,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            out_bias=out_bias,
            fused=fused,
            head_norms=head_norms,
            scale=scale,
        )
        check_weights(dropout, backend)
        self.local_heads = range(num_heads)
        self.softcap, self.dropout, self.backend = softcap, dropout, backend
        self.separated = False

    def forward(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None = None,
        *,
        mask: object = None,
        cache: KeyValueCache | None = None,
        positions: Tensor | Angles | None = None,
        context_positions: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Self-attention of x (B, N, d_model), or cross-attention to a context; the result is (B, N, d_model).

        >>> output, weights = MultiHeadAttention(512, 8)(torch.zeros(2, 5, 512), return_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 512]), torch.Size([2, 8, 5, 5]))

        Args:
            x: (B, N, d_model) or (N, d_model).
            context: (B, M, d_context), or `keys(context)` where many calls attend to one context.
            mask: as in `regard.attention`.
            cache: keys and values of earlier positions, which x continues.
            positions: integers (N,) or (B, N) for Rotary; default 0, 1, … after what the cache holds. Layers of one
                model can share `rotary.angles(positions)`.
            context_positions: integers (M,) or (B, M) for Rotary.
            return_weights: return the output and the weights (B, H, N, M), before dropout, in fp32 or wider. They are
                built whole, after the definition: at most 2²⁶ numbers, 8 heads of 2,896 positions. `regard.watch` and
                `regard.look` have rows, tiles and measures of longer ones.

        Raises:
            TypeError: a cache of another kind.
            ValueError: sizes that do not fit, arguments that exclude each other, or more weights than that.
        """
        single = x.ndim == 2
        if single:
            x, context = x[None], context[None] if isinstance(context, Tensor) else context
        out, weights = self._attend(x, context, mask, cache, positions, context_positions, return_weights)
        out = out[0] if single else out
        if weights is None:
            return out
        return out, weights[0] if single else weights

    def keys(self, context: Tensor, positions: Tensor | None = None) -> ContextKeys:
        """As in `HeadProjections`. positions: of the context, (M,) or (B, M) for Rotary; default 0, 1, …."""
        k, v = super().keys(context)
        if isinstance(self.position, Rotary):
            k = self.position.turn(k, _count(context, 0) if positions is None else positions)
        return ContextKeys(k, v)

    def new_cache(self, batch: int, length: int, *, dtype: torch.dtype, device: torch.device | str) -> FixedCache:
        """An empty cache for decoding with this layer.

        >>> MultiHeadAttention(6, 2, num_kv_heads=1).new_cache(5, 7, dtype=torch.float32, device="cpu")
        FixedCache(0 of 7 positions, 840 bytes)

        Args:
            batch: rows of the batch.
            length: positions there is room for.
            dtype: of the keys.
            device: of the keys.
        """
        num_kv_heads = len(self.local_heads) * self.num_kv_heads // self.num_heads
        return FixedCache(batch, num_kv_heads, length, self.head_dim, dtype=dtype, device=device)

    def _attend(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None,
        mask: object,
        cache: KeyValueCache | None,
        positions: Tensor | Angles | None,
        context_positions: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        self._check(x, context, cache, positions, context_positions)
        # 1. Queries, keys and values, turned to their positions if the layer has a Rotary.
        before = 0 if cache is None else len(cache)
        rotary = self.position if isinstance(self.position, Rotary) else None
        here = _count(x, before) if rotary is not None and positions is None else positions
        if context is None:
            q, k, v = self.project(x) if rotary is None or here is None else self._project_and_turn(x, rotary, here)
        else:
            q = self.queries(x)
            q = q if rotary is None or here is None else rotary.turn(q, here)
            k, v = self.keys(context, context_positions) if isinstance(context, Tensor) else context  # turned already
        if q.shape[1] != self.num_heads or k.shape[1] != self.num_kv_heads:
            self._check_share(q.shape[1], k.shape[1])
        # 2. Attention, over earlier positions as well.
        term = weights = None
        if self.position is not None and not isinstance(self.position, Rotary):
            term = self.position.bias(q, self.scale)
        if cache is not None:
            k, v = cache.append(k, v)
        try:
            if return_weights:
                weights = dense_weights(q, k, v, mask=mask, bias=term, scale=self.scale, softcap=self.softcap)
            out = attention(
                q,
                k,
                v,
                mask=mask,
                bias=term,
                scale=self.scale,
                softcap=self.softcap,
                dropout=self.dropout if self.training else 0.0,
                backend=self.backend,
            )  # (B, H, N, D)
        except BaseException:
            if cache is not None:  # a call that raises, or is interrupted, leaves the cache as it was
                cache.crop(before)
            raise
        return self.joined(out), weights

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, D), k and v (B, Hkv, N, D) of x, before any position."""
        if self.fused:
            q, k, v = apart(self.w_qkv, self._rows, x)
        else:
            q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        k, v = split(k, self.head_dim, self.k_norm), split(v, self.head_dim)
        return split(q, self.head_dim, self.q_norm), k, v

    def _project_and_turn(self, x: Tensor, rotary: Rotary, positions: Tensor | Angles) -> tuple[Tensor, Tensor, Tensor]:
        """As `project`, queries and keys turned to their positions; together, where they come from one product."""
        if not self.fused or self.q_norm is not None or self.k_norm is not None:
            q, k, v = self.project(x)
            return rotary.turn(q, positions), rotary.turn(k, positions), v
        wide, narrow, _ = self._rows
        both, v = torch.split(whole_output(self.w_qkv, x, wide + 2 * narrow), [wide + narrow, narrow], -1)
        both = rotary.turn(split(both, self.head_dim), positions)  # (B, H + Hkv, N, D)
        q, k = torch.split(both, [self.num_heads, self.num_kv_heads], 1)
        return q, k, split(v, self.head_dim)

    @property
    def head_options(self) -> HeadOptions:
        """The options with which another kind of layer gets projections of the same sizes."""
        return {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "fused": self.fused, "scale": self.scale}

    def _check(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None,
        cache: object,
        positions: Tensor | Angles | None,
        context_positions: Tensor | None,
    ) -> None:
        self._check_x(x)
        if cache is not None and not isinstance(cache, (GrowingCache, FixedCache)):
            raise TypeError(f"cache must be a GrowingCache or a FixedCache, got {type(cache).__name__}")
        if not isinstance(self.position, Rotary) and (positions is not None or context_positions is not None):
            raise ValueError("positions are read by Rotary only, and this layer has none")
        if context is None:
            if context_positions is not None:
                raise ValueError("context_positions= goes with context=; x's own are positions=")
            if self.d_context != self.d_model:
                raise ValueError(f"this layer looks at a context of width {self.d_context}: pass context=")
            return
        if isinstance(context, ContextKeys):
            if context_positions is not None:
                raise ValueError("context_positions= went into the keys already: give them to keys(…)")
        elif context.ndim != 3 or context.shape[-1] != self.d_context or context.shape[0] != x.shape[0]:
            raise ValueError(f"context must be ({x.shape[0]}, M, {self.d_context}), got {tuple(context.shape)}")
        if cache is not None:
            raise ValueError("a cache continues x itself; with a context there is nothing to continue: drop cache=")

    def _check_share(self, num_heads: int, num_kv_heads: int) -> None:
        """Raise ValueError unless these heads are a share that one process can attend with alone."""
        if (
            num_heads == 0
            or self.num_heads % num_heads
            or num_heads * self.num_kv_heads != num_kv_heads * self.num_heads
        ):
            raise ValueError(
                f"the projections gave {num_heads} of {self.num_heads} query heads and "
                f"{num_kv_heads} of {self.num_kv_heads} key/value heads. Under tensor parallelism every "
                "process needs the same share of both: split w_q, w_k and w_v alike, over a number of processes that "
                "divides them"
            )
        weight = getattr(self.w_o, "weight", None)
        if isinstance(weight, Tensor) and not is_distributed(weight) and weight.shape[-1] != num_heads * self.head_dim:
            raise ValueError(
                f"this process has {num_heads} of {self.num_heads} heads of {self.head_dim}, and w_o takes "
                f"{weight.shape[-1]} features: split w_o as well (RowwiseParallel)"
            )
        within = [x for x in (self.q_norm, self.k_norm, self.position) if isinstance(x, nn.Module)]
        if any(p.requires_grad and not is_distributed(p) for module in within for p in module.parameters()):
            raise ValueError(
                f"this process has {num_heads} of {self.num_heads} heads, and the weights of its positions and norms "
                "would get the gradient of those only: use regard.models.tensor_parallel.parallelize(model, mesh)"
            )

    def separate(self) -> None:
        """Turn fused projections into w_q, w_k and w_v with the same weights, so that each can be split by heads.

        >>> layer = MultiHeadAttention(6, 2, fused=True)
        >>> layer.separate()
        >>> layer.w_k
        Linear(in_features=6, out_features=6, bias=True)

        Parameters are new: make the optimizer afterwards. Separate projections stay as they are.

        Raises:
            ValueError: an adapter or a hook is on the projections.
        """
        if self.fused:
            self.w_q, self.w_k, self.w_v = separate(self.w_qkv, self._rows)
            del self.w_qkv
            self.fused, self.separated = False, True

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, backend: str = "auto") -> MultiHeadAttention:
        """The same layer with the weights of a `torch.nn.MultiheadAttention`, copied; always batch first.

        >>> theirs = nn.MultiheadAttention(6, 2, batch_first=True)
        >>> x = torch.randn(1, 3, 6)
        >>> torch.allclose(theirs(x, x, x)[0], MultiHeadAttention.from_torch(theirs)(x), atol=1e-6)
        True

        Raises:
            TypeError: a module of another kind.
            ValueError: add_bias_kv, add_zero_attn, or kdim ≠ vdim, which this layer does not have.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"from_torch takes a torch.nn.MultiheadAttention, got {type(module).__name__}")
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("a MultiheadAttention with add_bias_kv or add_zero_attn has no counterpart here")
        if module.kdim != module.vdim:
            raise ValueError(
                f"keys and values come from one context here, but kdim is {module.kdim}, vdim {module.vdim}"
            )
        fused = module.in_proj_weight is not None
        like = module.out_proj.weight
        layer = cls(
            module.embed_dim,
            module.num_heads,
            d_context=module.kdim,
            bias=module.in_proj_bias is not None,
            fused=fused,
            dropout=module.dropout,
            backend=backend,
        ).to(like)
        names = {"w_o.weight": like, "w_o.bias": module.out_proj.bias}
        if fused:
            names |= {"w_qkv.weight": module.in_proj_weight, "w_qkv.bias": module.in_proj_bias}
        else:
            rows = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            for name, weight, row in zip("qkv", weights, rows, strict=True):
                names |= {f"w_{name}.weight": weight, f"w_{name}.bias": row}
        layer.load_state_dict({name: t.detach() for name, t in names.items() if t is not None})
        return layer.train(module.training)

    def extra_repr(self) -> str:
        """The arguments shown by `print(layer)`."""
        usual = {
            "num_kv_heads": self.num_heads,
            "dropout": 0.0,
            "scale": self.head_dim**-0.5,
            "softcap": None,
            "backend": "auto",
        }
        shown = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        if len(self.local_heads) != self.num_heads:
            shown.append(f"local_heads={self.local_heads}")
        if self.position is not None and not isinstance(self.position, nn.Module):
            shown.append(f"position={self.position!r}")
        return ", ".join([str(self.d_model), f"num_heads={self.num_heads}", f"head_dim={self.head_dim}", *shown])


def check_weights(dropout: float, backend: str) -> None:
    """Raise ValueError for dropout outside [0, 1) and for an unknown backend."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if backend != "auto":
        load(backend)  # an unknown name is an error here, not in the first call


def _count(x: Tensor, start: int) -> Tensor:
    """The positions start, start + 1, … of x (B, N, ·)."""
    return torch.arange(start, start + x.shape[1], device=x.device)
