import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.lens.validity import LISTED, Problem, check

NUMPY = [np.float16, np.float32, np.float64, np.longdouble]
TORCH = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(3, 7), (5, 3, 7), (2, 5, 3, 7), (11, 2, 5, 3, 7)]


def softmax(*shape: int, dtype: type = np.float64) -> np.ndarray:
    e = np.exp(-3 * np.random.default_rng(0).random(shape)).astype(dtype)
    return e / e.sum(-1, keepdims=True)


def as_kind(weights: np.ndarray, kind: str) -> np.ndarray | torch.Tensor:
    return torch.from_numpy(weights) if kind == "torch" else weights


def uniform(keys: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1, keys), 1 / keys, dtype=torch.float64).to(dtype)


both = pytest.mark.parametrize("kind", ["numpy", "torch"])


# -------------------------------------------------------------------------------------------------------- right weights


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_passes_with_any_number_of_axes(kind, shape):
    report = check(as_kind(softmax(*shape), kind))
    assert report.ok
    assert (report.rows, report.empty_rows, report.bad_rows, report.problems) == (np.prod(shape[:-1]), 0, 0, ())


@pytest.mark.parametrize("dtype", NUMPY)
def test_softmax_passes_in_every_numpy_dtype(dtype):
    assert check(softmax(2, 5, 3, 997, dtype=dtype)).ok


@pytest.mark.parametrize("dtype", [*TORCH, torch.float8_e4m3fn, torch.float8_e5m2])
def test_softmax_passes_in_every_torch_dtype(dtype):
    assert check(torch.from_numpy(softmax(2, 5, 3, 7)).to(dtype)).ok


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("keys", [1, 3, 997, 50_021])
def test_long_uniform_rows_pass(dtype, keys):
    """Every weight is rounded the same way, so that the errors add up instead of cancelling."""
    assert check(uniform(keys, dtype)).ok


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(TORCH), st.integers(1, 400), st.floats(0, 30), st.integers(0, 999))
def test_softmax_of_torch_passes_at_any_length_and_sharpness(dtype, keys, sharpness, seed):
    scores = sharpness * torch.randn(3, keys, generator=torch.Generator().manual_seed(seed))
    report = check(scores.to(dtype).softmax(-1))
    assert report.ok, str(report)


@both
def test_rows_of_zeros_are_empty_and_right(kind):
    weights = softmax(5, 3, 7)
    weights[1, 2] = 0.0
    weights[4, 0] = -0.0
    report = check(as_kind(weights, kind))
    assert (report.ok, report.rows, report.empty_rows) == (True, 15, 2)


@both
@pytest.mark.parametrize(
    ("shape", "rows"), [((3, 0), 3), ((0, 7), 0), ((0, 0), 0), ((2, 5, 3, 0), 30), ((2, 0, 3, 7), 0)]
)
def test_weights_without_rows_or_without_keys_are_right(kind, shape, rows):
    report = check(as_kind(np.zeros(shape), kind))
    assert (report.ok, report.rows, report.empty_rows) == (True, rows, rows)


def test_weights_of_the_definition_pass_with_one_empty_row_per_head():
    x = np.random.default_rng(0).standard_normal((2, 5, 13, 7))
    report = check(regard.steps(x, x, x, mask=regard.masks.causal(offset=-1)).weights)
    assert (report.ok, report.empty_rows) == (True, 2 * 5)


# -------------------------------------------------------------------------------------------------------- wrong weights


@both
@pytest.mark.parametrize(
    ("weight", "found", "value"),
    [
        (np.nan, "nan", np.nan),
        (np.inf, "infinite", np.inf),
        (-np.inf, "infinite", -np.inf),
        (-1e-300, "negative", -1e-300),
        (1.5, "above one", 1.5),
        (0.75, "sum", 1.25),
    ],
)
def test_each_kind_of_problem_is_found(kind, weight, found, value):
    weights = np.full((5, 3, 2), 0.5)
    weights[4, 1, 0] = weight
    report = check(as_kind(weights, kind))
    (problem,) = report.problems
    assert (report.ok, report.bad_rows) == (False, 1)
    assert (problem.kind, problem.batch, problem.head, problem.row) == (found, 4, None, 1)
    assert problem.value == value or np.isnan([problem.value, value]).all()


@both
@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([np.nan, np.inf, -1.0, 2.0], "nan"),
        ([0.0, np.inf, -np.inf, 2.0], "infinite"),
        ([0.5, 1.5, -1.0, 0.0], "negative"),
        ([0.0, 0.5, 1.5, 0.5], "above one"),
    ],
)
def test_the_gravest_problem_of_a_row_is_told_and_no_other(kind, row, found):
    report = check(as_kind(np.array([row]), kind))
    assert [problem.kind for problem in report.problems] == [found]


def test_a_row_whose_weights_cancel_is_not_empty():
    assert check(np.array([[0.5, -0.5]])).empty_rows == 0


@both
def test_finite_weights_whose_sum_overflows_are_found(kind):
    report = check(as_kind(np.full((1, 3), 3e38, dtype=np.float32), kind))
    assert [problem.kind for problem in report.problems] == ["above one"]


@both
@pytest.mark.parametrize(
    ("index", "place"),
    [
        ((2,), (None, None, 2)),
        ((4, 2), (4, None, 2)),
        ((1, 4, 2), (1, 4, 2)),
        ((10, 1, 4, 2), ((10, 1), 4, 2)),
        ((6, 10, 1, 4, 2), ((6, 10, 1), 4, 2)),
    ],
)
def test_a_problem_says_which_batch_head_and_row(kind, index, place):
    shape = (7, 11, 2, 5, 3)[-len(index) :]
    weights = np.full((*shape, 4), 0.25)
    weights[index] = 0.5
    report = check(as_kind(weights, kind))
    assert [(p.batch, p.head, p.row, p.value) for p in report.problems] == [(*place, 2.0)]


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("sum", None, None, 5, 2.0, "m"), "row 5: m"),
        (Problem("sum", 0, None, 5, 2.0, "m"), "batch 0, row 5: m"),
        (Problem("sum", 0, 3, 5, 2.0, "m"), "batch 0, head 3, row 5: m"),
        (Problem("sum", (1, 0), 3, 5, 2.0, "m"), "batch (1, 0), head 3, row 5: m"),
    ],
)
def test_a_problem_prints_its_place_and_message(problem, text):
    assert str(problem) == text


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("direction", [-1, 1])
def test_a_row_within_the_documented_bound_passes_and_the_next_one_does_not(dtype, direction):
    own, wide = torch.finfo(dtype), torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    bound = own.eps + 7 * (wide.eps + own.smallest_normal * own.eps)
    within = int(bound / own.eps)
    weights = torch.zeros(2, 7, dtype=dtype)
    weights[:, 0] = 0.5
    weights[0, 1] = 0.5 + direction * within * own.eps
    weights[1, 1] = 0.5 + direction * (within + 1) * own.eps
    report = check(weights)
    assert report.tolerance == bound
    assert [(problem.kind, problem.row) for problem in report.problems] == [("sum", 1)]


def test_numpy_and_torch_allow_the_same():
    for dtype in (np.float16, np.float32, np.float64):
        weights = softmax(3, 7, dtype=dtype)
        assert check(weights).tolerance == check(torch.from_numpy(weights)).tolerance


def test_a_dropped_key_is_found_even_in_a_long_bfloat16_row():
    weights = uniform(8192, torch.bfloat16)
    assert check(weights).ok
    weights[0, :200] = 0
    assert [problem.kind for problem in check(weights).problems] == ["sum"]


def test_sums_are_taken_in_more_than_half_precision():
    eps = np.finfo(np.float16).eps
    weights = np.array([[0.5, 0.5 + eps, 0.4 * eps]], dtype=np.float16)  # 1 + 1.4 eps; in float16 1 + eps would pass
    assert [check(w).bad_rows for w in (weights, torch.from_numpy(weights))] == [1, 1]


# ----------------------------------------------------------------------------------------------------- tolerance, sinks


@both
def test_a_given_tolerance_takes_the_place_of_the_bound(kind):
    weights = as_kind(np.array([[0.5, 0.25], [0.5, 0.75]]), kind)
    assert check(weights, tolerance=0.25).ok
    assert check(weights, tolerance=0.25).tolerance == 0.25
    assert check(weights, tolerance=0.2499).bad_rows == 2


def test_tolerance_zero_asks_for_exact_sums():
    assert check(np.array([[0.5, 0.5]]), tolerance=0).ok
    assert check(np.array([[0.5, 0.5 + 2**-52]]), tolerance=0).bad_rows == 1


def test_tolerance_does_not_excuse_negative_weights():
    assert [p.kind for p in check(np.array([[-0.001, 1.001]]), tolerance=0.1).problems] == ["negative"]


@both
def test_with_sinks_a_sum_below_one_is_right_and_above_one_is_wrong(kind):
    weights = as_kind(np.array([[0.25, 0.25], [0.0, 0.0], [0.5, 0.5], [0.75, 0.5]]), kind)
    assert check(weights).bad_rows == 2
    report = check(weights, sinks=True)
    assert [(p.kind, p.row, p.message) for p in report.problems] == [("sum", 3, "sums to 1.25, above 1")]
    assert report.empty_rows == 1


@pytest.mark.parametrize("weight", [np.nan, np.inf, -0.25])
def test_sinks_excuse_nothing_else(weight):
    assert not check(np.array([[0.25, weight]]), sinks=True).ok


# --------------------------------------------------------------------------------------------------------------- report


def test_report_lists_the_first_ten_and_counts_the_rest():
    weights = softmax(2, 5, 3, 7)
    weights[1] = 0.5
    report = check(weights)
    assert LISTED == 10
    assert (report.bad_rows, len(report.problems)) == (15, 10)
    assert [(p.batch, p.head, p.row) for p in report.problems] == [(1, i // 3, i % 3) for i in range(10)]
    lines = str(report).splitlines()
    assert len(lines) == 12
    assert lines[0] == "15 of 30 rows are not attention weights (tolerance 1.78e-15):"
    assert lines[1] == "  batch 1, head 0, row 0: sums to 3.5, not to 1"
    assert lines[-1] == "  and 5 rows more"


def test_report_of_ten_problems_says_nothing_of_more():
    assert "more" not in str(check(np.full((10, 7), 0.5)))
    assert str(check(np.full((11, 7), 0.5))).endswith("  and 1 row more")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([np.nan, 0.5], "holds NaN; often a row whose keys are all hidden"),
        ([np.inf, 0.5], "holds inf"),
        ([-np.inf, 0.5], "holds -inf"),
        ([-0.25, 0.5], "has the weight -0.25, below 0"),
        ([2.25, 0.5], "has the weight 2.25, above 1"),
        ([0.25, 0.5], "sums to 0.75, not to 1"),
        ([0.5, 0.5 + 2**-40], "sums to 1.0000000000009095, not to 1"),
    ],
)
def test_messages_say_what_is_wrong(row, message):
    assert check(np.array([row])).problems[0].message == message


def test_a_good_report_is_one_line():
    text = str(check(np.array([[1.0, 0.0], [0.0, 0.0]])))
    assert text == "2 rows of attention weights, 1 of them empty (tolerance 6.66e-16)"
    assert str(check(np.array([[1.0, 0.0]]))) == "1 row of attention weights (tolerance 6.66e-16)"


def test_a_report_is_true_when_all_is_well():
    assert bool(check(np.eye(3))) is True
    assert bool(check(np.ones((3, 3)))) is False


def test_raise_if_bad_raises_the_report_and_only_then():
    check(np.eye(3)).raise_if_bad()
    report = check(np.full((1, 3), 0.25))
    with pytest.raises(ValueError, match="1 of 1") as caught:
        report.raise_if_bad()
    assert str(caught.value) == str(report) == repr(report)


def test_report_and_problem_are_frozen():
    report = check(np.full((1, 3), 0.25))
    with pytest.raises(FrozenInstanceError):
        report.bad_rows = 0
    with pytest.raises(FrozenInstanceError):
        report.problems[0].row = 1


# ------------------------------------------------------------------------------------------------------- how it behaves


@pytest.mark.parametrize("dtype", TORCH)
def test_torch_weights_are_not_changed(dtype):
    weights = torch.randn(2, 5, 3, 7).to(dtype)
    before = weights.clone()
    check(weights)
    assert torch.equal(weights, before)


def test_read_only_numpy_weights_are_accepted_and_not_changed():
    weights, before = softmax(2, 5, 3, 7), softmax(2, 5, 3, 7)
    weights.flags.writeable = False
    assert check(weights).ok
    assert np.array_equal(weights, before)


def test_weights_that_need_a_gradient_are_accepted():
    assert check(torch.randn(3, 7, requires_grad=True).softmax(-1)).ok


@both
def test_a_transposed_view_is_read_as_it_stands(kind):
    weights = as_kind(np.ascontiguousarray(softmax(3, 7).T), kind)
    assert check(weights.T).ok
    assert check(weights).bad_rows == 7


def test_a_subclass_of_arrays_is_read_as_an_array():
    assert [str(p) for p in check(np.ones((1, 3)).view(np.matrix)).problems] == ["row 0: sums to 3, not to 1"]


def test_memory_taken_is_in_proportion_to_the_rows():
    code = (
        "import tracemalloc, numpy as np; from regard.lens.validity import check\n"
        "w = np.full((64, 16384), 1 / 16384, dtype=np.float32); check(w); tracemalloc.start()\n"
        "assert check(w).ok; print(tracemalloc.get_traced_memory()[1] < w.nbytes / 8)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "weights",
    [np.eye(3, dtype=int), np.eye(3, dtype=bool), np.eye(3, dtype=complex), torch.eye(3).int(), torch.eye(3).bool()],
)
def test_weights_that_are_not_floats_are_refused(weights):
    with pytest.raises(TypeError, match=r"weights.*(int|bool|complex)"):
        check(weights)


def test_weights_that_are_not_an_array_are_refused():
    with pytest.raises(TypeError, match=r"weights.*NumPy.*list"):
        check([[0.5, 0.5]])


@both
@pytest.mark.parametrize("shape", [(), (7,)])
def test_weights_without_rows_and_keys_axes_are_refused(kind, shape):
    with pytest.raises(ValueError, match=r"weights.*2.*Nq.*Nk.*shape"):
        check(as_kind(np.ones(shape), kind))


@pytest.mark.parametrize("tolerance", [-0.1, np.nan, np.inf])
def test_tolerance_that_is_negative_or_not_finite_is_refused(tolerance):
    with pytest.raises(ValueError, match=rf"tolerance.*0.*{tolerance}"):
        check(np.eye(3), tolerance=tolerance)


@pytest.mark.parametrize("tolerance", ["0.1", True, [0.1]])
def test_tolerance_that_is_not_a_number_is_refused(tolerance):
    with pytest.raises(TypeError, match=r"tolerance.*None"):
        check(np.eye(3), tolerance=tolerance)


def test_sinks_given_as_logits_are_refused():
    with pytest.raises(TypeError, match=r"sinks.*True.*False.*sinks.*Tensor"):
        check(np.eye(3), sinks=torch.zeros(5))


def test_rows_too_coarse_to_judge_are_refused_unless_a_tolerance_is_given():
    weights = uniform(997, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"997.*torch.float8_e4m3fn.*2\.07"):
        check(weights)
    assert not check(weights, tolerance=0.5).ok
