"""`faithful`: does a score of tokens (weights, rollout, norms, …) find those that the model's decision rests on?"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import tables

__all__ = ["Faithfulness", "Judgement", "faithful"]

FRACTIONS = (0.1, 0.2, 0.5)

Run = Callable[[Tensor], Any]
"""Takes which tokens are kept, (N,) booleans, and returns the logits of the decision, (labels,)."""


@dataclass(frozen=True)
class Judgement:
    """One number, beside that of random scores.

    Attributes:
        value: of the score.
        control: mean over random scores.
        p_value: share of random scores, this one counted, that do as well.
    """

    value: float
    control: float
    p_value: float

    @classmethod
    def of(cls, value: float, controls: Sequence[float], *, larger_is_better: bool) -> Judgement:
        """A value with its controls."""
        sign = 1 if larger_is_better else -1
        as_good = sum(sign * control >= sign * value for control in controls)
        return cls(value, sum(controls) / len(controls), (1 + as_good) / (1 + len(controls)))


@dataclass(frozen=True)
class Faithfulness:
    """How faithful a score of tokens is to one decision, or the mean over several.

    Attributes:
        comprehensiveness: fall of the decision's probability when the best tokens are removed, mean over the fractions;
            large is good (DeYoung et al. 2020).
        sufficiency: fall of its probability when only the best tokens are kept; small is good.
        flip_share: share of tokens, best first, whose removal changes the decision; 1 if it never changes; small is
            good.
        leave_one_out: Kendall's τ between the score and the fall of the probability without each token.
        gradient: Kendall's τ between the score and the gradient score that was given, or None.
        texts: how many decisions it is the mean of.
    """

    comprehensiveness: Judgement
    sufficiency: Judgement
    flip_share: Judgement
    leave_one_out: Judgement
    gradient: Judgement | None
    texts: int = 1

    @classmethod
    def mean(cls, results: Sequence[Faithfulness]) -> Faithfulness:
        """The mean of each value, control and p-value over several decisions.

        Raises:
            ValueError: there are none, or some have a gradient score and others not.
        """
        if not results:
            raise ValueError("there are no results to take the mean of")
        if len({result.gradient is None for result in results}) > 1:
            raise ValueError("some results have a gradient score and others have none")

        def average(name: str) -> Any:
            parts = [getattr(result, name) for result in results]
            if parts[0] is None:
                return None
            columns = zip(*((part.value, part.control, part.p_value) for part in parts), strict=True)
            return Judgement(*(sum(column) / len(column) for column in columns))

        names = ("comprehensiveness", "sufficiency", "flip_share", "leave_one_out", "gradient")
        parts = {name: average(name) for name in names}
        return cls(**parts, texts=sum(result.texts for result in results))

    def __repr__(self) -> str:
        titles = {
            "comprehensiveness": "comprehensiveness ↑",
            "sufficiency": "sufficiency ↓",
            "flip_share": "share of tokens to a flip ↓",
            "leave_one_out": "Kendall's τ, leave-one-out ↑",
            "gradient": "Kendall's τ, gradient ↑",
        }
        rows = [
            [title, f"{part.value:.3f}", f"{part.control:.3f}", f"{part.p_value:.3f}"]
            for name, title in titles.items()
            if (part := getattr(self, name)) is not None
        ]
        headers = [f"{self.texts} texts" if self.texts > 1 else "1 text", "score", "random", "p"]
        return tables.text(headers, rows, right=range(1, 4))


def faithful(
    run: Run,
    scores: Any,
    *,
    gradient: Any = None,
    fixed: Sequence[int] = (),
    fractions: Sequence[float] = FRACTIONS,
    controls: int = 20,
    seed: int = 0,
) -> Faithfulness:
    """How well a score of tokens finds those that a decision rests on, beside random scores.

    >>> import torch, regard
    >>> weights = torch.tensor([0.0, 4.0, 1.0, 0.0, -1.0])
    >>> def run(keep):                       # a bag of words: the second word decides
    ...     return torch.stack([weights @ keep.float(), torch.tensor(0.5)])
    >>> regard.faithful(run, weights).flip_share.value
    0.2

    Removed tokens take the model where it was never trained; a random score is removed in the same way, so compare the
    two columns and not a value with 0.

    Args:
        run: the decision's logits (labels,) with only these tokens kept, (N,) booleans; for example
            `lambda keep: model(input_ids, attention_mask=keep[None]).logits[0]`.
        scores: (N,), larger for tokens that matter more.
        gradient: (N,) another score to compare with, such as gradient × input.
        fixed: positions that are never removed, such as [CLS] and [SEP].
        fractions: shares of the tokens that are removed or kept.
        controls: number of random scores.
        seed: of the random scores.

    Returns:
        A `Faithfulness`, which prints as a table; `Faithfulness.mean` joins several.

    Raises:
        ValueError: scores of another length or not finite, no token to remove, or logits that are no vector.
    """
    scores = torch.as_tensor(scores).detach().double().cpu()
    if scores.ndim != 1 or not bool(scores.isfinite().all()):
        raise ValueError(f"scores must be one finite number per token, (N,); got shape {tuple(scores.shape)}")
    if controls < 1 or not fractions or not all(0 < share < 1 for share in fractions):
        raise ValueError(f"controls must be 1 or more and fractions in (0, 1); got {controls} and {tuple(fractions)}")
    free = [n for n in range(len(scores)) if n not in {at % len(scores) for at in fixed}]
    if len(free) < 2:
        raise ValueError(f"{len(scores)} tokens of which {len(free)} may be removed: at least two are needed")

    # 1. The decision on the whole text, and without each token.
    def probabilities(removed: Sequence[int]) -> Tensor:
        keep = torch.ones(len(scores), dtype=torch.bool)
        keep[list(removed)] = False
        with torch.no_grad():
            logits = torch.as_tensor(run(keep)).double().cpu()
        if logits.ndim != 1 or len(logits) < 2:
            raise ValueError(f"run must return the logits of one decision, (labels,); got {tuple(logits.shape)}")
        return logits.softmax(-1)

    whole = probabilities([])
    label = int(whole.argmax())
    without = [float(whole[label] - probabilities([token])[label]) for token in free]

    # 2. The same questions of the score and of random ones.
    def judge(order: Sequence[int]) -> tuple[float, float, float]:
        falls, rests = [], []
        for share in fractions:
            count = max(1, round(share * len(free)))
            falls.append(float(whole[label] - probabilities(order[:count])[label]))
            rests.append(float(whole[label] - probabilities(order[count:])[label]))
        flips = (n for n in range(1, len(order) + 1) if int(probabilities(order[:n]).argmax()) != label)
        return sum(falls) / len(falls), sum(rests) / len(rests), next(flips, len(order)) / len(order)

    chosen = scores[free].tolist()
    judged = judge([free[n] for n in sorted(range(len(free)), key=lambda n: -chosen[n])])
    rng = random.Random(seed)
    orders = [rng.sample(free, len(free)) for _ in range(controls)]
    drawn = [judge(order) for order in orders]
    ranks = [[order.index(token) for token in free] for order in orders]

    def agreement(other: Sequence[float]) -> Judgement:
        by_chance = [kendall_tau([-rank for rank in ranked], other) for ranked in ranks]
        return Judgement.of(kendall_tau(chosen, other), by_chance, larger_is_better=True)

    parts = list(zip(*drawn, strict=True))
    return Faithfulness(
        Judgement.of(judged[0], parts[0], larger_is_better=True),
        Judgement.of(judged[1], parts[1], larger_is_better=False),
        Judgement.of(judged[2], parts[2], larger_is_better=False),
        agreement(without),
        None if gradient is None else agreement(torch.as_tensor(gradient).detach().double().cpu()[free].tolist()),
    )


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's τ-b of two lists: 1 for the same order, −1 for the reverse; 0 where one of them is constant.

    >>> kendall_tau([1, 2, 3, 4], [1, 2, 4, 3])
    0.6666666666666666
    """
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    dx, dy = (torch.sign(values[:, None] - values[None]) for values in (x, y))
    norm = float((dx.square().sum() * dy.square().sum()).sqrt())
    return float((dx * dy).sum()) / norm if norm else 0.0
