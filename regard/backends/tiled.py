"""Attention tile by tile in plain torch, with a running maximum: O(N) memory, forward and backward, on any device.

Forward keeps, per query, the largest score so far, the sum of exponentials and the weighted sum of values, and rescales
them when the maximum grows (Milakov & Gimelshein 2018; Rabe & Staats 2021). Backward recomputes each tile from the
row's lse (Dao et al. 2022, algorithm 4). Tiles that the mask hides from every batch row and head are skipped. A tile is
written out in plain operations, so every argument is supported; the largest temporary is a handful of tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import BiasGradient, Call, TileDropout, as_given, custom_kernel_unsupported_reason
from regard.masks import EMPTY, FULL, PARTIAL, DenseMask, Mask
from regard.masks.biases import Bias, DenseBias
from regard.masks.mask import IndexRule, indices, part_of

__all__ = ["forward_with_lse", "how", "run", "tile_size", "unsupported_reason"]

TILE_CELLS = 1 << 20  # scores held at once: 4 MiB in fp32, about what stays near the cores


def unsupported_reason(call: Call) -> str | None:
    """Why this backend cannot do the call, or None."""
    return custom_kernel_unsupported_reason(call)


def how(call: Call) -> str:
    """How it does the call, in a few words."""
    rows, cols = _tile_size(call)
    return f"plain torch, tiles of {rows}×{cols}; O(N) memory" + ("" if call.mask is None else ", skips hidden tiles")


def run(call: Call) -> Tensor:
    """The output (B, H, Nq, Dv)."""
    return forward_with_lse(call)[0]


def forward_with_lse(call: Call) -> tuple[Tensor, Tensor]:
    """The output (B, H, Nq, Dv) and, in the scores' dtype, each row's lse (B, H, Nq), which carries no gradient."""
    call = call.in_torch()
    tensors = () if call.bias is None else call.bias.tensors
    out, lse = _Tiled.apply(_Plan(call), call.q, call.k, call.v, call.sinks, *tensors)  # type: ignore[no-untyped-call]
    return out, lse


def tile_size(batch: int, heads: int, nq: int, nk: int) -> tuple[int, int]:
    """Rows and columns of a tile, such that one tile of all batch rows and heads stays within TILE_CELLS.

    >>> tile_size(1, 8, 4096, 4096), tile_size(64, 16, 4096, 4096), tile_size(1, 1, 5, 7)
    ((256, 512), (32, 32), (5, 7))
    """
    together = max(1, batch * heads)
    cols = 512
    while cols > 32 and together * cols * cols > 2 * TILE_CELLS:
        cols //= 2
    rows = min(512, TILE_CELLS // (together * cols))
    return max(1, min(rows, nq)), max(1, min(cols, nk))


def _tile_size(call: Call) -> tuple[int, int]:
    """The tiles of a call: of its own choice, or whole rows of `chunk` queries."""
    if call.chunk is None:
        return tile_size(*call.sizes)
    return min(call.chunk, call.sizes[2]), call.sizes[3]


@dataclass(frozen=True)
class _Tile:
    number: int
    rows: slice
    cols: slice
    masked: bool  # some cells are hidden, others not


class _Plan:
    """What all tiles of one call share: sizes, which tiles to visit, and how a tile's scores are computed."""

    def __init__(self, call: Call) -> None:
        self.batch, self.heads, self.nq, self.nk = call.sizes
        self.kv_heads = call.k.shape[1]
        self.size = _tile_size(call)
        self.wide, self.device = call.wide, call.device
        self.scale, self.softcap, self.dropout = call.scale, call.softcap, TileDropout.of(call)
        self.bias, self.mask = call.bias, call.mask
        self.see: IndexRule | None = None
        if call.mask is not None:
            self.see = self.bind(call.mask)
            kinds = call.mask.tiles(self.nq, self.nk, self.size, self.device)  # (B, H, Tq, Tk)
            low, high = kinds.amin((0, 1)), kinds.amax((0, 1))
            self.kinds = torch.where(high == EMPTY, EMPTY, torch.where(low == FULL, FULL, PARTIAL)).tolist()
        with torch.no_grad():  # the gradient towards the bias is summed by hand
            self.term = None if self.bias is None else self.bind(self.bias)
        self.b, self.h, _, _ = indices(self.batch, self.heads, torch.arange(0), torch.arange(0), self.device)

    def row_slices(self) -> list[slice]:
        return [slice(i, min(i + self.size[0], self.nq)) for i in range(0, self.nq, self.size[0])]

    def tiles(self, rows: slice) -> Iterator[_Tile]:
        """The tiles of these rows that are not empty."""
        across = -(-self.nk // self.size[1])
        r = rows.start // self.size[0]
        for c in range(across):
            kind = FULL if self.see is None else self.kinds[r][c]
            if kind != EMPTY:
                cols = slice(c * self.size[1], min((c + 1) * self.size[1], self.nk))
                yield _Tile(r * across + c, rows, cols, kind == PARTIAL)

    def by_group(self, x: Tensor) -> Tensor:
        """(B, H, rows, ·) → (B, Hkv, G·rows, ·): the query heads that read one key head, in one product."""
        return x.reshape(self.batch, self.kv_heads, -1, x.shape[-1])

    def by_head(self, x: Tensor) -> Tensor:
        """(B, Hkv, G·rows, ·) → (B, H, rows, ·)."""
        return x.reshape(self.batch, self.heads, -1, x.shape[-1])

    def cells(self, rule: Mask | Bias, bound: IndexRule | None, tile: _Tile) -> Tensor:
        """A mask's or a bias's cells in this tile: a view where they are dense, else computed."""
        if isinstance(rule, DenseMask):
            return part_of(rule.cells.to(self.device), tile.rows, tile.cols)
        if isinstance(rule, DenseBias):
            return part_of(rule.cells.to(self.device), tile.rows, tile.cols).to(self.wide)
        i = torch.arange(tile.rows.start, tile.rows.stop, device=self.device).view(-1, 1)
        j = torch.arange(tile.cols.start, tile.cols.stop, device=self.device)
        assert bound is not None
        cells: Tensor = bound(self.b, self.h, i, j)
        return cells

    def scores(self, tile: _Tile, scaled_q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tile's logits (B, H, rows, cols), −∞ where hidden, and tanh(scaled / softcap) if there is a cap."""
        s = self.by_head(self.by_group(scaled_q) @ k.mT)
        bent = None
        if self.softcap is not None:
            bent = torch.tanh_(s.div_(self.softcap))
            s = bent * self.softcap
        if self.bias is not None:
            s = s + self.cells(self.bias, self.term, tile)
        if tile.masked:
            assert self.mask is not None
            s = s.masked_fill_(~self.cells(self.mask, self.see, tile), -inf)
        return s, bent

    def bind(self, rule: Mask | Bias) -> IndexRule:
        return rule.bind(self.nq, self.nk, self.device, self.wide)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *tensors: Tensor) -> Any:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1], dtype=plan.wide)
        for rows in plan.row_slices():
            out[:, :, rows], lse[:, :, rows] = _walk_row(plan, rows, q, k, v, sinks)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, sinks, out, lse, *tensors)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: what we return could not be differentiated, in silence
            raise RuntimeError("the tiled backend has no second derivative; use backend='reference' for it")
        plan: _Plan = ctx.plan
        q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
        wide, by_group, by_head = plan.wide, plan.by_group, plan.by_head
        lse = torch.where(lse == -inf, 0.0, lse).unsqueeze(-1)  # exp(−∞ − 0) = 0 where nothing is seen
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        bias_gradient = BiasGradient(plan.bias, tensors, ctx.needs_input_grad[5:], wide)
        with as_given(q.device):  # the autocast around a backward need not be that of its forward
            delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)  # (B, H, Nq, 1)
            for rows in plan.row_slices():
                row_q, row_grad = q[:, :, rows].to(wide), grad[:, :, rows].to(wide)
                scaled_q = row_q * plan.scale
                for tile in plan.tiles(rows):
                    tile_k, tile_v = k[:, :, tile.cols].to(wide), v[:, :, tile.cols].to(wide)
                    s, bent = plan.scores(tile, scaled_q, tile_k)
                    p = s.sub_(lse[:, :, rows]).exp_()
                    d_v[:, :, tile.cols] += by_group(plan.dropout(p, tile.number)).mT @ by_group(row_grad)
                    d_p = plan.dropout(by_head(by_group(row_grad) @ tile_v.mT), tile.number)
                    d_s = p.mul_(d_p.sub_(delta[:, :, rows]))
                    if bias_gradient.wanted:
                        _add_to_bias(bias_gradient, plan, tile, d_s)
                    if bent is not None:
                        d_s = d_s * (1 - bent * bent)
                    d_s = by_group(d_s) * plan.scale
                    d_q[:, :, rows] += by_head(d_s @ tile_k)
                    d_k[:, :, tile.cols] += d_s.mT @ by_group(row_q)
        d_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(wide)[:, None, None] - lse)  # (B, H, Nq, 1): the sink's weight
            d_sinks = -(share * delta).sum((0, 2, 3)).to(sinks.dtype)
        d_qkv = (g.to(x.dtype) for g, x in ((d_q, q), (d_k, k), (d_v, v)))
        return (None, *d_qkv, d_sinks, *bias_gradient.result())


def _add_to_bias(gradient: BiasGradient, plan: _Plan, tile: _Tile, d_s: Tensor) -> None:
    if isinstance(plan.bias, DenseBias):
        (total,) = gradient.totals
        assert total is not None
        part = part_of(total, tile.rows, tile.cols)
        part += d_s.sum_to_size(part.shape)
    else:
        gradient.add(lambda bias: plan.cells(bias, plan.bind(bias), tile), d_s)


def _walk_row(plan: _Plan, rows: slice, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and lse of the queries in `rows`, streaming over the keys they can see."""
    scaled_q = q[:, :, rows].to(plan.wide) * plan.scale
    if sinks is None:
        peak = scaled_q.new_full((*scaled_q.shape[:-1], 1), -inf)
        total = torch.zeros_like(peak)
    else:  # the sink is a key seen before all others, whose value is 0
        peak = sinks.to(plan.wide)[:, None, None].expand(*scaled_q.shape[:-1], 1)
        total = torch.ones_like(peak)
    summed = scaled_q.new_zeros(*scaled_q.shape[:-1], v.shape[-1])
    for tile in plan.tiles(rows):
        s, _ = plan.scores(tile, scaled_q, k[:, :, tile.cols].to(plan.wide))
        higher = torch.maximum(peak, s.amax(-1, keepdim=True))
        floor = torch.where(higher == -inf, 0.0, higher)  # nothing visible so far: every exponential is 0
        p = s.sub_(floor).exp_()
        shrink = torch.exp(peak - floor)
        total = total * shrink + p.sum(-1, keepdim=True)
        value = plan.by_group(plan.dropout(p, tile.number)) @ v[:, :, tile.cols].to(plan.wide)
        summed = summed * shrink + plan.by_head(value)
        peak = higher
    nothing = total == 0
    lse = torch.where(nothing, -inf, peak + torch.log(total))
    return (summed / torch.where(nothing, 1.0, total)).to(q.dtype), lse.squeeze(-1)
