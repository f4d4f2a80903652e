"""Loading a model for a command, and `regard verify`."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.files import read_lines
from regard.cli.options import Lang, Say, known, options_in, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from regard.generation.text import GenerationOutput
    from regard.models.family import Family
    from regard.models.model import Model
    from regard.session.session import Session

MOST_SHOWN = 8  # words that are named


def unknown_words(session: "Session", lang: Lang) -> str | None:
    """How many tokens of a session's text are unknown to its model, and which; None for none, or without a model.

    >>> unknown_words(look_at("나는 고양이를 보았다."), "en")                      # doctest: +SKIP
    '2 of 10 tokens are unknown to this model ([UNK]): 고양이를, 보았다'
    """
    if session.model is None or session.text is None:
        return None
    tokenizer = session.model.tokenizer
    if (unk := tokenizer.ids_of.unk) is None:
        return None
    (sign,), read = tokenizer.tokens([unk]), tokenizer.encode(session.text)
    spans = [span for number, span in zip(read.ids, read.offsets, strict=True) if number == unk and span is not None]
    words = [
        word for start, end in spans if (word := session.text[start:end]) != sign
    ]  # a sign that was typed is known
    if not words:
        return None
    some = ", ".join(words[:MOST_SHOWN]) + (" …" if len(words) > MOST_SHOWN else "")
    count, whole = f"{len(words):,}", f"{len(read.ids):,}"
    return speaker(lang)(
        f"{count} of {whole} tokens {'are' if words[1:] else 'is'} unknown to this model ({sign}): {some}",
        f"토큰 {whole}개 중 {count}개는 이 모델이 모르는 말입니다({sign}): {some}",
    )


OF_PICTURES = ("caption", "answer", "match", "features")
Tick = Callable[[int, int | None], None]
"""Told how much is done, and of how much, where that is known."""


def open_model(
    name: str, verb: str, tasks: Sequence[str], *, dtype: str | None, device: str, ignore: Sequence[str] = ()
) -> "Model":
    """The model of a directory or a hub id, with the head of the first of these tasks that it can have.

    verb: the command, for the error where it can have none.  dtype: None is as stored.
    ignore: keys of config.json to go on without.

    Raises ValueError for a family without such a task, or of texts alone where the verb is about pictures, and for a
    dtype or a device that is none; else as `regard.load`, with the task that the checkpoint was saved for, where that
    is another one.
    """
    from regard.models.hub import find
    from regard.models.loading import load
    from regard.session.image_session import takes_images

    kind = _dtype(dtype, device)
    directory = find(name)
    family, own = family_and_task(str(directory))
    if verb in OF_PICTURES and takes_images(str(directory)) is False:
        raise ValueError(f"{verb} is about pictures, and {family.title} reads texts alone")
    task = _task(family, own, verb, tasks)
    try:
        with bar("/".join(Path(name).parts[-2:])) as tick:
            return load(directory, task=task, dtype=kind, device=device, ignore=ignore, progress=tick)
    except ValueError as error:
        if own in (None, family.bare_task, task):
            raise
        asked = f"{verb} asks for the task {task!r}"
        raise ValueError(f"this {family.title} was saved for the task {own!r}, and {asked}: {error}") from None


def family_and_task(name: str) -> "tuple[Family, str | None]":
    """The family of a directory or a hub id, and the task its config.json names, None for none that is known.

    >>> family_and_task("no/such/directory/here")
    Traceback (most recent call last):
        ...
    FileNotFoundError: there is no directory 'no/such/directory/here'; a model of the hub is called 'name' or \
'owner/name'

    No weights are read. Raises as `regard.load` where there is no model, or of a family that is not known.
    """
    from regard.models.config import Config
    from regard.models.hub import find
    from regard.models.loading import family_of

    settings = Config.open(find(name))
    family, architectures = family_of(settings), settings.values.get("architectures")
    known = {task.architecture: name for name, task in family.tasks.items()}
    return family, known.get(architectures[0]) if isinstance(architectures, list) and architectures else None


@contextmanager
def bar(title: str) -> Iterator[Tick]:
    """A progress bar on stderr while something takes its time; nothing at all where that is no terminal.

    >>> with bar("loading") as tick:
    ...     tick(1, 2)
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(title), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _task(family: "Family", own: str | None, verb: str, tasks: Sequence[str]) -> str:
    there = [task for task in tasks if task in family.tasks]
    if not there:
        raise ValueError(f"{verb} needs a model with the task {' or '.join(tasks)}; {family.title} has {_list(family)}")
    return own if own in there else there[0]


def _list(family: "Family") -> str:
    return ", ".join(family.tasks)


def _dtype(dtype: str | None, device: str) -> "torch.dtype | None":
    """Check both before anything is read."""
    import torch

    from regard.costs import BYTES

    if dtype is not None and dtype not in BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(BYTES)}; got {dtype!r}")
    try:
        torch.zeros((), device=device)
    # By RuntimeError torch says that a name is unknown, by AssertionError that it was built without CUDA.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return None if dtype is None else getattr(torch, dtype)


Begin = Callable[[Callable[[int], None]], "Iterator[list[GenerationOutput]]"]
"""Begins to write; told whom to tell the steps."""


def gather(title: str, begin: Begin, line: "Callable[[GenerationOutput], str] | None") -> "list[GenerationOutput]":
    """All that is written, each printed as a line when it is there, while a bar shows how far.

    >>> from regard.generation.text import GenerationOutput
    >>> import torch
    >>> made = [GenerationOutput("", text, torch.tensor([5]), "eos") for text in ("a cat", "a mat")]
    >>> len(gather("caption", lambda tell: iter([made[:1], made[1:]]), str))
    a cat
    a mat
    2

    line: how one is printed, None for not at all.
    """
    made: list[GenerationOutput] = []
    ticks: list[Tick] = []
    parts = begin(lambda steps: ticks[-1](steps, None))
    while True:
        with bar(title) as tick:  # which is gone while a line is printed: rich would take that for its own
            ticks[:] = [tick]
            part = next(parts, None)
        if part is None:
            return made
        if line is not None:
            for one in part:
                print(line(one), flush=True)
        made += part


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


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

        from regard.parity.verification import verify

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
