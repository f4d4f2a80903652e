"""Text written by a model: prompts in, continuations out, at once or as they become certain.

What the caller does not say, the checkpoint does (generation/checkpoint_defaults.py). A decoder goes on from the
prompt, in which pictures may stand; of an encoder–decoder the encoder reads the prompt, and the decoder starts anew.

It does not know how tokens are chosen: generation/ does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from regard.models.images.pictures import Source, are_several
from regard.models.model import Model
from regard.models.picture_writer import PictureWriter
from regard.models.text_model import TextModel
from regard.models.tokenizers.tokenizing import Tokenizer
from regard.models.verbs.asking import positions, require
from regard.models.verbs.evaluating import one_by_one
from regard.models.verbs.picture_prompts import read_pictures, spoken, without_special
from regard.models.verbs.picturing import Several
from regard.models.verbs.wishes import Wishes

__all__ = [
    "Begun",
    "Ready",
    "Written",
    "beams_of",
    "begin",
    "defaults_of",
    "finish",
    "make_ready",
    "stream",
    "write",
]

ANCHOR = 8  # tokens of the prompt among which a whole character ends: two of at most 4 bytes each


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


@dataclass(frozen=True, eq=False)
class Begun:
    """Where a model begins to write.

    ids, mask: (B, N), padded on the left.  most: positions of who decodes, None without a limit.
    vocabulary: how many tokens there are to choose from.
    after: the ids after which the new ones read as text; None where a text begins.
    eos, pad: where the model itself says them.
    """

    decoder: Decoder[Any]
    ids: Tensor
    mask: Tensor | None
    most: int | None
    vocabulary: int
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
    pieces = Stream(
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
    return one_by_one(model, pieces)


def beams_of(model: Model, wishes: Wishes) -> int:
    """How many beams a generation will have, by the caller's wish or the checkpoint's."""
    return wishes.searched(defaults_of(model, wishes)).width


# ---------------------------------------------------------------------------------------------------------- made ready


def begin(model: Model, texts: list[str], said: Defaults, pixels: Sequence[Tensor | None]) -> Begun:
    """Prompts as a model begins with them. pixels: of the pictures of each, (P, 3, H, W), None for none."""
    ids: Tensor
    mask: Tensor | None
    if isinstance(model, (PictureWriter, FlamingoModel)):
        ids, mask = _read(model, [spoken(model, text, own) for text, own in zip(texts, pixels, strict=True)], said)
        return Begun(read_pictures(model, pixels), ids, mask, model.most, model.vocabulary, ids)
    ids, mask = _read(model, texts, said)
    if isinstance(model, EncoderDecoder):
        start = model.start if said.start is None else said.start
        starts = torch.full((len(texts), 1), start, device=model.device)
        return Begun(model.read(ids, mask), starts, None, model.decoder.embed.most, model.vocabulary, None)
    assert isinstance(model, TextModel)
    return Begun(model, ids, mask, model.most, model.vocabulary, ids)


def make_ready(
    model: Model, begun: Begun, wishes: Wishes, said: Defaults, rows: tuple[int, ...] | None = None
) -> Ready:
    """All that a generation needs, by the caller's wishes and the checkpoint's. Raises as `Model.generate`.

    rows: the number of each row, where they are some of many; None: 0, 1 and so on.
    """
    said.check_tokens(begun.vocabulary)
    special = model.tokenizer.ids_of
    eos = begun.eos or said.eos or (() if special.eos is None else (special.eos,))
    pads = (begun.pad, said.pad, special.pad, *eos, 0)
    wishes.check_beams(said)
    return Ready(
        begun.decoder,
        begun.ids,
        begun.mask,
        _text_after(model, begun.after),
        wishes.count(said, begun.ids.shape[1], begun.most),
        eos,
        next(pad for pad in pads if pad is not None),
        replace(wishes.choice(said), rows=rows),
        wishes.searched(said),
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
    each = [pictures] if alone else list(pictures) if are_several(pictures) else pictures
    if not isinstance(each, list) or len(each) != prompts:
        raise ValueError(
            f"there are {prompts} prompts: pictures must be a list of as many, each one's own, which is a picture or a "
            "list of them"
        )
    lists = [list(own) if are_several(own) else [] if own is None else [own] for own in each]
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
