"""BERT (Devlin et al. 2018): an encoder that sees both ways, trained to fill in hidden words.

Peculiar: the segment of each token is embedded beside word and position; the sum of the three is normed; blocks norm
after adding, as in 2017; a pooler sums up a text in its first token. Sentence encoders such as MiniLM are BERTs too.
RoBERTa, ALBERT, ELECTRA, Longformer and BigBird take their tower, heads and tasks from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from regard.models.family import Concat, Config, Family, Heads, Names, Task
from regard.models.text import TextModel
from regard.nn.blocks import (
    Block,
    Embedding,
    Labels,
    LanguageHead,
    Pooler,
    PretrainingHead,
    Tower,
    Transform,
    encoder_block,
)

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
    config: Config, d: int, function: str, norm: nn.LayerNorm, *, vocabulary: int | None = None
) -> LanguageHead:
    """The masked LM: vectors transformed to the norm's width and scored against the token table, or one of its own.

    vocabulary: its size where config.json does not say.
    """
    (e,) = norm.normalized_shape
    own_table = None if config.tie_word_embeddings() else e
    transform = Transform(d, e, function, norm)
    return LanguageHead(config.int("vocab_size", vocabulary), own_table, transform=transform, bias=True)


def token_labels(config: Config) -> Labels:
    """Scores of the labels of each token."""
    dropout = config.float("classifier_dropout", config.float("hidden_dropout_prob", 0.1))
    return Labels(config.int("hidden_size"), config.num_labels(), pooled=False, dropout=dropout)


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
        norm = nn.LayerNorm(d, config.eps("layer_norm_eps", 1e-12))
        return lm_head(config, d, config.str("hidden_act", "gelu"), norm)

    heads: Heads = {
        "fill-mask": words,
        "next-sentence-prediction": lambda: Labels(d, 2, pooled=True),
        "pretraining": lambda: PretrainingHead(words(), Labels(d, 2, pooled=True)),
        "text-classification": lambda: Labels(d, n, pooled=True, dropout=dropout),
        "token-classification": lambda: token_labels(config),
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
