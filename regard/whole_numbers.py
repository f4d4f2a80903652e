"""Sizes and seeds are whole numbers: others are refused here, in words, before torch meets them.

It does not know what the numbers are for.
"""

from __future__ import annotations

from operator import index

__all__ = ["check_whole"]


def check_whole(name: str, value: object, least: int | None = 1) -> None:
    """Raise unless a value is a whole number, of numpy and torch too, and at least `least`.

    >>> check_whole("features", 3.5)
    Traceback (most recent call last):
    TypeError: features must be a whole number, got float: 3.5

    name: what the value is called.  least: None for any.
    Raises TypeError for what is no whole number (True is none), ValueError for one that is too small.
    """
    try:
        whole = index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}: {value!r:.80}")
    if least is not None and whole < least:
        raise ValueError(f"{name} must be at least {least}, got {whole}")
