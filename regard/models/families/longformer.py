"""Longformer (Beltagy et al. 2020): RoBERTa for long texts, at a cost that grows with the text and not its square.

Peculiar: a token looks `attention_window` / 2 tokens to each side, a number for each layer, and at the global tokens;
these look at all tokens, with queries, keys and values of their own. Which are global, the call says
(`global_attention_mask=`); else in classification the first token, in question answering the question (before the
first separator), elsewhere none. A text need not be a multiple of the window long. `attention_dilation`, a number for
each layer, spreads a window of as many tokens: the paper's code reads it, and transformers computes as if it were 1.
"""

from __future__ import annotations

from regard.models.families import bert, roberta
from regard.models.family import Concat, Config, Family, Heads, Names
from regard.models.text import Choice, LongTextModel, TokensBefore, first_tokens
from regard.nn.blocks import FirstToken, Labels, Pooler, Tower
from regard.nn.sparse_attention import SlidingAttention

NAMES: Names = {
    **bert.JOINED,
    "tower.blocks.{i}.attention.whole.w_q": f"{bert.LAYER}attention.self.query_global",
    "tower.blocks.{i}.attention.whole.w_kv": Concat(
        *(f"{bert.LAYER}attention.self.{x}_global" for x in ("key", "value"))
    ),
}


def _by_layer(config: Config, key: str, default: int) -> list[int]:
    depth = config.layers("num_hidden_layers")
    if not isinstance(config.get(key, default), list):
        return [config.int(key, default)] * depth
    numbers = config.ints(key)
    if len(numbers) != depth:
        raise ValueError(f"{config.where}: {key} has {len(numbers)} numbers, and there are {depth} layers")
    return numbers


def long_tower(config: Config) -> Tower:
    """RoBERTa's tower, each block with its own window and dilation."""
    tower = bert.tower(config, offset=config.int("pad_token_id", 1, minimum=0) + 1)
    config.only("attention_mode", "longformer")
    config.only("ignore_attention_mask", False)
    dropout = config.float("attention_probs_dropout_prob", 0.1)
    windows, dilations = _by_layer(config, "attention_window", 512), _by_layer(config, "attention_dilation", 1)
    if any(window % 2 for window in windows):
        raise ValueError(f"{config.where}: attention_window must be even, half of it on each side, got {windows}")
    for block, window, dilation in zip(tower.depth, windows, dilations, strict=True):
        block.attention = SlidingAttention(
            block.attention.d_model, block.attention.num_heads, reach=window // 2, dilation=dilation, dropout=dropout
        )
    return tower


def build(config: Config, task: str) -> LongTextModel:
    """The model for a task."""
    d, dropout = config.int("hidden_size"), config.float("hidden_dropout_prob", 0.1)
    n = config.num_labels()
    heads: Heads = {
        "fill-mask": lambda: roberta.lm_head(config),
        "text-classification": lambda: FirstToken(d, n, "tanh", before=dropout, dropout=dropout),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    choices: dict[str, Choice] = {
        "text-classification": first_tokens,
        "question-answering": TokensBefore(config.int("sep_token_id", 2, minimum=0)),
    }
    pooler = Pooler(d) if task == "feature-extraction" else None
    head = heads[task]() if task in heads else None
    return LongTextModel(config, long_tower(config), pooler=pooler, head=head, choice=choices.get(task))


FAMILY = Family(
    title="Longformer",
    model_type="longformer",
    prefix="longformer",
    build=build,
    names=NAMES,
    tasks=bert.tasks("Longformer", roberta.WORDS, roberta.COPIES, text=bert.OUT_PROJ),
    ignored=(r"embeddings\.position_ids$", r"^lm_head\.decoder\.(weight|bias)$"),
    harmless=("onnx_export",),
)
