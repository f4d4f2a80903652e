"""Performer (Choromanski et al. 2020, FAVOR+): softmax's kernel estimated by features, so that keys are summed once.

The computation between queries, keys and values is `kernel_attention` in `feature_maps.py`. There are no weights, so
`regard.watch` sees nothing here (`why_unseen`); `regard.lens.efficient_views` shows the rows that features imply.

Axis letters: B batch, H heads (Hkv of keys and values), N positions (M of a context), D head size, m features.
"""

from __future__ import annotations

from math import inf, log
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from regard.nn.attention import MultiHeadAttention
from regard.nn.feature_maps import PerformerState, check_numbers, kernel_attention, no_keys, orthogonal_features
from regard.nn.projections import ContextKeys, HeadOptions, LinearAttention
from regard.rotary import Angles, Rotary


class PerformerAttention(LinearAttention):
    """Multi-head attention by random features, in the place of `MultiHeadAttention` in an encoder or a decoder.

    >>> import regard
    >>> layer = PerformerAttention(6, 2, features=32)
    >>> layer(torch.zeros(1, 50, 6), mask=regard.masks.causal()).shape
    torch.Size([1, 50, 6])

    Args:
        d_model: width of x and of the result.
        num_heads: query heads.
        features: m, default D·ln D. The error falls as 1/√m, and grows as e to the size of the scores.
        seed: of the random directions, which all heads share and which are saved with the weights.
        position: a regard.positions.Rotary or None. Biases act on scores, which are never computed here.
        epsilon: as in `kernel_attention`.
        options: num_kv_heads, head_dim, bias, out_bias, fused, head_norms and scale, as in `MultiHeadAttention`.

    Raises:
        TypeError: sizes or a seed that are not integers, or another kind of position.
        ValueError: sizes that do not fit each other, or a scale that is not finite and above 0.
    """

    why_unseen: ClassVar[str] = (  # shown by `regard.watch`
        "a Performer makes no weights that could be seen: regard.lens.efficient_views.look_features(layer, x) shows "
        "the rows that its features imply"
    )

    directions: Tensor
    position: Rotary | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        features: int | None = None,
        seed: int = 0,
        position: Rotary | None = None,
        epsilon: float = 0.0,
        **options: Unpack[HeadOptions],
    ) -> None:
        if not (position is None or isinstance(position, Rotary)):
            raise TypeError(
                f"position must be a regard.positions.Rotary or None, got {type(position).__name__}: a bias is added "
                "to scores, and features make none"
            )
        super().__init__(d_model, num_heads, position=position, **options)
        check_numbers(self.scale, epsilon)
        self.epsilon = epsilon
        count = max(1, int(self.head_dim * log(self.head_dim))) if features is None else features
        self.register_buffer("directions", self._draw(count, seed))

    @property
    def features(self) -> int:
        """m, the number of features."""
        return len(self.directions)

    @property
    def dropout(self) -> float:
        """Always 0: there are no weights to drop. Setting another raises ValueError."""
        return 0.0

    @dropout.setter
    def dropout(self, p: float) -> None:
        if p != 0:
            raise ValueError(f"a Performer has no weights that dropout {p} could drop: set that of its block")

    def redraw(self, seed: int) -> None:
        """Draw new directions, with which a `PerformerState` of the old ones cannot go on.

        seed: the same seed gives the same directions on every device.
        """
        self.directions = self._draw(self.features, seed)

    def _draw(self, count: int, seed: int) -> Tensor:
        """(count, D), of the dtype and on the device of the weights."""
        with torch.inference_mode(False):  # training may follow, and cannot use tensors of inference mode
            return orthogonal_features(count, self.head_dim, seed=seed).to(self.w_o.weight)

    def new_cache(self, batch: int, length: int, *, dtype: torch.dtype, device: torch.device | str) -> PerformerState:
        """The sums that a decoder of this layer keeps; their size does not depend on the number of positions.

        >>> layer = PerformerAttention(6, 2, features=5)
        >>> [layer.new_cache(1, n, dtype=torch.float32, device="cpu").nbytes for n in (7, 7_000_000)]
        [200, 200]

        batch: rows of the batch.  length: positions to come, without a limit.  dtype, device: of the keys.
        """
        like = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device=device)
        return PerformerState(no_keys(batch, self.num_kv_heads, self.features, self.head_dim, like))

    def forward(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None = None,
        *,
        mask: object = None,
        cache: PerformerState | None = None,
        positions: Tensor | Angles | None = None,
    ) -> Tensor:
        """x (B, N, d_model) attends to itself or to a context; the result is (B, N, d_model).

        Args:
            x: (B, N, d_model) or (N, d_model).
            context: (B, M, d_model), or `keys(context)`.
            mask: masks.padding(…), masks.causal(), or both.
            cache: sums over earlier positions, which x continues.
            positions: integers (N,) or (B, N) for Rotary, or its angles; default 0, 1, … after what the cache holds.

        Raises:
            TypeError: a cache of keys and values.
            ValueError: as `kernel_attention`.
        """
        if x.ndim == 2:
            context = context[None] if isinstance(context, Tensor) else context
            return self.forward(x[None], context, mask=mask, cache=cache, positions=positions)[0]
        q, k, v = self.heads_of(x, context, positions=positions, cache=cache)
        rows = kernel_attention(
            q, k, v, self.directions, mask=mask, scale=self.scale, epsilon=self.epsilon, state=cache
        )
        return self.joined(rows.output)

    def heads_of(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None = None,
        *,
        positions: Tensor | Angles | None = None,
        cache: PerformerState | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, D), k and v (B, Hkv, M, D), from which features are computed, turned by Rotary if there is one.

        Arguments are those of `forward`; of the cache only the length is read.
        """
        if cache is not None and not isinstance(cache, PerformerState):
            raise TypeError(f"cache must be a PerformerState, got {type(cache).__name__}: a Performer keeps no keys")
        if self.position is None and positions is not None:
            raise ValueError("positions are read by Rotary only, and this layer has none")
        if context is not None and self.position is not None:
            raise ValueError("Rotary is for x itself: a context has positions of its own; make this layer without it")
        if context is not None and cache is not None:
            raise ValueError("a cache continues x itself; with a context there is nothing to continue: drop cache=")
        q, (k, v) = self.projected(x, context)
        if self.position is not None:
            start = 0 if cache is None else len(cache)
            here = torch.arange(start, start + x.shape[1], device=x.device) if positions is None else positions
            q, k = self.position.turn(q, here), self.position.turn(k, here)
        return q, k, v

    @classmethod
    def in_place_of(
        cls, layer: MultiHeadAttention, *, features: int | None = None, seed: int = 0, epsilon: float = 0.0
    ) -> PerformerAttention:
        """A Performer with the projections of a layer: its parameters are shared, not copied.

        >>> softmax = MultiHeadAttention(6, 2, fused=True)
        >>> PerformerAttention.in_place_of(softmax, features=32).w_qkv is softmax.w_qkv
        True

        Args:
            layer: the layer to replace; its dropout is left out, as there are no weights.
            features: as in the constructor.
            seed: as in the constructor.
            epsilon: as in the constructor.

        Raises:
            ValueError: features cannot estimate the attention of the layer; the message gives the reason.
        """
        position = layer.position if isinstance(layer.position, Rotary) else None
        performer = cls._sharing(layer, features=features, seed=seed, position=position, epsilon=epsilon)
        performer.redraw(seed)  # on the device of the layer
        return performer

    @classmethod
    def unsupported_reason(cls, layer: MultiHeadAttention) -> str | None:
        """Why a Performer cannot take the place of a layer, or None."""
        if not (layer.position is None or isinstance(layer.position, Rotary)):
            return f"its positions ({type(layer.position).__name__}) are added to scores, and features make none"
        if not 0 < layer.scale < inf:
            return f"its scale is {layer.scale}, and features estimate e^(scale·q·k) for a finite scale above 0"
        return super().unsupported_reason(layer)

    @classmethod
    def from_package(cls, module: Any) -> PerformerAttention:
        """The same layer with the weights and features of a `performer_pytorch` attention, copied; epsilon is its 1e-4.

        The mask of a call says whether it is causal. The package adds 1e-6 to the denominator of causal sums, so that
        rows sum to less than 1, and counts padded keys in its denominator: both are errors, and not copied.

        Args:
            module: its SelfAttention or CrossAttention, without local heads, dropout or another kernel.

        Raises:
            TypeError: another object.
            ValueError: options that this layer does not have.
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
        """The arguments shown by `print(layer)`."""
        return f"{super().extra_repr()}, features={self.features}" + (
            f", epsilon={self.epsilon}" if self.epsilon else ""
        )
