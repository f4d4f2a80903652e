"""The weights of a model: their shapes, before memory is taken, and their places in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.models.config import Config
from regard.models.family import Family, Source, lookup
from regard.nn.linear import Joined, JoinedTable

if TYPE_CHECKING:
    from regard.models.model import Model

__all__ = ["WeightPlace", "empty", "places"]

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
    """One parameter of a model, and where it is in a checkpoint.

    Args:
        name: our name of the parameter.
        source: how it is made of the checkpoint's tensors.
        theirs: their names.
        owner: the module of the parameter.
        shape: of the parameter.
    """

    name: str
    source: Source
    theirs: tuple[str, ...]
    owner: nn.Module
    shape: tuple[int, ...]

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
    body, head = model.family.names(model.config), model.family.tasks[model.task].names
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        inside = name.startswith("head.")
        source, numbers, leaf = lookup(head if inside else body, name)
        theirs = source.names(numbers, leaf)
        theirs = theirs if inside else tuple(prefix + part for part in theirs)
        place = WeightPlace(name, source, theirs, owners[name.rpartition(".")[0]], tuple(parameter.shape))
        # A joined matrix may have fewer parts than its template has names: no words were added (Idefics).
        yield place if place.rows is None else place._replace(theirs=theirs[: len(place.rows)])
