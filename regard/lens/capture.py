"""What `watch` yields: every attention call of a run, by module path and call order, each with its view.

It does not know how calls are caught, nor how files are written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard import tables
from regard.layouts import Sides
from regard.lens.assembling import assemble
from regard.lens.diagnosing import doctor as doctors
from regard.lens.diagnosing.diagnosis import SAID, Diagnosis
from regard.lens.diagnosing.facts import Facts
from regard.lens.diagnosing.findings import spoken
from regard.lens.diagnosing.layer_names import places
from regard.lens.diagnosing.patterns import label
from regard.lens.placing import Placed, Run, fit_layouts, read_layouts
from regard.lens.runs import Link, by_sizes, runs_of
from regard.lens.view import PER_QUERY, View
from regard.stages import Lang

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.lens.files.file_photos import Photo

__all__ = ["Capture", "Record", "per_head"]


@dataclass
class Record:
    """One attention call of a watched model.

    path, n: the module that made it, as `named_modules()` names it, and which of its calls this is, from 0.
    kind: "self" or "cross".  source, kernel: what was tapped, and what really ran.
    compiled: seen inside compiled code, of which only the compiled module is known: `path` is that one.
    view: its measures; None where the call could not be read.  facts: its mask and numbers, likewise.
    heads: what the doctor wants to know of each head, (B, H).
    trouble: why it could not be read, in words.
    link: what it carries on, in generation; None where that is not known, as in files of before.
    """

    path: str
    n: int
    kind: str
    source: str
    kernel: str
    compiled: bool = False
    view: View | None = None
    facts: Facts | None = None
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    trouble: str | None = None
    link: Link | None = None


class Capture:
    """Every attention call of a run. `capture[i]` or `capture["path"]` is a `View`; `capture["path", n]` the n-th call.

    records: all calls in call order.  names: the paths of the modules that were seen, in the order of their first call.
    unseen: path → reason, for what looks like attention and was not seen.
    tokens: labels per batch row, as given to `watch`; None without.  model: the model's class.
    layouts: path → what its tokens are and where they lie in a picture, one `Sides` for all batch entries or one each.
    photos: bounded copies of the pictures that the first batch entry's patches lie in, where somebody put them here.
    origin: for a capture from a file, its path, the versions that wrote it and when; empty otherwise.
    """

    def __init__(self, model: str = "", tokens: Sequence[Sequence[str]] | None = None) -> None:
        self.model = model
        self.tokens = None if tokens is None else [list(row) for row in tokens]
        self.records: list[Record] = []
        self.unseen: dict[str, str] = {}
        self.photos: tuple[Photo, ...] = ()
        self.origin: dict[str, str] = {}
        self._layouts: dict[str, tuple[Sides, ...]] = {}

    @property
    def layouts(self) -> dict[str, tuple[Sides, ...]]:
        """Path → what the tokens of a module are and where they lie; given as {path: Sides}, or as one Sides for all.

        One Sides for all is kept for the modules that it fits; a list of them is one for each batch entry.
        Setting them raises TypeError for anything else, ValueError for layouts that fit no call of their module.
        """
        return dict(self._layouts)

    @layouts.setter
    def layouts(self, given: object) -> None:
        self._anything()
        runs = {name: self._runs(name) for name in self.names}
        self._layouts = {} if given is None else fit_layouts(read_layouts(given), runs)

    def _runs(self, path: str) -> list[Run]:
        """The sizes of the calls of each run of a module."""
        found, links, groups = self._linked(path)
        runs = []
        for group in groups:
            first = tuple(links[n].first - links[group[0]].first for n in group)
            runs.append(Run(found[0].kind, tuple(_view(found[n]).sizes for n in group), first))
        return runs

    def _linked(self, path: str) -> tuple[list[Record], list[Link], list[list[int]]]:
        """The calls of a module, what each carries on, and which of them make a run."""
        found = self.calls(path)
        links = [r.link for r in found if r.link is not None]
        if len(links) < len(found):
            links = by_sizes([_view(r).sizes for r in found], found[0].kind)
        return found, links, runs_of(links)

    def _placed(self, view: View, path: str, n: int | None) -> View:
        """The view with what is known of where its tokens lie; it is of call n, or of the only run."""
        place = Placed(path, words=self.tokens)
        if path in self._layouts:
            sides, groups = self._layouts[path], self._linked(path)[2]
            at = next(at for at, group in enumerate(groups) if n is None or n in group)
            run = self._runs(path)[at]
            problem = run.misfit(sides)
            cut = () if problem else run.cut(sides, None if n is None else groups[at].index(n))
            place = replace(place, sides=cut, lacking=f"layouts of {path!r} do not fit this call: {problem}")
        elif self._layouts:
            place = replace(place, lacking=f"no layouts were given for {path!r}, but for {_some(list(self._layouts))}")
        view.placed = place
        return view

    @property
    def names(self) -> list[str]:
        """The paths of the modules that were seen, in the order of their first call."""
        return list(dict.fromkeys(r.path for r in self.records if r.view is not None))

    def calls(self, path: str) -> list[Record]:
        """The calls of one module that could be read. Raises KeyError, naming what there is."""
        self._anything()
        found = [r for r in self.records if r.path == path and r.view is not None]
        if not found:
            why = f": {self.unseen[path]}" if path in self.unseen else f"; there are {_some(self.names)}"
            raise KeyError(f"no attention of {path!r} was seen{why}")
        return found

    def __getitem__(self, key: int | str | tuple[str, int]) -> View:
        self._anything()
        if isinstance(key, int) and not isinstance(key, bool):
            names = self.names
            if not -len(names) <= key < len(names):
                raise IndexError(f"capture[{key}] is out of range: {len(names)} modules were seen")
            return self._whole(names[key])
        if isinstance(key, str):
            return self._whole(key)
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int):
            found = self.calls(key[0])
            if not -len(found) <= key[1] < len(found):
                raise IndexError(f"{key[0]!r} was called {len(found)} times, so there is no call {key[1]}")
            n = key[1] % len(found)
            return self._placed(_view(found[n]), key[0], n)
        raise TypeError(f"a capture is indexed by a number, a path, or (path, number of the call); got {key!r}")

    def _whole(self, path: str) -> View:
        """The only call, or the steps of one generation put together."""
        found, links, groups = self._linked(path)
        if len(groups) > 1:
            raise KeyError(
                f"{path!r} was called {len(found)} times, in {len(groups)} runs of their own: "
                f"take one as capture[{path!r}, n], n from 0 to {len(found) - 1}"
            )
        if len(found) > 1 and any(_view(r).pooled for r in found):
            raise KeyError(
                f"the {len(found)} steps of {path!r} cannot be put together, for an overview holds pooled measures: "
                f"take one as capture[{path!r}, n], or save the capture without overview=True"
            )
        return self._placed(assemble([_view(r) for r in found], links), path, None)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[View]:
        return (self._whole(name) for name in self.names)

    def __contains__(self, path: object) -> bool:
        return path in self.names

    def _anything(self) -> None:
        """Raise LookupError where nothing was seen, with what is known about why."""
        if not self.names:
            reasons = "".join(
                f"\n  {path or '(the model itself)'}: {why}" for path, why in list(self.unseen.items())[:8]
            )
            raise LookupError(f"no attention of {self.model or 'the model'} was seen{reasons or NOTHING_RAN}")

    def save(self, path: str | os.PathLike[str], overview: bool = False, *, photos: bool = True) -> None:
        """Write it to a file that `regard.open` reads, see `regard.lens.files.saving.save`."""
        from regard.lens.files.saving import save  # which makes captures, and so imports this file

        save(self, path, overview, photos=photos)

    # ------------------------------------------------------------------------------------------------------- overview

    def atlas(self, measure: str = "entropy") -> Tensor:
        """One number per layer and head, (layers, heads), mean over batch rows; NaN where a layer has fewer heads.

        measure: "entropy", "effective", "max_logit", "lse", or a pattern's name.
        Raises LookupError where it was not measured.
        """
        self._anything()
        rows = [per_head(self._first(name), measure).mean(0) for name in self.names]
        whole = torch.full((len(rows), max(len(r) for r in rows)), float("nan"))
        for line, row in zip(whole, rows, strict=True):
            line[: len(row)] = row.float().cpu()
        return whole

    def _first(self, path: str) -> View:
        return _view(self.calls(path)[0])

    def show(
        self,
        layer: int | str | None = None,
        head: int | None = None,
        *,
        measure: str = "entropy",
        batch: int = 0,
        dark: bool = False,
    ) -> Figure:
        """A picture: all heads coloured by a measure; with a layer, its maps; with a head as well, its map and margins.

        layer: a number or a path, as in capture[layer].  measure: as for `atlas`.  batch: which batch row.
        Raises as capture[layer] does, IndexError for a head or batch row that is not there.
        """
        from regard.lens import showing

        if layer is None:
            return showing.atlas_of(self, measure, dark)
        tokens = None if self.tokens is None else self.tokens[batch if batch < len(self.tokens) else 0]
        return showing.picture_of(self[layer], batch=batch, head=head, tokens=tokens, dark=dark)

    def _repr_html_(self) -> str:
        from regard.lens import showing

        return showing.html_of(self)

    def doctor(self) -> Diagnosis:
        """What is wrong with the masks and numbers of this run, and what is worth a look."""
        self._anything()
        return doctors.examine(self.records)

    def summary(self, lang: Lang = "en") -> str:
        """The run as text: one line per module, with its sizes, kernel and the most telling numbers."""
        self._anything()
        words = WORDS[spoken(lang)]
        rows = [self._line(i, name, lang) for i, name in enumerate(self.names)]
        lines = [words["title"].format(self.model or "model", len(self.names), len(self.records)), ""]
        lines.append(tables.text(words["headers"].split("|"), rows, right=[0, 3, 5, 6]))
        unseen = (f"{words['unseen']}: {path or '(the model itself)'}: {why}" for path, why in self.unseen.items())
        return "\n".join([*lines, "", *unseen]).rstrip()

    def _line(self, i: int, name: str, lang: Lang) -> list[str]:
        found = self.calls(name)
        kind = SAID[lang].get(found[0].kind, found[0].kind)
        first, last = _view(found[0]), _view(found[-1])
        entropy = f"{float(per_head(first, 'entropy').mean()):.2f}" if "entropy" in first.held else "–"
        size = f"{sum(_view(r).sizes[2] for r in found)} × {last.sizes[3]}"
        return [
            str(i), name or "(model)", kind, str(first.sizes[1]), size, str(len(found)), entropy,
            _commonest(first), found[0].source + (" (compiled)" if found[0].compiled else ""),
        ]  # fmt: skip

    def __repr__(self) -> str:
        if not self.names:
            return f"Capture({self.model or 'nothing'}: no attention was seen)"
        return f"Capture({self.model}: {places(self.names)}; {len(self.records)} calls)"


WORDS: dict[Lang, dict[str, str]] = {
    "en": {
        "title": "{}: {} attention modules, {} calls",
        "headers": "|module|kind|heads|queries × keys|calls|entropy|patterns|seen by",
        "unseen": "not seen",
    },
    "ko": {
        "title": "{}: 어텐션 모듈 {}개, 호출 {}번",
        "headers": "|모듈|종류|헤드|쿼리 × 키|호출|엔트로피|패턴|찾은 곳",
        "unseen": "보지 못함",
    },
}
NOTHING_RAN = (
    ": it did not run inside the block, or it has none. Call the model between `with watch(model)` and its end"
)


def _view(record: Record) -> View:
    assert record.view is not None
    return record.view


def per_head(view: View, measure: str) -> Tensor:
    """One number per head, (B, H): a measure's mean over the queries, or a pattern's score.

    >>> import regard
    >>> x = torch.zeros(1, 2, 4, 3)
    >>> per_head(regard.look(x, x, x), "entropy")
    tensor([[1.3863, 1.3863]])

    measure: "entropy", "effective", "max_logit", "lse", or a pattern's name. Raises LookupError where it is not known.
    """
    plain = (
        view if view.lead is None and not view.numpy else View(view.sizes, view.held, place=view.place, kind=view.kind)
    )
    if measure in PER_QUERY:  # an overview keeps the means, which its pooled numbers no longer give
        found: Any = plain.held[f"mean {measure}"] if f"mean {measure}" in plain.held else plain.mean(measure)
    else:
        scores = plain.patterns()
        if measure not in scores:
            raise LookupError(f"no measure or pattern {measure!r} here; there are entropy, {', '.join(scores)}")
        found = scores[measure]
    assert isinstance(found, Tensor)
    return found


def _commonest(view: View) -> str:
    """The pattern names of the first batch row's heads with how many bear each, the most common first."""
    scores = {n.removeprefix("pattern "): t for n, t in view.held.items() if n.startswith("pattern ")}
    if not scores:
        return "–"
    names = [names[0] for names in label(scores)[0] if names]
    counts = sorted(((names.count(n), n) for n in set(names)), reverse=True)
    return ", ".join(f"{count} {name}" for count, name in counts[:3]) or "none"


def _some(names: Sequence[str], most: int = 4) -> str:
    listed = ", ".join(repr(n) for n in names[:most])
    return listed + (f" and {len(names) - most} more" if len(names) > most else "")
