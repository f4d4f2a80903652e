"""Taps for attention written out by hand: a product, a softmax over its last axis, and a product with the values.

A softmax alone proves nothing: routers and classifiers have one too. A softmax inside a watched module counts as
attention if a product of matrices made its scores and another takes its weights, with the same matrices: rows are
queries, the axis summed over is the keys, and all queries of a matrix share their values. The path of a call:

    ProductTap   _on_product   remembers q·kᵀ as a _Product that may have made scores
    SoftmaxTap   _on_softmax   finds that product and waits, with a _Candidate, for the product with the values
    ProductTap   _on_product   compares its operands with the candidates' weights (_compare → _Use) and reports one

What is never confirmed is listed in `unconfirmed`: a softmax over another axis, a log_softmax, products without one.
Only references are kept, never a copy of N×N.

Reported is what was multiplied with the values: the product's operand is compared with the softmax output, by address
or by its numbers. After a cast, a reshape or dropout it is the same attention, and the softmax output is reported.
Anything else (a gate, a mask, talking heads, the difference of two softmaxes) is reported as applied, marked as edited.

A product of two plain matrices counts for scores of two axes, and only if neither operand is a parameter: else every
linear layer and classifier would count. With a bias (addmm) it is taken for a linear layer.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, permutations
from itertools import product as pairs
from math import inf, prod
from operator import mul
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from regard.lens.assembly import matrix_marks
from regard.lens.taps.calls import (
    HERE,
    Caller,
    ObservedCall,
    WatchedModel,
    active,
    attempt,
    calling_frame,
    deliver,
    find_callers,
    is_parameter,
    measuring,
    runs_in,
)

Matrices = tuple[int, int, int]
"""(how many matrices, rows, columns) of a batched product's result or operand."""

REMEMBERED = 8  # how many products back the one that made the scores may be: relative positions take up to three
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")  # attributes of attention modules
ATTENTION = re.compile(r"att(entio)?n|mha|multi_?head", re.IGNORECASE)

CELLS = 1 << 22  # compared at once
EINSUM = torch.functional.einsum.__code__


@dataclass(frozen=True, eq=False)
class _Product:
    """A product that may have made scores."""

    matrices: Matrices
    inner: int  # the size that it summed over: D, if it made scores
    marks: Tensor | None  # of its columns, (matrices, columns), by which keys are known again
    flat: bool = False  # of two plain matrices, as a linear layer's are


class _Thread(threading.local):
    def __init__(self) -> None:
        self.products: deque[tuple[list[Caller], _Product]] = deque(maxlen=REMEMBERED)


@dataclass(eq=False)
class _Candidate:
    """A softmax that may be attention."""

    callers: list[Caller]
    scores: Tensor  # (…, Nq, Nk), with a sink's column perhaps
    weights: Tensor
    products: list[_Product]  # that may have made the scores
    site: tuple[int, ...]  # where in its module it was called
    heads: int
    version: int  # of the scores
    stamp: tuple[int, Tensor, Tensor]  # of the weights
    random: Tensor
    blended: bool = False  # weights of its shape were edited while it waited: it may be a part of them
    deferred: tuple[_Use, _Product] | None = None  # a use that may be a product of another q and k: the next call tells

    @property
    def scores_intact(self) -> bool:
        """Whether the scores were not written to since. A tensor that was detached counts anew, so ask of this one."""
        return version_of(self.scores) == self.version

    @property
    def batch(self) -> int:
        """How many batch rows there are."""
        return self.scores.numel() // max(1, self.heads * prod(self.scores.shape[-2:]))

    def takes(self, operand: Tensor, flat: bool) -> _Product | None:
        """The product that made the scores of these weights, if the operand can be the weights; else None."""
        count, rows, columns = _matrices(operand)
        candidates = [p for p in self.products if p.matrices[2] == columns]
        if _fits(self.scores, (count, rows, columns), flat):
            match = next((p for p in candidates if (count > 1) == (p.matrices[0] > 1)), None)
            if match is not None:
                return match
        # Heads may have been mixed to another number of heads.
        mixed = not flat and self.scores.ndim > 2 and rows == self.scores.shape[-2] and count % max(1, self.batch) == 0
        return next((p for p in candidates if not p.flat), None) if mixed and not is_parameter(operand) else None


@dataclass(frozen=True, eq=False)
class _Use:
    """A product with the values, and which weights it applied."""

    candidate: _Candidate
    product: _Product
    weights: Tensor | None  # to be reported, (…, Nq, Nk), without a sink's column; None if gone, and the scores tell
    sink: bool
    edited: bool  # the weights are not those of the softmax
    certain: bool  # they lie in its memory, so that they come from it
    output: Tensor | None  # (count, Nq, Dv) where its rows are in the order of the weights
    unlike: float = 0.0  # how little edited weights are like those of the softmax, from 0 to 1


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
            frame = calling_frame()
            callers = find_callers(frame, x, through=nn.Softmax)  # the attention is whose part it is
            if frame is not None and callers and not callers[0].inside_op:
                known = self.name == "_softmax" and dim in (-1, x.ndim - 1)
                attempt(callers, lambda: _on_softmax(callers, x, out if known else None, frame))
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
            frame = calling_frame()
            callers = find_callers(frame, out)
            if frame is not None and callers and not callers[0].inside_op:
                attempt(callers, lambda: _on_product(callers, left, right, out, frame))
        return out


def drop_pending(watch: WatchedModel) -> None:
    """Drop what a watch that ends still waits for, in any thread; it counts as unconfirmed."""
    dropped = []
    with _LOCK:
        for thread, pending in tuple(_pending.items()):
            for candidate in tuple(pending):
                mine = [c for c in candidate.callers if c.watch is watch]
                if mine:
                    dropped.append(replace(candidate, callers=mine))
                    candidate.callers = [c for c in candidate.callers if c.watch is not watch]
                if not candidate.callers:
                    pending.remove(candidate)
            if not pending:
                del _pending[thread]
    for candidate in dropped:
        _drop(candidate)


def forget_other_threads() -> None:
    """In a forked process, which has but this one thread."""
    global _LOCK
    _LOCK = threading.RLock()
    for thread in _pending.keys() - {threading.get_ident()}:
        del _pending[thread]


# ------------------------------------------------------------------------------------------------ remember and confirm


def _on_softmax(callers: list[Caller], scores: Tensor, weights: Tensor | None, frame: FrameType) -> None:
    """Wait for the product that uses these weights, if a product made the scores.

    weights: None for a softmax of another form, which is only listed as unconfirmed.
    """
    products = _products_before(callers, scores)
    if weights is None:
        if products:
            _list_unconfirmed(callers, scores, products)
        return
    if products:
        _HERE.products.clear()
    elif scores.ndim == 2:  # a classifier's, or a sampler's
        _list_unconfirmed(callers, scores, [])
        return
    site = _site(callers[0], frame)
    dropped = []
    with _LOCK:
        pending = _pending.setdefault(threading.get_ident(), [])
        for earlier in tuple(pending):
            if earlier.deferred is not None and earlier.deferred[1] in products:
                earlier.deferred, earlier.blended = None, False  # it made these scores: what it used was another q
            called_again = earlier.callers[0].module is callers[0].module and earlier.site >= site
            if earlier.deferred is not None or called_again or not _site(earlier.callers[0], frame):
                pending.remove(earlier)
                dropped.append(earlier)
    for earlier in dropped:
        _drop(earlier)
    if not products:
        _list_unconfirmed(callers, scores, [])
        return
    with measuring():
        mark, random = stamp(weights), random_state(weights.device)
    heads = _heads(callers[0], list(scores.shape[:-2]), scores.shape[-2])
    candidate = _Candidate(callers, scores, weights, products, site, heads, version_of(scores), mark, random)
    with _LOCK:
        _pending.setdefault(threading.get_ident(), []).append(candidate)


def _site(caller: Caller, frame: FrameType | None) -> tuple[int, ...]:
    """Where in a module a frame is: the instructions that it and the frames around it have come to, outermost first.

    In one call of a module without loops, what comes later is greater. Empty if the module does not run.
    """
    steps, inside = list[int](), 0
    while frame is not None:
        steps.append(frame.f_lasti)
        if runs_in(caller, frame):
            inside = len(steps)
        frame = frame.f_back
    return tuple(reversed(steps[:inside]))


def _drop(candidate: _Candidate) -> None:
    """Wait no longer: report the use that was deferred, if there is one, else list the softmax as unconfirmed."""
    if candidate.deferred is not None:
        deliver(candidate.callers, partial(_observed, candidate.deferred[0]))
    elif not candidate.blended:
        _list_unconfirmed(candidate.callers, candidate.scores, candidate.products)


def _products_before(callers: list[Caller], scores: Tensor) -> list[_Product]:
    """The latest products that may have made some scores, as they are or transposed."""
    products = []
    for whose, earlier in _HERE.products:
        count, rows, columns = earlier.matrices
        for product in (earlier, _Product((count, columns, rows), earlier.inner, None, earlier.flat)):
            if _related(whose, callers) and _fits(scores, product.matrices, product.flat):
                products.append(product)
    return products


def _fits(scores: Tensor, matrices: Matrices, flat: bool) -> bool:
    """Can these matrices hold the scores' rows, with or without a sink's column, several heads stacked perhaps?"""
    nq, nk = scores.shape[-2:]
    count, rows, columns = matrices
    if flat and scores.ndim > 2:
        return False
    return columns in (nk, nk - 1) and count * rows == scores.numel() // nk and rows % nq == 0


def _on_product(callers: list[Caller], left: Tensor, right: Tensor, out: Tensor, frame: FrameType) -> None:
    """Report the product if it multiplies weights with their values; else remember that it may make scores."""
    flat = out.ndim == 2
    left, right, out = (x.detach().unsqueeze(0) if flat else x.detach() for x in (left, right, out))
    waiting = [c for c in _pending.get(threading.get_ident(), ()) if _related(c.callers, callers)]
    # 1. How the operands use the weights that they fit, up to the first that are unchanged. The second operand may be
    # weights too, transposed, as einsum does it.
    uses = list[_Use]()
    with measuring():
        for candidate, (which, operand) in pairs(waiting, enumerate((left, right.mT))):
            product = candidate.takes(operand, flat)
            if product is None:
                continue
            compared = _compare(candidate, product, operand, out, which, frame)
            if not compared.edited:
                uses = [compared]
                break
            if compared.certain or not (is_parameter(left) or is_parameter(right)):  # with those, heads are mixed
                uses.append(compared)
    # 2. The use to report. Among edited ones: in the softmax's own memory, or much more like its weights.
    use = uses[0] if uses else None
    for other in uses[1:]:
        if use is not None and (not use.certain and (other.certain or other.unlike < use.unlike / 4)):
            use = other
    for candidate in waiting:
        if candidate.deferred is not None and (use is None or use.edited or use.candidate is not candidate):
            use = None if use is not None and use.candidate is candidate else use
            if _take(candidate):
                _drop(candidate)
    if use is not None and use.edited:
        for other in uses:
            other.candidate.blended = True
    if use is not None and (use.certain or use.product.inner != left.shape[2]):
        if _take(use.candidate):
            deliver(list(use.candidate.callers), partial(_observed, use))
        return
    # 3. Not a use for certain: a product that may make scores.
    made = _Product(_matrices(out), left.shape[2], matrix_marks(right), flat)
    if use is not None:  # what looks like edited weights may be another q, as wide as there are keys
        use.candidate.deferred = use, made
    for whose, earlier in _HERE.products:
        if earlier.matrices == _matrices(left) and _related(whose, callers):
            for caller in callers:
                caller.watch.chained[caller.path, earlier.matrices] = None
    _HERE.products.append((callers, made))


def _take(candidate: _Candidate) -> bool:
    """Wait no longer for a candidate of this thread; False where its watch has just ended."""
    with _LOCK:
        pending = _pending.get(threading.get_ident(), [])
        if candidate not in pending:
            return False
        pending.remove(candidate)
        return True


def _compare(
    candidate: _Candidate, product: _Product, operand: Tensor, out: Tensor, which: int, frame: FrameType
) -> _Use:
    """Are the first or second operand's numbers the weights of a candidate, dropped out perhaps, or others?"""
    columns = operand.shape[2]
    weights = candidate.weights.detach()[..., :columns]
    sink = columns < candidate.weights.shape[-1]
    (version, *sums), (version_before, *sums_before) = stamp(candidate.weights), candidate.stamp
    intact = version == version_before and all(map(same_numbers, sums, sums_before))
    use = partial(_Use, candidate, product, sink=sink)

    # 1. In the memory of the softmax output: unchanged, or edited in place.
    views = list(in_axes_of(weights, operand))
    usual = views[0] if views else operand.view(candidate.batch, -1, *operand.shape[1:])
    same = next((x for x in views if same_memory(x, weights)), None)
    if same is not None and intact:
        in_order = which == 0 and not sink and same is usual
        return use(weights, edited=False, certain=True, output=out if in_order else None)

    # 2. In memory of its own: a copy, or dropped out.
    whole = einsum_operand(frame, which)
    if whole is not None and whole.shape == weights.shape:
        views = [whole]
    original = weights if intact else None
    if not intact and candidate.scores_intact:
        original = candidate.scores.detach().softmax(-1, dtype=weights.dtype)[..., :columns]
    if original is not None:
        copy = next((x for x in views if same_numbers(x, original)), None)
        if copy is not None:
            empty_rows_set_to_0 = bool(original.sum().isnan()) and not bool(copy.sum().isnan())
            shown = weights if intact and not empty_rows_set_to_0 else copy
            return use(shown, edited=False, certain=True, output=None)
        drawn = not torch.equal(random_state(weights.device), candidate.random)
        if drawn and any(is_dropout(x, original) for x in views):
            return use(weights if intact else None, edited=False, certain=True, output=None)

    # 3. Edited. Axes are in the usual order, unless in another the weights are much more like those of the softmax.
    applied, unlike = views[0] if views else usual, 1.0
    if same is not None:
        applied = same
    elif original is not None and views:
        orders = [unlikeness(x, original) for x in views]
        best = orders.index(min(orders))
        best = best if orders[best] < orders[0] / 4 else 0
        applied, unlike = views[best], orders[best]
    in_order = which == 0 and same_memory(applied, usual)
    return use(applied, edited=True, certain=same is not None, output=out if in_order else None, unlike=unlike)


def _related(some: list[Caller], others: list[Caller]) -> bool:
    """Is one of two modules inside the other, or the same?"""
    for one, two in pairs(some, others):
        outer, inner = sorted((one.path, two.path), key=len)
        if one.watch is two.watch and (not outer or f"{inner}.".startswith(f"{outer}.")):
            return True
    return False


def _matrices(x: Tensor) -> Matrices:
    return x.shape[0], x.shape[1], x.shape[2]


def _list_unconfirmed(callers: list[Caller], scores: Tensor, products: list[_Product]) -> None:
    by_product = any(not product.flat for product in products)  # a product of plain matrices may be a linear layer's
    for caller in callers:
        seen, at = caller.watch.unconfirmed, (caller.path, tuple(scores.shape))
        seen[at] = by_product or seen.get(at, False)


# ------------------------------------------------------------------------------------------------------ reported calls


def _observed(use: _Use) -> ObservedCall:
    candidate, applied = use.candidate, use.weights
    heads, batch = candidate.heads, candidate.batch
    if applied is not None and use.edited:
        heads = prod(applied.shape[:-2]) // max(1, batch)
    scores = candidate.scores.detach()
    known = candidate.scores_intact and heads == candidate.heads
    scores_seen = None
    if known:
        with suppress(RuntimeError):  # where only a copy would have these axes
            scores_seen = scores.view(-1, heads, *scores.shape[-2:])
    weights = None if applied is None else applied.reshape(-1, heads, *applied.shape[-2:])
    trouble = None
    if scores_seen is None and weights is None:
        trouble = "neither scores nor weights were left to read when they met the values"
    if use.sink and weights is None and scores_seen is not None:  # without its column; as the weights are gone
        weights = scores_seen.float().softmax(-1)[..., :-1]
    output = None if use.output is None else use.output.view(-1, heads, scores.shape[-2], use.output.shape[-1])
    marks = use.product.marks
    if marks is not None:  # (matrices, Nk) → (B, Nk)
        marks = marks.view(batch, -1, marks.shape[1]).sum(1) if batch and marks.shape[0] % batch == 0 else None
    return ObservedCall(
        source="softmax",
        kernel="softmax",
        scores=scores_seen,
        weights=weights,
        output=output,
        marks=marks,
        edited=use.edited,
        trouble=trouble,
    )


def _heads(caller: Caller, lead: list[int], nq: int) -> int:
    """How many of the leading axes' entries are heads: (B, H), or (B·H,), or more axes; 1 without any."""
    if not lead or len(lead) == 2:
        return lead[1] if lead else 1
    named = next(_numbers_of_heads(caller.module), 0)
    if len(lead) > 2:
        return named if named in [prod(lead[i:]) for i in range(1, len(lead))] else lead[-1]
    # B·H: by the module's own number, else by the batch of its input, else all of them
    count = lead[0]
    if named and count % named == 0:
        return named
    first, second, *_ = *caller.input_shape, 0, 0
    transposed = first == nq != second and second and count % second == 0  # (N, B, …), as in nn.MultiheadAttention
    batch = second if transposed else first
    if batch == count:  # a part of an attention module, which gets (B·H, N, D) from it
        above = caller.path.rpartition(".")[0]
        around = (m for m, path in caller.watch.modules.values() if path == above and m is not caller.module)
        attention = next((m for m in around if ATTENTION.search(type(m).__name__)), None)
        return next((n for n in _numbers_of_heads(attention) if count % n == 0), 1)
    return count // batch if batch and count % batch == 0 else count


def _numbers_of_heads(module: nn.Module | None) -> Iterator[int]:
    for name in HEADS:
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            yield int(value)


# ---------------------------------------------------------------------------- are applied weights those of the softmax?


def stamp(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Tells whether a tensor was written to since: its version counter, and the sums of its rows and columns.

    Inference tensors have no version counter, and writes through `.data` do not count, hence the sums.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return version_of(x), x.sum(-1, dtype=wide), x.sum(-2, dtype=wide)


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
    operand: Tensor = operands[which]
    return operand.detach().movedim(at - len(term) if "." in term[:at] else at, -1)
