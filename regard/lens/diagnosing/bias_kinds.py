"""What the numbers of a bias are: a term, a boolean mask that was cast to 0 and 1, or a mask written as large numbers.

    >>> classify(torch.tensor([[[[0.0, -1e9], [0.0, 0.0]]]]))
    ('large negative', -1000000000.0)

It reads numbers that were brought as a tensor; a bias that is a rule, as ALiBi, is a term. It does not know masks.
"""

from __future__ import annotations

from math import inf
from typing import Literal

import torch
from torch import Tensor

from regard.biases import Bias, DenseBias
from regard.lens.diagnosing.visibility import dense_cells

__all__ = ["HIDES", "THRESHOLD", "BiasKind", "classify", "hiding_numbers", "kind_of"]

BiasKind = Literal["additive", "zero-one", "large negative", "minus infinity"]
"""What a bias does: adds; adds only 0 and 1, as a boolean mask cast to floats; hides by −1e9 and such; hides by −∞."""

HIDES = -5_000.0
"""From here on, downwards, a number is meant to hide: half of the mildest that people use, BERT's −10,000."""

THRESHOLD: dict[BiasKind | None, float] = {"large negative": HIDES, "minus infinity": -inf}
"""The biases that hide, and from which number on."""

SLOPES = -1_000.0  # a bias with numbers between this and HIDES is a slope, as ALiBi's, and hides nothing on purpose
AT_ONCE = 1 << 22  # numbers that are looked at in one piece


def kind_of(bias: Bias | None) -> tuple[BiasKind | None, float | None]:
    """What a bias does, and for "large negative" its number nearest to 0 that hides.

    >>> kind_of(None)
    (None, None)
    """
    if bias is None:
        return None, None
    return classify(bias.cells) if isinstance(bias, DenseBias) else ("additive", None)


def hiding_numbers(bias: Bias | None, kind: BiasKind | None) -> Tensor | None:
    """The numbers of a bias of this kind, (B or 1, H or 1, Nq or 1, Nk or 1), if it hides; None otherwise.

    >>> hiding_numbers(DenseBias(torch.zeros(1, 1, 2, 2)), "additive") is None
    True
    """
    return bias.cells.detach() if isinstance(bias, DenseBias) and kind in THRESHOLD else None


def classify(cells: Tensor) -> tuple[BiasKind, float | None]:
    """What numbers (B, H, Nq, Nk) that are added to the scores do, and for "large negative" from which on they hide.

    >>> classify(torch.tensor([[[[0.0, 1.0]]]])), classify(torch.tensor([[[[0.5, -3.0]]]]))
    (('zero-one', None), ('additive', None))
    """
    cells = dense_cells(cells.detach())
    if cells.numel() == 0:
        return "additive", None
    low, high = torch.stack(torch.aminmax(cells)).tolist()
    if low > SLOPES and not (low == 0 and high == 1):  # one look, without another tensor of this size
        return "additive", None
    rows = max(1, AT_ONCE // (cells.numel() // cells.shape[2]))
    pieces = [_marks(cells[:, :, at : at + rows]) for at in range(0, cells.shape[2], rows)]
    infinite, slopes, others, start = torch.stack(pieces).amax(0).tolist()
    if not others:
        return "zero-one", None
    if start > -inf and not slopes:
        return "large negative", start
    return ("minus infinity" if infinite else "additive"), None


def _marks(cells: Tensor) -> Tensor:
    """Is there −∞; a number between HIDES and SLOPES; one that is neither 0 nor 1; and the nearest to 0 that hides."""
    hides = (cells <= HIDES) & (cells != -inf)
    slopes, others = (cells > HIDES) & (cells < SLOPES), (cells != 0) & (cells != 1)
    start = torch.where(hides, cells, -inf).amax()
    return torch.stack([*(x.any().to(start.dtype) for x in (cells == -inf, slopes, others)), start])
