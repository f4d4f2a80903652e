"""From a tokenizer's directory to an engine: tokenizer.json first, older file sets otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.data.marian import FILES as MARIAN_FILES
from regard.data.marian import MarianEngine
from regard.data.pipelines import Engine, Pipeline
from regard.data.tokenizer_files import Folder, rust_library, text_of
from regard.data.tokenizer_kinds import AS_FILED, BERT, KINDS, MODEL_TYPES, OVERRULED, XLM_ROBERTA, Kind
from regard.data.vocabularies import Vocabulary, read_tokenizer_json
from regard.files import MOST_JSON, read_bounded

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["TokenizerParts", "open_directory"]

FILE_SETS = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json + merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "source.spm + target.spm + vocab.json",
)


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer's directory, opened.

    Args:
        engine: encodes and decodes.
        folder: the files beside the vocabulary.
        class_name: the class that transformers opens it with.
        names: role → special token.
        extra: special tokens without a role.
        pad: the side on which it pads.
        cut: the side on which it truncates.
    """

    engine: Engine
    folder: Folder
    class_name: str
    names: Mapping[str, str]
    extra: tuple[str, ...]
    pad: str
    cut: str


def open_directory(path: Path) -> TokenizerParts:
    """Read the files and build the engine.

    Raises:
        ValueError: there are no files, they are broken, or they declare an unknown kind.
        ImportError: `tokenizers`, or for a sentencepiece file `sentencepiece`, is not installed.
    """
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
        return _open_marian(folder)
    kind = _kind(folder, json, data)
    return _open_kind(kind, folder, json or kind.read(folder))


def _open_marian(folder: Folder) -> TokenizerParts:
    named = folder.named({"eos": "</s>", "unk": "<unk>", "pad": "<pad>"})
    names = {role: text_of(token) for role, token in named.items()}
    extra = tuple(text_of(token) for token in folder.extra)
    engine = MarianEngine.read(folder, names, extra)
    folder = replace(folder, values={"model_max_length": 512, **folder.values})
    sides = folder.side("padding_side", "right"), folder.side("truncation_side", "right")
    return TokenizerParts(engine, folder, "MarianTokenizer", names, extra, *sides)


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


def _open_kind(kind: Kind, folder: Folder, vocabulary: Vocabulary) -> TokenizerParts:
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
        rust = rust_library().Tokenizer(kind.configured(vocabulary, names))
        kind.set_pipeline(rust, folder, vocabulary)
        if whole is not None and whole.post_processor is not None:
            rust.post_processor = whole.post_processor
    rust.add_tokens(_added_tokens(rust, folder, tokens, extra))
    switches = {} if whole is not None else folder.values
    if rust.post_processor is None or "add_bos_token" in switches or "add_eos_token" in switches:
        bos = names.get("bos") if switches.get("add_bos_token") else None
        eos = names.get("eos") if switches.get("add_eos_token") else None
        _set_bos_eos(rust, bos, eos)
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
    return TokenizerParts(
        engine=Pipeline(rust, clean, kind.word_end, str(folder.path)),
        folder=folder,
        class_name=kind.class_name if declared is not kind or generic else str(folder.class_name),
        names=names,
        extra=tuple(text_of(token) for token in extra),
        pad=folder.side("padding_side", pad),
        cut=folder.side("truncation_side", cut),
    )


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


def _set_bos_eos(rust: RustTokenizer, bos: str | None, eos: str | None) -> None:
    def around(text: str, number: int) -> str:
        front, back = f"{bos}:{number} " if bos else "", f" {eos}:{number}" if eos else ""
        return f"{front}{text}:{number}{back}"

    known = [(token, rust.token_to_id(token)) for token in (bos, eos) if token]
    single = around("$A", 0)
    rust.post_processor = rust_library().processors.TemplateProcessing(
        single=single, pair=f"{single} {around('$B', 1)}", special_tokens=known
    )
