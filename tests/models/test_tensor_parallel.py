"""Tensor parallelism: two processes compute what one does, and what they cannot split is refused."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel_worker as worker
import torch
import transformers
from ranks import run_ranks
from torch import Tensor
from twins import build

import regard
from regard.testing import assert_rule

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 14}
CONFIGS: dict[str, tuple[str, Any]] = {
    "bert": ("BertForMaskedLM", transformers.BertConfig(vocab_size=47, hidden_size=24, **SHAPE)),
    "gpt2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(
            vocab_size=47, n_embd=20, n_layer=2, n_head=4, n_inner=14, bos_token_id=0, eos_token_id=0
        ),
    ),
    "llama": (
        "LlamaForCausalLM",
        transformers.LlamaConfig(vocab_size=46, hidden_size=20, head_dim=6, num_key_value_heads=2, **SHAPE),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config(
            vocab_size=47, d_model=21, d_kv=5, d_ff=14, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
        ),
    ),
    "vit": (
        "ViTForImageClassification",
        transformers.ViTConfig(hidden_size=20, image_size=30, patch_size=6, num_labels=7, **SHAPE),
    ),
}


def inputs() -> dict[str, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    ids, target = (torch.randint(3, 46, (5, n), generator=random) for n in (11, 7))
    mask = torch.arange(11) < torch.tensor([11, 3, 8, 10, 5])[:, None]
    pixels = torch.randn(3, 3, 30, 30, generator=random)
    decoder = {"input_ids": ids}
    return {
        "bert": {"input_ids": ids, "attention_mask": mask},
        "gpt2": decoder,
        "llama": decoder,
        "t5": {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target},
        "vit": {"pixel_values": pixels},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have left what they computed; they are started once, whoever of `pytest -n` comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tensor parallel"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            for name, (architecture, config) in CONFIGS.items():
                build(architecture, config, torch.float32).save_pretrained(folder / name)
            torch.save(inputs(), folder / "inputs.pt")
            run_ranks(worker.main, folder)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank {rank}.pt") for rank in range(2)]


def assert_as_one_process(ours: dict[str, Tensor], baseline: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """The logits, and every gradient, under the numeric rule; the scale of gradients is that of all of them."""
    assert ours.keys() == truth.keys()
    scale = max(float(t.abs().max()) for name, t in truth.items() if name.startswith("gradient"))
    for name, expected in truth.items():
        steep = name.startswith("gradient")
        assert_rule(ours[name], baseline[name], expected, gradient=steep, scale=scale if steep else None, what=name)


def widened(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in given.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_model_on_two_processes_is_the_model_on_one(name, folder, ranks):
    given = inputs()[name]
    baseline = worker.run(regard.load(folder / name), given)
    truth = worker.run(regard.load(folder / name, dtype=torch.float64), widened(given))
    for rank in ranks:
        assert_as_one_process(rank["models"][name], baseline, truth)
        if name in rank["plans"]:
            assert_as_one_process(rank["plans"][name], baseline, truth)
    assert torch.equal(ranks[0]["models"][name]["logits"], ranks[1]["models"][name]["logits"])


@pytest.mark.parametrize("name", worker.LAYERS)
def test_layer_on_two_processes_is_the_layer_on_one(name, ranks):
    baseline = worker.run(worker.layer(name), {"x": worker.x()})
    truth = worker.run(worker.layer(name).double(), {"x": worker.x().double()})
    for rank in ranks:
        assert_as_one_process(rank["models"][name], baseline, truth)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_two_processes_generate_what_one_does(name, folder, ranks):
    alone = worker.generated(folder, inputs(), None)[name]
    assert alone.shape == (5, 5)
    for rank in ranks:
        assert torch.equal(rank["generated"][name], alone)


REFUSED = {
    "3 heads": ("3 heads", "divide by 2"),
    "1 kv head": ("4 heads", "1 key/value heads", "divide by 2"),
    "d_ff": ("13 inner features", "divide by 2"),
    "shaw": ("Shaw",),
    "performer": ("PerformerAttention",),
    "longformer": ("SlidingAttention",),
    "nothing to split": ("Linear", "without any attention"),
    "twice": ("MultiHeadAttention", "split already"),
    "fused, plain plan": ("all 60 features", "got 30", "separate()"),
    "fused, rotary, plain plan": ("all 72 features", "got 36", "separate()"),
    "fused, plain plan, context": ("all 60 features", "got 30", "separate()"),
    "gated, plain plan": ("all 28 features", "got 14", "separate()"),
    "3 heads, plain plan": ("6 features", "heads of 4"),
    "2 of 4 queries, all keys": ("2 of 4 query heads", "2 of 2 key/value heads"),
    "w_o whole": ("2 of 4 heads", "w_o takes 20 features"),
    "alibi, plain plan": ("4 heads", "the call has 2"),
    "head norms, plain plan": ("2 of 4 heads", "norms"),
    "performer, plain plan": ("PerformerAttention", "4 query and 4 key/value heads", "gave 2 and 2"),
    "big bird, plain plan": ("BlockAttention", "4 query and 4 key/value heads", "gave 2 and 2"),
    "mask by head": ("(1, 4, 6, 6)", "(3, 2, 6, 6)"),
    "save": ("tower.blocks.0.attention.w_q.weight", "gather(model)"),
}


def test_what_cannot_be_split_is_refused(ranks):
    for rank in ranks:
        assert rank["refusals"].pop("DTensor")[0] == "TypeError"
        assert rank["refusals"].keys() == REFUSED.keys()
        for name, (kind, message) in rank["refusals"].items():
            assert kind == "ValueError", (name, kind, message)
            assert all(words in message for words in REFUSED[name]), (name, message)


def test_each_process_sees_its_own_heads_and_says_which(ranks):
    layer = worker.layer("fused, grouped, rotary")
    with regard.watch(layer) as seen, torch.no_grad():
        layer(worker.x())
    for number, rank in enumerate(ranks):
        watched, heads = rank["watched"], [2 * number, 2 * number + 1]
        assert watched["local_heads"] == heads
        assert f"local_heads=range({heads[0]}, {heads[1] + 1})" in watched["repr"]
        torch.testing.assert_close(watched["entropy"], seen[0].entropy[:, heads])
        assert watched["cached heads"] == 1
        (warning,) = watched["warnings"]
        assert f"{heads[0]} to {heads[1]}" in warning
