"""The kinds of tokenizer: which files each is read from, and how its pipeline normalises, splits, joins and frames.

A kind is the class name that checkpoints declare. transformers builds these pipelines from the vocabulary and the
switches in tokenizer_config.json even where tokenizer.json spells a whole pipeline out, so the same is done here: the
ids are equal also where the two disagree. Any other class is taken as tokenizer.json has it.

    BertTokenizer        WordPiece       vocab.txt                 BERT, DistilBERT, BLIP
    GPT2Tokenizer        byte-level BPE  vocab.json, merges.txt    GPT-2
    RobertaTokenizer     byte-level BPE  vocab.json, merges.txt    RoBERTa, BART
    CLIPTokenizer        byte-level BPE  vocab.json, merges.txt    CLIP
    T5Tokenizer          unigram         spiece.model              T5, mT5
    AlbertTokenizer      unigram         spiece.model              ALBERT
    XLMRobertaTokenizer  unigram         sentencepiece.bpe.model   XLM-R
    LlamaTokenizer       BPE             tokenizer.model           LLaMA 1 and 2

It does not know where a directory lies, nor what the pipeline is used for.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from regard.data.sentencepiece_file import SPACE
from regard.data.tokenizer_files import Folder, rust_library, text_of
from regard.data.vocabularies import (
    Vocabulary,
    read_albert,
    read_llama,
    read_merges,
    read_pieces,
    read_t5,
    read_words,
    read_xlm_roberta,
    sentinels,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["AS_FILED", "BERT", "KINDS", "MODEL_TYPES", "OVERRULED", "XLM_ROBERTA", "Kind"]

WORD_END = "</w>"
CLIP_END = "<|endoftext|>"
CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'(?:s|t|re|ve|m|ll|d)|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
"""What CLIP cuts a text into: simple_tokenizer.py of its authors' code."""

Names = Mapping[str, str]
"""Role → text of the named special tokens."""


@dataclass(frozen=True)
class Kind:
    """How one class of tokenizers is made.

    files: the older file set, and `read`, what reads it.  model: the Rust model it needs.  defaults: named special
    tokens where the files are silent.  tune: the model's settings.  dress: normaliser, splitter and decoder.  frame:
    the special tokens around a text; None leaves that to tokenizer.json and to add_bos_token and add_eos_token.
    extra: further special tokens, given those listed.  side: where it pads unless the files say.  ending: what the
    last piece of a word ends with, and becomes a space in a text.
    """

    class_name: str
    files: tuple[str, ...]
    read: Callable[[Folder], Vocabulary]
    dress: Callable[[RustTokenizer, Folder, Vocabulary], None]
    model: str | None = None
    defaults: Names = field(default_factory=dict)
    tune: Callable[[Vocabulary, Names], Any] | None = None
    frame: Callable[[RustTokenizer, Folder, Names, Vocabulary], None] | None = None
    extra: Callable[[Folder, list[Any]], list[Any]] | None = None
    side: str = "right"
    ending: str = ""


# --------------------------------------------------------------------------------------------------------------- models


def _wordpiece(vocabulary: Vocabulary, names: Names) -> Any:
    model = vocabulary.model
    model.unk_token = names.get("unk", "[UNK]")
    model.continuing_subword_prefix, model.max_input_chars_per_word = "##", 100
    return model


def _bpe(vocabulary: Vocabulary, names: Names, sentencepiece: bool) -> Any:
    model = vocabulary.model
    model.unk_token, model.dropout, model.ignore_merges = None, None, False
    model.fuse_unk = model.byte_fallback = sentencepiece
    return model


def _bpe_of_words(vocabulary: Vocabulary, names: Names) -> Any:
    model = _bpe(vocabulary, names, sentencepiece=False)
    model.unk_token, model.continuing_subword_prefix, model.end_of_word_suffix = names.get("unk"), "", WORD_END
    return model


def _unigram(vocabulary: Vocabulary, names: Names, unknown_id: int) -> Any:
    """The model, made anew where tokenizer.json has another id for the unknown, or bytes in its place."""
    model = vocabulary.model
    try:
        found = [piece.id for piece in model.tokenize("\U0010ffff")]  # a character that no vocabulary holds
    except Exception:  # no id at all for the unknown
        found = []
    if found == [unknown_id]:
        return model
    pieces = [(text, score) for text, score in json.loads(model.__getstate__())["vocab"]]
    return rust_library().models.Unigram(pieces, unk_id=unknown_id, byte_fallback=False)


# ------------------------------------------------------------------------------------------------------------- clothing


def _dress_bert(rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
    library = rust_library()
    rust.normalizer = library.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(folder.switch("tokenize_chinese_chars", True)),
        strip_accents=folder.switch("strip_accents", None),
        lowercase=bool(folder.switch("do_lower_case", True)),
    )
    rust.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    rust.decoder = library.decoders.WordPiece(prefix="##")


def _dress_bytes(rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
    library = rust_library()
    front = bool(folder.switch("add_prefix_space", False))
    rust.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=front)
    rust.decoder = library.decoders.ByteLevel()


def _dress_clip(rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
    """Small letters, single spaces; then English endings, words, single digits and runs of signs, each as bytes."""
    library = rust_library()
    make, split = library.normalizers, library.pre_tokenizers
    rust.normalizer = make.Sequence([make.NFC(), make.Replace(library.Regex(r"\s+"), " "), make.Lowercase()])
    words = split.Split(library.Regex(CLIP_WORDS), behavior="removed", invert=True)
    rust.pre_tokenizer = split.Sequence([words, split.ByteLevel(add_prefix_space=False)])
    rust.decoder = library.decoders.ByteLevel()


def _dress_words(rust: RustTokenizer, vocabulary: Vocabulary, front: bool, steps: list[Any]) -> None:
    """Words first, then pieces within them, each word with its ▁.  front: the text's first word has one too."""
    library = rust_library()
    characters = _character_map(vocabulary)
    mapped = [library.normalizers.Precompiled(characters)] if characters else []
    if steps or mapped:
        rust.normalizer = library.normalizers.Sequence([*steps, *mapped])
    scheme = "always" if front else "never"
    spaces = library.pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    rust.pre_tokenizer = library.pre_tokenizers.Sequence([library.pre_tokenizers.WhitespaceSplit(), spaces])
    rust.decoder = library.decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)


def _dress_t5(rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
    _dress_words(rust, vocabulary, True, [])


def _dress_xlm_roberta(rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
    _dress_words(rust, vocabulary, bool(folder.switch("add_prefix_space", True)), [])


def _dress_albert(rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
    make = rust_library().normalizers
    steps = [make.Replace("``", '"'), make.Replace("''", '"')]
    if not folder.switch("keep_accents", False):
        steps += [make.NFKD(), make.StripAccents()]
    if folder.switch("do_lower_case", True):
        steps.append(make.Lowercase())
    _dress_words(rust, vocabulary, bool(folder.switch("add_prefix_space", True)), steps)


def _dress_llama(rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
    """One ▁ in front of the text, or with `legacy` in front of what follows each special token too."""
    library = rust_library()
    front = folder.switch("add_prefix_space", None) is not False
    scheme = ("always" if folder.switch("legacy", False) else "first") if front else "never"
    rust.pre_tokenizer = library.pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    make = library.decoders
    steps = [make.Replace(SPACE, " "), make.ByteFallback(), make.Fuse()]
    rust.decoder = make.Sequence([*steps, make.Strip(content=" ", left=1)] if front else steps)


def _dress_pieces(rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary) -> None:
    """A sentencepiece file of no declared family: spaces become ▁, and nothing is put in front."""
    if vocabulary.file is None:
        return
    library = rust_library()
    spaces = library.normalizers.Replace(" ", SPACE)
    mapped = [library.normalizers.Precompiled(vocabulary.file.characters)] if vocabulary.file.characters else []
    rust.normalizer = library.normalizers.Sequence([*mapped, spaces])
    make = library.decoders
    bytes_too = [make.ByteFallback(), make.Fuse()] if vocabulary.file.byte_fallback else []
    rust.decoder = make.Sequence([make.Replace(SPACE, " "), *bytes_too])


def _character_map(vocabulary: Vocabulary) -> bytes:
    """sentencepiece's character map: from its file, or as tokenizer.json carries it."""
    if vocabulary.file is not None:
        return vocabulary.file.characters
    if vocabulary.whole is None or vocabulary.whole.normalizer is None:
        return b""
    state = json.loads(vocabulary.whole.normalizer.__getstate__())
    for step in state.get("normalizers", [state]):
        if step.get("type") == "Precompiled":
            return base64.b64decode(step["precompiled_charsmap"])
    return b""


# -------------------------------------------------------------------------------------------------------------- framing


def _template(rust: RustTokenizer, single: str, pair: str, tokens: Names) -> None:
    """tokens: name in the template → text in the vocabulary."""
    known = [(name, rust.token_to_id(text)) for name, text in tokens.items()]
    rust.post_processor = rust_library().processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)


def _frame_bert(rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
    cls, sep = _needed(folder, names, "cls"), _needed(folder, names, "sep")
    _template(rust, f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", {cls: cls, sep: sep})


def _frame_albert(rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
    """As BERT, unless tokenizer.json or add_bos_token and add_eos_token say otherwise."""
    switched = vocabulary.whole is None and bool({"add_bos_token", "add_eos_token"} & set(folder.values))
    if switched or (vocabulary.whole is not None and vocabulary.whole.post_processor is not None):
        return
    tokens = {"[CLS]": _needed(folder, names, "cls"), "[SEP]": _needed(folder, names, "sep")}
    _template(rust, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", tokens)


def _frame_roberta(rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
    sep, cls = (_needed(folder, names, role) for role in ("sep", "cls"))
    rust.post_processor = rust_library().processors.RobertaProcessing(
        (sep, rust.token_to_id(sep)),
        (cls, rust.token_to_id(cls)),
        trim_offsets=bool(folder.switch("trim_offsets", True)),
        add_prefix_space=bool(folder.switch("add_prefix_space", False)),
    )


def _frame_clip(rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
    eos, bos = (_needed(folder, names, role) for role in ("eos", "bos"))
    rust.post_processor = rust_library().processors.RobertaProcessing(
        (eos, rust.token_to_id(eos)), (bos, rust.token_to_id(bos)), trim_offsets=False, add_prefix_space=False
    )


def _frame_t5(rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
    _template(rust, "$A </s>", "$A </s> $B </s>", {"</s>": _needed(folder, names, "eos")})


def _frame_xlm_roberta(rust: RustTokenizer, folder: Folder, names: Names, vocabulary: Vocabulary) -> None:
    bos, eos = (_needed(folder, names, role) for role in ("bos", "eos"))
    _template(rust, f"{bos} $A {eos}", f"{bos} $A {eos} {eos} $B {eos}", {bos: bos, eos: eos})


def _needed(folder: Folder, names: Names, role: str) -> str:
    if role not in names:
        raise ValueError(f"{folder.path}: this kind of tokenizer needs a {role}_token, and the files set it to null")
    return names[role]


# ---------------------------------------------------------------------------------------------------------------- kinds


def _with_sentinels(folder: Folder, listed: list[Any]) -> list[Any]:
    return listed if any("<extra_id_" in text_of(token) for token in listed) else [*listed, *sentinels(folder)]


ROBERTA_TOKENS = {
    "bos": "<s>",
    "eos": "</s>",
    "sep": "</s>",
    "cls": "<s>",
    "unk": "<unk>",
    "pad": "<pad>",
    "mask": "<mask>",
}
ALBERT_TOKENS = {
    "bos": "[CLS]",
    "eos": "[SEP]",
    "unk": "<unk>",
    "sep": "[SEP]",
    "pad": "<pad>",
    "cls": "[CLS]",
    "mask": "[MASK]",
}

BERT = Kind(
    "BertTokenizer",
    ("vocab.txt",),
    read_words,
    model="WordPiece",
    defaults={"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    tune=_wordpiece,
    dress=_dress_bert,
    frame=_frame_bert,
)
GPT2 = Kind(
    "GPT2Tokenizer",
    ("vocab.json", "merges.txt"),
    read_merges,
    model="BPE",
    defaults={"unk": "<|endoftext|>", "bos": "<|endoftext|>", "eos": "<|endoftext|>"},
    tune=partial(_bpe, sentencepiece=False),
    dress=_dress_bytes,
)
ROBERTA = replace(GPT2, class_name="RobertaTokenizer", defaults=ROBERTA_TOKENS, frame=_frame_roberta)
CLIP = Kind(
    "CLIPTokenizer",
    ("vocab.json", "merges.txt"),
    read_merges,
    model="BPE",
    defaults={"unk": CLIP_END, "bos": "<|startoftext|>", "eos": CLIP_END, "pad": CLIP_END},
    tune=_bpe_of_words,
    dress=_dress_clip,
    frame=_frame_clip,
    ending=WORD_END,
)
T5 = Kind(
    "T5Tokenizer",
    ("spiece.model",),
    read_t5,
    model="Unigram",
    defaults={"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    tune=partial(_unigram, unknown_id=2),
    dress=_dress_t5,
    frame=_frame_t5,
    extra=_with_sentinels,
)
ALBERT = Kind(
    "AlbertTokenizer",
    ("spiece.model",),
    read_albert,
    model="Unigram",
    defaults=ALBERT_TOKENS,
    tune=partial(_unigram, unknown_id=1),
    dress=_dress_albert,
    frame=_frame_albert,
)
XLM_ROBERTA = Kind(
    "XLMRobertaTokenizer",
    ("sentencepiece.bpe.model",),
    partial(read_xlm_roberta, defaults=ROBERTA_TOKENS),
    model="Unigram",
    defaults=ROBERTA_TOKENS,
    tune=partial(_unigram, unknown_id=3),
    dress=_dress_xlm_roberta,
    frame=_frame_xlm_roberta,
)
LLAMA = Kind(
    "LlamaTokenizer",
    ("tokenizer.model",),
    read_llama,
    model="BPE",
    defaults={"unk": "<unk>", "bos": "<s>", "eos": "</s>"},
    tune=partial(_bpe, sentencepiece=True),
    dress=_dress_llama,
    side="left",
)
AS_FILED = Kind("PreTrainedTokenizerFast", ("tokenizer.model",), read_pieces, dress=_dress_pieces)
"""tokenizer.json as it is, or a sentencepiece file of no declared family."""

KINDS = {kind.class_name: kind for kind in (BERT, GPT2, ROBERTA, CLIP, T5, ALBERT, XLM_ROBERTA, LLAMA)} | {
    "DistilBertTokenizer": BERT,
    "BartTokenizer": ROBERTA,
    "PreTrainedTokenizer": AS_FILED,  # "Fast" is taken off a class name before it is looked up
    "TokenizersBackend": AS_FILED,
}
"""Class names that checkpoints declare."""

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
"""The kind where a checkpoint declares its model alone, as transformers has it."""

OVERRULED = ("mistral", "mixtral", "phi3", "qwen2")
"""Model types whose declared class transformers does not believe: tokenizer.json is taken as it is."""
