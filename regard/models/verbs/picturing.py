"""Pictures for the verbs: which models look at them, and pictures as pixels, batch by batch.

A picture is the same to a verb whether it comes alone or in a list: each is prepared by itself, and those that become
pixels of one size go through the model together. It does not know any verb.

Axis letters: P pictures, B those of a batch, H, W height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from regard.frames import Frame
from regard.models.dual_model import DualModel
from regard.models.flamingo_model import FlamingoModel
from regard.models.images.pictures import Source, are_several, open_picture
from regard.models.images.preprocessing import Prepared, Preprocessor
from regard.models.model import Model
from regard.models.picture_text_model import Answerer, Captioner, Matcher
from regard.models.picture_writer import PictureWriter
from regard.models.verbs.asking import check_batch
from regard.models.vision_model import VisionModel
from regard.models.vision_parts import VisionTower
from regard.models.window_parts import WindowTower

__all__ = ["Looked", "Several", "as_list", "judge", "look_at", "looks", "tower_of"]

Several: TypeAlias = "list[Any] | tuple[Source, ...] | Iterator[Any]"
"""Several pictures. Of Any, because a list of paths is no list of sources to a type checker."""

REFUSED = (ValueError, TypeError, FileNotFoundError, IsADirectoryError)  # what a picture that is none is told by


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
    if isinstance(model, (Answerer, Captioner, DualModel, FlamingoModel, Matcher, PictureWriter)):
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


def look_at(model: Model, pictures: list[Source], batch: int) -> Iterator[Looked]:
    """Pictures opened and prepared as the checkpoint asks, at most `batch` at a time, those of one size together.

    Raises ValueError for a batch below 1, and what `open_picture` and `model.preprocessor` raise, with the picture's
    number where there are several.
    """
    check_batch(batch)
    prepare = model.preprocessor
    for at in range(0, len(pictures), batch):
        sizes: dict[torch.Size, list[tuple[int, str, Prepared]]] = {}
        for number in range(at, min(at + batch, len(pictures))):
            name, prepared = _prepared(prepare, pictures, number)
            sizes.setdefault(prepared.pixels.shape, []).append((number, name, prepared))
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


def _prepared(prepare: Preprocessor, pictures: list[Source], number: int) -> tuple[str, Prepared]:
    try:
        picture = open_picture(pictures[number])
        return picture.name, prepare(picture)
    except REFUSED as error:
        if len(pictures) == 1:
            raise
        kind = next(kind for kind in REFUSED if isinstance(error, kind))
        raise kind(f"picture {number}: {error}") from None
