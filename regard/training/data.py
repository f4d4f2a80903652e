"""Training texts: documents and sentences, one stream of tokens cut into blocks, and how long a row may be."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer
from regard.models.model import Model

__all__ = ["TokenBlocks", "row_length", "split_documents", "split_sentences", "token_stream"]


class TokenBlocks(Sequence[Tensor]):
    """Blocks of `length` tokens of a stream: one from each token on in training, else side by side.

    >>> TokenBlocks(torch.arange(10), length=4, training=False)[1]
    tensor([4, 5, 6, 7])

    Raises ValueError for a stream shorter than one block.
    """

    def __init__(self, tokens: Tensor, length: int, *, training: bool) -> None:
        if len(tokens) < length:
            raise ValueError(f"the data has {len(tokens)} tokens, fewer than one block of {length}: shorten the length")
        self.tokens, self.length, self.stride = tokens, length, 1 if training else length

    def __len__(self) -> int:
        return (len(self.tokens) - self.length) // self.stride + 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(index) * self.stride
        return self.tokens[start : start + self.length].long()


def token_stream(tokenizer: Tokenizer, documents: Sequence[str]) -> Tensor:
    """All documents as one stream of token ids, each ended by the tokenizer's end token where it has one."""
    end = [] if tokenizer.ids_of.eos is None else [tokenizer.ids_of.eos]
    rows = [np.asarray(tokenizer.encode(text, special=False).ids + end) for text in documents]
    return torch.from_numpy(np.concatenate(rows).astype(np.int32))


def split_documents(texts: list[str]) -> list[str]:
    """The documents: the texts themselves, or of a single one the parts between its blank lines."""
    return texts if len(texts) > 1 else [part for part in re.split(r"\n\s*\n", texts[0]) if part.strip()]


def split_sentences(text: str) -> list[str]:
    """The sentences and lines of a text that are not blank."""
    return [part for part in re.split(r"(?<=[.!?。])\s+|\n+", text) if part.strip()]


def row_length(model: Model, length: int | None, *, least: int, usual: int | None = None) -> int:
    """Tokens of a row: `length`, or else the model's positions, at most `usual`. Raises ValueError beyond them."""
    limit: int | None = getattr(model, "max_positions", None)
    if length is None:
        length = min(limit or 1024, usual or sys.maxsize)
    if length < least or (limit is not None and length > limit):
        raise ValueError(f"length must be {least} to {limit}, the model's positions; got {length}")
    return length
