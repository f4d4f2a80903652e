"""The base class of recipes, what they share, and the simplest: causal language modelling (GPT-2, LLaMA)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.data.rows import read_documents
from regard.data.tokenizer import Tokenizer
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.models.text import TextModel
from regard.nn.blocks import LanguageHead, PretrainingHead, count_in_documents
from regard.training.data import TokenBlocks, row_length, split_documents, token_stream
from regard.training.tokenizers import byte_tokenizer

Batch = dict[str, Tensor]
"""Arguments of the model: input_ids, attention_mask, labels, …"""


class Recipe:
    """An objective: how rows become a batch, and the loss of a batch. Recipes are frozen dataclasses of their options.

    name: of the command `regard train NAME`.  task: the head that it trains.
    """

    name: ClassVar[str]
    task: ClassVar[str]

    @classmethod
    def for_model(cls, model: Model, *args: Any, **options: Any) -> Self:
        """The recipe with the token ids and sizes of a model. Raises ValueError if they do not fit each other."""
        raise NotImplementedError

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """The rows of a file or a list; training rows may overlap, held-out rows do not."""
        raise NotImplementedError

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """Tensors of some rows, with a generator of random numbers for each row."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the losses of a batch and their number. Sums make accumulation and data parallelism exact.

        Here for labels of single tokens; other kinds of labels override it.
        """
        total = model(**batch, num_items_in_batch=1, **loss_options(model)).loss
        return total, (batch["labels"] != IGNORED).sum()

    def metrics(self, model: Model, rows: Sequence[Any], loss: float) -> dict[str, Any]:
        """What a trained model scores on held-out rows, by name; here the perplexity of the mean loss."""
        return {"perplexity": math.exp(min(loss, 700.0))}


def loss_options(model: nn.Module, *, smoothing: float = 0.0, max_labels: int | None = None) -> dict[str, Any]:
    """Further arguments of a training call: a language model of regard needs no logits for its loss.

    Args:
        model: the model or a wrapper of it (DDP, torch.compile, PEFT).
        smoothing: label smoothing, in training only.
        max_labels: of a batch, for an encoder that is asked for few of its tokens.
    """
    if not model.training:
        return {}
    options: dict[str, Any] = {"label_smoothing": smoothing} if smoothing else {}
    inner = next((part for part in model.modules() if isinstance(part, Model)), None)
    if isinstance(inner, (TextModel, EncoderDecoder)) and isinstance(inner.head, (LanguageHead, PretrainingHead)):
        options |= {"skip_logits": True} | ({} if max_labels is None else {"max_labels": max_labels})
    return options


def batches_of(recipe: Recipe, rows: Sequence[Any], model: Model, size: int = 64) -> Iterator[Batch]:
    """The rows in batches on the model's device, in order."""
    for first in range(0, len(rows), size):
        chosen = [rows[number] for number in range(first, min(first + size, len(rows)))]
        rng = [np.random.default_rng(first + number) for number in range(len(chosen))]
        yield {name: tensor.to(model.device) for name, tensor in recipe.batch(chosen, rng).items()}


def padding_mask(rows: Sequence[Sequence[int] | np.ndarray]) -> Batch:
    """The attention_mask of rows that are padded to one length; empty if nothing is padded: no mask is fastest."""
    return {} if len(set(map(len, rows))) == 1 else {"attention_mask": pad_rows([[1] * len(row) for row in rows], 0)}


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray], value: int) -> Tensor:
    """Rows of unequal length as one tensor (B, N), padded on the right."""
    return pad_sequence([torch.as_tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value)


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer; a model that has none gets one of bytes.

    Raises ValueError where the vocabulary is too small for the tokenizer's ids.
    """
    if model.directory is None and "tokenizer" not in vars(model):
        model.tokenizer = byte_tokenizer()
    tokenizer, size = model.tokenizer, model.get_input_embeddings().num_embeddings
    if tokenizer.size > size:
        raise ValueError(f"the tokenizer has {tokenizer.size} tokens and the model's vocabulary only {size}")
    return tokenizer


# -------------------------------------------------------------------------------------------- causal language modelling


@dataclass(frozen=True, kw_only=True)
class CausalLM(Recipe):
    """Blocks of a stream of tokens, starting anywhere in training and side by side in evaluation.

    >>> batch = CausalLM(length=4).batch([torch.arange(4)], [])
    >>> sorted(batch), batch["labels"].tolist()
    (['input_ids', 'labels'], [[0, 1, 2, 3]])

    Packed, a block holds whole documents, and none of them sees another:

    >>> batch = CausalLM(length=6, pack=True).batch([[torch.tensor([5, 6, 7]), torch.tensor([8, 9])]], [])
    >>> batch["labels"].tolist(), batch["document_ids"].tolist(), batch["position_ids"].tolist()
    ([[-100, 6, 7, -100, 9, -100]], [[0, 0, 0, 1, 1, -1]], [[0, 1, 2, 0, 1, 0]])

    Args:
        length: tokens of a block.
        pack: fill each block with whole documents; only those longer than a block are cut.
    """

    length: int
    pack: bool = False
    name: ClassVar[str] = "clm"
    task: ClassVar[str] = "text-generation"

    @classmethod
    def for_model(cls, model: Model, *, length: int | None = None, pack: bool = False) -> CausalLM:
        """Blocks as long as the model's positions, unless `length` says otherwise."""
        return cls(length=row_length(model, length, least=2), pack=pack)

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """Blocks of the text's tokens; packed, the documents of each block.

        Documents are the lines of a .jsonl, the .txt files of a directory, or separated by blank lines in a single one.
        """
        tokenizer, documents = tokenizer_of(model), read_documents(data)
        if not self.pack:
            return TokenBlocks(token_stream(tokenizer, documents), self.length, training=training)
        return pack([token_stream(tokenizer, [text]) for text in split_documents(documents)], self.length)

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids and labels (B, N), which the model shifts; packed, also document_ids and position_ids."""
        if not self.pack:
            input_ids = torch.stack(list(rows))
            return {"input_ids": input_ids, "labels": input_ids}
        input_ids = torch.zeros(len(rows), self.length, dtype=torch.long)
        labels, document_ids = torch.full_like(input_ids, IGNORED), torch.full_like(input_ids, -1)
        for row, documents in enumerate(rows):
            start = 0
            for number, document in enumerate(documents):
                end = start + len(document)
                input_ids[row, start:end], document_ids[row, start:end] = document, number
                labels[row, start + 1 : end] = document[1:]  # nothing predicts a document's first token
                start = end
        position_ids = count_in_documents(document_ids)
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "document_ids": document_ids}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over all tokens but the first of a block or document, which nothing predicts."""
        count = (batch["labels"][:, 1:] != IGNORED).sum()
        return model(**batch, num_items_in_batch=1, **loss_options(model)).loss, count


def pack(documents: Sequence[Tensor], length: int) -> list[list[Tensor]]:
    """Documents (n,) in as few blocks of at most `length` tokens as best fit needs, the longest first.

    >>> [[len(document) for document in block] for block in pack([torch.zeros(n) for n in (2, 3, 9, 2)], 5)]
    [[5], [4], [3, 2], [2]]

    A longer document is cut; a piece of one token has nothing to predict and is left out.

    Raises:
        ValueError: there is no document of two tokens or more.
    """
    pieces = [piece for document in documents for piece in torch.split(document, length) if len(piece) > 1]
    if not pieces:
        raise ValueError(f"none of the {len(documents)} documents has two tokens or more")
    blocks: list[list[Tensor]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, block), sorted
    for piece in sorted(pieces, key=len, reverse=True):
        place = bisect_left(rooms, (len(piece), 0))
        room, block = rooms.pop(place) if place < len(rooms) else (length, len(blocks))
        if block == len(blocks):
            blocks.append([])
        blocks[block].append(piece)
        insort(rooms, (room - len(piece), block))
    return blocks
