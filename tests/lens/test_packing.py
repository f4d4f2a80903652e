"""Bits come back as the booleans they were; pooled values are the means of their cells."""

from math import inf, isnan, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.lens.files.container import pack_bits, unpack_bits
from regard.masks.tiles import pool

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8,), (9,), (3, 0, 2), (2, 3, 5, 7)], ids=str)
def test_bits_come_back(shape):
    cells = torch.rand(shape) < 0.5
    packed = pack_bits(cells)
    assert packed.shape == (-(-cells.numel() // 8),)
    assert torch.equal(unpack_bits(packed, shape), cells)


def test_bits_of_a_view_are_those_of_its_values():
    cells = torch.rand(3, 5, 7) < 0.5
    assert torch.equal(unpack_bits(pack_bits(cells.mT), (3, 7, 5)), cells.mT)


def test_first_cell_is_the_highest_bit():
    assert pack_bits(torch.tensor([True] + [False] * 8 + [True])).tolist() == [128, 64]


def test_bits_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"\(3, 7\).*3.*bytes.*\(2,\)"):
        unpack_bits(torch.ones(2, dtype=torch.uint8), (3, 7))


def pooled_by_hand(values: list[float], bins: int) -> list[float]:
    n, m = len(values), min(len(values), bins)
    cells = [values[i * n // m : (i + 1) * n // m] for i in range(m)]
    seen = [[value for value in cell if value != -inf] for cell in cells]
    return [float(np.float32(sum(cell) / len(cell))) if cell else -inf for cell in seen]


@settings(max_examples=60)
@given(st.lists(st.integers(-1000, 1000) | st.just(-inf), max_size=40), st.integers(1, 45))
def test_pooled_values_are_the_means_of_their_cells(values, bins):
    assert pool(torch.tensor(values, dtype=torch.float32), bins).tolist() == pooled_by_hand(values, bins)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pool_gives_fp32_over_the_last_axis(dtype):
    values = torch.randint(0, 2, (2, 3, 13)).to(dtype)
    pooled = pool(values, 5)
    assert (pooled.shape, pooled.dtype) == ((2, 3, 5), torch.float32)
    assert pooled.tolist() == [[pooled_by_hand(row, 5) for row in head] for head in values.double().tolist()]
    assert pool(values, 13).dtype == torch.float32
    assert torch.equal(pool(values, 17), values.float())


def test_nan_and_infinity_stay_in_their_own_cell():
    pooled = pool(torch.tensor([1.0, 2.0, nan, 4.0, inf, 6.0, -inf, 8.0, -inf, -inf, inf, -inf]), 6).tolist()
    assert isnan(pooled.pop(1))
    assert pooled == [1.5, inf, 8.0, -inf, inf]


def test_rows_hidden_by_the_smallest_finite_bias_do_not_overflow():
    least = torch.finfo(torch.float32).min
    assert pool(torch.full((7,), least), 2).tolist() == [least, least]


def test_pool_of_nothing_is_nothing():
    assert pool(torch.ones(3, 0), 5).shape == (3, 0)
