"""DeiT (Touvron et al. 2020): a ViT that learnt from a teacher, through a second token beside cls.

Peculiar: that token, and a head of its own for it, whose scores are averaged with those of cls. Checkpoints without it
("facebook/deit-base-patch16-224") say that they are ViTs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from regard.models.config import Settings
from regard.models.families.vit import NAMES, rebuilding, tower
from regard.models.family import Family, Led, Names, Task
from regard.models.vision import VisionModel
from regard.nn.heads import Pooler
from regard.nn.linear import Linear
from regard.nn.vision import ImageLabels, PatchGrid

__all__ = ["FAMILY"]


class Taught(nn.Module):
    """The mean of what two heads say, one of cls, one of the token that learnt from the teacher."""

    def __init__(self, d: int, labels: int) -> None:
        super().__init__()
        self.score, self.taught = Linear(d, labels), Linear(d, labels)

    def forward(self, hidden: Tensor, before: int, grid: PatchGrid) -> Tensor:
        """(B, N, d) → (B, labels)."""
        return cast(Tensor, (self.score(hidden[:, 0]) + self.taught(hidden[:, 1])) / 2)


def names(settings: Settings) -> Names:
    """ViT's, and the second token."""
    return {**NAMES, "tower.embed.distillation": Led("embeddings.distillation_token", 2)}


def build(settings: Settings, task: str) -> VisionModel:
    """The model for a task."""
    d, n = settings.whole("hidden_size"), settings.label_count()
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "classify": lambda: Taught(d, n),
        "classify-cls": lambda: ImageLabels(d, n),
        "rebuild": lambda: rebuilding(settings),
        "none": lambda: None,
    }
    out, function = settings.whole("pooler_output_size", d), settings.text("pooler_act", "tanh")
    pooler = Pooler(d, function, out=out) if task == "none" else False
    made = tower(settings, masked=task == "rebuild", distilled=True)
    return VisionModel(settings, made, pooler=pooler, head=heads[task]())


FAMILY = Family(
    title="DeiT",
    model_type="deit",
    prefix="deit",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="DeiTModel"),
        "classify": Task(
            architecture="DeiTForImageClassificationWithTeacher",
            names={"head.score": "cls_classifier", "head.taught": "distillation_classifier"},
        ),
        "classify-cls": Task(architecture="DeiTForImageClassification", names={"head.score": "classifier"}),
        "rebuild": Task(architecture="DeiTForMaskedImageModeling", names={"head.score": "decoder.0"}),
    },
    harmless=("encoder_stride", "pooler_act", "pooler_output_size"),
    ignored=(r"embeddings\.mask_token$",),
)
