"""Block-sparse attention as BigBird has it, at a cost that grows with the text: a text is cut into blocks of tokens.

    ■ ■ ■ ■ ■ ■ ■ ■        rows and columns: blocks.  The first and the last see all and are seen by all, the others see
    ■ ■ ■ · ▒ · · ■        their neighbours (■) and a few blocks drawn at random (▒).
    ■ ■ ■ ■ · · ▒ ■
    ■ · ■ ■ ■ ▒ · ■        Google's code and transformers gather keys block by block, so a block that is drawn where it
    ■ · · ■ ■ ■ ▒ ■        is seen already counts twice in the softmax. And transformers draws in training only:
    ■ ▒ · · ■ ■ ■ ■        otherwise every block "drawn" is the first one, which so counts 1 + random times.
    ■ · ▒ · · ■ ■ ■        A key counted n times is a key with ln n added to its score: that is how it is computed here,
    ■ ■ ■ ■ ■ ■ ■ ■        as a mask by blocks and a bias by blocks. The numbers agree, and a weight is one weight.

Nothing here is N×N.

Axis letters: B batch, H heads, N positions, R blocks of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard import masks
from regard.masks import Mask
from regard.masks.biases import Bias
from regard.masks.rules import IndexRule, cell_of
from regard.nn.attention import ContextKeys, MultiHeadAttention
from regard.nn.cache import Cache
from regard.op import attention
from regard.rotary import Angles

__all__ = ["BlockAttention", "Repeated", "block_counts", "drawn_blocks"]

PAPER = (1024, 3072, 4096)
"""Lengths for which transformers draws as the paper's code does: among the first 1024 tokens of the longest text."""

Blocks = NDArray[np.int64]


def drawn_blocks(tokens: int, size: int, *, num_heads: int, random: int, seed: int, longest: int) -> Blocks:
    """The blocks drawn for each head and block row but the first and last, (H, R − 2, random), as transformers draws.

    >>> drawn_blocks(36, 4, num_heads=1, random=1, seed=0, longest=64)[0].T
    array([[3, 4, 5, 2, 2, 4, 1]])

    tokens: of the text, a multiple of size.  size: tokens of a block.  random: blocks drawn for a row.
    seed: the layer's number.  longest: the most positions of the model.
    Raises ValueError where there are fewer blocks to draw from than are wanted.
    """
    numbers = np.random.RandomState(seed)  # the generator behind np.random.seed: its draws are the specification
    rows = tokens // size - 2
    if tokens in PAPER:
        each = [_drawn_in_front(numbers, longest // size, size, random) for _ in range(num_heads)]
        return np.stack(each)[:, :rows]
    drawn = np.zeros((num_heads, rows, random), dtype=np.int64)
    for row in range(1, rows + 1):
        for head in range(num_heads):
            drawn[head, row - 1] = _drawn_apart(numbers, row, random)
    return drawn


def _drawn_in_front(numbers: np.random.RandomState, across: int, size: int, random: int) -> Blocks:
    """(across − 2, random): from the blocks of the first 1024 tokens, apart from a row's neighbours, mostly.

    In the last two rows, and behind the first 1024 tokens, a neighbour may be drawn. transformers does it so.
    """
    middle = np.arange(1, across - 1, dtype=np.int32)
    last = 1024 // size - 1 if 2 * size < 1024 else across - 1
    drawn = np.zeros((across - 2, random), dtype=np.int64)
    for row in range(1, across - 1):
        before, after = row - 2, row + 1
        if row <= 2:
            among = middle[row + 1 : last]
        elif row >= across - 3 or before > last:
            among = middle[:last]
        elif after == last:
            among = middle[:before]
        else:
            among = np.concatenate([middle[:before], middle[after:last]])
        if len(among) < random:
            raise ValueError(f"block row {row} has {len(among)} blocks to draw {random} from: take smaller blocks")
        drawn[row - 1] = numbers.permutation(among)[:random]
    return drawn


def _drawn_apart(numbers: np.random.RandomState, row: int, random: int) -> list[int]:
    """The blocks drawn for one row, among the first 5 + 2·random: not its neighbours, nor the first and last there."""
    end = 5 + 2 * random
    refused = {row - 1, row, row + 1, 0, end - 1}
    refused |= {end - 2} if row == 1 else set()
    refused |= {1} if row == end - 2 else set()
    order = numbers.permutation(np.arange(end, dtype=np.int32))
    return [block for block in order.tolist() if block not in refused][:random]


def block_counts(across: int, drawn: Tensor) -> Tensor:
    """How often each block of queries counts each block of keys, (H, R, R): 0 where it does not see it.

    >>> block_counts(6, torch.full((1, 4, 2), 0))[0]
    tensor([[1, 1, 1, 1, 1, 1],
            [3, 1, 1, 0, 0, 1],
            [3, 1, 1, 1, 0, 1],
            [3, 0, 1, 1, 1, 1],
            [3, 0, 0, 1, 1, 1],
            [1, 1, 1, 1, 1, 1]])

    across: R, blocks of the text.  drawn: (H, R − 2, random) blocks, as `drawn_blocks` gives them.
    """
    place = torch.arange(across)
    seen = (place[:, None] - place).abs() <= 1
    seen[[0, -1]] = seen[:, [0, -1]] = True
    counts = seen.long().expand(len(drawn), -1, -1).clone()
    counts[:, 1:-1].scatter_add_(2, drawn, torch.ones_like(drawn))
    return counts


@dataclass(frozen=True, eq=False, repr=False)
class Repeated(Bias):
    """ln n for a key that counts n times: as if it stood there n times, its weights added up.

    >>> Repeated(torch.tensor([[[[1, 2]]]]), 3)
    Repeated(<2 counts, 2 at most>, size=3)

    counts: (1, H or 1, R, R) whole numbers by block; where there are none the mask hides the block.
    size: tokens of a block.
    """

    counts: Tensor
    size: int

    @property
    def leading(self) -> tuple[int, int]:
        """(1, H or 1)."""
        return 1, self.counts.shape[1]

    def one_per_tile(self, size: tuple[int, int]) -> bool:
        """Where tiles lie within blocks."""
        return self.size % size[0] == 0 and self.size % size[1] == 0

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j): the logarithm of how often key j counts for query i."""
        count, size, logs = cell_of(self.counts.to(device)), self.size, self._logs(device, dtype)
        return lambda b, h, i, j: logs[count(b, h, i // size, j // size).int()]

    def _logs(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """ln n by n, made once: so the table by block and head is one of counts, two bytes each."""
        key = ("logs", device, dtype)
        if key not in self.kept:
            most = int(self.counts.max())  # a wait for the device
            with torch.inference_mode(False):  # a later call may differentiate with it
                self.kept[key] = torch.arange(most + 1, device=device, dtype=dtype).clamp(min=1).log()
        return cast(Tensor, self.kept[key])

    def __repr__(self) -> str:
        shape = "×".join(str(n) for n in self.counts.shape if n != 1)
        return f"Repeated(<{shape} counts, {int(self.counts.max())} at most>, size={self.size})"


class BlockDraw(NamedTuple):
    """What drawing depends on, beside the blocks."""

    num_heads: int
    seed: int
    longest: int


@lru_cache(maxsize=64)
def _rules(
    plan: BlockDraw | None, across: int, size: int, random: int, device: torch.device
) -> tuple[Mask, Bias | None]:
    """The mask and the bias of a text of `across` blocks, whose plan says what is drawn; None draws the first block.

    They are kept, and so is what backends keep with a mask: without a plan all layers share one.
    """
    drawn = np.zeros((1, across - 2, random), dtype=np.int64)
    if plan is not None:
        tokens, longest = across * size, plan.longest
        drawn = drawn_blocks(tokens, size, num_heads=plan.num_heads, random=random, seed=plan.seed, longest=longest)
    counts = block_counts(across, torch.from_numpy(drawn))[None]  # (1, H or 1, R, R)
    repeated = Repeated(counts.to(device, torch.int16), size) if bool((counts > 1).any()) else None
    return masks.blocks((counts > 0).to(device), size), repeated


class BlockAttention(MultiHeadAttention):
    """Self-attention among blocks: neighbours, first and last, and some that are drawn; full for short texts (BigBird).

    >>> layer = BlockAttention(6, 2, size=2, random=1, seed=0, longest=64).eval()
    >>> layer.sparse(14), layer.sparse(15), layer(torch.zeros(1, 15, 6)).shape
    (False, True, torch.Size([1, 15, 6]))

    A text of up to (5 + 2·random)·size tokens has too few blocks, and is looked at as a whole, as in transformers. The
    last block of a text may be short. Blocks are drawn in training mode, always the same for one layer and length.

    d_model, num_heads, backend: as in `MultiHeadAttention`; bias: of the queries, keys and values.
    size: tokens of a block.  random: blocks drawn for each block.  seed: of drawing, the layer's number.
    longest: the most positions of the model, on which drawing depends.
    dropout: on the weights where a text is looked at as a whole; among blocks there is none, as in transformers.
    Raises ValueError for a size below 1 and a negative number of blocks, and as `MultiHeadAttention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        size: int,
        random: int,
        seed: int,
        longest: int,
        bias: bool = True,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, num_heads, bias=bias, out_bias=True, fused=True, dropout=dropout, backend=backend)
        for name, value, least in (("size", size, 1), ("random", random, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} of blocks must be a whole number of at least {least}, got {value!r}")
        self.size, self.random, self.seed, self.longest = size, random, seed, longest

    def sparse(self, n: int) -> bool:
        """Is a text of n tokens looked at by blocks?"""
        return n > (5 + 2 * self.random) * self.size

    def rules(self, n: int, device: torch.device) -> tuple[Mask, Bias | None]:
        """Which blocks of a text of n tokens see which, and what counts more than once; None where nothing does."""
        plan = BlockDraw(self.num_heads, self.seed, self.longest) if self.training and self.random else None
        return _rules(plan, -(-n // self.size), self.size, self.random, device)

    def _attend(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None,
        mask: object,
        cache: Cache | None,
        positions: Tensor | Angles | None,
        context_positions: Tensor | None,
    ) -> Tensor:
        """mask: of padding; None for none."""
        self._check(x, context, cache, positions, context_positions)
        if context is not None or cache is not None:
            raise ValueError("blocks are of x itself, all of it at once: leave out context= and cache=")
        if not (mask is None or isinstance(mask, Mask)):
            raise TypeError(f"mask= must be a regard mask, as regard.masks.padding(…), got {type(mask).__name__}")
        if not self.sparse(x.shape[1]):
            return super()._attend(x, None, mask, None, positions, None)
        blocks, bias = self.rules(x.shape[1], x.device)
        q, k, v = self.project(x)  # (B, H, N, D)
        self._check_all_heads(q)
        seen = blocks if mask is None else mask.kept.setdefault(("blocks", id(blocks)), blocks & mask)  # for all layers
        out = attention(q, k, v, mask=seen, bias=bias, scale=self.scale, backend=self.backend)
        return cast(Tensor, self.w_o(out.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        """What `print(layer)` says of it."""
        return f"{super().extra_repr()}, size={self.size}, random={self.random}, seed={self.seed}"
