"""Files from outside, read with bounds and checks: bytes, JSON and safetensors; and safetensors written.

Tensors are read by the safetensors library, with the checks it lacks, and written one at a time.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

MOST_JSON = 2**26
"""Bytes of a JSON file, 64 MiB: the largest tokenizers have 35 MB, every other file a few kilobytes."""

CHUNK = 2**20  # bytes
LONGEST = 300  # characters of a parser's own message; Rust quotes whole files

Kind = TypeVar("Kind", dict[str, Any], list[Any])


# ------------------------------------------------------------------------------------------------------- bytes and JSON


@contextmanager
def parsing(where: str, wrong: str = "cannot be read") -> Iterator[None]:
    """Inside `with`, whatever a third-party parser raises becomes one ValueError that names the file `where`.

    That includes the panics of Rust extensions: `pyo3_runtime.PanicException` is not an Exception. (Rust also prints a
    panic to stderr before it is raised; that cannot be turned off.) A ValueError that names the file already, errors of
    the system, a missing library, interrupts and exits pass as they are; a MemoryError gets the file's name.

    >>> with parsing("tokenizer.json"):
    ...     raise IndexError("index out of range")
    Traceback (most recent call last):
        ...
    ValueError: tokenizer.json cannot be read: IndexError: index out of range
    """
    try:
        yield
    except ImportError:
        raise
    except MemoryError:
        raise MemoryError(f"there is not enough memory to read {where}") from None
    except BaseException as problem:
        panic = type(problem).__name__ == "PanicException"  # each extension has a class of its own
        system = isinstance(problem, OSError) and problem.errno is not None
        named = isinstance(problem, ValueError) and where in str(problem)
        if system or named or not (panic or isinstance(problem, Exception)):
            raise
        message = " ".join(str(problem).split())
        message = message if len(message) <= LONGEST else message[: LONGEST - 1] + "…"
        # The words of these are meant for people; a KeyError is a name alone, and many others are empty.
        plain = isinstance(problem, (ValueError, OSError)) or type(problem) is Exception
        message = message if message and plain else f"{type(problem).__name__}: {message}".rstrip(": ")
        raise ValueError(f"{where} {wrong}: {message}") from None


def read_bounded(path: Path, most: int) -> bytes:
    """The bytes of a file. A pipe is read only where it is open already (/dev/stdin, /dev/fd/…): nothing waits for it.

    Raises ValueError for more than `most` bytes, OSError as `check_file` and `open` do.
    """
    if not (path.is_fifo() and str(path).startswith(("/dev/fd/", "/dev/stdin"))):
        check_file(path)
    with path.open("rb") as file:
        return read_stream(file, most, repr(str(path)))


def check_file(path: Path) -> None:
    """Raise OSError for a folder, a pipe (which might never be written to) or a device (which has no end)."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"cannot read {str(path)!r}: it is a folder; name a file")
    if not stat.S_ISREG(mode):
        kind = "a pipe or socket" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else "a device"
        raise OSError(f"cannot read {str(path)!r}: it is {kind}; name a file")


def read_stream(file: IO[bytes], most: int, where: str) -> bytes:
    """The rest of an open file. Raises ValueError for more than `most` bytes, once it has read that many."""
    parts: list[bytes] = []
    while part := file.read(CHUNK):  # which takes as much memory as it is asked for
        parts.append(part)
        if len(parts) * CHUNK > most and sum(map(len, parts)) > most:
            raise ValueError(f"{where} holds more than {most:,} bytes, which is the most that is read")
    return b"".join(parts)


def read_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8.

    Raises ValueError for anything else, for a key that has two different values, and for more than MOST_JSON bytes.
    """
    return parse_json(read_bounded(path, MOST_JSON), os.fspath(path))


def parse_json(text: bytes | str, where: str) -> Any:
    """The value of a text in JSON, which messages call `where`; bytes are UTF-8. Raises ValueError as `read_json`."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # UTF-8, JSON, thousands of digits, or of brackets
        raise ValueError(f"{where} is not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        for key, one in pairs:
            if one != value[key]:
                raise ValueError(f"the key {key!r:.80} has two values, {one!r:.80} and {value[key]!r:.80}")
    return value


def read_optional_json(directory: Path | None, name: str, kind: type[Kind]) -> Kind | None:
    """The object (dict) or list that directory/name holds, or None if there is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "some.json").write_text('{"num_beams": 4}')
    ...     [read_optional_json(Path(folder), name, dict) for name in ("some.json", "other.json")]
    [{'num_beams': 4}, None]

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


# ---------------------------------------------------------------------------------------------------------- safetensors


DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; the library refuses more
MAX_AXES = 64  # of a tensor that torch computes with
MAX_ELEMENTS = 2**60  # torch counts elements in 64 bits, past an axis of length 0, too


class TensorFileError(ValueError):
    """A file that is damaged, cut short, or not a safetensors file that regard reads."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The name, shape and dtype of one tensor in a file.

    >>> Entry("scale", (2, 3), torch.float16, Path("model.safetensors")).nbytes
    12
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def nbytes(self) -> int:
        """How many bytes the tensor takes in the file."""
        return prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """An open safetensors file. No tensor is read until it is used.

    The library checks that the header is sound and that its tensors fill the file without holes or overlap. Checked
    here: keys that come twice, dtypes and shapes that torch cannot hold. The file is mapped once and tensors are views
    of the map: the library's `get_tensor` takes five times as long, which counts for hundreds of small tensors.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "some.safetensors"), {"a": torch.arange(3)})
    ...     TensorFile(Path(folder, "some.safetensors")).view("a")
    tensor([0, 1, 2])

    Attributes:
        entries: an `Entry` by tensor name, in the order of the data.
        metadata: the file's own, text by name.

    Raises:
        OSError: the file cannot be opened.
        TensorFileError: the file is damaged or cut short.
    """

    __slots__ = ("_map", "_starts", "entries", "metadata")

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:  # OSError with the path, where the library would have its own
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, MAX_HEADER))
            try:
                safe_open(path, framework="pt")
            except SafetensorError as error:
                raise TensorFileError(_explain(error, size, length, text)) from None
            except RuntimeError:  # of torch, which maps the file once more
                raise TensorFileError("it was replaced or cut short while it was read") from None
            self._map = mmap(file.fileno(), 0, access=ACCESS_COPY)
        try:
            header = parse_json(text, "its header")
        except ValueError as error:
            raise TensorFileError(str(error)) from None
        self.metadata: Mapping[str, str] = MappingProxyType(header.pop("__metadata__", None) or {})
        entries, self._starts = {}, {}
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            code, shape = tensor["dtype"], tuple(tensor["shape"])
            if code not in DTYPES:
                raise TensorFileError(f"tensor {name!r} is of dtype {code!r}; regard reads {', '.join(DTYPES)}")
            if len(shape) > MAX_AXES or prod(n or 1 for n in shape) >= MAX_ELEMENTS:
                raise TensorFileError(f"tensor {name!r} of shape {shape!s:.80} is larger than tensors can be")
            entries[name] = Entry(name, shape, DTYPES[code], path)
            self._starts[name] = 8 + length + tensor["data_offsets"][0]
        self.entries: Mapping[str, Entry] = MappingProxyType(entries)

    def view(self, name: str) -> Tensor:
        """A tensor that shares the mapped file's memory privately, or a copy if its bytes are not aligned."""
        entry, start = self.entries[name], self._starts[name]
        count = prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if start % entry.dtype.itemsize:  # the map itself begins at a page
            data = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=start).clone()
            return data.view(entry.dtype).view(entry.shape)
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=start).view(entry.shape)


def _explain(error: SafetensorError, size: int, length: int, text: bytes) -> str:
    """What is wrong with a file: most often it is cut short, for which the library gives no sizes."""
    expected = 8 + length if size >= 8 else 8
    if size >= expected:
        try:
            header = json.loads(text)
            expected += max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            expected = size
    if length > MAX_HEADER or expected <= size:
        return f"it is damaged or no safetensors file: {error}"
    return f"it is cut short: it should hold at least {expected:,} bytes and holds {size:,}"


def check_tensor(name: str, tensor: Tensor) -> None:
    """Check that a safetensors file can hold a tensor.

    >>> check_tensor("weight", torch.ones(2).to_sparse())
    Traceback (most recent call last):
    TypeError: tensor 'weight' is of layout torch.sparse_coo; a file holds dense tensors with their values

    Raises TypeError for what is no dense tensor of a known dtype.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise TypeError(f"tensor {name!r} is {kind}; a file holds dense tensors with their values")
    if tensor.dtype not in CODES:
        raise TypeError(f"tensor {name!r} is of {tensor.dtype}; a file holds {', '.join(map(str, CODES))}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new safetensors file and wait until it is on the disk.

    The library's writer takes all tensors on the CPU at once; here they may come from a GPU, one at a time.

    Args:
        path: a file that does not exist.
        tensors: by name, on any device; each passes `check_tensor`.

    Raises:
        OSError: the path is taken, or writing fails; what is written by then stays.
    """
    entries = header_entries(tensors)
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in entries:
            file.write(raw_bytes(tensors[name]))
        file.flush()
        os.fsync(file.fileno())


def header_entries(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The header's entry of each tensor, in the order of the data: wide dtypes first, so that all are aligned."""
    entries, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return entries


def raw_bytes(tensor: Tensor) -> bytes | memoryview:
    """The numbers of a tensor as a file holds them."""
    if not tensor.numel():
        return b""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data
