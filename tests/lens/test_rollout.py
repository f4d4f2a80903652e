"""Rollout and relevance of watched models, against dense matrices multiplied here in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.layouts import Sides
from regard.lens import rollout as module
from regard.lens.capture import Capture

B, N, WIDE, LAYERS = 2, 7, 12, 3
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}


class Attention(nn.Module):
    """Grouped heads by SDPA, or written by hand with the weights kept."""

    def __init__(self, kv_heads: int, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.causal, self.by_hand = 4, kv_heads, causal, False
        self.w_q, self.w_k, self.w_v = nn.Linear(WIDE, WIDE), *(nn.Linear(WIDE, kv_heads * 3) for _ in range(2))
        self.out_proj, self.weights = nn.Linear(WIDE, WIDE), torch.zeros(0)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 3)).transpose(1, 2) for w in (self.w_q, self.w_k, self.w_v))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        seen = seen.tril() if self.causal else seen
        seen = seen if real is None else seen & real[:, None, None, :]
        if not self.by_hand:
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(4 // self.kv_heads, 1) for t in (k, v))
            self.weights = (q @ k.mT * 3**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
            self.weights.retain_grad()
            out = self.weights @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kv_heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(kv_heads, causal) for _ in range(LAYERS))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, real).tanh()
        return x


PADDED = torch.ones(B, N, dtype=torch.bool)
PADDED[1, 4:] = False
CASES = {
    "heads": (Model, None),
    "grouped": (lambda: Model(kv_heads=2), None),
    "causal": (lambda: Model(causal=True), None),
    "padding": (Model, PADDED),
}


def dense(
    model: Model, x: Tensor, real: Tensor | None, target: Callable[[Tensor], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Weights and their gradients, (B, H, N, N), of each layer."""
    for layer in model.layers:
        layer.by_hand = True
    target(model(x, real)).backward()
    found = [(layer.weights.detach(), layer.weights.grad) for layer in model.layers]
    for layer in model.layers:
        layer.by_hand = False
    return found


def last_token(out: Tensor) -> Tensor:
    return (out[:, -1] ** 2).sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [1, module.AT_ONCE])
def test_rows_are_those_of_the_dense_products(case: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", chunk)
    make, real = CASES[case]
    model, x = make().double(), torch.randn(B, N, WIDE, dtype=torch.float64)
    layers = dense(model, x, real, last_token)
    with regard.watch(model, keep=["qk", "v"], gradients=True) as seen:
        last_token(model(x, real)).backward()

    one = torch.eye(N, dtype=torch.float64)
    for heads, residual in (("mean", 0.5), ("max", 0.5), ("mean", 0.2), ("max", 0.0)):
        product = one.expand(B, N, N)
        for p, _ in layers:
            joined = (1 - residual) * (p.mean(1) if heads == "mean" else p.amax(1)) + residual * one
            product = joined / joined.sum(-1, keepdim=True) @ product
        flow = seen.rollout(3, heads=heads, residual=residual)
        torch.testing.assert_close(flow.scores, product[:, 3], **CLOSE)
        torch.testing.assert_close(seen.rollout(matrix=True, heads=heads, residual=residual).scores, product, **CLOSE)
        torch.testing.assert_close(flow.scores.sum(-1), torch.ones(B, dtype=torch.float64), **CLOSE)

    product = one.expand(B, N, N)
    for p, gradient in layers:
        product = product + (p * gradient).clamp(min=0).mean(1) @ product
    torch.testing.assert_close(seen.relevance(-1).scores, product[:, -1], **CLOSE)
    torch.testing.assert_close(seen.relevance([0, -1]).scores, product[:, [0, -1]], **CLOSE)
    torch.testing.assert_close(seen.relevance(slice(2, 5)).scores, product[:, 2:5], **CLOSE)
    assert (product[:, -1] - one[-1]).abs().max() > 1e-6  # the layers did something


def watched(model: nn.Module | None = None, tokens: object = None, **options: Any) -> Capture:
    model = Model() if model is None else model
    with torch.no_grad(), regard.watch(model, keep="qk", tokens=tokens, **options) as seen:
        model(torch.randn(B, N, WIDE))
    return seen


def test_result_prints_the_strongest_tokens_and_calls_itself_a_heuristic() -> None:
    seen = watched(tokens=["the", "cat", "sat", "on", "a", "red", "mat"])
    flow = seen.rollout("cat", residual=1.0)
    assert flow.scores[0].tolist() == [0, 1, 0, 0, 0, 0, 0]
    text = repr(flow)
    assert flow.how == "heuristic"
    assert "heuristic" in text.splitlines()[0]
    assert "cat" in text.splitlines()[3]
    assert flow.layers == ("layers.0", "layers.1", "layers.2")
    assert "mat (6)" in repr(seen.rollout([5, 6]))


def test_layers_are_picked_by_pattern_or_number() -> None:
    seen = watched()
    one = seen.rollout(2, layers=1).scores
    assert torch.equal(one, seen.rollout(2, layers="*.1").scores)
    torch.testing.assert_close(one, 0.5 * seen[1].row(2).mean(1) + 0.5 * torch.eye(N)[2])
    both = seen.rollout(2, layers=["layers.0", 1])
    assert both.layers == ("layers.0", "layers.1")
    assert not torch.equal(both.scores, one)


def test_layer_that_is_shared_counts_each_time() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attention(4, False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    assert len(watched(Shared()).rollout(0).layers) == 2


def test_cross_attention_and_other_lengths_need_layers() -> None:
    model = nn.Transformer(WIDE, 2, 2, 2, 16, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(torch.randn(1, N, WIDE), torch.randn(1, N, WIDE))
    with pytest.raises(LookupError, match=r"multihead_attn.*layers="):
        seen.rollout(0)
    assert len(seen.rollout(0, layers="encoder.*").layers) == 2
    assert len(seen.rollout(0, layers="*.self_attn").layers) == 4  # what was asked for
    with pytest.raises(LookupError, match="multihead_attn"):
        seen.rollout(0, layers="decoder.*")

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Attention(4, False), Attention(4, False)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x[:, :4]).sum()

    seen = watched(Towers())
    with pytest.raises(LookupError, match=r"4 tokens.*7 tokens"):
        seen.rollout(0)
    assert seen.rollout(0, layers="two").scores.shape == (B, 4)


def test_two_passes_are_not_taken_for_one() -> None:
    model = Model()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(torch.randn(B, N, WIDE))
        model(torch.randn(B, N, WIDE))
    with pytest.raises(LookupError, match="one forward pass"):
        seen.rollout(0)


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched()
    for error, call in [
        (IndexError, lambda: seen.rollout(N)),
        (ValueError, lambda: seen.rollout()),
        (ValueError, lambda: seen.rollout(0, matrix=True)),
        (ValueError, lambda: seen.rollout(0, heads="min")),
        (ValueError, lambda: seen.rollout(0, residual=1.5)),
        (TypeError, lambda: seen.rollout(0, residual="half")),
        (TypeError, lambda: seen.rollout(0.5)),
        (LookupError, lambda: seen.rollout("cat")),
        (LookupError, lambda: seen.rollout(0, layers="encoder.*")),
        (IndexError, lambda: seen.rollout(0, layers=9)),
        (LookupError, lambda: seen.rollout(0, layers=[])),
        (LookupError, lambda: seen.relevance(0)),
        (LookupError, lambda: seen.rollout(0).overlay()),
    ]:
        with pytest.raises(error):
            call()
    model = Model()
    with torch.no_grad(), regard.watch(model) as without:
        model(torch.randn(B, N, WIDE))
    with pytest.raises(LookupError, match="keep='qk'"):
        without.rollout(0)
    monkeypatch.setattr(module, "MOST_CELLS", B * N * N - 1)
    with pytest.raises(ValueError, match=r"98.*97.*slice"):
        seen.rollout(matrix=True)
    assert seen.rollout(0).scores.shape == (B, N)


def test_generation_is_followed_through_its_cache() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=8,
        vocab_size=40, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    prompt = torch.randint(1, 40, (1, 5))
    with torch.no_grad(), regard.watch(model, keep=["qk", "v"]) as seen:
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    with torch.no_grad(), regard.watch(model, keep=["qk", "v"]) as whole:
        model(ids[:, :-1])
    torch.testing.assert_close(seen.rollout(-1).scores, whole.rollout(-1).scores)
    torch.testing.assert_close(seen[1].norms(-1), whole[1].norms(-1))
    torch.testing.assert_close(seen[0].values, whole[0].values)


def test_cache_with_room_counts_only_what_was_written() -> None:
    class Step(nn.Module):
        def forward(self, q: Tensor, cache: Tensor, at: int) -> Tensor:
            return regard.attention(q, cache, cache, mask=regard.masks.causal(offset=at))

    model, x, cache = Step(), torch.randn(B, 2, N, 4).double(), torch.full((B, 2, N + 3, 4), 9.0).double()
    with regard.watch(model, keep=["qk", "v"]) as seen:
        for at, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
            cache[:, :, at:end] = x[:, :, at:end]
            model(x[:, :, at:end], cache, at)
    assert seen[0].sizes == (B, 2, N, N + 3)
    p = (x @ x.mT / 2).masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    for i in (2, N - 1):
        expected = 0.5 * p.mean(1)[:, i] + 0.5 * torch.eye(N)[i]
        torch.testing.assert_close(seen.rollout(i).scores, expected, **CLOSE)
        norms = seen[0].norms(i, w_o=False)
        torch.testing.assert_close(norms[..., :N], p[:, :, i] * x.norm(dim=-1), **CLOSE)
        assert not norms[..., N:].any()


def test_overlay_lies_on_the_patches_and_leaves_cls_out() -> None:
    seen = watched()
    with pytest.raises(LookupError, match="cls"):
        seen.rollout("cls")
    model = Model()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(torch.randn(B, 7, WIDE))
    seen.layouts = Sides.patches((32, 48), patch=16)  # [CLS] and 2 × 3 patches
    flow = seen.rollout("cls")
    overlay = flow.overlay(batch=1)
    assert overlay.mass.tolist() == flow.scores[1, 1:].tolist()
    assert overlay.shares["cls"] == pytest.approx(float(flow.scores[1, 0]))
    assert overlay.heat.shape == (32, 48)
    assert overlay.heat[20, 40] == pytest.approx(float(flow.scores[1, 6]))
    assert "rollout (heuristic)" in overlay.title
    assert "cls" in overlay.title
    several = seen.rollout([0, 4])
    assert several.overlay(token=4).mass.tolist() == several.scores[0, 1, 1:].tolist()
    assert "patch (1, 0)" in several.overlay(token=4).title
    for token in (None, 3):
        with pytest.raises(LookupError):
            several.overlay(token=token)
