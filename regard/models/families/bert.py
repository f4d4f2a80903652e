"""BERT (Devlin et al. 2018): an encoder that sees both ways, trained to fill in hidden words.

Peculiar: the segment of each token is embedded beside word and position; the sum of the three is normed; blocks norm
after adding, as in 2017; a pooler sums up a text in its first token. Sentence encoders such as MiniLM are BERTs too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import Config
from regard.models.family import Concat, Family, Names, Task
from regard.models.text import TextModel
from regard.nn.blocks import Block, Embedding, Tower, encoder_block
from regard.nn.heads import Labels, LanguageHead, Pooler, PretrainingHead, Transform

__all__ = ["FAMILY", "labels", "names", "tower"]

LAYER = "encoder.layer.{i}."
NAMES: Names = {
    "tower.embed.tokens": "embeddings.word_embeddings",
    "tower.embed.positions": "embeddings.position_embeddings",
    "tower.embed.types": "embeddings.token_type_embeddings",
    "tower.embed.norm": "embeddings.LayerNorm",
    "tower.blocks.{i}.attention.w_q": f"{LAYER}attention.self.query",
    "tower.blocks.{i}.attention.w_k": f"{LAYER}attention.self.key",
    "tower.blocks.{i}.attention.w_v": f"{LAYER}attention.self.value",
    "tower.blocks.{i}.attention.w_o": f"{LAYER}attention.output.dense",
    "tower.blocks.{i}.attention_norm": f"{LAYER}attention.output.LayerNorm",
    "tower.blocks.{i}.feed_forward.w_in": f"{LAYER}intermediate.dense",
    "tower.blocks.{i}.feed_forward.w_out": f"{LAYER}output.dense",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}output.LayerNorm",
    "pooler.dense": "pooler.dense",
}
SEPARATE = {f"tower.blocks.{{i}}.attention.{w}" for w in ("w_q", "w_k", "w_v")}
JOINED: Names = {
    **{ours: theirs for ours, theirs in NAMES.items() if ours not in SEPARATE},
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
POOLED = {
    "feature-extraction",
    "next-sentence-prediction",
    "pretraining",
    "text-classification",
}  # the tasks that look at the pooled vector


def names(config: Config) -> Names:
    """The body's weights, the same in every BERT."""
    return NAMES


def tower(config: Config, *, offset: int = 0) -> Tower:
    """Embedding and blocks. offset: of the positions, for RoBERTa."""
    d, eps = config.int("hidden_size"), config.eps("layer_norm_eps", 1e-12)
    dropout = config.float("hidden_dropout_prob", 0.1)
    config.only("position_embedding_type", "absolute")
    embed = Embedding(
        config.int("vocab_size"),
        d,
        positions=nn.Embedding(config.int("max_position_embeddings"), d),
        offset=offset,
        types=config.int("type_vocab_size", 2, minimum=0),
        norm=nn.LayerNorm(d, eps),
        dropout=dropout,
    )

    def block() -> Block:
        return encoder_block(
            d,
            config.int("num_attention_heads"),
            config.int("intermediate_size"),
            config.str("hidden_act", "gelu"),
            eps=eps,
            dropout=dropout,
            attention_dropout=config.float("attention_probs_dropout_prob", 0.1),
        )

    return Tower(embed, [block() for _ in range(config.layers("num_hidden_layers"))], causal=False)


def words(config: Config) -> LanguageHead:
    """The masked LM: transformed vectors scored against the token table, or one of its own."""
    d, vocabulary = config.int("hidden_size"), config.int("vocab_size")
    norm = nn.LayerNorm(d, config.eps("layer_norm_eps", 1e-12))
    transform = Transform(d, d, config.str("hidden_act", "gelu"), norm)
    return LanguageHead(vocabulary, None if config.tie_word_embeddings() else d, transform=transform, bias=True)


def labels(config: Config, count: int, *, pooled: bool) -> Labels:
    """Scores of `count` labels, for the text or for each token."""
    dropout = config.float("classifier_dropout", config.float("hidden_dropout_prob", 0.1))
    return Labels(config.int("hidden_size"), count, pooled=pooled, dropout=dropout)


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, n = config.int("hidden_size"), config.num_labels()
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "fill-mask": lambda: words(config),
        "next-sentence-prediction": lambda: Labels(d, 2, pooled=True),
        "pretraining": lambda: PretrainingHead(words(config), Labels(d, 2, pooled=True)),
        "text-classification": lambda: labels(config, n, pooled=True),
        "token-classification": lambda: labels(config, n, pooled=False),
        "question-answering": lambda: Labels(d, 2, pooled=False),
        "feature-extraction": lambda: None,
    }
    pooler = Pooler(d) if task in POOLED else None
    return TextModel(config, tower(config), pooler=pooler, head=heads[task]())


FAMILY = Family(
    title="BERT",
    model_type="bert",
    prefix="bert",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="BertModel"),
        "fill-mask": Task(architecture="BertForMaskedLM", names=WORDS, copies=COPIES),
        "next-sentence-prediction": Task(architecture="BertForNextSentencePrediction", names={"head.score": RELATION}),
        "pretraining": Task(
            architecture="BertForPreTraining",
            names={
                **{name.replace("head.", "head.words.", 1): source for name, source in WORDS.items()},
                "head.relation.score": RELATION,
            },
            copies=COPIES,
        ),
        "text-classification": Task(architecture="BertForSequenceClassification", names={"head.score": "classifier"}),
        "token-classification": Task(architecture="BertForTokenClassification", names={"head.score": "classifier"}),
        "question-answering": Task(architecture="BertForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"embeddings\.position_ids$", r"^cls\.predictions\.decoder\.(weight|bias)$"),
    renamed={".gamma": ".weight", ".beta": ".bias"},
)
