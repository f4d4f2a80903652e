"""A checkpoint's config.json, read key by key; unread keys are an error."""

from __future__ import annotations

import builtins
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from regard.files import read_json

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
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(f"{path} is a broken link; download it again")
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
        values = {key: value for key, value in self.values.items() if key not in ("num_labels", "_num_labels")}
        values["id2label"] = {builtins.str(number): name for number, name in numbered.items()}
        values["label2id"] = {name: number for number, name in numbered.items()}
        return Config(values, self.where)

    def explain(self, error: Exception) -> builtins.str:
        """An error's message with the file and the keys that hold the values that it mentions.

        >>> config = Config({"n_embd": 16, "n_head": 3})
        >>> sizes = config.int("n_embd"), config.int("n_head")
        >>> config.explain(ValueError("d_model 16 does not divide by 3 heads"))
        'config.json: d_model 16 does not divide by 3 heads (n_embd = 16, n_head = 3)'
        """
        message = str(error)
        if self.where in message:
            return message
        words = {word.rstrip(".") for word in re.findall(r"'[^']*'|[\w.+-]+", message)}
        keys = ", ".join(f"{key} = {value!r:.80}" for key, value in self._scalars_read() if repr(value) in words)
        return f"{self.where}: {message}" + (f" ({keys})" if keys else "")

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

    def _scalars_read(self) -> Iterator[tuple[builtins.str, Any]]:
        """The numbers and strings that were read, by key; those of sub-configs as "key.key"."""
        for key, value in self.values.items():
            if key in self._sub_configs:
                yield from ((f"{key}.{inner}", held) for inner, held in self._sub_configs[key]._scalars_read())
            elif key in self._read and type(value) in (int, float, str):
                yield key, value

    def _unknown(self, harmless: Iterable[builtins.str]) -> dict[builtins.str, Any]:
        known = HARMLESS | set(harmless)
        return {key: value for key, value in self.unused_keys().items() if key not in known}

    def _required(self, key: builtins.str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing")
        return value
