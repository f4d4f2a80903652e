"""`regard.load`, from a checkpoint to a model, and `regard.build`, from a config. saving.py is the way back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from regard.checks import check_int
from regard.data.image_processing import ImageProcessor
from regard.data.tokenizer import Tokenizer
from regard.models.checkpoint import Checkpoint, find, listed, refuse_foreign
from regard.models.config import Config
from regard.models.family import Family, WeightPlace, empty, places
from regard.models.initialization import initialize
from regard.models.model import Model
from regard.models.saving import LABELLED

__all__ = ["FAMILIES", "build", "family_named", "family_of", "load"]

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

MAIN_TASKS = (
    *("text-generation", "fill-mask", "text2text-generation", "zero-shot-image-classification"),
    *("image-text-to-text", "image-to-text", "image-classification", "pretraining"),
)
"""What a family is trained for where neither the caller nor config.json says: the first of these that it has."""

HEADS = ("head.", "pooler.", "text_pooler.", "vision_pooler.")  # what fine-tuning may begin anew

Progress = Callable[[int, int], None]
"""Called after each tensor with the bytes read and the bytes in all."""


def load(
    path: str | Path,
    *,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    ignore: Iterable[str] = (),
    revision: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a model from a Hugging Face checkpoint.

    >>> import tempfile, regard
    >>> from regard.models.families.transformer import TransformerSize, transformer
    >>> tiny = transformer(13, TransformerSize(d_model=8, num_heads=2, layers=1, d_ff=16), start=1, end=2, pad=0)
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
        num_labels: number of labels to fine-tune for. A head that the checkpoint lacks, or has with another number of
            labels, is initialised as the family does (seed 0); `save` keeps it. Without `task`, the checkpoint's own
            classifier, else that of whole texts or images. Question answering has 2: start and end.
        labels: their names, instead of LABEL_0 and so on; num_labels is then their number.
        ignore: keys of config.json and preprocessor_config.json that you know to change nothing.
        revision: a branch, tag or commit on the hub.
        progress: called after each tensor with the bytes read and the bytes in all.

    Returns:
        The model, in eval mode. On the CPU and in the file's dtype, its weights are private views of the mapped file.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: an unknown key of config.json, tensors that are missing, left over or of another shape, damaged
            files, pickled weights; labels for a task that has none.
        TypeError: a dtype other than torch's four floating ones, or labels that are not names.
    """
    names = _label_names(labels, num_labels)
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype must be {', '.join(map(str, DTYPES))}, or None for as stored; got {dtype!r}")
    directory = find(path, revision=revision)
    config = Config.open(directory)
    family = family_of(config)
    architectures = config.values.get("architectures")
    if task is None and names is not None:
        known = [name for name in LABELLED if name in family.tasks]
        own = [name for name in known if [family.tasks[name].architecture] == architectures]
        task = next(iter(own + known), None)
    task = family.task_of(architectures) if task is None else task
    if task not in family.tasks:
        raise ValueError(f"{family.title} has no task {task!r}; it has {', '.join(family.tasks)}")
    if names is not None:
        _check_labels(task, len(names))
        config = config.with_labels(names)
    checkpoint = Checkpoint.open(directory)
    if family.adjust is not None:
        config = family.adjust(config, checkpoint.entries)
    model = empty(family, config, task)
    ignore = ignore if isinstance(ignore, str) else tuple(ignore)  # a str is refused by its own name
    config.check_unused(family.title, harmless=family.harmless, ignore=ignore)
    fill(model, checkpoint, dtype, torch.device(device), progress, fresh_head=names is not None)
    model.directory, model.ignored = directory, tuple(ignore)
    return model.eval()


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
    names = _label_names(labels, num_labels)
    if names is not None:
        read = read.with_labels(names)
    family = family_of(read)
    if task is None and read.values.get("architectures"):
        task = family.task_of(read.values["architectures"])
    elif task is None:
        task = next((name for name in MAIN_TASKS if name in family.tasks), family.bare_task)
    if task not in family.tasks:
        raise ValueError(f"{family.title} has no task {task!r}; it has {', '.join(family.tasks)}")
    if names is not None:
        _check_labels(task, len(names))
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
        config = Config.open(path)
    if isinstance(config, Config):
        return Config({**config.values, **values}, config.where)
    if isinstance(config, Mapping):
        return Config({**config, **values}, "build({…})")
    if hasattr(config, "to_dict"):  # of transformers
        return Config({**config.to_dict(), **values}, f"build({type(config).__name__})")
    raise TypeError(
        f"config must be a path, a dict, a transformers config or a family's name, got {type(config).__name__}"
    )


def _label_names(labels: Sequence[str] | None, num_labels: int | None) -> tuple[str, ...] | None:
    """The names of a new head's labels, LABEL_0 and so on if only their number is given; None for neither."""
    if labels is None:
        return None if num_labels is None else tuple(f"LABEL_{n}" for n in range(check_int("num_labels", num_labels)))
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels must be a list of names, got {labels!r:.200}")
    names = tuple(labels)
    if num_labels not in (None, len(names)) or len(set(names)) != len(names):
        raise ValueError(f"labels must be {num_labels or 'some'} different names, got {names!r:.200}")
    check_int("num_labels", len(names))
    return names


def _check_labels(task: str, num_labels: int) -> None:
    """Raise ValueError for a task without labels, or for other than 2 in question answering."""
    if task not in LABELLED and (task, num_labels) != ("question-answering", 2):
        raise ValueError(
            f"task {task!r} has no head with {num_labels} labels; those with labels are {', '.join(LABELLED)}, and "
            "question-answering with 2, start and end"
        )


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
    model: Model,
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: Progress | None,
    *,
    fresh_head: bool = False,
) -> None:
    """Read every weight of a model, after all of them are known to be there and to fit.

    fresh_head: weights of the head and pooler that are missing, or have another shape, are initialised.
    """
    family = model.family
    # 1. Names: those of the newest `transformers` → those in the file.
    stored: dict[str, str] = {}
    for entry in checkpoint.entries:
        name = entry
        for old, new in family.renamed.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        for old, new in family.moved.items():
            name = re.sub(old, new, name)
        if name in stored:
            raise ValueError(f"the checkpoint holds {name} twice: as {stored[name]} and as {entry}")
        stored[name] = entry
    known = sorted({family.prefix_of(task) for task in family.tasks} - {""})
    prefix = next((p for p in known if any(name.startswith(p) for name in stored)), "")  # a bare body has none
    # 2. Plan: which tensors make which parameter.
    plan = list(places(model, prefix))
    pooler = [place for place in plan if place.name.startswith("pooler.")]
    if pooler and model.task == family.bare_task and not stored.keys() & _read_by(pooler):
        # A body that was saved beside a head that does not pool.
        plan = [place for place in plan if place not in pooler]
        model.register_module("pooler", None)
    _take_copies(model, plan, stored, prefix)
    fresh: list[WeightPlace] = []
    if fresh_head:
        fresh = [place for place in plan if place.name.startswith(HEADS) and not _fits(place, checkpoint, stored)]
        plan = [place for place in plan if place not in fresh]
        stored = {name: entry for name, entry in stored.items() if name not in _read_by(fresh)}
    # 3. Check, before memory is taken.
    _check_tensors(model, plan, checkpoint, stored, prefix)
    dtypes = {part: checkpoint.entries[stored[part]].dtype for part in _read_by(plan) if part in stored}
    wrong = sorted(f"{stored[part]} {kind}" for part, kind in dtypes.items() if kind not in DTYPES)
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors are of a dtype that regard does not compute in: {listed(wrong)}; "
            "quantised weights are not supported"
        )
    kinds = sorted(map(str, set(dtypes.values())))
    if dtype is None and len(kinds) > 1:
        raise ValueError(
            f"the weights are stored in {' and '.join(kinds)}: say which to compute in, as dtype={kinds[-1]}"
        )
    _check_copies(model, plan, checkpoint, stored, prefix)
    # 4. Read, one parameter at a time.
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

    # 5. Draw what is new.
    if fresh:
        kind = dtype or next(iter(dtypes.values()))
        for place in fresh:
            place.put(torch.empty(place.shape, dtype=torch.float32))
        initialize(model, torch.Generator().manual_seed(0), only={place.name for place in fresh})
        parameters = dict(model.named_parameters())
        for place in fresh:
            place.put(parameters[place.name].detach().to(device, kind))


def _fits(place: WeightPlace, checkpoint: Checkpoint, stored: dict[str, str]) -> bool:
    """Does the checkpoint hold a parameter, in its shape?"""
    shapes = zip(place.theirs, place.source.shapes(place.shape, place.rows), strict=True)
    return all(part in stored and checkpoint.entries[stored[part]].shape == shape for part, shape in shapes)


def _read_by(plan: Iterable[WeightPlace]) -> set[str]:
    return {part for place in plan for part in place.theirs}


def _missing(plan: Iterable[WeightPlace], stored: Iterable[str]) -> set[str]:
    return _read_by(place for place in plan if not place.source.optional) - set(stored)


def _take_copies(model: Model, plan: list[WeightPlace], stored: dict[str, str], prefix: str) -> None:
    """Read a shared tensor from its copy if the file holds only that.

    `safetensors.torch.save_model` keeps the first of a tensor's names by the alphabet: lm_head.weight of GPT-2's table.
    """
    missing, family = _missing(plan, stored), model.family
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


def _check_tensors(
    model: Model, plan: list[WeightPlace], checkpoint: Checkpoint, stored: dict[str, str], prefix: str
) -> None:
    """Raise ValueError with all tensors that are missing, left over or of another shape."""
    family, missing, misshapen = model.family, sorted(_missing(plan, stored)), []
    for place in plan:
        for part, wanted in zip(place.theirs, place.source.shapes(place.shape, place.rows), strict=True):
            if part in stored and (shape := checkpoint.entries[stored[part]].shape) != wanted:
                misshapen.append(f"{part} {shape} instead of {wanted}")
    left = sorted(stored.keys() - _read_by(plan))
    known = _known(model) if left else []
    left = [name for name in left if not any(pattern.search(name) for pattern in known)]
    kinds = (("are missing", missing), ("have another shape", misshapen), ("have no place", left))
    problems = [f"{len(names)} tensors {what}: {listed(names)}" for what, names in kinds if names]
    if not problems:
        return
    hint = ""
    if missing and not misshapen and not left and model.task != family.bare_task:
        try:  # is nothing but the head missing?
            body = places(empty(family, model.config, family.bare_task), prefix)
            if not _missing((place for place in body if not place.name.startswith("pooler.")), stored):
                hint = f". A checkpoint without this head can be read as task={family.bare_task!r}"
        except ValueError:  # of keys that only the bare model reads
            pass
    raise ValueError(
        f"the checkpoint does not fit {family.title} with task {model.task!r} and its config.json: "
        f"{'; '.join(problems)}{hint}"
    )


def _check_copies(
    model: Model, plan: list[WeightPlace], checkpoint: Checkpoint, stored: dict[str, str], prefix: str
) -> None:
    """Raise ValueError for a copy that differs from the shared tensor: `transformers` would compute with it."""
    used = _read_by(plan)
    for copy, original in {**model.family.copies, **model.family.tasks[model.task].copies}.items():
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
    family, head = model.family, model.family.tasks[model.task].names
    body = family.names_of(model.config)
    read = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    patterns = [*family.ignored, *family.tasks[model.task].unused]
    for names in (body, *(task.names for task in family.tasks.values())):
        for ours, source in names.items():
            if ours in read and (names is body or names is head):
                continue
            for theirs in (source,) if isinstance(source, str) else source.names((), ""):
                if "{i}" not in theirs:  # layers beyond those of config.json would have been computed with
                    patterns.append(rf"^({re.escape(family.prefix)}\.)?{re.escape(theirs)}(\.weight|\.bias)?$")
    return [re.compile(pattern) for pattern in patterns]
