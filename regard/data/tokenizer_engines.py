"""Engines that encode and decode text: pipelines of the `tokenizers` library, and Marian's two sentencepiece models."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from regard.data.tokenizer_files import (
    SPACE,
    Folder,
    read_object,
    read_sentencepiece,
    rust_library,
    sentencepiece_library,
)
from regard.files import parsing

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Encoding as RustEncoding
    from tokenizers import Tokenizer as RustTokenizer

Item = str | tuple[str, str]
"""A text, or a pair."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Encoding:
    """One text or pair: ids, token types, and (start, end) in the text, None for a token that is not in the text."""

    ids: list[int]
    types: list[int]
    spans: list[tuple[int, int] | None]


@dataclass(frozen=True)
class Pipeline:
    """A `tokenizers.Tokenizer` as an engine. It keeps no state between calls, so threads may share it."""

    rust: RustTokenizer  # its own padding and truncation are turned off
    clean: bool = False  # close up spaces before punctuation when decoding
    word_end: str = ""  # suffix of a word's last piece, a space in text
    where: str = "the tokenizer"  # the directory, for errors: some damage shows only when a text is encoded

    def __post_init__(self) -> None:
        self.rust.no_padding()
        self.rust.no_truncation()

    @property
    def size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        return int(self.rust.get_vocab_size(with_added_tokens=True))

    @cached_property
    def added(self) -> Mapping[int, AddedToken]:
        """Tokens beside the vocabulary, by id."""
        return dict(self.rust.get_added_tokens_decoder())

    def encode(self, items: Sequence[Item], special: bool) -> list[Encoding]:
        """Encode texts and pairs; `special`: with the special tokens around them."""
        with parsing(self.where):
            return [_encoding(one) for one in self.rust.encode_batch(list(items), add_special_tokens=special)]

    def truncate(self, item: Item, length: int, side: str) -> Encoding:
        """Encode one text or pair and drop tokens on `side` until at most `length` are left, special ones included."""
        with parsing(self.where):
            parts = [self.rust.encode(text, add_special_tokens=False) for text in texts_of(item)]
            special = self.rust.num_special_tokens_to_add(len(parts) == 2)
        kept = kept_lengths([len(part) for part in parts], length, special)
        with parsing(self.where):
            for part, n in zip(parts, kept, strict=True):
                part.truncate(n, direction=side)
            return _encoding(self.rust.post_process(parts[0], parts[1] if len(parts) == 2 else None))

    def decode(self, ids: list[int], special: bool) -> str:
        """Join ids; `special`: keep the special tokens."""
        with parsing(self.where):
            text = str(self.rust.decode(ids, skip_special_tokens=not special))
        text = text.replace(self.word_end, " ").strip() if self.word_end else text
        return clean_spaces(text) if self.clean else text

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None."""
        return self.rust.token_to_id(token)

    def label(self, number: int) -> str | None:
        """The token of an id as people read it: spaces and bytes decoded; or None."""
        token = self.rust.id_to_token(number)
        if token is None or number in self.added:
            return token
        if "ByteLevel" in self._decoder_steps:
            letters = byte_letters()
            ends = self.word_end if self.word_end and token.endswith(self.word_end) else ""
            token = token.removesuffix(ends)
            known = all(letter in letters for letter in token)
            text = bytes(letters[letter] for letter in token).decode(errors="backslashreplace") if known else token
            text += " " if ends else ""
        elif "ByteFallback" in self._decoder_steps and (byte := BYTE.fullmatch(token)):
            text = bytes([int(byte[1], 16)]).decode(errors="backslashreplace")
        else:
            text = token.replace("▁", " ") if "▁" in self._decoder_steps else token
        return unicodedata.normalize("NFC", text)  # letters of Hangul that a lower-casing vocabulary took apart

    @cached_property
    def _decoder_steps(self) -> frozenset[str]:
        """Types of the decoder's steps, and "▁" where one of them turns that sign into a space."""
        decoder = self.rust.decoder
        text = decoder.__getstate__().decode() if decoder is not None else "{}"
        state: dict[str, Any] = json.loads(text)
        steps = state.get("decoders", [state])
        return frozenset(str(step.get("type")) for step in steps) | (frozenset("▁") if "▁" in text else frozenset())

    def files(self) -> dict[str, bytes]:
        """The vocabulary as files: name → content."""
        with parsing(self.where):
            return {"tokenizer.json": self.rust.to_str(pretty=True).encode()}


def texts_of(item: Item) -> tuple[str, ...]:
    """The one or two texts."""
    return (item,) if isinstance(item, str) else item


@cache
def byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible letter (Radford et al. 2019): letter → byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(rest)}


def clean_spaces(text: str) -> str:
    """Close up the spaces that a word-by-word vocabulary leaves before punctuation and English endings.

    >>> clean_spaces("he did n't , really .")
    "he didn't, really."
    """
    for ending in (" .", " ?", " !", " ,"):
        text = text.replace(ending, ending[1:])
    text = text.replace(" ' ", "'")
    for ending in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(ending, ending[1:])
    return text


def kept_lengths(sizes: list[int], length: int, special: int) -> list[int]:
    """How many tokens of one text, or of each of two, are kept; the longer text is truncated first.

    >>> kept_lengths([3, 9], 8, special=0), kept_lengths([9, 9], 9, special=2), kept_lengths([2, 2], 8, special=3)
    ([3, 5], [3, 4], [2, 2])
    """
    space = length - special
    if space < 0:
        raise ValueError(f"length {length} leaves no room: the special tokens alone are {special}")
    if sum(sizes) <= space:
        return sizes
    if len(sizes) == 1:
        return [space]
    short = min(sizes)
    short, long = (short, space - short) if 2 * short <= space else (space // 2, space - space // 2)
    return [short, long] if sizes[0] <= sizes[1] else [long, short]


def _encoding(rust: RustEncoding) -> Encoding:
    spans = [None if special else span for special, span in zip(rust.special_tokens_mask, rust.offsets, strict=True)]
    return Encoding(list(rust.ids), list(rust.type_ids), spans)


MARIAN_FILES = ("source.spm", "target.spm", "vocab.json")


@dataclass(frozen=True)
class MarianEngine:
    """Marian's files as an engine: pieces of the source language's model, ids from a vocabulary of both languages.

    A piece is looked up by its text: one that the vocabulary lacks is unknown, and a letter unknown to the source
    language may still have the id that the target language gave it.
    """

    source: Any  # SentencePieceProcessor
    words: Mapping[str, int]
    added: Mapping[int, AddedToken]  # laid over `words`
    names: Mapping[str, str]  # role → special token
    extra: tuple[str, ...]  # special tokens without a role
    clean: bool  # close up spaces before punctuation when decoding
    contents: Mapping[str, bytes] = field(repr=False)  # of the files, to be saved as they are

    @classmethod
    def read(cls, folder: Folder, names: Mapping[str, str], extra: tuple[str, ...]) -> MarianEngine:
        """Read source.spm and vocab.json; target.spm is only kept to be saved."""
        if folder.switch("separate_vocabs", False):
            raise ValueError(f"{folder.path} has a vocabulary for each language (separate_vocabs): not supported")
        file = folder.path / "vocab.json"
        words = read_object(file)
        if not words or not all(type(number) is int and 0 <= number < 1 << 31 for number in words.values()):
            raise ValueError(f"{file} must hold an object of token: id")
        for role in ("unk", "eos"):
            if role not in names or (role == "unk" and names[role] not in words):
                raise ValueError(f"{file} must hold the {role}_token, and lacks {names.get(role)!r}")
        contents = {name: (folder.path / name).read_bytes() for name in MARIAN_FILES}
        read_sentencepiece(folder.path / "source.spm")  # refuses a broken file before C++ sees it
        with parsing(str(folder.path / "source.spm"), "is not a sentencepiece model"):
            source = sentencepiece_library().SentencePieceProcessor(model_proto=contents["source.spm"])
        # Special tokens get the vocabulary's ids, or new ones at its end.
        added = dict(folder.added)
        present = {token.content for token in added.values()}
        new = 1 + max([*words.values(), *added], default=-1)
        for text in dict.fromkeys([*names.values(), *extra]):
            if text not in present:
                number = words.get(text, new)
                new = max(new, number + 1)
                added[number] = rust_library().AddedToken(text, normalized=False, special=True)
        clean = bool(folder.switch("clean_up_tokenization_spaces", False))
        return cls(source, words, added, names, extra, clean, contents)

    @property
    def size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        return len(self.words.keys() | self._added_ids.keys())

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.content: number for number, token in self.added.items()}

    @cached_property
    def _tokens(self) -> dict[int, str]:
        """id → token."""
        tokens = {number: text for text, number in self.words.items()}
        return tokens | {number: token.content for number, token in self.added.items()}

    @cached_property
    def _unsplit(self) -> re.Pattern[str]:
        """Matches tokens that are taken out of the text before it is split, the longest first."""
        return re.compile("(" + "|".join(map(re.escape, sorted(self._added_ids, key=len, reverse=True))) + ")")

    def _ids(self, text: str) -> list[int]:
        tokens: list[str] = []
        for part in filter(None, self._unsplit.split(text)):
            if part in self._added_ids:
                tokens.append(part)
                continue
            language = re.match(r">>.*?<<", part, re.DOTALL)  # the language to translate into
            tokens += [language[0]] if language else []
            with parsing("source.spm"):
                tokens += self.source.encode(part[language.end() if language else 0 :], out_type=str)
        unknown = self.words[self.names["unk"]]
        return [self._added_ids.get(token, self.words.get(token, unknown)) for token in tokens]

    def encode(self, items: Sequence[Item], special: bool) -> list[Encoding]:
        """Encode texts and pairs; `special`: end each with the end token."""
        return [self._framed([self._ids(text) for text in texts_of(item)], special) for item in items]

    def truncate(self, item: Item, length: int, side: str) -> Encoding:
        """Encode one text or pair and drop tokens on `side` until, with the end token, at most `length` are left."""
        parts = [self._ids(text) for text in texts_of(item)]
        kept = kept_lengths([len(part) for part in parts], length, special=1)
        return self._framed(
            [part[:n] if side == "right" else part[len(part) - n :] for part, n in zip(parts, kept, strict=True)], True
        )

    def _framed(self, parts: list[list[int]], special: bool) -> Encoding:
        ids = [number for part in parts for number in part]
        if special:
            ids.append(self._added_ids[self.names["eos"]])
        return Encoding(ids, [0] * len(ids), [None] * len(ids))

    def decode(self, ids: list[int], special: bool) -> str:
        """Join ids; `special`: keep the special tokens."""
        text, pieces = "", []
        special_tokens = {*self.names.values(), *self.extra}
        for token in (self._tokens[number] for number in ids):
            if token not in special_tokens:
                pieces.append(token)
            elif special:
                text += self.source.decode_pieces(pieces) + token + " "
                pieces = []
        text = (text + self.source.decode_pieces(pieces)).replace(SPACE, " ").strip()
        return clean_spaces(text) if self.clean else text

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None."""
        return self._added_ids.get(token, self.words.get(token))

    def label(self, number: int) -> str | None:
        """The token of an id with spaces for ▁, or None."""
        token = self._tokens.get(number)
        return token if token is None or number in self.added else token.replace(SPACE, " ")

    def files(self) -> dict[str, bytes]:
        """The vocabulary as files: name → content."""
        return dict(self.contents)


Engine = Pipeline | MarianEngine
