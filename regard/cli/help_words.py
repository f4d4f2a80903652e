"""The words around a command's help that are typer's own, in Korean: usage, options, defaults, and the line of --help.

Each command brings its own words. This file does not know any command.
"""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["KoreanCommand", "KoreanGroup", "in_korean"]

FRAME = (
    (r"^Usage: ", "사용법: "),
    (r"^Arguments:$", "인자:"),
    (r"^Options:$", "옵션:"),
    (r"^Commands:$", "명령:"),
    (r"\[required\]", "[필수]"),
    (r"\[default:", "[기본값:"),
    (r"\bShow this message and exit\.", "이 도움말을 보여 줍니다."),
)


def in_korean(text: str) -> str:
    """Help whose frame is typer's, with the frame in Korean.

    >>> in_korean("Usage: regard fill TEXT"), in_korean("  --top K  후보의 개수.  [default: 5]")
    ('사용법: regard fill TEXT', '  --top K  후보의 개수.  [기본값: 5]')
    """
    for english, korean in FRAME:
        text = re.sub(english, korean, text, flags=re.MULTILINE)
    return text


class KoreanCommand(TyperCommand):
    """A command whose help has a Korean frame."""

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        return in_korean(super().get_help(ctx))


class KoreanGroup(TyperGroup):
    """A list of commands whose help has a Korean frame."""

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        return in_korean(super().get_help(ctx))
