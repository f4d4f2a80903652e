"""Which module of a watched model is making the call that we are inside of: found by walking Python's own frames.

Nothing is placed on the model, so nothing can be left on it. A call belongs to a model only if one of its modules is
really on the stack: another thread's call, or another model's, is not ours.

This file does not know what was called, nor how the call was caught.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import CO_VARARGS
from threading import get_ident
from traceback import format_tb
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.lens.taps.calls import HERE, Kind, ObservedCall, measuring
from regard.nn.attention import ContextKeys
from regard.op import BeamObserver, attention

__all__ = [
    "Caller",
    "WatchedModel",
    "active",
    "active_watches",
    "add_watch",
    "attempt",
    "deliver",
    "find_callers",
    "is_parameter",
    "original_path",
    "remove_watch",
    "running",
    "runs_in",
    "without_frames",
]

COMPILERS = ("torch._inductor", "torch._functorch._aot_autograd")
GENERATED = "<eval_with_key>"
"""Whose frames stand between a compiled module and the kernels it runs: these modules', and generated code's."""

ENTRY = ("torch._dynamo.eval_frame", "compile_wrapper")
"""The module and the function of torch that every run of compiled code goes through."""

CALLS = "__regard_calls__"
"""The variable, in the frame of one run of compiled code, that counts its calls: it is gone with the frame."""

BACKWARD = {
    ("torch.autograd.graph", "_engine_run_backward"),
    ("torch.autograd.function", "BackwardCFunction.apply"),  # in a thread of the engine there is no more than this
    ("torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.unpack_hook"),
}
"""Whose frames, by module and function, are on the stack in a backward pass that runs the model's code."""

CONTEXTS = (
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "image_hidden_states",
    "kv_hidden_states",
    "kv_states",
    "context",
    "memory",
)
"""Arguments that hold another sequence to look at."""

SOURCES = ("hidden_states", "x", "query", "inputs", "input", "tgt")
"""Arguments that hold the sequence that looks."""

CAPTURED = "a CUDA graph was being captured, in which nothing can be measured; watch the model without CUDA graphs"

CROSS = re.compile(r"cross.*att|^(?-i:cross)$|^x_?att|enc_?dec_?att|encoder_att|enc_att|src_att", re.IGNORECASE)
OWN = re.compile(r"self_?att", re.IGNORECASE)

_OP = attention.__code__
T = TypeVar("T")


@dataclass(eq=False)
class WatchedModel:
    """One watched model: its modules by identity, whom to tell, and what went wrong in telling."""

    model: nn.Module
    on_call: Callable[[ObservedCall], None]
    on_beams: BeamObserver | None = None
    modules: dict[int, tuple[nn.Module, str]] = field(init=False)  # the module too: an id alone may be given anew
    codes: dict[int, CodeType] = field(init=False)  # of the modules' methods, by identity: hashing a code is slow
    errors: list[tuple[str, Exception]] = field(default_factory=list)
    unconfirmed: dict[tuple[str, tuple[int, ...]], bool] = field(default_factory=dict)  # did a product make its scores?
    chained: dict[tuple[str, tuple[int, ...]], None] = field(default_factory=dict)  # products used without a softmax
    storages: frozenset[int] = field(init=False)  # where the model's own numbers lie
    thread: int = field(default_factory=get_ident)  # that it was entered in

    def __post_init__(self) -> None:
        self.modules = {id(module): (module, original_path(name)) for name, module in self.model.named_modules()}
        modules = [module for module, _ in self.modules.values()]
        kinds = {cls for module in modules for cls in type(module).__mro__}
        methods = [value for holder in (*kinds, *modules) for value in vars(holder).values()]
        self.codes = {id(code): code for value in methods for code in _codes(value)}
        own = (x for module in modules for x in (*module._parameters.values(), *module._buffers.values()))
        self.storages = frozenset(at for x in own if x is not None for at in _storage(x))


@dataclass(frozen=True, eq=False)
class Caller:
    """A module that makes a call, and the watch it belongs to."""

    watch: WatchedModel
    module: nn.Module
    path: str
    kind: Kind
    compiled: bool
    inside_op: bool  # does our own operation stand between the module and the call?
    given: tuple[int, ...]  # the shape of the module's first argument that is a tensor, if it has a batch axis
    calls: dict[WatchedModel, int] | None = (
        None  # that this run of compiled code has made so far, by whom they are told to
    )


_watches: tuple[WatchedModel, ...] = ()


def active() -> bool:
    """Is anybody watching, and is this thread not measuring just now?"""
    return bool(_watches) and not HERE.quiet


def add_watch(watch: WatchedModel) -> None:
    """Let a watch be told from now on."""
    global _watches
    _watches = (*_watches, watch)


def remove_watch(watch: WatchedModel) -> None:
    """Tell a watch no more."""
    global _watches
    _watches = tuple(w for w in _watches if w is not watch)


def active_watches() -> tuple[WatchedModel, ...]:
    """Those that are told."""
    return _watches


# ------------------------------------------------------------------------------------------------------------- finding


def find_callers(frame: FrameType | None, x: object, through: type[nn.Module] | tuple[()] = ()) -> list[Caller]:
    """The innermost module of each watched model among a frame and its callers; empty where there is none to tell.

    frame: where the call was made.  x: a tensor of the call.
    through: a kind of module to pass by, in favour of the one that it is a part of.

    Nothing is told of a backward pass, where activation checkpointing runs the forward a second time, nor of stand-ins
    for tensors, nor while a CUDA graph is captured.
    """
    if not active() or _in_backward(frame) or _is_stand_in(x):
        return []
    try:
        callers = list(_found(frame, _watches, through))
    except Exception as problem:  # whatever is wrong with us, the model must run
        for watch in _watches:
            watch.errors.append(("", without_frames(problem)))
        return []
    if callers and isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing():
        for caller in callers:
            caller.watch.errors.append((caller.path, RuntimeError(CAPTURED)))
        return []
    return callers


# Three questions that torch has no public answer to. Each has a slower one, where a torch does not have the function.


def _in_backward(frame: FrameType | None) -> bool:
    """Does this thread run a backward pass?"""
    number = getattr(torch._C, "_current_graph_task_id", None)
    if number is not None:
        return bool(number() != -1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_qualname) in BACKWARD:
            return True
        frame = frame.f_back
    return False


def _is_stand_in(x: object) -> bool:
    """Does a tensor belong to a graph being traced, or wrap others that will come by here themselves?"""
    if not isinstance(x, Tensor):
        return False
    return _has_own_dispatch(x) or _is_wrapped(x)


def _has_own_dispatch(x: Tensor) -> bool:
    keys = getattr(torch._C, "_dispatch_keys", None)
    if keys is not None:
        return bool(keys(x).has(torch._C.DispatchKey.Python))
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_wrapped(x: Tensor) -> bool:
    """Is it a stand-in of vmap, grad or another transform of torch.func?"""
    asked = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
    if asked is not None:
        return bool(asked(x))
    try:
        return x.untyped_storage().data_ptr() == 0 and x.numel() > 0
    except (NotImplementedError, RuntimeError):  # it has no memory of its own; nor has a sparse one
        return True


def _found(
    frame: FrameType | None, watches: tuple[WatchedModel, ...], through: type[nn.Module] | tuple[()]
) -> Iterator[Caller]:
    waiting, compiled, inside_op, entry = list(watches), False, False, None
    while frame is not None and waiting:
        code = frame.f_code
        for watch in [w for w in waiting if id(code) in w.codes]:
            module, path = watch.modules.get(id(_first(frame)), (None, ""))
            if module is not None and not isinstance(module, through):
                waiting.remove(watch)
                scripted = isinstance(module, torch.jit.ScriptModule)
                kind, given = _kind(frame, module, path), _given(frame)
                calls = (entry or frame).f_locals.setdefault(CALLS, {}) if compiled or scripted else None
                yield Caller(watch, module, path, kind, calls is not None, inside_op, given, calls)
        inside_op = inside_op or code is _OP
        name = str(frame.f_globals.get("__name__", ""))
        if compiled and entry is None and (name, code.co_name) == ENTRY:
            entry = frame
        compiled = compiled or name.startswith(COMPILERS) or code.co_filename.startswith(GENERATED)
        frame = frame.f_back


def _given(frame: FrameType) -> tuple[int, ...]:
    """The shape of a method's first tensor, (B, …) or (N, B, …); () where there is none, or none of several rows."""
    code, local = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    for name in code.co_varnames[1:count]:
        value = local.get(name)
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, Tensor):
                return tuple(x.shape) if x.ndim > (2 if x.is_floating_point() else 1) else ()
    return ()


def is_parameter(x: Tensor) -> bool:
    """Does a tensor lie in a parameter or a buffer of a watched model?"""
    return any(at in watch.storages for at in _storage(x) for watch in _watches)


def _storage(x: Tensor) -> Iterator[int]:
    """Where a tensor's numbers lie; nothing for one that has none yet, or another kind of memory."""
    if _is_stand_in(x):
        return
    try:
        at = x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):
        return
    if at:
        yield at


def running(caller: Caller, frame: FrameType | None) -> bool:
    """Is a module still among the callers of a frame?"""
    while frame is not None:
        if runs_in(caller, frame):
            return True
        frame = frame.f_back
    return False


def runs_in(caller: Caller, frame: FrameType) -> bool:
    """Is a frame one of a module's own methods?"""
    return id(frame.f_code) in caller.watch.codes and _first(frame) is caller.module


def _first(frame: FrameType) -> object:
    """A method's first argument.

    To be read in few frames only: until Python 3.12 it makes a dict that keeps the frame's variables alive for longer.
    """
    return frame.f_locals.get(frame.f_code.co_varnames[0])


def original_path(name: str) -> str:
    """A module's path without the steps that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _codes(value: object) -> Iterator[CodeType]:
    """The code of a method, and of what it wraps."""
    # By type, which runs nobody's code: a model's attributes may be anything.
    if type(value) in (classmethod, staticmethod, MethodType):
        value = value.__func__  # type: ignore[attr-defined]
    while type(value) is FunctionType:
        if value.__code__.co_argcount:
            yield value.__code__
        value = getattr(value, "__wrapped__", None)


# -------------------------------------------------------------------------------------------------------- self or cross


def _kind(frame: FrameType, module: nn.Module, path: str) -> Kind:
    code, local = frame.f_code, frame.f_locals
    said = local.get("is_cross_attention")
    if isinstance(said, bool):
        return "cross" if said else "self"
    if isinstance(module, nn.MultiheadAttention) and "query" in local:
        return "self" if local["query"] is local.get("key") else "cross"
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if any(_looks_away(local, name) for name in CONTEXTS if name in arguments):
        return "cross"
    return _kind_by_name(path, type(module).__name__)


def _looks_away(local: Mapping[str, Any], name: str) -> bool:
    context = local.get(name)
    return isinstance(context, (Tensor, ContextKeys)) and all(local.get(source) is not context for source in SOURCES)


def _kind_by_name(path: str, kind: str) -> Kind:
    for part in (*reversed(path.split(".")), kind):
        if OWN.search(part):
            return "self"
        if CROSS.search(part):
            return "cross"
    return "self"


# ------------------------------------------------------------------------------------------------------------- telling


def deliver(callers: list[Caller], make: Callable[[], ObservedCall]) -> None:
    """Make one observed and tell every watch, each with its own path. What fails is kept in `errors`, never raised."""
    with measuring():
        orders = [_count(caller) for caller in callers]
        seen = attempt(callers, make)
        if seen is None:
            return
        for caller, order in zip(callers, orders, strict=True):
            told = replace(seen, path=caller.path, kind=caller.kind, compiled=caller.compiled, order=order)
            attempt([caller], partial(caller.watch.on_call, told))


def _count(caller: Caller) -> int | None:
    """Which of the calls of a run of compiled code this is; None elsewhere."""
    if caller.calls is None:
        return None
    order = caller.calls.get(caller.watch, 0)
    caller.calls[caller.watch] = order + 1
    return order


def attempt(callers: list[Caller], do: Callable[[], T]) -> T | None:
    """Do something of ours. Whatever is wrong with it, the model must run: what it raises is kept in `errors`."""
    try:
        return do()
    except Exception as problem:
        for caller in callers:
            caller.watch.errors.append((caller.path, without_frames(problem)))
        return None


def without_frames(problem: Exception) -> Exception:
    """An exception with its traceback as a note: the frames themselves would keep the call's tensors alive."""
    if problem.__traceback__ is not None:
        problem.add_note("".join(format_tb(problem.__traceback__)))
    problem.__context__ = problem.__cause__ = None
    return problem.with_traceback(None)
