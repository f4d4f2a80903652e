"""Checkpoint directories: where they are (a path or the hub), their safetensors, and the JSON files beside them."""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.files import Refusal, parsed, read_json, recover
from regard.safetensors_file import Entry, TensorFile, TensorFileError, check_tensor, write_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 100_000_000  # bytes, as the header of a safetensors file
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "random_states", "scaler")  # a trainer's pickles
OTHERS = {".h5": "TensorFlow", ".msgpack": "Flax"}
AGAIN = "download or copy it again"

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
WITH_NETWORK = "load it again with a network"
BESIDE = (
    "copy the files of tokenizer and preprocessor there, too (or save them there with AutoTokenizer and AutoProcessor)"
)
# Of https://github.com/haotian-liu/LLaVA, which names the language model; transformers' own classes do not.
ORIGINAL_LLAVA = re.compile(r"Llava[A-Z]\w*ForCausalLM")


class CheckpointError(ValueError):
    """Weights that are damaged, cut short, at odds with what they say of themselves, or of a kind that is refused."""


REFUSAL = Refusal(
    error=CheckpointError,
    deep=f"it is damaged: its JSON is nested too deep; {AGAIN}",
    broken=f"it is damaged: not JSON ({{why}}); {AGAIN}",
    other=f"it is damaged: its JSON is no object, but {{value}}; {AGAIN}",
    twin=f"it is damaged: the key {{key}} comes {{times}} times; {AGAIN}",
)
"""Messages for an index that cannot be read."""


# ------------------------------------------------------------------------------------------------------------- finding


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
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name
    if not isinstance(path_or_id, str) or is_path or (name.count("/") > 1 and "://" not in name):
        raise FileNotFoundError(f"there is no directory {name!r}; a model of the hub is called 'name' or 'owner/name'")
    dots = "--" in name or ".." in name or name.endswith((".", "-", ".git")) or "./" in name or "-/" in name
    if not ID.fullmatch(name) or dots or len(name) > LONGEST_ID:
        rules = f"'name' or 'owner/name' of letters, digits, '-', '_' and '.', at most {LONGEST_ID} long"
        raise ValueError(f"{reprlib.repr(name)} is neither a directory nor an id of the hub, which is {rules}")
    folder = _download(name, revision)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{name!r} has no config.json in {str(folder)!r}; {WITH_NETWORK}, or give another model"
        )
    refuse_foreign(read_side(folder, "config.json", dict) or {}, str(folder / "config.json"))
    try:
        weight_files(folder)
    except FileNotFoundError as error:
        call = conversion(folder, repr(name))
        pickled = f"; if the hub has only a pickle, which can run any code, convert it with transformers: {call}"
        known = any((folder / file).is_symlink() or (folder / file).is_file() for file in (SINGLE, INDEX))
        message = f"{name!r} is not complete: {error}; {WITH_NETWORK}{'' if known else pickled}"
        raise FileNotFoundError(message) from None
    return folder


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        wanted = f"{name!r} is no directory here, and looking on the hub needs huggingface_hub"
        raise ImportError(f"{wanted}: pip install 'regard[models]'") from error
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


def refuse_foreign(values: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for the values of a config.json that another library wrote, with its name."""
    match values.get("architectures"):
        case [str(name), *_] if ORIGINAL_LLAVA.fullmatch(name):
            raise ValueError(
                f"{where} is of the original LLaVA code ({name}), whose weights have other names: take a checkpoint in "
                "the format of transformers, such as llava-hf/llava-1.5-7b-hf"
            )
    architecture = values.get("architecture")
    if isinstance(architecture, str) and "model_type" not in values and "pretrained_cfg" in values:
        raise ValueError(
            f"{where} is of timm (architecture {architecture!r:.80}), whose weights have other names: take a "
            "checkpoint in the format of transformers, such as google/vit-base-patch16-224; regard.watch looks into "
            "timm's own model as it is"
        )


def conversion(directory: Path, source: str = "directory") -> str:
    """The call that converts a pickled checkpoint with transformers, and what else has to be copied.

    directory: where config.json is, if there is one.  source: what is converted, as it stands in the call.
    """
    name, of = "C", ", C being the class that config.json names as architectures (AutoModel would leave out its head)"
    try:
        match (read_side(directory, "config.json", dict) or {}).get("architectures"):
            case [str(first), *_] if first.isidentifier():  # it comes from strangers, and becomes part of a call
                name, of = first, ""
    except (OSError, ValueError):
        pass  # loading says why
    return f"{name}.from_pretrained({source}).save_pretrained(new_directory){of}; {BESIDE}"


# ---------------------------------------------------------------------------------------------------------- side files

T = TypeVar("T", dict[str, Any], list[Any])


def read_side(directory: Path | None, name: str, kind: type[T]) -> T | None:
    """The object (dict) or list that directory/name holds, or None if there is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_side(Path(folder), "generation_config.json", {"num_beams": 4})
    ...     read_side(Path(folder), "generation_config.json", dict), read_side(Path(folder), "modules.json", list)
    ({'num_beams': 4}, None)

    Raises ValueError for what is not JSON of this kind.
    """
    path = None if directory is None else directory / name
    if path is None or not path.is_file():
        return None
    values = read_json(path)
    if not isinstance(values, kind):
        wanted = "an object" if kind is dict else "a list"
        raise ValueError(f"{path} must hold {wanted}, it holds {type(values).__name__}")
    return values


def write_side(directory: Path, name: str, values: object) -> None:
    """Write values as JSON to directory/name."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (directory / name).write_text(text + "\n", encoding="utf-8")


def copy_sides(source: Path, directory: Path, names: Iterable[str]) -> None:
    """Copy those of the files that exist in `source`."""
    for name in names:
        if (source / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, directory / name)


def listed(names: Sequence[str]) -> str:
    """The first eight names, and how many more there are.

    >>> listed([f"layer.{n}.bias" for n in range(11)])[-37:]
    'layer.6.bias, layer.7.bias and 3 more'
    """
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# ------------------------------------------------------------------------------------------------------------- reading


class Checkpoint:
    """The safetensors of a directory, checked before any weight is read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(folder, {"weight": torch.ones(2, 3, dtype=torch.bfloat16), "steps": torch.tensor(7)})
    ...     checkpoint = Checkpoint.open(folder)
    ...     checkpoint
    ...     checkpoint.entries["weight"].shape
    ...     checkpoint.read("weight", dtype=torch.float32)
    Checkpoint(2 tensors, 20 bytes, files: model.safetensors)
    (2, 3)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])

    entries: an `Entry` by tensor name, in the files' order.  metadata: the files' own, text by name.
    nbytes: of all tensors in the files.
    """

    __slots__ = ("_files", "entries", "metadata", "nbytes")

    def __init__(self, files: Iterable[TensorFile]) -> None:
        entries: dict[str, Entry] = {}
        metadata: dict[str, str] = {}
        self._files: dict[Path, TensorFile] = {}
        for file in files:
            for entry in file.entries.values():
                if entry.name in entries:
                    both = f"{str(entries[entry.name].file)!r} and {entry.file.name!r}"
                    raise CheckpointError(f"tensor {entry.name!r} is in both {both}; {AGAIN}")
                entries[entry.name] = entry
                self._files[entry.file] = file
            metadata.update(file.metadata)
        self.entries: Mapping[str, Entry] = MappingProxyType(entries)
        self.metadata: Mapping[str, str] = MappingProxyType(metadata)
        self.nbytes = sum(entry.nbytes for entry in entries.values())

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Check a directory's safetensors and map them into memory; no weight is read.

        Args:
            directory: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names. If both
                exist the first is taken, as `transformers` does.

        Raises:
            FileNotFoundError: there are no such files.
            NotADirectoryError: the path is a file.
            CheckpointError: weights that are only pickled, files that are damaged or contradict their index.

        Warns:
            UserWarning: the index's total size alone is wrong, which `transformers` does not look at.
        """
        files, index = _locate(Path(directory))
        checkpoint = cls(map(open_weights, files))
        if index is None:
            return checkpoint
        path, shards = str(Path(directory) / INDEX), index["weight_map"]
        stored = {name: entry.file.name for name, entry in checkpoint.entries.items()}
        if lacking := [f"{name!r} ({file})" for name, file in shards.items() if stored.get(name) != file]:
            raise CheckpointError(f"{path!r} names tensors that are not in those files: {listed(lacking)}; {AGAIN}")
        if extra := [f"{name!r} ({file})" for name, file in stored.items() if name not in shards]:
            raise CheckpointError(f"{path!r} does not name tensors that its files hold: {listed(extra)}; {AGAIN}")
        metadata = index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if total is not None and total != checkpoint.nbytes:
            says = f"{path!r} says total_size {reprlib.repr(total)}, its files hold {checkpoint.nbytes}"
            warnings.warn(f"{says} bytes: some files may be of another version", stacklevel=2)
        return checkpoint

    def read(self, name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, straight from the file to the device.

        On the CPU, in the file's own dtype, nothing is copied: the tensor is a private view of the file, loaded as it
        is used. Changing it does not change the file, and replacing the file (as `save` does) does not change it; a
        program that overwrites the file in place (cp, scp) does. Read twice, it is the same memory.

        Args:
            name: of the tensor.
            device: where it goes.
            dtype: what floating tensors become, on the device; others keep theirs.

        Raises:
            LookupError: there is no such tensor.
            TypeError: the dtype is not floating.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype is what floating tensors become, got {dtype}; give a floating dtype or None")
        entry = self.entries.get(name)
        if entry is None:
            near = " ".join(map(repr, difflib.get_close_matches(name, self.entries)))
            raise LookupError(f"no tensor {name!r} among the {len(self.entries)}; closest: {near or 'none'}")
        tensor = self._files[entry.file].view(name).to(device)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def __repr__(self) -> str:
        files = listed([file.name for file in self._files])
        return f"Checkpoint({len(self.entries)} tensors, {self.nbytes:,} bytes, files: {files})"


def open_weights(path: Path) -> TensorFile:
    """Open one file of weights. Raises OSError, or CheckpointError for a damaged file, a pickle or another layout."""
    with path.open("rb") as file:
        start = file.read(32)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"cannot read {str(path)!r}: it is a Git LFS pointer, not the weights; fetch them with: git lfs pull"
        )
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):  # torch.save, now and before 1.6
        raise CheckpointError(
            f"cannot read {str(path)!r}: it is a pickle by another name, which can run any code; if you trust where it "
            f"came from, call it pytorch_model.bin and convert it once with transformers: {conversion(path.parent)}"
        )
    try:
        weights = TensorFile(path)
    except TensorFileError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}; {AGAIN}") from None
    layout = weights.metadata.get("format")
    if layout in ("tf", "flax"):
        raise CheckpointError(
            f"cannot read {str(path)!r}: its weights are laid out for {layout!r}, not 'pt'; open it with transformers "
            "4 (from_tf=True or from_flax=True) and save it again"
        )
    return weights


def weight_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files that a directory's weights are in; none is opened. Raises as `Checkpoint.open` does."""
    return _locate(Path(directory))[0]


def _locate(directory: Path) -> tuple[list[Path], dict[str, Any] | None]:
    """The files of a directory's weights, and their index if they are shards."""
    if not directory.is_dir():
        is_file = directory.exists()
        why = "it is a file; give the directory it is in" if is_file else "there is no such directory"
        raise (NotADirectoryError if is_file else FileNotFoundError)(
            f"cannot read weights from {str(directory)!r}: {why}"
        )
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], None
    if not (directory / INDEX).is_file():
        raise _no_weights(directory)
    index = _read_index(directory / INDEX)
    names = sorted(set(index["weight_map"].values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        of = f"{len(missing)} of the {len(names)} files that {INDEX} names"
        raise _broken_links(directory, missing) or FileNotFoundError(
            f"{str(directory)!r} lacks {of}: {listed(missing)}; download or copy them too"
        )
    return [directory / name for name in names], index


def _no_weights(directory: Path) -> Exception:
    """The error for a directory that has neither of the two files."""
    if broken := _broken_links(directory, [SINGLE, INDEX]):
        return broken
    there = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in there if name.endswith(PICKLES) and not name.startswith(NO_WEIGHTS)]
    others = [name for name in there if name.endswith(tuple(OTHERS))]
    if pickles:
        return CheckpointError(
            f"{str(directory)!r} has its weights only as pickles ({listed(pickles)}), and opening a pickle can run any "
            f"code; if you trust where it came from, convert it once with transformers: {conversion(directory)}"
        )
    if others:
        kinds = " and ".join(sorted({OTHERS[Path(name).suffix] for name in others}))
        return CheckpointError(
            f"{str(directory)!r} has its weights only as {kinds} saves them ({listed(others)}), and regard reads "
            "safetensors; open it with transformers 4 (from_tf=True or from_flax=True) and save it again"
        )
    holds = f"it holds {listed(there)}" if there else "it is empty"
    return FileNotFoundError(f"no model in {str(directory)!r}: looked for {SINGLE} and {INDEX}; {holds}")


def _broken_links(directory: Path, names: Sequence[str]) -> FileNotFoundError | None:
    """The error for links to files that are gone, as in a hub cache that was deleted in part."""
    links = [name for name in names if (directory / name).is_symlink() and not (directory / name).exists()]
    if not links:
        return None
    are = f"{links[0]} is a link" if len(links) == 1 else f"{listed(links)} are links"
    target = os.readlink(directory / links[0])
    return FileNotFoundError(f"no model in {str(directory)!r}: {are} to nothing, for there is no {target!r}; {AGAIN}")


def _read_index(path: Path) -> dict[str, Any]:
    """The index of sharded weights. It comes from strangers: it may name plain files of its own directory only."""
    try:
        if (size := path.stat().st_size) > LARGEST_INDEX:
            raise CheckpointError(f"it has {size:,} bytes, at most {LARGEST_INDEX:,} are read; {AGAIN}")
        index: dict[str, Any] = parsed(path.read_bytes(), REFUSAL)
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"it has no 'weight_map' that gives the file of each tensor; {AGAIN}")
        plain = {name for name in shards.values() if name.endswith(".safetensors") and not set(name) & set("/\\:\0")}
        if strange := sorted(map(repr, set(shards.values()) - plain)):
            raise CheckpointError(f"it names {listed(strange)}; a shard is a .safetensors file in the same directory")
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from None
    return index


# ------------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write tensors as the weights of a new directory that `transformers` opens.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(f"{folder}/new", ((name, torch.ones(2)) for name in ("a", "b")))
    ...     Checkpoint.open(f"{folder}/new")
    Checkpoint(2 tensors, 16 bytes, files: model.safetensors)

    Args:
        directory: created if it does not exist; without weights.
        tensors: by name, or as pairs that may be made one by one: at most one shard's are held. On any device.
        shard_bytes: a file's tensors take at most this, or are a single one. One file is `model.safetensors`; more are
            numbered, with an index.

    Raises:
        TypeError: as ValueError.
        ValueError: for what a safetensors file cannot hold.
        OSError: writing failed.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []  # the tensors' names in each
    total = {"total_parameters": 0, "total_size": 0}
    for shard in _shards(tensors.items() if isinstance(tensors, Mapping) else tensors, shard_bytes):
        write_tensors(place / f"{len(shards)}", shard)
        shards.append(list(shard))
        total["total_parameters"] += sum(tensor.numel() for tensor in shard.values())
        total["total_size"] += sum(tensor.nbytes for tensor in shard.values())
        del shard  # before the next ones are made: gigabytes
    if not shards:
        raise ValueError("there are no tensors to write")
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else [SINGLE]
    for i, file in enumerate(files):
        (place / f"{i}").rename(place / file)
    if len(files) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True)
        (place / INDEX).write_text(text + "\n", encoding="utf-8")


def _shards(pairs: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    seen: set[str] = set()
    held = 0
    for name, tensor in pairs:
        check_tensor(name, tensor)
        if name in seen:
            raise ValueError(f"two tensors are named {name!r}")
        seen.add(name)
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    if shard:
        yield shard
