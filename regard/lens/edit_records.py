"""Edits that were active in a run and effects that were measured, as values that a capture keeps and a file holds.

A tensor of an edit is kept as its shape, norm and SHA-256: enough to tell which one it was, not to apply it again.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from math import isfinite
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from regard.formats import raw_bytes
from regard.lens.files.container import LARGEST, ContentError, is_list_of
from regard.lens.files.container import fields as json_fields
from regard.locale import Lang, translate

LONGEST = 1000  # letters of a text, such as the repr of a mask
MOST_POSITIONS = 1 << 20  # in one list
FARTHEST = 1 << 63  # of a position
METRICS = ("vector of token {token}", "vector of “{token}”", "logit {a} − logit {b}", "log p({token})", "KL")
TENSOR = {"shape": list, "dtype": str, "norm": float | int | None, "sha256": str}
EDIT = {"function": str, "values": list, "calls": int}
EFFECT = {
    "edit": list,
    "metric": str,
    "before": float | int,
    "after": float | int,
    "weight": float | int | None,
    "controls": list,
    "control_weight": float | int | None,
    "method": str,
}


@dataclass(repr=False)
class CapturedEdit:
    """An edit of `regard.edits` that was active in a run. It prints as the edit does.

    Attributes:
        function: the function that makes it, such as "knock_out".
        values: argument → number, word, list of positions, {"slice": […]}, {"tensor": shape, dtype, norm and sha256},
            or {"text": …} for masks and captures; defaults are left out.
        calls: recorded calls of the run during which it was active; 0 for the edit of an effect.
    """

    function: str
    values: dict[str, Any]
    calls: int = field(default=0, compare=False)

    def __repr__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={_text(value)}' for name, value in self.values.items())})"


@dataclass(frozen=True)
class Effect:
    """What an edit did to a metric.

    Attributes:
        edit: of `regard.edits`; in a capture, a tuple of `CapturedEdit`.
        metric: the metric's name.
        before: the metric without the edit; 0 for one that compares with the unedited run.
        after: the metric with it.
        weight: what a knock-out took away: the mean weight of its edges over the edited rows; None for other edits.
        controls: after − before of the same edit at random places.
        control_weight: the mean weight of the edges that the controls of a knock-out took away; None without such.
        p_value: share of random places, this one counted, where the effect is as large; None without controls.
        method: "exact": the model was run again.
    """

    edit: Any
    metric: str
    before: float
    after: float
    weight: float | None = None
    controls: tuple[float, ...] = ()
    control_weight: float | None = None
    method: Literal["exact", "first order"] = "exact"

    @property
    def value(self) -> float:
        """after − before."""
        return self.after - self.before

    @property
    def p_value(self) -> float | None:
        """See above."""
        if not self.controls:
            return None
        as_large = sum(abs(control) >= abs(self.value) for control in self.controls)
        return (1 + as_large) / (1 + len(self.controls))

    def text(self, lang: Lang = "en") -> str:
        """Two lines: the edit, and what it did."""
        weight, against = "", translate("no controls", lang)
        if self.weight is not None:
            weight = ", " + translate("weight {weight}", lang, weight=f"{self.weight:.3f}")
        if self.controls:
            mean = sum(map(abs, self.controls)) / len(self.controls)
            values = {"count": len(self.controls), "mean": f"{mean:.4g}", "p": f"{self.p_value:.3g}"}
            against = translate("{count} random places {mean} on average, p = {p}", lang, **values)
            if self.control_weight is not None:
                values["weight"] = f"{self.control_weight:.3f}"
                text = "{count} random places of weight {weight}: {mean} on average, p = {p}"
                against = translate(text, lang, **values)
        change = f"{self.before:.4g} → {self.after:.4g} ({self.value:+.4g})" if self.before else f"{self.value:.4g}"
        edit = " + ".join(map(repr, self.edit))
        metric = translate_metric(self.metric, lang)
        return f"{edit}{weight}\n  {metric}: {change}, {translate(self.method, lang)}; {against}"

    def __repr__(self) -> str:
        return self.text()


def translate_metric(name: str, lang: Lang) -> str:
    """The name of a metric of `regard.metrics` in a language; a name of the user's own stays.

    >>> translate_metric("vector of token 5", "ko"), translate_metric("share of Mary", "ko")
    ('5번 토큰의 벡터', 'share of Mary')
    """
    for template in METRICS:
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(template))
        if match := re.fullmatch(pattern, name):
            return translate(template, lang, **match.groupdict())
    return name


# ----------------------------------------------------------------------------------------------------- from live values


def capture_edit(edit: Any) -> CapturedEdit:
    """An edit of `regard.edits` as plain values."""
    values = {}
    for argument in fields(edit):
        value, default = getattr(edit, argument.name), argument.default
        if value is not default and not (isinstance(value, (bool, int, float, str)) and value == default):
            values[argument.name] = _plain(value)
    return CapturedEdit(edit.function, values)


def capture_effect(effect: Effect) -> Effect:
    """An effect whose edits are plain values. Raises TypeError for another object, ValueError for NaN or ∞."""
    if not isinstance(effect, Effect):
        raise TypeError(f"add_effect takes a result of regard.effect, got {type(effect).__name__}")
    weights = [weight for weight in (effect.weight, effect.control_weight) if weight is not None]
    if not all(map(isfinite, (effect.before, effect.after, *weights, *effect.controls))):
        raise ValueError(f"an effect must have finite numbers to be kept, got {effect!r}")
    edits = tuple(edit if isinstance(edit, CapturedEdit) else capture_edit(edit) for edit in effect.edit)
    return replace(effect, edit=edits, metric=_printable(effect.metric))


def _plain(value: object) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else {"text": repr(value)}
    if isinstance(value, str):
        return _printable(value)
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, (tuple, list)) and all(type(item) is int for item in value) and len(value) <= MOST_POSITIONS:
        return list(value)
    if isinstance(value, Tensor):
        flat = value.detach().cpu().reshape(-1)
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) if flat.is_floating_point() else None
        return {
            "tensor": {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "norm": norm if norm is not None and isfinite(norm) else None,
                "sha256": sha256(raw_bytes(flat)).hexdigest(),
            }
        }
    return {"text": _printable(repr(value))}


def _printable(text: str) -> str:
    """A text without what a terminal would obey, and not too long."""
    cleaned = "".join(letter for letter in text if letter.isprintable())
    return cleaned if len(cleaned) <= LONGEST else cleaned[: LONGEST - 1] + "…"


def _text(value: Any) -> str:
    match value:
        case {"slice": [start, stop, step]}:
            return repr(slice(start, stop, step))
        case {"tensor": {"shape": shape, "norm": norm, "sha256": digest}}:
            size = "" if norm is None else f", norm {norm:.4g}"
            return f"<{tuple(shape)}{size}, sha256 {digest[:8]}>"
        case {"text": text}:
            return f"<{text}>"
        case list():
            return repr(tuple(value))
    return repr(value)


# --------------------------------------------------------------------------------------------------------- active edits


class EditBlock(Protocol):
    """A block of `regard.edit`."""

    model: nn.Module
    edits: tuple[Any, ...]


ACTIVE: list[EditBlock] = []
"""The blocks of `regard.edit` that are open."""


class EditNotes:
    """Notes the active edits of a model in a capture's list, with each call that is recorded."""

    def __init__(self, model: nn.Module, edits: list[CapturedEdit]) -> None:
        self.model, self.edits = model, edits
        self._noted: dict[EditBlock, list[CapturedEdit]] = {}

    def count_call(self) -> None:
        """Count a recorded call for every edit that is active on the model, on a part of it, or on what it is in."""
        for block in list(ACTIVE):
            if block not in self._noted:
                parts = (self.model, block.model), (block.model, self.model)
                mine = any(module is one for one, other in parts for module in other.modules())
                self._noted[block] = []
                for edit in map(capture_edit, block.edits) if mine else ():
                    if edit not in self.edits:  # an earlier block may have put it there
                        self.edits.append(edit)
                    self._noted[block].append(self.edits[self.edits.index(edit)])
            for edit in self._noted[block]:
                edit.calls += 1


# ------------------------------------------------------------------------------------------------------------- in files


def pack_edit(edit: CapturedEdit) -> dict[str, Any]:
    """The JSON of an edit. Raises TypeError for what is none: `capture.edits` is a list."""
    if not isinstance(edit, CapturedEdit):
        raise TypeError(f"capture.edits holds the edits of `regard.edit` blocks, got {type(edit).__name__}")
    return {"function": edit.function, "values": [list(item) for item in edit.values.items()], "calls": edit.calls}


def unpack_edit(value: object, where: str) -> CapturedEdit:
    """The inverse of `pack_edit`. Raises ContentError for what is never written."""
    function, values, calls = json_fields(value, where, EDIT).values()
    if not (function.isascii() and function.isidentifier() and len(function) <= LONGEST) or calls < 0:
        raise ContentError(f"{where} cannot be {function!r:.80} in {calls} calls")
    for item in values:
        match item:
            case [str(name), value] if name.isascii() and name.isidentifier() and len(name) <= LONGEST:
                if _is_value(value):
                    continue
        raise ContentError(f"{where}: a value cannot be {reprlib.repr(item)}")
    return CapturedEdit(function, dict(values), calls)


def _is_value(value: object) -> bool:
    """Whether `_plain` can return this value."""
    match value:
        case None | bool():
            return True
        case int():
            return abs(value) < FARTHEST
        case float():
            return isfinite(value)
        case str():
            return _is_text(value)
        case list():
            return is_list_of(value, int) and len(value) <= MOST_POSITIONS and all(abs(n) < FARTHEST for n in value)
        case {"slice": [start, stop, step], **rest}:
            numbers = [item for item in (start, stop, step) if item is not None]
            return not rest and is_list_of(numbers, int) and all(abs(n) < FARTHEST for n in numbers)
        case {"text": str(text), **rest}:
            return not rest and _is_text(text)
        case {"tensor": dict(summary), **rest} if not rest:
            shape, dtype, norm, digest = json_fields(summary, "the tensor of an edit", TENSOR).values()
            sized = is_list_of(shape, int) and len(shape) <= 64 and min(shape, default=0) >= 0
            known = isinstance(getattr(torch, dtype, None), torch.dtype)
            number = norm is None or 0 <= norm < LARGEST
            return sized and known and number and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    return False


def _is_text(text: str) -> bool:
    return text.isprintable() and len(text) <= LONGEST


def pack_effect(effect: Effect) -> dict[str, Any]:
    """The JSON of an effect."""
    effect = capture_effect(effect)  # `capture.effects` is a list, to which a caller may have appended one
    packed: dict[str, Any] = {name: getattr(effect, name) for name in EFFECT}
    return packed | {"edit": [pack_edit(edit) for edit in effect.edit], "controls": list(effect.controls)}


def unpack_effect(value: object, where: str) -> Effect:
    """The inverse of `pack_effect`. Raises ContentError for what is never written."""
    effect = json_fields(value, where, EFFECT)
    edits, metric, method, controls = (effect[name] for name in ("edit", "metric", "method", "controls"))
    weights = [effect[name] for name in ("weight", "control_weight") if effect[name] is not None]
    numbers = [effect["before"], effect["after"], *weights, *controls]
    if not all(type(number) in (float, int) and abs(number) < LARGEST for number in numbers):
        raise ContentError(f"{where} has {reprlib.repr(numbers)}, not numbers")
    if not edits or not _is_text(metric) or method not in ("exact", "first order"):
        raise ContentError(f"{where} cannot be {method!r:.80} of {metric!r:.80} with {len(edits)} edits")
    return Effect(**effect | {"edit": tuple(unpack_edit(edit, where) for edit in edits), "controls": tuple(controls)})
