"""Times attention, Longformer and BigBird on long texts on a GPU: against `transformers`, and as the text doubles.

    python benchmarks/long_cuda.py --part sparse              # one attention, forward and backward, 4k to 64k
    python benchmarks/long_cuda.py --part longformer          # both models with the same weights, then ours to 64k
    python benchmarks/long_cuda.py --part bigbird
    python benchmarks/long_cuda.py --part bigbird --profile   # and what the GPU spent its time on
    python benchmarks/long_cuda.py --device cpu               # all of it with tiny sizes: does it run?

Base shape (12 layers, 12 heads of 64), bf16, one text. A model's numbers are judged first: ours in bf16 may err twice
as much as theirs in bf16, against theirs in fp64. Then both are timed in turn. A ratio is their time ÷ ours. Growth is
what a text takes ÷ twice what half of it takes: 1 is linear. Memory is the peak above weights and inputs. Nothing else
may run on the GPU. The exit status is 1 if the numbers of a model do not agree.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peers import HEADERS, Run, in_turn
from timing import best_of, cuda_time, heading, peak_memory, section, write
from torch import Tensor

import regard
from regard import masks
from regard.backends import choose
from regard.backends.call import prepare
from regard.nn.sparse_attention import Roles
from regard.testing import assert_rule, largest_error

RESULTS = Path(__file__).parent / "results"
LAUNCHES_AND_WAITS = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    name: str
    lengths: tuple[int, ...]  # as the text doubles
    compared: tuple[int, ...]  # against transformers
    checked: int  # tokens of the text whose numbers are judged
    reach: int  # of a window, to each side
    block: int
    heads: int = 12
    size: int = 64
    config: dict[str, Any]


BASE = Scale(
    name="base",
    lengths=(4096, 8192, 16384, 32768, 65536),
    compared=(4096, 16384),
    checked=4096,
    reach=256,
    block=64,
    config={"vocab_size": 30522},
)
TINY = Scale(
    name="tiny",
    lengths=(128, 256, 512),
    compared=(128, 256),
    checked=128,
    reach=8,
    block=4,
    heads=3,
    size=16,
    config={
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 80,
    },
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--part", choices=["all", *PARTS], default="all", help="only this part")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is timed")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one call of ours of each kind")
    parser.add_argument("--out", type=Path, help="where to write the table (default on a GPU: benchmarks/results/)")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu runs it with tiny sizes")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    bench = Bench(BASE if given.device == "cuda" else TINY, given.device, given.rounds, given.profile)
    note = (
        f"transformers {transformers.__version__}. Ratio = their time ÷ ours; growth = time ÷ twice that of half. "
        "Captured: ours as a CUDA graph, with roles made before; theirs cannot be captured, and is not."
    )
    title = heading("long texts", given.device, note)
    print(title, flush=True)
    sections = [text for name, part in PARTS.items() if given.part in ("all", name) for text in part(bench)]
    suffix = "" if given.part == "all" else f"-{given.part}"
    if given.out or given.device == "cuda":
        write(given.out or RESULTS / f"long-cuda{suffix}.md", [title, *sections])
    sys.exit(1 if bench.wrong else 0)


class Bench:
    """Where it runs, how often, and whether numbers were wrong."""

    def __init__(self, scale: Scale, device: str, rounds: int, profile: bool) -> None:
        self.scale, self.device, self.rounds, self.profile = scale, device, rounds, profile
        self.wrong = False

    def clock(self, call: Run) -> float:
        """Seconds per call."""
        return cuda_time(call, 10) if self.device == "cuda" else best_of(call, 1)

    def seconds(self, call: Run) -> tuple[float, float]:
        """Of the first call, which compiles, and the median of later ones."""
        start = time.perf_counter()
        call()
        self.wait()
        first = time.perf_counter() - start
        call()
        return first, statistics.median(self.clock(call) for _ in range(self.rounds))

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memory(self, call: Run) -> float:
        """MiB above what is there; not a number on the CPU."""
        return peak_memory(call) if self.device == "cuda" else float("nan")

    def say_what_takes_time(self, what: str, call: Run) -> None:
        """With --profile: the kernels of one call, the largest first, and how often the host launched and waited."""
        if not self.profile:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.device == "cuda" else []
        with torch.profiler.profile(activities=kinds) as seen:
            call()
            self.wait()
        rows = seen.key_averages()
        order = f"self_{self.device}_time_total"
        print(f"{what}\n{rows.table(sort_by=order, row_limit=20, max_name_column_width=70)}", flush=True)
        counts = {row.key: row.count for row in rows if row.key in LAUNCHES_AND_WAITS}
        print(f"{what}: {counts}", flush=True)


# ------------------------------------------------------------------------------------------------------ one attention


def sparse(bench: Bench) -> list[str]:
    """A window with a global token, and BigBird's blocks with three drawn for each head."""
    return [one_attention(bench, name) for name in ("window and a global token", "random blocks, a window and globals")]


def mask_of(name: str, n: int, scale: Scale) -> masks.Mask:
    """A published model's mask for n positions."""
    if name.startswith("window"):
        return masks.window(scale.reach, scale.reach) | masks.globals([0])
    across = n // scale.block
    r = torch.arange(across)
    edge = (r == 0) | (r == across - 1)
    layout = ((r[:, None] - r).abs() <= 1) | edge | edge[:, None]
    return masks.blocks(layout, scale.block) | masks.random_blocks(
        n, scale.block, count=3, seed=0, num_heads=scale.heads
    )


def one_attention(bench: Bench, name: str) -> str:
    """Growth of what "auto" takes. The forward pass is that of training, so that one kernel serves both columns."""
    scale, rows = bench.scale, []
    before: list[float] = []
    for n in scale.lengths:
        qkv = [
            torch.randn(1, scale.heads, n, scale.size, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        mask = mask_of(name, n, scale)
        forward = partial(regard.attention, *qkv, mask=mask)

        def both(forward: Callable[[], Tensor] = forward, qkv: list[Tensor] = qkv) -> object:
            return torch.autograd.grad(forward().sum(), qkv)

        (compiling, trained), (_, taken) = bench.seconds(both), bench.seconds(forward)
        found = [taken, trained, bench.memory(both)]
        bench.say_what_takes_time(f"{name}, {n}, forward and backward", both)
        chosen = choose(prepare(*qkv, mask=mask)).__name__.rpartition(".")[2]
        rows.append([str(n), chosen, f"{compiling:.1f}", *growing(found, before)])
        print(" ".join(rows[-1]), flush=True)
        before = found
    headers = ["N", "auto", "first call s", *_with_growth("forward ms", "with backward ms", "MiB")]
    return section(f"{name}, (1, {scale.heads}, N, {scale.size}) bf16, mask kept", headers, rows)


def growing(found: list[float], before: list[float]) -> list[str]:
    """Seconds as ms and at last MiB, each followed by its growth since half the length, where that is known."""
    cells = []
    for place, value in enumerate(found):
        shown = f"{value:.1f}" if place == len(found) - 1 else f"{value * 1e3:.3f}"
        cells += [shown, f"{value / (2 * before[place]):.2f}" if before else ""]
    return cells


def _with_growth(*names: str) -> list[str]:
    return [header for name in names for header in (name, "growth")]


# ------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Pair:
    """One model of theirs and of ours with the same weights; each is called with ids and which tokens are global."""

    theirs: Any
    ours: Any
    longformer: bool

    def their_call(self, ids: Tensor, chosen: Tensor | None, model: Any = None) -> Callable[[], Tensor]:
        """Their model, or another like it, on a text."""
        model = self.theirs if model is None else model
        more = {} if chosen is None else {"global_attention_mask": chosen.long()}
        return lambda: model(ids, **more).last_hidden_state

    def our_call(self, ids: Tensor, chosen: Tensor | Roles | None) -> Callable[[], Tensor]:
        """Ours on the same."""
        more = {} if chosen is None else {"global_attention_mask": chosen}
        return lambda: self.ours(ids, **more).last_hidden_state

    def our_captured_call(self, ids: Tensor, chosen: Tensor | None) -> Callable[[], Tensor]:
        """Ours as a CUDA graph, which reads ids and the roles' lists of tiles where they lie: they must stay there."""
        roles = None if chosen is None else Roles.of(None, chosen)
        call = self.our_call(ids, roles)
        call()  # compiles the kernels and lists the tiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()

        def replay(kept: object = (ids, roles)) -> Tensor:
            graph.replay()
            return out

        return replay


def longformer(bench: Bench) -> list[str]:
    """Window 512; without global tokens, and with the first one global, as in classification."""
    longest, window = bench.scale.lengths[-1], 2 * bench.scale.reach
    config = transformers.LongformerConfig(
        attention_window=window, max_position_embeddings=longest + 2, pad_token_id=1, **bench.scale.config
    )
    return models(bench, "Longformer", pair_of(bench, config, longformer=True))


def bigbird(bench: Bench) -> list[str]:
    """Block-sparse, blocks of 64, in evaluation, where transformers draws none."""
    scale = bench.scale
    config = transformers.BigBirdConfig(
        attention_type="block_sparse",
        block_size=scale.block,
        max_position_embeddings=scale.lengths[-1],
        **scale.config,
    )
    return models(bench, "BigBird", pair_of(bench, config, longformer=False))


def pair_of(bench: Bench, config: Any, *, longformer: bool) -> Pair:
    """Both models, random, from one checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = transformers.AutoModel.from_config(config).eval()
        theirs.save_pretrained(folder)
        ours = regard.load(folder)
    for model in (theirs, ours):
        model.to(bench.device, torch.bfloat16)
    return Pair(theirs, ours, longformer)


def models(bench: Bench, name: str, pair: Pair) -> list[str]:
    """Numbers, then times against theirs, then how ours grows."""
    with torch.inference_mode():
        return [judged(bench, name, pair), against(bench, name, pair), growth(bench, name, pair)]


def texts(bench: Bench, pair: Pair, n: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """A random text of n tokens, by what is peculiar to it, and which of its tokens are global."""
    ids = torch.randint(5, bench.scale.config["vocab_size"], (1, n), device=bench.device)
    if not pair.longformer:
        return {"": (ids, None)}
    first = torch.arange(n, device=bench.device)[None] == 0
    return {"": (ids, None), ", first token global": (ids, first)}


def judged(bench: Bench, name: str, pair: Pair) -> str:
    """The errors of both in bf16 against theirs in fp64, by the numeric rule of regard.testing."""
    truth_model, rows = copy.deepcopy(pair.theirs).double(), []
    for kind, (ids, chosen) in texts(bench, pair, bench.scale.checked).items():
        truth = pair.their_call(ids, chosen, truth_model)()
        theirs, ours = pair.their_call(ids, chosen)(), pair.our_call(ids, chosen)()
        verdict = "yes"
        try:
            assert_rule(ours, theirs, truth)
        except AssertionError as problem:
            verdict, bench.wrong = "NO", True
            print(f"{name}{kind}: {problem}", flush=True)
        errors = [f"{largest_error(side, truth)[0]:.2e}" for side in (theirs, ours)]
        rows.append([f"{ids.shape[1]}{kind}", *errors, verdict])
    headers = ["tokens", "transformers errs", "ours errs", "agree"]
    return section(f"{name}, hidden states in bf16 against transformers in fp64, the same weights", headers, rows)


def against(bench: Bench, name: str, pair: Pair) -> str:
    """Times in turn, and peaks."""
    rows = []
    for n in bench.scale.compared:
        for kind, (ids, chosen) in texts(bench, pair, n).items():
            theirs, ours = pair.their_call(ids, chosen), pair.our_call(ids, chosen)
            a, b = in_turn(theirs, ours, bench.clock, bench.rounds)
            low, middle, high = statistics.quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
            times = [f"{statistics.median(side) * 1e3:.2f}" for side in (a, b)]
            peaks = [f"{bench.memory(call):.0f}" for call in (theirs, ours)]
            captured = captured_times(bench, pair, ids, chosen, statistics.median(a))
            rows.append([f"{n}{kind}", *times, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", *captured, *peaks])
            print(" ".join(rows[-1]), flush=True)
            bench.say_what_takes_time(f"{name}, {n}{kind}", ours)
    headers = [*HEADERS, "captured ms", "ratio", "transformers MiB", "ours MiB"]
    return section(f"{name}-{bench.scale.name}, forward, bf16, one text", headers, rows)


def captured_times(bench: Bench, pair: Pair, ids: Tensor, chosen: Tensor | None, theirs: float) -> list[str]:
    """Ours as a CUDA graph, in ms, and their seconds ÷ that; where graphs are captured."""
    if bench.device != "cuda" or not pair.longformer:
        return ["", ""]
    expected, replay = pair.our_call(ids, chosen)(), pair.our_captured_call(ids, chosen)
    assert torch.equal(replay(), expected)
    taken = statistics.median(bench.clock(replay) for _ in range(bench.rounds))
    return [f"{taken * 1e3:.2f}", f"{theirs / taken:.2f}"]


def growth(bench: Bench, name: str, pair: Pair) -> str:
    """Ours as the text doubles, with a global token where the family has them."""
    rows, before = [], []
    for n in bench.scale.lengths:
        kind, (ids, chosen) = list(texts(bench, pair, n).items())[-1]
        call = pair.our_call(ids, chosen)
        first, taken = bench.seconds(call)
        found = [taken, bench.memory(call)]
        rows.append([f"{n}{kind}", f"{first:.1f}", *growing(found, before)])
        print(" ".join(rows[-1]), flush=True)
        before = found
    headers = ["tokens", "first call s", *_with_growth("ms", "MiB")]
    return section(f"{name}-{bench.scale.name}, ours, forward, bf16, one text", headers, rows)


PARTS: dict[str, Callable[[Bench], list[str]]] = {"sparse": sparse, "longformer": longformer, "bigbird": bigbird}

if __name__ == "__main__":
    main()
