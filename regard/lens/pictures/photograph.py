"""A photograph as a figure wants it under its colours: upright, in grey.

    >>> read_photograph(np.zeros((2, 3, 3), np.uint8), (2, 3)).shape
    (2, 3)

It does not know what is laid over it. It opens no files.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["read_photograph", "shrink"]

LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue, as television weighed them


def read_photograph(image: object, shape: tuple[int, int]) -> NDArray[np.float32]:
    """(height, width) grey values from 0 to 1.

    image: a Pillow image, which is turned upright; or an array (height, width), or with 3 or 4 channels last, of uint8,
        or of floats from 0 to 1.
    shape: the height and width that the picture has.
    Raises TypeError for anything else, ValueError for another size and for floats beyond 0 to 1.
    """
    given = _from_pillow(image)
    array = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"image must be a Pillow image or an array, got {type(image).__name__}: PIL.Image.open opens files"
        )
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ValueError(f"image must be (height, width) or (height, width, 3), got {array.shape}")
    if array.shape[:2] != shape:
        sizes = f"{array.shape[0]} × {array.shape[1]}, but the model was given one of {shape[0]} × {shape[1]}"
        raise ValueError(
            f"the image is {sizes} (height × width): give the photograph upright, as it was before any resizing"
        )
    return _grey(array)


def _from_pillow(image: object) -> object:
    if find_spec("PIL") is None:
        return image
    from PIL import Image, ImageOps

    if not isinstance(image, Image.Image):
        return image
    if image.mode[0] in "IF":  # Pillow would cut off what is above 255
        raise TypeError(f"a picture of mode {image.mode} has its own scale: give an array of floats from 0 to 1")
    return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def _grey(array: NDArray[np.generic]) -> NDArray[np.float32]:
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise TypeError(f"image must be of uint8, or of floats from 0 to 1; got {array.dtype}")
    values = np.asarray(array, np.float32) / np.float32(255 if array.dtype == np.uint8 else 1)
    if not (values.min(initial=0) >= 0 and values.max(initial=1) <= 1):  # written so that NaN is refused too
        raise ValueError(f"floats of an image must lie between 0 and 1, got {values.min():.3g} to {values.max():.3g}")
    if values.ndim == 2:
        return values
    return np.asarray(values[..., 0] if values.shape[2] == 1 else values[..., :3] @ LUMA, np.float32)


def shrink(grey: NDArray[np.float32], by: int) -> NDArray[np.float32]:
    """The means of by × by pixels; at the bottom and right, of as many as there are.

    >>> shrink(np.array([[0.0, 1.0, 0.5]], np.float32), 2).tolist()
    [[0.5, 0.5]]
    """
    if by == 1:
        return grey
    starts = [np.arange(0, n, by) for n in grey.shape]
    high, wide = (np.diff(np.append(s, n)) for s, n in zip(starts, grey.shape, strict=True))
    sums = np.add.reduceat(np.add.reduceat(grey, starts[0], 0), starts[1], 1)
    return np.asarray(sums / np.multiply.outer(high, wide), np.float32)
