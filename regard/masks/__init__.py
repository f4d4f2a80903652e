"""Masks as values: who may look at whom.  True = may look.

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

Read `mask.py` for the base class, then `positional.py` (causal, window, dilated, prefix), `token_masks.py` (padding,
documents, globals, queries) and `dense.py` (blocks, random_blocks, dense).
"""

from regard.masks.dense import DenseMask, as_mask, blocks, dense, random_blocks
from regard.masks.mask import EMPTY, FULL, PARTIAL, Mask
from regard.masks.positional import Causal, causal, dilated, prefix, window
from regard.masks.token_masks import documents, globals, padding, queries

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
