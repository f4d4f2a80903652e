"""RoBERTa (Liu et al. 2019): BERT trained longer, on whole texts, without the next sentence.

XLM-RoBERTa (Conneau et al. 2019) is the same, trained on a hundred languages.

Peculiar: positions are counted from the id of the padding token + 1, so the first rows of their table are never used;
the heads have layers of their own instead of a pooler. transformers counts the ids that are not padding, regard the
tokens of the mask: the same where what is masked holds the padding's id, as every tokenizer makes it.

Longformer (Beltagy et al. 2020): RoBERTa for long texts, at a cost that grows with the text and not its square.

Peculiar: a token looks `attention_window` / 2 tokens to each side, a number for each layer, and at the global tokens;
these look at all tokens, with queries, keys and values of their own. Which are global, the call says
(`global_attention_mask=`); else in classification the first token, in question answering the question (before the
first separator), elsewhere none. A text need not be a multiple of the window long. `attention_dilation`, a number for
each layer, spreads a window of as many tokens: the paper's code reads it, and transformers computes as if it were 1.
"""

from __future__ import annotations

from dataclasses import replace

from regard.models.families import bert
from regard.models.family import Concat, Config, Family, Heads, Names
from regard.models.text import Choice, LongTextModel, TextModel, TokensBefore, first_tokens
from regard.nn.blocks import FirstToken, Labels, Pooler, Tower
from regard.nn.sparse_attention import SlidingAttention

WORDS: Names = {
    "head.transform.dense": "lm_head.dense",
    "head.transform.norm": "lm_head.layer_norm",
    "head.words": "lm_head.decoder",
    "head.bias": "lm_head.bias",
}
COPIES = {"lm_head.decoder.weight": "embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"}


def heads(config: Config, dropout: float) -> Heads:
    """The heads, by task; Longformer has the same. dropout: before the labels."""
    d, n = config.int("hidden_size"), config.num_labels()
    return {
        "fill-mask": lambda: bert.lm_head(config, d, "gelu"),  # GELU, whatever the blocks have
        "text-classification": lambda: FirstToken(d, n, "tanh", before=dropout, dropout=dropout),
        "token-classification": lambda: Labels(d, n, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    of_task = heads(config, config.float("classifier_dropout", config.float("hidden_dropout_prob", 0.1)))
    tower = bert.tower(config, offset=config.int("pad_token_id", 1, minimum=0) + 1)
    pooler = Pooler(config.int("hidden_size")) if task == "feature-extraction" else None
    return TextModel(config, tower, pooler=pooler, head=of_task[task]() if task in of_task else None)


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


# ---------------------------------------------------------------------------------------------------------- Longformer


LONG_NAMES: Names = {
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


def build_long(config: Config, task: str) -> LongTextModel:
    """The model for a task."""
    of_task = heads(config, config.float("hidden_dropout_prob", 0.1))
    choices: dict[str, Choice] = {
        "text-classification": first_tokens,
        "question-answering": TokensBefore(config.int("sep_token_id", 2, minimum=0)),
    }
    pooler = Pooler(config.int("hidden_size")) if task == "feature-extraction" else None
    head = of_task[task]() if task in of_task else None
    return LongTextModel(config, long_tower(config), pooler=pooler, head=head, choice=choices.get(task))


LONGFORMER = Family(
    title="Longformer",
    model_type="longformer",
    prefix="longformer",
    build=build_long,
    names=LONG_NAMES,
    tasks=bert.tasks("Longformer", WORDS, COPIES, text=bert.OUT_PROJ),
    ignored=(r"embeddings\.position_ids$", r"^lm_head\.decoder\.(weight|bias)$"),
    harmless=("onnx_export",),
)
