"""Which rows a step reads, and their random numbers: functions of seed, step and row, so a resume needs no state."""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["row_generator", "row_numbers", "step_seed"]


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
