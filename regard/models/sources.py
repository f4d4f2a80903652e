"""Where our weights are in a checkpoint: templates, written as data in each family's file.

    >>> names = {"blocks.{i}.attention.w_qkv": Rows("layer.{i}.query", "layer.{i}.key", "layer.{i}.value")}
    >>> source, index, leaf = lookup(names, "blocks.3.attention.w_qkv.weight")
    >>> source.names(index, leaf)
    ('layer.3.query.weight', 'layer.3.key.weight', 'layer.3.value.weight')

A template names a module and stands for its weight and its bias, or names one parameter. `{i}` is the number of a
layer. This file knows neither files nor models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Names", "Plain", "Row", "Rows", "Turned", "lookup"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Plain:
    """One tensor, as it is."""

    name: str
    needed: ClassVar[bool] = True

    def names(self, index: str, leaf: str) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make one of ours."""
        return (_full(self.name, index, leaf),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Ours from theirs."""
        return parts[0]

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """Theirs from ours."""
        return [ours]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of theirs from the shape of ours."""
        return [ours]


@dataclass(frozen=True)
class Turned(Plain):
    """One matrix, transposed: GPT-2 keeps its matrices (inputs, outputs). A bias is as it is."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Ours from theirs."""
        return parts[0].mT.contiguous() if parts[0].ndim == 2 else parts[0]

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """Theirs from ours."""
        return [ours.mT.contiguous() if ours.ndim == 2 else ours]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of theirs from the shape of ours."""
        return [ours[::-1] if len(ours) == 2 else ours]


@dataclass(frozen=True)
class Row(Plain):
    """One vector, stored as a matrix of one row; where a checkpoint has none it is zero (BART's final_logits_bias)."""

    needed: ClassVar[bool] = False

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Ours from theirs."""
        return parts[0][0]

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """Theirs from ours."""
        return [ours[None]]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of theirs from the shape of ours."""
        return [(1, *ours)]


@dataclass(frozen=True, init=False)
class Rows:
    """Several tensors, one under another: query, key and value in one matrix (`regard.layers.Joined`)."""

    parts: tuple[str, ...]
    needed: ClassVar[bool] = True

    def __init__(self, *parts: str) -> None:
        object.__setattr__(self, "parts", parts)

    def names(self, index: str, leaf: str) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make one of ours."""
        return tuple(_full(part, index, leaf) for part in self.parts)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Ours from theirs."""
        return torch.cat(list(parts))

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """Theirs from ours; rows: how many rows each has."""
        assert rows is not None, self.parts
        return [part.contiguous() for part in torch.split(ours, list(rows))]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of theirs from the shape of ours."""
        assert rows is not None, self.parts
        return [(count, *ours[1:]) for count in rows]


Source = Plain | Rows
Names = Mapping[str, str | Source]
"""Templates: ours → theirs. A string stands for `Plain`."""


def lookup(names: Names, parameter: str) -> tuple[Source, str, str]:
    """The source of one of our parameters, the layer's number ("" outside the layers), and what to add to its names.

    Raises KeyError for a parameter that no template names: a family's file is incomplete.
    """
    numbers = re.findall(r"\.(\d+)\.", parameter)
    index = numbers[0] if numbers else ""
    for name in (parameter, parameter.replace(f".{index}.", ".{i}.", 1)):
        module, _, leaf = name.rpartition(".")
        if name in names:
            return _source(names[name]), index, ""
        if module in names:
            return _source(names[module]), index, "." + leaf
    raise KeyError(f"no template names {parameter}")


def _source(given: str | Source) -> Source:
    return Plain(given) if isinstance(given, str) else given


def _full(name: str, index: str, leaf: str) -> str:
    return name.replace("{i}", index) + leaf
