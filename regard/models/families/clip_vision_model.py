"""CLIP's tower of pictures, stored alone. See clip.py.

Peculiar: with its last layer (task "image-encoding") it gives vectors that compare with those of texts.
"""

from __future__ import annotations

from regard.models.config import Config
from regard.models.dual_encoder import DualEncoder, SimilarityHead
from regard.models.families.clip import HARMLESS, NORM, VISION, vision_pooler, vision_tower
from regard.models.family import Family, Names, Task, nested
from regard.models.vision import VisionModel

__all__ = ["FAMILY"]


def names(config: Config) -> Names:
    """The tower's weights, for either task."""
    towers = nested(VISION, "tower.", "vision_model.") | nested(VISION, "vision.", "vision_model.")
    return {**towers, **{f"{x}pooler.norm": f"vision_model.{NORM}" for x in ("", "vision_")}}


def build(config: Config, task: str) -> VisionModel | DualEncoder:
    """The tower; to encode, with the layer that brings its summary to the width shared with texts."""
    tower, pooler = vision_tower(config), vision_pooler(config)
    if task == "feature-extraction":
        return VisionModel(config, tower, pooler=pooler)
    head = SimilarityHead(config.int("projection_dim", 512), picture=config.int("hidden_size", 768))
    return DualEncoder(config, head, vision=tower, vision_pooler=pooler)


FAMILY = Family(
    title="CLIP's picture tower",
    model_type="clip_vision_model",
    prefix="",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="CLIPVisionModel"),
        "image-encoding": Task(
            architecture="CLIPVisionModelWithProjection", names={"head.picture": "visual_projection"}
        ),
    },
    moved={r"^(?=embeddings\.|encoder\.|pre_|post_)": "vision_model."},  # which transformers 5 leaves out, and reads
    ignored=(r"embeddings\.position_ids$",),
    harmless=HARMLESS,
)
