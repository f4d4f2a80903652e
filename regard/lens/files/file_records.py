"""What a capture file says of one call: its record, its view and its facts, as JSON and tensors; and back, all checked.

Shapes are checked against the sizes of the call, names against those that this regard knows. What does not go together
is refused, because nothing that comes later could tell.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys).

This file does not know captures or how files are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from regard.lens.capture import Record
from regard.lens.diagnosing.bias_kinds import BiasKind
from regard.lens.diagnosing.facts import Causality, Facts
from regard.lens.diagnosing.mask_names import Side
from regard.lens.diagnosing.patterns import NAMES as PATTERNS
from regard.lens.files.capture_file import FORGED, CaptureFileError
from regard.lens.files.file_parts import Axis, Incoming, Kind, Outgoing, Reference, fields, is_list_of
from regard.lens.files.file_weights import Sizes, pack_weights, unpack_weights
from regard.lens.measuring.weights import Given
from regard.lens.runs import Link
from regard.lens.view import PER_QUERY, Tokens, Told, View

__all__ = ["pack_record", "unpack_record"]

REFERENCE: Any = str | dict | None

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
        raise CaptureFileError(f"{where}: kind must be self or cross, got {kind!r}: {FORGED}")
    seen = None if view is None else _unpack_view(view, where, tensors)
    known = None if facts is None else _unpack_facts(facts, where, tensors)
    if seen is not None and known is not None and seen.sizes != known.sizes:
        raise CaptureFileError(f"{where}: its view is of {seen.sizes}, its facts of {known.sizes}: {FORGED}")
    if seen is not None and known is not None and known.edited:
        seen.edited = True
        if isinstance(seen.weights, Given):
            seen.weights.edited = True
    shape: tuple[Axis, ...] = (None, None) if seen is None else seen.sizes[:2]
    numbers = {key: tensors.take(ref, f"{key} of {where}", shape) for key, ref in _pairs(heads, where)}
    carried = None if link is None else _unpack_link(link, n, None if seen is None else seen.sizes[0], where)
    return Record(path, n, kind, source, kernel, compiled, seen, known, numbers, trouble, carried)


def _pack_link(link: Link) -> dict[str, Any]:
    rows = None if link.rows is None else list(link.rows)
    packed = {"after": link.after, "first": link.first, "known": link.known, "rows": rows}
    return packed if link.returned is None else packed | {"returned": list(link.returned)}


def _unpack_link(value: object, n: int, batch: int | None, where: str) -> Link:
    kinds: dict[str, Any] = {"after": int | None, "first": int, "known": int, "rows": list | None}
    if isinstance(value, dict) and "returned" in value:  # only where it is known
        kinds["returned"] = list
    after, first, known, rows, *others = fields(value, f"link of {where}", kinds)
    there = after is None or 0 <= after < n
    moved = rows is None or (is_list_of(rows, int) and len(rows) == batch and set(rows) <= set(range(len(rows))))
    ended = all(is_list_of(returned, int) and set(returned) <= set(range(-1, batch or 0)) for returned in others)
    if not there or not moved or not ended or min(first, known) < 0:
        raise CaptureFileError(f"link of {where} leads to a call or to batch rows that are not there: {FORGED}")
    return Link(after, first, known, None if rows is None else tuple(rows), *map(tuple, others))


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
    sizes, lead = _sizes(found["sizes"], where), found["lead"]
    if not is_list_of(found["pooled"], str) or not (lead is None or is_list_of(lead, int)):
        raise CaptureFileError(f"{where}: pooled must be names and lead sizes: {FORGED}")
    output = _taken(found["output"], f"output of {where}", None, "floats", tensors)
    return View(
        sizes=sizes,
        held=_unpack_held(found, sizes, where, tensors),
        given_output=output.numpy() if found["numpy"] and output is not None else output,
        weights=None if found["weights"] is None else unpack_weights(found["weights"], sizes, where, tensors),
        kind=found["kind"],
        place=_unpack_place(found, sizes, where, tensors),
        tokens=_unpack_tokens(found, sizes, where, tensors),
        size=found["size"],
        links=found["links"],
        lead=None if lead is None else tuple(lead),
        numpy=found["numpy"],
        engine=found["engine"],
        pooled=tuple(found["pooled"]),
    )


def _sizes(value: Any, where: str) -> Sizes:
    if not is_list_of(value, int) or len(value) != 4 or min(value) < 0:
        raise CaptureFileError(f"{where}: sizes must be B, H, Nq and Nk, got {value}: {FORGED}")
    batch, heads, nq, nk = value
    return batch, heads, nq, nk


def _unpack_held(found: Mapping[str, Any], sizes: Sizes, where: str, tensors: Incoming) -> dict[str, Tensor]:
    held = {}
    for name, reference in _pairs(found["held"], where):
        form = _form_of(name, sizes, found["size"], found["pooled"])
        if form is None:
            raise CaptureFileError(f"{where} holds a measure {name!r}, unknown to this regard: upgrade regard")
        held[name] = tensors.take(reference, f"{name} of {where}", *form)
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


def _taken(reference: Any, what: str, shape: tuple[Axis, ...] | None, kind: Kind, tensors: Incoming) -> Tensor | None:
    return None if reference is None else tensors.take(reference, what, shape, kind)


def _unpack_place(found: Mapping[str, Any], sizes: Sizes, where: str, tensors: Incoming) -> Told:
    batch, heads, nq, nk = sizes
    lead, offset = ((1, batch), (1, heads)), found["offset"]
    return Told(
        visible=_taken(found["visible"], f"visible of {where}", (*lead, nq), "integers", tensors),
        padding=_taken(found["padding"], f"padding of {where}", (lead[0], nk), "booleans", tensors),
        offset=offset if isinstance(offset, int) else _taken(offset, f"offset of {where}", lead, "integers", tensors),
    )


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
    batch, _, _, nk = _sizes(found["sizes"], where)
    references = found.pop("tensors")
    forms: dict[str, tuple[tuple[Axis, ...], Kind]] = {
        "bands": ((None, None, None, None), "bytes"),
        "padding": (((1, batch), nk), "booleans"),
    }
    if not references.keys() <= forms.keys() or not _facts_are_sound(found, batch):
        raise CaptureFileError(f"facts of {where} are not those of a call: {FORGED}")
    given = {key: tensors.take(ref, f"{key} of {where}", *forms[key]) for key, ref in references.items()}
    try:
        return Facts.from_json(found | {"bad": {key: counts for key, *counts in found["bad"]}}, given)
    except (ValueError, TypeError, KeyError) as error:
        raise CaptureFileError(f"facts of {where}: {error}: {FORGED}") from None


def _facts_are_sound(found: Mapping[str, Any], batch: int) -> bool:
    rows = [found["empty_rows"], found["unhidden_rows"]]
    counts = all(type(r.get(key)) is int for r in rows for key in ("count", "tokens"))
    examples = [r.get("example") for r in rows]
    sides = found["sides"]
    return (
        counts
        and all(e is None or (is_list_of(e, int) and len(e) == 3) for e in examples)
        and found["causal"] in get_args(Causality)
        and found["bias_kind"] in (None, *get_args(BiasKind))
        and len(sides) == batch
        and all(side in (None, *get_args(Side)) for side in sides)
        and all(
            isinstance(b, list) and len(b) == 3 and type(b[0]) is str and is_list_of(b[1:], int) for b in found["bad"]
        )
    )
