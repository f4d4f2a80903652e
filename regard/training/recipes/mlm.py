"""Masked language modelling (BERT), with next-sentence pairs (BERT) or sentence-order pairs (ALBERT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.data.rows import read_documents
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.training.data import TokenBlocks, row_length, split_documents, split_sentences, token_stream
from regard.training.recipes.recipe import Batch, Recipe, loss_options, pad_rows, padding_mask, tokenizer_of

Pairs = Literal["next-sentence", "sentence-order"]
PAIR_LABELS = {"next-sentence": "next_sentence_label", "sentence-order": "sentence_order_label"}
"""What transformers' BERT and ALBERT call the label of a pair. A regard model takes either."""


@dataclass(frozen=True, kw_only=True)
class MaskedLM(Recipe):
    """Some tokens of each text are hidden and predicted.

    Of the chosen tokens 80 % become the mask token, 10 % a random one and 10 % stay (Devlin et al. 2019, section 3.1).

    Args:
        length: tokens of a row, special tokens included.
        mask_token_id: the token that hides another.
        vocab_size: random tokens are drawn below it.
        special_ids: tokens that are never chosen or drawn.
        start_ids: special tokens before a text ([CLS]).
        end_ids: special tokens after a text ([SEP]).
        pad_token_id: fills up short rows.
        probability: share of the tokens that is chosen.
        continuations: ids of tokens that continue a word, to choose whole words; empty chooses single tokens.
        pairs: two segments in each row: whether the second follows the first or is of another document
            ("next-sentence"), or whether the two are in order ("sentence-order").
    """

    length: int
    mask_token_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    probability: float = 0.15
    continuations: tuple[int, ...] = ()
    pairs: Pairs | None = None
    name: ClassVar[str] = "mlm"
    task: ClassVar[str] = "fill-mask"

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise ValueError(f"probability must be between 0 and 1, got {self.probability}")
        room = self.length - len(self.start_ids) - len(self.end_ids) * (1 if self.pairs is None else 2)
        if room < 2:
            raise ValueError(f"length {self.length} leaves {room} tokens beside the special ones")
        if self.pairs not in (None, "next-sentence", "sentence-order"):
            raise ValueError(f"pairs must be next-sentence or sentence-order, got {self.pairs!r}")

    @classmethod
    def for_model(
        cls,
        model: Model,
        *,
        length: int | None = None,
        probability: float = 0.15,
        whole_words: bool = False,
        pairs: Pairs | None = None,
    ) -> MaskedLM:
        """With the special tokens of the model's tokenizer.

        Raises ValueError for a tokenizer without a mask token, or a model without a head for the pairs.
        """
        tokenizer = tokenizer_of(model)
        if tokenizer.ids_of.mask is None:
            raise ValueError("the tokenizer has no mask token: mlm needs one, such as BERT's [MASK]")
        if pairs is not None and model.task != "pretraining":
            raise ValueError(f"pairs need a model with task 'pretraining', this one has {model.task!r}")
        around = tokenizer.encode("", special=True).ids
        special = sorted({*around, *(value for value in vars(tokenizer.ids_of).values() if value is not None)})
        labels = tokenizer.tokens(range(tokenizer.size)) if whole_words else []
        return cls(
            length=row_length(model, length, least=3, usual=512),
            mask_token_id=tokenizer.ids_of.mask,
            vocab_size=tokenizer.size,
            special_ids=tuple(special),
            start_ids=tuple(around[: len(around) // 2]),
            end_ids=tuple(around[len(around) // 2 :]),
            pad_token_id=tokenizer.ids_of.pad or 0,
            probability=probability,
            continuations=_continuations(labels),
            pairs=pairs,
        )

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """Blocks of the text's tokens; for pairs, two neighbouring segments of sentences and one from elsewhere."""
        tokenizer, documents = tokenizer_of(model), read_documents(data)
        room = self.length - len(self.start_ids) - len(self.end_ids) * (1 if self.pairs is None else 2)
        if self.pairs is None:
            return TokenBlocks(token_stream(tokenizer, documents), room, training=training)
        segments = []
        for text in split_documents(documents):
            ids = [tokenizer.encode(part, special=False).ids[: room // 2] for part in split_sentences(text)]
            segments.append([np.asarray(row) for row in ids if row])
        return SegmentPairs([part for part in segments if len(part) > 1], self.pairs)

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask if rows are padded, labels (-100 where nothing was hidden).

        For pairs also token_type_ids and next_sentence_label.
        """
        inputs, labels, types, relations = [], [], [], []
        for row, random in zip(rows, rng, strict=True):
            if self.pairs is None:
                parts = [np.asarray(row)]
            else:
                *parts, relation = self.choose_pair(row, random)
                relations.append(relation)
            ids, kinds = list(self.start_ids), [0] * len(self.start_ids)
            for number, part in enumerate(parts):
                ids += [*part.tolist(), *self.end_ids]
                kinds += [number] * (len(part) + len(self.end_ids))
            hidden, label = self.hide(np.asarray(ids), random)
            inputs.append(hidden)
            labels.append(label)
            types.append(kinds)
        batch = {"input_ids": pad_rows(inputs, self.pad_token_id), **padding_mask(inputs)}
        batch["labels"] = pad_rows(labels, IGNORED)
        # The GPU is told how many labels there are at most, so that it need not be asked. A draw beyond it is too rare
        # to be seen; its last labels are dropped.
        places = (batch["labels"] != IGNORED).flatten().nonzero()[self.max_labels(batch["labels"]) :, 0]
        batch["labels"].view(-1)[places] = IGNORED
        if self.pairs is not None:
            batch |= {"token_type_ids": pad_rows(types, 0), PAIR_LABELS[self.pairs]: torch.tensor(relations)}
        return batch

    def choose_pair(self, row: Any, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
        """First and second segment, and the label: 0 as they stand in the text, 1 for a wrong second or wrong order."""
        documents, number, sentence = row
        first, second = documents[number][sentence : sentence + 2]
        if random.random() < 0.5:
            return first, second, 0
        if self.pairs == "sentence-order":
            return second, first, 1
        other = int(random.integers(len(documents) - 1))
        document = documents[other + (other >= number)]
        return first, document[int(random.integers(len(document)))], 1

    def max_labels(self, labels: Tensor) -> int:
        """How many of the labels (B, N) of a batch are not ignored, at most."""
        return int(1.25 * self.probability * labels.numel()) + 64

    def hide(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Ids with some hidden, and the labels: the ids that were there, -100 elsewhere."""
        ordinary = ~np.isin(ids, self.special_ids)
        if self.continuations:  # one draw per word: a continuation shares that of the token before
            starts = ~(np.isin(ids, self.continuations) & np.roll(ordinary, 1))
            starts[0] = True
            draws = random.random(int(starts.sum()))[np.cumsum(starts) - 1]
        else:
            draws = random.random(len(ids))
        chosen = ordinary & (draws < self.probability)
        fate = random.random(len(ids))
        hidden = np.where(chosen & (fate < 0.8), self.mask_token_id, ids)
        drawn = random.integers(0, self.vocab_size - len(self.special_ids), len(ids))
        for special in self.special_ids:  # sorted: skip them
            drawn += drawn >= special
        hidden = np.where(chosen & (fate >= 0.8) & (fate < 0.9), drawn, hidden)
        return hidden, np.where(chosen, ids, IGNORED)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over the hidden tokens. A pair counts as much as the hidden tokens that its row has on average.

        BERT adds the two means; a constant weight makes that exact under accumulation and data parallelism.
        """
        inputs = {name: value for name, value in batch.items() if name not in PAIR_LABELS.values()}
        options = loss_options(model, max_labels=self.max_labels(batch["labels"]))
        output, count = model(**inputs, num_items_in_batch=1, **options), (batch["labels"] != IGNORED).sum()
        if self.pairs is None:
            return output.loss, count
        relation = cross_entropy(output.seq_relationship_logits, batch[PAIR_LABELS[self.pairs]], reduction="sum")
        return output.loss + self.probability * self.length * relation, count


def _continuations(labels: Sequence[str]) -> tuple[int, ...]:
    """Ids of tokens that continue a word: "##" (WordPiece), or no leading space mark where others have one."""
    if any(label.startswith("##") for label in labels):
        return tuple(number for number, label in enumerate(labels) if label.startswith("##"))
    marks = tuple("▁Ġ ")
    if any(label.startswith(marks) for label in labels):
        return tuple(n for n, label in enumerate(labels) if label[:1].isalnum() and not label.startswith(marks))
    return ()


class SegmentPairs(Sequence[Any]):
    """(documents, number of one, number of a sentence that another one follows), so that others can be drawn."""

    def __init__(self, documents: Sequence[Sequence[np.ndarray]], pairs: Pairs) -> None:
        if not documents or (pairs == "next-sentence" and len(documents) < 2):
            raise ValueError(
                f"{pairs} pairs need {2 if pairs == 'next-sentence' else 1} or more texts of several sentences, got "
                f"{len(documents)}; documents are lines of a .jsonl or separated by blank lines"
            )
        self.documents = documents
        self.places = [(d, s) for d, document in enumerate(documents) for s in range(len(document) - 1)]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        return self.documents, *self.places[index]
