"""Exact weights in a capture file: q, k, lse and all else the scores are made of, to come back the same to the bit.

A mask is written as a band of three numbers where it is one, otherwise as bits; a bias as its numbers, one per distance
where distance is all it knows. What comes back is another rule with the same cells.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys), D head size.

This file does not know views or captures.
"""

from __future__ import annotations

import reprlib
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.files.container import (
    FORGED,
    CaptureFileError,
    Incoming,
    Outgoing,
    fields,
    is_list_of,
    pack_bits,
    without_repeats,
)
from regard.lens.measures.weights import ComputedWeights, StoredWeights, Weights
from regard.masks import Causal, DenseMask, Mask, window
from regard.masks.biases import Bias, DenseBias
from regard.masks.positional import NO_LIMIT
from regard.masks.rules import Rule, indices
from regard.positions import Relative

__all__ = ["pack_weights", "unpack_weights"]

MOST_CELLS = 1 << 28  # of a mask that is a rule: 32 MiB as bits
MOST_NUMBERS = 1 << 26  # of a bias that is a rule: 256 MiB in fp32
AT_ONCE = 1 << 22  # cells that a rule is asked for in one piece
FARTHEST = 1 << 40  # of a place; torch counts in 64 bits
LARGEST = 1e300  # of a number; NaN and integers beyond any float are not less

Sizes = tuple[int, int, int, int]


def pack_weights(weights: Weights, name: str, out: Outgoing) -> dict[str, Any]:
    """What JSON says of exact weights; the tensors go to `out` under names that start with `name`.

    >>> out = Outgoing()
    >>> pack_weights(StoredWeights(torch.full((1, 1, 2, 2), 0.5)), "0", out), list(out.tensors)
    ({'kind': 'given', 'weights': '0/weights', 'scores': None}, ['0/weights'])

    Raises ValueError for a mask or a bias that is a rule with too many cells, and for weights of an unknown kind.
    """
    if isinstance(weights, StoredWeights):
        scores = None if weights.scores is None else out.put(f"{name}/scores", weights.scores)
        return {"kind": "given", "weights": out.put(f"{name}/weights", weights.weights), "scores": scores}
    if not isinstance(weights, ComputedWeights):
        raise ValueError(f"weights of kind {type(weights).__name__} cannot be saved; set view.weights to None")
    call = weights.call
    return {
        "kind": "remembered",
        "q": out.put(f"{name}/q", _once(call.q)),
        "k": out.put(f"{name}/k", _once(call.k)),
        "lse": out.put(f"{name}/kept lse", weights.lse),
        "sinks": None if call.sinks is None else out.put(f"{name}/sinks", call.sinks),
        "mask": None if call.mask is None or 0 in call.sizes else _pack_mask(call.mask, call, f"{name}/mask", out),
        "bias": None if call.bias is None or 0 in call.sizes else _pack_bias(call.bias, call, f"{name}/bias", out),
        "scale": call.scale,
        "softcap": call.softcap,
        "dropout": call.dropout,
    }


def unpack_weights(value: object, sizes: Sizes, where: str, tensors: Incoming) -> Weights:
    """The weights that `pack_weights` made this of.

    >>> out = Outgoing()
    >>> packed = pack_weights(StoredWeights(torch.full((1, 1, 2, 2), 0.5)), "0", out)
    >>> unpack_weights(packed, (1, 1, 2, 2), "record 0", Incoming(out.tensors)).tile(slice(1), slice(2))
    tensor([[[[0.5000, 0.5000]]]])

    sizes: B, H, Nq, Nk that they must have.  where: in words, for the message.
    Raises CaptureFileError for anything that does not go together.
    """
    if isinstance(value, dict) and value.get("kind") == "given":
        _, weights, scores = fields(value, where, {"kind": str, "weights": str | dict, "scores": str | dict | None})
        made = tensors.take(weights, f"weights of {where}", sizes)
        widths = (sizes[3], sizes[3] + 1)  # a sink's column may be last
        came = None if scores is None else tensors.take(scores, f"scores of {where}", (*sizes[:3], widths))
        return StoredWeights(made, came)
    return _unpack_remembered(value, sizes, where, tensors)


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


def _unpack_remembered(value: object, sizes: Sizes, where: str, tensors: Incoming) -> ComputedWeights:
    kind, q, k, lse, sinks, mask, bias, scale, softcap, dropout = fields(value, where, REMEMBERED)
    if kind != "remembered":
        raise CaptureFileError(f"{where} has weights of kind {kind!r}, unknown to this regard: upgrade regard")
    batch, heads, nq, nk = sizes
    queries = tensors.take(q, f"q of {where}", ((1, batch), heads, nq, None)).expand(batch, -1, -1, -1)
    keys = tensors.take(k, f"k of {where}", ((1, batch), None, nk, queries.shape[-1])).expand(batch, -1, -1, -1)
    if keys.shape[1] == 0 or heads % keys.shape[1]:
        raise CaptureFileError(f"k of {where} has {keys.shape[1]} heads for {heads} of q: {FORGED}")
    if queries.dtype != keys.dtype or queries.shape[-1] == 0:
        raise CaptureFileError(
            f"q of {where} is {queries.dtype}, k {keys.dtype}, both {queries.shape[-1]} wide: {FORGED}"
        )
    if not (abs(scale) <= LARGEST and (softcap is None or 0 < softcap <= LARGEST) and 0 <= dropout < 1):
        said = reprlib.repr({"scale": scale, "softcap": softcap, "dropout": dropout})
        raise CaptureFileError(f"{where}: {said} cannot be: {FORGED}")
    logits = None if sinks is None else _sinks(tensors.take(sinks, f"sinks of {where}", None), sizes, where)
    rule = None if mask is None else _unpack_mask(mask, sizes, where, tensors)
    term = None if bias is None else _unpack_bias(bias, sizes, where, tensors)
    values = keys.new_zeros(1).expand(*keys.shape[:3], 1)  # exact weights do not read them
    call = Call(queries, keys, values, rule, term, scale, softcap, logits, dropout, numpy=False, sizes=sizes)
    return ComputedWeights(call, tensors.take(lse, f"lse of {where}", sizes[:3]))


def _once(x: Tensor) -> Tensor:
    """(B, H, N, D), or (1, H, N, D) where one is seen in all batch rows, as `expand` does it."""
    return x[:1] if x.shape[0] > 1 and x.stride(0) == 0 else x


def _sinks(logits: Tensor, sizes: Sizes, where: str) -> Tensor:
    """One logit per head, or per row where a softmax written out had a column of them."""
    if tuple(logits.shape) not in ((sizes[1],), sizes[:3]):
        raise CaptureFileError(f"sinks of {where} have shape {tuple(logits.shape)}, not ({sizes[1]},): {FORGED}")
    return logits


# --------------------------------------------------------------------------------------------------------------- masks


def _pack_mask(mask: Mask, call: Call, name: str, out: Outgoing) -> dict[str, Any]:
    _, _, nq, nk = call.sizes
    band = mask.band(nq, nk)
    if band is not None:
        return {"band": list(band)}
    cells = without_repeats(mask.cells) if isinstance(mask, DenseMask) else _cells(mask, call, "mask", MOST_CELLS)
    return {"bits": out.put(name, pack_bits(cells)), "shape": list(cells.shape)}


def _unpack_mask(value: dict[str, Any], sizes: Sizes, where: str, tensors: Incoming) -> Mask:
    what = f"mask of {where}"
    try:
        return _band(value, sizes, what) if "band" in value else _dense(value, sizes, what, tensors)
    except CaptureFileError:
        raise
    except (ValueError, TypeError) as error:
        raise CaptureFileError(f"{what}: {error}: {FORGED}") from None


def _band(value: dict[str, Any], sizes: Sizes, what: str) -> Mask:
    (band,) = fields(value, what, {"band": list})
    if not is_list_of(band, int) or len(band) != 3 or max(map(abs, band)) > FARTHEST:
        raise TypeError(f"a band is three integers of at most {FARTHEST:,}, got {band!r:.80}")
    offset, before, after = band
    place = None if offset == sizes[3] - sizes[2] else offset
    return Causal(place) if (before, after) == (NO_LIMIT, 0) else window(before, after, offset=place)


def _dense(value: dict[str, Any], sizes: Sizes, what: str, tensors: Incoming) -> Mask:
    bits, shape = fields(value, what, {"bits": str, "shape": list})
    cells = tensors.take_bits(bits, what, shape)
    if cells.ndim != 4:
        raise ValueError(f"its shape {shape} has not four axes")
    mask = DenseMask(cells)
    mask.fit(*sizes)
    return mask


# -------------------------------------------------------------------------------------------------------------- biases


def _pack_bias(bias: Bias, call: Call, name: str, out: Outgoing) -> dict[str, Any]:
    if isinstance(bias, DenseBias):
        return {"cells": out.put(name, without_repeats(bias.cells))}
    if bias.by_distance:
        return {"by distance": out.put(name, _terms(bias, call))}
    return {"cells": out.put(name, _cells(bias, call, "bias", MOST_NUMBERS))}


def _terms(bias: Bias, call: Call) -> Tensor:
    """A number for each j − i from −n to n, n = max(Nq, Nk) − 1: (B or 1, H or 1, 1, 2n + 1)."""
    batch, heads, (_, _, nq, nk) = *bias.leading, call.sizes
    most = max(nq, nk) - 1
    distance = torch.arange(-most, most + 1, device=call.device).clamp(1 - nq, nk - 1)
    i, j = (-distance).clamp(min=0), distance.clamp(min=0)
    b, h, _, _ = indices(batch, heads, i, j, call.device)
    terms: Tensor = bias.bind(nq, nk, call.device, call.wide)(b, h, i, j)
    return terms.expand(batch, heads, 1, 2 * most + 1)


def _unpack_bias(value: dict[str, Any], sizes: Sizes, where: str, tensors: Incoming) -> Bias:
    batch, heads, nq, nk = sizes
    what, lead = f"bias of {where}", ((1, batch), (1, heads))
    if "by distance" in value:
        (terms,) = fields(value, what, {"by distance": str | dict})
        return Relative(tensors.take(terms, what, (*lead, 1, 2 * max(nq, nk) - 1)), offset=0)
    (cells,) = fields(value, what, {"cells": str | dict})
    return DenseBias(tensors.take(cells, what, (*lead, (1, nq), (1, nk))))


# ---------------------------------------------------------------------------------------------------------- other rules


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
    some = max(1, AT_ONCE // (batch * heads * nk))
    pieces = []
    for part in (rows[at : at + some] for at in range(0, nq, some)):
        cells = torch.as_tensor(bound(*indices(batch, heads, part, keys, call.device)))
        pieces.append(cells.expand(batch, heads, len(part), nk).cpu())
    return torch.cat(pieces, 2)
