"""BigBird (Zaheer et al. 2020): BERT for long texts, whose tokens look at blocks of tokens.

Peculiar: a block of `block_size` tokens sees its two neighbours, the first and the last block, and `num_random_blocks`
drawn ones; the first and the last see all (`attention_type` "block_sparse"). A text of up to
(5 + 2·num_random_blocks)·block_size tokens is looked at as a whole, as always with "original_full". transformers then
stays with it for all later texts; regard decides for each text anew. transformers draws blocks in training only: see
sparse_attention.py, which counts as it does. In training, embeddings are dropped before they are normed, and weights
among blocks not at all. The head for answers has a feed-forward of its own, and looks behind the question only.
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.models.families import bert
from regard.models.family import Config, Family, Heads, Names, Task
from regard.models.text import AnswerHead, AnsweringModel, TextModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import (
    Block,
    Embedding,
    FeedForward,
    FirstToken,
    Labels,
    LanguageHead,
    Pooler,
    PretrainingHead,
    Tower,
)
from regard.nn.sparse_attention import BlockAttention, BlockPattern

NAMES: Names = {**bert.JOINED, "pooler.dense": "pooler"}
ANSWER = "qa_classifier."


class DroppedNorm(nn.LayerNorm):
    """A norm of what dropout, in training, has left."""

    def __init__(self, d: int, eps: float, dropout: float) -> None:
        super().__init__(d, eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        return super().forward(self.dropout(x))


class Sizes:
    """What embedding, blocks and heads have in common."""

    def __init__(self, config: Config) -> None:
        self.d, self.vocabulary = config.int("hidden_size"), config.int("vocab_size")
        self.d_ff, self.function = config.int("intermediate_size"), config.str("hidden_act", "gelu_new")
        self.eps, self.dropout = config.eps("layer_norm_eps", 1e-12), config.float("hidden_dropout_prob", 0.1)

    def feed_forward(self) -> FeedForward:
        """A feed-forward of a block, or of the head for answers."""
        return FeedForward(self.d, self.d_ff, self.function)


def attention(config: Config, layer: int) -> MultiHeadAttention:
    """The attention of one layer, whose number seeds what it draws."""
    config.only("attention_type", "block_sparse", "original_full")
    d, heads = config.int("hidden_size"), config.int("num_attention_heads")
    bias, dropout = config.bool("use_bias", True), config.float("attention_probs_dropout_prob", 0.1)
    size, random = config.int("block_size", 64), config.int("num_random_blocks", 3, minimum=0)
    if config.get("attention_type") == "original_full":
        return MultiHeadAttention(d, heads, bias=bias, out_bias=True, fused=True, dropout=dropout)
    longest = config.int("max_position_embeddings", 4096)
    return BlockAttention(d, heads, BlockPattern(size, random, layer, longest), bias=bias, dropout=dropout)


def tower(config: Config) -> Tower:
    """Embedding and blocks."""
    config.only("position_embedding_type", "absolute")
    sizes = Sizes(config)
    d = sizes.d
    embed = Embedding(
        sizes.vocabulary,
        d,
        positions=nn.Embedding(config.int("max_position_embeddings", 4096), d),
        types=config.int("type_vocab_size", 2),
        norm=DroppedNorm(d, sizes.eps, sizes.dropout),
        scale=d**0.5 if config.bool("rescale_embeddings", False) else 1.0,
    )

    def block(layer: int) -> Block:
        norms = [nn.LayerNorm(d, sizes.eps), nn.LayerNorm(d, sizes.eps)]
        parts = attention(config, layer), sizes.feed_forward()
        return Block(*parts, norms, norm_first=False, dropout=sizes.dropout)

    return Tower(embed, [block(i) for i in range(config.layers("num_hidden_layers"))], causal=False)


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    sizes, n = Sizes(config), config.num_labels()
    d, dropout = sizes.d, config.float("classifier_dropout", sizes.dropout)
    if task == "question-answering":
        config.int("type_vocab_size", 2, minimum=2)  # the question and the rest
        head = AnswerHead(sizes.feed_forward(), d, sizes.eps, sizes.dropout)
        separator = config.int("sep_token_id", 66, minimum=0)
        return AnsweringModel(config, tower(config), head=head, separator=separator)

    def words() -> LanguageHead:
        return bert.lm_head(config, d, sizes.function)

    heads: Heads = {
        "fill-mask": words,
        "pretraining": lambda: PretrainingHead(words(), Labels(d, 2, pooled=True)),
        "text-classification": lambda: FirstToken(d, n, sizes.function, before=dropout, dropout=dropout),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
    }
    return TextModel(config, tower(config), pooler=Pooler(d), head=heads[task]() if task in heads else None)


FAMILY = Family(
    title="BigBird",
    model_type="big_bird",
    prefix="bert",
    build=build,
    names=NAMES,
    tasks={
        **bert.tasks(
            "BigBird", bert.WORDS, bert.COPIES, text=bert.OUT_PROJ, pretraining={"head.relation.score": bert.RELATION}
        ),
        "question-answering": Task(
            architecture="BigBirdForQuestionAnswering",
            names={
                "head.feed_forward.w_in": f"{ANSWER}intermediate.dense",
                "head.feed_forward.w_out": f"{ANSWER}output.dense",
                "head.norm": f"{ANSWER}output.LayerNorm",
                "head.score": f"{ANSWER}qa_outputs",
            },
        ),
    },
    ignored=(r"embeddings\.(position_ids|token_type_ids)$", r"^cls\.predictions\.decoder\.(weight|bias)$"),
)
