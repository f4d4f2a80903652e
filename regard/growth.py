"""Cost of full, sparse, low-rank and kernel attention as the sequence grows, counted and measured."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from regard import masks, tables
from regard.checks import check_int
from regard.costs import BYTES, Count
from regard.locale import check_lang, translate
from regard.nn.feature_maps import kernel_attention, orthogonal_features
from regard.nn.linformer import SlotProjection
from regard.nn.projections import ContextKeys
from regard.op import attention

WAYS = ("full", "sparse", "low-rank", "kernel")
MOST_LENGTHS = 7  # 64 times from the first to the last, as from 1k to 64k


@dataclass(frozen=True, kw_only=True)
class GrowthSizes:
    """The sizes of `growth` beside the lengths.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: size of one head.
        batch: sequences.
        dtype: "float32", "float64", "bfloat16" or "float16".
        window: positions seen on each side (sparse).
        global_tokens: first positions that see all and are seen by all (sparse).
        slots: of Linformer (low-rank).
        features: of Performer (kernel).

    Raises:
        TypeError: a size that is not an integer.
        ValueError: a size too small, num_kv_heads that do not divide num_heads, or an unknown dtype.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int = 1
    dtype: str = "float32"
    window: int = 256
    global_tokens: int = 1
    slots: int = 256
    features: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "dtype":
                check_int(name, value, 0 if name in ("window", "global_tokens") else 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_kv_heads={self.num_kv_heads} and "
                f"num_heads={self.num_heads}"
            )
        if self.dtype not in BYTES:
            raise ValueError(f"dtype must be one of {', '.join(BYTES)}; got {self.dtype!r}")


@dataclass(frozen=True, kw_only=True)
class WayCount:
    """One way at one length: its operations, and the bytes of all intermediates between q, k, v and the output."""

    flops: Count
    bytes: Count


@dataclass(frozen=True, kw_only=True, repr=False)
class Growth:
    """What `growth` returns: way → length → `WayCount`. Prints as a table."""

    sizes: GrowthSizes
    lengths: tuple[int, ...]
    counts: dict[str, dict[int, WayCount]]

    def text(self, lang: str = "en") -> str:
        """The tables as text, in English ("en") or Korean ("ko"). Raises ValueError for another language."""
        words = words_in(lang)
        lines = [words["sizes"].format(**asdict(self.sizes), bytes=BYTES[self.sizes.dtype])]
        for kind in ("flops", "bytes"):
            cells = {(w, n): getattr(self.counts[w][n], kind) for w in WAYS for n in self.lengths}
            shown = {place: count.readable or count.exact for place, count in cells.items()}
            formulas = [f"{words[w]}: {cells[w, self.lengths[0]].formula}" for w in WAYS]
            lines += ["", words[kind], _table(self.lengths, shown, words), *formulas]
        return "\n".join([*lines, "", words["note"]])

    def as_dict(self) -> dict[str, object]:
        """Everything as plain values, ready for JSON."""
        return {
            "sizes": asdict(self.sizes),
            "lengths": list(self.lengths),
            "counted": {
                way: {
                    kind: {
                        "values": [int(getattr(by_length[n], kind)) for n in self.lengths],
                        "formula": getattr(by_length[self.lengths[0]], kind).formula,
                    }
                    for kind in ("flops", "bytes")
                }
                for way, by_length in self.counts.items()
            },
        }

    def __repr__(self) -> str:
        return self.text()


def growth(lengths: Sequence[int], sizes: GrowthSizes) -> Growth:
    """Count full, sparse, low-rank and kernel attention at several lengths.

    >>> g = growth([4096, 8192], GrowthSizes(num_heads=1, num_kv_heads=1, head_dim=64))
    >>> [g.counts["full"][n].bytes.readable for n in g.lengths]
    ['64.00 MiB', '256.00 MiB']

    |          | FLOPs                           | bytes                             |
    |----------|---------------------------------|-----------------------------------|
    | full     | 4·B·H·n²·D                      | B·H·n²·s                          |
    | sparse   | 4·B·H·links(n)·D                | B·H·links(n)·s                    |
    | low-rank | 4·B·(H + Hkv)·n·k·D             | B·(H·n + 2·Hkv·D)·k·s             |
    | kernel   | 4·B·(H + Hkv)·n·m·D + 2·B·H·n·m | B·((H + Hkv)·n + Hkv·(D + 1))·m·s |

    A multiply-add is 2 FLOPs; only matrix products count. Bytes: weights, slots, features and sums if all were written
    at once; a kernel that works in chunks keeps less. Sparse is window(w, w) | globals(first g), both ways.

    Args:
        lengths: each at least 1.
        sizes: all other sizes.

    Raises:
        TypeError: a length that is not an integer.
        ValueError: no length, or one below 1.
    """
    if not lengths:
        raise ValueError("growth needs at least one length")
    for n in lengths:
        check_int("n", n)
    counts = {way: {n: counted(way, n, sizes) for n in lengths} for way in WAYS}
    return Growth(sizes=sizes, lengths=tuple(lengths), counts=counts)


def lengths_up_to(longest: int) -> list[int]:
    """At most seven lengths that double up to the longest, rounded up.

    >>> lengths_up_to(65536)
    [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    """
    check_int("n", longest)
    return sorted({-(-longest // 2**halvings) for halvings in range(MOST_LENGTHS)})


def visible_links(n: int, window: int, global_tokens: int) -> int:
    """How many of n² pairs are visible with a window on both sides and the first positions global.

    >>> visible_links(4, 1, 0), visible_links(4, 1, 1), visible_links(4, 9, 0)
    (10, 14, 16)
    """

    def band(size: int) -> int:  # pairs at most `window` apart, of size²
        reach = min(window, max(0, size - 1))
        return size + 2 * reach * size - reach * (reach + 1)

    g = min(global_tokens, n)
    rows = sum(min(n - 1, i + window) + 1 - max(0, i - window) for i in range(g))  # of the band, in global rows
    return band(n) + 2 * (g * n - rows) - (g * g - band(g))  # rows and columns, the corner once


def words_in(lang: str) -> dict[str, str]:
    """The texts of the tables by key, in "en" or "ko". Raises ValueError for another language."""
    check_lang(lang)
    return {key: translate(text, lang) for key, text in _WORDS.items()}


def _table(lengths: Sequence[int], cells: dict[tuple[str, int], str], words: dict[str, str]) -> str:
    rows = [[f"{n:,}", *(cells[way, n] for way in WAYS)] for n in lengths]
    return tables.text(["n", *(words[way] for way in WAYS)], rows, right=range(len(WAYS) + 1))


def counted(way: str, n: int, z: GrowthSizes) -> WayCount:
    """One way, of WAYS, at one length."""

    def count(flops: int, flops_formula: str, numbers: int, bytes_formula: str) -> WayCount:
        held = Count(numbers * BYTES[z.dtype], bytes_formula, "B")
        return WayCount(flops=Count(flops, flops_formula, "FLOP"), bytes=held)

    both = z.num_heads + z.num_kv_heads
    if way == "full":
        pairs = z.batch * z.num_heads * n**2
        return count(4 * pairs * z.head_dim, "4·B·H·n²·D", pairs, "B·H·n²·s")
    if way == "sparse":
        pairs = z.batch * z.num_heads * visible_links(n, z.window, z.global_tokens)
        return count(4 * pairs * z.head_dim, "4·B·H·links(n)·D", pairs, "B·H·links(n)·s")
    if way == "low-rank":
        flops = 4 * z.batch * both * n * z.slots * z.head_dim
        held = z.batch * (z.num_heads * n + 2 * z.num_kv_heads * z.head_dim) * z.slots
        return count(flops, "4·B·(H + Hkv)·n·k·D", held, "B·(H·n + 2·Hkv·D)·k·s")
    flops = 4 * z.batch * both * n * z.features * z.head_dim + 2 * z.batch * z.num_heads * n * z.features
    held = z.batch * (both * n + z.num_kv_heads * (z.head_dim + 1)) * z.features
    return count(flops, "4·B·(H + Hkv)·n·m·D + 2·B·H·n·m", held, "B·((H + Hkv)·n + Hkv·(D + 1))·m·s")


_WORDS = {
    "sizes": "H = {num_heads} heads of D = {head_dim}, Hkv = {num_kv_heads} key/value heads, B = {batch} (batch), "
    "s = {bytes} bytes ({dtype}); sparse: w = {window} on each side and g = {global_tokens} global; "
    "low-rank: k = {slots} slots; kernel: m = {features} features",
    "flops": "Operations (a multiply-add is 2)",
    "bytes": "Bytes made between q, k, v and the output, if all were written",
    "bytes_short": "Bytes, if all were written",
    "seconds": "Measured time",
    "memory": "Measured peak memory",
    "full": "full",
    "sparse": "sparse",
    "low-rank": "low-rank",
    "kernel": "kernel",
    "skipped": "skipped",
    "note": "W_Q, W_K, W_V and W_O are left out: they are the same for all four.",
}


PROBE = 256  # a length before the first, by which the first is judged
RUNS = 5  # of which the median counts; fewer where they would take longer than a second
TRUSTED = 3  # lengths a way is measured at before its own growth says what the next one takes


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way at one length: the median seconds of one forward pass and the most memory it took on top of q, k and v.

    Both are None where it was skipped, for the `reason`.
    """

    way: str
    n: int
    seconds: float | None = None
    bytes: int | None = None
    reason: str = ""


def measure(growth: Growth, *, device: str = "cpu", seconds: float = 5.0, fraction: float = 0.5) -> Iterator[Measured]:
    """Run every way at every length, shortest first, and yield each result as it comes.

    Args:
        growth: the sizes and lengths.
        device: where to run.
        seconds: the longest one pass may be expected to take.
        fraction: of the free memory that one pass may be expected to take.

    Raises:
        ValueError: limits that are not positive, or a device that is not there or is not measured.
    """
    if not seconds > 0 or not 0 < fraction <= 1:
        raise ValueError(f"seconds must be above 0 and fraction in (0, 1], got {seconds} and {fraction}")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch's words for a device it does not know or does not have
        raise ValueError(f"cannot measure on {device!r}: {str(error).splitlines()[0]}") from None
    if place.type not in ("cpu", "cuda"):  # others need a clock and an allocator of their own; meta computes nothing
        raise ValueError(f"cannot measure on {device!r}: only a CPU or a CUDA device is measured")
    probe = min(PROBE, growth.lengths[0])
    past = {way: [_measured(way, probe, growth.sizes, place)] for way in WAYS}
    for n in growth.lengths:
        for way in WAYS:
            reason = _too_much(past[way], n, growth, seconds, fraction * _free(place))
            if reason:
                result = Measured(way=way, n=n, reason=reason)
            else:
                try:
                    result = _measured(way, n, growth.sizes, place)
                except RuntimeError as error:
                    if "memory" not in str(error):
                        raise
                    result = Measured(way=way, n=n, reason="there was not enough memory")
            past[way].append(result)
            yield result


def measured_text(lengths: tuple[int, ...], results: list[Measured], lang: str = "en") -> str:
    """Two tables, of times and of memory, in "en" or "ko"; then why something is missing.

    `results` has one for every way at every length. Raises ValueError for another language.
    """
    words = words_in(lang)
    times, memory = {}, {}
    for m in results:
        times[m.way, m.n] = memory[m.way, m.n] = words["skipped"]
        if m.seconds is not None:
            times[m.way, m.n] = f"{m.seconds:.2f} s" if m.seconds >= 1 else f"{m.seconds * 1e3:.1f} ms"
        if m.bytes is not None:
            memory[m.way, m.n] = f"{m.bytes / 2**20:,.1f} MiB"
    lines = [words["seconds"], _table(lengths, times, words), "", words["memory"], _table(lengths, memory, words)]
    reasons = [f"{words[m.way]}, n = {m.n:,}: {m.reason}" for m in results if m.reason and m.seconds is None]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory that a call holds at one time, as torch's allocator counts it: to the byte, on every system.

    >>> peak_bytes(lambda: torch.ones(1000).exp(), torch.device("cpu"))      # what exp reads and what it makes
    8000

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

    def numbers(num_heads: int) -> Tensor:
        return torch.randn(z.batch, num_heads, n, z.head_dim, generator=random).to(device, dtype)

    q, k, v = numbers(z.num_heads), numbers(z.num_kv_heads), numbers(z.num_kv_heads)
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


def _free(device: torch.device) -> float:  # bytes
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    except OSError:
        available = None
    return int(available[1]) * 1024 if available else float("inf")


def _too_much(past: list[Measured], n: int, growth: Growth, seconds: float, memory: float) -> str:
    """Why the next length is not measured, or ""."""
    if past[-1].seconds is None:
        return past[-1].reason if past[-1].reason.startswith("as ") else f"as n = {past[-1].n:,}: {past[-1].reason}"
    z, way, last = growth.sizes, past[-1].way, past[-1].n
    inputs = 2 * z.batch * (z.num_heads + z.num_kv_heads) * n * z.head_dim * BYTES[z.dtype]  # q, k, v and the output
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


def _ratio(values: Sequence[float | None], counted: float) -> float:
    """How much more the next length takes: as counted, or as the last step grew where that was more."""
    known = [value for value in values if value]
    return max(counted, known[-1] / known[-2]) if len(known) >= TRUSTED else counted
