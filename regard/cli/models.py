"""Models of the commands: loading one with the head that a task needs, and `regard verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.commands import LoadingOptions, VerifyOptions
from regard.cli.files import read_lines
from regard.cli.terminal import Terminal, bar, print_json

if TYPE_CHECKING:
    import torch

    from regard.models.family import Family
    from regard.models.model import Model

ABOUT_IMAGES = ("caption", "answer", "match", "features")


def open_model(name: str, command: str, tasks: Sequence[str], options: LoadingOptions) -> Model:
    """Load the model of a directory or a hub id, with the head of the first of these tasks that it can have.

    Args:
        name: directory or hub id.
        command: for the errors.
        tasks: in order of preference; the checkpoint's own task wins if it is among them.
        options: dtype, device and ignored keys.

    Raises:
        ValueError: for a family without such a task, or without images where the command is about images, and for a
            dtype or device that does not exist; else as `regard.load`.
    """
    from regard.models.checkpoint import find
    from regard.models.loading import load
    from regard.session.session import takes_images

    dtype = None if options.dtype is None else torch_dtype(options.dtype)
    check_device(options.device)
    directory = find(name)
    family, own = family_and_task(str(directory))
    # Before its weights are looked for: BERT has a task of answering too, in texts.
    if command in ABOUT_IMAGES and takes_images(str(directory)) is False:
        raise ValueError(f"{command} is about images, and {family.title} reads texts only")
    there = [task for task in tasks if task in family.tasks]
    if not there:
        raise ValueError(
            f"{command} needs a model with the task {' or '.join(tasks)}; {family.title} has {', '.join(family.tasks)}"
        )
    task = own if own in there else there[0]
    try:
        with bar("/".join(Path(name).parts[-2:])) as tick:
            return load(directory, task=task, dtype=dtype, device=options.device, ignore=options.ignore, progress=tick)
    except ValueError as error:
        if own in (None, family.bare_task, task):
            raise
        needed = f"{command} needs the task {task!r}"
        raise ValueError(f"this {family.title} was saved for the task {own!r}, and {needed}: {error}") from None


def family_and_task(name: str) -> tuple[Family, str | None]:
    """The family of a directory or a hub id, and the task its config.json names, None for an unknown one.

    >>> family_and_task("no/such/directory/here")
    Traceback (most recent call last):
        ...
    FileNotFoundError: there is no directory 'no/such/directory/here'; a model of the hub is called 'name' or \
'owner/name'

    No weights are read. Raises as `regard.load`.
    """
    from regard.models.checkpoint import find
    from regard.models.config import Config
    from regard.models.loading import family_of

    settings = Config.open(find(name))
    family, architectures = family_of(settings), settings.values.get("architectures")
    known = {task.architecture: name for name, task in family.tasks.items()}
    return family, known.get(architectures[0]) if isinstance(architectures, list) and architectures else None


def check_device(device: str) -> None:
    """Raise ValueError for a device that cannot be used here."""
    import torch

    try:
        torch.zeros((), device=device)
    # torch raises RuntimeError for an unknown name, AssertionError where it was built without CUDA.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that --dtype names, or ValueError."""
    import torch

    from regard.costs import BYTES

    if name not in BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(BYTES)}; got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def require_images(model: Model, command: str) -> None:
    """Raise ValueError for a model that reads texts only."""
    from regard.tasks.inputs import has_vision

    if not has_vision(model):
        raise ValueError(f"{command} is about images, and {model.family.title} reads texts only")


def require_texts(model: Model, text: str, example: str) -> None:
    """Raise ValueError for a model that needs an image.

    Args:
        model: to read the text.
        text: what it was to read.
        example: a command with an image.
    """
    from regard.models.image_text import Answerer, Captioner, Matcher
    from regard.models.vision import VisionModel

    if isinstance(model, (VisionModel, Captioner, Answerer, Matcher)):
        raise ValueError(
            f"{model.family.title} needs an image, and {text[:40]!r} is a text: name an image file, as in {example}"
        )


# -------------------------------------------------------------------------------------------------------------- verify


def verify(options: VerifyOptions) -> int:
    """Compare a model's results with transformers'; 1 if they differ by more than rounding."""
    dtype = torch_dtype(options.dtype)
    lines = None if options.texts is None else read_lines(options.texts)
    if lines == []:
        raise ValueError(f"{str(options.texts)!r} holds no text; expected one per line")
    from regard.parity.verification import verify

    with _progress(options) as progress:
        found = verify(
            options.model,
            texts=lines,
            dtype=dtype,
            device=options.device,
            ignore=options.ignore,
            progress=progress,
        )
    if options.json:
        print_json(found.as_dict())
    else:
        Terminal(options.lang).titled(found.text(options.lang))
    return 0 if found.passed else 1


@contextmanager
def _progress(options: VerifyOptions) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is being done, and leaves nothing behind."""
    from rich.console import Console

    say = options.say
    stages = {
        "load ours": say("loading with regard"),
        "load theirs": say("loading with transformers"),
        "run ours": say("computing with regard"),
        "run theirs": say("computing with transformers"),
        "run theirs in fp64": say("computing with transformers in fp64"),
        "run ours in fp64": say("a difference: computing with regard in fp64"),
    }
    with Console(stderr=True).status(stages["load ours"]) as status:
        yield lambda stage: status.update(stages[stage])
