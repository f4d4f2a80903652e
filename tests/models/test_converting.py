"""The call that converts pickled weights keeps the head, and says what else to copy."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from twins import build

from regard.models.loading import conversion

BESIDE = "AutoTokenizer"


def test_the_class_that_config_json_names_is_in_the_call(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel", "GPT2Model"]}))
    said = conversion(tmp_path, "'owner/name'")
    assert said.startswith("GPT2LMHeadModel.from_pretrained('owner/name').save_pretrained(new_directory)")
    assert BESIDE in said


@pytest.mark.parametrize(
    "config",
    [None, "{", "[]", "{}", '{"architectures": []}', '{"architectures": "A"}', '{"architectures": ["os.system(1)"]}'],
)
def test_without_a_class_the_call_says_which_one_it_would_be(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    said = conversion(tmp_path)
    assert said.startswith("C.from_pretrained(directory).save_pretrained(new_directory)")
    for named in ("config.json", "architectures", "AutoModel", BESIDE):
        assert named in said


def test_the_call_keeps_every_tensor(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
    config = transformers.ViTConfig(**sizes, image_size=12, patch_size=6, id2label={0: "cat", 1: "dog", 2: "hat"})
    kind = transformers.ViTForImageClassification
    build(kind.__name__, config, torch.float32).save_pretrained(old)
    tensors = load_file(old / "model.safetensors")
    torch.save(tensors, old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    call = conversion(old).split(";")[0]
    eval(call, {"directory": old, "new_directory": new}, {kind.__name__: kind})
    again = load_file(new / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
