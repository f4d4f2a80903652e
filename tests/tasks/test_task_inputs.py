"""What the verbs share: the right head, texts as batches, the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speaking_twins import bert, gpt2, t5

from regard.models.loading import load
from regard.tasks import inputs


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Any:
    return load(bert(tmp_path_factory.mktemp("bert"), "Model"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: Any) -> Any:
    return load(gpt2(tmp_path_factory.mktemp("gpt2")))


@pytest.mark.parametrize(
    ("ask", "needed"),
    [
        (
            lambda m: m.fill("a [MASK]"),
            r"fill.*'fill-mask'.*'pretraining'.*BERT.*'feature-extraction'.*regard\.load",
        ),
        (lambda m: m.classify("a"), r"classify.*'text-classification'.*regard\.load\(…, task='text-classification'\)"),
        (lambda m: m.tag("a"), "tag.*'token-classification'.*task='token-classification'"),
        (lambda m: m.answer("a", "b"), "answer.*'question-answering'.*task='question-answering'"),
        (
            lambda m: m.follows("a", "b"),
            "follows.*'next-sentence-prediction'.*'pretraining'.*task='next-sentence-prediction'",
        ),
        (
            lambda m: m.generate("a"),
            "generate.*'text-generation'.*BERT.*'feature-extraction'",
        ),
        (
            lambda m: m.stream("a"),
            "generate.*'text-generation'.*feature-extraction.*fill-mask.*next-sentence-prediction",
        ),
    ],
)
def test_verb_without_its_head_names_the_task_there_is_and_the_one_it_needs(model, ask, needed) -> None:
    with pytest.raises(ValueError, match=needed):
        ask(model)


def test_batches_come_by_length_and_keep_their_numbers(model) -> None:
    texts = ["a cat", "the street was too wide", "cat", "the cat sat on the mat", "it"]
    found = list(inputs.batches(model, texts, 2, length=37, truncate=False))
    assert [numbers for numbers, _ in found] == [[1, 3], [0, 2], [4]]
    for numbers, batch in found:
        for row, number in enumerate(numbers):
            alone = model.tokenizer.encode(texts[number])
            assert batch.input_ids[row][batch.attention_mask[row]].tolist() == alone.ids
    assert found[2][1].input_ids.shape[1] < found[0][1].input_ids.shape[1]


def test_pairs_are_texts_too(model) -> None:
    ((numbers, batch),) = inputs.batches(model, [("a cat", "it sat")], 7, length=None, truncate=False)
    assert numbers == [0]
    assert batch.token_type_ids[0].tolist() == model.tokenizer.encode("a cat", "it sat").types


def test_too_long_a_text_is_named_by_its_own_number_with_both_lengths(model) -> None:
    texts = ["it", "cat " * 41, "a cat"]
    with pytest.raises(ValueError, match=r"text.*1.*43.*37.*truncate=True"):
        list(inputs.batches(model, texts, 1, length=model.max_text_positions, truncate=False))
    found = {n: b for (n,), b in inputs.batches(model, texts, 1, length=37, truncate=True)}
    assert found[1].input_ids.shape == (1, 37)


def test_text_without_a_token_is_refused(decoder) -> None:
    with pytest.raises(ValueError, match=r"text.*1"):
        list(inputs.batches(decoder, ["a", ""], 2, length=None, truncate=False))
    with pytest.raises(ValueError, match="token"):
        inputs.single_batch(decoder, "")


@pytest.mark.parametrize("size", [0, -1, True, 2.0, None])
def test_batch_must_be_a_positive_whole_number(model, size) -> None:
    with pytest.raises((ValueError, TypeError), match="batch"):
        list(inputs.batches(model, ["a"], size, length=None, truncate=False))


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("a cat", TypeError, r"texts.*str.*'a cat'"),
        (17, TypeError, r"texts.*int"),
        ([], ValueError, "list"),
        (["a", 5], TypeError, "str"),
        ([b"a"], TypeError, "bytes"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(model, texts, error, message) -> None:
    with pytest.raises(error, match=message):
        list(inputs.batches(model, texts, 3, length=None, truncate=False))


def test_one_text_that_is_too_long_names_both_lengths(model) -> None:
    with pytest.raises(ValueError, match=r"43.*37"):
        inputs.single_batch(model, "cat " * 41)


def test_segments_reach_the_model(model) -> None:
    pair = inputs.single_batch(model, "a cat", "it sat")
    plain = inputs.BatchEncoding(pair.input_ids, pair.attention_mask, torch.zeros_like(pair.token_type_ids))
    assert not torch.equal(
        inputs.run_model(model, pair).last_hidden_state, inputs.run_model(model, plain).last_hidden_state
    )
    assert not inputs.run_model(model, pair).last_hidden_state.requires_grad


def test_positions_are_those_of_the_tower_that_reads(model, decoder, tmp_path: Path) -> None:
    assert [m.max_text_positions for m in (model, decoder, load(t5(tmp_path)))] == [37, 241, None]


def test_tokens_are_labels_of_ids_of_one_text_or_of_several(model) -> None:
    assert model.tokens([2, 3]) == ["[CLS]", "[SEP]"]
    assert model.tokens(torch.tensor([2, 3])) == ["[CLS]", "[SEP]"]
    assert model.tokens(torch.tensor([[2, 3], [4, 0]])) == [["[CLS]", "[SEP]"], ["[MASK]", "[PAD]"]]


@pytest.mark.parametrize("text", [None, "\ud800"], ids=["no text", "half a character"])
def test_a_text_that_is_none_is_called_by_its_own_number(model, text) -> None:
    with pytest.raises((TypeError, ValueError), match=r"text.*1"):
        model.embed(["a", text, "the cat sat"])
