from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import RobertaConfig, XLMRobertaConfig
from twins import Twin, assert_same, assert_saved, assert_side_of_padding_changes_nothing, change, texts

from regard.models.loading import load

SMALL = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
SMALL |= {"max_position_embeddings": 23, "type_vocab_size": 3, "num_labels": 7, "hidden_act": "relu"}
OTHER = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 17}
OTHER |= {"max_position_embeddings": 16, "type_vocab_size": 1, "layer_norm_eps": 1e-3, "tie_word_embeddings": False}
OTHER |= {"pad_token_id": 4, "num_labels": 3}
CONFIGS = {"five heads": SMALL, "own word table, padding 4": OTHER}
HEADS = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
FIRST = {"Model", "ForSequenceClassification"}  # look at the first token


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    return Twin("Roberta" + head, RobertaConfig(**values), directory)


def inputs(side: str, config: str = "five heads") -> dict[str, Tensor]:
    """Texts that hold the padding's id where they are masked: both sides count positions themselves."""
    pad = CONFIGS[config].get("pad_token_id", 1)
    given = texts(31, side, pad=pad, first=pad + 1)
    given.pop("position_ids", None)
    types = torch.randint(
        0, CONFIGS[config]["type_vocab_size"], given["input_ids"].shape, generator=torch.Generator().manual_seed(5)
    )
    return given if side == "none" else {**given, "token_type_ids": types}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    # With padding on the left transformers looks at the padding, ours at the first token: the test of sides below.
    for side in ("none", "right") if head in FIRST else ("none", "right", "left"):
        assert_same(twin, dtype, inputs(side, config))


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    assert_saved(twin_of(head, "five heads", tmp_path / "theirs"), tmp_path / "ours", inputs("right"))


@pytest.mark.parametrize("head", HEADS)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    assert_side_of_padding_changes_nothing(twin_of(head, "five heads", tmp_path).ours(torch.float64), pad=1)


@pytest.mark.parametrize("head", HEADS)
def test_xlm_roberta_is_the_same_under_other_names(head, tmp_path):
    values = SMALL | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    twin = Twin("XLMRoberta" + head, XLMRobertaConfig(**values), tmp_path / "theirs")
    assert_same(twin, torch.float64, inputs("right"), gradients=False)
    assert_saved(twin, tmp_path / "ours", inputs("right"))
    assert load(tmp_path / "ours").family.title == "XLM-RoBERTa"


def test_positions_up_to_the_paddings_are_not_to_be_had(tmp_path):
    model = twin_of("Model", "own word table, padding 4", tmp_path).ours(torch.float32)
    assert model.max_positions == 16 - 5
    assert model(torch.full((1, 11), 7)).last_hidden_state.shape == (1, 11, 12)
    with pytest.raises(ValueError, match=r"12.*11"):
        model(torch.full((1, 12), 7))


def test_dropout_stands_before_and_after_the_layer_of_the_text_head(tmp_path):
    twin_of("ForSequenceClassification", "five heads", tmp_path)
    head = load(change(tmp_path, hidden_dropout_prob=0.3)).head
    assert (head.before.p, head.dropout.p) == (0.3, 0.3)
    head = load(change(tmp_path, classifier_dropout=0.2)).head
    assert (head.before.p, head.dropout.p) == (0.2, 0.2)


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [("position_embedding_type", "relative_key", "'absolute'"), ("is_decoder", True, "False")],
)
def test_a_setting_that_changes_the_maths_is_refused(key, wrong, right, tmp_path):
    twin_of("Model", "five heads", tmp_path)
    with pytest.raises(ValueError, match=rf"{key}.*{wrong!r}.*{right}"):
        load(change(tmp_path, **{key: wrong}))


def test_an_unknown_setting_is_refused(tmp_path):
    twin_of("Model", "five heads", tmp_path)
    with pytest.raises(ValueError, match=r"RoBERTa.*adapters.*'two'"):
        load(change(tmp_path, adapters="two"))


def test_a_decoder_is_not_offered(tmp_path):
    twin_of("ForMaskedLM", "five heads", tmp_path)
    with pytest.raises(ValueError, match=r"RobertaForCausalLM.*RoBERTa"):
        load(change(tmp_path, architectures=["RobertaForCausalLM"]))
