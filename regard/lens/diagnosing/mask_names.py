"""What a mask is, told from what it leaves visible: all, causal, a window, each with or without padding.

Keys that no query sees are padding, unless the band that the mask follows does not reach them at all. A name is given
only where it is exact: the band and the padding leave just as many keys to each query as the mask does, and since they
contain all that it shows, as many means the same. Rows that see nothing are left out of that: they are told apart.

    near ≤ j − i ≤ far        the band: query i may see key j, for Nq = Nk causal has far = 0

With one query of self-attention, padding that is the same in every batch row cannot be told from a window, nor from
room that a cache has not filled yet. It is named as one of these, the query standing at the last key that it sees.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys).

It does not know where a mask came from, nor what it is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.lens.diagnosing.visibility import Visible

__all__ = ["Outline", "Side", "Traced", "sides", "trace"]

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
    >>> from regard.lens.diagnosing.visibility import survey
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
