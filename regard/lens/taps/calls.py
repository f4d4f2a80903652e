"""One caught attention call: q, k, v, mask, bias and lse as values, and which module of a watched model makes it.

The module is found by walking Python's frames: nothing is placed on the model, so nothing can be left on it. A call
belongs to a model only if one of its modules is on the stack, so other threads' and other models' calls do not count.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import CO_VARARGS
from math import inf
from traceback import format_tb
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack

import torch
from torch import Tensor, nn

from regard.backends.call import Call, CallOptions, prepare
from regard.lens.measures.weights import ComputedWeights
from regard.lens.visibility import dense_cells
from regard.masks import Causal, DenseMask, Mask, as_mask
from regard.masks.biases import DenseBias
from regard.masks.mask import four_axes, indices, part_of
from regard.nn.projections import ContextKeys
from regard.op import RowObserver, attention

if TYPE_CHECKING:
    from regard.lens.taps.interception import Interceptor

Source = Literal["sdpa", "softmax", "flex", "flash_attn", "regard"]
"""What was tapped: torch's fused kernels, a softmax by hand, FlexAttention, the flash_attn package, our operation."""

Kind = Literal["self", "cross"]
"""Do the queries look at their own sequence, or at another."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedCall:
    """One attention call of a watched model. Tensors are detached, and are the model's own memory: never write to them.

    Of a plain softmax, `scores` and `weights` are kept instead of `call`. Where the model changed the weights before
    they met the values (`edited`), `weights` are those applied: rows need not sum to 1, and some may be negative.
    """

    path: str = ""  # the module that made the call, as in named_modules(); "" is the model itself
    source: Source
    kernel: str  # what really ran, for example "_scaled_dot_product_flash_attention_for_cpu"
    kind: Kind = "self"
    call: Call | None = None  # as the kernel got it; a later step may overwrite its tensors (a cache of fixed size)
    lse: Tensor | None = None  # (B, H, Nq) in fp32 or fp64, −inf for a row that sees nothing; None if not to be trusted
    output: Tensor | None = None  # (B, H, Nq, Dv), or None if it cannot be told apart
    scores: Tensor | None = None  # (B, H, Nq, Nk), with a sink's column last; None if the model wrote over them
    weights: Tensor | None = None  # (B, H, Nq, Nk), without a sink's column; None if the model wrote over them
    marks: Tensor | None = None  # (B, Nk) a number per key by which it is known again in a later call
    edited: bool = False
    compiled: bool = False  # seen inside compiled code; `path` is then the module that was compiled
    order: int | None = None  # inside compiled code, which of the calls of one run of that code it is, from 0
    trouble: str | None = None  # why the call could not be read


@dataclass(frozen=True, eq=False)
class KernelResult:
    """The result of a kernel inside a larger call (FlexAttention, our operation), for the report of that call."""

    kernel: str
    lse: Tensor | None


class _Here(threading.local):
    """The state of this thread."""

    quiet: int = 0  # depth of `measuring`, and of kernels that are already being reported
    inside: int = 0  # depth of larger calls that are being recorded
    kernel: KernelResult | None = None  # result of the latest kernel inside a larger call
    trouble: str | None = None  # why the weights of the latest call that was edited cannot be shown
    binds: bool = True  # whether taps that it installs bind the names of functions
    held: list[tuple[Caller, ObservedCall]] | None = None  # softmaxes to be reported once their product is edited


HERE = _Here()


@contextmanager
def measuring() -> Iterator[None]:
    """Inside, taps of this thread report nothing, no graph is recorded, and autocast is off."""
    HERE.quiet += 1
    try:
        with torch.no_grad(), ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        HERE.quiet -= 1


LOWEST = -1e30  # an lse below: the dtype's smallest number was added to a whole row, and left no digit for the weights
HIDDEN = -1e4  # from here on, downwards, a number added to a whole row costs it digits; BERT hides by just this one
AT_ONCE = 1 << 22  # cells that are looked at in one piece


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cells: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    detach: bool = True,
    **options: Unpack[CallOptions],
) -> Call:
    """The call that a kernel computed, detached from the model unless detach is False.

    >>> q = torch.zeros(1, 2, 3, 5)
    >>> read_call(q, q, q, cells=torch.tensor([0.0, 0.0, -inf]).expand(3, 3)).mask
    dense(<3 booleans, 2 True>)

    q, k, v are (…, H, N, D) as `regard.attention` takes them; a batch axis that is 1 in one of them may differ. `cells`
    is what SDPA calls attn_mask: booleans (True = may look), or floats that are added, with −inf where hidden. `bias`
    is added and `mask` hides besides. Raises TypeError or ValueError where `regard.attention` would.
    """
    if detach:
        q, k, v = q.detach(), k.detach(), v.detach()
        cells, bias, sinks = (None if x is None else x.detach() for x in (cells, bias, options.get("sinks")))
        options["sinks"] = sinks
    if q.ndim == k.ndim == v.ndim:  # spread batch axes of size 1, as a product of matrices does
        lead = q.ndim - (3 if q.ndim >= 4 else 2)
        sizes = [max(t.shape[axis] for t in (q, k, v)) for axis in range(lead)]
        if all(t.shape[axis] in (1, n) for t in (q, k, v) for axis, n in enumerate(sizes)):
            q, k, v = (t.expand(*sizes, *t.shape[lead:]) for t in (q, k, v))
    visible, added = split_cells(cells)
    if bias is not None:
        added = bias if added is None else added + bias
    dense = as_mask(visible, (*q.shape[:-1], k.shape[-2]))
    if dense is not None:
        mask = dense if mask is None else mask & dense
    return prepare(q, k, v, mask=mask, bias=added, **options)


def detached(call: Call) -> Call:
    """The call with q, k, v and sinks detached from the model."""
    q, k, v = (x.detach() for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, sinks=None if call.sinks is None else call.sinks.detach())


def split_cells(cells: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """SDPA's mask taken apart: booleans (True = may look) and floats to add, each None where there is nothing to say.

    >>> [part.tolist() for part in split_cells(torch.tensor([[0.0, 2.0, -inf]]))]
    [[[True, True, False]], [[0.0, 2.0, 0.0]]]

    Only −inf hides. The dtype's smallest number is added like any other: a row that holds nothing else is uniform.
    """
    if cells is None:
        return None, None
    cells = dense_cells(cells)
    if cells.dtype == torch.bool:
        return cells, None
    visible = cells != -inf
    # One answer from the device for both questions: on a GPU each would be waited for.
    some_hidden, some_added = torch.stack([~visible.all(), ((cells != 0) & visible).any()]).tolist()
    added = cells if not some_hidden else torch.where(visible, cells, 0.0)
    return visible if some_hidden else None, added if some_added else None


def unpacked(
    callers: Sequence[Caller], q: Tensor, k: Tensor, cells: Tensor | None, output: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """q, mask, output and lse of a call of SDPA as (B, H, 1, …), if heads of one query stand in q as queries of a head.

    From 5.23 on, transformers gives SDPA a step of a generation as (B, Hkv, H / Hkv, D), so that the keys that heads
    share are not repeated. It is known by the module, which is given one position and says how many heads share keys.
    """
    packed = q.ndim == k.ndim == 4 and any(
        1 < q.shape[2] == getattr(caller.module, "num_key_value_groups", 1)
        and q.shape[1] == k.shape[1]
        and caller.input_shape[:2] == (q.shape[0], 1)
        for caller in callers
    )
    if not packed:
        return q, cells, output, lse
    if cells is not None:
        cells = dense_cells(four_axes(cells))
        if cells.shape[1:3].numel() > 1:  # not one mask for all heads
            cells = cells.expand(-1, *q.shape[1:3], -1).flatten(1, 2).unsqueeze(2)
    q, output = (x.flatten(1, 2).unsqueeze(2) for x in (q, output))
    return q, cells, output, None if lse is None else lse.flatten(1, 2).unsqueeze(2)


def trusted_lse(lse: Tensor | None, call: Call) -> Tensor | None:
    """A kernel's lse with −inf where a row sees nothing, which kernels mark as they please; None if it cannot be used.

    >>> q = torch.zeros(1, 1, 2, 3)
    >>> call = read_call(q, q, q, cells=torch.tensor([[True, False], [False, False]]))
    >>> trusted_lse(torch.zeros(1, 1, 2), call)
    tensor([[[0., -inf]]])
    """
    if lse is None or (call.mask is None and call.bias is None):
        return lse
    _, _, nq, nk = call.sizes
    if isinstance(call.mask, DenseMask):
        lse = torch.where(call.mask.cells.any(-1), lse, -inf)
    elif isinstance(call.mask, Causal) and not isinstance(call.mask.offset, Tensor):
        first = nk - nq if call.mask.offset is None else call.mask.offset
        lse = torch.where(torch.arange(first, first + nq, device=lse.device) >= 0, lse, -inf)
    elif call.mask is not None:
        return None
    if call.bias is not None and bool(((lse < LOWEST) & (lse > -inf)).any()):
        return None
    return lse


def raise_rows(call: Call) -> tuple[Call, Tensor | None]:
    """The same weights from scores of ordinary size, where every key of a row carries a large negative number.

    A softmax stays as it is when a row loses one number throughout. In e^(s − lse) such numbers leave no digits. Where
    a number was so large that it swallowed the scores, as the dtype's smallest does, the kernel never saw them: there
    q becomes 0, and the row is as even as it was in the kernel.

    Returns the call, and (B or 1, H or 1, Nq or 1) what was taken off, 0 in other rows; None where there are no such
    rows. With sinks nothing is done: a sink does not move with the row, and leaves nothing of it.
    """
    if not isinstance(call.bias, DenseBias) or call.sinks is not None or 0 in call.sizes:
        return call, None
    cells = call.bias.cells.detach()
    if not bool(cells.amin() <= HIDDEN):
        return call, None
    # 1. The largest number that is added to a visible score of each row, (B or 1, H or 1, Nq), or 1 where rows agree.
    (batch, heads, nq, nk), mask = call.sizes, call.mask
    see = None if mask is None else mask.bind(nq, nk, call.device, call.wide)
    count = 1 if mask is None and cells.shape[2] == 1 else nq
    i, j = (torch.arange(n, device=call.device) for n in (count, nk))
    pieces = []
    for part in torch.split(i, max(1, AT_ONCE // max(1, nk))):
        added = part_of(cells, slice(int(part[0]), int(part[-1]) + 1), slice(None)).to(call.wide)
        if mask is not None and see is not None:
            added = torch.where(see(*indices(*mask.leading, part, j, call.device)), added, -inf)
        pieces.append(added.amax(-1).expand(-1, -1, len(part)))
    most = torch.cat(pieces, -1)
    rows = (most <= HIDDEN) & (most > -inf)
    if not bool(rows.any()):
        return call, None
    taken = torch.where(rows, most, 0.0)
    # 2. The largest score of these rows before anything is added, whichever its sign; 0 in other rows.
    largest = torch.zeros(batch, heads, nq, dtype=call.wide, device=call.device)
    bare = ComputedWeights(replace(call, mask=None, bias=None), largest)
    chosen = rows.any(0).any(0).expand(nq).nonzero().view(-1)
    for part in torch.split(chosen, max(1, AT_ONCE // max(1, batch * heads * nk))):
        largest[:, :, part] = bare.scores(part, slice(None)).abs().amax(-1)
    # 3. A number x leaves x·eps/2 at most of what is added to it, half of that just above a power of two.
    swallowed = rows & (largest <= taken.abs() * (torch.finfo(call.wide).eps / 4))
    q = call.q.masked_fill(swallowed.unsqueeze(-1), 0.0)
    return replace(call, q=q, bias=DenseBias(cells.to(call.wide) - taken.unsqueeze(-1))), taken


# ----------------------------------------------------------------------------------------- which module makes a call

# Frames between a compiled module and the kernels it runs: those of these modules, and of generated code.
COMPILERS = ("torch._inductor", "torch._functorch._aot_autograd")
GENERATED = "<eval_with_key>"
ENTRY = ("torch._dynamo.eval_frame", "compile_wrapper")  # the function that every run of compiled code goes through
CALLS = "__regard_calls__"  # variable in the frame of one run of compiled code that counts its calls: gone with it

# Frames, by module and function, that are on the stack in a backward pass that runs the model's code.
BACKWARD = {
    ("torch.autograd.graph", "_engine_run_backward"),
    ("torch.autograd.function", "BackwardCFunction.apply"),  # in a thread of the engine there is no more than this
    ("torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.unpack_hook"),
}

# Arguments that hold another sequence to look at.
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
SOURCES = ("hidden_states", "x", "query", "inputs", "input", "tgt")  # arguments that hold the sequence that looks
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
    on_rows: RowObserver | None = None
    interceptor: Interceptor | None = None  # which may replace the outputs of its calls
    modules: dict[int, tuple[nn.Module, str]] = field(init=False)  # the module too: an id alone may be given anew
    codes: dict[int, CodeType] = field(init=False)  # of the modules' methods, by identity: hashing a code is slow
    errors: list[tuple[str, Exception]] = field(default_factory=list)
    unconfirmed: dict[tuple[str, tuple[int, ...]], bool] = field(default_factory=dict)  # did a product make its scores?
    chained: dict[tuple[str, tuple[int, ...]], None] = field(default_factory=dict)  # products used without a softmax
    storages: frozenset[int] = field(init=False)  # where the model's own numbers lie
    thread: int = field(default_factory=threading.get_ident)  # that it was entered in

    def __post_init__(self) -> None:
        self.modules = {id(module): (module, original_path(name)) for name, module in self.model.named_modules()}
        modules = [module for module, _ in self.modules.values()]
        kinds = {cls for module in modules for cls in type(module).__mro__}
        methods = [value for holder in (*kinds, *modules) for value in vars(holder).values()]
        self.codes = {}
        for value in methods:
            # By type, which runs no code of the model: its attributes may be anything.
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
    input_shape: tuple[int, ...]  # the shape of the module's first argument that is a tensor, if it has a batch axis
    calls: dict[WatchedModel, int] | None = None  # that this run of compiled code has made so far


WATCHES: list[WatchedModel] = []
"""What calls are reported to."""


def active() -> bool:
    """Whether a model is watched and this thread is not measuring."""
    return bool(WATCHES) and not HERE.quiet


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
        for watch in tuple(WATCHES):
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
    waiting, compiled, inside_op, entry = list(WATCHES), False, False, None
    while frame is not None and waiting:
        code = frame.f_code
        for watch in [w for w in waiting if id(code) in w.codes]:
            module, path = watch.modules.get(id(_first(frame)), (None, ""))
            if module is not None and not isinstance(module, through):
                waiting.remove(watch)
                scripted = isinstance(module, torch.jit.ScriptModule)
                kind, shape = _kind(frame, module, path), _first_shape(frame)
                calls = (entry or frame).f_locals.setdefault(CALLS, {}) if compiled or scripted else None
                yield Caller(watch, module, path, kind, calls is not None, inside_op, shape, calls)
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
    return any(at in watch.storages for at in _storage(x) for watch in tuple(WATCHES))


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


def runs_in(caller: Caller, frame: FrameType) -> bool:
    """Whether a frame runs one of the module's own methods."""
    return id(frame.f_code) in caller.watch.codes and _first(frame) is caller.module


def _first(frame: FrameType) -> object:
    """A method's first argument.

    To be read in few frames only: until Python 3.12 it makes a dict that keeps the frame's variables alive for longer.
    """
    return frame.f_locals.get(frame.f_code.co_varnames[0])


INTERCEPTORS: set[CodeType] = set()
"""Codes of functions that stand between a tap and the code that called it."""


def calling_frame() -> FrameType | None:
    """The frame that called the tap that calls this, without interceptors in between."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code in INTERCEPTORS:
        frame = frame.f_back
    return frame


def is_compiled(module: nn.Module) -> bool:
    """Whether a module went through torch.compile or its own compile()."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


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
            if HERE.held is not None and own.source == "softmax":
                HERE.held.append((caller, own))
            else:
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
