"""`regard classify`: the labels of texts, and how likely each is.

It reads options and prints what `regard.models.verbs.labelling` finds.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard import tables
from regard.cli.json_numbers import finite
from regard.cli.language import Lang, Say, known, speaker
from regard.cli.model_files import open_model
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal
from regard.cli.text_input import read_texts

if TYPE_CHECKING:
    from regard.models.verbs.labelling import Classified

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'classify'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "classify",
        help=say(
            "The labels of texts with their probabilities, by the checkpoint's own names.\n\n"
            "TEXT '-' is standard input.",
            "글의 레이블과 확률을 체크포인트의 이름으로 보여 줍니다.\n\nTEXT가 '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def classify(
        model: Annotated[str, options.model],
        text: Annotated[
            list[str] | None, typer.Argument(metavar="TEXT", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        file: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("A text per line.", "한 줄에 글 하나."))
        ] = None,
        truncate: Annotated[
            bool, typer.Option("--truncate", help=say("Cut texts that are too long.", "긴 글을 자릅니다."))
        ] = False,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        texts = read_texts(text or [], file)
        opened = open_model(model, "classify", ["classify"], dtype=dtype, device=device)
        found = opened.classify(texts, truncate=truncate)
        if json_:
            print(_as_json(model, found))
        else:
            _print(found, spoken)


def _print(found: "Classified", say: Say) -> None:
    """Every label of one text; the likeliest of several."""
    from regard.models.verbs.asking import shortened

    measure = say(found.measure, {"probability": "확률", "value": "값"}[found.measure])
    label, values = say("label", "레이블"), found.probabilities.tolist()
    if len(found) == 1:
        ranked = sorted(zip(values[0], found.labels, strict=True), key=lambda pair: -pair[0])
        Terminal().print(tables.text([label, measure], [[name, f"{value:.4f}"] for value, name in ranked]))
        return
    rows = zip(
        (shortened(text) for text in found.texts), found.best, (f"{max(row):.4f}" for row in values), strict=True
    )
    Terminal().print(tables.text([say("text", "글"), label, measure], [list(row) for row in rows]))


def _as_json(model: str, found: "Classified") -> str:
    texts = [
        {"text": text, "label": best, found.measure: dict(zip(found.labels, values, strict=True))}
        for text, best, values in zip(found.texts, found.best, found.probabilities.tolist(), strict=True)
    ]
    return json.dumps(finite({"model": model, "labels": list(found.labels), "texts": texts}), ensure_ascii=False)
