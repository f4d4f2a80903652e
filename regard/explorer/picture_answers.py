"""Pictures as answers: which there are, where each token of an attention lies in them, and their bytes.

For `answers.py`, which says what all share. A grid of patches is its rows and columns, not a box for each patch.

Axis letters: W windows, N positions, P patches of one picture.

It does not know weights, nor who asks.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from regard.explorer.answer_types import Grid, PictureAnswer, PictureLine, Run, TokenLayout
from regard.explorer.sessions import Session
from regard.frames import Frame
from regard.layouts import Layout
from regard.lens.files.file_photos import Photo
from regard.lens.placed_patches import Patches

__all__ = ["find_picture", "layouts_of", "picture", "pictures_of"]

DIGITS = 6  # of a fraction of a side: a millionth


def pictures_of(session: Session) -> list[PictureLine]:
    """The pictures that a model looked at.

    >>> from regard.lens.capture import Capture
    >>> pictures_of(Session("toy", Capture(), ()))
    []
    """
    return [_line(frame, n, session.pictures) for n, frame in enumerate(session.frames)]


def _line(frame: Frame, number: int, pictures: Sequence[Photo]) -> PictureLine:
    shown = pictures[number] if number < len(pictures) else None
    seen = frame.boxes([0, 0, *frame.pixels]) / (frame.picture * 2)
    return {
        "height": frame.picture[0],
        "width": frame.picture[1],
        "name": None if shown is None else shown.name,
        "shown": shown is not None,
        "seen": seen.round(DIGITS).tolist(),
    }


def picture(session: Session, number: int) -> PictureAnswer:
    """The bytes of a picture to be shown. Raises LookupError where it is not there.

    >>> from regard.lens.capture import Capture
    >>> picture(Session("toy", Capture(), ()), 0)
    Traceback (most recent call last):
        ...
    LookupError: there is no picture 0 to be shown: this session has none
    """
    found = find_picture(session, number)
    return {"kind": found.kind, "base64": b64encode(found.data).decode("ascii")}


def find_picture(session: Session, number: int) -> Photo:
    """A picture by its number. Raises TypeError for what is no number, LookupError where it is not there."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"number must be an integer, got {type(number).__name__}: {number!r}")
    if not 0 <= number < len(session.pictures):
        there = f"it has {len(session.pictures)}, counted from 0" if session.pictures else "this session has none"
        raise LookupError(f"there is no picture {number} to be shown: {there}")
    return session.pictures[number]


def layouts_of(session: Session) -> tuple[list[TokenLayout], list[list[int] | None]]:
    """The unlike layouts of a session, and for each layer which of them its queries and its keys have.

    >>> from regard.lens.capture import Capture
    >>> layouts_of(Session("toy", Capture(), ()))
    ([], [])
    """
    numbers: dict[Layout, int] = {}
    found: list[TokenLayout] = []
    layers: list[list[int] | None] = []
    for layer in session.layers:
        if layer.sides is None:
            layers.append(None)
            continue
        for layout in (layer.sides.queries, layer.sides.keys):
            if layout not in numbers:
                numbers[layout] = len(found)
                found.append(_layout(layout, layer.sides.frames))
        layers.append([numbers[layer.sides.queries], numbers[layer.sides.keys]])
    return found, layers


def _layout(layout: Layout, frames: Sequence[Frame]) -> TokenLayout:
    pairs = zip(layout.kind.ravel().tolist(), layout.picture.ravel().tolist(), strict=True)
    runs: list[Run] = [
        {"kind": kind, "picture": None if number < 0 else number, "count": len(list(run))}
        for (kind, number), run in groupby(pairs)
    ]
    patches = [Patches(layout, frame, number) for number, frame in enumerate(frames)]
    return {"runs": runs, "grids": [_grid(one) for one in patches if len(one.tokens)]}


def _grid(patches: Patches) -> Grid:
    """Rows and columns as they are found among the boxes; those of unlike heights at one place are unlike rows."""
    high, wide = patches.frame.picture
    boxes = (patches.boxes / (high, wide, high, wide)).round(DIGITS)  # (P, 4)
    rows, row = np.unique(boxes[:, [0, 2]], axis=0, return_inverse=True)
    columns, column = np.unique(boxes[:, [1, 3]], axis=0, return_inverse=True)
    cells = (row.ravel() * len(columns) + column.ravel()).tolist()
    return {
        "picture": patches.picture,
        "rows": rows.tolist(),
        "columns": columns.tolist(),
        "cells": None if cells == list(range(len(cells))) else cells,
    }
