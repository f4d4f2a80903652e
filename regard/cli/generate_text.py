"""`regard generate`: the text that a model writes after a prompt, shown as it comes.

It reads options and prints what `regard.models.verbs.writing` makes.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.language import Lang, known, speaker
from regard.cli.model_files import bar, open_model
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal
from regard.cli.text_input import read_texts

if TYPE_CHECKING:
    from regard.models.model import Model
    from regard.models.verbs.writing import Wishes, Written

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'generate'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "generate",
        help=say(
            "Write what comes after a prompt; an encoder-decoder writes what it makes of it.\n\n"
            "PROMPT '-' is standard input. Options left out are as the checkpoint says, else greedy, 50 tokens.",
            "프롬프트에 이어지는 글을 씁니다. 인코더-디코더는 입력을 변환합니다.\n\n"
            "PROMPT가 '-'이면 표준 입력을 읽습니다.\n\n"
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
        new_tokens: Annotated[
            int | None, typer.Option(metavar="N", help=say("At most so many.", "새 토큰의 최대 개수."))
        ] = None,
        temperature: Annotated[
            float | None,
            typer.Option(metavar="T", help=say("0 takes the likeliest token.", "0이면 가장 그럴듯한 토큰.")),
        ] = None,
        top_k: Annotated[
            int | None, typer.Option(metavar="K", help=say("Draw among the K likeliest.", "상위 K개에서 뽑기."))
        ] = None,
        top_p: Annotated[
            float | None,
            typer.Option(metavar="P", help=say("Draw among those that reach P.", "누적 확률 P까지에서 뽑기.")),
        ] = None,
        beams: Annotated[
            int | None, typer.Option(metavar="K", help=say("Beam search; 1 is none.", "빔 탐색. 1이면 안 함."))
        ] = None,
        seed: Annotated[
            int | None, typer.Option(metavar="N", help=say("The same draws again.", "같은 난수로 다시 뽑기."))
        ] = None,
        stop: Annotated[
            list[str] | None, typer.Option(metavar="TEXT", help=say("Ends the text.", "글을 끝내는 문자열."))
        ] = None,
        ignore: Annotated[
            list[str] | None,
            typer.Option(metavar="KEY", help=say("Of config files, left out.", "무시할 설정 키.")),
        ] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        known(lang)
        prompts = read_texts(prompt or [], file)
        opened = open_model(model, "generate", ["generate"], dtype=dtype, device=device, ignore=ignore or ())
        from regard.models.verbs.writing import Wishes, beams_of

        wishes = Wishes(
            new_tokens=new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            beams=beams,
            seed=seed,
            stop=stop or (),
            ignore=ignore or (),
        )
        if json_:
            print(_as_json(model, _written(opened, prompts, wishes)))
        elif len(prompts) == 1 and beams_of(opened, wishes) == 1:
            _stream(opened, prompts[0], wishes)
        else:
            for written in _written(opened, prompts, wishes):
                print(written.text)


def _written(model: "Model", prompts: list[str], wishes: "Wishes") -> "list[Written]":
    from regard.models.verbs.writing import write

    with bar("generate") as tick:
        made = write(model, prompts, wishes, lambda steps: tick(steps, wishes.new_tokens))
    assert isinstance(made, list)
    return made


def _stream(model: "Model", prompt: str, wishes: "Wishes") -> None:
    """Print pieces as they come, after the prompt where a person reads along; a line begun is ended, come what may."""
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.verbs.writing import stream

    pieces, out = stream(model, prompt, wishes), Terminal()
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
