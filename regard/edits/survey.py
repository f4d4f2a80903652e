"""`survey`: a measure of every head over a corpus, with confidence intervals; resumable, on one process or many."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save as tensor_bytes
from torch import Tensor, nn

from regard import tables
from regard.checks import check_int
from regard.data.rows import fingerprint, numbered_lines, read_rows
from regard.files import atomic_file, opened_run
from regard.formats import TensorFile, TensorFileError, raw_bytes
from regard.lens.capture import Capture, ModuleRun
from regard.lens.patterns import NAMES as PATTERNS
from regard.lens.view import PER_QUERY, View
from regard.lens.watch import watch
from regard.locale import Lang, translate
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.model import Model, eval_mode
from regard.models.text import TextModel

__all__ = ["HeadMean", "HeadSums", "Survey", "SurveyInterrupted", "survey"]

OUTPUT = "output"
MEASURES = (*PER_QUERY, *PATTERNS, OUTPUT)
RESULT = "survey.safetensors"
TOP = 10  # heads in a table
ENCODED_AT_ONCE = 1024  # texts
Z = 1.959963984540054  # normal quantile of 0.975
T_OF_FEW = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)


def survey(
    model: nn.Module,
    texts: Any,
    measure: str | Sequence[str] = "induction",
    *,
    out: str | os.PathLike[str] | None = None,
    run: Callable[[Any], object] | None = None,
    batch_size: int = 16,
    length: int | None = None,
    limit: int | None = None,
    shard: int = 256,
    progress: bool = True,
) -> Survey:
    """Measure every head on every text of a corpus: mean, 95 % confidence interval and number of texts per head.

    >>> import regard
    >>> from regard.training.tokenizers import byte_tokenizer
    >>> model = regard.build("gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=16, vocab_size=256)
    >>> model.tokenizer = byte_tokenizer()
    >>> result = regard.survey(model, ["to be or not", "be to be"], "previous")
    >>> result, result.mean.shape, int(result.count[0, 1])
    (Survey(previous: 1 layers, 2 texts), torch.Size([1, 2]), 2)

    A text gives one number per head, as `Capture.atlas` does, and the statistics are over texts, whatever their length.
    A text counts only where the measure has a meaning: "induction" and "same token" need a token that comes twice,
    "delimiter" a delimiter after the first token, "previous", "next", "neighbours" and "uniform" two tokens. Texts of
    equal length run together, so that there is no padding.

    Under torchrun every process makes the same call, measures its share of the shards and returns the whole result.
    Sums are made in the order of the texts, in fp64: the same bits on any number of processes (with as many threads
    each), and after an interruption.

    Args:
        model: from `regard.load` for texts; any nn.Module for inputs.
        texts: a list of texts, or a file of them: .txt (one per line), .tsv, .csv or .jsonl (column "text"). Or the
            inputs of any model: dicts of tensors, one call each, whose batch rows are the texts; "input_ids" serve
            "same token" and "induction".
        measure: "entropy", "effective", "max_logit", "lse", a pattern's name, or "output", the mean output of each
            head; or several of them.
        out: directory that keeps finished shards: the same call goes on where an earlier one stopped.
        run: runs the model on an item of inputs; default `model(**inputs)`.
        batch_size: texts that run together at most.
        length: cut longer texts to so many tokens; default an error for texts longer than the model's positions.
        limit: take the first so many texts, or inputs.
        shard: texts, or inputs, that are measured and kept together.
        progress: show a bar on stderr, if that is a terminal.

    Returns:
        A `Survey`.

    Raises:
        ValueError: an unknown measure, no texts, a text that is empty or too long, or a model that reads no texts.
        TypeError: texts or model of the wrong kind.
        LookupError: no attention was seen, or no layer has the measure.
        FloatingPointError: a measure is NaN or infinite.
        FileNotFoundError: there is no such file.
        FileExistsError: `out` holds another run, or files that are no run.
        BlockingIOError: another process writes to `out`.
        SurveyInterrupted: a KeyboardInterrupt, on Ctrl-C; finished shards are in `out`.
    """
    # 1. Check the arguments and read the corpus.
    measures = read_measures(measure)
    counts = {"batch_size": batch_size, "length": length, "limit": limit, "shard": shard}
    for name, value in counts.items():
        if value is not None or name not in ("length", "limit"):
            check_int(name, value)
    if not isinstance(model, nn.Module):
        raise TypeError(f"survey takes a torch.nn.Module, got {type(model).__name__}")
    corpus: TextCorpus | InputCorpus
    items, lines = _read_corpus(texts, limit)
    if isinstance(items[0], str):
        if run is not None:
            raise ValueError("run= is for inputs, which are dicts; texts run as model(input_ids)")
        corpus = TextCorpus.encode(model, items, lines, batch_size, length)
    else:
        if length is not None:
            raise ValueError(f"length={length} is for texts; cut the inputs yourself")
        if "delimiter" in measures:
            raise ValueError("'delimiter' needs the words of a text: survey texts, with a model from regard.load")
        corpus = InputCorpus(model, items, run)

    # 2. Join the processes of torchrun; open the directory, or make sure that all of them survey the same.
    rank, size = 0, 1
    if dist.is_available():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    identity: dict[str, Any] = {}
    if out is not None or size > 1:
        options = {"measures": list(measures), "batch_size": batch_size, "length": length, "shard": shard}
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")  # others round differently
        options |= {"device": device}
        described: Any = type(model).__qualname__
        if isinstance(model, Model):
            left_out = ("transformers_version", "dtype")
            described = {name: value for name, value in model.config.values.items() if name not in left_out}
        identity = {"model": described, "weights": _weights_fingerprint(model), "data": corpus.fingerprint}
        identity = json.loads(json.dumps({**identity, **options, "texts": len(items)}, default=str))
    folder = None if out is None else Path(out)
    with opened_run(folder, identity) if folder is not None and rank == 0 else nullcontext():
        if size > 1:
            gathered: list[Any] = [None] * size
            dist.all_gather_object(gathered, identity)  # also waits until the directory is there
            if any(other != identity for other in gathered):
                raise ValueError(f"model, texts or options differ between the processes: {gathered!r:.500}")

        # 3. Measure the shards of this process; those that are kept are read.
        shards = [range(first, min(first + shard, len(items))) for first in range(0, len(items), shard)]
        own = range(rank, len(shards), size)
        paths = {n: None if folder is None else folder / f"shard-{n:06d}.safetensors" for n in own}
        parts = {n: Survey.open(path) for n, path in paths.items() if path is not None and path.is_file()}
        bar = ShardProgress(
            sum(len(shards[n]) for n in own), sum(len(shards[n]) for n in parts), progress and rank == 0
        )
        try:
            with torch.no_grad(), eval_mode(model):
                for n in own:
                    if n not in parts:
                        parts[n] = corpus.measure(shards[n], measures, bar)
                        if (path := paths[n]) is not None:
                            parts[n].save(path)
        except KeyboardInterrupt:
            raise SurveyInterrupted(sum(len(shards[n]) for n in parts), bar.total, folder) from None
        finally:
            bar.close()

        # 4. Merge them in the order of the texts.
        if size > 1:
            dist.all_gather_object(gathered, parts)
            parts = {n: part for share in gathered for n, part in share.items()}
        result = parts[0]
        for n in range(1, len(shards)):
            result = result.merge(parts[n])
        if folder is not None and rank == 0:
            result.save(folder / RESULT)
    return result


def read_measures(measure: object) -> tuple[str, ...]:
    """Check the names of measures. Raises TypeError or ValueError with those there are."""
    names = (measure,) if isinstance(measure, str) else tuple(measure) if isinstance(measure, Iterable) else ()
    if not names or any(not isinstance(name, str) for name in names):
        raise TypeError(f"measure must be a name or several, of {', '.join(MEASURES)}; got {measure!r}")
    if unknown := [name for name in names if name not in MEASURES]:
        raise ValueError(f"no measure {unknown[0]!r}; there are {', '.join(MEASURES)}")
    return tuple(dict.fromkeys(names))


# -------------------------------------------------------------------------------------------------------------- result


@dataclass(frozen=True)
class HeadMean:
    """One head of a survey: its layer (number and name), mean, 95 % interval, and how many texts count."""

    layer: int
    name: str
    head: int
    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Sums over texts, (layers, heads) each, in fp64: texts that count, values, and squared distances from the mean."""

    count: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor) -> HeadSums:
        """Add up (texts, layers, heads) in the order of the texts; NaN does not count."""
        count = (~values.isnan()).sum(0)
        total = torch.zeros(values.shape[1:], dtype=torch.float64)
        squares = total.clone()
        for row in values:  # one after the other: the order of a reduction may depend on the number of threads
            total += row.nan_to_num(0.0)
        mean = total / count.clamp(min=1)
        for row in values:
            squares += (row - mean).nan_to_num(0.0).square()
        return cls(count, total, squares)

    def merge(self, other: HeadSums) -> HeadSums:
        """The sums of both (Chan, Golub and LeVeque 1983, for the squares)."""
        n, m = self.count.double(), other.count.double()
        apart = other.total / m.clamp(min=1) - self.total / n.clamp(min=1)
        between = apart.square() * n * m / (n + m).clamp(min=1)
        return HeadSums(self.count + other.count, self.total + other.total, self.squares + other.squares + between)

    @property
    def mean(self) -> Tensor:
        """Mean over texts; NaN where none counts."""
        return self.total / torch.where(self.count > 0, self.count, torch.nan)

    @property
    def error(self) -> Tensor:
        """Half the width of the 95 % confidence interval of the mean; NaN where fewer than two texts count."""
        n = self.count.double()
        variance = self.squares / torch.where(n > 1, n - 1, torch.nan)
        return student_t(n - 1) * (variance / n).sqrt()


def student_t(freedom: Tensor) -> Tensor:
    """The 0.975 quantile of Student's t: a table below 10 degrees of freedom, Cornish and Fisher's series above.

    >>> student_t(torch.tensor([1.0, 30.0, 9999.0]))
    tensor([12.7062,  2.0423,  1.9602])
    """
    nu = freedom.clamp(min=1)
    series = Z + (Z**3 + Z) / (4 * nu) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * nu**2)
    series = series + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * nu**3)
    series = series + (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / (92160 * nu**4)
    few = torch.tensor(T_OF_FEW, dtype=freedom.dtype)[nu.clamp(max=len(T_OF_FEW)).long() - 1]
    return torch.where(nu <= len(T_OF_FEW), few, series)


@dataclass(frozen=True, repr=False, eq=False)
class Survey:
    """Statistics of every head over texts: what `regard.survey` returns, and what `open` reads from its directory.

    >>> import tempfile, regard
    >>> from regard.training.tokenizers import byte_tokenizer
    >>> model = regard.build("gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=16, vocab_size=256)
    >>> model.tokenizer = byte_tokenizer()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = regard.survey(model, ["to be or not", "be to be"], "previous", out=f"{folder}/run")
    ...     regard.Survey.open(f"{folder}/run")
    Survey(previous: 1 layers, 2 texts)

    `mean`, `low`, `high`, `count` and `top` are of the only measure; of several, choose one: `result["entropy"].mean`.

    Args:
        names: of the layers, as `Capture.row_names`.
        texts: how many texts were read.
        sums: by measure.
        output_sums: by layer, for the measure "output": (heads, Dv), the sum of each text's mean output.
    """

    names: tuple[str, ...]
    texts: int
    sums: Mapping[str, HeadSums]
    output_sums: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def measures(self) -> tuple[str, ...]:
        """Their names."""
        return (*self.sums, *([OUTPUT] if self.output_sums else []))

    def __getitem__(self, measure: str) -> Survey:
        """The survey of one of several measures. Raises KeyError with those there are."""
        if measure not in self.measures:
            raise KeyError(f"no measure {measure!r} in this survey; there are {', '.join(self.measures)}")
        if measure == OUTPUT:
            return Survey(self.names, self.texts, {}, self.output_sums)
        return Survey(self.names, self.texts, {measure: self.sums[measure]})

    def _only(self) -> HeadSums:
        if len(self.sums) != 1:
            why = f"choose one, as in result[{self.measures[0]!r}].mean" if self.sums else "it has result.outputs"
            raise ValueError(f"this survey has the measures {', '.join(self.measures)}: {why}")
        return next(iter(self.sums.values()))

    @property
    def mean(self) -> Tensor:
        """(layers, heads) mean over the texts that count; NaN where none does or a layer has fewer heads."""
        return self._only().mean

    @property
    def low(self) -> Tensor:
        """(layers, heads) lower end of the 95 % confidence interval of the mean."""
        return self._only().mean - self._only().error

    @property
    def high(self) -> Tensor:
        """(layers, heads) upper end of the 95 % confidence interval of the mean."""
        return self._only().mean + self._only().error

    @property
    def count(self) -> Tensor:
        """(layers, heads) how many texts count."""
        return self._only().count

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Layer → (heads, Dv): the mean output of each head, before W_O. Raises LookupError if not surveyed."""
        if not self.output_sums:
            raise LookupError('the outputs were not surveyed: regard.survey(…, measure="output")')
        return {name: total / self.texts for name, total in self.output_sums.items()}

    def top(self, k: int = TOP) -> list[HeadMean]:
        """The k heads with the largest means."""
        sums = self._only()
        mean, error = sums.mean, sums.error
        order = mean.nan_to_num(-torch.inf).flatten().argsort(descending=True, stable=True).tolist()
        heads = []
        for layer, head in (divmod(at, mean.shape[1]) for at in order[:k]):
            m, e, n = (float(x[layer, head]) for x in (mean, error, sums.count))
            if n:
                heads.append(HeadMean(layer, self.names[layer], head, m, m - e, m + e, int(n)))
        return heads

    def merge(self, other: Survey) -> Survey:
        """The survey of the texts of both. Raises ValueError if they are of other layers or measures."""
        if (self.names, self.measures) != (other.names, other.measures):
            raise ValueError(
                f"texts ran through different layers: {', '.join(self.names)}, but {', '.join(other.names)}; "
                f"or other measures: {', '.join(self.measures)}, but {', '.join(other.measures)}"
            )
        sums = {name: one.merge(other.sums[name]) for name, one in self.sums.items()}
        outputs = {name: total + other.output_sums[name] for name, total in self.output_sums.items()}
        return Survey(self.names, self.texts + other.texts, sums, outputs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sums to a safetensors file, whole or not at all; `Survey.open` reads it."""
        tensors = {f"{part} {name}": x for name, sums in self.sums.items() for part, x in vars(sums).items()}
        tensors |= {f"{OUTPUT} {name}": total for name, total in self.output_sums.items()}
        described = {"names": self.names, "texts": self.texts, "measures": list(self.sums)}
        with atomic_file(path, "the survey") as file:
            file.write(tensor_bytes(tensors, {"survey": json.dumps(described)}))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Survey:
        """Read what `save` wrote, or the result in the directory of a finished survey.

        Raises:
            OSError: there is no such file.
            ValueError: it is damaged or no survey.
        """
        path = Path(path) / RESULT if Path(path).is_dir() else Path(path)
        try:
            file = TensorFile(path)
            described = json.loads(file.metadata["survey"])
            tensors = {name: file.view(name).clone() for name in file.entries}
            sums = {
                name: HeadSums(*(tensors[f"{part} {name}"] for part in ("count", "total", "squares")))
                for name in described["measures"]
            }
        except (TensorFileError, KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged, or no survey ({error}); delete it to measure it again") from None
        outputs = {name: tensors[f"{OUTPUT} {name}"] for name in described["names"] if f"{OUTPUT} {name}" in tensors}
        return cls(tuple(described["names"]), described["texts"], sums, outputs)

    def text(self, lang: Lang = "en", count: int = TOP, width: int | None = None) -> str:
        """A table of the strongest heads of each measure.

        Args:
            lang: "en" or "ko".
            count: heads per measure.
            width: cells of the terminal; where the table is wider, module names are left out.
        """
        lines = [translate("{texts:,} texts, {layers} layers", lang, texts=self.texts, layers=len(self.names))]
        headers = [translate(name, lang) for name in ("layer", "head", "mean", "95 % interval", "texts", "module")]
        for measure in self.sums:
            rows = []
            for h in self[measure].top(count):
                interval = "–" if isnan(h.low) else f"{h.low:.4f} … {h.high:.4f}"
                rows.append([str(h.layer), str(h.head), f"{h.mean:.4f}", interval, f"{h.count:,}", h.name])
            nothing = translate("no text has this measure", lang)
            table = tables.text(headers, rows, right=range(5)) if rows else nothing
            if rows and width is not None and max(map(tables.width, table.split("\n"))) > width:
                table = tables.text(headers[:-1], [row[:-1] for row in rows], right=range(5))
            lines += ["", measure, table]
        if self.output_sums:
            sizes = ", ".join(dict.fromkeys("×".join(map(str, t.shape)) for t in self.output_sums.values()))
            lines += [
                "",
                translate("mean outputs of each head ({sizes}): regard.Survey.open(DIR).outputs", lang, sizes=sizes),
            ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"Survey({', '.join(self.measures)}: {len(self.names)} layers, {self.texts:,} texts)"


class SurveyInterrupted(KeyboardInterrupt):
    """Ctrl-C during a survey.

    Args:
        done: texts of this process in finished shards.
        total: texts of this process.
        out: where the finished shards are, or None.
    """

    def __init__(self, done: int, total: int, out: Path | None) -> None:
        self.done, self.total, self.out = done, total, out
        kept = "nothing is kept without out=" if out is None else f"they are in {out}, and the same call resumes"
        super().__init__(f"stopped: {done:,} of {total:,} texts are in finished shards; {kept}")


# -------------------------------------------------------------------------------------------------------------- corpus


def _read_corpus(texts: Any, limit: int | None) -> tuple[Sequence[Any], tuple[str, Sequence[int]]]:
    """All texts or all inputs; and what to call them in errors, with their numbers."""
    if isinstance(texts, (str, os.PathLike)):
        path = Path(texts)
        if path.suffix not in (".txt", ".tsv", ".csv", ".jsonl"):
            raise ValueError(f"{path}: texts are read from .txt (one per line), .tsv, .csv or .jsonl (column text)")
        if path.suffix == ".txt":
            numbered = numbered_lines(path)[:limit]
            return [text for _, text in numbered], (f"{path}, line", [number for number, _ in numbered])
        rows = read_rows(path, ("text",))[:limit]
        return [row["text"] for row in rows], (f"{path}, row", range(len(rows)))
    indexed = hasattr(texts, "__getitem__") and hasattr(texts, "__len__")  # a torch Dataset has no __iter__
    if isinstance(texts, (Mapping, Tensor)) or not (indexed or isinstance(texts, Iterable)):
        raise TypeError(f"texts must be a list, a file or dicts of inputs, got {type(texts).__name__}")
    items = texts if indexed else list(texts)
    items = items if limit is None else [items[n] for n in range(min(limit, len(items)))]
    if not len(items):
        raise ValueError("there are no texts: the list is empty")
    return items, ("text", range(len(items)))


@dataclass(frozen=True, eq=False)
class TextCorpus:
    """Texts for a model of regard. They run without padding: those of equal length together."""

    model: TextModel | EncoderDecoder
    texts: Sequence[str]
    lines: tuple[str, Sequence[int]]  # what to call a text in errors, with its number
    lengths: Sequence[int]  # in tokens, cut ones too
    fingerprint: str  # of all token ids: the same texts under another tokenizer are others
    batch_size: int

    @classmethod
    def encode(
        cls,
        model: nn.Module,
        texts: Sequence[Any],
        lines: tuple[str, Sequence[int]],
        batch_size: int,
        length: int | None,
    ) -> TextCorpus:
        """Count the tokens of all texts, before the model runs. Raises for what the model cannot read."""
        if not isinstance(model, (TextModel, EncoderDecoder)):
            name = model.family.title if isinstance(model, Model) else type(model).__name__
            raise TypeError(f"{name} reads no texts here: give dicts of its inputs, such as {{'input_ids': tensor}}")
        most = model.max_text_positions
        if length is not None and most is not None and length > most:
            raise ValueError(f"length={length} is more than the {most} positions of the model")
        where, numbers = lines
        for text, number in zip(texts, numbers, strict=True):
            if not isinstance(text, str):
                raise TypeError(f"{where} {number} must be a text as the first one is, got {type(text).__name__}")
            if not text.strip():
                raise ValueError(f"{where} {number} is empty: leave it out")
        digest, lengths = hashlib.sha256(), list[int]()
        for first in range(0, len(texts), ENCODED_AT_ONCE):
            batch = model.tokenizer.batch(texts[first : first + ENCODED_AT_ONCE])
            counts: list[int] = batch.attention_mask.sum(1).tolist()
            for number, count in zip(numbers[first : first + ENCODED_AT_ONCE], counts, strict=True):
                if count == 0:
                    raise ValueError(f"{where} {number} has no token: leave it out")
                if most is not None and count > most and length is None:
                    raise ValueError(
                        f"{where} {number} has {count} tokens, and the model takes {most}: "
                        f"shorten it, or cut all texts with length={most}"
                    )
            lengths += [count if length is None else min(count, length) for count in counts]
            digest.update(json.dumps(counts).encode() + batch.input_ids[batch.attention_mask].numpy().tobytes())
        return cls(model, texts, lines, lengths, digest.hexdigest()[:16], batch_size)

    def measure(self, shard: range, measures: Sequence[str], bar: ShardProgress) -> Survey:
        """The survey of some of the texts."""
        measured = ShardValues(len(shard))
        for numbers in self.batches(shard):
            length = self.lengths[numbers[0]]
            batch = self.model.tokenizer.batch([self.texts[n] for n in numbers], length=length, truncate=True)
            assert bool(batch.attention_mask.all())
            batch = batch.to(self.model.device)
            words = [self.model.tokenizer.tokens(row) for row in batch.input_ids]
            with watch(self.model, **_watch_options(measures), tokens=words) as seen:
                if isinstance(self.model, EncoderDecoder):
                    start = torch.full((len(numbers), 1), self.model.start, device=self.model.device)
                    self.model(batch.input_ids, decoder_input_ids=start)
                else:
                    self.model(batch.input_ids)
            where, lines = self.lines
            names = [f"{where} {lines[n]}" for n in numbers]
            measured.add([n - shard.start for n in numbers], names, _runs(seen), measures)
            bar.update(len(numbers))
        return measured.survey(measures)

    def batches(self, shard: range) -> Iterator[list[int]]:
        """The texts of a shard by their length, at most `batch_size` together."""
        groups: dict[int, list[int]] = {}
        for n in shard:
            groups.setdefault(self.lengths[n], []).append(n)
        for _, numbers in sorted(groups.items()):
            for first in range(0, len(numbers), self.batch_size):
                yield numbers[first : first + self.batch_size]


@dataclass(frozen=True, eq=False)
class InputCorpus:
    """Inputs of any model, each a call. The batch rows of an input are texts."""

    model: nn.Module
    items: Sequence[Mapping[str, Any]]
    run: Callable[[Any], object] | None

    @cached_property
    def fingerprint(self) -> str:
        """Of all inputs, and the name of what runs them."""
        run = "" if self.run is None else getattr(self.run, "__qualname__", type(self.run).__qualname__)
        return fingerprint([*(self.items[n] for n in range(len(self.items))), run])

    def measure(self, shard: range, measures: Sequence[str], bar: ShardProgress) -> Survey:
        """The survey of some of the inputs."""
        measured = ShardValues(0)
        for n in shard:
            inputs = self.items[n]
            if not isinstance(inputs, Mapping):
                raise TypeError(f"input {n} must be a dict of tensors, got {type(inputs).__name__}")
            tensors = [x for x in inputs.values() if isinstance(x, Tensor) and x.ndim]
            ids = inputs.get("input_ids")
            rows = len(ids) if ids is not None else len(tensors[0]) if tensors else 1
            with watch(self.model, **_watch_options(measures), tokens=ids) as seen:
                self.model(**inputs) if self.run is None else self.run(inputs)
            names = [f"input {n}" if rows == 1 else f"input {n}, row {row}" for row in range(rows)]
            measured.add(range(measured.texts, measured.texts + rows), names, _runs(seen), measures)
            bar.update(1)
        return measured.survey(measures)


# ------------------------------------------------------------------------------------------------------- texts → values


def _watch_options(measures: Sequence[str]) -> dict[str, Any]:
    wanted = [name for name in measures if name in PER_QUERY and name != "lse"]  # which every view has
    wanted += ["patterns"] if any(name in PATTERNS for name in measures) else []
    return {"measures": wanted, "keep": OUTPUT if OUTPUT in measures else None, "device": "cpu"}


def _runs(seen: Capture) -> list[ModuleRun]:
    if not seen.names:
        seen[0]  # raises LookupError with the reasons
    return seen.runs()


class ShardValues:
    """One number per measure, text, layer and head of a shard; NaN where a text does not count."""

    def __init__(self, texts: int) -> None:
        self.texts = texts
        self.names: tuple[str, ...] = ()
        self.rows: dict[int, dict[str, list[Tensor]]] = {}  # text → measure → (heads,) or (heads, Dv) by layer

    def add(
        self, numbers: Sequence[int], called: Sequence[str], runs: Sequence[ModuleRun], measures: Sequence[str]
    ) -> None:
        """Take the values of the texts that ran together, by their numbers in the shard.

        called: what to call them in errors.
        """
        names = tuple(run.name for run in runs)
        self.names = self.names or names
        if names != self.names:
            raise ValueError(
                f"{called[0]} ran through the layers {', '.join(names)}, others through {', '.join(self.names)}: "
                "a survey needs the same layers for all texts"
            )
        self.texts = max(self.texts, *(n + 1 for n in numbers))
        for measure in measures:
            layers: list[Tensor] = []
            lacking: list[LookupError] = []  # of layers without the measure
            for run in runs:
                try:
                    layers.append(_of_texts(run, measure, len(numbers)))
                except LookupError as problem:
                    if measure == OUTPUT:
                        raise
                    lacking.append(problem)
                    layers.append(torch.full((len(numbers), run.view.sizes[1]), torch.nan, dtype=torch.float64))
                if bool(layers[-1].isinf().any()):
                    at = int(layers[-1].isinf().flatten(1).any(1).long().argmax())
                    raise FloatingPointError(
                        f"{called[at]} gives a {measure} that is NaN or infinite in {run.name}; "
                        "regard.watch(model) and capture.doctor() on that text say where it begins"
                    )
            if len(lacking) == len(runs) and measure != "delimiter":
                raise lacking[0]
            for row, n in enumerate(numbers):
                self.rows.setdefault(n, {})[measure] = [layer[row] for layer in layers]

    def survey(self, measures: Sequence[str]) -> Survey:
        """Add up, in the order of the texts."""
        texts = [self.rows[n] for n in range(self.texts)]
        sums = {}
        for measure in measures:
            if measure != OUTPUT:
                layers = [torch.stack([text[measure][n] for text in texts]) for n in range(len(self.names))]
                heads = max(layer.shape[1] for layer in layers)
                padded = [
                    torch.nn.functional.pad(layer, (0, heads - layer.shape[1]), value=torch.nan) for layer in layers
                ]
                sums[measure] = HeadSums.of(torch.stack(padded, 1))  # (texts, layers, heads)
        outputs = {}
        if OUTPUT in measures:
            for n, name in enumerate(self.names):
                outputs[name] = torch.zeros_like(texts[0][OUTPUT][n])
                for text in texts:
                    outputs[name] += text[OUTPUT][n]
        return Survey(self.names, self.texts, sums, outputs)


def _of_texts(run: ModuleRun, measure: str, texts: int) -> Tensor:
    """(texts, heads), or (texts, heads, Dv) for outputs; NaN where a text does not count, Inf for NaN and Inf.

    A batch row is a text; where there are several rows for each, as windows of an image, the mean of those that count.
    Raises LookupError for a layer without the measure.
    """
    view = run.view
    if view.sizes[0] % texts:
        raise ValueError(f"{run.name} ran on {view.sizes[0]} batch rows for {texts} texts: give one text at a time")
    if measure == OUTPUT:
        values, counts = _mean_output(run), torch.ones(view.sizes[0], dtype=torch.bool)
    else:
        values, counts = view.per_head(measure), _counts(view, measure)  # (B, H), (B,)
    values = values.detach().cpu().double()
    values = torch.where(values.isfinite(), values, torch.inf)
    values = values.masked_fill(~counts.view(-1, *[1] * (values.ndim - 1)), torch.nan)
    grouped: Tensor = values.reshape(texts, -1, *values.shape[1:]).nanmean(1)
    return grouped


def _mean_output(run: ModuleRun) -> Tensor:
    """(B, H, Dv) the mean output over the queries that are no padding."""
    view = run.view
    output = view.output.cpu().double()
    if output.ndim != 4 or output.shape[:3] != view.sizes[:3]:
        raise LookupError(
            f"the output of {run.name} has the shape {tuple(output.shape)}, in which the heads cannot be separated"
        )
    real = torch.ones(output.shape[0], output.shape[2], dtype=torch.bool)
    padding = view.place.padding
    if padding is not None and view.kind == "self" and view.sizes[2] == view.sizes[3]:
        real = ~padding.cpu().expand_as(real)
    weight = real[:, None, :, None].double()
    mean: Tensor = (output * weight).sum(2) / weight.sum(2).clamp(min=1)
    return mean


def _counts(view: View, measure: str) -> Tensor:
    """(B,) whether the measure has a meaning for a batch row."""
    batch, _, _, nk = view.sizes
    padding = view.place.padding
    real = torch.ones(batch, nk, dtype=torch.bool) if padding is None else ~padding.cpu().expand(batch, nk)
    if measure in ("previous", "next", "neighbours", "uniform"):
        return real.sum(1) >= 2
    if measure in ("same token", "induction"):
        assert view.tokens.ids is not None
        ids = torch.where(real, view.tokens.ids.cpu().expand(batch, nk), -1 - torch.arange(nk))
        ordered = ids.sort(1).values
        return (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if measure == "delimiter":
        assert view.tokens.delimiters is not None
        later = real & (real.cumsum(1) > 1)  # the first token is none
        return (view.tokens.delimiters.cpu().expand(batch, nk) & later).any(1)
    return torch.ones(batch, dtype=torch.bool)


# ------------------------------------------------------------------------------------------------- identity, progress


def _weights_fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(raw_bytes(value))
    return digest.hexdigest()[:16]


class ShardProgress:
    """A bar on stderr with texts per second and the time left; nothing if that is not a terminal."""

    def __init__(self, total: int, done: int, show: bool) -> None:
        self.total, self.start, self.done = total, done, done
        self.show = show and sys.stderr.isatty()
        self.began = time.perf_counter()

    def update(self, more: int) -> None:
        """Count texts."""
        self.done += more
        if self.show:
            speed = (self.done - self.start) / max(time.perf_counter() - self.began, 1e-9)
            minutes, seconds = divmod(int((self.total - self.done) / speed), 60)
            filled = 20 * self.done // self.total
            text = f"{self.done:,}/{self.total:,} texts  {speed:.1f}/s  {minutes}:{seconds:02d} left"
            print(f"\r[{'━' * filled}{' ' * (20 - filled)}] {text}\x1b[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar's line."""
        if self.show:
            print(file=sys.stderr)
