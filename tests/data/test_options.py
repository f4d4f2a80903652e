"""preprocessor_config.json: keys that nobody reads, harmless or ignored. Of the steps: test_preprocessing.py."""

from __future__ import annotations

import json

import pytest
import torch
from seeing_twins import picture
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from regard.data.image_processing import KINDS, ImageProcessor, defaults, read_plan, without_ignored
from regard.models.config import Settings


@pytest.mark.parametrize("kind", KINDS)
def test_size_divisor_changes_nothing(kind):
    values = defaults(kind)
    assert read_plan(kind, Settings(values | {"size_divisor": 32})) == read_plan(kind, Settings(values))


def test_pixels_of_a_published_blip_are_those_of_transformers(tmp_path):
    """Salesforce's files say do_pad and size_divisor, and are neither padded nor divided."""
    values = {
        "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True, "resample": 3, "size_divisor": 32,
        "image_processor_type": "BlipImageProcessor", "processor_class": "BlipProcessor", "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "size": {"height": 29, "width": 31},
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    theirs = BlipImageProcessorPil.from_pretrained(tmp_path)(picture(), return_tensors="pt")["pixel_values"]
    ours = ImageProcessor.open(tmp_path)(picture()).pixels
    assert ours.shape == (1, 3, 29, 31)
    assert torch.equal(ours, theirs)


def test_only_keys_that_nobody_knows_are_left_out():
    values = {"size": 30, "do_thumbnail": True, "size_divisor": 32, "resample": 3, "crop_size": 7, "odd": None}
    assert without_ignored("ViT", values) == {key: value for key, value in values.items() if key != "do_thumbnail"}
    assert values["do_thumbnail"] is True
