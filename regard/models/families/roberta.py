"""RoBERTa (Liu et al. 2019): BERT trained longer, on whole texts, without the next sentence.

Peculiar: positions are counted from the id of the padding token + 1, so the first rows of their table are never used;
the heads have layers of their own instead of a pooler. transformers counts the ids that are not padding, regard the
tokens of the mask: the same where what is masked holds the padding's id, as every tokenizer makes it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import Settings
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


def words(settings: Settings) -> LanguageHead:
    """The masked LM. Its activation is GELU whatever that of the blocks is."""
    d, vocabulary = settings.whole("hidden_size"), settings.whole("vocab_size")
    transform = Transform(d, d, "gelu", nn.LayerNorm(d, settings.eps("layer_norm_eps", 1e-12)))
    return LanguageHead(vocabulary, None if settings.tied() else d, transform=transform, bias=True)


def text_labels(settings: Settings) -> FirstToken:
    """Scores of the labels of a text."""
    dropout = settings.number("classifier_dropout", settings.number("hidden_dropout_prob", 0.1))
    d, n = settings.whole("hidden_size"), settings.label_count()
    return FirstToken(d, n, "tanh", before=dropout, dropout=dropout)


def build(settings: Settings, task: str) -> TextModel:
    """The model for a task."""
    d = settings.whole("hidden_size")
    tower = bert.tower(settings, offset=settings.whole("pad_token_id", 1, least=0) + 1)
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "fill": lambda: words(settings),
        "classify": lambda: text_labels(settings),
        "tag": lambda: bert.labels(settings, settings.label_count(), pooled=False),
        "answer": lambda: Labels(d, 2, pooled=False),
        "none": lambda: None,
    }
    return TextModel(settings, tower, pooler=Pooler(d) if task == "none" else None, head=heads[task]())


FAMILY = Family(
    title="RoBERTa",
    model_type="roberta",
    prefix="roberta",
    build=build,
    names=bert.names,
    tasks={
        "none": Task(architecture="RobertaModel"),
        "fill": Task(architecture="RobertaForMaskedLM", names=WORDS, copies=COPIES),
        "classify": Task(
            architecture="RobertaForSequenceClassification",
            names={"head.dense": "classifier.dense", "head.score": "classifier.out_proj"},
        ),
        "tag": Task(architecture="RobertaForTokenClassification", names={"head.score": "classifier"}),
        "answer": Task(architecture="RobertaForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"embeddings\.position_ids$", r"^lm_head\.decoder\.(weight|bias)$"),
)
