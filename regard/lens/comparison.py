"""`compare`: which edits, modules, masks and kernels of two captures differ, and by how much each head's measures do.

Modules are matched by path and calls by their number. Numbers are compared head by head: position by position where
both captures have as many, otherwise by their means; maps cell by cell where both have as many cells, received weights
where both have the same queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from regard import tables
from regard.lens.capture import Capture, Record
from regard.lens.doctor import merge_paths
from regard.lens.edit_records import CapturedEdit
from regard.lens.view import PER_QUERY, View, view_of
from regard.locale import Lang, check_lang, translate
from regard.masks.tiles import pool

BINS = 64  # of the received mass
MOST_SHOWN = 20  # changes in a table
MOST_HEADS = 10  # heads in a table
MOST_EDITS = 8  # of a capture, on its line
SIZES = "heads, queries × keys"

Table = tuple[list[str], list[list[str]], list[int]]
"""Headers, rows, and the columns that are right-aligned."""


@dataclass(frozen=True)
class _ChangedCall:
    path: str
    n: int

    @property
    def where(self) -> str:
        """The module, and the number of the call where it is not the first."""
        return (self.path or "(model)") + (f"[{self.n}]" if self.n else "")


@dataclass(frozen=True)
class Change(_ChangedCall):
    """How one measure of one call differs.

    Attributes:
        path: the module.
        n: number of the call.
        measure: "entropy" and such, "map", "received", or a pattern's name.
        heads: difference of each head, at least 0; infinite if only one of the two is a number.
        a: mean of each head in the first capture; empty for map and received, which are no single number.
        b: likewise in the second.
    """

    measure: str
    heads: tuple[float, ...]
    a: tuple[float, ...] = ()
    b: tuple[float, ...] = ()

    @property
    def head(self) -> int:
        """The head that differs most."""
        return max(range(len(self.heads)), key=self.heads.__getitem__)

    @property
    def largest(self) -> float:
        """How much that head differs."""
        return self.heads[self.head]

    @property
    def mean(self) -> float:
        """The mean difference of all heads."""
        return sum(self.heads) / len(self.heads)

    @property
    def strength(self) -> float:
        """The order of changes: shares as they are, nats and logits relative to 1 plus their size."""
        if self.measure not in PER_QUERY or not isfinite(self.largest):
            return self.largest
        return self.largest / (1 + max(abs(self.a[self.head]), abs(self.b[self.head])))


@dataclass(frozen=True)
class HeadChange(_ChangedCall):
    """How much of the attention of one head moved.

    Attributes:
        path: the module.
        n: number of the call.
        head: the head.
        moved: share of its attention that lies elsewhere, 0 to 1; of a pooled map, at least that.
    """

    head: int
    moved: float


@dataclass(frozen=True)
class Mismatch:
    """A mask, kernel, size or number of calls that differs."""

    what: str  # "mask", "kernel", "sizes" or "calls"
    path: str  # of the module
    n: int  # number of the call
    a: str  # the value in the first capture
    b: str  # the value in the second


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The result of `compare`. Prints as text, and as tables in a notebook; `text("ko")` is Korean.

    Attributes:
        modules: number of modules in both captures.
        only_a: paths of modules in the first only.
        only_b: paths of modules in the second only.
        unlike: masks, sizes, numbers of calls and kernels that differ, in call order.
        changes: measures that differ by more than the tolerance, the strongest first.
        compared: number of measures compared, over all calls.
        tolerance: difference up to which a measure counts as the same.
        heads: heads whose attention moved by more than the tolerance, the most first; by their maps, or by what keys
            received where a call has no maps to compare.
        edits: the edits that were active in each of the two.
    """

    modules: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    unlike: tuple[Mismatch, ...]
    changes: tuple[Change, ...]
    compared: int
    tolerance: float
    heads: tuple[HeadChange, ...] = ()
    edits: tuple[tuple[CapturedEdit, ...], tuple[CapturedEdit, ...]] = ((), ())

    @property
    def same(self) -> bool:
        """Whether attention was the same. A different kernel alone is not a difference."""
        return not (self.only_a or self.only_b or self.changes or any(u.what != "kernel" for u in self.unlike))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The changes as plain values, the strongest first."""
        return [
            {
                "path": c.path,
                "call": c.n,
                "measure": c.measure,
                "head": c.head,
                "a": c.a[c.head] if c.a else None,
                "b": c.b[c.head] if c.b else None,
                "difference": c.largest,
                "mean": c.mean,
                "heads": list(c.heads),
            }
            for c in self.changes
        ]

    def text(self, lang: Lang = "en") -> str:
        """All of it as text. Raises ValueError for a language other than "en" and "ko"."""
        check_lang(lang)
        above, shown, below = self._parts(lang)
        return "\n\n".join([*above, *(tables.text(*table) for table in shown), *below])

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        above, shown, below = self._parts("en")
        parts = [f"<p>{escape(line)}</p>" for line in above]
        parts += [tables.html(*table) for table in shown]
        return "\n".join(parts + [f"<p>{escape(line)}</p>" for line in below])

    def _parts(self, lang: Lang) -> tuple[list[str], list[Table], list[str]]:
        """Lines above the tables, the tables, and lines below."""
        title = "modules in both: {modules}, measures that differ: {changed} of {compared}{tolerance}"
        if self.same:
            title = "the same: modules compared: {modules}, measures: {compared}{tolerance}"
        tolerance = translate(" (tolerance {tolerance:g})", lang, tolerance=self.tolerance) if self.tolerance else ""
        counts = {"modules": self.modules, "compared": self.compared, "changed": len(self.changes)}
        above = [translate(title, lang, **counts, tolerance=tolerance)]
        for name, edits in zip("AB", self.edits, strict=True) if any(self.edits) else ():
            named = " + ".join(map(repr, edits[:MOST_EDITS])) + (" + …" if len(edits) > MOST_EDITS else "")
            text = "{capture} was edited by {edits}" if edits else "{capture} was not edited"
            above.append(translate(text, lang, capture=name, edits=named))
        for name, paths in (("A", self.only_a), ("B", self.only_b)):
            if paths:
                above.append(translate("only in {capture}: {paths}", lang, capture=name, paths=merge_paths(paths)))

        alike: dict[tuple[str, str, str], list[str]] = {}  # layers that differ in the same way share a line
        for u in self.unlike:
            alike.setdefault((u.what, u.a, u.b), []).append(u.path)
        mismatches = [
            [translate(SIZES if what == "sizes" else what, lang), merge_paths(paths), a, b]
            for (what, a, b), paths in alike.items()
        ]
        changes = []
        for c in self.changes[:MOST_SHOWN]:
            a, b = (tables.number(values[c.head]) if values else "" for values in (c.a, c.b))
            changes.append([c.where, c.measure, str(c.head), a, b, tables.number(c.largest), tables.number(c.mean)])

        heads = [[h.where, str(h.head), tables.number(h.moved)] for h in self.heads[:MOST_HEADS]]

        below = []
        if (more := len(self.changes) - MOST_SHOWN) > 0:
            below.append(translate("… and {more} more", lang, more=more))
        if self.changes:
            note = (
                "difference: of the head that differs most, the mean over its queries of |A − B|; of map and received, "
                "the share of attention that moved"
            )
            below.append(translate(note, lang))
        shown = [
            (translate("what|where|A|B", lang).split("|"), mismatches, list[int]()),
            (translate("where|head|attention that moved", lang).split("|"), heads, [1, 2]),
            (translate("where|measure|head|A|B|difference|mean of heads", lang).split("|"), changes, [2, 3, 4, 5, 6]),
        ]
        return above, [table for table in shown if table[1]], below


def compare(a: Capture, b: Capture, *, tolerance: float = 0.0) -> Comparison:
    """Compare two captures: of one model on two inputs or with two kernels, or of two models with the same paths.

    Args:
        a: the first capture.
        b: the second capture.
        tolerance: difference up to which a measure counts as the same; kernels that round differently need a little.

    Raises:
        TypeError: for an argument that is no capture.
        ValueError: for a negative tolerance.
        LookupError: for a capture in which nothing was seen.

    Example:
        >>> import torch, regard
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with regard.watch(layer) as seen:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> print(regard.compare(seen, seen))
        the same: modules compared: 1, measures: 10
    """
    for name, capture in (("a", a), ("b", b)):
        if not isinstance(capture, Capture):
            raise TypeError(f"{name} must be a capture, as watch and open give it; got {type(capture).__name__}")
        if not capture.names:
            raise LookupError(f"no attention was seen in {name}, {capture!r}: there is nothing to compare")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    a_names, b_names = a.names, b.names
    both = [path for path in a_names if path in b]
    unlike: list[Mismatch] = []
    changes: list[Change] = []
    for path in both:
        calls = a.calls(path), b.calls(path)
        if len(calls[0]) != len(calls[1]):
            unlike.append(Mismatch("calls", path, 0, str(len(calls[0])), str(len(calls[1]))))
        for one, other in zip(*calls, strict=False):
            described = []
            for record in (one, other):
                batch, heads, nq, nk = view_of(record).sizes
                sizes = (f"{batch} × " if batch > 1 else "") + f"{heads}, {nq} × {nk}"
                described.append((record.facts.mask if record.facts is not None else "", sizes, record.kernel))
            pairs = zip(("mask", "sizes", "kernel"), *described, strict=True)
            unlike += [Mismatch(what, path, one.n, x, y) for what, x, y in pairs if x != y]
            changes += _changes(one, other)
    differing = sorted((c for c in changes if not c.largest <= tolerance), key=lambda c: -c.strength)
    moved = {(c.path, c.n): c for measure in ("received", "map") for c in changes if c.measure == measure}
    ranked = [HeadChange(c.path, c.n, h, share) for c in moved.values() for h, share in enumerate(c.heads)]
    return Comparison(
        modules=len(both),
        only_a=tuple(path for path in a_names if path not in b),
        only_b=tuple(path for path in b_names if path not in a),
        unlike=tuple(unlike),
        changes=tuple(differing),
        compared=len(changes),
        tolerance=tolerance,
        heads=tuple(sorted((h for h in ranked if not h.moved <= tolerance), key=lambda h: -h.moved)),
        edits=(tuple(a.edits), tuple(b.edits)),
    )


def _changes(a: Record, b: Record) -> list[Change]:
    """Every measure that both calls have; none where they have not the same heads."""
    one, other = views = view_of(a), view_of(b)
    if one.sizes[1] != other.sizes[1] or 0 in (*one.sizes, *other.sizes):
        return []
    measures = [n for n in PER_QUERY if all(n in view.held or f"mean {n}" in view.held for view in views)]
    measures += [n.removeprefix("pattern ") for n in one.held if n.startswith("pattern ") and n in other.held]
    changes = [_change(a, name, one, other) for name in measures]
    if all("map" in view.held for view in views) and one.held["map"].shape[2:] == other.held["map"].shape[2:]:
        x, y = _alike(one.held["map"], other.held["map"])
        changes.append(Change(a.path, a.n, "map", _per_head(_gap(x, y).sum(-1).mean(-1) / 2)))
    if all("received" in view.held for view in views) and one.sizes[2:] == other.sizes[2:]:
        x, y = _alike(_shares(one.held["received"]), _shares(other.held["received"]))
        changes.append(Change(a.path, a.n, "received", _per_head(_gap(x, y).sum(-1) / 2)))
    return changes


def _change(record: Record, measure: str, a: View, b: View) -> Change:
    """The difference of a measure by query, position by position where it can be, or of a pattern's score."""
    x, y = (v.per_head(measure).detach().double().cpu() for v in (a, b))  # (B, H)
    same_places = measure in PER_QUERY and (measure in a.pooled) == (measure in b.pooled)
    p, q = (v.held.get(measure) for v in (a, b))
    if same_places and p is not None and q is not None and p.shape == q.shape:
        gap = _gap(p.double().cpu(), q.double().cpu()).mean(-1)
    else:
        gap = _gap(*_alike(x, y))
    means = (tuple(values.mean(0).tolist()) for values in (x, y))
    return Change(record.path, record.n, measure, _per_head(gap), *means)


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp64 on the CPU, and as means over batch rows if they differ in their number."""
    a, b = a.double().cpu(), b.double().cpu()
    return (a, b) if a.shape[0] == b.shape[0] else (a.mean(0, keepdim=True), b.mean(0, keepdim=True))


def _shares(received: Tensor) -> Tensor:
    """(B, H, Nk) → the share of all attention that each of at most 64 parts of the keys gets."""
    pooled = pool(received, BINS).double()
    return pooled / pooled.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """|a − b|, 0 where both are NaN or the same infinity, and infinite where one of them is."""
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return torch.where(gap.isnan(), inf, gap)


def _per_head(gap: Tensor) -> tuple[float, ...]:
    return tuple(gap.mean(0).tolist())  # (B, H) → the mean over batch rows
