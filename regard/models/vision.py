"""Image models: one tower and a task head (ViT, DeiT, DINOv2, Swin)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.layouts import Frame, Sides
from regard.models.family import Config
from regard.models.losses import classification_loss, reconstruction_loss
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.nn.blocks import Pooler
from regard.nn.vision import Mean, NormedFirst, PatchGrid, PatchProjection, VisionTower
from regard.nn.windows import WindowTower


def check_pixels(pixel_values: Tensor, patches: PatchProjection, model: Model) -> Tensor:
    """pixel_values (B, C, H, W) in the model's dtype. Raises as `check_form`, and ValueError for another device."""
    check_form(pixel_values, patches)
    model.check_device("pixel_values", pixel_values)
    return pixel_values.to(model.dtype)


def check_form(pixel_values: Tensor, patches: PatchProjection) -> None:
    """Raise TypeError or ValueError unless these are pixels of images that the model can read, on any device."""
    channels, (height, width) = patches.channels, patches.least
    if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
        got = str(pixel_values.dtype) if isinstance(pixel_values, Tensor) else type(pixel_values).__name__
        raise TypeError(
            f"pixel_values must be a torch tensor of floats, (B, {channels}, H, W), got {got}; "
            "model.preprocessor([…]).pixel_values makes them"
        )
    if pixel_values.ndim != 4 or pixel_values.shape[1] != channels or pixel_values.shape[0] == 0:
        raise ValueError(
            f"pixel_values must be (B, {channels}, H, W) with at least one image, got {tuple(pixel_values.shape)}"
        )
    if pixel_values.shape[2] < height or pixel_values.shape[3] < width:
        raise ValueError(
            f"pixel_values are {pixel_values.shape[2]} × {pixel_values.shape[3]}, and the smallest image that this "
            f"model can read is {height} × {width}"
        )


class VisionModel(Model):
    """An image tower, with a pooler and a task head if the task has them.

    pooler: what makes `pooler_output` of all vectors; True takes cls itself (DINOv2).
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

    def grid(self, pixel_values: Tensor) -> PatchGrid:
        """How many patches of pixel_values (…, H, W) are left in `last_hidden_state`, after merging if there is any."""
        return self.tower.grid(*pixel_values.shape[-2:])

    def forward(
        self,
        pixel_values: Tensor,
        *,
        bool_masked_pos: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = False,
        **options: Any,
    ) -> ModelOutput:
        """Read images. Positions are interpolated where an image is not of the size that they were learnt for.

        Args:
            pixel_values: (B, C, H, W).
            bool_masked_pos: (B, patches), True where a patch is masked; masked image modeling, whose loss needs no
                labels.
            labels: (B,) to classify.
            output_hidden_states: return the output of every block (every stage, where there are stages), before the
                last norm.
            options: as `Model.read_options`.
        """
        self.read_options(options)
        embed = self.tower.embed
        pixel_values = check_pixels(pixel_values, embed.patches, self)
        if bool_masked_pos is not None:
            self._check_masked(pixel_values, bool_masked_pos)
        x, hidden_states = self.tower(
            pixel_values, bool_masked_pos=bool_masked_pos, output_hidden_states=bool(output_hidden_states)
        )
        pooler_output = x[:, 0] if self.first_is_pooled else None if self.pooler is None else self.pooler(x)
        logits = None if self.head is None else self.head(x, len(embed.before), self.grid(pixel_values))
        return ModelOutput(
            loss=self._loss(pixel_values, logits, bool_masked_pos, labels),
            logits=logits,
            last_hidden_state=x,
            pooler_output=pooler_output,
            hidden_states=hidden_states,
        )

    def _loss(
        self, pixel_values: Tensor, logits: Tensor | None, bool_masked_pos: Tensor | None, labels: Tensor | None
    ) -> Tensor | None:
        if logits is None or logits.ndim != 2:
            if labels is not None:
                raise ValueError(f"{self.family.title} with task {self.task!r} has no loss of labels")
            # Pixels beyond the last whole patch are not reconstructed.
            if logits is None or bool_masked_pos is None or logits.shape != pixel_values.shape:
                return None
            patches = self.tower.embed.patches.grid(*pixel_values.shape[-2:])
            return reconstruction_loss(logits, pixel_values, bool_masked_pos.reshape(-1, *patches))
        return None if labels is None else classification_loss(logits, labels, self.config.get("problem_type"))

    def layouts(self, frame: Frame) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for `regard.watch(model, layouts=…)`.

        frame: of one image, as `model.preprocessor` gives it; a batch has a mapping for each.
        """
        return {f"tower.{path}": sides for path, sides in self.tower.sides(frame).items()}

    def _check_masked(self, pixel_values: Tensor, bool_masked_pos: Tensor) -> None:
        if self.tower.embed.hidden is None:
            raise ValueError(
                f"{self.family.title} with task {self.task!r} has no token for masked patches: "
                "task='masked-image-modeling'"
            )
        grid = self.tower.embed.patches.grid(*pixel_values.shape[-2:])
        wanted = (pixel_values.shape[0], grid.rows * grid.columns)
        if bool_masked_pos.dtype != torch.bool or bool_masked_pos.shape != wanted:
            got = f"{bool_masked_pos.dtype} {tuple(bool_masked_pos.shape)}"
            raise ValueError(f"bool_masked_pos must be booleans {wanted}, True = masked patch, got {got}")
