"""Performer (Choromanski et al. 2020, FAVOR+): softmax's kernel estimated by features, so that keys are summed once.

The layer is here; what it does between queries, keys and values, and at which cost, is `kernel_attention`.
No weights are made, so `regard.watch` sees nothing here and says so, as `why_unseen`; `regard.lens.efficient_views`
shows the rows.

Axis letters: B batch, H heads (Hkv of keys and values), N positions (M of a context), D head size, m features.
"""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.checks import check_int
from regard.nn.attention import ContextKeys, MultiHeadAttention
from regard.nn.feature_maps import (
    KernelOutput,
    PerformerState,
    check_numbers,
    kernel_attention,
    no_keys,
    orthogonal_features,
    usual_count,
)
from regard.nn.projections import HeadProjections
from regard.rotary import Angles, Rotary

__all__ = ["PerformerAttention", "kernel_attention"]


class PerformerAttention(HeadProjections):
    """Multi-head attention by random features, in the place of `MultiHeadAttention` in an encoder or a decoder.

    >>> import regard
    >>> layer = PerformerAttention(6, 2, features=32)
    >>> layer(torch.zeros(1, 50, 6), mask=regard.masks.causal()).shape
    torch.Size([1, 50, 6])

    d_model, num_heads, num_kv_heads, head_dim, bias, out_bias, fused, head_norms: as in `regard.MultiHeadAttention`.

    Args:
        features: m, default D·ln D. The error falls as 1/√m, and grows as e to the size of the scores.
        seed: of the random directions, which all heads share and which are saved with the weights.
        position: a regard.positions.Rotary or None. Biases act on scores, which are never made here.
        epsilon: as in `kernel_attention`.
        scale: of the scores; default 1/√D.

    Raises:
        TypeError: sizes or a seed that are not integers, or another kind of position.
        ValueError: sizes that do not fit each other, or a scale that is not finite and above 0.
    """

    why_unseen: ClassVar[str] = (  # what `regard.watch` says of this layer
        "a Performer makes no weights that could be seen: regard.lens.efficient_views.look_features(layer, x) shows "
        "the rows that its features imply"
    )

    directions: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        features: int | None = None,
        seed: int = 0,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        fused: bool = False,
        position: Rotary | None = None,
        head_norms: tuple[nn.Module, nn.Module] | None = None,
        epsilon: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__(
            d_model,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            out_bias=out_bias,
            fused=fused,
            head_norms=head_norms,
        )
        if not (position is None or isinstance(position, Rotary)):
            raise TypeError(
                f"position must be a regard.positions.Rotary or None, got {type(position).__name__}: a bias is added "
                "to scores, and features make none"
            )
        check_numbers(scale, epsilon)
        self.position, self.epsilon = position, epsilon
        self.scale = self.head_dim**-0.5 if scale is None else scale
        count = usual_count(self.head_dim) if features is None else features
        self.register_buffer("directions", self._draw(count, seed))

    @property
    def features(self) -> int:
        """How many features there are, m."""
        return len(self.directions)

    def redraw(self, seed: int) -> None:
        """Draw new directions. A `PerformerState` of the old ones is refused from now on.

        >>> layer = PerformerAttention(6, 2)
        >>> layer.redraw(seed=1)

        seed: the same seed gives the same directions on every device.
        Raises TypeError for a seed that is no whole number.
        """
        self.directions = self._draw(self.features, seed)

    def _draw(self, count: int, seed: int) -> Tensor:
        """(count, D), of the dtype and on the device of the weights."""
        with torch.inference_mode(False):  # training may follow, and cannot use tensors of inference mode
            return orthogonal_features(count, self.head_dim, seed=seed).to(self.w_o.weight)

    @property
    def dropout(self) -> float:
        """0 always: there are no weights that could be dropped. Setting another raises ValueError."""
        return 0.0

    @dropout.setter
    def dropout(self, p: float) -> None:
        if p != 0:
            raise ValueError(f"a Performer makes no weights that dropout {p} could drop: set that of its block")

    def new_cache(self, batch: int, length: int, *, dtype: torch.dtype, device: torch.device | str) -> PerformerState:
        """What a decoder of this layer keeps for `batch` texts: sums, which take as much for any number of positions.

        >>> layer = PerformerAttention(6, 2, features=5)
        >>> sizes = [layer.new_cache(1, n, dtype=torch.float32, device="cpu").nbytes for n in (7, 7_000_000)]
        >>> sizes
        [260, 260]

        length: positions to come; there is no limit.  dtype, device: of the keys; sums are in fp32 or wider.
        Raises TypeError for sizes that are no whole numbers, ValueError for sizes below 1.
        """
        check_int("batch", batch)
        check_int("length", length)
        like = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device=device)
        state = PerformerState()
        state.store(no_keys(batch, self.num_kv_heads, self.features, self.head_dim, like), 0, self.directions)
        return state

    def forward(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None = None,
        *,
        mask: object = None,
        cache: PerformerState | None = None,
        positions: Tensor | Angles | None = None,
    ) -> Tensor:
        """x (B, N, d_model) looks at itself, or at context (B, M, d_model); the result is (B, N, d_model).

        mask: masks.padding(…), masks.causal(), or both.  cache: sums over earlier positions, which x continues.
        positions: integers (N,) or (B, N) for Rotary, or its angles; default 0, 1, … after what the cache holds.

        Raises as `kernel_attention` does, and TypeError for a cache of keys and values.
        """
        if x.ndim == 2:
            context = context[None] if isinstance(context, Tensor) else context
            return self.forward(x[None], context, mask=mask, cache=cache, positions=positions)[0]
        return self.joined(self.rows(x, context, mask=mask, cache=cache, positions=positions).output)

    def rows(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None = None,
        *,
        mask: object = None,
        cache: PerformerState | None = None,
        positions: Tensor | Angles | None = None,
    ) -> KernelOutput:
        """Each head's outputs (B, H, N, D) before W_O, with the estimate of its lse (B, H, N).

        >>> PerformerAttention(6, 2).rows(torch.zeros(1, 5, 6)).lse.shape
        torch.Size([1, 2, 5])

        Arguments and errors are those of a call of the layer.
        """
        q, k, v = self.heads_of(x, context, positions=positions, cache=cache)
        return kernel_attention(
            q, k, v, self.directions, mask=mask, scale=self.scale, epsilon=self.epsilon, state=cache
        )

    def heads_of(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None = None,
        *,
        positions: Tensor | Angles | None = None,
        cache: PerformerState | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, D), k and v (B, Hkv, M, D): what features are made of, turned by Rotary where there is one.

        x, context, positions, cache: as in a call of the layer; the cache is only asked how long it is.
        """
        self._check_call(context, cache, positions)
        q, (k, v) = self.projected(x, context)
        if self.position is not None:
            start = 0 if cache is None else len(cache)
            here = torch.arange(start, start + x.shape[1], device=x.device) if positions is None else positions
            q = self.position.turn(q, here)
            k = self.position.turn(k, here)
        return q, k, v

    def _check_call(
        self, context: Tensor | ContextKeys | None, cache: PerformerState | None, positions: Tensor | Angles | None
    ) -> None:
        if cache is not None and not isinstance(cache, PerformerState):
            raise TypeError(f"cache must be a PerformerState, got {type(cache).__name__}: a Performer keeps no keys")
        if self.position is None and positions is not None:
            raise ValueError("positions are read by Rotary only, and this layer has none")
        if context is not None and self.position is not None:
            raise ValueError("Rotary is for x itself: a context has positions of its own; make this layer without it")
        if context is not None and cache is not None:
            raise ValueError("a cache continues x itself; with a context there is nothing to continue: drop cache=")

    @classmethod
    def in_place_of(
        cls, layer: MultiHeadAttention, *, features: int | None = None, seed: int = 0, epsilon: float = 0.0
    ) -> PerformerAttention:
        """A Performer with the very projections of a layer: its parameters are shared, not copied.

        >>> softmax = MultiHeadAttention(6, 2, fused=True)
        >>> PerformerAttention.in_place_of(softmax, features=32).w_qkv is softmax.w_qkv
        True

        features, seed, epsilon: as in the constructor. Dropout on the weights is left out: there are none.
        Raises ValueError with the reason for a layer whose attention features cannot estimate.
        """
        why = cls.unsupported_reason(layer)
        if why is not None:
            raise ValueError(f"no Performer can take the place of this layer: {why}")
        with torch.device("meta"):  # its own projections would be thrown away
            made = cls(
                layer.d_model,
                layer.num_heads,
                features=features,
                seed=seed,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                fused=layer.fused,
                position=layer.position if isinstance(layer.position, Rotary) else None,
                epsilon=epsilon,
                scale=layer.scale,
            )
        made.take_over(layer)
        made.redraw(seed)
        return made.train(layer.training)

    @staticmethod
    def unsupported_reason(layer: MultiHeadAttention) -> str | None:
        """Why a Performer cannot take the place of a layer, or None."""
        if not (layer.position is None or isinstance(layer.position, Rotary)):
            return f"its positions ({type(layer.position).__name__}) are added to scores, and features make none"
        if layer.softcap is not None:
            return f"its scores have a softcap ({layer.softcap}), and features make no scores"
        if not 0 < layer.scale < inf:
            return f"its scale is {layer.scale}, and features estimate e^(scale·q·k) for a finite scale above 0"
        if layer.d_context != layer.d_model:
            return f"it looks at a context of width {layer.d_context}, and a Performer at one as wide as x"
        return None

    @classmethod
    def from_package(cls, module: Any) -> PerformerAttention:
        """The same layer with the weights and features of a `performer_pytorch` attention, copied; epsilon is its 1e-4.

        module: a SelfAttention or CrossAttention of performer-pytorch, without local heads, dropout or another kernel.
        Whether it is causal is said by the mask of a call. Its causal sums carry 1e-6 more in the denominator, so
        that rows sum to less than 1, and padded keys count in its denominator: both are errors, and not copied.

        Raises TypeError for another object, ValueError for what this layer does not have.
        """
        fast = getattr(module, "fast_attention", None)
        if fast is None:
            raise TypeError(f"from_package takes an attention of performer_pytorch, got {type(module).__name__}")
        extra = {"generalized_attention": fast.generalized_attention, "no_projection": fast.no_projection}
        extra |= {"local_heads": module.local_attn is not None, "dropout": module.dropout.p > 0}
        if any(extra.values()):
            raise ValueError(f"no counterpart here for {', '.join(name for name, there in extra.items() if there)}")
        layer = cls(
            module.to_q.in_features,
            module.heads,
            features=len(fast.projection_matrix),
            head_dim=fast.dim_heads,
            bias=module.to_q.bias is not None,
            out_bias=module.to_out.bias is not None,
            epsilon=1e-4,
        ).to(module.to_q.weight)
        maps = {"w_q": module.to_q, "w_k": module.to_k, "w_v": module.to_v, "w_o": module.to_out}
        names = {f"{name}.{key}": value for name, part in maps.items() for key, value in part.state_dict().items()}
        layer.load_state_dict({**names, "directions": fast.projection_matrix})
        return layer.train(module.training)

    def extra_repr(self) -> str:
        """What `print(layer)` says of it."""
        said = f"{self.d_model}, num_heads={self.num_heads}, head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}"
        return f"{said}, features={self.features}" + (f", epsilon={self.epsilon}" if self.epsilon else "")
