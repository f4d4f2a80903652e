"""Turns of tests: those that are alone, those that are not, and what a run of several processes makes of the mark."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from select import select

import pytest
from taking_turns import Turns

pytest.importorskip("fcntl", reason="locks files as Unix does")
HERE = Path(__file__).resolve().parent

# Asks for a room and enters it, and writes so; leaves it when its input ends.
VISITOR = """
import sys
from taking_turns import Turns
turns = Turns(sys.argv[1])
print("asks", flush=True)
with turns.taken(alone=sys.argv[2] == "alone"):
    print("in", flush=True)
    sys.stdin.read()
"""


class Visitor:
    """A process that asks for a room, alone or not; it has asked once this is made."""

    def __init__(self, room: Path, how: str) -> None:
        command = [sys.executable, "-c", VISITOR, str(room), how]
        self.process = subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self.process.stdout.readline() == b"asks\n"

    def inside(self, within: float = 120) -> bool:
        """Whether it gets into the room within so many seconds."""
        there, _, _ = select([self.process.stdout], [], [], within)
        return bool(there) and self.process.stdout.readline() == b"in\n"

    def leave(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(120) == 0

    def kill(self) -> None:
        self.process.kill()
        with self.process:  # closes its pipes
            pass


@pytest.fixture
def visit(tmp_path: Path) -> Iterator[Callable[[str], Visitor]]:
    """Start a visitor of the room of this test."""
    (tmp_path / "room").touch()
    started: list[Visitor] = []

    def visit(how: str) -> Visitor:
        started.append(Visitor(tmp_path / "room", how))
        return started[-1]

    yield visit
    for visitor in started:
        visitor.kill()


def free(path: Path, byte: int) -> bool:
    """Whether nobody holds a byte of the file, nor has it shared."""
    import fcntl

    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True


def test_tests_that_do_not_measure_are_in_the_room_together(visit):
    assert [visit("among others").inside() for _ in range(3)] == [True, True, True]


@pytest.mark.parametrize(
    ("first", "second"), [("alone", "among others"), ("among others", "alone"), ("alone", "alone")]
)
def test_one_that_is_alone_and_another_wait_for_each_other(visit, first, second):
    inner = visit(first)
    assert inner.inside()
    outer = visit(second)
    assert not outer.inside(within=0.2)
    inner.leave()
    assert outer.inside()


def test_who_comes_later_waits_behind_one_that_waits_to_be_alone(visit, tmp_path):
    inner = visit("among others")
    assert inner.inside()
    waiting = visit("alone")
    assert not waiting.inside(within=0.2)
    assert not free(tmp_path / "room", byte=0)  # it stands in the door
    later = visit("among others")
    assert not later.inside(within=0.2)
    inner.leave()
    assert waiting.inside()
    waiting.leave()
    assert later.inside()


def test_killed_process_leaves_the_room(visit):
    killed = visit("alone")
    assert killed.inside()
    killed.kill()
    assert visit("alone").inside()


def test_room_is_left_when_a_test_fails(tmp_path):
    (tmp_path / "room").touch()
    turns = Turns(str(tmp_path / "room"))
    with pytest.raises(ZeroDivisionError), turns.taken(alone=True):
        1 / 0  # noqa: B018
    turns.close()
    assert free(tmp_path / "room", byte=0)
    assert free(tmp_path / "room", byte=1)


# Each test writes when it begins and when it ends, and lasts long enough for another to begin in between.
SUITE = """
import os, time, pytest

def spend(name):
    with open({log!r}, "a") as log:
        print("begin", name, file=log, flush=True)
        time.sleep(0.02)
        print("end", name, file=log, flush=True)

@pytest.mark.alone
@pytest.mark.parametrize("n", range(5))
def test_alone(n):
    spend("alone")

@pytest.mark.parametrize("n", range(20))
def test_other(n):
    spend("other")
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], list[str]]:
    """Run a suite of 5 tests that are alone and 20 others with an option; what they have written, in order."""
    log = tmp_path / "log"
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['taking_turns']\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\nfilterwarnings = error\n")
    (tmp_path / "test_suite.py").write_text(SUITE.format(log=str(log)))
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def run(option: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", option]
        environment = ours | {"PYTHONPATH": str(HERE), "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert "25 passed" in done.stdout, done.stdout + done.stderr
        return log.read_text().splitlines()

    return run


def crowded(lines: list[str]) -> tuple[int, int]:
    """How many tests began while others ran: of those marked alone or beside one, of the rest."""
    running, beside_alone, rest = [], 0, 0
    for line in lines:
        event, name = line.split()
        if event == "end":
            running.remove(name)
            continue
        if running and "alone" in (name, *running):
            beside_alone += 1
        elif running:
            rest += 1
        running.append(name)
    return beside_alone, rest


def test_processes_of_a_run_let_marked_tests_run_alone(run, tmp_path):
    pytest.importorskip("xdist", reason="needs pytest-xdist: pip install pytest-xdist")
    beside_alone, _ = crowded(run("-n2"))
    assert beside_alone == 0
    assert list(tmp_path.glob("regard-turns-*")) == [], "the file that was locked is gone"


def test_run_in_one_process_takes_no_turns(run):
    assert crowded(run("-v")) == (0, 0)
