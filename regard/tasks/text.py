"""Text tasks: fill-mask, question answering, classification, token classification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor

from regard import tables
from regard.checks import check_int
from regard.data.images import Source
from regard.data.tokenizer import BatchEncoding
from regard.formats import read_optional_json
from regard.nn.blocks import first_token, label_names, last_token
from regard.tasks.inputs import (
    Several,
    Texts,
    probabilities,
    run_model,
    score_images,
    score_texts,
    shortened,
    single_batch,
)

if TYPE_CHECKING:
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.model import Model


class TableResult:
    """A result that prints as a table, in notebooks too."""

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return tables.text(*self.table())

    def _repr_html_(self) -> str:
        return tables.html(*self.table())


@dataclass(frozen=True)
class Guess:
    """A candidate for a mask token, as people read it, and its probability."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True, repr=False)
class Filled(TableResult):
    """Guesses for each mask of a text, likeliest first; prints as a table.

    >>> Filled("Paris is [MASK].", ((Guess("big", 7, 0.625), Guess("far", 11, 0.25)),), "paris is big.")
    mask  token  probability
    ────  ─────  ───────────
    0     big    0.6250
          far    0.2500

    Attributes:
        text: the input.
        blanks: the guesses for each mask, in order.
        best: the text with the likeliest guesses in place, as the tokenizer writes it.
    """

    text: str
    blanks: tuple[tuple[Guess, ...], ...]
    best: str

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows."""
        return ["mask", "token", "probability"], [
            ["" if rank else str(n), guess.token, f"{guess.probability:.4f}"]
            for n, guesses in enumerate(self.blanks)
            for rank, guess in enumerate(guesses)
        ]


def fill(model: Model, text: str, top: int = 5) -> Filled:
    """The `top` likeliest tokens for each mask of a text; see `Model.fill`."""
    model.check_task("fill", "fill-mask", "pretraining")
    check_int("top", top)
    tokenizer = model.tokenizer
    mask = tokenizer.ids_of.mask
    if mask is None:
        raise ValueError(f"the tokenizer of this {model.family.title} has no mask token, so there is nothing to fill")
    batch = single_batch(model, text)
    places = (batch.input_ids[0] == mask).nonzero().flatten()  # (masks,)
    if not len(places):
        raise ValueError(f"the text has no mask: write {tokenizer.tokens([mask])[0]} where a word is to be found")
    logits = run_model(model, batch).logits
    assert logits is not None
    chances = probabilities(logits[0, places])[:, : tokenizer.size]  # (masks, V); rows beyond are no tokens
    best = chances.topk(min(top, chances.shape[1]))
    blanks = tuple(
        tuple(Guess(*guess) for guess in zip(tokenizer.tokens(ids), ids.tolist(), values.tolist(), strict=True))
        for ids, values in zip(best.indices, best.values, strict=True)
    )
    filled = batch.input_ids[0].cpu().clone()
    filled[places.cpu()] = torch.tensor([guesses[0].id for guesses in blanks])
    return Filled(text, blanks, tokenizer.decode(filled))


@dataclass(frozen=True)
class Answer:
    """The span of the context that answers a question.

    >>> print(Answer("in 1945", 14, 21, 0.75, 0.125))
    in 1945

    Attributes:
        text: context[start:end].
        start: its first character.
        end: after its last character.
        probability: that it starts there, times that it ends there.
        absent: the same of the first token, which stands for "no answer" in checkpoints trained for it.
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
    """The question with a part of the context, as the model expects it."""

    ids: list[int]
    types: list[int]
    first: int  # where the context's tokens begin
    spans: list[tuple[int, int]]  # the characters of each of the context's tokens


def answer(model: Model, question: str, context: str, *, longest: int = 30) -> Answer:
    """The likeliest span of at most `longest` tokens; see `Model.answer`."""
    model.check_task("answer", "question-answering")
    check_int("longest", longest)
    best: Answer | None = None
    absent = 1.0
    for window in _windows(model, question, context):
        ids, types = (torch.tensor([row], device=model.device) for row in (window.ids, window.types))
        output = run_model(model, BatchEncoding(ids, torch.ones_like(ids, dtype=torch.bool), types))
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

    logits: (N, 2), of starting and of ending at each token.
    """
    wanted = torch.cat([logits[:1], logits[first : first + count]])  # (1 + count, 2)
    starts, ends = probabilities(wanted.mT)  # (1 + count,) each
    table = starts[1:, None] * ends[1:]  # (count, count)
    table = table.triu().tril(longest - 1)
    place = int(table.argmax())
    return float(table.flatten()[place]), place // count, place % count, float(starts[0] * ends[0])


def _windows(model: Model, question: str, context: str) -> Iterator[Window]:
    """The question with each window of the context; one if all of it fits."""
    encoded = model.tokenizer.encode(question, context)
    # The first tokens with a span are the question's, the others the context's.
    skipped = len(model.tokenizer.encode(question, special=False).ids)
    places = [n for n, span in enumerate(encoded.offsets) if span is not None][skipped:]
    if not places:
        raise ValueError("the context has no token: there is nothing to find an answer in")
    first, after = places[0], places[-1] + 1
    spans = [span for span in encoded.offsets[first:after] if span is not None]
    assert len(spans) == len(places) == after - first, "a context is in one piece"
    limit, frame = model.max_text_positions, len(encoded.ids) - len(spans)
    room = len(spans) if limit is None else limit - frame
    if room < 1:
        raise ValueError(f"the question takes {frame} of the model's {limit} tokens: none is left for the context")
    stride = max(1, room // 2)
    for at in range(0, max(1, len(spans) - room + stride), stride):
        size = min(room, len(spans) - at)
        inside = slice(first + at, first + at + size)
        ids, types = (row[:first] + row[inside] + row[after:] for row in (encoded.ids, encoded.types))
        yield Window(ids, types, first, spans[at : at + size])


MAX_LABELS = 10  # labels of one image in a table: many checkpoints have a thousand


@dataclass(frozen=True, eq=False, repr=False)
class Classified(TableResult):
    """Texts or images with the probability of each label; prints as a table.

    >>> Classified(("fine!",), ("bad", "good"), torch.tensor([[0.25, 0.75]]))
    label  probability
    ─────  ───────────
    good   0.7500
    bad    0.2500

    Attributes:
        texts: the inputs; of images the names of their files.
        labels: names, in config.json's order, or as given.
        probabilities: (B, labels), each row of sum 1; independent of each other for a multi-label checkpoint; the
            predicted value for a regression.
        measure: "probability" or "value".
        of: what was classified, "text" or "image".
    """

    texts: tuple[Any, ...]
    labels: tuple[str, ...]
    probabilities: Tensor
    measure: str = "probability"
    of: str = "text"

    @property
    def best(self) -> tuple[str, ...]:
        """The likeliest label of each input."""
        return tuple(self.labels[n] for n in self.probabilities.argmax(1).tolist())

    def __len__(self) -> int:
        return len(self.texts)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows."""
        most = MAX_LABELS if self.of == "image" else None
        return ranking(self.probabilities, self.texts, self.labels, (self.of, "label", self.measure), most)


def ranking(
    values: Tensor,
    names: tuple[Any, ...],
    labels: tuple[str, ...],
    headers: tuple[str, str, str],
    most: int | None = None,
) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table: every label of one input, best first, or the best label of each of several.

    values: (B, labels).  names: of the B inputs.  headers: of the columns of inputs, labels and values.
    most: limit on the labels listed for one input; a last row counts the others.
    """
    ranked = values.sort(1, descending=True)
    if len(names) == 1:
        shares = list(zip(ranked.indices[0].tolist(), ranked.values[0].tolist(), strict=True))
        rows = [[labels[n], f"{value:.4f}"] for n, value in shares[:most]]
        more = len(shares) - len(rows)
        return list(headers[1:]), rows + ([[f"… {more} more", ""]] if more else [])
    lines = [shortened(" | ".join(name) if isinstance(name, tuple) else name) for name in names]
    best = zip(lines, ranked.indices[:, 0].tolist(), ranked.values[:, 0].tolist(), strict=True)
    return list(headers), [[line, labels[n], f"{value:.4f}"] for line, n, value in best]


def classify(model: Model, texts: str | Texts, *, batch: int = 32, truncate: bool = False) -> Classified:
    """Texts with the probability of each label; see `Model.classify`."""
    model.check_task("classify", "text-classification")
    several: Texts = [texts] if isinstance(texts, str) else texts

    def logits(part: BatchEncoding) -> Tensor:
        return cast(Tensor, run_model(model, part).logits)

    rows = score_texts(model, several, batch, logits, length=model.max_text_positions, truncate=truncate)
    return _labelled(model, rows, tuple(several), "text")


def classify_images(model: Model, images: Source | Several, *, batch: int = 32) -> Classified:
    """Images with the probability of each of the checkpoint's labels; see `Model.classify`."""
    if model.kind == "dual-encoder":
        raise ValueError(
            f"this {model.family.title} has no labels of its own: give some, as labels=['a cat', 'a dog'], or load a "
            "checkpoint with a head for labels"
        )
    cls = ["image-classification-cls"] if "image-classification-cls" in model.family.tasks else []
    model.check_task("classify", "image-classification", *cls)
    names, logits = score_images(model, images, batch, lambda pixels: model(pixels).logits)  # (P, labels)
    return _labelled(model, logits, names, "image")


def _labelled(model: Model, logits: Tensor, names: tuple[Any, ...], of: str) -> Classified:
    count, kind = logits.shape[1], model.config.get("problem_type")
    labels = label_names(model.config.labels(count), count)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu()
    if kind == "regression" or len(labels) == 1:
        return Classified(names, labels, wide, "value", of)
    chances = wide.sigmoid() if kind == "multi_label_classification" else probabilities(logits)
    return Classified(names, labels, chances, of=of)


def follows(model: Model, first: str, second: str) -> float:
    """How likely the second text follows the first; see `Model.follows`."""
    model.check_task("follows", "next-sentence-prediction", "pretraining")
    result = run_model(model, single_batch(model, first, second))
    relation = result.seq_relationship_logits
    logits = result.logits if relation is None else relation  # (1, 2): follows, does not
    assert logits is not None
    return float(probabilities(logits)[0, 0])


@dataclass(frozen=True)
class Span:
    """Characters start to end of a text, with one label and the mean probability of its tokens."""

    text: str
    label: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True, repr=False)
class Tagged(TableResult):
    """A text with a label for each of its tokens; prints as a table.

    >>> tagged = Tagged("Kim ran", (Span("Kim", "B-PER", 0, 3, 0.75), Span("ran", "O", 4, 7, 0.5)))
    >>> tagged
    token  label  probability
    ─────  ─────  ───────────
    Kim    B-PER  0.7500
    ran    O      0.5000
    >>> tagged.spans
    (Span(text='Kim', label='PER', start=0, end=3, probability=0.75),)

    Attributes:
        text: the input.
        tokens: the tokens of the text with the likeliest label of each.
    """

    text: str
    tokens: tuple[Span, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Neighbouring tokens of one label joined: "B-" begins a new span, "I-" continues one, "O" is none."""
        groups: list[list[Span]] = []
        before = "O"
        for token in self.tokens:
            if token.label != "O":
                if before == "O" or token.label.startswith("B-") or _bare(token.label) != _bare(before):
                    groups.append([])
                groups[-1].append(token)
            before = token.label
        spans = []
        for group in groups:
            start, end = group[0].start, group[-1].end
            probability = sum(token.probability for token in group) / len(group)
            spans.append(Span(self.text[start:end], _bare(group[0].label), start, end, probability))
        return tuple(spans)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows."""
        rows = [[shortened(token.text), token.label, f"{token.probability:.4f}"] for token in self.tokens]
        return ["token", "label", "probability"], rows


def tag(model: Model, text: str) -> Tagged:
    """A label for each token of a text; see `Model.tag`."""
    model.check_task("tag", "token-classification")
    spans = model.tokenizer.encode(text).offsets
    logits = run_model(model, single_batch(model, text)).logits
    assert logits is not None
    values, numbers = probabilities(logits[0]).max(-1)  # (N,)
    labels = label_names(model.config.labels(logits.shape[2]), logits.shape[2])
    tokens = [
        Span(text[span[0] : span[1]], labels[number], *span, value)
        for span, number, value in zip(spans, numbers.tolist(), values.tolist(), strict=True)
        if span is not None
    ]
    return Tagged(text, tuple(tokens))


def _bare(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


Pooling = Literal["mean", "cls", "max", "last"]
KNOWN: dict[str, Pooling] = {
    "mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "lasttoken": "last",
    "mean": "mean", "cls": "cls", "max": "max",
}  # fmt: skip
"""What 1_Pooling/config.json calls it, after "pooling_mode_" or, of late, as the value of "pooling_mode"."""


def embed(
    model: Model,
    texts: Texts,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    batch: int = 32,
    truncate: bool = False,
) -> Tensor:
    """One vector for each text, (len(texts), d), in their order; see `Model.embed`."""
    if model.kind in ("image-question", "image-caption"):
        raise ValueError(
            f"embed pools the tokens of a model that reads texts alone, and {model.family.title} reads them with an "
            "image: it makes no vector of a text alone"
        )
    if model.kind in ("dual-encoder", "image-text-matching"):
        raise ValueError(
            f"embed pools the tokens of a model that reads texts alone, and {model.family.title} compares them "
            "with images: model.match(images, texts) compares, model.encode_text and encode_image give vectors"
        )
    if pooling is None or normalize is None:
        own_pooling, own_normalize = read_pooling(model.directory)
        pooling = own_pooling if pooling is None else pooling
        normalize = own_normalize if normalize is None else normalize
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    values = read_optional_json(model.directory, "sentence_bert_config.json", dict) or {}
    listed = isinstance(texts, Sequence) and not isinstance(texts, str)  # `batches` refuses anything else
    if values.get("do_lower_case") is True and listed:
        texts = [_lowered(text) for text in texts]
    lengths = [n for n in (values.get("max_seq_length"), model.max_text_positions) if isinstance(n, int)]

    def vectors(part: BatchEncoding) -> Tensor:  # (b, d)
        if model.kind == "encoder-decoder":
            hidden = cast("EncoderDecoder", model).encode(part.input_ids, part.attention_mask)
        else:
            hidden = run_model(model, part).last_hidden_state
        pooled = pool(hidden, part.attention_mask, pooling)
        return torch.nn.functional.normalize(pooled, dim=-1) if normalize else pooled

    return score_texts(model, texts, batch, vectors, length=min(lengths, default=None), truncate=truncate)


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Vectors (B, N, d) of tokens to one for each text, (B, d). mask: (B, N), True = token, at least one in a row."""
    if pooling == "cls":
        return first_token(hidden, mask)
    if pooling == "last":
        return last_token(hidden, mask)
    shown = mask.unsqueeze(-1)  # (B, N, 1)
    if pooling == "max":
        return hidden.masked_fill(~shown, -torch.inf).amax(1)
    wide = torch.promote_types(hidden.dtype, torch.float32)  # a sum of hundreds in bf16 would lose most of its digits
    return (hidden.masked_fill(~shown, 0).sum(1, dtype=wide) / shown.sum(1)).to(hidden.dtype)


def read_pooling(directory: Path | None) -> tuple[Pooling, bool]:
    """The pooling that a checkpoint asks for, and whether vectors are brought to length 1; else "mean" and False.

    modules.json lists what follows the model, 1_Pooling/config.json how it is pooled. Raises ValueError for what
    sentence-transformers would do with them and `embed` does not.
    """
    modules = read_optional_json(directory, "modules.json", list)
    if modules is None:
        return "mean", False
    assert directory is not None
    # 1. The kinds of modules, and the folder of the Pooling.
    file, kinds, folder = directory / "modules.json", [], None
    for module in modules:
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"{file} must list modules with a type, got {module!r:.80}")
        kinds.append(kind.rpartition(".")[2])
        if kinds[-1] == "Pooling":
            folder = str(module.get("path"))
    if not {"Transformer", "Pooling", "Normalize"}.issuperset(kinds) or kinds.count("Pooling") > 1:
        raise ValueError(
            f"{file} lists {', '.join(kinds)}, and only Transformer, one Pooling and Normalize are known: give "
            "pooling= and normalize= to embed without the others"
        )
    normalize = "Normalize" in kinds
    if folder is None:
        return "mean", normalize
    # 2. What its config.json says.
    if Path(folder).name != folder:
        raise ValueError(f"{file}: the path of Pooling must be a folder beside it, got {folder!r}")
    name = f"{folder}/config.json"
    values = read_optional_json(directory, name, dict)
    if values is None:
        raise FileNotFoundError(f"modules.json asks for a Pooling, and {directory / name} is missing: give pooling=")
    modes = [key.removeprefix("pooling_mode_") for key, on in values.items() if key.startswith("pooling_mode_") and on]
    modes = [str(values["pooling_mode"])] if "pooling_mode" in values else modes
    if len(modes) != 1 or modes[0] not in KNOWN:
        listed = " and ".join(modes) or "nothing"
        raise ValueError(
            f"{directory / name} asks for {listed}, and one of {', '.join(get_args(Pooling))} is known: give pooling="
        )
    return KNOWN[modes[0]], normalize


def _lowered(text: Any) -> Any:
    if isinstance(text, tuple):
        return tuple(map(_lowered, text))
    return text.lower() if isinstance(text, str) else text
