"""The arguments of `watch`, and the store of calls that `keep="qk"` fills."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.assembly import StepLink
from regard.lens.measures.measures import NAMES, MeasureOptions, read_measures
from regard.lens.measures.weights import ComputedWeights
from regard.lens.view import KeyTokens
from regard.masks import DenseMask
from regard.masks.biases import DenseBias

KEEP = ("qk", "output")
DELIMITERS = {"[SEP]", "</s>", "<|endoftext|>", "<|im_end|>", "<eos>"} | set(".,;:!?。、，？！：；")
MARKS_OF_SPACE = "Ġ▁ "
"""What tokenizers put before a word to say that a space was there."""


@dataclass(frozen=True)
class LayerFilter:
    """Selects modules by path patterns and by numbers in the order of first calls; None selects all."""

    selectors: tuple[str | int, ...] | None = None

    def selects(self, path: str, number: int = -1) -> bool:
        """Whether a module is selected; `number`: it was the number-th to be called, -1 if it never was."""
        return self.selectors is None or any(_matches(selector, path, number) for selector in self.selectors)

    def unmatched(self, paths: Sequence[str]) -> list[str | int]:
        """Selectors that match none of these modules, in the order of first calls."""
        return [
            selector
            for selector in self.selectors or ()
            if not any(_matches(selector, path, number) for number, path in enumerate(paths))
        ]


def _matches(selector: str | int, path: str, number: int) -> bool:
    return selector == number if isinstance(selector, int) else fnmatchcase(path, selector)


@dataclass(frozen=True)
class WatchOptions:
    """The arguments of `watch`, checked.

    Args:
        layers: which modules.
        measures: what one pass measures.
        patterns: score head patterns too.
        keep: among KEEP.
        device: where results go; None for where they are computed.
        words: the tokens as text, a row per batch row or one for all; None for none.
        tokens: the same as numbers, for patterns by token.
    """

    layers: LayerFilter
    measures: MeasureOptions
    patterns: bool
    keep: frozenset[str]
    device: torch.device | None
    words: list[list[str]] | None
    tokens: KeyTokens

    def tokens_for(self, sizes: Sequence[int]) -> KeyTokens:
        """The tokens if there are as many as a call (B, H, Nq, Nk) has keys, else none."""
        batch, _, _, nk = sizes
        ids = self.tokens.ids
        return self.tokens if ids is not None and ids.shape[0] in (1, batch) and ids.shape[1] == nk else KeyTokens()


def read_watch_options(
    *, layers: object, measures: object, keep: object, size: int, top: int, tokens: object, device: object
) -> WatchOptions:
    """Check the arguments of `watch`.

    >>> options = read_watch_options(
    ...     layers="*.3", measures=None, keep="qk", size=8, top=2, tokens=["a", "."], device=None
    ... )
    >>> options.layers.selects("h.3"), options.measures.size, sorted(options.keep), options.tokens.delimiters.tolist()
    (True, 8, ['qk'], [[False, True]])

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not supported.
    """
    # 1. Measures, with "patterns" among their names.
    names: list[Any] | None = None
    if measures is not None:
        known = (*NAMES, "patterns")
        if not isinstance(measures, Iterable):
            raise TypeError(f"measures must be names such as {', '.join(known)}; got {type(measures).__name__}")
        names = [measures] if isinstance(measures, str) else list(measures)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"no measure {unknown[0]!r}; there are {', '.join(known)}")
    patterns = names is None or "patterns" in names
    measured = read_measures(None if names is None else [name for name in names if name != "patterns"], size, top)
    if names is not None and patterns:
        measured = replace(measured, names=measured.names | {"entropy", "received"})  # patterns are read from these
    # 2. Tokens, as words and as numbers that are equal for equal words.
    words = _read_words(tokens)
    numbered = KeyTokens()
    if words is not None and len({len(row) for row in words}) == 1:
        number = {word: n for n, word in enumerate(dict.fromkeys(w for row in words for w in row))}
        ids = torch.tensor([[number[w] for w in row] for row in words])
        marks = torch.tensor([[w.lstrip(MARKS_OF_SPACE) in DELIMITERS for w in row] for row in words])
        numbered = KeyTokens(ids, marks if bool(marks.any()) else None)
    # 3. What to keep.
    kept = () if keep is None else (keep,) if isinstance(keep, str) else keep
    if not isinstance(kept, Iterable):
        raise TypeError(f"keep must be 'qk', 'output' or both in a list, got {type(keep).__name__}")
    kept = list(kept)
    unknown = [name for name in kept if name not in KEEP]
    if unknown:
        raise ValueError(f"keep must be 'qk', 'output' or both in a list, got {unknown[0]!r}")
    return WatchOptions(
        _read_layers(layers), measured, patterns, frozenset(kept), _read_device(device), words, numbered
    )


def _read_layers(layers: object) -> LayerFilter:
    if layers is None:
        return LayerFilter()
    listed = (layers,) if isinstance(layers, (str, int)) else layers
    if not isinstance(listed, Iterable):
        raise TypeError(f"layers must be path patterns or numbers, got {type(layers).__name__}")
    selectors = tuple(listed)
    for selector in selectors:
        number = isinstance(selector, int) and not isinstance(selector, bool) and selector >= 0
        if not number and not isinstance(selector, str):
            raise TypeError(f"layers must be path patterns such as '*.3.*' or numbers from 0, got {selector!r}")
    if not selectors:
        raise ValueError("layers is empty: nothing would be seen; leave it out to see every layer")
    return LayerFilter(selectors)


def _read_device(device: object) -> torch.device | None:
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a name such as 'cpu' or a torch.device, got {type(device).__name__}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as problem:  # whichever torch raises for a missing one
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(problem).splitlines()[0]}") from None


def _read_words(tokens: object) -> list[list[str]] | None:
    if tokens is None:
        return None
    if isinstance(tokens, (Tensor, np.ndarray)):
        tokens = tokens.tolist()
    wrong = "tokens must be words or token numbers: a list of them, or a list per batch row"
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or len(tokens) == 0:
        raise TypeError(f"{wrong}; got {tokens!r}")
    rows = [tokens] if isinstance(tokens[0], (str, int)) else tokens
    rows = [row.tolist() if isinstance(row, Tensor) else row for row in rows]
    for row in rows:
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise TypeError(f"{wrong}; got a list that holds {row!r}")
        other = [t for t in row if not isinstance(t, (str, int))]
        if other:
            raise TypeError(f"{wrong}; got a list that holds {other[0]!r}")
    return [[str(t) for t in row] for row in rows]


MASKS = 4
"""How many masks are remembered, so that layers that share one share its copy."""


@dataclass(eq=False)
class _RunKeys:
    """The keys of a run so far, (B, Hkv, Nk, D)."""

    tensor: Tensor


class StepWeights(ComputedWeights):
    """The weights of one step, from keys that it shares with the steps after it."""

    def __init__(self, call: Call, lse: Tensor, keys: _RunKeys) -> None:
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
    """Copies of the calls' q and k, added in call order; steps of one run share their keys.

    Args:
        device: where they are kept; None for where they are.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._runs: dict[tuple[int, str], _RunKeys] = {}
        self._masks: deque[tuple[int, Tensor]] = deque(maxlen=MASKS)  # address, and the copy

    def keep(self, path: str, call: Call, lse: Tensor, link: StepLink, rest_hidden: bool) -> ComputedWeights:
        """Copy a call; returns its weights.

        Args:
            path: the module that made it.
            call: the call.
            lse: (B, H, Nq).
            link: which earlier call of the module it continues.
            rest_hidden: no query sees a key beyond those written so far, so that these may be written later on.
        """
        k = self._copied(call.k)
        kept = replace(
            call,
            q=self._copied(call.q),
            k=k,
            v=k.new_zeros(1).expand(*k.shape[:3], 1),  # exact weights do not read the values
            mask=DenseMask(self._cells(call.mask.cells)) if isinstance(call.mask, DenseMask) else call.mask,
            bias=DenseBias(self._cells(call.bias.cells)) if isinstance(call.bias, DenseBias) else call.bias,
            sinks=None if call.sinks is None else self._copied(call.sinks),
        )
        run = (threading.get_ident(), path)
        keys = self._runs.get(run)
        continues = (
            keys is not None
            and link.after is not None
            and not link.first
            and keys.tensor.shape[2] <= k.shape[2]
            and torch.equal(keys.tensor[:, :, : link.known], k[:, :, : link.known])
        )
        if keys is None or not continues:
            keys = self._runs[run] = _RunKeys(k)
        keys.tensor = k
        if not rest_hidden:
            del self._runs[run]  # what this call saw must stay as it is
        return StepWeights(kept, lse if self.device is None else lse.to(self.device), keys)

    def _copied(self, x: Tensor) -> Tensor:
        # Always a copy: inside torch's dispatcher, where calls are caught, tensors do not say how often they were
        # written to, so nobody can tell whether the model still writes to this one.
        copied = x.detach().clone() if self.device in (None, x.device) else x.to(self.device)
        return copied.contiguous() if copied.untyped_storage().nbytes() > copied.nbytes else copied

    def _cells(self, cells: Tensor) -> Tensor:
        """A copy of a mask or bias, which many layers may share."""
        for address, copy in tuple(self._masks):
            if address == cells.data_ptr() and copy.dtype == cells.dtype and torch.equal(copy, cells.to(copy.device)):
                return copy
        copy = self._copied(cells)
        self._masks.append((cells.data_ptr(), copy))
        return copy
