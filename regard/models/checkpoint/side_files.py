"""The small files beside the weights: how text is generated, how vectors are pooled. It knows no key of theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from regard.parsing import read_json

__all__ = ["copy_sides", "read_side", "write_side"]

T = TypeVar("T", dict[str, Any], list[Any])


def read_side(directory: Path | None, name: str, kind: type[T]) -> T | None:
    """The object (dict) or list that directory/name holds; None where there is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "generation_config.json").write_text('{"num_beams": 4}')
    ...     read_side(Path(folder), "generation_config.json", dict), read_side(Path(folder), "modules.json", list)
    ({'num_beams': 4}, None)

    Raises ValueError for what is not JSON of this kind.
    """
    path = None if directory is None else directory / name
    if path is None or not path.is_file():
        return None
    values = read_json(path)
    if not isinstance(values, kind):
        wanted = "an object" if kind is dict else "a list"
        raise ValueError(f"{path} must hold {wanted}, it holds {type(values).__name__}")
    return values


def write_side(directory: Path, name: str, values: object) -> None:
    """Write values as JSON to directory/name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_side(Path(folder), "modules.json", [1, 2])
    ...     read_side(Path(folder), "modules.json", list)
    [1, 2]
    """
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (directory / name).write_text(text + "\n", encoding="utf-8")


def copy_sides(source: Path, directory: Path, names: Iterable[str]) -> None:
    """Copy those of the files that a source has; folders in their names are made."""
    for name in names:
        if (source / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, directory / name)
