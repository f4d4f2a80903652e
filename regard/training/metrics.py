"""Metrics of a trained model on held-out rows: accuracy, F1, exact match, perplexity, BLEU and ROUGE."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any


def accuracy(predicted: Sequence[Any], expected: Sequence[Any]) -> float:
    """Share of the predictions that are right.

    >>> accuracy([1, 0, 1], [1, 1, 1]) == 2 / 3
    True
    """
    _check(predicted, expected)
    return sum(bool(one == other) for one, other in zip(predicted, expected, strict=True)) / len(expected)


def macro_f1(predicted: Sequence[Any], expected: Sequence[Any]) -> float:
    """Mean over the labels of each one's F1, the harmonic mean of precision and recall.

    >>> macro_f1([1, 0, 1], [1, 0, 0]) == (2 / 3 + 2 / 3) / 2
    True
    """
    _check(predicted, expected)
    scores = []
    for label in dict.fromkeys(expected):
        right = sum(bool(one == other == label) for one, other in zip(predicted, expected, strict=True))
        scores.append(2 * right / (list(predicted).count(label) + list(expected).count(label)))
    return sum(scores) / len(scores)


def exact_match(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Share of the answers that are right but for case, punctuation and articles, as SQuAD counts them.

    >>> exact_match(["The Eiffel Tower."], ["eiffel tower"])
    1.0
    """
    return accuracy([_normalised(text) for text in predicted], [_normalised(text) for text in expected])


def f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Mean F1 of the words of each answer, as SQuAD counts them.

    >>> f1(["the tall tower"], ["a tower"]) == 2 / 3
    True
    """
    _check(predicted, expected)
    scores = []
    for one, other in zip(predicted, expected, strict=True):
        words, right = _normalised(one).split(), _normalised(other).split()
        shared = sum((Counter(words) & Counter(right)).values())
        total = len(words) + len(right)
        scores.append(2 * shared / total if total else 1.0)
    return sum(scores) / len(scores)


def bleu(predicted: Sequence[str], expected: Sequence[str], *, lowercase: bool = False) -> tuple[float, str]:
    """Corpus BLEU by sacrebleu, and the signature to report with it.

    Raises ImportError if sacrebleu is not installed.
    """
    check_bleu()
    from sacrebleu.metrics.bleu import BLEU

    _check(predicted, expected)
    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(predicted), [list(expected)]).score
    return float(score), str(metric.get_signature())


def check_bleu() -> None:
    """Raise ImportError if sacrebleu is not installed."""
    if find_spec("sacrebleu") is None:
        raise ImportError("BLEU needs sacrebleu: pip install 'regard[metrics]'")


def rouge(predicted: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L by rouge-score.

    Raises ImportError if rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError("ROUGE needs rouge-score: pip install 'regard[metrics]'") from error
    _check(predicted, expected)
    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds)
    scores = [scorer.score(other, one) for one, other in zip(predicted, expected, strict=True)]
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}


def _check(predicted: Sequence[Any], expected: Sequence[Any]) -> None:
    if len(predicted) != len(expected) or not len(expected):
        raise ValueError(
            f"as many predictions as expected values are needed, one or more; got {len(predicted)} and {len(expected)}"
        )


def _normalised(text: str) -> str:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
