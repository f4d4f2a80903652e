"""Edits, gradients and rollout at length: python benchmarks/edits.py [--length 32768] [--layers 16]

A LLaMA-like model (d 1024, 16 heads), bf16 on a GPU. Ratios of alternating runs in one process, and peak memory above
the weights; N×N weights of one layer would take 2·H·N² bytes (32 GiB at 32,768).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import regard
from regard import edits

CUDA = torch.cuda.is_available()


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and GiB above what was there before."""
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    start = time.perf_counter()
    run()
    if CUDA:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated() - base) / 2**30 if CUDA else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768 if CUDA else 1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    device, n = "cuda" if CUDA else "cpu", given.length
    model = regard.build(
        "llama", hidden_size=1024, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=given.layers,
        intermediate_size=2048, vocab_size=512, max_position_embeddings=n, device=device,
    ).eval()  # fmt: skip
    model = model.to(torch.bfloat16) if CUDA else model
    ids = torch.randint(0, 512, (1, n), device=device)
    single = edits.knock_out(given.layers // 2, 3, n - 1, n // 2)
    machine = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}, {given.layers} layers, {n:,} tokens", flush=True)

    @torch.no_grad()
    def plain() -> None:
        model(ids)

    @torch.no_grad()
    def knocked() -> None:
        with regard.edit(model, single):
            model(ids)

    def backward() -> None:
        model(ids).logits[0, -1].float().logsumexp(-1).backward()
        model.zero_grad(set_to_none=True)

    def gradients() -> None:
        with regard.watch(model, keep=["qk", "v"], measures=["entropy"], gradients=True) as seen:
            model(ids).logits[0, -1].float().logsumexp(-1).backward()
        model.zero_grad(set_to_none=True)
        for name in seen.names:
            seen[name].weighted_gradients(n - 1)

    for title, base, edited in (("knock-out of one row", plain, knocked), ("gradient × weight", backward, gradients)):
        try:
            for run in (base, edited):
                run()
            pairs = [(timed(base), timed(edited)) for _ in range(given.rounds)]
        except Exception as error:
            print(f"{title}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        before, after = (min(pair[which] for pair in pairs) for which in (0, 1))
        print(
            f"{title:22s} {before[0] * 1e3:8.1f} ms → {after[0] * 1e3:8.1f} ms  {after[0] / before[0]:5.2f} x   "
            f"{before[1]:.2f} → {after[1]:.2f} GiB",
            flush=True,
        )
    with torch.no_grad(), regard.watch(model, keep="qk", measures=["entropy"]) as seen:
        model(ids)
    seconds, memory = timed(lambda: seen.rollout(n - 1))
    print(f"rollout of one token   {seconds * 1e3:8.1f} ms through {given.layers} layers, {memory:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
