"""Examples of docstrings as blocks of code: Markdown would take >>> for a quotation. An extension of griffe."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^( *)>>> .*\n?)(?:^\1(?=.*\S).*\n?)*", re.MULTILINE)


class DoctestFences(griffe.Extension):
    """Puts fences around each example, from its first >>> to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    indent, lines = match[1], [line for line in match[0].splitlines() if line.strip() != "<BLANKLINE>"]
    return "\n".join([f"{indent}```pycon", *lines, f"{indent}```", ""])
