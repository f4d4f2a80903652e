"""Text to ids and back, with exactly the ids that transformers gives for the same files.

    tokenizer = Tokenizer.open("directory")     # tokenizer.json, or the older file sets
    batch = tokenizer.batch(["두 문장", "a sentence"], pad="left")
    tokenizer.decode(batch.ids[0])

Axis letters: B texts, N positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from regard.data.pipelines import Item
from regard.data.tokenizer_files import ROLES
from regard.data.tokenizer_loading import TokenizerParts, open_directory
from regard.files import atomic_file, parsing

__all__ = ["BatchEncoding", "Encoded", "PaddingSides", "SpecialIds", "Tokenizer", "checked_texts"]

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Encoded:
    """One text, or a pair, as ids.

    Args:
        ids: of the tokens.
        types: token types, 1 for the second text if the family distinguishes them.
        tokens: readable labels.
        offsets: (start, end) of each token in its own text, in characters; None for a token that is not in the text.
    """

    ids: list[int]
    types: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int] | None]


@dataclass(frozen=True)
class BatchEncoding:
    """Texts as ids, padded to one length: ids (B, N) int64, mask (B, N) bool (True = token), types (B, N) int64."""

    ids: Tensor
    mask: Tensor
    types: Tensor


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens by role, or None."""

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

    Attributes:
        size: tokens in the vocabulary, added ones included.
        ids_of: ids of the special tokens by role.
        sides: where the checkpoint pads and truncates.
        longest: the number of positions it was made for, or None.
    """

    def __init__(self, opened: TokenizerParts) -> None:
        self._opened = opened
        self._engine = opened.engine
        self.size = opened.engine.size
        names = {role: name for role, name in opened.names.items() if role in ROLES}
        self.ids_of = SpecialIds(**{role: opened.engine.id_of(name) for role, name in names.items()})
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

        Raises:
            ValueError: there are no tokenizer files, they are broken, or of an unknown kind.
            ImportError: `tokenizers` or `sentencepiece` is not installed.
        """
        with parsing(str(directory)):
            return cls(open_directory(Path(directory)))

    def encode(self, text: str, second: str | None = None, *, special: bool = True) -> Encoded:
        """Encode one text, or a pair.

        Args:
            text: the text.
            second: the second text of a pair.
            special: add the special tokens that the model expects around a text.

        Raises:
            TypeError: a text is not a str.
            ValueError: a text is not valid Unicode.
        """
        item = _checked(text if second is None else (text, second), "text")
        row = self._engine.encode([item], special)[0]
        return Encoded(row.ids, row.types, self.tokens(row.ids), row.spans)

    def batch(
        self,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        *,
        pad: Side | None = None,
        length: int | None = None,
        truncate: bool = False,
    ) -> BatchEncoding:
        """Encode texts, or pairs of texts, and pad them to the longest.

        Args:
            texts: the texts or pairs.
            pad: the side to pad on; default is the checkpoint's. Without a padding token the end token, or 0, is used.
            length: the most tokens a row may have.
            truncate: drop tokens beyond `length` (default: beyond `longest`) on the side `sides.cut`.

        Raises:
            ValueError: there are no texts, or one is longer than `length` and `truncate` is off.
            TypeError: they are not texts.
        """
        if pad not in (None, "left", "right"):
            raise ValueError(f'pad must be "left" or "right", got {pad!r}')
        items = checked_texts(texts)
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise ValueError(f"length must be a whole number of at least 1, got {length!r}")
        if truncate and length is None and self.longest is None:
            raise ValueError("truncate=True needs a length: the checkpoint has no model_max_length")
        limit = self.longest if truncate and length is None else length
        rows = self._engine.encode(items, True)
        for n, (item, row) in enumerate(zip(items, rows, strict=True)):
            if limit is not None and len(row.ids) > limit:
                if not truncate:
                    raise ValueError(
                        f"text {n} has {len(row.ids)} tokens, but length is {limit}: shorten it, or pass truncate=True"
                    )
                rows[n] = self._engine.truncate(item, limit, self.sides.cut)
        fill = next((n for n in (self.ids_of.pad, self.ids_of.eos) if n is not None), 0)
        shape = len(rows), max(len(row.ids) for row in rows)  # (B, N)
        ids, types = torch.full(shape, fill), torch.zeros(shape, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.bool)
        for n, row in enumerate(rows):
            size = len(row.ids)
            left = (self.sides.pad if pad is None else pad) == "left"
            at = slice(shape[1] - size, shape[1]) if left else slice(0, size)
            ids[n, at], mask[n, at] = torch.tensor(row.ids, dtype=torch.long), True
            types[n, at] = torch.tensor(row.types, dtype=torch.long)
        return BatchEncoding(ids, mask, types)

    def decode(self, ids: Sequence[int] | Tensor, *, special: bool = False) -> str:
        """Join the tokens of ids (N,) into text.

        Args:
            ids: a list or a tensor.
            special: keep the special tokens.

        Raises:
            TypeError: ids are not integers.
            ValueError: an id is not in the vocabulary.
        """
        numbers = _numbers(ids)
        self.tokens(numbers)
        return self._engine.decode(numbers, special)

    def tokens(self, ids: Sequence[int] | Tensor) -> list[str]:
        r"""Labels of ids (N,) with spaces and bytes decoded, so that Hangul reads as Hangul.

        A token that is part of a character shows its bytes: "\xec\x95".

        Raises:
            TypeError: ids are not integers.
            ValueError: an id is not in the vocabulary.
        """
        labels = []
        for number in _numbers(ids):
            label = self._engine.label(number) if 0 <= number < 1 << 32 else None
            if label is None:
                raise ValueError(f"id {number} is not in the vocabulary of {self.size} tokens")
            labels.append(label)
        return labels

    def save(self, directory: str | Path) -> None:
        """Write files from which transformers, and `open`, make the same tokenizer; creates the directory."""
        # tokenizer_config.json: as it was read, with all special and added tokens spelt out
        opened = self._opened
        inside = ("add_bos_token", "add_eos_token", "additional_special_tokens")  # these are in tokenizer.json now
        config = {key: value for key, value in opened.folder.values.items() if key not in inside and _is_json(value)}
        config |= {f"{role}_token" if role in ROLES else role: text for role, text in opened.names.items()}
        if not isinstance(config.get("extra_special_tokens"), dict):
            config["extra_special_tokens"] = list(opened.extra)
        flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        config |= {
            "padding_side": opened.pad,
            "truncation_side": opened.cut,
            "added_tokens_decoder": {
                str(number): {flag: getattr(token, flag) for flag in flags}
                for number, token in sorted(self._engine.added.items())
            },
            "tokenizer_class": opened.class_name,
        }
        text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**self._engine.files(), "tokenizer_config.json": text.encode()}.items():
            with atomic_file(folder / name, "the tokenizer") as file:
                file.write(content)

    def __repr__(self) -> str:
        return f"Tokenizer({self._opened.class_name}, {self.size} tokens)"


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def checked_texts(texts: object) -> list[Item]:
    """The texts or pairs of a batch. Raises TypeError or ValueError naming the one that is not text."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"a batch is a list of texts or of pairs, got {type(texts).__name__}: {texts!r:.60}")
    if not texts:
        raise ValueError("a batch needs at least one text, got an empty list")
    return [_checked(text, f"text {n}") for n, text in enumerate(texts)]


def _checked(value: object, name: str) -> Item:
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
