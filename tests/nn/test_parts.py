"""The feed-forward part: the same bits with and without a second buffer, and nobody's values overwritten.

The other parts are judged in the models that are made of them.
"""

import pytest
import torch

from regard.nn import blocks
from regard.nn.blocks import ACTIVATIONS, OVERWRITING, FeedForward
from regard.testing import assert_rule


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bits_are_the_same_with_gradients_and_without(name, monkeypatch):
    layer, x = FeedForward(6, 10, name), 3 * torch.randn(2, 5, 6)
    given, calls, overwriting = x.clone(), [], OVERWRITING.get(name)
    if overwriting is not None:
        monkeypatch.setitem(OVERWRITING, name, lambda y: calls.append(name) or overwriting(y))
    with torch.no_grad():
        bare = layer(x)
    assert calls == [name] * (overwriting is not None)
    assert torch.equal(bare, layer(x))
    assert torch.equal(x, given)


@pytest.mark.parametrize("name", OVERWRITING)
def test_overwriting_writes_where_it_reads(name):
    x = torch.tensor([-1.5, 0.0, 2.0])
    expected = ACTIVATIONS[name](x)
    assert OVERWRITING[name](x) is x
    assert torch.equal(x, expected)


def hooked(layer: FeedForward, where: str, seen: list[torch.Tensor]) -> torch.utils.hooks.RemovableHandle:
    def keep(module: object, given: object, made: torch.Tensor) -> None:
        if module is layer.w_in:
            seen.append(made)

    if where == "all modules":
        return torch.nn.modules.module.register_module_forward_hook(keep)
    return layer.w_in.register_forward_hook(keep)


@pytest.mark.parametrize("where", ["w_in", "all modules"])
def test_what_a_hook_holds_is_not_overwritten(where):
    layer, x, seen = FeedForward(6, 10, "gelu"), torch.randn(2, 5, 6), []
    hook = hooked(layer, where, seen)
    try:
        with torch.no_grad():
            layer(x)
    finally:
        hook.remove()
    with torch.no_grad():
        assert torch.equal(seen[0], layer.w_in(x))


def test_what_another_module_hands_out_is_not_overwritten():
    layer, x = FeedForward(6, 6, "gelu"), torch.randn(2, 5, 6)
    layer.w_in, given = torch.nn.Identity(), x.clone()
    with torch.no_grad():
        layer(x)
    assert torch.equal(x, given)


def test_what_a_patched_layer_hands_out_is_not_overwritten():
    layer, x = FeedForward(6, 6, "gelu"), torch.randn(2, 5, 6)
    layer.w_in.forward, given = lambda y: y, x.clone()
    with torch.no_grad():
        layer(x)
    assert torch.equal(x, given)


def test_gate_and_up_taken_apart_compute_the_same():
    layer, x = FeedForward(6, 10, "silu", gated=True), torch.randn(2, 5, 6)
    before = layer(x)
    layer.separate()
    assert (layer.w_gate.out_features, layer.w_up.out_features) == (10, 10)
    torch.testing.assert_close(layer(x), before)


def test_half_of_gate_and_up_is_refused():
    layer = FeedForward(6, 10, "silu", gated=True)
    layer.w_in, layer.w_out = torch.nn.Linear(6, 10), torch.nn.Linear(5, 6)  # all of the gate, and nothing of up
    with pytest.raises(ValueError, match=r"20.*10"):
        layer(torch.zeros(2, 5, 6))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("numbers", [1, 150, 10_000])
def test_what_is_computed_in_pieces_is_what_is_computed_at_once(gated, numbers, monkeypatch):
    """A piece of one position, of 15 or 7, and all: 2 × 29 positions, of 10 inner numbers or 20."""
    layer = FeedForward(6, 10, "silu", gated=gated).eval()
    x = torch.randn(6, 29, 2).transpose(0, 2)  # not contiguous
    seen = []
    monkeypatch.setattr(blocks, "INNER", {"cpu": numbers})
    monkeypatch.setattr(layer, "_at_once", lambda part: seen.append(part.shape) or FeedForward._at_once(layer, part))
    baseline = layer(x).detach()
    assert seen == [x.shape]  # with gradients at once
    with torch.no_grad():
        ours = layer(x)
        assert_rule(ours, baseline, FeedForward._at_once(layer.double(), x.double()))
    width = 20 if gated else 10
    assert len(seen[1:]) == {1: 58, 150: -(-58 // (150 // width)), 10_000: 1}[numbers]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("where", ["w_in", "w_out", "training"])
def test_a_hook_sees_all_positions_and_dropout_draws_once(where, monkeypatch):
    layer, x, seen = FeedForward(6, 10, "gelu", dropout=0.5).train(where == "training"), torch.randn(2, 5, 6), []
    monkeypatch.setattr(blocks, "INNER", {"cpu": 10})
    part = layer.dropout if where == "training" else getattr(layer, where)
    part.register_forward_hook(lambda module, given, made: seen.append(made.shape[:-1]))
    with torch.no_grad():
        layer(x)
    assert seen == [(2, 5)]
