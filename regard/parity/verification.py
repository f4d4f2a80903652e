"""`regard.verify`: compare a checkpoint in regard with the same checkpoint in transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard import tables
from regard.generation.loop import generate
from regard.locale import Lang, translate
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.family import GENERATION_TASKS
from regard.models.image_text import Answerer, Captioner
from regard.models.loading import load
from regard.models.model import Model
from regard.models.text import TextModel
from regard.nn.blocks import LanguageHead
from regard.parity.passes import (
    VISUAL,
    Inputs,
    TensorPlace,
    Tensors,
    has_tokenizer,
    longest_dense,
    our_pass,
    pad_id,
    text_inputs,
    their_pass,
    visual_inputs,
    wants_question,
    word,
)
from regard.testing import largest_error

SENTENCES = (
    "The animal didn't cross the street because it was too tired.",
    "그 동물은 너무 피곤해서 길을 건너지 않았다.",
    "Attention weighs every word by how much it matters to the one being read.",
    "주의는 읽고 있는 단어에 얼마나 중요한지에 따라 모든 단어에 가중치를 준다.",
    "Yes.",
)
NEW_TOKENS = 20
# Ours may lack them: a checkpoint may have no pooler, some towers of ours give only what stood before the last norm.
MAY_BE_MISSING = ("pooled", "last norm")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Verdict = Literal["same", "rounding", "bug"]
GRAVITY = ("same", "rounding", "bug")
Stage = Literal["load ours", "load theirs", "run ours", "run theirs", "run theirs in fp64", "run ours in fp64"]


def verify(
    path_or_model: str | Path | Model,
    *,
    texts: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rows: int = 8,
    seed: int = 0,
    ignore: Iterable[str] = (),
    progress: Callable[[Stage], None] | None = None,
) -> Certificate:
    """Compare a checkpoint in regard with the same one in transformers, on this machine.

    >>> import regard
    >>> print(regard.verify("path/or/hub-id"))          # doctest: +SKIP

    Compared are the token ids of both tokenizers, the hidden states of every layer, attention weights of sampled rows,
    what the head gives, and 20 tokens generated greedily where the model has words. Images are drawn, and ids beside
    them; of models that read both, generated text and weights are not compared. The certificate says so.

    Args:
        path_or_model: a directory, a hub id, or a model of `regard.load`, which is copied and stays as it is.
        texts: to compare with; default five sentences in English and Korean, without a tokenizer ids that are drawn,
            and in models of long texts (Longformer, BigBird) ids enough for their attention to be sparse.
        dtype: of the weights and of both computations.
        device: where both run.
        rows: how many queries' attention weights are compared, in every layer.
        seed: of what is drawn.
        ignore: keys of its files that you know to change nothing, as in `regard.load`.
        progress: called with each stage as it begins.

    Raises:
        ImportError: transformers is not installed.
        ValueError: texts that are empty, longer than the model, without a tokenizer, or for a model of images or
            questions; a model that has no directory or is narrower than dtype; keys to ignore beside a loaded model;
            a family that transformers does not have; and as `regard.load`.
    """
    # 1. Check the arguments, load our model.
    _transformers()
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATS))}, got {dtype}")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"rows must be a whole number of at least 1, got {rows!r}")
    if texts is not None and (isinstance(texts, str) or not isinstance(texts, Sequence)):
        raise TypeError(f"texts must be a list of texts, got {type(texts).__name__}: {texts!r:.60}")
    if texts is not None and not texts:
        raise ValueError("texts is empty: give at least one, or leave it out for sentences of our own")
    tell = progress if progress is not None else lambda stage: None
    tell("load ours")
    ours = _load_ours(path_or_model, dtype, device, ignore)
    directory = ours.directory
    assert directory is not None

    # 2. Draw or encode what both models get.
    visual, tokenized = isinstance(ours, VISUAL), has_tokenizer(directory)
    if texts is not None:
        if visual:
            raise ValueError(f"what {ours.family.title} is compared with is drawn, texts and images: leave out texts")
        if wants_question(ours):
            raise ValueError(
                f"{ours.family.title} with task 'question-answering' reads a question before each text: leave out "
                "texts, and ids are drawn"
            )
        if not tokenized:
            raise ValueError(f"{directory} holds no tokenizer for texts: leave them out, and ids are drawn")
    sentences = SENTENCES if texts is None else texts
    drawn = not tokenized or visual or (texts is None and longest_dense(ours) > 0)
    if visual:
        inputs = visual_inputs(ours, rows, seed)
    else:
        inputs = text_inputs(ours, None if drawn else sentences, texts is None, rows, seed)

    # 3. Run both.
    new_tokens = _new_tokens(ours, inputs)
    lines, narrow = _compare(ours, inputs, dtype, new_tokens, tell)
    if tokenized and inputs.texts:
        lines = [_token_line(ours, sentences), *lines]
    return Certificate(
        model=str(directory if isinstance(path_or_model, Model) else path_or_model),
        architecture=ours.family.tasks[ours.task].architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=str(ours.device),
        versions={"transformers": _transformers().__version__, "torch": torch.__version__},
        texts=inputs.texts,
        tokens=inputs.tokens,
        random_ids=drawn and inputs.texts > 0,
        new_tokens=new_tokens,
        narrow=narrow,
        lines=tuple(lines),
        pictures=inputs.pictures,
        not_compared=_not_compared(ours, lines),
    )


def _load_ours(
    path_or_model: str | Path | Model, dtype: torch.dtype, device: torch.device | str, ignore: Iterable[str]
) -> Model:
    """Our model, ours alone: it will be changed."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"there is no device {device!r}; it is 'cpu', 'cuda', 'cuda:1' and the like") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} is asked for, and torch finds no CUDA device here")
    if not isinstance(path_or_model, Model):
        return load(path_or_model, dtype=dtype, device=place, ignore=ignore)
    if named := tuple(ignore):
        raise ValueError(
            f"ignore={list(named)} is for a checkpoint, and this model is loaded: give regard.load ignore="
        )
    if path_or_model.directory is None:
        raise ValueError("this model was not loaded from a directory, so there is no checkpoint to compare it with")
    if torch.finfo(path_or_model.dtype).eps > torch.finfo(dtype).eps:
        raise ValueError(
            f"the model is {path_or_model.dtype}, and has lost what {dtype} would hold: ask for "
            f"dtype={path_or_model.dtype}, or load it in {dtype}"
        )
    return deepcopy(path_or_model).to(device=place, dtype=dtype).eval()


def _token_line(ours: Model, sentences: Sequence[str]) -> Line:
    """How many ids differ between both tokenizers; one that is missing differs."""
    with _quiet() as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(ours.directory)
        theirs = [list(tokenizer(text)["input_ids"]) for text in sentences]
    differ = 0
    for text, their_ids in zip(sentences, theirs, strict=True):
        our_ids = ours.tokenizer.encode(text).ids
        differ += abs(len(our_ids) - len(their_ids)) + sum(a != b for a, b in zip(our_ids, their_ids, strict=False))
    return Line(TensorPlace("", None, "token ids"), float(differ), 0.0, 0.0)


def _not_compared(ours: Model, lines: Sequence[Line]) -> tuple[str, ...]:
    """What a model computes and no line is about: weights of some layer, and what it writes beside images."""
    layers: dict[str, set[tuple[str, int | None]]] = {"attention weights": set(), "hidden states": set()}
    for line in lines:
        layers.get(line.place.what, set()).add((line.place.part, line.place.layer))
    weights = [] if layers["attention weights"] == layers["hidden states"] else ["attention weights"]
    writes = isinstance(ours, (Captioner, Answerer)) or ours.task == "image-text-to-text"
    return (*weights, *(["greedy ids"] if writes else []))


def _new_tokens(ours: Model, inputs: Inputs) -> int | None:
    """How many tokens to generate: fewer where positions end, None where the model has no words to go on with."""
    head = ours.head if isinstance(ours, (TextModel, EncoderDecoder)) else None
    if ours.task not in GENERATION_TASKS or not isinstance(head, LanguageHead):
        return None
    if isinstance(ours, EncoderDecoder):
        most, taken = ours.decoder.embed.max_positions, 1
    else:
        most, taken = ours.max_text_positions, inputs.arguments["input_ids"].shape[1]
    return NEW_TOKENS if most is None else max(0, min(NEW_TOKENS, most - taken))


def _compare(
    ours: Model, inputs: Inputs, dtype: torch.dtype, new_tokens: int | None, tell: Callable[[Stage], None]
) -> tuple[list[Line], bool]:
    """Every comparison of numbers and of generated ids, in order; in fp64 too where one fails.

    And whether transformers' pass in fp64 computed parts in fp32.
    """
    tell("run ours")
    mine, my_words = our_pass(ours, inputs), _our_words(ours, inputs, new_tokens)
    coarse = torch.float32 if dtype == torch.float64 else dtype
    tell("load theirs")
    peer = _Peer(ours, coarse)
    tell("run theirs")
    base = peer.run(inputs)
    if dtype == torch.float64:
        peer = _Peer(ours, torch.float64)
        words = peer.words(inputs, new_tokens)
    else:
        words = peer.words(inputs, new_tokens)
        peer.model.double()  # with the weights as they were rounded: the same function, exactly
    tell("run theirs in fp64")
    truth = peer.run(inputs)
    narrow = peer.narrow

    def judge(tensors: Tensors, own: torch.dtype) -> list[Line]:
        """Ours, computed in dtype `own`, by the numeric rule at every place, in order."""
        # Parts in fp32 make truth err by fp32's step itself.
        floor = torch.finfo(torch.float32 if narrow else torch.float64).eps
        step, times = max(torch.finfo(own).eps, floor), 3 if floor >= torch.finfo(own).eps else 2
        lines = []
        for place, wanted in truth.items():
            got = tensors.get(place)
            if got is None and place.what in MAY_BE_MISSING:
                continue
            if got is None or got.shape != wanted.shape:
                lines.append(Line(place, inf, 0.0, 0.0))
                continue
            carried = largest_error(base[place], wanted)[0] * step / torch.finfo(coarse).eps
            scale = float(wanted.abs().max()) if wanted.numel() else 0.0
            error = largest_error(got, wanted)[0]
            lines.append(Line(place, error, carried, times * (carried + step * scale)))
        return lines

    lines = [*judge(mine, dtype), *_word_lines(my_words, words)]
    if all(line.within for line in lines) or dtype == torch.float64:
        return lines, narrow
    tell("run ours in fp64")
    ours.double()
    again = judge(our_pass(ours, inputs), torch.float64)
    again += _word_lines(_our_words(ours, inputs, new_tokens), peer.words(inputs, new_tokens))
    pairs = zip(lines, again, strict=True)
    return [replace(line, wide=wide.error, wide_allowed=wide.allowed) for line, wide in pairs], narrow


def _our_words(ours: Model, inputs: Inputs, new_tokens: int | None) -> Tensor | None:
    if not new_tokens:
        return None
    ids, mask, pad = inputs.arguments["input_ids"], inputs.arguments["attention_mask"], pad_id(ours)
    if isinstance(ours, EncoderDecoder):
        begin = torch.full_like(ids[:, :1], ours.start)
        return generate(ours.read(ids, mask), begin, None, max_new_tokens=new_tokens, pad_token_id=pad).ids
    assert isinstance(ours, TextModel)
    left = mask.flip(1)  # as many tokens in each row, at its end: generation pads on the left
    padded = torch.full_like(ids, pad).masked_scatter(left, ids[mask])
    return generate(ours, padded, left, max_new_tokens=new_tokens, pad_token_id=pad).ids


def _word_lines(ours: Tensor | None, theirs: Tensor | None) -> list[Line]:
    if ours is None or theirs is None:
        return []
    differ = int((ours != theirs).sum()) if ours.shape == theirs.shape else ours.numel()
    return [Line(TensorPlace("", None, "greedy ids"), float(differ), 0.0, 0.0)]


# -------------------------------------------------------------------------------------------------------- transformers


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("verify compares with transformers, which is not here: pip install transformers") from error
    assert isinstance(transformers, ModuleType)
    return transformers


@contextmanager
def _quiet() -> Iterator[Any]:
    """transformers, without its progress bars and warnings inside; as before afterwards."""
    transformers = _transformers()
    logging = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class _Peer:
    """The checkpoint of our model as a model of transformers, all of its weights in one dtype.

    narrow: whether the last pass in fp64 computed parts in fp32.
    """

    def __init__(self, ours: Model, dtype: torch.dtype) -> None:
        self.ours, self.narrow = ours, False
        self.pad = 0 if isinstance(ours, VISUAL) else pad_id(ours)  # beside images nothing asks for it
        architecture = ours.family.tasks[ours.task].architecture
        with _quiet() as transformers:
            kind = getattr(transformers, architecture, None)
            if kind is None:
                raise ValueError(
                    f"transformers {transformers.__version__} has no {architecture}: there is nothing to compare with"
                )
            model = kind.from_pretrained(ours.directory, dtype=dtype, attn_implementation="eager")
            self.generation_config = transformers.GenerationConfig
        model = model.to(ours.device).eval()
        for p in model.parameters():  # some are kept in fp32 (T5's in fp16): another function than all of them rounded
            p.data = p.data.to(dtype)
        if getattr(model.config, "pad_token_id", self.pad) is None:  # models of images have none to set
            model.config.pad_token_id = self.pad  # without one transformers classifies one text at a time
        self.model: Any = model

    def run(self, inputs: Inputs) -> Tensors:
        """One pass, read at the places of our model."""
        with _NarrowingMode() as mode:  # type: ignore[no-untyped-call]
            tensors = their_pass(self.model, inputs, self.ours)
        self.narrow = mode.narrowed
        return tensors

    def words(self, inputs: Inputs, new_tokens: int | None) -> Tensor | None:
        """The tokens (B, new_tokens) it goes on with, whatever config files say of ending or sampling.

        Each text alone: some models of transformers count padding as positions, or fill it with NaN in fp64.
        """
        if not new_tokens:
            return None
        start = self.ours.start if isinstance(self.ours, EncoderDecoder) else None  # what the decoder begins with
        plain = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        self.model.generation_config = self.generation_config(
            **plain, pad_token_id=self.pad, decoder_start_token_id=start
        )
        ids, mask = inputs.arguments["input_ids"], inputs.arguments["attention_mask"]
        with torch.inference_mode(), _quiet():
            texts = [one[tokens].unsqueeze(0) for one, tokens in zip(ids, mask, strict=True)]
            outputs = [self.model.generate(input_ids=x, attention_mask=torch.ones_like(x)) for x in texts]
        return torch.cat([x[:, -new_tokens:] for x in outputs])


class _NarrowingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation on fp64 gave fp32: transformers' own casts of norms, softmax and rotary angles."""

    narrowed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            wide = (a for a in args if isinstance(a, Tensor) and a.dtype == torch.float64)
            self.narrowed = self.narrowed or next(wide, None) is not None
        return out


# ------------------------------------------------------------------------------------------------------ the certificate


@dataclass(frozen=True)
class Line:
    """One comparison: the largest error of ours and of the baseline against the truth.

    error, baseline, allowed: in the dtype of the certificate. For ids, how many differ, of which none may.
    wide, wide_allowed: the same in fp64, where something failed and all was run again; else None.
    """

    place: TensorPlace
    error: float
    baseline: float
    allowed: float
    wide: float | None = None
    wide_allowed: float | None = None

    @property
    def within(self) -> bool:
        """Whether it obeys the rule in the certificate's dtype."""
        return isfinite(self.error) and self.error <= self.allowed

    @property
    def verdict(self) -> Verdict:
        """Same; rounding, where it fails but not in fp64; bug, where it fails in fp64."""
        if self.wide is None or self.wide_allowed is None:
            return "same" if self.within else "bug"
        if not (isfinite(self.wide) and self.wide <= self.wide_allowed):
            return "bug"
        return "same" if self.within else "rounding"

    @property
    def share(self) -> float:
        """How much of what is allowed the error takes; above 1 is too much."""
        return self.error / self.allowed if self.allowed else (inf if self.error else 0.0)


@dataclass(frozen=True, repr=False)
class Certificate:
    """Does regard compute what transformers computes with this checkpoint? True if so; prints as a verdict and a table.

    model: the checkpoint.  architecture: the class of transformers it was compared with.
    dtype, device, versions: in what, where and with which libraries.  texts, tokens: how many were compared.
    random_ids: there was no tokenizer, so ids were drawn.  new_tokens: how many were generated; None without words.
    narrow: transformers computes parts of this model in fp32 even when it is in fp64.
    lines: every comparison, in the order of the computation.
    pictures: how many were compared; their pixels are drawn, and the ids of texts beside them.
    not_compared: what this kind of model makes and no line is about.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    versions: dict[str, str]
    texts: int
    tokens: int
    random_ids: bool
    new_tokens: int | None
    narrow: bool
    lines: tuple[Line, ...]
    pictures: int = 0
    not_compared: tuple[str, ...] = ()

    @property
    def result(self) -> Verdict:
        """The gravest verdict of the lines."""
        return max((line.verdict for line in self.lines), key=GRAVITY.index, default="same")

    @property
    def passed(self) -> bool:
        """Whether both compute the same function; rounding beyond the rule is no other function."""
        return self.result != "bug"

    @property
    def first(self) -> Line | None:
        """The first line, in the order of the computation, that is what the result says; None if all is the same."""
        return next((line for line in self.lines if line.verdict == self.result != "same"), None)

    @property
    def verdict(self) -> str:
        """One line."""
        return self._verdict("en")

    def text(self, lang: Lang = "en") -> str:
        """Verdict, table and notes: of each kind of comparison the line that takes most of its allowance.

        Args:
            lang: "en" or "ko".
        """
        about = f"{self.model}, {self.architecture}, {self.dtype}, {self.device}"
        return "\n".join([self._verdict(lang), "", about, "", self._table(lang), "", *self._notes(lang)])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, every line among them; an error that is not finite is one of "inf" and "nan"."""
        lines = []
        for line in self.lines:
            numbers = {name: value for name, value in vars(line).items() if name != "place"}
            finite = {n: str(v) if isinstance(v, float) and not isfinite(v) else v for n, v in numbers.items()}
            lines.append({**line.place._asdict(), **finite, "verdict": line.verdict})
        plain = {name: value for name, value in vars(self).items() if name != "lines"}
        plain["not_compared"] = list(self.not_compared)
        return {"verdict": self.verdict, "result": self.result, "passed": self.passed, **plain, "lines": lines}

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _verdict(self, lang: Lang) -> str:
        if self.first is None:
            return translate(
                "same: {count} comparisons with transformers {version} in {dtype}, all within the numeric rule",
                lang,
                count=len(self.lines),
                version=self.versions["transformers"],
                dtype=self.dtype,
            )
        where = self.first.place.text(lang)
        if self.result == "bug":
            return translate("bug: first in {where}", lang, where=where)
        return translate(
            "rounding: more than the rule allows in {dtype}, first in {where}; in fp64 the gap is gone",
            lang,
            dtype=self.dtype,
            where=where,
        )

    def _table(self, lang: Lang) -> str:
        # 1. Of each kind the first line with its gravest verdict; of those that are the same, the tightest.
        kinds: dict[tuple[str, str], list[Line]] = {}
        for line in self.lines:
            kinds.setdefault((line.place.part, line.place.what), []).append(line)

        def rank(line: Line) -> tuple[int, float]:
            return GRAVITY.index(line.verdict), line.share if line.verdict == "same" else 0.0

        # 2. A row for each kind.
        wide = any(line.wide is not None for line in self.lines)
        headers = ["compared", "where", "our error", "theirs", "allowed"]
        headers += ["in fp64", "allowed there"] if wide else []
        rows = []
        for (part, what), lines in kinds.items():
            line = max(lines, key=rank)
            layer, where = line.place.layer, ""
            if layer is not None:
                where = translate("layer {index} of {layers}", lang, index=layer, layers=len(lines))
            name = " ".join(filter(None, (word(part, lang), word(what, lang))))
            numbers = [line.error, line.baseline, line.allowed, *([line.wide, line.wide_allowed] if wide else [])]
            texts = ["–" if value is None else tables.number(value) for value in numbers]
            rows.append([name, where, *texts, word(line.verdict, lang)])
        columns = [translate(header, lang) for header in [*headers, "verdict"]]
        return tables.text(columns, rows, right=range(2, len(columns) - 1))

    def _notes(self, lang: Lang) -> list[str]:
        counts = []
        if self.pictures:
            counts.append(translate("{pictures} pictures", lang, pictures=self.pictures))
        if self.texts:
            counts.append(translate("{texts} texts, {tokens} tokens", lang, texts=self.texts, tokens=self.tokens))
        rule = translate(
            "Error: the largest difference from transformers in fp64; "
            "allowed: 2 · (theirs + one rounding step), 3 · where fp64 itself rounds as much.",
            lang,
        )
        notes = [f"{', '.join(counts)}. {rule}"]
        drawn = ""  # what was drawn rather than read
        if self.pictures:
            drawn = "Pixels and ids were drawn." if self.texts else "Pixels were drawn."
        elif self.random_ids:
            tokenized = any(line.place.what == "token ids" for line in self.lines)
            drawn = "Ids were drawn." if tokenized else "No tokenizer: ids were drawn."
        if drawn:
            notes.append(translate(drawn, lang))
        if self.not_compared:
            names = ", ".join(word(what, lang) for what in self.not_compared)
            notes.append(translate("Not compared: {names}.", lang, names=names))
        if self.new_tokens == 0:
            notes.append(translate("No room to generate: the texts take all positions.", lang))
        if self.narrow:
            narrow = (
                "transformers computes parts of this model in fp32 even in fp64 (norms, softmax or angles): "
                "there the difference can only fall to fp32's rounding step."
            )
            notes.append(translate(narrow, lang))
        return notes
