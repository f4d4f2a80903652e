"""The served page in a browser: how its token gets there and what is said without it, and what its policy forbids."""

from __future__ import annotations

import queue
import re
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import serve
from regard.explorer.export import html
from regard.session.session import Session

pytest.importorskip("playwright.sync_api", reason="needs Playwright for Python: pip install playwright")

from browsing import TOKEN, opened, ready, serving
from playwright.sync_api import expect

NOTHING = {"extra_http_headers": {}}  # a browser that has the token from nowhere but the address


@pytest.fixture(scope="module")
def session() -> Session:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(15, 3, 11, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(torch.randn(1, 5, 15))
    return Session("toy", seen, ("the", "cat", "sat", "on", "it"), text="the cat sat on it")


@pytest.fixture(scope="module")
def site(session: Session) -> Iterator[str]:
    with serving([session], cached=False) as address:
        yield address


def test_token_leaves_the_address_and_the_state_stays(browser, site):
    with opened(browser, **NOTHING) as page:
        ready(page, f"{site}/?token={TOKEN}#session=1&layer=0&head=2&token=3")
        expect(page).to_have_url(re.compile(rf"^{re.escape(site)}/#session=1&(.*&)?head=2&(.*&)?token=3\b"))
        (cookie,) = page.context.cookies()
        assert (cookie["value"], cookie["httpOnly"], cookie["sameSite"]) == (TOKEN, True, "Strict")
        page.reload()
        expect(page.locator("#regard[data-state=ready]")).to_be_visible()
        ready(page.context.new_page(), site)


def test_file_that_the_browser_is_given_leads_to_the_page(browser, site, tmp_path, monkeypatch):
    """Another page leads there, so a cookie of SameSite=Strict is not sent until the page itself asks."""
    given: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(webbrowser, "open", given.put)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with serve._browsing(f"{site}/?token={TOKEN}#lang=ko"), opened(browser, **NOTHING) as page:
        page.goto(given.get(timeout=120))
        expect(page.locator("#regard[data-state=ready]")).to_be_visible()
        expect(page.locator("html")).to_have_attribute("lang", "ko")
        assert TOKEN not in page.url


@pytest.mark.parametrize("query", ["", "?token=that-of-another-start"])
def test_without_the_token_a_page_says_where_to_find_it(browser, site, query):
    context = browser.new_context()
    try:
        page = context.new_page()
        assert page.goto(f"{site}/{query}").status == 403
        expect(page.locator("body")).to_contain_text("regard serve")
        expect(page.locator("[lang=ko]")).to_contain_text("터미널")
        assert context.cookies() == []
    finally:
        context.close()


@pytest.mark.parametrize(("lang", "words"), [("en", "open the URL"), ("ko", "터미널에 표시된 URL")])
def test_page_whose_token_is_old_says_where_to_find_the_new_one(browser, site, lang, words):
    context = browser.new_context()
    try:
        page = ready(context.new_page(), f"{site}/?token={TOKEN}#session=1&lang={lang}")
        context.clear_cookies()  # as if the server had started again
        page.evaluate("location.hash = location.hash.replace('session=1', 'session=2')")
        expect(page.locator("[role=alert]")).to_contain_text(words)
    finally:
        context.close()


def test_markup_that_gets_into_a_page_does_not_run(browser, session, tmp_path):
    file = tmp_path / "page.html"
    bad = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'><p id=bad style='color: red'>a</p>"
    file.write_text(html(session).replace("<body>", f"<body>{bad}"), encoding="utf-8")
    context = browser.new_context()
    try:
        page = ready(context.new_page(), file.as_uri())
        assert page.evaluate("window.ran") is None
        assert page.evaluate("getComputedStyle(document.getElementById('bad')).color") != "rgb(255, 0, 0)"
    finally:
        context.close()


def test_exported_page_draws_its_bars_and_colours_under_its_policy(browser, session, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(html(session), encoding="utf-8")
    with opened(browser) as page:  # in which nothing is said of the policy
        ready(page, f"{file.as_uri()}#layer=0&head=1&token=3&key=1&drawer=1&cells=colour")
        colours = page.locator("[role=gridcell]:not(.axis)").evaluate_all(
            "cells => cells.map((cell) => getComputedStyle(cell).backgroundColor)"
        )
        assert len(set(colours)) > 1
