"""The figure of an overlay: what is coloured, bare, hatched, outlined and said; and what is refused."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from regard import figures
from regard.viz.colors import DARK, LIGHT, rgb

HALVES = [[0, 0, 40, 30], [0, 30, 40, 60]]


def dots(figure) -> np.ndarray:
    (image,) = (image for axes in figure.axes for image in axes.images)
    return np.asarray(image.get_array())


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


@pytest.mark.parametrize(("dark", "theme"), [(False, LIGHT), (True, DARK)])
def test_each_place_has_the_colour_of_its_weight(dark, theme):
    figure = figures.overlay(HALVES, [0.0, 0.5], (40, 80), title="cls", dark=dark)
    painted = dots(figure)
    assert painted.shape == (600, 1200, 3)  # 6 inches at 200 dots
    bare, full, unseen = painted[300, 200], painted[300, 700], painted[:, 900:].reshape(-1, 3)
    np.testing.assert_allclose(bare, rgb(theme.paper)[0])
    np.testing.assert_allclose(full, 0.92 * rgb(theme.weight[-1])[0] + 0.08 * rgb(theme.paper)[0])
    colours = np.unique(unseen.round(6), axis=0)
    np.testing.assert_allclose(colours, np.unique(rgb(theme.paper, theme.line).round(6), axis=0), atol=1e-6)
    assert to_hex(figure.get_facecolor()) == theme.paper
    assert words(figure) == ["cls", "weight", "0", "0.5", "hatched: the model did not see it"]


def test_the_photograph_shows_where_there_is_no_weight():
    image = np.zeros((40, 60), np.uint8)
    image[:, 30:] = 255
    painted = dots(figures.overlay(HALVES, [0.0, 0.0], image))
    left, right = painted[200, 300, 0], painted[200, 900, 0]
    assert left == pytest.approx(0.4)  # softened towards white paper
    assert right == pytest.approx(1.0)


def test_a_large_photograph_is_shrunk_and_not_sampled():
    fine = (np.indices((2400, 1800)).sum(0) % 2 * 255).astype(np.uint8)  # a chessboard of single pixels
    painted = dots(figures.overlay([[0, 0, 2400, 1800]], [0.0], fine))
    assert painted.shape == (1200, 900, 3)
    np.testing.assert_allclose(painted, 0.4 + 0.6 * 0.5, atol=1e-6)


def test_broken_weights_are_red_and_told():
    figure = figures.overlay(HALVES, [np.nan, 1.0], (40, 60))
    np.testing.assert_allclose(dots(figure)[200, 300], rgb(LIGHT.alarm)[0])
    assert "NaN or infinite" in words(figure)


def test_the_patch_of_the_token_is_outlined_beside_its_own_colour():
    figure = figures.overlay(HALVES, [0.2, 0.3], (40, 60), outline=[0, 30, 40, 60], note="weight in all: patch 0.5")
    frames = [patch for axes in figure.axes for patch in axes.patches if isinstance(patch, Rectangle)]
    halo, line = frames[1:3]  # the first is the picture's own
    assert to_hex(line.get_edgecolor()) == LIGHT.query
    assert to_hex(halo.get_edgecolor()) == LIGHT.paper
    assert line.get_x() < 30
    assert line.get_x() + line.get_width() > 60
    assert line.get_y() < 0
    assert words(figure)[-2:] == ["the patch itself", "weight in all: patch 0.5"]


def test_a_thread_of_a_picture_is_still_seen():
    figure = figures.overlay([[0, 0, 10, 20000]], [1.0], (10, 20000))
    assert dots(figure).shape == (60, 1200, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"boxes": [[0, 0, 1, 1]]}, ValueError, r"boxes.*\(2, 4\).*\(1, 4\)"),
        ({"boxes": np.zeros((2, 3))}, ValueError, r"boxes.*\(2, 4\).*\(2, 3\)"),
        ({"boxes": [1, 2]}, ValueError, r"boxes.*4.*\(2,\)"),
        ({"weights": [0.5, -0.25]}, ValueError, r"weights.*-0\.25"),
        ({"weights": "no"}, TypeError, "weights"),
        ({"outline": [[0, 0, 1, 1]]}, ValueError, r"outline.*\(4,\).*\(1, 4\)"),
        ({"image": np.zeros((3, 3, 2))}, ValueError, r"image.*\(3, 3, 2\)"),
        ({"image": "cat.png"}, TypeError, r"image.*str.*PIL.Image.open"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change, error, message):
    given = {"boxes": HALVES, "weights": [0.5, 0.5], "image": (40, 60)} | change
    with pytest.raises(error, match=message):
        figures.overlay(**given)
