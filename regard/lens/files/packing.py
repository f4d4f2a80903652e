"""What is large made small before it is written: booleans as bits, measures of many positions as means of neighbours.

It does not know files, nor what the numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np
import torch
from torch import Tensor

__all__ = ["pack_bits", "pool", "unpack_bits"]


def pack_bits(cells: Tensor) -> Tensor:
    """Booleans as bits, eight to a byte, the first in the highest bit: uint8 (⌈cells / 8⌉,), on the CPU.

    >>> pack_bits(torch.tensor([[True, False, True], [False, False, True]]))
    tensor([164], dtype=torch.uint8)

    cells: booleans of any shape.  Raises TypeError for anything else.
    """
    if cells.dtype != torch.bool:
        raise TypeError(f"pack_bits takes booleans, got {cells.dtype}")
    return torch.from_numpy(np.packbits(cells.detach().cpu().numpy().reshape(-1)))


def unpack_bits(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The booleans of `pack_bits`, in their shape, on the CPU.

    >>> unpack_bits(torch.tensor([164], dtype=torch.uint8), (2, 3)).tolist()
    [[True, False, True], [False, False, True]]

    packed: uint8 (bytes,).  shape: of the booleans.
    Raises TypeError for other than uint8, ValueError if the shape does not take this many bytes.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack_bits takes the uint8 of pack_bits, got {packed.dtype}")
    if packed.ndim != 1 or packed.numel() != -(-prod(shape) // 8):
        raise ValueError(f"{tuple(shape)} booleans take {-(-prod(shape) // 8)} bytes, got {tuple(packed.shape)}")
    bits = np.unpackbits(packed.cpu().numpy(), count=prod(shape))
    return torch.from_numpy(bits.view(np.bool_)).reshape(tuple(shape))


def pool(values: Tensor, bins: int) -> Tensor:
    """The means of neighbours: (…, N) → (…, min(N, bins)) in fp32. Cell i of m covers ⌊i·N/m⌋ up to ⌊(i + 1)·N/m⌋.

    >>> pool(torch.tensor([1.0, 3.0, -torch.inf, 5.0, -torch.inf, -torch.inf]), 3)
    tensor([2., 5., -inf])

    values: real, of any shape; −∞ (the lse of a row that sees nothing) is left out of its cell's mean, and a cell with
    nothing else is −∞. NaN and +∞ show in their own cell and in no other.
    bins: how many cells at most, 1 or more.  Raises ValueError for fewer.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    n = values.shape[-1]
    if n <= bins:
        return values.float()
    cells, inside = _neighbours(values if values.is_floating_point() else values.double(), bins)  # (…, bins, widest)
    some_hidden = values.numel() > 0 and not bool(values.amin() > -inf)  # one look, for most have none
    counted = inside & (cells != -inf) if some_hidden else inside
    total = torch.where(counted, cells, 0.0).sum(-1, dtype=torch.float64)  # sums of fp32 cannot overflow there
    means = total / counted.sum(-1)  # 0 / 0 is NaN, replaced below
    return torch.where(counted.any(-1), means, -inf).float()


def _neighbours(values: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(…, N) → the values of each cell (…, bins, widest cell), and which of them are its own (bins, widest cell)."""
    n = values.shape[-1]
    edges = torch.arange(bins + 1, device=values.device) * n // bins
    at = edges[:-1, None] + torch.arange(-(-n // bins), device=values.device)  # (bins, widest cell)
    cells = values.reshape(*values.shape[:-1], bins, n // bins) if n % bins == 0 else values[..., at.clamp(max=n - 1)]
    return cells, at < edges[1:, None]
