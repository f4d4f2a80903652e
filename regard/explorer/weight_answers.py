"""Exact weights as answers: the row of one query, and tiles of the map. For `answers.py`, which says what all share.

It does not know measures, nor who asks.
"""

from __future__ import annotations

from torch import Tensor

from regard.explorer.answer_types import Key, Row, Tile
from regard.explorer.asked import checked_index, checked_span, exact_weights, find_head
from regard.explorer.packing import bin_edges, finite, largest_of_bins, packed, sums_of_bins
from regard.explorer.pooled_tiles import FEW_CELLS, pooled_tile
from regard.explorer.sessions import Session
from regard.lens.view import View

__all__ = ["row", "tile"]

BINS = 1024  # of a ribbon
TOP = 12
MOST_WEIGHTS = 1 << 17  # of a row in one answer
LARGEST_TILE = 256  # cells each way

Span = tuple[int, int]


def row(session: Session, layer: int, head: int, token: int, start: int = 0, stop: int | None = None) -> Row:
    """The exact weights of one query: those of keys start up to stop, a ribbon of all keys, and the largest.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> row(Session("toy", seen, ("a", "b", "c")), 0, 1, token=2)["top"][0]
    {'key': 0, 'weight': 0.3333333432674408}

    token: the query.  stop: default the end.
    Raises IndexError for what is not there, LookupError where queries and keys were not kept, ValueError for more than
    131,072 weights at once.
    """
    weights = exact_weights(session, layer, head, "an exact row")
    nq, nk = weights.sizes
    checked_index("token", token, nq, "queries")
    start, stop = checked_span("keys", start, stop, nk, most=MOST_WEIGHTS)
    p = weights.row(token).cpu()  # (Nk,)
    return {
        "token": token,
        "start": start,
        "stop": stop,
        "weights": packed(p[start:stop]),
        "ribbon": {"sum": packed(sums_of_bins(p, BINS)), "max": packed(largest_of_bins(p, BINS))},
        "top": _largest(p),
        "sum": finite(float(p.double().sum())),
        "how": "exact",
    }


def _largest(p: Tensor) -> list[Key]:
    """The largest weights, the lower key first among equals; hidden keys are none of them."""
    values, keys = p.nan_to_num(0.0).sort(descending=True, stable=True)
    pairs = zip(keys[:TOP].tolist(), values[:TOP].tolist(), strict=True)
    return [{"key": key, "weight": weight} for key, weight in pairs if weight > 0]


def tile(session: Session, layer: int, head: int, rows: Span, cols: Span, size: int = 128) -> Tile:
    """A part of the map in at most size × size cells: single weights where they are as few, else pooled.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> answer = tile(Session("toy", seen, ("a", "b", "c")), 0, 1, (0, 2), (0, 3))
    >>> answer["cells"]["shape"], answer["how"]
    ([2, 3], 'exact')

    rows, cols: queries and keys, [first, end).  size: 1 to 256.
    Up to 4,096 × 4,096 weights a pooled cell is their exact sum, divided by its number of queries. A larger part is cut
    from the map that was measured with the run: its answer covers whole cells of that, and says which.

    Raises IndexError and LookupError as `row` does, ValueError for another size or an empty part.
    """
    weights = exact_weights(session, layer, head, "a tile of the map")
    if not 1 <= size <= LARGEST_TILE:
        raise ValueError(f"size must be 1 to {LARGEST_TILE}, got {size}")
    rows = _some("rows", rows, weights.sizes[0])
    cols = _some("cols", cols, weights.sizes[1])
    height, width = rows[1] - rows[0], cols[1] - cols[0]
    if height * width > FEW_CELLS:
        return _of_map(find_head(session, layer, head).view, head, rows, cols)
    cells = pooled_tile(weights, rows, cols, size)
    exact = max(height, width) <= size
    return {"rows": list(rows), "cols": list(cols), "cells": packed(cells), "how": "exact" if exact else "pooled"}


def _some(name: str, span: Span, count: int) -> Span:
    start, stop = checked_span(name, span[0], span[1], count)
    if start == stop:
        raise ValueError(f"{name} {start} up to {stop} hold nothing: ask for at least one")
    return start, stop


def _of_map(view: View, head: int, rows: Span, cols: Span) -> Tile:
    """The cells of the measured map that a part touches."""
    if "map" not in view.held:
        raise LookupError(
            f"{rows[1] - rows[0]:,} × {cols[1] - cols[0]:,} weights are too many to compute now, and no map was "
            f"measured with the run: ask for at most {FEW_CELLS:,} weights, or record it with 'map' in measures="
        )
    cells = view.map()[0, head]
    (i, j, rows), (c, d, cols) = (
        _outward(span, bin_edges(n, m).tolist())
        for span, n, m in zip((rows, cols), view.sizes[2:], cells.shape, strict=True)
    )
    return {"rows": list(rows), "cols": list(cols), "cells": packed(cells[i:j, c:d]), "how": "pooled"}


def _outward(span: Span, edges: list[int]) -> tuple[int, int, Span]:
    """The first cell that a stretch touches, the one after its last, and the positions that these cover."""
    first = max(n for n, edge in enumerate(edges[:-1]) if edge <= span[0])
    end = min(n for n, edge in enumerate(edges) if edge >= span[1])
    return first, end, (edges[first], edges[end])
