"""The page inside a notebook's page: as a widget in its shadow tree, and as a file in a frame."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from browsing import PLAYWRIGHT

import regard
from regard.explorer.widget import answer, display, module
from regard.session.session import Session

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
WORDS = ("The", "animal", "crossed", "because", "it", "was", "tired")
STYLES = """
* { color: rgb(255, 0, 0) !important; letter-spacing: 7px !important; }
button, h2, table, td { border: 9px solid lime !important; font-size: 40px !important; }
"""
# A notebook: it renders the module, and hands messages to Python.
NOTEBOOK = """
const listeners = new Set();
const model = {
  get: (name) => ({ lang: "en", height: 600 })[name],
  on: (event, listener) => listeners.add(listener),
  off: (event, listener) => listeners.delete(listener),
  send: async (content) => {
    const reply = JSON.parse(await window.python(JSON.stringify(content)));
    for (const hear of listeners) hear(reply);
  },
};
const { default: widget } = await import("data:text/javascript;charset=utf-8," + encodeURIComponent(window.source));
window.end = widget.render({ model, el: document.getElementById("cell") });
"""


@pytest.fixture(scope="module")
def session() -> Session:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(15, 3, 11, batch_first=True, dropout=0.0).eval()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(torch.randn(1, 7, 15))
    return Session("toy", seen, WORDS, text=" ".join(WORDS))


def notebook(page: Any, session: Session) -> None:
    page.expose_function("python", lambda message: json.dumps(answer(session, json.loads(message))))
    page.set_content(f"<style>{STYLES}</style><button id=own>own</button><div id=cell></div>")
    page.evaluate("source => (window.source = source)", module())
    page.add_script_tag(content=NOTEBOOK, type="module")
    expect(page.locator(".text-piece").first).to_be_visible()


def test_styles_of_a_notebook_stay_outside_and_ours_inside(fresh_page, session):
    before = (
        "(e) => { const s = getComputedStyle(e); return [s.borderTopWidth, s.letterSpacing, s.color, s.fontSize]; }"
    )
    notebook(fresh_page, session)
    inside = fresh_page.locator("[data-role=share]").evaluate(before)
    assert inside[:2] == ["1px", "normal"]
    assert inside[2] != "rgb(255, 0, 0)"
    assert fresh_page.locator("#own").evaluate(before) == ["9px", "7px", "rgb(255, 0, 0)", "40px"]
    sheets = fresh_page.evaluate("[document.styleSheets.length, document.documentElement.className]")
    assert sheets == [1, ""]


def test_the_widget_shows_the_exact_weight_and_leaves_nothing_behind(fresh_page, session):
    notebook(fresh_page, session)
    said = fresh_page.locator(".said-weight")
    expect(said).to_be_visible()
    at = {name: int(said.get_attribute(f"data-{name}")) for name in ("query", "key")}
    cell = fresh_page.locator(".cell[aria-selected=true]")
    head = int(cell.get_attribute("data-head"))
    weight = float(session.layers[0].view.row(at["query"])[0, head, at["key"]])
    assert float(said.get_attribute("data-weight")) == pytest.approx(weight, rel=1e-6)
    fresh_page.evaluate("window.end()")
    assert fresh_page.locator("#cell > *").count() == 0


def test_the_widget_shares_a_page_and_has_no_address_to_copy(fresh_page, session, tmp_path):
    notebook(fresh_page, session)
    fresh_page.locator("[data-role=share]").click()
    expect(fresh_page.locator("[data-share=html]")).to_be_visible()
    assert fresh_page.locator("[data-share=link], [data-share=regard]").count() == 0
    with fresh_page.expect_download() as saved:
        fresh_page.locator("[data-share=html]").click()
    assert saved.value.suggested_filename == "regard-toy.html"
    saved.value.save_as(tmp_path / "page.html")
    fresh_page.goto(f"file://{tmp_path / 'page.html'}")
    expect(fresh_page.locator(".said-weight")).to_be_visible()


def test_the_frame_of_a_notebook_that_is_only_read_works(page, session):
    page.set_content(f"<style>{STYLES}</style>{display(session)['text/html']}")
    frame = page.frame_locator("iframe")
    expect(frame.locator(".said-weight")).to_be_visible()
    frame.locator('.cell[data-layer="0"][data-head="2"]').click()
    expect(frame.locator('.cell[data-layer="0"][data-head="2"]')).to_have_attribute("aria-selected", "true")
    assert frame.locator("[data-role=share]").evaluate("(e) => getComputedStyle(e).letterSpacing") == "normal"
    frame.locator("[data-role=share]").click()
    expect(frame.locator("[data-save=png]").first).to_be_visible()
    assert frame.locator("[data-share=link]").count() == 0
