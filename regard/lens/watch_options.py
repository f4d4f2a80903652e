"""The arguments of `watch`, and what `keep=` keeps of a call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.assembly import StepLink
from regard.lens.measures.measures import NAMES, MeasureOptions, read_measures
from regard.lens.measures.weights import ComputedWeights
from regard.lens.view import Tokens
from regard.masks import DenseMask
from regard.masks.biases import DenseBias

KEEP = ("qk", "output")
DELIMITERS = {"[SEP]", "</s>", "<|endoftext|>", "<|im_end|>", "<eos>"} | set(".,;:!?。、，？！：；")
MARKS_OF_SPACE = "Ġ▁ "
"""What tokenizers put before a word to say that a space was there."""


@dataclass(frozen=True)
class LayerFilter:
    """Which modules are asked for: patterns of paths and numbers in the order of first calls; None for all."""

    asked: tuple[str | int, ...] | None = None

    def have(self, path: str, number: int) -> bool:
        """Is a module asked for, the number-th to be seen?"""
        return self.asked is None or any(_fits(want, path, number) for want in self.asked)

    def may_have(self, path: str) -> bool:
        """Might a module that was never seen be asked for? It has no number."""
        return self.have(path, -1)

    def unmet(self, seen: Sequence[str]) -> list[str | int]:
        """What fits none of the modules that were seen."""
        return [w for w in self.asked or () if not any(_fits(w, path, n) for n, path in enumerate(seen))]


def _fits(want: str | int, path: str, number: int) -> bool:
    return want == number if isinstance(want, int) else fnmatchcase(path, want)


@dataclass(frozen=True)
class WatchOptions:
    """What to do with each call.

    words: the tokens as they were given, a row per batch row or one for all.  tokens: the same for the patterns.
    """

    layers: LayerFilter
    wanted: MeasureOptions
    patterns: bool
    keep: frozenset[str]
    device: torch.device | None
    words: list[list[str]] | None
    tokens: Tokens

    def tokens_for(self, sizes: Sequence[int]) -> Tokens:
        """The tokens that the keys of a call are, where there are as many."""
        batch, _, _, nk = sizes
        ids = self.tokens.ids
        return self.tokens if ids is not None and ids.shape[0] in (1, batch) and ids.shape[1] == nk else Tokens()


def read_watch_options(
    *, layers: object, measures: object, keep: object, size: int, top: int, tokens: object, device: object
) -> WatchOptions:
    """Read the arguments of `watch`. Raises TypeError or ValueError for one that is none of what is expected.

    >>> plan = read_watch_options(layers="*.3", measures=None, keep="qk", size=8, top=2, tokens=["a", "."], device=None)
    >>> plan.layers.have("h.3", 0), plan.wanted.size, sorted(plan.keep), plan.tokens.delimiters.tolist()
    (True, 8, ['qk'], [[False, True]])
    """
    wanted, patterns = _read_measures(measures, size, top)
    words = _read_tokens(tokens)
    return WatchOptions(
        _read_layers(layers), wanted, patterns, _read_keep(keep), _read_device(device), words, _numbered(words)
    )


def _read_measures(measures: object, size: int, top: int) -> tuple[MeasureOptions, bool]:
    """The measures of the one pass, and whether patterns are scored."""
    if measures is None:
        return read_measures(None, size, top), True
    known = (*NAMES, "patterns")
    if not isinstance(measures, Iterable):
        raise TypeError(f"measures must be names such as {', '.join(known)}; got {type(measures).__name__}")
    names = [measures] if isinstance(measures, str) else list(measures)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no measure {unknown[0]!r}; there are {', '.join(known)}")
    wanted = read_measures([name for name in names if name != "patterns"], size, top)
    if "patterns" not in names:
        return wanted, False
    return replace(wanted, names=wanted.names | {"entropy", "received"}), True  # patterns are read from these


def _read_layers(layers: object) -> LayerFilter:
    if layers is None:
        return LayerFilter()
    given = (layers,) if isinstance(layers, (str, int)) else layers
    if not isinstance(given, Iterable):
        raise TypeError(f"layers must be path patterns or numbers, got {type(layers).__name__}")
    found = tuple(given)
    for want in found:
        if isinstance(want, bool) or not isinstance(want, (str, int)) or (isinstance(want, int) and want < 0):
            raise TypeError(f"layers must be path patterns such as '*.3.*' or numbers from 0, got {want!r}")
    if not found:
        raise ValueError("layers is empty: nothing would be seen; leave it out to see every layer")
    return LayerFilter(found)


def _read_keep(keep: object) -> frozenset[str]:
    given = () if keep is None else (keep,) if isinstance(keep, str) else keep
    if not isinstance(given, Iterable):
        raise TypeError(f"keep must be 'qk', 'output' or both in a list, got {type(keep).__name__}")
    names = list(given)
    unknown = [name for name in names if name not in KEEP]
    if unknown:
        raise ValueError(f"keep must be 'qk', 'output' or both in a list, got {unknown[0]!r}")
    return frozenset(names)


def _read_device(device: object) -> torch.device | None:
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a name such as 'cpu' or a torch.device, got {type(device).__name__}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as problem:  # whichever torch raises for a missing one
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(problem).splitlines()[0]}") from None


def _read_tokens(tokens: object) -> list[list[str]] | None:
    if tokens is None:
        return None
    if isinstance(tokens, (Tensor, np.ndarray)):
        tokens = tokens.tolist()
    wrong = "tokens must be words or token numbers: a list of them, or a list per batch row"
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or len(tokens) == 0:
        raise TypeError(f"{wrong}; got {tokens!r}")
    rows = [tokens] if isinstance(tokens[0], (str, int)) else tokens
    for row in rows:
        if isinstance(row, Tensor):
            row = row.tolist()
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise TypeError(f"{wrong}; got a list that holds {row!r}")
        other = [t for t in row if not isinstance(t, (str, int))]
        if other:
            raise TypeError(f"{wrong}; got a list that holds {other[0]!r}")
    return [[str(t) for t in (row.tolist() if isinstance(row, Tensor) else row)] for row in rows]


def _numbered(words: list[list[str]] | None) -> Tokens:
    """Words as numbers, equal for equal words, and which of them are delimiters; nothing for rows of unlike lengths."""
    if words is None or len({len(row) for row in words}) > 1:
        return Tokens()
    number = {word: n for n, word in enumerate(dict.fromkeys(w for row in words for w in row))}
    ids = torch.tensor([[number[w] for w in row] for row in words])
    marks = torch.tensor([[w.lstrip(MARKS_OF_SPACE) in DELIMITERS for w in row] for row in words])
    return Tokens(ids, marks if bool(marks.any()) else None)


MASKS = 4
"""How many masks are remembered, so that layers that share one share its copy."""


@dataclass(eq=False)
class _Keys:
    """The keys of a run so far, (B, Hkv, Nk, D)."""

    tensor: Tensor


class StepWeights(ComputedWeights):
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


class CallStore:
    """Keeps calls, told of them in order.

    device: where they are kept; None for where they are.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._runs: dict[tuple[int, str], _Keys] = {}
        self._masks: deque[tuple[int, Tensor]] = deque(maxlen=MASKS)  # where it lay, and the copy

    def keep(self, path: str, call: Call, lse: Tensor, link: StepLink, rest_hidden: bool) -> ComputedWeights:
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
        return StepWeights(kept, lse if self.device is None else lse.to(self.device), keys)

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


def _goes_on(before: Tensor, k: Tensor, link: StepLink) -> bool:
    """Are the keys of a run still the first of these?"""
    if link.after is None or link.first or before.shape[2] > k.shape[2]:
        return False
    return torch.equal(before[:, :, : link.known], k[:, :, : link.known])
