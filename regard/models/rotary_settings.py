"""The rotary settings of a config.json, read into a `regard.rotary.Rotary`.

    >>> old = Settings({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    >>> rotary(old, 8, most=32)
    Rotary(dim=8, base=500000.0, layout='half', rotated=None, scaling=Linear(factor=2.0))

transformers 4 writes rope_theta beside a rope_scaling, transformers 5 one rope_parameters that holds both; each kind of
scaling has its own keys, and a key that its kind does not have is refused. Where transformers has a rule for what is
missing (no factor, no original length), this is that rule. It knows no family.
"""

from __future__ import annotations

from collections.abc import Callable

from regard.models.settings import Settings
from regard.rotary import DynamicNTK, Linear, Llama3, LongRope, Rotary, Scaling, Yarn

__all__ = ["reach", "rotary"]

ORIGINAL = "original_max_position_embeddings"


def rotary(settings: Settings, dim: int, *, most: int) -> Rotary:
    """The rotary positions that config.json describes.

    >>> llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    >>> rotary(Settings({"rope_parameters": llama3}), 8, most=8192).scaling
    Llama3(factor=8.0, low=1.0, high=4.0, original=8192)

    dim: size of a head.  most: max_position_embeddings.
    Raises ValueError for an unknown kind, unknown keys, and numbers that are missing, useless or contradict each other.
    """
    inside = _inside(settings)
    kind = _kind(inside)
    if kind not in SCALINGS:
        raise ValueError(f"{inside.where}: rope_type is {kind!r}, and only {', '.join(SCALINGS)} are supported")
    for place in (settings, inside):  # no family here turns a part of its heads
        place.only("partial_rotary_factor", 1.0)
    base = _place("rope_theta", inside, settings).number("rope_theta", 10000.0)
    try:
        made = Rotary(dim, base=base, scaling=SCALINGS[kind](inside, settings, most))
    except ValueError as error:
        said = str(error)
        raise ValueError(said if settings.where in said else f"{inside.where}: {said}") from None
    left = inside.unread()
    if left:
        raise ValueError(f"{inside.where} has keys that rope_type {kind!r} does not know: {', '.join(sorted(left))}")
    return made


def reach(rotary: Rotary, most: int) -> int:
    """How many positions a model is made for: max_position_embeddings, or as far as its scaling stretches that.

    >>> reach(Rotary(8, scaling=Linear(4.0)), 4096)
    16384

    most: max_position_embeddings. With `Linear` and `DynamicNTK` it is the length before stretching, with `Llama3` and
    `LongRope` the length after; with `Yarn` checkpoints have either.
    """
    scaling = rotary.scaling
    if isinstance(scaling, (Linear, DynamicNTK)):
        return max(most, int(scaling.factor * most))
    return max(most, int(scaling.factor * scaling.original)) if isinstance(scaling, Yarn) else most


# ------------------------------------------------------------------------------------------------------- the scalings


def _linear(inside: Settings, settings: Settings, most: int) -> Scaling:
    return Linear(inside.number("factor"))


def _dynamic(inside: Settings, settings: Settings, most: int) -> Scaling:
    return DynamicNTK(inside.number("factor"), original=most)


def _llama3(inside: Settings, settings: Settings, most: int) -> Scaling:
    low, high = inside.number("low_freq_factor"), inside.number("high_freq_factor")
    return Llama3(inside.number("factor"), low=low, high=high, original=_original(inside, settings, most))


def _yarn(inside: Settings, settings: Settings, most: int) -> Scaling:
    original = _original(inside, settings, most)
    given = _maybe(inside, "attention_factor")
    mscale, all_dim = _maybe(inside, "mscale"), _maybe(inside, "mscale_all_dim")
    both = given is None and bool(mscale) and bool(all_dim)  # transformers passes over one alone, and 0
    return Yarn(
        inside.number("factor", most / original),
        original=original,
        beta_fast=_maybe(inside, "beta_fast") or 32.0,
        beta_slow=_maybe(inside, "beta_slow") or 1.0,
        attention_factor=given,
        mscale=mscale if both else None,
        mscale_all_dim=all_dim if both else None,
        truncate=inside.flag("truncate", True),
    )


def _longrope(inside: Settings, settings: Settings, most: int) -> Scaling:
    original = _original(inside, settings, most)
    given, factor = _maybe(inside, "attention_factor"), inside.number("factor", most / original)
    return LongRope(
        short=_numbers(inside, "short_factor"),
        long=_numbers(inside, "long_factor"),
        original=original,
        factor=factor if given is None else None,
        attention_factor=given,
    )


SCALINGS: dict[str, Callable[[Settings, Settings, int], Scaling | None]] = {
    "default": lambda inside, settings, most: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
"""By the rope_type of transformers."""


# ------------------------------------------------------------------------------------------------------------- reading


def _inside(settings: Settings) -> Settings:
    """The object of rotary settings, under its old name or its new one; empty where there is none."""
    both = {key: settings.get(key) for key in ("rope_scaling", "rope_parameters") if key in settings}
    if len(both) > 1 and both["rope_scaling"] != both["rope_parameters"]:
        raise ValueError(f"{settings.where} has rope_scaling and rope_parameters, and they differ: leave one")
    for key, given in both.items():
        if not isinstance(given, dict):
            raise ValueError(f"{settings.where}: {key} must be an object of settings, got {given!r}")
        return Settings(given, f"{settings.where}, {key}")
    return Settings({}, settings.where)


def _kind(inside: Settings) -> str:
    """The kind of scaling, under the new name of its key or the old one."""
    new, old = inside.get("rope_type"), inside.get("type")
    if new is not None and old is not None and new != old:
        raise ValueError(f"{inside.where}: rope_type is {new!r} and type is {old!r}: leave one")
    return inside.text("type" if new is None else "rope_type", "default")


def _place(key: str, inside: Settings, settings: Settings) -> Settings:
    """Where the key stands: in the object, or beside it. Raises ValueError where both have it and differ."""
    near, far = inside.get(key), settings.get(key)
    if near is not None and far is not None and near != far:
        raise ValueError(f"{inside.where}: {key} is {near!r} here and {far!r} outside: leave one")
    return inside if near is not None else settings


def _original(inside: Settings, settings: Settings, most: int) -> int:
    """The length trained on before the scaling."""
    return _place(ORIGINAL, inside, settings).whole(ORIGINAL, most)


def _maybe(inside: Settings, key: str) -> float | None:
    return inside.number(key) if key in inside else None


def _numbers(inside: Settings, key: str) -> list[float]:
    given = inside.get(key)
    if not isinstance(given, list) or any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in given):
        raise ValueError(f"{inside.where}: {key} must be a list of numbers, got {given!r}")
    return given
