"""What could stand at a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speaking_twins import bert

from regard.models.loading import load


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Any:
    return load(bert(tmp_path_factory.mktemp("bert"), "ForMaskedLM"), dtype=torch.float64)


def test_guesses_are_the_likeliest_tokens_at_each_mask(model: Any) -> None:
    text = "the [MASK] sat on [MASK] mat"
    ids = model.tokenizer.encode(text).ids
    chances = model(torch.tensor([ids])).logits[0].softmax(-1)
    found = model.fill(text, top=3)
    assert len(found.blanks) == 2
    for place, guesses in zip([n for n, i in enumerate(ids) if i == 4], found.blanks, strict=True):
        wanted = chances[place].topk(3)
        assert [guess.id for guess in guesses] == wanted.indices.tolist()
        assert [guess.probability for guess in guesses] == wanted.values.tolist()
        assert [guess.token for guess in guesses] == model.tokens(wanted.indices)


def test_best_is_the_text_with_the_likeliest_in_place(model: Any) -> None:
    found = model.fill("the [MASK] sat")
    whole = model.tokenizer.encode("the [MASK] sat").ids
    whole[whole.index(4)] = found.blanks[0][0].id
    assert found.best == model.tokenizer.decode(whole)
    assert "[MASK]" not in found.best


def test_it_prints_as_a_table(model: Any) -> None:
    found = model.fill("서울은 한국의 [MASK] 이다", top=2)
    lines = repr(found).splitlines()
    assert [line.split() for line in lines[:1]] == [["mask", "token", "probability"]]
    assert len(lines) == 4
    assert f"{found.blanks[0][1].probability:.4f}" in lines[3]
    assert found._repr_html_().count("<tr>") == 3


def test_more_guesses_than_tokens_are_all_tokens(model: Any) -> None:
    found = model.fill("[MASK]", top=100_000)
    assert len(found.blanks[0]) == model.tokenizer.size == model.vocabulary
    assert sum(guess.probability for guess in found.blanks[0]) == pytest.approx(1)


def test_pretrained_model_fills_too(tmp_path: Path) -> None:
    assert load(bert(tmp_path, "ForPreTraining")).fill("a [MASK]").blanks[0][0].probability > 0


def test_text_without_a_mask_is_told_how_it_is_written(model: Any) -> None:
    with pytest.raises(ValueError, match=r"\[MASK\]"):
        model.fill("the cat sat")


def test_tokenizer_without_a_mask_is_told_so(model: Any, monkeypatch: Any) -> None:
    from dataclasses import replace

    monkeypatch.setattr(model.tokenizer, "ids_of", replace(model.tokenizer.ids_of, mask=None))
    with pytest.raises(ValueError, match=r"BERT.*mask"):
        model.fill("the [MASK]")


@pytest.mark.parametrize("top", [0, -3, True, 2.5])
def test_top_must_be_a_positive_whole_number(model: Any, top: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="top"):
        model.fill("[MASK]", top)


def test_text_longer_than_the_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"52.*37"):
        model.fill("[MASK] " * 50)
