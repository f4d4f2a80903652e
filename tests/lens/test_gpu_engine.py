"""The Triton engine, interpreted where there is no GPU: held to dense fp64 measures, and its links to exact scores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from dense_measures import assert_measures, dense_measures, truth_and_baseline
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting import interpreted
from torch import Tensor

from regard import masks
from regard.backends import reference
from regard.backends.call import Call, prepare
from regard.lens.measures import engines, gpu
from regard.lens.measures.measures import NAMES, read_measures
from regard.masks.biases import Bias
from regard.positions import alibi
from regard.testing import MASKS, SHAPES, Case, assert_rule, cases

triton = pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = gpu.Blocks(16, 32, 4, 2)  # many tiles in few positions
ALL = read_measures(NAMES, size=5, top=3)

# The interpreter computes in NumPy, which reports −∞ − −∞ and the like; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def kernels_run_here() -> Iterator[None]:
    from regard.lens.measures import kernels, top_kernels

    if DEVICE == "cuda":
        yield
        return
    with interpreted(kernels, kernels, top_kernels):
        yield


# -------------------------------------------------------------------------------------------- what results are held to


def measured(call: Call, lse: Tensor, wanted: Any, blocks: gpu.Blocks | None = None) -> dict[str, Tensor]:
    """What the engine found beside lse, which is the given one where that is not large: test_large_logits.py."""
    found = gpu.measure(call, lse, wanted, blocks)
    exact = found.pop("lse")
    assert exact.dtype == torch.float64
    assert torch.equal(exact.nan_to_num(nan=0.0), lse.double().nan_to_num(nan=0.0))
    return found


def check(case: Case, dtype: torch.dtype, blocks: gpu.Blocks | None = SMALL, wanted: Any = ALL) -> None:
    """Every measure, and the links, of one case."""
    _, truth, baseline = truth_and_baseline(case, dtype, wanted.size)
    q, k, v, extra = case.build(dtype, DEVICE)
    found = measured(prepare(q, k, v, **extra), baseline["lse"].to(DEVICE), wanted, blocks)
    assert_measures(found, baseline, truth, f"{case}, {dtype}")
    if "top" in wanted.names:
        assert_links(found, case, dtype, wanted.top)


def assert_links(found: dict[str, Tensor], case: Case, dtype: torch.dtype, top: int) -> None:
    """The weights are the largest, and the keys are theirs, under the numeric rule; ties as in the scores."""
    q, k, v, extra = case.build(dtype)
    wide = {n: a.double() if isinstance(a, Tensor) else a for n, a in extra.items()}
    made: Any = reference.stages(prepare(q.double(), k.double(), v.double(), **wide))
    base: Any = reference.stages(prepare(q, k, v, **extra))
    lse = made.lse[made.lse > -inf]
    step = max(1.0, float(lse.abs().max())) if lse.numel() else 1.0
    largest = (_largest(x, top) for x in (made.weights, _from_lse(base)))
    true, baseline = largest
    key, weight = found["top_key"].cpu(), found["top_weight"].cpu()
    named = torch.where(key < 0, 0.0, made.weights.gather(-1, key.clamp(min=0)))
    for what, mine, truth in (("top weight", weight, true), ("weight of the key", weight, named)):
        scale = step * float(true.max())
        assert_rule(mine, baseline, truth, scale=scale, what=f"{case}, {dtype}: {what}")
    visible = (made.masked > -inf).sum(-1, keepdim=True)
    assert torch.equal(key >= 0, torch.arange(top) < visible), f"{case}: −1 elsewhere than beyond what is visible"
    ordered = key.masked_fill(key < 0, -2).sort(-1).values
    assert not bool(((ordered.diff() == 0) & (ordered[..., 1:] >= 0)).any()), f"{case}: a key twice"
    streamed = engines.measure_in_torch(prepare(q, k, v, **extra), base.lse, read_measures("top", top=top))
    assert torch.equal(found["top_tied"].cpu(), streamed["top_tied"]), f"{case}: tied"


def _largest(weights: Tensor, top: int) -> Tensor:
    weights = torch.nn.functional.pad(weights, (0, top))
    return weights.sort(-1, descending=True).values[..., :top]


def _from_lse(made: Any) -> Tensor:
    return torch.exp(made.masked - torch.where(made.lse == -inf, 0.0, made.lse).unsqueeze(-1))


def exact_links(call: Call, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, scores and ties by sorting whole rows of scores: for scores without any rounding."""
    made: Any = reference.stages(call)
    score, key = torch.nn.functional.pad(made.masked, (0, top + 1), value=-inf).sort(
        dim=-1, descending=True, stable=True
    )
    tied = (score[..., top] == score[..., top - 1]) & (score[..., top] > -inf)
    score, key = score[..., :top], key[..., :top]
    return key.masked_fill(score == -inf, -1), score, tied


def assert_exact_links(call: Call, top: int, blocks: gpu.Blocks | None = SMALL) -> dict[str, Tensor]:
    """Keys and ties are those of whole sorted rows, in the same order."""
    on_device = prepare(call.q.to(DEVICE), call.k.to(DEVICE), call.v.to(DEVICE), **_extra(call))
    lse: Tensor = reference.stages(call).lse
    found = gpu.measure(on_device, lse.to(DEVICE), read_measures("top", top=top), blocks)
    key, score, tied = exact_links(call, top)
    assert torch.equal(found["top_key"].cpu(), key)
    assert torch.equal(found["top_tied"].cpu(), tied)
    weight = torch.where(key < 0, 0.0, (score - lse.unsqueeze(-1)).exp())
    torch.testing.assert_close(found["top_weight"].cpu(), weight, rtol=0, atol=1e-5)
    return found


def _extra(call: Call) -> dict[str, Any]:
    return {"mask": call.mask, "bias": call.bias, "scale": call.scale}


def whole_numbers(*shape: int, most: int = 2, seed: int = 0) -> Tensor:
    """Integers, so that every score is exact and many are equal."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=random).float()


# -------------------------------------------------------------------------------------------------------------- tests


FORMS = ["none", "window", "documents", "rows without keys"]  # one mask of each form that the kernels know
OTHERS = ["negative scale", "softcap", "bias with −∞", "ALiBi", "sinks", "all together"]
SAMPLE = [
    *(Case("square", mask, arguments) for n, mask in enumerate(FORMS) for arguments in OTHERS[n % 2 :: 2]),
    *(Case("several tiles", mask, arguments) for mask, arguments in zip(FORMS, OTHERS[1:5], strict=True)),
    *(Case(shape, "causal, an offset per batch row", "all together") for shape in list(SHAPES)[1:3]),
    *(Case("more queries than keys, wide v", mask, "ALiBi") for mask in list(MASKS)[1::6]),
]


@pytest.mark.parametrize(("number", "case"), list(enumerate(SAMPLE)), ids=str)
def test_every_measure_is_that_of_dense_fp64_weights(number: int, case: Case) -> None:
    blocks = gpu.Blocks(64, 64, 4, 2) if case.shape == "several tiles" else SMALL
    check(case, torch.float32 if number % 2 else torch.float16, blocks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_blocks_that_a_gpu_uses_give_the_same(dtype: torch.dtype) -> None:
    check(Case("several tiles", "causal", "softcap"), dtype, blocks=None)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_case_holds_on_a_gpu(mask: str, shape: str, dtype: torch.dtype) -> None:
    for case in cases():
        if (case.mask, case.shape) == (mask, shape):
            check(case, dtype, blocks=None)


@pytest.mark.parametrize("mask", [None, masks.window(20, 3), masks.documents([0] * 50 + [1] * 46)])
@pytest.mark.parametrize(
    ("nq", "nk", "size", "kind"),
    [(96, 96, 3, gpu.BY_TILE), (71, 96, 4, gpu.BY_TILE), (53, 96, 13, gpu.BY_ROW)],
)
def test_a_map_is_the_same_however_its_sums_are_kept(mask: Any, nq: int, nk: int, size: int, kind: int) -> None:
    call, wanted = _call(nq, nk, mask=mask), read_measures(["map", "received", "entropy"], size=size)
    blocks = gpu.Blocks(16, 16, 4, 2)
    lse = reference.stages(call).lse
    assert gpu._Launch(call, lse, wanted, blocks).map_kind == kind
    assert_measures(_found(call, lse, wanted, blocks), *_dense(call, size), f"{nq} × {nk}, {size} cells, {mask!r}")


@pytest.mark.parametrize(
    ("bytes_", "heads", "rows", "mask"),
    [
        (13_000, 2, 37, masks.padding([67, 50])),
        (4_000, 1, 16, None),
        (4_000, 1, 16, masks.causal()),
        (4_000, 1, 16, masks.padding([67, 50])),
    ],
)
def test_parts_of_heads_and_of_queries_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, bytes_: int, heads: int, rows: int, mask: Any
) -> None:
    monkeypatch.setattr(gpu, "BYTES", bytes_)
    call, wanted = _call(37, 67, batch=2, heads=3 if heads == 2 else 1, mask=mask), read_measures(NAMES, size=2, top=3)
    assert gpu.Links(call, 3, SMALL, True).at_once(gpu.MOST_HEADS) == (heads, rows)
    lse = reference.stages(call).lse
    found = _found(call, lse, wanted, SMALL)
    assert_measures(found, *_dense(call, 2), f"parts of {heads} heads, {rows} rows")
    assert torch.equal(found["top_key"].cpu(), engines.measure_in_torch(call, lse, wanted)["top_key"])


@pytest.mark.parametrize("mask", [None, masks.window(9, 0), masks.documents([0] * 41 + [1] * 55)])
@pytest.mark.parametrize("bytes_", [gpu.BYTES, 9_000])
def test_sizes_that_fill_the_blocks_need_no_bounds(monkeypatch: pytest.MonkeyPatch, mask: Any, bytes_: int) -> None:
    monkeypatch.setattr(gpu, "BYTES", bytes_)
    call, wanted = _call(64, 96, d=16, mask=mask), read_measures(NAMES, size=2, top=3)
    lse = reference.stages(call).lse
    found = _found(call, lse, wanted, SMALL)
    assert_measures(found, *_dense(call, 2), f"64 × 96 × 16, {mask!r}")
    assert torch.equal(found["top_key"].cpu(), engines.measure_in_torch(call, lse, wanted)["top_key"])


def test_more_heads_than_a_grid_holds_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_HEADS", 4)
    call = _call(17, 37, batch=2, heads=3)
    wanted = read_measures(["entropy", "received", "map"], size=2)
    assert_measures(_found(call, reference.stages(call).lse, wanted, SMALL), *_dense(call, 2), "6 heads, 4 at once")


# --------------------------------------------------------------------------------------------------------- links, exact


SIEVE = masks.padding((torch.arange(131) % 5 != 0)[None])


@pytest.mark.parametrize(
    ("top", "mask"),
    [(1, SIEVE), (8, masks.causal()), (21, None), (22, None), (22, SIEVE), (64, masks.causal()), (64, None)],
)
def test_links_are_those_of_whole_sorted_rows_with_ties(top: int, mask: Any) -> None:
    q, k = whole_numbers(1, 2, 11, 5), whole_numbers(1, 1, 131, 5, seed=1)
    assert (top <= gpu.WHOLE_TILES) == (top <= 21)  # else other numbers belong above
    assert_exact_links(prepare(q, k, k, mask=mask, scale=1.0), top)


@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 2, 21, 71))),
    top=st.integers(1, 12) | st.integers(gpu.WHOLE_TILES, 27),
    most=st.sampled_from([0, 1, 5]),
    mask=st.sampled_from(
        [None, masks.causal(), masks.causal(offset=-3), masks.window(4, 2), masks.causal() & masks.window(9, 0)]
    ),
    scale=st.sampled_from([1.0, -1.0, 0.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=5)
def test_links_are_exact_whatever_the_call(sizes: Any, top: int, most: int, mask: Any, scale: float, seed: int) -> None:
    batch, heads, nq, nk = sizes
    q, k = whole_numbers(batch, heads, nq, 3, most=most, seed=seed), whole_numbers(batch, heads, nk, 3, seed=seed + 1)
    assert_exact_links(prepare(q, k, k, mask=mask, scale=scale), top)


@pytest.mark.parametrize("top", [1, 8, gpu.WHOLE_TILES + 1])
def test_of_equal_scores_the_first_keys_are_taken_and_the_row_is_tied(top: int) -> None:
    call = prepare(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 521, 2), torch.ones(1, 1, 521, 2))
    found = assert_exact_links(call, top)
    assert found["top_key"][0, 0, 2].tolist() == list(range(top))
    assert bool(found["top_tied"].all())


@pytest.mark.parametrize("top", [8, gpu.MOST_LINKS])
def test_rooms_suffice_where_the_best_keys_are_neighbours(top: int) -> None:
    """Scores that fall with the distance: nearly every key of the best tiles beats the best key of the last one."""
    q = torch.zeros(1, 1, 5, 2)
    bias = -(torch.arange(743) - torch.tensor([0, 31, 350, 511, 742])[:, None]).abs().float() - 0.25
    assert_exact_links(prepare(q, torch.zeros(1, 1, 743, 2), torch.zeros(1, 1, 743, 2), bias=bias), top)


@pytest.mark.parametrize("top", [8, gpu.WHOLE_TILES + 1])
def test_rooms_suffice_where_a_few_keys_stand_out_of_equal_ones(top: int) -> None:
    """The tiles of those few are full of scores that are as good as the last links."""
    keys = torch.zeros(1, 1, 743, 2)
    keys[:, :, 400::32] = 1.0
    keys[:, :, 3] = -1.0
    assert_exact_links(prepare(torch.tensor([[[[1.0, 2.0], [0.0, 0.0], [-1.0, 0.0]]]]), keys, keys), top)


def test_a_tie_beyond_the_last_link_is_no_tie() -> None:
    scores = torch.tensor([5.0, 4.0, 3.0, 3.0, 2.0])
    q, k = torch.ones(1, 1, 1, 1), scores.view(1, 1, 5, 1)
    tied = [bool(assert_exact_links(prepare(q, k, k, scale=1.0), top)["top_tied"]) for top in (1, 2, 3, 4, 5, 6)]
    assert tied == [False, False, True, False, False, False]


def test_a_sink_takes_from_the_weights_and_is_no_link() -> None:
    call = _call(5, 37, heads=2)
    call.sinks = torch.tensor([3.0, -1.0])
    made: Any = reference.stages(call)
    found = _found(call, made.lse, read_measures("top", top=2), SMALL)
    expected = made.weights.topk(2)
    assert torch.equal(found["top_key"].cpu(), expected.indices)
    torch.testing.assert_close(found["top_weight"].cpu(), expected.values)


def test_links_do_not_depend_on_what_else_is_measured() -> None:
    call = _call(17, 67, mask=masks.causal())
    lse = reference.stages(call).lse
    alone, together = (_found(call, lse, read_measures(names, top=4), SMALL) for names in ("top", NAMES))
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    assert set(alone) == {"top_key", "top_weight", "top_tied"}


def test_a_row_that_was_not_collected_whole_gets_nan_and_not_a_result() -> None:
    from regard.lens.measures import top_kernels

    room, k = 4, 2
    scores, keys = torch.zeros(1, 3, room, device=DEVICE), torch.arange(room, dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([[1, 2, room + 1]], dtype=torch.int32, device=DEVICE)
    threshold = torch.zeros(1, 3, device=DEVICE)
    score = torch.empty(1, 3, k, device=DEVICE)
    key, tied = score.long(), torch.empty(1, 3, dtype=torch.uint8, device=DEVICE)
    top_kernels.finish[(1, 1)](
        scores, keys.expand(1, 3, room).contiguous(), counts, threshold, score, key, tied,
        head_from=0, row_from=0, rows=3, nq=3, k=k, ROWS=4, ROOM=room, WIDE=4, FEW=2,
    )  # fmt: skip
    assert score.isnan().tolist() == [[[True, True], [False, False], [True, True]]]


# ----------------------------------------------------------------------------------------------------- unusual tensors


@pytest.mark.parametrize("names", [["max_logit", "entropy", "effective"], ["max_logit", "top"]])
def test_a_row_of_nan_shows_in_every_measure_and_leaves_the_others_alone(names: list[str]) -> None:
    call, wanted = _call(19, 37, heads=2), read_measures(names, top=3)
    whole = _found(call, reference.stages(call).lse, wanted, SMALL)
    call.q[0, 1, 4, 2] = torch.nan
    found = _found(call, reference.stages(call).lse, wanted, SMALL)
    wrong = torch.zeros(1, 2, 19, dtype=torch.bool)
    wrong[0, 1, 4] = True
    for name in found.keys() - {"top_key", "top_tied"}:
        mine, others = found[name].cpu().view(1, 2, 19, -1), whole[name].cpu().view(1, 2, 19, -1)
        assert torch.equal(mine.isnan().all(-1), wrong), name
        assert torch.equal(mine[~wrong], others[~wrong]), name


@pytest.mark.parametrize("lacking", ["batch", "queries", "keys"])
def test_sizes_of_zero_give_what_the_streaming_engine_gives(lacking: str) -> None:
    sizes = {"batch": 2, "queries": 3, "keys": 5} | {lacking: 0}
    q = torch.zeros(sizes["batch"], 2, sizes["queries"], 7, device=DEVICE)
    k = torch.zeros(sizes["batch"], 2, sizes["keys"], 7, device=DEVICE)
    call, lse = prepare(q, k, k), torch.full((sizes["batch"], 2, sizes["queries"]), -inf, device=DEVICE)
    ours, streamed = measured(call, lse, ALL), engines.measure_in_torch(call, lse, ALL)
    del streamed["lse"]
    assert ours.keys() == streamed.keys()
    for name, value in streamed.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].dtype == value.dtype, name


def test_any_strides_and_shared_axes_are_read() -> None:
    random = torch.Generator().manual_seed(3)
    q = torch.randn(2, 19, 4, 7, generator=random).transpose(1, 2)  # (B, H, Nq, D), heads within positions
    k = torch.randn(2, 2, 7, 37, generator=random).mT  # the head size is not the innermost axis
    v = torch.randn(2, 2, 37, 5, generator=random)
    bias = torch.randn(4, 37, 19, generator=random).mT
    mask = torch.rand(2, 1, 37, 1, generator=random).mT > 0.3  # one row for all queries and heads
    call = prepare(q, k, v, bias=bias, mask=mask)
    assert_measures(_found(call, reference.stages(call).lse, ALL, SMALL), *_dense(call, ALL.size), "strides")


def test_measures_carry_no_gradient() -> None:
    call = _call(5, 7)
    call.q.requires_grad_()
    found = _found(call, reference.stages(call).lse.detach(), ALL, SMALL)
    assert not any(value.requires_grad for value in found.values())


def test_a_bias_in_another_dtype_is_added_in_fp32() -> None:
    bias = torch.randn(19, 37, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    call = _call(19, 37, bias=bias)
    assert_measures(_found(call, reference.stages(call).lse, ALL, SMALL), *_dense(call, ALL.size), "fp64 bias")


# ------------------------------------------------------------------------------------------------------------- refusals


class _Odd(Bias):
    """A bias that is neither dense nor a function of the distance."""

    leading = (1, 1)

    def bind(self, nq: int, nk: int, device: torch.device, dtype: torch.dtype) -> Any:
        return lambda b, h, i, j: (i * j).to(dtype)

    def __repr__(self) -> str:
        return "odd()"


@pytest.mark.parametrize(
    ("arguments", "wanted", "why"),
    [
        ({"dtype": torch.float64}, ALL, "float64"),
        ({"d": 257}, ALL, "256.*257"),
        ({"bias": _Odd()}, ALL, r"odd\(\)"),
        ({}, read_measures("top", top=65), "64.*top=65"),
        (
            {"nq": 50_000},
            read_measures("map", size=50_000),
            "32.*size=50000",
        ),
    ],
    ids=["float64", "wide heads", "bias", "links", "map"],
)
def test_what_the_kernels_cannot_do_is_refused_with_the_reason(
    arguments: dict[str, Any], wanted: Any, why: str
) -> None:
    q, k = (torch.zeros(1, 1, n, arguments.get("d", 3)) for n in (arguments.get("nq", 5), 67))
    q, k = (x.to(arguments.get("dtype", torch.float32)) for x in (q, k))
    assert re.search(why, gpu.unsupported_reason(prepare(q, k, k, bias=arguments.get("bias")), wanted))


@pytest.mark.parametrize("names", [["entropy"], ["map"], ["top"]])
def test_what_is_not_asked_for_refuses_nothing(names: list[str]) -> None:
    call = prepare(*(torch.zeros(1, 1, 67, 3) for _ in range(3)), bias=alibi(1))
    assert gpu.unsupported_reason(call, read_measures(names, size=1 << 26, top=64 if "top" in names else 65)) is None


# ------------------------------------------------------------------------------------------------------ on a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_links_of_long_bf16_rows_are_the_streaming_engines(mask: Any) -> None:
    call, lse = _long_call(mask)
    ours, streamed = (engine.measure(call, lse, read_measures("top")) for engine in (gpu, engines))
    torch.testing.assert_close(ours["top_weight"], streamed["top_weight"])
    differ = (ours["top_key"] != streamed["top_key"]).any(-1)
    assert float(differ.float().mean()) < 1e-3  # scores that differ by a rounding step only


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_links_make_nobody_wait_and_need_no_more_than_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BYTES", 48 << 20)  # less than the four heads need together
    call, lse = _long_call(masks.causal())
    gpu.measure(call, lse, read_measures("top"))  # compile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gpu.measure(call, lse, read_measures("top"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = sum(value.numel() * value.element_size() for value in found.values())
    assert torch.cuda.max_memory_allocated() - before < gpu.BYTES + 4 * results


def _long_call(mask: Any) -> tuple[Call, Tensor]:
    q, k, v = (torch.randn(1, 4, 16384, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = prepare(q, k, v, mask=mask)
    return call, engines.lse_of(call)


# --------------------------------------------------------------------------------------------------------------- pieces


def _call(nq: int, nk: int, batch: int = 1, heads: int = 1, d: int = 5, mask: Any = None, bias: Any = None) -> Call:
    random = torch.Generator().manual_seed(17)
    q = torch.randn(batch, heads, nq, d, generator=random)
    k, v = (torch.randn(batch, heads, nk, d, generator=random) for _ in range(2))
    return prepare(q, k, v, mask=mask, bias=bias)


def _found(call: Call, lse: Tensor, wanted: Any, blocks: gpu.Blocks) -> dict[str, Tensor]:
    tensors = {name: getattr(call, name) for name in ("q", "k", "v", "sinks")}
    moved = {name: x if x is None else x.to(DEVICE) for name, x in tensors.items()}
    return measured(replace(call, **moved), lse.to(DEVICE), wanted, blocks)


def _dense(call: Call, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Baseline and truth of a call in fp32."""
    wide = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    truth, base = (reference.stages(c) for c in (wide, call))
    return (
        dense_measures(_from_lse(base), base.masked, base.lse, call.sinks, size),
        dense_measures(truth.weights, truth.masked, truth.lse, call.sinks, size),
    )
