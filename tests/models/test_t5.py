import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config
from twins import Twin, assert_same, assert_saved, change, pairs, side_by_side, texts

from regard.models.loading import load

# 11 and 7 tokens are farther apart than max_distance 5, and buckets beyond half of them are shared.
FIRST = {"vocab_size": 47, "d_model": 20, "d_kv": 3, "d_ff": 29, "num_heads": 5, "num_layers": 3}
FIRST |= {"num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 5}
GATED = {"vocab_size": 31, "d_model": 12, "d_kv": 7, "d_ff": 17, "num_heads": 2, "num_layers": 2}
GATED |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 9, "layer_norm_epsilon": 1e-3}
GATED |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FIRST["decoder_start_token_id"] = GATED["decoder_start_token_id"] = 2
CONFIGS = {"v1.0": FIRST, "v1.1": GATED}
PAIRED = ["Model", "ForConditionalGeneration", "ForSequenceClassification", "ForQuestionAnswering"]
LONE = ["EncoderModel", "ForTokenClassification"]
END = 1


def own_words(model: nn.Module) -> None:
    """What v1.1 has, and transformers makes only by reading it from a file: words scored with another table."""
    drawn = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(19), dtype=torch.float64)
    model.lm_head.weight = nn.Parameter((drawn / 4).bfloat16().to(model.dtype))


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | {"num_labels": 2 if head == "ForQuestionAnswering" else 7}
    own = config == "v1.1" and head == "ForConditionalGeneration"
    return Twin("T5" + head, T5Config(**values), directory, own_words if own else None)


def inputs(head: str, side: str = "none") -> dict[str, Any]:
    if head in LONE:
        given = texts(31, side)
        return {name: t for name, t in given.items() if name != "position_ids"}
    return pairs(31, side, end=END if head == "ForSequenceClassification" else None)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", PAIRED + LONE)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    for side in ("none", "right", "left"):
        given = inputs(head, side)
        assert_same(twin, dtype, given, real=given.get("decoder_attention_mask", given.get("attention_mask")))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", PAIRED + LONE)
def test_what_we_save_transformers_opens(head, config, tmp_path):
    twin = twin_of(head, config, tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", inputs(head, "right"))


@pytest.mark.parametrize("head", PAIRED)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    model = twin_of(head, "v1.0", tmp_path).ours(torch.float64)
    right, left = side_by_side(model, inputs(head, "right"), inputs(head, "left"))
    torch.testing.assert_close(left, right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForQuestionAnswering"])
def test_to_judge_a_text_the_decoder_reads_it_again(head, tmp_path):
    twin = twin_of(head, "v1.0", tmp_path)
    given = inputs(head)
    del given["decoder_input_ids"]
    assert_same(twin, torch.float32, given)


# ------------------------------------------------------------------------------------- which table scores the words


def stored(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def changed(directory: Path, **values: Any) -> Path:
    kept = {key: value for key, value in (stored(directory) | values).items() if value != "left out"}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


@pytest.mark.parametrize(
    "said",
    [
        {"tie_word_embeddings": False, "scale_decoder_outputs": "left out"},  # as transformers 4 wrote it
        {"tie_word_embeddings": True, "scale_decoder_outputs": False},  # as transformers 5 does
    ],
    ids=["written by version 4", "written by version 5"],
)
def test_a_word_table_in_the_file_is_used_whatever_version_wrote_the_config(said, tmp_path):
    twin = twin_of("ForConditionalGeneration", "v1.1", tmp_path)
    changed(tmp_path, **said)
    assert_same(twin, torch.float32, inputs("ForConditionalGeneration"))
    ours = twin.ours(torch.float32)
    ours.save(tmp_path / "again")
    assert stored(tmp_path / "again")["tie_word_embeddings"] is False
    assert stored(tmp_path / "again")["scale_decoder_outputs"] is False


def test_v1_1_trained_with_one_table_is_not_scaled(tmp_path):
    twin = Twin("T5ForConditionalGeneration", T5Config(**GATED), tmp_path)  # transformers 5 ties it all the same
    assert twin.ours(torch.float32).head.words is None
    assert_same(twin, torch.float32, inputs("ForConditionalGeneration"))


def test_a_body_whose_words_had_a_table_of_their_own_cannot_write_without_it(tmp_path):
    twin_of("Model", "v1.1", tmp_path)
    changed(tmp_path, tie_word_embeddings=False, scale_decoder_outputs="left out")
    with pytest.raises(ValueError, match=r"1.*lm_head\.weight.*task='feature-extraction'"):
        load(tmp_path, task="text2text-generation")
    load(tmp_path).save(tmp_path / "again")
    assert stored(tmp_path / "again")["tie_word_embeddings"] is False


def test_newer_keys_of_the_feed_forward_overrule_the_older_one(tmp_path):
    twin = Twin("T5Model", T5Config(**GATED, dense_act_fn="silu"), tmp_path)
    assert stored(tmp_path)["feed_forward_proj"] == "gated-gelu"
    assert_same(twin, torch.float32, inputs("Model"))
    changed(tmp_path, dense_act_fn="left out")
    with pytest.raises(AssertionError, match="errs"):
        assert_same(twin, torch.float32, inputs("Model"))


# ------------------------------------------------------------------------------------------------------ other tasks


def test_the_encoder_of_a_whole_checkpoint_can_be_asked_for_alone(tmp_path):
    twin = twin_of("ForConditionalGeneration", "v1.1", tmp_path)
    alone, given = load(tmp_path, task="text-encoding"), inputs("ForConditionalGeneration", "right")
    memory = twin.ours(torch.float32)(**given).encoder_last_hidden_state
    assert torch.equal(alone(given["input_ids"], given["attention_mask"]).last_hidden_state, memory)


def test_a_decoder_that_is_not_the_config_s_is_refused(tmp_path):
    twin_of("ForConditionalGeneration", "v1.0", tmp_path)
    with pytest.raises(ValueError, match=r"13.*decoder\.block\.1"):
        load(changed(tmp_path, num_decoder_layers=1))


def test_blocks_of_a_tower_share_one_table_of_distances(tmp_path):
    model = twin_of("Model", "v1.0", tmp_path).ours(torch.float32)
    tables = [name for name, _ in model.named_parameters() if name.endswith("position.table")]
    assert tables == ["encoder.blocks.0.attention.position.table", "decoder.blocks.0.attention.position.table"]
    assert len({block.attention.position for block in model.encoder.blocks}) == 1
    assert all(block.cross.position is None for block in model.decoder.blocks)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("feed_forward_proj", "gated-mish", "'mish'"),
        ("is_decoder", True, r"is_decoder.*True.*False.*None"),
        ("scale_decoder_outputs", "yes", r"scale_decoder_outputs.*'yes'"),
        ("use_rotary", True, r"T5.*use_rotary.*True"),
        ("num_decoder_layers", 2001, "2000"),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(key, value, message, tmp_path):
    twin_of("ForConditionalGeneration", "v1.0", tmp_path)
    with pytest.raises(ValueError, match=message):
        load(changed(tmp_path, **{key: value}, dense_act_fn="left out"))


def test_training_drops_out_where_t5_does(tmp_path):
    model = twin_of("Model", "v1.0", tmp_path).ours(torch.float32).train()
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert set(rates.values()) == {0.1}
    assert {"encoder.embed.dropout", "encoder.dropout", "decoder.blocks.1.feed_forward.dropout"} <= set(rates)
    assert model.decoder.blocks[0].cross.dropout == 0.1


def test_positions_are_refused_by_a_family_that_knows_distances_alone(tmp_path):
    twin_of("Model", "v1.0", tmp_path)
    model, given = load(tmp_path), pairs(31, "none")
    for name, ids in (("position_ids", given["input_ids"]), ("decoder_position_ids", given["decoder_input_ids"])):
        with pytest.raises(ValueError, match="T5"):
            model(**given, **{name: torch.arange(ids.shape[1])})


def test_a_distance_of_gigabytes_is_refused(tmp_path):
    twin_of("Model", "v1.0", tmp_path)
    with pytest.raises(ValueError, match=r"relative_attention_max_distance.*1.*1048576"):
        load(change(tmp_path, relative_attention_max_distance=2**31 - 1))
