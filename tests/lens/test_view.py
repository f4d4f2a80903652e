"""What a view can be asked: every line of its table, what it keeps, and what it says when q and k are gone."""

from __future__ import annotations

from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dense_measures import assert_measures, assert_top, truth_and_baseline

import regard
from regard import masks, positions
from regard.lens import patterns
from regard.lens import view as module
from regard.lens.measures import engines
from regard.lens.measures.measures import MAP_SIZE, NAMES, TOP
from regard.lens.measures.weights import ComputedWeights, StoredWeights
from regard.lens.view import PER_QUERY, KeyTokens, KnownVisibility, View
from regard.testing import Case

B, H, HKV, NQ, NK, D = 2, 6, 3, 7, 11, 5
ALL = slice(None)


def look(**more: Any) -> View:
    random = torch.Generator().manual_seed(2)
    q, k = torch.randn(B, H, NQ, D, generator=random), torch.randn(B, HKV, NK, D, generator=random)
    return regard.look(q, k, k, **{"mask": masks.causal(), **more})


def without(view: View) -> View:
    """The same view with q and k gone, as `watch` leaves it by default."""
    return replace(view, weights=None, held=dict(view.held))


@pytest.fixture
def passes(monkeypatch):
    """The names that each further pass measures."""
    made: list[set[str]] = []
    own = engines.measure_weights
    monkeypatch.setattr(engines, "measure_weights", lambda w, wanted: made.append(set(wanted.names)) or own(w, wanted))
    return made


# ------------------------------------------------------------------------------------------------ against dense weights

CASES = [
    Case("fewer queries, grouped, narrow v", "rows without keys", "all together"),
    Case("more queries than keys, wide v", "causal", "bias with −∞"),
    Case("several tiles", "window per head", "sinks"),
    Case("one query", "padding left", "softcap"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [1, 4, 64, 271, 1000])
def test_maps_of_any_size_are_pooled_dense_weights(case, size):
    q, k, v, extra = case.build(torch.float32)
    view = regard.look(q, k, v, **extra, measures=[])
    _, truth, baseline = truth_and_baseline(case, torch.float32, size)
    assert_measures({"map": view.map(size)}, baseline, truth, f"{case}, size {size}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_columns_and_tiles_are_those_of_the_dense_weights(case):
    q, k, v, extra = case.build(torch.float32)
    view = regard.look(q, k, v, **extra)
    _, truth, baseline = truth_and_baseline(case, torch.float32, 2)
    nq, nk = q.shape[2], k.shape[2]
    parts = {
        "a row": (view.row(nq // 2), lambda w: w[:, :, nq // 2]),
        "the last row": (view.row(-1), lambda w: w[:, :, -1]),
        "a column": (view.column(nk // 3), lambda w: w[..., nk // 3]),
        "the last column": (view.column(np.int64(-1)), lambda w: w[..., -1]),
        "a tile": (view.tile(slice(0, 3), slice(1, nk)), lambda w: w[:, :, :3, 1:]),
        "some": (view.tile([0, -1], range(1, nk, 2)), lambda w: w[:, :, [0, -1]][..., 1::2]),
        "backwards": (view.tile(slice(None, None, -1), slice(None, None, -2)), lambda w: w.flip(2, 3)[..., ::2]),
        "an array": (view.tile(np.array([0]), torch.tensor([1, 0])), lambda w: w[:, :, :1][..., [1, 0]]),
        "none": (view.tile([], slice(3, 1)), lambda w: w[:, :, :0, :0]),
    }
    for name, (found, of) in parts.items():
        base, exact = ({"weights": of(made["weights"]), "lse": made["lse"]} for made in (baseline, truth))
        assert_measures({"weights": found}, base, exact, f"{case}, {name}")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("k", [1, 3, 20])
def test_links_are_the_strongest_of_the_dense_weights(case, k):
    q, keys, v, extra = case.build(torch.float32)
    _, truth, baseline = truth_and_baseline(case, torch.float32, 2)
    for measured in ([], ["top"]):
        top = regard.look(q, keys, v, **extra, measures=measured, top=6).top(k)
        found = {"top_key": top.index, "top_weight": top.weight}
        assert_top(found, baseline, truth, f"{case}, {k} links, {measured} measured")


def test_patterns_are_those_of_the_dense_weights():
    view = look(bias=positions.alibi(H))
    whole = view.tile(ALL, ALL)
    place = {"visible": view.place.visible, "entropy": view.entropy}
    expected = patterns.measure(StoredWeights(whole), KnownVisibility(), KeyTokens(), **place).scores
    found = view.patterns()
    assert found.keys() == expected.keys() == {"own", "previous", "next", "first", "neighbours", "uniform"}
    for name, score in found.items():
        assert torch.allclose(score, expected[name], rtol=1e-5), name


# -------------------------------------------------------------------------------------------------- map, top, how, mean


def test_a_map_of_the_size_that_is_held_is_no_further_pass(passes):
    view = look(size=4)
    assert view.map().shape == view.map(4).shape == (B, H, 4, 4)
    assert passes == []
    assert view.map(5).shape == (B, H, 5, 5)
    assert passes == [{"map"}]
    assert view.map().shape == (B, H, 4, 4)


def test_maps_beyond_the_number_of_positions_are_one_and_the_same(passes):
    view = look(size=20)
    assert torch.equal(view.map(11), view.map(64))
    assert passes == []
    assert view.map(9).shape == (B, H, NQ, 9)
    assert passes == [{"map"}]


def test_a_map_is_measured_once_and_held(passes):
    view = look(measures="entropy", size=3)
    assert torch.equal(view.map(), view.map(3))
    assert passes == [{"map"}]


def test_links_that_are_held_serve_fewer_and_more_than_there_are_keys(passes):
    view = look(measures="top", top=8)
    assert view.top().index.shape == (B, H, NQ, 8)
    few = view.top(3)
    assert torch.equal(few.index, view.top(8).index[..., :3])
    assert torch.equal(few.weight, view.top(8).weight[..., :3])
    assert passes == []
    assert view.top(11).index.shape == (B, H, NQ, 11)
    assert passes == [{"top"}]
    many = view.top(50)
    assert passes == [{"top"}]  # eleven are all there are
    assert torch.equal(many.index[..., :11], view.top(11).index)
    assert bool((many.index[..., 11:] == -1).all())
    assert bool((many.weight[..., 11:] == 0).all())
    assert not bool(many.tied.any())


def test_links_by_default_are_as_many_as_were_asked_for_with_the_view():
    assert look().top().index.shape[-1] == TOP
    assert look(top=3).top().index.shape[-1] == 3
    assert look(top=3, measures="top").top().index.shape[-1] == 3


@pytest.mark.parametrize("measured", [[], ["top"]])
def test_ties_are_declared_for_every_number_of_links(measured):
    q, k = torch.ones(1, 1, 1, 2), torch.tensor([2.0, 1.0, 3.0, 1.0, 1.0]).view(1, 1, 5, 1).expand(-1, -1, -1, 2)
    view = regard.look(q, k, k, measures=measured, top=5)
    ties = [bool(view.top(n).tied) for n in range(1, 8)]
    assert ties == [False, False, True, True, False, False, False]
    assert view.top(5).index.flatten().tolist() == [2, 0, 1, 3, 4]


def test_links_of_a_row_that_is_all_but_certain_tie_at_no_weight():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -1e4, -2e4, -2e4]).view(1, 1, 4, 1)
    view = regard.look(q, k, k, measures="top", top=4)
    assert view.top(4).weight.flatten().tolist() == [1, 0, 0, 0]
    assert bool(view.top(2).tied)  # no weight is as good as another
    assert not bool(view.top(1).tied)


def test_exact_and_pooled_are_told_apart():
    view = look()
    assert {name: view.how(name) for name in ("lse", *NAMES)} == dict.fromkeys(("lse", *NAMES), "exact")
    assert look(size=10).how("map") == "pooled"
    assert look(size=11).how("map") == "exact"
    assert replace(view, pooled=("entropy",)).how("entropy") == "pooled"
    with pytest.raises(ValueError, match=r"'rows'.*lse.*entropy.*received"):
        view.how("rows")


@pytest.mark.parametrize("name", PER_QUERY)
def test_means_leave_out_padding_and_rows_that_see_nothing(name):
    lengths = [3, 5]
    q = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    view = regard.look(q, q, q, mask=masks.causal() & masks.padding(lengths) & ~masks.globals([0]))
    values = getattr(view, name)
    assert torch.isneginf(view.lse[:, :, 0]).all()
    expected = torch.stack([values[b, :, 1:n].mean(-1) for b, n in enumerate(lengths)])
    assert torch.allclose(view.mean(name), expected, rtol=1e-12)


@pytest.mark.parametrize("name", PER_QUERY)
def test_means_leave_out_rows_that_see_nothing_where_nobody_counted_what_they_see(name):
    view = look(mask=masks.causal(offset=-2))
    assert torch.allclose(replace(view, place=KnownVisibility()).mean(name), getattr(view, name)[:, :, 2:].mean(-1))


def test_means_find_padding_where_offsets_differ_by_batch_row():
    q, k = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 6, 4)
    view = regard.look(q, k, k, mask=masks.causal(offset=[0, 3]) & masks.padding([2, 6]))
    expected = torch.stack([view.entropy[0, :, :2].mean(-1), view.entropy[1].mean(-1)])
    assert torch.allclose(view.mean("entropy"), expected)


@pytest.mark.parametrize("measures", [["entropy"], NAMES])
def test_a_row_that_sees_its_sink_alone_is_not_counted(measures):
    q = torch.randn(1, 2, 4, 3)
    view = regard.look(q, q, q, mask=masks.causal(offset=-1), sinks=torch.zeros(2), measures=measures)
    for name in PER_QUERY:
        assert torch.allclose(view.mean(name), getattr(view, name)[:, :, 1:].mean(-1))


def test_means_of_cross_attention_count_every_query():
    padded = KnownVisibility(padding=torch.tensor([[True] * NK]))
    view = replace(look(mask=None), kind="cross", place=padded)
    assert torch.allclose(view.mean("lse"), view.lse.mean(-1))


def test_a_mean_that_was_kept_is_given_and_one_that_was_pooled_away_is_not():
    view = look()
    overview = replace(without(view), pooled=("entropy", "lse"))
    overview.held["mean entropy"] = view.mean("entropy")
    assert torch.equal(overview.mean("entropy"), view.mean("entropy"))
    with pytest.raises(LookupError, match=r"lse.*pooled"):
        overview.mean("lse")


def test_means_are_of_measures_per_query():
    with pytest.raises(ValueError, match=r"lse.*entropy.*max_logit.*effective.*'map'"):
        look().mean("map")


# ------------------------------------------------------------------------------------------------ what is measured when


def test_what_was_not_measured_is_measured_once(passes):
    view = look(measures=[])
    assert torch.equal(view.effective, view.effective)
    assert passes == [{"effective"}]
    assert view.entropy.shape == view.lse.shape
    assert passes == [{"effective"}, {"entropy"}]


def test_what_is_measured_later_is_what_is_measured_at_once():
    # "top" keeps every score as it is, which costs a pass; the same numbers without it are rounded elsewhere.
    late, early, top = look(measures=[]), look(measures=[n for n in NAMES if n != "top"]), look(measures=["top"])
    for name in ("entropy", "received", "max_logit", "effective"):
        assert torch.equal(getattr(late, name), getattr(early, name)), name
    assert torch.equal(late.map(), early.map())
    assert torch.equal(late.top().index, top.top().index)
    assert torch.equal(late.top().weight, top.top().weight)


def test_no_pass_is_made_for_exact_weights(passes):
    view = look(measures=[])
    view.row(0), view.column(0), view.tile(ALL, ALL), view.check()
    assert passes == []


def test_given_weights_answer_without_scores_all_but_the_largest():
    weights = torch.rand(1, 2, 3, 5).softmax(-1)
    view = View((1, 2, 3, 5), {}, weights=StoredWeights(weights))
    assert torch.equal(view.row(1), weights[:, :, 1])
    assert torch.allclose(view.received, weights.sum(2))
    assert torch.allclose(view.map(), weights)
    assert view.check().ok
    with pytest.raises(LookupError, match="max_logit"):
        _ = view.max_logit
    with pytest.raises(LookupError, match="lse"):
        _ = view.lse


def test_weights_from_elsewhere_answer_too():
    own = look().weights
    assert isinstance(own, ComputedWeights)
    other: Any = SimpleNamespace(sizes=own.sizes, tile=own.tile, pairs=own.pairs)
    view = View(own.sizes, {}, weights=other)
    assert torch.allclose(view.entropy, look().entropy, rtol=1e-5)
    assert torch.equal(view.row(2), look().row(2))
    assert view.check().tolerance == NK * torch.finfo(torch.float32).eps
    with pytest.raises(LookupError, match="max_logit"):
        _ = view.max_logit


# --------------------------------------------------------------------------------------------- patterns and their parts


def test_patterns_that_are_held_are_given_as_they_are():
    view = without(look())
    view.held["pattern own"] = torch.full((B, H), 0.25)
    assert {name: score.tolist() for name, score in view.patterns().items()} == {"own": [[0.25] * H] * B}


def test_patterns_count_a_sink_among_what_a_row_may_spread_over():
    view = look(mask=None, sinks=torch.linspace(-1, 2, H))
    expected = (view.entropy / log(NK + 1)).mean(-1)
    assert torch.allclose(view.patterns()["uniform"], expected)
    scores = torch.randn(1, 2, 4, 6)
    place = KnownVisibility(torch.tensor([[[5] * 4]]))
    given = View((1, 2, 4, 5), {}, weights=StoredWeights(scores.softmax(-1)[..., :5], scores), place=place)
    assert torch.allclose(given.patterns()["uniform"], (given.entropy / log(6)).mean(-1))


def test_tokens_add_patterns_by_token_but_not_across():
    q = torch.randn(1, 2, 4, 3)
    tokens = KeyTokens(torch.tensor([[5, 6, 5, 6]]), torch.tensor([[False, True, False, False]]))
    view = replace(regard.look(q, q, q), tokens=tokens)
    assert {"same token", "induction", "delimiter"} < view.patterns().keys()
    assert view.patterns()["delimiter"].tolist() == [pytest.approx((view.received[0, :, 1] / 4).tolist())]
    assert replace(view, kind="cross").patterns().keys() == {"first", "uniform", "delimiter"}


# ---------------------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize("cells", [1, 100, 1 << 24])
def test_check_looks_at_every_row_a_few_at_a_time(cells, monkeypatch):
    monkeypatch.setattr(module, "CHECK_CELLS", cells)
    weights = torch.full((2, 3, 5, 4), 0.25)
    weights[1, 2, 4, 0] = 0.5
    weights[0, 1, 2] = 0
    report = View((2, 3, 5, 4), {}, weights=StoredWeights(weights)).check()
    assert (report.rows, report.empty_rows, report.bad_rows) == (30, 1, 1)
    assert str(report.problems[0]) == "batch 1, head 2, row 4: sums to 1.25, not to 1"


@pytest.mark.parametrize(
    ("lead", "said"),
    [
        ((), "row 4"),
        ((6,), "batch 5, row 4"),
        (None, "batch 1, head 2, row 4"),
        ((1, 2, 3), "batch (0, 1), head 2, row 4"),
    ],
)
def test_check_names_a_row_by_the_callers_axes(lead, said):
    batch, heads = (1, 1) if lead == () else (6, 1) if lead == (6,) else (2, 3)
    weights = torch.full((batch, heads, 5, 4), 0.25)
    weights[-1, -1, 4] = 0.5
    report = View((batch, heads, 5, 4), {}, weights=StoredWeights(weights), lead=lead).check()
    assert str(report.problems[0]) == f"{said}: sums to 2, not to 1"


def test_a_sink_may_take_a_part_of_each_row():
    assert look(sinks=torch.zeros(H)).check().ok
    weights, scores = torch.full((1, 1, 2, 3), 0.25), torch.zeros(1, 1, 2, 4)
    assert View((1, 1, 2, 3), {}, weights=StoredWeights(weights, scores)).check().ok
    assert not View((1, 1, 2, 3), {}, weights=StoredWeights(weights)).check().ok


def test_weights_put_together_are_checked_as_their_parts_would_be():
    sunk = look(sinks=torch.zeros(H)).weights
    parts: Any = SimpleNamespace(sizes=sunk.sizes, tile=sunk.tile, pairs=sunk.pairs, parts=(sunk,))
    report = View(sunk.sizes, {}, weights=parts).check()
    assert report.ok
    assert report.tolerance == sunk.rounding


def test_weights_of_another_call_do_not_pass():
    view = look()
    assert isinstance(view.weights, ComputedWeights)
    report = replace(view, weights=ComputedWeights(view.weights.call, view.weights.lse + 0.01)).check()
    assert report.bad_rows == B * H * NQ
    assert "sums to 0.990" in str(report)


# ------------------------------------------------------------------------------------------------ when q and k are gone

KEEP = r"watch\(model, keep='qk'\)"


@pytest.mark.parametrize("name", ["row", "column"])
def test_rows_and_columns_need_q_and_k_and_say_how_to_keep_them(name):
    with pytest.raises(LookupError, match=rf"{name}.*q.*k.*{KEEP}"):
        getattr(without(look()), name)(0)


def test_tiles_checks_and_patterns_need_them_too():
    view = without(look())
    for name, ask in {"tile": lambda: view.tile(ALL, ALL), "check": view.check, "patterns": view.patterns}.items():
        with pytest.raises(LookupError, match=rf"{name}.*q.*k.*{KEEP}"):
            ask()


def test_a_measure_that_was_not_made_says_how_to_make_it():
    view = without(look())
    with pytest.raises(LookupError, match=rf"effective.*q.*k.*{KEEP}") as error:
        _ = view.effective
    assert "watch(model, measures=['effective'])" in str(error.value)


def test_another_map_names_the_one_that_is_held():
    view = without(look(size=5))
    assert view.map().shape == (B, H, 5, 5)
    with pytest.raises(LookupError, match=r"size.*6.*q.*k.*map\(5\)"):
        view.map(6)
    none = without(look(measures=[]))
    with pytest.raises(LookupError, match=rf"q.*k.*{KEEP}.*watch\(model, measures=\['map'"):
        none.map()


def test_more_links_name_those_that_are_held():
    view = without(look(measures="top", top=3))
    assert view.top(2).index.shape == (B, H, NQ, 2)
    said = r"4.*q.*k.*top\(3\)"
    with pytest.raises(LookupError, match=said) as error:
        view.top(4)
    assert "watch(model, measures=['top'], top=4)" in str(error.value)
    with pytest.raises(LookupError, match=rf"8.*q.*k.*{KEEP}"):
        without(look()).top()


def test_all_links_of_few_keys_need_no_q_and_k():
    view = without(look(measures="top", top=NK))
    assert view.top(NK + 4).index.shape == (B, H, NQ, NK + 4)


def test_measures_that_are_held_need_nothing():
    view = without(look(measures=NAMES))
    for name in ("lse", "entropy", "received", "max_logit", "effective"):
        assert torch.equal(getattr(view, name), getattr(look(measures=NAMES), name))
    assert view.mean("effective").shape == (B, H)


def test_an_output_that_was_not_kept_says_how_to_keep_it():
    with pytest.raises(LookupError, match=r"watch\(model, keep='output'\)"):
        _ = replace(look(), given_output=None).output


# -------------------------------------------------------------------------------------------------------- bad questions


@pytest.mark.parametrize(("ask", "n", "of"), [("row", NQ, "queries"), ("column", NK, "keys")])
def test_a_row_or_column_out_of_range_says_how_many_there_are(ask, n, of):
    view = look()
    for wrong in (n, -n - 1, 10**9):
        with pytest.raises(IndexError, match=rf"{ask}.*{wrong}.*{n}.*{of}"):
            getattr(view, ask)(wrong)
    for wrong, kind in ((1.0, r"float.*1.0"), ("1", r"str.*'1'"), (True, r"bool.*True"), (None, r"NoneType.*None")):
        with pytest.raises(TypeError, match=rf"{ask}.*{kind}"):
            getattr(view, ask)(wrong)


def test_a_row_out_of_range_is_that_with_q_and_k_gone_too():
    with pytest.raises(IndexError, match=rf"row.*{NQ}.*{NQ}"):
        without(look()).row(NQ)


@pytest.mark.parametrize(
    ("rows", "cols", "error", "said"),
    [
        ([0, NQ], ALL, IndexError, rf"rows.*{NQ}.*{NQ}"),
        (ALL, range(NK + 1), IndexError, rf"{NK}.*{NK}"),
        (3, ALL, TypeError, r"rows.*int.*3"),
        (ALL, "all", TypeError, r"cols.*str.*'all'"),
        ([0.5], ALL, TypeError, r"float.*0.5"),
        (ALL, np.ones(NK, bool), TypeError, r"bool.*True"),
        (torch.tensor([[0, 1]]), ALL, TypeError, r"list.*\[0, 1\]"),
        (torch.tensor(2), ALL, TypeError, r"rows.*int.*2"),
    ],
)
def test_a_wrong_part_is_named(rows, cols, error, said):
    with pytest.raises(error, match=said):
        look().tile(rows, cols)


@pytest.mark.parametrize(("ask", "name"), [("map", "size"), ("top", "k")])
def test_a_size_below_one_or_no_integer_is_refused(ask, name):
    with pytest.raises(ValueError, match=rf"{name}.*1.*0"):
        getattr(look(), ask)(0)
    with pytest.raises(TypeError, match=rf"{name}.*1.*float.*4.0"):
        getattr(look(), ask)(4.0)


# ------------------------------------------------------------------------------------------------------ the view itself


def test_a_view_says_what_it_holds():
    assert repr(look(measures=["top", "entropy"])) == (
        "View(2 × 6 heads, 7 queries, 11 keys; lse, entropy, top; exact rows at hand)"
    )
    assert repr(without(look())).endswith("; lse, entropy, received, map; no q and k kept)")


def test_views_are_compared_by_what_they_are_not_by_their_tensors():
    view = look()
    assert view != look()
    assert len({view, look()}) == 2


def test_a_view_moves_with_its_measures_and_leaves_q_and_k():
    view = look()
    moved = view.moved("cpu")
    assert moved.weights is view.weights
    assert moved.held.keys() == view.held.keys()
    assert moved.held is not view.held


def test_default_sizes_are_those_of_look():
    assert View((1, 1, 1, 1), {}).size == MAP_SIZE
    assert View((1, 1, 1, 1), {}).links == TOP
