"""The parts that models of pictures are made of: patches, their positions, tower, heads.

    pixel_values (B, C, H, W) ─ patches (B, rows·columns, d) ─ [cls, registers, patches] + positions ─ block ─ … ─ norm

The blocks are those of the text models (parts.py). This file knows no family and no checkpoint.

Axis letters: B batch, C channels, H, W height and width in pixels, N tokens, d width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, linear, pad, pixel_shuffle

from regard.layouts import Frame, Sides
from regard.nn.blocks import Block, TowerOutput
from regard.nn.linear import Linear

__all__ = [
    "ImageLabels",
    "Mean",
    "NormedFirst",
    "PatchEmbedding",
    "PatchGrid",
    "PatchProjection",
    "PixelReconstruction",
    "VisionTower",
    "interpolate_positions",
    "summary",
]

Pooling = Literal["cls", "mean", "both"]
MOST_TIMES = 64  # 8 times the height and the width that positions were learnt for; attention takes the square of it


class PatchGrid(NamedTuple):
    """How many patches lie below and beside each other."""

    rows: int
    columns: int


class PatchProjection(nn.Module):
    """Cut pixels into patches and make a vector of each: 16 · 16 · 3 numbers become d.

    >>> PatchProjection(3, 768, (16, 16))(torch.zeros(1, 3, 224, 224)).shape
    torch.Size([1, 196, 768])

    channels: of the image.  d: width of a vector.  size: height and width of a patch.  bias: has the layer one.
    padded: what does not fill a patch at the right and lower edges is padded to one (Swin), else it is not seen.
    The weight is (d, channels, height, width), as a convolution's, which this is.
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
        """Height and width of the smallest picture that makes a patch."""
        return (1, 1) if self.padded else self.size

    def grid(self, height: int, width: int) -> PatchGrid:
        """How many patches there are in so many pixels."""
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


class PatchEmbedding(nn.Module):
    """Pixels to the vectors that a tower reads: cls and other tokens, then the patches, with their positions.

    >>> embed = PatchEmbedding(PatchProjection(3, 6, (4, 4)), (12, 8))
    >>> embed(torch.zeros(2, 3, 12, 8)).shape                 # 3 · 2 patches and cls
    torch.Size([2, 7, 6])
    >>> embed(torch.zeros(2, 3, 16, 16)).shape                # another size: the positions are interpolated
    torch.Size([2, 17, 6])

    patches: how they are made.  pixels: height and width that the positions were learnt for.
    distilled: is there a second token beside cls (DeiT).  registers: how many tokens without a position (DINOv2).
    masked: is there a token for hidden patches (masked image modelling).
    antialias, stretch: as in `interpolate_positions`.  norm: of the sum (CLIP).  dropout: in training only.
    """

    distillation: Tensor | None
    registers: Tensor | None
    hidden: Tensor | None

    def __init__(
        self,
        patches: PatchProjection,
        pixels: tuple[int, int],
        *,
        distilled: bool = False,
        registers: int = 0,
        masked: bool = False,
        antialias: bool = False,
        stretch: float = 0.0,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        d, self.grid = patches.weight.shape[0], patches.grid(*pixels)
        if min(self.grid) < 1:
            raise ValueError(f"a picture of {pixels[0]} × {pixels[1]} pixels holds no patch of {patches.size}")
        self.patches, self.pixels, self.antialias, self.stretch = patches, pixels, antialias, stretch
        self.cls = nn.Parameter(torch.zeros(d))
        self.distillation = nn.Parameter(torch.zeros(d)) if distilled else None
        self.registers = nn.Parameter(torch.zeros(registers, d)) if registers else None
        self.hidden = nn.Parameter(torch.zeros(d)) if masked else None
        self.positions = nn.Parameter(torch.zeros(1 + distilled + self.grid.rows * self.grid.columns, d))
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    @property
    def before(self) -> tuple[str, ...]:
        """The tokens before the patches, by their kinds in `regard.layouts.KINDS`."""
        registers = 0 if self.registers is None else len(self.registers)
        return ("cls", *(() if self.distillation is None else ("distillation",)), *("register",) * registers)

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> Tensor:
        """pixel_values (B, C, H, W), bool_masked_pos (B, patches) True where a patch is masked → (B, N, d)."""
        learnt = self.positions[-self.grid.rows * self.grid.columns :]
        # Before the patches are made: it refuses too many.
        places = interpolate_positions(
            learnt,
            self.grid,
            self.patches.grid(*pixel_values.shape[-2:]),
            antialias=self.antialias,
            stretch=self.stretch,
        )
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
    """Positions (rows·columns, d) that were learnt for one grid, interpolated for another where it is another.

    >>> interpolate_positions(torch.tensor([[0.0], [1.0]]), PatchGrid(1, 2), PatchGrid(1, 3)).shape
    torch.Size([3, 1])

    antialias: of the interpolation.  stretch: draw them out by so much of a patch more, and cut that off: the first
    DINO did, against rounding, and Idefics does.  Raises ValueError for more than MOST_TIMES as many positions.
    """
    if grid == learnt:
        return positions
    if grid.rows * grid.columns > MOST_TIMES * learnt.rows * learnt.columns:
        raise ValueError(
            f"the pixels make {grid.rows} × {grid.columns} patches, and the model learnt positions of {learnt.rows} × "
            f"{learnt.columns}: at most {MOST_TIMES} times as many are interpolated. Make the picture smaller, or "
            "correct the size in preprocessor_config.json"
        )
    square = positions.reshape(1, *learnt, -1).permute(0, 3, 1, 2)  # (1, d, rows, columns)
    wide = square.to(torch.promote_types(square.dtype, torch.float32))  # half a precision shifts bicubic places
    way: dict[str, Any] = {"size": tuple(grid)}
    if stretch:  # torch rounds the size down, to the grid
        way = {"scale_factor": tuple((n + stretch) / m for n, m in zip(grid, learnt, strict=True))}
    found = interpolate(wide, **way, mode="bicubic", align_corners=False, antialias=antialias)
    return found.to(square.dtype)[0].flatten(1).T


class VisionTower(nn.Module):
    """Patches, blocks, a norm: what every model of pictures with one grid has.

    >>> from regard.nn.blocks import FeedForward
    >>> from regard.nn.attention import MultiHeadAttention
    >>> norms = [nn.LayerNorm(6), nn.LayerNorm(6)]
    >>> block = Block(MultiHeadAttention(6, 2), FeedForward(6, 10, "gelu"), norms, norm_first=True)
    >>> tower = VisionTower(PatchEmbedding(PatchProjection(3, 6, (4, 4)), (12, 8)), [block], norm=nn.LayerNorm(6))
    >>> tower(torch.zeros(1, 3, 12, 8)).last_hidden_state.shape
    torch.Size([1, 7, 6])

    norm: of the last block's result.
    """

    def __init__(self, embed: PatchEmbedding, blocks: Sequence[Block], *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = embed, nn.ModuleList(blocks), norm

    def grid(self, height: int, width: int) -> PatchGrid:
        """How many patches there are in so many pixels."""
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
        return TowerOutput(
            x if self.norm is None else self.norm(x), tuple(hidden_states) if output_hidden_states else None
        )


def summary(hidden: Tensor, before: int, pooling: Pooling) -> Tensor:
    """One vector for a picture of its tokens (B, N, d): cls, the mean of the patches, or both side by side.

    >>> summary(torch.tensor([[[9.0], [1.0], [3.0]]]), 1, "both")
    tensor([[9., 2.]])

    before: how many tokens stand before the patches.
    """
    if pooling == "cls":
        return hidden[:, 0]
    mean = hidden[:, before:].mean(1)
    return mean if pooling == "mean" else torch.cat([hidden[:, 0], mean], -1)


class Mean(nn.Module):
    """The mean of all vectors: Swin's summary of a picture, which has no cls."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, N, d) → (B, d)."""
        return summary(hidden, 0, "mean")


class NormedFirst(nn.Module):
    """cls, normed alone: CLIP's summary of a picture, whose other vectors stay as they are.

    norm: of cls.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, N, d) → (B, d)."""
        return cast(Tensor, self.norm(hidden[:, 0]))


class ImageLabels(nn.Module):
    """A score for each label from a picture's summary.

    d: width of the summary.  pooling: "cls", "mean" of the patches, or "both".
    """

    def __init__(self, d: int, labels: int, *, pooling: Pooling = "cls") -> None:
        super().__init__()
        self.score, self.pooling = Linear(d, labels), pooling

    def forward(self, hidden: Tensor, before: int, grid: PatchGrid) -> Tensor:
        """(B, N, d) → (B, labels)."""
        return cast(Tensor, self.score(summary(hidden, before, self.pooling)))


class PixelReconstruction(nn.Module):
    """The pixels of every patch from its vector: masked image modelling.

    d: width of the vectors.  stride: pixels that a patch becomes, each way.  channels: of the image.
    """

    def __init__(self, d: int, stride: int, channels: int) -> None:
        super().__init__()
        self.score, self.stride = PatchProjection(d, stride**2 * channels, (1, 1)), stride

    def forward(self, hidden: Tensor, before: int, grid: PatchGrid) -> Tensor:
        """(B, N, d) → (B, C, rows·stride, columns·stride)."""
        x = linear(hidden[:, before:], self.score.weight.flatten(1), self.score.bias)  # (B, patches, C·stride²)
        return pixel_shuffle(x.mT.reshape(*x.mT.shape[:2], *grid), self.stride)
