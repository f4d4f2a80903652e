"""The table of commands: options that several commands have are the same, and each option reaches its field."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from regard.cli import main
from regard.cli.commands import COMMANDS, LoadingOptions, LookOptions
from regard.locale import translate

LOADING = ["generate", "fill", "embed", "classify", "caption", "answer", "match", "features"]


def help_of(command: str, lang: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """By option, what `regard COMMAND --help` says after its metavar, but for "required" and the default."""
    assert main([command, "--help", "--lang", lang]) == 0
    lines = re.findall(r"^  (--\S+)(?: / --no-\S+| \S+)?  +(.*?)(?:  \[.*\])?$", capsys.readouterr().out, re.MULTILINE)
    return {option.removeprefix("--"): words for option, words in lines}


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("command", LOADING)
def test_command_that_loads_a_model_has_every_shared_option_in_the_shared_words(command, lang, capsys):
    shown = help_of(command, lang, capsys)
    options = {field.name: translate(field.metadata["help"], lang) for field in fields(LoadingOptions)}
    assert {name: shown.get(name) for name in options} == options


@pytest.mark.parametrize("command", COMMANDS, ids=[command.name for command in COMMANDS])
def test_help_lists_every_option_of_the_table(command, capsys):
    options = {field.name.replace("_", "-") for field in fields(command.options) if "argument" not in field.metadata}
    assert set(help_of(command.name, "en", capsys)) == options


def test_option_of_one_name_has_one_meaning_and_one_metavar():
    metavars: dict[str, set[Any]] = {}
    for command in COMMANDS:
        for field in fields(command.options):
            if field.name in ("figure", "json", "lang", "ignore", "dtype", "device", "truncate", "html", "save"):
                metavars.setdefault(field.name, set()).add(field.metadata["metavar"])
    assert {name: len(found) for name, found in metavars.items()} == dict.fromkeys(metavars, 1)


def test_command_gets_one_object_with_what_was_typed(monkeypatch):
    received = []
    monkeypatch.setattr("regard.cli.look.look", received.append)
    typed = "look text --ignore a --ignore b --top 3 --at 1,2 --all --html page.html --lang ko"
    assert main(typed.split()) == 0
    wanted = LookOptions(what="text", ignore=("a", "b"), top=3, at="1,2", all=True, html=Path("page.html"), lang="ko")
    assert received == [wanted]
