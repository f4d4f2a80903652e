"""Performer (Choromanski et al. 2020, FAVOR+): softmax's kernel estimated by features, so that keys are summed once.

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)        E[φ(q)·φ(k)] = e^(scale·q·k)

Time is O(N·m·D) for m features, in memory that grows with N by the output alone (without gradients). Causal attention
walks over chunks, and decoding keeps sums of a fixed size (`PerformerState`). Features and sums are in fp32 or wider.

No weights are made, so `regard.watch` sees nothing here and says so; `regard.lens.efficient_views` shows the rows.

Axis letters: B batch, H heads (Hkv of keys and values, G = H/Hkv), N positions (Nq, Nk), D head size, m features.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from regard.efficient.feature_sums import FeatureSums, Rows, add_keys, by_group, no_keys, read_rows, walk
from regard.efficient.features import chunk_on, largest_product, log_features, orthogonal_features, usual_count
from regard.efficient.head_projections import HeadProjections
from regard.efficient.performer_state import PerformerState
from regard.efficient.seen_keys import Seen, read_seen
from regard.layers import ContextKeys
from regard.rotary import Angles, Rotary

__all__ = ["PerformerAttention", "kernel_attention"]

STEP = 128  # positions of a causal chunk: their pairs are computed, 128·m each, beside m·D for the sums


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    *,
    mask: object = None,
    scale: float | None = None,
    epsilon: float = 0.0,
    state: PerformerState | None = None,
) -> Rows:
    """Attention by random features: the outputs (B, H, Nq, Dv), and the estimate of each row's lse (B, H, Nq).

    >>> import regard
    >>> q, k, v = (torch.randn(1, 2, 9, 4).clamp(-1, 1) for _ in range(3))
    >>> rows = kernel_attention(q, k, v, orthogonal_features(50_000, 4, seed=0))
    >>> torch.allclose(rows.output, regard.attention(q, k, v), atol=0.05)
    True

    q: (B, H, Nq, D).  k, v: (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv).  directions: (m, D), as `orthogonal_features` draws.
    mask: masks.padding(…), masks.causal(), or both; over what the state holds as well.
    scale: of the scores, above 0; default 1/√D.
    epsilon: added to every feature, as performer-pytorch does with 1e-4; it biases the estimate. Default 0.
    state: earlier keys and values, which these continue; this call's are added to it.

    A row that sees nothing gives 0, with lse −∞ and gradient 0. Raises ValueError for sizes that do not fit, for
    another mask, for a scale that is not positive, and for epsilon with a state: it is relative to the largest feature
    of the whole sequence, which a decoder does not know.
    """
    _check(q, k, v, directions, scale, epsilon, state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    before = 0 if state is None else len(state)
    seen = read_seen(mask, len(q), q.shape[1], q.shape[2], before + k.shape[2], q.device)
    if seen.real is not None:
        seen = Seen(seen.real[:, before:], seen.causal)
    with torch.autocast(q.device.type, enabled=False):
        return _Estimate(q, k, v, directions, scale, epsilon, seen).run(state)


class _Estimate:
    """One call, its arguments checked; features are made chunk by chunk, and forgotten where no gradient needs them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, directions: Tensor, scale: float, epsilon: float, seen: Seen
    ) -> None:
        self.dtype, self.wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        self.q = q.reshape(len(q), k.shape[1], q.shape[1] // k.shape[1], *q.shape[2:])  # (B, Hkv, G, Nq, D)
        self.k, self.v, self.seen = k, v.to(self.wide), seen
        self.directions, self.scale, self.epsilon = directions, scale, epsilon
        self.top = largest_product(k, directions, scale, seen.real) if epsilon and k.shape[2] else None

    def run(self, state: PerformerState | None) -> Rows:
        """All rows in order, and the state brought up to date."""
        batch, heads, nk, _ = self.k.shape
        nq, width = self.q.shape[3], self.v.shape[-1]
        nothing = no_keys(batch, heads, len(self.directions), width, self.v)
        sums = nothing if state is None else state.sums(batch, heads, width, self.directions, self.v)
        parts: list[Rows] = []
        if self.seen.causal:
            sums = self._add(sums, 0, nk - nq)  # the queries are the last positions; keys before them are seen by all
            parts = [self._read(nothing, 0, nq - nk)] if nq > nk else []
            for start in range(max(0, nk - nq), nk, STEP):
                rows, sums = self._walk(sums, start, min(start + STEP, nk))
                parts.append(rows)
        else:
            sums = self._add(sums, 0, nk)
            step = chunk_on(self.q.device)
            parts = [self._read(sums, start, min(start + step, nq)) for start in range(0, nq, step)]
        if state is not None:
            state.store(sums, nk, self.directions)
        return self._joined(parts)

    def _add(self, sums: FeatureSums, start: int, end: int) -> FeatureSums:
        step = chunk_on(self.k.device)
        for first in range(start, end, step):
            last = min(first + step, end)
            sums = add_keys(sums, self._keys(first, last), self.v[:, :, first:last])
        return sums

    def _walk(self, sums: FeatureSums, start: int, end: int) -> tuple[Rows, FeatureSums]:
        """The keys from start to end, and the queries that stand there."""
        shift = self.q.shape[3] - self.k.shape[2]
        a, added = self._queries(start + shift, end + shift)
        rows, sums = walk(sums, a, self._keys(start, end), self.v[:, :, start:end])
        return Rows(rows.output, rows.lse + added), sums

    def _read(self, sums: FeatureSums, start: int, end: int) -> Rows:
        a, added = self._queries(start, end)
        rows = read_rows(sums, a.flatten(2, 3))
        return Rows(rows.output, rows.lse + added)

    def _queries(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Log-features (B, Hkv, G, n, m), and what is missing in each row's lse (B, Hkv, G·n)."""
        made = log_features(self.q[:, :, :, start:end], self.directions, self.scale, epsilon=self.epsilon)
        return made.logs, made.shift.flatten(2)

    def _keys(self, start: int, end: int) -> Tensor:
        """Log-features (B, Hkv, n, m), −∞ where a key is hidden."""
        k = self.k[:, :, start:end]
        b = log_features(k, self.directions, self.scale, epsilon=self.epsilon, top=self.top).together
        if self.seen.real is None:
            return b
        return b.masked_fill(~self.seen.real[:, None, start:end, None], -torch.inf)

    def _joined(self, parts: list[Rows]) -> Rows:
        """Chunks (B, Hkv, G·n, ·) → all rows (B, H, Nq, ·), output as wide as the queries came."""
        groups = self.q.shape[2]
        if not parts:  # no queries
            output = self.v.new_zeros(*self.q.shape[:4], self.v.shape[-1])
            return Rows(output.flatten(1, 2).to(self.dtype), output.sum(-1).flatten(1, 2))
        output = torch.cat([by_group(rows.output, groups) for rows in parts], 3).flatten(1, 2)
        lse = torch.cat([by_group(rows.lse, groups) for rows in parts], 3).flatten(1, 2)
        return Rows(output.to(self.dtype), lse - log(len(self.directions)))


class PerformerAttention(HeadProjections):
    """Multi-head attention by random features, in the place of `MultiHeadAttention` in an encoder or a decoder.

    >>> import regard
    >>> layer = PerformerAttention(6, 2, features=32)
    >>> layer(torch.zeros(1, 50, 6), mask=regard.masks.causal()).shape
    torch.Size([1, 50, 6])

    d_model, heads, kv_heads, head_dim, bias, out_bias: as in `regard.layers.MultiHeadAttention`.
    features: m, default D·ln D. The error falls as 1/√m, and grows as e to the size of the scores.
    seed: of the random directions, which all heads share and which are saved with the weights.
    position: a regard.positions.Rotary or None. Biases act on scores, which are never made here.
    epsilon: as in `kernel_attention`.  scale: of the scores, default 1/√D.

    Raises ValueError for sizes that do not fit each other, TypeError for another kind of position.
    """

    directions: Tensor

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        features: int | None = None,
        seed: int = 0,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        position: Rotary | None = None,
        epsilon: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__(
            d_model,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            bias=bias,
            out_bias=out_bias,
            values_are_keys=False,
        )
        if not (position is None or isinstance(position, Rotary)):
            raise TypeError(
                f"position must be a regard.positions.Rotary or None, got {type(position).__name__}: a bias is added "
                "to scores, and features make none"
            )
        _check_numbers(scale, epsilon)
        self.position, self.epsilon = position, epsilon
        self.scale = self.head_dim**-0.5 if scale is None else scale
        drawn = orthogonal_features(
            usual_count(self.head_dim) if features is None else features, self.head_dim, seed=seed
        )
        self.register_buffer("directions", drawn.to(self.w_q.weight))

    @property
    def features(self) -> int:
        """How many features there are, m."""
        return len(self.directions)

    def redraw(self, seed: int) -> None:
        """Draw new directions. A `PerformerState` of the old ones is refused from now on.

        >>> layer = PerformerAttention(6, 2)
        >>> layer.redraw(seed=1)

        seed: the same seed gives the same directions on every device.
        """
        drawn = orthogonal_features(self.features, self.head_dim, seed=seed)
        self.directions = drawn.to(self.directions)  # a new tensor, by which a state knows its own

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
    ) -> Rows:
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
        q, (k, v) = self.queries(x), self.looked_at(x, context)
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
        said = f"{self.d_model}, heads={self.heads}, head_dim={self.head_dim}, kv_heads={self.kv_heads}"
        return f"{said}, features={self.features}" + (f", epsilon={self.epsilon}" if self.epsilon else "")


def _check_numbers(scale: float | None, epsilon: float) -> None:
    if scale is not None and not scale > 0:
        raise ValueError(f"features estimate e^(scale·q·k) for a scale above 0, got {scale}")
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon must be in [0, 1), got {epsilon}")


def _check(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, scale: float | None, epsilon: float, state: object
) -> None:
    _check_numbers(scale, epsilon)
    if not all(isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point() for x in (q, k, v)):
        raise ValueError("q, k and v must be floating-point tensors (B, H, N, D)")
    if k.shape[:3] != v.shape[:3] or len(q) != len(k) or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q, k and v do not fit each other: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; "
            "they are (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads: {q.shape[1]} and {k.shape[1]}")
    if directions.ndim != 2 or directions.shape[1] != q.shape[-1] or not len(directions):
        raise ValueError(f"directions must be (features, {q.shape[-1]}), got {tuple(directions.shape)}")
    if state is not None and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries continue a state with {k.shape[2]} keys: a query needs a key of its own"
        )
    if epsilon and state is not None:
        raise ValueError(
            "epsilon cannot go with a state: it is relative to the largest feature of the whole sequence, which is not "
            "known while decoding. Use epsilon=0"
        )
