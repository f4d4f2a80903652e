"""Exact weights on demand against dense fp64: tiles by slices and indices, one key per query, given weights."""

from __future__ import annotations

import gc
import weakref
from math import exp, inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_measures import assert_measures, truth_and_baseline
from torch import Tensor

from regard import masks
from regard.backends import reference
from regard.backends.call import prepare
from regard.lens.measures import weights
from regard.lens.measures.weights import ComputedWeights, StoredWeights, exponentials, grouped_scores, sources
from regard.testing import ARGUMENTS, MASKS, SHAPES, Case, cases

ALL = slice(None)


def remembered(nq: int = 7, nk: int = 11, dtype: torch.dtype = torch.float32, **extra: Any) -> ComputedWeights:
    q, k, v = (torch.randn(2, heads, n, 5).to(dtype) for heads, n in ((6, nq), (3, nk), (3, nk)))
    call = prepare(q, k, v, **extra)
    return ComputedWeights(call, reference.stages(call).lse)


# ---------------------------------------------------------------------------------------------------------- the grid


@pytest.mark.pairwise
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tile_of_everything_is_the_dense_weights(shape, mask, arguments):
    case = Case(shape, mask, arguments)
    call, truth, baseline = truth_and_baseline(case, torch.float32, 3)
    found = ComputedWeights(call, reference.stages(call).lse).tile(ALL, ALL)
    assert_measures({"weights": found}, baseline, truth, str(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_weighed_in_fp32_or_wider(dtype):
    for case in list(cases())[::29]:
        call, truth, baseline = truth_and_baseline(case, dtype, 3)
        found = ComputedWeights(call, reference.stages(call).lse).tile(ALL, ALL)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_measures({"weights": found}, baseline, truth, f"{case}, {dtype}")


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("rows_at_once", [1, 3, 1000])
def test_one_key_per_query_is_its_cell_of_the_dense_weights(arguments, rows_at_once, monkeypatch):
    shape = SHAPES["fewer queries, grouped, narrow v"]
    monkeypatch.setattr(weights, "PAIR_CELLS", rows_at_once * shape.batch * shape.heads * shape.d)
    for mask in MASKS:
        case = Case("fewer queries, grouped, narrow v", mask, arguments)
        call, truth, baseline = truth_and_baseline(case, torch.float32, 3)
        keys = torch.randint(0, shape.nk, (shape.batch, shape.heads, shape.nq))
        chosen = [
            {"weights": made["weights"].gather(-1, keys.unsqueeze(-1)).squeeze(-1), "lse": made["lse"]}
            for made in (baseline, truth)
        ]
        found = ComputedWeights(call, reference.stages(call).lse).pairs(keys)
        assert_measures({"weights": found}, *chosen, str(case))


# ------------------------------------------------------------------------------------------------------------- parts


ROWS = [slice(2, 5), slice(4, 5), slice(0, 0), torch.tensor([4, 0, 4]), torch.tensor([], dtype=torch.long)]
COLS = [slice(3, 9), slice(None), torch.tensor([10, 3]), torch.tensor([0])]


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("cols", COLS, ids=str)
@pytest.mark.parametrize("arguments", ["all together", "plain"])
def test_a_part_is_that_part_of_the_dense_weights(rows, cols, arguments):
    call, truth, baseline = truth_and_baseline(
        Case("fewer queries, grouped, narrow v", "window", arguments), torch.float32, 3
    )
    base, exact = (
        {"weights": made["weights"][:, :, rows][..., cols], "lse": made["lse"]} for made in (baseline, truth)
    )
    found = ComputedWeights(call, reference.stages(call).lse).tile(rows, cols)
    assert_measures({"weights": found}, base, exact, f"rows {rows}, keys {cols}")
    assert torch.equal(StoredWeights(baseline["weights"]).tile(rows, cols), base["weights"])


@pytest.mark.parametrize("kind", ["remembered", "given"])
def test_keys_of_pairs_may_be_shared_by_batch_rows_and_heads_and_none_weighs_nothing(kind):
    source: Any = remembered(mask=masks.causal())
    source = StoredWeights(source.tile(ALL, ALL)) if kind == "given" else source
    keys = torch.tensor([0, -1, 4, 10, 11, 3, 99])  # 11 keys: 11 and 99 are not there
    found = source.pairs(keys)
    assert found.shape == (2, 6, 7)
    assert bool((found[..., [1, 4, 6]] == 0).all())
    assert bool((found[..., [0, 2, 5]] > 0).all())
    assert bool((found[..., 3] == 0).all())  # hidden by the causal mask
    for shape in ((1, 1, 7), (2, 1, 7), (1, 6, 7), (2, 6, 7)):
        assert torch.equal(source.pairs(keys.expand(shape)), found)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["remembered", "given"])
def test_no_queries_or_no_keys_have_weights_of_that_shape(sizes, kind):
    nq, nk = sizes
    q, k = torch.zeros(2, 3, nq, 5, dtype=torch.bfloat16), torch.zeros(2, 3, nk, 5, dtype=torch.bfloat16)
    call = prepare(q, k, k, mask=masks.causal())
    source: Any = ComputedWeights(call, torch.full((2, 3, nq), -inf))
    if kind == "given":
        source = StoredWeights(torch.zeros(2, 3, nq, nk, dtype=torch.bfloat16))
    assert source.tile(ALL, ALL).shape == (2, 3, nq, nk)
    pairs = source.pairs(torch.zeros(nq, dtype=torch.long))
    assert (pairs.shape, pairs.dtype) == ((2, 3, nq), torch.float32)
    assert float(pairs.sum()) == 0


def test_rows_that_see_nothing_weigh_nothing():
    source = remembered(mask=masks.causal(offset=-3))
    assert bool((source.tile(slice(0, 3), ALL) == 0).all())
    assert bool((source.pairs(torch.zeros(7, dtype=torch.long))[..., :3] == 0).all())


def test_the_keys_of_a_group_are_read_by_its_query_heads():
    q, k = torch.randn(2, 6, 5, 3), torch.randn(2, 2, 7, 3)
    assert torch.allclose(grouped_scores(q, k), q @ k.repeat_interleave(3, 1).mT)
    assert torch.allclose(grouped_scores(q[:, :, ::2], k), q[:, :, ::2] @ k.repeat_interleave(3, 1).mT)


# -------------------------------------------------------------------------------------------------- what they hold


def test_exact_weights_keep_q_and_k_as_they_are_and_let_the_values_go():
    q, k, v = (torch.randn(1, 2, 7, 5) for _ in range(3))
    values = weakref.ref(v)
    source = ComputedWeights(prepare(q, k, v), torch.zeros(1, 2, 7))
    del v
    gc.collect()
    assert values() is None
    assert source.call.q.data_ptr() == q.data_ptr()
    assert source.call.k.data_ptr() == k.data_ptr()


def test_exact_weights_carry_no_gradient():
    q, k, bias = (torch.randn(1, 2, n, m, requires_grad=True) for n, m in ((7, 5), (11, 5), (7, 11)))
    call = prepare(q, k, k, bias=bias, sinks=torch.zeros(2, requires_grad=True))
    source = ComputedWeights(call, reference.stages(call).lse)
    assert not source.tile(ALL, ALL).requires_grad
    assert not source.scores(ALL, ALL).requires_grad
    assert not source.pairs(torch.arange(7)).requires_grad
    given = StoredWeights(torch.rand(1, 2, 7, 11, requires_grad=True))
    assert not given.tile(ALL, ALL).requires_grad
    assert not given.pairs(torch.arange(7)).requires_grad


def test_autocast_does_not_reach_exact_weights():
    source, keys = remembered(), torch.arange(7)
    whole, pairs = source.tile(ALL, ALL), source.pairs(keys)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(source.tile(ALL, ALL), whole)
        assert torch.equal(source.pairs(keys), pairs)
        assert source.scores(ALL, ALL).dtype == torch.float32


def test_weights_made_under_inference_mode_can_be_asked_later():
    with torch.inference_mode():
        source = remembered(mask=masks.causal(), bias=torch.randn(7, 11))
    assert float(source.tile(ALL, ALL).sum()) == pytest.approx(2 * 6 * 7)
    assert source.pairs(torch.arange(7)).shape == (2, 6, 7)


def test_asking_leaves_q_k_and_given_weights_as_they_were():
    source = remembered(softcap=2.0, bias=torch.randn(7, 11), mask=masks.causal())
    given = StoredWeights(torch.rand(2, 3, 5, 7))
    before = [x.clone() for x in (source.call.q, source.call.k, source.lse, given.weights)]
    source.tile(ALL, ALL), source.pairs(torch.arange(7)), given.tile(ALL, ALL).zero_(), given.pairs(torch.arange(5))
    after = (source.call.q, source.call.k, source.lse, given.weights)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---------------------------------------------------------------------------------------------- sums, sinks, sources


def test_rounding_covers_what_sums_of_rows_really_are_off_by():
    for scale in (0.1, 1.0, 30.0):
        source = remembered(nq=97, nk=1013, scale=scale)
        off = float((source.tile(ALL, ALL).sum(-1) - 1).abs().max())
        assert off < source.rounding < 1e-2


def test_products_that_cancel_are_allowed_the_rounding_of_their_parts_but_none_that_could_hide_an_error():
    # q·k is of size 1, |q|·|k| larger: that is what the rounding of a score is in proportion to.
    q = torch.tensor([10.0, 1.0]).expand(1, 1, 3, 2).contiguous()
    k = torch.stack([torch.zeros(50), torch.rand(50)], -1).view(1, 1, 50, 2)
    near, far, farther = (
        ComputedWeights(prepare(q, k + shift, k), torch.zeros(1, 1, 3)).rounding
        for shift in (torch.zeros(2), torch.tensor([0.3, -3.0]), torch.tensor([1e5, -1e6]))
    )
    assert near < far < farther < 1e-3


def test_rounding_of_numbers_that_are_none_is_that_of_the_others():
    q, k = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 5, 4)
    q[0, 0, 1], k[0, 0, 2] = nan, inf
    assert ComputedWeights(prepare(q, k, k), torch.tensor([[[1.0, nan, -inf]]])).rounding < 1e-5


def test_rounding_of_given_weights_is_that_of_their_dtype():
    eps = torch.finfo(torch.float32).eps
    assert StoredWeights(torch.zeros(1, 1, 3, 5)).rounding == eps + 5 * eps
    assert (
        StoredWeights(torch.zeros(1, 1, 3, 5, dtype=torch.bfloat16)).rounding
        == torch.finfo(torch.bfloat16).eps + 5 * eps
    )
    assert StoredWeights(torch.zeros(1, 1, 3, 5, dtype=torch.float64)).rounding == 6 * torch.finfo(torch.float64).eps


def test_a_sink_is_known_of():
    assert remembered(sinks=torch.zeros(6)).has_sink
    assert not remembered().has_sink
    assert StoredWeights(torch.zeros(1, 1, 3, 5), torch.zeros(1, 1, 3, 6)).has_sink
    assert not StoredWeights(torch.zeros(1, 1, 3, 5), torch.zeros(1, 1, 3, 5)).has_sink
    assert not StoredWeights(torch.zeros(1, 1, 3, 5)).has_sink


def test_weights_put_together_come_from_their_parts():
    one, two = remembered(), StoredWeights(torch.zeros(1, 1, 3, 5))
    whole: Any = SimpleNamespace(parts=(one, two))
    assert sources(one) == (one,)
    assert sources(whole) == (one, two)


# ------------------------------------------------------------------------------------------------------- exponentials


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_err_as_their_argument_is_rounded_and_are_exact_at_their_ends(dtype):
    t = torch.linspace(-80, 0, 4001, dtype=dtype)
    truth = torch.tensor([exp(x) for x in t.tolist()], dtype=torch.float64)
    off = (exponentials(t, out=torch.empty_like(t)).double() - truth).abs() / truth
    assert bool((off <= (1 + t.abs()) * torch.finfo(dtype).eps).all())
    ends = torch.tensor([0.0, -0.0, -inf, torch.finfo(dtype).min, nan], dtype=dtype)
    assert str(exponentials(ends, out=ends).tolist()) == "[1.0, 1.0, 0.0, 0.0, nan]"


def test_exponentials_may_take_the_place_of_what_they_are_of() -> None:
    t: Tensor = torch.tensor([-1.0])
    assert exponentials(t, out=t) is t
    assert float(t) == pytest.approx(0.36787944)
