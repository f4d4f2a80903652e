"""The typer app: all commands, with help in English and Korean."""

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard import __version__
from regard.cli import captures, cost, image_tasks, look, mask, models, serve, steps, text_tasks
from regard.cli.options import Lang, known, speaker
from regard.tables import width

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


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


# A line for each in the list of commands; of a command's own help typer would show the beginning.
LINES = {
    "steps": ("Attention step by step, with every number.", "어텐션을 단계별로, 모든 숫자와 함께."),
    "look": ("What attention looks at, in a text or picture.", "텍스트나 이미지에서 어텐션이 보는 것."),
    "serve": ("The explorer in a browser.", "브라우저로 모든 헤드 살펴보기."),
    "doctor": ("What was wrong with a run's masks and numbers.", "실행에서 마스크와 숫자의 문제 찾기."),
    "diff": ("Compare two captures.", "두 캡처 비교."),
    "generate": ("Write what comes after a prompt.", "프롬프트에 이어지는 텍스트 쓰기."),
    "fill": ("Words that could stand at mask tokens.", "마스크 자리에 올 수 있는 단어."),
    "embed": ("A vector for each text.", "텍스트마다 벡터 하나."),
    "classify": ("The labels of texts or pictures.", "텍스트나 이미지의 레이블."),
    "caption": ("What is to be seen in pictures, in words.", "이미지에 보이는 것을 텍스트로."),
    "answer": ("Answers to questions about a picture.", "이미지에 대한 질문에 답하기."),
    "match": ("How well texts go with a picture.", "텍스트가 이미지와 얼마나 맞는지."),
    "features": ("The vectors of a picture's patches as a map.", "이미지 패치들의 벡터를 맵으로."),
    "verify": ("Does it compute what transformers does, here?", "계산 결과가 transformers와 같은지 확인."),
    "mask": ("Draw who may look at whom.", "누가 누구를 볼 수 있는지 그리기."),
    "cost": ("Count the operations and bytes of attention.", "어텐션의 연산량과 메모리 세기."),
    "backends": ("Which backends can do a call, and why not.", "호출을 처리할 수 있는 백엔드와 그 이유."),
}


def app_in(lang: Lang) -> typer.Typer:
    """The app; its help is in the language.

    >>> [command.name for command in app_in("en").registered_commands]
    ['steps', 'look', 'serve', 'doctor', 'diff', 'generate', 'fill', 'embed', 'classify', 'caption', 'answer', \
'match', 'features', 'verify', 'mask', 'cost', 'backends']
    """
    say = speaker(lang)
    app = typer.Typer(
        cls=KoreanGroup if lang == "ko" else None,
        add_completion=False,
        rich_markup_mode=None,  # plain help: rich's boxes take 0.1 s and say no more
        context_settings={"help_option_names": ["-h", "--help"]},
        help=say("Transformer attention in which nothing is hidden.", "모든 단계를 볼 수 있는 Transformer 어텐션."),
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help=say("Print the version.", "버전을 출력합니다."))
        ] = False,
        lang: Annotated[
            str, typer.Option(metavar="en|ko", help=say("Language of all commands.", "모든 명령의 언어."))
        ] = lang,
    ) -> None:
        known(lang)  # `main` has read it, wherever it stands: the commands have it as their default
        if version:
            print(f"regard {__version__}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            print(context.get_help())

    commands = [steps.add, look.add, serve.add, captures.add_doctor, captures.add_diff]
    commands += [text_tasks.add_generate, text_tasks.add_fill, text_tasks.add_embed, text_tasks.add_classify]
    commands += [image_tasks.add_caption, image_tasks.add_answer, image_tasks.add_match, image_tasks.add_features]
    for add in (*commands, models.add, mask.add, cost.add_cost, cost.add_backends):
        add(app, lang)
    for registered in app.registered_commands:
        registered.cls = KoreanCommand if lang == "ko" else Command
        registered.short_help = say(*LINES[str(registered.name)])
    return app
