"""`look`: attention to the bit, measures beside it, for every kind of input, and no N×N.

Measures are judged in test_engines.py, what a view can be asked in test_view.py.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from math import inf, log, nan
from typing import Any

import numpy as np
import pytest
import torch
from dense_measures import assert_measures, truth_and_baseline
from torch import Tensor

import regard
from regard import masks, positions
from regard.backends import reference
from regard.backends.call import prepare
from regard.growth import peak_bytes
from regard.lens.measures.measures import DEFAULT, NAMES
from regard.testing import Case, cases

B, H, HKV, NQ, NK, D, DV = 2, 6, 3, 7, 11, 5, 4
BACKENDS = ("auto", "reference", "tiled", "sdpa", "flex")


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H, NQ, D), (B, HKV, NK, D), (B, HKV, NK, DV)
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


# ----------------------------------------------------------------------------------------------------------- the output


def test_look_takes_every_argument_of_attention_with_the_same_defaults():
    theirs, ours = (dict(signature(f).parameters) for f in (regard.attention, regard.look))
    assert theirs.pop("chunk").default is None  # measures are computed tile by tile in any case
    assert {name: ours.pop(name) for name in theirs} == theirs
    assert list(ours) == ["measures", "size", "top"]


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "booleans": {"mask": torch.rand(NQ, NK) < 0.5},
    "bias": {"bias": torch.randn(H, NQ, NK), "scale": 0.3},
    "ALiBi": {"bias": positions.alibi(H), "mask": masks.window(3, 0)},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.linspace(-1, 1, H)},
    "dropout": {"dropout": 0.3},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_output_is_that_of_attention_to_the_bit_whichever_backend(extra, backend):
    q, k, v = tensors()
    if (
        backend != "auto"
        and regard.backends.load(backend).unsupported_reason(prepare(q, k, v, **EXTRAS[extra])) is not None
    ):
        with pytest.raises(ValueError, match=rf"backend.*'{backend}'"):
            regard.look(q, k, v, **EXTRAS[extra], backend=backend)
        return
    torch.manual_seed(5)
    expected = regard.attention(q, k, v, **EXTRAS[extra], backend=backend)
    torch.manual_seed(5)
    view = regard.look(q, k, v, **EXTRAS[extra], backend=backend)
    assert torch.equal(view.output, expected)
    assert torch.equal(
        torch.get_rng_state(), _after(lambda: regard.attention(q, k, v, **EXTRAS[extra], backend=backend))
    )


def _after(call: Any) -> Tensor:
    """The state of torch's generator after a call from the same seed."""
    torch.manual_seed(5)
    call()
    return torch.get_rng_state()


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "sdpa"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_gradients_of_the_output_are_those_of_attention(extra, backend):
    q, k, v = tensors()
    towards = torch.randn(B, H, NQ, DV)
    leaves = {"q": q, "k": k, "v": v, **{n: a for n, a in EXTRAS[extra].items() if n in ("bias", "sinks")}}
    leaves = {name: value for name, value in leaves.items() if isinstance(value, Tensor)}

    def gradients(function: Any) -> list[Tensor]:
        mine = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
        torch.manual_seed(9)
        function(**{**EXTRAS[extra], **mine}, backend=backend).backward(towards)
        return [leaf.grad for leaf in mine.values()]

    if backend == "sdpa" and regard.backends.sdpa.unsupported_reason(prepare(q, k, v, **EXTRAS[extra])) is not None:
        pytest.skip("torch's SDPA does not do this call")
    expected = gradients(regard.attention)
    found = gradients(lambda **arguments: regard.look(**arguments, measures=NAMES).output)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_only_the_output_carries_a_gradient():
    q, k, v = (x.requires_grad_() for x in tensors())
    view = regard.look(q, k, v, sinks=torch.zeros(H, requires_grad=True), bias=torch.randn(NQ, NK, requires_grad=True))
    assert view.output.requires_grad
    answers = [getattr(view, name) for name in ("lse", "entropy", "received", "max_logit", "effective")]
    answers += [view.map(), view.map(3), view.row(2), view.column(1), view.tile(slice(2), [3]), view.mean("entropy")]
    answers += [view.top(2).weight, *view.patterns().values()]
    assert not any(answer.requires_grad for answer in answers)


def test_looking_while_training_changes_no_step():
    def trained(function: Any) -> Tensor:
        torch.manual_seed(1)
        layer, x = torch.nn.Linear(D, 3 * D), torch.randn(1, 2, NK, D)
        best = torch.optim.SGD(layer.parameters(), 0.5)
        for _ in range(3):
            best.zero_grad()
            function(*layer(x).chunk(3, -1), mask=masks.causal()).square().sum().backward()
            best.step()
        return layer.weight.detach()

    assert torch.equal(trained(lambda *a, **more: regard.look(*a, **more).output), trained(regard.attention))


# ------------------------------------------------------------------------------------------------- measures, end to end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_view_obeys_the_numeric_rule_from_end_to_end(dtype):
    for case in list(cases())[1::31]:
        q, k, v, extra = case.build(dtype)
        _, truth, baseline = truth_and_baseline(case, dtype, 5)
        view = regard.look(q, k, v, **extra, measures=[n for n in NAMES if n != "top"], size=5)
        found = {name: getattr(view, name) for name in ("lse", "entropy", "received", "max_logit", "effective")}
        found |= {"map": view.map(5), "weights": view.tile(slice(None), slice(None))}
        assert_measures(found, baseline, truth, f"{case}, {dtype}")
        assert view.check().ok, f"{case}, {dtype}: {view.check()}"


def test_the_example_of_three_words():
    x = torch.zeros(1, 1, 3, 2)
    view = regard.look(x, x, x, mask=masks.causal(), measures=NAMES)
    assert view.lse[0, 0].tolist() == pytest.approx([0, log(2), log(3)])
    assert view.entropy[0, 0].tolist() == pytest.approx([0, log(2), log(3)])
    assert view.effective[0, 0].tolist() == pytest.approx([1, 2, 3])
    assert view.received[0, 0].tolist() == pytest.approx([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])
    assert view.max_logit[0, 0].tolist() == [0, 0, 0]
    assert view.map()[0, 0].flatten().tolist() == pytest.approx([1, 0, 0, 1 / 2, 1 / 2, 0, 1 / 3, 1 / 3, 1 / 3])
    assert view.row(1)[0, 0].tolist() == pytest.approx([1 / 2, 1 / 2, 0])
    assert view.column(1)[0, 0].tolist() == pytest.approx([0, 1 / 2, 1 / 3])
    assert view.top(2).index[0, 0].tolist() == [[0, -1], [0, 1], [0, 1]]
    assert view.top(2).tied[0, 0].tolist() == [False, False, True]


def test_measures_are_of_the_weights_before_dropout():
    q, k, v = tensors()
    dropped, whole = regard.look(q, k, v, dropout=0.5), regard.look(q, k, v)
    assert not torch.equal(dropped.output, whole.output)
    assert_close = [(getattr(dropped, n), getattr(whole, n)) for n in ("entropy", "received", "max_logit")]
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in assert_close)
    assert dropped.check().ok


def test_default_measures_are_there_at_once_and_others_come_when_asked_for():
    q, k, v = tensors()
    view = regard.look(q, k, v)
    assert set(view.held) == {"lse", *DEFAULT}
    assert regard.look(q, k, v, measures=[]).held.keys() == {"lse"}
    assert regard.look(q, k, v, measures="effective").held.keys() == {"lse", "effective"}
    assert torch.equal(regard.look(q, k, v, measures=[]).entropy, view.entropy)


def test_the_engine_is_named():
    assert regard.look(*tensors()).engine == "torch"


# ------------------------------------------------------------------------------------------------ arrays and their axes


SHAPES = {
    "(N, D)": ((NQ, D), (NK, D), (NK, DV), ()),
    "(B, N, D)": ((B, NQ, D), (B, NK, D), (B, NK, DV), (B,)),
    "(B, H, N, D)": ((B, H, NQ, D), (B, HKV, NK, D), (B, HKV, NK, DV), (B, H)),
    "(A, B, H, N, D)": ((3, B, H, NQ, D), (3, B, HKV, NK, D), (3, B, HKV, NK, DV), (3, B, H)),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_of_the_inputs_kind_with_the_queries_leading_axes(shape, kind):
    *shapes, lead = SHAPES[shape]
    q, k, v = (np.random.default_rng(n).standard_normal(s).astype(np.float32) for n, s in enumerate(shapes))
    if kind == "torch":
        q, k, v = (torch.from_numpy(x) for x in (q, k, v))
    view = regard.look(q, k, v, mask=masks.causal(), measures=NAMES, size=4, top=3)
    top = view.top(3)
    answers = {
        "output": (view.output, (NQ, DV)),
        **{name: (getattr(view, name), (NQ,)) for name in ("lse", "entropy", "max_logit", "effective")},
        "received": (view.received, (NK,)),
        "map": (view.map(4), (4, 4)),
        "another map": (view.map(9), (NQ, 9)),
        "links": (top.index, (NQ, 3)),
        "weights of links": (top.weight, (NQ, 3)),
        "ties": (top.tied, (NQ,)),
        "row": (view.row(-1), (NK,)),
        "column": (view.column(0), (NQ,)),
        "tile": (view.tile(range(2), [5, 0, 1]), (2, 3)),
        "mean": (view.mean("entropy"), ()),
        **{f"pattern {name}": (score, ()) for name, score in view.patterns().items()},
    }
    for name, (answer, rest) in answers.items():
        assert isinstance(answer, np.ndarray if kind == "numpy" else Tensor), name
        assert tuple(answer.shape) == (*lead, *rest), name
    assert view.check().ok


@pytest.mark.parametrize("shape", SHAPES)
def test_leading_axes_hold_what_each_call_alone_would(shape):
    *shapes, lead = SHAPES[shape]
    q, k, v = (torch.randn(s, dtype=torch.float64) for s in shapes)
    view = regard.look(q, k, v, mask=masks.causal())
    heads = q.reshape(-1, NQ, D)
    keys = k if len(lead) < 2 else k.repeat_interleave(H // HKV, -3)
    for n, (one, its) in enumerate(zip(heads, keys.reshape(-1, NK, D), strict=True)):
        alone = regard.look(one, its, its, mask=masks.causal())
        assert torch.allclose(view.entropy.reshape(-1, NQ)[n], alone.entropy, rtol=1e-12)
        assert torch.allclose(view.row(3).reshape(-1, NK)[n], alone.row(3), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_numpy_in_numpy_out_to_the_bit_of_attention(dtype, backend):
    q, k, v = (x.numpy().astype(dtype) for x in tensors())
    mask = np.tril(np.ones((NQ, NK), bool))
    view = regard.look(q, k, v, mask=mask, backend=backend)
    assert view.output.dtype == dtype
    assert np.array_equal(view.output, regard.attention(q, k, v, mask=mask, backend=backend))
    assert view.entropy.dtype == (np.float64 if dtype == np.float64 else np.float32)


def test_arrays_that_torch_cannot_share_are_read_all_the_same():
    q, k, v = (x.numpy() for x in tensors())
    expected = regard.look(q, k, v).entropy
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (q, k, v)]
    assert np.array_equal(regard.look(*swapped).entropy, expected)
    frozen = [x.copy() for x in (q, k, v)]
    for x in frozen:
        x.flags.writeable = False
    assert np.array_equal(regard.look(*frozen).entropy, expected)
    backwards = [x[..., ::-1] for x in (q, k, v)]
    assert np.allclose(regard.look(*backwards).entropy, expected, rtol=1e-5)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is double on this machine")
def test_a_dtype_that_only_numpy_has_is_refused():
    x = np.zeros((3, 4), np.longdouble)
    with pytest.raises(TypeError, match=r"float128.*NumPy.*float64"):
        regard.look(x, x, x)


def test_tensors_with_strides_of_their_own_are_read_as_they_are():
    whole = torch.randn(B, NQ, 3, H, D)  # as a fused projection leaves them
    q, k, v = (x.transpose(1, 2) for x in whole.unbind(2))
    view, plain = regard.look(q, k, v), regard.look(*(x.contiguous() for x in (q, k, v)))
    assert torch.equal(view.output, regard.attention(q, k, v))
    assert torch.allclose(view.entropy, plain.entropy, rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- edges of size


EMPTY = {
    "no queries": ((2, 3, 0, 5), (2, 3, 7, 5), (2, 3, 7, 4)),
    "no keys": ((2, 3, 7, 5), (2, 3, 0, 5), (2, 3, 0, 4)),
    "no batch rows": ((0, 3, 7, 5), (0, 3, 5, 5), (0, 3, 5, 4)),
    "no values": ((2, 3, 7, 5), (2, 3, 5, 5), (2, 3, 5, 0)),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("sinks", [None, torch.zeros(3)])
def test_empty_inputs_are_looked_at(name, sinks):
    q, k, v = (torch.randn(shape) for shape in EMPTY[name])
    view = regard.look(q, k, v, mask=masks.causal(), sinks=sinks, measures=NAMES, size=4, top=2)
    (batch, heads, nq, _), nk = q.shape, k.shape[2]
    assert torch.equal(view.output, regard.attention(q, k, v, mask=masks.causal(), sinks=sinks))
    assert view.entropy.shape == view.lse.shape == (batch, heads, nq)
    assert view.received.shape == (batch, heads, nk)
    assert view.map().shape == view.map(4).shape == (batch, heads, min(4, nq), min(4, nk))
    assert view.top().index.shape == view.top(2).weight.shape == (batch, heads, nq, 2)
    assert view.tile(slice(None), slice(None)).shape == (batch, heads, nq, nk)
    assert all(score.shape == (batch, heads) for score in view.patterns().values())
    assert view.mean("entropy").shape == (batch, heads)
    report = view.check()
    assert report.ok
    assert report.rows == batch * heads * nq


def test_no_keys_still_give_every_leaf_a_gradient_of_zero():
    q, k, v = (torch.randn(1, 2, n, 3, requires_grad=True) for n in (5, 0, 0))
    regard.look(q, k, v).output.sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))
    assert k.grad.shape == k.shape


def test_empty_inputs_do_not_let_a_wrong_backend_pass():
    x = torch.zeros(1, 2, 0, 3)
    with pytest.raises(ValueError, match=r"backend.*'fast'"):
        regard.look(x, x, x, backend="fast")


def test_one_query_and_one_key():
    x = torch.randn(1, 1, 1, 3)
    view = regard.look(x, x, x, measures=NAMES)
    assert view.row(0).tolist() == [[[1.0]]]
    assert view.entropy.tolist() == [[[0.0]]]
    assert view.effective.tolist() == view.received.tolist() == [[[1.0]]]
    assert view.map(8).tolist() == [[[[1.0]]]]
    assert view.top(3).index.tolist() == [[[[0, -1, -1]]]]


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "sdpa"])
def test_rows_that_see_nothing_are_all_zero(backend):
    q, k, v = tensors()
    nothing = torch.zeros(NQ, NK, dtype=torch.bool)
    view = regard.look(q, k, v, mask=nothing, measures=NAMES, backend=backend)
    for name in ("output", "entropy", "effective", "received"):
        answer = getattr(view, name)
        assert bool((answer == 0).all()), name
        assert not bool(answer.signbit().any()), name
    assert bool((view.lse == -inf).all())
    assert bool((view.max_logit == -inf).all())
    assert bool((view.map() == 0).all())
    assert bool((view.row(3) == 0).all())
    assert bool((view.top(2).index == -1).all())
    assert bool((view.mean("entropy") == 0).all())
    report = view.check()
    assert (report.ok, report.empty_rows) == (True, B * H * NQ)
    assert all(bool((score == 0).all()) for score in view.patterns().values())


# ------------------------------------------------------------------------------------------------------ extreme numbers


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("backend", ["auto", "reference", "tiled"])
def test_nan_and_infinity_are_reported_with_their_row_and_raise_nothing(bad, backend):
    q, k, v = tensors()
    q[1, 2, 3] = bad
    view = regard.look(q, k, v, measures=NAMES, backend=backend)
    report = view.check()
    assert not report.ok
    assert report.bad_rows == 1
    (problem,) = report.problems
    assert (problem.kind, problem.batch, problem.head, problem.row) == ("nan", 1, 2, 3)
    assert str(problem) == "batch 1, head 2, row 3: holds NaN; often a row whose keys are all hidden"
    assert view.entropy.isnan().nonzero().tolist() == [[1, 2, 3]]
    assert bool(view.mean("entropy").isnan()[1, 2])
    assert view.mean("entropy").isnan().sum() == 1
    view.patterns(), view.top(3), view.map(2), view.row(3)


def test_a_key_that_is_nan_spoils_the_rows_that_see_it():
    q, k, v = tensors()
    k[0, 1, NK - 1] = nan
    report = regard.look(q, k, v, mask=masks.causal(), backend="tiled").check()
    assert report.bad_rows == 2  # the last query of the two heads that read this key
    assert [(p.batch, p.head, p.row) for p in report.problems] == [(0, 2, NQ - 1), (0, 3, NQ - 1)]


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_scores_of_ten_thousand_pass_the_check(scale):
    q, k, v = tensors()
    view = regard.look(q, k, v, scale=scale)
    assert view.lse.abs().max() > 1e4
    assert view.check().ok
    assert bool((view.top(1).weight <= 1 + view.check().tolerance).all())


@pytest.mark.parametrize("sink", [1e4, -1e4, 1e30, -inf])
def test_sinks_far_above_or_below_the_scores(sink):
    q, k, v = tensors()
    view = regard.look(q, k, v, sinks=torch.full((H,), sink), measures=NAMES)
    plain = regard.look(q, k, v, measures=NAMES)
    assert view.check().ok
    if sink > 0:  # it takes everything
        assert bool((view.row(0) == 0).all())
        assert bool((view.entropy == 0).all())
        assert bool((view.effective == 1).all())
        assert torch.allclose(view.max_logit, plain.max_logit, rtol=1e-5)
    else:
        assert torch.allclose(view.entropy, plain.entropy, rtol=1e-5)
        assert torch.allclose(view.effective, plain.effective, rtol=1e-5)


# --------------------------------------------------------------------------------------------------------- surroundings


def test_autocast_around_look_changes_nothing():
    q, k, v = tensors()
    plain = regard.look(q, k, v, mask=masks.causal(), measures=NAMES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        view = regard.look(q, k, v, mask=masks.causal(), measures=NAMES)
        assert torch.equal(view.output, plain.output)
        for name in plain.held:
            assert torch.equal(view.held[name], plain.held[name]), name
        assert torch.equal(view.row(2), plain.row(2))
        assert torch.equal(view.map(3), plain.map(3))
        assert all(torch.equal(score, plain.patterns()[name]) for name, score in view.patterns().items())
        assert view.check().ok


def test_a_view_made_under_inference_mode_answers_later():
    with torch.inference_mode():
        view = regard.look(*tensors(), mask=masks.causal(), bias=positions.alibi(H))
    assert view.row(2).shape == (B, H, NK)
    assert view.effective.shape == (B, H, NQ)
    assert view.map(3).shape == (B, H, 3, 3)
    assert view.check().ok
    assert view.patterns()["own"].shape == (B, H)


def test_looking_leaves_the_inputs_as_they_are():
    q, k, v = tensors()
    bias, sinks = torch.randn(NQ, NK), torch.zeros(H)
    before = [x.clone() for x in (q, k, v, bias, sinks)]
    view = regard.look(q, k, v, bias=bias, sinks=sinks, softcap=2.0, measures=NAMES)
    view.row(0), view.check(), view.patterns(), view.top(5), view.map(2)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, bias, sinks), strict=True))


# -------------------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        (
            {"measures": "entorpy"},
            ValueError,
            r"'entorpy'.*entropy.*received.*max_logit.*effective",
        ),
        ({"measures": 7}, TypeError, r"measures.*entropy.*int"),
        ({"size": 0}, ValueError, r"size.*1.*0"),
        ({"size": 2.5}, TypeError, r"size.*1.*float.*2.5"),
        ({"top": -1}, ValueError, r"top.*1.*-1"),
        ({"top": None}, TypeError, r"top.*1.*NoneType.*None"),
        ({"mask": torch.zeros(NQ, NK)}, TypeError, r"float"),
        ({"softcap": -1.0}, ValueError, r"softcap.*0.*-1.0.*None"),
        ({"dropout": 1.0}, ValueError, r"dropout.*0.*1.*1.0"),
        ({"backend": "fast"}, ValueError, r"backend.*'fast'.*reference.*tiled.*sdpa.*flex"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks.*\(6,\).*shape.*\(2,\)"),
    ],
)
def test_a_wrong_argument_is_named(more, error, said):
    with pytest.raises(error, match=said):
        regard.look(*tensors(), **more)


def test_wrong_arrays_are_refused_as_attention_refuses_them():
    q, k, v = tensors()
    for wrong in ((q, k[..., :3], v), (q, k.numpy(), v), (q[:1], k, v), (q.int(), k.int(), v.int())):
        with pytest.raises((TypeError, ValueError)) as theirs:
            regard.attention(*wrong)
        with pytest.raises(type(theirs.value)) as ours:
            regard.look(*wrong)
        assert str(ours.value) == str(theirs.value)


# --------------------------------------------------------------------------------------------------------------- memory


def memory(n: int, work: Callable[..., object]) -> int:
    """Bytes that some work on n positions takes at most, as torch's allocator counts them."""
    given = [torch.randn(1, 1, n, 64) for _ in range(3)]
    return peak_bytes(lambda: work(*given), torch.device("cpu"))


@pytest.mark.parametrize(
    ("n", "mask", "most"),
    [
        (8192, masks.window(256, 0), 60 * 2**20),
        (8192, masks.padding([1024]), 60 * 2**20),
        (4096, None, 15 * 2**20),
    ],
    ids=["window", "padding", "everything"],
)
def test_looking_takes_little_memory_at_8192_positions_and_without_a_mask(n, mask, most):
    def work(q, k, v):
        view = regard.look(q, k, v, mask=mask, measures=["entropy", "received", "max_logit", "effective", "map", "top"])
        view.patterns(), view.row(3), view.map(32), view.mean("entropy")

    # At 8192 positions one N×N matrix is 256 MiB, one of booleans 64 MiB; at 4096 a quarter of that.
    assert n * 64 * 4 <= memory(n, work) < most


def test_what_n_by_n_takes_would_be_seen():
    assert memory(4096, lambda q, k, v: q @ k.mT) == 4 * 4096**2


def test_the_output_of_the_definition_is_what_look_gives_for_one_case():
    q, k, v, extra = Case("several tiles", "window or globals", "all together").build(torch.float64)
    expected = reference.run(prepare(q, k, v, **extra))
    assert torch.equal(regard.look(q, k, v, **extra, backend="reference").output, expected)
