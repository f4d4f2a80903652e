"""One safetensors file: its header checked against the file, its data mapped into memory, and the same written.

    8 bytes   length of the text, little-endian
    text      {"__metadata__": {…}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
    data      the tensors' bytes, one after the other

A file that opens is whole, and the sizes it gives are true: nothing is taken on trust but the values themselves.
This file does not know of directories, shards or models.
"""

from __future__ import annotations

import json
import mmap
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from regard.json_header import Refusal, parsed
from regard.models.checkpoint.converting import conversion

__all__ = ["AGAIN", "LARGEST_TEXT", "REFUSAL", "CheckpointError", "Entry", "TensorFile", "check", "write"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

LARGEST_TEXT = 100_000_000  # bytes, as safetensors itself
MOST_AXES = 64  # of a tensor that torch computes with
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
"""What is said of JSON that cannot be read, in this file and beside it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file says of one tensor, and where its bytes are.

    >>> Entry("scale", (2, 3), torch.float16, Path("model.safetensors"), 64).nbytes
    12
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    start: int  # of its bytes in the file

    @property
    def nbytes(self) -> int:
        """How many bytes the tensor takes in the file."""
        return prod(self.shape) * self.dtype.itemsize


# ------------------------------------------------------------------------------------------------------------- reading


class TensorFile:
    """A safetensors file, checked and mapped into memory; no tensor is read until it is asked for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder, "some.safetensors"), {"a": torch.arange(3)})
    ...     file = TensorFile(Path(folder, "some.safetensors"))
    ...     file.view("a")
    tensor([0, 1, 2])

    entries: an `Entry` by tensor name, in the order of the data.  metadata: the file's own, text by name.

    Raises OSError for what cannot be opened, CheckpointError for a file that is not whole or contradicts itself.
    """

    __slots__ = ("_mapping", "entries", "metadata")

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                text = _checked_text(file, size, path)
                header = parsed(text, REFUSAL)
                self.metadata = _checked_metadata(header.pop("__metadata__", {}))
                self.entries = _checked_entries(header, path, 8 + len(text), size)
                # private: what training does to the weights never reaches the file
                self._mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except CheckpointError as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error}") from None

    def view(self, name: str) -> Tensor:
        """A tensor that shares the mapped file's memory, or a copy where its bytes are not aligned."""
        # 0.4 ms for the 104 tensors of MiniLM (91 MB); safetensors' get_tensor, without a copy too, takes 2.0 ms
        entry = self.entries[name]
        count = prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.start % entry.dtype.itemsize:  # allowed by the format, though safetensors' own writer avoids it
            raw = torch.frombuffer(self._mapping, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
            return raw.clone().view(entry.dtype).view(entry.shape)
        return torch.frombuffer(self._mapping, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)


def _checked_text(file: BufferedReader, size: int, path: Path) -> bytes:
    """The header's text; nothing is read that the file does not hold."""
    start = file.read(32)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError("it is a Git LFS pointer, not the weights; fetch them with: git lfs pull")
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):  # torch.save, now and before 1.6
        raise CheckpointError(
            "it is a pickle by another name, which can run any code; if you trust where it came from, call it "
            f"pytorch_model.bin and convert it once with transformers: {conversion(path.parent)}"
        )
    length = int.from_bytes(start[:8], "little")
    if size < 8 or (length <= LARGEST_TEXT and size < 8 + length):
        expected = 8 + length if size >= 8 else 8
        raise CheckpointError(
            f"it is cut short: it should hold at least {expected:,} bytes and holds {size:,}; {AGAIN}"
        )
    if length > LARGEST_TEXT or start[8:9] != b"{":
        raise CheckpointError(f"it is damaged or no safetensors file: it does not start with a header; {AGAIN}")
    file.seek(8)
    return file.read(length)


def _checked_metadata(metadata: Any) -> Mapping[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"its metadata are not text by name: {reprlib.repr(metadata)}; {AGAIN}")
    if metadata.get("format") in ("tf", "flax"):
        layout = f"its weights are laid out for {metadata['format']!r}, not 'pt'"
        raise CheckpointError(
            f"{layout}; open it with transformers 4 (from_tf=True or from_flax=True) and save it again"
        )
    return MappingProxyType(metadata)


def _checked_entries(header: Mapping[str, Any], path: Path, base: int, size: int) -> Mapping[str, Entry]:
    """The tensors of a header, once they fill the file from `base` to its end, one after the other."""
    entries, at, before = {}, 0, ""
    for begin, end, name in sorted((*_span(name, value), name) for name, value in header.items()):
        if begin > at:
            raise CheckpointError(f"bytes {at:,} to {begin:,} of its data belong to no tensor; {AGAIN}")
        if begin < at:
            raise CheckpointError(f"tensors {before!r} and {name!r} overlap in its data; {AGAIN}")
        entries[name] = Entry(name, tuple(header[name]["shape"]), DTYPES[header[name]["dtype"]], path, base + begin)
        at, before = end, name
    if base + at > size:
        raise CheckpointError(f"it is cut short: it should hold {base + at:,} bytes and holds {size:,}; {AGAIN}")
    if base + at < size:
        raise CheckpointError(f"it has {size - base - at:,} bytes after the last tensor; {AGAIN}")
    return MappingProxyType(entries)


def _span(name: str, value: Any) -> tuple[int, int]:
    """Where a tensor's bytes begin and end in the data, once they fit its shape."""
    match value:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [begin, end]} if len(value) == 3:
            pass
        case _:
            says = f"tensor {name!r} is {reprlib.repr(value)}"
            raise CheckpointError(f"{says}, not a dtype, a shape and two data_offsets; {AGAIN}")
    if code not in DTYPES:
        raise CheckpointError(f"tensor {name!r} is of dtype {code!r}; regard reads {', '.join(DTYPES)}")
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"tensor {name!r} has sizes that are no counts: {reprlib.repr(value)}; {AGAIN}")
    if len(shape) > MOST_AXES or prod(n or 1 for n in shape) >= 2**60:  # torch counts in 64 bits, past an axis of 0
        raise CheckpointError(f"tensor {name!r} of shape {reprlib.repr(shape)} is larger than tensors can be; {AGAIN}")
    if end - begin != (takes := prod(shape) * DTYPES[code].itemsize):
        has = f"tensor {name!r} has {end - begin:,} bytes"
        raise CheckpointError(f"{has}, but its shape {tuple(shape)} in {code} takes {takes:,}; {AGAIN}")
    return begin, end


# ------------------------------------------------------------------------------------------------------------- writing


def check(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that a safetensors file cannot hold.

    >>> check("weight", torch.ones(2).to_sparse())
    Traceback (most recent call last):
    TypeError: tensor 'weight' is of layout torch.sparse_coo; a file holds dense tensors with their values

    Raises TypeError for what is no dense tensor of a known dtype, ValueError for a name that cannot be written.
    """
    if not isinstance(name, str):
        raise TypeError(f"a tensor's name must be a string, got {type(name).__name__}: {name!r}")
    if name == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"no tensor can be named {name!r}: it is kept for the metadata, or half of a surrogate pair")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor {name!r} must be a torch tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise TypeError(f"tensor {name!r} is {kind}; a file holds dense tensors with their values")
    if tensor.dtype not in CODES:
        raise TypeError(f"tensor {name!r} is of {tensor.dtype}; a file holds {', '.join(map(str, CODES))}")


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new safetensors file, as `TensorFile` reads it, and wait until it is on the disk.

    tensors: by name, on any device, all of them such as `check` lets through.

    Raises OSError for a path that is taken and when writing fails; what is written by then stays.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # wide ones first, so all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:  # one at a time: they may come from a GPU
            file.write(_raw(tensors[name]))
        file.flush()
        os.fsync(file.fileno())


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, row-major."""
    if tensor.numel() == 0:
        return memoryview(b"")
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data
