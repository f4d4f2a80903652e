"""`regard verify`: the parity certificate of a checkpoint, regard against transformers on this machine.

It reads options, shows what is being done on a terminal's stderr, and prints what `regard.verify` finds.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.language import Lang, Say, known, speaker
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal
from regard.cli.text_input import read_lines

__all__ = ["add"]

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'verify'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "verify",
        help=say(
            "Does regard compute what transformers computes with this model, here?\n\n"
            "Compares token ids, hidden states of every layer, attention weights, logits and greedy text; says of "
            "each difference whether it is rounding or a bug. Models of pictures (ViT, Swin, CLIP, BLIP, LLaVA, "
            "Idefics) are compared on drawn pictures. Needs pip install transformers.\n\n"
            "Exit code: 0 if the same but for rounding, 1 if not.",
            "모델의 계산 결과가 transformers와 같은지 확인합니다.\n\n"
            "토큰 id, 모든 레이어의 은닉 상태, 어텐션 가중치, 로짓, 그리디 생성을 비교하고 "
            "차이가 반올림인지 버그인지 알려 줍니다. "
            "이미지 모델(ViT, CLIP, LLaVA 등)은 임의의 이미지로 비교합니다. "
            "pip install transformers가 필요합니다.\n\n"
            "종료 코드: 반올림 차이뿐이면 0, 아니면 1.",
        ),
    )
    def verify(
        model: Annotated[
            str, typer.Argument(metavar="MODEL", help=say("A directory or hub id.", "폴더 또는 허브 id."))
        ],
        dtype: Annotated[
            str, typer.Option(metavar="DTYPE", help=say(f"{', '.join(DTYPES)}.", f"자료형: {', '.join(DTYPES)}."))
        ] = DTYPES[0],
        device: Annotated[
            str, typer.Option(metavar="DEVICE", help=say("cpu, cuda, cuda:1.", "장치: cpu, cuda, cuda:1."))
        ] = "cpu",
        texts: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", help=say("Texts to compare with, one a line.", "비교할 텍스트, 한 줄에 하나.")
            ),
        ] = None,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = known(lang)
        if dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        lines = None if texts is None else _lines(texts)
        import torch

        from regard.models.parity.verifying import verify

        with _progress(speaker(spoken)) as progress:
            found = verify(
                model,
                texts=lines,
                dtype=getattr(torch, dtype),
                device=device,
                ignore=ignore or (),
                progress=progress,
            )
        if json_:
            print(json.dumps(found.as_dict(), ensure_ascii=False, allow_nan=False))
        else:
            title, *rest = found.text(spoken).split("\n")
            out = Terminal()
            out.print((title, "bold"))
            out.print("\n".join(rest))
        if not found.passed:
            raise typer.Exit(1)


def _lines(file: Path) -> list[str]:
    """The lines of a file that are not blank, of which there must be one."""
    lines = read_lines(file)
    if not lines:
        raise ValueError(f"{str(file)!r} holds no text; it should hold one a line")
    return lines


@contextmanager
def _progress(say: Say) -> Iterator[Callable[[str], None]]:
    """Says on a terminal what is being done, and leaves nothing behind."""
    from rich.console import Console

    words = {
        "load ours": say("loading with regard", "regard로 불러오는 중"),
        "load theirs": say("loading with transformers", "transformers로 불러오는 중"),
        "run ours": say("computing with regard", "regard로 계산하는 중"),
        "run theirs": say("computing with transformers", "transformers로 계산하는 중"),
        "run theirs in fp64": say("computing with transformers in fp64", "transformers로 fp64 계산하는 중"),
        "run ours in fp64": say("a difference: computing with regard in fp64", "차이 발견: regard로 fp64 계산하는 중"),
    }
    with Console(stderr=True).status(words["load ours"]) as status:
        yield lambda stage: status.update(words[stage])
