"""Texts that are written one after another, shown as soon as they are: what is printed stays, come what may.

It does not know who writes them, nor about what.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from regard.cli.model_files import Tick, bar

if TYPE_CHECKING:
    from regard.models.verbs.writing import Written

__all__ = ["gather"]

Begin = Callable[[Callable[[int], None]], "Iterator[list[Written]]"]
"""Begins to write; told whom to tell the steps."""


def gather(title: str, begin: Begin, line: "Callable[[Written], str] | None") -> "list[Written]":
    """All that is written, each printed as a line when it is there, while a bar shows how far.

    >>> from regard.models.verbs.writing import Written
    >>> import torch
    >>> made = [Written("", text, torch.tensor([5]), "eos") for text in ("a cat", "a mat")]
    >>> len(gather("caption", lambda tell: iter([made[:1], made[1:]]), str))
    a cat
    a mat
    2

    line: how one is printed, None for not at all.
    """
    made: list[Written] = []
    ticks: list[Tick] = []
    parts = begin(lambda steps: ticks[-1](steps, None))
    while True:
        with bar(title) as tick:  # which is gone while a line is printed: rich would take that for its own
            ticks[:] = [tick]
            part = next(parts, None)
        if part is None:
            return made
        if line is not None:
            for one in part:
                print(line(one), flush=True)
        made += part
