"""A tokenizer's files: the JSON files beside a vocabulary, vocabularies, and the kinds of tokenizer they declare.

As in transformers, `tokenizer_config.json` decides. Without an `added_tokens_decoder` it is an old one: then
`special_tokens_map.json` is laid over it, and `added_tokens.json` and the added tokens of `tokenizer.json` count.
`config.json` names the kind if the others do not. transformers builds the pipeline of a kind from the vocabulary and
the switches in tokenizer_config.json even if tokenizer.json spells out a whole pipeline; so do we, so that ids agree
where the two contradict each other.

    BertTokenizer        WordPiece       vocab.txt                 BERT, DistilBERT, BLIP
    GPT2Tokenizer        byte-level BPE  vocab.json, merges.txt    GPT-2
    RobertaTokenizer     byte-level BPE  vocab.json, merges.txt    RoBERTa, BART
    CLIPTokenizer        byte-level BPE  vocab.json, merges.txt    CLIP
    T5Tokenizer          unigram         spiece.model              T5, mT5
    AlbertTokenizer      unigram         spiece.model              ALBERT
    XLMRobertaTokenizer  unigram         sentencepiece.bpe.model   XLM-R
    LlamaTokenizer       BPE             tokenizer.model           LLaMA 1 and 2
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from regard.files import MOST_JSON, parsing, read_bounded, read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

INSTALL = "pip install 'regard[models]'"
SWITCHES = ("lstrip", "normalized", "rstrip", "single_word", "special")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Named special tokens, in the order in which transformers gives ids to those that the vocabulary lacks."""


def rust_library() -> Any:
    """The `tokenizers` library with its submodules. Raises ImportError that says how to install it."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
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


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} if there is no file. Raises ValueError if it is broken or not an object."""
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, and holds a {type(value).__name__}")
    return value


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
        config, model = read_object(path / "tokenizer_config.json"), read_object(path / "config.json")
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
            for key, value in read_object(path / "special_tokens_map.json").items():
                values[key] = _tokens_in(path, key, value)
            _check_tokens(path, values)
            # added_tokens.json does not say which tokens are special: those with a role are
            table = read_object(path / "added_tokens.json")
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

    def extra_tokens(self, folder: Folder, listed: list[Any]) -> list[Any]:
        """Special tokens without a role, given those that the files list."""
        return listed

    def token(self, folder: Folder, names: Names, role: str) -> str:
        """The special token of a role. Raises ValueError if the files set it to null."""
        if role not in names:
            raise ValueError(f"{folder.path}: {self.class_name} needs a {role}_token, and the files set it to null")
        return names[role]


class BertKind(Kind):
    """WordPiece."""

    class_name = "BertTokenizer"
    files = ("vocab.txt",)
    model = "WordPiece"
    defaults: ClassVar[Names] = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}

    def read(self, folder: Folder) -> Vocabulary:
        """vocab.txt: one token a line."""
        file = folder.path / "vocab.txt"
        with parsing(str(file)):
            return Vocabulary(rust_library().models.WordPiece.from_file(str(file), unk_token="[UNK]"))

    def build(self, folder: Folder, vocabulary: Vocabulary, names: Names) -> RustTokenizer:
        """Words and punctuation, lower case unless switched off; ## inside words."""
        library, model = rust_library(), vocabulary.model
        model.unk_token = names.get("unk", "[UNK]")
        model.continuing_subword_prefix, model.max_input_chars_per_word = "##", 100
        rust: RustTokenizer = library.Tokenizer(model)
        rust.normalizer = library.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=bool(folder.switch("tokenize_chinese_chars", True)),
            strip_accents=folder.switch("strip_accents", None),
            lowercase=bool(folder.switch("do_lower_case", True)),
        )
        rust.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        rust.decoder = library.decoders.WordPiece(prefix="##")
        return rust

    def set_template(self, rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
        """[CLS] A [SEP] B [SEP]."""
        cls, sep = self.token(folder, names, "cls"), self.token(folder, names, "sep")
        add_template(rust, f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", {cls: cls, sep: sep})


class GPT2Kind(Kind):
    """Byte-level BPE."""

    class_name = "GPT2Tokenizer"
    files = ("vocab.json", "merges.txt")
    model = "BPE"
    defaults: ClassVar[Names] = {"unk": "<|endoftext|>", "bos": "<|endoftext|>", "eos": "<|endoftext|>"}

    def read(self, folder: Folder) -> Vocabulary:
        """vocab.json and merges.txt: token → id, and pairs to merge, best first."""
        files = [str(folder.path / name) for name in self.files]
        blank = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
        with parsing(f"{folder.path}:", "vocab.json and merges.txt do not fit together"):
            return Vocabulary(rust_library().models.BPE.from_file(*files, fuse_unk=False, **blank))

    def build(self, folder: Folder, vocabulary: Vocabulary, names: Names) -> RustTokenizer:
        """Words as bytes, which are all known, the space before a word in it."""
        library, model = rust_library(), vocabulary.model
        model.unk_token, model.dropout, model.ignore_merges = None, None, False
        model.fuse_unk = model.byte_fallback = False
        rust: RustTokenizer = library.Tokenizer(model)
        prefix = bool(folder.switch("add_prefix_space", False))
        rust.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        rust.decoder = library.decoders.ByteLevel()
        return rust


class RobertaKind(GPT2Kind):
    """GPT-2's BPE, framed with <s> and </s>."""

    class_name = "RobertaTokenizer"
    defaults: ClassVar[Names] = {
        "bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>",
    }  # fmt: skip

    def set_template(self, rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
        """<s> A </s> </s> B </s>."""
        sep, cls = self.token(folder, names, "sep"), self.token(folder, names, "cls")
        rust.post_processor = rust_library().processors.RobertaProcessing(
            (sep, rust.token_to_id(sep)),
            (cls, rust.token_to_id(cls)),
            trim_offsets=bool(folder.switch("trim_offsets", True)),
            add_prefix_space=bool(folder.switch("add_prefix_space", False)),
        )


class CLIPKind(GPT2Kind):
    """Byte-level BPE of lower-case words that end in </w>."""

    class_name = "CLIPTokenizer"
    defaults: ClassVar[Names] = {
        "unk": "<|endoftext|>", "bos": "<|startoftext|>", "eos": "<|endoftext|>", "pad": "<|endoftext|>",
    }  # fmt: skip
    word_end = "</w>"
    # simple_tokenizer.py of openai/CLIP: English endings, words, single digits, runs of other signs
    words = r"<\|startoftext\|>|<\|endoftext\|>|'(?:s|t|re|ve|m|ll|d)|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"

    def build(self, folder: Folder, vocabulary: Vocabulary, names: Names) -> RustTokenizer:
        """Lower case and single spaces, then words as bytes, with a suffix at their end."""
        library, model = rust_library(), vocabulary.model
        model.unk_token, model.dropout, model.ignore_merges = names.get("unk"), None, False
        model.fuse_unk = model.byte_fallback = False
        model.continuing_subword_prefix, model.end_of_word_suffix = "", self.word_end
        rust: RustTokenizer = library.Tokenizer(model)
        make, split = library.normalizers, library.pre_tokenizers
        rust.normalizer = make.Sequence([make.NFC(), make.Replace(library.Regex(r"\s+"), " "), make.Lowercase()])
        words = split.Split(library.Regex(self.words), behavior="removed", invert=True)
        rust.pre_tokenizer = split.Sequence([words, split.ByteLevel(add_prefix_space=False)])
        rust.decoder = library.decoders.ByteLevel()
        return rust

    def set_template(self, rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
        """<|startoftext|> A <|endoftext|>."""
        eos, bos = self.token(folder, names, "eos"), self.token(folder, names, "bos")
        rust.post_processor = rust_library().processors.RobertaProcessing(
            (eos, rust.token_to_id(eos)), (bos, rust.token_to_id(bos)), trim_offsets=False, add_prefix_space=False
        )


class UnigramKind(Kind):
    """Unigram pieces of a sentencepiece file within words, each word with its ▁."""

    files = ("spiece.model",)
    model = "Unigram"
    unknown_id: ClassVar[int]

    def read(self, folder: Folder) -> Vocabulary:
        """The sentencepiece file, with what the family adds to its pieces."""
        file = folder.path / self.files[0]
        proto = read_sentencepiece(file)
        pieces = self.pieces(folder, [(piece.piece, piece.score) for piece in proto.pieces])
        if len(pieces) <= self.unknown_id:
            raise ValueError(f"{file} has {len(pieces)} pieces, and the unknown token's id is {self.unknown_id}")
        model = rust_library().models.Unigram(pieces, unk_id=self.unknown_id, byte_fallback=False)
        return Vocabulary(model, sentencepiece=proto)

    def pieces(self, folder: Folder, pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
        """The vocabulary, given the file's pieces and scores."""
        return pieces

    def normalizers(self, folder: Folder) -> list[Any]:
        """Steps before sentencepiece's own normalisation."""
        return []

    def prefix_space(self, folder: Folder) -> bool:
        """Whether the first word has its ▁ too."""
        return bool(folder.switch("add_prefix_space", True))

    def build(self, folder: Folder, vocabulary: Vocabulary, names: Names) -> RustTokenizer:
        """sentencepiece's normalisation, split at spaces, ▁ in front of words."""
        library, model = rust_library(), vocabulary.model
        try:
            unknown = [piece.id for piece in model.tokenize("\U0010ffff")]  # a character that no vocabulary has
        except Exception:  # no id at all for the unknown
            unknown = []
        if unknown != [self.unknown_id]:  # tokenizer.json has another id for it, or bytes in its place
            pieces = [(text, score) for text, score in json.loads(model.__getstate__())["vocab"]]
            model = library.models.Unigram(pieces, unk_id=self.unknown_id, byte_fallback=False)
        rust: RustTokenizer = library.Tokenizer(model)
        steps, characters = self.normalizers(folder), vocabulary.character_map
        steps += [library.normalizers.Precompiled(characters)] if characters else []
        if steps:
            rust.normalizer = library.normalizers.Sequence(steps)
        scheme = "always" if self.prefix_space(folder) else "never"
        spaces = library.pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
        rust.pre_tokenizer = library.pre_tokenizers.Sequence([library.pre_tokenizers.WhitespaceSplit(), spaces])
        rust.decoder = library.decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
        return rust


class T5Kind(UnigramKind):
    """Unigram with sentinels for the spans that pretraining masks."""

    class_name = "T5Tokenizer"
    defaults: ClassVar[Names] = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    unknown_id = 2

    def pieces(self, folder: Folder, pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
        """The file's pieces, then <extra_id_99> … <extra_id_0>."""
        return [*pieces, *((text, 0.0) for text in reversed(self.sentinels(folder)))]

    def sentinels(self, folder: Folder) -> list[str]:
        """<extra_id_0>, <extra_id_1> …, as many as extra_ids says."""
        count = folder.values.get("extra_ids", 100)
        if not isinstance(count, int) or not 0 <= count <= 10_000:
            file = folder.path / "tokenizer_config.json"
            raise ValueError(f"extra_ids in {file} must be 0 to 10000, got {count!r:.80}")
        return [f"<extra_id_{n}>" for n in range(count)]

    def prefix_space(self, folder: Folder) -> bool:
        """Always."""
        return True

    def set_template(self, rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
        """A </s> B </s>."""
        add_template(rust, "$A </s>", "$A </s> $B </s>", {"</s>": self.token(folder, names, "eos")})

    def extra_tokens(self, folder: Folder, listed: list[Any]) -> list[Any]:
        """The sentinels, unless the files list them."""
        return listed if any("<extra_id_" in text_of(token) for token in listed) else listed + self.sentinels(folder)


class AlbertKind(UnigramKind):
    """Unigram without accents and capitals, framed as BERT."""

    class_name = "AlbertTokenizer"
    defaults: ClassVar[Names] = {
        "bos": "[CLS]", "eos": "[SEP]", "sep": "[SEP]", "cls": "[CLS]", "unk": "<unk>", "pad": "<pad>",
        "mask": "[MASK]",
    }  # fmt: skip
    unknown_id = 1

    def normalizers(self, folder: Folder) -> list[Any]:
        """One kind of quotation mark; accents and capitals removed unless switched off."""
        make = rust_library().normalizers
        steps = [make.Replace("``", '"'), make.Replace("''", '"')]
        if not folder.switch("keep_accents", False):
            steps += [make.NFKD(), make.StripAccents()]
        return [*steps, make.Lowercase()] if folder.switch("do_lower_case", True) else steps

    def set_template(self, rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
        """As BERT, unless tokenizer.json or add_bos_token and add_eos_token decide otherwise."""
        switched = vocabulary.whole is None and bool({"add_bos_token", "add_eos_token"} & set(folder.values))
        if switched or (vocabulary.whole is not None and vocabulary.whole.post_processor is not None):
            return
        tokens = {"[CLS]": self.token(folder, names, "cls"), "[SEP]": self.token(folder, names, "sep")}
        add_template(rust, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", tokens)


class XLMRobertaKind(UnigramKind):
    """Unigram with RoBERTa's special tokens and ids in fairseq's order."""

    class_name = "XLMRobertaTokenizer"
    files = ("sentencepiece.bpe.model",)
    defaults: ClassVar[Names] = RobertaKind.defaults
    unknown_id = 3

    def pieces(self, folder: Folder, pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
        """<s>, <pad>, </s>, <unk>, the file's pieces after its first three, <mask>."""
        texts = {role: text_of(token) for role, token in folder.named(self.defaults).items()}
        first = [(texts.get(role, self.defaults[role]), 0.0) for role in ("bos", "pad", "eos", "unk")]
        return [*first, *pieces[3:], (texts.get("mask", self.defaults["mask"]), 0.0)]

    def set_template(self, rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
        """<s> A </s> </s> B </s>."""
        bos, eos = self.token(folder, names, "bos"), self.token(folder, names, "eos")
        add_template(rust, f"{bos} $A {eos}", f"{bos} $A {eos} {eos} $B {eos}", {bos: bos, eos: eos})


class LlamaKind(Kind):
    """sentencepiece BPE with bytes for unknown characters."""

    class_name = "LlamaTokenizer"
    model = "BPE"
    defaults: ClassVar[Names] = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
    padding_side = "left"

    def read(self, folder: Folder) -> Vocabulary:
        """tokenizer.model."""
        proto = read_sentencepiece(folder.path / "tokenizer.model")
        return Vocabulary(sentencepiece_bpe(proto, byte_fallback=True), sentencepiece=proto)

    def build(self, folder: Folder, vocabulary: Vocabulary, names: Names) -> RustTokenizer:
        """One ▁ in front of the text; with `legacy`, also after each special token."""
        library, model = rust_library(), vocabulary.model
        model.unk_token, model.dropout, model.ignore_merges = None, None, False
        model.fuse_unk = model.byte_fallback = True
        rust: RustTokenizer = library.Tokenizer(model)
        prefix = folder.switch("add_prefix_space", None) is not False
        scheme = ("always" if folder.switch("legacy", False) else "first") if prefix else "never"
        rust.pre_tokenizer = library.pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
        make = library.decoders
        steps = [make.Replace(SPACE, " "), make.ByteFallback(), make.Fuse()]
        rust.decoder = make.Sequence([*steps, make.Strip(content=" ", left=1)] if prefix else steps)
        return rust


def add_template(rust: RustTokenizer, single: str, pair: str, tokens: Names) -> None:
    """tokens: name in the template → text in the vocabulary."""
    known = [(name, rust.token_to_id(text)) for name, text in tokens.items()]
    rust.post_processor = rust_library().processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)


AS_FILED = Kind()
BERT, GPT2, ROBERTA, CLIP, LLAMA = BertKind(), GPT2Kind(), RobertaKind(), CLIPKind(), LlamaKind()
T5, ALBERT, XLM_ROBERTA = T5Kind(), AlbertKind(), XLMRobertaKind()
KINDS = {kind.class_name: kind for kind in (BERT, GPT2, ROBERTA, CLIP, T5, ALBERT, XLM_ROBERTA, LLAMA)} | {
    "DistilBertTokenizer": BERT,
    "BartTokenizer": ROBERTA,
    "PreTrainedTokenizer": AS_FILED,
    "TokenizersBackend": AS_FILED,
}
"""Class names that checkpoints declare, without "Fast"."""

MODEL_TYPES = {
    "bert": BERT, "blip": BERT, "distilbert": BERT, "albert": ALBERT, "gpt2": GPT2, "roberta": ROBERTA, "bart": ROBERTA,
    "clip": CLIP, "t5": T5, "mt5": T5, "xlm-roberta": XLM_ROBERTA, "llama": AS_FILED,
}  # fmt: skip
"""The kind of a checkpoint that declares its model_type only, as in transformers."""

OVERRULED = ("mistral", "mixtral", "phi3", "qwen2")
"""Model types whose declared class transformers ignores: tokenizer.json is taken as it is."""
