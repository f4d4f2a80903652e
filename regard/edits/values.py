"""Edits of attention as values: what to change, where. `regard.edit` applies them.

>>> from regard import edits
>>> edits.knock_out(layer=3, head=1, queries=9, keys=2) + edits.ablate(layer=4, head=0)
knock_out(layer=3, head=1, queries=9, keys=2) + ablate(layer=4, head=0)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from regard.lens.capture import Capture
from regard.masks import Mask

if TYPE_CHECKING:
    from regard.edits.survey import Survey

__all__ = [
    "Ablate",
    "Add",
    "Edit",
    "Edits",
    "KnockOut",
    "Patch",
    "ZeroValues",
    "ablate",
    "add",
    "knock_out",
    "patch",
    "zero_values",
]

Layer = int | str | None
Head = int | tuple[int, ...] | None
Positions = int | slice | tuple[int, ...] | None
"""Which positions of the sequence: one, a slice, several, or None for all. Negative ones count from the end."""

PARTS = ("q", "k", "v", "output")


@dataclass(frozen=True, eq=False)
class Edit:
    """One change of a model's attention. Edits are compared by value and combined with `+`."""

    def __eq__(self, other: object) -> bool:
        def equal(a: Any, b: Any) -> bool:
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                return a is b or bool(torch.equal(a, b))
            return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))

        return type(self) is type(other) and all(equal(a, getattr(other, name)) for name, a in vars(self).items())

    def __hash__(self) -> int:  # tensors and slices have none by value
        return hash((type(self), *(x for x in vars(self).values() if isinstance(x, (str, int, float, tuple)))))

    def __add__(self, other: Edit | Edits) -> Edits:
        return Edits((self,)) + other

    def __iter__(self) -> Iterator[Edit]:
        yield self

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                shown.append(f"{field.name}=<{tuple(value.shape)}>")
            elif isinstance(value, Capture) or hasattr(type(value), "outputs"):  # a survey
                shown.append(f"{field.name}=<{value!r}>")
            elif value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{self.function}({', '.join(shown)})"

    @property
    def function(self) -> str:
        """The name of the function that makes it."""
        return {"KnockOut": "knock_out", "ZeroValues": "zero_values"}.get(
            type(self).__name__, type(self).__name__.lower()
        )


@dataclass(frozen=True, repr=False)
class Edits:
    """Several edits, applied together."""

    edits: tuple[Edit, ...]

    def __add__(self, other: Edit | Edits) -> Edits:
        return Edits((*self.edits, *other)) if isinstance(other, (Edit, Edits)) else NotImplemented

    def __iter__(self) -> Iterator[Edit]:
        return iter(self.edits)

    def __len__(self) -> int:
        return len(self.edits)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.edits))


@dataclass(frozen=True, repr=False, eq=False)
class KnockOut(Edit):
    """See `knock_out`."""

    layer: Layer = None
    head: Head = None
    queries: Positions = None
    keys: Positions = None
    edges: Mask | None = None
    renormalise: bool = True


@dataclass(frozen=True, repr=False, eq=False)
class Ablate(Edit):
    """See `ablate`."""

    layer: Layer = None
    head: Head = None
    by: Literal["zero", "mean"] | Tensor | Capture | Survey = "zero"
    queries: Positions = None


@dataclass(frozen=True, repr=False, eq=False)
class ZeroValues(Edit):
    """See `zero_values`."""

    layer: Layer = None
    head: Head = None
    keys: Positions = None


@dataclass(frozen=True, repr=False, eq=False)
class Patch(Edit):
    """See `patch`."""

    layer: Layer = None
    head: Head = None
    part: Literal["q", "k", "v", "output"] = "output"
    source: Tensor | Capture | None = None
    positions: Positions = None


@dataclass(frozen=True, repr=False, eq=False)
class Add(Edit):
    """See `add`."""

    path: str = ""
    vector: Tensor | None = None
    scale: float = 1.0
    positions: Positions = None


def knock_out(
    layer: int | str | None = None,
    head: int | Sequence[int] | None = None,
    queries: int | slice | Sequence[int] | None = None,
    keys: int | slice | Sequence[int] | None = None,
    *,
    edges: Mask | None = None,
    renormalise: bool = True,
) -> KnockOut:
    """Hide keys from queries, as if the mask had hidden them.

    >>> knock_out(layer=3, head=1, queries=9, keys=[2, 3])
    knock_out(layer=3, head=1, queries=9, keys=(2, 3))

    Args:
        layer: a number in the order of calls, as in `capture[i]`, or a module path; default every layer. A negative
            number counts from the end, for `regard.effect` alone: it knows how many layers there are.
        head: a query head or several; default every head.
        queries: positions that no longer see `keys`: an int, a slice or several; default all.
        keys: positions that are hidden; default all.
        edges: a mask instead of queries and keys, True where an edge is knocked out; for a whole call, not for steps of
            a generation.
        renormalise: the remaining weights grow to sum to 1, as after a mask; False leaves them as they are.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: both edges and positions are given, or neither.
    """
    if edges is not None and not isinstance(edges, Mask):
        raise TypeError(f"edges must be a mask of regard.masks, got {type(edges).__name__}")
    if (edges is None) == (queries is None and keys is None):
        raise ValueError("knock_out takes queries and keys, or edges; got " + ("neither" if edges is None else "both"))
    where = _layer(layer), _heads(head)
    return KnockOut(*where, _positions("queries", queries), _positions("keys", keys), edges, bool(renormalise))


def ablate(
    layer: int | str | None = None,
    head: int | Sequence[int] | None = None,
    by: str | Tensor | Capture | Survey = "zero",
    *,
    queries: int | slice | Sequence[int] | None = None,
) -> Ablate:
    """Replace what heads hand on: their output before the output projection.

    >>> ablate(layer=3, head=1, by="mean")
    ablate(layer=3, head=1, by='mean')

    Args:
        layer: as for `knock_out`.
        head: as for `knock_out`.
        by: "zero"; "mean", the head's mean over the positions of this call; a survey with the measure "output", for
            its mean over a corpus; a tensor that broadcasts to (B, heads, N, Dv); or a capture of another run, made by
            `watch(keep="output")`.
        queries: the positions whose output is replaced; default all.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: another `by`.
        LookupError: a survey without the measure "output".
    """
    if isinstance(by, str) and by not in ("zero", "mean"):
        raise ValueError(f"by must be 'zero', 'mean', a survey, a tensor or a capture, got {by!r}")
    # A survey is known by what it has: importing its class would take all models along.
    if not isinstance(by, (str, Tensor, Capture)) and not isinstance(getattr(by, "outputs", None), Mapping):
        raise TypeError(f"by must be 'zero', 'mean', a survey, a tensor or a capture, got {type(by).__name__}")
    return Ablate(_layer(layer), _heads(head), by, _positions("queries", queries))  # type: ignore[arg-type]


def zero_values(
    layer: int | str | None = None,
    head: int | Sequence[int] | None = None,
    keys: int | slice | Sequence[int] | None = None,
) -> ZeroValues:
    """Set the values of keys to 0 for these heads: weights stay, nothing is handed over (value zeroing).

    >>> zero_values(layer=0, keys=3)
    zero_values(layer=0, keys=3)

    Args:
        layer: as for `knock_out`.
        head: as for `knock_out`. Where query heads share a key head, only the named query heads read zeros.
        keys: positions whose values are 0; default all.

    Raises:
        TypeError: an argument has the wrong type.
    """
    return ZeroValues(_layer(layer), _heads(head), _positions("keys", keys))


def patch(
    layer: int | str | None = None,
    head: int | Sequence[int] | None = None,
    part: str = "output",
    source: Tensor | Capture | None = None,
    *,
    positions: int | slice | Sequence[int] | None = None,
) -> Patch:
    """Replace q, k, v or the output of heads by those of another run (activation patching).

    >>> import torch
    >>> patch(layer=2, head=0, part="v", source=torch.zeros(1, 1, 7, 4))
    patch(layer=2, head=0, part='v', source=<(1, 1, 7, 4)>)

    Args:
        layer: as for `knock_out`.
        head: as for `knock_out`.
        part: "q", "k", "v" or "output" (before the output projection).
        source: a capture of the other run, made by `watch(keep=["qk", "v", "output"])` as far as needed, or a tensor
            that broadcasts to (B, heads, N, D).
        positions: where to patch; default everywhere. The other run must have as many positions.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such part.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
    if not isinstance(source, (Tensor, Capture)):
        raise TypeError(f"source must be a capture or a tensor, got {type(source).__name__}")
    return Patch(_layer(layer), _heads(head), part, source, _positions("positions", positions))  # type: ignore[arg-type]


def add(
    path: str,
    vector: Tensor,
    scale: float = 1.0,
    *,
    positions: int | slice | Sequence[int] | None = None,
) -> Add:
    """Add a vector to what a module returns (a steering vector on the residual stream).

    >>> import torch
    >>> add("layers.3", torch.zeros(8), scale=2.0)
    add(path='layers.3', vector=<(8,)>, scale=2.0)

    Args:
        path: the module, as in `model.named_modules()`.
        vector: (d_model,), or what broadcasts to the module's output.
        scale: factor of the vector.
        positions: where to add it, counted from the beginning of the text; default everywhere.

    Raises:
        TypeError: an argument has the wrong type.
    """
    if not isinstance(path, str) or not isinstance(vector, Tensor):
        raise TypeError(f"add takes a module path and a tensor, got {type(path).__name__} and {type(vector).__name__}")
    return Add(path, vector, float(scale), _positions("positions", positions))


# -------------------------------------------------------------------------------------------------------------- checks


def _layer(layer: object) -> Layer:
    if layer is None or isinstance(layer, str) or (isinstance(layer, int) and not isinstance(layer, bool)):
        return layer
    raise TypeError(f"layer must be a number as in capture[i], a module path or None; got {type(layer).__name__}")


def _heads(head: Any) -> Head:
    if head is None:
        return None
    heads = [head] if isinstance(head, int) else head
    whole = isinstance(heads, Sequence) and all(isinstance(h, int) and not isinstance(h, bool) for h in heads)
    if not whole or not heads or min(heads) < 0:
        raise TypeError(f"head must be a head's number, from 0, or several in a list; got {head!r}")
    return int(heads[0]) if len(heads) == 1 else tuple(heads)


def _positions(name: str, value: object) -> Positions:
    if isinstance(value, Tensor):
        value = value.tolist()
    if value is None or isinstance(value, slice) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(at, int) for at in value):
        if not value:
            raise ValueError(f"{name} is empty; leave it out for all positions")
        return tuple(value)
    raise TypeError(f"{name} must be positions: an int, a slice or several ints; got {value!r}")
