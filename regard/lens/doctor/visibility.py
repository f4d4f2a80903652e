"""Which keys each query of a call really sees, counted without building N×N: per row, per key, and as small bands.

Three ways to the same answer: closed forms where a mask is a band (none, causal, window); tiles for other rules, of
which only the partly visible are looked into; rows in pieces where cells were brought as a tensor. `survey` chooses.

A finite number that hides (a bias of −1e9) is not −∞: a row of nothing else is an ordinary softmax over all of them.
`Visible.unhidden` counts the keys of such rows.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys); B or 1 and H or 1 where all are alike.

It does not know scores, weights or models, nor what a mask is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from regard.masks import EMPTY, FULL, PARTIAL, DenseMask, Mask
from regard.masks.mask import And
from regard.masks.rules import indices, part_of, size_or_one

__all__ = ["BANDS", "KEPT", "Visible", "band_counts", "conjuncts", "dense_cells", "holds_cells", "survey"]

BANDS = 32
"""The most rows and columns of bands."""

KEPT = 4
"""The bands of so many batch rows and heads are kept: enough to draw and to tell masks apart."""

SAMPLES = 16  # rows and columns of a pooled tile that are looked at where it has more
AT_ONCE = 1 << 22  # cells that exist at one time
TILE = 64
MOST_TILES = 1024  # per axis: beyond, tiles grow

Cells = Callable[[slice], tuple[Tensor, Tensor | None]]
"""Rows → what is visible, and what −∞ leaves open where finite numbers hide more: (B or 1, H or 1, rows, Nk)."""


@dataclass(frozen=True, eq=False)
class Visible:
    """Who sees how much.

    counts: (B or 1, H or 1, Nq) keys that each query sees.
    first, last: likewise, the first and last of them; Nk and −1 where there are none.
    unhidden: likewise, in rows where finite numbers were to hide every key: how many keys they hide, and so do not.
    keys: (B or 1, H or 1, Nk) booleans: does some query see the key?
    bands: (b, h, R, C) uint8, at most 4 × 4 × 32 × 32: the share of visible cells in each part, 255 for all. 0 and 255
        are certain; of parts with more than 16 × 16 cells of a rule, what lies between is from that many.
    """

    counts: Tensor
    first: Tensor
    last: Tensor
    unhidden: Tensor
    keys: Tensor
    bands: Tensor


def survey(
    mask: Mask | None, hiding: Tensor | None, threshold: float, nq: int, nk: int, device: torch.device
) -> Visible:
    """Count what a mask and the hiding numbers of a bias leave visible.

    >>> from regard.masks import causal
    >>> seen = survey(causal(), None, -inf, 3, 5, torch.device("cpu"))
    >>> seen.counts.tolist(), seen.keys.sum().item()
    ([[[3, 4, 5]]], 5)

    mask: that fits the call, or None.
    hiding: (B or 1, H or 1, Nq or 1, Nk or 1) numbers added to the scores, or None.
    threshold: from which of them on, downwards, a key counts as hidden.
    """
    if nq == 0 or nk == 0:
        return _nothing(nq, nk, device)
    band = _band(mask, nq, nk) if hiding is None else None
    if band is not None:
        return _of_band(*band, nq, nk, _rule_bands(mask, nq, nk, device))
    if mask is not None and hiding is None and not holds_cells(mask):
        return _of_tiles(mask, nq, nk, device)
    return _of_rows(*_cells(mask, hiding, threshold, nq, nk, device), nq, nk, device)


def conjuncts(mask: Mask | None) -> list[Mask]:
    """The masks that are joined by `&`.

    >>> from regard.masks import causal, padding
    >>> conjuncts(causal() & padding([2, 3]))
    [causal(), padding([2, 3])]
    """
    if isinstance(mask, And):
        return [*conjuncts(mask.left), *conjuncts(mask.right)]
    return [] if mask is None else [mask]


def holds_cells(mask: Mask) -> bool:
    """Was some part of this mask brought as a tensor of cells?"""
    inner = [value for value in vars(mask).values() if isinstance(value, Mask)]
    return isinstance(mask, DenseMask) or any(map(holds_cells, inner))


def dense_cells(cells: Tensor) -> Tensor:
    """The cells without the axes along which they were only expanded: a view of what is really there.

    >>> dense_cells(torch.zeros(2, 1, 1, 5).expand(2, 3, 7, 5)).shape
    torch.Size([2, 1, 1, 5])
    """
    for axis in range(cells.ndim):
        if cells.stride(axis) == 0 and cells.shape[axis] > 1:
            cells = cells.narrow(axis, 0, 1)
    return cells


def _nothing(nq: int, nk: int, device: torch.device) -> Visible:
    none = torch.zeros(1, 1, nq, dtype=torch.int64, device=device)
    keys = torch.zeros(1, 1, nk, dtype=torch.bool, device=device)
    bands = torch.zeros(1, 1, *_parts(nq, nk)[:2], dtype=torch.uint8, device=device)
    return Visible(none, none + nk, none - 1, none, keys, bands)


# --------------------------------------------------------------------------------------------------------- closed forms


def _band(mask: Mask | None, nq: int, nk: int) -> tuple[int, int] | None:
    """The lowest and highest j − i that are visible, where that is all there is to the mask."""
    if mask is None:
        return -nq, nk
    band = mask.band(nq, nk)
    return None if band is None else (band[0] - band[1], band[0] + band[2])


def band_counts(mask: Mask | None, nq: int, nk: int, device: torch.device) -> Tensor:
    """How many keys each query sees, (1, 1, Nq), where the mask is a band: a closed form.

    >>> from regard.masks import window
    >>> band_counts(window(2, 1), 5, 5, torch.device("cpu")).tolist()
    [[[2, 3, 4, 4, 3]]]
    """
    band = _band(mask, nq, nk)
    assert band is not None, f"{mask!r} is no band"
    i = torch.arange(nq, device=device)
    return ((i + band[1]).clamp(max=nk - 1) - (i + band[0]).clamp(min=0) + 1).clamp(min=0).view(1, 1, -1)


def _of_band(low: int, high: int, nq: int, nk: int, bands: Tensor) -> Visible:
    i, j = torch.arange(nq, device=bands.device), torch.arange(nk, device=bands.device)
    first, last = (i + low).clamp(min=0), (i + high).clamp(max=nk - 1)  # (Nq,)
    counts = (last - first + 1).clamp(min=0)
    first, last = torch.where(counts > 0, first, nk), torch.where(counts > 0, last, -1)
    keys = (j >= low) & (j <= nq - 1 + high)  # the rows' stretches overlap or touch
    counts, first, last, keys = (x.view(1, 1, -1) for x in (counts, first, last, keys))
    return Visible(counts, first, last, counts * 0, keys, bands)


# ---------------------------------------------------------------------------------------------------------------- tiles


def _of_tiles(mask: Mask, nq: int, nk: int, device: torch.device) -> Visible:
    size = max(TILE, -(-max(nq, nk) // MOST_TILES))
    kinds = mask.tiles(nq, nk, size, device)  # (B', H', Tq, Tk)
    tall, wide = kinds.shape[2] * size, kinds.shape[3] * size
    lead = kinds.shape[:2]
    counts = torch.zeros(*lead, tall, dtype=torch.int64, device=device)
    first, last = torch.full_like(counts, nk), torch.full_like(counts, -1)
    keys = torch.zeros(*lead, wide, dtype=torch.int64, device=device)
    see = mask.bind(nq, nk, device, torch.float32)
    step = torch.arange(size, device=device)
    partial, many = (kinds == PARTIAL).nonzero(), max(1, AT_ONCE // size**2)  # (tiles, 4)
    for start in range(0, len(partial), many):
        b, h, i, j = (at.view(-1, 1, 1) for at in partial[start : start + many].unbind(1))  # (T, 1, 1)
        i, j = i * size + step.view(-1, 1), j * size + step  # (T, size, 1), (T, 1, size)
        cells = see(b, h, i.clamp(max=nq - 1), j.clamp(max=nk - 1)) & (i < nq) & (j < nk)  # (T, size, size)
        row, key = ((b * lead[1] + h) * n + at for n, at in ((tall, i), (wide, j)))
        row, key = row.reshape(-1), key.reshape(-1)
        counts.view(-1).index_add_(0, row, cells.sum(2).view(-1))
        first.view(-1).scatter_reduce_(0, row, torch.where(cells, j, nk).amin(2).view(-1), "amin")
        last.view(-1).scatter_reduce_(0, row, torch.where(cells, j, -1).amax(2).view(-1), "amax")
        keys.view(-1).scatter_reduce_(0, key, cells.any(1).long().view(-1), "amax")
    _add_full(kinds == FULL, size, nk, counts, first, last, keys)
    counts, first, last = (x[..., :nq] for x in (counts, first, last))
    return Visible(counts, first, last, counts * 0, keys[..., :nk] > 0, _rule_bands(mask, nq, nk, device))


def _add_full(full: Tensor, size: int, nk: int, counts: Tensor, first: Tensor, last: Tensor, keys: Tensor) -> None:
    """Add tiles (B', H', Tq, Tk) that are visible throughout, without looking into them."""
    start = torch.arange(full.shape[3], device=full.device) * size
    end = (start + size).clamp(max=nk)
    rows = {  # (B', H', Tq) each
        "count": torch.where(full, end - start, 0).sum(-1),
        "first": torch.where(full, start, nk).amin(-1),
        "last": torch.where(full, end - 1, -1).amax(-1),
    }
    counts += rows["count"].repeat_interleave(size, -1)
    torch.minimum(first, rows["first"].repeat_interleave(size, -1), out=first)
    torch.maximum(last, rows["last"].repeat_interleave(size, -1), out=last)
    torch.maximum(keys, full.any(2).long().repeat_interleave(size, -1), out=keys)


# ----------------------------------------------------------------------------------------------------------------- rows


def _cells(
    mask: Mask | None, hiding: Tensor | None, threshold: float, nq: int, nk: int, device: torch.device
) -> tuple[Cells, tuple[int, int], int]:
    """The cells by rows, the (B', H') they vary over, and their rows: 1 where all rows are alike."""
    parts = conjuncts(mask)
    tables = [dense_cells(part.cells).to(device) for part in parts if isinstance(part, DenseMask)]
    rules = [part for part in parts if not isinstance(part, DenseMask)]
    numbers = None if hiding is None else dense_cells(hiding).to(device)
    shapes = [t.shape for t in (*tables, *(() if numbers is None else (numbers,)))]
    leads = [*((s[0], s[1]) for s in shapes), *(rule.leading for rule in rules)]
    batch, heads = (size_or_one(name, [lead[n] for lead in leads]) for n, name in enumerate(("batch", "heads")))
    height = nq if rules or any(shape[2] > 1 for shape in shapes) else 1
    sees = [rule.bind(nq, nk, device, torch.float32) for rule in rules]
    i, j = torch.arange(nq, device=device), torch.arange(nk, device=device)

    def cells(rows: slice) -> tuple[Tensor, Tensor | None]:
        visible = torch.ones(1, dtype=torch.bool, device=device)
        for table in tables:
            visible = visible & part_of(table, rows, slice(None))
        for see in sees:
            visible = visible & see(*indices(batch, heads, i[rows], j, device))
        whole = (batch, heads, len(i[rows]) if height > 1 else 1, nk)
        if numbers is None:
            return visible.expand(whole), None
        added = part_of(numbers, rows, slice(None))
        return (visible & ~(added <= threshold)).expand(whole), (visible & (added != -inf)).expand(whole)

    return cells, (batch, heads), height


def _of_rows(cells: Cells, lead: tuple[int, int], height: int, nq: int, nk: int, device: torch.device) -> Visible:
    """Go through the rows in pieces. `height` is 1 where all Nq rows are alike."""
    made: list[dict[str, Tensor]] = []
    keys = torch.zeros(*lead, nk, dtype=torch.uint8, device=device)
    step = max(1, AT_ONCE // (lead[0] * lead[1] * nk))
    for start in range(0, height, step):
        visible, open_ = cells(slice(start, min(height, start + step)))  # (B', H', rows, Nk)
        made.append(_of_piece(visible, open_))
        torch.maximum(keys, visible.view(torch.uint8).amax(-2), out=keys)
    rows = {name: torch.cat([piece[name] for piece in made], 2) for name in made[0]}
    bands = _pooled(rows.pop("parts"), height, nk)
    if height < nq:
        rows = {name: values.expand(-1, -1, nq) for name, values in rows.items()}
        bands = bands.expand(-1, -1, _parts(nq, nk)[0], -1)
    return Visible(rows["counts"], rows["first"], rows["last"], rows["unhidden"], keys > 0, bands)


def _of_piece(visible: Tensor, open_: Tensor | None) -> dict[str, Tensor]:
    """What some rows (B', H', rows, Nk) see; on a CPU sums of floats and argmax of bytes are by far the fastest."""
    nk = visible.shape[-1]
    _, wide, _, broad = _parts(1, nk)
    padded = visible if wide * broad == nk else torch.nn.functional.pad(visible, (0, wide * broad - nk))
    parts = padded.reshape(*visible.shape[:3], wide, broad).float().sum(-1).long()  # (B', H', rows, C)
    counts = parts.sum(-1)
    first, back = visible.view(torch.uint8).argmax(-1), visible.view(torch.uint8).flip(-1).argmax(-1)
    return {
        "counts": counts,
        "first": torch.where(counts > 0, first, nk),
        "last": torch.where(counts > 0, nk - 1 - back, -1),
        "unhidden": counts * 0 if open_ is None else torch.where(counts > 0, 0, open_.float().sum(-1).long()),
        "parts": parts[:KEPT, :KEPT],
    }


# ---------------------------------------------------------------------------------------------------------------- bands


def _parts(nq: int, nk: int) -> tuple[int, int, int, int]:
    """Rows and columns of the bands, and how many queries and keys stand in each, the last perhaps fewer."""
    tall, broad = max(1, -(-nq // BANDS)), max(1, -(-nk // BANDS))
    return -(-nq // tall), -(-nk // broad), tall, broad


def _rule_bands(mask: Mask | None, nq: int, nk: int, device: torch.device) -> Tensor:
    """The bands of a rule: which parts are empty and full from bounds, the share of the others from some cells."""
    high, wide, tall, broad = _parts(nq, nk)
    if mask is None:
        return torch.full((1, 1, high, wide), 255, dtype=torch.uint8, device=device)
    batch, heads = (min(n, KEPT) for n in mask.leading)
    (i, in_i), (j, in_j) = (_samples(*axis, device) for axis in ((nq, high, tall), (nk, wide, broad)))
    see = mask.bind(nq, nk, device, torch.float32)
    visible = see(*indices(batch, heads, i, j, device)).expand(batch, heads, len(i), len(j))
    visible = (visible & in_i.view(-1, 1) & in_j).reshape(batch, heads, high, len(i) // high, wide, len(j) // wide)
    tiles = visible.sum((3, 5))  # (b, h, R, C)
    there = in_i.view(high, -1).sum(1).view(-1, 1) * in_j.view(wide, -1).sum(1)
    shares = _as_bytes(tiles, there)
    if tall <= SAMPLES and broad <= SAMPLES:
        return shares
    kinds = mask.tiles(nq, nk, (tall, broad), device)[:KEPT, :KEPT]
    certain = torch.where(kinds == EMPTY, 0, 255)
    return torch.where(kinds == PARTIAL, shares.clamp(1, 254), certain).to(torch.uint8)


def _samples(n: int, parts: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices spread over each part, part after part, and which of them exist; the others are 0."""
    within = torch.arange(min(size, SAMPLES), device=device) * size // min(size, SAMPLES)
    index = (torch.arange(parts, device=device).view(-1, 1) * size + within).view(-1)
    return torch.where(index < n, index, 0), index < n


def _pooled(seen: Tensor, nq: int, nk: int) -> Tensor:
    """Visible cells per row and part (b, h, Nq, C) → the share of them in each part, (b, h, R, C) bytes."""
    high, wide, tall, broad = _parts(nq, nk)
    seen = torch.nn.functional.pad(seen, (0, 0, 0, high * tall - nq))
    rows = (nq - torch.arange(high, device=seen.device) * tall).clamp(max=tall)
    columns = (nk - torch.arange(wide, device=seen.device) * broad).clamp(max=broad)
    return _as_bytes(seen.reshape(*seen.shape[:2], high, tall, wide).sum(3), rows.view(-1, 1) * columns)


def _as_bytes(seen: Tensor, there: Tensor) -> Tensor:
    """A share as 0 to 255: 0 and 255 only for none and for all."""
    share = (255 * seen.float() / there).round()
    some, every = seen > 0, seen == there
    return torch.where(every, 255, torch.where(some, share.clamp(1, 254), 0)).to(torch.uint8)
