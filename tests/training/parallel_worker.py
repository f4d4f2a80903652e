"""One process of a training run of several: torchrun's variables say which.

`train_all` also serves the test itself, which computes the same in one process.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import regard

TEXTS = [" ".join(f"w{(n * k) % 13}" for n in range(3 + 5 * (k % 5))) for k in range(23)]
ROWS = [{"text": text, "label": k % 3} for k, text in enumerate(TEXTS)]
OPTIONS = {"steps": 4, "batch_size": 8, "learning_rate": 1e-2, "seed": 3, "log_every": 1, "progress": False}

WAYS = {
    "data": {},
    "accumulated": {"accumulate": 2},
    "sharded": {"shard": True},
    "tensor": {"tensor_parallel": 2},
}


def model():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 128}
    labels = {"id2label": {str(n): f"L{n}" for n in range(3)}, "label2id": {f"L{n}": n for n in range(3)}}
    built = regard.build(
        "bert", task="text-classification", vocab_size=256, type_vocab_size=2, **sizes, **plain, **labels
    )
    return built.double()


def train_way(way: str, folder: Path, **options: object) -> None:
    recipe = regard.recipes.TextClassification(labels=("L0", "L1", "L2"), length=100)
    regard.train(model(), recipe, ROWS, out=folder / way, eval_data=ROWS[:7], **OPTIONS | WAYS[way] | options)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for way in WAYS:
        train_way(way, folder)
    train_way("data", folder / "half", save_every=2, keep=9)
    rows = ROWS[:5] if dist.get_rank() == 0 else ROWS  # an error on both
    recipe = regard.recipes.TextClassification(labels=("L0", "L1", "L2"), length=100)
    try:
        regard.train(model(), recipe, rows, out=folder / "unequal", **OPTIONS)
    except ValueError as error:
        (folder / f"unequal-{dist.get_rank()}.txt").write_text(str(error))
    dist.destroy_process_group()
