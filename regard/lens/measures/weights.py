"""Exact weights of one call on demand: a row, a column, a tile, or one key per query.

With s the scores as the softmax gets them and lse known, p = e^(s − lse): a row costs O(N·D), and so does one pair for
every query. `ComputedWeights` computes from q, k and lse; `StoredWeights` reads weights that a model computed itself.

The exponential turns a rounding step of s or of lse, which grows with them, into an error of p. Rows whose |lse| is
above `LARGE` are therefore computed in fp64, with an lse of fp64 scores; results keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, log
from typing import Protocol

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.masks.mask import indices

LARGE = 64.0
"""|lse| above which fp32 is too coarse: half a step of lse is 4e-6 there, and each weight errs by as large a part."""

PAIR_CELLS = 1 << 24  # numbers of q that are held at once while pairs are weighed
ROW_CELLS = 1 << 22  # scores of whole rows that are held at once while their lse is computed
LOG2E = 1 / log(2)

Part = slice | Tensor
"""Which queries or keys: a slice, or their indices (n,)."""


class Weights(Protocol):
    """Where a view's exact weights come from."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, Nq, Nk."""

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (B, H, rows, cols), in fp32 or wider."""

    def pairs(self, keys: Tensor) -> Tensor:
        """The weight of one key per query, (B, H, Nq); keys (Nq,) or (B or 1, H or 1, Nq) are indices, −1 for none."""


class ComputedWeights:
    """Weights from q and k of a call on torch tensors and the lse (B, H, Nq) of its rows, −∞ where one sees nothing.

    An fp64 lse is that of fp64 scores where it is large, as `engines.measure` returns it; with an fp32 lse, large rows
    get an lse of their own each time.
    """

    def __init__(self, call: Call, lse: Tensor) -> None:
        q, k = call.q.detach(), call.k.detach()
        self.call = replace(call, q=q, k=k, v=k.new_zeros(1).expand(*k.shape[:3], 1))
        self.sizes = call.sizes
        self.lse = lse.detach()

    @property
    def has_sink(self) -> bool:
        """Whether a sink takes a part of each row."""
        return self.call.sinks is not None

    @property
    def rounding(self) -> float:
        """How far rounding alone may carry a row's sum: of the sum itself, and of the scores and lse in e^(s − lse).

        A score errs in proportion to |q|·|k|, which is more than itself where products cancel. In fp32 no more than
        `LARGE` is granted: rows of larger scores are computed in fp64, and products that cancel further are an error.
        """
        call = self.call
        norms = (torch.linalg.vector_norm(x, dim=-1, dtype=call.wide) for x in (call.q, call.k))
        finite = (x[x.isfinite()] for x in (*norms, self.lse))
        q, k, lse = (float(x.abs().max()) if x.numel() else 0.0 for x in finite)
        size = max(1.0, lse, q * k * abs(call.scale))
        size = size if call.wide == torch.float64 else min(size, LARGE)
        return float(torch.finfo(call.wide).eps * (self.sizes[3] + 16 * size))

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (B, H, rows, cols)."""
        with as_they_are(self.call.device):
            lse = self.exact_lse(rows)
            t = self._scores(rows, cols, lse.dtype).sub_(_shift(lse).unsqueeze(-1))
            return exponentials(t, out=t).to(self.call.wide)

    def scores(self, rows: Part, cols: Part) -> Tensor:
        """What the softmax gets: scaled, capped, biased, −∞ where hidden. (B, H, rows, cols)."""
        with as_they_are(self.call.device):
            return self._scores(rows, cols, self.call.wide)

    def pairs(self, keys: Tensor) -> Tensor:
        """The weight of one key per query, (B, H, Nq); 0 where the key is −1 or hidden."""
        batch, heads, nq, _ = self.sizes
        keys = keys.to(self.call.device).expand(batch, heads, nq)
        if 0 in self.sizes:
            return torch.zeros(batch, heads, nq, dtype=self.call.wide, device=self.call.device)
        at_once = max(1, PAIR_CELLS // (batch * heads * self.call.q.shape[-1]))
        with as_they_are(self.lse.device):
            # On a GPU, to find out whether any row is large is to wait for it; these few products are cheap in fp64.
            known = self.lse.is_cuda and self.lse.dtype == torch.float64
            lse = self.lse if known else self.exact_lse(slice(None))
            parts = (slice(i, i + at_once) for i in range(0, nq, at_once))
            return torch.cat([self._pairs(keys, rows, lse) for rows in parts], -1).to(self.call.wide)

    def exact_lse(self, rows: Part) -> Tensor:
        """The lse of these rows, (B, H, rows), in the dtype to compute them in: fp64 where one of them is large."""
        lse = self.lse[:, :, rows]
        if self.call.wide == torch.float64 or not is_large(lse):
            return lse.to(self.call.wide)
        if lse.dtype == torch.float64:
            return lse
        _, _, nq, nk = self.sizes
        at_once = max(1, ROW_CELLS // max(1, lse.shape[0] * lse.shape[1] * nk))
        with as_they_are(lse.device):
            parts = []
            for part in torch.split(torch.arange(nq, device=lse.device)[rows], at_once):
                s = self._scores(part, slice(None), torch.float64)
                if (sinks := self.call.sinks) is not None:
                    column = sinks[:, :, part] if sinks.ndim == 3 else sinks.view(-1, 1).expand(s.shape[:3])
                    s = torch.cat([s, column.to(s).unsqueeze(-1)], -1)
                parts.append(s.logsumexp(-1))
            return torch.cat(parts, -1)

    def _scores(self, rows: Part, cols: Part, wide: torch.dtype) -> Tensor:
        call, (batch, heads, nq, nk) = self.call, self.sizes
        q, k = call.q[:, :, rows].to(wide), call.k[:, :, cols].to(wide)
        s = grouped_scores(q, k).mul_(call.scale)
        i = torch.arange(nq, device=call.device)[rows]
        j = torch.arange(nk, device=call.device)[cols]
        return self.finish(s, indices(batch, heads, i, j, call.device))

    def _pairs(self, keys: Tensor, rows: slice, lse: Tensor) -> Tensor:
        call, (batch, heads, nq, nk) = self.call, self.sizes
        keys, group = keys[..., rows], heads // call.k.shape[1]
        there = (keys >= 0) & (keys < nk)
        index = torch.where(there, keys, 0)
        k = call.k[:, :, None].expand(-1, -1, group, -1, -1)  # (B, Hkv, G, Nk, D), a view
        at = index.view(batch, -1, group, keys.shape[-1], 1).expand(-1, -1, -1, -1, k.shape[-1])
        chosen = k.gather(3, at).reshape(*keys.shape, -1).to(lse.dtype)  # (B, H, rows, D)
        s = (call.q[:, :, rows].to(lse.dtype) * chosen).sum(-1).mul_(call.scale)
        b, h, i, _ = indices(batch, heads, torch.arange(nq, device=call.device)[rows], index, call.device)
        s = self.finish(s, (b[..., 0], h[..., 0], i.view(-1), index))
        return torch.where(there, exponentials(s.sub_(_shift(lse[..., rows])), out=s), 0.0)

    def finish(self, s: Tensor, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Softcap, bias and mask, in the operation's order."""
        call, (_, _, nq, nk) = self.call, self.sizes
        if call.softcap is not None:
            s = s.div_(call.softcap).tanh_().mul_(call.softcap)
        if call.bias is not None:
            s = s + call.bias.bind(nq, nk, call.device, s.dtype)(*at)
        if call.mask is not None:
            s = s.masked_fill_(~call.mask.bind(nq, nk, call.device, s.dtype)(*at), -inf)
        return s


class StoredWeights:
    """Weights (B, H, Nq, Nk) that a model computed itself, with their scores, which have one more column for a sink.

    edited: the model changed them after its softmax: rows need not sum to 1, and some weights may be negative.
    """

    def __init__(self, weights: Tensor, scores: Tensor | None = None, *, edited: bool = False) -> None:
        self.edited = edited
        self.weights, self.scores = weights.detach(), None if scores is None else scores.detach()
        batch, heads, nq, nk = weights.shape
        self.sizes = (batch, heads, nq, nk)

    @property
    def has_sink(self) -> bool:
        """Whether a sink takes a part of each row."""
        return self.scores is not None and self.scores.shape[-1] > self.sizes[3]

    @property
    def rounding(self) -> float:
        """How far rounding alone may carry a row's sum: of each weight, and of the sum in fp32 or wider."""
        own = self.weights.dtype
        wide = torch.promote_types(own, torch.float32)
        return float(torch.finfo(own).eps + self.sizes[3] * torch.finfo(wide).eps)

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (B, H, rows, cols)."""
        part = self.weights[:, :, rows][..., cols]
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)

    def pairs(self, keys: Tensor) -> Tensor:
        """The weight of one key per query, (B, H, Nq); 0 where the key is −1."""
        batch, heads, nq, nk = self.sizes
        keys = keys.to(self.weights.device).expand(batch, heads, nq)
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        if nk == 0:
            return self.weights.new_zeros(batch, heads, nq, dtype=wide)
        there = (keys >= 0) & (keys < nk)
        chosen = self.weights.gather(-1, torch.where(there, keys, 0).unsqueeze(-1)).squeeze(-1)
        return torch.where(there, chosen, 0.0).to(wide)


def sources(weights: Weights) -> tuple[ComputedWeights | StoredWeights, ...]:
    """What weights are computed from: themselves, or the calls of a generation, their `parts`."""
    parts = getattr(weights, "parts", (weights,))
    return tuple(part for part in parts if isinstance(part, (ComputedWeights, StoredWeights)))


@contextmanager
def as_they_are(device: torch.device) -> Iterator[None]:
    """Without gradient and without autocast: weights in the precision of their scores."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def exponentials(t: Tensor, out: Tensor) -> Tensor:
    """e^t into `out`, which may be `t`, as 2^(t·log₂e).

    torch's exp on a CPU takes three times as long, and thirty times where it underflows, as it does for most keys of a
    head that looks at one. The rounding of t·log₂e is that of t once more.
    """
    return torch.mul(t, LOG2E, out=out).exp2_()


def is_large(lse: Tensor) -> bool:
    """Whether any finite |lse| is above `LARGE`. Waits for a GPU."""
    if lse.numel() == 0:
        return False
    low, high = lse.aminmax()
    if float(low) >= -LARGE and float(high) <= LARGE:  # most often, and all that it costs
        return False
    size = lse.abs()
    return bool(((size > LARGE) & (size < inf)).any())


def _shift(lse: Tensor) -> Tensor:
    return torch.where(lse == -inf, 0.0, lse)  # e^(−∞ − 0) = 0 where a row sees nothing


def grouped_scores(q: Tensor, k: Tensor) -> Tensor:
    """q (B, H, r, D) against k (B, Hkv, c, D) → (B, H, r, c): the query heads of one key head in one product."""
    (batch, heads, rows, width), (_, kv_heads, cols, _) = q.shape, k.shape
    if heads == kv_heads:
        return q @ k.mT
    together = q.reshape(batch, kv_heads, heads // kv_heads * rows, width) @ k.mT  # (B, Hkv, G·r, c)
    return together.view(batch, heads, rows, cols)
