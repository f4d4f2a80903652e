"""Masks named by what they show, and the padding in them."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import masks
from regard.lens.visibility import Outline, sides, survey, trace

CPU = torch.device("cpu")


def outline_of(mask: masks.Mask | None, nq: int, nk: int) -> tuple[Outline, Tensor]:
    """The outline of a mask whose cells are given one by one, and its padding."""
    cells = torch.ones(nq, nk, dtype=torch.bool) if mask is None else mask.dense(nq, nk)
    numbers, padding = trace(survey(masks.dense(cells), None, -inf, nq, nk, CPU))
    return Outline(*numbers.tolist(), nq, nk), padding


def padded(lengths: list[int], n: int, side: str) -> Tensor:
    return ~masks.padding(lengths, side=side).dense(1, n)[:, 0, 0]


@pytest.mark.parametrize(
    ("mask", "sizes", "name", "hides"),
    [
        (None, (5, 5), "all visible", False),
        (None, (3, 7), "all visible", False),
        (masks.causal(), (5, 5), "causal", True),
        (masks.causal(), (3, 7), "causal", True),
        (masks.causal(), (7, 3), "causal", True),
        (masks.causal(offset=0), (3, 7), "causal, offset 0", True),
        (masks.causal(offset=0), (7, 3), "causal, offset 0", True),
        (masks.causal(offset=2), (3, 11), "causal, offset 2", True),
        (masks.causal(offset=-1), (5, 5), "causal, offset -1", True),
        (masks.causal(offset=2), (5, 5), "causal, offset 2", False),
        (masks.window(2, 0), (7, 7), "window(2, 0)", True),
        (masks.window(2, 1), (7, 7), "window(2, 1)", False),
        (masks.window(2, 0), (5, 11), "window(2, 0)", True),
        (masks.window(1, 0, offset=0), (3, 7), "window from -5 to -4", True),
        (~masks.causal(), (5, 5), "window from +1 to +4", False),
        (masks.window(1, 1) | masks.globals([0]), (7, 7), None, False),
        (masks.documents([0, 0, 0, 1, 1]) & masks.causal(), (5, 5), None, True),
        (masks.documents([0, 0, 0, 1, 1]), (5, 5), None, False),
        (masks.causal(offset=-9), (5, 5), "nothing visible", False),
        (None, (1, 7), "all visible", False),
        (masks.causal(offset=3), (1, 7), "all so far", False),
        (masks.window(2, 0, offset=4), (1, 7), "window(2, 0)", False),
        (masks.window(2, 0), (1, 7), "window(2, 0)", False),
    ],
)
def test_cells_get_the_name_of_the_mask_they_are(mask, sizes, name, hides):
    outline, padding = outline_of(mask, *sizes)
    assert (outline.name, outline.hides_future) == (name, hides)
    assert not padding.any() or name == "nothing visible"


@pytest.mark.pairwise
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("mask", "name"),
    [(None, "all visible"), (masks.causal(), "causal"), (masks.window(3, 1), "window(3, 1)")],
)
@pytest.mark.parametrize("sizes", [(11, 11), (5, 11)])
def test_padding_is_taken_out_before_the_mask_is_named(side, mask, name, sizes):
    lengths = [7, 11, 2]
    real = masks.padding(lengths, side=side)
    outline, padding = outline_of(real if mask is None else mask & real, *sizes)
    assert outline.name == name
    expected = padded(lengths, 11, side)
    if name.startswith("window") and sizes == (5, 11):
        expected &= torch.arange(11) >= 11 - 5 - 3  # what the window never reaches is not missed
    assert torch.equal(padding, expected)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99))
def test_a_name_is_exact(nq, nk, before, after, seed):
    torch.manual_seed(seed)
    cells = masks.window(before, after).dense(nq, nk) & (torch.rand(2, 1, 1, nk) < 0.8)
    if seed % 2:
        cells = cells ^ (torch.rand(2, 1, nq, nk) < 0.05)
    seen = survey(masks.dense(cells), None, -inf, nq, nk, CPU)
    numbers, padding = trace(seen)
    outline = Outline(*numbers.tolist(), nq, nk)
    if outline.choice > 2:
        return
    low = outline.near if outline.choice == 2 else -nq
    high = outline.far if outline.choice else nk
    distance = torch.arange(nk) - torch.arange(nq).view(-1, 1)
    named = (distance >= low) & (distance <= high) & ~padding[:, None, None]
    empty = ~cells.any(-1, keepdim=True)
    assert torch.equal(cells, named & ~empty)


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(2, 1)])
def test_one_cell_more_or_less_takes_the_name_away(mask):
    for i, j in ((0, 0), (6, 5), (3, 3)):
        cells = mask.dense(7)
        cells[i, j] = ~cells[i, j]
        if cells[i].any():
            assert outline_of(masks.dense(cells), 7, 7)[0].name is None


def test_rows_hidden_together_with_their_keys_keep_the_name():
    real = torch.tensor([True, True, True, False, False])
    outline, padding = outline_of(masks.dense(real & real.view(-1, 1)), 5, 5)
    assert outline.name == "all visible"
    assert padding.tolist() == [(~real).tolist()]


def test_keys_beyond_the_reach_of_a_causal_mask_are_no_padding():
    """A cache of fixed size: 3 queries at positions 2 to 4, and room for 9 keys."""
    outline, padding = outline_of(masks.causal(offset=2), 3, 9)
    assert (outline.name, outline.offset) == ("causal, offset 2", 2)
    assert not padding.any()


def test_one_query_tells_padding_by_batch_rows_that_differ():
    _, differing = outline_of(masks.padding([4, 7], side="left"), 1, 7)
    assert torch.equal(differing, padded([4, 7], 7, "left"))
    outline, alike = outline_of(masks.padding([4, 4], side="left"), 1, 7)
    assert outline.name == "window(3, 0)"
    assert not alike.any()


@pytest.mark.parametrize(
    ("mask", "offset"),
    [
        (None, None),
        (masks.causal(offset=3), 3),
        (masks.window(2, 0, offset=3), 3),
        (masks.window(2, 0), None),
        (masks.dense([[True, False, True, True, False, True, False]]), 5),
    ],
)
def test_one_query_stands_at_the_last_key_it_sees(mask, offset):
    """So also for steps of generation with a cache of fixed size."""
    outline, _ = outline_of(mask, 1, 7)
    assert outline.offset == offset


def test_one_query_of_cross_attention_leaves_padding_out():
    seen = survey(masks.dense(masks.padding([3, 4]).dense(1, 7)), None, -inf, 1, 7, CPU)
    numbers, padding = trace(seen, "cross")
    assert torch.equal(padding, padded([3, 4], 7, "right"))
    outline = Outline(*numbers.tolist(), 1, 7)
    assert (outline.name, outline.offset) == ("all visible", None)


def test_heads_that_differ_share_the_padding_that_all_leave_out():
    cells = torch.ones(2, 3, 5, 7, dtype=torch.bool)
    cells[0, :, :, 6] = False
    cells[1, 1, :, 6] = False
    numbers, padding = trace(survey(masks.dense(cells), None, -inf, 5, 7, CPU))
    assert padding.tolist() == [[False] * 6 + [True], [False] * 7]
    assert numbers.tolist()[2] == 3  # head 1 of row 1 sees less than the others


@pytest.mark.parametrize(
    ("row", "side"),
    [
        ("1110000", "left"),
        ("0000011", "right"),
        ("1000001", "inside"),
        ("0010000", "inside"),
        ("1111111", "whole"),
        ("0000000", None),
    ],
)
def test_sides_say_where_padding_stands(row, side):
    padding = torch.tensor([[sign == "1" for sign in row]])
    assert sides(padding, Outline(near=-6, far=6, choice=0, nq=7, nk=7)) == (side,)


def test_sides_look_only_as_far_as_the_mask_reaches():
    padding = torch.tensor([[False, False, True, False, False]])  # keys 3 and 4 are room not filled yet
    assert sides(padding, Outline(near=-2, far=0, choice=1, nq=3, nk=5)) == ("right",)


@pytest.mark.parametrize(("nq", "nk"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_see_is_named_so(nq, nk):
    numbers, padding = trace(survey(None, None, -inf, nq, nk, CPU))
    assert Outline(*numbers.tolist(), nq, nk).name == "nothing visible"
    assert padding.shape == (1, nk)
