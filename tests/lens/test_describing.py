"""What is said of a head is what the view holds; the strongest links are those of the exact weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import regard
from regard import masks
from regard.lens.display import describe_heads, strongest_links
from regard.lens.files.saving import make_overview
from regard.lens.patterns import label
from regard.lens.view import KnownVisibility, View

B, H, NQ, NK, D = 2, 3, 7, 11, 5


def view(mask: object = None, nq: int = NQ, nk: int = NK) -> View:
    q, k = torch.randn(B, H, nq, D), torch.randn(B, H, nk, D)
    return regard.look(q, k, k, mask=mask)


@pytest.mark.parametrize("batch", range(B))
def test_head_is_described_by_its_measures(batch):
    seen = view(masks.causal())
    lines = describe_heads(seen, batch)
    assert [(line.batch, line.head) for line in lines] == [(batch, h) for h in range(H)]
    for h, line in enumerate(lines):
        assert line.entropy == seen.mean("entropy")[batch, h].item()
        assert line.effective == seen.mean("effective")[batch, h].item()
        received = seen.received[batch, h]
        assert line.keys == (int(received.argmax()),) * 2
        assert line.share == pytest.approx(received.max().item() / NQ)
        assert line.patterns == {name: scores[batch, h].item() for name, scores in seen.patterns().items()}
        assert list(line.labels) == label(seen.patterns())[batch][h]


def test_what_was_not_measured_is_none():
    bare = View((B, H, NQ, NK), {"lse": torch.zeros(B, H, NQ)})
    line = describe_heads(bare)[1]
    assert (line.entropy, line.effective, line.keys, line.share, line.patterns, line.labels) == (None,) * 4 + ({}, ())
    with pytest.raises(LookupError, match="which"):
        strongest_links(bare)


def test_pooled_mass_names_a_part_of_the_keys():
    seen = view(nq=70, nk=150)
    small = make_overview(seen)
    for h, line in enumerate(describe_heads(small, 1)):
        part = int(small.received[1, h].argmax())
        assert line.keys == (part * 150 // 64, (part + 1) * 150 // 64 - 1)
        assert line.share == pytest.approx(small.received[1, h, part].item() / 70)
        assert line.entropy == seen.mean("entropy")[1, h].item()


@pytest.mark.parametrize(("nq", "nk"), [(0, 3), (3, 0)])
def test_calls_of_nothing_have_heads_and_no_links(nq, nk):
    held = {"lse": torch.zeros(B, H, nq), "received": torch.zeros(B, H, nk), "top_weight": torch.zeros(B, H, nq, 8)}
    held |= {"top_key": torch.full((B, H, nq, 8), -1), "top_tied": torch.zeros(B, H, nq, dtype=torch.bool)}
    x = View((B, H, nq, nk), held)
    assert [line.keys for line in describe_heads(x)] == [None] * H
    assert strongest_links(x) == []


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(2, 1), masks.padding([4, 9])], ids=str)
@pytest.mark.parametrize("head", [None, 2])
def test_links_are_the_largest_weights_of_queries_that_have_a_choice(mask, head):
    seen = view(mask, nq=NK)
    weights = seen.tile(slice(None), slice(None))[1].double().numpy()
    choice = (weights > 0).sum(-1) > 1
    cells = [at for at in np.ndindex(weights.shape) if choice[at[:2]] and head in (None, at[0])]
    best = sorted(cells, key=lambda at: -weights[at])[:13]
    links = strongest_links(seen, batch=1, head=head, count=13)
    assert [(link.head, link.query, link.key) for link in links] == [tuple(map(int, at)) for at in best]
    np.testing.assert_allclose([link.weight for link in links], [weights[at] for at in best], rtol=1e-5)


def test_fewer_links_than_asked_for_where_no_more_are_visible():
    links = strongest_links(view(masks.window(1, 0), nq=3, nk=3), head=0, count=50)
    assert sorted((link.query, link.key) for link in links) == [(1, 0), (1, 1), (2, 1), (2, 2)]


def test_broken_weights_make_no_links():
    q = torch.randn(1, 1, 4, D)
    q[0, 0, 2] = torch.nan
    links = strongest_links(regard.look(q, q.nan_to_num(0), q), count=16)
    assert len(links) == 12
    assert 2 not in [link.query for link in links]


def test_where_counts_are_unknown_every_query_has_links():
    seen = replace(view(masks.causal(), nq=3, nk=3), place=KnownVisibility())
    assert (0, 0) in [(link.query, link.key) for link in strongest_links(seen, head=1)]


def test_numpy_views_with_other_axes_are_described_alike():
    x = np.random.default_rng(0).normal(size=(B, NQ, D))
    seen = regard.look(x, x, x)
    assert seen.in_torch().entropy.shape == (B, 1, NQ)
    assert describe_heads(seen, 1)[0].entropy == pytest.approx(seen.mean("entropy")[1])
    assert strongest_links(seen, batch=1, count=1)[0].head == 0


@pytest.mark.parametrize("batch", [-1, B])
def test_batch_row_that_is_not_there_is_refused(batch):
    message = rf"batch.*{batch}.*{B}.*0"
    with pytest.raises(IndexError, match=message):
        describe_heads(view(), batch)
    with pytest.raises(IndexError, match=message):
        strongest_links(view(), batch=batch)


def test_head_that_is_not_there_is_refused():
    with pytest.raises(IndexError, match=rf"head.*{H}.*{H}.*0"):
        strongest_links(view(), head=H)


def test_key_that_receives_most_is_not_told_where_one_receives_nan():
    x = torch.randn(1, H, NQ, D)
    x[0, 1, 2] = float("nan")
    heads = describe_heads(regard.look(x, x, x))
    assert [(head.keys is None, head.share is None) for head in heads] == [(h == 1, h == 1) for h in range(H)]
