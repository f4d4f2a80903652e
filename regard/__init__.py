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
    from regard import backends, edits, masks, nn, positions, testing
    from regard.costs import cost
    from regard.edits import metrics
    from regard.edits.editing import edit
    from regard.edits.effects import effect, scan
    from regard.edits.faithfulness import faithful
    from regard.edits.survey import Survey, survey
    from regard.lens.capture import open
    from regard.lens.comparison import compare
    from regard.lens.logit_lens import logit_lens
    from regard.lens.look import look
    from regard.lens.patterns import patterns
    from regard.lens.validity import check
    from regard.lens.watch import watch
    from regard.models.initialization import build
    from regard.models.loading import load
    from regard.nn.attention import FixedCache, GrowingCache, MultiHeadAttention
    from regard.op import attention, steps
    from regard.parity.verification import verify
    from regard.training import recipes
    from regard.training.loop import train
    from regard.training.monitor import monitor
    from regard.viz import figures

__version__ = "0.1.0"

_HOME = {
    "FixedCache": "regard.nn.attention",
    "GrowingCache": "regard.nn.attention",
    "MultiHeadAttention": "regard.nn.attention",
    "Survey": "regard.edits.survey",
    "attention": "regard.op",
    "backends": "regard.backends",
    "build": "regard.models.initialization",
    "check": "regard.lens.validity",
    "compare": "regard.lens.comparison",
    "cost": "regard.costs",
    "edit": "regard.edits.editing",
    "edits": "regard.edits",
    "effect": "regard.edits.effects",
    "faithful": "regard.edits.faithfulness",
    "figures": "regard.viz.figures",
    "load": "regard.models.loading",
    "logit_lens": "regard.lens.logit_lens",
    "look": "regard.lens.look",
    "masks": "regard.masks",
    "metrics": "regard.edits.metrics",
    "monitor": "regard.training.monitor",
    "nn": "regard.nn",
    "open": "regard.lens.capture",
    "patterns": "regard.lens.patterns",
    "positions": "regard.positions",
    "recipes": "regard.training.recipes",
    "scan": "regard.edits.effects",
    "steps": "regard.op",
    "survey": "regard.edits.survey",
    "testing": "regard.testing",
    "train": "regard.training.loop",
    "verify": "regard.parity.verification",
    "watch": "regard.lens.watch",
}

__all__ = [
    "FixedCache",
    "GrowingCache",
    "MultiHeadAttention",
    "Survey",
    "attention",
    "backends",
    "build",
    "check",
    "compare",
    "cost",
    "edit",
    "edits",
    "effect",
    "faithful",
    "figures",
    "load",
    "logit_lens",
    "look",
    "masks",
    "metrics",
    "monitor",
    "nn",
    "open",
    "patterns",
    "positions",
    "recipes",
    "scan",
    "steps",
    "survey",
    "testing",
    "train",
    "verify",
    "watch",
]


def __getattr__(name: str) -> object:
    from importlib.util import find_spec  # 1 ms that the import of regard need not take

    if name in _HOME:
        module = import_module(_HOME[name])
        value = getattr(module, name, module)
        globals()[name] = value
        return value
    if not name.startswith("__") and find_spec(f"regard.{name}") is not None:
        return import_module(f"regard.{name}")  # a module, such as regard.explorer; regard.growth has a growth inside
    raise AttributeError(f"regard has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
