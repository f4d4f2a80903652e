"""The photographs that a model looked at, as a capture keeps them: bounded copies, JPEG or PNG; to a file, and back.

    [[name, height, width of the picture itself, bytes], …]      a tensor of bytes for each

A copy may be smaller than the picture: boxes are measured in the picture. What kind and size a copy has is read from
its own first bytes, so that nothing is decoded for it, and a size that would be dangerous to decode is refused.

This file does not know captures, nor how pictures are decoded.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.lens.files.capture_file import FORGED, CaptureFileError
from regard.lens.files.file_parts import Incoming, Outgoing

__all__ = ["Photo", "pack_photos", "unpack_photos"]

LONGEST = 4096  # pixels of a copy's side; copies are made of at most 1,600
MOST_BYTES = 16 * 2**20  # of a copy; one of 1,600 × 1,600 pixels of noise takes 3 MB
MOST_PIXELS = 2**28  # of the picture itself, as of a frame
LONGEST_NAME = 255

PNG = b"\x89PNG\r\n\x1a\n"
JPEG = b"\xff\xd8\xff"
SIZED = {0xC0, 0xC1, 0xC2}  # the frames of a JPEG that browsers and Pillow decode: baseline, extended, progressive


@dataclass(frozen=True, eq=False, repr=False)
class Photo:
    """A copy of a picture, to be shown under its attention.

    name: for people, never a path.  size: height and width of the picture itself, which boxes are measured in.
    kind: the media type of `data`, the bytes of a copy that may be smaller: image/jpeg or image/png.
    """

    name: str
    size: tuple[int, int]
    kind: str
    data: bytes

    def __repr__(self) -> str:
        return f"Photo({self.name}, {self.size[0]} high, {self.size[1]} wide, {len(self.data):,} bytes)"


def pack_photos(photos: Sequence[Photo], out: Outgoing) -> list[Any]:
    """What JSON says of photographs; their bytes go to `out`.

    >>> out = Outgoing()
    >>> pack_photos([Photo("cat.png", (480, 640), "image/png", b"...")], out), out.tensors["photos/0"].shape
    ([['cat.png', 480, 640, 'photos/0']], torch.Size([3]))
    """
    return [
        [_printable(photo.name), *photo.size, out.put(f"photos/{n}", _tensor(photo.data))]
        for n, photo in enumerate(photos)
    ]


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())  # torch wants memory that may be written


def _printable(name: str) -> str:
    """A name of a file may hold what no JSON does, or what a terminal would obey."""
    return "".join(letter for letter in name if letter.isprintable())[:LONGEST_NAME]


def unpack_photos(value: object, tensors: Incoming) -> tuple[Photo, ...]:
    """The photographs that `pack_photos` made this of. Nothing is decoded.

    >>> unpack_photos([["cat.png", 480, 640, "photos/0"]], Incoming({"photos/0": torch.zeros(3, dtype=torch.uint8)}))
    Traceback (most recent call last):
        ...
    regard.lens.files.capture_file.CaptureFileError: photo 0 is neither a JPEG nor a PNG with a size: \
another program has written it, so it is not to be trusted

    Raises CaptureFileError for what is missing, too large, or no picture by its first bytes.
    """
    if not isinstance(value, list):
        raise CaptureFileError(f"photos must be a list, got {type(value).__name__}: {FORGED}")
    return tuple(_unpack(item, n, tensors) for n, item in enumerate(value))


def _unpack(value: object, n: int, tensors: Incoming) -> Photo:
    match value:
        case [str(name), int(high), int(wide), reference] if (
            name.isprintable()
            and len(name) <= LONGEST_NAME
            and type(high) is type(wide) is int
            and min(high, wide) >= 1
            and high * wide <= MOST_PIXELS
        ):
            taken = tensors.take(reference, f"photo {n}", (None,), "bytes")
        case _:
            raise CaptureFileError(f"photo {n} cannot be {reprlib.repr(value)}: {FORGED}")
    if len(taken) > MOST_BYTES:
        raise CaptureFileError(f"photo {n} takes {len(taken):,} bytes, and at most {MOST_BYTES:,} are read: {FORGED}")
    data = taken.numpy().tobytes()
    kind, *size = _kind_and_size(data)
    if not all(1 <= side <= LONGEST for side in size):
        raise CaptureFileError(
            f"photo {n} says to be {size[0]} × {size[1]} pixels, and copies have at most {LONGEST:,} a side: {FORGED}"
            if kind
            else f"photo {n} is neither a JPEG nor a PNG with a size: {FORGED}"
        )
    return Photo(name, (high, wide), kind, data)


def _kind_and_size(data: bytes) -> tuple[str, int, int]:
    """The media type, height and width that a picture's own first bytes say; '' and 0 for what is neither kind."""
    if data.startswith(PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        return "image/png", _number(data, 20, 4), _number(data, 16, 4)
    at = 2 if data.startswith(JPEG) else len(data)
    while at + 9 <= len(data) and data[at] == 0xFF:  # one segment after the other: mark, length, content
        if data[at + 1] in SIZED:
            return "image/jpeg", _number(data, at + 5, 2), _number(data, at + 7, 2)
        at += 2 + max(2, _number(data, at + 2, 2))
    return "", 0, 0


def _number(data: bytes, at: int, count: int) -> int:
    return int.from_bytes(data[at : at + count], "big")
