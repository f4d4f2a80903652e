"""The lens on Linformer and Performer: what is exact is checked against outputs, what is approximate is labelled."""

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.lens.efficient_views import FeatureView, look_features, look_slots
from regard.nn.linformer import LinformerAttention, SlotProjection
from regard.nn.performer import PerformerAttention
from regard.positions import Rotary

SHARED = {"shared by heads": {}, "per head": {"num_heads": 2}, "keys and values": {"key_value": True}}


def linformer(**options):
    return LinformerAttention(12, 4, num_kv_heads=2, projection=SlotProjection(23, 5, **options)).double()


def performer(**options):
    return PerformerAttention(12, 4, num_kv_heads=2, features=19, **options).double()


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("mask", [None, masks.padding([17, 11])])
def test_rows_over_slots_make_the_output(options, mask):
    layer, x = linformer(**options), numbers(2, 17, 12)
    view = look_slots(layer, x, mask=mask)
    _, (_, values) = layer.slots(x, mask=mask)
    for i in (0, 16):
        assert view.row(i).shape == (2, 4, 5)
        made = torch.einsum("bhs,bhsd->bhd", view.row(i), values.repeat_interleave(2, 1))
        torch.testing.assert_close(made, view.output[:, :, i], rtol=0, atol=1e-13)
    torch.testing.assert_close(layer.joined(view.output), layer(x, mask=mask), rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("mask", [None, masks.padding([17, 11])])
def test_coefficients_of_positions_make_the_output_and_are_called_approximate(options, mask):
    layer, x = linformer(**options), numbers(2, 17, 12)
    view = look_slots(layer, x, mask=mask)
    v = layer.keys(x).v.repeat_interleave(2, 1)
    for i in (0, 16):
        made = torch.einsum("bhn,bhnd->bhd", view.positions(i), v)
        torch.testing.assert_close(made, view.output[:, :, i], rtol=0, atol=1e-13)
    assert bool((view.positions(3) < 0).any())
    assert (view.how("row"), view.how("output"), view.how("positions")) == ("exact", "exact", "approximate")
    if mask is not None:
        assert not view.positions(3)[1, :, 11:].any()


def test_slots_of_a_context_are_looked_at():
    layer, x, context = linformer(), numbers(2, 7, 12), numbers(2, 13, 12)
    view = look_slots(layer, x, context)
    assert view.positions(6).shape == (2, 4, 13)
    assert torch.equal(look_slots(layer, x, layer.keys(context)).positions(6), view.positions(6))
    assert torch.equal(look_slots(layer, x[0], context[0]).row(6)[0], look_slots(layer, x[:1], context[:1]).row(6)[0])


# ------------------------------------------------------------------------------------------------------------- features

MASKS = {
    "everything": None,
    "causal": masks.causal(),
    "padding": masks.padding([17, 11]),
    "both": masks.causal() & masks.padding([17, 11], side="left"),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_implied_rows_make_the_output(mask, epsilon):
    layer, x = performer(epsilon=epsilon), numbers(2, 17, 12)
    view = look_features(layer, x, mask=mask)
    v = layer.keys(x).v.repeat_interleave(2, 1)
    for i in range(17):
        row = view.row(i)
        made = torch.einsum("bhn,bhnd->bhd", row, v)
        torch.testing.assert_close(made, view.output[:, :, i], rtol=0, atol=1e-12)
        seen = row.sum(-1)
        torch.testing.assert_close(seen, (view.lse[:, :, i] > -torch.inf).to(seen), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.joined(view.output), layer(x, mask=mask), rtol=0, atol=0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_softmax_rows_are_those_of_attention(mask):
    layer, x = performer(), numbers(2, 17, 12)
    view = look_features(layer, x, mask=mask)
    q, k, v = layer.heads_of(x)
    weights = regard.steps(q, k, v, mask=mask).weights
    for i in (0, 9, -1):
        torch.testing.assert_close(view.softmax_row(i), weights[:, :, i], rtol=0, atol=1e-13)


def test_error_is_that_of_the_whole_output_where_every_row_is_asked_for():
    layer, x = performer(), numbers(2, 17, 12)
    view = look_features(layer, x, mask=masks.causal())
    exact = regard.attention(*layer.heads_of(x), mask=masks.causal())
    error = view.error(range(17))
    expected = (view.output - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
    torch.testing.assert_close(error.output, expected, rtol=1e-10, atol=0)
    both = torch.stack([view.row(i) - view.softmax_row(i) for i in range(17)])
    torch.testing.assert_close(error.total_variation, both.abs().sum(-1).mean(0) / 2, rtol=1e-10, atol=0)
    assert error.rows == tuple(range(17))


def test_error_falls_with_more_features():
    x = numbers(1, 17, 12)
    found = []
    for count in (8, 8192):
        torch.manual_seed(4)  # the same weights
        found.append(look_features(PerformerAttention(12, 4, features=count).double(), x).error())
    assert bool((found[1].output < found[0].output / 3).all())
    assert bool((found[1].total_variation < found[0].total_variation / 3).all())


def test_rows_that_are_compared_are_evenly_spaced():
    view = look_features(performer(), numbers(1, 17, 12))
    assert view.error(3).rows == (0, 8, 16)
    assert view.error(1).rows == (0,)
    assert view.error(99).rows == tuple(range(17))


def test_row_that_sees_nothing_counts_as_equal():
    view = look_features(performer(), numbers(2, 17, 12), mask=masks.padding([0, 17]))
    error = view.error()
    assert not error.output[0].any()
    assert not error.total_variation[0].any()
    assert bool((error.output[1] > 0).all())


def test_rotary_and_context_are_looked_at():
    layer, x = PerformerAttention(12, 3, position=Rotary(4)).double(), numbers(1, 9, 12)
    view = look_features(layer, x)
    torch.testing.assert_close(layer.joined(view.output), layer(x), rtol=0, atol=0)
    plain, context = performer(), numbers(1, 5, 12)
    assert look_features(plain, x, context).row(8).shape == (1, 4, 5)


def test_long_row_is_made_in_chunks(monkeypatch):
    layer, x = performer(), numbers(1, 17, 12)
    expected = look_features(layer, x).row(5)
    monkeypatch.setattr("regard.lens.efficient_views.CHUNK", 3)
    torch.testing.assert_close(look_features(layer, x).row(5), expected, rtol=0, atol=1e-15)


def test_wrong_input_is_refused():
    x = numbers(1, 7, 12)
    with pytest.raises(TypeError, match=r"look_slots.*LinformerAttention.*Linear"):
        look_slots(nn.Linear(2, 2), x)
    with pytest.raises(TypeError, match=r"look_features.*PerformerAttention.*Linear"):
        look_features(nn.Linear(2, 2), x)
    view = look_features(performer(), x)
    assert isinstance(view, FeatureView)
    with pytest.raises(IndexError, match=r"row.*7"):
        view.row(7)
    with pytest.raises(ValueError, match="row"):
        view.error(0)
    with pytest.raises(LookupError, match=r"'map'.*row.*output.*lse.*softmax_row"):
        view.how("map")
