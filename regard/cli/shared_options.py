"""Options that several commands have, in the words of a language: one line each where a command takes them.

A command still says which of them it takes, of which type, and their defaults. This file does not know any command.
"""

from dataclasses import dataclass

import typer
from typer.models import OptionInfo

from regard.cli.language import Lang, speaker

__all__ = ["SharedOptions", "options_in"]


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """What typer is told of each option, but for its type and its default.

    model: --model, a directory or a hub id.  ignore: --ignore, keys of its files to go on without.
    device: --device, where the model runs.  dtype: --dtype, of its weights.  json: --json, a switch.
    lang: --lang, of what is printed.
    """

    model: OptionInfo
    ignore: OptionInfo
    device: OptionInfo
    dtype: OptionInfo
    json: OptionInfo
    lang: OptionInfo


def options_in(lang: Lang) -> SharedOptions:
    """The options, with help in a language.

    >>> from typing import Annotated
    >>> options = options_in("en")
    >>> def command(model: Annotated[str, options.model], device: Annotated[str, options.device] = "cpu") -> None: ...
    >>> options.device.metavar, options.device.help
    ('DEVICE', 'cpu, cuda, cuda:1, …')
    """
    say = speaker(lang)
    return SharedOptions(
        model=typer.Option(metavar="DIR|ID", help=say("A directory, or a hub id.", "폴더 또는 허브 id.")),
        ignore=typer.Option(
            metavar="KEY", help=say("Of config files, left out; may be given again.", "무시할 설정 키(여러 번 가능).")
        ),
        device=typer.Option(metavar="DEVICE", help=say("cpu, cuda, cuda:1, …", "cpu, cuda, cuda:1 등.")),
        dtype=typer.Option(metavar="DTYPE", help="float32, float64, bfloat16, float16."),
        json=typer.Option("--json", help=say("As JSON.", "JSON으로 출력합니다.")),
        lang=typer.Option(metavar="en|ko", help=say("Language of the text.", "출력 언어.")),
    )
