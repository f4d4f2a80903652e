"""timm's models, which fuse their attention since 2023: `watch` sees it. timm is on the GPU machine only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224"])
def test_rows_of_the_fused_model_are_the_weights_of_the_unfused_one(name: str) -> None:
    timm: Any = pytest.importorskip("timm")
    pixels = torch.randn(2, 3, 224, 224, device="cuda")

    def run(fused: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        timm.layers.set_fused_attn(fused, experimental=fused)  # timm calls Swin's fused path experimental
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False).cuda().eval()
        with torch.no_grad():
            plain = model(pixels)
            with regard.watch(model, keep="qk") as seen:
                watched = model(pixels)
        return plain, watched, seen

    plain, watched, seen = run(True)
    _, _, apart = run(False)
    assert torch.equal(plain, watched)
    assert seen.names == apart.names != []
    assert {r.source for r in seen.records} == {"sdpa"}
    for path in seen.names:
        every = slice(None)
        ours, theirs = seen[path].tile(every, every), apart[path].tile(every, every)
        assert torch.allclose(ours, theirs, atol=1e-4), f"{path}: {float((ours - theirs).abs().max())}"
