"""The base class of recipes, and what they share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.data.tokenizer import Tokenizer
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.models.text import TextModel
from regard.nn.blocks import LanguageHead, PretrainingHead
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
