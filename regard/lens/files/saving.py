"""Captures, token layouts and photos as files, and back."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard import __version__
from regard.layouts import KINDS, Frame, Layout, Sides
from regard.lens.edit_records import pack_edit, pack_effect, unpack_edit, unpack_effect
from regard.lens.files.container import (
    FORGED,
    CaptureFileError,
    ContentError,
    Incoming,
    Outgoing,
    fields,
    is_list_of,
    read,
    write,
)
from regard.lens.files.records import check_runs, pack_record, unpack_record
from regard.lens.patterns import KeyTokens, KnownVisibility
from regard.lens.view import PER_QUERY, View
from regard.masks.tiles import pool

if TYPE_CHECKING:
    from regard.lens.capture import Capture

Layouts = Mapping[str, tuple[Sides, ...]]

BINS = 64  # of a measure by position in an overview
LONGEST = 4096  # positions up to which an overview keeps tokens, padding and counts of visible keys
HEADER = {
    "model": str,
    "tokens": list | None,
    "unseen": list,
    "records": list,
    "regard": str,
    "torch": str,
    "written": str,
}
# Written only if there are some: older versions read on.
OPTIONAL = {"layouts": dict, "photos": list, "overview": bool, "edits": list, "effects": list}

MOST_PIXELS = 2**28  # of an image; a heat map of it takes 1 GiB
FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.int8, np.int16, np.int32, np.int64)

LONGEST_SIDE = 4096  # pixels of a photo; copies are made of at most 1,600
MOST_BYTES = 16 * 2**20  # of a photo; one of 1,600 × 1,600 pixels of noise takes 3 MB
LONGEST_NAME = 255
PNG = b"\x89PNG\r\n\x1a\n"
JPEG = b"\xff\xd8\xff"
SIZED = {0xC0, 0xC1, 0xC2}  # the frames of a JPEG that browsers and Pillow decode: baseline, extended, progressive


# ------------------------------------------------------------------------------------------------------------- captures


def save(capture: Capture, path: str | os.PathLike[str], overview: bool = False, *, photos: bool = True) -> None:
    """Write a capture to a file, whole or not at all. See `Capture.save` for the arguments."""
    out, records = Outgoing(), list(capture.records)
    if overview:
        for n, record in enumerate(records):
            facts, view = record.facts, record.view
            if facts is not None and max(facts.sizes[2:]) > LONGEST:
                facts = replace(facts, padding=None)
            records[n] = replace(record, facts=facts, view=None if view is None else make_overview(view))
    # The last first: keys of earlier steps are the beginning of its own, and are then not written again.
    packed = [pack_record(records[n], str(n), out) for n in reversed(range(len(records)))][::-1]
    tokens = capture.tokens
    if overview and tokens is not None and max(map(len, tokens), default=0) > LONGEST:
        tokens = None
    header: dict[str, Any] = {
        "model": capture.model,
        "tokens": tokens,
        "unseen": [list(item) for item in capture.unseen.items()],
        "records": packed,
        "regard": __version__,
        "torch": str(torch.__version__),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    layouts = {name: sides for name, sides in capture.layouts.items() if name in capture.names}
    optional = {
        "overview": any(record.view is not None and record.view.overview for record in records),
        "layouts": pack_layouts(layouts, out) if layouts else None,
        "photos": pack_photos(capture.photos if photos else (), out),
        "edits": [pack_edit(edit) for edit in capture.edits],
        "effects": [pack_effect(effect) for effect in capture.effects],
    }
    header |= {name: value for name, value in optional.items() if value}
    try:  # a file that could not be opened again is not written
        _unpack(type(capture)(), json.loads(json.dumps(header)), "", Incoming(out.tensors))
    except CaptureFileError as error:
        raise ValueError(f"the capture was changed so that it cannot be saved: {error}") from None
    write(path, header, out.tensors)


def load(capture: Capture, path: str | os.PathLike[str]) -> None:
    """Fill an empty capture from a file. Raises as `regard.open`."""
    header, tensors = read(path)
    try:
        _unpack(capture, header, os.fspath(path), Incoming(tensors))
    except CaptureFileError as error:
        advice = f": {FORGED}" if isinstance(error, ContentError) else ""
        raise CaptureFileError(f"cannot read {str(path)!r}: {error}{advice}") from None


def _unpack(capture: Capture, header: Mapping[str, Any], path: str, tensors: Incoming) -> None:
    header = fields(header, "the header", HEADER, OPTIONAL)
    if not all(is_list_of(row, str) for row in header["tokens"] or []):
        raise ContentError("tokens must be lists of words")
    if not all(is_list_of(item, str) and len(item) == 2 for item in header["unseen"]):
        raise ContentError("unseen must be pairs of a path and a reason")
    capture.model, capture.tokens = header["model"], header["tokens"]
    capture.origin = {"path": path} | {name: header[name] for name in ("regard", "torch", "written")}
    capture.unseen.update(header["unseen"])
    capture.records.extend(unpack_record(value, f"record {n}", tensors) for n, value in enumerate(header["records"]))
    check_runs(capture.records)
    if header.get("overview"):
        for record in capture.records:
            if record.view is not None:
                record.view.overview = True
    if "layouts" in header:
        layouts = unpack_layouts(header["layouts"], tensors)
        try:
            capture.layouts = layouts
        except (ValueError, LookupError) as error:
            raise ContentError(f"{error}") from None
        if other := sorted(layouts.keys() - capture.layouts.keys()):
            raise ContentError(f"it has layouts of {other[0]!r} and no call of it")
    if "photos" in header:
        capture.photos = unpack_photos(header["photos"], tensors)
        frames = max((several[0].frames for several in capture.layouts.values()), key=len, default=())
        sizes, wanted = [photo.size for photo in capture.photos], [frame.image_size for frame in frames]
        if sizes != wanted:
            raise ContentError(f"its photos are of sizes {sizes}, and its patches lie in {wanted}")
    capture.edits.extend(unpack_edit(edit, f"edit {n}") for n, edit in enumerate(header.get("edits", [])))
    capture.effects.extend(unpack_effect(one, f"effect {n}") for n, one in enumerate(header.get("effects", [])))
    tensors.finish()


def make_overview(view: View) -> View:
    """A small view: at most 64 numbers per head and measure, and the map.

    Means over all queries stay exact, as "mean entropy" and such: means of pooled numbers would count padding.

    >>> import regard
    >>> x = torch.zeros(200, 4)
    >>> small = make_overview(regard.look(x, x, x))
    >>> small.entropy.shape, small.how("entropy"), small.map().shape
    (torch.Size([64]), 'pooled', torch.Size([64, 64]))
    """
    held: dict[str, Tensor] = {}
    pooled = list(view.pooled)
    plain = replace(view, lead=None, numpy=False)
    for name, values in view.held.items():
        if name in PER_QUERY and values.shape[-1] > BINS:
            held[f"mean {name}"] = plain.mean(name)
        if name in (*PER_QUERY, "received") and values.shape[-1] > BINS:
            held[name] = pool(values, BINS)
            pooled.append(name)
        elif not name.startswith("top_"):
            held[name] = values.half() if name == "map" and view.how("map") == "pooled" else values
    short = max(view.sizes[2:]) <= LONGEST
    return replace(
        view,
        held=held,
        given_output=None,
        weights=None,
        kept_values=None,
        output_gradient=None,
        place=view.place if short else KnownVisibility(offset=view.place.offset),
        tokens=view.tokens if short else KeyTokens(),
        pooled=tuple(pooled),
        overview=True,
    )


# -------------------------------------------------------------------------------------------------------------- layouts


def pack_layouts(layouts: Layouts, out: Outgoing) -> dict[str, Any]:
    """The JSON of token layouts; their tensors go to `out`."""
    tokens: dict[Layout, int] = {}
    frames: dict[Frame, int] = {}
    sides: list[Any] = []
    for path, several in layouts.items():
        numbered = []
        for side in several:
            q, k = (tokens.setdefault(layout, len(tokens)) for layout in (side.queries, side.keys))
            numbered.append([q, k, [frames.setdefault(frame, len(frames)) for frame in side.frames]])
        sides.append([path, numbered])
    packed = []
    for n, layout in enumerate(tokens):
        codes = np.select([layout.kind == kind for kind in KINDS], range(len(KINDS))).astype(np.uint8)
        arrays = {"kind": codes, "image": _narrow(layout.image, INTEGERS), "box": _narrow(layout.box, FLOATS)}
        packed.append([out.put(f"layouts/{n}/{key}", torch.from_numpy(array)) for key, array in arrays.items()])
    return {
        "frames": [
            [*map(int, (*frame.image_size, *frame.pixels)), *map(float, (*frame.scale, *frame.corner))]
            for frame in frames
        ],
        "kinds": list(KINDS),
        "tokens": packed,
        "sides": sides,
    }


def _narrow(numbers: np.ndarray[Any, Any], types: tuple[type, ...]) -> np.ndarray[Any, Any]:
    """The numbers in the first type that holds each of them exactly; the last is their own."""
    narrow = numbers
    for type_ in types:
        with np.errstate(over="ignore"):
            narrow = numbers.astype(type_)
        if np.array_equal(narrow, numbers, equal_nan=True):
            break
    return narrow


def unpack_layouts(value: object, tensors: Incoming) -> dict[str, tuple[Sides, ...]]:
    """The inverse of `pack_layouts`."""
    expected = {"frames": list, "kinds": list, "tokens": list, "sides": list}
    frame_values, kinds, tokens, sides = fields(value, "layouts", expected).values()
    if not is_list_of(kinds, str):
        raise ContentError("layouts: kinds must be words")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise CaptureFileError(f"layouts have the kind {unknown[0]!r}, unknown to this regard: upgrade regard")
    # 1. Frames.
    frames: list[Frame] = []
    for n, item in enumerate(frame_values):
        sizes, rest = (item[:4], item[4:]) if isinstance(item, list) else ([], [])
        if not (is_list_of(sizes, int) and is_list_of(rest, float) and len(sizes) == len(rest) == 4):
            raise ContentError(f"frame {n} of the layouts cannot be {reprlib.repr(item)}")
        (high, wide, rows, columns), (down, across, top, left) = sizes, rest
        few = max(high * wide, rows * columns) <= MOST_PIXELS
        if min(sizes) < 1 or not few or min(down, across) <= 0 or not all(map(isfinite, rest)):
            raise ContentError(f"frame {n} of the layouts cannot be {reprlib.repr(item)}")
        frames.append(Frame((high, wide), (rows, columns), (down, across), (top, left)))
    # 2. Layouts.
    layouts: list[Layout] = []
    for n, item in enumerate(tokens):
        where = f"layout {n}"
        if not isinstance(item, list) or len(item) != 3:
            raise ContentError(f"{where} must be three tensors: kind, image and box")
        codes = tensors.take(item[0], f"kind of {where}", (None, None), "bytes").long().numpy()
        image = tensors.take(item[1], f"image of {where}", codes.shape, "integers").long().numpy()
        box = tensors.take(item[2], f"box of {where}", (*codes.shape, 4)).double().numpy()
        if codes.size and codes.max() >= len(kinds):
            raise ContentError(f"{where} has a token of kind {codes.max()} of {len(kinds)}")
        kind = np.array(kinds, "U12")[codes] if kinds else np.zeros(codes.shape, "U12")
        try:
            layouts.append(Layout(kind, image, box))
        except ValueError as error:
            raise ContentError(f"{where}: {error}") from None
    # 3. Both together, by path.
    by_path: dict[str, tuple[Sides, ...]] = {}
    for item in sides:
        match item:
            case [str(path), list(several)] if several and path not in by_path:
                by_path[path] = tuple(_unpack_sides(numbers, path, layouts, frames) for numbers in several)
            case _:
                raise ContentError("sides of the layouts must be a path, named once, and its layouts")
    return by_path


def _unpack_sides(value: object, path: str, layouts: list[Layout], frames: list[Frame]) -> Sides:
    where = f"layouts of {path!r}"
    match value:
        case [int(q), int(k), list(images)] if is_list_of([q, k, *images], int):
            if not all(0 <= n < len(layouts) for n in (q, k)) or not all(0 <= f < len(frames) for f in images):
                raise ContentError(f"{where} name a layout or frame that is not there")
            try:
                return Sides(layouts[q], layouts[k], tuple(frames[f] for f in images))
            except ValueError as error:
                raise ContentError(f"{where}: {error}") from None
    raise ContentError(f"{where} must be two layouts and their frames")


# --------------------------------------------------------------------------------------------------------------- photos


@dataclass(frozen=True, eq=False, repr=False)
class Photo:
    """A copy of an image, to be shown under its attention.

    Attributes:
        name: for people, never a path.
        size: height and width of the image itself, which boxes are measured in.
        kind: media type of `data`: image/jpeg or image/png.
        data: bytes of a copy, which may be smaller.
    """

    name: str
    size: tuple[int, int]
    kind: str
    data: bytes

    def __repr__(self) -> str:
        return f"Photo({self.name}, {self.size[0]} high, {self.size[1]} wide, {len(self.data):,} bytes)"


def pack_photos(photos: Sequence[Photo], out: Outgoing) -> list[Any]:
    """The JSON of photos; their bytes go to `out`."""
    packed = []
    for n, photo in enumerate(photos):
        # A file's name may hold what no JSON does, or what a terminal would obey.
        name = "".join(letter for letter in photo.name if letter.isprintable())[:LONGEST_NAME]
        data = torch.from_numpy(np.frombuffer(photo.data, np.uint8).copy())  # torch wants writable memory
        packed.append([name, *photo.size, out.put(f"photos/{n}", data)])
    return packed


def unpack_photos(value: object, tensors: Incoming) -> tuple[Photo, ...]:
    """The inverse of `pack_photos`. Nothing is decoded."""
    if not isinstance(value, list):
        raise ContentError(f"photos must be a list, got {type(value).__name__}")
    return tuple(_unpack_photo(item, n, tensors) for n, item in enumerate(value))


def _unpack_photo(value: object, n: int, tensors: Incoming) -> Photo:
    match value:
        case [str(name), int(high), int(wide), reference] if (
            name.isprintable()
            and len(name) <= LONGEST_NAME
            and type(high) is type(wide) is int
            and min(high, wide) >= 1
            and high * wide <= MOST_PIXELS
        ):
            taken = tensors.take(reference, f"photo {n}", (None,), "bytes")
        case _:
            raise ContentError(f"photo {n} cannot be {reprlib.repr(value)}")
    if len(taken) > MOST_BYTES:
        raise ContentError(f"photo {n} takes {len(taken):,} bytes, and at most {MOST_BYTES:,} are read")
    data = taken.numpy().tobytes()
    kind, *size = _kind_and_size(data)
    if not all(1 <= side <= LONGEST_SIDE for side in size):
        raise ContentError(
            f"photo {n} is declared as {size[0]} × {size[1]} pixels, and copies have at most {LONGEST_SIDE:,} a side"
            if kind
            else f"photo {n} is neither a JPEG nor a PNG with a size"
        )
    return Photo(name, (high, wide), kind, data)


def _kind_and_size(data: bytes) -> tuple[str, int, int]:
    """The media type, height and width that an image's first bytes state; '' and 0 if it is neither JPEG nor PNG."""

    def number(at: int, count: int) -> int:
        return int.from_bytes(data[at : at + count], "big")

    if data.startswith(PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        return "image/png", number(20, 4), number(16, 4)
    at = 2 if data.startswith(JPEG) else len(data)
    while at + 9 <= len(data) and data[at] == 0xFF:  # one segment after the other: mark, length, content
        if data[at + 1] in SIZED:
            return "image/jpeg", number(at + 5, 2), number(at + 7, 2)
        at += 2 + max(2, number(at + 2, 2))
    return "", 0, 0
