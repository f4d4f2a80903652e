"""RoBERTa (Liu et al. 2019): BERT trained longer, on whole texts, without the next sentence.

XLM-RoBERTa (Conneau et al. 2019) is the same, trained on a hundred languages.

Peculiar: positions are counted from the id of the padding token + 1, so the first rows of their table are never used;
the heads have layers of their own instead of a pooler. transformers counts the ids that are not padding, regard the
tokens of the mask: the same where what is masked holds the padding's id, as every tokenizer makes it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from regard.models.families import bert
from regard.models.family import Config, Family, Heads, Names
from regard.models.text import TextModel
from regard.nn.blocks import FirstToken, Labels, LanguageHead, Pooler

WORDS: Names = {
    "head.transform.dense": "lm_head.dense",
    "head.transform.norm": "lm_head.layer_norm",
    "head.words": "lm_head.decoder",
    "head.bias": "lm_head.bias",
}
COPIES = {"lm_head.decoder.weight": "embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"}


def lm_head(config: Config) -> LanguageHead:
    """The masked LM. Its activation is GELU whatever that of the blocks is."""
    d = config.int("hidden_size")
    return bert.lm_head(config, d, "gelu", nn.LayerNorm(d, config.eps("layer_norm_eps", 1e-12)))


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d = config.int("hidden_size")
    dropout = config.float("classifier_dropout", config.float("hidden_dropout_prob", 0.1))
    heads: Heads = {
        "fill-mask": lambda: lm_head(config),
        "text-classification": lambda: FirstToken(d, config.num_labels(), "tanh", before=dropout, dropout=dropout),
        "token-classification": lambda: bert.token_labels(config),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    tower = bert.tower(config, offset=config.int("pad_token_id", 1, minimum=0) + 1)
    pooler = Pooler(d) if task == "feature-extraction" else None
    return TextModel(config, tower, pooler=pooler, head=heads[task]() if task in heads else None)


FAMILY = Family(
    title="RoBERTa",
    model_type="roberta",
    prefix="roberta",
    build=build,
    names=bert.NAMES,
    tasks=bert.tasks("Roberta", WORDS, COPIES, text=bert.OUT_PROJ),
    ignored=(r"embeddings\.position_ids$", r"^lm_head\.decoder\.(weight|bias)$"),
)
XLM = replace(
    FAMILY,
    title="XLM-RoBERTa",
    model_type="xlm-roberta",
    tasks=bert.tasks("XLMRoberta", WORDS, COPIES, text=bert.OUT_PROJ),
)
