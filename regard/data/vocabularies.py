"""Vocabularies as Rust models: tokenizer.json, and sentencepiece models read by sentencepiece's own library."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.data.tokenizer_files import rust_library, sentencepiece_library
from regard.files import MOST_JSON, parsing, read_bounded

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["SPACE", "Vocabulary", "read_sentencepiece", "read_tokenizer_json", "sentencepiece_bpe"]

SPACE = "▁"
MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
CONTROL, USER_DEFINED = 3, 4  # sentencepiece's ModelProto.SentencePiece.Type


@dataclass(frozen=True)
class Vocabulary:
    """A Rust model and the file it came from.

    Args:
        model: of `tokenizers.models`.
        whole: all of tokenizer.json, or None.
        sentencepiece: the file's ModelProto, or None.
        defaults: role → special token, as the file has it.
    """

    model: Any
    whole: RustTokenizer | None = None
    sentencepiece: Any = None
    defaults: Mapping[str, str] = field(default_factory=dict)

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
    """A sentencepiece model file as the ModelProto of sentencepiece's library.

    Raises:
        ValueError: the file is not a sentencepiece model, has no pieces, or has one twice.
        ImportError: sentencepiece or protobuf is not installed.
    """
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

    Args:
        proto: the file's ModelProto.
        words: piece → id; None numbers the file's pieces.
        options: of `tokenizers.models.BPE`.
    """
    pieces = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    halves = ((text[:n], text[n:]) for text in pieces for n in range(1, len(text)))
    merges = [(left, right) for left, right in halves if left in pieces and right in pieces]
    return rust_library().models.BPE(pieces if words is None else words, merges, fuse_unk=True, **options)
