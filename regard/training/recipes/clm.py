"""Causal language modelling: each token is predicted from those before it (GPT-2, LLaMA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.models.model import Model
from regard.training.data import TokenBlocks, encode_stream, read_documents
from regard.training.recipes.recipe import Batch, Recipe, loss_options, tokenizer_of

__all__ = ["CausalLM"]


@dataclass(frozen=True, kw_only=True)
class CausalLM(Recipe):
    """TokenBlocks of a stream of tokens, starting anywhere in training and side by side in evaluation.

    >>> batch = CausalLM(length=4).batch([torch.arange(4)], [])
    >>> sorted(batch), batch["labels"].tolist()
    (['input_ids', 'labels'], [[0, 1, 2, 3]])

    Args:
        length: tokens of a block.
    """

    length: int
    name: ClassVar[str] = "clm"
    task: ClassVar[str] = "text-generation"

    @classmethod
    def for_model(cls, model: Model, *, length: int | None = None) -> CausalLM:
        """TokenBlocks as long as the model's positions, unless `length` says otherwise."""
        limit = getattr(model, "max_positions", None)
        length = (limit or 1024) if length is None else length
        if length < 2 or (limit is not None and length > limit):
            raise ValueError(f"length must be 2 to {limit}, the model's positions; got {length}")
        return cls(length=length)

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Tensor]:
        """TokenBlocks of a text's tokens."""
        tokens = encode_stream(tokenizer_of(model), read_documents(data))
        return TokenBlocks(tokens, self.length, 1 if training else self.length)

    def batch(self, rows: Sequence[Tensor], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids and labels (B, N); the model shifts the labels."""
        input_ids = torch.stack(list(rows))
        return {"input_ids": input_ids, "labels": input_ids}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over all tokens but each block's first, which nothing predicts."""
        labels = batch["labels"]
        count = torch.full((), labels[:, 1:].numel(), device=labels.device)
        return model(**batch, num_items_in_batch=1, **loss_options(model)).loss, count
