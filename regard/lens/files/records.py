"""Records, views, facts and exact weights as JSON and tensors, and back with every value checked.

The unpacking functions raise CaptureFileError for values that are missing, unknown or inconsistent.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys), D head size.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.assembly import StepLink
from regard.lens.files.container import (
    LARGEST,
    REFERENCE,
    Axis,
    CaptureFileError,
    ContentError,
    Incoming,
    Kind,
    Outgoing,
    fields,
    is_list_of,
    pack_bits,
)
from regard.lens.measures.measures import Sizes
from regard.lens.measures.weights import ComputedWeights, StoredWeights, Weights
from regard.lens.patterns import NAMES as PATTERNS
from regard.lens.patterns import KeyTokens, KnownVisibility
from regard.lens.values import OutputProjection, StoredValues
from regard.lens.view import PER_QUERY, Record, View
from regard.lens.visibility import BiasKind, Causality, Facts, RowCount, Side, dense_cells
from regard.masks import Causal, DenseMask, Mask, window
from regard.masks.biases import Bias, DenseBias
from regard.masks.mask import Rule, indices
from regard.masks.patterns import NO_LIMIT
from regard.positions import Relative

Form = tuple[tuple[Axis, ...], Kind]  # of a tensor

MOST_POSITIONS = 1 << 24  # of a side, and batch rows × heads
BANDS = (4, 4, 32, 32)  # largest shape of the bands of facts

PLAIN = {"path": str, "n": int, "kind": str, "source": str, "kernel": str, "compiled": bool, "trouble": str | None}
RECORD = PLAIN | {"link": dict | None, "facts": dict | None, "heads": list, "view": dict | None}
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
# Of a view, written only if it has them: older versions read on.
MORE = {"values": str | dict, "projection": str, "output_gradient": str | dict}
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

FARTHEST = 1 << 40  # of a position; torch counts in 64 bits
MOST_CELLS = 1 << 28  # of a mask that is a rule: 32 MiB as bits
MOST_NUMBERS = 1 << 26  # of a bias that is a rule: 256 MiB in fp32
AT_ONCE = 1 << 22  # cells of a rule computed in one piece

REMEMBERED = {
    "kind": str,
    "q": str | dict,
    "k": str | dict,
    "lse": str | dict,
    "sinks": str | dict | None,
    "mask": dict | None,
    "bias": dict | None,
    "scale": float | int,
    "softcap": float | int | None,
    "dropout": float | int,
}


# -------------------------------------------------------------------------------------------------------------- records


def pack_record(record: Record, name: str, out: Outgoing) -> dict[str, Any]:
    """The JSON of a record; its tensors go to `out` under names that start with `name`."""
    link = None if record.link is None else dict(vars(record.link))
    if link is not None and link["returned"] is None:  # written only if it is known: older versions read on
        del link["returned"]
    return {key: getattr(record, key) for key in PLAIN} | {
        "link": link,
        "facts": None if record.facts is None else pack_facts(record.facts, f"{name}/facts", out),
        "heads": [[key, out.put(f"{name}/heads/{key}", values)] for key, values in record.heads.items()],
        "view": None if record.view is None else _pack_view(record.view, name, out),
    }


def unpack_record(value: object, where: str, tensors: Incoming) -> Record:
    """The inverse of `pack_record`; `where` names the record in messages."""
    stored = fields(value, where, RECORD)
    record = Record(**{key: stored[key] for key in PLAIN})
    if record.kind not in ("self", "cross"):
        raise ContentError(f"{where}: kind must be self or cross, got {record.kind!r:.80}")
    if record.n < 0:
        raise ContentError(f"{where}: n must be the number of a call, got {record.n}")
    link, facts, view = (stored[key] for key in ("link", "facts", "view"))
    record.view = None if view is None else _unpack_view(view, where, tensors)
    record.facts = None if facts is None else unpack_facts(facts, where, tensors)
    shape: tuple[Axis, ...] = (None, None)
    batch = None
    if record.view is not None:
        shape, batch = record.view.sizes[:2], record.view.sizes[0]
        if record.facts is not None and record.view.sizes != record.facts.sizes:
            raise ContentError(f"{where}: its view is of {record.view.sizes}, its facts of {record.facts.sizes}")
        if record.facts is not None and record.facts.edited:
            record.view.edited = True
            if isinstance(record.view.weights, StoredWeights):
                record.view.weights.edited = True
    record.heads = {key: tensors.take(ref, f"{key} of {where}", shape) for key, ref in _pairs(stored["heads"], where)}
    record.link = None if link is None else _unpack_link(link, record.n, batch, where)
    return record


def _unpack_link(value: object, n: int, batch: int | None, where: str) -> StepLink:
    kinds = {"after": int | None, "first": int, "known": int, "rows": list | None}
    after, first, known, rows, *others = fields(value, f"link of {where}", kinds, {"returned": list}).values()
    there = after is None or 0 <= after < n
    moved = rows is None or (is_list_of(rows, int) and len(rows) == batch and set(rows) <= set(range(len(rows))))
    ended = all(is_list_of(returned, int) and set(returned) <= set(range(-1, batch or 0)) for returned in others)
    placed = 0 <= first <= MOST_POSITIONS and 0 <= known <= MOST_POSITIONS
    if not there or not moved or not ended or not placed:
        raise ContentError(f"link of {where} leads to a call or to batch rows that are not there")
    return StepLink(after, first, known, None if rows is None else tuple(rows), *map(tuple, others))


def _pairs(values: list[Any], where: str) -> list[list[Any]]:
    """[[name, reference], …]: in order, which the keys of a JSON object lose."""
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in values):
        raise ContentError(f"{where}: tensors must be listed as pairs of a name and where it is")
    return values


def check_runs(records: Sequence[Record]) -> None:
    """Raise for links between calls that cannot be put together."""
    earlier: dict[tuple[str, int], tuple[View, StepLink | None]] = {}  # by path and number: some could not be read
    for record in records:
        view, link, path = record.view, record.link, record.path
        if view is None:
            continue
        earlier[path, record.n] = view, link
        if link is None or link.after is None:
            continue
        where = f"call {record.n} of {path!r:.80}"
        before, previous = earlier.get((path, link.after), (view, None))
        if previous is None:
            raise ContentError(f"{where} carries on call {link.after}, which is not before it")
        start, rows = previous.first, range(view.sizes[0]) if link.rows is None else link.rows
        counts = [None if one.returned is None else len(one.returned) for one in (previous, link)]
        if max(rows, default=0) >= max(before.sizes[0], 1) or counts[0] != counts[1] or counts[0] == 0:
            raise ContentError(f"{where} carries on batch rows that call {link.after} does not have")
        if view.sizes[1] != before.sizes[1] or not start <= link.first <= start + before.sizes[3]:
            raise ContentError(
                f"{where}, of {view.sizes} with first = {link.first}, cannot carry on {before.sizes} with first = "
                f"{start}"
            )
        widths = [
            [None if x is None else x.shape[-1] for x in (v.given_output, v.held.get("top_key"), v.output_gradient)]
            + [None if v.kept_values is None else v.kept_values.tensor.shape[1::2]]
            for v in (before, view)
        ]
        if widths[0] != widths[1]:
            raise ContentError(f"{where} has outputs, links or values of another width than what it carries on")


# ---------------------------------------------------------------------------------------------------------------- views


def _pack_view(view: View, name: str, out: Outgoing) -> dict[str, Any]:
    unknown = [key for key in view.held if _form_of(key, view.sizes, view.size, view.pooled) is None]
    if unknown:
        raise ValueError(f"a view holds {unknown[0]!r}, which is no measure of regard's and cannot be saved")

    def put(key: str, values: Any) -> Any:
        values = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        return out.put(f"{name}/{key}", values) if isinstance(values, Tensor) else values

    more: dict[str, Any] = {}
    if view.kept_values is not None:
        more["values"] = put("values", once(view.kept_values.tensor))
        if view.projection is not None:
            more["projection"] = view.projection.path
    if view.output_gradient is not None:
        more["output_gradient"] = put("output_gradient", view.output_gradient)
    arrays = {key: getattr(view.place, key) for key in ("visible", "padding", "offset")}
    arrays |= {**vars(view.tokens), "output": view.given_output}
    return more | {
        **{key: getattr(view, key) for key in ("sizes", "kind", "size", "links", "lead", "numpy", "engine", "pooled")},
        "held": [[key, put(key, values)] for key, values in view.held.items()],
        **{key: put(key, values) for key, values in arrays.items()},
        "weights": None if view.weights is None else pack_weights(view.weights, name, out),
    }


def _unpack_view(value: object, where: str, tensors: Incoming) -> View:
    stored = fields(value, where, VIEW, MORE)
    sizes, lead, numpy = _sizes(stored["sizes"], where), stored["lead"], stored["numpy"]
    batch, heads, nq, nk = sizes
    if not is_list_of(stored["pooled"], str) or not set(stored["pooled"]) <= {*PER_QUERY, "received"}:
        raise ContentError(f"{where}: pooled must be names of measures, got {stored['pooled']!r:.80}")
    if lead is not None and not (is_list_of(lead, int) and min(lead, default=0) >= 0 and prod(lead) == batch * heads):
        raise ContentError(f"{where}: lead {lead!r:.80} must make {batch} × {heads} heads")
    in_range = all(1 <= stored[name] <= MOST_POSITIONS for name in ("size", "links"))
    if stored["kind"] not in ("self", "cross") or not in_range:
        values = reprlib.repr({name: stored[name] for name in ("kind", "size", "links")})
        raise ContentError(f"{where}: {values} cannot be")

    def take(key: str, shape: tuple[Axis, ...] | None, kind: Kind) -> Tensor | None:
        return None if stored.get(key) is None else tensors.take(stored[key], f"{key} of {where}", shape, kind)

    output = take("output", None, "floats")
    if output is not None and output.ndim == 4 and output.shape[:3] != sizes[:3]:
        raise ContentError(f"{where}: its output {tuple(output.shape)} is not of {sizes}")
    held = _unpack_held(stored, sizes, where, tensors)
    if numpy and any(x is not None and x.dtype == torch.bfloat16 for x in (*held.values(), output)):
        raise ContentError(f"{where}: it holds bfloat16, which NumPy has not")
    some = ((1, batch), (1, heads))
    visible = take("visible", (*some, nq), "integers")
    if visible is not None:
        _check_range(visible, 0, nk, f"visible of {where}")
    offset = stored["offset"] if isinstance(stored["offset"], int) else take("offset", some, "integers")
    if isinstance(offset, Tensor):
        _check_range(offset, -FARTHEST, FARTHEST, f"offset of {where}")
    elif offset is not None and abs(offset) > FARTHEST:
        raise ContentError(f"{where}: offset is {offset!r:.80}, beyond {FARTHEST:,}")
    by_key = ((1, batch), nk)
    v = take("values", ((1, batch), None, nk, None), "floats")
    if v is not None:
        v = v.expand(batch, -1, -1, -1)
        if 0 in v.shape[1::2] or heads % v.shape[1]:
            raise ContentError(f"{where}: values of shape {tuple(v.shape)} do not go with {heads} heads")
    gradient = take("output_gradient", (batch, heads, nq, None if v is None else v.shape[-1]), "floats")
    return View(
        sizes=sizes,
        held=held,
        given_output=output.numpy() if numpy and output is not None else output,
        weights=None if stored["weights"] is None else unpack_weights(stored["weights"], sizes, where, tensors),
        kind=stored["kind"],
        place=KnownVisibility(visible=visible, padding=take("padding", by_key, "booleans"), offset=offset),
        tokens=KeyTokens(ids=take("ids", by_key, "integers"), delimiters=take("delimiters", by_key, "booleans")),
        size=stored["size"],
        links=stored["links"],
        lead=None if lead is None else tuple(lead),
        numpy=numpy,
        engine=stored["engine"],
        pooled=tuple(stored["pooled"]),
        kept_values=None if v is None else StoredValues(v),
        projection=OutputProjection(stored["projection"]) if "projection" in stored else None,
        output_gradient=gradient,
    )


def _sizes(value: Any, where: str) -> Sizes:
    if not is_list_of(value, int) or len(value) != 4 or min(value) < 0:
        raise ContentError(f"{where}: sizes must be B, H, Nq and Nk, got {value!r:.80}")
    batch, heads, nq, nk = value
    if max(batch * heads, nq, nk) > MOST_POSITIONS:
        raise ContentError(f"{where}: sizes of {value!r:.80}, more than {MOST_POSITIONS:,}")
    return batch, heads, nq, nk


def _unpack_held(stored: Mapping[str, Any], sizes: Sizes, where: str, tensors: Incoming) -> dict[str, Tensor]:
    held = {}
    for name, reference in _pairs(stored["held"], where):
        form = _form_of(name, sizes, stored["size"], stored["pooled"])
        if form is None:
            raise CaptureFileError(f"{where} holds a measure {name!r}, unknown to this regard: upgrade regard")
        held[name] = tensors.take(reference, f"{name} of {where}", *form)
    top = [held[name].shape[-1] for name in ("top_key", "top_weight") if name in held]
    if len(top) + ("top_tied" in held) not in (0, 3) or len(set(top)) > 1 or 0 in top:
        raise ContentError(f"{where}: top_key, top_weight and top_tied do not go together")
    if top:
        _check_range(held["top_key"], -1, sizes[3] - 1, f"top_key of {where}")
    if "map" in held and held["map"].dtype == torch.float16:  # an overview's; what is computed from it must not round
        held["map"] = held["map"].float()
    return held


def _form_of(name: str, sizes: Sizes, size: int, pooled: Any) -> Form | None:
    """The form of a tensor that a view holds under a name, or None for an unknown name."""
    batch, heads, nq, nk = sizes
    if name in PER_QUERY:
        return (batch, heads, None if name in pooled else nq), "floats"
    forms: dict[str, Form] = {
        "received": ((batch, heads, None if name in pooled else nk), "floats"),
        "map": ((batch, heads, min(size, nq), min(size, nk)), "floats"),
        "top_key": ((batch, heads, nq, None), "integers"),
        "top_weight": ((batch, heads, nq, None), "floats"),
        "top_tied": ((batch, heads, nq), "booleans"),
        **{f"mean {measure}": ((batch, heads), "floats") for measure in PER_QUERY},
        **{f"{kind} {p}": ((batch, heads), "floats") for kind in ("pattern", "share", "beside") for p in PATTERNS},
    }
    return forms.get(name)


def _check_range(values: Tensor, least: int, most: int, what: str) -> None:
    if values.numel() and not least <= int(values.min()) <= int(values.max()) <= most:
        raise ContentError(f"{what} goes from {int(values.min())} to {int(values.max())}, and can be {least} to {most}")


# ---------------------------------------------------------------------------------------------------------------- facts


def pack_facts(facts: Facts, name: str, out: Outgoing) -> dict[str, Any]:
    """The JSON of facts; their tensors go to `out` under names that start with `name`."""
    tensors = {"bands": facts.bands} | ({} if facts.padding is None else {"padding": facts.padding})
    return {key: getattr(facts, key) for key in FACTS if key != "tensors"} | {
        "empty_rows": vars(facts.empty_rows),
        "unhidden_rows": vars(facts.unhidden_rows),
        "bad": [[key, *counts] for key, counts in facts.bad.items()],
        "tensors": {key: out.put(f"{name}/{key}", values) for key, values in tensors.items()},
        **({"edited": True} if facts.edited else {}),  # written only if True: older versions read on
    }


def unpack_facts(value: object, where: str, tensors: Incoming) -> Facts:
    """The inverse of `pack_facts`; `where` names the record in messages."""
    stored = fields(value, f"facts of {where}", FACTS, {"edited": bool})
    batch, _, _, nk = sizes = _sizes(stored["sizes"], where)
    rows = {name: _row_count(stored[name], sizes) for name in ("empty_rows", "unhidden_rows")}
    limits = {"bias_from": LARGEST, "softcap": LARGEST, "offset": FARTHEST}
    sound = {
        "causal": stored["causal"] in get_args(Causality),
        "bias_kind": stored["bias_kind"] in (None, *get_args(BiasKind)),
        "sides": len(stored["sides"]) == batch and all(side in (None, *get_args(Side)) for side in stored["sides"]),
        "bad": all(  # [name of a tensor, how many NaN, how many infinite]
            isinstance(item, list) and len(item) == 3 and type(item[0]) is str and is_list_of(item[1:], int)
            for item in stored["bad"]
        ),
        **{name: counts is not None for name, counts in rows.items()},
        **{name: stored[name] is None or -most <= stored[name] <= most for name, most in limits.items()},  # nor NaN
    }
    for name, right in sound.items():
        if not right:
            text = reprlib.repr(stored[name])
            raise ContentError(f"facts of {where}: {name} of a call of {sizes} cannot be {text}")
    references = fields(stored.pop("tensors"), f"facts of {where}", {"bands": REFERENCE}, {"padding": REFERENCE})
    bands = tensors.take(references["bands"], f"bands of {where}", (None, None, None, None), "bytes")
    if any(n > most for n, most in zip(bands.shape, BANDS, strict=True)):
        raise ContentError(f"bands of {where} have shape {tuple(bands.shape)}")
    padding = None
    if "padding" in references:
        padding = tensors.take(references["padding"], f"padding of {where}", ((1, batch), nk), "booleans")
    bad = {name: (nans, infinities) for name, nans, infinities in stored["bad"]}
    stored |= {"sizes": sizes, "sides": tuple(stored["sides"]), "bad": bad, **rows}
    return Facts(**stored, bands=bands, padding=padding)


def _row_count(rows: Mapping[str, Any], sizes: Sizes) -> RowCount | None:
    """A count of rows of a call of these sizes; None for what is none."""
    match rows:
        case {"count": 0, "tokens": 0, "example": None, **rest} if not rest:
            return RowCount()
        case {"count": int(count), "tokens": int(tokens), "example": [int(b), int(h), int(i)], **rest} if not rest:
            inside = all(0 <= at < size for at, size in zip((b, h, i), sizes, strict=False))
            return RowCount(count, tokens, (b, h, i)) if inside and 0 <= tokens <= count <= prod(sizes[:3]) else None
    return None


# -------------------------------------------------------------------------------------------------------- exact weights


def pack_weights(weights: Weights, name: str, out: Outgoing) -> dict[str, Any]:
    """The JSON of exact weights; their tensors go to `out` under names that start with `name`.

    They come back the same to the bit: a mask is written as a band of three numbers if it is one, else as bits; a bias
    as its numbers, one per distance if it depends on the distance alone.

    Raises ValueError for a mask or a bias that is a rule with too many cells, and for weights of an unknown kind.
    """
    if isinstance(weights, StoredWeights):
        scores = None if weights.scores is None else out.put(f"{name}/scores", weights.scores)
        return {"kind": "given", "weights": out.put(f"{name}/weights", weights.weights), "scores": scores}
    if not isinstance(weights, ComputedWeights):
        raise ValueError(f"weights of kind {type(weights).__name__} cannot be saved; set view.weights to None")
    call, empty = weights.call, 0 in weights.call.sizes
    return {
        "kind": "remembered",
        "q": out.put(f"{name}/q", once(call.q)),
        "k": out.put(f"{name}/k", once(call.k)),
        "lse": out.put(f"{name}/kept lse", weights.lse),
        "sinks": None if call.sinks is None else out.put(f"{name}/sinks", call.sinks),
        "mask": None if call.mask is None or empty else _pack_mask(call.mask, call, f"{name}/mask", out),
        "bias": None if call.bias is None or empty else _pack_bias(call.bias, call, f"{name}/bias", out),
        "scale": call.scale,
        "softcap": call.softcap,
        "dropout": call.dropout,
    }


def unpack_weights(value: object, sizes: Sizes, where: str, tensors: Incoming) -> Weights:
    """The inverse of `pack_weights`, of a call of these sizes."""
    batch, heads, nq, nk = sizes
    if isinstance(value, dict) and value.get("kind") == "given":
        kinds = {"kind": str, "weights": str | dict, "scores": REFERENCE}
        _, weights, scores = fields(value, where, kinds).values()
        stored = StoredWeights(tensors.take(weights, f"weights of {where}", sizes))
        if scores is not None:  # a sink's column may be last
            stored.scores = tensors.take(scores, f"scores of {where}", (*sizes[:3], (nk, nk + 1)))
        return stored
    kind, q, k, lse, sinks, mask, bias, scale, softcap, dropout = fields(value, where, REMEMBERED).values()
    if kind != "remembered":
        raise CaptureFileError(f"{where} has weights of kind {kind!r}, unknown to this regard: upgrade regard")
    q = tensors.take(q, f"q of {where}", ((1, batch), heads, nq, None)).expand(batch, -1, -1, -1)
    k = tensors.take(k, f"k of {where}", ((1, batch), None, nk, q.shape[-1])).expand(batch, -1, -1, -1)
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ContentError(f"k of {where} has {k.shape[1]} heads for {heads} of q")
    if q.dtype != k.dtype or q.shape[-1] == 0:
        raise ContentError(f"q of {where} is {q.dtype}, k {k.dtype}, both {q.shape[-1]} wide")
    if not (abs(scale) <= LARGEST and (softcap is None or 0 < softcap <= LARGEST) and 0 <= dropout < 1):
        values = reprlib.repr({"scale": scale, "softcap": softcap, "dropout": dropout})
        raise ContentError(f"{where}: {values} cannot be")
    if sinks is not None:  # one logit per head, or per row where a softmax written out had a column of them
        sinks = tensors.take(sinks, f"sinks of {where}", None)
        if tuple(sinks.shape) not in ((heads,), sizes[:3]):
            raise ContentError(f"sinks of {where} have shape {tuple(sinks.shape)}, not ({heads},)")
    rule = None if mask is None else _unpack_mask(mask, sizes, f"mask of {where}", tensors)
    term = None if bias is None else _unpack_bias(bias, sizes, f"bias of {where}", tensors)
    call = Call(q, k, k, rule, term, scale, softcap, sinks, dropout, numpy=False, sizes=sizes)
    return ComputedWeights(call, tensors.take(lse, f"lse of {where}", sizes[:3]))


def _pack_mask(mask: Mask, call: Call, name: str, out: Outgoing) -> dict[str, Any]:
    band = mask.band(*call.sizes[2:])
    if band is not None:
        return {"band": list(band)}
    cells = dense_cells(mask.cells) if isinstance(mask, DenseMask) else _cells(mask, call, "mask", MOST_CELLS)
    return {"bits": out.put(name, pack_bits(cells)), "shape": list(cells.shape)}


def _unpack_mask(value: dict[str, Any], sizes: Sizes, what: str, tensors: Incoming) -> Mask:
    if "band" in value:
        band = fields(value, what, {"band": list})["band"]
        if not is_list_of(band, int) or len(band) != 3 or max(map(abs, band)) > FARTHEST:
            raise ContentError(f"{what}: a band is three integers of at most {FARTHEST:,}, got {band!r:.80}")
        offset, before, after = band
        place = None if offset == sizes[3] - sizes[2] else offset
        try:
            return Causal(place) if (before, after) == (NO_LIMIT, 0) else window(before, after, offset=place)
        except (ValueError, TypeError) as error:
            raise ContentError(f"{what}: {error}") from None
    bits, shape = fields(value, what, {"bits": str, "shape": list}).values()
    try:
        cells = tensors.take_bits(bits, what, shape)
        if cells.ndim != 4:
            raise ValueError(f"its shape {shape} has not four axes")
        mask = DenseMask(cells)
        mask.fit(*sizes)
        return mask
    except ContentError:
        raise
    except (ValueError, TypeError) as error:
        raise ContentError(f"{what}: {error}") from None


def _pack_bias(bias: Bias, call: Call, name: str, out: Outgoing) -> dict[str, Any]:
    if isinstance(bias, DenseBias):
        return {"cells": out.put(name, dense_cells(bias.cells))}
    if not bias.by_distance:
        return {"cells": out.put(name, _cells(bias, call, "bias", MOST_NUMBERS))}
    # One number for each j − i from −n to n, n = max(Nq, Nk) − 1: (B or 1, H or 1, 1, 2n + 1)
    batch, heads, (_, _, nq, nk) = *bias.leading, call.sizes
    most = max(nq, nk) - 1
    distance = torch.arange(-most, most + 1, device=call.device).clamp(1 - nq, nk - 1)
    i, j = (-distance).clamp(min=0), distance.clamp(min=0)
    b, h, _, _ = indices(batch, heads, i, j, call.device)
    terms: Tensor = bias.bind(nq, nk, call.device, call.wide)(b, h, i, j)
    return {"by distance": out.put(name, terms.expand(batch, heads, 1, 2 * most + 1))}


def _unpack_bias(value: dict[str, Any], sizes: Sizes, what: str, tensors: Incoming) -> Bias:
    batch, heads, nq, nk = sizes
    lead = ((1, batch), (1, heads))
    if "by distance" in value:
        terms = fields(value, what, {"by distance": str | dict})["by distance"]
        return Relative(tensors.take(terms, what, (*lead, 1, 2 * max(nq, nk) - 1)), offset=0)
    cells = fields(value, what, {"cells": str | dict})["cells"]
    return DenseBias(tensors.take(cells, what, (*lead, (1, nq), (1, nk))))


def _cells(rule: Rule, call: Call, what: str, most: int) -> Tensor:
    """A rule as (B or 1, H or 1, Nq, Nk) cells on the CPU, a few rows at a time."""
    batch, heads, (_, _, nq, nk) = *rule.leading, call.sizes
    count = batch * heads * nq * nk
    if count > most:
        raise ValueError(
            f"the {what} {rule!r} is a rule that a file holds cell by cell only: {count:,} of them, at most {most:,}; "
            "save(path, overview=True) leaves q and k out and needs none of them"
        )
    bound = rule.bind(nq, nk, call.device, call.wide)
    rows, keys = (torch.arange(n, device=call.device) for n in (nq, nk))
    pieces = []
    step = max(1, AT_ONCE // (batch * heads * nk))
    for part in (rows[at : at + step] for at in range(0, nq, step)):
        cells = torch.as_tensor(bound(*indices(batch, heads, part, keys, call.device)))
        pieces.append(cells.expand(batch, heads, len(part), nk).cpu())
    return torch.cat(pieces, 2)


def once(x: Tensor) -> Tensor:
    """One batch row of what is expanded to all of them."""
    return x[:1] if x.shape[0] > 1 and x.stride(0) == 0 else x
