"""Two captures compared: what differs is found, by how much, and nothing else is."""

import re
from dataclasses import replace
from math import inf, nan

import pytest
import torch

from regard import masks
from regard.backends.call import prepare
from regard.lens.capture import Capture, Record
from regard.lens.comparison import Change, Mismatch, compare
from regard.lens.files.saving import make_overview
from regard.lens.look import look
from regard.lens.measures.measures import NAMES
from regard.lens.view import PER_QUERY, View
from regard.lens.visibility import read_facts

B, H, NQ, NK, D = 2, 3, 7, 11, 5
PATTERNS = ["own", "previous", "next", "first", "neighbours", "uniform"]


def record(
    path: str = "layers.0.attn", n: int = 0, seed: int = 0, sizes=(B, H, NQ, NK), mask=None, **options
) -> Record:
    batch, heads, nq, nk = sizes
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, heads, m, D, generator=random) for m in (nq, nk))
    view = look(q, k, k, mask=mask, measures=NAMES, **options)
    view.held |= {f"pattern {name}": scores for name, scores in view.score_patterns().scores.items()}
    view.weights = None
    return Record(path, n, "self", "sdpa", "flash", view=view, facts=read_facts(prepare(q, k, k, mask=mask)))


def capture(*records: Record) -> Capture:
    made = Capture("Model")
    made.records.extend(records)
    return made


def change_of(a: Record, b: Record, measure: str, **options) -> Change:
    found = [c for c in compare(capture(a), capture(b), **options).changes if c.measure == measure]
    assert len(found) == 1
    return found[0]


def held(of: Record, **tensors: torch.Tensor) -> Record:
    """The record with other measures."""
    return replace(of, view=replace(of.view, held=of.view.held | tensors))


# ---------------------------------------------------------------------------------------------------------------- same


def test_capture_is_the_same_as_itself():
    seen = capture(record(), record("layers.1.attn", seed=1), record("layers.1.attn", 1, seed=2))
    found = compare(seen, seen)
    assert found.same
    assert (found.modules, found.changes, found.unlike, found.only_a, found.only_b) == (2, (), (), (), ())
    assert found.compared == 3 * (len(PER_QUERY) + len(PATTERNS) + 2)
    assert found.text() == "the same: modules compared: 2, measures: 36"
    assert found.rows == []


def test_rows_that_see_nothing_and_nan_are_the_same_as_themselves():
    one = record(mask=masks.causal(offset=-3))
    assert one.view.lse[0, 0, 0] == -inf
    one = held(one, entropy=one.view.entropy.index_fill(-1, torch.tensor([2]), nan))
    assert compare(capture(one), capture(one)).same


def test_another_kernel_is_named_but_makes_no_difference():
    found = compare(capture(record()), capture(replace(record(), kernel="math")))
    assert found.same
    assert found.unlike == (Mismatch("kernel", "layers.0.attn", 0, "flash", "math"),)
    assert "kernel  layers.0.attn  flash  math" in found.text()


def test_small_differences_are_the_same_within_a_tolerance():
    one = record()
    other = held(one, entropy=one.view.entropy + 0.25)
    assert not compare(capture(one), capture(other)).same
    assert not compare(capture(one), capture(other), tolerance=0.249).same
    found = compare(capture(one), capture(other), tolerance=0.2501)
    assert found.same
    assert found.text().endswith("(tolerance 0.2501)")


# ----------------------------------------------------------------------------------------------------------- difference


def test_measures_by_position_differ_by_the_mean_of_their_differences():
    one = record()
    up = torch.zeros(B, H, NQ)
    up[0, 1, 3], up[1, 1, 4] = 0.7, -0.7  # the means over all positions and batch rows stay as they were
    for name in PER_QUERY:
        found = change_of(one, held(one, **{name: one.view.held[name] + up}), name)
        assert found.head == 1
        assert found.largest == pytest.approx(0.1, rel=1e-4)  # 1.4 over 14 positions
        assert found.mean == pytest.approx(0.1 / 3, rel=1e-4)
        assert found.a[0] == found.b[0] == pytest.approx(one.view.mean(name)[:, 0].mean().item(), rel=1e-5)


def test_pooled_measures_are_compared_part_by_part():
    a, b = (record(sizes=(1, 2, 70, 70), seed=seed) for seed in (0, 1))
    whole = compare(capture(a), capture(b))
    small = [capture(replace(r, view=make_overview(r.view))) for r in (a, b)]
    found = compare(*small)
    assert {c.measure for c in found.changes} == {c.measure for c in whole.changes}
    entropy = next(c for c in found.changes if c.measure == "entropy")
    gap = (small[0][0].entropy - small[1][0].entropy).abs().double().mean(-1)[0]
    assert entropy.heads == pytest.approx(gap.tolist())
    assert entropy.a == pytest.approx(next(c.a for c in whole.changes if c.measure == "entropy"))


def test_overview_and_whole_capture_of_one_run_have_the_same_means():
    one = record(sizes=(1, 2, 70, 70))
    found = compare(capture(one), capture(replace(one, view=make_overview(one.view))), tolerance=1e-3)
    assert found.same
    assert found.compared == len(PER_QUERY) + len(PATTERNS) + 2


def test_sizes_that_differ_leave_the_means_to_compare():
    a, b = record(), record(sizes=(B, H, NQ, NK + 2))
    found = compare(capture(a), capture(b))
    assert found.unlike == (Mismatch("sizes", "layers.0.attn", 0, "2 × 3, 7 × 11", "2 × 3, 7 × 13"),)
    assert {c.measure for c in found.changes} == {*PER_QUERY, *PATTERNS}
    lse = next(c for c in found.changes if c.measure == "lse")  # same shape: position by position
    assert lse.heads == pytest.approx((a.view.lse - b.view.lse).abs().mean((0, 2)).tolist(), rel=1e-5)


def test_other_batch_sizes_are_compared_by_their_means():
    a, b = record(), record(sizes=(B + 3, H, NQ, NK))
    found = compare(capture(a), capture(b))
    entropy = next(c for c in found.changes if c.measure == "entropy")
    means = [r.view.mean("entropy").mean(0) for r in (a, b)]
    assert entropy.heads == pytest.approx((means[0] - means[1]).abs().tolist(), rel=1e-4)
    maps = [r.view.map().mean(0) for r in (a, b)]
    distance = (maps[0] - maps[1]).abs().sum(-1).mean(-1) / 2
    assert next(c for c in found.changes if c.measure == "map").heads == pytest.approx(distance.tolist(), rel=1e-4)


def test_map_differs_by_the_share_of_attention_that_moved():
    one = record(sizes=(1, 1, 2, 2))
    a = held(one, map=torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]]))
    b = held(one, map=torch.tensor([[[[0.0, 1.0], [0.5, 0.5]]]]))
    found = change_of(a, b, "map")
    assert (found.heads, found.a, found.b) == ((0.5,), (), ())


def test_received_differs_by_the_share_that_other_keys_get():
    one = record(sizes=(1, 1, 2, 4))
    a = held(one, received=torch.tensor([[[2.0, 0.0, 0.0, 0.0]]]))
    b = held(one, received=torch.tensor([[[1.0, 1.0, 0.0, 0.0]]]))
    assert change_of(a, b, "received").heads == (0.5,)
    assert compare(capture(a), capture(held(a, received=2 * a.view.received))).same


def test_patterns_differ_by_their_scores():
    one = record()
    other = held(one, **{"pattern own": one.view.held["pattern own"] + torch.tensor([0.0, 0.2, 0.1])})
    found = change_of(one, other, "own")
    assert found.heads == pytest.approx((0.0, 0.2, 0.1), abs=1e-6)
    assert found.b[1] - found.a[1] == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_numbers_against_none_differ_infinitely_and_come_first(value):
    one = record()
    broken = held(one, entropy=one.view.entropy.index_fill(-1, torch.tensor([2]), value))
    found = compare(capture(one), capture(held(broken, map=one.view.map() * 0.5)), tolerance=1e9)
    assert not found.same
    assert (found.changes[0].measure, found.changes[0].largest) == ("entropy", inf)


def test_strongest_change_comes_first():
    one = record()
    other = held(one, max_logit=one.view.max_logit + 3, entropy=one.view.entropy + 0.01, map=one.view.map().flip(-1))
    found = compare(capture(one), capture(other))
    assert [c.measure for c in found.changes] == ["max_logit", "map", "entropy"]
    assert [row["measure"] for row in found.rows] == ["max_logit", "map", "entropy"]


def test_measure_that_only_one_has_is_left_out():
    one = record()
    bare = replace(one, view=View(one.view.sizes, {"lse": one.view.lse}))
    found = compare(capture(one), capture(bare))
    assert (found.compared, found.same) == (1, True)


@pytest.mark.parametrize("sizes", [(1, H, 0, 3), (1, H, 3, 0), (0, H, 3, 3)])
def test_calls_of_nothing_have_nothing_to_compare(sizes):
    one = Record("attn", 0, "self", "sdpa", "flash", view=View(sizes, {"lse": torch.zeros(sizes[:3])}))
    found = compare(capture(one), capture(one))
    assert (found.compared, found.same) == (0, True)


def test_other_number_of_heads_is_told_and_not_compared():
    found = compare(capture(record()), capture(record(sizes=(B, H + 2, NQ, NK))))
    assert (found.compared, found.same) == (0, False)
    assert [u.what for u in found.unlike] == ["sizes"]


# ------------------------------------------------------------------------------------------------ modules, calls, masks


def test_modules_are_matched_by_path_and_the_others_listed():
    a = capture(record("layers.0.attn"), record("layers.1.attn"), record("layers.2.attn"))
    b = capture(record("layers.1.attn"), record("head"))
    found = compare(a, b)
    assert (found.modules, found.only_a, found.only_b) == (1, ("layers.0.attn", "layers.2.attn"), ("head",))
    assert not found.same
    assert "only in A: layers.0,2.attn\n\nonly in B: head" in found.text()


def test_calls_are_matched_by_their_number():
    a = capture(*(record(n=n, seed=n) for n in range(3)))
    b = capture(*(record(n=n, seed=n + (n == 1) * 7) for n in range(2)))
    found = compare(a, b)
    assert found.unlike == (Mismatch("calls", "layers.0.attn", 0, "3", "2"),)
    assert {(c.n, c.where) for c in found.changes} == {(1, "layers.0.attn[1]")}


def test_masks_that_differ_are_named_once_for_many_layers():
    a = capture(*(record(f"layers.{n}.attn", mask=masks.causal()) for n in range(4)))
    b = capture(*(record(f"layers.{n}.attn", mask=None if n else masks.causal()) for n in range(4)))
    found = compare(a, b)
    assert [u.what for u in found.unlike] == ["mask"] * 3
    assert re.search(r"^mask +layers\.1–3\.attn +causal +none$", found.text(), re.MULTILINE)


# ------------------------------------------------------------------------------------------------------------- printing


def test_text_shows_the_strongest_and_counts_the_rest():
    a = capture(*(record(f"layers.{n}.attn") for n in range(4)))
    b = capture(*(record(f"layers.{n}.attn", seed=1) for n in range(4)))
    found = compare(a, b)
    text = found.text()
    assert text.startswith("modules in both: 4, measures that differ: 48 of 48\n")
    assert text.count("layers.") == 10 + 20  # heads, then measures
    assert "\n\n… and 28 more\n\n" in text
    first = found.rows[0]
    assert first["measure"] in text.split("\n\n")[2].splitlines()[2]
    assert set(first) == {"path", "call", "measure", "head", "a", "b", "difference", "mean", "heads"}
    assert first["difference"] == max(first["heads"]) == first["heads"][first["head"]]


def test_text_speaks_korean():
    found = compare(capture(record()), capture(record(seed=1, mask=masks.causal())), tolerance=0.01)
    text = found.text("ko")
    assert re.match(r"양쪽에 있는 모듈 1개, 지표 12개 중 \d+개가 다름 \(허용 오차 0.01\)", text)
    assert re.search("^마스크 +layers", text, re.MULTILINE)
    assert "차이: 가장 크게 다른 헤드" in text
    assert compare(capture(record()), capture(record())).text("ko") == "같음: 비교한 모듈 1개, 지표 12개"
    with pytest.raises(ValueError, match="ko"):
        found.text("fr")


def test_notebook_gets_tables_with_escaped_names():
    found = compare(capture(record("<attn>"), record("a&b")), capture(record("<attn>", seed=1, mask=masks.causal())))
    html = found._repr_html_()
    assert html.count("<table>") == 3
    assert "&lt;attn&gt;" in html
    assert "only in A: a&amp;b" in html
    assert "<attn>" not in html
    assert repr(found) == found.text()


# -------------------------------------------------------------------------------------------------------------- refused


def test_what_cannot_be_compared_is_refused():
    seen = capture(record())
    with pytest.raises(TypeError, match=r"b.*str"):
        compare(seen, "run.regard")
    with pytest.raises(ValueError, match=r"tolerance.*0.*-1"):
        compare(seen, seen, tolerance=-1)
    with pytest.raises(ValueError, match=r"tolerance.*0.*nan"):
        compare(seen, seen, tolerance=nan)
    with pytest.raises(LookupError, match=r"Capture\(nothing"):
        compare(seen, Capture())
