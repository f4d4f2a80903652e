"""What the queries of one call see: how many keys, which keys are padding, where they stand. Counted when asked for.

    >>> from regard import masks
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(2, 1, 3, 4)
    >>> seen = see(prepare(x, x, x, mask=masks.causal() & masks.padding([2, 3])))
    >>> seen.visible.tolist(), seen.padding.int().tolist()
    ([[[1, 2, 2]], [[1, 2, 3]]], [[0, 0, 1], [0, 0, 0]])

No mask, causal masks and windows of one offset for all cost next to nothing here.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys).

It does not know weights or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.diagnosing.bias_kinds import THRESHOLD, BiasKind, hiding_numbers, kind_of
from regard.lens.diagnosing.mask_names import Traced, trace
from regard.lens.diagnosing.visibility import Visible, band_counts, conjuncts, survey
from regard.masks import Causal, Mask
from regard.masks.placed import Placed
from regard.rules import Number

__all__ = ["Sight", "see", "visible_counts"]


@dataclass(frozen=True, eq=False)
class Sight:
    """What a call's queries see.

    nq, nk: how many queries and keys.
    mask: as in the call.
    hiding: numbers (B or 1, H or 1, Nq or 1, Nk or 1) that are added to the scores and hide; None without.
    kind: "self" or "cross".
    bias_kind, bias_from: what the bias does, as `bias_kinds.kind_of` says.
    """

    nq: int
    nk: int
    device: torch.device
    mask: Mask | None = None
    hiding: Tensor | None = None
    kind: str = "self"
    bias_kind: BiasKind | None = None
    bias_from: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("self", "cross"):
            raise ValueError(f"kind must be 'self' or 'cross', got {self.kind!r}")

    @cached_property
    def visible(self) -> Tensor:
        """(B or 1, H or 1, Nq) keys that take part in each row's softmax; a sink is not counted."""
        if self._is_band:
            return band_counts(self.mask, self.nq, self.nk, self.device)
        return self.survey.counts + self.survey.unhidden

    @cached_property
    def padding(self) -> Tensor | None:
        """(B or 1, Nk) booleans, True for keys of a batch row that no query sees; None where there are none."""
        if self._is_band:
            return None
        return self.traced.padding if bool(self.traced.padding.any()) else None

    @cached_property
    def offset(self) -> Number | None:
        """The position of query 0, from the mask; None where that is Nk − Nq, and in cross-attention."""
        if self.kind == "cross":
            return None
        placed = [part for part in conjuncts(self.mask) if isinstance(part, Placed)]
        if placed or self._is_band:
            return next((part.offset for part in placed if part.offset is not None), None)
        return self.traced.outline(self.nq, self.nk).offset

    @cached_property
    def survey(self) -> Visible:
        """Everything there is to count."""
        return survey(self.mask, self.hiding, THRESHOLD.get(self.bias_kind, -inf), self.nq, self.nk, self.device)

    @cached_property
    def traced(self) -> Traced:
        """The band that the mask follows, and its padding, still on the device."""
        return trace(self.survey, self.kind)

    @property
    def causal(self) -> Causal | None:
        """The causal rule that is a part of the mask, if one is."""
        return next((part for part in conjuncts(self.mask) if isinstance(part, Causal)), None)

    @property
    def _is_band(self) -> bool:
        return self.hiding is None and (self.mask is None or self.mask.band(self.nq, self.nk) is not None)


def see(call: Call, kind: str = "self") -> Sight:
    """What a call's queries see.

    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> see(prepare(x, x, x, bias=torch.full((3, 3), -1e9).triu(1))).visible.tolist()
    [[[1, 2, 3]]]

    call: as `regard.backends.call.prepare` gives it.
    kind: "self", or "cross", where queries have no place among the keys. Raises ValueError for another.
    """
    _, _, nq, nk = call.sizes
    bias_kind, bias_from = kind_of(call.bias)
    hiding = hiding_numbers(call.bias, bias_kind)
    return Sight(nq, nk, call.device, call.mask, hiding, kind, bias_kind, bias_from)


def visible_counts(call: Call) -> Tensor:
    """How many keys take part in each row's softmax, (B or 1, H or 1, Nq); a sink is not counted.

    >>> from regard import masks
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> visible_counts(prepare(x, x, x, mask=masks.window(1, 0))).tolist()
    [[[1, 2, 2, 2]]]
    """
    return see(call).visible
