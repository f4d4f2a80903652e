"""What is said of the package where it is found, and what its source archive holds beside it."""

import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_every_python_that_is_supported_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [line.removeprefix("Programming Language :: Python :: ") for line in project["classifiers"]]
    assert [name for name in named if name.startswith("3.")] == ["3.11", "3.12", "3.13", "3.14"]
    assert project["requires-python"] == ">=3.11"
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert not any(name.startswith("License ::") for name in project["classifiers"])  # beside `license` it is refused


def test_source_archive_holds_what_tests_and_measures_it():
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    grafted = [words[1] for words in lines if words[0] == "graft"]
    assert grafted == ["tests", "docs", "benchmarks", "tutorials"]
    assert all((ROOT / name).is_dir() for name in grafted)
    assert ["include", "*.md", "Makefile", "mkdocs.yml"] in lines


def test_lessons_are_installed_as_data_of_the_package(monkeypatch):
    pytest.importorskip("setuptools", reason="needs setuptools, which pip brings along to build")
    made = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda **given: made.append(given))
    runpy.run_path(str(ROOT / "setup.py"))
    (given,) = made
    assert given["package_dir"] == {"regard.tutorials": "tutorials"}
    assert {"regard", "regard.locale", "regard.cli", "regard.tutorials"} <= set(given["packages"])
    assert len(list((ROOT / "tutorials").glob(*given["package_data"]["regard.tutorials"]))) >= 2


def test_every_file_of_the_page_is_data_of_the_package():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    package = ROOT / "regard"
    installed = {path for pattern in tools["package-data"]["regard"] for path in package.glob(pattern)}
    page = {path for path in (package / "explorer" / "page").rglob("*") if path.is_file()}
    assert page - installed == set()
    assert {path.suffix for path in page} == {".html", ".css", ".js"}
