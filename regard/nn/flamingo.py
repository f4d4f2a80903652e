"""What Flamingo has beside a language model and a tower of pictures: a resampler, and gated looks at its latents.

    a picture's vectors (n, e) ─ resampler ─ L latents (L, e), however many vectors there were
    words (N, d) ─ + tanh(a) · look at the latents ─ + tanh(b) · feed-forward ─ the language model's next block

A gate starts at 0, where the language model is as it was before it could see. This file knows no family.

Axis letters: B texts, N positions, P pictures of each text, n vectors of a picture, L those of it that words look at, e
and d widths of pictures and words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.masks import Mask
from regard.masks.mask import Bounds, TileGrid
from regard.masks.rules import IndexRule, cell_of
from regard.masks.token_masks import booleans
from regard.nn.attention import ContextKeys, MultiHeadAttention
from regard.nn.blocks import FeedForward

__all__ = ["GatedLook", "ImageMask", "Resampler", "ResamplerBlock"]


@dataclass(frozen=True, eq=False, repr=False)
class ImageMask(Mask):
    """Which pictures each word sees, where the keys are the pictures' vectors, one picture after another.

    >>> print(ImageMask(torch.tensor([[[False, False], [True, False], [False, True]]]), each=2).draw(3, 4))
    · · · ·
    ■ ■ · ·
    · · ■ ■

    sees: (B, N, P) booleans.  each: how many vectors a picture has.
    """

    sees: Tensor
    each: int

    def varies(self) -> tuple[int, int]:
        """Texts differ, heads do not."""
        return len(self.sees), 1

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError unless there are N queries, and keys for P pictures."""
        super().fit(batch, heads, nq, nk)
        _, n, pictures = self.sees.shape
        if (nq, nk) != (n, pictures * self.each):
            raise ValueError(
                f"{self!r} is for {n} queries × {pictures} · {self.each} keys, but the call has {nq} × {nk}"
            )

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j) that reads the picture's cell."""
        cell, each = cell_of(self.sees.to(device).unsqueeze(1)), self.each
        return lambda b, h, i, j: cell(b, h, i, j // each)

    def bounds(self, grid: TileGrid) -> Bounds:
        """Exact: sums over any words and pictures are differences of four sums from the first ones on."""
        (i0, i1), (j0, j1) = grid.rows(grid.i), grid.cols(grid.j)
        p0, p1 = j0 // self.each, j1 // self.each
        sums = pad(self.sees.to(grid.device).long(), (1, 0, 1, 0)).cumsum(1).cumsum(2)  # (B, N + 1, P + 1)
        seen = sums[:, i1 + 1, p1 + 1] - sums[:, i0, p1 + 1] - sums[:, i1 + 1, p0] + sums[:, i0, p0]
        seen = seen.unsqueeze(1)  # (B, 1, Tq, Tk)
        return seen > 0, seen == (i1 - i0 + 1) * (p1 - p0 + 1)

    def __repr__(self) -> str:
        return f"ImageMask({booleans(self.sees)}, each={self.each})"


class ResamplerBlock(nn.Module):
    """Latents look at a picture and at each other, then feed-forward; each is added, and normed before.

    d: width of the picture's vectors and of the latents.
    """

    def __init__(self, d: int, attention: MultiHeadAttention, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.picture_norm, self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(d) for _ in range(3))

    def forward(self, x: Tensor, picture: Tensor) -> Tensor:
        """Latents (B, L, e) and a picture's vectors (B, n, e) → latents (B, L, e)."""
        latents = self.attention_norm(x)
        x = x + self.attention(latents, torch.cat([self.picture_norm(picture), latents], 1))
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Resampler(nn.Module):
    """A fixed number of vectors of a picture, however many it has: learnt queries gather them (Perceiver).

    >>> block = ResamplerBlock(6, MultiHeadAttention(6, 2), FeedForward(6, 24, "relu"))
    >>> Resampler(3, 6, [block])(torch.zeros(5, 17, 6)).shape
    torch.Size([5, 3, 6])

    latents: how many.  d: width of the picture's vectors and of the latents.
    """

    def __init__(self, latents: int, d: int, blocks: Sequence[ResamplerBlock]) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, d))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(d)

    def forward(self, picture: Tensor) -> Tensor:
        """(B, n, e) → (B, L, e)."""
        x = self.latents.expand(len(picture), -1, -1)
        for block in self.blocks:
            x = block(x, picture)
        y: Tensor = self.norm(x)
        return y


class GatedLook(nn.Module):
    """Words look at pictures, then feed-forward; what each adds goes through a gate, the tanh of what is learnt.

    >>> look = GatedLook(MultiHeadAttention(6, 2, d_context=5), FeedForward(6, 10, "relu"), [nn.Identity()] * 2)
    >>> x = torch.randn(1, 3, 6)
    >>> torch.equal(look(x, torch.randn(1, 4, 5), None), x)        # the gates are shut before training
    True

    norms: before each part.  gates: 1 for all numbers of a vector, or d, one for each.  dropout: on what each part
    adds, in training only.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: FeedForward,
        norms: Sequence[nn.Module],
        *,
        gates: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = norms
        self.attention_gate, self.feed_forward_gate = (nn.Parameter(torch.zeros(gates)) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, pictures: Tensor | ContextKeys | None, mask: Mask | None) -> Tensor:
        """Words (B, N, d) → (B, N, d). A word that sees no picture gets nothing from attention: its weights are 0.

        pictures: (B, P·L, e), or the keys of them; None where nobody sees one.  mask: who sees which.
        """
        if pictures is not None:
            seen = self.attention(self.attention_norm(x), pictures, mask=mask)
            x = x + torch.tanh(self.attention_gate) * self.dropout(seen)
        y: Tensor = x + torch.tanh(self.feed_forward_gate) * self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return y
