"""What queries see, by all three ways, against the dense mask."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import masks
from regard.lens import visibility
from regard.lens.visibility import BANDS, KEPT, Visible, conjuncts, dense_cells, holds_cells, survey

CPU = torch.device("cpu")
SIZES = [(7, 7), (5, 11), (13, 5), (1, 11), (97, 139)]


def some_cells(nq: int, nk: int, batch: int = 2, heads: int = 3) -> Tensor:
    cells = torch.rand(batch, heads, nq, nk) < 0.4
    cells[0, -1, nq // 2] = False  # a row that sees nothing
    cells[1, :, :, nk // 3] = False  # a key that nobody sees
    return cells


def rules(nq: int, nk: int) -> dict[str, masks.Mask | None]:
    return {
        "none": None,
        "causal": masks.causal(),
        "causal from the upper left": masks.causal(offset=0),
        "causal per batch row": masks.causal(offset=[0, 3]),
        "window": masks.window(3, 1),
        "window per head": masks.window([[1, 2, 3]], 0),
        "beyond all keys": masks.causal(offset=-2 * nq),
        "padding": masks.padding([nk // 2, nk]),
        "left padding and causal": masks.causal() & masks.padding([nk // 2, nk], side="left"),
        "window or globals": masks.window(1, 0) | masks.globals([0, nk - 1]),
        "documents": masks.documents(lengths=[nk // 3, nk - nk // 3]) & masks.causal(),
        "not": ~masks.window(2, 2),
        "dilated": masks.dilated(2, 0, 3),
        "cells": masks.dense(some_cells(nq, nk)),
        "cells of keys": masks.dense(some_cells(1, nk)),
        "cells of queries": masks.dense(some_cells(nq, 1)),
        "cells and a rule": masks.dense(some_cells(nq, nk)) & masks.causal(),
        "cells or a rule": masks.dense(some_cells(nq, nk, heads=1)) | masks.causal(),
    }


def assert_is(seen: Visible, dense: Tensor, open_: Tensor | None = None) -> None:
    """Compare with all cells at once, (B, H, Nq, Nk)."""
    nk, j = dense.shape[-1], torch.arange(dense.shape[-1])
    open_ = dense if open_ is None else open_
    lead = dense.shape[:3]
    assert torch.equal(seen.counts.expand(lead), dense.sum(-1))
    assert torch.equal(seen.first.expand(lead), torch.where(dense, j, nk).amin(-1))
    assert torch.equal(seen.last.expand(lead), torch.where(dense, j, -1).amax(-1))
    assert torch.equal(seen.unhidden.expand(lead), torch.where(dense.any(-1), 0, open_.sum(-1)))
    assert torch.equal(seen.keys.expand(*lead[:2], nk), dense.any(-2))


def exact_bands(dense: Tensor) -> Tensor:
    """The share of visible cells in each part as bytes, cell by cell."""
    nq, nk = dense.shape[-2:]
    tall, broad = -(-nq // BANDS), -(-nk // BANDS)
    parts = [row.split(broad, -1) for row in dense.double().split(tall, -2)]
    shares = torch.stack([torch.stack([part.mean((-2, -1)) for part in row], -1) for row in parts], -2)
    middle = (shares * 255).round().clamp(1, 254)
    return torch.where(shares == 0, 0, torch.where(shares == 1, 255, middle)).to(torch.uint8)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", rules(7, 7))
def test_counts_ends_and_keys_are_those_of_the_dense_mask(name, sizes):
    mask = rules(*sizes)[name]
    dense = torch.ones(sizes) if mask is None else mask.dense(*sizes)
    dense = dense.bool().expand(2, 3, *sizes)
    seen = survey(mask, None, -inf, *sizes, CPU)
    assert_is(seen, dense)
    lead = seen.bands.shape[:2]
    assert torch.equal(seen.bands.expand(2, 3, -1, -1), exact_bands(dense)), lead


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding([3, 9])])
@pytest.mark.parametrize("shape", [(2, 3, 7, 11), (1, 1, 7, 11), (2, 1, 1, 11), (1, 3, 7, 1)])
def test_numbers_that_hide_take_part_and_leave_rows_of_nothing_else_unhidden(mask, shape):
    numbers = torch.where(torch.rand(shape) < 0.5, torch.finfo(torch.float32).min, 0.3)
    numbers[..., 2:3, :] = -1e9  # a whole row, where there are rows
    numbers[0, 0, 0, 0] = -inf
    dense = (torch.ones(7, 11).bool() if mask is None else mask.dense(7, 11)).expand(2, 3, 7, 11)
    seen = survey(mask, numbers, -5000.0, 7, 11, CPU)
    assert_is(seen, dense & (numbers > -5000), dense & (numbers > -inf))
    assert shape[2] == 1 or bool((seen.unhidden[:, :, 2] > 0).any())


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(-9, 80),
    st.integers(0, 99),
)
def test_random_rules_by_tiles_agree_with_the_dense_mask(nq, nk, before, after, offset, seed):
    torch.manual_seed(seed)
    real = masks.padding(torch.rand(2, nk) < 0.7)
    mask = (masks.window(before, after, offset=offset) | masks.globals([nk - 1])) & real
    assert_is(survey(mask, None, -inf, nq, nk, CPU), mask.dense(nq, nk).expand(2, 1, nq, nk))


def test_pieces_of_rows_and_of_tiles_make_the_same_as_one(monkeypatch):
    mask = masks.causal() & masks.padding([50, 139])
    cells = masks.dense(mask.dense(97, 139))
    for each in (mask, cells):
        whole = survey(each, None, -inf, 97, 139, CPU)
        monkeypatch.setattr(visibility, "AT_ONCE", 1000)
        parts = survey(each, None, -inf, 97, 139, CPU)
        monkeypatch.undo()
        assert all(torch.equal(a, b) for a, b in zip(vars(whole).values(), vars(parts).values(), strict=True))


def test_bands_of_long_rules_are_certain_where_they_say_none_or_all():
    mask, n = masks.window(40, 0) | masks.globals([5]), 1999
    seen = survey(mask, None, -inf, n, n, CPU)
    true = exact_bands(mask.dense(n)[None, None])
    assert seen.bands.shape == (1, 1, 32, 32)
    assert torch.equal(seen.bands == 0, true == 0)
    assert torch.equal(seen.bands == 255, true == 255)
    causal = survey(masks.causal(), None, -inf, n, n, CPU).bands
    assert float((causal.double() - exact_bands(masks.causal().dense(n)[None, None]).double()).abs().max()) <= 255 / 16


def test_bands_are_kept_of_four_batch_rows_and_heads():
    cells = torch.rand(5, 7, 3, 11) < 0.5
    seen = survey(masks.dense(cells), None, -inf, 3, 11, CPU)
    assert torch.equal(seen.bands, exact_bands(cells)[:KEPT, :KEPT])
    rule = masks.window([[1], [2], [3], [4], [5]], 0)
    assert survey(rule, None, -inf, 3, 11, CPU).bands.shape == (4, 1, 3, 11)


@pytest.mark.parametrize(("nq", "nk"), [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_no_queries_or_no_keys_see_nothing(mask, nq, nk):
    seen = survey(mask, None, -inf, nq, nk, CPU)
    assert seen.counts.tolist() == [[[0] * nq]]
    assert seen.keys.tolist() == [[[False] * nk]]
    assert seen.bands.shape == (1, 1, nq, nk)


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(64, 0), masks.causal() & masks.padding([65_000])])
def test_long_rules_are_counted_without_a_matrix(mask):
    """65,536² booleans would take 4 GiB: the largest tensor that is ever made stays far below."""
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        seen = survey(mask, None, -inf, 65_536, 65_536, CPU)
    assert largest <= 2 * visibility.AT_ONCE
    assert int(seen.counts[0, 0, 64]) == 65


def test_cells_that_were_only_expanded_are_read_once():
    keys = torch.rand(2, 1, 1, 11) < 0.5
    assert dense_cells(keys.expand(2, 3, 7, 11)).shape == (2, 1, 1, 11)
    assert dense_cells(torch.zeros(2, 3, 7, 1)).shape == (2, 3, 7, 1)
    seen = survey(masks.DenseMask(keys.expand(2, 3, 7, 11)), None, -inf, 7, 11, CPU)
    assert_is(seen, keys.expand(2, 3, 7, 11))
    assert seen.counts.shape == (2, 1, 7)


def test_conjuncts_are_the_masks_joined_by_and():
    a, b, c = masks.causal(), masks.padding([2, 3]), masks.window(1, 1)
    assert conjuncts(None) == []
    assert conjuncts(a & b & c) == [a, b, c]
    assert conjuncts(a & (b & c)) == [a, b, c]
    assert conjuncts((a & b) | c) == [(a & b) | c]


def test_cells_are_found_inside_combinations():
    cells = masks.dense(torch.ones(3, 5, dtype=torch.bool))
    assert [holds_cells(m) for m in (cells, ~cells, masks.causal() | cells, masks.causal())] == [
        True,
        True,
        True,
        False,
    ]
