"""Attention for long texts whose cost grows with the text, not with its square: a sliding window with global tokens.

    · · · · · · ·        rows: who looks.  Token 0 is global, the window reaches one token to each side.
    ■ ■ ■ · · · ·        ■ looks with the local projections, in one call over all tokens;
    ■ ■ ■ ■ · · ·        a global token's row is empty there: it looks at all tokens with projections of its own,
    ■ · ■ ■ ■ · ·        in a second call, which has as many rows as a text has global tokens.
    ■ · · ■ ■ ■ ·
    ■ · · · ■ ■ ■
    ■ · · · · ■ ■

Nothing here is N×N.

Axis letters: B batch, N positions, G the most global tokens of a text, H heads, D head size, d width of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from regard import masks
from regard.masks import Mask
from regard.masks.mask import Bounds, TileGrid
from regard.masks.rules import IndexRule
from regard.masks.token_masks import booleans, fit_length
from regard.nn.attention import ContextKeys, MultiHeadAttention, split
from regard.nn.cache import Cache
from regard.nn.linear import Joined, Linear, apart
from regard.op import attention
from regard.rotary import Angles

__all__ = ["GlobalRows", "Roles", "SlidingAttention"]


@dataclass(frozen=True, eq=False, repr=False)
class Roles(Mask):
    """What the tokens of texts are: padding, which neither looks nor is seen; global; or local, as most are.

    >>> roles = Roles.of(None, torch.tensor([[True, False, False, False]]))
    >>> print(roles.local(1).draw(4))
    · · · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    ■ · ■ ■

    As a mask by itself it says who sees whom without any window: global tokens all tokens, the others those.

    tokens, chosen: (B or 1, N) booleans, True = a token, True = a global one; one row where all texts have the same.
    max_global: how many global tokens the text with most of them has.  alike: do all have as many?
    padded: is any token padding?
    """

    tokens: Tensor
    chosen: Tensor
    max_global: int
    alike: bool
    padded: bool

    @classmethod
    def of(cls, mask: Tensor | None, chosen: Tensor) -> Roles:
        """From a mask of tokens, None for all, and global tokens, both (B, N) booleans. Padding is never global."""
        fit_length("a mask of tokens", chosen.shape[1] if mask is None else mask.shape[1], chosen.shape[1])
        tokens = torch.ones_like(chosen) if mask is None else mask
        chosen = chosen & tokens
        counts = chosen.sum(1)
        same = torch.stack([(t == t[:1]).all() for t in (tokens, chosen)])
        # One wait for the device: most, least, whether there is padding, and whether one row serves all.
        facts = torch.cat([counts.amax()[None], counts.amin()[None], (~tokens).any()[None], same]).tolist()
        most, least, padded, *shared = facts
        tokens, chosen = (t[:1] if one else t for t, one in zip((tokens, chosen), shared, strict=True))
        return cls(tokens, chosen, int(most), most == least, bool(padded))

    def local(self, reach: int, dilation: int = 1) -> Mask:
        """Who sees whom with the local projections: `reach` tokens to each side, every `dilation`-th, and global ones.

        Layers that reach alike get one mask, and so does what backends keep with it.
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
        """(B or 1, G), where the global tokens of each text stand, in order; where it has fewer, others follow."""
        return self.chosen.long().argsort(dim=1, descending=True, stable=True)[:, : self.max_global]

    @cached_property
    def whole(self) -> Mask | None:
        """Who sees whom in the rows of the global tokens, (G, N): they all tokens; None where nothing is hidden."""
        seen = masks.padding(self.tokens) if self.padded else None
        if self.alike:
            return seen
        rows = masks.queries(
            torch.arange(self.max_global, device=self.chosen.device) < self.chosen.sum(1, keepdim=True)
        )
        return rows if seen is None else seen & rows

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
        """As the masks that it is made of."""
        return self._plain.bounds(grid)

    def __repr__(self) -> str:
        return f"Roles(tokens={booleans(self.tokens)}, chosen={booleans(self.chosen)})"


@lru_cache(maxsize=64)  # every layer asks in every call, and what is kept with a mask is found fastest by itself
def sliding(reach: int, dilation: int = 1) -> Mask:
    """A window of `reach` tokens to each side, every `dilation`-th of them.

    >>> sliding(3), sliding(3, dilation=2)
    (window(3, 3), dilated(3, 3, 2))
    """
    return masks.window(reach, reach) if dilation == 1 else masks.dilated(reach, reach, dilation)


class GlobalRows(nn.Module):
    """The rows of global tokens: they look at every token, with projections of their own.

    >>> roles = Roles.of(None, torch.tensor([[True, False, False], [True, True, False]]))
    >>> GlobalRows(6, 2)(torch.zeros(2, 3, 6), roles).shape
    torch.Size([2, 2, 6])

    d_model, num_heads, backend: as of the layer that they belong to.  dropout: on the weights, in training only.
    """

    def __init__(self, d_model: int, num_heads: int, *, dropout: float = 0.0, backend: str = "auto") -> None:
        super().__init__()
        self.w_q, self.w_kv = Linear(d_model, d_model), Joined(d_model, (d_model, d_model))
        self.head_dim, self.dropout, self.backend = d_model // num_heads, dropout, backend

    def forward(self, x: Tensor, roles: Roles) -> Tensor:
        """x (B, N, d) → (B, G, d), in the order of `roles.places`; zeros where a text has fewer global tokens."""
        places = roles.places.expand(len(x), -1)  # (B, G)
        asking = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))  # (B, G, d)
        k, v = apart(self.w_kv, (x.shape[-1], x.shape[-1]), x)
        q, k, v = (split(y, self.head_dim) for y in (self.w_q(asking), k, v))  # (B, H, G or N, D)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask=roles.whole, dropout=dropout, backend=self.backend)
        return cast(Tensor, out.transpose(1, 2).flatten(2))


class SlidingAttention(MultiHeadAttention):
    """Self-attention in a window around each token, and global tokens that see all and are seen by all (Longformer).

    >>> layer = SlidingAttention(6, 2, reach=2)
    >>> roles = Roles.of(None, torch.tensor([[True, False, False, False, False]]))
    >>> layer(torch.zeros(1, 5, 6), mask=roles).shape
    torch.Size([1, 5, 6])

    A local token scores its window and the global tokens together, in one softmax, with w_qkv. A global
    token's row comes from `whole`, whose projections are its own.

    d_model, num_heads, dropout, backend: as in `MultiHeadAttention`.  reach: tokens of the window on each side.
    dilation: the window has every dilation-th token, so it reaches reach·dilation far.
    Raises ValueError for a reach or a dilation below 1, and as `MultiHeadAttention`.
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
        for name, value in (("reach", reach), ("dilation", dilation)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} of a sliding window must be a whole number of at least 1, got {value!r}")
        self.reach, self.dilation = reach, dilation
        self.whole = GlobalRows(d_model, num_heads, dropout=dropout, backend=backend)

    def _attend(
        self,
        x: Tensor,
        context: Tensor | ContextKeys | None,
        mask: object,
        cache: Cache | None,
        positions: Tensor | Angles | None,
        context_positions: Tensor | None,
    ) -> Tensor:
        """mask: the tokens' `Roles`; None where all are local."""
        self._check(x, context, cache, positions, context_positions)
        if context is not None or cache is not None:
            raise ValueError("a sliding window looks at x itself, all of it at once: leave out context= and cache=")
        if not (mask is None or isinstance(mask, Roles)):
            raise TypeError(
                f"a sliding window has a mask of its own; mask= says what the tokens are, as Roles.of(tokens, chosen) "
                f"or None, got {type(mask).__name__}"
            )
        q, k, v = self.project(x)  # (B, H, N, D)
        self._check_all_heads(q)
        reach, dilation = self.reach, self.dilation
        seen = sliding(reach, dilation) if mask is None else mask.local(reach, dilation)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask=seen, scale=self.scale, dropout=dropout, backend=self.backend)
        out = out.transpose(1, 2).flatten(2)  # (B, N, d)
        if mask is not None and mask.max_global:
            places = mask.places.unsqueeze(-1).expand(len(x), -1, x.shape[-1])
            out = out.scatter_add(1, places, self.whole(x, mask))  # their rows are 0 so far
        return cast(Tensor, self.w_o(out))

    def extra_repr(self) -> str:
        """What `print(layer)` says of it."""
        gaps = "" if self.dilation == 1 else f", dilation={self.dilation}"
        return f"{super().extra_repr()}, reach={self.reach}{gaps}"
