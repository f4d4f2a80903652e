"""Where the tokens of a module lie in an image: layouts by path, and whether they fit the calls of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regard.layouts import Layout, Sides
from regard.lens.measures.measures import Sizes
from regard.locale import Lang, translate

LayoutsByPath = dict[str | None, tuple[Sides, ...]]
"""Layouts by path, or under None those for all paths."""

HOW = (
    "say what its tokens are, with regard.layouts: seen.layouts = Sides.patches(224, patch=16) for a ViT, "
    "or {path: Sides(queries, keys, frames)}; watch(model, layouts=…) takes the same"
)


@dataclass(frozen=True)
class TokenPlacement:
    """Layouts and words of a view's tokens."""

    path: str = ""  # of the module
    sides: tuple[Sides, ...] = ()  # one for all batch entries, or one each; empty if unknown or if they do not fit
    words: Sequence[Sequence[str]] | None = None  # a row for each batch entry, or one for all
    lacking: str = f"it is not known where the tokens of this attention lie: {HOW}"  # the reason for empty sides
    model: str = ""  # its name
    layer: int | None = None  # the module's number in its capture

    def name(self, lang: Lang, head: int | None = None) -> str:
        """Model, layer and head, as far as they are known."""
        layer = "" if self.layer is None else translate("layer {layer}", lang, layer=self.layer)
        which = "" if head is None else translate("head {head}", lang, head=head)
        return ", ".join(part for part in (self.model, layer, which) if part)

    @property
    def windows(self) -> int:
        """Number of windows per batch entry."""
        return self.sides[0].queries.shape[0]

    def entry(self, batch: int) -> tuple[Sides, Sequence[str] | None]:
        """The layouts and words of a batch entry."""
        words = None if not self.words else self.words[batch if batch < len(self.words) else 0]
        return self.sides[batch if len(self.sides) > 1 else 0], words


UNPLACED = TokenPlacement()
"""The placement of a view without layouts."""


@dataclass(frozen=True)
class RunSizes:
    """Sizes of the calls of one run of a module; more than one call in generation."""

    kind: str  # "self" or "cross"
    sizes: tuple[Sizes, ...]  # of each call
    first: tuple[int, ...]  # position of each call's first key among those of the run

    @property
    def whole(self) -> Sizes:
        """The sizes of all calls together."""
        batch, heads, _, _ = self.sizes[0]
        ends = (first + sizes[3] for first, sizes in zip(self.first, self.sizes, strict=True))
        return batch, heads, sum(sizes[2] for sizes in self.sizes), max(ends)

    def misfit(self, sides: tuple[Sides, ...]) -> str | None:
        """Why layouts do not fit this run, or None."""
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
        """The layouts of call n, or of the whole run; tokens added after the first call are text."""
        begin, first, (_, _, nq, nk) = 0, 0, self.whole
        if n is not None:
            begin, first, (_, _, nq, nk) = sum(s[2] for s in self.sizes[:n]), self.first[n], self.sizes[n]
        if len(self.sizes) == 1 and all(s.queries.shape[1] == nq and s.keys.shape[1] == nk for s in sides):
            return sides

        def part(layout: Layout, begin: int, n: int) -> Layout:
            """n tokens from `begin`, text beyond the layout's end."""
            chosen = slice(begin, begin + n)
            kept = Layout(layout.kind[:, chosen], layout.image[:, chosen], layout.box[:, chosen])
            short = n - kept.shape[1]
            return kept + Layout.text(short) if short else kept

        return tuple(Sides(part(s.queries, begin, nq), part(s.keys, first, nk), s.frames) for s in sides)


def read_layouts(layouts: object) -> LayoutsByPath:
    """Normalise layouts: {path: Sides}, or one Sides for all paths; or a list of either, one per batch entry.

    A mapping may also have a list of Sides under a path, one per batch entry. Raises TypeError for anything else,
    ValueError for a list of mappings whose paths differ.
    """
    if isinstance(layouts, (list, tuple)) and layouts and all(isinstance(item, Mapping) for item in layouts):
        first = list(layouts[0])
        for number, entry in enumerate(layouts):
            if set(entry) != set(first):
                odd = listed(sorted(set(entry) ^ set(first), key=str))
                raise ValueError(
                    f"batch entries must have layouts of the same paths: only one of entries 0 and {number} has {odd}"
                )
        joined: LayoutsByPath = {}
        for path in first:
            several = [_read_sides(entry[path]) for entry in layouts]
            if wrong := [len(sides) for sides in several if len(sides) != 1]:
                raise ValueError(f"each batch entry must have one Sides under a path, got {wrong[0]} of {path!r}")
            joined[path] = tuple(sides[0] for sides in several)
        return joined
    if isinstance(layouts, Mapping):
        return {path: _read_sides(sides) for path, sides in layouts.items()}
    return {None: _read_sides(layouts)}


def _read_sides(layouts: object) -> tuple[Sides, ...]:
    several = layouts if isinstance(layouts, (list, tuple)) else [layouts]
    read = tuple(item for item in several if isinstance(item, Sides))
    if len(read) < len(several) or not read:
        got = next((type(item).__name__ for item in several if not isinstance(item, Sides)), "an empty list")
        raise TypeError(
            f"layouts must be regard.layouts.Sides, one or one per batch entry, or {{path: Sides}}; got {got}"
        )
    return read


def fit_layouts(layouts: LayoutsByPath, runs: Mapping[str, Sequence[RunSizes]]) -> dict[str, tuple[Sides, ...]]:
    """Path → layouts for the modules that were seen, each checked against the runs of its module.

    Layouts of other modules are left out; layouts for all paths are kept where they fit. Raises ValueError if none of
    the paths was seen, or layouts fit no run of their module.
    """
    if None in layouts:
        sides = layouts[None]
        fitting = {path: sides for path, of_path in runs.items() if any(run.misfit(sides) is None for run in of_path)}
        if not fitting:
            path, of_path = next(iter(runs.items()))
            raise ValueError(f"these layouts fit no module; of {path!r}, {of_path[0].misfit(sides)}")
        return fitting
    seen = {path: sides for path, sides in layouts.items() if path is not None and path in runs}
    if not seen:
        raise ValueError(
            f"layouts are of {listed(list(layouts))}, none of which was seen; seen are {listed(list(runs))}"
        )
    for path, sides in seen.items():
        reasons = [run.misfit(sides) for run in runs[path]]
        if None not in reasons:
            raise ValueError(f"layouts of {path!r} do not fit: {reasons[0]}")
    return seen


def _some(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def listed(names: Sequence[object], most: int = 4) -> str:
    """Names in quotes, the first of many."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
