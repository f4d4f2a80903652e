"""CLIP's tower of texts, stored alone: what diffusion models read their prompts with. See clip.py.

Peculiar: with its last layer (task "encode") it gives vectors that compare with those of pictures.
"""

from __future__ import annotations

from regard.models.config import Settings
from regard.models.dual_encoder import DualEncoder, SimilarityHead
from regard.models.families.clip import HARMLESS, TEXT, text_pooler, text_tower
from regard.models.family import Family, Names, Task, nested
from regard.models.text import TextModel

__all__ = ["FAMILY"]


def names(settings: Settings) -> Names:
    """The tower's weights, for either task."""
    return nested(TEXT, "tower.", "text_model.") | nested(TEXT, "text.", "text_model.")


def build(settings: Settings, task: str) -> TextModel | DualEncoder:
    """The tower; to encode, with the layer that brings its summary to the width shared with pictures."""
    tower, pooler = text_tower(settings), text_pooler(settings)
    if task == "none":
        return TextModel(settings, tower, pooler=pooler)
    head = SimilarityHead(settings.whole("projection_dim", 512), text=settings.whole("hidden_size", 512))
    return DualEncoder(settings, head, text=tower, text_pooler=pooler)


FAMILY = Family(
    title="CLIP's text tower",
    model_type="clip_text_model",
    prefix="",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="CLIPTextModel"),
        "encode": Task(architecture="CLIPTextModelWithProjection", names={"head.text": "text_projection"}),
    },
    moved={r"^(?=embeddings\.|encoder\.|final_)": "text_model."},  # which transformers 5 leaves out, and reads
    ignored=(r"embeddings\.position_ids$",),
    harmless=HARMLESS,
)
