"""Frames: exact coordinates, and composition against an image followed pixel by pixel. It opens no file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.layouts import Frame

SIDES = st.integers(1, 40)


def test_whole_image_maps_every_box_to_itself():
    boxes = [[0, 0, 7, 11], [2, 3, 5, 6]]
    assert Frame.whole(7, 11).boxes(boxes).tolist() == boxes


def test_all_pixels_of_a_resized_image_cover_all_of_it():
    frame = Frame.whole(7, 11).resized(13, 5)
    np.testing.assert_allclose(frame.boxes([0, 0, 13, 5]), [0, 0, 7, 11], rtol=1e-12)
    assert frame.image_size == (7, 11)
    assert frame.pixels == (13, 5)


def test_crop_after_resize_counts_in_resized_pixels():
    frame = Frame.whole(12, 20).resized(6, 5).cropped(1, 2, 3, 2)
    assert frame.scale == (2.0, 4.0)
    assert frame.corner == (2.0, 8.0)
    assert frame.boxes([0, 0, 3, 2]).tolist() == [2, 8, 8, 16]


def test_padding_lies_outside_the_image():
    frame = Frame.whole(3, 7).cropped(-2, 0, 7, 7)
    assert frame.boxes([[0, 0, 2, 7], [2, 0, 5, 7], [5, 0, 7, 7]]).tolist() == [
        [-2, 0, 0, 7],
        [0, 0, 3, 7],
        [3, 0, 5, 7],
    ]


def test_boxes_keep_their_leading_axes():
    boxes = np.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4)
    frame = Frame.whole(8, 12).resized(4, 4)
    assert frame.boxes(boxes).shape == (2, 3, 5, 4)
    assert np.array_equal(frame.boxes(boxes), boxes * [2, 3, 2, 3])


def test_order_of_crop_and_resize_matters_and_is_kept():
    first = Frame.whole(10, 14).cropped(2, 4, 6, 8).resized(3, 2)
    then = Frame.whole(10, 14).resized(5, 7).cropped(1, 2, 3, 4)
    assert first.boxes([0, 0, 3, 2]).tolist() == [2, 4, 8, 12]
    assert then.boxes([0, 0, 3, 4]).tolist() == [2, 4, 8, 12]
    assert first.scale == (2.0, 4.0)
    assert then.scale == (2.0, 2.0)


@given(SIDES, SIDES, SIDES, SIDES, st.integers(-9, 9), st.integers(-9, 9), SIDES, SIDES)
def test_pixel_is_the_inverse_of_boxes(height, width, new_height, new_width, top, left, cut_height, cut_width):
    frame = Frame.whole(height, width).resized(new_height, new_width).cropped(top, left, cut_height, cut_width)
    y, x = frame.boxes([2, 3, 2, 3])[:2]
    np.testing.assert_allclose(frame.pixel(y, x), (2, 3), atol=1e-9)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 6), st.integers(0, 4), st.integers(1, 7), st.integers(1, 5))
def test_every_pixel_lies_where_repeating_and_cutting_an_array_puts_it(by_y, by_x, top, left, height, width):
    """Numbered pixels, repeated (a resize by whole numbers) and cut out: each must lie inside its own square."""
    numbered = np.arange(7 * 5).reshape(7, 5)
    seen = numbered.repeat(by_y, 0).repeat(by_x, 1)[top : top + height, left : left + width]
    frame = Frame.whole(7, 5).resized(7 * by_y, 5 * by_x).cropped(top, left, height, width)
    for (y, x), number in np.ndenumerate(seen):
        down, across = frame.boxes([y + 0.5, x + 0.5, 0, 0])[:2]
        assert numbered[int(down), int(across)] == number


@pytest.mark.parametrize(
    "make",
    [
        lambda: Frame.whole(0, 3),
        lambda: Frame.whole(3, 3).resized(0, 3),
        lambda: Frame.whole(3, 3).cropped(0, 0, 0, 3),
    ],
)
def test_frame_without_pixels_is_refused(make):
    with pytest.raises(ValueError, match=r"1.*0"):
        make()


def test_frames_of_equal_steps_are_equal():
    assert Frame.whole(7, 5).resized(3, 2) == Frame.whole(7, 5).resized(3, 2)
    assert Frame.whole(7, 5).resized(3, 2) != Frame.whole(5, 7).resized(3, 2)
