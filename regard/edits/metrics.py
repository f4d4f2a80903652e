"""Metrics of a model's answer, by which edits are measured.

A metric is a function of the model's output that returns a number; `regard.effect` takes any such function. Those here
have names that results print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Metric", "kl", "log_prob", "logit_diff", "moved"]


@dataclass(frozen=True, eq=False)
class Metric:
    """A named metric.

    Args:
        name: what results print.
        function: of the output and of the output without an edit, to a tensor with one number.
        relative: it compares with the output without an edit, and is 0 for that; its gradient there is 0 too.
        path: the module whose output it reads; None for the model's.
    """

    name: str
    function: Callable[[Any, Any], Tensor]
    relative: bool = False
    path: str | None = None

    def __repr__(self) -> str:
        return self.name


def logit_diff(a: int, b: int, *, position: int = -1, batch: int = 0) -> Metric:
    """The logit of token a minus that of token b.

    >>> import torch
    >>> float(logit_diff(2, 0).function(torch.tensor([[[1.0, 0.0, 4.0]]]), None))
    3.0

    Args:
        a: token id, or label of a classifier.
        b: the other.
        position: of the logits; default the last. Ignored for a classifier.
        batch: batch row.
    """

    def difference(output: Any, _: Any) -> Tensor:
        logits = _logits(output, position, batch)
        return _pick(logits, a, "token or label") - _pick(logits, b, "token or label")

    return Metric(f"logit {a} − logit {b}", difference)


def log_prob(token: int, *, position: int = -1, batch: int = 0) -> Metric:
    """The log probability of a token, or of a label of a classifier.

    >>> import torch
    >>> round(float(log_prob(1).function(torch.zeros(1, 1, 4), None)), 4)
    -1.3863

    Args:
        token: token id or label.
        position: of the logits; default the last. Ignored for a classifier.
        batch: batch row.
    """

    def log_probability(output: Any, _: Any) -> Tensor:
        return _pick(_logits(output, position, batch).log_softmax(-1), token, "token or label")

    return Metric(f"log p({token})", log_probability)


def kl(*, position: int = -1, batch: int = 0) -> Metric:
    """KL(p without the edit ‖ p with it) of the predicted distribution, in nats.

    >>> import torch
    >>> float(kl().function(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)))
    0.0

    Args:
        position: of the logits; default the last. Ignored for a classifier.
        batch: batch row.
    """

    def divergence(output: Any, plain: Any) -> Tensor:
        new, old = (_logits(x, position, batch).log_softmax(-1) for x in (output, plain))
        return (old.exp() * (old - new)).sum()

    return Metric("KL", divergence, relative=True)


def moved(token: int, *, path: str | None = None, batch: int = 0) -> Metric:
    """How far the vector of a token moves: ‖h − h₀‖ ÷ ‖h₀‖.

    >>> import torch
    >>> float(moved(0).function(torch.tensor([[[4.0, 4.0]]]), torch.tensor([[[4.0, 0.0]]])))
    1.0

    Args:
        token: its position.
        path: the module that returns the vectors; default the model's last hidden state.
        batch: batch row.
    """

    def distance(output: Any, plain: Any) -> Tensor:
        new, old = (_pick(_pick(_hidden(x), batch, "batch row"), token, "position") for x in (output, plain))
        ratio: Tensor = (new - old).norm() / old.norm()
        return ratio

    return Metric(f"vector of token {token}", distance, relative=True, path=path)


def _pick(x: Tensor, at: int, what: str) -> Tensor:
    if not -len(x) <= at < len(x):
        raise IndexError(f"the metric asks for {what} {at}, and the output has {len(x)}, 0 to {len(x) - 1}")
    return x[at]


def _logits(output: Any, position: int, batch: int) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"this metric needs logits, and the run returned {type(output).__name__} without them")
    row = _pick(logits, batch, "batch row") if logits.ndim > 1 else logits
    row = _pick(row, position, "position") if row.ndim > 1 else row
    return row.to(torch.promote_types(row.dtype, torch.float32))


def _hidden(output: Any) -> Tensor:
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        output = output[0]
    hidden = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise TypeError(
            f"moved() needs vectors (B, N, D), and the run returned {type(output).__name__} without last_hidden_state; "
            "name the module that returns them with path="
        )
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))
