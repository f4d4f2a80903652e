"""One view of all steps of a generation, and the copies of their tensors, which share keys and values."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.call import Call
from regard.lens.measures.measures import Sizes
from regard.lens.measures.weights import ComputedWeights, Part, Weights
from regard.lens.placement import UNPLACED
from regard.lens.step_links import Rows, StepLink, rows_of
from regard.lens.values import StoredValues
from regard.lens.view import PER_QUERY, KeyTokens, KnownVisibility, View
from regard.masks import DenseMask
from regard.masks.biases import DenseBias

MASKS = 4  # how many are remembered, so that layers that share one share its copy
MISSING = {"lse": -inf, "max_logit": -inf, "top_key": -1}
"""What stands in rows that a call does not have, as in rows that see nothing; else 0."""


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
        found = []
        for n, wanted in enumerate(torch.split(keys.expand(*self.sizes[:3]), self.counts, -1)):
            local = wanted - self.first[n]
            local = torch.where((wanted >= 0) & (local >= 0) & (local < self.parts[n].sizes[3]), local, -1)
            found.append(self._pairs(n, local))
        return torch.cat([f.to(found[0].device) for f in found], -1)

    def _pairs(self, n: int, keys: Tensor) -> Tensor:
        """The same of one call; where the batch rows have moved, each asks in the place where it was."""
        rows = self.rows[n]
        if rows is None:
            return self.parts[n].pairs(keys)
        found = torch.zeros(keys.shape, dtype=torch.float64)
        for b, was in enumerate(rows):
            if was < 0:
                continue
            asked = keys.new_full((self.parts[n].sizes[0], *keys.shape[1:]), -1)
            asked[was] = keys[b]
            mine = self.parts[n].pairs(asked)[was]
            found = found.to(mine)
            found[b] = mine
        return found


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
        placed=UNPLACED,
        edited=any(v.edited for v in views),
        overview=any(v.overview for v in views),
        kept_values=StoredValues(read) if len(values) == len(views) else None,
        projection=last.projection,
        output_gradient=_together(gradients, rows) if len(gradients) == len(views) else None,
    )


def _batch(x: Tensor, rows: Rows, missing: float = 0) -> Tensor:
    """The batch rows of a call that are those of the run."""
    if rows is None or (x.shape[0] == 1 and min(rows) >= 0):
        return x
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
            v=k.new_zeros(1).expand(*k.shape[:3], 1),  # exact weights do not read the values
            mask=DenseMask(self._cells(call.mask.cells)) if isinstance(call.mask, DenseMask) else call.mask,
            bias=DenseBias(self._cells(call.bias.cells)) if isinstance(call.bias, DenseBias) else call.bias,
            sinks=None if call.sinks is None else copied(call.sinks, self.device),
        )
        keys = self._shared(path, "k", k, link, rest_hidden)
        return StepWeights(kept, lse if self.device is None else lse.to(self.device), keys)

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
    # written to, so nobody can tell whether the model still writes to this one.
    copy = x.detach().clone() if device in (None, x.device) else x.to(device)
    return copy.contiguous() if copy.untyped_storage().nbytes() > copy.nbytes else copy
