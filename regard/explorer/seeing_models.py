"""Does a model look at pictures? Told from its config.json, before any weight is read; nothing is downloaded for it.

It does not know who asks, nor how a model is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path

from regard.models.loading import empty, family_of
from regard.models.settings import Settings
from regard.models.verbs.picturing import looks

__all__ = ["takes_pictures"]


def takes_pictures(where: str) -> bool | None:
    """Whether the model of a directory or hub id looks at pictures; None where that cannot be told yet.

    >>> takes_pictures("no/such/directory") is None
    True

    where: what `regard.load` takes. A model that is not on this machine, and one that `regard.load` will refuse with
        its own words, cannot be told.
    """
    directory = _directory(where)
    if directory is None:
        return None
    try:
        settings = Settings.open(directory)
        family = family_of(settings)
        return looks(empty(family, settings, family.task_of(settings.values.get("architectures"))))
    except (OSError, ValueError):
        return None


def _directory(where: str) -> Path | None:
    """Where the model's config.json lies: the directory itself, or that of the hub's cache."""
    path = Path(os.path.expanduser(where))
    if path.is_dir():
        return path
    try:
        from huggingface_hub import errors, try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(where, "config.json")
    except errors.HFValidationError:  # a path, and no id of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None
