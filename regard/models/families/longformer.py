"""Longformer (Beltagy et al. 2020): RoBERTa for long texts, at a cost that grows with the text and not its square.

Peculiar: a token looks `attention_window` / 2 tokens to each side, a number for each layer, and at the global tokens;
these look at all tokens, with queries, keys and values of their own. Which are global, the call says
(`global_attention_mask=`); else in classification the first token, in question answering the question (before the
first separator), elsewhere none. A text need not be a multiple of the window long. `attention_dilation`, a number for
each layer, spreads a window of as many tokens: the paper's code reads it, and transformers computes as if it were 1.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.models.config import Config
from regard.models.families import bert, roberta
from regard.models.family import Concat, Family, Names, Task
from regard.models.text import Choice, LongTextModel, TokensBefore, first_tokens
from regard.nn.blocks import Tower
from regard.nn.heads import FirstToken, Labels, Pooler
from regard.nn.sparse_attention import SlidingAttention

__all__ = ["FAMILY"]

NAMES: Names = {
    **bert.JOINED,
    "tower.blocks.{i}.attention.whole.w_q": f"{bert.LAYER}attention.self.query_global",
    "tower.blocks.{i}.attention.whole.w_kv": Concat(
        *(f"{bert.LAYER}attention.self.{x}_global" for x in ("key", "value"))
    ),
}


def names(config: Config) -> Names:
    """The body's weights, the same in every Longformer."""
    return NAMES


def windows(config: Config) -> list[int]:
    """How many tokens each layer's window has, without the token itself. Raises ValueError for an odd number."""
    each = _by_layer(config, "attention_window", 512)
    odd = [window for window in each if window % 2]
    if odd:
        raise ValueError(
            f"{config.where}: attention_window must be even, half of it on each side of a token, got {odd[0]}"
        )
    return each


def dilations(config: Config) -> list[int]:
    """Every how many-th token each layer's window has. Raises ValueError where a window would hold its token alone."""
    each, max_positions = _by_layer(config, "attention_dilation", 1), config.int("max_position_embeddings")
    wide = [dilation for dilation in each if dilation >= max_positions]
    if wide:
        raise ValueError(
            f"{config.where}: attention_dilation is {wide[0]} and the model has {max_positions} positions: "
            "no token would have a neighbour; take a smaller one"
        )
    return each


def _by_layer(config: Config, key: str, default: int) -> list[int]:
    """A number for each layer, from a list of them or one for all."""
    depth = config.layers("num_hidden_layers")
    if not isinstance(config.get(key, default), list):
        return [config.int(key, default)] * depth
    each = config.ints(key)
    if len(each) != depth:
        raise ValueError(f"{config.where}: {key} has {len(each)} numbers, and there are {depth} layers")
    return each


def tower(config: Config) -> Tower:
    """RoBERTa's tower, each block with its own window and dilation."""
    made = bert.tower(config, offset=config.int("pad_token_id", 1, minimum=0) + 1)
    config.only("attention_mode", "longformer")
    config.only("ignore_attention_mask", False)
    dropout = config.float("attention_probs_dropout_prob", 0.1)
    for block, window, dilation in zip(made.depth, windows(config), dilations(config), strict=True):
        block.attention = SlidingAttention(
            block.attention.d_model, block.attention.num_heads, reach=window // 2, dilation=dilation, dropout=dropout
        )
    return made


def build(config: Config, task: str) -> LongTextModel:
    """The model for a task."""
    d, dropout = config.int("hidden_size"), config.float("hidden_dropout_prob", 0.1)
    n = config.num_labels()
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "fill-mask": lambda: roberta.words(config),
        "text-classification": lambda: FirstToken(d, n, "tanh", before=dropout, dropout=dropout),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
        "feature-extraction": lambda: None,
    }
    choices: dict[str, Choice] = {
        "text-classification": first_tokens,
        "question-answering": TokensBefore(config.int("sep_token_id", 2, minimum=0)),
    }
    pooler = Pooler(d) if task == "feature-extraction" else None
    return LongTextModel(config, tower(config), pooler=pooler, head=heads[task](), choice=choices.get(task))


FAMILY = Family(
    title="Longformer",
    model_type="longformer",
    prefix="longformer",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="LongformerModel"),
        "fill-mask": Task(architecture="LongformerForMaskedLM", names=roberta.WORDS, copies=roberta.COPIES),
        "text-classification": Task(
            architecture="LongformerForSequenceClassification",
            names={"head.dense": "classifier.dense", "head.score": "classifier.out_proj"},
        ),
        "token-classification": Task(
            architecture="LongformerForTokenClassification", names={"head.score": "classifier"}
        ),
        "question-answering": Task(architecture="LongformerForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"embeddings\.position_ids$", r"^lm_head\.decoder\.(weight|bias)$"),
    harmless=("onnx_export",),
)
