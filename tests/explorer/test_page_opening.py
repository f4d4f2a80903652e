"""What the page opens on, its tour, its examples and its order on narrow screens, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import PLAYWRIGHT, ready, serving, until
from seeing_twins import picture
from shown_twins import registers
from speaking_twins import gpt2, t5

from regard.explorer import answers
from regard.explorer.export import write_html
from regard.explorer.jobs import ModelShelf
from regard.session.session import Session, look_at, look_at_image

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
TEXT = "The trophy didn't fit into the suitcase because it was too large, and nobody had measured it."
PHONE = {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def session(models: ModelShelf) -> Session:
    with models.using(models.find(None), lambda done, total: None) as model:
        return look_at(TEXT, model)


@pytest.fixture(scope="module")
def site(session: Session, models: ModelShelf) -> Iterator[str]:
    with serving([session], models) as address:
        yield address


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return look_at_image(picture(), registers(tmp_path_factory.mktemp("registers")))


def exact(session: Session, link: Any) -> float:
    """The weight of a link, computed from q and k."""
    weights = session.layers[link["layer"]].view.tile(slice(None), slice(None))[0]
    return float(weights[link["head"], link["query"], link["key"]])


def place(page: Any) -> dict[str, int]:
    """Layer, head, token and key that the address names, once it does."""
    names = ("layer", "head", "token", "key")
    until(page, lambda: "key=" in page.evaluate("location.hash"))
    said = dict(part.split("=") for part in page.evaluate("location.hash")[1:].split("&"))
    return {name: int(said.get(name, 0)) for name in names}


def at(link: Any) -> dict[str, int]:
    return {"layer": link["layer"], "head": link["head"], "token": link["query"], "key": link["key"]}


# ------------------------------------------------------------------------------------------------------ strongest links


def test_page_opens_on_the_first_of_the_strongest_links(page, site, session):
    links = answers.ranked(session)["links"]
    ready(page, site)
    chips = page.locator(".ranked .chip")
    expect(chips).to_have_count(len(links))
    expect(chips.first).to_have_attribute("aria-pressed", "true")
    for n, link in enumerate(links):
        words = chips.nth(n).locator("bdi").all_inner_texts()
        assert words == link["words"]
        assert float(chips.nth(n).get_attribute("data-weight")) == pytest.approx(exact(session, link), abs=1e-6)
        assert chips.nth(n).locator("b").inner_text() == f"{exact(session, link):.2f}"
        assert chips.nth(n).locator(".chip-head").last.inner_text() == f"L{link['layer']} H{link['head']}"
    assert place(page) == at(links[0])
    said = page.locator(".said-weight")
    assert float(said.get_attribute("data-weight")) == pytest.approx(exact(session, links[0]), abs=1e-6)


def test_link_that_is_clicked_is_shown_in_its_head(page, site, session):
    link = answers.ranked(session)["links"][3]
    ready(page, site)
    page.locator(".ranked .chip").nth(3).click()
    expect(page.locator(".ranked .chip").nth(3)).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".ranked [aria-pressed=true]")).to_have_count(1)
    cell = f'.cell[data-layer="{link["layer"]}"][data-head="{link["head"]}"]'
    expect(page.locator(cell)).to_have_attribute("aria-selected", "true")
    said = page.locator(f'.said-weight[data-query="{link["query"]}"][data-key="{link["key"]}"]')
    expect(said).to_be_visible()
    assert float(said.get_attribute("data-weight")) == pytest.approx(exact(session, link), abs=1e-6)


def test_address_that_names_a_place_wins_over_the_first_link(page, site):
    ready(page, f"{site}#layer=1&head=2&token=3&key=4")
    expect(page.locator('.said-weight[data-query="3"][data-key="4"]')).to_be_visible()
    expect(page.locator(".ranked .chip").first).to_have_attribute("aria-pressed", "false")
    assert place(page) == {"layer": 1, "head": 2, "token": 3, "key": 4}


def test_effect_stands_beside_a_link_once_it_is_measured(page, site, session):
    ready(page, site)
    expect(page.locator(".chip-effect")).to_have_count(0)
    page.get_by_role("button", name="Measure in this head").click()
    expect(page.locator(".ranked .chip").first.locator(".chip-effect")).to_be_visible()
    link = answers.ranked(session)["links"][0]
    assert link["effect"] is not None
    shown = page.locator(".chip-effect").first.inner_text()
    assert float(re.search(r"[\d.]+", shown)[0]) == pytest.approx(100 * link["effect"], rel=5e-3)


def test_exported_page_opens_on_the_first_link_without_a_server(page, session, tmp_path: Path):
    write_html(session, tmp_path / "page.html")
    link = answers.ranked(session)["links"][0]
    ready(page, (tmp_path / "page.html").as_uri())
    expect(page.locator(".ranked .chip").first).to_have_attribute("aria-pressed", "true")
    said = page.locator(f'.said-weight[data-query="{link["query"]}"][data-key="{link["key"]}"]')
    assert float(said.get_attribute("data-weight")) == pytest.approx(exact(session, link), abs=1e-6)
    expect(page.locator(".tour-card, .tour-offer")).to_have_count(0)


def test_image_page_opens_on_the_strongest_patch_link(page, photo):
    links = answers.ranked(photo)["links"]
    with serving([photo]) as address:
        page.goto(address)
        expect(page.locator(".ranked .chip").first).to_have_attribute("aria-pressed", "true")
        assert place(page) == at(links[0])
        said = page.locator(f'.said-weight[data-query="{links[0]["query"]}"][data-key="{links[0]["key"]}"]')
        expect(said).to_be_visible()
        assert float(said.get_attribute("data-weight")) == pytest.approx(exact(photo, links[0]), abs=1e-6)
        wide = {name: page.locator(f".pane.{name}").bounding_box()["width"] for name in ("atlas", "map", "text")}
        assert wide["text"] > wide["atlas"] + wide["map"]


def test_image_is_shown_in_its_colours(page, photo):
    """Beside the patches that colours lie on: the last pixels of the picture are in none."""
    with serving([photo]) as address:
        page.goto(address)
        canvas = page.locator(".image-canvas[data-plot]")
        expect(page.locator(".image-share").first).to_be_visible()
        colourful = """(canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let most = 0;
          for (let i = 0; i < data.length; i += 4)
            if (data[i] > data[i + 2] && data[i + 3] === 255) most = Math.max(most, data[i] - data[i + 2]);
          return most;
        }"""  # red over blue: neither grey nor a colour of the ramp
        until(page, lambda: canvas.evaluate(colourful) > 40)


# ------------------------------------------------------------------------------------------------------------- the tour


def test_tour_goes_in_five_steps_by_keyboard_and_is_not_offered_again(page, site, session):
    link = answers.ranked(session)["links"][0]
    weight = f"{exact(session, link):.4f}"
    steps = answers.steps(session, link["layer"], link["head"], link["query"], link["key"])
    ready(page, site)
    page.locator(".tour-offer [data-role=tour]").focus()
    page.keyboard.press("Enter")
    card, ring = page.locator(".tour-card"), page.locator(".tour-ring")
    around = (".pane.text", ".pane.atlas", ".pane.map", ".pane.text", ".drawer .steps")
    said = []
    for n, target in enumerate(around):
        expect(card.locator(".tour-count")).to_have_text(f"{n + 1} / 5")
        expect(card.locator("[data-role=tour-next]")).to_be_focused()
        said.append(card.locator("#tour-text").inner_text())
        outer, inner = page.locator(target).first.bounding_box(), ring.bounding_box()
        assert outer["x"] - 3 <= inner["x"] + inner["width"] / 2 <= outer["x"] + outer["width"] + 3
        assert outer["y"] - 3 <= inner["y"] + inner["height"] / 2 <= outer["y"] + outer["height"] + 3
        page.keyboard.press("Enter")
    expect(card).to_have_count(0)
    assert str(len(session.tokens)) in said[0]
    assert f"layer {link['layer']}, head {link['head']}" in said[1].lower()
    assert all(word in text for word in link["words"] for text in said[2:])
    assert weight in said[3]
    assert weight in said[4]
    assert f"√{steps['d']}" in said[4]
    expect(page.locator(".tour-offer")).to_have_count(0)
    page.reload()
    ready(page, f"{site}#layer=1")
    expect(page.locator(".tour-offer, .tour-card")).to_have_count(0)


def test_tour_goes_back_ends_with_escape_and_gives_the_focus_back(page, site):
    ready(page, site)
    page.locator("[data-role=help]").click()
    page.locator(".help [data-role=tour]").click()
    count = page.locator(".tour-count")
    expect(count).to_have_text("1 / 5")
    expect(page.locator("[data-role=tour-next]")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(count).to_have_text("2 / 5")
    page.locator("[data-role=tour-back]").click()
    expect(count).to_have_text("1 / 5")
    page.keyboard.press("Escape")
    expect(page.locator(".tour-card, .tour-ring")).to_have_count(0)
    expect(page.locator("[data-role=help]")).to_be_focused()


def test_tour_follows_what_is_chosen_and_the_language(page, site, session):
    ready(page, site)
    page.locator(".tour-offer [data-role=tour]").click()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tour-count")).to_have_text("2 / 5")
    link = answers.ranked(session)["links"][2]
    page.locator(".ranked .chip").nth(2).click()
    expect(page.locator("#tour-text")).to_contain_text(f"layer {link['layer']}, head {link['head']}")
    page.locator('[data-choice=lang] [data-value="ko"]').click()
    expect(page.locator("#tour-text")).to_contain_text(f"레이어 {link['layer']}, 헤드 {link['head']}")


# ------------------------------------------------------------------------------------------------------------- examples


def read_example(page: Any, name: str) -> None:
    page.locator("[data-role=new]").click()
    page.locator(f"[data-example={name}]").click()
    expect(page.locator("dialog.choose")).to_be_hidden()


@pytest.mark.parametrize("pattern", ["induction", "previous", "delimiter"])
def test_example_opens_in_the_head_with_the_highest_score(page, session, models, pattern):
    with serving([session], models) as address:
        ready(page, address)
        read_example(page, pattern)
        until(page, lambda: f"measure={pattern}" in page.evaluate("location.hash"))
        found = place(page)
        text = page.evaluate("fetch('api/session/2/overview').then((answer) => answer.json())")["text"]
    with models.using(models.find(None), lambda done, total: None) as model:
        read = look_at(text, model)
    scores = torch.stack([numbers.patterns[pattern] for numbers in read.numbers])  # (layers, H)
    assert divmod(int(scores.argmax()), scores.shape[1]) == (found["layer"], found["head"])
    labels, query, key = read.tokens, found["token"], found["key"]
    if pattern == "previous":
        assert key == query - 1
    elif pattern == "induction":
        assert labels[key - 1] == labels[query]
    else:
        assert labels[key] in (".", ",", ";", "[SEP]")


def test_example_of_coreference_opens_on_the_pronoun(page, session, models):
    with serving([session], models) as address:
        ready(page, f"{address}#layer=0")
        read_example(page, "coreference")
        expect(page.locator(".text-readout .said-query")).to_have_text("it")
        expect(page.locator(".ranked [aria-pressed=true] bdi").first).to_have_text("it")


def test_example_without_its_kind_of_model_says_what_it_needs(page, site, tmp_path_factory):
    ready(page, site)
    page.locator("[data-role=new]").click()
    for name in ("translation", "image"):
        example = page.locator(f"[data-example={name}]")
        expect(example).to_be_disabled()
        expect(example).to_contain_text("--model")


def test_examples_of_translation_and_image_open_with_their_models(page, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    places = [gpt2(folder / "gpt2"), t5(folder / "t5"), registers(folder / "registers")]
    shelf = ModelShelf([str(where) for where in places], demo=False)
    with serving([look_at("A small house.", places[0])], shelf) as address:
        ready(page, address)
        read_example(page, "translation")
        expect(page.locator(".facts")).to_contain_text("t5")
        layers = page.evaluate("fetch('api/session/2/overview').then((answer) => answer.json())")["layers"]
        until(page, lambda: layers[place(page)["layer"]]["kind"] == "cross")
        read_example(page, "image")
        expect(page.locator(".image-canvas[data-plot]")).to_be_visible()
        expect(page.locator(".ranked .chip").first).to_have_attribute("aria-pressed", "true")


# --------------------------------------------------------------------------------------------------------------- layout


def test_narrow_page_has_the_text_first_and_the_drawer_shut(page, site):
    page.set_viewport_size(PHONE)
    ready(page, site)
    parts = [page.locator(f"[data-side=first] {name}") for name in (".text", ".ranked", ".map", ".atlas")]
    tops = [part.bounding_box()["y"] for part in parts]
    assert tops == sorted(tops)
    expect(page.locator("[data-role=drawer]")).to_have_attribute("aria-expanded", "false")
    assert "drawer" not in page.evaluate("location.hash")
    page.locator("[data-role=drawer]").click()
    until(page, lambda: "drawer=1" in page.evaluate("location.hash"))


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_narrow_page_does_not_scroll_sideways(page, site, lang):
    page.set_viewport_size(PHONE)
    ready(page, f"{site}#lang={lang}&drawer=1")
    expect(page.locator(".steps table")).to_be_attached()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    over = """() => [...document.querySelectorAll(".stage, .side, .pane, .drawer-body, .top, .foot")]
        .filter((at) => at.scrollWidth > at.clientWidth + 1).map((at) => at.className)"""
    assert page.evaluate(over) == []


def test_axes_of_the_map_are_named(fresh_page, site):
    fresh_page.add_init_script("""
        const { fillText } = CanvasRenderingContext2D.prototype;
        globalThis.written = new Set();
        CanvasRenderingContext2D.prototype.fillText = function (words, ...more) {
          if (this.canvas.className === "map-canvas") globalThis.written.add(words);
          return fillText.call(this, words, ...more);
        };""")
    ready(fresh_page, site)
    until(fresh_page, lambda: {"looks from ↓", "looks at →"} <= set(fresh_page.evaluate("[...written]")))


IN_SIGHT = """(word) => {
  const [one, room] = [word, word.closest(".text-scroll")].map((at) => at.getBoundingClientRect());
  return one.top >= room.top && one.bottom <= room.bottom;
}"""


def test_chosen_word_is_scrolled_to_and_stays_in_sight_until_somebody_scrolls(page, models):
    text = " ".join(f"The {word} went to the market and bought a lamp." for word in ("cat", "dog", "fox", "hen", "owl"))
    with models.using(models.find(None), lambda done, total: None) as model:
        read = look_at(text, model)
    last = len(read.tokens) - 3
    with serving([read]) as address:
        ready(page, f"{address}#layer=0&head=0&token={last}")
        word, pane = page.locator(f'.text-piece[data-index="{last}"]'), page.locator(".text-scroll")
        until(page, lambda: word.evaluate(IN_SIGHT))
        expect(page.locator(".text-links")).to_be_visible()  # the last that is drawn beside the words
        for height in ("60px", "40px"):
            pane.evaluate("(pane, height) => { pane.style.maxHeight = height; }", height)
            until(page, lambda: word.evaluate(IN_SIGHT))
        pane.dispatch_event("wheel")
        pane.evaluate("(pane) => { pane.scrollTop = 0; pane.style.maxHeight = '50px'; }")
        page.wait_for_timeout(200)
        assert not word.evaluate(IN_SIGHT)


def test_arcs_cross_no_word_and_two_have_numbers(page, site, session):
    ready(page, site)
    page.set_viewport_size({"width": 1000, "height": 900})
    page.locator(".ranked .chip").first.click()
    expect(page.locator(".arc").first).to_be_attached()
    crossed = """() => {
      const words = [...document.querySelectorAll(".text-piece")].map((at) => at.getBoundingClientRect());
      const origin = document.querySelector(".arcs").getBoundingClientRect();
      return [...document.querySelectorAll(".arc")].filter((arc) => {
        const long = arc.getTotalLength();
        for (let n = 2; n < 60; n++) {
          const { x, y } = arc.getPointAtLength((long * n) / 62);
          const [left, top] = [x + origin.left, y + origin.top];
          const inside = (at) => left > at.left + 1 && left < at.right - 1 && top > at.top + 3 && top < at.bottom - 3;
          if (words.some(inside)) return true;
        }
        return false;
      }).length;
    }"""
    until(page, lambda: page.evaluate(crossed) == 0)
    tops = "found => found.map((at) => Math.round(at.getBoundingClientRect().top / 20))"
    lines = len(set(page.locator(".text-piece").evaluate_all(tops)))
    assert lines > 2, "an arc has a line to cross"
    assert 0 < page.locator(".arc-number").count() <= 2


# --------------------------------------------------------------------------------------------------------------- labels


def test_bytes_of_an_emoji_have_one_label(page, tmp_path: Path):
    read = look_at("a cat 🍕 sat", gpt2(tmp_path / "gpt2"))
    labels = ["a", " cat", r" \xf0\x9f", r"\x8d", r"\x95", " sat"]
    shown = Session(read.name, read.capture, tuple(labels + ["x"] * (len(read.tokens) - len(labels))))
    with serving([shown]) as address:
        ready(page, f"{address}#layer=0&head=0&token=4&key=2")
        expect(page.locator(".text-readout .said-query")).to_have_text("🍕₃")
        expect(page.locator(".text-readout .said-key")).to_have_text("🍕")
        word = page.locator(".text-word", has=page.locator('[data-index="2"]'))
        assert word.locator(".text-piece").all_inner_texts()[:3] == ["🍕", "₂", "₃"]
