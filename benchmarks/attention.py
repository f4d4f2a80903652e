"""Times `regard.attention` against what it calls, and against FlexAttention written by hand. Prints and keeps a table.

    python benchmarks/attention.py                 # CPU, about a minute
    python benchmarks/attention.py --device cuda   # needs a GPU; several minutes, mostly compilation

Peers run in the same process on the same inputs, alternately. A ratio is peer time ÷ our time: more is better for us.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks, tables

RESULTS = Path(__file__).parent / "results"
SHAPES = [(4, 16, 2048, 64), (2, 16, 8192, 128), (1, 16, 32768, 128)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="where to write the table (default: benchmarks/results/)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; run without --device cuda")
    sections = on_cuda() if arguments.device == "cuda" else on_cpu()
    report = "\n\n".join([heading(arguments.device), *sections]) + "\n"
    out = arguments.out or RESULTS / f"attention-{arguments.device}.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(report, encoding="utf-8")
    print(f"written: {out}")


def heading(device: str) -> str:
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()}"
    cores = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return (
        f"# attention on {device}\n\n{machine}{cores}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"regard {regard.__version__} at {commit or 'an unknown commit'}, {time.strftime('%Y-%m-%d')}. "
        "Ratio = peer time ÷ our time, measured alternately in one process."
    )


def section(title: str, headers: list[str], rows: list[list[str]]) -> str:
    text = f"## {title}\n\n```\n{tables.text(headers, rows, right=range(1, len(headers)))}\n```"
    print(text, flush=True)
    return text


# --------------------------------------------------------------------------------------------------------------- CUDA


def on_cuda() -> list[str]:
    torch.manual_seed(0)
    plain, masked = [], []
    for shape in SHAPES:
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for name, mask in (("full", None), ("causal", masks.causal())):
            theirs = lambda c=mask is not None: sdpa(q, k, v, is_causal=c)  # noqa: E731, B023
            ours = lambda m=mask: regard.attention(q, k, v, mask=m)  # noqa: E731, B023
            plain.append([str(shape), name, *row_of_times(theirs, ours)])
        for name, mask, mod in hand_written(shape[2]):
            direct = compiled_flex(q, k, v, mod)
            ours = lambda m=mask: regard.attention(q, k, v, mask=m)  # noqa: E731, B023
            worst = float((direct() - ours()).abs().max())
            memory = peak_memory(ours)
            masked.append([str(shape), name, *row_of_times(direct, ours), f"{memory:.0f}", f"{worst:.1e}"])
    return [
        section(
            "forward, bf16, against F.scaled_dot_product_attention",
            ["shape", "mask", "sdpa ms", "ours ms", "ratio"],
            plain,
        ),
        section(
            "forward, bf16, against compiled FlexAttention written by hand",
            ["shape", "mask", "flex ms", "ours ms", "ratio", "our peak MiB", "difference"],
            masked,
        ),
    ]


def hand_written(n: int) -> list[tuple[str, masks.Mask, Callable[..., torch.Tensor]]]:
    """The same mask twice: as a regard value, and as somebody would write it for FlexAttention."""
    ids = torch.arange(n, device="cuda") // (n // 8)
    prefix = n // 4
    return [
        ("window 1024", masks.window(1024, 0), lambda b, h, i, j: (i >= j) & (i - j <= 1024)),
        (
            "8 documents, causal",
            masks.documents(ids) & masks.causal(),
            lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j),
        ),
        ("prefix N/4", masks.prefix(prefix), lambda b, h, i, j: (j < prefix) | (i >= j)),
    ]


def compiled_flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mod: Callable[..., torch.Tensor]
) -> Callable[[], torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = q.shape[2]
    blocks = torch.compile(create_block_mask)(mod, None, None, n, n, device="cuda")
    # A function of its own for each call: one compiled for these sizes alone, with nothing else in its cache.
    own = FunctionType(flex_attention.__code__.replace(co_name=f"flex_{n}_{id(mod)}"), flex_attention.__globals__)
    own.__defaults__, own.__kwdefaults__ = flex_attention.__defaults__, flex_attention.__kwdefaults__
    flex = torch.compile(own, fullgraph=True, dynamic=False)
    return lambda: flex(q, k, v, block_mask=blocks)


def row_of_times(theirs: Callable[[], object], ours: Callable[[], object]) -> list[str]:
    a, b = alternate(theirs, ours, cuda_time)
    return [f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{a / b:.3f}"]


def cuda_time(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(50):  # enough that the first launch's latency does not count
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 50e3


def peak_memory(call: Callable[[], object]) -> float:
    """MiB above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


# ---------------------------------------------------------------------------------------------------------------- CPU


def on_cpu() -> list[str]:
    torch.manual_seed(0)
    return [dispatch(), masked_on_cpu(), memory_on_cpu()]


def dispatch() -> str:
    q = torch.randn(1, 2, 4, 8)
    causal = masks.causal()
    rows = []
    for name, theirs, ours in (
        ("full", lambda: sdpa(q, q, q), lambda: regard.attention(q, q, q)),
        ("causal", lambda: sdpa(q, q, q, is_causal=True), lambda: regard.attention(q, q, q, mask=causal)),
    ):
        a, b = alternate(theirs, ours, lambda call: best_of(call, 500), rounds=15, pick=min)
        rows.append([name, f"{a * 1e6:.1f}", f"{b * 1e6:.1f}", f"{(b - a) * 1e6:.1f}"])
    return section("what dispatch adds to a tiny call", ["call", "sdpa µs", "ours µs", "added µs"], rows)


def masked_on_cpu() -> str:
    q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
    n, rows = 4096, []
    values = {
        "none": None,
        "causal": masks.causal(),
        "window 256": masks.window(256, 0),
        "8 documents": masks.documents(lengths=[n // 8] * 8),
        "prefix N/4": masks.prefix(n // 4),
    }
    for name, mask in values.items():
        causal = name == "causal"
        dense = None if mask is None or causal else mask.dense(n)
        chosen = regard.backends.explain(q, k, v, mask=mask).chosen
        a, b = alternate(
            lambda: sdpa(q, k, v, attn_mask=dense, is_causal=causal),  # noqa: B023
            lambda: regard.attention(q, k, v, mask=mask),  # noqa: B023
            lambda call: best_of(call, 1),
            rounds=3,
        )
        rows.append([name, chosen, f"{a * 1e3:.0f}", f"{b * 1e3:.0f}", f"{a / b:.2f}"])
    return section(
        "(1, 8, 4096, 64) fp32, against F.scaled_dot_product_attention (is_causal, else a dense boolean mask)",
        ["mask", "backend", "sdpa ms", "ours ms", "ratio"],
        rows,
    )


MEMORY = """
import re, time, torch, regard
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
small = torch.randn(1, 1, 256, 64)
regard.attention(small, small, small, backend="tiled")
q, k, v = (torch.randn(1, 1, 32768, 64) for _ in range(3))
before, start = peak(), time.perf_counter()
regard.attention(q, k, v, backend="tiled")
print(peak() - before, time.perf_counter() - start)
"""


def memory_on_cpu() -> str:
    """In a process of its own: a peak that an earlier measurement reached would hide this one.

    VmHWM, not ru_maxrss, which a child begins with its parent's size.
    """
    if not Path("/proc/self/status").exists():
        return section("peak memory: not measured here, for it needs Linux's /proc", [""], [])
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    above, seconds = map(float, done.stdout.split())
    rows = [["tiled", f"{above:.0f}", f"{seconds:.1f}"], ["the dense matrix", "4096", ""]]
    return section("peak memory above the inputs, one head, N = 32,768, D = 64, fp32", ["", "MiB", "s"], rows)


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


if __name__ == "__main__":
    main()
