"""What a mask is, recognised from what it leaves visible."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.doctor.visibility import Visible, band_counts, conjuncts, dense_cells, survey
from regard.masks import Causal, Mask
from regard.masks.biases import Bias, DenseBias
from regard.masks.positional import OffsetMask
from regard.masks.rules import Number

BiasKind = Literal["additive", "zero-one", "large negative", "minus infinity"]
"""What a bias does: adds; adds only 0 and 1, as a boolean mask cast to floats; hides by −1e9 and such; hides by −∞."""

HIDES = -5_000.0
"""From here on, downwards, a number is meant to hide: half of the mildest that people use, BERT's −10,000."""

THRESHOLD: dict[BiasKind | None, float] = {"large negative": HIDES, "minus infinity": -inf}
"""The biases that hide, and from which number on."""

SLOPES = -1_000.0  # a bias with numbers between this and HIDES is a slope, as ALiBi's, and hides nothing on purpose
AT_ONCE = 1 << 22  # numbers that are looked at in one piece


def kind_of(bias: Bias | None) -> tuple[BiasKind | None, float | None]:
    """What a bias does, and for "large negative" its number nearest to 0 that hides.

    >>> kind_of(None)
    (None, None)
    """
    if bias is None:
        return None, None
    return classify(bias.cells) if isinstance(bias, DenseBias) else ("additive", None)


def hiding_numbers(bias: Bias | None, kind: BiasKind | None) -> Tensor | None:
    """The numbers of a bias of this kind, (B or 1, H or 1, Nq or 1, Nk or 1), if it hides; None otherwise.

    >>> hiding_numbers(DenseBias(torch.zeros(1, 1, 2, 2)), "additive") is None
    True
    """
    return bias.cells.detach() if isinstance(bias, DenseBias) and kind in THRESHOLD else None


def classify(cells: Tensor) -> tuple[BiasKind, float | None]:
    """What numbers (B, H, Nq, Nk) that are added to the scores do, and for "large negative" from which on they hide.

    >>> classify(torch.tensor([[[[0.0, 1.0]]]])), classify(torch.tensor([[[[0.5, -3.0]]]]))
    (('zero-one', None), ('additive', None))
    """
    cells = dense_cells(cells.detach())
    if cells.numel() == 0:
        return "additive", None
    low, high = torch.stack(torch.aminmax(cells)).tolist()
    if low > SLOPES and not (low == 0 and high == 1):  # one look, without another tensor of this size
        return "additive", None
    rows = max(1, AT_ONCE // (cells.numel() // cells.shape[2]))
    pieces = [_marks(cells[:, :, at : at + rows]) for at in range(0, cells.shape[2], rows)]
    infinite, slopes, others, start = torch.stack(pieces).amax(0).tolist()
    if not others:
        return "zero-one", None
    if start > -inf and not slopes:
        return "large negative", start
    return ("minus infinity" if infinite else "additive"), None


def _marks(cells: Tensor) -> Tensor:
    """Is there −∞; a number between HIDES and SLOPES; one that is neither 0 nor 1; and the nearest to 0 that hides."""
    hides = (cells <= HIDES) & (cells != -inf)
    slopes, others = (cells > HIDES) & (cells < SLOPES), (cells != 0) & (cells != 1)
    start = torch.where(hides, cells, -inf).amax()
    return torch.stack([*(x.any().to(start.dtype) for x in (cells == -inf, slopes, others)), start])


Side = Literal["left", "right", "inside", "whole"]
"""Where the padding of a batch row stands; "inside" also for both ends, "whole" for a row of nothing else."""


@dataclass(frozen=True)
class Outline:
    """The band that a mask follows.

    >>> Outline(near=-5, far=0, choice=1, nq=5, nk=5).name
    'causal'

    near, far: the smallest and largest j − i that is visible.
    choice: 0 if all keys are visible but padding, 1 if all up to far, 2 if all from near to far, 3 if it is no band, 4
        if nothing is visible.
    """

    near: int
    far: int
    choice: int
    nq: int
    nk: int

    @property
    def hides_future(self) -> bool:
        """Does no query see past its own position, taken as among the last Nq, or as i where Nq > Nk?"""
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
            return self._name_of_one()
        usual = self.nk - self.nq
        if self.choice == 0:
            return "all visible"
        if self.choice == 1:
            return "causal" if self.far == usual else f"causal, offset {self.far}"
        before, after = usual - self.near, self.far - usual
        if before >= 0 and after >= 0:
            return f"window({before}, {after})"
        return f"window from {self.near - usual:+d} to {after:+d}"

    def _name_of_one(self) -> str:
        if self.near > 0:
            return f"window({self.far - self.near}, 0)"
        return "all visible" if self.far == self.nk - 1 else "all so far"  # the rest is room in a cache


@dataclass(frozen=True, eq=False)
class Traced:
    """The outline of a mask as tensors, still on its device.

    numbers: near, far and choice, as below.
    padding: (B or 1, Nk) booleans.
    """

    numbers: Tensor
    padding: Tensor

    def outline(self, nq: int, nk: int) -> Outline:
        """The numbers, read back: on a GPU this waits."""
        near, far, choice = self.numbers.tolist()
        return Outline(near, far, choice, nq, nk)


def trace(seen: Visible, kind: str = "self") -> Traced:
    """Find the simplest band that shows exactly what is seen, and the padding that it leaves. Reads no number back.

    >>> from math import inf
    >>> from regard.lens.doctor.visibility import survey
    >>> from regard.masks import causal, padding
    >>> traced = trace(survey(causal() & padding([2, 4]), None, -inf, 4, 4, torch.device("cpu")))
    >>> traced.numbers.tolist(), traced.padding.int().tolist()
    ([-3, 0, 1], [[0, 0, 1, 1], [0, 0, 0, 0]])
    """
    nq, nk, device = seen.counts.shape[-1], seen.keys.shape[-1], seen.counts.device
    i, some, any_ = torch.arange(nq, device=device), seen.counts > 0, seen.keys.any()
    near, far = torch.tensor(-nq, device=device), torch.tensor(nk, device=device)  # no limits
    bands = [(near, far)]
    if nq and nk:
        lowest = torch.where(any_, torch.where(some, seen.first - i, nk).min(), near)
        highest = torch.where(any_, torch.where(some, seen.last - i, -nq).max(), far)
        alone = nq == 1 and kind == "self"
        bands = [(lowest, highest)] if alone else [(near, far), (near, highest), (lowest, highest)]
        near, far = lowest, highest
    tried = [_fits(seen, *band) for band in bands]
    fits = torch.stack([fit for fit, _ in tried])
    index = torch.where(fits.any(), fits.long().argmax(), len(bands) - 1)
    choice = torch.where(fits.any(), index + 3 - len(bands), 3)
    paddings = torch.stack([padding for _, padding in tried])  # (bands, B', Nk)
    choice = torch.where(any_, choice, 4)
    return Traced(torch.stack([near, far, choice]), paddings.index_select(0, index.view(1))[0])


def _fits(seen: Visible, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """Does the band, less the keys that nobody sees, show just what is seen? And which of these keys does it reach?"""
    nq, nk = seen.counts.shape[-1], seen.keys.shape[-1]
    i, j = torch.arange(nq, device=near.device), torch.arange(nk, device=near.device)
    padding = ~seen.keys.any(1) & (j >= near) & (j <= nq - 1 + far)  # (B', Nk)
    real = torch.nn.functional.pad((~padding).long().cumsum(1), (1, 0))  # (B', Nk + 1): how many before each key
    low, high = (i + near).clamp(0, nk), (i + far + 1).clamp(0, nk)  # (Nq,)
    expected = (real[:, high] - real[:, low]).clamp(min=0).unsqueeze(1)  # (B', 1, Nq)
    return ((seen.counts == expected) | (seen.counts == 0)).all(), padding


def sides(padding: Tensor, outline: Outline) -> tuple[Side | None, ...]:
    """Where the padding stands, for each row of (B or 1, Nk) booleans.

    >>> rows = torch.tensor([[True, False, False], [False, False, True], [False, False, False]])
    >>> sides(rows, Outline(near=-2, far=2, choice=0, nq=3, nk=3))
    ('left', 'right', None)
    """
    j = torch.arange(padding.shape[1])
    real = ~padding
    if outline.choice in (1, 2, 3):
        real = real & (j >= outline.near) & (j <= outline.nq - 1 + outline.far)
    before = padding & (real.long().cumsum(1) == 0)
    after = padding & (real.long().flip(1).cumsum(1).flip(1) == 0)
    between = padding & ~before & ~after
    found = torch.stack([x.any(1) for x in (padding, real, before, after, between)])  # (5, B)
    return tuple(_side(*row) for row in found.T.tolist())


def _side(some: bool, real: bool, before: bool, after: bool, between: bool) -> Side | None:
    if not some:
        return None
    if not real:
        return "whole"
    return "inside" if between or (before and after) else "left" if before else "right"


@dataclass(frozen=True, eq=False)
class Sight:
    """What a call's queries see.

    nq, nk: how many queries and keys.
    mask: as in the call.
    hiding: numbers (B or 1, H or 1, Nq or 1, Nk or 1) that are added to the scores and hide; None without.
    kind: "self" or "cross".
    bias_kind, bias_from: what the bias does, as `bias_kinds.kind_of` says.
    """

    nq: int
    nk: int
    device: torch.device
    mask: Mask | None = None
    hiding: Tensor | None = None
    kind: str = "self"
    bias_kind: BiasKind | None = None
    bias_from: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("self", "cross"):
            raise ValueError(f"kind must be 'self' or 'cross', got {self.kind!r}")

    @cached_property
    def visible(self) -> Tensor:
        """(B or 1, H or 1, Nq) keys that take part in each row's softmax; a sink is not counted."""
        if self._is_band:
            return band_counts(self.mask, self.nq, self.nk, self.device)
        return self.survey.counts + self.survey.unhidden

    @cached_property
    def padding(self) -> Tensor | None:
        """(B or 1, Nk) booleans, True for keys of a batch row that no query sees; None where there are none."""
        if self._is_band:
            return None
        return self.traced.padding if bool(self.traced.padding.any()) else None

    @cached_property
    def offset(self) -> Number | None:
        """The position of query 0, from the mask; None where that is Nk − Nq, and in cross-attention."""
        if self.kind == "cross":
            return None
        placed = [part for part in conjuncts(self.mask) if isinstance(part, OffsetMask)]
        if placed or self._is_band:
            return next((part.offset for part in placed if part.offset is not None), None)
        return self.traced.outline(self.nq, self.nk).offset

    @cached_property
    def survey(self) -> Visible:
        """Everything there is to count."""
        return survey(self.mask, self.hiding, THRESHOLD.get(self.bias_kind, -inf), self.nq, self.nk, self.device)

    @cached_property
    def traced(self) -> Traced:
        """The band that the mask follows, and its padding, still on the device."""
        return trace(self.survey, self.kind)

    @property
    def causal(self) -> Causal | None:
        """The causal rule that is a part of the mask, if one is."""
        return next((part for part in conjuncts(self.mask) if isinstance(part, Causal)), None)

    @property
    def _is_band(self) -> bool:
        return self.hiding is None and (self.mask is None or self.mask.band(self.nq, self.nk) is not None)


def see(call: Call, kind: str = "self") -> Sight:
    """What a call's queries see.

    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> see(prepare(x, x, x, bias=torch.full((3, 3), -1e9).triu(1))).visible.tolist()
    [[[1, 2, 3]]]

    call: as `regard.backends.call.prepare` gives it.
    kind: "self", or "cross", where queries have no place among the keys. Raises ValueError for another.
    """
    _, _, nq, nk = call.sizes
    bias_kind, bias_from = kind_of(call.bias)
    hiding = hiding_numbers(call.bias, bias_kind)
    return Sight(nq, nk, call.device, call.mask, hiding, kind, bias_kind, bias_from)


def visible_counts(call: Call) -> Tensor:
    """How many keys take part in each row's softmax, (B or 1, H or 1, Nq); a sink is not counted.

    >>> from regard import masks
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> visible_counts(prepare(x, x, x, mask=masks.window(1, 0))).tolist()
    [[[1, 2, 2, 2]]]
    """
    return see(call).visible
