"""What each kind of model is given with a picture: its pixels, a text where it reads one, and where its tokens lie.

What a model writes about a picture it reads once more, as it was while it wrote: all but the last token, which nobody
read, and each as a word, whatever it is.

It does not know sessions, nor what is seen of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.explorer.reading import without_dropout
from regard.frames import Frame
from regard.layouts import Sides
from regard.models.dual_model import DualModel
from regard.models.flamingo_model import FlamingoModel, last_picture
from regard.models.images.pictures import Picture
from regard.models.model import Model
from regard.models.parts import Inserted
from regard.models.picture_text_model import Answerer, Captioner, Matcher
from regard.models.picture_writer import PictureWriter
from regard.models.verbs.picture_prompts import caption_prompt, question_prompt, spoken, without_special
from regard.models.verbs.picturing import looks
from regard.models.vision_model import VisionModel

__all__ = ["Given", "check_sight", "given_to"]

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
    check_sight(model)
    if isinstance(model, (VisionModel, DualModel)):
        return _alone(model, picture, text)
    if isinstance(model, Captioner):
        return _captioned(model, picture, text)
    if isinstance(model, (Answerer, Matcher)):
        return _beside(model, picture, text)
    assert isinstance(model, (PictureWriter, FlamingoModel)), "the other models that look at pictures"
    return _among(model, picture, text)


def check_sight(model: Model) -> None:
    """Raise ValueError for a model that does not look at pictures."""
    if not looks(model):
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
    return Given(without_dropout(model, lambda: model(pixels=pixels)), model.layouts(frame))


def _captioned(model: Captioner, picture: Picture, text: str | None) -> Given:
    """A picture and its caption: the one that is given, or what the model writes."""
    pixels, (frame,) = _prepared(model, picture)
    if text is None:
        written = model.caption(picture, new_tokens=_room(model.decoder.embed.most, 1))
        text, after = str(written.text).strip(), written.ids[:-1]
        ids = torch.cat([torch.tensor([model.start]), after])[None]  # (1, N)
    else:
        ids, _ = model.prompt(model.tokenizer.batch([text]).ids)
    ids = ids.to(model.device)
    words = [START, *_labels(model, ids[0, 1:])]  # of `start` the tokenizer may know nothing
    read = without_dropout(model, lambda: model(ids, pixels=pixels))
    return Given(read, model.layouts(frame, ids.shape[1]), [words], text)


def _beside(model: Answerer | Matcher, picture: Picture, text: str | None) -> Given:
    """A picture, and a question or a text that may match it. Of who answers, the reading of the question is seen."""
    if not text:
        what = "a question" if isinstance(model, Answerer) else "a text that may match the picture"
        raise ValueError(f"{model.family.title} with task {model.task!r} reads {what}: give it as the text")
    pixels, (frame,) = _prepared(model, picture)
    ids = model.tokenizer.batch([text]).ids.to(model.device)  # (1, N)
    n = ids.shape[1]
    if isinstance(model, Matcher):
        read = without_dropout(model, lambda: model(ids, pixels=pixels))
        return Given(read, model.layouts(frame, n), [model.tokenizer.tokens(ids[0])], text)
    answer = model.answer(picture, text, new_tokens=_room(model.decoder.embed.most, 1))
    read = without_dropout(model, lambda: model.read_picture(pixels, ids))
    layouts = model.layouts(frame, n, 1)
    seen = {path: sides for path, sides in layouts.items() if not path.startswith("decoder.")}
    return Given(read, seen, [model.tokenizer.tokens(ids[0])], f"{text} → {answer.text.strip()}")


def _among(model: PictureWriter | FlamingoModel, picture: Picture, text: str | None) -> Given:
    """A picture among the words of a prompt, and what the model writes after it."""
    pixels, frames = _prepared(model, picture)
    asked = spoken(model, caption_prompt(model, None) if text is None else question_prompt(model, text), pixels)
    if isinstance(model, PictureWriter):
        prompt = model.tokenizer.batch([asked]).ids.to(model.device)  # (1, n)
    else:
        prompt = without_special(model, [asked])[0].to(model.device)
    count = _room(model.most, prompt.shape[1])
    written = (
        model.caption(picture, new_tokens=count) if text is None else model.answer(picture, text, new_tokens=count)
    )
    after = written.ids[None, :-1].to(model.device)
    ids = torch.cat([prompt, after], 1)  # (1, N)
    if isinstance(model, PictureWriter):
        layouts = model.layouts(torch.cat([prompt, torch.full_like(after, -1)], 1)[0], frames)  # −1: no placeholder
        read = _inserted(model, prompt, ids, pixels)
    else:
        layouts, read = model.layouts(frames, ids.shape[1]), _looked_at(model, prompt, ids, pixels)
    said = f"{text} → {written.text.strip()}" if text else written.text.strip()
    return Given(without_dropout(model, read), layouts, [_labels(model, ids[0])], said)


def _inserted(model: PictureWriter, prompt: Tensor, ids: Tensor, pixels: Tensor) -> Callable[[], object]:
    """Reads prompt (1, n) and what follows, ids (1, N): a placeholder that was written stands for no picture."""
    places = pad(prompt == model.placeholder, (0, ids.shape[1] - prompt.shape[1]))  # (1, N)
    return lambda: model.text(ids, inserted=Inserted(places, model.encode(pixels).flatten(0, 1)))


def _looked_at(model: FlamingoModel, prompt: Tensor, ids: Tensor, pixels: Tensor) -> Callable[[], object]:
    """The same, where what was written sees what the last token of the prompt sees. pixels: (P, C, H, W)."""
    sees = last_picture(prompt, len(pixels), placeholder=model.placeholder, ends=model.ends)  # (1, n, P)
    sees = torch.cat([sees, sees[:, -1:].expand(-1, ids.shape[1] - prompt.shape[1], -1)], 1)  # (1, N, P)
    return lambda: model(ids, pixels=pixels[None], sees=sees)


def _room(most: int | None, count: int) -> int:
    """How many tokens may be written after so many; where these are too many themselves, the verb will say so.

    >>> _room(None, 5), _room(37, 36), _room(37, 41)
    (32, 2, 1)
    """
    return WRITTEN if most is None else max(1, min(WRITTEN, most - count + 1))  # the last one takes no position


def _labels(model: Model, ids: Tensor) -> list[str]:
    """The words of ids (N,). A model may write rows of its table that the tokenizer does not know: [30523]."""
    size = model.tokenizer.size
    return [model.tokenizer.tokens([n])[0] if n < size else f"[{n}]" for n in ids.tolist()]


def _prepared(model: Model, picture: Picture) -> tuple[Tensor, tuple[Frame, ...]]:
    prepared = model.preprocessor([picture])
    return prepared.pixels.to(model.device), prepared.frames
