"""One process of a tensor-parallel run of two.

It reads models and inputs from the folder and leaves there what this process computed. `run`, `layer` and `generated`
also serve the test itself, which computes the same in one process.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import regard
from regard.generation.loop import generate
from regard.models.tensor_parallel import gather, parallelize
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import FeedForward
from regard.nn.performer import PerformerAttention
from regard.nn.sparse_attention import BlockAttention, BlockPattern, SlidingAttention
from regard.positions import Rotary, Shaw, Swin, alibi

WIDE = {"num_heads": 4, "head_dim": 5}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "separate": lambda: MultiHeadAttention(21, **WIDE),
    "separate, grouped": lambda: MultiHeadAttention(21, **WIDE, num_kv_heads=2, bias=False),
    "fused": lambda: MultiHeadAttention(21, **WIDE, fused=True),
    "fused, grouped, rotary": lambda: MultiHeadAttention(
        21, 4, head_dim=6, num_kv_heads=2, fused=True, position=Rotary(6), scale=0.7
    ),
    "alibi": lambda: MultiHeadAttention(21, **WIDE, position=alibi(4)),
    "swin": lambda: MultiHeadAttention(21, **WIDE, fused=True, position=Swin((2, 3), 4)),
    "head norms": lambda: MultiHeadAttention(21, **WIDE, fused=True, head_norms=(nn.RMSNorm(5), nn.LayerNorm(5))),
    "feed-forward": lambda: FeedForward(21, 14, "gelu"),
    "gated feed-forward": lambda: FeedForward(21, 14, "silu", gated=True),
}
PLAN = {name: ColwiseParallel() for name in ("w_q", "w_k", "w_v")} | {"w_o": RowwiseParallel()}
BLOCK = {f"attention.{name}": style for name, style in PLAN.items()}
GATED = {"w_gate": ColwiseParallel(), "w_up": ColwiseParallel(), "w_out": RowwiseParallel()}
PLAIN = {"w_in": ColwiseParallel(), "w_out": RowwiseParallel()}
WORDS = {
    "tower.embed.tokens": RowwiseParallel(input_layouts=Replicate()),
    "head.words": ColwiseParallel(output_layouts=Replicate()),
}


def layer(name: str) -> nn.Module:
    """A layer whose weights are the same in every process; those that start as 0 or 1 are drawn too."""
    torch.manual_seed(5)
    made = LAYERS[name]()
    for p in made.parameters():
        nn.init.normal_(p, std=0.4)
    return made


def x() -> Tensor:
    """(B, N, d) for the layers."""
    return torch.randn(3, 6, 21, generator=torch.Generator().manual_seed(7))


def run(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits, and the gradient of a fixed random projection of them to every weight of the whole model, by name."""
    result = model(**inputs)
    logits = result if isinstance(result, Tensor) else result.logits
    towards = torch.randn(logits.shape, generator=torch.Generator().manual_seed(13))
    (logits * towards.to(logits)).sum().backward()
    with torch.no_grad():  # so that `gather` puts them together, and under the names that the weights had
        for p in model.parameters():
            p.zero_() if p.grad is None else p.copy_(p.grad)
    return {"logits": logits.detach().clone()} | {f"gradient of {name}": g for name, g in gather(model).items()}


def spoilt(model: nn.Module, rank: int) -> nn.Module:
    """The model with other weights in every process but the first, whose weights are those that count."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    return model


def models(folder: Path, given: dict[str, dict[str, Tensor]], mesh: DeviceMesh) -> dict[str, Any]:
    """Every model and layer, split by `parallelize`."""
    made = {}
    for name, inputs in given.items():
        model = spoilt(regard.load(folder / name), mesh.get_rank())
        parallelize(model, mesh)
        made[name] = run(model, inputs)
    for name in LAYERS:
        split = spoilt(layer(name), mesh.get_rank())
        parallelize(split, mesh)
        made[name] = run(split, {"x": x()})
    return made


def plans(folder: Path, given: dict[str, dict[str, Tensor]], mesh: DeviceMesh) -> dict[str, Any]:
    """Plans that users write: torch's own styles, after `separate` where projections are fused."""
    bert, llama = regard.load(folder / "bert"), regard.load(folder / "llama")
    for block in llama.tower.blocks:
        block.attention.separate()
        block.feed_forward.separate()
    for model, inner, more in ((bert, PLAIN, {}), (llama, GATED, WORDS)):
        plan = BLOCK | {f"feed_forward.{name}": style for name, style in inner.items()}
        parallelize_module(model, mesh, {f"tower.blocks.*.{name}": style for name, style in plan.items()} | more)
    return {"bert": run(bert, given["bert"]), "llama": run(llama, given["llama"])}


def generated(folder: Path, given: dict[str, dict[str, Tensor]], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Greedy ids, with a cache of this process's heads."""
    made = {}
    for name in ("gpt2", "llama", "t5"):
        model = regard.load(folder / name, dtype=torch.float64)
        if mesh is not None:
            parallelize(model, mesh)
        ids, decoder = given[name]["input_ids"], model
        with torch.no_grad():
            if name == "t5":
                decoder, ids = model.read(ids, given[name]["attention_mask"]), torch.zeros_like(ids[:, :1])
            made[name] = generate(decoder, ids, None, max_new_tokens=5, pad_token_id=0).ids
    return made


def refusals(folder: Path, mesh: DeviceMesh) -> dict[str, tuple[str, str]]:
    """The kind and the words of every error, in the order in which both processes meet them."""
    said = {}

    def refused(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            said[name] = (type(error).__name__, str(error))
        else:
            said[name] = ("nothing", "")

    def planned(made: nn.Module, plan: dict[str, Any]) -> nn.Module:
        return parallelize_module(made, mesh, plan)

    def without(*names: str) -> dict[str, Any]:
        return {name: style for name, style in PLAN.items() if name not in names}

    # what `parallelize` refuses, before it changes anything
    odd = {
        "3 heads": MultiHeadAttention(21, 3),
        "1 kv head": MultiHeadAttention(21, **WIDE, num_kv_heads=1),
        "d_ff": FeedForward(21, 13, "gelu"),
        "shaw": MultiHeadAttention(21, **WIDE, position=Shaw(5, 3)),
        "performer": PerformerAttention(21, 4, head_dim=5),
        "longformer": SlidingAttention(20, 4, reach=2),
        "nothing to split": nn.Linear(4, 4),
    }
    for name, made in odd.items():
        before = copy.deepcopy(made.state_dict())
        refused(name, lambda made=made: parallelize(made, mesh))
        assert all(torch.equal(value, made.state_dict()[key]) for key, value in before.items())
    frozen = layer("head norms").requires_grad_(False)
    parallelize(frozen, mesh)
    assert not any(p.requires_grad for p in frozen.parameters())
    twice = MultiHeadAttention(21, **WIDE)
    parallelize(twice, mesh)
    refused("twice", lambda: parallelize(twice, mesh))

    # what a layer refuses of a plan that does not fit it
    fused, grouped = {"w_qkv": ColwiseParallel(), "w_o": RowwiseParallel()}, {**WIDE, "num_kv_heads": 2}
    calls = {
        "fused, plain plan": (MultiHeadAttention(20, 4, fused=True), fused),
        "fused, rotary, plain plan": (MultiHeadAttention(24, 4, fused=True, position=Rotary(6)), fused),
        "gated, plain plan": (FeedForward(20, 14, "silu", gated=True), PLAIN),
        "3 heads, plain plan": (MultiHeadAttention(12, 3), PLAN),
        "2 of 4 queries, all keys": (MultiHeadAttention(20, **grouped), without("w_k", "w_v")),
        "w_o whole": (MultiHeadAttention(20, 4), without("w_o")),
        "DTensor": (MultiHeadAttention(20, 4), PLAN | {"w_q": ColwiseParallel(use_local_output=False)}),
        "alibi, plain plan": (MultiHeadAttention(20, 4, position=alibi(4)), PLAN),
        "head norms, plain plan": (MultiHeadAttention(20, 4, head_norms=(nn.LayerNorm(5), nn.LayerNorm(5))), PLAN),
        "performer, plain plan": (PerformerAttention(20, 4), PLAN),
    }
    for name, (made, plan) in calls.items():
        split, width = planned(made, plan), made.d_model if hasattr(made, "d_model") else 20
        refused(name, lambda split=split, width=width: split(torch.zeros(2, 6, width)))
    cross = planned(MultiHeadAttention(20, 4, fused=True), fused)
    refused("fused, plain plan, context", lambda: cross(torch.zeros(2, 6, 20), torch.zeros(2, 7, 20)))
    blocks = BlockAttention(20, 4, BlockPattern(2, 1, 0, 64))
    blocks.separate()
    planned(blocks, PLAN)
    refused("big bird, plain plan", lambda: blocks(torch.zeros(1, 20, 20)))
    masked = layer("separate")
    parallelize(masked, mesh)
    refused("mask by head", lambda: masked(x(), mask=torch.ones(1, 4, 6, 6, dtype=torch.bool)))
    bert = regard.load(folder / "bert")
    parallelize(bert, mesh)
    refused("save", lambda: bert.save(folder / f"saved {mesh.get_rank()}"))
    assert not (folder / f"saved {mesh.get_rank()}").exists()
    return said


def watched(mesh: DeviceMesh) -> dict[str, Any]:
    """What is seen of this process's heads, and what says which they are."""
    split = layer("fused, grouped, rotary")
    parallelize(split, mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with regard.watch(split) as seen, torch.no_grad():
            split(x())
    return {
        "entropy": seen[0].entropy,
        "warnings": [str(w.message) for w in said if w.category is UserWarning],
        "local_heads": list(split.local_heads),
        "repr": repr(split),
        "cached heads": split.new_cache(3, 7, dtype=torch.float32, device="cpu").room[0].shape[1],
    }


def main(folder: Path) -> None:
    """Compute everything and leave it in the folder."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=180))
    try:
        mesh = init_device_mesh("cpu", (2,))
        given = torch.load(folder / "inputs.pt")
        made = {
            "models": models(folder, given, mesh),
            "plans": plans(folder, given, mesh),
            "generated": generated(folder, given, mesh),
            "refusals": refusals(folder, mesh),
            "watched": watched(mesh),
        }
        torch.save(made, folder / f"rank {rank}.pt")
    finally:
        dist.destroy_process_group()
