"""Text files and tables as rows, and a fingerprint of their content."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor


def read_documents(source: Any) -> list[str]:
    """Whole texts: of a .txt file, of each line of a .jsonl ("text"), of every such file in a directory, or as given.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty or of another kind.
    """
    if not isinstance(source, (str, Path)):
        texts = [row if isinstance(row, str) else row["text"] for row in source]
        if not texts:
            raise ValueError("the data has no text")
        return texts
    path = _existing(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".txt", ".jsonl"))
        if not files:
            raise ValueError(f"{path} has no .txt or .jsonl file")
        return list(chain.from_iterable(map(read_documents, files)))
    if path.suffix == ".jsonl":
        return [row["text"] for row in read_rows(path, ("text",))]
    text = _text(path)
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return [text]


def numbered_lines(source: str | Path) -> list[tuple[int, str]]:
    """The lines of a text file that are not blank, each with its number, from 1.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: all lines are blank, or the file is not UTF-8.
    """
    path = _existing(source)
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines


def read_rows(source: Any, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a .tsv, .csv or .jsonl file, or of a list of dicts or tuples, with at least these columns.

    A table's first line names its columns; without such a line its columns are taken in the order given.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no rows, is of another kind or lacks a column.
    """
    if isinstance(source, (str, Path)):
        path = _existing(source)
        if path.suffix == ".jsonl":
            rows: list[Any] = []
            for number, line in enumerate(_text(path).split("\n"), 1):
                try:
                    rows += [json.loads(line)] if line.strip() else []
                except ValueError as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        elif path.suffix in (".tsv", ".csv"):
            rows = list(_table(path, columns))
        else:
            raise ValueError(f"{path}: rows are read from .tsv, .csv or .jsonl, with the columns {', '.join(columns)}")
        where = str(path)
    else:
        rows, where = list(source), "the data"
    records = []
    for number, row in enumerate(rows):
        if not isinstance(row, (Mapping, list, tuple)):
            raise ValueError(f"{where}: row {number} must have the columns {', '.join(columns)}; it is {row!r:.80}")
        named = dict(row) if isinstance(row, Mapping) else dict(zip(columns, row, strict=False))
        missing = [column for column in columns if named.get(column) is None]
        if missing:
            there = [name for name, value in named.items() if value is not None]
            raise ValueError(
                f"{where}: row {number} has no {', '.join(missing)}; it has {', '.join(there) or 'nothing'}"
            )
        records.append(named)
    if not records:
        raise ValueError(f"{where} has no rows")
    return records


def _table(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    if path.suffix == ".tsv":  # quotes are text there
        lines = (line.split("\t") for line in _text(path).split("\n") if line)
    else:
        lines = (line for line in csv.reader(StringIO(_text(path), newline="")) if line)
    first = next(lines, [])
    names = first if set(columns) <= set(first) else None
    if names is None and len(first) > len(columns):
        raise ValueError(
            f"{path}: the first line, {first!r:.80}, does not name {', '.join(columns)}, and has more fields than "
            "these: name the columns in a first line"
        )
    for line in lines if names else chain([first] if first else [], lines):
        yield dict(zip(names or columns, line, strict=False))


def _existing(source: str | Path) -> Path:
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no data {str(source)!r}")
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")  # Excel writes a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def fingerprint(source: Any) -> str:
    """A short name of the data's content, to tell whether a run is resumed on the same data."""
    digest = hashlib.sha256()
    if isinstance(source, (str, Path)):
        path = Path(source)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(str(file.relative_to(path)).encode())  # folders are labels
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
    else:
        for row in source:
            _update(digest, row)
    return digest.hexdigest()[:16]


def _update(digest: Any, value: Any) -> None:
    """Add a value's content; the repr of an array leaves numbers out, that of a Pillow image has its address."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        for item in value:
            _update(digest, item)
    elif hasattr(value, "tobytes"):
        digest.update(value.tobytes())
    else:
        digest.update(repr(value).encode())
