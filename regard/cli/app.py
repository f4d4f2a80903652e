"""The typer app, made from the table of commands, with help in English and Korean."""

import re
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature, get_annotations
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from regard import __version__
from regard.cli.commands import COMMANDS, Command, Lang
from regard.locale import translate
from regard.tables import width

# What typer writes around our texts.
FRAME = re.compile(
    r"^(?:Usage:|Arguments:$|Options:$|Commands:$)|\[required\]|\[default:|\bShow this message and exit\.", re.MULTILINE
)
# An argument, and the type that newer versions of typer show after it.
TYPED = re.compile(r"^  ([A-Z]+) <[^>]*>( *)", re.MULTILINE)


def check_language(lang: str) -> None:
    """Raise ValueError for a language that has no catalogue."""
    if lang not in get_args(Lang):
        raise ValueError(f"--lang must be {' or '.join(get_args(Lang))}, got {lang!r}")


# ---------------------------------------------------------------------------------------------------------------- help


def without_types(text: str) -> str:
    """Help without the types of arguments, their column as wide as their names are."""
    wide = max((len(match[1]) for match in TYPED.finditer(text)), default=0)
    return TYPED.sub(lambda match: f"  {match[1]:<{wide}}  ", text)


def folded(text: str, room: int) -> list[str]:
    r"""The lines of help, broken between words where a line is full. Hangul takes two cells; typer counts one.

    A paragraph that begins with \b is left as it is.
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


class PlainCommand(TyperCommand):
    """A command whose help shows no types."""

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        return without_types(super().get_help(ctx))


class _Korean:
    """Puts typer's frame into Korean, and folds by cells."""

    help: str | None

    def get_help(self, ctx: Any) -> str:
        text: str = super().get_help(ctx)  # type: ignore[misc]
        return FRAME.sub(lambda match: translate(match[0], "ko"), text)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        indent = " " * (formatter.current_indent + formatter.indent_increment)
        lines = folded(self.help or "", formatter.width - len(indent))
        formatter.write_paragraph()
        formatter.write("".join(f"{indent}{line}".rstrip() + "\n" for line in lines))


class KoreanCommand(_Korean, PlainCommand):
    """A command whose help is in Korean."""


class KoreanGroup(_Korean, TyperGroup):
    """A list of commands whose help is in Korean."""


# ----------------------------------------------------------------------------------------------------------------- app


@cache
def group_in(lang: Lang) -> TyperGroup:
    """All commands, with help in a language."""
    app = typer.Typer(
        cls=KoreanGroup if lang == "ko" else None,
        add_completion=False,
        rich_markup_mode=None,  # plain help: rich's boxes take 0.1 s and say no more
        context_settings={"help_option_names": ["-h", "--help"]},
        help=translate("Transformer attention in which nothing is hidden.", lang),
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help=translate("Print the version.", lang))] = False,
        lang: Annotated[str, typer.Option(metavar="en|ko", help=translate("Language of all commands.", lang))] = lang,
    ) -> None:
        check_language(lang)  # `main` has read it, wherever it stands: the commands have it as their default
        if version:
            print(f"regard {__version__}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            print(context.get_help())

    for command in COMMANDS:
        app.command(
            command.name,
            cls=KoreanCommand if lang == "ko" else PlainCommand,
            short_help=translate(command.line, lang),
            help="\n\n".join(translate(paragraph, lang) for paragraph in command.help),
        )(_callback(command, lang))
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def _callback(command: Command, lang: Lang) -> Any:
    """The function that typer reads and calls: a parameter for each field of the command's options."""

    def callback(**values: Any) -> None:
        check_language(values["lang"])
        lists = {name: tuple(value or ()) for name, value in values.items() if hints[name] == tuple[str, ...]}
        run = getattr(import_module(f"regard.cli.{command.module}"), command.name)
        if code := run(command.options(**values | lists)):
            raise typer.Exit(code)

    hints = get_type_hints(command.options)
    named = {field.name: field for field in fields(command.options)}
    # A class's own fields first, then those of its bases.
    order = dict.fromkeys(name for cls in command.options.__mro__ for name in get_annotations(cls))
    parameters = [_parameter(named[name], hints[name], lang) for name in order]
    callback.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return callback


def _parameter(field: Field[Any], kind: Any, lang: Lang) -> Parameter:
    metavar, text = field.metadata["metavar"], translate(field.metadata["help"], lang)
    default = lang if field.name == "lang" else Parameter.empty if field.default is MISSING else field.default
    if kind == tuple[str, ...]:
        kind, default = (list[str], default) if default is Parameter.empty else (list[str] | None, None)
    elif kind == Lang:
        kind = str
    if "argument" in field.metadata:
        info = typer.Argument(metavar=metavar, help=text)
    else:
        name = field.name.replace("_", "-")
        twin = f"/--no-{name}" if kind == bool | None else ""
        info = typer.Option(f"--{name}{twin}", metavar=metavar, help=text)
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
