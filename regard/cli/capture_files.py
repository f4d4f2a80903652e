"""A capture from a file, for the commands that take one. It does not know what is done with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.lens.capture import Capture

__all__ = ["read_capture"]


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
