"""Pairwise parameter grids: every pair of values stays, and few parameter sets are needed for it."""

from itertools import combinations, product

import pytest
from grids import Row, pairwise


def pairs(rows: set[Row]) -> set[object]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize(("sizes", "most"), [((2, 3, 5), 16), ((4, 5, 10), 50), ((5, 4, 3, 2), 24), ((3, 2), 6)])
def test_every_pair_of_values_stays(sizes, most):
    rows = set(product(*map(range, sizes)))
    chosen = pairwise(sorted(rows))
    assert chosen <= rows
    assert pairs(chosen) == pairs(rows)
    assert len(chosen) <= most


def test_pairs_that_the_rows_do_not_hold_are_not_needed():
    rows = {(0, 0, 0), (0, 1, 1), (1, 1, 0)}
    assert pairwise(sorted(rows)) == rows


def test_rows_of_one_value_all_stay():
    assert pairwise([(0,), (1,), (2,)]) == {(0,), (1,), (2,)}
