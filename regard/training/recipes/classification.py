"""Fine-tuning on labelled texts: a label for each text or pair, or for each word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.rows import read_rows
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.training.data import row_length
from regard.training.metrics import accuracy, macro_f1
from regard.training.recipes.recipe import Batch, Recipe, batches_of, pad_rows, tokenizer_of

__all__ = ["TextClassification", "TokenClassification", "label_metrics"]


@dataclass(frozen=True, kw_only=True)
class LabelledTexts(Recipe):
    """The base of the recipes of this file.

    Args:
        labels: the names of the labels, in the order of the model's outputs; rows have names or numbers.
        length: longer texts are cut.
        pad_token_id: fills up short rows.
    """

    labels: tuple[str, ...]
    length: int
    pad_token_id: int = 0

    @classmethod
    def for_model(cls, model: Model, *, length: int | None = None) -> Self:
        """With the labels of the model's config and the padding of its tokenizer."""
        return cls(labels=model_labels(model), **text_sizes(model, length))

    def metrics(self, model: Model, rows: Sequence[Any], loss: float) -> dict[str, Any]:
        """Accuracy, and the mean F1 of the labels; over the words where these have labels."""
        return label_metrics(self, model, rows)


class TextClassification(LabelledTexts):
    """One label for each text, or pair of texts. Rows have the columns text and label, and text_pair for pairs."""

    name: ClassVar[str] = "text-classification"
    task: ClassVar[str] = "text-classification"

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """(ids, types, label) of each row. Raises ValueError for a label that the model does not have."""
        tokenizer = tokenizer_of(model)
        rows = []
        for number, row in enumerate(read_rows(data, ("text", "label"))):
            encoded = tokenizer.encode(row["text"], row.get("text_pair"))
            label = label_number(row["label"], self.labels, number)
            types = token_types(model, encoded.types)
            rows.append((cut(encoded.ids, self.length), cut(types, self.length), label))
        return rows

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask, labels (B,), and token_type_ids where the rows have two segments."""
        batch = text_batch(rows, self.pad_token_id)
        return batch | {"labels": torch.tensor([row[2] for row in rows])}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over the rows."""
        count = len(batch["labels"])
        return model(**batch).loss * count, torch.full((), count, device=batch["labels"].device)


class TokenClassification(LabelledTexts):
    """One label for each word. Rows have the columns tokens (words) and labels, lists of equal length.

    The first token of a word has its label, the others have none.
    """

    name: ClassVar[str] = "token-classification"
    task: ClassVar[str] = "token-classification"

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """(ids, types, labels) of each row. Raises ValueError for labels that do not fit the words or the model."""
        tokenizer = tokenizer_of(model)
        rows = []
        for number, row in enumerate(read_rows(data, ("tokens", "labels"))):
            words, labels = (
                value.split() if isinstance(value, str) else value for value in (row["tokens"], row["labels"])
            )
            if len(words) != len(labels):
                raise ValueError(f"row {number} has {len(words)} words and {len(labels)} labels")
            numbers = [label_number(label, self.labels, number) for label in labels]
            encoded = tokenizer.encode(" ".join(words))
            starts = dict(zip(np.cumsum([0, *(len(word) + 1 for word in words)]).tolist(), numbers, strict=False))
            own = []
            for span in encoded.offsets:  # of a token that is the first of its word; some count the space before it
                start = next((place for place in range(*(span or (0, 0))) if place in starts), None)
                own.append(IGNORED if start is None else starts.pop(start))
            types = token_types(model, encoded.types)
            rows.append((cut(encoded.ids, self.length), cut(types, self.length), cut(own, self.length)))
        return rows

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask, labels (B, N), and token_type_ids where the rows have two segments."""
        return text_batch(rows, self.pad_token_id) | {"labels": pad_rows([row[2] for row in rows], IGNORED)}


@torch.no_grad()
def label_metrics(recipe: Recipe, model: Model, rows: Sequence[Any]) -> dict[str, Any]:
    """Accuracy and mean F1 of a model's likeliest labels."""
    predicted: list[int] = []
    expected: list[int] = []
    for batch in batches_of(recipe, rows, model):
        labels = batch.pop("labels")
        counted = labels != IGNORED
        predicted += model(**batch).logits.argmax(-1)[counted].tolist()
        expected += labels[counted].tolist()
    return {"accuracy": accuracy(predicted, expected), "macro F1": macro_f1(predicted, expected)}


def model_labels(model: Model) -> tuple[str, ...]:
    """The names of a model's labels, by its config."""
    return tuple(model.config.labels(model.config.num_labels()))


def label_number(label: Any, labels: Sequence[str], row: int) -> int:
    """The number of a label that is given by name or by number. Raises ValueError for another."""
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    try:
        number = int(label)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number < len(labels) or (isinstance(label, float) and label != number):
        raise ValueError(
            f"row {row} has the label {label!r}; the model's labels are 0 to {len(labels) - 1}: {labels!r:.200}"
        )
    return number


def text_sizes(model: Model, length: int | None) -> dict[str, int]:
    """Length and padding for a model. Raises ValueError for a length beyond its positions."""
    length = row_length(model, length, least=3, usual=512)
    return {"length": length, "pad_token_id": tokenizer_of(model).ids_of.pad or 0}


def token_types(model: Model, types: list[int]) -> list[int]:
    """The tokenizer's token types, or 0 where the model does not tell segments apart (GPT-2, DistilBERT)."""
    table = getattr(getattr(getattr(model, "tower", None), "embed", None), "types", None)
    return types if table is not None and table.num_embeddings > 1 else [0] * len(types)


def cut(row: list[int], length: int) -> list[int]:
    """At most `length` values; the last one, an end token, stays."""
    return row if len(row) <= length else [*row[: length - 1], row[-1]]


def text_batch(rows: Sequence[Any], pad: int) -> Batch:
    """input_ids and attention_mask of rows (ids, types, …), and token_type_ids if any row has a second segment."""
    batch = {
        "input_ids": pad_rows([row[0] for row in rows], pad),
        "attention_mask": pad_rows([[1] * len(row[0]) for row in rows], 0),
    }
    if any(any(row[1]) for row in rows):
        batch["token_type_ids"] = pad_rows([row[1] for row in rows], 0)
    return batch
