"""`regard.build`: a model from its config, with initial weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.checks import check_int
from regard.data.image_processing import ImageProcessor
from regard.data.tokenizer import Tokenizer
from regard.files import read_json
from regard.models.config import Config
from regard.models.family import Family, empty, places
from regard.models.initialization import initialize
from regard.models.loading import DTYPES, FAMILIES, check_labels, family_of
from regard.models.model import Model

__all__ = ["build"]

MAIN_TASKS = (
    *("text-generation", "fill-mask", "text2text-generation", "zero-shot-image-classification"),
    *("image-text-to-text", "image-to-text", "image-classification", "pretraining"),
)
"""What a family is trained for where neither the caller nor config.json says: the first of these that it has."""


def build(
    config: str | Path | Mapping[str, Any] | Any,
    *,
    task: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    **values: Any,
) -> Model:
    """Build a model from its config, with the initial weights of its paper or original code.

    >>> import regard
    >>> model = regard.build("gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=16, vocab_size=13)
    >>> model.task, model.training
    ('text-generation', True)
    >>> regard.build({"model_type": "bert"}, task="text-classification").family.title    # doctest: +SKIP
    'BERT'

    Args:
        config: a config.json (the file or its directory; a tokenizer and image processor there are used), a dict of
            its keys, a config of `transformers`, or the model_type of a family ("gpt2"), whose sizes are then given as
            keywords.
        task: which head, as in `regard.load`; default: what "architectures" names, else the task that the family is
            pretrained with.
        seed: of the initial weights. The same seed gives the same weights on every device.
        dtype: of the weights.
        device: where the weights go.
        num_labels: number of labels of a classifier, named LABEL_0 and so on; default: those of the config.
        labels: their names; num_labels is then their number.
        **values: keys of config.json that replace those of `config`.

    Returns:
        The model, in training mode.

    Raises:
        FileNotFoundError: there is no config.json.
        TypeError: `config` is of another type, or dtype is not one of torch's four floating ones.
        ValueError: an unknown family or key, or sizes that do not fit each other.
    """
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be {', '.join(map(str, DTYPES))}; got {dtype!r}")
    check_int("seed", seed, 0)
    read = _read_config(config, values)
    if labels is not None and (num_labels not in (None, len(labels)) or len(set(labels)) != len(labels)):
        raise ValueError(f"labels must be {num_labels or 'some'} different names, got {labels!r:.200}")
    if num_labels is not None:
        check_int("num_labels", num_labels, 1)
        labels = labels or [f"LABEL_{number}" for number in range(num_labels)]
    if labels is not None:
        read = read.with_labels(labels)
    family = family_of(read)
    task = _task(family, read) if task is None else task
    if task not in family.tasks:
        raise ValueError(f"{family.title} has no task {task!r}; it has {', '.join(family.tasks)}")
    if num_labels is not None:
        check_labels(task, num_labels)
    model = empty(family, read, task)
    read.check_unused(family.title, harmless=family.harmless, ignore=())
    for place in places(model, ""):
        place.put(torch.empty(place.shape, dtype=torch.float32))
    initialize(model, torch.Generator().manual_seed(seed))
    if isinstance(config, (str, Path)) and config not in FAMILIES:
        _open_side_files(model, Path(config))
    return model.to(device=device, dtype=dtype).train()


def _open_side_files(model: Model, path: Path) -> None:
    """The tokenizer and image processor beside a config.json, if they are there."""
    folder = path if path.is_dir() else path.parent
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        model.tokenizer = Tokenizer.open(folder)
    if (folder / "preprocessor_config.json").is_file():
        model.preprocessor = ImageProcessor.open(folder)


def _read_config(config: Any, values: dict[str, Any]) -> Config:
    if isinstance(config, str) and config in FAMILIES:
        return Config({"model_type": config, **values}, f"build({config!r}, …)")
    if isinstance(config, (str, Path)):
        path = Path(config)
        if not path.exists():
            raise FileNotFoundError(
                f"there is no config {str(config)!r}; name a config.json, its directory, or a family: "
                + ", ".join(FAMILIES)
            )
        if path.is_dir():
            config = Config.open(path)
        else:
            held = read_json(path)
            if not isinstance(held, dict):
                raise ValueError(f"{path} must hold a JSON object, got {type(held).__name__}")
            return Config({**held, **values}, str(path))
    if isinstance(config, Config):
        return Config({**config.values, **values}, config.where)
    if isinstance(config, Mapping):
        return Config({**config, **values}, "build({…})")
    if hasattr(config, "to_dict"):  # of transformers
        return Config({**config.to_dict(), **values}, f"build({type(config).__name__})")
    raise TypeError(
        f"config must be a path, a dict, a transformers config or a family's name, got {type(config).__name__}"
    )


def _task(family: Family, config: Config) -> str:
    if config.values.get("architectures"):
        return family.task_of(config.values["architectures"])
    return next((task for task in MAIN_TASKS if task in family.tasks), family.bare_task)
