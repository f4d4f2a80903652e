"""A model for a command: found, its head chosen by what is asked of it, loaded while a bar shows how far.

It does not know what is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from regard.models.family import Family
    from regard.models.model import Model

__all__ = ["Tick", "bar", "family_and_task", "open_model"]

OF_PICTURES = ("caption", "answer", "match", "features")
Tick = Callable[[int, int | None], None]
"""Told how much is done, and of how much, where that is known."""


def open_model(
    name: str, verb: str, tasks: Sequence[str], *, dtype: str | None, device: str, ignore: Sequence[str] = ()
) -> Model:
    """The model of a directory or a hub id, with the head of the first of these tasks that it can have.

    verb: the command, for the error where it can have none.  dtype: None is as stored.
    ignore: keys of config.json to go on without.

    Raises ValueError for a family without such a task, or of texts alone where the verb is about pictures, and for a
    dtype or a device that is none; else as `regard.load`, with the task that the checkpoint was saved for, where that
    is another one.
    """
    from regard.explorer.seeing_models import takes_pictures
    from regard.models.checkpoint.finding import find
    from regard.models.loading import load

    kind = _dtype(dtype, device)
    directory = find(name)
    family, own = family_and_task(str(directory))
    # Before its weights are looked for: BERT has a task 'answer' too, of texts.
    if verb in OF_PICTURES and takes_pictures(str(directory)) is False:
        raise ValueError(f"{verb} is about pictures, and {family.title} reads texts alone")
    task = _task(family, own, verb, tasks)
    try:
        with bar("/".join(Path(name).parts[-2:])) as tick:
            return load(directory, task=task, dtype=kind, device=device, ignore=ignore, progress=tick)
    except ValueError as error:
        if own in (None, "none", task):
            raise
        asked = f"{verb} asks for the task {task!r}"
        raise ValueError(f"this {family.title} was saved for the task {own!r}, and {asked}: {error}") from None


def family_and_task(name: str) -> tuple[Family, str | None]:
    """The family of a directory or a hub id, and the task its config.json names, None for none that is known.

    >>> family_and_task("no/such/directory/here")
    Traceback (most recent call last):
        ...
    FileNotFoundError: there is no directory 'no/such/directory/here'; a model of the hub is called 'name' or \
'owner/name'

    No weights are read. Raises as `regard.load` where there is no model, or of a family that is not known.
    """
    from regard.models.checkpoint.finding import find
    from regard.models.loading import family_of
    from regard.models.settings import Settings

    settings = Settings.open(find(name))
    family, architectures = family_of(settings), settings.values.get("architectures")
    known = {task.architecture: name for name, task in family.tasks.items()}
    return family, known.get(architectures[0]) if isinstance(architectures, list) and architectures else None


@contextmanager
def bar(title: str) -> Iterator[Tick]:
    """A progress bar on stderr while something takes its time; nothing at all where that is no terminal.

    >>> with bar("loading") as tick:
    ...     tick(1, 2)
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(title), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _task(family: Family, own: str | None, verb: str, tasks: Sequence[str]) -> str:
    there = [task for task in tasks if task in family.tasks]
    if not there:
        raise ValueError(f"{verb} needs a model with the task {' or '.join(tasks)}; {family.title} has {_list(family)}")
    return own if own in there else there[0]


def _list(family: Family) -> str:
    return ", ".join(family.tasks)


def _dtype(dtype: str | None, device: str) -> torch.dtype | None:
    """Check both before anything is read."""
    import torch

    from regard.costs import BYTES

    if dtype is not None and dtype not in BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(BYTES)}; got {dtype!r}")
    try:
        torch.zeros((), device=device)
    # By RuntimeError torch says that a name is unknown, by AssertionError that it was built without CUDA.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return None if dtype is None else getattr(torch, dtype)
