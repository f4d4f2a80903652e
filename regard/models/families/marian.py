"""Marian (Junczys-Dowmunt et al. 2018): the 2017 Transformer as OPUS-MT's translators between many languages have it.

Peculiar: all sines come before all cosines; source and target may have vocabularies of their own; swish; a constant is
added to the score of each word, as in BART. Sines have no end, so max_position_embeddings is no limit here.
"""

from __future__ import annotations

from regard.models.encoder_decoder import EncoderDecoder
from regard.models.families.bart import COPIES, HARMLESS, HEAD_COPIES, WORDS, lm_head
from regard.models.families.transformer import BLOCKS, refuse_others, tower
from regard.models.family import Config, Family, Names, Task
from regard.nn.blocks import Embedding, Waves


def names(config: Config) -> Names:
    """The body's weights: one table of words, or one on each side."""
    if config.bool("share_encoder_decoder_embeddings", True):
        return {**BLOCKS, "encoder.embed.tokens": "shared"}
    return {**BLOCKS, **{f"{side}.embed.tokens": f"{side}.embed_tokens" for side in ("encoder", "decoder")}}


def build(config: Config, task: str) -> EncoderDecoder:
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


FAMILY = Family(
    title="Marian",
    model_type="marian",
    prefix="model",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="MarianModel"),
        "text2text-generation": Task(architecture="MarianMTModel", names=WORDS, copies=HEAD_COPIES),
    },
    # The sines, and the one table of words once more under other names.
    ignored=(r"(encoder|decoder)\.(embed_positions|embed_tokens)\.weight$", r"^lm_head\.weight$"),
    copies=COPIES,
    harmless=(*HARMLESS, "max_position_embeddings", "extra_pos_embeddings"),
)
