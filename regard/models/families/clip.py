"""CLIP (Radford et al. 2021): a tower of texts and one of pictures, whose vectors of a picture and its caption agree.

Peculiar: texts are read causally and summed up in their end token; pictures are normed before the first block, and
after the last one only cls is; a layer without bias brings both summaries to one width; likeness is scaled by a learnt
number, stored as its logarithm. Blocks norm before each part. Either tower may be stored alone (that of texts reads the
prompts of diffusion models), with or without the layer that brings its summary to the shared width.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from regard.models.dual_encoder import DualEncoder, SimilarityHead
from regard.models.family import Concat, Config, Family, Names, Task, nested
from regard.models.model import Model
from regard.models.text import TextModel
from regard.models.vision import VisionModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, EndPooler, FeedForward, Tower
from regard.nn.vision import ImageLabels, NormedFirst, PatchEmbedding, PatchProjection, VisionTower

LAYER = "encoder.layers.{i}."
BLOCKS: Names = {
    "blocks.{i}.attention_norm": f"{LAYER}layer_norm1",
    "blocks.{i}.attention.w_qkv": Concat(*(f"{LAYER}self_attn.{x}_proj" for x in "qkv")),
    "blocks.{i}.attention.w_o": f"{LAYER}self_attn.out_proj",
    "blocks.{i}.feed_forward_norm": f"{LAYER}layer_norm2",
    "blocks.{i}.feed_forward.w_in": f"{LAYER}mlp.fc1",
    "blocks.{i}.feed_forward.w_out": f"{LAYER}mlp.fc2",
}
TEXT: Names = {
    **BLOCKS,
    "embed.tokens": "embeddings.token_embedding",
    "embed.positions": "embeddings.position_embedding",
    "norm": "final_layer_norm",
}
VISION: Names = {
    **BLOCKS,
    "embed.cls": "embeddings.class_embedding",
    "embed.patches": "embeddings.patch_embedding",
    "embed.positions": "embeddings.position_embedding.weight",
    "embed.norm": "pre_layrnorm",  # so spelt in every checkpoint
}
NORM = "post_layernorm"  # of cls, after the tower

# Dropout of old, for training; the shared width, where it is not shared; and the scale before training.
HARMLESS = ("dropout", "projection_dim", "logit_scale_init_value")
OLD_END = 2  # an eos_token_id from before anything read it: it is wrong, and a text ends in its largest id


def block(config: Config, d: int, heads: int, inner: int, function: str = "quick_gelu") -> Block:
    """A block of either tower. heads, inner, function: where config.json does not say."""
    eps, function = config.eps("layer_norm_eps", 1e-5), config.str("hidden_act", function)
    heads, dropout = config.int("num_attention_heads", heads), config.float("attention_dropout", 0.0)
    return Block(
        MultiHeadAttention(d, heads, fused=True, dropout=dropout),
        FeedForward(d, config.int("intermediate_size", inner), function),
        [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)],
        norm_first=True,
    )


def text_tower(config: Config) -> Tower:
    """Token embedding, positions and causal blocks."""
    d, eps = config.int("hidden_size", 512), config.eps("layer_norm_eps", 1e-5)
    positions = nn.Embedding(config.int("max_position_embeddings", 77), d)
    embed = Embedding(config.int("vocab_size", 49408), d, positions=positions)
    blocks = [block(config, d, 8, 2048) for _ in range(config.layers("num_hidden_layers", 12))]
    return Tower(embed, blocks, causal=True, norm=nn.LayerNorm(d, eps), last_is_normed=False)


def vision_tower(config: Config) -> VisionTower:
    """Patches and blocks, without a norm at the end; LLaVA's, too."""
    d, eps = config.int("hidden_size", 768), config.eps("layer_norm_eps", 1e-5)
    patches = PatchProjection(config.int("num_channels", 3), d, config.pair("patch_size", 32), bias=False)
    embed = PatchEmbedding(patches, config.pair("image_size", 224), norm=nn.LayerNorm(d, eps))
    return VisionTower(embed, [block(config, d, 12, 3072) for _ in range(config.layers("num_hidden_layers", 12))])


def text_pooler(config: Config) -> EndPooler:
    """The pooler of texts."""
    end = config.int("eos_token_id", 49407, minimum=0)
    return EndPooler(None if end == OLD_END else end)


def vision_pooler(config: Config) -> NormedFirst:
    """The pooler of images."""
    return NormedFirst(nn.LayerNorm(config.int("hidden_size", 768), config.eps("layer_norm_eps", 1e-5)))


def tower_config(config: Config, name: str) -> Config:
    """The config of one tower: of the older key if both are there, as in transformers."""
    config.get(name)
    return config.sub_config(f"{name}_dict" if f"{name}_dict" in config else name)


def build(config: Config, task: str) -> Model:
    """Both towers; to classify pictures, theirs."""
    vision = tower_config(config, "vision_config")
    if task == "image-classification":
        for key in ("text_config", "text_config_dict"):
            config.get(key)  # of a tower that is not there
        scores = ImageLabels(vision.int("hidden_size", 768), config.num_labels(), pooling="mean")
        return VisionModel(config, vision_tower(vision), pooler=vision_pooler(vision), head=scores)
    text, e = tower_config(config, "text_config"), config.int("projection_dim", 512)
    return DualEncoder(
        config,
        SimilarityHead(e, text=text.int("hidden_size", 512), image=vision.int("hidden_size", 768)),
        text=text_tower(text),
        text_pooler=text_pooler(text),
        vision=vision_tower(vision),
        vision_pooler=vision_pooler(vision),
    )


def build_text(config: Config, task: str) -> Model:
    """The tower of texts alone."""
    tower, pooler = text_tower(config), text_pooler(config)
    if task == "feature-extraction":
        return TextModel(config, tower, pooler=pooler)
    head = SimilarityHead(config.int("projection_dim", 512), text=config.int("hidden_size", 512))
    return DualEncoder(config, head, text=tower, text_pooler=pooler)


def build_vision(config: Config, task: str) -> Model:
    """The tower of pictures alone."""
    tower, pooler = vision_tower(config), vision_pooler(config)
    if task == "feature-extraction":
        return VisionModel(config, tower, pooler=pooler)
    head = SimilarityHead(config.int("projection_dim", 512), image=config.int("hidden_size", 768))
    return DualEncoder(config, head, vision=tower, vision_pooler=pooler)


# Both towers, or one: "text" and "vision" beside a head that compares them, "tower" elsewhere.
NAMES: Names = {
    **nested(TEXT, "text.", "text_model."),
    **nested(VISION, "vision.", "vision_model."),
    **nested(VISION, "tower.", "vision_model."),
    **{f"{x}pooler.norm": f"vision_model.{NORM}" for x in ("", "vision_")},
}

FAMILY = Family(
    title="CLIP",
    model_type="clip",
    prefix="",
    build=build,
    names=NAMES,
    tasks={
        "zero-shot-image-classification": Task(
            architecture="CLIPModel",
            names={"head.text": "text_projection", "head.image": "visual_projection", "head.scale": "logit_scale"},
        ),
        "image-classification": Task(
            architecture="CLIPForImageClassification", names={"head.score": "classifier"}, unused=(r"^text_model\.",)
        ),
    },
    ignored=(r"embeddings\.position_ids$",),
    harmless=HARMLESS,
)
TEXT_FAMILY = replace(
    FAMILY,
    title="CLIP's text tower",
    model_type="clip_text_model",
    build=build_text,
    names=nested(TEXT, "tower.", "text_model.") | nested(TEXT, "text.", "text_model."),
    tasks={
        "feature-extraction": Task(architecture="CLIPTextModel"),
        "text-encoding": Task(architecture="CLIPTextModelWithProjection", names={"head.text": "text_projection"}),
    },
    moved={r"^(?=embeddings\.|encoder\.|final_)": "text_model."},  # which transformers 5 leaves out, and reads
)
VISION_FAMILY = replace(
    FAMILY,
    title="CLIP's picture tower",
    model_type="clip_vision_model",
    build=build_vision,
    names={name: theirs for name, theirs in NAMES.items() if not name.startswith("text.")},
    tasks={
        "feature-extraction": Task(architecture="CLIPVisionModel"),
        "image-encoding": Task(architecture="CLIPVisionModelWithProjection", names={"head.image": "visual_projection"}),
    },
    moved={r"^(?=embeddings\.|encoder\.|pre_|post_)": "vision_model."},
)
