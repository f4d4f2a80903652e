"""T5 (Raffel et al. 2019): an encoder–decoder that takes every task as text to text; v1.0, v1.1 and FLAN.

Peculiar: distances between positions are put in buckets, each with a learnt number per head, added to the scores in
every block of a tower; scores are not scaled; root-mean-square norms before each part and at the end; no biases.
v1.0: ReLU, and words are scored with the table that embeds them, times 1/√d. v1.1: gated GELU and a table of its own.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from regard.models.encoder_decoder import EncoderDecoder
from regard.models.family import Concat, Config, Family, Heads, Names, Task
from regard.models.model import Model
from regard.models.text import TextModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, EndToken, FeedForward, Labels, LanguageHead, Tower
from regard.positions import T5

FARTHEST = 2**20  # a distance: each has a place in the run of its bucket


def names(config: Config) -> Names:
    """The body's weights. A lone encoder is called `tower` here, and in the file what it is called beside a decoder."""
    _, gated = _feed_forward(config)
    both = {"encoder.embed.tokens": "shared", **_tower("encoder", 1, gated), **_tower("decoder", 2, gated)}
    lone = {f"tower{name.removeprefix('encoder')}": s for name, s in both.items() if name.startswith("encoder")}
    return {**both, **lone}


def _tower(side: str, last: int, gated: bool) -> Names:
    """last: number of the feed-forward among a block's parts."""
    ours, theirs = side + ".blocks.{i}.", side + ".block.{i}.layer."
    first, inner = f"{side}.block.0.layer.0.", f"{theirs}{last}.DenseReluDense."
    return {
        f"{ours}attention.w_qkv": Concat(*(f"{theirs}0.SelfAttention.{x}" for x in "qkv")),
        f"{ours}attention.w_o": f"{theirs}0.SelfAttention.o",
        f"{side}.blocks.0.attention.position.table": f"{first}SelfAttention.relative_attention_bias.weight",
        f"{ours}attention_norm": f"{theirs}0.layer_norm",
        f"{ours}cross.w_qkv": Concat(*(f"{theirs}1.EncDecAttention.{x}" for x in "qkv")),
        f"{ours}cross.w_o": f"{theirs}1.EncDecAttention.o",
        f"{ours}cross_norm": f"{theirs}1.layer_norm",
        f"{ours}feed_forward.w_in": Concat(f"{inner}wi_0", f"{inner}wi_1") if gated else f"{inner}wi",
        f"{ours}feed_forward.w_out": f"{inner}wo",
        f"{ours}feed_forward_norm": f"{theirs}{last}.layer_norm",
        f"{side}.norm": f"{side}.final_layer_norm",
    }


def _feed_forward(config: Config) -> tuple[str, bool]:
    """The activation, and whether it gates: feed_forward_proj says both, and newer keys overrule it."""
    name = config.str("feed_forward_proj", "relu")
    function = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    return config.str("dense_act_fn", function), config.bool("is_gated_act", name.startswith("gated-"))


def tower(config: Config, layers: int, *, decoder: bool) -> Tower:
    """Encoder or decoder, its blocks sharing one table of distances."""
    d, heads, width = config.int("d_model"), config.int("num_heads"), config.int("d_kv")
    eps, dropout = config.eps("layer_norm_epsilon", 1e-6), config.float("dropout_rate", 0.1)
    inner, (function, gated) = config.int("d_ff"), _feed_forward(config)
    distances = T5(
        heads,
        buckets=config.int("relative_attention_num_buckets", 32),
        max_distance=config.int("relative_attention_max_distance", 128, maximum=FARTHEST),
        bidirectional=not decoder,
    )

    def attention(position: T5 | None) -> MultiHeadAttention:
        return MultiHeadAttention(
            d, heads, head_dim=width, bias=False, fused=True, scale=1.0, position=position, dropout=dropout
        )

    def block() -> Block:
        return Block(
            attention(distances),
            FeedForward(d, inner, function, gated=gated, bias=False, dropout=dropout),
            [nn.RMSNorm(d, eps) for _ in range(3 if decoder else 2)],
            norm_first=True,
            cross=attention(None) if decoder else None,
            dropout=dropout,
        )

    embed = Embedding(config.int("vocab_size"), d, dropout=dropout)
    blocks = [block() for _ in range(layers)]
    return Tower(embed, blocks, causal=decoder, norm=nn.RMSNorm(d, eps), dropout=dropout)


TABLES = ("shared.weight", "embed_tokens.weight")


def settle(config: Config, stored: Collection[str]) -> Config:
    """Words have a table of their own where the file has one: `transformers` 5 writes that T5 never does.

    Where it is the only table that the file has it is the shared one, under one of its names.
    """
    if "lm_head.weight" not in stored or not any(name.endswith(TABLES) for name in stored):
        return config
    scaled = config.bool("scale_decoder_outputs", config.tie_word_embeddings())
    values = {"tie_word_embeddings": False, "scale_decoder_outputs": scaled}
    return Config(config.values | values, config.where)


def build(config: Config, task: str) -> Model:
    """The model for a task."""
    d, layers, tied = config.int("d_model"), config.layers("num_layers"), config.tie_word_embeddings()
    depth, dropout = config.layers("num_decoder_layers", layers), config.float("classifier_dropout", 0.0)
    scale = d**-0.5 if config.bool("scale_decoder_outputs", tied) else 1.0
    end = config.int("eos_token_id", 1, minimum=0)
    heads: Heads = {
        "text2text-generation": lambda: LanguageHead(config.int("vocab_size"), None if tied else d, scale=scale),
        "text-classification": lambda: EndToken(d, config.num_labels(), end, dropout=dropout),
        "token-classification": lambda: Labels(d, config.num_labels(), pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    encoder, head = tower(config, layers, decoder=False), heads[task]() if task in heads else None
    if task in ("text-encoding", "token-classification"):
        return TextModel(config, encoder, head=head)
    decoder = tower(config, depth, decoder=True)
    decoder.embed.tokens = encoder.embed.tokens
    start = config.int("decoder_start_token_id", config.int("pad_token_id", 0, minimum=0), minimum=0)
    rereads = task in ("text-classification", "question-answering")
    return EncoderDecoder(config, encoder, decoder, start=start, rereads=rereads, head=head)


DECODER = (r"^(transformer\.)?decoder\.", r"^lm_head\.weight$")

FAMILY = Family(
    title="T5",
    model_type="t5",
    prefix="",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="T5Model"),
        "text2text-generation": Task(
            architecture="T5ForConditionalGeneration",
            names={"head.words": "lm_head"},
            copies={"lm_head.weight": "shared.weight"},
        ),
        "text-encoding": Task(architecture="T5EncoderModel", unused=DECODER),
        "text-classification": Task(
            architecture="T5ForSequenceClassification",
            names={"head.dense": "classification_head.dense", "head.score": "classification_head.out_proj"},
            prefix="transformer",
        ),
        "token-classification": Task(
            architecture="T5ForTokenClassification",
            names={"head.score": "classifier"},
            prefix="transformer",
            unused=DECODER,
        ),
        "question-answering": Task(architecture="T5ForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    # The one table of words under other names, and a table that was never looked at.
    ignored=(r"(encoder|decoder)\.embed_tokens\.weight$", r"EncDecAttention\.relative_attention_bias\.weight$"),
    copies={f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")},
    harmless=("n_positions",),
    adjust=settle,
)
