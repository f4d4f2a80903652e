"""Arrays as JSON carries them, base64 of little-endian float32; and long arrays as short ones, by bins.

    >>> packed(torch.tensor([[1.0, -2.0]]))
    {'shape': [1, 2], 'f32': 'AACAPwAAAMA='}

It does not know what the numbers are.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from regard.explorer.answer_types import Array
from regard.lens.measuring.measures import cell_edges

__all__ = ["bin_edges", "finite", "largest_of_bins", "packed", "sums_of_bins", "unpacked"]


def packed(values: Tensor) -> Array:
    """A tensor of any shape as a dictionary of its shape and its numbers; NaN and infinities stay what they are.

    >>> packed(torch.zeros(0))
    {'shape': [0], 'f32': ''}
    """
    numbers = values.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return {"shape": list(values.shape), "f32": b64encode(numbers.tobytes()).decode("ascii")}


def unpacked(array: Array) -> Tensor:
    """The tensor that was packed, in fp32.

    >>> unpacked(packed(torch.tensor([[0.5, 0.25]])))
    tensor([[0.5000, 0.2500]])

    Raises ValueError for numbers that do not fill the shape.
    """
    numbers = np.frombuffer(b64decode(array["f32"]), "<f4").astype(np.float32)
    return torch.from_numpy(numbers).reshape(array["shape"])


def finite(value: float | None) -> float | None:
    """A number that JSON has a sign for, or None.

    >>> finite(0.5), finite(float("nan"))
    (0.5, None)
    """
    return value if value is not None and isfinite(value) else None


def bin_edges(n: int, bins: int) -> Tensor:
    """Where bins begin and end, (min(n, bins) + 1,): as even as integers allow.

    >>> bin_edges(7, 3)
    tensor([0, 2, 4, 7])
    """
    return torch.tensor(cell_edges(n, bins))


def sums_of_bins(values: Tensor, bins: int) -> Tensor:
    """(…, N) → (…, min(N, bins)): the sum of each bin, in fp64 inside.

    >>> sums_of_bins(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    tensor([ 3., 12.])
    """
    n = values.shape[-1]
    if n <= bins:
        return values.float()
    return _reduced(values.double(), bins, "sum").float()


def largest_of_bins(values: Tensor, bins: int) -> Tensor:
    """(…, N) → (…, min(N, bins)): the largest of each bin.

    >>> largest_of_bins(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    tensor([2., 5.])
    """
    return values.float() if values.shape[-1] <= bins else _reduced(values, bins, "max").float()


def _reduced(values: Tensor, bins: int, how: str) -> Tensor:
    lengths = bin_edges(values.shape[-1], bins).diff().to(values.device)
    return torch.segment_reduce(
        values, how, lengths=lengths.expand(*values.shape[:-1], -1), axis=values.ndim - 1, unsafe=True
    )
