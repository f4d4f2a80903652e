"""ELECTRA (Clark et al. 2020): a BERT that learns to tell which tokens a small generator has replaced.

Peculiar: the embedding may be narrower than the model; no pooler. The discriminator gives one logit per token, above 0
for a replaced one (task "replaced-token-detection"); the generator is a masked LM (task "fill-mask").
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from regard.models.families import bert
from regard.models.family import Config, Family, Heads, Names, Task
from regard.models.text import TextModel
from regard.nn.blocks import FirstToken, HeadInput, Labels, LanguageHead, activation
from regard.nn.projections import Linear

NAMES: Names = {
    **{ours: theirs for ours, theirs in bert.NAMES.items() if not ours.startswith("pooler.")},
    "tower.embed.widen": "embeddings_project",
}


WORDS: Names = {
    "head.transform.dense": "generator_predictions.dense",
    "head.transform.norm": "generator_predictions.LayerNorm",
    "head.words": "generator_lm_head",
    "head.bias": "generator_lm_head.bias",
}
USUAL = {
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


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d, e = config.int("hidden_size", USUAL["hidden_size"]), config.int("embedding_size", 128)
    dropout = config.float("classifier_dropout", config.float("hidden_dropout_prob", 0.1))

    def words() -> LanguageHead:
        norm = nn.LayerNorm(e, config.eps("layer_norm_eps", 1e-12))
        return bert.lm_head(config, d, "gelu", norm, vocabulary=USUAL["vocab_size"])

    heads: Heads = {
        "replaced-token-detection": lambda: ReplacedTokens(d, config.str("hidden_act", "gelu")),
        "fill-mask": words,
        "text-classification": lambda: FirstToken(d, config.num_labels(), "gelu", before=dropout, dropout=dropout),
        "token-classification": lambda: Labels(d, config.num_labels(), pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    tower = bert.tower(config, narrow=None if d == e else e, usual=USUAL)
    return TextModel(config, tower, head=heads[task]() if task in heads else None)


FAMILY = Family(
    title="ELECTRA",
    model_type="electra",
    prefix="electra",
    build=build,
    names=NAMES,
    tasks={
        **bert.tasks(
            "Electra", WORDS, {"generator_lm_head.weight": "embeddings.word_embeddings.weight"}, text=bert.OUT_PROJ
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
