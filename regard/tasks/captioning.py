"""Captions of images, and answers to questions about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from regard.data.images import Source, is_batch, numbered, open_image
from regard.generation.config import GenerationConfig
from regard.generation.text import (
    GenerationOutput,
    PromptBatch,
    StepCounter,
    begin_prompts,
    continue_prompts,
    merged_config,
    read_prompts,
)
from regard.tasks.images import (
    ImageHeader,
    Several,
    as_list,
    caption_prompt,
    prepared_batches,
    question_prompt,
    read_headers,
)
from regard.tasks.inputs import (
    check_batch,
    iterate_in_eval_mode,
    max_text_positions,
    reads_image_prompts,
    require,
)

if TYPE_CHECKING:
    from regard.models.image_text import Answerer, Captioner
    from regard.models.model import Model

OnToken = Callable[[int], None]


def caption(
    model: Model,
    images: Source | Several,
    prompt: str | None,
    config: GenerationConfig,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> GenerationOutput | list[GenerationOutput]:
    """A caption for an image, or for each of a list; see `Model.caption`."""
    outputs = list(chain.from_iterable(caption_parts(model, images, prompt, config, batch=batch, on_token=on_token)))
    return outputs if is_batch(images) else outputs[0]


def caption_parts(
    model: Model,
    images: Source | Several,
    prompt: str | None,
    config: GenerationConfig,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Iterator[list[GenerationOutput]]:
    """The captions in their order, some at a time, each as soon as it is complete. Raises as `Model.caption`."""
    if not isinstance(prompt, str | None):
        raise TypeError(f"prompt must be a str, how every caption begins, got {type(prompt).__name__}: {prompt!r:.60}")
    sources = as_list(images)
    if reads_image_prompts(model):
        require(model, "caption", "image-text-to-text")
        prompt = caption_prompt(model, prompt)
    else:
        require(model, "caption", "image-to-text")
    prompts = [prompt or ""] * len(sources)
    outputs = _outputs(model, sources, prompts, config, batch, StepCounter(on_token), "image")
    return iterate_in_eval_mode(model, outputs)


def answer_about(
    model: Model,
    images: Source | Several,
    question: str | Sequence[str],
    config: GenerationConfig,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> GenerationOutput | list[GenerationOutput]:
    """The answer to a question about an image, or about each of a list, or to each question; see `Model.answer`."""
    outputs = list(chain.from_iterable(answer_parts(model, images, question, config, batch=batch, on_token=on_token)))
    return outputs if is_batch(images) or not isinstance(question, str) else outputs[0]


def answer_parts(
    model: Model,
    images: Source | Several,
    question: str | Sequence[str],
    config: GenerationConfig,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Iterator[list[GenerationOutput]]:
    """The answers in their order, some at a time, each as soon as it is complete. Raises as `Model.answer`."""
    sources, questions = _pairs(images, question)
    if reads_image_prompts(model):
        require(model, "answer", "image-text-to-text")
        prompts = []
        for number, one in enumerate(questions):
            with numbered(number, len(questions), "question"):
                prompts.append(question_prompt(model, one))
        questions = prompts
    else:
        require(model, "answer", "visual-question-answering")
    outputs = _outputs(model, sources, questions, config, batch, StepCounter(on_token), "question")
    return iterate_in_eval_mode(model, outputs)


def _pairs(images: Source | Several, question: str | Sequence[str]) -> tuple[list[Source], list[str]]:
    """Images, and a question for each: a single one is for all images, and a single image for all questions."""
    sources = as_list(images)
    questions = [question] * len(sources) if isinstance(question, str) else question
    if not isinstance(questions, (list, tuple)) or not all(isinstance(one, str) for one in questions):
        got = f"{type(question).__name__}: {question!r:.60}"
        raise TypeError(f"a question is a str, several are a list of them, got {got}")
    if not questions:
        raise ValueError("there must be at least one question, got an empty list")
    if len(questions) > 1 and not is_batch(images):
        return [open_image(sources[0])] * len(questions), list(questions)
    if len(sources) != len(questions):
        raise ValueError(
            f"there are {len(sources)} images and {len(questions)} questions: give as many of either, or one question "
            "for all images, or one image, in no list, for all questions"
        )
    return sources, list(questions)


def _outputs(
    model: Model,
    images: list[Source],
    prompts: list[str],
    config: GenerationConfig,
    batch: int,
    steps: StepCounter,
    part: str,
) -> Iterator[list[GenerationOutput]]:
    """The text about each image, in their order, after all images and prompts were checked.

    part: what an error names with the number of a prompt: an image or a question.
    """
    check_batch(batch)
    config = merged_config(model, config).seeded()  # one seed for all batches
    if len(images) > 1:  # what is wrong with a single one is raised before anything is generated anyway
        headers = read_headers(model, images)
        _check_prompts(model, prompts, headers, config, part)
        images = [header.source for header in headers]
    outputs: dict[int, GenerationOutput] = {}
    next_number = 0
    for images_of_one_size in prepared_batches(model, images, batch):
        numbers, pixels = images_of_one_size.numbers, images_of_one_size.pixels
        texts = [prompts[number] for number in numbers]

        def begin(some: Sequence[int], texts: list[str] = texts, pixels: Tensor = pixels) -> PromptBatch:
            return _begin(model, [texts[n] for n in some], config, pixels[list(some)])

        outputs |= dict(zip(numbers, continue_prompts(model, begin, texts, config, numbers, steps), strict=True))
        done = []
        while next_number in outputs:
            done.append(outputs.pop(next_number))
            next_number += 1
        if done:
            yield done


def _check_prompts(
    model: Model, prompts: list[str], headers: list[ImageHeader], config: GenerationConfig, part: str
) -> None:
    """Raise what generating after one of the prompts would raise, with its number, before the first is read."""
    checked: set[tuple[str, tuple[int, int]]] = set()
    for number, (text, header) in enumerate(zip(prompts, headers, strict=True)):
        if (text, header.pixels) in checked:
            continue
        with numbered(number, len(prompts), part):
            if reads_image_prompts(model):
                pixels = torch.empty(1, 3, *header.pixels, device="meta")  # a shape, and no memory
                ids, _ = read_prompts(model, [text], config, [pixels])
                config.token_limit(ids.shape[1], max_text_positions(model))
            elif model.kind == "image-question":
                _check_length(model, len(model.tokenizer.encode(text).ids))
        checked.add((text, header.pixels))


def _begin(model: Model, texts: list[str], config: GenerationConfig, pixels: Tensor) -> PromptBatch:
    """pixels: (B, 3, H, W), an image for each text."""
    if reads_image_prompts(model):
        return begin_prompts(model, texts, config, list(pixels.unsqueeze(1)))
    reader = cast("Answerer | Captioner", model)
    ids, mask, context = torch.full((len(texts), 1), reader.start, device=model.device), None, None
    if model.kind == "image-question":
        batch = model.tokenizer.batch(texts)
        _check_length(model, batch.ids.shape[1])
        decoder = cast("Answerer", model).read_image(pixels, batch.ids.to(model.device), batch.mask.to(model.device))
    else:
        captioner = cast("Captioner", model)
        if any(texts):
            batch = model.tokenizer.batch(texts)
            _check_length(model, batch.ids.shape[1] - 1)  # without the token at the end
            ids, mask = captioner.prompt(batch.ids.to(model.device), batch.mask.to(model.device))
        context = ids[:, 1:]  # `start` is no text, and the tokenizer may not know it
        decoder = captioner.read_image(pixels)
    embed = reader.decoder.embed
    vocabulary = embed.tokens.num_embeddings
    return PromptBatch(decoder, ids, mask, embed.max_positions, vocabulary, context, (reader.end,), reader.pad)


def _check_length(model: Model, count: int) -> None:
    limit = max_text_positions(model)
    if limit is not None and count > limit:
        raise ValueError(f"the text has {count} tokens, and the model has {limit} positions: shorten it")
