"""What the numbers of a bias are taken for."""

from math import inf, nan

import pytest
import torch

from regard.backends.call import prepare
from regard.lens import visibility
from regard.lens.visibility import classify, summarise_mask
from regard.positions import alibi

FP32, FP16, BF16 = (torch.finfo(t).min for t in (torch.float32, torch.float16, torch.bfloat16))


def cells(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).view(1, 1, -1, 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.5, -3.0), ("additive", None)),
        ((0.0, 0.0), ("additive", None)),
        ((1.0, 1.0), ("additive", None)),
        ((0.0, 1.0), ("zero-one", None)),
        ((0.0, 1.0, 0.5), ("additive", None)),
        ((0.0, 1.0, nan), ("additive", None)),
        ((0.0, -10_000.0), ("large negative", -10_000.0)),
        ((0.0, -1e9, -2e9), ("large negative", -1e9)),
        ((3.0, FP32, -inf), ("large negative", FP32)),
        ((1.0, 0.0, FP32), ("large negative", FP32)),
        ((0.0, -inf), ("minus infinity", None)),
        ((0.0, 1.0, -inf), ("minus infinity", None)),
        ((nan, -inf), ("minus infinity", None)),
        ((nan, -1e9), ("large negative", -1e9)),
        ((0.0, -900.0), ("additive", None)),
        ((0.0, -2000.0, -9000.0), ("additive", None)),
        ((0.0, -2000.0, -9000.0, -inf), ("minus infinity", None)),
        ((inf, 0.0), ("additive", None)),
        ((), ("additive", None)),
    ],
)
def test_numbers_are_told_by_their_values(values, expected):
    assert classify(cells(*values)) == expected


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, FP16), (torch.bfloat16, BF16)])
def test_smallest_number_of_a_narrow_dtype_hides(dtype, least):
    assert classify(cells(0.0, least, dtype=dtype)) == ("large negative", least)


def test_berts_mask_hides_also_after_rounding_to_bfloat16():
    kind, start = classify(cells(0.0, -10_000.0, dtype=torch.bfloat16))
    assert (kind, start) == ("large negative", -9984.0)


def test_slopes_of_alibi_are_a_term_however_far_they_reach():
    dense = alibi(1, slopes=[0.84]).dense(3, 20_011)
    assert float(dense.min()) < -10_000
    assert classify(dense[None, None]) == ("additive", None)


def test_pieces_are_judged_together(monkeypatch):
    monkeypatch.setattr(visibility, "AT_ONCE", 3)
    big = torch.zeros(2, 1, 7, 5)
    big[1, 0, 6, 4] = -1e9
    big[0, 0, 2, 1] = -3e9
    assert classify(big) == ("large negative", -1e9)
    big[0, 0, 3, 3] = -1500.0
    assert classify(big) == ("additive", None)


def test_expanded_numbers_are_read_where_they_are():
    assert classify(cells(0.0, 1.0).expand(3, 5, 2, 7)) == ("zero-one", None)


@pytest.mark.parametrize(
    ("bias", "kind", "start"),
    [
        (None, None, None),
        (alibi(2), "additive", None),
        (cells(0.0, 1.0), "zero-one", None),
        (cells(0.0, -1e9).requires_grad_(), "large negative", -1e9),
        (cells(0.0, -inf), "minus infinity", None),
    ],
)
def test_only_biases_that_hide_hand_out_numbers(bias, kind, start):
    x = torch.zeros(1, 2, 2, 3)
    seen = summarise_mask(prepare(x, x, x, bias=bias))
    assert (seen.bias_kind, seen.bias_from) == (kind, start)
    assert (seen.hiding is not None) == (kind in ("large negative", "minus infinity"))
    assert seen.hiding is None or not seen.hiding.requires_grad
