"""The explorer's server under attack: fuzzed from its own OpenAPI document, many clients, those that leave, and lies.

A real server in a thread, real sockets. Its log is read: after every test it holds no error and no traceback.
"""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import regard
from regard.explorer import jobs, security
from regard.explorer.jobs import ENDED, ModelShelf
from regard.lens.capture import Capture, Record
from regard.session.session import Session

pytest.importorskip("fastapi", reason="needs the server: pip install 'regard[explorer]'")
pytest.importorskip("uvicorn", reason="needs the server: pip install 'regard[explorer]'")

from browsing import BEARER, TOKEN, serving
from fuzz.load import load
from seeing_twins import vit
from speaking_twins import bert

HEADS, N, D = 3, 11, 5
ROW = "/row?layer=0&head=2&token=7"
EXAMPLES = 12  # of each operation
LOGGERS = ("uvicorn.error", "asyncio", "concurrent.futures", "regard.explorer")
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json", self
        return json.loads(self.body)


class Reached(NamedTuple):
    """A server, and what it logged."""

    port: int
    log: list[logging.LogRecord]

    def ask(
        self, path: str, verb: str = "GET", body: bytes | None = None, kind: str = "application/json", **more: Any
    ) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(verb, path, body, BEARER | ({} if body is None else {"Content-Type": kind}), **more)
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def lives(self) -> bool:
        """Whether a plain row of the latest session is answered, and nothing was logged as an error."""
        last = self.ask("/api/sessions").json()["sessions"][-1]["id"]
        row = self.ask(f"/api/session/{last}/row?layer=0&head=2&token=0").json()
        for _ in range(20):  # a task that is left behind may end a moment later
            if self.log:
                break
            time.sleep(0.002)
        assert [record.getMessage() for record in self.log] == []
        return bool(row["top"])

    @contextmanager
    def raw(self, sent: bytes) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as made:
            made.sendall(sent)
            yield made

    def head(self, line: str, *lines: str) -> bytes:
        """The beginning of a request as bytes."""
        own = (f"Host: 127.0.0.1:{self.port}", f"Authorization: Bearer {TOKEN}")
        return "".join(f"{one}\r\n" for one in (line, *own, *lines, "")).encode("latin-1")


class Noted(logging.Handler):
    """Keeps errors and whatever brings a traceback."""

    def __init__(self, found: list[logging.LogRecord]) -> None:
        super().__init__()
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.found.append(record)


def made_session() -> Session:
    torch.manual_seed(0)
    view = regard.look(*torch.randn(3, 1, HEADS, N, D), measures=["entropy", "received", "map", "effective"])
    capture = Capture("Toy", [[f"{SCRIPT}{n}" for n in range(N)]])
    capture.records.append(Record("layers.0", 0, "self", "test", "test", view=view))
    return Session("toy", capture, tuple(capture.tokens[0]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("models") / "tiny-bert", "Model")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("captures") / "toy.regard"
    made_session().capture.save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def reached(model: Path) -> Iterator[Reached]:
    eyes = vit(model.parent / "tiny-vit")
    with serving([made_session()], ModelShelf([str(model), str(eyes)], demo=False), cached=False) as address:
        yield Reached(int(address.rpartition(":")[2]), [])


@pytest.fixture
def there(reached: Reached) -> Iterator[Reached]:
    """The server, which lives after the test too."""
    with listening(reached.log):
        yield reached
        assert reached.lives()


@contextmanager
def listening(log: list[logging.LogRecord]) -> Iterator[None]:
    """Inside, errors are noted. Not for longer: each new server sets its loggers up again."""
    log.clear()
    noted, heard = Noted(log), [logging.getLogger(name) for name in LOGGERS]
    for logger in heard:
        logger.addHandler(noted)
    try:
        yield
    finally:
        for logger in heard:
            logger.removeHandler(noted)


def refused(answer: Answer, *statuses: int) -> str:
    """The words of a refusal."""
    assert answer.status in (statuses or range(400, 500)), answer
    assert set(answer.json()) == {"error"}
    words = answer.json()["error"]
    assert words
    return str(words)


def latest(there: Reached) -> str:
    """The address of the newest session: older ones make room for new ones."""
    return f"/api/session/{there.ask('/api/sessions').json()['sessions'][-1]['id']}"


def wait(there: Reached, job: str) -> dict[str, Any]:
    until = time.monotonic() + 120
    while (line := there.ask(f"/api/job/{job}").json())["state"] not in ENDED:
        assert time.monotonic() < until, line
        time.sleep(0.01)
    return dict(line)


# --------------------------------------------------------------------------------------------------------------- fuzzed

STRANGE = ["", " ", "NaN", "-inf", "1e5", "0x1", "-1", "null", "true", "[]", "\x00", "\r\nX: y", "한글", "\u0663",
           "\uff11", "\u202e", "\U0001f600", "\ud800", "..", "../..", "%", "%00", "x" * 5000,
           "9" * 4301, "<b>"]  # fmt: skip
WHOLE = [0, 1, 2, 7, 10, 11, 12, 64, 65, 256, 257, 2**31, 2**63, 2**64, 10**30, 10**4000]
SPANS = ["0,11", "0,1", "11,0", "3,3", "10,12", "0,999999999999", "999999999999,999999999999", "\u0663,\u0664", "0,1\n",
         "0,1,2", ",", "-1,1", " 0,1", "0, 1", "0,1e3"]  # fmt: skip
ANY_TEXT = st.sampled_from(STRANGE) | st.text(max_size=40) | st.text(st.characters(max_codepoint=31), max_size=9)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)


def values(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    """Texts for a parameter: mostly what its schema takes, to the extreme, and also anything."""
    kinds = {schema.get("type"), *(one.get("type") for one in schema.get("anyOf", ()))}
    if "integer" in kinds:
        return st.sampled_from(WHOLE).map(str) | st.integers().map(str) | ANY_TEXT
    if "pattern" in schema:
        return st.sampled_from(SPANS) | ANY_TEXT
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) | ANY_TEXT
    return st.sampled_from(["0", "1", "2"]) | ANY_TEXT


def bodies(operation: dict[str, Any], file: bytes) -> st.SearchStrategy[bytes | None]:
    """No body, JSON with and without the right fields, any bytes, and a capture with a byte that is not its own."""
    content = operation.get("requestBody", {}).get("content", {})
    if "application/octet-stream" in content:
        places = st.integers(0, len(file) - 1)
        turned = st.builds(
            lambda n, flip: file[:n] + bytes([file[n] ^ flip]) + file[n + 1 :], places, st.integers(1, 255)
        )
        return turned | places.map(lambda n: file[:n]) | st.binary(max_size=99)
    if content:
        asked = st.fixed_dictionaries(
            {"text": st.just("the street") | ANY_TEXT | ANY_JSON},
            optional={
                "model": st.sampled_from(["0", None]) | ANY_JSON,
                "truncate": st.booleans() | ANY_JSON,
                "where": ANY_TEXT.map(lambda place: f"/{place}") | st.integers(),  # never an id, which asks the hub
                "token": st.sampled_from(WHOLE) | ANY_JSON,
                "key": st.sampled_from(WHOLE) | ANY_JSON,
                "word": ANY_TEXT | ANY_JSON,
            },
        )
        return (asked | asked | ANY_JSON).map(lambda one: json.dumps(one).encode()) | st.binary(max_size=99)
    return st.none() | st.binary(max_size=9)


@st.composite
def requests(draw: st.DrawFn, path: str, operation: dict[str, Any], file: bytes) -> tuple[str, bytes | None, str]:
    query = []
    for one in operation.get("parameters", ()):
        if one["in"] == "path":
            value = draw(values(one["schema"]) | st.just("1"))
            path = path.replace(f"{{{one['name']}}}", quote(value, safe="", errors="surrogatepass"))
        elif one["required"] or draw(st.booleans()):
            times = draw(st.sampled_from([1, 1, 1, 1, 1, 0, 2]))
            query += [(one["name"], draw(values(one["schema"]))) for _ in range(times)]
    kinds = ["application/json"] * 4 + ["text/plain", "multipart/form-data", "application/json; charset=utf-16", ""]
    return (
        f"{path}?{urlencode(query, errors='surrogatepass')}",
        draw(bodies(operation, file)),
        draw(st.sampled_from(kinds)),
    )


def test_whatever_the_openapi_document_allows_and_more_is_answered_or_refused_in_words(there, file):
    document = there.ask("/openapi.json").json()["paths"]
    operations = [(path, verb.upper(), one) for path, verbs in document.items() for verb, one in verbs.items()]
    assert len(operations) == 27
    statuses = set()
    for path, verb, operation in operations:
        statuses |= fuzz(there, verb, requests(path, operation, file))
        assert there.lives(), (path, verb)
    assert {200, 400, 404, 422} <= statuses, "some of it is right, and the rest wrong in every way"


def fuzz(there: Reached, verb: str, drawn: st.SearchStrategy[tuple[str, bytes | None, str]]) -> set[int]:
    """Send what is drawn; returns the statuses that came back, of which none is the server's fault."""
    statuses = set()

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(request=drawn)
    def ask(request: tuple[str, bytes | None, str]) -> None:
        where, body, kind = request
        answer = there.ask(where, verb, body, kind)
        statuses.add(answer.status)
        assert answer.status == 200 or refused(answer), where
        if answer.headers.get("content-disposition") != "attachment":
            assert answer.json() is not None
        assert answer.headers["x-content-type-options"] == "nosniff"

    ask()
    return statuses


def test_capture_with_a_byte_turned_opens_and_answers_or_is_refused(there, file):
    step = max(1, len(file) // 60)
    for place in range(0, len(file), step):
        answer = there.ask("/api/open", "POST", file[:place] + bytes([file[place] ^ 0x55]) + file[place + 1 :])
        if answer.status != 200:
            refused(answer, 400)
            continue
        session = answer.json()["session"]
        for question in ("overview", "head?layer=0&head=0", ROW[1:], "tile?layer=0&head=0&rows=0,11&cols=0,11"):
            asked = there.ask(f"/api/session/{session}/{question}")
            assert asked.status == 200 or refused(asked), (place, question)
    assert there.ask("/api/open", "POST", file).status == 200


# ----------------------------------------------------------------------------------------------------------------- size


def test_token_of_a_million_characters_is_read_or_refused_and_comes_back_short(there):
    started = there.ask("/api/look", "POST", json.dumps({"text": "x" * 10**6, "truncate": True}).encode())
    line = wait(there, started.json()["job"])
    assert line["state"] == "done", line
    assert max(map(len, there.ask(f"/api/session/{line['session']}/tokens").json()["labels"])) <= 64
    overview = there.ask(f"/api/session/{line['session']}/overview")
    assert overview.json()["text"] is None, "it is longer than what comes back"
    assert len(there.ask("/api/sessions").body) < 10_000


@pytest.mark.parametrize(("letter", "count"), [("x", 2**20 + 1), ("\u0001", 2**20 + 1), ("가", 349_526)])
def test_text_of_a_megabyte_and_a_little_is_refused(there, letter, count):
    answer = there.ask("/api/look", "POST", json.dumps({"text": letter * count}).encode())
    assert re.search(r"bytes.*1,048,576", refused(answer, 413))


def test_markup_in_a_text_and_in_tokens_comes_back_as_data(there, file):
    started = there.ask("/api/look", "POST", json.dumps({"text": SCRIPT, "truncate": True}).encode())
    read = wait(there, started.json()["job"])["session"]
    opened = there.ask(f"/api/open?name={quote(SCRIPT.replace('/', ''))}", "POST", file).json()["session"]
    answers = [there.ask(f"/api/session/{one}/overview") for one in (read, opened)]
    answers += [there.ask("/api/sessions"), there.ask(f"/api/session/{opened}/tokens")]
    answers += [there.ask(f"/api/session/{quote('<script>x')}/overview"), there.ask(f"/page/{quote(SCRIPT)}")]
    assert answers[0].json()["text"] == SCRIPT
    for answer in answers:
        assert b"<script>" in answer.body
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in answer.headers["content-security-policy"]


VIEWS = [
    "</script><script>alert(1)</script>",
    "<!--",
    '"};alert(1)//',
    "layer=0&head=99999",
    "layer=9&head=9",
    "\u2028",
]


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_an_exported_page_is_data_and_the_page_a_file(there, view):
    page = there.ask(f"{latest(there)}/page?{urlencode({'view': view})}")
    assert page.status == 200
    assert page.headers["content-disposition"] == "attachment"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    (said,) = re.findall(rb'<script type="application/json" id="regard-view">(.*?)</script>', page.body, re.DOTALL)
    assert b"<" not in said
    assert json.loads(said) == view
    assert len(re.findall(rb"<script\b", page.body)) == 4


def test_exported_files_name_no_folder_and_open_again(there, model):
    read = wait(there, there.ask("/api/look", "POST", b'{"text": "the street"}').json()["job"])["session"]
    page, capture = (there.ask(f"/api/session/{read}/{what}") for what in ("page", "capture"))
    for answer in (page, capture):
        assert answer.status == 200
        assert str(model.parent).encode() not in answer.body
        assert not any(str(model.parent) in value for value in answer.headers.values())
    assert there.ask("/api/open?name=again.regard", "POST", capture.body).status == 200


def test_view_that_is_too_long_and_sessions_that_are_not_there_are_refused(there):
    assert "view" in refused(there.ask(f"{latest(there)}/page?view={'x' * 2049}"), 422)
    for what in ("page", "capture"):
        for name in ("999", "..%2F..%2Fetc%2Fpasswd", "%00"):
            refused(there.ask(f"/api/session/{name}/{what}"), 404)
        assert there.ask(f"{latest(there)}/{what}", "POST").status == 405


def test_capture_larger_than_the_page_opens_is_not_written(there, monkeypatch):
    monkeypatch.setattr("regard.explorer.server.LARGEST_FILE", 100)
    monkeypatch.setattr("regard.explorer.server._open_bytes", lambda *given: pytest.fail("it was written"))
    assert "--save" in refused(there.ask(f"{latest(there)}/capture"), 400)


def test_pages_that_many_ask_for_at_once_are_bounded_and_the_server_goes_on(there):
    name = latest(there)
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(there.raw(there.head(f"GET {name}/page HTTP/1.1")))  # and leave
    until = time.monotonic() + 120
    while (answer := there.ask(f"{name}/page")).status != 200:
        refused(answer, 429)
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("where", ["/api/session/{}/overview", "/page/{}", "/{}"])
def test_address_of_a_hundred_thousand_characters_is_refused(there, where):
    answer = there.ask(where.format("x" * 100_000))
    assert 400 <= answer.status < 500
    assert len(answer.body) < 1000


# --------------------------------------------------------------------------------------------------------- many clients


def test_fifty_clients_at_once_get_what_one_gets():
    session = made_session()
    questions = [f"row?layer=0&head={n % HEADS}&token={n % N}" for n in range(N)]
    questions += [f"tile?layer=0&head={n}&rows={n},11&cols=0,{11 - n}&size=4" for n in range(HEADS)]
    questions += [f"head?layer=0&head={n}" for n in range(HEADS)] + ["overview", "tokens", "head?layer=9&head=0"]
    with serving([session], ModelShelf(demo=False), cached=False) as address:
        fresh = Reached(int(address.rpartition(":")[2]), [])
        alone = {question: fresh.ask(f"/api/session/1/{question}") for question in questions}
        ready, got = threading.Barrier(50), list[tuple[str, Answer]]()

        def ask(first: int) -> None:
            ready.wait(120)
            for n in range(6):
                question = questions[(first + 7 * n) % len(questions)]
                got.append((question, fresh.ask(f"/api/session/1/{question}")))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert len(got) == 300, "none failed"
    assert {question for question, _ in got} == set(questions)
    assert all((answer.status, answer.body) == alone[question][::2] for question, answer in got)


def test_clients_that_ask_read_err_and_leave_all_at_once_get_no_server_error(there):
    """What tests/fuzz/load.py does for a minute with a hundred."""
    tally = load(there.port, TOKEN, clients=20, seed=0, more=lambda done: done < 8)
    assert tally.lost == []
    assert [status for status in tally.statuses if status >= 500] == []
    assert tally.statuses[200] > 0


# ----------------------------------------------------------------------------------------------------- those that leave


def left_in_the_middle(there: Reached, file: bytes) -> dict[str, bytes]:
    row = f"GET /api/session/1{ROW} HTTP/1.1"
    look = there.head("POST /api/look HTTP/1.1", "Content-Type: application/json", "Content-Length: 999")
    opening = there.head("POST /api/open HTTP/1.1", f"Content-Length: {len(file)}")
    chunked = there.head("POST /api/open HTTP/1.1", "Transfer-Encoding: chunked")
    return {
        "nothing": b"",
        "half a request line": b"GET /api/sess",
        "half the headers": f"{row}\r\nHost: 127.0".encode(),
        "no body for a text": look,
        "half a text": look + b'{"text": "the',
        "no body for a capture": opening,
        "half a capture": opening + file[: len(file) // 2],
        "half a chunk": chunked + b"400\r\nabc",
        "a chunk that ends": chunked + b"3\r\nabc\r\n",
        "a question": there.head(row),
        "five questions": there.head(row) * 5,
    }


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
def test_client_that_leaves_in_the_middle_changes_nothing(there, file, reset):
    for sent in left_in_the_middle(there, file).values():
        with there.raw(sent) as left:
            if reset:  # closing sends RST, not FIN
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert there.lives()


def test_reader_that_leaves_in_the_middle_of_an_answer_changes_nothing(there):
    sent = there.head("GET /page/shell/main.js HTTP/1.1") + there.head("GET /openapi.json HTTP/1.1")
    for _ in range(5):
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow.settimeout(120)
            slow.connect(("127.0.0.1", there.port))
            slow.sendall(sent * 20)  # far more than both sides' buffers hold
            assert slow.recv(64)
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert there.lives()


# ----------------------------------------------------------------------------------------------------------------- lies


@pytest.mark.parametrize(
    "path",
    [
        "/page/../server.py", "/page/..%2fserver.py", "/page/..%2Fserver.py", "/page/%2e%2e/server.py",
        "/page/%2e%2e%2fserver.py", "/page/%252e%252e%252fserver.py", "/page/..%5cserver.py", "/page/..\\server.py",
        "/page/%c0%ae%c0%ae/server.py", "/page/%uff0e%uff0e/server.py", "/page/.../server.py", "/page/....//server.py",
        "/page//etc/passwd", "/page/%2fetc%2fpasswd", "/page///etc/passwd", "//etc/passwd", "/page/C:%5cwin.ini",
        "/page/index.html%00", "/page/index.html%00.js", "/page/%00", "/page/./index.html", "/page/x/../index.html",
        "/page/index.html/", "/page/INDEX.HTML", "/page/index.html%20", "/page/file:///etc/passwd", "/page/~/x.js",
        "/page", "/page/", "/..", "/%2e%2e/%2e%2e/etc/passwd", "/page/__pycache__", "/page/..;/server.py",
    ],
)  # fmt: skip
def test_traversal_in_any_writing_finds_nothing(there, path):
    with there.raw(there.head(f"GET {path} HTTP/1.1", "Connection: close")) as asked:
        answer = b"".join(iter(lambda: asked.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 307 ")), head
    assert b"import" not in body
    assert b"root:" not in body
    if head.startswith(b"HTTP/1.1 404 "):
        assert set(json.loads(body)) == {"error"}


BODIES = [b"", b"{", b"}", b"null", b"NaN", b'"text"', b"[1]", b'{"text"', b'{"text": "a" "b"}', b"\xff\xfe{\x00",
          b"\x00" * 99,
          b'{"text": NaN}', b'{"text": {"a": "b"}}', b'{"text": "a", "truncate": "maybe"}', b'{"text": "\x01\x02"',
          b"[" * 200_000, b'{"a":' * 100_000, b'{"text": ' + b"9" * 100_000 + b"}"]  # fmt: skip


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", "a/b/c", ""])
def test_malformed_body_is_refused_whatever_it_says_it_is(there, kind):
    for body in BODIES:
        refused(there.ask("/api/look", "POST", body, kind), 400, 422)


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"])
def test_text_of_another_kind_than_json_is_not_read(there, kind):
    """A form of another site may send these without being asked first."""
    refused(there.ask("/api/look", "POST", b'{"text": "the street"}', kind), 422)


@pytest.mark.parametrize(("path", "most"), [("/api/look", 6 * 2**20 + 4096), ("/api/open", 64 * 2**20)])
def test_chunked_body_is_cut_off_at_the_first_byte_beyond_the_limit(there, path, most):
    whole, rest = divmod(most, 1 << 20)
    with there.raw(there.head(f"POST {path} HTTP/1.1", "Transfer-Encoding: chunked")) as sending:
        for size in (*[1 << 20] * whole, *([rest] if rest else []), 1):  # and never says that it ends
            sending.sendall(f"{size:x}\r\n".encode() + b"x" * size + b"\r\n")
        answer = b"".join(iter(lambda: sending.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert f"{most:,}" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    ("lines", "body", "first"),
    [
        (["Content-Length: 5"], b'{"text": "the street"}', b"HTTP/1.1 422 "),  # the rest is no request
        (["Content-Length: -5"], b"{}", b"HTTP/1.1 400 "),
        (["Content-Length: 1e3"], b"{}", b"HTTP/1.1 400 "),
        (["Content-Length: 99999999999999999999"], b"{}", b"HTTP/1.1 4"),
        (["Content-Length: 2", "Content-Length: 3"], b"{}", b"HTTP/1.1 4"),
        (["Content-Length: 2", "Transfer-Encoding: chunked"], b"0\r\n\r\n", b"HTTP/1.1 4"),
        (["Transfer-Encoding: chunked"], b"zz\r\n\r\n", b"HTTP/1.1 4"),
        (["Transfer-Encoding: gzip"], b"{}", b"HTTP/1.1 "),
        (["X: a\x00b"], b"", b"HTTP/1.1 4"),
    ],
)
def test_length_that_lies_is_refused(there, lines, body, first):
    head = there.head("POST /api/look HTTP/1.1", "Content-Type: application/json", "Connection: close", *lines)
    with there.raw(head + body) as sending:
        answer = sending.recv(65536)
    assert answer.startswith(first), answer
    assert not answer.startswith(b"HTTP/1.1 200 "), "no text was read"


@pytest.mark.parametrize(
    "line",
    ["GET", "G\x00T / HTTP/1.1", "PRI * HTTP/2.0", "TRACE / HTTP/1.1", "CONNECT evil.com:443 HTTP/1.1",
     "OPTIONS * HTTP/1.1", "GET http://evil.com/ HTTP/1.1", "\x16\x03\x01\x02\x00", "GET /\xff HTTP/1.1"],
)  # fmt: skip
def test_line_that_is_no_request_of_ours_is_refused(there, line):
    with there.raw(there.head(line, "Connection: close")) as sending:
        answer = sending.recv(65536)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer


TEXT_BODY = b'{"text": "the street"}'
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(TEXT_BODY), TEXT_BODY)


@pytest.mark.parametrize(
    ("line", "lines", "body", "status"),
    [
        ("POST /nothing HTTP/1.1", ["Transfer-Encoding: chunked"], b"zz\r\n", 400),  # no chunk, while a route answers
        ("GET /api/models HTTP/1.1", ["Transfer-Encoding: chunked"], b"zz\r\n", 400),
        ("POST /api/look HTTP/1.1", ["Content-Length: 22", "Transfer-Encoding: chunked"], CHUNKS, 400),
        ("POST /api/look HTTP/1.1", ["Content-Length: 22", "Content-Length: 23"], TEXT_BODY, 400),
        ("GET /api/models HTTP/2.0", [], b"", 400),
        ("GET /api/models HTTP/0.9", [], b"", 400),
        ("GET /api/models HTTP/1.1", ["Upgrade: websocket", "Connection: Upgrade"], b"", 400),
        ("GET /api/models HTTP/1.1", ["X: " + "x" * 66_000], b"", 431),
        ("GET /api/models HTTP/1.1", [f"X{n}: x" for n in range(20_000)], b"", 431),
        ("GET /api/models?" + "x=y&" * 17_000 + " HTTP/1.1", [], b"", 431),
        ("PUT /api/models HTTP/1.1", [], b"", 405),
        ("TRACE /api/models HTTP/1.1", [], b"", 405),
        ("GET /a b HTTP/1.1", [], b"", 400),
    ],
)
def test_hostile_request_is_refused_in_a_sentence(there, line, lines, body, status):
    head = there.head(line, "Content-Type: application/json", *lines, "Connection: close")
    with there.raw(head + body) as asked:
        got, headers, said = whole(asked)
    assert got in (status, 400), "what comes in several reads, uvicorn refuses itself"
    assert headers["content-type"] == "application/json"
    assert headers["x-content-type-options"] == "nosniff"
    assert set(json.loads(said)) == {"error"}


def test_request_of_http_1_0_is_answered_like_others(there):
    with there.raw(there.head("GET /api/models HTTP/1.0")) as asked:
        assert whole(asked)[0] == 200


# ------------------------------------------------------------------------------------------------------ slow, and many


def whole(asked: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body of an answer after which the server hangs up."""
    head, _, body = b"".join(iter(lambda: asked.recv(65536), b"")).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return (
        int(first.split()[1]),
        {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)},
        body,
    )


@pytest.mark.parametrize("sent", [b"", b'{"text": "the'])
@pytest.mark.parametrize("length", ["Content-Length: 999", "Transfer-Encoding: chunked"])
def test_body_that_does_not_come_is_given_up(there, monkeypatch, sent, length):
    monkeypatch.setattr(security, "BODY_SECONDS", 0.05)
    chunk = sent if length[0] == "C" or not sent else b"%x\r\n%b\r\n" % (len(sent), sent)
    head = there.head("POST /api/look HTTP/1.1", "Content-Type: application/json", length)
    with there.raw(head + chunk) as asked:
        status, _, body = whole(asked)
    assert status == 408
    assert set(json.loads(body)) == {"error"}


def test_body_that_comes_steadily_may_take_longer(there, monkeypatch):
    monkeypatch.setattr(security, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(security, "BODY_RATE", 0.1)  # ten seconds more for each byte
    head = there.head("POST /api/look HTTP/1.1", "Content-Type: application/json", "Content-Length: 22")
    with there.raw(head + TEXT_BODY[:12]) as asked:
        time.sleep(0.2)
        asked.sendall(TEXT_BODY[12:])
        assert asked.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nHost: 127", b"GET / HTTP/1.1\r\n"])
def test_head_that_does_not_come_is_given_up(there, monkeypatch, sent):
    monkeypatch.setattr(security, "HEAD_SECONDS", 0.05)
    with there.raw(sent) as asked:
        status, _, body = whole(asked)
    assert status == 408
    assert set(json.loads(body)) == {"error"}


def test_second_head_of_a_connection_that_does_not_come_is_given_up_too(there, monkeypatch):
    with there.raw(there.head("GET /api/models HTTP/1.1")) as asked:
        assert asked.recv(65536).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(security, "HEAD_SECONDS", 0.05)
        asked.sendall(b"GET /api/mod")
        assert whole(asked)[0] == 408


def test_connection_that_says_nothing_is_closed(there, monkeypatch):
    monkeypatch.setattr(security, "HEAD_SECONDS", 0.05)
    with there.raw(b"") as asked:
        assert asked.recv(1) == b""


def test_bodies_in_flight_are_bounded_together(there, file, monkeypatch):
    monkeypatch.setattr(security, "MOST_IN_FLIGHT", 10_000)
    with there.raw(there.head("POST /api/open HTTP/1.1", "Content-Length: 9000")) as first:
        first.sendall(b"x")
        until = time.monotonic() + 120
        while (answer := there.ask("/api/open", "POST", bytes(2000))).status != 503:  # the first is taken in by now
            assert time.monotonic() < until
        assert refused(answer, 503)
        assert int(answer.headers["retry-after"]) > 0
        with there.raw(there.head("POST /api/open HTTP/1.1", "Transfer-Encoding: chunked")) as second:
            second.sendall(b"7d0\r\n" + bytes(2000) + b"\r\n")
            assert whole(second)[0] == 503
        assert there.ask("/api/look", "POST", b'{"text": ""}').status == 400, "what is small still comes in"
    while there.ask("/api/open", "POST", bytes(2000)).status == 503:  # until the server sees that the first has left
        assert time.monotonic() < until


def test_connections_are_bounded(there, monkeypatch):
    assert there.lives()
    monkeypatch.setattr(security, "MOST_CONNECTIONS", 3)
    with ExitStack() as stack:
        first = [stack.enter_context(there.raw(b"")) for _ in range(3)]
        with there.raw(there.head("GET /api/models HTTP/1.1")) as asked:
            status, headers, body = whole(asked)
        assert (status, set(json.loads(body))) == (503, {"error"})
        assert int(headers["retry-after"]) > 0
        first[0].sendall(there.head("GET /api/models HTTP/1.1", "Connection: close"))
        assert whole(first[0])[0] == 200, "those that were there go on"


# ------------------------------------------------------------------------------------------------------------- pictures

LOOK = "/api/look_at_image"


def png(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and holds nothing."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"]
    sealed = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", r"'x\.jpg'"),
        (b"not a picture", r"'x\.jpg'"),
        (b"<html><script>alert(1)</script>", r"'x\.jpg'"),
        (b"<svg onload='alert(1)'/>", r"'x\.jpg'.*SVG"),
        (b"\x89PNG\r\n\x1a\n", r"'x\.jpg'"),
        (png(13_000, 13_000), r"'x\.jpg'.*13000.*60,000,000"),
        (png(40_000, 40_000), r"'x\.jpg'"),
    ],
    ids=["nothing", "text", "page", "drawing", "cut off", "large", "bomb"],
)
def test_body_that_is_no_image_fails_in_its_job_in_the_words_of_open_image(there, body, words):
    line = wait(there, there.ask(f"{LOOK}?name=x.jpg&model=1", "POST", body, "image/jpeg").json()["job"])
    assert (line["state"], line["session"]) == ("failed", None)
    assert re.search(words, line["error"])


def test_image_of_33_megabytes_is_refused_before_it_is_read(there):
    connection = HTTPConnection("127.0.0.1", there.port, timeout=120)
    try:
        connection.putrequest("POST", f"{LOOK}?name=x.jpg")
        connection.putheader("content-length", str(33 << 20))
        connection.putheader("authorization", BEARER["Authorization"])
        connection.endheaders(b"\xff\xd8\xff")  # the rest never comes, and is not waited for
        answer = connection.getresponse()
        assert answer.status == 413
        assert re.search(r"34603008.*33,554,432", json.loads(answer.read())["error"])
    finally:
        connection.close()


def test_name_of_an_image_is_a_name_and_no_path(there):
    job = there.ask(f"{LOOK}?model=1&name=..%2F..%2Fetc%2Fpasswd", "POST", b"text", "image/png").json()["job"]
    assert "'passwd'" in wait(there, job)["error"]


def test_question_of_many_letters_is_refused(there):
    words = refused(there.ask(f"{LOOK}?text={'x' * 5000}", "POST", png(1, 1), "image/png"), 422)
    assert "text: " in words


def test_model_of_texts_refuses_an_image_before_its_bytes_are_sent(there):
    head = there.head(f"POST {LOOK}?name=a.png&model=0 HTTP/1.1", f"Content-Length: {1 << 20}", "Connection: close")
    with there.raw(head) as asked:
        status, _, body = whole(asked)
    assert status == 400
    assert "tiny-bert" in json.loads(body)["error"]


def test_image_is_decoded_in_its_job_and_not_while_others_are(there, monkeypatch):
    decoded: list[str] = []
    real = jobs.open_image

    def noted(data: bytes) -> Any:
        decoded.append(threading.current_thread().name)
        return real(data)

    monkeypatch.setattr(jobs, "open_image", noted)
    out = io.BytesIO()
    Image.new("RGB", (7, 5)).save(out, "PNG")
    names = [there.ask(f"{LOOK}?model=1", "POST", out.getvalue(), "image/png").json()["job"] for _ in range(3)]
    assert [wait(there, name)["state"] for name in names] == ["done"] * 3
    assert decoded == ["regard jobs"] * 3
    last = there.ask("/api/sessions").json()["sessions"][-1]["id"]
    assert there.ask(f"/api/session/{last}/image/0").headers["content-type"] in ("image/png", "image/jpeg")


def test_image_that_wait_are_bounded_together(there, monkeypatch):
    free = threading.Event()

    def hold(data: bytes) -> None:
        free.wait(120)
        raise ValueError("no picture")

    monkeypatch.setattr(jobs, "open_image", hold)
    monkeypatch.setattr(jobs, "MOST_BYTES", 1000)
    names = [there.ask(f"{LOOK}?model=1", "POST", bytes(400), "image/png").json()["job"] for _ in range(2)]
    answer = there.ask(f"{LOOK}?model=1", "POST", bytes(400), "image/png")
    assert refused(answer, 429)
    assert int(answer.headers["retry-after"]) > 0
    text = there.ask("/api/look", "POST", b'{"text": "the street"}').json()["job"]
    for name in names:
        there.ask(f"/api/job/{name}", "DELETE")
    free.set()
    assert wait(there, text)["state"] == "done"


@pytest.mark.parametrize("number", ["0", "1", "-1", "99999999999999999999"])
def test_session_without_image_gives_none(there, file, number):
    session = there.ask("/api/open", "POST", file).json()["session"]
    answer = there.ask(f"/api/session/{session}/image/{number}")
    assert refused(answer, 404)
