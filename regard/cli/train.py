"""`regard train`: train a model from a config, or fine-tune a checkpoint."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.commands import TrainOptions

if TYPE_CHECKING:
    from regard.models.model import Model
    from regard.training.recipes.recipe import Recipe

RECIPE_OPTIONS = (
    "length", "pack", "probability", "whole_words", "pairs", "density", "mean_span", "smoothing", "flip", "shift",
    "mixup",
)  # fmt: skip
TRAIN_OPTIONS = (
    "steps", "accumulate", "learning_rate", "schedule", "warmup", "final_ratio", "weight_decay", "clip", "precision",
    "ema", "seed", "eval_every", "save_every", "log_every", "keep", "shard", "tensor_parallel", "recompute", "compile",
    "monitor_every",
)  # fmt: skip


def train(options: TrainOptions) -> None:
    """Train, show progress, and print what the run came to."""
    from regard.training.loop import train as run
    from regard.training.recipes import RECIPES

    if options.recipe not in RECIPES:
        raise ValueError(f"there is no recipe {options.recipe!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[options.recipe]
    chosen = recipe_options(recipe, options)
    model = open_model(recipe, options)
    given = {name: getattr(options, name) for name in TRAIN_OPTIONS if getattr(options, name) is not None}
    result = run(
        model,
        recipe.for_model(model, **chosen),
        options.data,
        out=options.out,
        eval_data=options.eval_data,
        batch_size=options.batch,
        **given,
    )
    if options.json:
        values = {"directory": str(result.directory), "steps": result.steps, "stopped": result.stopped}
        print(json.dumps(values | {"loss": result.loss, "eval_loss": result.eval_loss, **result.metrics}))
    elif result.stopped:
        print(options.say("stopped after step {step}; the same command resumes", step=result.steps))
    else:
        scores = {"loss": result.loss, "held-out loss": result.eval_loss, **result.metrics}
        parts = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                 for name, value in scores.items() if value is not None]  # fmt: skip
        print(f"{result.directory}/model: {', '.join(parts)}")


def recipe_options(recipe: type[Recipe], options: TrainOptions) -> dict[str, Any]:
    """The options of this recipe that were given. Raises ValueError for one that it does not have."""
    known = inspect.signature(recipe.for_model).parameters
    given = {name: getattr(options, name) for name in RECIPE_OPTIONS if getattr(options, name) not in (None, False)}
    unknown = [name for name in given if name not in known]
    if unknown:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in RECIPE_OPTIONS if name in known)
        raise ValueError(f"{recipe.name} has no --{unknown[0].replace('_', '-')}; it has {names or 'no options'}")
    return given


def open_model(recipe: type[Recipe], options: TrainOptions) -> Model:
    """The model to train: a checkpoint is loaded, a config is built.

    Raises ValueError where the data is to be translated and the model has no tokenizer.
    """
    from regard.models.building import build
    from regard.models.loading import load
    from regard.training.data import read_rows
    from regard.training.tokenizers import train_bpe

    task = "pretraining" if options.pairs else recipe.task
    path = Path(options.model)
    labels: dict[str, Any] = {"num_labels": options.num_labels} if options.num_labels is not None else {}
    if (path.is_dir() and any(path.glob("*.safetensors"))) or (not path.exists() and "/" in options.model):
        return load(options.model, task=task, device=options.device, ignore=options.ignore, **labels)
    if recipe.name != "translate":
        return build(options.model, task=task, seed=options.seed or 0, device=options.device, **labels)
    rows = read_rows(options.data, ("source", "target"))
    tokenizer = train_bpe((row[side] for row in rows for side in ("source", "target")), options.vocab_size)
    model = build(
        options.model, task=task, seed=options.seed or 0, device=options.device, vocab_size=tokenizer.size,
        decoder_start_token_id=tokenizer.ids_of.bos, eos_token_id=tokenizer.ids_of.eos,
        pad_token_id=tokenizer.ids_of.pad,
    )  # fmt: skip
    model.tokenizer = tokenizer
    return model
