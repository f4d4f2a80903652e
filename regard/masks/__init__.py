"""Masks as values: which query may look at which key. True = may look.

    >>> print(causal().draw(3, 5))          # 3 queries are the last 3 of 5 positions
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    >>> print(causal().draw(5, 3))          # the first two rows see nothing
    · · ·
    · · ·
    ■ · ·
    ■ ■ ·
    ■ ■ ■
    >>> print((window(1, 0) | globals([0])).draw(5))
    ■ ■ ■ ■ ■
    ■ ■ · · ·
    ■ ■ ■ · ·
    ■ · ■ ■ ·
    ■ · · ■ ■

Positions: key j stands at position j; query i at position i + offset. Unless an offset is given it is Nk − Nq: the
queries are the last Nq positions (lower-right). Masks combine with `&`, `|` and `~`; numbers may differ per batch row
(B,) or per row and head (B or 1, H or 1). A mask never builds N×N unless `.dense()` is asked for: `tiles` classifies
tiles from bounds, in O(N + number of tiles).

A mask is a function of (b, h, i, j), evaluated on tiles: `mask.py` has the base of masks and biases, the class `Mask`,
its combinations and the dense mask, `patterns.py` the masks by name, `tiles.py` lists of visible tiles.
"""

from regard.masks.mask import EMPTY, FULL, PARTIAL, DenseMask, Mask, as_mask, dense
from regard.masks.patterns import (
    Causal,
    blocks,
    causal,
    dilated,
    documents,
    globals,
    padding,
    prefix,
    queries,
    random_blocks,
    window,
)

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Causal",
    "DenseMask",
    "Mask",
    "as_mask",
    "blocks",
    "causal",
    "dense",
    "dilated",
    "documents",
    "globals",
    "padding",
    "prefix",
    "queries",
    "random_blocks",
    "window",
]
