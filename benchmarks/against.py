"""Times one tree of regard against another, case by case, on one CPU thread. Prints and keeps a table.

    python benchmarks/against.py ../before .                     # all cases, a few minutes
    python benchmarks/against.py ../before . --only padding      # cases whose name contains this

Each tree has a process of its own; a third process runs the old tree again. They take turns, every turn times a few
milliseconds of calls, and the processes are replaced after each set of turns. CPU time counts, not wall time, so other
work on the machine matters little. A ratio is the new tree's best ÷ the old tree's best: below 1 is faster now. The
noise is the largest difference between the two processes of the old tree in any set.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import torch
from torch import Tensor

Case = Callable[[], object]
RESULTS = Path(__file__).parent / "results"
TURN = 0.006  # seconds of calls in one turn
STARTS = {
    "python -c pass": ["-c", "pass"],
    "import regard": ["-c", "import regard"],
    "import regard; regard.attention": ["-c", "import regard; regard.attention"],
    "regard --help": ["-m", "regard", "--help"],
    "regard look --help": ["-m", "regard", "look", "--help"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a source tree, which holds regard/")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--sets", type=int, default=5, help="how often the processes are replaced (default: 5)")
    parser.add_argument("--rounds", type=int, default=15, help="turns in each set (default: 15)")
    parser.add_argument("--out", type=Path, help="where to write the table (default: benchmarks/results/)")
    arguments = parser.parse_args()
    old, new = arguments.old.resolve(), arguments.new.resolve()
    for tree in (old, new):
        if not (tree / "regard" / "__init__.py").is_file():
            sys.exit(f"{tree} holds no regard/")
    times: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoints(Path(folder))
        for set_ in range(arguments.sets):
            print(f"set {set_ + 1} of {arguments.sets}", file=sys.stderr, flush=True)
            for name, taken in one_set((old, new, old), folder, arguments.only, arguments.rounds).items():
                times.setdefault(name, []).append(taken)
    text = "\n\n".join([heading(old, new, arguments.sets, arguments.rounds), f"```\n{table(times)}\n```"]) + "\n"
    print(text)
    if not arguments.only or arguments.out:
        out = arguments.out or RESULTS / f"against-{commit(old)}.md"
        out.write_text(text)
        print(f"written: {out}")


# ------------------------------------------------------------------------------------------------------ the two trees

Times = tuple[float, float, float]  # the best of the old tree, of the new, and of the old again, in seconds


def one_set(trees: tuple[Path, Path, Path], folder: str, only: str, rounds: int) -> dict[str, Times]:
    """One process per tree, all cases: the best of the rounds."""
    times: dict[str, Times] = {}
    workers = [Worker(tree, folder) for tree in trees]
    try:
        for name in workers[0].names:
            if only in name:
                calls = workers[0].calls(name)
                times[name] = alternate([partial(worker.time, name, calls) for worker in workers], rounds)
    finally:
        for worker in workers:
            worker.close()
    for name, command in STARTS.items():
        if only in name:
            times[name] = alternate([partial(start_time, tree, command) for tree in trees], max(2, rounds // 5))
    return times


def alternate(clocks: list[Callable[[], float]], rounds: int) -> Times:
    """The best of each, after a warm-up. None follows itself: its data would still be in the processor's caches."""
    for clock in clocks:
        clock()
    best = [float("inf")] * 3
    for turn in range(rounds):
        for place in range(3):
            n = (turn + place) % 3
            best[n] = min(best[n], clocks[n]())
    return best[0], best[1], best[2]


def environment(tree: Path) -> dict[str, str]:
    """A child's environment: the tree's regard, one thread, the same hashes in both trees."""
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def start_time(tree: Path, command: list[str]) -> float:
    """CPU seconds of a new process."""
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], env=environment(tree), cwd=tree, stdout=subprocess.DEVNULL, check=True)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Worker:
    """A process that has imported a tree's regard and times its cases when asked."""

    def __init__(self, tree: Path, folder: str) -> None:
        command = [sys.executable, "-c", "import sys, against; against.serve(*sys.argv[1:])", str(tree), folder]
        child = environment(tree) | {"PYTHONPATH": os.pathsep.join([str(tree), str(Path(__file__).parent)])}
        self.process = subprocess.Popen(
            command, env=child, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.names: list[str] = self._read()

    def calls(self, name: str) -> int:
        """How many calls fill a turn."""
        self.time(name, 2)
        once = min(self.time(name, 1) for _ in range(3))
        return max(1, round(TURN / max(once, 1e-6)))

    def time(self, name: str, calls: int) -> float:
        """CPU seconds of one call, averaged over so many."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, calls]) + "\n")
        self.process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.process.args!r} ended")
        return json.loads(line)


def serve(tree: str, folder: str) -> None:
    """The loop of a worker: reads [name, calls], writes seconds per call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    import regard

    assert Path(regard.__file__).is_relative_to(tree), f"{regard.__file__} is not in {tree}"
    with torch.inference_mode():
        cases = all_cases(Path(folder), (Path(tree) / "regard" / "nn").is_dir())
        print(json.dumps(list(cases)), flush=True)
        gc.collect()
        gc.freeze()
        for line in sys.stdin:
            name, calls = json.loads(line)
            case = cases[name]
            gc.collect()
            gc.disable()
            case()  # another process had the caches
            start = time.process_time()
            for _ in range(calls):
                case()
            seconds = time.process_time() - start
            gc.enable()
            print(json.dumps(seconds / calls), flush=True)


# ---------------------------------------------------------------------------------------------------------- the cases


def save_checkpoints(folder: Path) -> None:
    """Small checkpoints with random weights, by transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    text = {"vocab_size": 500, "pad_token_id": 0}
    narrow = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    bert = transformers.BertConfig(**text, **narrow, num_hidden_layers=4)
    gpt2 = transformers.GPT2Config(
        **text, bos_token_id=1, n_embd=64, n_head=4, n_layer=4, n_positions=256, eos_token_id=None
    )
    deep = transformers.BertConfig(
        **text, hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=40
    )
    vit = transformers.ViTConfig(**narrow, num_hidden_layers=4, image_size=64, patch_size=8)
    swin = transformers.SwinConfig(
        image_size=64, patch_size=2, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    for name, model in {
        "bert": transformers.BertModel(bert),
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "deep": transformers.BertModel(deep),
        "vit": transformers.ViTModel(vit),
        "swin": transformers.SwinModel(swin),
    }.items():
        model.save_pretrained(folder / name)


def all_cases(folder: Path, renamed: bool) -> dict[str, Case]:
    """The cases by name. renamed: the tree has the names of today, not those of 3fb6da4."""
    return mask_cases() | attention_cases() | layer_cases(renamed) | model_cases(folder, renamed) | lens_cases(folder)


def mask_cases() -> dict[str, Case]:
    from regard import masks

    lengths, marks = torch.tensor([40, 64]), torch.arange(64) < torch.tensor([[40], [64]])
    documents = torch.arange(512)[None] // 100
    cells = torch.ones(64, 64, dtype=torch.bool).tril()
    local = masks.window(64, 0)
    made: dict[str, Callable[[], Any]] = {
        "padding": lambda: masks.padding(lengths),
        "padding, marked": lambda: masks.padding(marks),
        "causal": masks.causal,
        "window": lambda: masks.window(16, 0),
        "documents": lambda: masks.documents(documents),
        "dense": lambda: masks.dense(cells),
        "causal & padding": lambda: masks.causal() & masks.padding(lengths),
    }
    cases: dict[str, Case] = {f"mask: make {name}": make for name, make in made.items()}
    values = {name: make() for name, make in made.items()} | {"window | globals": local | masks.globals([0, 9])}
    for name, mask in values.items():
        n = {"documents": 512, "window | globals": 512}.get(name, 64)
        cases[f"mask: cells of {name}"] = partial(mask.dense, n)
        cases[f"mask: tiles of {name}"] = partial(mask.tiles, n, size=16)
    return cases


def attention_cases() -> dict[str, Case]:
    import regard
    from regard import masks

    def newly_padded(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> object:
        return regard.attention(q, k, v, mask=masks.padding(lengths))

    cases: dict[str, Case] = {}
    for size, shape in (("small", (2, 4, 16, 16)), ("medium", (2, 8, 256, 64)), ("long", (1, 2, 1024, 32))):
        q, k, v = (torch.randn(shape) for _ in range(3))
        n = shape[2]
        lengths = torch.tensor([n // 2, n][-shape[0] :])
        for name, mask in {
            "plain": None,
            "causal": masks.causal(),
            "padded": masks.padding(lengths),
            "causal, padded": masks.causal() & masks.padding(lengths),
            "window": masks.window(n // 8, 0),
            "cells": torch.ones(n, n, dtype=torch.bool).tril(),
        }.items():
            cases[f"attention, {size}: {name}"] = partial(regard.attention, q, k, v, mask=mask)
        cases[f"attention, {size}: padded, new mask"] = partial(newly_padded, q, k, v, lengths)
        cases[f"attention, {size}: softcap"] = partial(regard.attention, q, k, v, softcap=30.0)
    return cases


def layer_cases(renamed: bool) -> dict[str, Case]:
    import regard
    from regard import masks

    if renamed:
        from regard.nn.blocks import Block, FeedForward
    else:
        from regard.models.parts import Block, FeedForward
    layer = regard.MultiHeadAttention(64, 4).eval()
    grouped = regard.MultiHeadAttention(64, 4, position=regard.positions.Rotary(16), fused=True).eval()
    norms = [torch.nn.LayerNorm(64) for _ in range(2)]
    block = Block(regard.MultiHeadAttention(64, 4), FeedForward(64, 128, "gelu"), norms, norm_first=True).eval()
    x, causal = torch.randn(2, 32, 64), masks.causal()
    return {
        "layer: MultiHeadAttention": partial(layer, x),
        "layer: MultiHeadAttention, causal": partial(layer, x, mask=causal),
        "layer: MultiHeadAttention, fused, rotary, causal": partial(grouped, x, mask=causal),
        "layer: MultiHeadAttention, context": partial(layer, x, x),
        "layer: Block, causal": partial(block, x, mask=causal),
    }


def model_cases(folder: Path, renamed: bool) -> dict[str, Case]:
    import regard

    if renamed:
        from regard.generation.loop import generate

        write, options = "text-generation", {"max_new_tokens": 16, "pad_token_id": 0}
    else:
        from regard.models.generation.generating import generate

        write, options = "generate", {"new_tokens": 16, "eos": None, "pad": 0}
    bert, gpt2 = regard.load(folder / "bert"), regard.load(folder / "gpt2", task=write)
    vit, swin = regard.load(folder / "vit"), regard.load(folder / "swin")
    ids, image = torch.randint(1, 500, (2, 48)), torch.randn(1, 3, 64, 64)
    padded = torch.arange(48) < torch.tensor([[30], [48]])
    return {
        "text: BERT": partial(bert, ids),
        "text: BERT, padded": partial(bert, ids, padded),
        "text: GPT-2": partial(gpt2, ids),
        "text: GPT-2, 16 tokens": partial(generate, gpt2, ids[:1], None, **options),
        "text: GPT-2, 16 tokens, 2 padded": partial(generate, gpt2, ids, padded.flip(-1), **options),
        "text: load BERT, 40 layers, 645 tensors": partial(regard.load, folder / "deep"),
        "text: load GPT-2": partial(regard.load, folder / "gpt2", task=write),
        "vision: ViT": partial(vit, image),
        "vision: Swin": partial(swin, image),
        "vision: load Swin": partial(regard.load, folder / "swin"),
    }


def lens_cases(folder: Path) -> dict[str, Case]:
    import regard
    from regard import masks

    bert = regard.load(folder / "bert")
    ids = torch.randint(1, 500, (2, 48))
    q, k, v = (torch.randn(1, 4, 64, 32) for _ in range(3))
    large = [torch.randn(1, 4, 512, 64) for _ in range(3)]

    def watched() -> object:
        with regard.watch(bert) as seen:
            bert(ids)
        return seen

    causal = masks.causal()
    return {
        "lens: look, 64": partial(regard.look, q, k, v),
        "lens: look, 64, causal": partial(regard.look, q, k, v, mask=causal),
        "lens: look, 512, causal": partial(regard.look, *large, mask=causal),
        "lens: watch BERT": watched,
    }


# --------------------------------------------------------------------------------------------------------- the report


def commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--exclude=*", "--dirty= and changes"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "an unknown commit"


def heading(old: Path, new: Path, sets: int, rounds: int) -> str:
    import transformers

    processor = platform.processor() or platform.machine()
    models = Path("/proc/cpuinfo")
    if models.exists():
        lines = [line for line in models.read_text().splitlines() if line.startswith("model name")]
        processor = lines[0].partition(": ")[2] if lines else processor
    return (
        f"# {commit(new)} against {commit(old)}\n\n{processor}, one thread; Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}. CPU time of one "
        f"call, the best of {sets} sets of {rounds} turns, in µs. new ÷ old below 1 is faster now; noise is the "
        "largest difference between two processes of the old tree in one set."
    )


def table(times: dict[str, list[Times]]) -> str:
    width = max(map(len, times))
    lines = [f"{'':{width}}{'old µs':>12}{'new µs':>12}{'new ÷ old':>11}{'noise':>8}"]
    for name, sets in times.items():
        old, new = min(s[0] for s in sets), min(s[1] for s in sets)
        noise = max(abs(again / first - 1) for first, _, again in sets)
        lines.append(f"{name:{width}}{old * 1e6:12.1f}{new * 1e6:12.1f}{new / old:11.3f}{noise:8.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
