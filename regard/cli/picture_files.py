"""Figures written where the user says, or one clear reason why not. It does not know what is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.output_files import check_output, output_to

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUFFIXES", "check_place", "write"]

SUFFIXES = (".png", ".svg", ".pdf")


def check_place(path: Path | None) -> None:
    """Refuse a path that no figure can be written to, before anything is computed or made.

    >>> check_place(Path("out/cat_sat.png"))

    path: None asks for no figure.  Raises ValueError for a folder or another suffix, OSError as
    `check_output`.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--figure {str(path)!r} is a folder; name a file in it that ends in {', '.join(SUFFIXES)}")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--figure {str(path)!r} must end in {', '.join(SUFFIXES)}")
    check_output(path)


def write(figure: Figure, path: Path) -> None:
    """Write a figure; folders that are missing on the way are made.

    >>> import numpy as np, tempfile
    >>> from regard.lens.figures import heatmap
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(heatmap(np.eye(2)), Path(folder, "new", "eye.svg"))
    ...     Path(folder, "new", "eye.svg").exists()
    True

    Raises OSError as `output_to`.
    """
    from regard.lens import figures

    with output_to(path):
        figures.save(figure, path)
