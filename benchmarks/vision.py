"""Times regard's models of pictures against `transformers` and timm, each at its best setting.

    python benchmarks/vision.py                               # CPU, a few minutes; OMP_NUM_THREADS=2 for two cores
    python benchmarks/vision.py --device cuda --part vit      # needs a GPU; parts: vit, swin, llava

Both have the same shapes and run in one process, in turn (answers on a GPU: one after the other); on the CPU they have
the same weights too. A ratio is the peer's time ÷ ours: more is better for us. On the CPU it is the median of the
rounds' ratios, with the middle half of them; on a GPU it is that of the median times. timm is compared where it is
installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from peers import HEADERS, Run, by_turns, compared, generated, on_device, theirs_on_device
from timing import heading, section, write
from torch import Tensor

import regard
from regard.generation.loop import generate

RESULTS = Path(__file__).parent / "results"
PARTS = {"cpu": ("vit", "swin"), "cuda": ("vit", "swin", "llava")}
BATCH, NEW, PATCHES = 256, 64, 576


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(PARTS), default="cpu")
    parser.add_argument("--part", choices=["all", *PARTS["cuda"]], default="all", help="only this part")
    parser.add_argument("--rounds", type=int, help="how often each is timed")
    parser.add_argument("--out", type=Path, help="where to write the table (default: benchmarks/results/)")
    arguments = parser.parse_args()
    device, part = arguments.device, arguments.part
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; run without --device cuda")
    if part != "all" and part not in PARTS[device]:
        sys.exit(f"on {device} the parts are {', '.join(PARTS[device])}, not {part}")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    rounds = {} if arguments.rounds is None else {"rounds": arguments.rounds}
    sections = [MAKERS[device, name](**rounds) for name in PARTS[device] if part in ("all", name)]
    how = "; the median of the rounds' ratios, not the quotient of the median times" if device == "cpu" else ""
    peers = f"transformers {transformers.__version__}{timm_version()}"
    note = f"{peers}. Ratio = peer time ÷ our time, in one process{how}."
    suffix = "" if part == "all" else f"-{part}"
    write(
        arguments.out or RESULTS / f"vision-{device}{suffix}.md",
        [heading("models of pictures", device, note), *sections],
    )


def timm_version() -> str:
    """For the heading, where it is installed."""
    if find_spec("timm") is None:
        return ", timm not installed"
    import timm

    return f", timm {timm.__version__}"


# ---------------------------------------------------------------------------------------------------------------- CPU


def vit_on_cpu(rounds: int = 15) -> str:
    """ViT-B/16, pictures of 224 × 224."""
    return on_cpu("ViT-B/16", transformers.ViTConfig(), "sdpa", rounds)


def swin_on_cpu(rounds: int = 15) -> str:
    """Swin-T, pictures of 224 × 224."""
    return on_cpu("Swin-T", transformers.SwinConfig(), "sdpa", rounds)


def on_cpu(name: str, config: Any, attention: str, rounds: int) -> str:
    """Forward, one picture and eight, fp32, against transformers with the attention that it is fastest with."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        peers = {}
        for kind in (attention, "eager"):
            try:
                peers[kind] = transformers.AutoModel.from_pretrained(folder, attn_implementation=kind).eval()
            except ValueError as error:  # no such attention for this model
                print(f"transformers with {kind}: {error}", flush=True)
        ours = regard.load(folder)
        with torch.inference_mode():
            for count in (1, 8):
                pixels = torch.randn(count, 3, 224, 224)
                for kind, theirs in peers.items():
                    gap = float((theirs(pixels).last_hidden_state - ours(pixels).last_hidden_state).abs().max())
                    often = 3 * rounds if count == 1 else rounds  # a short call is disturbed more
                    calls = partial(theirs, pixels), partial(ours, pixels)
                    row = compared(f"{count} × 224 × 224, {kind}", *calls, often)
                    rows.append([*row, f"{gap:.1e}"])
                    print(" ".join(rows[-1]), flush=True)
    return section(f"{name}, forward, fp32, the same weights", [*HEADERS, "difference"], rows)


# --------------------------------------------------------------------------------------------------------------- CUDA


def vit_on_cuda(rounds: int = 5) -> str:
    """ViT-B/16, 256 pictures, bf16: each as it is, and each through torch.compile."""
    runs = on_cuda("ViTModel", transformers.ViTConfig(), "vit_base_patch16_224")
    return speeds("ViT-B/16, 256 × 224 × 224, bf16", runs, rounds)


def swin_on_cuda(rounds: int = 5) -> str:
    """Swin-T, 256 pictures, bf16."""
    runs = on_cuda("SwinModel", transformers.SwinConfig(), "swin_tiny_patch4_window7_224")
    return speeds("Swin-T, 256 × 224 × 224, bf16", runs, rounds)


def on_cuda(architecture: str, config: Any, timms: str) -> dict[str, Run]:
    """Each model as it is, and compiled; all without a classifier."""
    pixels = torch.randn(BATCH, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    models = {"transformers": theirs_on_device(architecture, config), "ours": on_device(config, "feature-extraction")}
    if find_spec("timm") is not None:
        import timm

        models["timm"] = timm.create_model(timms, num_classes=0).to("cuda", torch.bfloat16).eval()
    runs: dict[str, Run] = {}
    for name, model in models.items():
        runs[name] = partial(model, pixels)
        runs[f"{name}, compiled"] = partial(torch.compile(model), pixels)
    return runs


def speeds(title: str, runs: dict[str, Run], rounds: int) -> str:
    """Pictures a second, and against the best of each peer."""
    seconds = by_turns(runs, rounds)
    peers = [peer for peer in ("transformers", "timm") if peer in seconds]
    best = {peer: min(taken for name, taken in seconds.items() if name.startswith(peer)) for peer in peers}
    rows = [
        [name, f"{taken * 1e3:.2f}", f"{BATCH / taken:.0f}", *(f"{best[peer] / taken:.2f}" for peer in peers)]
        for name, taken in seconds.items()
    ]
    return section(title, ["", "ms", "pictures/s", *(f"÷ best of {peer}" for peer in peers)], rows)


def llava_on_cuda(rounds: int = 3) -> str:
    """LLaVA-1.5-7B: 64 tokens about one picture of 576 patches, greedily. The whole call is timed."""
    text = transformers.LlamaConfig(vocab_size=32064, max_position_embeddings=4096)
    vision = transformers.CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=32000)
    pixels = torch.randn(1, 3, 336, 336, device="cuda", dtype=torch.bfloat16)
    words = torch.randint(5, 31000, (1, 32), device="cuda")
    ids = torch.cat([words[:, :8], torch.full((1, PATCHES), 32000, device="cuda"), words[:, 8:]], 1)
    ours = on_device(config, "image-text-to-text")
    runs: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: generate(ours.read_image(pixels), ids, None, max_new_tokens=NEW, pad_token_id=0).ids,
        **their_answers(theirs_on_device("LlavaForConditionalGeneration", config), ids, pixels),
    }
    seconds = {kind: statistics.median(times) for kind, times in generated(runs, NEW, rounds).items()}
    peer = min((s for kind, s in seconds.items() if kind != "ours"), default=float("nan"))
    rows = [[kind, f"{s * 1e3:.0f}", f"{NEW / s:.0f}", f"{peer / s:.2f}"] for kind, s in seconds.items()]
    title = f"an answer, LLaVA-1.5-7B shape, bf16, batch 1, {NEW} tokens after {ids.shape[1]}, {PATCHES} of a picture"
    return section(title, ["", "ms", "tok/s", "÷ best of transformers"], rows)


def their_answers(model: Any, ids: Tensor, pixels: Tensor) -> dict[str, Callable[[], Tensor]]:
    """With a growing cache, and with a static one, for which generate compiles the step by itself."""
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    plain = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    plain |= {"attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return {
        "transformers, sdpa": lambda: model.generate(ids, **plain),
        "transformers, static cache, compiled": lambda: model.generate(ids, cache_implementation="static", **plain),
    }


MAKERS = {
    ("cpu", "vit"): vit_on_cpu,
    ("cpu", "swin"): swin_on_cpu,
    ("cuda", "vit"): vit_on_cuda,
    ("cuda", "swin"): swin_on_cuda,
    ("cuda", "llava"): llava_on_cuda,
}

if __name__ == "__main__":
    main()
