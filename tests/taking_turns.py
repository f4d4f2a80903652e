"""Turns of tests over the processes of one run (`pytest -n 4`, by pytest-xdist): a test marked `alone` runs while no
other process has a test, because it measures time; the others wait for it. In one process nothing waits.

It does not know which test measures.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

DOOR, ROOM = 0, 1  # the bytes of the file that are locked
PATH = pytest.StashKey[str]()
TURNS = pytest.StashKey["Turns"]()


class Turns:
    """A room for any number of tests, or for one that is alone.

    path: of a file that the processes of a run have in common, and no other run has.
    """

    def __init__(self, path: str) -> None:
        # Locks of fcntl belong to a process and end with it: neither a crash nor a child of a test can keep one.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._file)

    @contextmanager
    def taken(self, alone: bool) -> Iterator[None]:
        """The room, as soon as it can be had."""
        # Whoever waits for the room stands in the door: else the others could come and go, and it would never be free.
        self._lock(DOOR, "LOCK_EX")
        self._lock(ROOM, "LOCK_EX" if alone else "LOCK_SH")
        self._lock(DOOR, "LOCK_UN")
        try:
            yield
        finally:
            self._lock(ROOM, "LOCK_UN")

    def _lock(self, byte: int, how: str) -> None:
        import fcntl  # of Unix only; a run in one process does without

        fcntl.lockf(self._file, getattr(fcntl, how), 1, byte)


# --------------------------------------------------------------------------------------------------------------- pytest


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each process that is started, also in a crashed one's place, the same file. xdist calls this."""
    if PATH not in node.config.stash:
        file = NamedTemporaryFile(prefix="regard-turns-")  # noqa: SIM115
        node.config.add_cleanup(file.close)
        node.config.stash[PATH] = file.name
    node.workerinput["turns"] = node.config.stash[PATH]


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[TURNS] = turns = Turns(given["turns"])
        config.add_cleanup(turns.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around a test with all its fixtures, those of its module too."""
    turns = item.config.stash.get(TURNS, None)
    if turns is None:
        return (yield)
    with turns.taken(alone=item.get_closest_marker("alone") is not None):
        return (yield)
