"""Taps on attention that has no kernel of its own to cover: FlexAttention, Hugging Face's use of it, flash_attn.

FlexAttention is compiled into generated code, flash_attn is somebody's extension: both are met as Python functions. So
every name that is bound to one of them, in a loaded module, in the watched model's classes and in its modules, is bound
to a recorder, which passes each call on unchanged and reports it. Afterwards every name is bound as before.

What stands inside code that was compiled as a whole is called by no name, and cannot be seen.

This file does not know how a call is read, nor who is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import Parameter, signature
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from regard.lens.taps.callers import active, deliver, find
from regard.lens.taps.function_reading import Made, Reader, flex_lse, read_flex, read_hugging_face, reader_of_flash
from regard.lens.taps.sightings import HERE, Lent

__all__ = ["bind", "unbind"]

FLEX = "torch.nn.attention.flex_attention"
HUGGING_FACE = "transformers.integrations.flex_attention"

Holder = dict[str, Any] | type
Function = Callable[..., Any]

_bound: list[tuple[Holder, str, Any, Any]] = []  # where, the name, what it was bound to, what it is bound to now
_recorders: dict[Function, Function] = {}  # recorder → what it records


def bind(model: nn.Module) -> None:
    """Record FlexAttention and flash_attn under every name for them that is not recorded yet."""
    targets = _targets()
    recorders = {id(original): recorder for recorder, original in _recorders.items()}
    for holder, where in _holders(model):
        for name, value in tuple(_entries(holder).items()):
            # By type, which cannot run anybody's code: some modules hold objects that warn when they are looked at.
            static = type(value) is staticmethod
            function = value.__func__ if static else value
            if type(function) is not FunctionType or function in _recorders:
                continue
            inner = function.__dict__.get("_torchdynamo_orig_callable", function)  # of torch.compile(flex_attention)
            reader = targets.get(id(inner))
            if reader is None or (where == HUGGING_FACE and inner.__name__ == "flex_attention"):
                continue  # Hugging Face compiles flex_attention and keeps that: it must be the real one
            recorder = recorders.get(id(function)) or _recorder(function, inner, reader(function is not inner))
            recorders[id(function)] = recorder
            ours = staticmethod(recorder) if static else recorder
            _bound.append((holder, name, value, ours))  # before, so that an interruption leaves nothing unknown
            _put(holder, name, ours)


def unbind() -> None:
    """Bind every name as it was, also names that were given to a recorder in the meantime, by an import perhaps."""
    while _bound:
        holder, name, before, ours = _bound[-1]
        if _entries(holder).get(name) is ours:
            _put(holder, name, before)
        _bound.pop()
    if _recorders:
        for holder, _ in _namespaces():
            for name, value in tuple(_entries(holder).items()):
                if type(value) is FunctionType and value in _recorders:
                    _put(holder, name, _recorders[value])
        _recorders.clear()


# ------------------------------------------------------------------------------------------- what is looked for, where


def _targets() -> dict[int, Callable[[bool], Reader]]:
    """The functions to record, by identity, each with what makes its reader: is it the compiled form?"""
    flex, theirs, flash = (vars(sys.modules[n]) if n in sys.modules else {} for n in (FLEX, HUGGING_FACE, "flash_attn"))
    found: list[tuple[Any, Callable[[bool], Reader]]] = [
        (flex.get("flex_attention"), lambda compiled: partial(read_flex, compiled=compiled)),
        (theirs.get("compile_friendly_flex_attention"), lambda _: partial(read_flex, compiled=True)),
        (theirs.get("flex_attention_forward"), lambda _: read_hugging_face),
    ]
    named = {name: value for name, value in flash.items() if name.startswith("flash_attn_") and callable(value)}
    found += [(value, partial(_flash_reader, name)) for name, value in named.items()]
    # Where they are already recorded, the recorder stands under the name.
    return {id(_recorders.get(function, function)): reader for function, reader in found if function is not None}


def _flash_reader(name: str, compiled: bool) -> Reader:
    return reader_of_flash(name)


def _holders(model: nn.Module) -> Iterator[tuple[Holder, str]]:
    """Where a name may be bound: modules of Python, Hugging Face's table, the model's classes and modules."""
    tables: dict[int, dict[str, Any]] = {}
    for names, where in _namespaces():
        yield names, where
        table = names.get("ALL_ATTENTION_FUNCTIONS")
        for attribute in ("_global_mapping", "_local_mapping"):
            mapping = getattr(table, attribute, None)
            if isinstance(mapping, dict):
                tables[id(mapping)] = mapping
    modules = list(model.modules())
    for mapping in tables.values():
        yield mapping, ""
    for cls in {cls for module in modules for cls in type(module).__mro__ if cls is not object}:
        yield cls, ""
    for module in modules:
        yield vars(module), ""


def _namespaces() -> Iterator[tuple[dict[str, Any], str]]:
    """The names of every loaded module but our own, which call FlexAttention inside an operation that is reported."""
    for name, module in tuple(sys.modules.items()):
        if issubclass(type(module), ModuleType) and name.partition(".")[0] != "regard":
            yield vars(module), name


def _entries(holder: Holder) -> Any:
    return vars(holder) if isinstance(holder, type) else holder


def _put(holder: Holder, name: str, value: Any) -> None:
    if isinstance(holder, type):
        setattr(holder, name, value)
    else:
        holder[name] = value


# ------------------------------------------------------------------------------------------------------------ recording


def _recorder(original: Function, inner: Function, reader: Reader) -> Function:
    """A function that passes calls on to `original`; `inner` is what torch.compile made that from, or itself."""

    @wraps(original)
    def record(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not active():
            return original(*args, **kwargs)
        return _recorded(original, inner, reader, args, kwargs)

    # What torch.compile reads on its own wrappers: who compiles or traces a recorder gets the function itself, and
    # nothing of ours stays behind in what was compiled.
    vars(record).update(_torchdynamo_orig_callable=inner, _torchdynamo_wrapper_id=id(record), _torchdynamo_inline=inner)
    _recorders[record] = original
    return record


def _recorded(original: Function, inner: Function, reader: Reader, args: Any, kwargs: dict[str, Any]) -> Any:
    callers = find(sys._getframe(2), next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None))
    if not callers or callers[0].inside_op:
        return original(*args, **kwargs)
    HERE.inside += 1
    HERE.lent = None
    try:
        out = original(*args, **kwargs)
    finally:
        HERE.inside -= 1
    lent, HERE.lent = HERE.lent, None
    if HERE.inside:
        HERE.lent = Lent(inner.__name__, flex_lse(out))
    else:
        deliver(callers, lambda: reader(_made(inner, args, kwargs, out, lent)))
    return out


def _made(inner: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, lent: Lent | None) -> Made:
    """The arguments by name, defaults filled in."""
    bound = signature(inner).bind(*args, **kwargs)
    bound.apply_defaults()
    loose = [name for name, p in signature(inner).parameters.items() if p.kind is Parameter.VAR_KEYWORD]
    extra = {name: value for key in loose for name, value in bound.arguments[key].items()}
    return Made({name: v for name, v in bound.arguments.items() if name not in loose}, extra, out, lent)
