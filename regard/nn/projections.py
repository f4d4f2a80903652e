"""What attention layers share: linear maps, the projections to and from heads, protocols of a layer and its cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules import module as everywhere

from regard.checks import check_int, is_distributed
from regard.positions import Bias, Rotary
from regard.rotary import Angles

if TYPE_CHECKING:
    from regard.nn.attention import MultiHeadAttention

WIDE = 192  # inputs from which on several products are faster than one, on a CPU


class Linear(nn.Linear):
    """As torch's, but on device "meta" no initial weights are drawn: that would take a while."""

    def reset_parameters(self) -> None:
        """Draw initial weights, unless on device "meta"."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Joined(Linear):
    """Several linear maps of one input in one matrix, row under row; rows: how many rows each has, in order."""

    def __init__(self, inputs: int, rows: tuple[int, ...], *, bias: bool = True) -> None:
        super().__init__(inputs, sum(rows), bias)
        self.rows = rows


class JoinedTable(nn.Embedding):
    """Several embedding tables, one under another: a vocabulary, and tokens added to it later (Idefics)."""

    def __init__(self, rows: tuple[int, ...], d: int) -> None:
        super().__init__(sum(rows), d)
        self.rows = rows


def untouched(layer: nn.Module) -> bool:
    """Whether a layer is as it was built, so that its weights may be used without calling it.

    Adapters wrap a layer or patch its forward, pruning and weight norms hook into it, tools hook into all layers.
    """
    if type(layer) not in (Linear, Joined, nn.Linear) or "forward" in vars(layer):
        return False
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not (own or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


def separate(layer: nn.Module, rows: Sequence[int]) -> list[Linear]:
    """Each of the maps joined in a layer as a layer of its own, its weights copied; rows: how many each has, in order.

    Raises ValueError if an adapter, a hook or a patch is on the layer: it would be lost.
    """
    if not untouched(layer):
        raise ValueError(
            f"the {type(layer).__name__} of {sum(rows)} rows has an adapter, a hook or a patch, which would be lost: "
            "separate projections before anything is put on them"
        )
    joined = cast(nn.Linear, layer)
    biases = [None] * len(rows) if joined.bias is None else torch.split(joined.bias, list(rows))
    layers = []
    for weight, bias in zip(torch.split(joined.weight, list(rows)), biases, strict=True):
        single = Linear(joined.in_features, len(weight), bias is not None, device="meta")
        single.weight = nn.Parameter(weight.detach().clone(), joined.weight.requires_grad)
        if bias is not None:
            single.bias = nn.Parameter(bias.detach().clone(), joined.bias.requires_grad)
        layers.append(single.train(joined.training))
    return layers


def whole_output(layer: nn.Module, x: Tensor, width: int) -> Tensor:
    """layer(x), all `width` columns of the maps joined in it.

    Raises ValueError for another width: ColwiseParallel gives the first process all of Q and half of K.
    """
    y = cast(Tensor, layer(x))
    if y.shape[-1] != width or is_distributed(y):
        kind = "a DTensor" if is_distributed(y) else f"{y.shape[-1]}"
        raise ValueError(
            f"several projections joined in one layer must give all {width} features, got {kind}. Tensor parallelism "
            "must split each of them: regard.models.tensor_parallel.parallelize(model, mesh) does, or call separate() "
            "on the attention or feed-forward layer before a plan of your own"
        )
    return y


def apart(layer: nn.Module, rows: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
    """The output of each of the maps joined in a layer for x (…, inputs); rows: how many each has, in order.

    On a CPU, without gradients and from 192 inputs on, several products are as fast as one or up to 10 % faster: then
    each uses its own rows of the matrix. Raises as `whole_output`.
    """
    plain = x.is_cpu and x.shape[-1] >= WIDE and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not plain or not untouched(layer):
        return torch.split(whole_output(layer, x, sum(rows)), list(rows), -1)
    ends = list(accumulate(rows))
    return tuple(part(layer, rows, x, end - n, end) for n, end in zip(rows, ends, strict=True))


def part(layer: nn.Module, rows: Sequence[int], x: Tensor, start: int, stop: int) -> Tensor:
    """The columns start to stop of layer(x), alone unless the layer must be called. Raises as `whole_output`."""
    if not untouched(layer):
        return whole_output(layer, x, sum(rows))[..., start:stop]
    linear_layer = cast(nn.Linear, layer)
    bias = None if linear_layer.bias is None else linear_layer.bias[start:stop]
    return linear(x, linear_layer.weight[start:stop], bias)


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


class ScorePosition(Protocol):
    """A position that acts on the scores: a bias value, or a layer that makes one from the queries."""

    def bias(self, q: Tensor, scale: float) -> Bias:
        """The term to add to the scores of q (B, H, Nq, D)."""


def split(y: Tensor, head_dim: int, norm: nn.Module | None = None) -> Tensor:
    """(B, N, h·D) → (B, h, N, D), each head normed if there is a norm.

    >>> split(torch.zeros(1, 5, 6), 3).shape
    torch.Size([1, 2, 5, 3])

    h follows from the width: under tensor parallelism a process has some of the heads, all of them D wide.
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

        >>> from regard.nn.attention import MultiHeadAttention
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
