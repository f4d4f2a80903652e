"""Arrays of the explorer's answers as tensors."""

from base64 import b64decode

import numpy as np
import torch
from torch import Tensor

from regard.session.protocol import ArrayJSON


def unpacked(array: ArrayJSON) -> Tensor:
    """The fp32 tensor of a packed array. Raises ValueError if the numbers do not fill the shape."""
    numbers = np.frombuffer(b64decode(array["f32"]), "<f4").astype(np.float32)
    return torch.from_numpy(numbers).reshape(array["shape"])
