"""Linear layers: one, or several of one input joined in one matrix, and how to use part of a joined one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules import module as everywhere

from regard.checks import is_distributed

WIDE = 192  # inputs from which on several products are faster than one, on a CPU


class Linear(nn.Linear):
    """As torch's, but on device "meta" no initial weights are drawn: that would take a while."""

    def reset_parameters(self) -> None:
        """Draw initial weights, unless on device "meta"."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Joined(Linear):
    """Several linear maps of one input in one matrix, row under row; rows: how many rows each has, in order."""

    def __init__(self, inputs: int, rows: tuple[int, ...], *, bias: bool = True) -> None:
        super().__init__(inputs, sum(rows), bias)
        self.rows = rows


class JoinedTable(nn.Embedding):
    """Several embedding tables, one under another: a vocabulary, and tokens added to it later (Idefics)."""

    def __init__(self, rows: tuple[int, ...], d: int) -> None:
        super().__init__(sum(rows), d)
        self.rows = rows


def untouched(layer: nn.Module) -> bool:
    """Whether a layer is as it was built, so that its weights may be used without calling it.

    Adapters wrap a layer or patch its forward, pruning and weight norms hook into it, tools hook into all layers.
    """
    if type(layer) not in (Linear, Joined, nn.Linear) or "forward" in vars(layer):
        return False
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not (own or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


def separate(layer: nn.Module, rows: Sequence[int]) -> list[Linear]:
    """Each of the maps joined in a layer as a layer of its own, its weights copied; rows: how many each has, in order.

    Raises ValueError if an adapter, a hook or a patch is on the layer: it would be lost.
    """
    if not untouched(layer):
        raise ValueError(
            f"the {type(layer).__name__} of {sum(rows)} rows has an adapter, a hook or a patch, which would be lost: "
            "separate projections before anything is put on them"
        )
    joined = cast(nn.Linear, layer)
    biases = [None] * len(rows) if joined.bias is None else torch.split(joined.bias, list(rows))
    layers = []
    for weight, bias in zip(torch.split(joined.weight, list(rows)), biases, strict=True):
        single = Linear(joined.in_features, len(weight), bias is not None, device="meta")
        single.weight = nn.Parameter(weight.detach().clone(), joined.weight.requires_grad)
        if bias is not None:
            single.bias = nn.Parameter(bias.detach().clone(), joined.bias.requires_grad)
        layers.append(single.train(joined.training))
    return layers


def whole_output(layer: nn.Module, x: Tensor, width: int) -> Tensor:
    """layer(x), all `width` columns of the maps joined in it.

    Raises ValueError for another width: ColwiseParallel gives the first process all of Q and half of K.
    """
    y = cast(Tensor, layer(x))
    if y.shape[-1] != width or is_distributed(y):
        kind = "a DTensor" if is_distributed(y) else f"{y.shape[-1]}"
        raise ValueError(
            f"several projections joined in one layer must give all {width} features, got {kind}. Tensor parallelism "
            "must split each of them: regard.models.tensor_parallel.parallelize(model, mesh) does, or call separate() "
            "on the attention or feed-forward layer before a plan of your own"
        )
    return y


def apart(layer: nn.Module, rows: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
    """The output of each of the maps joined in a layer for x (…, inputs); rows: how many each has, in order.

    On a CPU, without gradients and from 192 inputs on, several products are as fast as one or up to 10 % faster: then
    each uses its own rows of the matrix. Raises as `whole_output`.
    """
    plain = x.is_cpu and x.shape[-1] >= WIDE and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not plain or not untouched(layer):
        return torch.split(whole_output(layer, x, sum(rows)), list(rows), -1)
    ends = list(accumulate(rows))
    return tuple(part(layer, rows, x, end - n, end) for n, end in zip(rows, ends, strict=True))


def part(layer: nn.Module, rows: Sequence[int], x: Tensor, start: int, stop: int) -> Tensor:
    """The columns start to stop of layer(x), alone unless the layer must be called. Raises as `whole_output`."""
    if not untouched(layer):
        return whole_output(layer, x, sum(rows))[..., start:stop]
    linear_layer = cast(nn.Linear, layer)
    bias = None if linear_layer.bias is None else linear_layer.bias[start:stop]
    return linear(x, linear_layer.weight[start:stop], bias)
