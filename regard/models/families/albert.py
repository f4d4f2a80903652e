"""ALBERT (Lan et al. 2019): a BERT with few weights.

Peculiar: tokens are embedded in a narrow table and widened after the norm; layers share their weights. The layers fall
into `num_hidden_groups` groups, each with `inner_group_num` blocks, and every layer of a group is those blocks in turn;
the published models have one group of one block. It learns the order of two sentences, not whether one follows.
In training regard drops out what feed-forward adds, as the authors' code does and transformers does not.
"""

from __future__ import annotations

from torch import nn

from regard.models.families import bert
from regard.models.family import MAX_LAYERS, Config, Family, Heads, Names, nested
from regard.models.text import TextModel
from regard.nn.blocks import Labels, LanguageHead, Pooler, PretrainingHead

OUTSIDE: Names = {
    "tower.embed.tokens": "embeddings.word_embeddings",
    "tower.embed.positions": "embeddings.position_embeddings",
    "tower.embed.types": "embeddings.token_type_embeddings",
    "tower.embed.norm": "embeddings.LayerNorm",
    "tower.embed.widen": "encoder.embedding_hidden_mapping_in",
    "pooler.dense": "pooler",
}
# In the settings of the first published models; no other values are in use.
OFF = {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0, "layers_to_keep": []}
COPIES = {
    "predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}
POOLED = {"feature-extraction", "pretraining", "text-classification"}  # the tasks that look at the pooled vector


BLOCK = {
    **{f"attention.w_{x[0]}": f"attention.{x}" for x in ("query", "key", "value")},
    "attention.w_o": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "feed_forward.w_in": "ffn",
    "feed_forward.w_out": "ffn_output",
    "feed_forward_norm": "full_layer_layer_norm",
}
WORDS: Names = {
    "head.transform.dense": "predictions.dense",
    "head.transform.norm": "predictions.LayerNorm",
    "head.words": "predictions.decoder",
    "head.bias": "predictions.bias",
}


def names(config: Config) -> Names:
    """The body's weights: block number g·inner + k is the k-th of group g."""
    inner = config.layers("inner_group_num", 1)
    templates = dict(OUTSIDE)
    for number in set(order(config)):
        group, k = divmod(number, inner)
        theirs = f"encoder.albert_layer_groups.{group}.albert_layers.{k}."
        templates |= nested(BLOCK, f"tower.blocks.{number}.", theirs)
    return templates


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


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, n, e = config.int("hidden_size"), config.num_labels(), config.int("embedding_size", 128)
    dropout = config.float("classifier_dropout_prob", 0.1)
    for key, off in OFF.items():
        config.only(key, off)

    def words() -> LanguageHead:
        norm = nn.LayerNorm(e, config.eps("layer_norm_eps", 1e-12))
        return bert.lm_head(config, d, config.str("hidden_act", "gelu_new"), norm)

    heads: Heads = {
        "fill-mask": words,
        "pretraining": lambda: PretrainingHead(words(), Labels(d, 2, pooled=True, dropout=dropout)),
        "text-classification": lambda: Labels(d, n, pooled=True, dropout=dropout),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    tower = bert.tower(config, narrow=e, function="gelu_new", dropout=0.0, order=order(config))
    pooler = Pooler(d) if task in POOLED else None
    return TextModel(config, tower, pooler=pooler, head=heads[task]() if task in heads else None)


FAMILY = Family(
    title="ALBERT",
    model_type="albert",
    prefix="albert",
    build=build,
    names=names,
    tasks=bert.tasks("Albert", WORDS, COPIES, pretraining={"head.relation.score": "sop_classifier.classifier"}),
    ignored=(r"embeddings\.position_ids$", r"^predictions\.decoder\.(weight|bias)$"),
)
