"""Opening images: files, bytes and arrays, upright, in RGB, with bounded size."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard.formats import check_file, parsing, read_stream

if TYPE_CHECKING:
    from PIL.Image import Image

INSTALL = "pip install 'regard[models]'"

MOST_SIDE = 2**16
"""Pixels of one side, as many as a JPEG can have; Pillow's own memory grows with the number of rows."""

MOST_BYTES = 480_000_000
"""Memory that opening one image may take; its header tells how much that is, before any is taken."""

# Bytes for each pixel while an image is opened: 4 decoded, 4 as RGB, and what the decoder itself needs beside them.
BYTES_EACH = 8
BYTES_OF_FORMAT = {"WEBP": 12, "AVIF": 12, "JPEG2000": 20}
BYTES_OF_INTEGERS = 20  # grey of 16 and 32 bits, which is looked through in NumPy

MOST_PIXELS = MOST_BYTES // BYTES_EACH
"""60 million, of most formats."""

MOST_READ = 2**28
"""Bytes of an image's file that is read from a pipe or an open file."""

# Pillow reads more, some through other programs (EPS runs Ghostscript): these are the ones that images come in.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "JPEG2000", "AVIF")

Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | IO[bytes] | Image | NDArray[np.uint8] | OpenedImage"
"""What can be opened: a path, a file's bytes, an open file, a Pillow image, an array (H, W) or (H, W, 1, 3 or 4)."""

Colour = tuple[int, int, int]

REFUSED = (ValueError, TypeError, FileNotFoundError, IsADirectoryError)  # what `open_image` raises
ORIENTATION = 0x0112  # EXIF's tag: 1 is upright
QUARTER_TURNS = (5, 6, 7, 8)  # of its values, those that swap height and width


@dataclass(frozen=True, eq=False, repr=False)
class OpenedImage:
    """An image, upright."""

    image: Image  # Pillow, mode RGB
    name: str  # its file's, or what it was opened from

    @property
    def size(self) -> tuple[int, int]:
        """Height and width. (Pillow's `image.size` is the other way round.)"""
        return self.image.height, self.image.width

    def __repr__(self) -> str:
        return f"OpenedImage({self.name}, {self.image.height} high, {self.image.width} wide)"


def open_image(source: Source, *, frame: int | None = None, background: Colour | None = None) -> OpenedImage:
    """Open an image: turned upright, RGB.

    >>> image = open_image(np.full((5, 7, 4), 0, np.uint8), background=(255, 255, 255)).image
    >>> image.mode, image.getpixel((0, 0))
    ('RGB', (255, 255, 255))

    Args:
        source: a path, a file's bytes, a file open in mode "rb" (read to its end and left open), a Pillow image, a
            uint8 array (H, W) or (H, W, 1, 3 or 4), or an OpenedImage, which is returned as it is.
        frame: which one, from 0, of an animation or of a file of several images.
        background: red, green and blue, 0 to 255, behind transparent pixels. None drops transparency: hidden colours
            show.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: the path is a directory.
        TypeError: `source` is none of these.
        ValueError: it is broken, too large (MOST_SIDE, MOST_BYTES), or has several frames and `frame` is None.
    """
    three = isinstance(background, (tuple, list)) and len(background) == 3
    if background is not None and not (three and all(isinstance(n, int) and 0 <= n <= 255 for n in background)):
        raise ValueError(f"background must be red, green and blue, each from 0 to 255, got {background!r}")
    if isinstance(source, OpenedImage):
        _check_frame(source.name, 1, frame)
        return source
    with _identified(source, verify=True) as (image, label, name, _):
        return OpenedImage(_to_rgb(image, label, frame, background), name)


def peek_image(source: Source) -> tuple[Source, tuple[int, int]]:
    """Read an image's header: what to open later, and its height and width.

    >>> peek_image(np.zeros((2, 3), np.uint8))[1]
    (2, 3)

    Args:
        source: as of `open_image`. An open file is read to its end, and its bytes are what to open later.

    Returns:
        The source to open, and the upright size (but for a PNG whose EXIF comes after its pixels).

    Raises:
        Exception: as `open_image`, for what the header shows: no image, too many pixels, several frames, floats.
    """
    if isinstance(source, OpenedImage):
        return source, source.size
    if isinstance(source, np.ndarray):
        height, width = _check_array(source).shape[:2]
        return source, (height, width)
    with _identified(source, verify=False) as (image, label, _, again):
        _check_pixels(label, image)
        with _decoding(label):
            count = getattr(image, "n_frames", 1)
            # Of a PNG without EXIF in front of the pixels, Pillow would decode these to look behind them.
            known = image.format != "PNG" or "exif" in image.info
            turned = known and image.getexif().get(ORIENTATION) in QUARTER_TURNS
        _check_frames(image, label, count)
        _check_mode(image, label)
        size = (image.width, image.height) if turned else (image.height, image.width)
    if isinstance(again, _NamedBytes):
        again.seek(0)
    return again, size


@contextmanager
def numbered(number: int, count: int, what: str = "image") -> Iterator[None]:
    """Put the number in front of an error of one of several; leave that of a single one as it is."""
    try:
        yield
    except REFUSED as error:
        if count == 1:
            raise
        kind = next(kind for kind in REFUSED if isinstance(error, kind))
        raise kind(f"{what} {number}: {error}") from None


def is_batch(images: object) -> bool:
    """Whether these are several images: a list, a tuple or an iterator (but no open file)."""
    return isinstance(images, (list, tuple)) or (isinstance(images, Iterator) and not hasattr(images, "read"))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"images need Pillow ({error}): {INSTALL}") from error
    return Image


# ------------------------------------------------------------------------------------------------------------- sources


@contextmanager
def _identified(source: Any, *, verify: bool) -> Iterator[tuple[Image, str, str, Source]]:
    """The image as Pillow finds it, what errors call it, its name, and what to open it from again.

    verify: look at a PNG's own checksums, of which Pillow takes no notice while it decodes.
    """
    library = _pillow()
    if isinstance(source, np.ndarray):
        yield library.fromarray(_check_array(source)), "array", "array", source
    elif isinstance(source, library.Image):
        path = os.fsdecode(getattr(source, "filename", ""))  # empty unless Pillow opened a file of that name
        yield source, path or "the image", Path(path).name or "image", source
    elif isinstance(source, (bytes, bytearray)):
        yield _by_header(io.BytesIO(source), "the data", verify), "the data", "bytes", source
    elif hasattr(source, "read"):
        kept, name = _NamedBytes(_held(source)), getattr(source, "name", None)
        kept.name = Path(name).name if isinstance(name, str) else "file"  # a number, of a file without a name
        yield _by_header(kept, "the file", verify), "the file", kept.name, kept
    else:
        path = _check_path(source)
        with open(path, "rb") as file:
            yield _by_header(file, path, verify), path, Path(path).name, source


def _by_header(file: IO[bytes], label: str, verify: bool) -> Image:
    library = _pillow()
    image: Image | None
    with _decoding(label):
        try:
            image = library.open(file, formats=FORMATS)
        except library.UnidentifiedImageError:
            image = None
    if image is None:
        raise ValueError(
            f"{label} is no image that can be opened ({', '.join(FORMATS)}): it is broken, cut off or of another "
            "format. Convert HEIC, SVG and PDF to JPEG or PNG first"
        )
    if not verify or image.format != "PNG":
        return image
    _check_pixels(label, image)
    with _decoding(label):
        image.verify()
        file.seek(0)
    return _by_header(file, label, verify=False)


def _check_path(source: object) -> str:
    """The path of a file that is there."""
    if not isinstance(source, (str, os.PathLike)):
        hint = ": a tensor (3, H, W) of uint8 as tensor.permute(1, 2, 0).numpy()" if isinstance(source, Tensor) else ""
        raise TypeError(
            "an image is given as a path, a file's bytes, a Pillow image or a uint8 NumPy array (height, width, 3), "
            f"got {type(source).__name__}{hint}"
        )
    path = os.fsdecode(source)
    if re.match(r"(?i)[a-z][a-z0-9+.-]+://|data:", path):
        raise ValueError(f"{path!r:.80} is an address, and regard downloads no image: fetch it, and give its path")
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a directory: give the path of one image in it")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {path!r:.200}")
    check_file(Path(path))
    return path


class _NamedBytes(io.BytesIO):
    """What an open file held, under its name."""

    name: str


def _held(file: IO[bytes]) -> bytes:
    """What is left of an open file. Raises ValueError where all of it was read before."""
    if not isinstance(file.read(0), bytes):
        raise TypeError("an image's file is read as bytes, got str of it: open it in mode 'rb'")
    held = read_stream(file, MOST_READ, "the file")
    try:
        position = file.tell()
    except (AttributeError, OSError):  # a pipe
        position = 0
    if not held and position > 0:
        raise ValueError("the file was already read to its end: rewind it with file.seek(0)")
    return held


def _check_array(array: NDArray[Any]) -> NDArray[np.uint8]:
    """(H, W), or (H, W, 3 or 4), as Pillow takes it."""
    if array.dtype != np.uint8:
        raise ValueError(
            f"an array of pixels must be uint8, 0 to 255, got {array.dtype}: convert it, from 0 to 1 as "
            "(array * 255).round().astype(np.uint8)"
        )
    if array.ndim == 4:
        raise ValueError(f"one array is one image, got shape {array.shape}: give a list of them, list(array)")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        colours_first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        hint = ": colours come last, array.transpose(1, 2, 0)" if colours_first else ""
        raise ValueError(
            "an array of pixels must be (height, width) or (height, width, 1, 3 or 4), "
            f"got shape {tuple(array.shape)}{hint}"
        )
    if array.size == 0:
        raise ValueError(f"an array without pixels is no image, got shape {tuple(array.shape)}")
    return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array


def _check_frame(label: str, count: int, frame: int | None) -> None:
    if frame is not None and not (isinstance(frame, int) and 0 <= frame < count):
        there = f"frames 0 to {count - 1}" if count > 1 else "one frame, 0"
        raise ValueError(f"{label} has {there}, got frame={frame!r}")


def _check_frames(image: Image, label: str, count: int) -> None:
    if count > 1 and image.format != "MPO":
        raise ValueError(f"{label} has {count} frames: name one, open_image(…, frame=0) to frame={count - 1}")


def _check_mode(image: Image, label: str) -> None:
    if image.mode == "F":
        raise ValueError(f"{label} holds floats, and does not say which is white: give an array of uint8, 0 to 255")


def _check_pixels(label: str, image: Image) -> None:
    integers = image.mode.startswith("I")
    each = BYTES_OF_INTEGERS if integers else BYTES_OF_FORMAT.get(image.format or "", BYTES_EACH)
    most = MOST_BYTES // each
    if max(image.size) > MOST_SIDE or image.width * image.height > most:
        raise ValueError(
            f"{label} is {image.height} high and {image.width} wide, and at most {most:,} pixels, {MOST_SIDE:,} on a "
            "side, are opened: make it smaller"
        )


# ----------------------------------------------------------------------------------------------------------- decoding


@contextmanager
def _decoding(label: str) -> Iterator[None]:
    """Whatever Pillow raises for a broken file, as one error."""
    library = _pillow()
    with parsing(label, "cannot be decoded, it is broken or cut off"), warnings.catch_warnings():
        # We refuse what is too large ourselves; of what is less, its warning says nothing to the user.
        warnings.simplefilter("ignore", library.DecompressionBombWarning)
        try:
            yield
        except library.DecompressionBombError as problem:
            raise ValueError(f"{label} has too many pixels ({problem}): make it smaller") from None


def _to_rgb(image: Image, label: str, frame: int | None, background: Colour | None) -> Image:
    """An RGB image of our own, upright, of an image that Pillow has opened but perhaps not decoded."""
    from PIL import ImageOps

    _check_pixels(label, image)
    with _decoding(label):
        count, at = getattr(image, "n_frames", 1), image.tell()
    _check_frame(label, count, frame)
    if frame is None:
        _check_frames(image, label, count)
    with _decoding(label):
        image.seek(at if frame is None else frame)
    _check_pixels(label, image)  # the pages of a TIFF differ in size
    with _decoding(label):
        image.load()
        # It copies an image that is upright already: memory that a large one does not leave us.
        upright = ImageOps.exif_transpose(image) if image.getexif().get(ORIENTATION, 1) != 1 else image
        if count > 1:
            upright = upright.copy() if upright is image else upright
            image.seek(at)  # an image that the caller gave stands where it stood
    _check_mode(upright, label)
    if upright.mode.startswith("I"):
        upright = _eight_bits(upright, label)
    library = _pillow()
    try:
        if background is not None and upright.has_transparency_data:
            behind = library.new("RGBA", upright.size, (*background, 255))
            upright = library.alpha_composite(behind, upright.convert("RGBA"))
        elif upright.mode == "P" and "transparency" in upright.info:
            upright = upright.convert("RGBA")  # the same colours, but straight to RGB Pillow warns
        rgb = upright.convert("RGB")
    except ValueError as problem:
        raise ValueError(
            f"{label} has the mode {upright.mode}, which Pillow cannot convert to RGB: {problem}"
        ) from None
    rgb.info = {}
    return rgb


def _eight_bits(image: Image, label: str) -> Image:
    """Grey of 16 bits, or of 8 in a wider type, as 8 bits; the value that a PNG may declare transparent as alpha."""
    values = np.asarray(image)  # (H, W), uint16 or int32
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(
            f"{label} holds integers from {values.min()} to {values.max()}, and does not say which is white: "
            "give an array of uint8, 0 to 255"
        )
    library = _pillow()
    upper = values if values.max() <= 255 else values >> 8  # (H, W)
    grey: Image = library.fromarray(upper.astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(library.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey
