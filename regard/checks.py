"""Argument checks, and questions about tensors that also hold under torch.compile and on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, TypeVar, cast

import torch
from torch import Tensor


def check_int(name: str, value: object, least: int | None = 1) -> int:
    """Return an integer argument, of Python, NumPy or torch, as an int.

    >>> check_int("features", 3.5)
    Traceback (most recent call last):
    TypeError: features must be an integer, got float: 3.5

    Args:
        name: what the message calls the value.
        value: the argument.
        least: the smallest value allowed; None for any.

    Raises:
        TypeError: the value is not an integer (True is not).
        ValueError: it is below `least`.
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


Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(why: str) -> Callable[[Function], Function]:
    """Mark a function: torch.compile runs it, and all that it calls, as it is, between two graphs.

    >>> @untraced("it asks for numbers")
    ... def total(x):
    ...     return int(x.sum())
    >>> total(torch.ones(3))
    3

    why: said to those who asked for one whole graph. It is what torch.compiler.disable does.
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
    """Can the numbers of a tensor be asked for? Not of one on the meta device, a fake one, or while a graph is traced.

    >>> has_numbers(torch.zeros(3)), has_numbers(torch.zeros(3, device="meta"))
    (True, False)
    """
    return not (torch.compiler.is_compiling() or x.is_meta or type(x).__name__ == "FakeTensor")


def check_dense(name: str, x: Tensor, *, numbers: bool = True) -> None:
    """Raise TypeError for a tensor that is sparse, nested or of another layout, or that has no numbers.

    >>> check_dense("q", torch.eye(2).to_sparse())
    Traceback (most recent call last):
        ...
    TypeError: q is a tensor of layout torch.sparse_coo; give a dense one, such as q.to_dense()

    numbers: are they needed? On the meta device there are none.
    """
    if x.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of layout {x.layout}; give a dense one, such as {name}.to_dense()")
    if x.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; give a padded one, such as {name}.to_padded_tensor(0.0), and a mask"
        )
    if numbers and x.is_meta:
        raise TypeError(f"{name} is on the meta device, where tensors have shapes and no numbers; give it on another")


def followed() -> bool:
    """Does somebody follow every operation, so that what is made now may be no common tensor and must not be kept?

    >>> followed()
    False
    """
    if torch.compiler.is_compiling():
        return True
    depth = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return depth is None or depth() > 0  # unknown counts as yes: then nothing is kept, which is slower but right


def is_distributed(x: Tensor) -> bool:
    """Is x a DTensor, of which this process may hold a part only? torch.distributed need not be there to ask.

    >>> is_distributed(torch.zeros(1))
    False
    """
    return hasattr(x, "to_local")


def local(x: Tensor) -> Tensor:
    """x itself, or this process's part of a DTensor.

    >>> local(torch.zeros(1))
    tensor([0.])
    """
    return cast(Tensor, x.to_local()) if is_distributed(x) else x  # type: ignore[attr-defined]
