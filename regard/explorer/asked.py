"""What was asked for, checked: a layer, a head, a token, a stretch of them. Errors say what there is.

It does not know what is answered.
"""

from __future__ import annotations

from typing import get_args

from regard.explorer.one_head import HeadWeights
from regard.explorer.seen_layers import SeenLayer
from regard.explorer.sessions import Session
from regard.explorer.windowed_head import head_of
from regard.stages import Lang

__all__ = ["checked_index", "checked_span", "exact_weights", "find_head", "spoken"]


def spoken(lang: str) -> Lang:
    """A language that is spoken here.

    >>> spoken("ko")
    'ko'

    Raises ValueError with the languages there are.
    """
    for name in get_args(Lang):
        if name == lang:
            return name  # type: ignore[no-any-return]
    raise ValueError(f"lang must be {' or '.join(get_args(Lang))}, got {lang!r}")


def checked_index(name: str, value: int, count: int, of: str) -> int:
    """An index that is there.

    >>> checked_index("token", 7, 5, "queries")
    Traceback (most recent call last):
        ...
    IndexError: token 7 is out of range: there are 5 queries, counted from 0

    Raises TypeError for what is no integer.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")
    if not 0 <= value < count:
        raise IndexError(f"{name} {value} is out of range: there are {count} {of}, counted from 0")
    return value


def checked_span(name: str, start: int, stop: int | None, count: int, most: int | None = None) -> tuple[int, int]:
    """A stretch [start, stop) of count things; stop: default the end, or as far as one answer goes.

    >>> checked_span("tokens", 2, None, 5)
    (2, 5)

    most: things in one answer.
    Raises IndexError for a stretch that is not there, ValueError for one that is too long.
    """
    if stop is None:
        stop = count if most is None else max(start, min(count, start + most))
    if not 0 <= start <= stop <= count:
        raise IndexError(f"{name} {start} up to {stop} are not there: there are {count}, counted from 0")
    if most is not None and stop - start > most:
        raise ValueError(f"{stop - start:,} {name} are too many for one answer: at most {most:,}")
    return start, stop


def find_head(session: Session, layer: int, head: int) -> SeenLayer:
    """The layer of a head that is there. Raises IndexError for one that is not."""
    found = session.layers[checked_index("layer", layer, len(session.layers), "layers")]
    checked_index("head", head, found.view.sizes[1], "heads")
    return found


def exact_weights(session: Session, layer: int, head: int, what: str) -> HeadWeights:
    """The exact weights of a head. Raises IndexError for one that is not there, LookupError where q and k are not."""
    found = find_head(session, layer, head)
    if found.view.weights is None:
        raise LookupError(
            f"{what} needs queries and keys, which this capture does not hold: record it again with "
            "regard.watch(model, keep='qk'), and save it without overview=True"
        )
    return head_of(found, head)
