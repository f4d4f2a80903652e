"""Finding a model: a local directory, or a model of the Hugging Face hub, downloaded once."""

from __future__ import annotations

import os
import re
import reprlib
from pathlib import Path

from regard.files import recover
from regard.models.checkpoint import INDEX, SINGLE, conversion, read_side, refuse_foreign, weight_files

__all__ = ["IMAGES", "POOLING", "TOKENIZER", "find"]

WEIGHT_PATTERNS = [SINGLE, INDEX, "*-of-*.safetensors"]
CONFIGS = ["config.json", "generation_config.json"]
TOKENIZER = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
]
POOLING = ["modules.json", "sentence_bert_config.json", "1_Pooling/config.json"]  # of sentence-transformers
IMAGES = ["preprocessor_config.json", "processor_config.json"]  # how images and text are prepared
WANTED = [*CONFIGS, *WEIGHT_PATTERNS, *TOKENIZER, *POOLING, *IMAGES]
UNWANTED = ["*/*.safetensors", "consolidated*"]  # other parts' weights, and the same weights once more

ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
LONGEST_ID = 96  # letters, the hub's own limit
INSTALL = "pip install 'regard[models]'"
AGAIN = "load it again with a network"


def find(path_or_id: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The directory of a model. Of a hub model only the files that regard reads are downloaded, never pickles or code.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     find(folder) == Path(folder)
    True

    With HF_HUB_OFFLINE=1, or if the hub cannot be reached, the model comes from the cache of `huggingface_hub` if it
    is complete there.

    Args:
        path_or_id: a directory, or a hub id, "name" or "owner/name". An existing directory wins; what starts with a
            dot, a slash or a tilde, and a `Path`, is never looked up on the hub.
        revision: a branch, tag or commit of the hub; None for its main branch.

    Raises:
        FileNotFoundError: there is no such directory or model.
        NotADirectoryError: the path is a file.
        PermissionError: the model is gated.
        ConnectionError: the hub fails.
        ValueError: neither a path nor an id.
        CheckpointError: weights that are refused.
        ImportError: `huggingface_hub` is not installed.
    """
    name = os.fspath(path_or_id)
    if not name:
        raise ValueError("got an empty name; give a model's directory, or its id on the hub, as 'owner/name'")
    path = Path(os.path.expanduser(name))
    recover(path)  # from a save that was killed where a directory cannot be replaced in one step
    if os.path.isdir(path):
        if revision is not None:
            raise ValueError(f"{name!r} is a directory: revision {revision!r} is for models of the hub; leave it out")
        return path
    if os.path.exists(path):
        raise NotADirectoryError(f"{name!r} is a file; give its directory, {str(path.parent)!r}")
    if not isinstance(path_or_id, str) or _is_path(name):
        raise FileNotFoundError(f"there is no directory {name!r}; a model of the hub is called 'name' or 'owner/name'")
    _check_id(name)
    return _snapshot(name, revision)


def _is_path(name: str) -> bool:
    """Whether a string can only be meant as a path."""
    many = name.count("/") > 1 and "://" not in name
    return many or name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name


def _check_id(name: str) -> None:
    """Raise ValueError for what cannot be a hub id, before anything is looked up."""
    dots = "--" in name or ".." in name or name.endswith((".", "-", ".git")) or "./" in name or "-/" in name
    if not ID.fullmatch(name) or dots or len(name) > LONGEST_ID:
        rules = f"'name' or 'owner/name' of letters, digits, '-', '_' and '.', at most {LONGEST_ID} long"
        raise ValueError(f"{reprlib.repr(name)} is neither a directory nor an id of the hub, which is {rules}")


def _snapshot(name: str, revision: str | None) -> Path:
    """A hub model's directory in the cache, complete."""
    folder = _download(name, revision)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name!r} has no config.json in {str(folder)!r}; {AGAIN}, or give another model")
    refuse_foreign(read_side(folder, "config.json", dict) or {}, str(folder / "config.json"))
    try:
        weight_files(folder)
    except FileNotFoundError as error:
        call = conversion(folder, repr(name))
        pickled = f"; if the hub has only a pickle, which can run any code, convert it with transformers: {call}"
        known = any((folder / file).is_symlink() or (folder / file).is_file() for file in (SINGLE, INDEX))
        raise FileNotFoundError(f"{name!r} is not complete: {error}; {AGAIN}{'' if known else pickled}") from None
    return folder


def _download(name: str, revision: str | None) -> Path:
    """Download with `huggingface_hub`, with its errors in our words."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        wanted = f"{name!r} is no directory here, and looking on the hub needs huggingface_hub"
        raise ImportError(f"{wanted}: {INSTALL}") from error
    of = f"{name!r}" + (f" at revision {revision!r}" if revision is not None else "")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except errors.GatedRepoError as error:
        ask = f"ask for it at https://huggingface.co/{name}, then log in with: hf auth login"
        raise PermissionError(f"the owners of {of} give it only to those who ask; {ask}") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"the hub has the model {name!r}, but no revision {revision!r} of it") from error
    except errors.RepositoryNotFoundError as error:
        private = "check the spelling; if it is private, log in with: hf auth login"
        raise FileNotFoundError(f"{name!r} is no directory here and no model of the hub; {private}") from error
    except errors.LocalEntryNotFoundError as error:
        todo = "with a network (and without HF_HUB_OFFLINE) it would be downloaded; or give a directory's path"
        raise FileNotFoundError(f"{of} is neither a directory nor complete in the hub's cache here; {todo}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the client's own: any failure of the connection
        raise ConnectionError(f"the hub did not give {of}: {error}; try again later") from error
