"""A capture as a file, and back: `capture.save(path)` and `regard.open(path)`.

Every record comes back with all it had: its view, its facts, what is exact and what is pooled. An overview is a file of
a few megabytes at any length: measures by position become means of neighbours, and neither q and k nor links are kept.

It does not know how a file is laid out (`capture_file.py`), nor what is written of a call (`file_records.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from regard import __version__
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
from regard.lens.files.media import pack_layouts, pack_photos, unpack_layouts, unpack_photos
from regard.lens.files.records import check_runs, pack_record, unpack_record
from regard.lens.view import PER_QUERY, KeyTokens, KnownVisibility, View

__all__ = ["open", "overview_of", "save"]

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
