"""Times sparse masks against torch's SDPA with a dense mask and against `tiled`, as the text doubles. Keeps a table.

    python benchmarks/long.py                 # CPU, about five minutes
    python benchmarks/long.py --part models   # Longformer and BigBird against transformers, CPU, about half an hour
    python benchmarks/long.py --part watched  # a Longformer of up to 65,536 tokens with the lens on it, CPU

Base shape: 12 heads of 64, fp32, one text. Calls of all lengths run in one process, in turn, on one thread; what counts
is CPU time, the best of the rounds: noise only adds. Growth is time ÷ twice the time at half the length: 1 is linear.
Memory is the peak above the inputs, each in a process of its own; of the watched model, as torch's allocator counts it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from timing import heading, section, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks
from regard.growth import peak_bytes
from regard.lens.capture import Capture
from regard.masks.tiles import visible_tiles
from regard.models.families import roberta
from regard.models.family import Config

RESULTS = Path(__file__).parent / "results"
LENGTHS = (1024, 2048, 4096, 8192)
HEADS, SIZE = 12, 64
MOST_DENSE = 4096  # positions up to which the dense peer and `tiled` are timed
WATCHED = (8192, 16384, 32768, 65536)
MEASURES = ("received", "map", "top")
NAMES = ("window 512", "window 512 and a global token", "random blocks, a window and globals")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["masks", "models", "watched"], default="masks", help="which table")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each call; more where the machine is busy")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1], help="of the models' part")
    parser.add_argument("--out", type=Path, help="where to write the table (default: benchmarks/results/)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if arguments.part == "models":
        write(arguments.out or RESULTS / "long-models-cpu.md", list(models(arguments.rounds, arguments.threads)))
        return
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
    return masks.blocks(layout, size) | masks.random_blocks(n, size, count=3, seed=0, num_heads=HEADS)


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

        plain = peak_bytes(lambda: model(ids), torch.device("cpu"))  # noqa: B023
        start = time.process_time()
        peak = peak_bytes(look, torch.device("cpu"))
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
    return roberta.build_long(Config(values), "text-classification").eval()


def held(seen: Capture) -> int:
    """Bytes of all tensors of a capture's views."""
    views = [record.view for record in seen.records if record.view is not None]
    return sum(x.nbytes for view in views for x in view.held.values())


# ------------------------------------------------------------------------------------------------------------- models

TOKENS, LAYERS = 4096, 12
ABOUT = f"""fp32, one text of {TOKENS} tokens, {LAYERS} layers of 12 heads of 64, feed-forward of 3072, forward in \
inference mode, in turn in one process; medians of {{}} rounds after one to warm up. One thread: CPU time; more: wall \
time. "Linear layers alone" is what both have to compute: the projections, and the feed-forward without its function. \
glibc gives blocks of more than 32 MiB back to the system at once, and to have them anew takes a page fault for each \
4 KiB; "freed memory kept" is the same with that switched off (mallopt), the best setting for transformers."""


def models(rounds: int, threads_wanted: list[int]) -> Iterator[str]:
    """Both models against transformers, as the allocator is and as it is best for transformers."""
    pairs = {name: pair(name) for name in ("Longformer", "Longformer, one global token", "BigBird")}
    yield heading("Longformer and BigBird", "cpu", ABOUT.format(rounds))
    for memory_kept in (False, True):
        if memory_kept and not keep_memory():
            return
        for threads in threads_wanted:
            torch.set_num_threads(threads)
            clock = time.process_time if threads == 1 else time.perf_counter
            rows = [against(name, *both, clock, rounds) for name, both in pairs.items()]
            title = (
                f"{threads} thread{'s' if threads > 1 else ''}, freed memory {'kept' if memory_kept else 'given back'}"
            )
            title += f"; linear layers alone {linear_alone(clock, rounds):.0f} ms"
            yield section(title, ["", "transformers ms", "ours ms", "ratio", "lowest", "highest"], rows)


def pair(name: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Calls of transformers' model and of ours with its weights, whose numbers agree."""
    if name == "BigBird":
        config = transformers.BigBirdConfig(num_hidden_layers=LAYERS, vocab_size=1000)
        theirs, tells = transformers.BigBirdModel(config), ({}, {})
    else:
        config = transformers.LongformerConfig(
            num_hidden_layers=LAYERS,
            attention_window=[512] * LAYERS,
            vocab_size=1000,
            max_position_embeddings=TOKENS + 2,
        )
        theirs, tells = transformers.LongformerModel(config), ({}, {})
        if "global" in name:
            chosen = torch.arange(TOKENS)[None] == 0
            tells = {"global_attention_mask": chosen.long()}, {"global_attention_mask": chosen}
    theirs = theirs.eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = regard.load(folder).requires_grad_(False)
    ids = torch.randint(5, 1000, (1, TOKENS))
    calls = lambda: theirs(ids, **tells[0]), lambda: ours(ids, **tells[1])
    torch.testing.assert_close(calls[1]().last_hidden_state, calls[0]().last_hidden_state, rtol=0, atol=1e-4)
    return calls


def against(
    name: str, theirs: Callable[[], object], ours: Callable[[], object], clock: Callable[[], float], rounds: int
) -> list[str]:
    """A row: medians in ms, their ratio, and the lowest and highest ratio of a round."""
    times: dict[Callable[[], object], list[float]] = {theirs: [], ours: []}
    for turn in range(rounds + 1):
        for call in (theirs, ours) if turn % 2 else (ours, theirs):
            start = clock()
            with torch.inference_mode():
                call()
            times[call] += [clock() - start] if turn else []
    ratios = [a / b for a, b in zip(times[theirs], times[ours], strict=True)]
    a, b = (statistics.median(times[call]) for call in (theirs, ours))
    return [name, f"{a * 1e3:.0f}", f"{b * 1e3:.0f}", *(f"{x:.2f}" for x in (a / b, min(ratios), max(ratios)))]


def linear_alone(clock: Callable[[], float], rounds: int) -> float:
    """Milliseconds that the linear layers of a model take, one layer's times as many as there are; the median."""
    sizes = [(768, 768)] * 4 + [(768, 3072), (3072, 768)]
    maps = [(torch.randn(TOKENS, i), torch.nn.Linear(i, o).requires_grad_(False)) for i, o in sizes]
    taken = []
    for turn in range(rounds + 1):
        start = clock()
        for x, linear in maps:
            linear(x)
        taken += [clock() - start] if turn else []
    return statistics.median(taken) * LAYERS * 1e3


def keep_memory() -> bool:
    """Have glibc keep what is freed instead of giving it back to the system. False where there is no glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, mmap_max = -1, -4  # malloc.h
    return mallopt is not None and all(mallopt(which, n) for which, n in ((trim_threshold, 2**31 - 1), (mmap_max, 0)))


if __name__ == "__main__":
    main()
