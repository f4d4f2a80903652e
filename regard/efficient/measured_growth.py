"""Time and memory of four ways to attend, measured on this machine as the sequence grows. Bounded: nothing runs away.

A length is skipped where the shorter ones say that one pass would take longer, or more memory, than allowed. This file
does not print, and does not know how operations are counted: `counted_growth.py` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from regard import masks
from regard.costs import BYTES
from regard.efficient.counted_growth import WAYS, Growth, GrowthSizes, counted, table_of, words_in
from regard.efficient.features import orthogonal_features
from regard.efficient.linformer import SlotProjection
from regard.efficient.performer import kernel_attention
from regard.layers import ContextKeys
from regard.op import attention

__all__ = ["Measured", "as_dicts", "measure", "measured_text", "peak_bytes"]

PROBE = 256  # a length before the first, by which the first is judged
RUNS = 5  # of which the median counts; fewer where they would take longer than a second
TRUSTED = 3  # lengths a way is measured at before its own growth says what the next one takes


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way at one length.

    seconds: of one forward pass, the median of several; None where it was skipped.
    bytes: the most memory that one pass took on top of q, k and v; as torch's allocator counts it; None where it was
        skipped.
    reason: why it was skipped.
    """

    way: str
    n: int
    seconds: float | None
    bytes: int | None
    reason: str = ""


def measure(growth: Growth, *, device: str = "cpu", seconds: float = 5.0, fraction: float = 0.5) -> Iterator[Measured]:
    """Run every way at every length, shortest first, and yield each result as it comes.

    >>> from regard.efficient.counted_growth import growth
    >>> sizes = growth([64, 128], heads=1, head_dim=8, window=4, slots=4, features=4)
    >>> [m.way for m in measure(sizes) if m.n == 128]
    ['full', 'sparse', 'low-rank', 'kernel']

    device: where to run.  seconds: the longest one pass may be expected to take.
    fraction: of the free memory that one pass may be expected to take.

    Raises ValueError for limits that are not positive, and for a device that is not there or is not measured.
    """
    if not seconds > 0 or not 0 < fraction <= 1:
        raise ValueError(f"seconds must be above 0 and fraction in (0, 1], got {seconds} and {fraction}")
    place = _place(device)
    probe = min(PROBE, growth.lengths[0])
    past = {way: [_measured(way, probe, growth.sizes, place)] for way in WAYS}
    for n in growth.lengths:
        for way in WAYS:
            reason = _too_much(past[way], n, growth, seconds, fraction * _free(place))
            result = _skipped(way, n, reason) if reason else _tried(way, n, growth.sizes, place)
            past[way].append(result)
            yield result


def measured_text(lengths: tuple[int, ...], results: list[Measured], lang: str = "en") -> str:
    """Two tables, of times and of memory, in English ("en") or Korean ("ko"); then why something is missing.

    >>> results = [Measured(way=way, n=8, seconds=0.25, bytes=2**20) for way in WAYS]
    >>> print(measured_text((8,), results).splitlines()[3])
    8  250.0 ms  250.0 ms  250.0 ms  250.0 ms

    lengths, results: of one growth; a result for every way at every length.
    Raises ValueError for another language.
    """
    words = words_in(lang)
    times = {(m.way, m.n): words["skipped"] if m.seconds is None else _time(m.seconds) for m in results}
    memory = {(m.way, m.n): _memory(m, words) for m in results}
    lines = [words["seconds"], table_of(lengths, times, words), "", words["memory"], table_of(lengths, memory, words)]
    reasons = [f"{words[m.way]}, n = {m.n:,}: {m.reason}" for m in results if m.reason and m.seconds is None]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def as_dicts(results: list[Measured]) -> list[dict[str, object]]:
    """The results as plain values, ready for JSON.

    >>> as_dicts([Measured(way="full", n=8, seconds=0.25, bytes=4096)])
    [{'way': 'full', 'n': 8, 'seconds': 0.25, 'bytes': 4096, 'reason': ''}]
    """
    return [{"way": m.way, "n": m.n, "seconds": m.seconds, "bytes": m.bytes, "reason": m.reason} for m in results]


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory that a call holds at one time, as torch's allocator counts it: to the byte, on every system.

    >>> peak_bytes(lambda: torch.ones(1000).exp(), torch.device("cpu"))      # what exp reads and what it makes
    8000

    call: runs once.  device: where its tensors are.
    What libraries take for themselves is not in it; what else this process does with tensors meanwhile is.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says on stderr that it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        call()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    changes = [(e.start_ns(), int(e.nbytes())) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate((size for _, size in sorted(changes)), initial=0))


def _calls(way: str, n: int, z: GrowthSizes, device: torch.device) -> Callable[[], object]:
    """One forward pass of a way, its inputs made."""
    random, dtype = torch.Generator().manual_seed(0), getattr(torch, z.dtype)

    def numbers(heads: int) -> Tensor:
        return torch.randn(z.batch, heads, n, z.head_dim, generator=random).to(device, dtype)

    q, k, v = numbers(z.heads), numbers(z.kv_heads), numbers(z.kv_heads)
    if way == "full":
        return lambda: attention(q, k, v)
    if way == "sparse":
        mask = masks.window(z.window, z.window)
        mask = mask | masks.globals(list(range(min(z.global_tokens, n)))) if z.global_tokens else mask
        return lambda: attention(q, k, v, mask=mask)
    if way == "low-rank":
        projection = SlotProjection(n, z.slots).to(device, dtype)
        return lambda: attention(q, *projection(ContextKeys(k, v)))
    directions = orthogonal_features(z.features, z.head_dim, seed=0).to(device, torch.float32)
    return lambda: kernel_attention(q, k, v, directions)


def _place(device: str) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch's words for a device it does not know or does not have
        raise ValueError(f"cannot measure on {device!r}: {str(error).splitlines()[0]}") from None
    if place.type not in ("cpu", "cuda"):  # others need a clock and an allocator of their own; meta computes nothing
        raise ValueError(f"cannot measure on {device!r}: only a CPU or a CUDA device is measured")
    return place


def _skipped(way: str, n: int, reason: str) -> Measured:
    return Measured(way=way, n=n, seconds=None, bytes=None, reason=reason)


def _tried(way: str, n: int, z: GrowthSizes, device: torch.device) -> Measured:
    try:
        return _measured(way, n, z, device)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return _skipped(way, n, "there was not enough memory")


@torch.no_grad()
def _measured(way: str, n: int, z: GrowthSizes, device: torch.device) -> Measured:
    call = _calls(way, n, z, device)
    peak = peak_bytes(call, device)  # the first run: kernels are chosen and compiled in it
    times = [_seconds(call, device)]
    while len(times) < RUNS and sum(times) + times[-1] < 1.0:
        times.append(_seconds(call, device))
    return Measured(way=way, n=n, seconds=median(times), bytes=peak)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    start = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def _free(device: torch.device) -> float:
    """Bytes that are free."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else float("inf")


def _too_much(past: list[Measured], n: int, growth: Growth, seconds: float, memory: float) -> str:
    """Why the next length is not measured, or nothing."""
    if past and past[-1].seconds is None:
        return past[-1].reason if past[-1].reason.startswith("as ") else f"as n = {past[-1].n:,}: {past[-1].reason}"
    z, way, last = growth.sizes, past[-1].way, past[-1].n
    inputs = z.batch * (2 * z.heads + 2 * z.kv_heads) * n * z.head_dim * BYTES[z.dtype]  # q, k, v and the output
    memory -= inputs
    steps = counted(way, n, z).flops / counted(way, last, z).flops
    time = (past[-1].seconds or 0.0) * _ratio([m.seconds for m in past], steps)
    held = (past[-1].bytes or 0) * _ratio([m.bytes for m in past], steps)
    if time > seconds:
        return f"one pass would take about {time:.0f} s, and {seconds:g} s are allowed"
    if held > memory:
        whole = (held + inputs) / 2**30
        return f"one pass would take about {whole:.1f} GiB, and {(memory + inputs) / 2**30:.1f} GiB are allowed"
    return ""


def _ratio(values: list[float | None] | list[int | None] | list[float | int | None], counted: float) -> float:
    """How much more the next length takes: as counted, or as the last step grew where that was more."""
    known = [value for value in values if value]
    return max(counted, known[-1] / known[-2]) if len(known) >= TRUSTED else counted


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _memory(m: Measured, words: dict[str, str]) -> str:
    return words["skipped"] if m.bytes is None else f"{m.bytes / 2**20:,.1f} MiB"
