"""The base class of biases, terms added to the scores and evaluated on tiles, and the dense bias."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from regard.checks import Number, numbers
from regard.masks.mask import IndexRule, Rule, cell_of, fit_cells, leading_of, size_or_one

CPU = torch.device("cpu")


class Bias(Rule):
    """A term added to each score, evaluated on tiles: a frozen value. The functions of `regard.positions` make them."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The floating-point tensors the term is computed from: what gradients flow to."""
        return tuple(getattr(self, name) for name in self._float_fields())

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Bias:
        """The same bias computed from other tensors of the same shapes."""
        return replace(self, **dict(zip(self._float_fields(), tensors, strict=True)))  # type: ignore[type-var]

    def _float_fields(self) -> list[str]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return [n for n, v in values.items() if isinstance(v, Tensor) and v.dtype.is_floating_point]

    @property
    def by_distance(self) -> bool:
        """Whether the term depends on j − i alone."""
        return False

    def one_per_tile(self, size: tuple[int, int]) -> bool:
        """Whether the term is one number for each tile of this size, wherever the mask shows any of it."""
        return False

    def bias(self, q: Tensor, scale: float) -> Bias:
        """Itself, so that a layer may hold a bias in place of T5, Shaw or Swin. Only Shaw reads q and scale."""
        return self

    def dense(
        self, nq: int, nk: int | None = None, device: torch.device = CPU, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The whole matrix: (Nq, Nk), or (B or 1, H or 1, Nq, Nk) where it differs by batch row or head.

        >>> from regard.positions import alibi
        >>> alibi(1, slopes=[1.0]).dense(2, 3).tolist()      # the 2 queries are the last 2 of 3 positions
        [[-1.0, -0.0, -1.0], [-2.0, -1.0, -0.0]]

        Args:
            nq: number of queries.
            nk: number of keys; default nq.
            device: of the matrix.
            dtype: of the matrix.

        Raises:
            ValueError: the bias does not fit these lengths.
        """
        nk = nq if nk is None else nk
        self.fit(*self.leading, nq, nk)
        return self._matrix(nq, nk, device, dtype)


@dataclass(frozen=True, eq=False, repr=False)
class OffsetBias(Bias):
    """A bias that compares positions: key j at j, query i at i + offset."""

    offset: Number | None = field(default=None, kw_only=True)

    def shared_with_offset(self, batch: int, heads: int) -> tuple[int, int]:
        """(B, H) over which the bias varies, from the sizes of its other tensors and the offset's."""
        b, h = leading_of(self.offset)
        return size_or_one("batch", [batch, b]), size_or_one("heads", [heads, h])

    def offset_text(self) -> str:
        """The offset as the end of a repr; empty for the default."""
        offset = self.offset.tolist() if isinstance(self.offset, Tensor) else self.offset
        return "" if offset is None else f", offset={offset}"


@dataclass(frozen=True, eq=False, repr=False)
class DenseBias(Bias):
    """The bias of `dense()`; public, because backends take its cells as they are."""

    cells: Tensor  # (B or 1, H or 1, Nq or 1, Nk or 1)

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
        cell = cell_of(self.cells.to(device))
        return lambda b, h, i, j: cell(b, h, i, j).to(dtype)

    def __repr__(self) -> str:
        return f"dense(<{'×'.join(str(n) for n in self.cells.shape if n != 1) or '1'} {self.cells.dtype}>)"


def dense(cells: object) -> Bias:
    """A bias from numbers: (Nq, Nk), (H, Nq, Nk) or (B or 1, H or 1, Nq, Nk). Indices, not positions.

    >>> dense(torch.zeros(3, 5))
    dense(<3×5 torch.float32>)

    Args:
        cells: floating point; an axis of 1 stands for all.

    Raises:
        TypeError: cells are not floating point.
        ValueError: cells have another number of axes.
    """
    values = cells if isinstance(cells, Tensor) else numbers("bias", cells)
    if not values.dtype.is_floating_point:
        raise TypeError(f"a bias must be floating point, got {values.dtype}; booleans are a mask: pass mask=…")
    if not 2 <= values.ndim <= 4:
        raise ValueError(f"a bias must have 2 to 4 axes, got shape {tuple(values.shape)}")
    return DenseBias(values[(None,) * (4 - values.ndim)])


def as_bias(bias: object, shape: tuple[int, ...]) -> Bias | None:
    """Read the `bias=` argument of a call whose weights have `shape` (…, Nq, Nk): None, a Bias, or numbers.

    >>> as_bias(torch.zeros(3, 5), (2, 4, 3, 5))
    dense(<3×5 torch.float32>)

    Raises:
        TypeError: anything else.
        ValueError: the numbers do not broadcast to the shape.
    """
    if bias is None or isinstance(bias, Bias):
        return bias
    if not isinstance(bias, (np.ndarray, Tensor)):
        raise TypeError(f"bias must be a regard bias, floating-point numbers or None; got {type(bias).__name__}")
    cells = bias if isinstance(bias, Tensor) else numbers("bias", bias)
    if not cells.dtype.is_floating_point:
        raise TypeError(f"bias must be floating point, got {cells.dtype}; booleans are a mask: pass mask=…")
    return DenseBias(fit_cells("bias", cells, shape))
