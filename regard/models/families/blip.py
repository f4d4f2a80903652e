"""BLIP (Li et al. 2022): a ViT that sees, and a BERT that looks at what it sees, to caption, to answer and to match.

Peculiar: every block of the BERT has attention to the picture between its two parts, and passes it over where a text is
read alone; the same BERT reads both ways or, to write, only back; it has no segments. What it writes begins with a
token of its own, [DEC], and ends with [SEP]. Answers are written by a second BERT, which looks at the question.
"""

from __future__ import annotations

from torch import nn

from regard.models.dual_encoder import DualEncoder, SimilarityHead
from regard.models.families import bert, clip
from regard.models.family import Config, Family, Names, Squeeze, Task, nested
from regard.models.image_text import Answerer, Captioner, Matcher, Matching
from regard.models.model import Model
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, FeedForward, LanguageHead, Pooler, Tower
from regard.nn.vision import NormedFirst, PatchEmbedding, PatchProjection, VisionTower

SEES = "encoder.layers.{i}."
VISION: Names = {
    "embed.cls": Squeeze("embeddings.class_embedding", 2),
    "embed.positions": Squeeze("embeddings.position_embedding"),
    "embed.patches": "embeddings.patch_embedding",
    "blocks.{i}.attention_norm": f"{SEES}layer_norm1",
    "blocks.{i}.attention.w_qkv": f"{SEES}self_attn.qkv",
    "blocks.{i}.attention.w_o": f"{SEES}self_attn.projection",
    "blocks.{i}.feed_forward_norm": f"{SEES}layer_norm2",
    "blocks.{i}.feed_forward.w_in": f"{SEES}mlp.fc1",
    "blocks.{i}.feed_forward.w_out": f"{SEES}mlp.fc2",
    "norm": "post_layernorm",
}
LOOKS = f"{bert.LAYER}crossattention."
TEXT: Names = {
    **{ours[6:]: theirs for ours, theirs in bert.NAMES.items() if ours[:6] == "tower." and "types" not in ours},
    **{f"blocks.{{i}}.cross.w_{x[0]}": f"{LOOKS}self.{x}" for x in ("query", "key", "value")},
    "blocks.{i}.cross.w_o": f"{LOOKS}output.dense",
    "blocks.{i}.cross_norm": f"{LOOKS}output.LayerNorm",
}
BODY: Names = {
    **nested(VISION, "vision.", "vision_model."),
    **nested(TEXT, "text.", "text_model."),
    "text_pooler.dense": "text_model.pooler.dense",
    **nested(TEXT, "encoder.", "text_encoder."),
    **nested(TEXT, "decoder.", "text_decoder.bert."),
}
WORDS = nested(bert.WORDS, "", "text_decoder.")
COPIES = {
    "text_decoder.cls.predictions.decoder.weight": "text_decoder.bert.embeddings.word_embeddings.weight",
    "text_decoder.cls.predictions.decoder.bias": "text_decoder.cls.predictions.bias",
}
# Sizes of other tasks' heads; what transformers overrules or reads in training alone, and older versions wrote down.
OTHERS = ("image_text_hidden_size", "logit_scale_init_value", "projection_dim")
UNREAD = ("attention_dropout", "dropout", "encoder_hidden_size", "label_smoothing")


def vision_tower(vision: Config) -> VisionTower:
    """The ViT; its query, key and value are one matrix."""
    d, eps = vision.int("hidden_size", 768), vision.eps("layer_norm_eps", 1e-5)
    vision.only("num_channels", 3)
    embed = PatchEmbedding(PatchProjection(3, d, vision.pair("patch_size", 16)), vision.pair("image_size", 384))
    blocks = [clip.block(vision, d, 12, 3072, "gelu") for _ in range(vision.layers("num_hidden_layers", 12))]
    return VisionTower(embed, blocks, norm=nn.LayerNorm(d, eps))


def text_tower(text: Config, memory: int, *, causal: bool = False) -> Tower:
    """The BERT. memory: width of what its blocks look at.  causal: does it write."""
    d, eps = text.int("hidden_size", 768), text.eps("layer_norm_eps", 1e-12)
    dropout = text.float("hidden_dropout_prob", 0.0)
    text.only("is_decoder", True)  # without, its blocks have no attention to a picture
    positions = nn.Embedding(text.int("max_position_embeddings", 512), d)
    embed = Embedding(text.int("vocab_size", 30524), d, positions=positions, norm=nn.LayerNorm(d, eps), dropout=dropout)

    def attention(looks_at: int) -> MultiHeadAttention:
        heads, lost = text.int("num_attention_heads", 8), text.float("attention_probs_dropout_prob", 0.0)
        return MultiHeadAttention(d, heads, d_context=looks_at, dropout=lost)

    def block() -> Block:
        feed_forward = FeedForward(d, text.int("intermediate_size", 3072), text.str("hidden_act", "gelu"))
        norms = [nn.LayerNorm(d, eps) for _ in range(3)]
        return Block(attention(d), feed_forward, norms, norm_first=False, cross=attention(memory), dropout=dropout)

    return Tower(embed, [block() for _ in range(text.layers("num_hidden_layers", 12))], causal=causal)


def lm_head(text: Config) -> LanguageHead:
    """BERT's masked LM, tied to the token embedding."""
    text.only("tie_word_embeddings", True)
    d, norm = text.int("hidden_size", 768), text.eps("layer_norm_eps", 1e-12)
    return bert.lm_head(text, d, text.str("hidden_act", "gelu"), nn.LayerNorm(d, norm), vocabulary=30524)


def build(config: Config, task: str) -> Model:
    """The model for a task."""
    config.only("tie_word_embeddings", True)
    text, vision = config.sub_config("text_config"), vision_tower(config.sub_config("vision_config"))
    d, seen = text.int("hidden_size", 768), vision.embed.cls.shape[0]
    start, end = text.int("bos_token_id", 30522, minimum=0), text.int("sep_token_id", 102, minimum=0)
    bounds = start, end, text.int("pad_token_id", 0, minimum=0)
    if task == "image-to-text":
        return Captioner(config, vision, text_tower(text, seen, causal=True), lm_head(text), bounds)
    if task == "visual-question-answering":
        if seen != d:
            raise ValueError(
                f"{config.where}: the decoder attends to the question as to an image, so hidden_size must be the same "
                f"in vision_config and text_config; it is {seen} and {d}"
            )
        encoder, decoder = text_tower(text, d), text_tower(text, d, causal=True)
        return Answerer(config, vision, encoder, decoder, lm_head(text), bounds)
    if task == "image-text-matching":
        head = Matching(d, seen, config.int("image_text_hidden_size", 256))
        return Matcher(config, vision, text_tower(text, seen), head)
    assert vision.norm is not None
    return DualEncoder(
        config,
        SimilarityHead(config.int("projection_dim", 512), text=d, image=seen),
        text=text_tower(text, seen),
        text_pooler=Pooler(d),
        vision=vision,
        vision_pooler=NormedFirst(vision.norm),  # a second time, as transformers has it
    )


FAMILY = Family(
    title="BLIP",
    model_type="blip",
    prefix="",
    build=build,
    names=BODY,
    tasks={
        "zero-shot-image-classification": Task(
            architecture="BlipModel",
            names={"head.text": "text_projection", "head.image": "visual_projection", "head.scale": "logit_scale"},
        ),
        "image-to-text": Task(architecture="BlipForConditionalGeneration", names=WORDS, copies=COPIES),
        "visual-question-answering": Task(architecture="BlipForQuestionAnswering", names=WORDS, copies=COPIES),
        "image-text-matching": Task(
            architecture="BlipForImageTextRetrieval",
            names={"head.score": "itm_head", "head.text": "text_proj", "head.image": "vision_proj"},
        ),
    },
    ignored=(r"embeddings\.position_ids$", r"^text_decoder\.cls\.predictions\.decoder\.(weight|bias)$"),
    harmless=(*OTHERS, *UNREAD),
)
