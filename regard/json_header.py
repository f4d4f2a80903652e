"""A JSON object out of a file: read whole, or refused in the words of the file that it came from.

It does not know which keys the object should have, nor where in a file it stands.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

__all__ = ["Refusal", "parsed"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What is raised for text that is not one JSON object in which no key comes twice, and in which words.

    >>> damaged = "it is damaged"
    >>> Refusal(error=ValueError, deep=damaged, broken=damaged, other=damaged, twin=damaged).deep
    'it is damaged'

    error: the class.  The rest are its messages, templates of `str.format`, for text that
    deep: is nested deeper than Python reads it.
    broken: is no JSON, no UTF-8, or has an integer of thousands of digits; {why} is Python's own message.
    other: is JSON, but no object; {kind} is its type, {value} its repr, shortened.
    twin: has an object in which a key comes more than once; {key} is the key's repr, {times} how often.
    """

    error: type[ValueError]
    deep: str
    broken: str
    other: str
    twin: str


class _TwinError(ValueError):
    """A key that comes more than once; its arguments are the key and how often."""


def parsed(text: bytes | str, refusal: Refusal) -> dict[str, Any]:
    """A JSON object in which no key comes twice, at any depth.

    >>> words = {"deep": "nested too deep", "broken": "not JSON ({why})", "other": "a {kind}, no object"}
    >>> refusal = Refusal(error=ValueError, **words, twin="the key {key} comes {times} times")
    >>> parsed(b'{"a": [1, 2]}', refusal)
    {'a': [1, 2]}
    >>> parsed(b'{"a": {"b": 1, "b": 2}}', refusal)
    Traceback (most recent call last):
    ValueError: the key 'b' comes 2 times

    text: bytes are UTF-8.  refusal: the error for anything else.

    Raises the refusal's error.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_without_twins)
    except RecursionError:
        raise refusal.error(refusal.deep) from None
    except _TwinError as twin:
        key, times = twin.args
        raise refusal.error(refusal.twin.format(key=repr(key), times=times)) from None
    except ValueError as error:
        raise refusal.error(refusal.broken.format(why=error)) from None
    if not isinstance(value, dict):
        raise refusal.error(refusal.other.format(kind=type(value).__name__, value=reprlib.repr(value)))
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _TwinError(*Counter(key for key, _ in pairs).most_common(1)[0])
    return value
