"""`Model.save` and `write_checkpoint`: a model as a directory that `regard.load` and `transformers` open."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from regard.checks import is_distributed, listed
from regard.data.image_processing import FILE, NESTED, ImageProcessor, known_values
from regard.files import atomic_directory
from regard.formats import check_tensor, read_optional_json, write_tensors
from regard.models.family import LABELLED, Config, empty, places
from regard.nn.blocks import label_names
from regard.nn.linformer import LinformerAttention
from regard.nn.performer import PerformerAttention

if TYPE_CHECKING:
    from regard.models.model import Model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
]
POOLING = ["modules.json", "sentence_bert_config.json", "1_Pooling/config.json"]  # of sentence-transformers
IMAGES = ["preprocessor_config.json", "processor_config.json"]  # how images and text are prepared
WEIGHTS = (
    *("model.safetensors", "model.*.safetensors", "*-of-*.safetensors", "*.safetensors.index*.json"),
    *("pytorch_model*.bin*", "tf_model*.h5*", "flax_model*.msgpack*"),
)
"""Weights as transformers names them, also those of formats that regard does not read."""
DESCRIPTIONS = (
    *("config.json", "generation_config.json", "adapter_config.json", "adapter_model.*", "quantize_config.json"),
    *(*TOKENIZER, "vocab.bpe", "bpe.codes", "spm.model", "chat_template.json", "additional_chat_templates"),
    *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json"),
    *("[0-9]_Pooling", "[0-9]_Normalize", "[0-9]_Dense", "[0-9]_LayerNorm"),
    *(*IMAGES, "image_processor_config.json", "video_preprocessor_config.json"),
)
"""What else in a checkpoint directory would describe the wrong model if it outlived its own."""
WHOLE = "safetensors.torch.save_model(model, path) keeps the whole state"


def save(model: Model, directory: str | Path) -> None:
    """See `Model.save`.

    What `load` would refuse is not written: before a file is touched, every weight must have the place and the shape
    that a model of this family, config and task has. A head with another number of labels than config.json is written
    with as many, LABEL_0 and so on, unless `model.config.values["id2label"]` names them. Keys that `load` ignored are
    left out.

    A model that is in the directory is replaced in one step: at any moment, killed or not, the directory holds the old
    model or the new one. Weights, config, tokenizer, pooling and preprocessor files of the old model are removed; all
    else (a README, notes, .git, logs) stays. So do files that regard does not write, if the model was loaded from this
    directory. A directory without a model (neither weights nor config.json) keeps all files that are not written.
    Warns if the old model's tokenizer goes, and the new model has none.
    """
    # 1. Check, before a file is touched.
    _check_format(model)
    config = _with_labels(model)
    _check_fit(model, config)
    # 2. Which files of the directory go.
    directory = Path(directory)
    there = os.listdir(directory) if directory.is_dir() else []
    own = model.directory is not None and os.path.realpath(directory) == os.path.realpath(model.directory)
    replaces = partial(_replaced, own=own)
    # 3. Write to a temporary directory, which then takes the place of the old one.
    with atomic_directory(directory, "the model", replaces=replaces, last="config.json") as part:
        write_checkpoint(part, _tensors(model))
        kept = config.without_ignored(harmless=model.family.harmless, ignore=model.ignored)
        architecture, dtype = model.family.tasks[model.task].architecture, str(model.dtype).removeprefix("torch.")
        values = kept | {"architectures": [architecture], "dtype": dtype}
        values.pop("torch_dtype", None)
        write_json(part, "config.json", values)
        if model.directory is not None:
            for name in ("generation_config.json", *TOKENIZER, *POOLING, *IMAGES):
                if (model.directory / name).is_file():
                    (part / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(model.directory / name, part / name)
        tokenizer = vars(model).get("tokenizer")  # opened before, or set by hand where the checkpoint has none
        if tokenizer is not None and not _has_tokenizer(part):
            tokenizer.save(part)
        _save_preprocessor(model, part)
        lost = set() if _has_tokenizer(part) else replaces(there) & set(TOKENIZER)
    if lost:
        warnings.warn(
            f"the tokenizer of the model that was in {str(directory)!r} ({', '.join(sorted(lost))}) went with it, and "
            "the model that was saved has none: set model.tokenizer to save one",
            stacklevel=3,
        )


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in TOKENIZER)


def _replaced(names: Collection[str], *, own: bool) -> set[str]:
    """Of the entries of a directory, those that go when a model is saved there.

    own: the model was loaded from there, so that other files describe it, too.
    """
    weights = {name for name in names if any(fnmatchcase(name, pattern) for pattern in WEIGHTS)}
    if own or not (weights or "config.json" in names):
        return weights
    return weights | {name for name in names if any(fnmatchcase(name, pattern) for pattern in DESCRIPTIONS)}


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The weights under the checkpoint's names, one by one."""
    parameters = dict(model.named_parameters())
    for place in places(model, model.family.prefix_of(model.task)):
        parts = place.source.split(parameters[place.name].detach(), place.rows)
        yield from zip(place.theirs, parts, strict=True)


def _check_format(model: Model) -> None:
    """Raise ValueError if attention is computed in a way that the format cannot say, or weights are split."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, (PerformerAttention, LinformerAttention)):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which {model.family.title}'s format cannot describe: "
                f"loading it would give softmax attention. {WHOLE}"
            )
    parts = [name for name, p in model.named_parameters() if is_distributed(p)]
    parts = parts or [name for name, module in modules.items() if getattr(module, "separated", False)]
    if parts:
        raise ValueError(
            f"{listed(parts)} are split over processes, or taken apart for it. On every process: weights = "
            "regard.models.tensor_parallel.gather(model); then on one: whole = regard.load(…), "
            "whole.load_state_dict(weights), whole.save(…)"
        )


def _with_labels(model: Model) -> Config:
    """The model's config, with as many labels as its head scores: fine-tuning begins with a new head."""
    score = dict(model.named_parameters()).get("head.score.weight")
    if model.task not in LABELLED or score is None or score.ndim != 2:
        return model.config
    config, count = model.config, len(score)
    fits = _shapes(model, config).get("head.score.weight", (count,))[0] == count
    named, numbers = config.values.get("id2label"), config.values.get("label2id")
    old = isinstance(named, dict) and isinstance(numbers, dict) and numbers.keys() != set(map(str, named.values()))
    if fits and not old:  # else label2id is of the names before id2label was given new ones
        return config
    names = label_names(config.labels(count) if config.num_labels(count) == count else (), count)
    labelled = config.with_labels(names)
    labelled.values |= {"num_labels": count} if "num_labels" in config.values else {}
    return labelled


def _shapes(model: Model, config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a model with this config; without the pooler if `load` found none."""
    wanted = empty(model.family, config, model.task).named_parameters()
    bare = model.task == model.family.bare_task and getattr(model, "pooler", None) is None
    return {name: tuple(p.shape) for name, p in wanted if not (bare and name.startswith("pooler."))}


def _check_fit(model: Model, config: Config) -> None:
    """Raise ValueError with all weights that `load` would have no place for, would miss, or that have another shape."""
    wanted = _shapes(model, config)
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
            f"{model.task!r} that its config describes. {'; '.join(problems)}. Merge what was added into the weights "
            "(torch.nn.utils.prune.remove, torch.nn.utils.parametrize.remove_parametrizations, an adapter's own "
            f"merge), and write sizes that changed to model.config.values; or {WHOLE}"
        )


def _save_preprocessor(model: Model, directory: Path) -> None:
    """Write a preprocessor that was set by hand, or the checkpoint's own without the keys that were ignored."""
    held = vars(model).get("preprocessor")
    try:
        own = None if model.directory is None else ImageProcessor.open(model.directory, ignore=model.ignored)
    except (FileNotFoundError, ValueError):
        own = None  # there is none, or none that is understood
    written = own if held is None or held == own else held
    if written is None:
        return
    values = known_values(written.kind, written.values)
    if own is not None and written is own and values == own.values:
        return
    nested = read_optional_json(directory, NESTED, dict) or {}
    if "image_processor" in nested:  # it would go first
        write_json(directory, NESTED, nested | {"image_processor": values})
    else:
        write_json(directory, FILE, values)


# ------------------------------------------------------------------------------------------------ files of a checkpoint


def write_json(directory: Path, name: str, values: object) -> None:
    """Write values as JSON to directory/name."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (directory / name).write_text(text + "\n", encoding="utf-8")


def write_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write tensors as the weights of a new directory that `transformers` opens.

    >>> import tempfile
    >>> import torch
    >>> from regard.models.loading import Checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(f"{folder}/new", ((name, torch.ones(2)) for name in ("a", "b")))
    ...     Checkpoint.open(f"{folder}/new")
    Checkpoint(2 tensors, 16 bytes, files: model.safetensors)

    Args:
        directory: created if it does not exist; without weights.
        tensors: by name, or as pairs that may be made one by one: at most one shard's are held. On any device.
        shard_bytes: a file's tensors take at most this, or are a single one. One file is `model.safetensors`; more are
            numbered, with an index.

    Raises:
        TypeError: as ValueError.
        ValueError: for what a safetensors file cannot hold.
        OSError: writing failed.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []  # the tensors' names in each
    total = {"total_parameters": 0, "total_size": 0}
    for shard in _shards(tensors.items() if isinstance(tensors, Mapping) else tensors, shard_bytes):
        write_tensors(place / f"{len(shards)}", shard)
        shards.append(list(shard))
        total["total_parameters"] += sum(tensor.numel() for tensor in shard.values())
        total["total_size"] += sum(tensor.nbytes for tensor in shard.values())
        del shard  # before the next ones are made: gigabytes
    if not shards:
        raise ValueError("there are no tensors to write")
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else [SINGLE]
    for i, file in enumerate(files):
        (place / f"{i}").rename(place / file)
    if len(files) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True)
        (place / INDEX).write_text(text + "\n", encoding="utf-8")


def _shards(pairs: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    seen: set[str] = set()
    held = 0
    for name, tensor in pairs:
        check_tensor(name, tensor)
        if name in seen:
            raise ValueError(f"two tensors are named {name!r}")
        seen.add(name)
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    if shard:
        yield shard
