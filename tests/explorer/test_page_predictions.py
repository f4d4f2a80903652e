"""What the page says that a model predicts, against transformers, and what switching heads off changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from browsing import PLAYWRIGHT, ready, serving
from speaking_twins import bert, gpt2
from torch import Tensor

import regard
from regard.explorer.export import write_html
from regard.models.loading import load
from regard.session.session import Session, look_at
from regard.training.tokenizers import byte_tokenizer

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
TEXT = "The animal did not cross the street"
MASKED = "The [MASK] did not cross the [MASK]."
LAYER, HEAD = 1, 2


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def session(decoder: Path) -> Session:
    return look_at(TEXT, decoder)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return look_at(MASKED, load(bert(tmp_path_factory.mktemp("bert"), "ForMaskedLM")))


@pytest.fixture(scope="module")
def site(session: Session, masked: Session) -> Iterator[str]:
    with serving([session, masked]) as address:
        yield address


@pytest.fixture(scope="module")
def theirs(decoder: Path, session: Session) -> Tensor:
    """(V) the logits of transformers after the last token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(session.model.tokenizer.batch([TEXT]).input_ids).logits[0, -1].double()


def off_by_hand(session: Session, *places: tuple[int, int]) -> Tensor:
    """The logits of the model while heads are ablated with `regard.edit`."""
    edits = [regard.edits.ablate(session.layers[layer].path, [head]) for layer, head in places]
    with regard.edit(session.model, *edits):
        return session.again().logits[0].double()


def shown(page: Any) -> list[tuple[int, float, float | None]]:
    """id, probability and probability before of each line."""
    lines = page.locator(".predicted li")
    expect(lines.first).to_be_visible()
    values = lines.evaluate_all(
        "all => all.map((one) => [one.dataset.id, one.dataset.probability, one.dataset.before])"
    )
    return [(int(n), float(p), None if before is None else float(before)) for n, p, before in values]


def assert_probabilities(lines: list[tuple[int, float, float | None]], logits: Tensor, temperature: float) -> None:
    chances = (logits / temperature).softmax(0)
    assert [n for n, _, _ in lines[:10]] == logits.topk(10).indices.tolist()
    assert [p for _, p, _ in lines] == pytest.approx([float(chances[n]) for n, _, _ in lines], abs=1e-6)


def test_next_token_has_the_probabilities_of_transformers_at_every_temperature(page, site, theirs):
    ready(page, f"{site}/#session=1&layer={LAYER}&head={HEAD}")
    lines = shown(page)
    assert_probabilities(lines, theirs, 1.0)
    assert [before for _, _, before in lines] == [None] * 10
    number = page.locator(".predicted li .number").first.inner_text()
    assert float(number) == pytest.approx(float(theirs.softmax(0).max()), abs=0.0005)
    slider = page.locator("[data-role=temperature]")
    for temperature in (0.1, 0.5, 2.0):
        slider.fill(str(round(10 * temperature) - 1))
        expect(page.locator(".temperature output")).to_have_text(f"{temperature:.1f}")
        assert_probabilities(shown(page), theirs, temperature)
    expect(slider).to_be_visible()


def test_head_that_is_switched_off_changes_probabilities_as_by_hand(page, site, session, theirs):
    ready(page, f"{site}/#session=1&layer={LAYER}&head={HEAD}")
    switch = page.locator("[data-role=switch]")
    expect(switch).to_have_text("Switch L1 H2 off")
    switch.click()
    chip = page.locator("[data-off='1.2']")
    expect(chip).to_have_text(re.compile("L1 H2"))
    expect(page.locator(".predicted.changed")).to_be_visible()
    logits = off_by_hand(session, (1, 2))[-1]
    lines = shown(page)
    assert_probabilities(lines, logits, 1.0)
    old = theirs.softmax(0)
    assert [before for _, _, before in lines] == pytest.approx([float(old[n]) for n, _, _ in lines], abs=1e-6)
    assert set(theirs.topk(10).indices.tolist()) <= {n for n, _, _ in lines}
    assert max(abs(p - before) for _, p, before in lines) > 1e-3, "the head does something"

    page.locator('.cell[data-layer="0"][data-head="1"]').click()
    expect(switch).to_have_text("Switch L0 H1 off")
    switch.click()
    expect(page.locator("[data-off]")).to_have_count(2)
    expect(page).to_have_url(re.compile("off=1.2%2C0.1"))
    page.reload()
    expect(page.locator("[data-off]")).to_have_count(2)
    expect(page.locator(".predicted.changed")).to_be_visible()
    assert_probabilities(shown(page), off_by_hand(session, (1, 2), (0, 1))[-1], 1.0)
    for name in ("1.2", "0.1"):
        page.locator(f"[data-off='{name}']").click()
        expect(page.locator(f"[data-off='{name}']")).to_have_count(0)
    expect(page.locator(".predicted:not(.changed)")).to_be_visible()
    assert_probabilities(shown(page), theirs, 1.0)


def test_maps_stay_those_of_all_heads_while_one_is_off(page, site, session):
    ready(page, f"{site}/#session=1&layer={LAYER}&head={HEAD}&off=0.1&token=3&key=1")
    expect(page.locator("[data-off]")).to_have_count(1)
    weight = page.locator(".said-weight[data-query='3'][data-key='1']")
    expected = float(session.layers[LAYER].view.row(3)[0, HEAD, 1])
    assert float(weight.get_attribute("data-weight")) == pytest.approx(expected, abs=1e-6)


def test_each_mask_is_filled_with_its_own_words(page, site, masked):
    ready(page, f"{site}/#session=2&layer=0&head=1")
    logits = masked.again().logits[0].double()
    masks = [at for at, label in enumerate(masked.tokens) if label == "[MASK]"]
    for at in masks:
        page.locator(f"[data-choice=mask] >> text='{at}'").click()
        expect(page.locator(".predictions .about").first).to_contain_text(str(at))
        assert_probabilities(shown(page), logits[at], 1.0)
    page.locator("[data-role=switch]").click()
    expect(page.locator(".predicted.changed")).to_be_visible()
    assert_probabilities(shown(page), off_by_hand(masked, (0, 1))[masks[-1]], 1.0)


def test_labels_of_a_classifier_have_probabilities(page, tmp_path):
    made = look_at(TEXT, bert(tmp_path / "classifier", "ForSequenceClassification"))
    logits = made.again().logits[0].double()
    names = made.model.config.labels(len(logits))
    with serving([made]) as address:
        ready(page, address)
        lines = shown(page)
        assert [p for _, p, _ in lines] == pytest.approx(sorted(logits.softmax(0).tolist(), reverse=True), abs=1e-6)
        best = page.locator(".predicted .called").first
        expect(best).to_have_text(names[int(logits.argmax())])


def test_model_without_a_head_says_so_in_a_sentence(page, tmp_path):
    plain = look_at(TEXT, bert(tmp_path / "plain", "Model"))
    unmasked = look_at(TEXT, bert(tmp_path / "masks", "ForMaskedLM"))
    with serving([plain, unmasked]) as address:
        ready(page, f"{address}/#session=1")
        expect(page.locator(".predictions")).to_contain_text("no head")
        expect(page.locator("[data-role=switch]")).to_have_count(0)
        page.locator("[data-role=session]").select_option("2")
        expect(page.locator(".predictions")).to_contain_text("[MASK]")
        expect(page.locator(".predicted")).to_have_count(0)


def test_heads_of_a_model_that_runs_one_layer_twice_are_not_offered_to_be_switched_off(page):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
    sizes |= {"embedding_size": 8, "vocab_size": 256, "max_position_embeddings": 64}
    model = regard.build("albert", **sizes, task="text-classification", num_labels=3)
    model.tokenizer = byte_tokenizer()
    with serving([look_at("abc", model)]) as address:
        ready(page, address)
        expect(page.locator(".predicted li")).to_have_count(3)
        expect(page.locator(".predictions")).to_contain_text("several times")
        expect(page.locator("[data-role=switch]")).to_have_count(0)


def test_exported_page_has_the_prediction_and_no_switch(page, session, theirs, tmp_path):
    write_html(session, tmp_path / "page.html")
    ready(page, f"{(tmp_path / 'page.html').as_uri()}#off=1.2")
    assert_probabilities(shown(page), theirs, 1.0)
    expect(page.locator("[data-role=switch]")).to_have_count(0)
    expect(page.locator(".predictions")).to_contain_text("regard serve")


def test_prediction_is_korean_in_a_korean_page(page, site):
    ready(page, f"{site}/#session=1&lang=ko&layer=0&head=1&off=1.2")
    expect(page.locator(".predictions h2")).to_have_text("예측")
    expect(page.locator("[data-role=switch]")).to_have_text("L0 H1 끄기")
