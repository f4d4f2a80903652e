"""The pictures of a command: paths that were typed, one per line of a file, or one from standard input.

It decodes none of them, and does not know what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.text_input import MOST_PIPED, read_lines, read_stdin

if TYPE_CHECKING:
    from regard.models.model import Model

__all__ = ["check_pictures", "read_pictures", "require_reading", "require_sight"]


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
    ValueError: the data is text, not a picture. What can be opened: JPEG, PNG, GIF, BMP, PPM, WEBP, TIFF, JPEG2000, \
AVIF

    Raises as `regard.models.images.pictures.glance`, with the picture's number where there are several.
    """
    from regard.models.images.pictures import glance, numbered

    for number, picture in enumerate(pictures):
        with numbered(number, len(pictures)):
            glance(picture)


def require_sight(model: Model, verb: str) -> None:
    """Refuse a model of texts alone, with a ValueError that says what the command is for."""
    from regard.models.verbs.picturing import looks

    if not looks(model):
        raise ValueError(f"{verb} is about pictures, and {model.family.title} reads texts alone")


def require_reading(model: Model, text: str, example: str) -> None:
    """Refuse a model that needs a picture, with a ValueError that says how one is named.

    text: what it was to read.  example: a command with a picture.
    """
    from regard.models.picture_text_model import Answerer, Captioner, Matcher
    from regard.models.vision_model import VisionModel

    if isinstance(model, (VisionModel, Captioner, Answerer, Matcher)):
        raise ValueError(
            f"{model.family.title} looks at pictures, and {text[:40]!r} is a text: name the file of a picture, as "
            f"in {example}"
        )
