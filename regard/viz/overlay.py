"""Weights of patches drawn over the image."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard.locale import Lang
from regard.viz.colors import Array, Key, Scale, rgb
from regard.viz.sheet import DPI, MARGIN, Sheet, drawable, read_numbers, read_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

SLIVER = 1e-6  # of a pixel: an edge that misses the pixel's own by less is rounding
CELLS = 1 << 22  # pixels that are painted at once
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue, as television weighed them
LONGER, SHORTER = 6.0, 0.3  # inches of the image's sides: the longer one is so long, the shorter one not shorter
SOFT, COVER = 0.6, 0.92  # how much is seen of the photograph where it is bare, and of the colour of the largest weight
OUTLINE = 1.8  # points
STRIPE = 16  # dots from line to line of the hatching


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
    total, count, wrong = sums = np.zeros((3, len(rows), len(columns)))
    for part, cells in zip(parts, sums, strict=True):
        np.add.at(cells, (row.ravel(), column.ravel()), part)
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


def _overlap(spans: Floats, n: int) -> Floats:
    """(n, S) how much of pixel 0 … n − 1 each span (S, 2) covers."""
    pixel = np.arange(n)[:, None]
    covered = np.minimum(spans[:, 1], pixel + 1) - np.maximum(spans[:, 0], pixel)
    return np.where(covered > SLIVER, covered, 0.0)


def read_photograph(image: object, shape: tuple[int, int] | None = None) -> NDArray[np.float32]:
    """(height, width) grey values from 0 to 1.

    image: a Pillow image, which is turned upright; or an array (height, width), or with 3 or 4 channels last, of
    uint8, or of floats from 0 to 1.  shape: the expected height and width; default any.

    Raises TypeError for anything else, ValueError for another size and for floats beyond 0 to 1.
    """
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if find_spec("PIL") is not None:
        from PIL import Image, ImageOps

        if isinstance(image, Image.Image):
            if image.mode[0] in "IF":  # Pillow would cut off what is above 255
                raise TypeError(f"an image of mode {image.mode} has its own scale: give an array of floats from 0 to 1")
            array = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"image must be a Pillow image or an array, got {type(image).__name__}: PIL.Image.open opens files"
        )
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ValueError(f"image must be (height, width) or (height, width, 3), got {array.shape}")
    if shape is not None and array.shape[:2] != shape:
        sizes = f"{array.shape[0]} × {array.shape[1]}, but the model was given one of {shape[0]} × {shape[1]}"
        raise ValueError(f"the image is {sizes} (height × width): give it upright, as it was before any resizing")
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise TypeError(f"image must be of uint8, or of floats from 0 to 1; got {array.dtype}")
    values = np.asarray(array, np.float32) / np.float32(255 if array.dtype == np.uint8 else 1)
    if not (values.min(initial=0) >= 0 and values.max(initial=1) <= 1):  # written so that NaN is refused too
        raise ValueError(f"floats of an image must lie between 0 and 1, got {values.min():.3g} to {values.max():.3g}")
    if values.ndim == 2:
        return values
    return np.asarray(values[..., 0] if values.shape[2] == 1 else values[..., :3] @ LUMA, np.float32)


def shrink(grey: NDArray[np.float32], by: int) -> NDArray[np.float32]:
    """The means of by × by pixels; at the bottom and right, of as many as there are."""
    if by == 1:
        return grey
    starts = [np.arange(0, n, by) for n in grey.shape]
    high, wide = (np.diff(np.append(s, n)) for s, n in zip(starts, grey.shape, strict=True))
    sums = np.add.reduceat(np.add.reduceat(grey, starts[0], 0), starts[1], 1)
    return np.asarray(sums / np.multiply.outer(high, wide), np.float32)


def overlay(
    boxes: Any,
    weights: Any,
    image: Any,
    *,
    outline: Any = None,
    note: str | None = None,
    title: str | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """Weights of patches, each where its patch lies in the image.

    >>> figure = overlay([[0, 0, 8, 8], [0, 8, 8, 16]], [0.75, 0.25], (8, 16), title="cls")
    >>> figure.texts[0].get_text()
    'cls'

    Colours run from 0, where the image is bare, to the largest weight. NaN and infinity are red.

    Args:
        boxes: (P, 4) top, left, bottom, right in the image's pixels.
        weights: (P,), from 0 up.
        image: a Pillow image or an array, as `view.overlay` takes it; or its height and width, to draw on bare paper.
        outline: (4,) a box to outline.
        note: one more entry of the legend.
        title: above the figure.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".

    Raises:
        TypeError: for arguments of a wrong kind.
        ValueError: for arguments of a wrong size, and for negative weights.
    """
    style = read_style(title, dark, lang)
    boxes, weights = read_numbers("boxes", boxes, "(patches, 4)"), read_numbers("weights", weights, "(patches,)")
    if boxes.shape != (len(weights), 4):
        raise ValueError(f"boxes must be ({len(weights)}, 4), one for each weight; got {boxes.shape}")
    if (weights < 0).any():
        raise ValueError(f"weights must not be negative, got {np.nanmin(weights):.3g}")
    bare = isinstance(image, tuple) and len(image) == 2
    grey = None if bare else read_photograph(image)
    box = None if outline is None else read_numbers("outline", outline, "(4,)")
    theme, (high, wide) = style.theme, image if grey is None else grey.shape
    longer = max(high, wide)
    inches = (max(LONGER * high / longer, SHORTER), max(LONGER * wide / longer, SHORTER))
    dots = (round(inches[0] * DPI), round(inches[1] * DPI))
    finite = np.isfinite(weights)
    scale = Scale(style.say("weight"), theme.weight, 0.0, float(np.max(weights, initial=0.0, where=finite)), 0.0)

    # 1. Below the colours: the image, softened towards the paper, (dots high, dots wide, 3).
    paper = rgb(theme.paper)
    under = np.broadcast_to(paper, (*dots, 3))
    if grey is not None:
        small = shrink(grey, max(1, min(grey.shape[0] // dots[0], grey.shape[1] // dots[1])))
        rows, columns = (np.arange(n) * length // n for n, length in zip(dots, small.shape, strict=True))
        under = SOFT * small[rows][:, columns, None] + (1 - SOFT) * paper
    # 2. Colours over it, hatching where the model saw nothing.
    zoom = np.array([dots[0] / high, dots[1] / wide] * 2)
    heat, covered = (box_heat(boxes * zoom, numbers, dots) for numbers in (weights, np.ones(len(weights))))
    unseen = np.isnan(covered)
    cells = _covered(np.where(np.isfinite(heat), heat, 0.0) / (scale.high or 1.0), under, scale)
    cells[~unseen & ~np.isfinite(heat)] = rgb(theme.alarm)
    down, across = np.indices(heat.shape, np.int32)
    stripes = np.asarray((down + across) % STRIPE < 2)[..., None]
    cells[unseen] = np.where(stripes, rgb(theme.line), 0.4 * under + 0.6 * paper)[unseen]
    # 3. The legend and the page.
    name, low, ramp, top = scale.key()
    keys: list[Key] = [(name, low, _covered(np.linspace(0.0, 1.0, len(ramp)), under.mean((0, 1)), scale), top)]
    keys += [(rgb(theme.query), style.say("the patch itself"))] if box is not None else []
    keys += [(rgb(theme.alarm), style.say("NaN or infinite"))] if not finite.all() else []
    keys += [(style.say("hatched: the model did not see it"),)] if unseen.any() else []
    keys += [(drawable(note),)] if note else []
    sheet = Sheet(inches, keys, style)
    axes = sheet.canvas(MARGIN, sheet.top, inches)
    painted = cells.clip(0, 1)
    axes.imshow(painted, extent=(0, wide, high, 0), aspect="auto", interpolation="nearest", origin="upper")
    axes.set(xlim=(0, wide), ylim=(high, 0))
    _outline(axes, np.array([0, 0, high, wide]), theme.line, 0.8)
    if box is not None:
        around = box + np.array([-1, -1, 1, 1]) * OUTLINE / 72 * longer / LONGER  # beside the patch: its colour counts
        _outline(axes, around, theme.paper, 2 * OUTLINE)
        _outline(axes, around, theme.query, OUTLINE)
    return sheet.finish()


def _covered(place: Array, under: Array, scale: Scale) -> Array:
    """Colours by place along the ramp, 0 to 1, over what is below; at 0 the photograph is bare."""
    cover = COVER * np.sqrt(place)[..., None]
    return np.asarray((1 - cover) * under + cover * scale.colours(place))


def _outline(axes: Axes, box: Array, colour: str, width: float) -> None:
    from matplotlib.patches import Rectangle

    top, left, bottom, right = map(float, box)
    frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, lw=width, clip_on=False)
    axes.add_patch(frame)
