"""All heads at once: their small maps, one query's row in each, and one link's weight in each.

Axis letters: W windows, H heads, N positions (Nq queries, Nk keys).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.layouts import Layout
from regard.lens.overlays import ImagePatches
from regard.masks.tiles import cell_edges
from regard.session.heads import Layer
from regard.session.session import Session

CELLS = 24  # of a thumbnail, each way
FEW = 1 << 24  # weights of a layer of which a thumbnail is made where no map was measured

Side = Literal["queries", "keys"]


@dataclass(frozen=True, eq=False)
class Thumbnails:
    """The small maps of a layer's heads, (H, ≤ 24, ≤ 24): a cell is the sum of its weights by its number of queries.

    rows, cols: edges of the cells in queries and keys.  exact: whether a cell is one weight.
    With windows they are those of the first one.
    """

    cells: Tensor
    rows: list[int]
    cols: list[int]
    exact: bool


def thumbnails_of(layer: Layer) -> Thumbnails | None:
    """The thumbnails of a layer, from its measured map or its weights; None without either."""
    view = layer.view
    batch, heads, nq, nk = view.sizes
    if 0 in (nq, nk):
        return None
    if "map" in view.held:
        cells = view.map()[0]
    elif view.weights is not None and batch * heads * nq * nk <= FEW:
        cells = view.map(CELLS)[0]
    else:
        return None
    cells = cells.double().cpu()  # (H, r, c)
    rows, cols = (cell_edges(n, m) for n, m in zip((nq, nk), cells.shape[1:], strict=True))
    # Cells are joined, so that each edge is one of the map's: sums stay exact, and 64 cells make 24 of 2 or 3.
    down, across = (cell_edges(len(edges) - 1, CELLS) for edges in (rows, cols))
    queries = torch.tensor(rows).diff().double()
    joined = _summed(cells * queries[:, None], down, 1) / _summed(queries, down, 0)[:, None]
    rows, cols = [rows[edge] for edge in down], [cols[edge] for edge in across]
    return Thumbnails(_summed(joined, across, 2).float(), rows, cols, max(nq, nk) <= CELLS)


def _summed(values: Tensor, edges: list[int], axis: int) -> Tensor:
    """Sums of the parts between edges along an axis."""
    parts = torch.tensor(edges).diff()
    sums = values.new_zeros(*values.shape[:axis], len(parts), *values.shape[axis + 1 :])
    return sums.index_add_(axis, torch.arange(len(parts)).repeat_interleave(parts), values)


# --------------------------------------------------------------------------------------------------- grids of an image


@dataclass(frozen=True, eq=False)
class PatchCells:
    """The patches of one image in at most 24 × 24 cells.

    rows, columns: (r, 2) and (c, 2) first and last edge of each in the image, as fractions of its sides.
    tokens: (P, 2) window and index of each patch.  cell: (P,) which cell, row · columns + column, it is in.
    """

    image: int
    rows: NDArray[np.float64]
    columns: NDArray[np.float64]
    tokens: NDArray[np.int64]
    cell: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """(W, H, Nk) → (H, r, c) the sum of the patches of each cell."""
        patches = values[self.tokens[:, 0], :, self.tokens[:, 1]]  # (P, H)
        sums = patches.new_zeros(len(self.rows) * len(self.columns), patches.shape[1]).index_add_(0, self.cell, patches)
        return sums.T.reshape(-1, len(self.rows), len(self.columns))


def patch_cells(layer: Layer) -> Iterator[PatchCells]:
    """The patches among a layer's keys, in cells, image by image."""
    for number, frame in enumerate(() if layer.sides is None else layer.sides.frames):
        assert layer.sides is not None
        patches = ImagePatches(layer.sides.keys, frame, number)
        if not len(patches.tokens):
            continue
        size, sides, cell = frame.image_size, [], torch.zeros(len(patches.tokens), dtype=torch.int64)
        for axis in (0, 1):
            rank = patches.cells[:, axis]
            edges = cell_edges(int(rank.max()) + 1, CELLS)
            group = np.searchsorted(edges, rank, side="right") - 1  # (P,)
            first, last = patches.boxes[:, axis] / size[axis], patches.boxes[:, axis + 2] / size[axis]
            groups = [group == n for n in range(len(edges) - 1)]
            sides.append(np.array([[first[mine].min(), last[mine].max()] for mine in groups]))
            cell = cell * len(groups) + torch.from_numpy(group)
        yield PatchCells(number, sides[0], sides[1], patches.tokens, cell)


def received_in_image(layer: Layer) -> list[tuple[PatchCells, Tensor]]:
    """By image: what each cell of patches receives of a query on average, (H, r, c); [] if that is unknown."""
    view = layer.view
    if "received" not in view.held or "received" in view.pooled or layer.sides is None:
        return []
    share = view.received[: layer.windows].float().cpu() / max(1, view.sizes[2])  # (W, H, Nk)
    return [(cells, cells.sums(share)) for cells in patch_cells(layer)]


# ------------------------------------------------------------------------------------------------- one query, all heads


def place_in(layer: Layer, other: Layer, token: int, side: Side) -> int | None:
    """The number in `other` of a query or key of `layer`: the same token, or the patch at the same place; or None."""
    axis = 0 if side == "queries" else 1
    if layer.sides is not None and other.sides is not None:
        ours: Layout = getattr(layer.sides, side)
        theirs: Layout = getattr(other.sides, side)
        if ours == theirs:
            return token
        window, index = divmod(token, ours.shape[1])
        kind, image = str(ours.kind[window, index]), int(ours.image[window, index])
        if kind != "patch":
            alike = np.argwhere((theirs.kind == kind) & (theirs.image == image))
            return int(alike[0] @ (theirs.shape[1], 1)) if kind == "cls" and len(alike) == 1 else None
        if layer.sides.frames != other.sides.frames:
            return None
        top, left, bottom, right = ours.box[window, index]
        try:
            w, i = theirs.at((top + bottom) / 2, (left + right) / 2, image)
        except LookupError:
            return None
        return int(w * theirs.shape[1] + i)
    if layer.sides is not None or other.sides is not None:
        return None
    if layer.start is not None and other.start is not None:
        token += layer.start - other.start if side == "queries" else 0
        return token if 0 <= token < other.sizes[axis] else None
    return token if (layer.view.kind, layer.sizes) == (other.view.kind, other.sizes) else None


def layer_row(layer: Layer, token: int) -> Tensor | None:
    """The row of a query in all heads of a layer, (W, H, Nk), 0 in other windows; None without exact weights."""
    view = layer.view
    window, i = divmod(token, max(1, view.sizes[2]))
    if view.weights is not None:
        row = view.row(i)
    elif "map" in view.held and view.how("map") == "exact":
        row = view.map()[:, :, i]
    else:
        return None
    rows: Tensor = row[: layer.windows].float().cpu()
    return rows if layer.windows == 1 else rows * (torch.arange(layer.windows) == window).view(-1, 1, 1)


def link_weights(session: Session, token: int, key: int, layer: int) -> Tensor:
    """The weight of a link in every head, (layers, most heads); NaN where a layer has no such link, or it is unknown.

    layer: the one that token and key are counted in.
    """
    asked, most = session.layers[layer], max(one.view.sizes[1] for one in session.layers)
    weights = torch.full((len(session.layers), most), float("nan"))
    for other in session.layers:
        query, to = place_in(asked, other, token, "queries"), place_in(asked, other, key, "keys")
        row = None if query is None or to is None else layer_row(other, query)
        if row is not None:
            window, j = divmod(to or 0, other.view.sizes[3])
            weights[other.index, : row.shape[1]] = row[window, :, j]
    return weights
