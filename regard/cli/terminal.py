"""Where the commands print: coloured and fitted to its width on a terminal, plain and uncut in a pipe or a file.

It does not know what is printed.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

__all__ = ["Part", "Terminal"]

Part = str | tuple[str, str]
"""A piece of a line: a text, or a text and its style in rich's words, such as ("Scores", "bold")."""


class _Console(Console):
    """A console that says that its reader left, instead of ending the process with 1, which is an answer here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Terminal:
    """Standard output, and the room there is on a line of it.

    >>> Terminal().print(("1", "bold"), "  Scores")       # bold on a terminal only
    1  Scores
    """

    def __init__(self) -> None:
        self._console = _Console(highlight=False, markup=False, emoji=False)

    @property
    def room(self) -> int | None:
        """Cells on a line; None where nobody sees a margin: in a pipe or a file."""
        return self._console.width if self._console.is_terminal else None

    @property
    def coloured(self) -> bool:
        """Are colours seen? Not in a pipe, nor where NO_COLOR or the terminal's kind says so."""
        return self._console.color_system is not None and not self._console.no_color

    def print(self, *parts: Part) -> None:
        """Print a line; on a terminal, what is longer than the room goes on below, broken between words."""
        line = Text.assemble(*parts)
        if self.room is None:
            line.rstrip()
        self._console.print(line, soft_wrap=self.room is None)

    def write(self, *parts: Part) -> None:
        """Print parts of a line that goes on; a terminal breaks it where it must."""
        self._console.print(Text.assemble(*parts), soft_wrap=True, end="")
