"""The exact weights of one head of a layer, of one sequence or of all windows that it is cut into (Swin).

Tokens count through the windows: token i of window w is w · N + i, of queries and of keys. A query sees the keys of its
window; all others weigh exactly 0.

Axis letters: N positions (Nq queries, Nk keys), W windows.

It does not know sessions, nor who asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.explorer.one_head import HeadWeights, one_head
from regard.explorer.seen_layers import SeenLayer
from regard.lens.measuring.weights import Part

__all__ = ["Windowed", "head_of"]


def head_of(layer: SeenLayer, head: int) -> HeadWeights:
    """The exact weights of one head. Raises LookupError where queries and keys were not kept.

    >>> import regard
    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> head_of(SeenLayer("attn", None, regard.look(x, x, x), (0,)), 0).row(1)
    tensor([0.2645, 0.4711, 0.2645])
    """
    weights = layer.view.weights
    if weights is None:
        raise LookupError("exact weights need queries and keys: watch(model, keep='qk') keeps them")
    if layer.windows == 1:
        return one_head(weights, head)
    return Windowed([one_head(weights, head, window) for window in range(layer.windows)])


class Windowed:
    """The weights of all windows as those of one sequence: blocks along the diagonal, 0 elsewhere.

    >>> import regard
    >>> x = torch.zeros(2, 1, 2, 3)
    >>> weights = regard.look(x, x, x).weights
    >>> Windowed([one_head(weights, 0, 0), one_head(weights, 0, 1)]).row(2)
    tensor([0.0000, 0.0000, 0.5000, 0.5000])

    parts: of each window, all of one size.
    """

    def __init__(self, parts: Sequence[HeadWeights]) -> None:
        self.parts, self.each = parts, parts[0].sizes
        self.sizes = (len(parts) * self.each[0], len(parts) * self.each[1])

    def tile(self, rows: Part, cols: Part) -> Tensor:
        """The weights of these queries and keys, (rows, cols)."""
        (nq, nk), wanted, keys = self.each, torch.arange(self.sizes[0])[rows], torch.arange(self.sizes[1])[cols]
        whole = torch.zeros(len(wanted), len(keys))
        for w in sorted(set((wanted // max(1, nq)).tolist())):
            mine, there = wanted // nq == w, keys // nk == w
            if bool(there.any()):
                tile = self.parts[w].tile(wanted[mine] - w * nq, keys[there] - w * nk).cpu()
                whole = whole.to(torch.promote_types(whole.dtype, tile.dtype))
                whole[mine.nonzero(), there.nonzero().view(1, -1)] = tile
        return whole

    def row(self, i: int) -> Tensor:
        """The weights of query i, (W·Nk,)."""
        nk, (w, own) = self.each[1], divmod(i, self.each[0])
        found = self.parts[w].row(own).cpu()
        whole = found.new_zeros(self.sizes[1])
        whole[w * nk : (w + 1) * nk] = found
        return whole
