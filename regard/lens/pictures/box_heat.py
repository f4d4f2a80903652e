"""Numbers of boxes as numbers of pixels: each pixel gets the number of the box it lies in.

    >>> box_heat(np.array([[0.0, 0.0, 1.0, 1.5]]), np.array([0.5]), (1, 3)).tolist()
    [[0.5, 0.5, nan]]

Boxes are top, left, bottom, right, in pixels, and may cross them or reach beyond the picture: where a border crosses a
pixel, the pixel gets the mean of both sides, by their areas in it.

It does not know what the numbers are, nor matplotlib.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "box_heat"]

Floats = NDArray[np.float64]

SLIVER = 1e-6  # of a pixel: an edge that misses the pixel's own by less is rounding
CELLS = 1 << 22  # pixels that are painted at once


def box_heat(boxes: Floats, numbers: Floats, shape: tuple[int, int]) -> NDArray[np.float32]:
    """(height, width) the number of each pixel, NaN where no box lies.

    boxes: (P, 4).  numbers: (P,), of which a NaN shows in its own box alone.  shape: height and width.

    A product of three matrices: rows of pixels × rows of boxes, rows × columns of boxes, columns of boxes × of pixels.
    Boxes of a grid share their rows and columns, so that this costs height · width · columns.
    """
    height, width = shape
    rows, row = np.unique(boxes[:, [0, 2]], axis=0, return_inverse=True)  # (R, 2) top and bottom
    columns, column = np.unique(boxes[:, [1, 3]], axis=0, return_inverse=True)  # (C, 2) left and right
    broken = ~np.isfinite(numbers)
    parts = (np.where(broken, 0.0, numbers), np.ones(len(numbers)), broken.astype(float))
    total, count, wrong = (_summed(part, (row.ravel(), column.ravel()), (len(rows), len(columns))) for part in parts)
    across = _overlap(columns, width).T  # (C, width)
    heat = np.empty(shape, np.float32)
    step = max(1, CELLS // max(1, width))
    for y in range(0, height, step):
        down = _overlap(rows - y, min(step, height - y))  # (h, R)
        area = down @ count @ across
        with np.errstate(invalid="ignore"):
            part = (down @ total @ across) / area  # 0 / 0 is NaN
        if broken.any():
            part[down @ wrong @ across > 0] = np.nan
        heat[y : y + step] = part
    return heat


def _summed(numbers: Floats, at: tuple[NDArray[np.intp], NDArray[np.intp]], shape: tuple[int, int]) -> Floats:
    cells = np.zeros(shape)
    np.add.at(cells, at, numbers)
    return cells


def _overlap(spans: Floats, n: int) -> Floats:
    """(n, S) how much of pixel 0 … n − 1 each span (S, 2) covers."""
    pixel = np.arange(n)[:, None]
    covered = np.minimum(spans[:, 1], pixel + 1) - np.maximum(spans[:, 0], pixel)
    return np.where(covered > SLIVER, covered, 0.0)
