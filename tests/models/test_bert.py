from pathlib import Path

import pytest
import torch
from transformers import BertConfig
from twins import Twin, assert_same, assert_saved, texts

SMALL = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
SMALL |= {"max_position_embeddings": 23, "type_vocab_size": 3, "num_labels": 7}
OTHER = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 17}
OTHER |= {"max_position_embeddings": 13, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "tie_word_embeddings": False}
CONFIGS = {"five heads": SMALL, "own word table": OTHER}
HEADS = ["Model", "ForMaskedLM", "ForNextSentencePrediction", "ForPreTraining", "ForSequenceClassification"]
HEADS += ["ForTokenClassification", "ForQuestionAnswering"]


POOLED = {"ForNextSentencePrediction", "ForPreTraining", "ForSequenceClassification", "Model"}


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    return Twin("Bert" + head, BertConfig(**values), directory)


def inputs(side: str = "none") -> dict[str, torch.Tensor]:
    given = texts(31, side)
    types = torch.randint(0, 2, given["input_ids"].shape, generator=torch.Generator().manual_seed(5))
    return given if side == "none" else {**given, "token_type_ids": types}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    # With padding on the left transformers pools the padding, ours the first token: the last test here.
    for side in ("none", "right") if head in POOLED else ("none", "right", "left"):
        assert_same(twin, dtype, inputs(side))


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    twin = twin_of(head, "five heads", tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", inputs("right"))


@pytest.mark.parametrize("head", HEADS)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    model = twin_of(head, "five heads", tmp_path).ours(torch.float64)
    right, left = inputs("right"), inputs("left")
    ours = {}
    for side, given in (("right", right), ("left", left)):
        ids = right["input_ids"][right["attention_mask"]]  # the same tokens on both sides
        given["input_ids"] = torch.zeros_like(given["input_ids"]).masked_scatter(given["attention_mask"], ids)
        made = model(given["input_ids"], given["attention_mask"])
        ours[side] = made.logits if made.logits is not None else made.last_hidden_state
        if ours[side].shape[:2] == given["attention_mask"].shape:
            ours[side] = ours[side][given["attention_mask"]]
    torch.testing.assert_close(ours["left"], ours["right"], rtol=0, atol=1e-13)


def test_a_body_is_read_from_a_checkpoint_whose_head_does_not_pool(tmp_path):
    twin = twin_of("ForMaskedLM", "five heads", tmp_path)
    model = twin.ours(torch.float32, task="feature-extraction")
    result = model(**inputs())
    assert result.pooler_output is None
    assert result.logits is None
    assert torch.equal(result.last_hidden_state, twin.ours(torch.float32)(**inputs()).last_hidden_state)
