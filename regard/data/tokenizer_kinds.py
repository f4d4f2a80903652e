"""The kinds of tokenizer that checkpoints declare: how each reads its vocabulary and builds its pipeline.

transformers builds the pipeline of a kind from the vocabulary and the switches in tokenizer_config.json even if
tokenizer.json spells out a whole pipeline; so do we, so that ids agree where the two contradict each other.

    BertTokenizer        WordPiece       vocab.txt                 BERT, DistilBERT, BLIP
    GPT2Tokenizer        byte-level BPE  vocab.json, merges.txt    GPT-2
    RobertaTokenizer     byte-level BPE  vocab.json, merges.txt    RoBERTa, BART
    CLIPTokenizer        byte-level BPE  vocab.json, merges.txt    CLIP
    T5Tokenizer          unigram         spiece.model              T5, mT5
    AlbertTokenizer      unigram         spiece.model              ALBERT
    XLMRobertaTokenizer  unigram         sentencepiece.bpe.model   XLM-R
    LlamaTokenizer       BPE             tokenizer.model           LLaMA 1 and 2

Marian's tokenizer is none of the `tokenizers` library: `MarianEngine` is in the place of a pipeline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from regard.data.tokenizer_pipeline import (
    SPACE,
    Encoding,
    Folder,
    Item,
    Kind,
    Names,
    Vocabulary,
    clean_spaces,
    kept_lengths,
    read_sentencepiece,
    rust_library,
    sentencepiece_bpe,
    sentencepiece_library,
    text_of,
    texts_of,
)
from regard.formats import parsing, read_optional_json

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer


class BertKind(Kind):
    """WordPiece."""

    class_name = "BertTokenizer"
    files = ("vocab.txt",)
    model = "WordPiece"
    defaults: ClassVar[Names] = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    template = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1")

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
    template = ("$A {eos}", "$A {eos} $B {eos}")
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
    template = BertKind.template
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
        if not (switched or (vocabulary.whole is not None and vocabulary.whole.post_processor is not None)):
            super().set_template(rust, folder, names, vocabulary)


class XLMRobertaKind(UnigramKind):
    """Unigram with RoBERTa's special tokens and ids in fairseq's order."""

    class_name = "XLMRobertaTokenizer"
    files = ("sentencepiece.bpe.model",)
    defaults: ClassVar[Names] = RobertaKind.defaults
    template = ("{bos} $A {eos}", "{bos} $A {eos} {eos} $B {eos}")
    unknown_id = 3

    def pieces(self, folder: Folder, pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
        """<s>, <pad>, </s>, <unk>, the file's pieces after its first three, <mask>."""
        texts = {role: text_of(token) for role, token in folder.named(self.defaults).items()}
        first = [(texts.get(role, self.defaults[role]), 0.0) for role in ("bos", "pad", "eos", "unk")]
        return [*first, *pieces[3:], (texts.get("mask", self.defaults["mask"]), 0.0)]


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


# -------------------------------------------------------------------------------------------------------------- Marian

MARIAN_FILES = ("source.spm", "target.spm", "vocab.json")


@dataclass(frozen=True)
class MarianEngine:
    """Marian's files as an engine: pieces of the source language's model, ids from a vocabulary of both languages.

    A piece is looked up by its text: one that the vocabulary lacks is unknown, and a letter unknown to the source
    language may still have the id that the target language gave it.
    """

    source: Any  # SentencePieceProcessor
    words: Mapping[str, int]
    added: Mapping[int, AddedToken]  # laid over `words`
    names: Mapping[str, str]  # role → special token
    extra: tuple[str, ...]  # special tokens without a role
    clean: bool  # close up spaces before punctuation when decoding
    contents: Mapping[str, bytes] = field(repr=False)  # of the files, to be saved as they are

    @classmethod
    def read(cls, folder: Folder, names: Mapping[str, str], extra: tuple[str, ...]) -> MarianEngine:
        """Read source.spm and vocab.json; target.spm is only kept to be saved."""
        if folder.switch("separate_vocabs", False):
            raise ValueError(f"{folder.path} has a vocabulary for each language (separate_vocabs): not supported")
        file = folder.path / "vocab.json"
        words = read_optional_json(folder.path, "vocab.json", dict)
        if not words or not all(type(number) is int and 0 <= number < 1 << 31 for number in words.values()):
            raise ValueError(f"{file} must hold an object of token: id")
        for role in ("unk", "eos"):
            if role not in names or (role == "unk" and names[role] not in words):
                raise ValueError(f"{file} must hold the {role}_token, and lacks {names.get(role)!r}")
        contents = {name: (folder.path / name).read_bytes() for name in MARIAN_FILES}
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
        return len(self._ids)

    @cached_property
    def _ids(self) -> dict[str, int]:
        """token → id."""
        return {**self.words, **{token.content: number for number, token in self.added.items()}}

    @cached_property
    def _tokens(self) -> dict[int, str]:
        """id → token."""
        tokens = {number: text for text, number in self.words.items()}
        return tokens | {number: token.content for number, token in self.added.items()}

    @cached_property
    def _unsplit(self) -> re.Pattern[str]:
        """Matches tokens that are taken out of the text before it is split, the longest first."""
        added = {token.content for token in self.added.values()}
        return re.compile("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")")

    def _encode(self, text: str) -> list[int]:
        tokens: list[str] = []
        for part in filter(None, self._unsplit.split(text)):
            if self._unsplit.fullmatch(part):
                tokens.append(part)
                continue
            language = re.match(r">>.*?<<", part, re.DOTALL)  # the language to translate into
            tokens += [language[0]] if language else []
            with parsing("source.spm"):
                tokens += self.source.encode(part[language.end() if language else 0 :], out_type=str)
        unknown = self.words[self.names["unk"]]
        return [self._ids.get(token, unknown) for token in tokens]

    def encode(self, items: Sequence[Item], special: bool) -> list[Encoding]:
        """Encode texts and pairs; `special`: end each with the end token."""
        return [self._framed([self._encode(text) for text in texts_of(item)], special) for item in items]

    def truncate(self, item: Item, length: int, side: str) -> Encoding:
        """Encode one text or pair and drop tokens on `side` until, with the end token, at most `length` are left."""
        parts = [self._encode(text) for text in texts_of(item)]
        kept = kept_lengths([len(part) for part in parts], length, special=1)
        return self._framed(
            [part[:n] if side == "right" else part[len(part) - n :] for part, n in zip(parts, kept, strict=True)], True
        )

    def _framed(self, parts: list[list[int]], special: bool) -> Encoding:
        ids = [number for part in parts for number in part]
        if special:
            ids.append(self._ids[self.names["eos"]])
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
        return self._ids.get(token)

    def label(self, number: int) -> str | None:
        """The token of an id with spaces for ▁, or None."""
        token = self._tokens.get(number)
        return token if token is None or number in self.added else token.replace(SPACE, " ")

    def files(self) -> dict[str, bytes]:
        """The vocabulary as files: name → content."""
        return dict(self.contents)
