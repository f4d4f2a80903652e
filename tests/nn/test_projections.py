"""Linear maps: joined ones, apart or as one, and what others put in their place."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from regard.nn import projections
from regard.nn.attention import MultiHeadAttention
from regard.positions import Rotary


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs", [projections.WIDE, projections.WIDE - 1])
def test_joined_maps_give_the_same_however_many_products_they_take(inputs, bias, monkeypatch):
    joined, x = (
        projections.Joined(inputs, (7, 3, 3), bias=bias).double(),
        torch.randn(2, 5, inputs, dtype=torch.float64),
    )
    products = []
    monkeypatch.setattr(projections, "linear", lambda *given: products.append(1) or torch.nn.functional.linear(*given))
    expected = joined(x).split([7, 3, 3], -1)
    with torch.no_grad():
        made = projections.apart(joined, (7, 3, 3), x)
    assert len(products) == (3 if inputs == projections.WIDE else 0)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    whole = projections.apart(joined, (7, 3, 3), x)  # as one, with gradients
    assert all(torch.equal(a, b) for a, b in zip(whole, expected, strict=True))


@torch.no_grad()
def test_who_watches_joined_maps_sees_one_product():
    joined, seen = projections.Joined(projections.WIDE, (7, 3, 3)), []
    joined.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    projections.apart(joined, joined.rows, torch.zeros(5, projections.WIDE))
    assert seen == [(5, 13)]


class Adapter(nn.Module):
    """A layer beside another, as adapters are; `delegates` makes it look like the one inside."""

    def __init__(self, inner, delegates):
        super().__init__()
        self.inner, self.delegates = inner, delegates
        self.beside = nn.Linear(inner.in_features, inner.out_features)

    def forward(self, x):
        return self.inner(x) + self.beside(x)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("weight", "bias", "rows") and self.delegates:
                return getattr(self.inner, name)
            raise


def patch(layer):
    inner, beside = layer.forward, nn.Linear(layer.in_features, layer.out_features)
    layer.forward = lambda x: inner(x) + beside(x)
    return layer


ADAPTED = {
    "wrapped": lambda layer: Adapter(layer, delegates=False),
    "wrapped, with its weights": lambda layer: Adapter(layer, delegates=True),
    "patched": patch,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "normed": lambda layer: nn.utils.parametrizations.spectral_norm(layer),
}


@pytest.mark.parametrize("how", ADAPTED)
@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
def test_adapter_in_the_place_of_a_projection_acts_in_training_and_inference(how, rotary):
    d = projections.WIDE
    layer = MultiHeadAttention(d, 3, fused=True, position=Rotary(64) if rotary else None).eval()
    x, context = torch.randn(2, 5, d), torch.randn(2, 7, d)
    before = layer(x), layer(x, context)
    layer.w_qkv = ADAPTED[how](layer.w_qkv).eval()
    parts = layer.w_qkv(context).split(d, -1)[1:]
    after = layer(x), layer(x, context)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(after, before, strict=True))
    keys = layer.keys(context)
    if not rotary:
        torch.testing.assert_close(keys.k.transpose(1, 2).flatten(2), parts[0])
    torch.testing.assert_close(keys.v.transpose(1, 2).flatten(2), parts[1])
    for context_manager in (torch.no_grad, torch.inference_mode):
        with context_manager():
            torch.testing.assert_close(layer(x), after[0])
            torch.testing.assert_close(layer(x, context), after[1])


@torch.no_grad()
def test_hook_into_all_layers_sees_joined_projections():
    layer, seen = MultiHeadAttention(projections.WIDE, 3, fused=True), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, out: seen.append(module))
    try:
        layer(torch.zeros(1, 5, projections.WIDE))
    finally:
        handle.remove()
    assert layer.w_qkv in seen
