"""The measuring pass on CUDA: buffers and launches of the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, inf, log2, nan, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.backends.call import Call, rows_together
from regard.devices import ROUNDED_ONCE, current, power_of_two
from regard.lens.measures.measures import (
    MeasureOptions,
    cell_of_positions,
    finish_effective,
    finish_entropy,
    finish_map,
    finish_top,
)
from regard.lens.measures.weights import LARGE
from regard.masks import FULL, PARTIAL, DenseMask
from regard.masks.biases import DenseBias
from regard.masks.tiles import mixed_cells

if TYPE_CHECKING:
    from regard.lens.measures.hopper import Cut

LOG2E = log2(e)
BAND, TABLE = 1, 2  # MASK of the kernels; 0 is none
DISTANCE, DENSE = 1, 2  # BIAS, likewise


@dataclass(frozen=True)
class Blocks:
    """How the kernels are cut: queries × keys of a tile, warps, and loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def blocks_for(call: Call) -> Blocks:
    """The fastest on an H200, see benchmarks/results/lens-cuda.md.

    128 registers a thread let four programs share a core, where heads up to 64 leave shared memory for them; a mask
    needs more, or it spills. Wider heads leave shared memory for three, and then for two loads in flight only.
    """
    if call.q.dtype == torch.float32:
        return Blocks(32, 64, 4, 2)
    if call.q.shape[-1] > 64:
        return Blocks(64, 128, 4, 2, 168)
    return Blocks(64, 128, 4, 3, 128 if call.mask is None else 168)


@dataclass(frozen=True)
class LaunchPart:
    """The part of one launch: some of the B·H heads, counted through, and some of their queries."""

    head_from: int
    heads: int
    row_from: int
    rows: int

    @property
    def numbers(self) -> dict[str, int]:
        """Kernel arguments; the heads are the grid's."""
        return {"head_from": self.head_from, "row_from": self.row_from, "rows": self.rows}


class KernelCall:
    """Arguments by name of every kernel that computes scores: `arguments`, or `in_double` for scores in fp64.

    Kernels take numbers in fp32; `in_double` has the scale in two of them. The call is on torch tensors, no size 0.
    """

    def __init__(self, call: Call, blocks: Blocks) -> None:
        _, heads, nq, nk = call.sizes
        self.call, self.blocks = call, blocks
        self.tiles = -(-nk // blocks.keys)
        q, k = rows_together(call.q.detach()), rows_together(call.k.detach())
        plain = call.softcap is None and call.bias is None
        self.arguments: dict[str, Any] = {
            "Q": q, "K": k, "heads": heads, "group": heads // k.shape[1], "nq": nq, "nk": nk,
            **dict(zip(("q_b", "q_h", "q_n"), q.stride(), strict=False)),
            **dict(zip(("k_b", "k_h", "k_n"), k.stride(), strict=False)),
            "scale": call.scale * (LOG2E if plain else 1.0), "cap": call.softcap or 1.0,
            "D": q.shape[-1], "WIDTH": max(16, power_of_two(q.shape[-1])),
            "BLOCK_Q": blocks.queries, "BLOCK_K": blocks.keys, "EVEN_K": nk % blocks.keys == 0,
            "IEEE": q.dtype == torch.float32, "SOFTCAP": call.softcap is not None,
            **self._mask(), **self._bias(),
        }  # fmt: skip
        scale = float(np.float32(call.scale))
        self.in_double: dict[str, Any] = self.arguments | {"scale": scale, "scale_rest": call.scale - scale}

    @property
    def skips_tiles(self) -> bool:
        """Whether the measuring kernel skips hidden tiles."""
        return bool(self.arguments["MASK"] != 0)

    def _mask(self) -> dict[str, Any]:
        """The kind of mask, its band, its kinds per tile, its cells, and whether only mixed tiles are stored."""
        mask, (_, _, nq, nk) = self.call.mask, self.call.sizes
        nothing = torch.zeros(1, dtype=torch.int32, device=self.call.device)
        if mask is None:
            return _mask_arguments(0, (0, 0, 0), nothing, nothing)
        band = mask.band(nq, nk)
        if band is not None:
            return _mask_arguments(BAND, band, nothing, nothing)
        size = (self.blocks.queries, self.blocks.keys)
        kinds = mask.tiles(nq, nk, size, self.call.device)  # (B or 1, H or 1, Tq, Tk)
        numbered = (kinds == FULL).to(torch.int32)
        if isinstance(mask, DenseMask):
            cells = mask.cells.to(self.call.device).view(torch.uint8)
            return _mask_arguments(TABLE, (0, 0, 0), numbered + 2 * (kinds == PARTIAL).to(torch.int32), cells)
        mixed = (kinds == PARTIAL).nonzero()  # (n, 4)
        numbered[tuple(mixed.T)] = 2 + torch.arange(len(mixed), dtype=torch.int32, device=mixed.device)
        return _mask_arguments(TABLE, (0, 0, 0), numbered, mixed_cells(mask, mixed, size, nq, nk), packed=True)

    def _bias(self) -> dict[str, Any]:
        """The kind of bias, and its numbers (B or 1, H or 1, distances) or (B or 1, H or 1, Nq or 1, Nk or 1)."""
        bias, (_, _, nq, nk) = self.call.bias, self.call.sizes
        if bias is None:
            return _bias_arguments(0, torch.zeros(1, device=self.call.device))
        if isinstance(bias, DenseBias):
            return _bias_arguments(DENSE, bias.cells.detach().to(self.call.device))
        distance = torch.arange(1 - nq, nk, device=self.call.device)  # j − i
        i = (-distance).clamp(min=0)
        term = bias.bind(nq, nk, self.call.device, torch.float32)
        batch, heads = bias.leading
        b = torch.arange(batch, device=distance.device).view(-1, 1, 1)
        h = torch.arange(heads, device=distance.device).view(-1, 1)
        return _bias_arguments(DISTANCE, term(b, h, i, i + distance).detach().expand(batch, heads, -1).contiguous())


def _mask_arguments(
    kind: int, band: tuple[int, int, int], kinds: Tensor, cells: Tensor, packed: bool = False
) -> dict[str, Any]:
    kinds = kinds.contiguous()
    return {
        "MASK": kind, "PACKED": packed, "KINDS": kinds, "CELLS": cells,
        **dict(zip(("offset", "before", "after"), band, strict=True)),
        **dict(zip(("kinds_b", "kinds_h", "kinds_i"), _strides(kinds), strict=False)),
        **dict(zip(("cells_b", "cells_h", "cells_i", "cells_j"), _strides(cells), strict=True)),
    }  # fmt: skip


def _bias_arguments(kind: int, numbers: Tensor) -> dict[str, Any]:
    steps = dict(zip(("bias_b", "bias_h", "bias_i", "bias_j"), _strides(numbers), strict=True))
    return {"BIAS": kind, "BIAS_AT": numbers, **steps}


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides of up to four axes, 0 along axes of 1, which are shared, and along those that are not there."""
    steps = [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return (*steps, *[0] * (4 - len(steps)))


BYTES = 1 << 30  # few parts: the last programs of each leave the GPU half idle, 1.2 ms of 6 at 32k causal in four
MOST_LINKS = 64
WHOLE_TILES = 21  # links up to which groups are as wide as a tile: k + 1 tiles, and k + 1 scores of each, are ≤ 484
NARROW = 8  # keys in a group beyond that: k + 1 groups are ≤ 520 scores
FEW = 32  # what most rows need of their room
SHARES = 4  # programs that share one list: some tiles are on every row's
STEP = 1 << 10  # rows that are enlisted together
CELLS = 1 << 14  # maxima that one program holds at most: 64 registers a thread
SORTED = 1 << 12  # scores that one program sorts
WARPS_IN_DOUBLE = 8  # of kernels with scores in fp64, which take twice the registers: the same products in each


@dataclass(frozen=True, eq=False)
class Buffers:
    """What the kernels pass to each other for one part; freed with it."""

    maxima: Tensor  # (heads, groups, rows) largest scores
    threshold: Tensor  # (heads, rows) what a score must reach
    cut: Tensor  # (heads, rows) the key from which on it must be more; of narrow groups only
    lists: Tensor  # (heads, tiles, rows) which rows must look into a tile
    lengths: Tensor  # (heads, tiles) how many they are
    scores: Tensor  # (heads, rows, room) those that reach the threshold
    keys: Tensor  # (heads, rows, room)
    counts: Tensor  # (heads, rows) how many they are


class Links:
    """Keys and scores of the largest weights, filled part by part.

    want_maximum: keep each row's largest score in `highest`, in units of log₂.
    """

    def __init__(self, call: Call, top: int, blocks: Blocks, want_maximum: bool) -> None:
        batch, heads, nq, nk = call.sizes
        self.sizes, self.device, self.blocks, self.want_maximum = call.sizes, call.device, blocks, want_maximum
        self.k, self.short = min(top, nk), max(0, top - nk)
        self.group = blocks.keys if self.k <= WHOLE_TILES else NARROW
        self.tiles, self.per_tile = -(-nk // blocks.keys), blocks.keys // self.group
        bound = min(nk, (self.k + 1) * min(self.k + 1, self.group))
        self.room = -(-bound // 16) * 16  # rows that begin on 64 bytes load faster
        self.score = self._floats(batch, heads, nq, self.k)
        self.key = torch.empty(batch, heads, nq, self.k, dtype=torch.int64, device=call.device)
        self.tied = torch.zeros(batch, heads, nq, dtype=torch.bool, device=call.device)
        self.highest = self._floats(*((batch, heads, nq) if want_maximum else (1,))).fill_(-inf)

    def at_once(self, most_heads: int) -> tuple[int, int]:
        """How many heads and how many of their queries make a part: whole heads, or some tiles of one."""
        batch, heads, nq, _ = self.sizes
        rows = BYTES // (4 * (self.tiles * self.per_tile + self.tiles + 4) + 8 * self.room)
        if rows >= nq:
            return _evenly(batch * heads, min(rows // nq, most_heads)), nq
        tall = self.blocks.queries
        return 1, tall * _evenly(-(-nq // tall), max(1, rows // tall))

    def buffers(self, part: LaunchPart, skips_tiles: bool) -> Buffers:
        """Room for a part. skips_tiles: some maxima will not be written."""
        heads, rows = part.heads, part.rows
        maxima = self._floats(heads, self.tiles * self.per_tile, rows)
        return Buffers(
            maxima=maxima.fill_(-inf) if skips_tiles else maxima,
            threshold=self._floats(heads, rows),
            cut=self._integers(heads, rows),
            lists=self._integers(heads, self.tiles, rows),
            lengths=self._integers(heads, self.tiles),
            scores=self._floats(heads, rows, self.room),
            keys=self._integers(heads, rows, self.room),
            counts=self._integers(heads, rows).zero_(),
        )

    def find(self, kernel_call: KernelCall, part: LaunchPart, at: Buffers, lse: Tensor, large: Tensor) -> None:
        """Launch the four kernels on a part whose maxima are there, one of them twice.

        lse, large: in fp64, and which heads are measured in it: their maxima and scores are log₂ weights.
        """
        from regard.lens.measures import top_kernels

        groups = power_of_two(self.tiles * self.per_tile)
        tall = max(1, min(CELLS // groups, max(8, min(32, 1024 // groups))))  # 8 rows fill what memory reads at once
        top_kernels.select[(-(-part.rows // tall), part.heads)](
            at.maxima, at.threshold, at.cut, self.highest, large,
            **part.numbers, nq=self.sizes[2], tiles=self.tiles, k=self.k,
            GROUPS=groups, GROUP=self.group, PER_TILE=self.per_tile, ROWS=tall, WANT_MAXIMUM=self.want_maximum,
            num_warps=max(1, min(32, groups * tall // 2048)), **ROUNDED_ONCE,
        )  # fmt: skip
        top_kernels.enlist[(self.tiles, part.heads)](
            at.maxima, at.threshold, at.lists, at.lengths,
            rows=part.rows, PER_TILE=self.per_tile, STEP=STEP, num_warps=4, **ROUNDED_ONCE,
        )  # fmt: skip
        collecting = {
            **part.numbers, "k": self.k, "EXACT": lse, "LARGE": large,
            "THRESHOLD": at.threshold, "CUT": at.cut, "LISTS": at.lists, "LENGTHS": at.lengths,
            "COUNTS": at.counts, "SCORES": at.scores, "KEYS": at.keys, "ROOM": self.room, "PER_TILE": self.per_tile,
            **ROUNDED_ONCE,
        }  # fmt: skip
        top_kernels.collect[(self.tiles, part.heads, SHARES)](
            **kernel_call.arguments, **collecting, scale_rest=0.0, IN_DOUBLE=False,
            num_warps=self.blocks.warps, maxnreg=self.blocks.registers,
        )  # fmt: skip
        top_kernels.collect[(self.tiles, part.heads, SHARES)](
            **kernel_call.in_double, **collecting, IN_DOUBLE=True, num_warps=WARPS_IN_DOUBLE
        )
        wide = power_of_two(self.room)
        tall = max(1, min(32, SORTED // wide))
        top_kernels.finish[(-(-part.rows // tall), part.heads)](
            at.scores, at.keys, at.counts, at.threshold, self.score, self.key, self.tied.view(torch.uint8),
            **part.numbers, nq=self.sizes[2], k=self.k,
            ROWS=tall, ROOM=self.room, WIDE=wide, FEW=min(FEW, wide), num_warps=4, **ROUNDED_ONCE,
        )  # fmt: skip

    def found(self, lse: Tensor, large: Tensor) -> dict[str, Tensor]:
        """Keys and weights (B, H, Nq, k), and whether a key left out weighs as much as the last one taken."""
        batch, heads, _, _ = self.sizes
        shift = torch.where(large.view(batch, heads, 1) != 0, 0.0, lse).to(self.score.dtype)
        found = finish_top(self.score, self.key, self.tied, shift, self.short)
        found["top_weight"].masked_fill_(lse.isnan().unsqueeze(-1), nan)  # no score of such a row reaches anything
        return found

    def _floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _integers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device)


def _evenly(n: int, most: int) -> int:
    """The size of about equal parts of n, at most `most` each."""
    parts = -(-n // most)
    return -(-n // parts)


MOST_HEADS = 65535  # CUDA's limit for all axes of a grid but the first
NO_MAXIMUM = -2139095041  # −∞ as the kernel writes floats whose order is that of integers
BY_TILE, BY_ROW = 1, 2  # MAP of the kernel; 0 is none
WARP_ROWS = 16  # as the kernel has it
ROWS_READ = 1 << 12  # of lse, at once
MOST_TILES = 16  # of one map cell with sums of their own: about as many as run at the same time


def unsupported_reason(call: Call, wanted: MeasureOptions) -> str | None:
    """Why this engine cannot measure a call, or None."""
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


def measure(call: Call, lse: Tensor, wanted: MeasureOptions, blocks: Blocks | None = None) -> dict[str, Tensor]:
    """What `wanted` names, as regard.lens.measures.engines.measure gives it; `call` is one it supports.

    lse: (B, H, Nq) fp32. The result's "lse" is in fp64: of fp64 scores in heads where it is large, else the argument.
    blocks: how `kernels.measure` is cut, which then measures also what `hopper.measure` could.
    """
    with torch.no_grad(), current(call.device):
        cut = hopper_cut(call, wanted) if blocks is None else None
        launch = _Launch(call, lse, wanted, blocks or blocks_for(call), cut)
        if 0 not in call.sizes:
            launch.run()
        return launch.found()


def hopper_cut(call: Call, wanted: MeasureOptions) -> Cut | None:
    """How `hopper.measure` is cut for a call, or None where `kernels.measure` has to do it."""
    if call.device.type != "cuda" or torch.cuda.get_device_capability(call.device) != (9, 0):
        return None
    from regard.lens.measures import hopper  # Gluon is not in every triton

    return hopper.cut_for(call, wanted)


class _Launch:
    """The results' tensors, the launches that fill them, and the finished measures.

    cut: of the kernel for Hopper; None for the one for all GPUs.
    """

    def __init__(self, call: Call, lse: Tensor, wanted: MeasureOptions, blocks: Blocks, cut: Cut | None = None) -> None:
        batch, heads, nq, nk = call.sizes
        self.call, self.given, self.wanted, self.blocks, self.cut = call, lse.contiguous(), wanted, blocks, cut
        self.lse = lse.double() if 0 in call.sizes else torch.empty_like(self.given, dtype=torch.float64)
        self.shift = torch.empty_like(self.given, dtype=torch.float32)
        self.large = torch.empty(batch * heads, dtype=torch.int32, device=lse.device)  # which heads are, see read_lse
        names = wanted.names
        self.nothing = self.shift.new_zeros(1)
        self.cells = min(wanted.size, nq), min(wanted.size, nk)
        self.map_kind = self._map_kind() if "map" in names and 0 not in call.sizes else 0
        by_row = (batch, heads, nq, self.cells[1])
        by_cell = (batch, heads, *self.cells, self._map_parts() if self.map_kind == BY_TILE else 1)
        shapes = {
            "received": (batch, heads, nk),
            "entropy": (batch, heads, nq),
            "effective": (batch, heads, nq),
            "map": by_row if self.map_kind == BY_ROW else by_cell,
        }
        # One tensor of zeros for all sums: each would take a launch of its own.
        sizes = {name: prod(shape) for name, shape in shapes.items() if name in names}
        parts = torch.split(self.shift.new_zeros(sum(sizes.values())), list(sizes.values()))
        sums = {name: part.view(shapes[name]) for name, part in zip(sizes, parts, strict=True)}
        self.received, self.entropy, self.squares, self.map = (sums.get(name, self.nothing) for name in shapes)
        self.links = Links(call, wanted.top, blocks, "max_logit" in names) if "top" in names else None
        self.maximum = self.nothing
        if "max_logit" in names and self.links is None:
            self.maximum = torch.full((batch, heads, nq), NO_MAXIMUM, dtype=torch.int32, device=lse.device)

    def _map_kind(self) -> int:
        """How the kernel keeps the map's sums.

        BY_TILE: sums per map cell, see `_map_parts`, where a tile meets at most two map cells each way.
        BY_ROW: a sum per query and map cell, for short sequences.
        """
        (nq, nk), blocks = self.call.sizes[2:], self.blocks
        tall, wide = nq // self.cells[0], nk // self.cells[1]
        return BY_ROW if self.cut is None and (tall < blocks.queries or wide < blocks.keys) else BY_TILE

    def _map_parts(self) -> int:
        """Sums of a map cell: one per row of a tile; or, where tiles lie within a cell, per warp and tile."""
        if self.cut is not None:
            return 1
        if not self._aligned():
            return self.blocks.queries
        tiles = self.call.sizes[3] // (self.cells[1] * self.blocks.keys)  # of keys, in a cell
        return self.blocks.queries // WARP_ROWS * min(tiles, MOST_TILES)

    def _aligned(self) -> bool:
        """Whether every tile lies within one map cell."""
        (nq, nk), (rows, cols), cut = self.call.sizes[2:], self.cells, self.blocks
        return nq % (rows * cut.queries) == 0 and nk % (cols * cut.keys) == 0

    def run(self) -> None:
        """Launch, part by part."""
        from regard.lens.measures import kernels

        kernel_call = KernelCall(self.call, self.blocks)
        kernels.read_lse[(len(self.large),)](
            self.given,
            self.shift,
            self.lse,
            self.large,
            self.call.sizes[2],
            LARGE,
            FINITE=self.cut is not None,
            BLOCK=ROWS_READ,
            num_warps=8,
            **ROUNDED_ONCE,
        )
        for part in self._parts():
            self._run_part(kernel_call, part)

    def _run_part(self, kernel_call: KernelCall, part: LaunchPart) -> None:
        """Measure; the largest weights are then found from the maxima."""
        if self.links is None:
            self._measure(kernel_call, part, self.nothing)
        else:
            buffers = self.links.buffers(part, kernel_call.skips_tiles)
            self._measure(kernel_call, part, buffers.maxima)
            self.links.find(kernel_call, part, buffers, self.lse, self.large)

    def _parts(self) -> list[LaunchPart]:
        """All at once, unless that needs too much memory for the links or too large a grid."""
        batch, heads, nq, _ = self.call.sizes
        heads_at_once, rows_at_once = (MOST_HEADS, nq) if self.links is None else self.links.at_once(MOST_HEADS)
        return [
            LaunchPart(h, min(heads_at_once, batch * heads - h), i, min(rows_at_once, nq - i))
            for h in range(0, batch * heads, heads_at_once)
            for i in range(0, nq, rows_at_once)
        ]

    def _measure(self, kernel_call: KernelCall, part: LaunchPart, maxima: Tensor) -> None:
        """Launch the measuring kernel for ordinary heads, and the one for heads with large logits."""
        from regard.lens.measures import kernels

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
        if self.cut is not None:
            from regard.lens.measures import hopper

            sums = self.received, self.entropy, self.map
            hopper.launch(self.call, self.cut, names, self.shift, self.large, *sums)
        else:
            kernels.measure[(kernel_call.tiles, part.heads)](
                **kernel_call.arguments, **shared, LSE=self.shift,
                STAGES=self.blocks.stages, EVEN_Q=nq % self.blocks.queries == 0,
                ALIGNED=self._aligned(), SOME_ROWS=part.rows < nq,
                num_warps=self.blocks.warps, maxnreg=self.blocks.registers,
            )  # fmt: skip
        kernels.measure_large[(-(-part.rows // self.blocks.queries), part.heads)](
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
            found["entropy"] = finish_entropy(self.entropy, self.lse, sinks)
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
            return self.map.squeeze(-1) if self.map.shape[-1] == 1 else self.map.sum(-1)
        nq = self.call.sizes[2]
        cell = cell_of_positions(torch.arange(nq, device=self.map.device), nq, self.wanted.size)
        sums = self.map.new_zeros(*self.map.shape[:2], self.cells[0], self.cells[1])
        return sums.index_add_(2, cell, self.map)
