"""A model that looks at pictures: one tower, and the head of its task (ViT, DeiT, DINOv2, Swin).

    >>> model = regard.load("google/vit-base-patch16-224")                       # doctest: +SKIP
    >>> model(pixels=torch.zeros(1, 3, 224, 224)).hidden.shape                   # doctest: +SKIP
    torch.Size([1, 197, 768])

It knows no family.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.layouts import Frame, Sides
from regard.models.config import Config
from regard.models.model import Model, Result
from regard.nn.heads import Pooler
from regard.nn.vision import Grid, Mean, NormedFirst, VisionTower
from regard.nn.windows import WindowTower

__all__ = ["VisionModel", "check_form", "check_pixels"]


def check_pixels(pixels: Tensor, channels: int, least: tuple[int, int], model: Model) -> Tensor:
    """Pixels (B, channels, H, W) in the model's dtype.

    least: height and width of the smallest picture that the model can read.
    Raises TypeError or ValueError naming what came, what was expected and what to do.
    """
    check_form(pixels, channels, least)
    model.check_device("pixels", pixels)
    return pixels.to(model.dtype)


def check_form(pixels: Tensor, channels: int, least: tuple[int, int]) -> None:
    """Refuse what are no pixels of a model, wherever they are: TypeError or ValueError, as `check_pixels` says.

    >>> check_form(torch.zeros(1, 3, 8, 8), 3, (4, 4))
    """
    if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
        got = str(pixels.dtype) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise TypeError(
            f"pixels must be a torch tensor of floats, (B, {channels}, H, W), got {got}; "
            "model.preprocessor([…]).pixel_values makes them"
        )
    if pixels.ndim != 4 or pixels.shape[1] != channels or pixels.shape[0] == 0:
        raise ValueError(f"pixels must be (B, {channels}, H, W) with at least one picture, got {tuple(pixels.shape)}")
    if pixels.shape[2] < least[0] or pixels.shape[3] < least[1]:
        raise ValueError(
            f"pixels are {pixels.shape[2]} × {pixels.shape[3]}, and the smallest picture that this model can read is "
            f"{least[0]} × {least[1]}"
        )


class VisionModel(Model):
    """One tower of pictures, its pooler if it has one, and the head of its task if it has one.

    pooler: what makes `.pooled` of all vectors; True takes cls itself (DINOv2).
    head: a module that takes vectors (B, N, d), how many tokens stand before the patches, and the grid.
    """

    kind = "vision"

    def __init__(
        self,
        config: Config,
        tower: VisionTower | WindowTower,
        *,
        pooler: Pooler | NormedFirst | Mean | bool = False,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__(config)
        self.tower, self.head = tower, head
        self.pooler: Pooler | NormedFirst | Mean | None = None if isinstance(pooler, bool) else pooler
        self.first_is_pooled = pooler is True

    def grid(self, pixels: Tensor) -> Grid:
        """How many patches are left of pixels (…, H, W) in `.hidden`: fewer than there were, where they are merged."""
        return self.tower.grid(*pixels.shape[-2:])

    def forward(self, pixels: Tensor, *, hidden: Tensor | None = None, every_layer: bool = False) -> Result:
        """pixels (B, C, H, W) → Result: .hidden (B, N, d), .logits where there is a head.

        Positions are interpolated where the picture is not of the size that they were learnt for.

        hidden: (B, patches) booleans, True where a patch is masked (task "masked-image-modeling").
        every_layer: keep what stood after each block (each stage, where there are stages), before the last norm.
        Raises TypeError or ValueError for pixels and hidden that do not fit the model or each other.
        """
        embed = self.tower.embed
        pixels = check_pixels(pixels, embed.patches.channels, embed.patches.least, self)
        self._check_hidden(pixels, hidden)
        found, layers = self.tower(pixels, hidden=hidden, every_layer=every_layer)
        pooled = found[:, 0] if self.first_is_pooled else None if self.pooler is None else self.pooler(found)
        logits = None if self.head is None else self.head(found, len(embed.before), self.grid(pixels))
        return Result(found, logits, pooled, layers=layers if every_layer else None)

    def map(self, result: Result, pixels: Tensor) -> Tensor:
        """The patches' vectors where they lie: (B, d, rows, columns), for detection and segmentation heads.

        result: what the model gave for these pixels.  pixels: (B, C, H, W), of which the shape alone is read.
        Raises ValueError for pixels of which the model would have made another number of patches.
        """
        patches = result.hidden[:, len(self.tower.embed.before) :].mT  # (B, d, rows·columns)
        rows, columns = self.grid(pixels)
        if patches.shape[2] != rows * columns or len(patches) != len(pixels):
            raise ValueError(
                f"the result has {len(patches)} pictures of {patches.shape[2]} patches, and pixels "
                f"{tuple(pixels.shape)} make {len(pixels)} of {rows} × {columns}: give those the result is of"
            )
        return patches.reshape(*patches.shape[:2], rows, columns)

    def layouts(self, frame: Frame) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for `regard.watch(model, layouts=…)`.

        frame: of a picture, as `model.preprocessor` gives it. A batch of several has one such mapping for each.
        """
        return {f"tower.{path}": sides for path, sides in self.tower.sides(frame).items()}

    def _check_hidden(self, pixels: Tensor, hidden: Tensor | None) -> None:
        if hidden is None:
            return
        if self.tower.embed.hidden is None:
            raise ValueError(
                f"{self.family.title} with task {self.task!r} has no token for hidden patches: "
                "task='masked-image-modeling'"
            )
        grid = self.tower.embed.patches.grid(*pixels.shape[-2:])
        wanted = (pixels.shape[0], grid.rows * grid.columns)
        if not isinstance(hidden, Tensor) or hidden.dtype != torch.bool or hidden.shape != wanted:
            got = f"{hidden.dtype} {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ValueError(f"hidden must be booleans {wanted}, True = hidden patch, got {got}")
