import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BartConfig
from twins import Twin, assert_same, assert_saved, pairs, side_by_side

from regard.models.loading import load

SMALL = {"vocab_size": 47, "d_model": 20, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 5}
SMALL |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 29, "decoder_ffn_dim": 23, "max_position_embeddings": 19}
OTHER = {"vocab_size": 31, "d_model": 12, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2}
OTHER |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 17, "decoder_ffn_dim": 13, "max_position_embeddings": 11}
OTHER |= {"scale_embedding": True, "activation_function": "relu"}
CONFIGS = {"small": SMALL, "scaled embeddings": OTHER}
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 1,
}
HEADS = ["Model", "ForConditionalGeneration", "ForSequenceClassification", "ForQuestionAnswering"]
END = 1


def constants(model: nn.Module) -> None:
    """Zero in most checkpoints, so that a model that forgot them would pass."""
    shape, random = model.final_logits_bias.shape, torch.Generator().manual_seed(19)
    drawn = torch.randn(shape, generator=random, dtype=torch.float64)
    model.final_logits_bias.copy_(drawn.bfloat16())


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | TOKENS | {"num_labels": 2 if head == "ForQuestionAnswering" else 7}
    generates = head == "ForConditionalGeneration"
    return Twin("Bart" + head, BartConfig(**values), directory, constants if generates else None)


def inputs(head: str, side: str = "none") -> dict[str, Tensor]:
    return pairs(31, side, end=END if head == "ForSequenceClassification" else None)


def counted(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Positions as transformers counts them, padding included."""
    places = {"position_ids": "input_ids", "decoder_position_ids": "decoder_input_ids"}
    return given | {name: torch.arange(given[of].shape[1]) for name, of in places.items() if of in given}


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
        given = inputs(head, side)
        assert_same(twin, dtype, counted(given), {"position_ids": None}, real=given.get("decoder_attention_mask"))


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    assert_saved(twin_of(head, "small", tmp_path / "theirs"), tmp_path / "ours", inputs(head, "right"))


@pytest.mark.parametrize("head", HEADS)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    model = twin_of(head, "small", tmp_path).ours(torch.float64)
    right, left = side_by_side(model, inputs(head, "right"), inputs(head, "left"))
    torch.testing.assert_close(left, right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("head", HEADS)
def test_without_a_target_the_decoder_reads_the_text_again(head, tmp_path):
    twin = twin_of(head, "small", tmp_path)
    given = inputs(head)
    del given["decoder_input_ids"]
    assert_same(twin, torch.float32, given)


@pytest.mark.parametrize("head", HEADS)
def test_read_again_the_side_of_padding_changes_nothing(head, tmp_path):
    model = twin_of(head, "small", tmp_path).ours(torch.float64)
    right, left = pairs(31, "right", end=END), pairs(31, "left", end=END)
    left["input_ids"] = torch.zeros_like(left["input_ids"]).masked_scatter(
        left["attention_mask"], right["input_ids"][right["attention_mask"]]
    )
    made = []
    for given in (right, left):
        result = model(given["input_ids"], given["attention_mask"])
        found = result.last_hidden_state if result.logits is None else result.logits
        made.append(found[given["attention_mask"]] if found.shape[:2] == given["attention_mask"].shape else found)
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=1e-13)


# --------------------------------------------------------------------------------------- the constant of each word


def test_a_checkpoint_without_the_constants_has_zeros(tmp_path):
    twin_of("Model", "small", tmp_path)
    model = load(
        tmp_path, task="text2text-generation", dtype=torch.bfloat16
    )  # as people write with a checkpoint of the bare body
    assert model.head.bias.tolist() == [0.0] * 47
    assert model.head.bias.dtype == torch.bfloat16


def test_the_constants_are_not_trained(tmp_path):
    model = twin_of("ForConditionalGeneration", "small", tmp_path).ours(torch.float32)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]
    assert model.head.bias.abs().min() > 0


def test_constants_of_another_shape_are_refused(tmp_path):
    twin_of("ForConditionalGeneration", "small", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["final_logits_bias"] = torch.zeros(2, 47)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"final_logits_bias.*\(2, 47\).*\(1, 47\)"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tie_word_embeddings", False, r"tie_word_embeddings.*False.*True"),
        ("normalize_before", True, r"normalize_before.*True.*False"),
        ("normalize_embedding", False, r"normalize_embedding.*False.*True"),
        ("add_final_layer_norm", True, r"add_final_layer_norm.*True.*False"),
        ("add_bias_logits", True, r"add_bias_logits.*True.*False"),
        ("static_position_embeddings", True, r"static_position_embeddings.*True.*False"),
        ("extra_pos_embeddings", 1, r"extra_pos_embeddings.*1.*2"),
        ("num_hidden_layers", 2, r"num_hidden_layers.*2.*3"),
        ("activation_function", "mish", "'mish'"),
        ("use_rotary", True, r"BART.*use_rotary.*True"),
        ("decoder_attention_heads", 3, r"d_model.*20.*3"),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(key, value, message, tmp_path):
    twin_of("Model", "small", tmp_path)
    with pytest.raises(ValueError, match=message):
        load(changed(tmp_path, **{key: value}))


def test_a_text_without_an_end_cannot_be_classified(tmp_path):
    model = twin_of("ForSequenceClassification", "small", tmp_path).ours(torch.float32)
    ids = torch.tensor([[5, 6, END], [5, 6, 7]])
    with pytest.raises(ValueError, match=r"text.*1.*id.*1"):
        model(ids)
    with pytest.raises(ValueError, match=r"decoder_input_ids.*\(2, 3\)"):
        model(ids, decoder_input_ids=ids[:, :2])


def test_labels_are_three_where_nothing_is_said_of_them(tmp_path):
    values = SMALL | TOKENS | {"id2label": {0: "contradiction", 1: "neutral", 2: "entailment"}}
    Twin("BartForSequenceClassification", BartConfig(**values), tmp_path)
    assert load(changed(tmp_path, id2label=None, num_labels=None)).head.score.out_features == 3


def test_dropouts_are_where_bart_has_them(tmp_path):
    values = (
        SMALL
        | TOKENS
        | {"dropout": 0.11, "attention_dropout": 0.12, "activation_dropout": 0.13, "classifier_dropout": 0.14}
    )
    Twin("BartForSequenceClassification", BartConfig(**values, num_labels=7), tmp_path)
    model = load(tmp_path)
    block = model.decoder.blocks[0]
    assert (model.encoder.embed.dropout.p, block.dropout.p, block.feed_forward.dropout.p) == (0.11, 0.11, 0.13)
    assert (block.attention.dropout, block.cross.dropout, model.head.dropout.p) == (0.12, 0.12, 0.14)


# ------------------------------------------------------------------------------------------------------ real weights


def test_real_weights_spell_a_word_as_it_is_spoken(data):
    folder = data / "weights_bart_g2p"
    letters = json.loads((folder / "chars.json").read_text(encoding="utf-8"))
    model, end = load(folder), 2
    written = [1, *(letters["grapheme_chars"].index(c) for c in "attention"), end]
    reading = model.read(torch.tensor([written]))
    logits, state = reading.begin(torch.tensor([[model.start]]), None, length=20)
    spoken = ""
    while (token := int(logits.argmax())) != end:
        spoken += letters["phoneme_chars"][token]
        logits = reading.step(state, torch.tensor([token]))
    assert spoken == "_ətˈɛnʃən"  # a special token comes first
