"""The functions between two layers, by the names that checkpoints use.

    >>> activation("relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])

It does not know which layers, nor any family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

__all__ = ["ACTIVATIONS", "OVERWRITING", "activation", "quick_gelu"]


def quick_gelu(x: Tensor) -> Tensor:
    """x · σ(1.702 x): GELU nearly (Hendrycks and Gimpel 2016, section 2), and what CLIP was trained with.

    >>> quick_gelu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8458])
    """
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_fast": partial(gelu, approximate="tanh"),
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "tanh": torch.tanh,
}
"""By the names that checkpoints use."""

gelu_ = torch.ops.aten.gelu_.default
OVERWRITING: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu_,
    "gelu_fast": partial(gelu_, approximate="tanh"),
    "gelu_new": partial(gelu_, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu_, approximate="tanh"),
    "relu": torch.relu_,
    "silu": partial(silu, inplace=True),
    "swish": partial(silu, inplace=True),
    "tanh": torch.tanh_,
}
"""The same numbers, bit by bit, written over what came in; those that torch has."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name. Raises ValueError with the names there are."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r:.80}; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
