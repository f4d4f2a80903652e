"""ALBERT (Lan et al. 2019): a BERT with few weights.

Peculiar: tokens are embedded in a narrow table and widened after the norm; layers share their weights. The layers fall
into `num_hidden_groups` groups, each with `inner_group_num` blocks, and every layer of a group is those blocks in turn;
the published models have one group of one block. It learns the order of two sentences, not whether one follows.
In training regard drops out what feed-forward adds, as the authors' code does and transformers does not.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import MOST_LAYERS, Settings
from regard.models.family import Family, Names, Task
from regard.models.text import TextModel
from regard.nn.blocks import Block, Embedding, Tower, encoder_block
from regard.nn.heads import Labels, LanguageHead, Pooler, PretrainingHead, Transform

__all__ = ["FAMILY"]

OUTSIDE: Names = {
    "tower.embed.tokens": "embeddings.word_embeddings",
    "tower.embed.positions": "embeddings.position_embeddings",
    "tower.embed.types": "embeddings.token_type_embeddings",
    "tower.embed.norm": "embeddings.LayerNorm",
    "tower.embed.widen": "encoder.embedding_hidden_mapping_in",
    "pooler.dense": "pooler",
}
# In the settings of the first published models; nobody computes with other values.
OFF = {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0, "layers_to_keep": []}
COPIES = {
    "predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}
POOLED = {"none", "pretrain", "classify"}  # the tasks that look at the pooled vector


def block_names(ours: str, theirs: str) -> Names:
    """The weights of one block."""
    return {
        f"{ours}.attention.w_q": f"{theirs}.attention.query",
        f"{ours}.attention.w_k": f"{theirs}.attention.key",
        f"{ours}.attention.w_v": f"{theirs}.attention.value",
        f"{ours}.attention.w_o": f"{theirs}.attention.dense",
        f"{ours}.attention_norm": f"{theirs}.attention.LayerNorm",
        f"{ours}.feed_forward.w_in": f"{theirs}.ffn",
        f"{ours}.feed_forward.w_out": f"{theirs}.ffn_output",
        f"{ours}.feed_forward_norm": f"{theirs}.full_layer_layer_norm",
    }


def word_names(ours: str) -> Names:
    """The weights of the masked LM."""
    return {
        f"{ours}.transform.dense": "predictions.dense",
        f"{ours}.transform.norm": "predictions.LayerNorm",
        f"{ours}.words": "predictions.decoder",
        f"{ours}.bias": "predictions.bias",
    }


def names(settings: Settings) -> Names:
    """The body's weights: block number g·inner + k is the k-th of group g."""
    inner = settings.layers("inner_group_num", 1)
    found = dict(OUTSIDE)
    for number in set(order(settings)):
        group, k = divmod(number, inner)
        found |= block_names(f"tower.blocks.{number}", f"encoder.albert_layer_groups.{group}.albert_layers.{k}")
    return found


def order(settings: Settings) -> list[int]:
    """Which block stands at each depth: a layer is all blocks of its group.

    >>> order(Settings({"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2}))
    [0, 1, 0, 1, 0, 1, 2, 3, 2, 3]

    Raises ValueError for more groups than layers, and for a model deeper than any is.
    """
    layers, groups = settings.layers("num_hidden_layers"), settings.layers("num_hidden_groups", 1)
    inner = settings.layers("inner_group_num", 1)
    if groups > layers or layers * inner > MOST_LAYERS:
        raise ValueError(
            f"{settings.where}: {layers} layers in {groups} groups of {inner} blocks; a group needs a layer of "
            f"its own, and no model is more than {MOST_LAYERS} blocks deep"
        )
    per_group = layers / groups
    # Divided in floating point, as transformers does: of 18 layers in 14 groups the tenth is in group 6, not 7.
    return [int(layer / per_group) * inner + k for layer in range(layers) for k in range(inner)]


def tower(settings: Settings) -> Tower:
    """Embedding and blocks."""
    d, e = settings.whole("hidden_size"), settings.whole("embedding_size", 128)
    eps, dropout = settings.eps("layer_norm_eps", 1e-12), settings.number("hidden_dropout_prob", 0.0)
    settings.only("position_embedding_type", "absolute")
    embed = Embedding(
        settings.whole("vocab_size"),
        e,
        positions=nn.Embedding(settings.whole("max_position_embeddings"), e),
        types=settings.whole("type_vocab_size", 2),
        norm=nn.LayerNorm(e, eps),
        widen=d,
        dropout=dropout,
    )

    def block() -> Block:
        return encoder_block(
            d,
            settings.whole("num_attention_heads"),
            settings.whole("intermediate_size"),
            settings.text("hidden_act", "gelu_new"),
            eps=eps,
            dropout=dropout,
            attention_dropout=settings.number("attention_probs_dropout_prob", 0.0),
        )

    depth = order(settings)
    return Tower(embed, [block() for _ in set(depth)], causal=False, order=depth)


def words(settings: Settings) -> LanguageHead:
    """The masked LM: vectors made narrow again and scored against the token table, or one of its own."""
    d, e = settings.whole("hidden_size"), settings.whole("embedding_size", 128)
    norm = nn.LayerNorm(e, settings.eps("layer_norm_eps", 1e-12))
    transform = Transform(d, e, settings.text("hidden_act", "gelu_new"), norm)
    return LanguageHead(settings.whole("vocab_size"), None if settings.tied() else e, transform=transform, bias=True)


def build(settings: Settings, task: str) -> TextModel:
    """The model for a task."""
    d, n = settings.whole("hidden_size"), settings.label_count()
    dropout = settings.number("classifier_dropout_prob", 0.1)
    for key, off in OFF.items():
        settings.only(key, off)
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "fill": lambda: words(settings),
        "pretrain": lambda: PretrainingHead(words(settings), Labels(d, 2, pooled=True, dropout=dropout)),
        "classify": lambda: Labels(d, n, pooled=True, dropout=dropout),
        "tag": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "answer": lambda: Labels(d, 2, pooled=False),
        "none": lambda: None,
    }
    pooler = Pooler(d) if task in POOLED else None
    return TextModel(settings, tower(settings), pooler=pooler, head=heads[task]())


FAMILY = Family(
    title="ALBERT",
    model_type="albert",
    prefix="albert",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="AlbertModel"),
        "fill": Task(architecture="AlbertForMaskedLM", names=word_names("head"), copies=COPIES),
        "pretrain": Task(
            architecture="AlbertForPreTraining",
            names={**word_names("head.words"), "head.relation.score": "sop_classifier.classifier"},
            copies=COPIES,
        ),
        "classify": Task(architecture="AlbertForSequenceClassification", names={"head.score": "classifier"}),
        "tag": Task(architecture="AlbertForTokenClassification", names={"head.score": "classifier"}),
        "answer": Task(architecture="AlbertForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"embeddings\.position_ids$", r"^predictions\.decoder\.(weight|bias)$"),
)
