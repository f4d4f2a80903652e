"""`regard generate`: the text that a model writes after a prompt, shown as it comes.

It reads options and prints what `regard.models.verbs.writing` makes.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.language import Lang, known, speaker
from regard.cli.model_files import bar, open_model
from regard.cli.picture_input import check_pictures, read_pictures
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal
from regard.cli.text_input import read_texts
from regard.cli.writing_options import refuse_idle_seed, writing_options_in

if TYPE_CHECKING:
    from regard.models.model import Model
    from regard.models.verbs.wishes import Wishes
    from regard.models.verbs.writing import Written

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'generate'
    """
    say, options, writing = speaker(lang), options_in(lang), writing_options_in(lang)

    @app.command(
        "generate",
        help=say(
            "Write what comes after a prompt; an encoder-decoder writes what it makes of it.\n\n"
            "LLaVA and Idefics: a --picture for each <image> in PROMPT, which is one then. "
            "PROMPT '-' is standard input. Options left out are as the checkpoint says, else greedy, 50 tokens.",
            "프롬프트에 이어지는 텍스트를 씁니다. 인코더-디코더는 입력을 변환합니다.\n\n"
            "LLaVA와 Idefics: PROMPT 하나에 든 <image>마다 --picture 하나. "
            "PROMPT가 '-'이면 표준 입력을 읽습니다. "
            "생략한 옵션은 체크포인트의 설정을, 없으면 그리디와 50토큰을 씁니다.",
        ),
    )
    def generate(
        model: Annotated[str, options.model],
        prompt: Annotated[
            list[str] | None, typer.Argument(metavar="PROMPT", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        file: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("A prompt per line.", "한 줄에 프롬프트 하나."))
        ] = None,
        picture: Annotated[
            list[str] | None,
            typer.Option(
                metavar="PATH",
                help=say(
                    "For <image> in the prompt; may be given again.", "프롬프트의 <image>에 넣을 이미지(여러 번 가능)."
                ),
            ),
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
        pictures = _pictures(picture, prompt or [])
        prompts = read_texts(prompt or [], file)
        if pictures and len(prompts) > 1:
            raise ValueError(f"--picture is of one prompt, and there are {len(prompts)}: ask one at a time")
        opened = open_model(model, "generate", ["generate"], dtype=dtype, device=device, ignore=ignore or ())
        _check_sight(opened, pictures)
        from regard.models.verbs.wishes import Wishes
        from regard.models.verbs.writing import beams_of

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
        if json_:
            print(_as_json(model, _written(opened, prompts, wishes, pictures)))
        elif len(prompts) == 1 and beams_of(opened, wishes) == 1:
            _stream(opened, prompts[0], wishes, pictures)
        else:
            for written in _written(opened, prompts, wishes, pictures):
                print(written.text)


def _pictures(typed: list[str] | None, prompts: Sequence[str]) -> list[str | bytes]:
    """The pictures of --picture, each of them one by its header. Raises ValueError for what is none."""
    if not typed:
        return []
    if "-" in typed and "-" in prompts:
        raise ValueError("'-' is standard input, which can be read once")
    pictures = read_pictures(typed)
    check_pictures(pictures)
    return pictures


def _check_sight(model: "Model", pictures: Sequence[object]) -> None:
    from regard.models.verbs.picturing import looks

    if pictures and not looks(model):
        raise ValueError(
            f"--picture is for models that write about pictures (LLaVA, Idefics), and {model.family.title} reads texts "
            "alone: leave it out"
        )


def _written(model: "Model", prompts: list[str], wishes: "Wishes", pictures: list[str | bytes]) -> "list[Written]":
    from regard.models.verbs.writing import write

    with bar("generate") as tick:
        given = [pictures] if pictures else None  # of the one prompt that there is then
        made = write(model, prompts, wishes, lambda steps: tick(steps, wishes.new_tokens), given)
    assert isinstance(made, list)
    return made


def _stream(model: "Model", prompt: str, wishes: "Wishes", pictures: list[str | bytes]) -> None:
    """Print pieces as they come, after the prompt where a person reads along; a line begun is ended, come what may."""
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.verbs.writing import stream

    pieces, out = stream(model, prompt, wishes, pictures or None), Terminal()
    first = next(pieces, "")  # what is wrong is told before anything is printed
    try:
        if out.room is not None and not isinstance(model, EncoderDecoder):
            out.write((prompt, "dim"))
        for piece in chain([first], pieces):
            print(piece, end="", flush=True)
    finally:
        print()


def _as_json(model: str, made: "list[Written]") -> str:
    texts = [
        {"prompt": one.prompt, "text": one.text, "ids": one.ids.tolist(), "reason": one.reason, "score": one.score}
        for one in made
    ]
    return json.dumps({"model": model, "texts": texts}, ensure_ascii=False, allow_nan=False)
