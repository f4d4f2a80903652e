"""regard: Transformer attention in which nothing is hidden.

    >>> import numpy as np, regard
    >>> x = np.eye(3, 4)
    >>> regard.attention(x, x, x, mask=regard.masks.causal()).shape
    (3, 4)

The public names below are imported on first use, so `import regard` costs nothing and `regard --help` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard import backends, layers, masks, positions, testing
    from regard.cache import FixedCache, GrowingCache
    from regard.costs import cost
    from regard.layers import MultiHeadAttention
    from regard.lens import figures
    from regard.lens.checking import check
    from regard.lens.files.saving import open
    from regard.lens.looking import look
    from regard.lens.watching import watch
    from regard.models.loading import load
    from regard.models.parity.verifying import verify
    from regard.op import attention, steps

__version__ = "0.1.0"

_HOME = {
    "FixedCache": "regard.cache",
    "GrowingCache": "regard.cache",
    "MultiHeadAttention": "regard.layers",
    "attention": "regard.op",
    "backends": "regard.backends",
    "check": "regard.lens.checking",
    "cost": "regard.costs",
    "figures": "regard.lens.figures",
    "layers": "regard.layers",
    "load": "regard.models.loading",
    "look": "regard.lens.looking",
    "masks": "regard.masks",
    "open": "regard.lens.files.saving",
    "positions": "regard.positions",
    "steps": "regard.op",
    "testing": "regard.testing",
    "verify": "regard.models.parity.verifying",
    "watch": "regard.lens.watching",
}

__all__ = [
    "FixedCache",
    "GrowingCache",
    "MultiHeadAttention",
    "attention",
    "backends",
    "check",
    "cost",
    "figures",
    "layers",
    "load",
    "look",
    "masks",
    "open",
    "positions",
    "steps",
    "testing",
    "verify",
    "watch",
]


def __getattr__(name: str) -> object:
    from importlib.util import find_spec  # 1 ms that the import of regard need not take

    home = _HOME.get(name)
    if home is None and not name.startswith("__") and find_spec(f"regard.{name}") is not None:
        home = f"regard.{name}"  # a module, such as regard.explorer
    if home is None:
        raise AttributeError(f"regard has no {name!r}; it has {', '.join(__all__)}")
    module = import_module(home)
    value = module if home.rpartition(".")[2] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
