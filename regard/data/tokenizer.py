"""Text to ids and back, with exactly the ids that transformers gives for the same files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data.tokenizer_kinds import (
    AS_FILED,
    BERT,
    KINDS,
    MARIAN_FILES,
    MODEL_TYPES,
    OVERRULED,
    XLM_ROBERTA,
    MarianEngine,
)
from regard.data.tokenizer_pipeline import (
    ROLES,
    Folder,
    Item,
    Kind,
    Pipeline,
    Vocabulary,
    add_template,
    read_tokenizer_json,
    rust_library,
    text_of,
)
from regard.files import atomic_file
from regard.formats import MOST_JSON, parsing, read_bounded

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

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
    """Texts as ids, padded to one length."""

    input_ids: Tensor  # (B, N) int64
    attention_mask: Tensor  # (B, N) bool, True = token
    token_type_ids: Tensor  # (B, N) int64

    def to(self, device: torch.device) -> BatchEncoding:
        """The same on another device."""
        return BatchEncoding(*(getattr(self, each.name).to(device) for each in fields(self)))


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
    >>> tokenizer.batch(["cat", "a cat"], pad="left").attention_mask.int()
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

    def __init__(
        self,
        engine: Pipeline | MarianEngine,
        folder: Folder,
        class_name: str,  # that transformers opens it with
        names: Mapping[str, str],  # role → special token
        extra: Sequence[str],  # special tokens without a role
        *,
        pad: str = "right",
        cut: str = "right",
    ) -> None:
        self._engine, self._folder, self._class_name, self._names, self._extra = (
            engine,
            folder,
            class_name,
            names,
            extra,
        )
        self.size = engine.size
        self.ids_of = SpecialIds(**{role: engine.id_of(name) for role, name in names.items() if role in ROLES})
        sides = folder.side("padding_side", pad), folder.side("truncation_side", cut)
        self.sides = PaddingSides(*sides)  # type: ignore[arg-type]
        self.longest = folder.longest

    @classmethod
    def open(cls, directory: str | Path) -> Tokenizer:
        """Open the tokenizer in a directory.

        Raises:
            ValueError: there are no tokenizer files, they are broken, or of an unknown kind.
            ImportError: `tokenizers` or `sentencepiece` is not installed.
        """
        with parsing(str(directory)):
            return open_directory(Path(directory))

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
        side = self.sides.pad if pad is None else pad

        def padded(lists: list[list[int]], value: int) -> Tensor:  # (B, N)
            tensors = [torch.tensor(one, dtype=torch.long) for one in lists]
            return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)

        ids, types = padded([row.ids for row in rows], fill), padded([row.types for row in rows], 0)
        lengths, places = torch.tensor([[len(row.ids)] for row in rows]), torch.arange(ids.shape[1])
        mask = places < lengths if side == "right" else places >= ids.shape[1] - lengths  # (B, N)
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
        inside = ("add_bos_token", "add_eos_token", "additional_special_tokens")  # these are in tokenizer.json now
        config: dict[str, Any] = {}
        for key, value in self._folder.values.items():
            with suppress(TypeError):  # a token, which is listed below
                json.dumps(value)
                config |= {} if key in inside else {key: value}
        config |= {f"{role}_token" if role in ROLES else role: text for role, text in self._names.items()}
        if not isinstance(config.get("extra_special_tokens"), dict):
            config["extra_special_tokens"] = list(self._extra)
        flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        config |= {
            "padding_side": self.sides.pad,
            "truncation_side": self.sides.cut,
            "added_tokens_decoder": {
                str(number): {flag: getattr(token, flag) for flag in flags}
                for number, token in sorted(self._engine.added.items())
            },
            "tokenizer_class": self._class_name,
        }
        text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**self._engine.files(), "tokenizer_config.json": text.encode()}.items():
            with atomic_file(folder / name, "the tokenizer") as file:
                file.write(content)

    def __repr__(self) -> str:
        return f"Tokenizer({self._class_name}, {self.size} tokens)"


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


# ---------------------------------------------------------------------------------------- from a directory to an engine

FILE_SETS = (
    "tokenizer.json", "vocab.txt", "vocab.json + merges.txt", "spiece.model", "tokenizer.model",
    "sentencepiece.bpe.model", "source.spm + target.spm + vocab.json",
)  # fmt: skip


def open_directory(path: Path) -> Tokenizer:
    """Read the files and build the engine."""
    rust_library()
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: give one that holds {', '.join(FILE_SETS)}")
    file = path / "tokenizer.json"
    data = read_bounded(file, MOST_JSON) if file.is_file() else None
    json = None if data is None else read_tokenizer_json(file, data)
    folder = Folder.read(path, {} if json is None or json.whole is None else json.whole.get_added_tokens_decoder())
    # Two sentencepiece files and a vocabulary: Marian, whatever tokenizer.json says
    declared = (folder.class_name or "MarianTokenizer") == "MarianTokenizer" and folder.model_type in ("marian", None)
    if declared and all((path / name).is_file() for name in MARIAN_FILES):
        named = folder.named({"eos": "</s>", "unk": "<unk>", "pad": "<pad>"})
        names = {role: text_of(token) for role, token in named.items()}
        extra = tuple(text_of(token) for token in folder.extra)
        engine = MarianEngine.read(folder, names, extra)
        folder = replace(folder, values={"model_max_length": 512, **folder.values})
        return Tokenizer(engine, folder, "MarianTokenizer", names, extra)
    kind = _kind(folder, json, data)
    return _open_kind(kind, folder, json or kind.read(folder))


def _kind(folder: Folder, json: Vocabulary | None, data: bytes | None) -> Kind:
    """What the files declare; else the only kind that reads the files that are there."""
    if folder.model_type in OVERRULED:
        declared: Kind | None = AS_FILED
    elif folder.class_name is not None:
        declared = KINDS.get(folder.class_name)
    else:
        declared = None if folder.model_type is None else MODEL_TYPES.get(folder.model_type)
    if json is not None and data is not None:
        if declared is None or declared.model != type(json.model).__name__:
            return AS_FILED  # whoever made the file, it was not the declared class
        byte_level = declared.class_name == "LlamaTokenizer" and b'"ByteLevel"' in data
        return AS_FILED if byte_level else declared  # LLaMA 3 files declare the class of LLaMA 2
    classes = ", ".join(sorted({*KINDS, "MarianTokenizer"} - {"PreTrainedTokenizer", "TokenizersBackend"}))
    if declared is None and folder.class_name is not None:
        raise ValueError(
            f"{folder.path} declares {folder.class_name:.80}, whose older files are not supported; supported are "
            f"{classes}. Save it as tokenizer.json with transformers"
        )
    for kind in (declared, BERT, XLM_ROBERTA):
        if kind is not None and all((folder.path / name).is_file() for name in kind.files):
            return kind
    names = {part for files in FILE_SETS for part in files.split(" + ")}
    there = sorted(name for name in names if (folder.path / name).is_file())
    if not there:
        raise ValueError(f"{folder.path} holds no tokenizer: looked for {', '.join(FILE_SETS)}")
    raise ValueError(
        f"{folder.path} holds {', '.join(there)}: a file is missing, or several kinds of tokenizer have such files. "
        f'Then name one in tokenizer_config.json: {{"tokenizer_class": …}} with one of {classes}'
    )


def _open_kind(kind: Kind, folder: Folder, vocabulary: Vocabulary) -> Tokenizer:
    whole = vocabulary.whole
    # 1. Special tokens: those with a role, and others.
    tokens = folder.named({**vocabulary.defaults, **kind.defaults})
    names = {role: text_of(token) for role, token in tokens.items()}
    extra = folder.extra
    if "extra_special_tokens" not in folder.values:
        listed = vocabulary.special_tokens
        extra = kind.extra_tokens(folder, extra if listed is None else listed)
    # 2. The pipeline, the added tokens, and the special tokens around a text.
    rust: RustTokenizer
    if kind is AS_FILED and whole is not None:
        rust = whole
    else:
        rust = kind.build(folder, vocabulary, names)
        if whole is not None and whole.post_processor is not None:
            rust.post_processor = whole.post_processor
    rust.add_tokens(_added_tokens(rust, folder, tokens, extra))
    switches = {} if whole is not None else folder.values
    if rust.post_processor is None or "add_bos_token" in switches or "add_eos_token" in switches:
        bos = names.get("bos") if switches.get("add_bos_token") else None
        eos = names.get("eos") if switches.get("add_eos_token") else None
        first, second = (
            " ".join(f"{token}:{n}" for token in (bos, text, eos) if token) for n, text in enumerate(("$A", "$B"))
        )
        add_template(rust, first, f"{first} {second}", [token for token in (bos, eos) if token])
    kind.set_template(rust, folder, names, vocabulary)
    rust.encode_special_tokens = bool(folder.switch("split_special_tokens", False))
    # 3. What the checkpoint does by default.
    pad = str(whole.padding["direction"]) if whole is not None and whole.padding else kind.padding_side
    cut = str(whole.truncation["direction"]) if whole is not None and whole.truncation else "right"
    clean = bool(folder.switch("clean_up_tokenization_spaces", False))
    if type(rust.model).__name__ == "BPE":  # its spaces are its own
        for_bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        clean = clean and bool(folder.switch(for_bpe, False))
    # The declared class where transformers uses it: DistilBERT's leaves out token types, BERT's does not.
    declared = None if folder.class_name is None else KINDS.get(folder.class_name, AS_FILED)
    generic = folder.class_name in ("PreTrainedTokenizer", "TokenizersBackend")
    class_name = kind.class_name if declared is not kind or generic else str(folder.class_name)
    engine = Pipeline(rust, clean, kind.word_end, str(folder.path))
    return Tokenizer(engine, folder, class_name, names, [text_of(token) for token in extra], pad=pad, cut=cut)


def _added_tokens(rust: RustTokenizer, folder: Folder, named: Mapping[str, Any], extra: list[Any]) -> list[AddedToken]:
    """Tokens to add to the vocabulary, in the order that gives new ones the ids transformers gives them."""
    tokens: list[Any] = [folder.added[number] for number in sorted(folder.added)]
    known = {token.content for token in rust.get_added_tokens_decoder().values()} | {text_of(token) for token in tokens}
    for token in [*named.values(), *extra]:
        if text_of(token) not in known and token not in tokens:
            tokens.append(token)
    make, roles = rust_library().AddedToken, {text_of(token) for token in named.values()}
    added = [make(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in added:
        if token.content in roles and not token.special:
            token.special = True
    return added
