"""The parts of vision models: patches and their positions, tower, heads; and Flamingo's resampler and gated attention.

    pixel_values (B, C, H, W) ─ patches (B, rows·columns, d) ─ [cls, registers, patches] + positions ─ block ─ … ─ norm

Axis letters: B batch, C channels, H, W height and width in pixels, N tokens, d width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, linear, pad, pixel_shuffle

from regard.layouts import Frame, Sides
from regard.masks import Mask
from regard.masks.mask import Bounds, IndexRule, TileGrid, booleans, cell_of
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, FeedForward, TowerOutput
from regard.nn.projections import ContextKeys, Linear

Pooling = Literal["cls", "mean", "both"]
MOST_TIMES = 64  # 8 times the height and the width that positions were learnt for; attention takes the square of it


class PatchGrid(NamedTuple):
    """Rows and columns of patches."""

    rows: int
    columns: int


class PatchProjection(nn.Module):
    """Cut pixels into patches and project each to a vector: a convolution whose stride is its size.

    >>> PatchProjection(3, 768, (16, 16))(torch.zeros(1, 3, 224, 224)).shape
    torch.Size([1, 196, 768])

    padded: incomplete patches at the right and lower edges are padded (Swin), else dropped.
    """

    bias: Tensor | None

    def __init__(
        self, channels: int, d: int, size: tuple[int, int], *, bias: bool = True, padded: bool = False
    ) -> None:
        super().__init__()
        self.channels, self.size, self.padded = channels, size, padded
        self.weight = nn.Parameter(torch.empty(d, channels, *size))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None
        if not self.weight.is_meta:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Conv2d

    @property
    def least(self) -> tuple[int, int]:
        """Height and width of the smallest image that has a patch."""
        return (1, 1) if self.padded else self.size

    def grid(self, height: int, width: int) -> PatchGrid:
        """The grid of patches of an image of this size."""
        if self.padded:
            return PatchGrid(-(-height // self.size[0]), -(-width // self.size[1]))
        return PatchGrid(height // self.size[0], width // self.size[1])

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, H, W) → (B, rows·columns, d), row by row."""
        high, wide = self.size
        rows, columns = self.grid(*pixel_values.shape[-2:])
        below, beside = rows * high - pixel_values.shape[-2], columns * wide - pixel_values.shape[-1]
        if below > 0 or beside > 0:
            pixel_values = pad(pixel_values, (0, beside, 0, below))
        cut = pixel_values[..., : rows * high, : columns * wide].reshape(-1, self.channels, rows, high, columns, wide)
        flat = cut.permute(0, 2, 4, 1, 3, 5).reshape(pixel_values.shape[0], rows * columns, -1)  # (B, N, C·high·wide)
        return linear(flat, self.weight.flatten(1), self.bias)


class ExtraTokens(NamedTuple):
    """The learnt vectors of an image beside cls and its patches."""

    distilled: bool = False  # a second token beside cls (DeiT)
    registers: int = 0  # tokens without a position (DINOv2)
    masked: bool = False  # a vector in place of masked patches


NO_EXTRA_TOKENS = ExtraTokens()


class PatchEmbedding(nn.Module):
    """Pixels to the vectors that a tower reads: cls and other tokens, then the patches, with their positions.

    >>> embed = PatchEmbedding(PatchProjection(3, 6, (4, 4)), (12, 8))
    >>> embed(torch.zeros(2, 3, 12, 8)).shape                 # 3 · 2 patches and cls
    torch.Size([2, 7, 6])
    >>> embed(torch.zeros(2, 3, 16, 16)).shape                # another size: the positions are interpolated
    torch.Size([2, 17, 6])

    pixels: height and width that the positions were learnt for.
    antialias, stretch: as in `interpolate_positions`.  norm: of the sum (CLIP).
    """

    distillation: Tensor | None
    registers: Tensor | None
    hidden: Tensor | None

    def __init__(
        self,
        patches: PatchProjection,
        pixels: tuple[int, int],
        *,
        tokens: ExtraTokens = NO_EXTRA_TOKENS,
        antialias: bool = False,
        stretch: float = 0.0,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        d, self.grid = patches.weight.shape[0], patches.grid(*pixels)
        if min(self.grid) < 1:
            raise ValueError(f"an image of {pixels[0]} × {pixels[1]} pixels holds no patch of {patches.size}")
        self.patches, self.pixels, self.antialias, self.stretch = patches, pixels, antialias, stretch
        self.cls = nn.Parameter(torch.zeros(d))
        self.distillation = nn.Parameter(torch.zeros(d)) if tokens.distilled else None
        self.registers = nn.Parameter(torch.zeros(tokens.registers, d)) if tokens.registers else None
        self.hidden = nn.Parameter(torch.zeros(d)) if tokens.masked else None
        self.positions = nn.Parameter(torch.zeros(1 + tokens.distilled + self.grid.rows * self.grid.columns, d))
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    @property
    def before(self) -> tuple[str, ...]:
        """The tokens before the patches, by their kinds in `regard.layouts.KINDS`."""
        registers = 0 if self.registers is None else len(self.registers)
        return ("cls", *(() if self.distillation is None else ("distillation",)), *("register",) * registers)

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> Tensor:
        """pixel_values (B, C, H, W), bool_masked_pos (B, patches) True where a patch is masked → (B, N, d)."""
        learnt, grid = (
            self.positions[-self.grid.rows * self.grid.columns :],
            self.patches.grid(*pixel_values.shape[-2:]),
        )
        # Before the patches are computed: it raises if there are too many.
        places = interpolate_positions(learnt, self.grid, grid, antialias=self.antialias, stretch=self.stretch)
        x = self.patches(pixel_values)  # (B, rows·columns, d)
        if bool_masked_pos is not None:
            assert self.hidden is not None
            x = torch.where(bool_masked_pos.unsqueeze(-1), self.hidden, x)
        first: list[Tensor] = [self.cls] if self.distillation is None else [self.cls, self.distillation]
        tokens = torch.stack(first) + self.positions[: len(first)]  # (1 or 2, d)
        if self.registers is not None:
            tokens = torch.cat([tokens, self.registers])
        x = torch.cat([tokens.expand(x.shape[0], -1, -1), x + places], 1)
        return cast(Tensor, self.dropout(x if self.norm is None else self.norm(x)))


def interpolate_positions(
    positions: Tensor, learnt: PatchGrid, grid: PatchGrid, *, antialias: bool = False, stretch: float = 0.0
) -> Tensor:
    """Positions (rows·columns, d) that were learnt for one grid, interpolated for another.

    >>> interpolate_positions(torch.tensor([[0.0], [1.0]]), PatchGrid(1, 2), PatchGrid(1, 3)).shape
    torch.Size([3, 1])

    stretch: enlarge by this part of a patch more, and cut that off: against rounding, in the first DINO and in Idefics.
    Raises ValueError for more than MOST_TIMES as many positions.
    """
    if grid == learnt:
        return positions
    if grid.rows * grid.columns > MOST_TIMES * learnt.rows * learnt.columns:
        raise ValueError(
            f"the pixels make {grid.rows} × {grid.columns} patches, and the model learnt positions of {learnt.rows} × "
            f"{learnt.columns}: at most {MOST_TIMES} times as many are interpolated. Make the image smaller, or "
            "correct the size in preprocessor_config.json"
        )
    square = positions.reshape(1, *learnt, -1).permute(0, 3, 1, 2)  # (1, d, rows, columns)
    wide = square.to(torch.promote_types(square.dtype, torch.float32))  # half precision shifts bicubic places
    target: dict[str, Any] = {"size": tuple(grid)}
    if stretch:  # torch rounds the size down, to the grid
        target = {"scale_factor": tuple((n + stretch) / m for n, m in zip(grid, learnt, strict=True))}
    places = interpolate(wide, **target, mode="bicubic", align_corners=False, antialias=antialias)
    return places.to(square.dtype)[0].flatten(1).T


class VisionTower(nn.Module):
    """Patches, blocks, and a norm after the last block: every vision model with one grid.

    >>> from regard.nn.blocks import FeedForward
    >>> from regard.nn.attention import MultiHeadAttention
    >>> norms = [nn.LayerNorm(6), nn.LayerNorm(6)]
    >>> block = Block(MultiHeadAttention(6, 2), FeedForward(6, 10, "gelu"), norms, norm_first=True)
    >>> tower = VisionTower(PatchEmbedding(PatchProjection(3, 6, (4, 4)), (12, 8)), [block], norm=nn.LayerNorm(6))
    >>> tower(torch.zeros(1, 3, 12, 8)).last_hidden_state.shape
    torch.Size([1, 7, 6])
    """

    def __init__(self, embed: PatchEmbedding, blocks: Sequence[Block], *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = embed, nn.ModuleList(blocks), norm

    def grid(self, height: int, width: int) -> PatchGrid:
        """The grid of patches of an image of this size."""
        return self.embed.patches.grid(height, width)

    def sides(self, frame: Frame) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, by the attention's path in the tower."""
        sides = Sides.patches(frame, self.embed.patches.size, self.embed.before)
        return {f"blocks.{number}.attention": sides for number in range(len(self.blocks))}

    def forward(
        self, pixel_values: Tensor, *, bool_masked_pos: Tensor | None = None, output_hidden_states: bool = False
    ) -> TowerOutput:
        """(B, C, H, W) → (B, N, d), and each block's output, unnormed. bool_masked_pos: (B, patches)."""
        x = self.embed(pixel_values, bool_masked_pos)
        hidden_states = [x]
        for block in self.blocks:
            x = block(x)
            hidden_states += [x] if output_hidden_states else []
        last = x if self.norm is None else self.norm(x)
        return TowerOutput(last, tuple(hidden_states) if output_hidden_states else None)


def summary(hidden: Tensor, before: int, pooling: Pooling) -> Tensor:
    """One vector of an image's tokens (B, N, d): cls, the mean of the tokens from `before` on, or both in a row."""
    if pooling == "cls":
        return hidden[:, 0]
    mean = hidden[:, before:].mean(1)
    return mean if pooling == "mean" else torch.cat([hidden[:, 0], mean], -1)


class Mean(nn.Module):
    """The mean of all vectors, in Swin, which has no cls."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, N, d) → (B, d)."""
        return summary(hidden, 0, "mean")


class NormedFirst(nn.Module):
    """cls, normed alone: CLIP's pooling, which leaves the other vectors as they are."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, N, d) → (B, d)."""
        return cast(Tensor, self.norm(hidden[:, 0]))


class ImageLabels(nn.Module):
    """Logits over labels from cls, the mean of the patches, or both; d: width of that vector."""

    def __init__(self, d: int, labels: int, *, pooling: Pooling = "cls") -> None:
        super().__init__()
        self.score, self.pooling = Linear(d, labels), pooling

    def forward(self, hidden: Tensor, before: int, grid: PatchGrid) -> Tensor:
        """(B, N, d) → (B, labels)."""
        return cast(Tensor, self.score(summary(hidden, before, self.pooling)))


class PixelReconstruction(nn.Module):
    """The pixels of every patch from its vector, stride × stride each: masked image modelling."""

    def __init__(self, d: int, stride: int, channels: int) -> None:
        super().__init__()
        self.score, self.stride = PatchProjection(d, stride**2 * channels, (1, 1)), stride

    def forward(self, hidden: Tensor, before: int, grid: PatchGrid) -> Tensor:
        """(B, N, d) → (B, C, rows·stride, columns·stride)."""
        x = linear(hidden[:, before:], self.score.weight.flatten(1), self.score.bias)  # (B, patches, C·stride²)
        return pixel_shuffle(x.mT.reshape(*x.mT.shape[:2], *grid), self.stride)


# ------------------------------------------------------------------------------------------------------------- Flamingo
#
#   an image's vectors (n, e) ─ resampler ─ L latents (L, e), however many vectors there were
#   text (N, d) ─ + tanh(a) · attention to the latents ─ + tanh(b) · feed-forward ─ the language model's next block
#
# A gate starts at 0, where the language model is as it was without images. Axis letters: B texts, N positions, P images
# of each text, n vectors of an image, L latents of it, e and d widths of images and text.


@dataclass(frozen=True, eq=False, repr=False)
class ImageMask(Mask):
    """Which images each token sees, where the keys are the images' vectors, one image after another.

    >>> print(ImageMask(torch.tensor([[[False, False], [True, False], [False, True]]]), each=2).draw(3, 4))
    · · · ·
    ■ ■ · ·
    · · ■ ■
    """

    sees: Tensor  # (B, N, P) booleans
    each: int  # vectors of an image

    def varies(self) -> tuple[int, int]:
        """Texts differ, heads do not."""
        return len(self.sees), 1

    def fit(self, batch: int, heads: int, nq: int, nk: int) -> None:
        """Raise ValueError unless there are N queries, and keys for P images."""
        super().fit(batch, heads, nq, nk)
        _, n, images = self.sees.shape
        if (nq, nk) != (n, images * self.each):
            raise ValueError(f"{self!r} is for {n} queries × {images} · {self.each} keys, but the call has {nq} × {nk}")

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> IndexRule:
        """The function f(b, h, i, j) that reads the image's cell."""
        cell, each = cell_of(self.sees.to(device).unsqueeze(1)), self.each
        return lambda b, h, i, j: cell(b, h, i, j // each)

    def bounds(self, grid: TileGrid) -> Bounds:
        """Exact: the count in any rectangle is a combination of four cumulative counts."""
        (i0, i1), (j0, j1) = grid.rows(grid.i), grid.cols(grid.j)
        p0, p1 = j0 // self.each, j1 // self.each
        sums = pad(self.sees.to(grid.device).long(), (1, 0, 1, 0)).cumsum(1).cumsum(2)  # (B, N + 1, P + 1)
        seen = sums[:, i1 + 1, p1 + 1] - sums[:, i0, p1 + 1] - sums[:, i1 + 1, p0] + sums[:, i0, p0]
        seen = seen.unsqueeze(1)  # (B, 1, Tq, Tk)
        return seen > 0, seen == (i1 - i0 + 1) * (p1 - p0 + 1)

    def __repr__(self) -> str:
        return f"ImageMask({booleans(self.sees)}, each={self.each})"


class ResamplerBlock(nn.Module):
    """Latents attend to an image and to each other, then feed-forward; each is added, and normed before."""

    def __init__(self, d: int, attention: MultiHeadAttention, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.image_norm, self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(d) for _ in range(3))

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        """Latents (B, L, e) and an image's vectors (B, n, e) → latents (B, L, e)."""
        latents = self.attention_norm(x)
        x = x + self.attention(latents, torch.cat([self.image_norm(image), latents], 1))
        return x + cast(Tensor, self.feed_forward(self.feed_forward_norm(x)))


class Resampler(nn.Module):
    """A fixed number of vectors of an image, however many it has: learnt queries gather them (Perceiver).

    >>> block = ResamplerBlock(6, MultiHeadAttention(6, 2), FeedForward(6, 24, "relu"))
    >>> Resampler(3, 6, [block])(torch.zeros(5, 17, 6)).shape
    torch.Size([5, 3, 6])
    """

    def __init__(self, latents: int, d: int, blocks: Sequence[ResamplerBlock]) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, d))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(d)

    def forward(self, image: Tensor) -> Tensor:
        """(B, n, e) → (B, L, e)."""
        x = self.latents.expand(len(image), -1, -1)
        for block in self.blocks:
            x = block(x, image)
        return cast(Tensor, self.norm(x))


class GatedLook(nn.Module):
    """Text attends to images, then feed-forward; the output of each goes through a gate, the tanh of a parameter.

    >>> look = GatedLook(MultiHeadAttention(6, 2, d_context=5), FeedForward(6, 10, "relu"), [nn.Identity()] * 2)
    >>> x = torch.randn(1, 3, 6)
    >>> torch.equal(look(x, torch.randn(1, 4, 5), None), x)        # the gates are shut before training
    True

    gates: 1 for all features, or d, one for each.
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

    def forward(self, x: Tensor, images: Tensor | ContextKeys | None, mask: Mask | None) -> Tensor:
        """Text (B, N, d) → (B, N, d). A token that sees no image gets nothing from attention: its weights are 0.

        images: (B, P·L, e), or their keys; None if no token sees one.  mask: which images each token sees.
        """
        if images is not None:
            seen = self.attention(self.attention_norm(x), images, mask=mask)
            x = x + torch.tanh(self.attention_gate) * self.dropout(seen)
        added = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x + torch.tanh(self.feed_forward_gate) * cast(Tensor, added)
