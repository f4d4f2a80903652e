"""BigBird (Zaheer et al. 2020): BERT for long texts, whose tokens look at blocks of tokens.

Peculiar: a block of `block_size` tokens sees its two neighbours, the first and the last block, and `num_random_blocks`
drawn ones; the first and the last see all (`attention_type` "block_sparse"). A text of up to
(5 + 2·num_random_blocks)·block_size tokens is looked at as a whole, as always with "original_full". transformers then
stays with it for all later texts; regard decides for each text anew. transformers draws blocks in training only: see
block_attention.py, which counts as it does. In training, embeddings are dropped before they are normed, and weights
among blocks not at all. The head for answers has a feed-forward of its own, and looks behind the question only.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from regard.models.config import Settings
from regard.models.families import bert
from regard.models.family import Family, Names, Task
from regard.models.text import AnswerHead, AnsweringModel, TextModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.block_attention import BlockAttention
from regard.nn.blocks import Block, Embedding, FeedForward, Tower
from regard.nn.heads import FirstToken, Labels, LanguageHead, Pooler, PretrainingHead, Transform

__all__ = ["FAMILY"]

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

    def __init__(self, settings: Settings) -> None:
        self.d, self.vocabulary = settings.whole("hidden_size"), settings.whole("vocab_size")
        self.d_ff, self.function = settings.whole("intermediate_size"), settings.text("hidden_act", "gelu_new")
        self.eps, self.dropout = settings.eps("layer_norm_eps", 1e-12), settings.number("hidden_dropout_prob", 0.1)

    def feed_forward(self) -> FeedForward:
        """A feed-forward of a block, or of the head for answers."""
        return FeedForward(self.d, self.d_ff, self.function)


def attention(settings: Settings, layer: int) -> MultiHeadAttention:
    """The attention of one layer, whose number seeds what it draws."""
    settings.only("attention_type", "block_sparse", "original_full")
    d, heads = settings.whole("hidden_size"), settings.whole("num_attention_heads")
    bias, dropout = settings.flag("use_bias", True), settings.number("attention_probs_dropout_prob", 0.1)
    size, random = settings.whole("block_size", 64), settings.whole("num_random_blocks", 3, least=0)
    if settings.get("attention_type") == "original_full":
        return MultiHeadAttention(d, heads, bias=bias, out_bias=True, fused=True, dropout=dropout)
    longest = settings.whole("max_position_embeddings", 4096)
    return BlockAttention(d, heads, size=size, random=random, seed=layer, longest=longest, bias=bias, dropout=dropout)


def tower(settings: Settings) -> Tower:
    """Embedding and blocks."""
    settings.only("position_embedding_type", "absolute")
    sizes = Sizes(settings)
    d = sizes.d
    embed = Embedding(
        sizes.vocabulary,
        d,
        positions=nn.Embedding(settings.whole("max_position_embeddings", 4096), d),
        types=settings.whole("type_vocab_size", 2),
        norm=DroppedNorm(d, sizes.eps, sizes.dropout),
        scale=d**0.5 if settings.flag("rescale_embeddings", False) else 1.0,
    )

    def block(layer: int) -> Block:
        norms = [nn.LayerNorm(d, sizes.eps) for _ in range(2)]
        made = attention(settings, layer)
        return Block(made, sizes.feed_forward(), norms, norm_first=False, dropout=sizes.dropout)

    return Tower(embed, [block(i) for i in range(settings.layers("num_hidden_layers"))], causal=False)


def words(settings: Settings) -> LanguageHead:
    """The masked LM: transformed vectors scored against the token table, or one of its own."""
    sizes = Sizes(settings)
    transform = Transform(sizes.d, sizes.d, sizes.function, nn.LayerNorm(sizes.d, sizes.eps))
    return LanguageHead(sizes.vocabulary, None if settings.tied() else sizes.d, transform=transform, bias=True)


def names(settings: Settings) -> Names:
    """The body's weights, the same in every BigBird."""
    return NAMES


def build(settings: Settings, task: str) -> TextModel:
    """The model for a task."""
    sizes, n = Sizes(settings), settings.label_count()
    d, dropout = sizes.d, settings.number("classifier_dropout", sizes.dropout)
    if task == "answer":
        settings.whole("type_vocab_size", 2, least=2)  # the question and the rest
        head = AnswerHead(sizes.feed_forward(), d, sizes.eps, sizes.dropout)
        separator = settings.whole("sep_token_id", 66, least=0)
        return AnsweringModel(settings, tower(settings), head=head, separator=separator)
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "fill": lambda: words(settings),
        "pretrain": lambda: PretrainingHead(words(settings), Labels(d, 2, pooled=True)),
        "classify": lambda: FirstToken(d, n, sizes.function, before=dropout, dropout=dropout),
        "tag": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "none": lambda: None,
    }
    return TextModel(settings, tower(settings), pooler=Pooler(d), head=heads[task]())


FAMILY = Family(
    title="BigBird",
    model_type="big_bird",
    prefix="bert",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="BigBirdModel"),
        "fill": Task(architecture="BigBirdForMaskedLM", names=bert.WORDS, copies=bert.COPIES),
        "pretrain": Task(
            architecture="BigBirdForPreTraining",
            names=bert.FAMILY.tasks["pretrain"].names,
            copies=bert.COPIES,
        ),
        "classify": Task(
            architecture="BigBirdForSequenceClassification",
            names={"head.dense": "classifier.dense", "head.score": "classifier.out_proj"},
        ),
        "tag": Task(architecture="BigBirdForTokenClassification", names={"head.score": "classifier"}),
        "answer": Task(
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
