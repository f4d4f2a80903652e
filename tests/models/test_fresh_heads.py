"""`regard.load` with num_labels or labels: a new head on a checkpoint, which transformers opens after saving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regard
from regard.models.model import Model

TEXT = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
BERT = TEXT | {"vocab_size": 31, "max_position_embeddings": 16}
VIT = TEXT | {"image_size": 12, "patch_size": 4}
GPT2 = {"vocab_size": 31, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 16, "pad_token_id": 0}
SIDES = {f"{side}_{key}": 1 for side in ("encoder", "decoder") for key in ("layers", "attention_heads", "ffn_dim")}
BART = SIDES | {"vocab_size": 31, "d_model": 12, "max_position_embeddings": 16, "pad_token_id": 1, "bos_token_id": 0}
BART |= {"eos_token_id": 2, "decoder_start_token_id": 2}
T5 = {"vocab_size": 31, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 1, "num_heads": 3, "eos_token_id": 1}
T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0}
SWIN = {"image_size": 12, "patch_size": 2, "embed_dim": 6, "depths": [1], "num_heads": [3], "window_size": 3}
STORED: dict[str, dict[str, Any]] = {
    "bert": {"config": "bert", "task": "fill-mask", **BERT},
    "bert with a pooler": {"config": "bert", "task": "pretraining", **BERT},
    "bert classifier": {"config": "bert", "task": "text-classification", "num_labels": 3, **BERT},
    "bert tagger": {"config": "bert", "task": "token-classification", "num_labels": 3, **BERT},
    "roberta": {"config": "roberta", **BERT, "max_position_embeddings": 18, "pad_token_id": 1},
    "roberta classifier": {
        "config": "roberta", "task": "text-classification", "num_labels": 3, **BERT, "pad_token_id": 1
    },
    "distilbert": {
        "config": "distilbert", "vocab_size": 31, "dim": 12, "hidden_dim": 17, "n_layers": 1, "n_heads": 3,
        "max_position_embeddings": 16,
    },
    "albert": {"config": "albert", **BERT, "embedding_size": 7},
    "electra": {"config": "electra", **BERT, "embedding_size": 7},
    "gpt2": {"config": "gpt2", **GPT2},
    "bart": {"config": "bart", **BART},
    "t5": {"config": "t5", **T5},
    "marian": {"config": "marian", **BART},
    "vit": {"config": "vit", "num_labels": 4, **VIT},
    "vit body": {"config": "vit", "task": "feature-extraction", **VIT},
    "deit": {"config": "deit", "task": "image-classification", "num_labels": 4, **VIT},
    "swin": {"config": "swin", "num_labels": 4, **SWIN},
    "clip": {
        "config": "clip", "vision_config": VIT, "projection_dim": 7,
        "text_config": BERT | {"bos_token_id": 1, "eos_token_id": 2},
    },
    "dinov2": {
        "config": "dinov2", "task": "feature-extraction", **{k: v for k, v in VIT.items() if k != "intermediate_size"}
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The directory of a checkpoint by its name; each is made once, with weights that differ from any initial ones."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            values = dict(STORED[name])
            model = regard.build(values.pop("config"), seed=3, **values)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            made[name] = tmp_path_factory.mktemp("model")
            model.save(made[name])
        return made[name]

    return directory


def inputs(model: Model) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(2)
    if model.kind == "vision":
        return {"pixel_values": torch.randn(3, 3, 12, 12, generator=draws)}
    ids = torch.randint(5, 31, (3, 9), generator=draws)
    ids[:, -1] = model.config.values.get("eos_token_id") or 2
    return {"input_ids": ids}


def logits(output: Any) -> torch.Tensor:
    if output.get("start_logits") is not None:
        return torch.stack([output["start_logits"], output["end_logits"]], -1)
    return output["logits"]


@pytest.mark.parametrize(
    ("name", "task", "labels"),
    [
        ("bert", "text-classification", ["bad", "good", "나쁨"]),
        ("bert", "token-classification", ["O", "B", "I"]),
        ("bert", "question-answering", ["start", "end"]),
        ("bert with a pooler", "text-classification", ["only"]),
        ("bert classifier", "text-classification", ["bad", "good"]),
        ("roberta", "text-classification", ["bad", "good"]),
        ("roberta", "token-classification", ["bad", "good"]),
        ("roberta classifier", "text-classification", ["bad", "good"]),
        ("distilbert", "text-classification", ["bad", "good"]),
        ("albert", "text-classification", ["bad", "good"]),
        ("electra", "text-classification", ["bad", "good"]),
        ("gpt2", "text-classification", ["bad", "good"]),
        ("gpt2", "question-answering", ["start", "end"]),
        ("bart", "text-classification", ["bad", "good"]),
        ("t5", "text-classification", ["bad", "good"]),
        ("t5", "question-answering", ["start", "end"]),
        ("vit", "image-classification", ["cat", "dog"]),
        ("vit body", "image-classification", ["cat", "dog"]),
        ("deit", "image-classification", ["cat", "dog"]),
        ("deit", "image-classification-cls", ["cat", "dog"]),
        ("swin", "image-classification", ["cat", "dog"]),
        ("dinov2", "image-classification", ["cat", "dog"]),
        ("clip", "image-classification", ["cat", "dog"]),
    ],
)
def test_a_new_head_is_saved_and_opened_by_transformers(name, task, labels, stored, tmp_path):
    model = regard.load(stored(name), task=task, labels=labels)
    with torch.no_grad():
        output = logits(model(**inputs(model)))
    assert output.shape[-1] == len(labels)
    assert model.config.labels() == tuple(labels)
    body = regard.load(stored(name), task=model.family.bare_task)
    weights = dict(body.named_parameters())
    if name == "clip":
        weights = {f"tower.{key}": parameter for key, parameter in body.vision.named_parameters()}
    kept = [key for key, _ in model.named_parameters() if key.startswith(("tower.", "encoder.", "decoder."))]
    assert kept
    assert all(torch.equal(model.get_parameter(key), weights[key]) for key in kept)

    model.save(tmp_path)
    again = regard.load(tmp_path)
    assert again.task == task
    assert again.config.labels() == tuple(labels)
    theirs = getattr(transformers, model.family.tasks[task].architecture).from_pretrained(tmp_path).eval()
    assert theirs.config.id2label == dict(enumerate(labels))
    assert theirs.config.label2id == {label: number for number, label in enumerate(labels)}
    with torch.no_grad():
        assert torch.equal(logits(again(**inputs(model))), output)
        torch.testing.assert_close(logits(theirs(**inputs(model))), output, rtol=1e-5, atol=1e-5)


def test_new_heads_are_initial_weights_of_the_family(stored):
    model = regard.load(stored("bert"), num_labels=300)
    assert model.task == "text-classification"
    assert not model.training
    assert model.config.labels()[299] == "LABEL_299"
    head = model.head.score
    assert head.weight.shape == (300, 12)
    assert abs(float(head.weight.detach().std()) - 0.02) < 0.002
    assert not head.bias.any()
    again = regard.load(stored("bert"), num_labels=300)
    assert torch.equal(again.head.score.weight, head.weight)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    half = regard.load(stored("bert"), num_labels=3, dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in half.parameters())


def test_a_pooler_is_kept_where_there_is_one_and_drawn_where_not(stored):
    pooled = regard.load(stored("bert with a pooler"), task="feature-extraction").pooler.state_dict()
    kept = regard.load(stored("bert with a pooler"), num_labels=3).pooler.state_dict()
    drawn = regard.load(stored("bert"), num_labels=3).pooler.state_dict()
    assert kept
    assert all(torch.equal(kept[key], pooled[key]) for key in pooled)
    for key, value in drawn.items():
        assert abs(float(value.std()) - (0.02 if key.endswith("weight") else 0.0)) < 0.01


@pytest.mark.parametrize("name", ["bert classifier", "bert tagger", "roberta classifier", "vit", "swin", "deit"])
def test_a_head_that_fits_is_kept(name, stored):
    whole = regard.load(stored(name))
    count = whole.config.num_labels()
    model = regard.load(stored(name), labels=[f"name {number}" for number in range(count)])
    assert model.task == whole.task
    assert model.config.labels()[0] == "name 0"
    expected = whole.state_dict()
    assert expected.keys() == model.state_dict().keys()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_the_parts_of_a_head_that_fit_are_kept(stored):
    """RoBERTa's classifier has a dense layer before its labels."""
    whole, model = regard.load(stored("roberta classifier")), regard.load(stored("roberta classifier"), num_labels=7)
    fits = [key for key, value in whole.head.state_dict().items() if model.head.state_dict()[key].shape == value.shape]
    assert 0 < len(fits) < len(whole.head.state_dict())
    assert all(torch.equal(model.head.state_dict()[key], whole.head.state_dict()[key]) for key in fits)


def test_labels_without_a_task_stay_with_the_checkpoints_own_classifier(stored):
    assert regard.load(stored("bert tagger"), num_labels=5).task == "token-classification"
    assert regard.load(stored("gpt2"), num_labels=5).task == "text-classification"
    assert regard.load(stored("vit body"), num_labels=5).task == "image-classification"


def test_a_checkpoint_with_a_head_that_regard_does_not_have_gets_a_new_one(stored, tmp_path):
    config = shutil.copytree(stored("bert"), tmp_path / "model") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["BertForMultipleChoice"]}))
    with pytest.raises(ValueError, match="BertForMultipleChoice"):
        regard.load(tmp_path / "model")
    assert regard.load(tmp_path / "model", num_labels=2).task == "text-classification"


@pytest.mark.parametrize(
    ("name", "options", "error", "value"),
    [
        ("bert", {"num_labels": 0}, ValueError, "0"),
        ("bert", {"num_labels": -2}, ValueError, "-2"),
        ("bert", {"num_labels": 2.0}, TypeError, "2.0"),
        ("bert", {"num_labels": True}, TypeError, "True"),
        ("bert", {"labels": []}, ValueError, "0"),
        ("bert", {"labels": ["good", "good"]}, ValueError, "good"),
        ("bert", {"labels": ["bad", "good"], "num_labels": 3}, ValueError, "3.*good"),
        ("bert", {"labels": "good"}, TypeError, "good"),
        ("bert", {"labels": [0, 1]}, TypeError, "0, 1"),
        ("bert", {"num_labels": 3, "task": "fill-mask"}, ValueError, "fill-mask.*3"),
        ("bert", {"num_labels": 2, "task": "feature-extraction"}, ValueError, "feature-extraction"),
        ("bert", {"num_labels": 3, "task": "question-answering"}, ValueError, "question-answering.*3"),
        ("gpt2", {"num_labels": 3, "task": "text-generation"}, ValueError, "text-generation"),
        ("marian", {"num_labels": 3}, ValueError, "text2text-generation"),
        ("vit", {"num_labels": 3, "task": "text-classification"}, ValueError, "text-classification"),
        ("bert", {"task": "text-classification"}, ValueError, "classifier"),  # no head, and no number of labels
    ],
)
def test_wrong_labels_are_refused(name, options, error, value, stored):
    with pytest.raises(error, match=value):
        regard.load(stored(name), **options)


def test_build_refuses_labels_for_a_task_without_them():
    with pytest.raises(ValueError, match=r"fill-mask.*3"):
        regard.build("bert", num_labels=3, **BERT)
