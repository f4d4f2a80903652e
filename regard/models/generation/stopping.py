"""When a row ends: at an end token, at a stop string, or when there is no more room.

`StopStrings` reads text as it comes and lets through only what cannot become part of a stop string.

It does not know how tokens become text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from regard.models.generation.choosing import check_whole

__all__ = ["Reason", "StopStrings", "read_eos", "read_stop"]

Reason = Literal["eos", "stop", "length"]
"""Why a row ended: an end token, a stop string, or as many new tokens as were asked for."""


def read_eos(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """End tokens, each once, in order: none, one or several.

    >>> read_eos(2), read_eos([5, 2, 5]), read_eos(None)
    ((2,), (5, 2), ())
    """
    if not isinstance(eos, int | Sequence | None):
        raise TypeError(f"an eos token must be a whole number, several are a list of them; got {eos!r:.60}")
    tokens = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    for token in tokens:
        if token is None:
            raise TypeError("an eos token must be a whole number, got None")
        check_whole("an eos token", token, 0)
    return tuple(dict.fromkeys(tokens))


def read_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    r"""Stop strings: none, one or several.

    >>> read_stop("\n\n"), read_stop(["User:", "###"]), read_stop(())
    (('\n\n',), ('User:', '###'), ())
    """
    if not isinstance(stop, (str, Sequence)):
        raise TypeError(f"stop must be a str or a list of them, got {type(stop).__name__}: {stop!r:.80}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"a stop string must be a str, got {type(string).__name__}: {string!r:.80}")
        if not string:
            raise ValueError("a stop string must not be empty: every text holds the empty one")
    return strings


class StopStrings:
    """Text in, text out, until one of `strings` occurs; what could be the beginning of one waits.

    >>> stops = StopStrings(("END",))
    >>> stops.push("The E"), stops.push("gg. EN"), stops.push("D of it")
    (('The ', False), ('Egg. ', False), ('', True))
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._longest = max((len(s) for s in strings), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is now safe to show, and whether a stop string has occurred, before which it is cut."""
        text = self._held + piece
        found = [at for at in (text.find(s) for s in self._strings) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        safe = len(text) - self._waiting(text)
        self._held = text[safe:]
        return text[:safe], False

    def close(self) -> str:
        """The text that waited for more, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _waiting(self, text: str) -> int:
        """How many characters at the end of text are the beginning of a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._strings):
                return n
        return 0
