"""Stored outputs for comparison: written as readable JSON or text, compared with a tolerance for fp32 on another CPU.

With REGARD_WRITE_GOLDENS=1 in the environment, `check` writes the files instead of comparing with them.
"""

from __future__ import annotations

import json
import os
import re
from difflib import unified_diff
from math import isclose
from pathlib import Path
from typing import Any

import pytest

RELATIVE, ABSOLUTE = 1e-4, 1e-5
DECIMAL = re.compile(r"(-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+))")
SHORT = 110  # columns up to which a list or an object stands on one line


def check(path: Path, value: Any) -> None:
    """Compare a value with the one stored at a path, a text where the path ends in .txt; or store it.

    Args:
        path: of the stored value.
        value: what JSON holds, or a text.
    """
    is_text = path.suffix == ".txt"
    new = value if is_text else to_json(value)
    if os.environ.get("REGARD_WRITE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(new, "utf-8")
        return
    if not path.exists():
        pytest.fail(f"{path.name} is not stored: REGARD_WRITE_GOLDENS=1 writes it", pytrace=False)
    stored = path.read_text("utf-8")
    found = differences(stored if is_text else json.loads(stored), value)
    if found:
        lines = unified_diff(stored.splitlines(), new.splitlines(), f"{path.name}, stored", "now", lineterm="", n=1)
        more = [f"… and {len(found) - 12} more"] if len(found) > 12 else []
        pytest.fail("\n".join([*found[:12], *more, "", *lines]), pytrace=False)


def differences(stored: Any, now: Any, where: str = "") -> list[str]:
    """One line for each place where two values differ by more than rounding.

    Args:
        stored: what JSON holds.
        now: the same for today's output.
        where: the place of both, for the lines.

    Returns:
        The lines. Strings are the same if they are but for their decimal fractions, and these are close. A list of
        objects may be in another order if those that changed places have a number in common, as equal ranks have.
    """
    if isinstance(stored, dict) and isinstance(now, dict):
        sides = [(stored, now, "missing"), (now, stored, "new")]
        lines = [f"{where}.{key}: {word}" for one, other, word in sides for key in one if key not in other]
        return lines + [
            line for key in stored if key in now for line in differences(stored[key], now[key], f"{where}.{key}")
        ]
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        pairs = list(zip(stored, now, strict=True))
        lines = [line for n, (a, b) in enumerate(pairs) for line in differences(a, b, f"{where}[{n}]")]
        return [] if lines and _reordered_ties(stored, now) else lines
    if isinstance(stored, str) and isinstance(now, str):
        same = _same_text(stored, now)
    elif _is_number(stored) and _is_number(now):
        exact = isinstance(stored, int) and isinstance(now, int)
        same = stored == now if exact else isclose(stored, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    else:
        same = type(stored) is type(now) and stored == now
    return [] if same else [f"{where}: {_short(stored)} became {_short(now)}"]


def to_json(value: Any) -> str:
    """JSON with numbers to six digits, and short lists and objects on one line."""
    return f"{_laid_out(_rounded(value), 0)}\n"


def _reordered_ties(stored: list[Any], now: list[Any]) -> bool:
    if not all(isinstance(one, dict) for one in stored + now):
        return False
    left = list(range(len(now)))
    for one in stored:
        place = next((m for m in left if not differences(one, now[m])), None)
        if place is None or not _share_a_number(one, stored[place]):
            return False
        left.remove(place)
    return True


def _share_a_number(one: dict[str, Any], other: dict[str, Any]) -> bool:
    numbers = [key for key in one if isinstance(one[key], float) and isinstance(other.get(key), float)]
    return any(isclose(one[key], other[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE) for key in numbers)


def _same_text(stored: str, now: str) -> bool:
    parts, others = DECIMAL.split(stored), DECIMAL.split(now)
    if parts[::2] != others[::2]:
        return False
    for a, b in zip(parts[1::2], others[1::2], strict=True):
        # Numbers that were equal but for rounding may be printed one step of their last digit apart.
        step = max(_last_digit(a), _last_digit(b))
        if not isclose(float(a), float(b), rel_tol=RELATIVE, abs_tol=max(ABSOLUTE, 1.01 * step)):
            return False
    return True


def _last_digit(number: str) -> float:
    mantissa, _, exponent = number.partition("e")
    return float(10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    # Beyond the sixth decimal is rounding, which would change with every rewrite.
    return float(f"{round(value, 6):.6g}") if isinstance(value, float) else value


def _laid_out(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(line) + depth <= SHORT:
        return line
    inside, outside = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        items = [f"{json.dumps(key, ensure_ascii=False)}: {_laid_out(one, depth + 1)}" for key, one in value.items()]
        return "{\n" + ",\n".join(inside + item for item in items) + f"\n{outside}}}"
    if not any(isinstance(one, dict | list) for one in value):
        return _wrapped([json.dumps(one, ensure_ascii=False) for one in value], inside, outside)
    return "[\n" + ",\n".join(inside + _laid_out(one, depth + 1) for one in value) + f"\n{outside}]"


def _wrapped(items: list[str], inside: str, outside: str) -> str:
    lines = [inside]
    for n, item in enumerate(items):
        if len(lines[-1]) + len(item) > SHORT:
            lines.append(inside)
        lines[-1] += item + (", " if n + 1 < len(items) else "")
    return "[\n" + "\n".join(line.rstrip() for line in lines) + f"\n{outside}]"
