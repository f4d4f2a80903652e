"""Text to ids and back, with exactly the ids that transformers gives for the same files.

    tokenizer = Tokenizer.open("directory")     # tokenizer.json, or the older file sets
    batch = tokenizer.batch(["두 문장", "a sentence"], pad="left")
    tokenizer.decode(batch.ids[0])

Axis letters: B texts, N positions. A mask is boolean, True = token. It does not know any model: how many positions
one has, or what its vocabulary's rows mean, is the model's own affair.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from regard.atomic_files import atomic_file
from regard.data.pipelines import Encoding, Item
from regard.data.tokenizer_files import ROLES
from regard.data.tokenizer_loading import TokenizerParts, open_directory
from regard.parsing import parsing

__all__ = ["Batch", "Encoded", "Sides", "SpecialIds", "Tokenizer"]

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Encoded:
    """One text, or a pair, as ids.

    types: token types, 1 for the second text where the family tells them apart.  tokens: labels that people can read.
    offsets: (start, end) of each token in its own text, in characters; None where the text does not hold it.
    """

    ids: list[int]
    types: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int] | None]


@dataclass(frozen=True)
class BatchEncoding:
    """Several texts as ids, padded to one length: ids (B, N) int64, mask (B, N) bool, types (B, N) int64."""

    ids: Tensor
    mask: Tensor
    types: Tensor


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the named special tokens; None where there is none."""

    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    unk: int | None = None


@dataclass(frozen=True)
class PaddingSides:
    """On which side the checkpoint pads and truncates."""

    pad: Side
    cut: Side


class Tokenizer:
    r"""A checkpoint's tokenizer.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "vocab.txt").write_text("[PAD] [UNK] [CLS] [SEP] [MASK] a cat ##s".replace(" ", "\n"))
    ...     tokenizer = Tokenizer.open(folder)
    >>> tokenizer.encode("A cats").ids
    [2, 5, 6, 7, 3]
    >>> tokenizer.batch(["cat", "a cat"], pad="left").mask.int()
    tensor([[0, 1, 1, 1],
            [1, 1, 1, 1]], dtype=torch.int32)
    >>> tokenizer.decode([2, 6, 7, 3]), tokenizer.tokens([6, 7]), tokenizer.ids_of.mask
    ('cats', ['cat', '##s'], 4)

    size: tokens in the vocabulary, added ones included.  ids_of: ids of the special tokens by role.  sides: where the
    checkpoint pads and truncates.  longest: positions it was made for, None where it does not say.
    """

    def __init__(self, opened: TokenizerParts) -> None:
        self._opened = opened
        self._engine = opened.engine
        self.size = opened.engine.size
        self.ids_of = SpecialIds(**{role: self._role(role) for role in ROLES})
        self.sides = PaddingSides(opened.pad, opened.cut)  # type: ignore[arg-type]
        self.longest = opened.folder.longest

    @classmethod
    def open(cls, directory: str | Path) -> Tokenizer:
        r"""Open the tokenizer in a directory.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "vocab.txt").write_text("[PAD] [UNK] [CLS] [SEP] [MASK] a cat ##s".replace(" ", "\n"))
        ...     Tokenizer.open(folder).encode("A cats").tokens
        ['[CLS]', 'a', 'cat', '##s', '[SEP]']

        Raises ValueError where there are no tokenizer files, or broken ones, or ones of a kind that is not known;
        ImportError where the library `tokenizers` is missing.
        """
        with parsing(str(directory)):
            return cls(open_directory(Path(directory)))

    def encode(self, text: str, second: str | None = None, *, special: bool = True) -> Encoded:
        """Cut one text, or a pair, into tokens.

        special: frame the text with the special tokens, as the model expects.

        Raises TypeError where a text is not a str, ValueError where it is not valid Unicode.
        """
        item = _item(text if second is None else (text, second), "text")
        pieces = self._engine.encode([item], special)[0]
        return Encoded(pieces.ids, pieces.types, self.tokens(pieces.ids), pieces.spans)

    def batch(
        self,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        *,
        pad: Side | None = None,
        length: int | None = None,
        truncate: bool = False,
    ) -> BatchEncoding:
        """Cut texts, or pairs of texts, and pad them to the longest.

        pad: the side to pad on; None is the checkpoint's own. A vocabulary without a padding token pads with its end
        token, or with 0: the mask hides it.  length: the most tokens a row may have.  truncate: drop tokens, on the
        side `sides.cut`, of what is longer than `length` (None: than `longest`).

        Raises ValueError where there are no texts, or one is longer than `length` and `truncate` is off; TypeError
        where they are not texts.
        """
        if pad not in (None, "left", "right"):
            raise ValueError(f'pad must be "left" or "right", got {pad!r}')
        rows = self._rows(checked_texts(texts), self._limit(length, truncate), truncate)
        return self._padded(rows, self.sides.pad if pad is None else pad)

    def decode(self, ids: Sequence[int] | Tensor, *, special: bool = False) -> str:
        """Join the tokens of ids (N,) into text.

        special: keep the special tokens.

        Raises TypeError where ids are not integers, ValueError where one is not in the vocabulary.
        """
        numbers = _numbers(ids)
        self.tokens(numbers)
        return self._engine.decode(numbers, special)

    def tokens(self, ids: Sequence[int] | Tensor) -> list[str]:
        r"""Labels of ids (N,): spaces and bytes decoded, so that Hangul reads as Hangul.

        A token that holds part of a character only shows its bytes: "\xec\x95".

        Raises TypeError where ids are not integers, ValueError where one is not in the vocabulary.
        """
        labels = []
        for number in _numbers(ids):
            label = self._engine.label(number) if 0 <= number < 1 << 32 else None
            if label is None:
                raise ValueError(f"id {number} is not in the vocabulary of {self.size} tokens")
            labels.append(label)
        return labels

    def save(self, directory: str | Path) -> None:
        """Write files from which transformers, and `open`, make the same tokenizer; the directory is made."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._settings(), ensure_ascii=False, indent=2) + "\n"
        for name, content in {**self._engine.files(), "tokenizer_config.json": text.encode()}.items():
            with atomic_file(folder / name, "the tokenizer") as file:
                file.write(content)

    def __repr__(self) -> str:
        return f"Tokenizer({self._opened.class_name}, {self.size} tokens)"

    # ------------------------------------------------------------------------------------------------------------ parts

    def _role(self, role: str) -> int | None:
        name = self._opened.names.get(role)
        return None if name is None else self._engine.id_of(name)

    def _limit(self, length: int | None, truncate: bool) -> int | None:
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise ValueError(f"length must be a whole number of at least 1, got {length!r}")
        if truncate and length is None and self.longest is None:
            raise ValueError("truncate=True needs a length: the checkpoint does not say how many tokens it takes")
        return self.longest if truncate and length is None else length

    def _rows(self, items: list[Item], limit: int | None, truncate: bool) -> list[Encoding]:
        rows = self._engine.encode(items, True)
        if limit is None:
            return rows
        for n, (item, row) in enumerate(zip(items, rows, strict=True)):
            if len(row.ids) > limit and not truncate:
                raise ValueError(
                    f"text {n} has {len(row.ids)} tokens, but length is {limit}: shorten it, or pass truncate=True"
                )
            if len(row.ids) > limit:
                rows[n] = self._engine.cut(item, limit, self.sides.cut)
        return rows

    def _padded(self, rows: list[Encoding], side: Side) -> BatchEncoding:
        fill = next((n for n in (self.ids_of.pad, self.ids_of.eos) if n is not None), 0)
        shape = len(rows), max(len(row.ids) for row in rows)  # (B, N)
        batch = BatchEncoding(
            torch.full(shape, fill), torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
        )
        for n, row in enumerate(rows):
            size = len(row.ids)
            at = slice(0, size) if side == "right" else slice(shape[1] - size, shape[1])
            batch.ids[n, at], batch.mask[n, at] = torch.tensor(row.ids, dtype=torch.long), True
            batch.types[n, at] = torch.tensor(row.types, dtype=torch.long)
        return batch

    def _settings(self) -> dict[str, Any]:
        """tokenizer_config.json: as it was read, with all special and added tokens spelt out."""
        opened = self._opened
        inside = ("add_bos_token", "add_eos_token", "additional_special_tokens")  # these are in tokenizer.json now
        kept = {key: value for key, value in opened.folder.values.items() if key not in inside and _plain(value)}
        names = {f"{role}_token" if role in ROLES else role: text for role, text in opened.names.items()}
        added = {str(number): _state(token) for number, token in sorted(self._engine.added.items())}
        extra = (
            {} if isinstance(kept.get("extra_special_tokens"), dict) else {"extra_special_tokens": list(opened.extra)}
        )
        sides = {"padding_side": opened.pad, "truncation_side": opened.cut}
        return {**kept, **names, **extra, **sides, "added_tokens_decoder": added, "tokenizer_class": opened.class_name}


def _plain(value: object) -> bool:
    """Can it be written as JSON?"""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _state(token: Any) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def checked_texts(texts: object) -> list[Item]:
    """The texts or pairs of a batch. Raises TypeError or ValueError naming the one that is no text."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"a batch is a list of texts or of pairs, got {type(texts).__name__}: {texts!r:.60}")
    if not texts:
        raise ValueError("a batch needs at least one text, got an empty list")
    return [_item(text, f"text {n}") for n, text in enumerate(texts)]


def _item(value: object, name: str) -> Item:
    for text in value if isinstance(value, tuple) and len(value) == 2 else (value,):
        if not isinstance(text, str):
            raise TypeError(
                f"{name} must be a str, or a tuple of two, got {type(text).__name__}: {text!r:.60}"
                + (". Decode bytes first: text.decode()" if isinstance(text, bytes) else "")
            )
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise ValueError(f"{name} holds half a character at {problem.start}: {text[problem.start]!r}") from None
    return value  # type: ignore[return-value]


def _numbers(ids: object) -> list[int]:
    if isinstance(ids, Tensor):
        ids = ids.tolist() if not ids.is_floating_point() and ids.dtype != torch.bool else [ids.dtype]
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
        raise TypeError(f"ids must be a list or a tensor of integers (N,), got {type(ids).__name__}: {ids!r:.60}")
    for number in ids:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"ids must be integers (N,), got {type(number).__name__}: {number!r:.60}")
    return list(ids)
