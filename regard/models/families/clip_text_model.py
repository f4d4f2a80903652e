"""CLIP's tower of texts, stored alone: what diffusion models read their prompts with. See clip.py.

Peculiar: with its last layer (task "text-encoding") it gives vectors that compare with those of pictures.
"""

from __future__ import annotations

from regard.models.config import Config
from regard.models.dual_encoder import DualEncoder, SimilarityHead
from regard.models.families.clip import HARMLESS, TEXT, text_pooler, text_tower
from regard.models.family import Family, Names, Task, nested
from regard.models.text import TextModel

__all__ = ["FAMILY"]


def names(config: Config) -> Names:
    """The tower's weights, for either task."""
    return nested(TEXT, "tower.", "text_model.") | nested(TEXT, "text.", "text_model.")


def build(config: Config, task: str) -> TextModel | DualEncoder:
    """The tower; to encode, with the layer that brings its summary to the width shared with pictures."""
    tower, pooler = text_tower(config), text_pooler(config)
    if task == "feature-extraction":
        return TextModel(config, tower, pooler=pooler)
    head = SimilarityHead(config.int("projection_dim", 512), text=config.int("hidden_size", 512))
    return DualEncoder(config, head, text=tower, text_pooler=pooler)


FAMILY = Family(
    title="CLIP's text tower",
    model_type="clip_text_model",
    prefix="",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="CLIPTextModel"),
        "text-encoding": Task(architecture="CLIPTextModelWithProjection", names={"head.text": "text_projection"}),
    },
    moved={r"^(?=embeddings\.|encoder\.|final_)": "text_model."},  # which transformers 5 leaves out, and reads
    ignored=(r"embeddings\.position_ids$",),
    harmless=HARMLESS,
)
