"""GPT-2 (Radford et al. 2019): a decoder that continues text.

Peculiar: blocks norm before each part and once more at the end; learned positions; the tanh form of GELU; the words are
scored with the token table itself; matrices are stored (inputs, outputs).
"""

from __future__ import annotations

from torch import nn

from regard.models.config import Settings
from regard.models.family import Family, Names, Task, Turned
from regard.models.text import TextModel
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, FeedForward, Tower
from regard.nn.heads import decoder_head

__all__ = ["FAMILY"]

NAMES: Names = {
    "tower.embed.tokens": "wte",
    "tower.embed.positions": "wpe",
    "tower.blocks.{i}.attention_norm": "h.{i}.ln_1",
    "tower.blocks.{i}.attention.w_qkv": Turned("h.{i}.attn.c_attn"),
    "tower.blocks.{i}.attention.w_o": Turned("h.{i}.attn.c_proj"),
    "tower.blocks.{i}.feed_forward_norm": "h.{i}.ln_2",
    "tower.blocks.{i}.feed_forward.w_in": Turned("h.{i}.mlp.c_fc"),
    "tower.blocks.{i}.feed_forward.w_out": Turned("h.{i}.mlp.c_proj"),
    "tower.norm": "ln_f",
}

SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")


def names(settings: Settings) -> Names:
    """The body's weights, the same in every GPT-2."""
    return NAMES


def tower(settings: Settings) -> Tower:
    """Embedding and blocks."""
    d, eps = settings.whole("n_embd"), settings.eps("layer_norm_epsilon", 1e-5)
    heads, inner = settings.whole("n_head"), settings.whole("n_inner", 4 * d)
    added = settings.number("resid_pdrop", 0.1)
    shrinking = settings.flag("scale_attn_by_inverse_layer_idx", False)
    scale = (d // heads) ** -0.5 if settings.flag("scale_attn_weights", True) else 1.0
    embed = Embedding(
        settings.whole("vocab_size"),
        d,
        positions=nn.Embedding(settings.whole("n_positions"), d),
        dropout=settings.number("embd_pdrop", 0.1),
    )

    def block(number: int) -> Block:
        return Block(
            MultiHeadAttention(
                d,
                heads,
                fused=True,
                dropout=settings.number("attn_pdrop", 0.1),
                scale=scale / (number + 1) if shrinking else scale,
            ),
            FeedForward(d, inner, settings.text("activation_function", "gelu_new")),
            [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)],
            norm_first=True,
            dropout=added,
        )

    blocks = [block(number) for number in range(settings.layers("n_layer"))]
    return Tower(embed, blocks, causal=True, norm=nn.LayerNorm(d, eps))


def build(settings: Settings, task: str) -> TextModel:
    """The model for a task."""
    d = settings.whole("n_embd")
    head = decoder_head(
        task,
        d,
        vocabulary=settings.whole("vocab_size"),
        labels=settings.label_count(),
        tied=settings.tied(),
        dropout=settings.number("classifier_dropout", settings.number("hidden_dropout", 0.1)),
    )
    return TextModel(settings, tower(settings), head=head)


FAMILY = Family(
    title="GPT-2",
    model_type="gpt2",
    prefix="transformer",
    build=build,
    names=names,
    tasks={
        "none": Task(architecture="GPT2Model"),
        "generate": Task(
            architecture="GPT2LMHeadModel", names={"head.words": "lm_head"}, copies={"lm_head.weight": "wte.weight"}
        ),
        "classify": Task(architecture="GPT2ForSequenceClassification", names={"head.score": "score"}),
        "tag": Task(architecture="GPT2ForTokenClassification", names={"head.score": "classifier"}),
        "answer": Task(architecture="GPT2ForQuestionAnswering", names={"head.score": "qa_outputs"}),
    },
    ignored=(r"\.attn\.(masked_)?bias$", r"^lm_head\.weight$"),
    # A precision of attention's scores, which are fp32 or wider here always; and a head nobody trains any more.
    harmless=("reorder_and_upcast_attn", "n_ctx", *(f"summary_{x}" for x in SUMMARY)),
)
