"""Causal language modelling: each token is predicted from those before it (GPT-2, LLaMA)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.rows import read_documents
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.nn.blocks import count_in_documents
from regard.training.data import TokenBlocks, row_length, split_documents, token_stream
from regard.training.recipes.recipe import Batch, Recipe, loss_options, tokenizer_of


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
