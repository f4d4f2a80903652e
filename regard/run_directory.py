"""The directory of a run that can be resumed: `run.json` says which run it is, and a lock keeps others out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.files import atomic_file, exclusive
from regard.formats import read_json

__all__ = ["RUN", "opened_run"]

RUN = "run.json"


@contextmanager
def opened_run(out: Path, identity: dict[str, Any]) -> Iterator[None]:
    """Begin a run in a directory, or take up the one that is there, and hold its lock.

    Raises FileExistsError if it holds another run or no run, NotADirectoryError if it is a file, BlockingIOError if
    another process runs there.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; name a directory for the run")
    out.mkdir(parents=True, exist_ok=True)
    with exclusive(out):
        check_run(out, identity)
        yield


def check_run(out: Path, identity: dict[str, Any]) -> None:
    """Write what the run is, or compare it with what is written there."""
    if not (out / RUN).is_file():
        if any(not entry.name.startswith(f".{RUN}.") for entry in out.iterdir()):  # those are of a killed write
            raise FileExistsError(f"{out} is not empty and holds no run ({RUN} is missing); name another directory")
        with atomic_file(out / RUN, "the run") as file:
            file.write(json.dumps(identity, indent=1).encode())
        return
    stored = read_json(out / RUN)
    if not isinstance(stored, dict):
        raise FileExistsError(f"{out / RUN} is damaged; name another directory")
    changed = [key for key in {**stored, **identity} if stored.get(key) != identity.get(key)]
    if changed:
        values = "; ".join(
            f"{key}: {_short(stored.get(key))} there, {_short(identity.get(key))} now" for key in changed
        )
        raise FileExistsError(
            f"{out} holds another run ({values}). Name another directory, or the same options to resume"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + " …"
