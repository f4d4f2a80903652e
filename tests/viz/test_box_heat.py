"""Numbers of boxes as numbers of pixels: by area where a border crosses a pixel, NaN where no box lies."""

import numpy as np
import pytest

from regard.viz import map as maps
from regard.viz.map import box_heat

NAN = float("nan")


def heat(boxes: list[list[float]], numbers: list[float], shape: tuple[int, int]) -> list[list[float]]:
    return box_heat(np.array(boxes, float), np.array(numbers, float), shape).tolist()


def test_a_pixel_across_a_border_gets_both_sides_by_their_areas():
    assert heat([[0, 0, 1, 1.25], [0, 1.25, 1, 3]], [4, 8], (1, 3)) == [[4, 0.25 * 4 + 0.75 * 8, 8]]
    corner = [[0, 0, 0.5, 0.25], [0, 0.25, 0.5, 1], [0.5, 0, 1, 0.25], [0.5, 0.25, 1, 1]]
    assert heat(corner, [8, 16, 32, 64], (1, 1)) == [[1 + 6 + 4 + 24]]


def test_a_pixel_that_is_seen_in_part_has_the_number_of_that_part():
    np.testing.assert_array_equal(heat([[0.5, 0.5, 1.5, 2]], [3], (2, 3)), [[3, 3, NAN], [3, 3, NAN]])


def test_boxes_beyond_the_picture_count_as_far_as_they_are_in_it():
    np.testing.assert_array_equal(heat([[-5, -5, 1, 1], [1, 1, 9, 9]], [2, 7], (2, 2)), [[2, NAN], [NAN, 7]])


def test_boxes_that_overlap_share_their_pixels():
    assert heat([[0, 0, 1, 2], [0, 1, 1, 3]], [2, 6], (1, 3)) == [[2, 4, 6]]


def test_an_edge_that_misses_the_pixels_own_by_rounding_leaves_the_next_pixel_unseen():
    edge = 0.1 + 0.2  # not 0.3
    assert edge * 10 > 3
    np.testing.assert_array_equal(heat([[0, 0, 1, edge * 10]], [5], (1, 4)), [[5, 5, 5, NAN]])


@pytest.mark.parametrize("broken", [NAN, np.inf])
def test_a_number_that_is_not_finite_shows_in_its_own_box_alone(broken):
    assert np.isnan(heat([[0, 0, 1, 1], [0, 1, 1, 2]], [1, broken], (1, 2))).tolist() == [[False, True]]


def test_a_large_picture_is_painted_in_strips_that_join(monkeypatch):
    rng = np.random.default_rng(0)
    edges = np.cumsum(rng.random((2, 6)) * 5, -1)
    boxes = [[top, left, bottom, right] for top, bottom in zip(edges[0], edges[0][1:], strict=False)
             for left, right in zip(edges[1], edges[1][1:], strict=False)]  # fmt: skip
    numbers = rng.random(len(boxes))
    whole = heat(boxes, numbers, (17, 13))
    monkeypatch.setattr(maps, "CELLS", 13 * 3)
    np.testing.assert_allclose(heat(boxes, numbers, (17, 13)), whole, rtol=1e-6)
