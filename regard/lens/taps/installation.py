"""Installing and removing the taps; taps on torch's fused kernels."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from threading import RLock, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.library import Library

from regard.backends import sdpa
from regard.backends.call import Call
from regard.checks import untraced
from regard.lens.taps import functions
from regard.lens.taps.calls import (
    HERE,
    WATCHES,
    Caller,
    KernelResult,
    ObservedCall,
    WatchedModel,
    deliver,
    detached,
    find_callers,
    is_compiled,
    read_call,
    unpacked,
    without_frames,
)
from regard.lens.taps.softmax import ProductTap, SoftmaxTap, drop_pending, forget_other_threads
from regard.masks import causal
from regard.masks.mask import four_axes
from regard.op import RowObserver, observe, observe_rows, unobserve, unobserve_rows

if TYPE_CHECKING:
    from regard.lens.taps.interception import Interceptor

MATH = "_scaled_dot_product_attention_math"
FLASH = "_scaled_dot_product_flash_attention"

# The unfused path is made of other operations, on which autograd acts one by one: it has to be covered above autograd
# too, where a call without inference mode arrives.
CPU_KERNELS = (("_scaled_dot_product_flash_attention_for_cpu", "CPU"), (MATH, "CPU"), (MATH, "AutogradCPU"))
CUDA_KERNELS = (
    (FLASH, "CUDA"),
    ("_scaled_dot_product_efficient_attention", "CUDA"),
    ("_scaled_dot_product_cudnn_attention", "CUDA"),
    (MATH, "CUDA"),
    (MATH, "AutogradCUDA"),
)
"""(operation, dispatch key) of what is covered."""


class FusedTap:
    """One covered kernel: called by torch's dispatcher in its place."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.kernel = torch.library.get_kernel(f"aten::{name}", key)
        self.arguments = getattr(torch.ops.aten, name).default._schema.arguments
        self.wants_lse = next((i for i, a in enumerate(self.arguments) if a.name == "compute_log_sumexp"), None)

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel; report the call if a watched module made it."""
        callers = find_callers(sys._getframe(1), args[0])
        if not callers:
            return self.kernel.call_boxed(keyset, *args, **kwargs)
        HERE.quiet += 1
        try:
            # Two CUDA kernels compute lse on request only. It is a by-product: the output does not depend on it.
            at = self.wants_lse
            asking = args if at is None else (*args[:at], True, *args[at + 1 :])
            out = self.kernel.call_boxed(keyset, *asking, **kwargs)
        finally:
            HERE.quiet -= 1
        if HERE.inside or callers[0].inside_op:
            HERE.kernel = KernelResult(self.name, self._lse(args, out))
        else:
            deliver(callers, lambda: self._observed(callers, args, kwargs, out))
        if at is None or args[at]:
            return out
        empty = None if "cudnn" in self.name else out[1].new_empty((*out[1].shape[:2], 0))
        return (out[0], empty, *out[2:])

    def _observed(self, callers: list[Caller], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> ObservedCall:
        arguments = {a.name: a.default_value for a in self.arguments if a.has_default_value()}
        arguments |= dict(zip((a.name for a in self.arguments), args, strict=False)) | kwargs
        q, k, v = (arguments[name] for name in ("query", "key", "value"))
        cells = arguments.get("attn_mask", arguments.get("attn_bias"))
        output, lse = four_axes(out[0].detach()), self._lse(args, out)
        # SDPA's is_causal is upper-left. CUDA's flash kernel is lower-right; SDPA gives it equal lengths only, where
        # both are one, and torch's lower-right bias gives it others.
        order = causal() if self.name == FLASH else causal(offset=0)
        q, cells, output, lse = unpacked(callers, q, k, cells, output, lse)
        mask = order if arguments["is_causal"] else None
        read = partial(
            read_call, q, k, v, cells=cells, mask=mask, scale=arguments["scale"], dropout=arguments["dropout_p"]
        )
        return functions.observed("sdpa", self.name, read, output, lse)

    def _lse(self, args: tuple[Any, ...], out: Any) -> Tensor | None:
        """The kernel's lse as (B, H, Nq), or None where its form is another than the known ones."""
        if self.name == MATH or not isinstance(out[1], Tensor) or args[0].ndim != 4:
            return None
        rows = args[0].shape[:3]
        lse = out[1].detach()
        if lse.ndim == 4 and lse.shape[3] == 1:
            lse = lse[..., 0]
        if lse.ndim == 3 and "efficient" in self.name:  # padded to a multiple of 32 queries
            lse = lse[..., : rows[2]]
        return lse if lse.shape == rows and lse.dtype in (torch.float32, torch.float64) else None


class Taps:
    """Report every attention call of a model, as a context manager.

    The fast path of `nn.TransformerEncoder` and `nn.MultiheadAttention` calls nothing that could be tapped, and is off
    meanwhile; their results are then equal up to rounding. Everything else computes the same bits as unwatched.

    Args:
        model: any `nn.Module`, also one that went through torch.compile. Nothing is placed on it.
        on_call: called with an `ObservedCall` after each attention call, in the thread that made it, under
            `measuring()`.
        on_rows: called after generations of regard's own models, see `regard.op.observe_rows`.
        interceptor: may replace the outputs of calls.

    Attributes:
        watch: what calls are reported to, while they are installed.
        errors: (path, exception) of what went wrong in reporting, which the model never sees.
    """

    watch: WatchedModel | None = None
    _finalizer: finalize[[WatchedModel], Taps] | None = None

    def __init__(
        self,
        model: nn.Module,
        on_call: Callable[[ObservedCall], None],
        on_rows: RowObserver | None = None,
        interceptor: Interceptor | None = None,
    ) -> None:
        self.errors: list[tuple[str, Exception]] = []
        self._unconfirmed: dict[tuple[str, tuple[int, ...]], bool] = {}
        self._chained: dict[tuple[str, tuple[int, ...]], None] = {}
        self._begin = partial(
            WatchedModel, model, on_call, on_rows, interceptor, self.errors, self._unconfirmed, self._chained
        )

    @property
    def unconfirmed(self) -> list[tuple[str, tuple[int, ...]]]:
        """(path, shape) of softmaxes that were never seen to meet values: routers, or attention of an odd form."""
        return list(self._unconfirmed)

    @property
    def suspected(self) -> list[tuple[str, tuple[int, ...]]]:
        """Those of them whose scores a product of matrices made, as attention's are."""
        return [at for at, by_product in self._unconfirmed.items() if by_product]

    @property
    def chained(self) -> list[tuple[str, tuple[int, ...]]]:
        """(path, shape) of products that met another product without a softmax in between."""
        return list(self._chained)

    def __enter__(self) -> Taps:
        if self.watch is not None:
            raise RuntimeError("these Taps are installed already; leave the block first, or make Taps(…) of their own")
        try:
            self.watch = self._begin()
            # An interruption at the first instruction of __exit__ comes before anything that could catch it.
            self._finalizer = finalize(self, _release, self.watch)
            with _LOCK:
                WATCHES.append(self.watch)
                _install(self.watch.model)
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.watch is None:
            raise RuntimeError("these Taps are not installed: enter them first, by `with Taps(…)`, and leave them once")
        self.close()

    def close(self) -> None:
        """Remove the taps, if they are installed; an interruption is raised only afterwards."""
        try:
            self._close()
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        with _LOCK:
            if self.watch is not None:
                _release(self.watch)
                if self._finalizer is not None:
                    self._finalizer.detach()
                self.watch = None


# ------------------------------------------------------------------------------------------------- install and remove

_LOCK = RLock()
_installed = False  # completely
_library: Library | None = None  # our kernels over torch's, while there are any
_fast_path: bool | None = None  # what PyTorch's switch was before, while it is ours
_warning_filter: warnings.catch_warnings[None] | None = None  # hides torch's warning, while it does
_warned = False  # did torch say that a kernel was covered?


def _release(watch: WatchedModel) -> None:
    """End a watch, and what is installed with the last one."""
    with _LOCK:
        if watch in WATCHES:
            WATCHES.remove(watch)
        drop_pending(watch)
        if not WATCHES:
            _remove()


def _install(model: nn.Module) -> None:
    global _installed, _fast_path
    if not _installed:
        _remove()  # what an interrupted attempt has left
        HERE.quiet, HERE.inside, HERE.kernel = 0, 0, None
        _fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        observe(_on_op)
        observe_rows(_on_rows)
        _cover()
        _installed = True
    # Inside a model compiled as a whole no function is called by name, and a name bound anew would compile it again.
    if not is_compiled(model):
        functions.bind(model)


def _remove() -> None:
    """Bring everything back to what it was, as far as it is not. Can be done again from any point."""
    global _installed, _library, _fast_path
    _installed = False
    functions.unbind()
    if _fast_path is not None:
        torch.backends.mha.set_fastpath_enabled(_fast_path)
        _fast_path = None
    with suppress(ValueError):  # where it does not observe
        unobserve(_on_op)
    unobserve_rows(_on_rows)
    if _library is not None:
        _library._destroy()  # type: ignore[no-untyped-call]
        _library = None
        for name, _ in (*CPU_KERNELS, *CUDA_KERNELS):
            # Code compiled meanwhile has made torch remember our kernels: code compiled later would get no gradients.
            operation = getattr(getattr(torch.ops.aten, name, None), "default", None)
            getattr(operation, "_dispatch_cache", {}).clear()
    _warn_again()


def _cover() -> None:
    """Lay taps over every kernel that this machine has."""
    global _library, _warning_filter, _warned
    cuda = torch.cuda.is_available()
    kernels = (*CPU_KERNELS, *(CUDA_KERNELS if cuda else ()))
    taps: list[tuple[FusedTap | SoftmaxTap | ProductTap, str]] = [(FusedTap(name, key), key) for name, key in kernels]
    for key in ("CPU", "CUDA") if cuda else ("CPU",):
        taps += [(SoftmaxTap(name, key), key) for name in ("_softmax", "_log_softmax")]
        taps += [(ProductTap(name, key), key) for name in ("bmm", "baddbmm", "mm")]
    _library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    if not _warned or torch.is_warn_always_enabled():
        # Torch warns once per process that a kernel was covered. The user's filters are touched that once, not again.
        _warning_filter = warnings.catch_warnings()
        _warning_filter.__enter__()
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
    for tap, key in taps:
        untraced("a tap only looks on")(type(tap).__call__)  # a function left alone may call a kernel
        _library.impl(tap.name, tap, key, with_keyset=True, allow_override=True)  # type: ignore
    _warned = True
    _warn_again()


def _warn_again() -> None:
    """Give the user's filters back, if they are not."""
    global _warning_filter
    if _warning_filter is not None:
        with suppress(RuntimeError, AttributeError):  # where it was interrupted before it had changed them
            _warning_filter.__exit__(None, None, None)
        _warning_filter = None


# ----------------------------------------------------------------------------------------------------------------- fork


def _after_fork_in_child() -> None:
    """The child has one thread: watches that others entered are over in it, and no lock that they held is."""
    global _LOCK
    _LOCK = RLock()
    if WATCHES:
        forget_other_threads()
        # Until Python 3.12 a cached_property has one lock for all objects, held while it computes, as measuring does.
        ours = [module for name, module in tuple(sys.modules.items()) if name.partition(".")[0] == "regard"]
        for holder in {value for module in ours for value in tuple(vars(module).values()) if isinstance(value, type)}:
            for value in vars(holder).values():
                if isinstance(value, cached_property) and hasattr(value, "lock"):
                    value.lock = RLock()
    WATCHES[:] = [watch for watch in WATCHES if watch.thread == get_ident()]
    if not WATCHES:
        _remove()


if hasattr(os, "register_at_fork"):
    # Nobody installs or removes while the process forks, so that the child finds all of it or nothing.
    os.register_at_fork(
        before=lambda: _LOCK.acquire(),
        after_in_parent=lambda: _LOCK.release(),
        after_in_child=_after_fork_in_child,
    )


# --------------------------------------------------------------------------------------------------- our own operation


def _on_op(call: Call, backend: str, output: Any) -> None:
    """Called by `regard.op` after each call."""
    inner, HERE.kernel = HERE.kernel, None
    trouble, HERE.trouble = HERE.trouble, None
    frame = sys._getframe(1).f_back  # beyond the operation itself
    callers = find_callers(frame, call.q)
    if callers and not HERE.inside:
        deliver(callers, lambda: _observed(call.in_torch(), backend, output, inner, trouble))


def _on_rows(rows: Sequence[Sequence[int]], passes: int) -> None:
    """Called by `regard.op` after a generation."""
    for watch in tuple(WATCHES):
        if watch.on_rows is not None:
            try:
                watch.on_rows(rows, passes)
            except Exception as problem:  # whatever is wrong with us, the model must run
                watch.errors.append(("", without_frames(problem)))


def _observed(call: Call, backend: str, output: Any, inner: KernelResult | None, trouble: str | None) -> ObservedCall:
    kernel, lse = backend, None
    if backend == "sdpa" and inner is not None:
        # With a dense mask the backend opens rows that see nothing: such an lse is not this call's.
        kernel, lse = inner.kernel, inner.lse if sdpa.plain(call) is not None else None
    output = torch.as_tensor(output).detach()
    return ObservedCall(source="regard", kernel=kernel, call=detached(call), lse=lse, output=output, trouble=trouble)
