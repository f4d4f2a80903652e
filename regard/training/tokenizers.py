"""Tokenizers that are made for training: byte-pair encoding trained on the texts, and plain bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from regard.data.tokenizer import Tokenizer
from regard.data.tokenizer_pipeline import byte_letters

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


def train_bpe(texts: Iterable[str], size: int, *, lowercase: bool = False, sentinels: int = 0) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016; on bytes, so that no text has an unknown token).

    >>> train_bpe(["low lower lowest"] * 9, 300).encode("lowest").tokens
    ['low', 'e', 'st']

    Args:
        texts: what it is trained on.
        size: number of tokens, the 256 bytes and five special ones included.
        lowercase: read all text in lower case.
        sentinels: add so many tokens <extra_id_0>, <extra_id_1>, … for span corruption, counted in `size`.

    Returns:
        A tokenizer with padding 0, start 1 and end 2.

    Raises:
        ValueError: if `size` leaves no room for a merge.
    """
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    special = [*SPECIAL.values(), *(f"<extra_id_{number}>" for number in range(sentinels))]
    if size <= 256 + len(special):
        raise ValueError(f"size must be above {256 + len(special)}, the bytes and special tokens; got {size}")
    rust = RustTokenizer(models.BPE())
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    rust.normalizer = normalizers.Sequence(steps)
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(texts, trainer)
    return _opened(rust, SPECIAL)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are the bytes of the text in UTF-8, for models without one.

    >>> byte_tokenizer().encode("가!").ids
    [234, 176, 128, 33]
    """
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    rust = RustTokenizer(models.BPE(vocab=byte_letters(), merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    return _opened(rust, {})


def _opened(rust: Any, special: dict[str, str]) -> Tokenizer:
    """A tokenizer of the `tokenizers` library as one of regard, by way of its files."""
    with TemporaryDirectory() as folder:
        rust.save(str(Path(folder, "tokenizer.json")))
        values = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(values), "utf-8")
        return Tokenizer.open(folder)
