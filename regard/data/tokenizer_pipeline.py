"""From a tokenizer's files to a pipeline of the `tokenizers` library: the directory, its vocabulary, and `Pipeline`.

As in transformers, `tokenizer_config.json` decides. Without an `added_tokens_decoder` it is an old one: then
`special_tokens_map.json` is laid over it, and `added_tokens.json` and the added tokens of `tokenizer.json` count.
`config.json` names the kind if the others do not.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from regard.formats import MOST_JSON, parsing, read_bounded, read_optional_json

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Encoding as RustEncoding
    from tokenizers import Tokenizer as RustTokenizer

INSTALL = "pip install 'regard[models]'"
SWITCHES = ("lstrip", "normalized", "rstrip", "single_word", "special")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Named special tokens, in the order in which transformers gives ids to those that the vocabulary lacks."""


def rust_library() -> Any:
    """The `tokenizers` library with its submodules. Raises ImportError that says how to install it."""
    try:
        import tokenizers
    except ImportError as problem:
        raise ImportError(f"tokenizers need the tokenizers library ({problem}): {INSTALL}") from problem
    return tokenizers


def sentencepiece_library() -> Any:
    """The `sentencepiece` library with its message types. Raises ImportError that says how to install it."""
    try:
        library = import_module("sentencepiece")
        import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as problem:
        raise ImportError(
            f"sentencepiece models need the sentencepiece and protobuf libraries ({problem}): {INSTALL}"
        ) from problem
    return library


@dataclass(frozen=True)
class Folder:
    """A tokenizer's directory, without the vocabulary."""

    path: Path
    values: Mapping[str, Any]  # tokenizer_config.json, merged with the older files
    added: Mapping[int, AddedToken]
    class_name: str | None  # the declared class without "Fast"
    model_type: str | None  # of config.json

    @classmethod
    def read(cls, path: Path, vocabulary_added: Mapping[int, AddedToken]) -> Folder:
        """Read the files. vocabulary_added: the added tokens of tokenizer.json."""
        config = read_optional_json(path, "tokenizer_config.json", dict) or {}
        model = read_optional_json(path, "config.json", dict) or {}
        values = {key: _tokens_in(path, key, value) for key, value in config.items() if key != "added_tokens_decoder"}
        if "additional_special_tokens" in values and not values.get("extra_special_tokens"):
            values["extra_special_tokens"] = values.pop("additional_special_tokens")
        _check_tokens(path, values)
        added: dict[int, AddedToken] = {}
        if "added_tokens_decoder" in config:
            table = config["added_tokens_decoder"]
            if not isinstance(table, dict) or not all(key.isdecimal() for key in table):
                file = path / "tokenizer_config.json"
                raise ValueError(f"{file}: added_tokens_decoder must be an object of id: token")
            added = {int(key): _token(path, value) for key, value in table.items()}
        else:
            for key, value in (read_optional_json(path, "special_tokens_map.json", dict) or {}).items():
                values[key] = _tokens_in(path, key, value)
            _check_tokens(path, values)
            # added_tokens.json does not say which tokens are special: those with a role are
            table = read_optional_json(path, "added_tokens.json", dict) or {}
            if not all(isinstance(number, int) for number in table.values()):
                raise ValueError(f"{path / 'added_tokens.json'} must be an object of token: id")
            special = {text_of(values[f"{role}_token"]) for role in ROLES if values.get(f"{role}_token")}
            special |= {text_of(token) for token in values.get("extra_special_tokens") or []}
            make = rust_library().AddedToken
            for text, number in table.items():
                added[number] = make(text, normalized=text not in special, special=text in special)
            added |= vocabulary_added
        if values.get("fix_mistral_regex"):
            raise ValueError(f"{path / 'tokenizer_config.json'} asks for fix_mistral_regex, which is not supported")
        class_name = config.get("tokenizer_class") or model.get("tokenizer_class")
        if class_name is not None and not isinstance(class_name, str):
            raise ValueError(f"tokenizer_class of {path} must be the name of a class, got {class_name!r:.80}")
        return cls(path, values, added, class_name and class_name.removesuffix("Fast"), model.get("model_type"))

    def switch(self, name: str, default: bool | None) -> bool | None:
        """A setting that is true, false or null."""
        value = self.values.get(name, default)
        if value is not None and not isinstance(value, bool):
            file = self.path / "tokenizer_config.json"
            raise ValueError(f"{name} in {file} must be true or false, got {value!r:.80}")
        return value

    def side(self, name: str, default: str) -> str:
        """`padding_side` or `truncation_side`."""
        value = self.values.get(name, default)
        if value not in ("left", "right"):
            file = self.path / "tokenizer_config.json"
            raise ValueError(f"{name} in {file} must be left or right, got {value!r:.80}")
        return str(value)

    def named(self, defaults: Mapping[str, str | None]) -> dict[str, AddedToken | str]:
        """Named special tokens: the seven roles first (the files', else `defaults`), then others."""
        by_text = {token.content: token for token in self.added.values()}
        tokens: dict[str, Any] = {role: self.values.get(f"{role}_token", defaults.get(role)) for role in ROLES}
        for key, value in self.values.items():
            if key.endswith("_token") and key.removesuffix("_token") not in ROLES and not isinstance(value, bool):
                tokens[key] = value
        extra = self.values.get("extra_special_tokens")
        tokens |= extra if isinstance(extra, dict) else {}
        return {name: by_text.get(text_of(value), value) for name, value in tokens.items() if value is not None}

    @property
    def extra(self) -> list[AddedToken | str]:
        """Special tokens without a name."""
        for key in ("extra_special_tokens", "additional_special_tokens"):
            if key in self.values:
                value = self.values[key]
                return list(value) if isinstance(value, list) else []
        return []

    @property
    def longest(self) -> int | None:
        """model_max_length; None if missing or beyond 2**31 (transformers writes 1e30 for "unknown")."""
        value = self.values.get("model_max_length", self.values.get("max_len"))
        return int(value) if isinstance(value, (int, float)) and 0 < value < 1 << 31 else None


def text_of(token: AddedToken | str) -> str:
    """The text of a token."""
    return token if isinstance(token, str) else token.content


def _check_tokens(path: Path, values: Mapping[str, Any]) -> None:
    named = {key: value for key, value in values.items() if key.endswith("_token") and not isinstance(value, bool)}
    for key in ("extra_special_tokens", "additional_special_tokens"):
        group = values.get(key) or []
        if not isinstance(group, (list, dict)):
            raise ValueError(f"{key} of {path} must be a list or an object of tokens, got {group!r:.80}")
        named |= group if isinstance(group, dict) else {f"{key}[{n}]": value for n, value in enumerate(group)}
    for key, value in named.items():
        if value is not None and not isinstance(value, str) and not hasattr(value, "content"):
            raise ValueError(f"{key} of {path} must be text or a token, got {value!r:.80}")


def _tokens_in(path: Path, key: str, value: Any) -> Any:
    if isinstance(value, dict) and "content" in value:
        return _token(path, value, special=None if "__type" in value else True)
    if isinstance(value, list) and key in ("extra_special_tokens", "additional_special_tokens"):
        return [_tokens_in(path, "", item) for item in value]
    return value


def _token(path: Path, value: object, special: bool | None = None) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ValueError(f"{path}: a token must be an object with its text as content, got {value!r:.80}")
    flags = {key: flag for key, flag in value.items() if key not in ("__type", "content", "id")}
    if special is not None:
        flags["special"] = special
    if not all(key in SWITCHES and isinstance(flag, bool) for key, flag in flags.items()):
        raise ValueError(f"{path}: of the token {value!r:.80}, only the switches {', '.join(SWITCHES)} are known")
    token: AddedToken = rust_library().AddedToken(value["content"], **flags)
    return token


# ----------------------------------------------------------------------------------------------------------- vocabulary

SPACE = "▁"
MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
CONTROL, USER_DEFINED = 3, 4  # sentencepiece's ModelProto.SentencePiece.Type


@dataclass(frozen=True)
class Vocabulary:
    """A Rust model and the file it came from."""

    model: Any  # of `tokenizers.models`
    whole: RustTokenizer | None = None  # all of tokenizer.json
    sentencepiece: Any = None  # the file's ModelProto
    defaults: Mapping[str, str] = field(default_factory=dict)  # role → special token, as the file has it

    @property
    def special_tokens(self) -> list[Any] | None:
        """sentencepiece's control pieces (special) and user-defined pieces (not special); neither is ever split."""
        if self.sentencepiece is None:
            return None
        make = rust_library().AddedToken
        own = [piece for piece in self.sentencepiece.pieces if piece.type in (CONTROL, USER_DEFINED)]
        return [make(piece.piece, normalized=False, special=piece.type == CONTROL) for piece in own]

    @property
    def character_map(self) -> bytes:
        """sentencepiece's precompiled normalisation, from its file or from tokenizer.json; b"" for none."""
        if self.sentencepiece is not None:
            return bytes(self.sentencepiece.normalizer_spec.precompiled_charsmap)
        if self.whole is None or self.whole.normalizer is None:
            return b""
        state = json.loads(self.whole.normalizer.__getstate__())
        steps = [step for step in state.get("normalizers", [state]) if step.get("type") == "Precompiled"]
        return base64.b64decode(steps[0]["precompiled_charsmap"]) if steps else b""


def read_tokenizer_json(path: Path, data: bytes) -> Vocabulary:
    """Parse tokenizer.json. Raises ValueError that says what is wrong with the file."""
    try:
        with parsing(str(path)):
            whole = rust_library().Tokenizer.from_buffer(data)
    except ValueError as problem:
        # Rust only says that no variant matched
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: it is not JSON ({error})") from None
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ValueError(f"{path} cannot be read: it has no model") from None
        kind = content["model"].get("type")
        if kind not in (*MODELS, None):
            known = ", ".join(MODELS)
            raise ValueError(f"{path} cannot be read: its model is of type {kind!r}, and {known} are known") from None
        raise ValueError(str(problem)) from None
    padding = whole.padding
    return Vocabulary(whole.model, whole=whole, defaults={"pad": padding["pad_token"]} if padding else {})


def read_sentencepiece(path: Path) -> Any:
    """A sentencepiece model file as the ModelProto of sentencepiece's library."""
    proto = sentencepiece_library().sentencepiece_model_pb2.ModelProto
    with parsing(str(path), "is not a sentencepiece model"):
        model = proto.FromString(read_bounded(path, MOST_JSON))
        pieces = [piece.piece for piece in model.pieces]
        if not pieces:
            raise ValueError("it has no pieces")
        if not all(isinstance(text, str) for text in pieces):  # protobuf gives bytes for invalid UTF-8
            raise ValueError("a piece is not UTF-8")
        if len(set(pieces)) != len(pieces):
            raise ValueError("a piece is in it twice")
    return model


def sentencepiece_bpe(proto: Any, words: Mapping[str, int] | None = None, **options: Any) -> Any:
    """A BPE model with every way to join two pieces into a third, in the order of the pieces.

    words: piece → id; None numbers the file's pieces.  options: of `tokenizers.models.BPE`.
    """
    pieces = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    halves = ((text[:n], text[n:]) for text in pieces for n in range(1, len(text)))
    merges = [(left, right) for left, right in halves if left in pieces and right in pieces]
    return rust_library().models.BPE(pieces if words is None else words, merges, fuse_unk=True, **options)


Names = Mapping[str, str]
"""Role → text of the named special tokens."""


class Kind:
    """One class of tokenizers. The base class is "as filed": tokenizer.json, or an undeclared sentencepiece model."""

    class_name: ClassVar[str] = "PreTrainedTokenizerFast"  # in transformers
    files: ClassVar[tuple[str, ...]] = ("tokenizer.model",)  # read where there is no tokenizer.json
    model: ClassVar[str | None] = None  # the class of its Rust model; None for any
    defaults: ClassVar[Names] = {}  # role → special token, unless the files name another
    padding_side: ClassVar[str] = "right"  # unless the files name another
    word_end: ClassVar[str] = ""  # suffix of a word's last piece, a space in text
    template: ClassVar[tuple[str, ...]] = ()  # special tokens, by role, around a text and around a pair

    def read(self, folder: Folder) -> Vocabulary:
        """The vocabulary from `files`."""
        proto = read_sentencepiece(folder.path / "tokenizer.model")
        trainer = proto.trainer_spec
        roles = [role for role in ("bos", "eos", "unk") if getattr(trainer, f"{role}_id") >= 0]
        named = {role: getattr(trainer, f"{role}_piece") for role in roles}
        if trainer.model_type == trainer.UNIGRAM:
            pieces = [(piece.piece, piece.score) for piece in proto.pieces]
            model = rust_library().models.Unigram(pieces, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
        else:
            words = {piece.piece: number for number, piece in enumerate(proto.pieces)}
            for number, token in folder.added.items():  # placeholders get the names of the added tokens
                if number < len(proto.pieces) and token.content not in words:
                    del words[proto.pieces[number].piece]
                    words[token.content] = number
            model = sentencepiece_bpe(proto, words, unk_token=trainer.unk_piece, byte_fallback=trainer.byte_fallback)
        return Vocabulary(model, sentencepiece=proto, defaults=named)

    def build(self, folder: Folder, vocabulary: Vocabulary, names: Names) -> RustTokenizer:
        """The model with this kind's options, normaliser, pre-tokenizer and decoder."""
        rust: RustTokenizer = rust_library().Tokenizer(vocabulary.model)
        if vocabulary.sentencepiece is None:
            return rust
        make, library = rust_library().normalizers, rust_library().decoders
        mapped = [make.Precompiled(vocabulary.character_map)] if vocabulary.character_map else []
        rust.normalizer = make.Sequence([*mapped, make.Replace(" ", SPACE)])
        fallback = vocabulary.sentencepiece.trainer_spec.byte_fallback
        joins = [library.ByteFallback(), library.Fuse()] if fallback else []
        rust.decoder = library.Sequence([library.Replace(SPACE, " "), *joins])
        return rust

    def set_template(self, rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
        """Set the special tokens around a text, where tokenizer.json and add_bos_token/add_eos_token do not decide."""
        if self.template:
            roles = re.findall(r"\{(\w+)\}", self.template[1])
            tokens = {role: self.token(folder, names, role) for role in roles}
            single, pair = (text.format(**tokens) for text in self.template)
            add_template(rust, single, pair, tokens.values())

    def extra_tokens(self, folder: Folder, listed: list[Any]) -> list[Any]:
        """Special tokens without a role, given those that the files list."""
        return listed

    def token(self, folder: Folder, names: Names, role: str) -> str:
        """The special token of a role. Raises ValueError if the files set it to null."""
        if role not in names:
            raise ValueError(f"{folder.path}: {self.class_name} needs a {role}_token, and the files set it to null")
        return names[role]


def add_template(rust: RustTokenizer, single: str, pair: str, tokens: Iterable[str]) -> None:
    """Set the tokens around a text and around a pair, as `TemplateProcessing` of the library writes them."""
    known = [(token, rust.token_to_id(token)) for token in dict.fromkeys(tokens)]
    rust.post_processor = rust_library().processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)


# ------------------------------------------------------------------------------------------------------------- encoding

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
