"""The Makefile: .venv is made once, from scratch where it has to be, and an interrupted creation is never used.

A shell script stands in for Python, so that nothing is installed and no network is used.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# Notes each call, and copies itself as `-m venv` does. Fails at the package that the file `broken` names.
PYTHON = """#!/bin/sh
case "$*" in "-c "*) exit 0 ;; esac
echo "$@" >>calls
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *"$(cat broken 2>/dev/null || echo none)"*) exit 1 ;;
esac
"""
TEST = "-m pytest -n auto --maxprocesses=4 --dist loadfile"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)
    return folder


def make(checkout: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """Run make; return its exit status, what it printed, and the calls of Python but for their common options."""
    ours = {k: v for k, v in os.environ.items() if k not in {"PYTHON", "TORCH", "ARGS"} and not k.startswith("M")}
    path = f"{checkout.parent}{os.pathsep}{os.environ['PATH']}"
    command = ["make", *arguments]
    done = subprocess.run(command, cwd=checkout, env=ours | {"PATH": path}, capture_output=True, text=True, check=False)
    calls = checkout / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    short = [line.replace(" --quiet --disable-pip-version-check --no-input", "") for line in lines]
    return done.returncode, done.stdout + done.stderr, short


def test_first_run_installs_torch_before_regard_and_the_next_runs_at_once(checkout):
    status, printed, calls = make(checkout, "test")
    assert status == 0, printed
    assert calls[:3] == ["-m venv .venv", "-m pip install torch==2.13.0", "-m pip install -e .[dev]"]
    assert calls[-1] == TEST
    assert make(checkout, "test", "ARGS=-k causal")[2] == [f"{TEST} -k causal"]
    assert make(checkout, "test-full")[2] == [f"{TEST} --full-grids"]
    assert make(checkout, "explore")[2] == [f"{TEST} --hypothesis-profile=explore"]


@pytest.mark.parametrize("package", ["torch", "regard", "einops"])
def test_creation_that_stopped_halfway_starts_from_scratch(checkout, package):
    (checkout / "broken").write_text("[dev]" if package == "regard" else package)
    assert make(checkout, "lint")[0] != 0
    (checkout / "broken").unlink()
    (checkout / ".venv" / "half-unpacked").touch()
    assert make(checkout, "lint")[2][:2] == ["-m venv .venv", "-m pip install torch==2.13.0"]
    assert not (checkout / ".venv" / "half-unpacked").exists()


def test_newer_pyproject_updates_and_an_update_that_stopped_starts_from_scratch(checkout):
    make(checkout, "lint", "TORCH=torch>=2.11 --pre")
    os.utime(checkout / ".venv" / "ready", (1, 1))
    assert make(checkout, "lint")[2][0] == "-m pip install -e .[dev]"
    assert make(checkout, "lint", "TORCH=torch>=2.11 --pre")[2][0] == "-m ruff check ."
    os.utime(checkout / ".venv" / "ready", (1, 1))
    (checkout / "broken").write_text("[dev]")
    assert make(checkout, "lint")[0] != 0
    (checkout / "broken").unlink()
    assert make(checkout, "lint")[2][0] == "-m venv .venv"


def test_another_torch_and_a_moved_checkout_start_from_scratch(checkout):
    make(checkout, "lint")
    calls = make(checkout, "lint", "TORCH=torch>=2.11 --pre")[2]
    assert calls[:2] == ["-m venv .venv", "-m pip install torch>=2.11 --pre"]
    moved = checkout.rename(checkout.with_name("moved away"))
    assert make(moved, "lint")[2][0] == "-m venv .venv"


def test_environment_that_make_did_not_create_is_left_alone(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    assert make(checkout, "lint")[::2] == (2, [])
    assert (checkout / ".venv" / "bin").is_dir()


def test_old_python_is_refused(checkout):
    old = f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 10, 14); $2"\n'
    (checkout.parent / "python3").write_text(old)
    status, printed, _ = make(checkout, "lint")
    assert status != 0
    assert "3.10" in printed
    assert not (checkout / ".venv").exists()


def test_help_lists_every_command(checkout):
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    listed = [line.split()[1] for line in make(checkout)[1].splitlines() if line.startswith("make ")]
    assert listed == [name for name in phony.split()[1:] if name != "FORCE"]
