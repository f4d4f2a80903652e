"""How well pictures and texts go together: each with each, or as labels that are made up on the spot (zero-shot).

A model of two towers compares vectors: the value is a cosine, −1 to 1. One that reads a text while it looks at the
picture judges the pair: the value is the probability that they belong together. It does not know any family.

Axis letters: P pictures, T texts, e width of the vectors that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import tables
from regard.models.dual_model import DualModel
from regard.models.images.pictures import Source
from regard.models.model import Model
from regard.models.picture_text_model import Matcher
from regard.models.tokenizers.tokenizing import Batch
from regard.models.verbs.asking import batches, positions, probabilities, shortened
from regard.models.verbs.labelling import Classified, ranking
from regard.models.verbs.picturing import Several, judge

__all__ = ["Matched", "classify_by", "match"]

PROMPT = "a photo of {}"


@dataclass(frozen=True, eq=False, repr=False)
class Matched:
    """Pictures with a value for each text; prints as a table.

    >>> Matched(("photo.jpg",), ("a cat", "a dog"), torch.tensor([[0.1, 0.3]]), "cosine")
    text   cosine
    ─────  ──────
    a dog  0.3000
    a cat  0.1000

    pictures: names of their files.  texts: as asked.  values: (P, T).
    measure: what the values are: "cosine", −1 to 1, or "probability" that the two belong together, each by itself.
    """

    pictures: tuple[str, ...]
    texts: tuple[str, ...]
    values: Tensor
    measure: str

    @property
    def best(self) -> tuple[str, ...]:
        """The text that goes best with each picture."""
        return tuple(self.texts[n] for n in self.values.argmax(1).tolist())

    def __len__(self) -> int:
        return len(self.pictures)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        texts = tuple(map(shortened, self.texts))
        return ranking(self.values, self.pictures, texts, ("picture", "text", self.measure))

    def __repr__(self) -> str:
        return tables.text(*self._table())

    def _repr_html_(self) -> str:
        return tables.html(*self._table())


def match(
    model: Model, pictures: Source | Several, texts: str | Sequence[str], *, batch: int = 32, truncate: bool = False
) -> Matched:
    """Pictures with a value for each text; see `Model.match`."""
    if not isinstance(model, (DualModel, Matcher)):
        raise ValueError(
            "match needs a model that compares pictures with texts (CLIP, or BLIP with task 'none' or 'match'), and "
            f"this {model.family.title} has the task {model.task!r}"
        )
    given = _checked([texts] if isinstance(texts, str) else texts, "text")
    read = _read(model, given, batch, truncate)
    if isinstance(model, Matcher):
        names, values = judge(model, pictures, batch, lambda pixels: _beside(model, pixels, read))
        return Matched(names, tuple(given), values.cpu(), "probability")
    words = _vectors(model, read)  # (T, e)
    names, values = judge(model, pictures, batch, lambda pixels: _wide(model.encode_picture(pixels)) @ _wide(words).T)
    return Matched(names, tuple(given), values.cpu(), "cosine")


def classify_by(
    model: Model,
    pictures: Source | Several,
    labels: Sequence[str],
    *,
    prompt: str | None = None,
    batch: int = 32,
    truncate: bool = False,
) -> Classified:
    """Pictures with the probability of each label, read as a text; see `Model.classify`."""
    if not isinstance(model, DualModel):
        raise ValueError(
            "labels= is for models that compare vectors of pictures and texts (CLIP, BLIP with task 'none'), and this "
            f"{model.family.title} has the task {model.task!r}"
        )
    prompt = PROMPT if prompt is None else prompt
    if not isinstance(prompt, str) or "{}" not in prompt:
        raise ValueError(f"prompt must hold {{}} where the label goes, as {PROMPT!r} does, got {prompt!r}")
    if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
        raise ValueError(f"labels must be a list of at least one text, got {labels!r:.60}")
    said = [prompt.replace("{}", label) for label in _checked(labels, "label")]
    words = _vectors(model, _read(model, said, batch, truncate))  # (T, e)
    names, logits = judge(model, pictures, batch, lambda pixels: model.head(words, model.encode_picture(pixels)))
    return Classified(names, tuple(labels), probabilities(logits), of="picture")


# --------------------------------------------------------------------------------------------------------------- pieces

Read = list[tuple[list[int], Batch]]
"""Texts as batches, with their numbers."""


def _checked(texts: Sequence[str], what: str) -> Sequence[str]:
    """Refuse what is no text among texts or labels: pairs are for models of texts. What is no list is told later."""
    for number, text in enumerate(texts if isinstance(texts, Sequence) else ()):
        if not isinstance(text, str):
            raise TypeError(f"{what} {number} must be a str, got {type(text).__name__}: {text!r:.60}")
    return texts


def _read(model: Model, texts: Sequence[str], batch: int, truncate: bool) -> Read:
    return list(batches(model, texts, batch, length=positions(model), truncate=truncate))


@torch.no_grad()
def _vectors(model: DualModel, read: Read) -> Tensor:
    """Vectors (T, e) of length 1."""
    rows: dict[int, Tensor] = {}
    for numbers, part in read:
        rows |= dict(zip(numbers, model.encode_text(part.ids, part.mask), strict=True))
    return torch.stack([rows[n] for n in range(len(rows))])


def _beside(model: Matcher, pixels: Tensor, read: Read) -> Tensor:
    """How likely each text belongs to each picture: (B, T)."""
    rows = []
    for memory in model.look(pixels).unsqueeze(1):  # (1, patches, d)
        found: dict[int, Tensor] = {}
        for numbers, part in read:
            found |= dict(zip(numbers, probabilities(model.judge(memory, part.ids, part.mask))[:, 1], strict=True))
        rows.append(torch.stack([found[n] for n in range(len(found))]))
    return torch.stack(rows)


def _wide(x: Tensor) -> Tensor:
    """In fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
