"""Times sparse masks against torch's SDPA with a dense mask and against `tiled`, as the text doubles. Keeps a table.

    python benchmarks/long.py                 # CPU, about five minutes
    python benchmarks/long.py --part watched  # a Longformer of up to 65,536 tokens with the lens on it, CPU

Base shape: 12 heads of 64, fp32, one text. Calls of all lengths run in one process, in turn, on one thread; what counts
is CPU time, the best of the rounds: noise only adds. Growth is time ÷ twice the time at half the length: 1 is linear.
Memory is the peak above the inputs, each in a process of its own; of the watched model, as torch's allocator counts it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from timing import heading, section, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks
from regard.efficient.measured_growth import _peak as allocated
from regard.lens.capture import Capture
from regard.masks.tiling import visible_tiles
from regard.models.families import longformer
from regard.models.settings import Settings

RESULTS = Path(__file__).parent / "results"
LENGTHS = (1024, 2048, 4096, 8192)
HEADS, SIZE = 12, 64
MOST_DENSE = 4096  # positions up to which the dense peer and `tiled` are timed
WATCHED = (8192, 16384, 32768, 65536)
MEASURES = ("received", "map", "top")
NAMES = ("window 512", "window 512 and a global token", "random blocks, a window and globals")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["masks", "watched"], default="masks", help="which table")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each call; more where the machine is busy")
    parser.add_argument("--out", type=Path, help="where to write the table (default: benchmarks/results/)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if arguments.part == "watched":
        note = "Peak: the most bytes that torch's allocator had handed out at one time, above the model and its ids. "
        note += "Growth = watched peak ÷ twice that at half the length: 1 is linear. CPU time of one run."
        write(arguments.out or RESULTS / "long-watched-cpu.md", [heading("watched long texts", "cpu", note), watched()])
        return
    note = "CPU time, best of {} rounds, in turn in one process. Growth = time ÷ twice the time at half the length."
    title = heading("long texts", "cpu", note.format(arguments.rounds))
    parts = [title, *(on_cpu(name, arguments.rounds) for name in NAMES), memory()]
    write(arguments.out or RESULTS / "long-cpu.md", parts)


def mask_of(name: str, n: int) -> masks.Mask:
    """A published model's mask for n positions."""
    near = masks.window(256, 256)
    if name == NAMES[0]:
        return near
    if name == NAMES[1]:
        return near | masks.globals([0])
    # As BigBird: blocks of 64, each sees its neighbours, 3 random ones, and the first and the last, which see all.
    size, across = 64, n // 64
    r = torch.arange(across)
    layout = (
        ((r[:, None] - r).abs() <= 1) | (r == 0) | (r == across - 1) | (r[:, None] == 0) | (r[:, None] == across - 1)
    )
    return masks.blocks(layout, size) | masks.random_blocks(n, size, count=3, seed=0, heads=HEADS)


def on_cpu(name: str, rounds: int) -> str:
    made, about = {}, {}
    for n in LENGTHS:
        q, k, v = (torch.randn(1, HEADS, n, SIZE, requires_grad=True) for _ in range(3))
        mask = mask_of(name, n)
        made |= {(n, what): call for what, call in calls(q, k, v, mask, n).items()}
        share = visible_tiles(mask, n, n, torch.device("cpu")).share
        about[n] = [regard.backends.explain(q, k, v, mask=mask).chosen, f"{share:.0%}"]
    times = in_turn(made, rounds)
    rows = []
    for n in LENGTHS:
        row = [str(n), *about[n]]
        for what in ("ours", "ours, with backward"):
            half = times.get((n // 2, what))
            row += [f"{times[n, what] * 1e3:.0f}", "" if half is None else f"{times[n, what] / (2 * half):.2f}"]
        peers = (times.get((n, peer)) for peer in ("sdpa", "tiled"))
        rows.append([*row, *("" if peer is None else f"{peer / times[n, 'ours']:.1f}" for peer in peers)])
    headers = [
        "N",
        "auto",
        "computed",
        "forward ms",
        "growth",
        "with backward",
        "growth",
        "sdpa ÷ ours",
        "tiled ÷ ours",
    ]
    return section(f"{name}, (1, {HEADS}, N, {SIZE}) fp32", headers, rows)


def calls(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, n: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""

    def forward(backend: str) -> object:
        with torch.no_grad():
            return regard.attention(q, k, v, mask=mask, backend=backend)

    def both() -> object:
        return torch.autograd.grad(regard.attention(q, k, v, mask=mask, backend="sparse").sum(), [q, k, v])

    made: dict[str, Callable[[], object]] = {"ours": lambda: forward("sparse"), "ours, with backward": both}
    if n <= MOST_DENSE:
        cells = mask.dense(n)
        given = cells.view(1, -1, n, n)
        made["sdpa"] = lambda: sdpa(q.detach(), k.detach(), v.detach(), attn_mask=given)
        made["tiled"] = lambda: forward("tiled")
    return made


def in_turn(made: dict[tuple[int, str], Callable[[], object]], rounds: int) -> dict[tuple[int, str], float]:
    """CPU seconds of each call, the best of the rounds, after one of each to warm up; all lengths in each round."""
    best = dict.fromkeys(made, float("inf"))
    for turn in range(rounds + 1):
        for name, call in made.items():
            start = time.process_time()
            call()
            best[name] = best[name] if turn == 0 else min(best[name], time.process_time() - start)
    return best


def memory() -> str:
    """The peak of a forward and backward pass, and of a look, of one text with a window and a global token."""
    if not Path("/proc/self/status").exists():
        return section("peak memory: not measured here, for it needs Linux's /proc", [""], [])
    rows = []
    for n in (*LENGTHS, 65536):
        train, look = (peak_alone(n, call) for call in (TRAIN, LOOK))
        rows.append([str(n), f"{3 * HEADS * n * SIZE * 4 / 2**20:.0f}", f"{train:.0f}", f"{look:.0f}"])
    headers = ["N", "q, k and v MiB", "forward and backward MiB", "look MiB"]
    return section(f"peak memory above q, k and v: {NAMES[1]}, (1, {HEADS}, N, {SIZE}) fp32", headers, rows)


TRAIN = "torch.autograd.grad(regard.attention(q, k, v, mask=mask).sum(), [q, k, v])"
LOOK = "regard.look(q.detach(), k.detach(), v.detach(), mask=mask)"


def peak_alone(n: int, call: str) -> float:
    """MiB above q, k and v that one call takes, in a process of its own."""
    script = f"""
import re, torch, regard
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
mask = regard.masks.window(256, 256) | regard.masks.globals([0])
q, k, v = (torch.randn(1, 1, 1024, {SIZE}, requires_grad=True) for _ in range(3))
{call}
q, k, v = (torch.randn(1, {HEADS}, {n}, {SIZE}, requires_grad=True) for _ in range(3))
before = peak()
{call}
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(re.fullmatch(r"([\d.]+)\n", done.stdout)[1])  # type: ignore[index]


# ------------------------------------------------------------------------------------------------- the lens on a model


@torch.inference_mode()
def watched() -> str:
    """A Longformer-shaped model, watched as its text doubles: time, bytes, and what the capture holds."""
    model = long_model(layers=4, heads=4, size=64, window=512, longest=max(WATCHED))
    found = []
    for n in WATCHED:
        ids = torch.randint(3, 97, (1, n))
        kept: list[Capture] = []

        def look(ids: Tensor = ids, kept: list[Capture] = kept) -> None:
            with regard.watch(model, measures=MEASURES, top=8) as seen:
                model(ids)
            kept.append(seen)

        plain = allocated(lambda: model(ids), torch.device("cpu"))  # noqa: B023
        start = time.process_time()
        peak = allocated(look, torch.device("cpu"))
        found.append((n, time.process_time() - start, plain, peak, held(kept[0]), len(kept[0])))
    rows = []
    for before, (n, seconds, plain, peak, bytes_, calls) in pairwise([None, *found]):
        growth = "" if before is None else f"{peak / (2 * before[3]):.2f}"
        sizes = (f"{x / 2**20:,.0f}" for x in (plain, peak))
        dense = f"{calls // 2 * 4 * n * n * 4 / 2**30:,.0f}"
        rows.append([f"{n:,}", f"{seconds:.0f}", *sizes, growth, str(calls), f"{bytes_ / 2**20:,.0f}", dense])
    headers = [
        "N",
        "watched CPU s",
        "unwatched peak MiB",
        "watched peak MiB",
        "growth",
        "calls",
        "held MiB",
        "dense weights GiB",
    ]
    title = (
        "Longformer: 4 layers, 4 heads of 64, window 512, one global token, fp32; received, map 64 × 64, 8 links a row"
    )
    return section(title, headers, rows)


def long_model(*, layers: int, heads: int, size: int, window: int, longest: int) -> torch.nn.Module:
    """A Longformer with random weights and a head that classifies, whose first token is global."""
    values = {"model_type": "longformer", "vocab_size": 97, "num_hidden_layers": layers, "num_attention_heads": heads}
    values |= {"hidden_size": heads * size, "intermediate_size": 4 * heads * size, "attention_window": window}
    values |= {"max_position_embeddings": longest + 2, "type_vocab_size": 1, "hidden_act": "gelu"}
    return longformer.build(Settings(values), "classify").eval()


def held(seen: Capture) -> int:
    """Bytes of all tensors of a capture's views."""
    views = [record.view for record in seen.records if record.view is not None]
    return sum(x.nbytes for view in views for x in view.held.values())


if __name__ == "__main__":
    main()
