"""A `tokenizers` pipeline (normalise, split, cut into pieces, frame with special tokens) behind six small methods.

It carries no state from call to call: padding is done elsewhere, and truncation on the pieces, so that threads may
share one pipeline. It does not know which files it was built from.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

from regard.parsing import parsing

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["Engine", "Item", "Pieces", "Pipeline", "byte_letters", "clean_spaces", "room", "shares"]

Item = str | tuple[str, str]
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Encoding:
    """One text, or a pair, cut: ids, token types, and where each came from (None for what the text does not hold)."""

    ids: list[int]
    types: list[int]
    spans: list[tuple[int, int] | None]


class Engine(Protocol):
    """What cuts text into ids and joins ids into text."""

    @property
    def size(self) -> int:
        """Tokens in the vocabulary, added ones included."""

    @property
    def added(self) -> Mapping[int, AddedToken]:
        """Tokens beside the vocabulary, by id."""

    def encode(self, items: Sequence[Item], special: bool) -> list[Encoding]:
        """Cut texts and pairs; `special`: frame them with the special tokens."""

    def cut(self, item: Item, length: int, side: str) -> Encoding:
        """Cut one text or pair and drop pieces on `side` until, framed, at most `length` are left."""

    def decode(self, ids: list[int], special: bool) -> str:
        """Join ids; `special`: keep the special tokens."""

    def id_of(self, token: str) -> int | None:
        """The id of a token, None where there is none."""

    def label(self, number: int) -> str | None:
        """The token of an id as people read it, None where there is none."""

    def files(self) -> dict[str, bytes]:
        """The vocabulary as files: name → content."""


@dataclass(frozen=True)
class Pipeline:
    """A `tokenizers.Tokenizer` as an engine.

    clean: close up spaces before punctuation when joining.  ending: what stands for a space at the end of a word.
    where: the directory it was read from, for errors. What is wrong with a file may show only when a text is cut.
    """

    rust: RustTokenizer
    clean: bool = False
    ending: str = ""
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
        """Cut texts and pairs; `special`: frame them with the special tokens."""
        with parsing(self.where):
            return [_pieces(found) for found in self.rust.encode_batch(list(items), add_special_tokens=special)]

    def cut(self, item: Item, length: int, side: str) -> Encoding:
        """Cut one text or pair and drop pieces on `side` until, framed, at most `length` are left."""
        pair = isinstance(item, tuple)
        with parsing(self.where):
            parts = [self.rust.encode(text, add_special_tokens=False) for text in (item if pair else (item,))]
            frame = self.rust.num_special_tokens_to_add(pair)
        kept = shares([len(part) for part in parts], room(length, frame))
        with parsing(self.where):
            for part, n in zip(parts, kept, strict=True):
                part.truncate(n, direction=side)
            return _pieces(self.rust.post_process(parts[0], parts[1] if pair else None))

    def decode(self, ids: list[int], special: bool) -> str:
        """Join ids; `special`: keep the special tokens."""
        with parsing(self.where):
            text = str(self.rust.decode(ids, skip_special_tokens=not special))
        text = text.replace(self.ending, " ").strip() if self.ending else text
        return clean_spaces(text) if self.clean else text

    def id_of(self, token: str) -> int | None:
        """The id of a token, None where there is none."""
        return self.rust.token_to_id(token)

    def label(self, number: int) -> str | None:
        """The token of an id as people read it, None where there is none."""
        token = self.rust.id_to_token(number)
        if token is None or number in self.added:
            return token
        if "ByteLevel" in self._joins:
            letters = byte_letters()
            ends = self.ending if self.ending and token.endswith(self.ending) else ""
            token = token.removesuffix(ends)
            known = all(letter in letters for letter in token)
            text = bytes(letters[letter] for letter in token).decode(errors="backslashreplace") if known else token
            text += " " if ends else ""
        elif "ByteFallback" in self._joins and (byte := BYTE.fullmatch(token)):
            text = bytes([int(byte[1], 16)]).decode(errors="backslashreplace")
        else:
            text = token.replace("▁", " ") if "▁" in self._joins else token
        return unicodedata.normalize("NFC", text)  # letters of Hangul that a lower-casing vocabulary took apart

    @cached_property
    def _joins(self) -> frozenset[str]:
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


def room(length: int, frame: int) -> int:
    """Pieces that fit beside `frame` special tokens; ValueError where not even those do."""
    if length < frame:
        raise ValueError(f"length {length} leaves no room: the special tokens alone are {frame}")
    return length - frame


def shares(sizes: list[int], space: int) -> list[int]:
    """How many pieces of one text, or of each of two, are kept: the longer gives way first.

    >>> shares([3, 9], 8), shares([9, 9], 7), shares([2, 2], 8)
    ([3, 5], [3, 4], [2, 2])
    """
    if sum(sizes) <= space:
        return sizes
    if len(sizes) == 1:
        return [space]
    short = min(sizes)
    short, long = (short, space - short) if 2 * short <= space else (space // 2, space - space // 2)
    return [short, long] if sizes[0] <= sizes[1] else [long, short]


def _pieces(found: Encoding) -> Encoding:
    framed = found.special_tokens_mask
    spans = [None if frame else span for frame, span in zip(framed, found.offsets, strict=True)]
    return Encoding(list(found.ids), list(found.type_ids), spans)
