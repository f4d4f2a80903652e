"""Text tasks: fill-mask, question answering, classification, token classification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import tables
from regard.data.images import Source
from regard.data.tokenizer import Batch, Encoded
from regard.models.dual_encoder import DualEncoder
from regard.models.model import Model
from regard.nn.heads import label_names
from regard.tasks.images import Several, judge
from regard.tasks.inputs import Texts, batches, one, positions, probabilities, require, result_of, shortened


@dataclass(frozen=True)
class Guess:
    """A token that could stand at a mask, as people read it, and how likely it is."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True, repr=False)
class Filled:
    """Guesses for each mask of a text, likeliest first; prints as a table.

    >>> Filled("Paris is [MASK].", ((Guess("big", 7, 0.625), Guess("far", 11, 0.25)),), "paris is big.")
    mask  token  probability
    ────  ─────  ───────────
    0     big    0.6250
          far    0.2500

    text: as asked.  blanks: the guesses of each mask, in order.  best: the text with the likeliest in their places, as
    the tokenizer writes it.
    """

    text: str
    blanks: tuple[tuple[Guess, ...], ...]
    best: str

    def _rows(self) -> list[list[str]]:
        return [
            ["" if rank else str(n), guess.token, f"{guess.probability:.4f}"]
            for n, guesses in enumerate(self.blanks)
            for rank, guess in enumerate(guesses)
        ]

    def __repr__(self) -> str:
        return tables.text(["mask", "token", "probability"], self._rows())

    def _repr_html_(self) -> str:
        return tables.html(["mask", "token", "probability"], self._rows())


def fill(model: Model, text: str, top: int = 5) -> Filled:
    """The `top` likeliest tokens for each mask of a text; see `Model.fill`."""
    require(model, "fill", "fill", "pretrain")
    if not isinstance(top, int) or isinstance(top, bool) or top < 1:
        raise ValueError(f"top must be a whole number of at least 1, got {top!r}")
    tokenizer = model.tokenizer
    mask = tokenizer.ids_of.mask
    if mask is None:
        raise ValueError(f"the tokenizer of this {model.family.title} has no mask token, so there is nothing to fill")
    batch = one(model, text)
    places = (batch.ids[0] == mask).nonzero().flatten()  # (masks,)
    if not len(places):
        raise ValueError(f"the text has no mask: write {tokenizer.tokens([mask])[0]} where a word is to be found")
    logits = result_of(model, batch).logits
    assert logits is not None
    chances = probabilities(logits[0, places])[:, : tokenizer.size]  # (masks, V); rows beyond are no tokens
    found = chances.topk(min(top, chances.shape[1]))
    blanks = tuple(
        tuple(Guess(*guess) for guess in zip(tokenizer.tokens(ids), ids.tolist(), values.tolist(), strict=True))
        for ids, values in zip(found.indices, found.values, strict=True)
    )
    filled = batch.ids[0].cpu().clone()
    filled[places.cpu()] = torch.tensor([guesses[0].id for guesses in blanks])
    return Filled(text, blanks, tokenizer.decode(filled))


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
        output = result_of(model, Batch(ids, torch.ones_like(ids, dtype=torch.bool), types))
        assert output.start_logits is not None
        assert output.end_logits is not None
        logits = torch.stack([output.start_logits[0], output.end_logits[0]], -1)  # (N, 2)
        value, start, end, none = best_span(logits, window.first, len(window.spans), longest)
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


MOST_SHOWN = 10  # labels of one picture in a table: many checkpoints have a thousand


@dataclass(frozen=True, eq=False, repr=False)
class Classified:
    """Texts or pictures with the probability of each label; prints as a table.

    >>> Classified(("fine!",), ("bad", "good"), torch.tensor([[0.25, 0.75]]))
    label  probability
    ─────  ───────────
    good   0.7500
    bad    0.2500

    texts: as asked; of pictures the names of their files.  labels: names, in config.json's order, or as asked.
    probabilities: (B, labels), each row of sum 1; each label by itself if the checkpoint's labels do not exclude each
    other; the value itself where it has learnt a number (`measure` says which: "probability" or "value").
    of: what was classified, "text" or "picture".
    """

    texts: tuple[Any, ...]
    labels: tuple[str, ...]
    probabilities: Tensor
    measure: str = "probability"
    of: str = "text"

    @property
    def best(self) -> tuple[str, ...]:
        """The likeliest label of each text."""
        return tuple(self.labels[n] for n in self.probabilities.argmax(1).tolist())

    def __len__(self) -> int:
        return len(self.texts)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        most = MOST_SHOWN if self.of == "picture" else None
        return ranking(self.probabilities, self.texts, self.labels, (self.of, "label", self.measure), most)

    def __repr__(self) -> str:
        return tables.text(*self._table())

    def _repr_html_(self) -> str:
        return tables.html(*self._table())


def ranking(
    values: Tensor,
    names: tuple[Any, ...],
    labels: tuple[str, ...],
    headers: tuple[str, str, str],
    most: int | None = None,
) -> tuple[list[str], list[list[str]]]:
    """A table's headers and rows: of one thing every label, the best first; of several the best label of each.

    >>> ranking(torch.tensor([[0.25, 0.75]]), ("a.jpg",), ("dog", "cat"), ("picture", "label", "probability"))
    (['label', 'probability'], [['cat', '0.7500'], ['dog', '0.2500']])

    values: (B, labels).  names: of B things.  headers: what these are, what the labels are, what the values are.
    most: labels of one thing that are listed; of more, how many are left out.
    """
    ranked = values.sort(1, descending=True)
    if len(names) == 1:
        found = list(zip(ranked.indices[0].tolist(), ranked.values[0].tolist(), strict=True))
        rows = [[labels[n], f"{value:.4f}"] for n, value in found[:most]]
        more = len(found) - len(rows)
        return list(headers[1:]), rows + ([[f"… {more} more", ""]] if more else [])
    best = zip(names, ranked.indices[:, 0].tolist(), ranked.values[:, 0].tolist(), strict=True)
    return list(headers), [[_in_one_line(name), labels[n], f"{value:.4f}"] for name, n, value in best]


def classify(model: Model, texts: str | Texts, *, batch: int = 32, truncate: bool = False) -> Classified:
    """Texts with the probability of each label; see `Model.classify`."""
    require(model, "classify", "classify")
    given: Texts = [texts] if isinstance(texts, str) else texts
    rows: dict[int, Tensor] = {}
    for numbers, part in batches(model, given, batch, length=positions(model), truncate=truncate):
        logits = result_of(model, part).logits
        assert logits is not None
        rows |= dict(zip(numbers, logits, strict=True))
    return _labelled(model, torch.stack([rows[n] for n in range(len(rows))]), tuple(given), "text")


def classify_pictures(model: Model, pictures: Source | Several, *, batch: int = 32) -> Classified:
    """Pictures with the probability of each of the checkpoint's labels; see `Model.classify`."""
    if isinstance(model, DualEncoder):
        raise ValueError(
            f"this {model.family.title} has no labels of its own: give some, as labels=['a cat', 'a dog'], or load a "
            "checkpoint with a head for labels"
        )
    require(model, "classify", "classify", *(["classify-cls"] if "classify-cls" in model.family.tasks else []))
    names, logits = judge(model, pictures, batch, lambda pixels: model(pixels).logits)  # (P, labels)
    return _labelled(model, logits, names, "picture")


def _labelled(model: Model, logits: Tensor, names: tuple[Any, ...], of: str) -> Classified:
    """logits: (B, labels)."""
    count, kind = logits.shape[1], model.settings.get("problem_type")
    labels = label_names(model.settings.labels(count), count)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu()
    if kind == "regression" or len(labels) == 1:
        return Classified(names, labels, wide, "value", of)
    chances = wide.sigmoid() if kind == "multi_label_classification" else probabilities(logits)
    return Classified(names, labels, chances, of=of)


def follows(model: Model, first: str, second: str) -> float:
    """How likely the second text follows the first; see `Model.follows`."""
    require(model, "follows", "next", "pretrain")
    result = result_of(model, one(model, first, second))
    relation = result.seq_relationship_logits
    logits = result.logits if relation is None else relation  # (1, 2): follows, does not
    assert logits is not None
    return float(probabilities(logits)[0, 0])


@dataclass(frozen=True)
class Span:
    """A piece of a text with one label: characters start to end, and the mean probability of its tokens."""

    text: str
    label: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True, repr=False)
class Tagged:
    """A text with a label for each of its tokens; prints as a table.

    >>> tagged = Tagged("Kim ran", (Span("Kim", "B-PER", 0, 3, 0.75), Span("ran", "O", 4, 7, 0.5)))
    >>> tagged
    token  label  probability
    ─────  ─────  ───────────
    Kim    B-PER  0.7500
    ran    O      0.5000
    >>> tagged.spans
    (Span(text='Kim', label='PER', start=0, end=3, probability=0.75),)

    text: as asked.  tokens: the pieces of it that the model read, with the likeliest label of each.
    """

    text: str
    tokens: tuple[Span, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Neighbours of one label as one: "B-" begins a new one, "I-" goes on, "O" is none."""
        return tuple(_joined(self.text, group) for group in _groups(self.tokens))

    def _rows(self) -> list[list[str]]:
        return [[shortened(token.text), token.label, f"{token.probability:.4f}"] for token in self.tokens]

    def __repr__(self) -> str:
        return tables.text(["token", "label", "probability"], self._rows())

    def _repr_html_(self) -> str:
        return tables.html(["token", "label", "probability"], self._rows())


def tag(model: Model, text: str) -> Tagged:
    """A label for each token of a text; see `Model.tag`."""
    require(model, "tag", "tag")
    spans = model.tokenizer.encode(text).offsets
    logits = result_of(model, one(model, text)).logits
    assert logits is not None
    values, numbers = probabilities(logits[0]).max(-1)  # (N,)
    labels = label_names(model.settings.labels(logits.shape[2]), logits.shape[2])
    found = zip(spans, numbers.tolist(), values.tolist(), strict=True)
    return Tagged(
        text,
        tuple(
            Span(text[span[0] : span[1]], labels[number], *span, value)
            for span, number, value in found
            if span is not None
        ),
    )


def _groups(tokens: tuple[Span, ...]) -> Iterator[list[Span]]:
    group: list[Span] = []
    for token in tokens:
        new = not group or token.label.startswith("B-") or _bare(token.label) != _bare(group[-1].label)
        if new and group:
            yield group
            group = []
        if token.label != "O":
            group.append(token)
    if group:
        yield group


def _joined(text: str, group: list[Span]) -> Span:
    start, end = group[0].start, group[-1].end
    return Span(text[start:end], _bare(group[0].label), start, end, sum(t.probability for t in group) / len(group))


def _bare(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _in_one_line(text: Any) -> str:
    return shortened(" | ".join(text) if isinstance(text, tuple) else text)
