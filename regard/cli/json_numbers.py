"""Numbers that JSON has no sign for, as text. It does not know what they are."""

from __future__ import annotations

from math import isfinite
from typing import Any

__all__ = ["finite"]


def finite(values: Any) -> Any:
    """The same lists, dictionaries and values, with "nan", "inf" and "-inf" for the numbers of these names.

    >>> finite({"entropy": [0.5, float("nan")], "name": None})
    {'entropy': [0.5, 'nan'], 'name': None}
    """
    if isinstance(values, list):
        return [finite(value) for value in values]
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    return str(values) if isinstance(values, float) and not isfinite(values) else values
