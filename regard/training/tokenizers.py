"""A byte-pair-encoding tokenizer, trained on the texts that a model is trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from regard.data.tokenizer import Tokenizer

__all__ = ["train_bpe"]

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
    import json

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
    with TemporaryDirectory() as folder:
        rust.save(str(Path(folder, "tokenizer.json")))
        values = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(values), "utf-8")
        return Tokenizer.open(folder)
