"""`Capture`: every attention call of a watched run, by module path and call order; `open` reads one from a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from regard.checks import index_among
from regard.layouts import Sides
from regard.lens import display
from regard.lens import doctor as doctors
from regard.lens import rollout as flows
from regard.lens.assembly import StepLink, assemble, by_sizes, follow, read_beams, rows_of, runs_of
from regard.lens.doctor import Diagnosis, merge_paths
from regard.lens.edit_records import CapturedEdit, Effect, capture_effect
from regard.lens.files import saving
from regard.lens.overlays import RunSizes, TokenPlacement, fit_layouts, listed, read_layouts
from regard.lens.patterns import NAMES
from regard.lens.view import PER_QUERY, Record, View, view_of
from regard.locale import Lang

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Capture", "ModuleRun", "Record", "open"]

NOTHING_RAN = (
    ": it did not run inside the block, has no attention, or computes its weights in a way that is not known here. "
    "Call the model inside `with watch(model)`"
)


@dataclass(frozen=True, eq=False)
class ModuleRun:
    """One run of a module: a call, or the steps of a generation put together."""

    path: str
    call: int | None  # number of the run's first call if the module has several runs
    records: tuple[Record, ...]
    view: View

    @property
    def name(self) -> str:
        """The module's path, with the number of the call if it has several runs."""
        return self.path if self.call is None else f"{self.path}, call {self.call}"


class Capture:
    """Every attention call of a run: what `regard.watch` yields and `regard.open` reads.

    `capture[i]` or `capture["path"]` is the `View` of a module; steps of one generation are put together.
    `capture["path", n]` is the view of the module's n-th call.

    Attributes:
        model: class name of the model.
        tokens: labels per batch row, as given to `watch`, or None.
        records: all calls, in call order.
        unseen: path → reason, for modules that look like attention and were not seen.
        photos: bounded copies of the images that the first batch entry's patches lie in, if some were added.
        edits: those of `regard.edit` that were active on the model during the run, as values.
        effects: measured effects that were added with `add_effect`.
        origin: of a capture from a file: its path, the versions that wrote it, and when; otherwise empty.

    Example:
        >>> import torch, regard
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with regard.watch(layer) as seen:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> seen, seen[0].entropy.shape
        (Capture(TransformerEncoderLayer: self_attn; 1 calls), torch.Size([1, 2, 3]))
    """

    def __init__(self, model: str = "", tokens: Sequence[Sequence[str]] | None = None) -> None:
        self.model = model
        self.tokens = None if tokens is None else [list(row) for row in tokens]
        self.records: list[Record] = []
        self.unseen: dict[str, str] = {}
        self.photos: tuple[saving.Photo, ...] = ()
        self.edits: list[CapturedEdit] = []
        self.effects: list[Effect] = []
        self.origin: dict[str, str] = {}
        self._layouts: dict[str, tuple[Sides, ...]] = {}

    @property
    def layouts(self) -> dict[str, tuple[Sides, ...]]:
        """Path → layouts of the module's tokens: one `Sides` for all batch entries, or one each.

        Set it to {path: Sides}, or to one `Sides` for all modules that it fits; a list has one per batch entry. Setting
        raises TypeError for anything else and ValueError for layouts that fit no call of their module.
        """
        return dict(self._layouts)

    @layouts.setter
    def layouts(self, layouts: object) -> None:
        self._require_calls()
        runs = {name: self._run_sizes(name) for name in self.names}
        self._layouts = {} if layouts is None else fit_layouts(read_layouts(layouts), runs)

    @property
    def names(self) -> list[str]:
        """Paths of the modules that were seen, in the order of their first call."""
        return list(dict.fromkeys(r.path for r in self.records if r.view is not None))

    @property
    def edited(self) -> dict[str, list[int]]:
        """Path → calls in which the model changed its weights after the softmax; views show the applied weights."""
        edited: dict[str, list[int]] = {}
        for record in self.records:
            if record.view is not None and record.view.edited:
                edited.setdefault(record.path, []).append(record.n)
        return edited

    def calls(self, path: str) -> list[Record]:
        """The readable calls of one module. Raises KeyError with the known paths."""
        self._require_calls()
        records = [r for r in self.records if r.path == path and r.view is not None]
        if not records:
            reason = f": {self.unseen[path]}" if path in self.unseen else f"; there are {listed(self.names)}"
            if any(r.compiled for r in self.records):
                reason += ". Compiled code has no modules; watch the model before torch.compile to see them"
            raise KeyError(f"no attention of {path!r} was seen{reason}")
        return records

    def __getitem__(self, key: int | str | tuple[str, int]) -> View:
        self._require_calls()
        if isinstance(key, int) and not isinstance(key, bool):
            names = self.names
            if not -len(names) <= key < len(names):
                raise IndexError(f"capture[{key}] is out of range: {len(names)} modules were seen")
            return self._assembled(names[key])
        if isinstance(key, str):
            return self._assembled(key)
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int):
            records = self.calls(key[0])
            if not -len(records) <= key[1] < len(records):
                raise IndexError(f"{key[0]!r} was called {len(records)} times, so there is no call {key[1]}")
            n = key[1] % len(records)
            return self._placed(view_of(records[n]), key[0], n)
        raise TypeError(f"a capture is indexed by a number, a path, or (path, number of the call); got {key!r}")

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[View]:
        return (self._assembled(name) for name in self.names)

    def __contains__(self, path: object) -> bool:
        return path in self.names

    def runs(self) -> list[ModuleRun]:
        """One view for each run of each module, in the order of their first calls.

        The steps of one generation are one run. Pooled measures cannot be put together: there each call is a run.
        """
        number = {id(record): n for n, record in enumerate(self.records)}
        runs = []
        for path in self.names:
            records, links, groups = self._linked(path)
            if any(view_of(record).pooled for record in records):
                groups = [[n] for n in range(len(records))]
            for group in groups:
                view = assemble([view_of(records[n]) for n in group], [links[n] for n in group])
                call = group[0] if len(groups) > 1 else None
                runs.append(ModuleRun(path, call, tuple(records[n] for n in group), view))
        return sorted(runs, key=lambda run: number[id(run.records[0])])

    def returned(self, beams: object) -> None:
        """Select the sequences that a beam search returned, so that `capture[path]` has one batch row for each.

        Without this, the batch rows of a generation are the beams of its last step. A sequence that ended early sees
        nothing after its end. Regard's own models do this by themselves.

        Args:
            beams: the output of transformers' `generate(…, num_beams=…, return_dict_in_generate=True)`, or its
                `beam_indices`: for each returned sequence its batch row in each pass of the model, −1 after its end.

        Raises:
            TypeError: if there are no beam_indices.
            ValueError: if they name batch rows that do not exist.
            LookupError: if no generation with so many passes was seen, or several.
        """
        self._require_calls()
        sequences = read_beams(beams)
        passes = max((n + 1 for row in sequences for n, at in enumerate(row) if at >= 0), default=0)
        chosen: list[tuple[list[StepLink], int]] = []
        for path in self.names:
            records, links, groups = self._linked(path)
            long = [group for group in groups if len(group) >= max(passes, 2)]
            if len(long) > 1:
                raise LookupError(
                    f"{path!r} has {len(long)} generations of {passes} passes or more: watch each in a block of its own"
                )
            if long:
                for link, record in zip(links, records, strict=True):
                    record.link = link
                chosen.append(([links[n] for n in long[0]], min(view_of(records[n]).sizes[0] for n in long[0][1:])))
        if not chosen:
            raise LookupError(f"no generation of {passes} passes of the model was seen: put generate(…) into the block")
        highest = max(at for row in sequences for at in row)
        batch = min(batch for _, batch in chosen)
        if highest >= batch:
            raise ValueError(f"beam_indices name batch row {highest}, but the calls have {batch}")
        for links, _ in chosen:
            follow(links, sequences)

    def _linked(self, path: str) -> tuple[list[Record], list[StepLink], list[list[int]]]:
        """The calls of a module, their links, and which of them make a run."""
        records = self.calls(path)
        # A link counts all calls of the module, and some could not be read.
        place: dict[int | None, int] = {r.n: at for at, r in enumerate(records)}
        links = [replace(r.link, after=place.get(r.link.after)) for r in records if r.link is not None]
        if len(links) < len(records):
            links = by_sizes([view_of(r).sizes for r in records], records[0].kind)
        return records, links, runs_of(links)

    def _assembled(self, path: str) -> View:
        """The view of a module's only call, or of the steps of one generation put together."""
        records, links, groups = self._linked(path)
        if len(groups) > 1:
            raise KeyError(
                f"{path!r} was called {len(records)} times, in {len(groups)} runs of their own: "
                f"take one as capture[{path!r}, n], n from 0 to {len(records) - 1}"
            )
        if len(records) > 1 and any(view_of(r).pooled for r in records):
            raise KeyError(
                f"the {len(records)} steps of {path!r} cannot be put together, for an overview holds pooled measures: "
                f"take one as capture[{path!r}, n], or save the capture without overview=True"
            )
        return self._placed(assemble([view_of(r) for r in records], links), path, None)

    def _run_sizes(self, path: str, *, shown: bool = False) -> list[RunSizes]:
        """The sizes of each run of a module. shown: without calls after the end of all returned sequences."""
        records, links, groups = self._linked(path)
        runs = []
        for group in groups:
            group = [n for n in group if not shown or max(links[n].returned or (0,)) >= 0]
            first = tuple(links[n].first - links[group[0]].first for n in group)
            runs.append(RunSizes(records[0].kind, tuple(view_of(records[n]).sizes for n in group), first))
        return runs

    def _placed(self, view: View, path: str, n: int | None) -> View:
        """The view of call n, or of the only run, with the layouts of its tokens."""
        place = TokenPlacement(path, words=self.tokens, model=self.model, layer=self.names.index(path))
        if path in self._layouts:
            sides, (_, links, groups) = self._layouts[path], self._linked(path)
            at = next(at for at, group in enumerate(groups) if n is None or n in group)
            run = self._run_sizes(path, shown=n is None)[at]
            problem = run.misfit(sides)
            cut = () if problem else run.cut(sides, None if n is None else groups[at].index(n))
            rows = rows_of([links[call] for call in groups[at]])[0] if n is None else None
            if rows is not None and len(cut) > 1:  # each beam has the image of its own prompt
                cut = tuple(cut[row] for row in rows)
            place = replace(place, sides=cut, lacking=f"layouts of {path!r} do not fit this call: {problem}")
        elif self._layouts:
            place = replace(place, lacking=f"no layouts were given for {path!r}, but for {listed(list(self._layouts))}")
        view.placed = place
        return view

    def _require_calls(self) -> None:
        if not self.names:
            reasons = "".join(
                f"\n  {path or '(the model itself)'}: {why}" for path, why in list(self.unseen.items())[:8]
            )
            raise LookupError(f"no attention of {self.model or 'the model'} was seen{reasons or NOTHING_RAN}")

    def add_effect(self, effect: Effect) -> None:
        """Keep a measured effect with the capture; `save` writes it, and summaries name it.

        Args:
            effect: a result of `regard.effect`. Its edits are kept as values, tensors as shape, norm and SHA-256.

        Raises:
            TypeError: for another object.
            ValueError: if a number of it is not finite.
        """
        self.effects.append(capture_effect(effect))

    def save(self, path: str | os.PathLike[str], overview: bool = False, *, photos: bool = True) -> None:
        """Write the capture to a file that `regard.open` reads. The file is written whole or not at all.

        Args:
            path: the file; an existing one is replaced.
            overview: write a few megabytes at any length: measures by position are pooled into at most 64 means, maps
                are rounded to fp16, and q, k, outputs and links are left out; beyond 4,096 positions also tokens,
                padding and counts.
            photos: write `capture.photos` too.

        Raises:
            ValueError: for a mask or bias with too many cells, or for more calls than a file holds.
            OSError: if the file cannot be written. What was there before is untouched.

        Example:
            >>> import tempfile, torch, regard
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> with regard.watch(layer) as seen:
            ...     _ = layer(torch.zeros(1, 3, 8))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     seen.save(f"{folder}/run.regard")
            ...     regard.open(f"{folder}/run.regard").names
            ['self_attn']
        """
        saving.save(self, path, overview, photos=photos)

    def rollout(
        self,
        token: flows.Tokens = None,
        *,
        layers: object = None,
        heads: str = "mean",
        residual: float = 0.5,
        matrix: bool = False,
    ) -> flows.TokenFlow:
        """Attention rollout: how much of each input position reaches a token, through all layers. A heuristic.

        The product over the layers of (1 − residual)·A + residual·I, with A the weights joined over heads and rows
        that sum to 1 (Abnar and Zuidema, 2020). One streamed pass per layer; no N×N matrix is held.

        Args:
            token: its index, word or kind ("cls"); or several indices as a slice, a range or a list.
            layers: path patterns or numbers of self-attention modules of one sequence; default all there are. Needed
                for a model of two sequences, such as an encoder–decoder.
            heads: "mean" or "max" of the heads' weights.
            residual: share of the residual connection.
            matrix: the rows of all tokens, (B, N, N), where they are not too many.

        Returns:
            A `TokenFlow`: `.scores` (B, N), or (B, n, N) for several tokens; prints as a table of the strongest.

        Raises:
            LookupError: if q and k were not kept, the layers are not those of one sequence, or there is no such token.
            IndexError: if there is no such index.
            ValueError, TypeError: for other arguments, or more rows than can be held.

        Example:
            >>> import torch, regard
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> with regard.watch(layer, keep="qk") as seen:
            ...     _ = layer(torch.zeros(1, 2, 8))
            >>> seen.rollout(0)
            rollout, mean over heads, residual 0.5, over 1 layer to 0 (heuristic)
            token  score
            ─────  ─────
                0   0.75
                1   0.25
        """
        return flows.rollout(self, token, layers=layers, heads=heads, residual=residual, matrix=matrix)

    def relevance(self, token: flows.Tokens = None, *, layers: object = None, matrix: bool = False) -> flows.TokenFlow:
        """Relevance of each input position for a token, by weights and gradients through all layers. A heuristic.

        R ← R + Ā·R over the layers, Ā the mean over heads of max(0, ∂loss/∂A ⊙ A) (Chefer et al., 2021, for
        self-attention). It needs `watch(model, keep=["qk", "v"], gradients=True)` and loss.backward() in the block; the
        loss is what the relevance is for, such as the logit of a class.

        Args:
            token: as for `rollout`: the one that the loss is read from, such as "cls" or −1.
            layers: as for `rollout`.
            matrix: as for `rollout`.

        Returns:
            A `TokenFlow`, as `rollout`. The token's own score has its share of 1 from R = I.

        Raises:
            LookupError: if q, k, v or gradients were not kept; and as `rollout`.
            IndexError, ValueError, TypeError: as `rollout`.
        """
        return flows.relevance(self, token, layers=layers, matrix=matrix)

    def atlas(self, measure: str = "entropy", batch: int | None = None) -> Tensor:
        """One number per run and head, (runs, heads); `row_names` names the rows.

        NaN stands where a layer has fewer heads or does not know the measure (cross-attention has no "previous"), and
        where the number is NaN; `atlas_rows` tells these apart.

        Args:
            measure: "entropy", "effective", "max_logit", "lse", or a pattern's name.
            batch: which batch row; default the mean of all.

        Raises:
            LookupError: if no layer has the measure.
            IndexError: if there is no such batch row.

        Example:
            >>> import torch, regard
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> with regard.watch(layer) as seen:
            ...     _ = layer(torch.zeros(1, 3, 8))
            >>> seen.atlas("entropy")
            tensor([[1.0986, 1.0986]])
        """
        rows = self.atlas_rows(measure, batch)
        return display.stack_rows(rows, max(r.view.sizes[1] for r in self.records if r.view is not None))

    def atlas_rows(self, measure: str = "entropy", batch: int | None = None) -> list[Tensor | None]:
        """The rows of the atlas, (heads,) each; None for a run without the measure. Raises as `atlas`."""
        self._require_calls()
        runs, rows, problems = self.runs(), list[Tensor | None](), list[LookupError]()
        for run in runs:
            if batch is not None:
                index_among("batch", batch, run.view.sizes[0], "batch rows")
            try:
                values = run.view.per_head(measure)  # (B, H)
            except LookupError as problem:
                problems.append(problem)
                rows.append(None)
            else:
                rows.append((values.mean(0) if batch is None else values[batch]).float().cpu())
        if len(problems) < len(rows):
            return rows
        if measure in (*PER_QUERY, *NAMES):
            raise problems[0]
        known = dict.fromkeys(name for run in runs for name in run.view.known_values())
        raise LookupError(f"no measure or pattern {measure!r} here; there are {', '.join(known) or 'none'}")

    @property
    def row_names(self) -> list[str]:
        """Names of the atlas's rows: `names`, and "path, call n" for each run of a module that has several."""
        return [run.name for run in self.runs()]

    def show(
        self,
        layer: int | str | None = None,
        head: int | None = None,
        *,
        measure: str | None = None,
        batch: int | None = None,
        dark: bool = False,
        lang: Lang = "en",
    ) -> Figure:
        """A figure of all heads coloured by a measure; with a layer, of its maps; with a head too, of that head.

        Args:
            layer: a number or a path, as in `capture[layer]`.
            head: a head of that layer.
            measure: without a layer, as for `atlas`; default "entropy".
            batch: which batch row; default the mean of all without a layer, the first with one.
            dark: draw on a dark background.
            lang: of the figure's words, "en" or "ko".

        Raises:
            IndexError: if there is no such head or batch row.
            ValueError: for a head without a layer, or a measure with one.
            KeyError, LookupError: as `capture[layer]` and `atlas`.

        Example:
            >>> import torch, regard
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> with regard.watch(layer) as seen:
            ...     _ = layer(torch.zeros(1, 3, 8))
            >>> seen.show(0, head=1).texts[0].get_text()
            'TransformerEncoderLayer, layer 0, head 1'
        """
        if layer is None:
            if head is not None:
                raise ValueError(f"head {head} of which layer? Call show(layer, {head}) with a number or a path")
            return display.atlas_figure(self, measure or "entropy", dark, batch=batch, lang=lang)
        if measure is not None:
            raise ValueError(f"a layer shows its weights; measure={measure!r} colours all heads: leave layer out")
        row = batch or 0
        tokens = None if self.tokens is None else self.tokens[row if row < len(self.tokens) else 0]
        return display.view_figure(self[layer], batch=row, head=head, tokens=tokens, dark=dark, lang=lang)

    def doctor(self) -> Diagnosis:
        """Findings on the masks and numbers of this run. Raises LookupError if nothing was seen.

        >>> import torch, regard
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with regard.watch(layer) as seen:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> seen.doctor().ok
        True
        """
        self._require_calls()
        return doctors.examine(self.records)

    def summary(self, lang: Lang = "en") -> str:
        """A table with a line per run of a module: sizes, kernel, entropy and patterns.

        Args:
            lang: "en" or "ko".

        Raises:
            ValueError: for another language.
            LookupError: if nothing was seen.

        Example:
            >>> import torch, regard
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> with regard.watch(layer) as seen:
            ...     _ = layer(torch.zeros(1, 3, 8))
            >>> print(seen.summary().splitlines()[0])
            TransformerEncoderLayer: 1 attention modules, 1 calls
        """
        self._require_calls()
        return display.summarise(self, lang)

    def _repr_html_(self) -> str:
        return display.capture_html(self)

    def __repr__(self) -> str:
        if not self.names:
            return f"Capture({self.model or 'nothing'}: no attention was seen)"
        more = f" and {len(self.edits) - 1} more" if len(self.edits) > 1 else ""
        edited = f", edited by {self.edits[0]!r}{more}" if self.edits else ""
        return f"Capture({self.model}: {merge_paths(self.names)}; {len(self.records)} calls{edited})"


def open(path: str | os.PathLike[str]) -> Capture:
    """Open a capture that `Capture.save` wrote. Its tensors are in memory, on the CPU.

    Args:
        path: the file; `capture.origin` repeats it, with the versions that wrote the file and when.

    Raises:
        CaptureFileError: a ValueError, if the file is damaged, no capture, or from a newer regard.
        OSError: if it cannot be opened.

    Example:
        >>> import tempfile, regard
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Capture("GPT2").save(f"{folder}/run.regard")
        ...     opened = regard.open(f"{folder}/run.regard")
        >>> opened.model, sorted(opened.origin)
        ('GPT2', ['path', 'regard', 'torch', 'written'])
    """
    capture = Capture()
    saving.load(capture, path)
    return capture
