"""What a mask says, where no matrix of weights exists to be masked: which keys are real, and whether it is causal.

Linear attention sums over the keys before it meets a query, so it can leave keys out for everybody (padding) or walk in
order (causal), and nothing else. This file does not know how the keys are summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks.cells import as_mask
from regard.masks.mask import And, Mask
from regard.masks.placed import Causal
from regard.rules import indices

__all__ = ["Seen", "read_seen"]


class Seen(NamedTuple):
    """Which keys are seen: `real` (B or 1, Nk) booleans or None for all; `causal`: none that lies ahead."""

    real: Tensor | None
    causal: bool


def read_seen(mask: object, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> Seen:
    """Read a mask as padding, causal, or both.

    >>> from regard.masks import causal, padding
    >>> read_seen(causal() & padding([2]), 1, 1, 3, 3, torch.device("cpu"))
    Seen(real=tensor([[ True,  True, False]]), causal=True)

    mask: a mask, booleans that broadcast to (B, H, Nq, Nk), or None.
    batch, heads, nq, nk: the sizes of the call.

    Raises ValueError for a mask that hides different keys from different queries otherwise than causally.
    """
    given = as_mask(mask, (batch, heads, nq, nk))
    if given is None:
        return Seen(None, False)
    given.fit(batch, heads, nq, nk)
    causal, real = False, None
    for part in _parts(given):
        if isinstance(part, Causal):
            _check_offset(part, nq, nk)
            causal = True
        else:
            row = _one_row(part, nq, nk, device)  # (B or 1, Nk)
            real = row if real is None else real & row
    return Seen(real, causal)


def _parts(mask: Mask) -> list[Mask]:
    return [*_parts(mask.left), *_parts(mask.right)] if isinstance(mask, And) else [mask]


def _check_offset(mask: Causal, nq: int, nk: int) -> None:
    last = mask.offset is None or mask.offset == nk - nq  # of numbers (B, 1 or H): which are
    if not (bool(last.all()) if isinstance(last, Tensor) else last):
        raise ValueError(
            f"{mask!r} is not for linear attention: its queries are always the last {nq} of {nk} positions. "
            "Use masks.causal() without an offset"
        )


def _one_row(mask: Mask, nq: int, nk: int, device: torch.device) -> Tensor:
    """(B or 1, Nk): the keys of a mask that is the same for every query and head."""
    if nq == 0 or nk == 0:
        return torch.ones(1, nk, dtype=torch.bool, device=device)
    # The first query, twice: a rule that reads the query's index answers with two rows, any other with one.
    twice, keys = torch.zeros(2, dtype=torch.long, device=device), torch.arange(nk, device=device)
    see = mask.bind(nq, nk, device, torch.float32)
    cells: Tensor = see(*indices(*mask.leading, twice, keys, device))
    cells = cells[(None,) * (4 - cells.ndim)]  # (B or 1, H or 1, 1 or 2, Nk or 1)
    if cells.shape[2] != 1 or cells.shape[1] != 1:
        raise ValueError(
            f"{mask!r} hides different keys from different queries or heads, which linear attention cannot: it sums "
            "over the keys before it meets a query. It takes masks.padding(…), and Performer masks.causal() as well"
        )
    return cells[:, 0, 0].expand(-1, nk)
