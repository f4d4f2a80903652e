"""The steps of image preprocessing: resize, crop, pad, rescale, normalise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from regard.data.images import MOST_PIXELS
from regard.layouts import Frame

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Exactly:
    """One size for all images, whatever their shape: {"height": …, "width": …}.

    >>> Exactly(224, 192).of(480, 640)
    (224, 192)
    """

    height: int
    width: int

    def of(self, height: int, width: int) -> tuple[int, int]:
        """The new height and width of an image."""
        return self.height, self.width

    def __str__(self) -> str:
        return f"to {self.height} × {self.width}"


@dataclass(frozen=True)
class ShorterSide:
    """The shorter side becomes `side`, less where the longer one would pass `longest`; the shape stays.

    {"shortest_edge": …}, {"shortest_edge": …, "longest_edge": …}.

    >>> ShorterSide(224, longest=280).of(480, 640)
    (210, 280)
    """

    side: int
    longest: int | None = None

    def of(self, height: int, width: int) -> tuple[int, int]:
        """The new height and width of an image."""
        short, long = min(height, width), max(height, width)
        side: float = self.side
        if self.longest is not None and long / short * side > self.longest:
            side = self.longest * short / long
        shorter = round(side)
        if shorter == short:  # nothing to resize, though the longer side may still be a pixel too long
            return height, width
        longer = int(side * long / short)
        return (longer, shorter) if width < height else (shorter, longer)

    def __str__(self) -> str:
        bound = "" if self.longest is None else f" (the longer one to {self.longest} at most)"
        return f"the shorter side to {self.side}{bound}"


@dataclass(frozen=True)
class Within:
    """As large as fits into a height and a width; the shape stays: {"max_height": …, "max_width": …}.

    >>> Within(224, 224).of(480, 640)
    (168, 224)
    """

    height: int
    width: int

    def of(self, height: int, width: int) -> tuple[int, int]:
        """The new height and width of an image."""
        scale = min(self.height / height, self.width / width)
        return int(height * scale), int(width * scale)

    def __str__(self) -> str:
        return f"to fit into {self.height} × {self.width}"


Target = Exactly | ShorterSide | Within


FILTERS = ("nearest", "Lanczos", "bilinear", "bicubic", "box", "Hamming")
"""Pillow's, by their numbers."""

MOST_MADE = 2**24
"""16.8 million pixels, 0.2 GB as numbers: more is what a long image becomes when its shorter side is enlarged."""


@dataclass(frozen=True)
class Square:
    """Padded to a square, the image in the middle.

    colour: red, green, blue, 0 to 255.
    """

    colour: tuple[int, int, int]

    def frame(self, frame: Frame) -> Frame:
        """Where the new pixels lie. Raises ValueError where they would be too many."""
        height, width = frame.pixels
        side = max(height, width)
        if side * side > MOST_PIXELS:
            raise ValueError(
                f"an image {height} high and {width} wide, padded to a square, has more than {MOST_PIXELS:,} pixels: "
                "crop it first"
            )
        return frame.cropped(-((side - height) // 2), -((side - width) // 2), side, side)

    def apply(self, image: Image) -> Image:
        """The padded image."""
        import PIL.Image

        side = max(image.size)
        square = PIL.Image.new("RGB", (side, side), self.colour)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square

    def __str__(self) -> str:
        return f"pad to a square (colour {', '.join(map(str, self.colour))})"


@dataclass(frozen=True)
class Resize:
    """Made larger or smaller by Pillow.

    resample: the number of the filter in FILTERS.
    """

    target: Target
    resample: int

    def frame(self, frame: Frame) -> Frame:
        """Where the new pixels lie. Raises ValueError where they would be too many, or none."""
        height, width = self.target.of(*frame.pixels)
        if height * width > MOST_MADE or min(height, width) < 1:
            raise ValueError(
                f"an image {frame.pixels[0]} high and {frame.pixels[1]} wide, resized ({self.target}), would be "
                f"{height} high and {width} wide, and 1 to {MOST_MADE:,} pixels can be made: crop it first"
            )
        return frame.resized(height, width)

    def apply(self, image: Image) -> Image:
        """The resized image."""
        height, width = self.target.of(image.height, image.width)
        return image.resize((width, height), self.resample)

    def __str__(self) -> str:
        return f"resize {self.target} ({FILTERS[self.resample]})"


@dataclass(frozen=True)
class Crop:
    """The middle of the image; black around it where it is smaller."""

    height: int
    width: int

    def frame(self, frame: Frame) -> Frame:
        """Where the new pixels lie."""
        return frame.cropped(*self._corner(*frame.pixels), self.height, self.width)

    def apply(self, image: Image) -> Image:
        """The cropped image."""
        top, left = self._corner(image.height, image.width)
        return image.crop((left, top, left + self.width, top + self.height))  # Pillow's crop is black beyond the edges

    def _corner(self, height: int, width: int) -> tuple[int, int]:
        return (height - self.height) // 2, (width - self.width) // 2

    def __str__(self) -> str:
        return f"crop the middle {self.height} × {self.width}"


Step = Square | Resize | Crop


@dataclass(frozen=True)
class Normalize:
    """Pixels 0 to 255 to float32: times `scale`, minus `mean`, divided by `std` (red, green, blue).

    >>> Normalize(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).table[0, [0, 255]].tolist()
    [-1.0, 1.0]
    """

    scale: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """What each of the 256 values becomes, in each colour: (3, 256)."""
        values = np.tile(np.arange(256, dtype=np.float64), (3, 1))
        # float32 but for the scaling, as in transformers
        table = (values if self.scale is None else values * self.scale).astype(np.float32)
        if self.mean is None or self.std is None:
            return table
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.asarray((table - mean[:, None]) / std[:, None], np.float32)

    def apply(self, image: Image, pixel_values: NDArray[np.float32]) -> None:
        """Write the image to (3, H, W), or into the corner of something larger."""
        pixels = np.asarray(image)  # (H, W, 3) uint8
        for colour in range(3):
            pixel_values[colour, : image.height, : image.width] = self.table[colour][pixels[:, :, colour]]

    def __str__(self) -> str:
        words = []
        if self.scale is not None:
            words.append("÷ 255" if self.scale == 1 / 255 else f"× {self.scale:g}")
        if self.mean is not None:
            words.append("normalise")
        return ", ".join(words) or "as they are, 0 to 255"


@dataclass(frozen=True)
class Pad:
    """Zeros to the right and below, after everything else: to `size`, or to the largest of the batch."""

    size: tuple[int, int] | None

    def frames(self, frames: list[Frame]) -> list[Frame]:
        """Where the pixels lie, each frame as large as the others. Raises ValueError for a size that is too small."""
        largest = tuple(max(frame.pixels[axis] for frame in frames) for axis in (0, 1))
        height, width = self.size or largest
        if height < largest[0] or width < largest[1]:
            raise ValueError(
                f"images of up to {largest[0]} × {largest[1]} pixels cannot be padded to {height} × {width}: "
                "pad_size must be larger, or the images resized to less"
            )
        return [frame.cropped(0, 0, height, width) for frame in frames]

    def __str__(self) -> str:
        return "pad with 0 to " + ("the largest" if self.size is None else f"{self.size[0]} × {self.size[1]}")
