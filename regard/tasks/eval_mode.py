"""Verbs answer in eval mode, whatever mode the model is in: dropout would make an answer a matter of chance.

    >>> import torch
    >>> layer = nn.Dropout(0.5)                        # in training, as every new module
    >>> with evaluating(layer):
    ...     layer(torch.ones(3))
    tensor([1., 1., 1.])
    >>> layer.training
    True

It does not know any verb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from torch import nn

__all__ = ["evaluating", "in_eval_mode", "one_by_one"]

T = TypeVar("T")
Verb = TypeVar("Verb", bound=Callable[..., Any])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and afterwards each as it was: a new head is in training beside a body that is not."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_eval_mode(verb: Verb) -> Verb:
    """A verb that runs with its model in eval mode.

    >>> import torch
    >>> class Doubtful(nn.Dropout):
    ...     @in_eval_mode
    ...     def answer(self, size):
    ...         return self(torch.ones(size))
    >>> Doubtful(0.5).answer(2)
    tensor([1., 1.])
    """

    @wraps(verb)
    def asked(model: nn.Module, *given: Any, **named: Any) -> Any:
        with evaluating(model):
            return verb(model, *given, **named)

    return cast(Verb, asked)


def one_by_one(model: nn.Module, made: Iterator[T]) -> Iterator[T]:
    """What an iterator makes with the model in eval mode, which is as it was while the reader has each.

    >>> import torch
    >>> layer = nn.Dropout(0.5)
    >>> [(number.tolist(), layer.training) for number in one_by_one(layer, map(layer, torch.ones(2, 1)))]
    [([1.0], True), ([1.0], True)]
    """
    while True:
        with evaluating(model):
            try:
                made_now = next(made)
            except StopIteration:
                return
        yield made_now
