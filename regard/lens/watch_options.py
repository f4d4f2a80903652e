"""The arguments of `watch`, checked: which layers, measures and tensors, and the words of the input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.lens.measures.measures import NAMES, MeasureOptions, read_measures
from regard.lens.view import KeyTokens

KEEP = ("qk", "v", "output")
KEPT = "keep must be 'qk', 'v' or 'output', or several of them in a list"
DELIMITERS = {"[SEP]", "</s>", "<|endoftext|>", "<|im_end|>", "<eos>"} | set(".,;:!?。、，？！：；")
MARKS_OF_SPACE = "Ġ▁ "  # what tokenizers put before a word to say that a space was there


@dataclass(frozen=True)
class LayerFilter:
    """Selects modules by path patterns and by numbers in the order of first calls; None selects all."""

    selectors: tuple[str | int, ...] | None = None

    def selects(self, path: str, number: int = -1) -> bool:
        """Whether a module is selected; `number`: it was the number-th to be called, -1 if it never was."""
        return self.selectors is None or any(
            selector == number if isinstance(selector, int) else fnmatchcase(path, selector)
            for selector in self.selectors
        )

    def unmatched(self, paths: Sequence[str]) -> list[str | int]:
        """Selectors that match none of these modules, in the order of first calls."""
        single = {selector: LayerFilter((selector,)) for selector in self.selectors or ()}
        return [s for s, one in single.items() if not any(one.selects(path, n) for n, path in enumerate(paths))]


@dataclass(frozen=True)
class WatchOptions:
    """The arguments of `watch`, checked."""

    layers: LayerFilter
    measures: MeasureOptions
    patterns: bool  # score head patterns too
    keep: frozenset[str]  # among KEEP
    device: torch.device | None  # where results go; None for where they are computed
    words: list[list[str]] | None  # the tokens as text, a row per batch row or one for all
    tokens: KeyTokens  # the same as numbers, for patterns by token
    layouts: object  # whether they fit is known when the model has run
    gradients: bool

    def tokens_for(self, sizes: Sequence[int]) -> KeyTokens:
        """The tokens if there are as many as a call (B, H, Nq, Nk) has keys, else none."""
        batch, _, _, nk = sizes
        ids = self.tokens.ids
        return self.tokens if ids is not None and ids.shape[0] in (1, batch) and ids.shape[1] == nk else KeyTokens()


def read_watched_measures(measures: object, size: int, top: int) -> tuple[MeasureOptions, bool]:
    """What to measure, and whether patterns are among the names."""
    if measures is None:
        return read_measures(None, size, top), True
    known = (*NAMES, "patterns")
    if not isinstance(measures, Iterable):
        raise TypeError(f"measures must be names such as {', '.join(known)}; got {type(measures).__name__}")
    names = [measures] if isinstance(measures, str) else list(measures)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no measure {unknown[0]!r}; there are {', '.join(known)}")
    own = [name for name in names if name != "patterns"]
    if "patterns" in names:
        own += ["entropy", "received"]  # patterns are read from these
    return read_measures(own, size, top), "patterns" in names


def read_tokens(tokens: object) -> tuple[list[list[str]] | None, KeyTokens]:
    """The tokens as words, and as numbers that are equal for equal words."""
    if tokens is None:
        return None, KeyTokens()
    # 1. Words.
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
    words = [[str(t) for t in row] for row in rows]
    # 2. Numbers.
    if len({len(row) for row in words}) > 1:
        return words, KeyTokens()
    number = {word: n for n, word in enumerate(dict.fromkeys(w for row in words for w in row))}
    ids = torch.tensor([[number[w] for w in row] for row in words])
    marks = torch.tensor([[w.lstrip(MARKS_OF_SPACE) in DELIMITERS for w in row] for row in words])
    return words, KeyTokens(ids, marks if bool(marks.any()) else None)


def read_keep(keep: object, gradients: object) -> frozenset[str]:
    """Which of `KEEP` to keep, and that it is enough for gradients."""
    kept: Any = () if keep is None else (keep,) if isinstance(keep, str) else keep
    if not isinstance(kept, Iterable):
        raise TypeError(f"{KEPT}; got {type(keep).__name__}")
    kept = list(kept)
    if unknown := [name for name in kept if name not in KEEP]:
        raise ValueError(f"{KEPT}; got {unknown[0]!r}")
    if not isinstance(gradients, bool):
        raise TypeError(f"gradients must be True or False, got {type(gradients).__name__}")
    if gradients and not {"qk", "v"} <= set(kept):
        raise ValueError(
            "gradients=True needs the weights and values too: watch(model, keep=['qk', 'v'], gradients=True)"
        )
    return frozenset(kept)


def read_device(device: object) -> torch.device | None:
    """A device that this machine has, with its index."""
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a name such as 'cpu' or a torch.device, got {type(device).__name__}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as problem:  # as torch raises for a missing one
        reason = str(problem).splitlines()[0]
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from None


def read_layers(layers: object) -> LayerFilter:
    """The modules selected by a path pattern, a number, or several of them."""
    if layers is None:
        return LayerFilter()
    selectors: Any = (layers,) if isinstance(layers, (str, int)) else layers
    if not isinstance(selectors, Iterable):
        raise TypeError(f"layers must be path patterns or numbers, got {type(layers).__name__}")
    selectors = tuple(selectors)
    for selector in selectors:
        if not isinstance(selector, str) and not (type(selector) is int and selector >= 0):
            raise TypeError(f"layers must be path patterns such as '*.3.*' or numbers from 0, got {selector!r}")
    if not selectors:
        raise ValueError("layers is empty: nothing would be seen; leave it out to see every layer")
    return LayerFilter(selectors)
