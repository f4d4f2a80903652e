"""Generation, put together: the calls of one module, a prompt and then token after token, as one view of all rows.

Each call has its own queries. Its keys are those of the call before and some more; or the same, in cross-attention and
in caches of fixed size; or the latest of them, in caches that drop the oldest. Rows are set one below the other, over
the keys of the whole run.

It does not know how calls are caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.lens.measuring.weights import Part, Remembered, Weights
from regard.lens.runs import Link
from regard.lens.view import PER_QUERY, Tokens, Told, View

__all__ = ["Assembled", "assemble", "rows_of"]

Sizes = tuple[int, int, int, int]
Rows = tuple[int, ...] | None
"""Which batch row of a call each batch row of the run is, −1 where it has none; None where all are in place."""

MISSING = {"lse": -inf, "max_logit": -inf, "top_key": -1}
"""What stands in rows that a call does not have, as in rows that see nothing; else 0."""


class Assembled:
    """The weights of several calls, one below the other; keys that a call did not have weigh 0 in it.

    parts: of each call.  first: where its keys begin among those of the run, default 0.  rows: its batch rows.
    """

    def __init__(
        self, parts: Sequence[Weights], first: Sequence[int] | None = None, rows: Sequence[Rows] | None = None
    ) -> None:
        self.parts = tuple(parts)
        self.first = tuple(first or [0] * len(parts))
        self.rows = tuple(rows or [None] * len(parts))
        heads = parts[0].sizes[1]
        batch = parts[-1].sizes[0] if self.rows[-1] is None else len(self.rows[-1])
        self.counts = [p.sizes[2] for p in parts]
        nk = max(start + p.sizes[3] for start, p in zip(self.first, parts, strict=True))
        self.sizes: Sizes = (batch, heads, sum(self.counts), nk)

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (B, H, rows, cols)."""
        wanted, keys = torch.arange(self.sizes[2])[rows], torch.arange(self.sizes[3])[cols]
        found: list[Tensor] = []
        places: list[Tensor] = []
        begin = 0
        for n, count in enumerate(self.counts):
            mine = ((wanted >= begin) & (wanted < begin + count)).nonzero().view(-1)
            if len(mine):
                whole = self._part(n, wanted[mine] - begin, keys)
                found.append(whole.to(found[0].device if found else whole.device))
                places.append(mine)
            begin += count
        if not found:
            one = self.parts[0].tile(slice(0, 1), slice(0, 1))
            return one.new_zeros(*self.sizes[:2], len(wanted), len(keys))
        return torch.cat(found, 2)[:, :, torch.cat(places).argsort()]

    def _part(self, n: int, rows: Tensor, keys: Tensor) -> Tensor:
        """The weights of some queries of call n over these keys of the run, (B, H, rows, keys)."""
        local = keys - self.first[n]
        there = (local >= 0) & (local < self.parts[n].sizes[3])
        tile = _batch(self.parts[n].tile(rows, local[there]), self.rows[n])
        whole = tile.new_zeros(*tile.shape[:3], len(keys))
        whole[..., there] = tile
        return whole

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


def assemble(views: Sequence[View], links: Sequence[Link]) -> View:
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
    labelled = first[-1] == 0 and last.sizes[3] == nk and (rows[-1] is None or _one_for_all(last.tokens))
    return View(
        sizes=(batch, heads, nq, nk),
        held=_held(views, first, rows, nk),
        given_output=_outputs(views, rows),
        weights=Assembled(kept, first, rows) if len(kept) == len(views) else None,
        kind=views[0].kind,
        place=_place(views, first, rows, nq, nk),
        tokens=last.tokens if labelled else Tokens(),
        size=views[0].size,
        links=views[0].links,
        engine=views[0].engine,
        edited=any(v.edited for v in views),
        overview=any(v.overview for v in views),
    )


def rows_of(links: Sequence[Link]) -> list[Rows]:
    """For each call of a run, which of its batch rows the batch rows of the assembled view are.

    >>> rows_of([Link(), Link(after=0, rows=(0, 0, 1, 1)), Link(after=1, rows=(1, 1, 2, 3))])
    [(0, 0, 1, 1), (1, 1, 2, 3), None]
    """
    if links[0].returned is not None:
        return [link.returned for link in links]
    return _ancestors(links)


def _one_for_all(tokens: Tokens) -> bool:
    return tokens.ids is not None and len(tokens.ids) == 1


def _ancestors(links: Sequence[Link]) -> list[Rows]:
    """For each call, which of its batch rows became each batch row of the last call."""
    found: list[Rows] = []
    now: Rows = None
    for link in reversed(links):
        found.append(now)
        if link.rows is not None:
            now = link.rows if now is None else tuple(link.rows[b] for b in now)
    return found[::-1]


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
    if any(isinstance(v.weights, Remembered) and v.weights.call.sinks is not None for v in views):
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


def _outputs(views: Sequence[View], rows: Sequence[Rows]) -> Tensor | None:
    found = [v.given_output for v in views if v.given_output is not None]
    return _together(found, rows) if len(found) == len(views) and found[0].ndim == 4 else None


def _place(views: Sequence[View], first: Sequence[int], rows: Sequence[Rows], nq: int, nk: int) -> Told:
    """The queries stand one after the other from where the first call's stood; padding is what no call sees."""
    visible = None
    parts = [_batch(v.place.visible, r) for v, r in zip(views, rows, strict=True) if v.place.visible is not None]
    if len(parts) == len(views):
        shape = tuple(max(p.shape[axis] for p in parts) for axis in (0, 1))  # B or 1, H or 1
        visible = _together([p.expand(*shape, p.shape[2]) for p in parts], [None] * len(parts))
    if views[0].kind == "cross":
        return Told(visible, _padding(views, first, rows, nk))
    start = views[0].place.offset
    if start is None:
        start = views[0].sizes[3] - views[0].sizes[2]
    usual = isinstance(start, int) and start == nk - nq
    return Told(visible, _padding(views, first, rows, nk), None if usual else start)


def _padding(views: Sequence[View], first: Sequence[int], rows: Sequence[Rows], nk: int) -> Tensor | None:
    """(B or 1, Nk) keys that no call sees of those that had them; None where there are none."""
    unseen: Tensor | None = None
    for view, begin, moved in zip(views, first, rows, strict=True):
        padding = view.place.padding
        if padding is None:
            padding = torch.zeros(1, view.sizes[3], dtype=torch.bool)
        here = pad(_batch(padding, moved, True).cpu(), (begin, nk - begin - view.sizes[3]), value=True)
        unseen = here if unseen is None else unseen & here
    return unseen if unseen is not None and bool(unseen.any()) else None
