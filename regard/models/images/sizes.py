"""The size that a picture is resized to, from its own size: each way of saying it in preprocessor_config.json.

    >>> ShorterSide(224).of(480, 640)
    (224, 298)

Sizes are (height, width). The rounding is that of `transformers`, to the pixel. It knows no picture and no filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.models.settings import Settings

__all__ = ["Exactly", "ShorterSide", "Target", "Within", "read_pair", "read_target"]


@dataclass(frozen=True)
class Exactly:
    """One size for all pictures, whatever their shape: {"height": …, "width": …}.

    >>> Exactly(224, 192).of(480, 640)
    (224, 192)
    """

    height: int
    width: int

    def of(self, height: int, width: int) -> tuple[int, int]:
        """The new height and width of a picture."""
        return self.height, self.width

    def __str__(self) -> str:
        return f"to {self.height} × {self.width}"


@dataclass(frozen=True)
class ShorterSide:
    """The shorter side becomes `side`, less where the longer one would pass `longest`; the shape stays.

    {"shortest_edge": …}, {"shortest_edge": …, "longest_edge": …}.

    >>> ShorterSide(224, longest=280).of(480, 640)
    (210, 280)
    """

    side: int
    longest: int | None = None

    def of(self, height: int, width: int) -> tuple[int, int]:
        """The new height and width of a picture."""
        short, long = min(height, width), max(height, width)
        side: float = self.side
        if self.longest is not None and long / short * side > self.longest:
            side = self.longest * short / long
        shorter = round(side)
        if shorter == short:  # nothing to resize, though the longer side may still be a pixel too long
            return height, width
        longer = int(side * long / short)
        return (longer, shorter) if width < height else (shorter, longer)

    def __str__(self) -> str:
        bound = "" if self.longest is None else f" (the longer one to {self.longest} at most)"
        return f"the shorter side to {self.side}{bound}"


@dataclass(frozen=True)
class Within:
    """As large as fits into a height and a width; the shape stays: {"max_height": …, "max_width": …}.

    >>> Within(224, 224).of(480, 640)
    (168, 224)
    """

    height: int
    width: int

    def of(self, height: int, width: int) -> tuple[int, int]:
        """The new height and width of a picture."""
        scale = min(self.height / height, self.width / width)
        return int(height * scale), int(width * scale)

    def __str__(self) -> str:
        return f"to fit into {self.height} × {self.width}"


Target = Exactly | ShorterSide | Within


def read_target(settings: Settings, key: str, *, square: bool) -> Target:
    """The target that a key of a preprocessor_config.json names.

    >>> read_target(Settings({"size": 224}), "size", square=False)
    ShorterSide(side=224, longest=None)

    square: what one number means: both sides (True), or the shorter one (False).
    Raises ValueError for what is no size, or one that no step here makes.
    """
    sides = _sides(settings, key, square)
    inner = Settings(sides, f"{settings.where}: {key}")
    keys = set(sides)
    if keys == {"height", "width"}:
        return Exactly(inner.whole("height"), inner.whole("width"))
    if keys == {"shortest_edge"}:
        return ShorterSide(inner.whole("shortest_edge"))
    if keys == {"shortest_edge", "longest_edge"}:
        return ShorterSide(inner.whole("shortest_edge"), inner.whole("longest_edge"))
    if keys == {"max_height", "max_width"}:
        return Within(inner.whole("max_height"), inner.whole("max_width"))
    raise ValueError(
        f"{settings.where}: {key} must be a number, height and width, shortest_edge (and longest_edge), or max_height "
        f"and max_width, got {settings.get(key)!r:.200}"
    )


def read_pair(settings: Settings, key: str) -> tuple[int, int]:
    """A height and a width. Raises ValueError for anything else.

    >>> read_pair(Settings({"crop_size": 224}), "crop_size")
    (224, 224)
    """
    target = read_target(settings, key, square=True)
    if not isinstance(target, Exactly):
        raise ValueError(
            f"{settings.where}: {key} must be a number, or height and width, got {settings.get(key)!r:.80}"
        )
    return target.height, target.width


def _sides(settings: Settings, key: str, square: bool) -> dict[str, Any]:
    """A size as named sides; files of before 2023 hold a number or [height, width]."""
    value = settings.get(key)
    if isinstance(value, dict):
        return {side: n for side, n in value.items() if n is not None}
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return {"height": value[0], "width": value[1]}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"height": value, "width": value} if square else {"shortest_edge": value}
    return {}
