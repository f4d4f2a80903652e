"""The lists of visible tiles: what they show is the mask, cell by cell, read by rows and by columns."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from regard import masks
from regard.masks import tiles as tile_lists
from regard.masks.tiles import TileLists, Tiles

CPU = torch.device("cpu")
B, H, NQ, NK = 2, 3, 37, 53
MASKS = {
    "band": masks.window(9, 4),
    "causal of fewer queries": masks.causal(),
    "globals": masks.window(5, 5) | masks.globals([0, 30]),
    "of each text": masks.window(9, 9) & masks.padding([NK, 20]),
    "of each head": masks.window([[3, 9, 20]], 2),
    "of both": masks.window([[3, 9, 20]], 2) & masks.padding([NK, 20]),
    "nothing": ~masks.prefix(NK),
    "everything": masks.prefix(NK),
}


def shown(lists: TileLists, mask: masks.Mask, size: tuple[int, int], by_columns: bool) -> Tensor:
    """The mask (B', H', Nq, Nk) as somebody who walks the lists sees it."""
    rows, cols = size
    down, across = -(-NQ // rows), -(-NK // cols)
    batch, heads = lists.leading
    found = torch.zeros(batch, heads, down * rows, across * cols, dtype=torch.bool)
    dense = mask.dense(NQ, NK).expand(*(mask.leading), NQ, NK)
    full, mixed = (lists.full_by_columns, lists.mixed_by_columns) if by_columns else (lists.full, lists.mixed)

    def put(tiles: Tiles, number: int, at: int, cells: Tensor | None) -> None:
        lines, other = across if by_columns else down, int(tiles.index[at])
        (b, h), line = divmod(number // lines, heads), number % lines
        r, c = (other, line) if by_columns else (line, other)
        place = found[b, h, r * rows : (r + 1) * rows, c * cols : (c + 1) * cols]
        assert not place.any(), "a tile twice"
        if cells is not None:
            place[:] = cells.bool()
        elif lists.band is None or tiles is full:
            place[:] = True
        else:  # a band's mixed tiles have no cells of their own
            part = dense[0, 0, r * rows : (r + 1) * rows, c * cols : (c + 1) * cols]
            place[: part.shape[0], : part.shape[1]] = part

    for tiles in (full, mixed):
        for number in range(len(tiles.begin) - 1):
            for at in range(int(tiles.begin[number]), int(tiles.begin[number + 1])):
                stored = at if not by_columns else int(lists.numbers_by_columns[at]) if tiles is mixed else 0
                put(tiles, number, at, lists.cells[stored] if tiles is mixed and lists.band is None else None)
    return found[..., :NQ, :NK]


@pytest.mark.pairwise
@pytest.mark.parametrize("by_columns", [False, True], ids=["by rows", "by columns"])
@pytest.mark.parametrize("size", [(8, 8), (16, 4), (64, 64)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_what_the_lists_show_is_the_mask(name: str, size: tuple[int, int], by_columns: bool) -> None:
    mask = MASKS[name]
    for leading in (None, (B, H)):
        lists = TileLists(mask, NQ, NK, size, CPU, leading)
        assert lists.leading == (leading or mask.leading)
        expected = mask.dense(NQ, NK).expand(*mask.leading, NQ, NK).expand(*lists.leading, NQ, NK)
        assert torch.equal(shown(lists, mask, size, by_columns), expected)


@given(
    before=st.integers(0, 40),
    after=st.integers(0, 40),
    chosen=st.lists(st.integers(0, NQ - 1), max_size=3),
    lengths=st.lists(st.integers(0, NK), min_size=B, max_size=B),
    size=st.sampled_from([(4, 4), (8, 16), (16, 8)]),
)
@settings(max_examples=25)
def test_whatever_the_mask(
    before: int, after: int, chosen: list[int], lengths: list[int], size: tuple[int, int]
) -> None:
    mask = (masks.window(before, after) | masks.globals(chosen)) & masks.padding(lengths)
    lists = TileLists(mask, NQ, NK, size, CPU)
    for by_columns in (False, True):
        assert torch.equal(shown(lists, mask, size, by_columns), mask.dense(NQ, NK))


def test_lines_that_show_most_come_first_and_every_line_comes_once() -> None:
    lists = TileLists(masks.window(2, 2) | masks.globals([20]), NQ, NQ, (4, 4), CPU)
    assert lists.order[0, 0] == 20 // 4
    assert lists.order_by_columns[0, 0] == 20 // 4
    for order in (lists.order, lists.order_by_columns):
        assert sorted(order[0].tolist()) == list(range(10))


def test_cells_are_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS["of both"]
    whole = TileLists(mask, NQ, NK, (8, 8), CPU).cells
    monkeypatch.setattr(tile_lists, "TILES_AT_ONCE", 3)
    assert torch.equal(TileLists(mask, NQ, NK, (8, 8), CPU).cells, whole)
    assert len(whole) > 3


def test_the_share_is_that_of_visible_tiles() -> None:
    assert TileLists(masks.causal(), 32, 32, (8, 8), CPU).share == 10 / 16


def test_a_band_stores_no_cells() -> None:
    assert TileLists(masks.window(200, 200), 4096, 4096, (64, 64), CPU).cells.numel() == 1
