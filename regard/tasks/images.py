"""Images for the tasks: opened, prepared in batches, and placed in prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data.image_processing import Prepared, Preprocessor
from regard.data.images import Source, are_several, glance, numbered, open_picture
from regard.layouts import Frame
from regard.models.dual_encoder import DualEncoder
from regard.models.flamingo import FlamingoDecoder, FlamingoModel
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.model import Model
from regard.models.vision import VisionModel
from regard.models.vision_language import VisionLanguageDecoder, VisionLanguageModel, check_count
from regard.nn.vision import VisionTower
from regard.nn.windows import WindowTower
from regard.tasks.inputs import check_batch

Several: TypeAlias = "list[Any] | tuple[Source, ...] | Iterator[Any]"
"""Several pictures. Of Any, because a list of paths is no list of sources to a type checker."""


@dataclass(frozen=True, eq=False)
class Glanced:
    """A picture of which nothing is wrong, as far as its header tells.

    source: what to open.  pixels: height and width of what the model will get.
    """

    source: Source
    pixels: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Looked:
    """Some of the pictures of a list, of one size: on the model's device.

    numbers: their places in the list.  names: of their files.  pixels: (B, 3, H, W).  frames: one for each.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    pixels: Tensor
    frames: tuple[Frame, ...]


def tower_of(model: Model) -> VisionTower | WindowTower | None:
    """The tower that looks at pictures; None in a model of texts alone."""
    if isinstance(model, VisionModel):
        return model.tower
    if isinstance(model, (Answerer, Captioner, DualEncoder, FlamingoModel, Matcher, VisionLanguageModel)):
        return model.vision
    return None


def looks(model: Model) -> bool:
    """Does the model look at pictures?"""
    return tower_of(model) is not None


def as_list(pictures: Source | Several) -> list[Source]:
    """One picture or several as a list. Raises ValueError for an empty one.

    >>> as_list("photo.jpg")
    ['photo.jpg']
    """
    several: list[Any] = list(cast(Iterable[Any], pictures)) if are_several(pictures) else [pictures]
    if not several:
        got = "an empty list" if isinstance(pictures, (list, tuple)) else "none: nothing was found"
        raise ValueError(f"there must be at least one picture, got {got}")
    return several


def glance_at(model: Model, pictures: list[Source]) -> list[Glanced]:
    """All pictures before any is decoded: what is wrong with the last is told before the first is looked at.

    Raises what `glance` and `model.preprocessor` raise, with the picture's number where there are several.
    """
    prepare, found = model.preprocessor, []
    for number, picture in enumerate(pictures):
        with numbered(number, len(pictures)):
            source, size = glance(picture)
            found.append(Glanced(source, _pixels(prepare, size)))
    return found


def look_at(model: Model, pictures: list[Source], batch: int) -> Iterator[Looked]:
    """Pictures opened and prepared as the checkpoint asks, at most `batch` at a time, those of one size together.

    Several are glanced at first, all of them. Raises ValueError for a batch below 1, and what `open_picture` and
    `model.preprocessor` raise, with the picture's number where there are several.
    """
    check_batch(batch)
    one = len(pictures) == 1
    yield from prepared(model, pictures if one else [each.source for each in glance_at(model, pictures)], batch)


def prepared(model: Model, pictures: list[Source], batch: int) -> Iterator[Looked]:
    """The same of pictures that were glanced at."""
    check_batch(batch)
    prepare = model.preprocessor
    for at in range(0, len(pictures), batch):
        sizes: dict[torch.Size, list[tuple[int, str, Prepared]]] = {}
        for number in range(at, min(at + batch, len(pictures))):
            with numbered(number, len(pictures)):
                picture = open_picture(pictures[number])
                made = prepare(picture)
            sizes.setdefault(made.pixels.shape, []).append((number, picture.name, made))
        for group in sizes.values():
            numbers, names, each = zip(*group, strict=True)
            pixels = torch.cat([one.pixels for one in each]).to(model.device)
            yield Looked(numbers, names, pixels, tuple(one.frames[0] for one in each))


@torch.no_grad()
def judge(
    model: Model, pictures: Source | Several, batch: int, scores: Callable[[Tensor], Tensor]
) -> tuple[tuple[str, ...], Tensor]:
    """The names of pictures, and a row of numbers for each, (P, …), in their order.

    scores: pixels (B, 3, H, W) → (B, …). Raises as `as_list` and `look_at`.
    """
    rows: dict[int, tuple[str, Tensor]] = {}
    for part in look_at(model, as_list(pictures), batch):
        rows |= dict(zip(part.numbers, zip(part.names, scores(part.pixels), strict=True), strict=True))
    names, numbers = zip(*(rows[n] for n in range(len(rows))), strict=True)
    return names, torch.stack(numbers)


def _pixels(prepare: Preprocessor, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of what the model will get. A picture is refused where it cannot be prepared on its side either:
    whether it lies on its side, not every header says.
    """
    try:
        return prepare.frame(*size).pixels
    except ValueError:
        height, width = size
        try:
            return prepare.frame(width, height).pixels
        except ValueError:
            pass
        raise


PLACEHOLDER = "<image>"
FAKE = "<fake_token_around_image>"  # so Idefics calls what stands on both sides of a picture
Reader: TypeAlias = VisionLanguageModel | FlamingoModel


def question_prompt(model: Reader, question: str) -> str:
    r"""A question about one picture as a prompt; one that holds the placeholder is a prompt already.

    The forms are those of https://huggingface.co/docs/transformers: model_doc/llava (llava-1.5) and tasks/idefics.
    """
    token = _checked(model, question)
    if token in question:
        return question
    if isinstance(model, VisionLanguageModel):
        return f"USER: {token}\n{question} ASSISTANT:"
    asked = "Instruction: Provide an answer to the question. Use the image to answer.\n"
    return f"{asked}{token}Question: {question} Answer:"


def caption_prompt(model: Reader, begun: str | None) -> str:
    """What asks for a caption of one picture. begun: how it begins; one that holds the placeholder is a prompt."""
    token = _checked(model, begun or "")
    if begun is not None and token in begun:
        return begun
    if isinstance(model, FlamingoModel):
        return token + (begun or "")
    asked = f"USER: {token}\nWhat's the content of the image? ASSISTANT:"
    return f"{asked} {begun}" if begun else asked


def placeholder(model: Reader) -> str:
    """How a picture's place is written in a prompt: as the tokenizer of a PictureWriter has it, else PLACEHOLDER.

    Raises ValueError where the tokenizer has no such token.
    """
    return model.spelling if isinstance(model, VisionLanguageModel) else PLACEHOLDER


def _checked(model: Reader, prompt: str) -> str:
    """The placeholder, once it is sure that the prompt does not have another checkpoint's."""
    token = placeholder(model)
    if token not in prompt and PLACEHOLDER in prompt:
        raise ValueError(
            f"the text has {PLACEHOLDER!r}, and this checkpoint's tokenizer writes the place of a picture {token!r}: "
            "write that"
        )
    return token


def spoken(model: Reader, prompt: str, pixels: Tensor | None) -> str:
    """The prompt as the model's tokenizer reads it. pixels: (P, 3, H, W), its pictures; None for none.

    Raises ValueError where there are more or fewer placeholders than pictures, or the tokenizer does not have one.
    """
    token = placeholder(model)
    check_count(prompt, token, 0 if pixels is None else len(pixels), "pictures")
    if isinstance(model, VisionLanguageModel):
        return model.expand(prompt, pixels, token=token)
    bos = model.tokenizer.ids_of.bos
    start = "" if bos is None else model.tokenizer.tokens([bos])[0]
    has_fake = len(model.tokenizer.encode(FAKE, special=False).ids) == 1
    prompt = prompt.removeprefix(start).strip(" ")
    return start + (_faked(prompt) if has_fake and FAKE not in prompt else prompt)


def _faked(prompt: str) -> str:
    """Fake tokens around the pictures, one between two of them, and no space beside one, as Idefics was trained.

    >>> _faked("<image> a cat <image><image>") == f"{FAKE}<image>{FAKE}a cat{FAKE}<image>{FAKE}<image>{FAKE}"
    True
    """
    first, *rest = (part.strip(" ") for part in prompt.split(PLACEHOLDER))
    text = first
    for part in rest:
        text += PLACEHOLDER + FAKE + part if text.endswith(FAKE) else FAKE + PLACEHOLDER + FAKE + part
    return text


def without_special(model: FlamingoModel, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Texts that hold their special tokens already as ids and mask (B, N), padded on the left."""
    special = model.tokenizer.ids_of
    fill = next((n for n in (special.pad, special.eos) if n is not None), 0)
    rows = [torch.tensor(model.tokenizer.encode(text, special=False).ids, dtype=torch.long) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=fill, padding_side="left")
    mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return ids, pad_sequence(mask, batch_first=True, padding_side="left")


def read_pictures(model: Reader, pixels: Sequence[Tensor | None]) -> VisionLanguageDecoder | FlamingoDecoder:
    """A decoder that has looked at the pictures of each prompt. pixels: (P, 3, H, W) for each, None for none."""
    there = [each for each in pixels if each is not None]
    if not there:
        return model.read_image(None)
    if isinstance(model, VisionLanguageModel):
        return model.read_image(torch.cat(there))
    most = max(len(each) for each in there)
    filled = there[0].new_zeros(len(pixels), most, *there[0].shape[1:])  # (B, P, 3, H, W)
    for row, each in zip(filled, pixels, strict=True):
        if each is not None:
            row[: len(each)] = each
    return model.read_image(filled)
