"""`regard.load`: the directory of a model, its safetensors checked and read, and a model filled with them."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.checks import listed
from regard.files import recover
from regard.formats import Entry, TensorFile, TensorFileError, read_json, read_optional_json
from regard.models.family import (
    DTYPES,
    LABELLED,
    Config,
    WeightPlace,
    check_task,
    empty,
    family_of,
    named_labels,
    places,
)
from regard.models.initialization import initialize
from regard.models.model import Model
from regard.models.saving import IMAGES, INDEX, POOLING, SINGLE, TOKENIZER

HEADS = ("head.", "pooler.", "text_pooler.", "vision_pooler.")  # what fine-tuning may begin anew

Progress = Callable[[int, int], None]
"""Called after each tensor with the bytes read and the bytes in all."""

WANTED = ["config.json", "generation_config.json", SINGLE, INDEX, "*-of-*.safetensors", *TOKENIZER, *POOLING, *IMAGES]
UNWANTED = ["*/*.safetensors", "consolidated*"]  # other parts' weights, and the same weights once more

ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
LONGEST_ID = 96  # letters, the hub's own limit

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "random_states", "scaler")  # a trainer's pickles
AGAIN = "download or copy it again"
WITH_NETWORK = "load it again with a network"


class CheckpointError(ValueError):
    """Weights that are damaged, cut short, at odds with what they say of themselves, or of a kind that is refused."""


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
    names = named_labels(labels, num_labels)
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
    check_task(family, task, None if names is None else len(names))
    if names is not None:
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


# -------------------------------------------------------------------------------------------------------------- finding


def find(path_or_id: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The directory of a model. Of a hub model only the files that regard reads are downloaded, never pickles or code.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     find(folder) == Path(folder)
    True

    With HF_HUB_OFFLINE=1, or if the hub cannot be reached, the model comes from the cache of `huggingface_hub` if it
    is complete there.

    Args:
        path_or_id: a directory, or a hub id, "name" or "owner/name". An existing directory wins; what starts with a
            dot, a slash or a tilde, and a `Path`, is never looked up on the hub.
        revision: a branch, tag or commit of the hub; None for its main branch.

    Raises:
        FileNotFoundError: there is no such directory or model.
        NotADirectoryError: the path is a file.
        PermissionError: the model is gated.
        ConnectionError: the hub fails.
        ValueError: neither a path nor an id.
        CheckpointError: weights that are refused.
        ImportError: `huggingface_hub` is not installed.
    """
    name = os.fspath(path_or_id)
    if not name:
        raise ValueError("got an empty name; give a model's directory, or its id on the hub, as 'owner/name'")
    path = Path(os.path.expanduser(name))
    if not os.path.isdir(path):
        recover(path)  # from a save that was killed where a directory cannot be replaced in one step
    if os.path.isdir(path):
        if revision is not None:
            raise ValueError(f"{name!r} is a directory: revision {revision!r} is for models of the hub; leave it out")
        return path
    if os.path.exists(path):
        raise NotADirectoryError(f"{name!r} is a file; give its directory, {str(path.parent)!r}")
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name
    if not isinstance(path_or_id, str) or is_path or (name.count("/") > 1 and "://" not in name):
        raise FileNotFoundError(f"there is no directory {name!r}; a model of the hub is called 'name' or 'owner/name'")
    folder = _download(name, revision)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{name!r} has no config.json in {str(folder)!r}; {WITH_NETWORK}, or give another model"
        )
    try:
        weight_files(folder)
    except FileNotFoundError as error:
        call = conversion(folder, repr(name))
        pickled = f"; if the hub has only a pickle, which can run any code, convert it with transformers: {call}"
        known = any((folder / file).is_symlink() or (folder / file).is_file() for file in (SINGLE, INDEX))
        message = f"{name!r} is not complete: {error}; {WITH_NETWORK}{'' if known else pickled}"
        raise FileNotFoundError(message) from None
    return folder


def _download(name: str, revision: str | None) -> Path:
    dots = "--" in name or ".." in name or name.endswith((".", "-", ".git")) or "./" in name or "-/" in name
    if not ID.fullmatch(name) or dots or len(name) > LONGEST_ID:
        rules = f"'name' or 'owner/name' of letters, digits, '-', '_' and '.', at most {LONGEST_ID} long"
        raise ValueError(f"{reprlib.repr(name)} is neither a directory nor an id of the hub, which is {rules}")
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        wanted = f"{name!r} is no directory here, and looking on the hub needs huggingface_hub"
        raise ImportError(f"{wanted}: pip install 'regard[models]'") from error
    of = f"{name!r}" + (f" at revision {revision!r}" if revision is not None else "")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except errors.GatedRepoError as error:
        ask = f"ask for access at https://huggingface.co/{name}, then log in with: hf auth login"
        raise PermissionError(f"{of} is gated; {ask}") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"the hub has the model {name!r}, but no revision {revision!r} of it") from error
    except errors.RepositoryNotFoundError as error:
        private = "check the spelling; if it is private, log in with: hf auth login"
        raise FileNotFoundError(f"{name!r} is no directory here and no model of the hub; {private}") from error
    except errors.LocalEntryNotFoundError as error:
        todo = "with a network (and without HF_HUB_OFFLINE) it would be downloaded; or give a directory's path"
        raise FileNotFoundError(f"{of} is neither a directory nor complete in the hub's cache here; {todo}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the client's own: any failure of the connection
        raise ConnectionError(f"the hub did not give {of}: {error}; try again later") from error


def conversion(directory: Path, source: str = "directory") -> str:
    """The call that converts a pickled checkpoint with transformers, and what else has to be copied.

    directory: where config.json is, if there is one.  source: what is converted, as it stands in the call.
    """
    name, of = "C", ", C being the class that config.json names as architectures (AutoModel would leave out its head)"
    try:
        match (read_optional_json(directory, "config.json", dict) or {}).get("architectures"):
            case [str(first), *_] if first.isidentifier():  # it comes from strangers, and becomes part of a call
                name, of = first, ""
    except (OSError, ValueError):
        pass  # loading says why
    return (
        f"{name}.from_pretrained({source}).save_pretrained(new_directory){of}; copy the files of tokenizer and "
        "preprocessor there, too (or save them there with AutoTokenizer and AutoProcessor)"
    )


# ------------------------------------------------------------------------------------------------- a checkpoint's files


class Checkpoint:
    """The safetensors of a directory, checked before any weight is read.

    >>> import tempfile
    >>> from regard.models.saving import write_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(folder, {"weight": torch.ones(2, 3, dtype=torch.bfloat16), "steps": torch.tensor(7)})
    ...     checkpoint = Checkpoint.open(folder)
    ...     checkpoint
    ...     checkpoint.entries["weight"].shape
    ...     checkpoint.read("weight", dtype=torch.float32)
    Checkpoint(2 tensors, 20 bytes, files: model.safetensors)
    (2, 3)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])

    entries: an `Entry` by tensor name, in the files' order.  nbytes: of all tensors in the files.
    """

    def __init__(self, files: Iterable[TensorFile]) -> None:
        entries: dict[str, Entry] = {}
        self._files: dict[Path, TensorFile] = {}
        for file in files:
            for entry in file.entries.values():
                if entry.name in entries:
                    both = f"{str(entries[entry.name].file)!r} and {entry.file.name!r}"
                    raise CheckpointError(f"tensor {entry.name!r} is in both {both}; {AGAIN}")
                entries[entry.name] = entry
                self._files[entry.file] = file
        self.entries = entries
        self.nbytes = sum(entry.nbytes for entry in entries.values())

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Check a directory's safetensors and map them into memory; no weight is read.

        Args:
            directory: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names. If both
                exist the first is taken, as `transformers` does.

        Raises:
            FileNotFoundError: there are no such files.
            CheckpointError: weights that are only pickled, files that are damaged or contradict their index.
        """
        files, shards = weight_files(Path(directory))
        checkpoint = cls(map(open_weights, files))
        if shards is None:
            return checkpoint
        path = str(Path(directory) / INDEX)
        stored = {name: entry.file.name for name, entry in checkpoint.entries.items()}
        if lacking := [f"{name!r} ({file})" for name, file in shards.items() if stored.get(name) != file]:
            raise CheckpointError(f"{path!r} names tensors that are not in those files: {listed(lacking)}; {AGAIN}")
        if extra := [f"{name!r} ({file})" for name, file in stored.items() if name not in shards]:
            raise CheckpointError(f"{path!r} does not name tensors that its files hold: {listed(extra)}; {AGAIN}")
        return checkpoint

    def read(self, name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, straight from the file to the device.

        On the CPU, in the file's own dtype, nothing is copied: the tensor is a private view of the file, loaded as it
        is used. Changing it does not change the file, and replacing the file (as `save` does) does not change it; a
        program that overwrites the file in place (cp, scp) does. Read twice, it is the same memory.

        dtype: what floating tensors become, on the device; others keep theirs.
        """
        assert dtype is None or dtype.is_floating_point, dtype
        tensor = self._files[self.entries[name].file].view(name).to(device)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def __repr__(self) -> str:
        files = listed([file.name for file in self._files])
        return f"Checkpoint({len(self.entries)} tensors, {self.nbytes:,} bytes, files: {files})"


def open_weights(path: Path) -> TensorFile:
    """Open one file of weights. Raises OSError, or CheckpointError for a damaged file."""
    try:
        return TensorFile(path)
    except TensorFileError as error:
        why = str(error)
        with path.open("rb") as file:
            if file.read(32).startswith(b"version https://git-lfs"):
                why = "it is a Git LFS pointer, not the weights; fetch them with: git lfs pull"
        raise CheckpointError(f"cannot read {str(path)!r}: {why}; {AGAIN}") from None


def weight_files(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a directory's weights, of which none is opened; if they are shards, also the file of each tensor.

    Raises as `Checkpoint.open` does.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], None
    if (directory / INDEX).is_file():
        shards = _read_index(directory / INDEX)
        names = sorted(set(shards.values()))
        if missing := [name for name in names if not (directory / name).is_file()]:
            of = f"{len(missing)} of the {len(names)} files that {INDEX} names"
            raise FileNotFoundError(f"{str(directory)!r} lacks {of}: {listed(missing)}; download or copy them too")
        return [directory / name for name in names], shards
    there = sorted(path.name + ("" if path.exists() else " (a link to nothing)") for path in directory.iterdir())
    pickles = [name for name in there if name.endswith(PICKLES) and not name.startswith(NO_WEIGHTS)]
    if pickles:
        raise CheckpointError(
            f"{str(directory)!r} has its weights only as pickles ({listed(pickles)}), and opening a pickle can run any "
            f"code; if you trust where it came from, convert it once with transformers: {conversion(directory)}"
        )
    holds = f"it holds {listed(there)}" if there else "it is empty"
    raise FileNotFoundError(f"no model in {str(directory)!r}: looked for {SINGLE} and {INDEX}; {holds}")


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor. An index comes from strangers: it may name plain files of its own directory only."""
    try:
        index = read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{error}; {AGAIN}") from None
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{str(path)!r} has no 'weight_map' that gives the file of each tensor; {AGAIN}")
    strange = {name for name in shards.values() if not name.endswith(".safetensors") or set(name) & set("/\\:\0")}
    if strange:
        listing = listed(sorted(map(repr, strange)))
        raise CheckpointError(f"{str(path)!r} names {listing}; a shard is a .safetensors file in the same directory")
    return shards


# ------------------------------------------------------------------------------------------------------ filling a model


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
                if model.task.endswith("classification"):
                    hint = (
                        f". A checkpoint without this head can be read as task={family.bare_task!r}, or trained with a "
                        "new one by num_labels=N (--num-labels N)"
                    )
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
