"""RoBERTa (Liu et al. 2019): BERT trained longer, on whole texts, without the next sentence.

Peculiar: positions are counted from the id of the padding token + 1, so the first rows of their table are never used;
the heads have layers of their own instead of a pooler. transformers counts the ids that are not padding, regard the
tokens of the mask: the same where what is masked holds the padding's id, as every tokenizer makes it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import Config
from regard.models.families import bert
from regard.models.family import Family, Names, Task
from regard.models.text import TextModel
from regard.nn.heads import FirstToken, Labels, LanguageHead, Pooler, Transform

__all__ = ["FAMILY"]

WORDS: Names = {
    "head.transform.dense": "lm_head.dense",
    "head.transform.norm": "lm_head.layer_norm",
    "head.words": "lm_head.decoder",
    "head.bias": "lm_head.bias",
}
COPIES = {"lm_head.decoder.weight": "embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"}


def words(config: Config) -> LanguageHead:
    """The masked LM. Its activation is GELU whatever that of the blocks is."""
    d, vocabulary = config.int("hidden_size"), config.int("vocab_size")
    transform = Transform(d, d, "gelu", nn.LayerNorm(d, config.eps("layer_norm_eps", 1e-12)))
    return LanguageHead(vocabulary, None if config.tie_word_embeddings() else d, transform=transform, bias=True)


def text_labels(config: Config) -> FirstToken:
    """Scores of the labels of a text."""
    dropout = config.float("classifier_dropout", config.float("hidden_dropout_prob", 0.1))
    d, n = config.int("hidden_size"), config.num_labels()
    return FirstToken(d, n, "tanh", before=dropout, dropout=dropout)


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d = config.int("hidden_size")
    tower = bert.tower(config, offset=config.int("pad_token_id", 1, minimum=0) + 1)
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "fill-mask": lambda: words(config),
        "text-classification": lambda: text_labels(config),
        "token-classification": lambda: bert.labels(config, config.num_labels(), pooled=False),
        "question-answering": lambda: Labels(d, 2, pooled=False),
        "feature-extraction": lambda: None,
    }
    return TextModel(config, tower, pooler=Pooler(d) if task == "feature-extraction" else None, head=heads[task]())


FAMILY = Family(
    title="RoBERTa",
    model_type="roberta",
    prefix="roberta",
    build=build,
    names=bert.names,
    tasks={
        "feature-extraction": Task(architecture="RobertaModel"),
        "fill-mask": Task(architecture="RobertaForMaskedLM", names=WORDS, copies=COPIES),
        "text-classification": Task(
            architecture="RobertaForSequenceClassification",
            names={"head.dense": "classifier.dense", "head.score": "classifier.out_proj"},
        ),
        "token-classification": Task(architecture="RobertaForTokenClassification", names={"head.score": "classifier"}),
        "question-answering": Task(architecture="RobertaForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"embeddings\.position_ids$", r"^lm_head\.decoder\.(weight|bias)$"),
)
