"""Values of watched calls, norms of weighted values, gradients of weights and direct logit attribution, against dense
fp64 definitions written out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.lens.assembly import CallStore, StepLink, values_of_run
from regard.lens.values import StoredValues, find_projection

B, H, HKV, NQ, NK, D, DV, WIDE = 2, 6, 3, 5, 7, 4, 3, 11
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


class Attention(nn.Module):
    """Grouped heads by SDPA, or the same written by hand with its weights kept for autograd."""

    def __init__(self, by_hand: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.by_hand, self.causal = H, by_hand, causal
        self.w_q, self.w_k = nn.Linear(WIDE, H * D), nn.Linear(WIDE, HKV * D)
        self.w_v, self.out_proj = nn.Linear(WIDE, HKV * DV), nn.Linear(H * DV, WIDE)
        self.weights = torch.zeros(0)

    def forward(self, x: Tensor, context: Tensor | None = None, real: Tensor | None = None) -> Tensor:
        keys = x if context is None else context

        def heads(layer: nn.Module, x: Tensor, width: int) -> Tensor:
            return layer(x).unflatten(-1, (-1, width)).transpose(1, 2)

        q, k, v = heads(self.w_q, x, D), heads(self.w_k, keys, D), heads(self.w_v, keys, DV)
        seen = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool)
        seen = seen.tril() if self.causal else seen
        seen = seen if real is None else seen & real[:, None, None, :]
        if not self.by_hand:
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        else:
            k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
            self.weights = (q @ k.mT * D**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
            self.weights.retain_grad()
            out = self.weights @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))


def twins(causal: bool = False) -> tuple[Attention, Attention]:
    fused, by_hand = Attention(causal=causal).double(), Attention(by_hand=True, causal=causal).double()
    by_hand.load_state_dict(fused.state_dict())
    return fused, by_hand


def dense_values(model: Attention, keys: Tensor) -> Tensor:
    return model.w_v(keys).unflatten(-1, (HKV, DV)).transpose(1, 2).detach()


CASES = [
    {"causal": False},
    {"causal": True},
    {"causal": False, "padding": True},
    {"causal": False, "cross": True},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("watched", ["fused", "by hand"])
def test_norms_gradients_and_directions_are_those_of_the_dense_definition(case: dict[str, bool], watched: str) -> None:
    fused, by_hand = twins(case["causal"])
    x = torch.randn(B, NQ, WIDE, dtype=torch.float64)
    context = torch.randn(B, NK, WIDE, dtype=torch.float64) if case.get("cross") else None
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool) if case.get("padding") else None
    loss = torch.randn(B, NQ, WIDE, dtype=torch.float64)
    (by_hand(x, context, real) * loss).sum().backward()
    p, dp = by_hand.weights.detach(), by_hand.weights.grad
    assert dp is not None
    v = dense_values(fused, x if context is None else context).repeat_interleave(H // HKV, 1)
    projected = torch.einsum("bhkv,hvd->bhkd", v, by_hand.out_proj.weight.detach().T.view(H, DV, WIDE))

    model = fused if watched == "fused" else by_hand
    with regard.watch(model, keep=["qk", "v"], gradients=True) as seen:
        (model(x, context, real) * loss).sum().backward()
    view = seen[0]
    direction = torch.randn(WIDE, dtype=torch.float64)
    for i in (0, NQ - 1):
        sent = p[:, :, i, :, None] * projected
        torch.testing.assert_close(view.norms(i), sent.norm(dim=-1), **CLOSE)
        torch.testing.assert_close(view.norms(i, w_o=False), (p[:, :, i, :, None] * v).norm(dim=-1), **CLOSE)
        torch.testing.assert_close(view.gradients(i), dp[:, :, i], **CLOSE)
        torch.testing.assert_close(view.weighted_gradients(i), (p * dp)[:, :, i], **CLOSE)
        torch.testing.assert_close(view.toward(direction, i).scores, sent @ direction, **CLOSE)
    # The sum over the keys is ∂loss/∂o · o.
    total = torch.stack([view.weighted_gradients(i).sum(-1) for i in range(NQ)], -1)
    torch.testing.assert_close(total, (view.output_gradient * (p @ v)).sum(-1), **CLOSE)
    assert [view.how(n) for n in ("norms", "gradients", "weighted_gradients")] == ["exact", "exact", "first order"]


def test_gradients_leave_result_and_gradients_of_the_model_as_they_are() -> None:
    fused, by_hand = twins()
    x = torch.randn(B, NQ, WIDE, dtype=torch.float64)
    for model in (fused, by_hand):
        plain = model(x)
        plain.sum().backward()
        truth = [w.grad.clone() for w in model.parameters()]
        model.zero_grad()
        with regard.watch(model, keep=["qk", "v"], gradients=True) as seen:
            out = model(x)
            out.sum().backward()
        assert torch.equal(out, plain)
        assert all(torch.equal(w.grad, before) for w, before in zip(model.parameters(), truth, strict=True))
        once = seen[0].gradients(1)
        with regard.watch(model, keep=["qk", "v"], gradients=True) as seen:
            out = model(x)
            out.sum().backward(retain_graph=True)
            out.sum().backward()
        torch.testing.assert_close(seen[0].gradients(1), 2 * once, **CLOSE)


@pytest.mark.parametrize("norm", ["layer", "rms", "one plus weight"])
def test_direction_goes_through_the_final_norm_with_its_scale_frozen(norm: str) -> None:
    class OnePlus(nn.Module):  # Gemma's
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(WIDE)), 1e-3

        def forward(self, x: Tensor) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)

    final = {"layer": nn.LayerNorm(WIDE), "rms": nn.RMSNorm(WIDE, eps=1e-3), "one plus weight": OnePlus()}[
        norm
    ].double()
    for parameter in final.parameters():
        nn.init.normal_(parameter)
    model, _ = twins()
    x, direction = torch.randn(B, NQ, WIDE, dtype=torch.float64), torch.randn(WIDE, dtype=torch.float64)
    with regard.watch(model, keep=["qk", "v"]) as seen:
        out = model(x).detach()
    view, residual = seen[0], (x + out)[:, 2]
    scores = view.toward(direction, 2, norm=final, residual=residual).scores
    # Every part of the residual at its frozen scale, and the bias, make the logit: here x, the heads and W_O's bias.
    centre = (lambda c: c - c.mean(-1, keepdim=True)) if norm == "layer" else (lambda c: c)
    sigma = (centre(residual).square().mean(-1, keepdim=True) + final.eps).sqrt()
    gain = 1 + final.weight if norm == "one plus weight" else final.weight
    rest = centre(x[:, 2] + model.out_proj.bias) / sigma * gain + (final.bias if norm == "layer" else 0.0)
    torch.testing.assert_close(scores.sum((1, 2)) + rest @ direction, final(residual) @ direction, **CLOSE)
    with pytest.raises(TypeError, match="Tanh"):
        view.toward(direction, 2, norm=nn.Tanh(), residual=residual)
    with pytest.raises(TypeError, match="residual"):
        view.toward(direction, 2, norm=final)
    assert "head" in repr(view.toward(direction, 2))
    assert "exact" in repr(view.toward(direction, 2))


def test_hidden_keys_add_nothing_whatever_their_values_are() -> None:
    x, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 2)
    view = regard.look(x, x, v, mask=regard.masks.causal())
    view.kept_values = StoredValues(v.index_fill(2, torch.tensor([2]), torch.nan))
    view.output_gradient = torch.ones(1, 1, 3, 2)
    for row in (view.norms(1, w_o=torch.eye(2)), view.weighted_gradients(1), view.norms(1, w_o=False)):
        assert row.isfinite().all()
        assert row[..., 2].item() == 0


def test_numpy_arrays_keep_their_kind_and_axes() -> None:
    for q_lead, lead in (((1, B, H), (1, B, HKV)), ((B,), (B,)), ((), ())):
        shapes = ((*q_lead, NQ, D), (*lead, NK, D), (*lead, NK, DV))
        q, k, v = (torch.randn(*shape, dtype=torch.float64).numpy() for shape in shapes)
        view = regard.look(q, k, v)
        assert (view.values == v).all()
        found = view.norms(-1, w_o=torch.eye(view.sizes[1] * DV, dtype=torch.float64))
        sizes = (v**2).sum(-1) ** 0.5
        truth = view.row(-1) * (sizes.repeat(H // HKV, -2) if len(lead) > 1 else sizes)
        assert found.shape == (*q_lead, NK)
        assert abs(found - truth).max() < 1e-14


# ---------------------------------------------------------------------------------------------------------- projections


def test_projection_is_found_by_its_usual_names_in_the_module_or_beside_it() -> None:
    class SelfAttention(nn.Module): ...

    class BertAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self, self.output = SelfAttention(), nn.Module()
            self.output.dense = nn.Linear(12, 5)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mixer, self.output = BertAttention(), SelfAttention(), nn.Module()
            self.output.dense = nn.Linear(12, 5)  # of the feed-forward part
            self.mha = nn.MultiheadAttention(12, 3)
            self.own = regard.MultiHeadAttention(12, 3)

    model = Layer()
    for path, place in {
        "attention.self": "attention.output.dense",
        "mha": "mha.out_proj",
        "own": "own.w_o",
        "mixer": None,
    }.items():
        found = find_projection(model, path, 12)
        assert (None if found is None else found.path) == place
        if found is not None:
            weight = model.get_submodule(found.path).weight
            assert torch.equal(found.per_head(3, 4), weight.T.view(3, 4, -1))
    assert find_projection(model, "mha", 13) is None
    assert find_projection(model, "not there", 12) is None


def test_projection_that_is_missing_changed_or_of_another_size_is_refused() -> None:
    model, _ = twins()
    x = torch.randn(B, NQ, WIDE, dtype=torch.float64)
    with regard.watch(model, keep=["qk", "v"]) as seen:
        model(x)
    truth = seen[0].norms(0)
    torch.testing.assert_close(seen[0].norms(0, w_o=model.out_proj.weight.detach().T), truth)
    torch.testing.assert_close(seen[0].norms(0, w_o=model.out_proj), truth)
    with pytest.raises(ValueError, match=r"18.*transposed"):
        seen[0].norms(0, w_o=model.out_proj.weight.detach())
    with pytest.raises(TypeError, match="str"):
        seen[0].norms(0, w_o="out_proj")
    with torch.no_grad():
        model.out_proj.weight.mul_(2)
    with pytest.raises(LookupError, match="out_proj"):
        seen[0].norms(0)
    model.head_mixer, model.out_proj = model.out_proj, nn.Sequential(nn.Flatten(2), model.out_proj)
    with regard.watch(model, keep=["qk", "v"]) as seen:
        model(x)
    with pytest.raises(LookupError, match=r"w_o=.*18"):
        seen[0].norms(0)


def test_what_was_not_kept_is_named() -> None:
    model, by_hand = twins()
    x = torch.randn(B, NQ, WIDE, dtype=torch.float64)
    with regard.watch(model, keep="qk") as seen:
        model(x)
    for read in (lambda v: v.values, lambda v: v.norms(0), lambda v: v.gradients(0)):
        with pytest.raises(LookupError, match=r"\['qk', 'v'\]"):
            read(seen[0])
    with regard.watch(model, keep=["qk", "v"]) as seen:
        model(x)
    with pytest.raises(LookupError, match="gradients=True"):
        seen[0].weighted_gradients(0)
    with regard.watch(by_hand, keep=["qk", "v"]) as seen:
        by_hand(x)
    with pytest.raises(LookupError, match="by hand"):
        _ = seen[0].values
    with pytest.raises(ValueError, match="keep"):
        regard.watch(model, keep="qk", gradients=True)


def test_gradients_of_a_call_with_dropout_are_refused() -> None:
    layer = nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True)
    x = torch.randn(1, 4, 12, requires_grad=True)
    with regard.watch(layer, keep=["qk", "v"], gradients=True) as seen:
        layer(x, x, x, need_weights=False)[0].sum().backward()
    with pytest.raises(LookupError, match="dropout"):
        seen[0].gradients(0)


# ------------------------------------------------------------------------------------------------- generation and files


def test_steps_share_their_values_and_the_run_has_them_all() -> None:
    v = torch.randn(B, HKV, NK, DV)
    store, ends = CallStore(), (4, 5, 6, 7)
    links = [StepLink(), *(StepLink(n, 0, end - 1) for n, end in enumerate(ends[1:]))]
    steps = [store.keep_values("attn", v[:, :, :end], link, True) for end, link in zip(ends, links, strict=True)]
    assert len({step.tensor.untyped_storage().data_ptr() for step in steps}) == 1
    for step, end in zip(steps, ends, strict=True):
        assert torch.equal(step.tensor, v[:, :, :end])
    assert torch.equal(values_of_run(steps, [0] * 4, [None] * 4, NK), v)


def test_values_of_a_run_come_from_the_latest_call_that_has_them() -> None:
    # Positions 0–3, then 2–4 after the cache dropped two; batch rows swapped, and sequence 1 ended after the first.
    first, second = torch.randn(2, 1, 4, 3), torch.randn(2, 1, 3, 3)
    parts = [StoredValues(first), StoredValues(second)]
    values = values_of_run(parts, [0, 2], [(1, 0), (0, -1)], 5)
    assert torch.equal(values[0, :, :2], first[1, :, :2])
    assert torch.equal(values[0, :, 2:], second[0])
    assert torch.equal(values[1, :, :4], first[0])
    assert not values[1, :, 4].any()


def test_saved_capture_has_its_values_and_gradients(tmp_path: Path) -> None:
    model, _ = twins(causal=True)
    x = torch.randn(B, NQ, WIDE, dtype=torch.float64)
    with regard.watch(model, keep=["qk", "v"], gradients=True) as seen:
        model(x).sum().backward()
    seen.save(tmp_path / "run.regard")
    opened = regard.open(tmp_path / "run.regard")
    assert torch.equal(opened[0].values, seen[0].values)
    assert torch.equal(opened[0].weighted_gradients(2), seen[0].weighted_gradients(2))
    assert torch.equal(opened[0].norms(2, w_o=model.out_proj), seen[0].norms(2))
    with pytest.raises(LookupError, match=r"get_submodule\('out_proj'\)"):
        opened[0].norms(2)
    seen.save(tmp_path / "small.regard", overview=True)
    with pytest.raises(LookupError, match="overview"):
        _ = regard.open(tmp_path / "small.regard")[0].values
