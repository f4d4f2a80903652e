"""Asking a model, as its verbs (embed, fill, classify, …) do: the right head and arguments, texts as ids, the result.

It does not know any verb, nor what is made of a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from regard.data.tokenizer import Batch, checked_texts
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.flamingo import FlamingoModel
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.models.text import TextModel
from regard.models.vision_language import VisionLanguageModel

__all__ = [
    "Texts",
    "batches",
    "check_batch",
    "one",
    "positions",
    "probabilities",
    "require",
    "result_of",
    "shortened",
    "taken",
]

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


def taken(
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


def positions(model: Model) -> int | None:
    """How many tokens a text may have: positions of the tower that reads it; None where nothing limits them.

    Raises ValueError for a model that reads no texts.
    """
    if isinstance(model, (TextModel, DualEncoder, FlamingoModel, VisionLanguageModel)):
        return model.most
    if isinstance(model, (EncoderDecoder, Answerer, Matcher)):
        return model.encoder.embed.most
    if isinstance(model, Captioner):
        return model.decoder.embed.most
    raise ValueError(f"{model.family.title} reads no texts: it looks at pictures")


def check_batch(size: object) -> None:
    """Refuse a size of batches that is none, with a ValueError."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"batch must be a whole number of at least 1, got {size!r}")


def batches(
    model: Model, texts: Texts, size: int, *, length: int | None, truncate: bool
) -> Iterator[tuple[list[int], Batch]]:
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


def _batch(model: Model, texts: Sequence[Any], numbers: Sequence[int], length: int | None, truncate: bool) -> Batch:
    batch = model.tokenizer.batch(texts)
    counts: list[int] = batch.mask.sum(1).tolist()
    for number, count in zip(numbers, counts, strict=True):
        if count == 0:
            raise ValueError(f"text {number} has no token: an empty text says nothing to this model")
        if length is not None and count > length and not truncate:
            raise ValueError(f"{_too_long(f'text {number}', count, length)}: shorten it, or pass truncate=True")
    if length is not None and max(counts) > length:
        batch = model.tokenizer.batch(texts, length=length, truncate=True)
    return Batch(*(t.to(model.device) for t in (batch.ids, batch.mask, batch.types)))


def one(model: Model, text: str, second: str | None = None, *, remedy: str = "shorten it") -> Batch:
    """One text, or a pair, as a batch on the model's device. Raises ValueError if it is longer than the model."""
    found = model.tokenizer.encode(text, second)
    most = positions(model)
    if not found.ids:
        raise ValueError("the text has no token: an empty text says nothing to this model")
    if most is not None and len(found.ids) > most:
        raise ValueError(f"{_too_long('the text', len(found.ids), most)}: {remedy}")
    ids, types = (torch.tensor([row], device=model.device) for row in (found.ids, found.types))
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), types)


@torch.no_grad()
def result_of(model: Model, batch: Batch) -> ModelOutput:
    """What the model makes of a batch; segments are told to those that have them."""
    if isinstance(model, TextModel) and model.tower.embed.types is not None:
        return cast(ModelOutput, model(batch.ids, batch.mask, token_type_ids=batch.types))
    return cast(ModelOutput, model(batch.ids, batch.mask))


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
