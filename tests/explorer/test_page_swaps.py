"""Two texts in the page: a word that is swapped, differences in map and words; models opened by place, and Korean."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import BEARER, PLAYWRIGHT, ready, serving, until
from speaking_twins import bert, gpt2
from torch import Tensor

import regard
from regard.explorer import jobs
from regard.explorer.jobs import ModelShelf
from regard.session.default_models import FETCH, KOREAN, default_model
from regard.session.session import Session, look_at, session_of

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
SENTENCE = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."
LONGER = "The animal didn't cross the street because it was too extremely tired."
TIRED = 13


@pytest.fixture(scope="module")
def sessions(models: ModelShelf) -> dict[str, Session]:
    with models.using(models.find(None), lambda done, total: None) as model:
        return {text: look_at(text, model) for text in (SENTENCE, WIDE, LONGER)}


@pytest.fixture(scope="module")
def theirs(sessions: dict[str, Session]) -> dict[str, Tensor]:
    """What transformers' eager attention gives: (L, H, N, N) for each text."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(default_model(), attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    with torch.no_grad():
        outputs = {text: model(**tokenizer(text, return_tensors="pt"), output_attentions=True) for text in sessions}
    return {text: torch.stack(output.attentions)[:, 0] for text, output in outputs.items()}


@pytest.fixture(scope="module")
def site(sessions: dict[str, Session]) -> Iterator[str]:
    with serving(list(sessions.values())) as address:
        yield address


def word(page: Any, index: int, side: str = "first") -> Any:
    return page.locator(f'[data-side={side}] .text-piece[data-index="{index}"]')


# ------------------------------------------------------------------------------------------------------------- swapping


def test_swapped_word_opens_the_comparison_and_names_the_heads_that_changed_most(page, models, sessions):
    with serving([sessions[SENTENCE]], models) as address:
        ready(page, address)
        expect(page.locator(".pencil")).to_be_visible()  # the page knows that words can be swapped
        word(page, TIRED).dblclick()  # the one gesture; the rest is typed
        field = page.locator(".swap input")
        expect(field).to_be_focused()
        expect(field).to_have_value("tired")
        page.keyboard.type("wide")
        page.keyboard.press("Enter")
        chips = page.locator(".changes .chip")
        expect(chips).to_have_count(12)
        expect(page.locator(".swap")).to_have_count(0)
        expect(word(page, TIRED)).to_have_text("tired")
        expect(word(page, TIRED, "second")).to_have_text("wide")
        ranked = regard.compare(sessions[SENTENCE].capture, sessions[WIDE].capture).heads[:12]
        layers = {layer.path: layer.index for layer in sessions[SENTENCE].layers}
        found = chips.evaluate_all("all => all.map((one) => [one.dataset.head, one.dataset.moved, one.textContent])")
        assert [head for head, _, _ in found] == [f"{layers[one.path]}.{one.head}" for one in ranked]
        assert [float(moved) for _, moved, _ in found] == pytest.approx([one.moved for one in ranked], abs=1e-5)
        assert found[0][2] == f"L{layers[ranked[0].path]} H{ranked[0].head} {ranked[0].moved:.2f}"
        first, third = (chips.nth(n) for n in (0, 2))
        expect(first).to_have_attribute("aria-pressed", "true")
        third.click()
        expect(third).to_have_attribute("aria-pressed", "true")
        layer, head = found[2][0].split(".")
        cell = f'.cell[data-layer="{layer}"][data-head="{head}"]'
        expect(page.locator(f"[data-side=first] {cell}")).to_have_attribute("aria-selected", "true")
        expect(page).to_have_url(re.compile(f"layer={layer}&head={head}&"))
        page.reload()
        expect(page.locator(".changes .chip[aria-pressed=true]")).to_have_attribute("data-head", found[2][0])


def test_word_is_swapped_by_key_and_by_pencil_and_the_field_is_left_by_escape(page, models, sessions):
    with serving([sessions[SENTENCE]], models) as address:
        ready(page, f"{address}/#layer=3&head=1&token={TIRED}")
        word(page, TIRED).focus()
        page.keyboard.press("e")
        field = page.locator(".swap input")
        expect(field).to_have_value("tired")
        field.fill("  ")
        page.keyboard.press("Enter")
        expect(page.locator(".swap .error")).to_be_visible()
        page.keyboard.press("Escape")
        expect(field).to_have_count(0)
        expect(word(page, TIRED)).to_be_focused()
        page.locator("[data-role=swap]").click()
        expect(field).to_have_value("tired")
        field.fill("asleep")
        page.keyboard.press("Enter")
        expect(word(page, TIRED, "second")).to_have_text("asleep")


def test_special_tokens_and_captures_without_a_model_have_no_words_to_swap(page, site, sessions, tmp_path):
    ready(page, site)
    word(page, 0).dblclick()
    expect(page.locator(".swap")).to_have_count(0)
    with serving([session_of(sessions[SENTENCE].capture)]) as address:
        ready(page, address)
        expect(page.locator("[data-role=swap]")).to_be_hidden()
        word(page, TIRED).dblclick()
        expect(page.locator(".swap")).to_have_count(0)


# ---------------------------------------------------------------------------------------------------------- differences


def compared(page: Any, site: str, second: int, **more: object) -> None:
    state = {"session": 1, "layer": 3, "head": 1, "token": 10, "with.session": second, "with.token": 10}
    query = "&".join(f"{name}={value}" for name, value in (state | {"with.difference": 1} | more).items())
    ready(page, f"{site}/#{query}")


def test_words_and_map_are_coloured_by_the_difference_of_weights(page, site, theirs):
    compared(page, site, 2)
    gap = theirs[WIDE][3, 1] - theirs[SENTENCE][3, 1]
    expect(page.locator("[data-side=second] .said-how")).to_contain_text("second − first")
    pieces = page.locator("[data-side=second] .text-piece")
    shown = pieces.evaluate_all("all => all.map((one) => [one.dataset.weight, getComputedStyle(one).backgroundColor])")
    assert [float(weight) for weight, _ in shown] == pytest.approx(gap[10].tolist(), abs=1e-6)
    less, more = int(gap[10].argmin()), int(gap[10].argmax())
    red, _, blue = (int(part) for part in re.findall(r"\d+", shown[less][1])[:3])
    assert blue > red, "less is blue"
    red, _, blue = (int(part) for part in re.findall(r"\d+", shown[more][1])[:3])
    assert red > blue, "more is orange"
    high = float(gap.abs().max())
    expect(page.locator("[data-side=second] .map-high")).to_have_text(f"+{high:.4f}")
    expect(page.locator("[data-side=second] .map-low")).to_have_text(f"−{high:.4f}")
    listed = page.locator("[data-side=second] .text-links button").first
    key = int(gap[10].abs().argmax())
    assert float(listed.get_attribute("data-weight")) == pytest.approx(float(gap[10, key]), abs=1e-6)
    expect(listed).to_have_attribute("data-key", str(key))

    tip = page.locator("[data-side=second] .map-tip")
    page.locator("[data-side=second] .map-canvas").hover()
    expect(tip).to_be_visible()
    query, column = (int(tip.locator(f".tip-{side} .tip-place").inner_text()) for side in ("query", "key"))
    weight = float(tip.locator("[data-weight]").get_attribute("data-weight"))
    assert weight == pytest.approx(float(gap[query, column]), abs=1e-6)

    page.locator("[data-role=difference]").uncheck()
    expect(page.locator("[data-side=second] .map-low")).to_have_text("0")
    until(page, lambda: float(word(page, 2, "second").get_attribute("data-weight") or -1) >= 0)
    assert float(word(page, 2, "second").get_attribute("data-weight")) == pytest.approx(
        float(theirs[WIDE][3, 1, 10, 2]), abs=1e-6
    )


def test_words_without_a_counterpart_are_left_out_and_that_is_said(page, site, theirs, sessions):
    compared(page, site, 3)
    counts = [len(sessions[text].tokens) for text in (SENTENCE, LONGER)]
    assert counts[1] == counts[0] + 1
    note = page.locator(".changes .about")
    expect(note).to_contain_text(f"{counts[0]} and {counts[1]} tokens")
    old, new = theirs[SENTENCE][3, 1, 10], theirs[LONGER][3, 1, 10]
    expect(page.locator("[data-side=second] .said-how")).to_contain_text("second − first")
    shown = page.locator("[data-side=second] .text-piece").evaluate_all("all => all.map((one) => one.dataset.weight)")
    assert shown[TIRED] == "", "extremely is new"
    places = [at for at in range(counts[1]) if at != TIRED]
    gaps = [float(new[at] - old[at if at < TIRED else at - 1]) for at in places]
    assert [float(shown[at]) for at in places] == pytest.approx(gaps, abs=1e-6)
    word(page, TIRED, "second").click()
    expect(page.locator("[data-side=second] .text-readout")).to_contain_text("no counterpart")


def test_sessions_of_different_models_are_compared_without_a_ranking(page, sessions, tmp_path):
    other = look_at("the cat", bert(tmp_path / "bert", "Model"))
    with serving([sessions[SENTENCE], other]) as address:
        ready(page, f"{address}/#session=1&layer=1&head=1&token=1&with.session=2&with.token=1")
        expect(word(page, 1, "second")).to_have_text("the")
        expect(page.locator(".changes .chip")).to_have_count(0)


# --------------------------------------------------------------------------------------------------------------- models


def refusing(browser: Any) -> Any:
    """A page whose console may say that a request was refused."""
    return browser.new_context(locale="en-US", extra_http_headers=BEARER)


def test_model_is_opened_by_its_directory_and_chosen(page, tmp_path):
    bert(tmp_path / "tiny-bert", "Model")
    gpt2(tmp_path / "tiny-gpt2")
    with serving([], ModelShelf([str(tmp_path / "tiny-bert")], demo=False)) as address:
        page.goto(address)
        model = page.locator("[data-role=model]")
        expect(model.locator("option")).to_have_text(["automatic", "tiny-bert"])
        for _ in range(2):  # a second time it is not listed twice
            page.locator("[data-role=where]").fill(str(tmp_path / "tiny-gpt2"))
            page.locator("[data-role=open-model]").click()
            expect(model).to_have_value("1")
            expect(model.locator("option")).to_have_text(["automatic", "tiny-bert", "tiny-gpt2"])
        page.locator("[data-role=text]").fill("the cat")
        page.keyboard.press("Control+Enter")
        expect(page.locator(".facts")).to_contain_text("tiny-gpt2")


def test_wrong_directory_and_hub_that_cannot_be_reached_are_said_clearly(browser, tmp_path, monkeypatch):
    bert(tmp_path / "tiny-bert", "Model")

    def find(where: str) -> Path:
        raise ConnectionError(f"the hub cannot be reached, and {where!r} is not in the cache")

    monkeypatch.setattr(jobs, "find", find)
    context = refusing(browser)
    try:
        with serving([], ModelShelf([str(tmp_path / "tiny-bert")], demo=False)) as address:
            page = context.new_page()
            page.goto(address)
            where, error = page.locator("[data-role=where]"), page.locator(".progress .error")
            where.fill(str(tmp_path / "nowhere"))
            page.keyboard.press("Enter")
            expect(error).to_contain_text("'nowhere'")
            expect(where).to_have_value(str(tmp_path / "nowhere"))
            where.fill("owner/name")
            page.keyboard.press("Enter")
            expect(error).to_contain_text("'owner/name' is not in the cache")
            where.fill("")
            page.keyboard.press("Enter")
            expect(error).to_contain_text("first")
            expect(page.locator("[data-role=model] option")).to_have_text(["automatic", "tiny-bert"])
    finally:
        context.close()


def test_automatic_leaves_the_model_to_the_server(page, tmp_path):
    bert(tmp_path / "tiny-bert", "Model")
    with serving([], ModelShelf([str(tmp_path / "tiny-bert")], demo=False)) as address:
        page.goto(address)
        expect(page.locator("[data-role=model]")).to_have_value("")
        page.locator("[data-role=text]").fill("the cat")
        with page.expect_request("**/api/look") as sent:
            page.keyboard.press("Control+Enter")
        assert json.loads(sent.value.post_data)["model"] is None
        expect(page.locator(".facts")).to_contain_text("tiny-bert")


def test_korean_text_is_offered_to_the_model_that_knows_korean(page, models, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_HOME", str(tmp_path))
    text = "동물은 너무 피곤해서 길을 건너지 않았다"
    with models.using(models.find("demo"), lambda done, total: None) as model:
        session = look_at(text, model)
    with serving([session], ModelShelf()) as address:
        ready(page, address)
        note = page.locator(".suggestion")
        expect(note.locator("code")).to_have_text(FETCH)
        expect(page.locator("[data-role=korean]")).to_have_count(0)
        shutil.copytree(bert(tmp_path / "made", "Model"), KOREAN.directory)  # as if it had been fetched meanwhile
        page.reload()
        page.locator("[data-role=korean]").click()
        expect(page.locator(".facts")).to_contain_text(KOREAN.name)
        expect(note).to_have_count(0)
