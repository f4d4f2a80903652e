"""Where our weights are in a checkpoint: templates, written as data in each family's file.

    >>> names = {"blocks.{i}.attention.w_qkv": Rows("layer.{i}.query", "layer.{i}.key", "layer.{i}.value")}
    >>> source, numbers, leaf = lookup(names, "blocks.3.attention.w_qkv.weight")
    >>> source.names(numbers, leaf)
    ('layer.3.query.weight', 'layer.3.key.weight', 'layer.3.value.weight')

A template names a module and stands for its weight and its bias, or names one parameter. `{i}` is the number of a
layer, `{j}` a second number inside it (Swin's blocks in their stages). This file knows neither files nor models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Led", "Names", "Plain", "Row", "Rows", "Turned", "lookup", "nested"]

Shape = tuple[int, ...]
Numbers = tuple[str, ...]


@dataclass(frozen=True)
class Plain:
    """One tensor, as it is."""

    name: str
    needed: ClassVar[bool] = True

    def names(self, numbers: Numbers, leaf: str) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make one of ours."""
        return (_full(self.name, numbers, leaf),)

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


@dataclass(frozen=True)
class Led(Plain):
    """One tensor, stored with axes of length 1 before its own: cls as (1, 1, d), a table of positions as (1, N, d)."""

    ones: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Ours from theirs."""
        return parts[0].reshape(parts[0].shape[self.ones :])

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """Theirs from ours."""
        return [ours.reshape((1,) * self.ones + ours.shape)]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of theirs from the shape of ours."""
        return [(1,) * self.ones + ours]


@dataclass(frozen=True, init=False)
class Rows:
    """Several tensors, one under another: query, key and value in one matrix (`regard.linear_maps.Joined`)."""

    parts: tuple[str, ...]
    needed: ClassVar[bool] = True

    def __init__(self, *parts: str) -> None:
        object.__setattr__(self, "parts", parts)

    def names(self, numbers: Numbers, leaf: str) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make one of ours."""
        return tuple(_full(part, numbers, leaf) for part in self.parts)

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


def nested(names: Names, ours: str, theirs: str) -> dict[str, str | Source]:
    """The templates of a part of a model: what stands before its names, here and in the checkpoint.

    >>> nested({"blocks.{i}.norm": "layers.{i}.norm", "embed": Led("cls", 2)}, "vision.", "vision_model.")
    {'vision.blocks.{i}.norm': 'vision_model.layers.{i}.norm', 'vision.embed': Led(name='vision_model.cls', ones=2)}
    """
    return {ours + name: _under(source, theirs) for name, source in names.items()}


def _under(source: str | Source, theirs: str) -> str | Source:
    if isinstance(source, str):
        return theirs + source
    if isinstance(source, Rows):
        return Rows(*(theirs + part for part in source.parts))
    return replace(source, name=theirs + source.name)


def lookup(names: Names, parameter: str) -> tuple[Source, Numbers, str]:
    """The source of one of our parameters, the numbers of its layers (none outside them), and what to add to its names.

    Raises KeyError for a parameter that no template names: a family's file is incomplete.
    """
    numbers = tuple(part for part in parameter.split(".") if part.isdecimal())
    for count in range(len(numbers) + 1):
        name = parameter
        for letter, number in zip("ij", numbers[:count], strict=False):
            name = name.replace(f".{number}.", f".{{{letter}}}.", 1)
        module, _, leaf = name.rpartition(".")
        if name in names:
            return _source(names[name]), numbers, ""
        if module in names:
            return _source(names[module]), numbers, "." + leaf
    raise KeyError(f"no template names {parameter}")


def _source(given: str | Source) -> Source:
    return Plain(given) if isinstance(given, str) else given


def _full(name: str, numbers: Numbers, leaf: str) -> str:
    for letter, number in zip("ij", numbers, strict=False):
        name = name.replace(f"{{{letter}}}", number)
    return name + leaf
