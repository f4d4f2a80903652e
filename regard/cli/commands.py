"""All commands in one typer app, with help in a language, and a line for each. It knows no command's options."""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
from typing import Annotated

import typer

from regard import __version__
from regard.cli import (
    answer_about,
    caption_pictures,
    classify_texts,
    compare_captures,
    count_cost,
    diagnose_capture,
    draw_mask,
    embed_texts,
    fill_masks,
    generate_text,
    list_backends,
    look_inside,
    match_texts,
    serve_page,
    show_features,
    show_steps,
    verify_model,
)
from regard.cli.help_words import Command, KoreanCommand, KoreanGroup
from regard.cli.language import Lang, known, speaker

__all__ = ["app_in"]

# A line for each in the list of commands; of a command's own help typer would show the beginning.
LINES = {
    "steps": ("Attention step by step, with every number.", "어텐션을 단계별로, 모든 숫자와 함께."),
    "look": ("What attention looks at, in a text or picture.", "텍스트나 이미지에서 어텐션이 보는 것."),
    "serve": ("The explorer in a browser.", "브라우저로 모든 헤드 살펴보기."),
    "doctor": ("What was wrong with a run's masks and numbers.", "실행에서 마스크와 숫자의 문제 찾기."),
    "diff": ("Compare two captures.", "두 캡처 비교."),
    "generate": ("Write what comes after a prompt.", "프롬프트에 이어지는 텍스트 쓰기."),
    "fill": ("Words that could stand at mask tokens.", "마스크 자리에 올 수 있는 단어."),
    "embed": ("A vector for each text.", "텍스트마다 벡터 하나."),
    "classify": ("The labels of texts or pictures.", "텍스트나 이미지의 레이블."),
    "caption": ("What is to be seen in pictures, in words.", "이미지에 보이는 것을 텍스트로."),
    "answer": ("Answers to questions about a picture.", "이미지에 대한 질문에 답하기."),
    "match": ("How well texts go with a picture.", "텍스트가 이미지와 얼마나 맞는지."),
    "features": ("The vectors of a picture's patches as a map.", "이미지 패치들의 벡터를 맵으로."),
    "verify": ("Does it compute what transformers does, here?", "계산 결과가 transformers와 같은지 확인."),
    "mask": ("Draw who may look at whom.", "누가 누구를 볼 수 있는지 그리기."),
    "cost": ("Count the operations and bytes of attention.", "어텐션의 연산량과 메모리 세기."),
    "backends": ("Which backends can do a call, and why not.", "호출을 처리할 수 있는 백엔드와 그 이유."),
}


def app_in(lang: Lang) -> typer.Typer:
    """The app; its help is in the language.

    >>> [command.name for command in app_in("en").registered_commands]
    ['steps', 'look', 'serve', 'doctor', 'diff', 'generate', 'fill', 'embed', 'classify', 'caption', 'answer', \
'match', 'features', 'verify', 'mask', 'cost', 'backends']
    """
    say = speaker(lang)
    app = typer.Typer(
        cls=KoreanGroup if lang == "ko" else None,
        add_completion=False,
        rich_markup_mode=None,  # plain help: rich's boxes take 0.1 s and say no more
        context_settings={"help_option_names": ["-h", "--help"]},
        help=say("Transformer attention in which nothing is hidden.", "모든 단계를 볼 수 있는 Transformer 어텐션."),
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help=say("Print the version.", "버전을 출력합니다."))
        ] = False,
        lang: Annotated[
            str, typer.Option(metavar="en|ko", help=say("Language of all commands.", "모든 명령의 언어."))
        ] = lang,
    ) -> None:
        known(lang)  # `main` has read it, wherever it stands: the commands have it as their default
        if version:
            print(f"regard {__version__}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            print(context.get_help())

    inside = (show_steps, look_inside, serve_page, diagnose_capture, compare_captures)
    asked = (generate_text, fill_masks, embed_texts, classify_texts)
    shown = (caption_pictures, answer_about, match_texts, show_features)
    for command in (*inside, *asked, *shown, verify_model, draw_mask, count_cost, list_backends):
        command.add(app, lang)
    for registered in app.registered_commands:
        registered.cls = KoreanCommand if lang == "ko" else Command
        registered.short_help = say(*LINES[str(registered.name)])
    return app
