"""Linformer: against the public package given the same weights, against its formula, and in our blocks and towers."""

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.nn.attention import GrowingCache, MultiHeadAttention
from regard.nn.blocks import Block, Embedding, FeedForward, Tower
from regard.nn.feature_maps import read_key_mask
from regard.nn.linformer import LinformerAttention, SlotProjection

SHAPES = {"plain": {}, "one key head": {"one_kv_head": True}, "values are keys": {"share_kv": True}}
SHAPES["both, other head size"] = {"one_kv_head": True, "share_kv": True, "dim_head": 7}


def twin(**options):
    """A layer of the package and ours with its weights, in fp64: width 6, 23 positions, 5 slots, 3 heads."""
    package = pytest.importorskip("linformer", reason="compares with the linformer package: pip install linformer")
    theirs = package.LinformerSelfAttention(6, 23, k=5, heads=3, **options).double()
    return theirs, LinformerAttention.from_package(theirs)


def layer(**options):
    return LinformerAttention(6, 3, projection=SlotProjection(23, 5), **options).double()


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------- the package


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("length", [23, 11, 1])
def test_layer_gives_the_numbers_of_the_package(options, length):
    theirs, ours = twin(**options)
    x = numbers(2, length, 6)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_context_is_looked_at_as_in_the_package(options):
    theirs, ours = twin(**options)
    x, context = numbers(2, 29, 6), numbers(2, 13, 6)  # more queries than the projection has positions
    torch.testing.assert_close(ours(x, context), theirs(x, context), rtol=0, atol=1e-14)
    torch.testing.assert_close(ours(x, ours.keys(context)), ours(x, context), rtol=0, atol=0)


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_gradients_are_those_of_the_package(options):
    theirs, ours = twin(**options)
    x, towards = numbers(2, 11, 6), numbers(2, 11, 6)
    for module in (theirs, ours):
        (module(x) * towards).sum().backward()
    names = {"w_q.weight": "to_q.weight", "w_k.weight": "to_k.weight", "w_v.weight": "to_v.weight"}
    names |= {"w_o.weight": "to_out.weight", "w_o.bias": "to_out.bias"}
    names |= {"projection.keys": "proj_k", "projection.values": "proj_v"}
    expected = dict(theirs.named_parameters())
    assert {names[name] for name, _ in ours.named_parameters()} == set(expected)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[names[name]].grad, rtol=1e-12, atol=1e-13)


def test_weights_of_the_package_can_go_with_a_shared_projection():
    shared = SlotProjection(23, 5).double()
    theirs, _ = twin()
    ours = LinformerAttention.from_package(theirs, projection=shared)
    assert ours.projection is shared
    theirs.proj_k.data, theirs.proj_v.data = shared.keys.data, shared.values.data
    x = numbers(2, 17, 6)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-14)


def test_from_package_refuses_another_object():
    with pytest.raises(TypeError, match=r"linformer\.LinformerSelfAttention.*Linear"):
        LinformerAttention.from_package(nn.Linear(2, 2))


# ---------------------------------------------------------------------------------------------------------- the formula


@pytest.mark.parametrize("key_value", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_output_is_the_formula_for_every_kind_of_sharing(heads, key_value):
    ours = LinformerAttention(
        12, 4, num_kv_heads=2, projection=SlotProjection(23, 5, num_heads=heads, key_value=key_value)
    ).double()
    x = numbers(2, 19, 12)
    q, (k, v) = ours.queries(x), ours.keys(x)
    e = ours.projection.keys.expand(2, 23, 5)
    f = e if key_value else ours.projection.values.expand(2, 23, 5)
    expected = []
    for h in range(4):
        keys, values = e[h // 2, :19].T @ k[:, h // 2], f[h // 2, :19].T @ v[:, h // 2]  # (B, slots, D)
        expected.append((q[:, h] @ keys.transpose(-1, -2) * 3**-0.5).softmax(-1) @ values)
    torch.testing.assert_close(ours(x), ours.w_o(torch.cat(expected, -1)), rtol=0, atol=1e-14)


def test_fused_projections_scale_and_head_norms_are_those_of_softmax_attention():
    """With every position its own slot, softmax over slots is softmax over positions."""
    torch.manual_seed(3)
    options = {"num_kv_heads": 2, "head_dim": 3, "fused": True, "scale": 0.7}
    norms = [(nn.LayerNorm(3), nn.RMSNorm(3)) for _ in range(2)]
    whole = SlotProjection(5, 5, key_value=True)
    ours = LinformerAttention(10, 4, projection=whole, head_norms=norms[0], **options).double()
    softmax = MultiHeadAttention(10, 4, head_norms=norms[1], **options).double()
    with torch.no_grad():
        whole.keys.copy_(torch.eye(5))
    softmax.load_state_dict({key: value for key, value in ours.state_dict().items() if "projection" not in key})
    x, context = torch.randn(2, 7, 10).double(), torch.randn(2, 5, 10).double()
    torch.testing.assert_close(ours(context), softmax(context), rtol=0, atol=1e-14)
    torch.testing.assert_close(ours(x, context), softmax(x, context), rtol=0, atol=1e-14)


def test_fused_projections_have_values_of_their_own():
    with pytest.raises(ValueError, match=r"fused.*W_V"):
        LinformerAttention(6, 2, projection=SlotProjection(5, 3), fused=True, values_are_keys=True)


def test_projection_given_to_two_layers_is_one():
    shared = SlotProjection(23, 5, key_value=True)
    two = nn.ModuleList(LinformerAttention(6, 3, projection=shared) for _ in range(2))
    alone = sum(p.numel() for p in two[0].parameters())
    assert sum(p.numel() for p in two.parameters()) == 2 * alone - 23 * 5
    x = torch.randn(1, 7, 6)
    two[1](two[0](x)).sum().backward()
    grad = shared.keys.grad.clone()
    shared.keys.grad = None
    two[1](two[0](x).detach()).sum().backward()
    assert not torch.allclose(shared.keys.grad, grad)  # the first layer added its part


def test_positions_alone_are_one_batch_row():
    ours, x = layer(), numbers(7, 6)
    assert torch.equal(ours(x), ours(x[None])[0])
    assert torch.equal(ours(x, x[:3]), ours(x[None], x[None, :3])[0])


def test_dropout_acts_in_training_only():
    ours, x = layer(dropout=0.5), numbers(1, 7, 6)
    assert not torch.equal(ours(x), ours(x))
    assert torch.equal(ours.eval()(x), ours(x))


def test_half_precision_stays_half():
    ours = layer().bfloat16()
    assert ours(torch.randn(1, 7, 6).bfloat16()).dtype == torch.bfloat16


# -------------------------------------------------------------------------------------------------------------- padding


def test_padded_keys_cannot_influence_the_result():
    ours, x = layer(), numbers(2, 13, 6)
    mask = masks.padding([13, 8])
    loud = x.clone()
    loud[1, 8:] = 1e6
    torch.testing.assert_close(ours(loud, mask=mask)[1, :8], ours(x, mask=mask)[1, :8], rtol=0, atol=0)
    torch.testing.assert_close(ours(x, mask=mask)[1, :8], ours(x[1:, :8])[0], rtol=0, atol=1e-14)
    assert torch.equal(ours(x, mask=mask)[0], ours(x)[0])


def test_padded_keys_on_the_left_leave_the_others_in_their_slots():
    ours, x = layer(), numbers(1, 13, 6)
    silent = x.clone()
    silent[:, :4] = 0  # without a bias, a key of 0 is what a hidden one counts as
    ours = LinformerAttention(6, 3, projection=ours.projection, bias=False).double()
    hidden = ours(x, mask=masks.padding([9], side="left"))
    torch.testing.assert_close(hidden[:, 4:], ours(silent)[:, 4:], rtol=0, atol=1e-14)


def test_sequence_of_padding_alone_gives_zero_before_the_last_map():
    ours, x = layer(), numbers(2, 13, 6).requires_grad_()
    out = ours(x, mask=masks.padding([0, 13]))
    torch.testing.assert_close(out[0], ours.w_o.bias.expand(13, 6), rtol=0, atol=0)
    out[0].sum().backward()
    assert torch.equal(x.grad[0], torch.zeros(13, 6).double())


def test_booleans_per_key_are_padding():
    ours, x = layer(), numbers(2, 13, 6)
    real = torch.arange(13) < torch.tensor([[13], [8]])
    assert torch.equal(ours(x, mask=real[:, None, None]), ours(x, mask=masks.padding([13, 8])))


# ----------------------------------------------------------------------------------------------------------- what fails


def test_sequence_longer_than_the_projection_is_refused():
    with pytest.raises(ValueError, match=r"24.*23"):
        layer()(numbers(1, 24, 6))


def test_causal_mask_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"Linformer.*causal"):
        layer()(numbers(1, 5, 6), mask=masks.causal() & masks.padding([5]))


def test_mask_that_differs_between_queries_is_refused():
    with pytest.raises(ValueError, match=r"window\(2, 1\)"):
        layer()(numbers(1, 5, 6), mask=masks.window(2, 1))


def test_mask_that_differs_between_heads_is_refused():
    cells = torch.ones(1, 3, 1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="keys"):
        layer()(numbers(1, 5, 6), mask=cells)


def test_cache_and_positions_are_refused():
    with pytest.raises(ValueError, match=r"Linformer.*cache.*positions"):
        layer()(numbers(1, 5, 6), cache=GrowingCache())
    with pytest.raises(ValueError, match=r"positions.*Rotary.*Linformer"):
        layer()(numbers(1, 5, 6), positions=torch.arange(5))


@pytest.mark.parametrize(
    ("make", "problem", "message"),
    [
        (lambda: SlotProjection(0, 5), ValueError, r"positions.*1.*0"),
        (lambda: SlotProjection(5, 0), ValueError, r"slots.*1.*0"),
        (lambda: SlotProjection(16, 4.5), TypeError, r"slots.*float.*4.5"),
        (lambda: SlotProjection(16.0, 4), TypeError, r"positions.*float.*16.0"),
        (lambda: SlotProjection(5, 3, num_heads=0), ValueError, r"heads.*1.*0"),
        (lambda: layer(num_kv_heads=2), ValueError, r"num_heads.*num_kv_heads.*3.*2"),
        (lambda: layer(head_dim=0), ValueError, r"head_dim.*1.*0"),
        (lambda: layer(dropout=1.0), ValueError, r"dropout.*0.*1.*1.0"),
        (lambda: layer(backend="fast"), ValueError, "fast"),
        (
            lambda: LinformerAttention(7, 3, projection=SlotProjection(5, 3)),
            ValueError,
            r"d_model.*7.*3.*heads",
        ),
        (
            lambda: LinformerAttention(6, 3, projection=SlotProjection(5, 3, num_heads=2)),
            ValueError,
            r"projection.*2.*key/value.*heads.*3",
        ),
        (lambda: layer()(numbers(1, 5, 7)), ValueError, r"x.*\(B, N, 6\).*\(N, 6\).*\(1, 5, 7\)"),
        (lambda: layer()(numbers(1, 5, 6), numbers(1, 5, 7)), ValueError, r"context.*\(B, M, 6\).*1.*5"),
        (
            lambda: layer()(numbers(1, 5, 6), numbers(2, 5, 6)),
            ValueError,
            r"1.*2",
        ),
    ],
)
def test_wrong_input_is_refused(make, problem, message):
    with pytest.raises(problem, match=message):
        make()


def test_causal_mask_with_another_offset_is_refused():
    with pytest.raises(ValueError, match=r"causal\(offset=1\).*3.*5"):
        read_key_mask(masks.causal(offset=1), 1, 1, 3, 5, torch.device("cpu"))
    assert read_key_mask(masks.causal(offset=2), 1, 1, 3, 5, torch.device("cpu")).causal


def test_causal_mask_with_an_offset_for_each_row_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"Linformer.*causal"):
        layer()(numbers(2, 5, 6), mask=masks.causal(offset=[0, 0]))
    with pytest.raises(ValueError, match=r"causal\(offset=\[0, 3\]\)"):
        layer()(numbers(2, 5, 6), mask=masks.causal(offset=[0, 3]))


# ------------------------------------------------------------------------------------------------- in blocks, and seen


def encoder():
    shared = SlotProjection(23, 5)
    blocks = []
    for _ in range(2):
        norms = [nn.LayerNorm(6), nn.LayerNorm(6)]
        attention = LinformerAttention(6, 3, projection=shared)
        blocks.append(Block(attention, FeedForward(6, 11, "gelu"), norms, norm_first=True))
    return Tower(Embedding(13, 6), blocks, causal=False, norm=nn.LayerNorm(6)).eval()


def test_tower_of_linformer_blocks_reads_padded_texts_as_it_reads_them_alone():
    tower = encoder().double()
    ids = torch.randint(13, (2, 17))
    mask = torch.arange(17) < torch.tensor([[17], [9]])
    together = tower(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(together[1, :9], tower(ids[1:, :9]).last_hidden_state[0], rtol=0, atol=1e-12)


def test_watch_sees_the_attention_over_slots():
    tower = encoder()
    with torch.no_grad(), regard.watch(tower, keep="qk") as seen:
        tower(torch.randint(13, (2, 17)))
    assert seen.names == ["blocks.0.attention", "blocks.1.attention"]
    assert seen[0].row(16).shape == (2, 3, 5)  # 5 slots, not 17 positions
    assert not seen.unseen
