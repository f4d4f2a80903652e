"""Names of files among what was typed: is it one, and is it there? It opens none of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from regard.cli import files, look_image

__all__ = ["is_file", "refuse_missing", "refuse_pictures"]

TEXTS = (".txt", ".md")
ANY = (*files.SUFFIXES, ".regard", *TEXTS, *look_image.SUFFIXES)


def is_file(what: str, takes: str) -> bool:
    """Is it the name of a file that is there, and not a text?

    >>> is_file("-", ""), is_file("나는 고양이를 보았다.", "")
    (False, False)
    >>> is_file("none.jpg", "look takes a text, or a picture")
    Traceback (most recent call last):
        ...
    ValueError: there is no file 'none.jpg'; look takes a text, or a picture

    takes: what the command takes, for the error.  Raises ValueError for the name of a file that is not there.
    """
    if what == "-" or os.path.exists(what):  # Path.exists raises for a text that is longer than a name may be
        return what != "-"
    if _is_name(what, ANY):
        raise ValueError(f"there is no file {what!r}; {takes}")
    return False


def refuse_missing(typed: Sequence[str]) -> None:
    """Refuse the name of a picture that is not there, with a ValueError, before it is read as a text.

    >>> refuse_missing(["a cat on a mat.", "-"])
    """
    for what in typed:
        if _is_name(what, look_image.SUFFIXES) and not os.path.exists(what):
            raise ValueError(f"there is no file {what!r}, and its name is no text")


def refuse_pictures(typed: Sequence[str], reader: str) -> None:
    """Refuse a picture where texts are read: its name is none.

    >>> refuse_pictures(["a cat on a mat.", "-"], "embed")

    reader: who reads, for the ValueError.
    """
    refuse_missing(typed)
    for what in typed:
        if look_image.is_picture(what):
            raise ValueError(f"{what!r} is a picture, and {reader} reads texts")


def _is_name(what: str, suffixes: tuple[str, ...]) -> bool:
    return not any(letter.isspace() for letter in what) and what.lower().endswith(suffixes)
