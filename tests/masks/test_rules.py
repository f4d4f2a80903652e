"""Rules: reading numbers, indexing tables, what fits what, equality and form."""

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import masks
from regard.checks import number
from regard.masks.mask import Rule, at, cell_of, fit_cells, indices, row_of, size_or_one
from regard.positions import alibi

CPU = torch.device("cpu")


# --------------------------------------------------------------------------------------------------------------- number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_one_integer_stays_one_integer(value):
    result = number("before", value)
    assert result == 3
    assert type(result) is int


@pytest.mark.parametrize(
    "value",
    [
        [4, 0, 7],
        (4, 0, 7),
        np.array([4, 0, 7]),
        np.array([4, 0, 7], dtype=np.uint8),
        torch.tensor([4, 0, 7]),
        torch.tensor([4, 0, 7], dtype=torch.int16),
    ],
)
def test_one_integer_per_batch_row_becomes_a_column(value):
    result = number("offset", value)
    assert result.dtype == torch.int64
    assert torch.equal(result, torch.tensor([[4], [0], [7]]))


def test_one_integer_per_batch_row_and_head_keeps_its_two_axes():
    assert torch.equal(number("offset", [[1, 2, 3]]), torch.tensor([[1, 2, 3]]))
    assert number("offset", torch.zeros(2, 3, dtype=torch.int32)).shape == (2, 3)
    assert number("offset", range(5)).shape == (5, 1)


def test_number_keeps_a_copy():
    given = torch.tensor([1, 2])
    shared = given.numpy()
    from_tensor, from_array = number("offset", given), number("offset", shared)
    given.zero_()
    assert from_tensor.tolist() == [[1], [2]]
    assert from_array.tolist() == [[1], [2]]


def test_least_is_allowed_and_less_is_not():
    assert number("before", 0, 0) == 0
    assert number("before", [2, 0], 0).tolist() == [[2], [0]]
    assert number("offset", -5) == -5
    with pytest.raises(ValueError, match=r"before.*0.*-1"):
        number("before", -1, 0)
    with pytest.raises(ValueError, match=r"dilation.*1.*\[\[3, 0\]\]"):
        number("dilation", [[3, 0]], 1)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (2.0, TypeError, r"offset.*float.*2.0"),
        (True, TypeError, r"offset.*bool.*True"),
        ("34", TypeError, r"offset.*str.*'34'"),
        (None, TypeError, r"offset.*NoneType.*None"),
        ({1, 2}, TypeError, r"offset.*set"),
        ([1.0, 2.0], TypeError, r"offset.*torch\.float(32|64)"),
        (np.array([1j]), TypeError, r"offset.*torch\.complex128"),
        ([True, False], TypeError, r"offset.*torch\.bool"),
        (
            torch.tensor(3),
            ValueError,
            r"\(B,\).*B.*1.*H.*1.*shape",
        ),
        (torch.zeros(1, 2, 3, dtype=torch.long), ValueError, r"offset.*shape.*\(1, 2, 3\)"),
        (torch.zeros(0, dtype=torch.long), ValueError, r"offset.*shape.*\(0,\)"),
        (torch.zeros(2, 0, dtype=torch.long), ValueError, r"offset.*shape.*\(2, 0\)"),
    ],
)
def test_number_refuses_what_is_not_integers(value, error, message):
    with pytest.raises(error, match=message):
        number("offset", value)


def test_number_refuses_an_empty_list_for_being_empty():
    # torch reads [] as floats; the complaint must be that nothing is there.
    with pytest.raises(ValueError, match=r"offset.*shape.*\(0,\)"):
        number("offset", [])


# --------------------------------------------------------------------------------------------------------------- tables


def test_one_integer_is_the_same_at_every_batch_row_and_head():
    value = at(5, CPU)
    assert value(0, 0) == value(torch.tensor(3), torch.tensor(2)) == 5


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_at_reads_the_entry_of_the_batch_row_and_head(shape):
    table = torch.arange(7, 7 + shape[0] * shape[1]).reshape(shape)
    value = at(table, CPU)
    for b in range(3):
        for h in range(2):
            expected = table[b % shape[0], h % shape[1]]
            assert value(torch.tensor(b), torch.tensor(h)) == expected


def test_at_broadcasts_over_index_tensors():
    table = torch.tensor([[1, 2], [3, 4], [5, 6]])
    b, h, _, _ = indices(3, 2, torch.arange(5), torch.arange(7), CPU)
    assert torch.equal(at(table, CPU)(b, h), table[..., None, None])


@pytest.mark.parametrize("batch", [1, 3])
def test_row_of_reads_the_entry_of_the_batch_row(batch):
    table = torch.arange(batch * 5).reshape(batch, 5)
    read = row_of(table)
    for b in range(3):
        for n in range(5):
            assert read(torch.tensor(b), torch.tensor(n)) == table[b % batch, n]


@pytest.mark.parametrize("shape", [(3, 2, 5, 7), (1, 2, 5, 7), (3, 1, 5, 7), (3, 2, 1, 7), (3, 2, 5, 1), (1, 1, 1, 1)])
def test_cell_of_reads_shared_axes_at_zero(shape):
    table = torch.randn(shape)
    cells = cell_of(table)(*indices(3, 2, torch.arange(5), torch.arange(7), CPU))
    assert torch.equal(cells.expand(3, 2, 5, 7), table.expand(3, 2, 5, 7))


def test_indices_broadcast_to_batch_heads_rows_and_columns():
    rows, cols = torch.tensor([4, 6, 1]), torch.arange(5)
    b, h, i, j = indices(7, 2, rows, cols, CPU)
    assert (b.shape, h.shape, i.shape, j.shape) == ((7, 1, 1, 1), (2, 1, 1), (3, 1), (5,))
    assert (b.flatten().tolist(), h.flatten().tolist()) == (list(range(7)), [0, 1])
    assert (i.flatten().tolist(), j.tolist()) == ([4, 6, 1], [0, 1, 2, 3, 4])


def test_size_or_one_is_the_size_that_is_not_one():
    assert size_or_one("batch", []) == 1
    assert size_or_one("batch", [1, 1]) == 1
    assert size_or_one("batch", [3, 1, 3]) == 3
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        size_or_one("heads", [3, 1, 2])


# ------------------------------------------------------------------------------------------------------------ fit_cells


def with_four_axes(x):
    """(Nq, Nk), (B, Nq, Nk) or (…, H, Nq, Nk) → (B, H, Nq, Nk)."""
    if x.ndim < 4:
        return x[None, None] if x.ndim == 2 else x[:, None]
    return x.flatten(0, -4)


@pytest.mark.parametrize(
    ("cells", "weights", "expected"),
    [
        ((5, 7), (5, 7), (1, 1, 5, 7)),
        ((7,), (5, 7), (1, 1, 1, 7)),
        ((5, 7), (3, 5, 7), (1, 1, 5, 7)),
        ((3, 5, 7), (3, 5, 7), (3, 1, 5, 7)),
        ((3, 1, 7), (3, 5, 7), (3, 1, 1, 7)),
        ((5, 7), (3, 2, 5, 7), (1, 1, 5, 7)),
        ((2, 5, 7), (3, 2, 5, 7), (1, 2, 5, 7)),
        ((3, 1, 5, 1), (3, 2, 5, 7), (3, 1, 5, 1)),
        ((), (3, 2, 5, 7), (1, 1, 1, 1)),
        ((2, 5, 7), (11, 3, 2, 5, 7), (33, 2, 5, 7)),
        ((11, 1, 2, 5, 7), (11, 3, 2, 5, 7), (33, 2, 5, 7)),
    ],
)
def test_cells_that_broadcast_to_the_weights_get_four_axes(cells, weights, expected):
    given = torch.randn(cells)
    fitted = fit_cells("bias", given, weights)
    assert fitted.shape == expected
    whole = with_four_axes(given.expand(weights))
    assert torch.equal(fitted.expand_as(whole), whole)


@pytest.mark.parametrize(
    ("cells", "weights"),
    [
        ((5, 6), (5, 7)),
        ((4, 7), (5, 7)),
        ((3, 5, 7), (5, 7)),
        ((1, 5, 7), (5, 7)),
        ((2, 5, 7), (3, 5, 7)),
        ((3, 5, 7), (3, 2, 5, 7)),
        ((2, 2, 5, 7), (3, 2, 5, 7)),
    ],
)
def test_cells_that_do_not_broadcast_are_refused_with_both_shapes(cells, weights):
    with pytest.raises(ValueError, match="broadcast") as caught:
        fit_cells("bias", torch.zeros(cells), weights)
    for shape in (cells, weights):
        assert str(shape) in str(caught.value)


def test_a_mask_of_one_row_of_keys_per_batch_row_is_told_about_padding():
    hint = r"regard\.masks\.padding\(mask\)"
    for weights in ((3, 2, 5, 7), (3, 5, 7)):
        with pytest.raises(ValueError, match=hint):
            fit_cells("mask", torch.ones(3, 7, dtype=torch.bool), weights)
    with pytest.raises(ValueError, match=r"\(3, 2, 5, 7\)$"):
        fit_cells("bias", torch.ones(3, 7), (3, 2, 5, 7))


# ------------------------------------------------------------------------------------------------------------------ fit


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (masks.causal(offset=[0, 1]), r"causal\(offset=\[0, 1\]\).*2.*3"),
        (masks.window([[1, 2]], 0), r"window\(\[\[1, 2\]\], 0\).*2.*5"),
        (alibi(2), r"alibi\(<2 slopes>\).*2.*5"),
    ],
)
def test_rule_for_other_batch_rows_or_heads_does_not_fit(rule, message):
    with pytest.raises(ValueError, match=message):
        rule.fit(3, 5, 7, 11)


@pytest.mark.parametrize(
    "rule", [masks.causal(), masks.causal(offset=[0, 1, 2]), masks.window([[0, 1, 2, 3, 4]], 0), alibi(1), alibi(5)]
)
def test_rule_for_all_or_for_each_batch_row_and_head_fits(rule):
    assert rule.fit(3, 5, 7, 11) is None


# ------------------------------------------------------------------------------------------------------- equality, form


@dataclass(frozen=True, eq=False)
class Held(Rule):
    """A rule that only holds a value."""

    value: object

    def bind(self, nq, nk, device, dtype):
        return lambda b, h, i, j: self.value

    @property
    def leading(self):
        return 1, 1


class Kept(Held):
    """Another kind of rule with the same field."""


EQUAL = [
    (3, 3),
    ("left", "left"),
    (None, None),
    (torch.tensor([[1], [2]]), torch.tensor([[1], [2]])),
    (Held(torch.ones(2)), Held(torch.ones(2))),
]
DIFFERENT = [
    (3, 4),
    (3, 3.0),
    (1, True),
    (3, None),
    ("left", "right"),
    (3, torch.tensor([[3]])),
    (torch.tensor([[1], [2]]), torch.tensor([[1], [3]])),
    (torch.tensor([[1], [2]]), torch.tensor([[1, 2]])),
    (torch.tensor([1]), torch.tensor([1.0])),
    (Held(3), Kept(3)),
]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_rules_of_equal_values_are_equal_and_hash_alike(a, b):
    assert Held(a) == Held(b)
    assert hash(Held(a)) == hash(Held(b))


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_rules_of_different_values_differ(a, b):
    assert Held(a) != Held(b)
    assert Held(b) != Held(a)


def test_rule_differs_from_another_kind_and_from_what_is_no_rule():
    assert Held(3) != Kept(3)
    assert Held(3) != 3


def test_hashing_does_not_read_the_numbers_of_a_tensor():
    there = Held(torch.zeros(2, 3, device="meta"))  # a tensor without numbers: reading it raises
    assert hash(there) == hash(Held(torch.ones(2, 3)))


def test_rule_from_another_process_hashes_like_an_equal_one_made_here():
    # Python hashes strings differently in each process, so a hash must not travel with the value.
    code = "import pickle; from regard.masks import causal; m = causal(); hash(m); print(pickle.dumps(m).hex())"
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    sent = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    received = pickle.loads(bytes.fromhex(sent.stdout))
    assert received == masks.causal()
    assert hash(received) == hash(masks.causal())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (masks.window(1, 2), masks.window(3, 0)),
        (masks.causal(offset=3), masks.causal(offset=0)),
        (masks.causal(offset=[1, 2]), masks.causal(offset=[4, 5, 6])),
        (masks.globals([0]), masks.globals([1, 2])),
        (masks.documents([0, 1]), masks.documents([0, 0, 1])),
        (masks.causal() & masks.padding([1, 2]), masks.causal() & masks.padding([3, 0])),
        (alibi(2), alibi(5)),
    ],
)
def test_rules_that_differ_by_their_numbers_only_have_one_form(a, b):
    assert a.form == b.form
    assert hash(a.form) == hash(b.form)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (masks.causal(), masks.causal(offset=0)),
        (masks.causal(offset=0), masks.causal(offset=[0, 1])),
        (masks.causal(offset=[0]), masks.causal(offset=[0, 1])),  # a shared axis is indexed in another way
        (masks.window([0, 1], 2), masks.window([[0, 1]], 2)),
        (masks.padding([1, 2]), masks.padding([1, 2], side="left")),
        (masks.window(1, 0), masks.prefix(1)),
        (masks.causal() & masks.window(1, 0), masks.causal() | masks.window(1, 0)),
        (masks.causal() & masks.window(1, 0), masks.window(1, 0) & masks.causal()),
        (masks.causal(), ~masks.causal()),
        (masks.globals([0]), masks.globals([[True, False]])),
        (Held(torch.zeros(2)), Held(torch.zeros(2, dtype=torch.float64))),
    ],
)
def test_rules_that_need_another_kernel_have_another_form(a, b):
    assert a.form != b.form


def test_form_holds_no_tensor():
    def leaves(form):
        return [leaf for part in form for leaf in leaves(part)] if isinstance(form, tuple) else [form]

    mask = masks.window([0, 1], 2, offset=[3, 4]) & masks.padding([1, 2]) | ~masks.dense([[True]])
    assert not any(isinstance(leaf, Tensor) for leaf in leaves(mask.form))


def test_form_marks_what_it_does_not_pin_down():
    class Other(type(masks.causal())):
        """A mask of somebody else's, whose closures we do not know."""

    assert "?" not in (masks.causal() & masks.padding([3]) | ~masks.documents([0, 1])).form
    assert Other(None).form.startswith("?")
    assert "?" in (masks.causal() & Other(None)).form
