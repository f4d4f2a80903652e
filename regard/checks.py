"""Checks of arguments, and properties of tensors that can also be read under torch.compile and on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor


def check_int(name: str, value: object, least: int | None = 1) -> int:
    """An integer argument, of Python, NumPy or torch, as an int.

    Raises TypeError for anything else (a bool, too), ValueError below `least`.
    """
    try:
        number = value if isinstance(value, int) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r:.80}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


Number = int | Tensor
"""One integer for all, or a (B or 1, H or 1) tensor of them."""


def numbers(name: str, value: object) -> Tensor:
    """Copy numbers or booleans from a list, a NumPy array or a tensor into a tensor of our own.

    >>> numbers("lengths", np.array([3, 2, 1])[::-1]).tolist()
    [1, 2, 3]
    """
    if isinstance(value, Tensor):
        return value.detach().clone() if value.requires_grad else value.clone()
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str):
        raise TypeError(f"{name} must be a list, a NumPy array or a tensor, got {type(value).__name__}: {value!r}")
    try:
        array = np.array(value)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as problem:  # ragged lists, lists of tensors or of strings
        raise TypeError(f"{name} must hold numbers or booleans in a regular shape: {problem}") from None


def are_integers(values: Tensor) -> bool:
    """Whether the dtype is an integer one."""
    return not (values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool)


def number(name: str, value: object, least: int | None = None) -> Number:
    """Read an integer argument: one for all, one per batch row (B,), or one per row and head (B or 1, H or 1).

    >>> number("before", 3)
    3
    >>> number("offset", [0, 4]).shape
    torch.Size([2, 1])
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        result: Number = int(value)
    elif isinstance(value, (Sequence, np.ndarray, Tensor)) and not isinstance(value, str):
        result = numbers(name, value)
        if result.ndim not in (1, 2) or result.numel() == 0:
            raise ValueError(
                f"{name} must be one integer, one per batch row (B,), or one per row and head (B or 1, H or 1); "
                f"got shape {tuple(result.shape)}"
            )
        if not are_integers(result):
            raise TypeError(f"{name} must hold integers, got {result.dtype}")
        result = result.long().reshape(result.shape[0], -1)  # (B, 1) or (B, H)
    else:
        raise TypeError(f"{name} must be an integer or integers, got {type(value).__name__}: {value!r}")
    if least is not None and (result if isinstance(result, int) else int(result.min())) < least:
        shown = result if isinstance(result, int) else result.tolist()
        raise ValueError(f"{name} must be at least {least}, got {shown}")
    return result


def index_among(name: str, value: object, n: int, of: str) -> int:
    """An index into n things, counted from the end if negative; `name` and `of` are for messages.

    Raises TypeError if it is not an integer, IndexError if it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} takes an integer, got {type(value).__name__}: {value!r}")
    if not -n <= value < n:
        raise IndexError(f"{name} {value} is out of range: there are {n} {of}")
    return int(value) % n


def part_of_axis(name: str, value: object, n: int, of: str) -> slice | Tensor:
    """Some of n things: a slice without a step as a slice; other slices, ranges and integers as indices.

    Raises TypeError for anything else, IndexError if an index is out of range.
    """
    if isinstance(value, slice):
        start, stop, step = value.indices(n)
        return slice(start, max(start, stop)) if step == 1 else torch.arange(start, stop, step)
    if isinstance(value, (np.ndarray, Tensor)):
        value = value.tolist()
    if isinstance(value, (range, list, tuple)):
        return torch.tensor([index_among(name, v, n, of) for v in value], dtype=torch.long)
    raise TypeError(f"{name} must be a slice, a range or integers, got {type(value).__name__}: {value!r}")


def listed(names: Sequence[str]) -> str:
    """The first eight names, and how many more there are.

    >>> listed([f"layer.{n}.bias" for n in range(11)])[-37:]
    'layer.6.bias, layer.7.bias and 3 more'
    """
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(why: str) -> Callable[[Function], Function]:
    """Decorator: torch.compile runs the function, and all that it calls, uncompiled, between two graphs.

    What torch.compiler.disable does, without importing the compiler; `why` is shown to those who want one whole graph.
    """

    def mark(function: Function) -> Function:
        try:
            frames = torch._C._dynamo.eval_frame
            skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
            frames.set_code_exec_strategy(function.__code__, skip)
        except AttributeError:  # not in this release of torch: the public way, which imports the compiler
            public: Function = torch.compiler.disable(function, reason=why)  # type: ignore[no-untyped-call]
            return public
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why  # type: ignore[attr-defined]
        return function

    return mark


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor's values can be read: not on the meta device, of a fake tensor, or while a graph is traced."""
    return not (torch.compiler.is_compiling() or x.is_meta or type(x).__name__ == "FakeTensor")


def reading_waits(x: Tensor) -> bool:
    """Whether to read a tensor's values the host waits for a device."""
    return x.device.type != "cpu"


def being_captured(x: Tensor) -> bool:
    """Whether operations on a tensor go into a CUDA graph, during which the host may not synchronize."""
    return x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def may_read(x: Tensor, *, training: bool) -> bool:
    """Whether a check may read a tensor's values: where it has some, but not in a training step that would wait."""
    return has_numbers(x) and not (training and reading_waits(x)) and not being_captured(x)


def check_dense(name: str, x: Tensor, *, numbers: bool = True) -> None:
    """Raise TypeError for a tensor that is sparse or nested, or if `numbers` are needed, one on the meta device."""
    if x.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of layout {x.layout}; give a dense one, such as {name}.to_dense()")
    if x.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; give a padded one, such as {name}.to_padded_tensor(0.0), and a mask"
        )
    if numbers and x.is_meta:
        raise TypeError(f"{name} is on the meta device, where tensors have shapes and no numbers; give it on another")


def is_tracing() -> bool:
    """Whether operations are being traced, so that a tensor made now may be a fake one and must not be kept."""
    if torch.compiler.is_compiling():
        return True
    depth = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return depth is None or depth() > 0  # unknown counts as yes: then nothing is kept, which is slower but right


# In a release of torch without this every call counts as transformed: it is then slower, and right.
is_transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
"""Whether torch.func transforms are active: vmap has no single value to read."""


def is_distributed(x: Tensor) -> bool:
    """Whether x is a DTensor, of which this process may hold a part; torch.distributed need not be available."""
    return type(x) is not Tensor and hasattr(x, "to_local")  # to ask a plain tensor costs a microsecond


def local(x: Tensor) -> Tensor:
    """x itself, or this process's part of a DTensor."""
    return cast(Tensor, x.to_local()) if is_distributed(x) else x  # type: ignore[attr-defined]
