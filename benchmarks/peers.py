"""A model of ours and the same one of a peer, timed in turn: what the benchmarks of models share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from timing import cuda_time
from torch import Tensor, nn

from regard.models.family import Config, empty, family_of
from regard.models.model import Model

HEADERS = ["", "transformers ms", "ours ms", "ratio", "middle half"]

Run = Callable[[], object]


def in_turn(a: Run, b: Run, clock: Callable[[Run], float], rounds: int) -> tuple[list[float], list[float]]:
    """Both timed in turn after a warm-up of each; neither is always the one that comes after the other."""
    for call in (a, b, a, b):
        call()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(clock((a, b)[which]))
    return times


def once(call: Run) -> float:
    """Seconds of one call; what it made is let go of afterwards, which is not loading."""
    start = time.perf_counter()
    made = call()
    taken = time.perf_counter() - start
    del made
    return taken


def compared(name: str, theirs: Run, ours: Run, rounds: int) -> list[str]:
    """A row: both medians in ms, and the ratio with its spread."""
    a, b = in_turn(theirs, ours, once, rounds)
    low, middle, high = statistics.quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
    times = [f"{statistics.median(side) * 1e3:.1f}" for side in (a, b)]
    return [name, *times, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


# --------------------------------------------------------------------------------------------------------------- CUDA


def on_device(config: Any, task: str) -> Model:
    """Our model of this shape with random bf16 weights, made where they are used."""
    values = Config(config.to_dict())
    model = empty(family_of(values), values, task)
    for name, p in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        drawn = torch.randn(p.shape, device="cuda", dtype=torch.bfloat16) * 0.02
        setattr(model.get_submodule(owner), leaf, nn.Parameter(drawn, requires_grad=False))
    return model.eval()


def theirs_on_device(architecture: str, config: Any) -> Any:
    """The same model of `transformers`, with sdpa."""
    config._attn_implementation = "sdpa"
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return getattr(transformers, architecture)(config).eval()
    finally:
        torch.set_default_dtype(kept)


def by_turns(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """The median of each one's seconds per call, all of them timed in turn after all are compiled and warm."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            print(f"{name}: warm after {time.perf_counter() - start:.0f} s", flush=True)
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(cuda_time(run, 20))
    return {name: statistics.median(taken) for name, taken in times.items()}


def generation_times(kind: str, run: Callable[[], Tensor], new: int, rounds: int) -> list[float]:
    """Seconds of each round, after two that compile and capture what there is to. new: tokens that a call makes."""
    start = time.perf_counter()
    for _ in range(2):
        made = run()
    torch.cuda.synchronize()
    print(f"{kind}: warm after {time.perf_counter() - start:.0f} s", flush=True)
    assert len(made) * made.shape[1] >= new, made.shape
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        print(f"{kind}: {new / times[-1]:.0f} tok/s", flush=True)
    return times


def generated(runs: dict[str, Callable[[], Tensor]], new: int, rounds: int) -> dict[str, list[float]]:
    """`generation_times` of each; what a peer's version does not have for this model is left out, and said."""
    taken: dict[str, list[float]] = {}
    for kind, run in runs.items():
        try:
            taken[kind] = generation_times(kind, run, new, rounds)
        except Exception as error:
            if kind == "ours":
                raise
            print(f"{kind}: not run: {error}", flush=True)
    return taken
