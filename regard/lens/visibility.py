"""What the mask of a call leaves visible, counted without building N×N, and the `Facts` of a call that are kept.

`survey` counts per row, per key and as small bands: by closed forms where a mask is a band (none, causal, window); by
tiles for other rules, of which only the partly visible are computed; by rows where cells came as a tensor. `trace`
finds the simplest band that shows the same, by which a mask that came as cells is named. `summarise_mask` does both
for a call.

A finite number that hides (a bias of −1e9) is not −∞: a row of nothing else is an ordinary softmax over all of them,
and `Visible.unhidden` counts its keys.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys); B or 1 and H or 1 where all are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import inf
from operator import and_
from typing import Literal

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.checks import Number
from regard.masks import EMPTY, FULL, PARTIAL, Causal, DenseMask, Mask
from regard.masks.biases import DenseBias
from regard.masks.mask import And, TileGrid, indices, part_of, size_or_one
from regard.masks.patterns import OffsetMask, Queries, at_positions

BANDS = 32  # rows and columns of bands at most
KEPT = 4  # batch rows and heads whose bands are kept: enough to draw and to tell masks apart
SAMPLES = 16  # rows and columns of a pooled tile that are looked at where it has more
AT_ONCE = 1 << 22  # cells or numbers computed at one time
TILE = 64
MOST_TILES = 1024  # per axis: beyond, tiles grow

BiasKind = Literal["additive", "zero-one", "large negative", "minus infinity"]
"""What a bias does: adds; adds only 0 and 1, as a boolean mask cast to floats; hides by −1e9 and such; hides by −∞."""

HIDES = -5_000.0
"""Numbers up to this one hide: half of the mildest in use, BERT's −10,000."""

THRESHOLD: dict[BiasKind | None, float] = {"large negative": HIDES, "minus infinity": -inf}
"""The largest number that hides, of the kinds of bias that hide."""

SLOPES = -1_000.0  # a bias with numbers between this and HIDES is a slope, as ALiBi's, and hides nothing on purpose

Side = Literal["left", "right", "inside", "whole"]
"""Where the padding of a batch row stands; "inside" also for both ends, "whole" for a row of nothing else."""


@dataclass(frozen=True, eq=False)
class Visible:
    """Counts of what is visible.

    Bands have the share of visible cells in each part of the mask, 255 for all of them. 0 and 255 are certain; for
    parts of a rule with more than 16 × 16 cells, the rest is from that many samples.
    """

    counts: Tensor  # (B or 1, H or 1, Nq) number of keys that each query sees
    first: Tensor  # likewise, the first of them; Nk if there are none
    last: Tensor  # likewise, the last of them; −1 if there are none
    unhidden: Tensor  # likewise, the number of keys of rows whose keys are all hidden by finite numbers; else 0
    keys: Tensor  # (B or 1, H or 1, Nk) whether some query sees the key
    bands: Tensor  # (b, h, R, C) uint8, at most 4 × 4 × 32 × 32


def survey(
    mask: Mask | None, hiding: Tensor | None, threshold: float, nq: int, nk: int, device: torch.device
) -> Visible:
    """Count what a mask and numbers added to the scores, (B or 1, H or 1, Nq or 1, Nk or 1), leave visible.

    Numbers up to `threshold` hide a key.
    """
    if nq == 0 or nk == 0:
        none = torch.zeros(1, 1, nq, dtype=torch.int64, device=device)
        keys = torch.zeros(1, 1, nk, dtype=torch.bool, device=device)
        bands = torch.zeros(1, 1, *_parts(nq, nk)[:2], dtype=torch.uint8, device=device)
        return Visible(none, none + nk, none - 1, none, keys, bands)
    if hiding is None and (band := _band(mask, nq, nk)) is not None:
        counts, first, last = _band_rows(band, nq, nk, device)
        (low, high), j = band, torch.arange(nk, device=device)
        first, last = torch.where(counts > 0, first, nk), torch.where(counts > 0, last, -1)
        keys = (j >= low) & (j <= nq - 1 + high)  # the rows' stretches overlap or touch
        counts, first, last, keys = (x.view(1, 1, -1) for x in (counts, first, last, keys))
        return Visible(counts, first, last, counts * 0, keys, _rule_bands(mask, nq, nk, device))
    if mask is not None and hiding is None and not holds_cells(mask):
        return _survey_tiles(mask, nq, nk, device)
    return _survey_rows(mask, hiding, threshold, nq, nk, device)


def conjuncts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` joins."""
    if isinstance(mask, And):
        return [*conjuncts(mask.left), *conjuncts(mask.right)]
    return [] if mask is None else [mask]


def holds_cells(mask: Mask) -> bool:
    """Whether some part of this mask came as a tensor of cells."""
    inner = [value for value in vars(mask).values() if isinstance(value, Mask)]
    return isinstance(mask, DenseMask) or any(map(holds_cells, inner))


def dense_cells(cells: Tensor) -> Tensor:
    """A view of the cells in which axes that were only expanded have size 1."""
    for axis in range(cells.ndim):
        if cells.stride(axis) == 0 and cells.shape[axis] > 1:
            cells = cells.narrow(axis, 0, 1)
    return cells


def _band(mask: Mask | None, nq: int, nk: int) -> tuple[int, int] | None:
    """The lowest and highest j − i that are visible, if the mask is a band."""
    if mask is None:
        return -nq, nk
    band = mask.band(nq, nk)
    return None if band is None else (band[0] - band[1], band[0] + band[2])


def _band_rows(band: tuple[int, int], nq: int, nk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """How many keys each query of a band sees, the first and the last of them: (Nq,) each."""
    i = torch.arange(nq, device=device)
    first, last = (i + band[0]).clamp(min=0), (i + band[1]).clamp(max=nk - 1)
    return (last - first + 1).clamp(min=0), first, last


def _survey_tiles(mask: Mask, nq: int, nk: int, device: torch.device) -> Visible:
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
    for some in (partial[n : n + many] for n in range(0, len(partial), many)):
        b, h, i, j = (at.view(-1, 1, 1) for at in some.unbind(1))  # (T, 1, 1)
        i, j = i * size + step.view(-1, 1), j * size + step  # (T, size, 1), (T, 1, size)
        cells = see(b, h, i.clamp(max=nq - 1), j.clamp(max=nk - 1)) & (i < nq) & (j < nk)  # (T, size, size)
        row, key = ((b * lead[1] + h) * n + at for n, at in ((tall, i), (wide, j)))
        row, key = row.reshape(-1), key.reshape(-1)
        counts.view(-1).index_add_(0, row, cells.sum(2).view(-1))
        first.view(-1).scatter_reduce_(0, row, torch.where(cells, j, nk).amin(2).view(-1), "amin")
        last.view(-1).scatter_reduce_(0, row, torch.where(cells, j, -1).amax(2).view(-1), "amax")
        keys.view(-1).scatter_reduce_(0, key, cells.any(1).long().view(-1), "amax")
    full = kinds == FULL  # visible throughout, so not computed
    start = torch.arange(full.shape[3], device=device) * size
    end = (start + size).clamp(max=nk)
    per_tile = (  # (B', H', Tq) each
        torch.where(full, end - start, 0).sum(-1),
        torch.where(full, start, nk).amin(-1),
        torch.where(full, end - 1, -1).amax(-1),
    )
    count, low, high = (x.repeat_interleave(size, -1) for x in per_tile)
    counts, first, last = counts + count, torch.minimum(first, low), torch.maximum(last, high)
    keys = torch.maximum(keys, full.any(2).long().repeat_interleave(size, -1))
    counts, first, last = (x[..., :nq] for x in (counts, first, last))
    return Visible(counts, first, last, counts * 0, keys[..., :nk] > 0, _rule_bands(mask, nq, nk, device))


def _survey_rows(
    mask: Mask | None, hiding: Tensor | None, threshold: float, nq: int, nk: int, device: torch.device
) -> Visible:
    # 1. The parts of the mask, the (B', H') they vary over, and their rows: 1 where all rows are alike.
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
        """What is visible, and what −∞ leaves open where finite numbers hide more: (B', H', rows, Nk)."""
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

    # 2. Count in pieces of rows.
    pieces: list[tuple[Tensor, ...]] = []
    keys = torch.zeros(batch, heads, nk, dtype=torch.uint8, device=device)
    _, wide, _, broad = _parts(1, nk)
    step = max(1, AT_ONCE // (batch * heads * nk))
    for start in range(0, height, step):
        visible, open_ = cells(slice(start, min(height, start + step)))  # (B', H', rows, Nk)
        # On a CPU sums of floats and argmax of bytes are by far the fastest.
        padded = visible if wide * broad == nk else torch.nn.functional.pad(visible, (0, wide * broad - nk))
        shares = padded.reshape(*visible.shape[:3], wide, broad).float().sum(-1).long()  # (B', H', rows, C)
        counts = shares.sum(-1)
        first, back = visible.view(torch.uint8).argmax(-1), visible.view(torch.uint8).flip(-1).argmax(-1)
        first, last = torch.where(counts > 0, first, nk), torch.where(counts > 0, nk - 1 - back, -1)
        unhidden = counts * 0 if open_ is None else torch.where(counts > 0, 0, open_.float().sum(-1).long())
        pieces.append((counts, first, last, unhidden, shares[:KEPT, :KEPT]))
        torch.maximum(keys, visible.view(torch.uint8).amax(-2), out=keys)
    *rows, shares = (torch.cat(piece, 2) for piece in zip(*pieces, strict=True))
    # 3. The share of visible cells in each part: (b, h, rows, C) → (b, h, R, C)
    high, wide, tall, broad = _parts(height, nk)
    shares = torch.nn.functional.pad(shares, (0, 0, 0, high * tall - height))
    there = (height - torch.arange(high, device=device) * tall).clamp(max=tall).view(-1, 1)
    there = there * (nk - torch.arange(wide, device=device) * broad).clamp(max=broad)
    bands = _as_bytes(shares.reshape(*shares.shape[:2], high, tall, wide).sum(3), there)
    if height < nq:
        rows = [values.expand(-1, -1, nq) for values in rows]
        bands = bands.expand(-1, -1, _parts(nq, nk)[0], -1)
    counts, first, last, unhidden = rows
    return Visible(counts, first, last, unhidden, keys > 0, bands)


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

    def samples(n: int, parts: int, size: int) -> tuple[Tensor, Tensor]:
        """Indices spread over each part, part after part, and which of them exist; the others are 0."""
        within = torch.arange(min(size, SAMPLES), device=device) * size // min(size, SAMPLES)
        index = (torch.arange(parts, device=device).view(-1, 1) * size + within).view(-1)
        return torch.where(index < n, index, 0), index < n

    (i, in_i), (j, in_j) = samples(nq, high, tall), samples(nk, wide, broad)
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


def _as_bytes(seen: Tensor, there: Tensor) -> Tensor:
    """A share as 0 to 255: 0 and 255 only for none and for all."""
    share = (255 * seen.float() / there).round()
    some, every = seen > 0, seen == there
    return torch.where(every, 255, torch.where(some, share.clamp(1, 254), 0)).to(torch.uint8)


def classify(cells: Tensor) -> tuple[BiasKind, float | None]:
    """What numbers (B, H, Nq, Nk) added to the scores do; for "large negative", also the hiding one nearest to 0."""
    cells = dense_cells(cells.detach())
    if cells.numel() == 0:
        return "additive", None
    low, high = torch.stack(torch.aminmax(cells)).tolist()
    if low > SLOPES and not (low == 0 and high == 1):  # one look, without another tensor of this size
        return "additive", None
    rows = max(1, AT_ONCE // (cells.numel() // cells.shape[2]))
    pieces = []
    for piece in (cells[:, :, n : n + rows] for n in range(0, cells.shape[2], rows)):
        hides = (piece <= HIDES) & (piece != -inf)
        slope, other = (piece > HIDES) & (piece < SLOPES), (piece != 0) & (piece != 1)
        nearest = torch.where(hides, piece, -inf).amax()
        pieces.append(torch.stack([*(x.any().to(nearest.dtype) for x in (piece == -inf, slope, other)), nearest]))
    infinite, slopes, others, start = torch.stack(pieces).amax(0).tolist()
    if not others:
        return "zero-one", None
    if start > -inf and not slopes:
        return "large negative", start
    return ("minus infinity" if infinite else "additive"), None


@dataclass(frozen=True)
class Outline:
    """The band that a mask follows."""

    near: int  # the smallest j − i that is visible
    far: int  # the largest
    choice: int  # visible are 0: all keys but padding; 1: all up to far; 2: from near to far; 3: no band; 4: nothing
    nq: int
    nk: int

    @property
    def hides_future(self) -> bool:
        """Whether no query sees past its own position, taken among the last Nq, or as i if Nq > Nk."""
        return self.nq > 1 and self.choice in (1, 2, 3) and self.far <= max(0, self.nk - self.nq)

    @property
    def offset(self) -> int | None:
        """The offset of the causal mask that this is, if it is one; one query stands at the last key that it sees."""
        if self.nq == 1:
            return self.far if self.choice == 2 and self.far < self.nk - 1 else None
        return self.far if self.choice == 1 and self.hides_future else None

    @property
    def name(self) -> str | None:
        """The band in the words of `regard.masks`; None where it is none."""
        if self.choice in (3, 4):
            return None if self.choice == 3 else "nothing visible"
        if self.nq == 1 and self.choice == 2:
            if self.near > 0:
                return f"window({self.far - self.near}, 0)"
            return "all visible" if self.far == self.nk - 1 else "all so far"  # the rest is room in a cache
        usual = self.nk - self.nq
        if self.choice == 0:
            return "all visible"
        if self.choice == 1:
            return "causal" if self.far == usual else f"causal, offset {self.far}"
        before, after = usual - self.near, self.far - usual
        if before >= 0 and after >= 0:
            return f"window({before}, {after})"
        return f"window from {self.near - usual:+d} to {after:+d}"


def trace(seen: Visible, kind: str = "self") -> tuple[Tensor, Tensor]:
    """The simplest band that shows exactly what is seen, and the padding that it leaves. Reads no number back.

    The band as the numbers of an `Outline` (near, far, choice), the padding as (B or 1, Nk) booleans.
    """
    nq, nk, device = seen.counts.shape[-1], seen.keys.shape[-1], seen.counts.device
    i, j = torch.arange(nq, device=device), torch.arange(nk, device=device)
    some, any_ = seen.counts > 0, seen.keys.any()

    def fit(near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the band without keys that no query sees shows just what is seen; which of those keys it reaches."""
        padding = ~seen.keys.any(1) & (j >= near) & (j <= nq - 1 + far)  # (B', Nk)
        real = torch.nn.functional.pad((~padding).long().cumsum(1), (1, 0))  # (B', Nk + 1): how many before each key
        low, high = (i + near).clamp(0, nk), (i + far + 1).clamp(0, nk)  # (Nq,)
        expected = (real[:, high] - real[:, low]).clamp(min=0).unsqueeze(1)  # (B', 1, Nq)
        return ((seen.counts == expected) | (seen.counts == 0)).all(), padding

    near, far = torch.tensor(-nq, device=device), torch.tensor(nk, device=device)  # no limits
    bands = [(near, far)]
    if nq and nk:
        lowest = torch.where(any_, torch.where(some, seen.first - i, nk).min(), near)
        highest = torch.where(any_, torch.where(some, seen.last - i, -nq).max(), far)
        alone = nq == 1 and kind == "self"
        bands = [(lowest, highest)] if alone else [(near, far), (near, highest), (lowest, highest)]
        near, far = lowest, highest
    tried = [fit(*band) for band in bands]
    fits = torch.stack([fits for fits, _ in tried])
    index = torch.where(fits.any(), fits.long().argmax(), len(bands) - 1)
    choice = torch.where(fits.any(), index + 3 - len(bands), 3)
    paddings = torch.stack([padding for _, padding in tried])  # (bands, B', Nk)
    choice = torch.where(any_, choice, 4)
    return torch.stack([near, far, choice]), paddings.index_select(0, index.view(1))[0]


def sides(padding: Tensor, outline: Outline) -> tuple[Side | None, ...]:
    """Where the padding stands, for each row of (B or 1, Nk) booleans."""
    j = torch.arange(padding.shape[1])
    real = ~padding
    if outline.choice in (1, 2, 3):
        real = real & (j >= outline.near) & (j <= outline.nq - 1 + outline.far)
    before = padding & (real.long().cumsum(1) == 0)
    after = padding & (real.long().flip(1).cumsum(1).flip(1) == 0)
    between = padding & ~before & ~after
    marks = torch.stack([x.any(1) for x in (padding, real, before, after, between)])  # (5, B)
    names: list[Side | None] = []
    for some, left_over, left, right, inside in marks.T.tolist():
        if not some:
            names.append(None)
        elif not left_over:
            names.append("whole")
        else:
            names.append("inside" if inside or (left and right) else "left" if left else "right")
    return tuple(names)


@dataclass(frozen=True, eq=False)
class MaskSummary:
    """What the queries of a call see, computed on first use."""

    nq: int
    nk: int
    device: torch.device
    mask: Mask | None = None
    hiding: Tensor | None = None  # (B or 1, H or 1, Nq or 1, Nk or 1) numbers added to the scores, if some hide
    kind: str = "self"  # or "cross", where queries have no place among the keys
    bias_kind: BiasKind | None = None
    bias_from: float | None = None  # of a "large negative" bias, the number nearest to 0 that hides

    @cached_property
    def visible(self) -> Tensor:
        """(B or 1, H or 1, Nq) keys that take part in each row's softmax; a sink is not counted."""
        band = _band(self.mask, self.nq, self.nk) if self.hiding is None else None
        if band is None:
            return self.survey.counts + self.survey.unhidden
        counts, _, _ = _band_rows(band, self.nq, self.nk, self.device)  # this is on the way of every look
        return counts.view(1, 1, -1)

    @cached_property
    def padding(self) -> Tensor | None:
        """(B or 1, Nk) booleans, True for keys of a batch row that no query sees; None where there are none."""
        if self._is_band:
            return None
        _, padding = self.traced
        return padding if bool(padding.any()) else None

    @cached_property
    def offset(self) -> Number | None:
        """The position of query 0, from the mask; None where that is Nk − Nq, and in cross-attention."""
        if self.kind == "cross":
            return None
        placed = [part for part in conjuncts(self.mask) if isinstance(part, OffsetMask)]
        if placed or self._is_band:
            return next((part.offset for part in placed if part.offset is not None), None)
        return self.outline.offset

    @cached_property
    def survey(self) -> Visible:
        """All counts of what is visible."""
        return survey(self.mask, self.hiding, THRESHOLD.get(self.bias_kind, -inf), self.nq, self.nk, self.device)

    @cached_property
    def traced(self) -> tuple[Tensor, Tensor]:
        """The band that the mask follows, and its padding, as `trace` gives them."""
        return trace(self.survey, self.kind)

    @property
    def outline(self) -> Outline:
        """The band, its numbers read back: on a GPU this waits."""
        near, far, choice = self.traced[0].tolist()
        return Outline(near, far, choice, self.nq, self.nk)

    @property
    def causal(self) -> Causal | None:
        """The causal rule that is a part of the mask, if one is."""
        return next((part for part in conjuncts(self.mask) if isinstance(part, Causal)), None)

    @property
    def _is_band(self) -> bool:
        return self.hiding is None and (self.mask is None or self.mask.band(self.nq, self.nk) is not None)


def summarise_mask(call: Call, kind: str = "self") -> MaskSummary:
    """What the queries of a call of self- or cross-attention see."""
    (_, _, nq, nk), bias = call.sizes, call.bias
    if not isinstance(bias, DenseBias):
        return MaskSummary(nq, nk, call.device, call.mask, None, kind, None if bias is None else "additive")
    bias_kind, start = classify(bias.cells)
    hiding = bias.cells.detach() if bias_kind in THRESHOLD else None
    return MaskSummary(nq, nk, call.device, call.mask, hiding, kind, bias_kind, start)


# ---------------------------------------------------------------------------------------------------------------- facts

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


def read_facts(
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
    seen, (band, hidden) = summary.survey, summary.traced

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
    back = torch.cat([band, *rows, *fine]).tolist()
    outline = Outline(back[0], back[1], back[2], nq, nk)
    both = torch.cat([hidden.reshape(-1).to(torch.uint8), seen.bands.reshape(-1)]).cpu()
    split = hidden.numel()
    padding, bands = both[:split].view(hidden.shape) > 0, both[split:].view(seen.bands.shape).clone()
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
    nq, nk, device, (band, padding) = summary.nq, summary.nk, summary.device, summary.traced
    rows = torch.zeros(1, 1, nq, dtype=torch.bool, device=device)
    if summary.kind == "self" and nk:  # queries that are padding themselves; none in a batch row that is nothing else
        offset = None if summary.causal is None else summary.causal.offset
        positions = TileGrid(nq, nk, (1, 1), device).positions(offset)
        if offset is None:  # a causal mask that came as cells has its own
            _, far, choice = band.unbind()
            own = (choice == 1) & (far <= max(0, nk - nq)) if nq > 1 else choice == 2
            positions = positions + torch.where(own, far - (nk - nq), 0)
        rows = at_positions(padding, positions, outside=False) & summary.survey.keys.any(2).any(1).view(-1, 1, 1)
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
    return "both" if rest.outline.hides_future else "flag"


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
