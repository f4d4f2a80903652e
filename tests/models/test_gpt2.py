from pathlib import Path

import pytest
import torch
from transformers import GPT2Config
from twins import Twin, assert_same, assert_saved, texts

FIVE = {
    "vocab_size": 47,
    "n_embd": 20,
    "n_layer": 3,
    "n_head": 5,
    "n_positions": 23,
    "num_labels": 7,
    "pad_token_id": 0,
}
ODD = {
    "vocab_size": 31,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 13,
    "n_inner": 17,
    "activation_function": "relu",
}
ODD |= {
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": False,
    "scale_attn_by_inverse_layer_idx": True,
    "pad_token_id": 0,
}
CONFIGS = {"five heads": FIVE, "own word table, scores shrinking by layer": ODD}
HEADS = ["Model", "LMHeadModel", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    return Twin("GPT2" + head, GPT2Config(**values), directory)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    for side in ("none", "right", "left"):
        assert_same(twin, dtype, texts(31, side))


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    assert_saved(twin_of(head, "five heads", tmp_path / "theirs"), tmp_path / "ours", texts(31, "right"))
