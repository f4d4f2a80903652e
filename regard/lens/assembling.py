"""Generation, put together: the calls of one module, a prompt and then token after token, as one view of all rows.

Each call has its own queries; the keys grow, or stay the same in cross-attention and in caches of fixed size. Rows are
set one below the other, over the keys of the last call.

It does not know how calls are caught.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.lens.view import PER_QUERY, Told, View
from regard.lens.weights import Part, Weights

__all__ = ["Assembled", "assemble", "generations"]

Sizes = tuple[int, int, int, int]


def generations(sizes: Sequence[Sizes], kind: str) -> list[list[int]]:
    """Which calls of a module, by their (B, H, Nq, Nk) in call order, are steps of one generation.

    >>> generations([(1, 2, 5, 5), (1, 2, 1, 6), (1, 2, 1, 7), (1, 2, 5, 5)], "self")
    [[0, 1, 2], [3]]
    """
    groups: list[list[int]] = []
    for n, now in enumerate(sizes):
        if groups and _continues([sizes[m] for m in groups[-1]], now, kind):
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def _continues(before: Sequence[Sizes], now: Sizes, kind: str) -> bool:
    """Does a call carry on where these ended: fewer queries than keys, over keys that grew by just those queries.

    In cross-attention, and over a cache of fixed size, the keys stay: there a step is told by its single query.
    """
    last = before[-1]
    if last[:2] != now[:2]:
        return False
    if kind == "self" and now[3] == last[3] + now[2]:
        return True
    together = sum(s[2] for s in before) + now[2]
    return now[3] == last[3] and now[2] == 1 and now[3] > 1 and (kind == "cross" or together <= now[3])


class Assembled:
    """The weights of several calls, one below the other; keys that came later than a call have weight 0 in it."""

    def __init__(self, parts: Sequence[Weights]) -> None:
        self.parts = tuple(parts)
        batch, heads, _, _ = parts[0].sizes
        self.rows = [p.sizes[2] for p in parts]
        self.sizes: Sizes = (batch, heads, sum(self.rows), max(p.sizes[3] for p in parts))

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (B, H, rows, cols)."""
        wanted, keys = torch.arange(self.sizes[2])[rows], torch.arange(self.sizes[3])[cols]
        found: list[Tensor] = []
        places: list[Tensor] = []
        first = 0
        for part, count in zip(self.parts, self.rows, strict=True):
            mine = ((wanted >= first) & (wanted < first + count)).nonzero().view(-1)
            if len(mine):
                there = keys < part.sizes[3]
                tile = part.tile(wanted[mine] - first, keys[there])
                whole = tile.new_zeros(*tile.shape[:3], len(keys))
                whole[..., there] = tile
                found.append(whole.to(found[0].device if found else whole.device))
                places.append(mine)
            first += count
        if not found:
            return self.parts[0].tile(slice(0, 0), slice(0, 0)).new_zeros(*self.sizes[:2], len(wanted), len(keys))
        return torch.cat(found, 2)[:, :, torch.cat(places).argsort()]

    def pairs(self, keys: Tensor) -> Tensor:
        """The weight of one key per query, (B, H, Nq)."""
        keys = keys.expand(*self.sizes[:3])
        parts = zip(self.parts, keys.split(self.rows, -1), strict=True)
        found = [part.pairs(torch.where(k < part.sizes[3], k, -1)) for part, k in parts]
        return torch.cat([f.to(found[0].device) for f in found], -1)


def assemble(views: Sequence[View]) -> View:
    """One view of all rows of a generation.

    Measures of single rows follow one another and received mass is added up. The map and pattern scores of the whole
    need exact weights: they are there if q and k were kept for every call.
    """
    if len(views) == 1:
        return views[0]
    batch, heads, _, _ = views[0].sizes
    rows, nk = sum(v.sizes[2] for v in views), max(v.sizes[3] for v in views)
    weights = None
    if all(v.weights is not None for v in views):
        weights = Assembled([v.weights for v in views if v.weights is not None])
    return View(
        sizes=(batch, heads, rows, nk),
        held=_held(views, nk),
        weights=weights,
        kind=views[0].kind,
        place=_place(views, rows, nk),
        size=views[0].size,
        engine=views[0].engine,
    )


def _held(views: Sequence[View], nk: int) -> dict[str, Tensor]:
    held = {}
    for name in (*PER_QUERY, "top_key", "top_weight", "top_tied"):
        if all(name in v.held for v in views):
            held[name] = _together([v.held[name] for v in views], 2)
    if all("received" in v.held for v in views):
        widened = [pad(v.held["received"], (0, nk - v.sizes[3])) for v in views]
        held["received"] = torch.stack([w.to(widened[0].device) for w in widened]).sum(0)
    return held


def _together(parts: Sequence[Tensor], axis: int) -> Tensor:
    return torch.cat([p.to(parts[0].device) for p in parts], axis)


def _place(views: Sequence[View], rows: int, nk: int) -> Told:
    """The queries stand where the first call's stood, one after the other; padding is what no later call sees either."""
    visible = None
    if all(v.place.visible is not None for v in views):
        parts = [v.place.visible for v in views if v.place.visible is not None]
        shape = tuple(max(p.shape[axis] for p in parts) for axis in (0, 1))
        visible = _together([p.expand(*shape, p.shape[2]) for p in parts], 2)
    last, first = views[-1], views[0]
    offset = first.place.offset
    start = first.sizes[3] - first.sizes[2] if offset is None else offset
    padding = last.place.padding if last.sizes[3] == nk else None
    return Told(visible, padding, None if isinstance(start, int) and start == nk - rows else start)
