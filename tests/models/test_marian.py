import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MarianConfig
from twins import Twin, assert_same, assert_saved, pairs, side_by_side

from regard.models.loading import load

SMALL = {"vocab_size": 47, "d_model": 20, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 5}
SMALL |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 29, "decoder_ffn_dim": 23, "max_position_embeddings": 19}
SMALL |= {"scale_embedding": True, "activation_function": "swish"}
TWO = {"vocab_size": 31, "d_model": 12, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2}
TWO |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 17, "decoder_ffn_dim": 13, "max_position_embeddings": 11}
TWO |= {"activation_function": "relu", "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37}
CONFIGS = {"small": SMALL, "two vocabularies": TWO, "three tables": TWO | {"tie_word_embeddings": False}}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 1}
HEADS = ["Model", "MTModel"]


def constants(model: nn.Module) -> None:
    shape, random = model.final_logits_bias.shape, torch.Generator().manual_seed(19)
    drawn = torch.randn(shape, generator=random, dtype=torch.float64)
    model.final_logits_bias.copy_(drawn.bfloat16())


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = MarianConfig(**CONFIGS[config], **TOKENS)
    return Twin("Marian" + head, values, directory, constants if head == "MTModel" else None)


def counted(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Positions as transformers counts them, padding included."""
    return given | {"position_ids": torch.arange(11), "decoder_position_ids": torch.arange(7)}


def changed(directory: Path, **values: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    for side in ("none", "right", "left"):
        given = pairs(31, side)
        assert_same(twin, dtype, counted(given), {"position_ids": None}, real=given.get("decoder_attention_mask"))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, config, tmp_path):
    sines = {f"{side}.embed_positions.weight" for side in ("encoder", "decoder")} if head == "Model" else set()
    twin = twin_of(head, config, tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", pairs(31, "right"), remade=sines)


@pytest.mark.parametrize("head", HEADS)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    model = twin_of(head, "small", tmp_path).ours(torch.float64)
    right, left = side_by_side(model, pairs(31, "right"), pairs(31, "left"))
    torch.testing.assert_close(left, right, rtol=0, atol=1e-13)


def test_sines_in_the_file_or_not_make_no_difference(tmp_path):
    twin = twin_of("Model", "small", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    sines = {name for name in tensors if name.endswith("embed_positions.weight")}
    assert len(sines) == 2
    before = load(tmp_path)(**pairs(31)).last_hidden_state
    save_file({name: t for name, t in tensors.items() if name not in sines}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path)(**pairs(31)).last_hidden_state, before)
    assert_same(twin, torch.float32, pairs(31))


def test_the_vocabulary_is_the_one_that_is_written_in(tmp_path):
    model = twin_of("MTModel", "two vocabularies", tmp_path).ours(torch.float32)
    assert model.vocabulary == 37
    model(torch.tensor([[30]]), decoder_input_ids=torch.tensor([[36]]))
    with pytest.raises(ValueError, match=r"id.*31"):
        model(torch.tensor([[31]]), decoder_input_ids=torch.tensor([[36]]))
    with pytest.raises(ValueError, match=r"id.*37"):
        model(torch.tensor([[30]]), decoder_input_ids=torch.tensor([[37]]))


def test_sines_have_no_end(tmp_path):
    model = twin_of("Model", "small", tmp_path).ours(torch.float32)
    ids = torch.full((1, 23), 5)  # max_position_embeddings is 19
    assert model(ids, decoder_input_ids=ids).last_hidden_state.shape == (1, 23, 20)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tie_word_embeddings", False, r"tie_word_embeddings.*False.*True"),
        ("decoder_vocab_size", 41, r"decoder_vocab_size.*41.*47"),
        ("normalize_before", True, r"normalize_before.*True.*False"),
        ("normalize_embedding", True, r"normalize_embedding.*True.*False"),
        ("static_position_embeddings", False, r"static_position_embeddings.*False.*True"),
        ("use_rotary", True, r"Marian.*use_rotary.*True"),
        ("d_model", 15, "15"),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(key, value, message, tmp_path):
    twin_of("Model", "small", tmp_path)
    with pytest.raises(ValueError, match=message):
        load(changed(tmp_path, **{key: value}))


def test_what_older_configs_say_of_marian_is_accepted(tmp_path):
    twin_of("Model", "small", tmp_path)
    said = {"add_bias_logits": False, "add_final_layer_norm": False, "classif_dropout": 0.0, "num_hidden_layers": 3}
    said |= {"normalize_before": False, "normalize_embedding": False, "static_position_embeddings": True}
    load(changed(tmp_path, **said, extra_pos_embeddings=47, encoder_layerdrop=0.1, decoder_layerdrop=0.1))
