"""Which rows, columns, heads and batch rows are asked for: integers and parts, checked against how many there are.

It does not know what is asked of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["index_among", "part_of_axis"]


def index_among(name: str, value: object, n: int, of: str) -> int:
    """One of n things, counted from the end where negative.

    >>> index_among("row", -1, 5, "queries")
    4

    name, of: what is asked for and of what, as the messages say it.
    Raises TypeError for what is not an integer, IndexError for one that is not there.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} takes an integer, got {type(value).__name__}: {value!r}")
    if not -n <= value < n:
        raise IndexError(f"{name} {value} is out of range: there are {n} {of}")
    return int(value) % n


def part_of_axis(name: str, value: object, n: int, of: str) -> slice | Tensor:
    """Some of n things: a slice as it is where it has no step, anything else as indices.

    >>> part_of_axis("rows", slice(1, None), 5, "queries"), part_of_axis("rows", [0, -1], 5, "queries")
    (slice(1, 5, None), tensor([0, 4]))

    Raises TypeError for what is neither slice, range nor integers, IndexError as `index_among` does.
    """
    if isinstance(value, slice):
        start, stop, step = value.indices(n)
        return slice(start, max(start, stop)) if step == 1 else torch.arange(start, stop, step)
    if isinstance(value, (np.ndarray, Tensor)):
        value = value.tolist()
    if isinstance(value, (range, list, tuple)):
        return torch.tensor([index_among(name, v, n, of) for v in value], dtype=torch.long)
    raise TypeError(f"{name} must be a slice, a range or integers, got {type(value).__name__}: {value!r}")
