"""Runs of visible tiles: every stretch once, as views where keys adjoin, and what is added to their scores."""

from math import inf

import pytest
import torch

from regard import masks
from regard.masks import mask as rules
from regard.masks import tiles
from regard.masks.biases import Bias
from regard.masks.tiles import Terms, TileRun, gathered, pieces, runs, visible_tiles

CPU = torch.device("cpu")
H, N, D = 3, 101, 5
MASKS = {
    "nothing hidden": None,
    "window": masks.window(5, 3),
    "wide window": masks.window(21, 17),
    "window and globals": masks.window(5, 3) | masks.globals([2, 41]),
    "the last query is global": masks.window(1, 1) | masks.globals([100]),
    "dilated": masks.dilated(3, 2, 5),
    "random blocks per head": masks.random_blocks(N, 8, count=2, seed=0, num_heads=H),
    "padding per batch row": masks.window(7, 7) & masks.padding([N, 13]),
    "some queries look": masks.window(5, 3) & masks.queries(torch.arange(N)[None] % 5 != 1),
    "documents": masks.documents(torch.arange(N) // 23),
    "causal": masks.causal(),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "ROWS", (8, 16))
    monkeypatch.setattr(tiles, "COLS", 4)
    monkeypatch.setattr(rules, "_KEPT", {})


def listed(mask, n=N):
    return visible_tiles(mask, n, n, CPU)


def every_run(mask, n=N):
    return [(panel, run) for panel in listed(mask, n).panels for run in runs(panel)]


def heads_of_tokens(tokens_first):
    x = torch.arange(H * N * D, dtype=torch.float32)
    return x.view(N, H, D).transpose(0, 1) if tokens_first else x.view(H, N, D)


@pytest.mark.parametrize("name", MASKS)
def test_runs_hold_every_stretch_once_and_in_order(name):
    for panel in listed(MASKS[name]).panels:
        for group in panel.groups:
            of_group = [run for run in runs(panel) if run.group is group]
            units = [u for run in of_group for u in range(run.units.start, run.units.stop)]
            assert units == list(range(len(group.row)))
            for run in of_group:
                assert group.lead[run.units].eq(run.lead).all()


@pytest.mark.parametrize("tokens_first", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_queries_and_keys_of_a_run_are_those_that_are_listed(name, tokens_first):
    x = heads_of_tokens(tokens_first)
    for panel, run in every_run(MASKS[name]):
        queries = panel.queries[run.group.row[run.units], : run.rows]
        keys = run.group.keys(run.units)[0]
        assert torch.equal(run.queries(x), x[:, queries].transpose(0, 1))
        assert torch.equal(run.keys(x), x[:, keys].transpose(0, 1))


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("name", MASKS)
def test_run_cut_into_pieces_is_the_same_run(name, most):
    x = heads_of_tokens(True)
    for _, run in every_run(MASKS[name]):
        pieces = list(run.cut(most))
        assert max(piece.count for piece in pieces) <= most
        assert torch.equal(torch.cat([piece.queries(x) for piece in pieces]), run.queries(x))
        assert torch.equal(torch.cat([piece.keys(x) for piece in pieces]), run.keys(x))


def test_piece_has_a_stretch_even_where_none_would_fit():
    run = max((run for _, run in every_run(masks.window(5, 3))), key=lambda run: run.count)
    assert [piece.count for piece in run.cut(0)] == [1] * run.count


@pytest.mark.parametrize("name", [name for name in MASKS if "per" not in name])
def test_what_is_put_back_stands_where_its_queries_stood(name):
    x = heads_of_tokens(True)
    total = torch.full((N, H, D), -1.0)
    for _, run in every_run(MASKS[name]):
        run.put(total, run.queries(x))
    looks = torch.ones(N, dtype=torch.bool) if MASKS[name] is None else MASKS[name].dense(N).any(1)
    assert torch.equal(total[looks], x.transpose(0, 1)[looks])


def test_what_one_head_gives_is_put_back_into_that_head():
    x = heads_of_tokens(True)
    total = torch.full((N, H, D), -1.0)
    for _, run in every_run(MASKS["random blocks per head"]):
        one = slice(run.lead, run.lead + 1)
        run.put(total[:, one], run.queries(x[one]))
    assert torch.equal(total, x.transpose(0, 1))


def test_window_is_one_run_of_views_and_its_ends():
    x = heads_of_tokens(True)
    widest = max((run for _, run in every_run(masks.window(5, 3))), key=lambda run: run.count)
    assert widest.count == N // widest.rows - 1
    assert widest.step == widest.rows
    for part in (widest.queries(x), widest.keys(x)):
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_keys_that_all_see_are_one_view_for_all():
    x = heads_of_tokens(True)
    [run] = [run for _, run in every_run(None, n=96)]
    assert run.step == 0
    assert run.keys(x).stride()[0] == 0
    assert run.keys(x).shape == (96 // run.rows, H, 96, D)


def test_short_last_stretch_is_a_run_of_its_own_without_what_fills_up():
    found = every_run(masks.window(5, 3))
    full = listed(masks.window(5, 3)).rows
    short = [run for _, run in found if run.rows != full]
    assert [(run.count, run.rows) for run in short] == [(1, N % full)]
    assert short[0].tokens[-1] == N - 1


def test_queries_that_stand_apart_share_a_run_where_keys_are_gathered():
    of_one_head = [run for _, run in every_run(MASKS["random blocks per head"]) if run.lead == 1]
    assert any(run.query is None and run.count > 1 for run in of_one_head)
    assert all(run.key is None for run in of_one_head if run.query is None)


def test_runs_are_found_once():
    panel = listed(masks.window(5, 3)).everyone
    first, again = list(runs(panel)), list(runs(panel))
    assert all(a is b for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("tokens_first", [True, False])
def test_gathered_tokens_are_those_asked_for(tokens_first):
    x, at = heads_of_tokens(tokens_first), torch.tensor([[7, 0, 7], [100, 3, 2]])
    assert torch.equal(gathered(x, at), x[:, at].transpose(0, 1))


# ------------------------------------------------------------------------------------------------------- what is added


class Slope(Bias):
    """i·1000 + j, which no two tiles have alike."""

    leading = (1, 1)

    def bind(self, nq, nk, device, dtype):
        return lambda b, h, i, j: (i * 1000 + j).to(dtype)


def terms(bias=None, fixed=True, dtype=torch.float32):
    return Terms(bias, None if bias is None else bias.bind(N, N, CPU, dtype), fixed, dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("bias", [None, Slope()], ids=["mask alone", "with a bias"])
@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("nothing hidden", "random blocks per head")])
def test_added_terms_are_the_bias_and_minus_infinity_where_hidden(name, bias, fixed):
    dense = MASKS[name].dense(N).expand(*MASKS[name].leading, N, N)[:, 0]
    slope = torch.arange(N)[:, None] * 1000.0 + torch.arange(N)
    for panel, run in every_run(MASKS[name]):
        cells, blank = terms(bias, fixed).of(run, run.lead, torch.arange(H))
        queries, (keys, real) = panel.queries[run.group.row[run.units], : run.rows], run.group.keys(run.units)
        at = queries.unsqueeze(-1), keys.unsqueeze(1)
        seen = dense[run.lead][at] & real.unsqueeze(1)
        if cells is None:
            assert bias is None
            assert seen.all()
            continue
        expected = torch.where(seen, torch.zeros(()) if bias is None else slope[at], -inf)
        assert torch.equal(cells, expected.unsqueeze(1))
        assert blank or not (expected == -inf).all(-1).any()


def test_row_that_sees_nothing_is_announced():
    [*found] = every_run(masks.window(5, 3) & ~masks.queries([50]))
    announced = [run for _, run in found if terms().of(run, 0, torch.arange(H))[1]]
    assert announced
    assert all(50 in run.tokens for run in announced)


def test_tiles_that_look_alike_are_one_view():
    widest = max((run for _, run in every_run(masks.window(5, 3))), key=lambda run: run.count)
    cells, _ = terms().of(widest, 0, torch.arange(H))
    assert cells.shape == (widest.count, 1, widest.rows, widest.group.width)
    assert cells.stride(0) == 0


def test_nothing_is_added_where_all_is_seen():
    [(_, run)] = every_run(None, n=96)
    assert terms().of(run, 0, torch.arange(H)) == (None, False)
    assert terms().kept(run.group)


def longest_run(mask) -> TileRun:
    return max((run for _, run in every_run(mask)), key=lambda run: run.count)


def test_terms_are_kept_for_each_bias_and_dtype_and_bounded():
    group = longest_run(masks.window(5, 3)).group
    biases = [Slope() for _ in range(2 * tiles.MOST_KEPT)]
    for bias in biases:
        assert terms(bias).kept(group)
        assert terms(bias)._added(group) is terms(bias)._added(group)
    assert terms(biases[-1], dtype=torch.float64)._added(group).cells.dtype == torch.float64
    kept = [value for key, value in group.kept.items() if isinstance(key, tuple)]
    assert len(kept) == tiles.MOST_KEPT
    assert kept[-1][0] is biases[-1]


def test_terms_that_are_too_many_or_change_are_not_kept(monkeypatch):
    group = longest_run(masks.window(5, 3)).group
    assert not terms(Slope(), fixed=False).kept(group)
    monkeypatch.setattr(tiles, "MOST_ADDED_CELLS", group.queries.shape[1] * group.width - 1)
    assert not terms(Slope()).kept(group)


def test_terms_made_in_inference_can_be_trained_with():
    run = longest_run(masks.window(5, 3))
    with torch.inference_mode():
        terms().of(run, 0, torch.arange(H))
    assert not terms()._added(run.group).cells.is_inference()


def test_runs_are_cut_only_where_something_is_copied_or_made():
    window = masks.window(5, 3)
    whole = [run.count for run in runs(listed(window).everyone)]
    assert [run.count for run in pieces(listed(window).everyone, terms(), 1, D) if run.key is not None] == [
        run.count for run in runs(listed(window).everyone) if run.key is not None
    ]
    made = [run.count for run in pieces(listed(window).everyone, terms(Slope(), fixed=False), 1, D)]
    assert made == [1] * sum(whole)


def test_pieces_hold_no_more_numbers_than_are_allowed():
    panel = listed(MASKS["window and globals"]).everyone
    copied = [run for run in pieces(panel, terms(), 1000, D) if run.key is None]
    assert all(run.count == 1 or run.count * run.group.width * 2 * D <= 1000 for run in copied)
    assert any(run.count > 1 for run in copied)
