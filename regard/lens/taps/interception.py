"""Attention calls of a model above autograd, where their output can be replaced and gradients pass through it.

Taps report what a kernel has computed. An `Interceptor` stands above them: on SDPA itself, on the product that applies
the weights of a softmax written by hand, on FlexAttention, and on our own operation. It hands each call, connected to
the graph, to a function that may return another output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

from regard.backends.call import Call
from regard.checks import untraced
from regard.lens.assembly import RunTracker, key_marks
from regard.lens.taps.calls import (
    HERE,
    INTERCEPTORS,
    WATCHES,
    Caller,
    KernelResult,
    Kind,
    ObservedCall,
    Source,
    attempt,
    deliver,
    detached,
    find_callers,
    is_compiled,
    measuring,
    read_call,
    trusted_lse,
    unpacked,
)
from regard.lens.taps.installation import Taps
from regard.lens.taps.softmax import same_numbers
from regard.lens.visibility import read_weights, summarise_mask
from regard.masks import causal
from regard.masks.mask import four_axes
from regard.op import add_editor, remove_editor

__all__ = ["InterceptedCall", "Interceptor"]

SDPA = "scaled_dot_product_attention"
EDITED_WEIGHTS = "the model changes its weights after the softmax"
ORDER = "its weights meet the values in an order of axes that is not known here"
INFERENCE = "it ran under torch.inference_mode(), or through a function that cannot be intercepted; use torch.no_grad()"


@dataclass(eq=False)
class InterceptedCall:
    """One attention call with its output, before the model gets it. Tensors are connected to the graph.

    Of a softmax written by hand there are `weights`, `scores` and `values` instead of `call`.
    """

    path: str
    kind: Kind
    source: Source
    output: Tensor  # (B, H, Nq, Dv)
    call: Call | None = None
    number: int = -1  # in the order of first calls, as in a capture
    first_query: int = 0  # position in the sequence of query 0, and of key 0: more than 0 in a step of a generation
    first_key: int = 0
    weights: Tensor | None = None  # (B, H, Nq, Nk), without a sink's column
    scores: Tensor | None = None  # (B, H, Nq, Nk), with a sink's column last; detached
    values: Tensor | None = None  # (B, H, Nk, Dv)
    edited_weights: Tensor | None = None  # (B, H, Nq, Nk), set by an edit that changes them; detached
    trouble: str | None = None  # set by an edit whose weights `call` does not show: why

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, Nq, Nk."""
        if self.call is not None:
            return self.call.sizes
        assert self.weights is not None
        batch, heads, nq, nk = self.weights.shape
        return batch, heads, nq, nk


OnCall = Callable[[InterceptedCall], tuple[Call | None, Tensor] | None]
"""Returns the call as it is to be reported and the new output, or None to leave both as they are."""


class Interceptor:
    """Hand every attention call of a model to a function that may replace its output, as a context manager.

    Args:
        model: any nn.Module that is not compiled.
        on_call: called in the model's thread with each call; what it raises, the model raises.
        reads: it replaces nothing, and is to get what the others have made of a call.

    Attributes:
        names: module paths in the order of first calls, as in a capture.
        reasons: path → why its calls could not be intercepted; complete after the block.

    Raises:
        ValueError: the model, or a part of it, is compiled: what runs inside cannot be changed.
    """

    def __init__(self, model: nn.Module, on_call: OnCall, *, reads: bool = False) -> None:
        compiled = [name or type(module).__name__ for name, module in model.named_modules() if is_compiled(module)]
        if compiled:
            raise ValueError(
                f"{compiled[0]!r} is compiled, and calls inside compiled code cannot be changed; use the model before "
                "torch.compile (model._orig_mod)"
            )
        self.model, self.on_call, self.reads = model, on_call, reads
        self.names: list[str] = []
        self.reasons: dict[str, str] = {}
        self._reached: set[str] = set()
        self._runs, self._counts, self._queries = RunTracker(), dict[str, int](), dict[str, int]()
        self._lock = RLock()
        self._taps = Taps(model, self._observed, interceptor=self)

    def __enter__(self) -> Interceptor:
        self._taps.__enter__()
        try:
            _install()
        except BaseException:
            self._taps.close()
            _remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        self._taps.close()
        _remove()
        self._runs.close()
        for name in self.names:
            if name not in self._reached:
                self.reasons.setdefault(name, INFERENCE)
        for path, shape in self._taps.unconfirmed:
            if path not in self.names:
                self.reasons.setdefault(
                    path, f"its softmax of shape {shape} meets values in a way that is not known here"
                )

    def _observed(self, observed: ObservedCall) -> None:
        """Called with each call: notes their order."""
        with self._lock:
            if observed.path not in self.names:
                self.names.append(observed.path)

    def hand_over(self, intercepted: InterceptedCall, marks: Tensor | None) -> tuple[Call | None, Tensor] | None:
        """Number and place a call, and pass it to `on_call`."""
        path, call = intercepted.path, intercepted.call

        def offset() -> object:
            if call is None:
                return read_weights(intercepted.scores, intercepted.weights, kind=intercepted.kind).offset
            return summarise_mask(detached(call), intercepted.kind).offset

        with self._lock:
            if path not in self.names:
                self.names.append(path)
            self._reached.add(path)
            intercepted.number = self.names.index(path)
            n = self._counts[path] = self._counts.get(path, -1) + 1
            with torch.no_grad():
                link = self._runs.link(path, n, intercepted.sizes, intercepted.kind, marks, offset)
            before = self._queries.get(path, 0) if link.after is not None else 0
            intercepted.first_key = link.first
            intercepted.first_query = before if intercepted.kind == "cross" else link.first + link.known
            self._queries[path] = before + intercepted.sizes[2]
        HERE.quiet += 1  # what computes another output is ours, and is not reported
        try:
            return self.on_call(intercepted)
        finally:
            HERE.quiet -= 1

    def on_kernel(self, caller: Caller, source: Source, call: Call, output: Tensor) -> tuple[Call, Tensor] | None:
        """Hand over a call of SDPA, FlexAttention or our operation. None if it stays as it is."""
        intercepted = InterceptedCall(caller.path, caller.kind, source, output, call)
        changed = self.hand_over(intercepted, key_marks(call.k, call.sizes[1]))
        HERE.trouble = HERE.trouble or intercepted.trouble
        return None if changed is None else (changed[0] or call, changed[1])

    def on_product(
        self, observed: ObservedCall, left: Tensor, right: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor | None] | None:
        """Hand over a product of weights with values; its new output (B, H, Nq, Dv), and weights if they change.

        None if it stays as it is.
        """
        weights, path = observed.weights, observed.path
        if observed.edited or weights is None:
            self.reasons[path] = EDITED_WEIGHTS
            return None
        batch, heads, nq, nk = weights.shape
        if left.shape[-2:] != (nq, nk) or left.numel() != weights.numel():
            self.reasons[path] = ORDER
            return None
        applied = left.reshape(batch, heads, nq, nk)
        with torch.no_grad():
            same = same_numbers(applied, weights)
        if not same:
            self.reasons[path] = f"{ORDER}, or it has dropout (model.eval() turns it off)"
            return None
        intercepted = InterceptedCall(
            path, observed.kind, "softmax", out.view(batch, heads, nq, -1),
            weights=applied, scores=observed.scores, values=right.reshape(batch, heads, nk, -1),
        )  # fmt: skip
        changed = self.hand_over(intercepted, observed.marks)
        return None if changed is None else (changed[1], intercepted.edited_weights)

    def on_function(
        self, caller: Caller, observed: ObservedCall, arguments: dict[str, Any], out: Any
    ) -> tuple[ObservedCall, Any]:
        """Hand over a call of FlexAttention or flash_attn before it is reported; the call and the result that stand."""
        if observed.call is None or observed.output is None:
            self.reasons[caller.path] = observed.trouble or "the call could not be read"
            return observed, out
        if observed.source != "flex":
            self.reasons[caller.path] = f"calls of {observed.source} are read, but cannot be changed yet"
            return observed, out
        first = out[0] if isinstance(out, tuple) else out
        turned = (
            "attention_mask" in arguments and "scaling" in arguments
        )  # Hugging Face's function returns (B, N, H, D)
        output = first.transpose(1, 2) if turned else first
        q, k, v = (four_axes(arguments[name]) for name in ("query", "key", "value"))
        call = replace(observed.call, q=q, k=k, v=v)
        changed = self.on_kernel(caller, "flex", call, output)
        if changed is None:
            return observed, out
        call, output = changed
        new = output.transpose(1, 2) if turned else output
        whole = (new, *out[1:]) if isinstance(out, tuple) else new
        trouble, HERE.trouble = HERE.trouble, None
        return replace(observed, call=detached(call), lse=None, output=output.detach(), trouble=trouble), whole


# -------------------------------------------------------------------------------------------------------- installation

_LOCK = RLock()
_library: Library | None = None


def _install() -> None:
    global _library
    with _LOCK:
        if _library is not None:
            return
        devices = ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)
        autograd = [f"Autograd{device}" for device in devices]
        overrides: list[tuple[str, str, SdpaInterception | ProductInterception]] = [
            *((SDPA, key, SdpaInterception(key)) for key in (*devices, *autograd)),
            *((name, key, ProductInterception(name, key)) for key in autograd for name in ("bmm", "mm")),
        ]
        _library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, key, override in overrides:
            untraced("only calls of a model that is edited are changed")(type(override).__call__)
            _library.impl(name, override, key, with_keyset=True, allow_override=True)  # type: ignore
        add_editor(_edit_operation)


def _remove() -> None:
    """Remove what is installed, if nothing is intercepted any more."""
    global _library
    with _LOCK:
        if _library is not None and all(watch.interceptor is None for watch in tuple(WATCHES)):
            remove_editor(_edit_operation)
            _library._destroy()  # type: ignore[no-untyped-call]
            _library = None


def _intercepting(callers: list[Caller]) -> list[tuple[Interceptor, Caller]]:
    """The interceptors of a call; those that only read come last."""
    interceptors = [(caller.watch.interceptor, caller) for caller in callers if caller.watch.interceptor is not None]
    return sorted(interceptors, key=lambda one: one[0].reads)


class SdpaInterception:
    """Stands in the place of `aten::scaled_dot_product_attention`, above autograd and in inference mode."""

    def __init__(self, key: str) -> None:
        self.kernel = torch.library.get_kernel(f"aten::{SDPA}", key)

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the call, let the interceptors replace its output, and report the result."""
        callers = [] if HERE.inside else find_callers(sys._getframe(1), args[0])
        editing = [] if not callers or callers[0].inside_op else _intercepting(callers)
        if not editing:
            plain: Tensor = self.kernel.call_boxed(keyset, *args, **kwargs)
            return plain
        # 1. The call itself; its kernel leaves name and lse in HERE instead of reporting them.
        HERE.inside += 1
        HERE.kernel = None
        try:
            out: Tensor = self.kernel.call_boxed(keyset, *args, **kwargs)
        finally:
            HERE.inside -= 1
        kernel, HERE.kernel = HERE.kernel or KernelResult(SDPA, None), None
        # 2. As a call of ours.
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = (arguments[name] for name in names[:3])
        q, cells, output, lse = unpacked(callers, q, k, arguments.get("attn_mask"), four_axes(out), kernel.lse)
        call = read_call(
            q, k, v, cells=cells, mask=causal(offset=0) if arguments.get("is_causal") else None, detach=False,
            scale=arguments.get("scale"), dropout=arguments.get("dropout_p", 0.0),
        )  # fmt: skip
        lse = None if lse is None else trusted_lse(lse, detached(call))
        # 3. Replace and report.
        for interceptor, caller in editing:
            changed = interceptor.on_kernel(caller, "sdpa", call, output)
            if changed is not None:
                (call, output), lse = changed, None
        reported = ObservedCall(
            source="sdpa", kernel=kernel.kernel, call=detached(call), lse=lse, output=output.detach(),
            trouble=HERE.trouble,
        )  # fmt: skip
        HERE.trouble = None
        deliver(callers, lambda: reported)
        result: Tensor = output.reshape(out.shape)
        return result


class ProductInterception:
    """Stands in the place of `aten::bmm` or `mm` above autograd: where weights made by hand meet their values."""

    def __init__(self, name: str, key: str) -> None:
        self.kernel = torch.library.get_kernel(f"aten::{name}", key)

    def __call__(self, keyset: Any, left: Tensor, right: Tensor) -> Tensor:
        """Run the product; where the taps find weights in it, let the interceptors replace it. Report the result."""
        held: list[tuple[Caller, ObservedCall]] = []
        HERE.held = held
        try:
            out: Tensor = self.kernel.call_boxed(keyset, left, right)
        finally:
            HERE.held = None
        editing = [(caller.watch.interceptor, own) for caller, own in held if caller.watch.interceptor is not None]
        edited = False
        for interceptor, observed in editing:
            changed = None if interceptor.reads else interceptor.on_product(observed, left, right, out)
            if changed is None:
                continue
            if edited:  # the weights that it went by are those before the other
                raise ValueError(
                    f"two blocks inside each other edit the softmax written by hand in {observed.path!r}: give all "
                    "edits to one block, by edit(model, first, second)"
                )
            new, weights = changed
            out, edited = new.reshape(out.shape), True
            held = [(caller, _edited(own, new.detach(), weights)) for caller, own in held]
        with measuring():
            for caller, own in held:
                attempt([caller], partial(caller.watch.on_call, own))
        for interceptor, observed in editing:
            if interceptor.reads and (read := interceptor.on_product(observed, left, right, out)) is not None:
                out = read[0].reshape(out.shape)
        return out


def _edited(observed: ObservedCall, output: Tensor, weights: Tensor | None) -> ObservedCall:
    """A softmax by hand as it is after edits: with their output, and with their weights if they changed them."""
    new = replace(observed, output=None if observed.output is None else output)
    return new if weights is None else replace(new, weights=weights, scores=None, edited=True)


INTERCEPTORS.update((SdpaInterception.__call__.__code__, ProductInterception.__call__.__code__))


def _edit_operation(call: Call, output: Any) -> tuple[Call, Any]:
    """Called by `regard.op` after each call, before the observers."""
    frame = sys._getframe(1).f_back  # beyond the operation itself
    callers = find_callers(frame, call.q)
    for interceptor, caller in [] if call.numpy or HERE.inside else _intercepting(callers):
        changed = interceptor.on_kernel(caller, "regard", call, output)
        if changed is not None:
            call, output = changed
            if HERE.kernel is not None:  # its lse is that of the call before
                HERE.kernel = replace(HERE.kernel, lse=None)
    return call, output
