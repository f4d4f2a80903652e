"""Engines that encode and decode text: the interface, and the one for pipelines of the `tokenizers` library."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

from regard.files import parsing

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Encoding as RustEncoding
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["Encoding", "Engine", "Item", "Pipeline", "clean_spaces", "kept_lengths"]

Item = str | tuple[str, str]
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Encoding:
    """One text or pair: ids, token types, and (start, end) in the text, None for a token that is not in the text."""

    ids: list[int]
    types: list[int]
    spans: list[tuple[int, int] | None]


class Engine(Protocol):
    """Encodes and decodes text."""

    @property
    def size(self) -> int:
        """Tokens in the vocabulary, added ones included."""

    @property
    def added(self) -> Mapping[int, AddedToken]:
        """Tokens beside the vocabulary, by id."""

    def encode(self, items: Sequence[Item], special: bool) -> list[Encoding]:
        """Encode texts and pairs; `special`: with the special tokens around them."""

    def truncate(self, item: Item, length: int, side: str) -> Encoding:
        """Encode one text or pair and drop tokens on `side` until at most `length` are left, special ones included."""

    def decode(self, ids: list[int], special: bool) -> str:
        """Join ids; `special`: keep the special tokens."""

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None."""

    def label(self, number: int) -> str | None:
        """The token of an id as people read it, or None."""

    def files(self) -> dict[str, bytes]:
        """The vocabulary as files: name → content."""


@dataclass(frozen=True)
class Pipeline:
    """A `tokenizers.Tokenizer` as an engine. It keeps no state between calls, so threads may share it.

    Args:
        rust: the tokenizer; its own padding and truncation are turned off.
        clean: close up spaces before punctuation when decoding.
        word_end: suffix of a word's last piece, a space in text.
        where: the directory it was read from, for errors: some damage shows only when a text is encoded.
    """

    rust: RustTokenizer
    clean: bool = False
    word_end: str = ""
    where: str = "the tokenizer"

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
        pair = isinstance(item, tuple)
        with parsing(self.where):
            parts = [self.rust.encode(text, add_special_tokens=False) for text in (item if pair else (item,))]
            special = self.rust.num_special_tokens_to_add(pair)
        kept = kept_lengths([len(part) for part in parts], length, special)
        with parsing(self.where):
            for part, n in zip(parts, kept, strict=True):
                part.truncate(n, direction=side)
            return _encoding(self.rust.post_process(parts[0], parts[1] if pair else None))

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


@cache
def byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible letter (Radford et al. 2019): letter → byte.

    >>> byte_letters()["Ġ"], byte_letters()["a"]
    (32, 97)
    """
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

    Raises:
        ValueError: the special tokens alone are more than `length`.
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
