"""Swin (Liu et al. 2021): an encoder of pictures that attends within windows of 7 × 7 patches.

Peculiar: every second block shifts the windows by half of one; four neighbours are merged into one token of twice the
width between stages; a learnt number for each offset between two tokens of a window is added to the scores; no cls, the
mean sums a picture up. Pictures of any size and shape are padded to whole patches, grids to whole windows.

transformers writes −100 to the scores of tokens that do not see each other, which leaves e⁻¹⁰⁰ of their weight; here
they are hidden. A grid smaller than a window, which it cannot read, is read with the middle of the table of offsets.
"""

from __future__ import annotations

from torch import nn

from regard.models.family import MAX_LAYERS, Concat, Config, Family, Heads, Names, Squeeze, Task
from regard.models.vision import VisionModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import FeedForward
from regard.nn.vision import ImageLabels, Mean, PatchProjection, PixelReconstruction
from regard.nn.windows import Merging, Stage, WindowBlock, WindowEmbedding, WindowTable, WindowTower

BLOCK, OURS = "encoder.layers.{i}.blocks.{j}.", "tower.stages.{i}.blocks.{j}."
NAMES: Names = {
    "tower.embed.patches": "embeddings.patch_embeddings.projection",
    "tower.embed.norm": "embeddings.norm",
    "tower.embed.hidden": Squeeze("embeddings.mask_token", 2),
    "tower.embed.positions": Squeeze("embeddings.position_embeddings"),
    f"{OURS}attention_norm": f"{BLOCK}layernorm_before",
    f"{OURS}attention.w_qkv": Concat(*(f"{BLOCK}attention.self.{part}" for part in ("query", "key", "value"))),
    f"{OURS}attention.position.table": f"{BLOCK}attention.self.relative_position_bias_table",
    f"{OURS}attention.w_o": f"{BLOCK}attention.output.dense",
    f"{OURS}feed_forward_norm": f"{BLOCK}layernorm_after",
    f"{OURS}feed_forward.w_in": f"{BLOCK}intermediate.dense",
    f"{OURS}feed_forward.w_out": f"{BLOCK}output.dense",
    "tower.stages.{i}.merging.norm": "encoder.layers.{i}.downsample.norm",
    "tower.stages.{i}.merging.w": "encoder.layers.{i}.downsample.reduction",
    "tower.norm": "layernorm",
}


def depths_and_heads(config: Config) -> tuple[list[int], list[int]]:
    """How many blocks each stage has, and how many heads. Raises ValueError where they are of unlike many stages."""
    depths, heads = config.ints("depths", [2, 2, 6, 2]), config.ints("num_heads", [3, 6, 12, 24])
    if len(depths) != len(heads):
        raise ValueError(
            f"{config.where}: depths {depths} is of {len(depths)} stages and num_heads {heads} of {len(heads)}; "
            "each wants one number per stage"
        )
    if sum(depths) > MAX_LAYERS:
        raise ValueError(
            f"{config.where}: depths add up to {sum(depths)}, and no model has more than {MAX_LAYERS} layers"
        )
    return depths, heads


def embedding(config: Config, d: int, *, masked: bool) -> WindowEmbedding:
    """Patches, with positions if config.json says so. masked: with a token for hidden patches."""
    for key in ("patch_norm", "path_norm"):  # the second is a slip of the pen in the published config files
        config.only(key, True)
    patches = PatchProjection(config.int("num_channels", 3), d, config.pair("patch_size", 4), padded=True)
    pixels = config.pair("image_size", 224)
    learnt = pixels if config.bool("use_absolute_embeddings", False) else None
    return WindowEmbedding(patches, learnt, masked=masked, dropout=config.float("hidden_dropout_prob", 0.0))


def tower(config: Config, *, masked: bool) -> WindowTower:
    """Patches and stages. masked: with a token for hidden patches."""
    (depths, heads), width = depths_and_heads(config), config.int("embed_dim", 96)
    window, eps = config.int("window_size", 7), config.eps("layer_norm_eps", 1e-5)
    rate = config.float("drop_path_rate", 0.1)

    def block(stage: int, number: int) -> WindowBlock:
        d, before = width << stage, sum(depths[:stage]) + number
        attention = MultiHeadAttention(
            d,
            heads[stage],
            fused=True,  # one product of narrow vectors is faster than three
            bias=config.bool("qkv_bias", True),
            out_bias=True,
            position=WindowTable(window, heads[stage]),
            dropout=config.float("attention_probs_dropout_prob", 0.0),
        )
        d_ff = int(config.float("mlp_ratio", 4.0) * d)
        return WindowBlock(
            attention,
            FeedForward(d, d_ff, config.str("hidden_act", "gelu")),
            [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)],
            dropout=config.float("hidden_dropout_prob", 0.0),
            left_out=rate * before / max(sum(depths) - 1, 1),  # ever more often, the deeper a block stands
        )

    def stage(number: int) -> Stage:
        blocks = [block(number, i) for i in range(depths[number])]
        return Stage(blocks, window, None if number + 1 == len(depths) else Merging(width << number))

    stages = [stage(number) for number in range(len(depths))]
    norm = nn.LayerNorm(width << len(depths) - 1, eps)
    return WindowTower(embedding(config, width, masked=masked), stages, norm=norm)


def build(config: Config, task: str) -> VisionModel:
    """The model for a task."""
    d = config.int("embed_dim", 96) << len(depths_and_heads(config)[0]) - 1  # of the last stage
    channels = config.int("num_channels", 3)
    heads: Heads = {
        "image-classification": lambda: ImageLabels(d, config.num_labels(), pooling="mean"),
        "masked-image-modeling": lambda: PixelReconstruction(d, config.int("encoder_stride", 32), channels),
    }
    body, head = tower(config, masked=task == "masked-image-modeling"), heads[task]() if task in heads else None
    return VisionModel(config, body, pooler=Mean(), head=head)


FAMILY = Family(
    title="Swin",
    model_type="swin",
    prefix="swin",
    build=build,
    names=NAMES,
    tasks={
        "feature-extraction": Task(architecture="SwinModel"),
        "image-classification": Task(architecture="SwinForImageClassification", names={"head.score": "classifier"}),
        "masked-image-modeling": Task(architecture="SwinForMaskedImageModeling", names={"head.score": "decoder.0"}),
    },
    # What follows from the other config, and what the model says where it is the backbone of another.
    harmless=("encoder_stride", "hidden_size", "num_layers", "out_features", "out_indices", "stage_names"),
    # Older files keep which place of the table an offset has; and the token for hidden patches beside other tasks.
    ignored=(r"\.relative_position_index$", r"\.attn_mask$", r"embeddings\.mask_token$"),
)
