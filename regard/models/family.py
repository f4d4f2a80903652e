"""What a family file provides (config mapping, weight-name templates, tasks), and a model's places in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.models.config import Config
from regard.nn.projections import Joined, JoinedTable

if TYPE_CHECKING:
    from regard.models.model import Model

Shape = tuple[int, ...]
Numbers = tuple[str, ...]


@dataclass(frozen=True)
class Unchanged:
    """One tensor, stored as we hold it."""

    name: str
    optional: ClassVar[bool] = False

    def names(self, numbers: Numbers, leaf: str) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make one of ours."""
        return (_filled(self.name, numbers, leaf),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from the checkpoint's."""
        return parts[0]

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """The checkpoint's tensors from ours. rows: how many each has of a joined matrix."""
        return [ours]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of the checkpoint's tensors from the shape of ours."""
        if type(self) is Unchanged:  # most tensors: one on the meta device for each would be a tenth of loading
            return [ours]
        return [tuple(part.shape) for part in self.split(torch.empty(ours, device="meta"), rows)]


@dataclass(frozen=True)
class Transpose(Unchanged):
    """One matrix, stored (inputs, outputs) as in GPT-2. A bias is unchanged."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from the checkpoint's."""
        return parts[0].mT.contiguous() if parts[0].ndim == 2 else parts[0]

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """The checkpoint's tensors from ours."""
        return [self.join([ours])]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of the checkpoint's tensors from the shape of ours."""
        return [ours[::-1] if len(ours) == 2 else ours]


@dataclass(frozen=True)
class Squeeze(Unchanged):
    """One tensor, stored with leading axes of length 1: a class token as (1, 1, d), positions as (1, N, d)."""

    axes: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from the checkpoint's."""
        return parts[0].reshape(parts[0].shape[self.axes :])

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """The checkpoint's tensors from ours."""
        return [ours.reshape((1,) * self.axes + ours.shape)]


@dataclass(frozen=True)
class OptionalSqueeze(Squeeze):
    """`Squeeze`, zero if the checkpoint does not have it (BART's final_logits_bias)."""

    optional: ClassVar[bool] = True


@dataclass(frozen=True, init=False)
class Concat(Unchanged):
    """Several tensors, concatenated along the rows: query, key and value in one matrix (`Joined`)."""

    parts: tuple[str, ...]

    def __init__(self, *parts: str) -> None:
        object.__setattr__(self, "name", parts[0])
        object.__setattr__(self, "parts", parts)

    def names(self, numbers: Numbers, leaf: str) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make one of ours."""
        return tuple(_filled(part, numbers, leaf) for part in self.parts)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from the checkpoint's."""
        return torch.cat(list(parts))

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """The checkpoint's tensors from ours."""
        assert rows is not None, self.parts
        return [part.contiguous() for part in torch.split(ours, list(rows))]


Names = Mapping[str, str | Unchanged]
"""Templates: our name → the checkpoint's. A string stands for `Unchanged`; {i} and {j} are numbers of layers."""


def nested(names: Names, ours: str, theirs: str) -> dict[str, str | Unchanged]:
    """The templates of a part of a model: a prefix for our names and one for the checkpoint's.

    >>> names = {"blocks.{i}.norm": "layers.{i}.norm", "embed": Squeeze("cls", 2)}
    >>> nested(names, "vision.", "vision_model.")["vision.embed"]
    Squeeze(name='vision_model.cls', axes=2)
    """
    nested_names: dict[str, str | Unchanged] = {}
    for name, source in names.items():
        if isinstance(source, str):
            nested_names[ours + name] = theirs + source
        elif isinstance(source, Concat):
            nested_names[ours + name] = Concat(*(theirs + part for part in source.parts))
        else:
            nested_names[ours + name] = replace(source, name=theirs + source.name)
    return nested_names


def lookup(names: Names, parameter: str) -> tuple[Unchanged, Numbers, str]:
    """The source of one of our parameters, the numbers of its layers, and the leaf (".weight") to add to its names.

    Raises KeyError for a parameter that no template names: a family's file is incomplete.
    """
    numbers = tuple(part for part in parameter.split(".") if part.isdecimal())
    for count in range(len(numbers) + 1):
        name = parameter
        for letter, number in zip("ij", numbers[:count], strict=False):
            name = name.replace(f".{number}.", f".{{{letter}}}.", 1)
        module, _, leaf = name.rpartition(".")
        for key, ending in ((name, ""), (module, "." + leaf)):
            if key in names:
                source = names[key]
                return Unchanged(source) if isinstance(source, str) else source, numbers, ending
    raise KeyError(f"no template names {parameter}")


def _filled(name: str, numbers: Numbers, leaf: str) -> str:
    for letter, number in zip("ij", numbers, strict=False):
        name = name.replace(f"{{{letter}}}", number)
    return name + leaf


Heads = Mapping[str, Callable[[], nn.Module]]
"""By task: what builds its head. A task that is not there has none."""

# The tasks are named as transformers' pipelines are; where it has none, in plain words.
GENERATION_TASKS = ("text-generation", "text2text-generation", "image-text-to-text")
"""The tasks of models that `generate`."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One head of a family.

    Args:
        architecture: the class of `transformers` with this head, which config.json names.
        names: templates of the head's weights, from the root of the checkpoint.
        prefix: of the body's names beside this head; None for the family's prefix.
        unused: regular expressions of tensors that this task leaves out, such as the decoder of an encoder alone.
        copies: a tensor that a checkpoint may hold beside the shared one, or in its place → the shared one.
    """

    architecture: str
    names: Names = field(default_factory=dict)
    prefix: str | None = None
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models: how to build it from config.json, and where its weights are in a checkpoint.

    Args:
        title: for people.
        model_type: as in config.json.
        prefix: of the body's names in a checkpoint with a head; "" for none.
        build: config and task → the model, with uninitialised weights.
        names: templates of the body's weights, without the prefix; or config → templates.
        tasks: by name; the first has no head.
        ignored: regular expressions of tensors that hold nothing learnt, or the same numbers as a shared one.
        copies: as in `Task`, of the body.
        renamed: endings of names in old checkpoints → the names of now.
        moved: regular expressions of prefixes that other versions of `transformers` write → the prefix of now.
        harmless: keys of config.json that change nothing here.
        adjust: config and the names of the checkpoint's tensors → config, where those know better (T5's lm_head).
    """

    title: str
    model_type: str
    prefix: str
    build: Callable[[Config, str], Model]
    names: Names | Callable[[Config], Names]
    tasks: Mapping[str, Task]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    adjust: Callable[[Config, Collection[str]], Config] | None = None

    def names_of(self, config: Config) -> Names:
        """The templates of the body's weights."""
        return self.names(config) if callable(self.names) else self.names

    @property
    def bare_task(self) -> str:
        """The task without a head: the first one."""
        return next(iter(self.tasks))

    def prefix_of(self, task: str) -> str:
        """The prefix of the body's names in a checkpoint for this task, with its dot."""
        prefix = self.tasks[task].prefix
        prefix = self.prefix if prefix is None else prefix
        return prefix + "." if prefix and task != self.bare_task else ""

    def task_of(self, architectures: object) -> str:
        """The task whose architecture config.json names; the one without a head if it names none.

        Raises ValueError for an architecture that the family does not have.
        """
        if not isinstance(architectures, list) or not architectures:
            return self.bare_task
        for name, task in self.tasks.items():
            if task.architecture == architectures[0]:
                return name
        known = ", ".join(task.architecture for task in self.tasks.values())
        raise ValueError(
            f"the checkpoint is a {architectures[0]}, and {self.title} is supported as {known}. "
            f"Name the task to read it as: regard.load(…, task={self.bare_task!r}) reads the body without a head"
        )


FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.rand, torch.randn}


def empty(family: Family, config: Config, task: str) -> Model:
    """A model on the meta device: shapes without memory. Raises ValueError for sizes that do not fit each other."""
    try:
        with _MetaShapes():
            model = family.build(config, task)
    except ValueError as error:  # of a layer, which knows neither the file nor its keys
        raise ValueError(config.explain(error)) from None
    except RuntimeError as error:  # torch counts bytes in 64 bits
        raise ValueError(f"{config.where} asks for sizes that no tensor can have: {error}") from None
    model.family, model.task = family, task
    return model


class _MetaShapes(TorchFunctionMode):
    """Factories make tensors on the meta device, and in-place calls do nothing.

    `torch.device("meta")` would draw initial values, which imports torch's decompositions: seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            return func(*args, **{**kwargs, "device": kwargs.get("device") or "meta"})
        in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
        if not in_place:
            return func(*args, **kwargs)
        return args[0] if args else kwargs["tensor"]


class WeightPlace(NamedTuple):
    """One parameter of a model, and where it is in a checkpoint."""

    name: str
    source: Unchanged  # how it is made of the checkpoint's tensors
    theirs: tuple[str, ...]  # their names
    owner: nn.Module  # the module of the parameter
    shape: Shape

    @property
    def rows(self) -> tuple[int, ...] | None:
        """How many rows each tensor has, if there are several."""
        return self.owner.rows if isinstance(self.owner, (Joined, JoinedTable)) else None

    def put(self, tensor: Tensor) -> None:
        """Make a tensor the parameter."""
        leaf = self.name.rpartition(".")[2]
        wants_gradient = getattr(self.owner, leaf).requires_grad
        setattr(self.owner, leaf, nn.Parameter(tensor, requires_grad=wants_gradient))


def places(model: Model, prefix: str) -> Iterator[WeightPlace]:
    """Each parameter of a model, and where it is in a checkpoint with this prefix of the body's names."""
    body, head = model.family.names_of(model.config), model.family.tasks[model.task].names
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        inside = name.startswith("head.")
        source, numbers, leaf = lookup(head if inside else body, name)
        theirs = source.names(numbers, leaf)
        theirs = theirs if inside else tuple(prefix + part for part in theirs)
        place = WeightPlace(name, source, theirs, owners[name.rpartition(".")[0]], tuple(parameter.shape))
        # A joined matrix may have fewer parts than its template has names: no words were added (Idefics).
        yield place if place.rows is None else place._replace(theirs=theirs[: len(place.rows)])
