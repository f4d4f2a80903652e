"""The Transformer (Vaswani et al. 2017): an encoder reads a text, a decoder writes another while looking at it.

Peculiar: positions are sines and cosines, added to embeddings × √d; blocks norm after adding, and there is no norm at
the end; one table embeds the words of both sides and scores the words to come; the feed-forward is ReLU.

    >>> import torch
    >>> from torch.nn.functional import cross_entropy
    >>> from regard.models.encoder_decoder import shift_right
    >>> model = transformer(37, TransformerSize(d_model=12, num_heads=3, layers=2, d_ff=20), start=1)
    >>> source, target = torch.randint(2, 37, (5, 7)), torch.randint(2, 37, (5, 11))
    >>> logits = model(source, decoder_input_ids=shift_right(target, model.start)).logits  # (5, 11, 37)
    >>> cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1).ndim
    0

BART (Lewis et al. 2019) was trained to restore spoilt text.
Peculiar: positions are learnt, and counted from 2; the sum of word and position is normed; GELU; a constant is added to
the score of each word (final_logits_bias, zero in most checkpoints). To classify a text or to find an answer in it, the
decoder reads the text that the encoder has read.

Marian (Junczys-Dowmunt et al. 2018) is what OPUS-MT's translators between many languages are.
Peculiar: all sines come before all cosines; source and target may have vocabularies of their own; swish; a constant is
added to the score of each word, as in BART. Sines have no end, so max_position_embeddings is no limit here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from regard.checks import check_int
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.family import Concat, Config, Family, Heads, Names, Squeeze, Task
from regard.models.initialization import initialize
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, EndToken, FeedForward, Labels, LanguageHead, Tower, Waves


def _blocks(side: str) -> Names:
    ours, theirs = side + ".blocks.{i}.", side + ".layers.{i}."
    return {
        f"{ours}attention.w_qkv": Concat(*(f"{theirs}self_attn.{x}_proj" for x in "qkv")),
        f"{ours}attention.w_o": f"{theirs}self_attn.out_proj",
        f"{ours}attention_norm": f"{theirs}self_attn_layer_norm",
        f"{ours}cross.w_qkv": Concat(*(f"{theirs}encoder_attn.{x}_proj" for x in "qkv")),
        f"{ours}cross.w_o": f"{theirs}encoder_attn.out_proj",
        f"{ours}cross_norm": f"{theirs}encoder_attn_layer_norm",
        f"{ours}feed_forward.w_in": f"{theirs}fc1",
        f"{ours}feed_forward.w_out": f"{theirs}fc2",
        f"{ours}feed_forward_norm": f"{theirs}final_layer_norm",
    }


BLOCKS: Names = {**_blocks("encoder"), **_blocks("decoder")}
NAMES: Names = {**BLOCKS, "encoder.embed.tokens": "shared"}


def tower(config: Config, side: str, embed: Embedding, function: str) -> Tower:
    """One side. side: "encoder" or "decoder".  function: the activation where config.json names none."""
    d, heads = config.int("d_model"), config.int(f"{side}_attention_heads")
    inner, dropout = config.int(f"{side}_ffn_dim"), config.float("dropout", 0.1)
    unseen = config.float("attention_dropout", 0.0)
    function = config.str("activation_function", function)
    decoder = side == "decoder"

    def block() -> Block:
        return Block(
            MultiHeadAttention(d, heads, fused=True, dropout=unseen),
            FeedForward(d, inner, function, dropout=config.float("activation_dropout", 0.0)),
            [nn.LayerNorm(d) for _ in range(3 if decoder else 2)],
            norm_first=False,
            cross=MultiHeadAttention(d, heads, fused=True, dropout=unseen) if decoder else None,
            dropout=dropout,
        )

    return Tower(embed, [block() for _ in range(config.layers(f"{side}_layers"))], causal=decoder)


def refuse_others(config: Config, *, normed: bool, waves: bool) -> None:
    """Older config.json say what BART and Marian are like: refuse what they are not.

    normed: are embeddings normed.  waves: are positions sines.
    """
    for key, value in (("normalize_before", False), ("add_final_layer_norm", False), ("add_bias_logits", False)):
        config.only(key, value)
    config.only("normalize_embedding", normed)
    config.only("static_position_embeddings", waves)
    config.only("num_hidden_layers", config.layers("encoder_layers"))


def build(config: Config, task: str) -> EncoderDecoder:
    """The model for a task, written by regard: `transformers` has no such family."""
    d, vocabulary = config.int("d_model"), config.int("vocab_size")

    def embed() -> Embedding:
        dropout = config.float("dropout", 0.1)
        return Embedding(vocabulary, d, positions=Waves(d), scale=d**0.5, dropout=dropout)

    encoder, decoder = (tower(config, side, embed(), "relu") for side in ("encoder", "decoder"))
    decoder.embed.tokens = encoder.embed.tokens
    head = LanguageHead(vocabulary, None) if task == "text2text-generation" else None
    start = config.int("decoder_start_token_id", minimum=0)
    return EncoderDecoder(config, encoder, decoder, start=start, rereads=False, head=head)


FAMILY = Family(
    title="Transformer",
    model_type="transformer",
    prefix="model",
    build=build,
    names=NAMES,
    tasks={
        "feature-extraction": Task(architecture="TransformerBody"),
        "text2text-generation": Task(architecture="Transformer"),
    },
)


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """Sizes of the paper's model; the defaults are its base model.

    Args:
        d_model: width.
        num_heads: of each attention.
        layers: blocks on each side.
        d_ff: inner width of the feed-forward.
        dropout: on embeddings and on what each part adds, in training only.
    """

    d_model: int = 512
    num_heads: int = 8
    layers: int = 6
    d_ff: int = 2048
    dropout: float = 0.1


BASE, BIG = TransformerSize(), TransformerSize(d_model=1024, num_heads=16, d_ff=4096, dropout=0.3)
"""The two models of the paper (table 3)."""


def transformer(
    vocabulary: int, size: TransformerSize = BASE, *, start: int, end: int | None = None, pad: int | None = None
) -> EncoderDecoder:
    """The model of the paper with first weights, ready to be trained.

    >>> import torch
    >>> with torch.device("meta"):  # to count it without making it
    ...     base = transformer(37000, start=1)
    >>> sum(p.numel() for p in base.parameters())
    63082496

    Weights are drawn as the authors drew them: matrices uniformly by Xavier, each of query, key and value by itself,
    embeddings with variance 1/d, biases 0. `save` writes what `regard.load` opens; `transformers` has no such model.

    Args:
        vocabulary: how many tokens, of both languages.
        size: widths and depth: `BASE`, `BIG`, or others.
        start: id of the token that the decoder begins with.
        end: id of the token that ends a text, if there is one.
        pad: id of the token that fills a batch, if there is one.

    Raises:
        TypeError: a size that is no integer.
        ValueError: sizes that are out of range or do not fit each other.
    """
    tokens = check_int("vocabulary", vocabulary, 1)
    for name, token in (("start", start), ("end", end), ("pad", pad)):
        if token is not None and not 0 <= token < tokens:
            raise ValueError(f"{name} is {token}, and ids are 0 to {tokens - 1}")
    if not 0 <= size.dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {size.dropout}")
    for name in ("d_model", "num_heads", "layers", "d_ff"):
        check_int(name, getattr(size, name), 1)
    numbers = {"layers": size.layers, "attention_heads": size.num_heads, "ffn_dim": size.d_ff}
    values = {
        "model_type": FAMILY.model_type,
        "vocab_size": tokens,
        "d_model": size.d_model,
        **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in numbers.items()},
        "activation_function": "relu",
        "dropout": size.dropout,
        "is_encoder_decoder": True,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    model = build(Config(values, "transformer(…)"), "text2text-generation")
    model.family, model.task = FAMILY, "text2text-generation"
    initialize(model)
    return model


# ------------------------------------------------------------------------------------------------------ BART and Marian


OFFSET = 2  # of the positions: the first two rows of their table are never looked up
BART_NAMES: Names = {
    **BLOCKS,
    "encoder.embed.tokens": "shared",
    **{f"{side}.embed.positions": f"{side}.embed_positions" for side in ("encoder", "decoder")},
    **{f"{side}.embed.norm": f"{side}.layernorm_embedding" for side in ("encoder", "decoder")},
}
CONSTANT = Squeeze("final_logits_bias", optional=True)
LM_NAMES: Names = {"head.words.weight": "lm_head.weight", "head.words.bias": CONSTANT, "head.bias": CONSTANT}
HEAD_COPIES = {"lm_head.weight": "shared.weight"}
COPIES = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}

# Whole layers left out in training, what older versions said of generating, and a dropout before the labels.
HARMLESS = ("encoder_layerdrop", "decoder_layerdrop", "force_bos_token_to_be_generated", "classif_dropout")


def lm_head(vocabulary: int, d: int | None) -> LanguageHead:
    """Logits plus a constant each, which is not trained. d: as in `LanguageHead`."""
    head = LanguageHead(vocabulary, d, bias=True)
    constant = head.bias if head.words is None else head.words.bias
    assert constant is not None
    constant.requires_grad = False
    return head


def build_bart(config: Config, task: str) -> EncoderDecoder:
    """The model for a task."""
    d, vocabulary = config.int("d_model"), config.int("vocab_size")
    refuse_others(config, normed=True, waves=False)
    config.only("extra_pos_embeddings", OFFSET)
    config.only("tie_word_embeddings", True)

    def embed() -> Embedding:
        return Embedding(
            vocabulary,
            d,
            positions=nn.Embedding(config.int("max_position_embeddings", 1024) + OFFSET, d),
            offset=OFFSET,
            norm=nn.LayerNorm(d),
            scale=d**0.5 if config.bool("scale_embedding", False) else 1.0,
            dropout=config.float("dropout", 0.1),
        )

    encoder, decoder = (tower(config, side, embed(), "gelu") for side in ("encoder", "decoder"))
    decoder.embed.tokens = encoder.embed.tokens
    dropout = config.float("classifier_dropout", 0.0)
    end = config.int("eos_token_id", 2, minimum=0)
    heads: Heads = {
        "text2text-generation": lambda: lm_head(vocabulary, None),
        "text-classification": lambda: EndToken(d, config.num_labels(3), end, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
    }
    head, start = heads[task]() if task in heads else None, config.int("decoder_start_token_id", 2, minimum=0)
    return EncoderDecoder(config, encoder, decoder, start=start, rereads=True, head=head)


BART = Family(
    title="BART",
    model_type="bart",
    prefix="model",
    build=build_bart,
    names=BART_NAMES,
    tasks={
        "feature-extraction": Task(architecture="BartModel"),
        "text2text-generation": Task(architecture="BartForConditionalGeneration", names=LM_NAMES, copies=HEAD_COPIES),
        "text-classification": Task(
            architecture="BartForSequenceClassification",
            names={"head.dense": "classification_head.dense", "head.score": "classification_head.out_proj"},
        ),
        "question-answering": Task(architecture="BartForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    # The one table of words, once more under other names.
    ignored=(r"(encoder|decoder)\.(embed_tokens\.weight|version)$", r"^lm_head\.weight$"),
    copies=COPIES,
    harmless=(*HARMLESS, "do_blenderbot_90_layernorm"),
)


# -------------------------------------------------------------------------------------------------------------- Marian


def marian_names(config: Config) -> Names:
    """The body's weights: one table of words, or one on each side."""
    if config.bool("share_encoder_decoder_embeddings", True):
        return {**BLOCKS, "encoder.embed.tokens": "shared"}
    return {**BLOCKS, **{f"{side}.embed.tokens": f"{side}.embed_tokens" for side in ("encoder", "decoder")}}


def build_marian(config: Config, task: str) -> EncoderDecoder:
    """The model for a task."""
    d, source = config.int("d_model"), config.int("vocab_size")
    shared = config.bool("share_encoder_decoder_embeddings", True)
    target = config.int("decoder_vocab_size", source)
    refuse_others(config, normed=False, waves=True)
    if shared:
        config.only("decoder_vocab_size", source)
        config.only("tie_word_embeddings", True)

    def embed(vocabulary: int) -> Embedding:
        scale = d**0.5 if config.bool("scale_embedding", False) else 1.0
        waves = Waves(d, halves=True)
        return Embedding(vocabulary, d, positions=waves, scale=scale, dropout=config.float("dropout", 0.1))

    encoder = tower(config, "encoder", embed(source), "gelu")
    decoder = tower(config, "decoder", embed(target), "gelu")
    if shared:
        decoder.embed.tokens = encoder.embed.tokens
    head = lm_head(target, None if config.tie_word_embeddings() else d) if task == "text2text-generation" else None
    start = config.int("decoder_start_token_id", 58100, minimum=0)
    return EncoderDecoder(config, encoder, decoder, start=start, rereads=False, head=head)


MARIAN = Family(
    title="Marian",
    model_type="marian",
    prefix="model",
    build=build_marian,
    names=marian_names,
    tasks={
        "feature-extraction": Task(architecture="MarianModel"),
        "text2text-generation": Task(architecture="MarianMTModel", names=LM_NAMES, copies=HEAD_COPIES),
    },
    # The sines, and the one table of words once more under other names.
    ignored=(r"(encoder|decoder)\.(embed_positions|embed_tokens)\.weight$", r"^lm_head\.weight$"),
    copies=COPIES,
    harmless=(*HARMLESS, "max_position_embeddings", "extra_pos_embeddings"),
)
