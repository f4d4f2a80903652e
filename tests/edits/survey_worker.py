"""One process of a survey of several: torchrun's variables say which."""

from __future__ import annotations

from pathlib import Path

import torch

import regard
from regard.edits.survey import Survey
from regard.models.model import Model
from regard.training.tokenizers import byte_tokenizer

TEXTS = ["to be or not that is the question"[: 3 + 7 * k % 23].strip() for k in range(23)]
TEXTS += ["abc", "x"]  # no letter twice; a single token
MEASURES = ("induction", "previous", "entropy", "output")


def model(**config: object) -> Model:
    """A tiny GPT-2 that reads bytes."""
    sizes = {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 64, "vocab_size": 256}
    built = regard.build("gpt2", seed=1, **sizes | config)
    built.tokenizer = byte_tokenizer()
    return built


def survey(out: Path | None, **options: object) -> Survey:
    return regard.survey(model(), TEXTS, MEASURES, out=out, batch_size=3, shard=4, **options)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    survey(folder / "kept")
    result = survey(None)
    result.save(folder / f"rank-{torch.distributed.get_rank()}.safetensors")
    torch.distributed.destroy_process_group()
