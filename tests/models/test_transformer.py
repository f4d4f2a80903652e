import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.models.encoder_decoder import EncoderDecoder, shift_right
from regard.models.families.transformer import TransformerSize, transformer
from regard.models.loading import load
from regard.testing import assert_rule

SIZES = {"d_model": 20, "num_heads": 5, "layers": 3, "d_ff": 29}
OTHER = {"d_model": 12, "num_heads": 2, "layers": 1, "d_ff": 7}


def made(vocabulary: int = 47, sizes: dict[str, int] = SIZES) -> EncoderDecoder:
    """The paper's model with every weight moved, so that each one matters."""
    model = transformer(vocabulary, TransformerSize(**sizes, dropout=0.0), start=1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model


def batch(side: str) -> dict[str, Tensor]:
    ids, target = torch.randint(2, 47, (13, 11)), torch.randint(2, 47, (13, 7))
    if side == "none":
        return {"input_ids": ids, "decoder_input_ids": target}
    counts = torch.arange(13)[:, None]
    mask, decoder_attention_mask = torch.arange(11) < 11 - counts % 10, torch.arange(7) < 7 - counts % 6
    if side == "left":
        mask, decoder_attention_mask = mask.flip(1), decoder_attention_mask.flip(1)
    return {
        "input_ids": ids,
        "decoder_input_ids": target,
        "attention_mask": mask,
        "decoder_attention_mask": decoder_attention_mask,
    }


# ----------------------------------------------------------------------------------------- against PyTorch's own layers


class Theirs(nn.Module):
    """torch.nn's encoder and decoder, post-norm and without last norms; the rest of the paper written out."""

    def __init__(self, ours: EncoderDecoder, sizes: dict[str, int]) -> None:
        super().__init__()
        d, heads, layers, inner = sizes.values()
        same = {"d_model": d, "nhead": heads, "dim_feedforward": inner, "dropout": 0.0, "batch_first": True}
        encoder, decoder = nn.TransformerEncoderLayer(**same), nn.TransformerDecoderLayer(**same)
        self.encoder = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers)
        self.table = nn.Parameter(ours.encoder.embed.tokens.weight.detach().clone())
        with torch.no_grad():
            for side in ("encoder", "decoder"):
                for mine, layer in zip(getattr(ours, side).blocks, getattr(self, side).layers, strict=True):
                    self._copy(mine, layer)

    @staticmethod
    def _copy(mine: nn.Module, layer: nn.Module) -> None:
        norms = [mine.attention_norm, mine.feed_forward_norm]
        attentions = [(mine.attention, layer.self_attn)]
        if mine.cross is not None:
            norms.insert(1, mine.cross_norm)
            attentions.append((mine.cross, layer.multihead_attn))
        for ours, theirs in attentions:
            theirs.in_proj_weight.copy_(ours.w_qkv.weight)
            theirs.in_proj_bias.copy_(ours.w_qkv.bias)
            theirs.out_proj.load_state_dict(ours.w_o.state_dict())
        for i, norm in enumerate(norms, 1):
            getattr(layer, f"norm{i}").load_state_dict(norm.state_dict())
        layer.linear1.load_state_dict(mine.feed_forward.w_in.state_dict())
        layer.linear2.load_state_dict(mine.feed_forward.w_out.state_dict())

    def embed(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """word·√d + PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(…): the paper, section 3.5."""
        d = self.table.shape[1]
        place = torch.arange(ids.shape[1]) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        waves = torch.zeros(*place.shape, d, dtype=torch.float64)
        for i in range(d // 2):
            angle = place.double() / 10000 ** (2 * i / d)
            waves[..., 2 * i], waves[..., 2 * i + 1] = angle.sin(), angle.cos()
        return self.table[ids] * d**0.5 + waves.float().to(self.table.dtype)

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        hidden = None if attention_mask is None else ~attention_mask
        memory = self.encoder(self.embed(input_ids, attention_mask), src_key_padding_mask=hidden)
        n = decoder_input_ids.shape[1]
        ahead = torch.ones(n, n, dtype=torch.bool).triu(1)
        x = self.decoder(
            self.embed(decoder_input_ids, decoder_attention_mask),
            memory,
            tgt_mask=ahead,
            tgt_key_padding_mask=None if decoder_attention_mask is None else ~decoder_attention_mask,
            memory_key_padding_mask=hidden,
        )
        return x @ self.table.T


def run(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits at tokens, and the gradient of their weighted sum to the table of words, which all parts reach."""
    found = model(**given)
    logits = found if isinstance(found, Tensor) else found.logits
    logits = logits if "decoder_attention_mask" not in given else logits[given["decoder_attention_mask"]]
    towards = torch.randn(logits.shape, generator=torch.Generator().manual_seed(13)).to(logits.dtype)
    model.zero_grad()
    (logits * towards).sum().backward()
    table = model.table if isinstance(model, Theirs) else model.encoder.embed.tokens.weight
    return logits.detach(), table.grad.clone()


@pytest.mark.parametrize("sizes", [SIZES, OTHER], ids=["five heads", "one layer"])
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_it_computes_what_pytorch_s_own_layers_compute(side, sizes):
    ours, given = made(sizes=sizes), batch(side)
    theirs = Theirs(ours, sizes)
    mine, base, truth = run(ours, given), run(theirs, given), run(theirs.double(), given)
    exact = run(ours.double(), given)
    for number, what in enumerate(("logits", "gradient of the words' table")):
        assert_rule(mine[number], base[number], truth[number], gradient=number == 1, what=what)
        torch.testing.assert_close(exact[number], truth[number], rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ first weights


def test_the_base_model_has_the_paper_s_number_of_weights():
    v, d, f, n = 37000, 512, 2048, 6
    attention, feed_forward, norm = 4 * (d * d + d), d * f + f + f * d + d, 2 * d
    expected = v * d + n * (attention + feed_forward + 2 * norm) + n * (2 * attention + feed_forward + 3 * norm)
    with torch.device("meta"):
        model = transformer(37000, start=1)
    assert sum(p.numel() for p in model.parameters()) == expected == 63_082_496  # the paper: 65 million
    assert (model.encoder.blocks[0].attention.num_heads, len(model.encoder.blocks), len(model.decoder.blocks)) == (
        8,
        6,
        6,
    )


def test_matrices_start_by_xavier_and_words_with_variance_one_over_d():
    model = transformer(1009, TransformerSize(d_model=64, num_heads=4, layers=1, d_ff=256), start=1).requires_grad_(
        False
    )
    block = model.decoder.blocks[0]
    for query in (block.attention.w_qkv.weight[:64], block.cross.w_qkv.weight[64:128]):
        bound = (6 / (64 + 64)) ** 0.5  # of query, key and value each, not of the three as one
        assert 0.98 * bound < float(query.abs().max()) <= bound
    bound = (6 / (64 + 256)) ** 0.5
    assert 0.98 * bound < float(block.feed_forward.w_in.weight.abs().max()) <= bound
    assert float(model.decoder.embed.tokens.weight.std()) == pytest.approx(64**-0.5, rel=0.01)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_one_table_embeds_both_sides_and_scores_the_words():
    model = made()
    assert model.encoder.embed.tokens is model.decoder.embed.tokens
    assert [tuple(p.shape) for p in model.parameters() if p.shape[0] == 47] == [(47, 20)]


def test_it_learns_to_copy_with_smoothed_labels():
    model = transformer(13, TransformerSize(d_model=16, num_heads=2, layers=1, d_ff=32, dropout=0.0), start=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ids = torch.randint(2, 13, (64, 4))

    def loss() -> Tensor:
        logits = model(ids, decoder_input_ids=shift_right(ids, model.start)).logits
        return cross_entropy(logits.flatten(0, 1), ids.flatten(), label_smoothing=0.1)

    before = loss()
    for _ in range(60):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss() < before / 2


def test_dropouts_are_where_the_paper_has_them():
    model = transformer(47, TransformerSize(**SIZES, dropout=0.3), start=1)
    block = model.decoder.blocks[0]
    assert (model.encoder.embed.dropout.p, block.dropout.p, model.decoder.embed.dropout.p) == (0.3, 0.3, 0.3)
    assert (block.attention.dropout, block.cross.dropout, block.feed_forward.dropout.p) == (0.0, 0.0, 0.0)


# ------------------------------------------------------------------------------------------------------------ to disk


def test_saved_and_loaded_it_is_the_same_model(tmp_path):
    model, given = made(), batch("right")
    model.save(tmp_path)
    again = load(tmp_path)
    assert (again.task, again.family.title, again.start) == ("text2text-generation", "Transformer", 1)
    assert torch.equal(again(**given).logits, model(**given).logits)
    assert torch.equal(
        load(tmp_path, task="feature-extraction")(**given).last_hidden_state, model(**given).last_hidden_state
    )


def test_transformers_does_not_open_it_as_a_model_with_other_sines(tmp_path):
    made().save(tmp_path)
    with pytest.raises(ValueError, match="`transformer`"):
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)


def test_the_tokens_it_was_made_with_are_kept(tmp_path):
    transformer(47, TransformerSize(**SIZES), start=1, end=2, pad=0).save(tmp_path)
    values = load(tmp_path).config.values
    assert (values["decoder_start_token_id"], values["eos_token_id"], values["pad_token_id"]) == (1, 2, 0)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"start": 47}, ValueError, r"start.*47.*0.*46"),
        ({"end": -1}, ValueError, r"end.*-1.*0.*46"),
        ({"pad": 47}, ValueError, r"pad.*47.*0.*46"),
        ({"dropout": 1.0}, ValueError, r"dropout.*0.*1.*1.0"),
        ({"d_model": 21, "num_heads": 3}, ValueError, "21"),
        ({"num_heads": 3}, ValueError, r"d_model.*20.*3.*heads"),
        ({"layers": 0}, ValueError, r"layers.*1.*0"),
        ({"num_heads": 0}, ValueError, r"heads.*1.*0"),
        ({"d_ff": 2.5}, TypeError, r"d_ff.*float"),
        ({"d_model": "20"}, TypeError, r"d_model.*str"),
    ],
)
def test_what_is_no_model_is_refused(more, error, message):
    tokens = {"start": 1} | {name: more[name] for name in ("start", "end", "pad") if name in more}
    sizes = SIZES | {name: more[name] for name in more if name not in tokens}
    with pytest.raises(error, match=message):
        transformer(47, TransformerSize(**sizes), **tokens)


def test_a_vocabulary_is_a_number():
    with pytest.raises(TypeError, match=r"vocabulary.*str"):
        transformer("47", start=1)
