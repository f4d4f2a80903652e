"""`watch`: every attention call of any PyTorch model, measured while it runs on its own kernels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf, log
from threading import RLock, local
from types import TracebackType
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor, nn

from regard.lens.assembly import CallStore, RunTracker, StepLink, copied, key_marks
from regard.lens.capture import Capture, Record
from regard.lens.doctor import merge_paths
from regard.lens.edit_records import EditNotes
from regard.lens.measures import engines
from regard.lens.measures.measures import MAP_SIZE, NAMES, TOP, MeasureOptions, read_measures
from regard.lens.measures.weights import ComputedWeights, StoredWeights, Weights
from regard.lens.overlays import read_layouts
from regard.lens.patterns import KeyTokens, KnownVisibility
from regard.lens.taps.calls import ObservedCall, is_compiled, measuring, original_path, raise_rows, without_frames
from regard.lens.taps.installation import Taps
from regard.lens.taps.interception import InterceptedCall, Interceptor
from regard.lens.values import ATTENTION, StoredValues, find_projection
from regard.lens.view import View
from regard.lens.visibility import MaskSummary, RowCount, read_facts, read_weights, summarise_mask
from regard.nn.attention import MultiHeadAttention

NO_REASON = (
    "it did not run in the block (a copy of it, as DataParallel makes, does not count), or it makes its weights in a "
    "way that is not known here"
)
COMPILED = "it is inside compiled code, of which only torch's fused kernels are seen; watch the model uncompiled"

BY_HAND = (
    "this softmax is written by hand, and the values that it meets are not read: use torch's SDPA "
    "(attn_implementation='sdpa'), or watch(model, gradients=True), which reads them"
)

COMPILED_CALL = "compiled_call"
"""Stands for a module's name where compiled code makes several calls, before the number of the call."""

KEEP = ("qk", "v", "output")
KEPT = "keep must be 'qk', 'v' or 'output', or several of them in a list"
DELIMITERS = {"[SEP]", "</s>", "<|endoftext|>", "<|im_end|>", "<eos>"} | set(".,;:!?。、，？！：；")
MARKS_OF_SPACE = "Ġ▁ "  # what tokenizers put before a word to say that a space was there


def watch(
    model: nn.Module,
    *,
    layers: object = None,
    measures: object = None,
    keep: object = None,
    size: int = MAP_SIZE,
    top: int = TOP,
    tokens: object = None,
    layouts: object = None,
    device: str | torch.device | None = None,
    gradients: bool = False,
) -> WatchContext:
    """Record and measure every attention call that a model makes inside the block.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> seen.names, seen[0].entropy.shape, seen["self_attn"].row(0)[0, 0]
    (['self_attn'], torch.Size([1, 2, 3]), tensor([0.3333, 0.3333, 0.3333]))

    Seen are torch's SDPA, FlexAttention, nn.MultiheadAttention, flash_attn, regard's own operation, and softmaxes
    written out by hand, also in torch.compile'd code as far as it calls kernels. `capture.unseen` names what was not
    seen, `capture.edited` what was changed after its softmax. Inside compiled code modules are not known: several calls
    are numbered in the order of one run, as "compiled_call.0" or "layers.3.compiled_call.1".

    The model's result has the same bits as without `watch`, but for nn.MultiheadAttention and nn.TransformerEncoder
    where they would take torch's fast path: it is off meanwhile, and the result equal up to rounding. Watching never
    makes the model raise: an error in measuring is named in `capture.unseen`.

    Args:
        model: any nn.Module.
        layers: which modules: path patterns such as "*.3.*", or numbers in the order of first calls; default all.
        measures: names as for `look`, and "patterns"; default those of `look` with "patterns".
        keep: "qk" keeps what exact rows, tiles, other maps and links need, "v" the values for `View.norms` and
            `View.toward`, "output" each call's result; or several in a list, as ["qk", "v"].
        size: rows and columns of the map.
        top: links per row.
        tokens: the words (or token numbers) of the input, (N,) or one row per batch row: labels, and for patterns by
            token.
        layouts: what the tokens are and where they lie in an image, for `View.overlay`: as for `Capture.layouts`.
        device: where measures and what is kept go, for example "cpu"; default where the model computed them.
        gradients: record the gradient of each call's output when loss.backward() runs in the block, for
            `View.gradients` and `Capture.relevance`; needs keep=["qk", "v"]. Several backward passes add up, as in
            `.grad`. The model's own gradients keep their bits.

    Returns:
        A context manager, to be entered once; it gives a `Capture` that fills while the model runs.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not supported.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch takes a torch.nn.Module, got {type(model).__name__}")
    if layouts is not None:
        read_layouts(layouts)  # raises for what is no layout; whether they fit is known when the model has run
    measured, patterns = read_watched_measures(measures, size, top)
    words, numbers = read_tokens(tokens)
    options = WatchOptions(
        layers=read_layers(layers),
        measures=measured,
        patterns=patterns,
        keep=read_keep(keep, gradients),
        device=read_device(device),
        words=words,
        tokens=numbers,
        layouts=layouts,
        gradients=gradients,
    )
    for path, layer in model.named_modules():
        if isinstance(layer, MultiHeadAttention) and len(layer.local_heads) < layer.num_heads:  # tensor parallelism
            here = layer.local_heads
            warnings.warn(
                f"this process has heads {here[0]} to {here[-1]} of the {layer.num_heads} of {path or 'the layer'}, "
                f"and sees those alone: head 0 of a view is head {here[0]}",
                stacklevel=2,
            )
            break
    return WatchContext(model, options)


# ------------------------------------------------------------------------------------------------------- while it runs

_LOCK = RLock()  # around the books of all watches


def _new_lock() -> None:
    global _LOCK
    _LOCK = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # the thread that held it does not exist in the child


class WatchContext:
    """What `watch` returns: enter it with `with`, once; it gives a `Capture` that fills while the model runs."""

    def __init__(self, model: nn.Module, options: WatchOptions) -> None:
        self.model, self.options = model, options
        inner = getattr(model, "_orig_mod", model)
        self.capture = Capture(type(inner).__name__, options.words)
        self._taps = Taps(model, _weakly(self._record), _weakly(self._returned))
        self._interceptor = Interceptor(model, _weakly(self._intercepted), reads=True) if options.gradients else None
        self._awaited = local()  # in each thread, a call that was intercepted and is about to be reported
        self._runs, self._store = RunTracker(), CallStore(options.device)
        self._seen: dict[str, bool] = {}  # path → was it in compiled code
        # Path, numbered in compiled code → calls recorded; in the order of first calls.
        self._counts: dict[str, int] = {}
        self._edits = EditNotes(model, self.capture.edits)
        self._numbered: set[str] = set()  # compiled modules that make several calls in a run
        self._entered = False

    def __enter__(self) -> Capture:
        if self._entered:
            raise RuntimeError("this watch was entered before, and its capture is made; call regard.watch(…) anew")
        try:
            self._taps.__enter__()
            if self._interceptor is not None:
                self._interceptor.__enter__()
            self._entered = True
            return self.capture
        except BaseException:
            self._entered = False
            if self._interceptor is not None:
                self._interceptor.__exit__(None, None, None)
            self._taps.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        if not self._entered:
            raise RuntimeError("this watch was never entered: write `with regard.watch(model) as seen:`")
        try:
            if self._interceptor is not None:
                self._interceptor.__exit__(kind, problem, where)
            self._taps.__exit__(kind, problem, where)
        except BaseException:
            self._taps.close()
            raise
        self._runs.close()
        if self._interceptor is not None:
            for seen in self.capture.records:
                if seen.view is not None and seen.path in self._interceptor.reasons:
                    seen.view.without_gradient = f"{seen.path!r}: {self._interceptor.reasons[seen.path]}"
        self.capture.unseen.update(self._name_unseen())
        sizes = [r.view.sizes for r in self.capture.records if r.view is not None]
        words = self.options.words if kind is None else None
        if words is not None and sizes and all(self.options.tokens_for(s).ids is None for s in sizes):
            # A forgotten [CLS] would label every row by its neighbour.
            lengths = sorted({len(row) for row in words})
            warnings.warn(
                f"tokens= has {' and '.join(map(str, lengths))} words in {len(words)} rows, but the calls have "
                f"{sizes[0][3]} keys in {sizes[0][0]} batch rows: patterns by token are not scored, and labels will "
                "not fit",
                stacklevel=2,
            )
        if self.options.layouts is not None and self.capture.names:
            try:
                self.capture.layouts = self.options.layouts  # only now it is known what they have to fit
            except ValueError as problem:
                warnings.warn(f"{problem}; set seen.layouts to others", stacklevel=2)

    def _name_unseen(self) -> dict[str, str]:
        """Path → reason, for modules that were selected and whose attention was not seen."""
        taps, seen, names, layers = self._taps, self._seen, list(self._counts), self.options.layers
        modules = {original_path(path): module for path, module in self.model.named_modules()}
        # 1. Calls that could not be read or measured, and softmaxes that no product with values confirmed.
        reasons = {r.path: r.trouble or "the call could not be read" for r in self.capture.records if r.view is None}
        for path, problem in taps.errors:
            if path in seen or layers.selects(path):
                reasons[path] = f"measuring it failed: {type(problem).__name__}: {problem}"
        for path, shape in taps.unconfirmed:
            name = type(modules[path]).__name__ if path in modules else ""
            suspected = (path, shape) in taps.suspected or not seen or ATTENTION.search(name)
            if suspected and layers.selects(path):
                reasons.setdefault(
                    path, f"a softmax of shape {shape} that did not meet values in a way that is known here"
                )
        # 2. The innermost modules whose class is named like attention, if nothing was seen in them or around them.
        named = [path for path, module in modules.items() if ATTENTION.search(type(module).__name__)]
        compiled = [
            original_path(path)
            for path, module in self.model.named_modules()
            if is_compiled(module) or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        ]
        for path in named:
            if path in reasons or not layers.selects(path):
                continue
            outer = any(other != path and _inside(other, path) for other in named)
            part_seen = any(_inside(s, path) for s in seen)
            whole_seen = any(_inside(path, s) for s, in_compiled in seen.items() if s or in_compiled)
            if not (outer or part_seen or whole_seen):
                usual = COMPILED if any(_inside(path, whole) for whole in compiled) else NO_REASON
                own = getattr(type(modules[path]), "why_unseen", None)  # of classes that attend without weights
                reasons[path] = own if isinstance(own, str) else usual
        # 3. Products without a softmax, and selectors that match nothing.
        for path, shape in () if seen else taps.chained:
            if layers.selects(path):
                reasons.setdefault(
                    path, f"a product of shape {shape} that met another without a softmax that is known here"
                )
        for selector in layers.unmatched([*names, *(path for path in seen if path not in names)]):
            there = f"those that ran are {merge_paths(names)}" if names else "none ran"
            reasons[str(selector)] = f"layers={selector!r} fits no attention that was seen: {there}"
        return reasons

    def _record(self, observed: ObservedCall) -> None:
        path, order = observed.path, observed.order
        place = path if order is None else f"{path}.{COMPILED_CALL}.{order}".removeprefix(".")
        with _LOCK:
            self._seen[path] = self._seen.get(path, False) or observed.compiled
            self._counts.setdefault(place, 0)
            number = list(self._counts).index(place)
            if order and path not in self._numbered:  # several calls: the module's path no longer tells them apart
                self._numbered.add(path)
                for record in self.capture.records:
                    if record.path == path and record.compiled:
                        record.path = f"{path}.{COMPILED_CALL}.0".removeprefix(".")
        layers = self.options.layers
        if not (layers.selects(path, number) or layers.selects(place, number)):
            self._link(observed, place, 0, None)  # cross-attention asks what the self-attention before it continued
            return
        record, weights, summary = _measured(observed, self.options)
        with _LOCK:
            record.path = place if path in self._numbered else path
            record.n = self._counts[place]
            record.link = self._link(observed, place, record.n, record.view)
            if record.view is not None:
                self._counts[place] = record.n + 1
            self.capture.records.append(record)
            self._edits.count_call()
        if record.view is not None and weights is not None:
            self._keep(record, place, weights, summary, observed)
        awaited, self._awaited.call = getattr(self._awaited, "call", None), None
        if awaited is not None and awaited.path == path and record.view is not None:
            _record_gradient(record.view, awaited.output, self.options.device)

    def _returned(self, rows: Sequence[Sequence[int]], passes: int) -> None:
        with _LOCK:
            self._runs.returned(rows, passes)

    def _intercepted(self, call: InterceptedCall) -> tuple[None, Tensor] | None:
        """Ask for the gradient of a call's output. FlexAttention and softmaxes by hand get the output passed on."""
        try:
            if call.source != "softmax":
                self._awaited.call = call  # its record comes next
                return (None, call.output) if call.source == "flex" else None
            with _LOCK:  # its record was made before
                latest = next((r for r in reversed(self.capture.records) if r.path == call.path), None)
            view = None if latest is None else latest.view
            if view is None or view.sizes != call.sizes or call.values is None:
                return None
            view.kept_values = StoredValues(copied(call.values.detach(), self.options.device))
            view.projection = find_projection(self.model, call.path, view.sizes[1] * call.values.shape[-1])
            _record_gradient(view, call.output, self.options.device)
            return None, call.output
        except Exception as problem:  # whatever is wrong with us, the model must run
            self._taps.errors.append((call.path, without_frames(problem)))
            return None

    def _link(self, observed: ObservedCall, place: str, n: int, view: View | None) -> StepLink | None:
        """Which earlier call this one continues; None for one that could not be read."""
        call, weights = observed.call, observed.weights if observed.weights is not None else observed.scores
        marks: Tensor | None
        if call is not None:
            sizes, marks = call.sizes, key_marks(call.k, call.sizes[1])
        elif weights is not None:
            batch, heads, nq, nk = weights.shape
            sizes, marks = (batch, heads, nq, nk), observed.marks
        else:
            return None

        def offset() -> object:
            if view is not None:
                return view.place.offset
            return None if call is None else summarise_mask(call, observed.kind).offset

        return self._runs.link(place, n, sizes, observed.kind, marks, offset)

    def _keep(
        self, record: Record, place: str, weights: Weights, summary: MaskSummary | None, observed: ObservedCall
    ) -> None:
        """Keep copies of the weights, or of what computes them, and of the values, as `options.keep` says."""
        view, link, keep, device = record.view, record.link, self.options.keep, self.options.device
        assert view is not None
        if isinstance(weights, StoredWeights):
            view.without_values = BY_HAND if "v" in keep else view.without_values
            if "qk" in keep:
                scores = None if weights.scores is None else weights.scores.to(device)
                copy = copied(weights.weights, device)  # the model may have given its weights to others
                view.weights = StoredWeights(copy, scores, edited=weights.edited)
            return
        assert isinstance(weights, ComputedWeights)
        assert link is not None
        assert summary is not None
        assert observed.call is not None
        written = link.known + summary.nq  # keys so far; a cache of fixed size has room behind them
        rest_hidden = written >= summary.nk or not bool(
            (summary.survey.last >= written).any() | (summary.survey.unhidden > 0).any()
        )
        if "qk" in keep:
            view.weights = self._store.keep(place, weights.call, weights.lse, link, rest_hidden)
        if "v" in keep:
            values = observed.call.v
            view.kept_values = self._store.keep_values(place, values, link, rest_hidden)
            view.projection = find_projection(self.model, observed.path, view.sizes[1] * values.shape[-1])


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that holds its watch weakly, so that a dropped watch leaves nothing installed."""
    mine = WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = mine()
        return None if bound is None else bound(*args)

    return call


def _measured(observed: ObservedCall, options: WatchOptions) -> tuple[Record, Weights | None, MaskSummary | None]:
    """The record of one call, measured now, because its tensors are the model's; its weights and its mask summary."""
    record = Record(observed.path, 0, observed.kind, observed.source, observed.kernel, observed.compiled)
    # 1. Measure the weights: computed from q and k, or as the model made them.
    weights: ComputedWeights | StoredWeights
    summary: MaskSummary | None = None
    if observed.call is not None and observed.trouble is None:
        call = observed.call
        summary = summarise_mask(call, observed.kind)
        raised, taken = raise_rows(call)
        lse = engines.exact_lse(raised, None if taken is not None else observed.lse)
        measured, engine = engines.measure(raised, lse, options.measures)
        lse = measured["lse"]  # in fp64 where logits are large
        measured["lse"] = lse.to(raised.wide)
        if taken is not None:  # these two are of the scores themselves
            measured |= {name: measured[name] + taken for name in ("lse", "max_logit") if name in measured}
        record.facts = read_facts(call, observed.output, measured["lse"], kind=observed.kind, summary=summary)
        weights = ComputedWeights(raised, lse)
        place = KnownVisibility(summary.visible, summary.padding, summary.offset)
    elif observed.weights is not None or observed.scores is not None:
        scores, softmax = observed.scores, observed.weights
        if softmax is None:
            assert scores is not None
            softmax = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        weights = StoredWeights(softmax, None if observed.edited else scores, edited=observed.edited)
        names = options.measures.names - ({"max_logit"} if weights.scores is None else set())
        measured, engine = engines.measure_given(weights, replace(options.measures, names=names)), "torch"
        record.facts = read_weights(scores, softmax, kind=observed.kind)
        if observed.edited:
            empty = record.facts.empty_rows if scores is not None else RowCount()  # a weight of 0 may be an edit
            record.facts = replace(record.facts, edited=True, empty_rows=empty)
        place = KnownVisibility(None, record.facts.padding, record.facts.offset)
    else:
        record.trouble = observed.trouble or "the call could not be read"
        return record, None, None
    # 2. The view with its patterns, and what the doctor reads of each head.
    view = View(
        weights.sizes,
        measured,
        weights=weights,
        kind=record.kind,
        place=place,
        tokens=options.tokens_for(weights.sizes),
        size=options.measures.size,
        links=options.measures.top,
        engine=engine,
        edited=isinstance(weights, StoredWeights) and weights.edited,
    )
    if options.patterns:
        for kind, scored in zip(("pattern", "share", "beside"), view.score_patterns(), strict=True):
            view.held |= {f"{kind} {name}": values for name, values in scored.items()}
    output, device = observed.output, options.device
    record.heads = {name: x.to(device) for name, x in _head_facts(view, output).items()}
    # 3. Let go of the model's tensors.
    view.weights = None
    view.given_output = copied(output, device) if "output" in options.keep and output is not None else None
    if device is not None:
        parts = (x.to(device) if isinstance(x, Tensor) else x for x in vars(place).values())
        view = replace(view.moved(device), place=KnownVisibility(*parts))
    record.view = view
    return record, weights, summary


def _head_facts(view: View, output: Tensor | None) -> dict[str, Tensor]:
    """What the doctor reads of each head, (B, H)."""
    heads = {name: view.held[f"pattern {name}"] for name in ("uniform", "first") if f"pattern {name}" in view.held}
    if view.edited:  # what a key gets is no share of 1
        heads = {}
    elif "received" in view.held and view.sizes[2] and view.sizes[3]:
        heads["one key"] = view.held["received"].amax(-1) / view.sizes[2]
    if "max_logit" in view.held and view.sizes[2]:
        heads["largest logit"] = view.held["max_logit"].amax(-1)
    elif "lse" in view.held and view.sizes[2] and view.sizes[3]:
        heads["logit at least"] = _lse_of_keys(view).amax(-1) - log(view.sizes[3])
    if output is not None and output.ndim == 4 and output.shape[:3] == view.sizes[:3] and view.sizes[2] > 1:
        wide = torch.promote_types(output.dtype, torch.float32)
        size = torch.linalg.vector_norm(output, dim=(2, 3), dtype=wide).square()
        common = output.sum(2, dtype=wide).square().sum(-1) / view.sizes[2]  # what is the same for all queries
        heads["spread"] = ((size - common).clamp(min=0) / size.clamp(min=torch.finfo(wide).tiny)).sqrt()
    return heads


def _lse_of_keys(view: View) -> Tensor:
    """lse without the sinks that count in it; −∞ where it is too near to them to say what the keys add."""
    lse, weights, sinks = view.held["lse"], view.weights, None
    if isinstance(weights, ComputedWeights):
        sinks = weights.call.sinks
    elif isinstance(weights, StoredWeights) and weights.has_sink:
        sinks = None if weights.scores is None else weights.scores[..., -1]
    if sinks is None:
        return lse
    above = lse - (sinks if sinks.ndim == 3 else sinks[:, None]).to(lse)
    rounding = 16 * torch.finfo(lse.dtype).eps * lse.abs().clamp(min=1)
    return torch.where(above > rounding, lse + torch.log(-torch.expm1(-above)), -inf)


def _record_gradient(view: View, output: Tensor, device: torch.device | None) -> None:
    """Have the gradient of a call's output (B, H, Nq, Dv) put into its view when a backward pass reaches it."""

    def record(gradient: Tensor) -> None:
        with measuring():
            new, before = copied(gradient.detach(), device), view.output_gradient
            view.output_gradient = new if before is None else before + new

    if output.requires_grad:
        output.register_hook(record)  # type: ignore[no-untyped-call]


def _inside(path: str, whole: str) -> bool:
    """Whether a module is another, or a part of it."""
    return not whole or path == whole or path.startswith(f"{whole}.")


# ----------------------------------------------------------------------------------------------- the arguments, checked


@dataclass(frozen=True)
class LayerFilter:
    """Selects modules by path patterns and by numbers in the order of first calls; None selects all."""

    selectors: tuple[str | int, ...] | None = None

    def selects(self, path: str, number: int = -1) -> bool:
        """Whether a module is selected; `number`: it was the number-th to be called, -1 if it never was."""
        return self.selectors is None or any(
            selector == number if isinstance(selector, int) else fnmatchcase(path, selector)
            for selector in self.selectors
        )

    def unmatched(self, paths: Sequence[str]) -> list[str | int]:
        """Selectors that match none of these modules, in the order of first calls."""
        single = {selector: LayerFilter((selector,)) for selector in self.selectors or ()}
        return [s for s, one in single.items() if not any(one.selects(path, n) for n, path in enumerate(paths))]


@dataclass(frozen=True)
class WatchOptions:
    """The arguments of `watch`, checked."""

    layers: LayerFilter
    measures: MeasureOptions
    patterns: bool  # score head patterns too
    keep: frozenset[str]  # among KEEP
    device: torch.device | None  # where results go; None for where they are computed
    words: list[list[str]] | None  # the tokens as text, a row per batch row or one for all
    tokens: KeyTokens  # the same as numbers, for patterns by token
    layouts: object  # whether they fit is known when the model has run
    gradients: bool

    def tokens_for(self, sizes: Sequence[int]) -> KeyTokens:
        """The tokens if there are as many as a call (B, H, Nq, Nk) has keys, else none."""
        batch, _, _, nk = sizes
        ids = self.tokens.ids
        return self.tokens if ids is not None and ids.shape[0] in (1, batch) and ids.shape[1] == nk else KeyTokens()


def read_watched_measures(measures: object, size: int, top: int) -> tuple[MeasureOptions, bool]:
    """What to measure, and whether patterns are among the names."""
    if measures is None:
        return read_measures(None, size, top), True
    known = (*NAMES, "patterns")
    if not isinstance(measures, Iterable):
        raise TypeError(f"measures must be names such as {', '.join(known)}; got {type(measures).__name__}")
    names = [measures] if isinstance(measures, str) else list(measures)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no measure {unknown[0]!r}; there are {', '.join(known)}")
    own = [name for name in names if name != "patterns"]
    if "patterns" in names:
        own += ["entropy", "received"]  # patterns are read from these
    return read_measures(own, size, top), "patterns" in names


def read_tokens(tokens: object) -> tuple[list[list[str]] | None, KeyTokens]:
    """The tokens as words, and as numbers that are equal for equal words."""
    if tokens is None:
        return None, KeyTokens()
    # 1. Words.
    if isinstance(tokens, (Tensor, np.ndarray)):
        tokens = tokens.tolist()
    wrong = "tokens must be words or token numbers: a list of them, or a list per batch row"
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or len(tokens) == 0:
        raise TypeError(f"{wrong}; got {tokens!r}")
    rows = [tokens] if isinstance(tokens[0], (str, int)) else tokens
    rows = [row.tolist() if isinstance(row, Tensor) else row for row in rows]
    for row in rows:
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise TypeError(f"{wrong}; got a list that holds {row!r}")
        other = [t for t in row if not isinstance(t, (str, int))]
        if other:
            raise TypeError(f"{wrong}; got a list that holds {other[0]!r}")
    words = [[str(t) for t in row] for row in rows]
    # 2. Numbers.
    if len({len(row) for row in words}) > 1:
        return words, KeyTokens()
    number = {word: n for n, word in enumerate(dict.fromkeys(w for row in words for w in row))}
    ids = torch.tensor([[number[w] for w in row] for row in words])
    marks = torch.tensor([[w.lstrip(MARKS_OF_SPACE) in DELIMITERS for w in row] for row in words])
    return words, KeyTokens(ids, marks if bool(marks.any()) else None)


def read_keep(keep: object, gradients: object) -> frozenset[str]:
    """Which of `KEEP` to keep, and that it is enough for gradients."""
    kept: Any = () if keep is None else (keep,) if isinstance(keep, str) else keep
    if not isinstance(kept, Iterable):
        raise TypeError(f"{KEPT}; got {type(keep).__name__}")
    kept = list(kept)
    if unknown := [name for name in kept if name not in KEEP]:
        raise ValueError(f"{KEPT}; got {unknown[0]!r}")
    if not isinstance(gradients, bool):
        raise TypeError(f"gradients must be True or False, got {type(gradients).__name__}")
    if gradients and not {"qk", "v"} <= set(kept):
        raise ValueError(
            "gradients=True needs the weights and values too: watch(model, keep=['qk', 'v'], gradients=True)"
        )
    return frozenset(kept)


def read_device(device: object) -> torch.device | None:
    """A device that this machine has, with its index."""
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a name such as 'cpu' or a torch.device, got {type(device).__name__}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as problem:  # as torch raises for a missing one
        reason = str(problem).splitlines()[0]
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from None


def read_layers(layers: object) -> LayerFilter:
    """The modules selected by a path pattern, a number, or several of them."""
    if layers is None:
        return LayerFilter()
    selectors: Any = (layers,) if isinstance(layers, (str, int)) else layers
    if not isinstance(selectors, Iterable):
        raise TypeError(f"layers must be path patterns or numbers, got {type(layers).__name__}")
    selectors = tuple(selectors)
    for selector in selectors:
        if not isinstance(selector, str) and not (type(selector) is int and selector >= 0):
            raise TypeError(f"layers must be path patterns such as '*.3.*' or numbers from 0, got {selector!r}")
    if not selectors:
        raise ValueError("layers is empty: nothing would be seen; leave it out to see every layer")
    return LayerFilter(selectors)
