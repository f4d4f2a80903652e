"""DINOv2 (Oquab et al. 2023): a ViT that learnt without labels, for features of every patch; with registers (Darcet
et al. 2023), tokens without a position that hold what the model would else hide in patches of no interest.

Peculiar: what each part adds has a learnt scale; larger models have a gated feed-forward; labels are scored from cls
and the mean of the patches together; pictures of any size, the positions interpolated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from regard.models.families.vit import NAMES as VIT
from regard.models.families.vit import attention
from regard.models.family import Config, Family, Names, Squeeze, Task
from regard.models.vision import VisionModel
from regard.nn.blocks import Block, DropPath, FeedForward
from regard.nn.vision import ExtraTokens, ImageLabels, PatchEmbedding, PatchProjection, VisionTower

LAYER = "encoder.layer.{i}."
NAMES: Names = {
    **VIT,
    "tower.embed.hidden": Squeeze("embeddings.mask_token"),
    "tower.embed.registers": Squeeze("embeddings.register_tokens"),
    "tower.blocks.{i}.attention_norm": f"{LAYER}norm1",
    "tower.blocks.{i}.attention_scale": f"{LAYER}layer_scale1.lambda1",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}norm2",
    "tower.blocks.{i}.feed_forward_scale": f"{LAYER}layer_scale2.lambda1",
}


def names(config: Config) -> Names:
    """ViT's, with scales, and a feed-forward that is named by its kind."""
    gated = config.bool("use_swiglu_ffn", False)
    w_in, w_out = ("weights_in", "weights_out") if gated else ("fc1", "fc2")  # gate over up, one matrix, as ours
    feed_forward = "tower.blocks.{i}.feed_forward."
    return {**NAMES, f"{feed_forward}w_in": f"{LAYER}mlp.{w_in}", f"{feed_forward}w_out": f"{LAYER}mlp.{w_out}"}


def feed_forward(config: Config, d: int) -> FeedForward:
    """Two layers, or gated with two thirds of their width, rounded up to a multiple of 8."""
    inner = int(d * config.float("mlp_ratio", 4.0))
    if not config.bool("use_swiglu_ffn", False):
        return FeedForward(d, inner, config.str("hidden_act", "gelu"))
    config.get("hidden_act")  # the gate's is SiLU, whatever this says
    return FeedForward(d, (int(inner * 2 / 3) + 7) // 8 * 8, "silu", gated=True)


def tower(config: Config, *, registers: int, patch: int) -> VisionTower:
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
        return Block(attention(config), feed_forward(config, d), norms, norm_first=True, dropout=dropped, scales=True)

    blocks = [block() for _ in range(config.layers("num_hidden_layers"))]
    return VisionTower(embed, blocks, norm=nn.LayerNorm(d, eps))


def build(config: Config, task: str, *, registers: bool = False) -> VisionModel:
    """The model for a task."""
    d, n = config.int("hidden_size"), config.num_labels()
    count = config.int("num_register_tokens", 4) if registers else 0
    head = ImageLabels(2 * d, n, pooling="both") if task == "image-classification" else None
    return VisionModel(config, tower(config, registers=count, patch=16 if registers else 14), pooler=True, head=head)


# What the model says where it is the backbone of another; and how scales are drawn before training.
HARMLESS = (
    "apply_layernorm",
    "layerscale_value",
    "out_features",
    "out_indices",
    "reshape_hidden_states",
    "stage_names",
)

FAMILY = Family(
    title="DINOv2",
    model_type="dinov2",
    prefix="dinov2",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="Dinov2Model"),
        "image-classification": Task(architecture="Dinov2ForImageClassification", names={"head.score": "classifier"}),
    },
    harmless=HARMLESS,
)
REGISTERS = replace(
    FAMILY,
    title="DINOv2 with registers",
    model_type="dinov2_with_registers",
    prefix="dinov2_with_registers",
    build=partial(build, registers=True),
    tasks={
        "feature-extraction": Task(architecture="Dinov2WithRegistersModel"),
        "image-classification": Task(
            architecture="Dinov2WithRegistersForImageClassification", names={"head.score": "classifier"}
        ),
    },
)
