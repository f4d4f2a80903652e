"""Every measure at logits from 1 to 1e6 against dense fp64: both engines, exact weights, files, `check` and `diff`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_measures import assert_measures, assert_top, measures_from_lse, measures_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks
from regard.backends.call import Call, prepare
from regard.lens.capture import Capture
from regard.lens.comparison import compare
from regard.lens.measures import engines, gpu
from regard.lens.measures.measures import NAMES, MeasureOptions, read_measures
from regard.lens.measures.weights import LARGE, ComputedWeights, StoredWeights
from regard.lens.view import View
from regard.testing import assert_rule

N, SIZE = 40, 6
SCALES = [10.0**n for n in range(7)]
MASKS = {"causal": masks.causal(), "padding": masks.padding([N, 23]), "window": masks.window(5, 2)}
HEADS = [16, 64, 128]
DTYPES = [torch.float32, torch.bfloat16]
ALL = read_measures(NAMES, SIZE, 3)
SMALL = gpu.Blocks(16, 32, 4, 2)  # several tiles each way


def drawn(scale: float, d: int = 64, dtype: torch.dtype = torch.float32, **extra: Any) -> Call:
    """A call whose largest score is `scale` in each head."""
    random = torch.Generator().manual_seed(int(d + 7 * np.log10(scale)))
    q, k, v = (torch.randn(2, 2, N, d, generator=random) for _ in range(3))
    q = q * (scale / (q @ k.mT).abs().amax((0, 2, 3)) * d**0.5).view(2, 1, 1)
    return prepare(*(x.to(dtype) for x in (q, k, v)), **extra)


def dense(call: Call) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Baseline, in the call's dtype, and truth, in fp64: `define` divides by each row's sum."""
    sinks = None if call.sinks is None else call.sinks.double()
    wide = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double(), sinks=sinks)
    return measures_of(call, SIZE), measures_of(wide, SIZE)


def judge(found: dict[str, Tensor], call: Call, what: str, *, by_head: bool = False) -> None:
    """The numeric rule; with no allowance for an lse that was rounded where it is large.

    by_head: the engine takes fp64 head by head, so that all of them must be large.
    """
    baseline, truth = dense(call)
    found = found | {"lse": found["lse"].float()}
    step = None
    largest = truth["lse"].masked_fill(truth["lse"] == -inf, 0.0).abs().amax(-1)  # (B, H)
    if float(largest.min() if by_head else largest.max()) > LARGE:
        step = 1.0
    else:
        baseline = measures_from_lse(call, SIZE, backwards=False)
    assert_measures(found, baseline, truth, what, step)
    assert_top(found, baseline, truth, what, step)


def looked(call: Call) -> View:
    sinks, bias = call.sinks, call.bias
    return regard.look(call.q, call.k, call.v, mask=call.mask, bias=bias, sinks=sinks, measures=NAMES, size=SIZE, top=3)


# ----------------------------------------------------------------------------------------------------------- the grid


@pytest.mark.pairwise
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_look_measures_as_dense_fp64_does(scale, mask, dtype):
    for d in HEADS:
        call = drawn(scale, d, dtype, mask=MASKS[mask])
        judge(looked(call).held, call, f"{scale:g}, D {d}")


def test_the_largest_scores_that_are_not_large_are_within_the_rule_as_well():
    for d in (*HEADS, 80):
        call = drawn(0.99 * LARGE, d, mask=MASKS["causal"])
        judge(looked(call).held, call, f"D {d}")


EXTRAS = {
    "grouped": {},
    "bias": {"bias": torch.randn(2, N, N, generator=torch.Generator().manual_seed(1)) * 1e5},
    "sinks": {"sinks": torch.tensor([9e5, -1e6])},
    "rows that see nothing": {"mask": masks.causal(offset=-3)},
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_look_with_other_arguments_measures_as_dense_fp64_does(extra):
    call = drawn(1e6, **EXTRAS[extra])
    if extra == "grouped":
        call = prepare(call.q, call.k[:, :1], call.v[:, :1])
    judge(looked(call).held, call, extra)


@pytest.mark.parametrize("bad", [torch.nan, inf])
def test_numbers_that_are_none_stay_in_their_row(bad):
    call = drawn(1e6)
    call.q[0, 1, 2] = bad
    view = looked(call)
    assert view.entropy.isnan().nonzero().tolist() == [[0, 1, 2]]
    assert view.received.isnan().any(-1).tolist() == [[False, True], [False, False]]
    assert view.row(1).isfinite().all()


def test_the_example_of_the_issue():
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, 128) for _ in range(3))
    received = regard.look(q * 1e7, k, v, mask=masks.causal()).received
    assert float(received.sum()) == pytest.approx(40)


# ------------------------------------------------------------------------------------------------------ exact weights


class Attention(torch.nn.Module):
    """One causal call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True)


def watched(call: Call, **options: Any) -> Capture:
    model = Attention()
    with torch.no_grad(), regard.watch(model, measures=[*NAMES, "patterns"], size=SIZE, top=3, **options) as seen:
        model(call.q, call.k, call.v)
    return seen


@pytest.fixture(params=["look", "file", "lse in fp32"])
def view(request: pytest.FixtureRequest, tmp_path: Path) -> View:
    """A view of `drawn(1e6)`, causal: fresh, saved and opened, and with no more than the kernel's own lse."""
    call = drawn(1e6, mask=masks.causal())
    if request.param == "file":
        watched(call, keep="qk").save(tmp_path / "run.regard")
        return regard.open(tmp_path / "run.regard")[0]
    view = looked(call)
    return view if request.param == "look" else replace(view, weights=ComputedWeights(call, view.lse))


def test_exact_weights_are_those_of_dense_fp64(view):
    call = drawn(1e6, mask=masks.causal())
    baseline, truth = (x["weights"] for x in dense(call))
    rows, cols, keys = [-1, 0, 17], slice(3, 30), torch.arange(N) // 2
    assert_rule(view.row(5), baseline[:, :, 5], truth[:, :, 5], what="row")
    assert_rule(view.column(3), baseline[..., 3], truth[..., 3], what="column")
    assert_rule(view.tile(rows, cols), baseline[:, :, rows, cols], truth[:, :, rows, cols], what="tile")
    pairs = [x.gather(-1, keys.expand(2, 2, N).unsqueeze(-1)).squeeze(-1) for x in (baseline, truth)]
    assert_rule(view.weights.pairs(keys), *pairs, what="pairs")


def test_measures_that_are_asked_for_later_are_those_of_dense_fp64(view):
    call = drawn(1e6, mask=masks.causal())
    later = replace(view, held={"lse": view.held["lse"]})
    found = {name: later._held(name) for name in ("entropy", "received", "max_logit", "effective")}
    later.top(3)
    links = {name: values for name, values in later.held.items() if name.startswith("top")}
    judge(found | links | {"lse": view.lse, "map": later.map(SIZE)}, call, "later")


def test_patterns_are_those_of_dense_fp64(view):
    call = drawn(1e6, mask=masks.causal())
    baseline, truth = (
        replace(view, weights=StoredWeights(x["weights"]), held=x).score_patterns().scores for x in dense(call)
    )
    for name, score in replace(view, held={"lse": view.held["lse"]}).patterns().items():
        assert_rule(score, baseline[name], truth[name], what=name)


def test_check_grants_what_it_grants_at_ordinary_logits_and_finds_a_wrong_lse(view):
    report = view.check()
    assert report.ok
    assert report.tolerance < 1e-3
    lse = dense(drawn(1e6, mask=masks.causal()))[1]["lse"]
    lse[0, 1, 7] += 0.01
    report = replace(view, weights=ComputedWeights(view.weights.call, lse)).check()
    assert [(p.batch, p.head, p.row, p.kind) for p in report.problems] == [(0, 1, 7, "sum")]


def test_kernels_that_round_otherwise_give_captures_that_are_alike(tmp_path):
    call = drawn(1e6, mask=masks.causal())
    flash = watched(call)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = watched(call, keep="qk")
    plain.save(tmp_path / "plain.regard")
    for other in (plain, regard.open(tmp_path / "plain.regard")):
        assert compare(flash, other, tolerance=1e-6).same


def test_given_weights_of_large_scores_have_their_own_links():
    call = drawn(1e6, mask=masks.causal())
    scores = torch.where(dense(call)[0]["seen"], (call.q @ call.k.mT) * call.scale, -inf)
    exact = scores.double().softmax(-1)
    found = engines.measure_given(StoredWeights(exact.float(), scores), MeasureOptions(frozenset(["top"]), top=3))
    best = exact.topk(3).values.masked_fill(found["top_key"] < 0, 0.0)
    assert_rule(found["top_weight"], best.float(), best, what="links")


@pytest.mark.parametrize("overview", [False, True])
def test_the_doctor_names_heads_with_logits_above_ten_thousand_also_from_a_file(overview, tmp_path):
    calls = drawn(1e6), drawn(9e3)
    seen = watched(prepare(*(torch.cat([getattr(call, name)[:, :1] for call in calls], 1) for name in "qkv")))
    seen.save(tmp_path / "run.regard", overview=overview)
    for capture in (seen, regard.open(tmp_path / "run.regard")):
        (finding,) = (f for f in capture.doctor().findings if f.code == "large logits")
        values = dict(finding.values)
        assert (values["count"], values["total"], str(values["list"]).split()[0]) == (1, 2, "0")


# ---------------------------------------------------------------------------------------------------- the Triton engine


@pytest.fixture
def kernels_run_here() -> Iterator[str]:
    """The device of the kernels: a GPU, or the CPU by Triton's interpreter."""
    pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")
    from interpreting import interpreted

    from regard.lens.measures import kernels, top_kernels

    if torch.cuda.is_available():
        yield "cuda"
        return
    with interpreted(kernels, kernels, top_kernels):
        yield "cpu"


def by_triton(call: Call, device: str, blocks: gpu.Blocks | None, wanted: MeasureOptions = ALL) -> dict[str, Tensor]:
    """Its measures, from an lse that is rougher than a kernel's where it is large."""
    lse = dense(call)[0]["lse"].to(device)
    lse = torch.where(lse.abs() > LARGE, lse * (1 + 1e-6), lse)
    tensors = {name: getattr(call, name) for name in ("q", "k", "v", "sinks")}
    moved = {name: x if x is None else x.to(device) for name, x in tensors.items()}
    return gpu.measure(replace(call, **moved), lse, wanted, blocks)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy says so where a GPU does not
@pytest.mark.parametrize("n", range(len(SCALES)))  # the whole grid is for a GPU, below: a call takes a second here
def test_the_triton_engine_measures_as_dense_fp64_does(n, kernels_run_here):
    d, mask = (16, 24, 40)[n % 3], list(MASKS)[n // 2 % 3]  # in fp64 the kernels walk d by columns
    dtype = DTYPES[n % 2] if n > 1 else torch.float32  # products of bf16 are beyond the interpreter
    call = drawn(SCALES[n], d, dtype, mask=MASKS[mask])
    call = prepare(call.q[:, :1], call.k[:, :1], call.v[:, :1], mask=MASKS[mask])  # one head: half the time
    judge(by_triton(call, kernels_run_here, SMALL), call, f"{SCALES[n]:g}, D {d}, {mask}")


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_triton_engine_takes_other_arguments(extra, kernels_run_here):
    q, k, v = (getattr(drawn(1e6, 16), name)[:1] for name in "qkv")
    heads = 1 if extra == "grouped" else 2
    call = prepare(q, k[:, :heads], v[:, :heads], **EXTRAS[extra])
    judge(by_triton(call, kernels_run_here, SMALL), call, extra)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_the_triton_engine_measures_each_head_as_its_own_logits_need(kernels_run_here):
    calls = drawn(1e6, 16, mask=masks.causal()), drawn(1.0, 16, mask=masks.causal())
    q, k, v = (torch.cat([getattr(call, name)[:, :1] for call in calls], 1) for name in "qkv")
    found = by_triton(prepare(q, k, v, mask=masks.causal()), kernels_run_here, SMALL)
    for h in (0, 1):
        alone = prepare(*(x[:, h : h + 1] for x in (q, k, v)), mask=masks.causal())
        judge({name: x[:, h : h + 1] for name, x in found.items()}, alone, f"head {h}")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_look_on_a_gpu_measures_as_dense_fp64_does(scale, mask, dtype):
    for d in HEADS:
        call = drawn(scale, d, dtype, mask=MASKS[mask])
        moved = replace(call, q=call.q.cuda(), k=call.k.cuda(), v=call.v.cuda())
        view = looked(moved)
        assert view.engine == "triton"
        judge({name: x.cpu() for name, x in view.held.items()}, call, f"{scale:g}, D {d}", by_head=True)
        baseline, truth = dense(call)
        if float(truth["lse"][:, :, 7].abs().min()) > LARGE:
            assert_rule(view.row(7).cpu(), baseline["weights"][:, :, 7], truth["weights"][:, :, 7], what="row")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_large_logits_make_nobody_wait():
    q, k, v = (torch.randn(1, 4, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    regard.look(q * 1e4, k, v, measures=NAMES)  # compile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        view = regard.look(q * 1e4, k, v, measures=NAMES)
        view.weights.pairs(torch.zeros(2048, dtype=torch.long, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(view.received.sum(-1), torch.full((1, 4), 2048.0, device="cuda"))
