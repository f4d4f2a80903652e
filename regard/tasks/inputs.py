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
    from regard.models.model import Model
    from regard.models.outputs import ModelOutput
    from regard.models.vision_language import VisionLanguageModel

Texts = Sequence[str] | Sequence[tuple[str, str]]
"""Several texts, or several pairs of them."""


def require(model: Model, verb: str, *tasks: str) -> None:
    """Raise ValueError for a model without one of these tasks, naming what it has and what it needs."""
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
    """Match the arguments of a method that takes others for other kinds of model.

    Args:
        model: whose method was called.
        verb: the method.
        names: required arguments of this kind of model.
        given: positional arguments.
        named: all arguments that can come by name, None if they did not.
        options: optional arguments of this kind of model.

    Returns:
        The required arguments, in the order of `names`.

    Raises:
        TypeError: an argument that is missing, comes twice, or is for another kind of model.
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


def reads_image_prompts(model: Model) -> TypeGuard[VisionLanguageModel | FlamingoModel]:
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
    """Raise ValueError for a batch size that is not a positive whole number."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"batch must be a whole number of at least 1, got {size!r}")


def batches(
    model: Model, texts: Texts, size: int, *, length: int | None, truncate: bool
) -> Iterator[tuple[list[int], BatchEncoding]]:
    """Texts in batches on the model's device, grouped by length, the longest first.

    Args:
        model: whose tokenizer reads the texts.
        texts: a list of texts or of pairs.
        size: number of texts in a batch.
        length: limit on the tokens of a text, or None.
        truncate: cut longer texts.

    Yields:
        The numbers of the texts of a batch, and the batch.

    Raises:
        TypeError: what is not a text.
        ValueError: a text that is too long or has no token.
    """
    check_batch(size)
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"texts must be a list of texts, got {type(texts).__name__}: {texts!r:.60}")
    if not texts:
        raise ValueError("there must be at least one text, got an empty list")
    checked_texts(texts)  # here, where they have their own numbers
    characters = [sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in texts]
    order = sorted(range(len(texts)), key=lambda n: -characters[n])
    for at in range(0, len(order), size):
        numbers = order[at : at + size]
        some = cast(Texts, [texts[n] for n in numbers])
        batch = model.tokenizer.batch(some)
        counts: list[int] = batch.mask.sum(1).tolist()
        for number, count in zip(numbers, counts, strict=True):
            if count == 0:
                raise ValueError(f"text {number} has no token: an empty text says nothing to this model")
            if length is not None and count > length and not truncate:
                raise ValueError(
                    f"text {number} has {count} tokens, and the model takes {length}: shorten it, or pass truncate=True"
                )
        if length is not None and max(counts) > length:
            batch = model.tokenizer.batch(some, length=length, truncate=True)
        yield numbers, BatchEncoding(*(t.to(model.device) for t in (batch.ids, batch.mask, batch.types)))


def single_batch(model: Model, text: str, second: str | None = None) -> BatchEncoding:
    """One text, or a pair, as a batch on the model's device. Raises ValueError if it is too long or has no token."""
    encoded = model.tokenizer.encode(text, second)
    limit = max_text_positions(model)
    if not encoded.ids:
        raise ValueError("the text has no token: an empty text says nothing to this model")
    if limit is not None and len(encoded.ids) > limit:
        raise ValueError(f"the text has {len(encoded.ids)} tokens, and the model takes {limit}: shorten it")
    ids, types = (torch.tensor([row], device=model.device) for row in (encoded.ids, encoded.types))
    return BatchEncoding(ids, torch.ones_like(ids, dtype=torch.bool), types)


@torch.no_grad()
def run_model(model: Model, batch: BatchEncoding) -> ModelOutput:
    """Run the model on a batch, with token types if it has them."""
    if model.kind == "text" and cast(Any, model).tower.embed.types is not None:
        return cast("ModelOutput", model(batch.ids, batch.mask, token_type_ids=batch.types))
    return cast("ModelOutput", model(batch.ids, batch.mask))


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


T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and afterwards each in its own: a new head may train beside a body that does not.

    >>> import torch
    >>> layer = nn.Dropout(0.5)                        # in training, as every new module
    >>> with eval_mode(layer):
    ...     layer(torch.ones(3))
    tensor([1., 1., 1.])
    >>> layer.training
    True
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_eval_mode(method: Method) -> Method:
    """Decorate a method of a module to run in eval mode.

    >>> import torch
    >>> class Noisy(nn.Dropout):
    ...     @in_eval_mode
    ...     def answer(self, size):
    ...         return self(torch.ones(size))
    >>> Noisy(0.5).answer(2)
    tensor([1., 1.])
    """

    @wraps(method)
    def wrapped(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with eval_mode(model):
            return method(model, *args, **kwargs)

    return cast(Method, wrapped)


def iterate_in_eval_mode(model: nn.Module, items: Iterator[T]) -> Iterator[T]:
    """Compute each item in eval mode; while the caller has it, the model is in the mode that it was in.

    >>> import torch
    >>> layer = nn.Dropout(0.5)
    >>> [(item.tolist(), layer.training) for item in iterate_in_eval_mode(layer, map(layer, torch.ones(2, 1)))]
    [([1.0], True), ([1.0], True)]
    """
    while True:
        with eval_mode(model):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
