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

from regard.models.config import Settings
from regard.models.families import bert, roberta
from regard.models.family import Family, Names, Rows, Task
from regard.models.text import Choice, LongTextModel, TokensBefore, first_tokens
from regard.nn.blocks import Tower
from regard.nn.heads import FirstToken, Labels, Pooler
from regard.nn.sliding_attention import SlidingAttention

__all__ = ["FAMILY"]

NAMES: Names = {
    **bert.JOINED,
    "tower.blocks.{i}.attention.whole.w_q": f"{bert.LAYER}attention.self.query_global",
    "tower.blocks.{i}.attention.whole.w_kv": Rows(
        *(f"{bert.LAYER}attention.self.{x}_global" for x in ("key", "value"))
    ),
}


def names(settings: Settings) -> Names:
    """The body's weights, the same in every Longformer."""
    return NAMES


def windows(settings: Settings) -> list[int]:
    """How many tokens each layer's window has, without the token itself. Raises ValueError for an odd number."""
    each = _by_layer(settings, "attention_window", 512)
    odd = [window for window in each if window % 2]
    if odd:
        raise ValueError(
            f"{settings.where}: attention_window must be even, half of it on each side of a token, got {odd[0]}"
        )
    return each


def dilations(settings: Settings) -> list[int]:
    """Every how many-th token each layer's window has. Raises ValueError where a window would hold its token alone."""
    each, most = _by_layer(settings, "attention_dilation", 1), settings.whole("max_position_embeddings")
    wide = [dilation for dilation in each if dilation >= most]
    if wide:
        raise ValueError(
            f"{settings.where}: attention_dilation is {wide[0]} and the model has {most} positions: "
            "no token would have a neighbour; take a smaller one"
        )
    return each


def _by_layer(settings: Settings, key: str, default: int) -> list[int]:
    """A number for each layer, from a list of them or one for all."""
    depth = settings.layers("num_hidden_layers")
    if not isinstance(settings.get(key, default), list):
        return [settings.whole(key, default)] * depth
    each = settings.wholes(key)
    if len(each) != depth:
        raise ValueError(f"{settings.where}: {key} has {len(each)} numbers, and there are {depth} layers")
    return each


def tower(settings: Settings) -> Tower:
    """RoBERTa's tower, each block with its own window and dilation."""
    made = bert.tower(settings, offset=settings.whole("pad_token_id", 1, least=0) + 1)
    settings.only("attention_mode", "longformer")
    settings.only("ignore_attention_mask", False)
    dropout = settings.number("attention_probs_dropout_prob", 0.1)
    for block, window, dilation in zip(made.depth, windows(settings), dilations(settings), strict=True):
        block.attention = SlidingAttention(
            block.attention.d_model, block.attention.heads, reach=window // 2, dilation=dilation, dropout=dropout
        )
    return made


def build(settings: Settings, task: str) -> LongTextModel:
    """The model for a task."""
    d, dropout = settings.whole("hidden_size"), settings.number("hidden_dropout_prob", 0.1)
    n = settings.label_count()
    heads: dict[str, Callable[[], nn.Module | None]] = {
        "fill": lambda: roberta.words(settings),
        "classify": lambda: FirstToken(d, n, "tanh", before=dropout, dropout=dropout),
        "tag": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "answer": lambda: Labels(d, 2, pooled=False),
        "none": lambda: None,
    }
    choices: dict[str, Choice] = {
        "classify": first_tokens,
        "answer": TokensBefore(settings.whole("sep_token_id", 2, least=0)),
    }
    pooler = Pooler(d) if task == "none" else None
    return LongTextModel(settings, tower(settings), pooler=pooler, head=heads[task](), choice=choices.get(task))


FAMILY = Family(
    title="Longformer",
    model_type="longformer",
    prefix="longformer",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="LongformerModel"),
        "fill": Task(architecture="LongformerForMaskedLM", names=roberta.WORDS, copies=roberta.COPIES),
        "classify": Task(
            architecture="LongformerForSequenceClassification",
            names={"head.dense": "classifier.dense", "head.score": "classifier.out_proj"},
        ),
        "tag": Task(architecture="LongformerForTokenClassification", names={"head.score": "classifier"}),
        "answer": Task(architecture="LongformerForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"embeddings\.position_ids$", r"^lm_head\.decoder\.(weight|bias)$"),
    harmless=("onnx_export",),
)
