"""The visible tiles of a mask: listed once, in the right groups, without N×N, and with nothing visible left out."""

import pytest
import torch

from regard import masks
from regard.masks import mask as rules
from regard.masks import tiles
from regard.masks.tiles import visible_tiles

CPU = torch.device("cpu")
LONGFORMER = masks.window(5, 3) | masks.globals([2, 41])
LAST_QUERY = masks.window(1, 1) | masks.globals([100])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "ROWS", (8, 16))
    monkeypatch.setattr(tiles, "COLS", 4)
    monkeypatch.setattr(rules, "_KEPT", {})


MASKS = {
    "window": masks.window(5, 3),
    "window and globals": LONGFORMER,
    "the last query is global": LAST_QUERY,
    "dilated": masks.dilated(3, 2, 5),
    "dilated, window and globals": masks.dilated(3, 2, 9) | masks.window(2, 1) | masks.globals([50]),
    "dilated farther than the text": masks.dilated(2, 2, 300),
    "dilated from elsewhere": masks.dilated(3, 2, 9, offset=-13),
    "random blocks per head": masks.random_blocks(101, 8, count=2, seed=0, num_heads=3),
    "padding per batch row": masks.window(7, 7) & masks.padding([101, 13]),
    "globals per batch row": masks.window(2, 2) | masks.globals(torch.arange(101) == torch.tensor([[50], [97]])),
    "some queries look": masks.window(5, 3) & masks.queries(torch.arange(101) % 5 != torch.tensor([[1], [3]])),
    "dilated, some queries look": masks.dilated(3, 2, 5) & masks.queries(list(range(7, 31))),
    "globals, others do not look": LONGFORMER & ~masks.queries([50, 51]),
    "documents": masks.documents(torch.arange(101) // 23),
    "causal": masks.causal(),
    "nothing": masks.causal() & ~masks.causal(),
    "any cells": masks.dense(torch.rand(2, 3, 101, 101, generator=torch.Generator().manual_seed(0)) < 0.02),
}


def drawn(mask, found, nq, nk):
    """What the listed tiles show, written back into a matrix: (B, H, Nq, Nk), and how often each cell is listed."""
    batch, heads = mask.leading
    shown = torch.zeros(batch * heads, nq, nk, dtype=torch.bool)
    wide = set() if found.wide is None else set(found.wide.chosen.tolist())
    for panel in found.panels:
        for group in panel.groups:
            units = slice(0, len(group.row))
            j, real = group.keys(units)
            cells = group.cells(units) if group.masked else real.unsqueeze(1)
            cells = cells.expand(len(group.row), panel.queries.shape[1], group.width)
            for u, (lead, row) in enumerate(zip(group.lead.tolist(), group.row.tolist(), strict=True)):
                start = row * panel.queries.shape[1]
                for r, i in enumerate(panel.queries[row].tolist()):
                    if start + r < panel.count and (i not in wide or panel is found.wide):
                        assert not shown[lead, i, j[u][cells[u, r]]].any(), "a cell is listed twice"
                        shown[lead, i, j[u][cells[u, r]]] = True
    return shown.view(batch, heads, nq, nk)


@pytest.mark.parametrize("name", MASKS)
def test_listed_tiles_show_exactly_what_the_mask_shows(name):
    mask = MASKS[name]
    expected = mask.dense(101).expand(*mask.leading, 101, 101)
    assert torch.equal(drawn(mask, visible_tiles(mask, 101, 101, CPU), 101, 101), expected)


@pytest.mark.parametrize(("nq", "nk"), [(37, 101), (101, 37), (1, 101), (101, 1)])
def test_queries_and_keys_need_not_be_as_many(nq, nk):
    mask = masks.window(5, 3) | masks.globals([0])
    assert torch.equal(drawn(mask, visible_tiles(mask, nq, nk, CPU), nq, nk)[0, 0], mask.dense(nq, nk))


def test_no_mask_lists_every_tile_without_cells_to_look_at():
    found = visible_tiles(None, 32, 16, CPU)
    assert found.share == 1
    assert [(group.cols.tolist(), group.masked) for group in found.everyone.groups] == [([[0, 1, 2, 3]] * 2, False)]


def test_global_tokens_stand_in_a_panel_of_their_own():
    found = visible_tiles(LONGFORMER, 101, 101, CPU)
    assert found.wide.chosen.tolist() == [2, 41]
    alone = visible_tiles(masks.window(5, 3), 101, 101, CPU)
    widest = max(group.width for group in found.everyone.groups)
    assert widest <= max(group.width for group in alone.everyone.groups) + 2 * tiles.COLS  # a tile for each global key


def test_block_of_globals_is_an_ordinary_stretch():
    found = visible_tiles(masks.window(1, 1) | masks.globals(list(range(16))), 96, 96, CPU)
    assert found.wide is None
    assert max(group.width for group in found.everyone.groups) == 96


@pytest.mark.parametrize(("size", "rows"), [(8, 8), (16, 16)])
def test_tiles_are_as_large_as_the_blocks_that_the_mask_is_made_of(size, rows, monkeypatch):
    monkeypatch.setattr(tiles, "OVERHEAD", 1)
    found = visible_tiles(masks.random_blocks(256, size, count=1, seed=0), 256, 256, CPU)
    assert found.rows == rows
    assert found.share == size / 256
    assert not any(group.masked for group in found.everyone.groups)


def test_dilated_mask_costs_what_its_window_would():
    plain, dilated = (visible_tiles(m, 960, 960, CPU) for m in (masks.window(16, 16), masks.dilated(16, 16, 10)))
    assert dilated.order[:4].tolist() == [0, 10, 20, 30]
    assert dilated.everyone.chosen[:4].tolist() == [0, 10, 20, 30]
    assert dilated.share < 1.1 * plain.share


def test_share_of_a_window_halves_when_the_text_doubles():
    shares = [visible_tiles(masks.window(16, 16), n, n, CPU).share for n in (2048, 4096)]
    assert shares[0] / shares[1] == pytest.approx(2, rel=0.02)


def test_cells_of_a_window_are_kept_once_for_all_stretches_that_look_alike():
    found = visible_tiles(LONGFORMER, 1024, 1024, CPU)
    biggest = max(found.everyone.groups, key=lambda group: len(group.row))
    kept, which = biggest.patterns
    assert len(which) > 50
    assert len(kept) == 2  # at the right end no keys follow
    assert biggest.cells(slice(20, 27)).shape[0] == 1
    assert torch.equal(biggest.cells(slice(20, 27)).expand(7, -1, -1), biggest.evaluate(slice(20, 27)))


def test_cells_that_are_too_many_to_keep_are_evaluated_again(monkeypatch):
    monkeypatch.setattr(tiles, "MOST_PATTERN_CELLS", 0)
    mask = masks.dense(MASKS["any cells"].cells)  # nothing is kept with it yet
    found = visible_tiles(mask, 101, 101, CPU)
    assert all(group.patterns is None for group in found.everyone.groups)
    assert torch.equal(drawn(mask, found, 101, 101), mask.dense(101))


def test_lists_are_filled_up_only_where_there_would_be_many_groups():
    window = visible_tiles(masks.window(5, 3) | masks.globals([50]), 101, 101, CPU).everyone
    assert all((group.cols >= 0).all() for group in window.groups)
    causal = visible_tiles(masks.causal(), 1024, 1024, CPU).everyone
    seen = {int(n) for group in causal.groups for n in (group.cols >= 0).sum(1)}
    assert len(seen) == len(causal.queries)
    assert tiles.FEW_COUNTS < len(causal.groups) < len(seen) / 1.5


def test_tiles_of_an_equal_mask_are_found_again_and_bounded():
    found = visible_tiles(masks.window(3, 0), 50, 70, CPU)
    assert visible_tiles(masks.window(3, 0), 50, 70, CPU) is found
    assert visible_tiles(masks.window(3, 0), 51, 70, CPU) is not found
    for n in range(2 * rules.MOST_KEPT):
        visible_tiles(masks.window(n, 1), 5, 7, CPU)
    assert len(rules._KEPT) == rules.MOST_KEPT


def test_tiles_of_a_mask_of_tensors_are_kept_with_the_mask_and_die_with_it():
    mask = masks.documents([0, 0, 1, 1, 1])
    found = visible_tiles(mask, 5, 5, CPU)
    assert visible_tiles(mask, 5, 5, CPU) is found
    assert not rules._KEPT
    assert found in mask.kept.values()


def test_tiles_found_in_inference_can_be_trained_with():
    with torch.inference_mode():
        found = visible_tiles(LONGFORMER, 101, 101, CPU)
        patterns = found.everyone.groups[0].patterns
    assert not any(part.is_inference() for part in patterns)
    assert not any(group.cols.is_inference() for panel in found.panels for group in panel.groups)
    assert not found.everyone.queries.is_inference()


def test_tiles_grow_where_their_table_would_not_fit(monkeypatch):
    monkeypatch.setattr(tiles, "MOST_TILES", 64)
    found = visible_tiles(masks.window(1, 1), 1024, 1024, CPU)
    assert -(-1024 // found.rows) * -(-1024 // found.cols) <= 64


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.globals([7]), r"position.*7"),
        (masks.padding([9]), r"9.*7"),
    ],
    ids=str,
)
def test_mask_that_does_not_fit_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        visible_tiles(mask, 5, 7, CPU)
