"""Attention whose cost grows with the text, not with its square: sliding windows (Longformer), blocks (BigBird).

SlidingAttention: a window around each token, and global tokens. Rows are queries; token 0 is global.

    · · · · · · ·        ■ is computed with the local projections, in one call over all tokens.
    ■ ■ ■ · · · ·        A global token's row is empty there: it attends to all tokens with projections of its own,
    ■ ■ ■ ■ · · ·        in a second call, which has as many rows as a text has global tokens.
    ■ · ■ ■ ■ · ·

BlockAttention: rows and columns are blocks of tokens. The first and the last see all and are seen by all, the others
see their neighbours (■) and a few blocks drawn at random (▒).

    ■ ■ ■ ■ ■ ■          Google's code and transformers gather keys block by block, so a block that is drawn where it
    ■ ■ ■ · ▒ ■          is seen already counts twice in the softmax. And transformers draws in training only:
    ■ ■ ■ ■ · ■          otherwise every block "drawn" is the first one, which so counts 1 + random times.
    ■ · ■ ■ ■ ■          A key counted n times is a key with ln n added to its score: that is how it is computed here,
    ■ ▒ · ■ ■ ■          as a mask by blocks and a bias by blocks. The numbers agree, and a weight is one weight.
    ■ ■ ■ ■ ■ ■

Axis letters: B batch, N positions, G most global tokens of a text, H heads, D head size, d width, R blocks of a text.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard import masks
from regard.checks import check_int
from regard.masks import Mask
from regard.masks.biases import Bias
from regard.masks.mask import Bounds, IndexRule, TileGrid, booleans, cell_of
from regard.masks.patterns import fit_length
from regard.nn.attention import MultiHeadAttention
from regard.nn.projections import Cache, ContextKeys, Joined, Linear, apart, split
from regard.op import attention
from regard.rotary import Angles

PAPER = (1024, 3072, 4096)
"""Lengths for which transformers draws as the paper's code does: among the first 1024 tokens of the longest text."""

Blocks = NDArray[np.int64]


class SparseAttention(MultiHeadAttention):
    """Self-attention of whole texts: without a context, a cache or positions."""

    def _attend(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None,
        mask: object,
        cache: Cache | None,
        positions: Tensor | Angles | None,
        context_positions: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        self._check(x, context, cache, positions, context_positions)
        if context is not None or cache is not None:
            raise ValueError(
                f"a {type(self).__name__} attends within x, all of it at once: leave out context= and cache="
            )
        if return_weights:
            raise ValueError(
                f"a {type(self).__name__} never builds its weights whole: leave out return_weights=, and take "
                "`with regard.watch(layer, keep='qk') as seen: layer(x)`, which has their rows, tiles and measures"
            )
        return self._attend_within(x, mask), None

    @abstractmethod
    def _attend_within(self, x: Tensor, mask: object) -> Tensor: ...


# ------------------------------------------------------------------------------------------------------ sliding windows


@dataclass(frozen=True, eq=False, repr=False)
class Roles(Mask):
    """What the tokens of texts are: padding, which neither looks nor is seen; global; or local, as most are.

    >>> roles = Roles.of(None, torch.tensor([[True, False, False, False]]))
    >>> print(roles.local(1).draw(4))
    · · · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    ■ · ■ ■

    As a mask it is the visibility without any window: global tokens see all tokens, the others the global ones.
    """

    tokens: Tensor  # (B or 1, N) booleans, True = a token; one row where all texts have the same
    chosen: Tensor  # (B or 1, N) booleans, True = a global one
    max_global: int  # global tokens of the text with most of them
    alike: bool  # do all texts have as many?
    padded: bool  # is any token padding?

    @classmethod
    def of(cls, mask: Tensor | None, chosen: Tensor) -> Roles:
        """From a mask of tokens, None for all, and global tokens, both (B, N) booleans. Padding is never global."""
        tokens = torch.ones_like(chosen) if mask is None else mask
        fit_length("a mask of tokens", tokens, chosen.shape[1])
        chosen = chosen & tokens
        counts = chosen.sum(1)
        same = torch.stack([(t == t[:1]).all() for t in (tokens, chosen)])
        # One wait for the device: most, least, whether there is padding, and whether one row serves all.
        facts = torch.cat([counts.amax()[None], counts.amin()[None], (~tokens).any()[None], same]).tolist()
        most, least, padded, *shared = facts
        tokens, chosen = (t[:1] if one else t for t, one in zip((tokens, chosen), shared, strict=True))
        return cls(tokens, chosen, int(most), most == least, bool(padded))

    def local(self, reach: int, dilation: int = 1) -> Mask:
        """The mask of the local projections: `reach` tokens to each side, every `dilation`-th, and global ones.

        Layers of the same reach get one mask, with what backends keep with it.
        """
        if (reach, dilation) not in self._local:
            near = sliding(reach, dilation)
            seen = near | masks.padding(self.chosen) if self.max_global else near
            seen = seen & masks.padding(self.tokens) if self.padded else seen
            looking = self.tokens & ~self.chosen
            self._local[reach, dilation] = seen & masks.queries(looking) if self.max_global or self.padded else seen
        return self._local[reach, dilation]

    @cached_property
    def places(self) -> Tensor:
        """(B or 1, G), the places of each text's global tokens, in order; others follow if it has fewer."""
        return self.chosen.long().argsort(dim=1, descending=True, stable=True)[:, : self.max_global]

    @cached_property
    def whole(self) -> Mask | None:
        """The mask of the rows of global tokens, (G, N); None where nothing is hidden."""
        seen = masks.padding(self.tokens) if self.padded else None
        if self.alike:
            return seen
        rows = torch.arange(self.max_global, device=self.chosen.device) < self.chosen.sum(1, keepdim=True)
        return masks.queries(rows) if seen is None else seen & masks.queries(rows)

    @cached_property
    def _local(self) -> dict[tuple[int, int], Mask]:
        return {}

    @cached_property
    def _plain(self) -> Mask:
        return masks.globals(self.chosen) & masks.padding(self.tokens) & masks.queries(self.tokens)

    def varies(self) -> tuple[int, int]:
        """By batch row, the same for all heads."""
        return max(len(self.tokens), len(self.chosen)), 1

    def fit(self, batch: int, num_heads: int, nq: int, nk: int) -> None:
        """Raise ValueError for another number of texts or tokens."""
        super().fit(batch, num_heads, nq, nk)
        self._plain.fit(batch, num_heads, nq, nk)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j)."""
        return self._plain.bind(nq, nk, device, dtype)

    def bounds(self, grid: TileGrid) -> Bounds:
        """Those of the masks it combines."""
        return self._plain.bounds(grid)

    def __repr__(self) -> str:
        return f"Roles(tokens={booleans(self.tokens)}, chosen={booleans(self.chosen)})"


@lru_cache(maxsize=64)  # every layer needs it in every call, and what is kept with a mask is found fastest by identity
def sliding(reach: int, dilation: int = 1) -> Mask:
    """A window of `reach` tokens to each side, every `dilation`-th of them.

    >>> sliding(3), sliding(3, dilation=2)
    (window(3, 3), dilated(3, 3, 2))
    """
    return masks.window(reach, reach) if dilation == 1 else masks.dilated(reach, reach, dilation)


class GlobalRows(nn.Module):
    """The rows of global tokens: they attend to every token, with projections of their own.

    >>> roles = Roles.of(None, torch.tensor([[True, False, False], [True, True, False]]))
    >>> GlobalRows(6, 2)(torch.zeros(2, 3, 6), roles).shape
    torch.Size([2, 2, 6])
    """

    def __init__(self, d_model: int, num_heads: int, *, dropout: float = 0.0, backend: str = "auto") -> None:
        super().__init__()
        self.w_q, self.w_kv = Linear(d_model, d_model), Joined(d_model, (d_model, d_model))
        self.head_dim, self.dropout, self.backend = d_model // num_heads, dropout, backend

    def forward(self, x: Tensor, roles: Roles) -> Tensor:
        """x (B, N, d) → (B, G, d), in the order of `roles.places`; zeros where a text has fewer global tokens."""
        places = roles.places.expand(len(x), -1)  # (B, G)
        chosen = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))  # (B, G, d)
        k, v = apart(self.w_kv, (x.shape[-1], x.shape[-1]), x)
        q, k, v = (split(y, self.head_dim) for y in (self.w_q(chosen), k, v))  # (B, H, G or N, D)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask=roles.whole, dropout=dropout, backend=self.backend)
        return cast(Tensor, out.transpose(1, 2).flatten(2))


class SlidingAttention(SparseAttention):
    """Self-attention in a window around each token, and global tokens that see all and are seen by all (Longformer).

    >>> layer = SlidingAttention(6, 2, reach=2)
    >>> roles = Roles.of(None, torch.tensor([[True, False, False, False, False]]))
    >>> layer(torch.zeros(1, 5, 6), mask=roles).shape
    torch.Size([1, 5, 6])

    The mask of a call is the tokens' `Roles`, or None if all are local. A local token scores its window and the global
    tokens together, in one softmax, with w_qkv. A global token's row comes from `whole`, with projections of its own.

    reach: tokens of the window on each side.  dilation: the window has every dilation-th token.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        reach: int,
        dilation: int = 1,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, num_heads, fused=True, dropout=dropout, backend=backend)
        self.reach = check_int("reach of a sliding window", reach)
        self.dilation = check_int("dilation of a sliding window", dilation)
        self.whole = GlobalRows(d_model, num_heads, dropout=dropout, backend=backend)

    def _attend_within(self, x: Tensor, mask: object) -> Tensor:
        if not (mask is None or isinstance(mask, Roles)):
            raise TypeError(
                f"a sliding window has a mask of its own; mask= gives the tokens' roles, as Roles.of(tokens, chosen) "
                f"or None, got {type(mask).__name__}"
            )
        q, k, v = self.project(x)  # (B, H, N, D)
        self._check_all_heads(q, k)
        seen = sliding(self.reach, self.dilation) if mask is None else mask.local(self.reach, self.dilation)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask=seen, scale=self.scale, dropout=dropout, backend=self.backend)
        out = out.transpose(1, 2).flatten(2)  # (B, N, d)
        if mask is not None and mask.max_global:
            places = mask.places.unsqueeze(-1).expand(len(x), -1, x.shape[-1])
            out = out.scatter_add(1, places, self.whole(x, mask))  # their rows are 0 so far
        return cast(Tensor, self.w_o(out))

    def extra_repr(self) -> str:
        """The arguments shown by `print(layer)`."""
        gaps = "" if self.dilation == 1 else f", dilation={self.dilation}"
        return f"{super().extra_repr()}, reach={self.reach}{gaps}"


# --------------------------------------------------------------------------------------------------------------- blocks


def drawn_blocks(tokens: int, size: int, *, num_heads: int, random: int, seed: int, longest: int) -> Blocks:
    """The blocks drawn for each head and block row but the first and last, (H, R − 2, random), as transformers draws.

    >>> drawn_blocks(36, 4, num_heads=1, random=1, seed=0, longest=64)[0].T
    array([[3, 4, 5, 2, 2, 4, 1]])

    tokens: of the text, a multiple of size.  size: tokens of a block.  random: blocks drawn for a row.
    seed: the layer's number.  longest: the most positions of the model.
    Raises ValueError if there are fewer than `random` blocks to draw from.
    """
    numbers = np.random.RandomState(seed)  # the generator behind np.random.seed: its draws are the specification
    rows = tokens // size - 2
    if tokens in PAPER:
        each = [_drawn_in_front(numbers, longest // size, size, random) for _ in range(num_heads)]
        return np.stack(each)[:, :rows]
    drawn = np.zeros((num_heads, rows, random), dtype=np.int64)
    for row in range(1, rows + 1):
        for head in range(num_heads):
            # Among the first 5 + 2·random blocks: not its neighbours, nor the first and last there.
            end = 5 + 2 * random
            refused = {row - 1, row, row + 1, 0, end - 1}
            refused |= {end - 2} if row == 1 else set()
            refused |= {1} if row == end - 2 else set()
            order = numbers.permutation(np.arange(end, dtype=np.int32)).tolist()
            drawn[head, row - 1] = [block for block in order if block not in refused][:random]
    return drawn


def _drawn_in_front(numbers: np.random.RandomState, across: int, size: int, random: int) -> Blocks:
    """(across − 2, random): from the blocks of the first 1024 tokens, apart from a row's neighbours, mostly.

    In the last two rows, and behind the first 1024 tokens, a neighbour may be drawn, as in transformers.
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


def block_counts(across: int, drawn: Tensor) -> Tensor:
    """How often each block of queries counts each block of keys, (H, R, R): 0 where it does not see it.

    >>> block_counts(6, torch.full((1, 4, 2), 0))[0]
    tensor([[1, 1, 1, 1, 1, 1],
            [3, 1, 1, 0, 0, 1],
            [3, 1, 1, 1, 0, 1],
            [3, 0, 1, 1, 1, 1],
            [3, 0, 0, 1, 1, 1],
            [1, 1, 1, 1, 1, 1]])

    across: R, blocks of the text.  drawn: (H, R − 2, random), from `drawn_blocks`.
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
    """

    counts: Tensor  # (1, H or 1, R, R) integers by block; at 0 the mask hides the block
    size: int  # tokens of a block

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
        """ln n by n, computed once: so the table by block and head is one of counts, two bytes each."""
        key = ("logs", device, dtype)
        if key not in self.kept:
            most = int(self.counts.max())  # a wait for the device
            with torch.inference_mode(False):  # a later call may differentiate with it
                self.kept[key] = torch.arange(most + 1, device=device, dtype=dtype).clamp(min=1).log()
        return cast(Tensor, self.kept[key])

    def __repr__(self) -> str:
        shape = "×".join(str(n) for n in self.counts.shape if n != 1)
        return f"Repeated(<{shape} counts, {int(self.counts.max())} at most>, size={self.size})"


class BlockPattern(NamedTuple):
    """The blocks of BigBird."""

    size: int  # tokens of a block
    random: int  # blocks drawn for each block
    seed: int  # of drawing: the layer's number
    longest: int  # the most positions of the model, on which drawing depends


@lru_cache(maxsize=64)
def _rules(
    across: int, size: int, random: int, draw: tuple[int, BlockPattern] | None, device: torch.device
) -> tuple[Mask, Bias | None]:
    """The mask and the bias of a text of `across` blocks. draw: number of heads and pattern, or None: the first block
    counts as drawn.

    They are kept, and so is what backends keep with a mask: without drawing all layers share one.
    """
    drawn = np.zeros((1, across - 2, random), dtype=np.int64)
    if draw is not None:
        drawn = drawn_blocks(across * size, num_heads=draw[0], **draw[1]._asdict())
    counts = block_counts(across, torch.from_numpy(drawn))[None]  # (1, H or 1, R, R)
    repeated = Repeated(counts.to(device, torch.int16), size) if bool((counts > 1).any()) else None
    return masks.blocks((counts > 0).to(device), size), repeated


class BlockAttention(SparseAttention):
    """Self-attention among blocks: neighbours, first and last, and some that are drawn; full for short texts (BigBird).

    >>> layer = BlockAttention(6, 2, BlockPattern(size=2, random=1, seed=0, longest=64)).eval()
    >>> layer.sparse(14), layer.sparse(15), layer(torch.zeros(1, 15, 6)).shape
    (False, True, torch.Size([1, 15, 6]))

    A text of up to (5 + 2·random)·size tokens has too few blocks: it gets full attention, as in transformers. The last
    block of a text may be short. Blocks are drawn in training mode, always the same for one layer and length. The mask
    of a call is a regard mask of padding, or None.

    dropout: on the weights of full attention; among blocks there is none, as in transformers.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        pattern: BlockPattern,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, num_heads, bias=bias, out_bias=True, fused=True, dropout=dropout, backend=backend)
        self.size = check_int("size of blocks", pattern.size)
        self.random = check_int("number of random blocks", pattern.random, least=0)
        self.pattern = pattern

    def sparse(self, n: int) -> bool:
        """Whether a text of n tokens gets attention by blocks."""
        return n > (5 + 2 * self.random) * self.size

    def rules(self, n: int, device: torch.device) -> tuple[Mask, Bias | None]:
        """The mask of a text of n tokens, and the bias for keys that count more than once, or None."""
        draw = (self.num_heads, self.pattern) if self.training and self.random else None
        return _rules(-(-n // self.size), self.size, self.random, draw, device)

    def _attend_within(self, x: Tensor, mask: object) -> Tensor:
        if not (mask is None or isinstance(mask, Mask)):
            raise TypeError(f"mask= must be a regard mask, as regard.masks.padding(…), got {type(mask).__name__}")
        if not self.sparse(x.shape[1]):
            return MultiHeadAttention._attend(self, x, None, mask, None, None, None, return_weights=False)[0]
        blocks, bias = self.rules(x.shape[1], x.device)
        q, k, v = self.project(x)  # (B, H, N, D)
        self._check_all_heads(q, k)
        seen = blocks if mask is None else mask.kept.setdefault(("blocks", id(blocks)), blocks & mask)  # for all layers
        out = attention(q, k, v, mask=seen, bias=bias, scale=self.scale, backend=self.backend)
        return self.joined(out)

    def extra_repr(self) -> str:
        """The arguments shown by `print(layer)`."""
        return f"{super().extra_repr()}, size={self.size}, random={self.random}, seed={self.pattern.seed}"
