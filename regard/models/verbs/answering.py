"""The piece of a context that answers a question.

A context longer than the model is read in windows that overlap by half; each says how likely its best span is, with its
first token standing for "not here", and the likeliest of all is the answer. It does not know any family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.models.model import Model
from regard.models.tokenizers.tokenizing import Batch, Encoded
from regard.models.verbs.asking import positions, probabilities, require, result_of

__all__ = ["Answer", "answer"]


@dataclass(frozen=True)
class Answer:
    """A piece of the context.

    >>> print(Answer("in 1945", 14, 21, 0.75, 0.125))
    in 1945

    text: context[start:end].  probability: that it starts there times that it ends there.  absent: the same of the
    first token, by which checkpoints trained for it say that there is no answer.
    """

    text: str
    start: int
    end: int
    probability: float
    absent: float

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Window:
    """Some of the context's tokens, framed as the model expects: ids, types, where the context's begin, their spans."""

    ids: list[int]
    types: list[int]
    first: int
    spans: list[tuple[int, int]]


def answer(model: Model, question: str, context: str, *, longest: int = 30) -> Answer:
    """The likeliest span of at most `longest` tokens; see `Model.answer`."""
    require(model, "answer", "answer")
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise ValueError(f"longest must be a whole number of at least 1, got {longest!r}")
    best: Answer | None = None
    absent = 1.0
    for window in _windows(model, question, context):
        ids, types = (torch.tensor([row], device=model.device) for row in (window.ids, window.types))
        logits = result_of(model, Batch(ids, torch.ones_like(ids, dtype=torch.bool), types)).logits
        assert logits is not None
        value, start, end, none = best_span(logits[0], window.first, len(window.spans), longest)
        absent = min(absent, none)
        if best is None or value > best.probability:
            at, to = window.spans[start][0], window.spans[end][1]
            best = Answer(context[at:to], at, to, value, absent)
    assert best is not None
    return Answer(best.text, best.start, best.end, best.probability, absent)


def best_span(logits: Tensor, first: int, count: int, longest: int) -> tuple[float, int, int, float]:
    """The likeliest start and end among `count` tokens from `first` on: probability, start, end; and "not here".

    >>> logits = torch.tensor([[0.0, 0.0], [9.0, 9.0], [9.0, 0.0], [0.0, 9.0]])    # a question's token is never chosen
    >>> value, start, end, absent = best_span(logits, first=2, count=2, longest=5)
    >>> round(value, 3), start, end, round(absent, 3)
    (1.0, 0, 1, 0.0)

    logits: (N, 2), of starting and of ending at each token.
    """
    wanted = torch.cat([logits[:1], logits[first : first + count]])  # (1 + count, 2)
    starts, ends = probabilities(wanted.mT)  # (1 + count,) each
    table = starts[1:, None] * ends[1:]  # (count, count)
    table = table.triu().tril(longest - 1)
    place = int(table.argmax())
    return float(table.flatten()[place]), place // count, place % count, float(starts[0] * ends[0])


def _windows(model: Model, question: str, context: str) -> Iterator[Window]:
    """The question with each window of the context; one if all of it fits.

    Raises ValueError for a context without a token, and for a question that leaves no room.
    """
    found = model.tokenizer.encode(question, context)
    first, spans = _context(found, len(model.tokenizer.encode(question, special=False).ids))
    if not spans:
        raise ValueError("the context has no token: there is nothing to find an answer in")
    most, after = positions(model), first + len(spans)
    frame = len(found.ids) - len(spans)
    room = len(spans) if most is None else most - frame
    if room < 1:
        raise ValueError(f"the question takes {frame} of the model's {most} tokens: none is left for the context")
    for at in range(0, max(1, len(spans) - room + _step(room)), _step(room)):
        size = min(room, len(spans) - at)
        inside = slice(first + at, first + at + size)
        ids, types = (row[:first] + row[inside] + row[after:] for row in (found.ids, found.types))
        yield Window(ids, types, first, spans[at : at + size])


def _step(room: int) -> int:
    return max(1, room // 2)


def _context(found: Encoded, question: int) -> tuple[int, list[tuple[int, int]]]:
    """Where the context's tokens begin, and the span of each; the first `question` that have one are the question's."""
    places = [n for n, span in enumerate(found.offsets) if span is not None][question:]
    spans = [span for n, span in enumerate(found.offsets) if span is not None and places and n >= places[0]]
    assert not places or places == list(range(places[0], places[0] + len(places))), "a context is in one piece"
    return (places[0] if places else len(found.ids)), spans
