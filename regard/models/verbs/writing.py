"""Text written by a model: prompts in, continuations out, at once or as they become certain.

What the caller does not say, the checkpoint does (generation/checkpoint_defaults.py). A decoder goes on from the
prompt, in which pictures may stand; of an encoder–decoder the encoder reads the prompt, and the decoder starts anew.

It does not know how prompts are continued together (continuing.py), nor how tokens are chosen (generation/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.models.checkpoint.side_files import read_side
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.flamingo_model import FlamingoModel
from regard.models.generation.checkpoint_defaults import Defaults
from regard.models.generation.generating import Stream
from regard.models.images.pictures import Source, are_several, numbered
from regard.models.model import Model
from regard.models.picture_writer import PictureWriter
from regard.models.text_model import TextModel
from regard.models.verbs.asking import positions, require
from regard.models.verbs.continuing import Begun, Steps, Written, continued, make_ready, rooms
from regard.models.verbs.evaluating import one_by_one
from regard.models.verbs.picture_prompts import read_pictures, spoken, without_special
from regard.models.verbs.picturing import Several
from regard.models.verbs.wishes import Wishes

__all__ = ["Written", "beams_of", "begin", "check_prompt", "defaults_of", "stream", "write"]


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
    pixels = _pixels(model, pictures, len(texts), isinstance(prompts, str))

    def begun(some: Sequence[int]) -> Begun:
        return begin(model, [texts[n] for n in some], said, [pixels[n] for n in some])

    written = continued(model, begun, texts, wishes, said, range(len(texts)), Steps(on_token))
    return written[0] if isinstance(prompts, str) else written


def stream(model: Model, prompt: str, wishes: Wishes, pictures: Source | Several | None = None) -> Iterator[str]:
    """The continuation of a prompt, piece by piece; see `Model.stream`."""
    if not isinstance(prompt, str):
        raise TypeError(f"stream writes one text: prompt must be a str, got {type(prompt).__name__}")
    require(model, "generate", "generate")
    said = defaults_of(model, wishes)
    begun = begin(model, [prompt], said, _pixels(model, pictures, 1, True))
    ready = make_ready(model, begun, wishes, said, rooms(begun, wishes, said)[0])
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
    ids, mask = (each.to(model.device) for each in _read(model, _as_read(model, texts, pixels), said))
    if isinstance(model, (PictureWriter, FlamingoModel)):
        return Begun(read_pictures(model, pixels), ids, mask, model.most, model.vocabulary, ids)
    if isinstance(model, EncoderDecoder):
        start = model.start if said.start is None else said.start
        starts = torch.full((len(texts), 1), start, device=model.device)
        return Begun(model.read(ids, mask), starts, None, model.decoder.embed.most, model.vocabulary, None)
    assert isinstance(model, TextModel)
    return Begun(model, ids, mask, model.most, model.vocabulary, ids)


def check_prompt(model: Model, text: str, pixels: Tensor, wishes: Wishes, said: Defaults) -> None:
    """Raise what writing after this prompt would raise of its pictures and its length, without writing.

    pixels: (P, 3, H, W), of which the shape alone is read.
    """
    ids, _ = _read(model, _as_read(model, [text], [pixels]), said)
    wishes.count(said, ids.shape[1], positions(model))


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


def _as_read(model: Model, texts: list[str], pixels: Sequence[Tensor | None]) -> list[str]:
    """Prompts as the tokenizer reads them: with as many placeholders as the pictures of each need."""
    if not isinstance(model, (PictureWriter, FlamingoModel)):
        return texts
    read = []
    for number, (text, own) in enumerate(zip(texts, pixels, strict=True)):
        with numbered(number, len(texts), "prompt"):
            read.append(spoken(model, text, own))
    return read


def _read(model: Model, texts: list[str], said: Defaults) -> tuple[Tensor, Tensor]:
    """Prompts as ids and mask (B, N), padded on the left, on the CPU; an empty one is the start token."""
    if isinstance(model, FlamingoModel):
        ids, mask = without_special(model, texts)
    else:
        batch = model.tokenizer.batch(texts, pad="left")
        ids, mask = batch.ids, batch.mask
    empty = ~mask.any(1)
    if bool(empty.any()):
        bos = said.bos if said.bos is not None else model.tokenizer.ids_of.bos
        if bos is None:
            name = _called(int(empty.nonzero()[0]), len(texts))
            raise ValueError(f"{name} is empty, and the checkpoint names no token to begin with: give a prompt")
        if not ids.shape[1]:
            ids, mask = ids.new_zeros(len(texts), 1), mask.new_zeros(len(texts), 1)
        ids[empty, -1], mask[empty, -1] = bos, True
    most = positions(model)
    for number, count in enumerate(mask.sum(1).tolist()):
        if most is not None and count > most:
            name = _called(number, len(texts))
            raise ValueError(f"{name} has {count} tokens, and the model has {most} positions: shorten it")
    return ids, mask


def _called(number: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt {number}"
