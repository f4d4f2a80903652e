"""What `watch` yields: every attention call of a run, by module path and call order, each with its view.

It does not know how calls are caught, nor how files are written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from regard.layouts import Sides
from regard.lens.assembly import StepLink, assemble, by_sizes, follow, read_beams, rows_of, runs_of
from regard.lens.doctor import doctor as doctors
from regard.lens.doctor.facts import Facts
from regard.lens.doctor.findings import places
from regard.lens.doctor.report import Diagnosis
from regard.lens.head_values import known_values, no_such_value, per_head, table_of
from regard.lens.patterns import NAMES
from regard.lens.placement import Placed, Run, fit_layouts, read_layouts
from regard.lens.validity import index_among
from regard.lens.view import PER_QUERY, View
from regard.stages import Lang

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.lens.files.media import Photo

__all__ = ["Capture", "Ran", "Record"]


@dataclass
class Record:
    """One attention call of a watched model.

    path, n: the module that made it, as `named_modules()` names it, and which of its calls this is, from 0.
    kind: "self" or "cross".  source, kernel: what was tapped, and what really ran.
    compiled: seen inside compiled code, of which only the compiled module is known: `path` is that one, and where the
        code makes several calls the number of the call in a run of it: "compiled_call.0", "layers.3.compiled_call.1".
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
    link: StepLink | None = None


@dataclass(frozen=True, eq=False)
class Ran:
    """What a module did in one run: a call, or the steps of a generation put together.

    path: of the module.  call: which of its calls the run begins with, where the module has several runs; else None.
    records: the calls.  view: of all of them together.
    """

    path: str
    call: int | None
    records: tuple[Record, ...]
    view: View

    @property
    def name(self) -> str:
        """The module's path, with the number of the call where it has several runs."""
        return self.path if self.call is None else f"{self.path}, call {self.call}"


class Capture:
    """Every attention call of a run. `capture[i]` or `capture["path"]` is a `View`; `capture["path", n]` the n-th call.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer) as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> seen, seen[0].entropy.shape
    (Capture(TransformerEncoderLayer: self_attn; 1 calls), torch.Size([1, 2, 3]))

    records: all calls in call order.  names: the paths of the modules that were seen, in the order of their first call.
    unseen: path → reason, for what looks like attention and was not seen.
    edited: path → calls in which the model changed its weights after the softmax; their views show those it applied.
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

    def _runs(self, path: str, *, shown: bool = False) -> list[Run]:
        """The sizes of the calls of each run of a module.

        shown: leave out what the assembled view leaves out: calls after the end of all that a beam search returned.
        """
        found, links, groups = self._linked(path)
        runs = []
        for group in groups:
            group = [n for n in group if not shown or max(links[n].returned or (0,)) >= 0]
            first = tuple(links[n].first - links[group[0]].first for n in group)
            runs.append(Run(found[0].kind, tuple(_view(found[n]).sizes for n in group), first))
        return runs

    def _linked(self, path: str) -> tuple[list[Record], list[StepLink], list[list[int]]]:
        """The calls of a module, what each carries on, and which of them make a run."""
        found = self.calls(path)
        # A link counts all calls of the module, and some could not be read.
        place: dict[int | None, int] = {r.n: at for at, r in enumerate(found)}
        links = [replace(r.link, after=place.get(r.link.after)) for r in found if r.link is not None]
        if len(links) < len(found):
            links = by_sizes([_view(r).sizes for r in found], found[0].kind)
        return found, links, runs_of(links)

    def _placed(self, view: View, path: str, n: int | None) -> View:
        """The view with what is known of where its tokens lie; it is of call n, or of the only run."""
        place = Placed(path, words=self.tokens)
        if path in self._layouts:
            sides, (_, links, groups) = self._layouts[path], self._linked(path)
            at = next(at for at, group in enumerate(groups) if n is None or n in group)
            run = self._runs(path, shown=n is None)[at]
            problem = run.misfit(sides)
            cut = () if problem else run.cut(sides, None if n is None else groups[at].index(n))
            rows = rows_of([links[call] for call in groups[at]])[0] if n is None else None
            if rows is not None and len(cut) > 1:  # each beam has the picture of its own prompt
                cut = tuple(cut[row] for row in rows)
            place = replace(place, sides=cut, lacking=f"layouts of {path!r} do not fit this call: {problem}")
        elif self._layouts:
            place = replace(place, lacking=f"no layouts were given for {path!r}, but for {_some(list(self._layouts))}")
        view.placed = place
        return view

    @property
    def names(self) -> list[str]:
        """The paths of the modules that were seen, in the order of their first call."""
        return list(dict.fromkeys(r.path for r in self.records if r.view is not None))

    @property
    def edited(self) -> dict[str, list[int]]:
        """Path → calls in which the model changed its weights after the softmax; their views show those it applied."""
        found: dict[str, list[int]] = {}
        for record in self.records:
            if record.view is not None and record.view.edited:
                found.setdefault(record.path, []).append(record.n)
        return found

    def calls(self, path: str) -> list[Record]:
        """The calls of one module that could be read. Raises KeyError, naming what there is."""
        self._anything()
        found = [r for r in self.records if r.path == path and r.view is not None]
        if not found:
            why = f": {self.unseen[path]}" if path in self.unseen else f"; there are {_some(self.names)}"
            if any(r.compiled for r in self.records):
                why += ". Compiled code does not know its modules; watch the model before torch.compile to see them"
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

    def returned(self, beams: object) -> None:
        """Show the sequences that a beam search returned: say in which batch rows they were.

        Args:
            beams: what `generate(…, num_beams=…, return_dict_in_generate=True)` of transformers returned, or its
                `beam_indices`: for each returned sequence its batch row in each pass of the model, −1 after its end.

        Afterwards `capture[path]` has a batch row for each returned sequence, in their order; one that ended early sees
        nothing after its end. Before, the batch rows of a generation are the beams of its last step. Regard's own
        models do not need it.

        Raises:
            TypeError: for what has no beam_indices.
            ValueError: for batch rows that are not there.
            LookupError: where no generation of so many passes was seen, or several.
        """
        self._anything()
        found = read_beams(beams)
        passes = max((n + 1 for row in found for n, at in enumerate(row) if at >= 0), default=0)
        chosen: list[tuple[list[StepLink], int]] = []
        for path in self.names:
            calls, links, groups = self._linked(path)
            long = [group for group in groups if len(group) >= max(passes, 2)]
            if len(long) > 1:
                raise LookupError(
                    f"{path!r} has {len(long)} generations of {passes} passes or more: watch each in a block of its own"
                )
            if long:
                for link, record in zip(links, calls, strict=True):
                    record.link = link
                chosen.append(([links[n] for n in long[0]], min(_view(calls[n]).sizes[0] for n in long[0][1:])))
        if not chosen:
            raise LookupError(f"no generation of {passes} passes of the model was seen: put generate(…) into the block")
        highest = max(at for row in found for at in row)
        batch = min(batch for _, batch in chosen)
        if highest >= batch:
            raise ValueError(f"beam_indices name batch row {highest}, but the calls have {batch}")
        for links, _ in chosen:
            follow(links, found)

    def runs(self) -> list[Ran]:
        """What every module did, one view for each of its runs, in the order of their first calls.

        The steps of one generation are one run. Pooled measures cannot be put together: there each call is one.
        """
        number = {id(record): n for n, record in enumerate(self.records)}
        found = [run for path in self.names for run in self._ran(path)]
        return sorted(found, key=lambda run: number[id(run.records[0])])

    def _ran(self, path: str) -> Iterator[Ran]:
        found, links, groups = self._linked(path)
        if any(_view(record).pooled for record in found):
            groups = [[n] for n in range(len(found))]
        for group in groups:
            view = assemble([_view(found[n]) for n in group], [links[n] for n in group])
            yield Ran(path, group[0] if len(groups) > 1 else None, tuple(found[n] for n in group), view)

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
        """Write it to a file that `regard.open` reads: whole, or not at all.

        >>> import tempfile, torch, regard
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with regard.watch(layer) as seen:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     seen.save(f"{folder}/run.regard")
        ...     regard.open(f"{folder}/run.regard").names
        ['self_attn']

        path: used as it is; a file that is there is replaced.
        overview: keep what a first look needs: maps and pooled measures, without q, k, outputs and links.
        photos: write the copies of photographs too, so that whoever opens the file sees them.
        Raises as `regard.lens.files.saving.save`, which says more of all three.
        """
        from regard.lens.files.saving import save  # which makes captures, and so imports this file

        save(self, path, overview, photos=photos)

    # ------------------------------------------------------------------------------------------------------- overview

    def atlas(self, measure: str = "entropy", batch: int | None = None) -> Tensor:
        """One number per run and head, (runs, heads): a row for each module, or for each of its runs; see `row_names`.

        >>> import torch, regard
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with regard.watch(layer) as seen:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> seen.atlas("entropy")
        tensor([[1.0986, 1.0986]])

        measure: "entropy", "effective", "max_logit", "lse", or a pattern's name.
        batch: which batch row; default the mean of all.
        NaN stands where a layer has fewer heads or does not know the measure, as cross-attention has no "previous", and
        where the number is NaN; `atlas_rows` tells these apart. Raises LookupError where no layer knows the measure,
        IndexError for a batch row that is not there.
        """
        rows = self.atlas_rows(measure, batch)
        return table_of(rows, max(record.view.sizes[1] for record in self.records if record.view is not None))

    def atlas_rows(self, measure: str = "entropy", batch: int | None = None) -> list[Tensor | None]:
        """The rows of the atlas, (heads,) each; None for a run that does not know the measure. Raises as `atlas`."""
        self._anything()
        runs, rows, problems = self.runs(), list[Tensor | None](), list[LookupError]()
        for run in runs:
            if batch is not None:
                index_among("batch", batch, run.view.sizes[0], "batch rows")
            try:
                found = per_head(run.view, measure)  # (B, H)
            except LookupError as problem:
                problems.append(problem)
                rows.append(None)
            else:
                rows.append((found.mean(0) if batch is None else found[batch]).float().cpu())
        if len(problems) < len(rows):
            return rows
        if measure in (*PER_QUERY, *NAMES):
            raise problems[0]
        raise LookupError(no_such_value(measure, [name for run in runs for name in known_values(run.view)]))

    @property
    def row_names(self) -> list[str]:
        """The names of the atlas's rows: `names`, and "path, call n" for each run of a module that has several."""
        return [run.name for run in self.runs()]

    def show(
        self,
        layer: int | str | None = None,
        head: int | None = None,
        *,
        measure: str | None = None,
        batch: int | None = None,
        dark: bool = False,
    ) -> Figure:
        """A picture: all heads coloured by a measure; with a layer, its maps; with a head as well, its map and margins.

        >>> import torch, regard
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with regard.watch(layer) as seen:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> seen.show(0, head=1).texts[0].get_text()
        'head 1'

        layer: a number or a path, as in capture[layer].  head: of that layer.
        measure: without a layer, as for `atlas`, default "entropy".
        batch: which batch row; default the mean of all without a layer, the first with one.  dark: for dark paper.
        Raises as capture[layer] and `atlas` do, IndexError for a head or batch row that is not there, ValueError for a
        head without a layer and for a measure with one.
        """
        from regard.lens import show as showing

        if layer is None:
            if head is not None:
                raise ValueError(f"head {head} of which layer? Say show(layer, {head}), by a number or a path")
            return showing.atlas_of(self, "entropy" if measure is None else measure, dark, batch=batch)
        if measure is not None:
            raise ValueError(f"a layer's maps are its weights; measure={measure!r} colours all heads: leave layer out")
        row = batch or 0
        tokens = None if self.tokens is None else self.tokens[row if row < len(self.tokens) else 0]
        return showing.picture_of(self[layer], batch=row, head=head, tokens=tokens, dark=dark)

    def _repr_html_(self) -> str:
        from regard.lens import show as showing

        return showing.html_of(self)

    def doctor(self) -> Diagnosis:
        """What is wrong with the masks and numbers of this run, and what is worth a look.

        >>> import torch, regard
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with regard.watch(layer) as seen:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> seen.doctor().ok
        True

        Raises LookupError where nothing was seen.
        """
        self._anything()
        return doctors.examine(self.records)

    def summary(self, lang: Lang = "en") -> str:
        """The run as text: a line per module, or per run of it, with its sizes, kernel and the most telling numbers.

        >>> import torch, regard
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with regard.watch(layer) as seen:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> print(seen.summary().splitlines()[0])
        TransformerEncoderLayer: 1 attention modules, 1 calls

        lang: "en" or "ko". Raises ValueError for another, LookupError where nothing was seen.
        """
        from regard.lens.summarising import summary_of  # which asks captures, and so imports this file

        self._anything()
        return summary_of(self, lang)

    def __repr__(self) -> str:
        if not self.names:
            return f"Capture({self.model or 'nothing'}: no attention was seen)"
        return f"Capture({self.model}: {places(self.names)}; {len(self.records)} calls)"


NOTHING_RAN = (
    ": it did not run inside the block, or it has none, or it makes its weights in a way that is not known here. "
    "Call the model between `with watch(model)` and its end"
)


def _view(record: Record) -> View:
    assert record.view is not None
    return record.view


def _some(names: Sequence[str], most: int = 4) -> str:
    listed = ", ".join(repr(n) for n in names[:most])
    return listed + (f" and {len(names) - most} more" if len(names) > most else "")
