"""What `keep="qk"` keeps of a call: q, k and its mask, which the model cannot write over, and once for many steps.

A model goes on with its own tensors: a cache is written over, a buffer is used again. So they are copied. Keys of a
generation are kept once, those of the latest step: every step before sees the beginning of them.

It does not know what is measured, nor how calls are caught.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.biases import DenseBias
from regard.lens.measuring.weights import Remembered
from regard.lens.runs import Link
from regard.masks import DenseMask

__all__ = ["Keeper", "Stepped"]

MASKS = 4
"""How many masks are remembered, so that layers that share one share its copy."""


@dataclass(eq=False)
class _Keys:
    """The keys of a run so far, (B, Hkv, Nk, D)."""

    tensor: Tensor


class Stepped(Remembered):
    """The weights of one step, from keys that it shares with the steps after it."""

    def __init__(self, call: Call, lse: Tensor, keys: _Keys) -> None:
        self._keys = keys
        super().__init__(call, lse)

    @property
    def call(self) -> Call:
        """The call with its own keys: the first of those that are kept."""
        return replace(self._call, k=self._keys.tensor[:, :, : self._call.sizes[3]])

    @call.setter
    def call(self, call: Call) -> None:
        self._call = replace(call, k=call.k[:, :, :0])


class Keeper:
    """Keeps calls, told of them in order.

    device: where they are kept; None for where they are.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._runs: dict[tuple[int, str], _Keys] = {}
        self._masks: deque[tuple[int, Tensor]] = deque(maxlen=MASKS)  # where it lay, and the copy

    def keep(self, path: str, call: Call, lse: Tensor, link: Link, rest_hidden: bool) -> Remembered:
        """The weights of a call, kept.

        path, link: which module made it, and which earlier call it carries on.
        rest_hidden: no query of it sees a key beyond those written so far, so that these may be written later on.
        """
        k = self._own(call.k)
        kept = replace(
            call,
            q=self._own(call.q),
            k=k,
            v=k.new_zeros(1).expand(*k.shape[:3], 1),  # exact weights do not read the values
            mask=DenseMask(self._cells(call.mask.cells)) if isinstance(call.mask, DenseMask) else call.mask,
            bias=DenseBias(self._cells(call.bias.cells)) if isinstance(call.bias, DenseBias) else call.bias,
            sinks=None if call.sinks is None else self._own(call.sinks),
        )
        run = (threading.get_ident(), path)
        keys = self._runs.get(run)
        if keys is None or not _goes_on(keys.tensor, k, link):
            keys = self._runs[run] = _Keys(k)
        keys.tensor = k
        if not rest_hidden:
            del self._runs[run]  # what this call saw must stay as it is
        return Stepped(kept, lse if self.device is None else lse.to(self.device), keys)

    def _own(self, x: Tensor) -> Tensor:
        """A tensor on its device that nobody else writes to.

        Whether somebody might is not to be known: inside torch's dispatcher, where calls are caught, tensors do not say
        how often they were written to.
        """
        copied = x.detach().clone() if self.device in (None, x.device) else x.to(self.device)
        return copied.contiguous() if copied.untyped_storage().nbytes() > copied.nbytes else copied

    def _cells(self, cells: Tensor) -> Tensor:
        """The same for a mask or bias, which many layers may share."""
        for where, copy in tuple(self._masks):
            if where == cells.data_ptr() and copy.dtype == cells.dtype and torch.equal(copy, cells.to(copy.device)):
                return copy
        copy = self._own(cells)
        self._masks.append((cells.data_ptr(), copy))
        return copy


def _goes_on(before: Tensor, k: Tensor, link: Link) -> bool:
    """Are the keys of a run still the first of these?"""
    if link.after is None or link.first or before.shape[2] > k.shape[2]:
        return False
    return torch.equal(before[:, :, : link.known], k[:, :, : link.known])
