"""Texts written about pictures: a caption for each, or the answer to a question about it.

A captioner begins a caption and goes on; who answers reads the question and begins an answer; a language model that
reads pictures among its words is given a prompt (picture_prompts.py). It does not know how tokens are chosen.

Axis letters: B pictures of a batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from regard.data.images import Source, are_several, numbered, open_picture
from regard.generation.config import Defaults, Wishes
from regard.generation.text import Begun, Steps, Written, begin, check_prompt, continued, defaults_of
from regard.models.flamingo import FlamingoModel
from regard.models.image_text import Answerer, Captioner
from regard.models.model import Model
from regard.models.vision_language import VisionLanguageModel
from regard.tasks.eval_mode import one_by_one
from regard.tasks.images import Glanced, Reader, Several, as_list, caption_prompt, glance_at, prepared, question_prompt
from regard.tasks.inputs import check_batch, positions, require

__all__ = ["answer_about", "answer_parts", "caption", "caption_parts"]

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
    written = list(chain.from_iterable(caption_parts(model, pictures, prompt, wishes, batch=batch, on_token=on_token)))
    return written if are_several(pictures) else written[0]


def caption_parts(
    model: Model,
    pictures: Source | Several,
    prompt: str | None,
    wishes: Wishes,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Iterator[list[Written]]:
    """The captions in their order, some at a time, each as soon as it is written. Raises as `Model.caption`."""
    if not isinstance(prompt, str | None):
        raise TypeError(f"prompt must be a str, how every caption begins, got {type(prompt).__name__}: {prompt!r:.60}")
    given = as_list(pictures)
    if isinstance(model, (VisionLanguageModel, FlamingoModel)):
        require(model, "caption", "generate")
        prompt = caption_prompt(model, prompt)
    else:
        require(model, "caption", "caption")
    prompts = [prompt or ""] * len(given)
    return one_by_one(model, _written(model, given, prompts, wishes, batch, Steps(on_token), "picture"))


def answer_about(
    model: Model,
    pictures: Source | Several,
    question: str | Sequence[str],
    wishes: Wishes,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Written | list[Written]:
    """The answer to a question about a picture, or about each of a list, or to each question; see `Model.answer`."""
    written = list(chain.from_iterable(answer_parts(model, pictures, question, wishes, batch=batch, on_token=on_token)))
    return written if are_several(pictures) or not isinstance(question, str) else written[0]


def answer_parts(
    model: Model,
    pictures: Source | Several,
    question: str | Sequence[str],
    wishes: Wishes,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Iterator[list[Written]]:
    """The answers in their order, some at a time, each as soon as it is written. Raises as `Model.answer`."""
    given, questions = _pairs(pictures, question)
    if isinstance(model, (VisionLanguageModel, FlamingoModel)):
        require(model, "answer", "generate")
        questions = _prompts(model, questions)
    else:
        require(model, "answer", "answer")
    return one_by_one(model, _written(model, given, questions, wishes, batch, Steps(on_token), "question"))


def _prompts(model: Reader, questions: list[str]) -> list[str]:
    prompts = []
    for number, asked in enumerate(questions):
        with numbered(number, len(questions), "question"):
            prompts.append(question_prompt(model, asked))
    return prompts


def _pairs(pictures: Source | Several, question: str | Sequence[str]) -> tuple[list[Source], list[str]]:
    """Pictures, and a question for each: one alone is for all of them, and so is a picture alone for all questions."""
    given = as_list(pictures)
    questions = [question] * len(given) if isinstance(question, str) else question
    if not isinstance(questions, (list, tuple)) or not all(isinstance(one, str) for one in questions):
        got = f"{type(question).__name__}: {question!r:.60}"
        raise TypeError(f"a question is a str, several are a list of them, got {got}")
    if not questions:
        raise ValueError("there must be at least one question, got an empty list")
    if len(questions) > 1 and not are_several(pictures):
        return [open_picture(given[0])] * len(questions), list(questions)
    if len(given) != len(questions):
        raise ValueError(
            f"there are {len(given)} pictures and {len(questions)} questions: give as many of either, or one question "
            "for all pictures, or one picture, in no list, for all questions"
        )
    return given, list(questions)


def _written(
    model: Model,
    pictures: list[Source],
    prompts: list[str],
    wishes: Wishes,
    batch: int,
    steps: Steps,
    what: str,
) -> Iterator[list[Written]]:
    """What is written about each picture, in their order, after all of them and all prompts were checked.

    what: that is wrong where a prompt is, for its error.
    """
    check_batch(batch)
    wishes.check_count()
    said = defaults_of(model, wishes)
    wishes = replace(wishes, seed=wishes.choice(said).seeded().seed)  # one for all batches
    if len(pictures) > 1:  # what is wrong with one alone is told before anything is written
        seen = glance_at(model, pictures)
        _check_prompts(model, prompts, seen, wishes, said, what)
        pictures = [each.source for each in seen]
    found: dict[int, Written] = {}
    next_one = 0
    for part in prepared(model, pictures, batch):
        texts, pixels = [prompts[number] for number in part.numbers], part.pixels

        def begun(some: Sequence[int], texts: list[str] = texts, pixels: Tensor = pixels) -> Begun:
            return _begun(model, [texts[n] for n in some], said, pixels[list(some)])

        made = continued(model, begun, texts, wishes, said, part.numbers, steps)
        found |= dict(zip(part.numbers, made, strict=True))
        done = []
        while next_one in found:
            done.append(found.pop(next_one))
            next_one += 1
        if done:
            yield done


def _check_prompts(
    model: Model, prompts: list[str], seen: list[Glanced], wishes: Wishes, said: Defaults, what: str
) -> None:
    """Raise what one of the prompts is refused for, with its number, before the first is read."""
    checked: set[tuple[str, tuple[int, int]]] = set()
    for number, (text, picture) in enumerate(zip(prompts, seen, strict=True)):
        if (text, picture.pixels) in checked:
            continue
        with numbered(number, len(prompts), what):
            if isinstance(model, (VisionLanguageModel, FlamingoModel)):
                pixels = torch.empty(1, 3, *picture.pixels, device="meta")  # a shape, and no memory
                check_prompt(model, text, pixels, wishes, said)
            elif isinstance(model, Answerer):
                _check_length(model, len(model.tokenizer.encode(text).ids))
        checked.add((text, picture.pixels))


def _begun(model: Model, texts: list[str], said: Defaults, pixels: Tensor) -> Begun:
    """pixels: (B, 3, H, W), a picture for each text."""
    if isinstance(model, Captioner):
        return _caption(model, texts, pixels)
    if not isinstance(model, Answerer):
        return begin(model, texts, said, list(pixels.unsqueeze(1)))
    batch = model.tokenizer.batch(texts)
    _check_length(model, batch.ids.shape[1])
    decoder = model.read_image(pixels, batch.ids.to(model.device), batch.mask.to(model.device))
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
    return Begun(model.read_image(pixels), ids, mask, embed.most, words, after, (model.end,), model.pad)


def _check_length(model: Model, count: int) -> None:
    most = positions(model)
    if most is not None and count > most:
        raise ValueError(f"the text has {count} tokens, and the model has {most} positions: shorten it")
