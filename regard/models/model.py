"""What every model has: where it came from, its checks of input, its result, its way back to a directory.

It does not know whether a model has one tower or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.models.settings import Settings

if TYPE_CHECKING:
    from regard.models.family import Family
    from regard.models.tokenizing import Tokenizer

__all__ = ["Model", "Result"]


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a model makes of ids. What the model does not have is None.

    hidden: (B, N, d), the last vectors; of the decoder in an encoder–decoder.
    logits: by task: (B, N, V) words, (B, N, labels) tags, (B, N, 2) where an answer starts and ends, (B, labels).
    pooled: (B, d), the family's own summary of a text.
    next_sentence: (B, 2), whether the second text follows the first (0) or not (1), beside the words.
    layers: what stood after the embedding and after each block, if every_layer was asked for.
    memory, memory_layers: of the encoder in an encoder–decoder.
    """

    hidden: Tensor
    logits: Tensor | None = None
    pooled: Tensor | None = None
    next_sentence: Tensor | None = None
    layers: tuple[Tensor, ...] | None = None
    memory: Tensor | None = None
    memory_layers: tuple[Tensor, ...] | None = None

    def __repr__(self) -> str:
        shapes = {name: tuple(t.shape) for name, t in vars(self).items() if isinstance(t, Tensor)}
        layers = {name: f"{len(ts)} layers" for name, ts in vars(self).items() if isinstance(ts, tuple)}
        return f"Result({', '.join(f'{name} {said}' for name, said in (shapes | layers).items())})"


class Model(nn.Module):
    """A model of some family with one task.

    settings: of config.json.  task: a key of the family's tasks.
    """

    family: Family
    task: str
    directory: Path | None = None

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return next(self.parameters()).dtype

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, opened on first use. Raises as `Tokenizer.open` does."""
        from regard.models.tokenizing import Tokenizer

        if self.directory is None:
            raise ValueError("this model was not loaded from a directory, so it has no tokenizer: set model.tokenizer")
        return Tokenizer.open(self.directory)

    def save(self, directory: str | Path) -> None:
        """Write a directory that `regard.load` and `transformers` open: config.json, weights, tokenizer.

        Raises as `regard.models.loading.save`.
        """
        from regard.models.loading import save

        save(self, directory)

    def extra_repr(self) -> str:
        """What `print(model)` says before its parts."""
        return f"{self.family.title}, task={self.task!r}"

    def check(
        self, ids: Tensor, mask: Tensor | None, vocabulary: int, most: int | None, before: int = 0
    ) -> Tensor | None:
        """Check ids and mask before anything runs; the mask, or None where it hides nothing.

        Raises TypeError or ValueError naming what came, what was expected and what to do.
        """
        if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype in (torch.bool, torch.complex64):
            got = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(
                f"ids must be a torch tensor of integers (B, N), got {got}; model.tokenizer.batch([…]).ids makes them"
            )
        if ids.ndim != 2 or 0 in ids.shape:
            raise ValueError(f"ids must be (B, N) with at least one text and one token, got {tuple(ids.shape)}")
        n = before + ids.shape[1]
        if most is not None and n > most:
            raise ValueError(
                f"the text has {n} tokens, and the model has {most} positions: shorten it, or ask the tokenizer to "
                f"(tokenizer.batch(…, length={most}, truncate=True))"
            )
        if mask is not None and (
            not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (len(ids), n)
        ):
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"mask must be booleans ({len(ids)}, {n}), True = token, got {got}")
        if torch.compiler.is_compiling():
            return mask
        low, high = torch.aminmax(ids)
        facts = torch.stack([low, high, mask.all().to(ids.dtype) if mask is not None else low])
        first, last, whole = facts.tolist()  # one wait for the device
        if not 0 <= first <= last < vocabulary:
            wrong = first if first < 0 else last
            raise ValueError(
                f"token id {wrong} is outside the vocabulary of {vocabulary}: ids are 0 to {vocabulary - 1}"
            )
        return None if mask is not None and whole else mask
