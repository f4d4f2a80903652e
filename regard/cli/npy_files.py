"""Vectors written to NumPy's .npy, or one clear reason why not. It does not know what they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.output_files import check_output, output_to

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["as_numpy_has_it", "check_npy", "write_npy"]


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
