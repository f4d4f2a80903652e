"""Attention by features: what `PerformerAttention` does between its queries, keys and values.

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)        E[φ(q)·φ(k)] = e^(scale·q·k)

Time is O(N·m·D) for m features, in memory that grows with N by the output alone (without gradients). Causal attention
walks over chunks, and decoding keeps sums of a fixed size (`PerformerState`). Features and sums are in fp32 or wider.
It does not know layers.

Axis letters: B batch, H heads (Hkv of keys and values, G = H/Hkv), N positions (Nq, Nk), D head size, m features.
"""

from __future__ import annotations

from math import inf, log

import torch
from torch import Tensor

from regard.efficient.feature_sums import FeatureSums, Rows, add_keys, by_group, no_keys, read_rows, walk
from regard.efficient.features import chunk_on, largest_product, log_features
from regard.efficient.performer_state import PerformerState
from regard.efficient.seen_keys import Seen, read_seen

__all__ = ["check_numbers", "kernel_attention"]

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
    >>> from regard.efficient.features import orthogonal_features
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
    another mask, for a scale that is not finite and positive, and for epsilon with a state: it is relative to the
    largest feature of the whole sequence, which a decoder does not know.
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
        if state is None:
            sums = no_keys(batch, heads, len(self.directions), width, self.v)
        else:
            sums = state.sums(batch, heads, width, self.directions, self.v)
        parts: list[Rows] = []
        if self.seen.causal:
            # The queries are the last positions: those before all keys see nothing, keys before them are seen by all.
            parts = [self._read(sums, 0, nq - nk)] if nq > nk else []
            sums = self._add(sums, 0, nk - nq)
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


def check_numbers(scale: float | None, epsilon: float) -> None:
    """Raise ValueError for a scale that is not finite and above 0 (None: the usual one), and an epsilon outside [0, 1).

    >>> check_numbers(None, 0.0)
    """
    if scale is not None and not 0 < scale < inf:
        raise ValueError(f"features estimate e^(scale·q·k) for a finite scale above 0, got {scale}")
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon must be in [0, 1), got {epsilon}")


def _check(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, scale: float | None, epsilon: float, state: object
) -> None:
    check_numbers(scale, epsilon)
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
