"""Inputs of the commands: texts, images, arrays and models, as they are typed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.commands import EffectOptions, LoadingOptions, LookOptions, SpokenOptions
from regard.cli.outputs import bar

if TYPE_CHECKING:
    import torch

    from regard.models.family import Family
    from regard.models.model import Model
    from regard.session.heads import Layer
    from regard.session.session import Session

MOST_TEXT = 2**26  # bytes of a text, 64 MiB; models read some thousand tokens
MOST_PIPED = 2**28  # bytes of standard input where it may be an image, 256 MiB
MOST_STEPS = 2**28  # bytes of arrays for `regard steps`, 256 MiB
MOST_NAMED = 8  # names in the error for a file of arrays that holds others

ARRAY_SUFFIXES = (".npz", ".npy", ".safetensors")
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif", ".heic"
)  # fmt: skip
KNOWN_SUFFIXES = (*ARRAY_SUFFIXES, ".regard", ".txt", ".md", *IMAGE_SUFFIXES)
# First bytes of image files; WebP and AVIF have theirs a few bytes later.
IMAGE_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*")
IMAGE_MARKS = {(8, b"WEBP"), (4, b"ftypavif")}

QKV = ("q", "k", "v")
PROJECTED = ("x", "w_q", "w_k", "w_v")
IMAGE_COMMANDS = ("caption", "answer", "match", "features")


# ------------------------------------------------------------------------------------------------------- names of files


def is_file(what: str, usage: str) -> bool:
    """Whether this names an existing file rather than being a text. Raises ValueError for a file that is not there."""
    if what == "-" or os.path.exists(what):  # Path.exists raises for a text that is longer than a name may be
        return what != "-"
    if _is_name(what, KNOWN_SUFFIXES):
        raise ValueError(f"there is no file {what!r}; {usage}")
    return False


def is_image(what: str | bytes) -> bool:
    """Whether this is an image: the name of an image file, by its suffix or first bytes, or a file's bytes."""
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


def refuse_images(typed: Sequence[str], reader: str | None = None) -> None:
    """Raise ValueError for the name of an image that is not there, and for any image where `reader` reads texts."""
    for what in typed:
        if _is_name(what, IMAGE_SUFFIXES) and not os.path.exists(what):
            raise ValueError(f"there is no file {what!r}, and its name is not a text")
    for what in typed:
        if reader is not None and is_image(what):
            raise ValueError(f"{what!r} is an image, and {reader} reads texts")


def _is_name(what: str, suffixes: tuple[str, ...]) -> bool:
    return not any(letter.isspace() for letter in what) and what.lower().endswith(suffixes)


# ----------------------------------------------------------------------------------------------------- texts and images


def read_texts(typed: Sequence[str], file: Path | None) -> list[str]:
    """The typed texts, where "-" is all of standard input, and the lines of a file that are not blank."""
    check_stdin_once(typed)
    texts = [as_text(read_stdin(MOST_TEXT)) if text == "-" else text for text in typed]
    texts += [] if file is None else read_lines(file)
    if not texts:
        raise ValueError("there is no text: give one, '-' for standard input, or --file with one per line")
    return texts


def read_images(typed: Sequence[str], file: Path | None = None) -> list[str | bytes]:
    """The typed paths, where "-" is the image on standard input, and those in a file, one per line."""
    check_stdin_once(typed)
    images: list[str | bytes] = [read_stdin(MOST_PIPED) if path == "-" else path for path in typed]
    images += [] if file is None else read_lines(file)
    if not images:
        raise ValueError("there is no image: give a path, '-' for standard input, or --file with a path per line")
    return images


def read_one(typed: str | None, file: Path | None) -> str:
    """One text: as typed, where "-" is all of standard input, or the content of a file."""
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
    from regard.formats import read_bounded

    with reading(file):
        data = read_bounded(file, MOST_TEXT)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 text: byte {error.start} is invalid") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Let an OSError in this block name the file."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # ours, which names it already
            raise
        raise OSError(f"cannot read {str(file)!r}: {error.strerror}") from None


def check_stdin_once(typed: Sequence[str]) -> None:
    """Raise ValueError where "-" is typed more than once."""
    if list(typed).count("-") > 1:
        raise ValueError("'-' is standard input, which can be read once")


def read_stdin(most: int) -> bytes:
    """All of standard input. Raises ValueError where it is closed, or holds more than `most` bytes."""
    from regard.formats import read_stream

    if sys.stdin is None:
        raise ValueError("'-' is standard input, which is closed: pipe something in, or name a file")
    return read_stream(sys.stdin.buffer, most, "standard input")


def as_text(piped: bytes) -> str:
    """Standard input as a text, without the line end at its end. Raises ValueError if it is not UTF-8."""
    try:
        return piped.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: byte {error.start} is invalid") from None


def check_images(images: Sequence[str | bytes]) -> None:
    """Raise ValueError for files that are not images by their headers, before a model is loaded, which takes long."""
    from regard.data.images import numbered, peek_image

    for number, image in enumerate(images):
        with numbered(number, len(images)):
            peek_image(image)


# -------------------------------------------------------------------------------------------------------------- arrays


def read_arrays(
    path: Path, names: tuple[tuple[str, ...], ...] = (QKV, PROJECTED), largest: int | None = None
) -> dict[str, Any]:
    """The arrays of a file by name: NumPy, or torch tensors from .safetensors. The one array of an .npy is q, k and v.

    names: the sets of names that it may hold.  largest: limit in bytes; by default that of `regard steps`.
    """
    from regard.formats import check_file, parsing

    kind = path.suffix.lower()
    if kind not in ARRAY_SUFFIXES:
        raise ValueError(f"cannot read {str(path)!r}: the name must end in {', '.join(ARRAY_SUFFIXES)}")

    def check_bytes(size: int) -> None:
        if size > (MOST_STEPS if largest is None else largest):
            why = f"steps are for small inputs, at most {MOST_STEPS:,}" if largest is None else f"at most {largest:,}"
            raise ValueError(f"{str(path)!r} holds {size:,} bytes; {why} bytes")

    with reading(path):
        check_file(path)
        size = path.stat().st_size
        check_bytes(size)
        with parsing(repr(str(path)), f"cannot be read as {kind}"):
            arrays: dict[str, Any] = {}
            if kind == ".safetensors":
                from safetensors.torch import load_file  # torch, because NumPy has no bfloat16

                arrays |= load_file(path)
            elif kind == ".npy":
                with path.open("rb") as file:
                    arrays |= dict.fromkeys(QKV, _read_npy(file, size))
            else:
                from zipfile import ZipFile

                with ZipFile(path) as members:  # what it unpacks to is known before anything is unpacked
                    check_bytes(sum(member.file_size for member in members.infolist()))
                    for member in members.infolist():
                        name = member.filename.removesuffix(".npy")
                        if name in arrays:
                            raise ValueError(f"it holds {name!r} twice")
                        with members.open(member) as part:
                            arrays[name] = _read_npy(part, member.file_size)
    if sorted(arrays) not in [sorted(group) for group in names]:
        expected = ", or ".join(", ".join(group) for group in names)
        held = ", ".join(map(repr, list(arrays)[:MOST_NAMED])) or "nothing"
        more = f" and {len(arrays) - MOST_NAMED} more" if len(arrays) > MOST_NAMED else ""
        raise ValueError(f"{str(path)!r} holds {held}{more}; expected {expected}")
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


# ------------------------------------------------------------------------------------------------------------- options


def typed_options(options: SpokenOptions, names: tuple[str, ...]) -> list[str]:
    """Which of these options were given, as they are typed."""
    values = {name: getattr(options, name) for name in names}
    given = [name for name, value in values.items() if value not in (None, ()) and value is not False]  # 0 is given
    return [f"--{name.replace('_', '-')}" for name in given]


def refuse(options: SpokenOptions, names: tuple[str, ...], why: str) -> None:
    """Raise ValueError if one of these options was given: it is for something else."""
    if typed := typed_options(options, names):
        raise ValueError(f"{', '.join(typed)} {'is' if len(typed) == 1 else 'are'} {why}")


# -------------------------------------------------------------------------------------------------------------- models


def open_model(name: str, command: str, tasks: Sequence[str], options: LoadingOptions) -> Model:
    """Load a directory or hub id, with the head of the checkpoint's own task, or else of the first that it can have."""
    from regard.models.loading import find, load
    from regard.session.session import takes_images
    from regard.tasks.inputs import has_vision

    dtype = None if options.dtype is None else torch_dtype(options.dtype)
    check_device(options.device)
    directory = find(name)
    family, own = family_and_task(str(directory))
    texts_only = ValueError(f"{command} is about images, and {family.title} reads texts only")
    # Before its weights are looked for: BERT has a task of answering too, in texts.
    if command in IMAGE_COMMANDS and takes_images(str(directory)) is False:
        raise texts_only
    there = [task for task in tasks if task in family.tasks]
    if not there:
        wanted = " or ".join(filter(None, [", ".join(tasks[:-1]), tasks[-1]]))
        raise ValueError(
            f"{command} needs a model with the task {wanted}; {family.title} has {', '.join(family.tasks)}"
        )
    task = own if own in there else there[0]
    try:
        with bar("/".join(Path(name).parts[-2:])) as tick:
            model = load(directory, task=task, dtype=dtype, device=options.device, ignore=options.ignore, progress=tick)
    except ValueError as error:
        if own in (None, family.bare_task, task):
            raise
        needed = f"{command} needs the task {task!r}"
        raise ValueError(f"this {family.title} was saved for the task {own!r}, and {needed}: {error}") from None
    if command in IMAGE_COMMANDS and not has_vision(model):  # such as CLIP's text tower alone
        raise texts_only
    return model


def load_model(name: str | Path, device: str | None, ignore: Sequence[str], dtype: str | None = None) -> Model:
    """Load a directory or hub id with the checkpoint's own head."""
    from regard.models.loading import load

    check_device(device or "cpu")
    kind = None if dtype is None else torch_dtype(dtype)
    with bar("/".join(Path(name).parts[-2:])) as tick:
        return load(name, device=device or "cpu", dtype=kind, ignore=ignore, progress=tick)


def family_and_task(name: str) -> tuple[Family, str | None]:
    """The family of a directory or hub id, and the task that its config.json names, or None. Reads no weights."""
    from regard.models.family import Config, family_of
    from regard.models.loading import find

    config = Config.open(find(name))
    family, architectures = family_of(config), config.values.get("architectures")
    known = {task.architecture: name for name, task in family.tasks.items()}
    return family, known.get(architectures[0]) if isinstance(architectures, list) and architectures else None


def check_device(device: str) -> None:
    """Raise ValueError for a device that cannot be used here."""
    import torch

    try:
        torch.zeros((), device=device)
    # torch raises RuntimeError for an unknown name, AssertionError where it was built without CUDA.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that --dtype names, or ValueError."""
    import torch

    from regard.costs import BYTES

    if name not in BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(BYTES)}; got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def require_texts(model: Model, text: str, example: str) -> None:
    """Raise ValueError for a model that needs an image; `example` is a command with one."""
    from regard.models.image_text import Answerer, Captioner, Matcher
    from regard.models.vision import VisionModel

    if isinstance(model, (VisionModel, Captioner, Answerer, Matcher)):
        raise ValueError(
            f"{model.family.title} needs an image, and {text[:40]!r} is a text: name an image file, as in {example}"
        )


def find_token(labels: Sequence[str], wanted: str, name: str) -> list[range]:
    """The tokens that an option names: one by its number, or each place of a word. Raises where there is none."""
    from regard.session.labels import find_word

    if wanted.isascii() and wanted.isdigit():
        if int(wanted) >= len(labels):
            raise IndexError(f"{name} {wanted} is out of range: there are {len(labels):,} tokens, counted from 0")
        return [range(int(wanted), int(wanted) + 1)]
    places = find_word(labels, wanted)
    if not places:
        raise ValueError(f"{name} {wanted!r} is not in the text; 'regard look' without --token lists its tokens")
    return places


def chosen_layer(session: Session, options: LookOptions | EffectOptions) -> Layer | None:
    """The layer that --layer names, by its number or its module's path; None without it. Checks --head too."""
    layers, wanted, head = session.layers, options.layer, options.head
    if not layers:
        session.capture.summary()  # which raises, and says what is known about why
    if wanted is None:
        if head is not None:
            raise ValueError(f"--head {head} needs --layer: each layer has heads of its own")
        return None
    matches = [layer for layer in layers if layer.path == wanted]
    if len(matches) > 1:
        numbers = ", ".join(str(layer.index) for layer in matches)
        raise ValueError(f"--layer {wanted!r} ran {len(matches)} times: say which by its number, one of {numbers}")
    if not matches and not (wanted.isascii() and wanted.isdigit()):
        names = [layer.path or "(model)" for layer in layers]
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise ValueError(f"--layer {wanted!r} is neither a number nor a module; there are {some}")
    if not matches and int(wanted) >= len(layers):
        raise ValueError(f"--layer {wanted} is out of range: there are {len(layers)} layers, counted from 0")
    layer = matches[0] if matches else layers[int(wanted)]
    if head is not None and not 0 <= head < (heads := layer.view.sizes[1]):
        raise IndexError(f"--head {head} is out of range: there are {heads}, counted from 0")
    return layer
