"""Images for the tasks: opened, prepared in batches, and placed in prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data.image_processing import ImageBatch
from regard.data.images import Source, is_batch, numbered, open_image, peek_image
from regard.layouts import Frame
from regard.nn.vision import VisionTower
from regard.nn.windows import WindowTower
from regard.tasks.inputs import check_batch

if TYPE_CHECKING:
    from regard.models.flamingo import FlamingoDecoder, FlamingoModel
    from regard.models.model import Model
    from regard.models.vision_language import VisionLanguageDecoder, VisionLanguageModel

ImagePromptModel: TypeAlias = "VisionLanguageModel | FlamingoModel"
Several: TypeAlias = "list[Any] | tuple[Source, ...] | Iterator[Any]"
"""Several images. Of Any, because a list of paths is no list of sources to a type checker."""
PLACEHOLDER = "<image>"
FAKE = "<fake_token_around_image>"  # what Idefics calls the token on both sides of an image


@dataclass(frozen=True, eq=False)
class ImageHeader:
    """An image whose header was read and found valid.

    source: what to open.  pixels: height and width of what the model will get.
    """

    source: Source
    pixels: tuple[int, int]


@dataclass(frozen=True, eq=False)
class ImageGroup:
    """Some of the images of a list, of one size, on the model's device.

    numbers: their places in the list.  names: of their files.  pixels: (B, 3, H, W).  frames: one for each.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    pixels: Tensor
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
    """One image or several as a list. Raises ValueError for an empty one.

    >>> as_list("photo.jpg")
    ['photo.jpg']
    """
    several: list[Any] = list(cast(Iterable[Any], images)) if is_batch(images) else [images]
    if not several:
        got = "an empty list" if isinstance(images, (list, tuple)) else "none: nothing was found"
        raise ValueError(f"there must be at least one image, got {got}")
    return several


def read_headers(model: Model, images: list[Source]) -> list[ImageHeader]:
    """Check all images before any is decoded, so that a fault in the last is reported before the first is read.

    Raises what `peek_image` and `model.preprocessor` raise, with the image's number where there are several.
    """
    prepare, headers = model.preprocessor, []
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
            headers.append(ImageHeader(source, pixels))
    return headers


def image_batches(model: Model, images: list[Source], batch: int) -> Iterator[ImageGroup]:
    """Images opened and prepared as the checkpoint asks, at most `batch` at a time, those of one size together.

    The headers of several are checked first, all of them. Raises ValueError for a batch below 1, and what
    `open_image` and `model.preprocessor` raise, with the image's number where there are several.
    """
    check_batch(batch)
    checked = images if len(images) == 1 else [header.source for header in read_headers(model, images)]
    yield from prepared_batches(model, checked, batch)


def prepared_batches(model: Model, images: list[Source], batch: int) -> Iterator[ImageGroup]:
    """The same of images whose headers were checked."""
    check_batch(batch)
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
    """The names of images, and a row of numbers for each, (P, …), in their order.

    scores: pixels (B, 3, H, W) → (B, …). Raises as `as_list` and `image_batches`.
    """
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
    asked = "Instruction: Provide an answer to the question. Use the image to answer.\n"
    return f"{asked}{token}Question: {question} Answer:"


def caption_prompt(model: ImagePromptModel, begun: str | None) -> str:
    """What asks for a caption of one image. begun: how it begins; one that holds the placeholder is a prompt."""
    token = _placeholder_in(model, begun or "")
    if begun is not None and token in begun:
        return begun
    if model.kind == "flamingo":
        return token + (begun or "")
    asked = f"USER: {token}\nWhat's the content of the image? ASSISTANT:"
    return f"{asked} {begun}" if begun else asked


def placeholder(model: ImagePromptModel) -> str:
    """How an image's place is written in a prompt: as the tokenizer of a LLaVA has it, else PLACEHOLDER.

    Raises ValueError where the tokenizer has no such token.
    """
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
    """Raise ValueError for a text with more or fewer placeholders than images.

    >>> check_placeholders("<image> a cat", "<image>", 0, "images")
    Traceback (most recent call last):
        ...
    ValueError: the text has 1 placeholder '<image>', and there is no image: give images=…, or leave it out

    token: how the placeholder is written.  argument: which takes the images.
    """
    held = text.count(token)
    if held == images:
        return
    has = f"the text has {held or 'no'} placeholder{'s' * (held > 1)} {token!r}"
    if not images:
        raise ValueError(
            f"{has}, and there is no image: give {argument}=…, or leave {'them' if held > 1 else 'it'} out"
        )
    there = "is 1 image" if images == 1 else f"are {images} images"
    raise ValueError(f"{has}, and there {there}: write one where each image stands")


def expand_prompt(model: ImagePromptModel, prompt: str, pixels: Tensor | None) -> str:
    """The prompt as the model's tokenizer reads it. pixels: (P, 3, H, W), its images; None for none.

    Raises ValueError where there are more or fewer placeholders than images, or the tokenizer does not have one.
    """
    token = placeholder(model)
    check_placeholders(prompt, token, 0 if pixels is None else len(pixels), "images")
    if model.kind == "vision-language":
        return model.expand(prompt, pixels, token=token)
    bos = model.tokenizer.ids_of.bos
    start = "" if bos is None else model.tokenizer.tokens([bos])[0]
    has_fake = len(model.tokenizer.encode(FAKE, special=False).ids) == 1
    prompt = prompt.removeprefix(start).strip(" ")
    return start + (_with_fake_tokens(prompt) if has_fake and FAKE not in prompt else prompt)


def _with_fake_tokens(prompt: str) -> str:
    """Fake tokens around the images, one between two of them, and no space beside one, as Idefics was trained.

    >>> _with_fake_tokens("<image> a cat <image><image>") == f"{FAKE}<image>{FAKE}a cat{FAKE}<image>{FAKE}<image>{FAKE}"
    True
    """
    first, *rest = (part.strip(" ") for part in prompt.split(PLACEHOLDER))
    text = first
    for part in rest:
        text += PLACEHOLDER + FAKE + part if text.endswith(FAKE) else FAKE + PLACEHOLDER + FAKE + part
    return text


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
    largest = max(len(each) for each in there)
    filled = there[0].new_zeros(len(pixels), largest, *there[0].shape[1:])  # (B, P, 3, H, W)
    for row, each in zip(filled, pixels, strict=True):
        if each is not None:
            row[: len(each)] = each
    return model.read_image(filled)
