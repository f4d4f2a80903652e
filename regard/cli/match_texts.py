"""`regard match`: how well texts go with a picture.

It reads options and prints what `regard.models.verbs.matching` finds.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from typing import TYPE_CHECKING, Annotated

import typer

from regard import tables
from regard.cli.json_numbers import finite
from regard.cli.language import Lang, Say, known, speaker
from regard.cli.model_files import open_model
from regard.cli.picture_input import read_pictures, require_sight
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.models.verbs.matching import Matched

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'match'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "match",
        help=say(
            "How well texts go with a picture, the best first.\n\n"
            "CLIP and BLIP compare vectors: a cosine, -1 to 1. BLIP trained for retrieval says how likely the two "
            "belong together. PICTURE '-' is standard input.",
            "텍스트가 이미지와 얼마나 잘 맞는지, 잘 맞는 것부터 보여 줍니다.\n\n"
            "CLIP과 BLIP은 벡터를 비교합니다: 코사인, -1에서 1까지. 검색용 BLIP은 둘이 짝일 확률을 냅니다. "
            "PICTURE가 '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def match(
        picture: Annotated[str, typer.Argument(metavar="PICTURE", help=say("A path.", "경로."))],
        text: Annotated[list[str], typer.Argument(metavar="TEXT", help=say("One, or several.", "하나 또는 여럿."))],
        model: Annotated[str, options.model],
        truncate: Annotated[
            bool, typer.Option("--truncate", help=say("Cut texts that are too long.", "긴 텍스트를 자릅니다."))
        ] = False,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        (given,) = read_pictures([picture])
        opened = open_model(model, "match", ["match", "none"], dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "match")
        found = opened.match(given, text, truncate=truncate)
        if json_:
            print(_as_json(model, picture, found))
        else:
            _print(found, spoken)


def _print(found: "Matched", say: Say) -> None:
    from regard.models.verbs.asking import shortened

    measure = say(found.measure, {"cosine": "코사인", "probability": "확률"}[found.measure])
    ranked = sorted(zip(found.values[0].tolist(), found.texts, strict=True), key=lambda pair: -pair[0])
    rows = [[shortened(text), f"{value:.4f}"] for value, text in ranked]
    Terminal().print(tables.text([say("text", "텍스트"), measure], rows))


def _as_json(model: str, picture: str, found: "Matched") -> str:
    texts = [
        {"text": text, found.measure: value} for text, value in zip(found.texts, found.values[0].tolist(), strict=True)
    ]
    said = {"model": model, "picture": picture, "measure": found.measure, "best": found.best[0], "texts": texts}
    return json.dumps(finite(said), ensure_ascii=False)
