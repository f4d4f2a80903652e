"""Linformer and Performer in whole models: generating is recomputing, in a state that does not grow; training works."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy
from twins import Twin

import regard
from regard.generation import cuda_step
from regard.generation.config import GenerationConfig
from regard.generation.loop import generate
from regard.lens.efficient_views import look_features
from regard.models.loading import load
from regard.models.replacement import Linformer, Performer, replace_attention
from regard.models.text import ModelState
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Embedding, FeedForward, Tower, encoder_block
from regard.nn.feature_maps import orthogonal_features
from regard.nn.linformer import LinformerAttention, SlotProjection
from regard.nn.performer import PerformerAttention
from regard.positions import alibi
from regard.testing import assert_rule

MOST, V = 37, 31
YARN = {"rope_type": "yarn", "rope_theta": 53.0, "factor": 4.0, "original_max_position_embeddings": 7}
LLAMA = {"vocab_size": V, "hidden_size": 30, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA |= {"head_dim": 10, "intermediate_size": 37, "max_position_embeddings": MOST}
BERT = {"vocab_size": V, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 29}
TWO = {"vocab_size": V, "d_model": 20, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": MOST}
TWO |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 5), ("ffn_dim", 17))}
ENDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
MODELS = {
    "GPT-2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(vocab_size=V, n_embd=20, n_layer=3, n_head=5, n_positions=MOST, **ENDS),
    ),
    "LLaMA": ("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA)),
    "LLaMA, yarn": ("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA, rope_parameters=YARN)),
    "BERT": ("BertForMaskedLM", transformers.BertConfig(**BERT, max_position_embeddings=MOST)),
    "ALBERT": (
        "AlbertModel",
        transformers.AlbertConfig(**BERT, embedding_size=7, max_position_embeddings=MOST, **ENDS),
    ),
    "BART": ("BartForConditionalGeneration", transformers.BartConfig(**TWO)),
    "T5": (
        "T5ForConditionalGeneration",
        transformers.T5Config(vocab_size=V, d_model=20, d_kv=4, d_ff=17, num_layers=2, num_heads=5),
    ),
    "Longformer": (
        "LongformerModel",
        transformers.LongformerConfig(**BERT, max_position_embeddings=MOST, attention_window=4, **ENDS),
    ),
    "ViT": (
        "ViTModel",
        transformers.ViTConfig(
            hidden_size=20,
            num_hidden_layers=2,
            num_attention_heads=5,
            intermediate_size=29,
            image_size=21,
            patch_size=7,
        ),
    ),
}
DECODERS = pytest.mark.parametrize("name", ["GPT-2", "LLaMA", "LLaMA, yarn"])


@pytest.fixture(scope="module")
def open_model(tmp_path_factory):
    """A tiny random model by its name, opened anew each time, in fp64 unless told."""
    folders = {}

    def opened(name, dtype=torch.float64):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("model")
            Twin(*MODELS[name], folders[name])
        return load(folders[name], dtype=dtype)

    return opened


def performed(model, features=23):
    replace_attention(model, Performer(features=features, seed=5))
    return model


def prompts(rows=3, length=7):
    """Ids (rows, length), and a mask: one row more of padding on the left for each."""
    ids = torch.randint(3, V, (rows, length), generator=torch.Generator().manual_seed(2))
    return ids, torch.arange(length) >= torch.arange(rows)[:, None]


class Afresh:
    """A decoder without any state: every step reads all tokens again."""

    def __init__(self, read):
        self.read = read  # ids and mask → logits (B, N, V)

    def begin(self, ids, mask, *, length):
        state = Tokens(ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)
        return self.read(state.ids, state.mask)[:, -1], state

    def step(self, state, tokens):
        state.ids = torch.cat([state.ids, tokens[:, None]], 1)
        state.mask = torch.cat([state.mask, torch.ones_like(state.mask[:, :1])], 1)
        return self.read(state.ids, state.mask)[:, -1]


class Tokens:
    def __init__(self, ids, mask):
        self.ids, self.mask = ids, mask

    def __len__(self):
        return self.ids.shape[1]

    def keep(self, rows):
        self.ids, self.mask = self.ids[rows], self.mask[rows]


# ----------------------------------------------------------------------------------------------------------- generating


@pytest.mark.parametrize("how", ["drawn", "beams"])
@pytest.mark.parametrize("padded", [False, True])
@DECODERS
def test_generated_ids_are_those_of_recomputing_everything_at_each_step(name, padded, how, open_model):
    model, (ids, mask) = performed(open_model(name)), prompts()
    config, beams = (GenerationConfig(temperature=1.5, seed=11), 1) if how == "drawn" else (GenerationConfig(), 3)
    afresh = Afresh(lambda ids, mask: model(ids, mask).logits)
    made = [
        generate(
            x, ids, mask if padded else None, max_new_tokens=19, pad_token_id=0, config=config, num_beams=beams
        ).ids
        for x in (model, afresh)
    ]
    assert torch.equal(*made)
    assert len(made[0].unique()) > 3


@DECODERS
def test_logits_step_by_step_are_those_of_one_pass(name, open_model):
    model, (ids, mask) = performed(open_model(name)), prompts(length=17)
    with torch.no_grad():
        whole = model(ids, mask).logits
    logits, state = model.begin(ids[:, :5], mask[:, :5], length=17)
    steps = [logits, *(model.step(state, ids[:, i]) for i in range(5, 17))]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 4:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("padded", [False, True])
@DECODERS
def test_state_takes_as_many_bytes_after_every_token_and_for_any_length(name, padded, open_model):
    model, (ids, mask) = performed(open_model(name)), prompts()
    mask = mask if padded else None
    _, state = model.begin(ids, mask, length=MOST)
    sizes = [state.nbytes]
    for _ in range(MOST - 7):
        model.step(state, ids[:, 0])
        sizes.append(state.nbytes)
    assert len(state) == MOST
    assert len(set(sizes)) == 1
    assert model.begin(ids, mask, length=8)[1].nbytes == sizes[0]
    block = model.tower.blocks[0].attention
    sums = 3 * block.num_kv_heads * 23 * (block.head_dim + 2) * 8  # rows, heads, features, top, mass and values, bytes
    assert sizes[0] == 3 * sums + (3 * 8 if padded else 0)  # layers; how much padding each row has


@pytest.mark.parametrize("padded", [False, True])
@DECODERS
def test_copies_of_a_state_go_on_by_themselves(name, padded, open_model):
    model, (ids, mask) = performed(open_model(name)), prompts()
    _, state = model.begin(ids, mask if padded else None, length=MOST)
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    expected = model.step(state, ids[:, 0])
    for other in copies:
        assert torch.equal(model.step(other, ids[:, 0]), expected)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (Performer(features=2.5), r"features.*float.*2.5"),
        (Performer(seed=1.5), r"seed.*float.*1.5"),
        (Linformer(positions=MOST, slots=4.5), r"slots.*float.*4.5"),
    ],
    ids=repr,
)
def test_sizes_that_are_no_whole_numbers_are_refused_and_nothing_changes(way, message, open_model):
    model = open_model("BERT")
    with pytest.raises(TypeError, match=f"^{message}$"):
        replace_attention(model, way)
    assert not [layer for layer in model.modules() if isinstance(layer, (PerformerAttention, LinformerAttention))]


def test_state_of_softmax_attention_grows_with_the_room(open_model):
    model, (ids, mask) = open_model("LLaMA"), prompts()
    short, long = (model.begin(ids, mask, length=n)[1].nbytes for n in (7, 35))
    assert long - 3 * 7 == 5 * (short - 3 * 7)  # the mask is a byte for each token of the prompt


def test_rows_that_change_places_take_their_padding_along(open_model):
    model, (ids, mask) = performed(open_model("GPT-2")), prompts()
    rows, more = torch.tensor([2, 0, 2, 1]), torch.randint(3, V, (4, 6))
    _, state = model.begin(ids, mask, length=13)
    state.keep(rows)
    steps = torch.stack([model.step(state, more[:, i]) for i in range(6)], 1)
    with torch.no_grad():
        seen = torch.cat([mask[rows], torch.ones(4, 6, dtype=torch.bool)], 1)
        whole = model(torch.cat([ids[rows], more], 1), seen).logits[:, 7:]
    torch.testing.assert_close(steps, whole, rtol=0, atol=1e-11)


def test_state_has_room_for_what_was_asked_and_no_more(open_model):
    model, (ids, _) = performed(open_model("GPT-2")), prompts()
    _, state = model.begin(ids, None, length=8)
    model.step(state, ids[:, 0])
    with pytest.raises(ValueError, match=r"8.*positions"):
        model.step(state, ids[:, 0])


def test_half_precision_is_summed_in_single(open_model):
    model, (ids, mask) = performed(open_model("LLaMA", torch.bfloat16)), prompts()
    _, state = model.begin(ids, mask, length=9)
    assert {t.dtype for cache in state.caches for t in cache.sums} == {torch.float32}
    assert model.step(state, ids[:, 0]).dtype == torch.bfloat16


def test_encoder_and_decoder_can_both_be_performers_and_the_look_at_the_memory_stays(open_model):
    model, (ids, mask) = open_model("BART"), prompts()
    done = replace_attention(model, Performer(features=23))
    assert len(done.layers) == 5
    assert list(done.kept) == [f"decoder.blocks.{i}.cross" for i in range(3)]
    assert all("memory" in why for why in done.kept.values())
    start, config = torch.full((3, 1), model.start), GenerationConfig(temperature=1.5, seed=11)
    afresh = Afresh(
        lambda written, there: model(ids, mask, decoder_input_ids=written, decoder_attention_mask=there).logits
    )
    reading = model.read(ids, mask)
    made = [generate(x, start, max_new_tokens=13, pad_token_id=0, config=config).ids for x in (reading, afresh)]
    assert torch.equal(*made)
    assert len(made[0].unique()) > 3


def test_padded_start_of_a_decoder_needs_no_mask_later(open_model):
    model, (ids, _) = performed(open_model("BART")), prompts()
    target, mask = prompts(length=9)
    with torch.no_grad():
        whole = model(ids, decoder_input_ids=target, decoder_attention_mask=mask).logits
    reading = model.read(ids)
    logits, state = reading.begin(target[:, :4], mask[:, :4], length=9)
    steps = [logits, *(reading.step(state, target[:, i]) for i in range(4, 9))]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 3:], rtol=0, atol=1e-11)
    assert state.mask is None


def test_linformer_decoder_made_by_hand_cannot_begin():
    attention = LinformerAttention(6, 2, projection=SlotProjection(11, 3))
    block = Block(attention, FeedForward(6, 13, "relu"), [nn.LayerNorm(6), nn.LayerNorm(6)], norm_first=True)
    tower = Tower(Embedding(V, 6), [block], causal=True)
    with pytest.raises(ValueError, match="Linformer"):
        ModelState.room(tower, 2, 5, None, torch.float32, torch.device("cpu"))


def test_captured_step_is_for_softmax_attention_alone(open_model):
    model = open_model("LLaMA", torch.float32)
    assert cuda_step.unsupported_reason(model.tower, model.head, torch.float32) is None
    why = cuda_step.unsupported_reason(performed(model).tower, model.head, torch.float32)
    assert "PerformerAttention" in why


# ----------------------------------------------------------------------------------------------------- what is replaced


@pytest.mark.parametrize("name", ["GPT-2", "LLaMA", "BERT"])
def test_parameters_stay_the_same_objects(name, open_model):
    model = open_model(name)
    before = dict(model.named_parameters())
    performed(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[key] is p for key, p in before.items())


def test_linformer_adds_its_matrices_and_nothing_else(open_model):
    model = open_model("BERT")
    before = dict(model.named_parameters())
    replace_attention(model, Linformer(positions=MOST, slots=3))
    after = dict(model.named_parameters())
    assert all(after[key] is p for key, p in before.items())
    added = {key: p for key, p in after.items() if key not in before}
    assert {key.rpartition(".")[2] for key in added} == {"keys", "values"}
    assert {(p.shape, p.dtype) for p in added.values()} == {((MOST, 3), torch.float64)}
    assert len(added) == 4


@pytest.mark.parametrize("name", ["GPT-2", "LLaMA", "BERT", "ViT"])
def test_more_features_come_closer_to_the_model_that_was(name, open_model):
    given = {"pixel_values": torch.randn(2, 3, 21, 21, generator=torch.Generator().manual_seed(1)).double()}
    if name != "ViT":
        given = dict(zip(("input_ids", "attention_mask"), prompts(), strict=True))
    with torch.no_grad():
        exact = calm(open_model(name))(**given).last_hidden_state
        errors = [(performed(calm(open_model(name)), m)(**given).last_hidden_state - exact).norm() for m in (32, 8192)]
    assert errors[1] < errors[0] / 8  # 256 times as many features: 16 times closer, but for luck
    assert errors[1] < 0.02 * exact.norm()


def calm(model):
    """Small queries and keys: the estimate's variance grows as e to their lengths."""
    for block in model.tower.blocks:
        layer = block.attention
        for part in [layer.w_qkv] if layer.fused else [layer.w_q, layer.w_k]:
            for p in part.parameters():
                p.mul_(0.3)
    return model


def test_each_layer_has_the_next_seed(open_model):
    model = performed(open_model("LLaMA"))
    for number, block in enumerate(model.tower.blocks):
        assert torch.equal(block.attention.directions, orthogonal_features(23, 10, seed=5 + number))


def test_usual_number_of_features_is_that_of_the_head_size(open_model):
    model = open_model("LLaMA")
    replace_attention(model, Performer())
    assert model.tower.blocks[0].attention.features == 23  # 10 · ln 10


def test_block_that_stands_at_several_depths_is_replaced_once(open_model):
    model, (ids, mask) = open_model("ALBERT"), prompts()
    assert replace_attention(model, Linformer(MOST, 3)).layers == ("tower.blocks.0.attention",)
    assert model(ids, mask).last_hidden_state.shape == (3, 7, 20)


def test_head_norms_and_scales_are_taken_over():
    norms = (nn.LayerNorm(3), nn.LayerNorm(3))
    softmax = MultiHeadAttention(6, 2, fused=True, head_norms=norms, scale=0.3).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    performer = PerformerAttention.in_place_of(softmax, features=20_000)
    torch.testing.assert_close(performer(x), softmax(x), rtol=0, atol=0.02)
    whole = SlotProjection(7, 7, key_value=True).double()
    with torch.no_grad():
        whole.keys.copy_(torch.eye(7))  # every position its own slot: softmax attention itself
    linformer = LinformerAttention.in_place_of(softmax, projection=whole)
    torch.testing.assert_close(linformer(x), softmax(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("sharing", "shape", "matrices"),
    [("none", (5, MOST, 3), 4), ("headwise", (MOST, 3), 4), ("key-value", (MOST, 3), 2), ("layerwise", (MOST, 3), 1)],
)
def test_linformer_shares_what_is_said(sharing, shape, matrices, open_model):
    model = open_model("BERT")
    replace_attention(model, Linformer(MOST, 3, sharing=sharing))
    found = [p for key, p in model.named_parameters() if ".projection." in key]
    assert [tuple(p.shape) for p in found] == [shape] * matrices


def test_text_longer_than_the_projection_is_refused(open_model):
    model = open_model("BERT")
    replace_attention(model, Linformer(positions=6, slots=3))
    with pytest.raises(ValueError, match=r"7.*positions.*6"):
        model(prompts()[0])


def test_mode_and_device_stay_as_they_were():
    block = encoder_block(6, 2, 10, "gelu", eps=1e-12, dropout=0.0, attention_dropout=0.1).eval()
    replace_attention(block, Linformer(11, 3))
    assert not block.attention.training
    assert block.attention.dropout == 0.1
    assert block.attention.projection.keys.device.type == "cpu"
    assert block.attention.w_o.weight.device.type == "cpu"


# --------------------------------------------------------------------------------------------------------- what is said


def test_report_says_what_was_replaced_and_what_is_gone(open_model):
    assert str(replace_attention(open_model("GPT-2"), Performer(7))) == (
        "3 layers have a Performer now: tower.blocks.0.attention, tower.blocks.1.attention, tower.blocks.2.attention\n"
        "gone: dropout 0.1 on attention's weights; a Performer makes none"
    )
    assert str(replace_attention(open_model("BART"), Performer(7))) == (
        "5 layers have a Performer now: encoder.blocks.0.attention, encoder.blocks.1.attention … "
        "decoder.blocks.2.attention\n"
        "as before: decoder.blocks.0.cross, decoder.blocks.1.cross, decoder.blocks.2.cross: it looks at a memory, "
        "whose keys are made once"
    )
    assert str(replace_attention(open_model("BERT").tower.blocks[0], Linformer(11, 3))) == (
        "1 layer has a Linformer now: attention"
    )


@pytest.mark.parametrize(
    ("name", "way", "message"),
    [
        ("T5", Performer(), r"Performer.*4.*T5"),
        (
            "BART",
            Linformer(9, 3),
            r"Linformer.*3.*5.*decoder.blocks.2.attention",
        ),
        ("GPT-2", Linformer(9, 3), r"Linformer.*decoder"),
        ("Longformer", Performer(), "SlidingAttention"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_changes(name, way, message, open_model):
    model = open_model(name)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        replace_attention(model, way)
    assert [type(module) for module in model.modules()] == before


def test_replaced_layer_is_not_replaced_again(open_model):
    with pytest.raises(ValueError, match="PerformerAttention"):
        replace_attention(performed(open_model("GPT-2")), Performer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": alibi(2)}, "features"),
        ({"softcap": 3.0}, r"softcap.*\(3\.0\)"),
        ({"scale": -0.5}, r"scale.*-0\.5.*scale.*0"),
        ({"d_context": 5}, r"5.*Performer"),
    ],
)
def test_layer_that_features_cannot_estimate_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PerformerAttention.in_place_of(MultiHeadAttention(6, 2, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": regard.positions.Rotary(2)}, "Rotary"),
        ({"softcap": 3.0}, r"softcap.*\(3\.0\).*Linformer"),
        ({"d_context": 5}, r"5.*Linformer"),
    ],
)
def test_layer_that_slots_cannot_serve_is_refused(options, message):
    layer = MultiHeadAttention(6, 3, **options)
    with pytest.raises(ValueError, match=message):
        LinformerAttention.in_place_of(layer, projection=SlotProjection(7, 3))


def test_wrong_way_and_nothing_to_replace_are_refused():
    with pytest.raises(TypeError, match=r"way.*Performer\(…\).*Linformer\(…\).*str"):
        replace_attention(nn.Identity(), "performer")
    with pytest.raises(ValueError, match=r"Block.*Identity"):
        replace_attention(nn.Identity(), Performer())
    with pytest.raises(ValueError, match=r"ModuleList.*0.*Block"):
        replace_attention(nn.ModuleList([MultiHeadAttention(6, 2)]), Performer())
    with pytest.raises(ValueError, match=r"sharing.*none.*headwise.*key-value.*layerwise.*'all'"):
        Linformer(9, 3, sharing="all")


# ----------------------------------------------------------------------------------------------------- trained and seen


@pytest.mark.parametrize("way", [Performer(features=23), Linformer(MOST, 5)], ids=["Performer", "Linformer"])
def test_encoder_learns_after_its_attention_was_replaced(way, open_model):
    """Masked words of one small batch are learnt by heart, gradients reaching every weight."""
    torch.manual_seed(0)
    model, (ids, mask) = open_model("BERT", torch.float32).eval(), prompts(rows=4)
    replace_attention(model, way)
    hidden = torch.where(torch.arange(7) == 5, 3, ids)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(12):
        loss = cross_entropy(model(hidden, mask).logits[:, 5], ids[:, 5])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert all(p.grad is not None for p in model.tower.blocks.parameters())


def test_decoder_learns_after_its_attention_was_replaced(open_model):
    model, (ids, _) = performed(open_model("GPT-2", torch.float32)).eval(), prompts(rows=2, length=13)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(12):
        loss = cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_single_precision_errs_no_more_than_recomputing_does(open_model):
    ids, mask = prompts(length=17)
    truth, baseline = (
        performed(open_model("LLaMA", dtype))(ids, mask).logits[:, 4:] for dtype in (torch.float64, torch.float32)
    )
    model = performed(open_model("LLaMA", torch.float32))
    logits, state = model.begin(ids[:, :5], mask[:, :5], length=17)
    steps = torch.stack([logits, *(model.step(state, ids[:, i]) for i in range(5, 17))], 1)
    assert_rule(steps, baseline.detach(), truth.detach())


def test_watch_names_the_performers_as_unseen_and_sees_the_others(open_model):
    model, (ids, mask) = open_model("BART"), prompts()
    done = replace_attention(model.encoder, Performer(23))
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids, mask, decoder_input_ids=ids)
    assert list(seen.unseen) == [f"encoder.{name}" for name in done.layers]
    assert seen.names == [f"decoder.blocks.{i}.{part}" for i in range(3) for part in ("attention", "cross")]


def test_watch_sees_the_slots_of_a_replaced_encoder(open_model):
    model, (ids, mask) = open_model("BERT"), prompts()
    replace_attention(model, Linformer(MOST, 3))
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids, mask)
    assert seen.unseen == {}
    assert [seen[name].received.shape for name in seen.names] == [(3, 5, 3)] * 2


def test_replaced_layer_can_be_looked_into_with_what_it_reads(open_model):
    model, (ids, _) = performed(open_model("LLaMA")), prompts()
    block, read = model.tower.blocks[0], []
    block.attention.register_forward_hook(lambda layer, given, made: read.append((given[0], made)))
    with torch.no_grad():
        model(ids)
        x, made = read[0]
        view = look_features(block.attention, x, mask=regard.masks.causal())
        torch.testing.assert_close(block.attention.joined(view.output), made, rtol=0, atol=1e-12)
    torch.testing.assert_close(view.row(6).sum(-1), torch.ones(3, 6, dtype=torch.float64))


@pytest.mark.parametrize("way", [Performer(features=7), Linformer(positions=MOST, slots=3)], ids=repr)
def test_save_refuses_what_the_format_cannot_say_before_it_writes(way, open_model, tmp_path):
    model = open_model("BERT")
    replace_attention(model, way)
    message = rf"tower.blocks.0.attention.*{type(way).__name__}Attention.*BERT's"
    with pytest.raises(ValueError, match=message):
        model.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
