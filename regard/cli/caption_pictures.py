"""`regard caption`: what is to be seen in pictures, in words.

It reads options and prints what `regard.models.verbs.captioning` writes.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.language import Lang, known, speaker
from regard.cli.model_files import open_model
from regard.cli.picture_input import check_pictures, read_pictures, require_sight
from regard.cli.shared_options import options_in
from regard.cli.writing_options import refuse_idle_seed, writing_options_in
from regard.cli.written_lines import gather

if TYPE_CHECKING:
    from regard.models.model import Model
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
            "PICTURE가 '-'이면 표준 입력을 읽습니다. "
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
        stop: Annotated[list[str] | None, writing.stop] = None,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        known(lang)
        pictures = read_pictures(picture or [], file)
        check_pictures(pictures)
        tasks = ["caption", "generate"]
        opened = open_model(model, "caption", tasks, dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "caption")
        from regard.models.verbs.captioning import caption_parts
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
            stop=stop or (),
            ignore=ignore or (),
        )
        refuse_idle_seed(opened, wishes)
        begun = _begun(opened, prompt)
        made = gather(
            "caption",
            lambda tell: caption_parts(opened, pictures, prompt, wishes, on_token=tell),
            None if json_ else lambda one: " ".join((begun + one.text).split()),
        )
        if json_:
            print(_as_json(model, [path if isinstance(path, str) else "-" for path in pictures], made))


def _begun(model: "Model", prompt: str | None) -> str:
    """How the captions begin, as it is printed before them: a prompt that is the whole of what the model was told, and
    where the picture stands in it, is no part of a caption. To BLIP it is a text like any other.
    """
    from regard.models.flamingo_model import FlamingoModel
    from regard.models.picture_writer import PictureWriter
    from regard.models.verbs.picture_prompts import placeholder

    if isinstance(model, (PictureWriter, FlamingoModel)) and placeholder(model) in (prompt or ""):
        return ""
    return prompt or ""


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
