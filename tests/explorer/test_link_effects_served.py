"""The effect of a link over HTTP, in a notebook, in a file and in the page: the session's numbers in all of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regard.explorer import answers, jobs
from regard.explorer.export import bundle, modules, page_data, write_html
from regard.explorer.jobs import ModelShelf
from regard.explorer.widget import answer
from regard.models.loading import load
from regard.models.model import Model
from regard.session.session import Session, look_at, session_of

pytest.importorskip("fastapi", reason="needs the server: pip install 'regard[explorer]'")
pytest.importorskip("httpx", reason="needs fastapi's test client: pip install httpx")

from browsing import BEARER, PLAYWRIGHT, TOKEN, ready, serving
from fastapi.testclient import TestClient
from speaking_twins import bert
from unpacking import unpacked

from regard.explorer import server

PORT = 8124
TEXT = "The animal did not cross the street."
LINK = {"token": 5, "key": 2}
IN_HEAD = LINK | {"layer": 1, "head": 2}
WHERE = "/api/session/1/effects"
node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's modules")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(bert(tmp_path_factory.mktemp("models") / "tiny-bert", "Model"))


@pytest.fixture
def session(model: Model) -> Session:
    return look_at(TEXT, model)


@pytest.fixture(scope="module")
def measured(model: Model) -> Session:
    """A session in which the link was measured, in one head and in all."""
    made = look_at(TEXT, model)
    answers.measure(made, **IN_HEAD)
    answers.measure(made, **LINK)
    return made


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    made = server.app([session], ModelShelf(demo=False), port=PORT, token=TOKEN)
    with TestClient(made, base_url=f"http://127.0.0.1:{PORT}", headers=BEARER) as client:
        yield client


def ended(client: TestClient, job: str) -> dict[str, Any]:
    until = time.monotonic() + 120
    while (line := client.get(f"/api/job/{job}").json())["state"] not in jobs.ENDED:
        assert time.monotonic() < until, line
        time.sleep(0.01)
    return line


# ----------------------------------------------------------------------------------------------------------- the server


def test_nothing_is_measured_before_somebody_asks(client):
    assert client.get(WHERE, params=LINK).json() == LINK | {"links": [], "heads": None}


@pytest.mark.parametrize("link", [IN_HEAD, LINK])
def test_job_measures_what_python_measures(client, measured, link):
    job = client.post(WHERE, json=link).json()["job"]
    assert ended(client, job) == {"state": "done", "progress": "", "session": "1", "error": None}
    ours, theirs = client.get(WHERE, params=LINK).json(), answers.effects(measured, **LINK)
    assert (ours["links"] == [], ours["heads"] is None) == (link == LINK, link == IN_HEAD)
    if link == IN_HEAD:
        (found,), (expected,) = ours["links"], theirs["links"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():  # two runs in two threads: sums may be split differently
            assert found[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3))
    else:
        for name in ("weights", "effects"):
            torch.testing.assert_close(
                unpacked(ours["heads"][name]), unpacked(theirs["heads"][name]), rtol=1e-3, atol=1e-6
            )


@pytest.mark.parametrize(
    ("link", "status", "words"),
    [
        (IN_HEAD | {"head": 99}, 404, "head 99"),
        (LINK | {"token": 99}, 404, "token 99"),
        (LINK | {"layer": 1}, 400, "layer 1"),
        ({"token": 1}, 422, "key"),
    ],
)
def test_wrong_link_is_refused_before_a_job_begins(client, link, status, words):
    reply = client.post(WHERE, json=link)
    assert (reply.status_code, words in reply.json()["error"]) == (status, True)
    assert client.get("/api/job/1").status_code == 404


def test_what_the_model_cannot_do_fails_the_job_with_a_reason(client, monkeypatch):
    def refuse(*given: Any) -> None:
        raise ValueError("the model is compiled")

    monkeypatch.setattr(jobs, "measure_link", refuse)
    line = ended(client, client.post(WHERE, json=IN_HEAD).json()["job"])
    assert (line["state"], line["error"]) == ("failed", "the model is compiled")


def test_capture_without_a_model_is_refused(session):
    made = server.app([session_of(session.capture)], ModelShelf(demo=False), port=PORT, token=TOKEN)
    with TestClient(made, base_url=f"http://127.0.0.1:{PORT}", headers=BEARER) as client:
        assert client.post(WHERE, json=IN_HEAD).status_code == 400
        layers = client.get("/api/session/1/overview").json()["layers"]
    assert {layer["no_effects"] for layer in layers} == {"no_model"}


def test_measuring_is_cancelled_between_heads_and_the_model_is_free_meanwhile(client, monkeypatch):
    first, go = threading.Event(), threading.Event()

    def slowly(*given: Any) -> Iterator[tuple[int, int]]:
        for done in (1, 2, 3):
            yield done, 3
            first.set()
            assert go.wait(120)

    monkeypatch.setattr(jobs, "measure_heads", slowly)
    job = client.post(WHERE, json=LINK).json()["job"]
    assert first.wait(120)
    assert client.get(f"/api/job/{job}").json()["state"] == "measuring"
    assert client.get(f"/api/job/{job}").json()["progress"] == "1 / 3"
    client.delete(f"/api/job/{job}")
    go.set()
    assert ended(client, job)["state"] == "cancelled"
    steps = client.get("/api/session/1/steps?layer=0&head=0&token=1&key=1")
    assert steps.status_code == 200


# ------------------------------------------------------------------------------------------------ notebook, file, page


def test_notebook_measures_too(session):
    reply = answer([session], {"id": 7, "session": "1", "ask": "measure", "given": IN_HEAD})
    assert reply == {"id": 7, "answer": answers.effects(session, **LINK)}
    assert reply["answer"]["links"][0]["effect"] > 0


def test_file_carries_what_was_measured_and_nothing_else(session, measured):
    assert page_data(session)["sessions"]["1"]["effects"] == {}
    assert page_data(measured)["sessions"]["1"]["effects"] == {"5.2": answers.effects(measured, 5, 2)}


def ran(entry: str, what: str) -> Any:
    """The value of an expression over what a module of the page exports, called `page` in it."""
    script, name = bundle(modules(), entry)
    source = f"{script}\nconst page = {name};\nconsole.log(JSON.stringify({what}));"
    done = subprocess.run(["node", "--input-type=module"], input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@node
def test_numbers_of_effects_are_written_in_digits_that_count():
    said = {
        "percent(0.1003)": "10.0%",
        "percent(0.003501)": "0.350%",
        "percent(0.4671)": "46.7%",
        "percent(1.2345)": "123%",
        "percent(0)": "0%",
        "percent(0.0000012)": "0.000120%",
        "percent(1e-9)": "< 0.0001%",
        "pValue(0.0625)": "0.0625",
        "pValue(1 / 3)": "0.333",
        "pValue(1)": "1",
        "ticks(46.7)": [0, 20, 40],
        "ticks(0.677)": [0, 0.2, 0.4, 0.6],
        "ticks(0)": [0],
        "meanSize([0.5, -1.5])": 1,
    }
    assert ran("effects/effects.js", f"[{', '.join(f'page.{call}' for call in said)}]") == list(said.values())


@node
def test_heads_with_much_weight_and_little_effect_stand_out():
    points = [(0.6, 0.4), (0.6, 0.05), (0.5, 0.3), (0.4, 0.25), (0.05, 0.0), (0.0, 0.0)]
    given = [{"layer": 0, "head": n, "weight": weight, "effect": moved} for n, (weight, moved) in enumerate(points)]
    assert [one["head"] for one in ran("effects/effects.js", f"page.idle({json.dumps(given)})")] == [1]
    assert ran("effects/effects.js", "page.idle([])") == []


@node
def test_labels_of_the_scatter_do_not_meet_and_the_nearest_dot_is_meant():
    dots = [{"layer": 0, "head": n, "weight": 1 + n, "effect": 1, "x": 100 + 9 * n, "y": 50} for n in range(3)]
    dots.append({"layer": 1, "head": 0, "weight": 9, "effect": 9, "x": 315, "y": 20})
    found = ran("effects/pane.js", f"page.labels({json.dumps(dots)}, {{layer: 0, head: 1}}, new Set())")
    places = [(one["name"], one["anchor"]) for one in found]
    assert places == [("L0 H1", "middle"), ("L1 H0", "end"), ("L0 H0", "end"), ("L0 H2", "start")]
    crowd = json.dumps([dot | {"x": 100, "y": 50} for dot in dots])
    assert len(ran("effects/pane.js", f"page.labels({crowd}, {{layer: 0, head: 1}}, new Set())")) == 3, (
        "of 4, at one place"
    )
    assert ran("effects/pane.js", f"page.nearest({json.dumps(dots)}, {{x: 310, y: 22}})")["layer"] == 1
    assert ran("effects/pane.js", f"page.nearest({json.dumps(dots)}, {{x: 200, y: 120}})") is None


# ----------------------------------------------------------------------------------------------------------- a browser


def measured_sentence(found: dict[str, Any]) -> list[str]:
    """The figures of the page's sentence, from Python's numbers."""
    mean = sum(map(abs, found["controls"])) / len(found["controls"])
    shares = [f"{100 * value:#.3g}%" for value in (found["effect"], mean)]
    return [f"{found['weight']:.2f}", *shares, f"p = {found['p_value']:.3g}"]


def test_page_measures_a_link_and_colours_the_atlas_by_it(page, session, measured):
    expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
    theirs = answers.effects(measured, **LINK)["links"][0]
    with serving([session]) as site:
        ready(page, f"{site}/#layer=1&head=2&token=5&key=2&lang=en")
        foot = page.locator(".foot .warning")
        expect(foot).to_contain_text("not why the model answers")
        expect(page.locator("[data-role=measure] option[value=effect]")).to_be_disabled()
        page.click("[data-role=effect-link]")
        for words in ("Layer 1, head 2", *measured_sentence(theirs)):
            expect(foot).to_contain_text(words)
        page.click("[data-role=effect-heads]")
        heads = sum(layer.view.sizes[1] for layer in session.layers)
        expect(page.locator(".scatter .dot")).to_have_count(heads)
        page.select_option("[data-role=measure]", "effect")
        effects = unpacked(answers.effects(session, **LINK)["heads"]["effects"])
        expect(page.locator(".atlas .readout")).to_contain_text(f"link effect (%) {100 * float(effects[1, 2]):.2f}")
        place = page.locator('.scatter .dot[data-layer="0"][data-head="1"]').bounding_box()
        page.mouse.click(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        expect(foot).to_contain_text("Layer 0, head 1")
        page.set_viewport_size({"width": 480, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= 480


def test_file_shows_what_was_measured_and_says_where_nothing_was(page, measured, tmp_path):
    expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
    found = answers.effects(measured, **LINK)["links"][0]
    write_html(measured, tmp_path / "page.html")
    ready(page, f"{(tmp_path / 'page.html').as_uri()}#layer=1&head=2&token=4&key=1&lang=en")
    expect(page.locator(".effect")).to_contain_text("No effect of this link was measured")
    page.locator(".effect button").click()
    for words in measured_sentence(found):
        expect(page.locator(".foot .warning")).to_contain_text(words)
    expect(page.locator("[data-role=effect-link]")).to_have_count(0)


def test_capture_says_why_its_links_cannot_be_measured(page, session):
    expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
    with serving([session_of(session.capture)]) as site:
        ready(page, f"{site}/#layer=1&head=2&token=5&key=2&lang=ko")
        expect(page.locator(".effect .note")).to_contain_text("캡처 파일에는 모델이 없습니다")
        expect(page.locator("[data-role=effect-link]")).to_have_count(0)
