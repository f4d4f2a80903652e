"""ViT (Dosovitskiy et al. 2020): an encoder of pictures, which reads patches of 16 × 16 pixels as words.

Peculiar: a learned token, cls, stands before the patches and sums them up; positions are learnt for one size of picture
and interpolated for others; blocks norm before each part and once more at the end. DeiT (Touvron et al. 2020) learnt
from a teacher through a second token beside cls, with a head of its own whose scores are averaged with those of cls;
checkpoints without it ("facebook/deit-base-patch16-224") say that they are ViTs.

`"use_mean_pooling": true` in config.json classifies from the mean of the patches instead of cls (timm's
global_pool="avg"): regard.build("vit", …, use_mean_pooling=True). transformers' ViT does not read the key.

DINOv2 (Oquab et al. 2023): a ViT that learnt without labels, for features of every patch; with registers (Darcet
et al. 2023), tokens without a position that hold what the model would else hide in patches of no interest.

Peculiar: what each part adds has a learnt scale; larger models have a gated feed-forward; labels are scored from cls
and the mean of the patches together; pictures of any size, the positions interpolated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

from torch import Tensor, nn

from regard.models.family import Concat, Config, Family, Heads, Names, Squeeze, Task
from regard.models.vision import VisionModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, DropPath, FeedForward, Pooler
from regard.nn.projections import Linear
from regard.nn.vision import (
    ExtraTokens,
    ImageLabels,
    PatchEmbedding,
    PatchGrid,
    PatchProjection,
    PixelReconstruction,
    Pooling,
    VisionTower,
)

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


def attention(config: Config) -> MultiHeadAttention:
    """The self-attention of a block; DINOv2 has the same."""
    return MultiHeadAttention(
        config.int("hidden_size"),
        config.int("num_attention_heads"),
        fused=True,
        bias=config.bool("qkv_bias", True),
        out_bias=True,
        dropout=config.float("attention_probs_dropout_prob", 0.0),
    )


def tower(config: Config, *, masked: bool, distilled: bool = False) -> VisionTower:
    """Patches and blocks. masked: with a token for hidden patches.  distilled: with a second cls, for DeiT."""
    d, eps = config.int("hidden_size"), config.eps("layer_norm_eps", 1e-12)
    dropout = config.float("hidden_dropout_prob", 0.0)
    patches = PatchProjection(config.int("num_channels", 3), d, config.pair("patch_size", 16))
    tokens = ExtraTokens(distilled=distilled, masked=masked)
    embed = PatchEmbedding(patches, config.pair("image_size", 224), tokens=tokens, dropout=dropout)

    def block() -> Block:
        feed_forward = FeedForward(d, config.int("intermediate_size"), config.str("hidden_act", "gelu"))
        norms = [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)]
        return Block(attention(config), feed_forward, norms, norm_first=True, dropout=dropout)

    blocks = [block() for _ in range(config.layers("num_hidden_layers"))]
    return VisionTower(embed, blocks, norm=nn.LayerNorm(d, eps))


class AveragedLabels(nn.Module):
    """The mean of what two heads say, one of cls, one of the token that learnt from the teacher (DeiT)."""

    def __init__(self, d: int, labels: int) -> None:
        super().__init__()
        self.score, self.taught = Linear(d, labels), Linear(d, labels)

    def forward(self, hidden: Tensor, before: int, grid: PatchGrid) -> Tensor:
        """(B, N, d) → (B, labels)."""
        return cast(Tensor, (self.score(hidden[:, 0]) + self.taught(hidden[:, 1])) / 2)


def build(config: Config, task: str, *, distilled: bool = False) -> VisionModel:
    """The model for a task."""
    d, n = config.int("hidden_size"), config.num_labels()
    out, function = config.int("pooler_output_size", d), config.str("pooler_act", "tanh")
    stride, channels = config.int("encoder_stride", 16), config.int("num_channels", 3)
    # The key is that of BEiT in transformers, whose own ViT always reads cls.
    pooling: Pooling = "mean" if not distilled and config.bool("use_mean_pooling", False) else "cls"
    heads: Heads = {
        "image-classification": lambda: AveragedLabels(d, n) if distilled else ImageLabels(d, n, pooling=pooling),
        "image-classification-cls": lambda: ImageLabels(d, n),
        "masked-image-modeling": lambda: PixelReconstruction(d, stride, channels),
    }
    pooler = Pooler(d, function, out=out) if task == "feature-extraction" else False
    body = tower(config, masked=task == "masked-image-modeling", distilled=distilled)
    return VisionModel(config, body, pooler=pooler, head=heads[task]() if task in heads else None)


FAMILY = Family(
    title="ViT",
    model_type="vit",
    prefix="vit",
    build=build,
    names=NAMES,
    tasks={
        "feature-extraction": Task(architecture="ViTModel"),
        "image-classification": Task(architecture="ViTForImageClassification", names={"head.score": "classifier"}),
        "masked-image-modeling": Task(architecture="ViTForMaskedImageModeling", names={"head.score": "decoder.0"}),
    },
    harmless=("encoder_stride", "pooler_act", "pooler_output_size"),
    ignored=(r"embeddings\.mask_token$",),  # beside tasks that hide no patch
)
DEIT = replace(
    FAMILY,
    title="DeiT",
    model_type="deit",
    prefix="deit",
    build=partial(build, distilled=True),
    names={**NAMES, "tower.embed.distillation": Squeeze("embeddings.distillation_token", 2)},
    tasks={
        "feature-extraction": Task(architecture="DeiTModel"),
        "image-classification": Task(
            architecture="DeiTForImageClassificationWithTeacher",
            names={"head.score": "cls_classifier", "head.taught": "distillation_classifier"},
        ),
        "image-classification-cls": Task(architecture="DeiTForImageClassification", names={"head.score": "classifier"}),
        "masked-image-modeling": Task(architecture="DeiTForMaskedImageModeling", names={"head.score": "decoder.0"}),
    },
)


# -------------------------------------------------------------------------------------------------------------- DINOv2


DINO_NAMES: Names = {
    **NAMES,
    "tower.embed.hidden": Squeeze("embeddings.mask_token"),
    "tower.embed.registers": Squeeze("embeddings.register_tokens"),
    "tower.blocks.{i}.attention_norm": f"{LAYER}norm1",
    "tower.blocks.{i}.attention_scale": f"{LAYER}layer_scale1.lambda1",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}norm2",
    "tower.blocks.{i}.feed_forward_scale": f"{LAYER}layer_scale2.lambda1",
}


def dino_names(config: Config) -> Names:
    """ViT's, with scales, and a feed-forward that is named by its kind."""
    gated = config.bool("use_swiglu_ffn", False)
    w_in, w_out = ("weights_in", "weights_out") if gated else ("fc1", "fc2")  # gate over up, one matrix, as ours
    feed_forward = "tower.blocks.{i}.feed_forward."
    return {**DINO_NAMES, f"{feed_forward}w_in": f"{LAYER}mlp.{w_in}", f"{feed_forward}w_out": f"{LAYER}mlp.{w_out}"}


def dino_feed_forward(config: Config, d: int) -> FeedForward:
    """Two layers, or gated with two thirds of their width, rounded up to a multiple of 8."""
    inner = int(d * config.float("mlp_ratio", 4.0))
    if not config.bool("use_swiglu_ffn", False):
        return FeedForward(d, inner, config.str("hidden_act", "gelu"))
    config.get("hidden_act")  # the gate's is SiLU, whatever this says
    return FeedForward(d, (int(inner * 2 / 3) + 7) // 8 * 8, "silu", gated=True)


def dino_tower(config: Config, *, registers: int, patch: int) -> VisionTower:
    """Patches and blocks. registers: how many.  patch: its size where config.json says nothing."""
    d, eps = config.int("hidden_size"), config.eps("layer_norm_eps", 1e-6)
    patches = PatchProjection(config.int("num_channels", 3), d, config.pair("patch_size", patch))
    embed = PatchEmbedding(
        patches,
        config.pair("image_size", 224),
        tokens=ExtraTokens(registers=registers, masked=config.bool("use_mask_token", True)),
        antialias=registers > 0,
        dropout=config.float("hidden_dropout_prob", 0.0),
    )

    def block() -> Block:
        norms = [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)]
        dropped = DropPath(config.float("drop_path_rate", 0.0))
        return Block(
            attention(config), dino_feed_forward(config, d), norms, norm_first=True, dropout=dropped, scales=True
        )

    blocks = [block() for _ in range(config.layers("num_hidden_layers"))]
    return VisionTower(embed, blocks, norm=nn.LayerNorm(d, eps))


def dino_build(config: Config, task: str, *, registers: bool = False) -> VisionModel:
    """The model for a task."""
    d, n = config.int("hidden_size"), config.num_labels()
    count = config.int("num_register_tokens", 4) if registers else 0
    head = ImageLabels(2 * d, n, pooling="both") if task == "image-classification" else None
    return VisionModel(
        config, dino_tower(config, registers=count, patch=16 if registers else 14), pooler=True, head=head
    )


# What the model says where it is the backbone of another; and how scales are drawn before training.
DINO_HARMLESS = (
    "apply_layernorm",
    "layerscale_value",
    "out_features",
    "out_indices",
    "reshape_hidden_states",
    "stage_names",
)

DINOV2 = Family(
    title="DINOv2",
    model_type="dinov2",
    prefix="dinov2",
    build=dino_build,
    names=dino_names,
    tasks={
        "feature-extraction": Task(architecture="Dinov2Model"),
        "image-classification": Task(architecture="Dinov2ForImageClassification", names={"head.score": "classifier"}),
    },
    harmless=DINO_HARMLESS,
)
REGISTERS = replace(
    DINOV2,
    title="DINOv2 with registers",
    model_type="dinov2_with_registers",
    prefix="dinov2_with_registers",
    build=partial(dino_build, registers=True),
    tasks={
        "feature-extraction": Task(architecture="Dinov2WithRegistersModel"),
        "image-classification": Task(
            architecture="Dinov2WithRegistersForImageClassification", names={"head.score": "classifier"}
        ),
    },
)
