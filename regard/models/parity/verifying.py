"""The parity certificate: does regard compute what `transformers` computes with this checkpoint, here, in this dtype?

    >>> print(regard.verify("sentence-transformers/all-MiniLM-L6-v2").verdict)       # doctest: +SKIP
    same: 15 comparisons with transformers 5.22.2 in float32, all within the numeric rule

The numeric rule (regard/testing.py) with truth = transformers in fp64 and baseline = transformers in this dtype, both
with the same rounded weights, so that all compute one function. Where a line fails, regard runs again in fp64: a gap
that shrinks with the rounding step is rounding, one that stays is a bug. Two things need saying:
- transformers computes norms, softmax and rotary angles of some models in fp32 even in fp64. There truth errs as much
  as fp32 does: what is allowed is 3 instead of 2 times, and the gap in fp64 may stay at fp32's step.
- In fp64 truth and baseline would be one computation. There the baseline's error is the one it makes in fp32, scaled by
  the ratio of the two rounding steps, and likewise for the second run of the other dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from regard.models.encoder_decoder import EncoderDecoder
from regard.models.generation.generating import generate
from regard.models.heads import LanguageHead
from regard.models.loading import load
from regard.models.model import Model
from regard.models.parity.certificate import Certificate, Line, Place
from regard.models.parity.passes import Given, Made, of_ours, of_theirs
from regard.models.parity.peers import Peer, library, token_ids
from regard.models.parity.picture_inputs import Shown, draw_shown, sees_pictures
from regard.models.parity.picture_passes import of_ours_seeing, reader_of
from regard.models.parity.text_inputs import draws, has_tokenizer, pad_of, padded_left, text_inputs
from regard.models.picture_text_model import Answerer, Captioner
from regard.models.text_model import TextModel
from regard.models.verbs.asking import positions
from regard.testing import largest_error

__all__ = ["SENTENCES", "Stage", "verify"]

SENTENCES = (
    "The animal didn't cross the street because it was too tired.",
    "그 동물은 너무 피곤해서 길을 건너지 않았다.",
    "Attention weighs every word by how much it matters to the one being read.",
    "주의는 읽고 있는 단어에 얼마나 중요한지에 따라 모든 단어에 가중치를 준다.",
    "Yes.",
)
NEW_TOKENS = 20
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
    what the head gives, and 20 tokens generated greedily where the model has words. Pictures are drawn, and ids beside
    them; of models that read both, what is written and the weights are not compared. The certificate says so.

    path_or_model: a directory, a hub id, or a model of `regard.load`, which is copied and stays as it is.
    texts: to compare with; default five sentences in English and Korean, without a tokenizer ids that are drawn, and
      in models of long texts (Longformer, BigBird) ids enough for their attention to be sparse.
    dtype: of the weights and of both computations.  device: where both run.
    rows: how many queries' attention weights are compared, in every layer.  seed: of what is drawn.
    ignore: keys of its files that you know to change nothing, as in `regard.load`, which a model has been told.
    progress: called with each stage as it begins.

    Raises ImportError without transformers; ValueError for texts that are empty, longer than the model, that have no
    tokenizer or are for a model of pictures or of questions, a model that has no directory or is narrower than dtype,
    keys to ignore beside a model, a family that transformers does not have, and whatever `regard.load` refuses.
    """
    library()
    _check(texts, dtype, rows)
    tell = progress if progress is not None else lambda stage: None
    tell("load ours")
    ours = _ours(path_or_model, dtype, _device(device), ignore)
    assert ours.directory is not None
    has_words = has_tokenizer(ours.directory)
    sentences = _sentences(ours, texts, has_words)
    drawn = not has_words or sees_pictures(ours) or draws(ours, texts)
    given: Given | Shown
    if sees_pictures(ours):
        given = draw_shown(ours, rows, seed)
    else:
        given = text_inputs(ours, None if drawn else sentences, texts is None, rows, seed)
    run = _Run(ours, given, dtype, tell)
    lines = run.lines()
    counts = (given.texts, given.tokens) if isinstance(given, Shown) else (len(given.ids), int(given.mask.sum()))
    if has_words and counts[0]:
        lines = (_token_line(ours, sentences), *lines)
    return Certificate(
        model=str(ours.directory if isinstance(path_or_model, Model) else path_or_model),
        architecture=run.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=str(ours.device),
        versions={"transformers": library().__version__, "torch": torch.__version__},
        texts=counts[0],
        tokens=counts[1],
        random_ids=drawn and counts[0] > 0,
        new_tokens=run.new_tokens,
        narrow=run.narrow,
        lines=lines,
        pictures=given.pictures if isinstance(given, Shown) else 0,
        not_compared=_not_compared(ours, lines),
    )


class _Run:
    """Both models on the same ids or pixels."""

    def __init__(self, ours: Model, given: Given | Shown, dtype: torch.dtype, tell: Callable[[Stage], None]) -> None:
        self.ours, self.given, self.dtype, self.tell = ours, given, dtype, tell
        self.architecture = ours.family.tasks[ours.task].architecture
        self.pad = pad_of(ours) if isinstance(given, Given) else 0  # beside pictures nothing asks for it
        self.new_tokens = _room(ours, given) if isinstance(given, Given) else None
        self.narrow = False

    def lines(self) -> tuple[Line, ...]:
        """Every comparison of numbers and of generated ids, in order; in fp64 too where one fails."""
        self.tell("run ours")
        mine, my_words = self._ours(), self._our_words()
        coarse = torch.float32 if self.dtype == torch.float64 else self.dtype
        self.tell("load theirs")
        peer = self._peer(coarse)
        self.tell("run theirs")
        base, words = peer.run(self._theirs), None
        if self.dtype != torch.float64:
            words = self._their_words(peer)
            peer.widen()
        else:
            peer = self._peer(torch.float64)
        self.tell("run theirs in fp64")
        truth = peer.run(self._theirs)
        self.narrow = peer.narrow
        words = self._their_words(peer) if words is None else words
        rule = _Rule(base, truth, coarse, self.narrow)
        lines = [*rule.lines(mine, self.dtype), *_word_lines(my_words, words)]
        if all(line.within for line in lines) or self.dtype == torch.float64:
            return tuple(lines)
        self.tell("run ours in fp64")
        self.ours.double()
        again = [
            *rule.lines(self._ours(), torch.float64),
            *_word_lines(self._our_words(), self._their_words(peer)),
        ]
        pairs = zip(lines, again, strict=True)
        return tuple(replace(line, wide=wide.error, wide_allowed=wide.allowed) for line, wide in pairs)

    def _ours(self) -> Made:
        given = self.given
        return of_ours(self.ours, given) if isinstance(given, Given) else of_ours_seeing(self.ours, given)

    def _theirs(self, peer: Any) -> Made:
        given = self.given
        return of_theirs(peer, given) if isinstance(given, Given) else reader_of(self.ours)(peer, given)

    def _peer(self, dtype: torch.dtype) -> Peer:
        assert self.ours.directory is not None
        return Peer(self.ours.directory, self.architecture, dtype=dtype, device=self.ours.device, pad=self.pad)

    def _our_words(self) -> Tensor | None:
        if not self.new_tokens:
            return None
        assert isinstance(self.given, Given)
        ids, mask = self.given.ids, self.given.mask
        if isinstance(self.ours, EncoderDecoder):
            decoder, begin = self.ours.read(ids, mask), torch.full_like(ids[:, :1], self.ours.start)
            return generate(decoder, begin, None, new_tokens=self.new_tokens, eos=None, pad=self.pad).ids
        assert isinstance(self.ours, TextModel)
        ids, mask = padded_left(self.given, self.pad)
        return generate(self.ours, ids, mask, new_tokens=self.new_tokens, eos=None, pad=self.pad).ids

    def _their_words(self, peer: Peer) -> Tensor | None:
        if not self.new_tokens:
            return None
        start = self.ours.start if isinstance(self.ours, EncoderDecoder) else None
        given = self.given
        assert isinstance(given, Given)
        return peer.greedy(given.ids, given.mask, new_tokens=self.new_tokens, pad=self.pad, start=start)


@dataclass(frozen=True, eq=False)
class _Rule:
    """The numeric rule against one truth.

    base: made in dtype `coarse`.  narrow: is truth fp64 but for parts in fp32, so that it errs by fp32's step itself.
    """

    base: Made
    truth: Made
    coarse: torch.dtype
    narrow: bool

    def lines(self, ours: Made, dtype: torch.dtype) -> list[Line]:
        """Ours, made in dtype, judged at every place, in order.

        Either may lack the pooled vector: transformers does not give it beside logits, and a checkpoint may have none.
        The last norm of a tower is nothing to those of ours that look at what stood before it.
        """
        return [self._line(p, ours.get(p), dtype) for p in self.truth if p in ours or p.what not in MAY_BE_MISSING]

    def _line(self, place: Place, ours: Tensor | None, dtype: torch.dtype) -> Line:
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


# ------------------------------------------------------------------------------------------------ what goes in, checked


def _check(texts: Sequence[str] | None, dtype: torch.dtype, rows: int) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATS))}, got {dtype}")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"rows must be a whole number of at least 1, got {rows!r}")
    if texts is not None and (isinstance(texts, str) or not isinstance(texts, Sequence)):
        raise TypeError(f"texts must be a list of texts, got {type(texts).__name__}: {texts!r:.60}")
    if texts is not None and not texts:
        raise ValueError("texts is empty: give at least one, or leave it out for sentences of our own")


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"there is no device {device!r}; it is 'cpu', 'cuda', 'cuda:1' and the like") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} is asked for, and torch finds no CUDA device here")
    return found


def _ours(path_or_model: str | Path | Model, dtype: torch.dtype, device: torch.device, ignore: Iterable[str]) -> Model:
    """Our model, ours alone: it will be changed."""
    if not isinstance(path_or_model, Model):
        return load(path_or_model, dtype=dtype, device=device, ignore=ignore)
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
    return deepcopy(path_or_model).to(device=device, dtype=dtype).eval()


def _sentences(ours: Model, texts: Sequence[str] | None, has_words: bool) -> Sequence[str]:
    if texts is not None and sees_pictures(ours):
        raise ValueError(f"what {ours.family.title} is compared with is drawn, texts and pictures: leave out texts")
    if texts is not None and not has_words:
        raise ValueError(f"{ours.directory} holds no tokenizer for texts: leave them out, and ids are drawn")
    return SENTENCES if texts is None else texts


def _room(ours: Model, given: Given) -> int | None:
    """How many tokens to generate: fewer where positions end, None where the model has no words to go on with."""
    head = ours.head if isinstance(ours, (TextModel, EncoderDecoder)) else None
    if ours.task != "generate" or not isinstance(head, LanguageHead):
        return None
    if isinstance(ours, EncoderDecoder):
        most, taken = ours.decoder.embed.most, 1
    else:
        most, taken = positions(ours), given.ids.shape[1]
    return NEW_TOKENS if most is None else max(0, min(NEW_TOKENS, most - taken))


def _not_compared(ours: Model, lines: Sequence[Line]) -> tuple[str, ...]:
    """What a model makes and no line is about: weights of some layer, and what it writes beside pictures."""
    layers: dict[str, set[tuple[str, int | None]]] = {"attention weights": set(), "hidden states": set()}
    for line in lines:
        layers.get(line.place.what, set()).add((line.place.part, line.place.layer))
    weights = [] if layers["attention weights"] == layers["hidden states"] else ["attention weights"]
    writes = isinstance(ours, (Captioner, Answerer)) or (sees_pictures(ours) and ours.task == "generate")
    return (*weights, *(["greedy ids"] if writes else []))


def _word_lines(ours: Tensor | None, theirs: Tensor | None) -> list[Line]:
    if ours is None or theirs is None:
        return []
    differ = int((ours != theirs).sum()) if ours.shape == theirs.shape else ours.numel()
    return [Line(Place("", None, "greedy ids"), float(differ), 0.0, 0.0)]


def _token_line(ours: Model, sentences: Sequence[str]) -> Line:
    """How many ids differ between both tokenizers; one that is missing differs."""
    assert ours.directory is not None
    differ = 0
    for one, theirs in zip(sentences, token_ids(ours.directory, sentences), strict=True):
        mine = ours.tokenizer.encode(one).ids
        differ += abs(len(mine) - len(theirs)) + sum(a != b for a, b in zip(mine, theirs, strict=False))
    return Line(Place("", None, "token ids"), float(differ), 0.0, 0.0)
