"""The arrays of one attention from a file: NumPy's .npz and .npy, or .safetensors. No pickle is ever loaded.

It does not know what is done with them, and it checks names and sizes, not shapes.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from regard.parsing import check_file, parsing

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
