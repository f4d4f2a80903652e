"""Exact weights of one head, computed on demand; and checks of indices that users give."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Protocol, get_args

import torch
from torch import Tensor

from regard.lens.assembly import AssembledWeights
from regard.lens.measures.weights import ComputedWeights, Part, StoredWeights, Weights, as_they_are, exponentials
from regard.locale import Lang
from regard.masks.rules import Rule
from regard.masks.tiles import cell_edges
from regard.session.ranking import SeenLayer
from regard.session.session import Session

FEW_CELLS = 1 << 24  # weights that are computed for one answer: 4,096 × 4,096
AT_ONCE = 1 << 21  # weights in memory

Span = tuple[int, int]


class HeadWeights(Protocol):
    """A source of the exact weights of one head."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Nq, Nk."""

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols), in fp32 or wider."""

    def row(self, i: int) -> Tensor:
        """The weights of query i, (Nk,), as the softmax of its scores gives them."""


def one_head(weights: Weights, head: int, batch: int = 0) -> HeadWeights:
    """The weights of one head of one batch row.

    >>> import regard
    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> one_head(regard.look(x, x, x).weights, 0).tile(slice(1), slice(None))
    tensor([[0.4711, 0.2645, 0.2645]])

    Raises TypeError for weights of another kind than the lens has.
    """
    if isinstance(weights, ComputedWeights):
        return Scored(weights, head, batch)
    if isinstance(weights, StoredWeights):
        return _Whole(weights.weights[batch, head])
    if isinstance(weights, AssembledWeights):
        rows = [batch if moved is None else moved[batch] for moved in weights.rows]
        parts = [one_head(p, head, min(b, p.sizes[0] - 1)) for p, b in zip(weights.parts, rows, strict=True)]
        return BlockWeights(parts, weights.first)
    raise TypeError(f"one_head takes the weights of a view, got {type(weights).__name__}")


class Scored:
    """Weights from q, k and lse: e^(score − lse)."""

    def __init__(self, weights: ComputedWeights, head: int, batch: int = 0) -> None:
        self.call, self.head, self.batch = weights.call, head, batch
        self.sizes = (self.call.sizes[2], self.call.sizes[3])
        group = self.call.sizes[1] // self.call.k.shape[1]
        self.q, self.k = self.call.q[batch, head], self.call.k[batch, head // group]  # (Nq, D), (Nk, D)
        self.lse = weights.exact_lse(slice(None))[batch, head]  # (Nq,), in fp64 where logits are large

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols)."""
        lse = self.lse[rows, None]
        s = self.scores(self.dots(rows, cols).mul_(self.call.scale), rows, cols)
        t = s.sub_(torch.where(lse == -inf, 0.0, lse))  # e^(−∞ − 0) = 0 where nothing is seen
        return exponentials(t, out=t)

    def row(self, i: int) -> Tensor:
        """The weights of query i, (Nk,).

        The whole row is at hand, and its own sum is nearer the truth than lse, whose rounding grows with the scores: at
        scores near 30 e^(score − lse) errs by 6e-6, this by 8e-7.
        """
        rows, every = slice(i, i + 1), slice(None)
        s = self.scores(self.dots(rows, every).mul_(self.call.scale), rows, every)[0]
        if bool((s == -inf).all()):
            return torch.zeros_like(s)
        sinks: Tensor | None = self.call.sinks  # (H,) or (B, H, Nq): a logit that joins the softmax
        if sinks is None:
            return s.softmax(-1)
        sink = sinks[self.head] if sinks.ndim == 1 else sinks[self.batch, self.head, i]
        return torch.cat([s, sink.to(s).view(1)]).softmax(-1)[:-1]

    def hidden(self, rows: Part) -> Tensor:
        """Which keys are masked for these queries, (rows, Nk): their score is −∞, whatever q·k is."""
        every = slice(None)
        return self.scores(self.dots(rows, every).mul_(self.call.scale), rows, every) == -inf

    def dots(self, rows: Part, cols: Part) -> Tensor:
        """q·k of these queries and keys, (rows, cols)."""
        with as_they_are(self.call.device):
            products: Tensor = self.q[rows].to(self.lse.dtype) @ self.k[cols].to(self.lse.dtype).mT
            return products

    def scores(self, scaled: Tensor, rows: Part, cols: Part) -> Tensor:
        """What the softmax gets of scaled products, which are written over: capped, biased, −∞ where hidden."""
        call, (nq, nk) = self.call, self.sizes
        with as_they_are(call.device):
            s = scaled
            if call.softcap is not None:
                s = s.div_(call.softcap).tanh_().mul_(call.softcap)
            i = torch.arange(nq, device=call.device)[rows].view(-1, 1)
            j = torch.arange(nk, device=call.device)[cols].view(1, -1)
            if call.bias is not None:
                s = s + self._read(call.bias, i, j)
            if call.mask is not None:
                s = s.masked_fill(~self._read(call.mask, i, j), -inf)
            return s

    def _read(self, rule: Rule, i: Tensor, j: Tensor) -> Tensor:
        """The cells (rows, cols) of a mask or a bias, asked at this batch row and head."""
        b, h = (torch.full((1, 1, 1, 1), n, device=i.device) for n in (self.batch, self.head))
        nq, nk = self.sizes
        cells: Tensor = rule.bind(nq, nk, self.call.device, self.lse.dtype)(b, h, i, j)
        return cells.reshape(cells.shape[-2:])


@dataclass(frozen=True)
class _Whole:
    """Weights that a model made itself, (Nq, Nk)."""

    weights: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        return self.weights.shape[0], self.weights.shape[1]

    def tile(self, rows: Part, cols: Part) -> Tensor:
        part = self.weights[rows][:, cols]
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)

    def row(self, i: int) -> Tensor:
        return self.tile(slice(i, i + 1), slice(None))[0]


class BlockWeights:
    """Weights of several calls as one matrix: their queries one below the other, 0 for keys that a call does not have.

    >>> import regard
    >>> x = torch.zeros(2, 1, 2, 3)
    >>> weights = regard.look(x, x, x).weights
    >>> BlockWeights([one_head(weights, 0, 0), one_head(weights, 0, 1)], [0, 2]).row(2)
    tensor([0.0000, 0.0000, 0.5000, 0.5000])

    parts: of each call of a generation, or of each window.  first: number of each part's first key.
    """

    def __init__(self, parts: Sequence[HeadWeights], first: Sequence[int]) -> None:
        self.parts, self.first = parts, first
        *self.starts, nq = accumulate((part.sizes[0] for part in parts), initial=0)
        self.sizes = (nq, max(start + part.sizes[1] for start, part in zip(first, parts, strict=True)))

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols)."""
        queries, keys = torch.arange(self.sizes[0])[rows], torch.arange(self.sizes[1])[cols]
        owner = torch.bucketize(queries, torch.tensor(self.starts), right=True) - 1  # which part a query is of
        whole = torch.zeros(len(queries), len(keys))
        for n in sorted(set(owner.tolist())):
            part, mine = self.parts[n], owner == n
            there = (keys >= self.first[n]) & (keys < self.first[n] + part.sizes[1])
            if bool(there.any()):
                tile = part.tile(queries[mine] - self.starts[n], keys[there] - self.first[n]).cpu()
                whole = whole.to(torch.promote_types(whole.dtype, tile.dtype))  # fp64 where logits are large
                whole[mine.nonzero(), there.nonzero().view(1, -1)] = tile.to(whole.dtype)
        return whole

    def row(self, i: int) -> Tensor:
        """The weights of query i, (Nk,)."""
        n = bisect_right(self.starts, i) - 1
        row = self.parts[n].row(i - self.starts[n]).cpu()
        whole = row.new_zeros(self.sizes[1])
        whole[self.first[n] : self.first[n] + len(row)] = row
        return whole


def head_of(layer: SeenLayer, head: int) -> HeadWeights:
    """The exact weights of one head; windows lie along the diagonal.

    >>> import regard
    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> head_of(SeenLayer("attn", None, regard.look(x, x, x), (0,)), 0).row(1)
    tensor([0.2645, 0.4711, 0.2645])

    Raises:
        LookupError: if queries and keys were not kept.
    """
    weights = layer.view.weights
    if weights is None:
        raise LookupError("exact weights need queries and keys: watch(model, keep='qk') keeps them")
    if layer.windows == 1:
        return one_head(weights, head)
    windows = range(layer.windows)
    return BlockWeights([one_head(weights, head, w) for w in windows], [w * layer.view.sizes[3] for w in windows])


def pooled_tile(weights: HeadWeights, rows: Span, cols: Span, size: int) -> Tensor:
    """(≤ size, ≤ size) cells: the sum of a cell's weights divided by its number of queries, as in `View.map`.

    >>> import regard
    >>> from regard.session.head_weights import one_head
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> pooled_tile(one_head(regard.look(x, x, x).weights, 0), (0, 4), (0, 3), 2)
    tensor([[0.2500, 0.5000],
            [0.2500, 0.5000]])

    rows, cols: [first, end), which are there.  size: cells each way, at most; where there are as few, cells are exact.
    """
    (a, b), (c, d) = rows, cols
    heights, widths = (torch.tensor(cell_edges(n, size)).diff() for n in (b - a, d - c))
    cells = torch.zeros(len(heights), len(widths), dtype=torch.float64)
    cell_of_row, cell_of_column = (torch.arange(len(n)).repeat_interleave(n) for n in (heights, widths))
    at_once = max(1, AT_ONCE // max(1, d - c))
    for i in range(a, b, at_once):
        tile = weights.tile(slice(i, min(i + at_once, b)), slice(c, d)).cpu()  # (r, d − c)
        if tile.shape[1] == len(widths):
            sums = tile.double()
        elif tile.shape[1] % len(widths) == 0:  # equal cells: quicker
            sums = tile.view(len(tile), len(widths), -1).sum(-1, dtype=torch.float64)
        else:
            sums = torch.zeros(len(tile), len(widths), dtype=torch.float64).index_add_(1, cell_of_column, tile.double())
        cells.index_add_(0, cell_of_row[i - a : i - a + len(tile)], sums)
    return (cells / heights[:, None].clamp(min=1)).float()


def checked_language(lang: str) -> Lang:
    """The language, if it is one of those of the explorer.

    >>> checked_language("ko")
    'ko'

    Raises:
        ValueError: for another one.
    """
    for name in get_args(Lang):
        if name == lang:
            return name  # type: ignore[no-any-return]
    raise ValueError(f"lang must be {' or '.join(get_args(Lang))}, got {lang!r}")


def checked_index(name: str, value: int, count: int, of: str) -> int:
    """The index, if it is in range.

    >>> checked_index("token", 7, 5, "queries")
    Traceback (most recent call last):
        ...
    IndexError: token 7 is out of range: there are 5 queries, counted from 0

    Raises:
        TypeError: if it is not an integer.
        IndexError: if it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")
    if not 0 <= value < count:
        raise IndexError(f"{name} {value} is out of range: there are {count} {of}, counted from 0")
    return value


def checked_span(name: str, start: int, stop: int | None, count: int, most: int | None = None) -> Span:
    """[start, stop) among `count`; stop defaults to the end, or to `most` items.

    >>> checked_span("tokens", 2, None, 5)
    (2, 5)

    Raises:
        IndexError: if it is out of range.
        ValueError: for more than `most` items.
    """
    if stop is None:
        stop = count if most is None else max(start, min(count, start + most))
    if not 0 <= start <= stop <= count:
        raise IndexError(f"{name} {start} up to {stop} are out of range: there are {count}, counted from 0")
    if most is not None and stop - start > most:
        raise ValueError(f"{stop - start:,} {name} are too many for one answer: at most {most:,}")
    return start, stop


def find_head(session: Session, layer: int, head: int) -> SeenLayer:
    """The layer of a head. Raises IndexError if there is no such head."""
    seen = session.layers[checked_index("layer", layer, len(session.layers), "layers")]
    checked_index("head", head, seen.view.sizes[1], "heads")
    return seen


def exact_weights(session: Session, layer: int, head: int, what: str) -> HeadWeights:
    """The exact weights of a head, for `what`. Raises IndexError as `find_head`, LookupError without q and k."""
    seen = find_head(session, layer, head)
    if seen.view.weights is None:
        raise LookupError(
            f"{what} needs queries and keys, which this capture does not hold: record it again with "
            "regard.watch(model, keep='qk'), and save it without overview=True"
        )
    return head_of(seen, head)
