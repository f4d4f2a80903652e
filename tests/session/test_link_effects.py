"""What a link does, as a session measures it: the numbers of regard.effect, and why some links cannot be measured."""

from pathlib import Path

import pytest
from seeing_twins import blip, picture, swin, vit
from speaking_twins import bert, gpt2, t5

import regard
from regard import edits, metrics
from regard.models.loading import load
from regard.models.model import Model
from regard.session.effects import check_link, measure_heads, measure_link, unsupported_reason
from regard.session.session import Session, look_at, look_at_image, session_of

TEXT = "The animal did not cross the street."
TOKEN, KEY = 5, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(bert(tmp_path_factory.mktemp("models") / "bert", "Model"))


@pytest.fixture
def session(model: Model) -> Session:
    return look_at(TEXT, model)


def in_python(model: Model, layer: int, head: int, controls: int = 20) -> regard.edits.effects.Effect:
    """The same by hand, as docs/why.md does it."""
    ids = model.tokenizer.batch([TEXT]).input_ids
    hide = edits.knock_out(layer, head, queries=TOKEN, keys=KEY)
    return regard.effect(lambda: model(ids), model, hide, metrics.moved(TOKEN), controls=controls)


def test_link_has_the_numbers_of_regard_effect(model, session):
    ours, theirs = measure_link(session, (1, 2, TOKEN, KEY)), in_python(model, 1, 2)
    assert (ours["effect"], ours["p_value"], ours["method"]) == (theirs.value, theirs.p_value, theirs.method)
    assert ours["controls"] == list(theirs.controls)
    assert len(ours["controls"]) > 3
    assert ours["weight"] == theirs.weight == pytest.approx(float(session.capture[1].row(TOKEN)[0, 2, KEY]))
    assert session.effects.links == {(1, 2, TOKEN, KEY): ours}


def test_heads_have_the_numbers_of_regard_effect(model, session):
    steps = list(measure_heads(session, TOKEN, KEY))
    weights, effects = session.effects.heads[TOKEN, KEY]
    places = [(layer.index, head) for layer in session.layers for head in range(layer.view.sizes[1])]
    assert steps == [(n, len(places)) for n in range(1, len(places) + 1)]
    for place in places[:2] + places[-2:]:
        theirs = in_python(model, *place, controls=0)
        assert float(effects[place]) == pytest.approx(theirs.value, rel=1e-6)
        assert float(weights[place]) == pytest.approx(theirs.weight, rel=1e-6)
    assert float(effects.min()) > 0


def test_model_gets_its_mode_back(model, session):
    model.train()
    try:
        measure_link(session, (0, 0, TOKEN, KEY))
        list(measure_heads(session, TOKEN, KEY))
        assert model.training
    finally:
        model.eval()


def test_masked_key_is_no_link(tmp_path):
    causal = look_at(TEXT, load(gpt2(tmp_path / "gpt2")))
    for place in ((None, None), (1, 0)):
        with pytest.raises(ValueError, match=r"\(1\).*\(4\)"):
            check_link(causal, 1, 4, *place)
    assert measure_link(causal, (1, 0, 4, 1))["effect"] > 0


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ((TOKEN, KEY, 9, 0), "layer 9"),
        ((TOKEN, KEY, 0, 99), "head 99"),
        ((99, KEY), "token 99"),
        ((TOKEN, -1), "key -1"),
    ],
)
def test_place_that_is_not_there_is_named(session, place, words):
    with pytest.raises(IndexError, match=words):
        check_link(session, *place)


def test_layer_without_a_head_is_refused(session):
    with pytest.raises(ValueError, match=r"layer 1.*head None"):
        check_link(session, TOKEN, KEY, 1)


def test_capture_without_its_model_says_so(session):
    alone = session_of(session.capture)
    assert {unsupported_reason(alone, layer) for layer in alone.layers} == {"no_model"}
    with pytest.raises(ValueError, match="no model"):
        measure_link(alone, (0, 0, TOKEN, KEY))


def test_encoder_is_measured_and_its_decoder_is_not(tmp_path):
    both = look_at("the cat and the dog", load(t5(tmp_path / "t5")))
    reasons = [unsupported_reason(both, layer) for layer in both.layers]
    assert {None, "other_tokens"} == set(reasons)
    list(measure_heads(both, 2, 1))
    _, effects = both.effects.heads[2, 1]
    for layer, reason in zip(both.layers, reasons, strict=True):
        row = effects[layer.index, : layer.view.sizes[1]]
        assert bool((row > 0).all()) if reason is None else bool(row.isnan().all())


def test_patches_of_an_image_are_measured(tmp_path):
    seen = look_at_image(picture(), load(vit(tmp_path / "vit")))
    assert measure_link(seen, (0, 1, 0, 3))["effect"] > 0


def test_words_and_patches_of_an_image_text_model_are_measured_each_on_their_own_vectors(tmp_path):
    seen = look_at_image(picture(), load(blip(tmp_path / "blip", "ForConditionalGeneration")), text="the cat")
    first, last = seen.layers[0], seen.layers[-1]
    assert first.view.sizes[2] != last.view.sizes[2]
    assert all(measure_link(seen, (layer.index, 0, 2, 1))["effect"] > 0 for layer in (first, last))


def test_windows_are_not_measured(tmp_path: Path):
    seen = look_at_image(picture(), load(swin(tmp_path / "swin")))
    with pytest.raises(ValueError, match="windows"):
        measure_link(seen, (0, 0, 0, 1))
