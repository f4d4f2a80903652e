"""One call in plain values: a line per head, and the strongest links. What a table or JSON needs, and no tensors.

    >>> import torch, regard
    >>> x = torch.eye(3, 4).view(1, 1, 3, 4) * 9
    >>> view = regard.look(x, x, x)
    >>> [(link.query, link.key) for link in strongest_links(view, count=3)]
    [(0, 0), (1, 1), (2, 2)]

What was not measured, and cannot be for want of q and k, is None; so is the key that receives most where one gets NaN.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys).

It does not know how anything is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan
from typing import NamedTuple

from regard.lens.head_values import per_head
from regard.lens.measures.measures import cell_edges
from regard.lens.patterns import Patterns, label, label_rest
from regard.lens.view import View

__all__ = ["Head", "Linked", "describe_heads", "plain", "strongest_links"]


@dataclass(frozen=True)
class HeadSummary:
    """What one head of one batch row did.

    entropy, effective: means over its queries: −Σ p ln p in nats, and 1/Σp², the effective number of keys.
    keys: the first and the last key of those that receive most: one key, or a part of the keys where they are pooled.
    share: what such a key gets of each query, on the mean.
    patterns: the score of each pattern.  labels: those that get half of its attention or more, the strongest first.
    rest: where that is the first token, the pattern that gets half or more of what goes elsewhere, or None.
    """

    batch: int
    head: int
    entropy: float | None
    effective: float | None
    keys: tuple[int, int] | None
    share: float | None
    patterns: dict[str, float]
    labels: tuple[str, ...]
    rest: str | None


class Linked(NamedTuple):
    """A link of one head: how much of a query's attention goes to a key."""

    head: int
    query: int
    key: int
    weight: float


def plain(view: View) -> View:
    """The view with torch tensors of axes (B, H, …), whatever its own are.

    >>> import numpy as np, regard
    >>> plain(regard.look(*[np.zeros((3, 5))] * 3)).entropy.shape
    torch.Size([1, 1, 3])
    """
    return replace(view, lead=None, numpy=False)


def describe_heads(view: View, batch: int = 0) -> list[HeadSummary]:
    """A line for each head of a batch row.

    >>> import torch, regard
    >>> x = torch.zeros(1, 2, 4, 3)
    >>> one = describe_heads(regard.look(x, x, x))[1]
    >>> one.head, round(one.entropy, 2), one.keys, one.share, one.labels
    (1, 1.39, (0, 0), 0.25, ('uniform', 'neighbours'))

    Raises IndexError for a batch row that is not there.
    """
    view = plain(view)
    count, heads, nq, nk = view.sizes
    if not 0 <= batch < count:
        raise IndexError(f"batch {batch} is out of range: there are {count}, counted from 0")
    means = {name: _numbers(view, name, batch) for name in ("entropy", "effective")}
    found = _patterns(view)
    scores, shares, beside = ({name: t[batch : batch + 1] for name, t in of.items()} for of in found)
    labels = label(shares)[0] if shares else [[]] * heads
    rest = label_rest(shares, beside)[0] if shares else [None] * heads
    most = _most_received(view, batch) if _known(view, "received") and nq and nk else [None] * heads
    lines = []
    for h in range(heads):
        entropy, effective = (None if values is None else values[h] for values in means.values())
        keys, share = most[h] or (None, None)
        patterns = {name: float(values[0, h]) for name, values in scores.items()}
        lines.append(HeadSummary(batch, h, entropy, effective, keys, share, patterns, tuple(labels[h]), rest[h]))
    return lines


def _known(view: View, name: str) -> bool:
    return name in view.held or f"mean {name}" in view.held or view.weights is not None


def _numbers(view: View, name: str, batch: int) -> list[float] | None:
    if not _known(view, name):
        return None
    numbers: list[float] = per_head(view, name)[batch].tolist()
    return numbers


def _patterns(view: View) -> Patterns:
    measured = any(name.startswith("pattern ") for name in view.held)
    return view.head_patterns() if measured or view.weights is not None else Patterns({}, {}, {})


def _most_received(view: View, batch: int) -> list[tuple[tuple[int, int], float] | None]:
    """For each head the keys that receive most, and what one of them gets of a query on the mean; None for NaN."""
    _, _, nq, nk = view.sizes
    received = view.received[batch]  # (H, keys), or (H, bins) of means where they are pooled
    edges = cell_edges(nk, received.shape[-1])
    best, at = received.max(-1)
    found = zip(best.tolist(), at.tolist(), strict=True)
    return [None if isnan(r) else ((edges[c], edges[c + 1] - 1), r / nq) for r, c in found]


def strongest_links(view: View, *, batch: int = 0, head: int | None = None, count: int = 8) -> list[Linked]:
    """The strongest links of a batch row, of one head or of all of them, the strongest first.

    >>> import torch, regard
    >>> q = torch.tensor([[1.0], [3.0]]).view(1, 1, 2, 1)
    >>> strongest_links(regard.look(q, q, q, mask=regard.masks.causal()), count=1)[0][:3]      # head, query, key
    (0, 1, 1)

    A query that sees a single key has no choice, and is left out.
    Raises LookupError where fewer links were measured and q and k were not kept; IndexError for a batch row or head
    that is not there.
    """
    view = plain(view)
    rows, heads, nq, _ = view.sizes
    for name, index, size in (("batch", batch, rows), ("head", head or 0, heads)):
        if not 0 <= index < size:
            raise IndexError(f"{name} {index} is out of range: there are {size}, counted from 0")
    top = view.top(count)
    weight, key = top.weight[batch].nan_to_num(0.0), top.index[batch]  # (H, Nq, k)
    visible = view.place.visible
    if visible is not None:
        weight[(visible.expand(rows, heads, nq)[batch] == 1).to(weight.device)] = 0
    chosen = range(heads) if head is None else [head]
    best, at = weight[list(chosen)].reshape(-1).sort(descending=True, stable=True)
    found = []
    for value, place in zip(best[:count].tolist(), at[:count].tolist(), strict=True):
        h, rest = divmod(place, nq * weight.shape[-1])
        i, k = divmod(rest, weight.shape[-1])
        found += [Linked(chosen[h], i, int(key[chosen[h], i, k]), value)] if value > 0 else []
    return found
