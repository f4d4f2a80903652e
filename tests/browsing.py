"""A real browser for the tests of the page: a server in a thread, Chromium, and what went wrong in each page."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from shutil import which
from typing import Any
from urllib.parse import urlsplit

import pytest

from regard.cli.serve import _listen
from regard.explorer.jobs import ModelShelf
from regard.session.session import Session

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # the quickest first
CHROMIUM = next((found for name in BROWSERS if (found := which(name))), None)
PLAYWRIGHT = "needs Playwright for Python: pip install playwright"
WIDE, HIGH = 1280, 800
TOKEN = "the-token-of-a-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
PATIENCE = 60  # seconds that a page on a busy machine may take; on others nobody waits for so long


class CachedFiles:
    """ASGI middleware by which the browser keeps scripts and styles: most of the work of opening a page is theirs."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                others = [(name, value) for name, value in message["headers"] if name != b"cache-control"]
                message = message | {"headers": [*others, (b"cache-control", b"max-age=86400")]}
            await send(message)

        await self.app(scope, receive, sent if scope.get("path", "").startswith("/page/") else send)


@contextmanager
def serving(sessions: Sequence[Session], models: ModelShelf | None = None, *, cached: bool = True) -> Iterator[str]:
    """A server of these sessions on a free port of loopback, for as long as the block lasts; yields its address.

    Its token is TOKEN, which a page of `opened` sends with every request. cached: the browser keeps scripts and styles,
    which the server itself forbids.
    """
    pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'regard[explorer]'")
    pytest.importorskip("fastapi", reason="needs FastAPI: pip install 'regard[explorer]'")
    from regard.explorer.security import http_server
    from regard.explorer.server import app

    for session in sessions:
        _ = session.numbers  # a capture is ready once its heads are known
    with _listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        shelf = ModelShelf(demo=False) if models is None else models
        explorer = app(sessions, shelf, port=port, token=TOKEN)
        server = http_server(CachedFiles(explorer) if cached else explorer)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            with warnings.catch_warnings():  # asyncio may end before the browser's last connections are closed
                warnings.simplefilter("ignore", ResourceWarning)
                server.should_exit = True
                thread.join(PATIENCE)
                gc.collect()
    assert not thread.is_alive(), "the server did not end"


@contextmanager
def browsing() -> Iterator[Any]:
    """Chromium, without a window. Skips where it or Playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT)
    if CHROMIUM is None:
        pytest.skip(
            "needs Chromium on PATH (Debian: apt install chromium-headless-shell; Ubuntu: apt install chromium)"
        )
    playwright.expect.set_options(timeout=PATIENCE * 1000)
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # for whom Chromium refuses to run in its sandbox
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu", *["--no-sandbox"] * root])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Troubles:
    """What a page did that it must not: messages of errors and warnings, and requests to other hosts."""

    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def listen(self, page: Any) -> None:
        page.on("console", lambda message: self._say(message.type, message.text))
        page.on("pageerror", lambda error: self._say("error", str(error)))
        page.on("request", lambda request: self._ask(request.url))

    def _say(self, kind: str, words: str) -> None:
        if kind in ("error", "warning"):
            self.said.append(f"{kind}: {words}")

    def _ask(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "file") and parts.hostname != "127.0.0.1":
            self.asked.append(url)


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Wait until something is so that no locator can say; meanwhile the page and its events go on."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        page.wait_for_timeout(20)


@contextmanager
def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """A fresh page, of nobody's memory. Afterwards nothing may have gone wrong in it."""
    with Window(browser, options) as window, window.lent() as page:
        yield page


class Window:
    """A page that tests use one after the other: a fresh one for each costs twice the processor time."""

    def __init__(self, browser: Any, options: dict[str, Any] | None = None) -> None:
        self.browser, self.options, self.troubles = browser, options or {}, Troubles()
        self.page: Any = None

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        if self.page is not None:
            self.page.context.close()

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """The page, blank and without memory. Afterwards nothing may have gone wrong in it; else it is replaced."""
        page, self.page = self.page or self._open(), None  # only a test that passes gives it back
        self.troubles.said.clear()
        self.troubles.asked.clear()
        try:
            yield page
            assert self.troubles.said == []
            assert self.troubles.asked == []
            page.unroute_all(behavior="ignoreErrors")
            with suppress(Exception):  # a page without an origin has no storage
                page.evaluate("localStorage.clear(); sessionStorage.clear()")
            page.goto("about:blank")
            page.context.clear_cookies()
            page.set_viewport_size({"width": WIDE, "height": HIGH})
            page.mouse.move(0, 0)
            for other in page.context.pages:
                if other is not page:
                    other.close()
            self.page = page
        finally:
            if self.page is None:
                page.context.close()

    def _open(self) -> Any:
        given = {"viewport": {"width": WIDE, "height": HIGH}, "locale": "en-US", "color_scheme": "light"}
        context = self.browser.new_context(**given | {"extra_http_headers": BEARER} | self.options)
        context.on("page", self.troubles.listen)
        context.set_default_timeout(PATIENCE * 1000)
        return context.new_page()


def ready(page: Any, address: str) -> Any:
    """The page of a text at an address, once its panes are drawn."""
    from playwright.sync_api import expect

    page.goto(address)
    for part in ("#regard[data-state=ready]", ".map-how", ".text-piece"):
        expect(page.locator(part).first).to_be_visible()
    return page
