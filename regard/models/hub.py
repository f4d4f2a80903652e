"""The model hub: which files of a model regard reads, and downloading them."""

from __future__ import annotations

import re
import reprlib
from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
WANTED = ["config.json", "generation_config.json", SINGLE, INDEX, "*-of-*.safetensors", *TOKENIZER, *POOLING, *IMAGES]
UNWANTED = ["*/*.safetensors", "consolidated*"]  # other parts' weights, and the same weights once more

ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
LONGEST_ID = 96  # letters, the hub's own limit


def download(name: str, revision: str | None = None) -> Path:
    """The directory in the hub's cache that holds a model: only the files that regard reads, never pickles or code.

    Raises:
        FileNotFoundError: there is no such model or revision, or no network to get it.
        PermissionError: the model is gated.
        ConnectionError: the hub fails.
        ValueError: not an id of the hub.
        ImportError: `huggingface_hub` is not installed.
    """
    dots = "--" in name or ".." in name or name.endswith((".", "-", ".git")) or "./" in name or "-/" in name
    if not ID.fullmatch(name) or dots or len(name) > LONGEST_ID:
        rules = f"'name' or 'owner/name' of letters, digits, '-', '_' and '.', at most {LONGEST_ID} long"
        raise ValueError(f"{reprlib.repr(name)} is neither a directory nor an id of the hub, which is {rules}")
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        wanted = f"{name!r} is no directory here, and looking on the hub needs huggingface_hub"
        raise ImportError(f"{wanted}: pip install 'regard[models]'") from error
    of = f"{name!r}" + (f" at revision {revision!r}" if revision is not None else "")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except errors.GatedRepoError as error:
        ask = f"ask for access at https://huggingface.co/{name}, then log in with: hf auth login"
        raise PermissionError(f"{of} is gated; {ask}") from error
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
