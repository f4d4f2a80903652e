"""Positions: how order enters attention.

Three kinds, by where they act:
- added to the input x: `sinusoidal`, `sinusoidal_2d`, `Learned`;
- rotating q and k: `Rotary`, from `regard/rotary.py`, by its method `turn(x, positions)`;
- added to the scores: biases, values evaluated on tiles and never an N×N tensor unless you bring one: `alibi`, `dense`,
  and the learned modules `T5`, `Shaw`, `Swin`. Each has a method `bias(q, scale)`; see `regard/masks/biases.py`.

Query i stands at position i + offset, with offset Nk − Nq unless given, as in `regard.masks`; key j at position j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from regard.checks import check_int, local
from regard.masks.biases import Bias, OffsetBias, as_bias, dense
from regard.masks.mask import IndexRule, cell_of, four_axes, place, read_offset
from regard.rotary import DynamicNTK, LinearScaling, Llama3, LongRope, Rotary, Scaling, Yarn

__all__ = [
    "T5",
    "Bias",
    "DynamicNTK",
    "Learned",
    "LinearScaling",
    "Llama3",
    "LongRope",
    "Relative",
    "Rotary",
    "Scaling",
    "Shaw",
    "Swin",
    "Yarn",
    "alibi",
    "as_bias",
    "dense",
    "sinusoidal",
    "sinusoidal_2d",
]

CPU = torch.device("cpu")


# --------------------------------------------------------------------------------------------------- added to the input


def sinusoidal(n: int, d: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The fixed table of the 2017 paper, (n, d): sines in the even columns, cosines in the odd ones.

    >>> sinusoidal(2, 4).round(decimals=2).tolist()
    [[0.0, 1.0, 0.0, 1.0], [0.8399999737739563, 0.5400000214576721, 0.009999999776482582, 1.0]]

    Columns 2p and 2p + 1 turn by base^(−2p/d) per position. Computed in fp64, then rounded to `dtype`.

    Args:
        n: positions 0 to n − 1.
        d: columns, even.
        base: of the frequencies.
        dtype: of the table.

    Raises:
        ValueError: d is odd, or n or d is below 1.
    """
    check_int("n", n, 1)
    if check_int("d", d, 1) % 2:
        raise ValueError(f"d must be even, for each sine has its cosine; got {d}")
    frequencies = float(base) ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)  # (d/2,)
    angles = torch.arange(n, dtype=torch.float64).unsqueeze(-1) * frequencies  # (n, d/2)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(dtype)  # (n, d)


def sinusoidal_2d(
    height: int, width: int, d: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The fixed table for an image of height × width patches in row-major order, (height·width, d).

    >>> table = sinusoidal_2d(2, 3, 8)                       # patches (0,0) (0,1) (0,2) (1,0) (1,1) (1,2)
    >>> torch.equal(table[4, :4], sinusoidal(2, 4)[1]), torch.equal(table[5, 4:], sinusoidal(3, 4)[2])
    (True, True)

    The first d/2 columns are `sinusoidal` of the patch's row, the last d/2 of its column.

    Args:
        height: rows of patches.
        width: columns of patches.
        d: columns of the table, a multiple of 4.
        base: of the frequencies.
        dtype: of the table.

    Raises:
        ValueError: d is not a multiple of 4, or a size is below 1.
    """
    if check_int("d", d, 1) % 4:
        raise ValueError(f"d must be a multiple of 4, a sine and a cosine for row and for column; got {d}")
    check_int("height", height, 1)
    check_int("width", width, 1)
    rows = sinusoidal(height, d // 2, base=base, dtype=dtype).repeat_interleave(width, 0)  # (height·width, d/2)
    columns = sinusoidal(width, d // 2, base=base, dtype=dtype).repeat(height, 1)  # (height·width, d/2)
    return torch.cat([rows, columns], -1)


class Learned(nn.Module):
    """One learned vector per position, added to the input (BERT, GPT-2, ViT).

    >>> Learned(16, 8)(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 5, 8])

    Args:
        n: the largest number of positions.
        d: columns.

    Raises:
        ValueError: n or d is below 1.
    """

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.table = _table(check_int("n", n, 1), check_int("d", d, 1))  # (n, d)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Add the vectors of positions start to start + N − 1 to x (…, N, d).

        Args:
            x: (…, N, d).
            start: position of the first token, for decoding with a cache.

        Raises:
            ValueError: the positions run past n, or x has another width than d.
        """
        n, d = self.table.shape
        if x.ndim < 2 or x.shape[-1] != d:
            raise ValueError(f"x must be (…, N, {d}), got shape {tuple(x.shape)}")
        end = check_int("start", start, 0) + x.shape[-2]
        if end > n:
            raise ValueError(f"there are {n} learned positions, but {x.shape[-2]} tokens from {start} on need {end}")
        return x + self.table[start:end]


# ------------------------------------------------------------------------------- added to the scores: terms by distance


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(OffsetBias):
    """−slope·distance, one slope per head (H,). Make one with `alibi`."""

    slopes: Tensor

    @property
    def leading(self) -> tuple[int, int]:
        """(B, H) over which the bias varies; 1 where it is the same for all."""
        return self.shared_with_offset(1, self.slopes.shape[0])

    @property
    def by_distance(self) -> bool:
        """True."""
        return True

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j) = −slope·|i + offset − j|."""
        offset = place(self.offset, nq, nk, device)
        slope = cell_of(self.slopes.to(dtype).to(device).view(1, -1, 1, 1))
        return lambda b, h, i, j: -slope(b, h, i, j) * (i + offset(b, h) - j).abs()

    def __repr__(self) -> str:
        return f"alibi(<{self.slopes.shape[0]} slopes>{self.offset_text()})"


def alibi(num_heads: int, *, offset: object = None, slopes: object = None) -> Bias:
    """ALiBi (Press et al. 2021): each head lowers a score by its slope times the distance between query and key.

    >>> alibi(2).dense(1, 3)[0, :, 0].tolist()               # slopes 1/16 and 1/256
    [[-0.125, -0.0625, -0.0], [-0.0078125, -0.00390625, -0.0]]

    The distance is |i − j|. The paper is causal and writes i − j, which is the same wherever j ≤ i; without a causal
    mask keys ahead are lowered as keys behind are.

    Args:
        num_heads: H.
        offset: position of query 0; default Nk − Nq. One integer, or one per batch row.
        slopes: H numbers in place of the paper's, 2^(−8/H), 2^(−16/H), …. If H is not a power of two, the slopes of
            the power below come first, then every second one of the power above, as in the paper's code and BLOOM.

    Raises:
        TypeError: slopes that are not floating point.
        ValueError: num_heads below 1, or not H slopes.
    """
    check_int("num_heads", num_heads, 1)
    if slopes is None:
        below = 2 ** (num_heads.bit_length() - 1)  # the largest power of two that is not above H

        def powers(count: int) -> Tensor:
            return 2.0 ** (-8 * torch.arange(1, count + 1, dtype=torch.float64) / count)

        values = torch.cat([powers(below), powers(2 * below)[0::2][: num_heads - below]])
    else:
        values = torch.as_tensor(slopes)
    if not values.dtype.is_floating_point:
        raise TypeError(f"slopes must be floating point, got {values.dtype}")
    if values.shape != (num_heads,):
        raise ValueError(f"slopes must be one per head, ({num_heads},), got shape {tuple(values.shape)}")
    return Alibi(values, offset=read_offset(offset))


@dataclass(frozen=True, eq=False, repr=False)
class Relative(OffsetBias):
    """A term for each distance from −k to k, shared by all farther ones: the bias of `T5` and `Shaw`.

    >>> near = torch.tensor([[[[-1.0, 0.0, 1.0]]]])          # key before, same position, key after
    >>> Relative(near).dense(3).tolist()
    [[0.0, 1.0, 1.0], [-1.0, 0.0, 1.0], [-1.0, -1.0, 0.0]]

    terms: (B or 1, H or 1, Nq or 1, 2k + 1).
    """

    terms: Tensor

    def __post_init__(self) -> None:
        assert self.terms.ndim == 4, self.terms.shape
        assert self.terms.shape[-1] % 2, self.terms.shape

    @property
    def leading(self) -> tuple[int, int]:
        """(B, H) over which the bias varies; 1 where it is the same for all."""
        return self.shared_with_offset(self.terms.shape[0], self.terms.shape[1])

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError if the terms are for other batch rows, heads or queries."""
        super().fit(batch, heads, nq, nk)
        if self.terms.shape[2] not in (1, nq):
            raise ValueError(f"{self!r} is made from {self.terms.shape[2]} queries, but the call has {nq}")

    @property
    def by_distance(self) -> bool:
        """False if the terms depend on the queries, as Shaw's do."""
        return self.terms.shape[2] == 1

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j): the term at clip(j − i − offset, −k, k) + k."""
        offset, far = place(self.offset, nq, nk, device), self.terms.shape[-1] // 2
        term = cell_of(self.terms.to(device=device, dtype=dtype))
        return lambda b, h, i, j: term(b, h, i, (j - i - offset(b, h)).clamp(-far, far) + far)

    def placed(self, offset: object) -> Relative:
        """The same terms with query 0 at another position than Nk − Nq: one integer, or one per batch row.

        >>> Relative(torch.zeros(1, 1, 1, 3)).placed(4)
        Relative(<1×1×1×3 torch.float32>, offset=4)
        """
        return replace(self, offset=read_offset(offset))

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.terms.shape))
        return f"Relative(<{shape} {self.terms.dtype}>{self.offset_text()})"


class T5(nn.Module):
    """T5's relative positions (Raffel et al. 2019): a learned number per head and bucket of distances.

    >>> t5 = T5(num_heads=2, buckets=8, max_distance=16)
    >>> t5.bias(torch.randn(1, 2, 5, 4), 1.0).dense(5).shape
    torch.Size([1, 2, 5, 5])

    Near distances have a bucket each, farther ones share buckets that widen up to max_distance; beyond it all share
    the last. The learned `table` is (buckets, H). Costs (2·max_distance + 1)·H numbers per call.

    Args:
        num_heads: H.
        buckets: of distances.
        max_distance: the largest distance with a term of its own.
        bidirectional: half of the buckets for keys behind, half for keys ahead; if not, keys ahead are in bucket 0
            and are meant to be masked.

    Raises:
        ValueError: buckets or max_distance are too few.
    """

    def __init__(
        self, num_heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        self.runs = _bucket_runs(buckets, max_distance, bidirectional)  # (bucket, how many distances), in order
        self.table = _table(buckets, check_int("num_heads", num_heads, 1))  # (buckets, H)

    def bias(self, q: Tensor, scale: float) -> Relative:
        """The bias; q and scale are not used, all positions have this signature."""
        # Runs of equal rows, not an index tensor: nothing is copied to the device, nothing lost on the meta device.
        rows = local(self.table).unbind()
        terms = torch.cat([rows[bucket].expand(length, -1) for bucket, length in self.runs])  # (2·max_distance + 1, H)
        return Relative(terms.mT[None, :, None])  # (1, H, 1, 2·max_distance + 1)


class Shaw(nn.Module):
    """Relative positions in the keys (Shaw et al. 2018): score(i, j) = q_i·(k_j + a_(j−i))·scale.

    >>> shaw = Shaw(head_dim=4, max_distance=3)
    >>> q = torch.randn(2, 5, 7, 4)
    >>> shaw.bias(q, scale=0.5).dense(7).shape
    torch.Size([2, 5, 7, 7])

    The bias is q_i·a·scale, made once per distance: O(N·max_distance) memory, no N×N. The paper's second table, a term
    added to the values, is not here: it is a sum over the weights, which a fused kernel never hands out.

    Args:
        head_dim: D.
        max_distance: distances are clipped to ±max_distance. The learned `table` is (2·max_distance + 1, D).
        num_heads: a table for each head, (H, 2·max_distance + 1, D); default one for all.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, head_dim: int, max_distance: int, *, num_heads: int | None = None) -> None:
        super().__init__()
        shape = (2 * check_int("max_distance", max_distance, 1) + 1, check_int("head_dim", head_dim, 1))
        self.table = _table(*shape) if num_heads is None else _table(check_int("num_heads", num_heads, 1), *shape)

    def bias(self, q: Tensor, scale: float) -> Relative:
        """The bias for these queries (…, H, Nq, D), (B, Nq, D) or (Nq, D), and the scale that their scores get.

        Raises ValueError if q has another head size or number of heads than the table.
        """
        q = four_axes(q)  # (B, H, Nq, D)
        if q.shape[-1] != self.table.shape[-1]:
            raise ValueError(f"q has head size {q.shape[-1]}, but this Shaw table has {self.table.shape[-1]}")
        if self.table.ndim == 3 and q.shape[1] != self.table.shape[0]:
            raise ValueError(f"q has {q.shape[1]} heads, but this Shaw table has {self.table.shape[0]}")
        dtype = torch.promote_types(q.dtype, torch.float32)
        # Scores are fp32 or wider; autocast would round this product, a part of the scores, to half precision.
        with torch.autocast(q.device.type, enabled=False):
            terms = q.to(dtype) @ self.table.to(dtype).mT * scale  # (B, H, Nq, 2·max_distance + 1)
        return Relative(terms)


# ----------------------------------------------------------------------------- added to the scores: windows of an image


@dataclass(frozen=True, eq=False, repr=False)
class SwinBias(Bias):
    """A term for each difference of rows and of columns between two patches of one window: the bias of `Swin`."""

    table: Tensor  # ((2h − 1)(2w − 1), H)
    window: tuple[int, int]

    @property
    def leading(self) -> tuple[int, int]:
        """(B, H) over which the bias varies; 1 where it is the same for all."""
        return 1, self.table.shape[1]

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError unless queries and keys are the patches of one window."""
        super().fit(batch, heads, nq, nk)
        height, width = self.window
        if not nq == nk == height * width:
            raise ValueError(f"{self!r} is for {height * width} patches, but the call has {nq} queries × {nk} keys")

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j): the term at (row i − row j, column i − column j), shifted to start at 0."""
        height, width = self.window
        term = cell_of(self.table.to(device=device, dtype=dtype).mT[None, :, None])  # (1, H, 1, cells)

        def between(b: Any, h: Any, i: Any, j: Any) -> Any:
            rows, columns = i // width - j // width, i % width - j % width
            return term(b, h, i, (rows + height - 1) * (2 * width - 1) + columns + width - 1)

        return between

    def everywhere(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(1, H, N, N) from windows of the table: a tenth of the cost of evaluating cell by cell."""
        height, width = self.window
        table = self.table.to(device=device, dtype=dtype).mT.reshape(-1, 2 * height - 1, 2 * width - 1)
        rows = table.unfold(1, height, 1).unfold(2, width, 1)  # (H, row i, column i, h − 1 − row j, w − 1 − column j)
        return rows.flip(-1, -2).reshape(1, -1, nq, nk)

    def __repr__(self) -> str:
        return f"SwinBias({self.window[0]}×{self.window[1]} patches, {self.table.shape[1]} heads)"


class Swin(nn.Module):
    """Swin's relative positions (Liu et al. 2021): a learned number per head and offset between two patches.

    >>> swin = Swin(window=(2, 3), num_heads=4)
    >>> swin.bias(torch.randn(1, 4, 6, 8), 1.0).dense(6).shape
    torch.Size([1, 4, 6, 6])

    The learned `table` is ((2h − 1)(2w − 1), H).

    Args:
        window: (h, w), whose h·w patches come in row-major order, each window a batch row of the call.
        num_heads: H.

    Raises:
        TypeError: window is not two integers.
        ValueError: a size below 1.
    """

    def __init__(self, window: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        if not isinstance(window, Sequence) or len(window) != 2:
            raise TypeError(f"window must be two integers (height, width), got {window!r}")
        self.window = check_int("window height", window[0], 1), check_int("window width", window[1], 1)
        self.table = _table((2 * window[0] - 1) * (2 * window[1] - 1), check_int("num_heads", num_heads, 1))

    def bias(self, q: Tensor, scale: float) -> SwinBias:
        """The bias; q and scale are not used, all positions have this signature."""
        return SwinBias(local(self.table), self.window)


def _table(*shape: int) -> nn.Parameter:
    # 0.02 is what BERT, GPT-2 and Swin start position tables with.
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(*shape), std=0.02))


def _bucket_runs(buckets: int, max_distance: int, bidirectional: bool) -> tuple[tuple[int, int], ...]:
    """T5's buckets of the distances −max_distance to max_distance in order, as (bucket, how many distances)."""
    if check_int("buckets", buckets, 4 if bidirectional else 2) % 2 and bidirectional:
        raise ValueError(f"buckets must be even when bidirectional, half for keys behind and half ahead; got {buckets}")
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2  # distances that have a bucket each
    if check_int("max_distance", max_distance, 1) <= exact:
        raise ValueError(f"max_distance must be above {exact}, the distances with a bucket each; got {max_distance}")
    distance = torch.arange(max_distance + 1, device=CPU)
    # In fp32, as T5 was trained: a logarithm in fp64 would move distances at a bucket's edge into the next bucket.
    share = (distance.clamp(min=exact).float() / exact).log() / math.log(max_distance / exact)  # 0 to 1
    far = (exact + (share * (side - exact)).long()).clamp(max=side - 1)
    behind: list[int] = torch.where(distance < exact, distance, far).tolist()  # distances 0, −1, −2, …
    ahead = [side + bucket for bucket in behind[1:]] if bidirectional else [0] * max_distance
    return tuple((bucket, len(list(run))) for bucket, run in groupby(behind[::-1] + ahead))
