"""BERT (Devlin et al. 2018): an encoder that sees both ways, trained to fill in hidden words.

Peculiar: the segment of each token is embedded beside word and position; the sum of the three is normed; blocks norm
after adding, as in 2017; a pooler sums up a text in its first token. Sentence encoders such as MiniLM are BERTs too.
RoBERTa, Longformer and BigBird take their tower, heads and tasks from here.

DistilBERT (Sanh et al. 2019): a BERT of half the layers, taught by a whole one.
Peculiar: no segments and no pooler; settings and weights have names of their own; the norms' epsilon is no setting.
In training regard's block also drops out what attention adds, as BERT does and DistilBERT does not.

ELECTRA (Clark et al. 2020): a BERT that learns to tell which tokens a small generator has replaced.
Peculiar: the embedding may be narrower than the model; no pooler. The discriminator gives one logit per token, above 0
for a replaced one (task "replaced-token-detection"); the generator is a masked LM (task "fill-mask").

ALBERT (Lan et al. 2019): a BERT with few weights.
Peculiar: tokens are embedded in a narrow table and widened after the norm; layers share their weights. The layers fall
into `num_hidden_groups` groups, each with `inner_group_num` blocks, and every layer of a group is those blocks in turn;
the published models have one group of one block. It learns the order of two sentences, not whether one follows.
In training regard drops out what feed-forward adds, as the authors' code does and transformers does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from regard.models.family import MAX_LAYERS, Concat, Config, Family, Heads, Names, Task, nested
from regard.models.text import TextModel
from regard.nn.blocks import (
    Block,
    Embedding,
    FirstToken,
    HeadInput,
    Labels,
    LanguageHead,
    Pooler,
    PretrainingHead,
    Tower,
    Transform,
    activation,
    encoder_block,
)
from regard.nn.projections import Linear

LAYER = "encoder.layer.{i}."
NAMES: Names = {
    "tower.embed.tokens": "embeddings.word_embeddings",
    "tower.embed.positions": "embeddings.position_embeddings",
    "tower.embed.types": "embeddings.token_type_embeddings",
    "tower.embed.norm": "embeddings.LayerNorm",
    **{f"tower.blocks.{{i}}.attention.w_{x[0]}": f"{LAYER}attention.self.{x}" for x in ("query", "key", "value")},
    "tower.blocks.{i}.attention.w_o": f"{LAYER}attention.output.dense",
    "tower.blocks.{i}.attention_norm": f"{LAYER}attention.output.LayerNorm",
    "tower.blocks.{i}.feed_forward.w_in": f"{LAYER}intermediate.dense",
    "tower.blocks.{i}.feed_forward.w_out": f"{LAYER}output.dense",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}output.LayerNorm",
    "pooler.dense": "pooler.dense",
}
JOINED: Names = {
    **{ours: theirs for ours, theirs in NAMES.items() if not ours.endswith(("w_q", "w_k", "w_v"))},
    "tower.blocks.{i}.attention.w_qkv": Concat(*(f"{LAYER}attention.self.{x}" for x in ("query", "key", "value"))),
}
"""The same where one matrix makes queries, keys and values."""
WORDS: Names = {
    "head.transform.dense": "cls.predictions.transform.dense",
    "head.transform.norm": "cls.predictions.transform.LayerNorm",
    "head.words": "cls.predictions.decoder",
    "head.bias": "cls.predictions.bias",
}
COPIES = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
RELATION = "cls.seq_relationship"
OUT_PROJ: Names = {"head.dense": "classifier.dense", "head.score": "classifier.out_proj"}  # of RoBERTa and others
# The tasks that look at the pooled vector.
POOLED = {"feature-extraction", "next-sentence-prediction", "pretraining", "text-classification"}


def tower(
    config: Config,
    *,
    offset: int = 0,
    narrow: int | None = None,
    function: str = "gelu",
    dropout: float = 0.1,
    order: Sequence[int] | None = None,
    usual: Mapping[str, int] | None = None,
) -> Tower:
    """Embedding and blocks.

    offset: of the positions, for RoBERTa.  narrow: width of an embedding that is widened, for ALBERT and ELECTRA.
    function, dropout, usual: the values of config.json's keys where it has none.  order: as in `Tower`.
    """
    usual = usual or {}
    sizes = ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads", "intermediate_size")
    d, vocabulary, positions, heads, inner = (config.int(key, usual.get(key)) for key in sizes)
    e, eps = narrow or d, config.eps("layer_norm_eps", 1e-12)
    added = config.float("hidden_dropout_prob", dropout)
    config.only("position_embedding_type", "absolute")
    embed = Embedding(
        vocabulary,
        e,
        positions=nn.Embedding(positions, e),
        offset=offset,
        types=config.int("type_vocab_size", 2, minimum=0),
        norm=nn.LayerNorm(e, eps),
        widen=None if narrow is None else d,
        dropout=added,
    )

    def block() -> Block:
        return encoder_block(
            d,
            heads,
            inner,
            config.str("hidden_act", function),
            eps=eps,
            dropout=added,
            attention_dropout=config.float("attention_probs_dropout_prob", dropout),
        )

    depth = config.layers("num_hidden_layers", usual.get("num_hidden_layers")) if order is None else len(set(order))
    return Tower(embed, [block() for _ in range(depth)], causal=False, order=order)


def lm_head(
    config: Config,
    d: int,
    function: str,
    *,
    narrow: int | None = None,
    eps: float | None = None,
    vocabulary: int | None = None,
) -> LanguageHead:
    """The masked LM: vectors, transformed, are scored against the token table, or one of its own.

    narrow: width of the table where it is not d.  eps: of the norm where it is no setting.  vocabulary: its size where
    config.json does not say.
    """
    e, eps = narrow or d, config.eps("layer_norm_eps", 1e-12) if eps is None else eps
    own_table = None if config.tie_word_embeddings() else e
    transform = Transform(d, e, function, nn.LayerNorm(e, eps))
    return LanguageHead(config.int("vocab_size", vocabulary), own_table, transform=transform, bias=True)


def tasks(
    name: str, words: Names, copies: Mapping[str, str], *, text: Names | None = None, pretraining: Names | None = None
) -> dict[str, Task]:
    """The tasks that BERT and its kin share.

    name: how the classes of `transformers` begin.  words, copies: weights of the masked LM, and copies of them.
    text: weights of the text classifier.  pretraining: weights beside the masked LM's, for models that have that task.
    """
    shared = {
        "feature-extraction": Task(architecture=f"{name}Model"),
        "fill-mask": Task(architecture=f"{name}ForMaskedLM", names=words, copies=copies),
        "text-classification": Task(
            architecture=f"{name}ForSequenceClassification", names=text or {"head.score": "classifier"}
        ),
        "token-classification": Task(architecture=f"{name}ForTokenClassification", names={"head.score": "classifier"}),
        "question-answering": Task(architecture=f"{name}ForQuestionAnswering", names={"head.score": "qa_outputs"}),
    }
    if pretraining is not None:
        both = {ours.replace("head.", "head.words.", 1): theirs for ours, theirs in words.items()} | dict(pretraining)
        shared["pretraining"] = Task(architecture=f"{name}ForPreTraining", names=both, copies=copies)
    return shared


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, n = config.int("hidden_size"), config.num_labels()
    dropout = config.float("classifier_dropout", config.float("hidden_dropout_prob", 0.1))

    def words() -> LanguageHead:
        return lm_head(config, d, config.str("hidden_act", "gelu"))

    heads: Heads = {
        "fill-mask": words,
        "next-sentence-prediction": lambda: Labels(d, 2, pooled=True),
        "pretraining": lambda: PretrainingHead(words(), Labels(d, 2, pooled=True)),
        "text-classification": lambda: Labels(d, n, pooled=True, dropout=dropout),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    pooler = Pooler(d) if task in POOLED else None
    return TextModel(config, tower(config), pooler=pooler, head=heads[task]() if task in heads else None)


FAMILY = Family(
    title="BERT",
    model_type="bert",
    prefix="bert",
    build=build,
    names=NAMES,
    tasks={
        **tasks("Bert", WORDS, COPIES, pretraining={"head.relation.score": RELATION}),
        "next-sentence-prediction": Task(architecture="BertForNextSentencePrediction", names={"head.score": RELATION}),
    },
    ignored=(r"embeddings\.position_ids$", r"^cls\.predictions\.decoder\.(weight|bias)$"),
    renamed={".gamma": ".weight", ".beta": ".bias"},
)


# ---------------------------------------------------------------------------------------------------------- DistilBERT


DISTIL_LAYER = "transformer.layer.{i}."
DISTIL_NAMES: Names = {
    **{f"tower.embed.{part}": NAMES[f"tower.embed.{part}"] for part in ("tokens", "positions", "norm")},
    **{f"tower.blocks.{{i}}.attention.w_{x}": f"{DISTIL_LAYER}attention.{x}_lin" for x in "qkv"},
    "tower.blocks.{i}.attention.w_o": f"{DISTIL_LAYER}attention.out_lin",
    "tower.blocks.{i}.attention_norm": f"{DISTIL_LAYER}sa_layer_norm",
    "tower.blocks.{i}.feed_forward.w_in": f"{DISTIL_LAYER}ffn.lin1",
    "tower.blocks.{i}.feed_forward.w_out": f"{DISTIL_LAYER}ffn.lin2",
    "tower.blocks.{i}.feed_forward_norm": f"{DISTIL_LAYER}output_layer_norm",
}
DISTIL_WORDS: Names = {
    "head.transform.dense": "vocab_transform",
    "head.transform.norm": "vocab_layer_norm",
    "head.words": "vocab_projector",
    "head.bias": "vocab_projector.bias",
}
DISTIL_EPS = 1e-12


def build_distil(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, n, function = config.int("dim"), config.num_labels(), config.str("activation", "gelu")
    dropout = config.float("dropout", 0.1)
    text, answer = config.float("seq_classif_dropout", 0.2), config.float("qa_dropout", 0.1)
    config.only("tie_weights_", True)  # the first models say so; `tie_word_embeddings` is what is read now

    def block() -> Block:
        return encoder_block(
            d,
            config.int("n_heads"),
            config.int("hidden_dim"),
            function,
            eps=DISTIL_EPS,
            dropout=dropout,
            attention_dropout=config.float("attention_dropout", 0.1),
        )

    positions, norm = nn.Embedding(config.int("max_position_embeddings"), d), nn.LayerNorm(d, DISTIL_EPS)
    embed = Embedding(config.int("vocab_size"), d, positions=positions, norm=norm, dropout=dropout)
    heads: Heads = {
        "fill-mask": lambda: lm_head(config, d, function, eps=DISTIL_EPS),
        "text-classification": lambda: FirstToken(d, n, "relu", dropout=text),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False, dropout=answer),
    }
    body = Tower(embed, [block() for _ in range(config.layers("n_layers"))], causal=False)
    return TextModel(config, body, head=heads[task]() if task in heads else None)


DISTILBERT = Family(
    title="DistilBERT",
    model_type="distilbert",
    prefix="distilbert",
    build=build_distil,
    names=DISTIL_NAMES,
    tasks=tasks(
        "DistilBert",
        DISTIL_WORDS,
        {"vocab_projector.weight": "embeddings.word_embeddings.weight"},
        text={"head.dense": "pre_classifier", "head.score": "classifier"},
    ),
    ignored=(r"embeddings\.position_ids$", r"^vocab_projector\.weight$"),
    # Sines and cosines or not, the table of positions is in the checkpoint.
    harmless=("sinusoidal_pos_embds",),
)


# ------------------------------------------------------------------------------------------------------------- ELECTRA


ELECTRA_NAMES: Names = {
    **{ours: theirs for ours, theirs in NAMES.items() if not ours.startswith("pooler.")},
    "tower.embed.widen": "embeddings_project",
}
ELECTRA_WORDS: Names = {
    "head.transform.dense": "generator_predictions.dense",
    "head.transform.norm": "generator_predictions.LayerNorm",
    "head.words": "generator_lm_head",
    "head.bias": "generator_lm_head.bias",
}
ELECTRA_SIZES = {
    "hidden_size": 256,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
}


class ReplacedTokens(nn.Module):
    """One logit per token: above 0 where the token was replaced."""

    def __init__(self, d: int, function: str) -> None:
        super().__init__()
        self.dense, self.function, self.score = Linear(d, d), activation(function), Linear(d, 1)

    def forward(self, seen: HeadInput) -> Tensor:
        """→ (B, N)."""
        return cast(Tensor, self.score(self.function(self.dense(seen.last_hidden_state)))).squeeze(-1)

    def loss(self, logits: Tensor, labels: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """Binary cross-entropy of labels (B, N), 1 = replaced, without padding."""
        if labels is None or labels.shape != logits.shape:
            got = None if labels is None else tuple(labels.shape)
            raise ValueError(f"labels must be {tuple(logits.shape)} as input_ids, 1 = replaced, got {got}")
        real = torch.ones_like(logits, dtype=torch.bool) if attention_mask is None else attention_mask
        return binary_cross_entropy_with_logits(logits[real], labels[real].to(logits))


def build_electra(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, e = config.int("hidden_size", ELECTRA_SIZES["hidden_size"]), config.int("embedding_size", 128)
    dropout = config.float("classifier_dropout", config.float("hidden_dropout_prob", 0.1))

    heads: Heads = {
        "replaced-token-detection": lambda: ReplacedTokens(d, config.str("hidden_act", "gelu")),
        "fill-mask": lambda: lm_head(config, d, "gelu", narrow=e, vocabulary=ELECTRA_SIZES["vocab_size"]),
        "text-classification": lambda: FirstToken(d, config.num_labels(), "gelu", before=dropout, dropout=dropout),
        "token-classification": lambda: Labels(d, config.num_labels(), pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    body = tower(config, narrow=None if d == e else e, usual=ELECTRA_SIZES)
    return TextModel(config, body, head=heads[task]() if task in heads else None)


ELECTRA = Family(
    title="ELECTRA",
    model_type="electra",
    prefix="electra",
    build=build_electra,
    names=ELECTRA_NAMES,
    tasks={
        **tasks(
            "Electra", ELECTRA_WORDS, {"generator_lm_head.weight": "embeddings.word_embeddings.weight"}, text=OUT_PROJ
        ),
        "replaced-token-detection": Task(
            architecture="ElectraForPreTraining",
            names={
                "head.dense": "discriminator_predictions.dense",
                "head.score": "discriminator_predictions.dense_prediction",
            },
        ),
    },
    ignored=(r"embeddings\.position_ids$", r"^generator_lm_head\.weight$"),
    # The summary is for multiple choice.
    harmless=tuple(f"summary_{x}" for x in ("activation", "last_dropout", "type", "use_proj")),
)


# -------------------------------------------------------------------------------------------------------------- ALBERT


ALBERT_OUTSIDE: Names = {
    **{ours: theirs for ours, theirs in NAMES.items() if ours.startswith("tower.embed.")},
    "tower.embed.widen": "encoder.embedding_hidden_mapping_in",
    "pooler.dense": "pooler",
}
# In the settings of the first published models; no other values are in use.
ALBERT_OFF = {
    "down_scale_factor": 1,
    "gap_size": 0,
    "net_structure_type": 0,
    "num_memory_blocks": 0,
    "layers_to_keep": [],
}
ALBERT_COPIES = {
    "predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}
ALBERT_BLOCK = {
    **{f"attention.w_{x[0]}": f"attention.{x}" for x in ("query", "key", "value")},
    "attention.w_o": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "feed_forward.w_in": "ffn",
    "feed_forward.w_out": "ffn_output",
    "feed_forward_norm": "full_layer_layer_norm",
}
ALBERT_WORDS: Names = {
    "head.transform.dense": "predictions.dense",
    "head.transform.norm": "predictions.LayerNorm",
    "head.words": "predictions.decoder",
    "head.bias": "predictions.bias",
}
ALBERT_RELATION: Names = {"head.relation.score": "sop_classifier.classifier"}


def albert_names(config: Config) -> Names:
    """The body's weights: block number g·inner + k is the k-th of group g."""
    inner = config.layers("inner_group_num", 1)
    templates = dict(ALBERT_OUTSIDE)
    for number in set(order(config)):
        group, k = divmod(number, inner)
        theirs = f"encoder.albert_layer_groups.{group}.albert_layers.{k}."
        templates |= nested(ALBERT_BLOCK, f"tower.blocks.{number}.", theirs)
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


def build_albert(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, n, e = config.int("hidden_size"), config.num_labels(), config.int("embedding_size", 128)
    dropout = config.float("classifier_dropout_prob", 0.1)
    for key, off in ALBERT_OFF.items():
        config.only(key, off)

    def words() -> LanguageHead:
        return lm_head(config, d, config.str("hidden_act", "gelu_new"), narrow=e)

    heads: Heads = {
        "fill-mask": words,
        "pretraining": lambda: PretrainingHead(words(), Labels(d, 2, pooled=True, dropout=dropout)),
        "text-classification": lambda: Labels(d, n, pooled=True, dropout=dropout),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    body = tower(config, narrow=e, function="gelu_new", dropout=0.0, order=order(config))
    pooler = Pooler(d) if task in POOLED else None
    return TextModel(config, body, pooler=pooler, head=heads[task]() if task in heads else None)


ALBERT = Family(
    title="ALBERT",
    model_type="albert",
    prefix="albert",
    build=build_albert,
    names=albert_names,
    tasks=tasks(
        "Albert", ALBERT_WORDS, ALBERT_COPIES, pretraining={"head.relation.score": "sop_classifier.classifier"}
    ),
    ignored=(r"embeddings\.position_ids$", r"^predictions\.decoder\.(weight|bias)$"),
)
