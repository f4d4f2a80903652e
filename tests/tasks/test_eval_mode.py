"""Every verb answers in eval mode, and leaves each module in the mode that it was in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing_twins import blip, clip, picture, vit
from speaking_twins import bert, gpt2, t5
from torch import nn

from regard.models.loading import load
from regard.models.model import eval_mode

PHOTO = picture(0)
VERBS: dict[str, tuple[Callable[[Path], Path], Callable[[Any], Any]]] = {
    "embed": (lambda folder: bert(folder, "Model"), lambda model: model.embed(["a cat"])),
    "fill": (lambda folder: bert(folder, "ForMaskedLM"), lambda model: model.fill("a [MASK] sat")),
    "tag": (lambda folder: bert(folder, "ForTokenClassification"), lambda model: model.tag("a cat")),
    "follows": (lambda folder: bert(folder, "ForNextSentencePrediction"), lambda model: model.follows("a", "cat")),
    "classify": (lambda folder: bert(folder, "ForSequenceClassification"), lambda model: model.classify("a cat")),
    "answer": (lambda folder: bert(folder, "ForQuestionAnswering"), lambda model: model.answer("who sat?", "a cat")),
    "generate": (gpt2, lambda model: model.generate("a", max_new_tokens=3)),
    "beams": (t5, lambda model: model.generate("a", max_new_tokens=3, num_beams=2)),
    "stream": (gpt2, lambda model: list(model.stream("a", max_new_tokens=3))),
    "stream what is read first": (t5, lambda model: list(model.stream("a", max_new_tokens=3))),
    "classify a picture": (vit, lambda model: model.classify(PHOTO)),
    "labels": (clip, lambda model: model.classify(PHOTO, labels=["a cat"])),
    "match": (lambda folder: blip(folder, "ForImageTextRetrieval"), lambda model: model.match(PHOTO, "a cat")),
    "caption": (
        lambda folder: blip(folder, "ForConditionalGeneration"),
        lambda model: model.caption(PHOTO, max_new_tokens=3),
    ),
    "answer about": (lambda folder: blip(folder, "ForQuestionAnswering"), lambda model: model.answer(PHOTO, "?")),
    "features": (vit, lambda model: model.features(PHOTO)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verb_runs_in_eval_mode_and_leaves_the_mode_alone(verb: str, tmp_path: Path) -> None:
    make, ask = VERBS[verb]
    model = load(make(tmp_path)).train()
    some = next(module for module in model.modules() if not list(module.children()))
    some.eval()  # frozen, as people do
    seen: list[bool] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    ask(model)
    assert seen
    assert not any(seen)
    assert [module for module in model.modules() if not module.training] == [some]


def test_reader_of_a_stream_has_the_model_as_it_was(tmp_path: Path) -> None:
    model = load(gpt2(tmp_path)).train()
    for _ in model.stream("a", max_new_tokens=5):
        assert model.training
        break
    assert model.training


def test_mode_comes_back_after_an_error() -> None:
    layer = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    with pytest.raises(RuntimeError), eval_mode(layer):
        layer(torch.zeros(5))
    assert layer[1].training


def test_new_head_is_not_in_training_beside_a_body_that_is_not() -> None:
    body = nn.Sequential(nn.Linear(2, 3)).eval()
    body.append(nn.Dropout(0.5))
    with eval_mode(body):
        assert not body[1].training
    assert (body.training, body[1].training) == (False, True)
