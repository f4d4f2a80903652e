"""The kinds of tokenizer that checkpoints declare: files, normalisation, splitting, decoding and special tokens.

transformers builds these pipelines from the vocabulary and the switches in tokenizer_config.json even if tokenizer.json
spells out a whole pipeline; so do we, so that ids agree where the two contradict each other.

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

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from regard.data.tokenizer_files import Folder, rust_library, text_of
from regard.data.vocabularies import SPACE, Vocabulary, read_sentencepiece, sentencepiece_bpe
from regard.files import parsing

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["AS_FILED", "BERT", "KINDS", "MODEL_TYPES", "OVERRULED", "XLM_ROBERTA", "Kind"]

Names = Mapping[str, str]
"""Role → text of the named special tokens."""


class Kind:
    """One class of tokenizers. The base class is "as filed": tokenizer.json, or an undeclared sentencepiece model.

    Attributes:
        class_name: the name in transformers.
        files: the file set it is read from where there is no tokenizer.json.
        model: the class of its Rust model; None for any.
        defaults: role → special token, unless the files name another.
        padding_side: unless the files name another.
        word_end: suffix of a word's last piece, a space in text.
    """

    class_name: ClassVar[str] = "PreTrainedTokenizerFast"
    files: ClassVar[tuple[str, ...]] = ("tokenizer.model",)
    model: ClassVar[str | None] = None
    defaults: ClassVar[Names] = {}
    padding_side: ClassVar[str] = "right"
    word_end: ClassVar[str] = ""

    def read(self, folder: Folder) -> Vocabulary:
        """The vocabulary from `files`."""
        proto = read_sentencepiece(folder.path / "tokenizer.model")
        trainer = proto.trainer_spec
        named = {
            role: getattr(trainer, f"{role}_piece")
            for role in ("bos", "eos", "unk")
            if getattr(trainer, f"{role}_id") >= 0
        }
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

    def configured(self, vocabulary: Vocabulary, names: Names) -> Any:
        """The Rust model with this kind's options."""
        return vocabulary.model

    def set_pipeline(self, rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
        """Set normaliser, pre-tokenizer and decoder."""
        if vocabulary.sentencepiece is None:
            return
        make, library = rust_library().normalizers, rust_library().decoders
        mapped = [make.Precompiled(vocabulary.character_map)] if vocabulary.character_map else []
        rust.normalizer = make.Sequence([*mapped, make.Replace(" ", SPACE)])
        fallback = vocabulary.sentencepiece.trainer_spec.byte_fallback
        joins = [library.ByteFallback(), library.Fuse()] if fallback else []
        rust.decoder = library.Sequence([library.Replace(SPACE, " "), *joins])

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

    def configured(self, vocabulary: Vocabulary, names: Names) -> Any:
        """WordPiece with ## inside words."""
        model = vocabulary.model
        model.unk_token = names.get("unk", "[UNK]")
        model.continuing_subword_prefix, model.max_input_chars_per_word = "##", 100
        return model

    def set_pipeline(self, rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
        """Words and punctuation, lower case unless switched off."""
        library = rust_library()
        rust.normalizer = library.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=bool(folder.switch("tokenize_chinese_chars", True)),
            strip_accents=folder.switch("strip_accents", None),
            lowercase=bool(folder.switch("do_lower_case", True)),
        )
        rust.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        rust.decoder = library.decoders.WordPiece(prefix="##")

    def set_template(self, rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
        """[CLS] A [SEP] B [SEP]."""
        cls, sep = self.token(folder, names, "cls"), self.token(folder, names, "sep")
        _template(rust, f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", {cls: cls, sep: sep})


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

    def configured(self, vocabulary: Vocabulary, names: Names) -> Any:
        """BPE in which every byte is known."""
        model = vocabulary.model
        model.unk_token, model.dropout, model.ignore_merges = None, None, False
        model.fuse_unk = model.byte_fallback = False
        return model

    def set_pipeline(self, rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
        """Words as bytes, the space before a word in it."""
        library = rust_library()
        prefix = bool(folder.switch("add_prefix_space", False))
        rust.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        rust.decoder = library.decoders.ByteLevel()


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

    def configured(self, vocabulary: Vocabulary, names: Names) -> Any:
        """BPE with a suffix at the end of words."""
        model = super().configured(vocabulary, names)
        model.unk_token, model.continuing_subword_prefix = names.get("unk"), ""
        model.end_of_word_suffix = self.word_end
        return model

    def set_pipeline(self, rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
        """Lower case and single spaces, then words as bytes."""
        library = rust_library()
        make, split = library.normalizers, library.pre_tokenizers
        rust.normalizer = make.Sequence([make.NFC(), make.Replace(library.Regex(r"\s+"), " "), make.Lowercase()])
        words = split.Split(library.Regex(self.words), behavior="removed", invert=True)
        rust.pre_tokenizer = split.Sequence([words, split.ByteLevel(add_prefix_space=False)])
        rust.decoder = library.decoders.ByteLevel()

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

    def configured(self, vocabulary: Vocabulary, names: Names) -> Any:
        """The model, built anew if tokenizer.json has another id for the unknown token, or bytes in its place."""
        model = vocabulary.model
        try:
            unknown = [piece.id for piece in model.tokenize("\U0010ffff")]  # a character that no vocabulary has
        except Exception:  # no id at all for the unknown
            unknown = []
        if unknown == [self.unknown_id]:
            return model
        pieces = [(text, score) for text, score in json.loads(model.__getstate__())["vocab"]]
        return rust_library().models.Unigram(pieces, unk_id=self.unknown_id, byte_fallback=False)

    def normalizers(self, folder: Folder) -> list[Any]:
        """Steps before sentencepiece's own normalisation."""
        return []

    def prefix_space(self, folder: Folder) -> bool:
        """Whether the first word has its ▁ too."""
        return bool(folder.switch("add_prefix_space", True))

    def set_pipeline(self, rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
        """sentencepiece's normalisation, split at spaces, ▁ in front of words."""
        library = rust_library()
        steps, characters = self.normalizers(folder), vocabulary.character_map
        steps += [library.normalizers.Precompiled(characters)] if characters else []
        if steps:
            rust.normalizer = library.normalizers.Sequence(steps)
        scheme = "always" if self.prefix_space(folder) else "never"
        spaces = library.pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
        rust.pre_tokenizer = library.pre_tokenizers.Sequence([library.pre_tokenizers.WhitespaceSplit(), spaces])
        rust.decoder = library.decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)


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
        _template(rust, "$A </s>", "$A </s> $B </s>", {"</s>": self.token(folder, names, "eos")})

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
        _template(rust, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", tokens)


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
        _template(rust, f"{bos} $A {eos}", f"{bos} $A {eos} {eos} $B {eos}", {bos: bos, eos: eos})


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

    def configured(self, vocabulary: Vocabulary, names: Names) -> Any:
        """BPE that falls back to bytes."""
        model = vocabulary.model
        model.unk_token, model.dropout, model.ignore_merges = None, None, False
        model.fuse_unk = model.byte_fallback = True
        return model

    def set_pipeline(self, rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
        """One ▁ in front of the text; with `legacy`, also after each special token."""
        library = rust_library()
        prefix = folder.switch("add_prefix_space", None) is not False
        scheme = ("always" if folder.switch("legacy", False) else "first") if prefix else "never"
        rust.pre_tokenizer = library.pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
        make = library.decoders
        steps = [make.Replace(SPACE, " "), make.ByteFallback(), make.Fuse()]
        rust.decoder = make.Sequence([*steps, make.Strip(content=" ", left=1)] if prefix else steps)


def _template(rust: RustTokenizer, single: str, pair: str, tokens: Names) -> None:
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
    "bert": BERT,
    "blip": BERT,
    "distilbert": BERT,
    "albert": ALBERT,
    "gpt2": GPT2,
    "roberta": ROBERTA,
    "bart": ROBERTA,
    "clip": CLIP,
    "t5": T5,
    "mt5": T5,
    "xlm-roberta": XLM_ROBERTA,
    "llama": AS_FILED,
}
"""The kind of a checkpoint that declares its model_type only, as in transformers."""

OVERRULED = ("mistral", "mixtral", "phi3", "qwen2")
"""Model types whose declared class transformers ignores: tokenizer.json is taken as it is."""
