"""Taps for attention written out by hand: a product, a softmax over its last axis, and a product with the values.

A softmax alone proves nothing: routers and classifiers have one too. So a softmax inside a watched module is taken for
attention when there, too, a product of batches of matrices made the scores and another takes the weights, with the same
matrices: rows are queries, the axis summed over is the keys, and all queries of a matrix share their values. What is
seen and never so confirmed is listed, not guessed at. Only references are kept, never a copy of N×N.

This file does not know fused kernels.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product as pairs
from math import prod
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from regard.lens.runs import matrix_marks
from regard.lens.taps.callers import Caller, Watch, active, attempt, deliver, find, running
from regard.lens.taps.sightings import HERE, Sighting

__all__ = ["ProductTap", "SoftmaxTap", "settle"]

Matrices = tuple[int, int, int]
"""(how many matrices, rows, columns) of a batched product's result or operand."""

REMEMBERED = 8
"""How many products back the one that made the scores may be: relative positions take up to three."""

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
"""Attributes by which attention modules name their number of heads."""


@dataclass(frozen=True, eq=False)
class _Product:
    """A product that may have made scores."""

    matrices: Matrices
    marks: Tensor | None  # of its columns, (matrices, columns), by which keys are known again


class _Thread(threading.local):
    def __init__(self) -> None:
        self.products: deque[tuple[list[Caller], _Product]] = deque(maxlen=REMEMBERED)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A softmax that may be attention."""

    callers: list[Caller]
    scores: Tensor  # (…, Nq, Nk), with a sink's column perhaps
    weights: Tensor
    versions: tuple[int, int]
    products: list[_Product]  # that may have made the scores

    def takes(self, matrices: Matrices) -> _Product | None:
        """Can these be the weights on their way to the values? Then the product that made their scores."""
        if not _fits(self.scores, matrices):
            return None
        made = (p for p in self.products if p.matrices[2] == matrices[2])
        return next((p for p in made if (matrices[0] > 1) == (p.matrices[0] > 1)), None)


_HERE = _Thread()
_LOCK = threading.Lock()
_pending: dict[int, list[_Candidate]] = {}  # by thread, so that the end of a watch can drop what is left in any


class SoftmaxTap:
    """Covers `aten::_softmax`."""

    name = "_softmax"

    def __init__(self, key: str) -> None:
        self.kernel = torch.library.get_kernel(f"aten::{self.name}", key)

    def __call__(self, keyset: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        """Run the softmax; remember it if it may be attention."""
        out: Tensor = self.kernel.call_boxed(keyset, x, dim, half_to_float)
        if active() and not HERE.inside and x.ndim >= 3 and dim in (-1, x.ndim - 1) and x.numel():
            frame = sys._getframe(1)
            callers = find(frame, x, through=nn.Softmax)  # the attention is whose part it is
            if callers and not callers[0].inside_op:
                attempt(callers, lambda: _remember(callers, x, out, frame))
        return out


class ProductTap:
    """Covers `aten::bmm` or `aten::baddbmm`, where every product of batches of matrices ends, einsum's too."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.first = 1 if name == "baddbmm" else 0  # where the two operands begin
        self.kernel = torch.library.get_kernel(f"aten::{name}", key)

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the product; see whether it is what made some scores, or what uses some weights."""
        out: Tensor = self.kernel.call_boxed(keyset, *args, **kwargs)
        if active() and not HERE.inside:
            callers = find(sys._getframe(1), out)
            if callers and not callers[0].inside_op:
                attempt(callers, lambda: _meet(callers, args[self.first], args[self.first + 1], out))
        return out


def settle(watch: Watch) -> None:
    """Drop what a watch that ends still waits for, in any thread; it counts as unconfirmed."""
    with _LOCK:
        for thread, pending in tuple(_pending.items()):
            for candidate in tuple(pending):
                for caller in [c for c in candidate.callers if c.watch is watch]:
                    candidate.callers.remove(caller)
                    _give_up(caller, candidate.scores, by_product=True)
                if not candidate.callers:
                    pending.remove(candidate)
            if not pending:
                del _pending[thread]


# ------------------------------------------------------------------------------------------------ remember and confirm


def _remember(callers: list[Caller], scores: Tensor, weights: Tensor, frame: FrameType) -> None:
    """Wait for the product that uses these weights, if a product made the scores."""
    near = [made for whose, made in _HERE.products if _related(whose, callers)]
    either = [p for made in near for p in (made, _Product(_turned(made.matrices), None))]
    products = [p for p in either if _fits(scores, p.matrices)]
    if products:
        _HERE.products.clear()
    with _LOCK:
        pending = _pending.setdefault(threading.get_ident(), [])
        for earlier in tuple(pending):  # of this module, or of one that has returned meanwhile
            if earlier.callers[0].module is callers[0].module or not running(earlier.callers[0], frame):
                pending.remove(earlier)
                for caller in earlier.callers:
                    _give_up(caller, earlier.scores, by_product=True)
        if products:
            pending.append(_Candidate(callers, scores, weights, (_version(scores), _version(weights)), products))
    if not products:
        for caller in callers:
            _give_up(caller, scores, by_product=False)


def _fits(scores: Tensor, matrices: Matrices) -> bool:
    """Can these matrices hold the scores' rows, with or without a sink's column, several heads stacked perhaps?"""
    nq, nk = scores.shape[-2:]
    count, rows, columns = matrices
    return columns in (nk, nk - 1) and count * rows == scores.numel() // nk and rows % nq == 0


def _meet(callers: list[Caller], left: Tensor, right: Tensor, out: Tensor) -> None:
    """A product: of some weights with their values, and then it is told; or of what may become scores."""
    for candidate in tuple(_pending.get(threading.get_ident(), ())):
        if _related(candidate.callers, callers) and _confirm(candidate, left, right, out):
            return
    _HERE.products.append((callers, _Product(_matrices(out), matrix_marks(right))))


def _confirm(candidate: _Candidate, left: Tensor, right: Tensor, out: Tensor) -> bool:
    """Report a candidate whose weights are one operand of a product; einsum may have turned them."""
    for operand, matrices in ((left, _matrices(left)), (right, _turned(_matrices(right)))):
        product = candidate.takes(matrices)
        if product is not None:
            with _LOCK:
                pending = _pending.get(threading.get_ident(), [])
                if candidate not in pending:  # its watch has just ended
                    return True
                pending.remove(candidate)
            sink = matrices[2] < candidate.scores.shape[-1]
            mine = operand is left and not sink and _is_same(operand, candidate.weights)
            deliver(list(candidate.callers), partial(_sighting, candidate, sink, out if mine else None, product.marks))
            return True
    return False


def _related(some: list[Caller], others: list[Caller]) -> bool:
    """Is one of two modules inside the other, or the same?"""
    for one, two in pairs(some, others):
        outer, inner = sorted((one.path, two.path), key=len)
        if one.watch is two.watch and (not outer or f"{inner}.".startswith(f"{outer}.")):
            return True
    return False


def _matrices(x: Tensor) -> Matrices:
    return x.shape[0], x.shape[1], x.shape[2]


def _give_up(caller: Caller, scores: Tensor, *, by_product: bool) -> None:
    seen, at = caller.watch.unconfirmed, (caller.path, tuple(scores.shape))
    seen[at] = by_product or seen.get(at, False)


def _turned(matrices: Matrices) -> Matrices:
    return matrices[0], matrices[2], matrices[1]


def _version(x: Tensor) -> int:
    """How often it was written to; inference tensors do not count."""
    return 0 if x.is_inference() else x._version


def _is_same(operand: Tensor, weights: Tensor) -> bool:
    """Does an operand lie in memory as the weights do? Then the product's rows are in their order."""
    same = operand.data_ptr() == weights.data_ptr() and operand.numel() == weights.numel()
    return same and operand.is_contiguous() and weights.is_contiguous()


# -------------------------------------------------------------------------------------------------------- what was seen


def _sighting(candidate: _Candidate, sink: bool, mixed: Tensor | None, marks: Tensor | None) -> Sighting:
    module = candidate.callers[0].module
    *lead, nq, _ = candidate.scores.shape
    heads = _heads(module, lead)
    scores, weights = (
        _with_heads(x.detach(), heads) if _version(x) == version else None
        for x, version in zip((candidate.scores, candidate.weights), candidate.versions, strict=True)
    )
    output = None if mixed is None else mixed.detach().view(-1, heads, nq, mixed.shape[-1])
    trouble = None
    if scores is None and weights is None:
        trouble = "neither scores nor weights were left to read when they met the values"
    if sink:  # without its column; where the weights are gone, from the scores
        weights = scores.float().softmax(-1) if weights is None and scores is not None else weights
        weights = None if weights is None else weights[..., :-1]
    batch = candidate.scores.numel() // max(1, heads * prod(candidate.scores.shape[-2:]))
    if marks is not None:  # (matrices, Nk) → (B, Nk)
        marks = marks.view(batch, -1, marks.shape[1]).sum(1) if batch and marks.shape[0] % batch == 0 else None
    return Sighting(
        source="softmax", kernel="softmax", scores=scores, weights=weights, output=output, marks=marks, trouble=trouble
    )


def _heads(module: nn.Module, lead: list[int]) -> int:
    """How many of the leading axes' entries are heads: (B, H), or (B·H,) by the module's own number, or more axes."""
    if len(lead) == 2:
        return lead[1]
    told = next((n for n in _numbers_of_heads(module)), 0)
    if len(lead) == 1:
        return told if told and lead[0] % told == 0 else lead[0]
    return told if told in [prod(lead[i:]) for i in range(1, len(lead))] else lead[-1]


def _numbers_of_heads(module: nn.Module) -> Iterator[int]:
    for name in HEADS:
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            yield int(value)


def _with_heads(x: Tensor, heads: int) -> Tensor | None:
    """(…, Nq, Nk) → (B, H, Nq, Nk), as a view; None where only a copy would do."""
    try:
        return x.view(-1, heads, *x.shape[-2:])
    except RuntimeError:
        return None
