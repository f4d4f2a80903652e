"""`edit`: run a model with its attention changed, on its own fused kernels.

A fused output stays as it is but for the rows that an edit touches. Those are computed again, a chunk at a time, with
the edges hidden or q, k and v replaced: O(N) memory, and no subtraction that would cancel where a weight is near 1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.backends.call import Call
from regard.edits.values import Ablate, Add, Edit, Edits, KnockOut, Patch, Positions, ZeroValues
from regard.lens.capture import Capture
from regard.lens.doctor import merge_paths
from regard.lens.edit_records import ACTIVE
from regard.lens.measures.weights import sources
from regard.lens.taps.calls import original_path
from regard.lens.taps.interception import InterceptedCall, Interceptor
from regard.masks import Mask
from regard.masks.mask import Bounds, IndexRule, TileGrid

__all__ = ["AppliedEdit", "EditContext", "edit"]

CELLS = 1 << 24  # scores that are computed at once


@dataclass
class AppliedEdit:
    """What one edit has changed so far.

    calls: attention calls (or calls of a module) that it changed.
    rows: (batch row, head, query) whose output it changed; for `add`, positions.
    edges: (batch row, head, query, key) that were visible and knocked out.
    """

    edit: Edit
    calls: int = 0
    rows: int = 0
    _edges: list[Tensor] = field(default_factory=list, repr=False)  # counted on the device, added up when asked for

    @property
    def edges(self) -> int:
        """See above."""
        if len(self._edges) > 1:
            self._edges = [torch.stack(self._edges).sum()]
        return int(self._edges[0]) if self._edges else 0


def edit(model: nn.Module, *edits: Edit | Edits) -> EditContext:
    """Run a model with its attention edited inside the block.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> with regard.edit(layer, regard.edits.knock_out(layer=0, head=1, queries=4, keys=2)) as editing:
    ...     changed = layer(x)
    >>> editing.applied[0].rows, [bool((changed[0, i] != layer(x)[0, i]).any()) for i in range(5)]
    (1, [False, False, False, False, True])

    Whatever `regard.watch` sees can be edited: SDPA, FlexAttention, nn.MultiheadAttention, Hugging Face's models,
    regard's own, and softmaxes written by hand. Kernels stay as they are; gradients pass through the edit. In a
    generation with a cache, positions count from the beginning of the text. `watch` around the block or in it shows the
    edited weights.

    Args:
        model: any nn.Module that is not compiled.
        *edits: of `regard.edits`, applied together.

    Returns:
        A context manager; it gives an `EditContext`, whose `applied` counts what each edit has changed.

    Raises:
        TypeError: not a module, or not an edit.
        ValueError: no edit is given, a layer is negative or its module path does not exist, or the model is compiled.
        LookupError: at the end of the block, if an edit has changed nothing, with the reason.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"edit takes a torch.nn.Module, got {type(model).__name__}")
    wrong = [type(e).__name__ for e in edits if not isinstance(e, (Edit, Edits))]
    if wrong:
        raise TypeError(f"edits come from regard.edits, such as knock_out(…); got {wrong[0]}")
    flat = tuple(single for e in edits for single in e)
    if not flat:
        raise ValueError("no edit was given; regard.edits has knock_out, ablate, zero_values, patch and add")
    paths = {original_path(name) for name, _ in model.named_modules()}
    for single in flat:
        path = single.path if isinstance(single, Add) else getattr(single, "layer", None)
        if isinstance(path, int) and path < 0:
            raise ValueError(
                f"{single!r}: the number of layers is known only after a run, so {path} cannot be counted from the "
                "end; give the number from 0 or the module path (regard.effect, which runs first, takes it)"
            )
        if isinstance(path, str) and path not in paths:
            near = [name for name in paths if path and (name.endswith(path) or (name and path.endswith(name)))]
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{single!r}: the model has no module {path!r}{hint}")
    return EditContext(model, flat)


class EditContext:
    """What `edit` returns: enter it with `with`.

    Attributes:
        edits: the edits, one by one.
        applied: for each of them, what it has changed so far.
        names: module paths of the attention calls that ran, in the order of first calls.
    """

    def __init__(self, model: nn.Module, edits: tuple[Edit, ...]) -> None:
        self.model, self.edits = model, edits
        self.applied = [AppliedEdit(single) for single in edits]
        self._interceptor = Interceptor(model, self._on_call)
        self._hooks: list[RemovableHandle] = []
        self._text = _TextPosition()
        self._lengths: dict[int, int] = {}  # edit → positions that its calls had
        self._heads: dict[str, int] = {}  # module path → heads of its first call

    @property
    def names(self) -> list[str]:
        """Module paths of the attention calls that ran."""
        return self._interceptor.names

    def __enter__(self) -> EditContext:
        self._interceptor.__enter__()
        modules = {original_path(name): module for name, module in self.model.named_modules()}
        for number, applied in enumerate(self.applied):
            if isinstance(applied.edit, Add):
                hook = _adding(number, applied.edit, applied, self._text)
                self._hooks.append(modules[applied.edit.path].register_forward_hook(hook))
        ACTIVE.append(self)  # captures of this run name the edits
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        ACTIVE.remove(self)
        while self._hooks:
            self._hooks.pop().remove()
        self._interceptor.__exit__(kind, problem, where)
        if kind is None:
            self._text.close(attention=bool(self._interceptor.names))
            for number, applied in enumerate(self.applied):
                if not applied.rows or (isinstance(applied.edit, KnockOut) and not applied.edges):
                    raise LookupError(self._why_nothing(number, applied))

    def _why_nothing(self, number: int, applied: AppliedEdit) -> str:
        single, names, reasons = applied.edit, self._interceptor.names, self._interceptor.reasons
        start = f"{single!r} changed nothing: "
        if isinstance(single, Add):
            return start + f"the module {single.path!r} did not run, or none of these positions were there"
        layer = getattr(single, "layer", None)
        meant = [layer] if isinstance(layer, str) else names if layer is None else names[layer:][:1]
        for path in meant if names or isinstance(layer, str) else reasons:
            if path in reasons:
                return start + f"the attention of {path!r} cannot be edited: {reasons[path]}"
        if not names:
            return start + "no attention of the model ran inside the block, in a way that is known here"
        if not applied.calls and number not in self._lengths:
            return (
                start + f"no attention ran there; the layers that ran are {merge_paths(names)}, 0 to {len(names) - 1}"
            )
        if isinstance(single, KnockOut) and applied.rows:
            return start + "the weight of these edges is 0 already: the mask hides them"
        return start + f"no call had these positions; the calls had {self._lengths.get(number, 0)} positions"

    def _on_call(self, intercepted: InterceptedCall) -> tuple[Call | None, Tensor] | None:
        if intercepted.kind == "self":
            self._text.attend(intercepted.path, intercepted.first_query, intercepted.sizes[2])
        mine = [
            (number, applied)
            for number, applied in enumerate(self.applied)
            if not isinstance(applied.edit, Add)
            and getattr(applied.edit, "layer", None) in (None, intercepted.number, intercepted.path)
        ]
        if not mine:
            return None
        _, heads, queries, _ = intercepted.sizes
        before = self._heads.setdefault(intercepted.path, heads)
        if before != heads and before == heads * queries:
            raise ValueError(
                f"{intercepted.path!r} had {before} heads in its first call and has {heads} with {queries} queries in "
                "a later one, which looks like heads packed as queries, in a way that is not read yet: which head an "
                "edit means is not known"
            )
        for number, applied in mine:
            largest = max(head_list(applied.edit, heads))
            if largest >= heads:
                raise IndexError(f"{applied.edit!r}: {intercepted.path!r} has {heads} heads, 0 to {heads - 1}")
            self._lengths[number] = max(self._lengths.get(number, 0), intercepted.first_key + intercepted.sizes[3])
        if intercepted.call is not None and intercepted.call.dropout:
            raise ValueError(
                f"{intercepted.path!r} runs with dropout {intercepted.call.dropout}, which an edit cannot repeat: call "
                "model.eval() first"
            )
        return apply(intercepted, [applied for _, applied in mine])


def head_list(single: Edit, heads: int) -> list[int]:
    """The heads that an edit means, of a call with so many."""
    head = getattr(single, "head", None)
    return list(range(heads)) if head is None else [head] if isinstance(head, int) else list(head)


def places_of(positions: Positions, first: int, count: int, total: int) -> list[int]:
    """Which of the `count` places that begin at position `first` are meant, as indices from 0.

    total: positions that there are so far; negative positions and slices count from it.
    """
    if positions is None:
        return list(range(count))
    if isinstance(positions, slice):
        wanted = list(range(total)[positions])
    else:
        listed = (positions,) if isinstance(positions, int) else positions
        wanted = [at + total if at < 0 else at for at in listed]
    return sorted({at - first for at in wanted if first <= at < first + count})


def check_order(single: Edit, source: object, positions: Positions, total: int) -> None:
    """Raise ValueError if a source has a row for each position, and these do not ascend."""
    if not isinstance(source, Tensor) or source.ndim < 2 or positions is None or isinstance(positions, int):
        return
    listed = list(range(total)[positions]) if isinstance(positions, slice) else list(positions)
    wanted = [at + total if at < 0 else at for at in listed]
    if source.shape[-2] == len(wanted) and any(a >= b for a, b in pairwise(wanted)):
        raise ValueError(
            f"{single!r}: a tensor with a row for each position needs positions that ascend, got {listed}; sort them, "
            "and the rows with them"
        )


def _index(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers as a tensor. Numbers in a row are made on the device: copying them would wait for its queue."""
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return torch.arange(numbers[0], numbers[0] + len(numbers), device=device)
    return torch.tensor(numbers, device=device)


def apply(intercepted: InterceptedCall, mine: Sequence[AppliedEdit]) -> tuple[Call | None, Tensor] | None:
    """The call and its output after these edits: first q, k and v, then weights, then outputs. None if none hits it."""
    output, (_, heads, nq, nk) = intercepted.output, intercepted.sizes
    device = output.device
    first_query, first_key = intercepted.first_query, intercepted.first_key
    so_far = first_query + nq  # a cache of fixed size has room for more keys behind them
    keys_so_far = so_far if intercepted.kind == "self" else first_key + nk

    def queries_of(positions: Positions) -> list[int]:
        return places_of(positions, first_query, nq, so_far)

    def keys_of(positions: Positions) -> list[int]:
        return places_of(positions, first_key, nk, keys_so_far)

    # 1. What changes the weights or what they are applied to, by head.
    parts = _Parts(intercepted)
    whole: set[int] = set()  # heads of which every row changes
    knocked: list[tuple[AppliedEdit, _Edges]] = []
    for applied in mine:
        single, chosen = applied.edit, head_list(applied.edit, heads)
        if isinstance(single, KnockOut):
            rows, columns = queries_of(single.queries), keys_of(single.keys)
            if single.edges is not None:
                single.edges.fit(*intercepted.sizes)
            if len(rows) and len(columns):
                knocked.append((applied, _Edges(single, tuple(rows), tuple(columns), heads)))
        elif isinstance(single, ZeroValues):
            columns = keys_of(single.keys)
            if len(columns):
                parts.zero_values(chosen, columns)
                whole.update(chosen)
                _count(applied, intercepted.sizes[0] * len(chosen) * nq)
        elif isinstance(single, Patch) and single.part != "output":
            at = keys_of(single.positions) if single.part in "kv" else queries_of(single.positions)
            if len(at):
                check_order(single, single.source, single.positions, keys_so_far if single.part in "kv" else so_far)
                parts.put(single, chosen, at)
                whole.update(chosen)
                _count(applied, intercepted.sizes[0] * len(chosen) * nq)
    call, changed = intercepted.call, False
    if call is not None and any(not edges.edit.renormalise for _, edges in knocked):
        intercepted.trouble = (
            "knock_out(renormalise=False) takes weights away after the softmax, which is not seen inside a fused "
            "kernel; load the model with attn_implementation='eager' to watch it under this edit"
        )
    if knocked or whole:
        output, changed = _recompute(intercepted, parts, whole, knocked), True
        if call is not None:
            mask = call.mask
            for _, edges in knocked:
                if edges.edit.renormalise:
                    mask = ~edges if mask is None else mask & ~edges
            changes: dict[str, Any] = {name: parts.of(name) for name in "qkv"} if parts.changed else {}
            call = replace(call, mask=mask, **changes)
    # 2. Outputs.
    for applied in mine:
        single, chosen = applied.edit, head_list(applied.edit, heads)
        if isinstance(single, Ablate) or (isinstance(single, Patch) and single.part == "output"):
            at = queries_of(single.queries if isinstance(single, Ablate) else single.positions)
            if len(at):
                if isinstance(single, Ablate):
                    check_order(single, single.by, single.queries, so_far)
                else:
                    check_order(single, single.source, single.positions, so_far)
                new = _replacement(single, intercepted, output, chosen, at)
                if not changed:
                    output, changed = output.clone(), True
                output[:, _index(chosen, device)[:, None], _index(at, device)] = new.to(output.dtype)
                _count(applied, intercepted.sizes[0] * len(chosen) * len(at))
    return (call, output) if changed else None


def _count(applied: AppliedEdit, rows: int) -> None:
    applied.calls += 1
    applied.rows += rows


class _Parts:
    """q, k and v of a call for each query head, (B, H, N, D): heads that share a key head may differ after an edit."""

    def __init__(self, intercepted: InterceptedCall) -> None:
        self.intercepted, call = intercepted, intercepted.call
        self.changed: dict[str, Tensor] = {}
        self.original: dict[str, Tensor | None] = {
            "q": None if call is None else call.q,
            "k": None if call is None else call.k,
            "v": intercepted.values if call is None else call.v,
        }

    def of(self, part: str) -> Tensor:
        """q, k or v by query head, as edited so far."""
        if part in self.changed:
            return self.changed[part]
        x = self.original[part]
        if x is None:
            raise ValueError(
                f"the attention of {self.intercepted.path!r} is a softmax written by hand: its {part} cannot be patched"
            )
        return x.repeat_interleave(self.intercepted.sizes[1] // x.shape[1], 1)

    def zero_values(self, chosen: list[int], at: list[int]) -> None:
        """Set the values of heads to 0 at these positions of the call."""
        x = self.of("v").clone()
        x[:, _index(chosen, x.device)[:, None], _index(at, x.device)] = 0.0
        self.changed["v"] = x

    def put(self, single: Patch, chosen: list[int], at: list[int]) -> None:
        """Put another run's q, k or v into heads, at these positions of the call."""
        x = self.of(single.part).clone()
        first = self.intercepted.first_query if single.part == "q" else self.intercepted.first_key
        positions = [place + first for place in at]
        new = _from_source(single.source, single.part, self.intercepted, chosen, positions, x.shape)
        x[:, _index(chosen, x.device)[:, None], _index(at, x.device)] = new.to(x.dtype)
        self.changed[single.part] = x


def _from_source(
    source: Tensor | Capture | None,
    part: str,
    intercepted: InterceptedCall,
    heads: list[int],
    positions: list[int],
    shape: Sequence[int],
) -> Tensor:
    """A part of another run for heads and positions, (B or 1, heads, positions, D)."""
    device = intercepted.output.device
    index, places = _index(heads, device), _index(positions, device)
    if isinstance(source, Tensor):
        wide = source.to(device)
        wide = wide[(None,) * (4 - wide.ndim)]
        total = positions[-1] + 1
        if wide.shape[2] not in (1, len(positions)) and wide.shape[2] < total:
            raise ValueError(f"source has {wide.shape[2]} positions, but position {total - 1} is to be replaced")
        if wide.shape[1] not in (1, len(heads), shape[1]) or wide.shape[-1] not in (1, shape[-1]):
            raise ValueError(
                f"source must broadcast to (batch, heads, positions, {shape[-1]}), got {tuple(source.shape)}"
            )
        wide = wide[:, index] if wide.shape[1] == shape[1] else wide
        return wide[:, :, places] if wide.shape[2] not in (1, len(positions)) else wide
    assert isinstance(source, Capture)
    view = source[intercepted.path]
    if part == "output":
        x = view.output
    elif part == "v":
        x = view.values
    else:
        computed = [s for s in ([] if view.weights is None else sources(view.weights)) if hasattr(s, "call")]
        if len(computed) != 1:
            raise ValueError(f"the source has no {part} of {intercepted.path!r}; watch it with keep='qk'")
        x = getattr(computed[0].call, part)
    x = torch.as_tensor(x, device=device)
    x = x.repeat_interleave(shape[1] // x.shape[1], 1)
    if positions[-1] >= x.shape[2] or x.shape[0] not in (1, shape[0]):
        raise ValueError(
            f"the source has {x.shape[0]} batch rows and {x.shape[2]} positions in {intercepted.path!r}; this run has "
            f"{shape[0]} and needs position {positions[-1]}"
        )
    return x[:, index[:, None], places]


def _replacement(
    single: Ablate | Patch, intercepted: InterceptedCall, output: Tensor, chosen: list[int], at: list[int]
) -> Tensor:
    """The new output of heads and queries, (B or 1, heads, queries, Dv)."""
    source = single.by if isinstance(single, Ablate) else single.source
    if isinstance(source, str):
        if source == "zero":
            return output.new_zeros(1, 1, 1, 1)
        return output[:, _index(chosen, output.device)].mean(2, keepdim=True)
    if isinstance(source, (Tensor, Capture)):
        positions = [place + intercepted.first_query for place in at]
        return _from_source(source, "output", intercepted, chosen, positions, output.shape)
    assert source is not None
    means = source.outputs.get(intercepted.path)  # of a survey, (heads, Dv)
    if means is None:
        raise LookupError(
            f"{single!r}: no layer {intercepted.path!r} in the survey; it has {merge_paths(list(source.outputs))}"
        )
    if tuple(means.shape) != (output.shape[1], output.shape[3]):
        raise ValueError(
            f"{single!r}: the survey has outputs (heads, Dv) of {tuple(means.shape)} in {intercepted.path!r}, and this "
            f"run of {(output.shape[1], output.shape[3])}: survey this model"
        )
    return means.to(output.device)[_index(chosen, output.device)][None, :, None]


def _recompute(
    intercepted: InterceptedCall, parts: _Parts, whole: set[int], knocked: Sequence[tuple[AppliedEdit, _Edges]]
) -> Tensor:
    """The output with the rows that changed computed again, in chunks of queries.

    Which rows those are is known without asking the device, so that nothing here waits for it.
    """
    output, (batch, heads, nq, nk) = intercepted.output, intercepted.sizes
    device = output.device
    # 1. Which heads and rows.
    touched, rows = set(whole), set(range(nq) if whole else ())
    for applied, edges in knocked:
        chosen = head_list(edges.edit, heads)
        touched.update(chosen)
        rows.update(edges.rows)
        _count(applied, batch * len(chosen) * len(edges.rows))
    index, queries = _index(sorted(touched), device), _index(sorted(rows), device)
    weights_of = _weights(intercepted, parts, index)
    values = parts.of("v")[:, index]
    every_row = _marked(heads, whole, device)[index][:, None]  # (heads, 1)
    b, j = torch.arange(batch, device=device).view(-1, 1, 1, 1), torch.arange(nk, device=device).view(1, 1, 1, -1)
    named = [edges.bind(nq, nk, device, torch.float32) for _, edges in knocked]
    # 2. A chunk of rows at a time.
    new, replaced = [], []
    if intercepted.weights is not None and knocked:
        intercepted.edited_weights = intercepted.weights.detach().clone()
    for part in torch.split(queries, max(1, CELLS // max(1, batch * len(index) * nk))):
        kept = torch.ones(batch, len(index), len(part), nk, dtype=torch.bool, device=device)
        faded = torch.ones_like(kept)  # edges whose weight is taken away without the others growing
        if knocked:
            with torch.no_grad():
                seen = weights_of(part, None) > 0  # a bias of −10,000 hides as a mask does
        for (applied, edges), is_edge in zip(knocked, named, strict=True):
            edge = is_edge(b, index.view(1, -1, 1, 1), part.view(1, 1, -1, 1), j)  # (B or 1, heads, rows, Nk)
            (kept if edges.edit.renormalise else faded).logical_and_(~edge)
            applied._edges.append((edge & seen).sum())
        p = weights_of(part, kept) * faded
        changed = every_row.expand(batch, -1, len(part))  # (B, heads, rows)
        if knocked:
            changed = changed | (seen & ~(kept & faded)).any(-1)
        if intercepted.edited_weights is not None:
            intercepted.edited_weights[:, index[:, None], part] = p.detach().to(intercepted.edited_weights.dtype)
        # As a model multiplies that makes its weights by hand, or in the precision of the scores.
        new.append(p.to(values.dtype) @ values if intercepted.call is None else p @ values.to(p.dtype))
        replaced.append(changed)
    # 3. Into the fused output. A row that lost nothing keeps its bits.
    place = (slice(None), index[:, None], queries)
    old = output[place]
    output = output.clone()
    output[place] = torch.where(torch.cat(replaced, 2).unsqueeze(-1), torch.cat(new, 2).to(output.dtype), old)
    return output


def _marked(count: int, numbers: Collection[int], device: torch.device) -> Tensor:
    """Booleans (count,), True at these numbers."""
    marks = torch.zeros(count, dtype=torch.bool, device=device)
    return marks.index_fill_(0, _index(sorted(numbers), device), True) if numbers else marks


WeightsOfRows = Callable[[Tensor, Tensor | None], Tensor]


def _weights(intercepted: InterceptedCall, parts: _Parts, index: Tensor) -> WeightsOfRows:
    """A function of rows and of which edges are kept (all if None): their weights, 0 where hidden."""
    _, _, nq, nk = intercepted.sizes
    call = intercepted.call
    if call is None:
        applied, scores = intercepted.weights, intercepted.scores
        assert applied is not None

        def stored(rows: Tensor, kept: Tensor | None) -> Tensor:
            p = applied[:, index[:, None], rows]
            if kept is None and scores is not None:
                return p * (scores[:, index[:, None], rows, :nk] > torch.finfo(scores.dtype).min)
            if kept is None:
                return p
            if scores is None or (torch.is_grad_enabled() and p.requires_grad):
                left = p * kept
                lost = (p * ~kept).sum(-1, keepdim=True)
                rest = left.sum(-1, keepdim=True) if scores is None or scores.shape[-1] == nk else 1 - lost
                return left / torch.where(rest == 0, 1.0, rest)
            s = scores[:, index[:, None], rows].to(torch.promote_types(scores.dtype, torch.float32))
            # Models hide by the smallest number too: among keys that are all hidden, it would be shared out.
            s[..., :nk] = s[..., :nk].masked_fill(~kept | (s[..., :nk] <= torch.finfo(scores.dtype).min), -inf)
            return _softmax(s)[..., :nk]

        return stored

    q, k = (parts.of(name)[:, index].to(call.wide) for name in "qk")
    b = torch.arange(call.sizes[0], device=call.device).view(-1, 1, 1, 1)
    j = torch.arange(nk, device=call.device).view(1, 1, 1, -1)
    see = None if call.mask is None else call.mask.bind(nq, nk, call.device, call.wide)
    bias = None if call.bias is None else call.bias.bind(nq, nk, call.device, call.wide)

    def computed(rows: Tensor, kept: Tensor | None) -> Tensor:
        at = (b, index.view(1, -1, 1, 1), rows.view(1, 1, -1, 1), j)
        shape = (call.sizes[0], len(index), len(rows), nk)
        visible = torch.ones(shape, dtype=torch.bool, device=call.device) if kept is None else kept
        if see is not None:
            visible = visible & see(*at)
        with torch.autocast(call.device.type, enabled=False):
            s = (q[:, :, rows] @ k.mT) * call.scale
            if call.softcap is not None:
                s = call.softcap * torch.tanh(s / call.softcap)
            if bias is not None:
                s = s + bias(*at)
            s = s.masked_fill(~visible, -inf)
            if call.sinks is not None:
                column = call.sinks.to(s.dtype)[index].view(1, -1, 1, 1).expand(*shape[:3], 1)
                s = torch.cat([s, column], -1)
            return _softmax(s)[..., :nk]

    return computed


def _softmax(s: Tensor) -> Tensor:
    """softmax over the last axis, 0 for a row that sees nothing."""
    nothing = (s == -inf).all(-1, keepdim=True)
    return torch.where(nothing, 0.0, torch.where(nothing, 0.0, s).softmax(-1))


@dataclass(frozen=True, eq=False, repr=False)
class _Edges(Mask):
    """True at the edges that an edit knocks out of one call, by its own numbers of rows and columns."""

    edit: KnockOut
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: int  # of the call

    def varies(self) -> tuple[int, int]:
        """Over heads if the edit names some."""
        batch, heads = (1, 1) if self.edit.edges is None else self.edit.edges.leading
        return batch, heads if self.edit.head is None else self.heads

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j)."""
        row, column = _marked(nq, self.rows, device), _marked(nk, self.columns, device)
        head = None if self.edit.head is None else _marked(self.heads, head_list(self.edit, self.heads), device)
        see = None if self.edit.edges is None else self.edit.edges.bind(nq, nk, device, dtype)

        def edge(b: Any, h: Any, i: Any, j: Any) -> Any:
            cells = row[i] & column[j]
            cells = cells if head is None else cells & head[h]
            return cells if see is None else cells & see(b, h, i, j)

        return edge

    def bounds(self, grid: TileGrid) -> Bounds:
        """Maybe anywhere, nowhere for certain."""
        (i0, _), (j0, _) = grid.rows(grid.i), grid.cols(grid.j)
        some = (i0 >= 0) & (j0 >= 0)
        return some, ~some

    def __repr__(self) -> str:
        return repr(self.edit)


@dataclass(frozen=True)
class _Assumed:
    """The positions assumed for a module of `add`: `count` from `first` on."""

    edit: Add
    first: int
    count: int
    whole: int = 0  # positions of the attention before it, if it returned fewer of them


class _TextPosition(threading.local):
    """The text position of the modules of `add`, known from the self-attention of the same pass.

    A module behind an attention stands where that one does. One in front of it, as an embedding, or one that returns
    another number of positions, is taken to stand at the next position or at 0; the attention after it must agree.
    """

    def __init__(self) -> None:
        self.number = 0  # of the pass; another begins where a module attends again
        self.paths: set[str] = set()  # that have attended in this pass
        self.first = self.count = 0  # of the latest self-attention
        self.calls: dict[int, list[int]] = {}  # edit → the passes that its module was called in
        self.leading: set[int] = set()  # edits of modules that come before the attention of their pass
        self.assumed: dict[int, _Assumed] = {}

    def attend(self, path: str, first: int, count: int) -> None:
        """Self-attention over `count` positions from `first` on. Raises ValueError if a module was taken wrongly."""
        again = path in self.paths
        if again:
            self.number += 1
            self.paths.clear()
        self.paths.add(path)
        self.first, self.count = first, count
        for taken in self.assumed.values():
            if taken.whole and (again or taken.count != count):
                self._refuse_part(taken)
            if taken.count == count and taken.first != first:
                raise ValueError(
                    f"{taken.edit!r}: the module was assumed to begin at position {taken.first}, and the attention "
                    f"after it begins at {first}; add to a module behind an attention, or run one text in each block"
                )
        self.assumed.clear()

    def module(self, number: int, single: Add, count: int) -> int:
        """The position of the first of `count` positions that the module of an edit returns."""
        calls = self.calls.setdefault(number, [])
        if not self.paths or self.number in calls[-1:]:
            self.leading.add(number)
        calls.append(self.number)
        if number not in self.leading and count == self.count:
            return self.first
        first = self.first + self.count if number in self.leading and count == 1 else 0
        whole = self.count if number not in self.leading and count < self.count else 0
        self.assumed[number] = _Assumed(single, first, count, whole)
        return first

    def close(self, attention: bool) -> None:
        """No more calls; attention: some ran. Raises ValueError if it is not known where a module stood."""
        for taken in self.assumed.values():
            if taken.whole:
                self._refuse_part(taken)
        if attention and not self.paths and any(len(calls) > 1 for calls in self.calls.values()):
            raise ValueError("add(positions=…) in steps of a text needs its attention, which could not be read here")

    def _refuse_part(self, taken: _Assumed) -> None:
        raise ValueError(
            f"{taken.edit!r}: the module returned {taken.count} of {taken.whole} positions, and which is not known; "
            "leave positions out, or add to a module that returns all of them"
        )


def _adding(
    number: int, single: Add, applied: AppliedEdit, text: _TextPosition
) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that adds a vector to a module's output."""

    def hook(module: nn.Module, arguments: Any, out: Any) -> Any:
        hidden = out if isinstance(out, Tensor) else out[0]
        assert single.vector is not None
        vector = single.vector.to(hidden.device, hidden.dtype) * single.scale
        count = hidden.shape[-2]
        first = 0 if single.positions is None else text.module(number, single, count)
        places = places_of(single.positions, first, count, first + count)
        if not places:
            return out
        check_order(single, single.vector, single.positions, first + count)
        steered, at = hidden.clone(), _index(places, hidden.device)
        steered[..., at, :] = steered[..., at, :] + vector
        _count(applied, hidden[..., 0].numel() // hidden.shape[-2] * len(places))
        return steered if isinstance(out, Tensor) else (steered, *out[1:])

    return hook
