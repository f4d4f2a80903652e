"""The largest weights of each row on CUDA: the buffers of the four kernels, their launches, and how calls are cut.

For each row there is its largest score in every group of keys, room in the lists of rows of every tile of keys, and
room for the scores that may be among the largest: N²/128 numbers and more, so heads and queries are done in parts
that need at most `BYTES`. Nothing waits for the GPU.

It does not know the arithmetic (regard.lens.measuring.top_kernels says how it works) or the other measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.devices import ROUNDED_ONCE, power_of_two
from regard.lens.measuring.gpu_call import Blocks, KernelCall, Part
from regard.lens.measuring.measures import finish_top

__all__ = ["MOST_LINKS", "WARPS_IN_DOUBLE", "Buffers", "Links"]

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
    """What the kernels hand to each other, of one part; freed with it."""

    maxima: Tensor  # (heads, groups, rows) largest scores
    threshold: Tensor  # (heads, rows) what a score must reach
    cut: Tensor  # (heads, rows) the key from which on it must be more; of narrow groups only
    lists: Tensor  # (heads, tiles, rows) which rows must look into a tile
    lengths: Tensor  # (heads, tiles) how many they are
    scores: Tensor  # (heads, rows, room) those that reach the threshold
    keys: Tensor  # (heads, rows, room)
    counts: Tensor  # (heads, rows) how many they are


class Links:
    """Keys and scores of the largest weights, filled part by part."""

    def __init__(self, call: Call, top: int, blocks: Blocks, want_maximum: bool) -> None:
        """want_maximum: keep each row's largest score in `highest`, in units of log₂."""
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

    def buffers(self, part: Part, skips_tiles: bool) -> Buffers:
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

    def find(self, kernel_call: KernelCall, part: Part, at: Buffers, lse: Tensor, large: Tensor) -> None:
        """Launch the four kernels on a part whose maxima are there, one of them twice.

        lse, large: in fp64, and which heads are measured in it: their maxima and scores are log₂ weights.
        """
        from regard.lens.measuring import top_kernels

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
    """How many of n make a part, where a part is at most `most`: the last one is then no small rest."""
    parts = -(-n // most)
    return -(-n // parts)
