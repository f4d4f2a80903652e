"""The measuring pass on CUDA: where the Triton kernel's results lie, its launch, and what becomes of its sums.

The arithmetic is in `kernels.py`, and in `large_kernels.py` for heads with large logits; the form of masks and biases
in `gpu_call.py`; how the largest weights are found in `gpu_top.py`.
"""

from __future__ import annotations

from math import log, nan
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.biases import DenseBias
from regard.devices import ROUNDED_ONCE, current
from regard.lens.measuring.gpu_call import LOG2E, Blocks, KernelCall, Part, blocks_for
from regard.lens.measuring.gpu_top import MOST_LINKS, WARPS_IN_DOUBLE, Links
from regard.lens.measuring.measures import Wanted, cell_of_positions, finish_effective, finish_entropy, finish_map
from regard.lens.measuring.weights import LARGE

__all__ = ["Blocks", "blocks_for", "measure", "refuse"]

MOST_HEADS = 65535  # CUDA's limit for all axes of a grid but the first
NO_MAXIMUM = -2139095041  # −∞ as the kernel writes floats whose order is that of integers
BY_TILE, BY_ROW = 1, 2  # MAP of the kernel; 0 is none
WARP_ROWS = 16  # as the kernel has it
ROWS_READ = 1 << 12  # of lse, at once
MOST_TILES = 16  # of one map cell with sums of their own: about as many as run at the same time


def refuse(call: Call, wanted: Wanted) -> str | None:
    """Why this engine cannot do the pass, or None.

    >>> from regard.backends.call import prepare
    >>> from regard.lens.measuring.measures import read_wanted
    >>> x = torch.zeros(1, 1, 3, 2, dtype=torch.float64)
    >>> refuse(prepare(x, x, x), read_wanted("entropy"))
    'the Triton kernel has no float64'
    """
    links, cells = min(wanted.top, call.sizes[3]), min(wanted.size, max(call.sizes[2:]))
    if call.q.dtype == torch.float64:
        return "the Triton kernel has no float64"
    if call.q.shape[-1] > 256:
        return f"the Triton kernel holds head sizes up to 256, got {call.q.shape[-1]}"
    if call.bias is not None and not call.bias.by_distance and not isinstance(call.bias, DenseBias):
        return f"the Triton kernel knows biases by distance and dense ones, not {call.bias!r}"
    if "top" in wanted.names and links > MOST_LINKS:
        return f"the Triton kernel keeps up to {MOST_LINKS} links per row, got top={wanted.top}"
    if "map" in wanted.names and cells * (max(call.sizes[2:]) + 1) >= 1 << 31:
        return f"the Triton kernel counts map cells in 32 bits, which size={wanted.size} exceeds at this length"
    return None


def measure(call: Call, lse: Tensor, wanted: Wanted, blocks: Blocks | None = None) -> dict[str, Tensor]:
    """What `wanted` names, as regard.lens.measuring.streaming.measure gives it; `call` as that `refuse` lets pass.

    lse: (B, H, Nq) fp32.  blocks: how the kernels are cut; default what was fastest.
    "lse" is there as well, in fp64: of fp64 scores in heads where it is large, and else as given.
    """
    with torch.no_grad(), current(call.device):
        blocks = blocks or blocks_for(call)
        launch = _Launch(call, lse, wanted, blocks)
        if 0 not in call.sizes:
            launch.run()
        return launch.found()


class _Launch:
    """Where the results lie, the launches that fill them, and the measures made from them."""

    def __init__(self, call: Call, lse: Tensor, wanted: Wanted, blocks: Blocks) -> None:
        batch, heads, nq, nk = call.sizes
        self.call, self.given, self.wanted, self.blocks = call, lse.contiguous(), wanted, blocks
        self.lse = lse.double() if 0 in call.sizes else torch.empty_like(self.given, dtype=torch.float64)
        self.shift = torch.empty_like(self.given, dtype=torch.float32)
        self.large = torch.empty(batch * heads, dtype=torch.int32, device=lse.device)  # which heads are, see read_lse
        new = self.shift.new_zeros
        self.nothing = new(1)
        names = wanted.names
        self.received = new(batch, heads, nk) if "received" in names else self.nothing
        self.entropy = new(batch, heads, nq) if "entropy" in names else self.nothing
        self.squares = new(batch, heads, nq) if "effective" in names else self.nothing
        self.links = Links(call, wanted.top, blocks, "max_logit" in names) if "top" in names else None
        self.maximum = self.nothing
        if "max_logit" in names and self.links is None:
            self.maximum = torch.full((batch, heads, nq), NO_MAXIMUM, dtype=torch.int32, device=lse.device)
        self.cells = min(wanted.size, nq), min(wanted.size, nk)
        self.map_kind = self._map_kind() if "map" in names and 0 not in call.sizes else 0
        by_row = (batch, heads, nq, self.cells[1])
        by_cell = (batch, heads, *self.cells, self._map_parts() if self.map_kind == BY_TILE else 1)
        self.map = new(by_row if self.map_kind == BY_ROW else by_cell) if "map" in names else self.nothing

    def _map_kind(self) -> int:
        """How the kernel keeps the map's sums.

        BY_TILE: sums per map cell, see `_map_parts`, where a tile meets at most two map cells each way.
        BY_ROW: a sum per query and map cell, for short sequences.
        """
        (nq, nk), cut = self.call.sizes[2:], self.blocks
        tall, wide = nq // self.cells[0], nk // self.cells[1]
        return BY_ROW if tall < cut.queries or wide < cut.keys else BY_TILE

    def _map_parts(self) -> int:
        """How many sums a map cell has: one per row of a tile; or, where tiles lie within a cell, per warp and tile."""
        if not self._aligned():
            return self.blocks.queries
        tiles = self.call.sizes[3] // (self.cells[1] * self.blocks.keys)  # of keys, in a cell
        return self.blocks.queries // WARP_ROWS * min(tiles, MOST_TILES)

    def _aligned(self) -> bool:
        """Does every tile lie within one map cell?"""
        (nq, nk), (rows, cols), cut = self.call.sizes[2:], self.cells, self.blocks
        return nq % (rows * cut.queries) == 0 and nk % (cols * cut.keys) == 0

    def run(self) -> None:
        """Launch, part by part."""
        from regard.lens.measuring import large_kernels

        kernel_call = KernelCall(self.call, self.blocks)
        large_kernels.read_lse[(len(self.large),)](
            self.given,
            self.shift,
            self.lse,
            self.large,
            self.call.sizes[2],
            LARGE,
            BLOCK=ROWS_READ,
            num_warps=8,
            **ROUNDED_ONCE,
        )
        for part in self._parts():
            self._run_part(kernel_call, part)

    def _run_part(self, kernel_call: KernelCall, part: Part) -> None:
        """Measure; the largest weights are then found from the maxima."""
        if self.links is None:
            self._measure(kernel_call, part, self.nothing)
        else:
            buffers = self.links.buffers(part, kernel_call.skips_tiles)
            self._measure(kernel_call, part, buffers.maxima)
            self.links.find(kernel_call, part, buffers, self.lse, self.large)

    def _parts(self) -> list[Part]:
        """All at once, unless that needs too much memory for the links or too large a grid."""
        batch, heads, nq, _ = self.call.sizes
        heads_at_once, rows_at_once = (MOST_HEADS, nq) if self.links is None else self.links.at_once(MOST_HEADS)
        return [
            Part(h, min(heads_at_once, batch * heads - h), i, min(rows_at_once, nq - i))
            for h in range(0, batch * heads, heads_at_once)
            for i in range(0, nq, rows_at_once)
        ]

    def _measure(self, kernel_call: KernelCall, part: Part, maxima: Tensor) -> None:
        """Launch the measuring kernel for ordinary heads, and the one for heads with large logits."""
        from regard.lens.measuring import kernels, large_kernels

        nq, names, links = self.call.sizes[2], self.wanted.names, self.links
        shared = {
            **part.numbers, "LARGE": self.large,
            "RECEIVED": self.received, "ENTROPY": self.entropy, "SQUARES": self.squares, "MAXIMUM": self.maximum,
            "MAXIMA": maxima, "MAP_AT": self.map, "map_q": self.cells[0], "map_k": self.cells[1],
            "map_parts": self.map.shape[-1], "MAP": self.map_kind,
            "GROUP": self.blocks.keys if links is None else links.group,
            "WANT_RECEIVED": "received" in names, "WANT_ENTROPY": "entropy" in names,
            "WANT_SQUARES": "effective" in names, "WANT_MAXIMUM": "max_logit" in names and links is None,
            "WANT_MAXIMA": links is not None, **ROUNDED_ONCE,
        }  # fmt: skip
        kernels.measure[(kernel_call.tiles, part.heads)](
            **kernel_call.arguments, **shared, LSE=self.shift,
            STAGES=self.blocks.stages, EVEN_Q=nq % self.blocks.queries == 0,
            ALIGNED=self._aligned(), SOME_ROWS=part.rows < nq,
            num_warps=self.blocks.warps, maxnreg=self.blocks.registers,
        )  # fmt: skip
        large_kernels.measure_large[(-(-part.rows // self.blocks.queries), part.heads)](
            **kernel_call.in_double, **shared, **self._sinks(), EXACT=self.lse,
            HIGHEST=self.nothing if links is None else links.highest,
            WANT_HIGHEST="max_logit" in names and links is not None, num_warps=WARPS_IN_DOUBLE,
        )  # fmt: skip

    def _sinks(self) -> dict[str, Any]:
        """A logit per head (H,) or per row (B, H, Nq), and its strides."""
        sinks = self.call.sinks
        if sinks is None:
            return {"SINKS": self.nothing, "sinks_b": 0, "sinks_h": 0, "sinks_i": 0, "HAS_SINKS": False}
        steps = sinks.stride() if sinks.ndim == 3 else (0, sinks.stride(0), 0)
        return {"SINKS": sinks.detach(), "HAS_SINKS": True} | dict(
            zip(("sinks_b", "sinks_h", "sinks_i"), steps, strict=True)
        )

    def found(self) -> dict[str, Tensor]:
        """The measures, finished."""
        sinks, names, found = self.call.sinks, self.wanted.names, {"lse": self.lse}
        if "entropy" in names:
            found["entropy"] = finish_entropy(self.entropy * -log(2), self.lse, sinks)
        if "received" in names:
            found["received"] = self.received
        if "max_logit" in names:
            found["max_logit"] = self._maximum() / LOG2E
        if "effective" in names:
            found["effective"] = finish_effective(self.squares, self.lse, sinks)
        if "map" in names:
            found["map"] = finish_map(self._map_sums(), self.call.sizes[2])
        return found if self.links is None else found | self.links.found(self.lse, self.large)

    def _maximum(self) -> Tensor:
        """Each row's largest score, in units of log₂."""
        if self.links is not None:
            return self.links.highest.masked_fill(self.given.isnan(), nan)  # as a maximum of NaN is, below
        bits = self.maximum ^ ((self.maximum >> 31) & 0x7FFFFFFF)
        return bits.view(torch.float32)

    def _map_sums(self) -> Tensor:
        """The map's sums per cell, from sums per row where the kernel gave those."""
        if self.map_kind != BY_ROW:
            return self.map.sum(-1)
        nq = self.call.sizes[2]
        cell = cell_of_positions(torch.arange(nq, device=self.map.device), nq, self.wanted.size)
        sums = self.map.new_zeros(*self.map.shape[:2], self.cells[0], self.cells[1])
        return sums.index_add_(2, cell, self.map)
