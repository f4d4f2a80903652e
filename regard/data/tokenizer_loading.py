"""From a directory to a pipeline: which kind it is, its vocabulary, its added tokens, its frame.

tokenizer.json is taken first, older file sets otherwise. It does not know how any kind works inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.data.marian import FILES as MARIAN_FILES
from regard.data.marian import MarianPieces
from regard.data.pipelines import Engine, Pipeline
from regard.data.tokenizer_files import Folder, rust_library, text_of
from regard.data.tokenizer_kinds import AS_FILED, BERT, KINDS, MODEL_TYPES, OVERRULED, XLM_ROBERTA, Kind
from regard.data.vocabularies import Vocabulary, read_tokenizer_json
from regard.parsing import MOST_JSON, read_bounded

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["Opened", "open_directory"]

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

    class_name: the class that transformers opens it with.  names: role → special token.  extra: further special tokens.
    pad, cut: the sides on which it pads and truncates.
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

    Raises ValueError where no files are there, where they are broken, or where what they declare is not known;
    ImportError where `tokenizers` is missing.
    """
    rust_library()
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: give one that holds {_file_sets()}")
    file = path / "tokenizer.json"
    data = read_bounded(file, MOST_JSON) if file.is_file() else b""
    json = read_tokenizer_json(file, data) if data or file.is_file() else None
    added = json.whole.get_added_tokens_decoder() if json is not None and json.whole is not None else {}
    folder = Folder.read(path, added)
    if _is_marian(folder):
        return _open_marian(folder)
    kind = _kind(folder, json, data)
    return _open_kind(kind, folder, json or kind.read(folder))


def _is_marian(folder: Folder) -> bool:
    """Marian has two sentencepiece files and a vocabulary beside them; a tokenizer.json is no match for those."""
    declared = (folder.class_name or "MarianTokenizer") == "MarianTokenizer" and folder.model_type in ("marian", None)
    return declared and all((folder.path / name).is_file() for name in MARIAN_FILES)


def _open_marian(folder: Folder) -> TokenizerParts:
    names = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    texts = {role: text_of(token) for role, token in folder.named(names).items()}
    extra = tuple(text_of(token) for token in folder.extra)
    engine = MarianPieces.read(folder, texts, extra)
    folder = replace(folder, values={"model_max_length": 512, **folder.values})
    sides = folder.side("padding_side", "right"), folder.side("truncation_side", "right")
    return TokenizerParts(engine, folder, "MarianTokenizer", texts, extra, *sides)


def _kind(folder: Folder, json: Vocabulary | None, data: bytes) -> Kind:
    """What the files declare; where they do not, what alone can read the files that are there."""
    declared = _declared(folder)
    if json is not None:
        if declared is None or declared.model != type(json.model).__name__:
            return AS_FILED  # whoever made the file, it was not the declared class
        byte_level = declared.class_name == "LlamaTokenizer" and b'"ByteLevel"' in data
        return AS_FILED if byte_level else declared  # LLaMA 3 files declare the class of LLaMA 2
    if declared is None and folder.class_name is not None:
        raise ValueError(
            f"{folder.path} declares {folder.class_name:.80}, whose older files are not read here: "
            f"known are {_classes()}. Save it as tokenizer.json with transformers"
        )
    for kind in (declared, BERT, XLM_ROBERTA):
        if kind is not None and all((folder.path / name).is_file() for name in kind.files):
            return kind
    raise ValueError(_no_files(folder))


def _declared(folder: Folder) -> Kind | None:
    if folder.model_type in OVERRULED:
        return AS_FILED
    if folder.class_name is not None:
        return KINDS.get(folder.class_name)
    return MODEL_TYPES.get(folder.model_type) if folder.model_type is not None else None


def _classes() -> str:
    return ", ".join(sorted({*KINDS, "MarianTokenizer"} - {"PreTrainedTokenizer", "TokenizersBackend"}))


def _file_sets() -> str:
    return ", ".join(FILE_SETS[:-1]) + " or " + FILE_SETS[-1]


def _no_files(folder: Folder) -> str:
    """Why nothing could be opened: no files, or files that fit more than one kind."""
    names = {part for files in FILE_SETS for part in files.split(" + ")}
    there = sorted(name for name in names if (folder.path / name).is_file())
    if not there:
        return f"{folder.path} holds no tokenizer: looked for {_file_sets()}"
    return (
        f"{folder.path} holds {', '.join(there)}: a file is missing, or several kinds of tokenizer are read from such "
        f'files. Then say which in tokenizer_config.json: {{"tokenizer_class": …}} with one of {_classes()}'
    )


# ------------------------------------------------------------------------------------------------------------- assembly


def _open_kind(kind: Kind, folder: Folder, vocabulary: Vocabulary) -> TokenizerParts:
    tokens = folder.named({**vocabulary.defaults, **kind.defaults})
    names = {role: text_of(token) for role, token in tokens.items()}
    extra = _extra(kind, folder, vocabulary)
    rust = _assemble(kind, folder, vocabulary, names)
    rust.add_tokens(_to_add(rust, folder, tokens, extra))
    _frame(kind, rust, folder, vocabulary, names)
    rust.encode_special_tokens = bool(folder.switch("split_special_tokens", False))
    whole = vocabulary.whole
    pad = str(whole.padding["direction"]) if whole is not None and whole.padding else kind.side
    cut = str(whole.truncation["direction"]) if whole is not None and whole.truncation else "right"
    sides = folder.side("padding_side", pad), folder.side("truncation_side", cut)
    texts = tuple(text_of(token) for token in extra)
    engine = Pipeline(rust, _cleans(rust, folder), kind.ending, str(folder.path))
    return TokenizerParts(engine, folder, _class_name(kind, folder), names, texts, *sides)


def _class_name(kind: Kind, folder: Folder) -> str:
    """The declared one where transformers believes it: DistilBERT's class leaves out token types, BERT's does not."""
    declared = KINDS.get(folder.class_name, AS_FILED) if folder.class_name is not None else None
    known = ("PreTrainedTokenizer", "TokenizersBackend")
    return kind.class_name if declared is not kind or folder.class_name in known else str(folder.class_name)


def _assemble(kind: Kind, folder: Folder, vocabulary: Vocabulary, names: Mapping[str, str]) -> RustTokenizer:
    if kind is AS_FILED and vocabulary.whole is not None:
        return vocabulary.whole
    rust: RustTokenizer = rust_library().Tokenizer(kind.tune(vocabulary, names) if kind.tune else vocabulary.model)
    kind.dress(rust, folder, vocabulary)
    if vocabulary.whole is not None and vocabulary.whole.post_processor is not None:
        rust.post_processor = vocabulary.whole.post_processor
    return rust


def _extra(kind: Kind, folder: Folder, vocabulary: Vocabulary) -> list[Any]:
    """Special tokens without a name."""
    if "extra_special_tokens" in folder.values:
        return folder.extra
    listed = folder.extra if vocabulary.extra is None else vocabulary.extra
    return kind.extra(folder, listed) if kind.extra else listed


def _to_add(rust: RustTokenizer, folder: Folder, named: Mapping[str, Any], extra: list[Any]) -> list[AddedToken]:
    """Tokens to lay over the vocabulary, in the order that gives new ones the ids transformers gives them."""
    tokens: list[Any] = [folder.added[number] for number in sorted(folder.added)]
    known = {token.content for token in rust.get_added_tokens_decoder().values()} | {text_of(token) for token in tokens}
    for token in [*named.values(), *extra]:
        if text_of(token) not in known and token not in tokens:
            tokens.append(token)
    make, roles = rust_library().AddedToken, {text_of(token) for token in named.values()}
    whole = [make(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in whole:
        if token.content in roles and not token.special:
            token.special = True
    return whole


def _frame(kind: Kind, rust: RustTokenizer, folder: Folder, vocabulary: Vocabulary, names: Mapping[str, str]) -> None:
    """Special tokens around a text: the kind's, else tokenizer.json's, else by add_bos_token and add_eos_token."""
    switches = {} if vocabulary.whole is not None else folder.values
    if rust.post_processor is None or "add_bos_token" in switches or "add_eos_token" in switches:
        bos = names.get("bos") if switches.get("add_bos_token") else None
        eos = names.get("eos") if switches.get("add_eos_token") else None
        _frame_by_switches(rust, bos, eos)
    if kind.frame is not None:
        kind.frame(rust, folder, names, vocabulary)


def _frame_by_switches(rust: RustTokenizer, bos: str | None, eos: str | None) -> None:
    def around(text: str, number: int) -> str:
        front, back = f"{bos}:{number} " if bos else "", f" {eos}:{number}" if eos else ""
        return f"{front}{text}:{number}{back}"

    known = [(token, rust.token_to_id(token)) for token in (bos, eos) if token]
    single = around("$A", 0)
    rust.post_processor = rust_library().processors.TemplateProcessing(
        single=single, pair=f"{single} {around('$B', 1)}", special_tokens=known
    )


def _cleans(rust: RustTokenizer, folder: Folder) -> bool:
    """Close up spaces when joining? BPE keeps its own spaces, and only a loud switch makes transformers spoil them."""
    wanted = bool(folder.switch("clean_up_tokenization_spaces", False))
    loud = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return wanted and (type(rust.model).__name__ != "BPE" or bool(folder.switch(loud, False)))
