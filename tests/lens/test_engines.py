"""The measuring pass in plain torch against dense fp64: the whole grid of cases, other dtypes, tiles of many sizes.

What each measure is, and ties, are in test_measures.py; the Triton engine is in test_gpu_engine.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from math import inf, nan
from typing import Any

import pytest
import torch
from dense_measures import assert_measures, assert_top, dense_measures, truth_and_baseline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import masks
from regard.backends import reference
from regard.backends.call import Call, prepare
from regard.lens.measures import engines
from regard.lens.measures.measures import NAMES, MeasureOptions, WeightTile, read_measures
from regard.lens.measures.weights import ComputedWeights, StoredWeights
from regard.testing import ARGUMENTS, MASKS, SHAPES, Case, Shape, cases

SIZE, TOP = 6, 3
ALL = read_measures(NAMES, SIZE, TOP)
WITHOUT_TOP = tuple(name for name in NAMES if name != "top")  # which fewer passes over a tile measure


def judge(case: Case, dtype: torch.dtype, size: int = SIZE) -> None:
    """Every measure of one case, lse by our own pass included, obeys the numeric rule."""
    call, truth, baseline = truth_and_baseline(case, dtype, size)
    lse = engines.lse_of(call)
    found = engines.measure_in_torch(call, lse, read_measures(NAMES, size, TOP)) | {"lse": lse}
    assert found.keys() - {"lse"} == {*NAMES, "top_key", "top_weight", "top_tied"} - {"top"}
    assert_measures(found, baseline, truth, f"{case}, {dtype}")
    assert_top(found, baseline, truth, f"{case}, {dtype}")
    found = engines.measure_in_torch(call, lse, read_measures(WITHOUT_TOP, size)) | {"lse": lse}
    shared = [{name: x[name] for name in found} for x in (baseline, truth)]
    assert_measures(found, *shared, f"{case}, {dtype}, without top")


# ------------------------------------------------------------------------------------------------------------- the grid


@pytest.mark.pairwise
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_measure_is_that_of_the_dense_weights(shape, mask, arguments):
    judge(Case(shape, mask, arguments), torch.float32)


HALF, WIDE = (torch.bfloat16, torch.float16), torch.float64
# Seven, so that each meets all ten sets of arguments; the second number is how many parts a side is cut into.
OTHERS = cycle([(HALF[0], 1), (WIDE, 2), (HALF[1], 3), (torch.float32, 5), (WIDE, 7), (HALF[0], 2), (HALF[1], 1)])
SAMPLED = [
    pytest.param(case, dtype, parts, id=f"{case}, {dtype}, {parts}")
    for case, (dtype, parts) in zip(cases(), OTHERS, strict=False)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "parts" in metafunc.fixturenames:
        step = 1 if metafunc.config.getoption("--full-grids") else 9  # 9 has no factor in common with the 7 and the 10
        metafunc.parametrize(("case", "dtype", "parts"), SAMPLED[::step])


def test_other_dtypes_and_other_tiles_measure_the_same(case, dtype, parts, monkeypatch):
    shape = SHAPES[case.shape]
    monkeypatch.setattr(engines, "TILE_CELLS", max(1, 2 * shape.nq * shape.nk // parts**2))
    judge(case, dtype, size=1 + parts)


@dataclass(frozen=True)
class Drawn(Case):
    """A case of sizes that Hypothesis drew."""

    sizes: Shape = SHAPES["square"]

    def build(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        s, random = self.sizes, torch.Generator().manual_seed(17)
        shapes = (s.num_heads, s.nq, s.d), (s.num_kv_heads, s.nk, s.d), (s.num_kv_heads, s.nk, s.dv)
        q, k, v = (torch.randn(s.batch, *shape, generator=random).to(dtype) for shape in shapes)
        return q, k, v, {"mask": MASKS[self.mask](s), **ARGUMENTS[self.arguments](s, dtype)}


@st.composite
def drawn(draw: Any) -> Drawn:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    nq, nk, d = (draw(st.integers(least, most)) for least, most in ((1, 23), (2, 29), (1, 9)))
    sizes = Shape(draw(st.integers(1, 3)), kv_heads * group, kv_heads, nq, nk, d, 2)
    return Drawn("drawn", draw(st.sampled_from(list(MASKS))), draw(st.sampled_from(list(ARGUMENTS))), sizes)


@settings(max_examples=60)
@given(case=drawn(), cells=st.integers(1, 400), size=st.integers(1, 40))
def test_calls_and_tiles_drawn_at_random_measure_as_dense(case, cells, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "TILE_CELLS", cells)
        judge(case, torch.float32, size)


# ---------------------------------------------------------------------------------------------------------------- tiles


def walked(call: Call, monkeypatch: pytest.MonkeyPatch, cells: int) -> list[WeightTile]:
    """The tiles of a pass."""
    monkeypatch.setattr(engines, "TILE_CELLS", cells)
    source = engines._FromCall(call, torch.zeros(call.sizes[:3]))
    return [source.tile(at) for group in source.groups() for at in source.tiles(*group)]


def plain(batch: int, heads: int, nq: int, nk: int, mask: Any = None, **more: Any) -> Call:
    q, k = torch.randn(batch, heads, nq, 5), torch.randn(batch, heads, nk, 5)
    return prepare(q, k, k, mask=mask, **more)


@pytest.mark.parametrize("cells", [1, 2, 7, 30, 200, 1000, 10_000])
@pytest.mark.parametrize("sizes", [(3, 5, 11, 13), (2, 3, 1, 101), (2, 7, 101, 1), (5, 1, 1, 1)])
def test_tiles_cover_every_cell_once_and_hold_no_more_than_they_may(sizes, cells, monkeypatch):
    counts = torch.zeros(sizes)
    for tile in walked(plain(*sizes), monkeypatch, cells):
        counts[tile.at.batch, tile.at.heads, tile.at.rows, tile.at.cols] += 1
        assert tile.p.numel() <= max(cells, 1)
    assert bool((counts == 1).all())


def test_short_sequences_share_a_tile_with_other_heads_and_batch_rows(monkeypatch):
    assert len(walked(plain(3, 5, 7, 11), monkeypatch, 3 * 5 * 7 * 11 * 2)) == 1
    assert len(walked(plain(3, 5, 7, 11), monkeypatch, 5 * 7 * 11)) == 3
    assert len(walked(plain(3, 5, 7, 11), monkeypatch, 2 * 7 * 11)) == 3 * 3


def test_one_query_over_many_keys_is_one_tile_of_a_head(monkeypatch):
    (tile,) = walked(plain(1, 1, 1, 5000), monkeypatch, 1 << 14)
    assert tile.p.shape == (1, 1, 1, 5000)


def test_hidden_tiles_are_not_walked(monkeypatch):
    size, n = 8, 64
    cells = 2 * size * size
    tiles = walked(plain(1, 2, n, n, masks.causal()), monkeypatch, cells)
    assert len(tiles) == (n // size) * (n // size + 1) // 2
    assert all(tile.at.cols.start <= tile.at.rows.stop for tile in tiles)
    assert len(walked(plain(1, 2, n, n, masks.window(3, 0)), monkeypatch, cells)) == 2 * (n // size) - 1
    assert walked(plain(1, 2, n, n, masks.dense(torch.zeros(n, n, dtype=torch.bool))), monkeypatch, cells) == []


def test_a_tile_is_walked_where_one_of_its_batch_rows_sees_it(monkeypatch):
    mask = masks.padding([2, 16])
    tiles = walked(plain(2, 1, 4, 16, mask), monkeypatch, 2 * 4 * 4)
    assert {(tile.at.batch.start, tile.at.batch.stop, tile.at.cols.start) for tile in tiles} == {
        (0, 2, c) for c in (0, 4, 8, 12)
    }
    alone = walked(plain(2, 2, 4, 16, mask), monkeypatch, 2 * 4 * 4)  # the heads of one batch row fill a tile
    assert {(tile.at.batch.stop, tile.at.cols.start) for tile in alone} == {(1, 0), *((2, c) for c in (0, 4, 8, 12))}


def test_a_fully_visible_tile_is_not_asked_for_its_cells(monkeypatch):
    asked = []
    read = engines._FromCall._read
    monkeypatch.setattr(engines._FromCall, "_read", lambda self, *a: asked.append(a[2]) or read(self, *a))
    walked(plain(1, 2, 64, 64, masks.causal()), monkeypatch, 2 * 8 * 8)
    assert len(asked) == 8  # those on the diagonal


def test_all_tiles_of_a_pass_use_the_same_memory(monkeypatch):
    tiles = walked(plain(2, 3, 17, 19, masks.causal()), monkeypatch, 100)
    for part in ("s", "t", "p", "scratch"):
        assert len({getattr(tile, part).data_ptr() for tile in tiles}) == 1
    assert len({getattr(tiles[0], part).data_ptr() for part in ("s", "t", "p", "scratch")}) == 4


def test_query_heads_read_the_keys_of_their_group(monkeypatch):
    q, k = torch.randn(2, 6, 7, 5, dtype=torch.float64), torch.randn(2, 3, 11, 5, dtype=torch.float64)
    call = prepare(q, k, k, scale=1.0)
    expected = q @ k.repeat_interleave(2, 1).mT
    for cells in (20, 7 * 11 * 2, 7 * 11 * 3, 7 * 11 * 6, 7 * 11 * 8, 7 * 11 * 30):
        monkeypatch.setattr(engines, "TILE_CELLS", cells)
        source = engines._FromCall(call, torch.zeros(2, 6, 7))
        for at in (at for group in source.groups() for at in source.tiles(*group)):
            part = expected[at.batch, at.heads, at.rows, at.cols]
            assert torch.allclose(source.scores(at), part, rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------------- weights that are given


def stages(case: Case, dtype: torch.dtype) -> tuple[Any, Call]:
    q, k, v, extra = case.build(dtype)
    call = prepare(q, k, v, **extra)
    return reference.stages(call), call


GIVEN = [
    Case("square", "causal", "plain"),
    Case("fewer queries, grouped, narrow v", "rows without keys", "bias with −∞"),
    Case("one query", "none", "softcap"),
    Case("several tiles", "window", "plain"),
    Case("several tiles", "nothing visible", "plain"),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("case", GIVEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_scores", [True, False])
def test_given_weights_measure_as_they_are(case, dtype, with_scores, monkeypatch):
    monkeypatch.setattr(engines, "TILE_CELLS", 2000)
    made, _ = stages(case, torch.float32)
    weights, scores = made.weights.to(dtype), made.masked.to(dtype)
    names = ALL.names - (set() if with_scores else {"max_logit"})
    found = engines.measure_given(
        StoredWeights(weights, scores if with_scores else None), MeasureOptions(names, SIZE, TOP)
    )
    lse = scores.double().logsumexp(-1)
    wide = torch.promote_types(dtype, torch.float32)
    truth = dense_measures(weights.double(), scores.double(), lse, None, SIZE)
    rounded = dense_measures(weights.to(wide), scores.to(wide), scores.to(wide).logsumexp(-1), None, SIZE)
    assert ("lse" in found) == with_scores
    assert_measures(found, rounded, truth, f"{case}, {dtype}")
    reached = weights.gather(-1, found["top_key"].clamp(min=0)).masked_fill(found["top_key"] < 0, 0)
    best = weights.topk(min(TOP, weights.shape[-1]), -1).values
    assert torch.equal(reached[..., : best.shape[-1]], best)


def test_a_sink_in_given_scores_is_one_more_outcome():
    case = Case("square", "causal", "sinks")
    made, call = stages(case, torch.float32)
    wide, _ = stages(case, torch.float64)
    column = call.sinks.view(-1, 1, 1).expand(*made.masked.shape[:3], 1)
    found = engines.measure_given(StoredWeights(made.weights, torch.cat([made.masked, column], -1)), ALL)
    sizes = (call.sinks, SIZE)
    baseline = dense_measures(made.weights, made.masked, made.lse, *sizes)
    truth = dense_measures(wide.weights, wide.masked, wide.lse, call.sinks.double(), SIZE)
    assert_measures(found, baseline, truth, "a sink among the scores")


def test_weights_from_elsewhere_are_asked_for_a_tile_at_a_time(monkeypatch):
    monkeypatch.setattr(engines, "TILE_CELLS", 900)
    q, k = torch.randn(2, 3, 17, 5), torch.randn(2, 3, 19, 5)
    call = prepare(q, k, k, mask=masks.causal())
    asked = []

    class Elsewhere(ComputedWeights):
        def tile(self, rows: Any, cols: Any) -> Tensor:
            found = super().tile(rows, cols)
            asked.append(found.numel())
            return found

    lse = engines.lse_of(call)
    names = ALL.names - {"max_logit"}
    found = engines.measure_tiles(Elsewhere(call, lse), MeasureOptions(names, SIZE, TOP))
    ours = engines.measure_in_torch(call, lse, MeasureOptions(names, SIZE, TOP))
    assert max(asked) <= 900
    assert len(asked) > 3
    base, truth = (
        reference.stages(prepare(*(x.to(t) for x in (q, k, k)), mask=masks.causal())) for t in (q.dtype, torch.float64)
    )
    dense = [dense_measures(m.weights, m.masked, m.lse, None, SIZE) for m in (base, truth)]
    assert_measures(found, *dense, "tiles from elsewhere")
    assert torch.equal(found["top_key"], ours["top_key"])


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_no_queries_keys_heads_or_batch_rows_measure_as_nothing():
    for batch, heads, nq, nk in ((0, 2, 3, 5), (2, 0, 3, 5), (2, 3, 0, 5), (2, 3, 5, 0)):
        q, k = torch.zeros(batch, heads, nq, 7), torch.zeros(batch, max(heads, 1), nk, 7)
        call = Call(q, k, k, None, None, 1.0, None, None, 0.0, False, (batch, heads, nq, nk))
        lse = engines.lse_of(call)
        found = engines.measure_in_torch(call, lse, ALL)
        assert bool((lse == -inf).all())
        assert found["received"].shape == (batch, heads, nk)
        assert found["map"].shape == (batch, heads, min(SIZE, nq), min(SIZE, nk))
        assert found["top_key"].shape == (batch, heads, nq, TOP)
        assert all(float(found[name].sum()) == 0 for name in ("entropy", "received", "effective", "map", "top_weight"))


def test_lse_of_no_keys_is_the_sink():
    q, k = torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 0, 5)
    lse = engines.lse_of(prepare(q, k, k, sinks=torch.tensor([0.5, -inf])))
    assert lse.tolist() == [[[0.5] * 3, [-inf] * 3]]


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("mask", [masks.causal(offset=-1), masks.padding([6])], ids=["band", "cells"])
def test_hidden_keys_that_are_no_numbers_reach_no_measure(mask, bad):
    q, k = torch.randn(1, 2, 7, 5), torch.randn(1, 2, 7, 5)
    call = prepare(q, k, k, mask=mask)
    lse = engines.lse_of(call)
    clean = engines.measure_in_torch(call, lse, read_measures(WITHOUT_TOP, SIZE))
    k[:, :, 6] = bad
    found = engines.measure_in_torch(call, lse, read_measures(WITHOUT_TOP, SIZE))
    assert all(torch.equal(found[name], clean[name]) for name in WITHOUT_TOP)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_numbers_that_are_none_do_not_raise_and_stay_in_their_row(bad):
    q, k = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 7, 3)
    q[0, 1, 2] = bad
    call = prepare(q, k, k)
    lse = engines.lse_of(call)
    for wanted in (ALL, read_measures(WITHOUT_TOP, SIZE)):
        found = engines.measure_in_torch(call, lse, wanted)
        assert found["entropy"].isnan().nonzero().tolist() == [[0, 1, 2]]
        assert found["received"].isnan().any(-1).tolist() == [[False, True]]


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_scores_of_ten_thousand_are_exact(scale):
    q, k = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 11, 5)
    _extreme(q, k, scale=scale)


@pytest.mark.parametrize("sink", [1e4, -1e4, -inf])
def test_sinks_far_above_or_below_the_scores_are_exact(sink):
    q, k = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 11, 5)
    _extreme(q, k, sinks=torch.tensor([sink, 0.0, sink]), mask=masks.causal())


def _extreme(q: Tensor, k: Tensor, **extra: Any) -> None:
    call = prepare(q, k, k, **extra)
    wide = {n: a.double() if isinstance(a, Tensor) else a for n, a in extra.items()}
    base, truth = reference.stages(call), reference.stages(prepare(q.double(), k.double(), k.double(), **wide))
    lse = engines.lse_of(call)
    found = engines.measure_in_torch(call, lse, ALL) | {"lse": lse}
    from_lse = torch.exp(base.masked - base.lse.unsqueeze(-1))
    sinks = call.sinks
    baseline = dense_measures(from_lse, base.masked, base.lse, sinks, SIZE)
    exact = dense_measures(truth.weights, truth.masked, truth.lse, None if sinks is None else sinks.double(), SIZE)
    assert_measures(found, baseline, exact, str(extra))


def test_measures_carry_no_gradient_and_autocast_does_not_reach_them():
    q, k, bias = (torch.randn(1, 2, n, m, requires_grad=True) for n, m in ((7, 5), (11, 5), (7, 11)))
    sinks = torch.randn(2, requires_grad=True)
    call = prepare(q, k, k, bias=bias, sinks=sinks)
    lse = engines.lse_of(call)
    found = engines.measure_in_torch(call, lse, ALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = engines.measure_in_torch(call, lse, ALL)
        assert torch.equal(engines.lse_of(call), lse)
    for name, values in {"lse": lse, **found}.items():
        assert not values.requires_grad, name
    for name, values in found.items():
        assert torch.equal(values, again[name]), name


def test_a_pass_runs_under_inference_mode():
    with torch.inference_mode():
        q = torch.randn(1, 2, 7, 5)
        call = prepare(q, q, q, mask=masks.causal())
        lse = engines.lse_of(call)
        assert engines.measure_in_torch(call, lse, ALL)["entropy"].shape == (1, 2, 7)
