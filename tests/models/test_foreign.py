"""Files of other libraries are called what they are; those of transformers pass."""

from __future__ import annotations

import json

import pytest

from regard.models.family import refuse_foreign
from regard.models.loading import load

TIMM = {"architecture": "vit_base_patch16_224", "num_classes": 1000, "pretrained_cfg": {"tag": "augreg"}}


@pytest.mark.parametrize("name", ["LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaMptForCausalLM"])
@pytest.mark.parametrize("task", [None, "feature-extraction"])
def test_the_original_llava_is_refused_with_what_to_take_instead(tmp_path, name, task):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "llava"}))
    message = rf"config\.json.*LLaVA.*\({name}\).*llava-hf/llava-"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, task=task)


def test_a_file_of_timm_is_refused_with_what_to_take_instead(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TIMM))
    message = r"config\.json.*'vit_base_patch16_224'.*google/vit-.*regard\.watch"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"},
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": "LlavaLlamaForCausalLM"},
        {"architectures": []},
        TIMM | {"model_type": "vit"},
        {"architecture": "vit_base_patch16_224"},
        TIMM | {"architecture": 3},
    ],
)
def test_others_pass(values):
    assert refuse_foreign(values, "config.json") is None
