"""`regard.verify`: compare a checkpoint in regard with the same checkpoint in transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.generation.loop import generate
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.family import GENERATION_TASKS
from regard.models.image_text import Answerer, Captioner
from regard.models.loading import load
from regard.models.model import Model
from regard.models.text import TextModel
from regard.nn.blocks import LanguageHead
from regard.parity.certificate import Certificate, Line, TensorPlace
from regard.parity.passes import (
    VISUAL,
    Inputs,
    Tensors,
    has_tokenizer,
    longest_dense,
    our_pass,
    pad_id,
    text_inputs,
    their_pass,
    visual_inputs,
    wants_question,
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
    run = _VerificationRun(ours, inputs, dtype, tell)
    lines = run.lines()
    if tokenized and inputs.texts:
        lines = (_token_line(ours, sentences), *lines)
    return Certificate(
        model=str(directory if isinstance(path_or_model, Model) else path_or_model),
        architecture=run.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=str(ours.device),
        versions={"transformers": _transformers().__version__, "torch": torch.__version__},
        texts=inputs.texts,
        tokens=inputs.tokens,
        random_ids=drawn and inputs.texts > 0,
        new_tokens=run.new_tokens,
        narrow=run.narrow,
        lines=lines,
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


class _VerificationRun:
    """Both models on the same ids or pixels."""

    def __init__(self, ours: Model, inputs: Inputs, dtype: torch.dtype, tell: Callable[[Stage], None]) -> None:
        self.ours, self.inputs, self.dtype, self.tell = ours, inputs, dtype, tell
        self.architecture = ours.family.tasks[ours.task].architecture
        self.pad = 0 if isinstance(ours, VISUAL) else pad_id(ours)  # beside images nothing asks for it
        self.narrow = False
        # How many tokens to generate: fewer where positions end, None where the model has no words to go on with.
        self.new_tokens: int | None = None
        head = ours.head if isinstance(ours, (TextModel, EncoderDecoder)) else None
        if ours.task in GENERATION_TASKS and isinstance(head, LanguageHead):
            if isinstance(ours, EncoderDecoder):
                most, taken = ours.decoder.embed.max_positions, 1
            else:
                most, taken = ours.max_text_positions, inputs.arguments["input_ids"].shape[1]
            self.new_tokens = NEW_TOKENS if most is None else max(0, min(NEW_TOKENS, most - taken))

    def lines(self) -> tuple[Line, ...]:
        """Every comparison of numbers and of generated ids, in order; in fp64 too where one fails."""
        self.tell("run ours")
        mine, my_words = our_pass(self.ours, self.inputs), self._our_words()
        coarse = torch.float32 if self.dtype == torch.float64 else self.dtype
        self.tell("load theirs")
        peer = self._peer(coarse)
        self.tell("run theirs")
        base, words = peer.run(self.inputs, self.ours), None
        if self.dtype != torch.float64:
            words = self._their_words(peer)
            peer.model.double()  # with the weights as they were rounded: the same function, exactly
        else:
            peer = self._peer(torch.float64)
        self.tell("run theirs in fp64")
        truth = peer.run(self.inputs, self.ours)
        self.narrow = peer.narrow
        words = self._their_words(peer) if words is None else words
        rule = _Rule(base, truth, coarse, self.narrow)
        lines = [*rule.lines(mine, self.dtype), *_word_lines(my_words, words)]
        if all(line.within for line in lines) or self.dtype == torch.float64:
            return tuple(lines)
        self.tell("run ours in fp64")
        self.ours.double()
        again = rule.lines(our_pass(self.ours, self.inputs), torch.float64)
        again += _word_lines(self._our_words(), self._their_words(peer))
        pairs = zip(lines, again, strict=True)
        return tuple(replace(line, wide=wide.error, wide_allowed=wide.allowed) for line, wide in pairs)

    def _peer(self, dtype: torch.dtype) -> _Peer:
        assert self.ours.directory is not None
        return _Peer(self.ours.directory, self.architecture, dtype=dtype, device=self.ours.device, pad=self.pad)

    def _our_words(self) -> Tensor | None:
        if not self.new_tokens:
            return None
        ids, mask = self.inputs.arguments["input_ids"], self.inputs.arguments["attention_mask"]
        if isinstance(self.ours, EncoderDecoder):
            begin = torch.full_like(ids[:, :1], self.ours.start)
            return generate(
                self.ours.read(ids, mask), begin, None, max_new_tokens=self.new_tokens, pad_token_id=self.pad
            ).ids
        assert isinstance(self.ours, TextModel)
        left = mask.flip(1)  # as many tokens in each row, at its end: generation pads on the left
        padded = torch.full_like(ids, self.pad).masked_scatter(left, ids[mask])
        return generate(self.ours, padded, left, max_new_tokens=self.new_tokens, pad_token_id=self.pad).ids

    def _their_words(self, peer: _Peer) -> Tensor | None:
        if not self.new_tokens:
            return None
        start = self.ours.start if isinstance(self.ours, EncoderDecoder) else None
        ids, mask = self.inputs.arguments["input_ids"], self.inputs.arguments["attention_mask"]
        return peer.greedy(ids, mask, new_tokens=self.new_tokens, pad=self.pad, start=start)


def _word_lines(ours: Tensor | None, theirs: Tensor | None) -> list[Line]:
    if ours is None or theirs is None:
        return []
    differ = int((ours != theirs).sum()) if ours.shape == theirs.shape else ours.numel()
    return [Line(TensorPlace("", None, "greedy ids"), float(differ), 0.0, 0.0)]


@dataclass(frozen=True, eq=False)
class _Rule:
    """The numeric rule against one truth.

    base: computed in dtype `coarse`.  narrow: truth has parts in fp32, so that it errs by fp32's step itself.
    """

    base: Tensors
    truth: Tensors
    coarse: torch.dtype
    narrow: bool

    def lines(self, ours: Tensors, dtype: torch.dtype) -> list[Line]:
        """Ours, computed in dtype, judged at every place, in order."""
        return [self._line(p, ours.get(p), dtype) for p in self.truth if p in ours or p.what not in MAY_BE_MISSING]

    def _line(self, place: TensorPlace, ours: Tensor | None, dtype: torch.dtype) -> Line:
        truth, base = self.truth[place], self.base[place]
        if ours is None or ours.shape != truth.shape:
            return Line(place, inf, 0.0, 0.0)
        own, floor = torch.finfo(dtype).eps, torch.finfo(torch.float32 if self.narrow else torch.float64).eps
        step = max(own, floor)
        error, baseline = largest_error(ours, truth)[0], largest_error(base, truth)[0]
        carried = baseline * step / torch.finfo(self.coarse).eps
        scale = float(truth.abs().max()) if truth.numel() else 0.0
        times = 3 if floor >= own else 2  # truth may be as far from the truth itself
        return Line(place, error, carried, times * (carried + step * scale))


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
    """A checkpoint as a model of transformers.

    architecture: its class there.  dtype: of its weights, all of them.  pad: id of padding, where config.json has none.
    narrow: whether the last pass in fp64 computed parts in fp32.
    """

    def __init__(
        self, directory: Path, architecture: str, *, dtype: torch.dtype, device: torch.device, pad: int
    ) -> None:
        with _quiet() as transformers:
            kind = getattr(transformers, architecture, None)
            if kind is None:
                raise ValueError(
                    f"transformers {transformers.__version__} has no {architecture}: there is nothing to compare with"
                )
            model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager").to(device).eval()
            self._generation_config = transformers.GenerationConfig
        for p in model.parameters():  # some are kept in fp32 (T5's in fp16): another function than all of them rounded
            p.data = p.data.to(dtype)
        if getattr(model.config, "pad_token_id", pad) is None:  # models of images have none to set
            model.config.pad_token_id = pad  # without one transformers classifies one text at a time
        self.model: Any = model
        self.narrow = False

    def run(self, inputs: Inputs, ours: Model) -> Tensors:
        """One pass, read at the places of our model."""
        with _NarrowingMode() as mode:  # type: ignore[no-untyped-call]
            tensors = their_pass(self.model, inputs, ours)
        self.narrow = mode.narrowed
        return tensors

    def greedy(self, ids: Tensor, mask: Tensor, *, new_tokens: int, pad: int, start: int | None) -> Tensor:
        """The tokens (B, new_tokens) it goes on with, whatever config files say of ending or sampling.

        Each text alone: some models of transformers count padding as positions, or fill it with NaN in fp64.
        start: what a decoder beside an encoder begins with, None without one.
        """
        plain = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        self.model.generation_config = self._generation_config(**plain, pad_token_id=pad, decoder_start_token_id=start)
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
