"""`check`: whether every row of attention weights is valid."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from regard.checks import check_dense

Array = np.ndarray[Any, Any]

LISTED = 10  # bad rows that a report describes one by one; the rest it counts

Kind = Literal["nan", "infinite", "negative", "above one", "sum"]
"""What can be wrong with a row, the worst first."""


@dataclass(frozen=True)
class Problem:
    """A row that is not attention weights. Prints as "batch 0, head 3, row 5: sums to 1.5, not to 1"."""

    kind: Kind  # the worst thing that is wrong with the row
    batch: int | tuple[int, ...] | None  # None without a batch axis; a tuple of the leading indices beyond 4 axes
    head: int | None
    row: int  # the query
    value: float  # the wrong weight, or the row's wrong sum
    message: str

    def __str__(self) -> str:
        places = {"batch": self.batch, "head": self.head, "row": self.row}
        return ", ".join(f"{name} {at}" for name, at in places.items() if at is not None) + f": {self.message}"


@dataclass(frozen=True, repr=False)
class Report:
    """The result of `check`. True if every row is valid; prints as a few lines.

    Attributes:
        rows: number of rows.
        empty_rows: number of rows that are all zero, as a row that sees nothing is.
        bad_rows: number of rows that are not attention weights.
        problems: the first of those, at most `LISTED`.
        tolerance: how far from 1 a sum was allowed to be.
        edited: the weights were edited after their softmax, so only NaN and infinite ones count as bad.
    """

    rows: int
    empty_rows: int
    bad_rows: int
    problems: tuple[Problem, ...]
    tolerance: float
    edited: bool = False

    @property
    def ok(self) -> bool:
        """Whether every row is attention weights."""
        return self.bad_rows == 0

    def raise_if_bad(self) -> None:
        """Raise ValueError with the whole report if a row is bad."""
        if not self.ok:
            raise ValueError(str(self))

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        allowed = f"(tolerance {self.tolerance:.3g})"
        if self.edited:
            allowed = "(edited after softmax: sums and signs are not judged)"
        if self.ok:
            empty = f", {self.empty_rows} of them empty" if self.empty_rows else ""
            return f"{_rows(self.rows)} of attention weights{empty} {allowed}"
        verb = "is" if self.bad_rows == 1 else "are"
        lines = [f"{self.bad_rows} of {_rows(self.rows)} {verb} not attention weights {allowed}:"]
        lines += [f"  {problem}" for problem in self.problems]
        more = self.bad_rows - len(self.problems)
        return "\n".join(lines + ([f"  and {_rows(more)} more"] if more else []))

    def __repr__(self) -> str:
        return str(self)


def check(weights: object, *, tolerance: float | None = None, sinks: bool = False) -> Report:
    """Check every row of attention weights.

    A row is valid if it holds no NaN, every weight is in [0, 1], and it sums to 1 or is all zero (a row that sees
    nothing). One problem is reported per row, the worst: NaN, infinite, below 0, above 1, wrong sum.

    Softmax never rounds to below 0, so that is judged exactly. A sum or a weight may exceed 1, and a sum fall short of
    it, by eps(T) + Nk · (eps(W) + tiny(T)), with T the weights' dtype and W the wider of T and float32: weights rounded
    to T sum to 1 ± eps(T)/2, a divisor rounded to T costs as much again, a sum of Nk terms in W is off by at most
    Nk · eps(W)/2, once where the row was normalised and once here, and a weight below T's normal numbers by tiny(T).
    Weights that were divided by their sum pass at any length; exp(score − lse) carries the rounding of score and lse
    too, and may need a tolerance of its own.

    Args:
        weights: NumPy array or torch tensor of floats, (Nq, Nk), (B, Nq, Nk) or (…, H, Nq, Nk). They are only read;
            besides a float32 copy of narrower torch weights, memory is taken per row.
        tolerance: how far from 1 a sum may be, instead of the above.
        sinks: True if a sink logit joined the softmax, so that any sum from 0 to 1 is right.

    Returns:
        A report that is True if all rows are valid.

    Raises:
        TypeError: for weights that are not floats or an argument of another type.
        ValueError: for fewer than 2 axes, a tolerance that is negative or not finite, and rows so long and coarse that
            rounding alone can change a sum by 1.

    Example:
        >>> import torch
        >>> report = check(torch.tensor([[0.5, 0.5], [float("nan"), 0.0], [0.0, 0.0]]))
        >>> report.ok, report.rows, report.empty_rows, report.problems[0].kind, report.problems[0].row
        (False, 3, 1, 'nan', 1)
    """
    if isinstance(weights, Tensor):
        check_dense("weights", weights)
        cells: Array | Tensor = weights.detach()
        floating = weights.dtype.is_floating_point
    elif isinstance(weights, np.ndarray):
        cells = np.asarray(weights)  # a subclass may reduce in its own way
        floating = np.issubdtype(weights.dtype, np.floating)
    else:
        raise TypeError(f"weights must be a NumPy array or a torch tensor, got {type(weights).__name__}")
    if not floating:
        raise TypeError(f"weights must be floats, got {cells.dtype}; attention weights are the softmax of scores")
    if cells.ndim < 2:
        raise ValueError(f"weights must have 2 axes or more (…, Nq, Nk), got shape {tuple(cells.shape)}")
    if not isinstance(sinks, bool):
        raise TypeError(f"sinks must be True or False (did sinks join the softmax?), got {type(sinks).__name__}")
    if tolerance is None:
        allowed = _rounding(cells)
    elif isinstance(tolerance, bool) or not isinstance(tolerance, (int, float, np.integer, np.floating)):
        raise TypeError(f"tolerance must be a number or None, got {type(tolerance).__name__}: {tolerance!r}")
    elif not (isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be finite and at least 0, got {tolerance}")
    else:
        allowed = float(tolerance)
    return judge(*_reduced(cells), tolerance=allowed, sinks=sinks)


def judge(low: Array, high: Array, total: Array, *, tolerance: float, sinks: bool, edited: bool = False) -> Report:
    """The report from each row's smallest weight, largest weight and sum, (…, Nq) each; a NaN is in all three."""
    empty = (low == 0) & (high == 0)
    above, below = total - 1 > tolerance, ~empty & (1 - total > tolerance)
    findings: dict[Kind, tuple[Array, Array]] = {  # which rows, and the number that is wrong in them
        "nan": (np.isnan(low), low),
        "infinite": (np.isinf(low) | np.isinf(high), np.where(np.isinf(low), low, high)),
        "negative": (low < 0, low),
        "above one": (high - 1 > tolerance, high),
        "sum": (above if sinks else above | below, total),
    }
    if edited:  # rows need not sum to 1, and a difference of weights may be negative
        findings = {kind: findings[kind] for kind in ("nan", "infinite")}
    bad = np.logical_or.reduce([rows for rows, _ in findings.values()])  # (…, Nq)
    problems = []
    for at in zip(*np.unravel_index(np.flatnonzero(bad)[:LISTED], bad.shape), strict=True):
        kind = next(kind for kind, (rows, _) in findings.items() if rows[at])
        value = float(findings[kind][1][at])
        *lead, row = (int(i) for i in at)
        head = lead.pop() if len(lead) > 1 else None
        batch = tuple(lead) if len(lead) > 1 else lead[0] if lead else None
        digits = f"{value:.7g}" if f"{value:.7g}" != "1" else repr(value)  # few, unless they hide the difference from 1
        messages: dict[Kind, str] = {
            "nan": "holds NaN; often a row whose keys are all hidden",
            "infinite": f"holds {value}",
            "negative": f"has the weight {digits}, below 0",
            "above one": f"has the weight {digits}, above 1",
            "sum": f"sums to {digits}, {'above 1' if sinks else 'not to 1'}",
        }
        problems.append(Problem(kind, batch, head, row, value, messages[kind]))
    return Report(bad.size, int(empty.sum()), int(bad.sum()), tuple(problems), tolerance, edited)


def _rounding(cells: Array | Tensor) -> float:
    """How far rounding alone can carry a row's sum from 1."""
    if isinstance(cells, Tensor):
        own: Any = torch.finfo(cells.dtype)
        wide: Any = torch.finfo(_wide(cells.dtype))
    else:
        own, wide = np.finfo(cells.dtype), np.finfo(np.result_type(cells.dtype, np.float32))
    tiny = float(own.smallest_normal) * float(own.eps)
    bound = float(own.eps) + cells.shape[-1] * (float(wide.eps) + tiny)
    if bound >= 1:
        raise ValueError(
            f"rows of {cells.shape[-1]} weights in {cells.dtype} cannot be checked: rounding alone may change a sum by "
            f"{bound:.3g}; check them before they are rounded to {cells.dtype}, or give tolerance=…"
        )
    return bound


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reduced(cells: Array | Tensor) -> tuple[Array, ...]:
    """Smallest weight, largest weight and sum of each row, (…, Nq) in float64 or wider; a NaN is in all three."""
    if cells.shape[-1] == 0:
        none = np.zeros(tuple(cells.shape[:-1]))
        return none, none, none
    if isinstance(cells, Tensor):
        cells = cells.to(_wide(cells.dtype))
        low, high = cells.aminmax(dim=-1)
        return tuple(x.cpu().double().numpy() for x in (low, high, cells.sum(-1)))
    wide = np.result_type(cells.dtype, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # inf − inf and overflow are findings here
        reduced = cells.min(-1), cells.max(-1), cells.sum(-1, dtype=wide)
    return tuple(x.astype(np.result_type(wide, np.float64)) for x in reduced)


def _rows(count: int) -> str:
    return f"{count:,} row" if count == 1 else f"{count:,} rows"
