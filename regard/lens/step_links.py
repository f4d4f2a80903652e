"""Generation steps of one module: which call continues which."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.lens.measures.measures import Sizes

Batches = tuple[int, int]
"""Batch rows of the call before, and of this one: beam search reads a prompt once and goes on with several beams."""

Rows = tuple[int, ...] | None
"""Which batch row of a call each batch row of the run is, −1 where it has none; None where all are in place."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class StepLink:
    """How a call continues an earlier call of its module."""

    after: int | None = None  # which call of the module that is; None for a call that begins a run
    first: int = 0  # the place of its first key in the run: more than before if a cache has dropped the oldest
    known: int = 0  # how many of its first keys were there before its own
    # For each batch row, the batch row of the earlier call that it continues; None if all are in place. It is known for
    # certain when the model's next pass begins.
    rows: tuple[int, ...] | None = None
    # For each sequence that a beam search returned, its batch row in this call, −1 if it had ended before.
    returned: tuple[int, ...] | None = None


def runs_of(links: Sequence[StepLink]) -> list[list[int]]:
    """The calls of a module, by their links in call order, as runs.

    >>> runs_of([StepLink(), StepLink(after=0), StepLink(), StepLink(after=1)])
    [[0, 1, 3], [2]]
    """
    runs: list[list[int]] = []
    of: dict[int, list[int]] = {}
    for n, link in enumerate(links):
        if link.after is None:
            runs.append([])
        of[n] = runs[-1] if link.after is None else of[link.after]
        of[n].append(n)
    return runs


def rows_of(links: Sequence[StepLink]) -> list[Rows]:
    """For each call of a run, which of its batch rows the batch rows of the assembled view are."""
    if links[0].returned is not None:
        return [link.returned for link in links]
    rows: list[Rows] = []
    now: Rows = None  # for the call at hand, which of its batch rows became each batch row of the last call
    for link in reversed(links):
        rows.append(now)
        if link.rows is not None:
            now = link.rows if now is None else tuple(link.rows[b] for b in now)
    return rows[::-1]


def follow(links: Sequence[StepLink], rows: Sequence[Sequence[int]]) -> None:
    """Set in which batch row of each call of a run the returned sequences were; rows (sequences, calls)."""
    for n, link in enumerate(links):
        link.returned = tuple(row[n] if n < len(row) else -1 for row in rows)


def read_beams(beams: object) -> list[list[int]]:
    """The batch rows of returned sequences, (sequences, passes), from what transformers returns."""
    rows: Any = getattr(beams, "beam_indices", beams)
    rows = rows.tolist() if isinstance(rows, Tensor) else rows
    sound = isinstance(rows, Sequence) and len(rows) > 0 and all(isinstance(row, Sequence) and row for row in rows)
    if not sound or not all(type(at) is int and at >= -1 for row in rows for at in row):
        got = f"{type(beams).__name__} without them" if rows is None else repr(rows)[:60]
        raise TypeError(
            "returned takes beam_indices, a batch row for each sequence and pass, or the output of "
            f"generate(…, num_beams=…, return_dict_in_generate=True), which has them; got {got}"
        )
    return [list(row) for row in rows]


def by_sizes(sizes: Sequence[Sizes], kind: str) -> list[StepLink]:
    """What calls of these sizes (B, H, Nq, Nk) may be to each other, where nothing else is known of them."""
    runs = RunTracker()
    return [runs.link("", n, s, kind) for n, s in enumerate(sizes)]


def key_marks(k: Tensor, num_heads: int) -> Tensor:
    """Keys (B, Hkv, Nk, D) → (B, Nk), for each position one number: the sum of its bits over query heads and D.

    Sums of integers do not depend on their order, so equal keys have equal numbers however they lie in memory, and
    whether or not query heads share them: Hugging Face repeats keys in some calls of a run and not in others.
    """
    bits = k.detach().view(BITS[k.element_size()])
    return bits.sum((1, 3), dtype=torch.int64) * (num_heads // k.shape[1])


def matrix_marks(right: Tensor) -> Tensor | None:
    """The same of keys that stand in columns, (matrices, D, Nk) → (matrices, Nk); None for what are no such numbers."""
    if not right.dtype.is_floating_point or right.element_size() not in BITS:
        return None
    return right.detach().view(BITS[right.element_size()]).sum(1, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class _LatestCall:
    """The latest call of a module."""

    n: int
    sizes: Sizes
    kind: str
    marks: Tensor | None  # (B, Nk)
    first: int  # where its keys begin in the run
    total: int  # how many positions the run has by now


class _Pass:
    """One way of a batch through the layers of a model; what is said by batch sizes, for parts of it may differ."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.steps: dict[int, bool] = {}  # did the latest self-attention carry something on?
        self.links: dict[Batches, list[StepLink]] = {}  # of what carries something on
        self.alike: dict[Batches, list[tuple[Tensor, Tensor]]] = {}  # marks of before and of now, of the same keys
        self.moved: set[Batches] = set()  # where some are not in the same place

    def close(self) -> None:
        """Say where the batch rows were, from all that was seen of them."""
        for batches in self.moved:
            same = torch.stack([_same_rows(old, new).cpu() for old, new in self.alike[batches]]).all(0)
            for link in self.links[batches]:
                # One of those that each batch row can have been, itself first; None if all are in place.
                count = same.shape[1]
                rows = tuple(
                    b if b < count and bool(same[b, b]) else int(r.long().argmax()) for b, r in enumerate(same)
                )
                link.rows = None if rows == tuple(range(count)) else rows
                if not bool(same.any(1).all()):  # layers contradict each other: it is nothing's continuation
                    link.after, link.rows = None, None
        self.alike.clear()


class RunTracker:
    """Finds out, call by call and for each thread by itself, which earlier call each call of a model continues."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], _LatestCall] = {}
        self._passes: dict[int, _Pass] = {}  # by thread
        self._run: dict[tuple[int, str], list[StepLink]] = {}  # of the latest run of a module

    def link(
        self,
        path: str,
        n: int,
        sizes: Sizes,
        kind: str,
        marks: Tensor | None = None,
        offset: Callable[[], object] | None = None,
    ) -> StepLink:
        """Which earlier call the call n of a module continues, by its sizes and by `key_marks` of its keys.

        `offset` says where query 0 of the call stands; called only where a run begins with more keys than queries, or
        where a cache of fixed size comes into sight.
        """
        thread = threading.get_ident()
        now = self._passes.get(thread)
        if now is None or path in now.paths:  # a new pass begins where a module comes again
            if now is not None:
                now.close()
            now = self._passes[thread] = _Pass()
        now.paths.add(path)
        before = self._last.get((thread, path))
        batch, _, nq, nk = sizes
        fits = before is not None and before.sizes[1] == sizes[1] and before.kind == kind
        link = _continued(now, before, sizes, marks, offset) if before is not None and fits else StepLink()
        if before is None or link.after is None:
            start = offset() if offset is not None and nk > nq and kind != "cross" else None
            start = start if isinstance(start, int) else nk - nq  # of the first query
            link = StepLink(known=nk if kind == "cross" else start)
            self._run[thread, path] = []
        else:
            now.links.setdefault((before.sizes[0], batch), []).append(link)
        self._run[thread, path].append(link)
        if kind == "self":
            now.steps[batch] = link.after is not None
        total = before.total if before is not None and link.after is not None else link.known
        self._last[thread, path] = _LatestCall(n, sizes, kind, marks, link.first, total + nq)
        return link

    def returned(self, rows: Sequence[Sequence[int]], passes: int) -> None:
        """A beam search of so many passes has ended in this thread: say of its calls where the sequences were."""
        for (thread, _), links in self._run.items():
            if thread == threading.get_ident() and len(links) == passes > 1:
                follow(links, rows)

    def close(self) -> None:
        """No more calls: what is not known for certain by now will not be."""
        for one in self._passes.values():
            one.close()
        self._passes.clear()
        self._last.clear()
        self._run.clear()


def _continued(
    now: _Pass, before: _LatestCall, sizes: Sizes, marks: Tensor | None, offset: Callable[[], object] | None
) -> StepLink:
    """How a call of these sizes continues the one before it; an empty link if it does not."""
    batch, _, nq, nk = sizes
    # 1. Where its keys begin in the run, and how many of them were there before.
    if before.kind == "cross":  # a step has one query; the self-attention before it tells whether it is a step
        first, known = 0, nk
        if not (nq == 1 and nk > 1 and nk == before.sizes[3] and now.steps.get(batch, True)):
            return StepLink()
    else:  # a step sees all that was there, in a cache with room or without, or the latest of it, and itself
        first = before.total + nq - nk  # if the newest key is the last
        if first < before.first and nk >= before.sizes[3]:
            # A cache of fixed size, with room for more. Hugging Face hands SDPA the prompt's keys alone, then all.
            known = before.total - before.first
            if nk == before.sizes[3] or (marks is not None and offset is not None and offset() == known):
                first = before.first
        known = before.total - first
        if nq >= nk or first < before.first or known <= 0:
            return StepLink()
    # 2. Whether those keys are the same, in the same batch rows or in others.
    batches = before.sizes[0], batch
    if before.marks is None or marks is None or batches[0] > batches[1]:
        return StepLink(before.n, first, known) if batches[0] == batches[1] else StepLink()
    begin = first - before.first
    old, new = before.marks[:, begin : begin + known], marks[:, :known].to(before.marks.device)
    if not torch.equal(old, new):
        if not bool(_same_rows(old, new).any(1).all()):
            return StepLink()
        now.moved.add(batches)
    now.alike.setdefault(batches, []).append((old, new))
    return StepLink(before.n, first, known)


def _same_rows(old: Tensor, new: Tensor) -> Tensor:
    """(B, N) before and now → (B now, B before): can the batch row of now have been the batch row of before?"""
    if old.shape[1] != new.shape[1]:
        return torch.zeros(len(new), len(old), dtype=torch.bool)
    return torch.stack([(old == row).all(-1) for row in new])
