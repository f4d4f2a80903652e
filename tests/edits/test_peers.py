"""Edits and rollout against other libraries, on one and the same tiny model.

Edits: TransformerLens' hooks and captum's ablation, in fp64. Rollout: fast-vit-rollout's, in fp32, its only precision.
None is a dependency of the tests: they drag in packages of their own. To run these:
pip install --no-deps "transformer-lens<3" captum einops jaxtyping fancy_einsum beartype typeguard better-abc \
    fast-vit-rollout opencv-python-headless torchvision
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import edits

IDS = torch.tensor([[3, 5, 7, 11, 2, 13, 4]])
LAYER, HEAD, QUERY, KEYS = 1, 2, 5, [1, 3]


@pytest.fixture(scope="module")
def hooked() -> Any:
    lens = pytest.importorskip("transformer_lens", reason="needs TransformerLens, see above")
    torch.manual_seed(0)
    config = lens.HookedTransformerConfig(
        n_layers=3, d_model=12, n_ctx=16, d_head=4, n_heads=3, d_mlp=24, d_vocab=19, act_fn="gelu_new",
        normalization_type="LN", dtype=torch.float64, device="cpu", initializer_range=0.5,
    )  # fmt: skip
    return lens.HookedTransformer(config).double().eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(IDS)
    return out


def compare(model: Any, single: edits.Edit, hooks: list[Any]) -> None:
    with torch.no_grad():
        expected = model.run_with_hooks(IDS, fwd_hooks=hooks)
    with regard.edit(model, single):
        ours = logits(model)
    assert (ours - expected).abs().max() < 1e-10
    assert (ours - logits(model)).abs().max() > 1e-6


def test_pattern_edits_equal_transformer_lens(hooked: Any) -> None:
    def hide(scores: Tensor, hook: Any) -> Tensor:
        scores[:, HEAD, QUERY, KEYS] = -torch.inf
        return scores

    def fade(pattern: Tensor, hook: Any) -> Tensor:
        pattern[:, HEAD, QUERY, KEYS] = 0
        return pattern

    where = f"blocks.{LAYER}.attn."
    compare(hooked, edits.knock_out(LAYER, HEAD, QUERY, KEYS), [(where + "hook_attn_scores", hide)])
    faded = edits.knock_out(LAYER, HEAD, QUERY, KEYS, renormalise=False)
    compare(hooked, faded, [(where + "hook_pattern", fade)])


def test_z_and_value_edits_equal_transformer_lens(hooked: Any) -> None:
    other = torch.randn(1, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def zero(z: Tensor, hook: Any) -> Tensor:  # (B, N, H, D)
        z[:, :, HEAD] = 0
        return z

    def mean(z: Tensor, hook: Any) -> Tensor:
        z[:, :, HEAD] = z[:, :, HEAD].mean(1, keepdim=True)
        return z

    def patched(z: Tensor, hook: Any) -> Tensor:
        z[:, :, HEAD] = other
        return z

    def values(v: Tensor, hook: Any) -> Tensor:
        v[:, KEYS, HEAD] = 0
        return v

    where = f"blocks.{LAYER}.attn."
    compare(hooked, edits.ablate(LAYER, HEAD), [(where + "hook_z", zero)])
    compare(hooked, edits.ablate(LAYER, HEAD, "mean"), [(where + "hook_z", mean)])
    compare(hooked, edits.patch(LAYER, HEAD, "output", other[None]), [(where + "hook_z", patched)])
    compare(hooked, edits.zero_values(LAYER, HEAD, KEYS), [(where + "hook_v", values)])


def test_path_patching_equals_transformer_lens(hooked: Any) -> None:
    """The direct path of a head to the logits: the head is patched, all later heads keep their clean outputs."""
    clean, sender = hooked.run_with_cache(IDS)[1], torch.full((7, 4), 0.3, dtype=torch.float64)

    def send(z: Tensor, hook: Any) -> Tensor:
        z[:, :, HEAD] = sender
        return z

    def freeze(z: Tensor, hook: Any) -> Tensor:
        return clean[hook.name]

    later = [f"blocks.{n}.attn.hook_z" for n in range(LAYER + 1, 3)]
    edit: Any = edits.patch(LAYER, HEAD, "output", sender[None, None])
    for n, name in enumerate(later, LAYER + 1):
        edit = edit + edits.patch(n, None, "output", clean[name].transpose(1, 2))
    compare(hooked, edit, [(f"blocks.{LAYER}.attn.hook_z", send), *((name, freeze) for name in later)])


class Heads(nn.Module):
    """An attention layer whose heads' outputs pass a module of their own, where captum can ablate them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.heads, self.out = nn.Linear(12, 36), nn.Identity(), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        batch, n, _ = x.shape
        q, k, v = self.qkv(x).view(batch, n, 3, 3, 4).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(q, k, v)
        z = self.heads(z)
        logits: Tensor = self.out(z.transpose(1, 2).reshape(batch, n, 12)[:, -1])
        return logits


def test_ablations_and_gradients_equal_captum() -> None:
    attr = pytest.importorskip("captum.attr", reason="needs captum, see above")
    model = Heads().double().eval()
    x = torch.randn(1, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    groups = torch.arange(3).view(1, 3, 1, 1).expand(1, 3, 6, 4)
    ablation = attr.LayerFeatureAblation(model, model.heads).attribute(x, target=1, layer_mask=groups)
    ours = regard.scan(lambda: model(x), model, lambda out: out[0, 1])
    assert torch.allclose(-ours.values[0], ablation[0, :, 0, 0], atol=1e-12)
    attribution = attr.LayerGradientXActivation(model, model.heads).attribute(x, target=1)
    first = regard.scan(lambda: model(x), model, lambda out: out[0, 1], method="gradient")
    assert torch.allclose(-first.values[0], attribution[0].sum((1, 2)), atol=1e-12)


class TinyViT(nn.Module):
    """A vision transformer with softmaxes by hand, whose weights pass a module `attn_drop`, where others hook."""

    def __init__(self, layers: int = 4, heads: int = 3, d: int = 24, patches: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.blocks = nn.Conv2d(3, d, 8, 8), nn.ModuleList(TinyBlock(heads, d) for _ in range(layers))
        self.cls, self.position = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, patches + 1, d))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return x[:, 0]


class TinyBlock(nn.Module):
    def __init__(self, heads: int, d: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out, self.attn_drop = heads, nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Dropout(0.0)
        self.norm, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        batch, n, d = x.shape
        q, k, v = self.qkv(3 * self.norm(x)).view(batch, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.attn_drop((q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, n, d))
        out: Tensor = x + self.mlp(x)
        return out


@pytest.mark.parametrize("heads", ["mean", "max"])
def test_rollout_of_a_vision_transformer_equals_fast_vit_rollout(heads: str) -> None:
    peer = pytest.importorskip("fast_vit_rollout", reason="needs fast-vit-rollout, see above")
    model = TinyViT().eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(images)
    expected = peer.ViTAttentionRollout(model, head_fusion=heads, discard_ratio=0.0)(images)  # (B, 17, 17)
    ours = seen.rollout(matrix=True, heads=heads).scores
    assert ours.shape == expected.shape == (2, 17, 17)
    assert (ours - expected).abs().max() < 1e-6
    assert (seen.rollout(0, heads=heads).scores - expected[:, 0]).abs().max() < 1e-6
    other = {"mean": "max", "max": "mean"}[heads]
    assert (seen.rollout(matrix=True, heads=other).scores - expected).abs().max() > 1e-3
