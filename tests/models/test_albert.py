import os
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AlbertConfig
from twins import (
    Twin,
    assert_same,
    assert_saved,
    assert_side_of_padding_changes_nothing,
    change,
    texts,
    widened,
)

from regard.models.families.bert import order
from regard.models.family import Config
from regard.models.loading import load
from regard.testing import largest_error

# Five layers are three groups of unlike length, 2 + 2 + 1, and each layer is two blocks.
GROUPS = {"vocab_size": 47, "embedding_size": 13, "hidden_size": 20, "num_hidden_layers": 5, "num_hidden_groups": 3}
GROUPS |= {"inner_group_num": 2, "num_attention_heads": 5, "intermediate_size": 29, "max_position_embeddings": 23}
GROUPS |= {"type_vocab_size": 3, "num_labels": 7}
ONE = {"vocab_size": 31, "embedding_size": 19, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
ONE |= {"intermediate_size": 17, "max_position_embeddings": 11, "hidden_act": "relu", "layer_norm_eps": 1e-3}
ONE |= {"tie_word_embeddings": False, "num_labels": 3}
CONFIGS = {"groups of blocks": GROUPS, "one block, own word table": ONE}
HEADS = ["Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification"]
HEADS += ["ForQuestionAnswering"]
POOLED = {"Model", "ForPreTraining", "ForSequenceClassification"}
TWO_LABELS = {"ForPreTraining", "ForQuestionAnswering"}


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | ({"num_labels": 2} if head in TWO_LABELS else {})
    return Twin("Albert" + head, AlbertConfig(**values), directory)


def inputs(side: str = "none") -> dict[str, Tensor]:
    given = texts(31, side)
    types = torch.randint(0, 2, given["input_ids"].shape, generator=torch.Generator().manual_seed(5))
    return given if side == "none" else {**given, "token_type_ids": types}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    # With padding on the left transformers pools the padding, ours the first token: the test of sides below.
    for side in ("none", "right") if head in POOLED else ("none", "right", "left"):
        assert_same(twin, dtype, inputs(side))


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    twin = twin_of(head, "groups of blocks", tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", inputs("right"))


@pytest.mark.parametrize("head", HEADS)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    assert_side_of_padding_changes_nothing(twin_of(head, "groups of blocks", tmp_path).ours(torch.float64))


def test_layers_of_a_group_share_their_weights(tmp_path):
    tower = twin_of("Model", "groups of blocks", tmp_path).ours(torch.float32).tower
    assert len(tower.blocks) == 6
    assert tower.order == (0, 1, 0, 1, 2, 3, 2, 3, 4, 5)


def test_layers_are_dealt_to_groups_in_floating_point_as_transformers_does(tmp_path):
    values = {"num_hidden_layers": 18, "num_hidden_groups": 14}
    given = order(Config(values))
    assert given != [layer * 14 // 18 for layer in range(18)]
    twin = Twin("AlbertModel", AlbertConfig(**ONE | values), tmp_path)
    assert_same(twin, torch.float64, inputs(), gradients=False)


def test_more_groups_than_layers_are_refused(tmp_path):
    twin_of("Model", "groups of blocks", tmp_path)
    with pytest.raises(ValueError, match=r"5.*8.*2"):
        load(change(tmp_path, num_hidden_groups=8))


def test_more_blocks_than_any_model_has_are_refused(tmp_path):
    twin_of("Model", "groups of blocks", tmp_path)
    with pytest.raises(ValueError, match=r"5.*3.*500.*2000"):
        load(change(tmp_path, inner_group_num=500))


def test_a_group_that_the_settings_do_not_have_is_left_over(tmp_path):
    twin_of("Model", "groups of blocks", tmp_path)
    with pytest.raises(ValueError, match=r"32.*encoder\.albert_layer_groups\.2\.albert_layers\.0"):
        load(change(tmp_path, num_hidden_groups=2))


def test_a_group_that_the_checkpoint_does_not_have_is_missing(tmp_path):
    twin_of("Model", "groups of blocks", tmp_path)
    with pytest.raises(ValueError, match=r"32.*encoder\.albert_layer_groups\.3\.albert_layers\.0"):
        load(change(tmp_path, num_hidden_groups=4))


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("position_embedding_type", "relative_key", "'absolute'"),
        ("down_scale_factor", 2, "1"),
        ("gap_size", 3, "0"),
        ("net_structure_type", 1, "0"),
        ("num_memory_blocks", 5, "0"),
        ("layers_to_keep", [1], r"\[\]"),
        ("is_decoder", True, "False"),
    ],
)
def test_a_setting_that_nobody_computes_with_is_refused(key, wrong, right, tmp_path):
    twin_of("Model", "one block, own word table", tmp_path)
    with pytest.raises(ValueError, match=rf"{key}.*{right}"):
        load(change(tmp_path, **{key: wrong}))


def test_settings_of_the_first_published_models_are_read(tmp_path):
    twin_of("Model", "one block, own word table", tmp_path)
    old = {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0, "layers_to_keep": []}
    assert load(change(tmp_path, **old)).task == "feature-extraction"


def test_an_unknown_setting_is_refused(tmp_path):
    twin_of("Model", "one block, own word table", tmp_path)
    with pytest.raises(ValueError, match=r"ALBERT.*rotary_dim.*7"):
        load(change(tmp_path, rotary_dim=7))


def test_dropout_of_the_heads_is_the_classifiers(tmp_path):
    twin_of("ForSequenceClassification", "one block, own word table", tmp_path)
    assert load(change(tmp_path, classifier_dropout_prob=0.3)).head.dropout.p == 0.3


WEIGHTS = Path(os.environ.get("REGARD_WEIGHTS", "")) / "albert-ko"


@pytest.mark.skipif(
    "REGARD_WEIGHTS" not in os.environ or not WEIGHTS.is_dir(),
    reason="needs a trained Korean ALBERT in $REGARD_WEIGHTS/albert-ko",
)
def test_a_trained_korean_albert_computes_what_transformers_computes():
    ours = load(WEIGHTS)
    batch = ours.tokenizer.batch(["나는 오늘 아침에 밥을 [MASK] 학교에 갔다.", "그는 책을 [MASK]."])
    given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
    kind = transformers.AlbertForMaskedLM
    baseline = kind.from_pretrained(WEIGHTS, attn_implementation="eager").eval()
    truth = kind.from_pretrained(WEIGHTS, attn_implementation="eager").double().eval()
    with torch.no_grad():
        mine, base = ours(batch.input_ids, batch.attention_mask).logits, baseline(**given).logits
        with widened():
            exact = truth(**given).logits
    real = batch.attention_mask
    step = torch.finfo(torch.float32).eps * float(exact[real].abs().max())
    allowed = 2 * (largest_error(base[real], exact[real])[0] + step)
    assert largest_error(mine[real], exact[real])[0] <= allowed
    hidden = batch.input_ids[0] == ours.tokenizer.ids_of.mask
    assert ours.tokenizer.decode(mine[0][hidden].argmax(-1)) == "먹고"
