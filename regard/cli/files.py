"""Input and output files of the commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.parsing import check_file, parsing, read_bounded, read_stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from regard.models.model import Model

MOST_TEXT = 2**26
"""Bytes of a text, 64 MiB; models read some thousand tokens."""

MOST_PIPED = 2**28
"""Bytes of standard input where it may be a picture, 256 MiB."""


def read_texts(typed: Sequence[str], file: Path | None) -> list[str]:
    """The texts that were typed, where "-" is all of standard input, and the lines of a file that are not blank.

    >>> read_texts(["하나", "둘"], None)
    ['하나', '둘']

    Raises ValueError where there are none, or where they are not UTF-8; OSError that names what cannot be read.
    """
    if list(typed).count("-") > 1:
        raise ValueError("'-' is standard input, which can be read once")
    texts = [as_text(read_stdin(MOST_TEXT)) if text == "-" else text for text in typed]
    texts += [] if file is None else read_lines(file)
    if not texts:
        raise ValueError("there is no text: give one, '-' for standard input, or --file with one per line")
    return texts


def read_one(typed: str | None, file: Path | None) -> str:
    """One text: as it was typed, where "-" is all of standard input, or all that a file holds.

    >>> read_one("고양이", None)
    '고양이'

    Raises ValueError where there is none, or two, or it is not UTF-8; OSError that names what cannot be read.
    """
    if typed is not None and file is not None:
        raise ValueError(f"a text and --file {str(file)!r} exclude each other")
    if file is not None:
        return _whole(file)
    if typed is None:
        raise ValueError("there is no text: give one, '-' for standard input, or --file")
    return as_text(read_stdin(MOST_TEXT)) if typed == "-" else typed


def read_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file that are not blank."""
    return [line for line in _whole(file).splitlines() if line.strip()]


def _whole(file: Path) -> str:
    try:
        text = read_bounded(file, MOST_TEXT).decode("utf-8-sig")
    except OSError as error:
        raise OSError(f"cannot read {str(file)!r}: {error.strerror}" if error.strerror else str(error)) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 text: byte {error.start} is not") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_stdin(most: int) -> bytes:
    """All of standard input. Raises ValueError where it is closed, or holds more than `most` bytes."""
    if sys.stdin is None:
        raise ValueError("'-' is standard input, which is closed: pipe something in, or name a file")
    return read_stream(sys.stdin.buffer, most, "standard input")


def read_piped(typed: str | None, file: Path | None) -> bytes | None:
    """All of standard input where "-" was typed and no file is named, whatever it is; else None.

    >>> read_piped("고양이", None)
    """
    return read_stdin(MOST_PIPED) if typed == "-" and file is None else None


def as_text(piped: bytes) -> str:
    r"""What came from standard input as a text, without the line end at its end.

    >>> as_text("고양이\r\n".encode())
    '고양이'

    Raises ValueError where it is not UTF-8.
    """
    try:
        return piped.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: byte {error.start} is not") from None


def read_pictures(typed: Sequence[str], file: Path | None = None) -> list[str | bytes]:
    """The paths that were typed, where "-" is the picture on standard input, and those in a file, one per line.

    >>> read_pictures(["a.jpg", "b.png"])
    ['a.jpg', 'b.png']

    Raises ValueError where there are none; OSError that names what cannot be read.
    """
    if list(typed).count("-") > 1:
        raise ValueError("'-' is standard input, which can be read once")
    pictures: list[str | bytes] = [read_stdin(MOST_PIPED) if path == "-" else path for path in typed]
    pictures += [] if file is None else read_lines(file)
    if not pictures:
        raise ValueError("there is no picture: give a path, '-' for standard input, or --file with a path per line")
    return pictures


def check_pictures(pictures: Sequence[str | bytes]) -> None:
    """Refuse what is no picture by its header, before a model is loaded, which takes long.

    >>> check_pictures([b"no picture"])
    Traceback (most recent call last):
        ...
    ValueError: the data is text, not an image. What can be opened: JPEG, PNG, GIF, BMP, PPM, WEBP, TIFF, JPEG2000, \
AVIF

    Raises as `regard.data.images.peek_image`, with the picture's number where there are several.
    """
    from regard.data.images import numbered, peek_image

    for number, picture in enumerate(pictures):
        with numbered(number, len(pictures)):
            peek_image(picture)


def require_sight(model: Model, verb: str) -> None:
    """Refuse a model of texts alone, with a ValueError that says what the command is for."""
    from regard.tasks.images import has_vision

    if not has_vision(model):
        raise ValueError(f"{verb} is about pictures, and {model.family.title} reads texts alone")


def require_reading(model: Model, text: str, example: str) -> None:
    """Refuse a model that needs a picture, with a ValueError that says how one is named.

    text: what it was to read.  example: a command with a picture.
    """
    from regard.models.image_text import Answerer, Captioner, Matcher
    from regard.models.vision import VisionModel

    if isinstance(model, (VisionModel, Captioner, Answerer, Matcher)):
        raise ValueError(
            f"{model.family.title} looks at pictures, and {text[:40]!r} is a text: name the file of a picture, as "
            f"in {example}"
        )


NAMES = (("q", "k", "v"), ("x", "w_q", "w_k", "w_v"))
"""The names a file holds: all of the one or all of the other."""

SUFFIXES = (".npz", ".npy", ".safetensors")
LARGEST = 2**28  # bytes, 256 MiB; steps are for small inputs
MOST_NAMED = 8  # names of a file that holds others


def read_arrays(path: Path, names: tuple[tuple[str, ...], ...] = NAMES, largest: int | None = None) -> dict[str, Any]:
    """The arrays of a file by name: q, k, v, or x, w_q, w_k, w_v. NumPy arrays; torch tensors from .safetensors.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.eye(3, 5))
    ...     {name: array.shape for name, array in read_arrays(Path(folder, "x.npy")).items()}
    {'q': (3, 5), 'k': (3, 5), 'v': (3, 5)}

    path: ends in .npz, .npy or .safetensors. The one array of an .npy is q, k and v at once.
    names: which sets of names it may hold.  largest: how many bytes; by default 256 MiB, what steps are for.

    Raises ValueError for another suffix, what is no such file, unknown or missing names and more bytes; OSError for
    what cannot be opened.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise ValueError(f"cannot read {str(path)!r}: the name must end in {', '.join(SUFFIXES)}")
    try:
        check_file(path)
        _check_bytes(path, path.stat().st_size, largest)
        with parsing(repr(str(path)), f"cannot be read as {kind}"):
            arrays = {".npz": _from_npz, ".npy": _from_npy, ".safetensors": _from_safetensors}[kind](path, largest)
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


def _from_safetensors(path: Path, largest: int | None) -> dict[str, Any]:
    from safetensors.torch import load_file  # torch, because NumPy has no bfloat16

    return dict(load_file(path))


def _from_npy(path: Path, largest: int | None) -> dict[str, Any]:
    with path.open("rb") as file:
        return dict.fromkeys("qkv", _array(file, path.stat().st_size))


def _from_npz(path: Path, largest: int | None) -> dict[str, Any]:
    from zipfile import ZipFile

    with ZipFile(path) as members:  # what it unpacks to is known before anything is unpacked
        _check_bytes(path, sum(member.file_size for member in members.infolist()), largest)
        arrays: dict[str, Any] = {}
        for member in members.infolist():
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"it holds {name!r} twice")
            with members.open(member) as file:
                arrays[name] = _array(file, member.file_size)
        return arrays


def _array(file: Any, size: int) -> Any:
    """The array of an open .npy file of so many bytes: NumPy would take the memory that the header claims unchecked."""
    from numpy.lib import format

    version = format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its format is {version[0]}.{version[1]}, and 1.0 and 2.0 hold numbers")
    read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects (a pickle), which can run any code; save numbers")
    if (claims := prod(shape) * dtype.itemsize) != size - file.tell():
        raise ValueError(f"its header claims {claims:,} bytes of shape {shape}, and {size - file.tell():,} are there")
    file.seek(0)
    return format.read_array(file, allow_pickle=False)


def check_output(path: Path | None) -> None:
    """Refuse what no file can be written to, before anything is computed; a missing folder is made later.

    >>> check_output(Path("out/page.html"))

    path: None asks for no file.  Raises OSError as `regard.atomic_files.check_target` does.
    """
    from regard.atomic_files import check_target

    if path is not None and path.parent.is_dir():
        check_target(path)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Make the folders on the way to a file that is written in this block.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with output_to(Path(folder, "new", "a.txt")):
    ...         Path(folder, "new", "a.txt").write_text("a")
    1

    Raises OSError that names the path, or the folder that cannot be made.
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


def check_npy(path: Path | None) -> None:
    """Refuse a path that no .npy can be written to, with a ValueError, before anything is computed.

    >>> check_npy(Path("out/vectors.npy"))

    path: None asks for no file.
    """
    if path is not None and (path.suffix.lower() != ".npy" or path.is_dir()):
        raise ValueError(f"--out {str(path)!r} must be a file that ends in .npy")
    check_output(path)


def as_numpy_has_it(vectors: Tensor) -> Tensor:
    """On the CPU, and in fp32 where there was less: NumPy has no bfloat16.

    >>> import torch
    >>> as_numpy_has_it(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return vectors.float().cpu() if vectors.dtype.itemsize < 4 else vectors.cpu()


def write_npy(vectors: Tensor, path: Path) -> None:
    """Write vectors, whole or not at all; folders that are missing on the way are made. Raises as `output_to`.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_npy(torch.zeros(2, 3), Path(folder, "new", "x.npy"))
    ...     Path(folder, "new", "x.npy").exists()
    True
    """
    from numpy.lib import format as npy

    from regard.atomic_files import atomic_file

    array = as_numpy_has_it(vectors).contiguous().numpy()
    with output_to(path), atomic_file(path, "the vectors") as file:
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        file.write(array.data)  # np.save would not say why a disk takes no more


FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


def check_place(path: Path | None) -> None:
    """Refuse a path that no figure can be written to, before anything is computed or made.

    >>> check_place(Path("out/cat_sat.png"))

    path: None asks for no figure.  Raises ValueError for a folder or another suffix, OSError as
    `check_output`.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(
            f"--figure {str(path)!r} is a folder; name a file in it that ends in {', '.join(FIGURE_SUFFIXES)}"
        )
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise ValueError(f"--figure {str(path)!r} must end in {', '.join(FIGURE_SUFFIXES)}")
    check_output(path)


def write(figure: Figure, path: Path) -> None:
    """Write a figure; folders that are missing on the way are made.

    >>> import numpy as np, tempfile
    >>> from regard.viz.figures import heatmap
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(heatmap(np.eye(2)), Path(folder, "new", "eye.svg"))
    ...     Path(folder, "new", "eye.svg").exists()
    True

    Raises OSError as `output_to`.
    """
    from regard.viz import figures

    with output_to(path):
        figures.save(figure, path)


def finite(values: Any) -> Any:
    """The same lists, dictionaries and values, with "nan", "inf" and "-inf" for the numbers of these names.

    >>> finite({"entropy": [0.5, float("nan")], "name": None})
    {'entropy': [0.5, 'nan'], 'name': None}
    """
    if isinstance(values, list):
        return [finite(value) for value in values]
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    return str(values) if isinstance(values, float) and not isfinite(values) else values
