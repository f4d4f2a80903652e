"""Calls of one run as one view: against the dense weights, written by hand into one matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.lens.assembly import AssembledWeights, StepLink, assemble
from regard.lens.measures.weights import StoredWeights
from regard.lens.view import KeyTokens, KnownVisibility, View

B, H = 3, 2
ALL = slice(None)

# (queries, keys, first key) of each call: a prompt, two steps that see everything, two that see the latest four.
CALLS = [(5, 5, 0), (1, 6, 0), (1, 7, 0), (1, 4, 4), (1, 4, 5)]
NQ, NK = 9, 9
LINKS = [StepLink(), *(StepLink(after=n, first=first, known=nk - 1) for n, (_, nk, first) in enumerate(CALLS[1:]))]
MOVES = [None, (0, 0, 1), None, (2, 1, 0), None]  # which batch row of the call before each one was


def parts() -> list[Tensor]:
    return [torch.rand(B, H, nq, nk, dtype=torch.float64).softmax(-1) for nq, nk, _ in CALLS]


def dense(made: list[Tensor], ancestors: list[list[int]]) -> Tensor:
    whole = torch.zeros(B, H, NQ, NK, dtype=torch.float64)
    at = 0
    for p, (nq, nk, first), rows in zip(made, CALLS, ancestors, strict=True):
        whole[:, :, at : at + nq, first : first + nk] = p[rows]
        at += nq
    return whole


IN_PLACE = [[0, 1, 2]] * 5
# From the last call back: row b of call 3 was row (2, 1, 0)[b] of calls 2 and 1; and of call 0 those are (0, 0, 1).
MOVED = [[1, 0, 0], [2, 1, 0], [2, 1, 0], [0, 1, 2], [0, 1, 2]]


def case(moved: bool) -> tuple[list[Tensor], list[StepLink], Tensor]:
    made = parts()
    links = (
        [StepLink(k.after, k.first, k.known, rows) for k, rows in zip(LINKS, MOVES, strict=True)] if moved else LINKS
    )
    return made, links, dense(made, MOVED if moved else IN_PLACE)


def views(made: list[Tensor], **given: Any) -> list[View]:
    found = []
    for p in made:
        held = {
            "entropy": -torch.xlogy(p, p).sum(-1),
            "received": p.sum(2),
            "lse": p.sum(-1),
            "top_key": p.topk(2).indices,
            "top_weight": p.topk(2).values,
            "top_tied": torch.zeros(p.shape[:3], dtype=torch.bool),
            "map": p,
            "pattern own": p.new_zeros(B, H),
        }
        found.append(View(tuple(p.shape), held, weights=StoredWeights(p), size=5, **given))
    return found


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (ALL, ALL),
        (slice(4, 7), slice(3, 8)),
        (torch.tensor([8, 0, 5, 5]), torch.tensor([7, 2])),
        (slice(0, 0), ALL),
        (ALL, slice(2, 2)),
    ],
)
def test_any_tile_is_that_of_the_whole(rows: Any, cols: Any, moved: bool) -> None:
    made, links, truth = case(moved)
    view = assemble(views(made), links)
    assert view.weights.sizes == (B, H, NQ, NK)
    assert torch.equal(view.weights.tile(rows, cols), truth[:, :, rows][..., cols])


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(
    "keys", [torch.arange(NQ), torch.arange(NQ) - 1, torch.arange(NQ).flip(0), torch.full((NQ,), 8)]
)
def test_pairs_are_those_of_the_whole(keys: Tensor, moved: bool) -> None:
    made, links, truth = case(moved)
    index = keys.clamp(min=0).expand(B, H, NQ).unsqueeze(-1)
    chosen = torch.where(keys < 0, 0.0, truth.gather(-1, index).squeeze(-1))
    assert torch.equal(assemble(views(made), links).weights.pairs(keys), chosen)


@pytest.mark.parametrize("moved", [False, True])
def test_pairs_may_differ_by_batch_row_and_head(moved: bool) -> None:
    made, links, truth = case(moved)
    keys = torch.randint(0, NK, (B, H, NQ))
    chosen = truth.gather(-1, keys.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(assemble(views(made), links).weights.pairs(keys), chosen)


@pytest.mark.parametrize("moved", [False, True])
def test_measures_are_those_of_the_whole(moved: bool) -> None:
    made, links, truth = case(moved)
    view = assemble(views(made), links)
    torch.testing.assert_close(view.entropy, -torch.xlogy(truth, truth).sum(-1))
    torch.testing.assert_close(view.received, truth.sum(2))
    assert torch.equal(view.top(2).index, truth.topk(2).indices)
    assert torch.equal(view.top(2).weight, truth.topk(2).values)
    torch.testing.assert_close(view.map(64), truth)
    torch.testing.assert_close(view.map(3), truth.view(B, H, 3, 3, 3, 3).sum((3, 5)) / 3)
    assert set(view.patterns()) >= {"own", "previous"}  # scored anew: those of single calls are not those of the whole
    torch.testing.assert_close(view.patterns()["own"], truth.diagonal(dim1=2, dim2=3).mean(-1))


def test_keys_beyond_what_is_visible_stay_marked_in_links() -> None:
    made, links, _ = case(moved=False)
    few = views(made)
    few[3].held["top_key"] = torch.full((B, H, 1, 2), -1)
    assert (assemble(few, links).held["top_key"][:, :, 7] == -1).all()


def test_what_only_some_calls_have_the_whole_has_not() -> None:
    made, links, _ = case(moved=False)
    few = views(made)
    few[2].weights = None
    del few[1].held["received"]
    view = assemble(few, links)
    assert view.weights is None
    with pytest.raises(LookupError, match=r"received.*q.*k"):
        view.received  # noqa: B018
    with pytest.raises(LookupError, match="output"):
        view.output  # noqa: B018


def test_run_that_begins_late_begins_with_its_own_keys() -> None:
    made, links, truth = case(moved=False)
    late = [StepLink(), *links[4:]]
    late[0].first = links[3].first
    view = assemble(views(made)[3:], late)
    assert torch.equal(view.weights.tile(ALL, ALL), truth[:, :, 7:, 4:])


def test_single_call_is_its_own_view() -> None:
    (view,) = views(parts()[:1])
    assert assemble([view], [StepLink()]) is view


@pytest.mark.parametrize("moved", [False, True])
def test_outputs_follow_one_another(moved: bool) -> None:
    made, links, _ = case(moved)
    few = views(made)
    outputs = [torch.randn(B, H, nq, 7) for nq, _, _ in CALLS]
    for view, output in zip(few, outputs, strict=True):
        view.given_output = output
    whole = torch.cat([o[rows] for o, rows in zip(outputs, MOVED if moved else IN_PLACE, strict=True)], 2)
    assert torch.equal(assemble(few, links).output, whole)


def test_padding_is_what_no_call_sees() -> None:
    """Two keys on the left are padding in row 1; the first call had room for two more, which nobody saw yet."""
    first = torch.zeros(B, 4, dtype=torch.bool)
    first[1, 0], first[:, 2:] = True, True
    second = torch.zeros(B, 4, dtype=torch.bool)
    second[1, 0] = second[:, 3] = True
    made = [torch.rand(B, H, 2, 4), torch.rand(B, H, 1, 4)]
    few = [
        View((B, H, p.shape[2], 4), {}, place=KnownVisibility(torch.full((1, 1, p.shape[2]), n), padding, offset))
        for p, padding, offset, n in zip(made, (first, second), (0, 2), (2, 3), strict=True)
    ]
    view = assemble(few, [StepLink(), StepLink(0, 0, 2)])
    truth = torch.tensor([[False, False, False, True], [True, False, False, True], [False, False, False, True]])
    assert torch.equal(view.place.padding, truth)
    assert view.place.visible.tolist() == [[[2, 2, 3]]]
    assert view.place.offset == 0


def test_key_that_was_dropped_counts_as_the_calls_before_saw_it() -> None:
    early = torch.tensor([[True, False, False]])
    few = [
        View((1, H, 3, 3), {}, place=KnownVisibility(None, early)),
        View((1, H, 1, 2), {}, place=KnownVisibility(None, None)),
    ]
    view = assemble(few, [StepLink(), StepLink(0, 2, 1)])
    assert view.place.padding.tolist() == [[True, False, False, False]]
    assert view.place.offset is None


def test_cross_attention_has_no_offset() -> None:
    few = [View((B, H, 1, 7), {}, kind="cross") for _ in range(3)]
    view = assemble(few, [StepLink(), StepLink(0, 0, 7), StepLink(1, 0, 7)])
    assert (view.sizes, view.place.offset, view.place.padding) == ((B, H, 3, 7), None, None)


def test_tokens_are_those_of_a_call_that_has_all_keys() -> None:
    tokens = KeyTokens(torch.arange(6).view(1, 6))
    few = [View((B, H, 5, 5), {}), View((B, H, 1, 6), {}, tokens=tokens)]
    assert assemble(few, [StepLink(), StepLink(0, 0, 5)]).tokens is tokens
    assert assemble(few, [StepLink(), StepLink(0, 1, 5)]).tokens == KeyTokens()


def test_sink_counts_in_effective_keys_of_the_whole() -> None:
    q, k = torch.randn(B, H, 4, 5, dtype=torch.float64), torch.randn(B, H, 4, 5, dtype=torch.float64)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    few = [regard.look(q[:, :, a:b], k[:, :, :b], k[:, :, :b], sinks=sinks) for a, b in ((0, 3), (3, 4))]
    scores = (q @ k.mT / 5**0.5).masked_fill(torch.arange(4) > torch.tensor([2, 2, 2, 3]).view(4, 1), -torch.inf)
    truth = torch.cat([scores, sinks.view(H, 1, 1).expand(B, H, 4, 1)], -1).softmax(-1)
    torch.testing.assert_close(assemble(few, [StepLink(), StepLink(0, 0, 3)]).effective, 1 / truth.square().sum(-1))


def test_weights_begin_at_key_0_in_place_unless_told_otherwise() -> None:
    made = [torch.rand(B, H, 2, 3), torch.rand(B, H, 1, 4)]
    whole = AssembledWeights([StoredWeights(p) for p in made])
    assert whole.sizes == (B, H, 3, 4)
    assert torch.equal(whole.tile(ALL, ALL)[:, :, :2, :3], made[0])
