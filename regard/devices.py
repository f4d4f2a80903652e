"""Launching Triton kernels, and what it takes: whether triton is there, the current device, powers of two.

torch's own operations run where their tensors are; Triton's launches, streams and graphs on the current CUDA device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALIGNED",
    "ROUNDED_ONCE",
    "current",
    "driver_version",
    "launch",
    "no_triton",
    "overlapping",
    "power_of_two",
]

ROUNDED_ONCE = {"enable_fp_fusion": True}
"""Given to each launch: a product and the sum it goes into are rounded once. Triton 3.10 will change its default."""


ALIGNED = 16  # bytes, of which an address is a multiple where a kernel loads many numbers at once

_LAUNCHED: dict[Any, Any] = {}
"""Compiled kernels, by all that Triton compiles a kernel for; as many as Triton keeps itself, and as long."""


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: Sequence[float], **named: Any
) -> None:
    """Launch a Triton kernel on the current device.

    Triton looks at each argument for what to compile, which takes longer than a short kernel runs; the second launch of
    a kind is found here by its key instead. Tensors that do not begin on `ALIGNED` bytes always go through Triton, and
    all launches on AMD's GPUs, where it looks at more.

    Args:
        kernel: a function whose arguments are tensors, then numbers, then constants.
        grid: programs along each axis.
        tensors: the first arguments.
        numbers: those that follow, each an int or a float in all calls.
        named: the constants, in the order of the arguments, and after them Triton's options.
    """
    unaligned = 0
    for x in tensors:
        unaligned |= x.data_ptr() % ALIGNED
    by_triton = unaligned or torch.version.hip is not None
    # What Triton compiles for: 1 becomes a constant, and a multiple of 16 keeps addresses aligned.
    specializations = [(n == 1, n % 16 == 0, abs(n) < 1 << 31) if type(n) is int else None for n in numbers]
    key = (id(kernel), tensors[0].device, *[x.dtype for x in tensors], *specializations, *named.values())
    made = None if by_triton else _LAUNCHED.get(key)
    if made is not None:
        made[grid](*tensors, *numbers, *list(named.values())[: len(kernel.constexprs)])
        return
    made = kernel[grid](*tensors, *numbers, **named)
    if made is not None and not by_triton:  # Triton's interpreter gives None
        assert list(named)[: len(kernel.constexprs)] == [kernel.arg_names[n] for n in kernel.constexprs], list(named)
        _LAUNCHED[key] = made


def current(device: torch.device) -> AbstractContextManager[object]:
    """Inside `with`, launches go to this device; nothing changes for a CPU."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)


@cache  # looking for a package takes as long as a small kernel
def no_triton() -> str | None:
    """Why kernels cannot run, if triton is not installed; else None."""
    return "triton is not installed: pip install 'regard[gpu]'" if find_spec("triton") is None else None


@cache
def overlapping(device: torch.device) -> bool:
    """Whether a kernel can begin before the one ahead of it has ended (programmatic dependent launch), also in a graph.

    Hopper can; later GPUs have not been tried. Drivers before CUDA 12.3 do not capture it.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and driver_version() >= 12030


def driver_version() -> int:
    """The CUDA version that the driver supports, e.g. 12030 for 12.3; 0 if no CUDA driver can be found.

    torch has no public function for it, so the driver's own library is asked.
    """
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        version = ctypes.c_int(0)
        return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
    return 0


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
