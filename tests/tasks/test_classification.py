"""Labels of texts and of tokens, and whether one text follows another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speaking_twins import bart, bert, gpt2

from regard.models.loading import load
from regard.nn.blocks import Labels
from regard.tasks.text import Span, Tagged

NAMES = {0: "bad", 1: "good", 2: "나쁨"}
TEXTS = ["The animal was tired", "고양이", "a cat sat on the mat because it was too small"]
PEOPLE = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}


def classifier(directory: Path, **more: Any) -> Any:
    labels = {"id2label": NAMES, "label2id": {v: k for k, v in NAMES.items()}}
    return load(bert(directory, "ForSequenceClassification", **labels | more), dtype=torch.float64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Any:
    return classifier(tmp_path_factory.mktemp("classifier"))


def logits(model: Any, text: str) -> torch.Tensor:
    return model(torch.tensor([model.tokenizer.encode(text).ids])).logits[0].detach()


def test_each_text_has_the_probabilities_it_has_alone(model: Any) -> None:
    found = model.classify(TEXTS, batch=2)
    assert found.labels == ("bad", "good", "나쁨")
    assert found.probabilities.shape == (3, 3)
    for row, text, best in zip(found.probabilities, TEXTS, found.best, strict=True):
        alone = logits(model, text).softmax(-1)
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-13)
        assert best == NAMES[int(alone.argmax())]


def test_one_text_prints_all_its_labels_and_several_their_best(model: Any) -> None:
    one, several = model.classify(TEXTS[1]), model.classify([*TEXTS, "cat " * 30])
    assert repr(one).splitlines()[0].split() == ["label", "probability"]
    assert repr(one).splitlines()[2].split() == [one.best[0], f"{float(one.probabilities.max()):.4f}"]
    assert len(repr(one).splitlines()) == 2 + 3
    assert repr(several).splitlines()[0].split() == ["text", "label", "probability"]
    assert [line.rsplit("  ", 2)[0].strip() for line in repr(several).splitlines()[2:5]] == TEXTS
    assert "…" in repr(several).splitlines()[5]
    assert several._repr_html_().count("<tr>") == 5


def test_pairs_are_classified_with_their_segments(model: Any) -> None:
    pair = ("a cat", "it sat")
    encoded = model.tokenizer.encode(*pair)
    wanted = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.types])).logits[0].softmax(-1)
    found = model.classify([pair])
    torch.testing.assert_close(found.probabilities[0], wanted.detach(), rtol=0, atol=1e-14)
    assert "a cat | it sat" in repr(model.classify([pair, pair]))


def test_labels_that_do_not_exclude_each_other_are_each_by_itself(tmp_path: Path) -> None:
    model = classifier(tmp_path, problem_type="multi_label_classification")
    found = model.classify(TEXTS[0])
    torch.testing.assert_close(found.probabilities[0], logits(model, TEXTS[0]).sigmoid(), rtol=0, atol=1e-14)


def test_new_head_with_another_number_of_labels_numbers_them(tmp_path: Path) -> None:
    model = classifier(tmp_path)
    model.head = Labels(model.head.score.in_features, 5, pooled=True).double()
    found = model.classify(TEXTS)
    assert found.labels == tuple(f"LABEL_{n}" for n in range(5))
    assert "LABEL_" in repr(found)
    model.config.values["id2label"] = dict(enumerate("abcde"))
    assert model.classify(TEXTS[0]).labels == ("a", "b", "c", "d", "e")


def test_number_that_was_learnt_is_the_value_itself(tmp_path: Path) -> None:
    model = load(bert(tmp_path, "ForSequenceClassification", num_labels=1), dtype=torch.float64)
    found = model.classify(TEXTS[0])
    assert found.measure == "value"
    torch.testing.assert_close(found.probabilities[0], logits(model, TEXTS[0]), rtol=0, atol=1e-14)
    assert "value" in repr(found)


@pytest.mark.parametrize("make", [gpt2, bart])
def test_decoders_classify_too(make: Any, tmp_path: Path) -> None:
    model = load(make(tmp_path, "ForSequenceClassification"), dtype=torch.float64)
    found = model.classify(["a cat", "a cat sat on the mat"])
    torch.testing.assert_close(found.probabilities[0], logits(model, "a cat").softmax(-1), rtol=0, atol=1e-13)
    assert found.labels[:2] == ("LABEL_0", "LABEL_1")


def test_too_long_a_text_is_refused_or_cut(model: Any) -> None:
    with pytest.raises(ValueError, match=r"text.*0.*43.*37"):
        model.classify("cat " * 41)
    cut = model.classify("cat " * 41, truncate=True)
    assert torch.equal(cut.probabilities, model.classify("cat " * 35).probabilities)


# ------------------------------------------------------------------------------------------------------------- follows


@pytest.mark.parametrize("head", ["ForNextSentencePrediction", "ForPreTraining"])
def test_follows_is_the_first_of_two_probabilities(head: str, tmp_path: Path) -> None:
    model = load(bert(tmp_path, head), dtype=torch.float64)
    encoded = model.tokenizer.encode("a cat", "it sat")
    result = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.types]))
    wanted = (result.logits if head.startswith("ForNext") else result.seq_relationship_logits)[0].softmax(-1).tolist()
    assert model.follows("a cat", "it sat") == pytest.approx(wanted[0], abs=1e-14)
    with pytest.raises(ValueError, match=r"53.*37"):
        model.follows("cat " * 20, "cat " * 30)


# ---------------------------------------------------------------------------------------------------------------- tags


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: Any) -> Any:
    labels = {"id2label": PEOPLE, "label2id": {v: k for k, v in PEOPLE.items()}}
    return load(bert(tmp_path_factory.mktemp("tagger"), "ForTokenClassification", **labels), dtype=torch.float64)


def test_each_token_has_its_likeliest_label_and_its_place(tagger: Any) -> None:
    text = "The cat sat, 고양이가 앉았다."
    found = tagger.tag(text)
    chances = logits(tagger, text).softmax(-1)[1:-1]  # without the frame
    assert [token.label for token in found.tokens] == [PEOPLE[n] for n in chances.argmax(-1).tolist()]
    assert [token.probability for token in found.tokens] == chances.amax(-1).tolist()
    assert [text[token.start : token.end] for token in found.tokens] == [token.text for token in found.tokens]
    assert [token.text for token in found.tokens][:3] == ["The", "cat", "sat"]
    assert len(repr(found).splitlines()) == 2 + len(found.tokens)
    assert found._repr_html_().count("<tr>") == 1 + len(found.tokens)


def test_new_head_of_a_tagger_numbers_its_labels(tmp_path: Path) -> None:
    model = load(bert(tmp_path, "ForTokenClassification", id2label=PEOPLE), dtype=torch.float64)
    model.head = Labels(model.head.score.in_features, 7, pooled=False).double()
    assert {token.label for token in model.tag(TEXTS[2]).tokens} <= {f"LABEL_{n}" for n in range(7)}


def test_neighbours_of_one_label_are_one_span() -> None:
    text = "Kim Jo met Lee in Seoul City x"
    words = [("Kim", "B-PER"), ("Jo", "I-PER"), ("met", "O"), ("Lee", "I-PER"), ("in", "O"), ("Seoul", "B-LOC")]
    words += [("City", "B-LOC"), ("x", "NOUN")]
    tokens = tuple(
        Span(word, label, text.index(word), text.index(word) + len(word), 0.25 if word == "Jo" else 0.75)
        for word, label in words
    )
    spans = Tagged(text, tokens).spans
    assert [(span.text, span.label) for span in spans] == [
        ("Kim Jo", "PER"),
        ("Lee", "PER"),
        ("Seoul", "LOC"),
        ("City", "LOC"),
        ("x", "NOUN"),
    ]
    assert spans[0].probability == 0.5


def test_one_label_after_another_is_two_spans() -> None:
    tokens = (Span("a", "I-PER", 0, 1, 1.0), Span("b", "I-LOC", 2, 3, 1.0))
    assert [span.label for span in Tagged("a b", tokens).spans] == ["PER", "LOC"]
    assert Tagged("a", (Span("a", "O", 0, 1, 1.0),)).spans == ()
