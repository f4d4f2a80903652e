"""The parts of models that look at a picture window by window: cutting a grid, blocks, merging, stages (Swin).

    pixels ─ patches (B, rows·columns, d) ─ block ─ block ─ merging (B, ¼ as many, 2·d) ─ block ─ … ─ norm
    block:   tokens ─ windows (B·W, N, d) ─ attention in each ─ tokens; then feed-forward

A window is a batch entry of the one attention, so nothing is ever as large as (rows·columns)². Every second block's
windows lie half a window further down and right. The grid is rolled for that, and the windows at its far edges then
hold tokens of opposite edges, which do not see each other: the mask says so. This file knows no family, no checkpoint.

Axis letters: B pictures, W windows of a picture, N tokens of a window, d width, which doubles with each merging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard import masks
from regard.checks import followed, local
from regard.layouts import Frame, Sides
from regard.masks import Mask
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import DropPath, FeedForward, TowerOutput
from regard.nn.linear import Linear
from regard.nn.vision import PatchGrid, PatchProjection, interpolate_positions
from regard.positions import Swin, SwinBias

__all__ = ["Merging", "Stage", "WindowBlock", "WindowEmbedding", "WindowTable", "WindowTower", "Windows"]


@dataclass(frozen=True, eq=False)
class Windows:
    """A grid of tokens cut into windows, row by row, and the tokens in each likewise; and the way back.

    >>> windows = Windows.of(PatchGrid(2, 3), 2, shifted=False, batch=1, device=torch.device("cpu"))
    >>> windows.cut(torch.arange(1.0, 7.0).reshape(1, 6, 1)).squeeze(-1).tolist()      # 2 × 3 padded to 2 × 4
    [[1.0, 2.0, 4.0, 5.0], [3.0, 0.0, 6.0, 0.0]]

    order: (W·N,) which token of the padded grid comes where.  back: (rows·columns,) where the grid's own went.
    mask: who sees whom, (B·W) batch rows; None for all. Padding is seen, as in the paper's code and in transformers.
    """

    grid: PatchGrid
    padded: PatchGrid
    side: int
    order: Tensor
    back: Tensor
    mask: Mask | None

    @classmethod
    def of(cls, grid: PatchGrid, window: int, *, shifted: bool, batch: int, device: torch.device) -> Windows:
        """The windows of `batch` pictures whose tokens lie on a grid.

        window: tokens of a side. Where a side of the grid is no longer, the window is as small as it, and not shifted.
        shifted: by half a window.
        """
        side, shift = min(window, *grid), window // 2 if shifted and min(grid) > window else 0
        padded = PatchGrid(grid.rows + -grid.rows % side, grid.columns + -grid.columns % side)
        numbers = torch.arange(padded.rows * padded.columns, device=device)
        order = _cut(numbers.reshape(padded).roll((-shift, -shift), (0, 1)), side)  # (W, N)
        laid = numbers.reshape(padded.rows // side, -1, side, side).transpose(1, 2).reshape(padded)
        back = laid.roll((shift, shift), (0, 1))[: grid.rows, : grid.columns]
        mask = None
        if shift:
            down, across = (_regions(n, side, shift, device) for n in padded)
            mask = masks.documents(_cut(3 * down.unsqueeze(-1) + across, side).repeat(batch, 1))
        return cls(grid, padded, side, order.flatten(), back.flatten(), mask)

    def cut(self, x: Tensor) -> Tensor:
        """(B, rows·columns, d) → (B·W, N, d)."""
        if self.padded != self.grid:
            below, beside = self.padded.rows - self.grid.rows, self.padded.columns - self.grid.columns
            x = pad(x.reshape(x.shape[0], *self.grid, -1), (0, 0, 0, beside, 0, below)).flatten(1, 2)
        # One copy; rolling along two axes and cutting would be three.
        return x.index_select(1, self.order).reshape(-1, self.side**2, x.shape[-1])

    def put_back(self, y: Tensor) -> Tensor:
        """(B·W, N, d) → (B, rows·columns, d), without the padding."""
        return y.reshape(-1, len(self.order), y.shape[-1]).index_select(1, self.back)


@lru_cache(maxsize=32)
def _kept_windows(grid: PatchGrid, window: int, *, shifted: bool, batch: int, device: torch.device) -> Windows:
    """`Windows.of`, remembered. Outside of inference mode: a later call may be trained with what is kept here."""
    with torch.inference_mode(False):
        return Windows.of(grid, window, shifted=shifted, batch=batch, device=device)


def _cut(table: Tensor, side: int) -> Tensor:
    """(rows, columns) → (W, N)."""
    rows, columns = table.shape
    return table.reshape(rows // side, side, columns // side, side).transpose(1, 2).reshape(-1, side**2)


def _regions(n: int, side: int, shift: int, device: torch.device) -> Tensor:
    """(n,) of a rolled axis: 0, in the last window 1, and there 2 for what came round from the other edge."""
    place = torch.arange(n, device=device)
    return (place >= n - side).long() + (place >= n - shift).long()


class WindowTable(Swin):
    """Swin's relative positions in square windows, also in smaller ones, which use the middle of the table.

    >>> WindowTable(7, num_heads=3).bias(torch.zeros(1, 3, 25, 8), 1.0)
    SwinBias(5×5 patches, 3 heads)

    A number of the table is of an offset between two tokens, which means the same in a window of any size.
    side: tokens of a window's side.
    """

    def __init__(self, side: int, num_heads: int) -> None:
        super().__init__((side, side), num_heads)

    def bias(self, q: Tensor, scale: float) -> SwinBias:
        """The bias for q (…, N, D), N being the square of a side."""
        full, side = self.window[0], isqrt(q.shape[-2])
        if side >= full:
            return super().bias(q, scale)
        near = slice(full - side, full + side - 1)
        table = local(self.table).reshape(2 * full - 1, 2 * full - 1, -1)[near, near]
        return SwinBias(table.flatten(0, 1), (side, side))


class WindowBlock(nn.Module):
    """Attention in each window and feed-forward, each normed before and added to x.

    norms: of the two parts.  dropout: on what each adds, in training only.  left_out: of what attention adds; the
    paper's code leaves out feed-forward's part as often, transformers does not, nor does this.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: FeedForward,
        norms: Sequence[nn.Module],
        *,
        dropout: float = 0.0,
        left_out: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = norms
        self.dropout, self.left_out = nn.Dropout(dropout), DropPath(left_out)

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        """(B, rows·columns, d) → the same."""
        seen = self.attention(windows.cut(self.attention_norm(x)), mask=windows.mask)  # (B·W, N, d)
        x = x + self.left_out(windows.put_back(self.dropout(seen)))
        return x + cast(Tensor, self.dropout(self.feed_forward(self.feed_forward_norm(x))))


class Merging(nn.Module):
    """Four neighbours become one token of twice their width; an odd side of the grid is padded.

    >>> Merging(6)(torch.zeros(2, 15, 6), PatchGrid(5, 3)).shape
    torch.Size([2, 6, 12])

    d: width before.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.w = nn.LayerNorm(4 * d), Linear(4 * d, 2 * d, bias=False)

    def forward(self, x: Tensor, grid: PatchGrid) -> Tensor:
        """(B, rows·columns, d) → (B, ⌈rows/2⌉·⌈columns/2⌉, 2·d)."""
        d, (rows, columns) = x.shape[-1], merged(grid)
        x = x.reshape(x.shape[0], *grid, d)
        if grid.rows % 2 or grid.columns % 2:
            x = pad(x, (0, 0, 0, grid.columns % 2, 0, grid.rows % 2))
        fours = x.reshape(x.shape[0], rows, 2, columns, 2, d).permute(
            0, 1, 3, 4, 2, 5
        )  # left before right, upper first
        return cast(Tensor, self.w(self.norm(fours.reshape(x.shape[0], rows * columns, 4 * d))))


def merged(grid: PatchGrid) -> PatchGrid:
    """What is left of a grid after merging.

    >>> merged(PatchGrid(5, 8))
    PatchGrid(rows=3, columns=4)
    """
    return PatchGrid(-(-grid.rows // 2), -(-grid.columns // 2))


class Stage(nn.Module):
    """Blocks on one grid, their windows shifted in every second one, and the merging after them.

    window: tokens of a window's side.  merging: None in the last stage.
    """

    def __init__(self, blocks: Sequence[WindowBlock], window: int, merging: Merging | None) -> None:
        super().__init__()
        self.blocks, self.window, self.merging = nn.ModuleList(blocks), window, merging

    def forward(self, x: Tensor, grid: PatchGrid) -> Tensor:
        """(B, rows·columns, d) → the same, or merged."""
        # Kept, for no weight is in them: made anew they would take a twentieth of the time of a small Swin on a CPU.
        make = Windows.of if followed() else _kept_windows
        cuts = [
            make(grid, self.window, shifted=shifted, batch=x.shape[0], device=x.device)
            for shifted in (False, True)[: len(self.blocks)]
        ]
        for number, block in enumerate(self.blocks):
            x = block(x, cuts[number % 2])
        return x if self.merging is None else cast(Tensor, self.merging(x, grid))


class WindowEmbedding(nn.Module):
    """Pixels to normed vectors of patches, with a learnt position for each where the model has them.

    >>> WindowEmbedding(PatchProjection(3, 6, (4, 4), padded=True), (12, 8))(torch.zeros(2, 3, 13, 8)).shape
    torch.Size([2, 8, 6])

    patches: how they are made.  pixels: height and width that positions are learnt for; None where there are none.
    masked: is there a token for hidden patches (masked image modelling).  dropout: in training only.
    """

    hidden: Tensor | None
    positions: Tensor | None
    learnt: PatchGrid | None

    def __init__(
        self, patches: PatchProjection, pixels: tuple[int, int] | None, *, masked: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        d = patches.weight.shape[0]
        self.patches, self.norm, self.dropout = patches, nn.LayerNorm(d), nn.Dropout(dropout)
        self.hidden = nn.Parameter(torch.zeros(d)) if masked else None
        self.learnt, self.positions = None, None
        if pixels is not None:
            rows, columns = pixels[0] // patches.size[0], pixels[1] // patches.size[1]  # the whole ones
            if rows < 1 or columns < 1:
                raise ValueError(f"a picture of {pixels[0]} × {pixels[1]} pixels holds no patch of {patches.size}")
            self.learnt, self.positions = PatchGrid(rows, columns), nn.Parameter(torch.zeros(rows * columns, d))

    @property
    def before(self) -> tuple[str, ...]:
        """The tokens before the patches: none."""
        return ()

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> Tensor:
        """(B, C, H, W) → (B, rows·columns, d). bool_masked_pos: (B, patches), True where a patch is masked."""
        x = self.norm(self.patches(pixel_values))
        if bool_masked_pos is not None:
            assert self.hidden is not None
            x = torch.where(bool_masked_pos.unsqueeze(-1), self.hidden, x)
        if self.positions is not None and self.learnt is not None:
            x = x + interpolate_positions(self.positions, self.learnt, self.patches.grid(*pixel_values.shape[-2:]))
        return cast(Tensor, self.dropout(x))


class WindowTower(nn.Module):
    """Patches, stages, a norm.

    Every layer's vectors are the embedding's and, of each stage, what its merging gave, unnormed.
    """

    def __init__(self, embed: WindowEmbedding, stages: Sequence[Stage], *, norm: nn.Module) -> None:
        super().__init__()
        self.embed, self.stages, self.norm = embed, nn.ModuleList(stages), norm

    def grid(self, height: int, width: int) -> PatchGrid:
        """How many tokens are left of so many pixels after all stages."""
        grid = self.embed.patches.grid(height, width)
        for _ in range(len(self.stages) - 1):
            grid = merged(grid)
        return grid

    def sides(self, frame: Frame) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, by the attention's path in the tower."""
        size = self.embed.patches.size
        found: dict[str, Sides] = {}
        for i, stage in enumerate(self.stages):
            assert isinstance(stage, Stage)
            kinds = [Sides.windows(frame, stage=i, shifted=s, patch=size, window=stage.window) for s in (False, True)]
            found |= {f"stages.{i}.blocks.{j}.attention": kinds[j % 2] for j in range(len(stage.blocks))}
        return found

    def forward(
        self, pixel_values: Tensor, *, bool_masked_pos: Tensor | None = None, output_hidden_states: bool = False
    ) -> TowerOutput:
        """(B, C, H, W) → the last stage's tokens, and every stage's. bool_masked_pos: (B, patches)."""
        x, grid = self.embed(pixel_values, bool_masked_pos), self.embed.patches.grid(*pixel_values.shape[-2:])
        hidden_states = [x]
        for stage in self.stages:
            x, grid = stage(x, grid), merged(grid)
            hidden_states += [x] if output_hidden_states else []
        return TowerOutput(self.norm(x), tuple(hidden_states) if output_hidden_states else None)
