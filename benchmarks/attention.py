"""Times `regard.attention` against what it calls, and against FlexAttention written by hand. Prints and keeps a table.

    python benchmarks/attention.py                 # CPU, about a minute
    python benchmarks/attention.py --device cuda   # needs a GPU; several minutes, mostly compilation

Peers run in the same process on the same inputs, alternately. A ratio is peer time ÷ our time: more is better for us.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import torch
from timing import alternate, best_of, cuda_time, heading, memory_alone, peak_memory, section, write
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks

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
    title = heading("attention", arguments.device, "Ratio = peer time ÷ our time, measured alternately in one process.")
    write(arguments.out or RESULTS / f"attention-{arguments.device}.md", [title, *sections])


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


# ---------------------------------------------------------------------------------------------------------------- CPU


def on_cpu() -> list[str]:
    torch.manual_seed(0)
    return [dispatch(), masked_on_cpu(), memory_alone("tiled", "regard.attention(q, k, v, backend='tiled')")]


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


if __name__ == "__main__":
    main()
