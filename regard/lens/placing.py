"""Layouts that are given for a capture: read, checked against the calls, and cut to the call that is looked at.

    >>> vit = read_layouts(Sides.patches(32, patch=16))
    >>> fit_layouts(vit, {"attn": [Run("self", ((2, 3, 5, 5),), (0,))]})["attn"][0].keys
    Layout(1 cls, 4 patches of picture 0)

In generation the layouts are those of the prompt, or of all tokens at the end; what a run adds to a prompt is text.

Axis letters: B batch, of E entries cut into W sequences each; H heads, N positions (Nq queries, Nk keys).

It does not know views, nor what is done with a layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regard.layouts import Layout, Sides

__all__ = ["NOWHERE", "GivenLayouts", "Placed", "Run", "fit_layouts", "read_layouts"]

Sizes = tuple[int, int, int, int]

GivenLayouts = dict[str | None, tuple[Sides, ...]]
"""Layouts by path, or under None those for all paths."""

HOW = (
    "say what its tokens are, with regard.layouts: seen.layouts = Sides.patches(224, patch=16) for a ViT, "
    "or {path: Sides(queries, keys, frames)}; watch(model, layouts=…) takes the same"
)


@dataclass(frozen=True)
class Placed:
    """What a view knows of its tokens: the module's path, their layouts and their words.

    sides: one for all batch entries, or one for each; none where they were not given or do not fit, as `lacking` says.
    words: a row for each batch entry, or one for all.
    """

    path: str = ""
    sides: tuple[Sides, ...] = ()
    words: Sequence[Sequence[str]] | None = None
    lacking: str = f"it is not known where the tokens of this attention lie: {HOW}"

    @property
    def windows(self) -> int:
        """W."""
        return self.sides[0].queries.shape[0]

    def entry(self, batch: int) -> tuple[Sides, Sequence[str] | None]:
        """The layouts and words of a batch entry."""
        words = None if not self.words else self.words[batch if batch < len(self.words) else 0]
        return self.sides[batch if len(self.sides) > 1 else 0], words


NOWHERE = Placed()
"""Of a view of which nothing was said."""


@dataclass(frozen=True)
class Run:
    """The calls of a module that carry each other on, in order; mostly one.

    kind: "self" or "cross".  sizes: B, H, Nq, Nk of each.  first: the place of its first key among those of the run.
    """

    kind: str
    sizes: tuple[Sizes, ...]
    first: tuple[int, ...]

    @property
    def whole(self) -> Sizes:
        """The sizes of all calls together."""
        batch, heads, _, _ = self.sizes[0]
        ends = (first + sizes[3] for first, sizes in zip(self.first, self.sizes, strict=True))
        return batch, heads, sum(sizes[2] for sizes in self.sizes), max(ends)

    def misfit(self, sides: tuple[Sides, ...]) -> str | None:
        """Why layouts cannot be of this run; None where they can."""
        (batch, _, nq, nk), whole = self.sizes[0], self.whole
        counts = {side.queries.shape[0] for side in sides}
        if len(counts) != 1 or batch % max(counts) or len(sides) not in (1, batch // max(counts)):
            return f"{len(sides)} layouts of {_some(counts)} sequences do not make the {batch} batch rows of the call"
        fitting = {"queries": {nq, whole[2]}, "keys": {nk, whole[3]}}
        if self.kind == "self" and len(self.sizes) > 1:
            fitting["keys"].add(nq)  # a cache of fixed size has room for more than the prompt
        for side in sides:
            for name, wanted in fitting.items():
                layout: Layout = getattr(side, name)
                if layout.shape[1] not in wanted:
                    return f"the call has {_some(wanted)} {name}, but their layout has {layout.shape[1]}: {layout}"
        return None

    def cut(self, sides: tuple[Sides, ...], n: int | None) -> tuple[Sides, ...]:
        """The layouts of call n alone, or of the whole run; what was added to the first call is text."""
        begin, first, (_, _, nq, nk) = 0, 0, self.whole
        if n is not None:
            begin, first, (_, _, nq, nk) = sum(s[2] for s in self.sizes[:n]), self.first[n], self.sizes[n]
        if len(self.sizes) == 1 and all(s.queries.shape[1] == nq and s.keys.shape[1] == nk for s in sides):
            return sides
        return tuple(Sides(_part(s.queries, begin, nq), _part(s.keys, first, nk), s.frames) for s in sides)


def _part(layout: Layout, begin: int, n: int) -> Layout:
    """n tokens from `begin`, text beyond the layout's end."""
    part = slice(begin, begin + n)
    kept = Layout(layout.kind[:, part], layout.picture[:, part], layout.box[:, part])
    short = n - kept.shape[1]
    return kept + Layout.text(short) if short else kept


def read_layouts(given: object) -> GivenLayouts:
    """Layouts as they may be given: {path: Sides}, or one Sides for all paths; or a list of these, one per batch entry.

    >>> list(read_layouts(Sides.patches(32)))
    [None]
    >>> read_layouts([{"attn": Sides.patches(32)}, {"attn": Sides.patches(48)}])["attn"][1].keys
    Layout(1 cls, 9 patches of picture 0)

    A mapping may also have a list of Sides under a path, one per batch entry.
    Raises TypeError for anything else, ValueError for a list of mappings whose paths differ.
    """
    if isinstance(given, (list, tuple)) and given and all(isinstance(item, Mapping) for item in given):
        return _joined(given)
    if isinstance(given, Mapping):
        return {path: _read_sides(sides) for path, sides in given.items()}
    return {None: _read_sides(given)}


def _joined(entries: Sequence[Mapping[str | None, object]]) -> GivenLayouts:
    """The layouts of all batch entries under each path."""
    first, *others = (list(entry) for entry in entries)
    for number, paths in enumerate(others, 1):
        if set(paths) != set(first):
            odd = _listed(sorted(set(paths) ^ set(first), key=str))
            raise ValueError(
                f"batch entries must have layouts of the same paths: only one of entries 0 and {number} has {odd}"
            )
    return {path: tuple(side for entry in entries for side in _read_one(path, entry[path])) for path in first}


def _read_one(path: str | None, given: object) -> tuple[Sides, ...]:
    """The one Sides that a batch entry has under a path."""
    read = _read_sides(given)
    if len(read) != 1:
        raise ValueError(f"each batch entry must have one Sides under a path, got {len(read)} of {path!r}")
    return read


def _read_sides(given: object) -> tuple[Sides, ...]:
    several = given if isinstance(given, (list, tuple)) else [given]
    read = tuple(item for item in several if isinstance(item, Sides))
    if len(read) < len(several) or not read:
        got = next((type(item).__name__ for item in several if not isinstance(item, Sides)), "an empty list")
        raise TypeError(
            f"layouts must be regard.layouts.Sides, one or one per batch entry, or {{path: Sides}}; got {got}"
        )
    return read


def fit_layouts(given: GivenLayouts, runs: Mapping[str, Sequence[Run]]) -> dict[str, tuple[Sides, ...]]:
    """Path → layouts, for the modules that were seen, each checked against the runs of its module.

    runs: of each module that was seen. Layouts of others are left out, also those for all paths where they do not fit.
    Raises ValueError where none of the paths was seen, or layouts fit no run of their module.
    """
    if None in given:
        sides = given[None]
        fitting = {path: sides for path, found in runs.items() if any(run.misfit(sides) is None for run in found)}
        if not fitting:
            path, found = next(iter(runs.items()))
            raise ValueError(f"these layouts fit no module; of {path!r}, {found[0].misfit(sides)}")
        return fitting
    seen = {path: sides for path, sides in given.items() if path is not None and path in runs}
    if not seen:
        raise ValueError(
            f"layouts are of {_listed(list(given))}, none of which was seen; seen are {_listed(list(runs))}"
        )
    for path, sides in seen.items():
        reasons = [run.misfit(sides) for run in runs[path]]
        if None not in reasons:
            raise ValueError(f"layouts of {path!r} do not fit: {reasons[0]}")
    return seen


def _some(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _listed(names: Sequence[object], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
