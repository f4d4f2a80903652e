"""Options of generation: the caller's over generation_config.json, and what they do to logits (filters, sampling)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from math import inf, isfinite
from typing import Any, Literal, cast

import torch
from torch import Tensor

from regard import checks

NEUTRAL: Mapping[str, object] = {
    "begin_suppress_tokens": None, "diversity_penalty": 0.0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "max_time": None, "num_beam_groups": 1,
    "num_return_sequences": 1, "penalty_alpha": None, "remove_invalid_values": False, "renormalize_logits": False,
    "sequence_bias": None, "token_healing": False, "top_h": None, "typical_p": 1.0, "watermarking_config": None,
}  # fmt: skip
"""Keys that change the text and are not supported, with the value at which they change nothing."""
HARMLESS = frozenset([
    "_commit_hash", "_from_model_config", "_original_object_hash", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "cache_config",
    "cache_implementation", "compile_config", "disable_compile", "is_assistant", "low_memory", "max_cache_len",
    "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "return_dict_in_generate", "return_legacy_cache", "speculation_type", "target_lookbehind",
    "transformers_version", "use_cache", "use_mtp",
])  # fmt: skip
"""Keys that do not change the text."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
FIELD = {"eos_token_id": "eos_token_ids", "bad_words_ids": "suppress_tokens"}  # where a file's key is named otherwise
BLOCK = 256  # steps whose random numbers are drawn at once
MAX_NEW_TOKENS = 50  # where neither the caller nor the checkpoint sets a limit
MAX_FILE_BEAMS = 1000  # each beam takes a row of the batch; a caller may ask for more, a file may not
MAX_TOKEN = 2**31  # some files have −1 for none
TOP_K = 50  # what transformers samples among where a checkpoint samples and does not say


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How to generate. A field left at None takes the checkpoint's generation_config.json, then the default.

    >>> GenerationConfig(temperature=0.7, top_p=0.9).samples, GenerationConfig(num_beams=4).samples
    (True, False)

    Padding of the prompt is neither counted nor penalised, unlike in `transformers`, where it is both.

    Args:
        max_new_tokens: limit on new tokens; default 50, or fewer if the model has no more positions.
        max_length: limit on tokens with the prompt's; max_new_tokens overrules it.
        min_new_tokens: no end token before so many new tokens.
        min_length: no end token before so many tokens, the prompt's included.
        do_sample: draw tokens; by default if temperature is above 0, or top_k, top_p or min_p is set.
        temperature: logits are divided by it; 0 is greedy, above 0 samples; default 1 when sampling.
        top_k: sample among the k most likely tokens; 0 is off.
        top_p: sample among the most likely tokens that together reach this probability; 1 is off.
        min_p: sample among tokens at least min_p times as likely as the most likely; 0 is off.
        repetition_penalty: divides the logits of tokens that have occurred, prompt included; 1 is off.
        no_repeat_ngram_size: no n tokens occur twice in the same order, prompt included; 0 is off.
        suppress_tokens: tokens that are never chosen.
        forced_bos_token_id: the token after a prompt of one token, as a decoder's start token is.
        forced_eos_token_id: the token at the last place, if a row gets there.
        num_beams: beam width; 1 means no beam search.
        length_penalty: power of the length that divides a beam's score; above 0 favours long texts; default 1.
        early_stopping: True: end a row at its num_beams-th ended hypothesis. False: end when the best running beam, at
            its present length, cannot beat the worst ended one. "never": the same at the most favourable length.
        num_return_sequences: hypotheses returned for each row, best first.
        prompt_lookup_num_tokens: speculative decoding: so many tokens are read ahead at once, copied from where the
            last ones stood before. The text stays the same, but for rounding; passes of the model become fewer. 0 is
            off. Not read from generation_config.json.
        max_matching_ngram_size: with prompt_lookup_num_tokens, how many of the last tokens are looked up at most;
            default 2. Not read from generation_config.json either.
        stop_strings: stop as soon as one of these appears in the text.
        eos_token_ids: tokens that end a text; an int or several.
        pad_token_id: the token written after a row's end.
        bos_token_id: the token that stands for an empty prompt.
        decoder_start_token_id: the token that the decoder of an encoder-decoder begins with.
        seed: the same seed gives the same draws. The draw of row i at step t depends on seed, i and t alone (and on
            the kind of device). None takes a seed from torch's generator.
        ignore: keys of generation_config.json to ignore.
        sources: the file that each key was read from, for error messages.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a number out of its range.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    suppress_tokens: tuple[int, ...] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_return_sequences: int | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    stop_strings: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    decoder_start_token_id: int | None = None
    seed: int | None = None
    ignore: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        normalized = {
            "ignore": _keys(self.ignore),
            "stop_strings": read_stop(self.stop_strings),
            "eos_token_ids": None if self.eos_token_ids is None else read_eos(self.eos_token_ids),
            "suppress_tokens": None if self.suppress_tokens is None else tuple(self.suppress_tokens),
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)
        for name in ("max_new_tokens", "max_length", "num_beams", "num_return_sequences", "max_matching_ngram_size"):
            check_whole(name, getattr(self, name), 1)
        others = ("no_repeat_ngram_size", "prompt_lookup_num_tokens", "forced_bos_token_id", "forced_eos_token_id")
        for name in ("min_new_tokens", "min_length", "seed", *others):
            check_whole(name, getattr(self, name), 0)
        for token in self.suppress_tokens or ():
            check_whole("a token in suppress_tokens", token, 0)
        for name in ("repetition_penalty", "length_penalty"):
            _check_number(name, getattr(self, name))
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError(
                "repetition_penalty must be positive (1 changes nothing, above 1 discourages), "
                f"got {self.repetition_penalty}"
            )
        if self.num_return_sequences is not None and self.num_return_sequences > (self.num_beams or 1):
            raise ValueError(
                f"num_beams={self.num_beams or 1} gives at most as many sequences, "
                f"and num_return_sequences is {self.num_return_sequences}"
            )
        if self.early_stopping not in (None, True, False, "never"):
            raise ValueError(f"early_stopping is True, False or 'never', got {self.early_stopping!r}")
        if self.do_sample is not None and not isinstance(self.do_sample, bool):
            raise TypeError(f"do_sample must be true or false, got {self.do_sample!r:.60}")
        if self.do_sample is False:  # a file that does not sample may hold any value for these
            return
        for name in ("temperature", "top_p", "min_p"):
            _check_number(name, getattr(self, name))
        check_whole("top_k", self.top_k, 0)
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is a share of the largest probability, in [0, 1], got {self.min_p}")

    @classmethod
    def from_options(cls, config: GenerationConfig | None, options: Mapping[str, Any]) -> GenerationConfig:
        """A config with some fields changed. Raises TypeError for an option that is no field."""
        unknown = options.keys() - {each.name for each in fields(cls)}
        if unknown:
            raise TypeError(f"no such option of generation: {', '.join(sorted(unknown))}")
        return replace(config or cls(), **options)

    @classmethod
    def from_files(
        cls, generation: Mapping[str, Any] | None, config: Mapping[str, Any], *, ignore: Iterable[str] = ()
    ) -> GenerationConfig:
        """Read what a checkpoint sets.

        >>> GenerationConfig.from_files({"num_beams": 4, "max_length": 142, "eos_token_id": [2, 7]}, {}).num_beams
        4

        Args:
            generation: the values of generation_config.json, or None if there is no such file.
            config: the values of config.json. Next to a generation_config.json only its special tokens count.
            ignore: keys to leave out.

        Raises:
            ValueError: a value that cannot be used, or a key that changes the text and is not supported.
        """
        # 1. The values that count, and the file of each.
        ignored, file = _keys(ignore), "generation_config.json"
        if generation is None:
            file = "config.json"
            generation = {key: value for key, value in config.items() if key in READ or key in NEUTRAL}
        values = {key: value for key, value in generation.items() if value is not None and key not in ignored}
        sources = dict.fromkeys(values, file)
        for key in TOKENS:
            if key not in values and key not in ignored and config.get(key) is not None:
                values[key], sources[key] = config[key], "config.json"
        # 2. Keys that change the text and are not supported.
        unknown = {
            key: value
            for key, value in values.items()
            if key not in READ and key not in HARMLESS and value not in ([], {}, NEUTRAL.get(key))
        }
        if unknown:
            listed = ", ".join(f"{key} = {value!r:.60}" for key, value in unknown.items())
            raise ValueError(
                f"{file} sets {listed}, which changes the text and is not supported. "
                f"To go on without: ignore={json.dumps(list(unknown))}"
            )
        # 3. Fields of the same meaning.
        try:
            return cls(**_fields_of(values), sources=sources)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random."""
        if self.do_sample is False:
            return False
        if self.temperature is not None:
            return self.temperature > 0
        return bool(self.do_sample or self.top_k or self.top_p not in (None, 1) or self.min_p)

    def seeded(self) -> GenerationConfig:
        """The same with a seed, drawn now if there is none and tokens are drawn: several runs then share it."""
        return replace(self, seed=random_seed()) if self.samples and self.seed is None else self

    def over(self, checkpoint: GenerationConfig) -> GenerationConfig:
        """Fill the fields that are None with the checkpoint's values; its stop strings are added.

        The result samples if this config says so, or if it leaves the choice to a checkpoint that does. Raises
        ValueError for beams together with sampling, stop strings or look-up.
        """
        own = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        values = {**{each.name: getattr(checkpoint, each.name) for each in fields(self)}, **own}
        set_here = own.keys() - {"stop_strings"}
        sources = {key: file for key, file in checkpoint.sources.items() if FIELD.get(key, key) not in set_here}
        values["stop_strings"] = (*self.stop_strings, *checkpoint.stop_strings)
        if self.max_length is not None and self.max_new_tokens is None:
            values["max_new_tokens"] = None
        if self.samples or self.temperature is not None or self.do_sample is not None:
            values["do_sample"] = self.samples
            sources.pop("do_sample", None)
        else:
            values["do_sample"] = checkpoint.samples
        if not values["do_sample"]:
            values |= {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}
        elif values["temperature"] is None:
            values["temperature"] = 1.0
        merged = replace(self, **{**values, "sources": sources})
        merged.check_beams()
        return merged

    def check_beams(self) -> None:
        """Raise ValueError for beams with sampling, stop strings or look-up, naming the file that asks for them."""
        if (self.num_beams or 1) == 1:
            return
        if self.samples:
            raise ValueError(
                f"beam search with sampling is not supported{self._asked_by('num_beams', 'do_sample')}: "
                "pass num_beams=1, or temperature=0"
            )
        if self.stop_strings:
            remedy = 'ignore=["stop_strings"]' if "stop_strings" in self.sources else "leave out stop_strings"
            raise ValueError(
                f"beam search with stop strings is not supported{self._asked_by('num_beams', 'stop_strings')}: "
                f"pass num_beams=1, or {remedy}"
            )
        if self.prompt_lookup_num_tokens:
            raise ValueError(
                f"beam search with prompt look-up is not supported{self._asked_by('num_beams')}: pass num_beams=1, or "
                "leave out prompt_lookup_num_tokens"
            )

    def _asked_by(self, *keys: str) -> str:
        """Which file sets which of these keys, for an error; empty if none came from a file."""
        theirs = [key for key in keys if key in self.sources]
        files = dict.fromkeys(self.sources[key] for key in theirs)
        return f", and {' and '.join(files)} sets {', '.join(theirs)}" if theirs else ""

    def token_limit(self, prompt: int, max_positions: int | None) -> int:
        """How many new tokens at most. Default limits are clipped to the remaining positions.

        prompt: its number of tokens.  max_positions: of the decoder, or None. The last new token takes no position,
        since the model does not read it. Raises ValueError for more tokens than there are positions, or a prompt as
        long as max_length.
        """
        room = None if max_positions is None else max_positions - prompt + 1
        if self.max_new_tokens is not None and "max_new_tokens" not in self.sources:
            if room is not None and self.max_new_tokens > room:
                raise ValueError(
                    f"max_new_tokens={self.max_new_tokens} needs {prompt + self.max_new_tokens - 1} positions and the "
                    f"model has {max_positions}: at most {room} new tokens fit after a prompt of {prompt}"
                )
            return self.max_new_tokens
        limit = self.max_new_tokens
        if limit is None and self.max_length is not None:
            limit = self.max_length - prompt
            if limit <= 0:
                raise ValueError(
                    f"the prompt has {prompt} tokens, and max_length, which includes them, is {self.max_length}: "
                    "pass max_new_tokens, or shorten the prompt"
                )
        limit = MAX_NEW_TOKENS if limit is None else limit
        return limit if room is None else min(limit, room)

    def check_tokens(self, vocabulary: int) -> None:
        """Raise ValueError for end, suppressed or forced tokens that a model of so many tokens does not have."""
        named = {
            "eos_token_id": self.eos_token_ids or (),
            "forced_bos_token_id": (self.forced_bos_token_id,),
            "forced_eos_token_id": (self.forced_eos_token_id,),
        }
        suppressed = [key for key in ("bad_words_ids", "suppress_tokens") if key in self.sources] or ["suppress_tokens"]
        named |= dict.fromkeys(suppressed, self.suppress_tokens or ())
        for key, tokens in named.items():
            for token in tokens:
                if token is not None and token >= vocabulary:
                    file = f"{self.sources[key]}: " if key in self.sources else ""
                    remedy = f'. To go on without it: ignore=["{key}"]' if file else ""
                    raise ValueError(
                        f"{file}{key} has token {token}, and the model's tokens are 0 to {vocabulary - 1}{remedy}"
                    )
        endless = sorted(set(self.suppress_tokens or ()) & set(self.eos_token_ids or ()))
        if endless:
            raise ValueError(
                f"suppress_tokens has the eos token {endless[0]}: leave it out, or delay the end with min_new_tokens"
            )


READ = {each.name for each in fields(GenerationConfig)} | FIELD.keys()
READ -= {"eos_token_ids", "num_return_sequences", "seed", "ignore", "sources", *HARMLESS}
"""Keys of generation_config.json that are read."""


def _keys(ignore: object) -> tuple[str, ...]:
    if isinstance(ignore, str):  # whose letters would be taken for keys
        raise TypeError(f"ignore must be a list of keys, got a str: ignore=[{ignore!r:.80}]")
    return tuple(cast(Iterable[str], ignore))


def _fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of GenerationConfig for the keys of a file."""
    options = {key: value for key, value in values.items() if key in READ}
    options["do_sample"] = options.get("do_sample", False)
    if options["do_sample"] is True:
        options.setdefault("top_k", TOP_K)
    if "min_new_tokens" in options:
        options.pop("min_length", None)
    if isinstance(beams := options.get("num_beams"), int) and beams > MAX_FILE_BEAMS:
        raise ValueError(f"num_beams is {beams}, and a file may ask for at most {MAX_FILE_BEAMS}")
    for key in ("forced_bos_token_id", "forced_eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"):
        if key in options:
            value = options[key]
            token = value[0] if isinstance(value, list) and len(value) == 1 else value  # as some files write it
            if not isinstance(token, int) or isinstance(token, bool) or abs(token) > MAX_TOKEN:
                raise ValueError(f"{key} must be one token, got {token!r:.60}")
            options[key] = token
    # bad_words_ids and suppress_tokens are one field; end tokens are not suppressed, as in `transformers`.
    eos = read_eos(options.pop("eos_token_id", None))
    words, tokens = options.pop("bad_words_ids", []), options.pop("suppress_tokens", [])
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words) or not isinstance(tokens, list):
        raise ValueError("bad_words_ids must be a list of lists of tokens, and suppress_tokens a list of tokens")
    long = [word for word in words if len(word) != 1]
    if long:
        raise ValueError(
            f'bad_words_ids has {long[0]!r:.60}, and only single tokens can be suppressed: ignore=["bad_words_ids"]'
        )
    single = [*(word[0] for word in words), *tokens]
    for token in single:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"bad_words_ids and suppress_tokens hold tokens, got {token!r:.60} among them")
    suppressed = tuple(dict.fromkeys(token for token in single if token not in eos))
    return options | {"eos_token_ids": eos or None, "suppress_tokens": suppressed or None}


def read_eos(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """End tokens, each once, in order: none, one or several."""
    if not isinstance(eos, int | Sequence | None):
        raise TypeError(f"an eos token must be a whole number, several are a list of them; got {eos!r:.60}")
    tokens = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    for token in tokens:
        if token is None:
            raise TypeError("an eos token must be a whole number, got None")
        check_whole("an eos token", token, 0)
    return tuple(dict.fromkeys(tokens))


def read_stop(stop_strings: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings: none, one or several."""
    if not isinstance(stop_strings, (str, Sequence)):
        raise TypeError(
            f"stop_strings must be a str or a list of them, got {type(stop_strings).__name__}: {stop_strings!r:.80}"
        )
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"a stop string must be a str, got {type(string).__name__}: {string!r:.80}")
        if not string:
            raise ValueError("a stop string must not be empty: every text holds the empty one")
    return strings


def random_seed() -> int:
    """A seed from torch's generator, so that torch.manual_seed reaches it."""
    return int(torch.randint(2**62, ()))


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless value is None or a whole number of at least `least`."""
    if value is not None:
        checks.check_int(name, value, least)


def _check_number(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: {value!r:.80}")
    if not isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")


# -------------------------------------------------------------------------------------- what the options do to logits


class LogitsFilters:
    """What a `GenerationConfig` rules out, prepared for one run.

    lengths: number of tokens of each row's prompt, padding left out. Raises ValueError for a token beyond V.
    """

    def __init__(
        self, config: GenerationConfig, *, vocabulary: int, lengths: Sequence[int], device: torch.device
    ) -> None:
        config.check_tokens(vocabulary)
        assert config.max_new_tokens is not None
        self.config, self.batch, self.last_step = config, len(lengths), config.max_new_tokens - 1
        self.reads_tokens = config.repetition_penalty not in (None, 1) or bool(config.no_repeat_ngram_size)
        eos = config.eos_token_ids or ()
        self.eos = torch.tensor(eos, dtype=torch.long, device=device)
        self._suppressed = torch.tensor(config.suppress_tokens or (), dtype=torch.long, device=device)
        least, total = config.min_new_tokens or 0, config.min_length or 0
        shortest = [max(least, total - n) if eos else 0 for n in lengths]
        self._shortest, self._any_shortest = torch.tensor(shortest, device=device), max(shortest)  # (B,)
        starts = [config.forced_bos_token_id is not None and n == 1 for n in lengths]
        self._starts, self._any_starts = torch.tensor(starts, device=device), any(starts)  # (B,)

    def __call__(self, logits: Tensor, tokens: Tensor, step: int) -> Tensor:
        """Filter the logits (B, V) of the token after tokens (B, n); returned untouched if nothing applies.

        Filtered logits are fp32, as in `transformers`.
        """
        config = self.config
        if config.repetition_penalty is not None and config.repetition_penalty != 1:
            logits = penalise_repeats(logits.float(), tokens, config.repetition_penalty)
        if config.no_repeat_ngram_size:
            logits = prevent_ngrams(logits.float(), tokens, config.no_repeat_ngram_size)
        if config.suppress_tokens:
            logits = ban(logits.float(), self._suppressed)
        if step < self._any_shortest:
            logits = withhold(logits.float(), self.eos, step < self._shortest)
        if step == 0 and self._any_starts and config.forced_bos_token_id is not None:
            logits = force(logits.float(), config.forced_bos_token_id, self._starts)
        if step == self.last_step and config.forced_eos_token_id is not None:
            logits = force(logits.float(), config.forced_eos_token_id, torch.ones_like(self._starts))
        return logits


class Sampler:
    """Chooses the tokens of one run, step by step, on the device of the logits. row_numbers: as of `generate`."""

    def __init__(self, filters: LogitsFilters, row_numbers: Sequence[int] | None = None) -> None:
        self.filters, self.row_numbers = filters, range(filters.batch) if row_numbers is None else row_numbers
        if len(self.row_numbers) != filters.batch:
            raise ValueError(f"got {len(self.row_numbers)} row_numbers for {filters.batch} rows")
        config = filters.config
        self._draws = UniformDraws(config.seed, self.row_numbers) if config.samples else None
        self._totals: list[Tensor] = []  # (B,) for each step, when sampling
        self._logits: Tensor | None = None
        self._steps = 0

    def __call__(self, logits: Tensor, tokens: Tensor, step: int, out: Tensor) -> None:
        """Write the token (B,) after tokens (B, n) to `out`."""
        logits = self._logits = self.filters(logits, tokens, step)
        self._steps = step + 1
        if self._draws is None:
            torch.argmax(logits, -1, out=out)  # the smallest id among equals
        else:
            token, total = draw(warp(logits.float(), self.filters.config), self._draws(step, logits))
            self._totals.append(total)
            out.copy_(token)

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if a row's token was chosen from NaN; `lengths`: the tokens each row has up to its end.

        Without sampling only the last logits are looked at, where a cache would have carried the NaN: one look a run.
        """
        assert self._logits is not None, "nothing has been chosen"
        if self._draws is None:
            bad = self._logits.isnan().any(-1).tolist()
            rows = [row for row, n in enumerate(lengths) if bad[row] and n == self._steps]
        else:
            steps = torch.stack(self._totals).isnan().int()  # (steps, B)
            first = torch.where(steps.any(0), steps.argmax(0), len(steps)).tolist()
            rows = [row for row, n in enumerate(lengths) if first[row] < n]
        if rows:
            raise ValueError(
                f"no token can be chosen in row {self.row_numbers[rows[0]]}: the model's logits hold NaN, or every "
                "token is ruled out. Look at the weights and the dtype (float16 overflows where bfloat16 does not), "
                "or suppress fewer tokens"
            )


def warp(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order."""
    if config.temperature is not None and config.temperature != 1:
        logits = logits / config.temperature
    if config.top_k:
        logits = keep_top(logits, config.top_k)
    if config.top_p is not None and config.top_p < 1:
        logits = keep_nucleus(logits, config.top_p)
    if config.min_p is not None:
        logits = keep_likely(logits, config.min_p)
    return logits


def draw(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The token (B,) at which the summed probabilities pass u (B,) in [0, 1), and their sum (B,), which may be NaN."""
    # In fp64: a sum over the vocabulary in fp32 is off by more than a rare token's probability.
    sums = logits.softmax(-1).cumsum(-1, dtype=torch.float64)  # (B, V)
    total = sums[:, -1].clone()
    token = torch.searchsorted(sums, (u * total)[:, None], right=True)[:, 0]  # never a token of probability 0
    return token.clamp_(max=logits.shape[-1] - 1), total  # NaN finds no place: stay inside until it is reported


class UniformDraws:
    """Uniform numbers in [0, 1), one for each row and step, that depend on nothing but seed, row and step."""

    def __init__(self, seed: int | None, rows: Sequence[int]) -> None:
        self._seed, self._rows = random_seed() if seed is None else seed, rows
        self._block: Tensor | None = None  # (BLOCK, B)

    def __call__(self, step: int, like: Tensor) -> Tensor:
        """The numbers (B,) of a step, on the device of `like`; steps come in order from 0."""
        if self._block is None or step % BLOCK == 0:
            self._block = self._drawn(step // BLOCK, like)
        return self._block[step % BLOCK]

    def _drawn(self, block: int, like: Tensor) -> Tensor:
        generator = torch.Generator(device=like.device)
        rows = []
        for row in self._rows:
            key = blake2b(f"{self._seed} {row} {block}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(key, "little"))
            rows.append(torch.rand(BLOCK, dtype=torch.float64, generator=generator, device=like.device))
        return torch.stack(rows, -1)


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of tokens in `seen` by the penalty, or multiply the negative ones (CTRL, section 4.1)."""
    less = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(_marked(seen, logits), less, logits)


def prevent_ngrams(logits: Tensor, seen: Tensor, n: int) -> Tensor:
    """Rule out each token that would complete n tokens which the row already holds in that order."""
    if seen.shape[1] < n:
        return logits
    windows = seen.unfold(1, n, 1)  # (B, n_windows, n)
    tail = seen[:, None, seen.shape[1] + 1 - n :]  # (B, 1, n − 1)
    again = (windows[..., :-1] == tail).all(-1)  # (B, n_windows)
    ends = torch.where(again, windows[..., -1], logits.shape[-1])
    return logits.masked_fill(_marked(ends, logits), -inf)


def ban(logits: Tensor, tokens: Tensor) -> Tensor:
    """Rule out tokens (n,) in every row."""
    return logits.index_fill(1, tokens, -inf)


def withhold(logits: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Rule out tokens (n,) in those rows where rows (B,) is True: the ends of what is still too short."""
    return torch.where(rows[:, None], ban(logits, tokens), logits)


def force(logits: Tensor, token: int, rows: Tensor) -> Tensor:
    """Leave nothing but one token, at logit 0, in those rows where rows (B,) is True."""
    only = torch.full_like(logits, -inf)
    only[:, token] = 0
    return torch.where(rows[:, None], only, logits)


def keep_top(logits: Tensor, k: int) -> Tensor:
    """Rule out what is below the k-th largest; ties with it stay (Fan et al. 2018)."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < least, -inf)


def keep_nucleus(logits: Tensor, p: float) -> Tensor:
    """Rule out the least likely tokens whose probabilities together are at most 1 − p (Holtzman et al. 2020)."""
    rising, order = logits.sort(-1)
    out = rising.softmax(-1).cumsum(-1) <= 1 - p  # (B, V), least likely first
    out[:, -1] = False  # the most likely stays, however small p is
    return logits.masked_fill(out.scatter(1, order, out), -inf)


def keep_likely(logits: Tensor, p: float) -> Tensor:
    """Rule out what is less than p times as likely as the most likely token (min-p, Nguyen et al. 2024)."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -inf)


def _marked(tokens: Tensor, logits: Tensor) -> Tensor:
    """(B, n) ids → (B, V), True where the row holds the id; ids of V or more fall off."""
    vocab = logits.shape[-1]
    marks = torch.zeros(logits.shape[0], vocab + 1, dtype=torch.bool, device=logits.device)
    return marks.scatter_(1, tokens.clamp(max=vocab), True)[:, :vocab]
