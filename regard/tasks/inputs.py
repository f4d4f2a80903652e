"""What the tasks share: checks of task and arguments, texts in batches, models in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn

from regard.data.tokenizer import BatchEncoding, checked_texts

if TYPE_CHECKING:
    from regard.models.flamingo import FlamingoModel
    from regard.models.model import Model, Result
    from regard.models.vision_language import PictureWriter

Texts = Sequence[str] | Sequence[tuple[str, str]]
"""Several texts, or several pairs of them."""


def require(model: Model, verb: str, *tasks: str) -> None:
    """Refuse a model without one of these tasks' heads, with a ValueError that names what it has and what it needs."""
    if model.task in tasks:
        return
    title, there = model.family.title, [task for task in tasks if task in model.family.tasks]
    if there:
        needed = f"regard.load(…, task={there[0]!r}) reads a checkpoint that has that head"
    else:
        needed = f"{title} has no such task, it has {', '.join(model.family.tasks)}"
    raise ValueError(
        f"{verb} needs the task {' or '.join(map(repr, tasks))}, and this {title} has {model.task!r}: {needed}"
    )


def call_arguments(
    model: Model,
    verb: str,
    names: Sequence[str],
    given: Sequence[Any],
    named: Mapping[str, Any],
    options: Sequence[str] = (),
) -> list[Any]:
    """The arguments that this kind of model takes, in the order of their names, where others take other ones.

    names: those it must have.  given: what came by place.  named: all that can come by name, None where it did not.
    options: of those, what it may have beside.

    Raises TypeError for one that is missing, that comes twice, or that is for models of another kind.
    """
    by_name = {name: value for name, value in named.items() if value is not None}
    places = dict(zip(names, given, strict=False))
    strange = [*(by_name.keys() - {*names, *options}), *map(repr, given[len(names) :])]
    if strange:
        may = f" (and may take {', '.join(options)})" if options else ""
        raise TypeError(
            f"{verb} of {model.family.title} takes {' and '.join(names)}{may}, and not {', '.join(sorted(strange)):.80}"
        )
    twice = sorted(places.keys() & by_name.keys())
    missing = [name for name in names if name not in places and name not in by_name]
    if twice or missing:
        problem = f"{twice[0]} came twice" if twice else f"{missing[0]} is missing"
        raise TypeError(f"{verb} of {model.family.title} takes {' and '.join(names)}, and {problem}")
    return [places[name] if name in places else by_name[name] for name in names]


def reads_image_prompts(model: Model) -> TypeGuard[PictureWriter | FlamingoModel]:
    """True if the model reads images among the tokens of a prompt (LLaVA, Idefics)."""
    return model.kind in ("vision-language", "flamingo")


def max_text_positions(model: Model) -> int | None:
    """How many tokens a text may have: positions of the tower that reads it; None without a limit.

    Raises:
        ValueError: the model reads no texts.
    """
    reader = cast(Any, model)
    if model.kind in ("text", "dual-encoder", "vision-language", "flamingo"):
        return cast("int | None", reader.max_positions)
    if model.kind in ("encoder-decoder", "image-question", "image-text-matching"):
        return cast("int | None", reader.encoder.embed.max_positions)
    if model.kind == "image-caption":
        return cast("int | None", reader.decoder.embed.max_positions)
    raise ValueError(f"{model.family.title} reads no texts, only images")


def check_batch(size: object) -> None:
    """Refuse a size of batches that is none, with a ValueError."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"batch must be a whole number of at least 1, got {size!r}")


def batches(
    model: Model, texts: Texts, size: int, *, length: int | None, truncate: bool
) -> Iterator[tuple[list[int], BatchEncoding]]:
    """Texts as batches of `size` on the model's device, alike in length, longest first: their numbers, and the batch.

    length: the most tokens of a text; longer ones are cut if `truncate`.

    Raises ValueError for a text that is longer, and for one without a token; TypeError for what is no text.
    """
    check_batch(size)
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"texts must be a list of texts, got {type(texts).__name__}: {texts!r:.60}")
    if not texts:
        raise ValueError("there must be at least one text, got an empty list")
    checked_texts(texts)  # here, where they have their own numbers
    order = sorted(range(len(texts)), key=lambda n: -_characters(texts[n]))
    for at in range(0, len(order), size):
        numbers = order[at : at + size]
        yield numbers, _batch(model, [texts[n] for n in numbers], numbers, length, truncate)


def _batch(
    model: Model, texts: Sequence[Any], numbers: Sequence[int], length: int | None, truncate: bool
) -> BatchEncoding:
    batch = model.tokenizer.batch(texts)
    counts: list[int] = batch.mask.sum(1).tolist()
    for number, count in zip(numbers, counts, strict=True):
        if count == 0:
            raise ValueError(f"text {number} has no token: an empty text says nothing to this model")
        if length is not None and count > length and not truncate:
            raise ValueError(f"{_too_long(f'text {number}', count, length)}: shorten it, or pass truncate=True")
    if length is not None and max(counts) > length:
        batch = model.tokenizer.batch(texts, length=length, truncate=True)
    return BatchEncoding(*(t.to(model.device) for t in (batch.ids, batch.mask, batch.types)))


def single_batch(model: Model, text: str, second: str | None = None, *, remedy: str = "shorten it") -> BatchEncoding:
    """One text, or a pair, as a batch on the model's device. Raises ValueError if it is longer than the model."""
    found = model.tokenizer.encode(text, second)
    most = max_text_positions(model)
    if not found.ids:
        raise ValueError("the text has no token: an empty text says nothing to this model")
    if most is not None and len(found.ids) > most:
        raise ValueError(f"{_too_long('the text', len(found.ids), most)}: {remedy}")
    ids, types = (torch.tensor([row], device=model.device) for row in (found.ids, found.types))
    return BatchEncoding(ids, torch.ones_like(ids, dtype=torch.bool), types)


@torch.no_grad()
def run_model(model: Model, batch: BatchEncoding) -> Result:
    """Run the model on a batch, with token types if it has them."""
    if model.kind == "text" and cast(Any, model).tower.embed.types is not None:
        return cast("Result", model(batch.ids, batch.mask, types=batch.types))
    return cast("Result", model(batch.ids, batch.mask))


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the last axis in fp32 or wider, on the CPU.

    >>> probabilities(torch.tensor([0.0, 0.0], dtype=torch.bfloat16))
    tensor([0.5000, 0.5000])
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).softmax(-1).cpu()


def shortened(text: str, most: int = 48) -> str:
    r"""A text on one line of a table.

    >>> shortened("a\nb" * 20, most=9)
    'a ba ba …'
    """
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _characters(text: object) -> int:
    parts = text if isinstance(text, tuple) else (text,)
    return sum(len(part) for part in parts if isinstance(part, str))


def _too_long(what: str, count: int, length: int) -> str:
    return f"{what} has {count} tokens, and the model takes {length}"


T = TypeVar("T")
Verb = TypeVar("Verb", bound=Callable[..., Any])


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and afterwards each as it was: a new head is in training beside a body that is not."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_eval_mode(verb: Verb) -> Verb:
    """A verb that runs with its model in eval mode.

    >>> import torch
    >>> class Doubtful(nn.Dropout):
    ...     @in_eval_mode
    ...     def answer(self, size):
    ...         return self(torch.ones(size))
    >>> Doubtful(0.5).answer(2)
    tensor([1., 1.])
    """

    @wraps(verb)
    def asked(model: nn.Module, *given: Any, **named: Any) -> Any:
        with eval_mode(model):
            return verb(model, *given, **named)

    return cast(Verb, asked)


def iterate_in_eval_mode(model: nn.Module, made: Iterator[T]) -> Iterator[T]:
    """What an iterator makes with the model in eval mode, which is as it was while the reader has each.

    >>> import torch
    >>> layer = nn.Dropout(0.5)
    >>> [(number.tolist(), layer.training) for number in one_by_one(layer, map(layer, torch.ones(2, 1)))]
    [([1.0], True), ([1.0], True)]
    """
    while True:
        with eval_mode(model):
            try:
                made_now = next(made)
            except StopIteration:
                return
        yield made_now
