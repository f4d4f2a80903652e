"""Token layouts: what each token of a sequence is, and where in an image it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Frame:
    """Where a model's pixels lie in an image.

    Args:
        image_size: height and width of the image, upright.
        pixels: height and width of what the model reads.
        scale: height and width of one pixel, in pixels of the image.
        corner: where the upper left corner of the pixels lies in the image, down and across; outside it where padded.
    """

    image_size: tuple[int, int]
    pixels: tuple[int, int]
    scale: tuple[float, float]
    corner: tuple[float, float]

    @classmethod
    def whole(cls, height: int, width: int) -> Frame:
        """An image as it is. Raises ValueError for a side below 1."""
        _at_least("height", height, 1)
        _at_least("width", width, 1)
        return cls((height, width), (height, width), (1.0, 1.0), (0.0, 0.0))

    def resized(self, height: int, width: int) -> Frame:
        """The same part of the image in other pixels. Raises ValueError for a side below 1.

        >>> Frame.whole(480, 640).resized(240, 160).scale
        (2.0, 4.0)
        """
        pixels = _at_least("height", height, 1), _at_least("width", width, 1)
        scale = (self.scale[0] * self.pixels[0] / height, self.scale[1] * self.pixels[1] / width)
        return replace(self, pixels=pixels, scale=scale)

    def cropped(self, top: int, left: int, height: int, width: int) -> Frame:
        """A window of these pixels; where it reaches beyond them (top or left below 0, too high, too wide) is padding.

        >>> Frame.whole(480, 640).resized(240, 160).cropped(10, -5, 100, 170).corner
        (20.0, -20.0)

        Raises ValueError for a side below 1.
        """
        pixels = _at_least("height", height, 1), _at_least("width", width, 1)
        corner = (self.corner[0] + top * self.scale[0], self.corner[1] + left * self.scale[1])
        return replace(self, pixels=pixels, corner=corner)

    def boxes(self, boxes: ArrayLike) -> NDArray[np.float64]:
        """Boxes of pixels (…, 4), each top, left, bottom, right, as boxes of the image.

        >>> Frame.whole(480, 640).resized(240, 160).boxes([1, 1, 2, 2]).tolist()
        [2.0, 4.0, 4.0, 8.0]
        """
        scale, corner = np.array(self.scale * 2), np.array(self.corner * 2)
        return np.asarray(boxes, np.float64) * scale + corner  # type: ignore[no-any-return]

    def pixel(self, y: float, x: float) -> tuple[float, float]:
        """The place among the pixels of a place in the image; outside them where the model did not see it.

        >>> Frame.whole(480, 640).resized(240, 160).pixel(2.0, 8.0)
        (1.0, 2.0)
        """
        return (y - self.corner[0]) / self.scale[0], (x - self.corner[1]) / self.scale[1]


KINDS = ("text", "patch", "cls", "distillation", "register", "latent", "padding")
"""What a token can be. latent: a learned query that stands for no place, as in Flamingo's resampler."""

Pair = tuple[int, int]
"""Down and across."""


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """The tokens of one batch entry, in W sequences of N: those that an attention call makes of it, in their order.

    Args:
        kind: (W, N) strings, each one of `KINDS`.
        image: (W, N), which image a token belongs to, −1 for none.
        box: (W, N, 4), top, left, bottom, right of a patch in the model's pixels of its image, NaN for other tokens.

    Raises:
        ValueError: arrays that do not fit each other, a patch without a box or a box without a patch.
    """

    kind: NDArray[np.str_]
    image: NDArray[np.int64]
    box: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name, dtype in (("kind", np.str_), ("image", np.int64), ("box", np.float64)):
            array: NDArray[Any] = np.array(getattr(self, name), dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        kind, image, box = self.kind, self.image, self.box
        if kind.ndim != 2 or image.shape != kind.shape or box.shape != (*kind.shape, 4):
            raise ValueError(
                "a layout needs kind (W, N), image (W, N) and box (W, N, 4), "
                f"got {kind.shape}, {image.shape} and {box.shape}"
            )
        unknown = sorted(set(kind.ravel().tolist()) - set(KINDS))
        if unknown:
            raise ValueError(f"no kind {', '.join(map(repr, unknown))}; there are {', '.join(KINDS)}")
        patch = kind == "patch"
        if (patch & (image < 0)).any() or (image < -1).any():
            raise ValueError("a patch belongs to an image, 0 or more; other tokens may belong to none, which is −1")
        own = box[patch]
        if not np.isfinite(own).all() or not (own[:, 2:] > own[:, :2]).all() or not np.isnan(box[~patch]).all():
            raise ValueError("each patch needs a box: top, left, bottom > top, right > left; all other tokens need NaN")

    @classmethod
    def text(cls, n: int) -> Layout:
        """n tokens of text. Raises ValueError for n below 0."""
        return cls.of(["text"] * _at_least("n", n, 0))

    @classmethod
    def latents(cls, n: int, image: int) -> Layout:
        """n learned queries that gather an image and have no place in it. Raises ValueError for a number below 0."""
        return cls.of(["latent"] * _at_least("n", n, 0), image=_at_least("image", image, 0))

    @classmethod
    def of(cls, kinds: Sequence[str], image: int = -1) -> Layout:
        """Tokens that have no place, by their kinds, of one image (−1 for none).

        >>> Layout.of(["cls", "register", "register"], image=0)
        Layout(1 cls, 2 registers of image 0)

        Raises ValueError for an unknown kind, and for "patch".
        """
        n = len(kinds)
        return cls(np.array([kinds], "U12").reshape(1, n), np.full((1, n), image), np.full((1, n, 4), np.nan))

    @classmethod
    def grid(
        cls,
        rows: int,
        columns: int,
        size: Pair,
        before: Sequence[str] = ("cls",),
        after: Sequence[str] = (),
        image: int = 0,
        pixels: Pair | None = None,
    ) -> Layout:
        """An image's patches row by row, with the tokens before and after them.

        >>> Layout.grid(2, 3, size=(8, 4), before=("cls", "register"), image=1)
        Layout(1 cls, 1 register, 6 patches of image 1)

        Args:
            rows: of patches.
            columns: of patches.
            size: height and width of a patch.
            before: kinds of this image's tokens before the patches.
            after: kinds of those after them.
            image: its number.
            pixels: height and width of the pixels, where the last row or column of patches reaches beyond them.

        Raises:
            ValueError: counts or sizes below 1, an unknown kind, or a patch wholly beyond the pixels.
        """
        box = _boxes(rows, columns, size, pixels).reshape(1, -1, 4)
        n = box.shape[1]
        patches = cls(np.full((1, n), "patch"), np.full((1, n), _at_least("image", image, 0)), box)
        return cls.of(before, image) + patches + cls.of(after, image)

    @classmethod
    def windows(
        cls,
        rows: int,
        columns: int,
        size: Pair,
        window: Pair = (7, 7),
        shift: Pair = (3, 3),
        image: int = 0,
        pixels: Pair | None = None,
    ) -> Layout:
        """A grid of patches cut into windows as Swin does it; the windows row by row, and so the tokens in each.

        >>> Layout.windows(8, 8, size=(4, 4), window=(4, 4), shift=(2, 2))
        Layout(4 windows of 16: 64 patches of image 0)
        >>> Layout.windows(1, 3, size=(4, 4), window=(1, 2), shift=(0, 1)).box[..., 1].tolist()    # left edges
        [[4.0, 8.0], [nan, 0.0]]

        The grid is padded at the bottom and right to whole windows and then rolled up and left by `shift`, so that
        patches of opposite edges share a window: each token keeps the box of the patch that came there. This is the
        order of transformers and torchvision; timm rolls first, which differs where there is padding.

        Args:
            rows: of patches.
            columns: of patches.
            size: of a patch, which doubles with each merging (4, 8, 16, 32 pixels in Swin's four stages).
            window: height and width of a window, in patches.
            shift: down and across, in patches.
            image: its number.
            pixels: as for `grid`; a merged patch at the edge of an odd grid is half padding.

        Raises:
            ValueError: as `grid`, or a shift that is not between 0 and the window.
        """
        for name, w, s in zip(("down", "across"), window, shift, strict=True):
            if w < 1 or not 0 <= s < w:
                raise ValueError(f"a window of {w} with a shift of {s} {name}: need window ≥ 1 and 0 ≤ shift < window")
        boxes = _boxes(rows, columns, size, pixels)
        beyond = ((0, -rows % window[0]), (0, -columns % window[1]), (0, 0))
        padded = np.pad(boxes, beyond, constant_values=np.nan)
        rolled = np.roll(padded, (-shift[0], -shift[1]), axis=(0, 1))
        down, across = rolled.shape[0] // window[0], rolled.shape[1] // window[1]
        cut = rolled.reshape(down, window[0], across, window[1], 4).swapaxes(1, 2)
        box = cut.reshape(down * across, window[0] * window[1], 4)  # (W, N, 4)
        real = ~np.isnan(box[..., 0])
        return cls(np.where(real, "patch", "padding"), np.where(real, _at_least("image", image, 0), -1), box)

    @classmethod
    def stacked(cls, layouts: Sequence[Layout]) -> Layout:
        """Sequences of one length beside each other, such as the windows of one batch entry.

        Raises ValueError for no layout, and for different lengths.
        """
        if len({layout.shape[1] for layout in layouts}) != 1:
            lengths = [layout.shape[1] for layout in layouts]
            raise ValueError(f"sequences beside each other need one length, got {lengths or 'none'}")
        return cls(*(np.concatenate(parts) for parts in zip(*(vars(one).values() for one in layouts), strict=True)))

    def __add__(self, other: Layout) -> Layout:
        """The tokens of both, one after the other. Raises ValueError for different numbers of sequences."""
        if self.shape[0] != other.shape[0]:
            raise ValueError(f"{self} has {self.shape[0]} sequences and {other} has {other.shape[0]}: they do not join")
        parts = zip(vars(self).values(), vars(other).values(), strict=True)
        return Layout(*(np.concatenate(pair, axis=1) for pair in parts))

    @property
    def shape(self) -> Pair:
        """(W, N)."""
        return self.kind.shape[0], self.kind.shape[1]

    def indices(self, kind: str) -> NDArray[np.int64]:
        """(K, 2) window and index of each token of a kind, in order. Raises ValueError for an unknown kind.

        >>> Layout.grid(1, 2, size=(4, 4), before=("cls", "register", "register")).indices("register").tolist()
        [[0, 1], [0, 2]]
        """
        if kind not in KINDS:
            raise ValueError(f"no kind {kind!r}; there are {', '.join(KINDS)}")
        return np.argwhere(self.kind == kind)

    def at(self, y: float, x: float, image: int = 0) -> Pair:
        """Window and index of the patch at a place in the model's pixels; of the first one, where patches overlap.

        >>> Layout.grid(14, 14, size=(16, 16)).at(40.5, 0)
        (0, 29)

        A box holds its upper and left edges. Raises LookupError where no patch of the image lies there.
        """
        top, left, bottom, right = np.moveaxis(self.box, -1, 0)
        inside = (top <= y) & (y < bottom) & (left <= x) & (x < right) & (self.image == image)
        places = np.argwhere(inside)
        if not len(places):
            raise LookupError(f"no patch of image {image} lies at ({y:g}, {x:g}) in the model's pixels: {self}")
        return int(places[0, 0]), int(places[0, 1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        same = np.array_equal(self.kind, other.kind) and np.array_equal(self.image, other.image)
        return same and np.array_equal(self.box, other.box, equal_nan=True)

    def __hash__(self) -> int:
        return hash((self.shape, self.image.tobytes()))

    def __repr__(self) -> str:
        # Runs of alike tokens in order, an image named after its last run; with windows, totals by kind and image.
        tokens = list(zip(self.kind.ravel().tolist(), self.image.ravel().tolist(), strict=True))
        w, n = self.shape
        if w > 1:
            order = sorted(sorted(set(tokens), key=tokens.index), key=lambda token: token[0] == "padding")
            counts = [(kind, image, tokens.count((kind, image))) for kind, image in order]
            parts = [
                _named(kind, count) + (f" of image {image}" if image >= 0 else "") for kind, image, count in counts
            ]
            return f"Layout({w} windows of {n}: {', '.join(parts)})"
        runs = [(kind, image, len(list(run))) for (kind, image), run in groupby(tokens)]
        parts = []
        for i, (kind, image, count) in enumerate(runs):
            last = i + 1 == len(runs) or runs[i + 1][1] != image
            parts.append(_named(kind, count) + (f" of image {image}" if image >= 0 and last else ""))
        return f"Layout({', '.join(parts) or 'no tokens'})"


def _named(kind: str, count: int) -> str:
    plural = {"text": "text", "patch": "patches", "cls": "cls", "distillation": "distillation", "padding": "padding"}
    return f"{count} {kind if count == 1 else plural.get(kind, kind + 's')}"


@dataclass(frozen=True)
class Sides:
    """The layouts of the queries and keys of one attention, and the frames of image 0, image 1, …

    >>> patches = Layout.grid(2, 2, size=(16, 16))
    >>> Sides(Layout.text(5), patches, (Frame.whole(32, 32),)).keys       # words that look at an image
    Layout(1 cls, 4 patches of image 0)

    Raises:
        ValueError: different numbers of sequences, an image without a frame, or a box beyond its image's pixels.
    """

    queries: Layout
    keys: Layout
    frames: tuple[Frame, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "frames", tuple(self.frames))
        if self.queries.shape[0] != self.keys.shape[0]:
            raise ValueError(f"queries and keys have different numbers of sequences: {self.queries} and {self.keys}")
        for layout in (self.queries, self.keys):
            highest = int(layout.image.max(initial=-1))
            if highest >= len(self.frames):
                raise ValueError(
                    f"{layout} has image {highest}, but there are {len(self.frames)} frames: one per image"
                )
            for number, frame in enumerate(self.frames):
                box = layout.box[(layout.image == number) & (layout.kind == "patch")]
                if (box[:, :2] < 0).any() or (box[:, 2:] > frame.pixels).any():
                    raise ValueError(
                        "the patches of image {} fill {:g} × {:g} pixels, but its frame has {} × {}: Layout.grid and "
                        "Layout.windows cut them off at pixels=".format(number, *box[:, 2:].max(0), *frame.pixels)
                    )

    @classmethod
    def patches(
        cls,
        pixels: int | Pair | Frame,
        patch: int | Pair = 16,
        before: Sequence[str] = ("cls",),
        after: Sequence[str] = (),
    ) -> Sides:
        """The self-attention of a ViT: all patches of an image, row by row.

        >>> Sides.patches(224, patch=16).keys
        Layout(1 cls, 196 patches of image 0)

        Args:
            pixels: height and width, one number for a square, or the frame that says where they lie in an image.
            patch: height and width of a patch; pixels left over at the bottom and right are in none.
            before: kinds of the tokens before the patches.
            after: kinds of those after them.

        Raises:
            ValueError: sizes below 1, an unknown kind, or pixels smaller than a patch.
        """
        frame, size = _frame(pixels), _pair(patch)
        rows, columns = (n // _at_least("patch", p, 1) for n, p in zip(frame.pixels, size, strict=True))
        if not rows or not columns:
            high, wide = frame.pixels
            raise ValueError(f"{high} × {wide} pixels hold no patch of {size[0]} × {size[1]}")
        layout = Layout.grid(rows, columns, size, before, after)
        return cls(layout, layout, (frame,))

    @classmethod
    def windows(
        cls, pixels: int | Pair | Frame, *, stage: int, shifted: bool, patch: int | Pair = 4, window: int = 7
    ) -> Sides:
        """The self-attention in the windows of a Swin.

        >>> Sides.windows(224, stage=0, shifted=True).keys
        Layout(64 windows of 49: 3136 patches of image 0)

        Args:
            pixels: as for `patches`.
            stage: how often the grid has been merged.
            shifted: by half a window, as every second block is. Where a side of the grid is no longer than a window,
                the window is as small as that side and nothing is shifted, as in the paper's code and in transformers.
            patch: as for `patches`; but pixels left over are in a patch too, since Swin pads them to a whole one.
            window: side of a window, in patches.

        Raises:
            ValueError: sizes below 1, or a stage below 0.
        """
        frame, size = _frame(pixels), _pair(patch)
        rows, columns = (-(-n // _at_least("patch", p, 1)) for n, p in zip(frame.pixels, size, strict=True))
        for _ in range(_at_least("stage", stage, 0)):
            rows, columns, size = -(-rows // 2), -(-columns // 2), (size[0] * 2, size[1] * 2)
        shift = window // 2 if shifted and min(rows, columns) > window else 0
        window = min(window, rows, columns)
        layout = Layout.windows(rows, columns, size, (window, window), (shift, shift), pixels=frame.pixels)
        return cls(layout, layout, (frame,))


def _boxes(rows: int, columns: int, size: Pair, pixels: Pair | None) -> NDArray[np.float64]:
    """(rows, columns, 4) boxes of a grid of patches, cut off where the pixels end."""
    high, wide = size
    for name, n in (("rows", rows), ("columns", columns), ("size", high), ("size", wide)):
        _at_least(name, n, 1)
    end = (rows * high, columns * wide) if pixels is None else pixels
    if end[0] <= (rows - 1) * high or end[1] <= (columns - 1) * wide:
        raise ValueError(
            f"the last of {rows} × {columns} patches of {high} × {wide} is wholly beyond the {end[0]} × {end[1]} pixels"
        )
    top, left = np.arange(rows) * high, np.arange(columns) * wide
    bottom, right = np.minimum(top + high, end[0]), np.minimum(left + wide, end[1])
    sides = (top[:, None], left, bottom[:, None], right)
    return np.stack([np.broadcast_to(side, (rows, columns)) for side in sides], -1).astype(np.float64)


def _frame(pixels: int | Pair | Frame) -> Frame:
    return pixels if isinstance(pixels, Frame) else Frame.whole(*_pair(pixels))


def _pair(size: int | Pair) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _at_least(name: str, number: int, least: int) -> int:
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number
