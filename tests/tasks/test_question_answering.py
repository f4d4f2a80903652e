"""The piece of a context that answers a question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speaking_twins import bart, bert

from regard.models.loading import load
from regard.tasks import text as answering
from regard.tasks.text import best_span

QUESTION, CONTEXT = "what was tired?", "The animal did not cross the street: it was tired."


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Any:
    return load(bert(tmp_path_factory.mktemp("bert"), "ForQuestionAnswering"), dtype=torch.float64)


def spans(model: Any, question: str, context: str) -> tuple[torch.Tensor, list[int]]:
    """Logits, and the places of the context's tokens."""
    encoded = model.tokenizer.encode(question, context)
    output = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.types]))
    logits = torch.stack([output.start_logits[0], output.end_logits[0]], -1).detach()  # (N, 2)
    return logits, [n for n, (t, o) in enumerate(zip(encoded.types, encoded.offsets, strict=True)) if t and o]


@pytest.mark.parametrize("longest", [1, 3, 30])
def test_answer_is_the_likeliest_span_of_the_context(model: Any, longest: int) -> None:
    logits, places = spans(model, QUESTION, CONTEXT)
    starts, ends = logits[[0, *places]].softmax(0).unbind(1)
    n = len(places)
    wanted = max((float(starts[i + 1] * ends[j + 1]), i, j) for i in range(n) for j in range(i, min(n, i + longest)))
    offsets = model.tokenizer.encode(QUESTION, CONTEXT).offsets
    at, to = offsets[places[wanted[1]]][0], offsets[places[wanted[2]]][1]
    found = model.answer(QUESTION, CONTEXT, longest=longest)
    assert (found.start, found.end, found.text) == (at, to, CONTEXT[at:to])
    assert str(found) == found.text
    assert found.probability == pytest.approx(wanted[0], rel=1e-12)
    assert found.absent == pytest.approx(float(starts[0] * ends[0]), rel=1e-12)


def test_long_context_is_read_in_windows_that_reach_every_span(model: Any) -> None:
    """Wherever the best span is in a context of several windows, the answer is the best of what each window says."""
    context = " ".join(
        f"{word} cat" for word in ("street animal wide mat tired capital seoul korea small it " * 4).split()
    )
    found = model.answer(QUESTION, context)
    windows = list(answering._windows(model, QUESTION, context))
    assert len(windows) > 3
    assert all(len(window.ids) <= 37 for window in windows)
    assert [window.spans[0] for window in windows[1:]] == [
        window.spans[len(windows[0].spans) // 2] for window in windows[:-1]
    ]
    assert windows[-1].spans[-1][1] == len(context)
    best = (0.0, 0, 0)
    for window in windows:
        text = context[window.spans[0][0] : window.spans[-1][1]]
        alone = model.answer(QUESTION, text)  # whose words are whole, so that it is cut alike
        best = max(best, (alone.probability, alone.start + window.spans[0][0], alone.end + window.spans[0][0]))
    assert (found.probability, found.start, found.end) == pytest.approx(best)
    assert found.text == context[found.start : found.end]


def test_no_span_ends_before_it_starts_and_the_question_is_no_answer() -> None:
    logits = torch.zeros(6, 2)
    logits[2] = 50.0  # of the question
    logits[5, 0] = logits[4, 1] = 9.0  # an end before its start
    value, start, end, _ = best_span(logits, first=4, count=2, longest=2)
    assert start <= end
    assert 0 < value < 0.5


def test_first_token_is_counted_as_no_answer() -> None:
    logits = torch.zeros(3, 2)
    logits[0] = 9.0
    value, _, _, absent = best_span(logits, first=1, count=2, longest=2)
    assert absent > 0.99 > 0.01 > value


def test_bart_answers_too(tmp_path: Path) -> None:
    model = load(bart(tmp_path, "ForQuestionAnswering"))
    found = model.answer(QUESTION, CONTEXT)
    assert found.text == CONTEXT[found.start : found.end] != ""


def test_empty_context_and_a_question_that_fills_the_model_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="context"):
        model.answer(QUESTION, "  ")
    with pytest.raises(ValueError, match=r"43.*37"):
        model.answer("cat " * 40, CONTEXT)


@pytest.mark.parametrize("longest", [0, True, 1.5])
def test_longest_must_be_a_positive_whole_number(model: Any, longest: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="longest"):
        model.answer(QUESTION, CONTEXT, longest=longest)
