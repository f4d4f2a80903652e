"""Multi-head attention, and the caches that keep its keys and values between calls."""

from __future__ import annotations

from math import prod
from typing import Unpack

import torch
from torch import Tensor, nn

from regard.backends import load, reference
from regard.backends.call import CallOptions, as_given, prepare
from regard.checks import is_distributed
from regard.nn.projections import (
    ContextKeys,
    HeadOptions,
    HeadProjections,
    Linear,
    ScorePosition,
    apart,
    separate,
    split,
    whole_output,
)
from regard.op import attention
from regard.positions import Rotary
from regard.rotary import Angles

MOST_WEIGHTS = 1 << 26  # numbers that return_weights=True gives: 256 MiB in fp32


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
            d_model, num_heads, position=position, d_context=d_context, num_kv_heads=num_kv_heads, head_dim=head_dim,
            bias=bias, out_bias=out_bias, fused=fused, head_norms=head_norms, scale=scale,
        )  # fmt: skip
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


# ------------------------------------------------------------------------------------------------------------- caches
# `append` returns all that was put in, in order: new queries are the last positions, as `masks.causal()` assumes.


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
