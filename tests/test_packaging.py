"""What is said of the package where it is found, and what its source archive holds beside it."""

import tomllib
from pathlib import Path

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
    assert grafted == ["tests", "docs", "benchmarks"]
    assert all((ROOT / name).is_dir() for name in grafted)
    assert ["include", "*.md", "Makefile"] in lines
