"""Which module of a watched model makes the current call, found by walking Python's frames.

Nothing is placed on the model, so nothing can be left on it. A call belongs to a model only if one of its modules is
on the stack, so another thread's or another model's calls do not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import CO_VARARGS
from threading import get_ident
from traceback import format_tb
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.lens.taps.calls import HERE, Kind, ObservedCall, measuring
from regard.nn.attention import ContextKeys
from regard.op import BeamObserver, attention

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
    """One watched model: its modules by identity, the callbacks, and errors of ours."""

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
        self.codes = {}
        for value in methods:
            # By type, which runs nobody's code: a model's attributes may be anything.
            if type(value) in (classmethod, staticmethod, MethodType):
                value = value.__func__
            while type(value) is FunctionType:
                if value.__code__.co_argcount:
                    self.codes[id(value.__code__)] = value.__code__
                value = getattr(value, "__wrapped__", None)
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
    calls: dict[WatchedModel, int] | None = None  # that this run of compiled code has made so far


_watches: tuple[WatchedModel, ...] = ()


def active() -> bool:
    """Whether a model is watched and this thread is not measuring."""
    return bool(_watches) and not HERE.quiet


def add_watch(watch: WatchedModel) -> None:
    """Start to report to a watch."""
    global _watches
    _watches = (*_watches, watch)


def remove_watch(watch: WatchedModel) -> None:
    """Stop to report to a watch."""
    global _watches
    _watches = tuple(w for w in _watches if w is not watch)


def active_watches() -> tuple[WatchedModel, ...]:
    """The watches that are reported to."""
    return _watches


def find_callers(frame: FrameType | None, x: object, through: type[nn.Module] | tuple[()] = ()) -> list[Caller]:
    """The innermost module of each watched model among a frame and its callers.

    Empty in a backward pass, where activation checkpointing runs the forward a second time, for stand-ins of tensors,
    and while a CUDA graph is captured. `x` is a tensor of the call. A module of the kind `through` is skipped for
    the one that it is a part of.
    """
    if not active() or _in_backward(frame) or _is_stand_in(x):
        return []
    try:
        callers = list(_walk(frame, through))
    except Exception as problem:  # whatever is wrong with us, the model must run
        for watch in _watches:
            watch.errors.append(("", without_frames(problem)))
        return []
    if callers and isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing():
        for caller in callers:
            caller.watch.errors.append((caller.path, RuntimeError(CAPTURED)))
        return []
    return callers


# torch has no public functions for these questions. A slower way is taken where a torch lacks the private one.


def _in_backward(frame: FrameType | None) -> bool:
    number = getattr(torch._C, "_current_graph_task_id", None)
    if number is not None:
        return bool(number() != -1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_qualname) in BACKWARD:
            return True
        frame = frame.f_back
    return False


def _is_stand_in(x: object) -> bool:
    """Whether a tensor belongs to a graph being traced, or wraps others that will come by here themselves."""
    if not isinstance(x, Tensor):
        return False
    keys = getattr(torch._C, "_dispatch_keys", None)
    if keys is not None:
        own_dispatch = bool(keys(x).has(torch._C.DispatchKey.Python))
    else:
        own_dispatch = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if own_dispatch:
        return True
    is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)  # by vmap, grad, …
    if is_wrapped is not None:
        return bool(is_wrapped(x))
    try:
        return x.untyped_storage().data_ptr() == 0 and x.numel() > 0
    except (NotImplementedError, RuntimeError):  # it has no memory of its own; nor has a sparse one
        return True


def _walk(frame: FrameType | None, through: type[nn.Module] | tuple[()]) -> Iterator[Caller]:
    waiting, compiled, inside_op, entry = list(_watches), False, False, None
    while frame is not None and waiting:
        code = frame.f_code
        for watch in [w for w in waiting if id(code) in w.codes]:
            module, path = watch.modules.get(id(_first(frame)), (None, ""))
            if module is not None and not isinstance(module, through):
                waiting.remove(watch)
                scripted = isinstance(module, torch.jit.ScriptModule)
                kind, given = _kind(frame, module, path), _first_shape(frame)
                calls = (entry or frame).f_locals.setdefault(CALLS, {}) if compiled or scripted else None
                yield Caller(watch, module, path, kind, calls is not None, inside_op, given, calls)
        inside_op = inside_op or code is _OP
        name = str(frame.f_globals.get("__name__", ""))
        if compiled and entry is None and (name, code.co_name) == ENTRY:
            entry = frame
        compiled = compiled or name.startswith(COMPILERS) or code.co_filename.startswith(GENERATED)
        frame = frame.f_back


def _first_shape(frame: FrameType) -> tuple[int, ...]:
    """The shape of a method's first tensor, (B, …) or (N, B, …); () if there is none, or none with a batch axis."""
    code, local = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    for name in code.co_varnames[1:count]:
        value = local.get(name)
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, Tensor):
                return tuple(x.shape) if x.ndim > (2 if x.is_floating_point() else 1) else ()
    return ()


def is_parameter(x: Tensor) -> bool:
    """Whether a tensor lies in a parameter or a buffer of a watched model."""
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
    """Whether a module is still among the callers of a frame."""
    while frame is not None:
        if runs_in(caller, frame):
            return True
        frame = frame.f_back
    return False


def runs_in(caller: Caller, frame: FrameType) -> bool:
    """Whether a frame runs one of the module's own methods."""
    return id(frame.f_code) in caller.watch.codes and _first(frame) is caller.module


def _first(frame: FrameType) -> object:
    """A method's first argument.

    To be read in few frames only: until Python 3.12 it makes a dict that keeps the frame's variables alive for longer.
    """
    return frame.f_locals.get(frame.f_code.co_varnames[0])


def original_path(name: str) -> str:
    """A module's path without the steps that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _kind(frame: FrameType, module: nn.Module, path: str) -> Kind:
    """Self- or cross-attention, by the caller's arguments, else by its name."""
    code, local = frame.f_code, frame.f_locals
    declared = local.get("is_cross_attention")
    if isinstance(declared, bool):
        return "cross" if declared else "self"
    if isinstance(module, nn.MultiheadAttention) and "query" in local:
        return "self" if local["query"] is local.get("key") else "cross"
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for context in (local.get(name) for name in CONTEXTS if name in arguments):
        if isinstance(context, (Tensor, ContextKeys)) and all(local.get(source) is not context for source in SOURCES):
            return "cross"
    for part in (*reversed(path.split(".")), type(module).__name__):
        if OWN.search(part):
            return "self"
        if CROSS.search(part):
            return "cross"
    return "self"


# ------------------------------------------------------------------------------------------------------------ delivery


def deliver(callers: list[Caller], make: Callable[[], ObservedCall]) -> None:
    """Make one observed call and pass it to every watch, each with its own path. Errors go to `errors`."""
    with measuring():
        orders: list[int | None] = []
        for caller in callers:  # in a run of compiled code, calls are numbered
            orders.append(None if caller.calls is None else caller.calls.get(caller.watch, 0))
            if caller.calls is not None:
                caller.calls[caller.watch] = caller.calls.get(caller.watch, 0) + 1
        observed = attempt(callers, make)
        if observed is None:
            return
        for caller, order in zip(callers, orders, strict=True):
            own = replace(observed, path=caller.path, kind=caller.kind, compiled=caller.compiled, order=order)
            attempt([caller], partial(caller.watch.on_call, own))


def attempt(callers: list[Caller], do: Callable[[], T]) -> T | None:
    """Run code of ours so that the model never sees its exceptions: they are kept in `errors`."""
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
