"""A capture as a file, and back: `capture.save(path)` and `regard.open(path)`."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import __version__
from regard.layouts import KINDS, Frame, Layout, Sides
from regard.lens.capture import Capture, Record
from regard.lens.files.container import (
    FORGED,
    CaptureFileError,
    Incoming,
    Outgoing,
    fields,
    is_list_of,
    pool,
    read,
    write,
)
from regard.lens.files.records import check_runs, pack_record, unpack_record
from regard.lens.view import PER_QUERY, KeyTokens, KnownVisibility, View

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


LONGEST_media = 4096  # pixels of a copy's side; copies are made of at most 1,600
MOST_BYTES = 16 * 2**20  # of a copy; one of 1,600 × 1,600 pixels of noise takes 3 MB
MAX_PHOTO_PIXELS = 2**28  # of the picture itself, as of a frame
LONGEST_NAME = 255

PNG = b"\x89PNG\r\n\x1a\n"
JPEG = b"\xff\xd8\xff"
SIZED = {0xC0, 0xC1, 0xC2}  # the frames of a JPEG that browsers and Pillow decode: baseline, extended, progressive


@dataclass(frozen=True, eq=False, repr=False)
class Photo:
    """A copy of a picture, to be shown under its attention.

    name: for people, never a path.  size: height and width of the picture itself, which boxes are measured in.
    kind: the media type of `data`, the bytes of a copy that may be smaller: image/jpeg or image/png.
    """

    name: str
    size: tuple[int, int]
    kind: str
    data: bytes

    def __repr__(self) -> str:
        return f"Photo({self.name}, {self.size[0]} high, {self.size[1]} wide, {len(self.data):,} bytes)"


def pack_photos(photos: Sequence[Photo], out: Outgoing) -> list[Any]:
    """What JSON says of photographs; their bytes go to `out`.

    >>> out = Outgoing()
    >>> pack_photos([Photo("cat.png", (480, 640), "image/png", b"...")], out), out.tensors["photos/0"].shape
    ([['cat.png', 480, 640, 'photos/0']], torch.Size([3]))
    """
    return [
        [_printable(photo.name), *photo.size, out.put(f"photos/{n}", _tensor(photo.data))]
        for n, photo in enumerate(photos)
    ]


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())  # torch wants memory that may be written


def _printable(name: str) -> str:
    """A name of a file may hold what no JSON does, or what a terminal would obey."""
    return "".join(letter for letter in name if letter.isprintable())[:LONGEST_NAME]


def unpack_photos(value: object, tensors: Incoming) -> tuple[Photo, ...]:
    """The photographs that `pack_photos` made this of. Nothing is decoded.

    >>> unpack_photos([["cat.png", 480, 640, "photos/0"]], Incoming({"photos/0": torch.zeros(3, dtype=torch.uint8)}))
    Traceback (most recent call last):
        ...
    regard.lens.files.container.CaptureFileError: photo 0 is neither a JPEG nor a PNG with a size: \
another program has written it, so it is not to be trusted

    Raises CaptureFileError for what is missing, too large, or no picture by its first bytes.
    """
    if not isinstance(value, list):
        raise CaptureFileError(f"photos must be a list, got {type(value).__name__}: {FORGED}")
    return tuple(_unpack(item, n, tensors) for n, item in enumerate(value))


def _unpack(value: object, n: int, tensors: Incoming) -> Photo:
    match value:
        case [str(name), int(high), int(wide), reference] if (
            name.isprintable()
            and len(name) <= LONGEST_NAME
            and type(high) is type(wide) is int
            and min(high, wide) >= 1
            and high * wide <= MAX_PHOTO_PIXELS
        ):
            taken = tensors.take(reference, f"photo {n}", (None,), "bytes")
        case _:
            raise CaptureFileError(f"photo {n} cannot be {reprlib.repr(value)}: {FORGED}")
    if len(taken) > MOST_BYTES:
        raise CaptureFileError(f"photo {n} takes {len(taken):,} bytes, and at most {MOST_BYTES:,} are read: {FORGED}")
    data = taken.numpy().tobytes()
    kind, *size = _kind_and_size(data)
    if not all(1 <= side <= LONGEST_media for side in size):
        raise CaptureFileError(
            f"photo {n} says to be {size[0]} × {size[1]} pixels, and copies have at most {LONGEST_media:,} a side: {FORGED}"
            if kind
            else f"photo {n} is neither a JPEG nor a PNG with a size: {FORGED}"
        )
    return Photo(name, (high, wide), kind, data)


def _kind_and_size(data: bytes) -> tuple[str, int, int]:
    """The media type, height and width that a picture's own first bytes say; '' and 0 for what is neither kind."""
    if data.startswith(PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        return "image/png", _number(data, 20, 4), _number(data, 16, 4)
    at = 2 if data.startswith(JPEG) else len(data)
    while at + 9 <= len(data) and data[at] == 0xFF:  # one segment after the other: mark, length, content
        if data[at + 1] in SIZED:
            return "image/jpeg", _number(data, at + 5, 2), _number(data, at + 7, 2)
        at += 2 + max(2, _number(data, at + 2, 2))
    return "", 0, 0


def _number(data: bytes, at: int, count: int) -> int:
    return int.from_bytes(data[at : at + count], "big")


BINS = 64  # of a measure by position in an overview
LONGEST = 4096  # positions of which an overview keeps tokens, padding and how many keys each query sees
MOST_TEXT = 32 * 2**20  # bytes of the header; the file's text, 64 MiB, has to name the tensors too
HEADER = {
    "model": str,
    "tokens": list | None,
    "unseen": list,
    "records": list,
    "regard": str,
    "torch": str,
    "written": str,
}
OPTIONAL = {
    "layouts": dict,
    "photos": list,
    "overview": bool,
}  # only where there are some: what has none is read by every regard


def save(capture: Capture, path: str | os.PathLike[str], overview: bool = False, *, photos: bool = True) -> None:
    """Write a capture to a file: whole, or not at all.

    >>> import tempfile, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer) as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     seen.save(f"{folder}/run.regard")
    ...     regard.open(f"{folder}/run.regard")
    Capture(TransformerEncoderLayer: self_attn; 1 calls)

    path: used as it is; a file that is there is replaced.
    overview: keep what a first look needs. Measures by position are pooled into at most 64 means, maps are rounded to
        fp16, and q, k, outputs and links are left out; beyond 4,096 positions so are tokens, padding and counts.
    photos: write `capture.photos` too, so that whoever opens the file sees them; False leaves them out.

    Raises ValueError for a mask or bias whose cells are too many to write, and for more calls than a file holds;
    OSError where no file can be written. Either way what was there before is untouched.
    """
    out, records = Outgoing(), list(capture.records)
    chosen = [_overview_of_record(record) for record in records] if overview else records
    # The last first: keys of earlier steps are the beginning of its own, and are then not written again.
    packed = [pack_record(chosen[n], str(n), out) for n in reversed(range(len(chosen)))][::-1]
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
    if overview or any(record.view is not None and record.view.overview for record in records):
        header["overview"] = True
    laid_out = {name: sides for name, sides in capture.layouts.items() if name in capture.names}
    if laid_out:
        header["layouts"] = pack_layouts(laid_out, out)
    if photos and capture.photos:
        header["photos"] = pack_photos(capture.photos, out)
    _check(header, out)
    write(path, header, out.tensors)


def _check(header: dict[str, Any], out: Outgoing) -> None:
    """Raise ValueError for what the file has no room for, and for what could not be opened again."""
    text = json.dumps(header, ensure_ascii=False)
    if (size := len(text.encode(errors="replace"))) > MOST_TEXT:
        raise ValueError(
            f"{len(header['records']):,} calls take {size:,} bytes to describe, and a file has room for {MOST_TEXT:,}: "
            "watch fewer layers (watch(model, layers=…)) or fewer steps, or save them as several captures"
        )
    try:
        _unpack_capture(json.loads(text), "", Incoming(out.tensors))
    except CaptureFileError as error:
        raise ValueError(
            f"the capture was changed so that it cannot be saved: {error}".removesuffix(f": {FORGED}")
        ) from None


def open(path: str | os.PathLike[str]) -> Capture:
    """Open a capture that was saved. Its tensors are in memory, on the CPU; `capture.origin` says where it comes from.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Capture("GPT2"), f"{folder}/run.regard")
    ...     opened = open(f"{folder}/run.regard")
    >>> opened.model, sorted(opened.origin)
    ('GPT2', ['path', 'regard', 'torch', 'written'])

    Raises CaptureFileError, a ValueError, for what is not a whole capture that this regard knows; OSError for what
    cannot be opened.
    """
    header, tensors = read(
        path, HEADER.keys() | OPTIONAL.keys(), lazy=False
    )  # in memory: aligned, and nobody can cut it short
    try:
        return _unpack_capture(header, os.fspath(path), Incoming(tensors))
    except CaptureFileError as error:
        raise CaptureFileError(f"cannot read {str(path)!r}: {error}") from None


def _unpack_capture(header: Mapping[str, Any], path: str, tensors: Incoming) -> Capture:
    known = HEADER | {key: kind for key, kind in OPTIONAL.items() if key in header}
    model, tokens, unseen, records, regard, torch_, written, *_ = fields(header, "the header", known)
    if not all(is_list_of(row, str) for row in tokens or []):
        raise CaptureFileError(f"tokens must be lists of words: {FORGED}")
    if not all(is_list_of(item, str) and len(item) == 2 for item in unseen):
        raise CaptureFileError(f"unseen must be pairs of a path and a reason: {FORGED}")
    capture = Capture(model, tokens)
    capture.origin = {"path": path, "regard": regard, "torch": torch_, "written": written}
    capture.unseen.update(unseen)
    capture.records.extend(unpack_record(value, f"record {n}", tensors) for n, value in enumerate(records))
    check_runs(capture.records)
    if header.get("overview"):
        for record in capture.records:
            if record.view is not None:
                record.view.overview = True
    if "layouts" in header:
        _lay_out(capture, unpack_layouts(header["layouts"], tensors))
    if "photos" in header:
        capture.photos = unpack_photos(header["photos"], tensors)
        _check_photos(capture)
    tensors.finish()
    return capture


def _lay_out(capture: Capture, layouts: Mapping[str, Any]) -> None:
    try:
        capture.layouts = layouts
    except (ValueError, LookupError) as error:
        raise CaptureFileError(f"{error}: {FORGED}") from None
    if other := sorted(layouts.keys() - capture.layouts.keys()):
        raise CaptureFileError(f"it has layouts of {other[0]!r} and no call of it: {FORGED}")


def _check_photos(capture: Capture) -> None:
    """Refuse photographs that are not those that the tokens of the first batch entry are patches of."""
    frames = max((several[0].frames for several in capture.layouts.values()), key=len, default=())
    sizes, wanted = [photo.size for photo in capture.photos], [frame.picture for frame in frames]
    if sizes != wanted:
        raise CaptureFileError(f"its photos are of sizes {sizes}, and its patches lie in {wanted}: {FORGED}")


# ------------------------------------------------------------------------------------------------------------- overview


def make_overview(view: View) -> View:
    """What a first look needs of a view: at most 64 numbers per head and measure, and the map.

    >>> import regard
    >>> x = torch.zeros(200, 4)
    >>> small = overview_of(regard.look(x, x, x))
    >>> small.entropy.shape, small.how("entropy"), small.map().shape
    (torch.Size([64]), 'pooled', torch.Size([64, 64]))

    Means over all queries stay exact, as "mean entropy" and such: those of pooled numbers would count padding in.
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
    told = view.place if short else KnownVisibility(offset=view.place.offset)
    tokens = view.tokens if short else KeyTokens()
    slim = replace(view, held=held, given_output=None, weights=None, place=told, tokens=tokens, pooled=tuple(pooled))
    return replace(slim, overview=True)


def _overview_of_record(record: Record) -> Record:
    facts, view = record.facts, record.view
    if facts is not None and max(facts.sizes[2:]) > LONGEST:
        facts = replace(facts, padding=None)
    return replace(record, facts=facts, view=None if view is None else make_overview(view))
