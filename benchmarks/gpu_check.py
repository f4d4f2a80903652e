"""Run every GPU-only path of regard once, compare it with the CPU in fp64, and record the result.

    python benchmarks/gpu_check.py                     # on a machine with a GPU; writes results/gpu-check.json
    python benchmarks/gpu_check.py --only lens         # checks whose name contains "lens"; writes nothing
    python benchmarks/gpu_check.py --device cpu        # the same checks on the CPU: does the script run? Writes nothing
    python benchmarks/gpu_check.py --pending "reason"  # GPU code changed and no GPU is at hand: say so in the record

CI has no GPU. The record holds a hash of every source file that runs on one, and tests/test_gpu_record.py fails when a
file differs from the record, unless the record says `pending`: which files, and why they were not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a check is a process already

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "gpu-check.json"
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "models", "lens"))]  # what tests share

# Beside every module that names CUDA or Triton: what the GPU paths run through.
ALSO = (
    "backends", "masks", "lens/measures", "lens/taps", "generation", "nn", "op.py", "positions.py", "rotary.py",
    "checks.py", "models/vision_language.py",
)  # fmt: skip


def gpu_files() -> dict[str, str]:
    """Path → SHA-256 of every source file that runs on a GPU."""
    package, hashes = ROOT / "regard", {}
    also = [package / name for name in ALSO]
    if missing := [str(path.relative_to(ROOT)) for path in also if not path.exists()]:
        raise FileNotFoundError(f"gpu_check.ALSO names {', '.join(missing)}, which is gone: update the list")
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        if re.search(rb"cuda|triton", text, re.IGNORECASE) or any(path == a or a in path.parents for a in also):
            hashes[path.relative_to(ROOT).as_posix()] = hashlib.sha256(text).hexdigest()
    return hashes


def changed_files(record: dict[str, Any]) -> list[str]:
    """The GPU files that are not as they were when the record was made: changed, new or gone."""
    now, then = gpu_files(), record["files"]
    return sorted(path for path in now.keys() | then.keys() if now.get(path) != then.get(path))


# ------------------------------------------------------------------------------------------------------------- checks


def check_backends(device: str) -> str:
    """tiled, sdpa and sparse, forward and backward, under masks and arguments of the conformance suite."""
    import torch

    import regard
    from regard.testing import Case, conform

    cases = [Case("several tiles", mask, "plain") for mask in ("causal", "window", "padding left")]
    cases += [Case("several tiles", "rows without keys", "all together"), Case("one query", "causal", "sinks")]
    cases += [Case("fewer queries, grouped, narrow v", "causal and padding", "softcap")]
    ran = 0
    for backend in ("tiled", "sdpa", "sparse"):
        for case in cases:
            for dtype in (torch.bfloat16, torch.float32) if backend != "sparse" else (torch.bfloat16,):
                q, k, v, extra = case.build(dtype, device)
                if any(name == backend and can for name, can, _ in regard.backends.explain(q, k, v, **extra).rows):
                    conform(partial(regard.attention, backend=backend), case, dtype, device)
                    ran += 1
    return f"{ran} calls"


def check_flex(device: str) -> str:
    """Compiled FlexAttention, forward and backward."""
    import torch

    import regard
    from regard.testing import Case, conform

    cases = [("causal and padding", "plain"), ("window", "sinks"), ("none", "ALiBi")]
    for mask, arguments in cases:
        gradient = device == "cuda"  # FlexAttention has no backward on the CPU
        case = Case("several tiles", mask, arguments)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        conform(partial(regard.attention, backend="flex"), case, dtype, device, gradient=gradient)
    return f"{len(cases)} calls"


def check_sparse_kernels(device: str) -> str:
    """The Triton kernels of the sparse backend, forward and backward, at sizes of real calls."""
    import torch

    import regard
    from regard import masks
    from regard.backends import sparse_gpu
    from regard.backends.call import prepare
    from regard.testing import assert_rule

    all_masks = [masks.window(128, 0), masks.window(64, 64) | masks.globals([0])]
    for mask in all_masks:
        for dtype in (torch.bfloat16, torch.float32) if mask is all_masks[0] else (torch.bfloat16,):
            q, k, v, up = (torch.randn(2, 4, 1100, 64, device=device, dtype=dtype) for _ in range(4))
            assert device == "cpu" or sparse_gpu.unsupported_reason(prepare(q, k, v, mask=mask)) is None

            def run(backend: str, wide: bool, given: Any = (q, k, v), up: Any = up, mask: Any = mask) -> list[Any]:
                leaves = [x.double() if wide else x for x in given]
                leaves = [x.detach().clone().requires_grad_() for x in leaves]
                out = regard.attention(*leaves, mask=mask, backend=backend)
                return [out.detach(), *torch.autograd.grad(out, leaves, up.to(out.dtype))]

            ours, baseline, truth = run("sparse", False), run("reference", False), run("reference", True)
            for what, mine, base, true in zip(("output", "dq", "dk", "dv"), ours, baseline, truth, strict=True):
                assert_rule(mine, base, true, gradient=what != "output", what=f"{mask!r}, {dtype}: {what}")
    return f"{len(all_masks) + 1} calls"


def check_short(device: str) -> str:
    """The kernel of short sequences under masks, biases and dtypes, and windows as Swin has them, also compiled."""
    import torch

    import regard
    from regard import masks
    from regard.backends import reference
    from regard.backends.call import prepare
    from regard.nn.windows import WindowTable
    from regard.testing import Case, assert_rule, conform

    if device == "cpu":
        return "not run: it needs a GPU"
    ran = 0
    for shape in ("square", "fewer queries, grouped, narrow v", "more queries than keys, wide v"):
        for mask, arguments in (("none", "bias"), ("rows without keys", "bias with −∞"), ("window per head", "scale")):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                case = Case(shape, mask, arguments)
                conform(partial(regard.attention, backend="short"), case, dtype, device, gradient=False)
                ran += 1
    table, regions = WindowTable(7, 6).to(device), torch.randint(0, 3, (640, 49), device=device)
    nowhere = torch.arange(49, device=device)[None] != 11  # a query without keys
    mask = masks.documents(regions) & masks.queries(nowhere)

    def windows(joined: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.reshape(640, 49, 6, 32).transpose(1, 2) for x in joined.split(192, -1))
        return regard.attention(q, k, v, bias=table.bias(q, 1.0), mask=mask)

    for dtype in (torch.bfloat16, torch.float32):
        joined = torch.randn(640, 49, 3 * 192, device=device, dtype=dtype)
        table = table.to(dtype)
        q, k, v = (x.reshape(640, 49, 6, 32).transpose(1, 2) for x in joined.split(192, -1))
        with torch.no_grad():
            assert regard.backends.explain(q, k, v, mask=mask, bias=table.bias(q, 1.0)).chosen == "short"
            found = {"as it is": windows(joined), "compiled": torch.compile(windows, fullgraph=True)(joined)}
            call = prepare(q, k, v, mask=mask, bias=table.bias(q, 1.0))
            baseline = reference.run(call)
            wide = prepare(*(x.double() for x in (q, k, v)), mask=mask, bias=table.double().bias(q, 1.0))
            truth = reference.run(wide)
        q = torch.randn(1, 2, 40, 32, device=device)
    low = torch.full((1, 1, 40, 40), torch.finfo(torch.float32).min, device=device)
    for bias in (low, low.triu(1), -low.triu(1)):  # near the limits of fp32
        with torch.no_grad():
            found["limits"] = regard.attention(q, q, q, bias=bias, backend="short")
        torch.testing.assert_close(
            found.pop("limits"), reference.run(prepare(q, q, q, bias=bias)), rtol=1e-3, atol=1e-4
        )
    for name, out in found.items():
        assert_rule(out, baseline, truth, what=f"windows, {dtype}, {name}")
        ran += 1
    return f"{ran} calls"


def check_lens(device: str) -> str:
    """Every measure of `look` against dense fp64, at ordinary and at large logits."""
    import torch
    from dense_measures import assert_measures, assert_top, measures_from_lse, measures_of

    import regard
    from regard import masks
    from regard.backends.call import prepare
    from regard.lens.measures.measures import NAMES

    padding = masks.padding(torch.tensor([517, 300]))
    kinds = [
        (torch.bfloat16, 64, None),
        (torch.bfloat16, 64, padding & masks.causal()),
        (torch.bfloat16, 128, masks.causal()),
        (torch.float32, 64, masks.window(40, 0)),
    ]
    for dtype, width, mask in kinds:
        for size in (1.0, 1e3, 1e6):
            q, k, v = (torch.randn(2, 3, 517, width, device=device, dtype=dtype) for _ in range(3))
            q = q * size
            view = regard.look(q, k, v, mask=mask, measures=NAMES, top=5)
            assert device == "cpu" or view.engine == "triton"
            found = {name: x.cpu() for name, x in view.held.items()}
            q, k, v = q.cpu(), k.cpu(), v.cpu()
            same = prepare(q, k, v, mask=mask)
            truth = measures_of(prepare(q.double(), k.double(), v.double(), mask=mask), 64)
            large = size > 1  # then lse is exact, and no allowance is made for its rounding
            baseline = measures_of(same, 64) if large else measures_from_lse(same, 64, backwards=False)
            what, step = f"{mask!r}, {dtype}, D {width}, logits × {size:g}", 1.0 if large else None
            assert_measures(found, baseline, truth, what, step)
            assert_top(found, baseline, truth, what, step)
    return f"{3 * len(kinds)} views"


def check_hopper(device: str, part: int) -> str:
    """A third of the calls that the kernel for Hopper measures, against dense fp64."""
    import test_hopper
    import torch

    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        return "nothing: not a Hopper GPU"
    calls = list(test_hopper.ON_GPU.items())[part - 1 :: 3]
    for name, arguments in calls:
        test_hopper.check(name, **arguments)
    return f"{len(calls)} views"


def tiny_models() -> dict[str, tuple[str, Any]]:
    """Architecture and config of small models whose shapes reach the decoding kernels."""
    from transformers import GPT2Config, LlamaConfig

    llama = LlamaConfig(
        vocab_size=1009, hidden_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1408, max_position_embeddings=400,
    )  # fmt: skip
    gpt2 = GPT2Config(vocab_size=1009, n_embd=384, n_layer=3, n_head=6, n_positions=400)
    return {"GPT-2": ("GPT2LMHeadModel", gpt2), "LLaMA": ("LlamaForCausalLM", llama)}


def check_decoding(device: str, name: str, batch: int) -> str:
    """Captured decoding steps against whole passes, and `generate` against the CPU."""
    import torch
    from twins import Twin

    from regard.generation.loop import generate
    from regard.testing import assert_rule

    architecture, config = tiny_models()[name]
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 1009, (batch, 170), generator=random)
    mask = torch.arange(120) >= (torch.arange(batch) * 11)[:, None] if batch > 1 else None
    new = ids[:, 120:]
    whole = None if mask is None else torch.cat([mask, torch.ones_like(new, dtype=torch.bool)], 1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        twin = Twin(architecture, config, Path(folder))
        truth = twin.ours(torch.float64)(ids, whole).logits[:, 120:]
        for dtype in (torch.float32, torch.bfloat16):
            model = twin.ours(dtype, device=device)
            places = [None if x is None else x.to(device) for x in (ids[:, :120], mask, new, ids, whole)]
            _, state = model.begin(places[0], places[1], length=170)
            made = torch.stack([model.step(state, column).clone() for column in places[2].T], 1)
            assert device == "cpu" or state.captured is not None, "the step was not captured"
            baseline = model(places[3], places[4]).logits[:, 120:]
            assert_rule(made.cpu(), baseline.cpu(), truth, what=f"{name}, batch {batch}, {dtype}")
        here, there = (
            generate(twin.ours(torch.float32, device=d), ids[:, :120].to(d), None if mask is None else mask.to(d),
                     max_new_tokens=30, pad_token_id=0).ids.cpu()
            for d in ("cpu", device)
        )  # fmt: skip
        assert torch.equal(here, there), "generate gives other tokens than on the CPU"
    return "50 steps, 30 generated tokens"


def check_decoding_long(device: str) -> str:
    """Captured steps as after long prompts: programs with many keys each, and a kernel that combines their parts."""
    from unittest.mock import patch

    from regard.generation import cuda_step

    with patch.multiple(cuda_step, CHUNKS=(16, 128), PROGRAMS=1, FEW=0):
        check_decoding(device, "LLaMA", 8)
    with patch.multiple(cuda_step, CHUNKS=(64, 16), PROGRAMS=1, TILE=16):  # many programs, some with padding alone
        return check_decoding(device, "LLaMA", 8)


def check_llava(device: str) -> str:
    """Captured steps after an image."""
    import test_llava
    import torch

    from regard.testing import assert_rule

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        twin = test_llava.twin_of("ForConditionalGeneration", test_llava.USUAL_NAME, Path(folder))
        model = twin.ours(torch.float32, device=device)
        given = {n: x.to(device) for n, x in test_llava.chosen(test_llava.USUAL_NAME, "a batch").items()}
        more = torch.randint(7, 31, (4, 5), generator=torch.Generator().manual_seed(11)).to(device)
        reading = model.read_image(given["pixel_values"])
        _, state = reading.begin(given["input_ids"], given["attention_mask"], length=given["input_ids"].shape[1] + 5)
        made = torch.stack([reading.step(state, column).clone() for column in more.T])
        assert device == "cpu" or state.captured is not None, "the step was not captured"
        baseline = test_llava.continued(model, given, more)
        truth = test_llava.continued(model.double(), given, more)
    assert_rule(made, baseline, truth)
    return "5 steps, batch 4"


def check_long(device: str, name: str) -> str:
    """Longformer (a global token) and BigBird against the same model in fp64 on the CPU."""
    import torch
    import transformers
    from twins import Twin

    from regard.testing import assert_rule

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    if name == "Longformer":
        config = transformers.LongformerConfig(
            vocab_size=101, attention_window=[32, 64], max_position_embeddings=600, pad_token_id=1, **shape
        )
    else:
        config = transformers.BigBirdConfig(vocab_size=101, max_position_embeddings=600, block_size=16, **shape)
    ids = torch.randint(3, 101, (2, 512), generator=torch.Generator().manual_seed(5))
    mask = torch.arange(512) < torch.tensor([[512], [391]])
    extra = {"global_attention_mask": torch.arange(512).expand(2, 512) == 0} if name == "Longformer" else {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        twin = Twin(f"{name}Model", config, Path(folder))

        def hidden(dtype: torch.dtype, where: str) -> torch.Tensor:
            given = {n: x.to(where) for n, x in extra.items()}
            return twin.ours(dtype, device=where)(ids.to(where), mask.to(where), **given).last_hidden_state.cpu()[mask]

        truth = hidden(torch.float64, "cpu")
        for dtype in (torch.float32, torch.bfloat16):
            assert_rule(hidden(dtype, device), hidden(dtype, "cpu"), truth, what=f"{name}, {dtype}")
        if name == "Longformer" and device == "cuda":
            check_capture(twin.ours(torch.bfloat16, device=device), ids, mask, extra["global_attention_mask"])
    return "2 texts of 512 tokens"


def check_capture(model: Any, ids: Any, mask: Any, chosen: Any) -> None:
    """A CUDA graph of a call with roles that were made once reads other ids, and gives what a call gives."""
    import torch

    from regard.nn.sparse_attention import Roles

    ids, mask, chosen = (x.cuda() for x in (ids, mask, chosen))
    roles, given, graph = Roles.of(mask, chosen), ids.flip(1), torch.cuda.CUDAGraph()
    model(given, mask, global_attention_mask=roles)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = model(given, mask, global_attention_mask=roles).last_hidden_state
    given.copy_(ids)
    graph.replay()
    assert torch.equal(out[mask], model(ids, mask, global_attention_mask=chosen).last_hidden_state[mask])


def check_compile(device: str) -> str:
    """torch.compile of a model, forward and backward, against the same model as it is."""
    import torch
    from twins import Twin

    from regard.testing import assert_rule

    architecture, config = tiny_models()["LLaMA"]
    ids = torch.randint(3, 1009, (3, 65), generator=torch.Generator().manual_seed(5)).to(device)

    def outcome(model: Any, call: Any) -> list[Any]:
        logits = call(ids).logits
        up = torch.randn(logits.shape, generator=torch.Generator().manual_seed(6)).to(logits)
        weight = next(p for n, p in model.named_parameters() if p.ndim == 2)
        return [logits.detach(), torch.autograd.grad((logits * up).sum(), weight)[0]]

    with tempfile.TemporaryDirectory() as folder:
        twin = Twin(architecture, config, Path(folder))
        model = twin.ours(torch.float32, device=device)
        plain, compiled = outcome(model, model), outcome(model, torch.compile(model))
        wide = model.double()
        truth = outcome(wide, wide)
    for what, ours, base, true in zip(("logits", "gradient"), compiled, plain, truth, strict=True):
        assert_rule(ours, base, true, gradient=what == "gradient", what=what)
    return "LLaMA, forward and backward"


def check_training(device: str) -> str:
    """`regard.train` of a small ViT, as it is and in CUDA graphs: the losses of the CPU."""
    import numpy as np
    import torch

    import regard
    from regard.testing import assert_rule

    sizes = {"image_size": 12, "patch_size": 4, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
    random = np.random.default_rng(7)
    images = random.integers(0, 256, (37, 12, 12, 3), dtype=np.uint8), random.integers(0, 5, 37)

    def losses(dtype: torch.dtype, device: str, mode: Any) -> torch.Tensor:
        torch.compiler.reset()
        model = regard.build("vit", **sizes, num_hidden_layers=2, num_labels=5, dtype=dtype, device=device)
        recipe = regard.recipes.ImageClassification.for_model(model, flip=True, shift=2, mixup=0.3, cutmix=0.7)
        with tempfile.TemporaryDirectory() as out:
            options = {"steps": 6, "batch_size": 11, "log_every": 1, "eps": 1e-3, "ema": 0.9, "compile": mode}
            regard.train(model, recipe, images, out=out, eval_data=images, progress=False, **options)
            lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
        return torch.tensor([line.get("loss", line.get("eval_loss")) for line in lines], dtype=torch.float64)

    truth, baseline = losses(torch.float64, "cpu", False), losses(torch.float32, "cpu", False)
    for mode in (False, "reduce-overhead"):
        assert_rule(losses(torch.float32, device, mode), baseline, truth, gradient=True, what=f"compile={mode}")
    return "ViT, 6 steps, as it is and in CUDA graphs"


def check_watch(device: str) -> str:
    """`watch` on bf16 models, ours and transformers': the same bits, and measures as dense fp64 gives them."""
    import torch
    import transformers
    from dense_measures import assert_measures, dense_measures
    from twins import Twin

    import regard
    from regard import masks
    from regard.backends import reference
    from regard.backends.call import prepare

    architecture, config = tiny_models()["LLaMA"]
    ids = torch.randint(3, 1009, (2, 211), generator=torch.Generator().manual_seed(5)).to(device)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        twin = Twin(architecture, config, Path(folder))
        ours = twin.ours(torch.bfloat16, device=device)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).to(device)
        for model in (ours, theirs):
            before = model(ids).logits
            with regard.watch(model, keep="qk") as seen:
                during = model(ids).logits
            assert torch.equal(before, during), "watching changed the logits"
            assert len(seen.names) == 3
            for layer in range(3):
                view = seen[layer]
                kept = view.weights.call
                q, k = kept.q.cpu(), kept.k.cpu()
                wide, same = (
                    reference.stages(prepare(q.to(t), k.to(t), k.to(t), mask=masks.causal(), scale=kept.scale))
                    for t in (torch.float64, torch.bfloat16)
                )
                truth, baseline = (dense_measures(s.weights, s.masked, s.lse, None, 64) for s in (wide, same))
                found = {name: getattr(view, name) for name in ("entropy", "received")}
                assert_measures(found, baseline, truth, f"layer {layer}")
    return "2 models, 3 layers each"


# Those that take longest come first.
CHECKS: dict[str, Callable[[str], str]] = {
    **{f"lens kernel for Hopper, {part} of 3": partial(check_hopper, part=part) for part in (1, 2, 3)},
    "lens kernels": check_lens,
    "sparse kernels": check_sparse_kernels,
    "flex": check_flex,
    "training": check_training,
    "compile": check_compile,
    **{
        f"decoding {name}, batch {batch}": partial(check_decoding, name=name, batch=batch)
        for name in ("GPT-2", "LLaMA")
        for batch in (1, 8)
    },
    "decoding LLaMA, long": check_decoding_long,
    "watch": check_watch,
    "short sequences": check_short,
    "backends": check_backends,
    "LLaVA": check_llava,
    "Longformer": partial(check_long, name="Longformer"),
    "BigBird": partial(check_long, name="BigBird"),
}


# -------------------------------------------------------------------------------------------------------------- record


def run_check(name: str, device: str) -> dict[str, Any]:
    """The row of one check."""
    import torch

    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        row = {"name": name, "result": "pass", "detail": CHECKS[name](device)}
    except Exception as error:
        traceback.print_exc()
        row = {"name": name, "result": "fail", "detail": f"{type(error).__name__}: {error}"[:300]}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def run_checks(device: str, only: str, jobs: int) -> list[dict[str, Any]]:
    """The row of each check, printed as it ends. Most of the time is compilation, so `jobs` processes share them."""
    names, rows = [name for name in CHECKS if only in name], {}
    context = multiprocessing.get_context("forkserver")  # its processes have the imports already
    context.set_forkserver_preload(["torch", "transformers", "pytest", "regard.lens.watch", "regard.models.loading"])
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for ended in as_completed([pool.submit(run_check, name, device) for name in names]):
            row = ended.result()
            rows[row["name"]] = row
            print(f"{row['result']}  {row['seconds']:6.1f} s  {row['name']}: {row['detail']}", flush=True)
    return [rows[name] for name in names]


def versions() -> dict[str, str]:
    """Of everything that the result depends on."""
    import torch
    import transformers
    import triton

    import regard

    modules = (torch, triton, transformers, regard)
    return {"python": platform.python_version()} | {m.__name__: m.__version__ for m in modules}


def commit() -> str:
    """The commit that is checked out, in short."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def mark_pending(reason: str) -> None:
    """Note in the record which files changed since it was made, and why they were not run."""
    record = json.loads(RECORD.read_text("utf-8"))
    now, changed = gpu_files(), changed_files(record)
    record["pending"] = {"reason": reason, "files": {path: now.get(path) for path in changed}} if changed else None
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"pending: {len(changed)} files" if changed else "nothing is pending: the files are those of the record")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the checks whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=8, metavar="N", help="processes that share the checks; default: 8")
    parser.add_argument("--pending", metavar="REASON", help="record that GPU files changed and were not run")
    parser.add_argument("--commit", default=commit(), help="name of the commit in the record; default: HEAD")
    parser.add_argument("--out", type=Path, default=RECORD, help="where to write the record")
    given = parser.parse_args()
    if given.pending is not None:
        return mark_pending(given.pending)
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: use --device cpu to try the script, --pending REASON to record what was not run")
    start = time.perf_counter()
    rows = run_checks(given.device, given.only, given.jobs)
    seconds, failed = time.perf_counter() - start, [row["name"] for row in rows if row["result"] != "pass"]
    print(f"{len(rows) - len(failed)} of {len(rows)} checks passed in {seconds:.0f} s on {given.device}")
    if given.device == "cuda" and not given.only:
        record = {
            "result": "fail" if failed else "pass",
            "commit": given.commit,
            "date": time.strftime("%Y-%m-%d"),
            "machine": torch.cuda.get_device_name(),
            "versions": versions(),
            "seconds": round(seconds),
            "pending": None,
            "checks": rows,
            "files": gpu_files(),
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        print(f"written: {given.out}")
    return sys.exit(1 if failed or not rows else 0)


if __name__ == "__main__":
    main()
