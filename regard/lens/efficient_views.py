"""What Linformer and Performer look at, in their own terms: rows over slots, rows implied by features.

`regard.watch` sees a Linformer's softmax over slots, and nothing of a Performer, which has none: it names the layer as
unseen. These functions look at one layer and one input. A row costs O(N·D) or O(N·m); N×N is never built.

Axis letters: B batch, H heads (Hkv of keys and values), N positions, D head size, m features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.checks import index_among
from regard.lens.look import look
from regard.lens.view import View
from regard.nn.feature_maps import CHUNK, kernel_attention, largest_product, log_features, read_key_mask
from regard.nn.linformer import LinformerAttention
from regard.nn.performer import PerformerAttention
from regard.nn.projections import ContextKeys

Kind = Literal["exact", "approximate"]
T = TypeVar("T", Tensor, Tensor | ContextKeys | None)


class SlotView:
    """What a Linformer looked at: exact over slots, approximate over positions. `look_slots` makes one.

    slots: a `regard.look` view whose keys are the slots, with all its measures.
    """

    def __init__(self, slots: View, values: Tensor, real: Tensor | None) -> None:
        self.slots, self._values, self._real = slots, values, real  # values: (1 or Hkv, N, slots)

    @property
    def output(self) -> Tensor:
        """Each head's outputs before W_O, (B, H, N, D)."""
        output: Tensor = self.slots.output
        return output

    def row(self, i: int) -> Tensor:
        """The exact weights of query i over the slots, (B, H, slots)."""
        row: Tensor = self.slots.row(i)
        return row

    def positions(self, i: int) -> Tensor:
        """What query i takes from each position, (B, H, N): its row over slots, sent back through F.

        These are the exact coefficients of the values in the output. As attention they are approximate: which slot is
        looked at depends on keys that mix all positions, coefficients may be negative, and they need not sum to 1.
        """
        row = self.row(i)  # (B, H, slots)
        sent = self._values.repeat_interleave(row.shape[1] // len(self._values), 0).to(row)  # (H, N, slots)
        back = torch.einsum("bhs,hns->bhn", row, sent)
        return back if self._real is None else back.masked_fill(~self._real[:, None], 0.0)

    def how(self, name: str) -> Kind:
        """Is what a method gives "exact" or "approximate"? Raises LookupError for another name."""
        kinds: dict[str, Kind] = {"row": "exact", "output": "exact", "positions": "approximate"}
        return _kind(kinds, name)


def look_slots(
    layer: LinformerAttention, x: Tensor, context: Tensor | ContextKeys | None = None, *, mask: object = None
) -> SlotView:
    """Look at what a Linformer layer looks at.

    >>> import torch
    >>> from regard.nn.linformer import LinformerAttention, SlotProjection
    >>> layer = LinformerAttention(6, 2, projection=SlotProjection(positions=100, slots=4))
    >>> look_slots(layer, torch.randn(1, 50, 6)).slots.entropy.shape
    torch.Size([1, 2, 50])

    Args:
        layer: the layer.
        x: as in a call of the layer, or (N, d_model) for one batch row.
        context: as in a call of the layer.
        mask: as in a call of the layer. Dropout is left out.

    Raises:
        TypeError: for another layer; otherwise as a call of it.
    """
    if not isinstance(layer, LinformerAttention):
        raise TypeError(f"look_slots takes a LinformerAttention, got {type(layer).__name__}")
    x, context = _batched(x), _batched(context)
    with torch.no_grad():
        q, slots = layer.slots(x, context, mask=mask)
        source = x if context is None else context
        length = source.k.shape[-2] if isinstance(source, ContextKeys) else source.shape[-2]
        seen = read_key_mask(mask, len(q), layer.num_heads, q.shape[-2], length, q.device)
        matrix = layer.projection.keys if layer.projection.values is None else layer.projection.values
        sent = matrix[..., :length, :].detach()
        view = look(q, *slots, scale=layer.scale, backend=layer.backend)
    return SlotView(view, sent if sent.ndim == 3 else sent[None], seen.real)


class Approximation(NamedTuple):
    """How far a Performer's heads are from softmax attention on the same queries and keys, on some rows."""

    rows: tuple[int, ...]  # which queries were compared
    output: Tensor  # (B, H): ‖estimate − exact‖ / ‖exact‖ over these rows
    total_variation: Tensor  # (B, H): ½ Σ_j |implied − softmax|, its mean over these rows; 0 the same, 1 disjoint


class FeatureView:
    """What a Performer looked at: the rows that its features imply, softmax's beside them. `look_features` makes one.

    output: each head's outputs before W_O, (B, H, N, D).  lse: the estimate of each row's log-sum-exp, (B, H, N).
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, directions: Tensor, *, scale: float, epsilon: float, mask: object
    ) -> None:
        seen = read_key_mask(mask, len(q), q.shape[1], q.shape[2], k.shape[2], q.device)
        self.output, self.lse = kernel_attention(q, k, v, directions, mask=mask, scale=scale, epsilon=epsilon)
        self._q, self._k, self._v, self._seen = q, k, v, seen
        self._directions, self._scale, self._epsilon = directions, scale, epsilon
        self._top = largest_product(k, directions, scale, seen.real) if epsilon else None

    def row(self, i: int) -> Tensor:
        """The weights that the features imply for query i, (B, H, Nk): φ(q_i)·φ(k_j), normalised.

        They are exact for what the layer computes: its output is their mean of the values. O(N·m).
        """
        q = self._query(i)
        a = log_features(q, self._directions, self._scale, epsilon=self._epsilon).together  # (B, Hkv, G, m)
        parts = []
        for start in range(0, self._k.shape[2], CHUNK):
            k = self._k[:, :, start : start + CHUNK]
            b = log_features(k, self._directions, self._scale, epsilon=self._epsilon, top=self._top).together
            parts.append(torch.logsumexp(a.unsqueeze(-2) + b.unsqueeze(2), -1))  # (B, Hkv, G, n)
        return self._normalised(torch.cat(parts, -1), i)

    def softmax_row(self, i: int) -> Tensor:
        """The weights that softmax attention gives query i on the same queries and keys, (B, H, Nk). O(N·D)."""
        q = self._query(i).to(self.lse.dtype)
        return self._normalised((q @ self._k.to(q).transpose(-1, -2)) * self._scale, i)

    def error(self, rows: int | Sequence[int] = 32) -> Approximation:
        """How far the heads are from softmax attention, measured on some rows: O(N·m) for each.

        Args:
            rows: that many queries, evenly spaced; or which ones. Rows that see nothing count as equal.

        Raises:
            ValueError: for no row.
            IndexError: for a row that does not exist.
        """
        count = self._q.shape[2]
        if isinstance(rows, int):
            few = min(rows, count)
            rows = sorted({round(i * (count - 1) / max(1, few - 1)) for i in range(few)}) if few > 0 else ()
        if not rows:
            raise ValueError("an error is measured on at least one row, got none")
        v = self._v.to(self.lse.dtype)
        gaps, wrong, right = list[Tensor](), list[Tensor](), list[Tensor]()
        for i in rows:
            implied, softmax = self.row(i), self.softmax_row(i)  # (B, H, Nk)
            gaps.append(0.5 * (implied - softmax).abs().sum(-1))
            for sums, weights in ((right, softmax), (wrong, implied - softmax)):
                grouped = weights.reshape(len(v), v.shape[1], weights.shape[1] // v.shape[1], -1)  # (B, Hkv, G, Nk)
                sums.append((grouped @ v).flatten(1, 2).square().sum(-1))
        lost, kept = torch.stack(wrong).sum(0), torch.stack(right).sum(0)  # (B, H)
        relative = torch.where(lost > 0, (lost / kept).sqrt(), 0.0)
        return Approximation(tuple(rows), relative, torch.stack(gaps).mean(0))

    def how(self, name: str) -> Kind:
        """Is what a method gives "exact" or "approximate"? Raises LookupError for another name.

        `softmax_row` is exact for softmax, which this layer estimates and does not compute.
        """
        kinds: dict[str, Kind] = {"row": "exact", "output": "exact", "lse": "exact", "softmax_row": "exact"}
        return _kind(kinds, name)

    def _query(self, i: int) -> Tensor:
        """Query i of every head, by key head: (B, Hkv, G, D)."""
        i = index_among("row", i, self._q.shape[2], "queries")
        kv_heads = self._k.shape[1]
        return self._q[:, :, i].reshape(len(self._q), kv_heads, self._q.shape[1] // kv_heads, self._q.shape[-1])

    def _normalised(self, scores: Tensor, i: int) -> Tensor:
        """Scores (B, Hkv, G, Nk) of query i → weights (B, H, Nk), 0 where a key is hidden."""
        nq, nk = self._q.shape[2], self._k.shape[2]
        last = i % nq + nk - nq if self._seen.causal else nk
        hidden = torch.arange(nk, device=self._k.device)[None] > last
        hidden = (hidden if self._seen.real is None else hidden | ~self._seen.real)[:, None]  # (B or 1, 1, Nk)
        weights = scores.flatten(1, 2).masked_fill(hidden, -torch.inf).softmax(-1)
        return weights.masked_fill(hidden, 0.0)  # a row of −∞ alone is NaN after softmax


def look_features(
    layer: PerformerAttention,
    x: Tensor,
    context: Tensor | ContextKeys | None = None,
    *,
    mask: object = None,
    positions: Tensor | None = None,
) -> FeatureView:
    """Look at what a Performer layer looks at.

    >>> import torch
    >>> from regard.nn.performer import PerformerAttention
    >>> view = look_features(PerformerAttention(6, 2), torch.randn(1, 50, 6))
    >>> view.row(49).shape, view.error().total_variation.shape
    (torch.Size([1, 2, 50]), torch.Size([1, 2]))

    Args:
        layer: the layer.
        x: as in a call of the layer, or (N, d_model) for one batch row.
        context: as in a call of the layer.
        mask: as in a call of the layer.
        positions: as in a call of the layer.

    Raises:
        TypeError: for another layer; otherwise as a call of it.
    """
    if not isinstance(layer, PerformerAttention):
        raise TypeError(f"look_features takes a PerformerAttention, got {type(layer).__name__}")
    x, context = _batched(x), _batched(context)
    with torch.no_grad():
        q, k, v = layer.heads_of(x, context, positions=positions)
        return FeatureView(q, k, v, layer.directions, scale=layer.scale, epsilon=layer.epsilon, mask=mask)


def _batched(x: T) -> T:
    """(N, d) → (1, N, d); anything else as it is."""
    return x[None] if isinstance(x, Tensor) and x.ndim == 2 else x


def _kind(kinds: dict[str, Kind], name: str) -> Kind:
    if name not in kinds:
        raise LookupError(f"there is no {name!r}; there are {', '.join(kinds)}")
    return kinds[name]
