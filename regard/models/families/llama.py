"""LLaMA (Touvron et al. 2023): the decoder that most open language models are.

Peculiar: root-mean-square norms before each part; no biases; a gated feed-forward; positions turn queries and keys
(rotary, with the scalings of long checkpoints) instead of being added; groups of heads share keys and values.
"""

from __future__ import annotations

from torch import nn

from regard.models.family import Concat, Config, Family, Names, Task
from regard.models.text import TextModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, FeedForward, Tower, decoder_head
from regard.rotary import DynamicNTK, LinearScaling, Llama3, LongRope, Rotary, Scaling, Yarn

LAYER = "layers.{i}."
NAMES: Names = {
    "tower.embed.tokens": "embed_tokens",
    "tower.blocks.{i}.attention_norm": f"{LAYER}input_layernorm",
    "tower.blocks.{i}.attention.w_qkv": Concat(*(f"{LAYER}self_attn.{x}_proj" for x in "qkv")),
    "tower.blocks.{i}.attention.w_o": f"{LAYER}self_attn.o_proj",
    "tower.blocks.{i}.feed_forward_norm": f"{LAYER}post_attention_layernorm",
    "tower.blocks.{i}.feed_forward.w_in": Concat(*(f"{LAYER}mlp.{x}_proj" for x in ("gate", "up"))),
    "tower.blocks.{i}.feed_forward.w_out": f"{LAYER}mlp.down_proj",
    "tower.norm": "norm",
}


def tower(config: Config, positions: Rotary) -> Tower:
    """Embedding and blocks."""
    d, eps = config.int("hidden_size", 4096), config.eps("rms_norm_eps", 1e-6)
    heads, inner = config.int("num_attention_heads", 32), config.int("intermediate_size", 11008)
    attention_bias, mlp_bias = config.bool("attention_bias", False), config.bool("mlp_bias", False)

    def block() -> Block:
        return Block(
            MultiHeadAttention(
                d,
                heads,
                num_kv_heads=config.int("num_key_value_heads", heads),
                head_dim=positions.dim,
                bias=attention_bias,
                fused=True,
                position=positions,
                dropout=config.float("attention_dropout", 0.0),
            ),
            FeedForward(d, inner, config.str("hidden_act", "silu"), gated=True, bias=mlp_bias),
            [nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)],
            norm_first=True,
        )

    blocks = [block() for _ in range(config.layers("num_hidden_layers", 32))]
    embed = Embedding(config.int("vocab_size", 32000), d)
    return Tower(embed, blocks, causal=True, norm=nn.RMSNorm(d, eps))


def decoder(config: Config, task: str, *, tied: bool) -> TextModel:
    """The model for a task, alone or beside another tower. tied: does the lm_head share the token embedding.

    Defaults are those of the first LLaMA of 7 billion weights: LLaVA's config.json says little of its LLaMA.
    """
    d, heads = config.int("hidden_size", 4096), config.int("num_attention_heads", 32)
    trained = config.int("max_position_embeddings", 2048)
    positions = rotary(config, config.int("head_dim", d // heads), max_positions=trained)
    config.only("rope_interleaved", False)
    head = decoder_head(
        task,
        d,
        vocabulary=config.int("vocab_size", 32000),
        labels=config.num_labels(),
        tied=tied,
        dropout=config.float("classifier_dropout", config.float("hidden_dropout", 0.1)),
    )
    return TextModel(config, tower(config, positions), head=head, max_positions=reach(positions, trained))


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    return decoder(config, task, tied=config.tie_word_embeddings(False))


FAMILY = Family(
    title="LLaMA",
    model_type="llama",
    prefix="model",
    build=build,
    names=NAMES,
    tasks={
        "feature-extraction": Task(architecture="LlamaModel"),
        "text-generation": Task(
            architecture="LlamaForCausalLM",
            names={"head.words": "lm_head"},
            copies={"lm_head.weight": "embed_tokens.weight"},
        ),
        "text-classification": Task(architecture="LlamaForSequenceClassification", names={"head.score": "score"}),
        "token-classification": Task(architecture="LlamaForTokenClassification", names={"head.score": "score"}),
        "question-answering": Task(
            architecture="LlamaForQuestionAnswering", names={"head.score": "qa_outputs"}, prefix="transformer"
        ),
    },
    ignored=(r"\.rotary_emb\.inv_freq$", r"^lm_head\.weight$"),
    # What trainers and converters leave behind; transformers reads none of it.
    harmless=("is_llama_config", "max_sequence_length", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
)


# ----------------------------------------------------------------------------------------------------- rotary positions


ORIGINAL = "original_max_position_embeddings"
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""The values of rope_type in transformers."""


def rotary(config: Config, dim: int, *, max_positions: int) -> Rotary:
    """The rotary position embedding that config.json describes.

    >>> llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    >>> rotary(Config({"rope_parameters": llama3}), 8, max_positions=8192).scaling
    Llama3(factor=8.0, low=1.0, high=4.0, original=8192)

    dim: size of a head.  max_positions: max_position_embeddings. Raises ValueError for an unknown rope_type, unknown
    keys, and numbers that are missing, out of range or contradict each other.
    """
    both = {key: config.get(key) for key in ("rope_scaling", "rope_parameters") if key in config}  # old and new
    if len(both) > 1 and both["rope_scaling"] != both["rope_parameters"]:
        raise ValueError(f"{config.where} has rope_scaling and rope_parameters, and they differ: remove one")
    rope = Config({}, config.where)
    for key, values in both.items():
        if not isinstance(values, dict):
            raise ValueError(f"{config.where}: {key} must be an object, got {values!r}")
        rope = Config(values, f"{config.where}, {key}")
    new, old = rope.get("rope_type"), rope.get("type")
    if new is not None and old is not None and new != old:
        raise ValueError(f"{rope.where}: rope_type is {new!r} and type is {old!r}: remove one")
    kind = rope.str("type" if new is None else "rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"{rope.where}: rope_type is {kind!r}, and only {', '.join(ROPE_TYPES)} are supported")
    for holder in (config, rope):
        holder.only("partial_rotary_factor", 1.0)
    base = _holder("rope_theta", rope, config).float("rope_theta", 10000.0)
    try:
        embedding = Rotary(dim, base=base, scaling=_scaling(kind, rope, config, max_positions))
    except ValueError as error:
        message = str(error)
        raise ValueError(message if config.where in message else f"{rope.where}: {message}") from None
    unused = rope.unused_keys()
    if unused:
        raise ValueError(f"{rope.where} has keys that rope_type {kind!r} does not know: {', '.join(sorted(unused))}")
    return embedding


def reach(rotary: Rotary, max_positions: int) -> int:
    """The longest text a model is made for: max_position_embeddings, or as far as its scaling stretches that.

    >>> reach(Rotary(8, scaling=LinearScaling(4.0)), 4096)
    16384

    With `LinearScaling` and `DynamicNTK`, max_position_embeddings is the length before stretching; with
    `Llama3` and `LongRope` the length after; with `Yarn` checkpoints have either.
    """
    scaling = rotary.scaling
    if isinstance(scaling, (LinearScaling, DynamicNTK)):
        return max(max_positions, int(scaling.factor * max_positions))
    return max(max_positions, int(scaling.factor * scaling.original)) if isinstance(scaling, Yarn) else max_positions


def _scaling(kind: str, rope: Config, config: Config, max_positions: int) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.float("factor"))
    if kind == "dynamic":
        return DynamicNTK(rope.float("factor"), original=max_positions)
    original = _holder(ORIGINAL, rope, config).int(ORIGINAL, max_positions)  # the length before scaling
    if kind == "llama3":
        low, high = rope.float("low_freq_factor"), rope.float("high_freq_factor")
        return Llama3(rope.float("factor"), low=low, high=high, original=original)
    factor, attention_factor = rope.float("factor", max_positions / original), _optional(rope, "attention_factor")
    if kind == "longrope":
        return LongRope(
            short=_floats(rope, "short_factor"),
            long=_floats(rope, "long_factor"),
            original=original,
            factor=factor if attention_factor is None else None,
            attention_factor=attention_factor,
        )
    mscale, mscale_all_dim = _optional(rope, "mscale"), _optional(rope, "mscale_all_dim")
    both = attention_factor is None and bool(mscale) and bool(mscale_all_dim)  # transformers ignores one alone, and 0
    return Yarn(
        factor,
        original=original,
        beta_fast=_optional(rope, "beta_fast") or 32.0,
        beta_slow=_optional(rope, "beta_slow") or 1.0,
        attention_factor=attention_factor,
        mscale=mscale if both else None,
        mscale_all_dim=mscale_all_dim if both else None,
        truncate=rope.bool("truncate", True),
    )


def _holder(key: str, rope: Config, config: Config) -> Config:
    """Which of the two has the key. Raises ValueError if both have it and differ."""
    inner, outer = rope.get(key), config.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"{rope.where}: {key} is {inner!r} here and {outer!r} outside: remove one")
    return rope if inner is not None else config


def _optional(rope: Config, key: str) -> float | None:
    return rope.float(key) if key in rope else None


def _floats(rope: Config, key: str) -> list[float]:
    values = rope.get(key)
    if not isinstance(values, list) or any(type(n) not in (int, float) for n in values):
        raise ValueError(f"{rope.where}: {key} must be a list of numbers, got {values!r}")
    return values
