"""The site: it builds without a warning, and every link in it leads to a page, a file and an anchor that is there."""

import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

import regard
from regard.learn import lessons

ROOT = Path(__file__).resolve().parent.parent
LANGS = ("en", "ko")
for package in ("mkdocs", "material", "mkdocs_static_i18n", "mkdocstrings", "jupytext"):
    pytest.importorskip(package, reason="needs the tools of the site: pip install 'regard[docs]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools of the site


class Page(HTMLParser):
    """The addresses and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.anchors: set[str] = set()
        self.lang = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.lang = given.get("lang", self.lang) if tag == "html" else self.lang
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("img", "script", "iframe") and "src" in given:
            self.assets.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon"):
            self.assets.append(given["href"])


class Site(NamedTuple):
    """The built site: its directory, and its pages by their path in it."""

    root: Path
    pages: dict[Path, Page]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    """The site, with lessons that are not run: tests/test_learn.py runs them."""
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    build_site = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(build_site)
    sys.path[:] = before
    folder = tmp_path_factory.mktemp("pages").resolve()
    build_site.build(folder / "docs", folder / "site", run=False)  # which raises for a warning
    root = folder / "site"
    return Site(root, {path.relative_to(root): Page(path.read_text("utf-8")) for path in root.rglob("*.html")})


def broken_links(site: Site, path: Path, page: Page) -> Iterator[str]:
    for link in page.links + page.assets:
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (site.root / path.parent / unquote(parts.path)).resolve() if parts.path else site.root / path
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file():
            yield f"{path}: {link} leads nowhere"
        elif parts.fragment and target.suffix == ".html":
            there = site.pages.get(target.relative_to(site.root))
            if there is None or unquote(parts.fragment) not in there.anchors:
                yield f"{path}: {link} has no such anchor"


def test_links_and_anchors_lead_somewhere(site):
    pages = {path: page for path, page in site.pages.items() if path != Path("404.html")}  # whose place is anywhere
    assert [line for path, page in pages.items() for line in broken_links(site, path, page)] == []
    wrong = Page('<a href="nowhere/">a</a><a href="why/#nothing">b</a><a href="why/">c</a><img src="no.png">')
    assert len(list(broken_links(site, Path("index.html"), wrong))) == 3


def test_nothing_comes_from_another_host(site):
    schemes = {urlsplit(asset).scheme for page in site.pages.values() for asset in page.assets}
    assert schemes <= {"", "data"}


def test_every_page_is_there_in_both_languages(site):
    english, korean = (
        {p for p, page in site.pages.items() if page.lang == lang and p.stem == "index"} for lang in LANGS
    )
    assert {Path("ko") / path for path in english} == korean
    assert {Path("index.html"), Path("why/index.html"), Path("reference/index.html")} <= english


@pytest.mark.parametrize("lang", LANGS)
def test_lesson_has_a_page_and_a_notebook(site, lang):
    for lesson in lessons(lang):
        page = site.root / ("ko" if lang == "ko" else "") / "lessons" / lesson.name / "index.html"
        assert lesson.title in page.read_text(encoding="utf-8")
        file = site.root / "lessons" / lesson.name / lang / f"{lesson.name}.ipynb"
        notebook = json.loads(file.read_text(encoding="utf-8"))
        kinds = [cell["cell_type"] for cell in notebook["cells"]]
        assert kinds == [cell.kind for cell in lesson.cells]
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        folded = [cell for cell in notebook["cells"] if cell["metadata"].get("jupyter", {}).get("source_hidden")]
        assert len(folded) == 2 * len(lesson.questions)
        assert any("%matplotlib inline\n" in cell["source"] for cell in notebook["cells"])


def test_reference_has_every_public_name(site):
    anchors = {anchor for path, page in site.pages.items() if path.parts[0] == "reference" for anchor in page.anchors}
    values = {name: getattr(regard, name) for name in regard.__all__}
    assert [n for n, v in values.items() if not inspect.ismodule(v) and f"{v.__module__}.{n}" not in anchors] == []
    assert [n for n, v in values.items() if inspect.ismodule(v) and not (site.root / "reference" / n).is_dir()] == []
