"""Tiny models to train, each by `regard.build` and opened in transformers from what it saves, with rows for a recipe.

Rows differ in length, so that batches have padding. Ids below 10 are special tokens, and not in the texts:
transformers gives the row of the padding token no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from twins import widened

import regard
from regard.models.model import Model
from regard.training.recipes.images import ImageRows
from regard.training.recipes.mlm import SegmentPairs
from regard.training.recipes.recipe import Batch, Recipe

V, LABELS, ROWS = 43, 5, 6
FIRST = 10  # id of the first ordinary token
PAD, START, END, MASK = 1, 2, 3, 4
RECIPES = regard.recipes

TEXT = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
LIMIT = {"max_position_embeddings": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS = {"vocab_size": V, "pad_token_id": PAD}
BERT = TEXT | LIMIT | NO_DROPOUT | TOKENS | {"type_vocab_size": 2}
SIDES = {
    f"{side}_{key}": n
    for side in ("encoder", "decoder")
    for key, n in (("layers", 2), ("attention_heads", 3), ("ffn_dim", 17))
}
STILL = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
IMAGE = TEXT | NO_DROPOUT | {"image_size": 12, "patch_size": 4}
SEES = TEXT | {"image_size": 12, "patch_size": 4, "attention_dropout": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 32, "vocab_size": V, "pad_token_id": PAD}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0},
    "llama": TEXT | LIMIT | TOKENS | {"num_key_value_heads": 1, "bos_token_id": START, "eos_token_id": END},
    "bert": BERT,
    "roberta": BERT,
    "distilbert": {"dim": 12, "hidden_dim": 17, "n_layers": 2, "n_heads": 3, "dropout": 0.0, "attention_dropout": 0.0}
    | {"seq_classif_dropout": 0.0, "qa_dropout": 0.0}
    | LIMIT
    | TOKENS,
    "albert": BERT | {"embedding_size": 7, "classifier_dropout_prob": 0.0},
    "electra": BERT | {"embedding_size": 7},
    "longformer": BERT | {"attention_window": 4, "sep_token_id": END},
    "big_bird": BERT | {"attention_type": "original_full", "sep_token_id": END},
    "t5": {"vocab_size": V, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_heads": 3, "dropout_rate": 0.0}
    | {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD, "classifier_dropout": 0.0},
    "bart": SIDES | STILL | LIMIT | TOKENS | {"d_model": 12, "classifier_dropout": 0.0}
    | {"bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": END},
    "marian": SIDES | STILL | LIMIT | TOKENS | {"d_model": 12}
    | {"bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": PAD},
    "transformer": SIDES | STILL | {"vocab_size": V, "d_model": 12}
    | {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": START},
    "vit": IMAGE,
    "deit": IMAGE,
    "dinov2": {key: value for key, value in IMAGE.items() if key != "intermediate_size"},
    "swin": {"image_size": 12, "patch_size": 2, "embed_dim": 6, "depths": [2], "num_heads": [3], "window_size": 3}
    | {"drop_path_rate": 0.0} | NO_DROPOUT,
    "clip": {
        "text_config": TEXT | LIMIT | TOKENS | {"attention_dropout": 0.0, "bos_token_id": START, "eos_token_id": END},
        "vision_config": SEES,
        "projection_dim": 7,
    },
}  # fmt: skip


def texts(shortest: int = 5, longest: int = 13) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(FIRST, V, int(rng.integers(shortest, longest + 1))) for _ in range(ROWS)]


@dataclass(frozen=True)
class Objective:
    """A recipe with rows for it."""

    recipe: Recipe
    rows: Any

    @property
    def task(self) -> str:
        pairs = getattr(self.recipe, "pairs", None)
        return self.recipe.task if pairs is None else "pretraining"

    def batch(self, numbers: range | list[int] = range(ROWS), *, seed: int = 0) -> Batch:
        """A batch of these rows; what is random in a row depends on its number and the seed."""
        draws = [np.random.default_rng([seed, number]) for number in numbers]
        return self.recipe.batch([self.rows[number] for number in numbers], draws)


def objective(name: str, **options: Any) -> Objective:
    """An objective by the name of its recipe, or of its pairs."""
    rng = np.random.default_rng(5)
    ended = [([*row.tolist(), END], [0] * (len(row) + 1)) for row in texts()]  # (ids, types)
    parts = [([*row[:3], END, *row[3:]], [0] * 4 + [1] * (len(row) - 3)) for row, _ in ended]
    names = tuple(f"label {number}" for number in range(LABELS))
    hidden = {"mask_token_id": MASK, "vocab_size": V, "special_ids": tuple(range(FIRST)), "start_ids": (START,)}
    hidden |= {"end_ids": (END,), "pad_token_id": PAD, "length": 20, "probability": 0.4}
    match name:
        case "clm":
            return Objective(RECIPES.CausalLM(length=11), [torch.tensor(row) for row in texts(11, 11)])
        case "mlm":
            return Objective(RECIPES.MaskedLM(**hidden), texts())
        case "next-sentence" | "sentence-order":
            rows = SegmentPairs([texts()[:3], texts()[3:], texts(3, 7)], name)
            return Objective(RECIPES.MaskedLM(**hidden, pairs=name), rows)
        case "span-corruption":
            recipe = RECIPES.SpanCorruption(
                length=13, sentinel_ids=tuple(range(9, 4, -1)), end_token_id=END, pad_token_id=PAD, density=0.4
            )
            return Objective(recipe, texts())
        case "infilling":
            recipe = RECIPES.Infilling(
                length=20, mask_token_id=MASK, start_token_id=START, end_token_id=END, pad_token_id=PAD
            )
            return Objective(recipe, [[row[:4].tolist(), row[4:].tolist()] for row in texts()])
        case "translate":
            recipe = RECIPES.Translation(length=20, end_token_id=END, pad_token_id=PAD, **options)
            return Objective(recipe, [(one[0], other[0][1:]) for one, other in zip(ended, ended[::-1], strict=True)])
        case "text-classification":
            recipe = RECIPES.TextClassification(labels=names, length=20, pad_token_id=PAD)
            return Objective(recipe, [(*row, int(rng.integers(LABELS))) for row in ended])
        case "text-classification of pairs":
            recipe = RECIPES.TextClassification(labels=names, length=20, pad_token_id=PAD)
            return Objective(recipe, [(*row, int(rng.integers(LABELS))) for row in parts])
        case "token-classification":
            recipe = RECIPES.TokenClassification(labels=names, length=20, pad_token_id=PAD)
            labels = [[-100, *rng.integers(LABELS, size=len(ids) - 1).tolist()] for ids, _ in ended]
            return Objective(recipe, [(*row, label) for row, label in zip(ended, labels, strict=True)])
        case "question-answering":
            rows = [(*row, 1, int(rng.integers(1, len(row[0])))) for row in ended]
            return Objective(RECIPES.QuestionAnswering(length=20, pad_token_id=PAD), rows)
        case "image-classification":
            images = torch.from_numpy(rng.integers(0, 256, (ROWS, 3, 12, 12), dtype=np.uint8))
            labels = torch.from_numpy(rng.integers(0, LABELS, ROWS))
            recipe = RECIPES.ImageClassification(labels=names, flip=True, shift=2, **options)
            return Objective(recipe, ImageRows(images, labels, training=True))
        case "contrastive":
            images = torch.from_numpy(rng.standard_normal((ROWS, 3, 12, 12))).float()
            rows = [(image, ids) for image, (ids, _) in zip(images, ended, strict=True)]
            return Objective(RECIPES.Contrastive(length=20, pad_token_id=PAD), rows)
    raise ValueError(name)


def built(family: str, task: str, **values: Any) -> Model:
    """A model in fp64 and training mode, with initial weights that are moved so that each one matters."""
    labels = LABELS if task.endswith("classification") and not task.startswith("zero") else None
    config = {"model_type": family, **CONFIGS[family], **values}
    model = regard.build(config, task=task, dtype=torch.float64, num_labels=labels)
    draws = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return model


def opened(model: Model, directory: Path) -> Any:
    """The same model of transformers, in training mode, computing everything in fp64."""
    model.save(directory)
    architecture = getattr(transformers, model.family.tasks[model.task].architecture)
    with widened():  # its class was imported before: what is imported inside keeps what fp32 means there
        return architecture.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").train()


def gradients_by_their_names(model: Model, directory: Path) -> dict[str, Tensor]:
    """The gradients under transformers' names: they take the weights' places, and travel as a checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    named = opened(model, directory).named_parameters()
    return {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
