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
from regard.models.images.pictures import Picture
from regard.models.model import Model
from regard.models.vision_model import VisionModel

__all__ = ["Given", "given_to"]


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
    needs; and as `model.preprocessor` does.
    """
    if isinstance(model, (VisionModel, DualModel)):
        return _of_picture(model, picture, text)
    raise ValueError(
        f"{model.family.title} reads texts and looks at no pictures: name a model that does, "
        "such as facebook/dinov2-small or google/vit-base-patch16-224"
    )


def _of_picture(model: VisionModel | DualModel, picture: Picture, text: str | None) -> Given:
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


def _prepared(model: Model, picture: Picture) -> tuple[Tensor, tuple[Frame, ...]]:
    prepared = model.preprocessor([picture])
    return prepared.pixels.to(model.device), prepared.frames
