"""What a capture file is put together from: tensors, each written once, and JSON values; both checked when they return.

A tensor keeps the order in which its axes lie in memory: a product of turned matrices is rounded in another way, and
what is computed from an opened capture is to be the same to the bit.

This file does not know what a capture is.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import UnionType
from typing import Any, Literal

import torch
from torch import Tensor

from regard.lens.files.capture_file import FORGED, CaptureFileError
from regard.lens.files.packing import unpack_bits

__all__ = ["Incoming", "Outgoing", "Reference", "fields", "is_list_of", "without_repeats"]

Reference = str | dict[str, Any]
"""How JSON names a tensor: by its name in the file; or as {"name": …} with how to get it from what is written there:
"order", the order of its axes in the file; "first", how many of axis 2 are meant."""

Axis = int | tuple[int, ...] | None
"""What an axis of a tensor may have: one size, one of several, or any."""

Kind = Literal["floats", "integers", "booleans", "bytes"]

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
GROWING = 2  # the axis of positions in (B, H, N, D): keys of earlier steps are the beginning of later ones


class Outgoing:
    """Tensors on their way into a file. What is equal to another, or its beginning, is written once.

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
        """Take a tensor in, under this name if it is a new one, and return how JSON names it."""
        held = tensor.detach()
        found, order, first = self._beginning(held) or self._equal_or_new(name, held)
        more: dict[str, Any] = {} if order == list(range(held.ndim)) else {"order": order}
        more |= {} if first is None else {"first": first}
        return {"name": found, **more} if more else found

    def _beginning(self, held: Tensor) -> tuple[str, list[int], int | None] | None:
        """The tensor of the same memory that this one is the beginning of, and how much of it this one is."""
        if held.ndim <= GROWING or _memory(held) not in self._by_memory:
            return None
        name, size, order = self._by_memory[_memory(held)]
        count = held.shape[GROWING]
        return (name, order, None if count == size else count) if count <= size else None

    def _equal_or_new(self, name: str, held: Tensor) -> tuple[str, list[int], None]:
        order = _memory_order(held)
        laid_out = held.permute(order)
        content = _content(laid_out)
        if content not in self._by_content:
            self._by_content[content], self.tensors[name] = name, laid_out
            if held.ndim > GROWING:  # the memory stays ours, and so does its address
                self._by_memory[_memory(held)] = name, held.shape[GROWING], order
        return self._by_content[content], order, None


def without_repeats(tensor: Tensor) -> Tensor:
    """A tensor whose axes along which one number is repeated, as `expand` does it, have size 1.

    >>> without_repeats(torch.zeros(3, 1, 5).expand(3, 2, 5)).shape
    torch.Size([3, 1, 5])
    """
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(axis, 0, 1) if stride == 0 and size > 1 else tensor
    return tensor


def _memory_order(tensor: Tensor) -> list[int]:
    """The axes in the order in which they lie in memory; those of size 1, which lie nowhere, where they are."""
    strides = tensor.stride()
    wide = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    sorted_ = iter(sorted(wide, key=lambda axis: -strides[axis]))
    return [next(sorted_) if axis in wide else axis for axis in range(tensor.ndim)]


def _content(tensor: Tensor) -> tuple[object, ...]:
    flat = tensor.cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), blake2b(raw, digest_size=32).digest()


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two that differ at most in how far they reach along the growing axis."""
    others = tuple(n for axis, n in enumerate(tensor.shape) if axis != GROWING)
    start = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.device
    return *start, tensor.dtype, tensor.stride(), others


class Incoming:
    """The tensors of a file: each is given for what it is said to be, or refused."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._unused = set(tensors)
        self._unpacked: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, reference: object, what: str, shape: Sequence[Axis] | None, kind: Kind = "floats") -> Tensor:
        """The tensor that JSON names.

        >>> Incoming({"0/lse": torch.zeros(2, 3)}).take("0/lse", "lse", (2, (1, 3)))
        tensor([[0., 0., 0.],
                [0., 0., 0.]])

        what: in words, for the message.  shape: what each axis may have; None for any shape.
        Raises CaptureFileError that names the tensor where there is none, or it is of another shape or kind.
        """
        name = reference.get("name") if isinstance(reference, dict) else reference
        if not isinstance(name, str) or name not in self.tensors:
            raise CaptureFileError(f"{what} is said to be tensor {name!r:.80}, which it does not hold: {FORGED}")
        self._unused.discard(name)
        tensor = _laid_out(self.tensors[name], reference, f"tensor {name!r}, {what},")
        if shape is not None and not _fits(tensor.shape, shape):
            expected = ", ".join("any" if n is None else str(n) if isinstance(n, int) else _either(n) for n in shape)
            got = tuple(tensor.shape)
            raise CaptureFileError(f"tensor {name!r}, {what}, has shape {got} instead of ({expected}): {FORGED}")
        if not _is_kind(tensor, kind):
            raise CaptureFileError(f"tensor {name!r}, {what}, holds {tensor.dtype} instead of {kind}: {FORGED}")
        return tensor

    def take_bits(self, name: str, what: str, shape: Sequence[int]) -> Tensor:
        """Booleans of this shape that were packed as bits; unpacked once, for whoever asks again.

        Raises CaptureFileError where there are no such bits, or another number of them.
        """
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


def _fits(shape: Sequence[int], expected: Sequence[Axis]) -> bool:
    if len(shape) != len(expected):
        return False
    return all(m is None or n == m or (isinstance(m, tuple) and n in m) for n, m in zip(shape, expected, strict=True))


def _either(sizes: tuple[int, ...]) -> str:
    return " or ".join(map(str, dict.fromkeys(sizes)))


def _is_kind(tensor: Tensor, kind: Kind) -> bool:
    if kind == "floats":
        return tensor.dtype.is_floating_point
    if kind == "integers":
        return tensor.dtype in INTEGERS
    return tensor.dtype == (torch.bool if kind == "booleans" else torch.uint8)


def fields(value: object, where: str, kinds: Mapping[str, type | UnionType]) -> tuple[Any, ...]:
    """The values of a JSON object, in the order of `kinds`, once it is sure that it has just these and of these kinds.

    >>> fields({"n": 3, "path": "attn"}, "record 0", {"path": str, "n": int})
    ('attn', 3)

    Raises CaptureFileError that says where, and what is missing, unknown or of another kind.
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
    """Is it a JSON list of this kind and no other; True is no integer.

    >>> is_list_of([2, 3], int), is_list_of([2, True], int), is_list_of("ab", str)
    (True, False, False)
    """
    return isinstance(value, list) and all(type(item) is kind for item in value)
