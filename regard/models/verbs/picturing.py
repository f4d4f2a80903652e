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
from regard.models.images.pictures import Source, are_several, glance, numbered, open_picture
from regard.models.images.preprocessing import Prepared, Preprocessor
from regard.models.model import Model
from regard.models.picture_text_model import Answerer, Captioner, Matcher
from regard.models.picture_writer import PictureWriter
from regard.models.verbs.asking import check_batch
from regard.models.vision_model import VisionModel
from regard.models.vision_parts import VisionTower
from regard.models.window_parts import WindowTower

__all__ = ["Glanced", "Looked", "Several", "as_list", "glance_at", "judge", "look_at", "looks", "prepared", "tower_of"]

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
