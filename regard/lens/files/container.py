"""The `.regard` file: a safetensors file with one JSON header and a checksum over every byte."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b, file_digest
from io import BufferedReader
from math import prod
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from regard.files import atomic_file
from regard.formats import (
    MAX_HEADER,
    TensorFile,
    TensorFileError,
    check_file,
    check_tensor,
    header_entries,
    parse_json,
    raw_bytes,
)

VERSION = 1
"""The format this file writes and reads."""

MAGIC = b'{"__metadata__":{"format":"regard capture","version":"'
METADATA = ("format", "version", "header_blake2b", "data_blake2b", "header")

ZEROS = "0" * 64  # a checksum's place
_START = f'{MAGIC.decode()}{VERSION}","header_blake2b":"'
SEAL = slice(len(_START), len(_START) + 64)  # where the text holds its own checksum
DATA_SEAL = slice(SEAL.stop + len('","data_blake2b":"'), SEAL.stop + len('","data_blake2b":"') + 64)

ATTEMPTS = 20  # two programs that write without a pause make one read in ten start again
AGAIN = "copy it again from where it came, or record it again"
FORGED = "another program has written it, so it is not to be trusted"

Reference = str | dict[str, Any]
"""How JSON names a tensor: by its name in the file; or as {"name": …} with how to get it from what is written there:
"order", the order of its axes in the file; "first", how many of axis 2 are meant."""

REFERENCE: Any = str | dict | None  # what `fields` takes for one, or for none
LARGEST = 1e300  # of a number; NaN and integers beyond any float are not less

Axis = int | tuple[int, ...] | None
"""Allowed sizes of a tensor's axis: one size, one of several, or any."""

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


class ContentError(CaptureFileError):
    """Values in a capture that regard never writes."""


def write(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a header of JSON values and tensors to a file, whole or not at all. Equal content gives equal bytes.

    Raises:
        TypeError, ValueError: for content that the file cannot hold.
        OSError: if the file cannot be written; then what was there before is untouched.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(f"{folder}/run.regard", {"tokens": ["나는", "본다"]}, {"lse": torch.zeros(3)})
        ...     read(f"{folder}/run.regard")
        ({'tokens': ['나는', '본다']}, {'lse': tensor([0., 0., 0.])})
    """
    # 1. The text, with zeros for the checksums. Written here, because safetensors shuffles the metadata.
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    tensor_entries = header_entries(tensors)
    values = ["regard capture", str(VERSION), ZEROS, ZEROS, _json(header, sort_keys=True)]
    try:
        text = _json({"__metadata__": dict(zip(METADATA, values, strict=True)), **tensor_entries}).encode()
    except UnicodeEncodeError as error:
        advice = "text.encode('utf-8', 'replace').decode() puts a question mark there"
        lone = error.object[error.start]
        raise ValueError(f"the capture's text holds {lone!r}, half of a surrogate pair; {advice}") from None
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"the calls take {len(text):,} bytes to describe, and a file has room for {MAX_HEADER:,}: "
            "watch fewer layers (watch(model, layers=…)) or fewer steps, or save them as several captures"
        )
    sealed = bytearray(text + b" " * (-len(text) % 8))
    length = len(sealed).to_bytes(8, "little")
    # 2. The data, and at the end the checksums.
    with atomic_file(path, "the capture") as file:
        file.write(length + sealed)
        checksum = _checksum()
        for name in tensor_entries:  # one at a time: they may come from a GPU
            raw = raw_bytes(tensors[name])
            checksum.update(raw)
            file.write(raw)
        assert sealed[SEAL] == sealed[DATA_SEAL] == ZEROS.encode(), "the text has zeros in place of the checksums"
        sealed[DATA_SEAL] = checksum.hexdigest().encode()
        sealed[SEAL] = _seal(length, sealed)
        file.seek(8)
        file.write(sealed)


def _json(value: object, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys)


def _checksum(start: bytes | memoryview = b"") -> blake2b:
    return blake2b(start, digest_size=32)


def _seal(length: bytes, text: bytes | bytearray) -> bytes:
    """The checksum of the length and of the text but for the checksum."""
    return _checksum(length + text[: SEAL.start] + text[SEAL.stop :]).hexdigest().encode()


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a header and its tensors into memory, with every byte checked. Names come in alphabetical order.

    Raises:
        CaptureFileError: if the file is not a whole capture of a version that this regard supports.
        OSError: if it cannot be opened.
    """
    place = Path(path)
    if place.exists():
        check_file(place)
    for _ in range(ATTEMPTS):
        with place.open("rb") as file:
            content, problem = None, None
            try:
                content = _read(place, file)
            except CaptureFileError as error:
                problem = error
            # The reader of tensors opens the path, which may lead to another file by now.
            one, other = place.stat(), os.fstat(file.fileno())
            if not os.path.samestat(one, other) or (one.st_size, one.st_mtime_ns) != (other.st_size, other.st_mtime_ns):
                continue
            if content is None:
                raise CaptureFileError(f"cannot read {str(path)!r}: {problem}")
            return content
    raise CaptureFileError(f"cannot read {str(path)!r}: it is being written again and again; read it when that is over")


def _read(path: Path, file: BufferedReader) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # 1. What it is, and of which version.
    start = file.read(8 + len(MAGIC) + 10)  # the version has at most 9 digits
    if not start[8:].startswith(MAGIC) and not MAGIC.startswith(start[8:]):
        other = ", but another safetensors file" if start[5:9] == b"\0\0\0{" else ""
        raise CaptureFileError(f"it is not a regard capture{other}; name a file that a capture was saved to")
    version = re.match(rb'([1-9]\d*)"', start[8 + len(MAGIC) :])
    if version is not None and int(version[1]) > VERSION:
        formats = f"format {int(version[1])}; this one reads {VERSION}"
        raise CaptureFileError(f"it was written by a newer regard ({formats}): upgrade regard")
    # 2. A sound safetensors file.
    try:
        stored = TensorFile(path)
    except TensorFileError as error:
        raise CaptureFileError(f"{error}; {AGAIN}") from None
    if version is None:
        raise CaptureFileError(f"its version is damaged; {AGAIN}")
    # 3. The checksums.
    file.seek(8)
    text = file.read(min(int.from_bytes(start[:8], "little"), MAX_HEADER))
    if text[SEAL] != _seal(start[:8], text):
        raise CaptureFileError(f"its header is damaged: it does not match its checksum; {AGAIN}")
    metadata = stored.metadata
    if metadata.keys() != set(METADATA):
        raise CaptureFileError(f"its metadata are not {', '.join(METADATA)}: {FORGED}")
    if file_digest(file, _checksum).hexdigest() != metadata["data_blake2b"]:
        raise CaptureFileError(f"its data are damaged: they do not match their checksum; {AGAIN}")
    # 4. The content. In memory, so that the file cannot be cut short meanwhile.
    try:
        header = parse_json(metadata["header"], "its header")
    except ValueError as error:
        raise CaptureFileError(f"{error}: {FORGED}") from None
    if not isinstance(header, dict):
        raise CaptureFileError(f"its header is a {type(header).__name__}, not a JSON object: {FORGED}")
    return header, {name: stored.view(name).clone() for name in sorted(stored.entries)}


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
        memory = None
        if held.ndim > GROWING:  # equal for two tensors that differ at most in how far they reach along that axis
            others = tuple(n for axis, n in enumerate(held.shape) if axis != GROWING)
            begin = held.untyped_storage().data_ptr(), held.storage_offset(), held.device
            memory = *begin, held.dtype, held.stride(), others
        count = held.shape[GROWING] if memory else 0
        reference, size, order = self._by_memory.get(memory or (), ("", -1, []))
        if count > size:
            # The axes in the order in which they lie in memory; those of size 1, which lie nowhere, where they are.
            wide, strides = [axis for axis, n in enumerate(held.shape) if n > 1], held.stride()
            by_stride = iter(sorted(wide, key=lambda axis: -strides[axis]))
            order = [next(by_stride) if axis in wide else axis for axis in range(held.ndim)]
            laid_out = held.permute(order)
            content = (laid_out.dtype, tuple(laid_out.shape), _checksum(raw_bytes(laid_out)).digest())
            if content not in self._by_content:
                self._by_content[content], self.tensors[name] = name, laid_out
                if memory is not None:  # the memory stays ours, and so does its address
                    self._by_memory[memory] = name, count, order
            reference, size = self._by_content[content], count
        more: dict[str, Any] = {} if order == list(range(held.ndim)) else {"order": order}
        more |= {"first": count} if count < size else {}
        return {"name": reference, **more} if more else reference


class Incoming:
    """The tensors of a file, checked as they are taken."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._unused = set(tensors)
        self._unpacked: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, reference: object, what: str, shape: Sequence[Axis] | None, kind: Kind = "floats") -> Tensor:
        """The tensor of a reference in the JSON, if it has this shape (None for any) and kind of numbers.

        >>> Incoming({"0/lse": torch.zeros(2)}).take("0/lse", "lse", ((1, 2),))
        tensor([0., 0.])
        """
        name = reference.get("name") if isinstance(reference, dict) else reference
        if not isinstance(name, str) or name not in self.tensors:
            raise ContentError(f"{what} refers to tensor {name!r:.80}, which the file does not hold")
        self._unused.discard(name)
        tensor, where = self.tensors[name], f"tensor {name!r}, {what},"
        if isinstance(reference, dict):  # back to how it was before it was written
            if unknown := sorted(reference.keys() - {"name", "order", "first"}):
                raise CaptureFileError(f"{where} comes with {unknown[0]!r}, unknown to this regard: upgrade regard")
            try:
                if "order" in reference:
                    tensor = tensor.permute(sorted(range(tensor.ndim), key=reference["order"].__getitem__))
                if "first" in reference:
                    tensor = tensor.narrow(GROWING, 0, reference["first"])
            except (RuntimeError, LookupError, TypeError, AttributeError) as error:
                reason = str(error).partition("\n")[0]
                raise ContentError(f"{where} cannot be laid out as {reprlib.repr(reference)}: {reason:.200}") from None
        if shape is not None:
            allowed = [(n,) if isinstance(n, int) else n for n in shape]
            fits = tensor.ndim == len(shape) and all(
                sizes is None or n in sizes for n, sizes in zip(tensor.shape, allowed, strict=True)
            )
            if not fits:
                axes = ["any" if sizes is None else " or ".join(map(str, dict.fromkeys(sizes))) for sizes in allowed]
                raise ContentError(f"{where} has shape {tuple(tensor.shape)} instead of ({', '.join(axes)})")
        if tensor.dtype not in DTYPES[kind]:
            raise ContentError(f"{where} holds {tensor.dtype} instead of {kind}")
        return tensor

    def take_bits(self, name: str, what: str, shape: Sequence[int]) -> Tensor:
        """Booleans of this shape that `pack_bits` packed; unpacked once."""
        packed = self.take(name, what, (None,), "bytes")
        key = name, tuple(shape)
        try:
            if key not in self._unpacked:
                self._unpacked[key] = unpack_bits(packed, key[1])
            return self._unpacked[key]
        except (ValueError, TypeError, RuntimeError) as error:
            raise ContentError(f"tensor {name!r}, {what}: {error}") from None

    def finish(self) -> None:
        """Raise for tensors that were never taken."""
        if self._unused:
            raise ContentError(f"no entry describes tensor {min(self._unused)!r} ({len(self._unused)} such)")


def fields(
    value: object,
    where: str,
    kinds: Mapping[str, type | UnionType],
    optional: Mapping[str, type | UnionType] = MappingProxyType({}),
) -> dict[str, Any]:
    """A JSON object of exactly these keys and types, and of some of the optional ones; in the order of `kinds`.

    >>> fields({"n": 3, "path": "attn"}, "record 0", {"path": str, "n": int}, {"rows": list})
    {'path': 'attn', 'n': 3}
    """
    if not isinstance(value, dict):
        raise ContentError(f"{where} must be a JSON object, got {type(value).__name__}")
    kinds = {**kinds, **{name: kind for name, kind in optional.items() if name in value}}
    if unknown := sorted(value.keys() - kinds.keys()):
        raise CaptureFileError(f"{where} has {', '.join(map(repr, unknown))}, unknown to this regard: upgrade regard")
    if missing := sorted(kinds.keys() - value.keys()):
        raise ContentError(f"{where} lacks {missing[0]!r}")
    for name, kind in kinds.items():
        item = value[name]
        if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise ContentError(f"{where}: {name} must be {expected}, got {type(item).__name__}")
    return {name: value[name] for name in kinds}


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
    return torch.from_numpy(np.packbits(cells.detach().cpu().numpy().reshape(-1)))


def unpack_bits(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_bits`. Raises ValueError for bytes that do not fit the shape.

    >>> unpack_bits(torch.tensor([164], dtype=torch.uint8), (2, 3)).tolist()
    [[True, False, True], [False, False, True]]
    """
    if packed.numel() != -(-prod(shape) // 8):
        raise ValueError(f"{tuple(shape)} booleans take {-(-prod(shape) // 8)} bytes, got {tuple(packed.shape)}")
    bits = np.unpackbits(packed.cpu().numpy(), count=prod(shape))
    return torch.from_numpy(bits.view(np.bool_)).reshape(tuple(shape))
