"""Pattern scores against loops over dense weights, heads planted on purpose, and what is refused."""

from math import log, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import masks
from regard.backends import reference
from regard.backends.call import prepare
from regard.lens.measures.weights import ComputedWeights, StoredWeights, Weights
from regard.lens.patterns import (
    KEYS,
    MEANING,
    NAMES,
    THRESHOLDS,
    KeyTokens,
    KnownVisibility,
    Patterns,
    label,
    label_rest,
    measure,
)

B, H, HKV, N, D = 3, 4, 2, 11, 5
PADDING = {
    "none": None,
    "left": torch.arange(N) < torch.tensor([0, 2, 5]).unsqueeze(1),
    "right": torch.arange(N) >= torch.tensor([11, 8, 1]).unsqueeze(1),
    "inside": torch.tensor([[0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0]]).bool(),
    "everything": torch.tensor([[False], [True], [False]]).expand(B, N),
}
MASKS = {
    "full": None,
    "causal": masks.causal(),
    "window": masks.window(2, 1),
    "upper left": masks.causal(offset=0),
    "rows of their own": masks.causal(offset=[0, -2, 4]),
}


def measured(weights: Weights, **told: object) -> Patterns:
    place = KnownVisibility(None, told.pop("padding", None), told.pop("offset", None))
    tokens = KeyTokens(told.pop("ids", None), told.pop("delimiters", None))
    return measure(weights, place, tokens, **told)


def score(weights: Weights, **told: object) -> dict[str, Tensor]:
    return measured(weights, **told).scores


def looked_at(nq: int = N, nk: int = N, mask: masks.Mask | None = None, sinks: bool = False) -> tuple[Weights, Tensor]:
    """Weights on demand of a random call in fp64, and the same weights dense, (B, H, Nq, Nk)."""
    q, k, v = (torch.randn(B, h, n, D, dtype=torch.float64) for h, n in ((H, nq), (HKV, nk), (HKV, nk)))
    call = prepare(3 * q, k, v, mask=mask, sinks=torch.zeros(H, dtype=torch.float64) if sinks else None)
    made = reference.stages(call)
    dense = made.weights
    exponent = made.masked.exp().sum(-1) + (1.0 if sinks else 0.0)
    return ComputedWeights(call, exponent.log()), dense


def by_hand(
    dense: Tensor,
    name: str,
    *,
    offset: Tensor | int | None = None,
    padding: Tensor | None = None,
    ids: Tensor | None = None,
    kind: str = "self",
) -> Tensor:
    """The score in plain loops: for each query the keys its pattern names, one at a time."""
    means = []
    for of in rows_by_hand(dense, name, offset=offset, padding=padding, ids=ids, kind=kind):
        counted = [[mass for mass, _ in one if mass is not None] for one in of]
        means.append([sum(one) / max(1, len(one)) for one in counted])
    return torch.tensor(means, dtype=dense.dtype).view(dense.shape[:2])


def shares_by_hand(dense: Tensor, name: str, beside: bool, **told: object) -> Tensor:
    """The part of all attention of real queries: with the first token's, or beside it."""
    found = rows_by_hand(dense, name, **told)
    means = [[sum((m or 0.0) - beside * f for m, f in one) / max(1, len(one)) for one in of] for of in found]
    return torch.tensor(means, dtype=dense.dtype).view(dense.shape[:2])


def rows_by_hand(
    dense: Tensor,
    name: str,
    *,
    offset: Tensor | int | None = None,
    padding: Tensor | None = None,
    ids: Tensor | None = None,
    kind: str = "self",
) -> list[list[list[tuple[float | None, float]]]]:
    """By batch row, head and real query: the weight on the keys that a pattern names, and on the first token if named.

    None for a query that it names no key for.
    """
    batch, heads, nq, nk = dense.shape
    place = torch.as_tensor(nk - nq if offset is None else offset).reshape(-1, 1) if not _two(offset) else offset
    place = place.expand(batch, heads)
    pad = torch.zeros(batch, nk, dtype=torch.bool) if padding is None else padding.expand(batch, nk)
    out = [[list[tuple[float | None, float]]() for _ in range(heads)] for _ in range(batch)]
    for b in range(batch):
        first = [j for j in range(nk) if not pad[b, j]][:1]
        for h in range(heads):
            for i in range(nq):
                at = i + int(place[b, h])
                if kind == "self" and 0 <= at < nk and pad[b, at]:
                    continue
                row_ids = None if ids is None else ids.expand(batch, nk)[b].tolist()
                keys = [j for j in named(name, at, pad[b], row_ids) if 0 <= j < nk and not pad[b, j]]
                total = sum(float(dense[b, h, i, j]) for j in keys) if keys else None
                out[b][h].append((total, sum(float(dense[b, h, i, j]) for j in keys if j in first)))
    return out


def _two(offset: object) -> bool:
    return isinstance(offset, Tensor) and offset.ndim == 2


def named(name: str, at: int, pad: Tensor, ids: list[int] | None) -> list[int]:
    n = len(pad)
    if name in ("own", "previous", "next"):
        return [at + {"own": 0, "previous": -1, "next": 1}[name]]
    if name == "neighbours":
        return [at - 2, at - 1, at + 1, at + 2]
    if name == "first":
        return [j for j in range(n) if not pad[j]][:1]
    if not 0 <= at < n:
        return []
    same = [j for j in range(n) if ids[j] == ids[at] and not pad[j]]
    before, after = [j for j in same if j < at], [j for j in same if j > at]
    return before[-1:] + after[:1] if name == "same token" else [j + 1 for j in before[-1:]]


BY_PAIR = ("own", "previous", "next", "first", "neighbours", "same token", "induction")


def agree(ours: Tensor, hand: Tensor) -> None:
    torch.testing.assert_close(ours, hand, rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------------------------------------------- against plain loops


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pad", PADDING)
def test_every_pattern_of_pairs_equals_the_plain_loop(mask, pad):
    weights, dense = looked_at(mask=MASKS[mask])
    ids = torch.randint(0, 4, (B, N))
    ours = score(weights, padding=PADDING[pad], ids=ids)
    assert tuple(ours) == BY_PAIR
    for name in BY_PAIR:
        agree(ours[name], by_hand(dense, name, padding=PADDING[pad], ids=ids))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pad", PADDING)
def test_shares_of_all_attention_equal_the_plain_loop(mask, pad):
    weights, dense = looked_at(mask=MASKS[mask])
    ids = torch.randint(0, 4, (B, N))
    ours = measured(weights, padding=PADDING[pad], ids=ids)
    for name in BY_PAIR:
        agree(ours.shares[name], shares_by_hand(dense, name, False, padding=PADDING[pad], ids=ids))
    assert tuple(ours.beside) == tuple(name for name in BY_PAIR if name != "first")
    for name, part in ours.beside.items():
        agree(part, shares_by_hand(dense, name, True, padding=PADDING[pad], ids=ids))


@pytest.mark.parametrize(("nq", "nk"), [(5, 11), (13, 7), (1, 11), (3, 1)])
@pytest.mark.parametrize("offset", [None, 0, 2, torch.tensor([0, 3, -2]), torch.tensor([[0, 1, 2, 3]])])
def test_queries_stand_where_the_offset_puts_them(nq, nk, offset):
    weights, dense = looked_at(nq, nk)
    ids, padding = torch.randint(0, 3, (1, nk)), torch.rand(B, nk) < 0.2
    ours = score(weights, offset=offset, padding=padding, ids=ids)
    for name in BY_PAIR:
        agree(ours[name], by_hand(dense, name, offset=offset, padding=padding, ids=ids))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-3, 6), st.integers(1, 5), st.integers(0, 999))
def test_random_sizes_offsets_tokens_and_padding_equal_the_plain_loop(nq, nk, offset, words, seed):
    torch.manual_seed(seed)
    dense = torch.rand(2, 3, nq, nk, dtype=torch.float64).softmax(-1)
    padding, ids = torch.rand(2, nk) < 0.25, torch.randint(0, words, (2, nk))
    ours = score(StoredWeights(dense), offset=offset, padding=padding, ids=ids)
    for name in BY_PAIR:
        agree(ours[name], by_hand(dense, name, offset=offset, padding=padding, ids=ids))


def test_cross_attention_has_the_patterns_that_need_no_common_positions():
    weights, dense = looked_at(5, N)
    padding = PADDING["left"]
    visible = torch.full((1, 1, 5), N)
    ours = score(
        weights,
        kind="cross",
        padding=padding,
        entropy=-(dense * dense.log()).sum(-1),
        visible=visible,
        received=dense.sum(-2),
        delimiters=torch.arange(N).eq(7).view(1, N),
    )
    assert tuple(ours) == ("first", "uniform", "delimiter")
    agree(ours["first"], by_hand(dense, "first", padding=padding, kind="cross"))
    agree(ours["delimiter"], dense[..., 7].mean(-1))


def test_sinks_lower_the_scores_by_what_they_take():
    weights, dense = looked_at(sinks=True)
    assert bool((dense.sum(-1) < 1).all())
    agree(score(weights)["own"], dense.diagonal(dim1=-2, dim2=-1).mean(-1))


# ------------------------------------------------------------------------------------------------ from sums of the pass


@pytest.mark.parametrize("pad", ["none", "right"])
def test_uniform_is_the_mean_share_of_the_largest_entropy(pad):
    padding = PADDING[pad]
    _, dense = looked_at(mask=masks.causal())
    entropy = -torch.xlogy(dense, dense).sum(-1)
    ours = score(StoredWeights(dense), entropy=entropy, visible=torch.arange(1, N + 1).view(1, 1, N), padding=padding)
    for b in range(B):
        for h in range(H):
            rows = [i for i in range(1, N) if padding is None or not padding[b, i]]
            shares = [float(entropy[b, h, i]) / log(i + 1) for i in rows]
            assert float(ours["uniform"][b, h]) == pytest.approx(sum(shares) / max(1, len(shares)), rel=1e-12)


def test_uniform_weights_score_one_and_one_key_scores_zero():
    even = torch.full((1, 2, 3, 7), 1 / 7)
    sharp = torch.eye(7)[:3].expand(1, 2, 3, 7)
    for weights, expected in ((even, 1.0), (sharp, 0.0)):
        entropy = -torch.xlogy(weights, weights).sum(-1)
        ours = score(StoredWeights(weights), entropy=entropy, visible=torch.full((1, 1, 3), 7))
        assert ours["uniform"].tolist() == [[pytest.approx(expected, abs=1e-6)] * 2]
        assert bool((ours["uniform"] <= 1).all())


def test_queries_that_see_one_key_or_none_leave_uniform_alone():
    weights = torch.full((1, 1, 3, 7), 1 / 7)
    entropy = torch.tensor([[[log(7), 5.0, 5.0]]])
    ours = score(StoredWeights(weights), entropy=entropy, visible=torch.tensor([[[7, 1, 0]]]))
    assert float(ours["uniform"]) == pytest.approx(1.0)
    nobody = score(StoredWeights(weights), entropy=entropy, visible=torch.tensor([[[1, 1, 0]]]))
    assert float(nobody["uniform"]) == 0.0


def test_delimiter_is_the_mean_weight_on_delimiters():
    _, dense = looked_at(7, N)
    delimiters = torch.rand(B, N) < 0.3
    delimiters[:, 0] = True  # [CLS], which delimits nothing
    ours = score(StoredWeights(dense), received=dense.sum(-2), delimiters=delimiters)
    agree(ours["delimiter"], torch.where(delimiters[:, None, None, 1:], dense[..., 1:], 0).sum(-1).mean(-1))


@pytest.mark.parametrize("name", ["left", "right", "inside", "everything"])
def test_neither_keys_nor_queries_of_padding_count_for_delimiters(name: str):
    weights, dense = looked_at()
    everywhere, padding = torch.ones(1, N, dtype=torch.bool), PADDING[name].expand(B, N)
    ours = score(weights, received=dense.sum(-2), delimiters=everywhere, padding=PADDING[name])
    for b in range(B):
        real = (~padding[b]).nonzero().view(-1)
        rows = dense[b][:, real][..., real[1:]]  # the first token that is no padding is no delimiter
        agree(ours["delimiter"][b], rows.sum(-1).mean(-1) if len(real) else torch.zeros(H, dtype=torch.float64))


# -------------------------------------------------------------------------------------------------------- planted heads


def planted(q: Tensor, k: Tensor, mask: masks.Mask | None = None) -> Weights:
    """Weights of (N, D) queries and keys, sharp enough that the best key takes nearly all."""
    call = prepare(q, k, k, mask=mask, scale=30.0)
    return ComputedWeights(call, reference.stages(call).masked.logsumexp(-1))


@pytest.mark.parametrize(("name", "step"), [("own", 0), ("previous", -1), ("next", 1)])
def test_head_built_to_look_at_one_place_scores_there_and_nowhere_else(name, step):
    n = 29
    ours = score(planted(torch.eye(n).roll(step, 1), torch.eye(n)), ids=torch.randperm(n).view(1, n))
    expected = {name, "neighbours"} if step else {name}
    assert {other for other in ours if float(ours[other]) > 0.9} == expected
    assert all(float(ours[other]) < 0.3 for other in ours if other not in expected)
    assert label(ours) == [[[name]]]


def test_head_built_for_induction_is_found_on_a_repeated_random_sequence():
    words, half = 37, 19
    ids = torch.randperm(words)[:half].repeat(2).view(1, -1)
    what = torch.nn.functional.one_hot(ids[0], words).float()
    before = torch.cat([torch.zeros(1, words), what[:-1]])  # each key carries the token that came before it
    weights = planted(what, before, masks.causal())
    dense = weights.tile(slice(None), slice(None))
    entropy, visible = -torch.xlogy(dense, dense).sum(-1), torch.arange(1, 2 * half + 1).view(1, 1, -1)
    ours = score(weights, ids=ids, entropy=entropy, visible=visible)
    assert float(ours["induction"]) > 0.9
    others = set(ours) - {"induction", "uniform"}  # before the repeat it finds nothing and looks at all alike
    assert all(float(ours[name]) < 0.3 for name in others), ours
    assert label(ours) == [[["induction"]]]


def test_head_built_to_look_at_the_same_token_is_found():
    ids = torch.randperm(17).repeat(2).view(1, -1)
    what = torch.nn.functional.one_hot(ids[0], 17).float()
    other_half = planted(what, what, masks.dense(~torch.eye(34, dtype=torch.bool)))
    ours = score(other_half, ids=ids)
    assert float(ours["same token"]) > 0.9
    assert all(float(ours[name]) < 0.3 for name in ours if name != "same token")


def test_first_is_the_first_key_that_is_no_padding():
    padding = torch.arange(7).view(1, 7) < 3
    dense = torch.zeros(1, 1, 7, 7)
    dense[..., 3] = 1.0
    assert float(score(StoredWeights(dense), padding=padding)["first"]) == 1.0
    assert float(score(StoredWeights(dense))["first"]) == 0.0


def test_padding_with_the_id_of_a_real_token_is_not_taken_for_it():
    """GPT-2 pads with its end-of-text token."""
    ids, padding = torch.tensor([[9, 9, 9, 4, 9]]), torch.tensor([[False, True, True, False, False]])
    dense = torch.zeros(1, 1, 5, 5)
    dense[0, 0, 4, 0] = dense[0, 0, 0, 4] = 1.0
    assert float(score(StoredWeights(dense), ids=ids, padding=padding)["same token"]) == 1.0


def test_token_numbers_may_be_as_large_as_integers_are():
    largest = torch.iinfo(torch.int64).max
    ids, padding = torch.tensor([[largest, 0, largest, 5]]), torch.tensor([[False, False, False, True]])
    dense = torch.zeros(1, 1, 4, 4)
    dense[0, 0, 2, 0] = dense[0, 0, 0, 2] = 1.0
    assert float(score(StoredWeights(dense), ids=ids, padding=padding)["same token"]) == 1.0


@pytest.mark.parametrize(("nq", "nk"), [(0, 5), (3, 0), (0, 0)])
def test_no_query_or_no_key_scores_zero(nq, nk):
    ours = score(StoredWeights(torch.zeros(2, 3, nq, nk)), ids=torch.zeros(2, nk, dtype=torch.int64))
    assert {name: values.tolist() for name, values in ours.items()} == {name: [[0.0] * 3] * 2 for name in BY_PAIR}


def test_scores_need_no_more_than_pairs():
    class OnlyPairs:
        sizes = (1, 2, 5, 7)

        def tile(self, rows: object, cols: object) -> Tensor:
            raise AssertionError("a tile was asked for")

        def pairs(self, keys: Tensor) -> Tensor:
            return torch.ones(1, 2, 5) * (keys >= 0)

    assert score(OnlyPairs(), ids=torch.zeros(1, 7, dtype=torch.int64))["own"].tolist() == [[1.0, 1.0]]


# --------------------------------------------------------------------------------------------------------------- labels


def test_labels_come_strongest_first_per_batch_row_and_head():
    scores = {"own": torch.tensor([[0.6, 0.1], [0.5, nan]]), "first": torch.tensor([[0.7, 0.2], [0.49, 0.9]])}
    assert label(scores) == [[["first", "own"], []], [["own"], ["first"]]]


def test_uniform_needs_more_than_half_of_the_entropy_for_its_name():
    scores = {"uniform": torch.tensor([[0.89, 0.9]], dtype=torch.float64)}
    assert label(scores) == [[[], ["uniform"]]]


def test_neighbours_is_not_said_beside_previous_or_next():
    half = torch.tensor([[0.6]])
    assert label({"neighbours": half + 0.1, "previous": half}) == [[["previous"]]]
    assert label({"neighbours": half + 0.1, "next": half}) == [[["next"]]]
    assert label({"neighbours": half + 0.1, "previous": half - 0.2}) == [[["neighbours"]]]


def test_rest_of_a_head_that_rests_on_the_first_token_is_named_by_half_of_it():
    shares = {"first": torch.tensor([[0.8, 0.8, 0.8, 0.49, 0.96, nan]])}
    beside = {"previous": torch.tensor([[0.1, 0.09, 0.1, 0.5, 0.04, 0.5]])}
    beside["neighbours"] = torch.tensor([[0.12, 0.12, 0.05, 0.5, 0.04, 0.5]])
    assert label_rest(shares, beside) == [["previous", "neighbours", "previous", None, None, None]]
    assert label_rest(shares, {}) == [[None] * 6]


def test_every_pattern_has_a_threshold_and_a_meaning_in_both_languages():
    assert tuple(THRESHOLDS) == tuple(MEANING["en"]) == tuple(MEANING["ko"]) == NAMES
    assert set(KEYS["en"]) == set(KEYS["ko"]) == set(NAMES) - {"uniform"}
