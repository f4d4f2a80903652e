"""A sentencepiece model file (`spiece.model`, `tokenizer.model`, `source.spm`): its pieces, and how it normalises text.

The file is one protobuf message. Of it we read what decides ids and leave the trainer's notes alone:

    1 pieces (repeated)   1 text   2 score   3 type
    2 trainer             3 algorithm   24 space as suffix   35 byte pieces   40-42 ids   44-47 unknown, bos, eos
    3 normaliser          2 character map   3 space in front   4 extra spaces removed

Every length is checked against what is there: a cut file is refused, not read past its end.
It does not know `tokenizers`, nor which family a file belongs to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["CONTROL", "NORMAL", "SPACE", "UNKNOWN", "USER_DEFINED", "Piece", "SentencePieceFile", "normalise"]

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
ALGORITHMS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5  # protobuf wire types


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its place in the file is its id."""

    text: str
    score: float = 0.0
    type: int = NORMAL


@dataclass(frozen=True)
class SentencePieceFile:
    """What a sentencepiece model file holds.

    >>> SentencePieceFile.parse(bytes([0x0A, 0x03, 0x0A, 0x01, 0x61])).pieces
    (Piece(text='a', score=0.0, type=1),)

    algorithm: "unigram", "bpe", "word" or "char".  characters: the precompiled character map; empty means none.
    """

    pieces: tuple[Piece, ...]
    algorithm: str = "unigram"
    byte_fallback: bool = False
    space_is_suffix: bool = False
    unknown_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    unknown: str = "<unk>"
    bos: str = "<s>"
    eos: str = "</s>"
    unknown_surface: str = " ⁇ "
    characters: bytes = b""
    space_in_front: bool = True
    extra_spaces_removed: bool = True

    @classmethod
    def read(cls, path: Path) -> SentencePieceFile:
        """Read a file; ValueError, naming it, where it is cut, holds no pieces or is something else."""
        try:
            return cls.parse(path.read_bytes())
        except ValueError as problem:
            raise ValueError(f"{path} is not a whole sentencepiece model: {problem}") from None

    @classmethod
    def parse(cls, data: bytes) -> SentencePieceFile:
        """Read the message; ValueError where it is cut short or holds no pieces."""
        pieces, trainer, normaliser = [], b"", b""
        for number, value in _fields(data):
            if number == 1:
                pieces.append(_piece(_bytes(value)))
            elif number == 2:
                trainer = _bytes(value)
            elif number == 3:
                normaliser = _bytes(value)
        if not pieces:
            raise ValueError("it holds no pieces")
        if len({piece.text for piece in pieces}) != len(pieces):
            raise ValueError("a piece stands in it twice")
        return _with_specs(tuple(pieces), dict(_fields(trainer)), dict(_fields(normaliser)))

    @cached_property
    def trie(self) -> tuple[memoryview, bytes]:
        """The character map: the units of its double array, and the zero-ended replacements they point into."""
        if len(self.characters) < 4:
            raise ValueError("the character map of the sentencepiece model is cut short")
        (size,) = struct.unpack_from("<I", self.characters)
        if size % 4 or size == 0 or 4 + size > len(self.characters):
            raise ValueError("the character map of the sentencepiece model is cut short")
        return memoryview(self.characters)[4 : 4 + size].cast("I"), self.characters[4 + size :]


def _with_specs(
    pieces: tuple[Piece, ...], trainer: dict[int, int | bytes], normaliser: dict[int, int | bytes]
) -> SentencePieceFile:
    algorithm = _int(trainer.get(3, 1))
    if algorithm not in ALGORITHMS:
        raise ValueError(f"its algorithm is number {algorithm}, and {ALGORITHMS} are known")
    return SentencePieceFile(
        pieces,
        algorithm=ALGORITHMS[algorithm],
        byte_fallback=bool(_int(trainer.get(35, 0))),
        space_is_suffix=bool(_int(trainer.get(24, 0))),
        unknown_id=_int(trainer.get(40, 0)),
        bos_id=_int(trainer.get(41, 1)),
        eos_id=_int(trainer.get(42, 2)),
        unknown_surface=_text(trainer.get(44, " ⁇ ".encode())),
        unknown=_text(trainer.get(45, b"<unk>")),
        bos=_text(trainer.get(46, b"<s>")),
        eos=_text(trainer.get(47, b"</s>")),
        characters=_bytes(normaliser.get(2, b"")),
        space_in_front=bool(_int(normaliser.get(3, 1))),
        extra_spaces_removed=bool(_int(normaliser.get(4, 1))),
    )


# ------------------------------------------------------------------------------------------------------------- protobuf


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: an int for a varint, bytes for all else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == VARINT:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if wire == LENGTH:
            size, at = _varint(data, at)
        elif wire in (FOUR_BYTES, EIGHT_BYTES):
            size = 4 if wire == FOUR_BYTES else 8
        else:
            raise ValueError(f"at byte {at} stands a field of wire type {wire}, which no such file has")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes begins at byte {at}, but only {len(data) - at} bytes are left")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, the low ones first, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"the number that begins before byte {at} does not end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _piece(data: bytes) -> Piece:
    found = dict(_fields(data))
    score = _bytes(found.get(2, bytes(4)))
    if len(score) != 4:
        raise ValueError(f"a piece's score has {len(score)} bytes instead of 4")
    return Piece(_text(found.get(1, b"")), struct.unpack("<f", score)[0], _int(found.get(3, NORMAL)))


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a number was expected where bytes stand")
    return value - (1 << 64) if value >= 1 << 63 else value  # negative ids are sent as 64-bit complements


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("bytes were expected where a number stands")
    return value


def _text(value: int | bytes) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError:
        raise ValueError("a piece is not UTF-8") from None


# -------------------------------------------------------------------------------------------------------- normalisation


def normalise(file: SentencePieceFile, text: str) -> str:
    """Text as sentencepiece sees it: characters mapped, spaces thinned out and written ▁.

    >>> normalise(SentencePieceFile(()), "  two  words ")
    '▁two▁words'

    Raises ValueError where the file's character map is cut short.
    """
    out = "".join(_mapped(file, text))
    if file.extra_spaces_removed:
        out = " ".join(part for part in out.split(" ") if part)
    if file.space_in_front and text:
        out = " " + out
    out = out.replace(" ", SPACE)
    return out.rstrip(SPACE) if file.extra_spaces_removed else out  # a ▁ typed by the writer at the end goes, too


def _mapped(file: SentencePieceFile, text: str) -> Iterator[str]:
    """The text, the longest prefix that the character map knows replaced, again and again."""
    if not file.characters:
        yield text
        return
    units, replacements = file.trie
    data, at = text.encode(), 0
    while at < len(data):
        size, start = _longest(units, data, at)
        if size:
            end = replacements.find(b"\0", start)
            yield replacements[start : end if end >= 0 else len(replacements)].decode()
        else:  # unknown to the map: one character, as it is
            size = _width(data[at])
            yield data[at : at + size].decode()
        at += size


def _longest(units: memoryview, data: bytes, at: int) -> tuple[int, int]:
    """Length in bytes of the longest known prefix of data[at:], and where its replacement starts; (0, 0) if none.

    The double array is that of darts-clone: a unit holds an offset, a label and whether a value hangs below it.
    """
    found, node = (0, 0), _offset(units[0])
    for n in range(at, len(data)):
        node ^= data[n]
        if node >= len(units) or units[node] & 0x800000FF != data[n]:
            break
        unit = units[node]
        node ^= _offset(unit)
        if unit >> 8 & 1:
            if node >= len(units):
                break
            found = (n + 1 - at, units[node] & 0x7FFFFFFF)
    return found


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 512) >> 6)


def _width(first: int) -> int:
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
