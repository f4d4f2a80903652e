"""The heads of a layer in numbers, one per head: means, what the strongest key receives, pattern scores, names.

What was measured is read. What was not is measured only where a call is so small that nobody waits for it.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys).

It does not know sessions, nor how anything is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.lens.diagnosing.patterns import label
from regard.lens.measuring.measures import cell_edges
from regard.lens.view import View

__all__ = ["HeadNumbers", "head_numbers"]

LITTLE = 1 << 21  # weights of a call that are computed without being asked for


@dataclass(frozen=True, eq=False)
class HeadNumbers:
    """Of each head of the first batch row, (H,) fp32 on the CPU; None where it is not known.

    entropy, effective: means over the queries.  share: what the key that receives most gets of each query on the mean.
    keys: the first and last of those keys: one, or a bin of them.  patterns: name → scores.
    names: the patterns that name each head, the strongest first.
    """

    entropy: Tensor | None
    effective: Tensor | None
    share: Tensor | None
    keys: tuple[tuple[int, int], ...]
    patterns: dict[str, Tensor]
    names: tuple[tuple[str, ...], ...]


def head_numbers(view: View) -> HeadNumbers:
    """The numbers of every head of a view on torch with axes (B, H, …).

    >>> import regard
    >>> x = torch.zeros(1, 2, 4, 3)
    >>> found = head_numbers(regard.look(x, x, x))
    >>> found.entropy, found.share, found.names[1]
    (tensor([1.3863, 1.3863]), tensor([0.2500, 0.2500]), ('uniform', 'neighbours'))
    """
    heads = view.sizes[1]
    little = view.weights is not None and view.sizes[0] * heads * view.sizes[2] * view.sizes[3] <= LITTLE
    patterns = _patterns(view, little)
    names = label({name: scores[None] for name, scores in patterns.items()})[0] if patterns else [[]] * heads
    share, keys = _received(view, little)
    entropy, effective = (_mean(view, name, little) for name in ("entropy", "effective"))
    return HeadNumbers(entropy, effective, share, keys, patterns, tuple(tuple(said) for said in names))


def _mean(view: View, name: str, little: bool) -> Tensor | None:
    known = f"mean {name}" in view.held or (name in view.held and name not in view.pooled)
    return _plain(view.mean(name)[0]) if known or (little and name not in view.held) else None


def _patterns(view: View, little: bool) -> dict[str, Tensor]:
    measured = any(name.startswith("pattern ") for name in view.held)
    return {name: _plain(scores[0]) for name, scores in view.patterns().items()} if measured or little else {}


def _received(view: View, little: bool) -> tuple[Tensor | None, tuple[tuple[int, int], ...]]:
    _, _, nq, nk = view.sizes
    if 0 in (nq, nk) or not ("received" in view.held or little):
        return None, ()
    received = view.received[0]  # (H, keys), or (H, bins) of means where they are pooled
    edges = cell_edges(nk, received.shape[-1])
    best, at = received.max(-1)
    return _plain(best / nq), tuple((edges[c], edges[c + 1] - 1) for c in at.tolist())


def _plain(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32)
