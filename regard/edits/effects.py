"""`effect` and `scan`: what an edit does to a model's answer, beside the same edit at random places."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import combinations
from math import comb, isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from regard import tables
from regard.edits.editing import CELLS, head_list, places_of
from regard.edits.editing import edit as run_edited
from regard.edits.metrics import Metric
from regard.edits.values import Ablate, Add, Edit, Edits, KnockOut, Patch, ZeroValues, ablate, knock_out
from regard.lens.capture import Capture
from regard.lens.edit_records import Effect
from regard.lens.taps.installation import Taps
from regard.lens.view import NO_GRADIENT, View
from regard.lens.watch import watch

__all__ = ["Effect", "Scan", "effect", "scan"]

Run = Callable[[], Any]
KEPT = ["qk", "v", "output"]  # what gradients need
HIDDEN_STATES = 4  # how many times its first tensor a block may return


def effect(
    run: Run,
    model: nn.Module,
    edit: Edit | Edits,
    metric: Metric | Callable[[Any], Any],
    *,
    controls: int = 20,
    seed: int = 0,
) -> Effect:
    """What an edit does to the model's answer, beside the same edit at random places.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    >>> single = regard.edits.knock_out(layer=0, head=1, queries=4, keys=2)
    >>> found = regard.effect(lambda: layer(x), layer, single, regard.metrics.moved(4))
    >>> len(found.controls), 0 < found.value < 1
    (5, True)

    A control of a knock-out hides other keys, as many, that the same queries of the same head see; a control of an edit
    of heads takes other heads, of layers with as many queries and keys. No two controls are the same, and none is a
    place of the edit. A module that runs several times, as in ALBERT, is edited each time.

    An edited run begins at the block that is edited, where that gives the same bits: blocks of an nn.ModuleList before
    it return what they returned without the edit. A block with a cache, with hooks inside, or that runs several times
    is always computed.

    A knock-out takes the model where it was never trained: a large effect says that the model uses this edge as it is,
    not what it would have learnt without it.

    Args:
        run: calls the model and returns its output, the same each time.
        model: the model that `run` calls, in evaluation mode.
        edit: of `regard.edits`.
        metric: of `regard.metrics`, or a function of the output that returns one number.
        controls: how many random places to try, where there are so many.
        seed: of the random places.

    Returns:
        An `Effect`, which prints as a sentence.

    Raises:
        LookupError, IndexError: the layer, head or position does not exist.
        ValueError: the mask hides the edges; the model is in training mode or not deterministic; the metric is not one
            number.
    """
    metric = _named(metric)
    plain = _plain_run(run, model, metric)
    before, layers = plain.value, _layers(plain.seen)
    weights = [_check(single, layers, plain.seen.unseen) for single in edit]
    random_places = random.Random(seed)
    own = [_numbered(single, layers) for single in edit]
    together = zip(*(_controls(single, own, layers, controls, random_places) for single in own), strict=False)
    # Parts of an edit that were drawn at the same place would be fewer than the edit has.
    places = [
        drawn for drawn in together if not any(part in [p for p, _ in drawn[:n]] for n, (part, _) in enumerate(drawn))
    ]
    after = _measure(run, model, Edits(tuple(own)), metric, plain)
    values = [_measure(run, model, Edits(tuple(part for part, _ in drawn)), metric, plain) - before for drawn in places]
    control_weight = _mean([weight for drawn in places for _, weight in drawn])
    return Effect(edit, metric.name, before, after, _mean(weights), tuple(values), control_weight)


# ---------------------------------------------------------------------------------------------------------------- scan


@dataclass(frozen=True, eq=False)
class Scan:
    """The effect of an edit at every place.

    Attributes:
        values: (layers, heads), (layers, 1), or for edges (layers, heads, keys): after − before; NaN where a layer has
            fewer heads, or the mask hides an edge.
        weights: for edges, the weights, their mean over the batch; otherwise None.
        names: module paths of the layers.
        metric: the metric's name.
        method: "exact" or "first order".
    """

    values: Tensor
    names: list[str]
    metric: str
    method: Literal["exact", "first order"]
    over: str
    edit_at: Callable[[tuple[int, ...]], Edit] = field(repr=False)
    measure: Callable[[Edit], float] = field(repr=False)
    weights: Tensor | None = None

    def top(self, k: int = 10) -> list[tuple[tuple[int, ...], float]]:
        """The k places with the largest effects, by size: ((layer, head, …), effect)."""
        places = (~self.values.isnan()).nonzero()
        values = self.values[tuple(places.T)]
        order = values.abs().argsort(descending=True, stable=True)[:k]
        return [(tuple(places[at].tolist()), float(values[at])) for at in order.tolist()]

    def confirm(self, k: int = 10) -> list[tuple[tuple[int, ...], float, float]]:
        """Run the k largest exactly: (place, effect here, exact effect)."""
        return [(place, value, self.measure(self.edit_at(place))) for place, value in self.top(k)]

    def __repr__(self) -> str:
        headers = {"heads": ["layer", "head"], "layers": ["layer", ""], "edges": ["layer", "head", "key"]}[self.over]
        weighed = self.weights is not None
        rows = []
        for place, value in self.top(10):
            shown = [str(n) for n in place] if self.over != "layers" else [str(place[0]), self.names[place[0]]]
            more = [f"{float(self.weights[place]):.3f}"] if self.weights is not None else []
            rows.append([*shown, *more, f"{value:+.4g}"])
        title = f"{self.metric}, {self.method}: the largest of {int((~self.values.isnan()).sum())} {self.over}"
        table = tables.text([*headers, *(["weight"] if weighed else []), "effect"], rows, right=range(len(rows[0])))
        return f"{title}\n\n{table}"


def scan(
    run: Run,
    model: nn.Module,
    metric: Metric | Callable[[Any], Any],
    *,
    over: str = "heads",
    method: str = "exact",
    query: int | None = None,
    progress: bool = False,
) -> Scan:
    """The effect of ablating every head or layer, or of knocking out every edge of one query.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    >>> regard.scan(lambda: layer(x), layer, regard.metrics.moved(4)).values.shape
    torch.Size([1, 2])

    Args:
        run: as for `effect`.
        model: as for `effect`.
        metric: as for `effect`.
        over: "heads" and "layers" set outputs to 0; "edges" knocks out each key that `query` sees, in every head.
        method: "exact" runs the model for each place; "gradient" runs it once, forward and backward, and gives the
            first order; `confirm` then runs the largest exactly.
        query: position of the query, for edges.
        progress: show how far it is on stderr.

    Returns:
        A `Scan`, which prints the largest effects.

    Raises:
        ValueError: unknown `over` or `method`, no query, or a metric without a gradient.
    """
    if over not in ("heads", "layers", "edges") or method not in ("exact", "gradient"):
        raise ValueError(
            f"over must be 'heads', 'layers' or 'edges' and method 'exact' or 'gradient'; got {over!r} and {method!r}"
        )
    if (over == "edges") != (query is not None):
        raise ValueError("query= is the position whose edges are scanned: give it with over='edges' alone")
    metric = _named(metric)
    if method == "gradient" and metric.relative:
        raise ValueError(
            f"{metric} compares with the unedited run, where its gradient is 0: use method='exact', or another metric, "
            "such as logit_diff"
        )
    plain = _plain_run(run, model, metric)
    names, views = plain.seen.names, list(_layers(plain.seen).values())
    heads = max(own[0].sizes[1] for own in views)

    def edit_at(place: tuple[int, ...]) -> Edit:
        if over == "layers":
            return ablate(place[0])
        return ablate(place[0], place[1]) if over == "heads" else knock_out(place[0], place[1], query, place[2])

    def measure(single: Edit) -> float:
        return _measure(run, model, single, metric, plain) - plain.value

    if over == "edges":
        assert query is not None
        length = max(view.sizes[3] for own in views for view in own)
        weights = torch.full((len(views), heads, length), float("nan"))
        for n, own in enumerate(views):
            if not -own[0].sizes[2] <= query < own[0].sizes[2]:
                raise IndexError(f"{names[n]!r} has {own[0].sizes[2]} queries; there is no query {query}")
            row = torch.cat([torch.as_tensor(view.row(query)) for view in own]).mean(0).float().cpu()
            weights[n, : row.shape[0], : row.shape[1]] = row
        places = [tuple(place) for place in (weights > 0).nonzero().tolist()]
        values = torch.full_like(weights, float("nan"), dtype=torch.float64)
    else:
        count = heads if over == "heads" else 1
        weights, values = None, torch.full((len(views), count), float("nan"), dtype=torch.float64)
        places = [(n, h) for n, own in enumerate(views) for h in range(min(count, own[0].sizes[1]))]
    if method == "gradient":
        _first_order(run, model, metric, values, over, query)
        if weights is not None:
            values[~(weights > 0)] = float("nan")
    else:
        for number, place in enumerate(places):
            values[place] = measure(edit_at(place))
            if progress:
                print(f"\r{number + 1} of {len(places)} {over}", end="", file=sys.stderr, flush=True)
        if progress:
            print(file=sys.stderr)
    order: Literal["exact", "first order"] = "exact" if method == "exact" else "first order"
    return Scan(values, names, metric.name, order, over, edit_at, measure, weights)


def _first_order(run: Run, model: nn.Module, metric: Metric, values: Tensor, over: str, query: int | None) -> None:
    """Fill in the effects to first order, from one backward pass: ∂L/∂o times the exact change of a head's output o.

    Ablating a head takes o away: −Σ o·∂L/∂o. Hiding key j makes o = Σ p v into (o − p_j v_j) / (1 − p_j); with
    w = p ∂L/∂p and g = ∂L/∂o, where Σ w = g·o, that is p_j / (1 − p_j) · Σ_{k≠j} w_k − w_j.
    """
    # Gradients must reach every layer, frozen ones too, and leave nothing in the parameters.
    parameters = [(p, p.requires_grad, p.grad) for p in model.parameters() if p.is_floating_point()]
    try:
        for parameter, _, _ in parameters:
            parameter.requires_grad_(True).grad = None
        with torch.enable_grad(), watch(model, keep=KEPT, measures=["entropy"], gradients=True) as seen:
            output = _outputs(metric, model, run)
            value = _tensor(metric, output, output)
            if not value.requires_grad:
                raise ValueError(
                    f"{metric} has no gradient: the run must not be under torch.no_grad(), and the metric must "
                    "return a tensor, not a float"
                )
            torch.autograd.backward(value)
    finally:
        for parameter, required, gradient in parameters:
            parameter.requires_grad_(required).grad = gradient
    for n, views in enumerate(_layers(seen).values()):
        for view in views:
            _, heads, nq, nk = view.sizes
            if view.output_gradient is None and view.without_gradient != NO_GRADIENT:
                raise LookupError(f"there is no gradient of {view.without_gradient}; use method='exact'")
            if view.output_gradient is None:  # the metric does not depend on this layer
                effects = torch.zeros(1, heads, nk if over == "edges" else 1)
            elif query is not None:
                weighted = torch.as_tensor(view.weighted_gradients(query)).double().cpu()
                p = torch.as_tensor(view.row(query)).double().cpu()
                missing = 1 - p.sum(-1, keepdim=True)  # a sink has it; in fp32, sums err by less than 1e-5
                rest = _others(p) + torch.where(missing > 1e-5, missing, 0.0)
                effects = p * _others(weighted) / torch.where(rest == 0, 1.0, rest) - weighted
            elif view.given_output is not None:
                effects = -(view.given_output.double() * view.output_gradient).sum((2, 3)).unsqueeze(-1).cpu()
            else:  # Σ p ∂L/∂p is the same
                step = max(1, CELLS // (heads * nk))
                rows = [slice(at, min(at + step, nq)) for at in range(0, nq, step)]
                sums = [view.weighted_gradient_tile(part, "scan").double().sum((2, 3)) for part in rows]
                effects = -sum(sums, torch.zeros(())).unsqueeze(-1).cpu()
            effects = effects.sum(0)
            if over == "layers":
                effects = effects.sum(0, keepdim=True)
            into = values[n, : len(effects)] if over == "edges" else values[n, : len(effects), None]
            into = into[:, : effects.shape[1]]
            into.copy_(into.nan_to_num(0.0) + effects)


def _others(x: Tensor) -> Tensor:
    """The sum over the last axis without the entry itself, by sums from both ends: a difference would cancel."""
    before = x.cumsum(-1).roll(1, -1)
    after = x.flip(-1).cumsum(-1).roll(1, -1).flip(-1)
    before[..., 0] = after[..., -1] = 0
    return before + after


# ------------------------------------------------------------------------------------------------------------- running


Layers = dict[str, list[View]]
"""Module path → its runs: one, but for a module that a model calls several times."""


def _layers(seen: Capture) -> Layers:
    layers: Layers = {name: [] for name in seen.names}
    for module_run in seen.runs():
        layers[module_run.path].append(module_run.view)
    return layers


@dataclass(frozen=True, eq=False)
class _PlainRun:
    """A run without an edit: its output, its metric, a capture, and what its blocks returned."""

    output: Any
    value: float
    seen: Capture
    kept: KeptBlocks


def _plain_run(run: Run, model: nn.Module, metric: Metric) -> _PlainRun:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes its answers: call model.eval() first")
    kept = KeptBlocks(model)
    with torch.no_grad(), watch(model, keep="qk", measures=["entropy"]) as seen, kept.recording():
        output = _outputs(metric, model, run)
    if not seen.names:
        path, reason = next(iter(seen.unseen.items()), ("", "`run` must call the model that is given"))
        where = f" of {type(model).__name__}" + (f", {path!r}," if path else "")
        raise LookupError(f"no attention{where} was seen: {reason}")
    before = _number(metric, output, output)
    with torch.no_grad():
        again = _number(metric, _outputs(metric, model, run), output)
    if abs(again - before) > 1e-3 * max(abs(before), 1e-2):
        raise ValueError(
            f"the run is not deterministic: without an edit, {metric} is {before:.6g} and then {again:.6g}; "
            "turn off dropout and sampling"
        )
    return _PlainRun(output, before, seen, kept)


def _measure(run: Run, model: nn.Module, edit: Edit | Edits, metric: Metric, plain: _PlainRun) -> float:
    # By path: layers before the edited one may be skipped, which would change the numbers of the others.
    names, edits, paths = plain.seen.names, list[Edit](), list[str]()
    for single in edit:
        layer = getattr(single, "layer", None)
        if isinstance(layer, int):
            single = replace(single, layer=names[layer])  # type: ignore[call-arg]
        edits.append(single)
        paths += [single.path] if isinstance(single, Add) else names if layer is None else [single.layer]  # type: ignore[attr-defined]
    kept = plain.kept
    if not kept.checked and kept.before(paths):
        # Without an edit, with every block skipped that ever may be: if anything differs, none is.
        kept.checked = True
        with torch.no_grad(), kept.skipping(kept.before(names[-1:])), Taps(model, lambda call: None):
            try:
                replayed = _outputs(metric, model, run)
                same = same_tensors(replayed, plain.output) and _number(metric, replayed, plain.output) == plain.value
            except Exception:  # a model that cannot do without them: it runs whole
                same = False
        if not same:
            kept.clear()
    with torch.no_grad(), kept.skipping(kept.before(paths)), run_edited(model, *edits):
        output = _outputs(metric, model, run)
    return _number(metric, output, plain.output)


def _outputs(metric: Metric, model: nn.Module, run: Run) -> Any:
    """The run's output, or that of the module that the metric reads."""
    if metric.path is None:
        return run()
    modules = dict(model.named_modules())
    if metric.path not in modules:
        raise ValueError(f"the model has no module {metric.path!r}")
    outputs: list[Any] = []
    handle = modules[metric.path].register_forward_hook(lambda module, given, out: outputs.append(out))
    try:
        run()
    finally:
        handle.remove()
    if not outputs:
        raise LookupError(f"the module {metric.path!r} did not run")
    return outputs[-1]


def _named(metric: Metric | Callable[[Any], Any]) -> Metric:
    """A metric, or a function of the output as one."""
    if isinstance(metric, Metric):
        return metric
    function = metric
    return Metric(getattr(metric, "__name__", type(metric).__name__), lambda output, _: function(output))


def _tensor(metric: Metric, output: Any, plain: Any) -> Tensor:
    value = torch.as_tensor(metric.function(output, plain))
    if value.numel() != 1:
        raise ValueError(
            f"the metric {metric} must return one number, and returned {tuple(value.shape)}: pick one, or take a mean"
        )
    return value.reshape(())


def _number(metric: Metric, output: Any, plain: Any) -> float:
    value = float(_tensor(metric, output, plain))
    if not isfinite(value):
        raise ValueError(f"the metric {metric} is {value}")
    return value


def _check(single: Edit, layers: Layers, unseen: Mapping[str, str]) -> float | None:
    """Raise for an edit that would change nothing; the mean weight of a knock-out's edges, None for other edits."""
    if isinstance(single, Add):
        return None
    layer, names = getattr(single, "layer", None), list(layers)
    if isinstance(layer, int) and not -len(names) <= layer < len(names):
        raise LookupError(f"{single!r}: there is no layer {layer}; the model has {len(names)}, 0 to {len(names) - 1}")
    if isinstance(layer, str) and layer not in names:
        reason = unseen.get(layer, f"it ran in {', '.join(names[:8])}")
        raise LookupError(f"{single!r}: no attention was seen in {layer!r}: {reason}")
    meant = names if layer is None else [layer if isinstance(layer, str) else names[layer]]
    weights, problem = [], None
    for view in (view for name in meant for view in layers[name]):
        try:
            weights.append(_weight(single, view))
        except (IndexError, ValueError) as error:  # of every layer, some may have no such place
            problem = error
    if not weights:
        assert problem is not None
        raise problem
    return _mean(weights)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _weight(single: Edit, view: View) -> float | None:
    """`_check` of one call."""
    _, heads, nq, nk = view.sizes
    if max(head_list(single, heads)) >= heads:
        raise IndexError(f"{single!r}: the layer has {heads} heads, 0 to {heads - 1}")
    of_keys = isinstance(single, Patch) and single.part in ("k", "v")
    counts = {"queries": nq, "keys": nk, "positions": nk if of_keys else nq}
    for name, count in counts.items():
        positions = getattr(single, name, None)
        for at in (positions,) if isinstance(positions, int) else positions if isinstance(positions, tuple) else ():
            if not -count <= at < count:
                raise IndexError(f"{single!r}: {at} is not among the {name}; the run has {count} positions")
        if not places_of(positions, 0, count, count):
            raise IndexError(f"{single!r}: there are no such {name}; the run has {count} positions")
    if not isinstance(single, KnockOut) or single.edges is not None:
        return None
    rows, columns = places_of(single.queries, 0, nq, nq), places_of(single.keys, 0, nk, nk)
    picked = head_list(single, heads)
    weights = torch.stack([torch.as_tensor(view.row(row))[:, picked][..., columns].sum(-1).mean() for row in rows])
    if not bool((weights > 0).any()):
        raise ValueError(f"{single!r}: the mask hides these keys from these queries, so nothing can be knocked out")
    return float(weights.mean())


def _numbered(single: Edit, layers: Layers) -> Edit:
    """The edit with its layer and keys by number, so that places can be compared."""
    layer = getattr(single, "layer", None)
    if layer is not None:
        layer = list(layers).index(layer) if isinstance(layer, str) else layer % len(layers)
        single = replace(single, layer=layer)  # type: ignore[call-arg]
    if isinstance(single, KnockOut) and single.keys is not None and layer is not None:
        length = list(layers.values())[layer][0].sizes[3]
        keys = places_of(single.keys, 0, length, length)
        single = replace(single, keys=keys[0] if len(keys) == 1 else tuple(keys))
    return single


def _controls(
    single: Edit, own: Sequence[Edit], layers: Layers, count: int, rng: random.Random
) -> list[tuple[Edit, float | None]]:
    """The same edit at up to `count` random places that differ, none among `own`; with the weight of other keys."""
    if isinstance(single, Add):
        assert single.vector is not None
        generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
        size = single.vector.norm()
        vectors = [torch.randn(single.vector.shape, generator=generator) for _ in range(count)]
        return [(replace(single, vector=(x / x.norm()).to(single.vector) * size), None) for x in vectors]
    layer, views = getattr(single, "layer", None), list(layers.values())
    if layer is None or not isinstance(single, (Ablate, ZeroValues, KnockOut, Patch)):
        return []
    edits: list[tuple[Edit, float | None]]
    if isinstance(single, KnockOut) and single.edges is None and single.keys is not None:
        # 1. Other keys that the same queries of the same heads see: all choices if they are few.
        _, heads, nq, nk = views[layer][0].sizes
        hidden, rows = set(places_of(single.keys, 0, nk, nk)), places_of(single.queries, 0, nq, nq)
        picked = head_list(single, heads)
        weights = torch.cat([torch.as_tensor(view.row(row))[:, picked] for view in views[layer] for row in rows])
        weights = weights.flatten(0, -2).cpu()  # (rows, Nk)
        free = [key for key in (weights > 0).all(0).nonzero().view(-1).tolist() if key not in hidden]
        if comb(len(free), len(hidden)) <= 4 * (count + len(own)):
            choices = list(combinations(free, len(hidden)))
            rng.shuffle(choices)
        else:
            samples = (tuple(sorted(rng.sample(free, len(hidden)))) for _ in range(4 * (count + len(own))))
            choices = list(dict.fromkeys(samples))
        means = weights.double().mean(0)
        edits = [
            (replace(single, keys=keys[0] if len(keys) == 1 else keys), float(means[list(keys)].sum()))
            for keys in choices
        ]
    else:
        # 2. Other heads, or other layers; a mask of edges is that of its own layer.
        if isinstance(single.head, tuple):
            return []
        places: list[tuple[int, int | None]] = [
            (n, head)
            for n, others in enumerate(views)
            if others[0].sizes[2:] == views[layer][0].sizes[2:]
            and (n == layer or not isinstance(single, KnockOut) or single.edges is None)
            for head in ((None,) if single.head is None else range(others[0].sizes[1]))
        ]
        rng.shuffle(places)
        edits = [(replace(single, layer=n, head=head), None) for n, head in places]
    return [(drawn, weight) for drawn, weight in edits if drawn not in own][:count]


# -------------------------------------------------------------------------------------- blocks that ran before the edit


@dataclass
class _BlockCall:
    """The first call of one block."""

    start: int  # by a count of what begins and ends
    end: int = -1
    output: Any = None
    pure: bool = True


class KeptBlocks:
    """What the blocks of a model returned in one run, so that an edited run begins at the edited block.

    Whatever ended before the first edited call cannot depend on the edit. What a block returns is kept only if its call
    is a function of its arguments alone, as far as can be seen: it is called once, is given tensors and plain values
    (no cache), its modules have no hooks, and it returns no more than a few hidden states, so that O(L·N·d) numbers are
    kept.

    A block is a member of an nn.ModuleList that lies in no other block.
    """

    def __init__(self, model: nn.Module) -> None:
        paths = [
            f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
            for key in module._modules
        ]
        inner = {path for path in paths if any(path.startswith(f"{other}.") for other in paths)}
        modules = dict(model.named_modules())  # a module that stands in several places comes once
        self.blocks = {path: modules[path] for path in paths if path in modules and path not in inner}
        self.checked = False  # whether a run that skips blocks was compared with one that does not
        self._calls: dict[str, _BlockCall] = {}
        self._time = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the blocks return meanwhile."""
        with ExitStack() as stack:
            for path, block in self.blocks.items():
                before, after = self._hooks(path)
                stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(after).remove)
            yield

    def _hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._time += 1
            if path in self._calls:
                self._calls[path].pure = False
                return
            hooked = any(m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module)
            values = tree_flatten((args, kwargs))[0]
            self._calls[path] = _BlockCall(self._time, pure=not hooked and all(map(_is_value, values)))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._time += 1
            call, tensors = self._calls[path], [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
            call.end = self._time
            call.pure &= bool(tensors) and sum(x.numel() for x in tensors) <= HIDDEN_STATES * tensors[0].numel()
            call.output = _copied(output) if call.pure else None

        return before, after

    def before(self, paths: Collection[str]) -> list[str]:
        """The blocks that can be skipped if these modules are edited: those that ended before the first of them."""
        starts = []
        for path in paths:
            around = [call for name, call in self._calls.items() if path == name or path.startswith(f"{name}.")]
            if not around:
                return []  # it may run at any time
            starts.append(around[0].start)
        return [name for name, call in self._calls.items() if call.pure and call.end < min(starts)]

    @contextmanager
    def skipping(self, names: Collection[str]) -> Iterator[None]:
        """These blocks return what was kept instead of computing it."""
        with ExitStack() as stack:
            for name in names:
                block, output = self.blocks[name], self._calls[name].output
                if "forward" in vars(block):
                    stack.callback(setattr, block, "forward", vars(block)["forward"])
                else:
                    stack.callback(vars(block).pop, "forward", None)
                block.forward = lambda *args, output=output, **kwargs: _copied(output)
            yield

    def clear(self) -> None:
        """Forget everything: no block is skipped any more."""
        self._calls.clear()


def _is_value(x: Any) -> bool:
    """Whether an argument is a tensor or cannot be changed: a cache can."""
    frozen = is_dataclass(x) and getattr(type(x), "__dataclass_params__").frozen  # noqa: B009
    return x is None or frozen or isinstance(x, (Tensor, int, float, str))


def _copied(output: Any) -> Any:
    """With tensors of its own: the model may write to those that it gets."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, output)


def same_tensors(one: Any, other: Any) -> bool:
    """Whether two outputs have the same form and the same bits."""
    (ours, form), (theirs, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b)
        for a, b in zip(ours, theirs, strict=True)
    )
