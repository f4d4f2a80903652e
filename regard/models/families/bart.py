"""BART (Lewis et al. 2019) and Marian (Junczys-Dowmunt et al. 2018): the 2017 Transformer with other values.

BART was trained to restore spoilt text.

Peculiar: positions are learnt, and counted from 2; the sum of word and position is normed; GELU; a constant is added to
the score of each word (final_logits_bias, zero in most checkpoints). To classify a text or to find an answer in it, the
decoder reads the text that the encoder has read.

Marian is what OPUS-MT's translators between many languages are.
Peculiar: all sines come before all cosines; source and target may have vocabularies of their own; swish; a constant is
added to the score of each word, as in BART. Sines have no end, so max_position_embeddings is no limit here.
"""

from __future__ import annotations

from torch import nn

from regard.models.encoder_decoder import EncoderDecoder
from regard.models.families.transformer import BLOCKS, refuse_others, tower
from regard.models.family import Config, Family, Heads, Names, Squeeze, Task
from regard.nn.blocks import Embedding, EndToken, Labels, LanguageHead, Waves

OFFSET = 2  # of the positions: the first two rows of their table are never looked up

NAMES: Names = {
    **BLOCKS,
    "encoder.embed.tokens": "shared",
    **{f"{side}.embed.positions": f"{side}.embed_positions" for side in ("encoder", "decoder")},
    **{f"{side}.embed.norm": f"{side}.layernorm_embedding" for side in ("encoder", "decoder")},
}
CONSTANT = Squeeze("final_logits_bias", optional=True)
WORDS: Names = {"head.words.weight": "lm_head.weight", "head.words.bias": CONSTANT, "head.bias": CONSTANT}
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


def build(config: Config, task: str) -> EncoderDecoder:
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


FAMILY = Family(
    title="BART",
    model_type="bart",
    prefix="model",
    build=build,
    names=NAMES,
    tasks={
        "feature-extraction": Task(architecture="BartModel"),
        "text2text-generation": Task(architecture="BartForConditionalGeneration", names=WORDS, copies=HEAD_COPIES),
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
        "text2text-generation": Task(architecture="MarianMTModel", names=WORDS, copies=HEAD_COPIES),
    },
    # The sines, and the one table of words once more under other names.
    ignored=(r"(encoder|decoder)\.(embed_positions|embed_tokens)\.weight$", r"^lm_head\.weight$"),
    copies=COPIES,
    harmless=(*HARMLESS, "max_position_embeddings", "extra_pos_embeddings"),
)
