"""Many module paths in few words: `encoder.layer.0–11.attention`. It knows dots and numbers, and nothing of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["places", "stack_of"]


def places(paths: Iterable[str]) -> str:
    """Paths that differ in numbers only as one, with ranges; in the order in which they first come.

    >>> places(["layers.0.attn", "layers.1.attn", "layers.3.attn", "head"])
    'layers.0–1,3.attn, head'

    The model itself, whose path is "", is written (model).
    """
    stacks: dict[tuple[str, ...], list[list[str]]] = {}
    for path in dict.fromkeys(paths):
        stacks.setdefault(stack_of(path), []).append((path or "(model)").split("."))
    return ", ".join(text for members in stacks.values() for text in _merged(members))


def stack_of(path: str) -> tuple[str, ...]:
    """The path without its numbers: equal for the layers of one stack.

    >>> stack_of("encoder.layer.7.attention")
    ('encoder', 'layer', '#', 'attention')
    """
    return tuple("#" if _is_number(part) else part for part in path.split("."))


def _merged(members: list[list[str]]) -> list[str]:
    """Paths of one stack, merged along the last number that differs."""
    differing = [at for at, parts in enumerate(zip(*members, strict=True)) if len(set(parts)) > 1]
    if not differing:
        return [".".join(members[0])]
    at, groups = differing[-1], dict[tuple[str, ...], list[list[str]]]()
    for member in members:
        groups.setdefault((*member[:at], *member[at + 1 :]), []).append(member)
    ranges = (_ranges([int(member[at]) for member in group]) for group in groups.values())
    return [".".join([*rest[:at], range_, *rest[at:]]) for rest, range_ in zip(groups, ranges, strict=True)]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 → 0–2,5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()
