"""`regard answer`: what a model answers to questions about a picture.

It reads options and prints what `regard.models.verbs.captioning` writes.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.language import Lang, known, speaker
from regard.cli.model_files import open_model
from regard.cli.picture_input import check_pictures, read_pictures, require_sight
from regard.cli.shared_options import options_in
from regard.cli.writing_options import refuse_idle_seed, writing_options_in
from regard.cli.written_lines import gather

if TYPE_CHECKING:
    from regard.models.verbs.writing import Written

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'answer'
    """
    say, options, writing = speaker(lang), options_in(lang), writing_options_in(lang)

    @app.command(
        "answer",
        help=say(
            "Answers to questions about a picture: BLIP, LLaVA, Idefics. A line for each.\n\n"
            "LLaVA and Idefics: a QUESTION that holds <image> is the whole prompt. PICTURE '-' is standard input. "
            "Options left out are as the checkpoint says, else greedy, 50 tokens.",
            "이미지에 대한 질문에 답합니다: BLIP, LLaVA, Idefics. 질문마다 한 줄.\n\n"
            "LLaVA와 Idefics에서 <image>가 든 QUESTION은 프롬프트 전체입니다. "
            "PICTURE가 '-'이면 표준 입력을 읽습니다. "
            "생략한 옵션은 체크포인트의 설정을, 없으면 그리디와 50토큰을 씁니다.",
        ),
    )
    def answer(
        picture: Annotated[str, typer.Argument(metavar="PICTURE", help=say("A path.", "경로."))],
        question: Annotated[
            list[str], typer.Argument(metavar="QUESTION", help=say("One, or several.", "하나 또는 여럿."))
        ],
        model: Annotated[str, options.model],
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
        (given,) = read_pictures([picture])
        check_pictures([given])
        tasks = ["answer", "generate"]
        opened = open_model(model, "answer", tasks, dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "answer")
        from regard.models.verbs.captioning import answer_parts
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
        made = gather(
            "answer",
            lambda tell: answer_parts(opened, given, question, wishes, on_token=tell),
            None if json_ else lambda one: " ".join(one.text.split()),
        )
        if json_:
            print(_as_json(model, picture, question, made))


def _as_json(model: str, picture: str, questions: list[str], made: "list[Written]") -> str:
    answers = [
        {
            "question": question,
            "prompt": one.prompt,
            "text": one.text,
            "ids": one.ids.tolist(),
            "reason": one.reason,
            "score": one.score,
        }
        for question, one in zip(questions, made, strict=True)
    ]
    return json.dumps({"model": model, "picture": picture, "answers": answers}, ensure_ascii=False, allow_nan=False)
