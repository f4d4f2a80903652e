"""Heat on a photograph: weights of patches in the house colours, the photograph in grey below them.

    >>> halves = [[0, 0, 40, 30], [0, 30, 40, 60]]
    >>> picture = overlay(halves, [0.25, 0.75], (40, 80), title="cls")
    >>> [text.get_text() for text in picture.texts][-1]
    'hatched: the model did not see it'

The picture is painted at the size at which it is drawn, however large the photograph is.

This file does not know what the numbers are of. It imports matplotlib only to make a figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.lens.pictures.box_heat import box_heat
from regard.lens.pictures.colours import DARK, LIGHT, Array, Key, Scale, Theme, rgb
from regard.lens.pictures.drawn_input import read_numbers
from regard.lens.pictures.letters import drawable, register_fonts
from regard.lens.pictures.page import MARGIN, canvas, open_page
from regard.lens.pictures.photograph import read_photograph, shrink
from regard.lens.pictures.sheet import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["overlay"]

LONGER, SHORTER = 6.0, 0.3  # inches of the picture's sides: the longer one is so long, the shorter one not shorter
SOFT, COVER = 0.6, 0.92  # how much is seen of the photograph where it is bare, and of the colour of the largest weight
OUTLINE = 1.8  # points
STRIPE = 16  # dots from line to line of the hatching


def overlay(
    boxes: Any,
    weights: Any,
    picture: tuple[int, int],
    *,
    image: object = None,
    asked: Any = None,
    note: str | None = None,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """Weights of patches, each where its patch lies in the picture.

    >>> picture = overlay([[0, 0, 8, 8], [0, 8, 8, 16]], [0.75, 0.25], (8, 16), title="cls")
    >>> picture.texts[0].get_text()
    'cls'

    boxes: (P, 4) top, left, bottom, right in the picture's pixels.  weights: (P,), from 0 up.
    picture: height and width.  image: the photograph, as `view.overlay` takes it; bare paper without.
    asked: (4,) a box to outline.  note: one more entry of the legend.
    title: above the picture; none unless given.  dark: for dark paper.

    Colours run from 0, where the photograph is bare, to the largest weight. NaN and infinity are red.
    Raises TypeError or ValueError for numbers, boxes or an image of a wrong kind or size.
    """
    register_fonts()
    boxes, weights = _read(boxes, weights)
    grey = None if image is None else read_photograph(image, picture)
    box = None if asked is None else read_numbers("asked", asked, "(4,)")
    theme = DARK if dark else LIGHT
    high, wide = picture
    longer = max(picture)
    inches = (max(LONGER * high / longer, SHORTER), max(LONGER * wide / longer, SHORTER))
    scale = Scale("weight", theme.weight, 0.0, float(np.max(weights, initial=0.0, where=np.isfinite(weights))), 0.0)
    dots = (round(inches[0] * DPI), round(inches[1] * DPI))
    zoom = np.array([dots[0] / high, dots[1] / wide] * 2)
    heat, seen = (box_heat(boxes * zoom, numbers, dots) for numbers in (weights, np.ones(len(weights))))
    under = _under(grey, dots, theme)
    accent = None if box is None else (DARK.signed[0] if dark else LIGHT.signed[2])
    keys = _keys(scale, weights, under, bool(np.isnan(seen).any()), accent, note, theme)
    page = open_page(inches, title, keys, theme)
    axes = canvas(page.sheet, MARGIN, page.top, inches)
    painted = _painted(heat, ~np.isnan(seen), under, scale, theme)
    axes.imshow(painted, extent=(0, wide, high, 0), aspect="auto", interpolation="nearest", origin="upper")
    axes.set(xlim=(0, wide), ylim=(high, 0))
    _outline(axes, np.array([0, 0, high, wide]), theme.line, 0.8)
    if box is not None and accent is not None:
        around = (
            box + np.array([-1, -1, 1, 1]) * OUTLINE / 72 * longer / LONGER
        )  # beside the patch, whose colour counts
        _outline(axes, around, theme.paper, 2 * OUTLINE)
        _outline(axes, around, accent, OUTLINE)
    return page.finish()


def _read(boxes: Any, weights: Any) -> tuple[Array, Array]:
    boxes, weights = read_numbers("boxes", boxes, "(patches, 4)"), read_numbers("weights", weights, "(patches,)")
    if boxes.shape != (len(weights), 4):
        raise ValueError(f"boxes must be ({len(weights)}, 4), one for each weight; got {boxes.shape}")
    if (weights < 0).any():
        raise ValueError(f"weights must not be negative, got {np.nanmin(weights):.3g}")
    return boxes, weights


def _under(grey: NDArray[np.float32] | None, dots: tuple[int, int], theme: Theme) -> Array:
    """(dots high, dots wide, 3) what lies below the colours: the photograph, softened towards the paper."""
    paper = rgb(theme.paper)
    if grey is None:
        return np.broadcast_to(paper, (*dots, 3))
    small = shrink(grey, max(1, min(grey.shape[0] // dots[0], grey.shape[1] // dots[1])))
    rows, columns = (np.arange(n) * size // n for n, size in zip(dots, small.shape, strict=True))
    return np.asarray(SOFT * small[rows][:, columns, None] + (1 - SOFT) * paper)


def _painted(heat: Array, seen: Array, under: Array, scale: Scale, theme: Theme) -> Array:
    """(dots high, dots wide, 3): colours over the photograph, hatching where nothing was seen."""
    broken = seen & ~np.isfinite(heat)
    cells = _covered(np.where(np.isfinite(heat), heat, 0.0) / (scale.high or 1.0), under, scale)
    cells[broken] = rgb(theme.alarm)
    faded = 0.4 * under + 0.6 * rgb(theme.paper)
    down, across = np.indices(heat.shape, np.int32)
    line = np.asarray((down + across) % STRIPE < 2)[..., None]
    cells[~seen] = np.where(line, rgb(theme.line), faded)[~seen]
    return np.asarray(cells.clip(0, 1))


def _covered(place: Array, under: Array, scale: Scale) -> Array:
    """Colours by place along the ramp, 0 to 1, over what is below; at 0 the photograph is bare."""
    cover = COVER * np.sqrt(place)[..., None]
    return np.asarray((1 - cover) * under + cover * scale.colours(place))


def _keys(
    scale: Scale, weights: Array, under: Array, hidden: bool, accent: str | None, note: str | None, theme: Theme
) -> list[Key]:
    name, low, ramp, high = scale.key()
    on_average = _covered(np.linspace(0.0, 1.0, len(ramp)), under.mean((0, 1)), scale)
    keys: list[Key] = [(name, low, on_average, high)]
    if accent is not None:
        keys.append((rgb(accent), "the patch itself"))
    if not np.isfinite(weights).all():
        keys.append((rgb(theme.alarm), "NaN or infinite"))
    if hidden:
        keys.append(("hatched: the model did not see it",))
    return [*keys, *([(drawable(note),)] if note else [])]


def _outline(axes: Axes, box: Array, colour: str, width: float) -> None:
    from matplotlib.patches import Rectangle

    top, left, bottom, right = map(float, box)
    frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, lw=width, clip_on=False)
    axes.add_patch(frame)
