"""What a capture file says of where tokens lie in pictures: layouts and frames, as JSON and small tensors; and back.

    {"frames": [[height, width of the picture, of the pixels, scale down, across, corner down, across], …],
     "kinds":  ["text", "patch", …],
     "tokens": [[kind, picture, box], …],            tensors: indices of kinds (W, N), (W, N), (W, N, 4)
     "sides":  [[path, [[queries, keys, [frame, …]], …]], …]}        indices of tokens and frames

Each layout and each frame is written once, its numbers in the narrowest type that holds them exactly.

This file does not know captures, nor what calls the layouts have to fit.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.frames import Frame
from regard.layouts import KINDS, Layout, Sides
from regard.lens.files.capture_file import FORGED, CaptureFileError
from regard.lens.files.file_parts import Incoming, Outgoing, fields, is_list_of

__all__ = ["pack_layouts", "unpack_layouts"]

Layouts = Mapping[str, tuple[Sides, ...]]

MOST_PIXELS = 2**28  # of a picture; a heat of it takes 1 GiB
FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.int8, np.int16, np.int32, np.int64)


def pack_layouts(layouts: Layouts, out: Outgoing) -> dict[str, Any]:
    """What JSON says of layouts; the tensors go to `out`.

    >>> out = Outgoing()
    >>> packed = pack_layouts({"attn": (Sides.patches(32),)}, out)
    >>> packed["sides"], out.tensors["layouts/0/box"].dtype
    ([['attn', [[0, 0, [0]]]]], torch.float16)
    """
    tokens: dict[Layout, int] = {}
    frames: dict[Frame, int] = {}

    def numbered(side: Sides) -> list[Any]:
        both = [tokens.setdefault(layout, len(tokens)) for layout in (side.queries, side.keys)]
        return [*both, [frames.setdefault(frame, len(frames)) for frame in side.frames]]

    sides = [[path, [numbered(side) for side in several]] for path, several in layouts.items()]
    return {
        "frames": [_pack_frame(frame) for frame in frames],
        "kinds": list(KINDS),
        "tokens": [_pack_layout(layout, f"layouts/{n}", out) for n, layout in enumerate(tokens)],
        "sides": sides,
    }


def _pack_frame(frame: Frame) -> list[int | float]:
    return [*map(int, (*frame.picture, *frame.pixels)), *map(float, (*frame.scale, *frame.corner))]


def _pack_layout(layout: Layout, name: str, out: Outgoing) -> list[Any]:
    codes = np.select([layout.kind == kind for kind in KINDS], range(len(KINDS)))
    arrays = {
        "kind": codes.astype(np.uint8),
        "picture": _narrow(layout.picture, INTEGERS),
        "box": _narrow(layout.box, FLOATS),
    }
    return [out.put(f"{name}/{key}", torch.from_numpy(array)) for key, array in arrays.items()]


def _narrow(numbers: np.ndarray[Any, Any], types: tuple[type, ...]) -> np.ndarray[Any, Any]:
    """The numbers in the first type that holds each of them exactly."""
    for type_ in types:
        with np.errstate(over="ignore"):
            narrow: np.ndarray[Any, Any] = numbers.astype(type_)
        if np.array_equal(narrow, numbers, equal_nan=True):
            return narrow
    raise AssertionError("the last type is that of the numbers")


def unpack_layouts(value: object, tensors: Incoming) -> dict[str, tuple[Sides, ...]]:
    """The layouts that `pack_layouts` made this of.

    >>> out = Outgoing()
    >>> packed = pack_layouts({"attn": (Sides.patches(32),)}, out)
    >>> unpack_layouts(packed, Incoming(out.tensors)) == {"attn": (Sides.patches(32),)}
    True

    Raises CaptureFileError for anything that is missing, unknown, or does not go together.
    """
    kinds_of = {"frames": list, "kinds": list, "tokens": list, "sides": list}
    frames, kinds, tokens, sides = fields(value, "layouts", kinds_of)
    if not is_list_of(kinds, str):
        raise CaptureFileError(f"layouts: kinds must be words: {FORGED}")
    if strange := sorted(set(kinds) - set(KINDS)):
        raise CaptureFileError(f"layouts have the kind {strange[0]!r}, unknown to this regard: upgrade regard")
    read_frames = [_unpack_frame(frame, n) for n, frame in enumerate(frames)]
    layouts = [_unpack_layout(parts, n, kinds, tensors) for n, parts in enumerate(tokens)]
    found = [_unpack_sides(item, layouts, read_frames) for item in sides]
    if len(dict(found)) < len(found):
        raise CaptureFileError(f"layouts name a path twice: {FORGED}")
    return dict(found)


def _unpack_frame(value: object, n: int) -> Frame:
    sizes, rest = (value[:4], value[4:]) if isinstance(value, list) else ([], [])
    if is_list_of(sizes, int) and is_list_of(rest, float) and len(sizes) == len(rest) == 4:
        (high, wide, rows, columns), (down, across, top, left) = sizes, rest
        few = max(high * wide, rows * columns) <= MOST_PIXELS
        if min(sizes) >= 1 and few and min(down, across) > 0 and all(map(isfinite, rest)):
            return Frame((high, wide), (rows, columns), (down, across), (top, left))
    raise CaptureFileError(f"frame {n} of the layouts cannot be {reprlib.repr(value)}: {FORGED}")


def _unpack_layout(value: object, n: int, kinds: list[str], tensors: Incoming) -> Layout:
    where = f"layout {n}"
    if not isinstance(value, list) or len(value) != 3:
        raise CaptureFileError(f"{where} must be three tensors: kind, picture and box: {FORGED}")
    codes = tensors.take(value[0], f"kind of {where}", (None, None), "bytes")
    picture = tensors.take(value[1], f"picture of {where}", tuple(codes.shape), "integers")
    box = tensors.take(value[2], f"box of {where}", (*codes.shape, 4))
    if codes.numel() and int(codes.max()) >= len(kinds):
        raise CaptureFileError(f"{where} has a token of kind {int(codes.max())} of {len(kinds)}: {FORGED}")
    kind = np.array(kinds, "U12")[_numpy(codes)] if kinds else np.zeros(tuple(codes.shape), "U12")
    try:
        return Layout(kind, _numpy(picture), _numpy(box))
    except ValueError as error:
        raise CaptureFileError(f"{where}: {error}: {FORGED}") from None


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return np.asarray(tensor.double().numpy() if tensor.is_floating_point() else tensor.long().numpy())


def _unpack_sides(value: object, layouts: list[Layout], frames: list[Frame]) -> tuple[str, tuple[Sides, ...]]:
    match value:
        case [str(path), list(several)] if several:
            return path, tuple(_unpack_side(item, path, layouts, frames) for item in several)
    raise CaptureFileError(f"sides of the layouts must be a path and its layouts: {FORGED}")


def _unpack_side(value: object, path: str, layouts: list[Layout], frames: list[Frame]) -> Sides:
    where = f"layouts of {path!r}"
    match value:
        case [int(q), int(k), list(pictures)] if is_list_of([q, k, *pictures], int):
            if not all(0 <= n < len(layouts) for n in (q, k)) or not all(0 <= f < len(frames) for f in pictures):
                raise CaptureFileError(f"{where} name a layout or frame that is not there: {FORGED}")
            try:
                return Sides(layouts[q], layouts[k], tuple(frames[f] for f in pictures))
            except ValueError as error:
                raise CaptureFileError(f"{where}: {error}: {FORGED}") from None
    raise CaptureFileError(f"{where} must be two layouts and their frames: {FORGED}")
