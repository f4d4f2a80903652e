"""GPT-2 (Radford et al. 2019): a decoder that continues text.

Peculiar: blocks norm before each part and once more at the end; learned positions; the tanh form of GELU; the words are
scored with the token table itself; matrices are stored (inputs, outputs).
"""

from __future__ import annotations

from torch import nn

from regard.models.family import Config, Family, Names, Task, Transpose
from regard.models.text import TextModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, FeedForward, Tower, decoder_head

NAMES: Names = {
    "tower.embed.tokens": "wte",
    "tower.embed.positions": "wpe",
    "tower.blocks.{i}.attention_norm": "h.{i}.ln_1",
    "tower.blocks.{i}.attention.w_qkv": Transpose("h.{i}.attn.c_attn"),
    "tower.blocks.{i}.attention.w_o": Transpose("h.{i}.attn.c_proj"),
    "tower.blocks.{i}.feed_forward_norm": "h.{i}.ln_2",
    "tower.blocks.{i}.feed_forward.w_in": Transpose("h.{i}.mlp.c_fc"),
    "tower.blocks.{i}.feed_forward.w_out": Transpose("h.{i}.mlp.c_proj"),
    "tower.norm": "ln_f",
}

SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")


def tower(config: Config) -> Tower:
    """Embedding and blocks."""
    d, eps = config.int("n_embd"), config.eps("layer_norm_epsilon", 1e-5)
    heads, inner = config.int("n_head"), config.int("n_inner", 4 * d)
    shrinking = config.bool("scale_attn_by_inverse_layer_idx", False)
    scale = (d // heads) ** -0.5 if config.bool("scale_attn_weights", True) else 1.0
    positions = nn.Embedding(config.int("n_positions"), d)
    embed = Embedding(config.int("vocab_size"), d, positions=positions, dropout=config.float("embd_pdrop", 0.1))

    def block(number: int) -> Block:
        factor = scale / (number + 1) if shrinking else scale
        return Block(
            MultiHeadAttention(d, heads, fused=True, dropout=config.float("attn_pdrop", 0.1), scale=factor),
            FeedForward(d, inner, config.str("activation_function", "gelu_new")),
            [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)],
            norm_first=True,
            dropout=config.float("resid_pdrop", 0.1),
        )

    blocks = [block(number) for number in range(config.layers("n_layer"))]
    return Tower(embed, blocks, causal=True, norm=nn.LayerNorm(d, eps))


def build(config: Config, task: str) -> TextModel:
    """The model for a task."""
    d = config.int("n_embd")
    head = decoder_head(
        task,
        d,
        vocabulary=config.int("vocab_size"),
        labels=config.num_labels(),
        tied=config.tie_word_embeddings(),
        dropout=config.float("classifier_dropout", config.float("hidden_dropout", 0.1)),
    )
    return TextModel(config, tower(config), head=head)


FAMILY = Family(
    title="GPT-2",
    model_type="gpt2",
    prefix="transformer",
    build=build,
    names=NAMES,
    tasks={
        "feature-extraction": Task(architecture="GPT2Model"),
        "text-generation": Task(
            architecture="GPT2LMHeadModel", names={"head.words": "lm_head"}, copies={"lm_head.weight": "wte.weight"}
        ),
        "text-classification": Task(architecture="GPT2ForSequenceClassification", names={"head.score": "score"}),
        "token-classification": Task(architecture="GPT2ForTokenClassification", names={"head.score": "classifier"}),
        "question-answering": Task(architecture="GPT2ForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"\.attn\.(masked_)?bias$", r"^lm_head\.weight$"),
    # A precision of attention's scores, which are fp32 or wider here always; and a head that is no longer trained.
    harmless=("reorder_and_upcast_attn", "n_ctx", *(f"summary_{x}" for x in SUMMARY)),
)
