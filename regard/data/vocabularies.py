"""Vocabularies from files, as Rust models: tokenizer.json, vocab.txt, vocab.json with merges.txt, sentencepiece files.

The files decide the ids; what transformers adds to a sentencepiece file's own list (T5's sentinels, the order of
XLM-R's first tokens) is added here. It does not know how text is normalised, split or framed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.data.sentencepiece_file import CONTROL, USER_DEFINED, SentencePieceFile
from regard.data.tokenizer_files import Folder, rust_library, text_of
from regard.parsing import parsing

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

__all__ = [
    "Vocabulary",
    "read_albert",
    "read_llama",
    "read_merges",
    "read_pieces",
    "read_t5",
    "read_tokenizer_json",
    "read_words",
    "read_xlm_roberta",
    "sentinels",
]

MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")


@dataclass(frozen=True)
class Vocabulary:
    """A Rust model and what came with it.

    whole: all of tokenizer.json.  file: the sentencepiece file.  extra: special tokens that the latter lists itself.
    defaults: named tokens known from the file.
    """

    model: Any
    whole: RustTokenizer | None = None
    file: SentencePieceFile | None = None
    extra: list[Any] | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)


def read_tokenizer_json(path: Path, data: bytes) -> Vocabulary:
    """tokenizer.json, read by Rust; ValueError says what is wrong with a file that is not one."""
    try:
        with parsing(str(path)):
            whole = rust_library().Tokenizer.from_buffer(data)
    except ValueError as problem:
        known = _what_is_wrong(data)
        raise ValueError(f"{path} cannot be read: {known}" if known else str(problem)) from None
    padding = whole.padding
    return Vocabulary(whole.model, whole=whole, defaults={"pad": padding["pad_token"]} if padding else {})


def _what_is_wrong(data: bytes) -> str | None:
    """In words, where Rust only says that no variant matched."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as problem:
        return f"it is not JSON ({problem})"
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return "it has no model"
    kind = content["model"].get("type")
    return f"its model is of type {kind!r}, and {', '.join(MODELS)} are known" if kind not in (*MODELS, None) else None


def read_words(folder: Folder) -> Vocabulary:
    """vocab.txt: one token a line."""
    file = folder.path / "vocab.txt"
    with parsing(str(file)):
        return Vocabulary(rust_library().models.WordPiece.from_file(str(file), unk_token="[UNK]"))


def read_merges(folder: Folder) -> Vocabulary:
    """vocab.json and merges.txt: token → id, and pairs to merge, best first."""
    files = [str(folder.path / name) for name in ("vocab.json", "merges.txt")]
    blank = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    with parsing(f"{folder.path}:", "vocab.json and merges.txt do not fit together"):
        return Vocabulary(rust_library().models.BPE.from_file(*files, fuse_unk=False, **blank))


def read_t5(folder: Folder) -> Vocabulary:
    """spiece.model, then the sentinels <extra_id_99> … <extra_id_0>."""
    file = SentencePieceFile.read(folder.path / "spiece.model")
    return _unigram(file, [*_scored(file), *((text, 0.0) for text in reversed(sentinels(folder)))], 2)


def read_albert(folder: Folder) -> Vocabulary:
    """spiece.model as it is."""
    file = SentencePieceFile.read(folder.path / "spiece.model")
    return _unigram(file, _scored(file), 1)


def read_xlm_roberta(folder: Folder, defaults: Mapping[str, str]) -> Vocabulary:
    """sentencepiece.bpe.model in fairseq's order: <s>, <pad>, </s>, <unk>, the pieces, and <mask> at the end."""
    file = SentencePieceFile.read(folder.path / "sentencepiece.bpe.model")
    texts = {role: text_of(token) for role, token in folder.named(defaults).items()}
    first = [(texts.get(role, defaults[role]), 0.0) for role in ("bos", "pad", "eos", "unk")]
    return _unigram(file, [*first, *_scored(file)[3:], (texts.get("mask", defaults["mask"]), 0.0)], 3)


def read_llama(folder: Folder) -> Vocabulary:
    """tokenizer.model: merges in the order of the pieces, bytes for what is unknown."""
    file = SentencePieceFile.read(folder.path / "tokenizer.model")
    words = {piece.text: n for n, piece in enumerate(file.pieces)}
    model = rust_library().models.BPE(words, _merges(words), fuse_unk=True, byte_fallback=True)
    return Vocabulary(model, file=file, extra=_own_tokens(file))


def read_pieces(folder: Folder) -> Vocabulary:
    """tokenizer.model of no declared family: unigram or BPE as the file says."""
    file = SentencePieceFile.read(folder.path / "tokenizer.model")
    defaults = {"bos": (file.bos_id, file.bos), "eos": (file.eos_id, file.eos), "unk": (file.unknown_id, file.unknown)}
    named = {role: text for role, (number, text) in defaults.items() if number >= 0}
    models = rust_library().models
    if file.algorithm == "unigram":
        model = models.Unigram(_scored(file), unk_id=file.unknown_id, byte_fallback=file.byte_fallback)
    else:
        words = _renamed(file, folder)
        merges = _merges({piece.text: n for n, piece in enumerate(file.pieces)})
        model = models.BPE(words, merges, unk_token=file.unknown, fuse_unk=True, byte_fallback=file.byte_fallback)
    return Vocabulary(model, file=file, extra=_own_tokens(file), defaults=named)


def sentinels(folder: Folder) -> list[str]:
    """T5's <extra_id_0>, <extra_id_1> …, as many as the settings say."""
    count = folder.values.get("extra_ids", 100)
    if not isinstance(count, int) or not 0 <= count <= 10_000:
        raise ValueError(f"extra_ids in {folder.path / 'tokenizer_config.json'} must be 0 to 10000, got {count!r:.80}")
    return [f"<extra_id_{n}>" for n in range(count)]


def _renamed(file: SentencePieceFile, folder: Folder) -> dict[str, int]:
    """The pieces by text, placeholders under the names that the added tokens give them."""
    words = {piece.text: n for n, piece in enumerate(file.pieces)}
    for number, token in folder.added.items():
        if number < len(file.pieces) and token.content not in words:
            del words[file.pieces[number].text]
            words[token.content] = number
    return words


def _scored(file: SentencePieceFile) -> list[tuple[str, float]]:
    return [(piece.text, piece.score) for piece in file.pieces]


def _unigram(file: SentencePieceFile, pieces: list[tuple[str, float]], unknown_id: int) -> Vocabulary:
    if len(pieces) <= unknown_id:
        raise ValueError(f"the sentencepiece file holds {len(pieces)} pieces: the unknown token's id is {unknown_id}")
    model = rust_library().models.Unigram(pieces, unk_id=unknown_id, byte_fallback=False)
    return Vocabulary(model, file=file, extra=_own_tokens(file))


def _own_tokens(file: SentencePieceFile) -> list[Any]:
    """Control pieces, which are special, and the user's own, which are not: neither is ever cut."""
    make = rust_library().AddedToken
    own = [piece for piece in file.pieces if piece.type in (CONTROL, USER_DEFINED)]
    return [make(piece.text, normalized=False, special=piece.type == CONTROL) for piece in own]


def _merges(words: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, in the order of the pieces.

    >>> _merges({"a": 0, "b": 1, "ab": 2, "aab": 3})
    [('a', 'b'), ('a', 'ab')]
    """
    halves = ((text[:n], text[n:]) for text in words for n in range(1, len(text)))
    return [(left, right) for left, right in halves if left in words and right in words]
