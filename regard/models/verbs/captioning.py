"""Texts written about pictures: a caption for each, or the answer to a question about it.

A captioner begins a caption and goes on; who answers reads the question and begins an answer; a language model that
reads pictures among its words is given a prompt (picture_prompts.py). It does not know how tokens are chosen.

Axis letters: B pictures of a batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.models.flamingo_model import FlamingoModel
from regard.models.generation.checkpoint_defaults import Defaults
from regard.models.images.pictures import Source, are_several
from regard.models.model import Model
from regard.models.picture_text_model import Answerer, Captioner
from regard.models.picture_writer import PictureWriter
from regard.models.verbs.asking import positions, require
from regard.models.verbs.picture_prompts import caption_prompt, question_prompt
from regard.models.verbs.picturing import Several, as_list, look_at
from regard.models.verbs.wishes import Wishes
from regard.models.verbs.writing import Begun, Written, begin, defaults_of, finish, make_ready

__all__ = ["answer_about", "caption"]

OnToken = Callable[[int], None]


def caption(
    model: Model,
    pictures: Source | Several,
    prompt: str | None,
    wishes: Wishes,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Written | list[Written]:
    """A caption for a picture, or for each of a list; see `Model.caption`."""
    if not isinstance(prompt, str | None):
        raise TypeError(f"prompt must be a str, how every caption begins, got {type(prompt).__name__}: {prompt!r:.60}")
    given = as_list(pictures)
    if isinstance(model, (PictureWriter, FlamingoModel)):
        require(model, "caption", "generate")
        prompt = caption_prompt(model, prompt)
    else:
        require(model, "caption", "caption")
    written = _written(model, given, [prompt or ""] * len(given), wishes, batch, on_token)
    return written if are_several(pictures) else written[0]


def answer_about(
    model: Model,
    pictures: Source | Several,
    question: str | Sequence[str],
    wishes: Wishes,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Written | list[Written]:
    """The answer to a question about a picture, or about each of a list; see `Model.answer`."""
    given, questions = _pairs(pictures, question)
    if isinstance(model, (PictureWriter, FlamingoModel)):
        require(model, "answer", "generate")
        questions = [question_prompt(model, asked) for asked in questions]
    else:
        require(model, "answer", "answer")
    written = _written(model, given, questions, wishes, batch, on_token)
    return written if are_several(pictures) else written[0]


def _pairs(pictures: Source | Several, question: str | Sequence[str]) -> tuple[list[Source], list[str]]:
    """Pictures, and a question for each: one alone is for all of them."""
    given = as_list(pictures)
    questions = [question] * len(given) if isinstance(question, str) else question
    if not isinstance(questions, (list, tuple)) or not all(isinstance(one, str) for one in questions):
        got = f"{type(question).__name__}: {question!r:.60}"
        raise TypeError(f"a question is a str, several are a list of them, got {got}")
    if len(given) != len(questions):
        raise ValueError(
            f"there are {len(given)} pictures and {len(questions)} questions: give as many of either, or one question "
            "for all pictures"
        )
    return given, list(questions)


def _written(
    model: Model, pictures: list[Source], prompts: list[str], wishes: Wishes, batch: int, on_token: OnToken | None
) -> list[Written]:
    """What is written about each picture; on_token counts the steps of all batches."""
    said = defaults_of(model, wishes)
    wishes = replace(wishes, seed=wishes.choice(said).seeded().seed)  # one for all batches
    found: dict[int, Written] = {}
    steps = before = 0

    def stepped(count: int) -> None:
        nonlocal steps
        steps = before + count
        if on_token is not None:
            on_token(steps)

    for part in look_at(model, pictures, batch):
        texts = [prompts[number] for number in part.numbers]
        ready = make_ready(model, _begun(model, texts, said, part.pixels), wishes, said, part.numbers)
        found |= dict(zip(part.numbers, finish(ready, texts, stepped), strict=True))
        before = steps
    return [found[n] for n in range(len(found))]


def _begun(model: Model, texts: list[str], said: Defaults, pixels: Tensor) -> Begun:
    """pixels: (B, 3, H, W), a picture for each text."""
    if isinstance(model, Captioner):
        return _caption(model, texts, pixels)
    if not isinstance(model, Answerer):
        return begin(model, texts, said, list(pixels.unsqueeze(1)))
    batch = model.tokenizer.batch(texts)
    _check_length(model, batch.ids.shape[1])
    decoder = model.read_picture(pixels, batch.ids.to(model.device), batch.mask.to(model.device))
    starts = torch.full((len(texts), 1), model.start, device=model.device)
    embed = model.decoder.embed
    return Begun(decoder, starts, None, embed.most, embed.tokens.num_embeddings, None, (model.end,), model.pad)


def _caption(model: Captioner, texts: list[str], pixels: Tensor) -> Begun:
    """texts: how the captions begin, all of them alike, or with nothing."""
    ids = torch.full((len(texts), 1), model.start, device=model.device)
    mask = None
    if any(texts):
        batch = model.tokenizer.batch(texts)
        _check_length(model, batch.ids.shape[1] - 1)  # without the token at the end
        ids, mask = model.prompt(batch.ids.to(model.device), batch.mask.to(model.device))
    after = ids[:, 1:]  # `start` is no text, and the tokenizer may not know it
    embed, words = model.decoder.embed, model.decoder.embed.tokens.num_embeddings
    return Begun(model.read_picture(pixels), ids, mask, embed.most, words, after, (model.end,), model.pad)


def _check_length(model: Model, count: int) -> None:
    most = positions(model)
    if most is not None and count > most:
        raise ValueError(f"the text has {count} tokens, and the model has {most} positions: shorten it")
