"""The parts of Swin: attention in windows of a grid of patches, merging of patches, stages.

    pixels ─ patches (B, rows·columns, d) ─ block ─ block ─ merging (B, ¼ as many, 2·d) ─ block ─ … ─ norm
    block:   tokens ─ windows (B·W, N, d) ─ attention in each ─ tokens; then feed-forward

A window is a batch entry of one attention call, so nothing is ever as large as (rows·columns)². The windows of every
second block lie half a window further down and right: the grid is rolled for that, and the windows at its far edges
then hold tokens of opposite edges, which a mask hides from each other.

Axis letters: B images, W windows of an image, N tokens of a window, d width, which doubles with each merging.
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
from regard.checks import is_tracing, local
from regard.layouts import Frame, Sides
from regard.masks import Mask
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import DropPath, FeedForward, TowerOutput
from regard.nn.projections import Linear
from regard.nn.vision import PatchGrid, PatchProjection, interpolate_positions
from regard.positions import Swin, SwinBias


@dataclass(frozen=True, eq=False)
class Windows:
    """A grid of tokens cut into windows, row by row, and the tokens in each likewise; and the way back.

    >>> windows = Windows.of(PatchGrid(2, 3), 2, shifted=False, batch=1, device=torch.device("cpu"))
    >>> windows.cut(torch.arange(1.0, 7.0).reshape(1, 6, 1)).squeeze(-1).tolist()      # 2 × 3 padded to 2 × 4
    [[1.0, 2.0, 4.0, 5.0], [3.0, 0.0, 6.0, 0.0]]
    """

    grid: PatchGrid
    padded: PatchGrid
    side: int
    order: Tensor  # (W·N,) the index in the padded grid of each token
    back: Tensor  # (rows·columns,) the index in the windows of each token of the grid
    mask: (
        Mask | None
    )  # of (B·W) batch rows; None hides nothing. Padding is seen, as in the paper's code and transformers.

    @classmethod
    def of(cls, grid: PatchGrid, window: int, *, shifted: bool, batch: int, device: torch.device) -> Windows:
        """The windows of `batch` images, `window` tokens wide and high, shifted by half a window or not.

        If a side of the grid is no longer than that, the window is as small as it, and not shifted.
        """
        side, shift = min(window, *grid), window // 2 if shifted and min(grid) > window else 0
        padded = PatchGrid(grid.rows + -grid.rows % side, grid.columns + -grid.columns % side)
        # int: while torch.compile traces with dynamic sizes, it then makes a graph for each size of image.
        rows, columns, side, shift = int(grid.rows), int(grid.columns), int(side), int(shift)
        order, back, regions = _tables(rows, columns, int(padded.rows), int(padded.columns), side, shift, device)
        mask = masks.documents(regions.repeat(batch, 1)) if shift else None
        return cls(grid, padded, side, order, back, mask)

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


def _tables(
    rows: int, columns: int, all_rows: int, all_columns: int, side: int, shift: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`order` and `back` of `Windows`, and the region of each token, (W, N), for a grid and the padded one."""

    def cut(table: Tensor) -> Tensor:
        """(rows, columns) → (W, N)."""
        return table.reshape(all_rows // side, side, -1, side).transpose(1, 2).reshape(-1, side**2)

    def regions(n: int) -> Tensor:
        """(n,) of a rolled axis: 0, in the last window 1, and there 2 for what came round from the other edge."""
        place = torch.arange(n, device=device)
        return (place >= n - side).long() + (place >= n - shift).long()

    numbers = torch.arange(all_rows * all_columns, device=device)
    order = cut(numbers.reshape(all_rows, all_columns).roll((-shift, -shift), (0, 1)))
    laid = numbers.reshape(all_rows // side, -1, side, side).transpose(1, 2).reshape(all_rows, all_columns)
    back = laid.roll((shift, shift), (0, 1))[:rows, :columns]
    ids = 3 * regions(all_rows).unsqueeze(-1) + regions(all_columns)
    return order.flatten(), back.flatten(), cut(ids)


# Traced, the indices would be computed anew in every kernel that uses them. This is what
# torch.compiler.assume_constant_result does, which would import the compiler.
_tables._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=32)
def _kept_windows(grid: PatchGrid, window: int, *, shifted: bool, batch: int, device: torch.device) -> Windows:
    with torch.inference_mode(False):  # a later call may be trained with what is kept here
        return Windows.of(grid, window, shifted=shifted, batch=batch, device=device)


class WindowTable(Swin):
    """Swin's relative positions in square windows; smaller windows use the middle of the table.

    >>> WindowTable(7, num_heads=3).bias(torch.zeros(1, 3, 25, 8), 1.0)
    SwinBias(5×5 patches, 3 heads)
    """

    def __init__(self, side: int, num_heads: int) -> None:
        super().__init__((side, side), num_heads)

    def bias(self, q: Tensor, scale: float) -> SwinBias:
        """The bias for q (…, N, D) of a window of √N × √N tokens."""
        full, side = self.window[0], isqrt(q.shape[-2])
        if side >= full:
            return super().bias(q, scale)
        near = slice(full - side, full + side - 1)
        table = local(self.table).reshape(2 * full - 1, 2 * full - 1, -1)[near, near]
        return SwinBias(table.flatten(0, 1), (side, side))


class WindowBlock(nn.Module):
    """Attention in each window and feed-forward, each normed before and added to x.

    left_out: drop-path probability of attention; as in transformers not of feed-forward, unlike in the paper's code.
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
    """Four neighbours become one token of twice their width d; an odd side of the grid is padded.

    >>> Merging(6)(torch.zeros(2, 15, 6), PatchGrid(5, 3)).shape
    torch.Size([2, 6, 12])
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
        # Left before right, upper first.
        fours = x.reshape(x.shape[0], rows, 2, columns, 2, d).permute(0, 1, 3, 4, 2, 5)
        return cast(Tensor, self.w(self.norm(fours.reshape(x.shape[0], rows * columns, 4 * d))))


def merged(grid: PatchGrid) -> PatchGrid:
    """The grid after merging."""
    return PatchGrid(-(-grid.rows // 2), -(-grid.columns // 2))


class Stage(nn.Module):
    """Blocks on one grid, windows shifted in every second one, and the merging after them (None in the last stage)."""

    def __init__(self, blocks: Sequence[WindowBlock], window: int, merging: Merging | None) -> None:
        super().__init__()
        self.blocks, self.window, self.merging = nn.ModuleList(blocks), window, merging

    def forward(self, x: Tensor, grid: PatchGrid) -> Tensor:
        """(B, rows·columns, d) → the same, or merged."""
        # Kept, as they hold no weights: recomputed they would take a twentieth of the time of a small Swin on a CPU.
        make = Windows.of if is_tracing() else _kept_windows
        cuts = [
            make(grid, self.window, shifted=shifted, batch=x.shape[0], device=x.device)
            for shifted in (False, True)[: len(self.blocks)]
        ]
        for number, block in enumerate(self.blocks):
            x = block(x, cuts[number % 2])
        return x if self.merging is None else cast(Tensor, self.merging(x, grid))


class WindowEmbedding(nn.Module):
    """Pixels to normed vectors of patches, plus a learnt position for each if the model has them.

    >>> WindowEmbedding(PatchProjection(3, 6, (4, 4), padded=True), (12, 8))(torch.zeros(2, 3, 13, 8)).shape
    torch.Size([2, 8, 6])

    pixels: height and width that positions are learnt for; None for no positions.
    masked: whether there is a token for masked patches (masked image modelling).
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
                raise ValueError(f"an image of {pixels[0]} × {pixels[1]} pixels holds no patch of {patches.size}")
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
    """Patches, stages, a norm. `hidden_states` are the embedding and the merged, unnormed output of each stage."""

    def __init__(self, embed: WindowEmbedding, stages: Sequence[Stage], *, norm: nn.Module) -> None:
        super().__init__()
        self.embed, self.stages, self.norm = embed, nn.ModuleList(stages), norm

    def grid(self, height: int, width: int) -> PatchGrid:
        """The grid of tokens after all stages, for an image of this size."""
        grid = self.embed.patches.grid(height, width)
        for _ in range(len(self.stages) - 1):
            grid = merged(grid)
        return grid

    def sides(self, frame: Frame) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, by the attention's path in the tower."""
        size = self.embed.patches.size
        sides: dict[str, Sides] = {}
        for i, stage in enumerate(self.stages):
            assert isinstance(stage, Stage)
            kinds = [Sides.windows(frame, stage=i, shifted=s, patch=size, window=stage.window) for s in (False, True)]
            sides |= {f"stages.{i}.blocks.{j}.attention": kinds[j % 2] for j in range(len(stage.blocks))}
        return sides

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
