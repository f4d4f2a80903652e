"""ViT (Dosovitskiy et al. 2020): an encoder of pictures, which reads patches of 16 × 16 pixels as words.

Peculiar: a learned token, cls, stands before the patches and sums them up; positions are learnt for one size of picture
and interpolated for others; blocks norm before each part and once more at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import Config
from regard.models.family import Concat, Family, Names, Squeeze, Task
from regard.models.vision import VisionModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, FeedForward
from regard.nn.heads import Pooler
from regard.nn.vision import ImageLabels, PatchEmbedding, PatchProjection, PixelReconstruction, VisionTower

__all__ = ["FAMILY", "NAMES", "rebuilding", "tower"]

LAYER = "encoder.layer.{i}."
NAMES: Names = {
    "tower.embed.cls": Squeeze("embeddings.cls_token", 2),
    "tower.embed.hidden": Squeeze("embeddings.mask_token", 2),
    "tower.embed.positions": Squeeze("embeddings.position_embeddings"),
    "tower.embed.patches": "embeddings.patch_embeddings.projection",
    "tower.blocks.{i}.attention_norm": f"{LAYER}layernorm_before",
    "tower.blocks.{i}.attention.w_qkv": Concat(*(f"{LAYER}attention.attention.{x}" for x in ("query", "key", "value"))),
    "tower.blocks.{i}.attention.w_o": f"{LAYER}attention.output.dense",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}layernorm_after",
    "tower.blocks.{i}.feed_forward.w_in": f"{LAYER}intermediate.dense",
    "tower.blocks.{i}.feed_forward.w_out": f"{LAYER}output.dense",
    "tower.norm": "layernorm",
    "pooler.dense": "pooler.dense",
}


def names(config: Config) -> Names:
    """The body's weights, the same in every ViT."""
    return NAMES


def tower(config: Config, *, masked: bool, distilled: bool = False) -> VisionTower:
    """Patches and blocks. masked: with a token for hidden patches.  distilled: with a second cls, for DeiT."""
    d, eps = config.int("hidden_size"), config.eps("layer_norm_eps", 1e-12)
    dropout = config.float("hidden_dropout_prob", 0.0)
    patches = PatchProjection(config.int("num_channels", 3), d, config.pair("patch_size", 16))
    embed = PatchEmbedding(patches, config.pair("image_size", 224), distilled=distilled, masked=masked, dropout=dropout)

    def block() -> Block:
        attention = MultiHeadAttention(
            d,
            config.int("num_attention_heads"),
            fused=True,
            bias=config.bool("qkv_bias", True),
            out_bias=True,
            dropout=config.float("attention_probs_dropout_prob", 0.0),
        )
        feed_forward = FeedForward(d, config.int("intermediate_size"), config.str("hidden_act", "gelu"))
        norms = [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)]
        return Block(attention, feed_forward, norms, norm_first=True, dropout=dropout)

    blocks = [block() for _ in range(config.layers("num_hidden_layers"))]
    return VisionTower(embed, blocks, norm=nn.LayerNorm(d, eps))


def rebuilding(config: Config) -> PixelReconstruction:
    """The head of masked image modelling."""
    channels = config.int("num_channels", 3)
    return PixelReconstruction(config.int("hidden_size"), config.int("encoder_stride", 16), channels)


def build(config: Config, task: str) -> VisionModel:
    """The model for a task."""
    d = config.int("hidden_size")
    out, function = config.int("pooler_output_size", d), config.str("pooler_act", "tanh")
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "image-classification": lambda: ImageLabels(d, config.num_labels()),
        "masked-image-modeling": lambda: rebuilding(config),
        "feature-extraction": lambda: None,
    }
    pooler = Pooler(d, function, out=out) if task == "feature-extraction" else False
    return VisionModel(config, tower(config, masked=task == "masked-image-modeling"), pooler=pooler, head=heads[task]())


FAMILY = Family(
    title="ViT",
    model_type="vit",
    prefix="vit",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="ViTModel"),
        "image-classification": Task(architecture="ViTForImageClassification", names={"head.score": "classifier"}),
        "masked-image-modeling": Task(architecture="ViTForMaskedImageModeling", names={"head.score": "decoder.0"}),
    },
    harmless=("encoder_stride", "pooler_act", "pooler_output_size"),
    ignored=(r"embeddings\.mask_token$",),  # beside tasks that hide no patch
)
