"""Initial weights of a model that is to be trained from scratch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.models.model import Model
from regard.nn.linear import Joined

__all__ = ["initialize"]


@torch.no_grad()
def initialize(model: Model, generator: torch.Generator) -> None:
    """Draw every parameter of a model, in the order of `named_parameters`, as its family does."""
    std = model.config.values.get("initializer_range", model.config.values.get("init_std", 0.02))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            _draw(module, name, parameter, std, generator)


def _draw(module: nn.Module, name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
    if name == "bias" or name.endswith("_bias"):
        parameter.zero_()
    elif parameter.ndim == 1 and not isinstance(module, Joined):
        parameter.fill_(1.0)  # of a norm, or a learned scale
    else:
        parameter.normal_(0.0, std, generator=generator)
