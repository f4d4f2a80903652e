"""Times `regard.look` and `regard.watch` against the fused kernel alone and against eager. Prints and keeps a table.

    python benchmarks/lens.py                 # CPU, about a minute
    python benchmarks/lens.py --device cuda   # needs a GPU; a few minutes

A ratio is our time ÷ the time of F.scaled_dot_product_attention, whose output ours contains: 1.0 would be free, 1.5 is
the floor in arithmetic, since the weights have to be made once more from q and k. Measured alternately in one process
on the same inputs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from timing import alternate, best_of, cuda_time, heading, memory_alone, peak_memory, section, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks

RESULTS = Path(__file__).parent / "results"
SHAPES = [(2, 16, 8192, 64), (2, 16, 8192, 128), (1, 16, 32768, 128)]
WITH_TOP = ("entropy", "received", "map", "top")
PARTS = (("received",), ("entropy", "received"), ("entropy", "received", "map", "max_logit"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--part", choices=["all", "look", "model"], default="all", help="only this part, on a GPU")
    parser.add_argument("--out", type=Path, help="where to write the table (default: benchmarks/results/)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; run without --device cuda")
    sections = on_cuda(arguments.part) if arguments.device == "cuda" else on_cpu()
    title = heading("the lens", arguments.device, "Ratio = our time ÷ the peer's, measured alternately in one process.")
    write(arguments.out or RESULTS / f"lens-{arguments.device}.md", [title, *sections])


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """What people do today to see weights: the whole matrix."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if causal:
        n = q.shape[-2]
        scores.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1), float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights @ v, weights


# --------------------------------------------------------------------------------------------------------------- CUDA


def on_cuda(part: str) -> list[str]:
    torch.manual_seed(0)
    return [
        *(look_on_cuda() if part in ("all", "look") else []),
        *([model_on_cuda()] if part in ("all", "model") else []),
    ]


def look_on_cuda() -> list[str]:
    rows, parts = [], []
    for shape in SHAPES:
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for causal in (False, True):
            mask = masks.causal() if causal else None
            name = "causal" if causal else "full"
            theirs = lambda c=causal: sdpa(q, k, v, is_causal=c)  # noqa: E731, B023
            a, b = timed(theirs, lambda m=mask: regard.look(q, k, v, mask=m), shape)  # noqa: B023
            _, c = timed(theirs, lambda m=mask: regard.look(q, k, v, mask=m, measures=WITH_TOP), shape)  # noqa: B023
            slow = "not run"
            if shape[2] <= 8192:
                slow = f"{once(lambda c=causal: eager(q, k, v, c)) / b:.1f}"  # noqa: B023
            memory = peak_memory(lambda m=mask: regard.look(q, k, v, mask=m))  # noqa: B023
            rows.append([
                str(shape), name, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{b / a:.3f}", f"{(c - b) / a:.3f}", slow,
                f"{memory:.0f}",
            ])  # fmt: skip
            print(*rows[-1], flush=True)
            for names in PARTS if shape[2] <= 8192 and not causal else ():
                a, b = timed(theirs, lambda m=mask, n=names: regard.look(q, k, v, mask=m, measures=n), shape)  # noqa: B023
                parts.append([str(shape), name, ", ".join(names), f"{b / a:.3f}"])
    headers = ["shape", "mask", "sdpa ms", "look ms", "ratio", "top-8 adds", "eager ÷ look", "peak MiB"]
    return [
        section("look: output, lse, entropy, received, map; bf16", headers, rows),
        section("look with other measures", ["shape", "mask", "measures", "ratio"], parts),
    ]


def timed(theirs: Callable[[], object], ours: Callable[[], object], shape: tuple[int, ...]) -> tuple[float, float]:
    times = 20 if shape[2] <= 8192 else 4
    return alternate(theirs, ours, lambda call: cuda_time(call, times), rounds=5)


def once(call: Callable[[], object]) -> float:
    call()
    return cuda_time(call, 2)


def model_on_cuda() -> str:
    """A Llama of 16 layers, 2048 wide, 32 heads, 8 key heads, with random weights and a prompt of 131,072 tokens."""
    from transformers import LlamaConfig, LlamaModel

    n = 131_072
    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
        vocab_size=32000, max_position_embeddings=n, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaModel(config).to(torch.bfloat16).eval()
    ids = torch.randint(0, 32000, (1, n), device="cuda")

    def plain() -> Tensor:
        with torch.inference_mode():
            return model(ids, use_cache=False).last_hidden_state

    def watched() -> tuple[Tensor, regard.lens.capture.Capture]:
        with torch.inference_mode(), regard.watch(model) as seen:
            out = model(ids, use_cache=False).last_hidden_state
        return out, seen

    out, seen = watched()
    same = bool(torch.equal(plain(), out))
    a, b = alternate(plain, watched, lambda call: cuda_time(call, 1), rounds=2)
    alone, together = peak_memory(plain), peak_memory(watched)
    with tempfile.TemporaryDirectory() as folder:
        seen.save(Path(folder) / "run.regard", overview=True)
        size = (Path(folder) / "run.regard").stat().st_size
    rows = [[
        f"{n:,}", f"{a * 1e3:.0f}", f"{b * 1e3:.0f}", f"{b / a:.3f}", f"{together - alone:.0f}", f"{size / 1e6:.2f}",
        str(len(seen)), "yes" if same else "NO",
    ]]  # fmt: skip
    headers = ["tokens", "plain ms", "watched ms", "ratio", "MiB above", "file MB", "layers seen", "same bits"]
    return section("watch: Llama-1B-shaped, bf16, sdpa, prefill", headers, rows)


# ---------------------------------------------------------------------------------------------------------------- CPU


def on_cpu() -> list[str]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
    rows = []
    for causal in (False, True):
        mask = masks.causal() if causal else None
        a, b = alternate(
            lambda: sdpa(q, k, v, is_causal=causal),  # noqa: B023
            lambda: regard.look(q, k, v, mask=mask),  # noqa: B023
            lambda call: best_of(call, 1),
            rounds=7,
        )
        c, d = alternate(
            lambda: eager(q, k, v, causal),  # noqa: B023
            lambda: regard.look(q, k, v, mask=mask),  # noqa: B023
            lambda call: best_of(call, 1),
            rounds=3,
        )
        name = "causal" if causal else "full"
        rows.append([name, f"{a * 1e3:.0f}", f"{b * 1e3:.0f}", f"{b / a:.2f}", f"{c / d:.2f}"])
    headers = ["mask", "sdpa ms", "look ms", "ratio", "eager ÷ look"]
    return [section("look, (1, 8, 4096, 64) fp32", headers, rows), memory_alone("look", "regard.look(q, k, v)")]


if __name__ == "__main__":
    main()
