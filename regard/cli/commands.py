"""All commands in one typer app, with help in a language. It knows no command's options."""

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
from regard.cli.help_words import KoreanCommand, KoreanGroup
from regard.cli.language import Lang, speaker

__all__ = ["app_in"]


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
    ) -> None:
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
    if lang == "ko":
        for registered in app.registered_commands:
            registered.cls = KoreanCommand
    return app
