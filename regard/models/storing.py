"""A model as a checkpoint directory again: config.json, weights, tokenizer, preprocessor.

    >>> model.save("elsewhere")                        # doctest: +SKIP

Before a file is touched, every weight must have the place and the shape that a model of this family, settings and task
has: what `load` would refuse is not written. It knows no family.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from regard.efficient.linformer import LinformerAttention
from regard.efficient.performer import PerformerAttention
from regard.linear_maps import is_distributed
from regard.models.checkpoint.checkpoints import write
from regard.models.checkpoint.finding import PICTURES, POOLING, TOKENIZER
from regard.models.checkpoint.side_files import copy_sides, read_side, write_side
from regard.models.heads import label_names
from regard.models.images.options import without_ignored
from regard.models.images.preprocessing import FILE, NESTED, Preprocessor
from regard.models.loading import empty, listed, places
from regard.models.model import Model
from regard.models.settings import Settings

__all__ = ["save"]

LABELLED = ("classify", "classify-cls", "tag")  # tasks whose number of labels config.json says
WHOLE = "safetensors.torch.save_model(model, path) keeps the whole state"


def save(model: Model, directory: str | Path) -> None:
    """Write a directory that `load` and `transformers` open: config.json, weights, tokenizer, preprocessor.

    A head with another number of labels than config.json has is written with as many, LABEL_0 and so on, unless
    `model.settings.values["id2label"]` names them. Keys that `load` was told to ignore are left out of the files.

    directory: made if it is not there; files of the same names are replaced, each one whole or not at all.
    Raises NotADirectoryError if there is a file of that name; ValueError, before anything is written, for a model whose
    attention was replaced or whose weights are split over processes, and for weights that `load` would find no place
    for, or of another shape.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; save writes a directory")
    _refuse_replaced(model)
    _refuse_split(model)
    settings = _settled(model)
    _check_fit(model, settings)
    directory.mkdir(parents=True, exist_ok=True)
    write(directory, _tensors(model))
    kept = settings.without_ignored(harmless=model.family.harmless, ignore=model.ignored)  # load would refuse the rest
    values = kept | {
        "architectures": [model.family.tasks[model.task].architecture],
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    values.pop("torch_dtype", None)
    write_side(directory, "config.json", values)
    if model.directory is not None:
        # What a checkpoint says of its tokenizer, of generating, pooling and pictures, as it came.
        copy_sides(model.directory, directory, ["generation_config.json", *TOKENIZER, *POOLING, *PICTURES])
    held = vars(model).get("tokenizer")  # opened before, or set by hand where the checkpoint has none
    if held is not None and (model.directory is None or not any((model.directory / x).is_file() for x in TOKENIZER)):
        held.save(directory)
    _save_preprocessor(model, directory)


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The weights under the checkpoint's names, one by one."""
    parameters = dict(model.named_parameters())
    for place in places(model, model.family.before(model.task)):
        parts = place.source.split(parameters[place.name].detach(), place.rows)
        yield from zip(place.theirs, parts, strict=True)


# ------------------------------------------------------------------------------------------------- what can be written


def _refuse_replaced(model: Model) -> None:
    """Raise ValueError where the family's format would lose how attention is computed."""
    for name, module in model.named_modules():
        if isinstance(module, (PerformerAttention, LinformerAttention)):
            raise ValueError(
                f"{name} is a {type(module).__name__}, for which {model.family.title}'s format has no word: who opens "
                f"it would get softmax attention. {WHOLE}"
            )


def _refuse_split(model: Model) -> None:
    """Raise ValueError where this process has a part of the weights, or projections were taken apart to split them."""
    parts = [name for name, p in model.named_parameters() if is_distributed(p)]
    parts = parts or [name for name, module in model.named_modules() if getattr(module, "separated", False)]
    if parts:
        raise ValueError(
            f"{listed(parts)} are split over processes, or taken apart for it. On every process: weights = "
            "regard.models.tensor_parallel.gather(model); then on one: whole = regard.load(…), "
            "whole.load_state_dict(weights), whole.save(…)"
        )


def _settled(model: Model) -> Settings:
    """The model's settings, with as many labels as its head scores: who fine-tunes begins with a new head."""
    score = dict(model.named_parameters()).get("head.score.weight")
    if model.task not in LABELLED or score is None or score.ndim != 2:
        return model.settings
    settings, count = model.settings, len(score)
    fits = _shapes(model, settings).get("head.score.weight", (count,))[0] == count
    named, numbers = settings.values.get("id2label"), settings.values.get("label2id")
    old = isinstance(named, dict) and isinstance(numbers, dict) and numbers.keys() != set(map(str, named.values()))
    if fits and not old:  # else label2id is of the names before id2label was given new ones
        return settings
    names = label_names(settings.labels(count) if settings.label_count(count) == count else (), count)
    values = settings.values | {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    values.pop("_num_labels", None)  # of old files
    return Settings(values | ({"num_labels": count} if "num_labels" in values else {}), settings.where)


def _shapes(model: Model, settings: Settings) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, by our name, of a model with these settings; without the pooler where it has none."""
    wanted = empty(model.family, settings, model.task).named_parameters()
    bare = model.task == "none" and getattr(model, "pooler", None) is None  # as `load` makes it of such a checkpoint
    return {name: tuple(p.shape) for name, p in wanted if not (bare and name.startswith("pooler."))}


def _check_fit(model: Model, settings: Settings) -> None:
    """Raise ValueError, with all of them, for weights that `load` would not find a place for, not find, or not fit."""
    wanted = _shapes(model, settings)
    there = {name: tuple(p.shape) for name, p in model.named_parameters()}
    misshapen = [f"{x} {there[x]} instead of {wanted[x]}" for x in wanted if x in there and there[x] != wanted[x]]
    kinds = (
        ("have another shape", misshapen),
        ("have no place", [name for name in there if name not in wanted]),
        ("are missing", [name for name in wanted if name not in there]),
    )
    problems = [f"{len(names)} weights {what}: {listed(names)}" for what, names in kinds if names]
    if problems:
        raise ValueError(
            f"nothing is written, for load would refuse it: this model is no longer the {model.family.title} with task "
            f"{model.task!r} that its settings describe. {'; '.join(problems)}. Merge what was added into the weights "
            "(torch.nn.utils.prune.remove, torch.nn.utils.parametrize.remove_parametrizations, an adapter's own "
            f"merge), and write sizes that changed to model.settings.values; or {WHOLE}"
        )


def _save_preprocessor(model: Model, directory: Path) -> None:
    """One that was set by hand; where the checkpoint's own says the same, that stays as it came.

    Keys that were ignored when it was read are not written again: who opens it would have to ignore them, too.
    """
    held = vars(model).get("preprocessor")
    try:
        own = None if model.directory is None else Preprocessor.open(model.directory, ignore=model.ignored)
    except (FileNotFoundError, ValueError):
        own = None  # there is none, or none that is understood
    written = own if held is None or held == own else held
    if written is None:
        return
    values = without_ignored(written.kind, written.values)
    if own is not None and written is own and values == own.values:
        return
    nested = read_side(directory, NESTED, dict) or {}
    if "image_processor" in nested:  # it would go first
        write_side(directory, NESTED, nested | {"image_processor": values})
    else:
        write_side(directory, FILE, values)
