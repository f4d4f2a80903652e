"""Taps on FlexAttention, Hugging Face's attention functions and flash_attn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from math import prod
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from regard.backends.call import Call
from regard.lens.taps.calls import (
    HERE,
    KernelResult,
    ObservedCall,
    Source,
    active,
    deliver,
    find_callers,
    measuring,
    read_call,
    trusted_lse,
)
from regard.masks import causal, window
from regard.masks.mask import Bounds, IndexRule, Mask, TileGrid, cell_of, indices, per_tile

Function = Callable[..., Any]
Holder = dict[str, Any] | type

FLEX = "torch.nn.attention.flex_attention"
HUGGING_FACE = "transformers.integrations.flex_attention"
ASKED = 1 << 20  # up to how many cells a mask is asked whole, to know its tiles exactly
LISTED = 1 << 12  # how many cells of a list are asked at once
UNLIMITED = 1 << 29  # a window as wide as any sequence


# ---------------------------------------------------------------------------------------------- FlexAttention's masks


@dataclass(frozen=True, eq=False, repr=False)
class FlexMask(Mask):
    """The mask of a FlexAttention call: `mask_mod`, and its blocks where the compiled kernel uses them."""

    mod: Callable[..., Any]
    rows: tuple[int, int]  # (B, H) over which the function varies
    partial: Tensor | None  # (B or 1, H or 1, blocks of queries, blocks of keys): the function decides
    full: Tensor | None  # likewise: visible without asking
    block: tuple[int, int]

    def varies(self) -> tuple[int, int]:
        """The numbers of batch rows and heads over which the function varies."""
        return self.rows

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j), by blocks where there are any."""
        if self.partial is None or self.full is None:
            return self._ask
        (bq, bk), partial, full = self.block, cell_of(self.partial.to(device)), cell_of(self.full.to(device))

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            return full(b, h, i // bq, j // bk) | (partial(b, h, i // bq, j // bk) & self._ask(b, h, i, j))

        return see

    def _ask(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        """`mask_mod` is written for one cell, so `vmap` gives it one at a time.

        Over a grid axis by axis, as FlexAttention itself does: a table that is looked up one index after the other is
        then cut down with each of them. Other cells come as a list, a part at a time.
        """
        shape = torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)  # type: ignore[no-untyped-call]
        if 0 in shape:
            return torch.zeros(shape, dtype=torch.bool, device=i.device)
        mod = self.mod
        on_a_grid = all(  # each index varies along its own axis at most
            size == 1 or at == axis
            for axis, x in enumerate((b, h, i, j))
            for at, size in enumerate(x.shape, 4 - x.ndim)
        )
        if len(shape) == 4 and on_a_grid:
            for axis in (3, 2, 1, 0):
                mod = torch.vmap(mod, in_dims=tuple(0 if n == axis else None for n in range(4)))
            grid: Tensor = mod(*(x.reshape(-1) for x in (b, h, i, j)))
            return grid
        cells: Tensor = torch.vmap(mod, chunk_size=LISTED)(*(x.expand(shape).reshape(-1) for x in (b, h, i, j)))
        return cells.view(shape)

    def bounds(self, grid: TileGrid) -> Bounds:
        """Exact up to `ASKED` cells; beyond as far as blocks say it, and else: maybe, not for certain."""
        if prod(self.rows) * grid.nq * grid.nk <= ASKED:
            see = self.bind(grid.nq, grid.nk, grid.device, torch.float32)
            cells = see(*indices(*self.rows, grid.i, grid.j, grid.device))  # (B, H, Nq, Nk)
            return per_tile(cells, grid.size, "any"), per_tile(cells, grid.size, "all")
        (i0, i1), (j0, j1) = grid.rows(grid.i), grid.cols(grid.j)
        if self.partial is None or self.full is None:
            some = (i0 >= 0) & (j0 >= 0)
            return some, ~some
        bq, bk = self.block
        r0, r1, c0, c1 = i0 // bq, i1 // bq, j0 // bk, j1 // bk

        def count(table: Tensor) -> Any:
            """How many blocks that a tile touches are in a table."""
            sums = pad(table.to(grid.device).long(), (1, 0, 1, 0)).cumsum(-1).cumsum(-2)
            b, h, _, _ = indices(table.shape[0], table.shape[1], grid.i, grid.j, grid.device)
            at = cell_of(sums)
            return at(b, h, r1 + 1, c1 + 1) - at(b, h, r0, c1 + 1) - at(b, h, r1 + 1, c0) + at(b, h, r0, c0)

        return count(self.partial | self.full) > 0, count(self.full) == (r1 - r0 + 1) * (c1 - c0 + 1)

    def __repr__(self) -> str:
        return f"flex_mask({getattr(self.mod, '__name__', type(self.mod).__name__)})"


def flex_mask(blocks: BlockMask | None, batch: int, heads: int, *, compiled: bool) -> Mask | None:
    """The mask that FlexAttention applies, or None where it applies none.

    compiled: the compiled kernel skips blocks and trusts full ones; the other asks `mask_mod` for every cell.
    """
    if blocks is None:
        return None
    device, varies = blocks.kv_indices.device, []
    for axis, n in ((0, batch), (1, heads)):  # does mask_mod touch this argument? If it fails otherwise: perhaps
        arguments: list[Any] = [torch.tensor(0, device=device)] * 4
        arguments[axis] = _Untouchable()
        try:
            blocks.mask_mod(*arguments)
            varies.append(1)
        except Exception:
            varies.append(n)
    if not compiled:
        return FlexMask(blocks.mask_mod, (varies[0], varies[1]), None, None, blocks.BLOCK_SIZE)

    def table(counts: Tensor, columns: Tensor) -> Tensor:
        """How many of each row's columns are meant (B, H, R), and which (B, H, R, C) → booleans (B, H, R, C)."""
        listed = torch.arange(columns.shape[-1], device=device) < counts.unsqueeze(-1)
        return torch.zeros_like(listed).scatter(-1, columns.long(), listed)

    partial = table(blocks.kv_num_blocks, blocks.kv_indices)
    if blocks.full_kv_num_blocks is None or blocks.full_kv_indices is None:
        full = torch.zeros_like(partial)
    else:
        full = table(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    rows = (max(varies[0], partial.shape[0]), max(varies[1], partial.shape[1]))
    return FlexMask(blocks.mask_mod, rows, partial, full, blocks.BLOCK_SIZE)


class _Untouchable:
    """Raises in whatever is done with it: also in a comparison, where Python would fall back on identity."""

    def _refuse(self, *_: object) -> Any:
        raise TypeError("touched")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse


# ------------------------------------------------------------------------------------------------ reading the calls


Arguments = dict[str, Any]

Reader = Callable[[Arguments, Any, KernelResult | None], ObservedCall]
"""Reads a call from its arguments by name, what it returned, and the result of the kernel that ran inside it."""


def read_flex(arguments: Arguments, out: Any, kernel: KernelResult | None, *, compiled: bool) -> ObservedCall:
    """`flex_attention(query, key, value, score_mod, block_mask, scale, …)`. The compiled kernel uses the blocks."""
    output = _first(out)
    if arguments.get("score_mod") is not None:
        trouble = (
            "score_mod is a function of the score, and cannot be taken apart into scale, softcap and bias; "
            "what block_mask can say, and a scale, are read"
        )
        return ObservedCall(source="flex", kernel="flex_attention", output=output, lse=flex_lse(out), trouble=trouble)
    batch, heads = arguments["query"].shape[:2]
    mask = flex_mask(arguments.get("block_mask"), batch, heads, compiled=compiled)
    make = partial(
        read_call, arguments["query"], arguments["key"], arguments["value"], mask=mask, scale=arguments.get("scale")
    )
    return observed("flex", "flex_attention", make, output, flex_lse(out))


def read_hugging_face(arguments: Arguments, out: Any, kernel: KernelResult | None) -> ObservedCall:
    """`flex_attention_forward(module, query, key, value, attention_mask, scaling, softcap, s_aux, position_bias)`.

    What it adds to the scores is known here by name, where FlexAttention itself is given a function of them.
    """
    q, k, v, sinks = arguments["query"], arguments["key"], arguments["value"], arguments.get("s_aux")

    def make() -> Call:
        mask, cells = None, arguments.get("attention_mask")
        if isinstance(cells, Tensor):
            cells = cells[:, :1, :, : k.shape[-2]].to(q.dtype)  # the first head's, added: booleans too
        elif cells is not None:
            mask, cells = flex_mask(cells, *q.shape[:2], compiled=True), None
        return read_call(
            q,
            k,
            v,
            cells=cells,
            bias=arguments.get("position_bias"),
            mask=mask,
            scale=arguments.get("scaling"),
            softcap=arguments.get("softcap"),
            sinks=None if sinks is None else sinks.reshape(-1),
        )

    # The lse inside is from before the sinks joined, and the one that is returned has lost digits.
    lse = kernel.lse if kernel is not None and sinks is None else None
    return observed("flex", "flex_attention", make, _first(out).transpose(1, 2), lse)


def read_flash(arguments: Arguments, out: Any, kernel: KernelResult | None) -> ObservedCall:
    """`flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, …)`.

    Its layout is (B, N, H, D); causal and window are lower-right.
    """
    q, k, v = (arguments[name].transpose(1, 2) for name in ("q", "k", "v"))
    output = _first(out).transpose(1, 2)
    if arguments.get("alibi_slopes") is not None:
        trouble = "alibi_slopes of flash_attn are not read yet"
        return ObservedCall(source="flash_attn", kernel="flash_attn_func", output=output, trouble=trouble)
    is_causal, (before, after) = bool(arguments.get("causal")), arguments.get("window_size", (-1, -1))
    mask: Mask | None = None  # -1 is no limit; causal hides what comes after, whatever the window says
    if before >= 0 or (after >= 0 and not is_causal):
        mask = window(before if before >= 0 else UNLIMITED, 0 if is_causal else after if after >= 0 else UNLIMITED)
    elif is_causal:
        mask = causal()
    make = partial(
        read_call,
        q,
        k,
        v,
        mask=mask,
        scale=arguments.get("softmax_scale"),
        softcap=arguments.get("softcap") or None,
        dropout=arguments.get("dropout_p", 0.0),
    )
    lse = out[1] if isinstance(out, tuple) else None
    return observed("flash_attn", "flash_attn_func", make, output, lse)


def reader_of_flash(name: str) -> Reader:
    """The reader for a function of flash_attn."""
    if name == "flash_attn_func":
        return read_flash
    why = "packed sequences are not taken apart yet" if "varlen" in name else "only flash_attn_func is read yet"
    return lambda arguments, out, kernel: ObservedCall(source="flash_attn", kernel=name, trouble=f"{name}: {why}")


def flex_lse(out: Any) -> Tensor | None:
    """The lse that FlexAttention returns when asked for it, or None."""
    lse = getattr(out[1], "lse", out[1]) if isinstance(out, tuple) else None
    return lse.detach() if isinstance(lse, Tensor) else None


def observed(
    source: Source, kernel: str, read: Callable[[], Call], output: Tensor | None, lse: Tensor | None
) -> ObservedCall:
    """A call, or why it cannot be read; an lse of another form than (B, H, Nq) is left out."""
    try:
        call = read()
    except Exception as problem:
        return ObservedCall(source=source, kernel=kernel, output=output, trouble=str(problem))
    if lse is not None and (lse.shape != call.sizes[:3] or lse.dtype not in (torch.float32, torch.float64)):
        lse = None
    if source in ("sdpa", "flash_attn"):
        lse = trusted_lse(lse, call)
    return ObservedCall(source=source, kernel=kernel, call=call, lse=lse, output=output)


def _first(out: Any) -> Tensor:
    """The output of a function that may return more."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first.detach()


# ------------------------------------------------------------------------------------------- recording under all names

_bound: list[tuple[Holder, str, Any, Any]] = []  # where, the name, what it was bound to, what it is bound to now
_recorders: dict[Function, Function] = {}  # recorder → what it records
_holding: set[str] = set()  # names of the Python modules in which a function was found
_searched: dict[str, tuple[int, ...] | None] = {}  # `_state` when every name was known, "free" and "bound"


@contextmanager
def names_left_alone() -> Iterator[None]:
    """Taps that this thread installs meanwhile bind no names, which is most of the time that installing takes.

    For a model that is known to call none of these functions.
    """
    before, HERE.binds = HERE.binds, False
    try:
        yield
    finally:
        HERE.binds = before


def bind(model: nn.Module) -> None:
    """Record FlexAttention and flash_attn under every name for them that is not recorded yet.

    Looking through every loaded module takes tens of milliseconds. It is done again only if the functions have got
    other references since; the model, its classes, their modules and __main__ are looked through each time.
    """
    if not HERE.binds:
        return
    now = "bound" if _bound else "free"
    state = _state()
    _record_names(model, _holding if state is not None and state == _searched.get(now) else None)
    _searched[now] = state
    _searched["bound"] = _state()


def _record_names(model: nn.Module, among: set[str] | None) -> None:
    readers = {id(function): reader for function, reader in _targets()}
    recorders = {original: recorder for recorder, original in _recorders.items()}
    for holder, where in _holders(model, among):
        for name, value in tuple(_entries(holder).items()):
            # By type, which runs no code of the module: some hold objects that warn when they are read.
            static = type(value) is staticmethod
            function = value.__func__ if static else value
            if type(function) is not FunctionType or function in _recorders:
                continue
            inner = function.__dict__.get("_torchdynamo_orig_callable", function)  # of torch.compile(flex_attention)
            reader = readers.get(id(inner))
            if reader is None or (where == HUGGING_FACE and inner.__name__ == "flex_attention"):
                continue  # Hugging Face compiles flex_attention and keeps that: it must be the real one
            recorder = recorders.get(function) or _recorder(function, inner, reader(function is not inner))
            recorders[function] = recorder
            ours = staticmethod(recorder) if static else recorder
            _bound.append((holder, name, value, ours))  # before, so that an interruption leaves nothing unknown
            _put(holder, name, ours)
            _holding.add(where)


def unbind() -> None:
    """Bind every name as it was, also names that were given to a recorder in the meantime, by an import perhaps."""
    while _bound:
        holder, name, before, ours = _bound[-1]
        if _entries(holder).get(name) is ours:
            _put(holder, name, before)
        _bound.pop()
        del ours
    spare = {(lambda: None): None}
    alone = [sys.getrefcount(function) for function in spare]  # of one that only a dict holds
    if any(count != alone[0] for count in [sys.getrefcount(recorder) for recorder in _recorders]):
        for holder, _ in _namespaces():
            for name, value in tuple(_entries(holder).items()):
                if type(value) is FunctionType and value in _recorders:
                    _put(holder, name, _recorders[value])
    _recorders.clear()
    _searched.pop("bound", None)


def _state() -> tuple[int, ...] | None:
    """Numbers that change when a function gets another name; None where Python does not count references exactly."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    return (len(sys.modules), *(n for function, _ in _targets() for n in (id(function), sys.getrefcount(function))))


def _targets() -> list[tuple[Function, Callable[[bool], Reader]]]:
    """The functions to record, each with what makes its reader: is it the compiled form?"""
    flex, theirs, flash = (vars(sys.modules[n]) if n in sys.modules else {} for n in (FLEX, HUGGING_FACE, "flash_attn"))
    readers: list[tuple[Any, Callable[[bool], Reader]]] = [
        (flex.get("flex_attention"), lambda compiled: partial(read_flex, compiled=compiled)),
        (theirs.get("compile_friendly_flex_attention"), lambda _: partial(read_flex, compiled=True)),
        (theirs.get("flex_attention_forward"), lambda _: read_hugging_face),
    ]
    named = {name: value for name, value in flash.items() if name.startswith("flash_attn_") and callable(value)}
    readers += [(value, partial(lambda name, _: reader_of_flash(name), name)) for name, value in named.items()]
    # Where they are already recorded, the recorder stands under the name.
    return [(_recorders.get(function, function), reader) for function, reader in readers if function is not None]


def _holders(model: nn.Module, among: set[str] | None) -> Iterator[tuple[Holder, str]]:
    """Where a name may be bound: modules of Python, Hugging Face's table, the model's classes and modules.

    among: names of the Python modules that come, besides those of the model's classes; None for all.
    """
    modules = list(model.modules())
    classes = {cls for module in modules for cls in type(module).__mro__ if cls is not object}
    if among is not None:
        among = among | {cls.__module__ for cls in classes} | {"__main__"}
    tables: dict[int, dict[str, Any]] = {}
    for names, where in _namespaces(among):
        yield names, where
        table = names.get("ALL_ATTENTION_FUNCTIONS")
        for attribute in ("_global_mapping", "_local_mapping"):
            mapping = getattr(table, attribute, None)
            if isinstance(mapping, dict):
                tables[id(mapping)] = mapping
    for mapping in tables.values():
        yield mapping, ""
    for cls in classes:
        yield cls, ""
    for module in modules:
        yield vars(module), ""


def _namespaces(among: set[str] | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """The names of every loaded module but our own, which call FlexAttention inside an operation that is reported."""
    for name in tuple(sys.modules) if among is None else among:
        module = sys.modules.get(name)
        if issubclass(type(module), ModuleType) and name.partition(".")[0] != "regard":
            yield vars(module), name


def _entries(holder: Holder) -> Any:
    return vars(holder) if isinstance(holder, type) else holder


def _put(holder: Holder, name: str, value: Any) -> None:
    if isinstance(holder, type):
        setattr(holder, name, value)
    else:
        holder[name] = value


def _recorder(original: Function, inner: Function, reader: Reader) -> Function:
    """A function that passes calls on to `original`; `inner` is what torch.compile made that from, or itself."""

    @wraps(original)
    def record(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not active():
            return original(*args, **kwargs)
        # 1. Who calls.
        tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        callers = find_callers(sys._getframe(1), tensor)
        if not callers or callers[0].inside_op:
            return original(*args, **kwargs)
        # 2. The call itself; kernels inside it leave their result in HERE.
        HERE.inside += 1
        HERE.kernel = None
        try:
            out = original(*args, **kwargs)
        finally:
            HERE.inside -= 1
        kernel, HERE.kernel = HERE.kernel, None
        # 3. Report it, perhaps with another output, or leave its result to the recorded function around it.
        if HERE.inside:
            HERE.kernel = KernelResult(inner.__name__, flex_lse(out))
            return out
        bound = signature(inner).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, parameter in signature(inner).parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name)
        editing = [(caller.watch.interceptor, caller) for caller in callers if caller.watch.interceptor is not None]
        if not editing:
            deliver(callers, lambda: reader(arguments, out, kernel))
            return out
        with measuring():
            observed = reader(arguments, out, kernel)
        for interceptor, caller in editing:
            observed, out = interceptor.on_function(caller, observed, arguments, out)
        deliver(callers, lambda: observed)
        return out

    # What torch.compile reads on its own wrappers: who compiles or traces a recorder gets the function itself, and
    # nothing of ours stays behind in what was compiled.
    vars(record).update(_torchdynamo_orig_callable=inner, _torchdynamo_wrapper_id=id(record), _torchdynamo_inline=inner)
    _recorders[record] = original
    return record
