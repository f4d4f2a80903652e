"""A part of the weights of one head in few cells, computed some rows at a time: exact sums, little memory.

It does not know sessions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.explorer.one_head import HeadWeights
from regard.explorer.packing import bin_edges

__all__ = ["FEW_CELLS", "pooled_tile"]

FEW_CELLS = 1 << 24  # weights that are computed for one answer: 4,096 × 4,096
AT_ONCE = 1 << 21  # weights in memory

Span = tuple[int, int]


def pooled_tile(weights: HeadWeights, rows: Span, cols: Span, size: int) -> Tensor:
    """(≤ size, ≤ size) cells: the sum of a cell's weights divided by its number of queries, as in `View.map`.

    >>> import regard
    >>> from regard.explorer.one_head import one_head
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> pooled_tile(one_head(regard.look(x, x, x).weights, 0), (0, 4), (0, 3), 2)
    tensor([[0.2500, 0.5000],
            [0.2500, 0.5000]])

    rows, cols: [first, end), which are there.  size: cells each way, at most; where there are as few, cells are exact.
    """
    (a, b), (c, d) = rows, cols
    row_edges, col_edges = bin_edges(b - a, size), bin_edges(d - c, size)
    found = torch.zeros(len(row_edges) - 1, len(col_edges) - 1, dtype=torch.float64)
    at_once = max(1, AT_ONCE // max(1, d - c))
    cell_of_row = torch.repeat_interleave(torch.arange(len(found)), row_edges.diff())
    for i in range(a, b, at_once):
        tile = weights.tile(slice(i, min(i + at_once, b)), slice(c, d)).cpu()  # (some rows, d − c)
        found.index_add_(0, cell_of_row[i - a : i - a + len(tile)], _in_columns(tile, col_edges))
    return (found / row_edges.diff()[:, None].clamp(min=1)).float()


def _in_columns(tile: Tensor, edges: Tensor) -> Tensor:
    """(r, c) → (r, cells) in fp64."""
    counts = edges.diff()
    if tile.shape[1] == len(counts):
        return tile.double()
    if tile.shape[1] % len(counts) == 0:
        return tile.view(len(tile), len(counts), -1).sum(-1, dtype=torch.float64)
    cell = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.zeros(len(tile), len(counts), dtype=torch.float64).index_add_(1, cell, tile.double())
