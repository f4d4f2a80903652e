"""The `.regard` file: named tensors and one JSON header, checked on reading."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence, Set
from hashlib import blake2b, file_digest
from io import BufferedReader
from math import inf, isfinite, prod
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard.files import Refusal, atomic_file, parsed

Array = np.ndarray[Any, Any]

VERSION = 1
"""The format this file writes and reads."""

MAGIC = b'{"__metadata__":{"format":"regard capture","version":"'
METADATA = ["format", "version", "header_blake2b", "data_blake2b", "header"]

ZEROS = "0" * 64  # a checksum's place
_START = f'{MAGIC.decode()}{VERSION}","header_blake2b":"'
SEAL = slice(len(_START), len(_START) + 64)  # where the text holds its own checksum
DATA_SEAL = slice(SEAL.stop + len('","data_blake2b":"'), SEAL.stop + len('","data_blake2b":"') + 64)

LARGEST_TEXT = 64 * 2**20  # bytes; safetensors itself reads up to 100 MB
DEEPEST = 64  # levels of lists and dicts in a header; Python's JSON reader gives up near its recursion limit
MOST_AXES = 64  # of a tensor that torch computes with
ATTEMPTS = 20  # two programs that write without a pause make one read in ten start again
AGAIN = "copy it again from where it came, or record it again"
FORGED = "another program has written it, so it is not to be trusted"

FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
INTEGER_DTYPES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"}
CODES = INTEGER_DTYPES | FLOATS  # safetensors' name of a dtype by NumPy's and torch's
BYTES: dict[str, int] = {code: getattr(torch, name).itemsize for name, code in CODES.items()}


Reference = str | dict[str, Any]
"""How JSON names a tensor: by its name in the file; or as {"name": …} with how to get it from what is written there:
"order", the order of its axes in the file; "first", how many of axis 2 are meant."""

Axis = int | tuple[int, ...] | None
"""What an axis of a tensor may have: one size, one of several, or any."""

Kind = Literal["floats", "integers", "booleans", "bytes"]

DTYPES: dict[Kind, tuple[torch.dtype, ...]] = {
    "floats": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "integers": (torch.int8, torch.int16, torch.int32, torch.int64),
    "booleans": (torch.bool,),
    "bytes": (torch.uint8,),
}
GROWING = 2  # the axis of positions in (B, H, N, D): keys of earlier steps are the beginning of later ones


class CaptureFileError(ValueError):
    """A file that is no capture, or is damaged, cut short, or from a newer regard."""


REFUSAL = Refusal(
    error=CaptureFileError,
    deep=f"its header is nested too deep: {FORGED}",
    broken=f"its header is not JSON ({{why}}): {FORGED}",
    other=f"its header is a {{kind}}, not a JSON object: {FORGED}",
    twin=f"its header has the key {{key}} {{times}} times: {FORGED}",
)


# ------------------------------------------------------------------------------------------------------------- writing


def write(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor | Array]) -> None:
    """Write a header and tensors to a file, whole or not at all. Equal content gives equal bytes.

    Args:
        path: the file; an existing one is replaced at the very end, as `atomic_file` does.
        header: JSON values by name: None, bool, int, finite float, str, and lists and dicts of these.
        tensors: by name, torch tensors on any device or NumPy arrays; bool, uint8, int8 to int64, fp16 to fp64, bf16.

    Raises:
        TypeError, ValueError: for content that the file cannot hold.
        OSError: if the file cannot be written; then what was there before is untouched.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(f"{folder}/run.regard", {"tokens": ["나는", "본다"]}, {"lse": torch.zeros(3)})
        ...     read(f"{folder}/run.regard", known={"tokens"})
        ({'tokens': ['나는', '본다']}, {'lse': tensor([0., 0., 0.])})
    """
    names = sorted(tensors, key=lambda name: (-_bytes_each(name, tensors[name]), name))  # so that all are aligned
    text = _text(header, {name: tensors[name] for name in names})
    length = len(text).to_bytes(8, "little")
    with atomic_file(path, "the capture") as file:
        file.write(length + text)
        data = _checksum()
        for name in names:  # one at a time: they may come from a GPU
            raw = _raw(tensors[name])
            data.update(raw)
            file.write(raw)
        sealed = bytearray(text)
        assert sealed[SEAL] == sealed[DATA_SEAL] == ZEROS.encode(), "the text has zeros in place of the checksums"
        sealed[DATA_SEAL] = data.hexdigest().encode()
        sealed[SEAL] = _seal(length, bytes(sealed))
        file.seek(8)
        file.write(sealed)


def _bytes_each(name: object, tensor: object) -> int:
    """Bytes of one value of a tensor, after checking that the file can hold it."""
    if not isinstance(name, str):
        raise TypeError(f"a tensor's name must be a string, got {type(name).__name__}: {name!r}")
    if name == "__metadata__":
        raise ValueError("no tensor can be named '__metadata__': safetensors keeps the header under that name")
    if not isinstance(tensor, Tensor | np.ndarray):
        raise TypeError(f"tensor {name!r} must be a torch tensor or a NumPy array, got {type(tensor).__name__}")
    if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise TypeError(f"tensor {name!r} is {kind}; the file holds dense tensors with their values")
    if _kind(tensor) not in CODES:
        raise TypeError(f"tensor {name!r} is of {_kind(tensor)}; the file holds {', '.join(CODES)}")
    if not _countable(tensor.shape):
        shape = reprlib.repr(tuple(tensor.shape))
        raise ValueError(f"tensor {name!r} of shape {shape} is too large: at most {MOST_AXES} axes, below 2^60 values")
    return BYTES[CODES[_kind(tensor)]]


def _countable(shape: Sequence[int]) -> bool:
    return len(shape) <= MOST_AXES and prod(n or 1 for n in shape) < 2**60  # torch counts in 64 bits, past an axis of 0


def _kind(tensor: Tensor | Array) -> str:
    return str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, Tensor) else tensor.dtype.name


def _text(header: Mapping[str, Any], tensors: Mapping[str, Tensor | Array]) -> bytes:
    """The file's text, with zeros for the checksums. Written here, because safetensors shuffles the metadata."""
    if not isinstance(header, Mapping):
        raise TypeError(f"the header must be a dict, got {type(header).__name__}")
    _check_json(dict(header), "header", 0)
    values = ["regard capture", str(VERSION), ZEROS, ZEROS, _json(dict(header), sort_keys=True)]
    entries: dict[str, Any] = {"__metadata__": dict(zip(METADATA, values, strict=True))}
    end = 0
    for name, tensor in tensors.items():
        code = CODES[_kind(tensor)]
        begin, end = end, end + BYTES[code] * prod(tensor.shape)
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    try:
        text = _json(entries).encode()
    except UnicodeEncodeError as error:
        advice = "text.encode('utf-8', 'replace').decode() puts a question mark there"
        lone = error.object[error.start]
        raise ValueError(f"the header or a name holds {lone!r}, half of a surrogate pair; {advice}") from None
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"the header takes {len(text):,} bytes, at most {LARGEST_TEXT:,}; put long lists in tensors")
    return text + b" " * (-len(text) % 8)


def _json(value: object, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys)


def _check_json(value: object, place: str, depth: int) -> None:
    """Raise for a value that would not come back from JSON as it was, and name its place in the header."""
    if depth > DEEPEST:
        raise ValueError(f"the header is nested deeper than {DEEPEST} levels; make it flatter")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{place} is {value}, which JSON cannot hold; write None, or put it in a tensor")
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_json(item, f"{place}[{i}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}; JSON keys are strings")
            _check_json(item, f"{place}[{key!r}]", depth + 1)
    elif not (value is None or isinstance(value, str | int | float)):
        kinds = "None, bool, int, float, str, or a list or dict of these"
        raise TypeError(f"{place} must be {kinds}, got {type(value).__name__}: {reprlib.repr(value)}")


def _seal(length: bytes, text: bytes) -> bytes:
    """The checksum of the length and of the text but for the checksum."""
    return _checksum(length + text[: SEAL.start] + text[SEAL.stop :]).hexdigest().encode()


def _checksum(start: bytes = b"") -> blake2b:
    return blake2b(start, digest_size=32)


def _raw(tensor: Tensor | Array) -> memoryview:
    """A tensor's bytes, row-major, little-endian."""
    if 0 in tensor.shape:
        return memoryview(b"")  # torch does not view it as bytes where its strides are NumPy's, which are 0
    if isinstance(tensor, Tensor):
        flat: Array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        flat = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    return flat.data


# ------------------------------------------------------------------------------------------------------------- reading


def read(
    path: str | os.PathLike[str], known: Set[str], *, lazy: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a header and tensors, on the CPU, with every byte checked. Keys and names come in alphabetical order.

    Args:
        path: the file.
        known: the header's keys that the caller understands; a file with others is refused.
        lazy: leave the tensors in the file, mapped into memory. Changing them does not change the file, and `write` to
            the same path does not disturb them; another program that overwrites the file in place (cp, scp) would.

    Raises:
        CaptureFileError: if the file is not a whole capture that this regard knows.
        OSError: if it cannot be opened.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(f"{folder}/run.regard", {"model": "gpt2"}, {"lse": np.arange(3)})
        ...     read(f"{folder}/run.regard", known={"model", "tokens"})
        ({'model': 'gpt2'}, {'lse': tensor([0, 1, 2])})
    """
    place = Path(path)
    if place.exists() and not place.is_file():
        kind = IsADirectoryError if place.is_dir() else OSError
        raise kind(f"cannot read {str(path)!r}: it is a folder, a device or a pipe; name a file")
    try:
        for _ in range(ATTEMPTS):
            with place.open("rb") as file:
                header = _checked_header(file, known)
                tensors = _tensors(place, file, lazy)
            if tensors is not None:
                return header, tensors
        raise CaptureFileError("it is being written again and again; read it when that is over")
    except CaptureFileError as error:
        raise CaptureFileError(f"cannot read {str(path)!r}: {error}") from None


def _tensors(path: Path, file: BufferedReader, lazy: bool) -> dict[str, Tensor] | None:
    """The tensors, or None if the path leads to another file by now: safetensors opens the path, not our open file."""
    tensors, problem = {}, None
    try:
        loaded = load_file(path)
        tensors = {name: loaded[name] if lazy else loaded[name].clone() for name in sorted(loaded)}
    except (SafetensorError, OSError, RuntimeError) as error:  # the last from torch, which maps the file
        problem = error
    if _identity(path.stat()) != _identity(os.fstat(file.fileno())):
        return None
    if problem is not None:
        raise CaptureFileError(f"safetensors refuses it: {problem}")
    return tensors


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _checked_header(file: BufferedReader, known: Set[str]) -> dict[str, Any]:
    """The header of an open file, once the whole file is checked."""
    size = os.fstat(file.fileno()).st_size
    text = _checked_text(file, size)
    entries = parsed(text, REFUSAL)
    metadata = entries.pop("__metadata__")  # the text starts with it
    if list(metadata) != METADATA or not all(isinstance(value, str) for value in metadata.values()):
        raise CaptureFileError(f"its metadata are not {', '.join(METADATA)}, all text: {FORGED}")
    header = parsed(metadata["header"], REFUSAL)
    if strange := sorted(header.keys() - known):
        raise CaptureFileError(f"it holds {', '.join(map(repr, strange))}, unknown to this regard: upgrade regard")
    end = 8 + len(text) + _data_size(entries)
    _check_whole(end, size)
    if size > end:
        raise CaptureFileError(f"it has {size - end:,} bytes after its end: it is damaged; {AGAIN}")
    file.seek(8 + len(text))
    if file_digest(file, _checksum).hexdigest() != metadata["data_blake2b"]:
        raise CaptureFileError(f"its data are damaged: they do not match their checksum; {AGAIN}")
    return header


def _checked_text(file: BufferedReader, size: int) -> bytes:
    """The text of an open file of a known size; nothing is read that the file does not hold."""
    start = file.read(8 + len(MAGIC) + 10)  # the version has at most 9 digits
    if MAGIC.startswith(start[8:]):
        raise CaptureFileError(f"it ends after {size} bytes: it is cut short, or not a regard capture; {AGAIN}")
    if not start[8:].startswith(MAGIC):
        other = ", but another safetensors file" if start[5:9] == b"\0\0\0{" else ""
        raise CaptureFileError(f"it is not a regard capture{other}; name a file that a capture was saved to")
    version = re.match(rb'([1-9]\d*)"', start[8 + len(MAGIC) :])
    if version is None:
        raise CaptureFileError(f"its version is damaged or cut short; {AGAIN}")
    if int(version[1]) > VERSION:
        formats = f"format {int(version[1])}; this one reads {VERSION}"
        raise CaptureFileError(f"it was written by a newer regard ({formats}): upgrade regard")
    length = int.from_bytes(start[:8], "little")
    if length > LARGEST_TEXT:
        raise CaptureFileError(f"it claims a header of {length:,} bytes; at most {LARGEST_TEXT:,} are read; {AGAIN}")
    _check_whole(8 + length, size)
    file.seek(8)
    text = file.read(length)
    if text[SEAL] != _seal(start[:8], text):
        raise CaptureFileError(f"its header is damaged: it does not match its checksum; {AGAIN}")
    return text


def _check_whole(expected: int, size: int) -> None:
    if size < expected:
        raise CaptureFileError(f"it is cut short: it should hold {expected:,} bytes and holds {size:,}; {AGAIN}")


def _data_size(entries: Mapping[str, Any]) -> int:
    """How many bytes the tensors take, after checking that they lie one after the other and fit their shapes."""
    spans = []
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(code), "shape": list(shape), "data_offsets": [begin, end]} if (
                len(entry) == 3
                and code in BYTES
                and all(type(n) is int and n >= 0 for n in [*shape, begin, end])
                and _countable(shape)
                and end - begin == prod(shape) * BYTES[code]
            ):
                spans.append((begin, end, name))
            case _:
                raise CaptureFileError(f"tensor {name!r} cannot be {reprlib.repr(entry)}: {FORGED}")
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise CaptureFileError(f"tensor {name!r} starts at byte {begin}, not at {at}: {FORGED}")
        at = end
    return at


# ------------------------------------------------------------------------------------------------------ tensors by name


class Outgoing:
    """Tensors to be written. One that equals another, or is its beginning, is written once.

    >>> out = Outgoing()
    >>> keys = torch.arange(6.0).view(1, 1, 3, 2)
    >>> out.put("k", keys), out.put("earlier", keys[:, :, :2]), out.put("again", keys.clone())
    ('k', {'name': 'k', 'first': 2}, 'k')
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._by_content: dict[tuple[object, ...], str] = {}
        self._by_memory: dict[tuple[object, ...], tuple[str, int, list[int]]] = {}

    def put(self, name: str, tensor: Tensor) -> Reference:
        """Add a tensor, under this name if it is new, and return its reference for the JSON."""
        held = tensor.detach()
        found, order, first = self._beginning(held) or self._equal_or_new(name, held)
        more: dict[str, Any] = {} if order == list(range(held.ndim)) else {"order": order}
        more |= {} if first is None else {"first": first}
        return {"name": found, **more} if more else found

    def _beginning(self, held: Tensor) -> tuple[str, list[int], int | None] | None:
        """The tensor in the same memory that this one is the beginning of, and how long the beginning is."""
        if held.ndim <= GROWING or _memory(held) not in self._by_memory:
            return None
        name, size, order = self._by_memory[_memory(held)]
        count = held.shape[GROWING]
        return (name, order, None if count == size else count) if count <= size else None

    def _equal_or_new(self, name: str, held: Tensor) -> tuple[str, list[int], None]:
        # The axes in the order in which they lie in memory; those of size 1, which lie nowhere, where they are.
        strides = held.stride()
        wide = [axis for axis, size in enumerate(held.shape) if size > 1]
        by_stride = iter(sorted(wide, key=lambda axis: -strides[axis]))
        order = [next(by_stride) if axis in wide else axis for axis in range(held.ndim)]
        laid_out = held.permute(order)
        flat = laid_out.cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        content = (laid_out.dtype, tuple(laid_out.shape), blake2b(raw, digest_size=32).digest())
        if content not in self._by_content:
            self._by_content[content], self.tensors[name] = name, laid_out
            if held.ndim > GROWING:  # the memory stays ours, and so does its address
                self._by_memory[_memory(held)] = name, held.shape[GROWING], order
        return self._by_content[content], order, None


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two that differ at most in how far they reach along the growing axis."""
    others = tuple(n for axis, n in enumerate(tensor.shape) if axis != GROWING)
    start = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.device
    return *start, tensor.dtype, tensor.stride(), others


class Incoming:
    """The tensors of a file, checked as they are taken."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._unused = set(tensors)
        self._unpacked: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, reference: object, what: str, shape: Sequence[Axis] | None, kind: Kind = "floats") -> Tensor:
        """The tensor of a reference in the JSON.

        Args:
            reference: as `Outgoing.put` returned it.
            what: what it is, for messages.
            shape: allowed sizes of each axis; None for any shape.
            kind: allowed kind of numbers.

        Raises:
            CaptureFileError: if there is no such tensor, or it is of another shape or kind.

        Example:
            >>> Incoming({"0/lse": torch.zeros(2)}).take("0/lse", "lse", ((1, 2),))
            tensor([0., 0.])
        """
        name = reference.get("name") if isinstance(reference, dict) else reference
        if not isinstance(name, str) or name not in self.tensors:
            raise CaptureFileError(f"{what} is said to be tensor {name!r:.80}, which it does not hold: {FORGED}")
        self._unused.discard(name)
        tensor = _laid_out(self.tensors[name], reference, f"tensor {name!r}, {what},")
        if shape is not None:
            allowed = [(n,) if isinstance(n, int) else n for n in shape]
            fits = tensor.ndim == len(shape) and all(
                sizes is None or n in sizes for n, sizes in zip(tensor.shape, allowed, strict=True)
            )
            if not fits:
                axes = ["any" if sizes is None else " or ".join(map(str, dict.fromkeys(sizes))) for sizes in allowed]
                expected, got = ", ".join(axes), tuple(tensor.shape)
                raise CaptureFileError(f"tensor {name!r}, {what}, has shape {got} instead of ({expected}): {FORGED}")
        if tensor.dtype not in DTYPES[kind]:
            raise CaptureFileError(f"tensor {name!r}, {what}, holds {tensor.dtype} instead of {kind}: {FORGED}")
        return tensor

    def take_bits(self, name: str, what: str, shape: Sequence[int]) -> Tensor:
        """Booleans of this shape that `pack_bits` packed; unpacked once. Raises CaptureFileError if there are none."""
        packed = self.take(name, what, (None,), "bytes")
        key = name, tuple(shape)
        try:
            if key not in self._unpacked:
                self._unpacked[key] = unpack_bits(packed, key[1])
            return self._unpacked[key]
        except (ValueError, TypeError, RuntimeError) as error:
            raise CaptureFileError(f"tensor {name!r}, {what}: {error}: {FORGED}") from None

    def finish(self) -> None:
        """Raise CaptureFileError for tensors that nobody asked for."""
        if self._unused:
            first = sorted(self._unused)[0]
            raise CaptureFileError(f"nothing says what tensor {first!r} is ({len(self._unused)} such): {FORGED}")


def _laid_out(tensor: Tensor, reference: object, what: str) -> Tensor:
    """A tensor of the file as it was before it was written."""
    if not isinstance(reference, dict):
        return tensor
    if strange := sorted(reference.keys() - {"name", "order", "first"}):
        raise CaptureFileError(f"{what} comes with {strange[0]!r}, unknown to this regard: upgrade regard")
    try:
        if "order" in reference:
            back = sorted(range(tensor.ndim), key=reference["order"].__getitem__)
            tensor = tensor.permute(back)
        return tensor.narrow(GROWING, 0, reference["first"]) if "first" in reference else tensor
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise CaptureFileError(
            f"{what} cannot be laid out as {reprlib.repr(reference)}: {reason:.200}: {FORGED}"
        ) from None


def fields(value: object, where: str, kinds: Mapping[str, type | UnionType]) -> tuple[Any, ...]:
    """The values of a JSON object that has exactly these keys and types, in the order of `kinds`.

    Raises:
        CaptureFileError: for a key that is missing or unknown, or a value of another type.

    Example:
        >>> fields({"n": 3, "path": "attn"}, "record 0", {"path": str, "n": int})
        ('attn', 3)
    """
    if not isinstance(value, dict):
        raise CaptureFileError(f"{where} must be a JSON object, got {type(value).__name__}: {FORGED}")
    if strange := sorted(value.keys() - kinds.keys()):
        raise CaptureFileError(f"{where} has {strange[0]!r}, unknown to this regard: upgrade regard")
    if missing := sorted(kinds.keys() - value.keys()):
        raise CaptureFileError(f"{where} lacks {missing[0]!r}: {FORGED}")
    for name, kind in kinds.items():
        found = value[name]
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise CaptureFileError(f"{where}: {name} must be {expected}, got {type(found).__name__}: {FORGED}")
    return tuple(value[name] for name in kinds)


def is_list_of(value: object, kind: type) -> bool:
    """Whether it is a JSON list of this type only; True is no integer.

    >>> is_list_of([2, 3], int), is_list_of([2, True], int), is_list_of("ab", str)
    (True, False, False)
    """
    return isinstance(value, list) and all(type(item) is kind for item in value)


# ------------------------------------------------------------------------------------------------------ bits and means


def pack_bits(cells: Tensor) -> Tensor:
    """Booleans as bits, eight to a byte, the first in the highest bit: uint8 (⌈cells / 8⌉,), on the CPU.

    >>> pack_bits(torch.tensor([[True, False, True], [False, False, True]]))
    tensor([164], dtype=torch.uint8)
    """
    if cells.dtype != torch.bool:
        raise TypeError(f"pack_bits takes booleans, got {cells.dtype}")
    return torch.from_numpy(np.packbits(cells.detach().cpu().numpy().reshape(-1)))


def unpack_bits(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_bits`. Raises TypeError or ValueError for bytes that do not fit the shape.

    >>> unpack_bits(torch.tensor([164], dtype=torch.uint8), (2, 3)).tolist()
    [[True, False, True], [False, False, True]]
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack_bits takes the uint8 of pack_bits, got {packed.dtype}")
    if packed.ndim != 1 or packed.numel() != -(-prod(shape) // 8):
        raise ValueError(f"{tuple(shape)} booleans take {-(-prod(shape) // 8)} bytes, got {tuple(packed.shape)}")
    bits = np.unpackbits(packed.cpu().numpy(), count=prod(shape))
    return torch.from_numpy(bits.view(np.bool_)).reshape(tuple(shape))


def pool(values: Tensor, bins: int) -> Tensor:
    """Means of neighbours: (…, N) → (…, min(N, bins)) in fp32. Bin i of m covers ⌊i·N/m⌋ up to ⌊(i + 1)·N/m⌋.

    −∞ (the lse of a row that sees nothing) does not count in its bin's mean; a bin of nothing else is −∞. NaN and +∞
    show in their own bin only.

    Raises:
        ValueError: for fewer than 1 bin.

    Example:
        >>> pool(torch.tensor([1.0, 3.0, -torch.inf, 5.0, -torch.inf, -torch.inf]), 3)
        tensor([2., 5., -inf])
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    n, device = values.shape[-1], values.device
    if n <= bins:
        return values.float()
    values = values if values.is_floating_point() else values.double()
    edges = torch.arange(bins + 1, device=device) * n // bins
    at = edges[:-1, None] + torch.arange(-(-n // bins), device=device)  # (bins, widest bin)
    cells = values.reshape(*values.shape[:-1], bins, n // bins) if n % bins == 0 else values[..., at.clamp(max=n - 1)]
    counted = at < edges[1:, None]
    if values.numel() > 0 and not bool(values.amin() > -inf):  # most have no −∞
        counted = counted & (cells != -inf)
    total = torch.where(counted, cells, 0.0).sum(-1, dtype=torch.float64)  # sums of fp32 cannot overflow there
    means = total / counted.sum(-1)  # 0 / 0 is NaN, replaced below
    return torch.where(counted.any(-1), means, -inf).float()
