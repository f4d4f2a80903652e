"""Taps for attention written out by hand: a product, a softmax over its last axis, and a product with the values.

A softmax alone proves nothing: routers and classifiers have one too. So a softmax inside a watched module is taken for
attention when there, too, a product of matrices made the scores and another takes the weights, with the same matrices:
rows are queries, the axis summed over is the keys, and all queries of a matrix share their values. What is seen and
never so confirmed is listed, not guessed at: a softmax over another axis, a log_softmax, products without one. Only
references are kept, never a copy of N×N.

A product of two plain matrices counts for scores of two axes, and only where neither operand is a parameter: else each
linear layer and classifier would count. With a bias (addmm) it is taken for a linear layer, and not looked at.

This file does not know fused kernels.
"""

from __future__ import annotations

import re
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
from regard.lens.taps.callers import Caller, Watch, active, attempt, deliver, find, is_parameter, running
from regard.lens.taps.sightings import HERE, Sighting

__all__ = ["ProductTap", "SoftmaxTap", "forget_other_threads", "settle"]

Matrices = tuple[int, int, int]
"""(how many matrices, rows, columns) of a batched product's result or operand."""

REMEMBERED = 8
"""How many products back the one that made the scores may be: relative positions take up to three."""

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
"""Attributes by which attention modules name their number of heads."""

ATTENTION = re.compile(r"att(entio)?n|mha|multi_?head", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class _Product:
    """A product that may have made scores."""

    matrices: Matrices
    marks: Tensor | None  # of its columns, (matrices, columns), by which keys are known again
    flat: bool = False  # of two plain matrices, as a linear layer's are


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

    @property
    def by_product(self) -> bool:
        """Were the scores surely made by a product of their own? One of plain matrices may be a linear layer's."""
        return any(not product.flat for product in self.products)

    def takes(self, matrices: Matrices, flat: bool) -> _Product | None:
        """Can these be the weights on their way to the values? Then the product that made their scores."""
        if not _fits(self.scores, matrices, flat):
            return None
        made = (p for p in self.products if p.matrices[2] == matrices[2])
        return next((p for p in made if (matrices[0] > 1) == (p.matrices[0] > 1)), None)


_HERE = _Thread()
_LOCK = threading.RLock()  # the end of a watch may come while it is held, where an object is let go
_pending: dict[int, list[_Candidate]] = {}  # by thread, so that the end of a watch can drop what is left in any


class SoftmaxTap:
    """Covers `aten::_softmax`, and `aten::_log_softmax`, of which it is only noted that a product made its scores."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.kernel = torch.library.get_kernel(f"aten::{name}", key)

    def __call__(self, keyset: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        """Run the softmax; remember it if it may be attention."""
        out: Tensor = self.kernel.call_boxed(keyset, x, dim, half_to_float)
        if active() and not HERE.inside and x.ndim >= 2 and x.numel():
            frame = sys._getframe(1)
            callers = find(frame, x, through=nn.Softmax)  # the attention is whose part it is
            if callers and not callers[0].inside_op:
                known = self.name == "_softmax" and dim in (-1, x.ndim - 1)
                attempt(callers, lambda: _remember(callers, x, out, frame) if known else _note(callers, x))
        return out


class ProductTap:
    """Covers `aten::bmm` or `aten::baddbmm`, where every product of batches of matrices ends, einsum's too; or `mm`."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.first = 1 if name == "baddbmm" else 0  # where the two operands begin
        self.kernel = torch.library.get_kernel(f"aten::{name}", key)

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the product; see whether it is what made some scores, or what uses some weights."""
        out: Tensor = self.kernel.call_boxed(keyset, *args, **kwargs)
        if active() and not HERE.inside:
            left, right = args[self.first : self.first + 2]
            if self.name == "mm" and (is_parameter(right) or is_parameter(left)):
                return out  # before callers are searched for, which costs most
            callers = find(sys._getframe(1), out)
            if callers and not callers[0].inside_op:
                attempt(callers, lambda: _meet(callers, left, right, out))
        return out


def settle(watch: Watch) -> None:
    """Drop what a watch that ends still waits for, in any thread; it counts as unconfirmed."""
    with _LOCK:
        for thread, pending in tuple(_pending.items()):
            for candidate in tuple(pending):
                for caller in [c for c in candidate.callers if c.watch is watch]:
                    candidate.callers.remove(caller)
                    _give_up(caller, candidate.scores, by_product=candidate.by_product)
                if not candidate.callers:
                    pending.remove(candidate)
            if not pending:
                del _pending[thread]


def forget_other_threads() -> None:
    """In a forked process, which has but this one thread."""
    global _LOCK
    _LOCK = threading.RLock()
    for thread in _pending.keys() - {threading.get_ident()}:
        del _pending[thread]


# ------------------------------------------------------------------------------------------------ remember and confirm


def _remember(callers: list[Caller], scores: Tensor, weights: Tensor, frame: FrameType) -> None:
    """Wait for the product that uses these weights, if a product made the scores."""
    products = _made(callers, scores)
    if products:
        _HERE.products.clear()
    elif scores.ndim == 2:  # a classifier's, or a sampler's
        for caller in callers:
            _give_up(caller, scores, by_product=False)
        return
    with _LOCK:
        pending = _pending.setdefault(threading.get_ident(), [])
        for earlier in tuple(pending):  # of this module, or of one that has returned meanwhile
            if earlier.callers[0].module is callers[0].module or not running(earlier.callers[0], frame):
                pending.remove(earlier)
                for caller in earlier.callers:
                    _give_up(caller, earlier.scores, by_product=earlier.by_product)
        if products:
            pending.append(_Candidate(callers, scores, weights, (_version(scores), _version(weights)), products))
    if not products:
        for caller in callers:
            _give_up(caller, scores, by_product=False)


def _note(callers: list[Caller], scores: Tensor) -> None:
    """A softmax of another form is listed where a product made its scores."""
    products = _made(callers, scores)
    if products:
        for caller in callers:
            _give_up(caller, scores, by_product=any(not product.flat for product in products))


def _made(callers: list[Caller], scores: Tensor) -> list[_Product]:
    """The latest products that may have made some scores, as they are or turned."""
    near = [made for whose, made in _HERE.products if _related(whose, callers)]
    either = [p for made in near for p in (made, _Product(_turned(made.matrices), None, made.flat))]
    return [p for p in either if _fits(scores, p.matrices, p.flat)]


def _fits(scores: Tensor, matrices: Matrices, flat: bool) -> bool:
    """Can these matrices hold the scores' rows, with or without a sink's column, several heads stacked perhaps?"""
    nq, nk = scores.shape[-2:]
    count, rows, columns = matrices
    if flat and scores.ndim > 2:
        return False
    return columns in (nk, nk - 1) and count * rows == scores.numel() // nk and rows % nq == 0


def _meet(callers: list[Caller], left: Tensor, right: Tensor, out: Tensor) -> None:
    """A product: of some weights with their values, and then it is told; or of what may become scores."""
    flat = out.ndim == 2
    left, right, out = (x.unsqueeze(0) if flat else x for x in (left, right, out))
    for candidate in tuple(_pending.get(threading.get_ident(), ())):
        if _related(candidate.callers, callers) and _confirm(candidate, left, right, out, flat):
            return
    for whose, made in _HERE.products:
        if made.matrices == _matrices(left) and _related(whose, callers):
            for caller in callers:
                caller.watch.chained[caller.path, made.matrices] = None
    _HERE.products.append((callers, _Product(_matrices(out), matrix_marks(right), flat)))


def _confirm(candidate: _Candidate, left: Tensor, right: Tensor, out: Tensor, flat: bool) -> bool:
    """Report a candidate whose weights are one operand of a product; einsum may have turned them."""
    for operand, matrices in ((left, _matrices(left)), (right, _turned(_matrices(right)))):
        product = candidate.takes(matrices, flat)
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
    *lead, nq, _ = candidate.scores.shape
    heads = _heads(candidate.callers[0], lead, nq)
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


def _heads(caller: Caller, lead: list[int], nq: int) -> int:
    """How many of the leading axes' entries are heads: (B, H), or (B·H,), or more axes; one where there are none."""
    if len(lead) == 2:
        return lead[1]
    told = next((n for n in _numbers_of_heads(caller.module)), 0)
    if len(lead) <= 1:
        return _heads_of(lead[0], told, caller, nq) if lead else 1
    return told if told in [prod(lead[i:]) for i in range(1, len(lead))] else lead[-1]


def _heads_of(count: int, told: int, caller: Caller, nq: int) -> int:
    """How many of B·H are heads: by the module's own number, else by the batch that it was given, else all of them."""
    if told and count % told == 0:
        return told
    first, second, *_ = *caller.given, 0, 0
    turned = first == nq != second and second and count % second == 0  # (N, B, …), as nn.MultiheadAttention's are
    batch = second if turned else first
    if batch == count:  # a part of the attention, which gets (B·H, N, D) from it
        return next((n for n in _numbers_of_heads(_attention_around(caller)) if count % n == 0), 1)
    return count // batch if batch and count % batch == 0 else count


def _attention_around(caller: Caller) -> nn.Module | None:
    """The module that the caller is a part of, if it is called attention."""
    above = caller.path.rpartition(".")[0]
    found = (m for m, path in caller.watch.modules.values() if path == above and m is not caller.module)
    return next((m for m in found if ATTENTION.search(type(m).__name__)), None)


def _numbers_of_heads(module: nn.Module | None) -> Iterator[int]:
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
