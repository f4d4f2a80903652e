"""Damage files and open them: nothing may be raised by accident, hang, fill the memory, or change a number in silence.

    python tests/fuzz/run.py --cases 20000 --seed 14        # make fuzz
    python tests/fuzz/run.py --seed 14 --case 4711          # one of them again, with its traceback; --keep DIR keeps it

A case is drawn from the seed and its number alone. Cases run in a worker process, which is replaced where it dies or
hangs; each may take 5 s of processor time and 500 MB more than before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # this checkout's regard, and the tests' twins

from fuzz.mutations import Damage, damage_file  # noqa: E402

SECONDS = 5.0  # of processor time; a busy machine takes longer by the clock
WAIT = 60.0  # seconds by the clock until a worker is given up
BYTES = 500_000_000
ROOM = 2 * BYTES  # of address space beyond what a worker has: whoever takes more gets a MemoryError, not the machine
KINDS = ("captures", "models", "tokenizers", "arrays", "images")


@dataclass(frozen=True)
class Outcome:
    """What came of a case. problem: in words, None where all is well; trace: of what was raised by accident."""

    kind: str
    words: str
    opened: bool
    problem: str | None = None
    trace: str = ""


# ------------------------------------------------------------------------------------------------------------ one case


def make_case(corpus: Path, seed: int, number: int, folder: Path) -> tuple[str, Path, Path, Damage]:
    """Draw a case: its kind, the undamaged file or directory, the damaged one in `folder`, and what was done to it."""
    random = Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    good = random.choice(sorted((corpus / kind).iterdir()))
    bad = folder / good.name
    if good.is_file():
        shutil.copyfile(good, bad)
        return kind, good, bad, damage_file(bad, random)
    shutil.copytree(good, bad)
    return kind, good, bad, damage_file(random.choice(sorted(bad.iterdir())), random)


@cache
def good_numbers(kind: str, path: Path) -> Any:
    from fuzz.opening import OPENERS

    return OPENERS[kind](path)


def run_case(corpus: Path, seed: int, number: int, *, keep: Path | None = None, limited: bool = True) -> Outcome:
    """Make a case and open it. keep: a folder for the damaged files.  limited: is time and memory watched?"""
    from fuzz.opening import OPENERS, is_refusal

    with tempfile.TemporaryDirectory() as temporary:
        kind, good, bad, damage = make_case(corpus, seed, number, Path(temporary))
        if keep is not None:
            shutil.copytree(temporary, keep, dirs_exist_ok=True)
        expected = good_numbers(kind, good) if damage.rule == "same" else None
        words = f"{good.name} {damage.words}"
        with limits() if limited else nullcontext(lambda: None) as used:
            try:
                numbers = OPENERS[kind](bad)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                if is_refusal(error):
                    numbers, refused = None, True
                else:
                    said = f"{type(error).__name__}: {error}"
                    return Outcome(kind, words, False, f"{said:.300}", traceback.format_exc())
            else:
                refused = kind == "arrays" and all(code == 2 for code, _ in numbers)
        problem = used()
        if problem is None and not refused and damage.rule == "refused":
            problem = "it opens, and its checksums do not fit"
        if problem is None and not refused and damage.rule == "same" and not _same(kind, numbers, expected, good, bad):
            problem = "it opens, with other numbers"
        return Outcome(kind, words, not refused, problem)


def _same(kind: str, numbers: Any, expected: Any, good: Path, bad: Path) -> bool:
    from fuzz.opening import same

    if kind == "arrays":  # what is printed names the file
        numbers, expected = (
            [(code, text.replace(str(path), "")) for code, text in found]
            for found, path in ((numbers, bad), (expected, good))
        )
    return same(numbers, expected)


@contextmanager
def limits() -> Iterator[Any]:
    """Gives a function that says afterwards what was taken too much, or None."""
    _forget_peak()
    before, start = _memory("VmRSS"), time.process_time()
    kept = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ROOM, kept[1]))

    def used() -> str | None:
        took, more = time.process_time() - start, _memory("VmHWM") - before
        if took > SECONDS:
            return f"it took {took:.1f} s"
        return f"it took {more / 1e6:.0f} MB" if more > BYTES else None

    try:
        yield used
    finally:
        resource.setrlimit(resource.RLIMIT_AS, kept)


def _forget_peak() -> None:
    """Make Linux forget how much memory the process had at most so far."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


# -------------------------------------------------------------------------------------------------------- many of them


def work(pipe: Connection, corpus: Path, seed: int) -> None:
    """A worker: numbers in, outcomes out. What Rust prints of its panics goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch

    torch.set_num_threads(1)
    for kind in KINDS:  # imports, caches and thread pools are not what a case takes
        for good in sorted((corpus / kind).iterdir()):
            good_numbers(kind, good)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        pipe.send(run_case(corpus, seed, number))


class Worker:
    """A worker process, started again where it hangs or dies."""

    def __init__(self, corpus: Path, seed: int) -> None:
        self.corpus, self.seed = corpus, seed
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.corpus, self.seed), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"

    def ask(self, number: int) -> Outcome:
        self.pipe.send(number)
        kind = KINDS[number % len(KINDS)]
        try:
            if self.pipe.poll(WAIT):
                found = self.pipe.recv()
                assert isinstance(found, Outcome)
                return found
            problem = f"it hung for {WAIT:.0f} s"
        except EOFError:
            self.process.join()
            problem = f"the process died with {self.process.exitcode}"
        self.process.kill()
        self.process.join()
        self._start()
        return Outcome(kind, "", False, problem)

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def run_all(corpus: Path, seed: int, numbers: list[int]) -> int:
    """Run cases in a worker, with a line that says how far; the number of those that went wrong."""
    worker, start = Worker(corpus, seed), time.monotonic()
    table: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for done, number in enumerate(numbers, 1):
        found = worker.ask(number)
        state = "wrong" if found.problem else "opened" if found.opened else "refused"
        table[found.kind, state] += 1
        if found.problem:
            wrong += 1
            print(f"case {number}, {found.kind}: {found.words}\n    {found.problem}", flush=True)
            if found.trace:
                print("    " + "\n    ".join(line[:200] for line in found.trace.strip().split("\n")[-10:]), flush=True)
        if done % 500 == 0 or done == len(numbers):
            rate = done / (time.monotonic() - start)
            print(f"{done:,} of {len(numbers):,} cases, {wrong} wrong, {rate:.0f} a second", flush=True)
    worker.end()
    print(f"\n{'kind':12}{'opened':>9}{'refused':>9}{'wrong':>9}")
    for kind in KINDS:
        print(f"{kind:12}" + "".join(f"{table[kind, state]:9,}" for state in ("opened", "refused", "wrong")))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=KINDS, help="only cases of this kind")
    parser.add_argument("--case", type=int, help="run this case alone, in this process")
    parser.add_argument("--corpus", type=Path, help="a corpus that is there already, or is to be kept")
    parser.add_argument("--keep", type=Path, help="with --case: a folder for the damaged files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        corpus = given.corpus or Path(temporary, "corpus")
        if not corpus.exists():
            from fuzz.corpus import write_corpus

            write_corpus(corpus)
        if given.case is None:
            drawn = range(given.first, given.first + given.cases)
            numbers = [n for n in drawn if given.kind in (None, KINDS[n % len(KINDS)])]
            return min(1, run_all(corpus, given.seed, numbers))
        found = run_case(corpus, given.seed, given.case, keep=given.keep)
        print(
            found.kind, found.words, found.problem or ("opened" if found.opened else "refused"), found.trace, sep="\n"
        )
        return int(found.problem is not None)


if __name__ == "__main__":
    sys.exit(main())
