"""The vectors of a picture's patches, where they lie: for detection and segmentation heads, and for looking.

It does not know any family, and nothing of what is made of the vectors.

Axis letters: N tokens of a picture, d width of their vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.frames import Frame
from regard.layouts import Layout
from regard.models.dual_model import DualModel
from regard.models.images.pictures import Source, are_several
from regard.models.model import Model, Result
from regard.models.verbs.picturing import Looked, Several, as_list, look_at, tower_of
from regard.models.vision_model import VisionModel, check_pixels
from regard.models.vision_parts import Grid, VisionTower
from regard.models.window_parts import WindowTower

__all__ = ["Features", "features"]


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """The vectors of one picture.

    >>> layout, frame = Layout.grid(2, 3, size=(4, 4)), Frame.whole(8, 12)
    >>> found = Features("photo.jpg", torch.arange(7.0).reshape(7, 1), Grid(2, 3), layout, frame)
    >>> found
    Features(photo.jpg: 1 cls, 6 patches; vectors (7, 1), map (1, 2, 3))
    >>> found.map[0]
    tensor([[1., 2., 3.],
            [4., 5., 6.]])

    name: of its file.  vectors: (N, d).  grid: rows and columns of the patches.
    layout: what each token is, and the box of each patch in the model's pixels.  frame: where these lie in the picture.
    pooled: (d,) or another width, the tower's own summary; None where it has none, or another layer was asked for. It
      is not the vector that CLIP and BLIP compare with texts: `model.encode_picture` gives that.
    """

    name: str
    vectors: Tensor
    grid: Grid
    layout: Layout
    frame: Frame
    pooled: Tensor | None = None

    @property
    def cls(self) -> Tensor | None:
        """The vector of the token that sums up the picture, (d,); None where there is none (Swin)."""
        at = self.layout.indices("cls")
        return self.vectors[int(at[0, 1])] if len(at) else None

    @property
    def map(self) -> Tensor:
        """The patches' vectors where they lie: (d, rows, columns)."""
        patches = self.vectors[len(self.vectors) - self.grid.rows * self.grid.columns :]
        return patches.T.reshape(-1, *self.grid)

    def __repr__(self) -> str:
        said = str(self.layout).removeprefix("Layout(").removesuffix(" of picture 0)")
        shapes = f"vectors {tuple(self.vectors.shape)}, map {tuple(self.map.shape)}"
        pooled = "" if self.pooled is None else f", pooled {tuple(self.pooled.shape)}"
        return f"Features({self.name}: {said}; {shapes}{pooled})"


@torch.no_grad()
def features(
    model: Model, pictures: Source | Several, *, layer: int | None = None, batch: int = 32
) -> Features | list[Features]:
    """The vectors of a picture, or of each of a list; see `Model.features`."""
    tower = tower_of(model)
    if tower is None:
        raise ValueError(f"features are of pictures, and {model.family.title} looks at none: model.embed is for texts")
    depth = len(tower.stages if isinstance(tower, WindowTower) else tower.blocks)
    number = None if layer is None else _layer(layer, depth)
    found: dict[int, Features] = {}
    for part in look_at(model, as_list(pictures), batch):
        found |= dict(zip(part.numbers, _of(model, tower, part, number), strict=True))
    several = [found[n] for n in range(len(found))]
    return several if are_several(pictures) else several[0]


def _layer(layer: int, depth: int) -> int:
    """0 to depth. Raises ValueError for a layer that is none."""
    if not isinstance(layer, int) or isinstance(layer, bool) or not -depth - 1 <= layer <= depth:
        raise ValueError(
            f"layer must be 0 (what enters the first block) to {depth}, or {-depth - 1} to -1 from the end, or None "
            f"for the model's last vectors; got {layer!r}"
        )
    return layer % (depth + 1)


def _of(model: Model, tower: VisionTower | WindowTower, part: Looked, layer: int | None) -> list[Features]:
    """Of pictures of one size. layer: None for the last."""
    result = _result(model, tower, part.pixels, layer is not None)
    vectors = result.hidden  # (B, N, d)
    if layer is not None:
        assert result.layers is not None
        vectors = result.layers[layer]
    pooled = [None] * len(vectors) if layer is not None or result.pooled is None else list(result.pooled)
    grid, layout = _lies(tower, part.frames[0].pixels, layer)
    rows = zip(part.names, vectors, pooled, part.frames, strict=True)
    return [Features(name, row, grid, layout, frame, summary) for name, row, summary, frame in rows]


def _result(model: Model, tower: VisionTower | WindowTower, pixels: Tensor, every_layer: bool) -> Result:
    """What the tower makes; with a summary where the model has one for pictures."""
    if isinstance(model, (DualModel, VisionModel)):
        result = model(pixels=pixels, every_layer=every_layer)
        assert isinstance(result, Result)
        return result
    patches = tower.embed.patches
    hidden, layers = tower(check_pixels(pixels, patches.channels, patches.least, model), every_layer=every_layer)
    return Result(hidden, layers=layers)


def _lies(tower: VisionTower | WindowTower, pixels: tuple[int, int], layer: int | None) -> tuple[Grid, Layout]:
    """The grid of a layer's patches, and what its tokens are: where patches are merged, a layer has larger ones."""
    patches, before = tower.embed.patches, tower.embed.before
    if isinstance(tower, VisionTower):
        grid = tower.grid(*pixels)
        return grid, Layout.grid(*grid, patches.size, before)
    last = len(tower.stages) - 1  # whose tokens are not merged
    merged = 2 ** (last if layer is None else min(layer, last))
    grid = Grid(*(-(-n // merged) for n in patches.grid(*pixels)))
    return grid, Layout.grid(*grid, (patches.size[0] * merged, patches.size[1] * merged), before, pixels=pixels)
