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

from regard.data.tokenizer import FILE_SETS
from regard.generation.loop import generate
from regard.models.encoder_decoder import EncoderDecoder, shift_right
from regard.models.family import GENERATION_TASKS
from regard.models.image_text import Answerer, Captioner
from regard.models.loading import load
from regard.models.model import Model
from regard.models.text import AnsweringModel, LongTextModel, TextModel
from regard.nn.heads import EndPooler, LanguageHead
from regard.nn.sparse_attention import BlockAttention, SlidingAttention
from regard.parity.certificate import Certificate, Line, TensorPlace
from regard.parity.passes import (
    DRAWN,
    Made,
    ModelImages,
    TextInputs,
    draw_ids,
    draw_shown,
    of_ours,
    of_ours_seeing,
    of_theirs,
    reader_of,
    sees_pictures,
    special_ids,
)
from regard.tasks.inputs import max_text_positions
from regard.testing import largest_error


def library() -> ModuleType:
    """The library transformers. Raises ImportError that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("verify compares with transformers, which is not here: pip install transformers") from error
    assert isinstance(transformers, ModuleType)
    return transformers


def token_ids(directory: Path, texts: Sequence[str]) -> list[list[int]]:
    """Each text as the ids that transformers' tokenizer gives it."""
    with _quiet(library()) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        return [list(tokenizer(one)["input_ids"]) for one in texts]


class Peer:
    """A checkpoint as a model of transformers.

    architecture: its class there.  dtype: of its weights, all of them.  pad: id of padding, where config.json has none.

    Raises ValueError if transformers has no such class.
    """

    def __init__(
        self, directory: Path, architecture: str, *, dtype: torch.dtype, device: torch.device, pad: int
    ) -> None:
        with _quiet(library()) as transformers:
            kind = getattr(transformers, architecture, None)
            if kind is None:
                raise ValueError(
                    f"transformers {transformers.__version__} has no {architecture}: there is nothing to compare with"
                )
            model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager").to(device).eval()
            self._plain = transformers.GenerationConfig
        for p in model.parameters():  # some are kept in fp32 (T5's in fp16): another function than all of them rounded
            p.data = p.data.to(dtype)
        if getattr(model.config, "pad_token_id", pad) is None:  # models of pictures have none to set
            model.config.pad_token_id = pad  # without one transformers classifies one text at a time
        self.model: Any = model
        self.narrow = False

    def widen(self) -> None:
        """From now on in fp64, with the weights as they were rounded: the same function, exactly."""
        self.model.double()

    def run(self, read: Callable[[Any], Made]) -> Made:
        """One pass; `read` runs the model and says what it made.

        In fp64 `narrow` says afterwards whether parts of it were computed in fp32.
        """
        with _Watching() as watching:  # type: ignore[no-untyped-call]
            made = read(self.model)
        self.narrow = watching.narrowed
        return made

    def greedy(self, ids: Tensor, mask: Tensor, *, new_tokens: int, pad: int, start: int | None) -> Tensor:
        """The tokens (B, new_tokens) it goes on with, whatever config files say of ending or sampling.

        Each text alone: some models of transformers count padding as positions, or fill it with NaN in fp64.
        start: what a decoder beside an encoder begins with, None without one.
        """
        plain = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        self.model.generation_config = self._plain(**plain, pad_token_id=pad, decoder_start_token_id=start)
        with torch.inference_mode(), _quiet(library()):
            texts = [one[tokens].unsqueeze(0) for one, tokens in zip(ids, mask, strict=True)]
            made = [self.model.generate(input_ids=x, attention_mask=torch.ones_like(x)) for x in texts]
        return torch.cat([x[:, -new_tokens:] for x in made])


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation on fp64 gave fp32: transformers' own casts of norms, softmax and rotary angles."""

    narrowed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            wide = (a for a in args if isinstance(a, Tensor) and a.dtype == torch.float64)
            self.narrowed = self.narrowed or next(wide, None) is not None
        return out


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[Any]:
    """Without transformers' progress bars and warnings inside; as before afterwards."""
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


def has_tokenizer(directory: Path) -> bool:
    """Does a directory hold files of a tokenizer?"""
    names = {name for files in FILE_SETS for name in files.split(" + ")}
    return any((directory / name).is_file() for name in names)


def draws(ours: Model, texts: Sequence[str] | None) -> bool:
    """Are ids drawn for this model, though it may have a tokenizer? texts: the user's.

    Raises ValueError for texts where only ids that are drawn can be compared.
    """
    if texts is not None and _wants_question(ours):
        raise ValueError(
            f"{ours.family.title} with task 'question-answering' reads a question before each text: leave out "
            "texts, and ids are drawn"
        )
    return texts is None and _whole(ours) > 0


def text_inputs(ours: Model, sentences: Sequence[str] | None, cut: bool, rows: int, seed: int) -> TextInputs:
    """What both get. sentences: None draws ids.  cut: texts that are longer than the model are cut, else refused."""
    random = torch.Generator().manual_seed(seed)
    most = max_text_positions(ours)
    if sentences is None:
        ids, mask = _drawn(ours, most, random)
    else:
        batch = ours.tokenizer.batch(sentences, pad="right", length=most, truncate=cut and most is not None)
        mask = batch.attention_mask
        ids = batch.input_ids.where(mask, pad_of(ours))  # by this id transformers finds the last token
    for n, count in enumerate(mask.sum(1).tolist()):
        if count == 0:
            raise ValueError(f"text {n} has no token: an empty text says nothing to this model")
    text, position = mask.nonzero(as_tuple=True)
    chosen = torch.randperm(len(text), generator=random)[:rows]
    ids, mask, text, position = (t.to(ours.device) for t in (ids, mask, text[chosen], position[chosen]))
    target = shift_right(ids, ours.start, mask) if isinstance(ours, EncoderDecoder) else None
    return TextInputs(ids, mask, target, (text, position), weights=_handed_out(ours))


def padded_left(given: TextInputs, pad: int) -> tuple[Tensor, Tensor]:
    """The same texts padded on the left, as generation has them: (B, N) ids and mask."""
    mask = given.mask.flip(1)  # as many tokens in each row, at its end
    return torch.full_like(given.ids, pad).masked_scatter(mask, given.ids[given.mask]), mask


def pad_of(ours: Model) -> int:
    """The id that texts are padded with: config.json's, else the tokenizer's, else 0."""
    pad = ours.config.values.get("pad_token_id")
    if isinstance(pad, int) and pad >= 0:
        return pad
    said = None if ours.directory is None or not has_tokenizer(ours.directory) else ours.tokenizer.ids_of
    return next((n for n in (said.pad, said.eos) if n is not None), 0) if said is not None else 0


def _drawn(ours: Model, most: int | None, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts of random ids, no special ones among them but for those that some models look for."""
    if not isinstance(ours, (TextModel, EncoderDecoder)):
        raise ValueError(f"verify does not compare {type(ours).__name__} yet")
    block = max((m.size for m in ours.modules() if isinstance(m, BlockAttention)), default=1)
    room = None if most is None else most - most % block  # transformers fills up a block, and needs positions for it
    lengths = [n if room is None else min(n, room) for n in _text_lengths(ours)]
    ids, mask = draw_ids(ours.vocabulary, special_ids(ours), lengths, random)
    ends = torch.tensor(lengths)[:, None] - 1
    end = ours.config.values.get("eos_token_id") if isinstance(ours, EncoderDecoder) else None
    if isinstance(ours, TextModel) and isinstance(ours.pooler, EndPooler):
        end = ours.pooler.end
    if isinstance(end, int):
        ids = ids.scatter(1, ends, end)
    if isinstance(ours, LongTextModel) and _wants_question(ours):  # transformers wants three separators, two as one
        separator = ours.config.int("sep_token_id", 2, minimum=0)
        ids = ids.scatter(1, torch.cat([ends - ends + 1, ends - ends + 2, ends], 1), separator)
    return ids.where(mask, pad_of(ours)), mask


def _text_lengths(ours: Model) -> tuple[int, ...]:
    """Of texts that are drawn: where attention may be sparse, one text that it is sparse in, and a shorter one."""
    whole = _whole(ours)
    return (whole + DRAWN[0], whole // 2 + DRAWN[1]) if whole else DRAWN


def _whole(ours: Model) -> int:
    """The longest text that attention looks at as a whole; 0 where it looks at every text so."""
    sliding = [2 * m.reach * m.dilation for m in ours.modules() if isinstance(m, SlidingAttention)]
    blocks = [(5 + 2 * m.random) * m.size for m in ours.modules() if isinstance(m, BlockAttention)]
    return max([*sliding, *blocks], default=0)


def _handed_out(ours: Model) -> bool:
    """Does transformers hand out weights as (B, H, N, N)?

    Longformer's are by windows. BigBird's leave out what a block counts more than once, and in short texts, where it
    changes to full attention on the way, there are none.
    """
    return not any(isinstance(m, (SlidingAttention, BlockAttention)) for m in ours.modules())


def _wants_question(ours: Model) -> bool:
    return isinstance(ours, (LongTextModel, AnsweringModel)) and ours.task == "question-answering"


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
    given: TextInputs | ModelImages
    if sees_pictures(ours):
        given = draw_shown(ours, rows, seed)
    else:
        given = text_inputs(ours, None if drawn else sentences, texts is None, rows, seed)
    run = _VerificationRun(ours, given, dtype, tell)
    lines = run.lines()
    counts = (given.texts, given.tokens) if isinstance(given, ModelImages) else (len(given.ids), int(given.mask.sum()))
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
        pictures=given.pictures if isinstance(given, ModelImages) else 0,
        not_compared=_not_compared(ours, lines),
    )


class _VerificationRun:
    """Both models on the same ids or pixels."""

    def __init__(
        self, ours: Model, given: TextInputs | ModelImages, dtype: torch.dtype, tell: Callable[[Stage], None]
    ) -> None:
        self.ours, self.given, self.dtype, self.tell = ours, given, dtype, tell
        self.architecture = ours.family.tasks[ours.task].architecture
        self.pad = pad_of(ours) if isinstance(given, TextInputs) else 0  # beside pictures nothing asks for it
        self.new_tokens = _room(ours, given) if isinstance(given, TextInputs) else None
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
        return of_ours(self.ours, given) if isinstance(given, TextInputs) else of_ours_seeing(self.ours, given)

    def _theirs(self, peer: Any) -> Made:
        given = self.given
        return of_theirs(peer, given) if isinstance(given, TextInputs) else reader_of(self.ours)(peer, given)

    def _peer(self, dtype: torch.dtype) -> Peer:
        assert self.ours.directory is not None
        return Peer(self.ours.directory, self.architecture, dtype=dtype, device=self.ours.device, pad=self.pad)

    def _our_words(self) -> Tensor | None:
        if not self.new_tokens:
            return None
        assert isinstance(self.given, TextInputs)
        ids, mask = self.given.ids, self.given.mask
        if isinstance(self.ours, EncoderDecoder):
            decoder, begin = self.ours.read(ids, mask), torch.full_like(ids[:, :1], self.ours.start)
            return generate(decoder, begin, None, max_new_tokens=self.new_tokens, pad_token_id=self.pad).ids
        assert isinstance(self.ours, TextModel)
        ids, mask = padded_left(self.given, self.pad)
        return generate(self.ours, ids, mask, max_new_tokens=self.new_tokens, pad_token_id=self.pad).ids

    def _their_words(self, peer: Peer) -> Tensor | None:
        if not self.new_tokens:
            return None
        start = self.ours.start if isinstance(self.ours, EncoderDecoder) else None
        given = self.given
        assert isinstance(given, TextInputs)
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


def _room(ours: Model, given: TextInputs) -> int | None:
    """How many tokens to generate: fewer where positions end, None where the model has no words to go on with."""
    head = ours.head if isinstance(ours, (TextModel, EncoderDecoder)) else None
    if ours.task not in GENERATION_TASKS or not isinstance(head, LanguageHead):
        return None
    if isinstance(ours, EncoderDecoder):
        most, taken = ours.decoder.embed.max_positions, 1
    else:
        most, taken = max_text_positions(ours), given.ids.shape[1]
    return NEW_TOKENS if most is None else max(0, min(NEW_TOKENS, most - taken))


def _not_compared(ours: Model, lines: Sequence[Line]) -> tuple[str, ...]:
    """What a model makes and no line is about: weights of some layer, and what it writes beside pictures."""
    layers: dict[str, set[tuple[str, int | None]]] = {"attention weights": set(), "hidden states": set()}
    for line in lines:
        layers.get(line.place.what, set()).add((line.place.part, line.place.layer))
    weights = [] if layers["attention weights"] == layers["hidden states"] else ["attention weights"]
    writes = isinstance(ours, (Captioner, Answerer)) or ours.task == "image-text-to-text"
    return (*weights, *(["greedy ids"] if writes else []))


def _word_lines(ours: Tensor | None, theirs: Tensor | None) -> list[Line]:
    if ours is None or theirs is None:
        return []
    differ = int((ours != theirs).sum()) if ours.shape == theirs.shape else ours.numel()
    return [Line(TensorPlace("", None, "greedy ids"), float(differ), 0.0, 0.0)]


def _token_line(ours: Model, sentences: Sequence[str]) -> Line:
    """How many ids differ between both tokenizers; one that is missing differs."""
    assert ours.directory is not None
    differ = 0
    for one, theirs in zip(sentences, token_ids(ours.directory, sentences), strict=True):
        mine = ours.tokenizer.encode(one).ids
        differ += abs(len(mine) - len(theirs)) + sum(a != b for a, b in zip(mine, theirs, strict=False))
    return Line(TensorPlace("", None, "token ids"), float(differ), 0.0, 0.0)
