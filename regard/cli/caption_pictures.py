"""`regard caption`: what is to be seen in pictures, in words.

It reads options and prints what `regard.models.verbs.captioning` writes.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.language import Lang, known, speaker
from regard.cli.model_files import bar, open_model
from regard.cli.picture_input import read_pictures, require_sight
from regard.cli.shared_options import options_in
from regard.cli.writing_options import refuse_idle_seed, writing_options_in

if TYPE_CHECKING:
    from regard.models.verbs.writing import Written

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'caption'
    """
    say, options, writing = speaker(lang), options_in(lang), writing_options_in(lang)

    @app.command(
        "caption",
        help=say(
            "What is to be seen in pictures, in words: BLIP, LLaVA, Idefics. A line for each.\n\n"
            "PICTURE '-' is standard input. Options left out are as the checkpoint says, else greedy, 50 tokens.",
            "이미지에 보이는 것을 텍스트로 씁니다: BLIP, LLaVA, Idefics. 이미지마다 한 줄.\n\n"
            "PICTURE가 '-'이면 표준 입력을 읽습니다.\n\n"
            "생략한 옵션은 체크포인트의 설정을, 없으면 그리디와 50토큰을 씁니다.",
        ),
    )
    def caption(
        model: Annotated[str, options.model],
        picture: Annotated[
            list[str] | None, typer.Argument(metavar="PICTURE", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        file: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("A path per line.", "한 줄에 경로 하나."))
        ] = None,
        prompt: Annotated[
            str | None, typer.Option(metavar="TEXT", help=say("How captions begin.", "설명의 첫머리."))
        ] = None,
        new_tokens: Annotated[int | None, writing.new_tokens] = None,
        temperature: Annotated[float | None, writing.temperature] = None,
        top_k: Annotated[int | None, writing.top_k] = None,
        top_p: Annotated[float | None, writing.top_p] = None,
        min_p: Annotated[float | None, writing.min_p] = None,
        repetition_penalty: Annotated[float | None, writing.repetition_penalty] = None,
        beams: Annotated[int | None, writing.beams] = None,
        seed: Annotated[int | None, writing.seed] = None,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        known(lang)
        pictures = read_pictures(picture or [], file)
        tasks = ["caption", "generate"]
        opened = open_model(model, "caption", tasks, dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "caption")
        from regard.models.verbs.wishes import Wishes

        wishes = Wishes(
            new_tokens=new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            beams=beams,
            seed=seed,
            ignore=ignore or (),
        )
        refuse_idle_seed(opened, wishes)
        with bar("caption") as tick:
            made = opened.caption(pictures, prompt, **wishes.said(), on_token=lambda steps: tick(steps, None))
        names = [path if isinstance(path, str) else "-" for path in pictures]
        print(_as_json(model, names, made) if json_ else "\n".join(_whole(one, prompt) for one in made))


def _whole(made: "Written", prompt: str | None) -> str:
    """A caption in one line, with how it was begun; what else the model was told is no part of it."""
    from regard.models.verbs.picture_prompts import PLACEHOLDER

    begun = "" if prompt is None or PLACEHOLDER in prompt else prompt
    return " ".join((begun + made.text).split())


def _as_json(model: str, names: list[str], made: "list[Written]") -> str:
    captions = [
        {
            "picture": name,
            "prompt": one.prompt,
            "text": one.text,
            "ids": one.ids.tolist(),
            "reason": one.reason,
            "score": one.score,
        }
        for name, one in zip(names, made, strict=True)
    ]
    return json.dumps({"model": model, "captions": captions}, ensure_ascii=False, allow_nan=False)
