"""A capture from a file, for the commands that take one, and where one may be written. It does not know what for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.output_files import check_output

if TYPE_CHECKING:
    from regard.explorer.sessions import Session
    from regard.lens.capture import Capture

__all__ = ["check_capture", "read_capture", "read_session"]


def check_capture(path: Path | None) -> None:
    """Refuse a path that no capture can be written to, with a ValueError, before anything is computed.

    >>> check_capture(Path("out/run.regard"))

    path: None asks for no file.
    """
    if path is not None and (path.suffix.lower() != ".regard" or path.is_dir()):
        raise ValueError(f"--save {str(path)!r} must be a file that ends in .regard")
    check_output(path)


def read_capture(path: Path) -> Capture:
    """The capture that a file holds.

    >>> import tempfile
    >>> from regard.lens.capture import Capture
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Capture("GPT2").save(f"{folder}/run.regard")
    ...     read_capture(Path(folder, "run.regard")).model
    'GPT2'

    Raises ValueError for what is no capture, OSError that names what cannot be read.
    """
    from regard.lens.files.saving import open

    try:
        return open(path)
    except OSError as error:
        if error.strerror is None:  # ours, which names the path already
            raise
        raise OSError(f"cannot read {str(path)!r}: {error.strerror}") from None


def read_session(path: Path) -> Session:
    """The capture that a file of `regard look` holds, with its words and pictures.

    >>> import tempfile
    >>> from regard.lens.capture import Capture
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Capture("GPT2", [["a", "b"]]).save(f"{folder}/run.regard")
    ...     read_session(Path(folder, "run.regard")).tokens
    ('a', 'b')

    Raises as `read_capture`, with how a text is read where the file may be one.
    """
    from regard.explorer.sessions import session_of
    from regard.lens.files.capture_file import CaptureFileError

    try:
        return session_of(read_capture(path), path.name)
    except CaptureFileError as error:
        hint = f"; if it is a text: --file {path}" if "not a regard capture" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None
