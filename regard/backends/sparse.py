"""Sparse attention: cost proportional to the visible tiles, forward and backward, batched tiles in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends import sparse_gpu
from regard.backends.call import (
    BiasGradient,
    Call,
    TileDropout,
    as_given,
    custom_kernel_unsupported_reason,
    rows_together,
)
from regard.checks import untraced
from regard.masks.biases import Bias, DenseBias
from regard.masks.mask import IndexRule
from regard.masks.tiles import Group, QueryPanel, Terms, VisibleTiles, pieces, visible_tiles

CPU_KERNELS = (  # private to torch; where a release lacks one, the same is done in plain operations
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
CELLS_AT_ONCE = 1 << 21  # scores of one batch of tiles: 8 MiB in fp32; half or twice as many are as fast


@dataclass(frozen=True)
class TileBatch:
    """Tiles that are computed together: U stretches of queries, each for S pairs of batch row and head."""

    group: Group
    units: slice
    q_at: Tensor  # (U, S) rows of the gathered queries
    k_at: Tensor  # (U · S · C,) rows of the gathered keys
    b: Tensor  # (U, S, 1, 1, 1)
    h: Tensor  # (U, S, G, 1, 1)


class SparsePlan:
    """What all tiles of one call share. Query heads that read one key head are stacked if they see the same."""

    def __init__(self, call: Call) -> None:
        self.batch, self.heads, self.nq, self.nk = call.sizes
        self.wide, self.device = call.wide, call.device
        self.scale, self.softcap, self.bias, self.dropout = call.scale, call.softcap, call.bias, TileDropout.of(call)
        self.found: VisibleTiles = visible_tiles(call.mask, self.nq, self.nk, self.device)
        lead_b, lead_h = (1, 1) if call.mask is None else call.mask.leading
        self.kv_heads = call.k.shape[1]
        self.slots = self.heads if lead_h > 1 else self.kv_heads  # of a batch row, each with its own list of keys
        self.stacked = self.heads // self.slots  # G: query heads in a slot
        self.tiles_across = -(-self.nk // self.found.cols)
        self.fused = self.device.type == "cpu" and self.softcap is None and not call.dropout
        self.fused &= all(hasattr(torch.ops.aten, name) for name in CPU_KERNELS)
        self.lead_b, self.lead_h = lead_b, lead_h
        with torch.no_grad():  # what goes to the bias is summed up by hand
            self.rule = self.term(self.bias)
        fixed = self.bias is None or (not self.bias.tensors and self.bias.leading == (1, 1))
        self.terms = Terms(self.bias, self.rule, fixed, self.wide)
        b, slot = torch.meshgrid(
            torch.arange(self.batch, device=self.device), torch.arange(self.slots, device=self.device), indexing="ij"
        )
        lead = (b if lead_b > 1 else b * 0) * lead_h + (slot if lead_h > 1 else slot * 0)
        order = lead.flatten().argsort(stable=True).view(lead_b * lead_h, -1)  # (L, S): those that a unit stands for
        self.b, self.slot = b.flatten()[order], slot.flatten()[order]

    def keys(self, x: Tensor) -> Tensor:
        """(B, Hkv, Nk, D) → (B · Hkv · Tk, cols · D): a row for each tile, zeros after the last key."""
        x = x if self.found.order is None else x[:, :, self.found.order]
        x = _lengthen(x, self.tiles_across * self.found.cols)
        return x.reshape(-1, self.found.cols * x.shape[-1])

    def from_keys(self, x: Tensor) -> Tensor:
        """The reverse of `keys`."""
        whole = x.view(self.batch, self.kv_heads, self.tiles_across * self.found.cols, -1)
        if self.found.order is None:
            return whole[:, :, : self.nk]
        back = torch.empty_like(whole[:, :, : self.nk])
        back[:, :, self.found.order] = whole[:, :, : self.nk]
        return back

    def queries(self, x: Tensor, panel: QueryPanel, filler: float = 0.0) -> Tensor:
        """(B, H, Nq, D) → (B · slots · T, G · R, D): a row for each stretch, filled up after the last query."""
        down, rows = panel.queries.shape
        x = x[:, :, self.places(panel)]
        x = _lengthen(x, down * rows, filler)
        x = x.reshape(self.batch, self.slots, self.stacked, down, rows, -1).transpose(2, 3)
        return x.reshape(self.batch * self.slots * down, self.stacked * rows, -1)

    def places(self, panel: QueryPanel) -> slice | Tensor:
        """Which queries the panel holds; as a slice, which copies nothing, where it is all of them in order."""
        return slice(None) if panel is self.found.everyone and self.found.order is None else panel.chosen

    def from_queries(self, x: Tensor, panel: QueryPanel) -> Tensor:
        """The reverse of `queries`: (B, H, the panel's queries, D)."""
        down, rows = panel.queries.shape
        x = x.view(self.batch, self.slots, down, self.stacked, rows, -1).transpose(2, 3)
        return x.reshape(self.batch, self.heads, down * rows, -1)[:, :, : panel.count]

    def batches(self, panel: QueryPanel, width: int) -> Iterator[TileBatch]:
        """The panel's visible tiles, as many together as CELLS_AT_ONCE allows; width: numbers per key and value."""
        down, rows = panel.queries.shape
        for group in panel.groups:
            each = group.width * max(self.stacked * rows, width)  # what one entry holds: scores, or keys and values
            together = max(1, CELLS_AT_ONCE // each)
            shared = min(self.b.shape[1], together)
            for units in group.cut(together // shared):
                lead = group.lead[units]
                for s in range(0, self.b.shape[1], shared):
                    b, slot = self.b[lead, s : s + shared], self.slot[lead, s : s + shared]
                    q_at = (b * self.slots + slot) * down + group.row[units].unsqueeze(-1)  # (U, S)
                    kv = b * self.kv_heads + slot // (self.slots // self.kv_heads)
                    cols = group.cols[units].clamp(min=0).unsqueeze(1)  # (U, 1, C)
                    k_at = kv.unsqueeze(-1) * self.tiles_across + cols
                    h = slot.unsqueeze(-1) * self.stacked + torch.arange(self.stacked, device=self.device)
                    yield TileBatch(group, units, q_at, k_at.flatten(), b[..., None, None, None], h[..., None, None])

    def gather(self, tiles: Tensor, batch: TileBatch) -> Tensor:
        """The keys of a batch: (U, S, n, D), in the scores' dtype."""
        rows = tiles.index_select(0, batch.k_at).to(self.wide)
        return rows.view(*batch.q_at.shape, batch.group.width, -1)

    def take(self, stretches: Tensor, batch: TileBatch) -> Tensor:
        """The queries of a batch, or what belongs to them: (U, S, G · R, ·), in the scores' dtype."""
        rows = stretches.index_select(0, batch.q_at.flatten()).to(self.wide)
        return rows.view(*batch.q_at.shape, *rows.shape[1:])

    def indices(self, batch: TileBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, i, j, shaped to broadcast to (U, S, G, R, n)."""
        i = batch.group.queries[batch.group.row[batch.units]]  # (U, R)
        j, _ = batch.group.keys(batch.units)  # (U, n)
        return batch.b, batch.h, i[:, None, None, :, None], j[:, None, None, None, :]

    def term(self, bias: Bias | None) -> IndexRule | None:
        """The bias as a function of indices."""
        if isinstance(bias, DenseBias):
            cells, wide = bias.cells.to(self.device), self.wide
            return lambda *at: cells.reshape(-1)[flat(cells, at)].to(wide)
        return None if bias is None else bias.bind(self.nq, self.nk, self.device, self.wide)

    def hidden(self, batch: TileBatch) -> Tensor:
        """(U or 1, 1, 1, R, n), by the mask."""
        return ~batch.group.cells(batch.units)[:, None, None]

    def by_head(self, s: Tensor) -> Tensor:
        """(U, S, G · R, n) → (U, S, G, R, n), a view."""
        return s.view(*s.shape[:2], self.stacked, -1, s.shape[-1])

    def stands_for(self, lead: int) -> Iterator[tuple[int, slice, slice]]:
        """The batch rows that a run is of, each with query heads and the key heads that they read, one for one."""
        for b in (lead // self.lead_h,) if self.lead_b > 1 else range(self.batch):
            if self.lead_h > 1:
                h, kv = lead % self.lead_h, lead % self.lead_h // (self.heads // self.kv_heads)
                yield b, slice(h, h + 1), slice(kv, kv + 1)
            else:  # of the heads that read one key head, one at a time
                yield from ((b, slice(g, None, self.stacked), slice(None)) for g in range(self.stacked))


def flat(table: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """Where (b, h, i, j) stand in a table (B or 1, H or 1, Nq or 1, Nk or 1) that lies in one row."""
    steps = [0 if n == 1 else prod(table.shape[axis + 1 :]) for axis, n in enumerate(table.shape)]
    b, h, i, j = (x * step for x, step in zip(at, steps, strict=True))
    return b + h + i + j


def _lengthen(x: Tensor, n: int, filler: float = 0.0) -> Tensor:
    return x if x.shape[2] == n else pad(x, (0, 0, 0, n - x.shape[2]), value=filler)  # pad would copy it for nothing


def unsupported_reason(call: Call) -> str | None:
    """Why this backend cannot do the call, or None."""
    return custom_kernel_unsupported_reason(call)


def how(call: Call) -> str:
    """How it does the call, in a few words."""
    if call.mask is None or 0 in call.sizes:
        return "visible tiles, and nothing is hidden; O(N) memory"
    if sparse_gpu.unsupported_reason(call) is None:
        rows, cols = sparse_gpu.tile_size(call)
        return f"a Triton kernel over visible tiles of {rows}×{cols}, compiled at the first call (seconds); O(N) memory"
    found = visible_tiles(call.mask, *call.sizes[2:], torch.device("cpu"))
    return f"visible tiles of {found.rows}×{found.cols}: {found.share:.0%} of the cells; O(N) memory"


def run(call: Call) -> Tensor:
    """The output (B, H, Nq, Dv)."""
    return forward_with_lse(call)[0]


@untraced("the sparse backend lists the tiles of a mask; backend='sdpa' is one graph, with a dense mask")
def forward_with_lse(call: Call) -> tuple[Tensor, Tensor]:
    """The output (B, H, Nq, Dv) and, in the scores' dtype, each row's lse (B, H, Nq), which carries no gradient."""
    call = call.in_torch()
    tensors = () if call.bias is None else call.bias.tensors
    engine = sparse_gpu.Launcher.of(call) if sparse_gpu.unsupported_reason(call) is None else SparsePlan(call)
    if not call.wants_gradient:  # one call of autograd takes as long as a short sequence
        return _forward(engine, call.q, call.k, call.v, call.sinks)
    out, lse = _Sparse.apply(engine, call.q, call.k, call.v, call.sinks, *tensors)  # type: ignore[no-untyped-call]
    return out, lse


def _forward(
    engine: SparsePlan | sparse_gpu.Launcher, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and lse (B, H, Nq), with sinks."""
    if isinstance(engine, sparse_gpu.Launcher):
        out, lse = engine.forward(q, k, v)
    else:
        out, lse = (_forward_fused if engine.fused else _forward_plain)(engine, q, k, v)
    if sinks is not None:  # it adds e^sink to each row's sum: the output shrinks by e^lse / (e^lse + e^sink)
        sink = sinks.to(lse.dtype)[:, None, None]
        out = out * torch.where(lse == -inf, 0.0, torch.sigmoid(lse - sink))
        lse = torch.logaddexp(lse, sink)
    return out.to(q.dtype), lse.squeeze(-1)


class _Sparse(torch.autograd.Function):
    """Forward and backward by Triton's kernels, or in torch by a plan."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: SparsePlan | sparse_gpu.Launcher,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> Any:
        out, lse = _forward(engine, q, k, v, sinks)
        ctx.engine = engine
        ctx.save_for_backward(q, k, v, sinks, out, lse, *tensors)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: what we return could not be differentiated, in silence
            raise RuntimeError("the sparse backend has no second derivative; use backend='reference' for it")
        with as_given(grad.device):  # the autocast around a backward need not be that of its forward
            return _backward(ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
    d_sinks = None
    if sinks is not None:  # a sum over all queries, in which terms of either sign cancel: in fp64
        share = torch.exp(sinks.double()[:, None] - torch.where(lse == -inf, inf, lse).double())  # (B, H, Nq)
        delta = torch.einsum("bhnd,bhnd->bhn", grad.double(), out.double())
        d_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)  # share: the sink's weight
    if isinstance(ctx.engine, sparse_gpu.Launcher):
        return (None, *ctx.engine.backward(q, k, v, out, lse, grad), d_sinks, *(None for _ in tensors))
    bias_gradient = BiasGradient(ctx.engine.bias, tensors, ctx.needs_input_grad[5:], ctx.engine.wide)
    d_qkv = _SparseBackward(ctx.engine, bias_gradient, (q, k, v, out), lse.unsqueeze(-1), grad).run()
    return (None, *d_qkv, d_sinks, *bias_gradient.result())


def _forward_fused(plan: SparsePlan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `_forward_plain`, by torch's CPU kernel, which needs Dv = D: zeros fill up. Adjoining keys are not copied."""
    width, dv, h = max(q.shape[-1], v.shape[-1]), v.shape[-1], torch.arange(plan.heads)
    q, k, v = (rows_together(_widen(x.to(plan.wide), width)) for x in (q, k, v))
    q = q * plan.scale  # before the product, as backward does: lse and the scores are of one rounding
    per_key = 1 if plan.lead_h > 1 else plan.kv_heads  # heads of one call of the kernel
    out = q.new_zeros(plan.batch, plan.nq, plan.heads, dv)  # as the layer after it reads it: (B, N, H · Dv)
    lse = q.new_full((plan.batch, plan.nq, plan.heads, 1), -inf)
    for panel in plan.found.panels:  # the wide ones last: they replace what stands in their places
        for run in pieces(panel, plan.terms, CELLS_AT_ONCE // per_key, width):
            for b, heads, kv in plan.stands_for(run.lead):
                cells, blank = plan.terms.of(run, b, h[heads])
                part, sums = _kernel(run.queries(q[b, heads]), run.keys(k[b, kv]), run.keys(v[b, kv]), cells)
                if cells is not None and blank:
                    seen = cells.amax(-1, keepdim=True) != -inf
                    part, sums = torch.where(seen, part, 0.0), torch.where(seen, sums, -inf)
                run.put(out[b, :, heads], part[..., :dv])
                run.put(lse[b, :, heads], sums)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _kernel(q: Tensor, k: Tensor, v: Tensor, cells: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output (U, H, R, D) and lse (U, H, R, 1)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=cells, scale=1.0)
    return out, lse.unsqueeze(-1)


def _forward_plain(plan: SparsePlan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, Nq, Dv) and lse (B, H, Nq, 1), without sinks, in the scores' dtype."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=plan.wide)
    lse = q.new_empty(*q.shape[:-1], 1, dtype=plan.wide)
    k_tiles, v_tiles, numbers = plan.keys(k), plan.keys(v), count()
    for panel in plan.found.panels:  # the wide ones last: they replace what stands in their places
        stretches = plan.queries(q, panel)
        part = stretches.new_zeros(*stretches.shape[:2], v.shape[-1], dtype=plan.wide)
        sums = stretches.new_full((*stretches.shape[:2], 1), -inf, dtype=plan.wide)
        for batch in plan.batches(panel, k.shape[-1] + v.shape[-1]):
            scaled_q = plan.take(stretches, batch) * plan.scale
            s, _ = _scores(plan, scaled_q, plan.gather(k_tiles, batch), batch)
            peak = s.amax(-1, keepdim=True)
            floor = torch.where(peak == -inf, 0.0, peak)  # nothing visible: every exponential is 0
            p = s.sub_(floor).exp_()
            total = p.sum(-1, keepdim=True)
            value = plan.dropout(p, next(numbers)) @ plan.gather(v_tiles, batch)
            at = batch.q_at.flatten()
            part.index_copy_(0, at, value.div_(torch.where(total == 0, 1.0, total)).flatten(0, 1))
            sums.index_copy_(0, at, (floor + total.log()).flatten(0, 1))
        out[:, :, plan.places(panel)] = plan.from_queries(part, panel)
        lse[:, :, plan.places(panel)] = plan.from_queries(sums, panel)
    return out, lse


def _scores(plan: SparsePlan, scaled_q: Tensor, k: Tensor, batch: TileBatch) -> tuple[Tensor, Tensor | None]:
    """The logits (U, S, G · R, n), −∞ where hidden, and tanh(scaled / softcap) if there is a cap."""
    s, bent = scaled_q @ k.mT, None
    if plan.softcap is not None:
        bent = torch.tanh_(s.div_(plan.softcap))
        s = bent * plan.softcap
    if plan.rule is not None:
        plan.by_head(s).add_(plan.rule(*plan.indices(batch)))
    if batch.group.masked:
        plan.by_head(s).masked_fill_(plan.hidden(batch), -inf)
    return s, bent


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


class _SparseBackward:
    """The gradients being summed while the tiles are walked once more."""

    def __init__(
        self,
        plan: SparsePlan,
        bias_gradient: BiasGradient,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        lse: Tensor,
        grad: Tensor,
    ) -> None:
        self.plan, self.bias_gradient, self.grad = plan, bias_gradient, grad
        self.q, k, v, self.out = saved
        self.dtype, self.width = self.q.dtype, k.shape[-1] + v.shape[-1]
        self.k, self.v = plan.keys(k), plan.keys(v)
        self.lse = torch.where(lse == -inf, inf, lse)  # (B, H, Nq, 1): every weight is 0 where nothing is visible
        self.d_q, self.d_k, self.d_v = (torch.zeros_like(x, dtype=plan.wide) for x in (self.q, self.k, self.v))
        self.numbers = count()  # of batches, as forward counts them

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, in their dtype."""
        for panel in self.plan.found.panels:
            self.walk(panel)
        d_k, d_v = (self.plan.from_keys(g).to(self.dtype) for g in (self.d_k, self.d_v))
        return self.d_q.to(self.dtype), d_k, d_v

    def walk(self, panel: QueryPanel) -> None:
        """Add the gradients that come through a panel's queries."""
        plan, grad, lse = self.plan, self.grad, self.lse
        if panel is plan.found.everyone and plan.found.wide is not None:
            grad, lse = grad.clone(), lse.clone()
            grad[:, :, plan.found.wide.chosen], lse[:, :, plan.found.wide.chosen] = 0.0, inf
        q, out, grad = (plan.queries(x, panel) for x in (self.q, self.out, grad))
        lse = plan.queries(lse, panel, filler=inf)
        total = torch.zeros_like(q, dtype=plan.wide)
        fused = plan.fused and not self.bias_gradient.wanted
        differentiate = self.fused_batch if fused else self.plain_batch
        for batch in plan.batches(panel, self.width):
            taken = [plan.take(x, batch) for x in (q, out, lse, grad)]
            k, v = plan.gather(self.k, batch), plan.gather(self.v, batch)
            d_q, d_k, d_v = differentiate(batch, taken[0] * plan.scale, k, v, *taken[1:])
            total.index_copy_(0, batch.q_at.flatten(), d_q.flatten(0, 1))
            self.d_k.index_add_(0, batch.k_at, d_k.reshape(len(batch.k_at), -1))
            self.d_v.index_add_(0, batch.k_at, d_v.reshape(len(batch.k_at), -1))
        self.d_q[:, :, plan.places(panel)] += plan.from_queries(total, panel) * plan.scale

    def fused_batch(
        self, batch: TileBatch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the scaled queries, keys and values by torch's CPU kernel."""
        plan, rows = self.plan, q.shape[2]
        cells = None if plan.rule is None else plan.rule(*plan.indices(batch))  # broadcasts to (U, S, G, R, n)
        if batch.group.masked:
            hidden = plan.hidden(batch)
            if cells is None:
                cells = torch.zeros(hidden.shape, dtype=plan.wide, device=plan.device).masked_fill_(hidden, -inf)
            else:
                cells = cells.masked_fill(hidden, -inf)
        if cells is not None:  # as the kernel takes it: (U, S or 1, G · R, n)
            cells = cells.expand(len(batch.q_at), -1, plan.stacked, rows // plan.stacked, -1)
            cells = cells.reshape(*cells.shape[:2], rows, -1)
        d, dv = q.shape[-1], v.shape[-1]
        q, k, v, out, grad = (_widen(x, max(d, dv)) for x in (q, k, v, out, grad))
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.squeeze(-1), 0.0, False, attn_mask=cells, scale=1.0
        )
        return d_q[..., :d], d_k[..., :d], d_v[..., :dv]

    def plain_batch(
        self, batch: TileBatch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same in plain operations, and the gradient towards the bias."""
        s, bent = _scores(self.plan, q, k, batch)
        p, number, drop = s.sub_(lse).exp_(), next(self.numbers), self.plan.dropout
        d_v = drop(p, number).mT @ grad
        delta = (grad * out).sum(-1, keepdim=True)
        d_s = p.mul_(drop(grad @ v.mT, number).sub_(delta))
        if self.bias_gradient.wanted:
            self.add_to_bias(batch, self.plan.by_head(d_s))
        if bent is not None:
            d_s = d_s * (1 - bent * bent)
        return d_s @ k, d_s.mT @ q, d_v

    def add_to_bias(self, batch: TileBatch, d_s: Tensor) -> None:
        """Send a batch's gradient (U, S, G, R, n) to the tensors that the bias was computed from."""
        at = self.plan.indices(batch)
        if isinstance(self.plan.bias, DenseBias):
            (total,) = self.bias_gradient.totals
            assert total is not None
            total.view(-1).index_add_(0, flat(total, at).expand(d_s.shape).flatten(), d_s.flatten())
        else:
            self.bias_gradient.add(lambda bias: self.plan.term(bias)(*at), d_s)  # type: ignore[misc]
