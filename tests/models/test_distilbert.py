from pathlib import Path

import pytest
import torch
from transformers import DistilBertConfig
from twins import Twin, assert_same, assert_saved, assert_side_of_padding_changes_nothing, change, texts

from regard.models.loading import load

SMALL = {
    "vocab_size": 47,
    "dim": 20,
    "n_layers": 3,
    "n_heads": 5,
    "hidden_dim": 29,
    "max_position_embeddings": 23,
    "num_labels": 7,
}
OTHER = {
    "vocab_size": 31,
    "dim": 12,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 17,
    "max_position_embeddings": 11,
    "num_labels": 3,
}
OTHER |= {"activation": "relu", "sinusoidal_pos_embds": True, "tie_word_embeddings": False}
CONFIGS = {"five heads": SMALL, "own word table, sines": OTHER}
HEADS = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    return Twin("DistilBert" + head, DistilBertConfig(**values), directory)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    # With padding on the left transformers labels the padding, ours the first token: the test of sides below.
    for side in ("none", "right") if head == "ForSequenceClassification" else ("none", "right", "left"):
        assert_same(twin, dtype, texts(31, side))


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    assert_saved(twin_of(head, "five heads", tmp_path / "theirs"), tmp_path / "ours", texts(31, "right"))


def test_a_word_table_of_its_own_is_saved_too(tmp_path):
    twin = twin_of("ForMaskedLM", "own word table, sines", tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", texts(31, "right"))


@pytest.mark.parametrize("head", HEADS)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    assert_side_of_padding_changes_nothing(twin_of(head, "five heads", tmp_path).ours(torch.float64))


def test_it_has_no_segments(tmp_path):
    model = twin_of("Model", "five heads", tmp_path).ours(torch.float32)
    with pytest.raises(ValueError, match=r"DistilBERT.*token_type_ids="):
        model(torch.full((2, 3), 5), token_type_ids=torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("head", "key"), [("ForSequenceClassification", "seq_classif_dropout"), ("ForQuestionAnswering", "qa_dropout")]
)
def test_each_head_has_its_own_dropout(head, key, tmp_path):
    twin_of(head, "five heads", tmp_path)
    assert load(change(tmp_path, **{key: 0.3})).head.dropout.p == 0.3


def test_settings_of_the_first_published_models_are_read(tmp_path):
    twin_of("Model", "five heads", tmp_path)
    assert load(change(tmp_path, tie_weights_=True)).task == "feature-extraction"


@pytest.mark.parametrize(("key", "wrong", "right"), [("tie_weights_", False, "True"), ("is_decoder", True, "False")])
def test_a_setting_that_changes_the_maths_is_refused(key, wrong, right, tmp_path):
    twin_of("Model", "five heads", tmp_path)
    with pytest.raises(ValueError, match=rf"{key}.*{wrong!r}.*{right}"):
        load(change(tmp_path, **{key: wrong}))


def test_an_unknown_setting_is_refused(tmp_path):
    twin_of("Model", "five heads", tmp_path)
    with pytest.raises(ValueError, match=r"DistilBERT.*type_vocab_size.*2"):
        load(change(tmp_path, type_vocab_size=2))
