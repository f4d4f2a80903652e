"""How many rows linear maps compute."""

from typing import Any

from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


class CountedRows(TorchFunctionMode):
    """Counts, inside `with`, the rows of all products with weights. It hooks into no layer, as torch's counter does."""

    rows = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is linear:
            self.rows += args[0].shape[:-1].numel()
        return function(*args, **(kwargs or {}))
