"""ViT (Dosovitskiy et al. 2020): an encoder of pictures, which reads patches of 16 × 16 pixels as words.

Peculiar: a learned token, cls, stands before the patches and sums them up; positions are learnt for one size of picture
and interpolated for others; blocks norm before each part and once more at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import Settings
from regard.models.family import Family, Led, Names, Rows, Task
from regard.models.vision import VisionModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, FeedForward
from regard.nn.heads import Pooler
from regard.nn.vision import ImageLabels, PatchEmbedding, PatchProjection, PixelReconstruction, VisionTower

__all__ = ["FAMILY", "NAMES", "rebuilding", "tower"]

LAYER = "encoder.layer.{i}."
NAMES: Names = {
    "tower.embed.cls": Led("embeddings.cls_token", 2),
    "tower.embed.hidden": Led("embeddings.mask_token", 2),
    "tower.embed.positions": Led("embeddings.position_embeddings"),
    "tower.embed.patches": "embeddings.patch_embeddings.projection",
    "tower.blocks.{i}.attention_norm": f"{LAYER}layernorm_before",
    "tower.blocks.{i}.attention.w_qkv": Rows(*(f"{LAYER}attention.attention.{x}" for x in ("query", "key", "value"))),
    "tower.blocks.{i}.attention.w_o": f"{LAYER}attention.output.dense",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}layernorm_after",
    "tower.blocks.{i}.feed_forward.w_in": f"{LAYER}intermediate.dense",
    "tower.blocks.{i}.feed_forward.w_out": f"{LAYER}output.dense",
    "tower.norm": "layernorm",
    "pooler.dense": "pooler.dense",
}


def names(settings: Settings) -> Names:
    """The body's weights, the same in every ViT."""
    return NAMES


def tower(settings: Settings, *, masked: bool, distilled: bool = False) -> VisionTower:
    """Patches and blocks. masked: with a token for hidden patches.  distilled: with a second cls, for DeiT."""
    d, eps = settings.whole("hidden_size"), settings.eps("layer_norm_eps", 1e-12)
    dropout = settings.number("hidden_dropout_prob", 0.0)
    patches = PatchProjection(settings.whole("num_channels", 3), d, settings.pair("patch_size", 16))
    embed = PatchEmbedding(
        patches, settings.pair("image_size", 224), distilled=distilled, masked=masked, dropout=dropout
    )

    def block() -> Block:
        attention = MultiHeadAttention(
            d,
            settings.whole("num_attention_heads"),
            fused=True,
            bias=settings.flag("qkv_bias", True),
            out_bias=True,
            dropout=settings.number("attention_probs_dropout_prob", 0.0),
        )
        feed_forward = FeedForward(d, settings.whole("intermediate_size"), settings.text("hidden_act", "gelu"))
        norms = [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)]
        return Block(attention, feed_forward, norms, norm_first=True, dropout=dropout)

    blocks = [block() for _ in range(settings.layers("num_hidden_layers"))]
    return VisionTower(embed, blocks, norm=nn.LayerNorm(d, eps))


def rebuilding(settings: Settings) -> PixelReconstruction:
    """The head of masked image modelling."""
    channels = settings.whole("num_channels", 3)
    return PixelReconstruction(settings.whole("hidden_size"), settings.whole("encoder_stride", 16), channels)


def build(settings: Settings, task: str) -> VisionModel:
    """The model for a task."""
    d = settings.whole("hidden_size")
    out, function = settings.whole("pooler_output_size", d), settings.text("pooler_act", "tanh")
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "classify": lambda: ImageLabels(d, settings.label_count()),
        "rebuild": lambda: rebuilding(settings),
        "none": lambda: None,
    }
    pooler = Pooler(d, function, out=out) if task == "none" else False
    return VisionModel(settings, tower(settings, masked=task == "rebuild"), pooler=pooler, head=heads[task]())


FAMILY = Family(
    title="ViT",
    model_type="vit",
    prefix="vit",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="ViTModel"),
        "classify": Task(architecture="ViTForImageClassification", names={"head.score": "classifier"}),
        "rebuild": Task(architecture="ViTForMaskedImageModeling", names={"head.score": "decoder.0"}),
    },
    harmless=("encoder_stride", "pooler_act", "pooler_output_size"),
    ignored=(r"embeddings\.mask_token$",),  # beside tasks that hide no patch
)
