"""Text written by a model: prompts in, continuations out, at once or as they become certain.

What the caller does not say, the checkpoint does (generation/checkpoint_defaults.py). A decoder goes on from the
prompt, in which pictures may stand; of an encoder–decoder the encoder reads the prompt, and the decoder starts anew.

It does not know how tokens are chosen: generation/ does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from regard.models.checkpoint.side_files import read_side
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.flamingo_model import FlamingoModel
from regard.models.generation.beams import Beams
from regard.models.generation.checkpoint_defaults import Defaults
from regard.models.generation.choosing import Choice
from regard.models.generation.decoder import Decoder
from regard.models.generation.generating import Stream, generate
from regard.models.generation.pieces import Decode
from regard.models.generation.stopping import Reason, read_stop
from regard.models.images.pictures import Source
from regard.models.model import Model
from regard.models.picture_writer import PictureWriter
from regard.models.text_model import TextModel
from regard.models.tokenizers.tokenizing import Tokenizer
from regard.models.verbs.asking import positions, require
from regard.models.verbs.picture_prompts import read_pictures, spoken, without_special
from regard.models.verbs.picturing import Several

__all__ = [
    "Begun",
    "Ready",
    "Wished",
    "Wishes",
    "Written",
    "beams_of",
    "begin",
    "defaults_of",
    "finish",
    "make_ready",
    "stream",
    "write",
]

NEW_TOKENS = 50  # where neither the caller nor the checkpoint says
ANCHOR = 8  # tokens of the prompt among which a whole character ends: two of at most 4 bytes each

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Written:
    """What a model wrote; printing it prints the text.

    >>> print(Written("The cat", " sat.", torch.tensor([332, 13]), "eos"))
     sat.

    text: the new text, without end token and stop string.  ids: (n,) new tokens, on the CPU, an end token included.
    reason: why it ended: "eos", "stop" or "length".  score: of beams: summed log probability by length, else None.
    """

    prompt: str
    text: str
    ids: Tensor
    reason: Reason
    score: float | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Written({self.text!r}, {len(self.ids)} tokens, reason={self.reason!r})"


class Wished(TypedDict, total=False):
    """The arguments of `Model.generate` by name, for the signatures that only a type checker reads."""

    new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    beams: int | Beams | None
    seed: int | None
    stop: str | Sequence[str]
    ignore: Sequence[str]
    on_token: Callable[[int], None] | None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the caller asks of the text; None where the checkpoint's own setting holds. See `Model.generate`."""

    new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    beams: int | Beams | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore: Sequence[str] = ()

    def said(self) -> dict[str, Any]:
        """The wishes that there are, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    def choice(self, said: Defaults) -> Choice:
        """How tokens are chosen: sampled if the caller asks for it, or the checkpoint does and the caller does not."""
        temperature, top_k, top_p, min_p = self.temperature, self.top_k, self.top_p, self.min_p
        if temperature is None:
            samples = said.samples or bool(top_k) or top_p not in (None, 1) or bool(min_p)  # 0, 1 and 0: switched off
            temperature = said.temperature if samples else 0.0
        if temperature != 0:
            top_k = _first(top_k, said.top_k)
            top_p, min_p = _first(top_p, said.top_p), _first(min_p, said.min_p)
        penalty = _first(self.repetition_penalty, said.repetition_penalty)
        return Choice(
            temperature=temperature,
            top_k=None if top_k == 0 else top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=1.0 if penalty is None else penalty,
            no_repeat_ngram=said.no_repeat_ngram,
            banned=said.banned,
            min_new=said.min_new,
            min_length=said.min_length,
            forced_first=said.forced_first,
            forced_last=said.forced_last,
            seed=self.seed,
        )


@dataclass(frozen=True, eq=False)
class Begun:
    """Where a model begins to write.

    ids, mask: (B, N), padded on the left.  most: positions of who decodes, None without a limit.
    after: the ids after which the new ones read as text; None where a text begins.
    eos, pad: where the model itself says them.
    """

    decoder: Decoder[Any]
    ids: Tensor
    mask: Tensor | None
    most: int | None
    after: Tensor | None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclass(frozen=True, eq=False)
class Ready:
    """A generation made ready: who decodes, from which tokens, and how many more at most."""

    decoder: Decoder[Any]
    ids: Tensor  # (B, N)
    mask: Tensor | None  # (B, N)
    decode: Decode
    new_tokens: int
    eos: tuple[int, ...]
    pad: int
    choice: Choice
    beams: Beams
    stop: tuple[str, ...]


def write(
    model: Model,
    prompts: str | Sequence[str],
    wishes: Wishes,
    on_token: Callable[[int], None] | None = None,
    pictures: Source | Several | None = None,
) -> Written | list[Written]:
    """The continuation of a prompt, or of each; see `Model.generate`."""
    texts = _prompts(prompts)
    require(model, "generate", "generate")
    said = defaults_of(model, wishes)
    begun = begin(model, texts, said, _pixels(model, pictures, len(texts), isinstance(prompts, str)))
    written = finish(make_ready(model, begun, wishes, said), texts, on_token)
    return written[0] if isinstance(prompts, str) else written


def finish(ready: Ready, texts: Sequence[str], on_token: Callable[[int], None] | None = None) -> list[Written]:
    """Write all that was made ready. texts: the prompts, as the result shall name them."""
    made = generate(
        ready.decoder,
        ready.ids,
        ready.mask,
        new_tokens=ready.new_tokens,
        eos=ready.eos,
        pad=ready.pad,
        choice=ready.choice,
        beams=ready.beams,
        decode=ready.decode,
        stop=ready.stop,
        on_token=on_token,
    )
    assert made.texts is not None
    ids = made.ids.cpu()
    scores = [None] * len(texts) if made.scores is None else made.scores.tolist()
    rows = zip(texts, made.texts, ids, made.lengths, made.reasons, scores, strict=True)
    return [Written(prompt, text, row[:n], why, score) for prompt, text, row, n, why, score in rows]


def stream(model: Model, prompt: str, wishes: Wishes, pictures: Source | Several | None = None) -> Iterator[str]:
    """The continuation of a prompt, piece by piece; see `Model.stream`."""
    if not isinstance(prompt, str):
        raise TypeError(f"stream writes one text: prompt must be a str, got {type(prompt).__name__}")
    require(model, "generate", "generate")
    said = defaults_of(model, wishes)
    ready = make_ready(model, begin(model, [prompt], said, _pixels(model, pictures, 1, True)), wishes, said)
    if ready.beams.width != 1:
        raise ValueError(
            f"the text of {ready.beams.width} beams is not known before the end, so it cannot be streamed: "
            "model.generate(…) gives it, and model.stream(…, beams=1) does without beams"
        )
    return Stream(
        ready.decoder,
        ready.ids,
        ready.mask,
        decode=ready.decode,
        new_tokens=ready.new_tokens,
        eos=ready.eos,
        pad=ready.pad,
        choice=ready.choice,
        stop=ready.stop,
    ).text()


def beams_of(model: Model, wishes: Wishes) -> int:
    """How many beams a generation will have, by the caller's wish or the checkpoint's."""
    return _beams(wishes, defaults_of(model, wishes)).width


# ---------------------------------------------------------------------------------------------------------- made ready


def begin(model: Model, texts: list[str], said: Defaults, pixels: Sequence[Tensor | None]) -> Begun:
    """Prompts as a model begins with them. pixels: of the pictures of each, (P, 3, H, W), None for none."""
    ids: Tensor
    mask: Tensor | None
    if isinstance(model, (PictureWriter, FlamingoModel)):
        ids, mask = _read(model, [spoken(model, text, own) for text, own in zip(texts, pixels, strict=True)], said)
        return Begun(read_pictures(model, pixels), ids, mask, model.most, ids)
    ids, mask = _read(model, texts, said)
    if isinstance(model, EncoderDecoder):
        start = model.start if said.start is None else said.start
        starts = torch.full((len(texts), 1), start, device=model.device)
        return Begun(model.read(ids, mask), starts, None, model.decoder.embed.most, None)
    assert isinstance(model, TextModel)
    return Begun(model, ids, mask, model.most, ids)


def make_ready(model: Model, begun: Begun, wishes: Wishes, said: Defaults) -> Ready:
    """All that a generation needs, by the caller's wishes and the checkpoint's. Raises as `Model.generate`."""
    special = model.tokenizer.ids_of
    eos = begun.eos or said.eos or (() if special.eos is None else (special.eos,))
    pads = (begun.pad, said.pad, special.pad, *eos, 0)
    return Ready(
        begun.decoder,
        begun.ids,
        begun.mask,
        _text_after(model, begun.after),
        _new_tokens(wishes, said, begun.ids.shape[1], begun.most),
        eos,
        next(pad for pad in pads if pad is not None),
        wishes.choice(said),
        _beams(wishes, said),
        (*read_stop(wishes.stop), *said.stop),
    )


def defaults_of(model: Model, wishes: Wishes) -> Defaults:
    """What the checkpoint says of generating; of a text's part, too, where that has settings of its own."""
    generation = read_side(model.directory, "generation_config.json", dict)
    config = {**model.settings.inner("text_config").values, **model.settings.values}
    return Defaults.read(generation, config, ignore=wishes.ignore)


def _pixels(model: Model, pictures: Any, prompts: int, alone: bool) -> list[Tensor | None]:
    """The pixels (P, 3, H, W) of each prompt's pictures, None where it has none. alone: is there one, in no list.

    Raises ValueError for pictures that a model does not look at, or of which nobody can tell whose they are.
    """
    if pictures is None:
        return [None] * prompts
    if not isinstance(model, (PictureWriter, FlamingoModel)):
        raise ValueError(f"{model.family.title} with task {model.task!r} looks at no pictures: leave out pictures=")
    each = [pictures] if alone else pictures
    if not isinstance(each, (list, tuple)) or len(each) != prompts:
        raise ValueError(
            f"there are {prompts} prompts: pictures must be a list of as many, each one's own, which is a picture or a "
            "list of them"
        )
    lists = [list(own) if isinstance(own, (list, tuple)) else [] if own is None else [own] for own in each]
    every = [picture for own in lists for picture in own]
    if not every:
        return [None] * prompts
    found = iter(model.preprocessor(every).pixels.to(model.device))
    return [torch.stack([next(found) for _ in own]) if own else None for own in lists]


def _prompts(prompts: object) -> list[str]:
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"a prompt is a str, several are a list of them, got {type(prompts).__name__}: {prompts!r:.60}")
    if not texts:
        raise ValueError("there must be at least one prompt, got an empty list")
    return list(texts)


def _read(model: Model, texts: list[str], said: Defaults) -> tuple[Tensor, Tensor]:
    """Prompts as ids and mask (B, N), padded on the left, on the model's device; an empty one is the start token."""
    if isinstance(model, FlamingoModel):
        ids, mask = without_special(model, texts)
    else:
        batch = model.tokenizer.batch(texts, pad="left")
        ids, mask = batch.ids, batch.mask
    empty = ~mask.any(1)
    if bool(empty.any()):
        bos = said.bos if said.bos is not None else model.tokenizer.ids_of.bos
        if bos is None:
            raise ValueError("the prompt is empty, and the checkpoint names no token to begin with: give a prompt")
        if not ids.shape[1]:
            ids, mask = ids.new_zeros(len(texts), 1), mask.new_zeros(len(texts), 1)
        ids[empty, -1], mask[empty, -1] = bos, True
    count, most = ids.shape[1], positions(model)
    if most is not None and count > most:
        raise ValueError(f"the prompt has {count} tokens, and the model has {most} positions: shorten it")
    return ids.to(model.device), mask.to(model.device)


def _new_tokens(wishes: Wishes, said: Defaults, start: int, most: int | None) -> int:
    """How many new tokens at most. What nobody asked for by number gives way to the positions there are."""
    if wishes.new_tokens is not None:
        return wishes.new_tokens
    if said.new_tokens is None and said.max_length is not None and said.max_length <= start:
        raise ValueError(
            f"the prompt has {start} tokens, and the checkpoint's max_length is {said.max_length} with the prompt's: "
            "say how many new_tokens, or shorten the prompt"
        )
    of_length = NEW_TOKENS if said.max_length is None else said.max_length - start
    new = of_length if said.new_tokens is None else said.new_tokens
    if most is not None and start >= most:
        raise ValueError(f"the prompt takes all of the model's {most} positions: shorten it")
    return new if most is None else min(new, most - start)


def _beams(wishes: Wishes, said: Defaults) -> Beams:
    """The caller's number of beams, compared as the checkpoint compares them; a `Beams` says all itself."""
    if wishes.beams is None:
        return said.beams
    if isinstance(wishes.beams, Beams):
        if wishes.beams.returned != 1:
            raise ValueError(
                f"one text is written for each prompt, and beams asks for {wishes.beams.returned}: returned=1"
            )
        return wishes.beams
    return Beams(wishes.beams, said.beams.length_penalty, said.beams.early_stopping)


def _text_after(model: Model, ids: Tensor | None) -> Decode:
    """Turns new tokens into text, as it reads after the prompt's ids: sentencepiece drops the space of a first token.

    Rows of the table beyond the tokenizer's vocabulary are no text.
    """
    tokenizer = model.tokenizer
    anchor = [] if ids is None else _anchor(tokenizer, ids[:, -ANCHOR:].tolist())
    before = len(tokenizer.decode(anchor)) if anchor else 0

    def decode(new: list[int]) -> str:
        return tokenizer.decode(anchor + [token for token in new if token < tokenizer.size])[before:]

    return decode


def _anchor(tokenizer: Tokenizer, rows: list[list[int]]) -> list[int]:
    """The fewest tokens at the end of a prompt that are whole characters; any prompt's will do. None: no tokens."""
    for row in rows:
        for n in range(1, len(row) + 1):
            text = tokenizer.decode(row[-n:])
            if text and "\ufffd" not in text:
                return row[-n:]
    return []


def _first(asked: T | None, said: T | None) -> T | None:
    return said if asked is None else asked
