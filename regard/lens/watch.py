"""`watch`: every attention call of any PyTorch model, measured while it runs on its own kernels."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import RLock
from types import TracebackType
from weakref import ref

import torch
from torch import Tensor, nn

from regard.backends.call import Call
from regard.lens.assembly import Link, Runs, key_marks
from regard.lens.capture import Capture, Record
from regard.lens.doctor import facts
from regard.lens.doctor.report import merge_paths
from regard.lens.doctor.visibility import MaskSummary, summarise_mask
from regard.lens.measures import engines, streaming
from regard.lens.measures.measures import MAP_SIZE, TOP
from regard.lens.measures.weights import Given, Remembered, Weights
from regard.lens.placement import read_layouts
from regard.lens.taps.callers import original_path
from regard.lens.taps.calls import Sighting, raise_rows
from regard.lens.taps.installation import Taps
from regard.lens.view import KnownVisibility, View
from regard.lens.watch_options import Keeper, Layers, Plan, read_plan
from regard.nn.attention import MultiHeadAttention

LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|mha", re.IGNORECASE)

NO_REASON = (
    "it did not run in the block (a copy of it, as DataParallel makes, does not count), or it makes its weights in a "
    "way that is not known here"
)
COMPILED = "it is inside compiled code, of which only torch's fused kernels are seen; watch the model uncompiled"


def name_unseen(
    model: nn.Module,
    taps: Taps,
    seen: Mapping[str, bool],
    names: Sequence[str],
    records: Sequence[Record],
    layers: Layers,
) -> dict[str, str]:
    """Path → reason, for what was asked for and not seen.

    >>> layer = nn.MultiheadAttention(8, 2)
    >>> name_unseen(layer, Taps(layer, print), {}, [], [], Layers())[""][:23]
    'it did not run in the b'

    seen: path → was it in compiled code, for all modules whose attention was seen, also those not asked for.
    names: what each is called, in the order of first calls: its path, or numbers of the calls in compiled code.
    records: of those that were asked for.  layers: what was asked for.
    """
    classes = {original_path(path): type(module).__name__ for path, module in model.named_modules()}
    found = {r.path: r.trouble or "the call could not be read" for r in records if r.view is None}
    for path, problem in taps.errors:
        if path in seen or layers.may_have(path):
            found[path] = f"measuring it failed: {type(problem).__name__}: {problem}"
    for path, shape in taps.unconfirmed:
        suspected = (path, shape) in taps.suspected or not seen or LOOKS_LIKE_ATTENTION.search(classes.get(path, ""))
        if suspected and layers.may_have(path):
            found.setdefault(path, f"a softmax of shape {shape} that did not meet values in a way that is known here")
    compiled, said = _compiled(model), _said(model)
    for path in _candidates(classes):
        if path not in found and layers.may_have(path) and not _covered(path, seen):
            usual = COMPILED if any(_inside(path, whole) for whole in compiled) else NO_REASON
            found[path] = said.get(path, usual)
    for path, shape in () if seen else taps.chained:
        if layers.may_have(path):
            found.setdefault(path, f"a product of shape {shape} that met another without a softmax that is known here")
    for want in layers.unmet([*names, *(path for path in seen if path not in names)]):
        there = f"those that ran are {merge_paths(names)}" if names else "none ran"
        found[str(want)] = f"layers={want!r} fits no attention that was seen: {there}"
    return found


def _covered(path: str, seen: Mapping[str, bool]) -> bool:
    """Was attention seen in a module or in a part of it, or in the compiled code that it is a part of?"""
    if any(_inside(s, path) for s in seen):
        return True
    return any(_inside(path, s) for s, compiled in seen.items() if s or compiled)


def _candidates(classes: dict[str, str]) -> list[str]:
    """The innermost modules whose class is named like attention."""
    named = [path for path, name in classes.items() if LOOKS_LIKE_ATTENTION.search(name)]
    return [path for path in named if not any(other != path and _inside(other, path) for other in named)]


def _compiled(model: nn.Module) -> list[str]:
    """The modules that went through torch.compile, or whose forward did."""
    found = []
    for path, module in model.named_modules():
        whole = "_orig_mod" in module._modules or module._compiled_call_impl is not None
        if whole or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            found.append(original_path(path))
    return found


def _said(model: nn.Module) -> dict[str, str]:
    """What classes say of their modules as `why_unseen`: of those that attend without making weights, ran or not."""
    own = {original_path(path): getattr(type(module), "why_unseen", None) for path, module in model.named_modules()}
    return {path: why for path, why in own.items() if isinstance(why, str)}


def _inside(path: str, whole: str) -> bool:
    """Is a module another, or a part of it?"""
    return not whole or path == whole or path.startswith(f"{whole}.")


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
) -> Watching:
    """See every attention call that a model makes inside the block; the model computes what it computes without.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> seen.names, seen[0].entropy.shape, seen["self_attn"].row(0)[0, 0]
    (['self_attn'], torch.Size([1, 2, 3]), tensor([0.3333, 0.3333, 0.3333]))

    model: any nn.Module. Seen are torch's SDPA, FlexAttention, nn.MultiheadAttention, flash_attn, regard's own
        operation, and softmaxes written out by hand, also in torch.compile'd code as far as it calls kernels; what was
        not seen is named in `capture.unseen`, what was edited after its softmax in `capture.edited`. Inside compiled
        code modules are not known: where it makes several calls, they are numbered in the order of one run, as
        "compiled_call.0" or "layers.3.compiled_call.1".
    layers: which modules: path patterns such as "*.3.*", or numbers in the order of first calls; default all.
    measures: names as for `look`, and "patterns"; default those of `look` with "patterns".
    keep: "qk" keeps what exact rows, tiles, other maps and links need, "output" each call's result; both as a list.
    size, top: of the map, and how many links per row, as for `look`.
    tokens: the words (or token numbers) of the input, (N,) or one row per batch row: labels, and for patterns by token.
    layouts: what the tokens are and where they lie in a picture, for `View.overlay`: as for `Capture.layouts`.
    device: where measures and what is kept go, for example "cpu"; default where the model computed them.

    The result has the same bits as without, but for nn.MultiheadAttention and nn.TransformerEncoder where they would
    take torch's fast path: it is off meanwhile, and the result equal to rounding.

    Raises TypeError or ValueError for an argument that is none of these. Looking never makes the model raise: an error
    in measuring is named in `capture.unseen`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch takes a torch.nn.Module, got {type(model).__name__}")
    plan = read_plan(layers=layers, measures=measures, keep=keep, size=size, top=top, tokens=tokens, device=device)
    if layouts is not None:
        read_layouts(layouts)  # what is none raises now; whether they fit is known when the model has run
    _warn_of_split_heads(model)
    return Watching(model, plan, layouts)


COMPILED_CALL = "compiled_call"
"""What stands for a module's name where compiled code makes several calls, before the number of the call."""

_LOCK = RLock()  # of all watches' books


def _new_lock() -> None:
    global _LOCK
    _LOCK = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # a thread that held it is not there


class Watching:
    """What `watch` returns: enter it with `with`, once; it yields a `Capture` that fills while the model runs."""

    def __init__(self, model: nn.Module, plan: Plan, layouts: object = None) -> None:
        self.model, self.plan, self.layouts = model, plan, layouts
        inner = getattr(model, "_orig_mod", model)
        self.capture = Capture(type(inner).__name__, plan.words)
        mine = ref(self)

        def record(sighting: Sighting) -> None:  # without a hold on the watch: what is let go leaves nothing installed
            watching = mine()
            if watching is not None:
                watching._record(sighting)

        def returned(rows: Sequence[Sequence[int]], passes: int) -> None:
            watching = mine()
            if watching is not None:
                with _LOCK:
                    watching._runs.returned(rows, passes)

        self._taps = Taps(model, record, returned)
        self._runs, self._keeper = Runs(), Keeper(plan.device)
        self._seen: dict[str, bool] = {}  # path → was it in compiled code
        self._counts: dict[
            str, int
        ] = {}  # path, numbered in compiled code → calls recorded; in the order of first calls
        self._numbered: set[str] = set()  # compiled modules that make several calls in a run
        self._entered = False

    def __enter__(self) -> Capture:
        if self._entered:
            raise RuntimeError("this watch was entered before, and its capture is made; call regard.watch(…) anew")
        try:
            self._taps.__enter__()
            self._entered = True
            return self.capture
        except BaseException:
            self._entered = False
            self._taps.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        if not self._entered:
            raise RuntimeError("this watch was never entered: write `with regard.watch(model) as seen:`")
        try:
            self._taps.__exit__(kind, problem, where)
        except BaseException:
            self._taps.close()
            raise
        self._runs.close()
        named = name_unseen(
            self.model, self._taps, self._seen, list(self._counts), self.capture.records, self.plan.layers
        )
        self.capture.unseen.update(named)
        if kind is None:
            _warn_of_tokens(self.capture, self.plan)
        if self.layouts is not None and self.capture.names:
            self._lay_out()

    def _lay_out(self) -> None:
        """Give the capture its layouts, now that it is known what they have to fit; where they do not, say so."""
        try:
            self.capture.layouts = self.layouts
        except ValueError as problem:
            warnings.warn(f"{problem}; set seen.layouts to others", stacklevel=3)

    def _record(self, sighting: Sighting) -> None:
        path, order = sighting.path, sighting.order
        place = path if order is None else f"{path}.{COMPILED_CALL}.{order}".removeprefix(".")
        with _LOCK:
            self._seen[path] = self._seen.get(path, False) or sighting.compiled
            self._counts.setdefault(place, 0)
            number = list(self._counts).index(place)
            if order and path not in self._numbered:
                self._number_calls(path)
        if not (self.plan.layers.have(path, number) or self.plan.layers.have(place, number)):
            self._link(sighting, place, 0, None)  # what carries on what, others want to know
            return
        record, weights, sight = _measured(sighting, self.plan)
        with _LOCK:
            record.path = place if path in self._numbered else path
            record.n = self._counts[place]
            record.link = self._link(sighting, place, record.n, record.view)
            if record.view is not None:
                self._counts[place] = record.n + 1
            self.capture.records.append(record)
        if record.view is not None and weights is not None and "qk" in self.plan.keep:
            record.view.weights = self._kept(record, place, weights, sight)

    def _number_calls(self, path: str) -> None:
        """A compiled module makes several calls: it is no longer its name that tells them apart."""
        self._numbered.add(path)
        for record in self.capture.records:
            if record.path == path and record.compiled:
                record.path = f"{path}.{COMPILED_CALL}.0".removeprefix(".")

    def _link(self, sighting: Sighting, place: str, n: int, view: View | None) -> Link | None:
        """What a call carries on; None for one that could not be read."""
        call, made = sighting.call, sighting.weights if sighting.weights is not None else sighting.scores
        if call is None and made is None:
            return None
        sizes = _sizes(call, made)
        marks = sighting.marks if call is None else key_marks(call.k)

        def offset() -> object:
            if view is not None:
                return view.place.offset
            return None if call is None else summarise_mask(call, sighting.kind).offset

        return self._runs.link(place, n, sizes, sighting.kind, marks, offset)

    def _kept(self, record: Record, place: str, weights: Weights, sight: MaskSummary | None) -> Weights:
        device, link = self.plan.device, record.link
        if isinstance(weights, Given):
            scores = None if weights.scores is None else _moved(weights.scores, device)
            made = _copied(weights.weights, device)  # the model may have given its weights to others
            return Given(made, scores, edited=weights.edited)
        assert isinstance(weights, Remembered)
        assert link is not None
        assert sight is not None
        return self._keeper.keep(place, weights.call, weights.lse, link, _rest_hidden(sight, link))


def _warn_of_split_heads(model: nn.Module) -> None:
    """Say which heads a process has under tensor parallelism: views count them from 0."""
    for path, layer in model.named_modules():
        if isinstance(layer, MultiHeadAttention) and len(layer.local_heads) < layer.heads:
            here = layer.local_heads
            warnings.warn(
                f"this process has heads {here[0]} to {here[-1]} of the {layer.heads} of {path or 'the layer'}, and "
                f"sees those alone: head 0 of a view is head {here[0]}",
                stacklevel=3,
            )
            return


# ---------------------------------------------------------------------------------------------------------- one call


def _sizes(call: Call | None, made: Tensor | None) -> tuple[int, int, int, int]:
    if call is not None:
        return call.sizes
    assert made is not None
    batch, heads, nq, nk = made.shape
    return batch, heads, nq, nk


def _measured(sighting: Sighting, plan: Plan) -> tuple[Record, Weights | None, MaskSummary | None]:
    """The record of one call, measured now, because its tensors are the model's; its weights, and what queries see."""
    record = Record(sighting.path, 0, sighting.kind, sighting.source, sighting.kernel, sighting.compiled)
    if sighting.call is not None and sighting.trouble is None:
        sight = summarise_mask(sighting.call, sighting.kind)
        return record, _from_call(record, sighting, sighting.call, sight, plan), sight
    if sighting.weights is not None or sighting.scores is not None:
        return record, _from_weights(record, sighting, plan), None
    record.trouble = sighting.trouble or "the call could not be read"
    return record, None, None


def _from_call(record: Record, sighting: Sighting, call: Call, sight: MaskSummary, plan: Plan) -> Weights:
    raised, taken = raise_rows(call)
    lse = engines.exact_lse(raised, None if taken is not None else sighting.lse)
    found, engine = engines.measure(raised, lse, plan.wanted)
    lse = found["lse"]  # in fp64 where logits are large
    found["lse"] = lse.to(raised.wide)
    if taken is not None:  # these two are of the scores themselves
        found |= {name: found[name] + taken for name in ("lse", "max_logit") if name in found}
    record.facts = facts.read(call, sighting.output, found["lse"], kind=sighting.kind, sight=sight)
    weights = Remembered(raised, lse)
    _finish(record, weights, found, sight, sighting.output, plan, engine)
    return weights


def _from_weights(record: Record, sighting: Sighting, plan: Plan) -> Weights:
    scores, made = sighting.scores, sighting.weights
    if made is None:
        assert scores is not None
        made = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    weights = Given(made, None if sighting.edited else scores, edited=sighting.edited)
    names = plan.wanted.names - ({"max_logit"} if weights.scores is None else set())
    found = streaming.measure_given(weights, replace(plan.wanted, names=names))
    record.facts = facts.read_weights(scores, made, kind=sighting.kind)
    if sighting.edited:
        empty = record.facts.empty_rows if scores is not None else facts.RowCount()  # a weight of 0 may be an edit
        record.facts = replace(record.facts, edited=True, empty_rows=empty)
    sight = KnownVisibility(None, record.facts.padding, record.facts.offset)
    _finish(record, weights, found, sight, sighting.output, plan, "torch")
    return weights


def _finish(
    record: Record,
    weights: Weights,
    found: dict[str, Tensor],
    sight: MaskSummary | KnownVisibility,
    output: Tensor | None,
    plan: Plan,
    engine: str,
) -> None:
    """Patterns, what the doctor wants to know, and the view."""
    place = KnownVisibility(sight.visible, sight.padding, sight.offset)
    view = View(
        weights.sizes,
        found,
        weights=weights,
        kind=record.kind,
        place=place,
        tokens=plan.tokens_for(weights.sizes),
        size=plan.wanted.size,
        links=plan.wanted.top,
        engine=engine,
        edited=isinstance(weights, Given) and weights.edited,
    )
    if plan.patterns:
        for kind, found in zip(("pattern", "share", "beside"), view.score_patterns(), strict=True):
            view.held |= {f"{kind} {name}": values for name, values in found.items()}
    record.heads = {name: _moved(x, plan.device) for name, x in _heads(view, output).items()}
    view.weights = None
    view.given_output = _copied(output, plan.device) if "output" in plan.keep and output is not None else None
    if plan.device is not None:
        parts = (_moved(x, plan.device) if isinstance(x, Tensor) else x for x in vars(place).values())
        view = replace(view.moved(plan.device), place=KnownVisibility(*parts))
    record.view = view


def _heads(view: View, output: Tensor | None) -> dict[str, Tensor]:
    """What the doctor wants to know of each head, (B, H)."""
    heads = {name: view.held[f"pattern {name}"] for name in ("uniform", "first") if f"pattern {name}" in view.held}
    if view.edited:  # what a key gets is no share of 1
        heads = {}
    elif "received" in view.held and view.sizes[2] and view.sizes[3]:
        heads["one key"] = view.held["received"].amax(-1) / view.sizes[2]
    if "max_logit" in view.held and view.sizes[2]:
        heads["largest logit"] = view.held["max_logit"].amax(-1)
    if output is not None and output.ndim == 4 and output.shape[:3] == view.sizes[:3] and view.sizes[2] > 1:
        wide = torch.promote_types(output.dtype, torch.float32)
        size = torch.linalg.vector_norm(output, dim=(2, 3), dtype=wide).square()
        common = output.sum(2, dtype=wide).square().sum(-1) / view.sizes[2]  # what is the same for all queries
        heads["spread"] = ((size - common).clamp(min=0) / size.clamp(min=torch.finfo(wide).tiny)).sqrt()
    return heads


def _moved(x: Tensor, device: torch.device | None) -> Tensor:
    return x if device is None else x.to(device)


def _copied(x: Tensor, device: torch.device | None) -> Tensor:
    return x.clone() if device in (None, x.device) else x.to(device)


def _rest_hidden(sight: MaskSummary, link: Link) -> bool:
    """Does no query see a key beyond those that are written so far? A cache of fixed size has room there."""
    written = link.known + sight.nq
    if written >= sight.nk:
        return True
    seen = sight.survey
    return not bool((seen.last >= written).any() | (seen.unhidden > 0).any())


def _warn_of_tokens(capture: Capture, plan: Plan) -> None:
    """Say so if tokens were given and are no call's: a forgotten [CLS] would label every row by its neighbour."""
    sizes = [r.view.sizes for r in capture.records if r.view is not None]
    if plan.words is None or not sizes or any(plan.tokens_for(s).ids is not None for s in sizes):
        return
    have = sorted({len(row) for row in plan.words})
    warnings.warn(
        f"tokens= has {' and '.join(map(str, have))} words in {len(plan.words)} rows, but the calls have "
        f"{sizes[0][3]} keys in {sizes[0][0]} batch rows: patterns by token are not scored, and labels will not fit",
        stacklevel=3,
    )
