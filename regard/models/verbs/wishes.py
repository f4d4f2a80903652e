"""What the caller asks of a text to be written, and what comes of it together with what the checkpoint says.

    >>> Wishes(beams=4).searched(Defaults()).width, Wishes(new_tokens=3).count(Defaults(), 5, most=7)
    (4, 3)

It knows neither models nor prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from regard.models.generation.beams import Beams
from regard.models.generation.checkpoint_defaults import Defaults
from regard.models.generation.choosing import Choice, check_whole

__all__ = ["Wished", "Wishes"]

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
