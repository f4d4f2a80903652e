"""Help as it is printed: whole lines, no Python types, paragraphs that fit, in both languages."""

import re
from typing import Any

import pytest

from regard.cli.app import folded, group_in, without_types
from regard.cli.commands import COMMANDS as TABLE
from regard.locale import translate
from regard.tables import width

pytestmark = pytest.mark.usefixtures("plain")

COMMANDS = [command.name for command in TABLE]


def description(text: str) -> list[str]:
    """The paragraphs between the usage and the arguments or options."""
    return re.split(r"^(?:Arguments|Options|인자|옵션):$", text, flags=re.MULTILINE)[0].strip().split("\n\n")[1:]


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_list_of_commands_has_whole_lines(run: Any, lang: str) -> None:
    lines = run("--lang", lang).split("Commands:\n" if lang == "en" else "명령:\n")[1].splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        [command.name, translate(command.line, lang)] for command in TABLE
    ]
    assert all(line.endswith((".", "?")) and "..." not in line for line in lines)


def test_every_command_has_a_line_in_both_languages() -> None:
    assert list(group_in("en").commands) == COMMANDS
    for command in TABLE:
        assert len(command.line) <= 47
        assert re.search("[가-힣]", translate(command.line, "ko"))
        assert not re.search("[가-힣]", command.line)


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_no_python_types(run: Any, command: str, lang: str) -> None:
    assert re.findall(r"<(?:str|int|list|path|file)[^>]*>", run(command, "--help", "--lang", lang)) == []


def test_arguments_stand_in_a_column_without_their_types(run: Any) -> None:
    said = run("match", "--help").split("Arguments:\n")[1]
    assert said.startswith("  IMAGE  A path.  [required]\n  TEXT   One or several.  [required]\n\nOptions:\n")
    assert without_types("  --top K <int>  5\n  TEXT  <mask> is one") == "  --top K <int>  5\n  TEXT  <mask> is one"


@pytest.mark.parametrize("command", COMMANDS)
def test_korean_help_has_the_paragraphs_of_the_english(run: Any, command: str) -> None:
    english, korean = (description(run(command, "--help", "--lang", lang)) for lang in ("en", "ko"))
    assert len(korean) == len(english)


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_korean_description_fits_the_terminal(run: Any, monkeypatch: Any, command: str, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    paragraphs = description(run(command, "--help", "--lang", "ko"))
    if command != "mask":  # whose list of masks is broken by hand
        assert max(width(line) for part in paragraphs for line in part.splitlines()) <= columns - 2


def test_paragraphs_are_folded_by_cells_and_those_marked_are_left() -> None:
    assert folded("가나 다라 abc d\n\n\b\nas  it\nis here\n\nend", 9) == [
        "가나 다라", "abc d", "", "as  it", "is here", "", "end"
    ]  # fmt: skip
    assert folded("가나다라마 b", 4) == ["가나다라마", "b"]  # a word longer than the room stands alone


@pytest.mark.parametrize("place", [["--lang", "ko"], ["--lang=ko"]])
def test_language_before_the_command_is_the_default_of_all(run: Any, place: list[str]) -> None:
    assert run(*place) == run(*place, "--help") != run()
    assert run(*place).startswith("사용법: regard [OPTIONS] COMMAND")
    assert run(*place, "mask", "causal") == run("mask", "causal", "--lang", "ko") != run("mask", "causal")
    assert run(*place, "mask", "causal", "--lang", "en") == run("mask", "causal")
    assert run(*place, "mask", "--help", "--lang=en") == run("mask", "--help")


def test_list_of_commands_names_the_language(run: Any) -> None:
    assert "  --lang en|ko  Language of all commands.  [default: en]\n" in run()
    assert "  --lang en|ko  모든 명령의 언어.  [기본값: ko]\n" in run("--lang", "ko")


def test_language_that_is_not_spoken_is_told_before_the_command(fail: Any) -> None:
    for rest in ([], ["mask", "causal"]):
        assert re.search(r"--lang.*'fr'", fail("--lang", "fr", *rest))
