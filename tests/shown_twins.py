"""Tiny random models whose attention is shown on a picture: one with registers, one in windows. Sizes are theirs alone.

They know nothing of what is asked of them.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from seeing_twins import put
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil


def registers(directory: Path) -> Path:
    """cls, two registers, and 5 × 7 patches of a picture of 37 × 53, whose last pixels are in none."""
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=20, num_hidden_layers=3, num_attention_heads=5, image_size=30, patch_size=6, num_register_tokens=2
    )
    resized = CLIPImageProcessorPil(size={"shortest_edge": 30}, do_center_crop=False)
    return put(directory, "Dinov2WithRegistersModel", config, resized)


def windows(directory: Path) -> Path:
    """27 × 41 pixels: 7 × 11 patches in 12 windows of 9, 4 × 6 in 4 windows, 2 × 3 in 2 windows of 4."""
    config = transformers.SwinConfig(
        embed_dim=6, depths=[2, 1, 2], num_heads=[2, 3, 4], window_size=3, image_size=32, patch_size=4
    )
    return put(directory, "SwinModel", config, ViTImageProcessorPil(size={"height": 27, "width": 41}))
