"""Every family in bf16: logits, every layer and gradients under the rule; on the GPU too, where there is one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import Twin, assert_same, texts

HEADS = {
    "bert": "ForMaskedLM",
    "albert": "ForMaskedLM",
    "roberta": "ForMaskedLM",
    "longformer": "ForSequenceClassification",  # its first token is global
    "distilbert": "ForMaskedLM",
    "big_bird": "ForMaskedLM",
    "gpt2": "LMHeadModel",
    "llama": "ForCausalLM",
    "t5": "ForConditionalGeneration",
    "bart": "ForConditionalGeneration",
    "marian": "MTModel",
    "blip": "ForConditionalGeneration",
    "clip": "Model",
    "idefics": "ForVisionText2Text",
    "llava": "ForConditionalGeneration",
    "swin": "ForImageClassification",
}
TWO = {"t5", "bart", "marian"}
COUNTING = {"roberta", "distilbert", "longformer"}  # take no positions, or count them by the padding's id
PICTURED = {"blip", "clip", "idefics", "llava"}  # texts beside pictures, of the size that each configuration has


def twin_of(family: str, which: int, directory: Path) -> Twin:
    module = import_module(f"test_{family}")
    twin = module.twin_of(HEADS[family], list(module.CONFIGS)[which], directory)
    assert isinstance(twin, Twin)
    return twin


def inputs(family: str, which: int) -> dict[str, Any]:
    module = import_module(f"test_{family}")
    if family == "swin":  # pictures alone
        made = module.given(list(module.CONFIGS)[which])
        assert isinstance(made, dict)
        return made
    if family == "big_bird":  # texts that are long enough for blocks
        made = module.inputs("right")
        assert isinstance(made, dict)
        return made
    if family in PICTURED:
        made = module.inputs(HEADS[family], list(module.CONFIGS)[which], "right")
        assert isinstance(made, dict)
        return made
    if family not in TWO:
        return texts(29, "right", pad=1 if family in ("roberta", "longformer") else 0, first=7)
    given = texts(29, "right", first=7)
    count = torch.arange(given.pop("position_ids").shape[1])  # as transformers counts, padding too
    positions = {} if family == "t5" else {"position_ids": count}  # which knows distances only
    return {**given, **positions, "decoder_input_ids": texts(29, length=7, first=7)["input_ids"]}


def check(family: str, which: int, directory: Path, device: str) -> None:
    given = inputs(family, which)
    real = torch.ones_like(given["decoder_input_ids"], dtype=torch.bool) if family in TWO else None
    theirs = {"position_ids": None} if family in COUNTING else None
    if family in COUNTING:
        given.pop("position_ids")
    assert_same(twin_of(family, which, directory), torch.bfloat16, given, theirs, real=real, device=device)


@pytest.mark.parametrize("family", HEADS)
def test_every_family_holds_in_bf16(family, tmp_path):
    check(family, 0, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # in a thread of its own, the first time
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("family", HEADS)
def test_every_family_holds_in_bf16_on_a_gpu(family, which, tmp_path):
    check(family, which, tmp_path, "cuda")
