"""Faithfulness of token scores on decisions whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.edits.faithfulness import Faithfulness, kendall_tau

EVIDENCE = torch.tensor([0.0, 3.0, 0.5, -1.0, 0.2, 1.5, 0.0])


def decide(keep: Tensor) -> Tensor:
    """Two labels: the evidence of the tokens that are kept, against 1."""
    return torch.stack([EVIDENCE @ keep.float(), torch.tensor(1.0)])


def probability(keep: Tensor) -> float:
    return float(decide(keep).double().softmax(-1)[0])


def test_values_by_hand() -> None:
    result = regard.faithful(decide, EVIDENCE, fractions=[0.3], controls=5)
    whole = probability(torch.ones(7, dtype=torch.bool))
    best = torch.tensor([False, True, False, False, False, True, False])  # 0.3 of 7 tokens: two
    assert result.comprehensiveness.value == pytest.approx(whole - probability(~best))
    assert result.sufficiency.value == pytest.approx(whole - probability(best))
    assert result.flip_share.value == pytest.approx(2 / 7)  # 4.2 − 3 = 1.2 is above 1; without 1.5 too it is below
    assert result.leave_one_out.value == pytest.approx(1.0)
    assert result.gradient is None


def test_a_wrong_score_is_worse_than_random_and_a_right_one_better() -> None:
    right, wrong = (regard.faithful(decide, sign * EVIDENCE, controls=40) for sign in (1, -1))
    assert right.comprehensiveness.value > right.comprehensiveness.control > wrong.comprehensiveness.value
    assert right.sufficiency.value < right.sufficiency.control < wrong.sufficiency.value
    assert right.comprehensiveness.p_value < 0.1 < 0.5 < wrong.comprehensiveness.p_value
    assert wrong.leave_one_out.value == pytest.approx(-1.0)


def test_fixed_tokens_stay_and_seeds_repeat() -> None:
    kept = []

    def run(keep: Tensor) -> Tensor:
        kept.append(keep)
        return decide(keep)

    one = regard.faithful(run, EVIDENCE, fixed=[0, -1], gradient=EVIDENCE, seed=3)
    assert all(bool(keep[0] & keep[-1]) for keep in kept)
    assert one == regard.faithful(decide, EVIDENCE, fixed=[0, -1], gradient=EVIDENCE, seed=3)
    assert one != regard.faithful(decide, EVIDENCE, fixed=[0, -1], gradient=EVIDENCE, seed=4)
    assert one.gradient is not None
    assert one.gradient.value == pytest.approx(1.0)


def test_mean_and_print() -> None:
    results = [regard.faithful(decide, scores) for scores in (EVIDENCE, -EVIDENCE)]
    both = Faithfulness.mean(results)
    values = [result.sufficiency.value for result in results]
    assert (both.texts, both.sufficiency.value) == (2, pytest.approx(sum(values) / 2))
    assert "2 texts" in repr(both)
    assert "comprehensiveness" in repr(both)
    with pytest.raises(ValueError, match="no results"):
        Faithfulness.mean([])


@pytest.mark.parametrize(
    ("scores", "options", "value"),
    [
        (torch.zeros(2, 7), {}, r"\(2, 7\)"),
        (torch.tensor([math.nan] * 7), {}, r"\(7,\)"),
        (EVIDENCE, {"fixed": range(6)}, "1 may"),
        (EVIDENCE, {"fractions": [1.5]}, "1.5"),
        (EVIDENCE, {"controls": 0}, "0"),
    ],
)
def test_bad_input(scores: Tensor, options: dict[str, object], value: str) -> None:
    with pytest.raises(ValueError, match=value):
        regard.faithful(decide, scores, **options)


def test_logits_that_are_no_vector() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        regard.faithful(lambda keep: decide(keep)[None], EVIDENCE)


def test_kendall_with_ties() -> None:
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert kendall_tau([1, 1], [1, 2]) == 0.0
