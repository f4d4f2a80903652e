"""Swin (Liu et al. 2021): an encoder of pictures that attends within windows of 7 × 7 patches.

Peculiar: every second block shifts the windows by half of one; four neighbours are merged into one token of twice the
width between stages; a learnt number for each offset between two tokens of a window is added to the scores; no cls, the
mean sums a picture up. Pictures of any size and shape are padded to whole patches, grids to whole windows.

transformers writes −100 to the scores of tokens that do not see each other, which leaves e⁻¹⁰⁰ of their weight; here
they are hidden. A grid smaller than a window, which it cannot read, is read with the middle of the table of offsets.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import MOST_LAYERS, Settings
from regard.models.family import Family, Led, Names, Rows, Task
from regard.models.vision import VisionModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import FeedForward
from regard.nn.vision import ImageLabels, Mean, PatchProjection, PixelReconstruction
from regard.nn.windows import Merging, Stage, WindowBlock, WindowEmbedding, WindowTable, WindowTower

__all__ = ["FAMILY", "NAMES", "tower"]

BLOCK, OURS = "encoder.layers.{i}.blocks.{j}.", "tower.stages.{i}.blocks.{j}."
NAMES: Names = {
    "tower.embed.patches": "embeddings.patch_embeddings.projection",
    "tower.embed.norm": "embeddings.norm",
    "tower.embed.hidden": Led("embeddings.mask_token", 2),
    "tower.embed.positions": Led("embeddings.position_embeddings"),
    f"{OURS}attention_norm": f"{BLOCK}layernorm_before",
    f"{OURS}attention.w_qkv": Rows(*(f"{BLOCK}attention.self.{part}" for part in ("query", "key", "value"))),
    f"{OURS}attention.position.table": f"{BLOCK}attention.self.relative_position_bias_table",
    f"{OURS}attention.w_o": f"{BLOCK}attention.output.dense",
    f"{OURS}feed_forward_norm": f"{BLOCK}layernorm_after",
    f"{OURS}feed_forward.w_in": f"{BLOCK}intermediate.dense",
    f"{OURS}feed_forward.w_out": f"{BLOCK}output.dense",
    "tower.stages.{i}.merging.norm": "encoder.layers.{i}.downsample.norm",
    "tower.stages.{i}.merging.w": "encoder.layers.{i}.downsample.reduction",
    "tower.norm": "layernorm",
}


def names(settings: Settings) -> Names:
    """The body's weights, the same in every Swin."""
    return NAMES


def depths_and_heads(settings: Settings) -> tuple[list[int], list[int]]:
    """How many blocks each stage has, and how many heads. Raises ValueError where they are of unlike many stages."""
    depths, heads = settings.wholes("depths", [2, 2, 6, 2]), settings.wholes("num_heads", [3, 6, 12, 24])
    if len(depths) != len(heads):
        raise ValueError(
            f"{settings.where}: depths {depths} is of {len(depths)} stages and num_heads {heads} of {len(heads)}; "
            "each wants one number per stage"
        )
    if sum(depths) > MOST_LAYERS:
        raise ValueError(
            f"{settings.where}: depths add up to {sum(depths)}, and no model has more than {MOST_LAYERS} layers"
        )
    return depths, heads


def last_width(settings: Settings) -> int:
    """Width of the last stage's vectors."""
    return settings.whole("embed_dim", 96) << len(depths_and_heads(settings)[0]) - 1


def embedding(settings: Settings, *, masked: bool) -> WindowEmbedding:
    """Patches, with positions where the settings want them. masked: with a token for hidden patches."""
    for key in ("patch_norm", "path_norm"):  # the second is a slip of the pen in the published config files
        settings.only(key, True)
    channels, d = settings.whole("num_channels", 3), settings.whole("embed_dim", 96)
    patches = PatchProjection(channels, d, settings.pair("patch_size", 4), padded=True)
    pixels = settings.pair("image_size", 224)
    learnt = pixels if settings.flag("use_absolute_embeddings", False) else None
    return WindowEmbedding(patches, learnt, masked=masked, dropout=settings.number("hidden_dropout_prob", 0.0))


def tower(settings: Settings, *, masked: bool) -> WindowTower:
    """Patches and stages. masked: with a token for hidden patches."""
    depths, heads = depths_and_heads(settings)
    window, eps = settings.whole("window_size", 7), settings.eps("layer_norm_eps", 1e-5)
    rate = settings.number("drop_path_rate", 0.1)

    def block(stage: int, number: int) -> WindowBlock:
        d, before = settings.whole("embed_dim", 96) << stage, sum(depths[:stage]) + number
        attention = MultiHeadAttention(
            d,
            heads[stage],
            fused=True,  # one product of narrow vectors is faster than three
            bias=settings.flag("qkv_bias", True),
            out_bias=True,
            position=WindowTable(window, heads[stage]),
            dropout=settings.number("attention_probs_dropout_prob", 0.0),
        )
        d_ff = int(settings.number("mlp_ratio", 4.0) * d)
        return WindowBlock(
            attention,
            FeedForward(d, d_ff, settings.text("hidden_act", "gelu")),
            [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)],
            dropout=settings.number("hidden_dropout_prob", 0.0),
            left_out=rate * before / max(sum(depths) - 1, 1),  # ever more often, the deeper a block stands
        )

    def stage(number: int) -> Stage:
        blocks = [block(number, i) for i in range(depths[number])]
        last = number + 1 == len(depths)
        return Stage(blocks, window, None if last else Merging(settings.whole("embed_dim", 96) << number))

    stages = [stage(number) for number in range(len(depths))]
    return WindowTower(embedding(settings, masked=masked), stages, norm=nn.LayerNorm(last_width(settings), eps))


def build(settings: Settings, task: str) -> VisionModel:
    """The model for a task."""
    d, channels = last_width(settings), settings.whole("num_channels", 3)
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "classify": lambda: ImageLabels(d, settings.label_count(), pooling="mean"),
        "rebuild": lambda: PixelReconstruction(d, settings.whole("encoder_stride", 32), channels),
        "none": lambda: None,
    }
    return VisionModel(settings, tower(settings, masked=task == "rebuild"), pooler=Mean(), head=heads[task]())


FAMILY = Family(
    title="Swin",
    model_type="swin",
    prefix="swin",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="SwinModel"),
        "classify": Task(architecture="SwinForImageClassification", names={"head.score": "classifier"}),
        "rebuild": Task(architecture="SwinForMaskedImageModeling", names={"head.score": "decoder.0"}),
    },
    # What follows from the other settings, and what the model says where it is the backbone of another.
    harmless=("encoder_stride", "hidden_size", "num_layers", "out_features", "out_indices", "stage_names"),
    # Older files keep which place of the table an offset has; and the token for hidden patches beside other tasks.
    ignored=(r"\.relative_position_index$", r"\.attn_mask$", r"embeddings\.mask_token$"),
)
