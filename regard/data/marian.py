"""Marian's tokenizer: pieces from the source language's sentencepiece model, ids from a vocabulary of both languages.

A piece is looked up by its text: one that the vocabulary lacks is unknown, and a letter unknown to the source language
may still have the id that the target language gave it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from regard.data.pipelines import Encoding, Item, clean_spaces, kept_lengths
from regard.data.tokenizer_files import Folder, read_object, rust_library, sentencepiece_library
from regard.data.vocabularies import SPACE, read_sentencepiece
from regard.files import parsing

if TYPE_CHECKING:
    from tokenizers import AddedToken

__all__ = ["FILES", "MarianEngine"]

FILES = ("source.spm", "target.spm", "vocab.json")


@dataclass(frozen=True)
class MarianEngine:
    """Marian's files as an engine.

    Args:
        source: the source language's SentencePieceProcessor.
        words: token → id.
        added: id → token laid over `words`.
        names: role → special token.
        extra: special tokens without a role.
        clean: close up spaces before punctuation when decoding.
        contents: file name → bytes, to be saved as they are.
    """

    source: Any
    words: Mapping[str, int]
    added: Mapping[int, AddedToken]
    names: Mapping[str, str]
    extra: tuple[str, ...]
    clean: bool
    contents: Mapping[str, bytes] = field(repr=False)

    @classmethod
    def read(cls, folder: Folder, names: Mapping[str, str], extra: tuple[str, ...]) -> MarianEngine:
        """Read source.spm and vocab.json; target.spm is only kept to be saved.

        Raises:
            ValueError: a file is broken, or asks for something that is not supported.
        """
        if folder.switch("separate_vocabs", False):
            raise ValueError(f"{folder.path} has a vocabulary for each language (separate_vocabs): not supported")
        file = folder.path / "vocab.json"
        words = read_object(file)
        if not words or not all(type(number) is int and 0 <= number < 1 << 31 for number in words.values()):
            raise ValueError(f"{file} must hold an object of token: id")
        for role in ("unk", "eos"):
            if role not in names or (role == "unk" and names[role] not in words):
                raise ValueError(f"{file} must hold the {role}_token, and lacks {names.get(role)!r}")
        contents = {name: (folder.path / name).read_bytes() for name in FILES}
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
        return [self._framed([self._ids(text) for text in _texts(item)], special) for item in items]

    def truncate(self, item: Item, length: int, side: str) -> Encoding:
        """Encode one text or pair and drop tokens on `side` until, with the end token, at most `length` are left."""
        parts = [self._ids(text) for text in _texts(item)]
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


def _texts(item: Item) -> tuple[str, ...]:
    return (item,) if isinstance(item, str) else item
