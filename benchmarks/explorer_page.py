"""The explorer's page in Chromium and its server: bytes, milliseconds and frames. Keeps a table.

    python benchmarks/explorer_page.py        # CPU, two minutes; needs Chromium, Playwright, pytest and regard[demo]

What is measured is what tests/explorer bounds, by the same functions. Server and browser share the machine's cores, and
Chromium draws in software: a graphics card draws faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from timing import heading, section, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/explorer"))
from browsing import browsing, opened, serving
from playwright.sync_api import expect
from test_page import LONG, SENTENCE, WATCH, asked, large_session, long_session

from regard.explorer.export import write_html
from regard.session.session import Session, look_at

RESULTS = Path(__file__).parent / "results"
TRIES = 5
FRAMES = """() => new Promise((done) => {
  const stamps = [];
  const frame = (now) => (stamps.push(now), window.framesEnded ? done(stamps) : requestAnimationFrame(frame));
  requestAnimationFrame(frame);
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "explorer-page-cpu.md", help="where to write the table")
    arguments = parser.parse_args()
    note = (
        f"Medians of {TRIES} loads, each with nothing kept. Load of the machine at the start: {os.getloadavg()[0]:.1f}."
    )
    title = heading("the explorer's page", "cpu", note)
    large = large_session()
    with browsing() as browser, tempfile.TemporaryDirectory() as folder:
        parts = [
            section(
                "A page that is opened",
                ["", "bytes", "ms to the first paint", "limit", "ms until drawn", "ms of its thread"],
                opening(browser, large, Path(folder)),
            ),
            section(
                "512 heads in the atlas: frames",
                ["", "frames", "median ms", "95% ms", "ms of script per frame"],
                moving(browser, large),
            ),
        ]
    answers = section("16,384 tokens: answers over HTTP, one connection", ["", "", "limit"], answering())
    write(arguments.out, [title, *parts, answers])


def opening(browser: Any, large: Session, folder: Path) -> list[list[str]]:
    """A sentence and 131,072 tokens of 512 heads, served and as exported files."""
    rows = []
    for name, session, limits in (
        ("16 tokens, 72 heads", look_at(SENTENCE), (1000, 500)),
        ("131,072 tokens, 512 heads", large, (1000, 1000)),
    ):
        write_html(session, folder / "page.html")
        with serving([session]) as address:
            for kind, where, limit in zip(
                ("served", "exported"), (address, (folder / "page.html").as_uri()), limits, strict=True
            ):
                bytes_, painted, drawn, busy = zip(*(moment(browser, where) for _ in range(TRIES)), strict=True)
                size = (folder / "page.html").stat().st_size if kind == "exported" else max(bytes_)
                times = [f"{statistics.median(times):.0f}" for times in (painted, drawn, busy)]
                rows.append([f"{name}, {kind}", f"{size:,}", times[0], f"{limit:,}", *times[1:]])
    return rows


def moment(browser: Any, address: str) -> tuple[int, float, float, float]:
    """Bytes of all answers; milliseconds to the first paint, until all is drawn, and of the page's main thread."""
    with opened(browser) as page, metrics(page) as read:
        page.add_init_script(WATCH.replace("=== 512", ">= 72"))
        answers: list[Any] = []
        page.on("response", lambda answer: answers.append(answer))
        page.goto(address)
        expect(page.locator("html[data-drawn]")).to_be_attached()
        painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        drawn = float(page.locator("html").get_attribute("data-drawn"))
        received = sum(len(answer.body()) for answer in answers if answer.url.startswith("http"))
        return received, painted, drawn, 1e3 * read()["TaskDuration"]


@contextmanager
def metrics(page: Any) -> Iterator[Callable[[], dict[str, float]]]:
    """Seconds that the page's main thread took so far, of its own clock: what else runs does not count."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    yield lambda: {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}


def moving(browser: Any, large: Session) -> list[list[str]]:
    """The pointer over the atlas, its pictures, and a list that is scrolled."""
    rows = []
    with serving([large]) as address:
        for name, view in (
            ("hover over colours", "cells=colour"),
            ("hover over pictures", "cells=thumbnails&drawer=0"),
            ("scroll the list", "view=list"),
        ):
            with opened(browser) as page:
                page.goto(f"{address}/#{view}")
                page.locator(".cell, .atlas-line").first.wait_for()
                page.wait_for_timeout(1500)
                rows.append([name, *frames(page, wheel=view == "view=list")])
    return rows


def frames(page: Any, *, wheel: bool) -> list[str]:
    """Times between frames while the mouse moves or scrolls, and the script's share of them."""
    box = page.locator(".atlas-body").bounding_box()
    with metrics(page) as read:
        start = read()
        page.evaluate(f"void (window.times = ({FRAMES})())")
        for step in range(120):
            across, down = (step * 37 % 101) / 101, (step * 53 % 97) / 97
            page.mouse.move(box["x"] + 4 + across * (box["width"] - 8), box["y"] + 4 + down * (box["height"] - 8))
            if wheel:
                page.mouse.wheel(0, 60 if step % 40 < 30 else -180)
        stamps = page.evaluate("async () => { window.framesEnded = true; return window.times; }")
        end = read()
    gaps = sorted(after - before for before, after in pairwise(stamps))
    script = 1e3 * (end["ScriptDuration"] - start["ScriptDuration"]) / len(gaps)
    return [str(len(gaps)), f"{statistics.median(gaps):.1f}", f"{gaps[int(0.95 * len(gaps))]:.1f}", f"{script:.2f}"]


def answering() -> list[list[str]]:
    tokens = [(n * 7919) % LONG for n in range(1, 501)]
    rows = [f"row?layer=0&head={n % 2}&token={token}&start=0&stop=600" for n, token in enumerate(tokens)]
    exact = [f"tile?layer=0&head=1&rows={at},{at + 128}&cols=0,128&size=128" for at in range(0, 8000, 400)]
    pooled = [f"tile?layer=0&head=1&rows={at},{at + 2048}&cols=0,2048&size=128" for at in range(0, 16_000, 2048)]
    with serving([long_session()[0]]) as address:
        list(asked(address, "overview", *rows[:50]))
        return [
            ["ms of one token's exact row", ms(address, rows), "100"],
            ["ms of 128 × 128 exact cells", ms(address, exact), ""],
            ["ms of 2048 × 2048 weights in 128 × 128 pooled cells", ms(address, pooled), ""],
        ]


def ms(address: str, paths: list[str]) -> str:
    return f"{1e3 * statistics.median(seconds for seconds, _ in asked(address, *paths)):.1f}"


if __name__ == "__main__":
    main()
