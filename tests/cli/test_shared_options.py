"""Options that several commands have: the same words in each."""

import re
from typing import Annotated

import pytest
import typer
from regard.cli.options import options_in
from typer.testing import CliRunner

from regard.cli import main

ASKED = ["generate", "fill", "embed", "classify"]  # commands that open a model and ask it something


def help_of(command: str, lang: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """By option, what `regard COMMAND --help` says after its metavar, but for "required" and the default."""
    assert main([command, "--help", "--lang", lang]) == 0
    lines = re.findall(r"^  (--\S+)(?: \S+)?  +(.*?)(?:  \[.*\])?$", capsys.readouterr().out, re.MULTILINE)
    return {option.removeprefix("--"): words for option, words in lines}


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("command", ASKED)
def test_command_that_asks_a_model_has_every_shared_option_in_the_shared_words(command, lang, capsys):
    shown = help_of(command, lang, capsys)
    options = {name: option.help for name, option in vars(options_in(lang)).items()}
    assert {name: shown.get(name) for name in options} == options


def test_words_differ_by_language_but_for_the_names_of_dtypes():
    english, korean = vars(options_in("en")), vars(options_in("ko"))
    assert [name for name in english if english[name].help == korean[name].help] == ["dtype"]


def test_two_commands_take_the_same_options_with_defaults_of_their_own():
    options, app = options_in("en"), typer.Typer()

    @app.command()
    def first(device: Annotated[str, options.device] = "cpu", json_: Annotated[bool, options.json] = False) -> None:
        print("first", device, json_)

    @app.command()
    def second(
        device: Annotated[str | None, options.device] = None, model: Annotated[str, options.model] = "m"
    ) -> None:
        print("second", device, model)

    run = CliRunner().invoke
    assert run(app, ["first", "--json"]).output == "first cpu True\n"
    assert run(app, ["second", "--device", "cuda"]).output == "second cuda m\n"
    assert run(app, ["second"]).output == "second None m\n"
