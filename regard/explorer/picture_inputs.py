"""What each kind of model is given with a picture: its pixels, a text where it reads one, and where its tokens lie.

It does not know sessions, nor what is seen of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.frames import Frame
from regard.layouts import Sides
from regard.models.dual_model import DualModel
from regard.models.flamingo_model import FlamingoModel
from regard.models.images.pictures import Picture
from regard.models.model import Model
from regard.models.picture_text_model import Answerer, Captioner, Matcher
from regard.models.picture_writer import PictureWriter
from regard.models.verbs.picture_prompts import caption_prompt, question_prompt, spoken, without_special
from regard.models.vision_model import VisionModel

__all__ = ["Given", "given_to"]

WRITTEN = 32  # tokens that a model may write
START = "[start]"


@dataclass(frozen=True, eq=False)
class Given:
    """A model with its inputs at hand.

    read: lets the model read them.  layouts: where the tokens of each attention lie, by path.
    words: the labels of the text's tokens, one row; None without a text.  text: what is read, in words.
    """

    read: Callable[[], object]
    layouts: Mapping[str, Sides]
    words: list[list[str]] | None = None
    text: str | None = None


def given_to(model: Model, picture: Picture, text: str | None) -> Given:
    """A picture, and a text where the model reads one, as the model takes them.

    Raises ValueError for a model that does not look at pictures, a text that it does not take, or a missing one that it
    needs; and as `model.preprocessor` and the model's verbs do.
    """
    if isinstance(model, (VisionModel, DualModel)):
        return _alone(model, picture, text)
    if isinstance(model, Captioner):
        return _captioned(model, picture, text)
    if isinstance(model, (Answerer, Matcher)):
        return _beside(model, picture, text)
    if isinstance(model, (PictureWriter, FlamingoModel)):
        return _among(model, picture, text)
    raise ValueError(
        f"{model.family.title} reads texts and looks at no pictures: name a model that does, "
        "such as facebook/dinov2-small or google/vit-base-patch16-224"
    )


def _alone(model: VisionModel | DualModel, picture: Picture, text: str | None) -> Given:
    """A picture without a text."""
    if text is not None:
        raise ValueError(
            f"{model.family.title} looks at the picture alone here, and no text beside it changes what it sees: "
            "leave the text out"
        )
    pixels, (frame,) = _prepared(model, picture)

    @torch.no_grad()
    def read() -> None:
        model(pixels=pixels)

    return Given(read, model.layouts(frame))


def _captioned(model: Captioner, picture: Picture, text: str | None) -> Given:
    """A picture and its caption: the one that is given, or what the model writes."""
    pixels, (frame,) = _prepared(model, picture)
    if text is None:
        written = model.caption(picture, new_tokens=WRITTEN)
        text, ids = str(written.text).strip(), torch.cat([torch.tensor([model.start]), written.ids])[None]  # (1, N)
    else:
        ids, _ = model.prompt(model.tokenizer.batch([text]).ids)
    ids = ids.to(model.device)
    words = [START, *model.tokenizer.tokens(ids[0, 1:])]  # of `start` the tokenizer may know nothing

    @torch.no_grad()
    def read() -> None:
        model(ids, pixels=pixels)

    return Given(read, model.layouts(frame, ids.shape[1]), [words], text)


def _beside(model: Answerer | Matcher, picture: Picture, text: str | None) -> Given:
    """A picture, and a question or a text that may match it. Of who answers, the reading of the question is seen."""
    if not text:
        what = "a question" if isinstance(model, Answerer) else "a text that may match the picture"
        raise ValueError(f"{model.family.title} with task {model.task!r} reads {what}: give it as the text")
    pixels, (frame,) = _prepared(model, picture)
    ids = model.tokenizer.batch([text]).ids.to(model.device)  # (1, N)
    n = ids.shape[1]
    layouts = model.layouts(frame, n, 1) if isinstance(model, Answerer) else model.layouts(frame, n)
    said = (
        f"{text} → {model.answer(picture, text, new_tokens=WRITTEN).text.strip()}"
        if isinstance(model, Answerer)
        else text
    )

    @torch.no_grad()
    def read() -> None:
        if isinstance(model, Answerer):
            model.read_picture(pixels, ids)
        else:
            model(ids, pixels=pixels)

    seen = {path: sides for path, sides in layouts.items() if not path.startswith("decoder.")}
    return Given(read, seen, [model.tokenizer.tokens(ids[0])], said)


def _among(model: PictureWriter | FlamingoModel, picture: Picture, text: str | None) -> Given:
    """A picture among the words of a prompt, and what the model writes after it."""
    pixels, frames = _prepared(model, picture)
    if text is None:
        prompt, written = caption_prompt(model, None), model.caption(picture, new_tokens=WRITTEN)
    else:
        prompt, written = question_prompt(model, text), model.answer(picture, text, new_tokens=WRITTEN)
    asked = spoken(model, prompt, pixels)
    begun = (
        model.tokenizer.batch([asked]).ids if isinstance(model, PictureWriter) else without_special(model, [asked])[0]
    )
    ids = torch.cat([begun.cpu(), written.ids[None].cpu()], 1).to(model.device)  # (1, N)
    if isinstance(model, PictureWriter):
        layouts, shown = model.layouts(ids[0], frames), pixels
    else:
        layouts, shown = model.layouts(frames, ids.shape[1]), pixels[None]

    @torch.no_grad()
    def read() -> None:
        model(ids, pixels=shown)

    said = f"{text} → {written.text.strip()}" if text else written.text.strip()
    return Given(read, layouts, [model.tokenizer.tokens(ids[0])], said)


def _prepared(model: Model, picture: Picture) -> tuple[Tensor, tuple[Frame, ...]]:
    prepared = model.preprocessor([picture])
    return prepared.pixels.to(model.device), prepared.frames
