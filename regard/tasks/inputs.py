"""Inputs of the tasks: checks of arguments, texts and images in batches, image prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.checks import check_int
from regard.data.image_processing import ImageBatch
from regard.data.images import Source, is_batch, numbered, open_image, peek_image
from regard.data.tokenizer import BatchEncoding, checked_texts
from regard.layouts import Frame
from regard.nn.vision import VisionTower
from regard.nn.windows import WindowTower

if TYPE_CHECKING:
    from regard.models.flamingo import FlamingoDecoder, FlamingoModel
    from regard.models.model import Model
    from regard.models.outputs import ModelOutput
    from regard.models.vision_language import VisionLanguageDecoder, VisionLanguageModel

Texts = Sequence[str] | Sequence[tuple[str, str]]
"""Several texts, or several pairs of them."""


def call_arguments(
    model: Model,
    verb: str,
    names: Sequence[str],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    options: Sequence[str] = (),
) -> list[Any]:
    """The required arguments of a method (`verb`) that takes others for other kinds of model, in the order of `names`.

    positional: as passed.  named: all that can come by name, None if they did not.  options: optional ones of this kind
    of model. Raises TypeError for an argument that is missing, comes twice, or is for another kind of model.
    """
    by_name = {name: value for name, value in named.items() if value is not None}
    places = dict(zip(names, positional, strict=False))
    strange = [*(by_name.keys() - {*names, *options}), *map(repr, positional[len(names) :])]
    if strange:
        may = f" (and may take {', '.join(options)})" if options else ""
        raise TypeError(
            f"{verb} of {model.family.title} takes {' and '.join(names)}{may}, and not {', '.join(sorted(strange)):.80}"
        )
    twice = sorted(places.keys() & by_name.keys())
    missing = [name for name in names if name not in places and name not in by_name]
    if twice or missing:
        problem = f"{twice[0]} came twice" if twice else f"{missing[0]} is missing"
        raise TypeError(f"{verb} of {model.family.title} takes {' and '.join(names)}, and {problem}")
    return [places[name] if name in places else by_name[name] for name in names]


def batches(
    model: Model, texts: Texts, size: int, *, length: int | None, truncate: bool
) -> Iterator[tuple[list[int], BatchEncoding]]:
    """Texts in batches of `size` on the model's device, the longest first: their numbers, and the batch.

    length: limit on the tokens of a text.  truncate: cut longer ones, instead of a ValueError.
    """
    check_int("batch", size)
    checked_texts(texts)  # here, where they have their own numbers
    characters = [sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in texts]
    order = sorted(range(len(texts)), key=lambda n: -characters[n])
    for at in range(0, len(order), size):
        numbers = order[at : at + size]
        some = cast(Texts, [texts[n] for n in numbers])
        batch = model.tokenizer.batch(some)
        counts: list[int] = batch.attention_mask.sum(1).tolist()
        for number, count in zip(numbers, counts, strict=True):
            if count == 0:
                raise ValueError(f"text {number} has no token: an empty text says nothing to this model")
            if length is not None and count > length and not truncate:
                raise ValueError(
                    f"text {number} has {count} tokens, and the model takes {length}: shorten it, or pass truncate=True"
                )
        if length is not None and max(counts) > length:
            batch = model.tokenizer.batch(some, length=length, truncate=True)
        yield numbers, batch.to(model.device)


@torch.no_grad()
def score_texts(
    model: Model,
    texts: Texts,
    size: int,
    scores: Callable[[BatchEncoding], Tensor],
    *,
    length: int | None,
    truncate: bool,
) -> Tensor:
    """A row of numbers for each text, in their order. scores: a batch → (B, …)."""
    rows: dict[int, Tensor] = {}
    for numbers, part in batches(model, texts, size, length=length, truncate=truncate):
        rows |= dict(zip(numbers, scores(part), strict=True))
    return torch.stack([rows[n] for n in range(len(rows))])


def single_batch(model: Model, text: str, second: str | None = None) -> BatchEncoding:
    """One text, or a pair, as a batch on the model's device. Raises ValueError if it is too long or has no token."""
    texts = cast(Texts, [text if second is None else (text, second)])
    return next(batches(model, texts, 1, length=model.max_text_positions, truncate=False))[1]


@torch.no_grad()
def run_model(model: Model, batch: BatchEncoding) -> ModelOutput:
    """Run the model on a batch, with token types if it has them."""
    if model.kind == "text" and cast(Any, model).tower.embed.types is not None:
        return cast("ModelOutput", model(batch.input_ids, batch.attention_mask, token_type_ids=batch.token_type_ids))
    return cast("ModelOutput", model(batch.input_ids, batch.attention_mask))


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the last axis in fp32 or wider, on the CPU."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).softmax(-1).cpu()


def shortened(text: str, most: int = 48) -> str:
    """A text on one line of a table."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


ImagePromptModel: TypeAlias = "VisionLanguageModel | FlamingoModel"
Several: TypeAlias = "list[Any] | tuple[Source, ...] | Iterator[Any]"
"""Several images. Of Any, because a list of paths is no list of sources to a type checker."""
PLACEHOLDER = "<image>"
FAKE = "<fake_token_around_image>"  # what Idefics calls the token on both sides of an image


@dataclass(frozen=True, eq=False)
class ImageGroup:
    """Some of the images of a list, of one size, on the model's device."""

    numbers: tuple[int, ...]  # their places in the list
    names: tuple[str, ...]  # of their files
    pixels: Tensor  # (B, 3, H, W)
    frames: tuple[Frame, ...]


def vision_tower(model: Model) -> VisionTower | WindowTower | None:
    """The tower that reads images, or None if the model reads only text."""
    if model.kind in ("text", "encoder-decoder"):
        return None
    name = "tower" if model.kind == "vision" else "vision"
    return cast("VisionTower | WindowTower | None", getattr(model, name))


def has_vision(model: Model) -> bool:
    """True if the model reads images."""
    return vision_tower(model) is not None


def as_list(images: Source | Several) -> list[Source]:
    """One image or several as a list. Raises ValueError for an empty one."""
    several: list[Any] = list(cast(Iterable[Any], images)) if is_batch(images) else [images]
    if not several:
        got = "an empty list" if isinstance(images, (list, tuple)) else "none: nothing was found"
        raise ValueError(f"there must be at least one image, got {got}")
    return several


def read_headers(model: Model, images: list[Source]) -> tuple[list[Source], list[tuple[int, int]]]:
    """What to open later, and the height and width that the model will get of each image.

    All are checked before any is decoded, so that a fault in the last is reported before the first is read.
    """
    prepare = model.preprocessor
    sources: list[Source] = []
    sizes: list[tuple[int, int]] = []
    for number, image in enumerate(images):
        with numbered(number, len(images), "image"):
            source, (height, width) = peek_image(image)
            try:
                pixels = prepare.frame(height, width).pixels
            except ValueError as error:
                try:  # not every header says whether the image lies on its side
                    pixels = prepare.frame(width, height).pixels
                except ValueError:
                    raise error from None
        sources.append(source)
        sizes.append(pixels)
    return sources, sizes


def image_batches(model: Model, images: list[Source], batch: int, *, checked: bool = False) -> Iterator[ImageGroup]:
    """Images opened and prepared as the checkpoint asks, at most `batch` at a time, those of one size together.

    The headers of several are checked first, all of them, unless they were `checked`. Errors have the image's number.
    """
    check_int("batch", batch)
    if len(images) > 1 and not checked:
        images, _ = read_headers(model, images)
    prepare = model.preprocessor
    for at in range(0, len(images), batch):
        sizes: dict[torch.Size, list[tuple[int, str, ImageBatch]]] = {}
        for number in range(at, min(at + batch, len(images))):
            with numbered(number, len(images), "image"):
                image = open_image(images[number])
                prepared = prepare(image)
            sizes.setdefault(prepared.pixel_values.shape, []).append((number, image.name, prepared))
        for group in sizes.values():
            numbers, names, each = zip(*group, strict=True)
            pixels = torch.cat([one.pixel_values for one in each]).to(model.device)
            yield ImageGroup(numbers, names, pixels, tuple(one.frames[0] for one in each))


@torch.no_grad()
def score_images(
    model: Model, images: Source | Several, batch: int, scores: Callable[[Tensor], Tensor]
) -> tuple[tuple[str, ...], Tensor]:
    """The names of images, and a row of numbers for each, (P, …), in their order. scores: (B, 3, H, W) → (B, …)."""
    rows: dict[int, tuple[str, Tensor]] = {}
    for part in image_batches(model, as_list(images), batch):
        rows |= dict(zip(part.numbers, zip(part.names, scores(part.pixels), strict=True), strict=True))
    names, numbers = zip(*(rows[n] for n in range(len(rows))), strict=True)
    return names, torch.stack(numbers)


# -------------------------------------------------------------------------------------------------------------- prompts


def question_prompt(model: ImagePromptModel, question: str) -> str:
    r"""A question about one image as a prompt; one that holds the placeholder is a prompt already.

    The forms are those of https://huggingface.co/docs/transformers: model_doc/llava (llava-1.5) and tasks/idefics.
    """
    token = _placeholder_in(model, question)
    if token in question:
        return question
    if model.kind == "vision-language":
        return f"USER: {token}\n{question} ASSISTANT:"
    instruction = "Instruction: Provide an answer to the question. Use the image to answer.\n"
    return f"{instruction}{token}Question: {question} Answer:"


def caption_prompt(model: ImagePromptModel, begun: str | None) -> str:
    """What asks for a caption of one image. begun: how it begins; one that holds the placeholder is a prompt."""
    token = _placeholder_in(model, begun or "")
    if begun is not None and token in begun:
        return begun
    if model.kind == "flamingo":
        return token + (begun or "")
    request = f"USER: {token}\nWhat's the content of the image? ASSISTANT:"
    return f"{request} {begun}" if begun else request


def placeholder(model: ImagePromptModel) -> str:
    """How an image's place is written in a prompt: as the tokenizer of a LLaVA has it, else PLACEHOLDER."""
    return model.spelling if model.kind == "vision-language" else PLACEHOLDER


def _placeholder_in(model: ImagePromptModel, prompt: str) -> str:
    """The placeholder, once it is sure that the prompt does not have another checkpoint's."""
    token = placeholder(model)
    if token not in prompt and PLACEHOLDER in prompt:
        raise ValueError(
            f"the text has {PLACEHOLDER!r}, and this checkpoint's tokenizer writes the place of an image {token!r}: "
            "write that"
        )
    return token


def check_placeholders(text: str, token: str, images: int, argument: str) -> None:
    """Raise ValueError for a text with more or fewer placeholders (`token`) than images (of the `argument`)."""
    if (held := text.count(token)) != images:
        raise ValueError(
            f"the text has {held} placeholders {token!r}, and {argument}= has {images} images: write one where each "
            "image stands"
        )


def expand_prompt(model: ImagePromptModel, prompt: str, pixels: Tensor | None) -> str:
    """The prompt as the model's tokenizer reads it. pixels: (P, 3, H, W), its images; None for none."""
    token = placeholder(model)
    check_placeholders(prompt, token, 0 if pixels is None else len(pixels), "images")
    if model.kind == "vision-language":
        return model.expand(prompt, pixels, token=token)
    bos = model.tokenizer.ids_of.bos
    start = "" if bos is None else model.tokenizer.tokens([bos])[0]
    has_fake = len(model.tokenizer.encode(FAKE, special=False).ids) == 1
    prompt = prompt.removeprefix(start).strip(" ")
    if not has_fake or FAKE in prompt:
        return start + prompt
    # Fake tokens around the images, one between two of them, and no space beside one, as Idefics was trained.
    first, *rest = (part.strip(" ") for part in prompt.split(PLACEHOLDER))
    text = first
    for part in rest:
        text += PLACEHOLDER + FAKE + part if text.endswith(FAKE) else FAKE + PLACEHOLDER + FAKE + part
    return start + text


def without_special(model: Model, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Texts that hold their special tokens already as ids and mask (B, N), padded on the left."""
    special = model.tokenizer.ids_of
    fill = next((n for n in (special.pad, special.eos) if n is not None), 0)
    rows = [torch.tensor(model.tokenizer.encode(text, special=False).ids, dtype=torch.long) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=fill, padding_side="left")
    mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return ids, pad_sequence(mask, batch_first=True, padding_side="left")


def read_images(model: ImagePromptModel, pixels: Sequence[Tensor | None]) -> VisionLanguageDecoder | FlamingoDecoder:
    """A decoder that has read the images of each prompt. pixels: (P, 3, H, W) for each, None for none."""
    there = [each for each in pixels if each is not None]
    if not there:
        return model.read_image(None)
    if model.kind == "vision-language":
        return model.read_image(torch.cat(there))
    none = there[0].new_empty(0, *there[0].shape[1:])
    rows = [none if each is None else each for each in pixels]
    return model.read_image(pad_sequence(rows, batch_first=True))  # (B, P, 3, H, W)
