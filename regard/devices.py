"""Launching Triton kernels: whether triton is there, the current device, powers of two.

torch's own operations run where their tensors are; Triton's launches, streams and graphs on the current CUDA device.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["ROUNDED_ONCE", "current", "driver_version", "no_triton", "overlapping", "power_of_two"]

ROUNDED_ONCE = {"enable_fp_fusion": True}
"""Given to each launch: a product and the sum it goes into are rounded once. Triton 3.10 will change its default."""


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
