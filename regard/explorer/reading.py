"""How a model reads for the explorer, once to look and once more for the values: in eval mode, whatever mode it is in.

It does not know who looks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.model import Model
from regard.models.verbs.evaluating import evaluating
from regard.op import observe, unobserve

__all__ = ["Values", "reader", "without_dropout"]


def without_dropout(model: Model, read: Callable[[], object]) -> Callable[[], None]:
    """What lets a model read as its verbs do, in eval mode and without gradients; it is then in its mode again."""

    def again() -> None:
        with torch.no_grad(), evaluating(model):
            read()

    return again


def reader(model: Model, ids: Tensor) -> Callable[[], None]:
    """What lets a model read ids (1, N); of an encoder–decoder, the decoder looks at them from its first token."""

    def read() -> None:
        here = ids.to(model.device)  # where the model is now: it may have moved since
        if isinstance(model, EncoderDecoder):
            model(here, target=torch.full((1, 1), model.start, device=model.device))
        else:
            model(here)

    return without_dropout(model, read)


class Values:
    """The values of the attention calls of a model that read something; those asked for last are kept.

    again: lets the model read it once more, which happens for a call that was not asked for just before. While the
    model is watched, nobody may ask: `watch` would see these calls too.
    """

    def __init__(self, again: Callable[[], object]) -> None:
        self.again = again
        self._lock = threading.Lock()
        self._kept: tuple[int, int, Tensor] | None = None  # number of the call, of calls, values

    def of(self, number: int, calls: int) -> Tensor | None:
        """The values (B, Hkv, Nk, Dv) of a call by its number; None where there are not so many calls."""
        with self._lock:
            if self._kept is None or self._kept[:2] != (number, calls):
                self._kept = None
                found, count = self._run(number)
                if found is None or count != calls:
                    return None
                self._kept = number, calls, found
            return self._kept[2]

    def _run(self, number: int) -> tuple[Tensor | None, int]:
        thread, count, found = threading.get_ident(), 0, None

        def note(call: Call, backend: str, output: Any) -> None:
            nonlocal count, found
            if threading.get_ident() != thread:  # observers are told of every thread's calls
                return
            if count == number:
                found = call.v.detach().clone()
            count += 1

        observe(note)
        try:
            self.again()
        finally:
            unobserve(note)
        return found, count
