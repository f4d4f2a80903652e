"""Span corruption (T5): spans of a text are replaced by sentinels, and the decoder writes what was there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from regard.data.rows import read_documents
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.training.data import TokenBlocks, token_stream
from regard.training.recipes.recipe import Batch, Recipe, pad_rows, padding_mask, tokenizer_of

__all__ = ["SpanCorruption"]


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(Recipe):
    """15 % of the tokens go, in spans of 3 on average (Raffel et al. 2020, section 3.1.4).

    Args:
        length: tokens of a text before its spans go.
        sentinel_ids: of <extra_id_0>, <extra_id_1>, …, one for each span.
        end_token_id: after input and target.
        pad_token_id: fills up short rows.
        density: share of the tokens that goes.
        mean_span: mean length of a span.
    """

    length: int
    sentinel_ids: tuple[int, ...]
    end_token_id: int
    pad_token_id: int = 0
    density: float = 0.15
    mean_span: float = 3.0
    name: ClassVar[str] = "span-corruption"
    task: ClassVar[str] = "text2text-generation"

    def __post_init__(self) -> None:
        if not 0 < self.density < 1 or self.mean_span < 1 or self.length < 2:
            raise ValueError(
                f"span corruption needs a density in (0, 1), spans of 1 or more and 2 tokens or more; got density "
                f"{self.density}, mean_span {self.mean_span}, length {self.length}"
            )
        if self.counts(self.length)[1] > len(self.sentinel_ids):
            raise ValueError(
                f"a text of {self.length} tokens has {self.counts(self.length)[1]} spans, and there are only "
                f"{len(self.sentinel_ids)} sentinel tokens"
            )

    @classmethod
    def for_model(
        cls, model: Model, *, length: int = 128, density: float = 0.15, mean_span: float = 3.0
    ) -> SpanCorruption:
        """With T5's sentinels. Raises ValueError for a tokenizer without <extra_id_0>."""
        tokenizer = tokenizer_of(model)
        labels = {label: number for number, label in enumerate(tokenizer.tokens(range(tokenizer.size)))}
        sentinels = [labels[name] for n in range(tokenizer.size) if (name := f"<extra_id_{n}>") in labels]
        if not sentinels or tokenizer.ids_of.eos is None:
            raise ValueError("the tokenizer has no <extra_id_0> or no end token: span corruption needs T5's tokenizer")
        return cls(
            length=length,
            sentinel_ids=tuple(sentinels),
            end_token_id=tokenizer.ids_of.eos,
            pad_token_id=tokenizer.ids_of.pad or 0,
            density=density,
            mean_span=mean_span,
        )

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Tensor]:
        """TokenBlocks of a text's tokens."""
        return TokenBlocks(token_stream(tokenizer_of(model), read_documents(data)), self.length, training=training)

    def counts(self, length: int) -> tuple[int, int]:
        """How many tokens go, in how many spans."""
        noise = min(max(round(length * self.density), 1), length - 1)
        return noise, min(max(round(noise / self.mean_span), 1), length - noise)

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask if rows are padded, and labels, which the model shifts right for its decoder."""
        pairs = [self.corrupt(np.asarray(row), random) for row, random in zip(rows, rng, strict=True)]
        inputs = [pair[0] for pair in pairs]
        return {
            "input_ids": pad_rows(inputs, self.pad_token_id),
            **padding_mask(inputs),
            "labels": pad_rows([pair[1] for pair in pairs], IGNORED),
        }

    def corrupt(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Input and target of one text: kept and noise spans alternate, a kept one first."""
        noise, spans = self.counts(len(ids))
        lengths = np.stack([_parts(len(ids) - noise, spans, random), _parts(noise, spans, random)], 1).ravel()
        pieces = np.split(ids, np.cumsum(lengths)[:-1])
        inputs: list[int] = []
        target: list[int] = []
        for number in range(spans):
            sentinel = self.sentinel_ids[number]
            inputs += [*pieces[2 * number].tolist(), sentinel]
            target += [sentinel, *pieces[2 * number + 1].tolist()]
        return np.asarray([*inputs, self.end_token_id]), np.asarray([*target, self.end_token_id])


def _parts(total: int, count: int, random: np.random.Generator) -> np.ndarray:
    """`total` as a sum of `count` numbers of 1 or more, all such sums equally likely."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1 if count > 1 else np.empty(0, int)
    return np.diff(np.concatenate([[0], cuts, [total]]))
