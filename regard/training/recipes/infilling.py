"""Text infilling and sentence permutation (BART): the decoder writes the whole text again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from regard.data.rows import read_documents
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.training.data import row_length, split_sentences
from regard.training.recipes.recipe import Batch, Recipe, pad_rows, padding_mask, tokenizer_of

__all__ = ["Infilling"]


@dataclass(frozen=True, kw_only=True)
class Infilling(Recipe):
    """30 % of the tokens go, in spans of Poisson(3) tokens, each replaced by one mask token; sentences are shuffled.

    A span of length 0 inserts a mask token (Lewis et al. 2020, section 2.2).

    Args:
        length: most tokens of a text, special tokens included.
        mask_token_id: stands for a span.
        start_token_id: before each text.
        end_token_id: after each text.
        pad_token_id: fills up short rows.
        density: share of the tokens that goes.
        mean_span: mean of the Poisson distribution.
        permute: shuffle the sentences of a text.
    """

    length: int
    mask_token_id: int
    start_token_id: int
    end_token_id: int
    pad_token_id: int = 1
    density: float = 0.3
    mean_span: float = 3.0
    permute: bool = True
    name: ClassVar[str] = "infilling"
    task: ClassVar[str] = "text2text-generation"

    def __post_init__(self) -> None:
        if not 0 < self.density < 1 or self.mean_span <= 0 or self.length < 4:
            raise ValueError(
                f"infilling needs a density in (0, 1), a mean span above 0 and a length of 4 or more; got density "
                f"{self.density}, mean_span {self.mean_span}, length {self.length}"
            )

    @classmethod
    def for_model(
        cls,
        model: Model,
        *,
        length: int | None = None,
        density: float = 0.3,
        mean_span: float = 3.0,
        permute: bool = True,
    ) -> Infilling:
        """With the special tokens of the model's tokenizer. Raises ValueError where mask, start or end is missing."""
        ids = tokenizer_of(model).ids_of
        start = ids.bos if ids.bos is not None else ids.cls
        end = ids.eos if ids.eos is not None else ids.sep
        if ids.mask is None or start is None or end is None:
            raise ValueError("infilling needs a tokenizer with mask, start and end tokens, as BART's")
        return cls(
            length=row_length(model, length, least=4, usual=512),
            mask_token_id=ids.mask,
            start_token_id=start,
            end_token_id=end,
            pad_token_id=ids.pad or 0,
            density=density,
            mean_span=mean_span,
            permute=permute,
        )

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """Runs of whole sentences, each a list of ids; a sentence that is too long is cut."""
        tokenizer, room = tokenizer_of(model), self.length - 2
        rows: list[list[list[int]]] = []
        for text in read_documents(data):
            row: list[list[int]] = []
            for sentence in split_sentences(text):
                ids = tokenizer.encode(sentence, special=False).ids[:room]
                if row and sum(map(len, row)) + len(ids) > room:
                    rows.append(row)
                    row = []
                row += [ids] if ids else []
            rows += [row] if row else []
        return rows

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask if rows are padded, and labels, which the model shifts right for its decoder."""
        inputs, labels = [], []
        for row, random in zip(rows, rng, strict=True):
            order = random.permutation(len(row)) if self.permute else range(len(row))
            shuffled = np.concatenate([row[number] for number in order])
            inputs.append([self.start_token_id, *self.infill(shuffled, random).tolist(), self.end_token_id])
            labels.append([self.start_token_id, *np.concatenate(row).tolist(), self.end_token_id])
        return {
            "input_ids": pad_rows(inputs, self.pad_token_id),
            **padding_mask(inputs),
            "labels": pad_rows(labels, IGNORED),
        }

    def infill(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """A text with spans replaced by mask tokens."""
        budget = round(len(ids) * self.density)
        lengths: list[int] = []
        while sum(lengths) < budget:
            lengths.append(min(int(random.poisson(self.mean_span)), budget - sum(lengths)))
        # Place the spans between the tokens that stay: which of the pieces, in random order, are spans.
        kept = len(ids) - budget
        is_span = np.zeros(kept + len(lengths), bool)
        is_span[random.choice(len(is_span), len(lengths), replace=False)] = True
        result: list[int] = []
        place, spans = 0, iter(lengths)
        for span in is_span:
            if span:
                result.append(self.mask_token_id)
                place += next(spans)
            else:
                result.append(int(ids[place]))
                place += 1
        return np.asarray(result)
