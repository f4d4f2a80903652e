r"""Prompts in which pictures stand among words, as the two kinds of models that read them want them.

    PictureWriter (LLaVA)     USER: <image>\nWhat is it? ASSISTANT:      one placeholder becomes one token per patch
    FlamingoModel (Idefics)   <image>Question: What is it? Answer:       one placeholder stays one, a fake token around

A prompt that holds the placeholder is taken as it is; a question or the beginning of a caption is put into the form
that the documentation of these models uses. It does not know how the text is written, nor any checkpoint's template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.models.flamingo_model import FlamingoModel, FlamingoReading
from regard.models.picture_writer import PictureReading, PictureWriter, check_count

__all__ = [
    "PLACEHOLDER",
    "Reader",
    "caption_prompt",
    "placeholder",
    "question_prompt",
    "read_pictures",
    "spoken",
    "without_special",
]

PLACEHOLDER = "<image>"
FAKE = "<fake_token_around_image>"  # so Idefics calls what stands on both sides of a picture
Reader: TypeAlias = PictureWriter | FlamingoModel


def question_prompt(model: Reader, question: str) -> str:
    r"""A question about one picture as a prompt; one that holds the placeholder is a prompt already.

    The forms are those of https://huggingface.co/docs/transformers: model_doc/llava (llava-1.5) and tasks/idefics.
    """
    token = _checked(model, question)
    if token in question:
        return question
    if isinstance(model, PictureWriter):
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
    return model.spelling if isinstance(model, PictureWriter) else PLACEHOLDER


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
    if isinstance(model, PictureWriter):
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


def read_pictures(model: Reader, pixels: Sequence[Tensor | None]) -> PictureReading | FlamingoReading:
    """A decoder that has looked at the pictures of each prompt. pixels: (P, 3, H, W) for each, None for none."""
    there = [each for each in pixels if each is not None]
    if not there:
        return model.read_picture(None)
    if isinstance(model, PictureWriter):
        return model.read_picture(torch.cat(there))
    most = max(len(each) for each in there)
    filled = there[0].new_zeros(len(pixels), most, *there[0].shape[1:])  # (B, P, 3, H, W)
    for row, each in zip(filled, pixels, strict=True):
        if each is not None:
            row[: len(each)] = each
    return model.read_picture(filled)
