"""Checkpoint directories: safetensors files, shards and the small JSON files beside them."""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.files import Refusal, parsed, read_json
from regard.safetensors_file import Entry, TensorFile, TensorFileError, check_tensor, write_tensors

# Of https://github.com/haotian-liu/LLaVA, which names the language model; transformers' own classes do not.
ORIGINAL_LLAVA = re.compile(r"Llava[A-Z]\w*ForCausalLM")


def refuse_foreign(values: Mapping[str, Any], where: str) -> None:
    """Refuse a config.json that another library wrote, in words that say which.

    >>> refuse_foreign({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}, "config.json")
    Traceback (most recent call last):
        ...
    ValueError: config.json is of timm (architecture 'vit_tiny_patch16_224'), whose weights have other names: take a \
checkpoint in the format of transformers, such as google/vit-base-patch16-224; regard.watch looks into timm's own \
model as it is

    values: what config.json holds.  where: the file, for the error.
    """
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


T = TypeVar("T", dict[str, Any], list[Any])


def read_side(directory: Path | None, name: str, kind: type[T]) -> T | None:
    """The object (dict) or list that directory/name holds; None where there is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "generation_config.json").write_text('{"num_beams": 4}')
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
    """Write values as JSON to directory/name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_side(Path(folder), "modules.json", [1, 2])
    ...     read_side(Path(folder), "modules.json", list)
    [1, 2]
    """
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (directory / name).write_text(text + "\n", encoding="utf-8")


def copy_sides(source: Path, directory: Path, names: Iterable[str]) -> None:
    """Copy those of the files that a source has; folders in their names are made."""
    for name in names:
        if (source / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, directory / name)


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


LARGEST_INDEX = 100_000_000  # bytes, as the header of a safetensors file
AGAIN = "download or copy it again"


class CheckpointError(ValueError):
    """Weights that are damaged, cut short, at odds with what they say of themselves, or of a kind that is refused."""


REFUSAL = Refusal(
    error=CheckpointError,
    deep=f"it is damaged: its JSON is nested too deep; {AGAIN}",
    broken=f"it is damaged: not JSON ({{why}}); {AGAIN}",
    other=f"it is damaged: its JSON is no object, but {{value}}; {AGAIN}",
    twin=f"it is damaged: the key {{key}} comes {{times}} times; {AGAIN}",
)
"""What is said of an index that cannot be read."""

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
        checkpoint = cls(map(open_weights, files))
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


# --------------------------------------------------------------------------------------------------------- which files


@dataclass(frozen=True, slots=True)
class _Index:
    shards: Mapping[str, str]  # a tensor's file by its name
    total_size: Any  # not checked when read: None where the index has none


def weight_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files that a directory's weights are in, all of them there; none is opened.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(folder, {"a": torch.ones(3), "b": torch.ones(5)}, shard_bytes=20)
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
        raise FileNotFoundError(f"{str(directory)!r} lacks {of}: {listed(missing)}; download or copy them too")
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


def _is_dangling(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _no_target(directory: Path, links: Sequence[str]) -> FileNotFoundError:
    """What to say of links to files that are gone, as in a hub cache that was deleted in part."""
    are = f"{links[0]} is a link" if len(links) == 1 else f"{listed(links)} are links"
    target = os.readlink(directory / links[0])
    return FileNotFoundError(f"no model in {str(directory)!r}: {are} to nothing, for there is no {target!r}; {AGAIN}")


def listed(names: Sequence[str]) -> str:
    """The first eight names, and how many more there are.

    >>> listed([f"layer.{n}.bias" for n in range(11)])[-37:]
    'layer.6.bias, layer.7.bias and 3 more'
    """
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _read_index(path: Path) -> _Index:
    """The index of sharded weights, once it is sure that it names plain files of its own directory."""
    try:
        if (size := path.stat().st_size) > LARGEST_INDEX:
            raise CheckpointError(f"it has {size:,} bytes, at most {LARGEST_INDEX:,} are read; {AGAIN}")
        index = parsed(path.read_bytes(), REFUSAL)
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"it has no 'weight_map' that gives the file of each tensor; {AGAIN}")
        if strange := sorted({repr(name) for name in shards.values() if not _plain(name)}):
            raise CheckpointError(f"it names {listed(strange)}; a shard is a .safetensors file in the same directory")
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
        raise CheckpointError(f"{str(path)!r} names tensors that are not in those files: {listed(lacking)}; {AGAIN}")
    if extra := [f"{name!r} ({file})" for name, file in found.items() if name not in index.shards]:
        raise CheckpointError(f"{str(path)!r} does not name tensors that its files hold: {listed(extra)}; {AGAIN}")
    if index.total_size is not None and index.total_size != checkpoint.nbytes:
        says = f"{str(path)!r} says total_size {reprlib.repr(index.total_size)}, its files hold {checkpoint.nbytes}"
        warnings.warn(f"{says} bytes: some files may be of another version", stacklevel=3)


# ------------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write tensors as the weights of a new directory that `transformers` opens. `regard.models.saving` replaces one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(f"{folder}/new", ((name, torch.ones(2)) for name in ("a", "b")))
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
    """Tensors in their order, as many at a time as fit one file."""
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
