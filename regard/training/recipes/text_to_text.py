"""Objectives of encoder-decoders: span corruption (T5), text infilling (BART), and translation or any text to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from regard.data.rows import read_documents, read_rows
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.training.data import TokenBlocks, row_length, split_sentences, token_stream
from regard.training.recipes.recipe import Batch, Recipe, loss_options, pad_rows, padding_mask, tokenizer_of


def encoder_decoder_batch(pairs: Sequence[Any], pad: int) -> Batch:
    """Pairs of input and target as input_ids, attention_mask if inputs are padded, and labels, the targets."""
    inputs = [pair[0] for pair in pairs]
    labels = pad_rows([pair[1] for pair in pairs], IGNORED)
    return {"input_ids": pad_rows(inputs, pad), **padding_mask(inputs), "labels": labels}


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(Recipe):
    """15 % of the tokens go, in spans of 3 on average (Raffel et al. 2020, section 3.1.4).

    Args:
        length: tokens of a text before its spans go.
        sentinel_ids: of <extra_id_0>, <extra_id_1>, …, one for each span.
        end_token_id: after input and target.
        pad_token_id: fills up short rows.
        density: share of the tokens that goes.
        mean_span: mean length of a span.
    """

    length: int
    sentinel_ids: tuple[int, ...]
    end_token_id: int
    pad_token_id: int = 0
    density: float = 0.15
    mean_span: float = 3.0
    name: ClassVar[str] = "span-corruption"
    task: ClassVar[str] = "text2text-generation"

    def __post_init__(self) -> None:
        if not 0 < self.density < 1 or self.mean_span < 1 or self.length < 2:
            raise ValueError(
                f"span corruption needs a density in (0, 1), spans of 1 or more and 2 tokens or more; got density "
                f"{self.density}, mean_span {self.mean_span}, length {self.length}"
            )
        if self.counts(self.length)[1] > len(self.sentinel_ids):
            raise ValueError(
                f"a text of {self.length} tokens has {self.counts(self.length)[1]} spans, and there are only "
                f"{len(self.sentinel_ids)} sentinel tokens"
            )

    @classmethod
    def for_model(
        cls, model: Model, *, length: int = 128, density: float = 0.15, mean_span: float = 3.0
    ) -> SpanCorruption:
        """With T5's sentinels. Raises ValueError for a tokenizer without <extra_id_0>."""
        tokenizer = tokenizer_of(model)
        labels = {label: number for number, label in enumerate(tokenizer.tokens(range(tokenizer.size)))}
        sentinels = [labels[name] for n in range(tokenizer.size) if (name := f"<extra_id_{n}>") in labels]
        if not sentinels or tokenizer.ids_of.eos is None:
            raise ValueError("the tokenizer has no <extra_id_0> or no end token: span corruption needs T5's tokenizer")
        return cls(
            length=length,
            sentinel_ids=tuple(sentinels),
            end_token_id=tokenizer.ids_of.eos,
            pad_token_id=tokenizer.ids_of.pad or 0,
            density=density,
            mean_span=mean_span,
        )

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Tensor]:
        """Blocks of the text's tokens."""
        return TokenBlocks(token_stream(tokenizer_of(model), read_documents(data)), self.length, training=training)

    def counts(self, length: int) -> tuple[int, int]:
        """How many tokens go, in how many spans."""
        noise = min(max(round(length * self.density), 1), length - 1)
        return noise, min(max(round(noise / self.mean_span), 1), length - noise)

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask if rows are padded, and labels, which the model shifts right for its decoder."""
        pairs = [self.corrupt(np.asarray(row), random) for row, random in zip(rows, rng, strict=True)]
        return encoder_decoder_batch(pairs, self.pad_token_id)

    def corrupt(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Input and target of one text: kept and noise spans alternate, a kept one first."""
        noise, spans = self.counts(len(ids))
        lengths = np.stack([_parts(len(ids) - noise, spans, random), _parts(noise, spans, random)], 1).ravel()
        pieces = np.split(ids, np.cumsum(lengths)[:-1])
        inputs: list[int] = []
        target: list[int] = []
        for number in range(spans):
            sentinel = self.sentinel_ids[number]
            inputs += [*pieces[2 * number].tolist(), sentinel]
            target += [sentinel, *pieces[2 * number + 1].tolist()]
        return np.asarray([*inputs, self.end_token_id]), np.asarray([*target, self.end_token_id])


def _parts(total: int, count: int, random: np.random.Generator) -> np.ndarray:
    """`total` as a sum of `count` numbers of 1 or more, all such sums equally likely."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1 if count > 1 else np.empty(0, int)
    return np.diff(np.concatenate([[0], cuts, [total]]))


@dataclass(frozen=True, kw_only=True)
class Infilling(Recipe):
    """30 % of the tokens go, in spans of Poisson(3) tokens, each replaced by one mask token; sentences are shuffled.

    A span of length 0 inserts a mask token (Lewis et al. 2020, section 2.2).

    Args:
        length: most tokens of a text, special tokens included.
        mask_token_id: stands for a span.
        start_token_id: before each text.
        end_token_id: after each text.
        pad_token_id: fills up short rows.
        density: share of the tokens that goes.
        mean_span: mean of the Poisson distribution.
        permute: shuffle the sentences of a text.
    """

    length: int
    mask_token_id: int
    start_token_id: int
    end_token_id: int
    pad_token_id: int = 1
    density: float = 0.3
    mean_span: float = 3.0
    permute: bool = True
    name: ClassVar[str] = "infilling"
    task: ClassVar[str] = "text2text-generation"

    def __post_init__(self) -> None:
        if not 0 < self.density < 1 or self.mean_span <= 0 or self.length < 4:
            raise ValueError(
                f"infilling needs a density in (0, 1), a mean span above 0 and a length of 4 or more; got density "
                f"{self.density}, mean_span {self.mean_span}, length {self.length}"
            )

    @classmethod
    def for_model(
        cls,
        model: Model,
        *,
        length: int | None = None,
        density: float = 0.3,
        mean_span: float = 3.0,
        permute: bool = True,
    ) -> Infilling:
        """With the special tokens of the model's tokenizer. Raises ValueError where mask, start or end is missing."""
        ids = tokenizer_of(model).ids_of
        start = ids.bos if ids.bos is not None else ids.cls
        end = ids.eos if ids.eos is not None else ids.sep
        if ids.mask is None or start is None or end is None:
            raise ValueError("infilling needs a tokenizer with mask, start and end tokens, as BART's")
        return cls(
            length=row_length(model, length, least=4, usual=512),
            mask_token_id=ids.mask,
            start_token_id=start,
            end_token_id=end,
            pad_token_id=ids.pad or 0,
            density=density,
            mean_span=mean_span,
            permute=permute,
        )

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """Runs of whole sentences, each a list of ids; a sentence that is too long is cut."""
        tokenizer, room = tokenizer_of(model), self.length - 2
        rows: list[list[list[int]]] = []
        for text in read_documents(data):
            row: list[list[int]] = []
            for sentence in split_sentences(text):
                ids = tokenizer.encode(sentence, special=False).ids[:room]
                if row and sum(map(len, row)) + len(ids) > room:
                    rows.append(row)
                    row = []
                row += [ids] if ids else []
            rows += [row] if row else []
        return rows

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask if rows are padded, and labels, which the model shifts right for its decoder."""
        pairs = []
        for row, random in zip(rows, rng, strict=True):
            order = random.permutation(len(row)) if self.permute else range(len(row))
            shuffled = np.concatenate([row[number] for number in order])
            texts = self.infill(shuffled, random).tolist(), np.concatenate(row).tolist()
            pairs.append([[self.start_token_id, *text, self.end_token_id] for text in texts])
        return encoder_decoder_batch(pairs, self.pad_token_id)

    def infill(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """A text with spans replaced by mask tokens."""
        budget = round(len(ids) * self.density)
        lengths: list[int] = []
        while sum(lengths) < budget:
            lengths.append(min(int(random.poisson(self.mean_span)), budget - sum(lengths)))
        # Place the spans between the tokens that stay: which of the pieces, in random order, are spans.
        kept = len(ids) - budget
        is_span = np.zeros(kept + len(lengths), bool)
        is_span[random.choice(len(is_span), len(lengths), replace=False)] = True
        result: list[int] = []
        place, spans = 0, iter(lengths)
        for span in is_span:
            if span:
                result.append(self.mask_token_id)
                place += next(spans)
            else:
                result.append(int(ids[place]))
                place += 1
        return np.asarray(result)


@dataclass(frozen=True, kw_only=True)
class Translation(Recipe):
    """Rows have the columns source and target.

    Args:
        length: longer sources and targets are left out in training and cut in evaluation.
        end_token_id: after each target, and after each source if its tokenizer adds none.
        pad_token_id: fills up short rows.
        smoothing: label smoothing, 0.1 in the 2017 paper.
    """

    length: int
    end_token_id: int
    pad_token_id: int
    smoothing: float = 0.1
    name: ClassVar[str] = "translate"
    task: ClassVar[str] = "text2text-generation"

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1 or self.length < 2:
            raise ValueError(f"smoothing must be in [0, 1) and length 2 or more; got {self.smoothing}, {self.length}")

    @classmethod
    def for_model(cls, model: Model, *, length: int = 128, smoothing: float = 0.1) -> Translation:
        """With the end and padding tokens of the model's tokenizer. Raises ValueError if it has none."""
        ids = tokenizer_of(model).ids_of
        if ids.eos is None or ids.pad is None:
            raise ValueError("translation needs a tokenizer with end and padding tokens")
        return cls(length=length, end_token_id=ids.eos, pad_token_id=ids.pad, smoothing=smoothing)

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[tuple[list[int], list[int]]]:
        """(source ids, target ids) of each row, both ended."""
        if not training:
            check_bleu()  # before hours of training, not after
        tokenizer, rows = tokenizer_of(model), []
        for row in read_rows(data, ("source", "target")):
            pair = [tokenizer.encode(row[side], special=False).ids for side in ("source", "target")]
            if training and (not all(pair) or max(map(len, pair)) >= self.length):
                continue
            source, target = ([*ids[: self.length - 1], self.end_token_id] for ids in pair)
            rows.append((source, target))
        if not rows:
            raise ValueError(f"no row has a source and a target of 1 to {self.length - 1} tokens")
        return rows

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """input_ids, attention_mask if rows are padded, and labels, which the model shifts right for its decoder."""
        return encoder_decoder_batch(rows, self.pad_token_id)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over the targets' tokens, smoothed in training only: a held-out loss stays a perplexity."""
        total = model(**batch, num_items_in_batch=1, **loss_options(model, smoothing=self.smoothing)).loss
        return total, (batch["labels"] != IGNORED).sum()

    def metrics(self, model: Model, rows: Sequence[Any], loss: float) -> dict[str, Any]:
        """BLEU of beam search with 5 beams, with sacrebleu's signature. Raises ImportError without sacrebleu."""
        written: list[str] = []
        texts = [[model.tokenizer.decode(ids) for ids in row] for row in rows]
        for first in range(0, len(rows), 64):
            sources = [source for source, _ in texts[first : first + 64]]
            results = model.generate(sources, max_new_tokens=self.length, num_beams=5)
            written += [result.text.strip() for result in results]
        score, signature = bleu(written, [target.strip() for _, target in texts])
        return {"BLEU": round(score, 2), "signature": signature}


def bleu(predicted: Sequence[str], expected: Sequence[str], *, lowercase: bool = False) -> tuple[float, str]:
    """Corpus BLEU by sacrebleu, and the signature to report with it.

    Raises ImportError if sacrebleu is not installed.
    """
    check_bleu()
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(predicted), [list(expected)]).score
    return float(score), str(metric.get_signature())


def check_bleu() -> None:
    """Raise ImportError if sacrebleu is not installed."""
    if find_spec("sacrebleu") is None:
        raise ImportError("BLEU needs sacrebleu: pip install 'regard[metrics]'")
