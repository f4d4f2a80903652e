"""Training data: texts cut into rows of tokens, which rows a step reads, and their random numbers.

Rows and random numbers are functions of seed, step and row, so that a run resumes without further state.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer
from regard.models.model import Model


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


# ---------------------------------------------------------------------------------------------- which rows a step reads


def row_numbers(step: int, batch_size: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that a step reads, and the epoch of each. Every epoch is another permutation of all rows.

    >>> rows, epochs = row_numbers(1, 4, 6, seed=0)
    >>> len(rows), epochs.tolist()
    (4, [0, 0, 1, 1])
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, places = np.divmod(places, size)
    rows = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        rows[chosen] = permute(places[chosen], size, _hash(seed, int(epoch)))
    return rows, epochs


def permute(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a permutation of range(size) sends each place, without a table: a Feistel network with cycle walking.

    >>> sorted(permute(np.arange(10), 10, key=3).tolist()) == list(range(10))
    True
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits of each side
    mask = np.uint64((1 << half) - 1)
    keys = [np.uint64(_hash(key, round_)) for round_ in range(4)]
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> np.uint64(half), values[outside] & mask
        for round_key in keys:
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)  # wraps around
            left, right = right, left ^ ((mixed >> np.uint64(29)) & mask)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def row_generator(seed: int, epoch: int, row: int) -> np.random.Generator:
    """Random numbers of one row in one epoch, whichever process and micro-batch reads it."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, epoch, row]))


def step_seed(seed: int, step: int, rank: int, micro: int) -> int:
    """The seed of torch's generators (dropout) in one forward pass."""
    return _hash(seed, step, rank, micro)


def _hash(*numbers: int) -> int:
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
