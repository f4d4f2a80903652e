"""Arrays of the explorer's answers as tensors."""

from base64 import b64decode

import numpy as np
import torch
from torch import Tensor

from regard.session.protocol import ArrayJSON, LevelsJSON


def unpacked(array: ArrayJSON) -> Tensor:
    """The fp32 tensor of a packed array. Raises ValueError if the numbers do not fill the shape."""
    numbers = np.frombuffer(b64decode(array["f32"]), "<f4").astype(np.float32)
    return torch.from_numpy(numbers).reshape(array["shape"])


def unlevelled(array: LevelsJSON) -> Tensor:
    """The fp32 values of bytes with a scale per head; NaN for a head without a scale."""
    bytes_ = np.frombuffer(b64decode(array["u8"]), np.uint8).astype(np.float32)
    values = torch.from_numpy(bytes_).reshape(array["shape"])
    return values * unpacked(array["scale"]).view(-1, *[1] * (values.ndim - 1))
