"""Photographs under a figure's colours: any kind of array or Pillow image, in grey, of the right size or refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from regard.lens.pictures.photograph import read_photograph, shrink

COLOURS = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [255, 255, 255], [51, 51, 51]]], np.uint8)
GREY = np.array([[0.299, 0.587, 0.114], [0, 1, 0.2]])


@pytest.mark.parametrize(
    "image",
    [
        COLOURS,
        COLOURS / 255,
        torch.from_numpy(COLOURS.copy()),
        np.dstack([COLOURS, np.full((2, 3), 7, np.uint8)]),
        GREY,
        GREY[..., None].astype(np.float16),
        Image.fromarray(COLOURS),
        Image.fromarray(COLOURS).convert("RGBA"),
    ],
    ids=["uint8", "floats", "tensor", "RGBA", "grey", "one channel", "Pillow", "Pillow RGBA"],
)
def test_a_photograph_becomes_grey_from_0_to_1(image):
    found = read_photograph(image, (2, 3))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, GREY, atol=1e-3 if getattr(image, "dtype", None) == np.float16 else 1e-6)


def test_modes_of_pillow_come_upright_and_in_grey():
    image = Image.fromarray(COLOURS)
    for mode in ("P", "L", "1", "LA", "CMYK"):
        assert read_photograph(image.convert(mode), (2, 3)).shape == (2, 3)
    image.getexif()[0x0112] = 8  # turned to the left
    np.testing.assert_allclose(read_photograph(image, (3, 2)), np.rot90(GREY), atol=1e-6)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("photo.jpg", TypeError, r"a Pillow image or an array, got str: PIL\.Image\.open opens files"),
        (COLOURS.astype(np.int64), TypeError, "image must be of uint8, or of floats from 0 to 1; got int64"),
        (np.zeros((2, 3, 3), bool), TypeError, "got bool"),
        (np.zeros((2, 3, 2), np.uint8), ValueError, r"image must be \(height, width\) or .*, got \(2, 3, 2\)"),
        (np.zeros((1, 2, 3, 3), np.uint8), ValueError, r"got \(1, 2, 3, 3\)"),
        (
            COLOURS[:1],
            ValueError,
            r"the image is 1 × 3, but the model was given one of 2 × 3 \(height × width\): give the",
        ),
        (GREY * 2, ValueError, "floats of an image must lie between 0 and 1, got 0 to 2"),
        (GREY - 1, ValueError, "between 0 and 1, got -1 to 0"),
        (GREY * np.nan, ValueError, "between 0 and 1, got nan"),
        (Image.new("I;16", (3, 2)), TypeError, "a picture of mode I;16 has its own scale: give an array of floats"),
        (Image.new("F", (3, 2)), TypeError, "a picture of mode F has its own scale"),
    ],
)
def test_what_is_no_such_photograph_is_refused(image, error, message):
    with pytest.raises(error, match=message):
        read_photograph(image, (2, 3))


def test_shrinking_takes_means_and_counts_what_is_there():
    grey = np.arange(15, dtype=np.float32).reshape(3, 5)
    assert shrink(grey, 1) is grey
    assert shrink(grey, 2).tolist() == [[3.0, 5.0, 6.5], [10.5, 12.5, 14.0]]
    assert shrink(grey, 9).tolist() == [[7.0]]
