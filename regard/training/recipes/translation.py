"""Translation, or any text to text: the decoder writes the target of each source (the 2017 Transformer, Marian, T5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from regard.data.rows import read_rows
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.training.metrics import bleu, check_bleu
from regard.training.recipes.recipe import Batch, Recipe, loss_options, pad_rows, padding_mask, tokenizer_of

__all__ = ["Translation"]


@dataclass(frozen=True, kw_only=True)
class Translation(Recipe):
    """Rows have the columns source and target.

    Args:
        length: longer sources and targets are left out in training and cut in evaluation.
        end_token_id: after each target, and after each source if its tokenizer adds none.
        pad_token_id: fills up short rows.
        smoothing: label smoothing, 0.1 in the 2017 paper.
    """

    length: int
    end_token_id: int
    pad_token_id: int
    smoothing: float = 0.1
    name: ClassVar[str] = "translate"
    task: ClassVar[str] = "text2text-generation"

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1 or self.length < 2:
            raise ValueError(f"smoothing must be in [0, 1) and length 2 or more; got {self.smoothing}, {self.length}")

    @classmethod
    def for_model(cls, model: Model, *, length: int = 128, smoothing: float = 0.1) -> Translation:
        """With the end and padding tokens of the model's tokenizer. Raises ValueError if it has none."""
        ids = tokenizer_of(model).ids_of
        if ids.eos is None or ids.pad is None:
            raise ValueError("translation needs a tokenizer with end and padding tokens")
        return cls(length=length, end_token_id=ids.eos, pad_token_id=ids.pad, smoothing=smoothing)

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[tuple[list[int], list[int]]]:
        """(source ids, target ids) of each row, both ended."""
        if not training:
            check_bleu()  # before hours of training, not after
        tokenizer, rows = tokenizer_of(model), []
        for row in read_rows(data, ("source", "target")):
            pair = [tokenizer.encode(row[side], special=False).ids for side in ("source", "target")]
            if training and (not all(pair) or max(map(len, pair)) >= self.length):
                continue
            source, target = ([*ids[: self.length - 1], self.end_token_id] for ids in pair)
            rows.append((source, target))
        if not rows:
            raise ValueError(f"no row has a source and a target of 1 to {self.length - 1} tokens")
        return rows

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask if rows are padded, and labels, which the model shifts right for its decoder."""
        return {
            "input_ids": pad_rows([row[0] for row in rows], self.pad_token_id),
            **padding_mask([row[0] for row in rows]),
            "labels": pad_rows([row[1] for row in rows], IGNORED),
        }

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over the targets' tokens, smoothed in training only: a held-out loss stays a perplexity."""
        total = model(**batch, num_items_in_batch=1, **loss_options(model, smoothing=self.smoothing)).loss
        return total, (batch["labels"] != IGNORED).sum()

    def metrics(self, model: Model, rows: Sequence[Any], loss: float) -> dict[str, Any]:
        """BLEU of beam search with 5 beams, with sacrebleu's signature. Raises ImportError without sacrebleu."""
        written: list[str] = []
        texts = [[model.tokenizer.decode(ids) for ids in row] for row in rows]
        for first in range(0, len(rows), 64):
            sources = [source for source, _ in texts[first : first + 64]]
            results = model.generate(sources, max_new_tokens=self.length, num_beams=5)
            written += [result.text.strip() for result in results]
        score, signature = bleu(written, [target.strip() for _, target in texts])
        return {"BLEU": round(score, 2), "signature": signature}
