"""What one attention call did: its output, measures of every head, and exact weights on demand.

A view holds what was measured, small arrays only. Whatever else is asked for is computed from q and k, if they are
there: always after `look`, after `watch` where `keep="qk"` was asked for.

It does not know how calls are made or caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.lens import patterns
from regard.lens.measures import engines
from regard.lens.measures.measures import MAP_SIZE, NAMES, TOP, MeasureOptions, at_least_one
from regard.lens.measures.weights import Weights, sources
from regard.lens.patterns import Patterns
from regard.lens.placement import NOWHERE, Placed
from regard.lens.validity import Report, index_among, judge, part_of_axis
from regard.masks.mask import Grid
from regard.masks.token_masks import at_positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.lens.overlays import Overlay

__all__ = ["PER_QUERY", "Place", "Tokens", "Told", "Top", "View"]

PER_QUERY = ("lse", "entropy", "max_logit", "effective")
OVERVIEW = "a file saved with overview=True. Save the capture without overview=True"
CHECK_CELLS = 1 << 24  # weights held at once while rows are checked


@dataclass(frozen=True)
class Top:
    """The strongest links of each row: what `View.top` gives.

    index: (…, H, Nq, k) keys, strongest first, the lower key first among equals; −1 beyond what is visible.
    weight: (…, H, Nq, k) their weights, 0 there.
    tied: (…, H, Nq) whether a key that was left out is as strong as the last one taken.
    """

    index: Any
    weight: Any
    tied: Any


class Place(Protocol):
    """How a call's queries stand among its keys: `regard.lens.doctor.mask_summary.Sight`, or what a file says of it."""

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


@dataclass(repr=False, eq=False)
class View:
    """One attention call seen from all sides. Arrays are of the inputs' kind, with leading axes (…, H) as the queries'.

    `output`; `lse`, `max_logit`, `entropy`, `effective` (…, H, Nq); `received` (…, H, Nk); `map(size)`, `top(k)`;
    exact weights by `row`, `column`, `tile`; `patterns()`, `mean(name)` per head, `check()`.

    >>> import regard
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> regard.look(x, x, x)
    View(1 × 2 heads, 3 queries, 3 keys; lse, entropy, received, max_logit, map; exact rows at hand)
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
    links: int = TOP  # that `top` gives, where none are held
    overview: bool = False  # saved with overview=True, which leaves out q, k, outputs and links
    placed: Placed = NOWHERE  # where the tokens lie in a picture, and their words
    edited: bool = False  # the model changed the weights after its softmax: these are those that it applied

    # ------------------------------------------------------------------------------------------------------- measures

    @property
    def output(self) -> Any:
        """The result of the attention itself. Raises LookupError where it was not kept."""
        if self.given_output is None:
            if self.overview:
                raise LookupError(
                    f"the output is not in {OVERVIEW}, of a run that kept it: watch(model, keep='output')"
                )
            raise LookupError("the output was not kept: watch(model, keep='output') keeps it")
        return self.given_output

    @property
    def lse(self) -> Any:
        """(…, H, Nq) natural log of each row's sum of exponentials; −∞, or the sink, for a row that sees nothing."""
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
        """(…, H, Nq) 1/Σp², how many keys a row spreads over, a sink counted as one more; 0 without either."""
        return self._give(self._held("effective"))

    @property
    def received(self) -> Any:
        """(…, H, Nk) Σ p over the queries: what each key gets from all of them."""
        return self._give(self._held("received"))

    def map(self, size: int | None = None) -> Any:
        """Weights pooled to at most size × size cells, (…, H, cells, cells); with N ≤ size they are exact.

        A cell is the sum over its queries and keys, divided by the number of its queries: a row of cells sums to 1.

        >>> import torch, regard
        >>> x = torch.zeros(100, 4)
        >>> regard.look(x, x, x).map(2)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])

        size: default that of the map which was measured, or to be measured, with the view.
        Raises LookupError where another size was measured and q and k were not kept.
        """
        size = self.size if size is None else at_least_one("size", size)
        if all(min(size, n) == min(self.size, n) for n in self.sizes[2:]):
            return self._give(self._held("map"))
        hint = f"; this view holds map({self.size})" if "map" in self.held else ""
        weights = self._exact(f"a map of size {size}", hint, f"size={size}")
        return self._give(engines.measure_weights(weights, MeasureOptions(frozenset(["map"]), size))["map"])

    def top(self, k: int | None = None) -> Top:
        """The k strongest links of each row, exact.

        >>> import torch, regard
        >>> x = torch.eye(3) * 30
        >>> regard.look(x, x, x).top(1).index[:, 0]
        tensor([0, 1, 2])

        k: default as many as were measured, or asked for, with the view.
        Raises LookupError where fewer were measured and q and k were not kept.
        """
        have = self.held["top_key"].shape[-1] if "top_key" in self.held else 0
        k = (have or self.links) if k is None else at_least_one("k", k)
        if "top_key" not in self.held or have < min(k, self.sizes[3]):
            hint = f"; this view holds top({have})" if have else ""
            weights = self._exact(f"finding the {k} strongest links of each row", hint, f"measures=['top'], top={k}")
            self.held |= engines.measure_weights(weights, MeasureOptions(frozenset(["top"]), top=k))
            have = k
        key, weight, tied = (self.held[f"top_{part}"] for part in ("key", "weight", "tied"))
        if k < have:  # the next one is known
            tied = (weight[..., k] == weight[..., k - 1]) & (key[..., k] >= 0)
        short = (0, max(0, k - have))  # beyond all the keys there are
        key, weight = pad(key[..., :k], short, value=-1), pad(weight[..., :k], short)
        return Top(self._give(key), self._give(weight), self._give(tied))

    def how(self, name: str) -> str:
        """Do a measure's numbers stand for single positions ("exact") or for several together ("pooled")?

        >>> import torch, regard
        >>> x = torch.zeros(100, 4)
        >>> view = regard.look(x, x, x)
        >>> view.how("entropy"), view.how("map")
        ('exact', 'pooled')

        name: a measure, or "lse"; of the map, it is said of `map()`. Raises ValueError for another.
        """
        if name not in ("lse", *NAMES):
            raise ValueError(f"no measure {name!r}; there are lse, {', '.join(NAMES)}")
        if name == "map":
            return "exact" if max(self.sizes[2:]) <= self.size else "pooled"
        return "pooled" if name in self.pooled else "exact"

    def mean(self, name: str) -> Any:
        """One number per head, (…, H): a measure's mean over the queries that are neither padding nor see nothing.

        >>> import torch, regard
        >>> x = torch.zeros(2, 4)
        >>> regard.look(x, x, x, mask=regard.masks.causal()).mean("effective")
        tensor(1.5000)

        name: "lse", "entropy", "max_logit" or "effective". Raises ValueError for another, and LookupError where the
            numbers were pooled before, or not measured with q and k gone.
        """
        if name not in PER_QUERY:
            raise ValueError(f"mean is over queries: one of {', '.join(PER_QUERY)}; got {name!r}")
        if f"mean {name}" in self.held:
            return self._give(self.held[f"mean {name}"])
        if name in self.pooled:
            raise LookupError(f"{name} was pooled, padding and all; a mean over the queries can no longer be told")
        values = self._held(name)
        counted = self._counted(values.device)
        total = torch.where(counted, values, 0.0).sum(-1)
        return self._give(total / counted.expand_as(values).sum(-1).clamp(min=1))

    def patterns(self) -> dict[str, Any]:
        """Name → (…, H) in [0, 1]: how far each head follows a pattern, see `regard.lens.patterns`.

        >>> import torch, regard
        >>> x = torch.eye(4) * 30
        >>> regard.look(x, x, x).patterns()["own"]
        tensor(1.)

        Raises LookupError if they were not measured and q and k were not kept.
        """
        return {name: self._give(values) for name, values in self.head_patterns().scores.items()}

    def head_patterns(self) -> Patterns:
        """Scores and shares of the patterns as tensors (B, H): those that are held, or else from exact weights."""
        held = [
            {name.removeprefix(kind): t for name, t in self.held.items() if name.startswith(kind)}
            for kind in ("pattern ", "share ", "beside ")
        ]
        return Patterns(*held) if held[0] else self.score_patterns()

    def score_patterns(self) -> Patterns:
        """Scores and shares of the patterns as tensors (B, H), from exact weights."""
        weights, place, tokens = self._exact("patterns"), self.place, self.tokens
        visible = place.visible
        if visible is not None and any(source.has_sink for source in sources(weights)):
            visible = visible + 1  # a sink takes part in the entropy
        among_keys = self.kind == "self"
        return patterns.measure(
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
        """The exact weights of query i over all keys, (…, H, Nk). Negative i counts from the end.

        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> regard.look(x, x, x, mask=regard.masks.causal()).row(1)
        tensor([0.5000, 0.5000, 0.0000, 0.0000])

        Raises IndexError for a query that is not there, LookupError where q and k were not kept.
        """
        i = index_among("row", i, self.sizes[2], "queries")
        return self._give(self._exact("row").tile(slice(i, i + 1), slice(None))[:, :, 0])

    def column(self, j: int) -> Any:
        """The exact weights that key j gets from all queries, (…, H, Nq). Negative j counts from the end.

        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> regard.look(x, x, x, mask=regard.masks.causal()).column(0)
        tensor([1.0000, 0.5000, 0.3333, 0.2500])

        Raises IndexError for a key that is not there, LookupError where q and k were not kept.
        """
        j = index_among("column", j, self.sizes[3], "keys")
        return self._give(self._exact("column").tile(slice(None), slice(j, j + 1))[..., 0])

    def tile(self, rows: slice | range | Sequence[int], cols: slice | range | Sequence[int]) -> Any:
        """The exact weights of these queries and keys, (…, H, rows, columns). As many as you ask for are made.

        >>> import numpy as np, regard
        >>> x = np.eye(3)
        >>> regard.look(x, x, x).tile(slice(0, 2), [2, 0]).round(2)
        array([[0.26, 0.47],
               [0.26, 0.26]])

        rows, cols: a slice, a range, or integers, of which negative ones count from the end.
        Raises IndexError and LookupError as `row` does, TypeError for what is none of these.
        """
        r, c = part_of_axis("rows", rows, self.sizes[2], "queries"), part_of_axis("cols", cols, self.sizes[3], "keys")
        return self._give(self._exact("tile").tile(r, c))

    def overlay(
        self,
        image: object = None,
        token: int | str | tuple[int, int] | None = None,
        *,
        at: tuple[float, float] | None = None,
        head: int | None = None,
        batch: int = 0,
        picture: int = 0,
        column: bool = False,
    ) -> Overlay:
        """What a token looks at, on the photograph; without a token, what all but padding look at. See docs/lens.md.

        >>> import torch, regard
        >>> x, sides = torch.zeros(1, 1, 5, 4), regard.layouts.Sides.patches(32, patch=16)
        >>> replace(regard.look(x, x, x), placed=Placed(sides=(sides,))).overlay(token="cls").mass.round(2)
        array([0.2, 0.2, 0.2, 0.2])

        image: the photograph, a Pillow image or an array; without one the overlay is drawn on bare paper.
        token: its index, its kind ("cls") or its word where there is one such, or (window, index).
        at: instead, a place (y, x) in the photograph's pixels: the patch there.
        head: by default the mean of all.  batch, picture: which batch entry, and which of its pictures.
        column: not what the token looks at, but from where it is looked at.
        Raises LookupError where layouts are not known (`capture.layouts`), q and k were not kept, or there is no such
        token or place; IndexError for a number that is not there; ValueError, TypeError for an image that does not fit.
        """
        from regard.lens.overlays import overlay_of  # which asks views, and so imports this file

        return overlay_of(self, image, token, at=at, head=head, batch=batch, picture=picture, column=column)

    def check(self) -> Report:
        """Look at every row, a few at a time: does it sum to 1 (or to 0), is anything NaN or infinite.

        Rows of weights that the model edited after its softmax may have any sum and sign.

        >>> import torch, regard
        >>> x = torch.eye(2)
        >>> print(regard.look(x / torch.tensor([[1], [0]]), x, x).check())
        1 of 2 rows is not attention weights (tolerance 2.35e-06):
          row 1: holds NaN; often a row whose keys are all hidden

        Raises LookupError if q and k were not kept.
        """
        weights, (batch, heads, nq, nk) = self._exact("check"), self.sizes
        at_once = max(1, CHECK_CELLS // max(1, batch * heads * nk))
        parts = [torch.zeros(3, batch, heads, 0, dtype=torch.float64)]
        for i in range(0, nq, at_once):
            p = weights.tile(slice(i, min(i + at_once, nq)), slice(None))  # (B, H, rows, Nk)
            total = p.sum(-1)
            low, high = p.aminmax(dim=-1) if nk else (total, total)
            parts.append(torch.stack([low, high, total]).double().cpu())
        lead = (batch, heads) if self.lead is None else self.lead
        low, high, total = torch.cat(parts, -1).reshape(3, *lead, nq).numpy()
        made_of = sources(weights)
        return judge(
            low,
            high,
            total,
            tolerance=max((source.rounding for source in made_of), default=nk * torch.finfo(torch.float32).eps),
            sinks=any(source.has_sink for source in made_of),
            edited=self.edited,
        )

    # ------------------------------------------------------------------------------------------------------- plumbing

    def _held(self, name: str) -> Tensor:
        """A measure that is there, or by one more pass; after that it is there."""
        if name not in self.held:
            if self.edited and name in ("lse", "max_logit"):
                raise LookupError(f"{name} is of a softmax, and the model edited the weights after it")
            if name not in NAMES:
                raise LookupError(f"this view holds no {name}")
            weights = self._exact(name, "", f"measures=['{name}']")
            self.held |= engines.measure_weights(weights, MeasureOptions(frozenset([name]), self.size))
        return self.held[name]

    def _exact(self, what: str, hint: str = "", instead: str = "") -> Weights:
        if self.weights is None:
            measured = f"; watch(model, {instead}) measures it while the model runs" if instead else ""
            if self.overview:
                lacks = f"which are not in {OVERVIEW}, of a watch(model, keep='qk')"
                raise LookupError(f"{what} needs q and k{hint}, {lacks}{measured}")
            raise LookupError(
                f"{what} needs q and k, which were not kept{hint}: watch(model, keep='qk') keeps them{measured}"
            )
        return self.weights

    def _counted(self, device: torch.device) -> Tensor:
        """(B or 1, H or 1, Nq): which queries are no padding and see something."""
        (_, _, nq, nk), place = self.sizes, self.place
        counted = torch.ones(1, 1, nq, dtype=torch.bool, device=device)
        if place.padding is not None and self.kind == "self" and nk:
            positions = Grid(nq, nk, (1, 1), place.padding.device).positions(place.offset)
            counted = ~at_positions(place.padding, positions, outside=False).to(device)
        if place.visible is not None:
            counted = counted & (place.visible > 0).to(device)
        if "lse" in self.held and "lse" not in self.pooled:  # a bias may hide all keys of a row
            counted = counted & (self.held["lse"] != -inf)
        return counted

    def _give(self, x: Tensor) -> Any:
        """A tensor (B, H, …) as the caller's kind of array, with the caller's leading axes."""
        if self.lead is not None:
            x = x.reshape((*self.lead, *x.shape[2:]))
        return x.detach().cpu().numpy() if self.numpy else x

    def show(self, head: int | None = None, *, batch: int = 0, dark: bool = False) -> Figure:
        """A picture: the maps of all heads, or one head's with what keys receive and its queries' entropy.

        >>> import torch, regard
        >>> x = torch.zeros(1, 2, 3, 4)
        >>> regard.look(x, x, x).show(head=1).texts[0].get_text()
        'head 1'

        head: default all.  batch: which batch row.  dark: for dark paper.
        Raises IndexError for a head or batch row that is not there, LookupError where no map was measured.
        """
        from regard.lens import show as showing

        return showing.picture_of(self, batch=batch, head=head, dark=dark)

    def _repr_png_(self) -> bytes | None:
        from regard.lens import show as showing

        return showing.png_of(self)

    def __repr__(self) -> str:
        batch, heads, nq, nk = self.sizes
        without = "an overview without q and k" if self.overview else "no q and k kept"
        exact = "exact rows at hand" if self.weights is not None else without
        names = [n for n in ("lse", *NAMES) if n in self.held or (n == "top" and "top_key" in self.held)]
        edited = "; edited after softmax" if self.edited else ""
        return f"View({batch} × {heads} heads, {nq} queries, {nk} keys; {', '.join(names)}; {exact}{edited})"

    def moved(self, device: str | torch.device) -> View:
        """The same view with its measures on another device; q and k stay where they are."""
        return replace(self, held={name: t.to(device) for name, t in self.held.items()})
