"""A call in the form that the Triton kernels read: pointers, strides, a mask and a bias of few kinds.

Causal masks and windows go in as three numbers. Any other mask becomes a kind per tile (hidden, visible, mixed) and the
cells of the mixed tiles; a bias that depends on distance becomes one number per distance. Never N×N, unless the user
brought it.

It does not know what is measured, nor the arithmetic: that is in regard.lens.measuring.kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.backends.call import Call, rows_together
from regard.biases import DenseBias
from regard.devices import power_of_two
from regard.masks import FULL, PARTIAL, DenseMask
from regard.masks.tile_lists import mixed_cells

__all__ = ["LOG2E", "Blocks", "KernelCall", "Part", "blocks_for"]

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
    """What was fastest on an H200, see benchmarks/results/lens-cuda.md.

    128 registers a thread let four programs share a core, where heads up to 64 leave shared memory for them; a mask
    needs more, or it spills. Wider heads leave shared memory for three, and then for two loads in flight only.
    """
    if call.q.dtype == torch.float32:
        return Blocks(32, 64, 4, 2)
    if call.q.shape[-1] > 64:
        return Blocks(64, 128, 4, 2, 168)
    return Blocks(64, 128, 4, 3, 128 if call.mask is None else 168)


@dataclass(frozen=True)
class Part:
    """What one launch covers: some of the B·H heads, counted through, and some of their queries."""

    head_from: int
    heads: int
    row_from: int
    rows: int

    @property
    def numbers(self) -> dict[str, int]:
        """As the kernels take them; the heads are the grid's."""
        return {"head_from": self.head_from, "row_from": self.row_from, "rows": self.rows}


class KernelCall:
    """What every kernel that computes scores is given, by name: `arguments`, or `in_double` where that is in fp64.

    Kernels are given numbers in fp32; `in_double` has the scale in two of them.
    """

    def __init__(self, call: Call, blocks: Blocks) -> None:
        """call: on torch tensors, no size 0."""
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
        """Does the measuring kernel leave out tiles that nobody sees?"""
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
