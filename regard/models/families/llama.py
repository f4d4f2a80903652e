"""LLaMA (Touvron et al. 2023): the decoder that most open language models are.

Peculiar: root-mean-square norms before each part; no biases; a gated feed-forward; positions turn queries and keys
(rotary, with the scalings of long checkpoints) instead of being added; groups of heads share keys and values.
"""

from __future__ import annotations

from torch import nn

from regard.models.config import Settings, reach, rotary
from regard.models.family import Family, Names, Rows, Task
from regard.models.text import TextModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, FeedForward, Tower
from regard.nn.heads import decoder_head
from regard.rotary import Rotary

__all__ = ["FAMILY", "NAMES", "decoder"]

LAYER = "layers.{i}."
NAMES: Names = {
    "tower.embed.tokens": "embed_tokens",
    "tower.blocks.{i}.attention_norm": f"{LAYER}input_layernorm",
    "tower.blocks.{i}.attention.w_qkv": Rows(*(f"{LAYER}self_attn.{x}_proj" for x in "qkv")),
    "tower.blocks.{i}.attention.w_o": f"{LAYER}self_attn.o_proj",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}post_attention_layernorm",
    "tower.blocks.{i}.feed_forward.w_in": Rows(*(f"{LAYER}mlp.{x}_proj" for x in ("gate", "up"))),
    "tower.blocks.{i}.feed_forward.w_out": f"{LAYER}mlp.down_proj",
    "tower.norm": "norm",
}


def names(settings: Settings) -> Names:
    """The body's weights, the same in every LLaMA."""
    return NAMES


def tower(settings: Settings, turning: Rotary) -> Tower:
    """Embedding and blocks. turning: the positions."""
    d, eps = settings.whole("hidden_size", 4096), settings.eps("rms_norm_eps", 1e-6)
    heads, inner = settings.whole("num_attention_heads", 32), settings.whole("intermediate_size", 11008)
    attention_bias, mlp_bias = settings.flag("attention_bias", False), settings.flag("mlp_bias", False)

    def block() -> Block:
        return Block(
            MultiHeadAttention(
                d,
                heads,
                num_kv_heads=settings.whole("num_key_value_heads", heads),
                head_dim=turning.dim,
                bias=attention_bias,
                fused=True,
                position=turning,
                dropout=settings.number("attention_dropout", 0.0),
            ),
            FeedForward(d, inner, settings.text("hidden_act", "silu"), gated=True, bias=mlp_bias),
            [nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)],
            norm_first=True,
        )

    blocks = [block() for _ in range(settings.layers("num_hidden_layers", 32))]
    embed = Embedding(settings.whole("vocab_size", 32000), d)
    return Tower(embed, blocks, causal=True, norm=nn.RMSNorm(d, eps), rotary=turning)


def decoder(settings: Settings, task: str, *, tied: bool) -> TextModel:
    """The model for a task, alone or beside another tower. tied: are words scored with the table that embeds them.

    What settings leave out is as in the first LLaMA of 7 billion weights: LLaVA's say little of their LLaMA.
    """
    d, heads = settings.whole("hidden_size", 4096), settings.whole("num_attention_heads", 32)
    most = settings.whole("max_position_embeddings", 2048)
    turning = rotary(settings, settings.whole("head_dim", d // heads), most=most)
    settings.only("rope_interleaved", False)
    head = decoder_head(
        task,
        d,
        vocabulary=settings.whole("vocab_size", 32000),
        labels=settings.label_count(),
        tied=tied,
        dropout=settings.number("classifier_dropout", settings.number("hidden_dropout", 0.1)),
    )
    return TextModel(settings, tower(settings, turning), head=head, most=reach(turning, most))


def build(settings: Settings, task: str) -> TextModel:
    """The model for a task."""
    return decoder(settings, task, tied=settings.tied(False))


FAMILY = Family(
    title="LLaMA",
    model_type="llama",
    prefix="model",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="LlamaModel"),
        "generate": Task(
            architecture="LlamaForCausalLM",
            names={"head.words": "lm_head"},
            copies={"lm_head.weight": "embed_tokens.weight"},
        ),
        "classify": Task(architecture="LlamaForSequenceClassification", names={"head.score": "score"}),
        "tag": Task(architecture="LlamaForTokenClassification", names={"head.score": "score"}),
        "answer": Task(
            architecture="LlamaForQuestionAnswering", names={"head.score": "qa_outputs"}, prefix="transformer"
        ),
    },
    ignored=(r"\.rotary_emb\.inv_freq$", r"^lm_head\.weight$"),
    # What trainers and converters leave behind; transformers reads none of it.
    harmless=("is_llama_config", "max_sequence_length", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
)
