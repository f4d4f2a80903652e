"""Kernels that are launched by hand go to the current CUDA device, whichever that is: here it becomes the data's.

torch's own operations look where their tensors are; Triton's launches, streams and graphs do not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["current"]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Inside `with`, launches go to this device; nothing changes where it is no GPU.

    >>> with current(torch.device("cpu")):
    ...     torch.zeros(1).device
    device(type='cpu')
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
