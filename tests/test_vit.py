from pathlib import Path

import pytest
import torch
from transformers import ViTConfig
from twins import Twin, assert_same, assert_saved, pictures

# 5 × 3 patches of a picture that is not square; 7 × 7 with pixels left over at the edges.
SMALL = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29, "num_labels": 7}
SMALL |= {"image_size": [20, 12], "patch_size": [4, 4], "encoder_stride": 4, "pooler_output_size": 11}
OTHER = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 17, "num_labels": 3}
OTHER |= {"image_size": 37, "patch_size": 5, "num_channels": 1, "qkv_bias": False, "hidden_act": "gelu_new"}
OTHER |= {"layer_norm_eps": 1e-5, "encoder_stride": 5, "pooler_act": "relu"}
CONFIGS = {"not square": SMALL, "one channel": OTHER}
SIZES = {"not square": (20, 12, 3, 3), "one channel": (37, 37, 3, 1)}
HEADS = ["Model", "ForImageClassification", "ForMaskedImageModeling"]

STORED = {
    r"layers\.(\d+)\.attention\.([qkv])_proj": lambda m: f"encoder.layer.{m[1]}.attention.attention."
    + {"q": "query", "k": "key", "v": "value"}[m[2]],
    r"layers\.(\d+)\.attention\.o_proj": r"encoder.layer.\1.attention.output.dense",
    r"layers\.(\d+)\.mlp\.fc1": r"encoder.layer.\1.intermediate.dense",
    r"layers\.(\d+)\.mlp\.fc2": r"encoder.layer.\1.output.dense",
    r"(?<!\w)layers\.(\d+)\.": r"encoder.layer.\1.",
}


def twin_of(head: str, config: str, directory: Path) -> Twin:
    return Twin("ViT" + head, ViTConfig(**CONFIGS[config]), directory, stored=STORED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    if head == "ForMaskedImageModeling" and config == "not square":
        pytest.skip("transformers' decoder takes every picture for a square: the next test but one")
    assert_same(twin_of(head, config, tmp_path), dtype, pictures(*SIZES[config]))
