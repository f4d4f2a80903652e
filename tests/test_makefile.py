"""The Makefile: .venv is made once, from scratch where it has to be, and never used half-made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# Stands in for Python: notes each call, copies itself as `-m venv` does, and fails at what the file `broken` names.
PYTHON = """#!/bin/sh
case "$*" in "-c "*) exit 0 ;; esac
echo "$*" | sed 's/ --quiet .*--no-input//' >>calls
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *"$(cat broken 2>/dev/null || echo nothing)"*) exit 1 ;;
esac
"""
TEST = "-m pytest -n auto --maxprocesses=4 --dist loadfile --no-loadscope-reorder"
CREATE = ["-m venv .venv", "-m pip install torch==2.13.0", "-m pip install -e .[dev]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)
    return folder


def make(checkout: Path, *arguments: str, status: int = 0) -> tuple[str, list[str]]:
    """Run make; return what it printed and the calls of Python."""
    (checkout / "calls").write_text("")
    environment = {"PATH": f"{checkout.parent}{os.pathsep}{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
    result = subprocess.run(["make", *arguments], cwd=checkout, env=environment, capture_output=True, check=False)
    assert result.returncode == status, result.stderr
    return (result.stdout + result.stderr).decode(), (checkout / "calls").read_text().splitlines()


def test_first_run_installs_torch_before_regard_and_the_next_runs_at_once(checkout):
    _, calls = make(checkout, "test")
    assert (calls[:3], calls[-1]) == (CREATE, TEST)
    assert make(checkout, "test", "ARGS=-k causal")[1] == [f"{TEST} -k causal"]
    assert make(checkout, "test-full")[1] == [f"{TEST} --full-grids"]
    assert make(checkout, "explore")[1] == [f"{TEST} --hypothesis-profile=explore"]


@pytest.mark.parametrize("package", ["torch==", "[dev]", "einops"])
def test_creation_that_stopped_halfway_starts_from_scratch(checkout, package):
    (checkout / "broken").write_text(package)
    make(checkout, "lint", status=2)
    (checkout / "broken").unlink()
    (checkout / ".venv" / "half-unpacked").touch()
    assert make(checkout, "lint")[1][:3] == CREATE
    assert not (checkout / ".venv" / "half-unpacked").exists()


def test_newer_pyproject_updates_and_an_update_that_stopped_starts_from_scratch(checkout):
    make(checkout, "lint")
    os.utime(checkout / ".venv" / "ready", (1, 1))
    assert make(checkout, "lint")[1][0] == CREATE[2]
    os.utime(checkout / ".venv" / "ready", (1, 1))
    (checkout / "broken").write_text("[dev]")
    make(checkout, "lint", status=2)
    (checkout / "broken").unlink()
    assert make(checkout, "lint")[1][:3] == CREATE


def test_another_torch_and_a_moved_checkout_start_from_scratch(checkout):
    make(checkout, "lint")
    assert make(checkout, "lint", "TORCH=torch>=2.11 --pre")[1][1] == "-m pip install torch>=2.11 --pre"
    assert make(checkout, "lint")[1][0] == "-m ruff check .", "without TORCH= what is there is used"
    assert make(checkout.rename(checkout.with_name("moved away")), "lint")[1][:3] == CREATE


def test_environment_that_make_did_not_create_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "pyvenv.cfg").touch()
    assert make(checkout, "lint", status=2)[1] == []
    assert (checkout / ".venv" / "pyvenv.cfg").exists()


def test_old_python_is_refused(checkout):
    version = "import sys; sys.version_info = (3, 10, 14); sys.version = '3.10.14 (main)'"
    (checkout.parent / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{version}; $2"\n')
    assert "3.10.14" in make(checkout, "lint", status=2)[0]
    assert not (checkout / ".venv").exists()
