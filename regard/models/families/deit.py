"""DeiT (Touvron et al. 2020): a ViT that learnt from a teacher, through a second token beside cls.

Peculiar: that token, and a head of its own for it, whose scores are averaged with those of cls. Checkpoints without it
("facebook/deit-base-patch16-224") say that they are ViTs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from regard.models.config import Config
from regard.models.families.vit import NAMES, rebuilding, tower
from regard.models.family import Family, Names, Squeeze, Task
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


def names(config: Config) -> Names:
    """ViT's, and the second token."""
    return {**NAMES, "tower.embed.distillation": Squeeze("embeddings.distillation_token", 2)}


def build(config: Config, task: str) -> VisionModel:
    """The model for a task."""
    d, n = config.int("hidden_size"), config.num_labels()
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "image-classification": lambda: Taught(d, n),
        "image-classification-cls": lambda: ImageLabels(d, n),
        "masked-image-modeling": lambda: rebuilding(config),
        "feature-extraction": lambda: None,
    }
    out, function = config.int("pooler_output_size", d), config.str("pooler_act", "tanh")
    pooler = Pooler(d, function, out=out) if task == "feature-extraction" else False
    made = tower(config, masked=task == "masked-image-modeling", distilled=True)
    return VisionModel(config, made, pooler=pooler, head=heads[task]())


FAMILY = Family(
    title="DeiT",
    model_type="deit",
    prefix="deit",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="DeiTModel"),
        "image-classification": Task(
            architecture="DeiTForImageClassificationWithTeacher",
            names={"head.score": "cls_classifier", "head.taught": "distillation_classifier"},
        ),
        "image-classification-cls": Task(architecture="DeiTForImageClassification", names={"head.score": "classifier"}),
        "masked-image-modeling": Task(architecture="DeiTForMaskedImageModeling", names={"head.score": "decoder.0"}),
    },
    harmless=("encoder_stride", "pooler_act", "pooler_output_size"),
    ignored=(r"embeddings\.mask_token$",),
)
