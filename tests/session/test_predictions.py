"""What a session's model predicts, against the same checkpoint in transformers, with every head and with some off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from seeing_twins import blip, clip, picture, vit
from speaking_twins import bert, gpt2, t5
from torch import Tensor

import regard
from regard.explorer import answers
from regard.explorer.export import page_data
from regard.explorer.widget import answer
from regard.models.loading import load
from regard.session.effects import TEMPERATURES, predict
from regard.session.session import Session, look_at, look_at_image, session_of
from regard.training.tokenizers import byte_tokenizer

TEXT = "The animal did not cross the"
MASKED = "The [MASK] did not cross the [MASK]."


def theirs(directory: Path, kind: str) -> Any:
    return getattr(transformers, kind).from_pretrained(directory, attn_implementation="eager").eval()


def assert_place(place: Any, logits: Tensor, labels: list[str]) -> None:
    """The ten largest of the logits, and exact probabilities at every temperature."""
    values, ids = logits.double().topk(min(10, len(logits)))
    place = place | {"top": place["top"][:10]}  # those that were likely before follow
    assert [one["id"] for one in place["top"]] == ids.tolist()
    assert [one["label"] for one in place["top"]] == labels
    assert [one["logit"] for one in place["top"]] == pytest.approx(values.tolist(), abs=1e-5)
    assert [one["probability"] for one in place["top"]] == pytest.approx(
        logits.double().softmax(0)[ids].tolist(), abs=1e-6
    )
    for temperature, lse in zip(TEMPERATURES, place["lse"], strict=True):
        chances = (logits.double() / temperature).softmax(0)[ids].tolist()
        assert [exp(one["logit"] / temperature - lse) for one in place["top"]] == pytest.approx(chances, abs=1e-5)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def session(decoder: Path) -> Session:
    return look_at(TEXT, decoder)


def test_next_token_is_that_of_transformers(decoder, session):
    found = predict(session)
    model, ids = theirs(decoder, "AutoModelForCausalLM"), session.model.tokenizer.batch([TEXT]).input_ids
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    (place,) = found["places"]
    assert (found["kind"], found["reason"], found["without"]) == ("next_token", None, [])
    assert place["token"] == len(session.tokens) - 1
    tokenizer = session.model.tokenizer
    assert_place(place, logits, tokenizer.tokens(logits.topk(10).indices.tolist()))


def test_heads_that_are_off_change_the_prediction_as_by_hand(decoder, session):
    model, ids = theirs(decoder, "AutoModelForCausalLM"), session.model.tokenizer.batch([TEXT]).input_ids
    off = [[0, 1], [1, 0], [1, 2]]
    width = model.config.n_embd // model.config.n_head

    def silence(layer: int) -> Any:
        heads = [head for at, head in off if at == layer]

        def hook(module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
            x = given[0].clone()
            for head in heads:
                x[..., head * width : (head + 1) * width] = 0
            return (x,)

        return hook

    for layer in (0, 1):
        model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(silence(layer))
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    found = answers.predictions(session, off)
    assert found["without"] == off
    tokenizer = session.model.tokenizer
    assert_place(found["places"][0], logits, tokenizer.tokens(logits.topk(10).indices.tolist()))
    (place,), (all_on,) = found["places"], predict(session)["places"]
    assert {one["id"] for one in all_on["top"]} <= {one["id"] for one in place["top"]}
    assert len({one["id"] for one in place["top"]}) == len(place["top"]) > 10
    assert {one["before"] for one in all_on["top"]} == {None}
    with torch.no_grad():
        before = theirs(decoder, "AutoModelForCausalLM")(ids).logits[0, -1]
    for one in place["top"]:
        assert one["before"] == pytest.approx(float(before[one["id"]]), abs=1e-5)
        assert one["logit"] == pytest.approx(float(logits[one["id"]]), abs=1e-5)


def test_every_mask_token_is_filled(tmp_path):
    directory = bert(tmp_path / "bert", "ForMaskedLM")
    made = look_at(MASKED, directory)
    model, tokenizer = theirs(directory, "AutoModelForMaskedLM"), made.model.tokenizer
    ids = tokenizer.batch([MASKED]).input_ids
    with torch.no_grad():
        logits = model(ids).logits[0]
    found = predict(made)
    masks = (ids[0] == tokenizer.ids_of.mask).nonzero().view(-1).tolist()
    assert (found["kind"], [place["token"] for place in found["places"]]) == ("fill_mask", masks)
    assert len(masks) == 2
    for place in found["places"]:
        row = logits[place["token"]]
        assert_place(place, row, tokenizer.tokens(row.topk(10).indices.tolist()))
    none = predict(look_at(TEXT, made.model))
    assert (none["kind"], none["reason"], none["places"]) == ("fill_mask", "no_mask", [])


def test_first_token_of_an_answer_is_predicted(tmp_path):
    directory = t5(tmp_path / "t5")
    made = look_at("the cat and the dog", directory)
    model = theirs(directory, "AutoModelForSeq2SeqLM")
    ids = made.model.tokenizer.batch(["the cat and the dog"]).input_ids
    with torch.no_grad():
        logits = model(ids, decoder_input_ids=torch.tensor([[made.model.start]])).logits[0, -1]
    (place,) = predict(made)["places"]
    assert place["token"] is None
    assert [one["logit"] for one in place["top"]] == pytest.approx(logits.topk(10).values.tolist(), abs=1e-5)


def test_labels_of_an_image_have_probabilities(tmp_path):
    made = look_at_image(picture(), load(vit(tmp_path / "vit")))
    names, chances = made.model.classify(picture()).labels, made.model.classify(picture()).probabilities[0]
    found = predict(made)
    (place,) = found["places"]
    assert (found["kind"], place["token"]) == ("labels", None)
    assert {one["label"]: one["probability"] for one in place["top"]} == pytest.approx(
        dict(zip(names, chances.tolist(), strict=True)), abs=1e-6
    )
    off = predict(made, [(0, 0), (2, 3)])["places"][0]["top"]
    assert {one["label"]: one["logit"] for one in off} != {one["label"]: one["logit"] for one in place["top"]}


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression", None])
def test_labels_of_a_text_classifier_follow_its_problem(problem):
    model = regard.build(
        "bert", hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=9, vocab_size=256,
        task="text-classification", num_labels=3, problem_type=problem, max_position_embeddings=16,
    )  # fmt: skip
    model.tokenizer = byte_tokenizer()
    made = look_at("abc", model)
    expected, (place,) = model.classify("abc"), predict(made)["places"]
    chances = {one["label"]: one["probability"] for one in place["top"]}
    if problem == "regression":
        assert set(chances.values()) == {None}
    else:
        scores = dict(zip(expected.labels, expected.probabilities[0].tolist(), strict=True))
        assert chances == pytest.approx(scores, abs=1e-6)
    assert (place["lse"] is None) == (problem is not None)


def test_model_that_writes_about_an_image_predicts_after_its_text(tmp_path):
    made = look_at_image(picture(), load(blip(tmp_path / "blip", "ForConditionalGeneration")), text="the cat")
    found = predict(made)
    assert (found["kind"], found["places"][0]["token"]) == ("next_token", len(made.tokens) - 1)
    logits = made.again().logits[0, -1]
    assert found["places"][0]["top"][0]["id"] == int(logits.argmax())


def no_heads(tmp_path: Path) -> Iterator[tuple[Session, str]]:
    made = look_at(TEXT, bert(tmp_path / "bert", "Model"))
    yield made, "no_head"
    yield session_of(made.capture), "no_model"
    yield look_at_image(picture(), load(clip(tmp_path / "clip"))), "no_head"


def test_session_without_a_head_or_a_model_says_so(tmp_path):
    for made, reason in no_heads(tmp_path):
        found = predict(made)
        assert (found["kind"], found["reason"], found["places"]) == ("none", reason, [])


@pytest.mark.parametrize(
    ("without", "error", "words"),
    [
        ([[9, 0]], IndexError, "head 0.*layer 9"),
        ([[0, 99]], IndexError, "head 99.*layer 0"),
        ([[0]], TypeError, "layer, head"),
        ([["0", 1]], TypeError, "layer, head"),
        ("0.1", TypeError, "layer, head"),
    ],
)
def test_head_that_is_not_there_is_refused(session, without, error, words):
    with pytest.raises(error, match=words):
        answers.predictions(session, without)


def test_head_of_a_model_whose_layers_run_twice_is_not_switched_off():
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
    sizes |= {"embedding_size": 8, "vocab_size": 256, "max_position_embeddings": 64}
    model = regard.build("albert", **sizes, task="fill-mask")
    model.tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="several times"):
        predict(look_at("abc", model), [(0, 1)])


def test_nan_is_said_and_not_predicted(decoder):
    model = load(decoder)
    made = look_at(TEXT, model)
    with torch.no_grad():
        next(module for name, module in model.named_modules() if name.endswith("norm")).weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        predict(made)


def test_notebook_and_exported_page_have_the_same(session):
    expected = answers.predictions(session, [[0, 1]])
    reply = answer([session], {"id": 1, "session": "1", "ask": "predictions", "given": {"without": [[0, 1]]}})
    assert reply == {"id": 1, "answer": expected}
    json.dumps(reply, allow_nan=False)
    (mine,) = page_data(session)["sessions"].values()
    assert mine["predictions"] == answers.predictions(session)
