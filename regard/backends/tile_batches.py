"""The visible tiles of one call, gathered for batched operations: what is computed together, and where it belongs.

Stretches of queries that see equally many stretches of keys (`regard.masks.tiling`) are laid side by side, those of
several batch rows and heads too, so that one product serves them all. It does not know softmax, nor gradients.

Axis letters: B batch, H heads, U stretches of queries, S pairs of batch row and head that see alike, G query heads of a
key head, R queries of a stretch, n keys that it sees, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.call import Call, TileDropout
from regard.biases import Bias, DenseBias
from regard.masks.strips import Terms
from regard.masks.tiling import Group, Panel, VisibleTiles, visible_tiles
from regard.rules import IndexRule

__all__ = ["CELLS_AT_ONCE", "Batch", "Plan", "flat"]

CPU_KERNELS = (  # private to torch; where a release lacks one, the same is done in plain operations
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
CELLS_AT_ONCE = 1 << 21  # scores of one batch of tiles: 8 MiB in fp32; half or twice as many are as fast


@dataclass(frozen=True)
class Batch:
    """Tiles that are computed together: U stretches of queries, each for S pairs of batch row and head."""

    group: Group
    units: slice
    q_at: Tensor  # (U, S) rows of the gathered queries
    k_at: Tensor  # (U · S · C,) rows of the gathered keys
    b: Tensor  # (U, S, 1, 1, 1)
    h: Tensor  # (U, S, G, 1, 1)


class Plan:
    """What is the same for all tiles of one call. Heads that read one key head are stacked if they see the same."""

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
        """Back again."""
        whole = x.view(self.batch, self.kv_heads, self.tiles_across * self.found.cols, -1)
        if self.found.order is None:
            return whole[:, :, : self.nk]
        back = torch.empty_like(whole[:, :, : self.nk])
        back[:, :, self.found.order] = whole[:, :, : self.nk]
        return back

    def queries(self, x: Tensor, panel: Panel, filler: float = 0.0) -> Tensor:
        """(B, H, Nq, D) → (B · slots · T, G · R, D): a row for each stretch, filled up after the last query."""
        down, rows = panel.queries.shape
        x = x[:, :, self.places(panel)]
        x = _lengthen(x, down * rows, filler)
        x = x.reshape(self.batch, self.slots, self.stacked, down, rows, -1).transpose(2, 3)
        return x.reshape(self.batch * self.slots * down, self.stacked * rows, -1)

    def places(self, panel: Panel) -> slice | Tensor:
        """Which queries the panel holds; as a slice, which copies nothing, where it is all of them in order."""
        return slice(None) if panel is self.found.everyone and self.found.order is None else panel.chosen

    def from_queries(self, x: Tensor, panel: Panel) -> Tensor:
        """Back again: (B, H, the panel's queries, D)."""
        down, rows = panel.queries.shape
        x = x.view(self.batch, self.slots, down, self.stacked, rows, -1).transpose(2, 3)
        return x.reshape(self.batch, self.heads, down * rows, -1)[:, :, : panel.count]

    def batches(self, panel: Panel, width: int) -> Iterator[Batch]:
        """The panel's visible tiles, as many together as CELLS_AT_ONCE allows; width: numbers per key and value."""
        down, rows = panel.queries.shape
        for group in panel.groups:
            each = group.width * max(self.stacked * rows, width)  # what one entry holds: scores, or keys and values
            together = max(1, CELLS_AT_ONCE // each)
            shared = min(self.b.shape[1], together)
            for units in group.cut(together // shared):
                lead = group.lead[units]
                for s in range(0, self.b.shape[1], shared):
                    yield self._batch(group, units, self.b[lead, s : s + shared], self.slot[lead, s : s + shared], down)

    def _batch(self, group: Group, units: slice, b: Tensor, slot: Tensor, down: int) -> Batch:
        q_at = (b * self.slots + slot) * down + group.row[units].unsqueeze(-1)  # (U, S)
        kv = b * self.kv_heads + slot // (self.slots // self.kv_heads)
        cols = group.cols[units].clamp(min=0).unsqueeze(1)  # (U, 1, C)
        k_at = kv.unsqueeze(-1) * self.tiles_across + cols
        h = slot.unsqueeze(-1) * self.stacked + torch.arange(self.stacked, device=self.device)
        return Batch(group, units, q_at, k_at.flatten(), b[..., None, None, None], h[..., None, None])

    def gather(self, tiles: Tensor, batch: Batch) -> Tensor:
        """The keys of a batch: (U, S, n, D), in the scores' dtype."""
        found = tiles.index_select(0, batch.k_at).to(self.wide)
        return found.view(*batch.q_at.shape, batch.group.width, -1)

    def take(self, stretches: Tensor, batch: Batch) -> Tensor:
        """The queries of a batch, or what belongs to them: (U, S, G · R, ·), in the scores' dtype."""
        found = stretches.index_select(0, batch.q_at.flatten()).to(self.wide)
        return found.view(*batch.q_at.shape, *found.shape[1:])

    def indices(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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

    def hidden(self, batch: Batch) -> Tensor:
        """What the mask hides: (U or 1, 1, 1, R, n)."""
        return ~batch.group.cells(batch.units)[:, None, None]

    def by_head(self, s: Tensor) -> Tensor:
        """(U, S, G · R, n) → (U, S, G, R, n), a view."""
        return s.view(*s.shape[:2], self.stacked, -1, s.shape[-1])

    def added(self, batch: Batch) -> Tensor | None:
        """What is added to the scores, −∞ where hidden: broadcasts to (U, S, G, R, n). None where nothing is."""
        bias: Tensor | None = None if self.rule is None else self.rule(*self.indices(batch))
        if not batch.group.masked:
            return bias
        hidden = self.hidden(batch)
        if bias is None:
            return torch.zeros(hidden.shape, dtype=self.wide, device=self.device).masked_fill_(hidden, -inf)
        return bias.masked_fill(hidden, -inf)

    def stands_for(self, lead: int) -> Iterator[tuple[int, slice, slice]]:
        """The batch rows that a run is of, each with query heads and the key heads that they read, one for one."""
        for b in (lead // self.lead_h,) if self.lead_b > 1 else range(self.batch):
            if self.lead_h > 1:
                h, kv = lead % self.lead_h, lead % self.lead_h // (self.heads // self.kv_heads)
                yield b, slice(h, h + 1), slice(kv, kv + 1)
            else:  # of the heads that read one key head, one at a time
                yield from ((b, slice(g, None, self.stacked), slice(None)) for g in range(self.stacked))

    def as_mask(self, added: Tensor, batch: Batch, rows: int) -> Tensor:
        """The same as a kernel wants it: (U, S or 1, G · R, n)."""
        whole = added.expand(len(batch.q_at), -1, self.stacked, rows // self.stacked, -1)
        return whole.reshape(*whole.shape[:2], rows, -1)


def flat(table: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """Where (b, h, i, j) stand in a table (B or 1, H or 1, Nq or 1, Nk or 1) that lies in one row."""
    steps = [0 if n == 1 else prod(table.shape[axis + 1 :]) for axis, n in enumerate(table.shape)]
    b, h, i, j = (x * step for x, step in zip(at, steps, strict=True))
    return b + h + i + j


def _lengthen(x: Tensor, n: int, filler: float = 0.0) -> Tensor:
    return x if x.shape[2] == n else pad(x, (0, 0, 0, n - x.shape[2]), value=filler)  # pad would copy it for nothing
