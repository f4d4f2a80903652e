"""The place of a picture in a prompt is written as the checkpoint's tokenizer writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing_twins import idefics, llava, picture

from regard.models.loading import load
from regard.tasks.inputs import caption_prompt, expand_prompt, placeholder, question_prompt

PICTURE = picture(3)
OTHER = "<|picture|>"


@pytest.fixture(scope="module")
def usual(tmp_path_factory: Any) -> Any:
    return load(llava(tmp_path_factory.mktemp("usual")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: Any) -> Any:
    """The same model; its tokenizer calls the token otherwise."""
    folder = llava(tmp_path_factory.mktemp("other"))
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<image>", OTHER))
    return load(folder)


def test_captions_and_answers_are_the_same_whatever_the_placeholder_is_called(usual, other):
    for asked in (
        lambda model: model.caption(PICTURE, max_new_tokens=5),
        lambda model: model.caption(PICTURE, prompt="a", max_new_tokens=5),
        lambda model: model.answer(PICTURE, "What is it?", max_new_tokens=5),
    ):
        first, second = asked(usual), asked(other)
        assert first.ids.tolist() == second.ids.tolist()
        assert second.prompt == first.prompt.replace("<image>", OTHER) != first.prompt


def test_a_text_with_the_tokenizers_placeholder_is_a_prompt(usual, other):
    for model, token in ((usual, "<image>"), (other, OTHER)):
        assert placeholder(model) == token
        assert question_prompt(model, f"{token} what?") == caption_prompt(model, f"{token} what?") == f"{token} what?"
        assert expand_prompt(model, f"{token} a", torch.zeros(1, 3, 18, 18)) == token * 9 + " a"


@pytest.mark.parametrize("prompt", [question_prompt, caption_prompt])
def test_a_placeholder_of_other_checkpoints_is_refused(other, prompt):
    message = r"'<image>'.*'<\|picture\|>'"
    with pytest.raises(ValueError, match=message):
        prompt(other, "<image> what?")
    assert prompt(other, f"{OTHER} what is <image>?") == f"{OTHER} what is <image>?"


def test_a_tokenizer_without_the_token_is_refused_by_the_key_that_names_it(tmp_path):
    folder = llava(tmp_path)
    edit(
        folder / "tokenizer.json",
        lambda values: values.update(added_tokens=[x for x in values["added_tokens"] if x["content"] != "<image>"]),
    )
    model = load(folder)
    message = r"363.*image_token_index.*363.*config\.json"
    for asked in (lambda: model.caption(PICTURE), lambda: model.generate("<image> a", images=PICTURE)):
        with pytest.raises(ValueError, match=message):
            asked()


@pytest.mark.parametrize("make", [llava, idefics])
def test_placeholders_without_pictures_ask_for_pictures(tmp_path, make):
    model = load(make(tmp_path))
    with pytest.raises(ValueError, match=r"1.*'<image>'.*images=.*0"):
        model.generate("<image> what")
    with pytest.raises(ValueError, match=r"1.*2.*'<image>'.*images=.*0"):
        model.generate(["what", "<image> or <image>"])


def edit(path: Path, change: Any) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
