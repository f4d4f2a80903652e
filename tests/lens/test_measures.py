"""Each measure by itself, on tiles made by hand; the arguments that name them; the map's cells.

That the engines hand out the right tiles is in test_engines.py.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf, log, nan

import numpy as np
import pytest
import torch
from dense_measures import assert_measures, assert_top, dense_measures
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.lens.measures.measures import (
    DEFAULT,
    MAP_SIZE,
    MEASURES,
    NAMES,
    TOP,
    MeasureOptions,
    Pool,
    TilePlace,
    WeightTile,
    at_least_one,
    cell_of_positions,
    finish_effective,
    finish_entropy,
    finish_map,
    finish_top,
    read_measures,
)
from regard.masks.tiles import cell_edges

ALL = slice(None)


def whole(s: Tensor, cuts: tuple[int, ...], names: list[str], size: int = 3, top: int = 2, sinks=None) -> dict:
    """Measures of scores (B, H, Nq, Nk), handed out in tiles whose columns begin at `cuts`."""
    batch, heads, nq, nk = sizes = tuple(s.shape)
    logits = s if sinks is None else torch.cat([s, sinks.view(-1, 1, 1).expand(batch, heads, nq, 1)], -1)
    lse = logits.logsumexp(-1)
    found = [MEASURES[name](sizes, lse, MeasureOptions(frozenset(names), size, top)) for name in names]
    for first, end in zip(cuts, (*cuts[1:], nk), strict=True):
        part = s[..., first:end]
        t = part - torch.where(lse == -inf, 0.0, lse).unsqueeze(-1)
        pools = (Pool(slice(0, nq), nq, size, s), Pool(slice(first, end), nk, size, s)) if "map" in names else ()
        place = TilePlace(slice(0, batch), slice(0, heads), slice(0, nq), slice(first, end))
        tile = WeightTile(place, part, t.clamp(min=torch.finfo(s.dtype).min), t.exp(), torch.full_like(t, nan), *pools)
        for each in found:
            each.add(tile)
    return {key: value for each in found for key, value in each.result(lse, sinks).items()}


# ------------------------------------------------------------------------------------------------------------ arguments


def test_every_name_has_a_measure_and_the_default_ones_are_among_them():
    assert tuple(MEASURES) == NAMES
    assert set(DEFAULT) < set(NAMES)


def test_no_argument_means_the_default_measures():
    assert read_measures(None) == MeasureOptions(frozenset(DEFAULT), MAP_SIZE, TOP)


@pytest.mark.parametrize("given", ["top", ["top"], ("top",), {"top"}, ["top", "top"], (n for n in ["top"])])
def test_one_name_or_several_are_read_alike(given):
    assert read_measures(given, 5, np.int64(3)) == MeasureOptions(frozenset(["top"]), 5, 3)


def test_no_names_mean_no_measures():
    assert read_measures([]).names == frozenset()


def test_a_name_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'entorpy'.*entropy.*received.*max_logit.*effective"):
        read_measures(["map", "entorpy"])
    with pytest.raises(ValueError, match=r"3.*entropy"):
        read_measures([3])


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match=r"measures.*entropy.*int"):
        read_measures(3)


@pytest.mark.parametrize("name", ["size", "top"])
@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (0, ValueError, "0"),
        (-3, ValueError, "-3"),
        (2.0, TypeError, r"float.*2.0"),
        ("8", TypeError, r"str.*'8'"),
        (True, TypeError, r"bool.*True"),
        (None, TypeError, r"NoneType.*None"),
    ],
)
def test_a_size_or_number_of_links_below_one_or_no_integer_is_refused(name, value, error, said):
    with pytest.raises(error, match=rf"{name}.*1.*{said}"):
        read_measures("map", **{name: value})


def test_numbers_of_numpy_become_integers():
    assert type(at_least_one("size", np.int32(7))) is int


# ------------------------------------------------------------------------------------------------------------ map cells


@given(n=st.integers(1, 300), size=st.integers(1, 80))
def test_cells_are_as_even_as_integers_allow_and_positions_know_theirs(n, size):
    edges = cell_edges(n, size)
    widths = {b - a for a, b in pairwise(edges)}
    assert (edges[0], edges[-1], len(edges) - 1) == (0, n, min(n, size))
    assert max(widths) - min(widths) <= 1
    assert min(widths) >= 1
    cells = cell_of_positions(torch.arange(n), n, size).tolist()
    assert cells == [c for c, (a, b) in enumerate(pairwise(edges)) for _ in range(a, b)]


def test_no_positions_make_no_cells():
    assert cell_edges(0, 8) == [0]


@given(n=st.integers(1, 60), size=st.integers(1, 40), data=st.data())
def test_a_pool_sums_what_a_stretch_has_of_each_cell(n, size, data):
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    pool = Pool(slice(start, stop), n, size, torch.zeros((), dtype=torch.float64))
    x = torch.arange(2 * 3 * (stop - start) * 5, dtype=torch.float64).view(2, 3, stop - start, 5)
    sums = torch.zeros(2, 3, min(n, size), 5, dtype=torch.float64)
    for at, cell in enumerate(cell_of_positions(torch.arange(start, stop), n, size).tolist()):
        sums[:, :, cell] += x[:, :, at]
    assert torch.equal(pool.rows(x), sums[:, :, pool.cells])
    assert torch.equal(pool.columns(x.mT), sums.mT[..., pool.cells])
    assert float(sums.sum()) == float(sums[:, :, pool.cells].sum())


def test_a_pool_of_equal_stretches_needs_no_matrix():
    assert Pool(slice(4, 12), 64, 16, torch.zeros(())).member.numel() == 0
    assert Pool(slice(4, 11), 64, 16, torch.zeros(())).member.shape == (2, 7)


def test_a_pool_reads_a_part_of_a_larger_tensor():
    x = torch.arange(6.0 * 10).view(1, 1, 6, 10)[..., 1:9:2]
    pool = Pool(slice(0, 6), 6, 2, x)
    assert torch.equal(pool.rows(x), torch.stack([x[:, :, :3].sum(2), x[:, :, 3:].sum(2)], 2))


# --------------------------------------------------------------------------------------------------------- each measure


@pytest.mark.parametrize("cuts", [(0,), (0, 4), (0, 1, 2, 9)])
@pytest.mark.parametrize("sink", [False, True])
def test_measures_of_several_tiles_are_those_of_the_whole(cuts, sink):
    s = torch.randn(2, 3, 7, 11) * 2
    s[:, :, 2, 3:] = -inf
    s[1, :, 5] = -inf
    sinks = torch.tensor([0.5, -2.0, 3.0]) if sink else None
    found = whole(s, cuts, list(NAMES), sinks=sinks)
    wide = dense(s.double(), None if sinks is None else sinks.double())
    assert_measures(found, dense(s, sinks), wide, f"cut at {cuts}")
    assert_top(found, dense(s, sinks), wide, f"cut at {cuts}")
    assert torch.equal(found["max_logit"], s.amax(-1))


def dense(s: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
    """Measures of scores (B, H, Nq, Nk), straight from the definitions."""
    batch, heads, nq, _ = s.shape
    logits = s if sinks is None else torch.cat([s, sinks.view(-1, 1, 1).expand(batch, heads, nq, 1)], -1)
    lse = logits.logsumexp(-1)
    weights = torch.exp(s - torch.where(lse == -inf, 0.0, lse).unsqueeze(-1))
    return dense_measures(weights, s, lse, sinks, 3)


def test_entropy_is_0_for_certain_rows_and_rows_that_see_nothing_and_never_below():
    s = torch.full((1, 1, 3, 5), -inf)
    s[0, 0, 0, 2] = 7.25
    s[0, 0, 1] = torch.tensor([30.0, 0.0, 0.0, 0.0, 0.0])
    entropy = whole(s, (0, 2), ["entropy"])["entropy"]
    assert entropy[0, 0, 0] == 0
    assert 0 <= entropy[0, 0, 1] < 1e-10
    assert entropy[0, 0, 2] == 0
    assert float(finish_entropy(torch.tensor([-1e-7]), torch.zeros(1, 1, 1), None)) == 0
    assert not bool(torch.signbit(entropy).any())


def test_entropy_of_an_even_row_is_the_log_of_its_keys_and_a_sink_is_one_more():
    s = torch.zeros(1, 2, 1, 6, dtype=torch.float64)
    assert whole(s, (0, 4), ["entropy"])["entropy"].flatten().tolist() == pytest.approx([log(6)] * 2)
    sunk = whole(s, (0, 4), ["entropy", "effective"], sinks=torch.zeros(2, dtype=torch.float64))
    assert sunk["entropy"].flatten().tolist() == pytest.approx([log(7)] * 2)
    assert sunk["effective"].flatten().tolist() == pytest.approx([7.0] * 2)


def test_sinks_may_be_one_logit_per_row():
    lse = torch.tensor([[[1.0, -inf], [2.0, 3.0]]])
    per_head, per_row = torch.tensor([0.5, 1.5]), torch.tensor([[[0.5, 0.5], [1.5, 1.5]]])
    for finish in (finish_entropy, finish_effective):
        start = torch.full((1, 2, 2), 0.25)
        assert torch.equal(finish(start, lse, per_head), finish(start, lse, per_row))


def test_effective_is_0_where_nothing_is_seen_and_1_for_a_certain_row():
    s = torch.full((1, 1, 2, 3), -inf)
    s[0, 0, 1, 1] = 0.0
    assert whole(s, (0, 1), ["effective"])["effective"].tolist() == [[[0.0, 1.0]]]


def test_a_row_of_map_cells_sums_to_one():
    s = torch.randn(2, 3, 13, 7, dtype=torch.float64)
    for size in (1, 4, 7, 13, 20):
        cells = whole(s, (0, 3), ["map"], size)["map"]
        assert cells.shape == (2, 3, min(13, size), min(7, size))
        assert torch.allclose(cells.sum(-1), torch.ones((), dtype=torch.float64))


def test_a_map_of_no_queries_is_finished_without_dividing_by_zero():
    assert finish_map(torch.zeros(1, 1, 0, 3), 0).shape == (1, 1, 0, 3)


# ------------------------------------------------------------------------------------------------------------------ top


def found_top(s: list[list[float]], top: int, cuts: tuple[int, ...] = (0,)) -> tuple[list, list, list]:
    found = whole(torch.tensor([[s]]), cuts, ["top"], top=top)
    return tuple(found[f"top_{part}"][0, 0].tolist() for part in ("key", "tied", "weight"))


def test_the_lower_keys_are_taken_among_equals_in_one_tile_and_across_tiles():
    for cuts in ((0,), (0, 3), (0, 1, 2, 3, 4, 5), (0, 5)):
        keys, tied, weights = found_top([[1.0, 3.0, 1.0, 3.0, 1.0, 1.0]], 4, cuts)
        assert (keys, tied) == ([[1, 3, 0, 2]], [True])
        assert weights[0][0] == weights[0][1] > weights[0][2] == weights[0][3]


@pytest.mark.parametrize("cuts", [(0,), (0, 64), (0, 10, 90)])
def test_of_constant_scores_the_first_keys_are_taken(cuts):
    keys, tied, weights = found_top([[0.5] * 101], 3, cuts)
    assert (keys, tied) == ([[0, 1, 2]], [True])
    assert weights[0] == pytest.approx([1 / 101] * 3)


def test_a_tie_is_declared_only_while_it_lasts():
    # Keys 0 to 2 tie until 3 and 4 push them out; 5 is weaker, and 6 ties with the last one taken.
    row = [2.0, 2.0, 2.0, 5.0, 4.0, 1.0]
    for cuts in ((0,), (0, 3), (0, 1, 4)):
        assert found_top([row], 2, cuts)[:2] == ([[3, 4]], [False])
        assert found_top([row], 3, cuts)[:2] == ([[3, 4, 0]], [True])
        assert found_top([row], 5, cuts)[:2] == ([[3, 4, 0, 1, 2]], [False])
        assert found_top([[*row, 4.0]], 2, cuts)[:2] == ([[3, 4]], [True])


def test_fewer_visible_than_asked_for_leave_no_key_and_no_weight():
    keys, tied, weights = found_top([[-inf, 1.0, -inf, 1.0], [-inf] * 4], 3, (0, 2))
    assert (keys, tied) == ([[1, 3, -1], [-1, -1, -1]], [False, False])
    assert weights == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_more_than_there_are_keys_are_filled_up():
    keys, tied, weights = found_top([[1.0, 2.0]], 5, (0, 1))
    assert (keys, tied) == ([[1, 0, -1, -1, -1]], [False])
    assert weights[0][2:] == [0.0, 0.0, 0.0]


def test_all_keys_are_never_tied_with_one_that_is_left():
    assert found_top([[1.0, 1.0, 1.0]], 3)[:2] == ([[0, 1, 2]], [False])


def test_top_of_no_keys_is_empty_of_links():
    found = MEASURES["top"]((1, 1, 2, 0), torch.full((1, 1, 2), -inf), MeasureOptions(frozenset(["top"]), top=3))
    made = found.result(torch.full((1, 1, 2), -inf), None)
    assert made["top_key"].tolist() == [[[[-1] * 3] * 2]]
    assert not bool(made["top_tied"].any())


def test_nan_scores_do_not_stop_a_pass():
    found = whole(torch.tensor([[[[1.0, nan, 2.0, 0.0]]]]), (0, 2), list(NAMES))
    assert bool(found["entropy"].isnan().all())
    assert bool(found["max_logit"].isnan().all())


def test_weights_of_links_come_from_their_scores():
    lse, short = torch.tensor([[[2.0, -inf]]]), 1
    score, key = torch.tensor([[[[2.0, 1.0], [-inf, -inf]]]]), torch.tensor([[[[4, 0], [-1, -1]]]])
    made = finish_top(score, key, torch.zeros(1, 1, 2, dtype=torch.bool), lse, short)
    assert made["top_weight"].tolist() == [[[[1.0, pytest.approx(np.exp(-1)), 0.0], [0.0, 0.0, 0.0]]]]
    assert made["top_key"].tolist() == [[[[4, 0, -1], [-1, -1, -1]]]]
