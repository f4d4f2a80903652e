"""Fine-tuning on labelled texts: a label for each text or pair, a label for each word, or the answer to a question."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.rows import read_rows
from regard.models.losses import IGNORED, span_loss
from regard.models.model import Model
from regard.training.data import row_length
from regard.training.recipes.recipe import Batch, Recipe, batches_of, pad_rows, tokenizer_of


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
            f"row {row} has the label {label!r}; the model's labels are 0 to {len(labels) - 1}: {labels!r:.200}. Load "
            "it with labels=… (--labels a,b) for other names; a table's first line must name the columns"
        )
    return number


def text_sizes(model: Model, length: int | None, usual: int = 512) -> dict[str, int]:
    """Length and padding for a model. Raises ValueError for a length beyond its positions."""
    length = row_length(model, length, least=3, usual=usual)
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


# ------------------------------------------------------------------------------------------------------------- metrics


def accuracy(predicted: Sequence[Any], expected: Sequence[Any]) -> float:
    """Share of the predictions that are right.

    >>> accuracy([1, 0, 1], [1, 1, 1]) == 2 / 3
    True
    """
    if not expected:
        raise ValueError("nothing is labelled in the held-out rows: the label of every word was cut away with it")
    return sum(bool(one == other) for one, other in zip(predicted, expected, strict=True)) / len(expected)


def macro_f1(predicted: Sequence[Any], expected: Sequence[Any]) -> float:
    """Mean over the labels of each one's F1, the harmonic mean of precision and recall.

    >>> macro_f1([1, 0, 1], [1, 0, 0]) == (2 / 3 + 2 / 3) / 2
    True
    """
    scores = []
    for label in dict.fromkeys(expected):
        right = sum(bool(one == other == label) for one, other in zip(predicted, expected, strict=True))
        scores.append(2 * right / (list(predicted).count(label) + list(expected).count(label)))
    return sum(scores) / len(scores)


def exact_match(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Share of the answers that are right but for case, punctuation and articles, as SQuAD counts them.

    >>> exact_match(["The Eiffel Tower."], ["eiffel tower"])
    1.0
    """
    return accuracy([_normalised(text) for text in predicted], [_normalised(text) for text in expected])


def f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Mean F1 of the words of each answer, as SQuAD counts them.

    >>> f1(["the tall tower"], ["a tower"]) == 2 / 3
    True
    """
    scores = []
    for one, other in zip(predicted, expected, strict=True):
        words, right = _normalised(one).split(), _normalised(other).split()
        shared = sum((Counter(words) & Counter(right)).values())
        total = len(words) + len(right)
        scores.append(2 * shared / total if total else 1.0)
    return sum(scores) / len(scores)


def _normalised(text: str) -> str:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
