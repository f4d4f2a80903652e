"""Train on real data with `regard.train` and print the result: python benchmarks/training.py NAME --data DIR --out DIR

shakespeare       characters of Tiny Shakespeare, nanoGPT's full settings (GPU)
shakespeare-cpu   the same, nanoGPT's CPU settings
multi30k          English → German with the 2017 Transformer, its own BPE tokenizer, beam search
fashion-mnist     a ViT from scratch
cifar-10          a ViT from scratch
nsmc              Korean film reviews with the Korean ALBERT
korean            Korean → English, little data
pretraining       mlm, sentence order, span corruption and infilling on TinyStories
collapse          learning rates from right to far too large, with the monitor

DIR of the data holds the files named in each function; training_data.py makes those of the images. Results are kept in
benchmarks/results/training.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import regard
from regard.data.rows import read_rows
from regard.training.loop import train
from regard.training.tokenizers import train_bpe


def shakespeare(data: Path, out: Path, device: str) -> dict[str, Any]:
    model = regard.build(
        "gpt2", n_layer=6, n_head=6, n_embd=384, n_positions=256, vocab_size=256, device=device,
        resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2,
    )  # fmt: skip
    result = train(
        model, regard.recipes.CausalLM(length=256), data / "shakespeare_train.txt", out=out,
        eval_data=data / "shakespeare_val.txt", steps=5000, batch_size=64, learning_rate=1e-3, warmup=100, seed=1337,
        eval_every=250, save_every=1000, log_every=50, precision="bf16",
    )  # fmt: skip
    return best_evaluation(out) | {"final": result.eval_loss}


def shakespeare_cpu(data: Path, out: Path, device: str) -> dict[str, Any]:
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": 256}
    model = regard.build("gpt2", **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, device=device)
    result = train(
        model, regard.recipes.CausalLM(length=64), data / "shakespeare_train.txt", out=out,
        eval_data=data / "shakespeare_val.txt", steps=2000, batch_size=12, learning_rate=1e-3, warmup=100, seed=1337,
        eval_every=500, log_every=100,
    )  # fmt: skip
    return best_evaluation(out) | {"final": result.eval_loss}


def best_evaluation(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    best = min((line for line in lines if "eval_loss" in line), key=lambda line: line["eval_loss"])
    return {"best": best["eval_loss"], "at step": best["step"]}


def small_transformer(rows: list[dict[str, Any]], vocabulary: int, device: str) -> Any:
    """The 2017 Transformer, 4 + 4 layers of 256, with a BPE tokenizer trained on both sides of the data."""
    tokenizer = train_bpe((row[side] for row in rows for side in ("source", "target")), vocabulary)
    sides = {f"{side}_{key}": n for side in ("encoder", "decoder")
             for key, n in (("layers", 4), ("attention_heads", 4), ("ffn_dim", 1024))}  # fmt: skip
    model = regard.build(
        "transformer", vocab_size=tokenizer.size, d_model=256, dropout=0.3, is_encoder_decoder=True, **sides,
        decoder_start_token_id=1, eos_token_id=2, pad_token_id=0, device=device,
    )  # fmt: skip
    model.tokenizer = tokenizer
    return model


def multi30k(data: Path, out: Path, device: str) -> dict[str, Any]:
    rows = read_rows(data / "multi30k_train.tsv", ("source", "target"))
    model = small_transformer(rows, 10_000, device)
    recipe = regard.recipes.Translation.for_model(model, length=100, smoothing=0.1)
    train(
        model, recipe, data / "multi30k_train.tsv", out=out, eval_data=data / "multi30k_val.tsv", steps=4500,
        batch_size=256, learning_rate=2e-3, schedule="inverse-sqrt", warmup=800, betas=(0.9, 0.98), eps=1e-9,
        weight_decay=0.0, clip=1.0, ema=0.998, eval_every=450, log_every=50, precision="bf16",
    )  # fmt: skip
    return translate(out / "model", data / "multi30k_test2016.tsv", out, device)


def translate(model: Path, data: Path, out: Path, device: str) -> dict[str, Any]:
    trained = regard.load(model, device=device)
    rows = read_rows(data, ("source", "target"))
    start = time.perf_counter()
    written = []
    for first in range(0, len(rows), 100):
        sources = [row["source"] for row in rows[first : first + 100]]
        results = trained.generate(sources, max_new_tokens=80, num_beams=5)
        written += [result.text.strip() for result in results]
    (out / "hypotheses.txt").write_text("\n".join(written) + "\n", "utf-8")
    found: dict[str, Any] = {"seconds to translate": round(time.perf_counter() - start)}
    try:
        from regard.training.recipes.text_to_text import bleu

        score, signature = bleu(written, [row["target"] for row in rows])
        found |= {"BLEU": round(score, 2), "signature": signature}
    except ImportError:
        found["BLEU"] = "sacrebleu is not installed; see hypotheses.txt"
    return found


def fashion_mnist(data: Path, out: Path, device: str) -> dict[str, Any]:
    model = regard.build(
        "vit", image_size=28, patch_size=4, num_channels=1, hidden_size=192, num_hidden_layers=8,
        num_attention_heads=6, intermediate_size=768, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.05, use_mean_pooling=True, num_labels=10, device=device,
    )  # fmt: skip
    recipe = regard.recipes.ImageClassification.for_model(model, flip=True, shift=2, cutout=6, smoothing=0.1)
    result = train(
        model, recipe, data / "fashion_train.npz", out=out, eval_data=data / "fashion_test.npz", steps=18_000,
        batch_size=512, learning_rate=1e-3, warmup=800, final_ratio=0.005, weight_decay=0.1, betas=(0.9, 0.999),
        ema=0.999, eval_every=1800, log_every=100, precision="bf16", compile="reduce-overhead", num_workers=6,
    )  # fmt: skip
    return result.metrics


def cifar_10(data: Path, out: Path, device: str) -> dict[str, Any]:
    model = regard.build(
        "vit", image_size=32, patch_size=4, hidden_size=384, num_hidden_layers=7, num_attention_heads=6,
        intermediate_size=768, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.05,
        use_mean_pooling=True, num_labels=10, device=device,
    )  # fmt: skip
    augmentation = {"flip": True, "shift": 4, "mixup": 0.4, "cutmix": 1.0, "smoothing": 0.1}
    recipe = regard.recipes.ImageClassification.for_model(model, **augmentation)
    result = train(
        model, recipe, data / "cifar_train.npz", out=out, eval_data=data / "cifar_test.npz", steps=41_400,
        batch_size=256, learning_rate=5e-4, warmup=2000, final_ratio=0.005, weight_decay=0.1, betas=(0.9, 0.999),
        ema=0.999, eval_every=4140, log_every=100, precision="bf16", compile="reduce-overhead", num_workers=10,
    )  # fmt: skip
    return result.metrics


def nsmc(data: Path, out: Path, device: str) -> dict[str, Any]:
    model = regard.load(
        data / "albert-ko", task="text-classification", num_labels=2, dtype=torch.float32, device=device,
        ignore=("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    )  # fmt: skip
    recipe = regard.recipes.TextClassification.for_model(model, length=96)
    result = train(
        model, recipe, data / "nsmc_train.tsv", out=out, eval_data=data / "nsmc_test.tsv", steps=4700, batch_size=64,
        learning_rate=3e-5, schedule="linear", final_ratio=0.0, warmup=400, weight_decay=0.01, betas=(0.9, 0.999),
        eval_every=2350, log_every=50, precision="bf16",
    )  # fmt: skip
    return result.metrics


def korean(data: Path, out: Path, device: str) -> dict[str, Any]:
    """Korean → English on Tatoeba and Debian's translations: little data of two unlike kinds, an honest example."""
    rows = read_rows(data / "koen_train.tsv", ("source", "target"))
    model = small_transformer(rows, 8_000, device)
    recipe = regard.recipes.Translation.for_model(model, length=100)
    train(
        model, recipe, data / "koen_train.tsv", out=out, steps=3000, batch_size=192, learning_rate=2e-3,
        schedule="inverse-sqrt", warmup=600, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, ema=0.998, log_every=50,
        precision="bf16",
    )  # fmt: skip
    return translate(out / "model", data / "koen_test.tsv", out, device)


TEXT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
BERT = {**TEXT, "max_position_embeddings": 128, "type_vocab_size": 2}
T5 = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "feed_forward_proj": "gated-gelu"}
BART = {"d_model": 256, "max_position_embeddings": 160} | {
    f"{side}_{key}": n for side in ("encoder", "decoder")
    for key, n in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 1024))
}  # fmt: skip


def pretraining(data: Path, out: Path, device: str) -> dict[str, Any]:
    """Masked, sentence-order, span and infilling objectives on TinyStories: the held-out loss as it falls."""
    texts = [json.loads(line)["text"] for line in (data / "stories_train.jsonl").read_text("utf-8").splitlines()]
    tokenizer = train_bpe(texts, 4_000, sentinels=100)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    recipes = regard.recipes
    runs = {
        "mlm": ("bert", BERT, "fill-mask", lambda model: recipes.MaskedLM.for_model(model, length=128)),
        "mlm, sentence order": (
            "bert", BERT, "pretraining",
            lambda model: recipes.MaskedLM.for_model(model, length=128, pairs="sentence-order"),
        ),
        "span corruption": ("t5", T5, None, lambda model: recipes.SpanCorruption.for_model(model, length=128)),
        "infilling": ("bart", BART, None, lambda model: recipes.Infilling.for_model(model, length=128)),
    }  # fmt: skip
    found = {}
    for name, (family, sizes, task, recipe) in runs.items():
        extra = ids if task is None else {"pad_token_id": 0}
        model = regard.build(family, task=task, vocab_size=tokenizer.size, **sizes, **extra, device=device)
        model.tokenizer = tokenizer
        folder = out / name.replace(", ", "-").replace(" ", "-")
        train(
            model, recipe(model), data / "stories_train.jsonl", out=folder, eval_data=data / "stories_val.jsonl",
            steps=1200, batch_size=64, learning_rate=5e-4, warmup=100, eval_every=300, log_every=50, precision="bf16",
        )  # fmt: skip
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        found[name] = {line["step"]: round(line["eval_loss"], 3) for line in lines if "eval_loss" in line}
    return found


def collapse(data: Path, out: Path, device: str) -> dict[str, Any]:
    """The CPU settings with learning rates from right to far too large: when does the monitor warn?"""
    found = {}
    for rate in (1e-3, 1e-2, 3e-2, 1e-1):
        sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": 256}
        model = regard.build("gpt2", **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, device=device)
        folder = out / str(rate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(
                model, regard.recipes.CausalLM(length=64), data / "shakespeare_train.txt", out=folder, steps=400,
                batch_size=12, learning_rate=rate, schedule="linear", warmup=400, clip=0.0, seed=1337, log_every=2,
                monitor_every=2,
            )  # fmt: skip
        losses = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        looks = [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]
        best, diverged = math.inf, None
        for line in losses:
            best = min(best, line["loss"])
            if diverged is None and line["loss"] > best + 0.5:
                diverged = line["step"]
        alarm = next((look["step"] for look in looks if look["alarms"]), None)
        found[str(rate)] = {"alarm": alarm, "loss 0.5 above its best": diverged, "last loss": losses[-1]["loss"]}
    return found


EXPERIMENTS = {
    "shakespeare": shakespeare,
    "shakespeare-cpu": shakespeare_cpu,
    "multi30k": multi30k,
    "fashion-mnist": fashion_mnist,
    "cifar-10": cifar_10,
    "nsmc": nsmc,
    "korean": korean,
    "pretraining": pretraining,
    "collapse": collapse,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    start = time.perf_counter()
    found = EXPERIMENTS[given.name](given.data, given.out, given.device)
    machine = torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU"
    found |= {"seconds": round(time.perf_counter() - start), "machine": machine, "torch": torch.__version__}
    print(given.name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
