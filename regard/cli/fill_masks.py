"""`regard fill`: what could stand at the mask tokens of a text.

It reads options and prints what `regard.models.verbs.filling` finds.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from typing import TYPE_CHECKING, Annotated

import typer

from regard import tables
from regard.cli.language import Lang, Say, known, speaker
from regard.cli.model_files import open_model
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal
from regard.cli.text_input import read_texts

if TYPE_CHECKING:
    from regard.models.verbs.filling import Filled

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'fill'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "fill",
        help=say(
            "Words that could stand at the mask tokens of a text, and how likely.\n\n"
            "TEXT holds the model's own mask token, such as [MASK] or <mask>; '-' is standard input.",
            "텍스트의 마스크 자리에 올 수 있는 단어와 확률을 보여 줍니다.\n\n"
            "TEXT에는 [MASK], <mask> 같은 모델의 마스크 토큰을 씁니다. '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def fill(
        text: Annotated[
            str, typer.Argument(metavar="TEXT", help=say("With a mask token.", "마스크 토큰이 든 텍스트."))
        ],
        model: Annotated[str, options.model],
        top: Annotated[int, typer.Option(metavar="K", help=say("How many words.", "후보의 개수."))] = 5,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        (given,) = read_texts([text], None)
        tasks = ["fill", "pretrain"]
        found = open_model(model, "fill", tasks, dtype=dtype, device=device, ignore=ignore or ()).fill(given, top)
        if json_:
            print(_as_json(model, found))
        else:
            _print(found, spoken)


def _print(found: "Filled", say: Say) -> None:
    out = Terminal()
    headers = [say("mask", "마스크"), say("word", "단어"), say("probability", "확률")]
    rows = [
        ["" if rank else str(n), guess.token, f"{guess.probability:.4f}"]
        for n, guesses in enumerate(found.blanks)
        for rank, guess in enumerate(guesses)
    ]
    out.print(tables.text(headers, rows))
    out.print()
    out.print((say("likeliest: ", "가장 그럴듯한 텍스트: "), "dim"), found.best)


def _as_json(model: str, found: "Filled") -> str:
    masks = [
        [{"token": guess.token, "id": guess.id, "probability": guess.probability} for guess in guesses]
        for guesses in found.blanks
    ]
    return json.dumps(
        {"model": model, "text": found.text, "best": found.best, "masks": masks}, ensure_ascii=False, allow_nan=False
    )
