"""Labels with their probabilities: of whole texts, of pictures, of each token; and whether one text follows another.

The names of the labels are config.json's; of a new head with another number of them, LABEL_0 and so on. It does not
know any family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import tables
from regard.models.dual_model import DualModel
from regard.models.heads import label_names
from regard.models.images.pictures import Source
from regard.models.model import Model
from regard.models.verbs.asking import Texts, batches, one, positions, probabilities, require, result_of, shortened
from regard.models.verbs.picturing import Several, judge

__all__ = ["Classified", "Span", "Tagged", "classify", "classify_pictures", "follows", "ranking", "tag"]

MOST_SHOWN = 10  # labels of one picture in a table: many checkpoints have a thousand


@dataclass(frozen=True, eq=False, repr=False)
class Classified:
    """Texts or pictures with the probability of each label; prints as a table.

    >>> Classified(("fine!",), ("bad", "good"), torch.tensor([[0.25, 0.75]]))
    label  probability
    ─────  ───────────
    good   0.7500
    bad    0.2500

    texts: as asked; of pictures the names of their files.  labels: names, in config.json's order, or as asked.
    probabilities: (B, labels), each row of sum 1; each label by itself if the checkpoint's labels do not exclude each
    other; the value itself where it has learnt a number (`measure` says which: "probability" or "value").
    of: what was classified, "text" or "picture".
    """

    texts: tuple[Any, ...]
    labels: tuple[str, ...]
    probabilities: Tensor
    measure: str = "probability"
    of: str = "text"

    @property
    def best(self) -> tuple[str, ...]:
        """The likeliest label of each text."""
        return tuple(self.labels[n] for n in self.probabilities.argmax(1).tolist())

    def __len__(self) -> int:
        return len(self.texts)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        most = MOST_SHOWN if self.of == "picture" else None
        return ranking(self.probabilities, self.texts, self.labels, (self.of, "label", self.measure), most)

    def __repr__(self) -> str:
        return tables.text(*self._table())

    def _repr_html_(self) -> str:
        return tables.html(*self._table())


def ranking(
    values: Tensor,
    names: tuple[Any, ...],
    labels: tuple[str, ...],
    headers: tuple[str, str, str],
    most: int | None = None,
) -> tuple[list[str], list[list[str]]]:
    """A table's headers and rows: of one thing every label, the best first; of several the best label of each.

    >>> ranking(torch.tensor([[0.25, 0.75]]), ("a.jpg",), ("dog", "cat"), ("picture", "label", "probability"))
    (['label', 'probability'], [['cat', '0.7500'], ['dog', '0.2500']])

    values: (B, labels).  names: of B things.  headers: what these are, what the labels are, what the values are.
    most: labels of one thing that are listed; of more, how many are left out.
    """
    ranked = values.sort(1, descending=True)
    if len(names) == 1:
        found = list(zip(ranked.indices[0].tolist(), ranked.values[0].tolist(), strict=True))
        rows = [[labels[n], f"{value:.4f}"] for n, value in found[:most]]
        more = len(found) - len(rows)
        return list(headers[1:]), rows + ([[f"… {more} more", ""]] if more else [])
    best = zip(names, ranked.indices[:, 0].tolist(), ranked.values[:, 0].tolist(), strict=True)
    return list(headers), [[_in_one_line(name), labels[n], f"{value:.4f}"] for name, n, value in best]


def classify(model: Model, texts: str | Texts, *, batch: int = 32, truncate: bool = False) -> Classified:
    """Texts with the probability of each label; see `Model.classify`."""
    require(model, "classify", "classify")
    given: Texts = [texts] if isinstance(texts, str) else texts
    rows: dict[int, Tensor] = {}
    for numbers, part in batches(model, given, batch, length=positions(model), truncate=truncate):
        logits = result_of(model, part).logits
        assert logits is not None
        rows |= dict(zip(numbers, logits, strict=True))
    return _labelled(model, torch.stack([rows[n] for n in range(len(rows))]), tuple(given), "text")


def classify_pictures(model: Model, pictures: Source | Several, *, batch: int = 32) -> Classified:
    """Pictures with the probability of each of the checkpoint's labels; see `Model.classify`."""
    if isinstance(model, DualModel):
        raise ValueError(
            f"this {model.family.title} has no labels of its own: give some, as labels=['a cat', 'a dog'], or load a "
            "checkpoint with a head for labels"
        )
    require(model, "classify", "classify", *(["classify-cls"] if "classify-cls" in model.family.tasks else []))
    names, logits = judge(model, pictures, batch, lambda pixels: model(pixels).logits)  # (P, labels)
    return _labelled(model, logits, names, "picture")


def _labelled(model: Model, logits: Tensor, names: tuple[Any, ...], of: str) -> Classified:
    """logits: (B, labels)."""
    count, kind = logits.shape[1], model.settings.get("problem_type")
    labels = label_names(model.settings.labels(count), count)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu()
    if kind == "regression" or len(labels) == 1:
        return Classified(names, labels, wide, "value", of)
    chances = wide.sigmoid() if kind == "multi_label_classification" else probabilities(logits)
    return Classified(names, labels, chances, of=of)


def follows(model: Model, first: str, second: str) -> float:
    """How likely the second text follows the first; see `Model.follows`."""
    require(model, "follows", "next", "pretrain")
    result = result_of(model, one(model, first, second))
    logits = result.logits if result.next_sentence is None else result.next_sentence  # (1, 2): follows, does not
    assert logits is not None
    return float(probabilities(logits)[0, 0])


@dataclass(frozen=True)
class Span:
    """A piece of a text with one label: characters start to end, and the mean probability of its tokens."""

    text: str
    label: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True, repr=False)
class Tagged:
    """A text with a label for each of its tokens; prints as a table.

    >>> tagged = Tagged("Kim ran", (Span("Kim", "B-PER", 0, 3, 0.75), Span("ran", "O", 4, 7, 0.5)))
    >>> tagged
    token  label  probability
    ─────  ─────  ───────────
    Kim    B-PER  0.7500
    ran    O      0.5000
    >>> tagged.spans
    (Span(text='Kim', label='PER', start=0, end=3, probability=0.75),)

    text: as asked.  tokens: the pieces of it that the model read, with the likeliest label of each.
    """

    text: str
    tokens: tuple[Span, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Neighbours of one label as one: "B-" begins a new one, "I-" goes on, "O" is none."""
        return tuple(_joined(self.text, group) for group in _groups(self.tokens))

    def _rows(self) -> list[list[str]]:
        return [[shortened(token.text), token.label, f"{token.probability:.4f}"] for token in self.tokens]

    def __repr__(self) -> str:
        return tables.text(["token", "label", "probability"], self._rows())

    def _repr_html_(self) -> str:
        return tables.html(["token", "label", "probability"], self._rows())


def tag(model: Model, text: str) -> Tagged:
    """A label for each token of a text; see `Model.tag`."""
    require(model, "tag", "tag")
    spans = model.tokenizer.encode(text).offsets
    logits = result_of(model, one(model, text)).logits
    assert logits is not None
    values, numbers = probabilities(logits[0]).max(-1)  # (N,)
    labels = label_names(model.settings.labels(logits.shape[2]), logits.shape[2])
    found = zip(spans, numbers.tolist(), values.tolist(), strict=True)
    return Tagged(
        text,
        tuple(
            Span(text[span[0] : span[1]], labels[number], *span, value)
            for span, number, value in found
            if span is not None
        ),
    )


def _groups(tokens: tuple[Span, ...]) -> Iterator[list[Span]]:
    group: list[Span] = []
    for token in tokens:
        new = not group or token.label.startswith("B-") or _bare(token.label) != _bare(group[-1].label)
        if new and group:
            yield group
            group = []
        if token.label != "O":
            group.append(token)
    if group:
        yield group


def _joined(text: str, group: list[Span]) -> Span:
    start, end = group[0].start, group[-1].end
    return Span(text[start:end], _bare(group[0].label), start, end, sum(t.probability for t in group) / len(group))


def _bare(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _in_one_line(text: Any) -> str:
    return shortened(" | ".join(text) if isinstance(text, tuple) else text)
