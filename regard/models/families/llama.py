"""LLaMA (Touvron et al. 2023): the decoder that most open language models are.

Peculiar: root-mean-square norms before each part; no biases; a gated feed-forward; positions turn queries and keys
(rotary, with the scalings of long checkpoints) instead of being added; groups of heads share keys and values.
"""

from __future__ import annotations

from torch import nn

from regard.models.config import Config, reach, rotary
from regard.models.family import Concat, Family, Names, Task
from regard.models.text import TextModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, FeedForward, Tower, decoder_head
from regard.rotary import Rotary

__all__ = ["FAMILY", "NAMES", "decoder"]

LAYER = "layers.{i}."
NAMES: Names = {
    "tower.embed.tokens": "embed_tokens",
    "tower.blocks.{i}.attention_norm": f"{LAYER}input_layernorm",
    "tower.blocks.{i}.attention.w_qkv": Concat(*(f"{LAYER}self_attn.{x}_proj" for x in "qkv")),
    "tower.blocks.{i}.attention.w_o": f"{LAYER}self_attn.o_proj",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}post_attention_layernorm",
    "tower.blocks.{i}.feed_forward.w_in": Concat(*(f"{LAYER}mlp.{x}_proj" for x in ("gate", "up"))),
    "tower.blocks.{i}.feed_forward.w_out": f"{LAYER}mlp.down_proj",
    "tower.norm": "norm",
}


def tower(config: Config, positions: Rotary) -> Tower:
    """Embedding and blocks."""
    d, eps = config.int("hidden_size", 4096), config.eps("rms_norm_eps", 1e-6)
    heads, inner = config.int("num_attention_heads", 32), config.int("intermediate_size", 11008)
    attention_bias, mlp_bias = config.bool("attention_bias", False), config.bool("mlp_bias", False)

    def block() -> Block:
        return Block(
            MultiHeadAttention(
                d,
                heads,
                num_kv_heads=config.int("num_key_value_heads", heads),
                head_dim=positions.dim,
                bias=attention_bias,
                fused=True,
                position=positions,
                dropout=config.float("attention_dropout", 0.0),
            ),
            FeedForward(d, inner, config.str("hidden_act", "silu"), gated=True, bias=mlp_bias),
            [nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)],
            norm_first=True,
        )

    blocks = [block() for _ in range(config.layers("num_hidden_layers", 32))]
    embed = Embedding(config.int("vocab_size", 32000), d)
    return Tower(embed, blocks, causal=True, norm=nn.RMSNorm(d, eps))


def decoder(config: Config, task: str, *, tied: bool) -> TextModel:
    """The model for a task, alone or beside another tower. tied: does the lm_head share the token embedding.

    Defaults are those of the first LLaMA of 7 billion weights: LLaVA's config.json says little of its LLaMA.
    """
    d, heads = config.int("hidden_size", 4096), config.int("num_attention_heads", 32)
    trained = config.int("max_position_embeddings", 2048)
    positions = rotary(config, config.int("head_dim", d // heads), max_positions=trained)
    config.only("rope_interleaved", False)
    head = decoder_head(
        task,
        d,
        vocabulary=config.int("vocab_size", 32000),
        labels=config.num_labels(),
        tied=tied,
        dropout=config.float("classifier_dropout", config.float("hidden_dropout", 0.1)),
    )
    return TextModel(config, tower(config, positions), head=head, max_positions=reach(positions, trained))


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    return decoder(config, task, tied=config.tie_word_embeddings(False))


FAMILY = Family(
    title="LLaMA",
    model_type="llama",
    prefix="model",
    build=build,
    names=NAMES,
    tasks={
        "feature-extraction": Task(architecture="LlamaModel"),
        "text-generation": Task(
            architecture="LlamaForCausalLM",
            names={"head.words": "lm_head"},
            copies={"lm_head.weight": "embed_tokens.weight"},
        ),
        "text-classification": Task(architecture="LlamaForSequenceClassification", names={"head.score": "score"}),
        "token-classification": Task(architecture="LlamaForTokenClassification", names={"head.score": "score"}),
        "question-answering": Task(
            architecture="LlamaForQuestionAnswering", names={"head.score": "qa_outputs"}, prefix="transformer"
        ),
    },
    ignored=(r"\.rotary_emb\.inv_freq$", r"^lm_head\.weight$"),
    # What trainers and converters leave behind; transformers reads none of it.
    harmless=("is_llama_config", "max_sequence_length", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
)
