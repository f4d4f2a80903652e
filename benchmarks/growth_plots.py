"""Time and memory by length, beside the peer's: six pictures in docs/images, and the rows they are drawn from.

    make bench-plots                            # CPU, about a quarter of an hour
    make bench-plots ARGS="--device cuda"       # needs a GPU; all but the page, which is written on the CPU
    make bench-plots ARGS="lens watch"          # some of: attention, lens, watch, decode, train, page
    make bench-plots ARGS=--draw                # draws again, measures nothing

Every length is kept as soon as it is measured, in benchmarks/results/growth-cpu.json or growth-cuda.json: after Ctrl-C
or `--limit SECONDS` the same command goes on where it stopped; `--fresh` begins anew. The curves of a length take turns
in one process, and the best of the rounds counts. On the CPU, seconds are those of this process's only thread, so what
else runs on the machine does not count. A picture is drawn from the rows of the GPU where there are some.

Blue is regard, orange what people use instead, black the same work alone: the fused kernel, or the model unwatched.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from explorer import bert_base
from lens import eager
from timing import cuda_time
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from training_speed import stepper

import regard
from regard import masks
from regard.explorer.export import write_html
from regard.files import atomic_file
from regard.generation.loop import generate
from regard.growth import peak_bytes
from regard.viz.figures import Curves, growth_curves, save

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
ALONE, OURS, PEER, OURS_TOO = range(4)  # places of the curves, by which they are coloured
ROUNDS = 9
ENOUGH = {"cpu": 4.0, "cuda": 0.4}  # seconds of the rounds of a length, after which no further one begins
LONGEST = 12.0  # seconds that one call may be expected to take
LARGEST = 3 << 30  # bytes that one call may be expected to take on the CPU; a GPU's allocator says what does not fit
NEW = 64  # tokens decoded
BERTVIZ = 46  # bytes of a weight in a page of BertViz 1.4.1, which writes each twice: results/explorer-cpu.md

Row = dict[str, Any]  # of the JSON: picture, length, curve, seconds, bytes, reason, commit


@dataclass(frozen=True)
class Run:
    """One curve at one length.

    Args:
        call: runs it once and returns its seconds, or None where only its bytes are known.
        held: bytes of what the call is given, where peers are given different things: a dense mask.
        size: the bytes that are shown instead of the peak of memory.
    """

    call: Callable[[], float | None]
    held: int = 0
    size: Callable[[], int] | None = None


@dataclass(frozen=True)
class Picture:
    """What is drawn, and how a length of it is measured.

    Args:
        titles: by device.
        across: what the lengths are.
        panels: the titles of time and memory.
        curves: names in the order of ALONE, OURS, PEER and OURS_TOO; "" where there is none.
        lengths: by device; a device that is left out is not measured.
        runs: from a length and a device, the runs by their curve.
    """

    titles: dict[str, str]
    across: str
    panels: tuple[str, str]
    curves: tuple[str, str, str, str]
    lengths: dict[str, Sequence[int]]
    runs: Callable[[int, str], dict[int, Run]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", metavar="picture", help=", ".join(PICTURES))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, default=inf, help="seconds after which no length is begun")
    parser.add_argument("--fresh", action="store_true", help="measure these pictures anew")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    arguments = parser.parse_args()
    unknown = set(arguments.pictures) - set(PICTURES)
    if unknown:
        parser.error(f"there are the pictures {', '.join(PICTURES)}, not {', '.join(sorted(unknown))}")
    names = arguments.pictures or list(PICTURES)
    if not arguments.draw:
        if arguments.device == "cuda" and not torch.cuda.is_available():
            sys.exit("no CUDA device here; run without --device cuda")
        measure(names, arguments.device, arguments.limit, arguments.fresh)
    draw(names)


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(names: Sequence[str], device: str, limit: float, fresh: bool) -> None:
    """Measure what the results of this device do not have yet, shortest lengths first, and keep every length."""
    began = time.perf_counter()
    results = opened(device, names if fresh else ())
    rows: list[Row] = results["rows"]
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")
    transformers.utils.logging.set_verbosity_error()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    try:
        for name in names:
            for n in PICTURES[name].lengths.get(device, ()):
                if any(row["picture"] == name and row["length"] == n for row in rows):
                    continue
                if time.perf_counter() - began > limit:
                    print(f"{limit:g} s are over; the same command goes on with {name} at {n:,}")
                    return
                rows += [row | {"commit": commit.strip()} for row in measured(name, n, device, rows)]
                keep(device, results)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")


def opened(device: str, without: Sequence[str]) -> dict[str, Any]:
    """What was measured before on this machine with these versions, without some pictures; or nothing yet."""
    machine = torch.cuda.get_device_name() if device == "cuda" else processor()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "regard": regard.__version__,
    }
    results = {"device": device, "machine": machine, "versions": versions, "rows": []}
    path = RESULTS / f"growth-{device}.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in before["rows"] if row["picture"] not in without]
        if rows and before | {"rows": []} != results:
            sys.exit(
                f"{path.name} was measured on {before['machine']} with {before['versions']}, here is {machine} with "
                f"{versions}: measure everything with --fresh"
            )
        results["rows"] = rows
    return results


def processor() -> str:
    """The name of the CPU."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def keep(device: str, results: dict[str, Any]) -> None:
    """Write the results, a line for each row."""
    head = json.dumps(results | {"rows": []}, ensure_ascii=False)[: -len("]}")]
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in results["rows"])
    with atomic_file(RESULTS / f"growth-{device}.json", "the results") as file:
        file.write(f"{head}\n{rows}\n]}}\n".encode())


def measured(name: str, n: int, device: str, rows: list[Row]) -> list[Row]:
    """A row for every curve that goes on to this length."""
    done: dict[int, Row] = {}
    going: dict[int, Run] = {}
    runs = PICTURES[name].runs(n, device)
    for curve, run in runs.items():
        past = [row for row in rows if row["picture"] == name and row["curve"] == curve]
        if past and past[-1]["reason"]:
            continue
        done[curve] = {"picture": name, "length": n, "curve": curve, "seconds": None, "bytes": None}
        reason = too_much(past, memory=device == "cpu" and run.size is None)
        if not reason:
            try:
                run.call()  # compiles what there is to compile
                done[curve]["bytes"] = run.size() if run.size else run.held + peak_bytes(run.call, torch.device(device))
                going[curve] = run
            except torch.OutOfMemoryError:
                reason = "out of memory"
                torch.cuda.empty_cache()
        done[curve]["reason"] = reason
    times: dict[int, list[float]] = {curve: [] for curve in going}
    began = time.perf_counter()
    for turn in range(ROUNDS):
        for curve in sorted(going, reverse=bool(turn % 2)):  # none is always the one that comes after another
            seconds = going[curve].call()
            times[curve] += [] if seconds is None else [seconds]
        if time.perf_counter() - began > ENOUGH[device]:
            break
    for curve, row in done.items():
        row["seconds"] = min(times.get(curve, []), default=None)
        print(line(row), flush=True)
    return list(done.values())


def too_much(past: list[Row], memory: bool) -> str:
    """Why the next length is not run, if time, and memory if it counts, go on growing as they did; or ""."""
    for unit, most, text in (("bytes", LARGEST if memory else inf, "{:.1f} GB"), ("seconds", LONGEST, "{:.0f} s")):
        known = [row[unit] for row in past[-2:] if row[unit]]
        expected = known[1] * known[1] / known[0] if len(known) == 2 else 0.0
        if expected > most:
            return f"not run, about {text.format(expected if unit == 'seconds' else expected / 1e9)}"
    return ""


def line(row: Row) -> str:
    """A row as it is printed while it is measured."""
    seconds = "" if row["seconds"] is None else f"{row['seconds'] * 1e3:,.3f} ms"
    size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.1f} MB"
    curve = PICTURES[row["picture"]].curves[row["curve"]]
    return f"{row['picture']:10} {row['length']:>8,}  {curve:34} {seconds:>14} {size:>12}  {row['reason']}"


def clocked(call: Callable[[], object], device: str, held: int = 0, per: int = 1) -> Run:
    """A call and its clock. per: what its seconds are divided by."""

    def timed() -> float:
        if device == "cuda":
            first = cuda_time(call, 1)
            times = min(50, int(0.02 / first))
            return (first if times < 2 else cuda_time(call, times)) / per
        start = time.process_time()
        call()
        return (time.process_time() - start) / per

    return Run(timed, held)


# ----------------------------------------------------------------------------------------------------------- pictures


def arrays(heads: int, n: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (1, heads, n, 64)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, heads, n, 64, device=device, dtype=dtype) for _ in range(3))
    return q, k, v


def attention(n: int, device: str) -> dict[int, Run]:
    """Without a mask, and with a window, which SDPA takes as a dense mask."""
    width = 1024 if device == "cuda" else 256
    q, k, v = arrays(16 if device == "cuda" else 4, n, device)
    window = masks.window(width, 0)

    @cache
    def dense() -> Tensor:
        return torch.ones(n, n, dtype=torch.bool, device=device).tril_().triu_(-width)

    return {
        ALONE: clocked(lambda: sdpa(q, k, v), device),
        OURS: clocked(lambda: regard.attention(q, k, v), device),
        PEER: clocked(lambda: sdpa(q, k, v, attn_mask=dense()), device, held=n * n),
        OURS_TOO: clocked(lambda: regard.attention(q, k, v, mask=window), device),
    }


def lens(n: int, device: str) -> dict[int, Run]:
    """Causal: the output alone, with the measures of `look`, and with the whole matrix of weights."""
    q, k, v = arrays(16 if device == "cuda" else 4, n, device)
    causal = masks.causal()
    return {
        ALONE: clocked(lambda: sdpa(q, k, v, is_causal=True), device),
        OURS: clocked(lambda: regard.look(q, k, v, mask=causal), device),
        PEER: clocked(lambda: eager(q, k, v, True), device),
    }


def llama(device: str, **values: Any) -> transformers.LlamaConfig:
    """Four layers of LLaMA-1B's width, or of an eighth of it on the CPU."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    if device == "cuda":
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    size = {"num_hidden_layers": 4, "vocab_size": 32_000, "max_position_embeddings": 1 << 18}
    return transformers.LlamaConfig(**sizes, **size, pad_token_id=0, eos_token_id=None, **values)


@cache
def theirs(architecture: str, kind: str, device: str) -> Any:
    """A model of `transformers` of this shape with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, architecture)(llama(device, attn_implementation=kind))
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


def watch(n: int, device: str) -> dict[int, Run]:
    """A model of `transformers`: alone, watched, and with output_attentions=True."""
    ids = torch.randint(0, 32_000, (1, n), device=device)
    fused, slow = theirs("LlamaModel", "sdpa", device), theirs("LlamaModel", "eager", device)

    def watched() -> None:
        with torch.inference_mode(), regard.watch(fused):
            fused(ids, use_cache=False)

    return {
        ALONE: clocked(torch.inference_mode()(lambda: fused(ids, use_cache=False)), device),
        OURS: clocked(watched, device),
        PEER: clocked(torch.inference_mode()(lambda: slow(ids, use_cache=False, output_attentions=True)), device),
    }


@cache
def our_llama(device: str) -> Any:
    """The model of `theirs` as regard's own."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return regard.build(llama(device), task="text-generation", dtype=dtype, device=device).eval()


class Marks:
    """When the tokens came; those after the second are timed: not the prompt, and not the capture of a CUDA graph."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, []

    def __call__(self, *_: object) -> None:
        """Mark the time of a token; as `on_token` of `generate`."""
        if self.device == "cuda" and len(self.times) in (1, NEW - 1):
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() if self.device == "cuda" else time.process_time())

    def put(self, tokens: Tensor) -> None:
        """What `transformers` gives a streamer: the prompt, then each token."""
        if tokens.numel() == 1:
            self()

    def end(self) -> None:
        """The end of the stream."""

    def seconds(self) -> float:
        """Of one token."""
        assert len(self.times) == NEW, self.times
        return (self.times[-1] - self.times[1]) / (NEW - 2)


def decode(n: int, device: str) -> dict[int, Run]:
    """`generate` of each, greedily, after a prompt of n tokens; on a GPU theirs has a static cache and is compiled."""
    ids = torch.randint(1, 32_000, (1, n), device=device)
    ours, peer = our_llama(device), theirs("LlamaForCausalLM", "sdpa", device)
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "attention_mask": torch.ones_like(ids)}
    if device == "cuda":
        options["cache_implementation"] = "static"

    def our_step() -> float:
        marks = Marks(device)
        generate(ours, ids, None, max_new_tokens=NEW, pad_token_id=0, on_token=marks)
        return marks.seconds()

    def their_step() -> float:
        marks = Marks(device)
        peer.generate(ids, streamer=marks, **options)
        return marks.seconds()

    return {OURS: Run(our_step), PEER: Run(their_step)}


@cache
def trained(whose: int, longest: int, device: str) -> torch.nn.Module:
    """A GPT-2 of four layers in training mode, ours or theirs."""
    sizes = {"n_embd": 768, "n_head": 12} if device == "cuda" else {"n_embd": 256, "n_head": 4, "vocab_size": 5000}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_layer=4, n_positions=longest, **sizes, **drops)
    config.architectures = ["GPT2LMHeadModel"]
    if whose == OURS:
        return regard.build(config, device=device)
    return transformers.GPT2LMHeadModel(config).to(device)


def train(n: int, device: str) -> dict[int, Run]:
    """Steps on equally many tokens, in fewer and longer texts; neither is compiled, ours as `regard.train` calls it."""
    lengths = PICTURES["train"].lengths[device]
    tokens = lengths[-1]
    ids = torch.randint(0, 5000, (tokens // n, n), device=device)
    batch = {"input_ids": ids, "labels": ids}
    batches = {OURS: batch | {"skip_logits": True}, PEER: batch}
    models = {whose: trained(whose, tokens, device) for whose in batches}
    return {whose: clocked(stepper(models[whose], batches[whose]), device, per=tokens) for whose in batches}


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Where pages are written; it goes with the process."""
    return tempfile.TemporaryDirectory()


def page(n: int, device: str) -> dict[int, Run]:
    """BERT-base's shape, from a session to a file; BertViz's file as its formula gives it: L·H·N² numbers."""
    path = Path(folder().name, "page.html")

    def ours() -> float:
        session = bert_base(n)  # anew: it keeps what it has computed
        start = time.process_time()
        write_html(session, path)
        return time.process_time() - start

    layers = heads = 12
    return {
        OURS: Run(ours, size=lambda: path.stat().st_size),
        PEER: Run(lambda: None, size=lambda: BERTVIZ * layers * heads * n * n),
    }


def doubling(first: int, last: int, step: int = 2) -> list[int]:
    """Lengths from first to last.

    >>> doubling(256, 4096, 4)
    [256, 1024, 4096]
    """
    lengths = [first]
    while lengths[-1] < last:
        lengths.append(lengths[-1] * step)
    return lengths


PICTURES = {
    "attention": Picture(
        titles={"cpu": "Attention, 4 heads of 64, window 256", "cuda": "Attention, 16 heads of 64, window 1024"},
        across="tokens",
        panels=("Time of a call", "Memory, with the mask"),
        curves=("SDPA", "regard", "SDPA, window as mask", "regard, window"),
        lengths={"cpu": doubling(256, 16_384), "cuda": doubling(1024, 131_072)},
        runs=attention,
    ),
    "lens": Picture(
        titles={
            "cpu": "Measures of every weight, 4 heads of 64, causal",
            "cuda": "Measures of every weight, 16 heads of 64, causal",
        },
        across="tokens",
        panels=("Time of a call", "Memory above the inputs"),
        curves=("SDPA, output only", "regard.look", "eager, with weights", ""),
        lengths={"cpu": doubling(256, 16_384), "cuda": doubling(1024, 131_072)},
        runs=lens,
    ),
    "watch": Picture(
        titles={
            "cpu": "A watched LLaMA, 4 layers, 256 wide",
            "cuda": "A watched LLaMA, 4 layers, 2048 wide",
        },
        across="tokens of the prompt",
        panels=("Time of a forward pass", "Memory above model and input"),
        curves=("not watched", "regard.watch", "output_attentions=True", ""),
        lengths={"cpu": doubling(256, 8192), "cuda": doubling(1024, 131_072)},
        runs=watch,
    ),
    "decode": Picture(
        titles={
            "cpu": "Decoding, a LLaMA of 4 layers, 256 wide",
            "cuda": "Decoding, a LLaMA of 4 layers, 2048 wide",
        },
        across="tokens of context",
        panels=("Time of a token", "Memory of the whole call, above the model"),
        curves=("", "regard", "transformers", ""),
        lengths={"cpu": doubling(256, 8192), "cuda": doubling(1024, 65_536, 4)},
        runs=decode,
    ),
    "train": Picture(
        titles={
            "cpu": "Training, a GPT-2 of 4 layers, 256 wide, 2,048 tokens a step",
            "cuda": "Training, a GPT-2 of 4 layers, 768 wide, 16,384 tokens a step",
        },
        across="tokens of a text",
        panels=("Time of a token", "Memory of a step, above the model"),
        curves=("", "regard", "transformers", ""),
        lengths={"cpu": doubling(128, 2048), "cuda": doubling(256, 16_384, 4)},
        runs=train,
    ),
    "page": Picture(
        titles={"cpu": "A page of every head, BERT-base"},
        across="tokens of the text",
        panels=("Time to write it", "Size of the file"),
        curves=("", "regard", "BertViz (computed)", ""),
        lengths={"cpu": doubling(32, 2048)},
        runs=page,
    ),
}


# ------------------------------------------------------------------------------------------------------------ drawing


def draw(names: Sequence[str]) -> None:
    """Draw the pictures that have rows, from the GPU's where there are some."""
    kept = [RESULTS / f"growth-{device}.json" for device in ("cuda", "cpu")]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in kept if path.exists()]
    for name in names:
        for result in results:
            rows = [row for row in result["rows"] if row["picture"] == name]
            if rows:
                path = save(drawn(name, rows, result), IMAGES / f"growth-{name}.png")
                print(f"drawn: {path.relative_to(ROOT)}, {path.stat().st_size / 1e3:.0f} kB, from {result['device']}")
                break


def drawn(name: str, rows: list[Row], result: dict[str, Any]) -> Any:
    """The figure of one picture."""
    picture, lengths = PICTURES[name], sorted({row["length"] for row in rows})
    where = f"{result['machine']}, bf16" if result["device"] == "cuda" else "CPU time of one thread, fp32"
    panels = []
    for title, unit, sign in zip(picture.panels, ("seconds", "bytes"), ("s", "B"), strict=True):
        lines = {}
        for curve, label in enumerate(picture.curves):
            own = {row["length"]: row for row in rows if row["curve"] == curve}
            ends = [f"{short(n)}: {row['reason']}" for n, row in own.items() if row["reason"]]
            lines["\n".join([label, *ends]) or f"no {curve}"] = [own[n][unit] if n in own else None for n in lengths]
        panels.append(Curves(title, sign, lines))
    return growth_curves(lengths, panels, title=f"{picture.titles[result['device']]} ({where})", xlabel=picture.across)


def short(n: int) -> str:
    """A length as the axis writes it."""
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}"


if __name__ == "__main__":
    main()
