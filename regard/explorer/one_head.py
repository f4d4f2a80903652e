"""The exact weights of one head of one batch row, on demand: a row costs O(N·D), whatever the other heads are.

`regard.lens.measuring.weights` answers for all heads and batch rows at once, which hovering over a token cannot wait
for in a model of many heads.

Axis letters: H heads, N positions (Nq queries, Nk keys), D head size.

It does not know views, sessions or how anything is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from regard.lens.assembling import Assembled
from regard.lens.measuring.weights import Given, Part, Remembered, Weights, as_they_are, exponentials
from regard.rules import Rule

__all__ = ["HeadWeights", "Scored", "one_head"]


class HeadWeights(Protocol):
    """Where the exact weights of one head come from."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Nq, Nk."""

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols), in fp32 or wider."""

    def row(self, i: int) -> Tensor:
        """The weights of query i, (Nk,), as the softmax of its scores gives them."""


def one_head(weights: Weights, head: int, batch: int = 0) -> HeadWeights:
    """The weights of one head of one batch row.

    >>> import regard
    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> one_head(regard.look(x, x, x).weights, 0).tile(slice(1), slice(None))
    tensor([[0.4711, 0.2645, 0.2645]])

    Raises TypeError for weights of another kind than the lens has.
    """
    if isinstance(weights, Remembered):
        return Scored(weights, head, batch)
    if isinstance(weights, Given):
        return _Whole(weights.weights[batch, head])
    if isinstance(weights, Assembled):
        rows = [batch if moved is None else moved[batch] for moved in weights.rows]
        parts = [one_head(p, head, min(b, p.sizes[0] - 1)) for p, b in zip(weights.parts, rows, strict=True)]
        return _Below(parts, weights.first)
    raise TypeError(f"one_head takes the weights of a view, got {type(weights).__name__}")


class Scored:
    """Weights from q, k and lse: e^(score − lse)."""

    def __init__(self, weights: Remembered, head: int, batch: int = 0) -> None:
        self.call, self.head, self.batch = weights.call, head, batch
        self.sizes = (self.call.sizes[2], self.call.sizes[3])
        group = self.call.sizes[1] // self.call.k.shape[1]
        self.q, self.k = self.call.q[batch, head], self.call.k[batch, head // group]  # (Nq, D), (Nk, D)
        self.lse = weights.exact_lse(slice(None))[batch, head]  # (Nq,), in fp64 where logits are large

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols)."""
        lse = self.lse[rows, None]
        s = self.scores(self.dots(rows, cols).mul_(self.call.scale), rows, cols)
        t = s.sub_(torch.where(lse == -inf, 0.0, lse))  # e^(−∞ − 0) = 0 where nothing is seen
        return exponentials(t, out=t)

    def row(self, i: int) -> Tensor:
        """The weights of query i, (Nk,).

        The whole row is at hand, and its own sum is nearer the truth than lse, whose rounding grows with the scores: at
        scores near 30 e^(score − lse) errs by 6e-6, this by 8e-7.
        """
        rows, every = slice(i, i + 1), slice(None)
        s = self.scores(self.dots(rows, every).mul_(self.call.scale), rows, every)[0]
        if bool((s == -inf).all()):
            return torch.zeros_like(s)
        sink = self._sink(i)
        return s.softmax(-1) if sink is None else torch.cat([s, sink.to(s).view(1)]).softmax(-1)[:-1]

    def hidden(self, rows: Part) -> Tensor:
        """Which keys are masked for these queries, (rows, Nk): their score is −∞, whatever q·k is."""
        every = slice(None)
        return self.scores(self.dots(rows, every).mul_(self.call.scale), rows, every) == -inf

    def _sink(self, i: int) -> Tensor | None:
        """The logit that joins the softmax of query i."""
        sinks: Tensor | None = self.call.sinks
        if sinks is None:
            return None
        return sinks[self.head] if sinks.ndim == 1 else sinks[self.batch, self.head, i]

    def dots(self, rows: Part, cols: Part) -> Tensor:
        """q·k of these queries and keys, (rows, cols)."""
        with as_they_are(self.call.device):
            products: Tensor = self.q[rows].to(self.lse.dtype) @ self.k[cols].to(self.lse.dtype).mT
            return products

    def scores(self, scaled: Tensor, rows: Part, cols: Part) -> Tensor:
        """What the softmax gets of scaled products, which are written over: capped, biased, −∞ where hidden."""
        call, (nq, nk) = self.call, self.sizes
        with as_they_are(call.device):
            s = scaled
            if call.softcap is not None:
                s = s.div_(call.softcap).tanh_().mul_(call.softcap)
            i = torch.arange(nq, device=call.device)[rows].view(-1, 1)
            j = torch.arange(nk, device=call.device)[cols].view(1, -1)
            if call.bias is not None:
                s = s + self._read(call.bias, i, j)
            if call.mask is not None:
                s = s.masked_fill(~self._read(call.mask, i, j), -inf)
            return s

    def _read(self, rule: Rule, i: Tensor, j: Tensor) -> Tensor:
        """The cells (rows, cols) of a mask or a bias, asked at this batch row and head."""
        b, h = (torch.full((1, 1, 1, 1), n, device=i.device) for n in (self.batch, self.head))
        nq, nk = self.sizes
        cells: Tensor = rule.bind(nq, nk, self.call.device, self.lse.dtype)(b, h, i, j)
        return cells.reshape(cells.shape[-2:])


@dataclass(frozen=True)
class _Whole:
    """Weights that a model made itself, (Nq, Nk)."""

    weights: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        return self.weights.shape[0], self.weights.shape[1]

    def tile(self, rows: Part, cols: Part) -> Tensor:
        part = self.weights[rows][:, cols]
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)

    def row(self, i: int) -> Tensor:
        return self.tile(slice(i, i + 1), slice(None))[0]


class _Below:
    """The calls of a generation, one below the other; keys that a call did not have weigh 0 in it."""

    def __init__(self, parts: Sequence[HeadWeights], first: Sequence[int]) -> None:
        self.parts, self.first = parts, first
        nk = max(start + part.sizes[1] for start, part in zip(first, parts, strict=True))
        self.sizes = (sum(part.sizes[0] for part in parts), nk)

    def tile(self, rows: Part, cols: Part) -> Tensor:
        wanted, keys = torch.arange(self.sizes[0])[rows], torch.arange(self.sizes[1])[cols]
        whole = torch.zeros(len(wanted), len(keys))
        begin = 0
        for part, first in zip(self.parts, self.first, strict=True):
            mine = (wanted >= begin) & (wanted < begin + part.sizes[0])
            there = (keys >= first) & (keys < first + part.sizes[1])
            if bool(mine.any()) and bool(there.any()):
                tile = part.tile(wanted[mine] - begin, keys[there] - first).cpu()
                whole = whole.to(torch.promote_types(whole.dtype, tile.dtype))
                whole[mine.nonzero(), there.nonzero().view(1, -1)] = tile.to(whole.dtype)  # fp64 where logits are large
            begin += part.sizes[0]
        return whole

    def row(self, i: int) -> Tensor:
        n = 0
        while i >= self.parts[n].sizes[0]:
            i, n = i - self.parts[n].sizes[0], n + 1
        found = self.parts[n].row(i).cpu()
        whole = found.new_zeros(self.sizes[1])
        whole[self.first[n] : self.first[n] + len(found)] = found
        return whole
