"""`View`: the output, the measures and the exact weights of one attention call; `Record`: the call in a capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.checks import index_among, part_of_axis
from regard.lens import display, patterns
from regard.lens.measures import engines
from regard.lens.measures.measures import MAP_SIZE, NAMES, TOP, MeasureOptions, at_least_one
from regard.lens.measures.weights import ComputedWeights, Part, Weights, grouped_scores, sources
from regard.lens.overlays import Overlay, Token, TokenPlacement, make_overlay
from regard.lens.patterns import KeyTokens, KnownVisibility, Patterns
from regard.lens.validity import Report, judge
from regard.lens.values import (
    Attribution,
    OutputProjection,
    StoredValues,
    along,
    read_projection,
    through_norm,
    value_norms,
)
from regard.locale import Lang
from regard.masks.mask import TileGrid
from regard.masks.patterns import at_positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.lens.assembly import StepLink
    from regard.lens.visibility import Facts, MaskSummary

PER_QUERY = ("lse", "entropy", "max_logit", "effective")
BY_TOKEN = ("delimiter", "same token", "induction")
OVERVIEW = "a file saved with overview=True. Save the capture without overview=True"
CHECK_CELLS = 1 << 24  # weights held at once while rows are checked
NO_GRADIENT = (
    "call loss.backward() inside `with watch(model, keep=['qk', 'v'], gradients=True)`, without torch.no_grad() and "
    "without activation checkpointing"
)
NO_VALUES = "the values were not kept: watch(model, keep=['qk', 'v']) keeps them"
LABELS = {"norms": "exact", "gradients": "exact", "weighted_gradients": "first order", "toward": "exact"}


@dataclass(frozen=True)
class TopLinks:
    """The strongest links of each row: the result of `View.top`.

    Attributes:
        index: (…, H, Nq, k) keys, strongest first, the lower key first among equals; −1 beyond what is visible.
        weight: (…, H, Nq, k) their weights, 0 where the index is −1.
        tied: (…, H, Nq) whether a key that was left out is as strong as the last one taken.
    """

    index: Any
    weight: Any
    tied: Any


@dataclass(repr=False, eq=False)
class View:
    """One attention call: its output, its measures, and exact weights computed on demand.

    A view holds small arrays only. Anything else is computed from q and k, which `look` always keeps and `watch` keeps
    with `keep="qk"`. Arrays are of the inputs' kind (NumPy or torch), with leading axes (…, H) as the queries'.

    Measures: `output`; `lse`, `max_logit`, `entropy`, `effective` (…, H, Nq); `received` (…, H, Nk); `map(size)`;
    `top(k)`. Exact weights: `row(i)`, `column(j)`, `tile(rows, cols)`. Per head: `mean(name)`, `patterns()`.
    With the values (`keep=["qk", "v"]`): `norms(i)`, `toward(direction, i)`; with gradients: `gradients(i)`.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 2, 3, 4)
        >>> view = regard.look(x, x, x)
        >>> view
        View(1 × 2 heads, 3 queries, 3 keys; lse, entropy, received, map; exact rows at hand)
        >>> view.row(0).shape
        torch.Size([1, 2, 3])
    """

    sizes: tuple[int, int, int, int]  # B, H, Nq, Nk
    held: dict[str, Tensor]
    given_output: Any = None
    weights: Weights | None = None
    kind: str = "self"
    place: KnownVisibility | MaskSummary = field(default_factory=KnownVisibility)
    tokens: KeyTokens = field(default_factory=KeyTokens)
    size: int = MAP_SIZE  # of the map that is held
    lead: tuple[int, ...] | None = None  # the queries' axes before N, where they are not (B, H)
    numpy: bool = False
    engine: str = ""
    pooled: tuple[str, ...] = ()  # measures whose positions were averaged into bins
    links: int = TOP  # default k of `top`, where no links are held
    overview: bool = False  # saved with overview=True: without q, k, outputs and links
    placed: TokenPlacement = field(default_factory=TokenPlacement)  # where the tokens lie in an image, and their words
    edited: bool = False  # the model changed the weights after its softmax; these are the ones it applied
    kept_values: StoredValues | None = None
    without_values: str = NO_VALUES  # the reason, where there are none
    projection: OutputProjection | None = None  # of the module that made the call, if it was found
    without_gradient: str = NO_GRADIENT  # the reason, or what to do, where there is none
    output_gradient: Tensor | None = None  # (B, H, Nq, Dv) ∂loss/∂output, as `watch(gradients=True)` records it

    @property
    def output(self) -> Any:
        """The result of the attention itself. Raises LookupError if it was not kept."""
        if self.given_output is not None:
            return self.given_output
        if self.overview:
            raise LookupError(f"the output is not in {OVERVIEW}, of a run that kept it: watch(model, keep='output')")
        raise LookupError("the output was not kept: watch(model, keep='output') keeps it")

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
        """(…, H, Nq) 1/Σp², the effective number of keys of a row, a sink counted as one; 0 if there are none."""
        return self._give(self._held("effective"))

    @property
    def received(self) -> Any:
        """(…, H, Nk) Σ p over the queries: the total weight that each key gets."""
        return self._give(self._held("received"))

    def map(self, size: int | None = None) -> Any:
        """Pooled weights, (…, H, size, size), or fewer cells where N < size.

        A cell is the sum of p over its queries and keys, divided by its number of queries: a row of cells sums to 1.

        Args:
            size: cells per axis; default the size that was measured with the view.

        Raises:
            LookupError: if another size was measured and q and k were not kept.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(4, 2)
            >>> regard.look(x, x, x).map(2)
            tensor([[0.5000, 0.5000],
                    [0.5000, 0.5000]])
        """
        size = self.size if size is None else at_least_one("size", size)
        if all(min(size, n) == min(self.size, n) for n in self.sizes[2:]):
            return self._give(self._held("map"))
        hint = f"; this view holds map({self.size})" if "map" in self.held else ""
        weights = self._exact(f"a map of size {size}", hint, f"size={size}")
        return self._give(engines.measure_weights(weights, MeasureOptions(frozenset(["map"]), size))["map"])

    def top(self, k: int | None = None) -> TopLinks:
        """The k strongest links of each row, exact.

        Args:
            k: links per row; default as many as were measured with the view.

        Raises:
            LookupError: if fewer were measured and q and k were not kept.

        Example:
            >>> import torch, regard
            >>> x = torch.eye(3) * 30
            >>> regard.look(x, x, x).top(1).index[:, 0]
            tensor([0, 1, 2])
        """
        have = self.held["top_key"].shape[-1] if "top_key" in self.held else 0
        k = (have or self.links) if k is None else at_least_one("k", k)
        if "top_key" not in self.held or have < min(k, self.sizes[3]):
            hint = f"; this view holds top({have})" if have else ""
            weights = self._exact(f"finding the {k} strongest links of each row", hint, f"measures=['top'], top={k}")
            self.held |= engines.measure_weights(weights, MeasureOptions(frozenset(["top"]), top=k))
            have = k
        key, weight, tied = (self.held[f"top_{part}"] for part in ("key", "weight", "tied"))
        if k < have:  # the next link is held, so ties are visible
            tied = (weight[..., k] == weight[..., k - 1]) & (key[..., k] >= 0)
        short = (0, max(0, k - have))  # more links than keys
        key, weight = pad(key[..., :k], short, value=-1), pad(weight[..., :k], short)
        return TopLinks(self._give(key), self._give(weight), self._give(tied))

    def how(self, name: str) -> str:
        """Whether a measure's numbers belong to single positions ("exact") or to several together ("pooled").

        Of what is computed from values: "exact", or "first order" for an effect estimated by a gradient.

        Args:
            name: a measure, "lse", or a method of the values such as "norms"; for "map", the answer is about `map()`.

        Raises:
            ValueError: for an unknown name.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(100, 4)
            >>> view = regard.look(x, x, x)
            >>> view.how("entropy"), view.how("map")
            ('exact', 'pooled')
        """
        if name in LABELS:
            return LABELS[name]
        if name not in ("lse", *NAMES):
            raise ValueError(f"no measure {name!r}; there are lse, {', '.join((*NAMES, *LABELS))}")
        if name == "map":
            return "exact" if max(self.sizes[2:]) <= self.size else "pooled"
        return "pooled" if name in self.pooled else "exact"

    def mean(self, name: str) -> Any:
        """Mean of a measure over the queries of each head, (…, H); padding and rows that see nothing do not count.

        Args:
            name: "lse", "entropy", "max_logit" or "effective".

        Raises:
            ValueError: for another name.
            LookupError: if the numbers were pooled, or not measured and q and k were not kept.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(2, 4)
            >>> regard.look(x, x, x, mask=regard.masks.causal()).mean("effective")
            tensor(1.5000)
        """
        if name not in PER_QUERY:
            raise ValueError(f"mean is over queries: one of {', '.join(PER_QUERY)}; got {name!r}")
        if f"mean {name}" in self.held:
            return self._give(self.held[f"mean {name}"])
        if name in self.pooled:
            raise LookupError(f"{name} was pooled together with padding, so its mean over the queries is not known")
        values = self._held(name)
        (_, _, nq, nk), place, device = self.sizes, self.place, values.device
        counted = torch.ones(1, 1, nq, dtype=torch.bool, device=device)  # (B or 1, H or 1, Nq)
        if place.padding is not None and self.kind == "self" and nk:
            positions = TileGrid(nq, nk, (1, 1), place.padding.device).positions(place.offset)
            counted = ~at_positions(place.padding, positions, outside=False).to(device)
        if place.visible is not None:
            counted = counted & (place.visible > 0).to(device)
        if "lse" in self.held and "lse" not in self.pooled:  # a bias may hide all keys of a row
            counted = counted & (self.held["lse"] != -inf)
        total = torch.where(counted, values, 0.0).sum(-1)
        return self._give(total / counted.expand_as(values).sum(-1).clamp(min=1))

    def patterns(self) -> dict[str, Any]:
        """Scores of attention patterns, name → (…, H) in [0, 1]; see `regard.lens.patterns`.

        Raises:
            LookupError: if they were not measured and q and k were not kept.

        Example:
            >>> import torch, regard
            >>> x = torch.eye(4) * 30
            >>> regard.look(x, x, x).patterns()["own"]
            tensor(1.)
        """
        return {name: self._give(values) for name, values in self.head_patterns().scores.items()}

    def head_patterns(self) -> Patterns:
        """Scores and shares of the patterns as tensors (B, H): those that are held, else from exact weights."""
        held = [
            {name.removeprefix(kind): t for name, t in self.held.items() if name.startswith(kind)}
            for kind in ("pattern ", "share ", "beside ")
        ]
        return Patterns(*held) if held[0] else self.score_patterns()

    def score_patterns(self) -> Patterns:
        """Scores and shares of the patterns as tensors (B, H), from exact weights."""
        weights, visible = self._exact("patterns"), self.place.visible
        if visible is not None and any(source.has_sink for source in sources(weights)):
            visible = visible + 1  # a sink takes part in the entropy
        return patterns.measure(
            weights,
            self.place,
            self.tokens,
            kind=self.kind,
            entropy=self._held("entropy") if visible is not None else None,
            visible=visible,
            received=self._held("received") if self.tokens.delimiters is not None else None,
        )

    def per_head(self, measure: str) -> Tensor:
        """One number per head as a tensor (B, H): a measure's mean over the queries, or a pattern's score.

        Raises LookupError if it is not known; the message lists `known_values`.
        """
        if measure in PER_QUERY:
            mean: Tensor = self.in_torch().mean(measure)
            return mean
        scores = self.head_patterns().scores
        if measure in scores:
            return scores[measure]
        reason = ""
        if measure in BY_TOKEN and self.kind == "cross" and measure != "delimiter":
            reason = f"; {measure!r} compares the tokens of one sequence, and this is cross-attention"
        elif measure in BY_TOKEN and self.tokens.ids is None:
            reason = f"; {measure!r} needs tokens: pass tokens= to watch, one for each of the {self.sizes[3]} keys"
        elif measure == "delimiter":
            reason = "; none of the tokens= is a delimiter, such as '.' or '[SEP]': pass them as words, not numbers"
        known = ", ".join(self.known_values()) or "none"
        raise LookupError(f"no measure or pattern {measure!r} here; there are {known}{reason}")

    def known_values(self) -> list[str]:
        """Names of the measures and patterns that `per_head` accepts."""
        exact = self.weights is not None
        known = [n for n in PER_QUERY if f"mean {n}" in self.held or (n in self.held and n not in self.pooled)]
        known += [n for n in ("entropy", "effective") if exact and n not in known]
        scored = exact or any(name.startswith("pattern ") for name in self.held)
        return [*known, *(self.patterns() if scored else ())]

    def row(self, i: int) -> Any:
        """The exact weights of query i over all keys, (…, H, Nk). A negative i counts from the end.

        Raises:
            IndexError: if there is no such query.
            LookupError: if q and k were not kept.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(4, 2)
            >>> regard.look(x, x, x, mask=regard.masks.causal()).row(1)
            tensor([0.5000, 0.5000, 0.0000, 0.0000])
        """
        i = index_among("row", i, self.sizes[2], "queries")
        return self._give(self._exact("row").tile(slice(i, i + 1), slice(None))[:, :, 0])

    def column(self, j: int) -> Any:
        """The exact weights that all queries give to key j, (…, H, Nq). A negative j counts from the end.

        Raises:
            IndexError: if there is no such key.
            LookupError: if q and k were not kept.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(4, 2)
            >>> regard.look(x, x, x, mask=regard.masks.causal()).column(0)
            tensor([1.0000, 0.5000, 0.3333, 0.2500])
        """
        j = index_among("column", j, self.sizes[3], "keys")
        return self._give(self._exact("column").tile(slice(None), slice(j, j + 1))[..., 0])

    def tile(self, rows: slice | range | Sequence[int], cols: slice | range | Sequence[int]) -> Any:
        """The exact weights of some queries and keys, (…, H, rows, columns).

        Args:
            rows: queries as a slice, a range or integers; negative integers count from the end.
            cols: keys, likewise.

        Raises:
            IndexError: if there is no such query or key.
            LookupError: if q and k were not kept.
            TypeError: for another kind of index.

        Example:
            >>> import numpy as np, regard
            >>> x = np.eye(3)
            >>> regard.look(x, x, x).tile(slice(0, 2), [2, 0]).round(2)
            array([[0.26, 0.47],
                   [0.26, 0.26]])
        """
        r, c = part_of_axis("rows", rows, self.sizes[2], "queries"), part_of_axis("cols", cols, self.sizes[3], "keys")
        return self._give(self._exact("tile").tile(r, c))

    # -------------------------------------------------------------------------------------------- values and gradients

    @property
    def values(self) -> Any:
        """(…, Hkv, Nk, Dv) the values of the call. Raises LookupError if they were not kept."""
        values = self._values("values")
        if self.lead is not None:  # (…, H) of the queries, or without heads
            heads = values.shape[1:2] if len(self.lead) > 1 else ()
            values = values.reshape((*self.lead[: len(self.lead) - len(heads)], *heads, *values.shape[2:]))
        return values.cpu().numpy() if self.numpy else values

    def norms(self, i: int, w_o: object = None) -> Any:
        """‖p_ij · v_j · W_O‖, how much of each key arrives at query i: (…, H, Nk). Kobayashi et al., 2020.

        A key may have a large weight and a value of nearly nothing, as the first token often has. What stands between
        the weighted sum and the projection, such as a gate or a norm, does not count.

        Args:
            i: the query; a negative one counts from the end.
            w_o: the output projection, an nn.Linear or a tensor (H·Dv, d_model); default the one that `watch` found in
                the module. False: none, which gives ‖p_ij v_j‖.

        Raises:
            IndexError: if there is no such query.
            LookupError: if q, k and v were not kept, or no projection is known.
            TypeError, ValueError: for a projection that does not fit.

        Example:
            >>> import torch, regard
            >>> x, values = torch.zeros(2, 4), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
            >>> regard.look(x, x, values).norms(0, w_o=2 * torch.eye(2))
            tensor([5., 1.])
        """
        i = index_among("norms", i, self.sizes[2], "queries")
        p = self._exact("norms").tile(slice(i, i + 1), slice(None))[:, :, 0].abs()
        norms = value_norms(self._values("norms"), self._projection(w_o))
        if norms.shape[1] != p.shape[1]:
            norms = norms.repeat_interleave(p.shape[1] // norms.shape[1], 1)
        # A hidden key adds nothing, whatever its value: a cache of fixed size has anything behind its end.
        return self._give(torch.where(p == 0, 0.0, p * norms.to(p)))

    def gradients(self, i: int) -> Any:
        """∂loss/∂p_ij = ∂loss/∂o_i · v_j of query i: (…, H, Nk), also for keys that are hidden.

        Raises:
            IndexError: if there is no such query.
            LookupError: if v or the gradient was not kept, or the call had dropout.

        Example:
            >>> import torch, regard
            >>> x, values = torch.zeros(2, 4), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
            >>> view = regard.look(x, x, values)
            >>> view.output_gradient = torch.ones(1, 1, 2, 2)
            >>> view.gradients(0), view.weighted_gradients(0)
            (tensor([7., 1.]), tensor([3.5000, 0.5000]))
        """
        i = index_among("gradients", i, self.sizes[2], "queries")
        return self._give(self.gradient_tile(slice(i, i + 1), "gradients")[:, :, 0])

    def weighted_gradients(self, i: int) -> Any:
        """p_ij · ∂loss/∂p_ij of query i, (…, H, Nk): to first order, what the loss owes to each weight.

        The sum over the keys is ∂loss/∂o_i · o_i. Raises as `gradients`, and LookupError if q and k were not kept.
        """
        i = index_among("weighted_gradients", i, self.sizes[2], "queries")
        return self._give(self.weighted_gradient_tile(slice(i, i + 1), "weighted_gradients")[:, :, 0])

    def toward(
        self,
        direction: Tensor,
        i: int,
        *,
        w_o: object = None,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
    ) -> Attribution:
        """Direct logit attribution: p_ij · (v_j W_O) · direction, what each key of query i adds along a direction.

        With the unembedding of a token as the direction and the model's final norm, this is the part of the token's
        logit that goes from this head straight to the output. What later layers make of it does not count.

        Args:
            direction: (d_model,), for example lm_head.weight[mary] − lm_head.weight[john]; or (B, d_model).
            i: the query.
            w_o: as for `norms`.
            norm: the final norm, a LayerNorm or an RMSNorm, with its scale frozen at that of `residual`.
            residual: (d_model,) or (B, d_model), what went into the final norm at query i.

        Returns:
            An `Attribution`: `.scores` (…, H, Nk); prints as a table of the strongest.

        Raises:
            IndexError: if there is no such query.
            LookupError: if q, k and v were not kept, or no projection is known.
            TypeError, ValueError: for a direction, norm or projection that does not fit.

        Example:
            >>> import torch, regard
            >>> x, values = torch.zeros(2, 4), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
            >>> regard.look(x, x, values).toward(torch.tensor([0.0, 1.0]), 0, w_o=torch.eye(2)).scores
            tensor([2.0000, 0.5000])
        """
        # 1. Check the arguments.
        i = index_among("toward", i, self.sizes[2], "queries")
        if w_o is False:
            raise ValueError("toward needs the output projection, into whose space a direction points: pass w_o=")
        projection = self._projection(w_o)
        assert projection is not None
        vectors = {"direction": direction} | ({} if norm is None else {"residual": residual})
        batch, wide = self.sizes[0], projection.shape[-1]
        for name, x in vectors.items():
            if not isinstance(x, Tensor):
                hint = ", which went into the norm at query i: its scale is frozen there" if name == "residual" else ""
                raise TypeError(f"toward needs {name}=, a tensor ({wide},){hint}; got {type(x).__name__}")
            if tuple(x.shape) not in ((wide,), (1, wide), (batch, wide)):
                raise ValueError(f"{name} must be ({wide},) or ({batch}, {wide}), got {tuple(x.shape)}")
        if norm is None and residual is not None:
            raise ValueError("residual= is what goes into the final norm: pass norm= too, or leave it out")
        # 2. The direction before the norm; the weights; their product with the values.
        direction = direction.detach()
        if norm is not None and residual is not None:
            direction = through_norm(norm, residual, direction)
        p = self._exact("toward").tile(slice(i, i + 1), slice(None))[:, :, 0]
        parts = along(self._values("toward"), projection, direction)
        scores = torch.where(p == 0, 0.0, p * parts.to(p))
        through = "" if norm is None else f" through {type(norm).__name__} with its scale frozen"
        rows = tuple(f"head {h}" for h in range(self.sizes[1]))
        title = f"direct path from query {i} along a direction{through}"
        return Attribution(self._give(scores), title, "exact", self.placed.words, rows)

    def gradient_tile(self, rows: Part, what: str) -> Tensor:
        """∂loss/∂P of some queries and all keys, (B, H, rows, Nk). Raises as `gradients`; `what` is for messages."""
        values, gradient = self._values(what), self.output_gradient
        if gradient is None:
            raise LookupError(f"{what} needs the gradient of the attention's output: {self.without_gradient}")
        made_of = () if self.weights is None else sources(self.weights)
        if dropout := [s.call.dropout for s in made_of if isinstance(s, ComputedWeights) and s.call.dropout]:
            raise LookupError(f"the call dropped weights at random (dropout {dropout[0]:g}): run model.eval() first")
        wide = torch.promote_types(values.dtype, torch.float32)
        return grouped_scores(gradient[:, :, rows].to(values.device, wide), values.to(wide))

    def weighted_gradient_tile(self, rows: Part, what: str) -> Tensor:
        """P ⊙ ∂loss/∂P of some queries and all keys, (B, H, rows, Nk); 0 for a hidden key. Raises as `gradients`."""
        gradients = self.gradient_tile(rows, what)
        p = self._exact(what).tile(rows, slice(None))
        return torch.where(p == 0, 0.0, p * gradients.to(p))

    def _values(self, what: str) -> Tensor:
        if self.kept_values is None:
            reason = f"they are not in {OVERVIEW}" if self.overview else self.without_values
            raise LookupError(f"{what} needs the values of the call: {reason}")
        return self.kept_values.tensor

    def _projection(self, w_o: object) -> Tensor | None:
        """The output projection (H, Dv, d_model) that is given or was found; None for w_o=False."""
        if w_o is False:
            return None
        heads, width = self.sizes[1], self._values("the output projection").shape[-1]
        if w_o is not None:
            return read_projection(w_o, heads, width)
        if self.projection is None:
            raise LookupError(
                f"the output projection of {self.placed.path or 'this attention'} is not known: pass w_o=, an "
                f"nn.Linear or a tensor ({heads} heads × {width} = {heads * width}, d_model); for norms, w_o=False "
                "leaves it out"
            )
        return self.projection.per_head(heads, width)

    # ----------------------------------------------------------------------------------------------------------- images

    def overlay(
        self,
        image: object = None,
        token: Token = None,
        *,
        at: tuple[float, float] | None = None,
        head: int | None = None,
        batch: int = 0,
        image_index: int = 0,
        column: bool = False,
    ) -> Overlay:
        """The weights of a token on the image that its keys are patches of. See docs/lens.md.

        Args:
            image: a Pillow image or an array to draw on; without one the overlay is drawn on blank paper.
            token: its index, its kind ("cls") or word if there is one such, or (window, index). Default: the mean of
                all queries but padding.
            at: instead of a token, a place (y, x) in the image's pixels: the patch there.
            head: which head; default the mean of all.
            batch: which batch entry.
            image_index: which of the entry's images.
            column: show who looks at the token, instead of what it looks at.

        Raises:
            LookupError: if the layouts are not known (`capture.layouts`), q and k were not kept, or there is no such
                token or place.
            IndexError: if there is no such head, batch entry or image.
            ValueError, TypeError: for an image or arguments that do not fit.

        Example:
            >>> import torch, regard
            >>> from regard.lens.overlays import TokenPlacement
            >>> x, sides = torch.zeros(1, 1, 5, 4), regard.layouts.Sides.patches(32, patch=16)
            >>> view = replace(regard.look(x, x, x), placed=TokenPlacement(sides=(sides,)))
            >>> view.overlay(token="cls").mass.round(2)
            array([0.2, 0.2, 0.2, 0.2])
        """
        return make_overlay(self, image, token, at=at, head=head, batch=batch, image_index=image_index, column=column)

    def check(self) -> Report:
        """Check that every row sums to 1 (or is 0), without NaN or infinite weights; see `regard.check`.

        Rows of weights that the model edited after its softmax may have any sum and sign.

        Raises:
            LookupError: if q and k were not kept.

        Example:
            >>> import torch, regard
            >>> x = torch.eye(2)
            >>> print(regard.look(x / torch.tensor([[1], [0]]), x, x).check())
            1 of 2 rows is not attention weights (tolerance 2.35e-06):
              row 1: holds NaN; often a row whose keys are all hidden
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
        tolerance = max((source.rounding for source in made_of), default=nk * torch.finfo(torch.float32).eps)
        sinks = any(source.has_sink for source in made_of)
        return judge(low, high, total, tolerance=tolerance, sinks=sinks, edited=self.edited)

    def _held(self, name: str) -> Tensor:
        """A measure; one that is not held is measured now and held from then on."""
        if name not in self.held:
            if self.edited and name in ("lse", "max_logit"):
                raise LookupError(f"{name} belongs to a softmax, and the model edited the weights after it")
            if name not in NAMES:
                raise LookupError(f"this view holds no {name}")
            weights = self._exact(name, "", f"measures=['{name}']")
            self.held |= engines.measure_weights(weights, MeasureOptions(frozenset([name]), self.size))
        return self.held[name]

    def _exact(self, what: str, hint: str = "", instead: str = "") -> Weights:
        if self.weights is not None:
            return self.weights
        measured = f"; watch(model, {instead}) measures it while the model runs" if instead else ""
        if self.overview:
            lacks = f"which are not in {OVERVIEW}, of a watch(model, keep='qk')"
            raise LookupError(f"{what} needs q and k{hint}, {lacks}{measured}")
        raise LookupError(
            f"{what} needs q and k, which were not kept{hint}: watch(model, keep='qk') keeps them{measured}"
        )

    def _give(self, x: Tensor) -> Any:
        """A tensor (B, H, …) as the caller's kind of array, with the caller's leading axes."""
        if self.lead is not None:
            x = x.reshape((*self.lead, *x.shape[2:]))
        return x.detach().cpu().numpy() if self.numpy else x

    def show(self, head: int | None = None, *, batch: int = 0, dark: bool = False, lang: Lang = "en") -> Figure:
        """A figure of the maps of all heads; or of one head, with received weights and entropy at the margins.

        Args:
            head: which head; default all.
            batch: which batch row.
            dark: draw on a dark background.
            lang: of the figure's words, "en" or "ko".

        Raises:
            IndexError: if there is no such head or batch row.
            LookupError: if no map was measured and q and k were not kept.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(1, 2, 3, 4)
            >>> regard.look(x, x, x).show(head=1).texts[0].get_text()
            'head 1'
        """
        return display.view_figure(self, batch=batch, head=head, dark=dark, lang=lang)

    def _repr_png_(self) -> bytes | None:
        return display.view_png(self)

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

    def in_torch(self) -> View:
        """The same with torch tensors of axes (B, H, …)."""
        return replace(self, lead=None, numpy=False)


@dataclass
class Record:
    """One attention call of a watched model.

    In compiled code only the compiled module is known: `path` is that module, plus the number of the call in its run
    if there are several ("layers.3.compiled_call.1").
    """

    path: str  # of the module that made the call, as `named_modules()` names it
    n: int  # number of this call among the module's calls, from 0
    kind: str  # "self" or "cross"
    source: str  # what was tapped
    kernel: str  # what ran
    compiled: bool = False
    view: View | None = None  # None if the call could not be read
    facts: Facts | None = None  # likewise
    heads: Mapping[str, Tensor] = field(default_factory=dict)  # numbers per head for the doctor, (B, H)
    trouble: str | None = None  # why the call could not be read
    link: StepLink | None = None  # the call that it continues, in generation, if known


def view_of(record: Record) -> View:
    """The view of a record that has one, as those of `Capture.calls` have."""
    assert record.view is not None
    return record.view
