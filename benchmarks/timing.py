"""How the benchmarks time things: alternately, in one process, and what they write down with it."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import regard
from regard import tables
from regard.files import atomic_file


def heading(what: str, device: str, note: str) -> str:
    """What was timed, on which machine, with which versions and commit."""
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()}"
    cores = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return (
        f"# {what} on {device}\n\n{machine}{cores}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"regard {regard.__version__} at {commit or 'an unknown commit'}, {time.strftime('%Y-%m-%d')}. "
        f"{note}"
    )


def section(title: str, headers: list[str], rows: list[list[str]]) -> str:
    """A table under its title, printed at once."""
    text = f"## {title}\n\n```\n{tables.text(headers, rows, right=range(1, len(headers)))}\n```"
    print(text, flush=True)
    return text


def write(out: Path, parts: list[str]) -> None:
    """Keep a report."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out, "the report") as file:
        file.write(("\n\n".join(parts) + "\n").encode())
    print(f"written: {out}")


def cuda_time(call: Callable[[], object], times: int = 50) -> float:
    """Seconds per call, of enough calls that the first launch's latency does not count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / (times * 1e3)


def peak_memory(call: Callable[[], object]) -> float:
    """MiB above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def best_of(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def alternate(
    a: Callable[[], object],
    b: Callable[[], object],
    clock: Callable[[Callable[[], object]], float],
    rounds: int = 15,
    pick: Callable[[list[float]], float] = statistics.median,
) -> tuple[float, float]:
    """Both timed in turn, after a warm-up of each: one figure for each."""
    for call in (a, b, a, b):
        call()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):  # neither is always the one that comes after the other
            times[which].append(clock((a, b)[which]))
    return pick(times[0]), pick(times[1])


def memory_alone(what: str, call: str) -> str:
    """The peak of one call with one head of 32,768 tokens, in a process of its own, where nothing earlier hides it.

    call: Python that uses q, k and v.  VmHWM, not ru_maxrss, which a child begins with its parent's size.
    """
    if not Path("/proc/self/status").exists():
        return section("peak memory: not measured here, for it needs Linux's /proc", [""], [])
    script = f"""
import re, time, torch, regard
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
q = k = v = torch.randn(1, 1, 256, 64)
{call}
q, k, v = (torch.randn(1, 1, 32768, 64) for _ in range(3))
before, start = peak(), time.perf_counter()
{call}
print(peak() - before, time.perf_counter() - start)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    above, seconds = map(float, done.stdout.split())
    rows = [[what, f"{above:.0f}", f"{seconds:.1f}"], ["the dense matrix", "4096", ""]]
    return section("peak memory above the inputs, one head, N = 32,768, D = 64, fp32", ["", "MiB", "s"], rows)
