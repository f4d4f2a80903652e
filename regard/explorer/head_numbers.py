"""The heads of a layer in numbers, one per head: means, what the strongest key receives, pattern scores, names.

What was measured is read. What was not is measured only where a call is so small that nobody waits for it; so also
what keys receive from the queries that are no padding.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys), W windows.

It does not know sessions, nor how anything is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.layouts import Layout
from regard.lens.diagnosing.patterns import Patterns, label, label_rest
from regard.lens.measuring.measures import cell_edges
from regard.lens.overlays import received_from
from regard.lens.view import View

__all__ = ["HeadNumbers", "head_numbers"]

LITTLE = 1 << 21  # weights of a call that are computed without being asked for


@dataclass(frozen=True, eq=False)
class HeadNumbers:
    """Of each head of the first batch entry, (H,) fp32 on the CPU; None where it is not known.

    entropy, effective (1/Σp²): means over the queries that are no padding, of all windows where there are several.
    share: what the key that receives most gets of each query, of its window, on the mean.
    keys: the first and last of those keys: one, or a bin of them.
    patterns, shares, beside: name → what `regard.lens.diagnosing.patterns.measure` says, means over the windows.
    names: the patterns that get half of each head's attention or more, the strongest first.
    rest: for a head that rests on the first token, the pattern that gets half of what goes elsewhere, or None.
    """

    entropy: Tensor | None
    effective: Tensor | None
    share: Tensor | None
    keys: tuple[tuple[int, int], ...]
    patterns: dict[str, Tensor]
    shares: dict[str, Tensor]
    beside: dict[str, Tensor]
    names: tuple[tuple[str, ...], ...]
    rest: tuple[str | None, ...]

    def nan(self, head: int) -> bool:
        """Is one of a head's numbers NaN, as they are where one of its weights is?"""
        known = (self.entropy, self.effective, self.share, *self.patterns.values())
        return any(bool(values[head].isnan()) for values in known if values is not None)


def head_numbers(view: View, windows: int = 1, queries: Layout | None = None) -> HeadNumbers:
    """The numbers of every head of a view on torch with axes (B, H, …).

    >>> import regard
    >>> x = torch.zeros(1, 2, 4, 3)
    >>> found = head_numbers(regard.look(x, x, x))
    >>> found.entropy, found.share, found.names[1]
    (tensor([1.3863, 1.3863]), tensor([0.2500, 0.2500]), ('uniform', 'neighbours'))

    windows: the first batch rows that belong together, as Swin cuts a picture.
    queries: what these are, where that is known: those that it calls padding are left out of means and of what keys
        receive. Not of patterns, nor where an overview holds means alone or a large call what all queries give.
    """
    real = None if queries is None or not (queries.kind == "padding").any() else queries.kind != "padding"  # (W, Nq)
    heads = view.sizes[1]
    little = view.weights is not None and view.sizes[0] * heads * view.sizes[2] * view.sizes[3] <= LITTLE
    found = _patterns(view, windows, little)
    shares, beside = ({name: values[None] for name, values in of.items()} for of in found[1:])
    names = label(shares)[0] if shares else [[]] * heads
    rest = label_rest(shares, beside)[0] if shares else [None] * heads
    share, keys = _received(view, windows, little, real)
    entropy, effective = (_mean(view, name, windows, little, real) for name in ("entropy", "effective"))
    return HeadNumbers(entropy, effective, share, keys, *found, tuple(tuple(said) for said in names), tuple(rest))


def _mean(view: View, name: str, windows: int, little: bool, real: NDArray[np.bool_] | None) -> Tensor | None:
    by_query = name not in view.pooled and (name in view.held or little)
    if real is not None and by_query:
        values = getattr(view, name)[:windows]  # (W, H, Nq)
        counted = torch.from_numpy(real)[:, None].to(values.device).expand_as(values)
        if "lse" in view.held and "lse" not in view.pooled:  # a row that sees nothing has no entropy
            counted = counted & (view.lse[:windows] != -torch.inf)
        return _plain(torch.where(counted, values, 0.0).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1))
    known = f"mean {name}" in view.held or (name in view.held and name not in view.pooled)
    return _plain(view.mean(name)[:windows].mean(0)) if known or (little and name not in view.held) else None


def _patterns(view: View, windows: int, little: bool) -> Patterns:
    measured = any(name.startswith("pattern ") for name in view.held)
    found = view.head_patterns() if measured or little else Patterns({}, {}, {})
    return Patterns(*({name: _plain(values[:windows].mean(0)) for name, values in of.items()} for of in found))


def _received(
    view: View, windows: int, little: bool, real: NDArray[np.bool_] | None
) -> tuple[Tensor | None, tuple[tuple[int, int], ...]]:
    _, _, nq, nk = view.sizes
    if 0 in (nq, nk) or not ("received" in view.held or little):
        return None, ()
    counts = torch.full((windows,), nq)
    if real is not None and little:
        received, counts = received_from(view, 0, real), torch.from_numpy(real.sum(1)).clamp(min=1)
    else:
        received = view.received[:windows]  # (W, H, keys), or (W, H, bins) of means where they are pooled
    bins = received.shape[-1]
    edges = cell_edges(nk, bins)
    best, at = received.transpose(0, 1).flatten(1).max(-1)  # (H,)
    found = [divmod(place, bins) for place in at.tolist()]
    shares = _plain(best) / counts[[w for w, _ in found]]
    return shares, tuple((w * nk + edges[c], w * nk + edges[c + 1] - 1) for w, c in found)


def _plain(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32)
