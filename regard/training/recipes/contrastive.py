"""Contrastive learning of images and texts (CLIP): each text is to find its own image in the batch, and the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.rows import read_rows
from regard.models.model import Model
from regard.training.recipes.classification import cut, text_sizes
from regard.training.recipes.image_classification import processor_of
from regard.training.recipes.recipe import Batch, Recipe, pad_rows, tokenizer_of

__all__ = ["Contrastive"]


@dataclass(frozen=True, kw_only=True)
class Contrastive(Recipe):
    """Rows have the columns image (a path, a Pillow image or an array) and text.

    The other rows of the same micro-batch are the negatives, so accumulation and more processes make the task easier.

    Args:
        length: longer texts are cut.
        pad_token_id: fills up short texts.
    """

    length: int
    pad_token_id: int = 0
    name: ClassVar[str] = "contrastive"
    task: ClassVar[str] = "zero-shot-image-classification"

    @classmethod
    def for_model(cls, model: Model, *, length: int | None = None) -> Contrastive:
        """With the padding of the model's tokenizer."""
        return cls(**text_sizes(model, 77 if length is None else length))

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """(pixel_values, ids) of each row."""
        tokenizer, processor, rows = tokenizer_of(model), processor_of(model), read_rows(data, ("image", "text"))
        return [
            (processor(row["image"]).pixel_values[0], cut(tokenizer.encode(row["text"]).ids, self.length))
            for row in rows
        ]

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """pixel_values (B, C, H, W), input_ids and attention_mask (B, N)."""
        texts = [row[1] for row in rows]
        return {
            "input_ids": pad_rows(texts, self.pad_token_id),
            "attention_mask": pad_rows([[1] * len(text) for text in texts], 0),
            "pixel_values": torch.stack([row[0] for row in rows]),
        }

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over the pairs."""
        count = len(batch["input_ids"])
        return model(**batch, return_loss=True).loss * count, torch.full((), count, device=batch["input_ids"].device)
