"""The measuring pass on CUDA: a call's mask and bias put into the form that the Triton kernel reads, and the launch.

Causal masks and windows go in as three numbers. Any other mask becomes a kind per tile (hidden, visible, mixed) and the
cells of the mixed tiles; a bias that depends on distance becomes one number per distance. Never N×N, unless the user
brought it.

It does not know the arithmetic: that is in regard.lens.kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, inf, log, log2
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.biases import DenseBias
from regard.lens.measures import Wanted, finish_effective, finish_entropy, finish_map
from regard.masks import FULL, PARTIAL, DenseMask, Mask

__all__ = ["measure", "refuse"]

LONG_LINE = 8  # tiles in a line of the map, from which on a program of its own pays
LOG2E = log2(e)
NO_MAXIMUM = -2139095041  # −∞ as the kernel writes floats whose order is that of integers


@dataclass(frozen=True)
class Blocks:
    """How the kernel is cut: queries × keys of a tile, warps, and loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def blocks_for(head_size: int, exact: bool) -> Blocks:
    """What was fastest on an H200, see benchmarks/results/lens-cuda.md."""
    if exact:
        return Blocks(32, 64, 4, 2)
    return Blocks(64, 128, 4, 3 if head_size <= 128 else 2, 168)


def refuse(call: Call, wanted: Wanted) -> str | None:
    """Why this engine cannot do the pass, or None."""
    if call.q.dtype == torch.float64:
        return "the Triton kernel has no float64"
    if call.q.shape[-1] > 256:
        return f"the Triton kernel holds head sizes up to 256, got {call.q.shape[-1]}"
    if call.bias is not None and not call.bias.by_distance and not isinstance(call.bias, DenseBias):
        return f"the Triton kernel knows biases by distance and dense ones, not {call.bias!r}"
    return None


def measure(call: Call, lse: Tensor, wanted: Wanted, blocks: Blocks | None = None) -> dict[str, Tensor]:
    """What `wanted` names, as regard.lens.streaming.measure gives it; `call` as that `refuse` lets pass."""
    from regard.lens import kernels

    with torch.no_grad():
        blocks = blocks or blocks_for(call.q.shape[-1], call.q.dtype == torch.float32)
        launch = _Launch(call, lse, wanted, blocks)
        if 0 not in call.sizes:
            launch.run(kernels)
        return launch.found()


class _Launch:
    """The kernel's arguments, and where its results lie."""

    def __init__(self, call: Call, lse: Tensor, wanted: Wanted, blocks: Blocks) -> None:
        batch, heads, nq, nk = call.sizes
        self.call, self.lse, self.wanted, self.blocks = call, lse, wanted, blocks
        new = lse.new_zeros
        self.nothing = new(1)
        names = wanted.names
        self.received = new(batch, heads, nk) if "received" in names else self.nothing
        self.entropy = new(batch, heads, nq) if "entropy" in names else self.nothing
        self.squares = new(batch, heads, nq) if "effective" in names else self.nothing
        self.maximum = self.nothing
        if "max_logit" in names:
            self.maximum = torch.full((batch, heads, nq), NO_MAXIMUM, dtype=torch.int32, device=lse.device)
        self.cells = min(wanted.size, nq), min(wanted.size, nk)
        self.map_kind = self._map_kind() if "map" in names and 0 not in call.sizes else 0
        by_row = (batch, heads, nq, self.cells[1])
        by_cell = (batch, heads, *self.cells, blocks.queries if self.map_kind == 1 else 1)
        self.map = new(by_row if self.map_kind == 2 else by_cell) if "map" in names else self.nothing

    def _map_kind(self) -> int:
        """How the kernel keeps the map's sums.

        3: one program walks one line of the map, where a line is long enough to pay for it.
        1: a sum per row of a tile and map cell, where a tile meets at most two map cells each way.
        2: a sum per query and map cell, for short sequences.
        """
        (nq, nk), cut = self.call.sizes[2:], self.blocks
        tall, wide = nq // self.cells[0], nk // self.cells[1]
        if tall < cut.queries or wide < cut.keys:
            return 2
        free = self.call.mask is None or self.call.mask.band(nq, nk) is not None
        return 3 if tall >= LONG_LINE * cut.queries and (free or self._aligned()) else 1

    def _aligned(self) -> bool:
        """Does every tile lie within one map cell?"""
        (nq, nk), (rows, cols), cut = self.call.sizes[2:], self.cells, self.blocks
        return nq % (rows * cut.queries) == 0 and nk % (cols * cut.keys) == 0

    def run(self, kernels: Any) -> None:
        """Launch."""
        call, (batch, heads, nq, nk) = self.call, self.call.sizes
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q.detach(), call.k.detach()))
        plain = call.softcap is None and call.bias is None
        shift = torch.where(self.lse == -inf, 0.0, self.lse * LOG2E)
        mask, band, kinds, cells, packed = self._mask()
        bias_kind, bias = self._bias()
        tiles = -(-nk // self.blocks.keys)
        names = self.wanted.names
        lines = self.cells[0] if self.map_kind == 3 else 1
        kernels.measure[(tiles, batch * heads, lines)](
            q, k, shift, bias, kinds, cells,
            self.received, self.entropy, self.squares, self.maximum, self.nothing, self.map,
            *q.stride()[:3], *k.stride()[:3], *_strides(bias, bias_kind), *_steps(kinds, mask), *_strides(cells, mask),
            heads, heads // k.shape[1], nq, nk, tiles, *self.cells,
            call.scale * (LOG2E if plain else 1.0), call.softcap or 1.0, *band,
            D=q.shape[-1], WIDTH=max(16, _power_of_two(q.shape[-1])), BLOCK_Q=self.blocks.queries,
            BLOCK_K=self.blocks.keys, STAGES=self.blocks.stages,
            EVEN_Q=nq % (lines * self.blocks.queries) == 0, EVEN_K=nk % self.blocks.keys == 0,
            IEEE=q.dtype == torch.float32, MASK=mask, PACKED=packed, BIAS=bias_kind, SOFTCAP=call.softcap is not None,
            MAP=self.map_kind, ALIGNED=self._aligned(), WANT_RECEIVED="received" in names, WANT_ENTROPY="entropy" in names,
            WANT_SQUARES="effective" in names, WANT_MAXIMUM="max_logit" in names, WANT_TILES=False,
            num_warps=self.blocks.warps, maxnreg=self.blocks.registers,
        )  # fmt: skip

    def _mask(self) -> tuple[int, tuple[int, int, int], Tensor, Tensor, bool]:
        """The kind of mask, its band, its kinds per tile, its cells, and whether only mixed tiles are stored."""
        mask, (_, _, nq, nk) = self.call.mask, self.call.sizes
        nothing = self.nothing.to(torch.int32)
        if mask is None:
            return 0, (0, 0, 0), nothing, nothing, False
        band = mask.band(nq, nk)
        if band is not None:
            return 1, band, nothing, nothing, False
        size = (self.blocks.queries, self.blocks.keys)
        kinds = mask.tiles(nq, nk, size, self.call.device)  # (B or 1, H or 1, Tq, Tk)
        numbered = (kinds == FULL).to(torch.int32)
        if isinstance(mask, DenseMask):
            cells = mask.cells.to(self.call.device).view(torch.uint8)
            return 2, (0, 0, 0), (numbered + 2 * (kinds == PARTIAL)).to(torch.int32).contiguous(), cells, False
        mixed = (kinds == PARTIAL).nonzero()  # (n, 4)
        at = numbered.clone()
        at[tuple(mixed.T)] = 2 + torch.arange(len(mixed), dtype=torch.int32, device=at.device)
        return 2, (0, 0, 0), at.contiguous(), self._mixed_cells(mask, mixed, size), True

    def _mixed_cells(self, mask: Mask, mixed: Tensor, size: tuple[int, int]) -> Tensor:
        """The cells of the mixed tiles, (n, rows, columns) of 0 and 1; beyond the last query or key they are 0."""
        nq, nk = self.call.sizes[2:]
        device = self.call.device
        see = mask.bind(nq, nk, device, torch.float32)
        cells = torch.zeros(max(1, len(mixed)), *size, dtype=torch.uint8, device=device)
        rows, cols = torch.arange(size[0], device=device).view(-1, 1), torch.arange(size[1], device=device)
        for part in range(0, len(mixed), 1024):
            b, h, r, c = (x.view(-1, 1, 1) for x in mixed[part : part + 1024].T)
            i, j = r * size[0] + rows, c * size[1] + cols
            inside = (i < nq) & (j < nk)
            cells[part : part + 1024] = see(b, h, i.clamp(max=nq - 1), j.clamp(max=nk - 1)) & inside
        return cells

    def _bias(self) -> tuple[int, Tensor]:
        """The kind of bias, and its numbers (B or 1, H or 1, distances) or (B or 1, H or 1, Nq or 1, Nk or 1)."""
        bias, (_, _, nq, nk) = self.call.bias, self.call.sizes
        if bias is None:
            return 0, self.nothing
        if isinstance(bias, DenseBias):
            return 2, bias.cells.detach().to(self.call.device)
        distance = torch.arange(1 - nq, nk, device=self.call.device)  # j − i
        i = (-distance).clamp(min=0)
        term = bias.bind(nq, nk, self.call.device, torch.float32)
        batch, heads = bias.leading
        b = torch.arange(batch, device=distance.device).view(-1, 1, 1)
        h = torch.arange(heads, device=distance.device).view(-1, 1)
        return 1, term(b, h, i, i + distance).detach().expand(batch, heads, -1).contiguous()

    def found(self) -> dict[str, Tensor]:
        """The measures, finished."""
        sinks, names, found = self.call.sinks, self.wanted.names, {}
        if "entropy" in names:
            found["entropy"] = finish_entropy(self.entropy * -log(2), self.lse, sinks)
        if "received" in names:
            found["received"] = self.received
        if "max_logit" in names:
            bits = self.maximum ^ ((self.maximum >> 31) & 0x7FFFFFFF)
            found["max_logit"] = bits.view(torch.float32) / LOG2E
        if "effective" in names:
            found["effective"] = finish_effective(self.squares, self.lse, sinks)
        if "map" in names:
            found["map"] = finish_map(self._map_sums(), self.call.sizes[2])
        return found

    def _map_sums(self) -> Tensor:
        """The map's sums per cell, from sums per row where the kernel gave those."""
        if self.map_kind != 2:
            return self.map.sum(-1)
        from regard.lens.measures import cell_of_positions

        nq = self.call.sizes[2]
        cell = cell_of_positions(torch.arange(nq, device=self.map.device), nq, self.wanted.size)
        sums = self.map.new_zeros(*self.map.shape[:2], self.cells[0], self.cells[1])
        return sums.index_add_(2, cell, self.map)


def _strides(x: Tensor, kind: int) -> tuple[int, ...]:
    """The strides of (B or 1, H or 1, Nq or 1, Nk or 1), 0 along axes that are shared."""
    steps = [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return (*steps, *[0] * (4 - len(steps))) if kind else (0, 0, 0, 0)


def _steps(kinds: Tensor, mask: int) -> tuple[int, ...]:
    return _strides(kinds, mask)[:3] if mask == 2 else (0, 0, 0)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
