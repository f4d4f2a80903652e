"""What a capture file says of one call: its record, its view and its facts, as JSON and tensors; and back, all checked.

Shapes are checked against the sizes of the call, names against those that this regard knows. What does not go together
is refused, because nothing that comes later could tell.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys).

This file does not know captures or how files are laid out.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from regard.lens.assembly import StepLink
from regard.lens.capture import Record
from regard.lens.doctor.facts import Causality, Facts
from regard.lens.doctor.mask_summary import BiasKind, Side
from regard.lens.files.container import (
    FORGED,
    Axis,
    CaptureFileError,
    Incoming,
    Kind,
    Outgoing,
    Reference,
    fields,
    is_list_of,
)
from regard.lens.files.exact_weights import Sizes, pack_weights, unpack_weights
from regard.lens.measures.weights import StoredWeights
from regard.lens.patterns import NAMES as PATTERNS
from regard.lens.view import PER_QUERY, Tokens, Told, View

__all__ = ["check_runs", "pack_record", "unpack_record"]

REFERENCE: Any = str | dict | None

MOST_POSITIONS = 1 << 24  # of a side; beyond that a file claims what nobody has run
FARTHEST = 1 << 40  # where a query may be said to stand; torch counts in 64 bits
LARGEST = 1e300
BANDS = (4, 4, 32, 32)  # the most that facts have of them

RECORD = {
    "path": str,
    "n": int,
    "kind": str,
    "source": str,
    "kernel": str,
    "compiled": bool,
    "trouble": str | None,
    "link": dict | None,
    "facts": dict | None,
    "heads": list,
    "view": dict | None,
}


def pack_record(record: Record, name: str, out: Outgoing) -> dict[str, Any]:
    """What JSON says of a record; the tensors go to `out` under names that start with `name`.

    >>> packed = pack_record(Record("attn", 0, "self", "flex", "flex", trouble="no kernel"), "0", Outgoing())
    >>> packed["path"], packed["trouble"], packed["view"]
    ('attn', 'no kernel', None)

    Raises ValueError for a view that holds what is no measure of regard's, and as `pack_weights` does.
    """
    plain = {key: getattr(record, key) for key in ("path", "n", "kind", "source", "kernel", "compiled", "trouble")}
    return {
        **plain,
        "link": None if record.link is None else _pack_link(record.link),
        "facts": None if record.facts is None else _pack_facts(record.facts, name, out),
        "heads": [[key, out.put(f"{name}/heads/{key}", values)] for key, values in record.heads.items()],
        "view": None if record.view is None else _pack_view(record.view, name, out),
    }


def unpack_record(value: object, where: str, tensors: Incoming) -> Record:
    """The record that `pack_record` made this of.

    >>> packed = pack_record(Record("attn", 0, "self", "flex", "flex", trouble="no kernel"), "0", Outgoing())
    >>> unpack_record(packed, "record 0", Incoming({})).trouble
    'no kernel'

    where: in words, for the message.
    Raises CaptureFileError for anything that is missing, unknown, or does not go together.
    """
    path, n, kind, source, kernel, compiled, trouble, link, facts, heads, view = fields(value, where, RECORD)
    if kind not in ("self", "cross"):
        raise CaptureFileError(f"{where}: kind must be self or cross, got {kind!r:.80}: {FORGED}")
    if n < 0:
        raise CaptureFileError(f"{where}: n must be the number of a call, got {n}: {FORGED}")
    seen = None if view is None else _unpack_view(view, where, tensors)
    known = None if facts is None else _unpack_facts(facts, where, tensors)
    if seen is not None and known is not None and seen.sizes != known.sizes:
        raise CaptureFileError(f"{where}: its view is of {seen.sizes}, its facts of {known.sizes}: {FORGED}")
    if seen is not None and known is not None and known.edited:
        seen.edited = True
        if isinstance(seen.weights, StoredWeights):
            seen.weights.edited = True
    shape: tuple[Axis, ...] = (None, None) if seen is None else seen.sizes[:2]
    numbers = {key: tensors.take(ref, f"{key} of {where}", shape) for key, ref in _pairs(heads, where)}
    carried = None if link is None else _unpack_link(link, n, None if seen is None else seen.sizes[0], where)
    return Record(path, n, kind, source, kernel, compiled, seen, known, numbers, trouble, carried)


def check_runs(records: Sequence[Record]) -> None:
    """Raise CaptureFileError for calls that are said to carry on others, and cannot: they could not be put together."""
    for path in dict.fromkeys(record.path for record in records):
        earlier: dict[int, tuple[View, StepLink | None]] = {}  # by the numbers of the calls: some could not be read
        for record in (record for record in records if record.path == path):
            view, link = record.view, record.link
            if view is None:
                continue
            earlier[record.n] = view, link
            if link is None or link.after is None:
                continue
            where = f"call {record.n} of {path!r:.80}"
            before, previous = earlier.get(link.after, (view, None))
            if previous is None:
                raise CaptureFileError(f"{where} carries on call {link.after}, which is not before it: {FORGED}")
            start, rows = previous.first, range(view.sizes[0]) if link.rows is None else link.rows
            counts = [None if one.returned is None else len(one.returned) for one in (previous, link)]
            if max(rows, default=0) >= max(before.sizes[0], 1) or counts[0] != counts[1] or counts[0] == 0:
                raise CaptureFileError(f"{where} carries on batch rows that call {link.after} does not have: {FORGED}")
            if view.sizes[1] != before.sizes[1] or not start <= link.first <= start + before.sizes[3]:
                raise CaptureFileError(
                    f"{where}, of {view.sizes} with first = {link.first}, cannot carry on {before.sizes} with first = "
                    f"{start}: {FORGED}"
                )
            forms = [(_width(v.given_output), _width(v.held.get("top_key"))) for v in (before, view)]
            if forms[0] != forms[1]:
                raise CaptureFileError(
                    f"{where} has outputs or links of another width than what it carries on: {FORGED}"
                )


def _width(values: Any) -> int | None:
    return None if values is None else int(values.shape[-1])


def _pack_link(link: StepLink) -> dict[str, Any]:
    rows = None if link.rows is None else list(link.rows)
    packed = {"after": link.after, "first": link.first, "known": link.known, "rows": rows}
    return packed if link.returned is None else packed | {"returned": list(link.returned)}


def _unpack_link(value: object, n: int, batch: int | None, where: str) -> StepLink:
    kinds: dict[str, Any] = {"after": int | None, "first": int, "known": int, "rows": list | None}
    if isinstance(value, dict) and "returned" in value:  # only where it is known
        kinds["returned"] = list
    after, first, known, rows, *others = fields(value, f"link of {where}", kinds)
    there = after is None or 0 <= after < n
    moved = rows is None or (is_list_of(rows, int) and len(rows) == batch and set(rows) <= set(range(len(rows))))
    ended = all(is_list_of(returned, int) and set(returned) <= set(range(-1, batch or 0)) for returned in others)
    placed = 0 <= first <= MOST_POSITIONS and 0 <= known <= MOST_POSITIONS
    if not there or not moved or not ended or not placed:
        raise CaptureFileError(f"link of {where} leads to a call or to batch rows that are not there: {FORGED}")
    return StepLink(after, first, known, None if rows is None else tuple(rows), *map(tuple, others))


def _pairs(values: list[Any], where: str) -> list[tuple[str, object]]:
    """[[name, reference], …], in the order in which they were, which the keys of a JSON object lose."""
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in values):
        raise CaptureFileError(f"{where}: tensors must be listed as pairs of a name and where it is: {FORGED}")
    return [(name, reference) for name, reference in values]


# ---------------------------------------------------------------------------------------------------------------- views

VIEW = {
    "sizes": list,
    "kind": str,
    "size": int,
    "links": int,
    "lead": list | None,
    "numpy": bool,
    "engine": str,
    "pooled": list,
    "held": list,
    "visible": REFERENCE,
    "padding": REFERENCE,
    "offset": REFERENCE | int,
    "ids": REFERENCE,
    "delimiters": REFERENCE,
    "output": REFERENCE,
    "weights": dict | None,
}


def _pack_view(view: View, name: str, out: Outgoing) -> dict[str, Any]:
    offset, weights = view.place.offset, view.weights
    unknown = [key for key in view.held if _form_of(key, view.sizes, view.size, view.pooled) is None]
    if unknown:
        raise ValueError(f"a view holds {unknown[0]!r}, which is no measure of regard's and cannot be saved")
    return {
        "sizes": list(view.sizes),
        "kind": view.kind,
        "size": view.size,
        "links": view.links,
        "lead": None if view.lead is None else list(view.lead),
        "numpy": view.numpy,
        "engine": view.engine,
        "pooled": list(view.pooled),
        "held": [[key, out.put(f"{name}/{key}", values)] for key, values in view.held.items()],
        "visible": _put(view.place.visible, f"{name}/visible", out),
        "padding": _put(view.place.padding, f"{name}/padding", out),
        "offset": _put(offset, f"{name}/offset", out) if isinstance(offset, Tensor) else offset,
        "ids": _put(view.tokens.ids, f"{name}/ids", out),
        "delimiters": _put(view.tokens.delimiters, f"{name}/delimiters", out),
        "output": _put(view.given_output, f"{name}/output", out),
        "weights": None if weights is None else pack_weights(weights, name, out),
    }


def _put(values: Any, name: str, out: Outgoing) -> Reference | None:
    if values is None:
        return None
    return out.put(name, torch.from_numpy(values) if isinstance(values, np.ndarray) else values)


def _unpack_view(value: object, where: str, tensors: Incoming) -> View:
    found = dict(zip(VIEW, fields(value, where, VIEW), strict=True))
    sizes, lead, numpy = _sizes(found["sizes"], where), found["lead"], found["numpy"]
    if not is_list_of(found["pooled"], str) or not set(found["pooled"]) <= {*PER_QUERY, "received"}:
        raise CaptureFileError(f"{where}: pooled must be names of measures, got {found['pooled']!r:.80}: {FORGED}")
    if lead is not None and not (is_list_of(lead, int) and min(lead, default=0) >= 0 and prod(lead) == prod(sizes[:2])):
        raise CaptureFileError(f"{where}: lead {lead!r:.80} must make {sizes[0]} × {sizes[1]} heads: {FORGED}")
    if found["kind"] not in ("self", "cross") or not all(
        1 <= found[name] <= MOST_POSITIONS for name in ("size", "links")
    ):
        said = {name: found[name] for name in ("kind", "size", "links")}
        raise CaptureFileError(f"{where}: {reprlib.repr(said)} cannot be: {FORGED}")
    output = _taken(found["output"], f"output of {where}", None, "floats", tensors)
    if output is not None and output.ndim == 4 and output.shape[:3] != sizes[:3]:
        raise CaptureFileError(f"{where}: its output {tuple(output.shape)} is not of {sizes}: {FORGED}")
    held = _unpack_held(found, sizes, where, tensors)
    if numpy and any(
        values.dtype == torch.bfloat16 for values in (*held.values(), *([] if output is None else [output]))
    ):
        raise CaptureFileError(f"{where}: it holds bfloat16, which NumPy has not: {FORGED}")
    return View(
        sizes=sizes,
        held=held,
        given_output=output.numpy() if numpy and output is not None else output,
        weights=None if found["weights"] is None else unpack_weights(found["weights"], sizes, where, tensors),
        kind=found["kind"],
        place=_unpack_place(found, sizes, where, tensors),
        tokens=_unpack_tokens(found, sizes, where, tensors),
        size=found["size"],
        links=found["links"],
        lead=None if lead is None else tuple(lead),
        numpy=numpy,
        engine=found["engine"],
        pooled=tuple(found["pooled"]),
    )


def _sizes(value: Any, where: str) -> Sizes:
    if not is_list_of(value, int) or len(value) != 4 or min(value) < 0:
        raise CaptureFileError(f"{where}: sizes must be B, H, Nq and Nk, got {value!r:.80}: {FORGED}")
    batch, heads, nq, nk = value
    if max(batch * heads, nq, nk) > MOST_POSITIONS:
        raise CaptureFileError(f"{where}: sizes of {value!r:.80}, more than {MOST_POSITIONS:,}: {FORGED}")
    return batch, heads, nq, nk


def _unpack_held(found: Mapping[str, Any], sizes: Sizes, where: str, tensors: Incoming) -> dict[str, Tensor]:
    held = {}
    for name, reference in _pairs(found["held"], where):
        form = _form_of(name, sizes, found["size"], found["pooled"])
        if form is None:
            raise CaptureFileError(f"{where} holds a measure {name!r}, unknown to this regard: upgrade regard")
        held[name] = tensors.take(reference, f"{name} of {where}", *form)
    top = [held[name].shape[-1] for name in ("top_key", "top_weight") if name in held]
    if len(top) + ("top_tied" in held) not in (0, 3) or len(set(top)) > 1 or 0 in top:
        raise CaptureFileError(f"{where}: top_key, top_weight and top_tied do not go together: {FORGED}")
    if top:
        _check_range(held["top_key"], -1, sizes[3] - 1, f"top_key of {where}")
    if "map" in held and held["map"].dtype == torch.float16:  # an overview's; what is computed from it is not to round
        held["map"] = held["map"].float()
    return held


def _form_of(name: str, sizes: Sizes, size: int, pooled: Any) -> tuple[tuple[Axis, ...], Kind] | None:
    """The shape and kind of a tensor that a view holds under a name, or None for a name that is not known."""
    batch, heads, nq, nk = sizes
    if name in PER_QUERY:
        return (batch, heads, None if name in pooled else nq), "floats"
    plain: dict[str, tuple[tuple[Axis, ...], Kind]] = {
        "received": ((batch, heads, None if name in pooled else nk), "floats"),
        "map": ((batch, heads, min(size, nq), min(size, nk)), "floats"),
        "top_key": ((batch, heads, nq, None), "integers"),
        "top_weight": ((batch, heads, nq, None), "floats"),
        "top_tied": ((batch, heads, nq), "booleans"),
        **{f"mean {measure}": ((batch, heads), "floats") for measure in PER_QUERY},
        **{f"{kind} {p}": ((batch, heads), "floats") for kind in ("pattern", "share", "beside") for p in PATTERNS},
    }
    return plain.get(name)


def _check_range(values: Tensor, least: int, most: int, what: str) -> None:
    if values.numel() and not least <= int(values.min()) <= int(values.max()) <= most:
        raise CaptureFileError(
            f"{what} goes from {int(values.min())} to {int(values.max())}, and can be {least} to {most}: {FORGED}"
        )


def _taken(reference: Any, what: str, shape: tuple[Axis, ...] | None, kind: Kind, tensors: Incoming) -> Tensor | None:
    return None if reference is None else tensors.take(reference, what, shape, kind)


def _unpack_place(found: Mapping[str, Any], sizes: Sizes, where: str, tensors: Incoming) -> Told:
    batch, heads, nq, nk = sizes
    lead, offset = ((1, batch), (1, heads)), found["offset"]
    visible = _taken(found["visible"], f"visible of {where}", (*lead, nq), "integers", tensors)
    if visible is not None:
        _check_range(visible, 0, nk, f"visible of {where}")
    if not isinstance(offset, int):
        offset = _taken(offset, f"offset of {where}", lead, "integers", tensors)
    if isinstance(offset, Tensor):
        _check_range(offset, -FARTHEST, FARTHEST, f"offset of {where}")
    elif offset is not None and abs(offset) > FARTHEST:
        raise CaptureFileError(f"{where}: offset is {offset!r:.80}, beyond {FARTHEST:,}: {FORGED}")
    padding = _taken(found["padding"], f"padding of {where}", (lead[0], nk), "booleans", tensors)
    return Told(visible=visible, padding=padding, offset=offset)


def _unpack_tokens(found: Mapping[str, Any], sizes: Sizes, where: str, tensors: Incoming) -> Tokens:
    shape = ((1, sizes[0]), sizes[3])
    return Tokens(
        ids=_taken(found["ids"], f"ids of {where}", shape, "integers", tensors),
        delimiters=_taken(found["delimiters"], f"delimiters of {where}", shape, "booleans", tensors),
    )


# ---------------------------------------------------------------------------------------------------------------- facts

FACTS = {
    "sizes": list,
    "mask": str,
    "unrestricted": bool,
    "causal": str,
    "offset": int | None,
    "bias_kind": str | None,
    "bias_from": float | int | None,
    "empty_rows": dict,
    "unhidden_rows": dict,
    "sides": list,
    "bad": list,
    "softcap": float | int | None,
    "tensors": dict,
}


def _pack_facts(facts: Facts, name: str, out: Outgoing) -> dict[str, Any]:
    tensors = {key: out.put(f"{name}/facts/{key}", values) for key, values in facts.tensors().items()}
    plain = facts.to_json()
    return plain | {"bad": [[key, *counts] for key, counts in plain["bad"].items()], "tensors": tensors}


def _unpack_facts(value: object, where: str, tensors: Incoming) -> Facts:
    known = FACTS | ({"edited": bool} if isinstance(value, dict) and "edited" in value else {})
    found = dict(zip(known, fields(value, f"facts of {where}", known), strict=True))
    batch, _, _, nk = sizes = _sizes(found["sizes"], where)
    references = found.pop("tensors")
    forms: dict[str, tuple[tuple[Axis, ...], Kind]] = {
        "bands": ((None, None, None, None), "bytes"),
        "padding": (((1, batch), nk), "booleans"),
    }
    if unsound := _unsound(found, sizes):
        said = reprlib.repr(found[unsound])
        raise CaptureFileError(f"facts of {where}: {unsound} of a call of {sizes} cannot be {said}: {FORGED}")
    if unknown := sorted(references.keys() - forms.keys()):
        raise CaptureFileError(f"facts of {where} have a tensor {unknown[0]!r:.80}, unknown to this regard: {FORGED}")
    given = {key: tensors.take(ref, f"{key} of {where}", *forms[key]) for key, ref in references.items()}
    if "bands" in given and any(n > most for n, most in zip(given["bands"].shape, BANDS, strict=True)):
        raise CaptureFileError(f"bands of {where} have shape {tuple(given['bands'].shape)}: {FORGED}")
    try:
        return Facts.from_json(found | {"bad": {key: counts for key, *counts in found["bad"]}}, given)
    except (ValueError, TypeError, KeyError) as error:
        raise CaptureFileError(f"facts of {where}: {error}: {FORGED}") from None


def _unsound(found: Mapping[str, Any], sizes: Sizes) -> str | None:
    """The first of the facts that cannot be of a call of these sizes, or None."""
    numbers = (("bias_from", LARGEST), ("softcap", LARGEST), ("offset", FARTHEST))
    sound = {
        "causal": found["causal"] in get_args(Causality),
        "bias_kind": found["bias_kind"] in (None, *get_args(BiasKind)),
        "sides": len(found["sides"]) == sizes[0] and all(side in (None, *get_args(Side)) for side in found["sides"]),
        "bad": all(_is_count(item) for item in found["bad"]),
        **{name: _are_rows(found[name], sizes) for name in ("empty_rows", "unhidden_rows")},
        **{name: found[name] is None or -most <= found[name] <= most for name, most in numbers},  # nor NaN
    }
    return next((name for name, right in sound.items() if not right), None)


def _is_count(item: object) -> bool:
    """[name of a tensor, how many NaN, how many infinite]"""
    return isinstance(item, list) and len(item) == 3 and type(item[0]) is str and is_list_of(item[1:], int)


def _are_rows(rows: Mapping[str, Any], sizes: Sizes) -> bool:
    match rows:
        case {"count": 0, "tokens": 0, "example": None}:
            return len(rows) == 3
        case {"count": int(count), "tokens": int(tokens), "example": [int(b), int(h), int(i)]}:
            inside = all(0 <= at < size for at, size in zip((b, h, i), sizes, strict=False))
            return len(rows) == 3 and inside and 0 <= tokens <= count <= prod(sizes[:3])
    return False
