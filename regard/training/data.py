"""Training data: a stream of tokens cut into blocks, and a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer

__all__ = ["TokenBlocks", "byte_tokenizer", "encode_stream"]


class TokenBlocks(Sequence[Tensor]):
    """TokenBlocks of `length` tokens of a stream, one every `stride` tokens.

    >>> TokenBlocks(torch.arange(10), length=4, stride=3)[1]
    tensor([3, 4, 5, 6])

    Raises ValueError for a stream shorter than one block.
    """

    def __init__(self, tokens: Tensor, length: int, stride: int) -> None:
        if len(tokens) < length:
            raise ValueError(f"the data has {len(tokens)} tokens, fewer than one block of {length}: shorten the length")
        self.tokens, self.length, self.stride = tokens, length, stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.length) // self.stride + 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(index) * self.stride
        return self.tokens[start : start + self.length].long()


def encode_stream(tokenizer: Tokenizer, documents: Sequence[str]) -> Tensor:
    """All documents as one stream of token ids, each ended by the tokenizer's end token where it has one."""
    end = tokenizer.ids_of.eos
    rows = [
        np.asarray(tokenizer.encode(text, special=False).ids + ([] if end is None else [end])) for text in documents
    ]
    return torch.from_numpy(np.concatenate(rows).astype(np.int32))


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are the bytes of the text in UTF-8, for models without one.

    >>> byte_tokenizer().encode("가!").ids
    [234, 176, 128, 33]
    """
    from tempfile import TemporaryDirectory

    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 writes the others as 256, 257, …
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    with TemporaryDirectory() as folder:
        rust.save(str(Path(folder, "tokenizer.json")))
        Path(folder, "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', "utf-8")
        return Tokenizer.open(folder)
