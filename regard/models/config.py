"""A checkpoint's config.json, read key by key; unread keys are an error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from regard.parsing import read_json
from regard.rotary import DynamicNTK, LinearScaling, Llama3, LongRope, Rotary, Scaling, Yarn

MOST = 2**31 - 1  # no size of a model comes near; more is a broken or a hostile file
MOST_LAYERS = 2000
LARGEST = sys.float_info.max
MOST_LABELS = 1_000_000  # each has a name, made before the weights are looked for

# Keys that say where a model comes from, how it is trained or started, how text is generated, or what a head is like
# (the heads read those): none of them changes what a body computes in one forward pass.
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


class Settings:
    """The values of one config.json, and which of them have been read."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values, self.where = values, where
        self._read: set[str] = set()
        self._inner: dict[str, Settings] = {}

    @classmethod
    def open(cls, directory: Path) -> Settings:
        """Read directory/config.json. Raises FileNotFoundError if there is none, ValueError if it is no JSON object."""
        path = directory / "config.json"
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(f"{path} is a link to nothing; download it again")
        if not path.is_file():
            raise FileNotFoundError(f"{directory} holds no config.json, so no model: it holds {_contents(directory)}")
        values = read_json(path)
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds {type(values).__name__}, not a JSON object of settings")
        return cls(values, str(path))

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, or the default where the key is missing or null."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def inner(self, key: str) -> Settings:
        """The settings of a part, one object in another, as of a picture's tower; none where there is no such part.

        >>> Settings({"vision_config": {"hidden_size": 12}}).inner("vision_config").whole("hidden_size")
        12

        `finish` of the whole finishes them, too. Raises ValueError for a value that is no object.
        """
        if key not in self._inner:
            values = self.get(key, {})
            if not isinstance(values, dict):
                raise ValueError(f"{self.where}: {key} must be an object of settings, got {values!r:.80}")
            self._inner[key] = Settings(values, f"{self.where}, {key}")
        return self._inner[key]

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`. Raises ValueError if it is missing without a default, or none."""
        value = self._needed(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{self.where}: {key} must be a whole number from {least} to {most}, got {value!r:.80}")
        return value

    def pair(self, key: str, default: int | None = None) -> tuple[int, int]:
        """Height and width: a whole number for both, or a list of the two. Raises ValueError for anything else.

        >>> Settings({"image_size": [480, 640]}).pair("image_size"), Settings({"image_size": 224}).pair("image_size")
        ((480, 640), (224, 224))
        """
        value = self._needed(key, default)
        both = value if isinstance(value, list) else [value, value]
        if len(both) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= MOST for n in both):
            raise ValueError(f"{self.where}: {key} must be a whole number from 1, or two of them, got {value!r:.80}")
        return both[0], both[1]

    def wholes(self, key: str, default: list[int] | None = None) -> list[int]:
        """A list of whole numbers from 1, at least one. Raises ValueError if it is missing without a default, or none.

        >>> Settings({"depths": [2, 2, 6, 2]}).wholes("depths")
        [2, 2, 6, 2]
        """
        value = self._needed(key, default)
        if not isinstance(value, list) or not value or not all(type(n) is int and 1 <= n <= MOST for n in value):
            raise ValueError(f"{self.where}: {key} must be a list of whole numbers from 1, got {value!r:.80}")
        return value

    def layers(self, key: str, default: int | None = None) -> int:
        """How many blocks: each is made, if only in name, before the weights are looked for."""
        value = self.whole(key, default)
        if value > MOST_LAYERS:
            raise ValueError(f"{self.where}: {key} is {value}, and no model has more than {MOST_LAYERS} layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises ValueError if it is missing without a default, or none."""
        value = self._needed(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -LARGEST <= value <= LARGEST:
            raise ValueError(f"{self.where}: {key} must be a number, got {value!r:.80}")  # NaN and Infinity are none
        return float(value)

    def eps(self, key: str, default: float | None = None) -> float:
        """What a norm adds before it divides: a finite number, 0 or more. Raises ValueError for anything else.

        >>> Settings({"layer_norm_eps": 1e-12}).eps("layer_norm_eps")
        1e-12
        """
        value = self.number(key, default)
        if value < 0:
            raise ValueError(f"{self.where}: {key} must be 0 or more, since a norm takes its root; got {value!r:.80}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self._needed(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, got {value!r:.80}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._needed(key, default)
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {key} must be a string, got {value!r:.80}")
        return value

    def tied(self, default: bool = True) -> bool:
        """Are words scored with the table that embeds them?"""
        return self.flag("tie_word_embeddings", default)

    def only(self, key: str, *allowed: Any) -> None:
        """Accept a key whose other values would change the maths; the first allowed one is the default.

        >>> Settings({"position_embedding_type": "relative_key"}).only("position_embedding_type", "absolute")
        Traceback (most recent call last):
            ...
        ValueError: config.json: position_embedding_type is 'relative_key', and only 'absolute' is supported
        """
        value = self.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise ValueError(f"{self.where}: {key} is {value!r:.80}, and only {wanted} is supported")

    def labels(self, count: int = 2) -> tuple[str, ...]:
        """The names of the classes, in order: from id2label, else LABEL_0 and so on for num_labels.

        >>> Settings({"id2label": {"1": "cat", "0": "dog"}}).labels()
        ('dog', 'cat')

        count: how many, where neither is given. Raises ValueError for labels whose numbers do not count from 0, so that
        nobody can tell what some outputs are called, and as `label_count`.
        """
        number, named = self.label_count(count), self.get("id2label")
        if named is None:
            return tuple(f"LABEL_{i}" for i in range(number))
        found = {int(key): str(name) for key, name in named.items()}
        if sorted(found) != list(range(number)):
            numbers = ", ".join(str(key) for key in list(named)[:8]) + (", …" if number > 8 else "")
            raise ValueError(
                f"{self.where}: id2label names the numbers {numbers}, and {number} outputs are numbered from 0 to "
                f"{number - 1}, so some name would be wrong: correct it in the file, or write the right names to "
                'model.settings.values["id2label"]'
            )
        return tuple(found[i] for i in range(number))

    def label_count(self, count: int = 2) -> int:
        """How many classes there are: as many as id2label names, whatever their numbers, as in `transformers`.

        >>> Settings({"id2label": {"1": "cat", "2": "dog", "3": "hat"}}).label_count()
        3

        count: how many, where neither id2label nor num_labels is given.
        Raises ValueError for labels that have no numbers, or are too many.
        """
        named = self.get("id2label")
        if named is None:
            return self.whole("num_labels", count, most=MOST_LABELS)
        if not isinstance(named, dict) or not all(str(key).isdecimal() for key in named):
            raise ValueError(f"{self.where}: id2label must give a name for each number, got {named!r:.80}")
        return len(named)

    def naming(self, error: Exception) -> str:
        """What went wrong with these values, with the file, and the keys that hold what the message names.

        >>> settings = Settings({"n_embd": 16, "n_head": 3})
        >>> sizes = settings.whole("n_embd"), settings.whole("n_head")
        >>> settings.naming(ValueError("d_model 16 does not divide by 3 heads"))
        'config.json: d_model 16 does not divide by 3 heads (n_embd = 16, n_head = 3)'
        """
        said = str(error)
        if self.where in said:
            return said
        words = {word.rstrip(".") for word in re.findall(r"'[^']*'|[\w.+-]+", said)}
        keys = ", ".join(f"{key} = {value!r:.80}" for key, value in self._values_read() if repr(value) in words)
        return f"{self.where}: {said}" + (f" ({keys})" if keys else "")

    def _values_read(self) -> Iterator[tuple[str, Any]]:
        """Numbers and strings that have been read, by key; of a part's settings, with its name before them."""
        for key, value in self.values.items():
            if key in self._inner:
                yield from ((f"{key}.{inside}", held) for inside, held in self._inner[key]._values_read())
            elif key in self._read and type(value) in (int, float, str):
                yield key, value

    def unread(self) -> dict[str, Any]:
        """What is given and nobody has read."""
        return {key: value for key, value in self.values.items() if key not in self._read and value is not None}

    def finish(self, family: str, *, harmless: Iterable[str] = (), ignore: Iterable[str] = ()) -> None:
        """Refuse what nobody has read. Raises ValueError with the keys and their values.

        harmless: keys that the family knows to change nothing.  ignore: keys that the user says change nothing.
        """
        if isinstance(ignore, str):  # whose letters would be taken for keys
            raise TypeError(f"ignore must be a list of keys, got a str: ignore=[{ignore!r}]")
        for key, allowed in OFF.items():
            if key not in self._read:
                self.only(key, *allowed)
        for inner in self._inner.values():
            inner.finish(family, harmless=harmless, ignore=ignore)
        unread = {key: value for key, value in self._strange(harmless).items() if key not in set(ignore)}
        if unread:
            said = ", ".join(f"{key} = {value!r:.80}" for key, value in unread.items())
            raise ValueError(
                f"{self.where} has keys that {family} does not know, and that may change what it computes: {said}. "
                f"If they do not, name them: regard.load(…, ignore={json.dumps(list(unread))})"
            )

    def without_ignored(self, *, harmless: Iterable[str] = (), ignore: Iterable[str] = ()) -> dict[str, Any]:
        """The values, and those of the parts, without what `finish` lets pass only because it is told to ignore it.

        >>> settings = Settings({"hidden_size": 12, "use_rotary": False})
        >>> _ = settings.whole("hidden_size")
        >>> settings.without_ignored(ignore=["use_rotary", "hidden_size"])
        {'hidden_size': 12}
        """
        passed = self._strange(harmless).keys() & set(ignore)
        values = {key: value for key, value in self.values.items() if key not in passed}
        for key, part in self._inner.items():
            if values.get(key) is not None:
                values[key] = part.without_ignored(harmless=harmless, ignore=ignore)
        return values

    def _strange(self, harmless: Iterable[str]) -> dict[str, Any]:
        """What nobody has read, and what is not known to change nothing."""
        known = HARMLESS | set(harmless)
        return {key: value for key, value in self.unread().items() if key not in known}

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing")
        return value


def _contents(directory: Path) -> str:
    names = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    return ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "nothing"


ORIGINAL = "original_max_position_embeddings"


def rotary(settings: Settings, dim: int, *, most: int) -> Rotary:
    """The rotary positions that config.json describes.

    >>> llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    >>> rotary(Settings({"rope_parameters": llama3}), 8, most=8192).scaling
    Llama3(factor=8.0, low=1.0, high=4.0, original=8192)

    dim: size of a head.  most: max_position_embeddings.
    Raises ValueError for an unknown kind, unknown keys, and numbers that are missing, useless or contradict each other.
    """
    inside = _inside(settings)
    kind = _kind(inside)
    if kind not in SCALINGS:
        raise ValueError(f"{inside.where}: rope_type is {kind!r}, and only {', '.join(SCALINGS)} are supported")
    for place in (settings, inside):  # no family here turns a part of its heads
        place.only("partial_rotary_factor", 1.0)
    base = _place("rope_theta", inside, settings).number("rope_theta", 10000.0)
    try:
        made = Rotary(dim, base=base, scaling=SCALINGS[kind](inside, settings, most))
    except ValueError as error:
        said = str(error)
        raise ValueError(said if settings.where in said else f"{inside.where}: {said}") from None
    left = inside.unread()
    if left:
        raise ValueError(f"{inside.where} has keys that rope_type {kind!r} does not know: {', '.join(sorted(left))}")
    return made


def reach(rotary: Rotary, most: int) -> int:
    """How many positions a model is made for: max_position_embeddings, or as far as its scaling stretches that.

    >>> reach(Rotary(8, scaling=LinearScaling(4.0)), 4096)
    16384

    most: max_position_embeddings. With `LinearScaling` and `DynamicNTK` it is the length before stretching, with
    `Llama3` and `LongRope` the length after; with `Yarn` checkpoints have either.
    """
    scaling = rotary.scaling
    if isinstance(scaling, (LinearScaling, DynamicNTK)):
        return max(most, int(scaling.factor * most))
    return max(most, int(scaling.factor * scaling.original)) if isinstance(scaling, Yarn) else most


# ------------------------------------------------------------------------------------------------------- the scalings


def _linear(inside: Settings, settings: Settings, most: int) -> Scaling:
    return LinearScaling(inside.number("factor"))


def _dynamic(inside: Settings, settings: Settings, most: int) -> Scaling:
    return DynamicNTK(inside.number("factor"), original=most)


def _llama3(inside: Settings, settings: Settings, most: int) -> Scaling:
    low, high = inside.number("low_freq_factor"), inside.number("high_freq_factor")
    return Llama3(inside.number("factor"), low=low, high=high, original=_original(inside, settings, most))


def _yarn(inside: Settings, settings: Settings, most: int) -> Scaling:
    original = _original(inside, settings, most)
    given = _maybe(inside, "attention_factor")
    mscale, all_dim = _maybe(inside, "mscale"), _maybe(inside, "mscale_all_dim")
    both = given is None and bool(mscale) and bool(all_dim)  # transformers passes over one alone, and 0
    return Yarn(
        inside.number("factor", most / original),
        original=original,
        beta_fast=_maybe(inside, "beta_fast") or 32.0,
        beta_slow=_maybe(inside, "beta_slow") or 1.0,
        attention_factor=given,
        mscale=mscale if both else None,
        mscale_all_dim=all_dim if both else None,
        truncate=inside.flag("truncate", True),
    )


def _longrope(inside: Settings, settings: Settings, most: int) -> Scaling:
    original = _original(inside, settings, most)
    given, factor = _maybe(inside, "attention_factor"), inside.number("factor", most / original)
    return LongRope(
        short=_numbers(inside, "short_factor"),
        long=_numbers(inside, "long_factor"),
        original=original,
        factor=factor if given is None else None,
        attention_factor=given,
    )


SCALINGS: dict[str, Callable[[Settings, Settings, int], Scaling | None]] = {
    "default": lambda inside, settings, most: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
"""By the rope_type of transformers."""


# ------------------------------------------------------------------------------------------------------------- reading


def _inside(settings: Settings) -> Settings:
    """The object of rotary settings, under its old name or its new one; empty where there is none."""
    both = {key: settings.get(key) for key in ("rope_scaling", "rope_parameters") if key in settings}
    if len(both) > 1 and both["rope_scaling"] != both["rope_parameters"]:
        raise ValueError(f"{settings.where} has rope_scaling and rope_parameters, and they differ: leave one")
    for key, given in both.items():
        if not isinstance(given, dict):
            raise ValueError(f"{settings.where}: {key} must be an object of settings, got {given!r}")
        return Settings(given, f"{settings.where}, {key}")
    return Settings({}, settings.where)


def _kind(inside: Settings) -> str:
    """The kind of scaling, under the new name of its key or the old one."""
    new, old = inside.get("rope_type"), inside.get("type")
    if new is not None and old is not None and new != old:
        raise ValueError(f"{inside.where}: rope_type is {new!r} and type is {old!r}: leave one")
    return inside.text("type" if new is None else "rope_type", "default")


def _place(key: str, inside: Settings, settings: Settings) -> Settings:
    """Where the key stands: in the object, or beside it. Raises ValueError where both have it and differ."""
    near, far = inside.get(key), settings.get(key)
    if near is not None and far is not None and near != far:
        raise ValueError(f"{inside.where}: {key} is {near!r} here and {far!r} outside: leave one")
    return inside if near is not None else settings


def _original(inside: Settings, settings: Settings, most: int) -> int:
    """The length trained on before the scaling."""
    return _place(ORIGINAL, inside, settings).whole(ORIGINAL, most)


def _maybe(inside: Settings, key: str) -> float | None:
    return inside.number(key) if key in inside else None


def _numbers(inside: Settings, key: str) -> list[float]:
    given = inside.get(key)
    if not isinstance(given, list) or any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in given):
        raise ValueError(f"{inside.where}: {key} must be a list of numbers, got {given!r}")
    return given
