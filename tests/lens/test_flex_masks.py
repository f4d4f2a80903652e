"""A FlexAttention block mask as one of ours: the same cells, and tiles that are never wrong."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from regard.lens.taps import functions
from regard.lens.taps.functions import flex_mask
from regard.masks import EMPTY, FULL, PARTIAL

B, H, NQ, NK = 2, 3, 37, 53
LENGTHS = torch.tensor([31, 53])
TABLE = torch.rand(B, H, NQ, NK, generator=torch.Generator().manual_seed(3)) < 0.5


def causal(b, h, i, j):
    return i >= j


def padded(b, h, i, j):
    return j < LENGTHS[b]


def by_head(b, h, i, j):
    return (j - i).abs() < 10 * h + 5


def looked_up(b, h, i, j):
    """One index after the other: with whole tensors of indices this would mean something else."""
    return TABLE[b][h][i][j]


def unlike(b, h, i, j):
    return h != b


MODS = {causal: (1, 1), padded: (B, 1), by_head: (1, H), looked_up: (B, H), unlike: (B, H)}


@pytest.mark.pairwise
@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("block", [128, (16, 8)])
def test_cells_are_those_of_the_block_mask(mod, compiled, block):
    theirs = create_block_mask(mod, B, H, NQ, NK, device="cpu", BLOCK_SIZE=block)
    ours = flex_mask(theirs, B, H, compiled=compiled)
    dense = ours.dense(NQ, NK).expand(B, H, NQ, NK)
    assert torch.equal(dense, create_mask(mod, B, H, NQ, NK, device="cpu"))


@pytest.mark.parametrize(("mod", "leading"), MODS.items())
def test_mask_varies_over_what_its_function_touches(mod, leading):
    theirs = create_block_mask(mod, None, None, NQ, NK, device="cpu")
    for compiled in (False, True):
        assert flex_mask(theirs, B, H, compiled=compiled).leading == leading


def test_function_that_fails_is_taken_to_vary():
    def touchy(b, h, i, j):
        return b.new_ones(()) & h.new_ones(()) & (i >= j)

    theirs = create_block_mask(causal, None, None, NQ, NK, device="cpu")
    theirs.mask_mod = touchy
    assert flex_mask(theirs, B, H, compiled=False).leading == (B, H)


@pytest.mark.pairwise
@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("asked", [0, 1 << 30], ids=["by blocks", "by cells"])
@pytest.mark.parametrize("size", [(7, 13), (16, 8), (25, 25), (200, 200)])
@pytest.mark.parametrize("compiled", [False, True])
def test_tiles_are_certain_where_they_say_so(mod, asked, size, compiled, monkeypatch):
    monkeypatch.setattr(functions, "ASKED", asked)
    ours = flex_mask(create_block_mask(mod, B, H, NQ, NK, device="cpu", BLOCK_SIZE=(16, 8)), B, H, compiled=compiled)
    kinds, dense = ours.tiles(NQ, NK, size), ours.dense(NQ, NK).expand(*ours.leading, NQ, NK)
    for r, rows in enumerate(torch.arange(NQ).split(size[0])):
        for c, cols in enumerate(torch.arange(NK).split(size[1])):
            tile = dense[:, :, rows][..., cols]
            kind = kinds[:, :, r, c]
            assert not tile[kind == EMPTY].any()
            assert tile[kind == FULL].all()
            if asked:
                whole = (tile.all(-1).all(-1), tile.any(-1).any(-1))
                assert torch.equal(kind == FULL, whole[0])
                assert torch.equal(kind == EMPTY, ~whole[1])


def test_blocks_let_tiles_be_skipped(monkeypatch):
    monkeypatch.setattr(functions, "ASKED", 0)
    theirs = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    tiles = flex_mask(theirs, B, H, compiled=True).tiles(64, 64, 16)[0, 0]
    expected = torch.full((4, 4), FULL).tril(-1) + torch.eye(4) * PARTIAL
    assert torch.equal(tiles, expected.to(torch.int8))
    unsure = flex_mask(theirs, B, H, compiled=False).tiles(64, 64, 16)
    assert (unsure == PARTIAL).all()


def listed_blocks():
    """Queries 0–15 see block 1 of the keys in full; queries 16–31 see block 0 as far as causal lets them."""
    partial, full = (torch.tensor([[counts]], dtype=torch.int32) for counts in ([0, 1], [1, 0]))
    order = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    turned = torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        partial, order, full, turned, BLOCK_SIZE=16, mask_mod=lambda b, h, i, j: j < 5, seq_lengths=(32, 32)
    )


def test_compiled_kernel_goes_by_the_blocks_that_are_listed():
    dense = flex_mask(listed_blocks(), B, H, compiled=True).dense(32, 32)
    expected = torch.zeros(32, 32, dtype=torch.bool)
    expected[:16, 16:] = True
    expected[16:, :5] = True
    assert torch.equal(dense, expected)


def test_the_other_asks_its_function_for_every_cell():
    dense = flex_mask(listed_blocks(), B, H, compiled=False).dense(32, 32)
    assert torch.equal(dense, (torch.arange(32) < 5).expand(32, 32))


def test_single_pairs_can_be_asked_for():
    theirs = create_block_mask(looked_up, B, H, NQ, NK, device="cpu", BLOCK_SIZE=16)
    see = flex_mask(theirs, B, H, compiled=True).bind(NQ, NK, torch.device("cpu"), torch.float32)
    b, h = torch.arange(B).view(-1, 1, 1), torch.arange(H).view(-1, 1)
    i, j = torch.arange(NQ), torch.arange(NQ).flip(0) + 7
    assert torch.equal(see(b, h, i, j), TABLE[b, h, i, j])
    assert see(b, h, i[:0], j[:0]).shape == (B, H, 0)


def test_no_block_mask_is_no_mask():
    assert flex_mask(None, B, H, compiled=True) is None


def test_mask_prints_as_its_function():
    theirs = create_block_mask(causal, None, None, NQ, NK, device="cpu")
    assert repr(flex_mask(theirs, B, H, compiled=True)) == "flex_mask(causal)"
