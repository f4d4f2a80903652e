"""The explorer reads in eval mode, whatever mode the model is in, and leaves each module in the mode that it was in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing_twins import blip, clip, idefics, llava, picture, vit
from speaking_twins import bert, gpt2, t5

from regard.models.loading import load
from regard.session.session import Session, look_at, look_at_image

PHOTO = picture()
LOOKS: dict[str, tuple[Callable[[Path], Path], Callable[[Any], Session]]] = {
    "a text": (lambda folder: bert(folder, "Model"), lambda model: look_at("a cat sat", model)),
    "a text to go on with": (gpt2, lambda model: look_at("a cat sat", model)),
    "a text for two towers": (t5, lambda model: look_at("a cat sat", model)),
    "a picture": (vit, lambda model: look_at_image(PHOTO, model)),
    "a picture of two towers": (clip, lambda model: look_at_image(PHOTO, model)),
    "a caption": (
        lambda folder: blip(folder, "ForConditionalGeneration"),
        lambda model: look_at_image(PHOTO, model, text="a cat"),
    ),
    "a caption to be written": (
        lambda folder: blip(folder, "ForConditionalGeneration"),
        lambda model: look_at_image(PHOTO, model),
    ),
    "a question": (
        lambda folder: blip(folder, "ForQuestionAnswering"),
        lambda model: look_at_image(PHOTO, model, text="a cat"),
    ),
    "a match": (
        lambda folder: blip(folder, "ForImageTextRetrieval"),
        lambda model: look_at_image(PHOTO, model, text="a cat"),
    ),
    "patches among words": (llava, lambda model: look_at_image(PHOTO, model, text="a cat")),
    "latents beside words": (idefics, lambda model: look_at_image(PHOTO, model, text="a cat")),
}


@pytest.mark.parametrize("name", LOOKS)
def test_model_reads_in_eval_mode_and_is_left_as_it_was(name: str, tmp_path: Path) -> None:
    make, look = LOOKS[name]
    model = load(make(tmp_path)).train()
    some = next(module for module in model.modules() if not list(module.children()))
    some.eval()  # frozen, as people do
    modes: list[bool] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    session = look(model)
    first = len(modes)
    assert session.again is not None
    session.again()
    assert len(modes) > first > 0
    assert not any(modes)
    assert [module for module in model.modules() if not module.training] == [some]


def test_dropout_changes_nothing_of_what_is_shown(tmp_path: Path) -> None:
    directory = bert(tmp_path, "Model", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.5)
    calm, trained = (look_at("a cat sat", model) for model in (load(directory), load(directory).train()))
    assert torch.equal(calm.capture[1].entropy, trained.capture[1].entropy)
    values = [session.head_values(1, 2) for session in (calm, trained)]
    assert values[0] is not None
    assert values[1] is not None
    assert torch.equal(*values)


@pytest.mark.parametrize("name", ["a text", "a picture"])
def test_mode_comes_back_after_an_error(name: str, tmp_path: Path) -> None:
    make, look = LOOKS[name]
    model = load(make(tmp_path)).train()

    def broken(*given: object) -> None:
        raise RuntimeError("no")

    session = look(model)
    list(model.modules())[-1].register_forward_pre_hook(broken)
    for read in (lambda: look(model), session.again):
        with pytest.raises(RuntimeError, match="no"):
            read()
        assert all(module.training for module in model.modules())
