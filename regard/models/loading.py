"""From a checkpoint to a model and back: one loop over the family's templates.

    >>> model = regard.load("path/or/hub-id")          # doctest: +SKIP
    >>> model.save("elsewhere")                        # doctest: +SKIP

Everything is checked before a weight is read: the model is first made without memory, then each of its weights must be
in the checkpoint with the right shape, and each tensor of the checkpoint must have a place. It knows no family.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.models.checkpoints import Checkpoint, write
from regard.models.family import Family
from regard.models.finding import find
from regard.models.model import Model
from regard.models.settings import Settings
from regard.models.sources import Names, Source, lookup

__all__ = ["FAMILIES", "family_of", "load", "save"]

FAMILIES = {
    "albert": "albert",
    "bart": "bart",
    "bert": "bert",
    "distilbert": "distilbert",
    "gpt2": "gpt2",
    "llama": "llama",
    "marian": "transformer",
    "roberta": "roberta",
    "t5": "t5",
}
"""model_type of config.json → the file of its family."""

TEXT_SIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "generation_config.json", "modules.json", "1_Pooling/config.json"),
)
"""Files of a checkpoint that are neither config.json nor weights."""

LISTED = 8  # names in an error before it says how many more

Progress = Callable[[int, int], None]
"""Told after each tensor: bytes read, bytes in all."""


def load(
    path: str | Path,
    *,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ignore: Iterable[str] = (),
    revision: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """A regard model from a Hugging Face checkpoint: a directory, or the id of one on the hub.

    >>> import regard
    >>> regard.load("no/such/directory/here")
    Traceback (most recent call last):
        ...
    FileNotFoundError: no/such/directory/here is not a directory, nor the id of a model on the hub (owner/name)

    task: which head: none, fill, next, pretrain, classify, tag, answer, generate; default what config.json names.
    dtype: of the weights; default as stored.  device: where they go, straight from the file.
    ignore: keys of config.json that you know to change nothing.  revision: of a model on the hub.
    progress: called after each tensor with bytes read and bytes in all.

    The model is in eval mode. Raises FileNotFoundError where there is no model, ValueError for settings that would
    change the maths and are not known, missing, left-over or misshapen tensors, broken files and pickled weights, all
    of it before memory is taken.
    """
    directory = find(path, revision=revision)
    settings = Settings.open(directory)
    family = family_of(settings)
    task = family.task_of(settings.values.get("architectures")) if task is None else task
    if task not in family.tasks:
        raise ValueError(f"{family.title} has no task {task!r}; it has {', '.join(family.tasks)}")
    checkpoint = Checkpoint.open(directory)
    model = empty(family, settings, task)
    settings.finish(family.title, harmless=family.harmless, ignore=ignore)
    fill(model, checkpoint, dtype, torch.device(device), progress)
    model.directory = directory
    return model.eval()


def family_of(settings: Settings) -> Family:
    """The family that config.json names. Raises ValueError with those there are."""
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"{settings.where}: model_type is {kind!r}, which regard does not have as a model; it has "
            f"{', '.join(FAMILIES)}. regard.watch looks into any PyTorch model as it is"
        )
    family = import_module(f"regard.models.{FAMILIES[kind]}").FAMILY
    assert isinstance(family, Family)
    return family


def empty(family: Family, settings: Settings, task: str) -> Model:
    """The model without memory: shapes only. Raises ValueError for sizes that do not fit each other."""
    with torch.device("meta"):
        model = family.build(settings, task)
    model.family, model.task = family, task
    return model


def fill(
    model: Model, checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device, progress: Progress | None
) -> None:
    """Read every weight of a model, after all of them are known to be there and to fit."""
    stored = _stored_names(checkpoint, model.family)
    plan = [(name, source, theirs) for name, source, theirs in sources(model, _prefix(stored, model.family))]
    _check(model, plan, checkpoint, stored)
    done = 0
    for name, source, theirs in plan:
        entries = [stored[part] for part in theirs]
        parts = [checkpoint.read(entry, device=device, dtype=dtype) for entry in entries]
        _put(model, name, source.join(parts))
        done += sum(part.nbytes for part in parts)
        if progress is not None:
            progress(done, checkpoint.nbytes)


def sources(model: Model, prefix: str) -> Iterator[tuple[str, Source, tuple[str, ...]]]:
    """Each parameter of the model, where it comes from, and what the tensors are called there."""
    body, head = model.family.names(model.settings), model.family.tasks[model.task].names
    for name, _ in model.named_parameters():
        inside = name.startswith("head.")
        source, index, leaf = lookup(head if inside else body, name)
        theirs = source.names(index, leaf)
        yield name, source, theirs if inside else tuple(prefix + part for part in theirs)


def save(model: Model, directory: str | Path) -> None:
    """Write a directory that `load` and `transformers` open: config.json, the weights, the tokenizer.

    directory: made if it is not there; files of the same names are replaced, each one whole or not at all.
    Raises NotADirectoryError if there is a file of that name.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; save writes a directory")
    directory.mkdir(parents=True, exist_ok=True)
    family = model.family
    prefix = family.prefix + "." if family.prefix and model.task != "none" else ""
    parameters = dict(model.named_parameters())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, source, theirs in sources(model, prefix):
            parts = source.split(parameters[name].detach(), _rows(model, name))
            yield from zip(theirs, parts, strict=True)

    write(directory, dict(tensors()))
    values = model.settings.values | {
        "architectures": [family.tasks[model.task].architecture],
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    values.pop("torch_dtype", None)
    _write_json(directory / "config.json", values)
    if model.directory is not None:
        _copy_text_side(model.directory, directory)


# -------------------------------------------------------------------------------------------------------------- pieces


def _stored_names(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """The names of the tensors as they are called now → as the file calls them."""
    names = {}
    for stored in checkpoint.entries:
        name = stored
        for old, new in family.renamed.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        names[name] = stored
    return names


def _prefix(stored: Iterable[str], family: Family) -> str:
    """What stands before the body's weights in this checkpoint: a bare body has no prefix."""
    prefix = family.prefix + "."
    return prefix if family.prefix and any(name.startswith(prefix) for name in stored) else ""


def _check(
    model: Model, plan: list[tuple[str, Source, tuple[str, ...]]], checkpoint: Checkpoint, stored: dict[str, str]
) -> None:
    """Refuse missing, misshapen and left-over tensors, all of them in one message."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    wanted = {part for _, _, theirs in plan for part in theirs}
    missing = sorted(wanted - set(stored))
    misshapen = []
    for name, source, theirs in plan:
        if not set(theirs) & set(missing):
            found = source.shape([checkpoint.entries[stored[part]].shape for part in theirs])
            if found != shapes[name]:
                misshapen.append(f"{' + '.join(theirs)} {found} instead of {shapes[name]}")
    known = _known(model)
    left = sorted(name for name in set(stored) - wanted if not any(p.search(name) for p in known))
    problems = [
        f"{len(names)} tensors {what}: {_list(names)}"
        for what, names in (("are missing", missing), ("have another shape", misshapen), ("have no place", left))
        if names
    ]
    if problems:
        hint = ""
        if missing and not misshapen and model.task != "none":
            hint = ". A checkpoint without this head can be read as task='none'"
        raise ValueError(
            f"the checkpoint does not fit {model.family.title} with task {model.task!r} and its config.json: "
            + "; ".join(problems)
            + hint
        )


def _known(model: Model) -> list[re.Pattern[str]]:
    """What may be left over: what holds nothing learnt, and the heads of the family's other tasks."""
    family = model.family
    everything: list[Names] = [family.names(model.settings), *(task.names for task in family.tasks.values())]
    patterns = list(family.ignored)
    for names in everything:
        for source in names.values():
            for theirs in (source,) if isinstance(source, str) else source.names("{i}", ""):
                exact = re.escape(theirs).replace(re.escape("{i}"), r"\d+")
                patterns.append(rf"^({re.escape(family.prefix)}\.)?{exact}(\.weight|\.bias)?$")
    # The body's layers beyond those asked for are not harmless: they would have been computed with.
    return [re.compile(p) for p in patterns if r"\d+" not in p or p in family.ignored]


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))


def _rows(model: nn.Module, name: str) -> tuple[int, ...] | None:
    owner = model.get_submodule(name.rpartition(".")[0])
    return getattr(owner, "rows", None)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _write_json(path: Path, values: object) -> None:
    """Whole or not at all: written beside, then renamed."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _copy_text_side(source: Path, directory: Path) -> None:
    """The tokenizer, and what a checkpoint says of generating and pooling, as they came."""
    for name in TEXT_SIDE:
        if (source / name).is_file() and (source / name).resolve() != (directory / name).resolve():
            (directory / name).parent.mkdir(exist_ok=True)
            beside = directory / (name + ".part")
            shutil.copyfile(source / name, beside)
            beside.replace(directory / name)
