"""Extractive question answering: where in a context the answer starts and ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.rows import read_rows
from regard.models.losses import span_loss
from regard.models.model import Model
from regard.training.metrics import exact_match, f1
from regard.training.recipes.classification import text_batch, text_sizes, token_types
from regard.training.recipes.recipe import Batch, Recipe, batches_of, tokenizer_of

__all__ = ["QuestionAnswering"]


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(Recipe):
    """Rows have the columns question, context, answer (a part of the context) and, if it is there twice, answer_start.

    Args:
        length: longest question and context together; rows that are longer are left out in training.
        pad_token_id: fills up short rows.
    """

    length: int
    pad_token_id: int = 0
    name: ClassVar[str] = "question-answering"
    task: ClassVar[str] = "question-answering"

    @classmethod
    def for_model(cls, model: Model, *, length: int | None = None) -> QuestionAnswering:
        """With the model's longest text and the padding of its tokenizer."""
        return cls(**text_sizes(model, length))

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """(ids, types, start, end) of each row. Raises ValueError for an answer that is not in its context."""
        tokenizer, rows = tokenizer_of(model), []
        for number, row in enumerate(read_rows(data, ("question", "context", "answer"))):
            first = row.get("answer_start")
            first = row["context"].find(row["answer"]) if first is None else int(first)
            last = first + len(row["answer"])
            if first < 0 or not row["answer"] or row["context"][first:last] != row["answer"]:
                raise ValueError(f"row {number}: the answer {row['answer']!r:.80} is not in its context at {first}")
            encoded = tokenizer.encode(row["question"], row["context"])
            texts = [(place, span) for place, span in enumerate(encoded.offsets) if span is not None]
            question = sum(span is not None for span in tokenizer.encode(row["question"]).offsets)
            inside = [place for place, span in texts[question:] if span[0] < last and span[1] > first]
            if not inside:
                raise ValueError(f"row {number}: no token covers the answer {row['answer']!r:.80}")
            if len(encoded.ids) <= self.length:
                rows.append((encoded.ids, token_types(model, encoded.types), inside[0], inside[-1]))
        if not rows:
            raise ValueError(f"every row is longer than {self.length} tokens")
        return rows

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask, token_type_ids, start_positions and end_positions (B,)."""
        positions = torch.tensor([row[2:] for row in rows])
        return text_batch(rows, self.pad_token_id) | {
            "start_positions": positions[:, 0],
            "end_positions": positions[:, 1],
        }

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over the rows. Padding is no answer: with it, the loss of a row would depend on the rest of its batch."""
        inputs = dict(batch)
        starts, ends = inputs.pop("start_positions"), inputs.pop("end_positions")
        count = torch.full((), len(starts), device=starts.device)
        return span_loss(*_span_logits(model, inputs), starts, ends) * count, count

    @torch.no_grad()
    def metrics(self, model: Model, rows: Sequence[Any], loss: float) -> dict[str, Any]:
        """Exact match and F1 of the words, as SQuAD counts them, of the likeliest start and the best end after it."""
        predicted, expected = [], []
        for batch in batches_of(self, rows, model):
            positions = [batch.pop(name).tolist() for name in ("start_positions", "end_positions")]
            start_logits, end_logits = _span_logits(model, batch)
            starts = start_logits.argmax(1)
            later = torch.arange(end_logits.shape[1], device=starts.device) >= starts[:, None]
            ends = end_logits.masked_fill(~later, -math.inf).argmax(1)
            for ids, *span in zip(batch["input_ids"], starts.tolist(), ends.tolist(), *positions, strict=True):
                predicted.append(model.tokenizer.decode(ids[span[0] : span[1] + 1]))
                expected.append(model.tokenizer.decode(ids[span[2] : span[3] + 1]))
        return {"exact match": exact_match(predicted, expected), "F1": f1(predicted, expected)}


def _span_logits(model: nn.Module, inputs: Batch) -> tuple[Tensor, Tensor]:
    """Logits of starts and ends (B, N), -inf at padding."""
    output, padding = model(**inputs), inputs["attention_mask"] == 0
    return output.start_logits.masked_fill(padding, -math.inf), output.end_logits.masked_fill(padding, -math.inf)
