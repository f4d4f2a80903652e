"""The exported page: one file, whole or not at all, that loads nothing."""

import json
import os
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
import torch

import regard
from regard.explorer import export
from regard.explorer.export import bundle, html, modules, page_data, styles, write_html
from regard.locale import catalogue
from regard.session.session import Session

TRAPS = ("</script>", "<!--", "<script>", "]]>", "\u2028", "한국어", '"&amp;')


@pytest.fixture(scope="module")
def session() -> Session:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(15, 3, 11, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(torch.randn(1, 7, 15))
    return Session("<b>toy</b> & co", seen, TRAPS, text="<img src=x onerror=alert(1)>")


class Reader(HTMLParser):
    """The tags of a page with their attributes, and what stands in each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[dict[str, str | None], str]] = []
        self.title = ""
        self.at: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.at = (tag, dict(attrs))
        self.tags.append(self.at)

    def handle_endtag(self, tag):
        self.at = ("", {})

    def handle_data(self, data):
        tag, given = self.at
        if tag == "title":
            self.title += data
        if tag in ("script", "style"):
            self.inside.append((given, data))

    def data(self) -> str:
        (found,) = [text for given, text in self.inside if given.get("id") == "regard-data"]
        return found


def test_the_data_comes_back_whatever_the_text_holds(session):
    read = Reader(html(session, "ko"))
    assert json.loads(read.data()) == page_data(session, "ko")
    assert "<" not in read.data()


def test_half_a_character_in_a_token_is_carried_as_it_is(session, tmp_path):
    odd = Session("half \ud83d", session.capture, ("\ud83d", *TRAPS[1:]))
    write_html(odd, tmp_path / "page.html")
    read = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    (mine,) = json.loads(read.data())["sessions"].values()
    assert (mine["overview"]["name"], mine["overview"]["labels"][0]) == ("half \ud83d", "\ud83d")
    assert read.title == "half ? · regard"


def test_the_page_has_one_script_and_its_data_before_it(session):
    read = Reader(html(session))
    scripts = [(given.get("id"), given.get("type")) for tag, given in read.tags if tag == "script"]
    data = [(f"regard-{name}", "application/json") for name in ("catalogues", "data", "view")]
    assert scripts == [*data, (None, "module")]
    (texts,) = [json.loads(text) for given, text in read.inside if given.get("id") == "regard-catalogues"]
    assert texts == {"ko": catalogue("ko", "page")}


def test_the_page_loads_nothing(session):
    read = Reader(html(session))
    addresses = [given[name] for _, given in read.tags for name in ("src", "href", "srcset", "action") if name in given]
    assert [address for address in addresses if not str(address).startswith("data:")] == []
    (policy,) = [given["content"] for tag, given in read.tags if given.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    css = "".join(text for given, text in read.inside if not given)
    assert "@import" not in css
    assert not re.search(r"url\(\s*[\"']?(?!data:|#)", css)


def test_only_the_page_s_own_script_and_style_are_run(session):
    read = Reader(html(session))
    (policy,) = [given["content"] for tag, given in read.tags if given.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    (script,) = [text for given, text in read.inside if given.get("type") == "module"]
    (style,) = [text for given, text in read.inside if not given]
    for rule, text in (("script-src", script), ("style-src", style)):
        assert rules[rule] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert [given for _, given in read.tags if "style" in given or any(name.startswith("on") for name in given)] == []


def test_the_title_is_the_sessions_name_as_text(session):
    assert Reader(html(session)).title == "<b>toy</b> & co · regard"


def test_the_page_says_its_language(session):
    assert '<html lang="ko"' in html(session, "ko")
    with pytest.raises(ValueError, match=r"lang.*'fr'"):
        html(session, "fr")


def test_every_style_of_the_page_is_in_it(session):
    page = html(session)
    assert styles()
    assert all(path.read_text(encoding="utf-8") in page for path in export.PAGE.rglob("*.css"))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read the script")
def test_the_script_is_javascript(session, tmp_path):
    (script,) = [text for given, text in Reader(html(session)).inside if given.get("type") == "module"]
    (tmp_path / "page.mjs").write_text(script, encoding="utf-8")
    done = subprocess.run(["node", "--check", str(tmp_path / "page.mjs")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "import" not in re.findall(r"^\w+", script, re.MULTILINE)


def test_every_module_of_the_page_is_named_once():
    files = [path.relative_to(export.PAGE).as_posix() for path in export.PAGE.rglob("*.js")]
    assert sorted(modules()) == sorted(files)
    script, _ = bundle(modules(), "shell/boot.js")
    bundled = re.findall(r"^const module\d+ = \(\(\) => \{ // (.*)$", script, re.MULTILINE)
    assert sorted(bundled) == sorted({*files} - {"shell/notebook.js"})


# -------------------------------------------------------------------------------------------------------------- writing


def test_a_second_run_replaces_the_first_and_leaves_nothing_behind(session, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("before")
    write_html(session, target)
    write_html(session, str(target), lang="ko")
    assert target.read_text(encoding="utf-8") == html(session, "ko")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_page_that_cannot_be_made_leaves_what_was_there(session, tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    target.write_text("before")
    with pytest.raises(ValueError, match="lang"):
        write_html(session, target, lang="fr")

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_html(session, target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_is_missing_is_named_before_any_work(session, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "html", lambda *given: pytest.fail("the page was made"))
    with pytest.raises(FileNotFoundError, match=r"'.*nowhere'"):
        write_html(session, tmp_path / "nowhere" / "page.html")
    with pytest.raises(IsADirectoryError):
        write_html(session, tmp_path)


def test_a_link_stays_and_what_it_leads_to_is_replaced(session, tmp_path):
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.write_text("before")
    link.symlink_to(real)
    write_html(session, link)
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_that_would_load_something_is_refused(session, monkeypatch, tmp_path):
    page = tmp_path / "page"
    shutil.copytree(export.PAGE, page)
    index = page / "index.html"
    plain = index.read_text(encoding="utf-8")
    monkeypatch.setattr(export, "PAGE", page)
    for bad in ('<img src="https://example.org/a.png">', "<style>p { background: url(a.png) }</style>"):
        index.write_text(plain.replace("<body>", f"<body>{bad}"), encoding="utf-8")
        with pytest.raises(ValueError, match="page"):
            html(session)
