import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.training.data import permute, row_generator, row_numbers, step_seed


@given(size=st.integers(1, 700), key=st.integers(0, 2**50))
def test_permutation_reaches_every_row_once(size, key):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_large_permutation_needs_no_table():
    size = 10**12
    rows = permute(np.arange(1000), size, 7)
    assert len(set(rows.tolist())) == 1000
    assert rows.min() >= 0
    assert rows.max() < size
    assert abs(rows.mean() / size - 0.5) < 0.05  # spread over the whole range


@pytest.mark.parametrize(("size", "batch"), [(7, 3), (5, 5), (3, 8)])
def test_each_epoch_reads_each_row_once_in_another_order(size, batch):
    steps = [row_numbers(step, batch, size, seed=4) for step in range(3 * size)]
    rows = np.concatenate([numbers for numbers, _ in steps]).reshape(-1, size)
    epochs = np.concatenate([numbers for _, numbers in steps]).reshape(-1, size)
    assert (np.sort(rows, 1) == np.arange(size)).all()
    assert (epochs == np.arange(len(rows))[:, None]).all()
    assert len({tuple(row) for row in rows.tolist()}) > 1


def test_steps_depend_on_the_seed_alone():
    assert row_numbers(3, 4, 100, 1)[0].tolist() == row_numbers(3, 4, 100, 1)[0].tolist()
    assert row_numbers(3, 4, 100, 1)[0].tolist() != row_numbers(3, 4, 100, 2)[0].tolist()


def test_every_row_has_random_numbers_of_its_own():
    draws = [row_generator(*key).random() for key in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]]
    assert len(set(draws)) == 4
    assert row_generator(1, 0, 0).random() == draws[0]


def test_every_forward_pass_has_a_seed_of_its_own():
    seeds = {step_seed(*key) for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
