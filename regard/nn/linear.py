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

__all__ = [
    "Joined",
    "JoinedTable",
    "Linear",
    "apart",
    "part",
    "separate",
    "untouched",
    "whole_output",
]

WIDE = 192  # inputs from which on several products are faster than one, on a CPU


class Linear(nn.Linear):
    """As torch's, but a layer without memory (device "meta") draws no initial weights: that would take a while.

    >>> Linear(2, 3, device="meta").weight.shape
    torch.Size([3, 2])
    """

    def reset_parameters(self) -> None:
        """Draw initial weights, where there is memory for them."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Joined(Linear):
    """Several linear maps of one input, their rows one under another: one product instead of several.

    >>> Joined(4, (8, 2, 2), bias=False).weight.shape
    torch.Size([12, 4])

    rows: how many rows each map has, in order.
    """

    def __init__(self, inputs: int, rows: tuple[int, ...], *, bias: bool = True) -> None:
        super().__init__(inputs, sum(rows), bias)
        self.rows = rows


class JoinedTable(nn.Embedding):
    """Several tables of vectors, one under another: words, and words that were added to them later (Idefics).

    >>> JoinedTable((8, 2), 4)(torch.tensor([9])).shape
    torch.Size([1, 4])

    rows: how many rows each table has, in order.  d: width of a vector.
    """

    def __init__(self, rows: tuple[int, ...], d: int) -> None:
        super().__init__(sum(rows), d)
        self.rows = rows


def untouched(layer: nn.Module) -> bool:
    """Is a layer as it was made, so that its weights may be used without calling it?

    >>> layer = Linear(2, 3)
    >>> untouched(layer), untouched(nn.utils.parametrizations.weight_norm(layer))
    (True, False)

    Adapters wrap a layer or patch its forward, pruning and weight norms hook into it, tools hook into all layers.
    """
    if type(layer) not in (Linear, Joined, nn.Linear) or "forward" in vars(layer):
        return False
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not (own or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


def separate(layer: nn.Module, rows: Sequence[int]) -> list[Linear]:
    """Each of the maps joined in a layer as a layer of its own, its weights copied; rows: how many each has, in order.

    >>> separate(Joined(4, (8, 2, 2)), (8, 2, 2))[1]
    Linear(in_features=4, out_features=2, bias=True)

    Raises ValueError where an adapter, a hook or a patch is on the layer: it would be lost.
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
        made = Linear(joined.in_features, len(weight), bias is not None, device="meta")
        made.weight = nn.Parameter(weight.detach().clone(), joined.weight.requires_grad)
        if bias is not None:
            made.bias = nn.Parameter(bias.detach().clone(), joined.bias.requires_grad)
        layers.append(made.train(joined.training))
    return layers


def whole_output(layer: nn.Module, x: Tensor, width: int) -> Tensor:
    """layer(x), all `width` columns of the maps joined in it.

    >>> whole_output(Joined(4, (8, 2, 2)), torch.zeros(3, 4), 12).shape
    torch.Size([3, 12])

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
    """What each of the maps joined in a layer makes of x (…, inputs); rows: how many each has, in order.

    >>> [y.shape[-1] for y in apart(Joined(4, (8, 2, 2)), (8, 2, 2), torch.zeros(3, 4))]
    [8, 2, 2]

    On a CPU several products are as fast as one or up to 10 % faster, from 192 inputs on, if nobody differentiates:
    then each has its own rows of the matrix. Raises as `whole_output`.
    """
    plain = x.is_cpu and x.shape[-1] >= WIDE and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not plain or not untouched(layer):
        return torch.split(whole_output(layer, x, sum(rows)), list(rows), -1)
    ends = list(accumulate(rows))
    return tuple(part(layer, rows, x, end - n, end) for n, end in zip(rows, ends, strict=True))


def part(layer: nn.Module, rows: Sequence[int], x: Tensor, start: int, stop: int) -> Tensor:
    """The columns start to stop of layer(x), without the others where they need not be computed.

    >>> part(Joined(2, (4, 3)), (4, 3), torch.zeros(5, 2), 3, 6).shape
    torch.Size([5, 3])

    rows: as in `apart`. Raises as `whole_output`.
    """
    if not untouched(layer):
        return whole_output(layer, x, sum(rows))[..., start:stop]
    linear_layer = cast(nn.Linear, layer)
    bias = None if linear_layer.bias is None else linear_layer.bias[start:stop]
    return linear(x, linear_layer.weight[start:stop], bias)
