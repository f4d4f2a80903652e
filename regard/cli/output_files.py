"""Files that a command writes where the user says: checks before anything is computed, errors in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_output", "output_to"]


def check_output(path: Path | None) -> None:
    """Refuse what no file can be written to, before anything is computed; a missing folder is made later.

    >>> check_output(Path("out/page.html"))

    path: None asks for no file.  Raises OSError as `regard.atomic_files.check_target` does.
    """
    from regard.atomic_files import check_target

    if path is not None and path.parent.is_dir():
        check_target(path)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Make the folders on the way to a file that is written in this block.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with output_to(Path(folder, "new", "a.txt")):
    ...         Path(folder, "new", "a.txt").write_text("a")
    1

    Raises OSError that names the path, or the folder that cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {str(path.parent)!r}: {error.strerror or error}") from None
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # ours, which names the path already
            raise
        raise OSError(f"{error.strerror}: {str(path)!r}") from None
