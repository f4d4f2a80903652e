"""Idefics (Laurençon et al. 2023): Flamingo (Alayrac et al. 2022) rebuilt in the open, on LLaMA and CLIP's tower.

Peculiar: before every few blocks of LLaMA, words look at pictures through a gate; a resampler makes of any picture the
same small number of vectors for them to look at; queries and keys of looks may be normed head by head; tokens added to
the vocabulary have tables of their own, below LLaMA's. What is frozen in training (freeze_…) is not frozen here.
"""

from __future__ import annotations

from torch import nn

from regard.generation.stopping import read_eos
from regard.models.config import Settings
from regard.models.families import clip, llama
from regard.models.family import Family, Led, Names, Rows, Task, nested
from regard.models.flamingo import FlamingoModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, FeedForward
from regard.nn.flamingo import GatedLook, Resampler, ResamplerBlock
from regard.nn.heads import LanguageHead
from regard.nn.linear import Joined, JoinedTable
from regard.nn.vision import NormedFirst, PatchEmbedding, PatchProjection, VisionTower

__all__ = ["FAMILY"]

LOOK: Names = {
    "attention_norm": "input_layernorm",
    **{f"attention.w_{x}": f"cross_attn.{x}_proj" for x in "qkvo"},
    **{f"attention.{x}_norm": f"cross_attn.{x}_layer_norm" for x in "qk"},
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w_in": Rows("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.w_out": "mlp.down_proj",
}
GATES = {"attention_gate": "alpha_cross_attn", "feed_forward_gate": "alpha_dense"}
GATHER: Names = {
    "picture_norm": "0.context_layer_norm",
    "attention_norm": "0.latents_layer_norm",
    **{f"attention.w_{x}": f"0.{x}_proj" for x in "qkv"},
    "attention.w_o": "0.output_proj",
    **{f"attention.{x}_norm": f"0.{x}_layer_norm" for x in "qk"},
    "feed_forward_norm": "1.ln",
    "feed_forward.w_in": "1.fc",
    "feed_forward.w_out": "1.c_proj",
}
NAMES: Names = {
    **llama.NAMES,
    "tower.embed.tokens": Rows("embed_tokens", "embed_tokens.additional_embedding"),
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


def names(settings: Settings) -> Names:
    """The body's weights; a gate for each number of a vector is stored with two axes before it."""
    wide = settings.text("alpha_type", "float") == "vector"
    gates = {ours: Led(theirs, 2) if wide else theirs for ours, theirs in GATES.items()}
    return {**NAMES, **nested(gates, "looks.{i}.", "gated_cross_attn_layers.{i}.")}


def vision_tower(settings: Settings) -> VisionTower:
    """Patches and blocks, as CLIP's."""
    d, eps = settings.whole("embed_dim", 768), settings.eps("layer_norm_eps", 1e-5)
    patches = PatchProjection(settings.whole("num_channels", 3), d, settings.pair("patch_size", 14), bias=False)
    embed = PatchEmbedding(patches, settings.pair("image_size", 224), stretch=STRETCH, norm=nn.LayerNorm(d, eps))
    heads, inner = settings.whole("num_attention_heads", 16), settings.whole("intermediate_size", 5120)
    dropout, function = settings.number("attention_dropout", 0.0), settings.text("hidden_act", "gelu")

    def block() -> Block:
        attention = MultiHeadAttention(d, heads, fused=True, dropout=dropout)
        return Block(
            attention, FeedForward(d, inner, function), [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)], norm_first=True
        )

    return VisionTower(embed, [block() for _ in range(settings.layers("num_hidden_layers", 32))])


def resampler(settings: Settings, d: int) -> Resampler:
    """What gathers a picture's vectors, d wide."""
    heads, size = settings.whole("resampler_n_heads", 16), settings.whole("resampler_head_dim", 96)
    normed = settings.flag("qk_layer_norms_perceiver", False)

    def block() -> ResamplerBlock:
        norms = (nn.LayerNorm(size), nn.LayerNorm(size)) if normed else None
        attention = MultiHeadAttention(d, heads, head_dim=size, bias=False, head_norms=norms)
        return ResamplerBlock(d, attention, FeedForward(d, 4 * d, "relu", bias=False))

    blocks = [block() for _ in range(settings.layers("resampler_depth", 6))]
    return Resampler(settings.whole("resampler_n_latents", 64), d, blocks)


def look(settings: Settings, d: int, d_picture: int) -> GatedLook:
    """A look of words, d wide, at pictures."""
    heads, eps = settings.whole("num_attention_heads", 32), settings.eps("rms_norm_eps", 1e-6)
    dropout, size = settings.number("dropout", 0.0), d // heads
    norms = (nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)) if settings.flag("qk_layer_norms", False) else None
    inner, function = settings.whole("intermediate_size", 11008), settings.text("hidden_act", "silu")
    return GatedLook(
        MultiHeadAttention(d, heads, d_context=d_picture, bias=False, head_norms=norms, dropout=dropout),
        FeedForward(d, inner, function, gated=True, bias=False),
        [nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)],
        gates=d if settings.text("alpha_type", "float") == "vector" else 1,
        dropout=dropout,
    )


def build(settings: Settings, task: str) -> FlamingoModel:
    """The model for a task."""
    settings.only("alpha_type", "float", "vector")
    for key, only in NOT_OF_LLAMA.items():
        settings.only(key, only)
    text, dropout = llama.decoder(settings, task, tied=settings.tied(False)), settings.number("dropout", 0.0)
    for block in text.tower.depth:
        block.attention.dropout, block.dropout = dropout, nn.Dropout(dropout)
    words, added = settings.whole("vocab_size", 32000), settings.whole("additional_vocab_size", 0, least=0)
    rows, d = (words, added) if added else (words,), text.tower.embed.tokens.embedding_dim
    text.tower.embed.tokens = JoinedTable(rows, d)
    head = text.head if isinstance(text.head, LanguageHead) else None
    if head is not None and head.words is not None:
        head.words = Joined(d, rows, bias=False)
    depth, interval = len(text.tower.depth), settings.whole("cross_layer_interval", 1)
    if depth % interval:
        raise ValueError(f"{settings.where}: {depth} layers do not divide by a cross_layer_interval of {interval}")
    seeing = settings.inner("vision_config")
    e, eps = seeing.whole("embed_dim", 768), seeing.eps("layer_norm_eps", 1e-5)
    settings.get("perceiver_config")  # of a resampler that may not be there
    gathering = settings.inner("perceiver_config") if settings.flag("use_resampler", False) else None
    assert text.most is not None
    return FlamingoModel(
        settings,
        text.tower,
        [look(settings, d, e) for _ in range(depth // interval)],
        vision_tower(seeing),
        resampler=None if gathering is None else resampler(gathering, e),
        vision_pooler=NormedFirst(nn.LayerNorm(e, eps)),
        head=head,
        most=text.most,
        ends=read_eos(settings.get("eos_token_id", 2)),
    )


FAMILY = Family(
    title="Idefics",
    model_type="idefics",
    prefix="model",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="IdeficsModel"),
        "generate": Task(
            architecture="IdeficsForVisionText2Text",
            names={"head.words": Rows("lm_head", "lm_head.additional_fc")},
            copies={
                "lm_head.weight": "embed_tokens.weight",
                "lm_head.additional_fc.weight": "embed_tokens.additional_embedding.weight",
            },
        ),
    },
    ignored=(r"embeddings\.position_ids$", r"\.rotary_emb\.inv_freq$", r"^lm_head\.(additional_fc\.)?weight$"),
    harmless=HARMLESS,
)
