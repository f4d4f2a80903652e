"""The JSON files beside a vocabulary: special tokens, added tokens, switches, and the declared kind of tokenizer.

As in transformers, `tokenizer_config.json` decides. Without an `added_tokens_decoder` it is an old one: then
`special_tokens_map.json` is laid over it, and `added_tokens.json` and the added tokens of `tokenizer.json` count.
`config.json` names the kind if the others do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.files import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken

__all__ = ["ROLES", "Folder", "read_object", "rust_library", "sentencepiece_library", "text_of"]

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
    """A tokenizer's directory, without the vocabulary.

    Args:
        path: the directory.
        values: tokenizer_config.json, merged with the older files.
        added: id → added token.
        class_name: the declared class without "Fast", or None.
        model_type: of config.json, or None.
    """

    path: Path
    values: Mapping[str, Any]
    added: Mapping[int, AddedToken]
    class_name: str | None
    model_type: str | None

    @classmethod
    def read(cls, path: Path, vocabulary_added: Mapping[int, AddedToken]) -> Folder:
        """Read the files.

        Args:
            path: the directory.
            vocabulary_added: the added tokens of tokenizer.json.

        Raises:
            ValueError: a file is broken, or a token in it is not one.
        """
        config, model = read_object(path / "tokenizer_config.json"), read_object(path / "config.json")
        values = {key: _tokens_in(path, key, value) for key, value in config.items() if key != "added_tokens_decoder"}
        if "additional_special_tokens" in values and not values.get("extra_special_tokens"):
            values["extra_special_tokens"] = values.pop("additional_special_tokens")
        _check_tokens(path, values)
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
            added = {
                n: make(text, normalized=text not in special, special=text in special) for text, n in table.items()
            }
            added |= vocabulary_added
        if values.get("fix_mistral_regex"):
            raise ValueError(f"{path / 'tokenizer_config.json'} asks for fix_mistral_regex, which is not supported")
        class_name = config.get("tokenizer_class") or model.get("tokenizer_class")
        if class_name is not None and not isinstance(class_name, str):
            raise ValueError(f"tokenizer_class of {path} must be the name of a class, got {class_name!r:.80}")
        return cls(path, values, added, class_name and class_name.removesuffix("Fast"), model.get("model_type"))

    def switch(self, name: str, default: bool | None) -> bool | None:
        """A setting that is true, false or null. Raises ValueError for anything else."""
        value = self.values.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise ValueError(
                f"{name} in {self.path / 'tokenizer_config.json'} must be true or false, got {value!r:.80}"
            )
        return value

    def side(self, name: str, default: str) -> str:
        """`padding_side` or `truncation_side`. Raises ValueError for anything but "left" and "right"."""
        value = self.values.get(name, default)
        if value not in ("left", "right"):
            raise ValueError(
                f"{name} in {self.path / 'tokenizer_config.json'} must be left or right, got {value!r:.80}"
            )
        return str(value)

    def named(self, defaults: Mapping[str, str | None]) -> dict[str, AddedToken | str]:
        """Named special tokens: the seven roles first (the files', else `defaults`), then others."""
        by_text = {token.content: token for token in self.added.values()}
        found: dict[str, Any] = {}
        for role in ROLES:
            key = f"{role}_token"
            found[role] = self.values[key] if key in self.values else defaults.get(role)
        for key, value in self.values.items():
            if key.endswith("_token") and key.removesuffix("_token") not in ROLES and not isinstance(value, bool):
                found[key] = value
        extra = self.values.get("extra_special_tokens")
        found |= extra if isinstance(extra, dict) else {}
        return {name: by_text.get(text_of(value), value) for name, value in found.items() if value is not None}

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
