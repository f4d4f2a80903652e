"""Generation: which call of a module continues which, and one view of all steps, whose copies share keys and values."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.call import Call
from regard.lens.measures.measures import Sizes
from regard.lens.measures.weights import ComputedWeights, Part, Weights
from regard.lens.overlays import TokenPlacement
from regard.lens.patterns import KeyTokens, KnownVisibility
from regard.lens.values import StoredValues
from regard.lens.view import PER_QUERY, View
from regard.masks import DenseMask
from regard.masks.biases import DenseBias

Batches = tuple[int, int]
"""Batch rows of the call before, and of this one: beam search reads a prompt once and goes on with several beams."""

Rows = tuple[int, ...] | None
"""Which batch row of a call each batch row of the run is, −1 where it has none; None where all are in place."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
MASKS = 4  # how many are remembered, so that layers that share one share its copy
MISSING = {"lse": -inf, "max_logit": -inf, "top_key": -1}
"""What stands in rows that a call does not have, as in rows that see nothing; else 0."""


# ------------------------------------------------------------------------------------------- which call continues which


@dataclass
class StepLink:
    """How a call continues an earlier call of its module."""

    after: int | None = None  # which call of the module that is; None for a call that begins a run
    first: int = 0  # the place of its first key in the run: more than before if a cache has dropped the oldest
    known: int = 0  # how many of its first keys were there before its own
    # For each batch row, the batch row of the earlier call that it continues; None if all are in place. It is known for
    # certain when the model's next pass begins.
    rows: tuple[int, ...] | None = None
    # For each sequence that a generation returned, its batch row in this call, −1 if it had ended before.
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
    """The links between calls, derived from their sizes (B, H, Nq, Nk) alone."""
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
    """The same of keys that stand in columns, (matrices, D, Nk) → (matrices, Nk); None for other dtypes."""
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
    """One forward pass of a model; kept by batch sizes, which may differ between its parts."""

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
        where a cache of fixed size first appears.
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
        """A generation of so many passes has ended in this thread: say of its calls where the sequences were."""
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


# ------------------------------------------------------------------------------------------------ one view of all steps


class AssembledWeights:
    """The weights of several calls, one below the other; keys that a call did not have weigh 0 in it."""

    def __init__(
        self, parts: Sequence[Weights], first: Sequence[int] | None = None, rows: Sequence[Rows] | None = None
    ) -> None:
        self.parts = tuple(parts)
        self.first = tuple(first or [0] * len(parts))
        self.rows = tuple(rows or [None] * len(parts))
        batch = parts[-1].sizes[0] if self.rows[-1] is None else len(self.rows[-1])
        self.counts = [p.sizes[2] for p in parts]
        nk = max(start + p.sizes[3] for start, p in zip(self.first, parts, strict=True))
        self.sizes: Sizes = (batch, parts[0].sizes[1], sum(self.counts), nk)

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (B, H, rows, cols)."""
        wanted, keys = torch.arange(self.sizes[2])[rows], torch.arange(self.sizes[3])[cols]
        tiles: list[Tensor] = []
        places: list[Tensor] = []
        begin = 0
        for n, count in enumerate(self.counts):
            mine = ((wanted >= begin) & (wanted < begin + count)).nonzero().view(-1)
            if len(mine):
                local = keys - self.first[n]
                there = (local >= 0) & (local < self.parts[n].sizes[3])
                tile = _batch(self.parts[n].tile(wanted[mine] - begin, local[there]), self.rows[n])
                whole = tile.new_zeros(*tile.shape[:3], len(keys))
                whole[..., there] = tile
                tiles.append(whole.to(tiles[0].device if tiles else whole.device))
                places.append(mine)
            begin += count
        if not tiles:
            one = self.parts[0].tile(slice(0, 1), slice(0, 1))
            return one.new_zeros(*self.sizes[:2], len(wanted), len(keys))
        return torch.cat(tiles, 2)[:, :, torch.cat(places).argsort()]

    def pairs(self, keys: Tensor) -> Tensor:
        """The weight of one key per query, (B, H, Nq)."""
        weights = []
        for n, wanted in enumerate(torch.split(keys.expand(*self.sizes[:3]), self.counts, -1)):
            local = wanted - self.first[n]
            local = torch.where((wanted >= 0) & (local >= 0) & (local < self.parts[n].sizes[3]), local, -1)
            weights.append(self._pairs(n, local))
        return torch.cat([f.to(weights[0].device) for f in weights], -1)

    def _pairs(self, n: int, keys: Tensor) -> Tensor:
        """The same of one call; where the batch rows have moved, each asks in the place where it was."""
        rows = self.rows[n]
        if rows is None:
            return self.parts[n].pairs(keys)
        weights = torch.zeros(keys.shape, dtype=torch.float64)
        for b, was in enumerate(rows):
            if was < 0:
                continue
            wanted = keys.new_full((self.parts[n].sizes[0], *keys.shape[1:]), -1)
            wanted[was] = keys[b]
            mine = self.parts[n].pairs(wanted)[was]
            weights = weights.to(mine)
            weights[b] = mine
        return weights


def values_of_run(parts: Sequence[StoredValues], first: Sequence[int], rows: Sequence[Rows], nk: int) -> Tensor:
    """The values of several calls as those of the run, (B, Hkv, Nk, Dv): each position from the latest that has it.

    0 where a sequence had ended.
    """
    last, moved = parts[-1].tensor, rows[-1]
    if last.shape[2] == nk and moved is None:
        return last
    batch = last.shape[0] if moved is None else len(moved)
    heads = max(part.tensor.shape[1] for part in parts)  # some calls of a run may repeat shared heads
    values = last.new_zeros(batch, heads, nk, last.shape[3])
    missing = torch.ones(batch, nk, dtype=torch.bool, device=last.device)
    for part, begin, of in zip(reversed(parts), reversed(first), reversed(rows), strict=True):
        if not bool(missing.any()):
            break
        v = part.tensor
        here = slice(begin, begin + v.shape[2])
        there = torch.tensor([of is None or of[b] >= 0 for b in range(batch)], device=last.device)
        wanted = missing[:, here] & there.unsqueeze(1)  # (B, keys of this call)
        own = _batch(v, of).to(last.device).expand(batch, -1, -1, -1).repeat_interleave(heads // v.shape[1], 1)
        values[:, :, here] = torch.where(wanted[:, None, :, None], own, values[:, :, here])
        missing[:, here] &= ~wanted
    return values


def assemble(views: Sequence[View], links: Sequence[StepLink]) -> View:
    """One view of all rows of a run, from its calls in order.

    Measures of single rows follow one another and received mass is added up. The map and pattern scores of the whole
    need exact weights: they are there if q and k were kept for every call. Where batch rows changed places, as beam
    search lets them, each row of the result is one of the sequences that were returned, where that is known, and else
    the history of a batch row of the last call. A sequence that ended early sees nothing afterwards.
    """
    if links[0].returned is not None:
        used = [n for n, link in enumerate(links) if max(link.returned or (-1,)) >= 0]
        views, links = [views[n] for n in used], [links[n] for n in used]
    rows = rows_of(links)
    if len(views) == 1 and rows[0] is None:
        return views[0]
    first = [link.first - links[0].first for link in links]
    last, heads = views[-1], views[0].sizes[1]
    batch = last.sizes[0] if rows[-1] is None else len(rows[-1])
    nq, nk = sum(v.sizes[2] for v in views), max(f + v.sizes[3] for f, v in zip(first, views, strict=True))
    kept = [v.weights for v in views if v.weights is not None]
    outputs = [v.given_output for v in views if v.given_output is not None]
    values = [v.kept_values for v in views if v.kept_values is not None]
    gradients = [v.output_gradient for v in views if v.output_gradient is not None]
    labelled = (
        first[-1] == 0
        and last.sizes[3] == nk
        and (rows[-1] is None or (last.tokens.ids is not None and len(last.tokens.ids) == 1))
    )
    read = partial(values_of_run, values, first, rows, nk)
    return replace(
        views[0],
        sizes=(batch, heads, nq, nk),
        held=_held(views, first, rows, nk),
        given_output=_together(outputs, rows) if len(outputs) == len(views) and outputs[0].ndim == 4 else None,
        weights=AssembledWeights(kept, first, rows) if len(kept) == len(views) else None,
        place=_place(views, first, rows, nq, nk),
        tokens=last.tokens if labelled else KeyTokens(),
        placed=TokenPlacement(),
        edited=any(v.edited for v in views),
        overview=any(v.overview for v in views),
        kept_values=StoredValues(read) if len(values) == len(views) else None,
        projection=last.projection,
        output_gradient=_together(gradients, rows) if len(gradients) == len(views) else None,
    )


def _batch(x: Tensor, rows: Rows, missing: float = 0) -> Tensor:
    """The batch rows of a call that are those of the run."""
    if rows is None:
        return x
    if x.shape[0] == 1 and min(rows) >= 0:
        return x.expand(len(rows), *x.shape[1:])
    at = torch.tensor(rows, device=x.device)
    found = x[at.clamp(min=0) if x.shape[0] > 1 else torch.zeros_like(at)]
    found[at < 0] = missing
    return found


def _together(parts: Sequence[Tensor], rows: Sequence[Rows], missing: float = 0) -> Tensor:
    """(B, …, Nq, …) of each call → of the run, queries on axis 2."""
    return torch.cat([_batch(p, r, missing).to(parts[0].device) for p, r in zip(parts, rows, strict=True)], 2)


def _held(views: Sequence[View], first: Sequence[int], rows: Sequence[Rows], nk: int) -> dict[str, Tensor]:
    held = {}
    if any(isinstance(v.weights, ComputedWeights) and v.weights.call.sinks is not None for v in views):
        for view in views:
            _ = view.effective  # from the tiles of the whole it could not be told: a sink's share is not in them
    for name in (*PER_QUERY, "top_key", "top_weight", "top_tied"):
        if all(name in v.held for v in views):
            parts = [v.held[name] for v in views]
            if name == "top_key":
                parts = [torch.where(p < 0, p, p + f) for p, f in zip(parts, first, strict=True)]
            held[name] = _together(parts, rows, MISSING.get(name, 0))
    if all("received" in v.held for v in views):
        device = views[0].held["received"].device
        held["received"] = torch.stack(
            [
                pad(_batch(v.held["received"], r).to(device), (f, nk - f - v.sizes[3]))
                for v, f, r in zip(views, first, rows, strict=True)
            ]
        ).sum(0)
    return held


def _place(views: Sequence[View], first: Sequence[int], rows: Sequence[Rows], nq: int, nk: int) -> KnownVisibility:
    """The queries stand one after the other from where the first call's stood; padding is what no call sees."""
    visible = None
    parts = [_batch(v.place.visible, r) for v, r in zip(views, rows, strict=True) if v.place.visible is not None]
    if len(parts) == len(views):
        shape = tuple(max(p.shape[axis] for p in parts) for axis in (0, 1))  # B or 1, H or 1
        visible = _together([p.expand(*shape, p.shape[2]) for p in parts], [None] * len(parts))
    padding: Tensor | None = None  # (B or 1, Nk)
    for view, begin, moved in zip(views, first, rows, strict=True):
        own = view.place.padding
        own = torch.zeros(1, view.sizes[3], dtype=torch.bool) if own is None else own
        here = pad(_batch(own, moved, True).cpu(), (begin, nk - begin - view.sizes[3]), value=True)
        padding = here if padding is None else padding & here
    padding = padding if padding is not None and bool(padding.any()) else None
    start = views[0].place.offset
    if start is None:
        start = views[0].sizes[3] - views[0].sizes[2]
    usual = views[0].kind == "cross" or (isinstance(start, int) and start == nk - nq)
    return KnownVisibility(visible, padding, None if usual else start)


# ------------------------------------------------------------------------------------------ kept calls (keep="qk", "v")


@dataclass(eq=False)
class _Growing:
    """The keys or values of a run so far, (B, Hkv, Nk, D)."""

    tensor: Tensor

    def beginning(self, count: int) -> Tensor:
        """Those of the step that had this many."""
        return self.tensor[:, :, :count]


class StepWeights(ComputedWeights):
    """The weights of one step, from keys that it shares with the steps after it."""

    def __init__(self, call: Call, lse: Tensor, keys: _Growing) -> None:
        self._keys = keys
        super().__init__(call, lse)

    @property
    def call(self) -> Call:
        """The call with its own keys: the first of those that are kept."""
        k = self._keys.beginning(self._call.sizes[3])
        return replace(self._call, k=k, v=k.new_zeros(1).expand(*k.shape[:3], 1))

    @call.setter
    def call(self, call: Call) -> None:
        self._call = replace(call, k=call.k.new_empty(*call.k.shape[:2], 0, call.k.shape[3]))  # lets the keys go


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values (B, H, N, D) of so many heads, if each of these stands in x several times in a row; else x."""
    if x.shape[1] == heads or x.shape[1] % heads:
        return x
    grouped = x.reshape(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:])
    first = grouped[:, :, 0]
    return first.contiguous() if torch.equal(grouped, first.unsqueeze(2).expand_as(grouped)) else x


class CallStore:
    """Copies of the calls' q, k and v on a device, added in call order; steps of one run share keys and values."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._runs: dict[tuple[int, str, str], _Growing] = {}
        self._masks: deque[tuple[int, Tensor]] = deque(maxlen=MASKS)  # address, and the copy

    def keep(self, path: str, call: Call, lse: Tensor, link: StepLink, rest_hidden: bool) -> ComputedWeights:
        """Copy a call of a module, and return its weights.

        rest_hidden: no query sees a key beyond those written so far, so that these may be written later on.
        """
        k = copied(call.k, self.device)
        kept = replace(
            call,
            q=copied(call.q, self.device),
            k=k,
            v=k,  # exact weights do not read the values
            mask=DenseMask(self._cells(call.mask.cells)) if isinstance(call.mask, DenseMask) else call.mask,
            bias=DenseBias(self._cells(call.bias.cells)) if isinstance(call.bias, DenseBias) else call.bias,
            sinks=None if call.sinks is None else copied(call.sinks, self.device),
        )
        keys = self._shared(path, "k", k, link, rest_hidden)
        return StepWeights(kept, lse.to(self.device), keys)

    def keep_values(self, path: str, v: Tensor, link: StepLink, rest_hidden: bool) -> StoredValues:
        """Copy the values (B, Hkv, Nk, Dv) of a call of a module; the other arguments as for `keep`."""
        shared = self._shared(path, "v", copied(v, self.device), link, rest_hidden)
        return StoredValues(partial(shared.beginning, v.shape[2]))

    def _shared(self, path: str, name: str, x: Tensor, link: StepLink, rest_hidden: bool) -> _Growing:
        """The tensor that this step shares with those before it, which now is x."""
        run = (threading.get_ident(), path, name)
        growing = self._runs.get(run)
        # Hugging Face repeats what heads share in some calls of a run and not in others: here it stands once.
        heads = x.shape[1] if growing is None else min(x.shape[1], growing.tensor.shape[1])
        x, before = _of_heads(x, heads), x if growing is None else _of_heads(growing.tensor, heads)
        continues = (
            growing is not None
            and link.after is not None
            and not link.first
            and before.shape[2] <= x.shape[2]
            and torch.equal(before[:, :, : link.known], x[:, :, : link.known])
        )
        if growing is None or not continues:
            growing = self._runs[run] = _Growing(x)
        growing.tensor = x
        if not rest_hidden:
            del self._runs[run]  # what this call saw must stay as it is
        return growing

    def _cells(self, cells: Tensor) -> Tensor:
        """A copy of a mask or bias, which many layers may share."""
        for address, copy in tuple(self._masks):
            if address == cells.data_ptr() and copy.dtype == cells.dtype and torch.equal(copy, cells.to(copy.device)):
                return copy
        copy = copied(cells, self.device)
        self._masks.append((cells.data_ptr(), copy))
        return copy


def copied(x: Tensor, device: torch.device | None) -> Tensor:
    """A copy on a device, or where the tensor is, without memory that it does not use."""
    # Always a copy: inside torch's dispatcher, where calls are caught, tensors do not say how often they were
    # written to, so it is unknown whether the model still writes to this one.
    copy = x.detach().clone() if device in (None, x.device) else x.to(device)
    return copy.contiguous() if copy.untyped_storage().nbytes() > copy.nbytes else copy
