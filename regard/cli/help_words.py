"""Help as it is printed: without Python's types, and in Korean with the frame, which is typer's, in Korean.

Each command brings its own words. This file does not know any command.
"""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from regard.tables import width

__all__ = ["Command", "KoreanCommand", "KoreanGroup", "folded", "in_korean", "without_types"]

FRAME = (
    (r"^Usage: ", "사용법: "),
    (r"^Arguments:$", "인자:"),
    (r"^Options:$", "옵션:"),
    (r"^Commands:$", "명령:"),
    (r"\[required\]", "[필수]"),
    (r"\[default:", "[기본값:"),
    (r"\bShow this message and exit\.", "이 도움말을 보여 줍니다."),
)
TYPED = re.compile(r"^  ([A-Z]+) <[^>]*>( *)", re.MULTILINE)
"""An argument, and the type that newer versions of typer show after it."""


def in_korean(text: str) -> str:
    """Help whose frame is typer's, with the frame in Korean.

    >>> in_korean("Usage: regard fill TEXT"), in_korean("  --top K  후보의 개수.  [default: 5]")
    ('사용법: regard fill TEXT', '  --top K  후보의 개수.  [기본값: 5]')
    """
    for english, korean in FRAME:
        text = re.sub(english, korean, text, flags=re.MULTILINE)
    return text


def without_types(text: str) -> str:
    r"""Help without the types of arguments, their column as wide as their names are.

    >>> print(without_types("  PICTURE <str>     A path.\n  TEXT <list[str]>  One, or several."))
      PICTURE  A path.
      TEXT     One, or several.
    """
    wide = max((len(found[1]) for found in TYPED.finditer(text)), default=0)
    return TYPED.sub(lambda found: f"  {found[1]:<{wide}}  ", text)


def folded(text: str, room: int) -> list[str]:
    r"""The lines of help, broken between words where a line is full. Hangul takes two cells; typer counts one.

    >>> folded("텍스트나 이미지의 레이블.\n\nTEXT", 16)
    ['텍스트나', '이미지의 레이블.', '', 'TEXT']

    text: paragraphs with blank lines between them; one that begins with \b is left as it is.
    """
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        lines += [""] if lines else []
        if paragraph.startswith("\b\n"):
            lines += paragraph.splitlines()[1:]
            continue
        line = ""
        for word in paragraph.split():
            if line and width(f"{line} {word}") > room:
                lines.append(line)
                line = ""
            line = f"{line} {word}".lstrip()
        lines.append(line)
    return lines


class Command(TyperCommand):
    """A command whose help shows no types."""

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        return without_types(super().get_help(ctx))


class KoreanCommand(Command):
    """A command whose help has a Korean frame."""

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        return in_korean(super().get_help(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """What the command is for, in lines that fit."""
        _write(self.help, formatter)


class KoreanGroup(TyperGroup):
    """A list of commands whose help has a Korean frame."""

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        return in_korean(super().get_help(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """What the commands are for, in lines that fit."""
        _write(self.help, formatter)


def _write(text: str | None, formatter: Any) -> None:
    indent = " " * (formatter.current_indent + formatter.indent_increment)
    lines = folded(text or "", formatter.width - len(indent))
    formatter.write_paragraph()
    formatter.write("".join(f"{indent}{line}".rstrip() + "\n" for line in lines))
