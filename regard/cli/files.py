"""Files of the commands: which typed words name one, reading texts, images and arrays, writing vectors and figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.files import check_file, parsing, read_bounded, read_stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

MOST_TEXT = 2**26  # bytes of a text, 64 MiB; models read some thousand tokens
MOST_PIPED = 2**28  # bytes of standard input where it may be an image, 256 MiB

ARRAY_SUFFIXES = (".npz", ".npy", ".safetensors")
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif", ".heic"
)  # fmt: skip
KNOWN_SUFFIXES = (*ARRAY_SUFFIXES, ".regard", ".txt", ".md", *IMAGE_SUFFIXES)
# First bytes of image files; WebP and AVIF have theirs a few bytes later.
IMAGE_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*")
IMAGE_MARKS = {(8, b"WEBP"), (4, b"ftypavif")}

NAMES = (("q", "k", "v"), ("x", "w_q", "w_k", "w_v"))
"""The names of arrays that a file holds: all of the one or all of the other."""
LARGEST = 2**28  # bytes, 256 MiB; steps are for small inputs
MOST_NAMED = 8  # names in the error for a file that holds others


# ------------------------------------------------------------------------------------------------------- names of files


def is_file(what: str, usage: str) -> bool:
    """Whether this is the name of an existing file, and not a text.

    >>> is_file("-", ""), is_file("나는 고양이를 보았다.", "")
    (False, False)
    >>> is_file("none.jpg", "look takes a text or an image")
    Traceback (most recent call last):
        ...
    ValueError: there is no file 'none.jpg'; look takes a text or an image

    Args:
        what: as typed.
        usage: what the command takes, for the error.

    Raises:
        ValueError: for a word that ends like a file and is not there.
    """
    if what == "-" or os.path.exists(what):  # Path.exists raises for a text that is longer than a name may be
        return what != "-"
    if _is_name(what, KNOWN_SUFFIXES):
        raise ValueError(f"there is no file {what!r}; {usage}")
    return False


def is_image(what: str | bytes) -> bool:
    """Whether this is an image: the name of an image file, by its suffix or first bytes, or a file's bytes.

    >>> is_image("no such file.jpg"), is_image(b"GIF89a")
    (False, True)
    """
    if isinstance(what, bytes):
        return what.startswith(IMAGE_BEGINNINGS) or any(what.startswith(mark, at) for at, mark in IMAGE_MARKS)
    path = Path(what)
    try:
        if not path.is_file():
            return False
        if path.suffix.lower() in IMAGE_SUFFIXES:
            return True
        with path.open("rb") as file:
            return is_image(file.read(16))
    except (OSError, ValueError):  # unreadable, or a text that is longer than a name may be
        return False


def refuse_missing_images(typed: Sequence[str]) -> None:
    """Raise ValueError for the name of an image that is not there, before it is read as a text.

    >>> refuse_missing_images(["a cat on a mat.", "-"])
    """
    for what in typed:
        if _is_name(what, IMAGE_SUFFIXES) and not os.path.exists(what):
            raise ValueError(f"there is no file {what!r}, and its name is not a text")


def refuse_images(typed: Sequence[str], reader: str) -> None:
    """Raise ValueError for an image, or the name of a missing one, where `reader` reads texts.

    >>> refuse_images(["a cat on a mat.", "-"], "embed")
    """
    refuse_missing_images(typed)
    for what in typed:
        if is_image(what):
            raise ValueError(f"{what!r} is an image, and {reader} reads texts")


def _is_name(what: str, suffixes: tuple[str, ...]) -> bool:
    return not any(letter.isspace() for letter in what) and what.lower().endswith(suffixes)


# ----------------------------------------------------------------------------------------------------- texts and images


def read_texts(typed: Sequence[str], file: Path | None) -> list[str]:
    """The texts that were typed, where "-" is all of standard input, and the lines of a file that are not blank.

    >>> read_texts(["하나", "둘"], None)
    ['하나', '둘']

    Raises:
        ValueError: where there are none, or they are not UTF-8.
        OSError: for a file that cannot be read, with its name.
    """
    if list(typed).count("-") > 1:
        raise ValueError("'-' is standard input, which can be read once")
    texts = [as_text(read_stdin(MOST_TEXT)) if text == "-" else text for text in typed]
    texts += [] if file is None else read_lines(file)
    if not texts:
        raise ValueError("there is no text: give one, '-' for standard input, or --file with one per line")
    return texts


def read_one(typed: str | None, file: Path | None) -> str:
    """One text: as it was typed, where "-" is all of standard input, or the content of a file.

    >>> read_one("고양이", None)
    '고양이'

    Raises:
        ValueError: where there is none, or two, or it is not UTF-8.
        OSError: for a file that cannot be read, with its name.
    """
    if typed is not None and file is not None:
        raise ValueError(f"a text and --file {str(file)!r} exclude each other")
    if file is not None:
        return _content(file)
    if typed is None:
        raise ValueError("there is no text: give one, '-' for standard input, or --file")
    return as_text(read_stdin(MOST_TEXT)) if typed == "-" else typed


def read_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file that are not blank."""
    return [line for line in _content(file).splitlines() if line.strip()]


def _content(file: Path) -> str:
    try:
        text = read_bounded(file, MOST_TEXT).decode("utf-8-sig")
    except OSError as error:
        raise OSError(f"cannot read {str(file)!r}: {error.strerror}" if error.strerror else str(error)) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 text: byte {error.start} is invalid") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_stdin(most: int) -> bytes:
    """All of standard input. Raises ValueError where it is closed, or holds more than `most` bytes."""
    if sys.stdin is None:
        raise ValueError("'-' is standard input, which is closed: pipe something in, or name a file")
    return read_stream(sys.stdin.buffer, most, "standard input")


def as_text(piped: bytes) -> str:
    r"""What came from standard input as a text, without the line end at its end.

    >>> as_text("고양이\r\n".encode())
    '고양이'

    Raises:
        ValueError: if it is not UTF-8.
    """
    try:
        return piped.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: byte {error.start} is invalid") from None


def read_images(typed: Sequence[str], file: Path | None = None) -> list[str | bytes]:
    """The paths that were typed, where "-" is the image on standard input, and those in a file, one per line.

    >>> read_images(["a.jpg", "b.png"])
    ['a.jpg', 'b.png']

    Raises:
        ValueError: where there are none.
        OSError: for a file that cannot be read, with its name.
    """
    if list(typed).count("-") > 1:
        raise ValueError("'-' is standard input, which can be read once")
    images: list[str | bytes] = [read_stdin(MOST_PIPED) if path == "-" else path for path in typed]
    images += [] if file is None else read_lines(file)
    if not images:
        raise ValueError("there is no image: give a path, '-' for standard input, or --file with a path per line")
    return images


def check_images(images: Sequence[str | bytes]) -> None:
    """Refuse files that are not images by their headers, before a model is loaded, which takes long.

    Raises:
        ValueError: as `regard.data.images.glance`, with the image's number where there are several.
    """
    from regard.data.images import numbered, peek_image

    for number, image in enumerate(images):
        with numbered(number, len(images)):
            peek_image(image)


# -------------------------------------------------------------------------------------------------------------- arrays


def read_arrays(path: Path, names: tuple[tuple[str, ...], ...] = NAMES, largest: int | None = None) -> dict[str, Any]:
    """The arrays of a file by name: q, k, v, or x, w_q, w_k, w_v. NumPy arrays; torch tensors from .safetensors.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.eye(3, 5))
    ...     {name: array.shape for name, array in read_arrays(Path(folder, "x.npy")).items()}
    {'q': (3, 5), 'k': (3, 5), 'v': (3, 5)}

    Args:
        path: ends in .npz, .npy or .safetensors. The one array of an .npy is q, k and v.
        names: which sets of names it may hold.
        largest: limit in bytes; by default 256 MiB, enough for `steps`.

    Raises:
        ValueError: for another suffix, a broken file, unknown or missing names, and too many bytes.
        OSError: for a file that cannot be opened.
    """
    kind = path.suffix.lower()
    if kind not in ARRAY_SUFFIXES:
        raise ValueError(f"cannot read {str(path)!r}: the name must end in {', '.join(ARRAY_SUFFIXES)}")
    try:
        check_file(path)
        _check_bytes(path, path.stat().st_size, largest)
        with parsing(repr(str(path)), f"cannot be read as {kind}"):
            if kind == ".safetensors":
                from safetensors.torch import load_file  # torch, because NumPy has no bfloat16

                arrays = dict(load_file(path))
            elif kind == ".npy":
                with path.open("rb") as file:
                    arrays = dict.fromkeys("qkv", _read_npy(file, path.stat().st_size))
            else:
                arrays = _read_npz(path, largest)
    except OSError as error:
        raise OSError(f"cannot read {str(path)!r}: {error.strerror}" if error.strerror else str(error)) from None
    if sorted(arrays) not in [sorted(group) for group in names]:
        expected = ", or ".join(", ".join(group) for group in names)
        held = ", ".join(map(repr, list(arrays)[:MOST_NAMED])) or "nothing"
        more = f" and {len(arrays) - MOST_NAMED} more" if len(arrays) > MOST_NAMED else ""
        raise ValueError(f"{str(path)!r} holds {held}{more}; expected {expected}")
    return arrays


def _check_bytes(path: Path, size: int, largest: int | None) -> None:
    if size > (LARGEST if largest is None else largest):
        why = f"steps are for small inputs, at most {LARGEST:,}" if largest is None else f"at most {largest:,}"
        raise ValueError(f"{str(path)!r} holds {size:,} bytes; {why} bytes")


def _read_npz(path: Path, largest: int | None) -> dict[str, Any]:
    from zipfile import ZipFile

    with ZipFile(path) as members:  # what it unpacks to is known before anything is unpacked
        _check_bytes(path, sum(member.file_size for member in members.infolist()), largest)
        arrays: dict[str, Any] = {}
        for member in members.infolist():
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"it holds {name!r} twice")
            with members.open(member) as file:
                arrays[name] = _read_npy(file, member.file_size)
        return arrays


def _read_npy(file: Any, size: int) -> Any:
    """The array of an open .npy file of `size` bytes: NumPy would allocate what the header claims, unchecked."""
    from numpy.lib import format

    version = format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its format is {version[0]}.{version[1]}; 1.0 and 2.0 hold numbers")
    read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects (a pickle), which can run any code; save numbers")
    if (claims := prod(shape) * dtype.itemsize) != size - file.tell():
        raise ValueError(f"its header claims {claims:,} bytes of shape {shape}, and {size - file.tell():,} are there")
    file.seek(0)
    return format.read_array(file, allow_pickle=False)


# --------------------------------------------------------------------------------------------------------------- output


def check_output(path: Path | None, option: str = "", suffixes: tuple[str, ...] = ()) -> None:
    """Refuse a path that cannot be written, before anything is computed; a missing folder is made later.

    >>> check_output(Path("out/page.html"))
    >>> check_output(Path("vectors.txt"), "--out", (".npy",))
    Traceback (most recent call last):
        ...
    ValueError: --out 'vectors.txt' must be a file that ends in .npy

    Args:
        path: None for no file.
        option: the option that names it, for the error.
        suffixes: those the name may have; any by default.

    Raises:
        ValueError: for a folder or another suffix, where suffixes are given.
        OSError: as `regard.files.check_target`.
    """
    from regard.files import check_target

    if path is None:
        return
    if suffixes and (path.suffix.lower() not in suffixes or path.is_dir()):
        raise ValueError(f"{option} {str(path)!r} must be a file that ends in {', '.join(suffixes)}")
    if path.parent.is_dir():
        check_target(path)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Make the folders on the way to a file that is written in this block.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with output_to(Path(folder, "new", "a.txt")):
    ...         Path(folder, "new", "a.txt").write_text("a")
    1

    Raises:
        OSError: with the path, or the folder that cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {str(path.parent)!r}: {error.strerror or error}") from None
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # ours, which names the path already
            raise
        raise OSError(f"{error.strerror}: {str(path)!r}") from None


def cpu_floats(vectors: Tensor) -> Tensor:
    """Vectors on the CPU, in fp32 or wider: NumPy has no bfloat16.

    >>> import torch
    >>> cpu_floats(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return vectors.float().cpu() if vectors.dtype.itemsize < 4 else vectors.cpu()


def write_npy(vectors: Tensor, path: Path) -> None:
    """Write vectors to an .npy file, whole or not at all; missing folders are made. Raises as `output_to`.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_npy(torch.zeros(2, 3), Path(folder, "new", "x.npy"))
    ...     Path(folder, "new", "x.npy").exists()
    True
    """
    from numpy.lib import format as npy

    from regard.files import atomic_file

    array = cpu_floats(vectors).contiguous().numpy()
    with output_to(path), atomic_file(path, "the vectors") as file:
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        file.write(array.data)  # np.save would not say why a disk takes no more


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure; missing folders are made. Raises as `output_to`."""
    from regard.viz import figures

    with output_to(path):
        figures.save(figure, path)
