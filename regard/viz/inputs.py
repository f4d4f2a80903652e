"""Arguments of the lens' figures, read and checked: numbers, indices and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from regard.masks.rules import numbers
from regard.viz.colors import Array


def read_numbers(name: str, value: object, axes: str) -> Array:
    """Real numbers as float64, from a list, a NumPy array or a tensor of any precision and device.

    >>> read_numbers("values", torch.ones(2, 3, dtype=torch.bfloat16), "(layers, heads)").shape
    (2, 3)

    axes: what the axes are, as the message says it; there must be as many, and none of them empty.
    Raises TypeError for other kinds, ValueError for another number of axes or nothing in them.
    """
    tensor = numbers(name, value)
    if tensor.dtype.is_complex:
        raise TypeError(f"{name} must be real numbers, got {tensor.dtype}")
    if tensor.ndim != axes.count(",") + (not axes.endswith(",)")) or 0 in tensor.shape:
        raise ValueError(f"{name} must be {axes}, not empty; got {tuple(tensor.shape)}")
    return np.asarray(tensor.cpu().double().numpy())


def read_weights(name: str, value: object, axes: str) -> Array:
    """As `read_numbers`, for weights of which each must be finite and at least 0.

    >>> read_weights("weights", [0.25, 0.75], "(keys,)").tolist()
    [0.25, 0.75]
    """
    weights = read_numbers(name, value, axes)
    broken = np.argwhere(~np.isfinite(weights))
    if len(broken):
        at = tuple(int(i) for i in broken[0])
        where = at[0] if len(at) == 1 else at
        raise ValueError(
            f"{name} must be finite, got {weights[at]} at {where} and {len(broken)} such in all; "
            "regard.check(weights) says which rows are broken"
        )
    if (weights < 0).any():
        raise ValueError(f"{name} must not be negative, got {weights.min():.3g}; attention weights are in [0, 1]")
    return weights


def read_indices(name: str, value: object, count: int, what: str) -> Array:
    """Indices (M,) among `count` tokens, as integers.

    >>> read_indices("sources", [2, 0], 3, "tokens").tolist()
    [2, 0]

    Raises TypeError for what is not integers, ValueError for an index that is not there.
    """
    indices = numbers(name, value)
    if indices.ndim != 1 or indices.numel() == 0:
        raise ValueError(f"{name} must be (links,), not empty; got {tuple(indices.shape)}")
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {indices.dtype}")
    bad = [int(index) for index in indices if not 0 <= int(index) < count]
    if bad:
        hint = "; −1 marks what View.top did not find: leave those links out" if -1 in bad else ""
        raise ValueError(f"{name} must be in 0…{count - 1}, as there are {count} {what}; got {bad[0]}{hint}")
    return np.asarray(indices.cpu().numpy())


def index_of(name: str, value: object, count: int, what: str) -> int:
    """One index among `count`.

    >>> index_of("query", 2, 3, "tokens")
    2

    Raises TypeError for what is not an integer, ValueError for one that is not there.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")
    if not 0 <= value < count:
        raise ValueError(f"{name} must be in 0…{count - 1}, as there are {count} {what}; got {value}")
    return int(value)


def read_tokens(name: str, tokens: Any, count: int | None = None, what: str = "") -> tuple[str, ...]:
    """Tokens as strings; as many as `count`, where that is given.

    >>> read_tokens("tokens", ["나는", "cat"])
    ('나는', 'cat')

    Raises TypeError for what is not a list of strings, ValueError for none or another number of them.
    """
    if isinstance(tokens, str) or not isinstance(tokens, Sequence | np.ndarray):
        raise TypeError(f"{name} must be a list of strings, got {tokens!r}; a sentence has to be split first")
    strange = [token for token in tokens if not isinstance(token, str)]
    if strange:
        raise TypeError(f"{name} must be strings, got {strange[0]!r}; ids are turned into tokens by the tokenizer")
    if len(tokens) == 0:
        raise ValueError(f"{name} must not be empty")
    if count is not None and len(tokens) != count:
        raise ValueError(f"{name} has {len(tokens)} entries, but there are {count} {what}")
    return tuple(str(token) for token in tokens)
