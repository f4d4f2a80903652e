"""What a reader can expect of the whole page: accessible by axe-core, Korean where it fails, few clicks, few bytes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import BEARER, PLAYWRIGHT, Window, opened, ready, serving, until
from page_parts import large_session, long_session, node, ran
from seeing_twins import picture, vit
from speaking_twins import gpt2

from regard.explorer.export import write_html
from regard.explorer.jobs import ModelShelf
from regard.session.session import Session, look_at, look_at_image

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
AXE = Path(os.environ.get("AXE_CORE") or Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js")
SENTENCE = "The animal didn't cross the street because it was too tired."
TWICE = "The blue train left Lyon at noon. The blue train left Lyon at noon. The blue train left"


@pytest.fixture(scope="module")
def sessions(models: ModelShelf) -> list[Session]:
    with models.using(models.find(None), lambda done, total: None) as model:
        return [look_at(text, model) for text in (SENTENCE, SENTENCE.replace("tired", "wide"), TWICE)]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return look_at("The animal did not cross the street", gpt2(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return look_at_image(picture(), vit(tmp_path_factory.mktemp("vit")))


@pytest.fixture(scope="module")
def site(sessions: list[Session], speaking: Session, image: Session, models: ModelShelf) -> Iterator[str]:
    with serving([*sessions, speaking, image], models) as address:
        yield address


# -------------------------------------------------------------------------------------------------------- accessibility


AXE_RUN = """() => axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) => violations
  .filter(({ impact }) => impact === "serious" || impact === "critical")
  .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ html }) => html.slice(0, 200)).join(" | ")}`))"""
ACTIONS: dict[str, Callable[[Any], None]] = {
    "session=1": lambda page: None,
    "session=1&cells=colour": lambda page: page.locator("[data-role=search]").fill("induction > 0.2"),
    "session=1&view=list": lambda page: None,
    "session=1&token=10&key=2": lambda page: page.locator("[data-role=share]").click(),
    "session=1&drawer=1": lambda page: page.locator("[data-role=new]").click(),
    "session=1&scale=log": lambda page: page.locator("[data-role=help]").click(),
    "session=1&measure=induction": lambda page: page.locator("[data-role=tour]").click(),
    "session=1&with.session=2&with.difference=1": lambda page: None,
    "session=4&drawer=1": lambda page: expect(page.locator(".predicted li").first).to_be_visible(),
    "session=5": lambda page: None,
}


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: npm install axe-core, or AXE_CORE=path of axe.min.js")
@pytest.mark.parametrize(
    ("lang", "theme", "width"), [("en", "light", 1280), ("ko", "dark", 1280), ("ko", "light", 400), ("en", "dark", 400)]
)
def test_axe_finds_nothing_serious_in_any_state(browser, site, lang, theme, width):
    found = {}
    with opened(browser, bypass_csp=True, viewport={"width": width, "height": 800}) as page:
        for view, act in ACTIONS.items():
            page.goto("about:blank")
            page.goto(f"{site}/#{view}&lang={lang}&theme={theme}")
            expect(page.locator(".map-how, .overlay").first).to_be_attached()
            expect(page.locator(".cell, .atlas-line").first).to_be_attached()
            act(page)
            page.evaluate(AXE.read_text(encoding="utf-8"))
            if problems := page.evaluate(AXE_RUN):
                found[view] = problems
    assert found == {}


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_cell_is_named_by_its_exact_number_and_shows_none_where_it_is_dim(page, site, lang):
    """The number in a cell has two digits: it is hidden from screen readers, or they would hear another one."""
    ready(page, f"{site}/#session=1&cells=colour&lang={lang}")
    cell = page.locator('.cell[data-layer="3"][data-head="1"]')

    def named_by_title() -> bool:  # both change once the weight of the selected link is there
        title = json.dumps(cell.get_attribute("title"), ensure_ascii=False)
        return cell.aria_snapshot() == f"- gridcell {title} [selected]"

    until(page, named_by_title)
    page.locator("[data-role=search]").fill("layer = 3")
    expect(page.locator(".cell.dim")).to_have_count(60)
    sizes = "all => [...new Set(all.map((one) => getComputedStyle(one).fontSize))]"
    assert page.locator(".cell.dim").evaluate_all(sizes) == ["0px"]
    assert page.locator(".cell:not(.dim)").evaluate_all(sizes) != ["0px"]


def test_what_is_clicked_is_24_pixels_high(page, site):
    """WCAG 2.2, 2.5.8; the cells of the atlas have a list beside them that serves as well."""
    ready(page, f"{site}/#session=1&token=10&key=2")
    expect(page.locator(".card .links button").first).to_be_visible()
    low = page.locator("button:visible:not(.cell):not(.skip), select:visible").evaluate_all(
        "all => all.filter((one) => one.getBoundingClientRect().height < 23.5)"
        ".filter((one) => !one.closest('th, p, .segments, .drawer-bar')).map((one) => one.outerHTML.slice(0, 80))"
    )
    assert low == []


@pytest.mark.parametrize("width", [400, 1280, 1440])
@pytest.mark.parametrize("lang", ["en", "ko"])
def test_pencil_covers_nothing(page, site, width, lang):
    page.set_viewport_size({"width": width, "height": 900})
    ready(page, f"{site}/#session=1&token=10&key=2&lang={lang}")
    expect(page.locator(".pencil")).to_be_visible()
    covered = """(at) => { const box = at.getBoundingClientRect();
      return [...document.querySelectorAll(".text-readout > *, .text-links *, .text-piece")]
        .filter((one) => { const b = one.getBoundingClientRect();
          return b.right > box.left && b.left < box.right && b.bottom > box.top && b.top < box.bottom; })
        .map((one) => one.className); }"""
    assert page.locator(".pencil").evaluate(covered) == []


# --------------------------------------------------------------------------------------------------------------- errors


def test_error_of_the_server_is_korean_in_the_korean_page(window, site):
    """Also where the browser's own language is English."""
    with window.lent() as page:
        ready(page, f"{site}/#session=1&lang=ko")
        page.locator("[data-role=new]").click()
        form = page.locator(".choose-form")
        form.locator("[data-role=where]").fill("./nowhere")
        form.locator("[data-role=open-model]").click()
        error = form.locator("[role=alert]")
        expect(error).to_contain_text("'nowhere' 폴더가 없습니다")
        assert ["400" in line for line in window.troubles.said] == [True], "the browser's own line, and no other"
        window.troubles.said.clear()


ASKED = {
    "session/9/overview": ["'9'"],
    "session/1/row?layer=77&head=0&token=0": ["77", "6"],
    "session/1/row?layer=0&head=0&token=999": ["999", "16"],
    "session/5/changes?other=1": [],
    "job/99": ["'99'"],
}


@pytest.mark.parametrize(("path", "named"), ASKED.items())
def test_server_answers_errors_in_the_language_that_the_page_names(browser, site, path, named):
    with opened(browser) as page:
        for lang, korean in (("ko", True), ("en-US", False), ("ko-KR,ko;q=0.9", True), ("fr", False)):
            answer = page.request.get(f"{site}/api/{path}", headers={**BEARER, "accept-language": lang})
            error = answer.json()["error"]
            assert answer.status in (400, 404)
            assert any("가" <= letter <= "힣" for letter in error) == korean, error
            assert all(value in error for value in named), error
            assert "=" not in error


def test_refusal_before_a_route_is_korean_too(browser, site):
    with opened(browser) as page:
        headers = {**BEARER, "accept-language": "ko", "content-type": "application/json"}
        answer = page.request.post(f"{site}/api/models", headers=headers, data=b"x" * 5000)
        assert answer.status == 413
        assert "4,096" in answer.json()["error"]
        assert any("가" <= letter <= "힣" for letter in answer.json()["error"])


# --------------------------------------------------------------------------------------------------------------- clicks


COUNT = "addEventListener('pointerdown', () => { window.presses = (window.presses ?? 0) + 1; }, true);"


@pytest.fixture
def counted(browser: Any) -> Iterator[Any]:
    """A page that counts presses of the mouse, each of a double-click too."""
    with Window(browser, {"accept_downloads": True}) as window, window.lent() as page:
        page.add_init_script(COUNT)
        yield page


def presses(page: Any) -> int:
    return int(page.evaluate("window.presses ?? 0"))


def test_job_1_what_it_refers_to_takes_no_click(counted, site):
    ready(counted, f"{site}/#session=1")
    expect(counted.locator(".said-query")).to_have_text("it")
    expect(counted.locator(".said-key")).to_have_text("animal")
    assert presses(counted) == 0


def test_job_2_the_induction_head_of_a_repeated_text_takes_one_click(counted, site, sessions):
    ready(counted, f"{site}/#session=3")
    counted.locator("[data-role=search]").click()
    counted.keyboard.type("induction")
    counted.keyboard.press("Enter")
    scores = torch.stack([layer.patterns["induction"] for layer in sessions[2].numbers])
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    expect(counted.locator(".cell[aria-selected=true]")).to_have_attribute("data-layer", str(layer))
    expect(counted.locator(".cell[aria-selected=true]")).to_have_attribute("data-head", str(head))
    assert presses(counted) == 1


def test_job_3_what_a_patch_looks_at_in_all_heads_takes_no_click(counted, site):
    counted.goto(f"{site}/#session=5&cells=thumbnails&drawer=0")
    expect(counted.locator(".image-canvas")).to_be_visible()
    expect(counted.locator(".atlas-pictures")).to_have_attribute("data-token", "")
    box = counted.locator(".image-canvas").bounding_box()
    counted.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"], steps=3)
    expect(counted.locator(".atlas-pictures")).to_have_attribute("data-token", re.compile(r"\d+"))
    assert presses(counted) == 0


def test_job_4_the_heads_that_change_with_a_word_take_one_double_click(counted, models, sessions):
    with serving(sessions[:1], models) as address:
        ready(counted, f"{address}/#session=1")
        expect(counted.locator(".pencil")).to_be_visible()
        counted.locator(".text-piece", has_text="tired").dblclick()
        counted.keyboard.type("wide")
        counted.keyboard.press("Enter")
        expect(counted.locator(".changes .chip").first).to_be_visible()
        assert presses(counted) == 2


def test_job_5_a_page_that_opens_again_takes_two_clicks(counted, site, tmp_path):
    ready(counted, f"{site}/#session=1&layer=5&head=4&token=6")
    with counted.expect_download() as download:
        counted.locator("[data-role=share]").click()
        counted.locator("[data-share=html]").click()
    assert presses(counted) == 2
    download.value.save_as(tmp_path / "again.html")
    ready(counted, (tmp_path / "again.html").as_uri())
    expect(counted.locator('.cell[data-layer="5"][data-head="4"]')).to_have_attribute("aria-selected", "true")


def test_job_6_a_text_of_5000_tokens_down_to_exact_cells_takes_three_clicks(counted):
    with serving([long_session(5000)[0]]) as address:
        ready(counted, f"{address}/#session=1&layer=0&head=0")
        expect(counted.locator(".map-how")).to_have_text("pooled")
        closer = counted.locator(".map-zoom button").nth(1)
        for _ in range(3):
            closer.click()
            expect(counted.locator(".map-loading")).to_have_count(0)
        expect(counted.locator(".map-how")).to_have_text("exact")
        assert presses(counted) == 3


# ---------------------------------------------------------------------------------------------------------- large files


@pytest.fixture(scope="module")
def large() -> Session:
    return large_session()


@pytest.fixture(scope="module")
def large_page(large: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("large") / "large.html"
    write_html(large, target)
    return target


def test_export_of_131072_tokens_and_512_heads_is_under_5_megabytes_and_says_what_is_rounded(page, large_page):
    """Maps of random numbers, which no packing makes smaller: the worst case."""
    assert large_page.stat().st_size < 5_000_000
    page.goto(large_page.as_uri())
    expect(page.locator(".map-how")).to_have_text("pooled")
    expect(page.locator(".cell")).to_have_count(512)
    expect(page.locator(".text-piece").first).to_have_text("token0")
    expect(page.locator(".foot .missing")).to_contain_text("Maps are rounded by at most 1/255 of their largest cell.")


@node
def test_rounded_maps_and_packed_labels_are_those_that_were_measured(large, large_page):
    (found,) = re.findall(r'id="regard-data">(.*?)</script>', large_page.read_text(encoding="utf-8"), re.DOTALL)
    data = json.loads(found)
    carried = data["sessions"]["1"]
    for part in ("heads", "arrays"):
        carried[part] = {"3.7": carried[part]["3.7"]}
    read = ran(
        "source/embedded.js",
        f"""(async () => {{ const source = new page.EmbeddedSource({json.dumps(data)});
        const tokens = await source.tokens("1", 131070, 131072);
        return {{ head: await source.head("1", 3, 7, "en"), tokens }}; }})()""",
    )
    view = large.layers[3].view
    assert read["tokens"]["labels"] == ["token131070", "token131071"]
    measured, received = view.map()[0, 7], view.received[0, 7]
    rounded = torch.tensor(read["head"]["map"]["data"]).reshape(64, 64)
    assert float((rounded - measured).abs().max()) <= float(measured.max()) / 255
    for name, exact in (
        ("received", received.unflatten(0, (256, -1)).sum(1)),
        ("entropy", view.entropy[0, 7].unflatten(0, (256, -1)).mean(1)),
    ):
        bars = torch.tensor(read["head"][name]["data"])
        assert float((bars - exact).abs().max()) <= float(exact.max()) / 255
