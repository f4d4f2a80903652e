from pathlib import Path

import pytest
import torch
from transformers import ElectraConfig, ElectraForPreTraining
from twins import Twin, assert_same, assert_saved, assert_side_of_padding_changes_nothing, change, texts

import regard
from regard.models.loading import load

SMALL = {
    "vocab_size": 47,
    "embedding_size": 12,
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 29,
    "max_position_embeddings": 23,
    "num_labels": 7,
}
OTHER = {
    "vocab_size": 31,
    "embedding_size": 12,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 17,
    "max_position_embeddings": 11,
    "type_vocab_size": 3,
    "num_labels": 3,
    "hidden_act": "relu",
    "layer_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CONFIGS = {"narrow embedding": SMALL, "one width, own lm_head": OTHER}
HEADS = [
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
]


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    return Twin("Electra" + head, ElectraConfig(**values), directory)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    # With padding on the left transformers labels the padding, ours the first token: the test of sides below.
    for side in ("none", "right") if head == "ForSequenceClassification" else ("none", "right", "left"):
        assert_same(twin, dtype, texts(31, side))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", [head for head in HEADS if head != "ForPreTraining"])
def test_what_we_save_transformers_opens(head, config, tmp_path):
    assert_saved(twin_of(head, config, tmp_path / "theirs"), tmp_path / "ours", texts(31, "right"))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_discriminator_that_we_save_transformers_opens(config, tmp_path):
    """By its weights: logits of a matrix with one row round by its alignment in memory, which a mapped file changes."""
    twin = twin_of("ForPreTraining", config, tmp_path / "theirs")
    twin.ours(torch.float32).save(tmp_path / "ours")
    again, info = ElectraForPreTraining.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = twin.baseline(torch.float32).state_dict()
    assert {name: torch.equal(value, expected[name]) for name, value in again.state_dict().items()} == dict.fromkeys(
        expected, True
    )


@pytest.mark.parametrize("head", HEADS)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    assert_side_of_padding_changes_nothing(twin_of(head, "narrow embedding", tmp_path).ours(torch.float64))


def test_the_discriminator_gives_one_logit_per_token(tmp_path):
    model = twin_of("ForPreTraining", "narrow embedding", tmp_path).ours(torch.float32)
    assert model.task == "replaced-token-detection"
    assert model(torch.full((2, 5), 7)).logits.shape == (2, 5)
    with pytest.raises(ValueError, match=r"fill.*'fill-mask'.*ELECTRA.*'replaced-token-detection'"):
        model.fill("a [MASK] sat")


def test_a_body_is_read_from_a_discriminator(tmp_path):
    twin_of("ForPreTraining", "narrow embedding", tmp_path)
    assert load(tmp_path, task="feature-extraction").head is None


@pytest.mark.parametrize(
    ("key", "wrong", "right"), [("position_embedding_type", "relative_key", "absolute"), ("is_decoder", True, "False")]
)
def test_a_key_that_changes_the_maths_is_refused(key, wrong, right, tmp_path):
    twin_of("Model", "narrow embedding", tmp_path)
    with pytest.raises(ValueError, match=rf"{key}.*{wrong!r}.*{right}"):
        load(change(tmp_path, **{key: wrong}))


@pytest.mark.parametrize("head", ["ForPreTraining", "ForMaskedLM"])
def test_verify_finds_generator_and_discriminator_the_same(head, tmp_path):
    twin_of(head, "narrow embedding", tmp_path)
    assert bool(regard.verify(tmp_path))
