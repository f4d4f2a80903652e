"""Whether the weights that a product applied are those of a softmax: the same memory, equal numbers, dropped out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, permutations
from math import inf
from operator import mul
from types import FrameType

import torch
from torch import Tensor

CELLS = 1 << 22  # compared at once
EINSUM = torch.functional.einsum.__code__


@dataclass(frozen=True, eq=False)
class Stamp:
    """Tells whether a tensor was written to since: its version counter, and the sums of its rows and columns.

    Inference tensors have no version counter, and writes through `.data` do not count, hence the sums.
    """

    version: int
    sums: tuple[Tensor, Tensor]

    @staticmethod
    def of(x: Tensor) -> Stamp:
        """The stamp of a tensor as it is now."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return Stamp(version_of(x), (x.sum(-1, dtype=wide), x.sum(-2, dtype=wide)))

    def fits(self, x: Tensor) -> bool:
        """Whether nothing was written to the tensor since."""
        now = Stamp.of(x)
        return now.version == self.version and all(map(same_numbers, now.sums, self.sums))


def version_of(x: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return 0 if x.is_inference() else x._version


def in_axes_of(weights: Tensor, operand: Tensor) -> Iterator[Tensor]:
    """A product's operand (count, rows, columns) viewed with the axes of weights (…, Nq, Nk).

    All but the last axis may have been put in another order before they were joined: the usual order comes first. There
    are none where the sizes do not fit. Where axes were joined otherwise than here, only the usual order is tried.
    """
    if operand.numel() != weights.numel():
        return
    if operand.shape[0] not in accumulate(weights.shape[:-1], mul, initial=1):
        yield operand.reshape(weights.shape)
    for order in permutations(range(weights.ndim - 1)):
        sizes = [weights.shape[axis] for axis in order]
        if operand.shape[0] in accumulate(sizes, mul, initial=1):
            back = sorted(range(len(order)), key=order.__getitem__)
            yield operand.view(*sizes, operand.shape[-1]).permute(*back, -1)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are the same numbers in memory."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and all(a == b for size, a, b in steps if size > 1)
    )


def same_numbers(applied: Tensor, original: Tensor) -> bool:
    """Whether two tensors of one shape are equal once the second is cast to the first's dtype.

    NaN equals NaN, and 0: the softmax of a row that sees nothing is NaN, and set to 0 it is the same attention.
    """
    for a, b in _pieces(applied, original):
        b = b.to(a.dtype)
        if not torch.equal(a, b) and not bool(((a == b) | (b.isnan() & ((a == 0) | a.isnan()))).all()):
            return False
    return True


def is_dropout(applied: Tensor, original: Tensor) -> bool:
    """Whether each number is 0 or the original times one factor above 1, and some are 0 that were not before."""
    info = max((torch.finfo(x.dtype) for x in (applied, original)), key=lambda info: float(info.eps))
    tiny, rounding = float(info.smallest_normal), 8 * float(info.eps)
    least, most, some_dropped = inf, -inf, False
    for a, b in _pieces(applied, original):
        a, b = a.double(), b.double()
        counts = b >= tiny  # smaller ones have lost digits
        kept = counts & (a != 0)
        ratio = a / b
        low, high = torch.where(kept, ratio, inf).amin(), torch.where(kept, ratio, -inf).amax()
        stray = (~counts & ~(a.abs() <= 64 * tiny)).any()
        lowest, highest, dropped, wrong = torch.stack([low, high, (counts & ~kept).any(), stray]).tolist()
        if wrong:
            return False
        least, most, some_dropped = min(least, lowest), max(most, highest), some_dropped or dropped > 0
    return some_dropped and 1 + rounding < least <= most <= least * (1 + rounding)


def unlikeness(applied: Tensor, original: Tensor) -> float:
    """1 − |cosine| of two tensors of one shape: 0 for a multiple of the other, 1 for no relation."""
    sums = torch.zeros(3, dtype=torch.float64, device=applied.device)
    for a, b in _pieces(applied, original):
        a, b = a.double(), b.double()
        sums += torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum()])
    both, one, other = sums.tolist()
    return 1 - abs(both) / (one * other) ** 0.5 if one * other > 0 else 1.0


def _pieces(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of both at a time, so that no temporary is as large as all of them."""
    axis = max(0, one.ndim - 2)
    at_once = max(1, CELLS * one.shape[axis] // max(1, one.numel()))
    return zip(torch.split(one, at_once, axis), torch.split(other, at_once, axis), strict=True)


def random_state(device: torch.device) -> Tensor:
    """The state of the device's random numbers: it changes whenever some are drawn, as dropout does."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def einsum_operand(frame: FrameType, which: int) -> Tensor | None:
    """The first or second operand as it was given to the einsum that runs in a frame, with the summed axis last.

    einsum orders axes by its output before it multiplies. None where the frame is no einsum of two operands that sums
    over one axis.
    """
    if frame.f_code is not EINSUM:
        return None
    equation, operands = str(frame.f_locals["equation"]), frame.f_locals["operands"]
    terms, _, output = equation.replace(" ", "").partition("->")
    parts = terms.split(",")
    if len(operands) != 2 or len(parts) != 2:
        return None
    term, other = parts[which], parts[1 - which]
    summed = [label for label in term if label.isalpha() and label in other and label not in output]
    if len(summed) != 1:
        return None
    at = term.index(summed[0])
    given: Tensor = operands[which]
    return given.detach().movedim(at - len(term) if "." in term[:at] else at, -1)
