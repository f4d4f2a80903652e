"""The explorer's page in Chromium and its server: bytes, milliseconds and memory at large sizes. Keeps a table.

    python benchmarks/explorer_page.py        # CPU, half a minute; needs Chromium, Playwright and pytest

What is measured is what tests/test_page.py bounds, by the same functions. Server and browser share the machine's cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from timing import heading, section, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from browsing import browsing, serving
from test_page import LONG, asked, first_moment, large_session, long_session, resident

RESULTS = Path(__file__).parent / "results"
TRIES = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "explorer-page-cpu.md", help="where to write the table")
    arguments = parser.parse_args()
    title = heading("the explorer's page", "cpu", f"Medians; the page is opened {TRIES} times, each with nothing kept.")
    first = section("131,072 tokens, 512 heads: a page that is opened", ["", "", "limit"], opening())
    answers = section("16,384 tokens: answers over HTTP, one connection", ["", "", "limit"], answering())
    write(arguments.out, [title, first, answers])


def opening() -> list[list[str]]:
    with browsing() as browser, serving([large_session()]) as address:
        bytes_, painted, drawn = zip(*(first_moment(browser, address) for _ in range(TRIES)), strict=True)
    return [
        ["bytes of everything, scripts too, not compressed", f"{max(bytes_):,}", "5,000,000"],
        ["ms to the first paint", f"{statistics.median(painted):.0f}", "1,000"],
        ["ms until all heads, the map and the words are there", f"{statistics.median(drawn):.0f}", ""],
    ]


def answering() -> list[list[str]]:
    tokens = [(n * 7919) % LONG for n in range(1, 501)]
    rows = [f"row?layer=0&head={n % 2}&token={token}&start=0&stop=600" for n, token in enumerate(tokens)]
    exact = [f"tile?layer=0&head=1&rows={at},{at + 128}&cols=0,128&size=128" for at in range(0, 8000, 400)]
    pooled = [f"tile?layer=0&head=1&rows={at},{at + 2048}&cols=0,2048&size=128" for at in range(0, 16_000, 2048)]
    with serving([long_session()[0]]) as address:
        list(asked(address, "overview", *rows[:50]))
        before = resident()
        row = ms(address, rows)
        grown = resident() - before
        return [
            ["ms of one token's exact row", row, "100"],
            ["ms of 128 × 128 exact cells", ms(address, exact), ""],
            ["ms of 2048 × 2048 weights in 128 × 128 pooled cells", ms(address, pooled), ""],
            ["MB of memory more after 500 rows", f"{grown / 1e6:.1f}", "8"],
        ]


def ms(address: str, paths: list[str]) -> str:
    return f"{1e3 * statistics.median(seconds for seconds, _ in asked(address, *paths)):.1f}"


if __name__ == "__main__":
    main()
