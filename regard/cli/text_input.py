"""The texts of a command: typed, one per line of a file, or from standard input. It does not know what they are for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from regard.parsing import read_bounded, read_stream

__all__ = ["MOST_PIPED", "as_text", "read_lines", "read_one", "read_piped", "read_stdin", "read_texts"]

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
