"""What one attention call did: its output, measures of every head, and exact weights on demand.

A view holds what was measured, small arrays only. Whatever else is asked for is computed from q and k, if they are
there: always after `look`, after `watch` where `keep="qk"` was asked for.

It does not know how calls are made or caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.lens import engines, patterns
from regard.lens.checking import Report, judge
from regard.lens.measures import MAP_SIZE, NAMES, TOP, Wanted
from regard.lens.weights import Given, Remembered, Weights

__all__ = ["Place", "Told", "Tokens", "Top", "View"]

PER_QUERY = ("lse", "entropy", "max_logit", "effective")
CHECK_CELLS = 1 << 24  # weights held at once while rows are checked


@dataclass(frozen=True)
class Top:
    """The strongest links of each row: what `View.top` gives.

    index: (…, H, Nq, k) keys, strongest first, the lower key first among equals; −1 beyond what is visible.
    weight: (…, H, Nq, k) their weights, 0 there.
    tied: (…, H, Nq) whether a key that was left out weighs as much as the last one taken.
    """

    index: Any
    weight: Any
    tied: Any


class Place(Protocol):
    """How a call's queries stand among its keys: `regard.lens.sight.Sight`, or what a file says of it."""

    @property
    def visible(self) -> Tensor | None:
        """(B or 1, H or 1, Nq) keys each query sees."""

    @property
    def padding(self) -> Tensor | None:
        """(B or 1, Nk) True for padding."""

    @property
    def offset(self) -> Tensor | int | None:
        """The position of query 0, where it is not Nk − Nq."""


@dataclass(frozen=True)
class Told:
    """A `Place` whose parts are known already."""

    visible: Tensor | None = None
    padding: Tensor | None = None
    offset: Tensor | int | None = None


@dataclass(frozen=True)
class Tokens:
    """What is known of the tokens that a call's keys stand for.

    ids: (B or 1, Nk) token numbers.  delimiters: (B or 1, Nk) True for full stops, [SEP] and the like.
    """

    ids: Tensor | None = None
    delimiters: Tensor | None = None


@dataclass(repr=False)
class View:
    """One attention call seen from all sides. Arrays are of the inputs' kind, with leading axes (…, H) as the queries'.

    `output`, `lse`, `max_logit`, `entropy`, `effective` (…, H, Nq); `received` (…, H, Nk); `map(size)`, `top(k)`;
    exact weights by `row`, `column`, `tile`; `patterns()`, `mean(name)` per head, `check()`.
    """

    sizes: tuple[int, int, int, int]  # B, H, Nq, Nk
    held: dict[str, Tensor]
    given_output: Any = None
    weights: Weights | None = None
    kind: str = "self"
    place: Place = Told()
    tokens: Tokens = Tokens()
    size: int = MAP_SIZE  # of the map that is held
    lead: tuple[int, ...] | None = None  # the queries' axes before N, where they are not (B, H)
    numpy: bool = False
    engine: str = ""
    pooled: tuple[str, ...] = ()  # measures whose positions were averaged into bins

    # ------------------------------------------------------------------------------------------------------- measures

    @property
    def output(self) -> Any:
        """The result of the attention itself. Raises LookupError where it was not kept."""
        if self.given_output is None:
            raise LookupError("the output was not kept: watch(model, keep='output') keeps it")
        return self.given_output

    @property
    def lse(self) -> Any:
        """(…, H, Nq) natural log of each row's sum of exponentials; −∞ for a row that sees nothing."""
        return self._give(self._held("lse"))

    @property
    def entropy(self) -> Any:
        """(…, H, Nq) −Σ p ln p in nats, a sink counted as one more key; 0 for a row that sees nothing."""
        return self._give(self._held("entropy"))

    @property
    def max_logit(self) -> Any:
        """(…, H, Nq) the largest visible score; −∞ for a row that sees nothing."""
        return self._give(self._held("max_logit"))

    @property
    def effective(self) -> Any:
        """(…, H, Nq) 1/Σp², how many keys a row spreads over, a sink counted as one more; 0 where it sees nothing."""
        return self._give(self._held("effective"))

    @property
    def received(self) -> Any:
        """(…, H, Nk) Σ p over the queries: what each key gets from all of them."""
        return self._give(self._held("received"))

    def map(self, size: int = MAP_SIZE) -> Any:
        """Weights pooled to at most size × size cells, (…, H, cells, cells); with N ≤ size they are exact.

        A cell is the sum over its queries and keys, divided by the number of its queries: a row of cells sums to 1.
        Raises LookupError where another size was measured and q and k were not kept.
        """
        _at_least_one("size", size)
        fits = [min(size, n) == min(self.size, n) for n in self.sizes[2:]]
        if "map" in self.held and all(fits):
            return self._give(self.held["map"])
        hint = f"; this view holds map({self.size})" if "map" in self.held else ""
        return self._give(self._measure("map", f"a map of size {size}", hint, size=size)["map"])

    def top(self, k: int = TOP) -> Top:
        """The k strongest links of each row, exact. Raises LookupError where fewer were measured and q, k not kept."""
        _at_least_one("k", k)
        held = self.held.get("top_key")
        have = -1 if held is None else held.shape[-1]
        if held is not None and have >= min(k, self.sizes[3]) and k <= have:
            found = self.held
        else:
            hint = f"; this view holds top({have})" if have > 0 else ""
            found = self._measure("top", f"the {k} strongest links of each row", hint, top=k)
        key, weight = found["top_key"][..., :k], found["top_weight"][..., :k]
        tied = found["top_tied"]
        if key.shape[-1] < found["top_key"].shape[-1]:  # fewer than were measured: the next one is known
            after = found["top_weight"][..., k]
            tied = (after == weight[..., -1]) & (after > 0)
        return Top(self._give(key), self._give(weight), self._give(tied))

    def how(self, name: str) -> str:
        """ "exact" or "pooled": whether a measure's numbers stand for single positions.

        >>> import torch, regard
        >>> x = torch.zeros(100, 4)
        >>> view = regard.look(x, x, x)
        >>> view.how("entropy"), view.how("map")
        ('exact', 'pooled')
        """
        if name == "map":
            return "exact" if max(self.sizes[2:]) <= self.size else "pooled"
        return "pooled" if name in self.pooled else "exact"

    def mean(self, name: str) -> Any:
        """One number per head, (…, H): a measure's mean over the queries that are neither padding nor see nothing.

        name: "entropy", "effective", "max_logit" or "lse".
        """
        if name not in PER_QUERY:
            raise ValueError(f"mean is over queries: one of {', '.join(PER_QUERY)}; got {name!r}")
        values = self._held(name)
        counted = self._real_rows(values.device)
        if "lse" in self.held and self.held["lse"].shape == values.shape:
            counted = counted & (self.held["lse"] > -inf)
        if values.shape[-1] != counted.shape[-1]:  # pooled into bins
            return self._give(values.mean(-1))
        total = torch.where(counted, values, 0.0).sum(-1)
        return self._give(total / counted.expand_as(values).sum(-1).clamp(min=1))

    def patterns(self) -> dict[str, Any]:
        """Name → (…, H) in [0, 1]: how far each head follows a pattern, see `regard.lens.patterns`.

        Raises LookupError if they were not measured and q and k were not kept.
        """
        found = {name.removeprefix("pattern "): t for name, t in self.held.items() if name.startswith("pattern ")}
        if not found:
            found = self.score_patterns()
        return {name: self._give(values) for name, values in found.items()}

    def score_patterns(self) -> dict[str, Tensor]:
        """The pattern scores as tensors (B, H), from exact weights."""
        weights, place, tokens = self._exact("patterns"), self.place, self.tokens
        visible = place.visible
        if visible is not None and isinstance(weights, Remembered) and weights.call.sinks is not None:
            visible = visible + 1
        among_keys = self.kind == "self"
        return patterns.score(
            weights,
            kind=self.kind,
            entropy=self._held("entropy") if visible is not None else None,
            visible=visible,
            received=self._held("received") if tokens.delimiters is not None else None,
            offset=place.offset if among_keys else None,
            padding=place.padding,
            ids=tokens.ids if among_keys else None,
            delimiters=tokens.delimiters,
        )

    # --------------------------------------------------------------------------------------------------- exact weights

    def row(self, i: int) -> Any:
        """The exact weights of query i over all keys, (…, H, Nk). Negative i counts from the end."""
        i = _index("row", i, self.sizes[2], "queries")
        return self._give(self._exact("row").tile(slice(i, i + 1), slice(None))[:, :, 0])

    def column(self, j: int) -> Any:
        """The exact weights that key j gets from all queries, (…, H, Nq)."""
        j = _index("column", j, self.sizes[3], "keys")
        return self._give(self._exact("column").tile(slice(None), slice(j, j + 1))[..., 0])

    def tile(self, rows: slice | range | Sequence[int], cols: slice | range | Sequence[int]) -> Any:
        """The exact weights of these queries and keys, (…, H, rows, columns). As many as you ask for are made."""
        r, c = _part("rows", rows, self.sizes[2]), _part("cols", cols, self.sizes[3])
        return self._give(self._exact("tile").tile(r, c))

    def check(self) -> Report:
        """Look at every row, a few at a time: does it sum to 1 (or to 0), is anything NaN or infinite.

        Raises LookupError if q and k were not kept.
        """
        weights, (batch, heads, nq, nk) = self._exact("check"), self.sizes
        at_once = max(1, CHECK_CELLS // max(1, batch * heads * nk))
        ends = []
        for i in range(0, nq, at_once):
            p = weights.tile(slice(i, min(i + at_once, nq)), slice(None))  # (B, H, rows, Nk)
            low, high = p.aminmax(dim=-1) if nk else (p.sum(-1), p.sum(-1))
            ends.append(torch.stack([low, high, p.sum(-1)]).double().cpu())
        whole = torch.cat(ends, -1) if ends else torch.zeros(3, batch, heads, 0, dtype=torch.float64)
        low, high, total = (x.reshape(*(self.lead or (batch, heads)), nq).numpy() for x in whole)
        sinks = isinstance(weights, Remembered) and weights.call.sinks is not None
        return judge(low, high, total, tolerance=self._rounding(weights), sinks=sinks)

    def _rounding(self, weights: Weights) -> float:
        """What rounding alone may do to a row's sum: of the sum itself, and of lse and the scores in e^(s − lse)."""
        wide = self.held["lse"].dtype if "lse" in self.held else torch.float32
        eps = torch.finfo(wide).eps
        if not isinstance(weights, Remembered):
            return float(torch.finfo(weights.weights.dtype).eps if isinstance(weights, Given) else eps) + (
                eps * self.sizes[3]
            )
        finite = weights.lse[weights.lse.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        return eps * (self.sizes[3] + 16 * max(1.0, largest))

    # ------------------------------------------------------------------------------------------------------- plumbing

    def _held(self, name: str) -> Tensor:
        if name not in self.held:
            if name == "lse" or name not in NAMES:
                raise LookupError(f"this view holds no {name}")
            self.held[name] = self._measure(name, name, "")[name]
        return self.held[name]

    def _measure(self, name: str, what: str, hint: str, size: int = MAP_SIZE, top: int = TOP) -> dict[str, Tensor]:
        """One more pass for what was not measured."""
        return engines.measure_weights(self._exact(what, hint), Wanted(frozenset([name]), size, top))

    def _exact(self, what: str, hint: str = "") -> Weights:
        if self.weights is None:
            raise LookupError(
                f"{what} needs q and k, which were not kept{hint}: watch(model, keep='qk') keeps them, and "
                f"measures=[…] measures more while the model runs"
            )
        return self.weights

    def _real_rows(self, device: torch.device) -> Tensor:
        """(B or 1, 1, Nq): which queries are no padding."""
        _, _, nq, nk = self.sizes
        padding, offset = self.place.padding, self.place.offset
        if padding is None or self.kind == "cross" or isinstance(offset, Tensor):
            return torch.ones(1, 1, nq, dtype=torch.bool, device=device)
        at = torch.arange(nq, device=device) + (nk - nq if offset is None else offset)
        inside = (at >= 0) & (at < nk)
        return ~(padding.to(device)[:, at.clamp(0, max(0, nk - 1))] & inside).unsqueeze(1)

    def _give(self, x: Tensor) -> Any:
        """A tensor (B, H, …) as the caller's kind of array, with the caller's leading axes."""
        if self.lead is not None:
            x = x.reshape(*self.lead, *x.shape[2:])
        return x.detach().cpu().numpy() if self.numpy else x

    def __repr__(self) -> str:
        batch, heads, nq, nk = self.sizes
        exact = "exact rows at hand" if self.weights is not None else "no q and k kept"
        names = [n for n in ("lse", *NAMES) if n in self.held or (n == "top" and "top_key" in self.held)]
        return f"View({batch} × {heads} heads, {nq} queries, {nk} keys; {', '.join(names)}; {exact})"

    def moved(self, device: str | torch.device) -> View:
        """The same view with its measures on another device; q and k stay where they are."""
        return replace(self, held={name: t.to(device) for name, t in self.held.items()})


def _index(name: str, value: object, n: int, of: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} takes an integer, got {type(value).__name__}: {value!r}")
    if not -n <= value < n:
        raise IndexError(f"{name} {value} is out of range: there are {n} {of}")
    return int(value) % n


def _part(name: str, value: object, n: int) -> slice | Tensor:
    if isinstance(value, range):
        value = list(value)
    if isinstance(value, slice):
        start, stop, step = value.indices(n)
        return slice(start, max(start, stop)) if step == 1 else torch.arange(start, stop, step)
    if isinstance(value, (list, tuple, np.ndarray, Tensor)):
        return torch.tensor([_index(name, int(v), n, name) for v in value], dtype=torch.long)
    raise TypeError(f"{name} must be a slice, a range or integers, got {type(value).__name__}")


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
