"""`regard train`: train a model from a config, or fine-tune a checkpoint."""

from __future__ import annotations

import inspect
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.commands import TrainOptions
from regard.cli.inputs import check_device
from regard.cli.outputs import print_json
from regard.locale import translate_error

if TYPE_CHECKING:
    from regard.models.model import Model
    from regard.training.loop import TrainResult
    from regard.training.recipes.recipe import Recipe

INTERRUPTED = 130
RECIPE_OPTIONS = (
    "length", "pack", "probability", "whole_words", "pairs", "density", "mean_span", "smoothing", "flip", "shift",
    "cutout", "mixup", "cutmix",
)  # fmt: skip
LABELLED = ("text-classification", "token-classification", "image-classification")
TEXTS = ("clm", "mlm", "span-corruption", "infilling", "translate")
VOCABULARY, SENTINELS = 8000, 100


def train(options: TrainOptions) -> int:
    """Train, show progress, and print what the run came to; 130 if it was interrupted."""
    import torch.distributed as dist

    from regard.training.config import TrainConfig
    from regard.training.loop import train as run
    from regard.training.recipes import RECIPES

    # 1. What is wrong with the options alone.
    if options.recipe not in RECIPES:
        raise ValueError(f"there is no recipe {options.recipe!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[options.recipe]
    chosen = recipe_options(recipe, options)
    typed = {field.name: getattr(options, field.name, None) for field in fields(TrainConfig)}
    settings = {name: value for name, value in typed.items() if value is not None}
    if options.cuda_graphs:
        settings["compile"] = "reduce-overhead"
    config = TrainConfig(batch_size=options.batch, **settings)
    for path in (options.data, *([] if options.eval_data is None else [options.eval_data])):
        if not path.exists():
            raise FileNotFoundError(f"there is no data {str(path)!r}")
    check_device(options.device)

    # 2. Train, and print from the first process. Warnings, of a damaged checkpoint or an alarm, are a line each.
    def print_warning(message: Warning | str, *where: Any, **more: Any) -> None:
        print(f"regard: {translate_error(str(message), options.lang)}", file=sys.stderr, flush=True)

    model = open_model(recipe, options)
    shown, warnings.showwarning = warnings.showwarning, print_warning
    try:
        result = run(
            model, recipe.for_model(model, **chosen), options.data, out=options.out, eval_data=options.eval_data,
            config=config, progress=options.lang,
        )  # fmt: skip
        if not dist.is_initialized() or dist.get_rank() == 0:
            if options.json:
                names = ("directory", "steps", "stopped", "loss", "eval_loss", "metrics")
                print_json({name: getattr(result, name) for name in names})
            else:
                print(as_text(result, options))
    finally:
        warnings.showwarning = shown
        if dist.is_initialized():
            dist.destroy_process_group()
    return INTERRUPTED if result.stopped else 0


def as_text(result: TrainResult, options: TrainOptions) -> str:
    """The result in a line."""
    if result.stopped:
        return options.say("stopped after step {step}; the same command resumes", step=result.steps)
    scores = {options.say("loss"): result.loss, options.say("held-out loss"): result.eval_loss, **result.metrics}
    parts = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in scores.items()
        if value is not None
    ]
    return ": ".join([f"{result.directory}/model", ", ".join(parts) or options.say("done before")])


def recipe_options(recipe: type[Recipe], options: TrainOptions) -> dict[str, Any]:
    """The options of this recipe that were given. Raises ValueError for one that it does not have."""
    known = inspect.signature(recipe.for_model).parameters
    values = {name: getattr(options, name) for name in RECIPE_OPTIONS} | {"no_permute": options.no_permute}
    settings = {name: value for name, value in values.items() if value is not None and value is not False}
    names = [name for name in values if name.removeprefix("no_") in known]
    if recipe.task in LABELLED:
        names += ["num_labels", "labels"]
    if recipe.name in TEXTS:
        names += ["vocab_size"]
    for name in (*settings, *(name for name in ("num_labels", "labels", "vocab_size") if getattr(options, name))):
        if name not in names:
            listed = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise ValueError(f"{recipe.name} has no --{name.replace('_', '-')}; it has {listed or 'no options'}")
    if settings.pop("no_permute", False):
        settings["permute"] = False
    return settings


def open_model(recipe: type[Recipe], options: TrainOptions) -> Model:
    """The model to train: a checkpoint is loaded, a config is built.

    A config without a tokenizer gets one that is trained on the data, or reads bytes where the recipe can.
    """
    import torch

    from regard.data.rows import read_documents, read_rows
    from regard.models.initialization import build
    from regard.models.loading import load
    from regard.training.tokenizers import train_bpe

    path = Path(options.model)
    common: dict[str, Any] = {"task": "pretraining" if options.pairs else recipe.task, "device": options.device}
    if options.num_labels is not None:
        common["num_labels"] = options.num_labels
    if options.labels is not None:
        common["labels"] = [name.strip() for name in options.labels.split(",")]
    weights = path.is_dir() and any(file.suffix in (".safetensors", ".bin") for file in path.iterdir())
    if weights or (not path.exists() and "/" in options.model and path.suffix != ".json"):
        if options.vocab_size is not None:
            raise ValueError("--vocab-size is for a config; a checkpoint has a tokenizer")
        if recipe.task == "question-answering":  # its head has two outputs, start and end
            common["num_labels"] = 2
        return load(options.model, dtype=torch.float32, ignore=options.ignore, **common)
    if options.ignore:
        raise ValueError("--ignore is for a checkpoint; leave the keys out of the config")
    common["seed"] = options.seed or 0
    folder = path if path.is_dir() else path.parent
    own = path.exists() and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    bytes_do = own or recipe.name not in TEXTS or recipe.name == "clm"
    if bytes_do and options.vocab_size is None:
        return build(options.model, **common)
    if recipe.name == "translate":
        rows = read_rows(options.data, ("source", "target"))
        texts = [row[side] for row in rows for side in ("source", "target")]
    else:
        texts = read_documents(options.data)
    size = VOCABULARY if options.vocab_size is None else options.vocab_size
    tokenizer = train_bpe(texts, size, sentinels=SENTINELS if recipe.name == "span-corruption" else 0)
    ids = tokenizer.ids_of
    special: dict[str, Any] = {"bos_token_id": ids.bos, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    if recipe.task == "text2text-generation":
        special["decoder_start_token_id"] = ids.bos
    model = build(options.model, **common, vocab_size=tokenizer.size, **special)
    model.tokenizer = tokenizer
    return model
