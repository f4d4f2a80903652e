"""What a family file provides: config mapping, weight-name templates and tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from regard.models.config import Settings

if TYPE_CHECKING:
    from regard.models.model import Model

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
    """Several tensors, one under another: query, key and value in one matrix (`regard.nn.linear.Joined`)."""

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


def as_given(settings: Settings, stored: Collection[str]) -> Settings:
    """The settings themselves: what most families make of the names in a checkpoint."""
    return settings


@dataclass(frozen=True, kw_only=True)
class Task:
    """One head of a family.

    architecture: the class in `transformers` that has this head, which config.json names.
    names: templates of the head's weights, from the root of the checkpoint.
    prefix: what stands before the body's weights beside this head; default what the family has.
    unused: regular expressions of tensors that this task does without, as the decoder where only the encoder is asked.
    copies: a tensor that a checkpoint may hold beside the shared one, or in its place → that one, which it must equal.
    """

    architecture: str
    names: Names = field(default_factory=dict)
    prefix: str | None = None
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    title: for people.  model_type: as in config.json.
    prefix: what stands before the names of the body's weights in a checkpoint that has a head; "" for nothing.
    build: settings and task → the model, with weights of no value yet.
    names: settings → templates of the body's weights, without the prefix.
    tasks: by the name people ask for: none, fill, next, pretrain, classify, classify-cls, tag, answer, generate,
      encode, rebuild, caption, match.
    ignored: regular expressions of tensors that hold nothing learnt, or the same numbers as a shared one.
    copies: as in `Task`, of the body.
    renamed: endings of names in old checkpoints → what they are called now.
    moved: regular expressions of what stands before names, as other versions of `transformers` write it → what stands
      there now; one after another.
    harmless: keys of config.json that change nothing here.
    settle: settings and the names of the checkpoint's tensors → settings, where these know better (T5's word table).
    """

    title: str
    model_type: str
    prefix: str
    build: Callable[[Settings, str], Model]
    names: Callable[[Settings], Names]
    tasks: Mapping[str, Task]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    settle: Callable[[Settings, Collection[str]], Settings] = as_given

    def before(self, task: str) -> str:
        """What stands before the names of the body's weights in a checkpoint with this task's head, with its dot."""
        prefix = self.tasks[task].prefix
        prefix = self.prefix if prefix is None else prefix
        return prefix + "." if prefix and task != "none" else ""

    def task_of(self, architectures: object) -> str:
        """The task whose architecture config.json names; "none" if it names none.

        Raises ValueError for an architecture that the family does not have.
        """
        if not isinstance(architectures, list) or not architectures:
            return "none"
        for name, task in self.tasks.items():
            if task.architecture == architectures[0]:
                return name
        known = ", ".join(task.architecture for task in self.tasks.values())
        raise ValueError(
            f"the checkpoint is a {architectures[0]}, and {self.title} is supported as {known}. "
            "Name the task to read it as: regard.load(…, task='none') reads the body without a head"
        )
