"""`regard classify`: the labels of texts or of pictures, and how likely each is.

What is typed is a text to a model of texts, and a path to a model of pictures. It reads options and prints what
`regard.models.verbs.labelling` and `matching` find.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard import tables
from regard.cli.file_names import refuse_missing, refuse_pictures
from regard.cli.json_numbers import finite
from regard.cli.language import Lang, Say, known, speaker
from regard.cli.model_files import family_and_task, open_model
from regard.cli.picture_input import read_pictures
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal
from regard.cli.text_input import read_texts

if TYPE_CHECKING:
    from regard.models.verbs.labelling import Classified

__all__ = ["add"]

NEEDED = "--labels needs CLIP, or BLIP without a head, and this is {}{}"


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
            "The labels of texts or pictures with their probabilities.\n\n"
            "TEXT is a path where the model looks at pictures; '-' is standard input. The labels are the checkpoint's "
            "own; to CLIP, and to BLIP without a head, they are given.",
            "텍스트나 이미지의 레이블과 확률을 보여 줍니다.\n\n"
            "이미지 모델에서 TEXT는 경로입니다. '-'이면 표준 입력을 읽습니다. "
            "레이블은 체크포인트의 것이고, CLIP과 헤드 없는 BLIP에는 직접 줍니다.",
        ),
    )
    def classify(
        model: Annotated[str, options.model],
        text: Annotated[
            list[str] | None, typer.Argument(metavar="TEXT", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        file: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help=say("A text or path per line.", "한 줄에 텍스트나 경로 하나.")),
        ] = None,
        labels: Annotated[
            str | None,
            typer.Option(metavar="A,B,…", help=say("To choose among (CLIP, BLIP).", "고를 레이블 (CLIP, BLIP).")),
        ] = None,
        prompt: Annotated[
            str | None,
            typer.Option(metavar="TEXT", help=say("A label put, {} for it.", "레이블을 넣을 문장, {} 자리에.")),
        ] = None,
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
        given = text or []
        if not given and file is None:
            read_texts(given, file)  # which says what is missing before the model is opened
        refuse_missing(given)
        named = _labels(labels)
        if named is not None:
            _require_headless(model)
        # A model that compares has no labels: it is opened as it is, and says so itself.
        tasks = ["classify", "classify-cls", "none"] if named is None else ["none"]
        opened = open_model(model, "classify", tasks, dtype=dtype, device=device, ignore=ignore or ())
        from regard.models.dual_model import DualModel
        from regard.models.verbs.picturing import looks

        if named is not None and not isinstance(opened, DualModel):
            raise ValueError(NEEDED.format(opened.family.title, ", which does not compare pictures with texts"))
        if not looks(opened):
            refuse_pictures(given, opened.family.title)
        things = read_pictures(given, file) if looks(opened) else read_texts(given, file)
        found = opened.classify(things, labels=named, prompt=prompt, truncate=truncate)
        if json_:
            print(_as_json(model, [one if isinstance(one, str) else "-" for one in things], found))
        else:
            _print(found, spoken)


def _require_headless(model: str) -> None:
    """Raise ValueError for a checkpoint with a head, before it is read as if it had none."""
    family, task = family_and_task(model)
    if task not in (None, "none"):
        raise ValueError(NEEDED.format(family.title, f" with a head for the task {task!r}"))


def _labels(labels: str | None) -> list[str] | None:
    """Labels between commas, without the spaces around them; what is empty is none."""
    if labels is None:
        return None
    said = [label.strip() for label in labels.split(",")]
    if not all(said):
        raise ValueError(f"--labels must be texts with a comma between them, got {labels!r}")
    return said


def _print(found: "Classified", say: Say) -> None:
    """Every label of one thing; the likeliest of several. Of a thousand labels of a picture, the likeliest ten."""
    from regard.models.verbs.labelling import MOST_SHOWN, ranking

    of = say(found.of, {"text": "텍스트", "picture": "이미지"}[found.of])
    measure = say(found.measure, {"probability": "확률", "value": "값"}[found.measure])
    headers, rows = ranking(found.probabilities, found.texts, found.labels, (of, say("label", "레이블"), measure))
    more = len(rows) - MOST_SHOWN
    if found.of == "picture" and len(found) == 1 and more > 0:
        rows = [*rows[:MOST_SHOWN], [say(f"… {more} more; --json has all", f"… {more}개 더, 전체는 --json"), ""]]
    Terminal().print(tables.text(headers, rows))


def _as_json(model: str, things: list[str], found: "Classified") -> str:
    each = [
        {found.of: thing, "label": best, found.measure: dict(zip(found.labels, values, strict=True))}
        for thing, best, values in zip(things, found.best, found.probabilities.tolist(), strict=True)
    ]
    said = {"model": model, "labels": list(found.labels), f"{found.of}s": each}
    return json.dumps(finite(said), ensure_ascii=False)
