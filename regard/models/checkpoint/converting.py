"""Weights that are only pickled: the call of `transformers` that makes safetensors of them and keeps every one.

It opens no weights; it only looks which class config.json names. It does not know whether that class exists.
"""

from __future__ import annotations

from pathlib import Path

from regard.models.checkpoint.side_files import read_side

__all__ = ["conversion"]

BESIDE = (
    "copy the files of tokenizer and preprocessor there, too (or save them there with AutoTokenizer and AutoProcessor)"
)


def conversion(directory: Path, source: str = "directory") -> str:
    """The call that converts a checkpoint, by the class that its config.json names, and what else has to be copied.

    >>> print(conversion(Path("no/such/directory"), "'owner/name'"))
    C.from_pretrained('owner/name').save_pretrained(new_directory), C being the class that config.json names as \
architectures (AutoModel would leave out its head); copy the files of tokenizer and preprocessor there, too (or save \
them there with AutoTokenizer and AutoProcessor)

    directory: where config.json is, if there is one.  source: what is converted, as the call shall have it.
    """
    name = _class(directory)
    call = f"{name or 'C'}.from_pretrained({source}).save_pretrained(new_directory)"
    if name is None:
        call += ", C being the class that config.json names as architectures (AutoModel would leave out its head)"
    return f"{call}; {BESIDE}"


def _class(directory: Path) -> str | None:
    """The first of the architectures; None where none is named, or the file cannot be read: loading says why."""
    try:
        values = read_side(directory, "config.json", dict) or {}
    except (OSError, ValueError):
        return None
    match values.get("architectures"):
        case [str(name), *_] if name.isidentifier():  # it comes from strangers, and becomes part of a call
            return name
    return None
