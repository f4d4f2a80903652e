"""Photographs under a figure's colours: any kind of array or Pillow image, in grey, of the right size or refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from regard.viz.map import read_photograph, shrink

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
        ("photo.jpg", TypeError, r"Pillow.*str.*PIL\.Image\.open"),
        (COLOURS.astype(np.int64), TypeError, r"image.*uint8.*0.*1.*int64"),
        (np.zeros((2, 3, 3), bool), TypeError, "bool"),
        (np.zeros((2, 3, 2), np.uint8), ValueError, r"image.*\(2, 3, 2\)"),
        (np.zeros((1, 2, 3, 3), np.uint8), ValueError, r"\(1, 2, 3, 3\)"),
        (
            COLOURS[:1],
            ValueError,
            r"1.*3.*2.*3",
        ),
        (GREY * 2, ValueError, r"image.*0.*1.*0.*2"),
        (GREY - 1, ValueError, r"0.*1.*-1.*0"),
        (GREY * np.nan, ValueError, r"0.*1.*nan"),
        (Image.new("I;16", (3, 2)), TypeError, "I;16"),
        (Image.new("F", (3, 2)), TypeError, r"mode.*F"),
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
