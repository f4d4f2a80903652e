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

from regard.backends.call import Call, TileDropout, as_given, custom_kernel_unsupported_reason
from regard.masks import EMPTY, FULL, PARTIAL, DenseMask, Mask
from regard.masks.biases import Bias, DenseBias
from regard.masks.rules import IndexRule, indices, part_of

__all__ = ["forward_with_lse", "how", "run", "tile_size", "unsupported_reason"]

TILE_CELLS = 1 << 20  # scores held at once: 4 MiB in fp32, about what stays near the cores


def unsupported_reason(call: Call) -> str | None:
    """Why this backend cannot do the call, or None."""
    return custom_kernel_unsupported_reason(call)


def how(call: Call) -> str:
    """How it does the call, in a few words."""
    rows, cols = tile_size(*call.sizes)
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


@dataclass(frozen=True)
class _Tile:
    """Where a tile lies, and whether its cells must be masked one by one."""

    number: int
    rows: slice
    cols: slice
    masked: bool


class _Plan:
    """What is the same for all tiles of one call: sizes, which tiles to visit, and how a tile's scores are made."""

    def __init__(self, call: Call) -> None:
        self.batch, self.heads, self.nq, self.nk = call.sizes
        self.kv_heads = call.k.shape[1]
        self.size = tile_size(*call.sizes)
        self.wide, self.device = call.wide, call.device
        self.scale, self.softcap, self.dropout = call.scale, call.softcap, TileDropout.of(call)
        self.bias, self.mask = call.bias, call.mask
        self.see: IndexRule | None = None
        if call.mask is not None:
            self.see = call.mask.bind(self.nq, self.nk, self.device, self.wide)
            kinds = call.mask.tiles(self.nq, self.nk, self.size, self.device)  # (B, H, Tq, Tk)
            low, high = kinds.amin((0, 1)), kinds.amax((0, 1))
            self.kinds = torch.where(high == EMPTY, EMPTY, torch.where(low == FULL, FULL, PARTIAL)).tolist()
        self.b, self.h, _, _ = indices(self.batch, self.heads, torch.arange(0), torch.arange(0), self.device)

    def row_slices(self) -> list[slice]:
        """The queries, a tile's rows at a time."""
        return [slice(i, min(i + self.size[0], self.nq)) for i in range(0, self.nq, self.size[0])]

    def tiles(self, rows: slice) -> Iterator[_Tile]:
        """The tiles of these rows that somebody can see."""
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

    def cells(self, rule: Mask | Bias | None, bound: IndexRule, tile: _Tile) -> Tensor:
        """A mask's or a bias's cells in this tile: a view where they are all there, else computed."""
        if isinstance(rule, DenseMask):
            return part_of(rule.cells.to(self.device), tile.rows, tile.cols)
        if isinstance(rule, DenseBias):
            return part_of(rule.cells.to(self.device), tile.rows, tile.cols).to(self.wide)
        return self.at(bound, tile)

    def at(self, rule: IndexRule, tile: _Tile) -> Tensor:
        """A rule evaluated on this tile."""
        i = torch.arange(tile.rows.start, tile.rows.stop, device=self.device).view(-1, 1)
        j = torch.arange(tile.cols.start, tile.cols.stop, device=self.device)
        cells: Tensor = rule(self.b, self.h, i, j)
        return cells

    def scores(self, tile: _Tile, scaled_q: Tensor, k: Tensor, term: IndexRule | None) -> tuple[Tensor, Tensor | None]:
        """The tile's logits (B, H, rows, cols), −∞ where hidden, and tanh(scaled / softcap) if there is a cap."""
        s = self.by_head(self.by_group(scaled_q) @ k.mT)
        bent = None
        if self.softcap is not None:
            bent = torch.tanh_(s.div_(self.softcap))
            s = bent * self.softcap
        if term is not None:
            s = s + self.cells(self.bias, term, tile)
        if tile.masked:
            assert self.see is not None
            s = s.masked_fill_(~self.cells(self.mask, self.see, tile), -inf)
        return s, bent

    def term(self, bias: Bias | None) -> IndexRule | None:
        """The bias as a function of indices."""
        return None if bias is None else bias.bind(self.nq, self.nk, self.device, self.wide)


class _Tiled(torch.autograd.Function):
    """Forward and backward over tiles."""

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
        back = _TiledBackward(plan, (q, k, v, out), lse, grad, tensors, ctx.needs_input_grad[5:])
        with as_given(q.device):  # what surrounds a backward is not what surrounded its forward
            for rows in plan.row_slices():
                back.walk_row(rows)
        d_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(plan.wide)[:, None, None] - back.lse)  # (B, H, Nq, 1): what the sink took
            d_sinks = -(share * back.delta).sum((0, 2, 3)).to(sinks.dtype)
        d_q, d_k, d_v = (g.to(x.dtype) for g, x in ((back.d_q, q), (back.d_k, k), (back.d_v, v)))
        d_tensors = (None if g is None else g.to(t.dtype) for g, t in zip(back.d_tensors, tensors, strict=True))
        return (None, d_q, d_k, d_v, d_sinks, *d_tensors)


def _walk_row(plan: _Plan, rows: slice, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and lse of the queries in `rows`, streaming over the keys they can see."""
    scaled_q = q[:, :, rows].to(plan.wide) * plan.scale
    term = plan.term(plan.bias)
    if sinks is None:
        peak = scaled_q.new_full((*scaled_q.shape[:-1], 1), -inf)
        total = torch.zeros_like(peak)
    else:  # the sink is a key seen before all others, whose value is 0
        peak = sinks.to(plan.wide)[:, None, None].expand(*scaled_q.shape[:-1], 1)
        total = torch.ones_like(peak)
    summed = scaled_q.new_zeros(*scaled_q.shape[:-1], v.shape[-1])
    for tile in plan.tiles(rows):
        s, _ = plan.scores(tile, scaled_q, k[:, :, tile.cols].to(plan.wide), term)
        higher = torch.maximum(peak, s.amax(-1, keepdim=True))
        floor = torch.where(higher == -inf, 0.0, higher)  # nothing seen so far: every exponential is 0
        p = s.sub_(floor).exp_()
        shrink = torch.exp(peak - floor)
        total = total * shrink + p.sum(-1, keepdim=True)
        value = plan.by_group(plan.dropout(p, tile.number)) @ v[:, :, tile.cols].to(plan.wide)
        summed = summed * shrink + plan.by_head(value)
        peak = higher
    nothing = total == 0
    lse = torch.where(nothing, -inf, peak + torch.log(total))
    return (summed / torch.where(nothing, 1.0, total)).to(q.dtype), lse.squeeze(-1)


class _TiledBackward:
    """The gradients being summed while the tiles are walked once more."""

    def __init__(
        self,
        plan: _Plan,
        given: tuple[Tensor, Tensor, Tensor, Tensor],
        lse: Tensor,
        grad: Tensor,
        tensors: list[Tensor],
        wanted: tuple[bool, ...],
    ) -> None:
        q, k, v, out = given
        self.plan, self.q, self.k, self.v, self.grad = plan, q, k, v, grad
        self.lse = torch.where(lse == -inf, 0.0, lse).unsqueeze(-1)  # exp(−∞ − 0) = 0 where nothing is seen
        self.delta = (grad.to(plan.wide) * out.to(plan.wide)).sum(-1, keepdim=True)  # (B, H, Nq, 1)
        self.d_q, self.d_k, self.d_v = (torch.zeros_like(x, dtype=plan.wide) for x in (q, k, v))
        self.leaves = tuple(t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True))
        self.d_tensors = [
            torch.zeros_like(t, dtype=plan.wide) if w else None for t, w in zip(tensors, wanted, strict=True)
        ]
        self.bias = None if plan.bias is None else plan.bias.with_tensors(self.leaves)

    def walk_row(self, rows: slice) -> None:
        """Add the gradients that come through the queries in `rows`."""
        plan = self.plan
        q, grad = self.q[:, :, rows].to(plan.wide), self.grad[:, :, rows].to(plan.wide)
        scaled_q, by_group = q * plan.scale, plan.by_group
        term = plan.term(plan.bias)
        for tile in plan.tiles(rows):
            k, v = self.k[:, :, tile.cols].to(plan.wide), self.v[:, :, tile.cols].to(plan.wide)
            s, bent = plan.scores(tile, scaled_q, k, term)
            p = s.sub_(self.lse[:, :, rows]).exp_()
            self.d_v[:, :, tile.cols] += by_group(plan.dropout(p, tile.number)).mT @ by_group(grad)
            d_p = plan.dropout(plan.by_head(by_group(grad) @ v.mT), tile.number)
            d_s = p.mul_(d_p.sub_(self.delta[:, :, rows]))
            if any(g is not None for g in self.d_tensors):
                self.add_to_bias(tile, d_s)
            if bent is not None:
                d_s = d_s * (1 - bent * bent)
            d_s = by_group(d_s) * plan.scale
            self.d_q[:, :, rows] += plan.by_head(d_s @ k)
            self.d_k[:, :, tile.cols] += d_s.mT @ by_group(q)

    def add_to_bias(self, tile: _Tile, d_s: Tensor) -> None:
        """Send a tile's gradient to the tensors that the bias was computed from."""
        if isinstance(self.bias, DenseBias):
            total = self.d_tensors[0]
            assert total is not None
            part = part_of(total, tile.rows, tile.cols)
            part += d_s.sum_to_size(part.shape)
            return
        assert self.bias is not None
        wanted = [n for n, g in enumerate(self.d_tensors) if g is not None]
        with torch.enable_grad():
            cells = self.plan.at(self.plan.term(self.bias), tile)  # type: ignore[arg-type]
        parts = torch.autograd.grad(cells, [self.leaves[n] for n in wanted], d_s.sum_to_size(cells.shape))
        for n, part in zip(wanted, parts, strict=True):
            self.d_tensors[n].add_(part)  # type: ignore[union-attr]
