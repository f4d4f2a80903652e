"""Positions: how order enters attention.

Three kinds, by where they act:
- added to the input x: `sinusoidal`, `sinusoidal_2d`, `Learned`;
- turning q and k: `Rotary`;
- added to the scores: biases, which are values evaluated on tiles, never an N×N tensor unless you bring one:
  `alibi`, `T5`, `Shaw`, `Swin`, `dense`.

Query i stands at position i + offset, with offset Nk − Nq unless given, as in `regard.masks`.

This file does not know about masks, backends or layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from regard.rules import IndexRule, Rule, cell_of, fit_cells

__all__ = ["Bias", "as_bias", "dense"]


class Bias(Rule):
    """A term added to each score, evaluated on tiles: a frozen value. Make one with the functions of this module."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The floating-point tensors the term is computed from: what gradients flow to."""
        return tuple(t for t in (getattr(self, name) for name in self._float_fields()))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Bias:
        """The same bias computed from other tensors of the same shapes."""
        return replace(self, **dict(zip(self._float_fields(), tensors, strict=True)))  # type: ignore[type-var]

    def _float_fields(self) -> list[str]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return [n for n, v in values.items() if isinstance(v, Tensor) and v.dtype.is_floating_point]


@dataclass(frozen=True, eq=False, repr=False)
class DenseBias(Bias):
    """A bias that the user brought as a tensor: (B or 1, H or 1, Nq or 1, Nk or 1)."""

    cells: Tensor

    @property
    def leading(self) -> tuple[int, int]:
        """(B, H) over which the bias varies; 1 where it is the same for all."""
        return self.cells.shape[0], self.cells.shape[1]

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError if the cells do not broadcast to (B, H, Nq, Nk)."""
        super().fit(batch, heads, nq, nk)
        if self.cells.shape[2] not in (1, nq) or self.cells.shape[3] not in (1, nk):
            raise ValueError(f"{self!r} does not fit {nq} queries × {nk} keys")

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j) that reads one cell."""
        return cell_of(self.cells.to(device))

    def __repr__(self) -> str:
        return f"dense(<{'×'.join(str(n) for n in self.cells.shape if n != 1) or '1'} {self.cells.dtype}>)"


def dense(cells: object) -> Bias:
    """A bias you bring as numbers: (Nq, Nk), (H, Nq, Nk) or (B or 1, H or 1, Nq, Nk). Indices, not positions.

    >>> dense(torch.zeros(3, 5))
    dense(<3×5 torch.float32>)
    """
    values = torch.as_tensor(cells)
    if not values.dtype.is_floating_point:
        raise TypeError(f"a bias must be floating point, got {values.dtype}; booleans are a mask: pass mask=…")
    if not 2 <= values.ndim <= 4:
        raise ValueError(f"a bias must have 2 to 4 axes, got shape {tuple(values.shape)}")
    return DenseBias(values[(None,) * (4 - values.ndim)])


def as_bias(bias: object, shape: tuple[int, ...]) -> Bias | None:
    """Read the `bias=` argument of a call whose weights have `shape` (…, Nq, Nk): None, a Bias, or numbers."""
    if bias is None or isinstance(bias, Bias):
        return bias
    if not isinstance(bias, (np.ndarray, Tensor)):
        raise TypeError(f"bias must be a regard bias, floating-point numbers or None; got {type(bias).__name__}")
    cells = torch.as_tensor(bias)
    if not cells.dtype.is_floating_point:
        raise TypeError(f"bias must be floating point, got {cells.dtype}; booleans are a mask: pass mask=…")
    return DenseBias(fit_cells("bias", cells, shape))
