"""`regard.load`: from a checkpoint to a model. saving.py is the way back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import torch

from regard.models.checkpoint import Checkpoint, find, listed, refuse_foreign
from regard.models.config import Config
from regard.models.family import Family, Names, WeightPlace, empty, places
from regard.models.model import Model

__all__ = ["FAMILIES", "family_named", "family_of", "load"]

FAMILIES = {
    "albert": "albert",
    "bart": "bart",
    "bert": "bert",
    "big_bird": "big_bird",
    "blip": "blip",
    "clip": "clip",
    "clip_text_model": "clip",
    "clip_vision_model": "clip",
    "deit": "vit",
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2",
    "distilbert": "distilbert",
    "electra": "electra",
    "gpt2": "gpt2",
    "idefics": "idefics",
    "llama": "llama",
    "llava": "llava",
    "longformer": "longformer",
    "marian": "marian",
    "roberta": "roberta",
    "swin": "swin",
    "t5": "t5",
    "transformer": "transformer",
    "vit": "vit",
    "xlm-roberta": "roberta",
}
"""model_type of config.json → the file in families/ that holds its `Family`."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what a model computes in

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
    """Load a model from a Hugging Face checkpoint.

    >>> import tempfile, regard
    >>> from regard.models.families.transformer import transformer
    >>> tiny = transformer(13, start=1, end=2, pad=0, d_model=8, num_heads=2, layers=1, d_ff=16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tiny.save(folder)
    ...     regard.load(folder).task
    'text2text-generation'
    >>> regard.load("no/such/directory/here")
    Traceback (most recent call last):
        ...
    FileNotFoundError: there is no directory 'no/such/directory/here'; a model of the hub is called 'name' or \
'owner/name'

    Everything is checked before memory is taken: every tensor must have a place in the model and the right shape.

    Args:
        path: a directory with config.json, safetensors and tokenizer; or "name" or "owner/name" of a model on the hub.
        task: which head: feature-extraction, fill-mask, image-classification, image-classification-cls,
            image-encoding, image-text-matching, image-text-to-text, image-to-text, masked-image-modeling,
            next-sentence-prediction, pretraining, question-answering, replaced-token-detection,
            text-classification, text-encoding, text-generation, text2text-generation, token-classification,
            visual-question-answering, zero-shot-image-classification; default: what config.json names.
        dtype: of the weights; None keeps the file's.
        device: where the weights go, straight from the file.
        ignore: keys of config.json and preprocessor_config.json that you know to change nothing.
        revision: a branch, tag or commit on the hub.
        progress: called after each tensor with the bytes read and the bytes in all.

    Returns:
        The model, in eval mode. On the CPU and in the file's dtype, its weights are private views of the mapped file.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: an unknown key of config.json, tensors that are missing, left over or of another shape, damaged
            files, pickled weights.
        TypeError: a dtype other than torch's four floating ones.
    """
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype must be {', '.join(map(str, DTYPES))}, or None for as stored; got {dtype!r}")
    directory = find(path, revision=revision)
    config = Config.open(directory)
    family = family_of(config)
    task = family.task_of(config.values.get("architectures")) if task is None else task
    if task not in family.tasks:
        raise ValueError(f"{family.title} has no task {task!r}; it has {', '.join(family.tasks)}")
    checkpoint = Checkpoint.open(directory)
    if family.adjust is not None:
        config = family.adjust(config, checkpoint.entries)
    model = empty(family, config, task)
    ignore = ignore if isinstance(ignore, str) else tuple(ignore)  # a str is refused by its own name
    config.check_unused(family.title, harmless=family.harmless, ignore=ignore)
    fill(model, checkpoint, dtype, torch.device(device), progress)
    model.directory, model.ignored = directory, tuple(ignore)
    return model.eval()


def family_of(config: Config) -> Family:
    """The family that config.json names. Raises ValueError with those there are, and for other libraries' files."""
    refuse_foreign(config.values, config.where)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{config.where}: model_type is {kind!r}, which regard does not have as a model; it has "
            f"{', '.join(FAMILIES)}. regard.watch looks into any PyTorch model as it is"
        )
    return family_named(kind)


def family_named(model_type: str) -> Family:
    """The `Family` with this model_type, a key of `FAMILIES`, in the file that it names."""
    values = vars(import_module(f"regard.models.families.{FAMILIES[model_type]}")).values()
    return next(value for value in values if isinstance(value, Family) and value.model_type == model_type)


def fill(
    model: Model, checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device, progress: Progress | None
) -> None:
    """Read every weight of a model, after all of them are known to be there and to fit."""
    # 1. Plan: which tensors of the checkpoint make which parameter.
    stored = _stored_names(checkpoint, model.family)
    plan = list(places(model, _prefix(stored, model.family)))
    pooler = [place for place in plan if place.name.startswith("pooler.")]
    if model.task == model.family.bare_task and not stored.keys() & _read_by(pooler):
        # A body that was saved beside a head that does not pool.
        plan = [place for place in plan if place not in pooler]
        if pooler:
            model.register_module("pooler", None)
    _take_copies(model, plan, stored)
    # 2. Check, before memory is taken.
    _check_tensors(model, plan, checkpoint, stored)
    _check_dtypes(plan, checkpoint, stored, dtype)
    _check_copies(model, plan, checkpoint, stored)
    # 3. Read, one parameter at a time.
    done = 0
    for place in plan:
        if place.source.optional and not stored.keys() & set(place.theirs):
            place.put(torch.zeros(place.shape, dtype=model.dtype, device=device))
            continue
        parts = [checkpoint.read(stored[part], device=device, dtype=dtype) for part in place.theirs]
        place.put(place.source.join(parts))
        done += sum(checkpoint.entries[stored[part]].nbytes for part in place.theirs)
        if progress is not None:
            progress(done, checkpoint.nbytes)


def _stored_names(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """The names of the tensors in the newest `transformers` → in the file."""
    names: dict[str, str] = {}
    for stored in checkpoint.entries:
        name = stored
        for old, new in family.renamed.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        for old, new in family.moved.items():
            name = re.sub(old, new, name)
        if name in names:
            raise ValueError(f"the checkpoint holds {name} twice: as {names[name]} and as {stored}")
        names[name] = stored
    return names


def _take_copies(model: Model, plan: list[WeightPlace], stored: dict[str, str]) -> None:
    """Read a shared tensor from its copy if the file holds only that.

    `safetensors.torch.save_model` keeps the first of a tensor's names by the alphabet: lm_head.weight of GPT-2's table.
    """
    missing, family, prefix = _missing(plan, stored), model.family, _prefix(stored, model.family)
    for task in sorted(family.tasks, key=lambda name: name != model.task) if missing else ():
        for copy, original in {**family.copies, **family.tasks[task].copies}.items():
            wanted = next((name for name in (original, prefix + original) if name in missing), None)
            held = next((name for name in (copy, prefix + copy) if name in stored), None)
            if wanted is None or held is None:
                continue
            # A head that is not tied reads this name for itself, and then it is no copy.
            if held not in _read_by(plan if task == model.task else places(empty(family, model.config, task), prefix)):
                stored[wanted] = stored.pop(held)
                missing.remove(wanted)


def _read_by(plan: Iterable[WeightPlace]) -> set[str]:
    return {part for place in plan for part in place.theirs}


def _missing(plan: Iterable[WeightPlace], stored: Iterable[str]) -> set[str]:
    return _read_by(place for place in plan if not place.source.optional) - set(stored)


def _prefix(stored: Iterable[str], family: Family) -> str:
    """The prefix of the body's names in this checkpoint: a bare body has none."""
    known = sorted({family.prefix_of(task) for task in family.tasks} - {""})
    return next((prefix for prefix in known if any(name.startswith(prefix) for name in stored)), "")


def _check_tensors(model: Model, plan: list[WeightPlace], checkpoint: Checkpoint, stored: dict[str, str]) -> None:
    """Raise ValueError with all tensors that are missing, left over or of another shape."""
    missing = sorted(_missing(plan, stored))
    misshapen = []
    for place in plan:
        for part, shape in zip(place.theirs, place.source.shapes(place.shape, place.rows), strict=True):
            if part in stored and (found := checkpoint.entries[stored[part]].shape) != shape:
                misshapen.append(f"{part} {found} instead of {shape}")
    left = sorted(stored.keys() - _read_by(plan))
    if left:
        known = _known(model)
        left = [name for name in left if not any(p.search(name) for p in known)]
    problems = [
        f"{len(names)} tensors {what}: {listed(names)}"
        for what, names in (("are missing", missing), ("have another shape", misshapen), ("have no place", left))
        if names
    ]
    if problems:
        hint = ""
        if missing and not misshapen and not left and _has_body(model, stored):
            hint = f". A checkpoint without this head can be read as task={model.family.bare_task!r}"
        raise ValueError(
            f"the checkpoint does not fit {model.family.title} with task {model.task!r} and its config.json: "
            + "; ".join(problems)
            + hint
        )


def _has_body(model: Model, stored: dict[str, str]) -> bool:
    """Could the checkpoint be read without a head, so that nothing but the head is missing?"""
    if model.task == model.family.bare_task:
        return False
    try:
        bare = empty(model.family, model.config, model.family.bare_task)
    except ValueError:  # of keys that only the bare model reads
        return False
    plan = places(bare, _prefix(stored, model.family))
    return not _missing((place for place in plan if not place.name.startswith("pooler.")), stored)


def _check_dtypes(
    plan: list[WeightPlace], checkpoint: Checkpoint, stored: dict[str, str], dtype: torch.dtype | None
) -> None:
    """Raise ValueError for integers, fp8, and several dtypes at once."""
    read = [stored[part] for place in plan for part in place.theirs if part in stored]
    found = {name: checkpoint.entries[name].dtype for name in read}
    wrong = [f"{name} {kind}" for name, kind in found.items() if kind not in DTYPES]
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors are of a dtype that regard does not compute in: {listed(wrong)}; "
            "quantised weights are not supported"
        )
    kinds = sorted(map(str, set(found.values())))
    if dtype is None and len(kinds) > 1:
        raise ValueError(
            f"the weights are stored in {' and '.join(kinds)}: say which to compute in, as dtype={kinds[-1]}"
        )


def _check_copies(model: Model, plan: list[WeightPlace], checkpoint: Checkpoint, stored: dict[str, str]) -> None:
    """Raise ValueError for a copy that differs from the shared tensor: `transformers` would compute with it."""
    family, used = model.family, _read_by(plan)
    prefix = _prefix(stored, family)
    for copy, original in {**family.copies, **family.tasks[model.task].copies}.items():
        second = next((name for name in (copy, prefix + copy) if name in stored and name not in used), None)
        first = next((name for name in (original, prefix + original) if name in used and name in stored), None)
        if first is None or second is None:
            continue
        one, other = (checkpoint.read(stored[name]) for name in (first, second))
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise ValueError(
                f"the checkpoint holds {second}, and it differs from {first}, whose numbers it should have by "
                'config.json: if it is right, write "tie_word_embeddings": false there, else take it out of the file'
            )


def _known(model: Model) -> list[re.Pattern[str]]:
    """Patterns of tensors that may be left over: buffers, and weights of the family's other tasks.

    Not a bias beside a weight that is read, if the model has none: `transformers` would compute with it.
    """
    family = model.family
    everything: list[Names] = [family.names_of(model.config), *(task.names for task in family.tasks.values())]
    read = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    ignored = (*family.ignored, *family.tasks[model.task].unused)
    patterns = list(ignored)
    for names in everything:
        for ours, source in names.items():
            if ours in read and (names is everything[0] or names is family.tasks[model.task].names):
                continue
            for theirs in (source,) if isinstance(source, str) else source.names(("{i}", "{j}"), ""):
                exact = re.escape(theirs).replace(re.escape("{i}"), r"\d+").replace(re.escape("{j}"), r"\d+")
                patterns.append(rf"^({re.escape(family.prefix)}\.)?{exact}(\.weight|\.bias)?$")
    # The body's layers beyond those asked for are not harmless: they would have been computed with.
    return [re.compile(p) for p in patterns if r"\d+" not in p or p in ignored]
