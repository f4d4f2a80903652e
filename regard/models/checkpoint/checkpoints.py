"""The weights of a checkpoint directory: tensors by name, in `model.safetensors` or in shards with an index.

Everything is checked before any weight is read: that the files are whole, that their sizes are true, that the index
and its shards hold the same tensors. No pickle is ever opened.
This file does not know what a model is: neither which names it has nor their shapes.
"""

from __future__ import annotations

import difflib
import json
import os
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from regard.json_header import parsed
from regard.models.checkpoint import tensor_file
from regard.models.checkpoint.converting import conversion
from regard.models.checkpoint.tensor_file import AGAIN, LARGEST_TEXT, CheckpointError, Entry, TensorFile

__all__ = ["INDEX", "SINGLE", "Checkpoint", "CheckpointError", "Entry", "weight_files", "write"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "random_states", "scaler")  # a trainer's pickles
OTHERS = {".h5": "TensorFlow", ".msgpack": "Flax"}


# ------------------------------------------------------------------------------------------------------------- reading


class Checkpoint:
    """What a directory's safetensors hold, known before any weight is read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder, {"weight": torch.ones(2, 3, dtype=torch.bfloat16), "steps": torch.tensor(7)})
    ...     checkpoint = Checkpoint.open(folder)
    ...     checkpoint
    ...     checkpoint.entries["weight"].shape
    ...     checkpoint.read("weight", dtype=torch.float32)
    Checkpoint(2 tensors, 20 bytes, files: model.safetensors)
    (2, 3)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])

    entries: an `Entry` by tensor name, in the files' order.  metadata: the files' own, text by name.
    nbytes: of all tensors, as they are in the files.
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
        """Check a directory's safetensors and map them into memory; no weight is read. See `Checkpoint`.

        directory: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names. Where both
        are there the first is taken, as `transformers` does.

        Raises FileNotFoundError or NotADirectoryError where there are no such files, CheckpointError for weights that
        are only pickled and for files that are not whole or contradict themselves or their index. Warns where only
        the index's total size is wrong: nothing depends on it, and `transformers` does not look at it.
        """
        files, index = _located(Path(directory))
        checkpoint = cls(map(TensorFile, files))
        if index is not None:
            _check_index(Path(directory) / INDEX, index, checkpoint)
        return checkpoint

    def read(self, name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, straight from the file to the device. See `Checkpoint`.

        On the CPU, in the file's own dtype, nothing is copied: the tensor is a private view of the file, loaded as it
        is used. Changing it does not change the file, and replacing the file (as `write` does) does not change it; a
        program that overwrites the file in place (cp, scp) does. Asked for twice, it is the same memory.

        dtype: what floating tensors become, on the device; others keep theirs.

        Raises LookupError for a name that is not there, TypeError for a dtype that is not floating.
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
        files = _list([file.name for file in self._files])
        return f"Checkpoint({len(self.entries)} tensors, {self.nbytes:,} bytes, files: {files})"


# --------------------------------------------------------------------------------------------------------- which files


@dataclass(frozen=True, slots=True)
class _Index:
    shards: Mapping[str, str]  # a tensor's file by its name
    total_size: Any  # not checked when read: None where the index has none


def weight_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files that a directory's weights are in, all of them there; none is opened.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder, {"a": torch.ones(3), "b": torch.ones(5)}, shard_bytes=20)
    ...     [file.name for file in weight_files(folder)]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']

    Raises as `Checkpoint.open` does, but for what is wrong inside the files.
    """
    return _located(Path(directory))[0]


def _located(directory: Path) -> tuple[list[Path], _Index | None]:
    """The files of a directory's weights, and their index if they are shards."""
    if not directory.is_dir():
        taken = directory.exists()
        why = "it is a file; give the directory it is in" if taken else "there is no such directory"
        raise (NotADirectoryError if taken else FileNotFoundError)(
            f"cannot read weights from {str(directory)!r}: {why}"
        )
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], None
    if not (directory / INDEX).is_file():
        raise _no_weights(directory)
    index = _read_index(directory / INDEX)
    names = sorted(set(index.shards.values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        if dangling := [name for name in missing if _is_dangling(directory / name)]:
            raise _no_target(directory, dangling)
        of = f"{len(missing)} of the {len(names)} files that {INDEX} names"
        raise FileNotFoundError(f"{str(directory)!r} lacks {of}: {_list(missing)}; download or copy them too")
    return [directory / name for name in names], index


def _no_weights(directory: Path) -> Exception:
    """What to say of a directory that has neither of the two files."""
    if dangling := [name for name in (SINGLE, INDEX) if _is_dangling(directory / name)]:
        return _no_target(directory, dangling)
    there = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in there if name.endswith(PICKLES) and not name.startswith(NO_WEIGHTS)]
    others = [name for name in there if name.endswith(tuple(OTHERS))]
    if pickles:
        return CheckpointError(
            f"{str(directory)!r} has its weights only as pickles ({_list(pickles)}), and opening a pickle can run any "
            f"code; if you trust where it came from, convert it once with transformers: {conversion(directory)}"
        )
    if others:
        kinds = " and ".join(sorted({OTHERS[Path(name).suffix] for name in others}))
        return CheckpointError(
            f"{str(directory)!r} has its weights only as {kinds} saves them ({_list(others)}), and regard reads "
            "safetensors; open it with transformers 4 (from_tf=True or from_flax=True) and save it again"
        )
    holds = f"it holds {_list(there)}" if there else "it is empty"
    return FileNotFoundError(f"no model in {str(directory)!r}: looked for {SINGLE} and {INDEX}; {holds}")


def _is_dangling(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _no_target(directory: Path, links: Sequence[str]) -> FileNotFoundError:
    """What to say of links to files that are gone, as in a hub cache that was deleted in part."""
    are = f"{links[0]} is a link" if len(links) == 1 else f"{_list(links)} are links"
    target = os.readlink(directory / links[0])
    return FileNotFoundError(f"no model in {str(directory)!r}: {are} to nothing, for there is no {target!r}; {AGAIN}")


def _list(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _read_index(path: Path) -> _Index:
    """The index of sharded weights, once it is sure that it names plain files of its own directory."""
    try:
        if (size := path.stat().st_size) > LARGEST_TEXT:
            raise CheckpointError(f"it has {size:,} bytes, at most {LARGEST_TEXT:,} are read; {AGAIN}")
        index = parsed(path.read_bytes(), tensor_file.REFUSAL)
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"it has no 'weight_map' that gives the file of each tensor; {AGAIN}")
        if strange := sorted({repr(name) for name in shards.values() if not _plain(name)}):
            raise CheckpointError(f"it names {_list(strange)}; a shard is a .safetensors file in the same directory")
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from None
    metadata = index.get("metadata")
    return _Index(shards, metadata.get("total_size") if isinstance(metadata, dict) else None)


def _plain(name: str) -> bool:
    """Whether a name is a file of the directory itself: the index comes from strangers, and must not lead outside."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0")


def _check_index(path: Path, index: _Index, checkpoint: Checkpoint) -> None:
    """Refuse an index and files that do not hold the same tensors."""
    found = {name: entry.file.name for name, entry in checkpoint.entries.items()}
    if lacking := [f"{name!r} ({file})" for name, file in index.shards.items() if found.get(name) != file]:
        raise CheckpointError(f"{str(path)!r} names tensors that are not in those files: {_list(lacking)}; {AGAIN}")
    if extra := [f"{name!r} ({file})" for name, file in found.items() if name not in index.shards]:
        raise CheckpointError(f"{str(path)!r} does not name tensors that its files hold: {_list(extra)}; {AGAIN}")
    if index.total_size is not None and index.total_size != checkpoint.nbytes:
        says = f"{str(path)!r} says total_size {reprlib.repr(index.total_size)}, its files hold {checkpoint.nbytes}"
        warnings.warn(f"{says} bytes: some files may be of another version", stacklevel=3)


# ------------------------------------------------------------------------------------------------------------- writing


def write(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write tensors as the weights of a new directory that `transformers` opens. `regard.models.storing` replaces one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/new", ((name, torch.ones(2)) for name in ("a", "b")))
    ...     Checkpoint.open(f"{folder}/new")
    Checkpoint(2 tensors, 16 bytes, files: model.safetensors)

    directory: made if it is not there; without weights.
    tensors: by name, or as pairs that may be made one by one: at most one shard's are held. On any device.
    shard_bytes: a file's tensors take at most this, or are a single one. One file is `model.safetensors`; more are
    numbered, with an index.

    Raises TypeError or ValueError for what a safetensors file cannot hold, OSError when writing fails.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []  # the tensors' names in each
    total = {"total_parameters": 0, "total_size": 0}
    for shard in _shards(tensors.items() if isinstance(tensors, Mapping) else tensors, shard_bytes):
        tensor_file.write(place / f"{len(shards)}", shard)
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
    """Tensors in their order, as many at a time as fit one file."""
    shard: dict[str, Tensor] = {}
    seen: set[str] = set()
    held = 0
    for name, tensor in pairs:
        tensor_file.check(name, tensor)
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
