"""LLaVA (Liu et al. 2023): a LLaMA that reads a picture as words, in the place of a token in its text.

Peculiar: the patches are those of CLIP, without cls, after its last block but one; a projector of two layers makes of
each a vector that LLaMA could have read as a word. Nothing else is new: what follows is LLaMA.

Idefics (Laurençon et al. 2023): Flamingo (Alayrac et al. 2022) rebuilt in the open, on LLaMA and CLIP's tower.
Peculiar: before every few blocks of LLaMA, words look at pictures through a gate; a resampler makes of any picture the
same small number of vectors for them to look at; queries and keys of looks may be normed head by head; tokens added to
the vocabulary have tables of their own, below LLaMA's. What is frozen in training (freeze_…) is not frozen here.
"""

from __future__ import annotations

from torch import nn

from regard.generation.config import read_eos
from regard.models.families import clip, llama
from regard.models.family import Concat, Config, Family, Names, Squeeze, Task, nested
from regard.models.flamingo import FlamingoModel
from regard.models.vision_language import Projector, VisionLanguageModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import FeedForward, LanguageHead
from regard.nn.projections import Joined, JoinedTable
from regard.nn.vision import (
    GatedLook,
    NormedFirst,
    PatchEmbedding,
    PatchProjection,
    Resampler,
    ResamplerBlock,
    VisionTower,
)

NAMES: Names = {
    **nested(clip.VISION, "vision.", "vision_tower.vision_model."),
    "vision_pooler.norm": f"vision_tower.vision_model.{clip.NORM}",
    **nested(llama.NAMES, "text.", "language_model.model."),
    "text.head.words": "language_model.lm_head",
}

USUAL = 32000  # the placeholder where config.json names none: the first id after LLaMA's


def names(config: Config) -> Names:
    """All weights. The projector's are named one by one, so that biases which config.json denies have no place."""
    leaves = ("weight", "bias") if config.bool("multimodal_projector_bias", True) else ("weight",)
    layers = {"w_in": "linear_1", "w_out": "linear_2"}
    projector = {f"projector.{x}.{y}": f"multi_modal_projector.{layers[x]}.{y}" for x in layers for y in leaves}
    return {**NAMES, **projector}


def build(config: Config, task: str) -> VisionLanguageModel:
    """The model for a task."""
    vision, text = config.sub_config("vision_config"), config.sub_config("text_config")
    vision.only("model_type", "clip_vision_model")
    text.only("model_type", "llama")
    config.only("vision_feature_select_strategy", "default", "full")
    tied = config.tie_word_embeddings(False) or text.tie_word_embeddings(False)
    text_task = "text-generation" if task == "image-text-to-text" else task
    reader = llama.decoder(text, text_task, tied=tied)
    reader.family, reader.task = llama.FAMILY, text_task
    tower, layers = clip.vision_tower(vision), feature_layers(config)
    projector = Projector(
        len(layers) * tower.embed.cls.shape[0],
        reader.tower.embed.tokens.embedding_dim,
        config.str("projector_hidden_act", "gelu"),
        bias=config.bool("multimodal_projector_bias", True),
    )
    return VisionLanguageModel(
        config,
        tower,
        projector,
        reader,
        placeholder=placeholder(config, reader.vocabulary),
        layers=layers,
        full=config.str("vision_feature_select_strategy", "default") == "full",
        vision_pooler=clip.vision_pooler(vision),
    )


def placeholder(config: Config, vocabulary: int) -> int:
    """The token that stands for an image: image_token_index, or image_token_id, as `transformers` 5 also calls it."""
    index, number = config.get("image_token_index"), config.get("image_token_id")
    if index is not None and number is not None:
        config.only("image_token_id", index)
    key = "image_token_id" if index is None and number is not None else "image_token_index"
    usual = USUAL if vocabulary > USUAL else None  # in a smaller vocabulary it is missing
    return config.int(key, usual, minimum=0, maximum=vocabulary - 1)


def feature_layers(config: Config) -> list[int]:
    """After which blocks the image's vectors are taken. Raises ValueError unless it is an integer or a list of them."""
    value = config.get("vision_feature_layer", -2)
    layers = value if isinstance(value, list) else [value]
    if not layers or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise ValueError(f"{config.where}: vision_feature_layer must be an integer or a list of them, got {value!r}")
    return layers


FAMILY = Family(
    title="LLaVA",
    model_type="llava",
    prefix="",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="LlavaModel"),
        "image-text-to-text": Task(
            architecture="LlavaForConditionalGeneration",
            copies={"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
        ),
    },
    # NAMES are those of the hub's files. transformers 5 has others in memory, and writes some of them.
    moved={
        r"^model\.(?=language_model\.|vision_tower\.|multi_modal_projector\.)": "",
        r"^lm_head\.": "language_model.lm_head.",
        r"^language_model\.(?!model\.|lm_head\.)": "language_model.model.",
        r"^vision_tower\.(?!vision_model\.)": "vision_tower.vision_model.",
    },
    ignored=(r"\.rotary_emb\.inv_freq$", r"\.embeddings\.position_ids$"),
    harmless=("ignore_index", "image_seq_length", "projection_dim", "vocab_size"),
)


# ------------------------------------------------------------------------------------------------------------- Idefics


LOOK: Names = {
    "attention_norm": "input_layernorm",
    **{f"attention.w_{x}": f"cross_attn.{x}_proj" for x in "qkvo"},
    **{f"attention.{x}_norm": f"cross_attn.{x}_layer_norm" for x in "qk"},
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w_in": Concat("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.w_out": "mlp.down_proj",
}
GATES = {"attention_gate": "alpha_cross_attn", "feed_forward_gate": "alpha_dense"}
GATHER: Names = {
    "image_norm": "0.context_layer_norm",
    "attention_norm": "0.latents_layer_norm",
    **{f"attention.w_{x}": f"0.{x}_proj" for x in "qkv"},
    "attention.w_o": "0.output_proj",
    **{f"attention.{x}_norm": f"0.{x}_layer_norm" for x in "qk"},
    "feed_forward_norm": "1.ln",
    "feed_forward.w_in": "1.fc",
    "feed_forward.w_out": "1.c_proj",
}
IDEFICS_NAMES: Names = {
    **llama.NAMES,
    "tower.embed.tokens": Concat("embed_tokens", "embed_tokens.additional_embedding"),
    **nested(LOOK, "looks.{i}.", "gated_cross_attn_layers.{i}."),
    **nested(clip.VISION, "vision.", "vision_model."),
    "vision_pooler.norm": f"vision_model.{clip.NORM}",
    **nested(GATHER, "resampler.blocks.{i}.", "perceiver_resampler.blocks.{i}."),
    "resampler.latents": "perceiver_resampler.latents",
    "resampler.norm": "perceiver_resampler.layer_norm",
}
STRETCH = 0.1  # of a patch: how positions are drawn out for pictures of another size

# What is frozen, first values of gates, and what nothing reads, among it a second use_resampler.
HARMLESS = (
    "alpha_initializer", "alphas_initializer_range", "cross_layer_activation_function", "ffn_dim", "freeze_lm_head",
    "freeze_text_layers", "freeze_text_module_exceptions", "freeze_vision_layers", "freeze_vision_module_exceptions",
    "max_new_tokens", "max_sequence_length", "use_resampler", "vision_model_name", "word_embed_proj_dim",
)  # fmt: skip
NOT_OF_LLAMA = {"attention_bias": False, "mlp_bias": False, "head_dim": None, "num_key_value_heads": None}


def idefics_names(config: Config) -> Names:
    """The body's weights; a gate for each number of a vector is stored with two axes before it."""
    wide = config.str("alpha_type", "float") == "vector"
    gates = {ours: Squeeze(theirs, 2) if wide else theirs for ours, theirs in GATES.items()}
    return {**IDEFICS_NAMES, **nested(gates, "looks.{i}.", "gated_cross_attn_layers.{i}.")}


def idefics_vision(config: Config) -> VisionTower:
    """Patches and blocks, as CLIP's."""
    d, eps = config.int("embed_dim", 768), config.eps("layer_norm_eps", 1e-5)
    patches = PatchProjection(config.int("num_channels", 3), d, config.pair("patch_size", 14), bias=False)
    embed = PatchEmbedding(patches, config.pair("image_size", 224), stretch=STRETCH, norm=nn.LayerNorm(d, eps))
    blocks = [clip.block(config, d, 16, 5120, "gelu") for _ in range(config.layers("num_hidden_layers", 32))]
    return VisionTower(embed, blocks)


def resampler(config: Config, d: int) -> Resampler:
    """The resampler of image vectors, d wide."""
    heads, size = config.int("resampler_n_heads", 16), config.int("resampler_head_dim", 96)
    normed = config.bool("qk_layer_norms_perceiver", False)

    def block() -> ResamplerBlock:
        norms = (nn.LayerNorm(size), nn.LayerNorm(size)) if normed else None
        attention = MultiHeadAttention(d, heads, head_dim=size, bias=False, head_norms=norms)
        return ResamplerBlock(d, attention, FeedForward(d, 4 * d, "relu", bias=False))

    blocks = [block() for _ in range(config.layers("resampler_depth", 6))]
    return Resampler(config.int("resampler_n_latents", 64), d, blocks)


def look(config: Config, d: int, d_image: int) -> GatedLook:
    """Cross-attention of tokens, d wide, to images."""
    heads, eps = config.int("num_attention_heads", 32), config.eps("rms_norm_eps", 1e-6)
    dropout, size = config.float("dropout", 0.0), d // heads
    norms = (nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)) if config.bool("qk_layer_norms", False) else None
    inner, function = config.int("intermediate_size", 11008), config.str("hidden_act", "silu")
    return GatedLook(
        MultiHeadAttention(d, heads, d_context=d_image, bias=False, head_norms=norms, dropout=dropout),
        FeedForward(d, inner, function, gated=True, bias=False),
        [nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)],
        gates=d if config.str("alpha_type", "float") == "vector" else 1,
        dropout=dropout,
    )


def build_idefics(config: Config, task: str) -> FlamingoModel:
    """The model for a task."""
    config.only("alpha_type", "float", "vector")
    for key, only in NOT_OF_LLAMA.items():
        config.only(key, only)
    text_task = "text-generation" if task == "image-text-to-text" else task
    text = llama.decoder(config, text_task, tied=config.tie_word_embeddings(False))
    dropout = config.float("dropout", 0.0)
    for block in text.tower.depth:
        block.attention.dropout, block.dropout = dropout, nn.Dropout(dropout)
    words, added = config.int("vocab_size", 32000), config.int("additional_vocab_size", 0, minimum=0)
    rows, d = (words, added) if added else (words,), text.tower.embed.tokens.embedding_dim
    text.tower.embed.tokens = JoinedTable(rows, d)
    if isinstance(text.head, LanguageHead) and text.head.words is not None:
        text.head.words = Joined(d, rows, bias=False)
    depth, interval = len(text.tower.depth), config.int("cross_layer_interval", 1)
    if depth % interval:
        raise ValueError(f"{config.where}: {depth} layers do not divide by a cross_layer_interval of {interval}")
    seeing = config.sub_config("vision_config")
    e, eps = seeing.int("embed_dim", 768), seeing.eps("layer_norm_eps", 1e-5)
    config.get("perceiver_config")  # of a resampler that may not be there
    gathering = config.sub_config("perceiver_config") if config.bool("use_resampler", False) else None
    return FlamingoModel(
        config,
        text,
        [look(config, d, e) for _ in range(depth // interval)],
        idefics_vision(seeing),
        resampler=None if gathering is None else resampler(gathering, e),
        vision_pooler=NormedFirst(nn.LayerNorm(e, eps)),
        ends=read_eos(config.get("eos_token_id", 2)),
    )


IDEFICS = Family(
    title="Idefics",
    model_type="idefics",
    prefix="model",
    build=build_idefics,
    names=idefics_names,
    tasks={
        "feature-extraction": Task(architecture="IdeficsModel"),
        "image-text-to-text": Task(
            architecture="IdeficsForVisionText2Text",
            names={"head.words": Concat("lm_head", "lm_head.additional_fc")},
            copies={
                "lm_head.weight": "embed_tokens.weight",
                "lm_head.additional_fc.weight": "embed_tokens.additional_embedding.weight",
            },
        ),
    },
    ignored=(r"embeddings\.position_ids$", r"\.rotary_emb\.inv_freq$", r"^lm_head\.(additional_fc\.)?weight$"),
    harmless=HARMLESS,
)
