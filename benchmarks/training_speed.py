"""Training steps of GPT-2 124M (16 × 1024, bf16 autocast, fused AdamW) beside transformers, both compiled.

    python benchmarks/training_speed.py [--rounds 3] [--steps 10]

Models alternate in rounds; each line is the best round: tokens per second, and the peak memory of that model's steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import transformers

import regard

ROWS, LENGTH = 16, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config.architectures = ["GPT2LMHeadModel"]
    theirs = transformers.GPT2LMHeadModel(config).cuda()
    ours = regard.build(config, device="cuda")
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH), device="cuda")
    runs = {
        "transformers, compiled": stepper(torch.compile(theirs), {"input_ids": ids, "labels": ids}),
        "regard, compiled": stepper(torch.compile(ours), {"input_ids": ids, "labels": ids}),
        "regard, compiled, without logits": stepper(
            torch.compile(ours), {"input_ids": ids, "labels": ids, "skip_logits": True}
        ),
        "regard, eager, without logits": stepper(ours, {"input_ids": ids, "labels": ids, "skip_logits": True}),
        "transformers, eager": stepper(theirs, {"input_ids": ids, "labels": ids}),
    }
    best: dict[str, float] = {}
    memory: dict[str, float] = {}
    for name, step in list(runs.items()):
        try:
            for _ in range(3):
                step()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            del runs[name]
    for _ in range(given.rounds):
        for name, step in runs.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            start = time.perf_counter()
            for _ in range(given.steps):
                step()
            torch.cuda.synchronize()
            speed = given.steps * ROWS * LENGTH / (time.perf_counter() - start)
            best[name] = max(best.get(name, 0.0), speed)
            memory[name] = (torch.cuda.max_memory_allocated() - base) / 2**30
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name, speed in best.items():
        ratio = speed / best["transformers, compiled"]
        print(f"{name:36s} {speed / 1e3:7.0f}k tok/s  {ratio:5.2f} x  {memory[name]:6.1f} GiB above the weights")


def stepper(model: torch.nn.Module, batch: dict[str, object]) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
