"""Training steps beside transformers, both compiled (bf16 autocast, fused AdamW, clipping), and the monitor's share.

    python benchmarks/training_speed.py [gpt2] [bert] [vit] [monitor] [--rounds 3] [--steps 10]

gpt2     GPT-2 124M, 16 × 1024 tokens
bert     BERT-base, masked language model, 32 × 512 tokens
vit      ViT-B/16, 1,000 labels, 128 images
monitor  what a look of `regard.monitor` costs beside 50 compiled steps of GPT-2

Models alternate in rounds; each line is the best round: rows of the batch times positions per second, and the peak
memory of that model's steps. On a machine without CUDA the models are small, in fp32 and not compiled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def gpt2() -> tuple[Any, Any, dict[str, Any], str]:
    sizes = {} if CUDA else {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 5000}
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    rows, length = (16, 1024) if CUDA else (4, 256)
    ids = torch.randint(0, config.vocab_size, (rows, length), device=DEVICE)
    return config, transformers.GPT2LMHeadModel, {"input_ids": ids, "labels": ids}, "tokens"


def bert() -> tuple[Any, Any, dict[str, Any], str]:
    sizes = (
        {}
        if CUDA
        else {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    )
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    rows, length = (32, 512) if CUDA else (4, 128)
    ids = torch.randint(0, config.vocab_size, (rows, length), device=DEVICE)
    labels = torch.where(torch.rand(ids.shape, device=DEVICE) < 0.15, ids, -100)
    mask = torch.ones_like(ids)
    return config, transformers.BertForMaskedLM, {"input_ids": ids, "attention_mask": mask, "labels": labels}, "tokens"


def vit() -> tuple[Any, Any, dict[str, Any], str]:
    sizes = (
        {}
        if CUDA
        else {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    )
    config = transformers.ViTConfig(num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    rows = 128 if CUDA else 2
    pixels = torch.randn(rows, 3, 224, 224, device=DEVICE)
    labels = torch.randint(0, 1000, (rows,), device=DEVICE)
    return config, transformers.ViTForImageClassification, {"pixel_values": pixels, "labels": labels}, "images"


def stepper(model: torch.nn.Module, batch: dict[str, Any], *, cudnn: bool = False) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with (
            torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA),
            sdpa_kernel(CUDNN_FIRST, set_priority=True) if cudnn else nullcontext(),
        ):
            loss = model(**batch).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compare(name: str, rounds: int, steps: int) -> None:
    config, architecture, batch, unit = {"gpt2": gpt2, "bert": bert, "vit": vit}[name]()
    config.architectures = [architecture.__name__]
    theirs, ours = architecture(config).to(DEVICE), regard.build(config, device=DEVICE)
    compiled: Callable[[Any], Any] = torch.compile if CUDA else (lambda model: model)
    runs = {"transformers": stepper(compiled(theirs), batch), "regard": stepper(compiled(ours), batch)}
    if CUDA:
        runs["transformers, cuDNN attention"] = stepper(torch.compile(theirs), batch, cudnn=True)
        runs["regard, cuDNN attention"] = stepper(torch.compile(ours), batch, cudnn=True)
    if CUDA and name == "vit":  # compiled as a whole, it builds a mask that SDPA has no fused kernel for
        for layer in theirs.modules():
            if isinstance(layer, transformers.models.vit.modeling_vit.ViTLayer):
                layer.compile()
        runs["transformers, blocks compiled"] = stepper(theirs, batch)
    if name == "gpt2":
        runs["regard, without logits"] = stepper(compiled(ours), batch | {"skip_logits": True})
    if name == "bert":  # as recipes.MaskedLM calls it: only positions that may have a label are scored
        few = int(1.25 * 0.15 * batch["labels"].numel()) + 64
        runs["regard, labelled positions"] = stepper(compiled(ours), batch | {"skip_logits": True, "max_labels": few})
    best: dict[str, float] = {}
    memory: dict[str, float] = {}
    for label, step in list(runs.items()):
        try:
            torch.compiler.reset()  # each is compiled with its own setting
            for _ in range(3):
                step()
        except Exception as error:
            print(f"{label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            del runs[label]
    first = next(iter(batch.values()))
    count = first.shape[0] if unit == "images" else first.numel()
    for _ in range(rounds):
        for label, step in runs.items():
            start_memory()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize()
            best[label] = max(best.get(label, 0.0), steps * count / (time.perf_counter() - start))
            memory[label] = peak_memory()
    print(f"{name}: {tuple(first.shape)}, {'compiled, bf16' if CUDA else 'eager, fp32'}")
    for label, speed in best.items():
        ratio = speed / best["transformers"]
        print(f"  {label:32s} {speed:12,.0f} {unit}/s  {ratio:5.2f} x  {memory[label]:6.1f} GiB", flush=True)


def monitor_share(rounds: int) -> None:
    config, architecture, batch, _ = gpt2()
    config.architectures = [architecture.__name__]
    model = regard.build(config, device=DEVICE)
    step = stepper(torch.compile(model) if CUDA else model, batch)
    watching = regard.monitor(model, {"input_ids": batch["input_ids"][:1]}, every=1)
    for _ in range(3):
        step()
    watching.look(0)
    looks, fifty = [], []
    for _ in range(rounds):
        for seconds, do in ((looks, lambda: watching.look(1)), (fifty, lambda: [step() for _ in range(50)])):
            synchronize()
            start = time.perf_counter()
            do()
            synchronize()
            seconds.append(time.perf_counter() - start)
    look, steps = min(looks), min(fifty)
    print(f"monitor: a look {look * 1e3:.1f} ms, 50 steps {steps * 1e3:.0f} ms: {look / steps:.2%}", flush=True)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def start_memory() -> None:
    synchronize()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        global _base
        _base = torch.cuda.memory_allocated()


def peak_memory() -> float:
    return (torch.cuda.max_memory_allocated() - _base) / 2**30 if CUDA else float("nan")


_base = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=["gpt2", "bert", "vit", "monitor", []], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    machine = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    for name in given.names or ["gpt2", "bert", "vit", "monitor"]:
        if name == "monitor":
            monitor_share(given.rounds)
        else:
            compare(name, given.rounds, given.steps)


if __name__ == "__main__":
    main()
