"""Exact weights as JSON and tensors, and back with every value checked: q, k, mask and bias of a call, or its weights.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys), D head size.
"""

from __future__ import annotations

import reprlib
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.files.container import (
    LARGEST,
    REFERENCE,
    CaptureFileError,
    ContentError,
    Incoming,
    Outgoing,
    fields,
    is_list_of,
    pack_bits,
)
from regard.lens.measures.measures import Sizes
from regard.lens.measures.weights import ComputedWeights, StoredWeights, Weights
from regard.lens.visibility import dense_cells
from regard.masks import Causal, DenseMask, Mask, window
from regard.masks.biases import Bias, DenseBias
from regard.masks.mask import Rule, indices
from regard.masks.patterns import NO_LIMIT
from regard.positions import Relative

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
        given = StoredWeights(tensors.take(weights, f"weights of {where}", sizes))
        if scores is not None:  # a sink's column may be last
            given.scores = tensors.take(scores, f"scores of {where}", (*sizes[:3], (nk, nk + 1)))
        return given
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
    v = k.new_zeros(1).expand(*k.shape[:3], 1)  # exact weights do not read the values
    call = Call(q, k, v, rule, term, scale, softcap, sinks, dropout, numpy=False, sizes=sizes)
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
