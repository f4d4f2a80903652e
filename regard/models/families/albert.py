"""ALBERT (Lan et al. 2019): a BERT with few weights.

Peculiar: tokens are embedded in a narrow table and widened after the norm; layers share their weights. The layers fall
into `num_hidden_groups` groups, each with `inner_group_num` blocks, and every layer of a group is those blocks in turn;
the published models have one group of one block. It learns the order of two sentences, not whether one follows.
In training regard drops out what feed-forward adds, as the authors' code does and transformers does not.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import MAX_LAYERS, Config
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
POOLED = {"feature-extraction", "pretraining", "text-classification"}  # the tasks that look at the pooled vector


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


def names(config: Config) -> Names:
    """The body's weights: block number g·inner + k is the k-th of group g."""
    inner = config.layers("inner_group_num", 1)
    found = dict(OUTSIDE)
    for number in set(order(config)):
        group, k = divmod(number, inner)
        found |= block_names(f"tower.blocks.{number}", f"encoder.albert_layer_groups.{group}.albert_layers.{k}")
    return found


def order(config: Config) -> list[int]:
    """Which block stands at each depth: a layer is all blocks of its group.

    >>> order(Config({"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2}))
    [0, 1, 0, 1, 0, 1, 2, 3, 2, 3]

    Raises ValueError for more groups than layers, and for a model deeper than any is.
    """
    layers, groups = config.layers("num_hidden_layers"), config.layers("num_hidden_groups", 1)
    inner = config.layers("inner_group_num", 1)
    if groups > layers or layers * inner > MAX_LAYERS:
        raise ValueError(
            f"{config.where}: {layers} layers in {groups} groups of {inner} blocks; a group needs a layer of "
            f"its own, and no model is more than {MAX_LAYERS} blocks deep"
        )
    per_group = layers / groups
    # Divided in floating point, as transformers does: of 18 layers in 14 groups the tenth is in group 6, not 7.
    return [int(layer / per_group) * inner + k for layer in range(layers) for k in range(inner)]


def tower(config: Config) -> Tower:
    """Embedding and blocks."""
    d, e = config.int("hidden_size"), config.int("embedding_size", 128)
    eps, dropout = config.eps("layer_norm_eps", 1e-12), config.float("hidden_dropout_prob", 0.0)
    config.only("position_embedding_type", "absolute")
    embed = Embedding(
        config.int("vocab_size"),
        e,
        positions=nn.Embedding(config.int("max_position_embeddings"), e),
        types=config.int("type_vocab_size", 2),
        norm=nn.LayerNorm(e, eps),
        widen=d,
        dropout=dropout,
    )

    def block() -> Block:
        return encoder_block(
            d,
            config.int("num_attention_heads"),
            config.int("intermediate_size"),
            config.str("hidden_act", "gelu_new"),
            eps=eps,
            dropout=dropout,
            attention_dropout=config.float("attention_probs_dropout_prob", 0.0),
        )

    depth = order(config)
    return Tower(embed, [block() for _ in set(depth)], causal=False, order=depth)


def words(config: Config) -> LanguageHead:
    """The masked LM: vectors made narrow again and scored against the token table, or one of its own."""
    d, e = config.int("hidden_size"), config.int("embedding_size", 128)
    norm = nn.LayerNorm(e, config.eps("layer_norm_eps", 1e-12))
    transform = Transform(d, e, config.str("hidden_act", "gelu_new"), norm)
    return LanguageHead(
        config.int("vocab_size"), None if config.tie_word_embeddings() else e, transform=transform, bias=True
    )


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, n = config.int("hidden_size"), config.num_labels()
    dropout = config.float("classifier_dropout_prob", 0.1)
    for key, off in OFF.items():
        config.only(key, off)
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "fill-mask": lambda: words(config),
        "pretraining": lambda: PretrainingHead(words(config), Labels(d, 2, pooled=True, dropout=dropout)),
        "text-classification": lambda: Labels(d, n, pooled=True, dropout=dropout),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
        "feature-extraction": lambda: None,
    }
    pooler = Pooler(d) if task in POOLED else None
    return TextModel(config, tower(config), pooler=pooler, head=heads[task]())


FAMILY = Family(
    title="ALBERT",
    model_type="albert",
    prefix="albert",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="AlbertModel"),
        "fill-mask": Task(architecture="AlbertForMaskedLM", names=word_names("head"), copies=COPIES),
        "pretraining": Task(
            architecture="AlbertForPreTraining",
            names={**word_names("head.words"), "head.relation.score": "sop_classifier.classifier"},
            copies=COPIES,
        ),
        "text-classification": Task(architecture="AlbertForSequenceClassification", names={"head.score": "classifier"}),
        "token-classification": Task(architecture="AlbertForTokenClassification", names={"head.score": "classifier"}),
        "question-answering": Task(architecture="AlbertForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"embeddings\.position_ids$", r"^predictions\.decoder\.(weight|bias)$"),
)
