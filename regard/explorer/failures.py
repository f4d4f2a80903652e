"""What a user is told of an error: words without this machine's folders, and an id where the traceback says more."""

from __future__ import annotations

import logging
import re
from uuid import uuid4

__all__ = ["report", "without_folders"]

LOG = logging.getLogger("regard.explorer")  # without a handler of its own, Python writes it to stderr
START = r"(?:/(?!/)|[A-Za-z]:[\\/]|\\\\)"
QUOTED = re.compile(rf"""(?P<quote>['"`])(?P<path>{START}[^'"`\n]*)(?P=quote)""")
BARE = re.compile(rf"""(?<![^\s'"`(\[=:,<]){START}[^\s'"`()\[\],;<>]+""")


def without_folders(words: str) -> str:
    """A message with each absolute path cut to its last part.

    >>> without_folders("cannot read '/home/me/my models/config.json': see /etc/motd, https://a.org/b and ../c")
    "cannot read 'config.json': see motd, https://a.org/b and ../c"
    """
    words = QUOTED.sub(lambda found: found["quote"] + _last(found["path"]) + found["quote"], words)
    return BARE.sub(lambda found: _last(found[0]), words)


def _last(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def report(error: BaseException) -> str:
    """Write the traceback of an error that nobody expected to stderr; returns what to say instead of it."""
    name = uuid4().hex[:8]
    LOG.error("error %s of the explorer:", name, exc_info=error)
    return f"{type(error).__name__}, error {name}: the terminal of `regard serve` says more"
