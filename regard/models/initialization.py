"""Initial weights of a model that is to be trained from scratch, as each family's paper or original code draws them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.models.model import Model
from regard.nn.linear import Joined, JoinedTable

__all__ = ["initialize"]


@torch.no_grad()
def initialize(model: Model, generator: torch.Generator) -> None:
    """Draw every parameter of a model, in the order of `named_parameters`.

    Most families: matrices and embeddings N(0, initializer_range²), biases 0, norms 1.
    """
    values = model.config.values
    std = float(values.get("initializer_range", values.get("init_std", 0.02)))
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = owners[path]
        if leaf.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)  # of a norm, or a learned scale
        elif model.family.model_type == "transformer":
            _draw_2017(owner, parameter, generator)
        else:
            parameter.normal_(0.0, std, generator=generator)
        if model.family.model_type == "gpt2" and path.endswith((".w_o", ".w_out")) and leaf == "weight":
            # Each block adds to the residual stream twice (Radford et al. 2019, section 2.3).
            parameter.div_(math.sqrt(2 * int(values["n_layer"])))


def _draw_2017(owner: nn.Module, parameter: Tensor, generator: torch.Generator) -> None:
    """Xavier for matrices, each of query, key and value by itself; embeddings with variance 1/d."""
    if isinstance(owner, nn.Embedding):
        parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        return
    rows = list(owner.rows) if isinstance(owner, (Joined, JoinedTable)) else [len(parameter)]
    for part in torch.split(parameter, rows):
        nn.init.xavier_uniform_(part, generator=generator)
