"""What a family of models provides: its config.json read key by key, weight-name templates and tasks; all families."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.checks import check_int
from regard.formats import read_json
from regard.nn.projections import Joined, JoinedTable

if TYPE_CHECKING:
    from regard.models.model import Model

MAX_INT = 2**31 - 1  # no size of a model comes near; more is a broken or a hostile file
MAX_FLOAT = sys.float_info.max
MAX_LAYERS = 2000  # each layer is built, if only on the meta device, before the weights are looked for
MAX_LABELS = 1_000_000  # each label gets a name before the weights are looked for

# Origin, training, initialisation, generation, and options of heads (which the heads read): none of these keys changes
# what a body computes in one forward pass.
HARMLESS = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels",
    "architectures", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "classifier_dropout_prob", "cross_attention_hidden_size",
    "decoder_start_token_id", "directionality", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "generation", "gradient_checkpointing", "id2label", "init_std",
    "initializer_factor", "initializer_range", "is_encoder_decoder", "label2id", "language", "length_penalty",
    "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores",
    "pad_token_id", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
}  # fmt: skip
OFF = {"pruned_heads": ({}, None), "is_decoder": (False, None), "add_cross_attention": (False, None)}
ATTRIBUTE_DEFAULTS: dict[str, Any] = {"is_encoder_decoder": False, "problem_type": None}


class Config:
    """The values of one config.json. It remembers which keys were read, so that unknown keys can be refused.

    Every getter raises ValueError, with the file and the key, for a missing key without a default and for a value of
    another type or out of range.

    Args:
        values: what the file holds.
        where: the file's name, for error messages.
    """

    def __init__(self, values: dict[str, Any], where: builtins.str = "config.json") -> None:
        self.values, self.where = values, where
        self._read: set[str] = set()
        self._sub_configs: dict[str, Config] = {}

    @classmethod
    def open(cls, directory: Path) -> Config:
        """Read directory/config.json, or that file. Raises FileNotFoundError without one, ValueError for other JSON."""
        path = directory if directory.is_file() else directory / "config.json"
        if not path.is_file():
            names = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
            listed = ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "nothing"
            raise FileNotFoundError(f"{directory} has no config.json, so no model; it has {listed}")
        values = read_json(path)
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return cls(values, str(path))

    # What training libraries (transformers.Trainer, accelerate, PEFT) read of `model.config`: keys as attributes.

    keys_to_ignore_at_inference: ClassVar = ["last_hidden_state", "pooler_output", "encoder_last_hidden_state"]

    def __getattr__(self, key: builtins.str) -> Any:
        if key in self.__dict__.get("values", {}):
            return self.values[key]
        if key in ATTRIBUTE_DEFAULTS:
            return ATTRIBUTE_DEFAULTS[key]
        raise AttributeError(f"config.json has no {key!r}")

    def to_dict(self) -> dict[builtins.str, Any]:
        """All values by key."""
        return dict(self.values)

    def to_json_string(self, use_diff: builtins.bool = True) -> builtins.str:
        """All values as JSON; `use_diff` is an argument of transformers' method and changes nothing."""
        return json.dumps(self.values, indent=2, sort_keys=True, default=builtins.str)

    def get_text_config(self, decoder: builtins.bool = False) -> Config:
        """The config itself: a model has one config here."""
        return self

    def __contains__(self, key: builtins.str) -> builtins.bool:
        return self.values.get(key) is not None

    def get(self, key: builtins.str, default: Any = None) -> Any:
        """The value as it is, or the default if the key is missing or null."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def sub_config(self, key: builtins.str) -> Config:
        """A nested object, for example of a vision tower; empty if the key is missing. `check_unused` covers it too."""
        if key not in self._sub_configs:
            values = self.get(key, {})
            if not isinstance(values, dict):
                raise ValueError(f"{self.where}: {key} must be an object, got {values!r:.80}")
            self._sub_configs[key] = Config(values, f"{self.where}, {key}")
        return self._sub_configs[key]

    def int(
        self,
        key: builtins.str,
        default: builtins.int | None = None,
        *,
        minimum: builtins.int = 1,
        maximum: builtins.int = MAX_INT,
    ) -> builtins.int:
        """An integer from `minimum` to `maximum`."""
        value = self._required(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise ValueError(f"{self.where}: {key} must be an integer from {minimum} to {maximum}, got {value!r:.80}")
        return value

    def ints(self, key: builtins.str, default: list[builtins.int] | None = None) -> list[builtins.int]:
        """A list of integers from 1, not empty."""
        value = self._required(key, default)
        if not isinstance(value, list) or not value or not all(type(n) is int and 1 <= n <= MAX_INT for n in value):
            raise ValueError(f"{self.where}: {key} must be a list of integers from 1, got {value!r:.80}")
        return value

    def pair(self, key: builtins.str, default: builtins.int | None = None) -> tuple[builtins.int, builtins.int]:
        """Height and width: one integer for both, or a list of two.

        >>> Config({"image_size": [480, 640]}).pair("image_size"), Config({"image_size": 224}).pair("image_size")
        ((480, 640), (224, 224))
        """
        value = self._required(key, default)
        both = value if isinstance(value, list) else [value, value]
        if len(both) != 2 or not all(type(n) is int and 1 <= n <= MAX_INT for n in both):
            raise ValueError(f"{self.where}: {key} must be an integer from 1 or two of them, got {value!r:.80}")
        return both[0], both[1]

    def layers(self, key: builtins.str, default: builtins.int | None = None) -> builtins.int:
        """A number of layers, at most 2,000."""
        value = self.int(key, default)
        if value > MAX_LAYERS:
            raise ValueError(f"{self.where}: {key} is {value}, and at most {MAX_LAYERS} layers are supported")
        return value

    def float(self, key: builtins.str, default: builtins.float | None = None) -> builtins.float:
        """A finite number."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not -MAX_FLOAT <= value <= MAX_FLOAT:  # false for NaN, too
            raise ValueError(f"{self.where}: {key} must be a finite number, got {value!r:.80}")
        return float(value)

    def eps(self, key: builtins.str, default: builtins.float | None = None) -> builtins.float:
        """The epsilon of a norm: a finite number, 0 or more."""
        value = self.float(key, default)
        if value < 0:
            raise ValueError(f"{self.where}: {key} must be 0 or more, got {value!r:.80}")
        return value

    def bool(self, key: builtins.str, default: builtins.bool) -> builtins.bool:
        """True or False."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, got {value!r:.80}")
        return value

    def str(self, key: builtins.str, default: builtins.str | None = None) -> builtins.str:
        """A string."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {key} must be a string, got {value!r:.80}")
        return value

    def tie_word_embeddings(self, default: builtins.bool = True) -> builtins.bool:
        """Does the language-model head share the weight of the token embedding?"""
        return self.bool("tie_word_embeddings", default)

    def only(self, key: builtins.str, *allowed: Any) -> None:
        """Raise ValueError unless the key has one of the allowed values; the first of them is its default."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise ValueError(f"{self.where}: {key} is {value!r:.80}, and only {wanted} is supported")

    def labels(self, count: builtins.int = 2) -> tuple[builtins.str, ...]:
        """The names of the classes, in order: from id2label, else LABEL_0, LABEL_1, … for num_labels.

        >>> Config({"id2label": {"1": "cat", "0": "dog"}}).labels()
        ('dog', 'cat')

        count: how many, if the file has neither. Raises ValueError if the numbers of id2label do not run from 0.
        """
        number, id2label = self.num_labels(count), self.get("id2label")
        if id2label is None:
            return tuple(f"LABEL_{i}" for i in range(number))
        names = {int(key): str(name) for key, name in id2label.items()}
        if sorted(names) != list(range(number)):
            numbers = ", ".join(str(key) for key in list(id2label)[:8]) + (", …" if number > 8 else "")
            raise ValueError(
                f"{self.where}: id2label has the numbers {numbers}, but the {number} outputs are numbered from 0 to "
                f'{number - 1}: correct the file, or set model.config.values["id2label"]'
            )
        return tuple(names[i] for i in range(number))

    def num_labels(self, count: builtins.int = 2) -> builtins.int:
        """The number of classes: the length of id2label, whatever its numbers, as in `transformers`; else num_labels.

        count: how many, if the file has neither.
        """
        id2label = self.get("id2label")
        if id2label is None:
            return self.int("num_labels", count, maximum=MAX_LABELS)
        if not isinstance(id2label, dict) or not all(str(key).isdecimal() for key in id2label):
            raise ValueError(f"{self.where}: id2label must map numbers to names, got {id2label!r:.80}")
        return len(id2label)

    def with_labels(self, names: Iterable[builtins.str]) -> Config:
        """A config with these labels in place of its own."""
        numbered = dict(enumerate(names))
        id2label = {builtins.str(number): name for number, name in numbered.items()}
        label2id = {name: number for number, name in numbered.items()}
        values = {key: value for key, value in self.values.items() if key not in ("num_labels", "_num_labels")}
        return Config(values | {"id2label": id2label, "label2id": label2id}, self.where)

    def unused_keys(self) -> dict[builtins.str, Any]:
        """The values that nothing has read."""
        return {key: value for key, value in self.values.items() if key not in self._read and value is not None}

    def check_unused(
        self, family: builtins.str, *, harmless: Iterable[builtins.str] = (), ignore: Iterable[builtins.str] = ()
    ) -> None:
        """Raise ValueError, with the list, if a key was not read and is neither harmless nor ignored.

        family: its title, for the message.  harmless: keys that change nothing in this family.  ignore: keys that the
        user declares harmless.
        """
        if isinstance(ignore, str):  # its letters would be taken for keys
            raise TypeError(f"ignore must be a list of keys, got a str: ignore=[{ignore!r}]")
        for key, allowed in OFF.items():
            if key not in self._read:
                self.only(key, *allowed)
        for sub_config in self._sub_configs.values():
            sub_config.check_unused(family, harmless=harmless, ignore=ignore)
        unknown = {key: value for key, value in self._unknown(harmless).items() if key not in set(ignore)}
        if unknown:
            listed = ", ".join(f"{key} = {value!r:.80}" for key, value in unknown.items())
            raise ValueError(
                f"{self.where} has keys that {family} does not know and that may change what it computes: {listed}. "
                f"If they do not, name them: regard.load(…, ignore={json.dumps(list(unknown))})"
            )

    def without_ignored(
        self, *, harmless: Iterable[builtins.str] = (), ignore: Iterable[builtins.str] = ()
    ) -> dict[builtins.str, Any]:
        """The values without the keys that `check_unused` accepts only because of `ignore`."""
        ignored = self._unknown(harmless).keys() & set(ignore)
        values = {key: value for key, value in self.values.items() if key not in ignored}
        for key, sub_config in self._sub_configs.items():
            if values.get(key) is not None:
                values[key] = sub_config.without_ignored(harmless=harmless, ignore=ignore)
        return values

    def _unknown(self, harmless: Iterable[builtins.str]) -> dict[builtins.str, Any]:
        known = HARMLESS | set(harmless)
        return {key: value for key, value in self.unused_keys().items() if key not in known}

    def _required(self, key: builtins.str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing")
        return value


# ------------------------------------------------------------------------------------------------ weight-name templates


Shape = tuple[int, ...]
Numbers = tuple[str, ...]


@dataclass(frozen=True)
class Unchanged:
    """One tensor, stored as we hold it."""

    name: str
    optional: bool = field(default=False, kw_only=True, repr=False)  # zero if the checkpoint does not have it

    def names(self, numbers: Numbers, leaf: str) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make one of ours."""
        return (_filled(self.name, numbers, leaf),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from the checkpoint's."""
        return parts[0]

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """The checkpoint's tensors from ours. rows: how many each has of a joined matrix."""
        return [ours]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of the checkpoint's tensors from the shape of ours."""
        if type(self) is Unchanged:  # most tensors: one on the meta device for each would be a tenth of loading
            return [ours]
        return [tuple(part.shape) for part in self.split(torch.empty(ours, device="meta"), rows)]


@dataclass(frozen=True)
class Transpose(Unchanged):
    """One matrix, stored (inputs, outputs) as in GPT-2. A bias is unchanged."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from the checkpoint's."""
        return parts[0].mT.contiguous() if parts[0].ndim == 2 else parts[0]

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """The checkpoint's tensors from ours."""
        return [self.join([ours])]

    def shapes(self, ours: Shape, rows: Sequence[int] | None) -> list[Shape]:
        """The shapes of the checkpoint's tensors from the shape of ours."""
        return [ours[::-1] if len(ours) == 2 else ours]


@dataclass(frozen=True)
class Squeeze(Unchanged):
    """One tensor, stored with leading axes of length 1: a class token as (1, 1, d), positions as (1, N, d)."""

    axes: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from the checkpoint's."""
        return parts[0].reshape(parts[0].shape[self.axes :])

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """The checkpoint's tensors from ours."""
        return [ours.reshape((1,) * self.axes + ours.shape)]


@dataclass(frozen=True, init=False)
class Concat(Unchanged):
    """Several tensors, concatenated along the rows: query, key and value in one matrix (`Joined`)."""

    parts: tuple[str, ...]

    def __init__(self, *parts: str) -> None:
        object.__setattr__(self, "name", parts[0])
        object.__setattr__(self, "parts", parts)

    def names(self, numbers: Numbers, leaf: str) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make one of ours."""
        return tuple(_filled(part, numbers, leaf) for part in self.parts)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from the checkpoint's."""
        return torch.cat(list(parts))

    def split(self, ours: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """The checkpoint's tensors from ours."""
        assert rows is not None, self.parts
        return [part.contiguous() for part in torch.split(ours, list(rows))]


Names = Mapping[str, str | Unchanged]
"""Templates: our name → the checkpoint's. A string stands for `Unchanged`; {i} and {j} are numbers of layers."""


def nested(names: Names, ours: str, theirs: str) -> dict[str, str | Unchanged]:
    """The templates of a part of a model: a prefix for our names and one for the checkpoint's.

    >>> names = {"blocks.{i}.norm": "layers.{i}.norm", "embed": Squeeze("cls", 2)}
    >>> nested(names, "vision.", "vision_model.")["vision.embed"]
    Squeeze(name='vision_model.cls', axes=2)
    """
    nested_names: dict[str, str | Unchanged] = {}
    for name, source in names.items():
        if isinstance(source, str):
            nested_names[ours + name] = theirs + source
        elif isinstance(source, Concat):
            nested_names[ours + name] = Concat(*(theirs + part for part in source.parts))
        else:
            nested_names[ours + name] = replace(source, name=theirs + source.name)
    return nested_names


def lookup(names: Names, parameter: str) -> tuple[Unchanged, Numbers, str]:
    """The source of one of our parameters, the numbers of its layers, and the leaf (".weight") to add to its names.

    Raises KeyError for a parameter that no template names: a family's file is incomplete.
    """
    numbers = tuple(part for part in parameter.split(".") if part.isdecimal())
    for count in range(len(numbers) + 1):
        name = parameter
        for letter, number in zip("ij", numbers[:count], strict=False):
            name = name.replace(f".{number}.", f".{{{letter}}}.", 1)
        module, _, leaf = name.rpartition(".")
        for key, ending in ((name, ""), (module, "." + leaf)):
            if key in names:
                source = names[key]
                return Unchanged(source) if isinstance(source, str) else source, numbers, ending
    raise KeyError(f"no template names {parameter}")


def _filled(name: str, numbers: Numbers, leaf: str) -> str:
    for letter, number in zip("ij", numbers, strict=False):
        name = name.replace(f"{{{letter}}}", number)
    return name + leaf


Heads = Mapping[str, Callable[[], nn.Module]]
"""By task: what builds its head. A task that is not there has none."""

# The tasks are named as transformers' pipelines are; where it has none, in plain words.
GENERATION_TASKS = ("text-generation", "text2text-generation", "image-text-to-text")
"""The tasks of models that `generate`."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One head of a family.

    Args:
        architecture: the class of `transformers` with this head, which config.json names.
        names: templates of the head's weights, from the root of the checkpoint.
        prefix: of the body's names beside this head; None for the family's prefix.
        unused: regular expressions of tensors that this task leaves out, such as the decoder of an encoder alone.
        copies: a tensor that a checkpoint may hold beside the shared one, or in its place → the shared one.
    """

    architecture: str
    names: Names = field(default_factory=dict)
    prefix: str | None = None
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models: how to build it from config.json, and where its weights are in a checkpoint.

    Args:
        title: for people.
        model_type: as in config.json.
        prefix: of the body's names in a checkpoint with a head; "" for none.
        build: config and task → the model, with uninitialised weights.
        names: templates of the body's weights, without the prefix; or config → templates.
        tasks: by name; the first has no head.
        ignored: regular expressions of tensors that hold nothing learnt, or the same numbers as a shared one.
        copies: as in `Task`, of the body.
        renamed: endings of names in old checkpoints → the names of now.
        moved: regular expressions of prefixes that other versions of `transformers` write → the prefix of now.
        harmless: keys of config.json that change nothing here.
        adjust: config and the names of the checkpoint's tensors → config, where those know better (T5's lm_head).
    """

    title: str
    model_type: str
    prefix: str
    build: Callable[[Config, str], Model]
    names: Names | Callable[[Config], Names]
    tasks: Mapping[str, Task]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    adjust: Callable[[Config, Collection[str]], Config] | None = None

    def names_of(self, config: Config) -> Names:
        """The templates of the body's weights."""
        return self.names(config) if callable(self.names) else self.names

    @property
    def bare_task(self) -> str:
        """The task without a head: the first one."""
        return next(iter(self.tasks))

    def prefix_of(self, task: str) -> str:
        """The prefix of the body's names in a checkpoint for this task, with its dot."""
        prefix = self.tasks[task].prefix
        prefix = self.prefix if prefix is None else prefix
        return prefix + "." if prefix and task != self.bare_task else ""

    def task_of(self, architectures: object) -> str:
        """The task whose architecture config.json names; the one without a head if it names none.

        Raises ValueError for an architecture that the family does not have.
        """
        if not isinstance(architectures, list) or not architectures:
            return self.bare_task
        for name, task in self.tasks.items():
            if task.architecture == architectures[0]:
                return name
        known = ", ".join(task.architecture for task in self.tasks.values())
        raise ValueError(
            f"the checkpoint is a {architectures[0]}, and {self.title} is supported as {known}. "
            f"Name the task to read it as: regard.load(…, task={self.bare_task!r}) reads the body without a head"
        )


FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.rand, torch.randn}


def empty(family: Family, config: Config, task: str) -> Model:
    """A model on the meta device: shapes without memory. Raises ValueError for sizes that do not fit each other."""
    try:
        with _MetaShapes():
            model = family.build(config, task)
    except ValueError as error:  # of a layer, whose message names neither the file nor its keys
        raise ValueError(str(error) if config.where in str(error) else f"{config.where}: {error}") from None
    except RuntimeError as error:  # torch counts bytes in 64 bits
        raise ValueError(f"{config.where} asks for sizes that no tensor can have: {error}") from None
    model.family, model.task = family, task
    return model


class _MetaShapes(TorchFunctionMode):
    """Factories make tensors on the meta device, and in-place calls do nothing.

    `torch.device("meta")` would draw initial values, which imports torch's decompositions: seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            return func(*args, **{**kwargs, "device": kwargs.get("device") or "meta"})
        in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
        if not in_place:
            return func(*args, **kwargs)
        return args[0] if args else kwargs["tensor"]


class WeightPlace(NamedTuple):
    """One parameter of a model, and where it is in a checkpoint."""

    name: str
    source: Unchanged  # how it is made of the checkpoint's tensors
    theirs: tuple[str, ...]  # their names
    owner: nn.Module  # the module of the parameter
    shape: Shape

    @property
    def rows(self) -> tuple[int, ...] | None:
        """How many rows each tensor has, if there are several."""
        return self.owner.rows if isinstance(self.owner, (Joined, JoinedTable)) else None

    def put(self, tensor: Tensor) -> None:
        """Make a tensor the parameter."""
        leaf = self.name.rpartition(".")[2]
        wants_gradient = getattr(self.owner, leaf).requires_grad
        setattr(self.owner, leaf, nn.Parameter(tensor, requires_grad=wants_gradient))


def places(model: Model, prefix: str) -> Iterator[WeightPlace]:
    """Each parameter of a model, and where it is in a checkpoint with this prefix of the body's names."""
    body, head = model.family.names_of(model.config), model.family.tasks[model.task].names
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        inside = name.startswith("head.")
        source, numbers, leaf = lookup(head if inside else body, name)
        theirs = source.names(numbers, leaf)
        theirs = theirs if inside else tuple(prefix + part for part in theirs)
        place = WeightPlace(name, source, theirs, owners[name.rpartition(".")[0]], tuple(parameter.shape))
        # A joined matrix may have fewer parts than its template has names: no words were added (Idefics).
        yield place if place.rows is None else place._replace(theirs=theirs[: len(place.rows)])


# --------------------------------------------------------------------------------------------------------- all families


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what a model computes in

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
    "dinov2": "vit",
    "dinov2_with_registers": "vit",
    "distilbert": "distilbert",
    "electra": "electra",
    "gpt2": "gpt2",
    "idefics": "idefics",
    "llama": "llama",
    "llava": "llava",
    "longformer": "roberta",
    "marian": "bart",
    "roberta": "roberta",
    "swin": "swin",
    "t5": "t5",
    "transformer": "transformer",
    "vit": "vit",
    "xlm-roberta": "roberta",
}
"""model_type of config.json → the file in families/ that holds its `Family`."""


def family_of(config: Config) -> Family:
    """The family that config.json names. Raises ValueError with those there are."""
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


# ------------------------------------------------------------------------------------------------- labels of a new head


# Tasks whose number of labels is in config.json.
LABELLED = ("text-classification", "image-classification", "image-classification-cls", "token-classification")


def named_labels(labels: Sequence[str] | None, num_labels: int | None) -> tuple[str, ...] | None:
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


def check_task(family: Family, task: str, num_labels: int | None) -> None:
    """Raise ValueError for a task that a family lacks, and for labels where it has none (question answering has 2)."""
    if task not in family.tasks:
        raise ValueError(f"{family.title} has no task {task!r}; it has {', '.join(family.tasks)}")
    if num_labels is not None and task not in LABELLED and (task, num_labels) != ("question-answering", 2):
        raise ValueError(
            f"task {task!r} has no head with {num_labels} labels; those with labels are {', '.join(LABELLED)}, and "
            "question-answering with 2, start and end"
        )
