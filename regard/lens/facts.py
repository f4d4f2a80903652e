"""`Facts`: mask, bias and bad numbers of one attention call, small enough to keep after the call and to save.

A mask that came as cells is named by what it shows, from counts per row (`visibility.py`): N×N is never built. A bias
that hides, by −∞ or by numbers such as −1e9, is read as the mask it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from operator import and_
from typing import Literal

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.visibility import (
    THRESHOLD,
    BiasKind,
    MaskSummary,
    Outline,
    Side,
    classify,
    conjuncts,
    dense_cells,
    holds_cells,
    sides,
    summarise_mask,
)
from regard.masks import Causal, DenseMask, Mask
from regard.masks.biases import DenseBias
from regard.masks.mask import TileGrid
from regard.masks.patterns import Queries, at_positions

Causality = Literal["no", "flag", "in mask", "both", "one query"]
"""How the future is hidden: not, by a causal rule, by cells, numbers or another rule, by both; one query has none."""

MAY_BE_MINUS_INFINITY = ("bias", "scores")
LONGEST = 100  # characters of a mask's repr


@dataclass(frozen=True)
class RowCount:
    """Number of queries of one kind, over all batch rows and heads."""

    count: int = 0
    tokens: int = 0  # without padding and without queries that `masks.queries` leaves out on purpose
    example: tuple[int, int, int] | None = None  # batch row, head and query of the first, of `tokens` if there are any


@dataclass(frozen=True, eq=False)
class Facts:
    """Mask, bias and bad numbers of one call, in a few kilobytes."""

    sizes: tuple[int, int, int, int]  # B, H, Nq, Nk
    # "none", "causal", "causal, offset 3", "window(4, 0)", "causal, padding left"; "all so far" for one query before
    # free room in a cache; the repr of other rules; "dense 1×1×5×7" for other cells
    mask: str
    unrestricted: bool  # every query sees every key that is no padding
    causal: Causality
    # Position of query 0 by a causal rule or mask, if it is one number; None in cross-attention. A single query stands
    # at the last key that it sees, if a cache has room for more.
    offset: int | None
    bias_kind: BiasKind | None
    bias_from: float | None  # of a "large negative" bias, the number nearest to 0 that hides
    empty_rows: RowCount  # queries that see nothing
    unhidden_rows: RowCount  # queries whose keys are all hidden by finite numbers, so that they attend to all of them
    sides: tuple[Side | None, ...]  # where the padding of each batch row stands
    # Number of NaN and of infinite values of each tensor that has some. −∞ is allowed in a bias, in scores, and in the
    # lse of a row that sees nothing.
    bad: Mapping[str, tuple[int, int]]
    softcap: float | None
    bands: Tensor  # (b, h, R, C) as `Visible.bands`; b and h are 1 where all that are kept are alike
    padding: Tensor | None  # (B or 1, Nk) True for a key that no query of the batch row sees
    edited: bool = False  # the model changed the weights between its softmax and the values


def read(
    call: Call,
    output: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    kind: str = "self",
    summary: MaskSummary | None = None,
) -> Facts:
    """The facts of a call, whose tensors, output (B, H, Nq, Dv) and lse (B, H, Nq) are searched for NaN and infinity.

    On a GPU it waits three times at most, four if tiles of a rule must be computed. kind: "self", or "cross", where a
    query has no place among the keys and so is never padding. summary: `summarise_mask(call, kind)`, if known already.
    """
    call = call.in_torch()
    summary = summarise_mask(call, kind) if summary is None else summary
    tensors = {"q": call.q, "k": call.k, "v": call.v, "output": output, "lse": lse}
    if isinstance(call.bias, DenseBias):
        tensors["bias"] = dense_cells(call.bias.cells)
    return _facts(summary, call.sizes, tensors, call.softcap)


def read_weights(scores: Tensor | None, weights: Tensor | None, *, kind: str = "self") -> Facts:
    """The facts of a softmax that a model computes itself, from its scores or weights (B, H, Nq, Nk), or both.

    Scores may have a sink's column last; −∞ and large negative numbers hide. Without scores, weights of exactly 0 count
    as hidden. What else was added to the scores is not known: `bias_kind` is "large negative" or None.
    """
    shaped = scores if weights is None else weights
    assert shaped is not None
    _, _, nq, nk = shaped.shape
    tensors = {"scores": scores, "weights": weights}
    if scores is None:
        summary = MaskSummary(nq, nk, shaped.device, DenseMask(shaped.detach() != 0), kind=kind)
    else:
        hiding = scores[..., :nk].detach()
        numbers, start = classify(hiding)
        known: BiasKind | None = "large negative" if numbers == "large negative" else None
        summary = MaskSummary(nq, nk, shaped.device, None, hiding if numbers in THRESHOLD else None, kind, known, start)
    return _facts(summary, shaped.shape, tensors)


def _facts(
    summary: MaskSummary, sizes: Sequence[int], tensors: Mapping[str, Tensor | None], softcap: float | None = None
) -> Facts:
    batch, heads, nq, nk = sizes
    seen, traced = summary.survey, summary.traced

    # 1. On the device: counts of rows, and one flag per tensor. NaN shows in aminmax without a tensor of that size.
    excused = _excused(summary)
    rows = []  # how many, how many that are not excused, and the first of either, counted over (B, H, Nq)
    for chosen in (summary.visible == 0, seen.unhidden > 0):
        every = chosen.expand(batch, heads, nq)
        counted = every, every & ~excused
        if every.numel():
            first = (x.reshape(-1).to(torch.uint8).argmax() for x in counted)
            rows.append(torch.stack([*(x.sum() for x in counted), *first]))
        else:
            rows.append(torch.zeros(4, dtype=torch.int64, device=every.device))
    numbers = {name: x.detach() for name, x in tensors.items() if x is not None and x.numel()}
    if "lse" in numbers:  # −∞ is right where a row sees nothing
        numbers["lse"] = torch.where((summary.visible == 0) & (numbers["lse"] == -inf), 0, numbers["lse"])
    fine = []
    for name, x in numbers.items():
        low, high = torch.aminmax(x)
        ends = high if name in MAY_BE_MINUS_INFINITY else torch.stack([low, high])
        fine.append(ends.isfinite().all().long().view(1))

    # 2. Back to the host: all numbers in one copy, padding and bands in another.
    back = torch.cat([traced.numbers, *rows, *fine]).tolist()
    outline = Outline(back[0], back[1], back[2], nq, nk)
    split = traced.padding.numel()
    both = torch.cat([traced.padding.reshape(-1).to(torch.uint8), seen.bands.reshape(-1)]).cpu()
    padding, bands = both[:split].view(traced.padding.shape) > 0, both[split:].view(seen.bands.shape).clone()
    for axis in (0, 1):  # batch rows or heads that are all alike are kept once
        one = bands.narrow(axis, 0, 1)
        bands = one if bool((bands == one).all()) else bands
    bad = {}
    for (name, x), good in zip(numbers.items(), back[11:], strict=True):
        if not good:
            infinite = (x == inf) if name in MAY_BE_MINUS_INFINITY else x.isinf()
            nans, infinities = torch.stack([x.isnan().sum(), infinite.sum()]).tolist()
            bad[name] = nans, infinities

    def row_count(count: int, tokens: int, first: int, first_token: int) -> RowCount:
        at = first_token if tokens else first
        return RowCount(count, tokens, (at // (heads * nq), at // nq % heads, at % nq)) if count else RowCount()

    # 3. In words.
    where = sides(padding, outline)
    where = where * batch if len(where) == 1 else where
    offset = outline.offset
    if summary.causal is not None:
        own = nk - nq if summary.causal.offset is None else summary.causal.offset
        offset = own if isinstance(own, int) else None
    return Facts(
        sizes=(batch, heads, nq, nk),
        mask=_text(summary, outline, where),
        unrestricted=outline.name == "all visible",
        causal=_causality(summary, outline),
        offset=None if summary.kind == "cross" else offset,
        bias_kind=summary.bias_kind,
        bias_from=summary.bias_from,
        empty_rows=row_count(*back[3:7]),
        unhidden_rows=row_count(*back[7:11]),
        sides=where,
        bad=bad,
        softcap=softcap,
        bands=bands.contiguous(),
        padding=padding if bool(padding.any()) else None,
    )


def _excused(summary: MaskSummary) -> Tensor:
    """Which queries may see nothing, (B or 1, H or 1, Nq): padding, and those that the mask leaves out."""
    nq, nk, device, traced = summary.nq, summary.nk, summary.device, summary.traced
    rows = torch.zeros(1, 1, nq, dtype=torch.bool, device=device)
    if summary.kind == "self" and nk:  # queries that are padding themselves; none in a batch row that is nothing else
        offset = None if summary.causal is None else summary.causal.offset
        positions = TileGrid(nq, nk, (1, 1), device).positions(offset)
        if offset is None:  # a causal mask that came as cells has its own
            _, far, choice = traced.numbers.unbind()
            own = (choice == 1) & (far <= max(0, nk - nq)) if nq > 1 else choice == 2
            positions = positions + torch.where(own, far - (nk - nq), 0)
        padding = at_positions(traced.padding, positions, outside=False)
        rows = rows | (padding & summary.survey.keys.any(2).any(1).view(-1, 1, 1))
    for part in conjuncts(summary.mask):
        if isinstance(part, Queries):
            rows = rows | ~part.looks(nq, device).unsqueeze(1)
        elif isinstance(other := ~part, Queries):  # ~queries([0]): all but query 0
            rows = rows | other.looks(nq, device).unsqueeze(1)
    return rows


def _causality(summary: MaskSummary, outline: Outline) -> Causality:
    if summary.causal is None:
        return "one query" if summary.nq == 1 else "in mask" if outline.hides_future else "no"
    others = [part for part in conjuncts(summary.mask) if part is not summary.causal and holds_cells(part)]
    if not others and summary.hiding is None:
        return "flag"
    rest = replace(summary, mask=reduce(and_, others) if others else None)
    return "both" if rest.traced.outline(summary.nq, summary.nk).hides_future else "flag"


def _text(summary: MaskSummary, outline: Outline, where: Sequence[Side | None]) -> str:
    mask = summary.mask
    padded = sorted({side for side in where if side is not None})
    padding = f", padding {' and '.join(padded)}" if padded else ""
    if summary.hiding is None:
        if mask is None:
            return "none"
        if _says_what_it_is(mask) or (outline.name is None and not holds_cells(mask)):
            if isinstance(mask, Causal) and not isinstance(mask.offset, Tensor):
                usual = mask.offset in (None, summary.nk - summary.nq)
                return "causal" if usual else f"causal, offset {mask.offset}"
            text = repr(mask)
            return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    if outline.name is not None:
        return outline.name + padding
    batch, heads = summary.survey.counts.shape[:2]
    return f"dense {batch}×{heads}×{summary.nq}×{summary.nk}{padding}"


def _says_what_it_is(mask: Mask) -> bool:
    """Whether it is made of rules from `regard.masks` only, whose repr says what they are."""
    inner = [value for value in vars(mask).values() if isinstance(value, Mask)]
    ours = type(mask).__module__.startswith("regard.masks.") and not isinstance(mask, DenseMask)
    return ours and all(map(_says_what_it_is, inner))
