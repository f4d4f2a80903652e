"""Where the pixels that a model saw lie in the picture they were made of.

    >>> frame = Frame.whole(480, 640).resized(256, 341).cropped(16, 58, 224, 224)
    >>> frame.boxes([[0, 0, 224, 224]]).round(1).tolist()  # what the model saw: the middle of the picture
    [[30.0, 108.9, 450.0, 529.3]]

Resizing, cropping and padding only scale and shift, so a frame is two scales and a corner. Coordinates count from the
upper left corner of a picture, down and across, and are edges: pixel (0, 0) reaches from 0 to 1. It knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Frame"]


@dataclass(frozen=True)
class Frame:
    """How pixels lie in a picture.

    picture: height and width of the picture, upright.  pixels: height and width of what was made of it.
    scale: how many of the picture's pixels one pixel is high and wide.
    corner: where the upper left corner of the pixels lies in the picture, down and across; outside it where padded.
    """

    picture: tuple[int, int]
    pixels: tuple[int, int]
    scale: tuple[float, float]
    corner: tuple[float, float]

    @classmethod
    def whole(cls, height: int, width: int) -> Frame:
        """A picture as it is. Raises ValueError for a side below 1."""
        _check(height, width)
        return cls((height, width), (height, width), (1.0, 1.0), (0.0, 0.0))

    def resized(self, height: int, width: int) -> Frame:
        """The same part of the picture in other pixels. Raises ValueError for a side below 1.

        >>> Frame.whole(480, 640).resized(240, 160).scale
        (2.0, 4.0)
        """
        _check(height, width)
        scale = (self.scale[0] * self.pixels[0] / height, self.scale[1] * self.pixels[1] / width)
        return replace(self, pixels=(height, width), scale=scale)

    def cropped(self, top: int, left: int, height: int, width: int) -> Frame:
        """A window of these pixels; where it reaches beyond them (top or left below 0, too high, too wide) is padding.

        >>> Frame.whole(480, 640).resized(240, 160).cropped(10, -5, 100, 170).corner
        (20.0, -20.0)

        Raises ValueError for a side below 1.
        """
        _check(height, width)
        corner = (self.corner[0] + top * self.scale[0], self.corner[1] + left * self.scale[1])
        return replace(self, pixels=(height, width), corner=corner)

    def boxes(self, boxes: ArrayLike) -> NDArray[np.float64]:
        """Boxes of pixels (…, 4), each top, left, bottom, right, as boxes of the picture.

        >>> Frame.whole(480, 640).resized(240, 160).boxes([1, 1, 2, 2]).tolist()
        [2.0, 4.0, 4.0, 8.0]
        """
        scale, corner = np.array(self.scale * 2), np.array(self.corner * 2)
        found: NDArray[np.float64] = np.asarray(boxes, np.float64) * scale + corner
        return found

    def pixel(self, y: float, x: float) -> tuple[float, float]:
        """The place among the pixels of a place in the picture; outside them where the model did not see it.

        >>> Frame.whole(480, 640).resized(240, 160).pixel(2.0, 8.0)
        (1.0, 2.0)
        """
        return (y - self.corner[0]) / self.scale[0], (x - self.corner[1]) / self.scale[1]


def _check(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"pixels need a height and a width of at least 1, got {height} × {width}")
