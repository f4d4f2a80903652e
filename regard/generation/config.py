"""Generation options: what the caller asks for, merged with generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, TypedDict, TypeVar

from regard.generation.beam_search import Beams
from regard.generation.sampling import Choice, check_whole
from regard.generation.stopping import read_eos, read_stop

READ = frozenset(
    [
        "bad_words_ids",
        "bos_token_id",
        "decoder_start_token_id",
        "do_sample",
        "early_stopping",
        "eos_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_beams",
        "pad_token_id",
        "repetition_penalty",
        "stop_strings",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
    ]
)
NEUTRAL: Mapping[str, object] = {
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "sequence_bias": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
"""Keys that change the text, which generation here does not do, and the value at which they change nothing."""
HARMLESS = frozenset(
    [
        "_commit_hash",
        "_from_model_config",
        "_original_object_hash",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "disable_compile",
        "is_assistant",
        "low_memory",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "return_dict_in_generate",
        "return_legacy_cache",
        "speculation_type",
        "target_lookbehind",
        "transformers_version",
        "use_cache",
        "use_mtp",
    ]
)
WHOLE = {"max_length": 1, "max_new_tokens": 1, "min_length": 0, "min_new_tokens": 0, "num_beams": 1}
WHOLE |= {"no_repeat_ngram_size": 0}
"""Keys of whole numbers, and the least there may be."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
NO_BEAMS = Beams(1)
MOST_BEAMS = 1000  # each takes a row of the batch; whoever wants more says so in the call
MOST_TOKENS = 2**31  # some files have −1 for none
TOP_K = 50  # what transformers samples among where a checkpoint samples and does not say


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a checkpoint says of generating; None or the neutral value where it says nothing.

    >>> Defaults.read({"num_beams": 4, "max_length": 142, "eos_token_id": [2, 7]}, {}).beams.width
    4
    >>> Defaults.read({"typical_p": 0.9}, {})
    Traceback (most recent call last):
        ...
    ValueError: generation_config.json asks for typical_p = 0.9, which changes the text and is not offered. To go on \
without, name it: ignore=["typical_p"]

    new_tokens, max_length: how many new tokens, or tokens with the prompt's, at most.  samples: is a token drawn.
    eos: tokens that end a text.  start: what a decoder begins with.  The others as in `Choice` and `generate`.
    files: the file that each key was read from.
    """

    new_tokens: int | None = None
    max_length: int | None = None
    min_new: int = 0
    min_length: int = 0
    samples: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    banned: tuple[int, ...] = ()
    forced_first: int | None = None
    forced_last: int | None = None
    beams: Beams = NO_BEAMS
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] = ()
    pad: int | None = None
    bos: int | None = None
    start: int | None = None
    files: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def read(
        cls, generation: Mapping[str, Any] | None, config: Mapping[str, Any], *, ignore: Iterable[str] = ()
    ) -> Defaults:
        """From generation_config.json, None if there is none, and config.json.

        Where there is the one, the other only says which tokens are which.  ignore: keys to go on without.

        Raises ValueError for values that cannot be used, and for keys that change the text and are not understood.
        """
        if isinstance(ignore, str):  # whose letters would be taken for keys
            raise TypeError(f"ignore must be a list of keys, got a str: ignore=[{ignore!r:.80}]")
        ignored = set(ignore)
        if generation is None:
            known = READ | NEUTRAL.keys()
            where, values = "config.json", {key: value for key, value in config.items() if key in known}
        else:
            where, values = "generation_config.json", {**{key: config.get(key) for key in TOKENS}, **_said(generation)}
        values = {key: value for key, value in values.items() if key not in ignored}
        _refuse(values, where)
        other = () if generation is None else TOKENS  # of config.json, where this file is silent
        files = {key: "config.json" if key in other and key not in _said(generation or {}) else where for key in values}
        try:
            return cls._of(_said(values), files)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None

    @classmethod
    def _of(cls, values: Mapping[str, Any], files: Mapping[str, str]) -> Defaults:
        get = values.get
        eos, samples = read_eos(get("eos_token_id")), get("do_sample", False)
        if not isinstance(samples, bool):
            raise ValueError(f"do_sample must be true or false, got {samples!r:.60}")
        for key, least in WHOLE.items():
            check_whole(key, get(key), least)
        if get("num_beams", 1) > MOST_BEAMS:
            raise ValueError(f"num_beams is {get('num_beams')}, and a file may ask for at most {MOST_BEAMS}")
        made = cls(
            new_tokens=get("max_new_tokens"),
            max_length=get("max_length"),
            min_new=get("min_new_tokens", 0),
            min_length=0 if get("min_new_tokens") is not None else get("min_length", 0),
            samples=samples,
            temperature=get("temperature", 1.0),
            top_k=_on(get("top_k", TOP_K if samples else None)),
            top_p=get("top_p"),
            min_p=get("min_p"),
            repetition_penalty=get("repetition_penalty", 1.0),
            no_repeat_ngram=get("no_repeat_ngram_size", 0),
            banned=_banned(get("bad_words_ids", []), get("suppress_tokens", []), eos),
            forced_first=_token("forced_bos_token_id", get("forced_bos_token_id")),
            forced_last=_token("forced_eos_token_id", get("forced_eos_token_id")),
            beams=Beams(get("num_beams", 1), _number("length_penalty", values), get("early_stopping", False)),
            stop=read_stop(get("stop_strings", ())),
            eos=eos,
            pad=_token("pad_token_id", get("pad_token_id")),
            bos=_token("bos_token_id", get("bos_token_id")),
            start=_token("decoder_start_token_id", get("decoder_start_token_id")),
            files=files,
        )
        Choice(repetition_penalty=made.repetition_penalty)  # each refuses what is out of range, here with the file
        if samples:
            Choice(temperature=made.temperature, top_k=made.top_k, top_p=made.top_p, min_p=made.min_p)
        return made

    def asks_for(self, keys: Sequence[str]) -> str:
        """Who asks for what these keys say, for an error that would else blame the caller.

        >>> Defaults.read({"num_beams": 2, "do_sample": True}, {}).asks_for(["num_beams", "do_sample"])
        'generation_config.json asks for it (num_beams, do_sample)'
        """
        files = dict.fromkeys(self.files.get(key, "the checkpoint") for key in keys)
        return f"{' and '.join(files)} asks for it ({', '.join(keys)})"

    def check_tokens(self, vocabulary: int) -> None:
        """Raise ValueError for tokens that the checkpoint ends a text with, bans or forces, and that do not exist.

        vocabulary: how many tokens there are.
        """
        named = {"eos_token_id": self.eos, "forced_bos_token_id": (self.forced_first,)}
        named |= {"forced_eos_token_id": (self.forced_last,)}
        named |= {key: self.banned for key in ("bad_words_ids", "suppress_tokens") if key in self.files}
        for key, tokens in named.items():
            outside = [token for token in tokens if token is not None and token >= vocabulary]
            if outside:
                raise ValueError(
                    f"{self.files.get(key, 'the checkpoint')}: {key} names token {outside[0]}, and the model's are 0 "
                    f'to {vocabulary - 1}. To go on without, name it: ignore=["{key}"]'
                )


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _refuse(values: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for keys that change the text in a way that is not offered, or whose meaning is not known."""
    unknown = {
        key: value
        for key, value in values.items()
        if key not in READ and key not in HARMLESS and value not in (None, [], {}, NEUTRAL.get(key))
    }
    if unknown:
        said = ", ".join(f"{key} = {value!r:.60}" for key, value in unknown.items())
        which = "them" if len(unknown) > 1 else "it"
        raise ValueError(
            f"{where} asks for {said}, which changes the text and is not offered. "
            f"To go on without, name {which}: ignore={json.dumps(list(unknown))}"
        )


def _on(value: int | None) -> int | None:
    """0 switches it off."""
    return value or None


def _number(key: str, values: Mapping[str, Any]) -> float:
    """A finite number, 1 where nothing is said."""
    value = values.get(key, 1.0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value):
        raise ValueError(f"{key} must be a number, got {value!r:.60}")
    return value


def _token(name: str, value: object) -> int | None:
    """One token; some files write it as a list of one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or abs(value) > MOST_TOKENS):
        raise ValueError(f"{name} must be one token, got {value!r:.60}")
    return value


def _banned(words: Any, tokens: Any, eos: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens never chosen. Words of several cannot be banned; what ends a text is not, as in `transformers`."""
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words) or not isinstance(tokens, list):
        raise ValueError("bad_words_ids must be a list of lists of tokens, and suppress_tokens a list of tokens")
    long = [word for word in words if len(word) != 1]
    if long:
        raise ValueError(
            f'bad_words_ids holds {long[0]!r:.60}, and only single tokens can be banned: ignore=["bad_words_ids"]'
        )
    for token in [*(word[0] for word in words), *tokens]:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"bad_words_ids and suppress_tokens hold tokens, got {token!r:.60} among them")
    return tuple(dict.fromkeys(word[0] for word in [*words, *([token] for token in tokens)] if word[0] not in eos))


NEW_TOKENS = 50  # where neither the caller nor the checkpoint says

T = TypeVar("T")


class Wished(TypedDict, total=False):
    """The arguments of `Model.generate` by name, for the signatures that only a type checker reads."""

    new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    beams: int | Beams | None
    seed: int | None
    stop: str | Sequence[str]
    ignore: Sequence[str]
    on_token: Callable[[int], None] | None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the caller asks of the text; None where the checkpoint's own setting holds. See `Model.generate`."""

    new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    beams: int | Beams | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore: Sequence[str] = ()

    def said(self) -> dict[str, Any]:
        """The wishes that there are, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    def choice(self, said: Defaults) -> Choice:
        """How tokens are chosen: sampled if the caller asks for it, or the checkpoint does and the caller does not."""
        temperature, top_k, top_p, min_p = self.temperature, self.top_k, self.top_p, self.min_p
        if temperature is None:
            samples = said.samples or bool(top_k) or top_p not in (None, 1) or bool(min_p)  # 0, 1 and 0: switched off
            temperature = said.temperature if samples else 0.0
        if temperature != 0:
            top_k = _first(top_k, said.top_k)
            top_p, min_p = _first(top_p, said.top_p), _first(min_p, said.min_p)
        penalty = _first(self.repetition_penalty, said.repetition_penalty)
        return Choice(
            temperature=temperature,
            top_k=None if top_k == 0 else top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=1.0 if penalty is None else penalty,
            no_repeat_ngram=said.no_repeat_ngram,
            banned=said.banned,
            min_new=said.min_new,
            min_length=said.min_length,
            forced_first=said.forced_first,
            forced_last=said.forced_last,
            seed=self.seed,
        )

    def count(self, said: Defaults, start: int, most: int | None) -> int:
        """How many new tokens at most. What nobody asked for by number gives way to the positions there are.

        start: tokens of the prompt.  most: positions of who decodes, None without a limit. The last new token takes no
        position: nobody reads it. Raises ValueError where there is no room.
        """
        room = None if most is None else most - start + 1
        if self.new_tokens is not None:
            self.check_count()
            if room is not None and self.new_tokens > room:  # told here, before a stream is asked for its first piece
                raise ValueError(
                    f"{start + self.new_tokens - 1} positions are asked for, and the model has {most}: ask for fewer "
                    f"new tokens, at most {room} after a prompt of {start}"
                )
            return self.new_tokens
        if said.new_tokens is None and said.max_length is not None and said.max_length <= start:
            raise ValueError(
                f"the prompt has {start} tokens, and the checkpoint's max_length is {said.max_length} with the "
                "prompt's: say how many new_tokens, or shorten the prompt"
            )
        of_length = NEW_TOKENS if said.max_length is None else said.max_length - start
        new = of_length if said.new_tokens is None else said.new_tokens
        return new if room is None else min(new, room)

    def check_count(self) -> None:
        """Raise TypeError or ValueError for new_tokens that are no number of tokens, whatever the prompt."""
        if self.new_tokens is not None:
            check_whole("new_tokens", self.new_tokens, 1)

    def searched(self, said: Defaults) -> Beams:
        """The caller's number of beams, compared as the checkpoint compares them; a `Beams` says all itself."""
        if self.beams is None:
            return said.beams
        if isinstance(self.beams, Beams):
            if self.beams.returned != 1:
                raise ValueError(
                    f"one text is written for each prompt, and beams asks for {self.beams.returned}: returned=1"
                )
            return self.beams
        return Beams(self.beams, said.beams.length_penalty, said.beams.early_stopping)

    def check_beams(self, said: Defaults) -> None:
        """Refuse what the checkpoint asks for and is not offered with beams: `generate` would blame the caller for it.

        Raises ValueError with the file and its keys.
        """
        if self.searched(said).width == 1:
            return
        theirs, samples = ["num_beams"] if self.beams is None else [], self.choice(said).samples
        keys = theirs + ([] if self.choice(Defaults()).samples else ["do_sample"])
        if samples and keys:
            raise ValueError(
                f"beams with sampling are not offered, and {said.asks_for(keys)}: give beams=1, or temperature=0"
            )
        keys = theirs + (["stop_strings"] if said.stop else [])
        if (self.stop or said.stop) and keys:
            without = 'ignore=["stop_strings"]' if said.stop else "leave out stop"
            raise ValueError(
                f"beams with stop strings are not offered, and {said.asks_for(keys)}: give beams=1, or {without}"
            )


def _first(asked: T | None, said: T | None) -> T | None:
    return said if asked is None else asked
