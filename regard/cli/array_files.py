"""The arrays of one attention from a file: NumPy's .npz and .npy, or .safetensors. No pickle is ever loaded.

It does not know what is done with them, and it checks names and sizes, not shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["NAMES", "SUFFIXES", "read_arrays"]

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
        _check_bytes(path, path.stat().st_size, largest)
        arrays = _from_safetensors(path) if kind == ".safetensors" else _from_numpy(path, kind, largest)
    except OSError as error:
        raise OSError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
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


def _from_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # torch, because NumPy has no bfloat16

    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a safetensors file: {error}") from None


def _from_numpy(path: Path, kind: str, largest: int | None) -> dict[str, Any]:
    from zipfile import BadZipFile, ZipFile

    import numpy as np

    try:
        if kind == ".npz":
            with ZipFile(path) as members:  # what it unpacks to is known before anything is unpacked
                _check_bytes(path, sum(member.file_size for member in members.infolist()), largest)
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        array = np.lib.format.open_memmap(path, mode="r")  # checks the size that the header claims against the file
        return dict.fromkeys("qkv", np.array(array))
    except (BadZipFile, EOFError, MemoryError) as error:
        raise ValueError(f"{str(path)!r} is not a whole {kind} file: {error}") from None
    except ValueError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
