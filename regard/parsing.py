"""Bounded reading of untrusted files: JSON, headers and a boundary around third-party parsers."""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MOST_JSON = 2**26
"""Bytes of a JSON file, 64 MiB: the largest tokenizers have 35 MB, every other file a few kilobytes."""

CHUNK = 2**20  # bytes
LONGEST = 300  # characters of a parser's own message; Rust quotes whole files


@contextmanager
def parsing(where: str, wrong: str = "cannot be read", *, error: type[ValueError] = ValueError) -> Iterator[None]:
    """Inside `with`, whatever a borrowed parser raises becomes one error that names the file.

    That includes the panics of Rust extensions: `pyo3_runtime.PanicException` is no Exception, so that nobody who
    catches those survives one. (Rust also prints a panic to stderr before it is raised; that cannot be turned off.)

    >>> with parsing("tokenizer.json"):
    ...     raise IndexError("index out of range")
    Traceback (most recent call last):
        ...
    ValueError: tokenizer.json cannot be read: IndexError: index out of range

    where, wrong: the file and what is wrong with it, for the message.
    error: what to raise. An error of this class that names the file already, errors of the system (no such file, no
        permission), a missing library, interrupts and exits pass as they are.

    Raises the error, or MemoryError, which says for which file.
    """
    try:
        yield
    except ImportError:
        raise
    except MemoryError:
        raise MemoryError(f"there is not enough memory to read {where}") from None
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno is not None:
            raise
        if isinstance(problem, error) and where in str(problem):
            raise
        raise error(f"{where} {wrong}: {_reason(problem)}") from None
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":  # each extension has a class of its own
            raise
        raise error(f"{where} {wrong}: {_reason(problem)}") from None


def _reason(problem: BaseException) -> str:
    said = " ".join(str(problem).split())
    said = said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
    # The words of these are meant for people; a KeyError is a name alone, and many others are empty.
    plain = isinstance(problem, (ValueError, OSError)) or type(problem) is Exception
    return said if said and plain else f"{type(problem).__name__}: {said}".rstrip(": ")


def read_bounded(path: Path, most: int) -> bytes:
    """What a file holds. A pipe is read only where it is open already (/dev/stdin, /dev/fd/…), so nothing waits for it.

    >>> read_bounded(Path("/dev/zero"), most=2**20)
    Traceback (most recent call last):
        ...
    OSError: cannot read '/dev/zero': it is a device; name a file

    most: bytes. Raises ValueError for more; OSError for a folder, a device or a named pipe, and as `open` does.
    """
    if not (path.is_fifo() and str(path).startswith(("/dev/fd/", "/dev/stdin"))):
        check_file(path)
    with path.open("rb") as file:
        return read_stream(file, most, repr(str(path)))


def check_file(path: Path) -> None:
    """Raise OSError for what is no file: a pipe that nobody writes to would be waited for, a device has no end."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"cannot read {str(path)!r}: it is a folder; name a file")
    if not stat.S_ISREG(mode):
        kind = "a pipe or socket" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else "a device"
        raise OSError(f"cannot read {str(path)!r}: it is {kind}; name a file")


def read_stream(file: IO[bytes], most: int, where: str) -> bytes:
    """What is left of an open file. Raises ValueError for more than `most` bytes, once it has read that many."""
    parts: list[bytes] = []
    while part := file.read(CHUNK):  # which takes as much memory as it is asked for
        parts.append(part)
        if len(parts) * CHUNK > most and sum(map(len, parts)) > most:
            raise ValueError(f"{where} holds more than {most:,} bytes, which is the most that is read")
    return b"".join(parts)


def read_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text('{"n_head": 12}')
    ...     read_json(Path(folder, "config.json"))
    {'n_head': 12}

    Raises ValueError for anything else, for a key that has two different values, and for more than MOST_JSON bytes.
    """
    data = read_bounded(path, MOST_JSON)
    try:
        return json.loads(data.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # UTF-8, JSON, thousands of digits, or of brackets
        raise ValueError(f"{os.fspath(path)} is not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key with two values nobody can tell which one is meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        for key, one in pairs:
            if one != value[key]:
                raise ValueError(f"the key {key!r:.80} has two values, {one!r:.80} and {value[key]!r:.80}")
    return value


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What is raised for text that is not one JSON object in which no key comes twice, and in which words.

    >>> damaged = "it is damaged"
    >>> Refusal(error=ValueError, deep=damaged, broken=damaged, other=damaged, twin=damaged).deep
    'it is damaged'

    error: the class.  The rest are its messages, templates of `str.format`, for text that
    deep: is nested deeper than Python reads it.
    broken: is no JSON, no UTF-8, or has an integer of thousands of digits; {why} is Python's own message.
    other: is JSON, but no object; {kind} is its type, {value} its repr, shortened.
    twin: has an object in which a key comes more than once; {key} is the key's repr, {times} how often.
    """

    error: type[ValueError]
    deep: str
    broken: str
    other: str
    twin: str


class _TwinError(ValueError):
    """A key that comes more than once; its arguments are the key and how often."""


def parsed(text: bytes | str, refusal: Refusal) -> dict[str, Any]:
    """A JSON object in which no key comes twice, at any depth.

    >>> words = {"deep": "nested too deep", "broken": "not JSON ({why})", "other": "a {kind}, no object"}
    >>> refusal = Refusal(error=ValueError, **words, twin="the key {key} comes {times} times")
    >>> parsed(b'{"a": [1, 2]}', refusal)
    {'a': [1, 2]}
    >>> parsed(b'{"a": {"b": 1, "b": 2}}', refusal)
    Traceback (most recent call last):
    ValueError: the key 'b' comes 2 times

    text: bytes are UTF-8.  refusal: the error for anything else.

    Raises the refusal's error.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_without_twins)
    except RecursionError:
        raise refusal.error(refusal.deep) from None
    except _TwinError as twin:
        key, times = twin.args
        raise refusal.error(refusal.twin.format(key=repr(key), times=times)) from None
    except ValueError as error:
        raise refusal.error(refusal.broken.format(why=error)) from None
    if not isinstance(value, dict):
        raise refusal.error(refusal.other.format(kind=type(value).__name__, value=reprlib.repr(value)))
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _TwinError(*Counter(key for key, _ in pairs).most_common(1)[0])
    return value
