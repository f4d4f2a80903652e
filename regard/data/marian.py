"""Marian's tokenizer: pieces from the source language's sentencepiece file, ids from a vocabulary of both languages.

A piece is looked up by its text, so a piece that the vocabulary lacks is unknown, and a letter unknown to the source
language may still have the id that the target language gave it. Text is normalised as sentencepiece does it, to the
byte (`sentencepiece_file.normalise`); Rust finds the best cut. It does not know pairs: a second text follows the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.data.pipelines import Encoding, Item, clean_spaces, room, shares
from regard.data.sentencepiece_file import CONTROL, NORMAL, SPACE, UNKNOWN, SentencePieceFile, normalise
from regard.data.tokenizer_files import Folder, read_object, rust_library
from regard.parsing import parsing

if TYPE_CHECKING:
    from tokenizers import AddedToken

__all__ = ["FILES", "MarianPieces"]

FILES = ("source.spm", "target.spm", "vocab.json")


@dataclass(frozen=True)
class MarianPieces:
    """Marian's files as an engine.

    words: text → id.  back: id → text.  added: tokens laid over it.  names: role → special token.
    """

    source: SentencePieceFile
    words: Mapping[str, int]
    back: Mapping[int, str]
    added: Mapping[int, AddedToken]
    names: Mapping[str, str]
    extra: tuple[str, ...]
    clean: bool
    contents: Mapping[str, bytes] = field(repr=False)

    @classmethod
    def read(cls, folder: Folder, names: Mapping[str, str], extra: tuple[str, ...]) -> MarianPieces:
        """Read source.spm and vocab.json; target.spm is kept to be saved.

        Raises ValueError where a file is broken or asks for what is not done here.
        """
        if folder.switch("separate_vocabs", False):
            raise ValueError(f"{folder.path} has a vocabulary for each language (separate_vocabs): not supported")
        words = _read_words(folder.path / "vocab.json")
        for role in ("unk", "eos"):
            if role not in names or (role == "unk" and names[role] not in words):
                raise ValueError(
                    f"{folder.path / 'vocab.json'} must hold the {role}_token, and lacks {names.get(role)!r}"
                )
        source = SentencePieceFile.read(folder.path / "source.spm")
        _check(folder.path / "source.spm", source)
        added = dict(folder.added)
        _add(added, words, [*names.values(), *extra])
        return cls(
            source=source,
            words=words,
            back={number: text for text, number in words.items()},
            added=added,
            names=names,
            extra=extra,
            clean=bool(folder.switch("clean_up_tokenization_spaces", False)),
            contents={name: (folder.path / name).read_bytes() for name in FILES},
        )

    @property
    def size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        return len(self.words.keys() | self._added_ids.keys())

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.content: number for number, token in self.added.items()}

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset([*self.names.values(), *self.extra])

    @cached_property
    def _model(self) -> Any:
        """The source language's pieces. What sentencepiece never matches in a text gets a text that cannot occur."""
        pieces = [
            (piece.text, piece.score) if piece.type == NORMAL else (f" {n}", 0.0)
            for n, piece in enumerate(self.source.pieces)
        ]
        with parsing("source.spm"):
            return rust_library().models.Unigram(pieces, unk_id=self.source.unknown_id, byte_fallback=False)

    @cached_property
    def _whole(self) -> re.Pattern[str] | None:
        """Tokens that are found in the text before it is cut, the longest first."""
        texts = sorted(self._added_ids, key=len, reverse=True)
        return re.compile("(" + "|".join(re.escape(text) for text in texts) + ")") if texts else None

    def _ids(self, text: str) -> list[int]:
        parts = self._whole.split(text) if self._whole else [text]
        return [number for part in parts if part for number in self._part(part)]

    def _part(self, text: str) -> list[int]:
        if text in self._added_ids:
            return [self._added_ids[text]]
        code = re.match(r">>.*?<<", text, re.DOTALL)  # the language to translate into
        pieces = [code[0]] if code else []
        with parsing("source.spm"):
            rest = normalise(self.source, text[len("".join(pieces)) :])
            pieces += [piece.value for piece in self._model.tokenize(rest)]
        unknown = self.words[self.names["unk"]]
        return [self._added_ids.get(piece, self.words.get(piece, unknown)) for piece in pieces]

    def encode(self, items: Sequence[Item], special: bool) -> list[Encoding]:
        """Cut texts and pairs; `special`: end each with the end token."""
        return [self._framed([self._ids(text) for text in _texts(item)], special) for item in items]

    def cut(self, item: Item, length: int, side: str) -> Encoding:
        """Cut one text or pair and drop pieces on `side` until, with the end token, at most `length` are left."""
        parts = [self._ids(text) for text in _texts(item)]
        kept = shares([len(part) for part in parts], room(length, 1))
        return self._framed(
            [part[:n] if side == "right" else part[len(part) - n :] for part, n in zip(parts, kept, strict=True)], True
        )

    def _framed(self, parts: list[list[int]], special: bool) -> Encoding:
        ids = [number for part in parts for number in part]
        if special:
            end = self.id_of(self.names["eos"])
            assert end is not None  # each special token has an id, in the vocabulary or at its end
            ids.append(end)
        return Encoding(ids, [0] * len(ids), [None] * len(ids))

    def decode(self, ids: list[int], special: bool) -> str:
        """Join ids; `special`: keep the special tokens."""
        out, pieces = "", []
        for token in (self._token(number) for number in ids):
            if token not in self._special:
                pieces.append(token)
            elif special:
                out += self._joined(pieces) + token + " "
                pieces = []
        text = (out + self._joined(pieces)).replace(SPACE, " ").strip()
        return clean_spaces(text) if self.clean else text

    @cached_property
    def _types(self) -> dict[str, int]:
        return {piece.text: piece.type for piece in self.source.pieces}

    def _joined(self, pieces: list[str]) -> str:
        """Pieces as sentencepiece joins them: no space in front, a sign for the unknown, nothing for controls."""
        file, text, first = self.source, "", True
        for piece in pieces:
            kind = self._types.get(piece)
            if kind is None or kind == UNKNOWN:
                text += piece if kind is None else file.unknown_surface
            elif kind != CONTROL:
                front = first and not text and (file.space_in_front or file.extra_spaces_removed)
                text += (piece.removeprefix(SPACE) if front else piece).replace(SPACE, " ")
                first = first and (file.extra_spaces_removed or not piece.startswith(SPACE))
        return text

    def _token(self, number: int) -> str:
        token = self.added[number].content if number in self.added else self.back.get(number)
        assert token is not None  # ids are checked before they come here
        return token

    def id_of(self, token: str) -> int | None:
        """The id of a token, None where there is none."""
        return self._added_ids.get(token, self.words.get(token))

    def label(self, number: int) -> str | None:
        """The token of an id as people read it, None where there is none."""
        if number in self.added:
            return self.added[number].content
        return self.back[number].replace(SPACE, " ") if number in self.back else None

    def files(self) -> dict[str, bytes]:
        """The vocabulary as files: name → content."""
        return dict(self.contents)


def _texts(item: Item) -> tuple[str, ...]:
    return (item,) if isinstance(item, str) else item


def _read_words(path: Path) -> dict[str, int]:
    words = read_object(path)
    if not words or not all(type(number) is int and 0 <= number < 1 << 31 for number in words.values()):
        raise ValueError(f"{path} must hold an object of token: id")
    return words


def _check(path: Path, file: SentencePieceFile) -> None:
    """Refuse what sentencepiece does with the file and this does not."""
    if file.algorithm != "unigram":
        raise ValueError(f"{path} is a {file.algorithm} model: of Marian's files, unigram ones are read")
    if file.byte_fallback or file.space_is_suffix or any(piece.type not in (1, 2, 3, 5) for piece in file.pieces):
        raise ValueError(f"{path} has byte pieces, user-defined pieces or spaces at the end of words: not supported")
    if not 0 <= file.unknown_id < len(file.pieces):
        raise ValueError(f"{path} has {len(file.pieces)} pieces, and its unknown piece is number {file.unknown_id}")


def _add(added: dict[int, AddedToken], words: Mapping[str, int], special: list[str]) -> None:
    """Lay the special tokens over the vocabulary, with new ids at its end where it lacks them."""
    have = {token.content for token in added.values()}
    new = 1 + max([*words.values(), *added], default=-1)
    for text in dict.fromkeys(special):
        if text in have:
            continue
        number = words.get(text, new)
        new = max(new, number + 1)
        added[number] = rust_library().AddedToken(text, normalized=False, special=True)
