"""DistilBERT (Sanh et al. 2019): a BERT of half the layers, taught by a whole one.

Peculiar: no segments and no pooler; settings and weights have names of their own; the norms' epsilon is no setting.
In training regard's block also drops out what attention adds, as BERT does and DistilBERT does not.
"""

from __future__ import annotations

from torch import nn

from regard.models.families import bert
from regard.models.family import Config, Family, Heads, Names
from regard.models.text import TextModel
from regard.nn.blocks import Block, Embedding, FirstToken, Labels, Tower, encoder_block

LAYER = "transformer.layer.{i}."
NAMES: Names = {
    "tower.embed.tokens": "embeddings.word_embeddings",
    "tower.embed.positions": "embeddings.position_embeddings",
    "tower.embed.norm": "embeddings.LayerNorm",
    **{f"tower.blocks.{{i}}.attention.w_{x}": f"{LAYER}attention.{x}_lin" for x in "qkv"},
    "tower.blocks.{i}.attention.w_o": f"{LAYER}attention.out_lin",
    "tower.blocks.{i}.attention_norm": f"{LAYER}sa_layer_norm",
    "tower.blocks.{i}.feed_forward.w_in": f"{LAYER}ffn.lin1",
    "tower.blocks.{i}.feed_forward.w_out": f"{LAYER}ffn.lin2",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}output_layer_norm",
}
WORDS: Names = {
    "head.transform.dense": "vocab_transform",
    "head.transform.norm": "vocab_layer_norm",
    "head.words": "vocab_projector",
    "head.bias": "vocab_projector.bias",
}
EPS = 1e-12


def tower(config: Config) -> Tower:
    """Embedding and blocks."""
    d, dropout = config.int("dim"), config.float("dropout", 0.1)
    positions, norm = nn.Embedding(config.int("max_position_embeddings"), d), nn.LayerNorm(d, EPS)
    embed = Embedding(config.int("vocab_size"), d, positions=positions, norm=norm, dropout=dropout)

    def block() -> Block:
        return encoder_block(
            d,
            config.int("n_heads"),
            config.int("hidden_dim"),
            config.str("activation", "gelu"),
            eps=EPS,
            dropout=dropout,
            attention_dropout=config.float("attention_dropout", 0.1),
        )

    return Tower(embed, [block() for _ in range(config.layers("n_layers"))], causal=False)


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, n, function = config.int("dim"), config.num_labels(), config.str("activation", "gelu")
    text, answer = config.float("seq_classif_dropout", 0.2), config.float("qa_dropout", 0.1)
    config.only("tie_weights_", True)  # the first models say so; `tie_word_embeddings` is what is read now
    heads: Heads = {
        "fill-mask": lambda: bert.lm_head(config, d, function, nn.LayerNorm(d, EPS)),
        "text-classification": lambda: FirstToken(d, n, "relu", dropout=text),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=config.float("dropout", 0.1)),
        "question-answering": lambda: Labels(d, 2, pooled=False, dropout=answer),
    }
    return TextModel(config, tower(config), head=heads[task]() if task in heads else None)


FAMILY = Family(
    title="DistilBERT",
    model_type="distilbert",
    prefix="distilbert",
    build=build,
    names=NAMES,
    tasks=bert.tasks(
        "DistilBert",
        WORDS,
        {"vocab_projector.weight": "embeddings.word_embeddings.weight"},
        text={"head.dense": "pre_classifier", "head.score": "classifier"},
    ),
    ignored=(r"embeddings\.position_ids$", r"^vocab_projector\.weight$"),
    # Sines and cosines or not, the table of positions is in the checkpoint.
    harmless=("sinusoidal_pos_embds",),
)
